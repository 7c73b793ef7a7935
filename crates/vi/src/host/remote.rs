//! Keys to memory that a peer has granted.

use highwire_mem::Tag;

/// Grants access to a region of the side that made it. It is worth nothing to anybody else: on one host
/// the region itself was handed over, and between hosts its owner's adapter knows on which VI it was
/// granted. The key only names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteKey {
    pub(crate) region: u32,
    pub(crate) tag: Tag,
    pub(crate) bytes: u64,
}

impl RemoteKey {
    /// Bytes of an encoded key.
    pub const BYTES: usize = 16;

    /// For the control bytes of a message.
    pub fn to_bytes(self) -> [u8; RemoteKey::BYTES] {
        let mut out = [0; RemoteKey::BYTES];
        out[..4].copy_from_slice(&self.region.to_le_bytes());
        out[4..8].copy_from_slice(&self.tag.0.to_le_bytes());
        out[8..].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    /// The key that was encoded, if the length is right.
    pub fn from_bytes(bytes: &[u8]) -> Option<RemoteKey> {
        let bytes: &[u8; RemoteKey::BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let length = u64::from(word(8)) | u64::from(word(12)) << 32;
        Some(RemoteKey { region: word(0), tag: Tag(word(4)), bytes: length })
    }

    /// Bytes of the region.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// True for a key to nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}
