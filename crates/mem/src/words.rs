//! A few words that two processes both write: for measuring, and for keeping step in tests.

use crate::memory::{SharedMemory, View};
use crate::region::RegionError;
use crate::sys::{self, Mapping};
use rustix::fs::SealFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

const WORD_STRIDE: usize = 128;

/// Words of 64 bits, each on cache lines of its own, in memory that both sides may write.
#[derive(Debug)]
pub struct Words {
    memory: SharedMemory,
    fd: OwnedFd,
}

impl Words {
    /// `count` words at zero.
    pub fn create(count: usize) -> Result<Words, RegionError> {
        let fd = sys::memfd(count * WORD_STRIDE).map_err(RegionError::Create)?;
        sys::seal(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(RegionError::Create)?;
        Words::adopt(fd, count)
    }

    /// The words behind a descriptor that came from [`Words::create`] elsewhere.
    pub fn adopt(fd: OwnedFd, count: usize) -> Result<Words, RegionError> {
        let len = count * WORD_STRIDE;
        crate::region::check_seals(&fd, len as u64, SealFlags::SHRINK | SealFlags::GROW)?;
        let mapping = Mapping::of(&fd, len, true).map_err(RegionError::Map)?;
        Ok(Words { memory: SharedMemory(View::new(Arc::new(mapping))), fd })
    }

    /// Reads word `index`.
    #[inline]
    pub fn load(&self, index: usize) -> u64 {
        self.memory.load64(index * WORD_STRIDE)
    }

    /// Writes word `index`.
    #[inline]
    pub fn store(&self, index: usize, value: u64) {
        self.memory.store64(index * WORD_STRIDE, value);
    }
}

impl AsFd for Words {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
