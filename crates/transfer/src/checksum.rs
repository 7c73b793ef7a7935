//! The checksum of a file up to some byte.

use crc_fast::{CrcAlgorithm, Digest};
use std::fmt;

/// CRC-64/NVME of a file from its first byte to some later one.
///
/// It goes on from any value: what an earlier attempt left need not be read twice, and one pass over the
/// bytes checks each piece, its place and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Checksum(u64);

impl Checksum {
    /// Of no bytes.
    pub const EMPTY: Checksum = Checksum(0);

    /// The value that travels.
    pub fn value(self) -> u64 {
        self.0
    }

    pub(crate) fn from_value(value: u64) -> Checksum {
        Checksum(value)
    }

    /// Of everything before, and of these bytes behind it.
    #[must_use]
    pub fn then(self, bytes: &[u8]) -> Checksum {
        // The polynomial's initial state and final mask are all ones, so the mask undone is the state.
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, !self.0);
        digest.update(bytes);
        Checksum(digest.finalize())
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checksum({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_published_polynomial_however_the_bytes_are_cut() {
        // The check value of CRC-64/NVME.
        assert_eq!(Checksum::EMPTY.then(b"123456789").value(), 0xae8b_1486_0a79_9888);
        let bytes: Vec<u8> = (0..5000_u32).map(|at| (at * 31 % 251) as u8).collect();
        let whole = Checksum::EMPTY.then(&bytes);
        for cut in [0, 1, 7, 8, 63, 64, 255, 256, 4095, 4096, 5000] {
            let (head, tail) = bytes.split_at(cut);
            assert_eq!(Checksum::EMPTY.then(head).then(tail), whole, "cut at {cut}");
        }
    }
}
