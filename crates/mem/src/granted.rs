//! Memory that a peer on another host may reach, by way of an adapter of this process.

use crate::memory::{PeerMemory, SharedMemory};
use crate::region::{Exported, Frozen, Region, RegionError, RegionKind, RemoteRegion, Tag};
use std::fmt;
use std::ops::Range;

/// A region that was granted. It is read and written by copying alone: the application has the same
/// bytes, and may be writing them. Only frozen memory is lent as slices.
#[derive(Clone)]
pub struct Granted {
    handle: u32,
    tag: Tag,
    bytes: usize,
    memory: Memory,
}

#[derive(Clone)]
enum Memory {
    /// A mapping of its own, which can only be read: `Buffer`s of the region are slices of the other one.
    Registered(PeerMemory),
    Frozen(Frozen),
    Exported(SharedMemory),
}

impl Granted {
    /// To be read. Fails for a region that is yet to be frozen, and for want of address space.
    pub fn registered(region: &Region) -> Result<Granted, RegionError> {
        let fd = region.descriptor()?.try_clone_to_owned().map_err(RegionError::Map)?;
        let bytes = region.len();
        let mapped = RemoteRegion::adopt(fd, RegionKind::Registered, region.tag(), bytes as u64, u64::MAX)?;
        let memory = Memory::Registered(mapped.memory());
        Ok(Granted { handle: region.id(), tag: region.tag(), bytes, memory })
    }

    /// To be read.
    pub fn frozen(region: &Frozen) -> Granted {
        let memory = Memory::Frozen(region.clone());
        Granted { handle: region.id(), tag: region.tag(), bytes: region.len(), memory }
    }

    /// To be read and written.
    pub fn exported(region: &Exported) -> Granted {
        let memory = Memory::Exported(region.memory().clone());
        Granted { handle: region.id(), tag: region.tag(), bytes: region.memory().len(), memory }
    }

    /// The region's number in this process, which the peer names it by.
    pub fn handle(&self) -> u32 {
        self.handle
    }

    /// Its protection tag.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether the peer may write it.
    pub fn is_writable(&self) -> bool {
        matches!(self.memory, Memory::Exported(_))
    }

    /// A range of it, if that lies inside.
    pub fn window(&self, offset: u64, bytes: u64) -> Option<Window> {
        let end = offset.checked_add(bytes).and_then(|end| usize::try_from(end).ok())?;
        let start = offset as usize;
        (end <= self.bytes).then(|| Window { granted: self.clone(), start, bytes: end - start })
    }
}

impl fmt::Debug for Granted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.memory {
            Memory::Registered(_) => "registered",
            Memory::Frozen(_) => "frozen",
            Memory::Exported(_) => "exported",
        };
        write!(f, "Granted({}, {kind}, {} bytes, {:?})", self.handle, self.bytes, self.tag)
    }
}

/// A range of granted memory.
#[derive(Clone, Debug)]
pub struct Window {
    granted: Granted,
    start: usize,
    bytes: usize,
}

impl Window {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// True for a range of no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes of `range`, if nobody can change them.
    pub fn slice(&self, range: Range<usize>) -> Option<&[u8]> {
        match &self.granted.memory {
            Memory::Frozen(region) => region[self.start..self.start + self.bytes].get(range),
            Memory::Registered(_) | Memory::Exported(_) => None,
        }
    }

    /// Appends a copy of the bytes of `range`, as they are now. Panics outside.
    pub fn append(&self, range: Range<usize>, to: &mut Vec<u8>) {
        self.check(&range);
        let (from, begin) = (self.start + range.start, to.len());
        match &self.granted.memory {
            Memory::Frozen(region) => to.extend_from_slice(&region[from..from + range.len()]),
            Memory::Registered(memory) => {
                to.resize(begin + range.len(), 0);
                memory.copy_out(from, &mut to[begin..]);
            }
            Memory::Exported(memory) => {
                to.resize(begin + range.len(), 0);
                memory.copy_out(from, &mut to[begin..]);
            }
        }
    }

    /// Writes at `at`. Panics outside, and if the memory may not be written.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        self.check(&(at..at.saturating_add(bytes.len())));
        let Memory::Exported(memory) = &self.granted.memory else { panic!("{:?} is not to be written", self.granted) };
        memory.copy_in(self.start + at, bytes);
    }

    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{range:?} is outside a window of {} bytes",
            self.bytes
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_and_only_what_is_exported_is_written() {
        let region = Region::create(10_000, Tag(3)).unwrap();
        let mut buffer = region.slice(0..10_000).unwrap();
        buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        let freezable = Region::create_freezable(10_000, Tag(3)).unwrap();
        freezable.slice(0..10_000).unwrap().copy_from_slice(&buffer);
        assert!(matches!(Granted::registered(&freezable), Err(RegionError::NotFrozen)));
        let exported = Exported::create(10_000, Tag(3)).unwrap();
        exported.memory().copy_in(0, &buffer);
        let registered = Granted::registered(&region).unwrap();
        let all = [registered.clone(), Granted::frozen(&freezable.freeze().unwrap()), Granted::exported(&exported)];
        for granted in &all {
            assert_eq!((granted.tag(), granted.len(), granted.is_empty()), (Tag(3), 10_000, false));
            let window = granted.window(9_000, 1_000).unwrap();
            let mut got = vec![7];
            window.append(10..1_000, &mut got);
            assert_eq!((got[0], &got[1..]), (7, &buffer[9_010..]));
            assert!(window.slice(10..1_000).is_none_or(|bytes| bytes == &buffer[9_010..]));
            for (offset, bytes) in [(9_001, 1_000), (10_001, 0), (u64::MAX, 1), (1, u64::MAX)] {
                assert!(granted.window(offset, bytes).is_none(), "{offset} + {bytes}");
            }
            assert!(granted.window(10_000, 0).is_some_and(|window| window.is_empty()));
        }
        assert_eq!(all.each_ref().map(Granted::is_writable), [false, false, true]);
        // What its owner writes afterwards is read.
        buffer[5] = 99;
        let mut got = Vec::new();
        registered.window(5, 1).unwrap().append(0..1, &mut got);
        assert_eq!(got, [99]);
        all[2].window(100, 4).unwrap().write(1, b"new");
        let mut found = [0; 5];
        exported.memory().copy_out(100, &mut found);
        assert_eq!(&found, &[100, b'n', b'e', b'w', 104]);
    }

    #[test]
    #[should_panic(expected = "outside a window of 4 bytes")]
    fn nothing_is_written_outside_a_window() {
        let exported = Exported::create(10_000, Tag(3)).unwrap();
        Granted::exported(&exported).window(100, 4).unwrap().write(2, b"new");
    }
}
