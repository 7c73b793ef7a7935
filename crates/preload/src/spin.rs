//! When to spin, and the thread's number.
//!
//! * At most as long as a wake-up takes: then sleeping would have been as good.
//! * Never when the other end last ran on this very CPU: it cannot answer while we spin. Where there is another CPU, one of
//!   the two steps aside; otherwise who waits gives way, again and again, until it has its answer.
//! * Never more spinners than CPUs that this process may use, less one; one where it may use only one, which the other end does
//!   not run on.
//! * Seldom where it has found nothing for a while.

use crate::table::Slot;
use highwire_mem::{current_cpu, pause, ticks};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

static SPINNERS: AtomicU32 = AtomicU32::new(0);
static SPINNERS_MAX: AtomicU32 = AtomicU32::new(1);
static MICROSECOND: AtomicU64 = AtomicU64::new(2500);
static BEGAN_TICKS: AtomicU64 = AtomicU64::new(0);
static BEGAN_NANOSECONDS: AtomicU64 = AtomicU64::new(0);

/// So long at most, in microseconds: what it takes to be woken, once for who spins and once for who would have to do it.
const BUDGET: u64 = 25;
const BUDGET_AFTER_SUCCESS: u64 = 50;
/// After so many spins in vain only every so many-th is made.
const VAIN: u32 = 4;
const VAIN_STEP: u32 = 8;
const LOOKS_PER_CLOCK: u32 = 32;

thread_local! {
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// At the beginning: the clock's rate is known when it is needed.
pub(crate) fn begin() {
    BEGAN_TICKS.store(ticks(), Ordering::Relaxed);
    BEGAN_NANOSECONDS.store(nanoseconds(), Ordering::Relaxed);
}

/// Of the monotonic clock, asked of the kernel.
pub(crate) fn nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Before the first lane is used: how fast the clock is, and how many may spin.
pub(crate) fn prepare() {
    let (ticks, time) = (
        ticks().wrapping_sub(BEGAN_TICKS.load(Ordering::Relaxed)),
        nanoseconds().wrapping_sub(BEGAN_NANOSECONDS.load(Ordering::Relaxed)),
    );
    if time > 100_000 {
        MICROSECOND.store((ticks.saturating_mul(1000) / time).clamp(100, 20_000), Ordering::Relaxed);
    }
    let cpus = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    SPINNERS_MAX.store(cpus.saturating_sub(1).max(1), Ordering::Relaxed);
    MAY_STEP.store(cpus > 1, Ordering::Relaxed);
}

/// Ticks of so many microseconds.
#[inline]
pub(crate) fn microseconds(count: u64) -> u64 {
    MICROSECOND.load(Ordering::Relaxed) * count
}

pub(crate) fn millisecond() -> u64 {
    microseconds(1000)
}

/// This thread's number.
#[inline]
pub(crate) fn thread() -> u32 {
    let known = THREAD.get();
    if known != 0 {
        return known;
    }
    let thread = crate::raw::thread();
    THREAD.set(thread);
    thread
}

/// After a fork it is another one.
pub(crate) fn forget_thread() {
    THREAD.set(0);
    SPINNERS.store(0, Ordering::Relaxed);
}

/// Whether this thread may look for what comes from an end that last ran on that CPU: it runs elsewhere, or it is worth to
/// give way to it.
pub(crate) fn may_spin(other: Option<u32>) -> bool {
    !is_here(other) || Giving::is_worth_it()
}

/// Whether an end that last ran on that CPU can only run when this thread does not.
fn is_here(other: Option<u32>) -> bool {
    other.is_some_and(|other| other == current_cpu() && !is_apart())
}

/// How giving way has gone: nobody's turn but the other end's may come before this thread's next. Where a third one works on
/// the CPU, it may take milliseconds, which who sleeps and is woken does not wait.
struct Giving;

impl Giving {
    #[inline]
    fn is_worth_it() -> bool {
        NOT_GIVING.load(Ordering::Relaxed) == 0
    }

    /// Gives way once. False if it was not worth it.
    fn once() -> bool {
        let begun = ticks();
        crate::raw::give_way();
        let long = ticks().wrapping_sub(begun) > microseconds(GIVEN_MOST);
        let (next, good) = (NOT_GIVING_NEXT.load(Ordering::Relaxed), GOOD.load(Ordering::Relaxed) + 1);
        if long {
            NOT_GIVING.store(next, Ordering::Relaxed);
            NOT_GIVING_NEXT.store((next * 2).min(NOT_GIVING_MOST), Ordering::Relaxed);
        } else if good >= next {
            NOT_GIVING_NEXT.store((next / 2).max(NOT_GIVING_LEAST), Ordering::Relaxed);
        }
        GOOD.store(if long || good >= next { 0 } else { good }, Ordering::Relaxed);
        !long
    }

    /// A receive goes by without it.
    fn pass() {
        let left = NOT_GIVING.load(Ordering::Relaxed);
        NOT_GIVING.store(left.saturating_sub(1), Ordering::Relaxed);
    }
}

/// Waits a little for an end that last ran on the CPU `other`.
pub(crate) fn pause_for(other: Option<u32>) {
    if is_here(other) {
        Giving::once();
    } else {
        pause();
    }
}

/// How often in a row it was worth it.
static GOOD: AtomicU32 = AtomicU32::new(0);
/// Receives for which nobody gives way, and how many it will be the next time.
static NOT_GIVING: AtomicU32 = AtomicU32::new(0);
static NOT_GIVING_NEXT: AtomicU32 = AtomicU32::new(NOT_GIVING_LEAST);
const NOT_GIVING_LEAST: u32 = 64;
const NOT_GIVING_MOST: u32 = 16384;
/// So long giving way may take, in microseconds.
const GIVEN_MOST: u64 = 200;
/// So often at most, one after the other.
const GIVEN_TIMES: u32 = 8;

/// Both ends run on one CPU, where neither can look while the other works: the kernel brings together who wakes each other,
/// and leaves them there. After some such receives this thread plans to step aside, when it next waits: by then it has
/// woken the other end, which is about to run here. For a while it then counts as being elsewhere, for itself and for the
/// other end, which looks in turn. True if it is planned, or was done just now.
pub(crate) fn plan_to_step_aside(slot: &Slot) -> bool {
    if !MAY_STEP.load(Ordering::Relaxed) {
        return false;
    }
    if is_apart() {
        return true;
    }
    let met = slot.met.fetch_add(1, Ordering::Relaxed);
    // Not both ends at once.
    if met < MEETINGS + crate::process::number() % MEETINGS {
        return false;
    }
    slot.met.store(0, Ordering::Relaxed);
    let (now, patience) = (ticks(), PATIENCE.load(Ordering::Relaxed));
    let since = now.wrapping_sub(STEPPED.load(Ordering::Relaxed));
    if crate::process::is_sandboxed() || since < millisecond() * patience {
        return false;
    }
    STEPPED.store(now, Ordering::Relaxed);
    // Who is brought back again and again gives in more and more.
    let soon = since < millisecond() * patience * 8;
    PATIENCE.store(if soon { (patience * 2).min(PATIENCE_MOST) } else { PATIENCE_LEAST }, Ordering::Relaxed);
    APART_UNTIL.store(now + millisecond() * APART, Ordering::Relaxed);
    PLANNED.store(true, Ordering::Relaxed);
    true
}

/// Whether the other end runs where this thread has to run, and neither stepping aside nor giving way is worth it. Asked once
/// for each receive.
#[inline]
pub(crate) fn is_stuck_with(other: Option<u32>) -> bool {
    if Giving::is_worth_it() {
        return false;
    }
    Giving::pass();
    !MAY_STEP.load(Ordering::Relaxed) && is_here(other)
}

/// Steps aside, if that was planned: for a moment this thread may not run here.
#[inline]
fn step_aside() {
    if PLANNED.load(Ordering::Relaxed) && PLANNED.swap(false, Ordering::Relaxed) {
        let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return };
        let mut others = allowed;
        others.unset(current_cpu() as usize);
        if others.count() > 0 && rustix::thread::sched_setaffinity(None, &others).is_ok() {
            let _ = rustix::thread::sched_setaffinity(None, &allowed);
        }
    }
}

/// In some sandboxes there is no clock.
fn is_apart() -> bool {
    let until = APART_UNTIL.load(Ordering::Relaxed);
    until != 0 && !crate::process::is_sandboxed() && ticks() < until
}

/// Where to say that this thread runs: nowhere in particular while it steps aside.
#[inline]
pub(crate) fn cpu_to_tell() -> Option<u32> {
    if is_apart() { None } else { Some(current_cpu()) }
}

static STEPPED: AtomicU64 = AtomicU64::new(0);
static PATIENCE: AtomicU64 = AtomicU64::new(PATIENCE_LEAST);
static APART_UNTIL: AtomicU64 = AtomicU64::new(0);
static PLANNED: AtomicBool = AtomicBool::new(false);
/// Whether there is another CPU to go to.
static MAY_STEP: AtomicBool = AtomicBool::new(false);
/// Milliseconds between two steps aside.
const PATIENCE_LEAST: u64 = 2;
const PATIENCE_MOST: u64 = 10_000;
/// Milliseconds for which one that stepped aside counts as being elsewhere.
const APART: u64 = 1;
/// Receives on one CPU with the sender before somebody steps aside.
const MEETINGS: u32 = 8;

/// What a spinner found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Something,
    Nothing,
}

/// Looks for what comes from an end that last ran on the CPU `other`, until something is found or the time is over, at most
/// `limit` nanoseconds if it is not negative. `beside` is done now and then, and may find something too.
pub(crate) fn spin(
    slot: &Slot,
    other: Option<u32>,
    limit: i64,
    mut look: impl FnMut() -> bool,
    mut beside: impl FnMut() -> bool,
) -> Found {
    let vain = slot.vain_spins.load(Ordering::Relaxed);
    if vain >= VAIN && !vain.is_multiple_of(VAIN_STEP) {
        slot.vain_spins.store(vain + 1, Ordering::Relaxed);
        return Found::Nothing;
    }
    let gives = is_here(other) && !plan_to_step_aside(slot);
    step_aside();
    if !gives && SPINNERS.fetch_add(1, Ordering::Relaxed) >= SPINNERS_MAX.load(Ordering::Relaxed) {
        SPINNERS.fetch_sub(1, Ordering::Relaxed);
        return Found::Nothing;
    }
    crate::counters::add(slot, highwire_lane::counters::Counter::Spins, 1);
    let mut budget = microseconds(if vain == 0 { BUDGET_AFTER_SUCCESS } else { BUDGET });
    if limit >= 0 {
        budget = budget.min(microseconds(limit as u64 / 1000 + 1));
    }
    let start = ticks();
    let mut asked = start;
    let mut given = 0;
    let found = 'spin: loop {
        for _ in 0..if gives { 1 } else { LOOKS_PER_CLOCK } {
            if look() {
                break 'spin Found::Something;
            }
            pause();
        }
        if gives {
            let worth = Giving::once();
            given += 1;
            if look() {
                break Found::Something;
            }
            if !worth || given == GIVEN_TIMES {
                break Found::Nothing;
            }
        }
        let now = ticks();
        if now.wrapping_sub(start) >= budget {
            break Found::Nothing;
        }
        if now.wrapping_sub(asked) >= microseconds(BESIDE) {
            if beside() {
                break Found::Something;
            }
            asked = ticks();
        }
    };
    if !gives {
        SPINNERS.fetch_sub(1, Ordering::Relaxed);
    }
    if found == Found::Something {
        slot.vain_spins.store(0, Ordering::Relaxed);
        crate::counters::add(slot, highwire_lane::counters::Counter::SpinsGood, 1);
    } else {
        slot.vain_spins.store(vain.saturating_add(1), Ordering::Relaxed);
    }
    found
}

/// How often what is beside the lane is looked at while spinning, in microseconds.
const BESIDE: u64 = 5;
