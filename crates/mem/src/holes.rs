//! Holes in another user's memory: pages of a memfd that nothing was written to.
//!
//! A process that reads such a page through its mapping takes memory for it. The kernel charges that memory to the control
//! group of the reader, and frees it when the owner closes the memfd: a peer could have this process killed for want of
//! memory, at no cost of its own. So what another user's process handed over is read through the mapping only where pages
//! are known to exist, and by `pread`, which reads a hole as zeros and takes no memory for it, elsewhere.

use rustix::fs::SeekFrom;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

/// The pages of a peer's memfd, as far as they are known to exist.
#[derive(Debug)]
pub(crate) struct Holes {
    fd: OwnedFd,
    /// The seals keep everybody from giving pages back: a page that exists will exist as long as the memfd.
    lasting: bool,
    /// Ranges of bytes that lie in existing pages: end by begin, disjoint.
    existing: Mutex<BTreeMap<u64, u64>>,
}

impl Holes {
    pub(crate) fn of(fd: OwnedFd, lasting: bool) -> Holes {
        Holes { fd, lasting, existing: Mutex::default() }
    }

    /// True if a read of these bytes through the mapping takes no memory, now or later.
    pub(crate) fn spare(&self, at: usize, len: usize) -> bool {
        let (at, end) = (at as u64, (at + len) as u64);
        if !self.lasting {
            return false;
        }
        let mut existing = self.existing.lock().unwrap_or_else(PoisonError::into_inner);
        let before = existing.range(..=at).next_back().map(|(begin, end)| (*begin, *end));
        let before = before.filter(|(_, known)| *known >= at);
        if before.is_some_and(|(_, known)| known >= end) {
            return true;
        }
        // Only the result counts: the position is shared with the peer.
        let Ok(hole) = rustix::fs::seek(&self.fd, SeekFrom::Hole(at)) else { return false };
        if hole > at {
            let begin = before.map_or(at, |(begin, _)| begin);
            existing.retain(|other, _| !(begin..=hole).contains(other));
            // A peer that leaves a hole behind each page fills this; it then costs a system call more.
            if existing.len() >= RANGES_MAX {
                existing.clear();
            }
            existing.insert(begin, hole);
        }
        hole >= end
    }

    /// Copies bytes out by a system call, holes as zeros. False if the kernel does not.
    pub(crate) fn read(&self, at: usize, into: &mut [u8]) -> bool {
        let mut done = 0;
        while done < into.len() {
            match rustix::io::pread(&self.fd, &mut into[done..], (at + done) as u64) {
                Ok(read) if read > 0 => done += read,
                Err(rustix::io::Errno::INTR) => {}
                _ => return false,
            }
        }
        true
    }
}

/// Each takes some 50 bytes.
const RANGES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allotment::Allotment;
    use crate::region::{Exported, OwnRegion, PeerRegion, Region, RegionKind, RemoteRegion, Tag};
    use std::os::fd::AsFd;

    const PAGE: usize = 4096;
    const BYTES: usize = 64 * PAGE;

    fn of_another_user() -> Allotment {
        Allotment { region: 1 << 30, user: Some((None, 1 << 30)) }
    }

    fn pages(fd: impl AsFd) -> usize {
        rustix::fs::fstat(fd).unwrap().st_blocks as usize * 512 / PAGE
    }

    fn adopt(fd: &impl AsFd, kind: RegionKind) -> RemoteRegion {
        let fd = fd.as_fd().try_clone_to_owned().unwrap();
        RemoteRegion::adopt_beside([], fd, kind, Tag(0), BYTES as u64, of_another_user()).unwrap()
    }

    #[test]
    fn reading_what_was_never_written_takes_no_memory() {
        let region = Region::create(BYTES, Tag(0)).unwrap();
        let fd = region.descriptor().unwrap();
        let mut buffer = region.slice(0..BYTES).unwrap();
        for page in [1, 2, 3, 10, 63] {
            buffer[page * PAGE..(page + 1) * PAGE].fill(page as u8);
        }
        assert_eq!(pages(fd), 5);
        let memory = adopt(&fd, RegionKind::Registered).memory();
        // Each range twice: before and after it is known.
        for (at, len) in [(PAGE, 3 * PAGE), (0, BYTES), (5 * PAGE + 7, 1), (10 * PAGE - 9, 20), (63 * PAGE, PAGE)] {
            for _ in 0..2 {
                let mut found = vec![99; len];
                memory.copy_out(at, &mut found);
                assert_eq!(found, &buffer[at..at + len], "{len} bytes at {at}");
            }
        }
        // The comparison above took memory for the rest of its own region.
        let region = Region::create(BYTES, Tag(0)).unwrap();
        let fd = region.descriptor().unwrap();
        let memory = adopt(&fd, RegionKind::Registered).memory();
        let mut found = vec![99; BYTES];
        memory.copy_out(0, &mut found);
        assert_eq!((found, pages(fd)), (vec![0; BYTES], 0));
        let part = crate::PeerBytes::new(memory, 8 * PAGE, 2 * PAGE).unwrap();
        assert_eq!((part.byte(PAGE), part.to_vec(), pages(fd)), (0, vec![0; 2 * PAGE], 0));
    }

    #[test]
    fn nor_does_a_payload_area_that_was_never_written() {
        let own = OwnRegion::create(BYTES).unwrap();
        let before = pages(&own);
        let fd = own.as_fd().try_clone_to_owned().unwrap();
        let theirs = PeerRegion::adopt(fd, BYTES as u64, of_another_user()).unwrap();
        let mut found = vec![99; BYTES - PAGE];
        theirs.memory().copy_out(PAGE, &mut found);
        assert_eq!((found, pages(&own)), (vec![0; BYTES - PAGE], before));
    }

    #[test]
    fn what_is_written_later_is_found() {
        let region = Region::create(BYTES, Tag(0)).unwrap();
        let memory = adopt(&region.descriptor().unwrap(), RegionKind::Registered).memory();
        let mut found = [9; 2];
        memory.copy_out(PAGE - 1, &mut found);
        assert_eq!(found, [0; 2]);
        let mut buffer = region.slice(0..BYTES).unwrap();
        (buffer[PAGE - 1], buffer[PAGE]) = (1, 2);
        memory.copy_out(PAGE - 1, &mut found);
        assert_eq!(found, [1, 2]);
        buffer[PAGE - 1] = 3;
        memory.copy_out(PAGE - 1, &mut found);
        assert_eq!(found, [3, 2], "through the mapping");
    }

    #[test]
    fn pages_of_exported_memory_that_its_owner_gives_back_take_none_when_read() {
        let region = Exported::create(BYTES, Tag(0)).unwrap();
        region.memory().copy_in(0, &[7; BYTES]);
        let memory = adopt(&region, RegionKind::Exported).memory();
        let mut found = vec![0; BYTES];
        memory.copy_out(0, &mut found);
        assert_eq!(found, [7; BYTES]);
        region.memory().give_back(0, BYTES);
        memory.copy_out(0, &mut found);
        assert_eq!((found, pages(&region)), (vec![0; BYTES], 0));
    }

    #[test]
    fn frozen_memory_with_holes_is_lent_where_it_has_none() {
        let region = Region::create_freezable(BYTES, Tag(0)).unwrap();
        region.slice(0..PAGE).unwrap().fill(5);
        let frozen = region.freeze().unwrap();
        let remote = adopt(&frozen, RegionKind::Frozen);
        assert_eq!(remote.frozen_bytes(0, PAGE), Some(&[5; PAGE][..]));
        assert_eq!(remote.frozen_bytes(0, PAGE + 1), None);
        assert_eq!(pages(&frozen), 1);
    }

    #[test]
    fn ranges_that_are_known_stay_few() {
        let region = Region::create(BYTES, Tag(0)).unwrap();
        let mut buffer = region.slice(0..BYTES).unwrap();
        (0..64).step_by(2).for_each(|page| buffer[page * PAGE] = 1);
        let holes = Holes::of(region.descriptor().unwrap().try_clone_to_owned().unwrap(), true);
        for page in 0..64 {
            assert_eq!(holes.spare(page * PAGE, PAGE), page % 2 == 0, "page {page}");
        }
        assert_eq!(holes.existing.lock().unwrap().len(), 32);
        (0..64).for_each(|page| buffer[page * PAGE] = 1);
        assert!(holes.spare(0, BYTES));
        assert_eq!(holes.existing.lock().unwrap().len(), 1, "they are one now");
    }
}
