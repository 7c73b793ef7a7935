//! Holes in another user's memory: pages of a memfd that nothing was written to.
//!
//! A process that reads such a page through its mapping takes memory for it. The kernel charges that memory to the control
//! group of the reader, and frees it when the owner closes the memfd: a peer could have this process killed for want of
//! memory, at no cost of its own. So payloads that another user's process handed over are read by `pread`, which reads a
//! hole as zeros and takes no memory for it. Where the holes are is not asked: the owner can hold the locks that
//! `SEEK_HOLE` waits for, and has the right to hide what `mincore` tells.

use std::os::fd::OwnedFd;

/// A peer's memfd that may have holes.
#[derive(Debug)]
pub(crate) struct Holes {
    fd: OwnedFd,
}

impl Holes {
    pub(crate) fn of(fd: OwnedFd) -> Holes {
        Holes { fd }
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

#[cfg(test)]
mod tests {
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
        for (at, len) in [(PAGE, 3 * PAGE), (0, BYTES), (5 * PAGE + 7, 1), (10 * PAGE - 9, 20), (63 * PAGE, PAGE)] {
            let mut found = vec![99; len];
            memory.copy_out(at, &mut found);
            assert_eq!(found, &buffer[at..at + len], "{len} bytes at {at}");
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
    fn a_region_that_is_refused_for_its_header_takes_none() {
        let fd = crate::sys::memfd(BYTES).unwrap();
        crate::sys::seal(&fd, crate::region::SEALS_OWN).unwrap();
        let refused = PeerRegion::adopt(fd.try_clone().unwrap(), BYTES as u64, of_another_user());
        assert!(matches!(refused, Err(crate::RegionError::WrongHeader)));
        assert_eq!(pages(&fd), 0);
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
        assert_eq!(found, [3, 2]);
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
    fn frozen_memory_of_another_user_is_copied_and_not_lent() {
        let region = Region::create_freezable(BYTES, Tag(0)).unwrap();
        region.slice(0..PAGE).unwrap().fill(5);
        let frozen = region.freeze().unwrap();
        let remote = adopt(&frozen, RegionKind::Frozen);
        assert_eq!(remote.frozen_bytes(0, PAGE), None);
        let mut found = vec![9; BYTES];
        remote.memory().copy_out(0, &mut found);
        assert_eq!((&found[..PAGE], &found[PAGE..]), (&[5; PAGE][..], &[0; BYTES - PAGE][..]));
        assert_eq!(pages(&frozen), 1);
    }
}
