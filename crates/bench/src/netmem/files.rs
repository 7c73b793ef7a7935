//! `mapped-file`: a file on a disk, mapped, and out of memory before each trial.

use super::{PAGE_BYTES, Reader, fill};
use crate::BenchError;
use crate::transports::{Contestant, Exercise};
use highwire_mem::{MappedFile, Reading};
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A file without a name: it is gone with this process, however that ends, and nobody else can change it.
#[derive(Debug)]
pub(super) struct ColdFile {
    mapped: MappedFile,
    directory: PathBuf,
    /// What this process had read from devices when a trial began.
    before: u64,
}

impl ColdFile {
    /// Makes it in a directory, or where this process is.
    pub(super) fn make(directory: Option<&Path>, bytes: usize) -> Result<ColdFile, BenchError> {
        let directory = directory.unwrap_or(Path::new(".")).to_owned();
        let failed = |source| BenchError::Report { path: directory.clone(), source };
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = openat(CWD, &directory, flags, Mode::RUSR | Mode::WUSR).map_err(|error| failed(error.into()))?;
        let mut file = File::from(file);
        let mut piece = vec![0; WRITTEN_AT_A_TIME];
        for at in (0..bytes).step_by(WRITTEN_AT_A_TIME) {
            fill(at, &mut piece);
            file.write_all(&piece[..WRITTEN_AT_A_TIME.min(bytes - at)]).map_err(failed)?;
        }
        // What is not on the disk yet cannot be forgotten.
        file.sync_all().map_err(failed)?;
        let mapped = MappedFile::of(file).map_err(failed)?;
        let mut made = ColdFile { mapped, directory, before: 0 };
        made.prepare(Exercise::RandomPages)?;
        // Some file systems are memory themselves.
        made.read(0, &mut [0; PAGE_BYTES])?;
        made.check(PAGE_BYTES)?;
        Ok(made)
    }

    fn warm(&self, why: &str) -> BenchError {
        let directory = self.directory.display();
        BenchError::Missing(format!(
            "{} cannot be measured in {directory}: {why}; name a directory on a disk with --dir",
            Contestant::MappedFile
        ))
    }
}

impl Reader for ColdFile {
    fn prepare(&mut self, exercise: Exercise) -> Result<(), BenchError> {
        let reading = if exercise == Exercise::RandomPages { Reading::Random } else { Reading::Sequential };
        let failed = |source| BenchError::Report { path: self.directory.clone(), source };
        self.mapped.advise(reading).map_err(failed)?;
        let deadline = Instant::now() + PATIENCE;
        let mut cold = 0;
        // What the kernel is just reading ahead it keeps until that is done, and does not show before.
        while cold < COLD_LOOKS {
            let pages = self.mapped.forget().and_then(|()| self.mapped.resident_pages()).map_err(failed)?;
            cold = if pages == 0 { cold + 1 } else { 0 };
            if pages > 0 && Instant::now() > deadline {
                return Err(self.warm(&format!("the kernel keeps {pages} of its pages in memory")));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.before = read_from_devices()?;
        Ok(())
    }

    #[inline]
    fn read(&mut self, at: usize, into: &mut [u8]) -> Result<(), BenchError> {
        self.mapped.copy_to(at, into);
        // Whoever does not look at the bytes has them read nevertheless.
        std::hint::black_box(into);
        Ok(())
    }

    fn check(&mut self, bytes: usize) -> Result<(), BenchError> {
        let read = read_from_devices()?.saturating_sub(self.before);
        // Reading the region more than once reads some of it from memory; and a page or another that the kernel was just
        // reading when it was to forget it is there nevertheless.
        let expected = bytes.min(self.mapped.len()) as u64;
        if read < expected / 100 * 95 {
            return Err(self.warm(&format!("of {expected} bytes that were read only {read} came from a device")));
        }
        Ok(())
    }
}

/// Bytes that this process has had read from devices so far.
fn read_from_devices() -> Result<u64, BenchError> {
    let told = std::fs::read_to_string("/proc/self/io").ok();
    told.and_then(|told| parse_io(&told))
        .ok_or_else(|| BenchError::Missing("this kernel does not tell what is read from disks".to_owned()))
}

fn parse_io(told: &str) -> Option<u64> {
    told.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.trim().parse().ok()
}

/// So many looks in a row, so far apart, find nothing of the file in memory before it counts as cold.
const COLD_LOOKS: u32 = 5;
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How long pages may take to be forgotten.
const PATIENCE: Duration = Duration::from_secs(1);
const WRITTEN_AT_A_TIME: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_counts_is_read() {
        assert_eq!(parse_io("rchar: 1\nwchar: 2\nread_bytes: 4096\nwrite_bytes: 5\n"), Some(4096));
        assert_eq!(parse_io("rchar: 1\n"), None);
    }

    #[test]
    fn a_file_is_cold_before_each_trial_or_refused() {
        let mut file = ColdFile::make(Some(Path::new(env!("CARGO_MANIFEST_DIR"))), 4 << 20).unwrap();
        let mut page = [0; PAGE_BYTES];
        for exercise in [Exercise::RandomPages, Exercise::Sequential] {
            file.prepare(exercise).unwrap();
            file.read(5 * PAGE_BYTES, &mut page).unwrap();
            file.check(PAGE_BYTES).unwrap();
            let mut expected = [0; PAGE_BYTES];
            fill(5 * PAGE_BYTES, &mut expected);
            assert_eq!(page, expected);
        }
        // The same page again is in memory.
        file.before = read_from_devices().unwrap();
        file.read(5 * PAGE_BYTES, &mut page).unwrap();
        let said = file.check(PAGE_BYTES).unwrap_err().to_string();
        assert!(said.contains("--dir"), "{said}");
        let said = ColdFile::make(Some(Path::new("/dev/shm")), 1 << 20).unwrap_err().to_string();
        assert!(said.contains("/dev/shm") && said.contains("--dir"), "{said}");
    }
}
