//! Where a received file goes.

use crate::error::ReceiveError;
use crate::format::FileName;
use crate::source::kind;
use rustix::fs::Access;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Where a received file goes, and what the sender may do there.
#[derive(Clone, Debug)]
pub struct Destination {
    place: Place,
    force: bool,
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
        Destination { place: Place::Directory(directory.into()), force: false, sync: false }
    }

    /// To this file, whatever the sender calls it.
    pub fn file(file: impl Into<PathBuf>) -> Destination {
        Destination { place: Place::File(file.into()), force: false, sync: false }
    }

    /// Whether the sender may do more than put a new file there: replace one, give it a name that begins with a dot, make
    /// it one that can be executed. Without this the first two are errors, and a file comes without execute permissions.
    #[must_use]
    pub fn force(self, force: bool) -> Destination {
        Destination { force, ..self }
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
                if name.as_str().starts_with('.') && !self.force {
                    return Err(ReceiveError::Hidden { path });
                }
                self.allows(&path)?;
                Ok(path)
            }
            Place::File(file) => Ok(file.clone()),
        }
    }

    pub(crate) fn is_forced(&self) -> bool {
        self.force
    }

    /// The permissions that a file gets of those that the sender asks for.
    pub(crate) fn permitted(&self, mode: u32) -> u32 {
        if self.force { mode } else { mode & !0o111 }
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
        if self.force { Ok(()) } else { Err(ReceiveError::Exists { path: path.into() }) }
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
