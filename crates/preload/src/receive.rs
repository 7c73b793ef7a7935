//! Receiving: what the lane has, what TCP has, in the order of the stream.

use crate::counters::{add, explain};
use crate::process;
use crate::raw::{self, EMPTY, LIST_MAX, Parts};
use crate::spin::{self, Found};
use crate::table::{End, Slot, flag, slot_at, slot_of};
use highwire_lane::counters::{Counter, Reason};
use highwire_lane::{EndState, Next, ThreadLock};
use highwire_mem::{current_cpu, ticks};
use libc::{c_int, size_t, ssize_t};
use std::sync::atomic::{AtomicU64, Ordering};

/// What a call has come to; the shim's `struct plan`.
#[repr(C)]
pub(crate) struct Plan {
    pub(crate) done: size_t,
    pub(crate) limit: size_t,
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) error: c_int,
}

/// What the shim does next; its `enum verdict`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Verdict {
    Done = 0,
    Failed = 1,
    Kernel = 2,
}

impl Plan {
    pub(crate) fn of(&mut self, slot: &Slot) {
        self.slot = slot.index() as u32 + 1;
        self.generation = slot.generation.load(Ordering::Acquire);
    }

    pub(crate) fn fail(&mut self, error: c_int) -> Verdict {
        self.error = error;
        Verdict::Failed
    }

    /// The connection, if it is still the same.
    pub(crate) fn slot(&self) -> Option<&'static Slot> {
        slot_at(self.slot, self.generation)
    }
}

/// So long the kernel's last answer that there is nothing holds for who asks again and again, in microseconds: what
/// comes by TCP is announced in the lane, except the end.
const KERNEL_ANSWER: u64 = 20;

/// Decides a receive of `total` bytes, of which `plan.done` are there.
pub(crate) fn receive(fd: c_int, plan: &mut Plan, parts: Parts<'_>, flags: c_int, total: usize) -> Verdict {
    process::notice_fork();
    plan.limit = total - plan.done;
    let Some(slot) = slot_of(fd) else { return Verdict::Kernel };
    plan.of(slot);
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return to_kernel(slot);
    }
    let end = match slot.end() {
        Some(end) => end,
        None => {
            crate::pair::count_call(slot, fd);
            match slot.end() {
                Some(end) => end,
                None => return to_kernel(slot),
            }
        }
    };
    if slot.has(flag::SHARED | flag::UNSURE) {
        settle(slot, fd);
    }
    if slot.has(flag::PLAIN) && !end.incoming.has_records() {
        return to_kernel(slot);
    }
    if !end.incoming.has_news() && plan.done == 0 {
        let waits = !slot.has(flag::NONBLOCKING) && flags & libc::MSG_DONTWAIT == 0;
        if let Some(verdict) = without_news(slot, end, plan, waits) {
            return verdict;
        }
    }
    if !lock(&slot.receive_frame, end.incoming.lock()) {
        return plan.fail(libc::EINTR);
    }
    let verdict = by_turns(fd, slot, end, plan, parts, flags, total);
    end.incoming.lock().unlock(spin::thread());
    verdict
}

/// The two answers that need no lock: there was nothing a moment ago, and nobody could answer while we spin.
#[inline]
fn without_news(slot: &'static Slot, end: End, plan: &mut Plan, waits: bool) -> Option<Verdict> {
    let incoming = end.incoming;
    if waits {
        // Not looking, everything comes by TCP; and who runs where the writer runs does not begin to look.
        let blind = !incoming.is_looking() && !spin::may_spin(incoming.writer_cpu());
        return (blind && !incoming.has_records()).then(|| sleep(slot));
    }
    let asked = slot.kernel_asked.load(Ordering::Relaxed);
    let fresh = ticks().wrapping_sub(asked) < spin::microseconds(KERNEL_ANSWER);
    if fresh && incoming.is_looking() && !incoming.is_closing() {
        add(slot, Counter::CallsAvoided, 1);
        return Some(plan.fail(libc::EAGAIN));
    }
    None
}

/// Tries to be a connection with a lane again.
pub(crate) fn settle(slot: &Slot, fd: c_int) {
    if slot.has(flag::SHARED) {
        process::is_alone(slot, fd);
    } else {
        process::adopt_counts(slot, fd);
    }
}

fn by_turns(
    fd: c_int,
    slot: &'static Slot,
    end: End,
    plan: &mut Plan,
    parts: Parts<'_>,
    flags: c_int,
    total: usize,
) -> Verdict {
    let waits = !slot.has(flag::NONBLOCKING) && flags & libc::MSG_DONTWAIT == 0;
    if flags & libc::MSG_PEEK != 0 {
        return peek(fd, slot, end, plan, parts, flags, total, waits);
    }
    let incoming = end.incoming;
    let begun = plan.done;
    loop {
        let left = total - plan.done;
        match incoming.next() {
            Next::Record(record) => {
                let skip = plan.done;
                plan.done += incoming.take(record, left, true, |memory, at, bytes| {
                    if flags & libc::MSG_TRUNC == 0 {
                        parts.copy_out(skip, bytes, memory, at);
                    }
                });
                add(slot, Counter::LaneBytesIn, (plan.done - skip) as u64);
            }
            Next::Tcp(bound) => match tcp(fd, slot, end, plan, parts, flags, left.min(bound as usize)) {
                Ok(0) => return done(slot, end, plan, begun),
                Ok(_) => {}
                Err(libc::EAGAIN) => {
                    if plan.done > 0 && !(waits && flags & libc::MSG_WAITALL != 0) {
                        return done(slot, end, plan, begun);
                    }
                    if !waits {
                        return plan.fail(libc::EAGAIN);
                    }
                    // Sent, and not here yet.
                    incoming.turn_away();
                    plan.limit = left.min(bound as usize);
                    return sleep(slot);
                }
                Err(error) => return if plan.done > 0 { done(slot, end, plan, begun) } else { plan.fail(error) },
            },
            Next::Nothing if plan.done > 0 && !(waits && flags & libc::MSG_WAITALL != 0) => {
                return done(slot, end, plan, begun);
            }
            Next::Nothing if !waits => {
                // Only to see: who is looking goes on looking.
                if incoming.is_looking() && !incoming.is_closing() && raw::has_nothing(fd) {
                    slot.kernel_asked.store(ticks(), Ordering::Relaxed);
                    if incoming.has_news() {
                        continue;
                    }
                    return plan.fail(libc::EAGAIN);
                }
                if let Some(verdict) = ask_kernel(fd, slot, end, plan, parts, flags, left) {
                    return verdict;
                }
            }
            Next::Nothing => {
                look_if_allowed(slot, end);
                if incoming.is_looking() && !incoming.is_closing() && spin::may_spin(incoming.writer_cpu()) {
                    // Another thread may read meanwhile.
                    incoming.lock().unlock(spin::thread());
                    let look = || incoming.has_news() || incoming.is_closing() || !incoming.is_looking();
                    let found = spin::spin(slot, -1, look, || false);
                    if plan.slot().is_none() {
                        // Closed by another thread: the kernel has the last word, for the number as it is now.
                        return Verdict::Kernel;
                    }
                    if !lock(&slot.receive_frame, end.incoming.lock()) {
                        return plan.fail(libc::EINTR);
                    }
                    if found == Found::Something && !incoming.is_closing() && incoming.is_looking() {
                        continue;
                    }
                }
                if !incoming.stop_looking(incoming.published()) || incoming.has_records() {
                    continue;
                }
                plan.limit = left;
                return sleep(slot);
            }
            Next::Lie => {
                slot.make_plain(Reason::Lie);
                return to_kernel(slot);
            }
        }
        if plan.done == total {
            return done(slot, end, plan, begun);
        }
    }
}

/// Takes bytes from TCP, without waiting and never past what is known to come next.
fn tcp(
    fd: c_int,
    slot: &Slot,
    end: End,
    plan: &mut Plan,
    parts: Parts<'_>,
    flags: c_int,
    most: usize,
) -> Result<usize, c_int> {
    let mut list = [EMPTY; LIST_MAX];
    let used = parts.list(plan.done, most, &mut list);
    let flags = flags & !libc::MSG_WAITALL;
    slot.enter_kernel();
    let result = raw::receive(fd, &mut list[..used], flags);
    if let Ok(bytes) = result {
        end.incoming.read_by_tcp(bytes as u64);
        plan.done += bytes;
        add(slot, Counter::TcpBytesIn, bytes as u64);
        add(slot, Counter::TcpCallsIn, 1);
    }
    slot.leave_kernel();
    result
}

/// Asks the kernel, without a bound: so nobody looks meanwhile. `None` if the lane has something after all.
fn ask_kernel(
    fd: c_int,
    slot: &'static Slot,
    end: End,
    plan: &mut Plan,
    parts: Parts<'_>,
    flags: c_int,
    left: usize,
) -> Option<Verdict> {
    let incoming = end.incoming;
    if !incoming.stop_looking(incoming.published()) || incoming.has_records() {
        return None;
    }
    let begun = plan.done;
    match tcp(fd, slot, end, plan, parts, flags, left) {
        Ok(_) => Some(done(slot, end, plan, begun)),
        Err(libc::EAGAIN) => {
            look_if_allowed(slot, end);
            slot.kernel_asked.store(ticks(), Ordering::Relaxed);
            // Published between the question and the look.
            if incoming.has_news() { None } else { Some(plan.fail(libc::EAGAIN)) }
        }
        Err(error) => Some(plan.fail(error)),
    }
}

fn done(slot: &Slot, end: End, plan: &Plan, begun: usize) -> Verdict {
    if plan.done > begun {
        look_if_allowed(slot, end);
        add(slot, Counter::LaneCallsIn, 1);
        add(slot, Counter::CallsAvoided, 1);
    }
    Verdict::Done
}

/// The call goes to the kernel, where it may wait.
pub(crate) fn to_kernel(slot: &Slot) -> Verdict {
    slot.enter_kernel();
    slot.sleepers.fetch_add(1, Ordering::SeqCst);
    Verdict::Kernel
}

fn sleep(slot: &Slot) -> Verdict {
    add(slot, Counter::Sleeps, 1);
    to_kernel(slot)
}

/// The call is back from the kernel.
pub(crate) fn received(plan: &Plan, result: ssize_t, flags: c_int) {
    let Some(slot) = plan.slot() else { return };
    let bytes = u64::try_from(result).unwrap_or(0);
    let counts = flags & (libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0;
    slot.sleepers.fetch_sub(1, Ordering::SeqCst);
    if bytes > 0 && counts {
        add(slot, Counter::TcpBytesIn, bytes);
        add(slot, Counter::TcpCallsIn, 1);
        if let Some(end) = slot.end() {
            end.incoming.read_by_tcp(bytes);
            look_if_allowed(slot, end);
        } else {
            slot.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
    }
    slot.leave_kernel();
}

/// Begins to look, where nobody sleeps on the connection and the other end can see it.
pub(crate) fn look_if_allowed(slot: &Slot, end: End) {
    let incoming = end.incoming;
    if incoming.is_looking() || slot.has(flag::NOT_READING) || crate::counters::switched_off() {
        return;
    }
    let cpu = current_cpu();
    incoming.note_cpu(cpu);
    let alone = end.lane.holders(end.side).others(process::number()).next().is_none();
    if !alone {
        slot.set(flag::SHARED);
        explain(slot, Reason::Shared);
        return;
    }
    if incoming.is_closing()
        || incoming.writer_cpu() == Some(cpu)
        || slot.sleepers.load(Ordering::SeqCst) != 0
        || !crate::epoll::may_look(slot)
        || end.lane.state(end.side.other()) != EndState::Joined
    {
        return;
    }
    incoming.look();
    // Somebody may have gone to sleep meanwhile.
    if slot.sleepers.load(Ordering::SeqCst) != 0 || !crate::epoll::may_look(slot) {
        incoming.turn_away();
    }
}

/// Takes a lock. False for a handler that interrupted this very thread while it had it.
pub(crate) fn lock(taken_by: &AtomicU64, lock: ThreadLock<'static>) -> bool {
    let thread = spin::thread();
    let here = 0u8;
    let frame = std::ptr::from_ref(&here).addr() as u64;
    let mut looks = 0u32;
    loop {
        match lock.try_lock(thread) {
            Ok(()) => break,
            Err(owner) if owner == thread => {
                if frame < taken_by.load(Ordering::Relaxed) {
                    return false;
                }
                // Left behind by a jump out of a handler.
                break;
            }
            Err(owner) => {
                looks += 1;
                if looks > 200 {
                    if !raw::exists(owner) && lock.take_over(owner, thread) {
                        break;
                    }
                    raw::give_way();
                } else {
                    highwire_mem::pause();
                }
            }
        }
    }
    taken_by.store(frame, Ordering::Relaxed);
    true
}

/// Sees what is there without taking it: records and the TCP bytes between them, in one question to the kernel.
#[expect(clippy::too_many_arguments, reason = "the same as for a receive")]
fn peek(
    fd: c_int,
    slot: &'static Slot,
    end: End,
    plan: &mut Plan,
    parts: Parts<'_>,
    flags: c_int,
    total: usize,
    waits: bool,
) -> Verdict {
    let incoming = end.incoming;
    loop {
        if incoming.next() == Next::Nothing {
            if !incoming.stop_looking(incoming.published()) {
                continue;
            }
            if waits {
                plan.limit = total;
                return sleep(slot);
            }
        }
        // The TCP bytes between records go to the places that the records leave.
        let mut list = [EMPTY; LIST_MAX];
        let (mut used, mut at, mut tcp_bytes, mut first_gap) = (0, 0, 0, None);
        let mut gaps = [(0usize, 0usize); LIST_MAX];
        let mut gap_count = 0;
        for (between, record) in incoming.waiting() {
            let gap = (between as usize).min(total - at);
            if gap > 0 && gap_count < LIST_MAX {
                used += parts.list(at, gap, &mut list[used..]);
                gaps[gap_count] = (at, gap);
                gap_count += 1;
                first_gap.get_or_insert(at);
                tcp_bytes += gap;
            }
            at += gap;
            if at == total || used == LIST_MAX {
                break;
            }
            at += incoming.take(record, total - at, false, |memory, from, bytes| {
                if flags & libc::MSG_TRUNC == 0 {
                    parts.copy_out(at, bytes, memory, from);
                }
            });
        }
        if at < total && used < LIST_MAX {
            // After the last record whatever TCP has follows.
            used += parts.list(at, total - at, &mut list[used..]);
            gaps[gap_count.min(LIST_MAX - 1)] = (at, total - at);
            gap_count = (gap_count + 1).min(LIST_MAX);
            first_gap.get_or_insert(at);
            at = total;
        }
        let _ = tcp_bytes;
        if used == 0 {
            plan.done = at;
            return Verdict::Done;
        }
        let answer = raw::receive(fd, &mut list[..used], flags & !libc::MSG_WAITALL);
        let mut have = match answer {
            Ok(have) => have,
            Err(_) if first_gap != Some(0) => 0,
            Err(libc::EAGAIN) if waits => {
                incoming.turn_away();
                plan.limit = total;
                return sleep(slot);
            }
            Err(error) => return plan.fail(error),
        };
        // Seen is what is whole up to the first gap that TCP could not fill.
        plan.done = at;
        for (begin, len) in &gaps[..gap_count] {
            if have < *len {
                plan.done = begin + have;
                break;
            }
            have -= len;
        }
        return Verdict::Done;
    }
}
