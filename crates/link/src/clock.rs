//! Whose time a wrapper goes by.

use crate::Network;
use std::time::{Duration, Instant};

/// A source of time, counted from a start of its own.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine's, since this instant.
    Real(Instant),
    /// A simulated network's.
    Simulated(Network),
}

impl Clock {
    /// The machine's, from now on.
    pub fn real() -> Clock {
        Clock::Real(Instant::now())
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        match self {
            Clock::Real(start) => start.elapsed(),
            Clock::Simulated(network) => network.now(),
        }
    }
}
