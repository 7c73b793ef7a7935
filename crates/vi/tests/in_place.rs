//! Payloads that stay where their sender put them: read there, held, and given back.

use crate::support::seeded::{Seeded, bytes, fill, verify};
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, buffer, buffer_of, cpu_time, until};
use highwire_vi::{Failure, InPlace, Message, Nic, Operation, Path, Pulses, Receive, Tag, ViOptions, WaitError};
use std::collections::HashSet;
use std::sync::mpsc;

fn receive_in_place(line: &mut Line, token: u64) -> InPlace {
    line.vi.post_recv(Receive::new(token).in_place()).unwrap();
    let done = line.received();
    assert_eq!(done.token, token);
    let length = done.length;
    let payload = done.into_in_place().expect("a payload in place");
    assert_eq!(payload.len(), length);
    payload
}

fn copied(payload: &InPlace) -> Vec<u8> {
    let mut bytes = vec![0; payload.len()];
    payload.copy_to(0, &mut bytes);
    bytes
}

#[test]
fn payloads_held_are_given_back_in_any_order_and_none_twice() {
    const HELD: u64 = 40;
    const ROUNDS: u64 = 5;
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        // In one piece each: a message that comes in pulses is copied together.
        let mut line = Line::connect_with(&nic, "shm:held", &ViOptions::new().pulses(Pulses::Whole));
        for round in 0..ROUNDS {
            for number in 0..HELD {
                let token = round * HELD + number;
                let path = if number % 2 == 0 { Path::Referenced } else { Path::Buffered };
                let payload = buffer_of(&nic, &bytes(token, 1000 + 500 * number as usize));
                line.vi.post_send(Message::new(token).payload(payload).by(path)).unwrap();
            }
            let tokens: HashSet<u64> = (0..HELD).map(|_| line.sent().token).collect();
            assert_eq!(tokens, (round * HELD..(round + 1) * HELD).collect(), "each completes once");
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:held").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    let mut seeded = Seeded::fresh();
    for round in 0..ROUNDS {
        let mut held: Vec<(u64, InPlace)> =
            (0..HELD).map(|number| (round * HELD + number, receive_in_place(&mut line, number))).collect();
        while !held.is_empty() {
            let (token, payload) = held.swap_remove(seeded.below(held.len()));
            assert_eq!(payload.len(), 1000 + 500 * (token % HELD) as usize);
            assert_eq!(payload.spans().count(), 1);
            verify(token, &copied(&payload));
            assert_eq!(payload.byte(999), bytes(token, 1000)[999]);
            assert!(payload.as_slice().is_none(), "its sender may still change it");
            // Every way back: at once, or with the next poll.
            if seeded.once_in(2) { line.vi.receiver().release(payload) } else { drop(payload) }
        }
    }
    assert_eq!(line.end().0, Failure::PeerClosed);
    sender.finish();
}

#[test]
fn a_reference_completes_when_its_reader_lets_go_and_not_before() {
    let stage = Stage::open();
    stage.role("reader", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:letting-go");
        let payload = receive_in_place(&mut line, 1);
        stage.mark("held");
        stage.await_mark("let-go");
        verify(5, &copied(&payload));
        line.vi.receiver().release(payload);
        stage.mark("released");
        assert_eq!(line.end().0, Failure::PeerClosed);
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:letting-go").unwrap();
    let reader = stage.start("reader");
    let mut line = Line::accept(&listener);
    let payload = buffer_of(&nic, &bytes(5, 30_000));
    line.vi.post_send(Message::new(9).payload(payload).by(Path::Referenced)).unwrap();
    stage.await_mark("held");
    let early = line.vi.wait(A_WHILE);
    assert!(matches!(early, Err(WaitError::TimedOut(_))), "{early:?}");
    stage.mark("let-go");
    stage.await_mark("released");
    assert_eq!(line.sent().token, 9);
    drop(line);
    reader.finish();
}

/// A reader that takes payloads on its own thread and lets another drop them.
fn dropped_away(stage: &Stage, name: &str, wait: impl Fn(&mut Line, &mut highwire_vi::CompletionQueue)) {
    let nic = stage.nic();
    let mut queue = nic.completion_queue().unwrap();
    let mut line = Line::connect_with(&nic, name, &ViOptions::new().queue(&queue));
    let payload = receive_in_place(&mut line, 1);
    let (give, take) = mpsc::channel::<InPlace>();
    let dropper = std::thread::spawn(move || {
        let payload = take.recv().unwrap();
        std::thread::sleep(A_WHILE);
        drop(payload);
    });
    give.send(payload).unwrap();
    // Nothing comes until the payload has gone back.
    line.vi.post_recv(Receive::new(2).into(buffer(&nic, 8))).unwrap();
    wait(&mut line, &mut queue);
    let done = line.received();
    assert_eq!((done.token, done.length), (2, 2));
    dropper.join().unwrap();
}

fn waits_for_the_payload_then_answers(stage: &Stage, name: &str) {
    let nic = stage.nic();
    let listener = nic.listen(name).unwrap();
    let reader = stage.start("reader");
    let mut line = Line::accept(&listener);
    line.vi.post_send(Message::new(1).payload(buffer(&nic, 20_000)).by(Path::Referenced)).unwrap();
    line.sent();
    line.vi.send_bytes(2, b"ok").unwrap();
    reader.finish();
}

#[test]
fn a_payload_dropped_elsewhere_goes_back_though_the_reader_sleeps_on_its_vi() {
    let stage = Stage::open();
    stage.role("reader", |stage| dropped_away(stage, "shm:away", |_, _| ()));
    waits_for_the_payload_then_answers(&stage, "shm:away");
}

#[test]
fn a_payload_dropped_elsewhere_goes_back_though_the_reader_sleeps_on_a_queue() {
    let stage = Stage::open();
    stage.role("reader", |stage| {
        dropped_away(stage, "shm:away", |line, queue| {
            // What a program does that only polls the VI when its queue says so.
            loop {
                let id = queue.wait(PATIENCE).expect("the message that follows the payload's return");
                assert_eq!(id, line.vi.id());
                if let Some(done) = line.vi.poll() {
                    line.keep(done);
                    return;
                }
            }
        });
    });
    waits_for_the_payload_then_answers(&stage, "shm:away");
}

#[test]
fn a_payload_of_one_vi_released_on_another_goes_home() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (mut first, mut first_far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let (mut second, _second_far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    first_far.vi.post_send(Message::new(4).payload(buffer(&other, 5000)).by(Path::Referenced)).unwrap();
    let payload = receive_in_place(&mut first, 1);
    second.vi.receiver().release(payload);
    assert!(first.vi.poll().is_none());
    assert_eq!(first_far.sent().token, 4);
}

#[test]
fn with_every_loan_out_further_messages_wait_and_none_is_lost() {
    let stage = Stage::open();
    let nic = |stage: &Stage| stage.nic_with(|config| config.loans = 4);
    stage.role("sender", |stage| {
        let nic = nic(stage);
        let mut line = Line::connect(&nic, "shm:loans");
        for token in 0..20 {
            line.vi.post_send(Message::new(token).payload(buffer_of(&nic, &bytes(token, 3000)))).unwrap();
        }
        (0..20).for_each(|_| drop(line.sent()));
        // Stays until the other side is done: that it closed would be news too.
        line.end();
    });
    let nic = nic(&stage);
    let listener = nic.listen("shm:loans").unwrap();
    let sender = stage.start("sender");
    let mut queue = nic.completion_queue().unwrap();
    let mut line = Line::accept_with(&listener, &ViOptions::new().queue(&queue));
    (0..20).for_each(|token| line.vi.post_recv(Receive::new(token).in_place()).unwrap());
    let mut held: Vec<InPlace> = (0..4).map(|_| line.received().into_in_place().unwrap()).collect();
    let start = cpu_time();
    for _ in 0..3 {
        let waited = queue.wait(A_WHILE);
        assert!(matches!(waited, Err(WaitError::TimedOut(_))), "no loan is free, yet the queue says {waited:?}");
        assert!(line.vi.poll().is_none());
    }
    assert!(cpu_time() - start < A_WHILE, "a message that has to wait costs no CPU");
    for token in 4..20 {
        let oldest = held.remove(0);
        verify(token - 4, &copied(&oldest));
        line.vi.receiver().release(oldest);
        assert_eq!(queue.wait(PATIENCE), Ok(line.vi.id()));
        held.push(line.received().into_in_place().unwrap());
    }
    drop(line);
    sender.finish();
}

#[test]
fn one_payload_held_for_long_does_not_stop_what_follows() {
    let stage = Stage::open();
    let nic = |stage: &Stage| {
        stage.nic_with(|config| {
            (config.payload_bytes_start, config.payload_bytes_max) = (64 << 10, 256 << 10);
        })
    };
    stage.role("sender", |stage| {
        let nic = nic(stage);
        let mut line = Line::connect(&nic, "shm:held-long");
        line.vi.post_send(Message::new(0).payload(buffer_of(&nic, &bytes(0, 1000))).by(Path::Buffered)).unwrap();
        for token in 1..4 {
            let payload = buffer_of(&nic, &bytes(token, 1 << 20));
            line.vi.post_send(Message::new(token).payload(payload).by(Path::Buffered)).unwrap();
        }
        (0..4).for_each(|_| drop(line.sent()));
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = nic(&stage);
    let listener = nic.listen("shm:held-long").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    let held = receive_in_place(&mut line, 0);
    for token in 1..4 {
        line.vi.post_recv(Receive::new(token).into(buffer(&nic, 1 << 20))).unwrap();
        let waited = line.vi.wait(PATIENCE / 4);
        let done = waited.expect("one loan is out of 64 allowed: the next message must come");
        verify(token, &done.into_buffer().unwrap());
    }
    verify(0, &copied(&held));
    line.vi.receiver().release(held);
    sender.finish();
}

fn frozen_region(nic: &Nic, seed: u64, bytes: usize) -> highwire_vi::Frozen {
    let region = nic.register_freezable(bytes, Tag(0)).unwrap();
    fill(seed, &mut region.slice(0..bytes).unwrap());
    region.freeze().expect("nobody has a buffer of it")
}

#[test]
fn a_frozen_region_is_lent_as_a_slice_and_others_are_not() {
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:frozen");
        let frozen = frozen_region(&nic, 11, 100_000);
        line.vi.post_send(Message::new(1).frozen(&frozen, 0..100_000)).unwrap();
        line.vi.post_send(Message::new(2).frozen(&frozen, 50_000..90_000)).unwrap();
        // Two spans are no slice.
        line.vi.post_send(Message::new(3).frozen(&frozen, 0..20_000).frozen(&frozen, 80_000..100_000)).unwrap();
        line.vi.post_send(Message::new(4).frozen(&frozen, 0..100)).unwrap();
        line.vi.post_send(Message::new(5).payload(buffer(&nic, 40_000)).by(Path::Referenced)).unwrap();
        (0..5).for_each(|_| drop(line.sent()));
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:frozen").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    let whole = bytes(11, 100_000);
    let payloads: Vec<InPlace> = (0..5).map(|token| receive_in_place(&mut line, token)).collect();
    assert_eq!(payloads[0].as_slice(), Some(&whole[..]));
    assert_eq!(payloads[1].as_slice(), Some(&whole[50_000..90_000]));
    assert_eq!(payloads[2].as_slice(), None);
    assert_eq!(copied(&payloads[2]), [&whole[..20_000], &whole[80_000..]].concat());
    let mut across = [0; 10];
    payloads[2].copy_to(19_995, &mut across);
    assert_eq!(across[..], [&whole[19_995..20_000], &whole[80_000..80_005]].concat());
    assert_eq!(payloads[3].as_slice(), Some(&whole[..100]), "it came in the slot, and was copied");
    assert_eq!(payloads[4].as_slice(), None, "registered memory may change");
    drop(payloads);
    assert!(line.end().1.is_empty());
    sender.finish();
}

#[test]
fn a_region_is_frozen_only_when_no_buffer_of_it_is_left() {
    let stage = Stage::open();
    let nic = stage.nic();
    let region = nic.register_freezable(4096, Tag(0)).unwrap();
    let held = region.slice(0..10).unwrap();
    let (region, error) = region.freeze().unwrap_err();
    assert!(error.to_string().contains("1 buffers in use"), "{error}");
    drop(held);
    assert!(region.freeze().is_ok());
    let (_, error) = nic.register(4096).unwrap().freeze().unwrap_err();
    assert!(error.to_string().contains("register_freezable"), "{error}");
}

#[test]
fn a_small_or_pulsed_message_in_place_is_a_copy_that_needs_no_release() {
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let options = ViOptions::new().pulses(Pulses::Fixed(10_000)).path(Path::Buffered);
        let mut line = Line::connect_with(&nic, "shm:copy", &options);
        for (token, size) in [(0, 0), (1, 100), (2, 1 << 20)] {
            line.vi.post_send(Message::new(token).payload(buffer_of(&nic, &bytes(token, size)))).unwrap();
            line.sent();
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:copy").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    for (token, size) in [(0, 0), (1, 100), (2, 1 << 20)] {
        let payload = receive_in_place(&mut line, token);
        assert_eq!((payload.len(), payload.is_empty(), payload.spans().count()), (size, size == 0, 0));
        verify(token, payload.as_slice().expect("a copy is ours"));
        verify(token, &copied(&payload));
    }
    sender.finish();
}

#[test]
fn a_payload_outlives_the_vi_and_the_process_it_came_from() {
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:outlives");
        for (token, path) in [(0, Path::Buffered), (1, Path::Referenced)] {
            line.vi.post_send(Message::new(token).payload(buffer_of(&nic, &bytes(token, 100_000))).by(path)).unwrap();
        }
        stage.await_mark("never");
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:outlives").unwrap();
    let mut sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    let payloads = [receive_in_place(&mut line, 0), receive_in_place(&mut line, 1)];
    sender.kill();
    assert_eq!(line.end().0, Failure::PeerDied);
    drop(line);
    drop(listener);
    drop(nic);
    for (seed, payload) in payloads.iter().enumerate() {
        verify(seed as u64, &copied(payload));
    }
    drop(payloads);
}

#[test]
fn payloads_released_after_the_end_harm_nobody() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    far.vi.post_send(Message::new(1).payload(buffer(&other, 5000)).by(Path::Referenced)).unwrap();
    let released = receive_in_place(&mut near, 1);
    far.vi.post_send(Message::new(2).payload(buffer(&other, 5000)).by(Path::Referenced)).unwrap();
    let dropped = receive_in_place(&mut near, 2);
    drop(far);
    until("the end is noticed", || near.vi.poll().is_none() && near.vi.receiver().ended().is_some());
    near.vi.receiver().release(released);
    drop(dropped);
    assert!(near.vi.poll().is_none());
    let refused = near.vi.post_recv(Receive::new(3).in_place()).unwrap_err();
    assert_eq!(refused.reason, highwire_vi::PostError::NotConnected(Failure::PeerAborted));
}

#[test]
fn a_late_release_does_not_free_what_a_later_message_uses() {
    // A payload is held while the ring goes round many times: its slot number comes again, and
    // its release must not be taken for that of the newer one.
    let stage = Stage::open();
    let nic = |stage: &Stage| stage.nic_with(|config| (config.depth, config.loans) = (4, 2));
    let (one, other) = (nic(&stage), nic(&stage));
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let send = |far: &mut Line, token: u64| {
        let payload = buffer_of(&other, &bytes(token, 6000));
        far.vi.post_send(Message::new(token).payload(payload).by(Path::Referenced)).unwrap();
    };
    send(&mut far, 1000);
    let old = receive_in_place(&mut near, 0);
    for token in 0..50 {
        send(&mut far, token);
        let payload = receive_in_place(&mut near, token);
        verify(token, &copied(&payload));
        near.vi.receiver().release(payload);
        assert_eq!(far.next(Operation::Send).token, token);
    }
    send(&mut far, 50);
    let newest = receive_in_place(&mut near, 50);
    near.vi.receiver().release(old);
    assert_eq!(far.sent().token, 1000);
    assert!(far.vi.poll().is_none(), "the newest is still held");
    verify(50, &copied(&newest));
    near.vi.receiver().release(newest);
    assert_eq!(far.sent().token, 50);
}
