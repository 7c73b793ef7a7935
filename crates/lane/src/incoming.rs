//! The reading half of a direction.

use crate::layout::{
    AREA_BYTES, CLOSING_AT, COUNT, Direction, HEAD_BYTES, LINE, LOOKING, PROGRESS_AT, READER_CPU_AT, READER_LOCK_AT,
    RECORD_MAX, SENDING_AT, SLEEPER, SLEEPERS, TCP_HINT_AT, TCP_READ_AT, UNIT, WRAP, WRITER_CPU_AT,
};
use crate::outgoing::Lie;
use crate::progress::Progress;
use highwire_mem::SharedMemory;

/// Reads records, and says how many bytes of TCP come before the next one. Whoever reads holds the lock.
///
/// ```text
///            look()                      a record, or TCP bytes that were announced
///   blind ───────────▶ looking ────────────────────────────▶ looking
///     ▲  ▲                │ stop_looking(seen), sleep(seen): only if nothing was published since
///     │  └────────────────┤ (or the writer turns it away)
///     │ wake()            │
///     └──── asleep ◀──────┘ sleep(seen)
/// ```
/// Blind or asleep, everything new comes by TCP, and the kernel wakes who sleeps on it. While anybody is asleep,
/// nobody can begin to look.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'m> {
    direction: Direction<'m>,
}

/// What comes next in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// A record, of which so many bytes are left.
    Record(Record),
    /// At most so many bytes of TCP, then something else.
    Tcp(u64),
    /// Neither a record nor bytes that are known to have gone by TCP.
    Nothing,
    /// The region says what cannot be true: the lane is not to be used any more.
    Lie,
}

/// The rest of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    progress: Progress,
    len: usize,
    content: usize,
}

impl Record {
    /// Bytes of all of it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a record has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes left of it.
    pub fn left(&self) -> usize {
        self.len - self.progress.taken
    }

    fn consumed(self) -> Progress {
        let units = (HEAD_BYTES + self.len).div_ceil(UNIT);
        Progress { count: self.progress.count.wrapping_add(1), at: self.progress.at + units, taken: 0 }
    }
}

impl<'m> Incoming<'m> {
    pub(crate) fn new(direction: Direction<'m>) -> Incoming<'m> {
        Incoming { direction }
    }

    #[inline(always)]
    fn at(self, field: usize) -> usize {
        self.direction.control + field
    }

    #[inline(always)]
    fn memory(self) -> &'m SharedMemory {
        self.direction.memory
    }

    /// What comes next.
    #[inline]
    pub fn next(self) -> Next {
        // Before the word: a record that is not seen below was published after these bytes went by TCP, and comes
        // after them.
        let hint = self.memory().load64(self.at(TCP_HINT_AT));
        let word = self.direction.word();
        let progress = Progress::of(self.memory().glance64(self.at(PROGRESS_AT)));
        let tcp_read = self.memory().glance64(self.at(TCP_READ_AT));
        if word as u32 != progress.count {
            let Ok((record, after)) = self.parse(progress) else { return Next::Lie };
            return match after.checked_sub(tcp_read) {
                Some(0) => Next::Record(record),
                Some(before) => Next::Tcp(before),
                // Bytes of TCP were read that come after the record.
                None => Next::Lie,
            };
        }
        if hint > tcp_read { Next::Tcp(hint - tcp_read) } else { Next::Nothing }
    }

    /// Checks the record at `progress`. Also: how many bytes of TCP come before it, since the connection began.
    #[inline]
    fn parse(self, mut progress: Progress) -> Result<(Record, u64), Lie> {
        let memory = self.memory();
        let end = AREA_BYTES / UNIT;
        if progress.at >= end {
            return Err(Lie);
        }
        let mut head = self.direction.area + progress.at * UNIT;
        let mut len = memory.load32(head + 8);
        if len == WRAP {
            (progress.at, head) = (0, self.direction.area);
            len = memory.load32(head + 8);
        }
        let len = len as usize;
        if len == 0 || len > RECORD_MAX || progress.taken >= len {
            return Err(Lie);
        }
        if progress.at + (HEAD_BYTES + len).div_ceil(UNIT) >= end {
            return Err(Lie);
        }
        Ok((Record { progress, len, content: head + HEAD_BYTES }, memory.load64(head)))
    }

    /// The records that wait, each with the number of TCP bytes that come between it and the one before (or what was
    /// read last). Ends early where the region lies.
    pub fn waiting(self) -> impl Iterator<Item = (u64, Record)> {
        let mut progress = Progress::of(self.memory().glance64(self.at(PROGRESS_AT)));
        let mut tcp = self.memory().glance64(self.at(TCP_READ_AT));
        let published = self.published() as u32;
        let limit = AREA_BYTES / UNIT;
        std::iter::from_fn(move || {
            if progress.count == published {
                return None;
            }
            let (record, after) = self.parse(progress).ok()?;
            let between = after.checked_sub(tcp)?;
            (progress, tcp) = (record.consumed(), after);
            Some((between, record))
        })
        .take(limit)
    }

    /// Copies up to `bytes` of a record with `copy`, which is told where they are and how many, and takes them if
    /// `consume` is said.
    #[inline]
    pub fn take(
        self,
        record: Record,
        bytes: usize,
        consume: bool,
        copy: impl FnOnce(&'m SharedMemory, usize, usize),
    ) -> usize {
        let bytes = bytes.min(record.left());
        copy(self.memory(), record.content + record.progress.taken, bytes);
        if consume {
            let progress = if bytes == record.left() {
                record.consumed()
            } else {
                Progress { taken: record.progress.taken + bytes, ..record.progress }
            };
            // Gives the place back: pairs with the writer's load when it runs out of room.
            self.memory().store64(self.at(PROGRESS_AT), progress.word());
        }
        bytes
    }

    /// Begins to look, unless somebody sleeps.
    pub fn look(self) -> bool {
        self.direction.change(|word| (word & LOOKING == 0 && word & SLEEPERS == 0).then_some(word | LOOKING))
    }

    /// Stops looking and counts as a sleeper until [`wake`](Incoming::wake), unless more was published than the `seen`
    /// records: then false, and there is something to read. Afterwards everything new comes by TCP.
    pub fn sleep(self, seen: u64) -> bool {
        self.direction.change(|word| {
            // More sleepers than can be counted are a lie, and must not become *looking*.
            let sleeper = if word & SLEEPERS == SLEEPERS { 0 } else { SLEEPER };
            (word & COUNT == seen).then_some((word & !LOOKING) + sleeper)
        })
    }

    /// Is no sleeper any more.
    pub fn wake(self) {
        self.direction.change(|word| (word & SLEEPERS != 0).then(|| word - SLEEPER));
    }

    /// Nobody sleeps, as whoever is alone with the connection knows: sleepers that were killed did not say so.
    pub fn forget_sleepers(self) {
        self.direction.change(|word| (word & SLEEPERS != 0).then_some(word & !SLEEPERS));
    }

    /// Whether the writer may publish now.
    #[inline]
    pub fn is_looking(self) -> bool {
        self.direction.word() & LOOKING != 0
    }

    /// Records published so far, to compare with.
    #[inline]
    pub fn published(self) -> u64 {
        self.direction.word() & COUNT
    }

    /// True while a record waits that has not been consumed whole.
    #[inline]
    pub fn has_records(self) -> bool {
        self.direction.word() as u32 != Progress::of(self.memory().glance64(self.at(PROGRESS_AT))).count
    }

    /// True if a record waits or bytes that went by TCP were announced and not read.
    #[inline]
    pub fn has_news(self) -> bool {
        self.has_records() || self.memory().load64(self.at(TCP_HINT_AT)) > self.memory().glance64(self.at(TCP_READ_AT))
    }

    /// PERF(4 B latency, 8 ns; 64 B, 10 ns): asks for the lines of the next record, if it is as long as `expected`, before
    /// the lock is taken, whose exchange later loads wait for. A line more than the record has would be taken from the
    /// writer that is about to fill it.
    #[inline(always)]
    pub fn prefetch(self, expected: usize) {
        let progress = Progress::of(self.memory().glance64(self.at(PROGRESS_AT)));
        let at = self.direction.area + progress.at.min(AREA_BYTES / UNIT - 1) * UNIT;
        let last = at + HEAD_BYTES + expected.clamp(1, LINE) - 1;
        self.memory().prefetch(at);
        if last / LINE != at / LINE && last < self.direction.area + AREA_BYTES {
            self.memory().prefetch(last);
        }
    }

    /// A number that changes with every record, and with bytes that went by TCP.
    pub fn heard(self) -> u64 {
        self.published().wrapping_add(self.memory().load64(self.at(TCP_HINT_AT)))
    }

    /// Bytes in records that wait.
    pub fn bytes_waiting(self) -> usize {
        self.waiting().map(|(_, record)| record.left()).sum()
    }

    /// Stops looking, unless more was published than the `seen` records: then false, and there is something to read.
    /// Afterwards everything new comes by TCP.
    pub fn stop_looking(self, seen: u64) -> bool {
        let word = self.direction.word();
        // Most often nobody looks.
        if word & (LOOKING | COUNT) == seen {
            return true;
        }
        self.direction.change(|word| (word & COUNT == seen).then_some(word & !LOOKING))
    }

    /// Stops looking whatever there is to read.
    pub fn turn_away(self) {
        self.direction.change(|word| (word & LOOKING != 0).then_some(word & !LOOKING));
    }

    /// Counts bytes that were taken from TCP.
    #[inline]
    pub fn read_by_tcp(self, bytes: u64) {
        self.memory().add64(self.at(TCP_READ_AT), bytes);
    }

    /// Bytes taken from TCP so far.
    pub fn tcp_read(self) -> u64 {
        self.memory().load64(self.at(TCP_READ_AT))
    }

    /// Says how many bytes the kernel counts as taken from TCP, unless the count is no longer `known`.
    pub fn adopt_tcp(self, known: u64, bytes: u64) -> bool {
        self.memory().exchange64(self.at(TCP_READ_AT), known, bytes).is_ok()
    }

    /// Whether the writer said that it has closed or shut down.
    #[inline]
    pub fn is_closing(self) -> bool {
        self.memory().load32(self.at(CLOSING_AT)) != 0
    }

    /// Whether urgent bytes were sent.
    pub fn is_urgent(self) -> bool {
        self.memory().load32(self.at(CLOSING_AT)) == 2
    }

    /// Whether bytes may be in TCP that are not counted yet.
    #[inline]
    pub fn may_be_sent(self) -> bool {
        self.memory().load32(self.at(SENDING_AT)) != 0
    }

    /// Whether more was read by TCP than its writer says to have sent: somebody sends who does not say so.
    pub fn is_ahead(self) -> bool {
        !self.may_be_sent() && self.memory().load64(self.at(TCP_HINT_AT)) < self.memory().glance64(self.at(TCP_READ_AT))
    }

    /// Notes where the reader runs.
    #[inline]
    pub fn note_cpu(self, cpu: Option<u32>) {
        self.direction.note_cpu(READER_CPU_AT, cpu);
    }

    /// Where the writer last ran.
    #[inline]
    pub fn writer_cpu(self) -> Option<u32> {
        self.direction.cpu(WRITER_CPU_AT)
    }

    /// The lock of who reads.
    pub fn lock(self) -> crate::ThreadLock<'m> {
        crate::ThreadLock::new(self.memory(), self.at(READER_LOCK_AT))
    }
}
