//! `bench apps`: servers and clients that know nothing of Highwire, as they are and under `highwire run`, in turn.
//!
//! A server of each kind and of each contestant runs for the whole time, on the first CPU. A trial is one run of its
//! client on the second, between two probes; it outlasts states of the machine, and so counts in whichever.

mod clients;
mod postgres;
pub(crate) mod servers;

use crate::contest::Contest;
use crate::folder::Folder;
use crate::launch::{self, Usage, Way};
use crate::network::Network;
use crate::pair::Pair;
use crate::progress::Progress;
use crate::report::{Report, figure, line, short, titled};
use crate::rounds::{Record, Shuffle};
use crate::stats::{Cost, Measure, Row, Trial};
use crate::transports::programs::unpack;
use crate::transports::{Contestant, files};
use crate::{BenchError, Options, State};
use clients::{Client, SECONDS, TRIAL};
use servers::{App, Server};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Starts the servers, measures in rounds, and ends them.
pub(crate) fn run(options: &Options, began: Instant) -> Result<Report, BenchError> {
    let mut record = Record::new(options, began);
    let mut cards = programme(options, &mut record.notes)?;
    if cards.is_empty() {
        return Err(BenchError::Missing(format!("nothing can be measured: {}", record.notes.join("; "))));
    }
    let pair = Pair::start(options.one_core, &Network::loopback())?;
    record.note_place(&pair);
    record.notes.extend(NOTES.map(str::to_owned));
    if options.contestants_or_default().contains(&Contestant::Highwire) {
        record.notes.extend(launch::runs_plain()?);
    }
    let mut contest = Contest::open(pair);
    let progress = Progress::new(options, began);
    progress.say("starting servers");
    let mut folder = Folder::for_programs()?;
    let mut hall = Hall::open(&mut cards, &contest, &mut folder, &mut record)?;
    let measured = rounds(&mut cards, &mut hall, &mut contest, &mut record, &progress);
    name_untried(&cards, &mut record);
    progress.done();
    drop(hall);
    folder.forget_groups()?;
    drop(contest);
    measured?;
    record.report()
}

/// One measure at one size.
struct Card {
    measure: Measure,
    size: usize,
    racers: Vec<Racer>,
    longest: Duration,
}

/// One contestant in it.
struct Racer {
    contestant: Contestant,
    /// What it reached last, from which the length of its next trial follows.
    rate: Option<f64>,
}

/// What is to be measured, in the order of a round. What cannot be is left out and told, unless it was asked for by
/// name.
fn programme(options: &Options, notes: &mut Vec<String>) -> Result<Vec<Card>, BenchError> {
    let by_name = !options.measures.is_empty();
    let chosen = |measure: &Measure| !by_name || options.measures.contains(measure);
    let contestants = options.contestants_or_default();
    let mut cards = Vec::new();
    for measure in Measure::APPS.into_iter().filter(chosen) {
        if let Some(why) = App::of(measure).missing() {
            if by_name {
                return Err(BenchError::Missing(format!("{} cannot be measured: {why}", measure.name())));
            }
            notes.push(format!("{} IS LEFT OUT: {why}", measure.name()));
            continue;
        }
        let usual = usual_sizes(measure);
        // Some have no size.
        let mut sizes = if options.sizes.is_empty() || usual == [0] { usual.to_vec() } else { options.sizes.clone() };
        sizes.sort_unstable();
        sizes.dedup();
        for size in sizes {
            if let Some(why) = refused(measure, size) {
                notes.push(why);
                continue;
            }
            let racers = contestants.iter().map(|contestant| Racer { contestant: *contestant, rate: None }).collect();
            cards.push(Card { measure, size, racers, longest: expected(measure, size) });
        }
    }
    Ok(cards)
}

fn usual_sizes(measure: Measure) -> &'static [usize] {
    match App::of(measure) {
        App::Redis => &[3, 8192],
        // The page that nginx comes with.
        App::Nginx | App::Haproxy => &[612],
        App::Vsftpd => &[1 << 30],
        // What iperf3 writes at a time, where nothing else is said.
        App::Iperf3 => &[128 << 10],
        App::Memcached => &[100],
        App::Postgres | App::Threads | App::Socat => &[0],
    }
}

/// Why this cannot be measured at this size.
fn refused(measure: Measure, size: usize) -> Option<String> {
    let most = match App::of(measure) {
        App::Redis | App::Nginx | App::Haproxy => 16 << 20,
        App::Vsftpd => return files::too_large(size),
        // Both have limits of their own.
        App::Iperf3 => 1 << 20,
        App::Memcached => 512 << 10,
        App::Postgres | App::Threads | App::Socat => return None,
    };
    (size > most).then(|| format!("left out, since {most} bytes are the most there: {} at {size}", measure.name()))
}

/// How long a trial may take before one was made.
fn expected(measure: Measure, size: usize) -> Duration {
    match App::of(measure) {
        App::Redis | App::Memcached => 2 * TRIAL,
        App::Nginx | App::Haproxy | App::Iperf3 | App::Postgres => Duration::from_secs(SECONDS).mul_f64(1.3),
        App::Threads => 4 * TRIAL,
        App::Socat => Duration::from_secs(1),
        App::Vsftpd => Duration::from_secs_f64(0.3 + size as f64 / 1e9),
    }
}

/// All servers that run, and what their clients need.
struct Hall {
    servers: Vec<Server>,
    /// CPUs of the servers and of the clients.
    cpus: (usize, usize),
    memcached_get: PathBuf,
    threads: PathBuf,
    place: PathBuf,
}

impl Hall {
    /// Starts what the cards need; who cannot be started takes no part.
    fn open(
        cards: &mut [Card],
        contest: &Contest,
        folder: &mut Folder,
        record: &mut Record<'_>,
    ) -> Result<Hall, BenchError> {
        let memcached_get = unpack(folder, "memcached_get", MEMCACHED_GET)?;
        let threads = unpack(folder, App::Threads.name(), THREADS)?;
        let ramdisk = Rc::clone(&contest.pair.link.ramdisk);
        let place = folder.path().to_owned();
        let mut hall = Hall { servers: Vec::new(), cpus: contest.pair.cpus, memcached_get, threads, place };
        let mut apps: Vec<App> = cards.iter().map(|card| App::of(card.measure)).collect();
        apps.sort();
        apps.dedup();
        for app in apps {
            let of_app = |card: &&mut Card| App::of(card.measure) == app;
            let mut sizes: Vec<usize> = cards.iter_mut().filter(of_app).map(|card| card.size).collect();
            sizes.sort_unstable();
            sizes.dedup();
            for contestant in record.options.contestants_or_default() {
                match Server::start(app, way(contestant), hall.cpus.0, &sizes, folder, Some(&ramdisk)) {
                    Ok(server) => hall.servers.push(server),
                    Err(why) => {
                        fail(record, contestant, app.name(), &why.to_string())?;
                        let lost = cards.iter_mut().filter(of_app);
                        lost.for_each(|card| card.racers.retain(|racer| racer.contestant != contestant));
                    }
                }
            }
        }
        Ok(hall)
    }

    fn server(&self, measure: Measure, contestant: Contestant) -> Option<&Server> {
        let app = App::of(measure);
        self.servers.iter().find(|server| server.app == app && server.way == way(contestant))
    }

    /// One run of a client.
    fn trial(&self, card: (Measure, usize), contestant: Contestant, requests: usize) -> Result<Found, String> {
        let (measure, size) = card;
        let server = self.server(measure, contestant).ok_or("its server is gone")?;
        let [memcached_get, threads, place]: [&Path; 3] = [&self.memcached_get, &self.threads, &self.place];
        let (port, way, cpu) = (server.port, server.way, self.cpus.1);
        let client = Client { measure, size, port, way, cpu, memcached_get, threads, place };
        let (clock, everybody, before) = (Instant::now(), Usage::of_machine(), server.usage());
        let (outcome, client_seconds) = client.run(requests)?;
        let seconds = client_seconds + server.usage().seconds_since(before);
        let others = Usage::of_machine().seconds_since(everybody) - seconds;
        let cpu_us = Some(1e6 * seconds / outcome.amount.max(f64::MIN_POSITIVE));
        Ok(Found {
            value: outcome.value,
            cost: Cost { latency_p99_us: outcome.latency_p99_us, cpu_us },
            preempted: others > OTHERS_PART_MAX * clock.elapsed().as_secs_f64() + OTHERS_SECONDS_MAX,
        })
    }
}

/// What a trial has found.
struct Found {
    value: f64,
    cost: Cost,
    /// Something else had a CPU for a good part of it.
    preempted: bool,
}

fn rounds(
    cards: &mut [Card],
    hall: &mut Hall,
    contest: &mut Contest,
    record: &mut Record<'_>,
    progress: &Progress,
) -> Result<(), BenchError> {
    let mut random = Shuffle::new();
    for round in 0.. {
        if cards.iter().all(|card| card.racers.is_empty()) {
            break;
        }
        for card in &mut *cards {
            random.shuffle(&mut card.racers);
            let mut lost = Vec::new();
            for racer in &mut card.racers {
                if !record.wait_for_state(contest, progress)? || Instant::now() + card.longest > record.deadline {
                    return Ok(());
                }
                let clock = Instant::now();
                let state = match race((card.measure, card.size), racer, hall, contest, record, round)? {
                    Ok(state) => state,
                    Err(why) => {
                        fail(record, racer.contestant, card.measure.name(), &why)?;
                        lost.push(racer.contestant);
                        State::Disturbed
                    }
                };
                card.longest = card.longest.max(clock.elapsed());
                progress.step(round, state);
            }
            card.racers.retain(|racer| !lost.contains(&racer.contestant));
        }
    }
    Ok(())
}

/// Names what is measured, but was not even once, since the time was over before.
fn name_untried(cards: &[Card], record: &mut Record<'_>) {
    for card in cards {
        for racer in &card.racers {
            let (name, size) = (racer.contestant.name(), card.size as u64);
            let tried = |trial: &Trial| (trial.contestant, trial.measure, trial.size) == (name, card.measure, size);
            if !record.trials.iter().any(tried) {
                let what = card.measure.name();
                let why = "there was no time for it: more --seconds, or fewer --measures";
                record.notes.push(format!("{what} at {size} with {name} IS LEFT OUT: {why}"));
            }
        }
    }
}

/// One trial between two probes, and before the first one a short one that counts for nothing.
fn race(
    card: (Measure, usize),
    racer: &mut Racer,
    hall: &Hall,
    contest: &mut Contest,
    record: &mut Record<'_>,
    round: u32,
) -> Result<Result<State, String>, BenchError> {
    let (measure, size) = card;
    if racer.rate.is_none() && App::of(measure) == App::Redis {
        match hall.trial(card, racer.contestant, REQUESTS_FIRST) {
            Ok(found) => racer.rate = Some(found.value),
            Err(why) => return Ok(Err(why)),
        }
    }
    let requests = racer.rate.map_or(0, |rate| (rate * TRIAL.as_secs_f64()) as usize).max(REQUESTS_FIRST);
    let before_ns = contest.probe()?;
    // The other process looks for its next command for a while, on the CPU of the client.
    std::thread::sleep(PEER_FALLS_ASLEEP);
    let ran = hall.trial(card, racer.contestant, requests);
    let after_ns = contest.probe()?;
    let Found { value, cost, preempted } = match ran {
        Ok(found) => found,
        Err(why) => return Ok(Err(why)),
    };
    racer.rate = Some(value);
    let state = if contest.pair.link.spinning { State::of_trial(before_ns, after_ns) } else { State::OneCore };
    record.note_crossings(state, before_ns, after_ns);
    let contestant = racer.contestant.name();
    let size = size as u64;
    record.trials.push(Trial { round, contestant, measure, size, value, state, preempted, cost });
    Ok(Ok(state))
}

/// Whoever fails takes no further part, and that is told; where it was asked for by name, the run ends.
fn fail(record: &mut Record<'_>, contestant: Contestant, what: &str, why: &str) -> Result<(), BenchError> {
    let note = format!("{what} FAILED with {contestant}, and takes no further part: {why}");
    if !record.options.measures.is_empty() {
        return Err(BenchError::Program { name: contestant.name(), why: format!("{what}: {why}") });
    }
    record.notes.push(note);
    Ok(())
}

fn way(contestant: Contestant) -> Way {
    if contestant == Contestant::Highwire { Way::Highwire } else { Way::Plain }
}

/// Everything, plain and under `highwire run` beside each other.
pub(crate) fn tables(report: &Report) -> String {
    let mut text = String::new();
    let [plain, highwire] = [Contestant::Plain, Contestant::Highwire].map(Contestant::name);
    let heads = ["", "size", plain, highwire, "ratio", "p99: plain", highwire, "CPU: plain", highwire];
    let mut lines = vec![line(heads)];
    for (measure, size) in measured(report) {
        let rows = [plain, highwire].map(|name| report.row(name, measure, size));
        let cells =
            |cell: &dyn Fn(&Row) -> Option<String>| rows.map(|row| row.and_then(cell).unwrap_or("–".to_owned()));
        let [plain, highwire] = cells(&|row| Some(crate::report::cell(row, Some(&row.contestant))));
        let [plain_p99, highwire_p99] = cells(&|row| Some(figure(Measure::LatencyNs, 1e3 * row.cost.latency_p99_us?)));
        let [plain_cpu, highwire_cpu] = cells(&|row| Some(cpu_figure(measure, row.cost.cpu_us?)));
        let [_, ratio] = cells(&|row| row.of_floor.map(|ratio| format!("×{}", short(ratio))));
        let label = report.size_label(measure, size);
        let cells = [measure.name(), &label, &plain, &highwire, &ratio, &plain_p99, &highwire_p99, &plain_cpu];
        lines.push(cells.map(str::to_owned).into_iter().chain([highwire_cpu]).collect());
    }
    let title = "Programs as they are, and under `highwire run`: median [p10–p90]; CPU of a request, or of a gigabyte";
    titled(&lines, title, &mut text);
    text
}

/// What was measured, in the order of rows.
fn measured(report: &Report) -> Vec<(Measure, u64)> {
    let mut cards: Vec<(Measure, u64)> = report.rows.iter().map(|row| (row.measure, row.size)).collect();
    cards.dedup();
    cards
}

fn cpu_figure(measure: Measure, cpu_us: f64) -> String {
    match measure.counts_requests() {
        true => figure(Measure::LatencyNs, 1e3 * cpu_us),
        false => figure(Measure::SenderCpuSPerGb, cpu_us / 1e6),
    }
}

/// What stands at each bar of the plot: a name, and the ratio.
pub(crate) fn heights(report: &Report) -> Vec<(String, [f64; 3])> {
    let bar = |(measure, size): (Measure, u64)| {
        let ratio = report.row(Contestant::Highwire.name(), measure, size)?.of_floor?;
        Some((format!("{}, {}: ×{}", measure.name(), report.size_label(measure, size), short(ratio)), [ratio; 3]))
    };
    measured(report).into_iter().filter_map(bar).collect()
}

/// Our client of memcached, as the build made it.
const MEMCACHED_GET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/memcached_get"));

/// Client and server with a thread for each connection.
const THREADS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/threads"));

/// What a reader must know to judge the rows.
const NOTES: [&str; 3] = [
    "servers are on the first CPU, clients on the second; a connection at a time, or as many as the name says (nginx_close: \
     32 at a time)",
    "ratio is highwire ÷ plain, the median of those within a round",
    "CPU time is that of server and client, in themselves and in the kernel, by the kernel's ticks",
];

/// Requests of the run before the first trial of redis, and the fewest of any.
const REQUESTS_FIRST: usize = 2000;
/// CPU time that others may use beside a trial: a part of its length, and what the kernel's ticks leave unsaid.
const OTHERS_PART_MAX: f64 = 0.1;
const OTHERS_SECONDS_MAX: f64 = 0.03;
/// Longer than the second process waits awake for a command.
const PEER_FALLS_ASLEEP: Duration = Duration::from_millis(6);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bench;
    use crate::report::tests::{assert_lines, row_of, sample};

    fn report() -> Report {
        let row = |contestant, measure, size, median, ratio, p99, cpu| Row {
            cost: Cost { latency_p99_us: p99, cpu_us: Some(cpu) },
            ..row_of(contestant, measure, size, median, Some(ratio))
        };
        let (get, ftp) = (Measure::RedisGetC1Rps, Measure::FtpCurlMbS);
        let rows = vec![
            row(Contestant::Plain, get, 3, 20e3, 1.0, Some(70.0), 45.0),
            row(Contestant::Highwire, get, 3, 170e3, 8.5, Some(9.0), 11.0),
            row(Contestant::Plain, ftp, 1 << 30, 1500.0, 1.0, None, 800e3),
        ];
        Report { bench: Bench::Apps.name().to_owned(), rows, ..sample() }
    }

    #[test]
    fn both_stand_beside_each_other_with_what_they_cost() {
        let text = report().to_text();
        assert_lines(
            &text,
            &[
                &[
                    "redis_get_c1_rps",
                    "3 B",
                    "20.0 k/s",
                    "170 k/s",
                    "×8.50",
                    "70.0 µs",
                    "9.00 µs",
                    "45.0 µs",
                    "11.0 µs",
                ],
                &["ftp_curl_mb_s", "1024 MiB", "1500 MB/s", "–", "800 ms/GB"],
            ],
        );
        let json: serde_json::Value = serde_json::from_str(&report().to_json()).unwrap();
        assert_eq!((&json["rows"][1]["latency_p99_us"], &json["rows"][1]["cpu_us"]), (&9.0.into(), &11.0.into()));
        assert!(!json["rows"][2].as_object().unwrap().contains_key("latency_p99_us"), "{json}");
    }

    #[test]
    fn ratios_become_a_plot() {
        let plots = crate::plot::all(&report(), Path::new("somewhere")).unwrap();
        let names: Vec<&str> = plots.iter().map(|plot| plot.0.as_str()).collect();
        assert_eq!(names, ["apps-ratio.svg"]);
        assert!(plots[0].1.contains("redis_get_c1_rps, 3 B: ×8.50"), "{}", plots[0].1);
    }

    #[test]
    fn what_is_chosen_is_measured_at_sizes_that_are_possible() {
        let keys = |options: &Options| -> Vec<(Measure, usize)> {
            let mut notes = Vec::new();
            programme(options, &mut notes).unwrap().iter().map(|card| (card.measure, card.size)).collect()
        };
        let measures = vec![Measure::Iperf3GbS, Measure::RedisSetC1Rps];
        let options = Options { measures, ..Options::new(Bench::Apps) };
        let usual = [(Measure::RedisSetC1Rps, 3), (Measure::RedisSetC1Rps, 8192), (Measure::Iperf3GbS, 131_072)];
        assert_eq!(keys(&options), usual);
        let sizes = vec![2 << 20, 64, 64];
        let expected = [(Measure::RedisSetC1Rps, 64), (Measure::RedisSetC1Rps, 2 << 20), (Measure::Iperf3GbS, 64)];
        assert_eq!(keys(&Options { sizes, ..options }), expected);
    }
}
