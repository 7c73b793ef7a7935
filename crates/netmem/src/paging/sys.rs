//! The system calls of paging: the mapping whose faults are ours, futexes, and the memory that pages pass through.
//!
//! What a signal handler calls of these neither allocates nor locks: system calls and atomic operations only.

use super::PagingError;
use super::store::PAGE_BYTES;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::ioctl::opcode;
use rustix::mm::{MapFlags, ProtFlags};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// An error number of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Errno(pub(super) i32);

impl Errno {
    fn last() -> Errno {
        // SAFETY: the address of this thread's error number is always valid.
        Errno(unsafe { *libc::__errno_location() })
    }
}

/// Consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) pages: u32,
}

impl Run {
    pub(super) fn bytes(self) -> usize {
        self.pages as usize * PAGE_BYTES
    }

    pub(super) fn end(self) -> u64 {
        self.first + u64::from(self.pages)
    }
}

/// A range of private memory whose faults raise SIGBUS in the thread that faults. No child inherits it.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    faults: OwnedFd,
    /// This process, for giving back many pages by one call; none where the kernel cannot do that.
    this_process: Option<OwnedFd>,
    drops_many: AtomicBool,
}

// SAFETY: the range belongs to the process, not to a thread; access is by copying and by atomic operations.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(super) fn create(bytes: usize) -> Result<Mapping, PagingError> {
        let faults = open_faults()?;
        let no_memory = || PagingError::Mapping { bytes: bytes as u64, errno: Errno::last().0 };
        let base = map(bytes, ProtFlags::READ | ProtFlags::WRITE).ok_or_else(no_memory)?;
        let this_process =
            rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty()).ok();
        let drops_many = AtomicBool::new(this_process.is_some());
        let mapping = Mapping { base, bytes, faults, this_process, drops_many };
        // A child gets nothing at these addresses: it has no pager, and would find zeros in place of what was pushed out.
        // Huge pages would be filled by the kernel with pages that nobody asked for.
        for advice in [libc::MADV_DONTFORK, libc::MADV_NOHUGEPAGE] {
            // SAFETY: the range was mapped above and holds nothing yet. A kernel without huge pages refuses the second,
            // and needs none.
            let refused = unsafe { libc::madvise(base.as_ptr().cast(), bytes, advice) } != 0;
            if refused && advice == libc::MADV_DONTFORK {
                return Err(no_memory());
            }
        }
        let mut register = UffdioRegister {
            range: UffdioRange { start: base.as_ptr() as u64, len: bytes as u64 },
            mode: REGISTER_MISSING | REGISTER_PROTECTED,
            ioctls: 0,
        };
        mapping
            .control(opcode::read_write::<UffdioRegister>(UFFDIO, 0x00), &mut register)
            .map_err(|Errno(errno)| PagingError::FaultsRefused { errno })?;
        let needed = 1 << 0x03 | 1 << 0x06;
        if register.ioctls & needed != needed {
            return Err(PagingError::KernelTooOld { missing: "write protection by userfaultfd", least: (5, 11) });
        }
        Ok(mapping)
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn address(&self, page: u64) -> u64 {
        debug_assert!(page < (self.bytes / PAGE_BYTES) as u64);
        self.base.as_ptr() as u64 + page * PAGE_BYTES as u64
    }

    fn control<T>(&self, code: rustix::ioctl::Opcode, argument: &mut T) -> Result<(), Errno> {
        // SAFETY: every caller passes the structure that belongs to the code, which the code's own size says.
        let done = unsafe { libc::ioctl(self.faults.as_raw_fd(), code as _, std::ptr::from_mut(argument)) };
        if done == 0 { Ok(()) } else { Err(Errno::last()) }
    }

    /// Puts content where no pages are. Protected pages tell of their first write.
    ///
    /// Says how many pages are placed, which with an error are not all: they can be used, and written, from that moment on.
    pub(super) fn place(&self, first: u64, content: &[u8], protected: bool) -> (u32, Result<(), Errno>) {
        assert!(content.len().is_multiple_of(PAGE_BYTES));
        assert!(first as usize * PAGE_BYTES + content.len() <= self.bytes);
        let mut done = 0;
        let outcome = loop {
            let mut copy = UffdioCopy {
                dst: self.address(first) + done as u64,
                src: content.as_ptr() as u64 + done as u64,
                len: (content.len() - done) as u64,
                // Nobody sleeps in the kernel for these pages: a fault is a signal.
                mode: COPY_DONT_WAKE | if protected { COPY_PROTECTED } else { 0 },
                copy: 0,
            };
            match self.control(opcode::read_write::<UffdioCopy>(UFFDIO, 0x03), &mut copy) {
                Ok(()) => {
                    done = content.len();
                    break Ok(());
                }
                // The kernel was disturbed, and says how far it came.
                Err(Errno(libc::EAGAIN)) => done += usize::try_from(copy.copy).unwrap_or(0),
                Err(error) => break Err(error),
            }
        };
        ((done / PAGE_BYTES) as u32, outcome)
    }

    /// Makes the first write to these pages a fault, or lets them be written.
    pub(super) fn protect(&self, run: Run, protected: bool) -> Result<(), Errno> {
        let mut protect = UffdioWriteProtect {
            range: UffdioRange { start: self.address(run.first), len: run.bytes() as u64 },
            mode: if protected { PROTECT } else { PROTECT_DONT_WAKE },
        };
        loop {
            match self.control(opcode::read_write::<UffdioWriteProtect>(UFFDIO, 0x06), &mut protect) {
                Err(Errno(libc::EAGAIN)) => {}
                done => return done,
            }
        }
    }

    /// Gives pages back to the kernel; the next access to one faults. With one flush of the processors' address caches for
    /// all of them where the kernel can.
    pub(super) fn drop_runs(&self, runs: &[Run]) {
        for runs in runs.chunks(DROP_RUNS_MAX) {
            let mut ranges = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; DROP_RUNS_MAX];
            for (range, run) in ranges.iter_mut().zip(runs) {
                assert!(run.end() as usize * PAGE_BYTES <= self.bytes);
                *range = libc::iovec { iov_base: self.address(run.first) as *mut _, iov_len: run.bytes() };
            }
            let bytes: usize = runs.iter().map(|run| run.bytes()).sum();
            if runs.len() > 1 && self.drop_many(&ranges[..runs.len()], bytes) {
                continue;
            }
            ranges[..runs.len()].iter().for_each(|range| self.drop_range(range));
        }
    }

    /// Gives the pages of one range back. Of memory that is locked the kernel takes none: a process that has locked all it
    /// had (mlockall) has it here as without, unlocked.
    fn drop_range(&self, range: &libc::iovec) {
        for _ in 0..LOCKED_AGAIN_MAX {
            // SAFETY: pages of this mapping. Whatever is read there next comes from where the pages are kept; no
            // reference to plain bytes of the mapping is ever formed.
            if unsafe { libc::madvise(range.iov_base, range.iov_len, libc::MADV_DONTNEED) } == 0 {
                return;
            }
            let error = Errno::last();
            // SAFETY: this mapping, whose content this does not change.
            let unlocked = unsafe { libc::munlock(self.base.as_ptr().cast(), self.bytes) } == 0;
            assert!(error == Errno(libc::EINVAL) && unlocked, "the kernel does not take pages back: error {}", error.0);
            // Perhaps it was for the lock that many at once were refused.
            self.drops_many.store(self.this_process.is_some(), Ordering::Relaxed);
        }
        panic!("the kernel does not take pages back: they are locked again and again");
    }

    fn drop_many(&self, ranges: &[libc::iovec], bytes: usize) -> bool {
        let Some(process) = self.this_process.as_ref().filter(|_| self.drops_many.load(Ordering::Relaxed)) else {
            return false;
        };
        // SAFETY: as in `drop_runs`; the ranges live until the call returns.
        let dropped = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                process.as_raw_fd(),
                ranges.as_ptr(),
                ranges.len(),
                libc::MADV_DONTNEED,
                0,
            )
        };
        let all = dropped == bytes as libc::c_long;
        if !all {
            // A kernel before 6.13 takes this advice from no process, not even for itself; any kernel refuses it for locked
            // memory. Dropping a page a second time one by one does no harm.
            self.drops_many.store(false, Ordering::Relaxed);
        }
        all
    }

    /// Copies bytes out of the mapping, with faults where pages are missing. `into` is ordinary memory.
    pub(super) fn copy_out(&self, at: usize, into: &mut [u8]) {
        assert!(at.checked_add(into.len()).is_some_and(|end| end <= self.bytes));
        // SAFETY: both ranges are valid, and apart: no reference to plain bytes of a mapping is made in this crate, and
        // callers see to it that `into` is not one that its owner made.
        unsafe { copy_shared(self.base.as_ptr().add(at), into.as_mut_ptr(), into.len()) };
    }

    /// Copies bytes into the mapping, with faults where pages are missing or protected. `from` is ordinary memory.
    pub(super) fn copy_in(&self, at: usize, from: &[u8]) {
        assert!(at.checked_add(from.len()).is_some_and(|end| end <= self.bytes));
        // SAFETY: as in `copy_out`.
        unsafe { copy_shared(from.as_ptr(), self.base.as_ptr().add(at), from.len()) };
    }

    /// The whole range as double words that any thread may read and write. They are of one size: accesses of several sizes
    /// to one place, at the same time, are not defined.
    pub(super) fn atomic_words(&self) -> &[AtomicU64] {
        // SAFETY: mapped for reading and writing while `self` lives, and of any content; the base is aligned to a page, and
        // the length a multiple of one. An access either happens (after a fault perhaps) or ends the process; pushing a page
        // out and back changes no byte. Bytes are copied by instructions that the compiler cannot look into, as the kernel
        // does it too.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.bytes / size_of::<u64>()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `create` with this length; nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Copies bytes one of whose sides other threads may read and write meanwhile: the copy may be any mixture of old and new.
/// The compiler cannot look into the instructions, so that it makes no assumption about who else uses the bytes, and in which
/// sizes.
///
/// # Safety
///
/// Both ranges are valid for `bytes`, and do not overlap.
unsafe fn copy_shared(from: *const u8, to: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's. The direction flag is clear by the rules of the platform.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller's: 16 bytes at a time, then one by one.
    unsafe {
        std::arch::asm!(
            "subs {left}, {left}, #16",
            "b.lo 3f",
            "2:",
            "ldp {low}, {high}, [{from}], #16",
            "stp {low}, {high}, [{to}], #16",
            "subs {left}, {left}, #16",
            "b.hs 2b",
            "3:",
            "adds {left}, {left}, #16",
            "b.eq 5f",
            "4:",
            "ldrb {low:w}, [{from}], #1",
            "strb {low:w}, [{to}], #1",
            "subs {left}, {left}, #1",
            "b.ne 4b",
            "5:",
            left = inout(reg) bytes => _,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            low = out(reg) _,
            high = out(reg) _,
            options(nostack)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    compile_error!("the copy of memory that other threads use is written for x86-64 and AArch64 only");
}

/// Private memory that takes none until it is touched, also in a process that locks all its memory: such a process would
/// else have every page brought in as soon as it can be accessed.
fn map(bytes: usize, protection: ProtFlags) -> Option<NonNull<u8>> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags) }.ok()?;
    // SAFETY: the range was mapped just now, and nobody knows of it yet.
    let opened = unsafe {
        libc::munlock(base, bytes);
        libc::mprotect(base, bytes, protection.bits() as i32) == 0
    };
    if !opened {
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::munmap(base, bytes) };
        return None;
    }
    NonNull::new(base.cast())
}

fn open_faults() -> Result<OwnedFd, PagingError> {
    // SAFETY: the call takes a number.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | USER_MODE_ONLY) };
    if fd < 0 {
        return Err(match Errno::last().0 {
            libc::ENOSYS => PagingError::NoUserfaultfd,
            libc::EINVAL => PagingError::KernelTooOld { missing: "userfaultfd for user mode only", least: (5, 11) },
            errno => PagingError::FaultsRefused { errno },
        });
    }
    // SAFETY: a descriptor that was just opened, and that nothing else owns.
    let faults = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut api = UffdioApi { api: UFFD_API, features: FEATURE_PROTECTED | FEATURE_SIGBUS, ioctls: 0 };
    // SAFETY: the structure of this call.
    if unsafe { libc::ioctl(faults.as_raw_fd(), opcode::read_write::<UffdioApi>(UFFDIO, 0x3f) as _, &raw mut api) } != 0
    {
        return Err(PagingError::KernelTooOld {
            missing: "userfaultfd by signal with write protection",
            least: (5, 11),
        });
    }
    Ok(faults)
}

/// Memory that reads as zeros and cannot be written.
#[derive(Debug)]
pub(super) struct Zeros {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: never written.
unsafe impl Send for Zeros {}
// SAFETY: never written.
unsafe impl Sync for Zeros {}

impl Zeros {
    pub(super) fn create(bytes: usize) -> Option<Zeros> {
        Some(Zeros { base: map(bytes, ProtFlags::READ)?, bytes })
    }
}

impl Deref for Zeros {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for reading while `self` lives; nobody can write it.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for Zeros {
    fn drop(&mut self) {
        // SAFETY: mapped in `create`; every slice of it borrows `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Buffers in which fetched pages wait to be placed: made beforehand, since a signal handler cannot allocate. A buffer takes
/// memory as far as it was ever used.
#[derive(Debug)]
pub(super) struct Staging {
    base: NonNull<u8>,
    bytes_each: usize,
    /// A bit for each buffer that somebody has.
    taken: AtomicU64,
}

// SAFETY: a buffer is reached only through the `Staged` that holds its bit.
unsafe impl Send for Staging {}
// SAFETY: as above.
unsafe impl Sync for Staging {}

impl Staging {
    pub(super) fn create(bytes_each: usize) -> Option<Staging> {
        let base = map(bytes_each * STAGED_MAX, ProtFlags::READ | ProtFlags::WRITE)?;
        // SAFETY: mapped just now. In a child the buffers would be copied at the next fault of the parent, for nobody.
        unsafe { libc::madvise(base.as_ptr().cast(), bytes_each * STAGED_MAX, libc::MADV_DONTFORK) };
        Some(Staging { base, bytes_each, taken: AtomicU64::new(0) })
    }

    /// A buffer of this many bytes: the lowest that is free, so that few are used and stay in the processor's cache.
    pub(super) fn take(&self, bytes: usize) -> Staged<'_> {
        assert!(bytes <= self.bytes_each);
        loop {
            let taken = self.taken.load(Ordering::Relaxed);
            let index = (!taken).trailing_zeros();
            if index as usize >= STAGED_MAX {
                // Each of the others places a page and is done.
                yield_now();
                continue;
            }
            // Acquire pairs with the Release in `Staged::drop`: what the last owner wrote is over.
            let won = self.taken.compare_exchange_weak(taken, taken | 1 << index, Ordering::Acquire, Ordering::Relaxed);
            if won.is_ok() {
                return Staged { staging: self, index, bytes };
            }
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: mapped in `create`; every `Staged` borrows `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes_each * STAGED_MAX) };
    }
}

/// A buffer that one thread has for now.
pub(super) struct Staged<'a> {
    staging: &'a Staging,
    index: u32,
    bytes: usize,
}

impl Staged<'_> {
    fn start(&self) -> *mut u8 {
        // SAFETY: the index is below the number of buffers.
        unsafe { self.staging.base.as_ptr().add(self.index as usize * self.staging.bytes_each) }
    }
}

impl Deref for Staged<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped, of any content, and reached through this value alone.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl DerefMut for Staged<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        self.staging.taken.fetch_and(!(1 << self.index), Ordering::Release);
    }
}

/// Zeroed words that take memory only where they are touched.
pub(super) fn zeroed_words(count: usize) -> Box<[AtomicU64]> {
    // SAFETY: zero is a valid atomic word.
    unsafe { Box::new_zeroed_slice(count).assume_init() }
}

/// Sleeps while the lower half of `word` is what it is in `seen`. Wakes for no reason too.
pub(super) fn wait_low(word: &AtomicU64, seen: u64) {
    futex(low_half(word), libc::FUTEX_WAIT, seen as u32, None);
}

/// Wakes all who sleep on the lower half.
pub(super) fn wake_low(word: &AtomicU64) {
    futex(low_half(word), libc::FUTEX_WAKE, i32::MAX as u32, None);
}

/// Sleeps while `word` is `seen`, at most for `timeout`.
pub(super) fn wait(word: &AtomicU32, seen: u32, timeout: Option<Duration>) {
    futex(word.as_ptr(), libc::FUTEX_WAIT, seen, timeout);
}

/// Wakes up to `count` who sleep on `word`.
pub(super) fn wake(word: &AtomicU32, count: u32) {
    futex(word.as_ptr(), libc::FUTEX_WAKE, count, None);
}

fn low_half(word: &AtomicU64) -> *const u32 {
    let halves = word.as_ptr().cast::<u32>();
    if cfg!(target_endian = "little") { halves } else { halves.wrapping_add(1) }
}

fn futex(word: *const u32, operation: i32, value: u32, timeout: Option<Duration>) {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as _,
        tv_nsec: timeout.subsec_nanos() as _,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: every caller borrows the word for the whole call; the time lives until it returns.
    unsafe { libc::syscall(libc::SYS_futex, word, operation | libc::FUTEX_PRIVATE_FLAG, value, timeout) };
}

pub(super) fn yield_now() {
    // SAFETY: takes nothing.
    unsafe { libc::sched_yield() };
}

/// Keeps the program's signals from this thread, which the program did not start. Those stay that an instruction of the
/// thread itself causes: one of a store may touch another paged region.
pub(super) fn block_signals() {
    // SAFETY: the set is filled before it is used, and the old mask is not asked for.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        for own in [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP] {
            libc::sigdelset(&raw mut all, own);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}

const UFFDIO: u8 = 0xaa;
const UFFD_API: u64 = 0xaa;
const USER_MODE_ONLY: i32 = 1;
const FEATURE_PROTECTED: u64 = 1 << 0;
const FEATURE_SIGBUS: u64 = 1 << 7;
const REGISTER_MISSING: u64 = 1 << 0;
const REGISTER_PROTECTED: u64 = 1 << 1;
const COPY_DONT_WAKE: u64 = 1 << 0;
const COPY_PROTECTED: u64 = 1 << 1;
const PROTECT: u64 = 1 << 0;
const PROTECT_DONT_WAKE: u64 = 1 << 1;

/// Ranges that are given back by one call. They stand on the stack of a signal handler.
const DROP_RUNS_MAX: usize = 64;

/// Staging buffers: bits of a word.
const STAGED_MAX: usize = 64;
/// How often pages that are given back may have been locked once more meanwhile.
const LOCKED_AGAIN_MAX: usize = 64;

#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
}

const _: () = assert!(size_of::<UffdioApi>() == 24);
const _: () = assert!(size_of::<UffdioRegister>() == 32);
const _: () = assert!(size_of::<UffdioCopy>() == 40);
const _: () = assert!(size_of::<UffdioWriteProtect>() == 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_pages_are_gone_one_by_one_and_all_at_once() {
        for drops_many in [true, false] {
            let mapping = Mapping::create(64 * PAGE_BYTES).unwrap();
            mapping.drops_many.store(drops_many, Ordering::Relaxed);
            let runs: Vec<Run> = (0..16).map(|index| Run { first: index * 4, pages: 2 }).collect();
            for round in 1..4_u8 {
                for run in &runs {
                    // A page that is still there is not placed again.
                    assert_eq!(mapping.place(run.first, &[round; 2 * PAGE_BYTES], true), (2, Ok(())));
                    assert_eq!(mapping.place(run.first, &[0; PAGE_BYTES], true), (0, Err(Errno(libc::EEXIST))));
                }
                let mut found = [0; PAGE_BYTES];
                mapping.copy_out(61 * PAGE_BYTES, &mut found);
                assert_eq!(found, [round; PAGE_BYTES]);
                mapping.drop_runs(&runs);
            }
        }
    }

    #[test]
    fn pages_are_placed_up_to_the_first_that_is_there() {
        let mapping = Mapping::create(8 * PAGE_BYTES).unwrap();
        assert_eq!(mapping.place(5, &[1; PAGE_BYTES], false), (1, Ok(())));
        assert_eq!(mapping.place(2, &[2; 5 * PAGE_BYTES], false), (3, Err(Errno(libc::EEXIST))));
        let mut found = [0; 4 * PAGE_BYTES];
        mapping.copy_out(2 * PAGE_BYTES, &mut found);
        assert_eq!((found[3 * PAGE_BYTES - 1], found[3 * PAGE_BYTES]), (2, 1));
        mapping.copy_in(5 * PAGE_BYTES + 1, &[3; 7]);
        mapping.copy_out(5 * PAGE_BYTES, &mut found[..9]);
        assert_eq!(found[..9], [1, 3, 3, 3, 3, 3, 3, 3, 1]);
    }

    #[test]
    fn a_staging_buffer_belongs_to_one_thread_at_a_time() {
        let staging = Staging::create(PAGE_BYTES).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let staging = &staging;
                scope.spawn(move || {
                    for _ in 0..5000 {
                        let mut buffers = [staging.take(64), staging.take(PAGE_BYTES)];
                        for buffer in &mut buffers {
                            buffer.fill(thread);
                        }
                        assert!(buffers.iter().all(|buffer| buffer.iter().all(|&byte| byte == thread)));
                    }
                });
            }
        });
        assert_eq!(staging.taken.load(Ordering::Relaxed), 0);
    }
}
