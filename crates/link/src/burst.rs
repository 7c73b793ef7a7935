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

/// A burst whose packets do not lie in one piece: each is a head and a piece of the payload.
///
/// ```text
///  heads     | first head | head | head | ...          payload   | piece | piece  | piece  | ... |
///  packets     first head, piece · head, piece · head, piece ...   all of `segment` bytes but the last
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Woven<'a> {
    /// Where they go.
    pub to: SocketAddr,
    /// The heads, one behind the other.
    pub heads: &'a [u8],
    /// Bytes of the first head, not more than a packet's.
    pub first_head: usize,
    /// Bytes of each further head.
    pub head: usize,
    /// The pieces, one behind the other.
    pub payload: &'a [u8],
    /// Bytes of each packet but the last.
    pub segment: usize,
}

impl<'a> Woven<'a> {
    /// Head and piece of each packet, in order.
    pub fn packets(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        let (mut heads, mut payload) = (self.heads, self.payload);
        let (mut head, further, segment) = (self.first_head, self.head, self.segment);
        std::iter::from_fn(move || {
            let (this, rest) = heads.split_at_checked(head).filter(|(this, _)| !this.is_empty())?;
            let (piece, left) = payload.split_at(payload.len().min(segment.saturating_sub(head)));
            (heads, payload, head) = (rest, left, further);
            Some((this, piece))
        })
    }

    /// The same packets in one piece.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.heads.len() + self.payload.len());
        for (head, piece) in self.packets() {
            bytes.extend_from_slice(head);
            bytes.extend_from_slice(piece);
        }
        bytes
    }
}
