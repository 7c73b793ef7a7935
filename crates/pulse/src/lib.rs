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
/// ```
#[derive(Clone, Debug)]
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

    /// How many bytes to bring in before asking again, of `remaining`.
    #[inline]
    pub fn step(&self, remaining: usize) -> usize {
        match self.policy {
            Pulses::Adaptive => self.minpulse.min(remaining),
            Pulses::Fixed(bytes) => bytes.clamp(1, remaining.max(1)),
            Pulses::Whole => remaining,
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
