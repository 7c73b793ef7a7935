//! The incoming payload table: a message lands where its token says, whatever comes between.

use crate::support::seeded::{Seeded, bytes, verify};
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, buffer, buffer_of, cpu_time};
use highwire_vi::{Failure, Message, Nic, Path, PayloadToken, Receive, ViOptions, WaitError};

#[test]
fn payloads_land_by_token_in_whatever_order_they_come() {
    const BLOCKS: u64 = 60;
    let size = |block: u64| [100, 232, 233, 5000, 50_000][block as usize % 5];
    let stage = Stage::open();
    stage.role("server", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:blocks");
        let mut seeded = Seeded::fresh();
        let mut blocks: Vec<u64> = (0..BLOCKS).collect();
        while !blocks.is_empty() {
            let block = blocks.swap_remove(seeded.below(blocks.len()));
            let path = *seeded.pick(&[Path::Choose, Path::Buffered, Path::Referenced]);
            let payload = buffer_of(&nic, &bytes(block, size(block)));
            let message = Message::new(block).payload(payload).lands_at(PayloadToken(block)).by(path);
            line.vi.post_send(message.control(&block.to_le_bytes()).immediate(block as u32)).unwrap();
            // Something ordinary between.
            if seeded.once_in(3) {
                line.vi.post_send(Message::new(1000 + block).payload(buffer_of(&nic, b"between"))).unwrap();
            }
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:blocks").unwrap();
    let server = stage.start("server");
    let mut line = Line::accept(&listener);
    for block in 0..BLOCKS {
        line.vi.expect(PayloadToken(block), Receive::new(block).into(buffer(&nic, size(block)))).unwrap();
    }
    (0..BLOCKS).for_each(|_| line.vi.post_recv(Receive::new(5000).into(buffer(&nic, 7))).unwrap());
    let (failure, all) = line.end();
    assert_eq!(failure, Failure::PeerClosed);
    server.finish();
    let mut landed = 0;
    for done in all {
        match done.payload_token() {
            Some(PayloadToken(block)) => {
                landed += 1;
                assert_eq!((done.status, done.token, done.length), (Ok(()), block, size(block)));
                assert_eq!((done.immediate, &done.control[..]), (block as u32, &block.to_le_bytes()[..]));
                verify(block, &done.into_buffer().unwrap());
            }
            None if done.status.is_ok() => assert_eq!(&done.into_buffer().unwrap()[..], b"between"),
            None => assert_eq!(done.status, Err(Failure::PeerClosed), "a receive that nothing came for"),
        }
    }
    assert_eq!(landed, BLOCKS);
}

/// Two Nics whose payload areas are small, so that a large message is caught on its way.
fn small_areas(stage: &Stage) -> (Nic, Nic) {
    let nic = || stage.nic_with(|config| (config.payload_bytes_start, config.payload_bytes_max) = (64 << 10, 64 << 10));
    (nic(), nic())
}

#[test]
fn a_token_that_nobody_expects_is_dropped_and_nothing_else() {
    let stage = Stage::open();
    let (one, other) = small_areas(&stage);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    for (token, size) in [(1, 10), (2, 4000), (3, 30_000)] {
        let message = Message::new(token).payload(buffer(&other, size)).lands_at(PayloadToken(99));
        far.vi.post_send(message).unwrap();
    }
    far.vi.send_bytes(4, b"kept").unwrap();
    near.vi.post_recv(Receive::new(1).into(buffer(&one, 8))).unwrap();
    let done = near.received();
    assert_eq!((done.length, done.payload_token()), (4, None));
    assert_eq!(near.vi.receiver().stats().orphans, 3);
    // Their sender does not wait for ever: the next look tells how far the reader is.
    assert!(near.vi.poll().is_none());
    (0..4).for_each(|_| drop(far.sent()));
}

#[test]
fn orphans_go_by_while_no_receive_is_posted() {
    let stage = Stage::open();
    let (one, other) = small_areas(&stage);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    // More than the ring holds: they must be consumed for the last ones to be sent.
    for token in 0..200 {
        far.vi.post_send(Message::new(token).lands_at(PayloadToken(token))).unwrap();
        assert!(near.vi.poll().is_none());
        assert_eq!(far.sent().token, token);
    }
    assert_eq!(near.vi.receiver().stats().orphans, 200);
}

#[test]
fn a_revoked_place_comes_back_and_nothing_lands_in_it() {
    let stage = Stage::open();
    let (one, other) = small_areas(&stage);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    near.vi.expect(PayloadToken(1), Receive::new(11).into(buffer(&one, 100))).unwrap();
    near.vi.expect(PayloadToken(2), Receive::new(12).into(buffer(&one, 100))).unwrap();
    far.vi.post_send(Message::new(1).payload(buffer_of(&other, &bytes(1, 100))).lands_at(PayloadToken(1))).unwrap();
    far.vi.post_send(Message::new(2).payload(buffer_of(&other, &bytes(2, 100))).lands_at(PayloadToken(2))).unwrap();
    // It is on its way already, and still does not land.
    assert!(near.vi.revoke(PayloadToken(1)).is_some());
    assert!(near.vi.revoke(PayloadToken(1)).is_none(), "only once");
    assert!(near.vi.revoke(PayloadToken(77)).is_none());
    let done = near.received();
    assert_eq!((done.token, done.payload_token()), (12, Some(PayloadToken(2))));
    verify(2, &done.into_buffer().unwrap());
    assert_eq!(near.vi.receiver().stats().orphans, 1);
    // A token can be used again.
    near.vi.expect(PayloadToken(1), Receive::new(13).into(buffer(&one, 100))).unwrap();
    far.vi.post_send(Message::new(3).payload(buffer_of(&other, &bytes(3, 100))).lands_at(PayloadToken(1))).unwrap();
    let done = near.received();
    assert_eq!(done.token, 13);
    verify(3, &done.into_buffer().unwrap());
}

#[test]
fn a_place_revoked_while_its_payload_lands_is_given_back_and_the_next_message_is_whole() {
    let stage = Stage::open();
    let (one, other) = small_areas(&stage);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let big = 1 << 20;
    near.vi.expect(PayloadToken(1), Receive::new(11).into(buffer(&one, big))).unwrap();
    let message = Message::new(1).payload(buffer_of(&other, &bytes(1, big))).lands_at(PayloadToken(1));
    far.vi.post_send(message.by(Path::Buffered)).unwrap();
    far.vi.post_send(Message::new(2).payload(buffer_of(&other, &bytes(2, 100)))).unwrap();
    assert!(near.vi.poll().is_none(), "only the first pieces have come");
    assert!(near.vi.revoke(PayloadToken(1)).is_some(), "the landing buffer comes back at once");
    near.vi.post_recv(Receive::new(12).into(buffer(&one, 100))).unwrap();
    let done = loop {
        assert!(far.vi.poll().is_none_or(|done| done.status.is_ok()));
        if let Some(done) = near.vi.poll() {
            break done;
        }
    };
    assert_eq!(done.token, 12);
    verify(2, &done.into_buffer().unwrap());
}

#[test]
fn a_payload_too_long_for_its_place_can_be_expected_again_with_more_room() {
    let stage = Stage::open();
    let (one, other) = small_areas(&stage);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    near.vi.expect(PayloadToken(6), Receive::new(1).into(buffer(&one, 99))).unwrap();
    far.vi.post_send(Message::new(1).payload(buffer_of(&other, &bytes(6, 100))).lands_at(PayloadToken(6))).unwrap();
    let done = near.vi.wait(PATIENCE).unwrap();
    assert_eq!(done.status, Err(Failure::TooLong { message: 100, buffer: 99 }));
    assert_eq!(done.payload_token(), Some(PayloadToken(6)));
    assert_eq!(done.into_buffer().map(|buffer| buffer.len()), Some(99), "the buffer comes back");
    near.vi.expect(PayloadToken(6), Receive::new(2).into(buffer(&one, 100))).unwrap();
    verify(6, &near.received().into_buffer().unwrap());
}

#[test]
fn a_payload_for_a_token_can_be_read_in_place() {
    let stage = Stage::open();
    let (one, other) = small_areas(&stage);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    near.vi.expect(PayloadToken(8), Receive::new(1).in_place()).unwrap();
    let message = Message::new(1).payload(buffer_of(&other, &bytes(8, 9000))).lands_at(PayloadToken(8));
    far.vi.post_send(message.by(Path::Referenced).control(&[7; 128])).unwrap();
    let done = near.received();
    assert_eq!((done.payload_token(), &done.control[..]), (Some(PayloadToken(8)), &[7; 128][..]));
    let payload = done.into_in_place().unwrap();
    let mut found = vec![0; 9000];
    payload.copy_to(0, &mut found);
    verify(8, &found);
}

#[test]
fn an_ordinary_message_before_an_expected_one_waits_for_a_receive_without_costing_cpu() {
    let stage = Stage::open();
    let (one, other) = small_areas(&stage);
    let mut queue = one.completion_queue().unwrap();
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new().queue(&queue), &ViOptions::new());
    near.vi.expect(PayloadToken(1), Receive::new(1).into(buffer(&one, 4))).unwrap();
    far.vi.send_bytes(1, b"ordinary").unwrap();
    far.vi.post_send(Message::new(2).payload(buffer_of(&other, b"mine")).lands_at(PayloadToken(1))).unwrap();
    let start = cpu_time();
    for _ in 0..3 {
        assert!(near.vi.poll().is_none(), "messages are taken in their order");
        let waited = queue.wait(A_WHILE);
        assert!(
            matches!(waited, Err(WaitError::TimedOut(_))),
            "nothing can be received, yet the queue says {waited:?}"
        );
    }
    assert!(cpu_time() - start < A_WHILE, "a message that has to wait costs no CPU");
    near.vi.post_recv(Receive::new(2).into(buffer(&one, 8))).unwrap();
    assert_eq!(queue.wait(PATIENCE), Ok(near.vi.id()));
    assert_eq!(near.received().token, 2);
    assert_eq!(near.received().token, 1);
}
