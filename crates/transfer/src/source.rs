//! The file that is sent.

use crate::error::SendError;
use crate::format::{FileName, Offer};
use crate::writer_watch::WriterWatch;
use rustix::fs::OFlags;
use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A regular file, open, as it was when it was opened: what is read later is that, or an error.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: File,
    offer: Offer,
}

impl Source {
    /// The file at `path`.
    pub fn open(path: &Path) -> Result<Source, SendError> {
        let unreadable = |error| SendError::Read { path: path.into(), error };
        // A pipe that nobody writes to would keep us waiting before we see that it is one.
        let opened = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path);
        let file = opened.map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?;
        if !found.is_file() {
            return Err(SendError::NotRegular { path: path.into(), what: kind(found.file_type()) });
        }
        let name = path.file_name().unwrap_or_default();
        let name = FileName::new(name.as_bytes()).map_err(|error| SendError::Name { path: path.into(), error })?;
        let offer = Offer { name, size: found.len(), modified: modified(&found), mode: found.mode() & 0o777 };
        Ok(Source { path: path.into(), file, offer })
    }

    /// What the receiver is told of it.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Watches for processes that write to it, from now on.
    pub(crate) fn watch(&self) -> WriterWatch<'_> {
        WriterWatch::begin(&self.file)
    }

    /// Fills `piece` from byte `at` on, if the file is still the one that was opened.
    pub(crate) fn read(&self, piece: &mut [u8], at: u64) -> Result<(), SendError> {
        match self.file.read_exact_at(piece, at) {
            Ok(()) => self.check(),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(self.changed()),
            Err(error) => Err(self.unreadable(error)),
        }
    }

    /// That nobody has written to it.
    pub(crate) fn check(&self) -> Result<(), SendError> {
        let now = self.file.metadata().map_err(|error| self.unreadable(error))?;
        let same = now.len() == self.offer.size && modified(&now) == self.offer.modified;
        if same { Ok(()) } else { Err(self.changed()) }
    }

    /// That it ends where it is said to: files that the kernel makes up when they are read often do not.
    pub(crate) fn check_end(&self) -> Result<(), SendError> {
        match self.file.read_at(&mut [0], self.offer.size) {
            Ok(0) => self.check(),
            Ok(_) => Err(self.changed()),
            Err(error) => Err(self.unreadable(error)),
        }
    }

    pub(crate) fn changed(&self) -> SendError {
        SendError::Changed { path: self.path.clone() }
    }

    fn unreadable(&self, error: io::Error) -> SendError {
        SendError::Read { path: self.path.clone(), error }
    }
}

fn modified(found: &Metadata) -> (i64, u32) {
    (found.mtime(), found.mtime_nsec() as u32)
}

/// What it is, for somebody who took it for a file.
pub(crate) fn kind(found: FileType) -> &'static str {
    match found {
        found if found.is_dir() => "a directory",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        found if found.is_symlink() => "a symbolic link",
        _ => "a device",
    }
}
