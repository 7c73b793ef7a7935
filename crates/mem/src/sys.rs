//! The system calls of shared memory: mappings, futexes, barriers, and what the kernel must be.

use crate::allotment::{Allotment, Share};
use crate::bell::Bell;
use crate::holes::Holes;
use crate::region::RegionError;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The oldest kernel that has everything used here: `futex_waitv` is the youngest, of 5.16.
const KERNEL_LEAST: (u32, u32) = (5, 16);

/// The running kernel is older than this software needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Linux {found} is too old: Highwire needs {}.{} or later (for futex_waitv); please update the kernel", least.0, least.1)]
pub struct KernelTooOld {
    /// The version that runs.
    pub found: String,
    /// The version needed.
    pub least: (u32, u32),
}

/// Refuses a kernel that is too old, by the version it reports.
pub fn kernel_check() -> Result<(), KernelTooOld> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    kernel_version_check(&release)
}

fn kernel_version_check(release: &str) -> Result<(), KernelTooOld> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= KERNEL_LEAST { Ok(()) } else { Err(KernelTooOld { found: release.to_owned(), least: KERNEL_LEAST }) }
}

/// A shared mapping, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Of a peer's memory: what of its allotment it takes.
    _share: Option<Share>,
    /// Of the memory of another user's process.
    holes: Option<Holes>,
}

// SAFETY: a mapping belongs to the process, not to a thread; access goes through `View`.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn of(fd: impl AsFd, len: usize, writable: bool) -> io::Result<Mapping> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, len, _share: None, holes: None })
    }

    /// Of memory that a peer handed over, as far as it may have so much mapped here.
    pub(crate) fn of_peer(
        fd: OwnedFd,
        len: usize,
        writable: bool,
        allotment: &Allotment,
    ) -> Result<Mapping, RegionError> {
        let share = allotment.take(len as u64)?;
        let mut mapping = Mapping::of(&fd, len, writable).map_err(RegionError::Map)?;
        mapping._share = share;
        mapping.holes = allotment.is_of_another_user().then(|| Holes::of(fd));
        Ok(mapping)
    }

    /// Present if pages of it may be missing that reading is not to make.
    #[inline(always)]
    pub(crate) fn holes(&self) -> Option<&Holes> {
        self.holes.as_ref()
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `of` with this length; every View keeps this value alive.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A memfd of `len` bytes that can be sealed. It takes memory only where it is touched.
pub(crate) fn memfd(len: usize) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("highwire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    Ok(fd)
}

pub(crate) fn seal(fd: impl AsFd, seals: SealFlags) -> io::Result<()> {
    Ok(rustix::fs::fcntl_add_seals(fd, seals)?)
}

pub(crate) fn futex_wake(word: *const u32) {
    // SAFETY: waking reads nothing through the pointer; the kernel checks the address.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX, 0, 0, 0) };
}

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepOutcome {
    /// Rung, changed in the meantime, or interrupted: look again.
    LookAgain,
    /// The time is up.
    TimedOut,
}

/// A word of this process's own that wakes its sleepers: rung when a peer dies or a thread wants
/// the waiter's attention.
#[derive(Debug, Default)]
pub struct Sleep {
    word: AtomicU32,
}

const FUTEX2_SIZE_U32: u32 = 2;

impl Sleep {
    /// One word, at zero.
    pub fn new() -> Sleep {
        Sleep::default()
    }

    /// The count to sleep on, to be read before the last look.
    pub fn count(&self) -> u32 {
        self.word.load(Ordering::SeqCst)
    }

    /// Wakes whoever sleeps here.
    pub fn wake(&self) {
        self.word.fetch_add(1, Ordering::SeqCst);
        futex_wake(self.word.as_ptr());
    }

    /// Sleeps while this word has `count` and each bell its own count.
    pub fn sleep(&self, count: u32, bells: &[(&Bell, u32)], timeout: Option<Duration>) -> SleepOutcome {
        // The kernel takes 128 words; a Nic talks to fewer users than that.
        const WORDS_MAX: usize = 128;
        let entry = |value: u32, word: *const u32| FutexWaitV {
            val: u64::from(value),
            uaddr: word as u64,
            flags: FUTEX2_SIZE_U32,
            reserved: 0,
        };
        let mut words = [entry(0, std::ptr::null()); WORDS_MAX];
        assert!(bells.len() < WORDS_MAX, "a sleeper waits on at most 127 doorbell pages");
        words[0] = entry(count, self.word.as_ptr());
        for (slot, (bell, value)) in words[1..].iter_mut().zip(bells) {
            *slot = entry(*value, bell.futex());
        }
        let deadline = timeout.map(|timeout| {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            let nanoseconds = now.tv_nsec as u128 + timeout.as_nanos().min(1 << 80);
            libc::timespec {
                tv_sec: now.tv_sec.saturating_add((nanoseconds / 1_000_000_000).min(i64::MAX as u128 / 4) as i64),
                tv_nsec: (nanoseconds % 1_000_000_000) as i64,
            }
        });
        let deadline_pointer = deadline.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the words are mapped while `bells` and `self` are borrowed; the array and the
        // time live until the call returns.
        let result = unsafe {
            libc::syscall(
                libc::SYS_futex_waitv,
                words.as_ptr(),
                1 + bells.len(),
                0,
                deadline_pointer,
                libc::CLOCK_MONOTONIC,
            )
        };
        if result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ETIMEDOUT) {
            SleepOutcome::TimedOut
        } else {
            SleepOutcome::LookAgain
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FutexWaitV {
    val: u64,
    uaddr: u64,
    flags: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<FutexWaitV>() == 24);

const MEMBARRIER_GLOBAL_EXPEDITED: i32 = 1 << 1;
const MEMBARRIER_REGISTER_GLOBAL_EXPEDITED: i32 = 1 << 2;

fn membarrier(command: i32) -> bool {
    // SAFETY: the call takes no pointers.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// True if a sleeper of this process can make every writer's stores visible by itself, and this
/// process's writers take part in that. Where it is false, both sides fence.
pub fn heavy_barrier_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE
        .get_or_init(|| membarrier(MEMBARRIER_REGISTER_GLOBAL_EXPEDITED) && membarrier(MEMBARRIER_GLOBAL_EXPEDITED))
}

/// A full barrier on every CPU that runs a process of Highwire, so that writers need none of
/// their own; or a plain fence where the kernel refuses (the peers were told at rendezvous).
pub fn heavy_barrier() {
    std::sync::atomic::fence(Ordering::SeqCst);
    if heavy_barrier_available() && !membarrier(MEMBARRIER_GLOBAL_EXPEDITED) {
        // It worked when the peers were told so, and a sandbox that was entered since forbids it. What a
        // writer stored before its last look at us is out of its CPU in far less time than this.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The other half of [`heavy_barrier`], for those who publish: orders an earlier store before a
/// later load as far as a sleeper who uses the heavy one is concerned.
#[inline]
pub fn light_barrier() {
    crate::sync::writer_fence(!heavy_barrier_available());
}

/// Eases a spinning CPU.
#[inline(always)]
pub fn pause() {
    std::hint::spin_loop();
}

/// The CPU this thread runs on.
#[inline]
pub fn current_cpu() -> u32 {
    // SAFETY: takes nothing, returns a number.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).unwrap_or(u32::MAX)
}

/// Undoes what this thread has of its parent's scheduling, for a process that serves others than the one that happened to
/// start it: a policy of real time, and being bound to some CPUs. What cannot be undone stays.
pub fn run_like_anybody() {
    let anything = libc::sched_param { sched_priority: 0 };
    // SAFETY: sched_param is read; 0 is this thread.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const anything) };
    let mut all = rustix::thread::CpuSet::new();
    (0..rustix::thread::CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    let _ = rustix::thread::sched_setaffinity(None, &all);
}

/// No descriptor of this process but the standard ones is inherited by a program that it becomes or starts from now on.
pub fn keep_descriptors_from_programs() {
    const FIRST: u32 = 3;
    // SAFETY: takes numbers; descriptors stay open, and every one may have this flag.
    let all = unsafe { libc::close_range(FIRST, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) };
    if all == 0 {
        return;
    }
    // A filter of system calls may not know that one.
    for entry in std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        if let Some(number) = number.filter(|number| number.cast_unsigned() >= FIRST) {
            // SAFETY: as above.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}

/// CPUs that this thread may really use: affinity and cgroup quota, whichever is less.
pub fn cpus_allowed() -> usize {
    // The standard library counts both.
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[inline(always)]
pub(crate) fn prefetch(view: &crate::memory::View, at: usize) {
    let pointer = view.pointer(at, 1);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program can see, and the address is mapped.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(pointer.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = pointer;
}

/// Asks the cache for the line at `at`, to be written. By the instruction itself: for the oldest
/// CPUs that the compiler supports it would ask to read, and the store would ask once more.
#[inline(always)]
pub(crate) fn prefetch_to_write(view: &crate::memory::View, at: usize) {
    let pointer = view.pointer(at, 1);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `prefetch`; CPUs that do not know the instruction do nothing.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) pointer, options(nostack, preserves_flags, readonly))
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = pointer;
}

/// Frees the pages of `bytes` from `at` on, in the file behind the mapping.
pub(crate) fn remove_pages(view: &crate::memory::View, at: usize, bytes: usize) {
    let pointer = view.pointer(at, bytes);
    // SAFETY: the range is inside a shared mapping that is only ever read and written as words and copied bytes; they
    // become zero, as if somebody had written that. Where the kernel cannot, nothing changes.
    let remove = || unsafe { rustix::mm::madvise(pointer.cast(), bytes, rustix::mm::Advice::LinuxRemove) };
    if remove() == Err(rustix::io::Errno::INVAL) {
        // SAFETY: the same range; its content does not change. The kernel frees no pages of memory that is locked, as all
        // is in a process that called mlockall.
        let _ = unsafe { rustix::mm::munlock(pointer.cast(), bytes) };
        let _ = remove();
    }
}

/// A page that the kernel clears in every forked child. It stays for ever.
pub(crate) fn wipe_on_fork_page() -> Option<NonNull<AtomicU32>> {
    const PAGE: usize = 4096;
    // SAFETY: a new private mapping touches nothing that exists.
    let base = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let base = NonNull::new(base.ok()?)?;
    // SAFETY: the page was just mapped, is never unmapped, and nothing else refers to it.
    unsafe { rustix::mm::madvise(base.as_ptr(), PAGE, rustix::mm::Advice::LinuxWipeOnFork) }.ok()?;
    let word = base.cast::<AtomicU32>();
    Some(word)
}

/// Process, user and group at the other end of a Unix socket, as the kernel reports them. The process is 0 for one that
/// this PID namespace does not see, which the types of `rustix` cannot hold.
pub(crate) fn peer_credentials(socket: impl AsFd) -> Result<(i32, u32, u32), Errno> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `found`, whose fields are integers.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(last_errno());
    }
    Ok((found.pid, found.uid, found.gid))
}

/// A descriptor for the process at the other end of a Unix socket, immune to reused numbers. Linux 6.5.
pub(crate) fn peer_pidfd(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    const SO_PEERPIDFD: i32 = 77;
    let mut fd: i32 = -1;
    let mut length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `fd`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(last_errno());
    }
    if fd < 0 {
        return Err(Errno::NOPROTOOPT);
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Has `run` called when the process exits, in whichever way but a signal, while its other threads still run.
pub fn at_exit(run: fn()) {
    static RUN: std::sync::Mutex<Vec<fn()>> = std::sync::Mutex::new(Vec::new());
    extern "C" fn run_all() {
        let all = std::mem::take(&mut *RUN.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
        all.into_iter().for_each(|run| run());
    }
    let mut all = RUN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    all.push(run);
    if all.len() == 1 {
        // SAFETY: it is a function without arguments that does not unwind into its caller: `extern "C"` aborts instead.
        // It can only fail for want of memory, and then nobody is waited for.
        let _ = unsafe { libc::atexit(run_all) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_kernel_is_refused_by_name() {
        let refused = kernel_version_check("5.15.0-91-generic").unwrap_err().to_string();
        assert!(refused.contains("5.15.0-91-generic") && refused.contains("5.16"), "{refused}");
        for good in ["5.16.0", "6.1.0-18-amd64", "6.18.44-fc", "10.0"] {
            assert_eq!(kernel_version_check(good), Ok(()), "{good}");
        }
        assert!(kernel_version_check("strange").is_err());
    }

    #[test]
    fn a_sleep_ends_at_its_time_or_when_woken() {
        let sleep = Sleep::new();
        assert_eq!(sleep.sleep(0, &[], Some(Duration::from_millis(5))), SleepOutcome::TimedOut);
        assert_eq!(sleep.sleep(1, &[], None), SleepOutcome::LookAgain);
        std::thread::scope(|scope| {
            let count = sleep.count();
            scope.spawn(|| sleep.wake());
            while sleep.sleep(count, &[], None) != SleepOutcome::LookAgain {}
        });
    }
}
