//! One hello, one welcome, and both ends have keys that nobody else has.
//!
//! ```text
//! initiator                                                  responder
//!   Initiator::new  ---- hello, 1200 bytes ------------>       respond
//!                        psk, e, {offer}                       (silent if it does not verify)
//!   handle_welcome  <--- welcome, 136 bytes ------------
//!                        e, ee, {offer}
//!   Established                                              Established
//! ```
//!
//! The pattern is `Noise_NNpsk0_25519_AESGCM_SHA256` [W-2]. The hello is encrypted and
//! authenticated by the cluster key alone, so it can be replayed: a responder that answers a
//! replayed hello holds a session in which nothing will ever verify. Memory is therefore given to
//! a session only after its first sealed packet [W-10].
//!
//! Nothing here keeps state between packets on the responder's side. A hello that is sent again
//! after a time-out is the same bytes, and a caller that sees them again should send the welcome
//! again that it sent before, not make another session [W-11].

use crate::entropy::Entropy;
use crate::header::{Header, HeaderFlags, Kind, Malformed, TAG_AT};
use crate::key::{ClusterKey, Fingerprint, KEY_BYTES, Keys};
use crate::noise::{self, NOISE_TAG_BYTES, PUBLIC_BYTES, Role};
use crate::seal::{Renewed, SECRET_BYTES, Sealing, Secret, checksum, expand};
use aws_lc_rs::hkdf;
use snow::HandshakeState;
use std::fmt;
use thiserror::Error;
use zeroize::{Zeroize, Zeroizing};

/// What one end tells the other when they meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The sender's own number for the session, not 0: packets to it carry this number.
    pub session: u32,
    /// The longest message that the sender takes.
    pub message_bytes_max: u32,
    /// After how many milliseconds of silence the sender gives the session up.
    pub death_ms: u32,
    /// Which life of the sender's process this is.
    pub incarnation: u64,
}

/// A session as both ends agreed on it.
#[derive(Debug)]
pub struct Established {
    /// The protection of its packets.
    pub sealing: Sealing,
    /// What the peer offered.
    pub peer: Offer,
    /// Which key was used; none without keys.
    pub fingerprint: Option<Fingerprint>,
    /// Whether this end called.
    pub calls: bool,
}

/// Why a hello or a welcome was not accepted.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum HandshakeError {
    /// It is not a packet, or one of another version.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// Another packet was expected.
    #[error("a packet of kind {kind:?} came in place of a {expected:?}")]
    WrongKind {
        /// The kind that was to come.
        expected: Kind,
        /// The kind that came.
        kind: Kind,
    },
    /// A hello or welcome is of one size only.
    #[error("a hello or welcome of {bytes} bytes is not one of {expected}")]
    WrongSize {
        /// Bytes that were to come.
        expected: usize,
        /// Bytes that came.
        bytes: usize,
    },
    /// The peer has no key, and we have.
    #[error("the peer has no cluster key; this end has one and accepts nothing plain")]
    PlainRefused,
    /// The peer has a key, and we have not.
    #[error("the peer has a cluster key; this end has none")]
    SealedRefused,
    /// The packet is for another session.
    #[error("the packet is for session {session}, not for {expected}")]
    WrongSession {
        /// The session that was to come.
        expected: u32,
        /// The session in the header.
        session: u32,
    },
    /// Something is set in the header that a hello or welcome does not have.
    #[error("the header of the hello or welcome has a field set that must be zero")]
    UnexpectedHeader,
    /// The padding is not zero.
    #[error("byte {at} of the hello is padding, and not zero")]
    PaddingNotZero {
        /// Where in the packet.
        at: usize,
    },
    /// None of our keys fits: the peer has another one, or the packet is forged or damaged.
    #[error("the packet was not made with a key that this end accepts, or was changed on its way")]
    NotAuthentic,
    /// The checksum of a plain packet is wrong.
    #[error("the checksum of the packet is wrong")]
    WrongChecksum,
    /// The welcome answers another hello.
    #[error("the welcome answers another hello")]
    WrongChallenge,
    /// The peer speaks another version of the offer.
    #[error("the peer's offer has version {version}, this end knows version {OFFER_VERSION}")]
    UnknownOffer {
        /// The peer's version.
        version: u8,
    },
    /// A byte of the offer that must be zero is not.
    #[error("a reserved byte of the peer's offer is not zero")]
    OfferReservedNotZero,
    /// Session 0 means no session.
    #[error("an offer has session 0, which means none")]
    SessionZero,
}

/// The connecting end, waiting for its welcome. It can wait through any number of wrong ones.
pub struct Initiator {
    offer: Offer,
    pending: Pending,
}

impl Initiator {
    /// Begins a handshake: gives the hello, [`HELLO_BYTES`] long, to be sent now and again after
    /// each time-out. Without a key both ends are insecure.
    pub fn new(
        key: Option<&ClusterKey>,
        offer: Offer,
        entropy: &mut dyn Entropy,
    ) -> Result<(Initiator, Vec<u8>), HandshakeError> {
        if offer.session == 0 {
            return Err(HandshakeError::SessionZero);
        }
        let mut random = Zeroizing::new([0; KEY_BYTES]);
        entropy.fill(random.as_mut());
        let (pending, hello) = match key {
            Some(key) => {
                let pending = SealedPending { psk: key.noise_psk(), ephemeral: random, fingerprint: key.fingerprint() };
                let (_, message) = pending.begin(&offer);
                (Pending::Sealed(Box::new(pending)), sealed_packet(Kind::Hello, 0, &message))
            }
            None => (Pending::Plain { challenge: *random }, plain_packet(Kind::Hello, 0, &random, &offer)),
        };
        Ok((Initiator { offer, pending }, hello))
    }

    /// The key that the handshake was begun with; none in the insecure form.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        match &self.pending {
            Pending::Sealed(pending) => Some(pending.fingerprint),
            Pending::Plain { .. } => None,
        }
    }

    /// Takes a welcome. A wrong one leaves the initiator as it was, so that a forger cannot end
    /// the handshake [W-9].
    pub fn handle_welcome(self, packet: &[u8]) -> Result<Established, (Initiator, HandshakeError)> {
        self.read_welcome(packet).map_err(|error| (self, error))
    }

    fn read_welcome(&self, packet: &[u8]) -> Result<Established, HandshakeError> {
        let sealed = matches!(self.pending, Pending::Sealed(_));
        let message = check_form(packet, Kind::Welcome, self.offer.session, sealed)?;
        match &self.pending {
            Pending::Sealed(pending) => {
                let (mut noise, _) = pending.begin(&self.offer);
                let mut offer = [0; OFFER_BYTES];
                noise.read_message(message, &mut offer).map_err(|_| HandshakeError::NotAuthentic)?;
                let peer = Offer::decode(&offer)?;
                let sealing = sealing_of(&mut noise, Role::Initiator);
                Ok(Established { sealing, peer, fingerprint: Some(pending.fingerprint), calls: true })
            }
            Pending::Plain { challenge } => {
                let (echo, peer) = read_plain(packet, message)?;
                if echo != *challenge {
                    return Err(HandshakeError::WrongChallenge);
                }
                Ok(Established { sealing: Sealing::checksummed(), peer, fingerprint: None, calls: true })
            }
        }
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Initiator").field("offer", &self.offer).finish_non_exhaustive()
    }
}

/// Takes a hello, and gives the session and the welcome to be sent, which is a ninth of the hello's
/// size. On an error the caller stays silent, so that nobody without the key learns that something
/// listens here [W-8].
pub fn respond(
    keys: &Keys,
    packet: &[u8],
    offer: Offer,
    entropy: &mut dyn Entropy,
) -> Result<(Established, Vec<u8>), HandshakeError> {
    if offer.session == 0 {
        return Err(HandshakeError::SessionZero);
    }
    let message = check_form(packet, Kind::Hello, 0, !keys.is_insecure())?;
    if keys.is_insecure() {
        let (challenge, peer) = read_plain(packet, message)?;
        let welcome = plain_packet(Kind::Welcome, peer.session, &challenge, &offer);
        return Ok((Established { sealing: Sealing::checksummed(), peer, fingerprint: None, calls: false }, welcome));
    }
    // One draw for whichever key fits: only one of the handshakes gets as far as using it.
    let mut ephemeral = Zeroizing::new([0; KEY_BYTES]);
    entropy.fill(ephemeral.as_mut());
    for key in keys.accepted() {
        let mut noise = noise::begin(Role::Responder, &key.noise_psk(), &prologue(), &ephemeral);
        let mut payload = [0; OFFER_BYTES];
        if noise.read_message(message, &mut payload).is_err() {
            continue;
        }
        let peer = Offer::decode(&payload)?;
        let mut answer = [0; NOISE_MESSAGE_BYTES];
        // What can fail here is the peer's public key, if it is one of the few of small order [W-26].
        noise.write_message(&offer.encode(), &mut answer).map_err(|_| HandshakeError::NotAuthentic)?;
        let welcome = sealed_packet(Kind::Welcome, peer.session, &answer);
        let sealing = sealing_of(&mut noise, Role::Responder);
        return Ok((Established { sealing, peer, fingerprint: Some(key.fingerprint()), calls: false }, welcome));
    }
    Err(HandshakeError::NotAuthentic)
}

/// Bytes of a hello. Answers are never longer, so a responder amplifies nothing [W-7].
pub const HELLO_BYTES: usize = 1200;

impl Offer {
    /// ```text
    /// 0  version u8 = 2 | 1 reserved [u8; 3] = 0 | 4 session u32 | 8 message_bytes_max u32
    /// 12 death_ms u32   | 16 incarnation u64
    /// ```
    fn encode(&self) -> [u8; OFFER_BYTES] {
        let mut bytes = [0; OFFER_BYTES];
        bytes[0] = OFFER_VERSION;
        bytes[4..8].copy_from_slice(&self.session.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.message_bytes_max.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.death_ms.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; OFFER_BYTES]) -> Result<Offer, HandshakeError> {
        if bytes[0] != OFFER_VERSION {
            return Err(HandshakeError::UnknownOffer { version: bytes[0] });
        }
        if bytes[1..4] != [0; 3] {
            return Err(HandshakeError::OfferReservedNotZero);
        }
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let offer = Offer {
            session: word(4),
            message_bytes_max: word(8),
            death_ms: word(12),
            incarnation: u64::from_le_bytes(std::array::from_fn(|index| bytes[16 + index])),
        };
        if offer.session == 0 { Err(HandshakeError::SessionZero) } else { Ok(offer) }
    }
}

enum Pending {
    Sealed(Box<SealedPending>),
    Plain { challenge: [u8; CHALLENGE_BYTES] },
}

/// What the Noise handshake is made from, rather than the handshake itself: reading a welcome
/// changes a handshake, and there is no way back from a welcome that is found wrong afterwards.
struct SealedPending {
    psk: Zeroizing<[u8; KEY_BYTES]>,
    ephemeral: Zeroizing<[u8; KEY_BYTES]>,
    fingerprint: Fingerprint,
}

impl SealedPending {
    /// The handshake after its first message, and that message: the same each time.
    fn begin(&self, offer: &Offer) -> (HandshakeState, [u8; NOISE_MESSAGE_BYTES]) {
        let mut noise = noise::begin(Role::Initiator, &self.psk, &prologue(), &self.ephemeral);
        let mut message = [0; NOISE_MESSAGE_BYTES];
        noise.write_message(&offer.encode(), &mut message).expect("the first message only needs room for an offer");
        (noise, message)
    }
}

/// The header of a hello or welcome: constants and a session number, so that the receiver can
/// compare all of it [W-6].
fn header_of(kind: Kind, session: u32, sealed: bool) -> Header {
    let mut header = Header::new(kind);
    header.session = session;
    if sealed {
        header.flags = HeaderFlags::SEALED;
    }
    let length = if sealed { NOISE_MESSAGE_BYTES } else { PLAIN_MESSAGE_BYTES };
    header.length = length as u16;
    header
}

fn packet_bytes(kind: Kind, header: &Header) -> usize {
    if kind == Kind::Hello { HELLO_BYTES } else { Header::BYTES + usize::from(header.length) }
}

fn packet_of(kind: Kind, session: u32, sealed: bool, message: &[u8]) -> Vec<u8> {
    let header = header_of(kind, session, sealed);
    let mut packet = vec![0; packet_bytes(kind, &header)];
    header.write(&mut packet);
    packet[Header::BYTES..][..message.len()].copy_from_slice(message);
    packet
}

fn sealed_packet(kind: Kind, session: u32, message: &[u8; NOISE_MESSAGE_BYTES]) -> Vec<u8> {
    packet_of(kind, session, true, message)
}

fn plain_packet(kind: Kind, session: u32, challenge: &[u8; CHALLENGE_BYTES], offer: &Offer) -> Vec<u8> {
    let mut packet = packet_of(kind, session, false, &[&challenge[..], &offer.encode()].concat());
    let tag = checksum(&packet[..TAG_AT], &packet[Header::BYTES..]);
    packet[TAG_AT..Header::BYTES].copy_from_slice(&tag);
    packet
}

/// Checks everything about a hello or welcome that needs no key; gives its message. Every byte
/// outside of the message is a constant, the session number, or a checksum.
fn check_form(packet: &[u8], kind: Kind, session: u32, sealed: bool) -> Result<&[u8], HandshakeError> {
    let header = Header::parse(packet)?;
    if header.kind != kind {
        return Err(HandshakeError::WrongKind { expected: kind, kind: header.kind });
    }
    match (sealed, header.flags.has(HeaderFlags::SEALED)) {
        (true, false) => return Err(HandshakeError::PlainRefused),
        (false, true) => return Err(HandshakeError::SealedRefused),
        _ => {}
    }
    if header.session != session {
        return Err(HandshakeError::WrongSession { expected: session, session: header.session });
    }
    let expected = header_of(kind, session, sealed);
    let expected_bytes = packet_bytes(kind, &expected);
    if packet.len() != expected_bytes {
        return Err(HandshakeError::WrongSize { expected: expected_bytes, bytes: packet.len() });
    }
    // In the sealed form the tag is not used, the message has one of its own.
    let tag_unused = packet[TAG_AT..Header::BYTES].iter().all(|byte| *byte == 0);
    if header != expected || (sealed && !tag_unused) {
        return Err(HandshakeError::UnexpectedHeader);
    }
    let (message, padding) = packet[Header::BYTES..].split_at(usize::from(header.length));
    if let Some(at) = padding.iter().position(|byte| *byte != 0) {
        return Err(HandshakeError::PaddingNotZero { at: Header::BYTES + message.len() + at });
    }
    Ok(message)
}

fn read_plain(packet: &[u8], message: &[u8]) -> Result<([u8; CHALLENGE_BYTES], Offer), HandshakeError> {
    if packet[TAG_AT..Header::BYTES] != checksum(&packet[..TAG_AT], &packet[Header::BYTES..]) {
        return Err(HandshakeError::WrongChecksum);
    }
    let message: &[u8; PLAIN_MESSAGE_BYTES] = message.try_into().expect("its length was checked with the header");
    let challenge = std::array::from_fn(|index| message[index]);
    let offer = Offer::decode(&std::array::from_fn(|index| message[CHALLENGE_BYTES + index]))?;
    Ok((challenge, offer))
}

/// A domain string and the hello's header as it is on the wire: the transcript of the handshake,
/// and with it every key, depends on them [W-5].
fn prologue() -> [u8; PROLOGUE_DOMAIN.len() + TAG_AT] {
    let mut header = [0; Header::BYTES];
    header_of(Kind::Hello, 0, true).write(&mut header);
    let mut prologue = [0; PROLOGUE_DOMAIN.len() + TAG_AT];
    let (domain, rest) = prologue.split_at_mut(PROLOGUE_DOMAIN.len());
    domain.copy_from_slice(PROLOGUE_DOMAIN);
    rest.copy_from_slice(&header[..TAG_AT]);
    prologue
}

/// The keys of both directions from a finished handshake.
fn sealing_of(noise: &mut HandshakeState, role: Role) -> Sealing {
    let Renewed { sending, receiving } = secrets_of(noise, role);
    Sealing::sealed(sending, receiving)
}

/// The secrets of both directions from a finished handshake [W-14].
pub(crate) fn secrets_of(noise: &mut HandshakeState, role: Role) -> Renewed {
    let (mut first, mut second) = noise.dangerously_get_raw_split();
    let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, noise.get_handshake_hash());
    let secret = |split: &[u8; SECRET_BYTES], label| Secret::new(expand(&salt.extract(split), label));
    let from_initiator = secret(&first, INITIATOR_LABEL);
    let from_responder = secret(&second, RESPONDER_LABEL);
    first.zeroize();
    second.zeroize();
    match role {
        Role::Initiator => Renewed { sending: from_initiator, receiving: from_responder },
        Role::Responder => Renewed { sending: from_responder, receiving: from_initiator },
    }
}

const OFFER_VERSION: u8 = 2;
const OFFER_BYTES: usize = 24;
/// As long as a public key, in whose place it stands in the plain form.
const CHALLENGE_BYTES: usize = PUBLIC_BYTES;
const NOISE_MESSAGE_BYTES: usize = PUBLIC_BYTES + OFFER_BYTES + NOISE_TAG_BYTES;
const PLAIN_MESSAGE_BYTES: usize = CHALLENGE_BYTES + OFFER_BYTES;
const PROLOGUE_DOMAIN: &[u8] = b"highwire hello 1";
const INITIATOR_LABEL: &[u8] = b"highwire initiator 1";
const RESPONDER_LABEL: &[u8] = b"highwire responder 1";

const _: () = assert!(Header::BYTES + NOISE_MESSAGE_BYTES <= HELLO_BYTES);

#[cfg(test)]
pub(crate) mod tests;
