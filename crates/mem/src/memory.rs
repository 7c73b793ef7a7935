//! Mapped memory, as words that are read and written atomically and bytes that are copied.
//!
//! Three views of the same thing differ in what they allow: [`OwnMemory`] (this process writes, the
//! peer reads), [`PeerMemory`] (the other way round) and [`SharedMemory`] (both write: doorbell
//! pages, exported regions and lanes only).

use crate::sync::{Ordering, fence};
use std::fmt;

#[cfg(not(loom))]
pub(crate) use mapped::View;
#[cfg(loom)]
pub(crate) use modelled::View;

/// Memory that this process writes and its peer can only read.
#[derive(Clone)]
pub struct OwnMemory(pub(crate) View);

macro_rules! prefetches {
    ($name:ident) => {
        impl $name {
            /// Asks for the line at `at`, to be written. Panics outside the mapping.
            #[cfg(not(loom))]
            #[inline(always)]
            pub fn prefetch_to_write(&self, at: usize) {
                crate::sys::prefetch_to_write(&self.0, at);
            }

            /// Models know no caches.
            #[cfg(loom)]
            pub fn prefetch_to_write(&self, _at: usize) {}
        }
    };
}

prefetches!(OwnMemory);
prefetches!(SharedMemory);

/// Memory that a peer writes and this process can only read. The peer may change it at any time.
#[derive(Clone)]
pub struct PeerMemory(ReadOnly);

/// Memory that this process and its peers both write.
#[derive(Clone)]
pub struct SharedMemory(pub(crate) View);

/// A view of memory that may be mapped to be read only. Of such memory only relaxed loads are defined, of no more than a
/// double word: others may be instructions that write. A fence behind a relaxed load orders it as an acquiring one would be,
/// and costs nothing on x86-64.
#[derive(Clone)]
struct ReadOnly(View);

impl ReadOnly {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    fn load32(&self, at: usize, order: Ordering) -> u32 {
        let value = self.0.load32(at, Ordering::Relaxed);
        fence_behind(order);
        value
    }

    #[inline(always)]
    fn load64(&self, at: usize, order: Ordering) -> u64 {
        let value = self.0.load64(at, Ordering::Relaxed);
        fence_behind(order);
        value
    }

    #[inline(always)]
    fn copy_out(&self, at: usize, into: &mut [u8]) {
        if self.0.may_have_holes() {
            self.0.copy_out_around_holes(at, into);
        } else {
            self.0.copy_out(at, into);
        }
    }
}

#[inline(always)]
fn fence_behind(order: Ordering) {
    if order != Ordering::Relaxed {
        fence(order);
    }
}

impl PeerMemory {
    // Under loom only the models make any.
    #[cfg_attr(loom, allow(dead_code))]
    pub(crate) fn of(view: View) -> PeerMemory {
        PeerMemory(ReadOnly(view))
    }

    /// Reads the double word at byte `at`, in no order with anything. Panics outside the mapping.
    #[inline(always)]
    pub(crate) fn glance64(&self, at: usize) -> u64 {
        self.0.load64(at, Ordering::Relaxed)
    }

    /// Copies bytes out of a page of which a word was read before, which is no hole then. Panics outside the mapping.
    #[inline]
    pub(crate) fn copy_out_of_slot(&self, at: usize, into: &mut [u8]) {
        self.0.0.copy_out(at, into);
    }

    /// The bytes from `at` on. Panics outside the mapping.
    #[cfg(not(loom))]
    pub(crate) fn part(self, at: usize, len: usize) -> PeerMemory {
        PeerMemory::of(self.0.0.part(at, len))
    }

    /// Becomes the part of `whole` from `at` on, if it is a view of the same mapping.
    #[cfg(not(loom))]
    #[inline]
    pub(crate) fn turn_to(&mut self, whole: &View, at: usize, len: usize) -> bool {
        self.0.0.turn_to(whole, at, len)
    }

    /// Asks the cache for the line at `at`. Panics outside the mapping.
    #[cfg(not(loom))]
    #[inline(always)]
    pub(crate) fn prefetch(&self, at: usize) {
        crate::sys::prefetch(&self.0.0, at);
    }
}

macro_rules! reads {
    ($name:ident) => {
        impl $name {
            /// Bytes mapped.
            #[inline]
            pub fn len(&self) -> usize {
                self.0.len()
            }

            /// True for a mapping of no bytes, which is never made.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Reads the word at byte `at` with acquire order. Panics outside the mapping.
            #[inline]
            pub fn load32(&self, at: usize) -> u32 {
                self.0.load32(at, Ordering::Acquire)
            }

            /// Reads the double word at byte `at` with acquire order. Panics outside the mapping.
            #[inline]
            pub fn load64(&self, at: usize) -> u64 {
                self.0.load64(at, Ordering::Acquire)
            }

            /// Copies bytes out. Panics outside the mapping.
            #[inline]
            pub fn copy_out(&self, at: usize, into: &mut [u8]) {
                self.0.copy_out(at, into);
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({} bytes)"), self.len())
            }
        }
    };
}

macro_rules! writes {
    ($name:ident) => {
        impl $name {
            /// Writes the word at byte `at` with release order. Panics outside the mapping.
            #[inline]
            pub fn store32(&self, at: usize, value: u32) {
                self.0.store32(at, value, Ordering::Release);
            }

            /// Writes the double word at byte `at` with release order. Panics outside the mapping.
            #[inline]
            pub fn store64(&self, at: usize, value: u64) {
                self.0.store64(at, value, Ordering::Release);
            }

            /// Copies bytes in. Panics outside the mapping.
            #[inline]
            pub fn copy_in(&self, at: usize, from: &[u8]) {
                self.0.copy_in(at, from);
            }
        }
    };
}

impl SharedMemory {
    /// Memory that takes part in a model: the words and bytes at these places are made now, before threads begin.
    #[cfg(loom)]
    pub fn modelled(len: usize, narrow: &[usize], wide: &[usize], copied: &[usize]) -> SharedMemory {
        let view = View::new(len);
        view.touch(narrow, wide, copied);
        SharedMemory(view)
    }

    /// `bytes` of new, zeroed memory that can be handed to others to be written by all. It takes memory only where
    /// it is touched, and cannot be cut short.
    #[cfg(not(loom))]
    pub fn create(bytes: usize) -> Result<(SharedMemory, std::os::fd::OwnedFd), crate::RegionError> {
        let fd = crate::sys::memfd(bytes).map_err(crate::RegionError::Create)?;
        crate::sys::seal(&fd, crate::region::SEALS_EXPORTED).map_err(crate::RegionError::Create)?;
        let memory = SharedMemory::of(&fd, bytes)?;
        Ok((memory, fd))
    }

    /// Takes over memory that somebody else made with [`create`](SharedMemory::create), after checking that it cannot
    /// be cut short.
    #[cfg(not(loom))]
    pub fn adopt(fd: std::os::fd::BorrowedFd<'_>, bytes: usize) -> Result<SharedMemory, crate::RegionError> {
        crate::region::check_seals(fd, bytes as u64, crate::region::SEALS_EXPORTED)?;
        SharedMemory::of(fd, bytes)
    }

    #[cfg(not(loom))]
    fn of(fd: impl std::os::fd::AsFd, bytes: usize) -> Result<SharedMemory, crate::RegionError> {
        let mapping = crate::sys::Mapping::of(fd, bytes, true).map_err(crate::RegionError::Map)?;
        Ok(SharedMemory(View::new(std::sync::Arc::new(mapping))))
    }

    /// Reads the double word at byte `at`, in no order with anything. Panics outside the mapping.
    #[inline]
    pub fn glance64(&self, at: usize) -> u64 {
        self.0.load64(at, Ordering::Relaxed)
    }

    /// Asks the cache for the line at `at`, to be read. Panics outside the mapping.
    #[inline(always)]
    pub fn prefetch(&self, at: usize) {
        #[cfg(not(loom))]
        crate::sys::prefetch(&self.0, at);
        #[cfg(loom)]
        let _ = at;
    }

    /// Replaces the double word at byte `at` if it is `old`; otherwise tells what it is. Sequentially consistent.
    /// Panics outside the mapping.
    #[inline]
    pub fn exchange64(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
        self.0.exchange64(at, old, new)
    }

    /// Replaces the word at byte `at` if it is `old`; otherwise tells what it is. Sequentially consistent. Panics
    /// outside the mapping.
    #[inline]
    pub fn exchange32(&self, at: usize, old: u32, new: u32) -> Result<(), u32> {
        self.0.exchange32(at, old, new)
    }

    /// Adds to the double word at byte `at` and returns what it was. Panics outside the mapping.
    #[inline]
    pub fn add64(&self, at: usize, value: u64) -> u64 {
        self.0.add64(at, value)
    }

    /// Adds to the word at byte `at`, which wraps around, and returns what it was. Panics outside the mapping.
    #[inline]
    pub fn add32(&self, at: usize, value: u32) -> u32 {
        self.0.add32(at, value)
    }

    /// Where the `bytes` from `at` on are, for the kernel to read or write. Panics outside the mapping.
    #[cfg(not(loom))]
    pub fn pointer(&self, at: usize, bytes: usize) -> *mut u8 {
        self.0.pointer(at, bytes)
    }

    /// Gives the memory of whole pages back; they read as zero afterwards, for everybody.
    #[cfg(not(loom))]
    pub fn give_back(&self, at: usize, bytes: usize) {
        crate::sys::remove_pages(&self.0, at, bytes);
    }
}

reads!(OwnMemory);
reads!(PeerMemory);
reads!(SharedMemory);
writes!(OwnMemory);
writes!(SharedMemory);

#[cfg(not(loom))]
mod mapped {
    use crate::sync::{AtomicU32, AtomicU64, Ordering};
    use crate::sys::Mapping;
    use std::sync::Arc;

    /// A mapping and a cached base, so that an access is one add and one compare.
    #[derive(Clone)]
    pub(crate) struct View {
        base: *mut u8,
        len: usize,
        /// Where a double word no longer fits.
        words_end: usize,
        keep: Arc<Mapping>,
    }

    // SAFETY: a View only hands out atomic operations and byte copies on memory that stays mapped
    // while `keep` lives; nothing in it belongs to one thread.
    unsafe impl Send for View {}
    // SAFETY: as above.
    unsafe impl Sync for View {}

    #[cold]
    #[inline(never)]
    fn outside(at: usize, bytes: usize, len: usize) -> ! {
        panic!("offset {at} + {bytes} is outside the mapping of {len} bytes");
    }

    // Told by value and not by an `assert!`, which would put the offset into memory for its message.
    #[cold]
    #[inline(never)]
    fn misaligned(at: usize, word: usize) -> ! {
        panic!("offset {at} is not a multiple of {word}");
    }

    #[inline(always)]
    fn words_end(len: usize) -> usize {
        len.saturating_sub(7)
    }

    impl View {
        pub(crate) fn new(mapping: Arc<Mapping>) -> View {
            View { base: mapping.base(), len: mapping.len(), words_end: words_end(mapping.len()), keep: mapping }
        }

        #[inline(always)]
        pub(crate) fn len(&self) -> usize {
            self.len
        }

        /// A view of `len` bytes from `at` on, for copying only: words in it need not be aligned.
        #[inline]
        pub(crate) fn part(self, at: usize, len: usize) -> View {
            View { base: self.pointer(at, len), len, words_end: words_end(len), keep: self.keep }
        }

        /// Becomes the part of `whole` from `at` on, if it is a view of the same mapping.
        #[inline]
        pub(crate) fn turn_to(&mut self, whole: &View, at: usize, len: usize) -> bool {
            let same = Arc::ptr_eq(&self.keep, &whole.keep);
            if same {
                (self.base, self.len, self.words_end) = (whole.pointer(at, len), len, words_end(len));
            }
            same
        }

        #[inline(always)]
        pub(crate) fn pointer(&self, at: usize, bytes: usize) -> *mut u8 {
            if at > self.len || bytes > self.len - at {
                outside(at, bytes, self.len);
            }
            // SAFETY: `at + bytes` was checked to lie inside the mapping.
            unsafe { self.base.add(at) }
        }

        #[inline(always)]
        fn word32(&self, at: usize) -> &AtomicU32 {
            if !at.is_multiple_of(4) {
                misaligned(at, 4);
            }
            // SAFETY: inside the mapping, aligned (mappings begin on a page), and atomics are the
            // only way this crate touches it as a word; a peer's writes are atomic for the machine.
            unsafe { AtomicU32::from_ptr(self.pointer(at, 4).cast()) }
        }

        #[inline(always)]
        fn word64(&self, at: usize) -> &AtomicU64 {
            if !at.is_multiple_of(8) {
                misaligned(at, 8);
            }
            if at >= self.words_end {
                outside(at, 8, self.len);
            }
            // SAFETY: as in `word32`; `at + 8` lies inside the mapping by the check above.
            unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) }
        }

        #[inline(always)]
        pub(crate) fn load32(&self, at: usize, order: Ordering) -> u32 {
            self.word32(at).load(order)
        }

        #[inline(always)]
        pub(crate) fn store32(&self, at: usize, value: u32, order: Ordering) {
            self.word32(at).store(value, order);
        }

        #[inline(always)]
        pub(crate) fn load64(&self, at: usize, order: Ordering) -> u64 {
            self.word64(at).load(order)
        }

        #[inline(always)]
        pub(crate) fn store64(&self, at: usize, value: u64, order: Ordering) {
            self.word64(at).store(value, order);
        }

        pub(crate) fn add32(&self, at: usize, value: u32) -> u32 {
            self.word32(at).fetch_add(value, Ordering::SeqCst)
        }

        #[inline(always)]
        pub(crate) fn add64(&self, at: usize, value: u64) -> u64 {
            self.word64(at).fetch_add(value, Ordering::SeqCst)
        }

        #[inline(always)]
        pub(crate) fn exchange64(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
            self.word64(at).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
        }

        #[inline(always)]
        pub(crate) fn exchange32(&self, at: usize, old: u32, new: u32) -> Result<(), u32> {
            self.word32(at).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
        }

        #[inline(always)]
        pub(crate) fn or64(&self, at: usize, bits: u64) -> u64 {
            self.word64(at).fetch_or(bits, Ordering::SeqCst)
        }

        pub(crate) fn swap64(&self, at: usize, value: u64) -> u64 {
            self.word64(at).swap(value, Ordering::SeqCst)
        }

        #[inline(always)]
        pub(crate) fn copy_in(&self, at: usize, from: &[u8]) {
            let to = self.pointer(at, from.len());
            // SAFETY: both ranges are valid for their length; `from` is an ordinary slice, which
            // never overlaps a mapping reached through a View (buffers lent as slices are views
            // of ranges that this crate hands out once, and callers never copy one onto itself).
            // Other threads and the peer may use the destination meanwhile.
            unsafe { crate::copy::copy_in(from.as_ptr(), to, from.len()) }
        }

        #[inline(always)]
        pub(crate) fn copy_out(&self, at: usize, into: &mut [u8]) {
            let from = self.pointer(at, into.len());
            // SAFETY: both ranges are valid for their length, and `into` is ours alone. The peer, and
            // other threads, may write the source while it is copied: the copy then holds any mixture
            // of old and new bytes, which is why everything copied out is checked afterwards or is the
            // caller's opaque data. It is made once: the check and the use cannot each read the peer's
            // memory, which changes in between.
            unsafe { crate::copy::copy_out(from, into.as_mut_ptr(), into.len()) }
        }

        /// Whether pages may be missing that reading is not to make.
        #[inline(always)]
        pub(crate) fn may_have_holes(&self) -> bool {
            self.keep.holes().is_some()
        }

        /// Copies bytes out by a system call. Panics outside the mapping.
        #[cold]
        #[inline(never)]
        pub(crate) fn copy_out_around_holes(&self, at: usize, into: &mut [u8]) {
            let Some(holes) = self.keep.holes() else { return self.copy_out(at, into) };
            let place = self.place(at, into.len());
            if !holes.read(place, into) {
                self.copy_out(at, into);
            }
        }

        /// Where bytes of this view are in the whole mapping.
        fn place(&self, at: usize, bytes: usize) -> usize {
            self.pointer(at, bytes) as usize - self.keep.base() as usize
        }

        #[inline(always)]
        pub(crate) fn futex(&self, at: usize) -> *const u32 {
            self.pointer(at, 4).cast()
        }

        pub(crate) fn wake(&self, at: usize) {
            crate::sys::futex_wake(self.futex(at));
        }
    }
}

#[cfg(loom)]
mod modelled {
    //! Memory for the model checker: words that are loom's atomics, and copied bytes that are loom's
    //! cells, so that a copy which races with another is reported. They are made where they are
    //! first touched; what several threads use must be touched before these begin.

    use crate::sync::{AtomicU32, AtomicU64, Ordering};
    use loom::cell::UnsafeCell;
    use std::collections::HashMap;
    use std::rc::Rc;
    use std::sync::{Arc, Mutex};

    #[derive(Default)]
    struct Words {
        narrow: HashMap<usize, Arc<AtomicU32>>,
        wide: HashMap<usize, Arc<AtomicU64>>,
        copied: HashMap<usize, Rc<UnsafeCell<[u8; 4]>>>,
    }

    #[derive(Clone)]
    pub(crate) struct View {
        words: Arc<Mutex<Words>>,
        sleep: Arc<(loom::sync::Mutex<()>, loom::sync::Condvar)>,
        len: usize,
    }

    impl View {
        pub(crate) fn new(len: usize) -> View {
            View {
                words: Arc::default(),
                sleep: Arc::new((loom::sync::Mutex::new(()), loom::sync::Condvar::new())),
                len,
            }
        }

        /// Makes the words at these places.
        pub(crate) fn touch(&self, narrow: &[usize], wide: &[usize], copied: &[usize]) {
            narrow.iter().for_each(|at| drop(self.narrow(*at)));
            wide.iter().for_each(|at| drop(self.wide(*at)));
            copied.iter().for_each(|at| drop(self.copied(*at)));
        }

        pub(crate) fn len(&self) -> usize {
            self.len
        }

        fn narrow(&self, at: usize) -> Arc<AtomicU32> {
            assert!(at + 4 <= self.len && at.is_multiple_of(4));
            let mut words = self.words.lock().unwrap();
            words.narrow.entry(at).or_insert_with(|| Arc::new(AtomicU32::new(0))).clone()
        }

        fn wide(&self, at: usize) -> Arc<AtomicU64> {
            assert!(at + 8 <= self.len && at.is_multiple_of(8));
            let mut words = self.words.lock().unwrap();
            words.wide.entry(at).or_insert_with(|| Arc::new(AtomicU64::new(0))).clone()
        }

        fn copied(&self, at: usize) -> Rc<UnsafeCell<[u8; 4]>> {
            assert!(at + 4 <= self.len && at.is_multiple_of(4), "the model copies whole words");
            let mut words = self.words.lock().unwrap();
            words.copied.entry(at).or_insert_with(|| Rc::new(UnsafeCell::new([0; 4]))).clone()
        }

        pub(crate) fn load32(&self, at: usize, order: Ordering) -> u32 {
            self.narrow(at).load(order)
        }

        pub(crate) fn store32(&self, at: usize, value: u32, order: Ordering) {
            self.narrow(at).store(value, order);
        }

        pub(crate) fn load64(&self, at: usize, order: Ordering) -> u64 {
            self.wide(at).load(order)
        }

        pub(crate) fn store64(&self, at: usize, value: u64, order: Ordering) {
            self.wide(at).store(value, order);
        }

        pub(crate) fn add32(&self, at: usize, value: u32) -> u32 {
            self.narrow(at).fetch_add(value, Ordering::SeqCst)
        }

        pub(crate) fn add64(&self, at: usize, value: u64) -> u64 {
            self.wide(at).fetch_add(value, Ordering::SeqCst)
        }

        pub(crate) fn exchange64(&self, at: usize, old: u64, new: u64) -> Result<(), u64> {
            self.wide(at).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
        }

        pub(crate) fn exchange32(&self, at: usize, old: u32, new: u32) -> Result<(), u32> {
            self.narrow(at).compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst).map(drop)
        }

        pub(crate) fn or64(&self, at: usize, bits: u64) -> u64 {
            self.wide(at).fetch_or(bits, Ordering::SeqCst)
        }

        pub(crate) fn swap64(&self, at: usize, value: u64) -> u64 {
            self.wide(at).swap(value, Ordering::SeqCst)
        }

        pub(crate) fn copy_in(&self, at: usize, from: &[u8]) {
            for (index, chunk) in from.chunks(4).enumerate() {
                // SAFETY: loom runs one thread at a time, and reports an access that could race.
                self.copied(at + index * 4)
                    .with_mut(|word| unsafe { (&mut *word)[..chunk.len()].copy_from_slice(chunk) });
            }
        }

        pub(crate) fn copy_out(&self, at: usize, into: &mut [u8]) {
            for (index, chunk) in into.chunks_mut(4).enumerate() {
                // SAFETY: as in `copy_in`.
                self.copied(at + index * 4).with(|word| unsafe { chunk.copy_from_slice(&(&*word)[..chunk.len()]) });
            }
        }

        pub(crate) fn may_have_holes(&self) -> bool {
            false
        }

        pub(crate) fn copy_out_around_holes(&self, _at: usize, _into: &mut [u8]) {}

        /// The kernel's futex: compares under a lock and sleeps; a wake-up that comes between is
        /// not lost, one that never comes is a deadlock that loom reports.
        pub(crate) fn sleep_while(&self, at: usize, value: u32) {
            let mut guard = self.sleep.0.lock().unwrap();
            if self.load32(at, Ordering::SeqCst) == value {
                guard = self.sleep.1.wait(guard).unwrap();
            }
            drop(guard);
        }

        pub(crate) fn wake(&self, _at: usize) {
            let guard = self.sleep.0.lock().unwrap();
            self.sleep.1.notify_all();
            drop(guard);
        }
    }
}
