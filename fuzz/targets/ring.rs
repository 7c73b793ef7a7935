//! Both ends of a ring whose other ends are memory that the input writes.
#![no_main]

use arbitrary::Arbitrary;
use highwire_mem::{
    Block, BlockShape, CONTENT_BYTES, Flags, Kind, LoanBook, OwnMemory, OwnRegion, PeerMemory, PeerRegion,
    REGION_HEADER_BYTES, ReleaseLog, SlotHead, SlotReader, SlotWriter,
};
use libfuzzer_sys::fuzz_target;
use std::os::fd::AsFd;
use std::sync::OnceLock;

const REGION_BYTES: usize = 4 << 20;

#[derive(Arbitrary, Debug)]
struct Input {
    depth: u8,
    loans: u8,
    start: u64,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// The other side writes a word of its block.
    Store {
        at: u16,
        value: u64,
    },
    /// The other side publishes a slot.
    Slot {
        meta: u32,
        length: u32,
        content: [u8; 24],
    },
    /// The other side claims progress near the truth.
    Consumed {
        beyond: i8,
    },
    Release {
        number: u8,
        index: u8,
    },
    /// This side reads.
    Read {
        hold: bool,
        publish: bool,
    },
    GiveBack {
        which: u8,
    },
    /// This side writes.
    Write {
        length: u8,
        acknowledge: bool,
    },
    Refresh,
}

/// Our memory, the hostile side's memory as it writes it, and as we read it.
struct Memories {
    own: OwnMemory,
    hostile: OwnMemory,
    seen: PeerMemory,
}

fn memories() -> &'static Memories {
    static MEMORIES: OnceLock<Memories> = OnceLock::new();
    MEMORIES.get_or_init(|| {
        let own = OwnRegion::create(REGION_BYTES).expect("a region");
        let hostile = OwnRegion::create(REGION_BYTES).expect("a region");
        let fd = hostile.as_fd().try_clone_to_owned().expect("a descriptor");
        let seen = PeerRegion::adopt(fd, REGION_BYTES as u64, REGION_BYTES as u64).expect("its view");
        Memories { own: own.memory().clone(), hostile: hostile.memory().clone(), seen: seen.memory().clone() }
    })
}

fuzz_target!(|input: Input| {
    let shape = BlockShape::new(2 << (input.depth % 8), 2 << (input.loans % 8)).expect("powers of two");
    let block = Block::new(REGION_HEADER_BYTES as u64, shape, REGION_BYTES).expect("room");
    let start = input.start >> 3;
    let Memories { own, hostile, seen } = memories();
    block.prepare(own, start, false);
    block.prepare(hostile, start, false);
    let mut ring = Ring {
        writer: SlotWriter::new(own.clone(), block, seen.clone(), block, start, false),
        reader: SlotReader::new(own.clone(), block, seen.clone(), block, start, false),
        book: LoanBook::new(seen.clone(), block),
        log: ReleaseLog::new(own.clone(), block),
        block,
        next: start,
        held: Vec::new(),
        swept: start,
    };
    for step in &input.steps {
        if ring.step(step, hostile).is_err() {
            // A lie ends the connection.
            break;
        }
    }
});

struct Ring {
    writer: SlotWriter,
    reader: SlotReader,
    book: LoanBook<u64>,
    log: ReleaseLog,
    block: Block,
    next: u64,
    held: Vec<u64>,
    swept: u64,
}

impl Ring {
    fn step(&mut self, step: &Step, hostile: &OwnMemory) -> Result<(), highwire_mem::Lie> {
        let (block, depth) = (self.block, u64::from(self.block.shape().depth()));
        let slots = block.offset() + block.shape().bytes() - depth as usize * 256;
        match *step {
            Step::Store { at, value } => {
                hostile.store64(block.offset() + usize::from(at) * 8 % block.shape().bytes(), value);
            }
            Step::Slot { meta, length, content } => {
                let at = slots + (self.next % depth) as usize * 256;
                hostile.copy_in(at + 16, &content);
                hostile.store32(at + 4, meta);
                hostile.store32(at + 8, length);
                hostile.store32(at, (self.next as u32).wrapping_add(1));
                self.next += 1;
            }
            Step::Consumed { beyond } => {
                hostile.store64(block.offset(), self.writer.head().wrapping_add_signed(i64::from(beyond)));
            }
            Step::Release { number, index } => {
                let log = block.offset() + 0x100 + depth as usize * 8;
                let entry = 1 << 63 | self.swept.wrapping_sub(u64::from(index)) & ((1 << 62) - 1);
                hostile.store64(log + usize::from(number) * 8 % (depth as usize * 8), entry);
            }
            Step::Read { hold, publish } => self.read(hold, publish)?,
            Step::GiveBack { which } => {
                if !self.held.is_empty() {
                    let index = self.held.swap_remove(usize::from(which) % self.held.len());
                    self.reader.publish();
                    self.log.release(index);
                }
            }
            Step::Write { length, acknowledge } => {
                if self.writer.credit() > 0 {
                    let bytes = vec![7; usize::from(length) % (CONTENT_BYTES + 1)];
                    let flags = if acknowledge { Flags::WHOLE.with(Flags::ACKNOWLEDGE) } else { Flags::WHOLE };
                    let length = bytes.len() as u32;
                    let head = SlotHead { kind: Kind::Inline, flags, control: 0, spans: 0, length, immediate: 1 };
                    self.writer.publish(head, &[], &[], &bytes);
                    self.writer.bell_wanted();
                }
            }
            Step::Refresh => self.refresh()?,
        }
        assert!(self.writer.credit() <= depth);
        Ok(())
    }

    fn read(&mut self, hold: bool, publish: bool) -> Result<(), highwire_mem::Lie> {
        let Some(head) = self.reader.head()? else { return Ok(()) };
        // Everything that a checked head speaks of lies inside the slot.
        let prefix = head.prefix_bytes();
        let inline = if head.kind == Kind::Inline { head.length as usize } else { 0 };
        let mut content = [0; CONTENT_BYTES];
        let whole = prefix + usize::from(head.control) + inline;
        self.reader.content(0, &mut content[..whole]);
        let tail = self.reader.tail();
        let hold = hold && (self.held.len() as u32) < self.block.shape().loans();
        self.reader.consume(head.flags.has(Flags::ACKNOWLEDGE), hold);
        assert_eq!(self.reader.tail(), tail + 1);
        if hold {
            self.held.push(tail);
        }
        if publish || self.reader.publish_due() {
            self.reader.publish();
        }
        Ok(())
    }

    fn refresh(&mut self) -> Result<(), highwire_mem::Lie> {
        self.writer.refresh()?;
        assert!(self.writer.consumed() <= self.writer.head());
        while self.swept < self.writer.consumed() {
            if self.writer.holds(self.swept) {
                while let Err((lie, _)) = self.book.lend(self.swept, self.swept) {
                    if self.book.poll(self.swept)?.is_none() {
                        return Err(lie);
                    }
                }
            }
            self.swept += 1;
        }
        while let Some(returned) = self.book.poll(self.swept)? {
            assert!(returned < self.swept);
        }
        Ok(())
    }
}
