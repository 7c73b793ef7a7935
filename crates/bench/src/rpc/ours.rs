//! Our own remote procedure calls: `shm`, `udp` and `udp-sealed`.

use super::Side;
use crate::BenchError;
use crate::pair::Link;
use crate::transports::Contestant;

/// Why they cannot be measured here.
pub(super) fn missing() -> Option<String> {
    Some("it is not built yet".to_owned())
}

/// This process's end, for values up to `size_max`: [`Side::Calls`] in the driver, [`Side::Answers`] in the peer.
pub(super) fn meet(contestant: Contestant, _link: &mut Link, _size_max: usize) -> Result<Side, BenchError> {
    Err(BenchError::Missing(format!("{contestant} is not built yet")))
}
