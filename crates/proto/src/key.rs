//! The cluster key: what makes a host a member.
//!
//! Whoever holds the key can claim to be any node of the cluster [W-27]. A node calls with one key, and can
//! accept another one as well while the key is being changed. That takes three steps, each made on every node
//! before the next begins on any [W-61]:
//!
//! ```text
//!   call with  also accept      a node calls one that is          one step
//!   old        -                                                   behind: is its key accepted there?
//!   old        new              1  accept the new key              old: yes
//!   new        old              2  call with it                    new: yes, since step 1 is done everywhere
//!   new        -                3  drop the old one                new: yes
//! ```

use crate::entropy::Entropy;
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
    /// A new key.
    pub fn generate(entropy: &mut dyn Entropy) -> ClusterKey {
        let mut secret = Zeroizing::new([0; KEY_BYTES]);
        entropy.fill(secret.as_mut());
        ClusterKey { secret }
    }

    /// A key made of 32 random bytes. They are used as they are, and the caller's copy of them stays where it is:
    /// [`ClusterKey::generate`] leaves none.
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

/// The keys of an endpoint: the one to call with, and while the key is being changed another one that callers may
/// use as well. None at all is the insecure form.
#[derive(Clone, Debug)]
pub struct Keys {
    call_with: Option<ClusterKey>,
    also_accept: Option<ClusterKey>,
}

impl Keys {
    /// Calls with `key`, and accepts callers that use it.
    pub fn new(key: ClusterKey) -> Keys {
        Keys { call_with: Some(key), also_accept: None }
    }

    /// Accepts only peers that have no key either.
    pub fn insecure() -> Keys {
        Keys { call_with: None, also_accept: None }
    }

    /// Accepts callers that use `key`, too.
    ///
    /// # Panics
    /// If there is no key to call with: an endpoint that accepts plain packets as well as sealed ones would accept
    /// everybody.
    #[must_use]
    pub fn also_accepting(self, key: ClusterKey) -> Keys {
        assert!(self.call_with.is_some(), "a key is accepted beside the one to call with");
        Keys { also_accept: Some(key), ..self }
    }

    /// The key to call with; none in the insecure form.
    pub fn to_call_with(&self) -> Option<&ClusterKey> {
        self.call_with.as_ref()
    }

    /// All accepted keys, first the one to call with.
    pub fn accepted(&self) -> impl Iterator<Item = &ClusterKey> {
        self.call_with.iter().chain(self.also_accept.iter())
    }

    /// Whether a session that was established with this key, or without one, could be established now.
    pub fn accept(&self, fingerprint: Option<Fingerprint>) -> bool {
        match fingerprint {
            Some(fingerprint) => self.accepted().any(|key| key.fingerprint() == fingerprint),
            None => self.is_insecure(),
        }
    }

    /// Whether there is no key.
    pub fn is_insecure(&self) -> bool {
        self.call_with.is_none()
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
