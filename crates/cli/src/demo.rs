//! `highwire demo`: a first look.

use clap::Args;
use highwire_bench::DemoRow;
use std::fmt::Write;

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
    let _ =
        writeln!(text, "\n`highwire bench latency` compares more ways, at more sizes, with the spread of the figures.");
    crate::print(&text)
}

fn write_row(text: &mut String, row: &DemoRow) {
    let latency = format!("{:.2} µs", row.latency_ns / 1e3);
    let bandwidth = format!("{:.1} GB/s", row.bandwidth_gb_s);
    let _ = writeln!(text, "{:<26}{latency:>16}{bandwidth:>16}", row.name);
}
