//! Regions: memory that is handed to a peer, and what must be true of memory that a peer hands us.
//!
//! | kind | we may | the peer may | seals |
//! |---|---|---|---|
//! | [`OwnRegion`], [`Region`] | read, write | read | shrink, grow, future-write, seal |
//! | [`Frozen`] | read, as slices | read, as slices | shrink, grow, write, seal; no descriptor before it is frozen |
//! | [`Exported`] | read, write, no slices | read, write | shrink, grow, seal |
//! | [`LentRegion`](crate::LentRegion) | read, write, give back | read | shrink, grow, seal; a descriptor that only reads |
//!
//! Seals are checked before a peer's memory is mapped: an unsealed one could be cut short under us,
//! and the next access would be a SIGBUS. So it would be where a huge page was punched out and no other is
//! free: memfds of huge pages are refused.

use crate::allotment::Allotment;
use crate::layout::{LAYOUT_VERSION, REGION_CPU_AT, REGION_LENGTH_AT, REGION_MAGIC, REGION_VERSION_AT};
use crate::memory::{OwnMemory, PeerMemory, SharedMemory, View};
use crate::sys::{self, Mapping};
use rustix::fs::SealFlags;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Why a region could not be made or taken over.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The kernel did not give the memory.
    #[error("shared memory could not be created: {0}; is the memory or the descriptor limit (ulimit -n) exhausted?")]
    Create(#[source] io::Error),
    /// The kernel did not map it.
    #[error("shared memory could not be mapped: {0}; is the address space limit (ulimit -v) too small?")]
    Map(#[source] io::Error),
    /// Not a memfd, or one without the seals that make it safe.
    #[error("the memory handed over has the seals {found:?}, but {needed:?} are needed")]
    Unsealed {
        /// Seals found, as text.
        found: String,
        /// Seals needed, as text.
        needed: String,
    },
    /// A memfd of huge pages: where one is punched out and no other is free, the next access is a SIGBUS.
    #[error("the memory handed over is of huge pages, which its owner could take away under us")]
    HugePages,
    /// Its size is not what was said.
    #[error("the memory handed over has {found} bytes, {expected} were announced")]
    WrongSize {
        /// Bytes found.
        found: u64,
        /// Bytes announced.
        expected: u64,
    },
    /// Larger than this side's limit, or empty.
    #[error("a region of {bytes} bytes is outside the limits of 1 to {limit} bytes")]
    SizeLimit {
        /// Bytes asked for.
        bytes: u64,
        /// The limit in force.
        limit: u64,
    },
    /// The peer's user shares more than it may, all regions of its processes together.
    #[error(
        "memory of {} takes {present} bytes of address space here, and {bytes} more are above the limit of {limit} for a user: have its processes share less, or raise peer_bytes_total_max", crate::work::user(*.user)
    )]
    Allotment {
        /// Whose; `None` for users that this user namespace does not map.
        user: Option<u32>,
        /// Bytes that are mapped.
        present: u64,
        /// Bytes more.
        bytes: u64,
        /// The limit in force.
        limit: u64,
    },
    /// Its header is not that of a region of this version.
    #[error("the memory handed over does not begin with a header of layout version {LAYOUT_VERSION}")]
    WrongHeader,
    /// A range that is not inside.
    #[error("offset {start} + {len} is outside the region of {bytes} bytes")]
    OutOfRange {
        /// Where the range begins.
        start: usize,
        /// Its length.
        len: usize,
        /// Bytes of the region.
        bytes: usize,
    },
    /// A range of which some byte is already handed out as a buffer.
    #[error("offset {start} + {len} overlaps a buffer that is in use")]
    InUse {
        /// Where the range begins.
        start: usize,
        /// Its length.
        len: usize,
    },
    /// A region cannot be frozen while buffers of it are in use.
    #[error("the region has {0} buffers in use; drop them before it is frozen")]
    BuffersInUse(usize),
    /// A region that others have already mapped cannot be frozen.
    #[error("only a region made with `register_freezable` can be frozen")]
    NotFreezable,
    /// A region that is made to be frozen is not handed out before.
    #[error("the region is made to be frozen; freeze it before it is handed out")]
    NotFrozen,
}

/// A protection tag: a virtual interface only touches regions of its own tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u32);

pub(crate) const SEALS_OWN: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);
const SEALS_FROZEN: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);
pub(crate) const SEALS_EXPORTED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

pub(crate) fn check_seals(fd: impl AsFd, len: u64, needed: SealFlags) -> Result<(), RegionError> {
    let found = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
    if !found.contains(needed) {
        return Err(RegionError::Unsealed { found: format!("{found:?}"), needed: format!("{needed:?}") });
    }
    let stat = rustix::fs::fstat(&fd).map_err(|errno| RegionError::Map(errno.into()))?;
    // Where tmpfs may use large pages it says so too, but has others when there are none.
    if u64::try_from(stat.st_blksize).unwrap_or(0) > rustix::param::page_size() as u64 && is_of_huge_pages(&fd)? {
        return Err(RegionError::HugePages);
    }
    let found = u64::try_from(stat.st_size).unwrap_or(0);
    if found != len {
        return Err(RegionError::WrongSize { found, expected: len });
    }
    Ok(())
}

fn is_of_huge_pages(fd: impl AsFd) -> Result<bool, RegionError> {
    let kind = rustix::fs::fstatfs(fd).map_err(|errno| RegionError::Map(errno.into()))?.f_type;
    Ok(kind as u32 == HUGETLBFS_MAGIC)
}

pub(crate) fn check_size(bytes: u64, limit: u64) -> Result<usize, RegionError> {
    match usize::try_from(bytes) {
        Ok(len) if len > 0 && bytes <= limit => Ok(len),
        _ => Err(RegionError::SizeLimit { bytes, limit }),
    }
}

/// This process's half of the memory that it shares with one peer: blocks and payload areas.
#[derive(Debug)]
pub struct OwnRegion {
    memory: OwnMemory,
    fd: OwnedFd,
}

impl OwnRegion {
    /// A sealed region of `bytes`; it takes memory only where it is touched.
    pub fn create(bytes: usize) -> Result<OwnRegion, RegionError> {
        let fd = sys::memfd(bytes).map_err(RegionError::Create)?;
        let mapping = Mapping::of(&fd, bytes, true).map_err(RegionError::Map)?;
        sys::seal(&fd, SEALS_OWN).map_err(RegionError::Create)?;
        let memory = OwnMemory(View::new(Arc::new(mapping)));
        memory.store64(REGION_LENGTH_AT, bytes as u64);
        memory.store32(REGION_VERSION_AT, LAYOUT_VERSION);
        memory.store32(REGION_CPU_AT, u32::MAX);
        memory.store64(0, REGION_MAGIC);
        Ok(OwnRegion { memory, fd })
    }

    /// The memory.
    pub fn memory(&self) -> &OwnMemory {
        &self.memory
    }

    /// The memory alone, which the other side has been given: the descriptor is closed.
    pub fn into_memory(self) -> OwnMemory {
        self.memory
    }
}

impl OwnMemory {
    /// Tells the peer whose region this is on which CPU this side waits.
    #[inline]
    pub fn note_cpu(&self, cpu: u32) {
        if self.load32(REGION_CPU_AT) != cpu {
            self.store32(REGION_CPU_AT, cpu);
        }
    }
}

impl AsFd for OwnRegion {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The peer's half.
#[derive(Debug)]
pub struct PeerRegion {
    memory: PeerMemory,
}

impl PeerRegion {
    /// Takes over a descriptor that a peer handed over, after checking it.
    pub fn adopt(fd: OwnedFd, bytes: u64, limit: impl Into<Allotment>) -> Result<PeerRegion, RegionError> {
        let limit = limit.into();
        let len = check_size(bytes, limit.region)?;
        check_seals(&fd, bytes, SEALS_OWN)?;
        let mapping = Mapping::of_peer(fd, len, false, &limit)?;
        let memory = PeerMemory::of(View::new(Arc::new(mapping)));
        let word64 = |at: usize| {
            let mut bytes = [0; 8];
            memory.copy_out(at, &mut bytes);
            u64::from_ne_bytes(bytes)
        };
        let header_good = len >= crate::layout::REGION_HEADER_BYTES
            && word64(0) == REGION_MAGIC
            && word64(REGION_VERSION_AT) as u32 == LAYOUT_VERSION;
        if header_good { Ok(PeerRegion { memory }) } else { Err(RegionError::WrongHeader) }
    }

    /// The memory.
    pub fn memory(&self) -> &PeerMemory {
        &self.memory
    }

    /// The CPU on which the peer last waited, as it says.
    #[inline]
    pub fn cpu(&self) -> u32 {
        self.memory.load32(REGION_CPU_AT)
    }
}

/// What may be done with a region that a peer handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Registered: we may read it, the peer may change it.
    Registered,
    /// Frozen: nobody can change it any more.
    Frozen,
    /// Exported: both may write it.
    Exported,
}

impl RegionKind {
    /// The number on the wire.
    pub fn number(self) -> u32 {
        match self {
            RegionKind::Registered => 1,
            RegionKind::Frozen => 2,
            RegionKind::Exported => 3,
        }
    }

    /// The kind of a number.
    pub fn from_number(number: u32) -> Option<RegionKind> {
        [RegionKind::Registered, RegionKind::Frozen, RegionKind::Exported]
            .into_iter()
            .find(|kind| kind.number() == number)
    }
}

/// A region of a peer's besides the pair's own: registered, frozen or exported.
#[derive(Clone, Debug)]
pub struct RemoteRegion {
    memory: SharedMemory,
    /// Device and inode of its memfd.
    file: (u64, u64),
    kind: RegionKind,
    tag: Tag,
}

impl RemoteRegion {
    /// Takes over a descriptor that a peer handed over, after checking it.
    pub fn adopt(fd: OwnedFd, kind: RegionKind, tag: Tag, bytes: u64, limit: u64) -> Result<RemoteRegion, RegionError> {
        RemoteRegion::adopt_beside([], fd, kind, tag, bytes, limit.into())
    }

    /// The same beside regions that the peer handed over before: memory that one of them is, is not mapped again.
    pub fn adopt_beside<'a>(
        known: impl IntoIterator<Item = &'a RemoteRegion>,
        fd: OwnedFd,
        kind: RegionKind,
        tag: Tag,
        bytes: u64,
        limit: Allotment,
    ) -> Result<RemoteRegion, RegionError> {
        let len = check_size(bytes, limit.region)?;
        let seals = match kind {
            RegionKind::Registered => SEALS_OWN,
            RegionKind::Frozen => SEALS_FROZEN,
            RegionKind::Exported => SEALS_EXPORTED,
        };
        check_seals(&fd, bytes, seals)?;
        let writable = kind == RegionKind::Exported;
        let stat = rustix::fs::fstat(&fd).map_err(|errno| RegionError::Map(errno.into()))?;
        let file = (stat.st_dev, stat.st_ino);
        let same = |other: &&RemoteRegion| other.file == file && (other.kind == RegionKind::Exported) == writable;
        let memory = match known.into_iter().find(same) {
            // It is sealed at its size, so that this is the whole of it.
            Some(known) => known.memory.clone(),
            None => SharedMemory(View::new(Arc::new(Mapping::of_peer(fd, len, writable, &limit)?))),
        };
        Ok(RemoteRegion { memory, file, kind, tag })
    }

    /// Its kind.
    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// Its protection tag.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// Its memory, for reading.
    pub fn memory(&self) -> PeerMemory {
        PeerMemory::of(self.memory.0.clone())
    }

    /// Asks the cache for the line at `at`, if that lies inside.
    #[inline]
    pub fn prefetch(&self, at: u64) {
        if at < self.memory.len() as u64 {
            sys::prefetch(&self.memory.0, at as usize);
        }
    }

    /// Turns `bytes` to a range of this region, if that is where it was before.
    #[inline]
    pub fn turn(&self, bytes: &mut crate::PeerBytes, offset: usize, len: usize) -> bool {
        bytes.turn_to_view(&self.memory.0, offset, len)
    }

    /// Its memory, for writing: exported regions only.
    pub fn writable(&self) -> Option<&SharedMemory> {
        (self.kind == RegionKind::Exported).then_some(&self.memory)
    }

    /// Bytes of a frozen region, as a slice: the seal guarantees that nobody can write them. None for another
    /// user's region, which may have holes and is read by copying only.
    pub fn frozen_bytes(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let inside = offset.checked_add(len)? <= self.memory.len();
        if self.kind != RegionKind::Frozen || !inside || self.memory.0.may_have_holes() {
            return None;
        }
        let pointer = self.memory.0.pointer(offset, len);
        // SAFETY: inside the mapping, and `adopt` verified F_SEAL_WRITE: no writable mapping
        // exists and none can be made, so the bytes never change while the mapping lives.
        Some(unsafe { std::slice::from_raw_parts(pointer, len) })
    }
}

static NEXT_REGION: AtomicU32 = AtomicU32::new(1);

#[derive(Debug)]
enum Taken {
    /// Ranges cut by the application.
    Slices(BTreeMap<usize, usize>),
    /// Equal frames of a pool.
    Frames { size: usize, free: Vec<usize> },
}

struct Inner {
    view: View,
    fd: OwnedFd,
    id: u32,
    tag: Tag,
    freezable: bool,
    taken: Mutex<Taken>,
}

/// Registered memory: what is sent from it need not be copied first, since peers map it.
#[derive(Clone)]
pub struct Region {
    inner: Arc<Inner>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({}, {} bytes, {:?})", self.inner.id, self.len(), self.inner.tag)
    }
}

impl Region {
    /// Registers `bytes` of new, zeroed, page-aligned memory.
    pub fn create(bytes: usize, tag: Tag) -> Result<Region, RegionError> {
        Region::build(bytes, tag, SEALS_OWN, Taken::Slices(BTreeMap::new()))
    }

    /// The same, not to be sent from before it is frozen.
    pub fn create_freezable(bytes: usize, tag: Tag) -> Result<Region, RegionError> {
        Region::build(bytes, tag, SealFlags::SHRINK | SealFlags::GROW, Taken::Slices(BTreeMap::new()))
    }

    pub(crate) fn create_frames(size: usize, count: usize, tag: Tag) -> Result<Region, RegionError> {
        let bytes = size.checked_mul(count).ok_or(RegionError::SizeLimit { bytes: u64::MAX, limit: 1 << 47 })?;
        let free = (0..count).rev().map(|index| index * size).collect();
        Region::build(bytes, tag, SEALS_OWN, Taken::Frames { size, free })
    }

    fn build(bytes: usize, tag: Tag, seals: SealFlags, taken: Taken) -> Result<Region, RegionError> {
        let len = check_size(bytes as u64, 1 << 47)?;
        let fd = sys::memfd(len).map_err(RegionError::Create)?;
        let mapping = Mapping::of(&fd, len, true).map_err(RegionError::Map)?;
        sys::seal(&fd, seals).map_err(RegionError::Create)?;
        let inner = Inner {
            view: View::new(Arc::new(mapping)),
            fd,
            id: NEXT_REGION.fetch_add(1, Ordering::Relaxed),
            tag,
            freezable: !seals.contains(SealFlags::SEAL),
            taken: Mutex::new(taken),
        };
        Ok(Region { inner: Arc::new(inner) })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.inner.view.len()
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its protection tag.
    pub fn tag(&self) -> Tag {
        self.inner.tag
    }

    /// Its number in this process.
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// True until it is frozen, for a region made to be.
    pub fn is_freezable(&self) -> bool {
        self.inner.freezable
    }

    /// The descriptor of its memory, by which others can read it and nobody can write it. A region that is yet to be
    /// frozen has none to give: until then the seals do not keep anybody from writing behind the backs of its buffers.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>, RegionError> {
        if self.inner.freezable { Err(RegionError::NotFrozen) } else { Ok(self.inner.fd.as_fd()) }
    }

    /// A range of it, as a buffer that nobody else has.
    pub fn slice(&self, range: Range<usize>) -> Result<Buffer, RegionError> {
        let (start, bytes) = (range.start, self.len());
        let len = range.end.saturating_sub(start);
        if range.end < start || range.end > bytes {
            return Err(RegionError::OutOfRange { start, len, bytes });
        }
        let mut taken = self.inner.lock();
        let Taken::Slices(slices) = &mut *taken else {
            return Err(RegionError::InUse { start, len });
        };
        let clash = slices.range(..range.end).next_back().is_some_and(|(_, end)| *end > start);
        // An empty buffer occupies the byte it begins at, so that it can be found again.
        if clash || slices.contains_key(&start) {
            return Err(RegionError::InUse { start, len });
        }
        slices.insert(start, range.end);
        drop(taken);
        Ok(Buffer::new(self.inner.clone(), start, len))
    }

    pub(crate) fn frame(&self) -> Option<Buffer> {
        let mut taken = self.inner.lock();
        let Taken::Frames { size, free } = &mut *taken else { return None };
        let (start, len) = (free.pop()?, *size);
        drop(taken);
        Some(Buffer::new(self.inner.clone(), start, len))
    }

    pub(crate) fn frames_free(&self) -> usize {
        match &*self.inner.lock() {
            Taken::Frames { free, .. } => free.len(),
            Taken::Slices(_) => 0,
        }
    }

    /// Makes the region immutable for everyone, for ever. All buffers must have been dropped.
    pub fn freeze(self) -> Result<Frozen, (Region, RegionError)> {
        if !self.inner.freezable {
            return Err((self, RegionError::NotFreezable));
        }
        let inner = match Arc::try_unwrap(self.inner) {
            Ok(inner) => inner,
            Err(inner) => {
                let others = Arc::strong_count(&inner) - 1;
                return Err((Region { inner }, RegionError::BuffersInUse(others)));
            }
        };
        let Inner { view, fd, id, tag, .. } = inner;
        let len = view.len();
        // The last writable mapping must be gone before the kernel accepts the seal.
        drop(view);
        let sealed = sys::seal(&fd, SealFlags::WRITE | SealFlags::SEAL);
        let writable = sealed.is_err();
        let mapping = Mapping::of(&fd, len, writable).expect("memory that was mapped can be mapped again");
        let view = View::new(Arc::new(mapping));
        match sealed {
            Ok(()) => Ok(Frozen { inner: Arc::new(FrozenInner { view, fd, id, tag }) }),
            Err(error) => {
                let taken = Mutex::new(Taken::Slices(BTreeMap::new()));
                let inner = Inner { view, fd, id, tag, freezable: true, taken };
                Err((Region { inner: Arc::new(inner) }, RegionError::Create(error)))
            }
        }
    }
}

impl Inner {
    fn lock(&self) -> std::sync::MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece of registered memory that belongs to whoever has this value, and to nobody else. It goes
/// into a descriptor by value and comes back with the completion.
///
/// It is one pointer wide, so that passing it through descriptors and completions costs nothing.
pub struct Buffer {
    place: Box<Place>,
}

struct Place {
    region: Arc<Inner>,
    start: usize,
    len: usize,
    capacity: usize,
}

impl Buffer {
    fn new(region: Arc<Inner>, start: usize, len: usize) -> Buffer {
        Buffer { place: Box::new(Place { region, start, len, capacity: len }) }
    }

    /// The region it is a piece of.
    pub fn region(&self) -> Region {
        Region { inner: self.place.region.clone() }
    }

    /// Number of that region in this process.
    #[inline]
    pub fn region_id(&self) -> u32 {
        self.place.region.id
    }

    /// The region's protection tag.
    #[inline]
    pub fn tag(&self) -> Tag {
        self.place.region.tag
    }

    /// True if it can be sent from: false for a region that is yet to be frozen.
    #[inline]
    pub fn is_sendable(&self) -> bool {
        !self.place.region.freezable
    }

    /// Offset in the region.
    #[inline]
    pub fn offset(&self) -> usize {
        self.place.start
    }

    /// Bytes it had when it was handed out.
    pub fn capacity(&self) -> usize {
        self.place.capacity
    }

    /// Bytes that it shows.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.place.len
    }

    /// True if it shows none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Shows only the first `len` bytes, or more of them again, up to the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.place.capacity, "a buffer of {} bytes cannot have {len}", self.place.capacity);
        self.place.len = len;
    }

    /// Asks the cache for its first line, to be written: a peer has read it last.
    #[inline]
    pub fn prefetch_to_write(&self) {
        sys::prefetch_to_write(&self.place.region.view, self.place.start);
    }

    /// Asks the cache for all lines of `range`, as far as it has so many bytes. To be written too: nobody else has
    /// them, and so many requests to write would wait for each other longer.
    pub fn prefetch_range(&self, range: Range<usize>) {
        let end = range.end.min(self.len());
        for at in (range.start..end).step_by(LINE) {
            sys::prefetch(&self.place.region.view, self.place.start + at);
        }
    }

    /// Makes it read-only and counted, so that several messages can carry it at once.
    pub fn share(self) -> SharedBuffer {
        SharedBuffer { buffer: Arc::new(self) }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let pointer = self.place.region.view.pointer(self.place.start, self.place.len);
        // SAFETY: inside the mapping; the range is handed out once, peers can only read it (the
        // future-write seal; of a region that is to be frozen nobody has the descriptor), and remote
        // operations never name it while we have it.
        unsafe { std::slice::from_raw_parts(pointer, self.place.len) }
    }
}

impl DerefMut for Buffer {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        let pointer = self.place.region.view.pointer(self.place.start, self.place.len);
        // SAFETY: as in `deref`, and we are borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(pointer, self.place.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &mut *self.place.region.lock() {
            Taken::Slices(slices) => {
                slices.remove(&self.place.start);
            }
            Taken::Frames { free, .. } => free.push(self.place.start),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes at {} of region {})", self.place.len, self.place.start, self.place.region.id)
    }
}

/// A counted, read-only buffer.
#[derive(Clone, Debug)]
pub struct SharedBuffer {
    buffer: Arc<Buffer>,
}

impl SharedBuffer {
    /// The buffer behind it.
    #[inline]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The buffer for writing again, if nobody else counts on it.
    pub fn into_exclusive(self) -> Result<Buffer, SharedBuffer> {
        Arc::try_unwrap(self.buffer).map_err(|buffer| SharedBuffer { buffer })
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer
    }
}

struct FrozenInner {
    view: View,
    fd: OwnedFd,
    id: u32,
    tag: Tag,
}

/// A region that nobody can change any more: receivers may borrow it as slices.
#[derive(Clone)]
pub struct Frozen {
    inner: Arc<FrozenInner>,
}

impl Frozen {
    /// Its number in this process.
    pub fn id(&self) -> u32 {
        self.inner.id
    }

    /// Its protection tag.
    pub fn tag(&self) -> Tag {
        self.inner.tag
    }
}

impl Deref for Frozen {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let view = &self.inner.view;
        // SAFETY: the whole mapping; F_SEAL_WRITE holds, so it never changes.
        unsafe { std::slice::from_raw_parts(view.pointer(0, view.len()), view.len()) }
    }
}

impl AsFd for Frozen {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.fd.as_fd()
    }
}

impl fmt::Debug for Frozen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Frozen({}, {} bytes)", self.inner.id, self.len())
    }
}

/// Memory that its owner exported on purpose: peers it is granted to may read and write it.
#[derive(Clone)]
pub struct Exported {
    memory: SharedMemory,
    fd: Arc<OwnedFd>,
    id: u32,
    tag: Tag,
}

impl Exported {
    /// `bytes` of new, zeroed memory, granted to nobody yet.
    pub fn create(bytes: usize, tag: Tag) -> Result<Exported, RegionError> {
        let len = check_size(bytes as u64, 1 << 47)?;
        let fd = sys::memfd(len).map_err(RegionError::Create)?;
        sys::seal(&fd, SEALS_EXPORTED).map_err(RegionError::Create)?;
        let mapping = Mapping::of(&fd, len, true).map_err(RegionError::Map)?;
        Ok(Exported {
            memory: SharedMemory(View::new(Arc::new(mapping))),
            fd: Arc::new(fd),
            id: NEXT_REGION.fetch_add(1, Ordering::Relaxed),
            tag,
        })
    }

    /// The memory, which peers may change at any time.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Its number in this process.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Its protection tag.
    pub fn tag(&self) -> Tag {
        self.tag
    }
}

impl AsFd for Exported {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exported({}, {} bytes, {:?})", self.id, self.memory.len(), self.tag)
    }
}

/// Of the file system that memfds of huge pages are files of.
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;
/// Bytes of a line of the cache.
const LINE: usize = 64;

#[cfg(test)]
mod tests;
