//! The writing half of a direction.

use crate::layout::{
    AREA_BYTES, CAPACITY_LEAST, CLOSING_AT, COUNT, Direction, HEAD_BYTES, KNOWN_AT, LINE, LOOKING, LaneRegion,
    PLACES_AT, PROGRESS_AT, READER_CPU_AT, RECORD_MAX, SEND, SENDING_AT, SENDS, TCP_HINT_AT, TCP_WRITTEN_AT, UNIT,
    WORD_AT, WRAP, WRITER_CPU_AT, WRITER_LOCK_AT,
};
use crate::progress::Progress;
use highwire_mem::SharedMemory;

/// Writes records for a reader who is looking. Everything that it needs to know is in the region, so that any process
/// that has the descriptor can go on where another one stopped; whoever publishes or sends holds the lock.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'m> {
    direction: Direction<'m>,
    region: Option<LaneRegion<'m>>,
}

/// What became of bytes offered to the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// The reader will find so many of them: as many as there were to fill in.
    Done(usize),
    /// Nobody is looking: they go by TCP.
    NotLooked,
    /// There is no room at the moment: they wait, or go by TCP.
    Full,
    /// The region says what cannot be true: the lane is not to be used any more.
    Lie,
}

/// Where the next record goes and how much of the area is in use, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    at: usize,
    capacity: usize,
}

impl Place {
    fn of(word: u64) -> Place {
        let capacity = ((word >> 32) as usize).clamp(CAPACITY_LEAST / UNIT, AREA_BYTES / UNIT);
        Place { at: (word as u32 as usize).min(AREA_BYTES / UNIT - 1), capacity }
    }

    fn word(self) -> u64 {
        ((self.capacity as u64) << 32) | self.at as u64
    }
}

impl<'m> Outgoing<'m> {
    pub(crate) fn new(direction: Direction<'m>, region: Option<LaneRegion<'m>>) -> Outgoing<'m> {
        Outgoing { direction, region }
    }

    #[inline(always)]
    fn at(self, field: usize) -> usize {
        self.direction.control + field
    }

    #[inline(always)]
    fn memory(self) -> &'m SharedMemory {
        self.direction.memory
    }

    /// Whether a reader is looking now.
    #[inline]
    pub fn is_looked_at(self) -> bool {
        self.direction.word() & LOOKING != 0
    }

    /// Publishes one record of up to `most` bytes, at most [`RECORD_MAX`], which `fill` copies to the place that it is
    /// told; it says how many it had. The reader may stop looking meanwhile; then nothing has happened.
    #[inline]
    pub fn publish(self, most: usize, fill: impl FnOnce(&'m SharedMemory, usize) -> usize) -> Published {
        debug_assert!((1..=RECORD_MAX).contains(&most));
        let memory = self.memory();
        let mut word = self.direction.word();
        // Bytes of a send that is under way are not counted yet: a record could not say that it comes after them.
        if word & LOOKING == 0 || memory.load32(self.at(SENDING_AT)) != 0 {
            return Published::NotLooked;
        }
        let count = word & COUNT;
        let place = Place::of(memory.glance64(self.at(PLACES_AT + 8 * (count & 1) as usize)));
        let found = match self.room(count, place, (HEAD_BYTES + most).div_ceil(UNIT)) {
            Ok(Some(found)) => found,
            Ok(None) => return Published::Full,
            Err(Lie) => return Published::Lie,
        };
        if found.at != place.at {
            // The reader passes this mark before it comes to the record.
            memory.store32(self.direction.area + place.at * UNIT + 8, WRAP);
        }
        let head = self.direction.area + found.at * UNIT;
        memory.store64(head, memory.glance64(self.at(TCP_WRITTEN_AT)));
        let len = fill(memory, head + HEAD_BYTES).min(most);
        if len == 0 {
            return Published::Done(0);
        }
        memory.store32(head + 8, len as u32);
        // True as soon as the count says so, and not before.
        let units = (HEAD_BYTES + len).div_ceil(UNIT);
        let after = Place { at: found.at + units, ..found };
        memory.store64(self.at(PLACES_AT + 8 * ((count + 1) & 1) as usize), after.word());
        loop {
            // Publishes the record: pairs with the reader's load of the word. It cannot succeed once the reader has
            // stopped looking, and a reader cannot stop without having seen what was published before.
            let next = word & !COUNT | word.wrapping_add(1) & COUNT;
            match memory.exchange64(self.at(WORD_AT), word, next) {
                Ok(()) => {
                    self.prefetch(after, units);
                    return Published::Done(len);
                }
                Err(now) if now & LOOKING == 0 || (now ^ word) & SENDS != 0 => return Published::NotLooked,
                Err(now) if now & COUNT == count => word = now,
                // Only who has the lock publishes.
                Err(_) => return Published::Lie,
            }
        }
    }

    /// PERF(64 B bandwidth, 12 %): asks for the lines of the next record, to be written, if it is as short as this one. The
    /// reader's cache has them since the ring wrapped, and the exchange that publishes waits until they have come. For
    /// longer records the hardware prefetches, and this is slower.
    #[inline(always)]
    fn prefetch(self, place: Place, units: usize) {
        let at = self.direction.area + place.at * UNIT;
        if units * UNIT <= 2 * LINE && place.at + units <= AREA_BYTES / UNIT {
            self.memory().prefetch_to_write(at);
            self.memory().prefetch_to_write(at + (units - 1) * UNIT);
        }
    }

    /// A place for a record of so many units; `None` while there is no room.
    #[inline]
    fn room(self, count: u64, place: Place, units: usize) -> Result<Option<Place>, Lie> {
        let known = Progress::of(self.memory().glance64(self.at(KNOWN_AT)));
        if let Some(found) = fit(count, place, known, units)? {
            return Ok(Some(found));
        }
        let now = self.memory().load64(self.at(PROGRESS_AT));
        self.memory().store64(self.at(KNOWN_AT), now);
        match fit(count, place, Progress::of(now), units)? {
            Some(found) => Ok(Some(found)),
            None => Ok(self.grow(count, place).filter(|grown| grown.at + units < grown.capacity)),
        }
    }

    /// Twice the capacity, where the place is before its end, the area and the region's spare bytes allow it.
    #[cold]
    fn grow(self, count: u64, place: Place) -> Option<Place> {
        let grown = Place { capacity: place.capacity * 2, ..place };
        let bytes = (place.capacity * UNIT) as u64;
        let progress = Progress::of(self.memory().load64(self.at(KNOWN_AT)));
        // Behind the reader there is nothing to grow into: the records before it come next.
        if grown.capacity > AREA_BYTES / UNIT || place.at < progress.at {
            return None;
        }
        if !self.region?.take_spare(bytes) {
            return None;
        }
        // At once: what was taken is not lost with a record that is not published.
        self.memory().store64(self.at(PLACES_AT + 8 * (count & 1) as usize), grown.word());
        Some(grown)
    }

    /// Bytes given to TCP so far, which the next record will carry.
    pub fn tcp_written(self) -> u64 {
        self.memory().load64(self.at(TCP_WRITTEN_AT))
    }

    /// Says how many bytes the kernel counts as given to TCP, unless the count is no longer `known`.
    pub fn adopt_tcp(self, known: u64, bytes: u64) -> bool {
        let adopted = self.memory().exchange64(self.at(TCP_WRITTEN_AT), known, bytes).is_ok();
        if adopted {
            self.memory().store64(self.at(TCP_HINT_AT), bytes);
        }
        adopted
    }

    /// A send by TCP begins: who looks asks the kernel, since its bytes may be there before they are counted.
    #[inline]
    pub fn begin_tcp(self) {
        self.memory().add32(self.at(SENDING_AT), 1);
        // Then the word, which whoever is just publishing compares.
        self.direction.change(|word| Some(word & !SENDS | word.wrapping_add(SEND) & SENDS));
    }

    /// Nothing is under way, as whoever is alone with the connection knows.
    pub fn forget_sends(self) {
        self.memory().store32(self.at(SENDING_AT), 0);
    }

    /// It has ended, and its bytes were counted.
    #[inline]
    pub fn end_tcp(self) {
        self.memory().add32(self.at(SENDING_AT), u32::MAX);
    }

    /// Counts bytes that went by TCP, and tells a reader who is looking that they are there.
    #[inline]
    pub fn sent_by_tcp(self, bytes: u64) {
        let now = self.memory().add64(self.at(TCP_WRITTEN_AT), bytes).wrapping_add(bytes);
        // Another thread may have told a higher number already; then that one stays.
        if self.memory().glance64(self.at(TCP_HINT_AT)) < now {
            self.memory().store64(self.at(TCP_HINT_AT), now);
        }
    }

    /// Stops the reader's looking, from this side: what follows goes by TCP until it looks again.
    pub fn turn_away(self) {
        self.direction.change(|word| (word & LOOKING != 0).then_some(word & !LOOKING));
    }

    /// Tells the reader that the kernel has something to say: the end of the stream, or of the connection.
    pub fn announce_closing(self) {
        let _ = self.memory().exchange32(self.at(CLOSING_AT), 0, 1);
    }

    /// Tells the reader that urgent bytes are on their way: nothing more comes by the lane, and what the kernel gives is not
    /// to be joined to anything.
    pub fn announce_urgent(self) {
        self.memory().store32(self.at(CLOSING_AT), 2);
    }

    /// Records that the reader has not consumed.
    pub fn unread(self) -> u32 {
        let progress = Progress::of(self.memory().load64(self.at(PROGRESS_AT)));
        (self.direction.word() as u32).wrapping_sub(progress.count)
    }

    /// How far the reader has come: another number when it takes more.
    pub fn reader_progress(self) -> u64 {
        self.memory().load64(self.at(PROGRESS_AT))
    }

    /// Notes where the writer runs.
    #[inline]
    pub fn note_cpu(self, cpu: Option<u32>) {
        self.direction.note_cpu(WRITER_CPU_AT, cpu);
    }

    /// Where the reader last ran.
    #[inline]
    pub fn reader_cpu(self) -> Option<u32> {
        self.direction.cpu(READER_CPU_AT)
    }

    /// The lock of who writes.
    pub fn lock(self) -> crate::ThreadLock<'m> {
        crate::ThreadLock::new(self.memory(), self.at(WRITER_LOCK_AT))
    }
}

/// Something in the region that cannot be true.
pub(crate) struct Lie;

/// Where `units` fit, for a reader that has come so far. A unit stays free for the mark that leads back to the
/// beginning.
#[inline(always)]
fn fit(count: u64, place: Place, reader: Progress, units: usize) -> Result<Option<Place>, Lie> {
    let outstanding = (count as u32).wrapping_sub(reader.count);
    if outstanding as usize > AREA_BYTES / UNIT || reader.at >= AREA_BYTES / UNIT {
        return Err(Lie);
    }
    let (end, front) = match (outstanding, place.at.cmp(&reader.at)) {
        (0, _) => (place.capacity, place.at),
        (_, std::cmp::Ordering::Greater) => (place.capacity, reader.at),
        // The writer is a lap ahead: up to the reader, and not onto it.
        (_, _) => (reader.at, 0),
    };
    Ok(if place.at + units < end {
        Some(place)
    } else if units < front {
        Some(Place { at: 0, ..place })
    } else {
        None
    })
}
