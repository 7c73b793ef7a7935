//! What every link promises: one suite, run over all of them.

use highwire_link::{
    Burst, Clock, Impaired, Impairments, Inbox, Link, ListField, Network, NetworkConfig, Recorded, Recording,
    SendError, Traced, UdpLink, UdpOptions,
};
use std::any::Any;
use std::io::Write;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// A place where links can be made that reach each other.
struct Ground {
    make: Box<dyn Fn() -> Box<dyn Link>>,
    /// Lets time pass, where that is not the machine's own.
    pass_time: Box<dyn Fn()>,
    /// An address where nobody listens as long as the other value lives.
    closed: Box<dyn Fn() -> (SocketAddr, Box<dyn Any>)>,
    /// A packet of this size goes; one of `refused_bytes` does not.
    large_bytes: usize,
    refused_bytes: usize,
    /// Packets may come by several lists, and then overtake each other.
    has_lists: bool,
}

fn udp(address: &'static str, options: UdpOptions) -> Option<Ground> {
    let address: SocketAddr = address.parse().unwrap();
    if let Err(error) = UdpLink::bind(address, options) {
        assert!(address.is_ipv6(), "{error}");
        // Not by `eprintln`: the test runner would swallow what is said there.
        let mut loudly = std::io::stderr();
        writeln!(loudly, "SKIPPED: this machine has no IPv6 ({error}), the suite was not run over it").unwrap();
        return None;
    }
    Some(Ground {
        make: Box::new(move || Box::new(UdpLink::bind(address, options).unwrap())),
        pass_time: Box::new(|| {}),
        closed: Box::new(move || {
            // Held, so that no other test gets the port, and deaf to all but itself.
            let socket = UdpSocket::bind(address).unwrap();
            let nobody = socket.local_addr().unwrap();
            socket.connect(nobody).unwrap();
            (nobody, Box::new(socket))
        }),
        large_bytes: 60_000,
        refused_bytes: 65_508,
        has_lists: options.lists.is_some(),
    })
}

fn network() -> Network {
    let (latency, jitter) = (Duration::from_micros(100), Duration::from_micros(30));
    let rate = Some(1_000_000_000);
    Network::new(NetworkConfig { seed: 1, latency, jitter, bytes_per_second: rate, mtu: 9000, ..Default::default() })
}

fn simulated(wrap: impl Fn(Box<dyn Link>, Clock) -> Box<dyn Link> + 'static) -> Option<Ground> {
    let network = network();
    let (for_time, for_closed) = (network.clone(), network.clone());
    Some(Ground {
        make: Box::new(move || {
            let link = network.link("192.0.2.1:0".parse().unwrap());
            wrap(Box::new(link), Clock::Simulated(network.clone()))
        }),
        pass_time: Box::new(move || for_time.advance_to(for_time.next_arrival().unwrap_or(for_time.now()))),
        closed: Box::new(move || (for_closed.link("192.0.2.1:0".parse().unwrap()).local_address(), Box::new(()))),
        large_bytes: 9000,
        refused_bytes: 9001,
        has_lists: false,
    })
}

fn wrapped(ground: Option<Ground>, wrap: impl Fn(Box<dyn Link>) -> Box<dyn Link> + 'static) -> Option<Ground> {
    let ground = ground?;
    let make = ground.make;
    Some(Ground { make: Box::new(move || wrap(make())), ..ground })
}

fn unimpaired(link: Box<dyn Link>, clock: Clock) -> Box<dyn Link> {
    Box::new(Impaired::new(link, Impairments::default(), 1, clock))
}

impl Ground {
    fn link(&self) -> Box<dyn Link> {
        (self.make)()
    }

    /// Packets in an order in which they can be compared.
    fn ordered<P: Ord>(&self, packets: impl IntoIterator<Item = P>) -> Vec<P> {
        let mut packets: Vec<P> = packets.into_iter().collect();
        if self.has_lists {
            packets.sort();
        }
        packets
    }

    /// Receives until `count` packets came, or none came for long.
    fn receive(&self, link: &mut dyn Link, count: usize) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut inbox = Inbox::new();
        let mut packets = Vec::new();
        let start = Instant::now();
        while packets.len() < count && start.elapsed() < Duration::from_secs(5) {
            (self.pass_time)();
            let said = link.receive(&mut inbox).unwrap();
            assert_eq!(said, inbox.len());
            assert_eq!(said, inbox.packets().count());
            packets.extend(inbox.packets().map(|(from, packet)| (from, packet.to_vec())));
        }
        packets
    }

    /// Nothing more comes.
    fn expect_silence(&self, link: &mut dyn Link) {
        let mut inbox = Inbox::new();
        for _ in 0..5 {
            (self.pass_time)();
            assert_eq!(link.receive(&mut inbox), Ok(0));
            assert!(inbox.is_empty());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends the bursts, all at once, and expects exactly their packets, in order.
    fn expect_through(&self, left: &mut dyn Link, right: &mut dyn Link, bursts: &[Burst<'_>]) {
        assert_eq!(left.send(bursts), Ok(bursts.len()));
        let expected: Vec<&[u8]> = self.ordered(bursts.iter().flat_map(Burst::packets));
        let packets = self.receive(right, expected.len());
        let sizes = |packets: &[&[u8]]| packets.iter().map(|packet| packet.len()).collect::<Vec<_>>();
        let seen: Vec<&[u8]> = self.ordered(packets.iter().map(|(_, packet)| packet.as_slice()));
        assert_eq!(sizes(&seen), sizes(&expected));
        assert!(seen == expected, "the sizes are right, the bytes are not");
        assert!(packets.iter().all(|&(from, _)| from == left.local_address()));
    }
}

/// Bytes that differ from one place to the next and from one `salt` to the next.
fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + salt * 7919).wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}

fn single_packets_of_every_size(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let to = right.local_address();
    let packets: Vec<Vec<u8>> = (1..=1472).map(|size| pattern(size, size)).collect();
    for volley in packets.chunks(32) {
        let bursts: Vec<_> = volley.iter().map(|packet| Burst::single(to, packet)).collect();
        ground.expect_through(&mut left, &mut right, &bursts);
    }
    ground.expect_silence(&mut right);
}

fn one_packet_at_a_time(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    for size in [1, 2, 63, 64, 65, 1200, 1472] {
        let bytes = pattern(size, size);
        // A segment longer than the burst is one packet all the same.
        for segment in [size, size + 1, usize::MAX] {
            let burst = Burst { to: right.local_address(), bytes: &bytes, segment };
            ground.expect_through(&mut left, &mut right, &[burst]);
        }
    }
}

fn a_large_packet(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let bytes = pattern(ground.large_bytes, 3);
    let burst = Burst::single(right.local_address(), &bytes);
    ground.expect_through(&mut left, &mut right, &[burst]);
}

fn bursts_of_every_length(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let to = right.local_address();
    for count in (1..=66).chain([127, 128, 129]) {
        // The last packet whole, shorter by one, and of a single byte.
        for len in [count * 100, count * 100 - 1, count * 100 - 99] {
            let bytes = pattern(len, count);
            ground.expect_through(&mut left, &mut right, &[Burst { to, bytes: &bytes, segment: 100 }]);
        }
    }
    for (count, segment) in [(44, 1472), (30, 1400), (64, 1000)] {
        let bytes = pattern(count * segment - 77, count);
        ground.expect_through(&mut left, &mut right, &[Burst { to, bytes: &bytes, segment }]);
    }
    ground.expect_silence(&mut right);
}

fn bursts_longer_than_a_call_takes(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let bytes = pattern(left.burst_bytes_max() + 10_001, 5);
    let burst = Burst { to: right.local_address(), bytes: &bytes, segment: 1472 };
    ground.expect_through(&mut left, &mut right, &[burst]);
}

fn many_bursts_in_one_call(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let to = right.local_address();
    // More bursts than one system call takes, of all kinds, some of them empty.
    let contents: Vec<Vec<u8>> = (0..100).map(|i| pattern([0, 1, 50, 150, 275][i % 5], i)).collect();
    let bursts: Vec<_> = contents.iter().map(|bytes| Burst { to, bytes, segment: 50 }).collect();
    for _ in 0..5 {
        ground.expect_through(&mut left, &mut right, &bursts);
    }
    assert_eq!(left.send(&[]), Ok(0));
    let nothing = Burst { to, bytes: &[], segment: 0 };
    assert_eq!(left.send(&[nothing, nothing]), Ok(2));
    ground.expect_silence(&mut right);
}

fn bursts_to_several_places_in_one_call(ground: &Ground) {
    let (mut left, mut right, mut third) = (ground.link(), ground.link(), ground.link());
    let bytes = pattern(1000, 8);
    let (to_right, to_third) = (right.local_address(), third.local_address());
    let bursts = [
        Burst { to: to_right, bytes: &bytes, segment: 300 },
        Burst { to: to_third, bytes: &bytes, segment: 400 },
        Burst { to: to_right, bytes: &bytes[..10], segment: 10 },
    ];
    assert_eq!(left.send(&bursts), Ok(3));
    let from = left.local_address();
    let expected = |indices: &[usize]| -> Vec<(SocketAddr, Vec<u8>)> {
        ground.ordered(indices.iter().flat_map(|&i| bursts[i].packets()).map(|packet| (from, packet.to_vec())))
    };
    assert_eq!(ground.ordered(ground.receive(&mut right, 5)), expected(&[0, 2]));
    assert_eq!(ground.ordered(ground.receive(&mut third, 3)), expected(&[1]));
    ground.expect_silence(&mut right);
}

fn answers_reach_the_sender(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    assert_ne!(left.local_address(), right.local_address());
    assert_ne!(left.local_address().port(), 0);
    left.send(&[Burst::single(right.local_address(), b"question")]).unwrap();
    let (from, question) = ground.receive(&mut right, 1).remove(0);
    assert_eq!((from, question.as_slice()), (left.local_address(), &b"question"[..]));
    right.send(&[Burst::single(from, b"answer")]).unwrap();
    assert_eq!(ground.receive(&mut left, 1), [(right.local_address(), b"answer".to_vec())]);
}

fn senders_are_told_apart(ground: &Ground) {
    let mut right = ground.link();
    let mut senders: Vec<_> = (0..5).map(|_| ground.link()).collect();
    for (i, sender) in senders.iter_mut().enumerate() {
        let bytes = [i as u8; 25];
        sender.send(&[Burst { to: right.local_address(), bytes: &bytes, segment: 10 }]).unwrap();
    }
    let packets = ground.receive(&mut right, 15);
    assert_eq!(packets.len(), 15);
    for (i, sender) in senders.iter().enumerate() {
        let own: Vec<_> = packets.iter().filter(|(from, _)| *from == sender.local_address()).collect();
        assert_eq!(own.iter().map(|(_, packet)| packet.len()).collect::<Vec<_>>(), [10, 10, 5]);
        assert!(own.iter().all(|(_, packet)| packet.iter().all(|&byte| byte == i as u8)));
    }
}

fn silence_leaves_the_inbox_empty(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    ground.expect_silence(&mut right);
    // What was in the inbox before is gone, even where nothing new came.
    let mut inbox = Inbox::new();
    left.send(&[Burst::single(right.local_address(), b"once")]).unwrap();
    let start = Instant::now();
    while inbox.is_empty() {
        assert!(start.elapsed().as_secs() < 5, "nothing came");
        (ground.pass_time)();
        left.receive(&mut inbox).unwrap();
        right.receive(&mut inbox).unwrap();
    }
    assert_eq!(right.receive(&mut inbox), Ok(0));
    assert_eq!(inbox.packets().count(), 0);
}

fn an_inbox_is_used_again_and_again(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let mut inbox = Inbox::with_capacity(3, 65_536);
    for round in 0..50 {
        // Long and short packets in turn: none shows what the one before left behind.
        let bytes = pattern(if round % 2 == 0 { 900 } else { 7 }, round);
        left.send(&[Burst { to: right.local_address(), bytes: &bytes, segment: 300 }]).unwrap();
        let mut seen = Vec::new();
        let start = Instant::now();
        while seen.len() < bytes.len() && start.elapsed().as_secs() < 5 {
            (ground.pass_time)();
            left.receive(&mut Inbox::with_capacity(1, 1)).unwrap();
            right.receive(&mut inbox).unwrap();
            inbox.for_each_mut(|from, packet| {
                assert_eq!(from, left.local_address());
                seen.extend_from_slice(packet);
                packet.fill(0xee);
            });
        }
        assert_eq!(seen, bytes);
    }
}

fn a_small_inbox_gets_the_rest_later(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let packets: Vec<Vec<u8>> = (0..20).map(|i| pattern(40 + i, i)).collect();
    let bursts: Vec<_> = packets.iter().map(|packet| Burst::single(right.local_address(), packet)).collect();
    left.send(&bursts).unwrap();
    let mut inbox = Inbox::with_capacity(3, 65_536);
    let (mut seen, mut calls) = (Vec::new(), 0);
    let start = Instant::now();
    while seen.len() < 20 && start.elapsed().as_secs() < 5 {
        (ground.pass_time)();
        left.receive(&mut Inbox::with_capacity(1, 1)).unwrap();
        right.receive(&mut inbox).unwrap();
        seen.extend(inbox.packets().map(|(_, packet)| packet.to_vec()));
        calls += 1;
    }
    assert_eq!(ground.ordered(seen), ground.ordered(packets));
    assert!(calls >= 7, "three at most in each call");
}

fn too_large_is_refused_and_nothing_sent(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let to = right.local_address();
    let bytes = vec![1; ground.refused_bytes * 2];
    let refused = Err(SendError::TooLarge { bytes: ground.refused_bytes });
    let single = Burst::single(to, &bytes[..ground.refused_bytes]);
    assert_eq!(left.send(&[single]), refused);
    assert_eq!(left.send(&[Burst { to, bytes: &bytes, segment: ground.refused_bytes }]), refused);
    // What comes before it goes, what comes after it does not, and the fault is told when it is first.
    let small = Burst::single(to, b"small");
    assert_eq!(left.send(&[small, single, small]), Ok(1));
    assert_eq!(left.send(&[single, small]), refused);
    assert_eq!(ground.receive(&mut right, 1).len(), 1);
    ground.expect_silence(&mut right);
    assert_eq!(left.counters().packets_sent, 1);
    ground.expect_through(&mut left, &mut right, &[small]);
}

fn a_closed_port_does_not_break_the_link(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let (nobody, _held) = (ground.closed)();
    for _ in 0..10 {
        assert_eq!(left.send(&[Burst { to: nobody, bytes: &[0; 1000], segment: 100 }]), Ok(1));
        assert_eq!(left.receive(&mut Inbox::new()), Ok(0));
        let bytes = pattern(500, 4);
        let burst = Burst { to: right.local_address(), bytes: &bytes, segment: 120 };
        ground.expect_through(&mut left, &mut right, &[burst]);
    }
}

fn counters_add_up(ground: &Ground) {
    let (mut left, mut right) = (ground.link(), ground.link());
    let (mut packets, mut bytes) = (0, 0);
    for count in 1..20 {
        let content = pattern(count * 90 - 5, count);
        let burst = Burst { to: right.local_address(), bytes: &content, segment: 90 };
        ground.expect_through(&mut left, &mut right, &[burst, burst]);
        packets += 2 * count as u64;
        bytes += 2 * content.len() as u64;
    }
    let (left, right) = (left.counters(), right.counters());
    assert_eq!((left.packets_sent, left.bytes_sent), (packets, bytes));
    assert_eq!((right.packets_received, right.bytes_received), (packets, bytes));
    assert_eq!((left.packets_received, right.packets_sent), (0, 0));
    for counters in [left, right] {
        assert_eq!((counters.soft_errors, counters.kernel_drops, counters.truncated), (0, 0, 0));
    }
}

fn the_descriptor_becomes_readable(ground: &Ground) {
    let (mut left, right) = (ground.link(), ground.link());
    let Some(descriptor) = right.descriptor() else {
        assert!(left.descriptor().is_none(), "all links of a kind have one, or none");
        return;
    };
    let readable = |descriptor| {
        let mut set = [rustix::event::PollFd::from_borrowed_fd(descriptor, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut set, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 })).unwrap() == 1
    };
    assert!(!readable(descriptor));
    left.send(&[Burst::single(right.local_address(), b"news")]).unwrap();
    // A wrapper that holds packets back sends them in a later call.
    left.receive(&mut Inbox::new()).unwrap();
    assert!(readable(descriptor));
}

macro_rules! suite {
    ($($ground:ident: $make:expr;)*) => { $(mod $ground {
        use super::*;
        suite!(@ $make, single_packets_of_every_size, one_packet_at_a_time, a_large_packet, bursts_of_every_length,
            bursts_longer_than_a_call_takes, many_bursts_in_one_call, bursts_to_several_places_in_one_call,
            answers_reach_the_sender, senders_are_told_apart, silence_leaves_the_inbox_empty,
            an_inbox_is_used_again_and_again, a_small_inbox_gets_the_rest_later, too_large_is_refused_and_nothing_sent,
            a_closed_port_does_not_break_the_link, counters_add_up, the_descriptor_becomes_readable);
    })* };
    (@ $make:expr, $($check:ident),*) => { $(#[test] fn $check() {
        if let Some(ground) = $make {
            super::$check(&ground);
        }
    })* };
}

fn plain() -> UdpOptions {
    UdpOptions::default()
}

/// The first bytes of the suite's packets are of all kinds: they come by every list, and by none.
fn with_lists() -> UdpOptions {
    UdpOptions { lists: Some(ListField { count: 15, at: 0 }), ..plain() }
}

fn traced(link: Box<dyn Link>) -> Box<dyn Link> {
    Box::new(Traced::new(link, std::io::sink(), Clock::real()))
}

fn recorded(link: Box<dyn Link>, clock: Clock) -> Box<dyn Link> {
    Box::new(Recorded::new(link, Recording::create("/dev/null").unwrap(), clock))
}

suite! {
    udp_v4: udp("127.0.0.1:0", plain());
    udp_v6: udp("[::1]:0", plain());
    udp_without_segmentation: udp("127.0.0.1:0", UdpOptions { segmentation: false, ..plain() });
    udp_without_coalescing: udp("127.0.0.1:0", UdpOptions { coalescing: false, ..plain() });
    udp_without_both: udp("127.0.0.1:0", UdpOptions { segmentation: false, coalescing: false, ..plain() });
    udp_v6_without_both: udp("[::1]:0", UdpOptions { segmentation: false, coalescing: false, ..plain() });
    udp_of_one_family: udp("[::1]:0", UdpOptions { dual_stack: false, ..plain() });
    udp_without_favourite: udp("127.0.0.1:0", UdpOptions { favourite: false, ..plain() });
    udp_with_stock_buffers: udp("127.0.0.1:0", UdpOptions { receive_buffer_bytes: None, send_buffer_bytes: None, ..plain() });
    udp_with_lists: udp("127.0.0.1:0", with_lists());
    udp_with_lists_without_favourite: udp("127.0.0.1:0", UdpOptions { favourite: false, ..with_lists() });
    udp_v6_with_lists: udp("[::1]:0", with_lists());
    udp_with_lists_traced: wrapped(udp("127.0.0.1:0", with_lists()), traced);
    udp_unimpaired: wrapped(udp("127.0.0.1:0", plain()), |link| unimpaired(link, Clock::real()));
    udp_traced: wrapped(udp("127.0.0.1:0", plain()), traced);
    udp_recorded: wrapped(udp("127.0.0.1:0", plain()), |link| recorded(link, Clock::real()));
    udp_v6_recorded: wrapped(udp("[::1]:0", plain()), |link| recorded(link, Clock::real()));
    udp_recorded_to_a_full_disk: wrapped(udp("127.0.0.1:0", plain()), |link| {
        Box::new(Recorded::new(link, Recording::create("/dev/full").unwrap(), Clock::real()))
    });
    simulated_plain: simulated(|link, _| link);
    simulated_unimpaired: simulated(unimpaired);
    simulated_traced: simulated(|link, clock| Box::new(Traced::new(link, std::io::sink(), clock)));
    simulated_recorded: simulated(recorded);
    simulated_unrecorded: simulated(|link, _| Box::new(Recorded::without(link)));
    impaired_without_effect: simulated(|link, clock| {
        // A partition long past: every packet is looked at and goes on its own.
        let impairments = Impairments { partitions: vec![Duration::ZERO..Duration::ZERO], ..Impairments::default() };
        Box::new(Impaired::new(link, impairments, 1, clock))
    });
}
