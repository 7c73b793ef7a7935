//! What becomes of each page: a word per page, changed by atomic operations alone, since a signal handler changes it too.
//!
//! ```text
//!            claim_arrival              arrived
//!   Away ────────────────▶ Arriving ──────────────▶ Clean ◀──────────────┐
//!    ▲ ▲                      │   └────────────────▶ Dirty ◀──┐           │ stayed
//!    │ └──── arrival_failed ──┘          (a write)   │ ▲ │    │ opened    │
//!    │                                               │ │ │  Opening ◀─────┤ claim_opening (the first write)
//!    │ left                    claim_leaving         │ │ │                │
//!    └────────────────────── Leaving ◀───────────────┴─┼─┴──── Clean ─────┘
//!                               └──────────────────────┘ stayed
//! ```
//!
//! Arriving, Opening and Leaving belong to the one thread that made the change; everybody else waits on the word. In Clean
//! the kernel tells of the first write, so a page never leaves Clean by a write that nobody noticed. In Leaving a page is
//! first protected and then copied, so that no write is lost between the copy and the end of the page.
//!
//! The generation counts how often the content at the page's home may have changed: whoever reads a page at its home without
//! claiming it looks afterwards whether it is still the same.

use super::store::PageError;
use super::sys;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where a page is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Away,
    Arriving,
    Clean,
    Dirty,
    Leaving,
    Opening,
}

/// Where the content is that a page has when it is not dirty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Nowhere: it was never written, and reads as zeros.
    Zeros,
    Store,
    Spill,
}

/// Why a page did not arrive, in the few bits that a word has for whoever waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Lost = 1,
    Unreachable = 2,
    Spill = 3,
    Kernel = 4,
}

impl Failure {
    pub(super) fn of(error: PageError) -> Failure {
        match error {
            PageError::Lost { .. } => Failure::Lost,
            PageError::Spill { .. } => Failure::Spill,
            PageError::Kernel { .. } => Failure::Kernel,
            _ => Failure::Unreachable,
        }
    }
}

/// A page's word as it was at some moment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    pub(super) fn phase(self) -> Phase {
        match self.0 & PHASE {
            0 => Phase::Away,
            1 => Phase::Arriving,
            2 => Phase::Clean,
            3 => Phase::Dirty,
            4 => Phase::Leaving,
            5 => Phase::Opening,
            other => unreachable!("no phase {other}"),
        }
    }

    pub(super) fn home(self) -> Home {
        match self.0 & HOME {
            0 => Home::Zeros,
            HOME_STORE => Home::Store,
            _ => Home::Spill,
        }
    }

    pub(super) fn is_resident(self) -> bool {
        matches!(self.phase(), Phase::Clean | Phase::Dirty)
    }

    pub(super) fn generation(self) -> u32 {
        (self.0 >> GENERATION_SHIFT) as u32
    }

    pub(super) fn failure(self) -> Option<Failure> {
        match (self.0 & FAILURE) >> FAILURE_SHIFT {
            1 => Some(Failure::Lost),
            2 => Some(Failure::Unreachable),
            3 => Some(Failure::Spill),
            4 => Some(Failure::Kernel),
            _ => None,
        }
    }

    fn pins(self) -> u64 {
        (self.0 & PINS) >> PINS_SHIFT
    }

    fn with_phase(self, phase: Phase) -> Word {
        Word(self.0 & !PHASE | phase as u64)
    }

    fn with_home(self, home: Home) -> Word {
        Word(self.0 & !HOME | (home as u64) << HOME_SHIFT)
    }

    fn without(self, bits: u64) -> Word {
        Word(self.0 & !bits)
    }

    fn with(self, bits: u64) -> Word {
        Word(self.0 | bits)
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:?} home {:?} pins {} generation {} bits {:#x}",
            self.phase(),
            self.home(),
            self.pins(),
            self.generation(),
            self.0 as u32
        )
    }
}

/// What the one who pushes pages out may do with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// It is Leaving now, and its home has the content.
    Clean,
    /// It is Leaving now, and its content is only here.
    Dirty,
    /// Used since its turn came last, or on its way: its turn comes again.
    Later,
    /// It may not leave for now.
    Pinned,
}

/// Whether a page that was used since its turn came last may stay once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mercy {
    SecondChance,
    None,
}

/// The words of all pages of a region.
#[derive(Debug)]
pub(super) struct Table {
    words: Box<[AtomicU64]>,
}

impl Table {
    pub(super) fn new(pages: u64) -> Table {
        Table { words: sys::zeroed_words(pages as usize) }
    }

    pub(super) fn pages(&self) -> u64 {
        self.words.len() as u64
    }

    pub(super) fn load(&self, page: u64) -> Word {
        Word(self.words[page as usize].load(Ordering::Acquire))
    }

    /// Changes a word as `change` says, unless it says none. Release and Acquire: what was done to a page before its phase
    /// changed has happened for whoever sees the new phase.
    fn update(&self, page: u64, change: impl Fn(Word) -> Option<Word>) -> Result<Word, Word> {
        let word = &self.words[page as usize];
        let change = |word| change(Word(word)).map(|word| word.0);
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).map(Word).map_err(Word)
    }

    /// As `update`, for the one to whom the page belongs; wakes those who wait for the page.
    fn finish(&self, page: u64, from: Phase, change: impl Fn(Word) -> Word) {
        let changed = self.update(page, |word| (word.phase() == from).then(|| change(word).without(WAITERS)));
        let before = changed.unwrap_or_else(|word| panic!("page {page} is not {from:?} but {word:?}"));
        if before.0 & WAITERS != 0 {
            sys::wake_low(&self.words[page as usize]);
        }
    }

    /// Away becomes Arriving: the caller brings it, from its home.
    pub(super) fn claim_arrival(&self, page: u64) -> Option<Home> {
        let claim =
            |word: Word| (word.phase() == Phase::Away).then(|| word.with_phase(Phase::Arriving).without(FAILURE));
        self.update(page, claim).ok().map(Word::home)
    }

    /// The page is mapped: dirty, if it can be written without a fault. `epoch` counts the turnovers of the whole budget; a
    /// page that was pushed out or read in this one or the last is wanted often, and gets a second chance next time.
    pub(super) fn arrived(&self, page: u64, dirty: bool, epoch: u64) {
        let phase = if dirty { Phase::Dirty } else { Phase::Clean };
        self.finish(page, Phase::Arriving, |word| {
            let recent = self.is_recent(word, epoch);
            let word = word.with_phase(phase).without(CHANCE);
            if recent { word.with(CHANCE) } else { word }
        });
    }

    /// True for a page that was pushed out, or read at its home, in this turnover of the budget or the last: it is worth
    /// bringing.
    pub(super) fn is_recent(&self, word: Word, epoch: u64) -> bool {
        let then = (word.0 & EPOCH) >> EPOCH_SHIFT;
        word.0 & SEEN != 0 && epoch.wrapping_sub(then) & (EPOCH >> EPOCH_SHIFT) <= 1
    }

    /// The page was read at its home, and stays away.
    pub(super) fn read_away(&self, page: u64, epoch: u64) {
        let note = |word: Word| {
            (word.phase() == Phase::Away).then(|| word.without(EPOCH).with(epoch << EPOCH_SHIFT & EPOCH | SEEN))
        };
        // If it is on its way by now, it is not forgotten.
        let _ = self.update(page, note);
    }

    /// The page could not be brought, and is where it was. Those who wait learn why.
    pub(super) fn arrival_failed(&self, page: u64, failure: Option<Failure>) {
        let bits = failure.map_or(0, |failure| (failure as u64) << FAILURE_SHIFT);
        self.finish(page, Phase::Arriving, |word| word.with_phase(Phase::Away).with(bits));
    }

    /// Clean becomes Opening: the caller lets it be written.
    pub(super) fn claim_opening(&self, page: u64) -> bool {
        let claim = |word: Word| (word.phase() == Phase::Clean).then(|| word.with_phase(Phase::Opening));
        self.update(page, claim).is_ok()
    }

    /// The page can be written, or (if the kernel refused) is still as it was.
    pub(super) fn opened(&self, page: u64, open: bool) {
        let phase = if open { Phase::Dirty } else { Phase::Clean };
        self.finish(page, Phase::Opening, |word| word.with_phase(phase).with(CHANCE));
    }

    /// The page's turn to leave has come.
    pub(super) fn claim_leaving(&self, page: u64, mercy: Mercy) -> Leave {
        self.claim_leaving_if(page, mercy, |_| true)
    }

    /// As `claim_leaving`, for pages only whose home has their content.
    pub(super) fn claim_leaving_clean(&self, page: u64, mercy: Mercy) -> bool {
        self.claim_leaving_if(page, mercy, |word| word.phase() == Phase::Clean) == Leave::Clean
    }

    fn claim_leaving_if(&self, page: u64, mercy: Mercy, wanted: impl Fn(Word) -> bool) -> Leave {
        let spared = |word: Word| mercy == Mercy::SecondChance && word.0 & CHANCE != 0;
        let claim = |word: Word| {
            if !word.is_resident() || word.pins() > 0 || !wanted(word) {
                None
            } else if spared(word) {
                Some(word.without(CHANCE))
            } else {
                Some(word.with_phase(Phase::Leaving))
            }
        };
        match self.update(page, claim) {
            Ok(before) if spared(before) => Leave::Later,
            Ok(before) if before.phase() == Phase::Clean => Leave::Clean,
            Ok(_) => Leave::Dirty,
            Err(word) if word.is_resident() && word.pins() > 0 => Leave::Pinned,
            Err(_) => Leave::Later,
        }
    }

    /// Dirty becomes Leaving, to be copied to its home and to stay. Says whether somebody has it pinned, who must be able to
    /// go on writing it.
    pub(super) fn claim_cleaning(&self, page: u64) -> Option<bool> {
        let claim = |word: Word| (word.phase() == Phase::Dirty).then(|| word.with_phase(Phase::Leaving));
        self.update(page, claim).ok().map(|before| before.pins() > 0)
    }

    /// The page is unmapped, and its content at `home`.
    pub(super) fn left(&self, page: u64, home: Home, epoch: u64) {
        self.finish(page, Phase::Leaving, |word| {
            let epoch = epoch << EPOCH_SHIFT & EPOCH;
            word.with_phase(Phase::Away).with_home(home).without(EPOCH).with(epoch | SEEN).next_generation()
        });
    }

    /// The page is still here: dirty, or with its content at `home`.
    pub(super) fn stayed(&self, page: u64, clean_at: Option<Home>) {
        self.finish(page, Phase::Leaving, |word| match clean_at {
            Some(home) => word.with_phase(Phase::Clean).with_home(home).next_generation(),
            // A store that failed may have kept some of it.
            None => word.with_phase(Phase::Dirty).next_generation(),
        });
    }

    /// Keeps a resident page from leaving until it is unpinned; marks it as used.
    pub(super) fn pin(&self, page: u64) -> Result<Word, Word> {
        let pin = |word: Word| {
            (word.is_resident() && word.pins() < PINS >> PINS_SHIFT).then(|| Word(word.0 + PIN).with(CHANCE))
        };
        self.update(page, pin)
    }

    pub(super) fn unpin(&self, page: u64) {
        let before = Word(self.words[page as usize].fetch_sub(PIN, Ordering::AcqRel));
        assert!(before.pins() > 0, "page {page} is not pinned");
    }

    /// Sleeps until the page may have changed, which is when its phase is not the one that was seen.
    pub(super) fn wait(&self, page: u64, seen: Word) {
        let word = &self.words[page as usize];
        let mark = |word: Word| (word.phase() == seen.phase()).then(|| word.with(WAITERS));
        if let Ok(before) = self.update(page, mark) {
            sys::wait_low(word, before.with(WAITERS).0);
        }
    }
}

impl Word {
    fn next_generation(self) -> Word {
        Word(self.0.wrapping_add(1 << GENERATION_SHIFT))
    }
}

const PHASE: u64 = 0b111;
const HOME_SHIFT: u32 = 3;
const HOME: u64 = 0b11 << HOME_SHIFT;
const HOME_STORE: u64 = 0b01 << HOME_SHIFT;
/// Somebody sleeps on the word.
const WAITERS: u64 = 1 << 5;
/// Used lately: its turn to leave passes once.
const CHANCE: u64 = 1 << 6;
/// It was here, or read at its home, and the epoch says when that was last.
const SEEN: u64 = 1 << 7;
const FAILURE_SHIFT: u32 = 8;
const FAILURE: u64 = 0b111 << FAILURE_SHIFT;
const PINS_SHIFT: u32 = 16;
const PINS: u64 = 0xff << PINS_SHIFT;
const PIN: u64 = 1 << PINS_SHIFT;
const EPOCH_SHIFT: u32 = 24;
const EPOCH: u64 = 0xff << EPOCH_SHIFT;
const GENERATION_SHIFT: u32 = 32;

#[cfg(test)]
mod tests;
