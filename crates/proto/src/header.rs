//! The 64 bytes in front of every payload.
//!
//! ```text
//!  0  version   u8   1                   | 24  offset     u32  of the payload in the message
//!  1  kind      u8                       | 28  length     u16  payload bytes
//!  2  flags     u8                       | 30  control    u8   control bytes, 0..=128
//!  3  list      u8   receive list        | 31  epoch      u8   handshakes since the first
//!  4  session   u32  receiver's number   | 32  ack        u64  end of the latest run received, and its length
//!  8  number    u64  packet number       | 40  credit     u32  receives that the sender has posted
//! 16  vi        u32  receiver's VI       | 44  receive    u32  which receive the message fills
//! 20  message   u32                      | 48  tag        [u8; 16]
//! ```
//!
//! Little-endian. Bytes 0 to 47 are authenticated as they stand [W-1]; the tag covers them and the
//! payload.

use thiserror::Error;

/// What a packet is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Asks for a session; padded, so that no answer is larger than its question.
    Hello = 1,
    /// Grants a session.
    Welcome = 2,
    /// Carries a piece of a message.
    Data = 3,
    /// Carries ranges of received packet numbers.
    Ack = 4,
    /// Asks for an acknowledgement, or tries a packet size.
    Probe = 5,
    /// Ends a session.
    Close = 6,
    /// Asks for a receive list, grants or refuses one, or gives it back.
    Fast = 7,
    /// Carries a message of a fresh handshake in a session that goes on.
    Renew = 8,
}

impl Kind {
    fn from_wire(kind: u8) -> Result<Kind, Malformed> {
        match kind {
            1 => Ok(Kind::Hello),
            2 => Ok(Kind::Welcome),
            3 => Ok(Kind::Data),
            4 => Ok(Kind::Ack),
            5 => Ok(Kind::Probe),
            6 => Ok(Kind::Close),
            7 => Ok(Kind::Fast),
            8 => Ok(Kind::Renew),
            _ => Err(Malformed::UnknownKind { kind }),
        }
    }
}

/// The flags of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct HeaderFlags(u8);

impl HeaderFlags {
    /// No flag.
    pub const NONE: HeaderFlags = HeaderFlags(0);
    /// The parity of the key that sealed the packet. Set by [`crate::Sealing`].
    pub const PHASE: HeaderFlags = HeaderFlags(1);
    /// The first packet of its message.
    pub const FIRST: HeaderFlags = HeaderFlags(2);
    /// The last packet of its message.
    pub const LAST: HeaderFlags = HeaderFlags(4);
    /// The message goes to a place named by a token.
    pub const TOKEN: HeaderFlags = HeaderFlags(8);
    /// The sender wants an acknowledgement at once.
    pub const ACKNOWLEDGE: HeaderFlags = HeaderFlags(16);
    /// The packet is not sent again when lost.
    pub const UNRELIABLE: HeaderFlags = HeaderFlags(32);
    /// The packet is sealed, not merely checksummed. Set by [`crate::Sealing`].
    pub const SEALED: HeaderFlags = HeaderFlags(64);

    const KNOWN: u8 = 127;

    /// These flags and `other`.
    #[must_use]
    pub const fn with(self, other: HeaderFlags) -> HeaderFlags {
        HeaderFlags(self.0 | other.0)
    }

    /// These flags without those of `other`.
    #[must_use]
    pub const fn without(self, other: HeaderFlags) -> HeaderFlags {
        HeaderFlags(self.0 & !other.0)
    }

    /// Whether all flags of `other` are set.
    pub const fn has(self, other: HeaderFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The byte on the wire.
    pub const fn bits(self) -> u8 {
        self.0
    }
}

/// A packet's header, without its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the packet is for.
    pub kind: Kind,
    /// How to take it.
    pub flags: HeaderFlags,
    /// The receive list that the receiver assigned.
    pub list: u8,
    /// The receiver's number of the session; 0 in a hello.
    pub session: u32,
    /// The packet's number in its session and direction; no two packets share one.
    pub number: u64,
    /// The receiver's VI.
    pub vi: u32,
    /// The message that the payload belongs to.
    pub message: u32,
    /// Where in the message the payload begins.
    pub offset: u32,
    /// Payload bytes that follow the header.
    pub length: u16,
    /// Control bytes in the first packet of a message, at most [`CONTROL_BYTES_MAX`].
    pub control: u8,
    /// How many handshakes followed the session's first, modulo 256: whose keys sealed the packet. Set by
    /// [`crate::Sealing`].
    pub epoch: u8,
    /// The latest run of packets that was received: the number after its last in the upper 48 bits, how
    /// many there are in the lower 16.
    pub ack: u64,
    /// How many receives the sender has posted on this VI since it began: messages may fill those below.
    pub credit: u32,
    /// The number of the receive that the message fills.
    pub receive: u32,
}

/// Why bytes are not a packet.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Malformed {
    /// There is no whole header.
    #[error("a packet of {bytes} bytes is shorter than a header of {}", Header::BYTES)]
    TooShort {
        /// Bytes received.
        bytes: usize,
    },
    /// The sender speaks another version of the protocol.
    #[error("the packet has version {version} of the protocol, this end has version {WIRE_VERSION}")]
    UnknownVersion {
        /// The sender's version.
        version: u8,
    },
    /// No such kind of packet.
    #[error("{kind} is no kind of packet")]
    UnknownKind {
        /// The kind as received.
        kind: u8,
    },
    /// A flag that this version does not know.
    #[error("flags {flags:#04x} contain one that this version does not know")]
    UnknownFlags {
        /// The flags as received.
        flags: u8,
    },
    /// More control bytes than a message can have.
    #[error("{control} control bytes are more than {CONTROL_BYTES_MAX}")]
    TooMuchControl {
        /// Control bytes announced.
        control: u8,
    },
    /// The payload is shorter or longer than announced.
    #[error("a header of {} bytes and a payload of {length} do not make a packet of {bytes}", Header::BYTES)]
    WrongLength {
        /// Payload bytes announced.
        length: u16,
        /// Bytes received, with the header.
        bytes: usize,
    },
}

impl Header {
    /// Bytes of a header on the wire, with its tag.
    pub const BYTES: usize = 64;

    /// Where the kind stands, in one byte.
    pub const KIND_AT: usize = 1;

    /// Where the receive list stands, in one byte.
    pub const LIST_AT: usize = 3;

    /// Where the length of the payload stands, in two bytes.
    pub const LENGTH_AT: usize = 28;

    /// A header of `kind` with everything else zero.
    pub const fn new(kind: Kind) -> Header {
        Header {
            kind,
            flags: HeaderFlags::NONE,
            list: 0,
            session: 0,
            number: 0,
            vi: 0,
            message: 0,
            offset: 0,
            length: 0,
            control: 0,
            epoch: 0,
            ack: 0,
            credit: 0,
            receive: 0,
        }
    }

    /// The header at the start of `packet`, checked for form. That it is true, only
    /// [`crate::Sealing::open`] can tell.
    // In the caller's registers: written to memory field by field and read in larger pieces, it would wait for
    // all stores before, those of the last payload too.
    #[inline(always)]
    pub fn parse(packet: &[u8]) -> Result<Header, Malformed> {
        // The version comes before the length: another version may have shorter packets, and its
        // sender deserves the right diagnosis.
        match packet.first() {
            Some(&version) if version != WIRE_VERSION => return Err(Malformed::UnknownVersion { version }),
            _ => {}
        }
        let bytes = packet.len();
        let header = Header::parse_head(packet.first_chunk().ok_or(Malformed::TooShort { bytes })?)?;
        let announced = Header::BYTES + usize::from(header.length);
        // Only a hello may be longer than it says: its padding is the price of an answer.
        if announced > bytes || (announced < bytes && header.kind != Kind::Hello) {
            return Err(Malformed::WrongLength { length: header.length, bytes });
        }
        Ok(header)
    }

    /// The same for a header whose payload is elsewhere.
    #[inline(always)]
    pub fn parse_head(fixed: &[u8; Header::BYTES]) -> Result<Header, Malformed> {
        if fixed[0] != WIRE_VERSION {
            return Err(Malformed::UnknownVersion { version: fixed[0] });
        }
        let kind = Kind::from_wire(fixed[1])?;
        if fixed[2] & !HeaderFlags::KNOWN != 0 {
            return Err(Malformed::UnknownFlags { flags: fixed[2] });
        }
        let header = Header {
            kind,
            flags: HeaderFlags(fixed[2]),
            list: fixed[Header::LIST_AT],
            session: word32(fixed, 4),
            number: word64(fixed, 8),
            vi: word32(fixed, 16),
            message: word32(fixed, 20),
            offset: word32(fixed, 24),
            length: u16::from_le_bytes([fixed[Header::LENGTH_AT], fixed[Header::LENGTH_AT + 1]]),
            control: fixed[30],
            epoch: fixed[EPOCH_AT],
            ack: word64(fixed, 32),
            credit: word32(fixed, 40),
            receive: word32(fixed, 44),
        };
        if header.control > CONTROL_BYTES_MAX {
            return Err(Malformed::TooMuchControl { control: header.control });
        }
        Ok(header)
    }

    /// Writes the first 64 bytes of `packet`, with a tag of zeros.
    ///
    /// # Panics
    /// If `packet` is shorter than a header.
    pub fn write(&self, packet: &mut [u8]) {
        let fixed: &mut [u8; Header::BYTES] =
            packet.first_chunk_mut().expect("a packet has at least the bytes of its header");
        fixed[0] = WIRE_VERSION;
        fixed[Header::KIND_AT] = self.kind as u8;
        fixed[2] = self.flags.0;
        fixed[Header::LIST_AT] = self.list;
        fixed[4..8].copy_from_slice(&self.session.to_le_bytes());
        fixed[8..16].copy_from_slice(&self.number.to_le_bytes());
        fixed[16..20].copy_from_slice(&self.vi.to_le_bytes());
        fixed[20..24].copy_from_slice(&self.message.to_le_bytes());
        fixed[24..28].copy_from_slice(&self.offset.to_le_bytes());
        fixed[Header::LENGTH_AT..][..2].copy_from_slice(&self.length.to_le_bytes());
        fixed[30] = self.control;
        fixed[EPOCH_AT] = self.epoch;
        fixed[32..40].copy_from_slice(&self.ack.to_le_bytes());
        fixed[40..44].copy_from_slice(&self.credit.to_le_bytes());
        fixed[44..48].copy_from_slice(&self.receive.to_le_bytes());
        fixed[TAG_AT..].fill(0);
    }
}

/// The version of the protocol, in the first byte of every packet.
pub const WIRE_VERSION: u8 = 1;

/// Control bytes that a message can have.
pub const CONTROL_BYTES_MAX: u8 = 128;

/// Packet numbers are below this: with the length of a run they fill a word.
pub(crate) const NUMBERS: u64 = 1 << 48;
/// Where the tag begins, and what it authenticates ends.
pub(crate) const TAG_AT: usize = 48;
pub(crate) const TAG_BYTES: usize = 16;
pub(crate) const FLAGS_AT: usize = 2;
pub(crate) const EPOCH_AT: usize = 31;

const _: () = assert!(TAG_AT + TAG_BYTES == Header::BYTES);

#[inline(always)]
fn word32(fixed: &[u8; Header::BYTES], at: usize) -> u32 {
    u32::from_le_bytes(*fixed[at..].first_chunk().expect("fields lie within the header"))
}

#[inline(always)]
pub(crate) fn word64(fixed: &[u8; Header::BYTES], at: usize) -> u64 {
    u64::from_le_bytes(*fixed[at..].first_chunk().expect("fields lie within the header"))
}

#[cfg(test)]
mod tests;
