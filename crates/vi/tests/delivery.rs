//! What a completion means, and what becomes of messages that find no room, no receive or no end.

use crate::support::seeded::{bytes, fill, verify};
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, buffer, buffer_of};
use highwire_vi::{
    Failure, Message, Nic, Operation, Path, PayloadToken, PostError, PulseRecord, Pulses, Receive, Reliability,
    SendStats, State, ViOptions, WaitError,
};
use std::time::{Duration, Instant};

/// A peer that connects, and touches nothing before it is told to.
fn idle_until_told(stage: &Stage, sizes: &[usize]) {
    let nic = stage.nic();
    let mut line = Line::connect(&nic, "shm:levels");
    stage.mark("connected");
    stage.await_mark("read");
    for (seed, size) in sizes.iter().enumerate() {
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, *size))).unwrap();
        verify(seed as u64, &line.received().into_buffer().unwrap());
    }
    assert_eq!(line.end().0, Failure::PeerClosed);
}

/// One message inline, one in the payload area, one referenced.
const WAYS: [(usize, Path); 3] = [(100, Path::Choose), (10_000, Path::Buffered), (100_000, Path::Referenced)];

fn post_each_way(nic: &Nic, line: &mut Line) {
    for (number, (size, path)) in WAYS.into_iter().enumerate() {
        let payload = buffer_of(nic, &bytes(number as u64, size));
        line.vi.post_send(Message::new(number as u64).payload(payload).by(path)).unwrap();
    }
}

fn completed_before_the_peer_reads(level: Reliability) -> Vec<u64> {
    let stage = Stage::open();
    stage.role("peer", |stage| idle_until_told(stage, &WAYS.map(|(size, _)| size)));
    let nic = stage.nic();
    let listener = nic.listen("shm:levels").unwrap();
    let peer = stage.start("peer");
    let options = ViOptions::new().reliability(level).pulses(Pulses::Whole);
    let mut line = Line::accept_with(&listener, &options);
    stage.await_mark("connected");
    // Not even running: what completes now depends on nothing that the peer does.
    peer.freeze();
    post_each_way(&nic, &mut line);
    let mut early = Vec::new();
    while let Ok(done) = line.vi.wait(A_WHILE) {
        assert_eq!((done.operation, done.status), (Operation::Send, Ok(())));
        early.push(done.token);
    }
    peer.thaw();
    stage.mark("read");
    let mut all = early.clone();
    while all.len() < WAYS.len() {
        all.push(line.sent().token);
    }
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2], "each completes once");
    drop(line);
    peer.finish();
    early
}

#[test]
fn reliable_delivery_completes_once_the_message_is_visible() {
    // A referenced buffer stays the peer's until it has read it.
    assert_eq!(completed_before_the_peer_reads(Reliability::Delivery), [0, 1]);
}

#[test]
fn reliable_reception_completes_only_when_the_peer_has_taken_the_message() {
    assert_eq!(completed_before_the_peer_reads(Reliability::Reception), [0u64; 0]);
}

#[test]
fn unreliable_delivery_completes_once_the_message_has_left() {
    assert_eq!(completed_before_the_peer_reads(Reliability::Unreliable), [0, 1]);
}

#[test]
fn reception_in_place_completes_while_the_payload_is_still_held() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let reception = ViOptions::new().reliability(Reliability::Reception).pulses(Pulses::Whole);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &reception);
    far.vi.post_send(Message::new(1).payload(buffer(&other, 10_000)).by(Path::Buffered)).unwrap();
    assert!(far.vi.poll().is_none());
    near.vi.post_recv(Receive::new(1).in_place()).unwrap();
    let held = near.received();
    // Progress past a payload in place is told with the next look, in case it is given back before.
    assert!(near.vi.poll().is_none());
    assert_eq!(far.sent().token, 1, "the peer's application has it");
    drop(held);
}

#[test]
fn the_only_send_outstanding_completes_without_a_further_look_of_the_reader() {
    // The reader takes the message and goes off to compute.
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    for (token, path) in
        [Path::Referenced, Path::Buffered, Path::Referenced, Path::Choose, Path::Referenced].into_iter().enumerate()
    {
        far.vi.post_send(Message::new(token as u64).payload(buffer(&other, 9000)).by(path)).unwrap();
        near.vi.post_recv(Receive::new(0).into(buffer(&one, 9000))).unwrap();
        near.received();
        let done = far.vi.wait(PATIENCE / 10).expect("the only send outstanding");
        assert_eq!((done.token, done.status), (token as u64, Ok(())));
    }
}

#[test]
fn what_was_taken_counts_as_delivered_though_the_taker_closes_at_once() {
    const COUNT: u64 = 20;
    let stage = Stage::open();
    stage.role("taker", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:taken");
        for token in 0..COUNT {
            line.vi.post_recv(Receive::new(token).into(buffer(&nic, 9000))).unwrap();
            verify(token, &line.received().into_buffer().unwrap());
        }
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:taken").unwrap();
    let taker = stage.start("taker");
    let mut line = Line::accept(&listener);
    for token in 0..COUNT {
        let payload = buffer_of(&nic, &bytes(token, 9000));
        line.vi.post_send(Message::new(token).payload(payload).by(Path::Referenced)).unwrap();
    }
    taker.finish();
    let (failure, done) = line.end();
    assert_eq!((failure, done.len()), (Failure::PeerClosed, COUNT as usize));
    assert!(done.iter().all(|done| done.status.is_ok()), "{done:?}");
}

#[test]
fn an_unreliable_message_without_room_is_dropped_and_its_buffer_comes_back() {
    let stage = Stage::open();
    let nic = || stage.nic_with(|config| config.depth = 8);
    let (one, other) = (nic(), nic());
    let unreliable = ViOptions::new().reliability(Reliability::Unreliable);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &unreliable);
    for token in 0..20 {
        far.vi.post_send(Message::new(token).payload(buffer_of(&other, &bytes(token, 500)))).unwrap();
    }
    for token in 0..20 {
        let done = far.next(Operation::Send);
        let expected = if token < 8 { Ok(()) } else { Err(Failure::Dropped) };
        assert_eq!((done.token, done.status), (token, expected));
        assert!(done.into_buffer().is_some());
    }
    for token in 0..8 {
        near.vi.post_recv(Receive::new(0).into(buffer(&one, 500))).unwrap();
        verify(token, &near.received().into_buffer().unwrap());
    }
    assert!(near.vi.poll().is_none(), "progress is published");
    far.vi.post_send(Message::new(30).payload(buffer(&other, 5))).unwrap();
    assert_eq!(far.sent().token, 30, "the VI goes on");
}

#[test]
fn messages_sent_before_any_receive_is_posted_are_held_back_and_not_lost() {
    const COUNT: u64 = 500;
    let size = |number: u64| [8, 300, 20_000][number as usize % 3];
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:early");
        for number in 0..COUNT {
            line.vi.post_send(Message::new(number).payload(buffer_of(&nic, &bytes(number, size(number))))).unwrap();
        }
        stage.mark("all-posted");
        (0..COUNT).for_each(|_| drop(line.sent()));
        assert!(line.vi.sender().stats().waits > 0, "the credit window held the rest back");
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:early").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    stage.await_mark("all-posted");
    assert!(line.vi.poll().is_none());
    for number in 0..COUNT {
        line.vi.post_recv(Receive::new(number).into(buffer(&nic, 20_000))).unwrap();
        let done = line.received();
        assert_eq!((done.token, done.length), (number, size(number)));
        verify(number, &done.into_buffer().unwrap()[..size(number)]);
    }
    assert_eq!(line.end().0, Failure::PeerClosed);
    sender.finish();
}

#[test]
fn a_message_longer_than_the_buffer_is_an_error_with_both_lengths_and_waits_for_a_larger_one() {
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:long");
        for (seed, (size, path)) in
            [(200, Path::Choose), (3000, Path::Buffered), (1 << 20, Path::Buffered), (50_000, Path::Referenced)]
                .into_iter()
                .enumerate()
        {
            let payload = buffer_of(&nic, &bytes(seed as u64, size));
            line.vi.post_send(Message::new(0).payload(payload).by(path)).unwrap();
        }
        (0..4).for_each(|_| drop(line.sent()));
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:long").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    for (seed, size) in [200, 3000, 1 << 20, 50_000].into_iter().enumerate() {
        let rooms = [
            Receive::new(1),
            Receive::new(1).into(buffer(&nic, 199)),
            Receive::new(1).into(buffer(&nic, 50)).into(buffer(&nic, 100)),
        ];
        for (room, buffer) in rooms.into_iter().zip([0, 199, 150]) {
            line.vi.post_recv(room).unwrap();
            let done = line.next(Operation::Receive);
            let failure = Failure::TooLong { message: size as u64, buffer };
            assert_eq!((done.status, done.length), (Err(failure), 0));
            assert_eq!(
                failure.to_string(),
                format!("a message of {size} bytes does not fit the posted buffer of {buffer} bytes")
            );
            assert_eq!(line.vi.state(), State::Connected, "a receive failed, not the VI");
        }
        line.vi.post_recv(Receive::new(2).into(buffer(&nic, size))).unwrap();
        verify(seed as u64, &line.received().into_buffer().unwrap());
    }
    assert_eq!(line.end().0, Failure::PeerClosed);
    sender.finish();
}

/// Sends one message of `size` under a policy and tells how it was cut, on both sides.
fn cut(stage: &Stage, pulses: Pulses, size: usize) -> (Vec<PulseRecord>, Vec<PulseRecord>) {
    let (one, other) = (stage.nic(), stage.nic());
    let options = ViOptions::new().pulses(pulses).path(Path::Buffered);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &options);
    far.vi.sender().record_pulses(10_000);
    near.vi.receiver().record_pulses(10_000);
    let mut reading = std::thread::spawn(move || {
        near.vi.post_recv(Receive::new(1).into(buffer(&one, size))).unwrap();
        verify(4, &near.received().into_buffer().unwrap());
        near.vi.receiver().take_pulses()
    });
    far.vi.post_send(Message::new(1).payload(buffer_of(&other, &bytes(4, size)))).unwrap();
    far.sent();
    let received = loop {
        if reading.is_finished() {
            break std::mem::replace(&mut reading, std::thread::spawn(Vec::new)).join().unwrap();
        }
        far.vi.poll();
        std::thread::yield_now();
    };
    (far.vi.sender().take_pulses(), received)
}

#[test]
fn large_messages_are_cut_as_the_policy_says() {
    let stage = Stage::open();
    let size = 200_000;
    for pulses in [Pulses::Adaptive, Pulses::Fixed(1408), Pulses::Fixed(1), Pulses::Whole] {
        let size = if pulses == Pulses::Fixed(1) { 3000 } else { size };
        let (sent, received) = cut(&stage, pulses, size);
        for records in [&sent, &received] {
            assert_eq!(records.iter().map(|pulse| pulse.bytes).sum::<usize>(), size, "{pulses:?}");
            assert!(records.iter().all(|pulse| pulse.message == 0 && pulse.started <= pulse.ended), "{pulses:?}");
        }
        assert!(sent.iter().zip(&received).all(|(sent, received)| sent.bytes == received.bytes), "{pulses:?}");
        match pulses {
            Pulses::Whole => assert_eq!(sent.len(), 1),
            Pulses::Fixed(bytes) => {
                assert!(sent[..sent.len() - 1].iter().all(|pulse| pulse.bytes == bytes), "{pulses:?}")
            }
            Pulses::Adaptive => assert!(sent[..sent.len() - 1].iter().all(|pulse| pulse.bytes >= 4096)),
        }
    }
}

/// Ten large messages from a process whose Nic is changed so, and how they went.
fn bulk(change: fn(&mut highwire_vi::Config), report: fn(SendStats)) {
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic_with(change);
        let mut line = Line::connect(&nic, "shm:bulk");
        for number in 0..10u64 {
            let size = 100_000 * number as usize + 241;
            let control = bytes(number, 128);
            let message = Message::new(number).payload(buffer_of(&nic, &bytes(number, size))).control(&control);
            let message = if number % 2 == 0 { message.lands_at(PayloadToken(number)) } else { message };
            line.vi.post_send(message.by(Path::Buffered).immediate(9)).unwrap();
        }
        (0..10).for_each(|_| drop(line.sent()));
        report(line.vi.sender().stats());
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:bulk").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    for number in 0..10u64 {
        let receive = Receive::new(number).into(buffer(&nic, 100_000 * number as usize + 241));
        if number % 2 == 0 {
            line.vi.expect(PayloadToken(number), receive).unwrap();
        } else {
            line.vi.post_recv(receive).unwrap();
        }
    }
    for number in 0..10u64 {
        let done = line.received();
        assert_eq!((done.token, done.immediate), (number, 9));
        verify(number, &done.control);
        verify(number, &done.into_buffer().unwrap());
    }
    assert_eq!(line.end().0, Failure::PeerClosed);
    sender.finish();
}

#[test]
fn a_payload_area_grows_under_bulk_and_only_to_its_limit() {
    bulk(
        |config| (config.payload_bytes_start, config.payload_bytes_max) = (16 << 10, 128 << 10),
        |stats| assert!((1..=4).contains(&stats.growths), "{stats:?}"),
    );
}

#[test]
fn without_any_payload_area_messages_go_through_the_slots() {
    bulk(|config| config.payload_bytes_total_max = 0, |stats| assert_eq!((stats.growths, stats.pulses), (0, 0)));
}

#[test]
fn with_a_region_too_full_for_a_payload_area_messages_go_through_the_slots() {
    bulk(
        |config| (config.region_bytes, config.payload_bytes_start) = (1 << 20, 1 << 20),
        |stats| assert_eq!(stats.growths, 0, "{stats:?}"),
    );
}

#[test]
fn counters_just_below_their_wrap_around_go_on_counting() {
    let stage = Stage::open();
    for first in [u64::from(u32::MAX) - 40, u64::from(u32::MAX), (1 << 33) - 1, (1 << 48) - 30] {
        let nic = || stage.nic_with(|config| (config.first_index, config.depth, config.loans) = (first, 16, 16));
        let (one, other) = (nic(), nic());
        let options = ViOptions::new().reliability(Reliability::Reception).pulses(Pulses::Whole);
        let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &options);
        let mut held = Vec::new();
        for number in 0..100u64 {
            let path = [Path::Choose, Path::Buffered, Path::Referenced][number as usize % 3];
            far.vi.post_send(Message::new(number).payload(buffer_of(&other, &bytes(number, 300))).by(path)).unwrap();
            near.vi.post_recv(Receive::new(number).in_place()).unwrap();
            let payload = near.received().into_in_place().unwrap();
            let mut found = [0; 300];
            payload.copy_to(0, &mut found);
            verify(number, &found);
            held.push(payload);
            // The oldest of several goes back after the ring has gone round.
            if held.len() > 12 {
                near.vi.receiver().release(held.remove(0));
            }
        }
        drop(held);
        assert!(near.vi.poll().is_none());
        let tokens: std::collections::BTreeSet<u64> = (0..100).map(|_| far.sent().token).collect();
        assert_eq!(tokens, (0..100).collect(), "from {first}");
    }
}

#[test]
fn what_was_sent_before_a_good_disconnect_arrives_after_the_sender_is_gone() {
    const COUNT: u64 = 300;
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:linger");
        for number in 0..COUNT {
            line.vi.post_send(Message::new(number).payload(buffer_of(&nic, &bytes(number, 700)))).unwrap();
        }
        // More than the ring holds: it waits for the receiver.
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:linger").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    for number in 0..COUNT - 20 {
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, 700))).unwrap();
        verify(number, &line.received().into_buffer().unwrap());
    }
    sender.finish();
    for number in COUNT - 20..COUNT {
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, 700))).unwrap();
        verify(number, &line.received().into_buffer().unwrap());
    }
    line.vi.post_recv(Receive::new(77).into(buffer(&nic, 700))).unwrap();
    let (failure, left) = line.end();
    assert_eq!((failure, left.len()), (Failure::PeerClosed, 1));
    assert_eq!((left[0].token, left[0].status), (77, Err(Failure::PeerClosed)));
}

#[test]
fn a_disconnect_that_cannot_finish_in_time_says_so_and_voids_the_rest() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    far.vi.post_send(Message::new(1).payload(buffer(&other, 9000)).by(Path::Referenced)).unwrap();
    let start = Instant::now();
    assert_eq!(far.vi.disconnect(A_WHILE), Err(WaitError::TimedOut(A_WHILE)));
    assert!(start.elapsed() >= A_WHILE);
    near.vi.post_recv(Receive::new(1).into(buffer(&one, 9000))).unwrap();
    let (failure, left) = near.end();
    assert_eq!(failure, Failure::PeerAborted, "its buffer may be in use for something else by now");
    assert_eq!(left[0].status, Err(Failure::PeerAborted));
}

#[test]
fn a_vi_dropped_in_the_middle_of_a_message_aborts_it_at_the_other_end() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let big = 20 << 20;
    far.vi.post_send(Message::new(1).payload(buffer(&other, big)).by(Path::Buffered)).unwrap();
    near.vi.post_recv(Receive::new(5).into(buffer(&one, big))).unwrap();
    assert!(near.vi.poll().is_none(), "only a part of it has come");
    drop(far);
    let (failure, left) = near.end();
    assert_eq!((failure, left.len()), (Failure::PeerAborted, 1));
    assert_eq!((left[0].token, left[0].status), (5, Err(Failure::PeerAborted)));
    let buffer = left.into_iter().next().unwrap().into_buffer();
    assert_eq!(buffer.map(|buffer| buffer.len()), Some(big), "the buffer comes back");
}

#[test]
fn a_closed_vi_takes_no_more_and_says_why() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (mut near, far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    assert_eq!(near.vi.state(), State::Connected);
    far.vi.disconnect(PATIENCE).unwrap();
    assert_eq!(near.end().0, Failure::PeerClosed);
    assert_eq!(near.vi.state(), State::Ended(Failure::PeerClosed));
    let refused = near.vi.post_send(Message::new(1).payload(buffer(&one, 5))).unwrap_err();
    assert_eq!(refused.reason, PostError::NotConnected(Failure::PeerClosed));
    assert_eq!(refused.to_string(), "the VI is not connected: the peer disconnected");
    let refused = near.vi.post_recv(Receive::new(1)).unwrap_err();
    assert_eq!(refused.reason, PostError::NotConnected(Failure::PeerClosed));
    assert_eq!(near.vi.send_bytes(1, b"x"), Err(PostError::NotConnected(Failure::PeerClosed)));
    assert_eq!(near.vi.wait(Duration::ZERO).unwrap_err(), WaitError::NotConnected(Failure::PeerClosed));
}

#[test]
fn the_longest_message_allowed_goes_and_a_longer_one_is_refused_on_the_sending_side() {
    let stage = Stage::open();
    let nic = || stage.nic_with(|config| config.message_bytes_max = 10_000);
    let (one, other) = (nic(), nic());
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let too_long = PostError::TooLong { bytes: 10_001, limit: 10_000 };
    let region = other.register(30_000).unwrap();
    for (seed, path) in [Path::Choose, Path::Buffered, Path::Referenced, Path::Referenced].into_iter().enumerate() {
        let mut payload = region.slice(0..10_001).unwrap();
        payload.set_len(10_000);
        fill(seed as u64, &mut payload);
        far.vi.post_send(Message::new(1).payload(payload).by(path)).unwrap();
        near.vi.post_recv(Receive::new(0).into(buffer(&one, 10_000))).unwrap();
        verify(seed as u64, &near.received().into_buffer().unwrap());
        let mut payload = far.sent().into_buffer().unwrap();
        payload.set_len(10_001);
        let refused = far.vi.post_send(Message::new(1).payload(payload).by(path)).map_err(|refused| refused.reason);
        assert_eq!(refused, Err(too_long.clone()), "{path:?}");
    }
    far.vi.send_bytes(2, &bytes(2, 10_000)).unwrap();
    near.vi.post_recv(Receive::new(0).into(buffer(&one, 10_000))).unwrap();
    verify(2, &near.received().into_buffer().unwrap());
    assert_eq!(far.vi.send_bytes(1, &[0; 10_001]), Err(too_long));
}
