//! Noise's primitives from aws-lc-rs, for snow.
//!
//! Snow's own resolver would bring a second implementation of every primitive and draw randomness
//! by itself. Here there is one implementation, and the only random bytes of a handshake, the
//! ephemeral key, are given from outside: runs can be repeated from a seed.

use crate::key::KEY_BYTES;
use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{agreement, digest};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, Error, HandshakeState};
use zeroize::Zeroizing;

/// Which end of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Initiator,
    Responder,
}

/// A handshake in which nothing was said yet. `ephemeral` must be 32 fresh random bytes.
pub(crate) fn begin(
    role: Role,
    psk: &[u8; KEY_BYTES],
    prologue: &[u8],
    ephemeral: &Zeroizing<[u8; KEY_BYTES]>,
) -> HandshakeState {
    let resolver = Box::new(Primitives { ephemeral: ephemeral.clone() });
    let parameters = PATTERN.parse().expect("the pattern is one that snow knows");
    Builder::with_resolver(parameters, resolver)
        .psk(0, psk)
        .and_then(|builder| builder.prologue(prologue))
        .and_then(|builder| match role {
            Role::Initiator => builder.build_initiator(),
            Role::Responder => builder.build_responder(),
        })
        .expect("the pattern needs nothing but a psk and these primitives")
}

/// The handshake pattern [W-2].
pub(crate) const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// Bytes of an ephemeral public key, which begins each message of the handshake.
pub(crate) const PUBLIC_BYTES: usize = 32;
/// Bytes of the tag that ends each message of the handshake.
pub(crate) const NOISE_TAG_BYTES: usize = 16;

const HASH_BYTES: usize = 32;
const HASH_BLOCK_BYTES: usize = 64;

struct Primitives {
    ephemeral: Zeroizing<[u8; KEY_BYTES]>,
}

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(OneDraw(Some(self.ephemeral.clone()))))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        (*choice == DHChoice::Curve25519)
            .then(|| Box::new(X25519 { private: Zeroizing::new([0; KEY_BYTES]), public: [0; PUBLIC_BYTES] }) as _)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        (*choice == HashChoice::SHA256).then(|| Box::new(Sha256(digest::Context::new(&digest::SHA256))) as _)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        (*choice == CipherChoice::AESGCM).then(|| Box::new(AesGcm(aes_key(&[0; KEY_BYTES]))) as _)
    }
}

/// Hands the bytes out once: an ephemeral key that is used twice would be no ephemeral key.
struct OneDraw(Option<Zeroizing<[u8; KEY_BYTES]>>);

impl Random for OneDraw {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), Error> {
        match self.0.take() {
            Some(bytes) if bytes.len() == dest.len() => {
                dest.copy_from_slice(bytes.as_ref());
                Ok(())
            }
            _ => Err(Error::Rng),
        }
    }
}

struct X25519 {
    private: Zeroizing<[u8; KEY_BYTES]>,
    public: [u8; PUBLIC_BYTES],
}

impl X25519 {
    fn key(&self) -> agreement::PrivateKey {
        agreement::PrivateKey::from_private_key(&agreement::X25519, self.private.as_ref())
            .expect("any 32 bytes are a private key of X25519")
    }
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        PUBLIC_BYTES
    }

    fn priv_len(&self) -> usize {
        KEY_BYTES
    }

    fn set(&mut self, privkey: &[u8]) {
        self.private.copy_from_slice(privkey);
        let public = self.key().compute_public_key().expect("X25519 has a public key for every private one");
        self.public.copy_from_slice(public.as_ref());
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), Error> {
        let mut private = Zeroizing::new([0; KEY_BYTES]);
        rng.try_fill_bytes(private.as_mut())?;
        self.set(private.as_ref());
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        self.private.as_ref()
    }

    /// Fails on a public key of small order, whose result would not depend on our secret [W-26].
    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), Error> {
        // Snow hands over a buffer with room for larger curves.
        let theirs = agreement::UnparsedPublicKey::new(&agreement::X25519, &pubkey[..PUBLIC_BYTES]);
        agreement::agree(&self.key(), theirs, Error::Dh, |shared| {
            out[..PUBLIC_BYTES].copy_from_slice(shared);
            Ok(())
        })
    }
}

struct Sha256(digest::Context);

impl Hash for Sha256 {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        HASH_BLOCK_BYTES
    }

    fn hash_len(&self) -> usize {
        HASH_BYTES
    }

    fn reset(&mut self) {
        self.0 = digest::Context::new(&digest::SHA256);
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        let context = std::mem::replace(&mut self.0, digest::Context::new(&digest::SHA256));
        out[..HASH_BYTES].copy_from_slice(context.finish().as_ref());
    }
}

struct AesGcm(LessSafeKey);

impl Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; KEY_BYTES]) {
        self.0 = aes_key(key);
    }

    fn encrypt(&self, nonce: u64, authtext: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let (text, rest) = out.split_at_mut(plaintext.len());
        text.copy_from_slice(plaintext);
        let tag = self
            .0
            .seal_in_place_separate_tag(noise_nonce(nonce), Aad::from(authtext), text)
            .expect("AES-GCM seals anything as short as a handshake");
        rest[..NOISE_TAG_BYTES].copy_from_slice(tag.as_ref());
        plaintext.len() + NOISE_TAG_BYTES
    }

    fn decrypt(&self, nonce: u64, authtext: &[u8], ciphertext: &[u8], out: &mut [u8]) -> Result<usize, Error> {
        let (text, tag) = ciphertext.split_last_chunk::<NOISE_TAG_BYTES>().ok_or(Error::Decrypt)?;
        let out = out.get_mut(..text.len()).ok_or(Error::Decrypt)?;
        self.0
            .open_separate_gather(noise_nonce(nonce), Aad::from(authtext), text, tag, out)
            .map_err(|_| Error::Decrypt)?;
        Ok(text.len())
    }
}

fn aes_key(key: &[u8; KEY_BYTES]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("AES-256 takes 32 bytes"))
}

/// Noise's nonce for AES-GCM: 32 zero bits and the counter, most significant byte first.
fn noise_nonce(counter: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
pub(crate) mod tests;
