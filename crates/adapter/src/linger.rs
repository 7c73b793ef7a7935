//! Whether to sleep at once in the middle of something large.
//!
//! While a long message arrives, the receiver is often done with one batch a moment before the next one comes. To
//! sleep and be woken takes longer than that moment, and more CPU time than to look again until it is over. Where
//! the sender needs this very CPU nothing comes in between: so it is tried, and left alone while it is in vain.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Duration;

/// What is known of the moments behind batches. Whoever sees less than there is loses a moment and nothing else.
#[derive(Debug)]
pub(crate) struct Linger {
    /// When a batch came last, in nanoseconds; 0 before.
    batch_at: AtomicU64,
    /// Somebody has lingered since.
    lingers: AtomicBool,
    /// How often it may be in vain.
    luck: AtomicU32,
    /// Batches since nobody lingers any more.
    unlucky: AtomicU32,
}

impl Linger {
    pub(crate) fn new() -> Linger {
        Linger {
            batch_at: AtomicU64::new(0),
            lingers: AtomicBool::new(false),
            luck: AtomicU32::new(LUCK_MAX),
            unlucky: AtomicU32::new(0),
        }
    }

    /// A batch has come, the last one at this time.
    pub(crate) fn note_batch(&self, at: Duration) {
        let at = at.as_nanos() as u64;
        if at == self.batch_at.load(Relaxed) {
            return;
        }
        self.batch_at.store(at, Relaxed);
        if self.lingers.swap(false, Relaxed) {
            self.luck.store((self.luck.load(Relaxed) + 2).min(LUCK_MAX), Relaxed);
        } else if self.luck.load(Relaxed) == 0 && self.unlucky.fetch_add(1, Relaxed).is_multiple_of(TRY_EVERY) {
            self.luck.store(1, Relaxed);
        }
    }

    /// True if whoever has nothing to do is to look again, and not to sleep yet.
    pub(crate) fn is_worth_it(&self, now: Duration) -> bool {
        let batch_at = self.batch_at.load(Relaxed);
        if batch_at == 0 {
            return false;
        }
        if (now.as_nanos() as u64).saturating_sub(batch_at) < LINGER.as_nanos() as u64 {
            let worth_it = self.luck.load(Relaxed) > 0;
            if worth_it {
                self.lingers.store(true, Relaxed);
            }
            return worth_it;
        }
        if self.lingers.swap(false, Relaxed) {
            self.luck.store(self.luck.load(Relaxed).saturating_sub(1), Relaxed);
        }
        false
    }
}

/// From the time at which a batch was received, what was done with it included; after it, less than a sleeper takes
/// to wake up.
const LINGER: Duration = Duration::from_micros(25);
const LUCK_MAX: u32 = 16;
/// How often it is tried again.
const TRY_EVERY: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    #[test]
    fn an_idle_port_sleeps_at_once() {
        let linger = Linger::new();
        assert!(!linger.is_worth_it(at(5)));
        linger.note_batch(at(10));
        assert!(linger.is_worth_it(at(20)));
        assert!(!linger.is_worth_it(at(10) + LINGER) && !linger.is_worth_it(at(1000)));
    }

    #[test]
    fn what_is_always_in_vain_is_left_alone_but_for_a_try() {
        let linger = Linger::new();
        let (mut lingered, mut now) = (0, 0);
        for _ in 0..10 * TRY_EVERY {
            now += 100;
            linger.note_batch(at(now));
            lingered += u32::from(linger.is_worth_it(at(now + 5)));
            linger.is_worth_it(at(now + 50));
        }
        assert!((LUCK_MAX..LUCK_MAX + 12).contains(&lingered), "{lingered}");
        // And taken up again when it is not.
        for _ in 0..10 * TRY_EVERY {
            now += 10;
            linger.note_batch(at(now));
            linger.is_worth_it(at(now + 5));
        }
        assert!(linger.is_worth_it(at(now + 5)) && linger.luck.load(Relaxed) == LUCK_MAX);
    }
}
