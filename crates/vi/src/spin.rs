//! When to spin and when to sleep.
//!
//! * At most as long as a wake-up was measured to take: then sleeping would have been as good.
//! * Never when the peer last ran on this very CPU: it cannot answer while we spin.
//! * Never with more spinners than allowed CPUs less one, counting affinity and quota.

use highwire_mem::{Sleep, Ticks, cpus_allowed, current_cpu, pause, ticks, ticks_per_second};
use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Threads of this process that spin now.
static SPINNERS: AtomicUsize = AtomicUsize::new(0);

/// Looks before the clock is read for the first time, one upon the other without easing the CPU:
/// most answers come within them, and a pause would delay each by half its length.
pub(crate) const FREE_LOOKS: u32 = 128;
const LOOKS_PER_CLOCK: u32 = 32;

#[derive(Debug)]
pub(crate) struct SpinRules {
    fixed: Option<Duration>,
    quota: usize,
}

impl SpinRules {
    pub(crate) fn new(fixed: Option<Duration>) -> SpinRules {
        SpinRules { fixed, quota: cpus_allowed() }
    }

    fn budget(&self) -> Duration {
        self.fixed.unwrap_or_else(wake_cost)
    }

    /// Spins until `look` finds something, the rules say stop, or the deadline is there.
    pub(crate) fn spin<T>(
        &self,
        deadline: Instant,
        beside: impl Fn(u32) -> bool,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        // Who is not to spin does not look either: to another host each look is a system call.
        let never = self.fixed == Some(Duration::ZERO);
        if never || beside(current_cpu()) { None } else { self.spin_by_the_clock(deadline, look) }
    }

    #[inline(never)]
    fn spin_by_the_clock<T>(&self, deadline: Instant, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        let _place = SpinPlace::take(self.cpus().saturating_sub(1))?;
        let left = deadline.saturating_duration_since(Instant::now());
        let budget = (self.budget().min(left).as_secs_f64() * ticks_per_second()) as Ticks;
        let start = ticks();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if let Some(found) = look() {
                    return Some(found);
                }
                pause();
            }
            if ticks().wrapping_sub(start) >= budget {
                return None;
            }
        }
    }

    fn cpus(&self) -> usize {
        allowed_here().min(self.quota)
    }
}

/// CPUs that this thread may run on. Asked of the kernel now and then: whoever waits for one chunk after the other would
/// ask all the time.
fn allowed_here() -> usize {
    thread_local!(static KNOWN: Cell<Option<(Ticks, usize)>> = const { Cell::new(None) });
    let now = ticks();
    match KNOWN.get() {
        Some((asked, allowed)) if ((now.wrapping_sub(asked)) as f64) < KNOWN_SECONDS * ticks_per_second() => allowed,
        _ => {
            let allowed = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize);
            KNOWN.set(Some((now, allowed)));
            allowed
        }
    }
}

/// So long the answer holds.
const KNOWN_SECONDS: f64 = 0.01;

struct SpinPlace;

impl SpinPlace {
    fn take(places: usize) -> Option<SpinPlace> {
        if SPINNERS.fetch_add(1, Ordering::Relaxed) < places {
            return Some(SpinPlace);
        }
        SPINNERS.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

impl Drop for SpinPlace {
    fn drop(&mut self) {
        SPINNERS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What waking a sleeper costs on this machine, measured once with two threads.
fn wake_cost() -> Duration {
    const ROUNDS: u32 = 16;
    const LEAST: Duration = Duration::from_micros(5);
    const MOST: Duration = Duration::from_micros(50);
    static COST: OnceLock<Duration> = OnceLock::new();
    *COST.get_or_init(|| {
        let (there, back, stop) = (Sleep::new(), Sleep::new(), AtomicBool::new(false));
        let wait = |word: &Sleep, seen: u32| {
            while word.count() == seen {
                word.sleep(seen, &[], Some(Duration::from_millis(100)));
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0.. {
                    wait(&there, round);
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    back.wake();
                }
            });
            let start = Instant::now();
            for round in 0..ROUNDS {
                there.wake();
                wait(&back, round);
            }
            // Two wake-ups a round.
            let cost = start.elapsed() / (2 * ROUNDS);
            stop.store(true, Ordering::SeqCst);
            there.wake();
            cost.clamp(LEAST, MOST)
        })
    })
}
