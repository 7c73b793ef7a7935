//! How long a packet and its acknowledgement take.

use std::time::Duration;

/// The round trip, estimated as RFC 9002 does (section 5).
#[derive(Clone, Debug)]
pub struct RoundTrip {
    /// Nanoseconds, all of them: they are reckoned with for each packet.
    smoothed: u64,
    variation: u64,
    least: u64,
    latest: u64,
    measured: bool,
}

impl RoundTrip {
    /// Before anything was measured.
    pub fn new() -> RoundTrip {
        RoundTrip {
            smoothed: INITIAL_NS,
            variation: INITIAL_NS / 2,
            least: u64::MAX,
            latest: INITIAL_NS,
            measured: false,
        }
    }

    /// A packet was acknowledged `sample` after it left; the peer says that it waited `delay` before
    /// it answered.
    pub fn update(&mut self, sample: Duration, delay: Duration) {
        let (sample, delay) = (nanoseconds(sample), nanoseconds(delay));
        self.latest = sample;
        self.least = self.least.min(sample);
        if !self.measured {
            (self.smoothed, self.variation, self.measured) = (sample, sample / 2, true);
            return;
        }
        // A peer that overstates its delay cannot bring the estimate below what was really seen [W-45].
        let adjusted = if sample >= self.least.saturating_add(delay) { sample - delay } else { sample };
        self.variation = (self.variation * 3 + self.smoothed.abs_diff(adjusted)) / 4;
        self.smoothed = (self.smoothed * 7 + adjusted) / 8;
    }

    /// The smoothed estimate.
    pub fn smoothed(&self) -> Duration {
        Duration::from_nanos(self.smoothed)
    }

    /// The least that was seen; none was before the first acknowledgement.
    pub fn least(&self) -> Option<Duration> {
        self.measured.then_some(Duration::from_nanos(self.least))
    }

    /// How long to wait for a sign of life of a packet before probing.
    pub fn probe_timeout(&self, delay_max: Duration) -> Duration {
        Duration::from_nanos(self.smoothed + (self.variation * 4).max(GRANULARITY_NS)) + delay_max
    }

    /// A packet is lost if one sent so much later was acknowledged.
    pub fn loss_delay(&self) -> Duration {
        Duration::from_nanos((self.latest.max(self.smoothed) * 9 / 8).max(GRANULARITY_NS))
    }
}

impl Default for RoundTrip {
    fn default() -> RoundTrip {
        RoundTrip::new()
    }
}

/// At most a decade, so that a few of them can be added.
fn nanoseconds(time: Duration) -> u64 {
    time.as_secs().min(DECADE_SECONDS) * 1_000_000_000 + u64::from(time.subsec_nanos())
}

/// Assumed before anything is known.
const INITIAL_NS: u64 = 100_000_000;
/// What timers and schedulers are good for.
const GRANULARITY_NS: u64 = 1_000_000;
const DECADE_SECONDS: u64 = 10 * 365 * 24 * 3600;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn it_settles_on_what_it_sees() {
        let mut trip = RoundTrip::new();
        assert_eq!((trip.smoothed(), trip.least()), (Duration::from_nanos(INITIAL_NS), None));
        (0..100).for_each(|_| trip.update(10 * MS, Duration::ZERO));
        assert!(trip.smoothed().abs_diff(10 * MS) < MS && trip.probe_timeout(MS) < 13 * MS, "{trip:?}");
        (0..100).for_each(|_| trip.update(30 * MS, Duration::ZERO));
        assert!(trip.smoothed().abs_diff(30 * MS) < MS, "{trip:?}");
        assert_eq!(trip.least(), Some(10 * MS));
    }

    #[test]
    fn a_peer_that_overstates_its_delay_gains_nothing() {
        let mut trip = RoundTrip::new();
        trip.update(10 * MS, Duration::ZERO);
        (0..100).for_each(|_| trip.update(12 * MS, 1000 * MS));
        assert!(trip.smoothed() >= 10 * MS, "{trip:?}");
    }

    #[test]
    fn an_honest_delay_is_taken_off() {
        let mut trip = RoundTrip::new();
        trip.update(10 * MS, Duration::ZERO);
        (0..100).for_each(|_| trip.update(35 * MS, 25 * MS));
        assert!(trip.smoothed() < 11 * MS, "{trip:?}");
    }
}
