//! The contestants: ways for two processes on one host to exchange messages.
//!
//! Each is a [`Transport`], of which both processes have one end. A trial runs [`Transport::ping`]
//! against [`Transport::pong`], or [`Transport::pour`] against [`Transport::drain`]; the driver
//! takes the time around a whole burst, so that no clock is read between two messages.

mod ring;
mod sockets;
pub(crate) mod vi;

use crate::BenchError;
use crate::pair::{Link, Role};
use crate::trace::Pulse;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Somebody who takes part in a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contestant {
    /// A spinning ring of slots with a payload area and nothing above it: the floor.
    RawRing,
    /// Virtual interfaces, the library choosing how payloads travel.
    Vi,
    /// Virtual interfaces, payloads copied through the payload area.
    ViBuffered,
    /// Virtual interfaces, payloads read where they are; each message is another frame.
    ViReferenced,
    /// Loopback TCP, both ends looking without pause.
    TcpSpin,
    /// Loopback TCP, both ends asleep while there is nothing.
    TcpBlock,
    /// A Unix stream socket, both ends looking without pause.
    UnixSpin,
    /// A Unix stream socket, both ends asleep while there is nothing.
    UnixBlock,
    /// Buffered virtual interfaces, large messages in pulses of 1408 bytes.
    #[serde(rename = "fixed-1408")]
    Fixed1408,
    /// Buffered virtual interfaces, large messages in one piece.
    StoreAndForward,
    /// Buffered virtual interfaces, pulses as the policy finds them.
    Adaptive,
}

impl Contestant {
    /// Everybody, in the order of reports.
    pub const ALL: [Contestant; 11] = [
        Contestant::RawRing,
        Contestant::Vi,
        Contestant::ViBuffered,
        Contestant::ViReferenced,
        Contestant::TcpSpin,
        Contestant::TcpBlock,
        Contestant::UnixSpin,
        Contestant::UnixBlock,
        Contestant::Fixed1408,
        Contestant::StoreAndForward,
        Contestant::Adaptive,
    ];

    /// Its name, as in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Contestant::RawRing => "raw-ring",
            Contestant::Vi => "vi",
            Contestant::ViBuffered => "vi-buffered",
            Contestant::ViReferenced => "vi-referenced",
            Contestant::TcpSpin => "tcp-spin",
            Contestant::TcpBlock => "tcp-block",
            Contestant::UnixSpin => "unix-spin",
            Contestant::UnixBlock => "unix-block",
            Contestant::Fixed1408 => "fixed-1408",
            Contestant::StoreAndForward => "store-and-forward",
            Contestant::Adaptive => "adaptive",
        }
    }

    /// True if it can only spin, which two processes on one CPU must not.
    pub fn only_spins(self) -> bool {
        matches!(self, Contestant::RawRing | Contestant::TcpSpin | Contestant::UnixSpin)
    }

    /// What it may wait for its CPU in a trial of so many nanoseconds before something else must have
    /// run: whoever sleeps waits a little each time it is woken.
    pub(crate) fn lost_ns_max(self, nanoseconds: f64) -> f64 {
        let part = if matches!(self, Contestant::TcpBlock | Contestant::UnixBlock) { 0.3 } else { 0.02 };
        part * nanoseconds + 5_000.0
    }

    /// This process's end of it, for messages up to `size_max`. Both sides call this in the same
    /// order.
    pub(crate) fn meet(self, link: &mut Link, size_max: usize) -> Result<Box<dyn Transport>, BenchError> {
        match self {
            Contestant::RawRing => ring::RawRing::meet(link),
            Contestant::TcpSpin => sockets::tcp(link, true),
            Contestant::TcpBlock => sockets::tcp(link, false),
            Contestant::UnixSpin => sockets::unix(link, true),
            Contestant::UnixBlock => sockets::unix(link, false),
            Contestant::Vi
            | Contestant::ViBuffered
            | Contestant::ViReferenced
            | Contestant::Fixed1408
            | Contestant::StoreAndForward
            | Contestant::Adaptive => vi::meet(self, link, size_max),
        }
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no contestant has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no contestant {0:?}; there are {all}", all = Contestant::ALL.map(Contestant::name).join(", "))]
pub struct UnknownContestant(String);

impl FromStr for Contestant {
    type Err = UnknownContestant;

    fn from_str(name: &str) -> Result<Contestant, UnknownContestant> {
        Contestant::ALL
            .into_iter()
            .find(|contestant| contestant.name() == name)
            .ok_or_else(|| UnknownContestant(name.to_owned()))
    }
}

/// What is done in a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Exercise {
    /// One message there, one back.
    PingPong,
    /// Messages one way, then one short acknowledgement.
    Stream,
}

/// One end of a contestant. What every message has in common: it is data that the receiver does not
/// have in its cache yet, and it is copied to where the receiver wants it; where a contestant does
/// otherwise, its documentation says so.
pub(crate) trait Transport {
    /// Sends `count` messages of `size` bytes, each after the answer to the one before.
    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError>;

    /// Answers `count` messages with as many bytes.
    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError>;

    /// Sends `count` messages of `size` bytes; returns when the other side has them all.
    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError>;

    /// Receives what [`Transport::pour`] sends.
    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError>;

    /// Makes ready for `count` messages of `size` bytes that this side will send, outside of what is
    /// timed.
    fn prepare(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        Ok(())
    }

    /// Starts recording pulses, up to `capacity` of them, where there are any.
    fn record_pulses(&mut self, _capacity: usize) {}

    /// The pulses recorded since: the driver's of what it sent, the peer's of what it received.
    fn take_pulses(&mut self, _role: Role) -> Vec<Pulse> {
        Vec::new()
    }

    /// Makes ready for an exercise.
    fn prepare_for(&mut self, role: Role, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        let sends = role == Role::Driver || exercise == Exercise::PingPong;
        if sends { self.prepare(size, count) } else { Ok(()) }
    }

    /// The driver's part of an exercise.
    fn lead(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        match exercise {
            Exercise::PingPong => self.ping(size, count),
            Exercise::Stream => self.pour(size, count),
        }
    }

    /// The peer's part.
    fn follow(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        match exercise {
            Exercise::PingPong => self.pong(size, count),
            Exercise::Stream => self.drain(size, count),
        }
    }
}

/// Ordinary memory of the application's, from and to which messages are copied.
pub(crate) struct Ordinary {
    bytes: Vec<u8>,
    skip: usize,
}

impl Ordinary {
    pub(crate) fn new() -> Ordinary {
        Ordinary { bytes: Vec::new(), skip: 0 }
    }

    /// At least `size` bytes, beginning on a page as an application's buffers would: where a copy
    /// begins changes how fast it is.
    #[inline(always)]
    pub(crate) fn of(&mut self, size: usize) -> &mut [u8] {
        if self.bytes.len() < size + PAGE {
            self.bytes = vec![1; size + PAGE];
            self.skip = self.bytes.as_ptr().align_offset(PAGE).min(PAGE);
        }
        &mut self.bytes[self.skip..self.skip + size]
    }
}

const PAGE: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_strangers_are_told_who_there_is() {
        for contestant in Contestant::ALL {
            assert_eq!(contestant.name().parse(), Ok(contestant));
            assert_eq!(serde_json::to_value(contestant).unwrap(), contestant.name());
        }
        let refused = "vy".parse::<Contestant>().unwrap_err().to_string();
        assert!(refused.contains("\"vy\"") && refused.contains("vi-referenced"), "{refused}");
    }
}
