//! Putting together what a slot or a piece of the payload area is filled with.

use crate::descriptor::Payload;
use highwire_mem::CONTENT_BYTES;

/// Bytes of a span in a slot.
pub(crate) const SPAN_BYTES: usize = 16;

/// What stands before the control bytes of a slot.
pub(crate) struct Prefix {
    bytes: [u8; CONTENT_BYTES],
    len: usize,
}

impl Prefix {
    pub(crate) fn new() -> Prefix {
        Prefix { bytes: [0; CONTENT_BYTES], len: 0 }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[inline(always)]
pub(crate) fn span(region: u32, length: usize, offset: usize) -> [u8; SPAN_BYTES] {
    let mut bytes = [0; SPAN_BYTES];
    bytes[..4].copy_from_slice(&region.to_le_bytes());
    bytes[4..8].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[8..].copy_from_slice(&(offset as u64).to_le_bytes());
    bytes
}

pub(crate) fn for_each_segment(payload: &Payload, mut each: impl FnMut(&[u8])) {
    match payload {
        Payload::None | Payload::InPlace(_) => {}
        Payload::Buffer(buffer) => each(buffer),
        Payload::Segments(segments) => segments.iter().for_each(|segment| each(segment.bytes())),
    }
}

/// The bytes from `from` on, `length` of them, slice by slice.
#[inline]
pub(crate) fn slices(payload: &Payload, from: usize, length: usize, mut each: impl FnMut(&[u8])) {
    if let Payload::Buffer(buffer) = payload {
        return each(&buffer[from..from + length]);
    }
    let (mut skip, mut left) = (from, length);
    for_each_segment(payload, |bytes| {
        if left == 0 || skip >= bytes.len() {
            skip = skip.saturating_sub(bytes.len());
            return;
        }
        let take = left.min(bytes.len() - skip);
        each(&bytes[skip..skip + take]);
        left -= take;
        skip = 0;
    });
}
