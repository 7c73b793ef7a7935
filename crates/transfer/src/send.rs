//! The side that has the file.

use crate::checksum::Checksum;
use crate::error::{PeerError, SendError, Violation};
use crate::format::{AHEAD_BYTES_MAX, BLOCK_BYTES, PIECE_BYTES, RECORD_BYTES, Record, Tag, VERSION, piece_of};
use crate::source::Source;
use crate::writer_watch::WriterWatch;
use crate::{Outcome, Progress};
use std::io::{Read, Write};

/// Sends the file, and returns when the receiver has it in its place.
///
/// ```text
/// offer ──▶ have, kept … ──▶ from ──▶ data ──▶ verify ──▶ done ──▶ done comes back: Ok
///           as far as both             │  ▲    if the file may
///           are the same               ▼  │ kept have changed
///                                    four blocks ahead
/// ```
pub fn send<S: Read + Write>(
    stream: &mut S,
    source: &Source,
    progress: impl FnMut(Progress),
) -> Result<Outcome, SendError> {
    let watch = source.watch();
    let mut sending = Sending { stream, source, watch, progress, at: 0, checksum: Checksum::EMPTY, kept: 0 };
    sending.run().map_err(|error| sending.explain(error))
}

struct Sending<'a, S, P> {
    stream: &'a mut S,
    source: &'a Source,
    /// Since before the first byte was read.
    watch: WriterWatch<'a>,
    progress: P,
    /// The byte that comes next, and the checksum of those before it.
    at: u64,
    checksum: Checksum,
    /// Bytes that the receiver said it has written.
    kept: u64,
}

impl<S: Read + Write, P: FnMut(Progress)> Sending<'_, S, P> {
    fn run(&mut self) -> Result<Outcome, SendError> {
        self.offer()?;
        self.agree()?;
        let resumed_from = self.at;
        self.say(Tag::From)?;
        self.pour()?;
        self.verify()?;
        self.say(Tag::Done)?;
        self.await_confirmation()?;
        Ok(Outcome { bytes: self.at, resumed_from, checksum: self.checksum })
    }

    fn offer(&mut self) -> Result<(), PeerError> {
        self.stream.write_all(&self.source.offer().encode())?;
        Ok(self.stream.flush()?)
    }

    fn say(&mut self, tag: Tag) -> Result<(), PeerError> {
        Record::at(tag, self.at, self.checksum).write(self.stream)
    }

    /// Goes to where what the receiver has from an earlier attempt ends, or differs from the file.
    fn agree(&mut self) -> Result<(), SendError> {
        let have = self.have()?;
        let mut buffer = vec![0; PIECE_BYTES];
        let (mut end, mut same) = (0, true);
        while end < have {
            end = have.min(end + BLOCK_BYTES);
            let theirs = self.block_checksum(end)?;
            // Checksums behind a difference are of no use, but they are on their way.
            if same {
                let ours = self.checksum_between((self.at, self.checksum), end, &mut buffer)?;
                same = ours == theirs;
                if same {
                    (self.at, self.checksum) = (end, ours);
                }
                (self.progress)(Progress::Compared { bytes: end, of: have });
            }
        }
        self.kept = self.at;
        Ok(())
    }

    /// How many bytes the receiver has.
    fn have(&mut self) -> Result<u64, SendError> {
        let size = self.source.offer().size;
        match Record::read_first(self.stream)? {
            Record { tag: Tag::Have, number, .. } if number != u32::from(VERSION) => {
                Err(PeerError::Version { theirs: number }.into())
            }
            Record { tag: Tag::Have, value, .. } if value <= size => Ok(value),
            Record { tag: Tag::Have, value, .. } => {
                Err(Violation::Position { tag: Tag::Have, found: value, from: 0, to: size }.into())
            }
            other => Err(stopped_by(other)),
        }
    }

    /// Of what the receiver has up to `end`, as it says.
    fn block_checksum(&mut self, end: u64) -> Result<Checksum, SendError> {
        match Record::read(self.stream)? {
            Record { tag: Tag::Kept, value, checksum, .. } if value == end => Ok(checksum),
            Record { tag: Tag::Kept, value, .. } => {
                Err(Violation::Position { tag: Tag::Kept, found: value, from: end, to: end }.into())
            }
            other => Err(stopped_by(other)),
        }
    }

    /// Of the file up to `end`, going on from a place whose checksum is known.
    fn checksum_between(&self, from: (u64, Checksum), end: u64, buffer: &mut [u8]) -> Result<Checksum, SendError> {
        let (mut at, mut checksum) = from;
        while at < end {
            let piece = piece_of(buffer, end - at);
            self.source.read(piece, at)?;
            checksum = checksum.then(piece);
            at += piece.len() as u64;
        }
        Ok(checksum)
    }

    /// Sends the file from here to its end.
    fn pour(&mut self) -> Result<(), SendError> {
        let size = self.source.offer().size;
        // A record and its piece are one write.
        let mut buffer = vec![0; RECORD_BYTES + PIECE_BYTES];
        while self.at < size {
            while self.at - self.kept >= AHEAD_BYTES_MAX {
                self.await_report()?;
            }
            let piece = piece_of(&mut buffer[RECORD_BYTES..], size - self.at);
            self.source.read(piece, self.at)?;
            self.checksum = self.checksum.then(piece);
            let bytes = piece.len();
            let record = Record { tag: Tag::Data, number: bytes as u32, value: self.at, checksum: self.checksum };
            buffer[..RECORD_BYTES].copy_from_slice(&record.encode());
            self.stream.write_all(&buffer[..RECORD_BYTES + bytes]).map_err(PeerError::from)?;
            self.at += bytes as u64;
            (self.progress)(Progress::Moved { bytes: self.at, of: size });
        }
        Ok(())
    }

    /// That what was sent is what the file was at one moment.
    ///
    /// If no process could write to the file, it was so all the while. Otherwise the file is read once more: a byte that
    /// is the same before and after the moment between the two passes was so at that moment, unless it was changed and
    /// changed back.
    fn verify(&mut self) -> Result<(), SendError> {
        if !self.watch.saw_no_writer() {
            let mut buffer = vec![0; PIECE_BYTES];
            let mut again = (0, Checksum::EMPTY);
            while again.0 < self.at {
                let end = self.at.min(again.0 + BLOCK_BYTES);
                again = (end, self.checksum_between(again, end, &mut buffer)?);
                (self.progress)(Progress::Verified { bytes: end, of: self.at });
            }
            if again.1 != self.checksum {
                return Err(self.source.changed());
            }
        }
        // Of an empty file, and of one that the receiver has already, no piece was read.
        self.source.check_end()
    }

    fn await_report(&mut self) -> Result<(), SendError> {
        let record = Record::read(self.stream)?;
        self.handle_report(record)
    }

    fn handle_report(&mut self, record: Record) -> Result<(), SendError> {
        match record {
            Record { tag: Tag::Kept, value, .. } if (self.kept + 1..=self.at).contains(&value) => {
                self.kept = value;
                Ok(())
            }
            Record { tag: Tag::Kept, value, .. } => {
                Err(Violation::Position { tag: Tag::Kept, found: value, from: self.kept + 1, to: self.at }.into())
            }
            other => Err(stopped_by(other)),
        }
    }

    fn await_confirmation(&mut self) -> Result<(), SendError> {
        loop {
            match Record::read(self.stream) {
                Ok(Record { tag: Tag::Done, checksum, .. }) if checksum == self.checksum => return Ok(()),
                Ok(Record { tag: Tag::Done, .. }) => {
                    return Err(Violation::Checksum { tag: Tag::Done, bytes: self.at }.into());
                }
                Ok(record) => self.handle_report(record)?,
                Err(error) => return Err(SendError::Unconfirmed { error }),
            }
        }
    }

    /// Tells the receiver why it is over; or finds out from it, since its word says more than a write that
    /// failed because it is gone.
    fn explain(&mut self, error: SendError) -> SendError {
        if let Some(reason) = error.reason() {
            // A receiver that cannot hear it sees that the connection ends.
            let _ = Record::stop(reason).write(self.stream);
        }
        if !matches!(error, SendError::Peer(PeerError::Lost { .. })) {
            return error;
        }
        while let Ok(record) = Record::read(self.stream) {
            if record.tag == Tag::Stop {
                return stopped_by(record);
            }
        }
        error
    }
}

/// What a record means that is none of those that were due.
fn stopped_by(record: Record) -> SendError {
    record.reason().map_or_else(SendError::from, |reason| SendError::Stopped { reason })
}
