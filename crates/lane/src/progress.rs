//! How far the reader of a direction has come.

use crate::layout::UNIT;

/// Records consumed (the low half of their number), the place of the next in units, and the bytes taken of it: in one
/// word, so that whoever reads it sees one state and a reader that is torn away leaves one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) count: u32,
    pub(crate) at: usize,
    pub(crate) taken: usize,
}

const TAKEN_BITS: u32 = 16;

const _: () = assert!(crate::RECORD_MAX < 1 << TAKEN_BITS && crate::AREA_BYTES / UNIT < 1 << (32 - TAKEN_BITS));

impl Progress {
    #[inline(always)]
    pub(crate) fn of(word: u64) -> Progress {
        Progress {
            count: (word >> 32) as u32,
            at: (word as u32 >> TAKEN_BITS) as usize,
            taken: (word as usize) & ((1 << TAKEN_BITS) - 1),
        }
    }

    #[inline(always)]
    pub(crate) fn word(self) -> u64 {
        (u64::from(self.count) << 32) | ((self.at as u64) << TAKEN_BITS) | self.taken as u64
    }
}
