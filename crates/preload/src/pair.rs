//! When a connection has shown that it lives, a lane is asked for; whichever end comes second completes the pair.

use crate::counters::{explain, is_explained, set, switched_off};
use crate::process;
use crate::table::{MAPPED, REGIONS, Slot, flag};
use highwire_lane::claim::{self, Answer, Pairing, Patience, Refusal, Silence};
use highwire_lane::counters::{Counter, Reason};
use highwire_lane::{EndState, LaneRegion};
use highwire_mem::PeerRegion;
use libc::c_int;
use rustix::fd::BorrowedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};

/// So many receives or sends, or bytes, show that a connection lives.
const CALLS: u32 = 8;
const BYTES: u64 = 64 * 1024;

/// Numbers of the regions that are mapped, at the places of [`MAPPED`].
static NUMBERS: [AtomicU64; REGIONS] = [const { AtomicU64::new(0) }; REGIONS];
/// Where the registry tells that more ends have come, and the number of that file.
static BOARD: AtomicPtr<PeerRegion> = AtomicPtr::new(std::ptr::null_mut());
static BOARD_FILE: AtomicU64 = AtomicU64::new(0);
/// One thread at a time asks; others go on by TCP.
static ASKING: AtomicBool = AtomicBool::new(false);
/// After a registry did not answer.
static SILENCE: Silence = Silence::new();
static PORTS: OnceLock<Ports> = OnceLock::new();

/// Ports that may have lanes.
#[derive(Clone, Copy)]
struct Ports {
    only: Ranges,
    never: Ranges,
}

#[derive(Clone, Copy, Default)]
struct Ranges {
    list: [(u16, u16); 32],
    used: usize,
}

impl Ranges {
    /// `80,443,8000-8100`, as the command checked it.
    fn parse(text: &[u8]) -> Ranges {
        let mut ranges = Ranges::default();
        for part in text.split(|byte| *byte == b',').filter(|part| !part.is_empty()) {
            let mut ends = part.splitn(2, |byte| *byte == b'-').map(number);
            if let (Some(Some(first)), last) = (ends.next(), ends.next())
                && let Some(place) = ranges.list.get_mut(ranges.used)
            {
                *place = (first, last.flatten().unwrap_or(first));
                ranges.used += 1;
            }
        }
        ranges
    }

    fn contain(&self, port: u16) -> bool {
        self.list[..self.used].iter().any(|(first, last)| (*first..=*last).contains(&port))
    }
}

fn number(text: &[u8]) -> Option<u16> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// Takes the ports from the environment, before the program changes it.
pub(crate) fn begin() {
    let read = |name: &std::ffi::CStr| {
        // SAFETY: called from the constructor, when nothing else runs that could change the environment.
        let value = unsafe { libc::getenv(name.as_ptr()) };
        // SAFETY: a string of the environment, which ends with zero.
        (!value.is_null()).then(|| Ranges::parse(unsafe { std::ffi::CStr::from_ptr(value) }.to_bytes()))
    };
    let only = read(c"HIGHWIRE_LANES_ONLY").unwrap_or_default();
    let never = read(c"HIGHWIRE_LANES_NEVER").unwrap_or_default();
    let _ = PORTS.set(Ports { only, never });
}

/// Counts a call on a connection without a lane, and asks for one when it is time.
#[inline]
pub(crate) fn count_call(slot: &Slot, fd: c_int) {
    let calls = slot.calls.load(Ordering::Relaxed).wrapping_add(1);
    slot.calls.store(calls, Ordering::Relaxed);
    if (calls >= CALLS || slot.bytes.load(Ordering::Relaxed) >= BYTES) && !slot.has(flag::PLAIN) {
        ask(slot, fd, calls);
    }
}

/// In a forked child, which does not have the thread that asked.
pub(crate) fn forget_asking() {
    ASKING.store(false, Ordering::Relaxed);
}

/// Asks for the lane of a connection that another process had before, and may have left something in.
pub(crate) fn ask_at_once(slot: &Slot, fd: c_int) {
    slot.board.store(BOARD_LEFT, Ordering::Relaxed);
    slot.calls.store(CALLS, Ordering::Relaxed);
    ask(slot, fd, CALLS);
}

#[cold]
fn ask(slot: &Slot, fd: c_int, calls: u32) {
    let board = slot.board.load(Ordering::Relaxed);
    let patience = if board == BOARD_LEFT { Patience::Much } else { Patience::Little };
    // What another process has left in a lane is read all the same, where that takes no forbidden call.
    if let Some(reason) = unwanted().filter(|reason| patience == Patience::Little || *reason == Reason::Sandbox) {
        if !is_explained(slot, reason) {
            tell(slot, fd, reason);
        }
        return;
    }
    // An end that waits asks again when the registry says that something has changed.
    if board == BOARD_REFUSED || board != 0 && board_word(board >> 48) == Some(board & BOARD_MASK) {
        return;
    }
    let asked = slot.asked_at_calls.load(Ordering::Relaxed);
    if asked != 0 && calls.wrapping_sub(asked) < CALLS {
        return;
    }
    let silent = patience == Patience::Little && SILENCE.holds(milliseconds());
    if slot.quiet().is_none() || silent {
        return;
    }
    // An inherited connection may have a lane already, also while another process has it.
    if patience == Patience::Little && process::is_used_uncounted(slot, fd) {
        slot.asked_at_calls.store(calls.max(1), Ordering::Relaxed);
        explain(slot, Reason::Shared);
        return;
    }
    if !begin_asking(patience) {
        return;
    }
    slot.asked_at_calls.store(calls.max(1), Ordering::Relaxed);
    if (may_have_lane(slot, fd) || patience == Patience::Much) && crate::MEMORY.has_room() {
        claim_lane(slot, fd, patience);
    }
    ASKING.store(false, Ordering::Release);
}

/// Why this process asks for no lanes now.
fn unwanted() -> Option<Reason> {
    if process::is_sandboxed() {
        Some(Reason::Sandbox)
    } else if switched_off() {
        Some(Reason::SwitchedOff)
    } else {
        process::has_ring().then_some(Reason::Ring)
    }
}

/// One thread asks at a time. Bytes that lie in a lane come before those of TCP: where there may be some, a thread waits for
/// its turn.
fn begin_asking(patience: Patience) -> bool {
    let until = milliseconds() + patience.time().as_millis() as u64;
    loop {
        if !ASKING.swap(true, Ordering::Acquire) {
            return true;
        }
        if patience == Patience::Little || milliseconds() > until {
            return false;
        }
        crate::raw::nap(50_000);
    }
}

fn claim_lane(slot: &Slot, fd: c_int, patience: Patience) {
    // SAFETY: the program's descriptor, which it is in the middle of using.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let answer = claim::claim(socket, patience);
    match &answer {
        Ok(_) => SILENCE.broken(),
        Err(error) => SILENCE.begin(*error, milliseconds()),
    }
    match answer {
        Ok(Answer::Paired(pairing)) => join(slot, fd, &pairing, patience),
        // No other process has put bytes into a lane.
        Ok(Answer::Waiting { .. }) if patience == Patience::Much => begin_young(slot),
        Ok(Answer::Waiting { board, place, value }) => {
            tell(slot, fd, Reason::OtherEnd);
            if let Some(memory) = board {
                note_board(memory);
            }
            // A place that is never zero, so that the word is not.
            slot.board.store((u64::from(place) + 1) << 48 | value & BOARD_MASK, Ordering::Relaxed);
        }
        // One that was inherited may not be connected yet.
        Ok(Answer::Refused(Refusal::NotConnected)) if patience == Patience::Much => {
            tell(slot, fd, Reason::Refused);
            begin_young(slot);
        }
        Ok(Answer::Refused(refusal)) => {
            let reason = if refusal == Refusal::Exhausted { Reason::Exhausted } else { Reason::Refused };
            tell(slot, fd, reason);
            slot.board.store(BOARD_REFUSED, Ordering::Relaxed);
        }
        Err(_) => {
            tell(slot, fd, Reason::NoRegistry);
            // What the board said of it may have been another registry's word.
            slot.board.store(0, Ordering::Relaxed);
        }
    }
}

fn tell(slot: &Slot, fd: c_int, reason: Reason) {
    explain(slot, reason);
    crate::log::tell(fd, reason);
}

const BOARD_MASK: u64 = (1 << 48) - 1;
/// A place beyond the board, where nothing ever changes.
const BOARD_REFUSED: u64 = 0xffff << 48;
/// Another one, which is never zero as it says: nothing was told yet, and there may be a lane already.
const BOARD_LEFT: u64 = 0xfffe << 48 | 1;

fn board_word(place: u64) -> Option<u64> {
    let board = BOARD.load(Ordering::Acquire);
    // SAFETY: a box that is never given back.
    let board = unsafe { board.as_ref() }?;
    Some(claim::board_word(board, place as usize - 1) & BOARD_MASK)
}

/// Another registry has another board. The old one stays mapped: a thread may be looking at it. It is two pages for each
/// registry that this process has waited for, and `Arena::has_room` bounds their number.
fn note_board(memory: rustix::fd::OwnedFd) {
    use rustix::fd::AsFd;
    let Ok(file) = rustix::fs::fstat(&memory).map(|file| file.st_ino) else { return };
    if BOARD.load(Ordering::Acquire).is_null() || BOARD_FILE.load(Ordering::Relaxed) != file {
        let Ok(board) = claim::map_board(memory.as_fd()) else { return };
        BOARD.store(Box::into_raw(Box::new(board)), Ordering::Release);
        BOARD_FILE.store(file, Ordering::Relaxed);
    }
}

fn milliseconds() -> u64 {
    crate::spin::nanoseconds() / 1_000_000
}

/// Looks at the ports, once.
fn may_have_lane(slot: &Slot, fd: c_int) -> bool {
    if slot.has(flag::PORTS_SEEN) {
        return true;
    }
    slot.set(flag::PORTS_SEEN);
    let Some(ports) = PORTS.get() else { return true };
    if ports.only.used == 0 && ports.never.used == 0 {
        return true;
    }
    // SAFETY: the program's descriptor, which it is in the middle of using.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let both = highwire_mem::socket_names(socket).map(|name| name.map_or(0, |name| name.port()));
    let wanted = ports.only.used == 0 || both.iter().any(|port| ports.only.contain(*port));
    if wanted && !both.iter().any(|port| ports.never.contain(*port)) {
        return true;
    }
    slot.make_plain(Reason::Port);
    crate::log::tell(fd, Reason::Port);
    false
}

/// An inherited connection without a lane gets one like a new connection, when the process that had it before has closed it.
fn begin_young(slot: &Slot) {
    process::share_uncounted(slot, crate::raw::parent());
    for word in [&slot.calls, &slot.asked_at_calls] {
        word.store(0, Ordering::Relaxed);
    }
    slot.board.store(0, Ordering::Relaxed);
}

fn join(slot: &Slot, fd: c_int, pairing: &Pairing, patience: Patience) {
    let Some(place) = region(pairing) else {
        tell(slot, fd, Reason::Memory);
        slot.board.store(BOARD_REFUSED, Ordering::Relaxed);
        return;
    };
    crate::spin::prepare();
    // Of a connection that another process had before, only what lies in the lane may be wanted.
    let plain = if slot.has(flag::PLAIN) { Some(Reason::Port) } else { process::has_ring().then_some(Reason::Ring) };
    // Counted from here on, by whoever else sends or receives; nobody looks or publishes yet.
    slot.set(flag::ADOPTING);
    slot.set_lane(place, pairing.lane, pairing.side);
    let Some(end) = slot.end() else {
        slot.drop_lane();
        slot.unset(flag::ADOPTING);
        return;
    };
    let goes_on = end.lane.state(end.side) == EndState::Joined;
    if patience == Patience::Much && !goes_on {
        // The lane is new, and another process that has the connection may never join it.
        slot.drop_lane();
        slot.unset(flag::ADOPTING);
        return begin_young(slot);
    }
    let holders = end.lane.holders(end.side);
    if !holders.add(process::number()) {
        return slot.make_plain(Reason::Shared);
    }
    // Another holder may be between reading and counting what it read. The region's counts are right while that process
    // keeps them; the kernel's are taken over when there is no other holder.
    let is_shared = goes_on && holders.others(process::number()).next().is_some();
    // SAFETY: the program's descriptor, which it is in the middle of using.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    if let Ok(cookie) = rustix::net::sockopt::socket_cookie(socket) {
        set(slot, Counter::Cookie, cookie);
        slot.cookie.store(cookie, Ordering::Relaxed);
    }
    // It may have been changed by whoever had it before us.
    if let Ok(flags) = crate::raw::file_flags(fd) {
        slot.put(flag::NONBLOCKING, flags & libc::O_NONBLOCK != 0);
    }
    // Of a connection whose answers go by the lane nothing is acknowledged at once: what Nagle's algorithm holds back
    // until then would wait 40 ms.
    if crate::raw::option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY) == Ok(0) {
        slot.set(flag::COMBINING);
        crate::raw::set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
    }
    if is_shared {
        slot.set(flag::SHARED);
        slot.unset(flag::ADOPTING);
    } else {
        // Otherwise it is tried again with the next call.
        process::adopt_counts(slot, fd);
    }
    tell(slot, fd, Reason::Paired);
    crate::epoll::note_lane(slot);
    end.lane.set_state(end.side, EndState::Joined);
    if let Some(reason) = plain {
        slot.make_plain(reason);
    }
}

/// The place of a region in the table, which is mapped if it is not yet.
fn region(pairing: &Pairing) -> Option<usize> {
    use rustix::fd::AsFd;
    let known = |number: u64| NUMBERS.iter().position(|known| known.load(Ordering::Acquire) == number);
    if let Some(place) = known(pairing.region).filter(|place| !MAPPED[*place].load(Ordering::Acquire).is_null()) {
        return Some(place);
    }
    let place = MAPPED.iter().position(|mapped| mapped.load(Ordering::Acquire).is_null())?;
    let memory = claim::map(pairing.memory.as_fd()).ok()?;
    LaneRegion::adopt(&memory)?;
    NUMBERS[place].store(pairing.region, Ordering::Release);
    MAPPED[place].store(Box::into_raw(Box::new(memory)), Ordering::Release);
    Some(place)
}
