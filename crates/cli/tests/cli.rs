//! The `highwire` command as its users meet it: what it prints, with which code it ends, and what it
//! leaves behind when it is stopped.

mod place;

use assert_cmd::assert::{Assert, OutputAssertExt};
use place::{BINARY, Echo, Place};
use serde_json::Value;
use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn without_arguments_it_prints_the_help() {
    let out = stdout(&Place::new().highwire(&[]).assert().code(0));
    for expected in ["Usage: highwire", "demo", "bench", "Exit codes: 0 done; 1 failed; 2 wrong command line"] {
        assert!(out.contains(expected), "{expected:?} is missing in:\n{out}");
    }
    // What only the program itself calls is not shown.
    assert!(!out.contains("bench-peer"), "{out}");
}

#[test]
fn a_wrong_command_line_ends_with_2_and_says_what_is_right() {
    let place = Place::new();
    let cases: &[(&[&str], &str)] = &[
        (&["--nope"], "--nope"),
        (&["serve"], "serve"),
        (&["bench"], "Commands:"),
        (&["bench", "speed"], "speed"),
        (&["bench", "latency", "--state", "middle"], "possible values: near, far"),
        (&["bench", "latency", "--contestants", "raw-ring,fastest"], "there are raw-ring, vi, vi-buffered"),
        (&["bench", "latency", "--contestants", "vi,udp-spin"], "udp-spin has no part in `bench latency`"),
        (&["bench", "wire", "--contestants", "vi"], "there are udp-spin, udp-gso"),
        (&["bench", "wire", "--sizes", "5M"], "4194304"),
        (&["bench", "latency", "--seconds", "0"], "from 0.5 to 86400"),
        (&["bench", "latency", "--seconds", "soon"], "from 0.5 to 86400"),
        (&["bench", "latency", "--sizes", "0"], "as 64, 8K or 1M"),
        (&["bench", "latency", "--sizes", "4G"], "as 64, 8K or 1M"),
        (&["bench", "latency", "--sizes", "17M"], "16777216"),
        (&["bench", "connections", "--sizes", "1000000"], "4000"),
        (&["bench", "connections", "--contestants", "vi"], "--contestants"),
        (&["bench", "latency", "--one-core", "--state", "near"], "cannot be used with"),
        (&["key"], "Commands:"),
        (&["key", "new"], "<FILE>"),
        (&["simulate", "--runs", "0"], "0 is not in 1..=1000000"),
    ];
    for (arguments, expected) in cases {
        let wrong = place.highwire(arguments).assert().code(2);
        assert!(stderr(&wrong).contains(expected), "{arguments:?}: {expected:?} is missing in:\n{}", stderr(&wrong));
        assert_eq!(stdout(&wrong), "", "{arguments:?}: what is wrong is no output");
    }
}

#[test]
fn a_simulation_is_the_same_for_the_same_seed_and_says_how_it_ended() {
    let place = Place::new();
    let run = |arguments: &[&str]| stdout(&place.highwire(arguments).assert().code(0));
    let one = run(&["simulate", "--seed", "71"]);
    assert_eq!(one, run(&["simulate", "--seed", "71"]));
    assert!(one.contains("seed       71") && one.contains("outcome    Delivered"), "{one}");
    let several = run(&["simulate", "--seed", "5", "--runs", "3"]);
    assert_eq!(several.lines().count(), 4, "{several}");
    let report: Value = serde_json::from_str(&run(&["simulate", "--json"])).unwrap();
    assert_eq!((&report["seed"], &report["right"]), (&Value::from(0), &Value::from(true)));
}

#[test]
fn a_key_is_made_once_and_shown_by_its_fingerprint() {
    let place = Place::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cluster.key");
    let file = file.to_str().unwrap();
    let made = stdout(&place.highwire(&["key", "new", file]).assert().code(0));
    assert_eq!(made, stdout(&place.highwire(&["key", "show", file]).assert().code(0)));
    assert!(!std::fs::read_to_string(file).unwrap().is_empty());
    let again = place.highwire(&["key", "new", file]).assert().code(1);
    assert!(stderr(&again).contains("never overwritten"), "{}", stderr(&again));
    let missing = place.highwire(&["key", "show", "/nowhere/at/all"]).assert().code(1);
    assert!(stderr(&missing).contains("/nowhere/at/all"), "{}", stderr(&missing));
}

#[test]
fn a_ping_is_answered_over_each_path_and_its_failures_say_what_to_do() {
    let place = Place::new();
    let file = |name: &str| {
        let file = place.path().join(name).to_str().unwrap().to_owned();
        place.highwire(&["key", "new", &file]).assert().code(0);
        file
    };
    let (key, other) = (file("cluster.key"), file("other.key"));
    for (address, with) in
        [("udp:127.0.0.1:0", vec!["--key", key.as_str()]), ("udp:[::1]:0", vec![]), ("shm:echo", vec![])]
    {
        let echo = Echo::start(&mut place.echo(address, &with));
        let count = ["--count", "3", "--interval", "0", "--size", "100000"];
        let told = stdout(&place.highwire(&["ping", &echo.address]).args(&with).args(count).assert().code(0));
        assert!(told.contains("message 3,") && told.contains("3 sent and answered"), "{told}");
        let json =
            place.highwire(&["ping", &echo.address, "--json", "--count", "2", "--interval", "0"]).args(&with).output();
        let report: Value = serde_json::from_slice(&json.unwrap().stdout).unwrap();
        assert_eq!(report["round_trip_us"].as_array().map(Vec::len), Some(2), "{report}");
        if address.starts_with("udp:127") {
            let ping = ["ping", &echo.address, "--timeout", "0.5", "--key", &other];
            let refused = place.highwire(&ping).assert().code(1);
            for cause in ["nothing listens", "UDP is blocked", "keys differ"] {
                assert_eq!(stderr(&refused).matches(cause).count(), 1, "{}", stderr(&refused));
            }
        }
    }
    let open = place.highwire(&["echo", "udp:0.0.0.0:0"]).assert().code(1);
    assert!(stderr(&open).contains("--insecure") && stderr(&open).contains("highwire key new"), "{}", stderr(&open));
    let insecure = Echo::start(&mut place.echo("udp:0.0.0.0:0", &["--insecure"]));
    assert!(insecure.address.starts_with("udp:0.0.0.0:"));
    let both = place.highwire(&["echo", "udp:0.0.0.0:0", "--insecure", "--key", &key]).assert().code(2);
    assert!(stderr(&both).contains("cannot be used with"), "{}", stderr(&both));
}

#[test]
fn a_ping_whose_other_side_is_killed_ends_with_a_reason() {
    let place = Place::new();
    let echo = Echo::start(&mut place.echo("udp:127.0.0.1:0", &[]));
    let ping = ["ping", &echo.address, "--count", "1000", "--interval", "0.05", "--timeout", "1"];
    let mut ping = place.highwire(&ping).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(ping.stdout.take().unwrap());
    lines.read_line(&mut String::new()).unwrap();
    let killed = Instant::now();
    drop(echo);
    let ended = ping.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("of 1000 was not answered: nothing came within 1s: it died"), "{said}");
    assert!(killed.elapsed() < Duration::from_secs(10));
}

#[test]
fn latency_as_json_has_the_promised_shape() {
    let out = Place::new().highwire(LATENCY).assert().code(0);
    assert_is_latency_report(&stdout(&out));
    assert_eq!(stderr(&out), "", "a run that went well has nothing to complain of");
}

#[test]
fn a_thousand_connections_take_less_than_64_mib() {
    let arguments = ["bench", "connections", "--json", "--seconds", "8", "--sizes", "1000"];
    let report: Value = serde_json::from_str(&stdout(&Place::new().highwire(&arguments).assert().code(0))).unwrap();
    let is_memory = |row: &&Value| row["measure"] == "memory_bytes" && row["size"] == 1000;
    let bytes = report["rows"].as_array().unwrap().iter().find(is_memory).unwrap()["median"].as_f64().unwrap();
    assert!(bytes > 0.0 && bytes < f64::from(64 << 20), "{bytes} bytes");
}

#[test]
fn a_report_that_cannot_be_written_is_a_failure_that_names_the_place() {
    let place = Place::new();
    let taken = place.path().join("taken");
    std::fs::write(&taken, "").unwrap();
    let arguments = ["bench", "latency", "--seconds", "1", "--sizes", "4", "--contestants", "vi", "--report"];
    let failed = place.highwire(&arguments).arg(&taken).assert().code(1);
    assert!(stderr(&failed).contains(taken.to_str().unwrap()), "{}", stderr(&failed));
}

#[test]
fn a_state_that_never_comes_ends_with_3_and_what_to_do() {
    let place = Place::new();
    for state in ["near", "far"] {
        let arguments = ["bench", "latency", "--seconds", "1", "--sizes", "4", "--contestants", "vi", "--state", state];
        let ended = place.highwire(&arguments).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        // Which of the two the machine is in, nobody can say beforehand.
        match ended.status.code() {
            Some(0) => assert!(String::from_utf8_lossy(&ended.stdout).contains(&format!("state    {state}"))),
            Some(3) => assert!(said.contains("try again, give more --seconds, or leave --state out"), "{said}"),
            code => panic!("{state}: ended with {code:?}: {said}"),
        }
    }
}

#[test]
fn two_measurements_at_once_both_come_to_their_end() {
    let place = Place::new();
    let start = || place.highwire(LATENCY).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for run in [start(), start()] {
        assert_is_latency_report(&stdout(&run.wait_with_output().unwrap().assert().code(0)));
    }
}

#[test]
fn stopping_it_leaves_no_process_and_nothing_in_the_way_of_the_next() {
    let place = Place::new();
    // Ctrl-C reaches the whole group; a supervisor signals one process; a crash asks nobody.
    for (signal, whole_group) in [("INT", true), ("INT", false), ("TERM", false), ("KILL", false)] {
        let mut command = place.highwire(&["bench", "latency", "--seconds", "60"]);
        let mut run = command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let group = run.id();
        until("there are two processes", || members(group).len() == 2);
        // Right after the start, and once it is measuring.
        std::thread::sleep(Duration::from_millis(if whole_group { 500 } else { 20 }));
        send_signal(signal, if whole_group { format!("-{group}") } else { group.to_string() });
        let status = wait(&mut run);
        assert!(!status.success(), "SIG{signal}: a run that was stopped did not go well");
        until("nobody is left", || members(group).is_empty());
    }
    assert_is_latency_report(&stdout(&place.highwire(LATENCY).assert().code(0)));
}

#[test]
fn a_wire_is_measured_and_taken_away_again() {
    let place = Place::new();
    let left_behind = format!("{NAMESPACE}{}-driver", u32::MAX);
    if root() {
        // No process has this number: whose it was is gone.
        Command::new("ip").args(["netns", "add", &left_behind]).assert().success();
    }
    let run = place.highwire(WIRE).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let own = format!("{NAMESPACE}{}-", run.id());
    let out = run.wait_with_output().unwrap().assert().code(0);
    assert_eq!(stderr(&out), "", "a run that went well has nothing to complain of");
    let report: Value = serde_json::from_str(&stdout(&out)).unwrap();
    assert_eq!(report["network"], if root() { "veth" } else { "loopback" }, "{report}");
    assert_is_wire_report(&report);
    let names = namespaces();
    assert!(!names.contains(&left_behind), "{left_behind} was not removed");
    assert!(!names.iter().any(|name| name.starts_with(&own)), "{names:?}");
}

#[test]
fn a_wire_without_root_is_loopback_and_says_so() {
    let place = Place::new();
    let program = place.path().join("highwire");
    std::fs::copy(BINARY, &program).unwrap();
    let mut command = Command::new(&program);
    command.args(WIRE).current_dir("/");
    if root() {
        std::fs::set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
        command.uid(NOBODY).gid(NOBODY);
    }
    let report: Value = serde_json::from_str(&stdout(&command.assert().code(0))).unwrap();
    assert_eq!(report["network"], "loopback");
    assert!(report["notes"][0].as_str().unwrap().contains("OVER LOOPBACK"), "{}", report["notes"]);
    assert_is_wire_report(&report);
    let forced = stdout(&place.highwire(&[WIRE, &["--loopback"]].concat()).assert().code(0));
    assert_eq!(serde_json::from_str::<Value>(&forced).unwrap()["network"], "loopback");
}

#[test]
fn stopping_a_wire_leaves_no_namespace() {
    if !root() {
        eprintln!("NOT TESTED, needs root: namespaces of a run that is stopped");
        return;
    }
    let place = Place::new();
    // As soon as there is something to leave behind, and once it is measuring.
    for (signal, whole_group, after) in
        [("INT", true, 0), ("INT", false, 500), ("TERM", false, 100), ("KILL", false, 500)]
    {
        let mut command = place.highwire(&["bench", "wire", "--seconds", "60"]);
        let mut run = command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let group = run.id();
        let own = format!("{NAMESPACE}{group}-");
        let exists = || namespaces().iter().any(|name| name.starts_with(&own));
        until("there is a namespace", exists);
        std::thread::sleep(Duration::from_millis(after));
        send_signal(signal, if whole_group { format!("-{group}") } else { group.to_string() });
        assert!(!wait(&mut run).success(), "SIG{signal}: a run that was stopped did not go well");
        until("no namespace is left", || !exists());
        until("nobody is left", || members(group).is_empty());
    }
}

#[test]
fn a_reader_that_has_read_enough_is_not_a_failure() {
    let place = Place::new();
    for arguments in [&[][..], &["bench", "latency", "--json", "--seconds", "1", "--sizes", "4"]] {
        let mut command = place.highwire(arguments);
        let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(run.stdout.take());
        let ended = run.wait_with_output().unwrap();
        assert!(ended.status.success(), "{arguments:?} ended with {}", ended.status);
        assert_eq!(String::from_utf8_lossy(&ended.stderr), "", "{arguments:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let place = Place::new();
    let commands: &[&[&str]] = &[
        &[],
        &["--help"],
        &["-h"],
        &["--version"],
        &["help", "up"],
        &["mem", "--help"],
        &["bench", "latency", "--help"],
        &["simulate", "--seed", "1"],
    ];
    for arguments in commands {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let failed = place.highwire(arguments).stdout(full).output().unwrap().assert().code(1);
        assert!(stderr(&failed).contains("No space left"), "{arguments:?}: {}", stderr(&failed));
    }
}

#[test]
fn an_error_says_its_cause_once_and_what_to_do() {
    let place = Place::new();
    let _echo = Echo::start(&mut place.echo("shm:echo", &[]));
    let mut failures = 0;
    // From those with which the command has just begun, to more than it needs.
    for limit in 5..24 {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &format!("ulimit -n {limit}; exec \"$@\""),
            "sh",
            BINARY,
            "ping",
            "shm:echo",
            "--count",
            "1",
        ]);
        let ended = command.env("HIGHWIRE_RUNTIME_DIR", place.path().join("run")).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(said.matches("Too many open files").count() <= 1, "with {limit} descriptors: {said}");
        if !ended.status.success() {
            assert!(said.contains("ulimit -n"), "with {limit} descriptors: {said}");
            failures += 1;
        }
    }
    assert!((5..18).contains(&failures), "{failures} of 19 limits were too low");
}

#[test]
fn any_user_can_measure() {
    let place = Place::new();
    // A copy: the way to the binary that was built may be closed to others.
    let program = place.path().join("highwire");
    std::fs::copy(BINARY, &program).unwrap();
    let temporary = place.path().join("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let mut command = Command::new(&program);
    command.args(LATENCY).env("TMPDIR", &temporary).current_dir("/");
    command.env_remove("HIGHWIRE_RUNTIME_DIR").env_remove("XDG_RUNTIME_DIR");
    let ours = std::fs::metadata(place.path()).unwrap().uid();
    let user = if ours == 0 { NOBODY } else { ours };
    if ours == 0 {
        std::fs::set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
        chown(&temporary, Some(NOBODY), Some(NOBODY)).unwrap();
        command.uid(NOBODY).gid(NOBODY);
    } else {
        eprintln!("NOT TESTED, needs root: a user other than the one who runs the tests");
    }
    assert_is_latency_report(&stdout(&command.assert().code(0)));
    let made = std::fs::metadata(temporary.join(format!("highwire-{user}"))).unwrap();
    assert_eq!((made.uid(), made.mode() & 0o777), (user, 0o700), "the runtime directory is private to its user");
}

#[test]
fn a_runtime_directory_that_is_not_safe_is_refused_with_what_to_do() {
    let place = Place::new();
    let run = place.path().join("run");
    let refused = |expected: &str| {
        let failed = place.highwire(LATENCY).assert().code(1);
        assert!(stderr(&failed).contains(expected), "{expected:?} is missing in:\n{}", stderr(&failed));
    };
    std::fs::set_permissions(&run, Permissions::from_mode(0o777)).unwrap();
    refused("chmod 700");
    std::fs::remove_dir_all(&run).unwrap();
    refused("mkdir -m 700");
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

/// That the text is what [`LATENCY`] is to print.
fn assert_is_latency_report(text: &str) {
    let report: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in:\n{text}"));
    assert!(report["machine"].is_object(), "{text}");
    // A machine that is busy with something else is neither near nor far.
    let state = report["state"].as_str().unwrap();
    assert!(["near", "far", "disturbed", "one-core"].contains(&state), "{state}");
    let rows = report["rows"].as_array().unwrap();
    let contestants: Vec<&str> = rows.iter().map(|row| row["contestant"].as_str().unwrap()).collect();
    // With a single CPU nobody can spin.
    let alone = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1);
    let dropped = report["rounds"]["trials_dropped"].as_u64().unwrap() > 0;
    assert_eq!(contestants, if alone { vec!["vi"] } else { vec!["raw-ring", "vi", "tcp-spin"] }, "{text}");
    for row in rows {
        assert_eq!((&row["measure"], &row["size"]), (&Value::from("latency_ns"), &Value::from(4)));
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} is no number in {row}"));
        let quantiles = ["p10", "median", "p90", "p99"].map(number);
        assert!(quantiles[0] > 0.0 && quantiles.is_sorted(), "{row}");
        assert!(number("count") >= 1.0, "{row}");
        // Where trials were dropped, a contestant and its floor may have no round in common.
        assert!(alone || (dropped && row["of_floor"].is_null()) || number("of_floor") > 0.0, "{row}");
    }
    assert!(alone || rows[0]["of_floor"] == 1.0, "the floor is what all are measured by");
}

/// That the report is what [`WIRE`] is to make.
fn assert_is_wire_report(report: &Value) {
    let rows = report["rows"].as_array().unwrap();
    let row = |contestant: &str, measure: &str| {
        let found = rows.iter().find(|row| row["contestant"] == contestant && row["measure"] == measure);
        found.unwrap_or_else(|| panic!("no {measure} of {contestant} in {report}"))
    };
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        return;
    }
    assert_eq!(row("udp-spin", "latency_ns")["of_floor"], 1.0);
    for row in [row("udp-spin", "latency_ns"), row("tcp-spin", "latency_ns"), row("tcp-spin", "bandwidth_gb_s")] {
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} is no number in {row}"));
        let quantiles = ["p10", "median", "p90", "p99"].map(number);
        assert!(quantiles[0] > 0.0 && quantiles.is_sorted() && number("count") >= 1.0, "{row}");
        assert_eq!(row["size"], 4);
    }
    assert_eq!(rows.len(), 3, "{report}");
}

/// The network namespaces that have names.
fn namespaces() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir("/var/run/netns") else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

fn root() -> bool {
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

/// Processes of a group that have not ended.
fn members(group: u32) -> Vec<u32> {
    let numbers =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let belongs = |pid: &u32| {
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
        // The name in parentheses may hold anything; behind it come state, parent and group.
        let behind: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        behind.len() > 2 && behind[0] != "Z" && behind[2] == group.to_string()
    };
    numbers.filter(belongs).collect()
}

fn send_signal(signal: &str, whom: String) {
    Command::new("bash").args(["-c", "kill -s \"$0\" -- \"$1\"", signal, &whom]).assert().success();
}

fn wait(child: &mut Child) -> std::process::ExitStatus {
    let mut status = None;
    until("it ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

fn until(what: &str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !look() {
        assert!(Instant::now() < deadline, "after 20 seconds it is still not true that {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const LATENCY: &[&str] =
    &["bench", "latency", "--json", "--seconds", "3", "--sizes", "4", "--contestants", "raw-ring,vi,tcp-spin"];
const WIRE: &[&str] =
    &["bench", "wire", "--json", "--seconds", "1", "--sizes", "4", "--contestants", "udp-spin,tcp-spin"];
/// How the names of its namespaces begin.
const NAMESPACE: &str = "highwire-bench-";
/// The user whom nothing belongs to.
const NOBODY: u32 = 65534;
