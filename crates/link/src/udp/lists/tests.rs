//! A packet comes by the list that it names, and a list that is not there costs nothing but speed.

use super::super::tests::{lacks_ipv6, link, received};
use super::super::{BindError, LengthField};
use super::*;
use crate::{Burst, Inbox, Link, UdpLink};
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::{AsRawFd, FromRawFd};
use std::time::{Duration, Instant};

const AT: usize = 3;

fn with_lists(count: u8) -> UdpOptions {
    UdpOptions { lists: Some(ListField { count, at: AT }), ..UdpOptions::default() }
}

/// A packet that names a list.
fn naming(list: u8, mark: u8) -> Vec<u8> {
    let mut packet = vec![mark; 40];
    packet[AT] = list;
    packet
}

/// The next packet, by which list it came and from where.
fn next(link: &mut UdpLink) -> (u8, SocketAddr, Vec<u8>) {
    let (mut inbox, start) = (Inbox::new(), Instant::now());
    while link.receive(&mut inbox).unwrap() == 0 {
        assert!(start.elapsed() < Duration::from_secs(5), "nothing came to {link:?}");
    }
    assert_eq!(inbox.len(), 1);
    let (from, packet) = inbox.packets().next().unwrap();
    (inbox.list(), from, packet.to_vec())
}

/// Sends a packet that names each list up to `last`; by which they come.
fn lists_of(from: &mut UdpLink, to: &mut UdpLink, address: SocketAddr, last: u8) -> Vec<u8> {
    let through = |list: u8| {
        let packet = naming(list, 7);
        assert_eq!(from.send(&[Burst::single(address, &packet)]), Ok(1));
        let (by, sender, seen) = next(to);
        assert_eq!((sender, seen), (from.local_address(), packet));
        by
    };
    (0..=last).map(through).collect()
}

/// Sends until `to` has a socket of its own, and takes in what came.
fn favour(link: &mut UdpLink, to: SocketAddr) {
    let mut inbox = Inbox::new();
    for _ in 0..600 {
        if link.favourite.as_ref().is_some_and(|favourite| favourite.peer == Some(to)) {
            return;
        }
        assert_eq!(link.send(&[Burst::single(to, b"vote")]), Ok(1));
        link.receive(&mut inbox).unwrap();
    }
    panic!("{to} did not become the favourite of {link:?}");
}

fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let mut set = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    poll(&mut set, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

/// Puts something else in the place of a list's socket.
fn replace(link: &UdpLink, list: u8) {
    let socket = link.lists.as_ref().unwrap().each[usize::from(list) - 1].socket.as_ref().unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    // The number stays open, as another file: whoever closes it later closes that.
    let mut place = std::mem::ManuallyDrop::new(borrowed(socket));
    rustix::io::dup2(&null, &mut place).unwrap();
}

#[expect(unsafe_code, reason = "somebody else writes over a descriptor that is ours")]
fn borrowed(socket: &Socket) -> OwnedFd {
    // SAFETY: it is not closed by the one who asks.
    unsafe { OwnedFd::from_raw_fd(socket.as_fd().as_raw_fd()) }
}

#[test]
fn packets_come_by_the_list_that_they_name_and_others_by_none() {
    let addresses = [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("[::1]", "[::1]"), ("[::]", "[::1]")];
    let without_ipv6 = lacks_ipv6();
    for (bound, reached) in addresses.into_iter().chain([("[::]", "127.0.0.1")]) {
        if bound.starts_with('[') && without_ipv6 {
            continue;
        }
        let mut left = link(&format!("{bound}:0"), with_lists(4));
        let mut right = link(&format!("{reached}:0"), UdpOptions::default());
        let to = format!("{reached}:{}", left.local_address().port()).parse().unwrap();
        assert_eq!((left.counters().lists_refused, left.lists()), (0, 0b11110));
        assert_eq!(lists_of(&mut right, &mut left, to, 6), [0, 1, 2, 3, 4, 0, 0], "at {bound}");
        for bytes in 1..=AT {
            // Too short to name one.
            assert_eq!(right.send(&[Burst::single(to, &naming(2, 2)[..bytes])]), Ok(1));
            assert_eq!(next(&mut left).0, 0);
        }
        assert_eq!(right.send(&[Burst::single(to, &naming(2, 2)[..=AT])]), Ok(1));
        assert_eq!(next(&mut left).0, 2);
        // What the kernel put together stays so.
        let burst = Burst { to, bytes: &naming(3, 3).repeat(20), segment: 40 };
        assert_eq!(right.send(&[burst]), Ok(1));
        assert!(received(&mut left, 20).iter().all(|(_, packet)| *packet == naming(3, 3)));
    }
}

#[test]
fn more_lists_than_there_can_be_are_as_many_as_there_can() {
    let (mut left, mut right) = (link("127.0.0.1:0", with_lists(200)), link("127.0.0.1:0", UdpOptions::default()));
    assert_eq!(left.lists(), 0xfffe);
    let to = left.local_address();
    let by: Vec<u8> = (0..=15).chain([0]).collect();
    assert_eq!(lists_of(&mut right, &mut left, to, 16), by);
    let none = link("127.0.0.1:0", with_lists(0));
    assert_eq!((none.lists(), none.counters().lists_refused, none.descriptors()[2].is_none()), (0, 0, true));
}

#[test]
fn the_address_is_refused_to_a_second_link_whether_it_has_lists_or_not() {
    let left = link("127.0.0.1:0", with_lists(4));
    let address = left.local_address();
    for options in [UdpOptions::default(), with_lists(4)] {
        let error = UdpLink::bind(address, options).unwrap_err();
        assert_eq!(error, BindError::Address { address, errno: Errno::ADDRINUSE });
    }
    // And the first is as it was.
    let (mut left, mut right) = (left, link("127.0.0.1:0", with_lists(2)));
    assert_eq!(lists_of(&mut right, &mut left, address, 4), [0, 1, 2, 3, 4]);
    let to = right.local_address();
    assert_eq!(lists_of(&mut left, &mut right, to, 4), [0, 1, 2, 0, 0]);
}

#[test]
fn what_the_favourite_sends_comes_to_its_own_socket_and_the_rest_by_lists() {
    let without_ipv6 = lacks_ipv6();
    for (bound, reached) in
        [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("[::1]", "[::1]"), ("[::]", "[::1]")]
    {
        if bound.starts_with('[') && without_ipv6 {
            continue;
        }
        let mut left = link(&format!("{bound}:0"), with_lists(4));
        let [mut near, mut far] = [0; 2].map(|_| link(&format!("{reached}:0"), UdpOptions::default()));
        let to = format!("{reached}:{}", left.local_address().port()).parse().unwrap();
        for _ in 0..2 {
            favour(&mut left, near.local_address());
            assert_eq!(lists_of(&mut near, &mut left, to, 6), [0; 7], "at {bound}");
            assert_eq!(lists_of(&mut far, &mut left, to, 6), [0, 1, 2, 3, 4, 0, 0], "at {bound}");
            std::mem::swap(&mut near, &mut far);
        }
        assert_eq!(left.lists(), 0b11110);
    }
}

#[test]
fn a_lost_list_is_out_of_use_and_the_others_go_on() {
    let (mut left, mut right) = (link("127.0.0.1:0", with_lists(4)), link("127.0.0.1:0", UdpOptions::default()));
    let to = left.local_address();
    assert_eq!(lists_of(&mut right, &mut left, to, 4), [0, 1, 2, 3, 4]);
    replace(&left, 2);
    left.note_list(2, true);
    let mut inbox = Inbox::new();
    for _ in 0..20 {
        assert_eq!(left.receive(&mut inbox), Ok(0));
    }
    assert_eq!((left.counters().lists_lost, left.lists()), (1, 0b11010));
    // All packets come; those that name it come by none, and the last list may have another number.
    let by = lists_of(&mut right, &mut left, to, 6);
    assert_eq!((by[..4].to_vec(), &by[5..]), (vec![0, 1, 0, 3], &[0, 0][..]));
    left.note_list(2, true);
    for list in [1, 3, 4] {
        replace(&left, list);
        left.note_list(list, true);
    }
    for _ in 0..20 {
        assert_eq!(left.receive(&mut inbox), Ok(0));
    }
    assert_eq!((left.counters().lists_lost, left.lists()), (4, 0));
    assert_eq!(lists_of(&mut right, &mut left, to, 6), [0; 7]);
    favour(&mut left, right.local_address());
    assert_eq!(lists_of(&mut right, &mut left, to, 6), [0; 7]);
}

#[test]
fn a_list_lost_beside_a_favourite_gives_nobody_a_wrong_sender() {
    let length = Some(LengthField { at: 0, uncounted: 0, padded: None });
    let mut left = link("127.0.0.1:0", UdpOptions { length, ..with_lists(4) });
    let (mut near, mut far) = (link("127.0.0.1:0", UdpOptions::default()), link("127.0.0.1:0", UdpOptions::default()));
    let to = left.local_address();
    favour(&mut left, near.local_address());
    let sized = |list: u8| [&40u16.to_le_bytes(), &naming(list, 1)[2..]].concat();
    let say = |from: &mut UdpLink, left: &mut UdpLink, list: u8| {
        assert_eq!(from.send(&[Burst::single(to, &sized(list))]), Ok(1));
        let (_, sender, packet) = next(left);
        assert_eq!((sender, packet), (from.local_address(), sized(list)));
    };
    // One by one, until they are received plainly.
    (0..20).for_each(|_| say(&mut near, &mut left, 0));
    replace(&left, 1);
    for list in 0..=5 {
        say(&mut near, &mut left, list);
        say(&mut far, &mut left, list);
    }
}

#[test]
fn a_spinning_receiver_asks_for_lists_rarely_and_once_for_all() {
    for favourite in [false, true] {
        let options = UdpOptions { favourite, ..with_lists(15) };
        let mut left = link("127.0.0.1:0", options);
        let (before, mut inbox) = (left.counters().system_calls, Inbox::new());
        for _ in 0..640 {
            assert_eq!(left.receive(&mut inbox), Ok(0));
        }
        assert_eq!(left.counters().system_calls - before, 640 + 640 / u64::from(ASK_EVERY));
    }
}

#[test]
fn a_list_in_use_is_looked_at_soon_and_one_that_is_not_grows_cold() {
    let (mut left, mut right) = (link("127.0.0.1:0", with_lists(4)), link("127.0.0.1:0", UdpOptions::default()));
    let (to, mut inbox) = (left.local_address(), Inbox::new());
    left.note_list(3, true);
    for _ in 0..100 {
        left.receive(&mut inbox).unwrap();
    }
    assert_eq!(right.send(&[Burst::single(to, &naming(3, 1))]), Ok(1));
    let looks = (1..).find(|_| left.receive(&mut inbox).unwrap() == 1).unwrap();
    assert!(looks <= WARM && inbox.list() == 3, "{looks} looks");
    left.note_list(3, false);
    for _ in 0..2 * COLD {
        left.receive(&mut inbox).unwrap();
    }
    assert!(left.lists.as_ref().unwrap().each.iter().all(|list| list.interval == COLD));
    // Of lists that are not there nothing is noted.
    (0..=u8::MAX).for_each(|list| left.note_list(list, list > 4));
}

#[test]
fn descriptors_tell_of_lists_and_the_next_look_is_there() {
    for favourite in [false, true] {
        let mut left = link("127.0.0.1:0", UdpOptions { favourite, ..with_lists(4) });
        let mut right = link("127.0.0.1:0", UdpOptions::default());
        let one = left.descriptor().unwrap().try_clone_to_owned().unwrap();
        let third = left.descriptors()[2].unwrap().try_clone_to_owned().unwrap();
        assert!(!is_readable(one.as_fd()) && !is_readable(third.as_fd()));
        let mut inbox = Inbox::new();
        for list in [4, 1, 0] {
            let packet = naming(list, 1);
            assert_eq!(right.send(&[Burst::single(left.local_address(), &packet)]), Ok(1));
            assert!(is_readable(one.as_fd()));
            assert_eq!(is_readable(third.as_fd()), list > 0);
            left.note_ready(if list > 0 { 2 } else { 0 });
            assert_eq!((left.receive(&mut inbox), inbox.list()), (Ok(1), list));
            assert!(!is_readable(one.as_fd()) && !is_readable(third.as_fd()));
        }
        left.note_room(false, false);
        assert!(is_readable(one.as_fd()), "there is room");
        assert_eq!(left.send(&[Burst::single(right.local_address(), b"x")]), Ok(1));
        assert!(!is_readable(one.as_fd()));
    }
}

/// Floods do not shut anybody out: each look that finds something makes the next one elsewhere.
#[test]
fn neither_lists_nor_the_other_sockets_keep_each_other_from_being_heard() {
    let mut left = link("127.0.0.1:0", UdpOptions { coalescing: false, ..with_lists(3) });
    let mut right = link("127.0.0.1:0", UdpOptions::default());
    let to = left.local_address();
    for flooded in 0..=3u8 {
        for _ in 0..150 {
            assert_eq!(right.send(&[Burst::single(to, &naming(flooded, 9))]), Ok(1));
        }
        for rare in (0..=3).filter(|rare| *rare != flooded) {
            left.note_list(rare, true);
            assert_eq!(right.send(&[Burst::single(to, &naming(rare, rare))]), Ok(1));
        }
        let mut inbox = Inbox::with_capacity(1, 2048);
        let (mut heard, mut looks) = (0, 0);
        while heard < 3 {
            left.receive(&mut inbox).unwrap();
            heard += inbox.packets().filter(|(_, packet)| packet[0] != 9).count();
            looks += 1;
            assert!(looks < 100, "{heard} were heard while {flooded} was flooded");
        }
        while left.receive(&mut inbox).unwrap() > 0 {}
    }
}

#[test]
fn a_filter_returns_lists_that_are_there() {
    use sys::Instruction::*;
    assert_eq!(filter(3, 4, 0), [LoadByte { at: 3 }, JumpIfGreater { than: 4, by: 1 }, ReturnLoaded, Return(0)]);
    assert_eq!(
        filter(3, 4, 0b10100),
        [
            LoadByte { at: 3 },
            JumpIfEqual { to: 2, by: 3 },
            JumpIfEqual { to: 4, by: 2 },
            JumpIfGreater { than: 4, by: 1 },
            ReturnLoaded,
            Return(0)
        ]
    );
}

/// A child that was forked has a copy of each socket, and whoever polls has one of what tells of them.
#[test]
fn a_lost_list_that_somebody_else_holds_wakes_nobody() {
    for found_by_a_look in [true, false] {
        let mut left = link("127.0.0.1:0", with_lists(4));
        let mut right = link("127.0.0.1:0", UdpOptions::default());
        let (to, mut inbox) = (left.local_address(), Inbox::new());
        let one = left.descriptor().unwrap().try_clone_to_owned().unwrap();
        let lists = left.descriptors()[2].unwrap().try_clone_to_owned().unwrap();
        let socket = left.lists.as_ref().unwrap().each[1].socket.as_ref().unwrap();
        let _of_the_child = rustix::io::fcntl_dupfd_cloexec(socket, 3).unwrap();
        assert_eq!(right.send(&[Burst::single(to, &naming(2, 7))]), Ok(1));
        replace(&left, 2);
        left.note_list(2, found_by_a_look);
        for _ in 0..4 {
            assert_eq!(left.receive(&mut inbox), Ok(0));
        }
        assert_eq!(left.counters().lists_lost, u64::from(found_by_a_look));
        assert!(is_readable(one.as_fd()) && is_readable(lists.as_fd()), "what nobody can receive is there");
        left.note_ready(2);
        assert_eq!(left.receive(&mut inbox), Ok(0));
        assert_eq!((left.counters().lists_lost, left.lists()), (1, 0b11010));
        assert!(!is_readable(one.as_fd()) && !is_readable(lists.as_fd()), "who polls wakes again and again");
        // The others are told of as before, as often as something is there.
        for _ in 0..3 {
            assert_eq!(right.send(&[Burst::single(to, &naming(3, 1))]), Ok(1));
            assert!(is_readable(one.as_fd()) && is_readable(lists.as_fd()));
            left.note_ready(2);
            assert_eq!((left.receive(&mut inbox), inbox.list()), (Ok(1), 3));
            assert!(!is_readable(one.as_fd()) && !is_readable(lists.as_fd()));
        }
    }
}

#[test]
fn a_list_tells_until_all_of_it_was_received() {
    let mut left = link("127.0.0.1:0", UdpOptions { coalescing: false, ..with_lists(2) });
    let mut right = link("127.0.0.1:0", UdpOptions::default());
    let mut inbox = Inbox::with_capacity(1, 2048);
    for _ in 0..5 {
        assert_eq!(right.send(&[Burst::single(left.local_address(), &naming(2, 1))]), Ok(1));
    }
    for left_over in (0..5).rev() {
        assert!(is_readable(left.descriptors()[2].unwrap()), "{left_over} are left");
        left.note_ready(2);
        while left.receive(&mut inbox).unwrap() == 0 {}
    }
    assert!(!is_readable(left.descriptors()[2].unwrap()));
}
