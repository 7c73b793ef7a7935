//! What a run says, as JSON and as text.

use crate::machine::Machine;
use crate::stats::{Measure, Rounds, Row, floor};
use crate::trace::Trace;
use crate::transports::landing::MESSAGE_BYTES;
use crate::{BenchError, State};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Everything that one run of a benchmark says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Which benchmark: `latency`, `bandwidth`, `pipelining`, `connections`, `wire`, `landing`, `sockets`, `lane`, `apps`,
    /// `rpc` or `netmem`.
    pub bench: String,
    /// The command line.
    pub command: String,
    /// Version of Highwire.
    pub version: String,
    /// What it ran on.
    pub machine: Machine,
    /// What packets went through, where there were any: `veth` or `loopback`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub network: Option<String>,
    /// The state that all rows are from.
    pub state: State,
    /// Median crossing of a cache line in that state, in nanoseconds.
    pub crossing_ns: Option<f64>,
    /// How many rounds fell into which state.
    pub rounds: Rounds,
    /// Seconds that the run took, from start to end.
    pub seconds: f64,
    /// What a reader must know to judge the rows.
    pub notes: Vec<String>,
    /// The figures.
    pub rows: Vec<Row>,
    /// Pulses of a burst on both sides, where they were recorded.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub trace: Option<Trace>,
}

impl Report {
    /// The report as JSON, on several lines.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report has only names and numbers")
    }

    /// The row of a contestant at a size.
    pub fn row(&self, contestant: &str, measure: Measure, size: u64) -> Option<&Row> {
        self.rows.iter().find(|row| row.contestant == contestant && row.measure == measure && row.size == size)
    }

    /// The contestant to whom all others are compared, where there is one and it took part.
    pub(crate) fn floor(&self, measure: Measure) -> Option<&'static str> {
        let contestants = self.contestants(measure);
        let floor = floor(&self.bench, measure, contestants.first()?);
        (self.bench != "lane" && contestants.contains(&floor)).then_some(floor)
    }

    /// What it is called to whom contestants are compared.
    pub(crate) fn floor_label(&self, measure: Measure) -> Option<&'static str> {
        let compared = || self.rows.iter().any(|row| row.measure == measure && row.of_floor.is_some());
        if self.bench == "lane" { compared().then_some("TCP that waits alike") } else { self.floor(measure) }
    }

    /// The report as text for a terminal.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "highwire bench {}", self.bench);
        let _ = writeln!(text, "  command  {}", self.command);
        let _ = writeln!(text, "  machine  {}", self.machine.describe());
        if let Some(network) = &self.network {
            let _ = writeln!(text, "  network  {network}");
        }
        let _ = writeln!(text, "  state    {}", self.describe_state());
        let _ = writeln!(text, "  rounds   {}", self.describe_rounds());
        for note in &self.notes {
            let _ = writeln!(text, "  note     {note}");
        }
        if self.bench == "pipelining" {
            text.push_str(&self.table_one());
        }
        if self.bench == "landing" {
            text.push_str(&crate::landing::tables(self));
        }
        if self.bench == "sockets" {
            text.push_str(&crate::sockets::tables(self));
        }
        if self.bench == "lane" {
            text.push_str(&crate::lane::tables(self));
        }
        if self.bench == "apps" {
            text.push_str(&crate::apps::tables(self));
        }
        if self.bench == "rpc" {
            text.push_str(&crate::rpc::tables(self));
        }
        for measure in self.measures_by_size() {
            self.table(measure, &mut text);
        }
        text
    }

    fn describe_state(&self) -> String {
        match (self.state, self.crossing_ns) {
            (State::OneCore, _) => format!("one-core: both processes on CPU {}", self.machine.cpus_used.0),
            (state, Some(crossing)) => format!(
                "{state}: a cache line crosses between CPU {} and CPU {} in {crossing:.0} ns",
                self.machine.cpus_used.0, self.machine.cpus_used.1
            ),
            (state, None) => state.to_string(),
        }
    }

    fn describe_rounds(&self) -> String {
        let Rounds { total, near, far, disturbed, trials_dropped, trials_kept } = self.rounds;
        if self.state == State::OneCore {
            return format!("{total} in {:.1} s", self.seconds);
        }
        format!(
            "{total} in {:.1} s: {near} near, {far} far, {disturbed} disturbed; {trials_kept} trials count, \
             {trials_dropped} in another state were dropped",
            self.seconds
        )
    }

    pub(crate) fn measures(&self) -> Vec<Measure> {
        let mut measures: Vec<Measure> = self.rows.iter().map(|row| row.measure).collect();
        measures.sort();
        measures.dedup();
        measures
    }

    /// Those of which every size is of one kind.
    pub(crate) fn measures_by_size(&self) -> Vec<Measure> {
        let mut measures = self.measures();
        if self.bench == "landing" {
            measures.retain(|measure| matches!(measure, Measure::SenderCpuSPerGb | Measure::ReceiverCpuSPerGb));
        }
        // Files have a table of their own, and so have programs.
        measures.retain(|measure| *measure != Measure::FileMbS && !Measure::APPS.contains(measure));
        measures
    }

    pub(crate) fn contestants(&self, measure: Measure) -> Vec<&str> {
        let mut names = Vec::new();
        for row in self.rows.iter().filter(|row| row.measure == measure) {
            if !names.contains(&row.contestant.as_str()) {
                names.push(row.contestant.as_str());
            }
        }
        names
    }

    pub(crate) fn sizes(&self, measure: Measure) -> Vec<u64> {
        let mut sizes: Vec<u64> = self.rows.iter().filter(|row| row.measure == measure).map(|row| row.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Contestants by sizes, as many sizes beside each other as fit.
    fn table(&self, measure: Measure, text: &mut String) {
        let contestants = self.contestants(measure);
        let floor_of = |contestant: &str| self.floor_label(measure).map(|_| floor(&self.bench, measure, contestant));
        let ratio = self.floor_label(measure).map_or(String::new(), |floor| format!(", × {floor}"));
        let _ = writeln!(text, "\n{}: median [p10–p90]{ratio}", title(measure));
        for sizes in self.sizes(measure).chunks(SIZES_BESIDE) {
            let mut lines = vec![
                [String::new()].into_iter().chain(sizes.iter().map(|size| self.size_label(measure, *size))).collect(),
            ];
            for contestant in &contestants {
                let rows: Vec<Option<&Row>> = sizes.iter().map(|size| self.row(contestant, measure, *size)).collect();
                if rows.iter().any(Option::is_some) {
                    let floor = floor_of(contestant);
                    let cells = rows.into_iter().map(|row| row.map_or("–".to_owned(), |row| cell(row, floor)));
                    lines.push([(*contestant).to_owned()].into_iter().chain(cells).collect());
                }
            }
            text.push('\n');
            align(&lines, text);
        }
    }

    pub(crate) fn size_label(&self, measure: Measure, size: u64) -> String {
        size_label(&self.bench, measure, size)
    }

    /// The first paper's table 1, for every size.
    fn table_one(&self) -> String {
        const COLUMNS: [(&str, &str); 3] = [
            ("fixed-1408", "fixed pipeline"),
            ("store-and-forward", "store & forward"),
            ("adaptive", "adaptive pipeline"),
        ];
        let mut lines = vec![vec!["payload".to_owned()]];
        lines[0].extend(COLUMNS.map(|(_, column)| column.to_owned()));
        for size in self.sizes(Measure::LatencyNs) {
            let mut line = vec![bytes_label(size)];
            for (contestant, _) in COLUMNS {
                let figure = |measure| self.row(contestant, measure, size).map(|row| figure(measure, row.median));
                let both = [Measure::LatencyNs, Measure::BandwidthGbS].map(|m| figure(m).unwrap_or("–".to_owned()));
                line.push(both.join(" / "));
            }
            lines.push(line);
        }
        let mut text = String::from("\nLatency and bandwidth of the pipelining alternatives (the paper's table 1)\n\n");
        align(&lines, &mut text);
        text
    }

    /// Writes the report to a directory, which is made where it is missing: JSON, and plots.
    pub fn write(&self, directory: &Path) -> Result<Vec<PathBuf>, BenchError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| BenchError::Report { path, source }
        };
        std::fs::create_dir_all(directory).map_err(failed(directory))?;
        let mut written = Vec::new();
        for (name, content) in
            [(format!("{}.json", self.bench), self.to_json()), (format!("{}.txt", self.bench), self.to_text())]
        {
            let path = directory.join(name);
            std::fs::write(&path, content + "\n").map_err(failed(&path))?;
            written.push(path);
        }
        for (name, svg) in crate::plot::all(self, directory)? {
            let path = directory.join(name);
            std::fs::write(&path, svg).map_err(failed(&path))?;
            written.push(path);
        }
        Ok(written)
    }
}

pub(crate) fn cell(row: &Row, floor: Option<&str>) -> String {
    let spread = format!("{} [{}]", figure(row.measure, row.median), range(row.measure, row.p10, row.p90));
    match row.of_floor {
        Some(ratio) if floor != Some(&row.contestant) => format!("{spread} ×{}", short(ratio)),
        _ => spread,
    }
}

/// A table below its title, unless it has nothing but its head.
pub(crate) fn titled(lines: &[Vec<String>], title: &str, text: &mut String) {
    if lines.len() > 1 {
        text.push_str(&format!("\n{title}\n\n"));
        align(lines, text);
    }
}

/// A line of a table.
pub(crate) fn line<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// Lines of cells, each column as wide as its widest cell.
pub(crate) fn align(lines: &[Vec<String>], text: &mut String) {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column: usize| lines.iter().filter_map(move |line| line.get(column));
    let widths: Vec<usize> =
        (0..columns).map(|column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0)).collect();
    for line in lines {
        let mut padded = String::from(" ");
        for (cell, width) in line.iter().zip(&widths) {
            let _ = write!(padded, " {cell:<width$} ");
        }
        let _ = writeln!(text, "{}", padded.trim_end());
    }
}

pub(crate) fn title(measure: Measure) -> &'static str {
    match measure {
        Measure::LatencyNs => "One-way latency",
        Measure::BandwidthGbS => "Bandwidth",
        Measure::MessagesPerS => "Messages per second",
        Measure::MemoryBytes => "Memory of both processes",
        Measure::SenderCpuSPerGb => "CPU time of the sender for a gigabyte, asleep while there is nothing to do",
        Measure::ReceiverCpuSPerGb => "CPU time of the receiver for a gigabyte, asleep while there is nothing to do",
        Measure::SuccessPercent => "Packets received where they were expected",
        Measure::FailedPackets => "Packets of 100,000 not received where they were expected",
        Measure::CopiedPackets => "Packets of 100,000 copied to their place",
        Measure::InterferingPackets => "Packets of others sent among 100,000",
        Measure::FileMbS => "Transfer of a file from memory to memory",
        Measure::CallNs => "A call there and back",
        Measure::FetchNs => "A value fetched, there and back",
        Measure::FetchGbS => "Values fetched, several at a time",
        Measure::CallsPerS => "Calls per second over one connection",
        Measure::RandomPageNs => "A page, in random order",
        Measure::SequentialGbS => "Reading from one end to the other",
        Measure::RedisGetC1Rps => "redis GET, one connection",
        Measure::RedisSetC1Rps => "redis SET, one connection",
        Measure::RedisGetC50Rps => "redis GET, 50 connections",
        Measure::RedisGetC50P16Rps => "redis GET, 50 connections, 16 at a time",
        Measure::NginxC1Rps => "nginx, one connection",
        Measure::NginxC32Rps => "nginx, 32 connections",
        Measure::NginxCloseRps => "nginx, a connection for each request",
        Measure::FtpCurlMbS => "vsftpd to curl",
        Measure::Iperf3GbS => "iperf3",
        Measure::MemcachedGetC1Rps => "memcached GET, one connection",
        Measure::PgbenchTpcbC10Tps => "PostgreSQL, transactions as of TPC-B, 10 connections",
        Measure::PgbenchSelectC1Tps => "PostgreSQL, selects, one connection",
        Measure::Threads2000Rps => "2,000 connections, each with a thread of the server",
        Measure::Echo64mMbS => "64 MiB through socat and cat, and back",
        Measure::HaproxyC16Rps => "haproxy before nginx, 16 connections",
    }
}

/// What a size of this benchmark is, for people.
pub(crate) fn size_label(bench: &str, measure: Measure, size: u64) -> String {
    match bench {
        _ if measure == Measure::CallsPerS => format!("{size} at once"),
        "connections" => format!("{size} VI{}", if size == 1 { "" } else { "s" }),
        "landing" if size < MESSAGE_BYTES as u64 => format!("{size} of 100,000"),
        _ => bytes_label(size),
    }
}

/// A number of bytes for people: exact, in the largest unit that keeps it whole.
pub(crate) fn bytes_label(bytes: u64) -> String {
    if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) {
        format!("{} MiB", bytes >> 20)
    } else if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) {
        format!("{} KiB", bytes >> 10)
    } else {
        format!("{bytes} B")
    }
}

/// The unit in which a value is told, and how many of the measure's own units it is.
fn unit(measure: Measure, value: f64) -> (&'static str, f64) {
    use Measure::{BandwidthGbS, CallNs, CallsPerS, FetchGbS, FetchNs, Iperf3GbS, LatencyNs, MessagesPerS};
    use Measure::{RandomPageNs, SequentialGbS};
    match measure {
        LatencyNs | CallNs | FetchNs | RandomPageNs if value >= 999_500.0 => ("ms", 1e6),
        LatencyNs | CallNs | FetchNs | RandomPageNs if value >= 999.5 => ("µs", 1e3),
        LatencyNs | CallNs | FetchNs | RandomPageNs => ("ns", 1.0),
        BandwidthGbS | FetchGbS | SequentialGbS | Iperf3GbS if value < 0.9995 => ("MB/s", 1e-3),
        BandwidthGbS | FetchGbS | SequentialGbS | Iperf3GbS => ("GB/s", 1.0),
        _ if matches!(measure, MessagesPerS | CallsPerS) || measure.counts_requests() => match value {
            value if value >= 999_500.0 => ("M/s", 1e6),
            value if value >= 999.5 => ("k/s", 1e3),
            _ => ("/s", 1.0),
        },
        Measure::MemoryBytes if value.abs() >= 1_048_576.0 => ("MiB", 1_048_576.0),
        Measure::MemoryBytes => ("KiB", 1024.0),
        Measure::SenderCpuSPerGb | Measure::ReceiverCpuSPerGb if value < 0.9995 => ("ms/GB", 1e-3),
        Measure::SenderCpuSPerGb | Measure::ReceiverCpuSPerGb => ("s/GB", 1.0),
        Measure::SuccessPercent => ("%", 1.0),
        Measure::FailedPackets | Measure::CopiedPackets | Measure::InterferingPackets => ("packets", 1.0),
        // Whatever is left.
        _ => ("MB/s", 1.0),
    }
}

/// A value with its unit, three digits long.
pub(crate) fn figure(measure: Measure, value: f64) -> String {
    let (name, scale) = unit(measure, value);
    format!("{} {name}", short(value / scale))
}

/// Two values in the unit of the first, which is left out.
fn range(measure: Measure, low: f64, high: f64) -> String {
    let (low_unit, scale) = unit(measure, low);
    let (high_unit, _) = unit(measure, high);
    if low_unit == high_unit {
        format!("{}–{}", short(low / scale), short(high / scale))
    } else {
        format!("{}–{}", figure(measure, low), figure(measure, high))
    }
}

/// Three digits.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

const SIZES_BESIDE: usize = 4;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::stats::Cost;
    use crate::{Contestant, FLOOR};

    pub(crate) fn sample() -> Report {
        let row = |contestant: &str, measure, size, median: f64, of_floor| Row {
            contestant: contestant.to_owned(),
            measure,
            size,
            median,
            p10: median * 0.5,
            p90: median * 1.5,
            p99: median * 2.0,
            count: 12,
            of_floor,
            of_vi: None,
            cost: Cost::default(),
        };
        Report {
            bench: "latency".to_owned(),
            command: "highwire bench latency".to_owned(),
            version: "0.1.0".to_owned(),
            machine: Machine::this(2, (0, 1)),
            network: None,
            state: State::Near,
            crossing_ns: Some(52.0),
            rounds: Rounds { total: 12, near: 12, ..Rounds::default() },
            seconds: 20.0,
            notes: vec!["ucx_perftest is not installed".to_owned()],
            rows: vec![
                row(FLOOR, Measure::LatencyNs, 4, 56.0, Some(1.0)),
                row("vi", Measure::LatencyNs, 4, 90.0, Some(1.625)),
                row("tcp-spin", Measure::LatencyNs, 4, 3900.0, None),
                row("vi", Measure::LatencyNs, 8192, 1200.0, Some(1.25)),
            ],
            trace: None,
        }
    }

    /// A row of five trials.
    pub(crate) fn row_of(
        contestant: Contestant,
        measure: Measure,
        size: u64,
        median: f64,
        of_floor: Option<f64>,
    ) -> Row {
        Row {
            contestant: contestant.name().to_owned(),
            measure,
            size,
            median,
            p10: median * 0.9,
            p90: median * 1.1,
            p99: median * 1.2,
            count: 5,
            of_floor,
            of_vi: None,
            cost: Cost::default(),
        }
    }

    /// For each of these there must be a line that has all its parts.
    pub(crate) fn assert_lines(text: &str, lines: &[&[&str]]) {
        for parts in lines {
            let found = text.lines().any(|line| parts.iter().all(|part| line.contains(part)));
            assert!(found, "no line has {parts:?} in\n{text}");
        }
    }

    #[test]
    fn the_json_has_the_promised_shape() {
        let json: serde_json::Value = serde_json::from_str(&sample().to_json()).unwrap();
        assert_eq!(json["state"], "near");
        assert!(json["machine"].is_object() && json["machine"]["cpu"].is_string());
        let vi = json["rows"].as_array().unwrap().iter().find(|row| row["contestant"] == "vi").unwrap();
        assert_eq!(vi["measure"], "latency_ns");
        assert_eq!((vi["size"].as_u64(), vi["count"].as_u64()), (Some(4), Some(12)));
        for figure in ["median", "p10", "p90", "p99", "of_floor"] {
            assert!(vi[figure].is_f64(), "{figure} in {vi}");
        }
        let tcp = json["rows"].as_array().unwrap().iter().find(|row| row["contestant"] == "tcp-spin").unwrap();
        assert!(tcp["of_floor"].is_null() && tcp.as_object().unwrap().contains_key("of_floor"));
        for measure in [
            Measure::BandwidthGbS,
            Measure::MessagesPerS,
            Measure::MemoryBytes,
            Measure::SenderCpuSPerGb,
            Measure::ReceiverCpuSPerGb,
            Measure::SuccessPercent,
            Measure::FailedPackets,
            Measure::CopiedPackets,
            Measure::InterferingPackets,
            Measure::FileMbS,
            Measure::CallNs,
            Measure::FetchNs,
            Measure::FetchGbS,
            Measure::CallsPerS,
            Measure::RandomPageNs,
            Measure::SequentialGbS,
        ]
        .into_iter()
        .chain(Measure::APPS)
        {
            assert_eq!(serde_json::to_value(measure).unwrap(), measure.name());
        }
        assert_eq!(Measure::SenderCpuSPerGb.name(), "sender_cpu_s_per_gb");
    }

    #[test]
    fn a_report_is_read_back_as_it_was() {
        let report = sample();
        assert_eq!(serde_json::from_str::<Report>(&report.to_json()).unwrap(), report);
    }

    #[test]
    fn the_text_says_everything_needed_to_judge_it() {
        let text = sample().to_text();
        let machine = sample().machine;
        for part in ["highwire bench latency", "near", "52 ns", "12 in 20.0 s", "ucx_perftest is not", &machine.kernel]
        {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
        for part in ["90.0 ns [45.0–135] ×1.62", "3.90 µs [1.95–5.85]", "8 KiB", "1.20 µs"] {
            assert!(text.contains(part), "{part:?} is missing in\n{text}");
        }
        let floor = text.lines().find(|line| line.contains("raw-ring  ")).unwrap();
        assert!(floor.contains('–') && !floor.contains('×'), "{floor}");
    }

    #[test]
    fn figures_have_three_digits_and_a_fitting_unit() {
        assert_eq!(figure(Measure::LatencyNs, 55.73), "55.7 ns");
        assert_eq!(figure(Measure::LatencyNs, 999.7), "1.00 µs");
        assert_eq!(figure(Measure::BandwidthGbS, 37.04), "37.0 GB/s");
        assert_eq!(figure(Measure::BandwidthGbS, 0.0123), "12.3 MB/s");
        assert_eq!(figure(Measure::MessagesPerS, 21_400_000.0), "21.4 M/s");
        assert_eq!(figure(Measure::MemoryBytes, 64.0 * 1_048_576.0), "64.0 MiB");
        assert_eq!(bytes_label(240), "240 B");
        assert_eq!(bytes_label(32768), "32 KiB");
        assert_eq!(bytes_label(1500), "1500 B");
    }
}
