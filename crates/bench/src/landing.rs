//! What `bench landing` says beside its rows: the figures and tables of the paper on speculative
//! defragmentation, with the paper's numbers beside ours.

use crate::report::{Report, cell, figure, line, short, titled};
use crate::stats::Measure;
use crate::transports::Contestant;
use crate::transports::landing::MESSAGE_BYTES;

/// A figure of the paper: who is compared in it.
pub(crate) struct Figure {
    /// The name of its file.
    pub(crate) file: &'static str,
    pub(crate) title: &'static str,
    pub(crate) bars: &'static [Bar],
}

/// One of those who are compared.
pub(crate) struct Bar {
    pub(crate) contestant: Contestant,
    /// What the paper calls the like of it, and its MByte/s, where it has any.
    paper: Option<(&'static str, f64)>,
}

const STANDARD: Bar = Bar { contestant: Contestant::Copying, paper: Some(("standard Linux 2.2", PAPER_STANDARD)) };

pub(crate) const FIGURES: &[Figure] = &[
    Figure {
        file: "figure-5",
        title: "Throughput of large transfers (the paper's figure 5)",
        bars: &[
            STANDARD,
            Bar { contestant: Contestant::Peek, paper: None },
            Bar { contestant: Contestant::Landing, paper: Some(("speculation with fast buffers", 75.0)) },
        ],
    },
    Figure {
        file: "figure-6",
        title: "Throughput when speculation fails (the paper's figure 6)",
        bars: &[
            STANDARD,
            Bar { contestant: Contestant::AlwaysWrong, paper: Some(("cleanup after each packet", 35.0)) },
        ],
    },
];

/// All tables, as far as there are rows for them.
pub(crate) fn tables(report: &Report) -> String {
    let mut text = String::new();
    for figure in FIGURES {
        titled(&figure_table(report, figure), figure.title, &mut text);
    }
    let title = "Packets received where they were expected, by the number of senders";
    titled(&senders_table(report), title, &mut text);
    for (contestant, whose) in [
        (Contestant::Interference, "another sender"),
        (Contestant::InterferenceWithin, "another VI of the same sender"),
    ] {
        let title = format!("Effect of packets of {whose} among 100,000 (the paper's table 1)");
        titled(&interference_table(report, contestant), &title, &mut text);
    }
    text
}

fn figure_table(report: &Report, figure: &Figure) -> Vec<Vec<String>> {
    let mut lines = vec![line(["", "median [p10–p90] × copying", "the paper"])];
    for Bar { contestant, paper } in figure.bars {
        let Some(row) = report.row(contestant.name(), Measure::BandwidthGbS, MESSAGE_BYTES as u64) else { continue };
        let floor = report.floor(Measure::BandwidthGbS);
        let paper = match paper {
            Some((what, rate)) if *rate == PAPER_STANDARD => format!("{rate} MB/s, {what}"),
            Some((what, rate)) => format!("{rate} MB/s ×{}, {what}", short(rate / PAPER_STANDARD)),
            None => "–".to_owned(),
        };
        lines.push(vec![contestant.name().to_owned(), cell(row, floor), paper]);
    }
    lines
}

fn senders_table(report: &Report) -> Vec<Vec<String>> {
    const PAPER: [(Contestant, &str); 3] = [
        (Contestant::OneSender, "100 %, one sender at a time"),
        (Contestant::FourSenders, "–"),
        (Contestant::FourSendersNoLists, "48 %, two at a time"),
    ];
    let mut lines = vec![line(["", "where expected", "bandwidth, × copying", "the paper's table 2"])];
    for (contestant, paper) in PAPER {
        let row = |measure| report.row(contestant.name(), measure, MESSAGE_BYTES as u64);
        let (Some(success), Some(bandwidth)) = (row(Measure::SuccessPercent), row(Measure::BandwidthGbS)) else {
            continue;
        };
        lines.push(vec![contestant.name().to_owned(), cell(success, None), cell(bandwidth, None), paper.to_owned()]);
    }
    lines
}

fn interference_table(report: &Report, contestant: Contestant) -> Vec<Vec<String>> {
    const PAPER: [(u64, u64, u64); 3] = [(0, 2, 75), (100, 15, 73), (10_000, 28, 63)];
    let name = contestant.name();
    let bandwidth = |interfering| report.row(name, Measure::BandwidthGbS, interfering);
    let mut lines = vec![line([
        "interfering",
        "really sent",
        "failed",
        "and copied",
        "bandwidth, × without",
        "the paper: failed",
        "bandwidth",
    ])];
    for (interfering, paper_failed, paper_rate) in PAPER {
        let packets = |measure| report.row(name, measure, interfering).map(|row| cell(row, None));
        let Some(rate) = bandwidth(interfering) else { continue };
        let of_none =
            |rate: f64, none: f64| if interfering == 0 { String::new() } else { format!(" ×{}", short(rate / none)) };
        let ours = bandwidth(0).map_or(String::new(), |none| of_none(rate.median, none.median));
        lines.push(vec![
            interfering.to_string(),
            packets(Measure::InterferingPackets).unwrap_or_default(),
            packets(Measure::FailedPackets).unwrap_or_default(),
            packets(Measure::CopiedPackets).unwrap_or_default(),
            cell(rate, None) + &ours,
            paper_failed.to_string(),
            format!("{paper_rate} MB/s{}", of_none(paper_rate as f64, PAPER[0].2 as f64)),
        ]);
    }
    lines
}

/// What stands at a bar, where there is a row for it: name, p10, median and p90.
pub(crate) fn heights(report: &Report, of: &Figure) -> Vec<(String, [f64; 3])> {
    let bar = |bar: &Bar| {
        let row = report.row(bar.contestant.name(), Measure::BandwidthGbS, MESSAGE_BYTES as u64)?;
        let name = format!("{}: {}", row.contestant, figure(Measure::BandwidthGbS, row.median));
        Some((name, [row.p10, row.median, row.p90]))
    };
    of.bars.iter().filter_map(bar).collect()
}

/// MByte/s of the paper's machines without anything new.
const PAPER_STANDARD: f64 = 42.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bench;
    use crate::report::tests::{assert_lines, row_of, sample};

    fn report() -> Report {
        let mib = MESSAGE_BYTES as u64;
        let bandwidth =
            |contestant, median: f64| row_of(contestant, Measure::BandwidthGbS, mib, median, Some(median / 2.0));
        let mut rows = vec![
            bandwidth(Contestant::Copying, 2.0),
            bandwidth(Contestant::Landing, 3.0),
            bandwidth(Contestant::AlwaysWrong, 1.5),
            bandwidth(Contestant::FourSenders, 2.5),
            row_of(Contestant::FourSenders, Measure::SuccessPercent, mib, 87.5, None),
            row_of(Contestant::Landing, Measure::ReceiverCpuSPerGb, 64 * mib, 0.2, None),
        ];
        for (interfering, failed, rate) in [(0, 2.0, 3.0), (10_000, 1234.0, 2.4)] {
            rows.push(row_of(Contestant::Interference, Measure::FailedPackets, interfering, failed, None));
            rows.push(row_of(Contestant::Interference, Measure::CopiedPackets, interfering, failed / 2.0, None));
            rows.push(row_of(Contestant::Interference, Measure::BandwidthGbS, interfering, rate, None));
        }
        Report { bench: Bench::Landing.name().to_owned(), rows, ..sample() }
    }

    #[test]
    fn our_figures_stand_beside_those_of_the_paper() {
        let text = report().to_text();
        assert_lines(
            &text,
            &[
                &["landing", "3.00 GB/s", "×1.50", "75 MB/s ×1.79"],
                &["always-wrong", "1.50 GB/s", "×0.75", "35 MB/s ×0.83"],
                &["four-senders", "87.5 %", "2.50 GB/s"],
                &["10000", "1234 packets", "617 packets", "2.40 GB/s", "×0.80", "28", "63 MB/s ×0.84"],
                &["landing", "200 ms/GB"],
                &["64 MiB"],
            ],
        );
        // Numbers of packets are no bytes.
        assert!(!text.contains("10000 B"), "{text}");
    }

    #[test]
    fn who_did_not_take_part_has_no_bar() {
        let names =
            |figure: &Figure| -> Vec<String> { heights(&report(), figure).into_iter().map(|bar| bar.0).collect() };
        assert_eq!(names(&FIGURES[0]), ["copying: 2.00 GB/s", "landing: 3.00 GB/s"]);
        assert_eq!(names(&FIGURES[1]), ["copying: 2.00 GB/s", "always-wrong: 1.50 GB/s"]);
        let plots = crate::plot::all(&report(), std::path::Path::new("somewhere")).unwrap();
        let figure = |name: &str| plots.iter().find(|plot| plot.0 == name).map(|plot| plot.1.as_str()).unwrap();
        assert!(figure("landing-figure-5.svg").contains("landing: 3.00 GB/s"));
        assert!(figure("landing-figure-6.svg").contains("always-wrong: 1.50 GB/s"));
        assert!(figure("landing-receiver_cpu_s_per_gb.svg").contains("64 MiB"));
        let none = Report { rows: Vec::new(), ..report() };
        assert!(!tables(&none).contains("figure"), "tables of nothing");
        assert!(crate::plot::all(&none, std::path::Path::new("somewhere")).is_ok());
    }
}
