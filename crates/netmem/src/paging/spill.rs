//! A file for pages that the store has no room for. It has no name, and is gone with the region.

use super::PagingError;
use super::store::{PAGE_BYTES, PageError};
use super::sys::Run;
use rustix::fd::OwnedFd;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use std::path::Path;

/// Every page has its place at its own offset; the file has holes where no page is.
#[derive(Debug)]
pub(super) struct Spill {
    file: OwnedFd,
}

impl Spill {
    pub(super) fn create(directory: &Path) -> Result<Spill, PagingError> {
        let failed = |errno: Errno| PagingError::Spill { directory: directory.into(), errno: errno.raw_os_error() };
        let owner = Mode::RUSR | Mode::WUSR;
        let unnamed = rustix::fs::open(directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, owner);
        let file = match unnamed {
            // File systems that know no files without names.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => named_then_unlinked(directory).map_err(failed)?,
            file => file.map_err(failed)?,
        };
        Ok(Spill { file })
    }

    /// Reads pages. Only system calls: it is called in signal handlers too.
    pub(super) fn read(&self, first: u64, into: &mut [u8]) -> Result<(), PageError> {
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&self.file, &mut into[done..], first * PAGE_BYTES as u64 + done as u64) {
                // A page that is read here was written here, so the file is long enough.
                Ok(0) => return Err(PageError::Lost { page: first + (done / PAGE_BYTES) as u64 }),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => {
                    let page = first + (done / PAGE_BYTES) as u64;
                    return Err(PageError::Spill { page, errno: errno.raw_os_error() });
                }
            }
        }
        Ok(())
    }

    /// Writes pages, all of them or, with an error, not to be relied upon.
    pub(super) fn write(&self, first: u64, content: &[u8]) -> Result<(), PageError> {
        let mut done = 0;
        while done < content.len() {
            match rustix::io::pwrite(&self.file, &content[done..], first * PAGE_BYTES as u64 + done as u64) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(PageError::Spill { page: first, errno: errno.raw_os_error() }),
            }
        }
        Ok(())
    }

    /// Gives the room of these pages back, where the file system can; otherwise they keep it until they spill again.
    pub(super) fn release(&self, run: Run) {
        let (at, bytes) = (run.first * PAGE_BYTES as u64, run.bytes() as u64);
        let _ = rustix::fs::fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, bytes);
    }
}

fn named_then_unlinked(directory: &Path) -> Result<OwnedFd, Errno> {
    let mut attempt = 0;
    loop {
        let path = directory.join(format!("highwire-spill-{}-{attempt}", std::process::id()));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST) if attempt < 1000 => attempt += 1,
            file => {
                let file = file?;
                rustix::fs::unlink(&path)?;
                return Ok(file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_from_a_file_without_a_name() {
        let directory = tempfile::tempdir().unwrap();
        let spill = Spill::create(directory.path()).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        spill.write(5, &[7; 2 * PAGE_BYTES]).unwrap();
        let mut page = [0; PAGE_BYTES];
        spill.read(6, &mut page).unwrap();
        assert_eq!(page, [7; PAGE_BYTES]);
        assert_eq!(spill.read(7, &mut page), Err(PageError::Lost { page: 7 }));
        spill.release(Run { first: 5, pages: 1 });
    }

    #[test]
    fn a_file_with_a_name_loses_it() {
        let directory = tempfile::tempdir().unwrap();
        named_then_unlinked(directory.path()).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = Spill::create(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
    }
}
