//! Every interleaving, and every value that a weak memory could show, of two threads on one ring.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p highwire-mem --lib --release`. A lost wake-up is a
//! deadlock, a message read too early is a race on its content; loom reports both. The models with
//! `should_panic` leave out one step each, and show that it is needed and would be missed.

use super::*;
use crate::layout::{BlockShape, HEAD_BYTES, LENGTH_AT, META_AT, REGION_HEADER_BYTES, SLOT_BYTES};
use crate::memory::{PeerMemory, View};
use crate::{Flags, Kind, LoanBook, ReleaseLog, SlotHead, SlotReader, SlotWriter};
use loom::thread;

/// A word of the writer's region that no block uses.
const PAYLOAD_AT: usize = 0x200;

/// Just below the wrap-around of the 32-bit sequence: the models cross it.
const START: u64 = u32::MAX as u64 - 1;

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// The writing side's memory and the reading side's, as one process would map them.
struct Sides {
    writer: View,
    reader: View,
    block: Block,
}

impl Sides {
    fn new() -> Sides {
        let shape = BlockShape::new(2, 2).unwrap();
        let bytes = REGION_HEADER_BYTES + shape.bytes();
        let block = Block::new(REGION_HEADER_BYTES as u64, shape, bytes).unwrap();
        let sides = Sides { writer: View::new(bytes), reader: View::new(bytes), block };
        let slots = [block.slots(), block.slots() + SLOT_BYTES];
        let heads = [slots[0], slots[0] + META_AT, slots[1], slots[1] + META_AT];
        let sizes = slots.map(|slot| slot + LENGTH_AT);
        let contents = slots.map(|slot| slot + HEAD_BYTES);
        let appended = contents[0] + 4;
        sides.writer.touch(&heads, &sizes, &[contents[0], appended, contents[1], PAYLOAD_AT]);
        let log = (0..4).map(|entry| block.release(entry));
        sides.reader.touch(&[], &log.chain([block.held(0), block.held(1)]).collect::<Vec<_>>(), &[]);
        block.prepare(&OwnMemory(sides.writer.clone()), START, true);
        block.prepare(&OwnMemory(sides.reader.clone()), START, true);
        sides
    }

    fn writer(&self) -> SlotWriter {
        let (own, peer) = (OwnMemory(self.writer.clone()), PeerMemory::of(self.reader.clone()));
        SlotWriter::new(own, self.block, peer, self.block, START, true)
    }

    fn reader(&self) -> SlotReader {
        let (own, peer) = (OwnMemory(self.reader.clone()), PeerMemory::of(self.writer.clone()));
        SlotReader::new(own, self.block, peer, self.block, START, true)
    }
}

fn bell_page() -> SharedMemory {
    let page = View::new(BELL_PAGE_BYTES);
    page.touch(&[BELL_AT, SLEEPERS_AT], &[SUMMARY_AT, LEAVES_AT, LEAVES_AT + 8], &[]);
    SharedMemory(page)
}

fn bell() -> (Bell, BellRope) {
    let page = bell_page();
    (Bell::on(page.clone()), BellRope::new(page, BellIndex(1)))
}

fn publish(writer: &mut SlotWriter, number: u32) -> u64 {
    let (kind, flags) = (Kind::Inline, Flags::WHOLE);
    let head = SlotHead { kind, flags, control: 0, spans: 0, length: 4, immediate: !number };
    writer.publish(head, &[], &[], &number.to_le_bytes())
}

/// Reads the next message if there is one, which must be `number`.
fn read(reader: &mut SlotReader, number: u32, hold: bool) -> bool {
    let Some(head) = reader.head().expect("an honest writer") else { return false };
    let mut content = [0; 4];
    reader.content(0, &mut content);
    assert_eq!((u32::from_le_bytes(content), head.immediate, head.length), (number, !number, 4));
    reader.consume(false, hold);
    true
}

#[test]
fn every_message_is_read_once_and_in_order() {
    check(3, || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let writing = thread::spawn(move || {
            publish(&mut writer, 1);
            publish(&mut writer, 2);
        });
        let mut next = 1;
        while next <= 2 {
            if read(&mut reader, next, false) {
                next += 1;
            } else {
                thread::yield_now();
            }
        }
        assert!(!reader.ready());
        writing.join().unwrap();
    });
}

/// Four messages through two slots: the third waits for credit, and must not overwrite a slot
/// that is still being read.
#[test]
fn a_slot_is_reused_only_after_it_was_read() {
    check(3, || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let writing = thread::spawn(move || {
            for number in 1..=4 {
                while writer.credit() == 0 && !writer.refresh().expect("an honest reader") {
                    thread::yield_now();
                }
                assert!(writer.credit() <= 2);
                publish(&mut writer, number);
            }
        });
        let mut next = 1;
        while next <= 4 {
            if read(&mut reader, next, false) {
                next += 1;
                if reader.publish_due() {
                    reader.publish();
                }
            } else {
                thread::yield_now();
            }
        }
        writing.join().unwrap();
    });
}

/// What a sleeper does of its preparations; all of them, but in the models that show why.
#[derive(Clone, Copy)]
struct Care {
    settles: bool,
    looks_again: bool,
    counts_first: bool,
}

const CAREFUL: Care = Care { settles: true, looks_again: true, counts_first: true };

/// The sleeper's steps, in the order of `docs/protocol/shared-memory.md`.
fn sleep(bell: &Bell, own: &OwnMemory, block: Block, wanted: Attention, care: Care, look: impl FnOnce() -> bool) {
    wanted.announce(own, block);
    bell.enter();
    if care.settles {
        Bell::settle();
    }
    let early = bell.count();
    let found = care.looks_again && look();
    let count = if care.counts_first { early } else { bell.count() };
    if !found {
        bell.sleep(count);
    }
    bell.leave();
    Attention::NONE.announce(own, block);
}

fn sleeping_reader(care: Care, preemptions: usize, messages: u32) {
    check(preemptions, move || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let (bell, rope) = bell();
        let writing = thread::spawn(move || {
            for number in 1..=messages {
                publish(&mut writer, number);
                if writer.bell_wanted() {
                    rope.ring(News::Slots);
                }
            }
        });
        let own = OwnMemory(sides.reader.clone());
        let mut next = 1;
        while next <= messages {
            if read(&mut reader, next, false) {
                next += 1;
            } else {
                let wanted = Attention { slots: true, credit: false };
                sleep(&bell, &own, sides.block, wanted, care, || reader.ready());
            }
        }
        writing.join().unwrap();
    });
}

#[test]
fn a_sleeping_reader_misses_no_message() {
    sleeping_reader(CAREFUL, 4, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_reader_that_does_not_look_again_sleeps_for_ever() {
    sleeping_reader(Care { looks_again: false, ..CAREFUL }, 2, 1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_reader_that_does_not_settle_sleeps_for_ever() {
    sleeping_reader(Care { settles: false, ..CAREFUL }, 2, 1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_reader_that_counts_after_its_last_look_sleeps_for_ever() {
    sleeping_reader(Care { counts_first: false, ..CAREFUL }, 2, 1);
}

fn sleeping_writer(care: Care) {
    check(4, move || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let (bell, rope) = bell();
        publish(&mut writer, 1);
        publish(&mut writer, 2);
        let (own, block) = (OwnMemory(sides.writer.clone()), sides.block);
        let writing = thread::spawn(move || {
            let credit = writer.watch();
            while writer.credit() == 0 && !writer.refresh().expect("an honest reader") {
                sleep(&bell, &own, block, Attention { slots: false, credit: true }, care, || credit.moved());
            }
            publish(&mut writer, 3);
        });
        assert!(read(&mut reader, 1, false));
        if reader.publish() {
            rope.ring(News::Slots);
        }
        assert!(read(&mut reader, 2, false));
        writing.join().unwrap();
        assert!(read(&mut reader, 3, false));
    });
}

#[test]
fn a_writer_asleep_for_credit_misses_no_progress() {
    sleeping_writer(CAREFUL);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_writer_that_does_not_look_again_sleeps_for_ever() {
    sleeping_writer(Care { looks_again: false, ..CAREFUL });
}

/// More messages than slots, and both sides sleep: the writer for credit, the reader for messages.
#[test]
fn a_ring_that_is_full_and_then_empty_comes_to_its_end() {
    check(3, || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let (reader_bell, reader_rope) = bell();
        let (writer_bell, writer_rope) = bell();
        let (writer_own, block) = (OwnMemory(sides.writer.clone()), sides.block);
        let writing = thread::spawn(move || {
            let (credit, wanted) = (writer.watch(), Attention { slots: false, credit: true });
            for number in 1..=3 {
                while writer.credit() == 0 && !writer.refresh().expect("an honest reader") {
                    sleep(&writer_bell, &writer_own, block, wanted, CAREFUL, || credit.moved());
                }
                publish(&mut writer, number);
                if writer.bell_wanted() {
                    reader_rope.ring(News::Slots);
                }
            }
        });
        let (own, wanted) = (OwnMemory(sides.reader.clone()), Attention { slots: true, credit: false });
        let mut next = 1;
        while next <= 3 {
            if read(&mut reader, next, false) {
                next += 1;
            } else {
                if reader.unpublished() && reader.publish() {
                    writer_rope.ring(News::Slots);
                }
                sleep(&reader_bell, &own, block, wanted, CAREFUL, || reader.ready());
            }
        }
        writing.join().unwrap();
    });
}

/// A slot grows while its reader is at it, and has everything when the next one is there: every byte is read once, also
/// by a reader that sleeps in between.
#[test]
fn a_slot_that_grows_is_read_to_its_end() {
    check(3, || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let (reader_bell, reader_rope) = bell();
        let writing = thread::spawn(move || {
            let ring = |writer: &SlotWriter| {
                if writer.bell_wanted() {
                    reader_rope.ring(News::Slots);
                }
            };
            let open = Flags::WHOLE.with(Flags::OPEN);
            let head = SlotHead { kind: Kind::Inline, flags: open, control: 0, spans: 0, length: 4, immediate: 0 };
            writer.publish(head, &[], &[], &1u32.to_le_bytes());
            ring(&writer);
            writer.append(4, &2u32.to_le_bytes());
            ring(&writer);
            writer.publish(SlotHead { flags: Flags::WHOLE, ..head }, &[], &[], &3u32.to_le_bytes());
            ring(&writer);
        });
        let (own, wanted) = (OwnMemory(sides.reader.clone()), Attention { slots: true, credit: false });
        let (mut next, mut taken) = (1, 0);
        while next <= 3 {
            let head = reader.head().expect("an honest writer");
            if head.is_some() && reader.length_now() > taken {
                let mut content = [0; 4];
                reader.content(taken as usize, &mut content);
                assert_eq!(u32::from_le_bytes(content), next);
                (next, taken) = (next + 1, taken + 4);
                reader.note_taken(taken);
            } else if head.is_some() && reader.is_sealed() {
                if reader.length_now() == taken {
                    reader.consume(false, false);
                    reader.note_taken(0);
                    taken = 0;
                }
            } else {
                sleep(&reader_bell, &own, sides.block, wanted, CAREFUL, || reader.ready());
            }
        }
        writing.join().unwrap();
    });
}

/// Both sides sleep, each waits for the other: a ping and its pong.
#[test]
fn two_sleepers_wake_each_other() {
    check(3, || {
        let there = Sides::new();
        let back = Sides::new();
        let (near_bell, near_rope) = bell();
        let (far_bell, far_rope) = bell();
        let wanted = Attention { slots: true, credit: false };
        let (mut ping, mut pong) = (there.writer(), back.reader());
        let (mut heard, mut answer) = (there.reader(), back.writer());
        let (far_own, block) = (OwnMemory(there.reader.clone()), there.block);
        let far = thread::spawn(move || {
            while !read(&mut heard, 1, false) {
                sleep(&far_bell, &far_own, block, wanted, CAREFUL, || heard.ready());
            }
            publish(&mut answer, 2);
            if answer.bell_wanted() {
                near_rope.ring(News::Slots);
            }
        });
        publish(&mut ping, 1);
        if ping.bell_wanted() {
            far_rope.ring(News::Slots);
        }
        let near_own = OwnMemory(back.reader.clone());
        while !read(&mut pong, 2, false) {
            sleep(&near_bell, &near_own, block, wanted, CAREFUL, || pong.ready());
        }
        far.join().unwrap();
    });
}

/// Two ringers on one page, and a waiter that believes the page alone, as one with a thousand
/// virtual interfaces does.
#[test]
fn the_page_tells_of_everyone_who_rang() {
    check(3, || {
        let page = bell_page();
        let ringing: Vec<_> = [BellIndex(1), BellIndex(70)]
            .into_iter()
            .map(|index| {
                let rope = BellRope::new(page.clone(), index);
                thread::spawn(move || rope.ring(News::Slots))
            })
            .collect();
        let bell = Bell::on(page);
        let mut heard = Vec::new();
        while heard.len() < 2 {
            bell.take(|index| heard.push(index.number()));
            if heard.len() == 2 {
                break;
            }
            bell.enter();
            Bell::settle();
            let count = bell.count();
            if !bell.rung() {
                bell.sleep(count);
            }
            bell.leave();
        }
        heard.sort_unstable();
        assert_eq!(heard, [1, 70]);
        for ringer in ringing {
            ringer.join().unwrap();
        }
    });
}

/// Payloads that the reader keeps come back, each once, and only after its last look at them.
#[test]
fn payloads_come_back_after_the_last_look() {
    check(3, || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let (payload, seen) = (OwnMemory(sides.writer.clone()), PeerMemory::of(sides.writer.clone()));
        let mut book = LoanBook::new(PeerMemory::of(sides.reader.clone()), sides.block);
        let mut log = ReleaseLog::new(OwnMemory(sides.reader.clone()), sides.block);
        payload.copy_in(PAYLOAD_AT, &[7; 4]);
        let first = publish(&mut writer, 1);
        let reading = thread::spawn(move || {
            while !read(&mut reader, 1, true) {
                thread::yield_now();
            }
            reader.publish();
            let mut bytes = [0; 4];
            seen.copy_out(PAYLOAD_AT, &mut bytes);
            assert_eq!(bytes, [7; 4]);
            log.release(START);
        });
        while !writer.refresh().expect("an honest reader") {
            thread::yield_now();
        }
        assert!(writer.holds(first), "the mark is visible with the progress");
        book.lend(first, "payload").unwrap();
        let returned = loop {
            match book.poll(writer.consumed()).expect("an honest reader") {
                Some(returned) => break returned,
                None => thread::yield_now(),
            }
        };
        assert_eq!(returned, "payload");
        // Whose again it is: a reader that still looked would be a race, and loom would say so.
        payload.copy_in(PAYLOAD_AT, &[8; 4]);
        reading.join().unwrap();
    });
}

/// A slot that is held, given back and consumed while the writer looks is no lie, whatever the
/// writer sees first.
#[test]
fn an_honest_reader_is_never_called_a_liar() {
    check(3, || {
        let sides = Sides::new();
        let (mut writer, mut reader) = (sides.writer(), sides.reader());
        let mut book = LoanBook::new(PeerMemory::of(sides.reader.clone()), sides.block);
        let mut log = ReleaseLog::new(OwnMemory(sides.reader.clone()), sides.block);
        publish(&mut writer, 1);
        publish(&mut writer, 2);
        let reading = thread::spawn(move || {
            for number in 1..=2 {
                assert!(read(&mut reader, number, true));
                reader.publish();
            }
            // The other order, so that the log runs ahead of what the writer has entered.
            log.release(START + 1);
            log.release(START);
        });
        let (mut swept, mut returned) = (START, Vec::new());
        while returned.len() < 2 {
            writer.refresh().expect("an honest reader");
            while swept < writer.consumed() {
                assert!(writer.holds(swept));
                book.lend(swept, swept).unwrap();
                swept += 1;
            }
            while let Some(index) = book.poll(swept).expect("an honest reader") {
                returned.push(index);
            }
            if returned.len() < 2 {
                thread::yield_now();
            }
        }
        assert_eq!(returned, [START + 1, START]);
        reading.join().unwrap();
    });
}
