//! What can go wrong, and what to do then.

use crate::format::{CHUNK_BYTES_MAX, NameError, Reason, Tag, VERSION};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// What the other side, or the way to it, did wrong.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// It closed before the transfer was over.
    #[error("the other side went away: run both commands again, and it goes on where it stopped")]
    Ended,
    /// The stream failed.
    #[error("the connection broke ({error}): run both commands again, and it goes on where it stopped")]
    Lost {
        /// What the stream said.
        error: io::Error,
    },
    /// It is something else.
    #[error(
        "the other side does not speak the file transfer (it began with \"{}\"): \
         is there a `highwire send` at one end and a `highwire receive` at the other?",
        found.escape_ascii()
    )]
    NotHighwire {
        /// How it began.
        found: [u8; 4],
    },
    /// It is older or newer.
    #[error(
        "the other side speaks version {theirs} of the file transfer, not {VERSION}: use the same highwire on both"
    )]
    Version {
        /// What it speaks.
        theirs: u32,
    },
    /// It does not keep to the protocol.
    #[error("the other side broke the protocol, so nothing more is taken from it: {0}")]
    Violation(#[from] Violation),
}

impl From<io::Error> for PeerError {
    fn from(error: io::Error) -> PeerError {
        match error.kind() {
            ErrorKind::UnexpectedEof => PeerError::Ended,
            _ => PeerError::Lost { error },
        }
    }
}

/// What does not follow the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The offer is not what was sent.
    #[error("the offer's checksum is wrong")]
    OfferChecksum,
    /// A name that is none.
    #[error("the file's name is not used: {0}")]
    Name(NameError),
    /// No file can be so large.
    #[error("a file of {0} bytes")]
    Size(u64),
    /// A second has fewer.
    #[error("{0} nanoseconds of a second")]
    Nanoseconds(u32),
    /// Bits that nobody may decide from afar.
    #[error("permissions {0:o}, of which only 777 are taken")]
    Mode(u32),
    /// No record begins so.
    #[error("a record that begins with \"{}\"", found.escape_ascii())]
    UnknownTag {
        /// How it began.
        found: [u8; 4],
    },
    /// A record that does not belong there.
    #[error("a record {found:?} where another was due")]
    UnexpectedTag {
        /// What came.
        found: Tag,
    },
    /// A piece of the file that is too long, or empty.
    #[error("a piece of {0} bytes, where 1 to {CHUNK_BYTES_MAX} are right")]
    ChunkBytes(u32),
    /// Another place in the file than the one that was due.
    #[error("a record {tag:?} at byte {found}, where {from} to {to} are right")]
    Position {
        /// What it was for.
        tag: Tag,
        /// What it said.
        found: u64,
        /// The least that is right.
        from: u64,
        /// The most that is right.
        to: u64,
    },
    /// The two sides do not mean the same bytes.
    #[error("a record {tag:?} with another checksum of the file's first {bytes} bytes")]
    Checksum {
        /// What it was for.
        tag: Tag,
        /// Up to where.
        bytes: u64,
    },
}

/// Why a file was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// It cannot be opened or read.
    #[error("{path:?} cannot be read: {error}{}", read_advice(error))]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It is something else.
    #[error("{path:?} is {what}, and only regular files are sent{}", kind_advice(what))]
    NotRegular {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The other side could not use its name.
    #[error("the name of {path:?} cannot be sent ({error}): link the file under another one")]
    Name {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: NameError,
    },
    /// Somebody wrote to it meanwhile.
    #[error(
        "{path:?} changed while it was sent, so nothing was put in place there: run both commands again when nobody writes to it"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The receiver said no.
    #[error("the receiver stopped: {reason}")]
    Stopped {
        /// Its reason.
        reason: Reason,
    },
    /// Everything was sent, but whether it arrived nobody said.
    #[error(
        "everything was sent, but the receiver did not confirm it ({error}): \
         if the file is not there under its name, run both commands again"
    )]
    Unconfirmed {
        /// What came instead.
        error: PeerError,
    },
    /// The other side, or the way to it.
    #[error(transparent)]
    Peer(#[from] PeerError),
}

impl SendError {
    /// What the receiver is told, if this is for it to know.
    pub(crate) fn reason(&self) -> Option<Reason> {
        match self {
            SendError::Changed { .. } => Some(Reason::Changed),
            SendError::Read { .. } => Some(Reason::Unreadable),
            SendError::Peer(PeerError::Violation(_)) => Some(Reason::Violation),
            _ => None,
        }
    }
}

fn kind_advice(what: &str) -> &'static str {
    match what {
        "a directory" => ": pack it first, as with `tar -cf FILE.tar DIRECTORY`",
        _ => ": copy what it gives into a file first",
    }
}

fn read_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::NotFound => ": look at its name",
        ErrorKind::PermissionDenied => ": start this as a user who may read it",
        _ => "",
    }
}

fn write_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => ": start this as a user who may, or give another place with --into or --output",
        ErrorKind::ReadOnlyFilesystem => ": give another place with --into or --output",
        ErrorKind::FileTooLarge => {
            ": give a place with --into on a file system that takes larger files, or raise `ulimit -f`"
        }
        _ => "",
    }
}

impl From<Violation> for SendError {
    fn from(violation: Violation) -> SendError {
        PeerError::from(violation).into()
    }
}

/// Why a file was not received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// There is one.
    #[error("{path:?} exists: replace it with --force, or give another name with --output")]
    Exists {
        /// Where the file was to go.
        path: PathBuf,
    },
    /// There is something that no file takes the place of.
    #[error(
        "{path:?} is {what}, which a file does not replace: give a file's name with --output, or a directory with --into"
    )]
    NotReplaceable {
        /// Where the file was to go.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// What would be overwritten is no part of a file.
    #[error(
        "{path:?} was not left by an earlier `highwire receive` of this version: move it away, or give another name with \
         --output"
    )]
    ForeignPart {
        /// The file of that name.
        path: PathBuf,
    },
    /// The sender chose a name that begins with a dot. Programs read such files unseen, and obey them.
    #[error(
        "{path:?} begins with a dot, as files do that programs obey unseen: take it with --force, or give another name with --output"
    )]
    Hidden {
        /// Where the file was to go.
        path: PathBuf,
    },
    /// Nothing can be put there.
    #[error("{path:?} is no directory: make it first, or give another one")]
    NoDirectory {
        /// Where the file was to go.
        path: PathBuf,
    },
    /// Another receiver is at it.
    #[error(
        "{path:?} is not ours alone: somebody else receives it, or has removed or replaced it; wait for that and run both commands again, or give another name with --output"
    )]
    Busy {
        /// What the other one writes.
        path: PathBuf,
    },
    /// No room is left.
    #[error(
        "no room is left for {path:?} after {written} bytes ({error}): make room and run both commands again, it goes on from there"
    )]
    Full {
        /// What was being written.
        path: PathBuf,
        /// How much of it there is.
        written: u64,
        /// What the system said.
        error: io::Error,
    },
    /// The system refuses.
    #[error("{path:?} cannot be written: {error}{}", write_advice(error))]
    Write {
        /// What was being written.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// What came is not what was sent.
    #[error("bytes {from} to {to} came damaged, and were not written: run both commands again, it goes on from there")]
    Damaged {
        /// The first byte of the piece.
        from: u64,
        /// The byte behind the piece.
        to: u64,
    },
    /// The sender stopped.
    #[error("the sender stopped: {reason}")]
    Stopped {
        /// Its reason.
        reason: Reason,
    },
    /// The other side, or the way to it.
    #[error(transparent)]
    Peer(#[from] PeerError),
}

impl From<Violation> for ReceiveError {
    fn from(violation: Violation) -> ReceiveError {
        PeerError::from(violation).into()
    }
}

impl ReceiveError {
    /// That `path` cannot be written, `written` bytes being there.
    pub(crate) fn write(path: &Path, written: u64, error: io::Error) -> ReceiveError {
        let path = path.to_owned();
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ReceiveError::Full { path, written, error },
            _ => ReceiveError::Write { path, error },
        }
    }

    /// What the sender is told, if this is for it to know.
    pub(crate) fn reason(&self) -> Option<Reason> {
        match self {
            ReceiveError::Exists { .. } => Some(Reason::Exists),
            ReceiveError::NotReplaceable { .. } => Some(Reason::NotReplaceable),
            ReceiveError::ForeignPart { .. } => Some(Reason::ForeignPart),
            ReceiveError::Hidden { .. } => Some(Reason::Hidden),
            ReceiveError::Busy { .. } => Some(Reason::Busy),
            ReceiveError::Full { .. } => Some(Reason::Full),
            ReceiveError::NoDirectory { .. } => Some(Reason::Storage),
            ReceiveError::Write { error, .. } => Some(match error.kind() {
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => Reason::Denied,
                ErrorKind::FileTooLarge => Reason::TooLarge,
                _ => Reason::Storage,
            }),
            ReceiveError::Damaged { .. } => Some(Reason::Damaged),
            ReceiveError::Peer(PeerError::Version { .. }) => Some(Reason::Version),
            ReceiveError::Peer(PeerError::Violation(_)) => Some(Reason::Violation),
            // To a stranger nothing is said, and the rest cannot hear it.
            ReceiveError::Stopped { .. } | ReceiveError::Peer(_) => None,
        }
    }
}
