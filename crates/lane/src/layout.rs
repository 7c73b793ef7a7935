//! Where things are in a region of lanes. `docs/protocol/lane.md` draws it.
//!
//! A region belongs to two processes. It has room for [`LANES`] lanes; a lane has two ends and two directions, and a
//! direction is a control block and an area for records. A control block has three cache lines, each with an empty one behind
//! it: CPUs ask for lines in pairs. PERF(1 KiB bandwidth, 6 %; 64 B latency, 7 %).

use crate::{Incoming, Outgoing};
use highwire_mem::SharedMemory;

/// "HWLANES2", little-endian.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"HWLANES2");
const MAGIC_AT: usize = 0;
const SPARE_AT: usize = 64;

/// Lanes of a region.
pub const LANES: usize = 32;
pub(crate) const CONTROLS_AT: usize = 4096;
pub(crate) const CONTROL_BYTES: usize = 2048;
const DIRECTION_BYTES: usize = 512;
pub(crate) const ENDS_AT: usize = 1024;
pub(crate) const END_BYTES: usize = 128;
pub(crate) const AREAS_AT: usize = 131072;

/// Bytes of a line of the cache.
pub(crate) const LINE: usize = 64;

/// Bytes of a direction's area, of which as much is used as its capacity says.
pub const AREA_BYTES: usize = 1 << 20;
/// What a direction starts with.
pub const CAPACITY_LEAST: usize = 64 * 1024;
/// Bytes of a region. Memory is taken only where it is touched.
pub const REGION_BYTES: usize = AREAS_AT + LANES * 2 * AREA_BYTES;

const _: () = assert!(CONTROLS_AT + LANES * CONTROL_BYTES <= AREAS_AT);
const _: () = assert!(2 * DIRECTION_BYTES <= ENDS_AT && ENDS_AT + 2 * END_BYTES <= CONTROL_BYTES);

/// One of the two ends of a lane. End 0 writes direction 0 and reads direction 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// End 0.
    First,
    /// End 1.
    Second,
}

impl Side {
    /// The other end.
    pub fn other(self) -> Side {
        match self {
            Side::First => Side::Second,
            Side::Second => Side::First,
        }
    }

    pub(crate) fn number(self) -> usize {
        match self {
            Side::First => 0,
            Side::Second => 1,
        }
    }

    #[cfg(not(loom))]
    pub(crate) fn from_number(number: u32) -> Option<Side> {
        match number {
            0 => Some(Side::First),
            1 => Some(Side::Second),
            _ => None,
        }
    }
}

/// A region, as every process that has a part in it sees it.
#[derive(Clone, Copy, Debug)]
pub struct LaneRegion<'m> {
    memory: &'m SharedMemory,
}

impl<'m> LaneRegion<'m> {
    /// Writes the header of a region, as for a new one that may grow its lanes by `spare` bytes in all.
    pub fn prepare(memory: &'m SharedMemory, spare: u64) -> LaneRegion<'m> {
        memory.store64(SPARE_AT, spare);
        memory.store64(MAGIC_AT, MAGIC);
        LaneRegion { memory }
    }

    /// A region that this process prepared, whatever was written to it since.
    #[cfg(not(loom))]
    pub(crate) fn own(memory: &'m SharedMemory) -> LaneRegion<'m> {
        LaneRegion { memory }
    }

    /// A region that somebody else prepared; `None` if it is not one.
    pub fn adopt(memory: &'m SharedMemory) -> Option<LaneRegion<'m>> {
        (memory.len() >= REGION_BYTES && memory.load64(MAGIC_AT) == MAGIC).then_some(LaneRegion { memory })
    }

    /// The lane of this number; `None` beyond the last.
    pub fn lane(self, index: usize) -> Option<Lane<'m>> {
        (index < LANES).then_some(Lane { memory: self.memory, index })
    }

    /// Bytes by which lanes of this region may still grow.
    pub fn spare(self) -> u64 {
        self.memory.load64(SPARE_AT)
    }

    /// Takes some of them.
    pub(crate) fn take_spare(self, bytes: u64) -> bool {
        let mut spare = self.spare();
        while spare >= bytes {
            match self.memory.exchange64(SPARE_AT, spare, spare - bytes) {
                Ok(()) => return true,
                Err(now) => spare = now,
            }
        }
        false
    }
}

/// One lane of a region.
#[derive(Clone, Copy, Debug)]
pub struct Lane<'m> {
    memory: &'m SharedMemory,
    index: usize,
}

/// What became of an end of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndState {
    /// Nobody has come yet.
    Empty,
    /// A process looks after it.
    Joined,
    /// It is closed, or its process is dead.
    Gone,
}

impl<'m> Lane<'m> {
    /// Writes of one end.
    pub fn outgoing(self, side: Side) -> Outgoing<'m> {
        Outgoing::new(self.direction(side), Some(LaneRegion { memory: self.memory }))
    }

    /// Reads of one end.
    pub fn incoming(self, side: Side) -> Incoming<'m> {
        Incoming::new(self.direction(side.other()))
    }

    fn direction(self, from: Side) -> Direction<'m> {
        let number = from.number();
        Direction {
            memory: self.memory,
            control: CONTROLS_AT + self.index * CONTROL_BYTES + number * DIRECTION_BYTES,
            area: AREAS_AT + (self.index * 2 + number) * AREA_BYTES,
        }
    }

    fn end_at(self, side: Side) -> usize {
        CONTROLS_AT + self.index * CONTROL_BYTES + ENDS_AT + side.number() * END_BYTES
    }

    /// What became of that end.
    pub fn state(self, side: Side) -> EndState {
        match self.memory.load32(self.end_at(side)) {
            0 => EndState::Empty,
            1 => EndState::Joined,
            _ => EndState::Gone,
        }
    }

    /// Says what became of that end.
    pub fn set_state(self, side: Side, state: EndState) {
        let number = match state {
            EndState::Empty => 0,
            EndState::Joined => 1,
            EndState::Gone => 2,
        };
        self.memory.store32(self.end_at(side), number);
    }

    /// Processes that have that end's descriptor, by number; zero for none.
    pub fn holders(self, side: Side) -> Holders<'m> {
        Holders { memory: self.memory, at: self.end_at(side) + HOLDERS_AT }
    }

    /// Makes it as new, for the next pair; only when both ends are gone or were never there. Memory beyond what a lane
    /// starts with is given back.
    #[cfg(not(loom))]
    pub fn clear(self) {
        let control = CONTROLS_AT + self.index * CONTROL_BYTES;
        for at in (control..control + CONTROL_BYTES).step_by(8) {
            self.memory.store64(at, 0);
        }
        for number in 0..2 {
            self.memory.give_back(AREAS_AT + (self.index * 2 + number) * AREA_BYTES, AREA_BYTES);
        }
    }

    /// Bytes of memory that its two directions may have touched.
    pub fn bytes(self) -> usize {
        [Side::First, Side::Second].iter().map(|side| self.direction(*side).capacity()).sum()
    }
}

pub(crate) const HOLDERS_AT: usize = 16;
pub(crate) const HOLDERS: usize = 8;

/// Holds a place among [`Holders`] for a child that is about to be forked, until its number is known.
pub const UNBORN: u32 = u32::MAX;

/// The processes that have an end's descriptor. Only one that is alone may look.
#[derive(Clone, Copy, Debug)]
pub struct Holders<'m> {
    memory: &'m SharedMemory,
    at: usize,
}

impl Holders<'_> {
    /// Adds a process; false if there is no room, and then the end is nobody's alone any more.
    #[expect(clippy::should_implement_trait, reason = "holders are no numbers")]
    pub fn add(self, process: u32) -> bool {
        if (0..HOLDERS).any(|place| self.memory.load32(self.at + 4 * place) == process) {
            return true;
        }
        (0..HOLDERS).any(|place| self.memory.exchange32(self.at + 4 * place, 0, process).is_ok())
    }

    /// Puts `process` where `before` was; adds it if that was not there.
    pub fn replace(self, before: u32, process: u32) -> bool {
        let replaced = (0..HOLDERS).any(|place| self.memory.exchange32(self.at + 4 * place, before, process).is_ok());
        replaced || self.add(process)
    }

    /// Removes a process.
    pub fn remove(self, process: u32) {
        for place in 0..HOLDERS {
            let _ = self.memory.exchange32(self.at + 4 * place, process, 0);
        }
    }

    /// The others, beside `process`.
    pub fn others(self, process: u32) -> impl Iterator<Item = u32> {
        (0..HOLDERS)
            .map(move |place| self.memory.load32(self.at + 4 * place))
            .filter(move |&pid| pid != 0 && pid != process)
    }
}

/// Where one direction's words and records are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Direction<'m> {
    pub(crate) memory: &'m SharedMemory,
    pub(crate) control: usize,
    pub(crate) area: usize,
}

// First line: what the reader polls.
/// *Looking*, the number of sleepers, of sends by TCP and of records published; both ends change it, by
/// compare-and-swap only.
pub(crate) const WORD_AT: usize = 0;
/// Bytes that had gone by TCP when the writer last sent some that way.
pub(crate) const TCP_HINT_AT: usize = 8;
/// The kernel has something to say: the writer has closed or shut down (1), or has sent an urgent byte (2).
pub(crate) const CLOSING_AT: usize = 16;
/// CPU on which the writer last was, plus one.
pub(crate) const WRITER_CPU_AT: usize = 20;
/// Sends by TCP that are under way.
pub(crate) const SENDING_AT: usize = 24;

// Second line: the reader's.
/// Records consumed, place of the next, bytes taken of it: one word, so that it is always true as a whole.
pub(crate) const PROGRESS_AT: usize = 128;
/// Bytes that the reader's end has taken from TCP.
pub(crate) const TCP_READ_AT: usize = 136;
/// CPU on which the reader last was, plus one.
pub(crate) const READER_CPU_AT: usize = 144;
/// Thread that reads just now.
pub(crate) const READER_LOCK_AT: usize = 148;

// Third line: the writer's.
/// Bytes that the writer's end has given to TCP.
pub(crate) const TCP_WRITTEN_AT: usize = 256;
/// Place of the next record and capacity, after an even number of records and after an odd one.
pub(crate) const PLACES_AT: usize = 264;
/// The reader's progress as the writer last saw it.
pub(crate) const KNOWN_AT: usize = 280;
/// Thread that writes just now.
pub(crate) const WRITER_LOCK_AT: usize = 288;

/// Set in [`WORD_AT`] while a reader is looking.
pub(crate) const LOOKING: u64 = 1 << 63;
/// One of those in [`WORD_AT`] who sleep in the kernel, or read there without a bound: while there is one, nobody looks.
pub(crate) const SLEEPER: u64 = 1 << 48;
/// All of them.
pub(crate) const SLEEPERS: u64 = LOOKING - SLEEPER;
/// One of the sends by TCP in [`WORD_AT`] that have begun, modulo 65,536: a record that was prepared before one began is
/// not published after it.
pub(crate) const SEND: u64 = 1 << 32;
/// All of them.
pub(crate) const SENDS: u64 = SLEEPER - SEND;
/// The number of records in [`WORD_AT`], modulo 2³².
pub(crate) const COUNT: u64 = SEND - 1;

impl Direction<'_> {
    #[inline(always)]
    pub(crate) fn word(self) -> u64 {
        self.memory.load64(self.control + WORD_AT)
    }

    /// Changes the word as `next` says; false if it says nothing.
    #[inline]
    pub(crate) fn change(self, next: impl Fn(u64) -> Option<u64>) -> bool {
        let mut word = self.word();
        loop {
            let Some(wanted) = next(word) else { return false };
            match self.memory.exchange64(self.control + WORD_AT, word, wanted) {
                Ok(()) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// Writes where somebody runs, where that is news; `None` for nowhere in particular.
    #[inline]
    pub(crate) fn note_cpu(self, field: usize, cpu: Option<u32>) {
        let word = cpu.map_or(0, |cpu| cpu + 1);
        if self.memory.load32(self.control + field) != word {
            self.memory.store32(self.control + field, word);
        }
    }

    /// Where somebody said to run.
    #[inline]
    pub(crate) fn cpu(self, field: usize) -> Option<u32> {
        self.memory.load32(self.control + field).checked_sub(1)
    }

    pub(crate) fn capacity(self) -> usize {
        let count = self.word() & COUNT;
        let place = self.memory.load64(self.control + PLACES_AT + 8 * (count & 1) as usize);
        (((place >> 32) as usize) * UNIT).clamp(CAPACITY_LEAST, AREA_BYTES)
    }
}

/// Records begin at multiples of a cache line.
pub(crate) const UNIT: usize = 64;
/// Bytes before a record's content: the number of TCP bytes that come before it, and its length.
pub(crate) const HEAD_BYTES: usize = 16;
/// A length that says: the next record is at the beginning of the area.
pub(crate) const WRAP: u32 = u32::MAX;
/// Longest content of a record.
pub const RECORD_MAX: usize = 16 * 1024 - HEAD_BYTES;
