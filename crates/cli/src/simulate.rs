//! `highwire simulate`: the protocol between hosts, in virtual time.

use crate::pcap::{self, PcapArgs};
use anyhow::bail;
use clap::Args;
use highwire::adapter::{Outcome, Report, Scenario, Simulation};
use serde_json::{Value, json};

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// The run to replay; with --runs, the first of them
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// So many runs, of one seed after the other, a line for each
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    #[arg(conflicts_with = "pcap")]
    runs: u64,
    /// Print an object for each run, one a line, for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pcap: PcapArgs,
}

pub(crate) fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let recording = args.pcap.recording()?;
    let mut wrong = Vec::new();
    let mut ended = 0;
    for seed in args.seed..args.seed.saturating_add(args.runs) {
        let scenario = Scenario::from_seed(seed);
        let report = match &recording {
            Some(recording) => Simulation::recorded(scenario, recording.clone()).run(),
            None => Simulation::new(scenario).run(),
        };
        crate::print(&format!("{}\n", text(args, &report)))?;
        ended += u64::from(report.outcome != Outcome::Delivered);
        if !report.is_right() {
            wrong.push(seed);
        }
    }
    if let Some(first) = wrong.first() {
        bail!("{} of {} runs went wrong; see `highwire simulate --seed {first}`", wrong.len(), args.runs);
    }
    if args.runs > 1 && !args.json {
        let delivered = args.runs - ended;
        crate::print(&format!(
            "{delivered} delivered everything, {ended} ended as they must after a long partition\n"
        ))?;
    }
    pcap::finish(recording.as_ref())
}

fn text(args: &SimulateArgs, report: &Report) -> String {
    if args.json {
        return object(report).to_string();
    }
    if args.runs == 1 {
        return report.to_string();
    }
    let (messages, bytes) = report.arrived;
    format!(
        "seed {}: {:?} after {:?}, {messages} messages, {bytes} bytes",
        report.scenario.seed, report.outcome, report.took
    )
}

fn object(report: &Report) -> Value {
    let side = |index: usize| {
        let (stats, weather, landing) = (report.sides[index], report.weather[index], report.landing[index]);
        json!({
            "packets_sent": stats.packets_sent,
            "packets_again": stats.packets_again,
            "packets_lost": stats.packets_lost,
            "probes": stats.probes,
            "size_probes": stats.size_probes,
            "size_falls": stats.size_falls,
            "packets_received": stats.packets_received,
            "replayed": stats.replayed,
            "forged": stats.forged,
            "landing_hits": landing.hits,
            "landing_seen": landing.seen,
            "landing_copied": landing.copied,
            "landing_misses": landing.misses,
            "landing_looks": landing.looks,
            "landing_moved_bytes": landing.moved_bytes,
            "network_lost": weather.lost,
            "network_partitioned": weather.partitioned,
            "network_corrupted": weather.corrupted,
            "network_duplicated": weather.duplicated,
        })
    };
    json!({
        "seed": report.scenario.seed,
        "sealed": report.scenario.sealed,
        "right": report.is_right(),
        "outcome": format!("{:?}", report.outcome),
        "took_s": report.took.as_secs_f64(),
        "messages": report.arrived.0,
        "bytes": report.arrived.1,
        "connects": side(0),
        "listens": side(1),
    })
}
