//! What `bench sockets` says beside its rows: the figures and tables of the paper on sockets over virtual interfaces,
//! with the paper's numbers (those of its cLAN adapter) beside ours.

use crate::report::{Report, bytes_label, cell, figure, line, short, titled};
use crate::stats::Measure;
use crate::transports::Contestant;

/// What a reader must know to judge the rows.
pub(crate) const NOTES: [&str; 4] = [
    "sock, window-1, window-32, delayed-acks and combining read and write without blocking, again and again, as \
     tcp-spin does (on one CPU they block); sock-block, sock-handler, sock-notify, tcp-block, tcp-nagle and files \
     make calls that block, as most programs do; of TCP, all but tcp-nagle have TCP_NODELAY, as latency needs it",
    "whoever blocks may run on both CPUs, where the kernel puts it, as most programs may; all others stay on one each",
    "vi copies nothing at the sender from 16 KiB on, as no stream can; vi-buffered copies in and out at every size, \
     and is what bandwidth is compared to",
    "TCP and Unix sockets are on loopback; only vi-udp-sealed and sock-udp-sealed go over the network, if there is one",
];

/// A figure of the paper: who is compared in it, up to the paper's largest message.
pub(crate) struct Figure {
    /// The name of its file.
    pub(crate) file: &'static str,
    pub(crate) title: &'static str,
    pub(crate) measure: Measure,
    pub(crate) contestants: &'static [Contestant],
}

pub(crate) const FIGURES: &[Figure] = &[
    Figure {
        file: "figure-5",
        title: "Latency by the way messages are handled (the paper's figure 5)",
        measure: Measure::LatencyNs,
        contestants: &[
            Contestant::Vi,
            Contestant::Sock,
            Contestant::SockHandler,
            Contestant::SockNotify,
            Contestant::TcpBlock,
        ],
    },
    Figure {
        file: "figure-7",
        title: "Bandwidth without a window (the paper's figure 7)",
        measure: Measure::BandwidthGbS,
        contestants: &[
            Contestant::TcpBlock,
            Contestant::TcpNagle,
            Contestant::Vi,
            Contestant::ViBuffered,
            Contestant::Window1,
        ],
    },
    Figure {
        file: "figure-8",
        title: "Bandwidth step by step (the paper's figure 8)",
        measure: Measure::BandwidthGbS,
        contestants: &[
            Contestant::ViBuffered,
            Contestant::Window1,
            Contestant::Window32,
            Contestant::DelayedAcks,
            Contestant::Combining,
        ],
    },
];

impl Figure {
    /// Those of a figure's contestants who took part, and the sizes it is drawn for.
    pub(crate) fn content(&self, report: &Report) -> (Vec<&'static str>, Vec<u64>) {
        let took_part = report.contestants(self.measure);
        let names = self.contestants.iter().map(|contestant| contestant.name());
        let sizes = report.sizes(self.measure).into_iter().filter(|size| *size <= MESSAGE_BYTES_MAX);
        (names.filter(|name| took_part.contains(name)).collect(), sizes.collect())
    }
}

/// All tables, as far as there are rows for them.
pub(crate) fn tables(report: &Report) -> String {
    let mut text = String::new();
    let tables: [(Vec<Vec<String>>, &str); 5] = [
        (handling(report), "Latency of 4 bytes by the way messages are handled (the paper's figure 5)"),
        (latency(report), "Latency by size (the paper's table 3)"),
        (without_window(report), "Bandwidth of 32 KiB without a window (the paper's figure 7)"),
        (ladder(report), "Bandwidth step by step (the paper's table 4 and figure 8), medians"),
        (files(report), "Transfer of a file from memory to memory (the paper's table 5)"),
    ];
    for (lines, title) in tables {
        titled(&lines, title, &mut text);
    }
    text
}

/// A row of our own, named.
fn ours(report: &Report, contestant: Contestant, measure: Measure, size: u64) -> Option<[String; 2]> {
    let row = report.row(contestant.name(), measure, size)?;
    Some([contestant.name().to_owned(), cell(row, report.floor(measure))])
}

fn handling(report: &Report) -> Vec<Vec<String>> {
    const PAPER: [(Contestant, &str); 6] = [
        (Contestant::Vi, "8.3 µs, native VIA"),
        (Contestant::Sock, "10.5 µs ×1.27, SOVIA_SINGLE, copying"),
        (Contestant::SockBlock, "19.4 µs ×2.34, the same with blocking calls"),
        (Contestant::SockHandler, "29.9 µs ×3.60, SOVIA_HANDLER"),
        (Contestant::SockNotify, "88.5 µs ×2.04, SOVIA_NOTIFY, on M-VIA (43.3 µs)"),
        (Contestant::TcpBlock, "54.9 µs ×6.61, TCP"),
    ];
    let mut lines = vec![line(["", "median [p10–p90] × vi", "the paper, × VIA"])];
    for (contestant, paper) in PAPER {
        lines
            .extend(ours(report, contestant, Measure::LatencyNs, 4).map(|[name, ours]| vec![name, ours, paper.into()]));
    }
    lines
}

fn latency(report: &Report) -> Vec<Vec<String>> {
    /// Bytes, microseconds of native VIA and of SOVIA_HYBRID.
    const PAPER: [(u64, f64, f64); 14] = [
        (4, 8.3, 10.5),
        (8, 8.3, 10.7),
        (16, 8.4, 10.8),
        (32, 10.1, 12.5),
        (64, 10.1, 12.8),
        (128, 10.5, 14.0),
        (256, 11.9, 16.0),
        (512, 14.9, 19.7),
        (1024, 20.2, 26.5),
        (2048, 30.4, 40.8),
        (4096, 50.5, 65.0),
        (8192, 90.6, 123.0),
        (16384, 169.9, 240.3),
        (32768, 329.0, 460.6),
    ];
    let mut lines = vec![line(["", "vi", "sock, × vi", "the paper: VIA", "SOVIA_HYBRID"])];
    for (size, via, sovia) in PAPER {
        let ours = |contestant| ours(report, contestant, Measure::LatencyNs, size);
        let (Some([_, vi]), Some([_, sock])) = (ours(Contestant::Vi), ours(Contestant::Sock)) else { continue };
        let sovia = format!("{} µs ×{}", short(sovia), short(sovia / via));
        lines.push(vec![bytes_label(size), vi, sock, format!("{} µs", short(via)), sovia]);
    }
    lines
}

fn without_window(report: &Report) -> Vec<Vec<String>> {
    const PAPER: [(Contestant, &str); 5] = [
        (Contestant::TcpBlock, "–"),
        (Contestant::TcpNagle, "450 Mb/s ×0.55, TCP"),
        (Contestant::Vi, "815 Mb/s, native VIA"),
        (Contestant::ViBuffered, "–"),
        (Contestant::Window1, "SOVIA_BASE, drawn and not told"),
    ];
    let mut lines = vec![line(["", "median [p10–p90] × vi-buffered", "the paper, × VIA"])];
    for (contestant, paper) in PAPER {
        let ours = ours(report, contestant, Measure::BandwidthGbS, MESSAGE_BYTES_MAX);
        lines.extend(ours.map(|[name, ours]| vec![name, ours, paper.into()]));
    }
    lines
}

fn ladder(report: &Report) -> Vec<Vec<String>> {
    const STEPS: [(Contestant, [&str; 3], &str); 5] = [
        (Contestant::Window1, ["1", "1", "no"], "SOVIA_BASE"),
        (Contestant::Window32, ["32", "1", "no"], "SOVIA_FLOWCNTL"),
        (Contestant::DelayedAcks, ["32", "16", "no"], "SOVIA_DACKS, 814 Mb/s ×1.00 of VIA at 32 KB"),
        (Contestant::Combining, ["32", "16", "yes"], "SOVIA_COMBINE, the same at 32 KB"),
        (Contestant::ViBuffered, ["–", "–", "–"], "native VIA, 815 Mb/s at 32 KB"),
    ];
    let measure = Measure::BandwidthGbS;
    let sizes: Vec<u64> = report.sizes(measure).into_iter().filter(|size| *size <= MESSAGE_BYTES_MAX).collect();
    let mut lines = vec![line(["", "window", "acknowledged", "combined"])];
    lines[0].extend(sizes.iter().map(|size| bytes_label(*size)).chain(["the paper".to_owned()]));
    for (contestant, settings, paper) in STEPS {
        let rows: Vec<_> = sizes.iter().map(|size| report.row(contestant.name(), measure, *size)).collect();
        if rows.iter().all(Option::is_none) {
            continue;
        }
        let mut line = vec![contestant.name().to_owned()];
        line.extend(settings.map(str::to_owned));
        line.extend(rows.into_iter().map(|row| row.map_or("–".to_owned(), |row| figure(measure, row.median))));
        line.push(paper.to_owned());
        lines.push(line);
    }
    // Without a step there is nothing to climb.
    if lines.len() == 2 && lines[1][0] == Contestant::ViBuffered.name() {
        lines.truncate(1);
    }
    lines
}

fn files(report: &Report) -> Vec<Vec<String>> {
    /// Megabits per second of both files.
    const PAPER: [(Contestant, &str); 3] = [
        (Contestant::Tcp, "288 and 256 Mb/s, TCP"),
        (Contestant::Sock, "736 and 552 Mb/s ×2.56 and ×2.16 of TCP, SOVIA"),
        (Contestant::Copy, "about 580 Mb/s, ramdisk to ramdisk on one host"),
    ];
    let measure = Measure::FileMbS;
    let sizes = report.sizes(measure);
    let mut lines = vec![vec![String::new()]];
    lines[0].extend(sizes.iter().map(|size| bytes_label(*size)).chain(["the paper".to_owned()]));
    for (contestant, paper) in PAPER {
        let cells: Vec<_> = sizes.iter().map(|size| ours(report, contestant, measure, *size)).collect();
        if cells.iter().any(Option::is_some) {
            let cells = cells.into_iter().map(|ours| ours.map_or("–".to_owned(), |[_, ours]| ours));
            lines.push([contestant.name().to_owned()].into_iter().chain(cells).chain([paper.to_owned()]).collect());
        }
    }
    lines
}

/// The paper's largest message.
const MESSAGE_BYTES_MAX: u64 = 32768;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bench;
    use crate::report::tests::{assert_lines, row_of, sample};
    use std::path::Path;

    fn report() -> Report {
        let rows = vec![
            row_of(Contestant::Vi, Measure::LatencyNs, 4, 100.0, Some(1.0)),
            row_of(Contestant::Sock, Measure::LatencyNs, 4, 150.0, Some(1.5)),
            row_of(Contestant::SockHandler, Measure::LatencyNs, 4, 9000.0, Some(90.0)),
            row_of(Contestant::Window1, Measure::BandwidthGbS, 64, 0.05, None),
            row_of(Contestant::Combining, Measure::BandwidthGbS, 64, 1.5, None),
            row_of(Contestant::Combining, Measure::BandwidthGbS, 32768, 6.0, None),
            row_of(Contestant::Combining, Measure::BandwidthGbS, 1 << 20, 7.0, None),
            row_of(Contestant::Combining, Measure::MessagesPerS, 64, 2e7, None),
            row_of(Contestant::Sock, Measure::FileMbS, 13_827_767, 2000.0, Some(0.8)),
            row_of(Contestant::Copy, Measure::FileMbS, 13_827_767, 2500.0, Some(1.0)),
        ];
        Report { bench: Bench::Sockets.name().to_owned(), rows, ..sample() }
    }

    #[test]
    fn our_figures_stand_beside_those_of_the_paper() {
        let text = report().to_text();
        assert_lines(
            &text,
            &[
                &["sock", "150 ns", "×1.50", "10.5 µs ×1.27"],
                &["sock-handler", "9.00 µs", "×90.0", "29.9 µs ×3.60"],
                &["4 B", "100 ns", "150 ns", "8.30 µs", "10.5 µs ×1.27"],
                &["window-1", "1", "no", "50.0 MB/s", "SOVIA_BASE"],
                &["combining", "32", "16", "yes", "1.50 GB/s", "6.00 GB/s", "SOVIA_COMBINE"],
                &["sock", "2000 MB/s", "×0.80", "736 and 552 Mb/s"],
                &["combining", "20.0 M/s"],
            ],
        );
        assert!(!text.contains("figure 7"), "a table without rows in\n{text}");
    }

    #[test]
    fn a_figure_has_those_who_took_part_up_to_the_papers_largest_message() {
        let (names, sizes) = FIGURES[2].content(&report());
        assert_eq!((names, sizes), (vec!["window-1", "combining"], vec![64, 32768]));
        let plots = crate::plot::all(&report(), Path::new("somewhere")).unwrap();
        let plot = |name: &str| plots.iter().find(|plot| plot.0 == name).map(|plot| plot.1.as_str()).unwrap();
        assert!(plot("sockets-figure-5.svg").contains("sock-handler"));
        let climbed = plot("sockets-figure-8.svg");
        assert!(climbed.contains("window-1") && climbed.contains("32 KiB") && !climbed.contains("1 MiB"));
        assert!(plot("sockets-bandwidth_gb_s.svg").contains("1 MiB"));
        let none = Report { rows: Vec::new(), ..report() };
        assert_eq!(tables(&none), "");
        assert!(crate::plot::all(&none, Path::new("somewhere")).is_ok());
    }
}
