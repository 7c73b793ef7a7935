//! Page-aligned frames of one size, handed out and taken back one by one.

use crate::region::{Buffer, Region, RegionError, Tag};

const PAGE: usize = 4096;

/// Why the pool has no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("all {frames} frames of the pool are in use; wait for completions to bring some back")]
pub struct PoolError {
    /// Frames that the pool has in all.
    pub frames: usize,
}

/// A pool of registered frames. A frame returns when its buffer, or the last count of it, is dropped.
#[derive(Clone, Debug)]
pub struct Pool {
    region: Region,
    frames: usize,
}

impl Pool {
    /// `frames` frames of at least `bytes` bytes each, in whole pages.
    pub fn create(bytes: usize, frames: usize, tag: Tag) -> Result<Pool, RegionError> {
        let size = bytes.max(1).next_multiple_of(PAGE);
        Ok(Pool { region: Region::create_frames(size, frames, tag)?, frames })
    }

    /// A frame, whose content is whatever its last user left.
    pub fn frame(&self) -> Result<Buffer, PoolError> {
        self.region.frame().ok_or(PoolError { frames: self.frames })
    }

    /// Frames that are free now.
    pub fn free(&self) -> usize {
        self.region.frames_free()
    }

    /// Frames in all.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// The region they are cut from.
    pub fn region(&self) -> &Region {
        &self.region
    }
}
