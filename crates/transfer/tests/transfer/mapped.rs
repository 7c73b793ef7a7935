//! A file that is written while it is sent, through a mapping: its size and its time of change need not tell.

use crate::place::Place;
use highwire_transfer::{BLOCK_BYTES, Progress, Reason, ReceiveError, SendError};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

/// The beginning and the end of the file always have the same byte. So has the one that arrives, or none does.
#[test]
fn a_file_that_changes_through_a_mapping_is_not_put_in_place() {
    for directory in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        let place = Place::within(Path::new(directory), BYTES);
        let mapped = Mapped::of(&place.source());
        // The pages are writable from here on: no time of change is updated.
        mapped.byte(0).store(1, Ordering::SeqCst);
        mapped.byte(BYTES - 1).store(1, Ordering::SeqCst);
        let ends = place.exchange_while(move |progress| {
            if matches!(progress, Progress::Moved { .. }) {
                mapped.byte(0).fetch_add(1, Ordering::SeqCst);
                mapped.byte(BYTES - 1).fetch_add(1, Ordering::SeqCst);
            }
        });
        assert!(matches!(ends.sent, Err(SendError::Changed { .. })), "in {directory}: {ends:?}");
        let refused = matches!(ends.received, Err(ReceiveError::Stopped { reason: Reason::Changed }));
        assert!(refused, "in {directory}: {ends:?}");
        assert!(!place.whole().exists());
    }
}

#[test]
fn a_writer_that_comes_and_goes_while_a_file_is_sent_is_noticed() {
    for directory in ["/dev/shm", env!("CARGO_TARGET_TMPDIR")] {
        let place = Place::within(Path::new(directory), BYTES);
        let source = place.source();
        let modified = fs::metadata(&source).unwrap().modified().unwrap();
        let mut written = false;
        let ends = place.exchange_while(move |progress| {
            if matches!(progress, Progress::Moved { .. }) && !std::mem::replace(&mut written, true) {
                let mapped = Mapped::of(&source);
                mapped.byte(0).fetch_add(1, Ordering::SeqCst);
                drop(mapped);
                // The worst case: even the time is what it was.
                File::options().write(true).open(&source).unwrap().set_modified(modified).unwrap();
            }
        });
        assert!(matches!(ends.sent, Err(SendError::Changed { .. })), "in {directory}: {ends:?}");
        assert!(!place.whole().exists());
    }
}

#[test]
fn a_file_that_could_change_and_did_not_arrives_and_is_read_twice_only_then() {
    let place = Place::within(Path::new("/dev/shm"), BYTES);
    for is_mapped in [false, true] {
        let mapped = is_mapped.then(|| Mapped::of(&place.source()));
        let (verified, count) = std::sync::mpsc::channel();
        let ends = place.exchange_while(move |progress| {
            if let Progress::Verified { bytes, of } = progress {
                verified.send((bytes, of)).unwrap();
            }
        });
        drop(mapped);
        place.assert_whole(&ends);
        let expected = [(BLOCK_BYTES, BYTES as u64), (BYTES as u64, BYTES as u64)];
        assert_eq!(count.iter().collect::<Vec<_>>(), if is_mapped { &expected[..] } else { &[] });
        fs::remove_file(place.whole()).unwrap();
    }
}

/// A file, mapped to be written, without a descriptor.
struct Mapped {
    base: *mut std::ffi::c_void,
}

// SAFETY: a mapping belongs to the process, not to a thread, and its bytes are only used as atomics.
unsafe impl Send for Mapped {}

impl Mapped {
    fn of(path: &Path) -> Mapped {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file, 0).unwrap() };
        Mapped { base }
    }

    fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < BYTES);
        // SAFETY: inside the mapping, which lives as long as this value and is only used as atomics.
        unsafe { AtomicU8::from_ptr(self.base.cast::<u8>().add(at)) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped in `of` with this length; every reference to a byte borrows this value.
        unsafe { munmap(self.base, BYTES).unwrap() };
    }
}

/// More than one block.
const BYTES: usize = BLOCK_BYTES as usize + (1 << 20);
