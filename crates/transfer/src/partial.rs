//! A file that is not whole yet: `NAME.part`, until it is, and gets its name.

use crate::checksum::Checksum;
use crate::destination::directory_of;
use crate::error::ReceiveError;
use crate::format::{BLOCK_BYTES, Offer, PIECE_BYTES, piece_of};
use crate::source::kind;
use crate::writer_watch::is_being_written;
use rustix::fs::{CWD, OFlags, RenameFlags, XattrFlags, fgetxattr, fremovexattr, fsetxattr, renameat_with};
use rustix::io::Errno;
use std::fs::{self, File, Metadata, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// What there is of a file. Nobody else receives it as long as this lives.
pub(crate) struct Partial {
    path: PathBuf,
    /// What it is called once it is whole.
    whole: PathBuf,
    file: File,
    /// Bytes in it that may be the beginning of the file.
    have: u64,
    /// Bytes in it that must not be lost, since it is not known to be a receiver's.
    guarded: u64,
}

impl Partial {
    /// What an earlier attempt left of `whole`, or an empty file.
    pub(crate) fn open(whole: PathBuf, offer: &Offer) -> Result<Partial, ReceiveError> {
        let mut name = whole.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let path = whole.with_file_name(name);
        refuse_what_is_being_written(&path)?;
        let file = open_locked(&path, offer.mode)?;
        let there = file.metadata().map_err(|error| ReceiveError::write(&path, 0, error))?.len();
        let guarded = if is_receivers(&path, &file, there)? { 0 } else { there };
        Ok(Partial { path, whole, file, have: there.min(offer.size), guarded })
    }

    /// Bytes that an earlier attempt left.
    pub(crate) fn have(&self) -> u64 {
        self.have
    }

    /// Reads what is there, and says after each piece how far it is; where a block ends, also the checksum up to
    /// there.
    pub(crate) fn read_blocks(
        &self,
        mut each: impl FnMut(u64, Option<Checksum>) -> Result<(), ReceiveError>,
    ) -> Result<(), ReceiveError> {
        let mut buffer = vec![0; PIECE_BYTES];
        let (mut at, mut checksum) = (0, Checksum::EMPTY);
        while at < self.have {
            let piece = piece_of(&mut buffer, self.have - at);
            self.file.read_exact_at(piece, at).map_err(|error| self.failed(at, error))?;
            checksum = checksum.then(piece);
            at += piece.len() as u64;
            let ends = at == self.have || at.is_multiple_of(BLOCK_BYTES);
            each(at, ends.then_some(checksum))?;
        }
        Ok(())
    }

    /// Forgets everything behind the first `bytes`, and has nobody read the rest who may not read the file. Until here
    /// nothing has changed.
    pub(crate) fn truncate(&self, bytes: u64, offer: &Offer) -> Result<(), ReceiveError> {
        if bytes < self.guarded {
            return Err(ReceiveError::ForeignPart { path: self.path.clone() });
        }
        let failed = |error| self.failed(bytes, error);
        let mode = self.file.metadata().map_err(failed)?.mode();
        // If the file belongs to another user, that user decides.
        let _ = self.file.set_permissions(Permissions::from_mode(mode & (offer.mode | 0o600)));
        self.file.set_len(bytes).map_err(failed)
    }

    /// Writes `piece` at byte `at`, where the file ends. Zeros become a hole, which takes no room on the disk.
    pub(crate) fn append(&self, piece: &[u8], at: u64) -> Result<(), ReceiveError> {
        let written = match piece.chunks(ZEROS.len()).all(|chunk| chunk == &ZEROS[..chunk.len()]) {
            true => self.file.set_len(at + piece.len() as u64),
            false => self.file.write_all_at(piece, at),
        };
        written.map_err(|error| self.failed(at, error))
    }

    /// Gives the file its permissions, its time and its name, all of it being there.
    pub(crate) fn finish(self, offer: &Offer, replace: bool, sync: bool) -> Result<PathBuf, ReceiveError> {
        let failed = |error| self.failed(offer.size, error);
        if let Some(modified) = offer.modified() {
            self.file.set_modified(modified).map_err(failed)?;
        }
        if sync {
            self.file.sync_all().map_err(failed)?;
        }
        self.rename(replace)?;
        // A crash before this leaves a mark that nobody looks for under this name. The file need not have one.
        let _ = fremovexattr(&self.file, MARK);
        // Now, since until now another attempt would have had to open it. It was created with the sender's bits, less
        // those that the user's umask forbids, but writable.
        let writable = self.file.metadata().map_err(failed)?.permissions();
        self.file.set_permissions(Permissions::from_mode(writable.mode() & offer.mode)).map_err(failed)?;
        if sync {
            self.file.sync_all().map_err(failed)?;
            let directory = directory_of(&self.whole);
            let synced = File::open(&directory).and_then(|directory| directory.sync_all());
            synced.map_err(|error| ReceiveError::write(&directory, offer.size, error))?;
        }
        Ok(self.whole)
    }

    fn rename(&self, replace: bool) -> Result<(), ReceiveError> {
        // A name is no file: somebody may have removed ours, and another may be there. Both before and after, since it
        // may be in between.
        self.check_is_at(&self.path)?;
        let renamed = if replace { fs::rename(&self.path, &self.whole) } else { rename_new(&self.path, &self.whole) };
        renamed.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => ReceiveError::Exists { path: self.whole.clone() },
            _ => ReceiveError::write(&self.whole, self.have, error),
        })?;
        self.check_is_at(&self.whole)
    }

    fn check_is_at(&self, path: &Path) -> Result<(), ReceiveError> {
        let opened = self.file.metadata().map_err(|error| self.failed(self.have, error))?;
        if is_at(path, &opened) { Ok(()) } else { Err(ReceiveError::Busy { path: path.into() }) }
    }

    fn failed(&self, written: u64, error: io::Error) -> ReceiveError {
        ReceiveError::write(&self.path, written, error)
    }
}

/// Opens or creates the file at `path`, for this process alone.
fn open_locked(path: &Path, mode: u32) -> Result<File, ReceiveError> {
    let failed = |error| ReceiveError::write(path, 0, error);
    // Neither through a link that somebody put there, nor waiting for the other end of a pipe.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).mode(mode | 0o600).custom_flags(flags);
    let file = options.open(path).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP) => ReceiveError::NotReplaceable { path: path.into(), what: "a symbolic link" },
        Some(Errno::ISDIR) => ReceiveError::NotReplaceable { path: path.into(), what: "a directory" },
        _ => failed(error),
    })?;
    let opened = file.metadata().map_err(failed)?;
    if !opened.is_file() {
        return Err(ReceiveError::NotReplaceable { path: path.into(), what: kind(opened.file_type()) });
    }
    if opened.nlink() > 1 {
        return Err(ReceiveError::NotReplaceable { path: path.into(), what: "a file that has another name, too" });
    }
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(ReceiveError::Busy { path: path.into() }),
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    // Whoever had the lock until now may have made it the whole file, which is not ours to write to.
    if !is_at(path, &opened) {
        return Err(ReceiveError::Busy { path: path.into() });
    }
    Ok(file)
}

/// An empty file without a mark has nothing to lose, unless another program has just made it and is about to write it.
fn refuse_what_is_being_written(path: &Path) -> Result<(), ReceiveError> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    // What cannot be read is found when it is opened to be written.
    let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(path) else { return Ok(()) };
    let empty = file.metadata().is_ok_and(|found| found.is_file() && found.len() == 0);
    if empty && fgetxattr(&file, MARK, &mut [0; 1]) == Err(Errno::NODATA) && is_being_written(&file) {
        return Err(ReceiveError::ForeignPart { path: path.into() });
    }
    Ok(())
}

/// True if a receiver made this file, with `there` bytes in it now: it is marked, or it is empty and marked now. A file
/// that could have a mark and has none is another program's. False where the file system has no marks.
fn is_receivers(path: &Path, file: &File, there: u64) -> Result<bool, ReceiveError> {
    let marked = match fgetxattr(file, MARK, &mut [0; 1]) {
        Err(Errno::NODATA) if there == 0 => fsetxattr(file, MARK, b"1", XattrFlags::empty()),
        marked => marked.map(|_| ()),
    };
    match marked {
        Ok(()) => Ok(true),
        Err(Errno::NODATA) => Err(ReceiveError::ForeignPart { path: path.into() }),
        Err(Errno::NOTSUP) => Ok(there == 0),
        Err(errno) => Err(ReceiveError::write(path, 0, errno.into())),
    }
}

/// That the file of this description is the one at `path`.
fn is_at(path: &Path, opened: &Metadata) -> bool {
    fs::symlink_metadata(path).is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino()))
}

/// Renames, but replaces nothing.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // File systems of a network often cannot; a link replaces nothing either.
        Err(Errno::INVAL | Errno::NOSYS) => {
            fs::hard_link(from, to)?;
            fs::remove_file(from)
        }
        renamed => Ok(renamed?),
    }
}

/// What a page is compared with: content that is not zero differs from it at its first bytes.
const ZEROS: [u8; 4096] = [0; 4096];
/// An extended attribute of every file that a receiver made, until the file is whole.
const MARK: &str = "user.highwire.part";
