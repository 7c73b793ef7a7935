//! Bytes in a peer's memory, read in place.

use crate::memory::{PeerMemory, View};
use std::fmt;

/// A payload where its sender put it. The sender may change it at any time, so there is no way to
/// borrow it as a slice: it is copied out, or read byte by byte, each read seeing whatever is there.
#[derive(Clone)]
pub struct PeerBytes {
    memory: PeerMemory,
}

impl PeerBytes {
    /// `len` bytes at `offset`, if they lie inside.
    pub fn new(memory: PeerMemory, offset: usize, len: usize) -> Option<PeerBytes> {
        let end = offset.checked_add(len)?;
        (end <= memory.len()).then(|| PeerBytes { memory: memory.part(offset, len) })
    }

    /// Turns to other bytes of the same mapping, which saves counting it anew. False, and nothing
    /// done, if `whole` is of another mapping or the bytes do not lie inside.
    #[inline]
    pub(crate) fn turn_to_view(&mut self, whole: &View, offset: usize, len: usize) -> bool {
        let inside = offset.checked_add(len).is_some_and(|end| end <= whole.len());
        inside && self.memory.turn_to(whole, offset, len)
    }

    /// Bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// True for an empty payload.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the bytes from `at` on; panics past the end.
    #[inline(always)]
    pub fn copy_to(&self, at: usize, into: &mut [u8]) {
        assert!(
            at <= self.len() && into.len() <= self.len() - at,
            "offset {at} + {} is outside a payload of {} bytes",
            into.len(),
            self.len()
        );
        self.memory.copy_out(at, into);
    }

    /// All of it, copied.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(0, &mut bytes);
        bytes
    }

    /// Byte `at` as it is now; panics past the end.
    #[inline]
    pub fn byte(&self, at: usize) -> u8 {
        assert!(at < self.len(), "offset {at} is outside a payload of {} bytes", self.len());
        let mut byte = [0];
        self.memory.copy_out(at, &mut byte);
        byte[0]
    }
}

impl fmt::Debug for PeerBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerBytes({} bytes)", self.len())
    }
}
