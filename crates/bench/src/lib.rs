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

mod apps;
mod connections;
mod contest;
mod demo;
mod error;
mod folder;
mod landing;
mod lane;
mod launch;
mod machine;
mod netmem;
mod network;
mod outsiders;
mod pair;
mod pipelining;
mod plot;
mod progress;
mod report;
mod rounds;
mod rpc;
mod sockets;
mod stats;
mod trace;
mod transports;
mod wire;

pub use demo::{Demo, DemoRow, demo};
pub use error::BenchError;
pub use highwire_mem::kernel_check;
pub use launch::{OUTSIDER_COMMAND, become_outsider};
pub use machine::Machine;
pub use network::{NETWORK_COMMAND, keep_network};
pub use outsiders::OUTSIDER_SIZES;
pub use pair::{PEER_COMMAND, State};
pub use report::Report;
pub use stats::{Cost, FLOOR, Measure, Rounds, Row};
pub use trace::{Stripe, Trace};
pub use transports::{Contestant, UnknownContestant};

use std::path::PathBuf;
use std::time::Instant;
use transports::Exercise;

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
    /// Latency, bandwidth and CPU time between two network namespaces.
    Wire,
    /// What receiving payloads where they are expected gains, and what guessing wrong costs.
    Landing,
    /// Latency, bandwidth and file transfers of stream sockets, and what each step on the way to them gains.
    Sockets,
    /// Latency and bandwidth of a plain C program under `highwire run`, beside the same program without.
    Lane,
    /// Requests, bytes, latency and CPU time of servers and clients that know nothing of Highwire, with and without
    /// `highwire run`.
    Apps,
    /// Remote procedure calls, beside other servers and libraries, and beside the messages that carry them.
    Rpc,
    /// Memory of other nodes, read page by page, beside a mapped file.
    Netmem,
}

impl Bench {
    /// Its name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Bench::Latency => "latency",
            Bench::Bandwidth => "bandwidth",
            Bench::Pipelining => "pipelining",
            Bench::Connections => "connections",
            Bench::Wire => "wire",
            Bench::Landing => "landing",
            Bench::Sockets => "sockets",
            Bench::Lane => "lane",
            Bench::Apps => "apps",
            Bench::Rpc => "rpc",
            Bench::Netmem => "netmem",
        }
    }

    /// The sizes measured where none are chosen: bytes, or numbers of connections.
    fn sizes(self, exercise: Exercise) -> &'static [usize] {
        match self {
            Bench::Wire => match exercise {
                Exercise::PingPong => &[4, 64, 1024, 8192, 65536],
                Exercise::Stream => &[1024, 8192, 65536, 1_048_576],
                Exercise::StreamAsleep => ASLEEP_SIZES,
                _ => &[],
            },
            Bench::Landing => match exercise {
                Exercise::Stream => &[1 << 20],
                Exercise::StreamAsleep => &[1 << 20, 2 << 20, 64 << 20],
                Exercise::Interfered => &[0, 100, 10_000],
                _ => &[],
            },
            Bench::Sockets => match exercise {
                Exercise::PingPong => &[4, 64, 256, 1024, 2048, 4096, 8192, 32768],
                Exercise::Stream => &[4, 64, 256, 1024, 2048, 4096, 8192, 32768, 1_048_576],
                Exercise::File => self.file_sizes(),
                _ => &[],
            },
            Bench::Lane => match exercise {
                Exercise::PingPong => &[4, 64, 1024, 8192, 32768],
                _ => &[64, 1024, 8192, 65536, 1_048_576],
            },
            Bench::Rpc => match exercise {
                Exercise::Call => &[0],
                Exercise::Fetch => &[8192, 1 << 20],
                Exercise::FetchMany => &[1 << 20],
                Exercise::Calls => &[1, 2, 4, 8, 16, 32, 64, 128, 256],
                _ => &[],
            },
            Bench::Netmem => match exercise {
                Exercise::RandomPages => &[netmem::PAGE_BYTES],
                _ => &[1 << 20],
            },
            // Each of its measures has its own.
            Bench::Apps => &[],
            Bench::Latency | Bench::Bandwidth => &[4, 64, 240, 1024, 4096, 8192, 32768, 65536, 262_144, 1_048_576],
            Bench::Pipelining => &[8192, 65536, 1_048_576],
            Bench::Connections => &[1, 100, 1000],
        }
    }

    /// Every size that may be chosen is a multiple of this.
    pub fn size_step(self) -> usize {
        match self {
            Bench::Landing => transports::landing::MESSAGE_BYTES,
            Bench::Netmem => netmem::PAGE_BYTES,
            _ => 1,
        }
    }

    /// The largest size that may be chosen.
    pub fn size_max(self) -> usize {
        match self {
            Bench::Connections => 4000,
            Bench::Wire => 4 << 20,
            Bench::Landing => 256 << 20,
            Bench::Apps => 1 << 30,
            // More would be too much for memcached.
            Bench::Rpc => 1 << 20,
            // The smallest region is one such piece.
            Bench::Netmem => 1 << 20,
            _ => 16 << 20,
        }
    }

    /// The sizes that are those of a file, and may be larger.
    pub fn file_sizes(self) -> &'static [usize] {
        match self {
            // The paper's two, and one that no cache holds.
            Bench::Sockets => &[13_827_767, 65_257_948, 1 << 30],
            _ => &[],
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
            Bench::Wire => WIRE,
            Bench::Landing => LANDING,
            Bench::Sockets => SOCKETS,
            Bench::Lane => LANE,
            Bench::Apps => APPS,
            Bench::Rpc => &RPC[..8],
            Bench::Netmem => NETMEM,
        }
    }

    /// Who can take part.
    pub fn candidates(self) -> &'static [Contestant] {
        match self {
            Bench::Wire => WIRE,
            Bench::Landing => LANDING,
            Bench::Sockets => SOCKETS,
            Bench::Lane => LANE,
            Bench::Apps => APPS,
            Bench::Rpc => RPC,
            Bench::Netmem => NETMEM,
            _ => &Contestant::ALL[..11],
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
    /// For [`Bench::Apps`], [`Bench::Rpc`] and [`Bench::Netmem`]: what to measure; none for everything.
    pub measures: Vec<Measure>,
    /// For [`Bench::Rpc`]: how many calls are under way at a time; none for the usual numbers.
    pub outstanding: Vec<usize>,
    /// For [`Bench::Netmem`]: bytes of the region that is read, a multiple of the pieces it is read in.
    pub region_bytes: usize,
    /// For [`Bench::Netmem`]: bytes of it that its reader may keep in memory of its own.
    pub budget_bytes: usize,
    /// For [`Bench::Netmem`]: where files are made; nothing for where this process is.
    pub directory: Option<PathBuf>,
    /// Measure in this state only, and wait for it.
    pub state: Option<State>,
    /// Both processes on one CPU.
    pub one_core: bool,
    /// Other libraries too.
    pub peers: bool,
    /// For [`Bench::Wire`], [`Bench::Landing`], [`Bench::Sockets`], [`Bench::Rpc`] and [`Bench::Netmem`]: the loopback
    /// device instead of a network of its own.
    pub loopback: bool,
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
            measures: Vec::new(),
            outstanding: Vec::new(),
            region_bytes: 256 << 20,
            budget_bytes: 64 << 20,
            directory: None,
            state: None,
            one_core: false,
            peers: false,
            loopback: false,
            progress: false,
            command: format!("highwire bench {}", bench.name()),
        }
    }

    /// What is measured at which sizes, in the order of a round.
    pub(crate) fn programme(&self) -> Vec<(Exercise, usize)> {
        let of_exercise = |exercise| self.sizes_of(exercise).into_iter().map(move |size| (exercise, size));
        let chosen = |exercise: &Exercise| self.measures.is_empty() || self.measures.contains(&exercise.measure());
        self.bench.exercises().iter().copied().filter(chosen).flat_map(of_exercise).collect()
    }

    /// The sizes chosen, or the usual ones. Some figures are for their usual sizes only.
    pub(crate) fn sizes_of(&self, exercise: Exercise) -> Vec<usize> {
        let usual = self.bench.sizes(exercise).iter().copied();
        let mut sizes: Vec<usize> = match (self.bench, exercise) {
            (_, Exercise::Calls) if !self.outstanding.is_empty() => self.outstanding.clone(),
            // Those are no bytes.
            (_, Exercise::Calls | Exercise::Call) => usual.collect(),
            // Pages have one size.
            (_, Exercise::RandomPages) => usual.collect(),
            _ if self.sizes.is_empty() => usual.collect(),
            (_, Exercise::Interfered) => usual.collect(),
            (Bench::Wire, Exercise::StreamAsleep) | (Bench::Landing, Exercise::Stream) => {
                usual.filter(|size| self.sizes.contains(size)).collect()
            }
            (_, Exercise::File) => usual.filter(|size| self.sizes.contains(size)).collect(),
            (Bench::Sockets, _) => {
                self.sizes.iter().copied().filter(|size| !self.bench.file_sizes().contains(size)).collect()
            }
            _ => self.sizes.clone(),
        };
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    pub(crate) fn contestants_or_default(&self) -> Vec<Contestant> {
        let mut chosen =
            if self.contestants.is_empty() { self.bench.contestants().to_vec() } else { self.contestants.clone() };
        if self.bench == Bench::Rpc && self.peers {
            chosen.extend([Contestant::Tonic, Contestant::Tarpc]);
        }
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
        Bench::Wire | Bench::Landing | Bench::Sockets | Bench::Rpc | Bench::Netmem => wire::run(options, began),
        Bench::Lane => lane::run(options, began),
        Bench::Apps => apps::run(options, began),
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

/// At which CPU time is counted: large enough that what a message costs by itself hardly matters.
const ASLEEP_SIZES: &[usize] = &[1 << 20];

/// Everybody on a wire.
const WIRE: &[Contestant] = &[
    Contestant::UdpSpin,
    Contestant::UdpGso,
    Contestant::UdpSegmented,
    Contestant::TcpSpin,
    Contestant::TcpBlock,
    Contestant::TcpNoOffload,
    Contestant::ViUdp,
    Contestant::ViUdpSealed,
    Contestant::ViUdpSegmented,
    Contestant::ViUdpImpaired0,
    Contestant::ViUdpImpaired1,
    Contestant::RdmaWrite,
    Contestant::RdmaRead,
    Contestant::SendAndMessage,
];

/// Everybody of `bench landing`.
const LANDING: &[Contestant] = &[
    Contestant::Copying,
    Contestant::Peek,
    Contestant::Landing,
    Contestant::AlwaysWrong,
    Contestant::OneSender,
    Contestant::FourSenders,
    Contestant::FourSendersNoLists,
    Contestant::Interference,
    Contestant::InterferenceWithin,
];

/// Everybody of `bench sockets`.
const SOCKETS: &[Contestant] = &[
    Contestant::Vi,
    Contestant::ViBuffered,
    Contestant::Sock,
    Contestant::SockBlock,
    Contestant::SockHandler,
    Contestant::SockNotify,
    Contestant::TcpSpin,
    Contestant::TcpBlock,
    Contestant::UnixSpin,
    Contestant::Window1,
    Contestant::Window32,
    Contestant::DelayedAcks,
    Contestant::Combining,
    Contestant::ViUdpSealed,
    Contestant::SockUdpSealed,
    Contestant::TcpNagle,
    Contestant::Tcp,
    Contestant::Copy,
];

/// Everybody of `bench lane`.
const LANE: &[Contestant] = &[
    Contestant::RunSpin,
    Contestant::RunBlock,
    Contestant::RunOneEnd,
    Contestant::TcpSpin,
    Contestant::TcpBlock,
    Contestant::UnixSpin,
    Contestant::RunBlockOneCore,
    Contestant::TcpBlockOneCore,
];

/// Everybody of `bench rpc`, the other libraries last.
const RPC: &[Contestant] = &[
    Contestant::Vi,
    Contestant::ViUdp,
    Contestant::ViUdpSealed,
    Contestant::Shm,
    Contestant::Udp,
    Contestant::UdpSealed,
    Contestant::Redis,
    Contestant::Memcached,
    Contestant::Tonic,
    Contestant::Tarpc,
];

/// Everybody of `bench netmem`.
const NETMEM: &[Contestant] = &[
    Contestant::Vi,
    Contestant::ViUdp,
    Contestant::Paged,
    Contestant::PagedMapped,
    Contestant::PagedUdp,
    Contestant::MappedFile,
];

/// Everybody of `bench apps`.
const APPS: &[Contestant] = &[Contestant::Plain, Contestant::Highwire];
