//! How long a packet and its acknowledgement take.

use std::time::Duration;

/// The round trip, estimated as RFC 9002 does (section 5).
#[derive(Clone, Debug)]
pub struct RoundTrip {
    smoothed: Option<Duration>,
    variation: Duration,
    least: Duration,
    latest: Duration,
}

impl RoundTrip {
    /// Before anything was measured.
    pub fn new() -> RoundTrip {
        RoundTrip { smoothed: None, variation: INITIAL / 2, least: Duration::MAX, latest: INITIAL }
    }

    /// A packet was acknowledged `sample` after it left; the peer says that it waited `delay` before
    /// it answered.
    pub fn update(&mut self, sample: Duration, delay: Duration) {
        self.latest = sample;
        self.least = self.least.min(sample);
        let Some(smoothed) = self.smoothed else {
            (self.smoothed, self.variation) = (Some(sample), sample / 2);
            return;
        };
        // A peer that overstates its delay cannot bring the estimate below what was really seen [W-45].
        let adjusted = if sample >= self.least + delay { sample - delay } else { sample };
        self.variation = (self.variation * 3 + smoothed.abs_diff(adjusted)) / 4;
        self.smoothed = Some((smoothed * 7 + adjusted) / 8);
    }

    /// The smoothed estimate.
    pub fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or(INITIAL)
    }

    /// The least that was seen; none was before the first acknowledgement.
    pub fn least(&self) -> Option<Duration> {
        self.smoothed.map(|_| self.least)
    }

    /// How long to wait for a sign of life of a packet before probing.
    pub fn probe_timeout(&self, delay_max: Duration) -> Duration {
        self.smoothed() + (self.variation * 4).max(GRANULARITY) + delay_max
    }

    /// A packet is lost if one sent so much later was acknowledged.
    pub fn loss_delay(&self) -> Duration {
        (self.latest.max(self.smoothed()) * 9 / 8).max(GRANULARITY)
    }
}

impl Default for RoundTrip {
    fn default() -> RoundTrip {
        RoundTrip::new()
    }
}

/// Assumed before anything is known.
const INITIAL: Duration = Duration::from_millis(100);
/// What timers and schedulers are good for.
const GRANULARITY: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn it_settles_on_what_it_sees() {
        let mut trip = RoundTrip::new();
        assert_eq!((trip.smoothed(), trip.least()), (INITIAL, None));
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
