//! Adaptive pipelining: one policy for every hop that moves data from a source to a sink.
//!
//! Trapeze's rule: *when the sink is idle, give it everything buffered, provided that is at least
//! `minpulse`; when it is busy, let more gather.* Light traffic then moves in small pulses (low
//! latency), heavy traffic in large ones (little overhead per byte), with nothing to tune. The way
//! in is [`Pulse`].
#![forbid(unsafe_code)]

/// How messages are cut into pulses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Pulses {
    /// By the rule above.
    #[default]
    Adaptive,
    /// In pieces of this many bytes, whatever the sink does.
    Fixed(usize),
    /// Each message in one piece: store and forward.
    Whole,
}

/// The state of one hop. It holds no data: its owner tells it what is buffered and what the sink
/// does, and is told when to let go.
///
/// ```
/// use highwire_pulse::{Pulse, Pulses};
/// let pulse = Pulse::new(Pulses::Adaptive, 4096);
/// assert!(pulse.release(4096, true, true));   // the sink is idle and a pulse is there
/// assert!(!pulse.release(1024, true, true));  // too little yet
/// assert!(!pulse.release(65536, true, false)); // the sink is busy: let more gather
/// assert!(pulse.release(10, false, false));   // the end of the message goes, however small
/// assert_eq!(pulse.step(1 << 20, 32768), 32768); // gathering: look again after as much as there is
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Pulse {
    policy: Pulses,
    minpulse: usize,
}

impl Pulse {
    /// A hop under `policy`; `minpulse` is the least that is worth a transfer of its own.
    pub fn new(policy: Pulses, minpulse: usize) -> Pulse {
        Pulse { policy, minpulse: minpulse.max(1) }
    }

    /// The policy.
    pub fn policy(&self) -> Pulses {
        self.policy
    }

    /// How many bytes to bring in before asking again, of `remaining`, when so many are `buffered`.
    ///
    /// As long as the sink is busy each step brings as much as all before it: the longer it takes,
    /// the less often it is looked at, and long copies are the fast ones.
    #[inline]
    pub fn step(&self, remaining: usize, buffered: usize) -> usize {
        match self.policy {
            Pulses::Adaptive => buffered.clamp(self.minpulse, STEP_BYTES_MAX.max(self.minpulse)).min(remaining),
            Pulses::Fixed(bytes) => bytes.clamp(1, remaining.max(1)),
            Pulses::Whole => remaining,
        }
    }

    /// The hop for one message of `total` bytes: a pulse is at least a quarter of it. What each pulse
    /// costs beside its bytes is soon more than what further cutting could save, and more so the
    /// farther the sink is.
    ///
    /// One of many messages, sent one after the other, is not cut at all: the sink has those before it.
    #[inline]
    #[must_use]
    pub fn for_message(&self, total: usize, one_of_many: bool) -> Pulse {
        let policy = if one_of_many && self.policy == Pulses::Adaptive { Pulses::Whole } else { self.policy };
        Pulse { policy, minpulse: self.minpulse.max(total / PULSES_OF_A_MESSAGE) }
    }

    /// True if a message of `total` bytes is not worth cutting at all.
    #[inline]
    pub fn is_one(&self, total: usize) -> bool {
        match self.policy {
            Pulses::Adaptive => total < 2 * self.minpulse,
            Pulses::Fixed(bytes) => total <= bytes,
            Pulses::Whole => true,
        }
    }

    /// Should what is `buffered` go to the sink now? `more` says that the message goes on.
    #[inline]
    pub fn release(&self, buffered: usize, more: bool, sink_idle: bool) -> bool {
        match self.policy {
            _ if !more => true,
            Pulses::Adaptive => sink_idle && buffered >= self.minpulse,
            Pulses::Fixed(bytes) => buffered >= bytes,
            Pulses::Whole => false,
        }
    }
}

const PULSES_OF_A_MESSAGE: usize = 4;

/// However busy the sink, it is looked at after so many bytes.
const STEP_BYTES_MAX: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// Drives a message through a hop whose sink takes `sink_steps` steps of the source for each
    /// byte, and tells the pulses.
    fn pulses(policy: Pulses, total: usize, source_ns_per_kib: u64, sink_ns_per_kib: u64) -> Vec<usize> {
        let pulse = Pulse::new(policy, 8192);
        let (mut now, mut sink_free_at, mut sent, mut buffered) = (0, 0, 0, 0);
        let mut out = Vec::new();
        while sent < total {
            let step = pulse.step(total - sent, buffered);
            assert!(step > 0 && step <= total - sent);
            now += step as u64 * source_ns_per_kib / 1024;
            sent += step;
            buffered += step;
            if pulse.release(buffered, sent < total, sink_free_at <= now) {
                sink_free_at = now.max(sink_free_at) + buffered as u64 * sink_ns_per_kib / 1024;
                out.push(std::mem::take(&mut buffered));
            }
        }
        assert_eq!((out.iter().sum::<usize>(), buffered), (total, 0), "everything goes, once");
        out
    }

    #[test]
    fn a_fast_sink_gets_small_pulses() {
        let sizes = pulses(Pulses::Adaptive, 1 << 20, 30, 10);
        assert!(sizes.iter().all(|size| *size == 8192), "{sizes:?}");
    }

    #[test]
    fn a_slow_sink_gets_few_large_pulses_after_the_first() {
        let sizes = pulses(Pulses::Adaptive, 1 << 20, 30, 300);
        assert_eq!(sizes[0], 8192);
        assert!(sizes.len() < 10 && sizes.iter().skip(2).any(|size| *size > 100_000), "{sizes:?}");
    }

    #[test]
    fn a_long_message_is_cut_into_few_pulses() {
        let pulse = Pulse::new(Pulses::Adaptive, 8192).for_message(1 << 20, false);
        assert!(!pulse.release(200_000, true, true) && pulse.release(262_144, true, true));
        assert!(Pulse::new(Pulses::Fixed(1408), 8192).for_message(1 << 20, true).release(1408, true, true));
    }

    #[test]
    fn one_of_many_messages_is_not_cut() {
        let pulse = Pulse::new(Pulses::Adaptive, 8192).for_message(1 << 20, true);
        assert!(pulse.is_one(1 << 20) && !pulse.release(524_288, true, true));
    }

    #[test]
    fn the_other_policies_do_what_they_say() {
        assert_eq!(pulses(Pulses::Whole, 100_000, 30, 300), [100_000]);
        let fixed = pulses(Pulses::Fixed(1408), 8192, 30, 300);
        assert_eq!(fixed, [1408, 1408, 1408, 1408, 1408, 1152]);
    }
}
