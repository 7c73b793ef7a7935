//! Receiving: what the lane has, what TCP has, in the order of the stream.

use crate::counters::{add, explain};
use crate::epoll;
use crate::process;
use crate::raw::{self, EMPTY, LIST_MAX, Parts};
use crate::spin::{self, Found};
use crate::table::{End, Slot, flag, slot_at, slot_of};
use highwire_lane::counters::{Counter, Reason};
use highwire_lane::{EndState, Next, ThreadLock};
use highwire_mem::ticks;
use libc::{c_int, size_t, ssize_t};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a call has come to; the shim's `struct plan`.
#[repr(C)]
pub(crate) struct Plan {
    pub(crate) done: size_t,
    pub(crate) limit: size_t,
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) error: c_int,
    /// One for a send that the lane counts as under way.
    pub(crate) counted: u32,
    /// Until when a send may wait, in nanoseconds of the monotonic clock: zero before its first wait, [`NEVER`] without a
    /// limit.
    pub(crate) deadline: u64,
}

/// The deadline of a send without a time limit; the shim's too.
const NEVER: u64 = u64::MAX;

/// What the shim does next; its `enum verdict`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Verdict {
    Done = 0,
    Failed = 1,
    /// Makes the program's call, for at most `limit` bytes.
    Kernel = 2,
    /// Waits until the kernel has something to read, and asks again.
    Wait = 3,
}

impl Plan {
    pub(crate) fn of(&mut self, slot: &Slot) {
        self.slot = slot.index() as u32 + 1;
        self.generation = slot.generation.load(Ordering::Acquire);
    }

    /// Whether a send may wait for a reader that is slow, by what the program has set (`SO_SNDTIMEO`): all waits of a call
    /// together, as in the kernel.
    pub(crate) fn may_wait(&mut self, fd: c_int) -> bool {
        if self.deadline == 0 {
            let limit = crate::raw::send_limit(fd);
            self.deadline = limit.map_or(NEVER, |limit| crate::spin::nanoseconds().saturating_add(limit));
        }
        self.deadline == NEVER || crate::spin::nanoseconds() < self.deadline
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
/// comes by TCP is announced in the lane, except the end of a process that was killed.
const KERNEL_ANSWER: u64 = 20;

/// One call of the program.
struct Call<'a> {
    fd: c_int,
    slot: &'static Slot,
    end: &'a End,
    parts: Parts<'a>,
    flags: c_int,
    total: usize,
    /// Whether the call may wait.
    waits: bool,
    /// Where bytes came from.
    from_lane: Cell<bool>,
    from_kernel: Cell<bool>,
}

/// Decides a receive of `total` bytes, of which `plan.done` are there.
pub(crate) fn receive(fd: c_int, plan: &mut Plan, parts: Parts<'_>, flags: c_int, total: usize) -> Verdict {
    process::notice_fork();
    plan.limit = total - plan.done;
    let Some(slot) = slot_of(fd) else { return Verdict::Kernel };
    plan.of(slot);
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
    let plain = plan.done == 0 && (slot.has(flag::PLAIN) || end.incoming.is_urgent()) && !end.incoming.has_records();
    if plain || flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        return to_kernel_asleep(slot, end);
    }
    if slot.has(flag::SHARED | flag::UNSURE) {
        settle(slot, fd);
    }
    let waits = slot.waits(flags);
    if end.incoming.has_news() {
        end.incoming.prefetch(slot.record_bytes.load(Ordering::Relaxed) as usize);
    } else if plan.done == 0
        && let Some(verdict) = without_news(slot, &end, waits, plan)
    {
        return verdict;
    }
    let (from_lane, from_kernel) = (Cell::new(false), Cell::new(false));
    let call = Call { fd, slot, end: &end, parts, flags, total, waits, from_lane, from_kernel };
    if !call.lock() {
        return plan.fail(libc::EINTR);
    }
    let verdict = if flags & libc::MSG_PEEK != 0 { call.peek(plan) } else { call.by_turns(plan) };
    call.unlock();
    verdict
}

/// Decides a splice to a pipe: what the lane has goes there, then as much of TCP as may be moved without passing a record.
pub(crate) fn to_pipe(fd: c_int, plan: &mut Plan, to: c_int, count: usize, waits: bool) -> Verdict {
    process::notice_fork();
    plan.limit = count;
    let Some(slot) = slot_of(fd) else { return Verdict::Kernel };
    plan.of(slot);
    let Some(end) = slot.end() else { return to_kernel(slot) };
    end.incoming.turn_away();
    if !lock_reading(slot, end) {
        return plan.fail(libc::EINTR);
    }
    let verdict = match end.incoming.next() {
        Next::Record(record) => {
            let mut room = [libc::pollfd { fd: to, events: libc::POLLOUT, revents: 0 }];
            // A pipe that has room has it for a page.
            let mut bytes = [0; 4096];
            let most = count.min(bytes.len()).min(record.left());
            if raw::poll(&mut room) == Ok(0) {
                if waits { Verdict::Wait } else { plan.fail(libc::EAGAIN) }
            } else {
                end.incoming.take(record, most, false, |memory, at, _| memory.copy_out(at, &mut bytes[..most]));
                match raw::write(to, &bytes[..most]) {
                    Ok(written) => {
                        end.incoming.take(record, written, true, |_, _, _| {});
                        plan.done = written;
                        Verdict::Done
                    }
                    Err(error) => plan.fail(error),
                }
            }
        }
        Next::Tcp(bound) => {
            plan.limit = count.min(bound as usize);
            to_kernel_asleep(slot, end)
        }
        Next::Nothing | Next::Lie => to_kernel_asleep(slot, end),
    };
    end.incoming.lock().unlock(spin::thread());
    verdict
}

/// Tries to be a connection with a lane again.
pub(crate) fn settle(slot: &Slot, fd: c_int) {
    if process::is_sandboxed() {
        return;
    }
    if slot.has(flag::SHARED) {
        process::is_alone(slot, fd);
    } else {
        process::adopt_counts(slot, fd);
    }
}

/// The answers that need no lock: there was nothing a moment ago; nobody could answer while we spin.
#[inline]
fn without_news(slot: &Slot, end: &End, waits: bool, plan: &mut Plan) -> Option<Verdict> {
    let incoming = end.incoming;
    let seen = incoming.published();
    if waits {
        // Not looking, everything comes by TCP; and who runs where the writer runs does not begin to look.
        let blind = !incoming.is_looking() && !spin::may_spin(incoming.writer_cpu());
        return (blind && !incoming.has_records() && incoming.sleep(seen)).then(|| asleep(slot));
    }
    let asked = slot.kernel_asked.load(Ordering::Relaxed);
    let fresh = ticks().wrapping_sub(asked) < spin::microseconds(KERNEL_ANSWER) && !epoll::told_since(asked);
    // A writer that never used the lane may be one whose system calls nobody sees.
    let announces = seen > 0 && !slot.has(flag::UNANNOUNCED);
    if fresh && announces && incoming.is_looking() && !incoming.is_closing() && !incoming.may_be_sent() {
        add(slot, Counter::CallsAvoided, 1);
        return Some(plan.fail(libc::EAGAIN));
    }
    None
}

impl Call<'_> {
    fn lock(&self) -> bool {
        lock_reading(self.slot, *self.end)
    }

    fn unlock(&self) {
        self.end.incoming.lock().unlock(spin::thread());
    }

    /// Whether the whole buffer is to be filled before the call returns.
    fn wants_all(&self) -> bool {
        self.waits && self.flags & libc::MSG_WAITALL != 0
    }

    fn by_turns(&self, plan: &mut Plan) -> Verdict {
        let incoming = self.end.incoming;
        let begun = plan.done;
        loop {
            let left = self.total - plan.done;
            let seen = incoming.published();
            match incoming.next() {
                Next::Record(record) => {
                    let skip = plan.done;
                    self.slot.record_bytes.store(record.len() as u32, Ordering::Relaxed);
                    plan.done += incoming.take(record, left, true, |memory, at, bytes| {
                        if self.flags & libc::MSG_TRUNC == 0 {
                            self.parts.copy_out(skip, bytes, memory, at);
                        }
                    });
                    self.from_lane.set(true);
                    add(self.slot, Counter::LaneBytesIn, (plan.done - skip) as u64);
                }
                Next::Lie => return self.broken(plan),
                // What is before an urgent byte, which ends a receive.
                _ if plan.done > 0 && incoming.is_urgent() => {
                    // Byte by byte: nothing else tells where the mark is when urgent bytes are in line.
                    if raw::is_at_mark(self.fd) || !matches!(self.tcp(plan, 1), Ok(1)) {
                        return self.done(plan, begun);
                    }
                }
                // The program's own call, and no other.
                next @ (Next::Nothing | Next::Tcp(_)) if process::is_sandboxed() => {
                    if plan.done > 0 {
                        return self.done(plan, begun);
                    }
                    if incoming.sleep(seen) {
                        plan.limit = match next {
                            Next::Tcp(bound) if incoming.has_records() => left.min(bound as usize),
                            _ => left,
                        };
                        return asleep(self.slot);
                    }
                }
                Next::Tcp(bound) => {
                    if plan.done > 0 && raw::unread(self.fd) == 0 {
                        // Announced and not here yet; or never to come, and the error is the next call's to tell.
                        if !self.wants_all() || raw::is_over(self.fd) {
                            return self.done(plan, begun);
                        }
                        if incoming.sleep(seen) {
                            return self.wait();
                        }
                        continue;
                    }
                    match self.tcp(plan, left.min(bound as usize)) {
                        Ok(0) => return self.done(plan, begun),
                        Ok(_) => {}
                        Err(libc::EAGAIN) if self.waits => {
                            if incoming.sleep(seen) {
                                return self.wait();
                            }
                        }
                        Err(error) => return self.failed(plan, begun, error),
                    }
                }
                Next::Nothing if plan.done > 0 && !self.wants_all() => {
                    // Whether more is in the kernel is known, but for what is being sent just now.
                    let more = incoming.may_be_sent()
                        || incoming.is_closing()
                        || self.slot.has(flag::UNANNOUNCED)
                        || self.from_kernel.get();
                    if !more || raw::unread(self.fd) == 0 {
                        return self.done(plan, begun);
                    }
                    if incoming.sleep(seen) {
                        let result = self.tcp(plan, left);
                        incoming.wake();
                        if !matches!(result, Ok(bytes) if bytes > 0) {
                            return self.done(plan, begun);
                        }
                    }
                }
                Next::Nothing if !self.waits => {
                    if let Some(verdict) = self.ask_kernel(plan, seen, begun) {
                        return verdict;
                    }
                }
                Next::Nothing => {
                    look_if_allowed(self.slot, *self.end);
                    if let Some(verdict) = self.spin(plan) {
                        return verdict;
                    }
                    if incoming.has_news() {
                        continue;
                    }
                    if incoming.sleep(seen) {
                        plan.limit = left;
                        if plan.done == 0 {
                            return asleep(self.slot);
                        }
                        // The kernel does not know of the part of a whole that is there already, for which an error is left
                        // to the next call.
                        if raw::is_over(self.fd) && raw::unread(self.fd) == 0 {
                            incoming.wake();
                            return self.done(plan, begun);
                        }
                        match self.tcp(plan, left) {
                            Err(libc::EAGAIN) => return self.wait(),
                            result => {
                                incoming.wake();
                                if !matches!(result, Ok(bytes) if bytes > 0) {
                                    return self.done(plan, begun);
                                }
                            }
                        }
                    }
                }
            }
            if plan.done == self.total {
                return self.done(plan, begun);
            }
        }
    }

    /// Spins where it may find something; another thread may read meanwhile.
    fn spin(&self, plan: &mut Plan) -> Option<Verdict> {
        let incoming = self.end.incoming;
        if !incoming.is_looking() || incoming.is_closing() || !spin::may_spin(incoming.writer_cpu()) {
            return None;
        }
        self.unlock();
        let look = || {
            let news = incoming.has_news();
            if news {
                incoming.prefetch(self.slot.record_bytes.load(Ordering::Relaxed) as usize);
            }
            news || incoming.is_closing() || !incoming.is_looking()
        };
        let found = spin::spin(self.slot, incoming.writer_cpu(), -1, look, || false);
        if found == Found::Nothing && plan.slot().is_none() {
            // Closed by another thread: the kernel has the last word, for the number as it is now.
            plan.slot = 0;
            return Some(Verdict::Kernel);
        }
        (!self.lock()).then(|| plan.fail(libc::EINTR))
    }

    /// Takes bytes from TCP, without waiting.
    fn tcp(&self, plan: &mut Plan, most: usize) -> Result<usize, c_int> {
        let mut list = [EMPTY; LIST_MAX];
        let used = self.parts.list(plan.done, most, &mut list);
        let flags = self.flags & !libc::MSG_WAITALL;
        self.slot.enter_kernel();
        self.from_kernel.set(true);
        let result = raw::receive(self.fd, &mut list[..used], flags);
        if let Ok(bytes) = result {
            self.end.incoming.read_by_tcp(bytes as u64);
            plan.done += bytes;
            add(self.slot, Counter::TcpBytesIn, bytes as u64);
            add(self.slot, Counter::TcpCallsIn, 1);
        }
        self.slot.leave_kernel();
        result
    }

    /// Asks the kernel, without a bound: so nobody looks meanwhile. `None` if the lane has something after all.
    fn ask_kernel(&self, plan: &mut Plan, seen: u64, begun: usize) -> Option<Verdict> {
        let incoming = self.end.incoming;
        // Only to see: who is looking goes on looking.
        if incoming.is_looking() && !incoming.is_closing() && raw::has_nothing(self.fd) {
            self.slot.kernel_asked.store(ticks(), Ordering::Relaxed);
            return if incoming.has_news() { None } else { Some(plan.fail(libc::EAGAIN)) };
        }
        if !incoming.sleep(seen) {
            return None;
        }
        let result = self.tcp(plan, self.total - plan.done);
        incoming.wake();
        if incoming.is_ahead() {
            self.slot.set(flag::UNANNOUNCED);
        }
        match result {
            Ok(_) => Some(self.done(plan, begun)),
            Err(libc::EAGAIN) => {
                look_if_allowed(self.slot, *self.end);
                self.slot.kernel_asked.store(ticks(), Ordering::Relaxed);
                if incoming.has_news() { None } else { Some(plan.fail(libc::EAGAIN)) }
            }
            Err(error) => Some(plan.fail(error)),
        }
    }

    fn done(&self, plan: &Plan, begun: usize) -> Verdict {
        if plan.done > begun {
            look_if_allowed(self.slot, *self.end);
        }
        if self.from_lane.get() {
            add(self.slot, Counter::LaneCallsIn, 1);
            add(self.slot, Counter::CallsAvoided, u64::from(!self.from_kernel.get()));
        }
        Verdict::Done
    }

    fn failed(&self, plan: &mut Plan, begun: usize, error: c_int) -> Verdict {
        if plan.done > 0 { self.done(plan, begun) } else { plan.fail(error) }
    }

    /// The lane said what cannot be true. Bytes may be missing, so the connection cannot go on.
    fn broken(&self, plan: &mut Plan) -> Verdict {
        self.slot.make_plain(Reason::Lie);
        raw::break_off(self.fd);
        if plan.done > 0 { Verdict::Done } else { plan.fail(libc::ECONNRESET) }
    }

    /// Waits without taking anything. Counted as a sleeper already.
    fn wait(&self) -> Verdict {
        self.slot.enter_kernel();
        Verdict::Wait
    }

    /// Sees what is there without taking it: records and the TCP bytes between them, in one question to the kernel.
    fn peek(&self, plan: &mut Plan) -> Verdict {
        let incoming = self.end.incoming;
        let seen = incoming.published();
        match incoming.next() {
            Next::Nothing if self.waits || self.slot.has(flag::PLAIN) => {
                return if incoming.sleep(seen) { asleep(self.slot) } else { self.peek(plan) };
            }
            Next::Lie => return self.broken(plan),
            _ => {}
        }
        // The TCP bytes between records go to the places that the records leave.
        let mut list = [EMPTY; LIST_MAX];
        let mut gaps = [(0usize, 0usize); LIST_MAX];
        let (mut parts_used, mut gaps_used, mut at) = (0, 0, 0);
        for (between, record) in incoming.waiting() {
            let gap = (between as usize).min(self.total - at);
            if gap > 0 {
                if parts_used == LIST_MAX || gaps_used == LIST_MAX {
                    break;
                }
                parts_used += self.parts.list(at, gap, &mut list[parts_used..]);
                gaps[gaps_used] = (at, gap);
                gaps_used += 1;
                at += gap;
            }
            if at == self.total {
                break;
            }
            at += incoming.take(record, self.total - at, false, |memory, from, bytes| {
                if self.flags & libc::MSG_TRUNC == 0 {
                    self.parts.copy_out(at, bytes, memory, from);
                }
            });
        }
        // After the last record follows whatever TCP has.
        if at < self.total && parts_used < LIST_MAX && gaps_used < LIST_MAX && !(at > 0 && incoming.is_urgent()) {
            parts_used += self.parts.list(at, self.total - at, &mut list[parts_used..]);
            gaps[gaps_used] = (at, self.total - at);
            gaps_used += 1;
            at = self.total;
        }
        plan.done = at;
        let Some((first, _)) = gaps[..gaps_used].first().copied() else { return Verdict::Done };
        // An error is the next call's to tell where there is something to see.
        let mut have = if first > 0 && raw::unread(self.fd) == 0 {
            0
        } else {
            match raw::receive(self.fd, &mut list[..parts_used], self.flags & !libc::MSG_WAITALL) {
                Ok(have) => have,
                Err(libc::EAGAIN) if self.waits && first == 0 => {
                    return if incoming.sleep(seen) { self.wait() } else { self.peek(plan) };
                }
                Err(error) if first == 0 => return plan.fail(error),
                Err(_) => 0,
            }
        };
        // Seen is what is whole up to the first gap that TCP could not fill.
        for (begin, len) in &gaps[..gaps_used] {
            if have < *len {
                plan.done = begin + have;
                break;
            }
            have -= len;
        }
        Verdict::Done
    }
}

/// The program's call may wait in the kernel. It is counted as a sleeper already.
fn asleep(slot: &Slot) -> Verdict {
    add(slot, Counter::Sleeps, 1);
    to_kernel(slot)
}

/// A call on a connection without a lane.
fn to_kernel(slot: &Slot) -> Verdict {
    slot.enter_kernel();
    Verdict::Kernel
}

/// The call goes to the kernel whatever the lane has.
pub(crate) fn to_kernel_asleep(slot: &Slot, end: End) -> Verdict {
    while !end.incoming.sleep(end.incoming.published()) {}
    slot.enter_kernel();
    Verdict::Kernel
}

/// The call is back from the kernel.
pub(crate) fn received(plan: &Plan, result: ssize_t, flags: c_int) {
    let Some(slot) = plan.slot() else { return };
    let bytes = u64::try_from(result).unwrap_or(0);
    let counts = bytes > 0 && flags & (libc::MSG_PEEK | libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0;
    if counts {
        add(slot, Counter::TcpBytesIn, bytes);
        add(slot, Counter::TcpCallsIn, 1);
    }
    if let Some(end) = slot.end() {
        if counts {
            end.incoming.read_by_tcp(bytes);
        }
        end.incoming.wake();
        if counts {
            try_to_look(slot, end);
        }
    } else if counts {
        slot.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
    slot.leave_kernel();
}

/// Begins to look, where nobody sleeps on the connection and the other end can see it.
pub(crate) fn look_if_allowed(slot: &Slot, end: End) {
    let incoming = end.incoming;
    if crate::counters::switched_off() {
        return incoming.turn_away();
    }
    if incoming.is_looking() || slot.has(flag::NOT_READING) {
        return;
    }
    let together = !spin::may_spin(incoming.writer_cpu()) && !spin::plan_to_step_aside(slot);
    incoming.note_cpu(spin::cpu_to_tell());
    if incoming.is_closing()
        || together
        || end.lane.state(end.side.other()) != EndState::Joined
        || slot.poll_sleepers.load(Ordering::SeqCst) != 0
    {
        return;
    }
    if end.lane.holders(end.side).others(process::number()).next().is_some() {
        slot.set(flag::SHARED);
        explain(slot, Reason::Shared);
        return;
    }
    epoll::with_nobody_asleep(slot, || incoming.look());
}

/// The same for who has no lock: only who has it begins to look, so that whoever reads with it knows what can come.
pub(crate) fn try_to_look(slot: &Slot, end: End) {
    let idle = end.incoming.is_looking() || slot.has(flag::NOT_READING);
    if idle || spin::is_stuck_with(end.incoming.writer_cpu()) {
        return;
    }
    let (lock, thread) = (end.incoming.lock(), spin::thread());
    if lock.try_lock(thread).is_ok() {
        look_if_allowed(slot, end);
        lock.unlock(thread);
    }
}

/// Takes the lock of who reads. False for a handler that interrupted this very thread while it had it.
fn lock_reading(slot: &Slot, end: End) -> bool {
    lock(slot, end, &slot.receive_frame, end.incoming.lock())
}

/// Whether a thread of this number is there who uses the connection.
fn may_have_locked(end: End, thread: u32) -> bool {
    let process = process::number();
    raw::has_thread(process, thread)
        || end.lane.holders(end.side).others(process).next().is_some() && raw::exists(thread)
}

/// Milliseconds after which a lock is taken from whoever has it.
const LOCK_MS: u64 = 2_000;

/// Takes a lock. False for a handler that interrupted this very thread while it had it.
pub(crate) fn lock(slot: &Slot, end: End, taken_by: &AtomicU64, lock: ThreadLock<'static>) -> bool {
    let thread = spin::thread();
    let here = 0u8;
    let frame = std::ptr::from_ref(&here).addr() as u64;
    let mut looks = 0u32;
    let mut since = 0;
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
                    let now = ticks();
                    since = if since == 0 { now } else { since };
                    // The dead do not come back; and nobody copies for so long but a peer that writes what it likes.
                    let hopeless = now.wrapping_sub(since) > spin::millisecond() * LOCK_MS;
                    if hopeless {
                        slot.make_plain(Reason::Lie);
                    }
                    if (hopeless || !may_have_locked(end, owner)) && lock.take_over(owner, thread) {
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
