//! The side that gets the file.

use crate::checksum::Checksum;
use crate::destination::Destination;
use crate::error::{PeerError, ReceiveError, Violation};
use crate::format::{BLOCK_BYTES, CHUNK_BYTES_MAX, Offer, Record, Tag, VERSION};
use crate::partial::Partial;
use crate::{Outcome, Progress};
use std::io::{Read, Write};
use std::path::PathBuf;

/// A file that came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// What the sender calls it, and what it said of it; its permissions are those that the file has got.
    pub offer: Offer,
    /// The sender's permissions to execute it were left out.
    pub not_executable: bool,
    /// Where it is.
    pub path: PathBuf,
    /// How it came.
    pub outcome: Outcome,
}

/// Receives one file, and returns when it is in its place: [`read_offer`] and [`receive_offered`].
///
/// Whatever goes wrong, `NAME.part` keeps what came and was right, for the next attempt.
///
/// ```text
/// offer ──▶ have, kept … ──▶ from ──▶ data ──▶ done: all there, and right?
///    │                                │  ▲              │ its name, then `done`
///    └─ may it be put there?          ▼  │              ▼
///                                  checked, written     Ok
/// ```
pub fn receive<S: Read + Write>(
    stream: &mut S,
    destination: &Destination,
    progress: impl FnMut(Progress),
) -> Result<Received, ReceiveError> {
    let offer = read_offer(stream)?;
    receive_offered(stream, offer, destination, progress)
}

/// Hears what the sender offers, which is the first that it says.
pub fn read_offer<S: Read + Write>(stream: &mut S) -> Result<Offer, ReceiveError> {
    let offer = Offer::read(stream).map_err(ReceiveError::from);
    told(stream, offer)
}

/// Receives the file that was offered, and returns when it is in its place.
pub fn receive_offered<S: Read + Write>(
    stream: &mut S,
    offer: Offer,
    destination: &Destination,
    mut progress: impl FnMut(Progress),
) -> Result<Received, ReceiveError> {
    let received = accept(stream, offer, destination, &mut progress);
    told(stream, received)
}

/// Tells the sender what went wrong, if it is for it to know.
fn told<S: Write, T>(stream: &mut S, received: Result<T, ReceiveError>) -> Result<T, ReceiveError> {
    if let Some(reason) = received.as_ref().err().and_then(ReceiveError::reason) {
        // A sender that cannot hear it sees that the connection ends.
        let _ = Record::stop(reason).write(stream);
    }
    received
}

fn accept<S: Read + Write>(
    stream: &mut S,
    offer: Offer,
    destination: &Destination,
    progress: &mut impl FnMut(Progress),
) -> Result<Received, ReceiveError> {
    let mode = destination.permitted(offer.mode);
    let (not_executable, offer) = (mode != offer.mode, Offer { mode, ..offer });
    let partial = Partial::open(destination.path(&offer.name)?, &offer)?;
    let (from, checksum) = agree(stream, &partial, progress)?;
    partial.truncate(from, &offer)?;
    let mut receiving = Receiving { stream, partial: &partial, size: offer.size, progress, at: from, checksum };
    let checksum = receiving.run()?;
    let path = partial.finish(&offer, destination.is_forced(), destination.syncs())?;
    let outcome = Outcome { bytes: offer.size, resumed_from: from, checksum };
    // The file is there, whether or not the sender hears of it.
    let _ = Record::at(Tag::Done, outcome.bytes, checksum).write(stream);
    Ok(Received { offer, not_executable, path, outcome })
}

/// Tells what an earlier attempt left, and hears from the sender how much of it is right: how many bytes, and
/// their checksum.
fn agree<S: Read + Write>(
    stream: &mut S,
    partial: &Partial,
    progress: &mut impl FnMut(Progress),
) -> Result<(u64, Checksum), ReceiveError> {
    let have = Record { number: VERSION.into(), ..Record::at(Tag::Have, partial.have(), Checksum::EMPTY) };
    have.write(stream)?;
    let mut ends = vec![(0, Checksum::EMPTY)];
    partial.read_blocks(|at, block_end| {
        if let Some(checksum) = block_end {
            Record::at(Tag::Kept, at, checksum).write(stream)?;
            ends.push((at, checksum));
        }
        progress(Progress::Compared { bytes: at, of: partial.have() });
        Ok(())
    })?;
    let from = Record::read(stream)?;
    let Record { tag: Tag::From, value, checksum, .. } = from else { return Err(stopped_by(from)) };
    match ends.iter().find(|(end, _)| *end == value) {
        Some(end) if end.1 == checksum => Ok(*end),
        Some(_) => Err(Violation::Checksum { tag: Tag::From, bytes: value }.into()),
        None => Err(Violation::Position { tag: Tag::From, found: value, from: 0, to: partial.have() }.into()),
    }
}

struct Receiving<'a, S, P> {
    stream: &'a mut S,
    partial: &'a Partial,
    size: u64,
    progress: P,
    /// The byte that comes next, and the checksum of those before it.
    at: u64,
    checksum: Checksum,
}

impl<S: Read + Write, P: FnMut(Progress)> Receiving<'_, S, P> {
    /// Writes what comes until all is there, and returns the checksum of the whole.
    fn run(&mut self) -> Result<Checksum, ReceiveError> {
        let mut buffer = vec![0; CHUNK_BYTES_MAX];
        loop {
            let record = Record::read(self.stream)?;
            match record.tag {
                Tag::Data => self.handle_data(record, &mut buffer)?,
                Tag::Done if self.at != self.size => return Err(self.misplaced(Tag::Done, self.at, self.size)),
                Tag::Done if record.value != self.size => {
                    return Err(self.misplaced(Tag::Done, record.value, self.size));
                }
                Tag::Done if record.checksum != self.checksum => {
                    return Err(Violation::Checksum { tag: Tag::Done, bytes: self.size }.into());
                }
                Tag::Done => return Ok(self.checksum),
                _ => return Err(stopped_by(record)),
            }
        }
    }

    /// Takes a piece of the file. It is written only if it is right: what is in the file can be resumed.
    fn handle_data(&mut self, record: Record, buffer: &mut [u8]) -> Result<(), ReceiveError> {
        let bytes = record.number as usize;
        if !(1..=CHUNK_BYTES_MAX).contains(&bytes) {
            return Err(Violation::ChunkBytes(record.number).into());
        }
        let to = self.at + bytes as u64;
        if record.value != self.at {
            return Err(self.misplaced(Tag::Data, record.value, self.at));
        }
        if to > self.size {
            return Err(self.misplaced(Tag::Data, to, self.at));
        }
        let piece = &mut buffer[..bytes];
        self.stream.read_exact(piece).map_err(PeerError::from)?;
        let checksum = self.checksum.then(piece);
        if checksum != record.checksum {
            return Err(ReceiveError::Damaged { from: self.at, to });
        }
        self.partial.append(piece, self.at)?;
        let ends_block = self.at / BLOCK_BYTES != to / BLOCK_BYTES;
        (self.at, self.checksum) = (to, checksum);
        if ends_block {
            Record::at(Tag::Kept, self.at, checksum).write(self.stream)?;
        }
        (self.progress)(Progress::Moved { bytes: self.at, of: self.size });
        Ok(())
    }

    /// That a record names a byte which is not from `from` to the end of the file.
    fn misplaced(&self, tag: Tag, found: u64, from: u64) -> ReceiveError {
        Violation::Position { tag, found, from, to: self.size }.into()
    }
}

/// What a record means that is none of those that were due.
fn stopped_by(record: Record) -> ReceiveError {
    record.reason().map_or_else(ReceiveError::from, |reason| ReceiveError::Stopped { reason })
}
