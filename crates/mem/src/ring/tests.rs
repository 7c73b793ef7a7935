use super::*;
use crate::layout::BlockShape;
use crate::layout::META_AT;
use crate::region::{OwnRegion, PeerRegion};
use crate::{LoanBook, ReleaseLog};
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::AsFd;

/// First indexes worth a test: zero, where the 32-bit sequence wraps around, and large.
const STARTS: [u64; 4] = [0, u32::MAX as u64 - 3, 1 << 40, (1 << 61) + 5];

/// Both ends of a ring in one process, each with its own memory and a read-only map of the other's.
struct Ends {
    writer: SlotWriter,
    reader: SlotReader,
    log: ReleaseLog,
    book: LoanBook<u64>,
    /// The reader's memory, for a reader that lies.
    answers: OwnMemory,
    /// The writer's memory, for a writer that lies.
    slots: OwnMemory,
    block: Block,
}

/// What is in a block before it is prepared.
#[derive(Clone, Copy, Debug)]
enum Before {
    Zeros,
    Garbage(u64),
    /// A connection that began at the same index, held every slot and gave it back.
    TheSame,
}

impl Before {
    fn leave_behind(self, own: &OwnMemory, block: Block, start: u64) {
        let (from, shape) = (block.offset(), block.shape());
        match self {
            Before::Zeros => {}
            Before::Garbage(seed) => {
                let words = (from..from + shape.bytes()).step_by(8);
                words.zip(words_from(seed)).for_each(|(at, word)| own.store64(at, word));
            }
            Before::TheSame => {
                for index in start..start + u64::from(shape.depth()) {
                    own.store64(block.held(index), index + 1);
                    let slot = block.slots() + (index as usize & (shape.depth() as usize - 1)) * SLOT_BYTES;
                    own.store32(slot, sequence(index));
                }
                for entry in 0..u64::from(shape.log_entries()) {
                    own.store64(block.release(entry), 1 << 63 | (start + entry));
                }
                own.store64(block.consumed(), start + 1);
                Attention::ALL.announce(own, block);
            }
        }
    }

    fn any() -> impl Strategy<Value = Before> {
        prop_oneof![Just(Before::Zeros), Just(Before::TheSame), any::<u64>().prop_map(Before::Garbage)]
    }
}

impl Ends {
    fn new(depth: u32, loans: u32, start: u64, before: Before) -> Ends {
        let shape = BlockShape::new(depth, loans).unwrap();
        let bytes = crate::REGION_HEADER_BYTES + shape.bytes();
        let block = Block::new(crate::REGION_HEADER_BYTES as u64, shape, bytes).unwrap();
        let side = || {
            let own = OwnRegion::create(bytes).unwrap();
            before.leave_behind(own.memory(), block, start);
            block.prepare(own.memory(), start, matches!(before, Before::Zeros));
            let fd = own.as_fd().try_clone_to_owned().unwrap();
            let peer = PeerRegion::adopt(fd, bytes as u64, 1 << 30).unwrap();
            (own.memory().clone(), peer.memory().clone())
        };
        let (slots, slots_seen) = side();
        let (answers, answers_seen) = side();
        Ends {
            writer: SlotWriter::new(slots.clone(), block, answers_seen.clone(), block, start, false),
            reader: SlotReader::new(answers.clone(), block, slots_seen, block, start, false),
            log: ReleaseLog::new(answers.clone(), block),
            book: LoanBook::new(answers_seen, block),
            answers,
            slots,
            block,
        }
    }

    fn slot(&self, index: u64) -> usize {
        self.block.slots() + (index as usize & (self.block.shape().depth() as usize - 1)) * SLOT_BYTES
    }
}

/// Words without end from a seed.
fn words_from(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    })
}

fn bytes_from(seed: u64, len: usize) -> Vec<u8> {
    words_from(seed).flat_map(u64::to_le_bytes).take(len).collect()
}

#[derive(Clone, Debug, PartialEq)]
struct Message {
    head: SlotHead,
    prefix: Vec<u8>,
    control: Vec<u8>,
    inline: Vec<u8>,
}

impl Message {
    fn new(head: SlotHead, seed: u64) -> Message {
        let inline = if head.kind == Kind::Inline { head.length as usize } else { 0 };
        Message {
            head,
            prefix: bytes_from(seed, head.prefix_bytes()),
            control: bytes_from(!seed, usize::from(head.control)),
            inline: bytes_from(seed ^ 0xff, inline),
        }
    }

    fn publish(&self, writer: &mut SlotWriter) -> u64 {
        writer.publish(self.head, &self.prefix, &self.control, &self.inline)
    }

    fn content(&self) -> Vec<u8> {
        [&self.prefix[..], &self.control, &self.inline].concat()
    }
}

/// Any message that a slot can hold.
fn messages() -> impl Strategy<Value = Message> {
    (0u8..3, 0u8..16, 0u8..=128, 1u8..=5, any::<u32>(), any::<u32>(), any::<u64>()).prop_map(
        |(kind, flags, control, spans, length, immediate, seed)| {
            let first = flags & Flags::FIRST.0 != 0;
            let kind = [Kind::Inline, Kind::Spans, Kind::Written][usize::from(kind)];
            let mut head = SlotHead {
                kind,
                flags: Flags(if first { flags } else { flags & !Flags::TOKEN.0 }),
                control: if first { control } else { 0 },
                spans: if kind == Kind::Spans { spans } else { 0 },
                length: if kind == Kind::Spans { length } else { 0 },
                immediate,
            };
            let room = CONTENT_BYTES - head.prefix_bytes() - usize::from(head.control);
            if kind == Kind::Inline {
                head.length = length % (room as u32 + 1);
            }
            Message::new(head, seed)
        },
    )
}

fn small(number: u32) -> Message {
    let (kind, flags) = (Kind::Inline, Flags::WHOLE);
    Message::new(
        SlotHead { kind, flags, control: 0, spans: 0, length: 4, immediate: number },
        u64::from(number).wrapping_mul(77),
    )
}

#[derive(Clone, Debug)]
enum Step {
    Publish(Message),
    Consume { hold: bool },
    Refresh,
    Progress,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => messages().prop_map(Step::Publish),
        4 => any::<bool>().prop_map(|hold| Step::Consume { hold }),
        2 => Just(Step::Refresh),
        2 => Just(Step::Progress),
    ];
    proptest::collection::vec(step, 1..150)
}

fn starts() -> impl Strategy<Value = u64> {
    proptest::sample::select(&STARTS[..])
}

/// The ring as it should be: a queue, and what each side knows of the other.
struct Oracle {
    depth: u64,
    queue: VecDeque<Message>,
    head: u64,
    tail: u64,
    /// Progress that the reader has published, and that the writer has seen.
    published: u64,
    seen: u64,
    acknowledge: bool,
    held: BTreeSet<u64>,
}

impl Oracle {
    fn new(depth: u32, start: u64) -> Oracle {
        Oracle {
            depth: u64::from(depth),
            queue: VecDeque::new(),
            head: start,
            tail: start,
            published: start,
            seen: start,
            acknowledge: false,
            held: BTreeSet::new(),
        }
    }

    fn check(&self, ends: &Ends) -> Result<(), TestCaseError> {
        let Ends { writer, reader, .. } = ends;
        prop_assert_eq!((writer.head(), writer.consumed(), reader.tail()), (self.head, self.seen, self.tail));
        prop_assert_eq!(writer.credit(), self.depth - (self.head - self.seen));
        prop_assert!(writer.credit() <= self.depth, "credit beyond the depth");
        prop_assert_eq!(writer.watch().moved(), self.published != self.seen);
        prop_assert_eq!((reader.ready(), reader.watch().ready()), (!self.queue.is_empty(), !self.queue.is_empty()));
        prop_assert_eq!(reader.unpublished(), self.tail != self.published);
        let due = self.acknowledge || self.tail - self.published >= (self.depth / 4).max(1);
        prop_assert_eq!(reader.publish_due(), due);
        // What the writer may ask: slots that it knows to be consumed and has not written again.
        for index in self.head.saturating_sub(self.depth)..self.seen {
            prop_assert_eq!(writer.holds(index), self.held.contains(&index), "slot {}", index);
        }
        Ok(())
    }

    fn take(&mut self, ends: &mut Ends, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Publish(_) if ends.writer.credit() == 0 => {}
            Step::Publish(message) => {
                prop_assert_eq!(message.publish(&mut ends.writer), self.head);
                self.head += 1;
                self.queue.push_back(message);
            }
            Step::Consume { hold } => {
                let head = ends.reader.head().expect("the writer is honest");
                prop_assert_eq!(head, self.queue.front().map(|message| message.head));
                let Some(message) = self.queue.pop_front() else { return Ok(()) };
                let expected = message.content();
                let mut content = vec![0; expected.len()];
                ends.reader.content(0, &mut content);
                prop_assert_eq!(&content, &expected);
                let half = expected.len() / 2;
                ends.reader.content(half, &mut content[half..]);
                prop_assert_eq!(&content, &expected, "copied in two parts");
                ends.reader.consume(message.head.flags.has(Flags::ACKNOWLEDGE), hold);
                self.acknowledge |= message.head.flags.has(Flags::ACKNOWLEDGE);
                if hold {
                    self.held.insert(self.tail);
                }
                self.tail += 1;
            }
            Step::Refresh => {
                prop_assert_eq!(ends.writer.refresh(), Ok(self.published != self.seen));
                self.seen = self.published;
            }
            Step::Progress => {
                prop_assert!(!ends.reader.publish(), "nobody asked for a bell");
                self.published = self.tail;
                self.acknowledge = false;
            }
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn the_ring_is_a_queue(
        steps in steps(),
        start in starts(),
        depth in proptest::sample::select(&[2u32, 4, 16][..]),
        before in Before::any(),
    ) {
        let (mut ends, mut oracle) = (Ends::new(depth, 2, start, before), Oracle::new(depth, start));
        oracle.check(&ends)?;
        for step in steps {
            oracle.take(&mut ends, step)?;
            oracle.check(&ends)?;
        }
    }

    /// A head is refused, or it says what a slot can hold; what was said is what is read.
    #[test]
    fn a_head_is_refused_or_fits_its_slot(meta: [u8; 4], length: u32, small_length in 0u32..300, immediate: u32) {
        for length in [length, small_length] {
            // Most kinds are unknown: the known ones are what is interesting.
            for kind in [meta[0], 1, 2, 3] {
                let meta = [kind, meta[1], meta[2], meta[3]];
                let raw = RawHead { meta: u32::from_le_bytes(meta), length, immediate };
                let Ok(head) = SlotHead::parse(9, raw) else { continue };
                let inline = if head.kind == Kind::Inline { length as usize } else { 0 };
                prop_assert!(head.prefix_bytes() + usize::from(head.control) + inline <= CONTENT_BYTES);
                prop_assert!(usize::from(head.control) <= CONTROL_BYTES_MAX);
                prop_assert_eq!(head.kind == Kind::Spans, head.spans > 0);
                prop_assert_eq!((head.meta().to_le_bytes(), head.length, head.immediate), (meta, length, immediate));
            }
        }
    }

    /// The cases that are told at a glance are what a thorough look finds.
    #[test]
    fn a_glance_at_a_head_agrees_with_a_thorough_look(length in 0u32..300, immediate: u32) {
        for bytes in (0..4).flat_map(|kind| (0..64).flat_map(move |flags| (0..6).map(move |rest| [kind, flags, rest & 1, rest / 2]))) {
            let raw = RawHead { meta: u32::from_le_bytes(bytes), length, immediate };
            let bare = |head: &SlotHead, kind| {
                let others = [Flags::TOKEN, Flags::ACKNOWLEDGE, Flags::OPEN];
                let alone = head.control == 0 && !others.into_iter().any(|flag| head.flags.has(flag));
                head.kind == kind && head.flags.has(Flags::WHOLE) && alone
            };
            let head = SlotHead::parse(9, raw).ok();
            let inline = |head: &SlotHead| bare(head, Kind::Inline) && !head.flags.has(Flags::SOON);
            let span = |head: &SlotHead| bare(head, Kind::Spans) && head.spans == 1;
            prop_assert_eq!(raw.is_plain(), head.as_ref().is_some_and(inline));
            prop_assert_eq!(raw.is_plain_span(), head.as_ref().is_some_and(span));
            let soon = |head: &SlotHead| span(head) && head.flags.has(Flags::SOON);
            prop_assert_eq!(raw.is_plain_reference(), head.as_ref().is_some_and(soon));
        }
    }

    #[test]
    fn what_a_writer_says_is_never_a_lie(message in messages(), index: u64) {
        let SlotHead { length, immediate, .. } = message.head;
        let raw = RawHead { meta: message.head.meta(), length, immediate };
        prop_assert_eq!(SlotHead::parse(index, raw), Ok(message.head));
    }

    /// Parts of a block never overlap, and all of them are inside.
    #[test]
    fn a_block_has_room_for_its_parts(depth in 1u32..=12, loans in 1u32..=12, offset in 4u64..1000) {
        let shape = BlockShape::new(1 << depth, 1 << loans).unwrap();
        let offset = offset * SLOT_BYTES as u64;
        let end = offset as usize + shape.bytes();
        let block = Block::new(offset, shape, end).unwrap();
        prop_assert!(Block::new(offset, shape, end - 1).is_none());
        prop_assert!(shape.log_entries() >= shape.depth() + shape.loans());
        let (last_slot, last_entry) = (u64::from(shape.depth()) - 1, u64::from(shape.log_entries()) - 1);
        let parts = [
            (block.consumed(), 8),
            (block.attention(), 8),
            (block.held(0), block.held(last_slot) + 8 - block.held(0)),
            (block.release(0), block.release(last_entry) + 8 - block.release(0)),
            (block.slots(), shape.depth() as usize * SLOT_BYTES),
        ];
        for pair in parts.windows(2) {
            prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{:?}", parts);
        }
        prop_assert_eq!(parts[4].0 + parts[4].1, end);
        prop_assert!(block.slots().is_multiple_of(SLOT_BYTES));
        prop_assert_eq!(block.held(0), block.held(u64::from(shape.depth())));
        prop_assert_eq!(block.release(1), block.release(1 + u64::from(shape.log_entries())));
    }
}

#[derive(Clone, Copy, Debug)]
enum LoanStep {
    Publish,
    Consume {
        hold: bool,
    },
    Progress,
    Release(usize),
    /// The writer looks at progress, enters what is held, and takes back what was given back.
    Settle {
        polls: bool,
    },
}

fn loan_steps() -> impl Strategy<Value = Vec<LoanStep>> {
    let step = prop_oneof![
        4 => Just(LoanStep::Publish),
        4 => prop::bool::weighted(0.8).prop_map(|hold| LoanStep::Consume { hold }),
        2 => Just(LoanStep::Progress),
        3 => any::<usize>().prop_map(LoanStep::Release),
        1 => any::<bool>().prop_map(|polls| LoanStep::Settle { polls }),
    ];
    proptest::collection::vec(step, 1..300)
}

/// An honest pair, and what each side has lent, holds and got back.
struct Loans {
    ends: Ends,
    limit: usize,
    held: Vec<u64>,
    /// In the order of the log.
    released: Vec<u64>,
    returned: Vec<u64>,
    swept: u64,
}

impl Loans {
    fn take(&mut self, step: LoanStep) -> Result<(), TestCaseError> {
        match step {
            LoanStep::Publish if self.ends.writer.credit() > 0 => {
                small(self.ends.writer.head() as u32).publish(&mut self.ends.writer);
            }
            LoanStep::Publish => {}
            LoanStep::Consume { hold } if self.ends.reader.ready() => {
                let hold = hold && self.held.len() < self.limit;
                if hold {
                    self.held.push(self.ends.reader.tail());
                }
                self.ends.reader.consume(false, hold);
            }
            LoanStep::Consume { .. } => {}
            LoanStep::Progress => _ = self.ends.reader.publish(),
            LoanStep::Release(_) if self.held.is_empty() => {}
            LoanStep::Release(which) => {
                let index = self.held.swap_remove(which % self.held.len());
                self.ends.reader.publish();
                self.ends.log.release(index);
                self.released.push(index);
            }
            LoanStep::Settle { polls } => self.settle(polls)?,
        }
        Ok(())
    }

    fn settle(&mut self, polls: bool) -> Result<(), TestCaseError> {
        self.ends.writer.refresh().expect("the reader is honest");
        while self.swept < self.ends.writer.consumed() {
            if self.ends.writer.holds(self.swept)
                && let Err((_, index)) = self.ends.book.lend(self.swept, self.swept)
            {
                self.poll()?;
                let lent = self.ends.book.lend(index, index);
                prop_assert_eq!(lent, Ok(()), "at most {} are held at once", self.limit);
            }
            self.swept += 1;
        }
        if polls {
            self.poll()?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<(), TestCaseError> {
        while let Some(index) = self.ends.book.poll(self.swept).expect("the reader is honest") {
            self.returned.push(index);
            prop_assert_eq!(self.returned.last(), self.released.get(self.returned.len() - 1));
        }
        Ok(())
    }
}

proptest! {
    #[test]
    fn every_payload_held_comes_back_once(
        steps in loan_steps(),
        start in starts(),
        shape in proptest::sample::select(&[(2u32, 2u32), (4, 2), (2, 8), (8, 8)][..]),
        before in Before::any(),
    ) {
        let (depth, loans) = shape;
        let mut pair = Loans {
            ends: Ends::new(depth, loans, start, before),
            limit: loans as usize,
            held: Vec::new(),
            released: Vec::new(),
            returned: Vec::new(),
            swept: start,
        };
        for step in steps {
            pair.take(step)?;
        }
        while !pair.held.is_empty() {
            pair.take(LoanStep::Release(0))?;
        }
        pair.take(LoanStep::Progress)?;
        pair.settle(true)?;
        prop_assert_eq!(&pair.returned, &pair.released);
        prop_assert!(!pair.ends.book.outstanding() && !pair.ends.book.watch().moved());
    }
}

#[test]
fn a_slot_held_long_ago_is_not_taken_for_one_held_now() {
    let mut ends = Ends::new(2, 2, 0, Before::Zeros);
    small(0).publish(&mut ends.writer);
    ends.reader.consume(false, true);
    ends.reader.publish();
    ends.writer.refresh().unwrap();
    assert!(ends.writer.holds(0));
    // As if every slot up to here had gone by without being held.
    for laps in [1u64 << 31, 1 << 32, 1 << 60] {
        assert!(!ends.writer.holds(laps * 2), "after {laps} laps");
    }
}

#[test]
fn loans_of_slots_a_whole_wrap_around_apart_are_told_apart() {
    let (old, new) = (5, 5 + (1u64 << 32));
    let mut ends = Ends::new(2, 2, 0, Before::Zeros);
    ends.book.lend(old, old).unwrap();
    ends.book.lend(new, new).unwrap();
    ends.answers.store64(ends.block.consumed(), new + 1);
    ends.log.release(new);
    assert_eq!(ends.book.poll(new + 1), Ok(Some(new)));
}

#[test]
fn more_can_be_given_back_between_two_looks_than_may_be_held_at_once() {
    let mut ends = Ends::new(4, 2, 0, Before::Zeros);
    for number in 0..4 {
        small(number).publish(&mut ends.writer);
    }
    for index in 0..4 {
        ends.reader.consume(false, true);
        ends.reader.publish();
        ends.log.release(index);
    }
    ends.writer.refresh().unwrap();
    let mut returned = Vec::new();
    for index in 0..4 {
        assert!(ends.writer.holds(index));
        ends.book.lend(index, index).unwrap();
        returned.extend(ends.book.poll(index + 1).unwrap());
    }
    assert_eq!(returned, [0, 1, 2, 3]);
}

#[test]
fn a_lying_reader_is_named() {
    for start in STARTS {
        let mut ends = Ends::new(4, 2, start, Before::Zeros);
        small(1).publish(&mut ends.writer);
        small(2).publish(&mut ends.writer);
        let mut says = |claimed| {
            ends.answers.store64(ends.block.consumed(), claimed);
            ends.writer.refresh()
        };
        let lie = |claimed, least| Err(Lie::Consumed { claimed, least, most: start + 2 });
        assert_eq!(says(start + 3), lie(start + 3, start));
        assert_eq!(says(u64::MAX), lie(u64::MAX, start));
        assert_eq!(says(start + 1), Ok(true));
        assert_eq!(says(start), lie(start, start + 1));
        assert_eq!(ends.writer.credit(), 3, "a lie changes nothing");
    }
    let lie = Lie::Consumed { claimed: 9, least: 1, most: 2 };
    assert_eq!(lie.to_string(), "the peer says it consumed 9 slots; between 1 and 2 are possible");
}

#[test]
fn a_reader_that_gives_back_what_it_does_not_hold_is_named() {
    let mut ends = Ends::new(4, 2, 0, Before::Zeros);
    for number in 0..4 {
        small(number).publish(&mut ends.writer);
    }
    ends.book.lend(1, 1).unwrap();
    let entry = |ends: &Ends, index: u64| ends.answers.store64(ends.block.release(0), 1 << 63 | index);
    ends.answers.store64(ends.block.consumed(), 3);
    // Seen to be consumed, but not held; and not consumed at all.
    for index in [0, 3, 4, (1 << 62) - 1] {
        entry(&ends, index);
        assert_eq!(ends.book.poll(2), Err(Lie::ReleasedUnheld { index }));
    }
    // Consumed since the writer looked: to be asked again.
    entry(&ends, 2);
    assert_eq!(ends.book.poll(2), Ok(None));
    assert_eq!(ends.book.poll(3), Err(Lie::ReleasedUnheld { index: 2 }));
    entry(&ends, 1);
    assert_eq!(ends.book.poll(3), Ok(Some(1)));
    // The entry stays where it was read: it is not read again.
    ends.book.lend(2, 2).unwrap();
    assert_eq!(ends.book.poll(3), Ok(None));
}

#[test]
fn a_reader_that_holds_too_many_is_named() {
    let mut ends = Ends::new(4, 2, 0, Before::Zeros);
    ends.book.lend(0, 10).unwrap();
    ends.book.lend(1, 11).unwrap();
    assert_eq!(ends.book.lend(2, 12), Err((Lie::HoldsTooMany { limit: 2 }, 12)), "and what was to be lent comes back");
    assert!(ends.book.outstanding());
    assert_eq!(ends.book.recall().collect::<Vec<_>>(), [10, 11]);
    assert!(!ends.book.outstanding());
}

#[test]
fn entries_for_nobody_keep_no_waiter_awake() {
    let mut ends = Ends::new(4, 2, 0, Before::Zeros);
    let watch = ends.book.watch();
    ends.answers.store64(ends.block.release(0), 1 << 63 | 3);
    assert!(!watch.moved(), "nothing is out");
    ends.book.lend(0, 0).unwrap();
    assert!(watch.moved());
    assert_eq!(ends.book.poll(1), Err(Lie::ReleasedUnheld { index: 3 }));
    ends.book.recall().for_each(drop);
    assert!(!watch.moved());
}

#[test]
fn a_lying_writer_is_named() {
    let mut ends = Ends::new(4, 2, 0, Before::Zeros);
    small(1).publish(&mut ends.writer);
    let at = ends.slot(0);
    let mut head = |meta: [u8; 4], length: u32| {
        ends.slots.store32(at + META_AT, u32::from_le_bytes(meta));
        ends.slots.store32(at + LENGTH_AT, length);
        ends.reader.head()
    };
    let (index, whole) = (0, Flags::WHOLE.0);
    for kind in [0, 4, 255] {
        assert_eq!(head([kind, whole, 0, 0], 4), Err(Lie::UnknownKind { index, kind }));
    }
    for (meta, length) in [
        ([1, whole, 0, 0], 241),
        ([1, whole, 0, 0], u32::MAX),
        ([1, whole, 128, 0], 113),
        ([1, whole, 129, 0], 0),
        ([1, whole, 0, 1], 0),
        ([1, whole | 64, 0, 0], 0),
        ([1, Flags::FIRST.with(Flags::OPEN).0, 0, 0], 1),
        ([1, whole | Flags::OPEN.0, 1, 0], 1),
        ([1, whole | Flags::OPEN.with(Flags::TOKEN).0, 0, 0], 1),
        ([3, whole | Flags::OPEN.0, 0, 0], 0),
        ([1, 0, 1, 0], 0),
        ([1, Flags::TOKEN.0, 0, 0], 0),
        ([1, Flags::FIRST.0, 0, 0], 233),
        ([2, whole, 0, 0], 10),
        ([2, whole, 1, 15], 10),
        ([2, whole, 0, 255], 10),
        ([2, whole | Flags::TOKEN.0, 0, 15], 10),
        ([3, whole, 0, 0], 1),
        ([3, whole, 0, 1], 0),
    ] {
        let [_, _, control, spans] = meta;
        assert_eq!(head(meta, length), Err(Lie::SlotOverfull { index, control, spans, length }), "{meta:?}, {length}");
    }
    // The most that fits is no lie.
    for (meta, length) in [
        ([1, whole, 0, 0], 240),
        ([1, whole, 128, 0], 112),
        ([1, whole | Flags::TOKEN.0, 128, 0], 104),
        ([1, Flags::FIRST.0, 0, 0], 232),
        ([2, whole, 0, 15], u32::MAX),
        ([2, whole, 128, 7], 0),
        ([3, whole, 128, 0], 0),
    ] {
        assert!(head(meta, length).is_ok(), "{meta:?}, {length}");
    }
}

#[test]
fn sequences_of_another_lap_are_not_messages() {
    for start in STARTS {
        let mut ends = Ends::new(4, 2, start, Before::Garbage(start ^ 0x5eed));
        let at = ends.slot(start);
        let good = sequence(start);
        for sequence in [good.wrapping_sub(4), good.wrapping_add(4), good.wrapping_add(1), good ^ 0x8000_0000] {
            ends.slots.store32(at, sequence);
            assert_eq!(ends.reader.head(), Ok(None), "sequence {sequence} where {good} is awaited");
        }
    }
}

#[test]
fn attention_asks_for_the_bell_of_one_side() {
    let mut ends = Ends::new(4, 2, 0, Before::Zeros);
    let slots_only = Attention { slots: true, credit: false };
    for (attention, slots, credit) in
        [(Attention::NONE, false, false), (Attention::ALL, true, true), (slots_only, true, false)]
    {
        attention.announce(&ends.answers, ends.block);
        assert_eq!(ends.writer.bell_wanted(), slots);
        attention.announce(&ends.slots, ends.block);
        assert_eq!((ends.reader.bell_wanted(), ends.reader.publish()), (credit, credit));
    }
    // A hostile word has no more bits than these.
    ends.answers.store32(ends.block.attention(), !1);
    assert!(!ends.writer.bell_wanted());
}

#[test]
#[should_panic(expected = "a slot was written without credit")]
fn writing_without_credit_is_a_bug() {
    let mut ends = Ends::new(2, 2, 0, Before::Zeros);
    for number in 0..3 {
        small(number).publish(&mut ends.writer);
    }
}

/// The example of `docs/protocol/shared-memory.md`.
#[test]
fn a_block_is_as_the_document_says() {
    let shape = BlockShape::new(64, 64).unwrap();
    let block = Block::new(0x400, shape, 1 << 20).unwrap();
    assert_eq!((block.consumed(), block.attention()), (0x400, 0x440));
    assert_eq!((block.held(0), block.release(0), block.slots()), (0x500, 0x700, 0xb00));
    assert_eq!((shape.log_entries(), shape.bytes()), (128, 18_176));
}

#[test]
fn shapes_that_no_block_can_have_are_refused() {
    for (depth, loans) in [(0, 2), (1, 2), (2, 0), (2, 1), (3, 2), (2, 6), (8192, 2), (2, 8192), (u32::MAX, 2)] {
        assert_eq!(BlockShape::new(depth, loans), None, "{depth} slots, {loans} loans");
    }
    let shape = BlockShape::new(4096, 4096).unwrap();
    for offset in [0, 256, 1023, 1025, 1 << 30, u64::MAX, u64::MAX - 255] {
        assert_eq!(Block::new(offset, shape, 1 << 30), None, "offset {offset}");
    }
}
