//! Reading and writing what a peer granted, without its doing.

use crate::support::seeded::{bytes, fill, verify};
use crate::support::{Line, PATIENCE, Stage, both_ends, buffer, buffer_of, until};
use highwire_vi::{
    Message, Nic, Operation, Path, PostError, RdmaRead, RdmaWrite, Receive, RemoteKey, Tag, ViOptions, WithdrawError,
};

/// Sends a key in the control bytes.
fn send_key(line: &mut Line, key: RemoteKey) {
    line.vi.post_send(Message::new(0).control(&key.to_bytes())).unwrap();
    line.sent();
}

fn receive_key(line: &mut Line) -> RemoteKey {
    line.vi.post_recv(Receive::new(0)).unwrap();
    RemoteKey::from_bytes(&line.received().control).expect("a key")
}

#[test]
fn exported_memory_is_written_and_read_by_the_peer_alone() {
    let stage = Stage::open();
    stage.role("writer", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:export");
        let key = receive_key(&mut line);
        assert_eq!((key.len(), key.is_empty()), (1 << 20, false));
        // Silently, at an odd place.
        let payload = buffer_of(&nic, &bytes(1, 100_000));
        line.vi.rdma_write(RdmaWrite::new(1, key, 33).payload(payload)).unwrap();
        let done = line.next(Operation::RdmaWrite);
        assert_eq!((done.token, done.length, done.status), (1, 100_000, Ok(())));
        verify(1, &done.into_buffer().expect("the buffer comes back"));
        stage.mark("written");
        // To the very end, and said so.
        let payload = buffer_of(&nic, &bytes(2, 4096));
        line.vi.rdma_write(RdmaWrite::new(2, key, (1 << 20) - 4096).payload(payload).immediate(0xfeed)).unwrap();
        line.next(Operation::RdmaWrite);
        // Read back what the owner put there.
        stage.await_mark("answered");
        line.vi.rdma_read(RdmaRead::new(3, key, 200_000, buffer(&nic, 50_000))).unwrap();
        let done = line.next(Operation::RdmaRead);
        assert_eq!((done.token, done.length, done.status), (3, 50_000, Ok(())));
        verify(3, &done.into_buffer().unwrap());
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:export").unwrap();
    let writer = stage.start("writer");
    let mut line = Line::accept(&listener);
    let exported = nic.export(1 << 20, Tag(0)).unwrap();
    let key = line.vi.grant_exported(&exported).unwrap();
    assert_eq!(line.vi.grant_exported(&exported).unwrap(), key, "granting twice is granting once");
    assert_eq!(line.vi.withdraw(&key), Err(WithdrawError::Mapped), "nobody can unmap what a peer has mapped");
    send_key(&mut line, key);
    stage.await_mark("written");
    let mut found = vec![0; 100_000];
    exported.memory().copy_out(33, &mut found);
    verify(1, &found);
    line.vi.post_recv(Receive::new(7)).unwrap();
    let done = line.received();
    assert_eq!((done.token, done.length, done.immediate), (7, 0, 0xfeed));
    let mut found = vec![0; 4096];
    exported.memory().copy_out((1 << 20) - 4096, &mut found);
    verify(2, &found);
    exported.memory().copy_in(200_000, &bytes(3, 50_000));
    stage.mark("answered");
    writer.finish();
}

#[test]
fn registered_and_frozen_memory_is_read_remotely_and_not_written() {
    let stage = Stage::open();
    stage.role("reader", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:grants");
        for seed in [1, 2] {
            let key = receive_key(&mut line);
            line.vi.rdma_read(RdmaRead::new(seed, key, 0, buffer(&nic, 30_000))).unwrap();
            verify(seed, &line.next(Operation::RdmaRead).into_buffer().unwrap());
            let refused = line.vi.rdma_write(RdmaWrite::new(9, key, 0).payload(buffer(&nic, 1))).unwrap_err();
            assert!(matches!(refused.reason, PostError::ReadOnly { .. }), "{refused}");
            assert!(refused.to_string().contains("export it for writing"), "{refused}");
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:grants").unwrap();
    let reader = stage.start("reader");
    let mut line = Line::accept(&listener);
    let region = nic.register(30_000).unwrap();
    fill(1, &mut region.slice(0..30_000).unwrap());
    let key = line.vi.grant(&region).unwrap();
    send_key(&mut line, key);
    let freezable = nic.register_freezable(30_000, Tag(0)).unwrap();
    fill(2, &mut freezable.slice(0..30_000).unwrap());
    let key = line.vi.grant_frozen(&freezable.freeze().unwrap()).unwrap();
    send_key(&mut line, key);
    line.end();
    reader.finish();
}

/// Two Nics in this process with payload areas so small that a large message waits half-way.
fn halfway(stage: &Stage) -> (Nic, Nic) {
    let nic = || stage.nic_with(|config| (config.payload_bytes_start, config.payload_bytes_max) = (64 << 10, 64 << 10));
    (nic(), nic())
}

#[test]
fn a_write_that_is_announced_during_a_long_message_does_not_tear_it() {
    let stage = Stage::open();
    let (one, other) = halfway(&stage);
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let exported = one.export(4096, Tag(0)).unwrap();
    let key = near.vi.grant_exported(&exported).unwrap();
    let big = 1 << 20;
    far.vi.post_send(Message::new(1).payload(buffer_of(&other, &bytes(1, big))).by(Path::Buffered)).unwrap();
    // The message is half out. The announcement has to wait its turn, or to be refused.
    let write = || RdmaWrite::new(2, key, 0).payload(buffer_of(&other, &bytes(2, 4096))).immediate(5);
    let mut refused = match far.vi.rdma_write(write()) {
        Ok(()) => None,
        Err(refused) => Some(refused.descriptor),
    };
    near.vi.post_recv(Receive::new(1).into(buffer(&one, big))).unwrap();
    near.vi.post_recv(Receive::new(2)).unwrap();
    let mut done = Vec::new();
    until("both messages arrive", || {
        while let Some(sent) = far.vi.poll() {
            assert_eq!(sent.status, Ok(()));
            if let Some(write) = refused.take() {
                far.vi.rdma_write(write).expect("the long message is out");
            }
        }
        done.extend(near.vi.poll());
        done.len() == 2
    });
    assert_eq!((done[0].status, done[0].token, done[0].length), (Ok(()), 1, big));
    assert_eq!((done[1].status, done[1].token, done[1].immediate), (Ok(()), 2, 5));
    verify(1, &done.swap_remove(0).into_buffer().unwrap());
    let mut found = vec![0; 4096];
    exported.memory().copy_out(0, &mut found);
    verify(2, &found);
}

#[test]
fn an_announced_write_without_credit_is_refused_before_anything_is_written() {
    let stage = Stage::open();
    let nic = || stage.nic_with(|config| config.depth = 4);
    let (one, other) = (nic(), nic());
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let exported = one.export(4096, Tag(0)).unwrap();
    let key = near.vi.grant_exported(&exported).unwrap();
    (0..4).for_each(|token| far.vi.send_bytes(token, b"x").unwrap());
    let write = RdmaWrite::new(9, key, 0).payload(buffer_of(&other, &[1; 4096])).immediate(1);
    let refused = far.vi.rdma_write(write).unwrap_err();
    assert_eq!(refused.reason, PostError::QueueFull { limit: 4 });
    assert_eq!(exported.memory().load64(0), 0, "nothing was written");
    // Without an announcement there is nothing to wait for.
    far.vi.rdma_write(RdmaWrite::new(9, key, 0).payload(buffer_of(&other, &[1; 4096]))).unwrap();
    near.vi.post_recv(Receive::new(0).into(buffer(&one, 1))).unwrap();
    near.received();
    assert!(near.vi.poll().is_none(), "the ring's progress is published when nothing more is to do");
    far.vi.rdma_write(refused.descriptor).unwrap();
}

#[test]
fn every_wrong_key_and_range_is_refused_with_its_numbers() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let exported = one.export(65_536, Tag(0)).unwrap();
    let key = near.vi.grant_exported(&exported).unwrap();
    let mut write = |key: RemoteKey, offset: u64| {
        let refused = far.vi.rdma_write(RdmaWrite::new(1, key, offset).payload(buffer(&other, 4096))).unwrap_err();
        let text = refused.to_string();
        (refused.reason, text)
    };
    let outside = |offset| PostError::OutOfRange { offset, bytes: 4096, region_bytes: 65_536 };
    let (reason, text) = write(key, 70_000);
    assert_eq!(
        (reason, &text[..]),
        (outside(70_000), "offset 70000 + 4096 is outside the remote region of 65536 bytes")
    );
    assert_eq!(write(key, 65_536 - 4095).0, outside(65_536 - 4095));
    assert_eq!(write(key, u64::MAX).0, outside(u64::MAX), "no sum runs over");
    let forged = |at: usize, value: u32| {
        let mut bytes = key.to_bytes();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        RemoteKey::from_bytes(&bytes).unwrap()
    };
    assert_eq!(write(forged(0, 4711), 0).0, PostError::UnknownRegion { region: 4711 });
    assert_eq!(write(forged(0, 0), 0).0, PostError::UnknownRegion { region: 0 }, "the pair's own region is no region");
    assert!(matches!(write(forged(4, 5), 0).0, PostError::WrongTag { .. }));
    // A key that claims more than the region has changes nothing: the region itself is the measure.
    assert_eq!(write(forged(8, 1 << 30), 65_536).0, outside(65_536));
    assert!(RemoteKey::from_bytes(&[0; 15]).is_none() && RemoteKey::from_bytes(&[0; 17]).is_none());
    let read = far.vi.rdma_read(RdmaRead::new(1, key, 65_535, buffer(&other, 2))).unwrap_err();
    assert_eq!(read.reason, PostError::OutOfRange { offset: 65_535, bytes: 2, region_bytes: 65_536 });
}

#[test]
fn memory_of_another_tag_is_neither_granted_nor_touched() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let tagged = ViOptions::new().tag(Tag(3));
    let (near, mut far) = both_ends(&one, &other, &ViOptions::new().tag(Tag(3)), &tagged);
    let wrong = near.vi.grant_exported(&one.export(4096, Tag(4)).unwrap()).unwrap_err();
    assert_eq!(wrong.to_string(), "the region has Tag(4), the VI has Tag(3)");
    let exported = one.export(4096, Tag(3)).unwrap();
    let key = near.vi.grant_exported(&exported).unwrap();
    let other_tag = other.register(64).unwrap().slice(0..64).unwrap();
    let refused = far.vi.rdma_write(RdmaWrite::new(1, key, 0).payload(other_tag)).unwrap_err();
    assert_eq!(refused.reason, PostError::WrongTag { buffer: Tag(0), vi: Tag(3) });
    let other_tag = other.register(64).unwrap().slice(0..64).unwrap();
    let refused = far.vi.rdma_read(RdmaRead::new(1, key, 0, other_tag)).unwrap_err();
    assert_eq!(refused.reason, PostError::WrongTag { buffer: Tag(0), vi: Tag(3) });
    let right = other.register_tagged(64, Tag(3)).unwrap().slice(0..64).unwrap();
    far.vi.rdma_write(RdmaWrite::new(1, key, 0).payload(right)).unwrap();
}
