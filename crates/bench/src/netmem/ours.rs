//! Our own memory of other nodes: `paged` and `paged-udp`.

use super::{Region, Side};
use crate::BenchError;
use crate::pair::Link;
use crate::transports::Contestant;

/// Why they cannot be measured here.
pub(super) fn missing() -> Option<String> {
    Some("it is not built yet".to_owned())
}

/// This process's end: [`Side::Reads`] in the driver, with a region that has what [`super::fill`] says;
/// [`Side::Donates`] in the peer.
pub(super) fn meet(contestant: Contestant, _link: &mut Link, _region: Region) -> Result<Side, BenchError> {
    Err(BenchError::Missing(format!("{contestant} is not built yet")))
}
