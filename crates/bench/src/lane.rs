//! `bench lane`: what `highwire run` gains for a program that knows nothing of it, and what it says beside its rows.

use crate::launch;
use crate::network::Network;
use crate::report::{Report, figure, line, short, titled};
use crate::rounds::{self, Record};
use crate::stats::{Measure, floor};
use crate::transports::Contestant;
use crate::{Bench, BenchError, Options};
use std::time::Instant;

/// Measures, and says how the programs were run.
pub(crate) fn run(options: &Options, began: Instant) -> Result<Report, BenchError> {
    let mut record = Record::new(options, began);
    record.notes.extend(NOTES.map(str::to_owned));
    if options.contestants_or_default().iter().any(|contestant| RUN.contains(contestant)) {
        record.notes.extend(launch::runs_plain()?);
    }
    rounds::measure(record, &Network::loopback())
}

/// Everybody under `highwire run` beside the same program without, as far as there are rows.
pub(crate) fn tables(report: &Report) -> String {
    let mut text = String::new();
    for (measure, title, better) in [
        (Measure::LatencyNs, "One-way latency under `highwire run` and over TCP", "times below"),
        (Measure::BandwidthGbS, "Bandwidth under `highwire run` and over TCP", "times above"),
    ] {
        titled(&comparison(report, measure, better), title, &mut text);
    }
    text
}

fn comparison(report: &Report, measure: Measure, better: &str) -> Vec<Vec<String>> {
    let mut lines = vec![line(["", "size", "median", "beside it", "median", better])];
    for contestant in RUN {
        let beside = floor(Bench::Lane.name(), measure, contestant.name());
        for size in report.sizes(measure) {
            let row = |name| report.row(name, measure, size);
            let (Some(ours), Some(theirs)) = (row(contestant.name()), row(beside)) else { continue };
            let Some(ratio) = ours.of_floor else { continue };
            let times = if measure.less_is_better() { 1.0 / ratio } else { ratio };
            let [ours, theirs] = [ours, theirs].map(|row| figure(measure, row.median));
            lines.push(line([
                contestant.name(),
                &report.size_label(measure, size),
                &ours,
                beside,
                &theirs,
                &short(times),
            ]));
        }
    }
    lines
}

/// Those who run under Highwire, at one end at least.
const RUN: [Contestant; 4] =
    [Contestant::RunSpin, Contestant::RunBlock, Contestant::RunOneEnd, Contestant::RunBlockOneCore];

/// What a reader must know to judge the rows.
const NOTES: [&str; 3] = [
    "one plain C program at each end of a connection that is kept for the whole run, with TCP_NODELAY; it takes the time \
     itself, after at least 40 exchanges",
    "-spin calls send and recv with MSG_DONTWAIT again and again, -block sleeps in them; ends are on a CPU each, those of \
     -one-core on the same",
    "run-one-end: only the server runs under `highwire run`",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{assert_lines, row_of, sample};

    fn report() -> Report {
        let latency = |contestant, median, ratio| row_of(contestant, Measure::LatencyNs, 4, median, Some(ratio));
        let bandwidth = |contestant, median, ratio| row_of(contestant, Measure::BandwidthGbS, 64, median, Some(ratio));
        let rows = vec![
            latency(Contestant::TcpSpin, 4000.0, 1.0),
            latency(Contestant::RunSpin, 200.0, 0.05),
            latency(Contestant::UnixSpin, 2000.0, 0.5),
            latency(Contestant::RunOneEnd, 26e3, 1.02),
            bandwidth(Contestant::TcpBlock, 0.5, 1.0),
            bandwidth(Contestant::RunBlock, 2.0, 4.0),
        ];
        Report { bench: Bench::Lane.name().to_owned(), rows, ..sample() }
    }

    #[test]
    fn who_runs_under_highwire_stands_beside_who_does_not() {
        let text = report().to_text();
        assert_lines(
            &text,
            &[
                &["run-spin", "4 B", "200 ns", "tcp-spin", "4.00 µs", "20.0"],
                &["run-block", "64 B", "2.00 GB/s", "tcp-block", "500 MB/s", "4.00"],
                // Their table by size has ratios too.
                &["× TCP that waits alike"],
                &["unix-spin", "×0.50"],
                &["run-one-end", "26.0 µs", "×1.02"],
            ],
        );
        let own = text.lines().find(|line| line.starts_with("  tcp-spin")).unwrap();
        assert!(!own.contains('×'), "{own}");
        // Without what it is compared to, a row is in the table by size only.
        assert!(!text.lines().any(|line| line.contains("run-one-end") && line.contains("tcp-block")), "{text}");
    }

    #[test]
    fn plots_say_to_whom_they_compare() {
        let plots = crate::plot::all(&report(), std::path::Path::new("somewhere")).unwrap();
        let ratios = plots.iter().find(|plot| plot.0 == "lane-latency_ns-of-floor.svg").unwrap();
        assert!(ratios.1.contains("TCP that waits alike") && ratios.1.contains("run-spin"));
    }
}
