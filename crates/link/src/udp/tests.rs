//! What only UDP has: refusals of the kernel, the receive buffer, and both families at once.

use super::*;
use std::io::Write;

pub(super) fn link(address: &str, options: UdpOptions) -> UdpLink {
    UdpLink::bind(address.parse().unwrap(), options).unwrap()
}

/// Not by `eprintln`: the test runner would swallow what is said there.
pub(super) fn lacks_ipv6() -> bool {
    let lacks = UdpLink::bind("[::1]:0".parse().unwrap(), UdpOptions::default()).is_err();
    if lacks {
        let mut loudly = std::io::stderr();
        writeln!(loudly, "SKIPPED: this machine has no IPv6, a test of udp was not run").unwrap();
    }
    lacks
}

pub(super) fn received(link: &mut UdpLink, count: usize) -> Vec<(SocketAddr, Vec<u8>)> {
    let (mut inbox, mut packets) = (Inbox::new(), Vec::new());
    let start = std::time::Instant::now();
    while packets.len() < count && start.elapsed().as_secs() < 5 {
        link.receive(&mut inbox).unwrap();
        packets.extend(inbox.packets().map(|(from, packet)| (from, packet.to_vec())));
    }
    packets
}

#[test]
fn a_refusal_to_segment_is_remembered_and_nothing_is_lost() {
    let (mut left, mut right) =
        (link("127.0.0.1:0", UdpOptions::default()), link("127.0.0.1:0", UdpOptions::default()));
    assert!(left.segmentation(), "this kernel does not segment at all: nothing to test");
    // The kernel does not segment packets without checksums (EINVAL).
    sys::set_option(left.main.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    let bytes: Vec<u8> = (0..5050u32).map(|i| (i / 7) as u8).collect();
    let burst = Burst { to: right.local_address(), bytes: &bytes, segment: 100 };
    assert_eq!(left.send(&[burst, burst]), Ok(2));
    let packets = received(&mut right, 102);
    let expected: Vec<&[u8]> = bytes.chunks(100).chain(bytes.chunks(100)).collect();
    assert!(packets.iter().map(|(_, packet)| packet.as_slice()).eq(expected));
    assert!(!left.segmentation());
    assert_eq!(left.counters().gso_refused, 1);
    assert_eq!(left.counters().packets_sent, 102);
    assert_eq!(left.send(&[burst]), Ok(1));
    assert_eq!(received(&mut right, 51).len(), 51);
    assert_eq!(left.counters().gso_refused, 1, "counted once");
}

#[test]
fn a_fault_of_the_address_is_not_taken_for_a_refusal_to_segment() {
    let mut left = link("127.0.0.1:0", UdpOptions::default());
    // Nobody is at port 0, and the kernel says EINVAL: the same as for a refusal to segment.
    let to = "127.0.0.1:0".parse().unwrap();
    let burst = Burst { to, bytes: &[0; 300], segment: 100 };
    assert_eq!(left.send(&[burst]), Err(SendError::System { to, errno: Errno::INVAL }));
    assert!(left.segmentation());
    assert_eq!(left.counters().gso_refused, 0);
}

#[test]
fn a_segment_too_large_is_not_taken_for_a_refusal_to_segment() {
    if lacks_ipv6() {
        return;
    }
    let mut left = link("[::1]:0", UdpOptions::default());
    // The loopback device takes 65,488 bytes over IPv6, a little less than a datagram may have.
    let burst = Burst { to: left.local_address(), bytes: &[0; 2 * 65_500], segment: 65_500 };
    assert_eq!(left.send(&[burst]), Err(SendError::TooLarge { bytes: 65_500 }));
    assert!(left.segmentation());
    assert_eq!(left.counters().packets_sent, 0);
}

#[test]
fn an_address_of_the_other_family_is_refused() {
    let mut left = link("127.0.0.1:0", UdpOptions::default());
    let to = "[::1]:9".parse().unwrap();
    let local = left.local_address();
    assert_eq!(left.send(&[Burst::single(to, b"x")]), Err(SendError::WrongFamily { to, local }));
}

#[test]
fn a_link_on_all_addresses_speaks_both_families() {
    if lacks_ipv6() {
        return;
    }
    let mut both = link("[::]:0", UdpOptions::default());
    let port = both.local_address().port();
    for address in ["127.0.0.1", "[::1]"] {
        let mut other = link(&format!("{address}:0"), UdpOptions::default());
        let to = format!("{address}:{port}").parse().unwrap();
        assert_eq!(other.send(&[Burst { to, bytes: b"aabbc", segment: 2 }]), Ok(1));
        let packets = received(&mut both, 3);
        assert_eq!(packets.iter().map(|(_, packet)| packet.as_slice()).collect::<Vec<_>>(), [&b"aa"[..], b"bb", b"c"]);
        assert!(packets.iter().all(|&(from, _)| from == other.local_address()));
        assert_eq!(both.send(&[Burst { to: packets[0].0, bytes: b"answer", segment: 4 }]), Ok(1));
        let answers = received(&mut other, 2);
        assert_eq!(answers, [(to, b"answ".to_vec()), (to, b"er".to_vec())]);
    }
}

#[test]
fn without_route_packets_are_lost_and_the_link_lives() {
    if lacks_ipv6() {
        return;
    }
    // A link bound to the loopback address of IPv6 has no way to an address of IPv4.
    let mut left = link("[::1]:0", UdpOptions { dual_stack: false, ..UdpOptions::default() });
    let nowhere = Burst::single("127.0.0.1:9".parse().unwrap(), b"lost");
    let home = Burst::single(left.local_address(), b"found");
    assert_eq!(left.send(&[nowhere, home, nowhere]), Ok(3));
    assert_eq!(left.counters().soft_errors, 2);
    assert_eq!(left.counters().packets_sent, 1);
    assert_eq!(received(&mut left, 1)[0].1, b"found");
}

#[test]
fn datagrams_longer_than_a_slot_are_dropped_and_counted() {
    let (mut left, mut right) =
        (link("127.0.0.1:0", UdpOptions::default()), link("127.0.0.1:0", UdpOptions::default()));
    let to = right.local_address();
    assert_eq!(left.send(&[Burst::single(to, &[1; 101]), Burst::single(to, &[2; 100])]), Ok(2));
    let mut inbox = Inbox::with_capacity(4, 100);
    while right.receive(&mut inbox).unwrap() == 0 {}
    assert_eq!(inbox.packets().map(|(_, packet)| packet.to_vec()).collect::<Vec<_>>(), [vec![2; 100]]);
    assert_eq!(right.counters().truncated, 1);
    assert_eq!(right.counters().packets_received, 1);
}

#[test]
fn what_a_full_receive_buffer_drops_is_counted() {
    let small = UdpOptions { receive_buffer_bytes: Some(4096), ..UdpOptions::default() };
    let (mut left, mut right) = (link("127.0.0.1:0", UdpOptions::default()), link("127.0.0.1:0", small));
    assert!(right.receive_buffer_bytes() < 64 << 10, "{}", right.receive_buffer_bytes());
    let to = right.local_address();
    for _ in 0..200 {
        assert_eq!(left.send(&[Burst::single(to, &[0; 1000])]), Ok(1));
    }
    let mut count = 0;
    let mut inbox = Inbox::new();
    while right.receive(&mut inbox).unwrap() > 0 {
        count += inbox.len() as u64;
    }
    // The kernel tells of drops with the next datagram that comes.
    assert_eq!(left.send(&[Burst::single(to, b"x")]), Ok(1));
    assert_eq!(received(&mut right, 1).len(), 1);
    assert!(count < 200);
    assert_eq!(right.counters().kernel_drops, 200 - count);
}

#[test]
fn a_burst_costs_one_system_call_and_comes_in_one() {
    let (mut left, mut right) =
        (link("127.0.0.1:0", UdpOptions::default()), link("127.0.0.1:0", UdpOptions::default()));
    let burst = Burst { to: right.local_address(), bytes: &[7; 44 * 1472], segment: 1472 };
    assert_eq!(left.send(&[burst]), Ok(1));
    assert_eq!(left.counters().system_calls, 1);
    assert_eq!(received(&mut right, 44).len(), 44);
    if right.coalescing() {
        assert_eq!(right.counters().system_calls, 1);
    }
}

#[test]
fn an_address_in_use_is_named() {
    let left = link("127.0.0.1:0", UdpOptions::default());
    let address = left.local_address();
    let error = UdpLink::bind(address, UdpOptions::default()).unwrap_err();
    assert_eq!(error, BindError::Address { address, errno: Errno::ADDRINUSE });
    assert!(error.to_string().contains(&address.to_string()));
}

#[test]
fn a_link_can_move_to_another_thread() {
    fn is_send<T: Send + Sync>() {}
    is_send::<UdpLink>();
}

/// Looks at each batch, and receives it aside.
struct Looking;

impl Guide for Looking {
    fn advise(&mut self, _way: usize, head: Option<&[u8]>) -> Advice<'_> {
        if head.is_some() { Advice::Aside } else { Advice::Look }
    }
}

#[test]
fn a_look_that_sees_nothing_is_one_call_and_no_look() {
    let options = UdpOptions { favourite: false, ..UdpOptions::default() };
    let (mut left, mut right) = (link("127.0.0.1:0", options), link("127.0.0.1:0", options));
    let (to, bytes, mut inbox) = (right.local_address(), [7; 5000], Inbox::new());
    // The first shows that batches come.
    for looks in 0..2 {
        assert_eq!(left.send(&[Burst::single(to, &bytes)]), Ok(1));
        assert_eq!(right.receive_guided(&mut inbox, &mut Looking), Ok(1));
        assert_eq!((right.counters().looks_ahead, right.counters().system_calls), (looks, 1 + 2 * looks));
    }
    assert_eq!(right.receive_guided(&mut inbox, &mut Looking), Ok(0));
    assert_eq!((right.counters().looks_ahead, right.counters().system_calls), (1, 4));
}
