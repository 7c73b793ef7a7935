//! Messages of every size, by every path, with everything that can travel beside them.

use crate::support::seeded::{bytes, fill, verify};
use crate::support::{Line, PATIENCE, Stage, buffer, buffer_of};
use highwire_vi::{
    Completion, Failure, Message, Nic, Path, Payload, Receive, RecvStats, Segment, SendStats, Tag, ViOptions,
};

const SIZES: [usize; 10] = [0, 1, 4, 48, 240, 241, 4096, 65536, 1 << 20, 20 << 20];
const CONTROLS: [usize; 3] = [0, 1, 128];

/// Sends one message of each size, waiting for each to complete, and checks what comes back.
fn send_all(nic: &Nic, line: &mut Line, path: Path) {
    for (number, size) in SIZES.into_iter().enumerate() {
        let mut payload = buffer(nic, size);
        fill(number as u64, &mut payload);
        let control = bytes(1000 + number as u64, CONTROLS[number % 3]);
        let message =
            Message::new(number as u64).payload(payload).control(&control).immediate(!(number as u32)).by(path);
        line.vi.post_send(message).unwrap();
        let done = line.sent();
        assert_eq!((done.token, done.length), (number as u64, size));
        verify(number as u64, &done.into_buffer().expect("the buffer comes back"));
    }
}

/// Receives what `send_all` sends.
fn receive_all(nic: &Nic, line: &mut Line) {
    for (number, size) in SIZES.into_iter().enumerate() {
        // Room to spare: the completion says how much of it was filled.
        line.vi.post_recv(Receive::new(50 + number as u64).into(buffer(nic, size + 3))).unwrap();
        let done = line.received();
        assert_eq!((done.token, done.length, done.immediate), (50 + number as u64, size, !(number as u32)));
        assert_eq!(done.control.len(), CONTROLS[number % 3]);
        verify(1000 + number as u64, &done.control);
        let landed = done.into_buffer().expect("the buffer comes back");
        verify(number as u64, &landed[..size]);
        assert_eq!(landed[size..], [0; 3], "nothing is written past the message");
    }
}

fn every_size_both_ways(path: Path) -> (SendStats, RecvStats) {
    let stage = Stage::open();
    stage.role("mirror", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:sizes");
        receive_all(&nic, &mut line);
        send_all(&nic, &mut line, path);
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:sizes").unwrap();
    let mirror = stage.start("mirror");
    let mut line = Line::accept(&listener);
    send_all(&nic, &mut line, path);
    receive_all(&nic, &mut line);
    mirror.finish();
    (line.vi.sender().stats(), line.vi.receiver().stats())
}

#[test]
fn every_size_arrives_whole_by_the_librarys_choice() {
    let (sent, received) = every_size_both_ways(Path::Choose);
    // 0 to 48 with up to 128 control bytes, and 240 with none or 1, are within a slot or not.
    assert_eq!((sent.messages, received.messages), (10, 10));
    assert!(sent.inline >= 4 && sent.buffered >= 2 && sent.referenced == 3, "{sent:?}");
}

#[test]
fn every_size_arrives_whole_when_buffered() {
    let (sent, _) = every_size_both_ways(Path::Buffered);
    assert_eq!(sent.referenced, 0, "{sent:?}");
    assert!(sent.growths > 1, "20 MiB found the payload area full and it grew: {sent:?}");
}

#[test]
fn every_size_arrives_whole_when_referenced() {
    let (sent, received) = every_size_both_ways(Path::Referenced);
    assert_eq!((sent.buffered, sent.referenced), (0, 9), "all but the empty one: {sent:?}");
    assert_eq!((received.referenced, received.buffered), (9, 0), "{received:?}");
}

#[test]
fn copied_bytes_are_the_senders_again_at_once() {
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:copies");
        let mut scratch = vec![0; 100_000];
        for (number, size) in [0, 1, 240, 241, 5000, 100_000].into_iter().enumerate() {
            fill(number as u64, &mut scratch[..size]);
            line.vi.send_bytes(number as u64, &scratch[..size]).unwrap();
            scratch.fill(0xee);
            assert_eq!(line.sent().token, number as u64);
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:copies").unwrap();
    let sender = stage.start("sender");
    let mut line = Line::accept(&listener);
    for (number, size) in [0, 1, 240, 241, 5000, 100_000].into_iter().enumerate() {
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, 100_000))).unwrap();
        let done = line.received();
        assert_eq!(done.length, size);
        verify(number as u64, &done.into_buffer().unwrap()[..size]);
    }
    sender.finish();
}

/// The bytes of a payload that came in several buffers, joined.
fn joined(done: Completion) -> Vec<u8> {
    match done.payload {
        Payload::Buffer(buffer) => buffer.to_vec(),
        Payload::Segments(segments) => segments
            .into_iter()
            .flat_map(|segment| match segment {
                Segment::Buffer(buffer) => buffer.to_vec(),
                other => panic!("a receive gave back {other:?}"),
            })
            .collect(),
        other => panic!("a receive gave back {other:?}"),
    }
}

/// How a message of these pieces is sent, and into which it is received.
const GATHERINGS: [(&[usize], &[usize]); 6] = [
    (&[1, 2, 3], &[6]),
    (&[100, 0, 140], &[1, 238, 1]),
    (&[4096, 1, 4095, 3], &[8000, 195]),
    (&[70_000, 70_000], &[1, 139_999]),
    (&[300; 15], &[4500]),
    (&[1 << 20, 5, 1 << 19], &[1 << 19, 5, 1 << 20]),
];

fn gathered_and_scattered(path: Path) {
    let stage = Stage::open();
    stage.role("gatherer", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:pieces");
        for (number, (pieces, _)) in GATHERINGS.into_iter().enumerate() {
            let whole = bytes(number as u64, pieces.iter().sum());
            let mut message = Message::new(number as u64).by(path);
            let mut at = 0;
            for piece in pieces {
                message = message.payload(buffer_of(&nic, &whole[at..at + piece]));
                at += piece;
            }
            line.vi.post_send(message).unwrap();
            let done = line.sent();
            assert_eq!(done.length, whole.len());
            assert_eq!(joined(done), whole, "all pieces come back");
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:pieces").unwrap();
    let gatherer = stage.start("gatherer");
    let mut line = Line::accept(&listener);
    for (number, (_, places)) in GATHERINGS.into_iter().enumerate() {
        let receive = places.iter().fold(Receive::new(7), |receive, place| receive.into(buffer(&nic, *place)));
        line.vi.post_recv(receive).unwrap();
        let done = line.received();
        assert_eq!(done.length, places.iter().sum::<usize>());
        verify(number as u64, &joined(done));
    }
    assert_eq!(line.end().0, Failure::PeerClosed);
    gatherer.finish();
}

#[test]
fn pieces_are_gathered_and_scattered_by_choice() {
    gathered_and_scattered(Path::Choose);
}

#[test]
fn pieces_are_gathered_and_scattered_when_buffered() {
    gathered_and_scattered(Path::Buffered);
}

#[test]
fn pieces_are_gathered_and_scattered_when_referenced() {
    // Fifteen spans are all that a slot has room for.
    gathered_and_scattered(Path::Referenced);
}

#[test]
fn one_shared_buffer_travels_in_many_messages_and_comes_back_to_one_owner() {
    const COPIES: u64 = 20;
    let stage = Stage::open();
    stage.role("reader", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:shared");
        for _ in 0..COPIES {
            line.vi.post_recv(Receive::new(0).into(buffer(&nic, 50_000))).unwrap();
            verify(3, &line.received().into_buffer().unwrap());
        }
        assert_eq!(line.end().0, Failure::PeerClosed);
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:shared").unwrap();
    let reader = stage.start("reader");
    let mut line = Line::accept(&listener);
    let shared = buffer_of(&nic, &bytes(3, 50_000)).share();
    for token in 0..COPIES {
        let path = if token % 2 == 0 { Path::Referenced } else { Path::Buffered };
        line.vi.post_send(Message::new(token).shared(shared.clone()).by(path)).unwrap();
    }
    let shared = shared.into_exclusive().expect_err("messages still carry it");
    for _ in 0..COPIES {
        drop(line.sent());
    }
    let mut exclusive = shared.into_exclusive().expect("all messages have completed");
    exclusive.fill(0);
    drop(line);
    reader.finish();
}

#[test]
fn frames_of_a_pool_are_counted_until_their_completions() {
    let stage = Stage::open();
    stage.role("reader", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:frames");
        stage.await_mark("pool-empty");
        for number in 0..8 {
            line.vi.post_recv(Receive::new(0).into(buffer(&nic, 8192))).unwrap();
            verify(number, &line.received().into_buffer().unwrap());
        }
        assert_eq!(line.end().0, Failure::PeerClosed);
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:frames").unwrap();
    let reader = stage.start("reader");
    let mut line = Line::accept_with(&listener, &ViOptions::new().path(Path::Referenced).tag(Tag(0)));
    let pool = nic.pool(5000, 4).unwrap();
    for number in 0..8 {
        if pool.free() == 0 {
            let refused = pool.frame().unwrap_err().to_string();
            assert!(refused.contains("all 4 frames") && refused.contains("completions"), "{refused}");
            stage.mark("pool-empty");
            drop(line.sent());
        }
        let mut frame = pool.frame().unwrap();
        assert_eq!(frame.len(), 8192, "whole pages");
        fill(number, &mut frame);
        line.vi.post_send(Message::new(number).payload(frame)).unwrap();
    }
    for _ in 0..4 {
        drop(line.sent());
    }
    assert_eq!(pool.free(), 4);
    drop(line);
    reader.finish();
}
