//! From trials to rows: which trials count, and what they say.
//!
//! A *trial* is one burst of one contestant. A *round* is one trial of every contestant at one size,
//! one directly after the other. All rows of a run are from one state of the machine, that in which
//! most rounds fell; a trial in another state is dropped and counted. What contestants are judged by
//! is the ratio to the floor in the same round, since both then met the same machine.

use crate::rpc::REFERENCE_BYTES;
use crate::{Contestant, State};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The contestant to whom all others are compared, but for [`floor`]'s exceptions.
pub const FLOOR: &str = "raw-ring";

/// The contestant to whom a contestant of a benchmark is compared.
pub(crate) fn floor(bench: &str, measure: Measure, contestant: &str) -> &'static str {
    match (bench, measure) {
        // A program under `highwire run` is compared to the same program without.
        ("lane", _) if contestant.ends_with("-spin") => Contestant::TcpSpin.name(),
        ("lane", _) if contestant.ends_with("-one-core") => Contestant::TcpBlockOneCore.name(),
        ("lane", _) => Contestant::TcpBlock.name(),
        ("apps", _) => Contestant::Plain.name(),
        ("rpc", _) => Contestant::Shm.name(),
        ("netmem", _) => Contestant::MappedFile.name(),
        ("wire", Measure::LatencyNs) => Contestant::UdpSpin.name(),
        ("wire", _) => Contestant::TcpBlock.name(),
        ("landing", _) => Contestant::Copying.name(),
        ("sockets", Measure::LatencyNs) => Contestant::Vi.name(),
        ("sockets", Measure::BandwidthGbS) => Contestant::ViBuffered.name(),
        ("sockets", Measure::FileMbS) => Contestant::Copy.name(),
        ("sockets", _) => Contestant::TcpNagle.name(),
        _ => FLOOR,
    }
}

/// A figure of a virtual interface.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct OfVi {
    pub(crate) contestant: &'static str,
    pub(crate) measure: Measure,
    pub(crate) size: u64,
    /// So many of them are what is compared to.
    pub(crate) times: f64,
}

/// What a virtual interface that takes the same way does, to which calls are compared: a call is two messages, and
/// values come as fast as messages.
pub(crate) fn beside(bench: &str, measure: Measure, contestant: &str, size: u64) -> Option<OfVi> {
    let vi = match contestant {
        _ if bench != "rpc" => return None,
        name if name == Contestant::Shm.name() => Contestant::Vi,
        name if name == Contestant::Udp.name() => Contestant::ViUdp,
        name if name == Contestant::UdpSealed.name() => Contestant::ViUdpSealed,
        _ => return None,
    };
    let (measure, size, times) = match measure {
        Measure::CallNs => (Measure::LatencyNs, REFERENCE_BYTES as u64, 2.0),
        Measure::FetchGbS => (Measure::BandwidthGbS, size, 1.0),
        _ => return None,
    };
    Some(OfVi { contestant: vi.name(), measure, size, times })
}

/// What a figure says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Half of a round trip, in nanoseconds.
    LatencyNs,
    /// Payload bytes in a nanosecond.
    BandwidthGbS,
    /// Messages in a second.
    MessagesPerS,
    /// Memory of both processes, what they share counted once.
    MemoryBytes,
    /// CPU seconds of the sending process for a gigabyte that arrived.
    SenderCpuSPerGb,
    /// CPU seconds of the receiving process for it.
    ReceiverCpuSPerGb,
    /// Packets of a hundred whose payloads were received where they were expected.
    SuccessPercent,
    /// Packets of 100,000 whose payloads were not.
    FailedPackets,
    /// Packets of 100,000 whose payloads were copied to their place.
    CopiedPackets,
    /// Packets of others that were really sent among 100,000.
    InterferingPackets,
    /// Bytes of a file in a microsecond.
    FileMbS,
    /// A remote procedure call without arguments or results, there and back.
    CallNs,
    /// A remote procedure call that is answered by a value.
    FetchNs,
    /// Bytes of values in a nanosecond, several fetches under way at a time.
    FetchGbS,
    /// Calls in a second over one connection, as many under way at a time as the size says.
    CallsPerS,
    /// A page of a region, in random order.
    RandomPageNs,
    /// Bytes of a region in a nanosecond, from one end to the other.
    SequentialGbS,
    /// Requests of redis in a second: GET over one connection.
    #[serde(rename = "redis_get_c1_rps")]
    RedisGetC1Rps,
    /// The same of SET.
    #[serde(rename = "redis_set_c1_rps")]
    RedisSetC1Rps,
    /// GET over 50 connections.
    #[serde(rename = "redis_get_c50_rps")]
    RedisGetC50Rps,
    /// The same, 16 requests at a time on each.
    #[serde(rename = "redis_get_c50_p16_rps")]
    RedisGetC50P16Rps,
    /// Requests of nginx in a second over one connection that is kept.
    #[serde(rename = "nginx_c1_rps")]
    NginxC1Rps,
    /// The same over 32 connections.
    #[serde(rename = "nginx_c32_rps")]
    NginxC32Rps,
    /// The same, 32 at a time, each request over a connection of its own.
    #[serde(rename = "nginx_close_rps")]
    NginxCloseRps,
    /// Bytes of a file in a microsecond, from vsftpd to curl.
    #[serde(rename = "ftp_curl_mb_s")]
    FtpCurlMbS,
    /// Bytes of iperf3 in a nanosecond.
    #[serde(rename = "iperf3_gb_s")]
    Iperf3GbS,
    /// Requests of memcached in a second: GET over one connection.
    #[serde(rename = "memcached_get_c1_rps")]
    MemcachedGetC1Rps,
    /// Transactions of PostgreSQL in a second, as of TPC-B, over 10 connections.
    #[serde(rename = "pgbench_tpcb_c10_tps")]
    PgbenchTpcbC10Tps,
    /// The same that only select, over one connection.
    #[serde(rename = "pgbench_select_c1_tps")]
    PgbenchSelectC1Tps,
    /// Requests in a second over 2,000 connections, each with a thread of its server.
    #[serde(rename = "threads_2000_rps")]
    Threads2000Rps,
    /// Bytes of a file of 64 MiB in a microsecond, there and back through socat and cat.
    #[serde(rename = "echo_64m_mb_s")]
    Echo64mMbS,
    /// Requests in a second over 16 connections to haproxy, which asks nginx.
    #[serde(rename = "haproxy_c16_rps")]
    HaproxyC16Rps,
}

impl Measure {
    /// Those of `bench apps`, in the order of its reports.
    pub const APPS: [Measure; 15] = [
        Measure::RedisGetC1Rps,
        Measure::RedisSetC1Rps,
        Measure::RedisGetC50Rps,
        Measure::RedisGetC50P16Rps,
        Measure::NginxC1Rps,
        Measure::NginxC32Rps,
        Measure::NginxCloseRps,
        Measure::FtpCurlMbS,
        Measure::Iperf3GbS,
        Measure::MemcachedGetC1Rps,
        Measure::PgbenchTpcbC10Tps,
        Measure::PgbenchSelectC1Tps,
        Measure::Threads2000Rps,
        Measure::Echo64mMbS,
        Measure::HaproxyC16Rps,
    ];

    /// Those that `bench rpc` has of its own, in the order of its reports.
    pub const RPC: [Measure; 4] = [Measure::CallNs, Measure::FetchNs, Measure::FetchGbS, Measure::CallsPerS];

    /// Those that `bench netmem` has of its own.
    pub const NETMEM: [Measure; 2] = [Measure::RandomPageNs, Measure::SequentialGbS];

    /// Its name, as in reports.
    pub fn name(self) -> &'static str {
        match self {
            Measure::LatencyNs => "latency_ns",
            Measure::BandwidthGbS => "bandwidth_gb_s",
            Measure::MessagesPerS => "messages_per_s",
            Measure::MemoryBytes => "memory_bytes",
            Measure::SenderCpuSPerGb => "sender_cpu_s_per_gb",
            Measure::ReceiverCpuSPerGb => "receiver_cpu_s_per_gb",
            Measure::SuccessPercent => "success_percent",
            Measure::FailedPackets => "failed_packets",
            Measure::CopiedPackets => "copied_packets",
            Measure::InterferingPackets => "interfering_packets",
            Measure::FileMbS => "file_mb_s",
            Measure::CallNs => "call_ns",
            Measure::FetchNs => "fetch_ns",
            Measure::FetchGbS => "fetch_gb_s",
            Measure::CallsPerS => "calls_per_s",
            Measure::RandomPageNs => "random_page_ns",
            Measure::SequentialGbS => "sequential_gb_s",
            Measure::RedisGetC1Rps => "redis_get_c1_rps",
            Measure::RedisSetC1Rps => "redis_set_c1_rps",
            Measure::RedisGetC50Rps => "redis_get_c50_rps",
            Measure::RedisGetC50P16Rps => "redis_get_c50_p16_rps",
            Measure::NginxC1Rps => "nginx_c1_rps",
            Measure::NginxC32Rps => "nginx_c32_rps",
            Measure::NginxCloseRps => "nginx_close_rps",
            Measure::FtpCurlMbS => "ftp_curl_mb_s",
            Measure::Iperf3GbS => "iperf3_gb_s",
            Measure::MemcachedGetC1Rps => "memcached_get_c1_rps",
            Measure::PgbenchTpcbC10Tps => "pgbench_tpcb_c10_tps",
            Measure::PgbenchSelectC1Tps => "pgbench_select_c1_tps",
            Measure::Threads2000Rps => "threads_2000_rps",
            Measure::Echo64mMbS => "echo_64m_mb_s",
            Measure::HaproxyC16Rps => "haproxy_c16_rps",
        }
    }

    /// True if less is better.
    pub fn less_is_better(self) -> bool {
        use Measure::{BandwidthGbS, CallsPerS, FetchGbS, FileMbS, MessagesPerS, SequentialGbS, SuccessPercent};
        let more = matches!(self, BandwidthGbS | MessagesPerS | SuccessPercent | FileMbS | FetchGbS | CallsPerS);
        !more && self != SequentialGbS && !Measure::APPS.contains(&self)
    }

    /// True if a trial is longer than a state of the machine may be, so that it is of none.
    fn outlasts_states(self) -> bool {
        self == Measure::FileMbS || Measure::APPS.contains(&self)
    }

    /// True if it is in requests or transactions for a second, rather than in bytes.
    pub(crate) fn counts_requests(self) -> bool {
        self.name().ends_with("_rps") || self.name().ends_with("_tps")
    }

    /// True if the figure is from a trial that another measure already stands for.
    fn is_second_figure(self) -> bool {
        use Measure::{
            CopiedPackets, FailedPackets, InterferingPackets, MessagesPerS, ReceiverCpuSPerGb, SuccessPercent,
        };
        matches!(
            self,
            MessagesPerS | ReceiverCpuSPerGb | SuccessPercent | FailedPackets | CopiedPackets | InterferingPackets
        )
    }
}

/// One figure of one contestant.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    pub(crate) round: u32,
    pub(crate) contestant: &'static str,
    pub(crate) measure: Measure,
    pub(crate) size: u64,
    pub(crate) value: f64,
    pub(crate) state: State,
    /// One of the processes lost its CPU for a while.
    pub(crate) preempted: bool,
    pub(crate) cost: Cost,
}

/// What requests cost, where a trial is many of them: in `bench apps`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Ninety-nine of a hundred requests were answered within so many microseconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub latency_p99_us: Option<f64>,
    /// CPU microseconds of server and client, in themselves and in the kernel: for a request, or for a gigabyte where
    /// bytes are measured.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cpu_us: Option<f64>,
}

impl Cost {
    /// The medians of some.
    fn median(costs: &[Cost]) -> Cost {
        let of = |figure: fn(&Cost) -> Option<f64>| {
            let values: Vec<f64> = costs.iter().filter_map(figure).collect();
            (!values.is_empty()).then(|| median(&values))
        };
        Cost { latency_p99_us: of(|cost| cost.latency_p99_us), cpu_us: of(|cost| cost.cpu_us) }
    }
}

/// What all trials of one contestant at one size say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Who.
    pub contestant: String,
    /// What.
    pub measure: Measure,
    /// Bytes of a message or of a file, or the number of connections; in `bench rpc` bytes of a value, or calls under way
    /// at a time; in `bench landing` bytes of the destination, or
    /// interfering packets for 100,000 others.
    pub size: u64,
    /// Half of the trials are below.
    pub median: f64,
    /// A tenth of the trials is below.
    pub p10: f64,
    /// Nine tenths are below.
    pub p90: f64,
    /// Ninety-nine hundredths are below.
    pub p99: f64,
    /// Trials that count.
    pub count: usize,
    /// Median over the rounds of the ratio to the floor (`raw-ring`; in `bench wire`, `udp-spin` for
    /// latency and `tcp-block` for the rest; in `bench landing`, `copying`; in `bench sockets`, `vi` for latency,
    /// `vi-buffered` for bandwidth, `tcp-nagle` for messages and `copy` for files; in `bench lane`, the same program
    /// over TCP that waits in the same way; in `bench apps`, `plain`; in `bench rpc`, `shm`; in `bench netmem`, `mapped-file`); nothing where that did not take
    /// part.
    pub of_floor: Option<f64>,
    /// In `bench rpc`: the median over the rounds of the ratio to the virtual interface that takes the same way, to two
    /// of its messages for a call, and to its bandwidth.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub of_vi: Option<f64>,
    /// What a request costs, the median over the trials, where that is measured.
    #[serde(flatten)]
    pub cost: Cost,
}

/// How many rounds fell into which state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rounds {
    /// All in all.
    pub total: usize,
    /// Rounds in which most trials were near.
    pub near: usize,
    /// Rounds in which most trials were far.
    pub far: usize,
    /// Rounds in which most trials were disturbed.
    pub disturbed: usize,
    /// Trials that do not count, in whichever round.
    pub trials_dropped: usize,
    /// Trials that count.
    pub trials_kept: usize,
}

/// The trials that count, as rows.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) state: State,
    pub(crate) rounds: Rounds,
    pub(crate) rows: Vec<Row>,
    /// Rows for which there were too few trials in which nothing else ran.
    pub(crate) disturbed: Vec<(String, Measure, u64)>,
}

/// Chooses the state (`wanted`, or that of most rounds) and makes the rows, with ratios to the floors
/// of `bench`. `None` if no trial is in it.
pub(crate) fn select(bench: &str, trials: &[Trial], wanted: Option<State>) -> Option<Selection> {
    let mut rounds = Rounds::default();
    let mut one_core = 0;
    for states in states_by_round(trials).into_values() {
        rounds.total += 1;
        match majority(&states) {
            State::Near => rounds.near += 1,
            State::Far => rounds.far += 1,
            State::Disturbed => rounds.disturbed += 1,
            State::OneCore => one_core += 1,
        }
    }
    let state = wanted.unwrap_or_else(|| {
        // A disturbed round says little about the machine, so any other state goes before it.
        let by_rounds = [(State::Far, rounds.far), (State::Near, rounds.near), (State::OneCore, one_core)];
        match by_rounds.into_iter().max_by_key(|(_, count)| *count) {
            Some((state, count)) if count > 0 => state,
            _ => State::Disturbed,
        }
    });
    let kept = Kept::of(trials, state);
    rounds.trials_kept = kept.trials.iter().filter(|trial| !trial.measure.is_second_figure()).count();
    rounds.trials_dropped =
        trials.iter().filter(|trial| !trial.measure.is_second_figure()).count() - rounds.trials_kept;
    if kept.trials.is_empty() {
        return None;
    }
    Some(Selection { state, rounds, rows: rows(bench, &kept.trials), disturbed: kept.disturbed })
}

/// The trials that count.
struct Kept<'a> {
    trials: Vec<&'a Trial>,
    disturbed: Vec<(String, Measure, u64)>,
}

impl<'a> Kept<'a> {
    /// Of each contestant at each size, those trials in the right state in which nothing else ran;
    /// where they are too few, all in the right state: a bad row is better than none.
    fn of(trials: &'a [Trial], state: State) -> Kept<'a> {
        let mut by_row: BTreeMap<(Measure, u64, &str), Vec<&Trial>> = BTreeMap::new();
        let counts = |trial: &&Trial| trial.state == state || trial.measure.outlasts_states();
        for trial in trials.iter().filter(counts) {
            by_row.entry((trial.measure, trial.size, trial.contestant)).or_default().push(trial);
        }
        let mut kept = Kept { trials: Vec::new(), disturbed: Vec::new() };
        for ((measure, size, contestant), of_row) in by_row {
            let undisturbed = of_row.iter().filter(|trial| !trial.preempted).count();
            let enough = undisturbed >= UNDISTURBED_LEAST.min(of_row.len());
            if !enough && !measure.is_second_figure() {
                let named = Measure::APPS.contains(&measure) || Measure::RPC.contains(&measure);
                let name = if named { format!("{} with {contestant}", measure.name()) } else { contestant.to_owned() };
                kept.disturbed.push((name, measure, size));
            }
            kept.trials.extend(of_row.into_iter().filter(|trial| !enough || !trial.preempted));
        }
        kept
    }
}

fn states_by_round(trials: &[Trial]) -> BTreeMap<(u32, Measure, u64), Vec<State>> {
    let mut by_round: BTreeMap<_, Vec<State>> = BTreeMap::new();
    for trial in trials.iter().filter(|trial| !trial.measure.is_second_figure()) {
        by_round.entry((trial.round, trial.measure, trial.size)).or_default().push(trial.state);
    }
    by_round
}

fn majority(states: &[State]) -> State {
    let count = |state: State| states.iter().filter(|other| **other == state).count();
    [State::Disturbed, State::Far, State::Near, State::OneCore]
        .into_iter()
        .max_by_key(|state| count(*state))
        .unwrap_or(State::Disturbed)
}

fn rows(bench: &str, kept: &[&Trial]) -> Vec<Row> {
    // Trials come in an order drawn anew each round; rows come in the order of the contestants.
    let known = |name: &str| Contestant::ALL.iter().position(|contestant| contestant.name() == name);
    let mut order: Vec<&'static str> = kept.iter().map(|trial| trial.contestant).collect();
    order.sort_by_key(|name| (known(name).unwrap_or(usize::MAX), *name));
    order.dedup();
    let mut values: BTreeMap<(Measure, u64, usize), Vec<f64>> = BTreeMap::new();
    let mut costs: BTreeMap<(Measure, u64, usize), Vec<Cost>> = BTreeMap::new();
    let mut ratios: BTreeMap<(Measure, u64, usize), Vec<f64>> = BTreeMap::new();
    let mut to_vi: BTreeMap<(Measure, u64, usize), Vec<f64>> = BTreeMap::new();
    let key = |trial: &Trial| (trial.round, trial.measure, trial.size, trial.contestant);
    let by_key: BTreeMap<_, f64> = kept.iter().map(|trial| (key(trial), trial.value)).collect();
    for trial in kept {
        let place = order.iter().position(|name| *name == trial.contestant).unwrap_or(order.len());
        let key = (trial.measure, trial.size, place);
        values.entry(key).or_default().push(trial.value);
        costs.entry(key).or_default().push(trial.cost);
        let floor = floor(bench, trial.measure, trial.contestant);
        if let Some(floor) = by_key.get(&(trial.round, trial.measure, trial.size, floor)) {
            ratios.entry(key).or_default().push(trial.value / floor);
        }
        let vi = beside(bench, trial.measure, trial.contestant, trial.size);
        if let Some(OfVi { contestant, measure, size, times }) = vi
            && let Some(theirs) = by_key.get(&(trial.round, measure, size, contestant))
        {
            to_vi.entry(key).or_default().push(trial.value / (times * theirs));
        }
    }
    values
        .into_iter()
        .map(|((measure, size, place), mut values)| {
            values.sort_by(f64::total_cmp);
            let key = (measure, size, place);
            let of_floor = ratios.get(&key).map(|ratios| median(ratios));
            let of_vi = to_vi.get(&key).map(|ratios| median(ratios));
            Row {
                contestant: order[place].to_owned(),
                measure,
                size,
                median: quantile(&values, 0.5),
                p10: quantile(&values, 0.1),
                p90: quantile(&values, 0.9),
                p99: quantile(&values, 0.99),
                count: values.len(),
                of_floor,
                of_vi,
                cost: Cost::median(costs.get(&key).map_or(&[], Vec::as_slice)),
            }
        })
        .collect()
}

/// The value below which the part `part` of the sorted values lies, interpolated between the two
/// nearest.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = part * last as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    sorted[below] + (sorted[above] - sorted[below]) * (place - place.floor())
}

/// The middle of some values in any order.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, 0.5)
}

/// Trials that make a row by themselves.
const UNDISTURBED_LEAST: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn select(trials: &[Trial], wanted: Option<State>) -> Option<Selection> {
        super::select("latency", trials, wanted)
    }

    fn trial(round: u32, contestant: &'static str, value: f64, state: State) -> Trial {
        Trial {
            round,
            contestant,
            measure: Measure::LatencyNs,
            size: 4,
            value,
            state,
            preempted: false,
            cost: Cost::default(),
        }
    }

    #[test]
    fn quantiles_lie_between_the_values() {
        let values: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.5), 50.0);
        assert_eq!(quantile(&values, 0.1), 10.0);
        assert_eq!(quantile(&values, 0.99), 99.0);
        assert_eq!(quantile(&[1.0, 2.0], 0.5), 1.5);
        assert_eq!(quantile(&[7.0], 0.9), 7.0);
        assert_eq!(quantile(&[], 0.9), 0.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn the_state_of_most_rounds_wins_and_the_others_are_counted() {
        let mut trials = Vec::new();
        for round in 0..5 {
            let (state, value) = if round < 3 { (State::Far, 250.0) } else { (State::Near, 50.0) };
            trials.push(trial(round, FLOOR, value, state));
            trials.push(trial(round, "vi", value * 1.2, state));
        }
        trials.push(trial(5, FLOOR, 9000.0, State::Disturbed));
        let selection = select(&trials, None).unwrap();
        assert_eq!(selection.state, State::Far);
        let expected = Rounds { total: 6, near: 2, far: 3, disturbed: 1, trials_dropped: 5, trials_kept: 6 };
        assert_eq!(selection.rounds, expected);
        let vi = selection.rows.iter().find(|row| row.contestant == "vi").unwrap();
        assert_eq!((vi.median, vi.count), (300.0, 3));
    }

    #[test]
    fn a_wanted_state_beats_the_majority_and_its_absence_is_told() {
        let trials = [
            trial(0, FLOOR, 250.0, State::Far),
            trial(1, FLOOR, 250.0, State::Far),
            trial(2, FLOOR, 50.0, State::Near),
        ];
        assert_eq!(select(&trials, Some(State::Near)).unwrap().rows[0].median, 50.0);
        assert!(select(&trials[..2], Some(State::Near)).is_none());
        assert!(select(&[], None).is_none());
    }

    #[test]
    fn disturbed_rounds_count_only_where_there_is_nothing_else() {
        let busy: Vec<Trial> = (0..9).map(|round| trial(round, FLOOR, 5000.0, State::Disturbed)).collect();
        assert_eq!(select(&busy, None).unwrap().state, State::Disturbed);
        let mut mixed = busy;
        mixed.push(trial(9, FLOOR, 50.0, State::Near));
        assert_eq!(select(&mixed, None).unwrap().state, State::Near);
    }

    #[test]
    fn trials_that_lost_their_cpu_count_only_where_there_are_too_few_others() {
        let preempted = |round| Trial { preempted: true, ..trial(round, "tcp-block", 9e6, State::Near) };
        let mut trials: Vec<Trial> = (0..5).map(|round| trial(round, "tcp-block", 25e3, State::Near)).collect();
        trials.extend((5..20).map(preempted));
        let clean = select(&trials, None).unwrap();
        assert_eq!((clean.rows[0].p99, clean.rows[0].count, clean.rounds.trials_dropped), (25e3, 5, 15));
        assert!(clean.disturbed.is_empty());
        let busy = select(&trials[3..], None).unwrap();
        assert_eq!((busy.rows[0].median, busy.rows[0].count), (9e6, 17));
        assert_eq!(busy.disturbed, [("tcp-block".to_owned(), Measure::LatencyNs, 4)]);
    }

    #[test]
    fn the_ratio_to_the_floor_is_taken_round_by_round() {
        // The machine gets slower from round to round: ratios of medians over all rounds would
        // depend on which rounds each contestant ran in, ratios within a round do not.
        let mut trials = Vec::new();
        for round in 0..9 {
            let floor = 50.0 + 10.0 * f64::from(round);
            trials.push(trial(round, FLOOR, floor, State::Near));
            if round >= 4 {
                trials.push(trial(round, "vi", floor * 1.5, State::Near));
            }
        }
        // A trial whose floor was dropped has no ratio.
        trials.push(trial(20, "vi", 1e9, State::Near));
        let rows = select(&trials, None).unwrap().rows;
        let of = |name: &str| rows.iter().find(|row| row.contestant == name).unwrap().of_floor;
        assert_eq!(of(FLOOR), Some(1.0));
        assert!((of("vi").unwrap() - 1.5).abs() < 1e-9);
    }

    #[test]
    fn on_a_wire_each_measure_has_its_own_floor() {
        let mut trials = vec![trial(0, "udp-spin", 10e3, State::Near), trial(0, "tcp-block", 20e3, State::Near)];
        let bandwidth = |name, value| Trial { measure: Measure::BandwidthGbS, ..trial(0, name, value, State::Near) };
        trials.extend([bandwidth("udp-gso", 6.0), bandwidth("tcp-block", 3.0)]);
        let rows = super::select("wire", &trials, None).unwrap().rows;
        let ratios: Vec<_> = rows.iter().map(|row| (row.contestant.as_str(), row.of_floor.unwrap())).collect();
        assert_eq!(ratios, [("tcp-block", 2.0), ("udp-spin", 1.0), ("tcp-block", 1.0), ("udp-gso", 2.0)]);
    }

    #[test]
    fn in_a_lane_everybody_is_compared_to_tcp_that_waits_as_it_does() {
        let all = [
            ("tcp-spin", 4000.0, 1.0),
            ("tcp-block", 25e3, 1.0),
            ("tcp-block-one-core", 5000.0, 1.0),
            ("unix-spin", 1000.0, 0.25),
            ("run-spin", 200.0, 0.05),
            ("run-block", 250.0, 0.01),
            ("run-one-end", 25e3, 1.0),
            ("run-block-one-core", 5000.0, 1.0),
        ];
        let trials: Vec<Trial> = all.iter().map(|(name, value, _)| trial(0, name, *value, State::Near)).collect();
        let rows = super::select("lane", &trials, None).unwrap().rows;
        for (name, _, ratio) in all {
            let row = rows.iter().find(|row| row.contestant == name).unwrap();
            assert!((row.of_floor.unwrap() - ratio).abs() < 1e-9, "{row:?}");
        }
    }

    #[test]
    fn what_requests_cost_has_medians_of_its_own() {
        let cost = |p99, cpu| Cost { latency_p99_us: p99, cpu_us: Some(cpu) };
        let app = |round, contestant, value, cost| Trial {
            measure: Measure::RedisGetC1Rps,
            cost,
            ..trial(round, contestant, value, State::Far)
        };
        let mut trials =
            vec![app(0, "plain", 20e3, cost(Some(70.0), 40.0)), app(0, "highwire", 160e3, cost(None, 5.0))];
        trials.extend([app(1, "plain", 10e3, cost(Some(90.0), 60.0)), trial(1, "vi", 1.0, State::Near)]);
        let rows = super::select("apps", &trials, Some(State::Near)).unwrap().rows;
        let of = |name: &str| rows.iter().find(|row| row.contestant == name).unwrap();
        assert_eq!((of("plain").median, of("plain").cost), (15e3, cost(Some(80.0), 50.0)));
        assert_eq!((of("highwire").of_floor, of("highwire").cost), (Some(8.0), cost(None, 5.0)));
    }

    #[test]
    fn calls_are_compared_to_shm_and_to_two_messages_that_take_the_same_way() {
        let call = |name, value| Trial { measure: Measure::CallNs, size: 0, ..trial(0, name, value, State::Near) };
        let fetch = |name, value| Trial { measure: Measure::FetchGbS, size: 8, ..trial(0, name, value, State::Near) };
        let stream = |name, value| Trial { measure: Measure::BandwidthGbS, ..fetch(name, value) };
        let mut trials = vec![trial(0, "vi", 100.0, State::Near), trial(0, "vi-udp", 5e3, State::Near)];
        trials.extend([call("shm", 300.0), call("udp", 15e3), call("redis", 30e3)]);
        trials.extend([stream("vi", 10.0), fetch("shm", 9.0), fetch("redis", 3.0), fetch("udp-sealed", 1.0)]);
        let rows = super::select("rpc", &trials, None).unwrap().rows;
        let of = |name: &str, measure| {
            let row = rows.iter().find(|row| row.contestant == name && row.measure == measure).unwrap();
            (row.of_floor, row.of_vi)
        };
        assert_eq!(of("shm", Measure::CallNs), (Some(1.0), Some(1.5)));
        assert_eq!(of("udp", Measure::CallNs), (Some(50.0), Some(1.5)));
        assert_eq!(of("redis", Measure::CallNs), (Some(100.0), None));
        assert_eq!(of("shm", Measure::FetchGbS), (Some(1.0), Some(0.9)));
        assert_eq!(of("redis", Measure::FetchGbS), (Some(3.0 / 9.0), None));
        assert_eq!(of("udp-sealed", Measure::FetchGbS), (Some(1.0 / 9.0), None));
        assert_eq!(of("vi", Measure::LatencyNs), (None, None));
    }

    #[test]
    fn files_count_in_whichever_state_and_are_compared_to_a_copy() {
        let file = |name, value, state| Trial { measure: Measure::FileMbS, ..trial(0, name, value, state) };
        let mut trials = vec![file("sock", 2000.0, State::Far), file("copy", 2500.0, State::Disturbed)];
        trials.extend([trial(0, "vi", 100.0, State::Near), trial(1, "vi", 110.0, State::Near)]);
        let selected = super::select("sockets", &trials, None).unwrap();
        assert_eq!((selected.state, selected.rows.len()), (State::Near, 3));
        let sock = selected.rows.iter().find(|row| row.contestant == "sock").unwrap();
        assert_eq!((sock.median, sock.of_floor), (2000.0, Some(0.8)));
    }

    #[test]
    fn without_a_floor_there_is_no_ratio() {
        let rows = select(&[trial(0, "unix-block", 5000.0, State::OneCore)], None).unwrap().rows;
        assert_eq!(rows[0].of_floor, None);
    }

    #[test]
    fn sizes_and_measures_make_rows_of_their_own_in_order() {
        let mut trials = vec![trial(0, FLOOR, 1.0, State::Near), trial(0, "vi", 2.0, State::Near)];
        trials.push(Trial { size: 64, ..trials[1].clone() });
        trials.push(Trial { measure: Measure::MessagesPerS, ..trials[0].clone() });
        let rows = select(&trials, None).unwrap().rows;
        let keys: Vec<_> = rows.iter().map(|row| (row.measure.name(), row.size, row.contestant.as_str())).collect();
        assert_eq!(
            keys,
            [
                ("latency_ns", 4, "raw-ring"),
                ("latency_ns", 4, "vi"),
                ("latency_ns", 64, "vi"),
                ("messages_per_s", 4, "raw-ring")
            ]
        );
    }
}
