//! What `Impaired` does to packets is what it was asked for, and the same for the same seed; and
//! what `Traced` writes.

use highwire_link::{
    Burst, Clock, Impaired, ImpairedCounters, Impairments, Inbox, Link, LinkCounters, Network, NetworkConfig,
    ReceiveError, SendError, SimulatedLink, Traced, UdpLink, UdpOptions,
};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

const COUNT: u32 = 10_000;
const MILLISECOND: Duration = Duration::from_millis(1);

fn address(host: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, host], 4000))
}

struct Scene {
    network: Network,
    left: Impaired<SimulatedLink>,
    right: SimulatedLink,
}

impl Scene {
    fn new(impairments: Impairments, seed: u64) -> Scene {
        let network = Network::new(NetworkConfig { latency: Duration::ZERO, ..Default::default() });
        let clock = Clock::Simulated(network.clone());
        let left = Impaired::new(network.link(address(1)), impairments, seed, clock);
        let right = network.link(address(2));
        Scene { network, left, right }
    }

    fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut inbox = Inbox::with_capacity(64, 2048);
        let mut packets = Vec::new();
        while self.right.receive(&mut inbox).unwrap() > 0 {
            packets.extend(inbox.packets().map(|(_, packet)| packet.to_vec()));
        }
        packets
    }

    /// Sends `COUNT` numbered packets in bursts of ten, waits for all that is held back, and gives
    /// what came.
    fn run(&mut self) -> Vec<Vec<u8>> {
        let numbers: Vec<u8> = (0..COUNT).flat_map(numbered).collect();
        let mut packets = Vec::new();
        for bytes in numbers.chunks(10 * PACKET_BYTES) {
            let burst = Burst { to: address(2), bytes, segment: PACKET_BYTES };
            assert_eq!(self.left.send(&[burst]), Ok(1));
            packets.extend(self.receive());
        }
        while let Some(due) = self.left.next_due() {
            self.network.advance_to(due);
            assert!(self.left.flush_due() > 0 || self.left.next_due() > Some(due));
        }
        packets.extend(self.receive());
        assert_eq!(self.left.held(), 0);
        packets
    }
}

const PACKET_BYTES: usize = 20;

/// A packet that tells its number, with bytes behind it to be corrupted.
fn numbered(number: u32) -> [u8; PACKET_BYTES] {
    let mut packet = [0x5a; PACKET_BYTES];
    packet[..4].copy_from_slice(&number.to_le_bytes());
    packet
}

fn numbers(packets: &[Vec<u8>]) -> Vec<u32> {
    packets.iter().map(|packet| u32::from_le_bytes(packet[..4].try_into().unwrap())).collect()
}

#[test]
fn loss_is_about_what_was_asked_for() {
    for (seed, loss) in [(1, 0.01), (2, 0.1), (3, 0.5)] {
        let mut scene = Scene::new(Impairments { loss, ..Default::default() }, seed);
        let seen = numbers(&scene.run());
        assert!(seen.is_sorted_by(|a, b| a < b), "what is left keeps its order");
        let lost = f64::from(COUNT) - seen.len() as f64;
        let expected = loss * f64::from(COUNT);
        // Five standard deviations.
        let spread = 5.0 * (expected * (1.0 - loss)).sqrt();
        assert!((lost - expected).abs() < spread, "seed {seed}: {lost} lost, {expected} ± {spread} expected");
        assert_eq!(scene.left.impaired_counters().lost as f64, lost);
    }
}

#[test]
fn everything_or_nothing_is_lost_at_the_ends() {
    let mut all = Scene::new(Impairments { loss: 1.0, ..Default::default() }, 1);
    assert_eq!(all.run().len(), 0);
    let mut none = Scene::new(Impairments::default(), 1);
    assert!(numbers(&none.run()).into_iter().eq(0..COUNT));
    assert_eq!(none.left.impaired_counters(), ImpairedCounters::default());
}

#[test]
fn duplicates_are_whole_and_follow_their_originals() {
    let mut scene = Scene::new(Impairments { duplication: 0.2, ..Default::default() }, 4);
    let packets = scene.run();
    assert!(packets.iter().all(|packet| *packet == numbered(numbers(std::slice::from_ref(packet))[0])));
    let mut seen = numbers(&packets);
    assert!(seen.is_sorted());
    let doubles = seen.len() - COUNT as usize;
    assert!((1800..2200).contains(&doubles), "{doubles}");
    assert_eq!(scene.left.impaired_counters().duplicated as usize, doubles);
    seen.dedup();
    assert!(seen.into_iter().eq(0..COUNT), "none is missing");
}

#[test]
fn reordering_reorders_and_loses_nothing() {
    let mut scene = Scene::new(Impairments { reordering: 0.1, ..Default::default() }, 5);
    let mut seen = numbers(&scene.run());
    let overtaken = seen.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!((600..1200).contains(&overtaken), "{overtaken} steps back");
    // A packet is overtaken by a few, not by hundreds; others that wait may pass it too.
    for (place, &number) in seen.iter().enumerate() {
        assert!(place.abs_diff(number as usize) < 16, "packet {number} came as number {place}");
    }
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..COUNT));
}

#[test]
fn a_reordered_packet_that_nothing_follows_goes_by_time() {
    let mut scene = Scene::new(Impairments { reordering: 1.0, ..Default::default() }, 6);
    scene.left.send(&[Burst::single(address(2), b"last")]).unwrap();
    assert_eq!(scene.receive().len(), 0);
    let due = scene.left.next_due().unwrap();
    assert!(due > Duration::ZERO && due < Duration::from_secs(1));
    scene.network.advance_to(due);
    assert_eq!(scene.left.flush_due(), 1);
    assert_eq!(scene.receive(), [b"last"]);
}

#[test]
fn corruption_changes_one_to_three_bits() {
    let mut scene = Scene::new(Impairments { corruption: 0.3, ..Default::default() }, 7);
    let packets = scene.run();
    assert_eq!(packets.len(), COUNT as usize);
    let mut by_bits = [0; 4];
    for (number, packet) in packets.iter().enumerate() {
        let original = numbered(number as u32);
        assert_eq!(packet.len(), original.len());
        let bits: u32 = packet.iter().zip(original).map(|(a, b)| (a ^ b).count_ones()).sum();
        by_bits[bits as usize] += 1;
    }
    let corrupted: u32 = by_bits[1..].iter().sum();
    assert!((2750..3250).contains(&corrupted), "{by_bits:?}");
    assert!(by_bits[1..].iter().all(|&count| count > 800), "{by_bits:?}");
    assert_eq!(scene.left.impaired_counters().corrupted, u64::from(corrupted));
}

#[test]
fn delay_holds_back_and_jitter_spreads() {
    let mut scene = Scene::new(Impairments { delay: 3 * MILLISECOND, ..Default::default() }, 8);
    scene.left.send(&[Burst { to: address(2), bytes: b"aabb", segment: 2 }]).unwrap();
    assert_eq!(scene.left.next_due(), Some(3 * MILLISECOND));
    scene.network.advance_to(3 * MILLISECOND - Duration::from_nanos(1));
    assert_eq!(scene.left.flush_due(), 0);
    scene.network.advance_to(3 * MILLISECOND);
    // A call that receives sends what is due, too.
    scene.left.receive(&mut Inbox::new()).unwrap();
    assert_eq!(scene.receive(), [b"aa", b"bb"]);
    assert_eq!(scene.left.next_due(), None);

    let jitter = Impairments { delay: 3 * MILLISECOND, jitter: 2 * MILLISECOND, ..Default::default() };
    let mut scene = Scene::new(jitter, 9);
    let mut seen = numbers(&scene.run());
    assert!(!seen.is_sorted());
    assert!((4 * MILLISECOND..5 * MILLISECOND).contains(&scene.network.now()), "{:?}", scene.network.now());
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..COUNT));
}

#[test]
fn a_partition_drops_everything_inside_it_and_nothing_outside() {
    let partitions = vec![10 * MILLISECOND..20 * MILLISECOND, 30 * MILLISECOND..31 * MILLISECOND];
    let mut scene = Scene::new(Impairments { partitions, ..Default::default() }, 10);
    let mut seen = Vec::new();
    for time in 0..40 {
        scene.network.advance_to(time * MILLISECOND);
        scene.left.send(&[Burst::single(address(2), &[time as u8])]).unwrap();
        seen.extend(scene.receive().into_iter().flatten());
    }
    assert!(seen.into_iter().eq((0..10).chain(20..30).chain(31..40)));
    assert_eq!(scene.left.impaired_counters().partitioned, 11);
}

#[test]
fn a_partition_drops_what_was_held_back_into_it() {
    let partitions = vec![10 * MILLISECOND..20 * MILLISECOND];
    let mut scene = Scene::new(Impairments { partitions, delay: 5 * MILLISECOND, ..Default::default() }, 11);
    for time in [4, 6] {
        scene.network.advance_to(time * MILLISECOND);
        scene.left.send(&[Burst::single(address(2), &[time as u8])]).unwrap();
    }
    scene.network.advance_to(100 * MILLISECOND);
    assert_eq!(scene.left.flush_due(), 1);
    assert_eq!(scene.receive(), [[4]]);
}

#[test]
fn the_same_seed_does_the_same_and_another_something_else() {
    let history = |seed| {
        let impairments = Impairments {
            loss: 0.05,
            duplication: 0.05,
            reordering: 0.05,
            corruption: 0.05,
            delay: MILLISECOND,
            jitter: MILLISECOND,
            partitions: Vec::new(),
        };
        let mut scene = Scene::new(impairments, seed);
        (scene.run(), scene.left.impaired_counters())
    };
    assert_eq!(history(12), history(12));
    assert_ne!(history(12), history(13));
}

#[test]
fn too_large_is_told_at_once_or_counted_where_it_was_held_back() {
    let large = [0; 1473];
    let burst = Burst::single(address(2), &large);
    let small = Burst::single(address(2), b"small");
    // Nothing is held back: the sender learns of it, as over the link beneath.
    let mut scene = Scene::new(Impairments { corruption: 1e-9, ..Default::default() }, 14);
    assert_eq!(scene.left.send(&[burst]), Err(SendError::TooLarge { bytes: 1473 }));
    assert_eq!(scene.left.send(&[small, burst, small]), Ok(1));
    assert_eq!(scene.receive(), [b"small"]);
    // Held back: whoever sends when its time has come has nothing to do with it.
    let mut scene = Scene::new(Impairments { delay: MILLISECOND, ..Default::default() }, 15);
    assert_eq!(scene.left.send(&[burst, small]), Ok(2));
    scene.network.advance_to(MILLISECOND);
    assert_eq!(scene.left.send(&[small]), Ok(1));
    assert_eq!(scene.receive(), [b"small"]);
    assert_eq!(scene.left.impaired_counters().refused, 1);
}

/// A link that is full again and again.
struct Narrow {
    link: SimulatedLink,
    room: usize,
}

impl Link for Narrow {
    fn local_address(&self) -> SocketAddr {
        self.link.local_address()
    }

    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        let sent = self.link.send(&bursts[..self.room.min(bursts.len())])?;
        self.room -= sent;
        Ok(sent)
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        // Room for three more packets whenever somebody looks.
        self.room = 3;
        self.link.receive(inbox)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn burst_bytes_max(&self) -> usize {
        self.link.burst_bytes_max()
    }

    fn counters(&self) -> LinkCounters {
        self.link.counters()
    }
}

#[test]
fn a_full_link_beneath_loses_nothing() {
    // Looked at packet by packet, or passed through as they are.
    for impairments in [Impairments { corruption: 1e-9, ..Default::default() }, Impairments::default()] {
        let network = Network::new(NetworkConfig { latency: Duration::ZERO, ..Default::default() });
        let narrow = Narrow { link: network.link(address(1)), room: 3 };
        let mut left = Impaired::new(narrow, impairments, 18, Clock::Simulated(network.clone()));
        let mut right = network.link(address(2));
        let packets: Vec<_> = (0..50).map(numbered).collect();
        let bursts: Vec<_> = packets
            .chunks(2)
            .map(|two| Burst { to: address(2), bytes: two.as_flattened(), segment: PACKET_BYTES })
            .collect();
        let (mut inbox, mut seen, mut sent, mut was_full) = (Inbox::new(), Vec::new(), 0, false);
        for _ in 0..100 {
            let count = left.send(&bursts[sent..]).unwrap();
            was_full |= count < bursts.len() - sent;
            sent += count;
            left.receive(&mut inbox).unwrap();
            right.receive(&mut inbox).unwrap();
            seen.extend(inbox.packets().map(|(_, packet)| packet.to_vec()));
        }
        assert!(was_full);
        assert_eq!(sent, bursts.len());
        assert!(numbers(&seen).into_iter().eq(0..50));
        assert_eq!((left.held(), left.next_due()), (0, None));
    }
}

#[test]
fn impairments_can_change_on_the_way() {
    let mut scene = Scene::new(Impairments { loss: 1.0, ..Default::default() }, 16);
    scene.left.send(&[Burst::single(address(2), b"lost")]).unwrap();
    scene.left.set_impairments(Impairments::default());
    scene.left.send(&[Burst::single(address(2), b"found")]).unwrap();
    assert_eq!(scene.receive(), [b"found"]);
}

#[test]
fn it_works_over_udp_by_the_real_clock() {
    let bind = || UdpLink::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let mut right = bind();
    let impairments = Impairments { delay: 20 * MILLISECOND, duplication: 1.0, ..Default::default() };
    let mut left = Impaired::new(bind(), impairments, 17, Clock::real());
    let start = Instant::now();
    left.send(&[Burst { to: right.local_address(), bytes: b"abcde", segment: 2 }]).unwrap();
    let mut inbox = Inbox::new();
    let mut packets = Vec::new();
    while packets.len() < 6 && start.elapsed().as_secs() < 5 {
        left.flush_due();
        right.receive(&mut inbox).unwrap();
        packets.extend(inbox.packets().map(|(_, packet)| String::from_utf8(packet.to_vec()).unwrap()));
    }
    assert_eq!(packets, ["ab", "ab", "cd", "cd", "e", "e"]);
    assert!(start.elapsed() >= 20 * MILLISECOND);
}

#[test]
fn a_trace_has_a_line_for_each_packet() {
    let network = Network::new(NetworkConfig { latency: MILLISECOND, ..Default::default() });
    let clock = Clock::Simulated(network.clone());
    let mut left = Traced::new(network.link(address(1)), Vec::new(), clock.clone());
    let mut right = Traced::new(network.link(address(2)), Vec::new(), clock);
    let bytes: Vec<u8> = (0..90).collect();
    left.send(&[Burst { to: address(2), bytes: &bytes, segment: 50 }]).unwrap();
    // What is refused is not in the trace.
    left.send(&[Burst::single(address(2), &[0; 2000])]).unwrap_err();
    network.advance_to(2 * MILLISECOND);
    right.receive(&mut Inbox::new()).unwrap();
    let hex = |range: std::ops::Range<u8>| range.map(|byte| format!("{byte:02x}")).collect::<String>();
    let sent = String::from_utf8(left.into_parts().1).unwrap();
    let (first, second) = (hex(0..32), hex(50..82));
    let expected = format!(
        "0.000000000 > 192.0.2.2:4000 50 {first}\n\
         0.000000000 > 192.0.2.2:4000 40 {second}\n"
    );
    assert_eq!(sent, expected);
    let received = String::from_utf8(right.into_parts().1).unwrap();
    let expected = format!(
        "0.002000000 < 192.0.2.1:4000 50 {first}\n\
         0.002000000 < 192.0.2.1:4000 40 {second}\n"
    );
    assert_eq!(received, expected);
}

#[test]
fn a_trace_that_cannot_be_written_stops_no_traffic() {
    let network = Network::new(NetworkConfig::default());
    let mut room = [0; 10];
    let mut left = Traced::new(network.link(address(1)), &mut room[..], Clock::real());
    assert!(left.trace_error().is_none());
    assert_eq!(left.send(&[Burst::single(address(2), b"goes")]), Ok(1));
    assert_eq!(left.send(&[Burst::single(address(2), b"goes")]), Ok(1));
    assert_eq!(left.trace_error().unwrap().kind(), std::io::ErrorKind::WriteZero);
    assert_eq!(left.counters().packets_sent, 2);
}
