//! Whether a file has writers: descriptors opened for writing, and mappings through which it is written.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// True if any process has `file`, a regular one opened for reading, open for writing or mapped to be written. The kernel
/// answers for the owner of the file and for a privileged process, and not on every file system; elsewhere it is an error.
///
/// A shared writable mapping holds the open file that it was made from, so the kernel's count of writers has both. The
/// count is asked for by taking a read lease, which is refused while it is not zero, and giving it back at once. A
/// process that opens the file for writing in the microsecond between waits for that (`EWOULDBLOCK` where it opened with
/// `O_NONBLOCK`).
pub fn has_writers(file: impl AsFd) -> io::Result<bool> {
    let file = file.as_fd().as_raw_fd();
    // SAFETY: these commands take numbers, and change the lease and the signal of this open file, nothing else.
    let control = |command, argument: libc::c_int| match unsafe { libc::fcntl(file, command, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // The process that holds a lease is sent a signal when it is broken. SIGIO would end it; SIGURG is ignored, and a
    // handler of it has to expect that nothing is urgent.
    control(F_SETSIG, libc::SIGURG)?;
    match control(libc::F_SETLEASE, libc::F_RDLCK) {
        Ok(()) => control(libc::F_SETLEASE, libc::F_UNLCK).map(|()| false),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(true),
        Err(error) => Err(error),
    }
}

/// `libc` has it for other systems only.
const F_SETSIG: libc::c_int = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::Mapping;
    use std::fs::File;
    use std::path::PathBuf;

    #[test]
    fn a_writer_is_counted_as_long_as_its_descriptor_or_its_mapping_lives() {
        let path = Removed(PathBuf::from(format!("/dev/shm/highwire-writers-{}", std::process::id())));
        let writer = File::options().read(true).write(true).create_new(true).open(&path.0).unwrap();
        writer.set_len(4096).unwrap();
        let reader = File::open(&path.0).unwrap();
        assert!(has_writers(&reader).unwrap(), "a descriptor");
        let mapping = Mapping::of(&writer, 4096, true).unwrap();
        drop(writer);
        assert!(has_writers(&reader).unwrap(), "a mapping without a descriptor");
        drop(mapping);
        assert!(!has_writers(&reader).unwrap());
        let _readable = Mapping::of(&reader, 4096, false).unwrap();
        assert!(!has_writers(&reader).unwrap(), "a mapping that cannot be written");
        // The lease is gone: another process would wait for it here.
        File::options().write(true).open(&path.0).unwrap();
    }

    #[test]
    fn a_file_that_cannot_have_a_lease_is_an_error() {
        assert!(has_writers(File::open("/dev/null").unwrap()).is_err());
    }

    /// A file that goes with this value.
    struct Removed(PathBuf);

    impl Drop for Removed {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }
}
