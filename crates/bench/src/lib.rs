//! The contestants and the harness behind `highwire bench`.
//!
//! The way in is [`run`]: it starts a second process, lets every contestant meet its other end, and
//! measures them in turn, round by round, until the time is used up. The second process is the same
//! executable, which calls [`serve_peer`] when its first argument is [`PEER_COMMAND`].
//!
//! What is honest about the figures, and why they can be compared:
//!
//! * a trial is a short burst, and stands between two probes of the time that a cache line takes
//!   from one CPU to the other; all rows of a report are from one such state ([`State`]);
//! * a contestant is judged by its ratio to `raw-ring` in the same round ([`Row::of_floor`]);
//! * everybody runs in every round, in an order drawn anew, and rows that are lost are kept.
#![forbid(unsafe_code)]

mod connections;
mod contest;
mod demo;
mod error;
mod machine;
mod outsiders;
mod pair;
mod pipelining;
mod plot;
mod progress;
mod report;
mod rounds;
mod stats;
mod trace;
mod transports;

pub use demo::{Demo, DemoRow, demo};
pub use error::BenchError;
pub use highwire_mem::kernel_check;
pub use machine::Machine;
pub use outsiders::{OUTSIDER_COMMAND, OUTSIDER_SIZES, become_outsider};
pub use pair::{PEER_COMMAND, State};
pub use report::Report;
pub use stats::{FLOOR, Measure, Rounds, Row};
pub use trace::{Stripe, Trace};
pub use transports::{Contestant, UnknownContestant};

use std::time::Instant;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bench {
    /// One-way latency by size.
    Latency,
    /// Bandwidth and messages per second by size.
    Bandwidth,
    /// Latency and bandwidth of three ways to cut large messages.
    Pipelining,
    /// Memory and latency of many virtual interfaces between two processes.
    Connections,
}

impl Bench {
    /// Its name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Bench::Latency => "latency",
            Bench::Bandwidth => "bandwidth",
            Bench::Pipelining => "pipelining",
            Bench::Connections => "connections",
        }
    }

    /// The sizes measured where none are chosen: bytes, or numbers of connections.
    pub fn sizes(self) -> &'static [usize] {
        match self {
            Bench::Latency | Bench::Bandwidth => &[4, 64, 240, 1024, 4096, 8192, 32768, 65536, 262_144, 1_048_576],
            Bench::Pipelining => &[8192, 65536, 1_048_576],
            Bench::Connections => &[1, 100, 1000],
        }
    }

    /// The largest size that may be chosen.
    pub fn size_max(self) -> usize {
        match self {
            Bench::Connections => 4000,
            _ => 16 << 20,
        }
    }

    /// Who takes part where nobody is chosen.
    pub fn contestants(self) -> &'static [Contestant] {
        match self {
            Bench::Latency | Bench::Bandwidth => &Contestant::ALL[..8],
            Bench::Pipelining => {
                &[Contestant::RawRing, Contestant::Fixed1408, Contestant::StoreAndForward, Contestant::Adaptive]
            }
            Bench::Connections => &[Contestant::Vi],
        }
    }
}

/// How a benchmark is to be run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which.
    pub bench: Bench,
    /// Seconds for the whole run, set-up and all.
    pub seconds: f64,
    /// Sizes; none for the usual ones.
    pub sizes: Vec<usize>,
    /// Contestants; none for the usual ones.
    pub contestants: Vec<Contestant>,
    /// Measure in this state only, and wait for it.
    pub state: Option<State>,
    /// Both processes on one CPU.
    pub one_core: bool,
    /// Other libraries too.
    pub peers: bool,
    /// Show a progress bar, where there is a terminal.
    pub progress: bool,
    /// The command line, for the report.
    pub command: String,
}

impl Options {
    /// A benchmark with the usual choices.
    pub fn new(bench: Bench) -> Options {
        Options {
            bench,
            seconds: 20.0,
            sizes: Vec::new(),
            contestants: Vec::new(),
            state: None,
            one_core: false,
            peers: false,
            progress: false,
            command: format!("highwire bench {}", bench.name()),
        }
    }

    pub(crate) fn sizes_or_default(&self) -> Vec<usize> {
        let mut sizes = if self.sizes.is_empty() { self.bench.sizes().to_vec() } else { self.sizes.clone() };
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    pub(crate) fn contestants_or_default(&self) -> Vec<Contestant> {
        let mut chosen =
            if self.contestants.is_empty() { self.bench.contestants().to_vec() } else { self.contestants.clone() };
        chosen.sort();
        chosen.dedup();
        chosen
    }
}

/// Runs a benchmark.
pub fn run(options: &Options) -> Result<Report, BenchError> {
    let began = Instant::now();
    match options.bench {
        Bench::Connections => connections::run(options, began),
        Bench::Latency | Bench::Bandwidth | Bench::Pipelining => rounds::run(options, began),
    }
}

/// What a process does whose first argument is [`PEER_COMMAND`]: it takes part in the measurements
/// of process `parent`, which started it, and ends with it.
pub fn serve_peer(parent: u32) -> Result<(), BenchError> {
    let mut link = pair::join(parent)?;
    let served = contest::serve(&mut link);
    if let Err(error) = &served {
        // The driver only sees that nothing comes any more; this tells it why.
        let _ = link.tell(&pair::Complaint { complaint: error.to_string() }, &[]);
    }
    served
}
