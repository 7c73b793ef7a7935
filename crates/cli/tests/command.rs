//! The command as a user meets it. No figure is judged here: that is for `highwire bench` itself.

use assert_cmd::Command;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The command, with a place of its own for names, and alone: measurements beside each other would
/// wait for each other's CPUs.
struct Highwire {
    runtime: tempfile::TempDir,
    _alone: File,
}

impl Highwire {
    fn new() -> Highwire {
        let lock = File::create(std::env::temp_dir().join("highwire-command-tests.lock")).unwrap();
        lock.lock().unwrap();
        Highwire { runtime: tempfile::tempdir().unwrap(), _alone: lock }
    }

    fn run(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_highwire"));
        command.args(line.split_whitespace()).env("HIGHWIRE_RUNTIME_DIR", self.runtime.path());
        command.timeout(Duration::from_secs(60));
        command
    }

    fn json(&self, line: &str) -> Value {
        let output = self.run(line).assert().success().get_output().stdout.clone();
        serde_json::from_slice(&output).unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn names<'a>(json: &'a Value, key: &str) -> BTreeSet<&'a str> {
    json["rows"].as_array().unwrap().iter().map(|row| row[key].as_str().unwrap()).collect()
}

fn sizes(json: &Value) -> BTreeSet<u64> {
    json["rows"].as_array().unwrap().iter().map(|row| row["size"].as_u64().unwrap()).collect()
}

fn one_cpu() -> bool {
    std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1)
}

#[test]
fn without_arguments_it_helps() {
    let highwire = Highwire::new();
    let output = highwire.run("").assert().success().get_output().stdout.clone();
    for part in ["demo", "bench", "Exit codes"] {
        assert!(text(&output).contains(part), "{part:?} is missing in\n{}", text(&output));
    }
    assert!(!text(&output).contains("bench-peer"), "the second process is nobody's business");
}

#[test]
fn a_wrong_command_line_is_code_two_and_says_what_is_wrong() {
    let highwire = Highwire::new();
    for (line, said) in [
        ("nonsense", "nonsense"),
        ("bench latency --contestants vy", "there is no contestant"),
        ("bench latency --sizes 0", "number of bytes above 0"),
        ("bench latency --sizes 99M", "is more than"),
        ("bench connections --sizes 1000000", "is more than"),
        ("bench latency --seconds never", "0.5 to 86400"),
        ("bench latency --state middle", "near"),
        ("bench latency --state near --one-core", "cannot be used with"),
    ] {
        let output = highwire.run(line).assert().code(2).get_output().stderr.clone();
        assert!(text(&output).contains(said), "`highwire {line}` said\n{}", text(&output));
    }
}

#[test]
fn the_demo_shows_both_ways_beside_each_other() {
    let output = Highwire::new().run("demo --seconds 0.5").assert().success().get_output().stdout.clone();
    for part in ["Highwire", "loopback TCP", "µs", "GB/s", "Two processes"] {
        assert!(text(&output).contains(part), "{part:?} is missing in\n{}", text(&output));
    }
}

#[test]
fn latency_has_a_row_for_everybody_at_every_size() {
    let json = Highwire::new().json("bench latency --seconds 3 --sizes 4,1K,64K --json");
    let everybody = ["vi", "vi-buffered", "vi-referenced", "tcp-block", "unix-block"];
    let spinners = ["raw-ring", "tcp-spin", "unix-spin"];
    let expected: BTreeSet<&str> =
        if one_cpu() { everybody.into() } else { everybody.into_iter().chain(spinners).collect() };
    assert_eq!(names(&json, "contestant"), expected);
    assert_eq!(names(&json, "measure"), BTreeSet::from(["latency_ns"]));
    assert_eq!(sizes(&json), BTreeSet::from([4, 1024, 65536]));
    assert_eq!(json["rows"].as_array().unwrap().len(), expected.len() * 3);
    assert!(["near", "far", "disturbed", "one-core"].contains(&json["state"].as_str().unwrap()), "{}", json["state"]);
    assert!(json["machine"]["kernel"].is_string() && json["command"].as_str().unwrap().starts_with("highwire bench"));
    for row in json["rows"].as_array().unwrap() {
        let figure = |name: &str| row[name].as_f64().unwrap();
        assert!(row["count"].as_u64().unwrap() > 0, "{row}");
        assert!(0.0 < figure("p10") && figure("p10") <= figure("median") && figure("median") <= figure("p90"), "{row}");
        assert!(figure("p90") <= figure("p99"), "{row}");
        assert!(one_cpu() || row["contestant"] != "raw-ring" || figure("of_floor") == 1.0, "{row}");
    }
}

#[test]
fn bandwidth_tells_bytes_and_messages_of_the_same_trials() {
    let json = Highwire::new().json("bench bandwidth --seconds 2 --sizes 32K --contestants vi,vi-buffered --json");
    assert_eq!(names(&json, "measure"), BTreeSet::from(["bandwidth_gb_s", "messages_per_s"]));
    let figure = |measure: &str| {
        let row = json["rows"].as_array().unwrap().iter().find(|row| row["measure"] == measure).unwrap();
        row["median"].as_f64().unwrap()
    };
    let ratio = figure("bandwidth_gb_s") * 1e9 / figure("messages_per_s");
    assert!((ratio - 32768.0).abs() < 1.0, "{ratio} bytes a message");
    assert!(json["rows"][0]["of_floor"].is_null(), "there was no floor");
}

#[test]
fn pipelining_writes_its_report_with_the_papers_table_and_figure() {
    let highwire = Highwire::new();
    let directory = highwire.runtime.path().join("report");
    let line = format!("bench pipelining --seconds 3 --sizes 8K,1M --report {}", directory.display());
    let output = highwire.run(&line).assert().success().get_output().stdout.clone();
    assert!(text(&output).contains("store & forward"), "{}", text(&output));
    let json: Value = serde_json::from_reader(File::open(directory.join("pipelining.json")).unwrap()).unwrap();
    for contestant in ["fixed-1408", "store-and-forward", "adaptive"] {
        assert!(names(&json, "contestant").contains(contestant), "{contestant} has no row");
    }
    assert_eq!(names(&json, "measure"), BTreeSet::from(["latency_ns", "bandwidth_gb_s"]));
    let copied = |side: &str| -> u64 {
        let stripes = json["trace"][side].as_array().unwrap();
        stripes.iter().map(|stripe| stripe["bytes"].as_u64().unwrap()).sum()
    };
    assert!(copied("copied_in") >= 24 * 8192, "the trace has {} bytes copied in", copied("copied_in"));
    assert_eq!(copied("copied_in"), copied("copied_out"));
    for plot in ["pipelining-latency_ns.svg", "pipelining-bandwidth_gb_s.svg", "pipelining-trace.svg"] {
        let svg = std::fs::read_to_string(directory.join(plot)).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{plot}");
    }
}

#[test]
fn connections_tell_memory_and_latency_by_number() {
    let json = Highwire::new().json("bench connections --seconds 3 --sizes 1,20 --json");
    assert_eq!(names(&json, "contestant"), BTreeSet::from(["vi"]));
    assert_eq!(names(&json, "measure"), BTreeSet::from(["latency_ns", "memory_bytes"]));
    assert_eq!(sizes(&json), BTreeSet::from([1, 20]));
}

#[test]
fn on_one_core_nobody_spins() {
    let json = Highwire::new().json("bench latency --one-core --seconds 2 --sizes 4 --json");
    assert_eq!(json["state"], "one-core");
    let found = names(&json, "contestant");
    assert!(found.contains("vi") && found.contains("unix-block") && !found.contains("raw-ring"), "{found:?}");
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let highwire = Highwire::new();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_highwire"))
        .args(["bench", "latency", "--seconds", "1", "--sizes", "4", "--contestants", "unix-block", "--json"])
        .env("HIGHWIRE_RUNTIME_DIR", highwire.runtime.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "{said}");
    assert_eq!(said, "");
}

#[test]
fn killed_in_the_middle_it_takes_its_second_process_along() {
    let highwire = Highwire::new();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_highwire"))
        .args(["bench", "latency", "--seconds", "30"])
        .env("HIGHWIRE_RUNTIME_DIR", highwire.runtime.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let deadline = Instant::now() + Duration::from_secs(10);
    let peer = loop {
        let found = std::fs::read_to_string(&children).unwrap_or_default();
        if let Some(peer) = found.split_whitespace().next() {
            break peer.to_owned();
        }
        assert!(Instant::now() < deadline, "no second process was started");
        std::thread::sleep(Duration::from_millis(5));
    };
    // Let it get into the middle of things.
    std::thread::sleep(Duration::from_millis(300));
    child.kill().unwrap();
    child.wait().unwrap();
    let alive = || {
        let status = std::fs::read_to_string(format!("/proc/{peer}/status")).unwrap_or_default();
        status.contains("highwire") && !status.contains("State:\tZ")
    };
    let deadline = Instant::now() + Duration::from_secs(2);
    while alive() {
        assert!(Instant::now() < deadline, "process {peer} outlives the one that started it");
        std::thread::sleep(Duration::from_millis(5));
    }
}
