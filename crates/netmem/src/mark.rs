//! The mark of a coordinator: how its next start knows whether it has to wait.
//!
//! A coordinator lets nobody in for as long as a lease of an earlier one can last ([`crate::coordinator`]). Whether there
//! was an earlier one is told by a small file beside each address where it listened, which says when it last granted a
//! lease:
//!
//! ```text
//!   none                                           nobody was there, or it ended without other nodes ──▶ opens at once
//!   older than lease, margin and a second          every lease of it is over                         ──▶ opens at once
//!   younger, or of a time that has not come yet                                                      ──▶ waits
//! ```
//!
//! The mark is written before a lease is granted, at most twice a second: it is never older than the last lease by more
//! than half a second. It holds the boot clock, because the real time may be set while nobody looks. A mark of another
//! boot, or of another host that has the same directory, is judged by the time of the file.

use crate::exchange::{boot_ns, host};
use highwire_vi::{Address, Nic, RuntimeDirError};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The file of a coordinator that listens at this address.
pub(crate) fn path_of(nic: &Nic, address: &str) -> Result<PathBuf, RuntimeDirError> {
    Ok(match Address::parse(address) {
        Ok(Address::Path(path)) => {
            let mut path = path.into_os_string();
            path.push(".coordinator");
            path.into()
        }
        Ok(Address::Name(name)) => nic.runtime_dir()?.join(format!("{name}.coordinator")),
        // Nobody can listen at what is no address, and that is told by whoever tries.
        Ok(Address::Host(_)) | Err(_) => {
            let plain = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' };
            let name: String = address.chars().map(plain).collect();
            nic.runtime_dir()?.join(format!("{name}.coordinator"))
        }
    })
}

/// Whether no lease can be left of a coordinator that had its mark here, where leases and their margin last for `lease`.
pub(crate) fn is_alone(path: &Path, lease: Duration) -> bool {
    let now = Now { boot: &host(), boot_ns: boot_ns(), real: SystemTime::now() };
    match Found::read(path) {
        Ok(found) => found.is_none_or(|found| found.is_over(&now, lease)),
        // One that cannot be read may be a young one.
        Err(_) => false,
    }
}

struct Now<'a> {
    boot: &'a str,
    boot_ns: u64,
    real: SystemTime,
}

/// What a mark says.
#[derive(Clone, Debug)]
struct Found {
    /// The boot that it was written in, and when in it; none if it was not written whole.
    written: Option<(String, u64)>,
    modified: SystemTime,
}

impl Found {
    fn read(path: &Path) -> io::Result<Option<Found>> {
        let mut file = match open(path, OpenOptions::new().read(true)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = String::new();
        // What somebody else wrote there may be of any length, and no text.
        let _ = (&mut file).take(256).read_to_string(&mut text);
        let words = text.strip_suffix('\n').and_then(|line| line.split_once(' '));
        let written = words.and_then(|(boot, at)| Some((boot.to_owned(), at.parse().ok()?)));
        Ok(Some(Found { written, modified: file.metadata()?.modified()? }))
    }

    fn is_over(&self, now: &Now<'_>, lease: Duration) -> bool {
        let least = lease + LATE;
        match &self.written {
            Some((boot, at_ns)) if boot == now.boot => {
                now.boot_ns.checked_sub(*at_ns).is_some_and(|age| Duration::from_nanos(age) > least)
            }
            _ => now.real.duration_since(self.modified).is_ok_and(|age| age > least),
        }
    }
}

/// The marks of a coordinator that runs.
#[derive(Debug)]
pub(crate) struct Marks {
    files: Vec<(PathBuf, File)>,
    boot: String,
    refreshed: u64,
}

/// A mark that cannot be written.
pub(crate) struct Unwritable {
    pub path: PathBuf,
    pub source: io::Error,
}

impl Marks {
    /// Makes them, or takes over those that are there.
    pub(crate) fn create(paths: Vec<PathBuf>) -> Result<Marks, Unwritable> {
        let mut files = Vec::new();
        for path in paths {
            match open(&path, OpenOptions::new().write(true).create(true)) {
                Ok(file) => files.push((path, file)),
                Err(source) => return Err(Unwritable { path, source }),
            }
        }
        let mut marks = Marks { files, boot: host(), refreshed: 0 };
        match marks.write(boot_ns()) {
            Ok(()) => Ok(marks),
            Err((at, source)) => Err(Unwritable { path: marks.files[at].0.clone(), source }),
        }
    }

    /// Says that a lease is about to be granted.
    pub(crate) fn refresh(&mut self, now: u64) {
        if now.saturating_sub(self.refreshed) >= REFRESH_NS {
            // The file has its bytes already: writing them again takes no room that could be missing.
            let _ = self.write(now);
        }
    }

    fn write(&mut self, now: u64) -> Result<(), (usize, io::Error)> {
        self.refreshed = now;
        // Always as long, so that nothing of the former is left behind it.
        let text = format!("{} {now:020}\n", self.boot);
        for (at, (_, file)) in self.files.iter().enumerate() {
            file.write_all_at(text.as_bytes(), 0).map_err(|error| (at, error))?;
        }
        Ok(())
    }

    /// There is nobody who has a lease.
    pub(crate) fn remove(&mut self) {
        for (path, _) in self.files.drain(..) {
            // One that stays makes the next start wait, and no harm.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // Beside a `shm:/path` others may have put a link, or a pipe that nobody writes to.
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

const REFRESH_NS: u64 = 500_000_000;
/// How much later than the mark says a lease may have been granted, twice.
const LATE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_millis(3300);

    fn found(written: Option<(&str, u64)>, modified_s: u64) -> Found {
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(modified_s);
        Found { written: written.map(|(boot, at)| (boot.to_owned(), at)), modified }
    }

    #[test]
    fn a_mark_is_judged_by_the_boot_clock_and_by_the_file_where_that_says_nothing() {
        let seconds = |s: u64| s * 1_000_000_000;
        let real = SystemTime::UNIX_EPOCH + Duration::from_secs(10_000);
        let now = Now { boot: "this", boot_ns: seconds(100), real };
        let cases = [
            // The time of the file says nothing where there is a better clock.
            (Some(("this", seconds(99))), 0, false),
            (Some(("this", seconds(96))), 0, false),
            (Some(("this", seconds(95))), 10_000, true),
            (Some(("this", seconds(0))), 10_000, true),
            // Of a time to come: whoever wrote it is not to be relied on.
            (Some(("this", seconds(101))), 0, false),
            (Some(("other", seconds(99))), 9_990, true),
            (Some(("other", seconds(0))), 9_996, false),
            (Some(("other", seconds(0))), 10_001, false),
            (None, 9_990, true),
            (None, 9_999, false),
        ];
        for (written, modified, over) in cases {
            assert_eq!(found(written, modified).is_over(&now, LEASE), over, "{written:?}, file of {modified}");
        }
        // To the nanosecond: a lease, its margin and a second.
        let edge = seconds(100) - (LEASE + LATE).as_nanos() as u64;
        assert!(!found(Some(("this", edge)), 0).is_over(&now, LEASE));
        assert!(found(Some(("this", edge - 1)), 0).is_over(&now, LEASE));
    }

    #[test]
    fn a_mark_is_found_while_it_is_there_whatever_is_in_it() {
        let place = tempfile::tempdir().unwrap();
        let paths = vec![place.path().join("one.coordinator"), place.path().join("two.coordinator")];
        assert!(paths.iter().all(|path| is_alone(path, LEASE)), "there is none");
        let mut marks = Marks::create(paths.clone()).ok().unwrap();
        assert!(paths.iter().all(|path| !is_alone(path, LEASE)));
        marks.refresh(1);
        let kept = Found::read(&paths[0]).unwrap().unwrap().written.unwrap();
        assert!(kept.0 == host() && kept.1 > 1, "twice within half a second is once");
        let later = kept.1 + REFRESH_NS;
        marks.refresh(later);
        for path in &paths {
            assert_eq!(Found::read(path).unwrap().unwrap().written, Some((host(), later)));
        }
        marks.remove();
        assert!(paths.iter().all(|path| !path.exists() && is_alone(path, LEASE)));
        marks.refresh(later + REFRESH_NS);
        assert!(paths.iter().all(|path| !path.exists()), "it does not come back");
        std::fs::write(&paths[0], [0xff; 1000]).unwrap();
        assert!(!is_alone(&paths[0], LEASE), "its file is young");
        std::os::unix::fs::symlink(&paths[0], &paths[1]).unwrap();
        assert!(Marks::create(vec![paths[1].clone()]).is_err() && !is_alone(&paths[1], LEASE));
    }
}
