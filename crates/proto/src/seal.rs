//! Sealing and opening packets, and changing keys without a stall.
//!
//! Each direction has a chain of secrets; a secret gives one AES-128-GCM key, one IV, and the next
//! secret. The nonce is the IV xor the packet number, and packet numbers never repeat or restart,
//! so no nonce is used twice [W-13]. The phase bit of a packet is the parity of its key's place in
//! the chain.
//!
//! ```text
//! sender                                        receiver
//!   key n  --- packets, phase n mod 2 ------->    previous n-1 | current n | next n+1
//!   `change_after` packets sealed, and                 |
//!   something under key n acknowledged                 |  a packet under next verifies:
//!   key n+1 -- packets, phase n+1 mod 2 ----->    previous n   | current n+1 | next n+2
//! ```
//!
//! The sender never gets two keys ahead of the receiver, since the acknowledgement of a packet
//! under key n shows that the receiver holds key n+1 [W-18].
//!
//! A fresh handshake begins new chains. The next key is then the first of the new chain rather than the next of the old
//! one, and packets say so by their epoch [W-104]:
//!
//! ```text
//! the end that asked                            the end that answered
//!   `renew`, with the answer at hand              `renew`, the answer on its way
//!   new key -- packets, epoch e+1 ----------->    a packet under the new chain verifies:
//!        <---------- packets, epoch e+1 -------   its own packets change too
//! ```

use crate::header::{EPOCH_AT, FLAGS_AT, Header, HeaderFlags, Malformed, TAG_AT, TAG_BYTES, word64};
use crate::replay::ReplayWindow;
use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::hkdf;
use std::fmt;
use std::time::Duration;
use thiserror::Error;
use zeroize::Zeroizing;

/// The protection of one session's packets, both ways.
pub struct Sealing {
    form: Form,
    /// The number sealed last: the next one must be higher.
    last_number: Option<u64>,
    forged: u64,
}

/// When a key is changed, in packets sealed with it.
///
/// The default follows the analysis of AES-GCM in RFC 9001, appendix B: with packets of up to
/// 2^16 bytes, 2^23 packets leave an attacker an advantage of at most 2^-57. A change costs some
/// microseconds, so it comes at half of that [W-23].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyLimits {
    /// The key is changed after this many packets, as soon as the change before it is acknowledged.
    pub change_after: u64,
    /// No more than this many packets are ever sealed with one key.
    pub end: u64,
}

impl Default for KeyLimits {
    fn default() -> KeyLimits {
        KeyLimits { change_after: 1 << 22, end: 1 << 23 }
    }
}

/// What a [`Sealing`] has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealingStats {
    /// Changes of the key that seals.
    pub sending_keys_changed: u64,
    /// Changes of the key that opens.
    pub receiving_keys_changed: u64,
    /// Packets that did not verify.
    pub forged: u64,
}

/// Why a packet was not sealed. It is as it was.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum SealError {
    /// What was given is not a packet.
    #[error("what is to be sealed is not a packet: {0}")]
    Malformed(#[from] Malformed),
    /// The packet number is not above the last one. A nonce used twice would give the key away.
    #[error("packet number {number} is not above {last}, the last one sealed")]
    NumberUsed {
        /// The number in the header.
        number: u64,
        /// The last number sealed.
        last: u64,
    },
    /// The key is used up, and the peer has not acknowledged the last change.
    #[error("{sealed} packets were sealed with one key, and the peer acknowledged none of them")]
    KeyExhausted {
        /// Packets sealed with the key.
        sealed: u64,
    },
}

/// Why a packet was not opened.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum OpenError {
    /// The tag does not fit the packet: forged, damaged, or from another session.
    #[error("packet {number} does not verify")]
    Forged {
        /// The number in the header, which may be false.
        number: u64,
    },
    /// A packet without protection in a session that has it.
    #[error("packet {number} is plain, and the session is sealed")]
    Plain {
        /// The number in the header, which may be false.
        number: u64,
    },
    /// A sealed packet in a session without keys.
    #[error("packet {number} is sealed, and the session has no key")]
    Sealed {
        /// The number in the header, which may be false.
        number: u64,
    },
    /// A packet from before the last change of keys, so late that its key is gone.
    #[error("packet {number} comes after its key was dropped")]
    TooLate {
        /// The number in the header, which may be false.
        number: u64,
    },
    /// The packet is not as long as its header says.
    #[error("a header of {} bytes and a payload of {length} do not make a packet of {bytes}", Header::BYTES)]
    WrongLength {
        /// Payload bytes announced.
        length: u16,
        /// Bytes of the packet.
        bytes: usize,
    },
    /// The caller's space is not as long as the payload.
    #[error("a payload of {length} bytes does not fit exactly into {space}")]
    WrongSpace {
        /// Payload bytes announced.
        length: u16,
        /// Bytes of the space.
        space: usize,
    },
}

impl Sealing {
    /// No keys: a CRC32C finds accidents and keeps nobody out.
    pub fn checksummed() -> Sealing {
        Sealing { form: Form::Checksummed, last_number: None, forged: 0 }
    }

    /// Keys from the two secrets of a handshake.
    pub(crate) fn sealed(sending: Secret, receiving: Secret) -> Sealing {
        let directions = Directions { sender: Sender::new(sending), receiver: Receiver::new(receiving) };
        Sealing { form: Form::Sealed(Box::new(directions)), last_number: None, forged: 0 }
    }

    /// Whether packets are encrypted and authenticated.
    pub fn is_sealed(&self) -> bool {
        matches!(self.form, Form::Sealed(_))
    }

    /// Seals `packet`, a header as [`Header::write`] leaves it and a plain payload, in place:
    /// encrypts the payload, sets the PHASE and SEALED flags, fills in the tag.
    ///
    /// Packet numbers must rise from call to call, in the checksummed form too; gaps are allowed.
    pub fn seal(&mut self, packet: &mut [u8]) -> Result<(), SealError> {
        let number = self.check(packet, 0)?;
        let (mut head, payload) = split(packet);
        match &mut self.form {
            Form::Checksummed => head.checksum(payload),
            Form::Sealed(directions) => {
                let sender = &mut directions.sender;
                let phase = sender.prepare(number)?;
                head.mark(phase, sender.epoch);
                let (nonce, aad) = (sender.key.nonce(number), Aad::from(&*head.authenticated));
                sender
                    .key
                    .key
                    .seal_in_place_scatter(nonce, aad, payload, &[], head.tag)
                    .expect("AES-GCM seals anything as short as a packet");
            }
        }
        self.last_number = Some(number);
        Ok(())
    }

    /// The same for a `payload` that lies elsewhere: what is written behind the header in `packet`
    /// is its sealed form, so that the encryption is the only copy.
    pub fn seal_from(&mut self, packet: &mut [u8], payload: &[u8]) -> Result<(), SealError> {
        let number = self.check(packet, 0)?;
        let (mut head, room) = split(packet);
        if room.len() != payload.len() {
            let (length, bytes) = (room.len() as u16, Header::BYTES + payload.len());
            return Err(Malformed::WrongLength { length, bytes }.into());
        }
        match &mut self.form {
            Form::Checksummed => {
                room.copy_from_slice(payload);
                head.checksum(room);
            }
            Form::Sealed(directions) => {
                let sender = &mut directions.sender;
                let phase = sender.prepare(number)?;
                head.mark(phase, sender.epoch);
                let (nonce, aad) = (sender.key.nonce(number), Aad::from(&*head.authenticated));
                sender
                    .key
                    .key
                    .seal_out_of_place_scatter(nonce, aad, payload, room, &[], head.tag)
                    .expect("AES-GCM seals anything as short as a packet");
            }
        }
        self.last_number = Some(number);
        Ok(())
    }

    /// The checksum for a packet whose payload stays where it is: `head` is its header as [`Header::write`]
    /// leaves it and the beginning of its payload, `rest` the rest of that. Only where nothing is encrypted.
    pub(crate) fn checksum_apart(&mut self, head: &mut [u8], rest: &[u8]) -> Result<(), SealError> {
        debug_assert!(!self.is_sealed(), "what is encrypted is copied");
        let number = self.check(head, rest.len())?;
        let (head, begin) = split(head);
        head.checksum_parts(begin, rest);
        self.last_number = Some(number);
        Ok(())
    }

    /// Verifies `packet`, whose parsed header is `header`, and writes its payload to `into`, which
    /// is exactly as long: the decryption is the only copy.
    ///
    /// When a sealed packet does not verify, the bytes of `into` are **unspecified**: AES-GCM
    /// decrypts while it verifies [W-25]. So `into` must not hold anything received before; for a packet
    /// that is not surely new there is [`Sealing::open_in_place`].
    pub fn open(&mut self, header: &Header, packet: &[u8], into: &mut [u8]) -> Result<(), OpenError> {
        let Some((head, rest)) = packet.split_at_checked(TAG_AT) else { return Err(wrong_length(header, packet)) };
        let Some((tag, payload)) = rest.split_at_checked(TAG_BYTES) else { return Err(wrong_length(header, packet)) };
        if payload.len() != usize::from(header.length) {
            return Err(wrong_length(header, packet));
        }
        if into.len() != payload.len() {
            return Err(OpenError::WrongSpace { length: header.length, space: into.len() });
        }
        self.open_with(header, head, tag, Payload::Apart { payload, into })
    }

    /// Verifies `packet` alone, in a session without keys: the payload is plain where it lies.
    pub(crate) fn verify_plain(&mut self, header: &Header, packet: &[u8]) -> Result<(), OpenError> {
        debug_assert!(!self.is_sealed(), "what is encrypted is opened");
        if packet.len() != Header::BYTES + usize::from(header.length) {
            return Err(wrong_length(header, packet));
        }
        let (head, payload) = packet.split_at(Header::BYTES);
        self.open_with(header, &head[..TAG_AT], &head[TAG_AT..], Payload::Stays(payload))
    }

    /// The same for a packet in two pieces, where nothing is encrypted: `head` is its header and what follows that.
    pub(crate) fn verify_apart(&self, header: &Header, head: &[u8], rest: &[u8]) -> bool {
        let (fixed, begin) = head.split_at(Header::BYTES);
        let sum = || checksum_tag(crc32c([&fixed[..TAG_AT], begin, rest]));
        !self.is_sealed() && !says_sealed(header) && fixed[TAG_AT..] == sum()
    }

    /// The same within the packet's own buffer: afterwards the payload is `packet[64..]`. When the
    /// packet does not verify, its payload is unspecified.
    pub fn open_in_place(&mut self, header: &Header, packet: &mut [u8]) -> Result<(), OpenError> {
        if packet.len() != Header::BYTES + usize::from(header.length) {
            return Err(wrong_length(header, packet));
        }
        let (head, payload) = split(packet);
        self.open_with(header, head.authenticated, head.tag, Payload::InPlace(payload))
    }

    /// Tells that the peer has received the packet with the number `below - 1`, and said so in a
    /// packet that verified. An acknowledgement of all packets below a number says that; so does
    /// the upper end of a range.
    ///
    /// Without this a key is changed once and then never again, and ends at [`KeyLimits::end`].
    pub fn handle_acknowledged(&mut self, below: u64) {
        let Form::Sealed(directions) = &mut self.form else { return };
        let sender = &mut directions.sender;
        // A number that was never sent proves nothing.
        let sent = self.last_number.is_some_and(|last| below <= last.saturating_add(1));
        if sent && sender.first_number.is_some_and(|first| below > first) {
            sender.may_change = true;
        }
    }

    /// How many packets will still be sealed with the present key before it is changed, given that
    /// the last change is acknowledged by then; 0 if the change is due. None without keys.
    pub fn packets_until_key_change(&self) -> Option<u64> {
        let Form::Sealed(directions) = &self.form else { return None };
        Some(directions.sender.change_at.saturating_sub(directions.sender.sealed))
    }

    /// [`KEY_TICK`] has passed: keys are changed by time as well as by packets [W-100].
    pub fn tick(&mut self) {
        if let Form::Sealed(directions) = &mut self.form {
            directions.sender.tick();
            directions.receiver.tick();
        }
    }

    /// Takes the keys of a fresh handshake [W-103]. `known` says that the peer has them already, so that the next packet
    /// is sealed with them, if the peer has acknowledged the last change; otherwise the first packet of the peer's that is
    /// shows it.
    pub(crate) fn renew(&mut self, keys: Renewed, known: bool) {
        if let Form::Sealed(directions) = &mut self.form {
            let Renewed { sending, receiving } = keys;
            directions.sender.renew(sending, known);
            let mut chain = Chain { secret: receiving };
            directions.receiver.fresh = Some((chain.advance(), chain));
        }
    }

    /// Whether keys of a fresh handshake wait for the peer's first packet under them.
    pub(crate) fn is_renewing(&self) -> bool {
        matches!(&self.form, Form::Sealed(directions) if directions.receiver.fresh.is_some())
    }

    /// Of what is sealed and of what is opened.
    #[cfg(test)]
    pub(crate) fn epochs(&self) -> (u8, u8) {
        match &self.form {
            Form::Checksummed => (0, 0),
            Form::Sealed(directions) => (directions.sender.epoch, directions.receiver.epoch),
        }
    }

    /// Sets when keys are changed.
    ///
    /// # Panics
    /// If `change_after` is 0 or not below `end`: there would be no room for the acknowledgement.
    pub fn set_limits(&mut self, limits: KeyLimits) {
        assert!(
            0 < limits.change_after && limits.change_after < limits.end,
            "a key changes after {} packets, which is not between 0 and its end after {}",
            limits.change_after,
            limits.end
        );
        if let Form::Sealed(directions) = &mut self.form {
            (directions.sender.limits, directions.sender.change_at) = (limits, limits.change_after);
        }
    }

    /// What was counted so far.
    pub fn stats(&self) -> SealingStats {
        let (sending, receiving) = match &self.form {
            Form::Checksummed => (0, 0),
            Form::Sealed(directions) => (directions.sender.place, directions.receiver.place),
        };
        SealingStats { sending_keys_changed: sending, receiving_keys_changed: receiving, forged: self.forged }
    }

    /// What holds for every packet that is to be sealed, of which `apart` bytes lie elsewhere; its number.
    fn check(&self, packet: &[u8], apart: usize) -> Result<u64, SealError> {
        let bytes = packet.len() + apart;
        let fixed: &[u8; Header::BYTES] = packet.first_chunk().ok_or(Malformed::TooShort { bytes })?;
        let length = u16::from_le_bytes([fixed[28], fixed[29]]);
        if Header::BYTES + usize::from(length) != bytes {
            return Err(Malformed::WrongLength { length, bytes }.into());
        }
        let number = word64(fixed, 8);
        match self.last_number {
            // [W-13]
            Some(last) if number <= last => Err(SealError::NumberUsed { number, last }),
            _ => Ok(number),
        }
    }

    fn open_with(&mut self, header: &Header, head: &[u8], tag: &[u8], payload: Payload<'_>) -> Result<(), OpenError> {
        let number = header.number;
        let sealed = header.flags.has(HeaderFlags::SEALED);
        let result = match &mut self.form {
            Form::Checksummed if says_sealed(header) => Err(OpenError::Sealed { number }),
            Form::Checksummed => match checksum(head, payload.bytes()) == tag {
                true => {
                    payload.copy();
                    Ok(())
                }
                false => Err(OpenError::Forged { number }),
            },
            // Not even a checksum is looked at: otherwise anybody could speak [W-22].
            Form::Sealed(_) if !sealed => Err(OpenError::Plain { number }),
            Form::Sealed(directions) => {
                let opened = directions.receiver.open(header, head, tag, payload);
                if directions.receiver.epoch != directions.sender.epoch {
                    directions.sender.peer_has_fresh();
                }
                opened
            }
        };
        self.forged += u64::from(matches!(result, Err(OpenError::Forged { .. })));
        result
    }
}

impl fmt::Debug for Sealing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Sealing")
            .field("is_sealed", &self.is_sealed())
            .field("last_number", &self.last_number)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

/// What only sealed packets say. A checksum covers it, but keeps nobody from saying it.
fn says_sealed(header: &Header) -> bool {
    header.flags.has(HeaderFlags::SEALED) || header.epoch != 0
}

/// The secrets of both directions from a fresh handshake.
pub(crate) struct Renewed {
    pub(crate) sending: Secret,
    pub(crate) receiving: Secret,
}

/// The secret of one direction at one place of its chain.
pub(crate) type Secret = Zeroizing<[u8; SECRET_BYTES]>;

/// HKDF-Expand with a label.
pub(crate) fn expand<const BYTES: usize>(from: &hkdf::Prk, label: &[u8]) -> [u8; BYTES] {
    let mut out = [0; BYTES];
    from.expand(&[label], Length(BYTES))
        .and_then(|material| material.fill(&mut out))
        .expect("a few dozen bytes are within HKDF's limit");
    out
}

/// The checksum that stands in for a tag: CRC32C of the header without its tag, and of all that
/// follows the tag [W-21].
pub(crate) fn checksum(head: &[u8], rest: &[u8]) -> [u8; TAG_BYTES] {
    checksum_tag(crc32c([head, rest, &[]]))
}

fn checksum_tag(sum: u32) -> [u8; TAG_BYTES] {
    let mut tag = [0; TAG_BYTES];
    tag[..4].copy_from_slice(&sum.to_le_bytes());
    tag
}

/// The checksum of all parts, one behind the other, by the widest instructions that the machine has: for
/// what is long that is twice as fast as its CRC instruction alone.
fn crc32c(parts: [&[u8]; 3]) -> u32 {
    let bytes = parts.iter().map(|part| part.len()).sum::<usize>();
    if bytes <= SHORT_BYTES {
        // Put together they are one call, which costs more than so few bytes.
        let mut short = Short([0; SHORT_BYTES]);
        let mut at = 0;
        for part in parts {
            match part.first_chunk::<TAG_AT>() {
                // All of a head: that its length is known makes it a few instructions.
                Some(head) if part.len() == TAG_AT => short.0[at..at + TAG_AT].copy_from_slice(head),
                _ if part.is_empty() => {}
                _ => short.0[at..at + part.len()].copy_from_slice(part),
            }
            at += part.len();
        }
        return crc_fast::crc32_iscsi(&short.0[..bytes]);
    }
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        if !part.is_empty() {
            digest.update(part);
        }
    }
    digest.finalize() as u32
}

/// Aligned as the CRC instruction likes it.
#[repr(align(8))]
struct Short([u8; SHORT_BYTES]);

/// How often [`Sealing::tick`] is to be called.
pub const KEY_TICK: Duration = Duration::from_secs(30);
/// A key that is used is changed after so many.
const KEY_TICKS: u32 = 4;
/// And the one before is dropped after so many.
const PREVIOUS_TICKS: u32 = 2;
pub(crate) const SECRET_BYTES: usize = 32;
/// Head and payload that are checksummed in one call, together.
const SHORT_BYTES: usize = 128;
const NEXT_LABEL: &[u8] = b"highwire next 1";
const KEY_LABEL: &[u8] = b"highwire key 1";
const IV_LABEL: &[u8] = b"highwire iv 1";
const AES_KEY_BYTES: usize = 16;

enum Form {
    Checksummed,
    Sealed(Box<Directions>),
}

struct Directions {
    sender: Sender,
    receiver: Receiver,
}

struct Sender {
    key: PacketKey,
    chain: Chain,
    /// How many keys came before.
    place: u64,
    /// Packets sealed with the key.
    sealed: u64,
    /// The first number sealed with the key.
    first_number: Option<u64>,
    /// Whether the receiver is known to hold the next key.
    may_change: bool,
    limits: KeyLimits,
    /// The key is changed when it has sealed so many packets.
    change_at: u64,
    /// Ticks since it is used.
    ticks: u32,
    /// Handshakes since the first, modulo 256.
    epoch: u8,
    /// Of a fresh handshake, and whether the receiver is known to have it.
    fresh: Option<(Chain, bool)>,
}

impl Sender {
    fn new(secret: Secret) -> Sender {
        let mut chain = Chain { secret };
        let key = chain.advance();
        // The receiver holds the first two keys from the start.
        let limits = KeyLimits::default();
        Sender {
            key,
            chain,
            place: 0,
            sealed: 0,
            first_number: None,
            may_change: true,
            limits,
            change_at: limits.change_after,
            ticks: 0,
            epoch: 0,
            fresh: None,
        }
    }

    fn renew(&mut self, secret: Secret, known: bool) {
        self.fresh = Some((Chain { secret }, known));
    }

    fn peer_has_fresh(&mut self) {
        if let Some((_, known)) = &mut self.fresh {
            *known = true;
        }
    }

    fn tick(&mut self) {
        self.ticks += 1;
        // One that has sealed nothing is as good as new.
        if self.ticks >= KEY_TICKS && self.sealed > 0 {
            self.change_at = self.change_at.min(self.sealed);
        }
    }

    /// Makes the key ready for one more packet and counts it; tells the packet's phase.
    fn prepare(&mut self, number: u64) -> Result<bool, SealError> {
        let fresh = matches!(self.fresh, Some((_, true)));
        if (fresh || self.sealed >= self.change_at) && self.may_change {
            if fresh && let Some((chain, _)) = self.fresh.take() {
                (self.chain, self.epoch) = (chain, self.epoch.wrapping_add(1));
            }
            self.key = self.chain.advance();
            self.place += 1;
            (self.sealed, self.change_at, self.ticks) = (0, self.limits.change_after, 0);
            self.first_number = None;
            self.may_change = false;
        }
        if self.sealed >= self.limits.end {
            return Err(SealError::KeyExhausted { sealed: self.sealed });
        }
        self.sealed += 1;
        self.first_number.get_or_insert(number);
        Ok(is_odd(self.place))
    }
}

struct Receiver {
    previous: Option<PacketKey>,
    /// Ticks since it is the previous one.
    previous_ticks: u32,
    current: PacketKey,
    next: PacketKey,
    chain: Chain,
    /// How many keys came before `current`.
    place: u64,
    /// The lowest number that `current` has opened: what is lower and has the other phase or epoch is
    /// older, what is higher and has another one is newer [W-19].
    lowest: Option<u64>,
    /// Handshakes since the first, modulo 256.
    epoch: u8,
    /// The first key of a fresh handshake, until a packet comes that is sealed by it, and what follows it.
    fresh: Option<(PacketKey, Chain)>,
}

impl Receiver {
    fn new(secret: Secret) -> Receiver {
        let mut chain = Chain { secret };
        let (current, next) = (chain.advance(), chain.advance());
        let (previous, fresh) = (None, None);
        Receiver { previous, previous_ticks: 0, current, next, chain, place: 0, lowest: None, epoch: 0, fresh }
    }

    /// What was sealed with the previous key and has not come for so long was lost.
    fn tick(&mut self) {
        self.previous_ticks += 1;
        if self.previous_ticks >= PREVIOUS_TICKS {
            self.previous = None;
        }
    }

    fn open(&mut self, header: &Header, head: &[u8], tag: &[u8], payload: Payload<'_>) -> Result<(), OpenError> {
        let number = header.number;
        let forged = Err(OpenError::Forged { number });
        let phase_is_present = header.flags.has(HeaderFlags::PHASE) == is_odd(self.place);
        if header.epoch == self.epoch && phase_is_present {
            if !self.current.open(number, head, tag, payload) {
                return forged;
            }
            let lowest = self.lowest.map_or(number, |lowest| lowest.min(number));
            self.lowest = Some(lowest);
            // What is still on its way from before is now beyond the replay window, so its key
            // serves nobody but a thief [W-20].
            if number - lowest >= ReplayWindow::WIDTH {
                self.previous = None;
            }
        } else if self.lowest.is_some_and(|lowest| number < lowest) {
            match &self.previous {
                None => return Err(OpenError::TooLate { number }),
                Some(previous) if !previous.open(number, head, tag, payload) => return forged,
                Some(_) => {}
            }
        } else {
            // A flipped bit alone moves nothing: the packet has to verify first [W-17].
            let current = if header.epoch == self.epoch {
                if !self.next.open(number, head, tag, payload) {
                    return forged;
                }
                let following = self.chain.advance();
                std::mem::replace(&mut self.next, following)
            } else {
                let is_next = header.epoch == self.epoch.wrapping_add(1) && !phase_is_present;
                let verified = |(key, _): &mut (PacketKey, Chain)| is_next && key.open(number, head, tag, payload);
                let Some((key, chain)) = self.fresh.take_if(verified) else { return forged };
                (self.chain, self.epoch) = (chain, header.epoch);
                self.next = self.chain.advance();
                key
            };
            (self.previous, self.previous_ticks) = (Some(std::mem::replace(&mut self.current, current)), 0);
            self.place += 1;
            self.lowest = Some(number);
        }
        Ok(())
    }
}

/// A direction's secrets, one after the other. Only the next one is kept: what was sealed before
/// stays secret from whoever reads this memory now, once its keys are dropped [W-16].
struct Chain {
    secret: Secret,
}

impl Chain {
    /// The key of the present secret; the chain moves on to the next [W-15].
    fn advance(&mut self) -> PacketKey {
        let secret = hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, self.secret.as_ref());
        let key: Zeroizing<[u8; AES_KEY_BYTES]> = Zeroizing::new(expand(&secret, KEY_LABEL));
        let key = UnboundKey::new(&AES_128_GCM, key.as_ref()).expect("AES-128 takes 16 bytes");
        let packet_key = PacketKey { key: LessSafeKey::new(key), iv: expand(&secret, IV_LABEL) };
        self.secret = Zeroizing::new(expand(&secret, NEXT_LABEL));
        packet_key
    }
}

struct PacketKey {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
}

impl PacketKey {
    /// The IV xor the packet number, whose most significant byte comes first [W-12].
    fn nonce(&self, number: u64) -> Nonce {
        let mut nonce = self.iv;
        for (byte, part) in nonce[NONCE_LEN - 8..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= part;
        }
        Nonce::assume_unique_for_key(nonce)
    }

    fn open(&self, number: u64, head: &[u8], tag: &[u8], payload: Payload<'_>) -> bool {
        let (nonce, aad) = (self.nonce(number), Aad::from(head));
        match payload {
            Payload::Apart { payload, into } => self.key.open_separate_gather(nonce, aad, payload, tag, into).is_ok(),
            Payload::InPlace(payload) => self.key.open_in_place_separate_tag(nonce, aad, tag, payload).is_ok(),
            // What is encrypted cannot stay as it is.
            Payload::Stays(_) => false,
        }
    }
}

/// Where the payload is and where it goes.
enum Payload<'a> {
    Apart { payload: &'a [u8], into: &'a mut [u8] },
    InPlace(&'a mut [u8]),
    Stays(&'a [u8]),
}

impl Payload<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Payload::Apart { payload, .. } => payload,
            Payload::InPlace(payload) => payload,
            Payload::Stays(payload) => payload,
        }
    }

    fn copy(self) {
        if let Payload::Apart { payload, into } = self {
            into.copy_from_slice(payload);
        }
    }
}

/// A header on its way out.
struct Head<'a> {
    authenticated: &'a mut [u8],
    tag: &'a mut [u8],
}

impl Head<'_> {
    fn mark(&mut self, phase: bool, epoch: u8) {
        self.authenticated[EPOCH_AT] = epoch;
        self.set_flags(HeaderFlags::SEALED.bits() | if phase { HeaderFlags::PHASE.bits() } else { 0 });
    }

    fn checksum(self, payload: &[u8]) {
        self.checksum_parts(payload, &[]);
    }

    fn checksum_parts(mut self, payload: &[u8], rest: &[u8]) {
        self.set_flags(0);
        let sum = crc32c([self.authenticated, payload, rest]);
        self.tag.copy_from_slice(&checksum_tag(sum));
    }

    fn set_flags(&mut self, flags: u8) {
        let ours = HeaderFlags::SEALED.with(HeaderFlags::PHASE).bits();
        self.authenticated[FLAGS_AT] = self.authenticated[FLAGS_AT] & !ours | flags;
    }
}

/// `packet`, which is at least a header long, in its parts.
fn split(packet: &mut [u8]) -> (Head<'_>, &mut [u8]) {
    let (header, payload) = packet.split_at_mut(Header::BYTES);
    let (authenticated, tag) = header.split_at_mut(TAG_AT);
    (Head { authenticated, tag }, payload)
}

fn is_odd(place: u64) -> bool {
    place % 2 == 1
}

fn wrong_length(header: &Header, packet: &[u8]) -> OpenError {
    OpenError::WrongLength { length: header.length, bytes: packet.len() }
}

struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests;
