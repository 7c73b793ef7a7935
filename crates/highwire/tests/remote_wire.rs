//! Remote memory between hosts, by way of loopback: what the owner granted is written and read, and nothing else.

use highwire::{
    Buffer, Completion, Denial, Driver, Exported, Failure, GrantError, Impairments, Message, Nic, Operation, PostError,
    RdmaRead, RdmaWrite, Receive, Region, Reliability, RemoteKey, Tag, Vi, ViOptions, WaitError, WireConfig,
    WithdrawError,
};
use loopback::{PATIENCE, nic, sealed, two_ends, wires};
use std::collections::VecDeque;
use std::io::BufRead;
use std::time::{Duration, Instant};

mod loopback;

/// Two ends of a VI: `here` writes and reads what `there` grants.
struct Pair {
    here: Vi,
    there: Vi,
    nic: Nic,
    memory: Region,
    next: usize,
}

impl Pair {
    fn new(wire: &WireConfig) -> Pair {
        Pair::with(wire, &ViOptions::new())
    }

    fn with(wire: &WireConfig, options: &ViOptions<'_>) -> Pair {
        let [(caller, here), (listening, there)] = two_ends(wire, "udp:127.0.0.1:0", options);
        let memory = caller.register(64 << 20).unwrap();
        Pair { here, there, nic: listening, memory, next: 0 }
    }

    /// A buffer that no other has.
    fn buffer(&mut self, bytes: usize) -> Buffer {
        let at = self.next;
        self.next = (at + bytes.max(1)).next_multiple_of(64);
        self.memory.slice(at..at + bytes).unwrap()
    }

    fn filled(&mut self, seed: u64, bytes: usize) -> Buffer {
        let mut buffer = self.buffer(bytes);
        buffer.copy_from_slice(&content(seed, bytes));
        buffer
    }

    fn export(&self, bytes: usize) -> (Exported, RemoteKey) {
        let exported = self.nic.export(bytes, Tag(0)).unwrap();
        let key = self.there.grant_exported(&exported).unwrap();
        (exported, key)
    }

    fn write(&mut self, key: RemoteKey, offset: u64, seed: u64, bytes: usize) -> Completion {
        let payload = self.filled(seed, bytes);
        self.here.rdma_write(RdmaWrite::new(seed, key, offset).payload(payload)).unwrap();
        self.one(Operation::RdmaWrite)
    }

    fn read(&mut self, key: RemoteKey, offset: u64, bytes: usize) -> Completion {
        let into = self.buffer(bytes);
        self.here.rdma_read(RdmaRead::new(1, key, offset, into)).unwrap();
        self.one(Operation::RdmaRead)
    }

    /// The next completion here. The owner does nothing.
    fn one(&mut self, operation: Operation) -> Completion {
        let done = self.here.wait(PATIENCE).unwrap();
        assert_eq!(done.operation, operation, "{done:?}");
        done
    }

    /// Both sides go on: a message, a write and a read.
    fn goes_on(&mut self) {
        let (exported, key) = self.export(5_000);
        assert_eq!(self.write(key, 7, 77, 4_000).status, Ok(()));
        assert!(found(&exported, 7, 4_000) == content(77, 4_000));
        let done = self.read(key, 7, 4_000);
        assert!(done.status == Ok(()) && done.into_buffer().unwrap()[..] == content(77, 4_000)[..]);
        self.there.post_recv(Receive::new(1).in_place()).unwrap();
        self.here.send_bytes(2, b"on").unwrap();
        assert_eq!(self.there.wait(PATIENCE).unwrap().into_in_place().unwrap().as_slice(), Some(&b"on"[..]));
        assert_eq!(self.one(Operation::Send).status, Ok(()));
    }
}

fn content(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed * 31) >> 24) as u8).collect()
}

fn found(exported: &Exported, at: usize, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    exported.memory().copy_out(at, &mut found);
    found
}

const LENGTHS: [usize; 9] = [0, 1, 1391, 1392, 1393, 1407, 8 << 10, 100_000, 1 << 20];

#[test]
fn writes_of_every_length_are_in_the_peers_memory_and_nowhere_else() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(2 << 20);
        let mut model = vec![0; 2 << 20];
        for (number, length) in LENGTHS.into_iter().enumerate() {
            for offset in [0, 33, (2 << 20) - length] {
                let seed = (number + 10 * offset) as u64 % 1000;
                let done = pair.write(key, offset as u64, seed, length);
                assert_eq!((done.token, done.status, done.length), (seed, Ok(()), length), "{wire:?}");
                // It is there when it is done, whatever the owner does.
                model[offset..offset + length].copy_from_slice(&content(seed, length));
                assert!(found(&exported, 0, 2 << 20) == model, "{length} at {offset}");
                assert!(done.into_buffer().unwrap()[..] == content(seed, length)[..], "the buffer comes back");
                pair.next = 0;
            }
        }
    }
}

#[test]
fn every_kind_of_grant_is_read_at_every_length() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let all = content(5, 2 << 20);
        let (exported, exported_key) = pair.export(2 << 20);
        exported.memory().copy_in(0, &all);
        let region = pair.nic.register(2 << 20).unwrap();
        // Its owner still has it, and could write.
        let mut owned = region.slice(0..2 << 20).unwrap();
        owned.copy_from_slice(&all);
        let freezable = pair.nic.register_freezable(2 << 20, Tag(0)).unwrap();
        assert_eq!(pair.there.grant(&freezable).unwrap_err(), GrantError::NotFrozenYet);
        freezable.slice(0..2 << 20).unwrap().copy_from_slice(&all);
        let frozen = freezable.freeze().unwrap();
        let keys = [exported_key, pair.there.grant(&region).unwrap(), pair.there.grant_frozen(&frozen).unwrap()];
        assert_eq!(pair.there.grant(&region).unwrap(), keys[1], "granting twice is granting once");
        for key in keys {
            for length in LENGTHS {
                for offset in [0, 33, (2 << 20) - length] {
                    let done = pair.read(key, offset as u64, length);
                    assert_eq!((done.token, done.status, done.length), (1, Ok(()), length), "{wire:?}");
                    assert!(done.into_buffer().unwrap()[..] == all[offset..offset + length], "{length} at {offset}");
                    pair.next = 0;
                }
            }
        }
        owned[100] ^= 0xff;
        assert_eq!(pair.read(keys[1], 100, 1).into_buffer().unwrap()[0], all[100] ^ 0xff);
    }
}

#[test]
fn many_are_outstanding_and_done_in_order() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(4 << 20);
        let piece = 10_000;
        for number in 0..200u64 {
            let payload = pair.filled(number, piece);
            pair.here.rdma_write(RdmaWrite::new(number, key, number * piece as u64).payload(payload)).unwrap();
        }
        for number in 0..200 {
            let into = pair.buffer(piece);
            pair.here.rdma_read(RdmaRead::new(1000 + number, key, number * piece as u64, into)).unwrap();
        }
        for number in 0..200 {
            let done = pair.one(Operation::RdmaWrite);
            assert_eq!((done.token, done.status), (number, Ok(())));
        }
        for number in 0..200 {
            let done = pair.one(Operation::RdmaRead);
            assert_eq!((done.token, done.status), (1000 + number, Ok(())));
            assert!(done.into_buffer().unwrap()[..] == content(number, piece)[..], "{number}");
        }
        assert!(found(&exported, 199 * piece, piece) == content(199, piece));
    }
}

#[test]
fn what_is_posted_one_after_the_other_takes_effect_in_that_order() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(1 << 20);
        for round in 0..5u64 {
            pair.next = 0;
            // Two that overlap, a read of both, another write, and a message that tells of it.
            for (token, offset, bytes) in [(1, 0, 300_000), (2, 200_000, 300_000)] {
                let payload = pair.filled(10 * round + token, bytes);
                pair.here.rdma_write(RdmaWrite::new(token, key, offset).payload(payload)).unwrap();
            }
            let into = pair.buffer(500_000);
            pair.here.rdma_read(RdmaRead::new(3, key, 0, into)).unwrap();
            let payload = pair.filled(10 * round + 4, 100_000);
            pair.here.rdma_write(RdmaWrite::new(4, key, 0).payload(payload)).unwrap();
            pair.here.send_bytes(5, b"written").unwrap();
            pair.there.post_recv(Receive::new(9).in_place()).unwrap();
            let told = pair.there.wait(PATIENCE).unwrap();
            assert_eq!((told.token, told.length), (9, 7));
            // The message came after everything before it.
            assert!(found(&exported, 0, 100_000) == content(10 * round + 4, 100_000), "{round}");
            assert!(found(&exported, 200_000, 300_000) == content(10 * round + 2, 300_000), "{round}");
            let done: Vec<_> = (0..5).map(|_| pair.here.wait(PATIENCE).unwrap()).collect();
            assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
            let read = done.into_iter().nth(2).unwrap().into_buffer().unwrap();
            assert!(read[..200_000] == content(10 * round + 1, 300_000)[..200_000]);
            assert!(read[200_000..] == content(10 * round + 2, 300_000)[..]);
        }
    }
}

#[test]
fn immediate_data_tells_the_owner_in_its_turn() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(1 << 20);
        pair.here.send_bytes(1, b"before").unwrap();
        let payload = pair.filled(2, 400_000);
        pair.here.rdma_write(RdmaWrite::new(2, key, 5).payload(payload).immediate(0xfeed)).unwrap();
        pair.here.rdma_write(RdmaWrite::new(3, key, 0).immediate(0xbeef)).unwrap();
        pair.here.send_bytes(4, b"after").unwrap();
        for (token, length, immediate) in [(1, 6, 0), (2, 0, 0xfeed), (3, 0, 0xbeef), (4, 5, 0)] {
            // It waits for its receive, like any message.
            pair.there.post_recv(Receive::new(token).in_place()).unwrap();
            let told = pair.there.wait(PATIENCE).unwrap();
            assert_eq!((told.token, told.length, told.immediate), (token, length, immediate));
            if immediate == 0xfeed {
                assert!(found(&exported, 5, 400_000) == content(2, 400_000));
            }
        }
        let done: Vec<_> = (0..4).map(|_| pair.here.wait(PATIENCE).unwrap()).collect();
        let seen: Vec<_> = done.iter().map(|done| (done.token, done.operation, done.length, done.status)).collect();
        let (send, write) = (Operation::Send, Operation::RdmaWrite);
        assert_eq!(
            seen,
            [(1, send, 6, Ok(())), (2, write, 400_000, Ok(())), (3, write, 0, Ok(())), (4, send, 5, Ok(()))]
        );
        let buffer = done.into_iter().nth(1).unwrap().into_buffer().expect("the buffer comes back");
        assert!(buffer[..] == content(2, 400_000)[..]);
    }
}

#[test]
fn every_wrong_key_and_range_is_refused_and_both_sides_go_on() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(65_536);
        let forged = |at: usize, value: u64, bytes: usize| {
            let mut encoded = key.to_bytes();
            encoded[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
            RemoteKey::from_bytes(&encoded).unwrap()
        };
        // What the key itself says is told at once, as between processes.
        let refuse = |pair: &mut Pair, key: RemoteKey, offset: u64| {
            let payload = pair.buffer(4096);
            pair.here.rdma_write(RdmaWrite::new(1, key, offset).payload(payload)).unwrap_err().reason
        };
        let outside = |offset| PostError::OutOfRange { offset, bytes: 4096, region_bytes: 65_536 };
        for offset in [65_536 - 4095, 70_000, u64::MAX] {
            assert_eq!(refuse(&mut pair, key, offset), outside(offset));
        }
        assert_eq!(refuse(&mut pair, forged(4, 5, 4), 0), PostError::WrongTag { buffer: Tag(5), vi: Tag(0) });
        // What only the owner knows comes with the completion, and the buffer with it.
        let everything = forged(8, u64::MAX, 8);
        let (region, frozen) = (pair.nic.register(65_536).unwrap(), pair.nic.register_freezable(65_536, Tag(0)));
        let frozen = frozen.unwrap().freeze().unwrap();
        let readable = [pair.there.grant(&region).unwrap(), pair.there.grant_frozen(&frozen).unwrap()];
        let ends_at = |end| Denial::OutOfRange { end, bytes: 65_536 };
        let cases = [
            (everything, 65_536 - 4095, ends_at(65_537)),
            (everything, 65_536, ends_at(69_632)),
            (everything, u64::MAX - 4096, ends_at(u64::MAX)),
            (forged(0, 4711, 4), 0, Denial::NotGranted),
            (forged(0, 0, 4), 0, Denial::NotGranted),
            (readable[0], 0, Denial::ReadOnly),
            (readable[1], 0, Denial::ReadOnly),
        ];
        for (key, offset, denial) in cases {
            let done = pair.write(key, offset, 3, 4096);
            assert_eq!((done.status, done.length), (Err(Failure::Denied(denial)), 0), "{wire:?}");
            assert!(done.into_buffer().unwrap()[..] == content(3, 4096)[..]);
            if denial != Denial::ReadOnly {
                let done = pair.read(key, offset, 4096);
                assert_eq!((done.status, done.length), (Err(Failure::Denied(denial)), 0));
                assert_eq!(done.into_buffer().unwrap().len(), 4096);
            }
            pair.here.sender().flush(PATIENCE).unwrap();
            pair.goes_on();
            pair.next = 0;
        }
        assert!(found(&exported, 0, 65_536) == [0; 65_536], "nothing was written");
        assert!(region.slice(0..65_536).unwrap()[..] == [0; 65_536]);
        assert!(Failure::Denied(Denial::ReadOnly).to_string().contains("export it for writing"));
    }
}

#[test]
fn tags_keep_memory_apart() {
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    let mut pair = Pair::with(&wire, &ViOptions::new().tag(Tag(3)));
    let wrong = pair.there.grant_exported(&pair.nic.export(4096, Tag(4)).unwrap()).unwrap_err();
    assert_eq!(wrong, GrantError::WrongTag { region: Tag(4), vi: Tag(3) });
    let exported = pair.nic.export(4096, Tag(3)).unwrap();
    let key = pair.there.grant_exported(&exported).unwrap();
    let other_tag = PostError::WrongTag { buffer: Tag(0), vi: Tag(3) };
    let payload = pair.buffer(64);
    let refused = pair.here.rdma_write(RdmaWrite::new(1, key, 0).payload(payload)).unwrap_err();
    assert_eq!(refused.reason, other_tag);
    let into = pair.buffer(64);
    assert_eq!(pair.here.rdma_read(RdmaRead::new(1, key, 0, into)).unwrap_err().reason, other_tag);
    pair.memory = pair.nic.register_tagged(1 << 20, Tag(3)).unwrap();
    pair.next = 0;
    assert_eq!(pair.write(key, 0, 1, 64).status, Ok(()));
    assert!(found(&exported, 0, 64) == content(1, 64));
}

#[test]
fn a_grant_holds_for_its_vi_alone() {
    for wire in wires() {
        let (caller, stranger, listening) = (nic(&wire), nic(&wire), nic(&wire));
        let listener = listening.listen("udp:127.0.0.1:0").unwrap();
        let connect = |nic: &Nic| {
            std::thread::scope(|scope| {
                let here = scope.spawn(|| nic.connect(listener.address()).unwrap());
                let there = listener.accept(PATIENCE).unwrap();
                (here.join().unwrap(), there)
            })
        };
        // Another VI of the same session, and one of another peer.
        let (mut here, there) = connect(&caller);
        let (mut beside, _beside_there) = connect(&caller);
        let (mut elsewhere, _elsewhere_there) = connect(&stranger);
        let exported = listening.export(4096, Tag(0)).unwrap();
        let key = there.grant_exported(&exported).unwrap();
        let memory = caller.register(1 << 16).unwrap();
        for (number, vi) in [&mut here, &mut beside, &mut elsewhere].into_iter().enumerate() {
            let mut payload = memory.slice(number << 12..(number << 12) + 100).unwrap();
            payload.fill(number as u8 + 1);
            vi.rdma_write(RdmaWrite::new(1, key, 0).payload(payload)).unwrap();
            let done = vi.wait(PATIENCE).unwrap();
            let expected = if number == 0 { Ok(()) } else { Err(Failure::Denied(Denial::NotGranted)) };
            assert_eq!(done.status, expected, "{number}");
            let into = memory.slice((number + 8) << 12..((number + 8) << 12) + 100).unwrap();
            vi.rdma_read(RdmaRead::new(1, key, 0, into)).unwrap();
            assert_eq!(vi.wait(PATIENCE).unwrap().status, expected, "{number}");
        }
        assert!(found(&exported, 0, 100) == [1; 100]);
    }
}

#[test]
fn a_withdrawn_grant_is_refused_and_can_be_made_again() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(4096);
        assert_eq!(pair.write(key, 0, 1, 4096).status, Ok(()));
        pair.there.withdraw(&key).unwrap();
        let again = pair.there.withdraw(&key).unwrap_err();
        assert!(matches!(again, WithdrawError::NotGranted { .. }), "{again}");
        let denied = Err(Failure::Denied(Denial::NotGranted));
        assert_eq!(pair.write(key, 0, 2, 4096).status, denied);
        assert_eq!(pair.read(key, 0, 4096).status, denied);
        assert!(found(&exported, 0, 4096) == content(1, 4096));
        pair.goes_on();
        assert_eq!(pair.there.grant_exported(&exported).unwrap(), key);
        assert_eq!(pair.write(key, 0, 3, 4096).status, Ok(()));
    }
}

#[test]
fn nothing_lands_once_a_grant_is_withdrawn() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        for round in 0..10 {
            pair.next = 0;
            let (exported, key) = pair.export(16 << 20);
            let mut payload = pair.buffer(16 << 20);
            payload.fill(round + 1);
            pair.here.rdma_write(RdmaWrite::new(1, key, 0).payload(payload)).unwrap();
            // Somewhere in the middle of it.
            let until = Instant::now() + Duration::from_micros(700 * u64::from(round));
            while Instant::now() < until {
                assert!(pair.here.poll().is_none_or(|done| done.status == Ok(())));
                pair.there.poll();
            }
            pair.there.withdraw(&key).unwrap();
            let before = found(&exported, 0, 16 << 20);
            // It may have been done before; it never says that it is there when it is not.
            let status = pair.here.wait(Duration::from_secs(5)).map(|done| done.status);
            match status {
                Ok(Ok(())) => assert!(before.iter().all(|byte| *byte == round + 1), "{round}"),
                Ok(Err(Failure::Denied(Denial::Withdrawn | Denial::NotGranted))) => {}
                Err(WaitError::TimedOut(_)) => assert!(before.iter().all(|byte| *byte == round + 1), "polled above"),
                other => panic!("{other:?}"),
            }
            assert!(found(&exported, 0, 16 << 20) == before, "{round}: something landed later");
            pair.goes_on();
        }
    }
}

#[test]
fn the_owner_need_not_look() {
    for wire in wires() {
        let Pair { mut here, there, nic: _nic, memory, .. } = Pair::new(&wire);
        let owned = memory.slice(0..1 << 20).unwrap();
        let key = there.grant(&memory).unwrap();
        // It has the VI, and sleeps.
        let owner = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(500));
            there
        });
        let began = Instant::now();
        for number in 0..20 {
            let at = (2 << 20) + (number << 14);
            let into = memory.slice(at..at + 8192).unwrap();
            here.rdma_read(RdmaRead::new(1, key, 4096 * number as u64, into)).unwrap();
            assert_eq!(here.wait(PATIENCE).unwrap().status, Ok(()));
        }
        assert!(began.elapsed() < Duration::from_millis(300), "{:?}: {:?}", wire.driver, began.elapsed());
        drop((owner.join().unwrap(), owned));
    }
}

#[test]
fn an_unreliable_vi_writes_and_reads_reliably() {
    let impairments = Some((Impairments { loss: 0.05, ..Impairments::default() }, 7));
    let wire = WireConfig { keys: sealed(), impairments, ..WireConfig::default() };
    let mut pair = Pair::with(&wire, &ViOptions::new().reliability(Reliability::Unreliable));
    let (exported, key) = pair.export(1 << 20);
    for seed in 0..20 {
        pair.next = 0;
        assert_eq!(pair.write(key, 3, seed, 200_000).status, Ok(()));
        assert!(found(&exported, 3, 200_000) == content(seed, 200_000));
        assert!(pair.read(key, 3, 200_000).into_buffer().unwrap()[..] == content(seed, 200_000)[..]);
    }
}

#[test]
fn loss_and_disorder_change_nothing() {
    for (seed, driver) in [(1, Driver::Thread), (2, Driver::Caller), (3, Driver::Thread)] {
        let weather = Impairments { loss: 0.02, duplication: 0.02, reordering: 0.05, ..Impairments::default() };
        let wire = WireConfig { keys: sealed(), driver, impairments: Some((weather, seed)), ..WireConfig::default() };
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(1 << 20);
        let mut model = vec![0; 1 << 20];
        let mut random: u64 = seed;
        let mut next = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let mut reads = VecDeque::new();
        for token in 0..100 {
            let length = next(60_000);
            let offset = next((1 << 20) - length);
            if token % 3 == 2 {
                let into = pair.buffer(length);
                reads.push_back((token, model[offset..offset + length].to_vec()));
                pair.here.rdma_read(RdmaRead::new(token, key, offset as u64, into)).unwrap();
            } else {
                model[offset..offset + length].copy_from_slice(&content(token, length));
                let payload = pair.filled(token, length);
                pair.here.rdma_write(RdmaWrite::new(token, key, offset as u64).payload(payload)).unwrap();
            }
        }
        for token in 0..100 {
            let done = pair.here.wait(PATIENCE).unwrap();
            assert_eq!((done.token, done.status), (token, Ok(())), "seed {seed}");
            if token % 3 == 2 {
                let (_, expected) = reads.pop_front().unwrap();
                assert!(done.into_buffer().unwrap()[..] == expected[..], "seed {seed}, read {token}");
            }
        }
        assert!(found(&exported, 0, 1 << 20) == model, "seed {seed}");
    }
}

/// Posts more than can be under way, of everything.
fn post_much(pair: &mut Pair, key: RemoteKey) -> usize {
    for token in 0..60 {
        let payload = pair.buffer(300_000);
        let write = RdmaWrite::new(token, key, 0).payload(payload);
        pair.here.rdma_write(if token % 4 == 0 { write.immediate(1) } else { write }).unwrap();
        let into = pair.buffer(30_000);
        pair.here.rdma_read(RdmaRead::new(token, key, 0, into)).unwrap();
        let message = Message::new(token).payload(pair.buffer(1000));
        pair.here.post_send(message).unwrap();
    }
    180
}

/// Everything comes back with its buffer, and then the end.
fn all_come_back(here: &mut Vi, mut outstanding: usize, why: impl Fn(Failure) -> bool) {
    let mut failed = 0;
    loop {
        match here.wait(PATIENCE) {
            Ok(done) => {
                outstanding -= 1;
                failed += usize::from(done.status.is_err());
                assert!(done.status.is_ok() || done.status.is_err_and(&why), "{:?}", done.status);
                assert!(done.into_buffer().is_some(), "with its buffer");
            }
            Err(WaitError::NotConnected(failure)) => {
                assert!(why(failure), "{failure}");
                break;
            }
            Err(error) => panic!("{outstanding} are outstanding: {error}"),
        }
    }
    assert_eq!(outstanding, 0);
    assert!(failed > 0, "it ended in the middle");
}

#[test]
fn everything_comes_back_when_the_peer_closes_in_the_middle() {
    for wire in wires() {
        for wait in [0, 1, 5, 20] {
            let mut pair = Pair::new(&wire);
            let (_exported, key) = pair.export(1 << 20);
            let posted = post_much(&mut pair, key);
            std::thread::sleep(Duration::from_millis(wait));
            let Pair { mut here, there, memory, .. } = pair;
            drop(there);
            all_come_back(&mut here, posted, |failure| matches!(failure, Failure::PeerClosed | Failure::PeerAborted));
            // Nothing holds a piece of it.
            drop(memory.slice(0..64 << 20).expect("all buffers are back"));
        }
    }
}

#[test]
fn everything_comes_back_when_the_peer_falls_silent_in_the_middle() {
    for driver in [Driver::Thread, Driver::Caller] {
        let death = Duration::from_secs(1);
        let partitions = vec![Duration::from_millis(300)..Duration::MAX];
        let impairments = Some((Impairments { partitions, ..Impairments::default() }, 1));
        let mut pair = Pair::new(&WireConfig { keys: sealed(), driver, death, impairments, ..WireConfig::default() });
        let (_exported, key) = pair.export(1 << 20);
        std::thread::sleep(Duration::from_millis(290));
        let posted = post_much(&mut pair, key);
        all_come_back(&mut pair.here, posted, |failure| matches!(failure, Failure::PeerSilent(_)));
    }
}

/// The owner is a process of its own, which is killed while its memory is written and read.
#[test]
fn everything_comes_back_when_the_owner_is_killed() {
    let death = Duration::from_secs(1);
    let wire = WireConfig { keys: sealed(), death, ..WireConfig::default() };
    if std::env::var_os("HIGHWIRE_OWNER").is_some() {
        let owner = nic(&wire);
        let listener = owner.listen("udp:127.0.0.1:0").unwrap();
        eprintln!("{}", listener.address());
        let mut vi = listener.accept(PATIENCE).unwrap();
        let exported = owner.export(1 << 20, Tag(0)).unwrap();
        let key = vi.grant_exported(&exported).unwrap();
        vi.post_send(Message::new(1).control(&key.to_bytes())).unwrap();
        return std::thread::sleep(PATIENCE);
    }
    let mut owner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "everything_comes_back_when_the_owner_is_killed", "--nocapture"])
        .env("HIGHWIRE_OWNER", "1")
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut address = String::new();
    std::io::BufReader::new(owner.stderr.take().unwrap()).read_line(&mut address).unwrap();
    let caller = nic(&wire);
    let mut here = caller.connect(address.trim()).unwrap();
    here.post_recv(Receive::new(1)).unwrap();
    let key = RemoteKey::from_bytes(&here.wait(PATIENCE).unwrap().control).unwrap();
    let memory = caller.register(64 << 20).unwrap();
    let mut posted = 0;
    for number in 0..60 {
        let at = number << 20;
        let payload = memory.slice(at..at + 500_000).unwrap();
        here.rdma_write(RdmaWrite::new(1, key, 0).payload(payload)).unwrap();
        let into = memory.slice(at + 500_000..at + 600_000).unwrap();
        here.rdma_read(RdmaRead::new(2, key, 0, into)).unwrap();
        posted += 2;
        if number == 5 {
            // Some are done, and some are under way.
            assert_eq!(here.wait(PATIENCE).unwrap().status, Ok(()));
            posted -= 1;
            owner.kill().unwrap();
        }
    }
    owner.wait().unwrap();
    all_come_back(&mut here, posted, |failure| matches!(failure, Failure::PeerSilent(_)));
    drop(memory.slice(0..64 << 20).expect("all buffers are back"));
}

#[test]
fn closing_in_the_middle_leaves_nothing_behind() {
    for wire in wires() {
        for wait in [0, 2, 10] {
            let mut pair = Pair::new(&wire);
            let (_exported, key) = pair.export(1 << 20);
            post_much(&mut pair, key);
            std::thread::sleep(Duration::from_millis(wait));
            let Pair { here, mut there, memory, .. } = pair;
            drop(here);
            let ended = loop {
                match there.wait(PATIENCE) {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            };
            assert!(matches!(ended, WaitError::NotConnected(Failure::PeerAborted | Failure::PeerClosed)), "{ended:?}");
            let until = Instant::now() + PATIENCE;
            while memory.slice(0..64 << 20).is_err() {
                assert!(Instant::now() < until, "a buffer is held by nobody");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

#[test]
fn disconnecting_waits_for_what_is_under_way() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let (exported, key) = pair.export(8 << 20);
        let payload = pair.filled(1, 8 << 20);
        pair.here.rdma_write(RdmaWrite::new(1, key, 0).payload(payload)).unwrap();
        pair.here.disconnect(PATIENCE).unwrap();
        assert!(found(&exported, 0, 8 << 20) == content(1, 8 << 20));
    }
}

#[test]
fn both_sides_write_and_read_at_once() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let near = pair.nic.export(1 << 20, Tag(0)).unwrap();
        let (far, far_key) = pair.export(1 << 20);
        let near_key = pair.here.grant_exported(&near).unwrap();
        for round in 0..3u64 {
            pair.next = 0;
            for number in 0..20 {
                let (payload, into) = (pair.filled(number + round, 40_000), pair.buffer(100));
                let at = number * 50_000;
                pair.here.rdma_write(RdmaWrite::new(1, far_key, at).payload(payload)).unwrap();
                pair.here.rdma_read(RdmaRead::new(2, far_key, at, into)).unwrap();
                let (payload, into) = (pair.filled(number + round + 1, 40_000), pair.buffer(100));
                pair.there.rdma_write(RdmaWrite::new(1, near_key, at).payload(payload)).unwrap();
                pair.there.rdma_read(RdmaRead::new(2, near_key, at, into)).unwrap();
            }
            let (mut ours, mut theirs, until) = (0, 0, Instant::now() + PATIENCE);
            while ours < 40 || theirs < 40 {
                for (vi, count) in [(&mut pair.here, &mut ours), (&mut pair.there, &mut theirs)] {
                    if let Some(done) = vi.poll() {
                        assert_eq!(done.status, Ok(()));
                        *count += 1;
                    }
                }
                assert!(Instant::now() < until, "{ours} and {theirs}");
            }
            assert!(found(&far, 950_000, 40_000) == content(19 + round, 40_000));
            assert!(found(&near, 950_000, 40_000) == content(20 + round, 40_000));
        }
    }
}

#[test]
fn a_vi_grants_so_many_regions_and_no_more() {
    let pair = Pair::new(&WireConfig { keys: sealed(), ..WireConfig::default() });
    let grant = || pair.there.grant_exported(&pair.nic.export(1, Tag(0)).unwrap());
    assert!((0..1024).all(|_| grant().is_ok()));
    assert_eq!(grant().unwrap_err(), GrantError::TooMany { limit: 1024 });
}

#[test]
fn remote_memory_takes_no_vi_from_others() {
    let wire = WireConfig { keys: sealed(), vis_max: 3, ..WireConfig::default() };
    let (caller, listening) = (nic(&wire), nic(&wire));
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let meet = || {
        std::thread::scope(|scope| {
            let here = scope.spawn(|| caller.connect(listener.address()));
            let there = listener.accept(Duration::from_secs(1));
            (here.join().unwrap(), there)
        })
    };
    let memory = caller.register(1 << 16).unwrap();
    let exported = listening.export(4096, Tag(0)).unwrap();
    let mut ends = Vec::new();
    for number in 0..3 {
        let (here, there) = meet();
        let (mut here, there) = (here.unwrap(), there.unwrap());
        let key = there.grant_exported(&exported).unwrap();
        let payload = memory.slice(number << 12..(number + 1) << 12).unwrap();
        here.rdma_write(RdmaWrite::new(1, key, 0).payload(payload)).unwrap();
        assert_eq!(here.wait(PATIENCE).unwrap().status, Ok(()));
        ends.push((here, there));
    }
    let refused = meet().0.unwrap_err().to_string();
    assert!(refused.contains("too many connections"), "{refused}");
}

#[test]
fn a_vi_that_has_ended_leaves_room_for_another() {
    let wire = WireConfig { keys: sealed(), vis_max: 2, ..WireConfig::default() };
    let (caller, listening) = (nic(&wire), nic(&wire));
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let meet = || {
        std::thread::scope(|scope| {
            let here = scope.spawn(|| caller.connect(listener.address()));
            let there = listener.accept(PATIENCE);
            (here.join().unwrap().unwrap(), there.unwrap())
        })
    };
    let (_kept, (here, mut there)) = (meet(), meet());
    drop(here);
    // Its end is known, and the application still has it.
    assert!(matches!(there.wait(PATIENCE), Err(WaitError::NotConnected(_))));
    meet();
}
