//! Who this process is, what forks and new programs change, and where it must not acquire anything any more.

use crate::counters;
use crate::raw;
use crate::table::{self, Slot, flag};
use highwire_lane::UNBORN;
use highwire_lane::counters::{Counter, Reason, digits};
use highwire_mem::{Process, TcpCounts, TcpState};
use rustix::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

static NUMBER: AtomicU32 = AtomicU32::new(0);
static SANDBOXED: AtomicBool = AtomicBool::new(false);
static RING: AtomicBool = AtomicBool::new(false);
/// The thread that finds out what a descriptor is; zero for none.
static FINDER: AtomicU32 = AtomicU32::new(0);
/// The frame from which it does, to know one that was left behind.
static FINDER_FRAME: AtomicU64 = AtomicU64::new(0);
/// Spawns and vforks under way, in the lower half: their children run in this memory, with descriptors of their own, and are
/// not among the holders of what they inherit yet. In the upper half, children that stay in this memory for good.
#[unsafe(no_mangle)]
pub(crate) static hw_spawning: AtomicU32 = AtomicU32::new(0);
const SPAWNS: u32 = 0xffff;

/// At the beginning, in the constructor.
pub(crate) fn begin() {
    NUMBER.store(Process::current().number(), Ordering::Relaxed);
}

/// Whether a child may just be starting that is not counted among the holders of connections yet.
pub(crate) fn is_spawning() -> bool {
    hw_spawning.load(Ordering::SeqCst) & SPAWNS != 0
}

/// This process.
#[inline]
pub(crate) fn number() -> u32 {
    NUMBER.load(Ordering::Relaxed)
}

/// Finds out whether this is a child that was forked behind our back.
#[inline(always)]
pub(crate) fn notice_fork() {
    if Process::is_new() {
        become_child();
    }
}

/// Whether nothing may be acquired any more, and no system call made that the program did not ask for.
#[inline]
pub(crate) fn is_sandboxed() -> bool {
    SANDBOXED.load(Ordering::Relaxed)
}

#[unsafe(export_name = "hw_sandboxed")]
pub(crate) extern "C" fn enter_sandbox() {
    // A child in this memory that confines itself.
    if is_foreign() {
        return;
    }
    SANDBOXED.store(true, Ordering::Relaxed);
    // What is in the lanes is still read first; everything else is the program's own calls.
    table::slots().for_each(|slot| slot.make_plain(Reason::Sandbox));
}

/// Only one thread at a time finds out what a descriptor is, since two would claim one lane; the others wait. False for a
/// signal handler that interrupted that very thread: its calls are the kernel's.
pub(crate) fn begin_finding() -> bool {
    let thread = crate::spin::thread();
    let here = 0u8;
    let frame = std::ptr::from_ref(&here).addr() as u64;
    let (mut free, mut since) = (0, 0);
    loop {
        match FINDER.compare_exchange(free, thread, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => break,
            Err(owner) if owner == thread => {
                if frame < FINDER_FRAME.load(Ordering::Relaxed) {
                    return false;
                }
                // Left behind by a jump out of a handler.
                break;
            }
            Err(0) => free = 0,
            Err(owner) => {
                let now = crate::spin::nanoseconds();
                since = if since == 0 { now } else { since };
                // A thread that is gone, or that jumped out of it, keeps no other waiting.
                let hopeless = now.wrapping_sub(since) > FINDING_NS || !raw::has_thread(number(), owner);
                free = if hopeless { owner } else { 0 };
                raw::nap(50_000);
            }
        }
    }
    FINDER_FRAME.store(frame, Ordering::Relaxed);
    true
}

pub(crate) fn end_finding() {
    let _ = FINDER.compare_exchange(crate::spin::thread(), 0, Ordering::Release, Ordering::Relaxed);
}

/// Longer than the registry is waited for, and for the turn to ask it.
const FINDING_NS: u64 = 3_000_000_000;

/// Whether the program uses io_uring, whose reads nobody sees.
pub(crate) fn has_ring() -> bool {
    RING.load(Ordering::Relaxed)
}

#[unsafe(export_name = "hw_ring_made")]
extern "C" fn ring_made() {
    if !is_foreign() && !RING.swap(true, Ordering::Relaxed) {
        table::slots().for_each(|slot| slot.make_plain(Reason::Ring));
    }
}

/// The child will have every connection too: nobody looks until one holder is left.
#[unsafe(export_name = "hw_before_fork")]
extern "C" fn before_fork() {
    notice_fork();
    crate::epoll::tell_kernel();
    for slot in table::slots() {
        if let Some(end) = slot.end() {
            slot.set(flag::SHARED);
            end.incoming.turn_away();
            if !end.lane.holders(end.side).add(UNBORN) {
                slot.make_plain(Reason::Shared);
            }
        }
    }
}

/// In the child with zero, in the parent with its number, or with less when there is none.
#[unsafe(export_name = "hw_after_fork")]
extern "C" fn after_fork(child: i32) {
    if child == 0 {
        // Not wiped where the kernel cannot, and by `_Fork` all the same.
        become_child();
        return;
    }
    for slot in table::slots() {
        if let Some(end) = slot.end() {
            let holders = end.lane.holders(end.side);
            if child > 0 {
                holders.replace(UNBORN, child.cast_unsigned());
            } else {
                holders.remove(UNBORN);
            }
        } else if child > 0 {
            share_uncounted(slot, child.cast_unsigned());
        }
    }
}

fn become_child() {
    let process = Process::current().number();
    NUMBER.store(process, Ordering::Relaxed);
    hw_spawning.store(0, Ordering::Relaxed);
    FINDER.store(0, Ordering::Relaxed);
    crate::spin::forget_thread();
    crate::wait::forget_sleeping();
    crate::pair::forget_asking();
    counters::detach();
    for slot in table::slots() {
        slot.start_over();
        if let Some(end) = slot.end() {
            slot.set(flag::SHARED);
            end.incoming.turn_away();
            end.lane.holders(end.side).replace(UNBORN, process);
        } else {
            share_uncounted(slot, raw::parent());
        }
    }
    crate::epoll::share_all();
    // Those that it was born with are its connections too.
    if table::slots().next().is_some() {
        counters::show();
        table::descriptors().for_each(|(fd, slot)| counters::set(slot, Counter::Descriptor, fd as u64 + 1));
    }
}

/// Whether the calling process is a child in this memory, with descriptors of its own: of vfork, or of clone with `CLONE_VM`.
/// The tables are its parent's; its calls are the kernel's alone.
#[unsafe(export_name = "hw_is_foreign")]
pub(crate) extern "C" fn is_foreign() -> bool {
    if hw_spawning.load(Ordering::Relaxed) == 0 {
        return false;
    }
    // A child that was forked behind our back has tables of its own.
    notice_fork();
    hw_spawning.load(Ordering::Relaxed) != 0 && raw::process() != number()
}

/// A program is about to be started, which gets whatever is not closed by exec.
#[unsafe(export_name = "hw_before_spawn")]
extern "C" fn before_spawn() {
    hw_spawning.fetch_add(1, Ordering::SeqCst);
    share(is_inherited);
}

/// A child is about to run in this memory, until it executes a program or ends. It may use any connection before, and the
/// kernel's counts are taken over when it has gone.
#[unsafe(export_name = "hw_before_vfork")]
pub(crate) extern "C" fn before_vfork() {
    hw_spawning.fetch_add(1, Ordering::SeqCst);
    share(|_, _| true);
}

/// The same for one that shares this memory beside its parent, for as long as it lives.
#[unsafe(export_name = "hw_before_shared_memory")]
extern "C" fn before_shared_memory() {
    hw_spawning.fetch_add(SPAWNS + 2, Ordering::SeqCst);
    share(|_, _| true);
}

/// The child has its program, or has ended; with its number, or zero where there is none.
#[unsafe(export_name = "hw_after_spawn")]
extern "C" fn after_spawn(child: i32) {
    if child > 0 {
        for (fd, slot) in table::descriptors().filter(|(fd, slot)| is_inherited(*fd, slot)) {
            let Some(end) = slot.end() else {
                share_uncounted(slot, child.cast_unsigned());
                continue;
            };
            if !end.lane.holders(end.side).add(child.cast_unsigned()) {
                pass(slot, fd);
            }
        }
    }
    hw_spawning.fetch_sub(1, Ordering::SeqCst);
}

/// The same for a child whose number is not told: it cannot be counted among the holders.
#[unsafe(export_name = "hw_after_unknown_spawn")]
extern "C" fn after_unknown_spawn() {
    for (fd, slot) in table::descriptors().filter(|(fd, slot)| is_inherited(*fd, slot)) {
        if slot.end().is_some() { pass(slot, fd) } else { share_uncounted(slot, table::MANY) }
    }
    hw_spawning.fetch_sub(1, Ordering::SeqCst);
}

/// What vfork returns in the parent, from what the system call did.
pub(crate) extern "C" fn after_vfork(result: isize) -> libc::pid_t {
    let child = i32::try_from(result).unwrap_or(-1);
    after_spawn(child.max(0));
    if child >= 0 {
        return child;
    }
    // SAFETY: this thread's own.
    unsafe { *libc::__errno_location() = -child };
    -1
}

/// Whether a program that is started now gets a descriptor of the connection.
fn is_inherited(fd: i32, slot: &Slot) -> bool {
    slot.has(flag::HANDED) || !raw::closes_on_exec(fd)
}

/// No thread polls the lanes of these connections until their holders are known.
fn share(concerned: impl Fn(i32, &Slot) -> bool) {
    if !is_foreign() {
        crate::epoll::tell_kernel();
    }
    for (fd, slot) in table::descriptors() {
        if let Some(end) = slot.end().filter(|_| concerned(fd, slot)) {
            slot.set(flag::SHARED);
            end.incoming.turn_away();
        }
    }
}

/// A child gets a duplicate of the descriptor that exec does not close.
#[unsafe(export_name = "hw_handed")]
pub(crate) extern "C" fn hand(fd: i32) {
    if let Some(slot) = table::slot_of(fd) {
        slot.set(flag::HANDED);
    }
}

/// A connection without a lane is another process's too.
pub(crate) fn share_uncounted(slot: &Slot, other: u32) {
    let known = slot.other.load(Ordering::Relaxed);
    let several = slot.has(flag::UNCOUNTED) && known != other && (known == table::MANY || raw::exists(known));
    slot.other.store(if several { table::MANY } else { other }, Ordering::Relaxed);
    slot.set(flag::UNCOUNTED);
}

/// Whether a process that is not among the holders of a lane still has the connection. Its bytes would be missing in the
/// counts of a lane, and it would not see the records there.
pub(crate) fn is_used_uncounted(slot: &Slot, fd: i32) -> bool {
    if !slot.has(flag::UNCOUNTED) {
        return false;
    }
    let now = highwire_mem::ticks();
    let asked = slot.shared_asked.load(Ordering::Relaxed);
    if asked != 0 && now.wrapping_sub(asked) < crate::spin::millisecond() * UNCOUNTED_MS {
        return true;
    }
    slot.shared_asked.store(now | 1, Ordering::Relaxed);
    let other = slot.other.load(Ordering::Relaxed);
    let used = is_sandboxed() || other == table::MANY || is_spawning() || raw::has_descriptor_of(other, fd);
    slot.put(flag::UNCOUNTED, used);
    used
}

/// How often another process's descriptors are looked through, in milliseconds.
const UNCOUNTED_MS: u64 = 20;

/// Another process gets a descriptor of the connection, and cannot be counted among its holders.
pub(crate) fn pass(slot: &Slot, fd: i32) {
    slot.make_plain(Reason::Shared);
    crate::log::tell(fd, Reason::Shared);
    slot.set(flag::PASSED);
}

/// This process becomes another program: nobody looks any more.
#[unsafe(export_name = "hw_before_exec")]
extern "C" fn before_exec() {
    if is_foreign() {
        return;
    }
    crate::epoll::tell_kernel();
    for slot in table::slots() {
        if let Some(end) = slot.end() {
            end.incoming.turn_away();
        }
    }
}

/// Whether this process has a connection to itself again; asked now and then.
pub(crate) fn is_alone(slot: &Slot, fd: i32) -> bool {
    if is_spawning() {
        return false;
    }
    let now = highwire_mem::ticks();
    let asked = slot.shared_asked.load(Ordering::Relaxed);
    if asked != 0 && now.wrapping_sub(asked) < crate::spin::millisecond() {
        return false;
    }
    slot.shared_asked.store(now | 1, Ordering::Relaxed);
    let Some(end) = slot.end() else { return false };
    let holders = end.lane.holders(end.side);
    let mut alone = true;
    for other in holders.others(number()) {
        if other == UNBORN || is_running(other) {
            alone = false;
        } else {
            holders.remove(other);
        }
    }
    alone && !is_sandboxed() && holders.add(number()) && {
        // Until the counts are taken over.
        slot.set(flag::UNSURE);
        slot.unset(flag::SHARED);
        if is_spawning() {
            // A child that has just begun: `share` may have come before.
            slot.set(flag::SHARED);
            return false;
        }
        if slot.quiet().is_some() && slot.poll_sleepers.load(Ordering::SeqCst) == 0 {
            end.incoming.forget_sleepers();
            end.outgoing.forget_sends();
        }
        adopt_counts(slot, fd)
    }
}

/// Takes the kernel's counts over, when nobody is between reading or writing and counting it. False if somebody is;
/// then it is tried again later.
pub(crate) fn adopt_counts(slot: &Slot, fd: i32) -> bool {
    let Some(end) = slot.end() else { return false };
    if end.incoming.is_urgent() {
        // The kernel counts unread bytes up to the urgent one only; nothing more comes by the lane anyway.
        slot.make_plain(Reason::OutOfBand);
        return false;
    }
    slot.set(flag::ADOPTING);
    // A thread that counts bytes meanwhile changes these.
    let (written, read) = (end.outgoing.tcp_written(), end.incoming.tcp_read());
    let before = slot.quiet();
    // SAFETY: the program's descriptor, which it is in the middle of using.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let counts = if is_sandboxed() { None } else { TcpCounts::of(socket).ok() };
    let quiet = before.is_some() && slot.quiet() == before;
    let adopts = |counts: TcpCounts| {
        let open = counts.state == TcpState::Established && quiet;
        open && end.outgoing.adopt_tcp(written, counts.written) && end.incoming.adopt_tcp(read, counts.read)
    };
    if counts.is_some_and(adopts) {
        slot.unset(flag::UNSURE | flag::ADOPTING);
        return true;
    }
    // While another thread reads or writes the kernel's numbers may disagree, too.
    let again = match counts.map(|counts| counts.state) {
        Some(TcpState::Established) => true,
        Some(TcpState::Closing) | None => !quiet && !is_sandboxed(),
        Some(TcpState::Closed) => false,
    };
    if again {
        slot.set(flag::UNSURE);
        slot.unset(flag::ADOPTING);
        return false;
    }
    // What lies in the lane is still read, at its place among the bytes of TCP. Of a connection that is closed the
    // region's own count is as good as any.
    if let Some(counts) = counts.filter(|counts| counts.state == TcpState::Closing) {
        end.incoming.adopt_tcp(read, counts.read);
    }
    slot.make_plain(Reason::Refused);
    slot.unset(flag::UNSURE | flag::ADOPTING);
    false
}

/// A process that has ended holds nothing, whether or not its parent has asked for its end.
fn is_running(process: u32) -> bool {
    if !raw::exists(process) {
        return false;
    }
    let (mut name, mut used) = ([0u8; 32], 0);
    for part in [b"/proc/".as_slice(), digits(process, &mut [0; 10]), b"/stat"] {
        name[used..used + part.len()].copy_from_slice(part);
        used += part.len();
    }
    let Ok(path) = std::ffi::CStr::from_bytes_until_nul(&name) else { return true };
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::open(path, flags, rustix::fs::Mode::empty()) else { return true };
    let mut text = [0u8; 512];
    let Ok(length) = rustix::io::read(&file, &mut text) else { return true };
    // The state follows the name, which is in parentheses and may contain any.
    let state = text[..length].iter().rposition(|byte| *byte == b')').and_then(|at| text.get(at + 2));
    !matches!(state, Some(b'Z' | b'X'))
}
