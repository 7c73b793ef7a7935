use super::*;
use crate::PeerBytes;
use crate::layout::REGION_HEADER_BYTES;
use crate::pool::Pool;
use proptest::prelude::*;
use rustix::io::Errno;
use std::fs::File;
use std::io::{Seek, Write};

const LIMIT: u64 = 1 << 20;

fn copy_of(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().unwrap()
}

/// A memfd as a peer might make it: these seals, this many bytes, this text at the start.
fn handmade(seals: SealFlags, bytes: usize, start: &[u8]) -> OwnedFd {
    let mut file = File::from(sys::memfd(bytes).unwrap());
    file.write_all(start).unwrap();
    let fd = OwnedFd::from(file);
    sys::seal(&fd, seals).unwrap();
    fd
}

fn good_header() -> Vec<u8> {
    let mut header = REGION_MAGIC.to_le_bytes().to_vec();
    header.extend(LAYOUT_VERSION.to_le_bytes());
    header
}

/// Every way a holder of the descriptor could try to change what is behind it.
fn assert_unchangeable(fd: impl AsFd, len: usize) {
    let refused = |what: &str, result: io::Result<()>| {
        let errno = result.expect_err(what).raw_os_error();
        assert_eq!(errno, Some(Errno::PERM.raw_os_error()), "{what}");
    };
    let mut file = File::from(copy_of(&fd));
    refused("mapping it writable", Mapping::of(&fd, len, true).map(drop));
    file.rewind().unwrap();
    refused("writing to it", file.write(b"x").map(drop));
    refused("cutting it short", file.set_len(1));
    refused("making it longer", file.set_len(len as u64 + 4096));
    refused("adding a seal", sys::seal(&fd, SealFlags::WRITE));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    refused("punching a hole", rustix::fs::fallocate(&fd, punch, 0, 4096).map_err(io::Error::from));
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd()));
    let reopened = File::options().read(true).write(true).open(path).unwrap();
    refused("mapping it writable after opening it anew", Mapping::of(&reopened, len, true).map(drop));

    let mapping = Mapping::of(&fd, len, false).unwrap();
    // SAFETY: the mapping is whole, and nothing else refers to it.
    let changed = unsafe {
        rustix::mm::mprotect(
            mapping.base().cast(),
            mapping.len(),
            rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
        )
    };
    assert_eq!(changed, Err(Errno::ACCESS), "making a mapping writable afterwards");
}

proptest! {
    /// Slices are handed out exactly where an oracle of live ranges says that they can be.
    #[test]
    fn slices_never_overlap(
        steps in proptest::collection::vec((0usize..5000, 0usize..1500, any::<bool>()), 1..80),
    ) {
        let region = Region::create(4096, Tag(1)).unwrap();
        let mut live: Vec<Buffer> = Vec::new();
        for (start, len, keep) in steps {
            if !keep && !live.is_empty() {
                live.swap_remove(start % live.len());
            }
            let end = start + len;
            let range = |buffer: &Buffer| (buffer.offset(), buffer.offset() + buffer.capacity());
            // An empty buffer is a point: no other may begin at it or reach across it.
            let clash = live.iter().map(range).any(|(from, to)| start == from || (start < to && from < end));
            match region.slice(start..end) {
                Ok(mut buffer) => {
                    prop_assert!(end <= 4096 && !clash, "{}..{} was handed out", start, end);
                    prop_assert_eq!((buffer.offset(), buffer.len()), (start, len));
                    buffer.fill(live.len() as u8);
                    live.push(buffer);
                }
                Err(RegionError::OutOfRange { start: from, len: said, bytes: 4096 }) => {
                    prop_assert!(end > 4096);
                    prop_assert_eq!((from, said), (start, len));
                }
                Err(RegionError::InUse { .. }) => prop_assert!(clash, "{}..{} is free", start, end),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
        drop(live);
        prop_assert!(region.slice(0..4096).is_ok(), "all of it came back");
    }

    /// What is written through one slice is never seen through another.
    #[test]
    fn slices_keep_their_content(cuts in proptest::collection::btree_set(1usize..4095, 1..20)) {
        let region = Region::create(4096, Tag(1)).unwrap();
        let edges: Vec<usize> = std::iter::once(0).chain(cuts).chain(std::iter::once(4096)).collect();
        let mut buffers: Vec<Buffer> = edges.windows(2).map(|edge| region.slice(edge[0]..edge[1]).unwrap()).collect();
        for (index, buffer) in buffers.iter_mut().enumerate() {
            buffer.fill(index as u8);
        }
        for (index, buffer) in buffers.iter().enumerate() {
            prop_assert!(buffer.iter().all(|byte| *byte == index as u8));
        }
    }
}

#[test]
fn a_range_that_ends_before_it_begins_is_refused() {
    let region = Region::create(4096, Tag(1)).unwrap();
    #[expect(clippy::reversed_empty_ranges)]
    let refused = region.slice(200..100).unwrap_err();
    assert!(matches!(refused, RegionError::OutOfRange { start: 200, len: 0, bytes: 4096 }), "{refused}");
    assert!(matches!(region.slice(0..usize::MAX).unwrap_err(), RegionError::OutOfRange { .. }));
}

#[test]
fn a_shorter_buffer_still_owns_all_of_its_range() {
    let region = Region::create(4096, Tag(1)).unwrap();
    let mut buffer = region.slice(0..1000).unwrap();
    buffer.set_len(10);
    assert_eq!((buffer.len(), buffer.capacity()), (10, 1000));
    assert!(matches!(region.slice(500..600), Err(RegionError::InUse { start: 500, len: 100 })));
    buffer.set_len(1000);
    assert_eq!(buffer.len(), 1000);
}

#[test]
fn a_shared_buffer_is_exclusive_again_when_nobody_else_counts_on_it() {
    let region = Region::create(4096, Tag(1)).unwrap();
    let mut buffer = region.slice(0..100).unwrap();
    buffer.fill(7);
    let shared = buffer.share();
    let other = shared.clone();
    let shared = shared.into_exclusive().expect_err("two count on it");
    drop(shared);
    assert!(matches!(region.slice(0..100), Err(RegionError::InUse { .. })), "one still does");
    let mut buffer = other.into_exclusive().expect("only one is left");
    assert!(buffer.iter().all(|byte| *byte == 7));
    buffer.fill(8);
    drop(buffer);
    assert!(region.slice(0..100).is_ok());
}

#[test]
fn frames_are_counted_whole_pages_and_come_back() {
    let pool = Pool::create(5000, 3, Tag(1)).unwrap();
    let frames: Vec<Buffer> = (0..3).map(|_| pool.frame().unwrap()).collect();
    for frame in &frames {
        assert!(frame.len() == 8192 && frame.offset().is_multiple_of(4096) && frame.as_ptr().addr() % 4096 == 0);
    }
    let error = pool.frame().unwrap_err();
    assert_eq!((error.frames, pool.free()), (3, 0));
    assert!(matches!(pool.region().slice(0..10), Err(RegionError::InUse { .. })), "a pool's region is not sliced");
    let shared = frames.into_iter().next().unwrap().share();
    assert_eq!(pool.free(), 2, "the other two were dropped");
    let again = shared.clone();
    drop(shared);
    assert_eq!(pool.free(), 2, "one count is left");
    drop(again);
    assert_eq!(pool.free(), 3);
    assert!(matches!(Pool::create(4096, usize::MAX / 2, Tag(1)), Err(RegionError::SizeLimit { .. })));
}

#[test]
fn what_is_handed_over_can_only_be_read() {
    let own = OwnRegion::create(16384).unwrap();
    assert_unchangeable(&own, 16384);
    let region = Region::create(16384, Tag(1)).unwrap();
    let mut buffer = region.slice(0..16384).unwrap();
    buffer.fill(3);
    assert_unchangeable(region.descriptor().unwrap(), 16384);

    let peer = RemoteRegion::adopt(copy_of(region.descriptor().unwrap()), RegionKind::Registered, Tag(1), 16384, LIMIT)
        .unwrap();
    assert!(peer.writable().is_none());
    assert!(peer.frozen_bytes(0, 10).is_none(), "its owner may still change it");
    buffer[100] = 4;
    let mut seen = [0; 2];
    peer.memory().copy_out(99, &mut seen);
    assert_eq!(seen, [3, 4], "the owner still writes, and the peer sees it");
}

#[test]
fn what_is_frozen_cannot_be_written_by_anyone() {
    let region = Region::create_freezable(8192, Tag(5)).unwrap();
    let mut buffer = region.slice(0..8192).unwrap();
    assert!(!buffer.is_sendable());
    buffer.fill(9);
    drop(buffer);
    let id = region.id();
    let frozen = region.freeze().unwrap();
    assert_eq!((frozen.id(), frozen.tag(), frozen.len()), (id, Tag(5), 8192));
    assert!(frozen.iter().all(|byte| *byte == 9));
    assert_unchangeable(&frozen, 8192);

    let peer = RemoteRegion::adopt(copy_of(&frozen), RegionKind::Frozen, Tag(5), 8192, LIMIT).unwrap();
    assert_eq!(peer.frozen_bytes(8000, 192), Some(&[9; 192][..]));
    assert_eq!(peer.frozen_bytes(8192, 0), Some(&[][..]));
    for (offset, len) in [(8000, 193), (8193, 0), (usize::MAX, 2), (0, usize::MAX)] {
        assert_eq!(peer.frozen_bytes(offset, len), None);
    }
    assert!(peer.writable().is_none());
}

/// A slice of it must not change, and until it is frozen only its descriptor is in the way of that.
#[test]
fn a_region_that_is_yet_to_be_frozen_hands_out_nothing_to_write_it_by() {
    let region = Region::create_freezable(4096, Tag(1)).unwrap();
    let buffer = region.slice(0..4096).unwrap();
    let bytes: &[u8] = &buffer;
    if let Ok(descriptor) = region.descriptor() {
        let words = crate::Words::adopt(copy_of(descriptor), 4096 / 128).map(|words| words.store(0, 0x4141));
        let written = std::os::unix::fs::FileExt::write_at(&File::from(copy_of(descriptor)), b"Z", 100);
        panic!("written as words: {words:?}, as a file: {written:?}, by safe code: {:?}", (bytes[0], bytes[100]));
    }
    assert!(matches!(region.descriptor(), Err(RegionError::NotFrozen)));
    assert!(matches!(buffer.region().descriptor(), Err(RegionError::NotFrozen)));
    drop(buffer);
    assert_unchangeable(region.freeze().unwrap(), 4096);
    // One that cannot be frozen is sealed from the beginning.
    let region = Region::create(4096, Tag(1)).unwrap();
    let _buffer = region.slice(0..4096).unwrap();
    assert!(crate::Words::adopt(copy_of(region.descriptor().unwrap()), 4096 / 128).is_err());
    assert_unchangeable(region.descriptor().unwrap(), 4096);
}

#[test]
fn a_region_in_use_is_not_frozen_and_stays_as_it_was() {
    let (region, error) = Region::create(4096, Tag(1)).unwrap().freeze().unwrap_err();
    assert!(matches!(error, RegionError::NotFreezable), "{error}");
    assert!(region.slice(0..10).is_ok());

    let region = Region::create_freezable(4096, Tag(1)).unwrap();
    let mut buffer = region.slice(0..10).unwrap();
    let (region, error) = region.freeze().unwrap_err();
    assert!(matches!(error, RegionError::BuffersInUse(1)), "{error}");
    buffer[0] = 1;

    // Somebody else has mapped it writable: the kernel refuses the seal, and nothing is lost.
    drop(buffer);
    let elsewhere = Mapping::of(&region.inner.fd, 4096, true).unwrap();
    let (region, error) = region.freeze().unwrap_err();
    assert!(matches!(error, RegionError::Create(_)), "{error}");
    assert_eq!(region.slice(0..10).unwrap()[0], 1);
    drop(elsewhere);
    assert_eq!(region.freeze().unwrap()[0], 1);
}

#[test]
fn exported_memory_is_written_by_both() {
    let exported = Exported::create(8192, Tag(2)).unwrap();
    let peer = RemoteRegion::adopt(copy_of(&exported), RegionKind::Exported, Tag(2), 8192, LIMIT).unwrap();
    peer.writable().unwrap().copy_in(100, b"written by the peer");
    let mut seen = [0; 19];
    exported.memory().copy_out(100, &mut seen);
    assert_eq!(&seen, b"written by the peer");
    assert!(peer.frozen_bytes(0, 1).is_none());
    assert_eq!((peer.kind(), peer.tag()), (RegionKind::Exported, Tag(2)));
    // It may be written, but never be cut short under the other side.
    let file = File::from(copy_of(&exported));
    assert!(file.set_len(4096).is_err() && file.set_len(16384).is_err());
}

#[test]
fn each_missing_seal_is_noticed() {
    let cases = [
        (RegionKind::Registered, SEALS_OWN),
        (RegionKind::Frozen, SEALS_FROZEN),
        (RegionKind::Exported, SEALS_EXPORTED),
    ];
    for (kind, needed) in cases {
        for missing in needed.iter() {
            let fd = handmade(needed.difference(missing), 4096, &good_header());
            let error = RemoteRegion::adopt(copy_of(&fd), kind, Tag(1), 4096, LIMIT).unwrap_err();
            assert!(matches!(error, RegionError::Unsealed { .. }), "{kind:?} without {missing:?}: {error}");
            if kind == RegionKind::Registered {
                let error = PeerRegion::adopt(fd, 4096, LIMIT).unwrap_err();
                assert!(matches!(error, RegionError::Unsealed { .. }), "without {missing:?}: {error}");
            }
        }
        let fd = handmade(needed, 4096, b"");
        assert!(RemoteRegion::adopt(fd, kind, Tag(1), 4096, LIMIT).is_ok(), "{kind:?}");
    }
}

#[test]
fn memory_of_huge_pages_is_refused() {
    const HUGE: usize = 2 << 20;
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC;
    let of_huge_pages = |seals| {
        let fd = rustix::fs::memfd_create("huge", flags | rustix::fs::MemfdFlags::HUGETLB)?;
        rustix::fs::ftruncate(&fd, HUGE as u64)?;
        rustix::fs::fcntl_add_seals(&fd, seals)?;
        Ok::<OwnedFd, Errno>(fd)
    };
    let bytes = HUGE as u64;
    for (kind, seals) in [
        (RegionKind::Registered, SEALS_OWN),
        (RegionKind::Frozen, SEALS_FROZEN),
        (RegionKind::Exported, SEALS_EXPORTED),
    ] {
        let fd = match of_huge_pages(seals) {
            Ok(fd) => fd,
            Err(errno) => return eprintln!("SKIPPED: memory_of_huge_pages_is_refused: this kernel has none: {errno}"),
        };
        let error = RemoteRegion::adopt(copy_of(&fd), kind, Tag(1), bytes, 2 * bytes).unwrap_err();
        assert!(matches!(error, RegionError::HugePages), "{kind:?}: {error}");
        let others = [
            crate::SharedMemory::adopt(fd.as_fd(), HUGE).map(drop),
            PeerMemory::borrow(fd.as_fd(), bytes, bytes).map(drop),
            crate::Words::adopt(copy_of(&fd), HUGE / 128).map(drop),
        ];
        for outcome in others {
            let error = outcome.unwrap_err();
            assert!(matches!(error, RegionError::HugePages), "{kind:?}: {error}");
        }
        if kind == RegionKind::Registered {
            let error = PeerRegion::adopt(fd, bytes, bytes).unwrap_err();
            assert!(matches!(error, RegionError::HugePages), "{error}");
        }
    }
}

#[test]
fn memory_that_is_locked_is_given_back_as_well() {
    let (memory, fd) = crate::SharedMemory::create(8192).unwrap();
    memory.copy_in(0, &[7; 8192]);
    // SAFETY: this mapping's pages, whose content it does not change.
    if let Err(errno) = unsafe { rustix::mm::mlock(memory.pointer(0, 8192).cast(), 8192) } {
        return eprintln!("SKIPPED: memory_that_is_locked_is_given_back_as_well: nothing may be locked here: {errno}");
    }
    let blocks = || rustix::fs::fstat(&fd).unwrap().st_blocks;
    let before = blocks();
    memory.give_back(4096, 4096);
    let mut found = [0; 8192];
    memory.copy_out(0, &mut found);
    assert!(found[..4096] == [7; 4096] && found[4096..] == [0; 4096]);
    memory.give_back(0, 8192);
    assert!(blocks() < before, "{before} blocks before, {} now", blocks());
}

#[test]
fn a_region_of_another_kind_is_refused() {
    let registered = Region::create(4096, Tag(1)).unwrap();
    let exported = Exported::create(4096, Tag(1)).unwrap();
    let frozen = Region::create_freezable(4096, Tag(1)).unwrap().freeze().unwrap();
    let adopt = |fd: BorrowedFd<'_>, kind| RemoteRegion::adopt(copy_of(fd), kind, Tag(1), 4096, LIMIT);
    for (fd, kind) in [
        (registered.descriptor().unwrap(), RegionKind::Frozen),
        (exported.as_fd(), RegionKind::Registered),
        (exported.as_fd(), RegionKind::Frozen),
        (frozen.as_fd(), RegionKind::Registered),
    ] {
        let error = adopt(fd, kind).unwrap_err();
        assert!(matches!(error, RegionError::Unsealed { .. }), "{kind:?}: {error}");
    }
    // Sealed more than an exported region must be: it is the mapping that fails then.
    for fd in [registered.descriptor().unwrap(), frozen.as_fd()] {
        let error = adopt(fd, RegionKind::Exported).unwrap_err();
        assert!(matches!(error, RegionError::Map(_)), "{error}");
    }
}

#[test]
fn wrong_and_excessive_sizes_are_refused() {
    let fd = handmade(SEALS_OWN, 8192, &good_header());
    for said in [1, 4096, 8191, 8193, LIMIT] {
        let error = PeerRegion::adopt(copy_of(&fd), said, LIMIT).unwrap_err();
        assert!(
            matches!(error, RegionError::WrongSize { found: 8192, expected } if expected == said),
            "{said} bytes: {error}"
        );
    }
    for said in [0, LIMIT + 1, u64::MAX] {
        let error = PeerRegion::adopt(copy_of(&fd), said, LIMIT).unwrap_err();
        assert!(matches!(error, RegionError::SizeLimit { limit: LIMIT, .. }), "{said} bytes: {error}");
        let error = RemoteRegion::adopt(copy_of(&fd), RegionKind::Registered, Tag(1), said, LIMIT).unwrap_err();
        assert!(matches!(error, RegionError::SizeLimit { bytes, .. } if bytes == said), "{said} bytes: {error}");
    }
    let error = Region::create(0, Tag(1)).unwrap_err();
    assert!(matches!(error, RegionError::SizeLimit { bytes: 0, .. }), "{error}");
}

#[test]
fn descriptors_that_are_no_memory_are_refused() {
    let (reading, writing) = std::io::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let strangers: [OwnedFd; 7] = [
        reading.into(),
        writing.into(),
        socket.into(),
        event,
        File::open("/dev/zero").unwrap().into(),
        File::open("/proc/self/exe").unwrap().into(),
        File::open("/").unwrap().into(),
    ];
    for fd in strangers {
        for kind in [RegionKind::Registered, RegionKind::Frozen, RegionKind::Exported] {
            let error = RemoteRegion::adopt(copy_of(&fd), kind, Tag(1), 4096, LIMIT).unwrap_err();
            assert!(matches!(error, RegionError::Unsealed { .. }), "{fd:?} as {kind:?}: {error}");
        }
        let error = PeerRegion::adopt(fd, 4096, LIMIT).unwrap_err();
        assert!(matches!(error, RegionError::Unsealed { .. }), "{error}");
    }
}

#[test]
fn a_header_of_another_version_is_refused() {
    let adopt = |bytes: usize, start: &[u8]| PeerRegion::adopt(handmade(SEALS_OWN, bytes, start), bytes as u64, LIMIT);
    assert!(adopt(4096, &good_header()).is_ok());
    let mut newer = good_header();
    newer[8] += 1;
    let mut other = good_header();
    other[0] ^= 1;
    for (bytes, start) in
        [(4096, &newer), (4096, &other), (4096, &Vec::new()), (REGION_HEADER_BYTES - 8, &good_header())]
    {
        let error = adopt(bytes, start).unwrap_err();
        assert!(matches!(error, RegionError::WrongHeader), "{bytes} bytes: {error}");
    }
}

#[test]
fn an_own_region_says_what_it_is() {
    let own = OwnRegion::create(8192).unwrap();
    own.memory().note_cpu(3);
    let peer = PeerRegion::adopt(copy_of(&own), 8192, LIMIT).unwrap();
    assert_eq!(peer.memory().load64(REGION_LENGTH_AT), 8192);
    assert_eq!(peer.cpu(), 3);
    own.memory().note_cpu(u32::MAX);
    assert_eq!(peer.cpu(), u32::MAX);
}

#[test]
fn a_payload_is_read_in_place_to_its_last_byte() {
    // A size that is no multiple of a word: a peer registers what it likes.
    let region = Region::create(4099, Tag(1)).unwrap();
    let mut buffer = region.slice(0..4099).unwrap();
    for (index, byte) in buffer.iter_mut().enumerate() {
        *byte = index as u8;
    }
    let peer = RemoteRegion::adopt(copy_of(region.descriptor().unwrap()), RegionKind::Registered, Tag(1), 4099, LIMIT)
        .unwrap();
    let bytes = PeerBytes::new(peer.memory(), 4090, 9).unwrap();
    assert_eq!(bytes.to_vec(), buffer[4090..]);
    assert!((0..9).all(|at| bytes.byte(at) == buffer[4090 + at]));
    let mut part = [0; 3];
    bytes.copy_to(6, &mut part);
    assert_eq!(part, buffer[4096..]);
    assert!(PeerBytes::new(peer.memory(), 4090, 10).is_none());
    assert!(PeerBytes::new(peer.memory(), usize::MAX, 2).is_none());
    assert!(PeerBytes::new(peer.memory(), 4099, 0).is_some_and(|bytes| bytes.is_empty()));
}

#[test]
fn every_length_is_copied_whole_and_no_further() {
    let memory = Exported::create(4096, Tag(1)).unwrap().memory().clone();
    let pattern: Vec<u8> = (0..300u32).map(|number| (number * 7 + 1) as u8).collect();
    for len in 0..=300 {
        for at in [64, 65, 67, 100] {
            memory.copy_in(at - 8, &[0xee; 320]);
            memory.copy_in(at, &pattern[..len]);
            let mut around = [0; 320];
            memory.copy_out(at - 8, &mut around);
            assert!(around[..8] == [0xee; 8] && around[8 + len..].iter().all(|byte| *byte == 0xee), "{len} at {at}");
            let mut out = vec![0; len];
            memory.copy_out(at, &mut out);
            assert!(out == pattern[..len] && out == around[8..8 + len], "{len} at {at}");
        }
    }
}

#[test]
fn words_outside_a_mapping_are_never_touched() {
    let region = Region::create(4098, Tag(1)).unwrap();
    let memory =
        RemoteRegion::adopt(copy_of(region.descriptor().unwrap()), RegionKind::Registered, Tag(1), 4098, LIMIT)
            .unwrap()
            .memory();
    let refuses = |look: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(look)).is_err();
    assert!(refuses(&|| _ = memory.load32(4096)), "two bytes of it are outside");
    assert!(refuses(&|| _ = memory.load64(4096)));
    assert!(refuses(&|| _ = memory.load64(usize::MAX - 7)));
    assert!(refuses(&|| _ = memory.load32(2)), "not on a multiple of 4");
    assert!(refuses(&|| memory.copy_out(4097, &mut [0; 2])));
    assert!(refuses(&|| memory.copy_out(usize::MAX, &mut [0; 2])));
    memory.copy_out(4098, &mut []);
}

#[test]
fn memory_that_was_handed_over_before_is_not_mapped_again() {
    // Nobody else counts for this user.
    let limit = Allotment { region: LIMIT, user: Some((Some(4_000_000_001), 2 * 8192)) };
    let take = |known: &[RemoteRegion], fd: &OwnedFd, kind| {
        RemoteRegion::adopt_beside(known, copy_of(fd), kind, Tag(1), 8192, limit)
    };
    let fd = handmade(SEALS_EXPORTED, 8192, b"");
    let first = take(&[], &fd, RegionKind::Exported).unwrap();
    let mut known = vec![first];
    for _ in 0..100 {
        known.push(take(&known, &fd, RegionKind::Exported).unwrap());
    }
    known[0].writable().unwrap().copy_in(100, b"seen");
    let mut seen = [0; 4];
    known[100].memory().copy_out(100, &mut seen);
    assert_eq!(&seen, b"seen");
    // One for reading only is no writable mapping.
    let registered = handmade(SEALS_OWN, 8192, b"");
    known.push(take(&known, &registered, RegionKind::Registered).unwrap());
    assert!(known[101].writable().is_none());
    // And what is mapped counts.
    let other = handmade(SEALS_EXPORTED, 8192, b"");
    assert!(matches!(take(&known, &other, RegionKind::Exported), Err(RegionError::Allotment { present: 16_384, .. })));
    known.truncate(1);
    assert!(take(&known, &other, RegionKind::Exported).is_ok());
}
