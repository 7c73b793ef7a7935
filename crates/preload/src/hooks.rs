//! What libc's callers find, and what the shim asks. What it tells of forks, new programs and sandboxes goes to
//! [`process`] directly.
//!
//! Every hook is a jump to its C function: no frame of Rust is between a caller and what may wait.

use crate::raw::{self, Parts};
use crate::receive::{Plan, Verdict};
use crate::table::{self, Slot, flag, slot_of};
use crate::{counters, epoll, log, pair, process, receive, send, spin, wait};
use highwire_lane::counters::Reason;
use highwire_lane::program::Unfit;
use libc::{c_int, c_void, iovec, msghdr, nfds_t, pollfd, size_t, ssize_t};
use std::sync::atomic::Ordering;

macro_rules! hooks {
    ($($name:ident => $target:ident),* $(,)?) => {
        $(
            /// Jumps to the shim.
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                core::arch::naked_asm!(concat!("jmp ", stringify!($target)));
                #[cfg(target_arch = "aarch64")]
                core::arch::naked_asm!(concat!("b ", stringify!($target)));
            }
        )*
    };
}

// Each twice where it has a second name for large files.
mod exported {
    hooks! {
        socket => hooked_socket, accept => hooked_accept, accept4 => hooked_accept4,
        shutdown => hooked_shutdown, close => hooked_close, close_range => hooked_close_range,
        closefrom => hooked_closefrom, dup => hooked_dup, dup2 => hooked_dup2, dup3 => hooked_dup3,
        fcntl => hooked_fcntl, fcntl64 => hooked_fcntl, ioctl => hooked_ioctl,
        read => hooked_read, write => hooked_write, readv => hooked_readv, writev => hooked_writev,
        preadv2 => hooked_preadv2, preadv64v2 => hooked_preadv2, pwritev2 => hooked_pwritev2,
        pwritev64v2 => hooked_pwritev2,
        send => hooked_send, sendto => hooked_sendto, sendmsg => hooked_sendmsg, sendmmsg => hooked_sendmmsg,
        recv => hooked_recv, recvfrom => hooked_recvfrom, recvmsg => hooked_recvmsg, recvmmsg => hooked_recvmmsg,
        sendfile => hooked_sendfile, sendfile64 => hooked_sendfile, splice => hooked_splice,
        poll => hooked_poll, ppoll => hooked_ppoll, select => hooked_select, pselect => hooked_pselect,
        epoll_ctl => hooked_epoll_ctl, epoll_wait => hooked_epoll_wait, epoll_pwait => hooked_epoll_pwait,
        epoll_pwait2 => hooked_epoll_pwait2, epoll_create => hooked_epoll_create, epoll_create1 => hooked_epoll_create1,
        setsockopt => hooked_setsockopt, getsockopt => hooked_getsockopt,
        fdopen => hooked_fdopen, vdprintf => hooked_vdprintf, dprintf => hooked_dprintf,
        __vdprintf_chk => hooked___vdprintf_chk, __dprintf_chk => hooked___dprintf_chk,
        __read_chk => hooked___read_chk, __recv_chk => hooked___recv_chk, __recvfrom_chk => hooked___recvfrom_chk,
        __poll_chk => hooked___poll_chk, __ppoll_chk => hooked___ppoll_chk,
        fork => hooked_fork, _Fork => hooked__Fork, clone => hooked_clone,
        execveat => hooked_execveat, system => hooked_system, popen => hooked_popen,
        pidfd_getfd => hooked_pidfd_getfd, execve => hooked_execve, execv => hooked_execv, execvp => hooked_execvp, execvpe => hooked_execvpe,
        fexecve => hooked_fexecve, execl => hooked_execl, execlp => hooked_execlp, execle => hooked_execle,
        posix_spawn => hooked_posix_spawn, posix_spawnp => hooked_posix_spawnp,
        posix_spawn_file_actions_adddup2 => hooked_posix_spawn_file_actions_adddup2,
        chroot => hooked_chroot, unshare => hooked_unshare, setns => hooked_setns, setuid => hooked_setuid,
        setgid => hooked_setgid, seteuid => hooked_seteuid, setreuid => hooked_setreuid,
        setresuid => hooked_setresuid, prctl => hooked_prctl, syscall => hooked_syscall,
        io_uring_queue_init => hooked_io_uring_queue_init,
        io_uring_queue_init_params => hooked_io_uring_queue_init_params,
        io_uring_queue_init_mem => hooked_io_uring_queue_init_mem, io_uring_setup => hooked_io_uring_setup,
    }
}

unsafe extern "C" {
    fn begin();
    fn hw_replace_input() -> c_int;
}

/// Constructors of libraries that the program needs may come before this library's own: then it runs now, as for every hook
/// without a system call of its own.
extern "C" fn before_vfork() {
    // SAFETY: the shim's constructor, which runs once.
    unsafe { begin() };
    process::before_vfork();
}

/// Returns twice, the second time after its frame was used by the child: so it has none, and the return address waits in a
/// register, which is the parent's own.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> libc::pid_t {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!(
        "sub rsp, 8",
        "call {before}",
        "add rsp, 8",
        "pop rdi",
        "mov eax, {vfork}",
        "syscall",
        "push rdi",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        "sub rsp, 8",
        "call {after}",
        "add rsp, 8",
        "2:",
        "ret",
        before = sym before_vfork,
        after = sym process::after_vfork,
        vfork = const libc::SYS_vfork,
    );
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "bl {before}",
        "ldp x29, x30, [sp], #16",
        "mov x0, #{flags}",
        "mov x1, #0",
        "mov x8, #{clone}",
        "svc #0",
        "cbz x0, 2f",
        "stp x29, x30, [sp, #-16]!",
        "bl {after}",
        "ldp x29, x30, [sp], #16",
        "2:",
        "ret",
        before = sym before_vfork,
        after = sym process::after_vfork,
        flags = const libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
        clone = const libc::SYS_clone,
    );
}

#[unsafe(no_mangle)]
extern "C" fn hw_begin() {
    process::begin();
    spin::begin();
    pair::begin();
    log::begin();
    // Whoever limited this program's system calls did so for the program alone; and the runtime of a sanitizer, which is
    // behind this library, has to see every call.
    let unfit = if raw::has_filter() { Some(Unfit::Filter) } else { raw::has_sanitizer().then_some(Unfit::Sanitizer) };
    if let Some(unfit) = unfit {
        log::tell_plain(unfit);
        process::enter_sandbox();
    }
    // A program that was started with a connection, as by inetd.
    (0..3).for_each(maybe_socket);
    if let Some(slot) = slot_of(0) {
        // SAFETY: the shim's; nothing has been read by stdio yet.
        if unsafe { hw_replace_input() } != 0 {
            slot.unset(flag::STDIO_READS);
        }
    }
    extern "C" fn end() {
        counters::hide();
    }
    // SAFETY: registers a function without arguments.
    unsafe { libc::atexit(end) };
}

#[unsafe(no_mangle)]
extern "C" fn hw_new_socket(fd: c_int, nonblocking: c_int) {
    process::notice_fork();
    if !process::is_foreign() {
        table::add(fd, nonblocking != 0);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_maybe_socket(fd: c_int) {
    process::notice_fork();
    maybe_socket(fd);
}

/// Finds out what an inherited or received descriptor is. Bytes may lie in its lane, so no thread uses the connection before
/// the registry was asked for it.
fn maybe_socket(fd: c_int) {
    if process::is_sandboxed() || process::is_foreign() {
        return;
    }
    match raw::option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) {
        Ok(libc::IPPROTO_TCP) => {
            if process::begin_finding() {
                if table::is_unknown(fd) {
                    find_connection(fd);
                }
                process::end_finding();
            }
        }
        // Not open: it may become anything.
        Err(libc::EBADF) => {}
        _ => table::ignore(fd),
    }
}

fn find_connection(fd: c_int) {
    // Several descriptors of one connection, as a program has them that was started by inetd.
    let cookie = raw::cookie(fd).unwrap_or(0);
    if cookie != 0 && table::slot_of_cookie(cookie).is_some_and(|slot| table::add_to(slot, fd)) {
        return;
    }
    let nonblocking = raw::file_flags(fd).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0);
    let Some(slot) = table::reserve(fd, nonblocking) else { return table::ignore(fd) };
    slot.cookie.store(cookie, Ordering::Relaxed);
    if raw::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Ok(0) {
        // Before anything is asked of it: readiness too may be the lane's.
        pair::ask_at_once(slot, fd);
    }
    table::publish_found(fd, slot);
}

/// A descriptor of another process has this number now.
#[unsafe(no_mangle)]
extern "C" fn hw_unknown(fd: c_int) {
    process::notice_fork();
    if !process::is_foreign() {
        table::unknown(fd);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_closing(fd: c_int) {
    process::notice_fork();
    if !process::is_foreign() {
        table::close(fd);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_closed_range(first: u32, last: u32) {
    process::notice_fork();
    if process::is_foreign() {
        return;
    }
    for fd in (first as usize..table::DESCRIPTORS).take_while(|fd| *fd <= last as usize) {
        if table::hw_descriptors[fd].load(Ordering::Relaxed) != 0 {
            table::close(fd as c_int);
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_duplicated(from: c_int, to: c_int) {
    process::notice_fork();
    if process::is_foreign() {
        process::hand(from);
    } else {
        table::duplicate(from, to);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_forget(fd: c_int) {
    if !process::is_foreign() {
        table::forget(fd);
    }
}

/// # Safety
/// As for `recvmsg`, and `plan` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_receive(
    fd: c_int,
    plan: *mut Plan,
    parts: *const iovec,
    count: c_int,
    flags: c_int,
    total: size_t,
) -> Verdict {
    // SAFETY: by the contract of the system call; the plan is on the shim's stack.
    let (plan, parts) = unsafe { (&mut *plan, Parts::new(parts, count)) };
    receive::receive(fd, plan, parts, flags, total)
}

/// # Safety
/// `plan` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_received(plan: *const Plan, result: ssize_t, flags: c_int) {
    // SAFETY: on the shim's stack.
    receive::received(unsafe { &*plan }, result, flags);
}

/// # Safety
/// As for `sendmsg`, and `plan` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_send(
    fd: c_int,
    plan: *mut Plan,
    parts: *const iovec,
    count: c_int,
    flags: c_int,
    total: size_t,
) -> Verdict {
    // SAFETY: by the contract of the system call; the plan is on the shim's stack.
    let (plan, parts) = unsafe { (&mut *plan, Parts::new(parts, count)) };
    send::send(fd, plan, parts, flags, total)
}

/// # Safety
/// `plan` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_sent(plan: *const Plan, result: ssize_t, flags: c_int, error: c_int) {
    // SAFETY: on the shim's stack.
    send::sent(unsafe { &*plan }, result, flags, error);
}

/// # Safety
/// `plan` and `offset` are the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_send_file(fd: c_int, plan: *mut Plan, file: c_int, offset: *mut i64, count: size_t) -> Verdict {
    // SAFETY: both on the shim's stack.
    let (plan, offset) = unsafe { (&mut *plan, &mut *offset) };
    send::send_file(fd, plan, file, offset, count)
}

/// # Safety
/// `plan` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_splice_out(
    fd: c_int,
    plan: *mut Plan,
    to: c_int,
    count: size_t,
    nonblocking: c_int,
) -> Verdict {
    // SAFETY: on the shim's stack.
    receive::to_pipe(fd, unsafe { &mut *plan }, to, count, nonblocking == 0)
}

/// The shim's `struct inside`.
#[repr(C)]
struct Inside {
    frame: *const c_void,
    kind: u32,
    slot: u32,
    generation: u32,
    counted: u32,
}

const RECEIVING: u32 = 1;
const SENDING: u32 = 2;
const WAITING: u32 = 3;
const WAITING_EPOLL: u32 = 4;

/// A call was torn away, by cancellation or a jump: what it would have done when it came back.
///
/// # Safety
/// `inside` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_abandoned(inside: *const Inside) {
    // SAFETY: on the shim's stack.
    let inside = unsafe { &*inside };
    match inside.kind {
        WAITING => return wait::wake_up(),
        WAITING_EPOLL => {
            epoll::waited(inside.slot, true, &mut []);
            return;
        }
        _ => {}
    }
    let Some(slot) = table::slot_at(inside.slot, inside.generation) else { return };
    match inside.kind {
        RECEIVING => {
            slot.set(flag::UNSURE);
            if let Some(end) = slot.end() {
                end.incoming.wake();
            }
            slot.leave_kernel();
        }
        SENDING => send::abandoned(slot, inside.counted),
        _ => {}
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_epoll_made(set: c_int) {
    if !process::is_foreign() {
        table::new_set(set);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_epoll_seen(set: c_int) {
    if !process::is_foreign() {
        epoll::see(set);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_plain(fd: c_int, why: c_int) {
    let reason = match why {
        1 => Reason::Stdio,
        2 => Reason::Signals,
        3 => Reason::Option,
        _ => Reason::OutOfBand,
    };
    if let Some(slot) = slot_of(fd) {
        slot.make_plain(reason);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_shut_down(fd: c_int, how: c_int) {
    let Some(slot) = slot_of(fd) else { return };
    if how != libc::SHUT_WR {
        slot.set(flag::SHUT_READ);
        if let Some(end) = slot.end() {
            end.incoming.turn_away();
        }
    }
    if how != libc::SHUT_RD {
        slot.set(flag::SHUT_WRITE);
        if let Some(end) = slot.end() {
            end.outgoing.announce_closing();
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_set_nonblocking(fd: c_int, on: c_int) {
    if let Some(slot) = slot_of(fd) {
        slot.put(flag::NONBLOCKING, on != 0);
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_low_water(fd: c_int, bytes: c_int) {
    if let Some(slot) = slot_of(fd) {
        slot.low_water.store(bytes.cast_unsigned(), Ordering::Relaxed);
        slot.put(flag::LOW_WATER, bytes > 1);
        if bytes > 1 {
            slot.make_plain(Reason::Option);
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn hw_corked(fd: c_int, on: c_int) {
    if let Some(slot) = slot_of(fd) {
        slot.put(flag::CORKED, on != 0);
        if on == 0 {
            slot.unset(flag::HELD_BACK);
        }
    }
}

/// The program sets whether small segments are held back; true if the kernel is not to be told.
#[unsafe(no_mangle)]
extern "C" fn hw_set_combining(fd: c_int, on: c_int) -> c_int {
    match slot_of(fd).filter(|slot| slot.end().is_some()) {
        Some(slot) => {
            slot.put(flag::COMBINING, on != 0);
            1
        }
        None => 0,
    }
}

/// Whether the program wants small segments held back although the kernel does not.
#[unsafe(no_mangle)]
extern "C" fn hw_is_combining(fd: c_int) -> c_int {
    slot_of(fd).is_some_and(|slot| slot.has(flag::COMBINING)).into()
}

/// Whether the next byte of a connection is in the lane.
#[unsafe(no_mangle)]
extern "C" fn hw_is_before_mark(fd: c_int) -> c_int {
    slot_of(fd).and_then(Slot::end).is_some_and(|end| end.incoming.has_records()).into()
}

/// Bytes of a connection that wait in the lane.
#[unsafe(no_mangle)]
extern "C" fn hw_unread(fd: c_int) -> size_t {
    let end = slot_of(fd).and_then(Slot::end);
    end.map_or(0, |end| end.incoming.bytes_waiting())
}

/// # Safety
/// As for `poll`; `sleeping` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_poll(list: *mut pollfd, count: nfds_t, timeout: i64, sleeping: *mut c_int) -> c_int {
    // SAFETY: by the contract of the system call.
    let (list, sleeping) = unsafe { (std::slice::from_raw_parts_mut(list, count as usize), &mut *sleeping) };
    wait::poll(list, timeout, sleeping)
}

/// Whether the lanes have something for a selection, whose words of bits are `words`.
///
/// # Safety
/// So many words; `sleeping` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_select(set: *const u64, words: size_t, timeout: i64, sleeping: *mut c_int) -> c_int {
    // SAFETY: both on the shim's stack.
    let (set, sleeping) = unsafe { (std::slice::from_raw_parts(set, words), &mut *sleeping) };
    wait::select(set, timeout, sleeping).into()
}

/// Whether the lanes make a descriptor readable.
#[unsafe(no_mangle)]
extern "C" fn hw_is_ready(fd: c_int) -> c_int {
    wait::is_ready(fd).into()
}

#[unsafe(no_mangle)]
extern "C" fn hw_polled() {
    wait::wake_up();
}

/// Zero or an error for a change that the kernel is told of later; less for all others.
///
/// # Safety
/// As for `epoll_ctl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_epoll_put_off(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: *const libc::epoll_event,
) -> c_int {
    process::notice_fork();
    if process::is_foreign() {
        return -1;
    }
    // SAFETY: by the contract of the system call.
    match epoll::put_off(set, operation, fd, unsafe { event.as_ref() }.copied()) {
        Some(Ok(())) => 0,
        Some(Err(error)) => error,
        None => -1,
    }
}

/// # Safety
/// As for `epoll_ctl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *const libc::epoll_event) {
    process::notice_fork();
    if !process::is_foreign() {
        // SAFETY: by the contract of the system call, which has succeeded with it.
        epoll::control(set, operation, fd, unsafe { event.as_ref() }.copied());
    }
}

/// # Safety
/// As for `epoll_wait`; `plan` is the shim's.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_epoll_wait(
    set: c_int,
    events: *mut libc::epoll_event,
    most: c_int,
    timeout: i64,
    plan: *mut Plan,
) -> c_int {
    // SAFETY: by the contract of the system call; the plan is on the shim's stack.
    let (events, plan) = unsafe { (std::slice::from_raw_parts_mut(events, most as usize), &mut *plan) };
    match epoll::wait(set, events, timeout) {
        epoll::Wait::Ready(ready) => ready as c_int,
        asks => {
            plan.slot = epoll::number(set);
            plan.limit = matches!(asks, epoll::Wait::Sleep).into();
            0
        }
    }
}

/// # Safety
/// `plan` is the shim's, `events` what the kernel has written.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_epoll_waited(plan: *const Plan, events: *mut libc::epoll_event, count: c_int) -> c_int {
    let Ok(known) = usize::try_from(count) else {
        // SAFETY: on the shim's stack.
        let plan = unsafe { &*plan };
        epoll::waited(plan.slot, plan.limit != 0, &mut []);
        return count;
    };
    // SAFETY: the plan is on the shim's stack; the kernel has written so many events.
    let (plan, events) = unsafe { (&*plan, std::slice::from_raw_parts_mut(events, known)) };
    epoll::waited(plan.slot, plan.limit != 0, events) as c_int
}

/// Whether a wait may make a system call of its own.
#[unsafe(no_mangle)]
extern "C" fn hw_may_ask_for_signals() -> c_int {
    (!process::is_sandboxed()).into()
}

/// Descriptors that came with a message mean something new.
///
/// # Safety
/// A message that the kernel has filled in.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_receives_descriptors(message: *const msghdr) {
    if !process::is_foreign() {
        // SAFETY: by the contract.
        unsafe { each_descriptor(message, table::unknown) };
    }
}

/// Connections that are handed to somebody else: nobody looks, until one holder is left.
///
/// # Safety
/// A message that is about to be sent.
#[unsafe(no_mangle)]
unsafe extern "C" fn hw_passes_descriptors(message: *const msghdr) {
    if !process::is_foreign() {
        epoll::tell_kernel();
    }
    let pass = |fd| {
        if let Some(slot) = slot_of(fd) {
            // What is in the lane is the receiver's to read.
            process::pass(slot, fd);
        }
    };
    // SAFETY: by the contract.
    unsafe { each_descriptor(message, pass) };
}

/// Control messages are the program's own words until the kernel has taken them: one whose length is not inside the control
/// bytes ends the list, as it does for the kernel, which then refuses the whole message. Nothing is run for any of them.
unsafe fn each_descriptor(message: *const msghdr, mut run: impl FnMut(c_int)) {
    // SAFETY: the control bytes are the program's, as many as the message says; headers and descriptors are looked at only
    // inside them.
    unsafe {
        let (begin, length) = ((*message).msg_control.cast::<u8>(), (*message).msg_controllen);
        if begin.is_null() {
            return;
        }
        // The offsets of the descriptors of a message at this offset, and where the next one begins.
        let look = |at: usize| {
            let header = begin.add(at).cast::<libc::cmsghdr>().read_unaligned();
            let inside = (HEADER..=length - at).contains(&header.cmsg_len);
            inside.then(|| {
                let passes = header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS;
                let count = if passes { (header.cmsg_len - HEADER) / size_of::<c_int>() } else { 0 };
                (count, at.saturating_add(header.cmsg_len.next_multiple_of(align_of::<libc::cmsghdr>())))
            })
        };
        for only_checked in [true, false] {
            let mut at = 0usize;
            while at.checked_add(HEADER).is_some_and(|end| end <= length) {
                let Some((count, next)) = look(at) else { return };
                if !only_checked {
                    let descriptors = begin.add(at + HEADER).cast::<c_int>();
                    (0..count).for_each(|index| run(descriptors.add(index).read_unaligned()));
                }
                at = next;
            }
        }
    }
}

/// Bytes of a control message's header; descriptors follow.
const HEADER: usize = size_of::<libc::cmsghdr>();
