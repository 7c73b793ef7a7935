//! The payload area: where a sender puts the bytes of messages that do not fit their slot.
//!
//! It is walked through in turn, never reused hot: lines that the reader has long dropped come from
//! the shared cache, not from its private one. It starts small and is replaced by a larger one only
//! while bulk traffic finds it full. The bookkeeping is the sender's alone; the reader sees offsets.

use std::collections::VecDeque;

/// A piece of the area that one slot refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the sender's region.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// What [`PayloadArea::free`] is called with.
    pub id: u64,
}

#[derive(Debug)]
struct Ground {
    offset: usize,
    len: usize,
    live: usize,
}

#[derive(Debug)]
struct Entry {
    ground: usize,
    start: usize,
    end: usize,
    state: EntryState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryState {
    Live,
    Freed,
    /// Kept by the reader: the walk goes around it.
    Pinned,
}

/// An extent that the walk goes around.
#[derive(Debug)]
struct Pinned {
    id: u64,
    ground: usize,
    start: usize,
    end: usize,
}

/// The walk through one or, while an old one empties, several stretches of the sender's region.
#[derive(Debug, Default)]
pub struct PayloadArea {
    grounds: Vec<Ground>,
    /// Where the next extent begins, in the last ground.
    head: usize,
    entries: VecDeque<Entry>,
    pinned: Vec<Pinned>,
    first_id: u64,
    laps: u64,
}

/// Extents begin on a cache line.
const LINE: usize = 64;
/// Left between extents, so that payloads of whole pages do not all begin at the start of one: copies
/// between two such places are slow.
const SKEW: usize = 2 * LINE;
const SKEW_FROM: usize = 4096;

impl PayloadArea {
    /// An area with no ground yet.
    pub fn new() -> PayloadArea {
        PayloadArea::default()
    }

    /// Bytes of the stretch in use.
    pub fn size(&self) -> usize {
        self.grounds.last().map_or(0, |ground| ground.len)
    }

    /// How often the walk has come back to the start of a stretch.
    pub fn laps(&self) -> u64 {
        self.laps
    }

    /// Goes on in a new stretch of the region; the old ones are given back as they empty.
    pub fn move_to(&mut self, offset: usize, len: usize) {
        assert!(len.is_multiple_of(LINE) && len > 0, "a payload area is a multiple of a cache line");
        self.grounds.push(Ground { offset, len, live: 0 });
        self.head = 0;
    }

    /// Takes up to `most` contiguous bytes, at least `least` of them and one, or nothing.
    pub fn reserve(&mut self, least: usize, most: usize) -> Option<Extent> {
        let ground = self.grounds.len().checked_sub(1)?;
        let len = self.grounds[ground].len;
        let least = least.max(1);
        let skewed = if most >= SKEW_FROM { self.head + SKEW } else { self.head };
        // Skewed if that is possible, else right behind the one before.
        let ahead =
            |end: usize| self.gap(ground, skewed, end, least).or_else(|| self.gap(ground, self.head, end, least));
        let (start, room) = match self.oldest(ground) {
            // Nothing in the way: go on walking rather than begin again.
            None => ahead(len).or_else(|| self.gap(ground, 0, len, least)),
            // What is live lies between the tail and the head, and the walk never catches up with
            // it: full and empty differ.
            Some(tail) if tail < self.head => ahead(len).or_else(|| self.gap(ground, 0, tail, least)),
            Some(tail) => ahead(tail),
        }?;
        let taken = most.min(room);
        self.grounds[ground].live += 1;
        if start < self.head {
            self.laps += 1;
        }
        self.head = (start + taken).next_multiple_of(LINE);
        if self.head >= len {
            self.head = 0;
            self.laps += 1;
        }
        let id = self.first_id + self.entries.len() as u64;
        let offset = self.grounds[ground].offset;
        self.entries.push_back(Entry { ground: offset, start, end: start + taken, state: EntryState::Live });
        Some(Extent { offset: offset + start, len: taken, id })
    }

    /// The first place between `from` and `to` with `least` free bytes, going around what is pinned.
    #[inline]
    fn gap(&self, ground: usize, from: usize, to: usize, least: usize) -> Option<(usize, usize)> {
        let fits = |start: usize, end: usize| (end.saturating_sub(start) >= least).then(|| (start, end - start));
        if self.pinned.is_empty() {
            return fits(from, to);
        }
        let offset = self.grounds[ground].offset;
        let mut start = from;
        loop {
            let in_the_way = |pin: &&Pinned| pin.ground == offset && pin.end > start && pin.start < to;
            let Some(pin) = self.pinned.iter().filter(in_the_way).min_by_key(|pin| pin.start) else {
                return fits(start, to);
            };
            if let Some(found) = fits(start, pin.start) {
                return Some(found);
            }
            start = pin.end.next_multiple_of(LINE);
        }
    }

    /// The reader keeps this extent, perhaps for long: the walk goes around it from now on.
    pub fn pin(&mut self, id: u64) {
        let Some(entry) = self.entry(id) else { return };
        if entry.state == EntryState::Live {
            entry.state = EntryState::Pinned;
            let pinned = Pinned { id, ground: entry.ground, start: entry.start, end: entry.end };
            self.pinned.push(pinned);
            self.forget_settled();
        }
    }

    /// Gives an extent back, in any order. Stretches that are no longer needed go to `returned`.
    pub fn free(&mut self, id: u64, mut returned: impl FnMut(usize, usize)) {
        if let Some(position) = self.pinned.iter().position(|pin| pin.id == id) {
            let ground = self.pinned.swap_remove(position).ground;
            self.leave(ground);
        } else {
            let entry = self.entry(id).expect("an extent is freed once");
            assert!(entry.state == EntryState::Live, "an extent is freed once");
            entry.state = EntryState::Freed;
            self.forget_settled();
        }
        // Also a stretch that was empty already when the area moved on.
        while let Some(position) = self.idle_before_last() {
            let ground = self.grounds.remove(position);
            returned(ground.offset, ground.len);
        }
    }

    fn entry(&mut self, id: u64) -> Option<&mut Entry> {
        let index = usize::try_from(id.checked_sub(self.first_id)?).ok()?;
        self.entries.get_mut(index)
    }

    /// Forgets the oldest extents that are no longer in the way.
    fn forget_settled(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.state != EntryState::Live) {
            let Some(entry) = self.entries.pop_front() else { break };
            self.first_id += 1;
            if entry.state == EntryState::Freed {
                self.leave(entry.ground);
            }
        }
    }

    fn leave(&mut self, offset: usize) {
        let ground = self.grounds.iter_mut().find(|ground| ground.offset == offset);
        ground.expect("a live extent has its ground").live -= 1;
    }

    /// Gives all stretches back; nothing in them may be in use any more.
    pub fn abandon(&mut self, mut returned: impl FnMut(usize, usize)) {
        self.first_id += self.entries.len() as u64;
        self.entries.clear();
        self.pinned.clear();
        for ground in self.grounds.drain(..) {
            returned(ground.offset, ground.len);
        }
    }

    /// True if nothing is in use.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty() && self.pinned.is_empty()
    }

    fn idle_before_last(&self) -> Option<usize> {
        let before_last = self.grounds.len().saturating_sub(1);
        self.grounds[..before_last].iter().position(|ground| ground.live == 0)
    }

    fn oldest(&self, ground: usize) -> Option<usize> {
        let offset = self.grounds[ground].offset;
        // Mostly the first; others only while an old stretch empties.
        let mut live = self.entries.iter().filter(|entry| entry.ground == offset && entry.state == EntryState::Live);
        live.next().map(|entry| entry.start)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
