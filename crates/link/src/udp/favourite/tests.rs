//! Nobody outside sees the second socket: nothing is lost, overtaken or left out because of it.

use super::super::LengthField;
use super::super::tests::{lacks_ipv6, link, received};
use super::*;
use crate::{Burst, Inbox, Link, SendError, UdpLink};
use rustix::net::SendFlags;
use std::collections::HashSet;
use std::net::UdpSocket;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

fn pair() -> (UdpLink, UdpLink) {
    (link("127.0.0.1:0", UdpOptions::default()), link("127.0.0.1:0", UdpOptions::default()))
}

fn peer(link: &UdpLink) -> Option<SocketAddr> {
    link.favourite.as_ref().and_then(|favourite| favourite.peer)
}

/// Sends to `to` and looks, until `to` is the favourite; what came meanwhile.
fn favour(link: &mut UdpLink, to: SocketAddr) -> Vec<(SocketAddr, Vec<u8>)> {
    let (mut inbox, mut packets) = (Inbox::new(), Vec::new());
    for _ in 0..2 * VOTES_NEXT {
        if peer(link) == Some(to) {
            return packets;
        }
        assert_eq!(link.send(&[Burst::single(to, b"vote")]), Ok(1));
        link.receive(&mut inbox).unwrap();
        packets.extend(inbox.packets().map(|(from, packet)| (from, packet.to_vec())));
    }
    panic!("{to} did not become the favourite of {link:?}");
}

/// Takes everything in.
fn drain(link: &mut UdpLink) -> usize {
    let mut inbox = Inbox::new();
    let (mut count, mut empty) = (0, 0);
    while empty < 2 * INTERVAL_MAX {
        let found = link.receive(&mut inbox).unwrap();
        count += found;
        empty = if found == 0 { empty + 1 } else { 0 };
    }
    count
}

fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let mut set = [rustix::event::PollFd::from_borrowed_fd(descriptor, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut set, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 1_000_000 })).unwrap() == 1
}

/// Neither a link nor a socket that asks to share gets the address.
fn expect_taken(address: SocketAddr) {
    let error = UdpLink::bind(address, UdpOptions::default()).unwrap_err();
    assert_eq!(error, BindError::Address { address, errno: Errno::ADDRINUSE });
    let sharing = Socket::open(address, UdpOptions::default()).unwrap();
    sockopt::set_socket_reuseport(&sharing, true).unwrap();
    assert_eq!(rustix::net::bind(&sharing, &address), Err(Errno::ADDRINUSE));
}

#[test]
fn the_address_is_exclusive_before_while_and_after() {
    for bound in ["127.0.0.1:0", "0.0.0.0:0"] {
        let mut left = link(bound, UdpOptions::default());
        let (right, third) = pair();
        let address = left.local_address();
        expect_taken(address);
        favour(&mut left, right.local_address());
        expect_taken(address);
        favour(&mut left, third.local_address());
        expect_taken(address);
        // A copy of the descriptor does not hold the address.
        let _copy = left.descriptor().unwrap().try_clone_to_owned().unwrap();
        drop(left);
        drop(link(&address.to_string(), UdpOptions::default()));
    }
}

#[test]
fn a_favourite_is_found_in_every_family() {
    let both = [("127.0.0.1:0", "127.0.0.1:0"), ("0.0.0.0:0", "127.0.0.1:0")];
    let six = [("[::1]:0", "[::1]:0"), ("[::]:0", "[::1]:0"), ("[::]:0", "127.0.0.1:0")];
    for (here, there) in both.into_iter().chain(six.into_iter().filter(|_| !lacks_ipv6())) {
        let (mut left, mut right) = (link(here, UdpOptions::default()), link(there, UdpOptions::default()));
        let to = right.local_address();
        favour(&mut left, to);
        drain(&mut right);
        let at = SocketAddr::new(to.ip(), left.local_address().port());
        // By each way of sending, to and fro.
        assert_eq!(left.send(&[Burst::single(to, b"one")]), Ok(1));
        assert_eq!(left.send(&[Burst { to, bytes: b"aabbc", segment: 2 }]), Ok(1));
        assert_eq!(left.send(&[Burst::single(to, b"two"), Burst::single(to, b"three")]), Ok(2));
        let packets = received(&mut right, 6);
        let expected: [&[u8]; 6] = [b"one", b"aa", b"bb", b"c", b"two", b"three"];
        assert_eq!(packets, expected.map(|packet| (at, packet.to_vec())), "from {here} to {there}");
        assert_eq!(right.send(&[Burst { to: at, bytes: b"answer", segment: 4 }]), Ok(1));
        assert_eq!(received(&mut left, 2), [(to, b"answ".to_vec()), (to, b"er".to_vec())]);
        assert_eq!(peer(&left), Some(to));
        assert_eq!(left.counters().soft_errors, 0);
    }
}

#[test]
fn nothing_is_lost_or_doubled_while_favourites_change_under_traffic() {
    const COUNT: u32 = 30_000;
    const WINDOW: u32 = 32;
    let (mut left, right) = pair();
    let third = link("127.0.0.1:0", UdpOptions::default());
    let at = left.local_address();
    let places = [right.local_address(), third.local_address()];
    let heard = [AtomicU32::new(0), AtomicU32::new(0)];
    std::thread::scope(|scope| {
        for (mut sender, heard) in [right, third].into_iter().zip(&heard) {
            scope.spawn(move || {
                let mut inbox = Inbox::new();
                for number in 0..COUNT {
                    let start = Instant::now();
                    while number - heard.load(SeqCst) >= WINDOW {
                        assert!(start.elapsed() < Duration::from_secs(20), "packet {number} waits for ever");
                        std::thread::yield_now();
                    }
                    sender.receive(&mut inbox).unwrap();
                    assert_eq!(sender.send(&[Burst::single(at, &number.to_le_bytes())]), Ok(1));
                }
            });
        }
        let (mut inbox, mut changes, mut last) = (Inbox::new(), 0, None);
        let mut seen = [HashSet::new(), HashSet::new()];
        let start = Instant::now();
        for turn in 0.. {
            if heard.iter().all(|heard| heard.load(SeqCst) == COUNT) {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{heard:?} of {COUNT} came, {left:?}");
            left.send(&[Burst::single(places[turn / 1000 % 2], b"vote")]).unwrap();
            changes += u32::from(std::mem::replace(&mut last, peer(&left)) != peer(&left));
            left.receive(&mut inbox).unwrap();
            for (from, packet) in inbox.packets() {
                let place = places.iter().position(|&place| place == from).expect("one of both");
                let number = u32::from_le_bytes(packet.try_into().unwrap());
                // Where there are two sockets, one packet may overtake another, as in any network.
                assert!(seen[place].insert(number), "{number} of {from} came twice, after {changes} changes");
                heard[place].fetch_add(1, SeqCst);
            }
        }
        assert!(changes > 1, "{changes}");
    });
    assert_eq!(left.counters().kernel_drops, 0);
}

#[test]
fn a_peer_that_moves_is_heard_and_followed() {
    let (mut left, mut right) = pair();
    favour(&mut left, right.local_address());
    let mut moved = link("127.0.0.1:0", UdpOptions::default());
    let at = left.local_address();
    assert_eq!(right.send(&[Burst::single(at, b"old")]), Ok(1));
    assert_eq!(moved.send(&[Burst::single(at, b"new")]), Ok(1));
    let mut inbox = Inbox::new();
    let mut packets = Vec::new();
    for _ in 0..2 * INTERVAL_MAX {
        left.receive(&mut inbox).unwrap();
        packets.extend(inbox.packets().map(|(from, packet)| (from, packet.to_vec())));
    }
    packets.sort();
    let mut expected = [(right.local_address(), b"old".to_vec()), (moved.local_address(), b"new".to_vec())];
    expected.sort();
    assert_eq!(packets, expected);
    // What waits in the queue of the connected socket comes, though it changes its peer.
    assert_eq!(right.send(&[Burst::single(at, b"late")]), Ok(1));
    assert_eq!(favour(&mut left, moved.local_address()), [(right.local_address(), b"late".to_vec())]);
    assert_eq!(right.send(&[Burst::single(at, b"later")]), Ok(1));
    assert_eq!(received(&mut left, 1), [(right.local_address(), b"later".to_vec())]);
}

#[test]
fn two_peers_who_are_talked_to_in_turn_share_one_socket() {
    let (mut left, mut right) = pair();
    let mut third = link("127.0.0.1:0", UdpOptions::default());
    for _ in 0..4 * VOTES_FIRST {
        for other in [&mut right, &mut third] {
            assert_eq!(left.send(&[Burst::single(other.local_address(), b"ping")]), Ok(1));
            assert_eq!(received(other, 1).len(), 1);
            assert_eq!(other.send(&[Burst::single(left.local_address(), b"pong")]), Ok(1));
            assert_eq!(received(&mut left, 1), [(other.local_address(), b"pong".to_vec())]);
        }
    }
    assert_eq!(peer(&left), None);
}

#[test]
fn neither_socket_keeps_the_other_from_being_heard() {
    let (mut left, mut right) = pair();
    let mut third = link("127.0.0.1:0", UdpOptions::default());
    favour(&mut left, right.local_address());
    let at = left.local_address();
    let mut inbox = Inbox::new();
    for (rare, often) in [(0, 1), (1, 0)] {
        drain(&mut left);
        let others = [&mut right, &mut third];
        let mut looks = 0;
        assert_eq!(others[rare].send(&[Burst::single(at, b"rare")]), Ok(1));
        loop {
            for _ in 0..32 {
                assert_eq!(others[often].send(&[Burst::single(at, b"often")]), Ok(1));
            }
            left.receive(&mut inbox).unwrap();
            looks += 1;
            if inbox.packets().any(|(_, packet)| packet == b"rare") {
                break;
            }
            assert!(looks <= INTERVAL_MAX + OVERDUE_MAX, "not heard after {looks} looks");
        }
    }
}

#[test]
fn a_favourite_that_is_gone_costs_packets_and_no_more() {
    let (mut left, right) = pair();
    let to = right.local_address();
    favour(&mut left, to);
    drop(right);
    let mut inbox = Inbox::new();
    for _ in 0..10 {
        assert_eq!(left.send(&[Burst::single(to, b"lost")]), Ok(1));
        assert_eq!(left.send(&[Burst { to, bytes: b"lost too", segment: 3 }]), Ok(1));
        left.receive(&mut inbox).unwrap();
    }
    assert!(left.counters().soft_errors > 0);
    assert!(left.segmentation());
    // The last error waits in the socket, and is not the answer to what is sent now.
    assert_eq!(left.send(&[Burst::single(to, b"lost")]), Ok(1));
    let mut back = link(&to.to_string(), UdpOptions::default());
    assert_eq!(left.send(&[Burst::single(to, b"found")]), Ok(1));
    assert_eq!(received(&mut back, 1), [(left.local_address(), b"found".to_vec())]);
    assert_eq!(back.send(&[Burst::single(left.local_address(), b"welcome")]), Ok(1));
    assert_eq!(received(&mut left, 1), [(to, b"welcome".to_vec())]);
}

#[test]
fn a_packet_too_large_is_refused_and_the_favourite_stays() {
    let (mut left, right) = pair();
    let to = right.local_address();
    favour(&mut left, to);
    let large = vec![0; 65_508];
    assert_eq!(left.send(&[Burst::single(to, &large)]), Err(SendError::TooLarge { bytes: 65_508 }));
    assert_eq!(peer(&left), Some(to));
    assert_eq!(left.counters().soft_errors, 0);
}

#[test]
fn a_refusal_to_segment_is_found_by_the_favourite_too() {
    let (mut left, mut right) = pair();
    let to = right.local_address();
    favour(&mut left, to);
    drain(&mut right);
    for socket in [&left.main, &left.favourite.as_ref().unwrap().socket] {
        // The kernel does not segment packets without checksums (EINVAL).
        sys::set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    }
    assert_eq!(left.send(&[Burst { to, bytes: &[1; 1000], segment: 100 }]), Ok(1));
    assert_eq!(received(&mut right, 10).len(), 10);
    assert!(!left.segmentation());
    assert_eq!(peer(&left), Some(to));
}

#[test]
fn drops_of_both_sockets_are_counted() {
    let small = UdpOptions { receive_buffer_bytes: Some(4096), ..UdpOptions::default() };
    let (mut left, mut right) = (link("127.0.0.1:0", small), link("127.0.0.1:0", UdpOptions::default()));
    let mut third = link("127.0.0.1:0", UdpOptions::default());
    favour(&mut left, right.local_address());
    let at = left.local_address();
    let mut flood = |count: usize| {
        for other in [&mut right, &mut third] {
            for _ in 0..count {
                assert_eq!(other.send(&[Burst::single(at, &[0; 1000])]), Ok(1));
            }
        }
    };
    flood(200);
    let came = drain(&mut left);
    assert!(came < 300, "{came}");
    // The kernel tells of drops with the next datagram that comes.
    flood(1);
    assert_eq!(drain(&mut left), 2);
    assert_eq!(left.counters().kernel_drops, 400 - came as u64);
}

#[test]
fn the_descriptor_tells_of_both_sockets_and_of_room() {
    let (mut left, mut right) = pair();
    let mut third = link("127.0.0.1:0", UdpOptions::default());
    // Before there is a favourite, as callers do.
    let descriptor = left.descriptor().unwrap().try_clone_to_owned().unwrap();
    favour(&mut left, right.local_address());
    for other in [&mut right, &mut third] {
        assert!(!is_readable(descriptor.as_fd()));
        assert_eq!(other.send(&[Burst::single(left.local_address(), b"news")]), Ok(1));
        assert!(is_readable(descriptor.as_fd()));
        assert_eq!(left.descriptors().into_iter().flatten().filter(|each| is_readable(*each)).count(), 1);
        assert_eq!(drain(&mut left), 1);
    }
    for by_favourite in [false, true] {
        assert!(!is_readable(descriptor.as_fd()));
        left.note_room(by_favourite, false);
        assert!(is_readable(descriptor.as_fd()), "there is room");
        assert_eq!(left.full_descriptor(), usize::from(by_favourite));
        // Somebody sends, or nobody wants to any more.
        let to = if by_favourite { right.local_address() } else { third.local_address() };
        assert_eq!(left.send(&[Burst::single(to, b"x")]), Ok(1));
        assert!(!is_readable(descriptor.as_fd()));
        left.note_room(by_favourite, false);
        drain(&mut left);
        assert!(!is_readable(descriptor.as_fd()));
    }
}

#[test]
fn a_spinning_receiver_makes_one_call_a_look() {
    let (mut left, right) = pair();
    favour(&mut left, right.local_address());
    drain(&mut left);
    let before = left.counters().system_calls;
    let mut inbox = Inbox::new();
    for _ in 0..800 {
        left.receive(&mut inbox).unwrap();
    }
    assert_eq!(left.counters().system_calls - before, 800 + 800 / u64::from(INTERVAL_MAX));
}

#[test]
fn without_the_option_there_is_one_socket() {
    let (mut left, right) = (link("127.0.0.1:0", UdpOptions { favourite: false, ..UdpOptions::default() }), pair().0);
    for _ in 0..2 * VOTES_NEXT {
        assert_eq!(left.send(&[Burst::single(right.local_address(), b"x")]), Ok(1));
    }
    assert!(left.favourite.is_none());
    use std::os::fd::AsRawFd;
    assert_eq!(left.descriptor().unwrap().as_raw_fd(), left.main.as_fd().as_raw_fd());
}

#[test]
fn a_peer_that_never_answers_is_reached_anew_where_the_kernel_chose_the_way() {
    let mut left = link("0.0.0.0:0", UdpOptions::default());
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = silent.local_addr().unwrap();
    favour(&mut left, to);
    for _ in 0..UNANSWERED_MAX {
        assert_eq!(left.send(&[Burst::single(to, b"hello?")]), Ok(1));
    }
    assert_eq!(peer(&left), None);
    favour(&mut left, to);
    silent.send_to(b"yes", ("127.0.0.1", left.local_address().port())).unwrap();
    assert_eq!(received(&mut left, 1), [(to, b"yes".to_vec())]);
}

#[test]
fn a_look_after_the_main_socket_polled_readable_is_there() {
    let (mut left, right) = pair();
    let mut third = link("127.0.0.1:0", UdpOptions::default());
    favour(&mut left, right.local_address());
    let mut inbox = Inbox::new();
    for _ in 0..5 {
        drain(&mut left);
        assert_eq!(third.send(&[Burst::single(left.local_address(), b"stranger")]), Ok(1));
        assert!(is_readable(left.descriptors()[0].unwrap()));
        left.note_ready(0);
        assert_eq!(left.receive(&mut inbox), Ok(1));
    }
}

/// A packet of `bytes` that says so in its first two.
fn sized(bytes: usize, mark: u8) -> Vec<u8> {
    let mut packet = vec![mark; bytes];
    packet[..2].copy_from_slice(&(bytes as u16 - 2).to_le_bytes());
    packet
}

/// Two links whose packets tell their length, and of which the left one receives plainly by now.
fn calm_pair() -> (UdpLink, UdpLink) {
    let options =
        UdpOptions { length: Some(LengthField { at: 0, uncounted: 2, padded: None }), ..UdpOptions::default() };
    let (mut left, mut right) = (link("127.0.0.1:0", options), link("127.0.0.1:0", options));
    favour(&mut left, right.local_address());
    drain(&mut left);
    for _ in 0..10 {
        assert_eq!(right.send(&[Burst::single(left.local_address(), &sized(20, 1))]), Ok(1));
        assert_eq!(received(&mut left, 1), [(right.local_address(), sized(20, 1))]);
        drain(&mut left);
    }
    let favourite = left.favourite.as_ref().unwrap();
    assert!(favourite.only_sender() == Some(right.local_address()) && favourite.socket.pace.is_calm());
    (left, right)
}

#[test]
fn what_is_received_plainly_is_cut_where_packets_say() {
    let (mut left, mut right) = calm_pair();
    let (from, to) = (right.local_address(), left.local_address());
    let (before, mut expected) = (left.counters(), Vec::new());
    for round in 0..100u8 {
        // One, or a batch of equal ones and a shorter one, which the kernel hands over in one piece.
        let count = if round % 3 == 0 { 5 } else { 1 };
        let mut packets: Vec<Vec<u8>> = (0..count).map(|_| sized(100, round)).collect();
        if count > 1 {
            packets.push(sized(33, round));
        }
        assert_eq!(right.send(&[Burst { to, bytes: &packets.concat(), segment: 100 }]), Ok(1));
        expected.extend(packets.into_iter().map(|packet| (from, packet)));
        let count = expected.len();
        assert_eq!(received(&mut left, count), std::mem::take(&mut expected), "round {round}");
        drain(&mut left);
    }
    assert_eq!(left.counters().packets_received - before.packets_received, 66 + 34 * 6);
    assert_eq!(left.counters().soft_errors, 0);
}

#[test]
fn a_packet_that_lies_about_its_length_spoils_no_more_than_its_batch() {
    let (mut left, mut right) = calm_pair();
    let (from, to) = (right.local_address(), left.local_address());
    for length in [0, 1, 39, 40, 41, u16::MAX] {
        let mut liar = vec![7; 40];
        liar[..2].copy_from_slice(&length.to_le_bytes());
        assert_eq!(right.send(&[Burst::single(to, &liar)]), Ok(1));
        let pieces = received(&mut left, 1);
        assert_eq!(pieces.iter().flat_map(|(_, piece)| piece.clone()).collect::<Vec<_>>(), liar);
        drain(&mut left);
        assert_eq!(right.send(&[Burst::single(to, &sized(40, 2))]), Ok(1));
        assert_eq!(received(&mut left, 1), [(from, sized(40, 2))]);
        drain(&mut left);
    }
    // Too short to tell, and nothing at all.
    for short in [&[9u8][..], &[]] {
        assert_eq!(rustix::net::sendto(&right.main, short, SendFlags::DONTWAIT, &to), Ok(short.len()));
        assert_eq!(received(&mut left, 1), [(from, short.to_vec())]);
        drain(&mut left);
    }
}

#[test]
fn plainly_received_packets_are_never_put_down_to_another_sender() {
    let (mut left, mut right) = calm_pair();
    let mut third = link("127.0.0.1:0", UdpOptions::default());
    let at = left.local_address();
    // Both send while the left one turns from one to the other.
    let (mut inbox, mut heard) = (Inbox::new(), 0);
    for turn in 0..6 {
        let next = if turn % 2 == 0 { third.local_address() } else { right.local_address() };
        for _ in 0..2 * VOTES_NEXT {
            assert_eq!(right.send(&[Burst::single(at, &sized(30, 1))]), Ok(1));
            assert_eq!(third.send(&[Burst::single(at, &sized(30, 3))]), Ok(1));
            assert_eq!(left.send(&[Burst::single(next, &sized(30, 2))]), Ok(1));
            for _ in 0..3 {
                left.receive(&mut inbox).unwrap();
                for (from, packet) in inbox.packets() {
                    let sender = if packet[2] == 1 { right.local_address() } else { third.local_address() };
                    assert_eq!((from, packet.len()), (sender, 30));
                    heard += 1;
                }
            }
            if peer(&left) == Some(next) {
                break;
            }
        }
        assert_eq!(peer(&left), Some(next));
        drain(&mut left);
    }
    assert!(heard > 100);
}

#[test]
fn a_look_after_the_favourite_polled_readable_is_there() {
    let (mut left, mut right) = pair();
    let mut third = link("127.0.0.1:0", UdpOptions::default());
    favour(&mut left, right.local_address());
    let mut inbox = Inbox::new();
    for idle in 0..2 * INTERVAL_MAX {
        drain(&mut left);
        // A stranger was heard last, so the main socket is looked at most.
        assert_eq!(third.send(&[Burst::single(left.local_address(), b"stranger")]), Ok(1));
        while left.receive(&mut inbox).unwrap() == 0 {}
        (0..4 + idle).for_each(|_| assert_eq!(left.receive(&mut inbox), Ok(0)));
        assert_eq!(right.send(&[Burst::single(left.local_address(), b"favourite")]), Ok(1));
        assert!(is_readable(left.descriptors()[1].unwrap()));
        left.note_ready(1);
        assert_eq!(left.receive(&mut inbox), Ok(1), "after {idle} looks in vain");
    }
}
