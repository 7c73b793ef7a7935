//! Where the registry of a user listens while another user keeps its name from it: in a folder that only its user can write.
//!
//! An abstract name belongs to the process that takes it first, of whatever user. So there is a second place, which
//! claims ask when the name is not their registry's.

use super::RegistryError;
use crate::claim::{Folder, connect_at, refuge, trusted};
use highwire_mem::network_namespace;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A socket in such a folder, removed with this.
#[derive(Debug)]
pub(super) struct Refuge {
    path: PathBuf,
    /// Inode of the socket: by the end the name may be another registry's.
    inode: u64,
}

impl Refuge {
    /// Binds the listener in the first folder that there is.
    pub(super) fn bind(listener: &OwnedFd, user: u32) -> Result<Refuge, RegistryError> {
        let namespace = network_namespace(listener.as_fd()).map_err(RegistryError::Listen)?;
        let mut failed = Errno::NOENT;
        for folder in Folder::of(user) {
            let mut name = [0; 96];
            match Refuge::bind_at(listener, user, *folder, refuge(*folder, user, namespace, &mut name)) {
                Err(RegistryError::Listen(errno)) => failed = errno,
                bound => return bound,
            }
        }
        Err(RegistryError::Listen(failed))
    }

    fn bind_at(listener: &OwnedFd, user: u32, folder: Folder, name: &CStr) -> Result<Refuge, RegistryError> {
        let path = PathBuf::from(name.to_str().unwrap_or_default());
        let listen = |error: std::io::Error| RegistryError::Listen(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        let within = path.parent().unwrap_or(Path::new("/"));
        if let Some(mode) = folder.made_with() {
            match DirBuilder::new().mode(mode).create(within) {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(listen(error)),
                _ => {}
            }
        }
        let metadata = std::fs::symlink_metadata(within).map_err(listen)?;
        if !metadata.is_dir() || metadata.uid() != user || metadata.mode() & 0o022 != 0 {
            return Err(RegistryError::Listen(Errno::PERM));
        }
        let _lock = lock(within)?;
        let address = rustix::net::SocketAddrUnix::new(name).map_err(RegistryError::Listen)?;
        if connect_at(&address).and_then(|registry| trusted(registry, user)).is_ok() {
            return Err(RegistryError::Running);
        }
        remove_left(within);
        rustix::net::bind(listener, &address).map_err(RegistryError::Listen)?;
        // Whose it is they see by the peer's credentials; who may ask is decided there, too.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).map_err(listen)?;
        let inode = std::fs::symlink_metadata(&path).map_err(listen)?.ino();
        Ok(Refuge { path, inode })
    }
}

/// Removes sockets that registries left when they were killed, of this network and of others.
fn remove_left(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_refuge = entry.file_name().to_string_lossy().starts_with("highwire-lanes-");
        let address = rustix::net::SocketAddrUnix::new(entry.path());
        let is_left = address.is_ok_and(|address| connect_at(&address).is_err_and(|errno| errno == Errno::CONNREFUSED));
        if is_refuge && is_left {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

impl Drop for Refuge {
    fn drop(&mut self) {
        let Some(Ok(_lock)) = self.path.parent().map(lock) else { return };
        if std::fs::symlink_metadata(&self.path).is_ok_and(|there| there.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Others that begin or end there wait for it.
fn lock(folder: &Path) -> Result<OwnedFd, RegistryError> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let folder = rustix::fs::open(folder, flags, Mode::empty()).map_err(RegistryError::Listen)?;
    rustix::fs::flock(&folder, FlockOperation::LockExclusive).map_err(RegistryError::Listen)?;
    Ok(folder)
}
