//! Other libraries for messages, measured by programs of their own: UCX by `ucx_perftest`, iceoryx2 by the
//! program of the workspace in `peers`.
//!
//! Each trial is one run of two processes on the CPUs that our own two processes have, which sleep
//! meanwhile. Starting a process costs tens of milliseconds, so outsiders take part at three sizes
//! only, and in as many rounds as half of the time allows.

use crate::contest::Contest;
use crate::launch::{self, Way, finish, free_port};
use crate::rounds::Record;
use crate::stats::{Cost, Measure, Trial};
use crate::transports::Exercise;
use crate::{Bench, BenchError, Options, State};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// The sizes at which other libraries take part.
pub const OUTSIDER_SIZES: [usize; 3] = [4, 8192, 32768];

/// One other library, and the program that measures it.
#[derive(Clone, Debug)]
struct Outsider {
    name: &'static str,
    program: PathBuf,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// `ucx_perftest` with these tests for latency and bandwidth.
    Ucx { latency: &'static str, bandwidth: &'static str },
    /// The program in `peers`, with this contestant.
    Peers(&'static str),
}

/// The other libraries of a run.
#[derive(Debug)]
pub(crate) struct Outsiders {
    outsiders: Vec<Outsider>,
    cpus: (usize, usize),
    /// What they take part in, and how often they did.
    turns: BTreeMap<(Exercise, usize), u32>,
    began: Instant,
    spent: Duration,
    longest: Duration,
    failures: Vec<String>,
}

impl Outsiders {
    /// Those that are wanted and here; for each that is missing, a note says so.
    pub(crate) fn new(options: &Options, cpus: (usize, usize), spinning: bool, notes: &mut Vec<String>) -> Outsiders {
        let mut outsiders = Vec::new();
        let wanted = options.peers && matches!(options.bench, Bench::Latency | Bench::Bandwidth);
        if wanted && !spinning {
            notes.push("--peers has no effect on one CPU: the other libraries spin".to_owned());
        } else if wanted {
            match launch::find("ucx_perftest") {
                Some(program) => outsiders.extend(ucx(&program)),
                None => notes
                    .push("UCX IS MISSING: ucx_perftest is not installed (Debian: apt install ucx-utils)".to_owned()),
            }
            match find_peers() {
                Some(program) => outsiders.extend(iceoryx2(&program)),
                None => notes.push(format!("ICEORYX2 IS MISSING: {PEERS_HINT}")),
            }
        }
        let turns = options.programme().into_iter().filter(|(_, size)| OUTSIDER_SIZES.contains(size));
        Outsiders {
            outsiders,
            cpus,
            turns: turns.map(|turn| (turn, 0)).collect(),
            began: Instant::now(),
            spent: Duration::ZERO,
            longest: Duration::ZERO,
            failures: Vec::new(),
        }
    }

    /// Runs each of them once, if this is one of their sizes and there is time.
    pub(crate) fn take_part(
        &mut self,
        contest: &mut Contest,
        round: u32,
        exercise: Exercise,
        size: usize,
        record: &mut Record<'_>,
    ) -> Result<(), BenchError> {
        // Whatever had fewest turns is next, or the first size would take all of their time.
        let fewest = self.turns.values().copied().min().unwrap_or(0);
        let Some(turns) = self.turns.get_mut(&(exercise, size)).filter(|turns| **turns == fewest) else {
            return Ok(());
        };
        if self.outsiders.is_empty() || self.spent > self.began.elapsed() / 2 {
            return Ok(());
        }
        *turns += 1;
        let mut gone = Vec::new();
        for outsider in &self.outsiders {
            let clock = Instant::now();
            if clock + self.longest > record.deadline {
                break;
            }
            let before = contest.probe()?;
            let ran = outsider.run(exercise, size, self.cpus);
            let after = contest.probe()?;
            match ran {
                Ok(figures) => record.trials.extend(figures.into_iter().map(|(measure, value)| Trial {
                    round,
                    contestant: outsider.name,
                    measure,
                    size: size as u64,
                    value,
                    state: State::of_trial(before, after),
                    preempted: false,
                    cost: Cost::default(),
                })),
                Err(why) => {
                    self.failures.push(format!("{} FAILED and takes no further part: {why}", outsider.name));
                    gone.push(outsider.name);
                }
            }
            self.spent += clock.elapsed();
            self.longest = self.longest.max(clock.elapsed());
        }
        self.outsiders.retain(|outsider| !gone.contains(&outsider.name));
        Ok(())
    }

    /// What went wrong with whom.
    pub(crate) fn notes(self) -> Vec<String> {
        self.failures
    }
}

fn ucx(program: &Path) -> [Outsider; 2] {
    let outsider = |name, latency, bandwidth| Outsider {
        name,
        program: program.to_owned(),
        kind: Kind::Ucx { latency, bandwidth },
    };
    [outsider("ucx", "tag_lat", "tag_bw"), outsider("ucx-am", "ucp_am_lat", "ucp_am_bw")]
}

fn iceoryx2(program: &Path) -> [Outsider; 2] {
    let outsider = |name| Outsider { name, program: program.to_owned(), kind: Kind::Peers(name) };
    [outsider("iceoryx2"), outsider("iceoryx2-copied")]
}

/// Beside this executable, in the source tree it was built from, or where the user says.
pub(crate) fn find_peers() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("HIGHWIRE_PEERS") {
        return Some(PathBuf::from(named)).filter(|program| program.is_file());
    }
    let executable = std::env::current_exe().ok()?;
    let beside = executable.parent()?.join(PEERS_PROGRAM);
    let in_tree = |root: &Path| root.join("peers/target/release").join(PEERS_PROGRAM);
    let above = executable.ancestors().map(in_tree);
    let here = std::env::current_dir().ok().map(|directory| in_tree(&directory));
    std::iter::once(beside).chain(above).chain(here).find(|program| program.is_file())
}

impl Outsider {
    /// One run of both processes.
    fn run(&self, exercise: Exercise, size: usize, cpus: (usize, usize)) -> Result<Vec<(Measure, f64)>, String> {
        let count = messages(exercise, size);
        // Whoever connects first finds nobody; the answering side needs a moment to start.
        let (answering, leading) = match self.kind {
            Kind::Ucx { latency, bandwidth } => {
                let test = if exercise == Exercise::PingPong { latency } else { bandwidth };
                let port = free_port().map_err(|error| error.to_string())?;
                let options = format!("-p {port} -t {test} -s {size} -n {count} -w {} -f -v", count / 20);
                (options.clone(), format!("{} {options}", Ipv4Addr::LOCALHOST))
            }
            Kind::Peers(contestant) => {
                let exercise = if exercise == Exercise::PingPong { "latency" } else { "bandwidth" };
                let name = format!("highwire-{}-{}", std::process::id(), free_port().unwrap_or(0));
                let options = format!("{contestant} {exercise} {size} {count} {name}");
                (format!("answer {options}"), format!("lead {options}"))
            }
        };
        let mut answering = self.start(cpus.1, &answering)?;
        let lead = || {
            let mut last = String::new();
            for _ in 0..CONNECT_TRIES {
                let leading = self.start(cpus.0, &leading)?;
                match finish(leading, TIMEOUT) {
                    Ok(ended) => return self.parse(exercise, size, count, &ended.output),
                    Err(why) => last = why,
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(last)
        };
        let figures = lead();
        if figures.is_err() {
            let _ = answering.kill();
        }
        let answered = finish(answering, TIMEOUT);
        figures.and_then(|figures| answered.map(|_| figures))
    }

    fn start(&self, cpu: usize, arguments: &str) -> Result<Child, String> {
        launch::command(Way::Plain, cpu, &self.program)
            .map_err(|error| error.to_string())?
            .args(arguments.split_whitespace())
            .env("UCX_TLS", "posix,self")
            .env("UCX_WARN_UNUSED_ENV_VARS", "n")
            .spawn()
            .map_err(|error| format!("{}: {error}", self.program.display()))
    }

    fn parse(
        &self,
        exercise: Exercise,
        size: usize,
        count: usize,
        output: &str,
    ) -> Result<Vec<(Measure, f64)>, String> {
        let (latency_ns, rate) = match self.kind {
            Kind::Ucx { .. } => parse_ucx(output)?,
            Kind::Peers(_) => {
                let took: f64 = output.trim().parse().map_err(|_| format!("not understood: {output:?}"))?;
                (took / count as f64 / 2.0, count as f64 * 1e9 / took)
            }
        };
        Ok(match exercise {
            Exercise::PingPong => vec![(Measure::LatencyNs, latency_ns)],
            _ => {
                vec![(Measure::BandwidthGbS, rate * size as f64 / 1e9), (Measure::MessagesPerS, rate)]
            }
        })
    }
}

/// Half a round trip in nanoseconds (the median, which is kinder than the mean), and messages per
/// second, from the table that `ucx_perftest -f -v` prints.
fn parse_ucx(output: &str) -> Result<(f64, f64), String> {
    let mut lines = output.lines().skip_while(|line| !line.starts_with("iterations,"));
    let (Some(heads), Some(values)) = (lines.next(), lines.next()) else {
        return Err(format!("not understood: {output:?}"));
    };
    let value = |name: &str| -> Option<f64> {
        let place = heads.split(',').position(|head| head.ends_with(name))?;
        values.split(',').nth(place)?.parse().ok()
    };
    match (value("_percentile_lat"), value("overall_mr")) {
        (Some(microseconds), Some(rate)) => Ok((microseconds * 1e3, rate)),
        _ => Err(format!("not understood: {output:?}")),
    }
}

fn messages(exercise: Exercise, size: usize) -> usize {
    match exercise {
        Exercise::PingPong if size <= 1024 => 20_000,
        Exercise::PingPong => 4_000,
        _ if size <= 1024 => 100_000,
        _ => 3_000,
    }
}

/// What to do where the program in `peers` is not found.
pub(crate) const PEERS_HINT: &str = "build it with `cargo build --release --manifest-path peers/Cargo.toml`, or name the \
                                     program in HIGHWIRE_PEERS";
const PEERS_PROGRAM: &str = "highwire-peers";
const TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TRIES: u32 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_ucx_perftest_is_read_by_its_heads() {
        let output = "Waiting for connection...\n\
            iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n\
            20000,0.156,0.160,0.161,23.81,23.80,6241292,6241000\n";
        assert_eq!(parse_ucx(output), Ok((156.0, 6_241_000.0)));
        assert!(parse_ucx("connection refused").is_err());
        assert!(parse_ucx("iterations,avg_lat\n1,2\n").is_err());
    }

    #[test]
    fn figures_of_the_peers_program_are_a_duration() {
        let [zero_copy, _] = iceoryx2(Path::new("highwire-peers"));
        let figures = zero_copy.parse(Exercise::PingPong, 4, 1000, "800000\n").unwrap();
        assert_eq!(figures, [(Measure::LatencyNs, 400.0)]);
        let figures = zero_copy.parse(Exercise::Stream, 8192, 1000, "1000000\n").unwrap();
        assert_eq!(figures, [(Measure::BandwidthGbS, 8.192), (Measure::MessagesPerS, 1e6)]);
        assert!(zero_copy.parse(Exercise::Stream, 8192, 1000, "panicked").is_err());
    }
}
