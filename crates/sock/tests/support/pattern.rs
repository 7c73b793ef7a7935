//! Bytes that say where they belong: a reader that knows its position sees a byte that is lost, repeated or moved.

use super::seeded::{bytes, first_difference};
use std::sync::OnceLock;

/// The bytes of one direction, by position in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    start: u64,
}

impl Pattern {
    /// A different one for each number.
    pub fn new(number: u64) -> Pattern {
        Pattern { start: number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16 }
    }

    /// The bytes from `position` on, at most [`PIECE_MAX`].
    pub fn at(self, position: u64, count: usize) -> &'static [u8] {
        assert!(count <= PIECE_MAX);
        let from = ((self.start + position) % PERIOD as u64) as usize;
        &table()[from..from + count]
    }

    /// Where `found`, read from `position` on, first differs.
    pub fn first_wrong(self, position: u64, found: &[u8]) -> Option<u64> {
        let mut at = position;
        for piece in found.chunks(PIECE_MAX) {
            let expected = self.at(at, piece.len());
            if piece != expected {
                let wrong = piece.iter().zip(expected).position(|(found, expected)| found != expected);
                return wrong.map(|wrong| at + wrong as u64);
            }
            at += piece.len() as u64;
        }
        None
    }
}

/// Twice the period, so that no piece is cut in two.
fn table() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let once = bytes(1, PERIOD);
        assert_eq!(first_difference(1, &once), None);
        [once.clone(), once].concat()
    })
}

/// The longest piece that is given at once.
pub const PIECE_MAX: usize = PERIOD;
/// Prime, so that it is not a multiple of any size that somebody cuts by.
const PERIOD: usize = 65_521;
