//! Pulses of a burst, recorded on both sides: what the first paper's figure 3 is drawn from.

use serde::{Deserialize, Serialize};

/// One copy: part of a message into the payload area, or out of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stripe {
    /// Number of the message in the burst.
    pub message: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// When the copy began, in nanoseconds after the first one of the trace.
    pub started_ns: f64,
    /// When it ended.
    pub ended_ns: f64,
}

/// The pulses of one burst of messages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// Bytes of each message.
    pub size: u64,
    /// The sender's copies into the payload area.
    pub copied_in: Vec<Stripe>,
    /// The receiver's copies out of it.
    pub copied_out: Vec<Stripe>,
}

/// A recorded pulse in the clock that both processes share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pulse {
    pub(crate) message: u64,
    pub(crate) bytes: u64,
    pub(crate) started: u64,
    pub(crate) ended: u64,
}

impl Trace {
    /// Puts both sides on one time line. Each side numbers its messages by itself, so both are
    /// counted from their first.
    pub(crate) fn of(size: u64, copied_in: &[Pulse], copied_out: &[Pulse], ticks_per_second: f64) -> Trace {
        let start = copied_in.iter().chain(copied_out).map(|pulse| pulse.started).min().unwrap_or(0);
        let nanoseconds = |ticks: u64| ticks.saturating_sub(start) as f64 * 1e9 / ticks_per_second;
        let side = |pulses: &[Pulse]| -> Vec<Stripe> {
            let first = pulses.iter().map(|pulse| pulse.message).min().unwrap_or(0);
            pulses
                .iter()
                .map(|pulse| Stripe {
                    message: pulse.message - first,
                    bytes: pulse.bytes,
                    started_ns: nanoseconds(pulse.started),
                    ended_ns: nanoseconds(pulse.ended),
                })
                .collect()
        };
        Trace { size, copied_in: side(copied_in), copied_out: side(copied_out) }
    }

    /// When the last copy ended.
    pub(crate) fn end_ns(&self) -> f64 {
        self.copied_in.iter().chain(&self.copied_out).map(|stripe| stripe.ended_ns).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_share_a_time_line_that_begins_with_the_first_copy() {
        let pulse = |message, started, ended| Pulse { message, bytes: 4096, started, ended };
        let sender = [pulse(70, 1000, 1200), pulse(71, 1200, 1600)];
        let receiver = [pulse(3, 1100, 1300), pulse(4, 1600, 2000)];
        let trace = Trace::of(4096, &sender, &receiver, 2e9);
        assert_eq!(trace.copied_in[0], Stripe { message: 0, bytes: 4096, started_ns: 0.0, ended_ns: 100.0 });
        assert_eq!(trace.copied_out[1], Stripe { message: 1, bytes: 4096, started_ns: 300.0, ended_ns: 500.0 });
        assert_eq!(trace.end_ns(), 500.0);
        assert_eq!(Trace::of(1, &[], &[], 1e9).end_ns(), 0.0);
    }
}
