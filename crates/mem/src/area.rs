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
    freed: bool,
}

/// The walk through one or, while an old one empties, several stretches of the sender's region.
#[derive(Debug, Default)]
pub struct PayloadArea {
    grounds: Vec<Ground>,
    /// Where the next extent begins, in the last ground.
    head: usize,
    entries: VecDeque<Entry>,
    first_id: u64,
    laps: u64,
}

/// Extents begin on a cache line.
const LINE: usize = 64;

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

    /// Takes up to `most` contiguous bytes, at least `least` of them, or nothing.
    pub fn reserve(&mut self, least: usize, most: usize) -> Option<Extent> {
        let ground = self.grounds.len().checked_sub(1)?;
        let (len, live) = (self.grounds[ground].len, self.grounds[ground].live);
        let tail = self.oldest(ground);
        let (start, room) = match tail {
            _ if live == 0 => {
                // All free: go on walking rather than begin again.
                let rest = len - self.head;
                if rest >= least { (self.head, rest) } else { (0, len) }
            }
            Some(tail) if tail < self.head => {
                let rest = len - self.head;
                // The piece before `tail` stays short of it, so that full and empty differ.
                if rest >= least { (self.head, rest) } else { (0, tail) }
            }
            Some(tail) => (self.head, tail - self.head),
            None => (self.head, len - self.head),
        };
        if room < least || room == 0 {
            return None;
        }
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
        self.entries.push_back(Entry { ground: self.grounds[ground].offset, start, freed: false });
        Some(Extent { offset: self.grounds[ground].offset + start, len: taken, id })
    }

    /// Gives an extent back, in any order. Stretches that are no longer needed go to `returned`.
    pub fn free(&mut self, id: u64, mut returned: impl FnMut(usize, usize)) {
        let index = id.checked_sub(self.first_id).and_then(|index| usize::try_from(index).ok());
        let entry = index.and_then(|index| self.entries.get_mut(index)).expect("an extent is freed once");
        assert!(!std::mem::replace(&mut entry.freed, true), "an extent is freed once");
        while self.entries.front().is_some_and(|entry| entry.freed) {
            let Some(entry) = self.entries.pop_front() else { break };
            self.first_id += 1;
            let position = self.grounds.iter().position(|ground| ground.offset == entry.ground);
            let position = position.expect("a live extent has its ground");
            self.grounds[position].live -= 1;
        }
        // Also a stretch that was empty already when the area moved on.
        while let Some(position) = self.idle_before_last() {
            let ground = self.grounds.remove(position);
            returned(ground.offset, ground.len);
        }
    }

    /// Gives all stretches back; nothing in them may be in use any more.
    pub fn abandon(&mut self, mut returned: impl FnMut(usize, usize)) {
        self.first_id += self.entries.len() as u64;
        self.entries.clear();
        for ground in self.grounds.drain(..) {
            returned(ground.offset, ground.len);
        }
    }

    /// True if nothing is in use.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty()
    }

    fn idle_before_last(&self) -> Option<usize> {
        let before_last = self.grounds.len().saturating_sub(1);
        self.grounds[..before_last].iter().position(|ground| ground.live == 0)
    }

    fn oldest(&self, ground: usize) -> Option<usize> {
        let offset = self.grounds[ground].offset;
        self.entries.iter().find(|entry| entry.ground == offset).map(|entry| entry.start)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
