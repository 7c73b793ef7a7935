//! A peer that writes whatever it likes into its own memory: we get a lie or nothing, we never
//! panic, never loop, and never use a value other than the one that was checked.
#![cfg(not(loom))]

mod pair;

use highwire_mem::{Kind, Lie, LoanBook, PeerMemory, SLOT_BYTES, SharedMemory, SlotReader, SlotWriter};
use pair::{Random, Side, inline};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const DEPTH: u32 = 4;
const LOANS: u32 = 2;

/// Words that a peer would choose to hurt: near the index that matters, at the limits, or anything.
fn word(random: &mut Random, index: u64) -> u64 {
    let near = index.wrapping_add(random.below(12)).wrapping_sub(8);
    match random.below(10) {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << random.below(64),
        3 => near,
        4 => near << 32 | near & 0xffff_ffff,
        // An entry of the release log, of this lap or the next.
        5 => 1 << 63 | random.below(2) << 62 | near & ((1 << 62) - 1),
        // A slot's sequence with a head that is nearly right.
        6 | 7 => (near & 0xffff_ffff) | (random.below(5) | random.below(32) << 8 | random.below(140) << 16) << 32,
        _ => random.next(),
    }
}

/// Which parts of its block the peer lies in.
#[derive(Clone, Copy)]
enum Part {
    All,
    Slots,
    /// What it holds and gives back; it claims to have consumed everything.
    Loans,
}

fn scribble(peer: &Side, part: Part, random: &mut Random, index: u64, words: u64) {
    let (from, bytes) = (peer.block.offset(), peer.block.shape().bytes());
    let (tables, slots) = (0x100, bytes - DEPTH as usize * SLOT_BYTES);
    let range = match part {
        Part::All => 0..bytes,
        Part::Slots => slots..bytes,
        Part::Loans => tables..slots,
    };
    for _ in 0..words {
        let at = range.start + random.below(range.len() as u64 / 8) as usize * 8;
        peer.own.store64(from + at, word(random, index));
    }
    if matches!(part, Part::Loans) {
        for held in index.saturating_sub(u64::from(DEPTH))..index {
            if random.below(2) == 0 {
                peer.own.store64(from + tables + (held % u64::from(DEPTH)) as usize * 8, held + 1);
            }
        }
        peer.own.store64(from, index);
    }
}

/// Our side of a connection, with a message on its way and two payloads lent.
struct Victim {
    writer: SlotWriter,
    reader: SlotReader,
    book: LoanBook<u64>,
    swept: u64,
}

impl Victim {
    fn new(side: &Side) -> Victim {
        Victim {
            writer: side.writer(false),
            reader: side.reader(false),
            book: LoanBook::new(side.peer.clone(), side.block),
            swept: side.start,
        }
    }

    /// Everything that one turn of a connection looks at in the peer's memory.
    fn turn(&mut self) -> Result<(), Lie> {
        for _ in 0..=DEPTH {
            let Some(head) = self.reader.head()? else { break };
            let payload = if head.kind == Kind::Inline { head.length as usize } else { 0 };
            let mut content = vec![0; head.prefix_bytes() + usize::from(head.control) + payload];
            self.reader.content(0, &mut content);
            self.reader.consume(true, head.kind == Kind::Spans);
        }
        self.reader.publish();
        self.writer.refresh()?;
        assert!(self.writer.credit() <= u64::from(DEPTH));
        while self.swept < self.writer.consumed() {
            if self.writer.holds(self.swept)
                && let Err((_, index)) = self.book.lend(self.swept, self.swept)
            {
                self.poll()?;
                self.book.lend(index, index).map_err(|(lie, _)| lie)?;
            }
            self.swept += 1;
        }
        self.poll()?;
        while self.writer.credit() > 0 {
            self.writer.publish(inline(4, 0), &[], &[], b"word");
            let _ = self.writer.bell_wanted();
        }
        let _ = (self.writer.watch().moved(), self.reader.watch().ready(), self.book.watch().moved());
        Ok(())
    }

    fn poll(&mut self) -> Result<(), Lie> {
        for _ in 0..LOANS {
            let Some(index) = self.book.poll(self.swept)? else { return Ok(()) };
            assert!(index < self.swept, "what comes back was lent");
        }
        assert_eq!(self.book.poll(self.swept), Ok(None), "no more comes back than was lent");
        Ok(())
    }
}

#[test]
fn arbitrary_words_are_a_lie_or_nothing() {
    let (mut lies, mut turns) = ([0u32; 5], 0u32);
    for seed in 0..3_000 {
        let mut random = Random::new(seed);
        let start = [0, u64::from(u32::MAX) - 3, 1 << 40][random.below(3) as usize];
        let (ours, theirs) = Side::pair(DEPTH, LOANS, start);
        let mut victim = Victim::new(&ours);
        let part = [Part::All, Part::Slots, Part::Loans][random.below(3) as usize];
        for _ in 0..20 {
            let words = 1 + random.below(30);
            scribble(&theirs, part, &mut random, victim.writer.head(), words);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| victim.turn()));
            match outcome.unwrap_or_else(|_| panic!("seed {seed} made us panic")) {
                Ok(()) => turns += 1,
                Err(lie) => {
                    lies[match lie {
                        Lie::Consumed { .. } => 0,
                        Lie::UnknownKind { .. } => 1,
                        Lie::SlotOverfull { .. } => 2,
                        Lie::ReleasedUnheld { .. } => 3,
                        Lie::HoldsTooMany { .. } => 4,
                        other => panic!("seed {seed}: {other}"),
                    }] += 1;
                    break;
                }
            }
        }
    }
    assert!(turns > 1_000, "some of it must look right, or this tests little: {turns}");
    assert!(lies.iter().all(|count| *count > 10), "each lie must have been told: {lies:?}");
}

/// The same while the peer goes on writing: every value may change between any two looks.
#[test]
fn words_that_change_under_our_eyes_are_a_lie_or_nothing() {
    let (end, mut seed) = (Instant::now() + Duration::from_millis(500), 0);
    while Instant::now() < end {
        let (ours, theirs) = Side::pair(DEPTH, LOANS, u64::from(u32::MAX) - 3);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stopped = &stop;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while !stopped.load(Ordering::Relaxed) {
                    let part = if random.below(50) == 0 { Part::All } else { Part::Slots };
                    scribble(&theirs, part, &mut random, theirs.start + 4, 1);
                }
            });
            let outcome = std::panic::catch_unwind(|| {
                let mut victim = Victim::new(&ours);
                (0..2_000).try_for_each(|_| victim.turn())
            });
            stop.store(true, Ordering::Relaxed);
            assert!(outcome.is_ok(), "seed {seed} made us panic");
        });
        seed += 1;
    }
}

const VICTIM_AT: usize = 1152;

/// A check of a copy, and a use of it. Not inlined, so that an optimizer that passes the peer's
/// memory itself in place of the copy would be found out.
#[inline(never)]
fn checked_then_used(copy: &[u8; 64], which: usize) -> Option<u8> {
    if copy[0] > 32 {
        return None;
    }
    // Takes a while, in which the peer may write.
    let mut between = 0usize;
    for byte in &copy[1..64] {
        between = between.wrapping_mul(31).wrapping_add(usize::from(*byte));
    }
    Some(copy[which % 64].wrapping_add(between as u8))
}

#[inline(never)]
fn copied_checked_and_used(peer: &PeerMemory, which: usize) -> Option<u8> {
    let mut copy = [0; 64];
    peer.copy_out(VICTIM_AT, &mut copy);
    checked_then_used(&copy, which)
}

/// Says something only with `--release`: without optimization every copy is made anyway.
#[test]
fn what_was_checked_is_what_is_used() {
    let (ours, theirs) = Side::pair(DEPTH, LOANS, 0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stopped, memory) = (&stop, theirs.own.clone());
        scope.spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for value in [1, 200] {
                    memory.store32(VICTIM_AT, value);
                    (0..8).for_each(|_| std::hint::spin_loop());
                }
            }
        });
        let mut changed = 0;
        for _ in 0..if cfg!(debug_assertions) { 50_000 } else { 3_000_000 } {
            let used = copied_checked_and_used(black_box(&ours.peer), black_box(0));
            changed += u32::from(used.is_some_and(|used| used > 32));
        }
        stop.store(true, Ordering::Relaxed);
        assert_eq!(changed, 0, "values passed the check and were others when used");
    });
}

/// Says something only where it is optimised: a store that the compiler sees is left out when the next one goes to the same
/// place, as if no other thread could look.
#[test]
fn every_copy_happens_though_the_next_one_goes_to_the_same_place() {
    let (memory, _fd) = SharedMemory::create(4096).unwrap();
    assert!(first_copy_is_seen::<1>(&memory), "one byte");
    assert!(first_copy_is_seen::<4>(&memory), "four bytes");
    assert!(first_copy_is_seen::<8>(&memory), "eight bytes");
    assert!(first_copy_is_seen::<16>(&memory), "sixteen bytes");
    assert!(first_copy_is_seen::<64>(&memory), "more than are copied without a call");
}

/// Whether another thread ever sees the first of two copies to one place.
fn first_copy_is_seen<const BYTES: usize>(memory: &SharedMemory) -> bool {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for _ in 0..1000 {
                    memory.copy_in(64, &[1; BYTES]);
                    memory.copy_in(64, &[2; BYTES]);
                }
            }
        });
        let (begin, mut found) = (Instant::now(), [0; BYTES]);
        while !found.contains(&1) && begin.elapsed() < Duration::from_secs(10) {
            memory.copy_out(64, &mut found);
        }
        done.store(true, Ordering::Relaxed);
        found.contains(&1)
    })
}
