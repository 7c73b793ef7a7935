//! Bytes that are known at every place of a stream, so that its reader can tell whether it got what was written.

use crate::BenchError;
use std::sync::OnceLock;

/// Writes what belongs at `place` of a stream.
pub(super) fn fill(into: &mut [u8], place: u64) {
    let mut done = 0;
    while done < into.len() {
        let piece = piece(place + done as u64, into.len() - done);
        into[done..done + piece.len()].copy_from_slice(piece);
        done += piece.len();
    }
}

/// Whether this is what belongs there.
pub(super) fn check(contestant: &'static str, bytes: &[u8], place: u64) -> Result<(), BenchError> {
    let mut done = 0;
    while done < bytes.len() {
        let expected = piece(place + done as u64, bytes.len() - done);
        let found = &bytes[done..done + expected.len()];
        if found != expected {
            let differs = found.iter().zip(expected).position(|(found, expected)| found != expected).unwrap_or(0);
            return Err(BenchError::Bytes { contestant, place: place + (done + differs) as u64 });
        }
        done += expected.len();
    }
    Ok(())
}

/// What belongs at `place`, as far as the period goes.
fn piece(place: u64, most: usize) -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = BYTES.get_or_init(|| {
        let byte = |place: u64| (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        (0..PERIOD).map(byte).collect()
    });
    let rest = &bytes[(place % PERIOD) as usize..];
    &rest[..most.min(rest.len())]
}

/// A prime: whatever is cut into pieces of a common size and put together wrongly is found.
const PERIOD: u64 = 65_521;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_filled_is_right_and_everything_else_is_found() {
        let mut bytes = vec![0; 200_000];
        fill(&mut bytes, 12_345);
        check("sock", &bytes, 12_345).unwrap();
        check("sock", &bytes[70_000..70_001], 82_345).unwrap();
        bytes[150_000] ^= 1;
        let found = check("sock", &bytes, 12_345).unwrap_err();
        assert!(matches!(found, BenchError::Bytes { place: 162_345, .. }), "{found}");
        // Pieces of a usual size in another order.
        for (place, other) in [(0, 65_536), (0, 32_768), (4096, 8192), (1 << 20, 0)] {
            fill(&mut bytes[..64], place);
            assert!(check("sock", &bytes[..64], other).is_err(), "{place} and {other}");
        }
    }
}
