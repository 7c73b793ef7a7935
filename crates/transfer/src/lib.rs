//! One file over a stream: verified, and resumed where it stopped.
//!
//! The way in is [`send`] with a [`Source`], and [`receive`] with a [`Destination`] at the other end. The
//! stream is anything that reads and writes: a Highwire stream, a TCP connection, a socket pair.
//!
//! ```
//! use highwire_transfer::{Destination, Source, receive, send};
//! use std::os::unix::net::UnixStream;
//!
//! let place = tempfile::tempdir()?;
//! std::fs::write(place.path().join("letter"), "dear wire")?;
//! let source = Source::open(&place.path().join("letter"))?;
//! let (mut near, mut far) = UnixStream::pair()?;
//! let sender = std::thread::spawn(move || send(&mut near, &source, |_| ()));
//!
//! let destination = Destination::file(place.path().join("copy"));
//! let received = receive(&mut far, &destination, |_| ())?;
//! assert_eq!(sender.join().unwrap()?.checksum, received.outcome.checksum);
//! assert_eq!(std::fs::read(received.path)?, b"dear wire");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What is promised: a file gets its name at the receiver only when it is whole, and each of its bytes is
//! what the sender read, those of an earlier attempt too. [`send`] succeeds only after the receiver has said
//! so. `docs/protocol/file-transfer.md` describes every byte.
#![forbid(unsafe_code)]

mod checksum;
mod destination;
mod error;
mod format;
mod partial;
mod receive;
mod send;
mod source;
mod writer_watch;

pub use checksum::Checksum;
pub use destination::Destination;
pub use error::{PeerError, ReceiveError, SendError, Violation};
pub use format::{BLOCK_BYTES, CHUNK_BYTES_MAX, FileName, NAME_BYTES_MAX, NameError, Offer, Reason, Record, Tag};
pub use receive::{Received, read_offer, receive, receive_offered};
pub use send::send;
pub use source::Source;
pub use writer_watch::WriterWatch;

use std::io::Read;
use std::time::{Duration, Instant};

/// How far a transfer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// What an earlier attempt left was read again up to this byte.
    Compared {
        /// The bytes behind us.
        bytes: u64,
        /// What there is of an earlier attempt.
        of: u64,
    },
    /// The file was sent, or written, up to this byte.
    Moved {
        /// The bytes behind us, those of an earlier attempt among them.
        bytes: u64,
        /// The bytes of the file.
        of: u64,
    },
    /// The file was read once more up to this byte, since it may have changed while it was sent.
    Verified {
        /// The bytes behind us.
        bytes: u64,
        /// The bytes of the file.
        of: u64,
    },
}

/// A transfer that went well, as both sides know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes of the file.
    pub bytes: u64,
    /// How many of them were there from an earlier attempt, and were not sent again.
    pub resumed_from: u64,
    /// Of the whole file.
    pub checksum: Checksum,
}

/// Waits until the other side has closed too, and discards what still comes.
///
/// Whoever closes first, with bytes unread or with the last packet still under way, may take from the other
/// side what it was told last: that the file is there, or why it is not. A `stream` with a read timeout is
/// waited for no longer than that plus `patience`.
pub fn await_close(stream: &mut impl Read, patience: Duration) {
    let began = Instant::now();
    let mut discarded = vec![0; CHUNK_BYTES_MAX];
    while began.elapsed() < patience {
        // An error is an end as well: there is nothing left to tell.
        let Ok(1..) = stream.read(&mut discarded) else { return };
    }
}
