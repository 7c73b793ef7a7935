//! `highwire demo`: a first look.

use anyhow::Context;
use clap::Args;
use counter::{Counter, CounterClient};
use highwire::netmem::{Memory, MemoryOptions, NodeOptions, NodeServer, PAGE_BYTES, PagingOptions};
use highwire::rpc::{Rpc, Services};
use highwire::{ClusterKey, Config, Driver, Keys, Nic, WireConfig};
use highwire_bench::DemoRow;
use std::fmt::Write;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Seconds to spend
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = crate::bench::parse_seconds)]
    seconds: f64,
}

pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let demo = highwire_bench::demo(args.seconds)?;
    let mut text = String::new();
    let _ = writeln!(
        text,
        "Two processes, {} and {}, exchanged {} messages on",
        demo.processes.0, demo.processes.1, demo.messages
    );
    let _ = writeln!(text, "{}.\n", demo.machine.describe());
    let _ = writeln!(text, "{:<26}{:>16}{:>16}", "", "ping-pong", "bulk transfer");
    let sizes = (format!("{} B, one way", demo.ping_pong_bytes), format!("{} KiB", demo.bulk_bytes >> 10));
    let _ = writeln!(text, "{:<26}{:>16}{:>16}", "", sizes.0, sizes.1);
    demo.rows.iter().for_each(|row| write_row(&mut text, row));
    text.push('\n');
    for (row, (latency, bandwidth)) in demo.rows.iter().skip(1).zip(demo.advantage()) {
        let _ = writeln!(
            text,
            "Against {}: {latency:.1} times lower latency, {bandwidth:.1} times the bandwidth.",
            row.name
        );
    }
    text.push_str(
        "\nBetween hosts the same virtual interface goes by UDP, with a key that both have; here over loopback:\n",
    );
    write_row(&mut text, &demo.between_hosts);
    let names = Names::new()?;
    write_calls(&mut text, &names)?;
    write_paging(&mut text, &names)?;
    let _ =
        writeln!(text, "\n`highwire bench latency` compares more ways, at more sizes, with the spread of the figures.");
    crate::print(&text)
}

fn write_row(text: &mut String, row: &DemoRow) {
    let latency = format!("{:.2} µs", row.latency_ns / 1e3);
    let bandwidth = format!("{:.1} GB/s", row.bandwidth_gb_s);
    let _ = writeln!(text, "{:<26}{latency:>16}{bandwidth:>16}", row.name);
}

// What the macro makes for programs, and this one does without.
#[allow(dead_code)]
mod counter {
    highwire::rpc::service! {
        /// Adds up.
        pub(super) trait Counter, client CounterClient, id 0x6465_6d6f, version 1 {
            /// Adds, and tells the sum.
            [1, quick] fn add(&self, amount: u64) -> u64;
        }
    }
}

struct Sum(AtomicU64);

impl Counter for Sum {
    fn add(&self, amount: u64) -> u64 {
        self.0.fetch_add(amount, Relaxed) + amount
    }
}

/// A directory for names that nobody needs afterwards.
struct Names(PathBuf);

impl Names {
    fn new() -> anyhow::Result<Names> {
        let path = Nic::open()?.runtime_dir()?.join(format!("demo-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).with_context(|| format!("{path:?} cannot be made"))?;
        Ok(Names(path))
    }

    /// An interface as another program would have it.
    fn interface(&self) -> anyhow::Result<Rpc> {
        let keys = Keys::new(ClusterKey::from_random([7; 32]));
        let wire = WireConfig { keys, driver: Driver::Caller, ..WireConfig::default() };
        let config = Config { runtime_dir: Some(self.0.clone()), ..Config::default() };
        let nic = Nic::with_wire(config, wire)?;
        Ok(Rpc::new(&nic)?)
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        // What stays does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A service called by each path.
fn write_calls(text: &mut String, names: &Names) -> anyhow::Result<()> {
    text.push_str("\nA service is a Rust trait; a call of it, there and back, in the median:\n");
    let (serving, calling) = (names.interface()?, names.interface()?);
    let paths = [("shm:counter", "Highwire"), ("udp:127.0.0.1:0", "Highwire, encrypted UDP")];
    for (address, name) in paths {
        let sum = CounterClient::serve(Sum(AtomicU64::new(0)));
        let server = serving.serve(address, Services::new().and(sum))?;
        let counter = CounterClient::new(calling.connect(server.address())?);
        let mut times = Vec::with_capacity(CALLS);
        for number in 1..=CALLS as u64 {
            let began = Instant::now();
            let sum = counter.add(1).wait()?;
            times.push(began.elapsed());
            anyhow::ensure!(sum == number, "the counter counted {sum} after {number} calls");
        }
        let _ = writeln!(text, "{name:<26}{:>16}", microseconds(part(&mut times, 50)));
    }
    Ok(())
}

/// A region of which most is in the memory of a node.
fn write_paging(text: &mut String, names: &Names) -> anyhow::Result<()> {
    let address = "shm:node";
    let options = NodeOptions::new(2 * REGION_BYTES, address);
    let node = NodeServer::start(&names.interface()?, options)?;
    let memory = Memory::connect(&names.interface()?, address, MemoryOptions::default())?;
    let _ = writeln!(
        text,
        "\nA region of {} MiB, {} of them here and the others in the memory that a node donates:",
        REGION_BYTES >> 20,
        BUDGET_BYTES >> 20
    );
    let region = match memory.paged_region(REGION_BYTES, PagingOptions::new(BUDGET_BYTES)) {
        Ok(region) => region,
        Err(refused) => {
            // A sandbox may forbid it, which is no reason to hide the rest.
            let _ = writeln!(text, "it cannot be had here: {refused}");
            return Ok(());
        }
    };
    let piece = vec![7; 1 << 20];
    let began = Instant::now();
    for at in (0..REGION_BYTES).step_by(piece.len()) {
        region.write_at(at, &piece)?;
    }
    let rate = REGION_BYTES as f64 / began.elapsed().as_secs_f64();
    let (words, pages) = (region.words(), REGION_BYTES as usize / PAGE_BYTES);
    let mut times = Vec::with_capacity(pages);
    for number in 0..pages {
        // Each page once, far from the one before.
        let page = number * 1657 % pages;
        let began = Instant::now();
        let word = words[page * PAGE_BYTES / 8].load(Relaxed);
        times.push(began.elapsed());
        anyhow::ensure!(word == u64::from_ne_bytes([7; 8]), "page {page} has {word:#x} in it");
    }
    let stats = region.stats();
    drop(region);
    node.leave(Duration::from_secs(1));
    let (median, slow) = (microseconds(part(&mut times, 50)), microseconds(part(&mut times, 99)));
    let _ = writeln!(text, "{:<26}{:>16}", "written at", crate::figures::bytes_rate(rate));
    let _ = writeln!(text, "{:<26}{median:>16}{slow:>16}", "touching a page, 50, 99 %");
    let _ = writeln!(text, "{:<26}{:>16}{:>16}", "pages fetched, pushed out", stats.fetched, stats.evicted);
    Ok(())
}

/// The time that so many per cent of them are within.
fn part(times: &mut [Duration], percent: usize) -> Duration {
    times.sort();
    times[(times.len() * percent / 100).min(times.len() - 1)]
}

fn microseconds(time: Duration) -> String {
    format!("{:.2} µs", time.as_secs_f64() * 1e6)
}

const CALLS: usize = 4000;
const REGION_BYTES: u64 = 16 << 20;
const BUDGET_BYTES: u64 = 4 << 20;
