//! A mapped file whose pages can be put out of memory: what the memory of other nodes is measured beside.

use crate::sys::Mapping;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io;

/// How a mapped file will be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// One page here, one there: the kernel reads no others with it.
    Random,
    /// From one end to the other: the kernel reads ahead.
    Sequential,
}

/// A file, mapped to be read. It must be nobody else's: if another process made it shorter, reading beyond its new end
/// would end this one.
#[derive(Debug)]
pub struct MappedFile {
    file: File,
    mapping: Mapping,
}

impl MappedFile {
    /// Maps all of it.
    pub fn of(file: File) -> io::Result<MappedFile> {
        let length = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mapping = Mapping::of(&file, length, false)?;
        Ok(MappedFile { file, mapping })
    }

    /// Its bytes.
    #[expect(clippy::len_without_is_empty, reason = "what is empty cannot be mapped")]
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Tells the kernel how it will be read.
    pub fn advise(&self, reading: Reading) -> io::Result<()> {
        self.advise_memory(match reading {
            Reading::Random => rustix::mm::Advice::Random,
            Reading::Sequential => rustix::mm::Advice::Sequential,
        })
    }

    /// Puts its pages out of this process and out of the kernel's cache, but for those that are not on the disk yet, or
    /// just being read.
    pub fn forget(&self) -> io::Result<()> {
        // Pages that are mapped stay in the cache.
        self.advise_memory(rustix::mm::Advice::LinuxDontNeed)?;
        Ok(fadvise(&self.file, 0, None, Advice::DontNeed)?)
    }

    /// How many of its pages are in memory.
    pub fn resident_pages(&self) -> io::Result<usize> {
        let mut pages = vec![0u8; self.len().div_ceil(rustix::param::page_size())];
        // SAFETY: the kernel writes a byte for each page of the mapping, which begins on a page, and no more.
        let told = unsafe { libc::mincore(self.mapping.base().cast(), self.len(), pages.as_mut_ptr()) };
        if told != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(pages.into_iter().filter(|page| page & 1 == 1).count())
    }

    /// Copies bytes of it from place `at` on, for which the kernel reads what is not in memory.
    ///
    /// # Panics
    ///
    /// If it has fewer.
    #[inline]
    pub fn copy_to(&self, at: usize, into: &mut [u8]) {
        assert!(at.checked_add(into.len()).is_some_and(|end| end <= self.len()), "that is beyond the end of the file");
        // SAFETY: the range was checked to be inside the mapping, and nothing of this process is both. The file may be
        // written meanwhile.
        unsafe { crate::copy::copy_out(self.mapping.base().add(at), into.as_mut_ptr(), into.len()) };
    }

    fn advise_memory(&self, advice: rustix::mm::Advice) -> io::Result<()> {
        // SAFETY: the pages are those of a file that is only read here, and come back from there as they were.
        let advised = unsafe { rustix::mm::madvise(self.mapping.base().cast(), self.len(), advice) };
        Ok(advised?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, Mode, OFlags, openat};
    use std::io::Write;
    use std::path::Path;

    fn nameless(directory: &Path) -> File {
        openat(CWD, directory, OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR | Mode::WUSR).unwrap().into()
    }

    #[test]
    fn what_was_forgotten_is_read_again() {
        // Of a directory on a disk, since a file in memory cannot be forgotten.
        let mut file = nameless(Path::new(env!("CARGO_MANIFEST_DIR")));
        let contents: Vec<u8> = (0..3 << 20).map(|place| (place / 4096) as u8).collect();
        file.write_all(&contents).unwrap();
        file.sync_all().unwrap();
        let mapped = MappedFile::of(file).unwrap();
        assert_eq!(mapped.len(), contents.len());
        let mut read = vec![0; 1 << 20];
        mapped.copy_to(1 << 20, &mut read);
        assert_eq!(read, contents[1 << 20..2 << 20]);
        assert!(mapped.resident_pages().unwrap() >= 256);
        let began = std::time::Instant::now();
        while mapped.resident_pages().unwrap() > 0 {
            assert!(began.elapsed().as_secs() < 10, "the kernel keeps them");
            mapped.forget().unwrap();
        }
        mapped.advise(Reading::Random).unwrap();
        mapped.copy_to(2 << 20, &mut read[..100]);
        assert_eq!(read[..100], contents[2 << 20..][..100]);
        assert_eq!(mapped.resident_pages().unwrap(), 1);
        mapped.advise(Reading::Sequential).unwrap();
        mapped.copy_to(contents.len(), &mut []);
    }

    #[test]
    #[should_panic(expected = "beyond the end")]
    fn nothing_is_read_beyond_the_end() {
        let mut file = nameless(&std::env::temp_dir());
        file.write_all(&[1; 4096]).unwrap();
        MappedFile::of(file).unwrap().copy_to(4090, &mut [0; 7]);
    }
}
