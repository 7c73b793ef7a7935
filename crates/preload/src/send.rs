//! Sending: by the lane while a reader is looking, by TCP otherwise.

use crate::counters::add;
use crate::process;
use crate::raw::{self, Parts};
use crate::receive::{Plan, Verdict, settle};
use crate::spin;
use crate::table::{End, Slot, flag, slot_of};
use highwire_lane::counters::{Counter, Reason};
use highwire_lane::{Published, RECORD_MAX};
use highwire_mem::{SharedMemory, ticks};
use libc::{c_int, ssize_t};
use std::sync::atomic::Ordering;

/// Flags that only the kernel can serve.
const KERNEL_ONLY: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY | libc::MSG_FASTOPEN;
/// How often it is asked whether a connection whose bytes go by the lane is well, in microseconds: a reader that was
/// killed goes on looking.
const HEALTH: u64 = 200;

/// Decides a send of `total` bytes. What is not done goes to the kernel.
pub(crate) fn send(fd: c_int, plan: &mut Plan, parts: Parts<'_>, flags: c_int, total: usize) -> Verdict {
    let copy = |plan: &Plan, memory: &SharedMemory, at: usize, most: usize| parts.copy_in(plan.done, most, memory, at);
    decide(fd, plan, flags, total, copy)
}

/// Decides a send of a file's bytes, from `offset` on, or from its position if that is negative.
pub(crate) fn send_file(fd: c_int, plan: &mut Plan, file: c_int, offset: &mut i64, total: usize) -> Verdict {
    plan.limit = total;
    let Some(slot) = slot_of(fd) else { return Verdict::Kernel };
    plan.of(slot);
    let piece = if slot.has(flag::PLAIN) { usize::MAX } else { PIECE };
    let lane = slot.end().is_some_and(|end| end.outgoing.is_looked_at());
    let begin = match *offset {
        _ if !lane || process::is_sandboxed() => None,
        // Only files that have a position.
        ..0 => raw::seek(file, 0, libc::SEEK_CUR).ok().map(|at| at as i64),
        at => Some(at),
    };
    let Some(begin) = begin else {
        if slot.end().is_none() {
            crate::pair::count_call(slot, fd);
        }
        plan.limit = total.min(piece);
        return to_kernel(plan, slot);
    };
    let mut at_end = false;
    let copy = |plan: &Plan, memory: &SharedMemory, at: usize, most: usize| {
        let bytes = raw::read_file(file, memory, at, most, begin + plan.done as i64).unwrap_or(0);
        at_end = bytes == 0;
        bytes
    };
    let verdict = decide(fd, plan, 0, total, copy);
    plan.limit = plan.limit.min(piece);
    if *offset >= 0 {
        *offset = begin + plan.done as i64;
    } else if plan.done > 0 {
        let _ = raw::seek(file, begin + plan.done as i64, libc::SEEK_SET);
    }
    if at_end && plan.done > 0 && verdict == Verdict::Kernel {
        // The file ended: the kernel would say so again, and has nothing to send.
        if let Some(slot) = plan.slot() {
            from_kernel(slot, plan.counted);
        }
        return Verdict::Done;
    }
    verdict
}

/// So much of a file the kernel is given at once, where a lane is there or may come: after it the reader may be looking.
const PIECE: usize = 128 << 10;

fn decide(
    fd: c_int,
    plan: &mut Plan,
    flags: c_int,
    total: usize,
    copy: impl FnMut(&Plan, &SharedMemory, usize, usize) -> usize,
) -> Verdict {
    process::notice_fork();
    let Some(slot) = slot_of(fd) else { return Verdict::Kernel };
    plan.of(slot);
    plan.limit = total - plan.done;
    let Some(end) = slot.end() else {
        crate::pair::count_call(slot, fd);
        return to_kernel(plan, slot);
    };
    if flags & KERNEL_ONLY != 0 {
        if flags & libc::MSG_OOB != 0 {
            end.outgoing.announce_urgent();
            slot.make_plain(Reason::OutOfBand);
        } else {
            slot.make_plain(Reason::Option);
        }
    }
    if slot.has(flag::SHARED | flag::UNSURE) {
        settle(slot, fd);
    }
    end.outgoing.note_cpu(spin::cpu_to_tell());
    let lane = total > 0 && !slot.has(flag::NOT_WRITING) && end.outgoing.is_looked_at();
    if lane {
        if by_lane(fd, slot, end, plan, flags, total, copy) {
            return Verdict::Done;
        }
        // A reader that is only slow will be looking again: who waits anyway gives TCP a little, and tries again.
        let waits = slot.waits(flags);
        let slow = waits && end.outgoing.is_looked_at() && !slot.has(flag::NOT_WRITING);
        plan.limit = if slow { (total - plan.done).min(RECORD_MAX) } else { total - plan.done };
    }
    to_kernel(plan, slot)
}

fn to_kernel(plan: &mut Plan, slot: &Slot) -> Verdict {
    slot.enter_kernel();
    plan.counted = slot.end().is_some().into();
    if let Some(end) = slot.end() {
        end.outgoing.begin_tcp();
    }
    Verdict::Kernel
}

/// A connection may have come to a lane since, which does not know of the send.
fn from_kernel(slot: &Slot, counted: u32) {
    if let Some(end) = slot.end().filter(|_| counted != 0) {
        end.outgoing.end_tcp();
    }
    slot.leave_kernel();
}

/// True if everything went by the lane.
fn by_lane(
    fd: c_int,
    slot: &'static Slot,
    end: End,
    plan: &mut Plan,
    flags: c_int,
    total: usize,
    mut copy: impl FnMut(&Plan, &SharedMemory, usize, usize) -> usize,
) -> bool {
    let now = ticks();
    if now.wrapping_sub(slot.health_asked.load(Ordering::Relaxed)) > spin::microseconds(HEALTH) {
        slot.health_asked.store(now, Ordering::Relaxed);
        if raw::is_over(fd) {
            slot.set(flag::ENDING);
            end.outgoing.turn_away();
            return false;
        }
    }
    if !lock(slot, end) {
        // A handler has interrupted this thread while it published. Its bytes go first, by TCP, and so do the others.
        end.outgoing.turn_away();
        return false;
    }
    let waits = slot.waits(flags);
    let outgoing = end.outgoing;
    let begun = plan.done;
    while plan.done < total {
        let most = (total - plan.done).min(RECORD_MAX);
        match outgoing.publish(most, |memory, at| copy(plan, memory, at, most)) {
            Published::Done(0) => break,
            Published::Done(bytes) => plan.done += bytes,
            Published::NotLooked => break,
            Published::Full if waits && plan.may_wait(fd) => {
                outgoing.lock().unlock(spin::thread());
                let room = wait_for_room(slot, end);
                if plan.slot().is_none() || !lock(slot, end) || !room {
                    add(slot, Counter::FullBytes, (total - plan.done) as u64);
                    break;
                }
            }
            Published::Full => {
                add(slot, Counter::FullBytes, (total - plan.done) as u64);
                break;
            }
            Published::Lie => {
                slot.make_plain(Reason::Lie);
                break;
            }
        }
    }
    outgoing.lock().unlock(spin::thread());
    if plan.done > begun {
        add(slot, Counter::LaneBytesOut, (plan.done - begun) as u64);
        add(slot, Counter::LaneCallsOut, 1);
        add(slot, Counter::CallsAvoided, u64::from(plan.done == total));
    }
    plan.done == total
}

/// Waits for a reader that is looking and slow: spinning at first, then in naps while it gets on. False if it does not, and
/// where this very wait may keep it from getting on: then TCP takes the bytes, and the kernel wakes when it has room.
///
/// Two ends that both write before they read may both find no room, and each is what the other one waits for. So an end that
/// is written to as well waits for a moment only; and not at all for a reader that has not moved since a wait in vain.
fn wait_for_room(slot: &Slot, end: End) -> bool {
    let (outgoing, incoming) = (end.outgoing, end.incoming);
    let before = outgoing.reader_progress();
    if slot.stuck_at.load(Ordering::Relaxed) == !before || !spin::may_spin(outgoing.reader_cpu()) {
        return false;
    }
    let moved = || outgoing.reader_progress() != before || !outgoing.is_looked_at();
    let heard = incoming.heard();
    let written_to = slot.heard.swap(heard, Ordering::Relaxed) != heard;
    let both_ways = || written_to || incoming.has_news();
    let start = ticks();
    loop {
        if moved() {
            return true;
        }
        let budget = if both_ways() { ROOM_SPIN_BOTH_WAYS } else { ROOM_SPIN };
        if ticks().wrapping_sub(start) >= spin::microseconds(budget) {
            break;
        }
        spin::pause_for(outgoing.reader_cpu());
    }
    let mut naps = NAPS;
    while naps > 0 && !both_ways() {
        raw::nap(NAP);
        if moved() {
            return true;
        }
        naps -= 1;
    }
    slot.stuck_at.store(!before, Ordering::Relaxed);
    false
}

/// Microseconds; fewer where both ends write, and this one may be what the other one waits for.
const ROOM_SPIN: u64 = 100;
const ROOM_SPIN_BOTH_WAYS: u64 = 10;
/// Nanoseconds.
const NAP: i64 = 50_000;
const NAPS: u32 = 40;

/// The call is back from the kernel.
pub(crate) fn sent(plan: &Plan, result: ssize_t, flags: c_int, error: c_int) {
    let Some(slot) = plan.slot() else { return };
    let bytes = u64::try_from(result).unwrap_or(0);
    if result < 0 {
        // One that would have waited is told by the kernel when it may; other errors are for good.
        let passing = error == libc::EAGAIN || error == libc::EINTR;
        slot.set(if passing { flag::REFUSED } else { flag::ENDING });
    } else if slot.has(flag::REFUSED) {
        slot.unset(flag::REFUSED);
    }
    if bytes > 0 {
        add(slot, Counter::TcpBytesOut, bytes);
        add(slot, Counter::TcpCallsOut, 1);
        if let Some(end) = slot.end() {
            end.outgoing.sent_by_tcp(bytes);
        } else {
            slot.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        if flags & libc::MSG_MORE != 0 || slot.has(flag::CORKED) {
            slot.set(flag::HELD_BACK);
        } else if slot.has(flag::HELD_BACK) {
            slot.unset(flag::HELD_BACK);
        }
    }
    from_kernel(slot, plan.counted);
}

/// A send was torn away.
pub(crate) fn abandoned(slot: &Slot, counted: u32) {
    slot.set(flag::UNSURE);
    from_kernel(slot, counted);
}

/// Takes the lock of who writes. False for a handler that interrupted this very thread while it had it.
fn lock(slot: &Slot, end: End) -> bool {
    crate::receive::lock(slot, end, &slot.send_frame, end.outgoing.lock())
}
