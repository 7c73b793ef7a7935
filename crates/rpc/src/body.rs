//! Encoded arguments and results.

use std::ops::Deref;

/// The bytes of a result. Short ones cost no allocation.
#[derive(Clone)]
pub struct Body(Bytes);

#[derive(Clone)]
enum Bytes {
    Short(u8, Short),
    Long(Vec<u8>),
}

/// Aligned: what is moved in words of one size is waited for if it was written in words of another.
#[derive(Clone, Copy)]
#[repr(align(8))]
struct Short([u8; SHORT_BYTES]);

/// As many as leave the whole at 64 bytes.
const SHORT_BYTES: usize = 56;

impl Body {
    /// No bytes.
    pub const EMPTY: Body = Body(Bytes::Short(0, Short([0; SHORT_BYTES])));

    /// A copy of these.
    #[inline]
    pub fn new(bytes: &[u8]) -> Body {
        if bytes.len() > SHORT_BYTES {
            return Body(Bytes::Long(bytes.to_vec()));
        }
        let mut short = Short([0; SHORT_BYTES]);
        short.0[..bytes.len()].copy_from_slice(bytes);
        Body(Bytes::Short(bytes.len() as u8, short))
    }
}

impl Deref for Body {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Short(length, Short(bytes)) => &bytes[..usize::from(*length)],
            Bytes::Long(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Body({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_ones_hold_what_they_were_given() {
        for length in [0, 1, SHORT_BYTES, SHORT_BYTES + 1, 5000] {
            let bytes: Vec<u8> = (0..length).map(|at| at as u8).collect();
            assert_eq!(&*Body::new(&bytes), &bytes[..]);
        }
        assert!(Body::EMPTY.is_empty() && size_of::<Body>() <= 64);
    }
}
