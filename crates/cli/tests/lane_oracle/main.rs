//! The oracle: the same random sequence of socket calls on the kernel's TCP and under `highwire run`. Results, errnos,
//! bytes, signals and readiness of each call are compared, line by line.
//!
//! The calls are made by a program in C beside this file (`oracle.h` says how it is divided), which is compiled here: it
//! calls libc as any program does. A failing seed is run again by `HIGHWIRE_SEED=N`; `HIGHWIRE_SEEDS=N` runs that many,
//! from there or from 1.
#![forbid(unsafe_code)]

mod compared;

use compared::{Difference, first_differences};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn calls_whose_ends_are_in_one_process_answer_as_on_tcp() {
    compare_seeds(Shape::Single);
}

#[test]
fn calls_whose_ends_are_in_two_processes_answer_as_on_tcp() {
    compare_seeds(Shape::Pair);
}

/// Without this, a difference would say nothing. The second run takes other seeds into one process, so that a seed alone
/// is also known to do what it did among others.
#[test]
fn a_seed_run_twice_on_tcp_has_the_same_trace() {
    let place = Place::new();
    let mut everything = String::new();
    for shape in [Shape::Single, Shape::Pair] {
        let all = place.run(Way::Plain, shape, Seeds { first: 1, count: 48 }, None);
        for first in (1..48).step_by(12) {
            let some = place.run(Way::Plain, shape, Seeds { first, count: 12 }, None);
            let differences = first_differences(&all.of(some.seeds), &some.text);
            assert!(differences.is_empty(), "{shape:?}: {}", differences[0]);
        }
        let doubted = all.text.lines().find(|line| line.contains("!!"));
        assert_eq!(doubted, None, "{shape:?}: the model is wrong about TCP");
        everything += &all.text;
    }
    let left_out: Vec<_> = CALLS.iter().filter(|call| !everything.contains(&format!(": {call}"))).collect();
    assert!(left_out.is_empty(), "no seed makes the calls {left_out:?}");
    let unseen: Vec<_> = SEEN.iter().filter(|what| !everything.contains(*what)).collect();
    assert!(unseen.is_empty(), "no seed sees {unseen:?}");
}

/// The comparison itself: one wrong answer in a run of many must be found, of whichever kind it is.
#[test]
fn an_answer_made_wrong_on_purpose_is_found() {
    let place = Place::new();
    let seeds = Seeds { first: 1, count: 100 };
    for shape in [Shape::Single, Shape::Pair] {
        let right = place.run(Way::Plain, shape, seeds, None);
        for (wrong, what) in WRONG {
            let compared = place.run(Way::Plain, shape, seeds, Some(*wrong));
            assert_eq!(compared.failure, None, "{shape:?}: {what}, never");
            let differences = first_differences(&right.text, &compared.text);
            // The program ends after what it does wrong, so that all that is missing then is no finding.
            let found = differences.first().is_some_and(|difference| !difference.is_missing());
            assert!(found, "{shape:?}: {what}, and nobody noticed");
        }
    }
}

/// How the program is started.
#[derive(Clone, Copy, Debug)]
enum Way {
    Plain,
    Highwire,
}

/// Where the two ends of a connection live.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Single,
    Pair,
}

#[derive(Clone, Copy, Debug)]
struct Seeds {
    first: u64,
    count: u64,
}

/// What one process wrote.
struct Trace {
    seeds: Seeds,
    text: String,
    /// How the process ended, if not as it should.
    failure: Option<String>,
    /// Bytes received in all, and by the kernel's TCP.
    bytes: Option<(u64, u64)>,
}

impl Trace {
    /// The part of some of its seeds, as a trace of its own.
    fn of(&self, seeds: Seeds) -> String {
        let at = |seed: u64| self.text.find(&format!("seed {seed}\n")).unwrap_or(self.text.rfind("end\n").unwrap());
        format!("{}end\n", &self.text[at(seeds.first)..at(seeds.first + seeds.count)])
    }
}

/// Runs seeds both ways until the time is over, or as many as are asked for.
fn compare_seeds(shape: Shape) {
    let place = Place::new();
    let chosen = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("a number"));
    let (seed, count) = (chosen("HIGHWIRE_SEED"), chosen("HIGHWIRE_SEEDS"));
    let limit = count.or(seed.map(|_| 1));
    let mut first = seed.unwrap_or(1);
    let (began, mut done, mut failed) = (Instant::now(), 0, Vec::<Difference>::new());
    let (mut bytes_in_all, mut bytes_by_tcp) = (0, 0);
    while limit.map_or(began.elapsed() < QUICK || done < SEEDS_MIN, |limit| done < limit) && failed.len() < FAILURES_MAX
    {
        let seeds = Seeds { first, count: limit.map_or(BATCH, |limit| (limit - done).min(BATCH)) };
        let (highwire, plain) = std::thread::scope(|scope| {
            let plain = scope.spawn(|| place.run(Way::Plain, shape, seeds, None));
            (place.run(Way::Highwire, shape, seeds, None), plain.join().unwrap())
        });
        assert_eq!(plain.failure, None, "the run on TCP itself; its trace ends with\n{}", last_lines(&plain.text));
        let differences = first_differences(&plain.text, &highwire.text);
        report(shape, seeds, &differences);
        let (all, by_tcp) = highwire.bytes.unwrap_or_default();
        (bytes_in_all, bytes_by_tcp) = (bytes_in_all + all, bytes_by_tcp + by_tcp);
        if let Some(failure) = &highwire.failure {
            panic!("{failure}; the trace ends with\n{}", last_lines(&highwire.text));
        }
        (first, done) = (first + seeds.count, done + seeds.count);
        failed.extend(differences);
    }
    assert!(failed.is_empty(), "{} of {done} seeds differ, see above", failed.len());
    let by_lane = bytes_in_all.saturating_sub(bytes_by_tcp);
    println!("{done} seeds alike; {by_lane} of {bytes_in_all} bytes went by the lane");
    // If they all went by TCP, nothing was compared.
    let enough = done < SEEDS_MIN || by_lane * 100 >= bytes_in_all * LANE_PERCENT_MIN;
    assert!(enough, "{by_lane} of {bytes_in_all} bytes went by the lane; for it to be used, two CPUs are needed");
}

fn report(shape: Shape, seeds: Seeds, failed: &[Difference]) {
    for difference in failed.iter().take(FAILURES_MAX) {
        eprintln!("{difference}");
        let test = match shape {
            Shape::Single => "calls_whose_ends_are_in_one_process",
            Shape::Pair => "calls_whose_ends_are_in_two_processes",
        };
        let command = format!("cargo nextest run -p highwire-cli --test lane_oracle {test}");
        eprintln!("again: HIGHWIRE_SEED={} {command}", difference.seed);
        eprintln!(
            "among the others of its process: HIGHWIRE_SEED={} HIGHWIRE_SEEDS={} {command}\n",
            seeds.first, seeds.count
        );
    }
}

fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Where the program is, and its traces.
struct Place {
    directory: tempfile::TempDir,
    program: PathBuf,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::Builder::new().prefix("hw").tempdir().unwrap();
        Place { directory, program: program() }
    }

    fn run(&self, way: Way, shape: Shape, seeds: Seeds, wrong: Option<u32>) -> Trace {
        let trace = self.directory.path().join(format!("{way:?}.trace"));
        let counts = self.directory.path().join(format!("{way:?}.counts"));
        let _ = (std::fs::remove_file(&trace), std::fs::remove_file(&counts));
        let mut command = self.command(way);
        command.args(["--shape", if matches!(shape, Shape::Pair) { "pair" } else { "single" }]);
        command.args(["--seed", &seeds.first.to_string(), "--seeds", &seeds.count.to_string()]);
        command.arg("--trace").arg(&trace).arg("--counts").arg(&counts);
        if let Some(wrong) = wrong {
            command.args(["--wrong", &wrong.to_string()]);
        }
        let failure = Running(command.stdin(Stdio::null()).spawn().unwrap()).end(&trace).err();
        // A process that was ended may have left half a character.
        let text = String::from_utf8_lossy(&std::fs::read(&trace).unwrap_or_default()).into_owned();
        let bytes = std::fs::read_to_string(&counts).ok().and_then(|text| {
            let (all, by_tcp) = text.trim().split_once(' ')?;
            Some((all.parse().ok()?, by_tcp.parse().ok()?))
        });
        Trace { seeds, text, failure, bytes }
    }

    fn command(&self, way: Way) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--clean");
        if let Way::Highwire = way {
            command.args([env!("CARGO_BIN_EXE_highwire"), "run", "--"]);
        }
        command.arg(&self.program);
        command
    }
}

/// A process that is ended with this value.
struct Running(Child);

impl Running {
    /// Waits for it, as long as its trace grows.
    fn end(mut self, trace: &Path) -> Result<(), String> {
        let (mut length, mut grew) = (0, Instant::now());
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return if status.success() { Ok(()) } else { Err(format!("the program ended with {status}")) };
            }
            let now = std::fs::metadata(trace).map_or(0, |metadata| metadata.len());
            if now != length {
                (length, grew) = (now, Instant::now());
            }
            if grew.elapsed() > STUCK {
                return Err(format!("a call did not return within {STUCK:?}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program, compiled once for these sources. Each test is a process of its own, so it is kept in a file.
fn program() -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lane_oracle");
    let mut hasher = DefaultHasher::new();
    for name in FILES {
        std::fs::read(sources.join(name)).unwrap().hash(&mut hasher);
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("lane-oracle-{:016x}", hasher.finish()));
    if !program.exists() {
        let unfinished = program.with_extension(std::process::id().to_string());
        let mut compile = Command::new("cc");
        compile.args(["-std=gnu11", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&unfinished);
        compile.args(FILES.iter().filter(|name| name.ends_with(".c")).map(|name| sources.join(name)));
        let output = compile.output().expect("a C compiler: please install gcc and libc6-dev");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::rename(&unfinished, &program).unwrap();
    }
    program
}

const FILES: &[&str] =
    &["oracle.c", "sequence.c", "scenes.c", "perform.c", "descriptors.c", "inherit.c", "waits.c", "oracle.h", "raw.h"];

/// What `--wrong` does; each of it once, in a process.
const WRONG: &[(u32, &str)] = &[
    (1, "two bytes were swapped"),
    (2, "a byte was lost"),
    (3, "poll told too late that there is something to read"),
    (4, "EINTR came in place of EAGAIN"),
    (5, "FIONREAD counted one byte too many"),
    (6, "a reset looked like an end"),
    (7, "there was no SIGPIPE"),
    (8, "a peek ended before the last byte"),
    (9, "ECONNRESET came in place of EPIPE"),
    (10, "an event of epoll was lost"),
    (11, "a wait ended before its time"),
];

/// What the sequences must have in them.
const CALLS: &[&str] = &[
    "recv ",
    "read ",
    "readv ",
    "recvfrom ",
    "recvmsg ",
    "recvmmsg ",
    "preadv2 ",
    "__recv_chk ",
    "__read_chk ",
    "syscall(recvfrom) ",
    "splice in ",
    "raw read ",
    "raw recvfrom ",
    "send ",
    "write ",
    "writev ",
    "sendto ",
    "sendmsg ",
    "sendmmsg ",
    "pwritev2 ",
    "syscall(sendto) ",
    "sendfile ",
    "splice out ",
    "raw write ",
    "raw sendto ",
    "poll ",
    "ppoll ",
    "select ",
    "pselect ",
    "epoll_wait ",
    "epoll_pwait ",
    "epoll_pwait2 ",
    "epoll_create ",
    "EPOLL_CTL_ADD ",
    "EPOLL_CTL_MOD ",
    "EPOLL_CTL_DEL ",
    "send until full ",
    "raise the eventfd ",
    "raise the timerfd ",
    "raise the listener ",
    "clear the eventfd ",
    "clear the listener ",
    "shutdown RD ",
    "shutdown WR ",
    "shutdown RDWR ",
    "dup ",
    "dup2 ",
    "dup3 ",
    "F_DUPFD ",
    "F_DUPFD_CLOEXEC ",
    "close ",
    "close_range ",
    "dup2 over ",
    "fcntl O_NONBLOCK ",
    "ioctl FIONBIO ",
    "SO_RCVTIMEO ",
    "SO_SNDTIMEO ",
    "SO_RCVLOWAT ",
    "TCP_CORK ",
    "SO_LINGER 0 ",
    "SO_OOBINLINE ",
    "FIONREAD ",
    "SIOCOUTQ ",
    "SO_ERROR ",
    "TCP_INFO ",
    "getpeername ",
    "SIOCATMARK ",
    "in another program by exec ",
    "in another program by vfork ",
    "in another program by spawn ",
    "in a child by fork ",
    "in another program by message ",
];

/// What must come of them, and how.
const SEEN: &[&str] = &[
    " PEEK",
    "DONTWAIT",
    "WAITALL",
    "TRUNC",
    "MORE",
    "NOSIGNAL",
    "OOB",
    "WAITFORONE",
    "EAGAIN",
    "EINTR",
    "ECONNRESET",
    "EPIPE",
    "SIGPIPE*1",
    "EINVAL",
    "in a fork",
    "in a thread",
    "a timer disturbs",
    "a thread disturbs",
    "SA_RESTART",
    "ET",
    "ONESHOT",
    "EXCLUSIVE",
    "RDHUP",
    "HUP",
    "PRI",
    "ERR",
    "reads raw",
    "writes raw",
    " 0 = 0",
    "by s",
    " while\n",
    "= 1 s7=IN",
    ", handed over",
    " state=1 ",
    " state=5 ",
    " state=7 ",
    " state=8 ",
];

const QUICK: Duration = Duration::from_secs(17);
/// Seeds that one process takes in turn.
const BATCH: u64 = 50;
/// In a quick run, which takes the same ones every time: a change is judged by what it changes. New ones are for a soak.
const SEEDS_MIN: u64 = 200;
const FAILURES_MAX: usize = 3;
const STUCK: Duration = Duration::from_secs(12);
const LANE_PERCENT_MIN: u64 = 25;
