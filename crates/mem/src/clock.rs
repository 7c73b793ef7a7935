//! The cheapest clock there is: the CPU's own counter, where it is constant.

use std::sync::OnceLock;
use std::time::Instant;

/// A point in time of [`ticks`].
pub type Ticks = u64;

/// Now, in ticks.
#[inline(always)]
pub fn ticks() -> Ticks {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads a counter; available in user mode on every x86-64 Linux.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// Ticks in a second, measured once against the system's clock.
pub fn ticks_per_second() -> f64 {
    static RATE: OnceLock<f64> = OnceLock::new();
    *RATE.get_or_init(|| {
        let (start, first) = (Instant::now(), ticks());
        while start.elapsed().as_micros() < 2000 {
            std::hint::spin_loop();
        }
        (ticks() - first) as f64 / start.elapsed().as_secs_f64()
    })
}
