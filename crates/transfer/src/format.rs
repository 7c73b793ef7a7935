//! What travels: the offer that a transfer begins with, and the records behind it.
//!
//! ```text
//! offer    hwft · version u16 · name bytes u16 · size u64 · modified i64 s, u32 ns · mode u32
//!          · checksum u64 of all this and the name                                            40 bytes
//!          name
//! record   tag · number u32 · value u64 · checksum u64                                        24 bytes
//! ```
//!
//! `docs/protocol/file-transfer.md` says what each is for. Nothing of it is trusted: a length is checked
//! before that much is read, a name before it is a path.

use crate::checksum::Checksum;
use crate::error::{PeerError, Violation};
use std::fmt;
use std::io::{Read, Write};
use std::time::{Duration, SystemTime};

/// A name that is safe to create in a directory: not empty, neither `.` nor `..`, without `/` and without
/// control characters, and short enough to have `.part` added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName(String);

impl FileName {
    /// The name, if it is one.
    pub fn new(name: &[u8]) -> Result<FileName, NameError> {
        let text = std::str::from_utf8(name).map_err(|_| NameError::NotText)?;
        match text {
            "" => Err(NameError::Empty),
            "." | ".." => Err(NameError::Directory),
            _ if text.len() > NAME_BYTES_MAX => Err(NameError::TooLong { bytes: text.len() }),
            _ if text.contains('/') => Err(NameError::Path),
            _ if text.contains(char::is_control) => Err(NameError::Control),
            _ => Ok(FileName(text.to_owned())),
        }
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Why a name is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// There is none.
    #[error("it is empty")]
    Empty,
    /// It is `.` or `..`.
    #[error("it is a directory's")]
    Directory,
    /// `.part` would not fit behind it.
    #[error("it has {bytes} bytes, and {NAME_BYTES_MAX} are the most")]
    TooLong {
        /// What it has.
        bytes: usize,
    },
    /// It leads elsewhere.
    #[error("there is a / in it")]
    Path,
    /// It would do things to a terminal.
    #[error("there are control characters in it")]
    Control,
    /// It is not UTF-8.
    #[error("it is not UTF-8")]
    NotText,
}

/// What the sender has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// What it is called there.
    pub name: FileName,
    /// Its bytes.
    pub size: u64,
    /// When it was last changed: seconds since 1970, and the rest of one in nanoseconds.
    pub modified: (i64, u32),
    /// Who may read, write and execute it: the nine bits of `chmod`, and no others.
    pub mode: u32,
}

impl Offer {
    /// The bytes that travel.
    pub fn encode(&self) -> Vec<u8> {
        let name = self.name.as_str().as_bytes();
        let mut bytes = Vec::with_capacity(OFFER_BYTES + name.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&(name.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&self.size.to_le_bytes());
        bytes.extend_from_slice(&self.modified.0.to_le_bytes());
        bytes.extend_from_slice(&self.modified.1.to_le_bytes());
        bytes.extend_from_slice(&self.mode.to_le_bytes());
        let checksum = Checksum::EMPTY.then(&bytes).then(name);
        bytes.extend_from_slice(&checksum.value().to_le_bytes());
        bytes.extend_from_slice(name);
        bytes
    }

    /// Reads one, no byte beyond it, and nothing more of what does not begin like one.
    pub fn read(stream: &mut impl Read) -> Result<Offer, PeerError> {
        let mut bytes = vec![0; 8];
        stream.read_exact(&mut bytes)?;
        let magic = field::<4>(&bytes, 0);
        if magic != MAGIC {
            return Err(PeerError::NotHighwire { found: magic });
        }
        let (version, name_bytes) = (u16::from_le_bytes(field(&bytes, 4)), u16::from_le_bytes(field(&bytes, 6)));
        if version != VERSION {
            return Err(PeerError::Version { theirs: version.into() });
        }
        if usize::from(name_bytes) > NAME_BYTES_MAX {
            return Err(Violation::Name(NameError::TooLong { bytes: name_bytes.into() }).into());
        }
        bytes.resize(OFFER_BYTES + usize::from(name_bytes), 0);
        stream.read_exact(&mut bytes[8..])?;
        Ok(Offer::decode(&bytes)?)
    }

    /// From all its bytes, whose magic, version and length are right.
    fn decode(bytes: &[u8]) -> Result<Offer, Violation> {
        let (head, name) = bytes.split_at(OFFER_BYTES);
        let checksum = Checksum::EMPTY.then(&head[..CHECKSUM_AT]).then(name);
        if checksum.value() != u64::from_le_bytes(field(head, CHECKSUM_AT)) {
            return Err(Violation::OfferChecksum);
        }
        let offer = Offer {
            name: FileName::new(name).map_err(Violation::Name)?,
            size: u64::from_le_bytes(field(head, 8)),
            modified: (i64::from_le_bytes(field(head, 16)), u32::from_le_bytes(field(head, 24))),
            mode: u32::from_le_bytes(field(head, 28)),
        };
        match offer {
            Offer { size, .. } if size > SIZE_MAX => Err(Violation::Size(size)),
            Offer { modified: (_, nanoseconds), .. } if nanoseconds >= 1_000_000_000 => {
                Err(Violation::Nanoseconds(nanoseconds))
            }
            Offer { mode, .. } if mode & !0o777 != 0 => Err(Violation::Mode(mode)),
            offer => Ok(offer),
        }
    }

    /// When it was last changed, if the clock here can say so.
    pub fn modified(&self) -> Option<SystemTime> {
        let (seconds, nanoseconds) = self.modified;
        let whole = Duration::from_secs(seconds.unsigned_abs());
        let epoch = SystemTime::UNIX_EPOCH;
        let second = if seconds < 0 { epoch.checked_sub(whole) } else { epoch.checked_add(whole) };
        second?.checked_add(Duration::from_nanos(nanoseconds.into()))
    }
}

/// What a record is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// Receiver: `value` bytes are here from an earlier attempt. `number` is its version.
    Have,
    /// Sender: goes on behind `value` bytes, whose checksum this is.
    From,
    /// Sender: `number` bytes of the file follow, from `value` on. The checksum is that of the file up to
    /// their end.
    Data,
    /// Receiver: `value` bytes are written, and this is their checksum.
    Kept,
    /// Sender: this was the whole file. Receiver: it is in its place.
    Done,
    /// Either: it is over, and `number` is the [`Reason`].
    Stop,
}

impl Tag {
    fn bytes(self) -> [u8; 4] {
        match self {
            Tag::Have => *b"have",
            Tag::From => *b"from",
            Tag::Data => *b"data",
            Tag::Kept => *b"kept",
            Tag::Done => *b"done",
            Tag::Stop => *b"stop",
        }
    }

    fn parse(bytes: [u8; 4]) -> Option<Tag> {
        [Tag::Have, Tag::From, Tag::Data, Tag::Kept, Tag::Done, Tag::Stop].into_iter().find(|tag| tag.bytes() == bytes)
    }
}

/// Everything that travels behind the offer, but for the bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// What it is for.
    pub tag: Tag,
    /// See [`Tag`].
    pub number: u32,
    /// Bytes of the file, from its beginning.
    pub value: u64,
    /// Of the file up to some byte: see [`Tag`].
    pub checksum: Checksum,
}

impl Record {
    /// One that says where in the file it belongs.
    pub fn at(tag: Tag, value: u64, checksum: Checksum) -> Record {
        Record { tag, number: 0, value, checksum }
    }

    /// One that ends the transfer.
    pub fn stop(reason: Reason) -> Record {
        Record { tag: Tag::Stop, number: reason.code(), value: 0, checksum: Checksum::EMPTY }
    }

    /// Why the other side stops, if this says so; nothing else is due.
    pub(crate) fn reason(self) -> Result<Reason, Violation> {
        match self.tag {
            Tag::Stop => Ok(Reason::parse(self.number)),
            found => Err(Violation::UnexpectedTag { found }),
        }
    }

    /// The bytes that travel.
    pub fn encode(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..4].copy_from_slice(&self.tag.bytes());
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.value.to_le_bytes());
        bytes[16..].copy_from_slice(&self.checksum.value().to_le_bytes());
        bytes
    }

    /// From the bytes that came.
    pub fn decode(bytes: [u8; RECORD_BYTES]) -> Result<Record, Violation> {
        let tag = field::<4>(&bytes, 0);
        Ok(Record {
            tag: Tag::parse(tag).ok_or(Violation::UnknownTag { found: tag })?,
            number: u32::from_le_bytes(field(&bytes, 4)),
            value: u64::from_le_bytes(field(&bytes, 8)),
            checksum: Checksum::from_value(u64::from_le_bytes(field(&bytes, 16))),
        })
    }

    pub(crate) fn read(stream: &mut impl Read) -> Result<Record, PeerError> {
        let mut bytes = [0; RECORD_BYTES];
        stream.read_exact(&mut bytes)?;
        Ok(Record::decode(bytes)?)
    }

    /// The first one of the other side, which tells whether it speaks this at all. Waits for no more bytes
    /// than that takes.
    pub(crate) fn read_first(stream: &mut impl Read) -> Result<Record, PeerError> {
        let mut bytes = [0; RECORD_BYTES];
        stream.read_exact(&mut bytes[..4])?;
        let tag = field::<4>(&bytes, 0);
        if Tag::parse(tag).is_none() {
            return Err(PeerError::NotHighwire { found: tag });
        }
        stream.read_exact(&mut bytes[4..])?;
        Ok(Record::decode(bytes)?)
    }

    pub(crate) fn write(self, stream: &mut impl Write) -> Result<(), PeerError> {
        stream.write_all(&self.encode())?;
        Ok(stream.flush()?)
    }
}

/// Why a side stops, as the other one is told: a number, since text of a stranger does not belong on a
/// terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The receiver has a file of that name.
    Exists,
    /// Somebody else is receiving a file of that name there.
    Busy,
    /// The receiver's disk is full.
    Full,
    /// The receiver may not write there.
    Denied,
    /// The receiver's file system takes no file so large.
    TooLarge,
    /// There is a directory, or a device, where the receiver was to put the file.
    NotReplaceable,
    /// The receiver's storage failed in another way.
    Storage,
    /// Bytes arrived that are not those that were sent.
    Damaged,
    /// The receiver speaks another version.
    Version,
    /// What was said makes no sense to the other side.
    Violation,
    /// The file changed while the sender read it.
    Changed,
    /// The sender cannot read its file.
    Unreadable,
    /// The receiver has a file called `NAME.part` that no receiver made.
    ForeignPart,
    /// The name begins with a dot.
    Hidden,
    /// One of a later version.
    Unknown(u32),
}

impl Reason {
    /// The number that travels.
    pub fn code(self) -> u32 {
        match self {
            Reason::Unknown(code) => code,
            known => REASONS.iter().position(|reason| *reason == known).map_or(0, |at| at as u32 + 1),
        }
    }

    /// What a number means.
    pub fn parse(code: u32) -> Reason {
        let at = (code as usize).checked_sub(1);
        at.and_then(|at| REASONS.get(at)).copied().unwrap_or(Reason::Unknown(code))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Exists => {
                "a file of this name is there: start the receiver with --force to replace it, or with --output FILE"
            }
            Reason::Busy => {
                "somebody is receiving a file of this name there: wait for that, or start the receiver with --output FILE"
            }
            Reason::Full => "its disk is full: make room there and run both commands again, it goes on from here",
            Reason::Denied => "it may not write there: start it as another user, or with --into DIRECTORY",
            Reason::TooLarge => "its file system, or its limit (ulimit -f), takes no file so large",
            Reason::NotReplaceable => "what is there is no file: start the receiver with --output FILE",
            Reason::Storage => "its storage failed: see what it says there",
            Reason::Damaged => "bytes arrived damaged: run both commands again, it goes on from the last good ones",
            Reason::Version => "it speaks another version of the file transfer: use the same highwire on both sides",
            Reason::Violation => "it does not understand this side: use the same highwire on both sides",
            Reason::Changed => "its file changed while it was sent: run both commands again when nobody writes to it",
            Reason::Unreadable => "it cannot read its file any more: see what it says there",
            Reason::ForeignPart => {
                "a file with .part behind this name is there, which no receiver left: move it away, or start the receiver with --output FILE"
            }
            Reason::Hidden => {
                "it takes no name that begins with a dot: start the receiver with --force, or with --output FILE"
            }
            Reason::Unknown(code) => return write!(f, "of a reason that this version does not know (number {code})"),
        })
    }
}

/// The part of `buffer` that takes `left` bytes, or all of it.
pub(crate) fn piece_of(buffer: &mut [u8], left: u64) -> &mut [u8] {
    let bytes = left.min(buffer.len() as u64);
    &mut buffer[..bytes as usize]
}

/// `N` bytes from `at` on.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a range of N bytes")
}

/// Bytes of a name: those of a directory's entry, less `.part`.
pub const NAME_BYTES_MAX: usize = 250;
/// Bytes of the file in one record.
pub const CHUNK_BYTES_MAX: usize = 1 << 20;
/// What is read and sent at once: larger is not faster, since it should stay in the cache between its reading,
/// its checksum and its writing.
pub(crate) const PIECE_BYTES: usize = 512 << 10;
/// Bytes from one report of the receiver to the next, and from one checksum of an earlier attempt to the next.
pub const BLOCK_BYTES: u64 = 32 << 20;
/// Bytes that a sender may be ahead of the receiver's reports: what a receiver that stops has to discard.
pub(crate) const AHEAD_BYTES_MAX: u64 = 4 * BLOCK_BYTES;
pub(crate) const VERSION: u16 = 1;
pub(crate) const RECORD_BYTES: usize = 24;
const MAGIC: [u8; 4] = *b"hwft";
const OFFER_BYTES: usize = 40;
const CHECKSUM_AT: usize = 32;
/// What Linux can address in a file.
const SIZE_MAX: u64 = i64::MAX as u64;
/// In the order of their numbers, from 1.
const REASONS: [Reason; 14] = [
    Reason::Exists,
    Reason::Busy,
    Reason::Full,
    Reason::Denied,
    Reason::TooLarge,
    Reason::NotReplaceable,
    Reason::Storage,
    Reason::Damaged,
    Reason::Version,
    Reason::Violation,
    Reason::Changed,
    Reason::Unreadable,
    Reason::ForeignPart,
    Reason::Hidden,
];

#[cfg(test)]
mod tests;
