//! System calls that are made while a hook decides: none of them waits, none goes through a hook.

use libc::{c_int, c_long};

/// A list of the program's buffers, as it gave it to the call.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    parts: &'a [libc::iovec],
}

impl<'a> Parts<'a> {
    /// # Safety
    /// As for the system call: `count` parts, whose memory is the program's to read or write during the call.
    pub(crate) unsafe fn new(parts: *const libc::iovec, count: c_int) -> Parts<'a> {
        if count <= 0 || parts.is_null() {
            return Parts { parts: &[] };
        }
        // SAFETY: by the contract above.
        Parts { parts: unsafe { std::slice::from_raw_parts(parts, count as usize) } }
    }

    /// The pieces of the `len` bytes from `skip` on.
    fn pieces(self, mut skip: usize, mut len: usize) -> impl Iterator<Item = (*mut u8, usize)> + 'a {
        self.parts.iter().filter_map(move |part| {
            let begin = skip.min(part.iov_len);
            skip -= begin;
            let bytes = (part.iov_len - begin).min(len);
            len -= bytes;
            (bytes > 0).then(|| (part.iov_base.cast::<u8>().wrapping_add(begin), bytes))
        })
    }

    /// Copies `len` bytes from `skip` on into the region at `at`.
    #[inline]
    pub(crate) fn copy_in(self, skip: usize, len: usize, memory: &highwire_mem::SharedMemory, mut at: usize) -> usize {
        for (from, bytes) in self.pieces(skip, len) {
            // SAFETY: by the contract of `new`; a slice of bytes that somebody may change meanwhile is copied once and
            // not looked at.
            memory.copy_in(at, unsafe { std::slice::from_raw_parts(from, bytes) });
            at += bytes;
        }
        len
    }

    /// Copies `len` bytes of the region from `at` on into the parts, from `skip` on.
    #[inline]
    pub(crate) fn copy_out(self, skip: usize, len: usize, memory: &highwire_mem::SharedMemory, mut at: usize) {
        for (to, bytes) in self.pieces(skip, len) {
            // SAFETY: by the contract of `new`.
            memory.copy_out(at, unsafe { std::slice::from_raw_parts_mut(to, bytes) });
            at += bytes;
        }
    }

    /// The parts of `len` bytes from `skip` on, as a list; as many as fit.
    pub(crate) fn list(self, skip: usize, len: usize, into: &mut [libc::iovec]) -> usize {
        let mut used = 0;
        for (place, (base, bytes)) in into.iter_mut().zip(self.pieces(skip, len)) {
            *place = libc::iovec { iov_base: base.cast(), iov_len: bytes };
            used += 1;
        }
        used
    }
}

/// Lists longer than this are received in several steps.
pub(crate) const LIST_MAX: usize = 64;

pub(crate) const EMPTY: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

unsafe extern "C" {
    fn hw_has_sanitizer() -> c_int;
    fn hw_raw(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
}

fn result(raw: c_long) -> Result<usize, c_int> {
    if raw < 0 { Err(-raw as c_int) } else { Ok(raw as usize) }
}

/// Receives without waiting.
pub(crate) fn receive(fd: c_int, list: &mut [libc::iovec], flags: c_int) -> Result<usize, c_int> {
    let mut message = libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: list.as_mut_ptr(),
        msg_iovlen: list.len(),
        msg_control: std::ptr::null_mut(),
        msg_controllen: 0,
        msg_flags: 0,
    };
    let flags = flags | libc::MSG_DONTWAIT;
    // SAFETY: the list names memory that the program gave to be written, and the message lives for the call.
    result(unsafe { hw_raw(libc::SYS_recvmsg, fd.into(), (&raw mut message) as c_long, flags.into(), 0, 0, 0) })
}

/// True if the kernel has neither bytes nor an end nor an error for who receives now.
pub(crate) fn has_nothing(fd: c_int) -> bool {
    let mut byte = 0u8;
    let mut list = [libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 }];
    receive(fd, &mut list, libc::MSG_PEEK) == Err(libc::EAGAIN)
}

/// Bytes that TCP has for who receives.
pub(crate) fn unread(fd: c_int) -> usize {
    let mut bytes: c_int = 0;
    // SAFETY: the kernel writes one number.
    let answer =
        unsafe { hw_raw(libc::SYS_ioctl, fd.into(), libc::FIONREAD as c_long, (&raw mut bytes) as c_long, 0, 0, 0) };
    if answer < 0 { 0 } else { bytes.try_into().unwrap_or(0) }
}

/// Whether what comes next is after the urgent byte.
pub(crate) fn is_at_mark(fd: c_int) -> bool {
    const SIOCATMARK: c_long = 0x8905;
    let mut answer: c_int = 0;
    // SAFETY: the kernel writes one number.
    unsafe { hw_raw(libc::SYS_ioctl, fd.into(), SIOCATMARK, (&raw mut answer) as c_long, 0, 0, 0) };
    answer != 0
}

/// Whether the kernel has nothing more for who receives than the end or an error.
pub(crate) fn is_over(fd: c_int) -> bool {
    let mut question = [libc::pollfd { fd, events: libc::POLLRDHUP, revents: 0 }];
    poll(&mut question).is_ok_and(|ready| ready > 0)
}

/// Ends a connection, in both directions.
pub(crate) fn break_off(fd: c_int) {
    // SAFETY: takes numbers.
    unsafe { hw_raw(libc::SYS_shutdown, fd.into(), libc::SHUT_RDWR.into(), 0, 0, 0, 0) };
}

/// Changes what an epoll set is to say of a descriptor.
pub(crate) fn epoll_control(set: c_int, operation: c_int, fd: c_int, event: libc::epoll_event) -> Result<usize, c_int> {
    // SAFETY: the kernel reads the event.
    result(unsafe {
        hw_raw(libc::SYS_epoll_ctl, set.into(), operation.into(), fd.into(), (&raw const event) as c_long, 0, 0)
    })
}

/// A descriptor that can be made readable.
pub(crate) fn event() -> Result<c_int, c_int> {
    let flags = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK;
    // SAFETY: takes numbers, returns one.
    result(unsafe { hw_raw(libc::SYS_eventfd2, 0, flags.into(), 0, 0, 0, 0) }).map(|fd| fd as c_int)
}

/// Takes what an event descriptor has.
pub(crate) fn read_word(fd: c_int) {
    let mut word = 0u64;
    // SAFETY: the kernel writes eight bytes.
    unsafe { hw_raw(libc::SYS_read, fd.into(), (&raw mut word) as c_long, 8, 0, 0, 0) };
}

/// Closes a descriptor of our own.
pub(crate) fn close(fd: c_int) {
    // SAFETY: takes a number; nothing else refers to the descriptor.
    unsafe { hw_raw(libc::SYS_close, fd.into(), 0, 0, 0, 0, 0) };
}

/// Reads of a file, from an offset, into the region.
pub(crate) fn read_file(
    fd: c_int,
    memory: &highwire_mem::SharedMemory,
    at: usize,
    most: usize,
    offset: i64,
) -> Result<usize, c_int> {
    let into = memory.pointer(at, most);
    // SAFETY: the kernel writes at most `most` bytes of the mapping, which was checked to have them.
    result(unsafe { hw_raw(libc::SYS_pread64, fd.into(), into as c_long, most as c_long, offset, 0, 0) })
}

/// Moves the position of a file; tells where it is.
pub(crate) fn seek(fd: c_int, offset: i64, whence: c_int) -> Result<usize, c_int> {
    // SAFETY: takes and returns numbers.
    result(unsafe { hw_raw(libc::SYS_lseek, fd.into(), offset, whence.into(), 0, 0, 0) })
}

/// Writes bytes.
pub(crate) fn write(fd: c_int, bytes: &[u8]) -> Result<usize, c_int> {
    // SAFETY: the kernel reads the slice.
    result(unsafe { hw_raw(libc::SYS_write, fd.into(), bytes.as_ptr() as c_long, bytes.len() as c_long, 0, 0, 0) })
}

/// Asks the kernel which of these are ready now.
pub(crate) fn poll(fds: &mut [libc::pollfd]) -> Result<usize, c_int> {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel reads and writes the slice and reads the time, both alive for the call.
    result(unsafe {
        hw_raw(libc::SYS_ppoll, fds.as_mut_ptr() as c_long, fds.len() as c_long, (&raw const now) as c_long, 0, 8, 0)
    })
}

/// Asks an epoll set which of its members are ready now.
pub(crate) fn epoll(set: c_int, events: &mut [libc::epoll_event]) -> Result<usize, c_int> {
    // SAFETY: the kernel writes at most as many events as the slice has.
    result(unsafe {
        hw_raw(libc::SYS_epoll_pwait, set.into(), events.as_mut_ptr() as c_long, events.len() as c_long, 0, 0, 8)
    })
}

/// An option of a socket that is a number.
pub(crate) fn option(fd: c_int, level: c_int, name: c_int) -> Result<c_int, c_int> {
    let mut value: c_int = 0;
    let mut length = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    let raw = unsafe {
        hw_raw(
            libc::SYS_getsockopt,
            fd.into(),
            level.into(),
            name.into(),
            (&raw mut value) as c_long,
            (&raw mut length) as c_long,
            0,
        )
    };
    result(raw).map(|_| value)
}

/// The kernel's number of a socket, which no other one gets.
pub(crate) fn cookie(fd: c_int) -> Result<u64, c_int> {
    let mut value = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    let raw = unsafe {
        hw_raw(
            libc::SYS_getsockopt,
            fd.into(),
            libc::SOL_SOCKET.into(),
            libc::SO_COOKIE.into(),
            (&raw mut value) as c_long,
            (&raw mut length) as c_long,
            0,
        )
    };
    result(raw).map(|_| value)
}

/// Sets an option of a socket that is a number.
pub(crate) fn set_option(fd: c_int, level: c_int, name: c_int, value: c_int) {
    // SAFETY: the kernel reads the number.
    unsafe {
        hw_raw(
            libc::SYS_setsockopt,
            fd.into(),
            level.into(),
            name.into(),
            (&raw const value) as c_long,
            size_of_val(&value) as c_long,
            0,
        )
    };
}

/// Makes the close of a connection a reset.
pub(crate) fn reset_at_close(fd: c_int) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: the kernel reads the structure.
    unsafe {
        hw_raw(
            libc::SYS_setsockopt,
            fd.into(),
            libc::SOL_SOCKET.into(),
            libc::SO_LINGER.into(),
            (&raw const linger) as c_long,
            size_of_val(&linger) as c_long,
            0,
        )
    };
}

/// Flags of an open file.
pub(crate) fn file_flags(fd: c_int) -> Result<c_int, c_int> {
    // SAFETY: takes and returns numbers.
    result(unsafe { hw_raw(libc::SYS_fcntl, fd.into(), libc::F_GETFL.into(), 0, 0, 0, 0) }).map(|flags| flags as c_int)
}

/// Whether a descriptor is closed by exec.
pub(crate) fn closes_on_exec(fd: c_int) -> bool {
    // SAFETY: takes and returns numbers.
    unsafe {
        hw_raw(libc::SYS_fcntl, fd.into(), libc::F_GETFD.into(), 0, 0, 0, 0) & c_long::from(libc::FD_CLOEXEC) != 0
    }
}

/// Nanoseconds that a send waits at most, if the program has limited them.
pub(crate) fn send_limit(fd: c_int) -> Option<u64> {
    let mut limit = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut length = size_of_val(&limit) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET.into(), libc::SO_SNDTIMEO.into());
    let (value, bytes) = ((&raw mut limit) as c_long, (&raw mut length) as c_long);
    // SAFETY: the kernel writes at most `length` bytes.
    let answer = unsafe { hw_raw(libc::SYS_getsockopt, fd.into(), level, name, value, bytes, 0) };
    let nanoseconds = (limit.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(limit.tv_usec as u64 * 1000);
    (answer == 0 && nanoseconds > 0).then_some(nanoseconds)
}

/// Whether the system calls of this thread are filtered.
pub(crate) fn has_filter() -> bool {
    // SAFETY: takes and returns numbers.
    unsafe { hw_raw(libc::SYS_prctl, libc::PR_GET_SECCOMP.into(), 0, 0, 0, 0, 0) > 0 }
}

/// Whether the runtime of a sanitizer is among the libraries that are loaded. Asked in the constructor.
pub(crate) fn has_sanitizer() -> bool {
    // SAFETY: walks the loader's list, under the loader's lock.
    unsafe { hw_has_sanitizer() != 0 }
}

/// This process, asked of the kernel.
pub(crate) fn process() -> u32 {
    // SAFETY: takes nothing, returns a number.
    unsafe { hw_raw(libc::SYS_getpid, 0, 0, 0, 0, 0, 0) as u32 }
}

/// The parent of this process.
pub(crate) fn parent() -> u32 {
    // SAFETY: takes nothing, returns a number.
    unsafe { hw_raw(libc::SYS_getppid, 0, 0, 0, 0, 0, 0) as u32 }
}

/// Whether a process has a descriptor of the file that `fd` is of this one, as `/proc` tells. True where that may not be
/// known, or is too much to look through; false for a process that is dead.
pub(crate) fn has_descriptor_of(process: u32, fd: c_int) -> bool {
    use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir};
    use std::ffi::CStr;
    use std::fmt::Write;
    use std::os::fd::{AsFd, BorrowedFd};
    const FILES_MAX: usize = 1024;
    let identity = |folder: BorrowedFd<'_>, name: &CStr| {
        rustix::fs::statat(folder, name, AtFlags::empty()).map(|file| (file.st_dev, file.st_ino))
    };
    let mut names = crate::log::Line::new();
    let _ = write!(names, "/proc/self/fd/{fd}\0/proc/{process}/fd\0");
    let mut names = names.text().split_inclusive(|byte| *byte == 0).map(CStr::from_bytes_with_nul);
    let (Some(Ok(own)), Some(Ok(folder))) = (names.next(), names.next()) else { return true };
    // Without /proc nothing can be known; then it is as for a process that is dead.
    let Ok(own) = identity(CWD, own) else { return false };
    let folder = match rustix::fs::open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(folder) => folder,
        Err(error) => return error != rustix::io::Errno::NOENT,
    };
    let mut space = [std::mem::MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(&folder, &mut space);
    let mut looked = 0;
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return true };
        looked += 1;
        if looked > FILES_MAX || identity(folder.as_fd(), entry.file_name()) == Ok(own) {
            return true;
        }
    }
    false
}

/// This thread, asked of the kernel.
pub(crate) fn thread() -> u32 {
    // SAFETY: takes nothing, returns a number.
    unsafe { hw_raw(libc::SYS_gettid, 0, 0, 0, 0, 0, 0) as u32 }
}

/// Whether a thread or process of this number is there.
pub(crate) fn exists(id: u32) -> bool {
    // SAFETY: signal 0 is none.
    unsafe { hw_raw(libc::SYS_tkill, c_long::from(id), 0, 0, 0, 0, 0) != -c_long::from(libc::ESRCH) }
}

/// Whether a process has a thread of this number.
pub(crate) fn has_thread(process: u32, thread: u32) -> bool {
    // SAFETY: signal 0 is none.
    unsafe { hw_raw(libc::SYS_tgkill, process.into(), thread.into(), 0, 0, 0, 0) == 0 }
}

/// Does nothing for so many nanoseconds.
pub(crate) fn nap(nanoseconds: i64) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    // SAFETY: the kernel reads the time.
    unsafe { hw_raw(libc::SYS_nanosleep, (&raw const time) as c_long, 0, 0, 0, 0, 0) };
}

/// Lets another thread run.
pub(crate) fn give_way() {
    // SAFETY: takes nothing.
    unsafe { hw_raw(libc::SYS_sched_yield, 0, 0, 0, 0, 0, 0) };
}
