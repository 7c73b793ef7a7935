//! The cluster key: what makes a host a member.
//!
//! Whoever holds the key can claim to be any node of the cluster [W-27]. Two keys are accepted
//! while it is being changed: give every node the new key as the newest one, and once all have it,
//! take the older one away.

use crate::seal::expand;
use aws_lc_rs::{digest, hkdf};
use std::fmt;
use thiserror::Error;
use zeroize::Zeroizing;

/// 32 secret bytes that all nodes of a cluster share. Wiped when dropped; `Debug` shows the
/// fingerprint only.
#[derive(Clone)]
pub struct ClusterKey {
    secret: Zeroizing<[u8; KEY_BYTES]>,
}

impl ClusterKey {
    /// A key made of 32 random bytes. They are used as they are: take them from the kernel.
    pub fn from_random(random: [u8; KEY_BYTES]) -> ClusterKey {
        ClusterKey { secret: Zeroizing::new(random) }
    }

    /// The key from the text of its file: one line `highwire-key-1` and 64 hexadecimal digits;
    /// empty lines and lines that begin with `#` are skipped.
    pub fn parse(text: &str) -> Result<ClusterKey, KeyError> {
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let line = lines.next().ok_or(KeyError::Empty)?;
        if lines.next().is_some() {
            return Err(KeyError::SeveralKeys);
        }
        let digits = match line.split_once(char::is_whitespace) {
            Some((PREFIX, digits)) => digits.trim_start(),
            None if line == PREFIX => "",
            _ => return Err(KeyError::WrongPrefix),
        };
        if let Some(position) = digits.chars().position(|digit| !digit.is_ascii_hexdigit()) {
            return Err(KeyError::NotHex { position });
        }
        if digits.len() != 2 * KEY_BYTES {
            return Err(KeyError::WrongLength { digits: digits.len() });
        }
        let mut secret = Zeroizing::new([0; KEY_BYTES]);
        for (byte, pair) in secret.iter_mut().zip(digits.as_bytes().chunks_exact(2)) {
            *byte = nibble(pair[0]) << 4 | nibble(pair[1]);
        }
        Ok(ClusterKey { secret })
    }

    /// The text for a file that [`ClusterKey::parse`] reads, with the fingerprint as a comment.
    pub fn to_text(&self) -> Zeroizing<String> {
        // Room for all of it, so that growing leaves no copy of the key behind.
        let mut text = Zeroizing::new(String::with_capacity(256));
        text.push_str("# A cluster key of Highwire: whoever can read this file is a member.\n");
        text.push_str(&format!("# fingerprint {}\n{PREFIX} ", self.fingerprint()));
        for byte in self.secret.iter() {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        text.push('\n');
        text
    }

    /// A short name of the key that can be shown and compared [W-4].
    pub fn fingerprint(&self) -> Fingerprint {
        let mut context = digest::Context::new(&digest::SHA256);
        context.update(FINGERPRINT_DOMAIN);
        context.update(self.secret.as_ref());
        let digest = context.finish();
        Fingerprint(std::array::from_fn(|index| digest.as_ref()[index]))
    }

    /// The pre-shared key of the Noise handshake [W-3].
    pub(crate) fn noise_psk(&self) -> Zeroizing<[u8; KEY_BYTES]> {
        let extracted = hkdf::Salt::new(hkdf::HKDF_SHA256, KEY_SALT).extract(self.secret.as_ref());
        Zeroizing::new(expand(&extracted, PSK_LABEL))
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ClusterKey({})", self.fingerprint())
    }
}

/// Eight bytes that tell keys apart and reveal nothing of them, shown as `ab12-cd34-ef56-7890`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(
    /// The bytes.
    pub [u8; 8],
);

impl fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, pair) in self.0.chunks_exact(2).enumerate() {
            let dash = if index == 0 { "" } else { "-" };
            write!(formatter, "{dash}{:02x}{:02x}", pair[0], pair[1])?;
        }
        Ok(())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Fingerprint({self})")
    }
}

/// Why a text is not a cluster key. No message repeats any of the text: it may be a secret.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum KeyError {
    /// Nothing but empty lines and comments.
    #[error("the key file has no key in it; make one with `highwire key new`")]
    Empty,
    /// More lines than one.
    #[error("the key file has more than one line that is not a comment; a second key goes into a file of its own")]
    SeveralKeys,
    /// Another kind of file.
    #[error("the key file does not begin with `{PREFIX}`, so it is not a cluster key")]
    WrongPrefix,
    /// Too few or too many digits.
    #[error("the key has {digits} hexadecimal digits, not {}", 2 * KEY_BYTES)]
    WrongLength {
        /// Digits found.
        digits: usize,
    },
    /// Something else among the digits.
    #[error("character {} of the key is not a hexadecimal digit", position + 1)]
    NotHex {
        /// Which character, from 0.
        position: usize,
    },
}

/// The keys that an endpoint accepts: one, two while the key is being changed, or none, which is
/// the insecure form.
#[derive(Clone, Debug)]
pub struct Keys {
    newest: Option<ClusterKey>,
    older: Option<ClusterKey>,
}

impl Keys {
    /// Accepts `key`.
    pub fn new(key: ClusterKey) -> Keys {
        Keys { newest: Some(key), older: None }
    }

    /// Accepts only peers that have no key either.
    pub fn insecure() -> Keys {
        Keys { newest: None, older: None }
    }

    /// Accepts `key` too.
    ///
    /// # Panics
    /// If there is no newer key: an endpoint that accepts plain packets as well as sealed ones
    /// would accept everybody.
    #[must_use]
    pub fn with_older(self, key: ClusterKey) -> Keys {
        assert!(self.newest.is_some(), "an older key is given beside a newer one");
        Keys { older: Some(key), ..self }
    }

    /// The key to connect with; none in the insecure form.
    pub fn newest(&self) -> Option<&ClusterKey> {
        self.newest.as_ref()
    }

    /// All accepted keys, the newest first.
    pub fn all(&self) -> impl Iterator<Item = &ClusterKey> {
        self.newest.iter().chain(self.older.iter())
    }

    /// Whether there is no key.
    pub fn is_insecure(&self) -> bool {
        self.newest.is_none()
    }
}

fn nibble(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        _ => digit - b'A' + 10,
    }
}

pub(crate) const KEY_BYTES: usize = 32;
const PREFIX: &str = "highwire-key-1";
const DIGITS: &[u8; 16] = b"0123456789abcdef";
const FINGERPRINT_DOMAIN: &[u8] = b"highwire key fingerprint 1";
const KEY_SALT: &[u8] = b"highwire cluster key 1";
const PSK_LABEL: &[u8] = b"highwire noise psk 1";

#[cfg(test)]
mod tests;
