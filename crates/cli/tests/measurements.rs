//! What `highwire bench` and `demo` print and write. No figure is judged here: that is for the reader of a
//! report.

use assert_cmd::Command;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The command, with a place of its own for names, and alone: measurements beside each other would
/// wait for each other's CPUs.
struct Highwire {
    runtime: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Highwire {
    fn new() -> Highwire {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Highwire { runtime: tempfile::tempdir().unwrap(), _alone: alone }
    }

    fn run(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_highwire"));
        command.args(line.split_whitespace()).env("HIGHWIRE_RUNTIME_DIR", self.runtime.path());
        // Beside the seconds that it measures, servers are started and filled, which a busy machine does slowly.
        command.timeout(Duration::from_secs(110));
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
fn the_demo_shows_both_ways_beside_each_other() {
    let output = Highwire::new().run("demo --seconds 0.5").assert().success().get_output().stdout.clone();
    for part in ["Highwire", "loopback TCP", "µs", "GB/s", "Two processes", "Between hosts", "Highwire, encrypted UDP"]
    {
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
fn a_wire_tells_latency_bandwidth_and_cpu_time() {
    let line = "bench wire --seconds 6 --sizes 64,1M --contestants tcp-block,udp-gso,vi-udp,vi-udp-impaired-1 --json";
    let json = Highwire::new().json(line);
    let expected = [
        ("latency_ns", &["tcp-block", "vi-udp"][..]),
        ("bandwidth_gb_s", &["tcp-block", "udp-gso", "vi-udp", "vi-udp-impaired-1"]),
        ("sender_cpu_s_per_gb", &["tcp-block", "udp-gso", "vi-udp"]),
        ("receiver_cpu_s_per_gb", &["tcp-block", "udp-gso", "vi-udp"]),
    ];
    check_rows(&json, &expected);
}

#[test]
fn remote_memory_on_a_wire_is_written_and_read() {
    let line =
        "bench wire --loopback --seconds 4 --sizes 8k --contestants rdma-write,rdma-read,send-and-message --json";
    let json = Highwire::new().json(line);
    check_rows(&json, &[("latency_ns", &["rdma-read", "send-and-message"]), ("bandwidth_gb_s", &["rdma-write"])]);
}

fn check_rows(json: &Value, expected: &[(&str, &[&str])]) {
    for (measure, contestants) in expected {
        let mut rows = json["rows"].as_array().unwrap().iter().filter(|row| row["measure"] == *measure);
        let found: BTreeSet<&str> = rows.clone().map(|row| row["contestant"].as_str().unwrap()).collect();
        assert_eq!(found, BTreeSet::from_iter(contestants.iter().copied()), "{measure} in {json}");
        assert!(rows.all(|row| row["median"].as_f64().unwrap() > 0.0), "{measure} in {json}");
    }
}

/// Medians of a measure by contestant and size.
fn medians(json: &Value, measure: &str) -> BTreeMap<(String, u64), f64> {
    let rows = json["rows"].as_array().unwrap().iter().filter(|row| row["measure"] == measure);
    let key = |row: &Value| (row["contestant"].as_str().unwrap().to_owned(), row["size"].as_u64().unwrap());
    rows.map(|row| (key(row), row["median"].as_f64().unwrap())).collect()
}

/// As root between namespaces.
#[test]
fn landing_tells_what_it_gains_and_what_gets_in_its_way() {
    let highwire = Highwire::new();
    let directory = highwire.runtime.path().join("report");
    let line = format!("bench landing --seconds 16 --sizes 1M,2M --json --report {}", directory.display());
    let json = highwire.json(&line);
    let keys = |measure: &str| -> BTreeSet<(String, u64)> { medians(&json, measure).into_keys().collect() };
    let all = |names: &[&str], sizes: &[u64]| -> BTreeSet<(String, u64)> {
        names.iter().flat_map(|name| sizes.iter().map(|size| ((*name).to_owned(), *size))).collect()
    };
    let (ways, mib) = (["landing", "copying", "peek", "always-wrong"], 1 << 20);
    let senders = ["one-sender", "four-senders", "four-senders-no-lists"];
    let interfering = [0, 100, 10_000];
    let streams: Vec<&str> = ways.into_iter().chain(senders).collect();
    let mut bandwidth = all(&streams, &[mib]);
    let interferences = ["interference", "interference-within"];
    bandwidth.extend(all(&interferences, &interfering));
    assert_eq!(keys("bandwidth_gb_s"), bandwidth);
    assert_eq!(keys("receiver_cpu_s_per_gb"), all(&ways, &[mib, 2 * mib]));
    assert_eq!(keys("success_percent"), all(&senders, &[mib]));
    assert_eq!(keys("failed_packets"), all(&interferences, &interfering));
    for measure in ["bandwidth_gb_s", "receiver_cpu_s_per_gb"] {
        assert!(medians(&json, measure).into_values().all(|median| median > 0.0), "{measure} in {json}");
    }
    assert!(medians(&json, "success_percent").into_values().all(|percent| (0.0..=100.0).contains(&percent)), "{json}");
    assert!(medians(&json, "failed_packets").into_values().all(|failed| (0.0..=1e5).contains(&failed)), "{json}");
    let written = std::fs::read_to_string(directory.join("landing.txt")).unwrap();
    for part in ["figure 5", "figure 6", "table 1", "75 MB/s"] {
        assert!(written.contains(part), "{part:?} is missing in\n{written}");
    }
    for plot in ["landing-figure-5.svg", "landing-figure-6.svg", "landing-receiver_cpu_s_per_gb.svg"] {
        let svg = std::fs::read_to_string(directory.join(plot)).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{plot}");
    }
}

#[test]
fn landing_over_loopback_guesses_or_does_not_as_it_is_told() {
    let highwire = Highwire::new();
    let json = highwire.json("bench landing --loopback --seconds 5 --sizes 8M --contestants landing,copying --json");
    assert_eq!(json["network"], "loopback");
    assert_eq!(names(&json, "contestant"), BTreeSet::from(["copying", "landing"]));
    assert_eq!(names(&json, "measure"), BTreeSet::from(["receiver_cpu_s_per_gb", "sender_cpu_s_per_gb"]));
    assert_eq!(sizes(&json), BTreeSet::from([8 << 20]));
    let json = highwire.json("bench landing --loopback --seconds 5 --contestants interference,one-sender --json");
    assert!(medians(&json, "success_percent")[&("one-sender".to_owned(), 1 << 20)] > 0.0, "nothing landed: {json}");
    let refused = highwire.run("bench landing --sizes 64K").assert().code(2).get_output().stderr.clone();
    assert!(text(&refused).contains("65536 is no multiple of the 1048576"), "{}", text(&refused));
}

#[test]
fn landing_on_one_core_is_measured_too() {
    let json = Highwire::new().json("bench landing --one-core --seconds 8 --sizes 1M --json");
    assert_eq!(json["state"], "one-core");
    assert_eq!(medians(&json, "success_percent").len(), 3, "{json}");
    assert_eq!(medians(&json, "failed_packets").len(), 6, "{json}");
}

#[test]
fn sockets_have_a_row_for_everybody_and_the_papers_tables_and_figures() {
    let highwire = Highwire::new();
    let directory = highwire.runtime.path().join("report");
    let json = highwire
        .json(&format!("bench sockets --loopback --seconds 12 --sizes 64,32K --json --report {}", directory.display()));
    let spinners = ["tcp-spin", "unix-spin"].into_iter().filter(|_| !one_cpu());
    let streams = ["sock", "sock-block", "sock-handler", "sock-notify", "sock-udp-sealed", "tcp-block"];
    let interfaces = ["vi", "vi-buffered", "vi-udp-sealed"];
    let latency: Vec<&str> = interfaces.into_iter().chain(streams).chain(spinners).collect();
    let steps = ["window-1", "window-32", "delayed-acks", "combining"];
    let bandwidth: Vec<&str> = latency.iter().copied().chain(steps).chain(["tcp-nagle"]).collect();
    let expected =
        [("latency_ns", &latency[..]), ("bandwidth_gb_s", &bandwidth[..]), ("messages_per_s", &bandwidth[..])];
    check_rows(&json, &expected);
    assert_eq!(sizes(&json), BTreeSet::from([64, 32768]));
    assert!(medians(&json, "messages_per_s").into_keys().all(|(_, size)| size == 64), "{json}");
    let written = std::fs::read_to_string(directory.join("sockets.txt")).unwrap();
    for part in ["table 3", "figure 7", "table 4 and figure 8", "SOVIA_COMBINE", "461 µs", "450 Mb/s"] {
        assert!(written.contains(part), "{part:?} is missing in\n{written}");
    }
    for (plot, shown) in [("5", "sock-handler"), ("7", "tcp-block"), ("8", "delayed-acks")] {
        let svg = std::fs::read_to_string(directory.join(format!("sockets-figure-{plot}.svg"))).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains(shown), "figure {plot}");
    }
}

#[test]
fn a_second_is_enough_for_a_few_sockets() {
    let json = Highwire::new().json("bench sockets --seconds 1 --sizes 4 --contestants vi,sock,sock-block --json");
    check_rows(
        &json,
        &[("latency_ns", &["vi", "sock", "sock-block"]), ("bandwidth_gb_s", &["vi", "sock", "sock-block"])],
    );
    assert!(json["network"].is_null(), "nobody needed one: {json}");
}

/// As root between namespaces.
#[test]
fn sockets_on_a_wire_are_measured() {
    let json =
        Highwire::new().json("bench sockets --seconds 4 --sizes 1K --contestants sock-udp-sealed,tcp-block --json");
    let everybody = ["sock-udp-sealed", "tcp-block"];
    check_rows(&json, &[("latency_ns", &everybody), ("bandwidth_gb_s", &everybody)]);
    assert!(["veth", "loopback"].contains(&json["network"].as_str().unwrap()), "{json}");
}

#[test]
fn files_go_from_memory_to_memory() {
    let json = Highwire::new().json("bench sockets --seconds 4 --sizes 13827767 --json");
    check_rows(&json, &[("file_mb_s", &["sock", "tcp", "copy"])]);
    assert_eq!(sizes(&json), BTreeSet::from([13_827_767]));
    let copy = json["rows"].as_array().unwrap().iter().find(|row| row["contestant"] == "copy").unwrap();
    assert_eq!(copy["of_floor"], 1.0);
}

#[test]
fn files_in_memory_are_gone_after_ctrl_c() {
    let highwire = Highwire::new();
    let mut measuring = std::process::Command::new(env!("CARGO_BIN_EXE_highwire"))
        .args(["bench", "sockets", "--seconds", "30", "--sizes", "13827767"])
        .env("HIGHWIRE_RUNTIME_DIR", highwire.runtime.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let files = Path::new("/dev/shm").join(format!("highwire-bench-{}", measuring.id()));
    wait_until("there are files in memory", || files.join("arrived").exists());
    let sent = std::process::Command::new("kill").args(["-INT", &measuring.id().to_string()]).status().unwrap();
    assert!(sent.success() && !measuring.wait().unwrap().success());
    wait_until("they are gone", || !files.exists());
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(20), "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn strangers_to_sockets_are_told_who_there_is() {
    let highwire = Highwire::new();
    for (choice, said) in [("raw-ring", "raw-ring has no part"), ("sokc", "there is no contestant \"sokc\"")] {
        let line = format!("bench sockets --contestants {choice}");
        let refused = highwire.run(&line).assert().code(2).get_output().stderr.clone();
        for part in [said, "sock-block", "window-32", "delayed-acks"] {
            assert!(text(&refused).contains(part), "{part:?} is missing in\n{}", text(&refused));
        }
    }
    let refused = highwire.run("bench sockets --sizes 32M").assert().code(2).get_output().stderr.clone();
    assert!(text(&refused).contains("is more than the 16777216"), "{}", text(&refused));
}

#[test]
fn a_lane_has_a_row_for_everybody_beside_tcp_that_waits_alike() {
    let highwire = Highwire::new();
    let directory = highwire.runtime.path().join("report");
    let json = highwire.json(&format!("bench lane --seconds 5 --sizes 64 --json --report {}", directory.display()));
    let spinners = ["run-spin", "tcp-spin", "unix-spin"].into_iter().filter(|_| !one_cpu());
    let bandwidth: Vec<&str> = ["run-block", "run-one-end", "tcp-block"].into_iter().chain(spinners).collect();
    let on_one_core = ["run-block-one-core", "tcp-block-one-core"];
    let latency: Vec<&str> = bandwidth.iter().copied().chain(on_one_core).collect();
    check_rows(&json, &[("latency_ns", &latency[..]), ("bandwidth_gb_s", &bandwidth[..])]);
    for row in json["rows"].as_array().unwrap() {
        let is_floor = row["contestant"].as_str().unwrap().starts_with("tcp-");
        assert!(!is_floor || row["of_floor"] == 1.0, "{row}");
    }
    let written = std::fs::read_to_string(directory.join("lane.txt")).unwrap();
    for part in ["One-way latency under `highwire run`", "times below", "TCP that waits alike"] {
        assert!(written.contains(part), "{part:?} is missing in\n{written}");
    }
    let svg = std::fs::read_to_string(directory.join("lane-latency_ns-of-floor.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("run-block-one-core"));
}

#[test]
fn apps_have_a_row_for_each_program_with_latency_and_cpu_time() {
    let highwire = Highwire::new();
    let directory = highwire.runtime.path().join("report");
    // By name, so that a program that is missing is told.
    let measures = MEASURES.join(",");
    let json = highwire.json(&format!(
        "bench apps --seconds 28 --sizes 4K --measures {measures} --json --report {}",
        directory.display()
    ));
    let both = ["plain", "highwire"];
    check_rows(&json, &MEASURES.map(|measure| (measure, &both[..])));
    assert_eq!(sizes(&json), BTreeSet::from([4096]));
    for row in json["rows"].as_array().unwrap() {
        assert!(row["cpu_us"].as_f64().is_some_and(|cpu| cpu > 0.0), "{row}");
        let requests = row["measure"].as_str().unwrap().ends_with("_rps");
        assert_eq!(row["latency_p99_us"].as_f64().is_some(), requests, "{row}");
        assert!(row["contestant"] != "plain" || row["of_floor"] == 1.0, "{row}");
    }
    let svg = std::fs::read_to_string(directory.join("apps-ratio.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("nginx_close_rps, 4 KiB"));
}

const MEASURES: [&str; 10] = [
    "redis_get_c1_rps",
    "redis_set_c1_rps",
    "redis_get_c50_rps",
    "redis_get_c50_p16_rps",
    "nginx_c1_rps",
    "nginx_c32_rps",
    "nginx_close_rps",
    "ftp_curl_mb_s",
    "iperf3_gb_s",
    "memcached_get_c1_rps",
];

#[test]
fn apps_of_one_size_have_a_row_each_with_cpu_time() {
    let highwire = Highwire::new();
    let json = highwire.json(&format!("bench apps --seconds 45 --measures {} --json", UNSIZED.join(",")));
    check_rows(&json, &UNSIZED.map(|measure| (measure, &["plain", "highwire"][..])));
    assert_eq!(sizes(&json), BTreeSet::from([0, 612]));
    for row in json["rows"].as_array().unwrap() {
        assert!(row["cpu_us"].as_f64().is_some_and(|cpu| cpu > 0.0), "{row}");
        assert_eq!(row["size"] == 612, row["measure"] == "haproxy_c16_rps", "{row}");
    }
}

const UNSIZED: [&str; 5] =
    ["pgbench_tpcb_c10_tps", "pgbench_select_c1_tps", "threads_2000_rps", "echo_64m_mb_s", "haproxy_c16_rps"];

/// None is left out silently.
#[test]
fn apps_for_which_there_is_no_time_are_named() {
    let highwire = Highwire::new();
    let chosen = ["redis_get_c1_rps", "nginx_c1_rps", "ftp_curl_mb_s", "iperf3_gb_s", "memcached_get_c1_rps"];
    let json = highwire.json(&format!("bench apps --seconds 4 --sizes 4K --measures {} --json", chosen.join(",")));
    let (measured, notes) = (names(&json, "measure"), json["notes"].to_string());
    let left_out = |measure: &str| notes.contains(&format!("{measure} at 4096 with highwire IS LEFT OUT"));
    assert!(!measured.contains("memcached_get_c1_rps") && left_out("memcached_get_c1_rps"), "{measured:?} {notes}");
    for measure in chosen {
        let rows = json["rows"].as_array().unwrap();
        let has_row = rows.iter().any(|row| row["measure"] == measure && row["contestant"] == "highwire");
        assert!(has_row != left_out(measure), "{measure}: {measured:?} {notes}");
    }
}

#[test]
fn servers_and_their_folder_are_gone_after_ctrl_c() {
    let highwire = Highwire::new();
    let temporary = highwire.runtime.path();
    let mut measuring = std::process::Command::new(env!("CARGO_BIN_EXE_highwire"))
        .args(["bench", "apps", "--seconds", "30", "--contestants", "plain", "--measures", "nginx_c1_rps"])
        .env("TMPDIR", temporary)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let folder = temporary.join(format!("highwire-bench-{}", measuring.id()));
    // The master's number stands there, in a line; its worker is of the same group.
    let number = folder.join("nginx-Plain/pid");
    let started = || std::fs::read_to_string(&number).is_ok_and(|number| number.ends_with('\n'));
    wait_until("the server has started", started);
    let group = std::fs::read_to_string(&number).unwrap().trim().to_owned();
    wait_until("it has a worker", || processes_of(&group) >= 2);
    let sent = std::process::Command::new("kill").args(["-INT", &measuring.id().to_string()]).status().unwrap();
    assert!(sent.success() && !measuring.wait().unwrap().success());
    wait_until("the folder is gone", || !folder.exists());
    wait_until("the server is gone", || processes_of(&group) == 0);
}

/// How many processes of a group have not ended.
fn processes_of(group: &str) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().filter_map(|process| process.ok());
    let stats = processes.filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok());
    let of_group = stats.filter(|stat| {
        let mut fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
        fields.next() != Some("Z") && fields.nth(1) == Some(group)
    });
    of_group.count()
}

#[test]
fn programs_that_are_missing_are_named_with_their_packages() {
    let highwire = Highwire::new();
    let programs = highwire.runtime.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    let refused = highwire.run("bench apps --measures redis_get_c1_rps").env("PATH", &programs).assert().code(1);
    let said = text(&refused.get_output().stderr);
    for part in ["redis_get_c1_rps", "`redis-server`", "apt install redis-server"] {
        assert!(said.contains(part), "{part:?} is missing in\n{said}");
    }
    // With some of them, what needs the others is left out.
    for program in ["sh", "rm", "sleep", "memcached"] {
        let path = std::env::var_os("PATH").unwrap();
        let found = std::env::split_paths(&path).map(|place| place.join(program)).find(|place| place.exists());
        let found = found.unwrap_or_else(|| panic!("please install {program} (Debian: apt install {program})"));
        std::os::unix::fs::symlink(found, programs.join(program)).unwrap();
    }
    let mut some = highwire.run("bench apps --seconds 6 --contestants plain --json");
    let output = some.env("PATH", &programs).assert().success().get_output().stdout.clone();
    let json: Value = serde_json::from_slice(&output).unwrap();
    // And a program of ours, if there was time for it.
    let measured = names(&json, "measure");
    assert!(measured.contains("memcached_get_c1_rps"), "{measured:?}");
    assert!(measured.is_subset(&BTreeSet::from(["memcached_get_c1_rps", "threads_2000_rps"])), "{measured:?}");
    assert!(json["rows"][0]["cpu_us"].as_f64().is_some_and(|cpu| cpu > 0.0), "{json}");
    let notes = json["notes"].to_string();
    let left_out = ["redis_get_c50_rps IS LEFT OUT", "nginx_c1_rps IS LEFT OUT", "pgbench_tpcb_c10_tps IS LEFT OUT"];
    for part in left_out.into_iter().chain(["apt install wrk", "apt install curl", "apt install postgresql"]) {
        assert!(notes.contains(part), "{part:?} is missing in\n{notes}");
    }
}

#[test]
fn strangers_to_lane_and_apps_are_told_who_there_is() {
    let highwire = Highwire::new();
    for (line, parts) in [
        ("bench lane --contestants vi", ["vi has no part in `bench lane`", "run-one-end"]),
        ("bench lane --contestants run-spin,tcp-nagle", ["tcp-nagle has no part", "tcp-block-one-core"]),
        ("bench apps --contestants run-spin", ["run-spin has no part in `bench apps`", "plain, highwire"]),
        ("bench apps --measures redis_get_c2_rps", ["that is not measured", "redis_get_c50_p16_rps"]),
        ("bench lane --sizes 32M", ["is more than the 16777216", "bench lane"]),
    ] {
        let said = text(&highwire.run(line).assert().code(2).get_output().stderr);
        for part in parts {
            assert!(said.contains(part), "{line}: {part:?} is missing in\n{said}");
        }
    }
}

/// By name, so that a server that is missing is told; beside the messages that carry our calls, as root between
/// namespaces.
#[test]
fn calls_of_servers_are_measured_beside_messages() {
    let highwire = Highwire::new();
    let directory = highwire.runtime.path().join("report");
    let json = highwire.json(&format!(
        "bench rpc --seconds 14 --contestants vi,vi-udp,redis,memcached --sizes 8K --outstanding 1,16 --json --report {}",
        directory.display()
    ));
    let (messages, servers) = (&["vi", "vi-udp"][..], &["redis", "memcached"][..]);
    let calls = ["call_ns", "fetch_ns", "fetch_gb_s", "calls_per_s"].map(|measure| (measure, servers));
    check_rows(&json, &[("latency_ns", messages), ("bandwidth_gb_s", messages)]);
    check_rows(&json, &calls);
    let sizes =
        |measure: &str| -> BTreeSet<u64> { medians(&json, measure).into_keys().map(|(_, size)| size).collect() };
    for (measure, expected) in [
        ("latency_ns", &[4][..]),
        ("bandwidth_gb_s", &[8192]),
        ("call_ns", &[0]),
        ("fetch_ns", &[8192]),
        ("fetch_gb_s", &[8192]),
        ("calls_per_s", &[1, 16]),
    ] {
        assert_eq!(sizes(measure), BTreeSet::from_iter(expected.iter().copied()), "{measure}");
    }
    assert!(["veth", "loopback"].contains(&json["network"].as_str().unwrap()), "{json}");
    let svg = std::fs::read_to_string(directory.join("rpc-calls_per_s.svg")).unwrap();
    assert!(svg.contains("by calls under way") && svg.contains("16 at once") && svg.contains("memcached"));
    assert!(directory.join("rpc-fetch_ns.svg").exists() && directory.join("rpc.json").exists());
}

/// A stand-in for the program that measures other libraries, which takes a millisecond for whatever it is told.
const STAND_IN: &str = r#"#!/bin/sh
case "$1" in
serve) echo 4000; cat >/dev/null ;;
call) [ "$3" = 4000 ] || exit 1; echo connected; while read line; do echo "$line" >>"$0.asked"; echo 1000000; done ;;
esac
"#;

#[test]
fn other_libraries_make_calls_where_they_are_wanted() {
    let highwire = Highwire::new();
    let program = highwire.runtime.path().join("peers");
    std::fs::write(&program, STAND_IN).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let line = "bench rpc --seconds 6 --contestants vi --peers --sizes 4K --outstanding 8 --json";
    let output = highwire.run(line).env("HIGHWIRE_PEERS", &program).assert().success().get_output().stdout.clone();
    let json: Value = serde_json::from_slice(&output).unwrap();
    let calls = ["call_ns", "fetch_ns", "fetch_gb_s", "calls_per_s"].map(|measure| (measure, &["tonic", "tarpc"][..]));
    check_rows(&json, &calls);
    // It takes the time itself.
    let calls_ns = medians(&json, "call_ns");
    let is_whole = |number: f64| (number - number.round()).abs() < 1e-6;
    assert!(calls_ns.values().all(|median| is_whole(1e6 / median)), "{json}");
    let asked = std::fs::read_to_string(highwire.runtime.path().join("peers.asked")).unwrap();
    let words: BTreeSet<&str> = asked.lines().filter_map(|line| line.rsplit_once(' ')).map(|(what, _)| what).collect();
    assert_eq!(words, BTreeSet::from(["0 1", "4096 1", "4096 8", "0 8"]));
    // Without the program they are left out, unless they are named.
    let missing = highwire.runtime.path().join("nowhere");
    let some = highwire.run("bench rpc --seconds 1 --contestants vi --peers --measures call_ns --json");
    let output = { some }.env("HIGHWIRE_PEERS", &missing).assert().success().get_output().stdout.clone();
    for part in ["tonic IS LEFT OUT", "tarpc IS LEFT OUT", "peers/Cargo.toml"] {
        assert!(text(&output).contains(part), "{part:?} is missing in\n{}", text(&output));
    }
    let refused = highwire.run("bench rpc --contestants tonic").env("HIGHWIRE_PEERS", &missing).assert().code(1);
    let said = text(&refused.get_output().stderr);
    assert!(said.contains("tonic cannot be measured") && said.contains("peers/Cargo.toml"), "{said}");
}

#[test]
fn servers_that_are_missing_are_left_out_of_calls_unless_they_are_named() {
    let highwire = Highwire::new();
    let programs = highwire.runtime.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    let mut some = highwire.run("bench rpc --loopback --seconds 2 --measures call_ns --json");
    let output = some.env("PATH", &programs).assert().success().get_output().stdout.clone();
    let json: Value = serde_json::from_slice(&output).unwrap();
    assert!(names(&json, "contestant").contains("vi"), "{json}");
    assert!(!names(&json, "contestant").contains("redis") && !names(&json, "contestant").contains("memcached"));
    let notes = json["notes"].to_string();
    for part in ["redis IS LEFT OUT", "apt install redis-server", "memcached IS LEFT OUT", "apt install memcached"] {
        assert!(notes.contains(part), "{part:?} is missing in\n{notes}");
    }
    let refused = highwire.run("bench rpc --contestants memcached").env("PATH", &programs).assert().code(1);
    let said = text(&refused.get_output().stderr);
    assert!(said.contains("memcached cannot be measured") && said.contains("apt install memcached"), "{said}");
}

#[test]
fn servers_of_calls_are_gone_after_ctrl_c() {
    let highwire = Highwire::new();
    let temporary = highwire.runtime.path();
    let mut measuring = std::process::Command::new(env!("CARGO_BIN_EXE_highwire"))
        .args(["bench", "rpc", "--seconds", "30", "--contestants", "redis,memcached", "--measures", "call_ns"])
        .env("TMPDIR", temporary)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let folder = temporary.join(format!("highwire-bench-{}", measuring.id()));
    // Each server leads a group of its own.
    let parent = measuring.id().to_string();
    let leaders = || -> Vec<String> {
        let processes = std::fs::read_dir("/proc").unwrap().filter_map(|process| process.ok());
        let stats = processes.filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok());
        let leader = |stat: &String| {
            let (number, name) = stat.split_once(" (")?;
            let (name, fields) = name.rsplit_once(')')?;
            let fields: Vec<&str> = fields.split_whitespace().collect();
            let serves = fields[1] == parent && (name.starts_with("redis-server") || name == "memcached");
            serves.then(|| number.to_owned())
        };
        stats.filter_map(|stat| leader(&stat)).collect()
    };
    wait_until("both servers have started", || leaders().len() == 2);
    let groups = leaders();
    let sent = std::process::Command::new("kill").args(["-INT", &measuring.id().to_string()]).status().unwrap();
    assert!(sent.success() && !measuring.wait().unwrap().success());
    wait_until("the folder is gone", || !folder.exists());
    wait_until("the servers are gone", || groups.iter().all(|group| processes_of(group) == 0));
}

#[test]
fn strangers_to_calls_are_told_who_there_is() {
    let highwire = Highwire::new();
    for (line, parts) in [
        ("bench rpc --contestants sock", ["sock has no part in `bench rpc`", "udp-sealed"]),
        ("bench rpc --measures redis_get_c1_rps", ["that is not measured", "call_ns, fetch_ns"]),
        ("bench rpc --outstanding 0", ["a number from 1 to 1024", "--outstanding"]),
        ("bench rpc --sizes 2M", ["is more than the 1048576", "bench rpc"]),
    ] {
        let said = text(&highwire.run(line).assert().code(2).get_output().stderr);
        for part in parts {
            assert!(said.contains(part), "{line}: {part:?} is missing in\n{said}");
        }
    }
}

/// In the folder of the source, which is on a disk.
#[test]
fn pages_of_a_cold_file_are_measured_beside_messages() {
    let highwire = Highwire::new();
    let directory = highwire.runtime.path().join("report");
    let json = highwire.json(&format!(
        "bench netmem --seconds 8 --contestants vi,mapped-file --region 32M --dir {} --json --report {}",
        env!("CARGO_MANIFEST_DIR"),
        directory.display()
    ));
    check_rows(&json, &[("latency_ns", &["vi"]), ("bandwidth_gb_s", &["vi"])]);
    check_rows(&json, &[("random_page_ns", &["mapped-file"]), ("sequential_gb_s", &["mapped-file"])]);
    assert_eq!(sizes(&json), BTreeSet::from([4096, 1 << 20]));
    assert!(json["notes"].to_string().contains("32 MiB, of which a reader may keep 8 MiB"), "{json}");
    for plot in ["netmem-random_page_ns.svg", "netmem-sequential_gb_s.svg"] {
        assert!(std::fs::read_to_string(directory.join(plot)).unwrap().contains("mapped-file"), "{plot}");
    }
}

#[test]
fn a_file_that_is_in_memory_anyway_is_left_out_unless_it_is_named() {
    let highwire = Highwire::new();
    let line = "bench netmem --loopback --seconds 6 --region 1M --measures random_page_ns --dir /dev/shm";
    let json = highwire.json(&format!("{line} --json"));
    assert!(!names(&json, "contestant").contains("mapped-file"), "{json}");
    assert!(json["notes"].to_string().contains("mapped-file IS LEFT OUT"), "{json}");
    let refused = highwire.run(&format!("{line} --contestants mapped-file")).assert().code(1);
    let said = text(&refused.get_output().stderr);
    assert!(said.contains("/dev/shm") && said.contains("--dir"), "{said}");
    for (line, part) in [
        ("bench netmem --region 1", "in whole M"),
        ("bench netmem --sizes 5000", "is no multiple of the 4096"),
        ("bench netmem --contestants redis", "there are vi, vi-udp, paged, paged-mapped, paged-udp, mapped-file"),
        ("bench netmem --measures call_ns", "there are random_page_ns, sequential_gb_s"),
    ] {
        let said = text(&highwire.run(line).assert().code(2).get_output().stderr);
        assert!(said.contains(part), "{line}: {part:?} is missing in\n{said}");
    }
}

#[test]
fn on_one_core_nobody_spins() {
    let json = Highwire::new().json("bench latency --one-core --seconds 2 --sizes 4 --json");
    assert_eq!(json["state"], "one-core");
    let found = names(&json, "contestant");
    assert!(found.contains("vi") && found.contains("unix-block") && !found.contains("raw-ring"), "{found:?}");
}
