//! Memory that its owner fills and takes back page by page, while others read it.

use crate::memory::{OwnMemory, PeerMemory, View};
use crate::region::{RegionError, SEALS_EXPORTED, check_seals, check_size};
use crate::sys::{self, Mapping};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A region that this process alone writes and that others map to read, whose pages take memory only from
/// [`populate`](LentRegion::populate) until [`give_back`](LentRegion::give_back).
///
/// The seal that keeps all others from writing (future-write, which an [`OwnRegion`](crate::OwnRegion) has) also
/// keeps everybody from giving pages back, the owner included. So the promise is made in another way: others get a
/// descriptor that was opened to read only, and the file's mode lets nobody open it again to write. That holds
/// against processes of other users. A process of the same user, or of root, could change the mode, but the kernel
/// lets it write the owner's memory by other means as well. The seals against cutting it short are there as always, for
/// the readers' sake.
pub struct LentRegion {
    memory: OwnMemory,
    fd: OwnedFd,
}

impl LentRegion {
    /// `bytes` of new memory that reads as zero, in which nothing is populated.
    pub fn create(bytes: usize) -> Result<LentRegion, RegionError> {
        let len = check_size(bytes as u64, 1 << 47)?;
        let fd = sys::memfd(len).map_err(RegionError::Create)?;
        rustix::fs::fchmod(&fd, Mode::RUSR).map_err(|errno| RegionError::Create(errno.into()))?;
        sys::seal(&fd, SEALS_EXPORTED).map_err(RegionError::Create)?;
        let mapping = Mapping::of(&fd, len, true).map_err(RegionError::Map)?;
        Ok(LentRegion { memory: OwnMemory(View::new(Arc::new(mapping))), fd })
    }

    /// The memory. What is written where nothing was populated takes memory then, or ends the process if there is none.
    pub fn memory(&self) -> &OwnMemory {
        &self.memory
    }

    /// Takes memory for a range, so that writing to it cannot fail any more. Where there is none, this fails instead.
    pub fn populate(&self, at: usize, bytes: usize) -> io::Result<()> {
        self.check(at, bytes);
        Ok(rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, at as u64, bytes as u64)?)
    }

    /// Gives the memory of whole pages back; they read as zero afterwards, for everybody.
    pub fn give_back(&self, at: usize, bytes: usize) -> io::Result<()> {
        self.check(at, bytes);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.fd, punch, at as u64, bytes as u64)?)
    }

    /// A descriptor for others, which can only read. It needs /proc.
    pub fn to_read(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    fn check(&self, at: usize, bytes: usize) {
        let len = self.memory.len();
        assert!(at <= len && bytes <= len - at, "offset {at} + {bytes} is outside the region of {len} bytes");
    }
}

impl fmt::Debug for LentRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LentRegion({} bytes)", self.memory.len())
    }
}

impl PeerMemory {
    /// Maps what the owner of a [`LentRegion`] handed over, after checking that it cannot be cut short.
    pub fn borrow(fd: BorrowedFd<'_>, bytes: u64, limit: u64) -> Result<PeerMemory, RegionError> {
        let len = check_size(bytes, limit)?;
        check_seals(fd, bytes, SEALS_EXPORTED)?;
        let mapping = Mapping::of(fd.as_fd(), len, false).map_err(RegionError::Map)?;
        Ok(PeerMemory::of(View::new(Arc::new(mapping))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;

    const BYTES: usize = 1 << 20;

    fn blocks(region: &LentRegion) -> i64 {
        rustix::fs::fstat(&region.fd).unwrap().st_blocks
    }

    #[test]
    fn pages_take_memory_when_populated_and_lose_it_when_given_back() {
        let region = LentRegion::create(BYTES).unwrap();
        assert_eq!(blocks(&region), 0);
        region.populate(4096, 8192).unwrap();
        let populated = blocks(&region);
        assert!(populated >= 16, "{populated} blocks of 512 bytes");
        region.memory().copy_in(4096, b"here");
        let reader = PeerMemory::borrow(region.to_read().unwrap().as_fd(), BYTES as u64, u64::MAX).unwrap();
        let mut found = [0; 4];
        reader.copy_out(4096, &mut found);
        assert_eq!(&found, b"here");
        region.give_back(4096, 8192).unwrap();
        reader.copy_out(4096, &mut found);
        assert_eq!(found, [0; 4]);
        assert!(blocks(&region) < populated);
        let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| region.populate(BYTES, 1)));
        assert!(outside.is_err());
    }

    #[test]
    fn who_has_the_descriptor_for_readers_can_neither_write_nor_cut_it_short() {
        let region = LentRegion::create(BYTES).unwrap();
        let fd = region.to_read().unwrap();
        assert!(Mapping::of(&fd, BYTES, true).is_err(), "mapped to write");
        let mut file = File::from(fd.try_clone().unwrap());
        assert!(file.write(b"x").is_err());
        assert!(file.set_len(4096).is_err());
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&fd, punch, 0, 4096).is_err());
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o400);
        // Root opens what it likes.
        if !rustix::process::geteuid().is_root() {
            let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
            assert!(File::options().read(true).write(true).open(path).is_err());
        }
    }

    #[test]
    fn memory_that_could_be_cut_short_is_refused() {
        let fd = sys::memfd(BYTES).unwrap();
        let refused = PeerMemory::borrow(fd.as_fd(), BYTES as u64, u64::MAX);
        assert!(matches!(refused, Err(RegionError::Unsealed { .. })));
        let region = LentRegion::create(BYTES).unwrap();
        let fd = region.to_read().unwrap();
        let refused = PeerMemory::borrow(fd.as_fd(), 4096, u64::MAX);
        assert!(matches!(refused, Err(RegionError::WrongSize { .. })));
        let refused = PeerMemory::borrow(fd.as_fd(), BYTES as u64, 4096);
        assert!(matches!(refused, Err(RegionError::SizeLimit { .. })));
    }
}
