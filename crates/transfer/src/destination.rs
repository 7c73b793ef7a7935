//! Where a received file goes.

use crate::error::ReceiveError;
use crate::format::FileName;
use crate::source::kind;
use rustix::fs::Access;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Where a received file goes, and what may become of one that is there.
#[derive(Clone, Debug)]
pub struct Destination {
    place: Place,
    replace: bool,
    sync: bool,
}

#[derive(Clone, Debug)]
enum Place {
    Directory(PathBuf),
    File(PathBuf),
}

impl Destination {
    /// Into this directory, by the name that the sender says.
    pub fn directory(directory: impl Into<PathBuf>) -> Destination {
        Destination { place: Place::Directory(directory.into()), replace: false, sync: false }
    }

    /// To this file, whatever the sender calls it.
    pub fn file(file: impl Into<PathBuf>) -> Destination {
        Destination { place: Place::File(file.into()), replace: false, sync: false }
    }

    /// Whether a file that is there is replaced. Without this it is an error.
    #[must_use]
    pub fn replace(self, replace: bool) -> Destination {
        Destination { replace, ..self }
    }

    /// Whether the file is on the disk, and not only in the kernel's memory, before the sender is told.
    #[must_use]
    pub fn sync(self, sync: bool) -> Destination {
        Destination { sync, ..self }
    }

    /// Says now what would be wrong later, as far as that can be known before a sender comes.
    pub fn check(&self) -> Result<(), ReceiveError> {
        match &self.place {
            Place::Directory(directory) => is_directory(directory),
            // A name with a slash behind it is that of a directory.
            Place::File(file) if file.as_os_str().as_bytes().ends_with(b"/") => {
                Err(ReceiveError::NoDirectory { path: file.clone() })
            }
            Place::File(file) if file.file_name().is_some_and(|name| name.len() > NAME_BYTES_MAX) => {
                Err(ReceiveError::write(file, 0, rustix::io::Errno::NAMETOOLONG.into()))
            }
            Place::File(file) => {
                is_directory(&directory_of(file))?;
                self.allows(file)
            }
        }
    }

    /// The path of a file that the sender calls `name`.
    pub(crate) fn path(&self, name: &FileName) -> Result<PathBuf, ReceiveError> {
        self.check()?;
        match &self.place {
            Place::Directory(directory) => {
                let path = directory.join(name.as_str());
                self.allows(&path)?;
                Ok(path)
            }
            Place::File(file) => Ok(file.clone()),
        }
    }

    pub(crate) fn replaces(&self) -> bool {
        self.replace
    }

    pub(crate) fn syncs(&self) -> bool {
        self.sync
    }

    /// That a file may be put at `path`.
    fn allows(&self, path: &Path) -> Result<(), ReceiveError> {
        let found = match fs::symlink_metadata(path) {
            Ok(found) => found.file_type(),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(ReceiveError::write(path, 0, error)),
        };
        // A rename would take the place of a device, too.
        if !found.is_file() && !found.is_symlink() {
            return Err(ReceiveError::NotReplaceable { path: path.into(), what: kind(found) });
        }
        if self.replace { Ok(()) } else { Err(ReceiveError::Exists { path: path.into() }) }
    }
}

/// What file systems take, less `.part`.
const NAME_BYTES_MAX: usize = 250;

/// Where the entry of `file` is.
pub(crate) fn directory_of(file: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn is_directory(path: &Path) -> Result<(), ReceiveError> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => {
            let allowed = rustix::fs::access(path, Access::WRITE_OK | Access::EXEC_OK);
            allowed.map_err(|errno| ReceiveError::write(path, 0, errno.into()))
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(ReceiveError::write(path, 0, error)),
        _ => Err(ReceiveError::NoDirectory { path: path.into() }),
    }
}
