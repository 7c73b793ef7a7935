//! What is sent: packets to one place that lie in memory one behind the other.

use std::net::SocketAddr;

/// Several packets to one place: each `segment` bytes long, the last may be shorter.
///
/// A burst without bytes has no packets. A `segment` of 0 in one that has bytes is the caller's
/// mistake, and panics when it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst<'a> {
    /// Where they go.
    pub to: SocketAddr,
    /// The packets, one behind the other.
    pub bytes: &'a [u8],
    /// Bytes of each packet but the last.
    pub segment: usize,
}

impl<'a> Burst<'a> {
    /// A burst of one packet.
    pub fn single(to: SocketAddr, bytes: &'a [u8]) -> Burst<'a> {
        Burst { to, bytes, segment: bytes.len() }
    }

    /// The packets, in order.
    pub fn packets(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        // `chunks` refuses 0, which is right only where there are no bytes.
        self.bytes.chunks(if self.bytes.is_empty() { 1 } else { self.segment })
    }

    /// How many packets.
    pub fn packet_count(&self) -> usize {
        self.packets().len()
    }

    /// Bytes of the largest packet.
    pub fn packet_bytes_max(&self) -> usize {
        self.segment.min(self.bytes.len())
    }
}
