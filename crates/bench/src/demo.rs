//! A first look: the same messages through a virtual interface and through loopback TCP, and through a
//! virtual interface as it would be between two hosts.

use crate::contest::{Contest, Start};
use crate::network::Network;
use crate::pair::Pair;
use crate::transports::{Contestant, Exercise};
use crate::{BenchError, Machine, stats};
use std::time::{Duration, Instant};

/// What the demonstration measured.
#[derive(Clone, Debug)]
pub struct Demo {
    /// What it ran on.
    pub machine: Machine,
    /// Process numbers of the two sides.
    pub processes: (u32, u32),
    /// Highwire, then TCP, as programs use them that wait by looking; then TCP as most programs use
    /// it, asleep until something comes. On a single CPU nobody can wait by looking.
    pub rows: Vec<DemoRow>,
    /// The path between hosts, authenticated and encrypted, here over loopback.
    pub between_hosts: DemoRow,
    /// Messages exchanged in all.
    pub messages: u64,
    /// Bytes of each message of the ping-pong.
    pub ping_pong_bytes: usize,
    /// Bytes of each message of the bulk transfer.
    pub bulk_bytes: usize,
}

/// One way to send messages.
#[derive(Clone, Debug)]
pub struct DemoRow {
    /// Which.
    pub name: &'static str,
    /// Median one-way latency of a small message.
    pub latency_ns: f64,
    /// Median rate of large ones.
    pub bandwidth_gb_s: f64,
}

/// Runs a ping-pong and a bulk transfer with a second process, in turn through each way, for
/// `seconds` in all.
pub fn demo(seconds: f64) -> Result<Demo, BenchError> {
    let began = Instant::now();
    let deadline = began + Duration::from_secs_f64(seconds);
    let cpus = highwire_mem::cpus_allowed();
    let pair = Pair::start(false, &Network::loopback())?;
    let spinning = pair.link.spinning;
    let processes = (std::process::id(), pair.peer_id());
    let mut contest = Contest::open(pair);
    let ways: &[(Contestant, &'static str)] = if spinning {
        &[
            (Contestant::ViBuffered, "Highwire"),
            (Contestant::TcpSpin, "loopback TCP, spinning"),
            (Contestant::TcpBlock, "loopback TCP, blocking"),
            BETWEEN_HOSTS,
        ]
    } else {
        &[(Contestant::ViBuffered, "Highwire"), (Contestant::TcpBlock, "loopback TCP, blocking"), BETWEEN_HOSTS]
    };
    for (contestant, _) in ways {
        contest.admit(*contestant, BULK_BYTES)?;
    }

    let mut figures = vec![(Vec::new(), Vec::new()); ways.len()];
    let mut messages = 0;
    // One round more than there is time for, so that there is at least one.
    while figures[0].1.is_empty() || Instant::now() < deadline {
        for (exercise, size, count) in
            [(Exercise::PingPong, PING_PONG_BYTES, PING_PONG_COUNT), (Exercise::Stream, BULK_BYTES, BULK_COUNT)]
        {
            let starts: Vec<Start> =
                ways.iter().map(|(contestant, _)| Start { contestant: *contestant, exercise, size, count }).collect();
            for (burst, (latencies, rates)) in contest.heat(&starts)?.into_iter().zip(&mut figures) {
                match exercise {
                    Exercise::PingPong => latencies.push(burst.nanoseconds / count as f64 / 2.0),
                    _ => rates.push((size * count) as f64 / burst.nanoseconds),
                }
                messages += count as u64 * if exercise == Exercise::PingPong { 2 } else { 1 };
            }
        }
    }
    let rows = ways.iter().zip(&figures).map(|((_, name), (latencies, rates))| DemoRow {
        name,
        latency_ns: stats::median(latencies),
        bandwidth_gb_s: stats::median(rates),
    });
    let mut rows: Vec<DemoRow> = rows.collect();
    let between_hosts = rows.pop().ok_or(BenchError::NobodyLeft)?;
    Ok(Demo {
        machine: Machine::this(cpus, contest.pair.cpus),
        processes,
        rows,
        between_hosts,
        messages,
        ping_pong_bytes: PING_PONG_BYTES,
        bulk_bytes: BULK_BYTES,
    })
}

impl Demo {
    /// How many times lower Highwire's latency and how many times higher its bandwidth is than that
    /// of each other way, in the order of the rows.
    pub fn advantage(&self) -> Vec<(f64, f64)> {
        let Some((first, others)) = self.rows.split_first() else { return Vec::new() };
        let over = |row: &DemoRow| (row.latency_ns / first.latency_ns, first.bandwidth_gb_s / row.bandwidth_gb_s);
        others.iter().map(over).collect()
    }
}

const BETWEEN_HOSTS: (Contestant, &str) = (Contestant::ViUdpSealed, "Highwire, encrypted UDP");
const PING_PONG_BYTES: usize = 4;
const PING_PONG_COUNT: usize = 200;
const BULK_BYTES: usize = 32 << 10;
const BULK_COUNT: usize = 256;
