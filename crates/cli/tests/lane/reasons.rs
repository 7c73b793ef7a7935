//! Every start that is plain gives one line with its reason, and `highwire explain` lists it.

use crate::actor::{Actor, run};
use crate::compiled::compile;
use crate::ground::{Ground, Nobody, Way, installed, is_root};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn a_static_program_is_told_and_listed() {
    let ground = Ground::new();
    told_and_listed(&ground, ground.command(Way::Highwire, stays(&["-static"])), "static");
}

#[test]
fn a_static_program_that_a_program_starts_is_told_and_listed() {
    let ground = Ground::new();
    child_is_told_and_listed(&ground, &stays(&["-static"]), &[], "static");
}

#[test]
fn a_script_for_a_static_program_is_told_and_listed() {
    let ground = Ground::new();
    let script = ground.file("script", format!("#!{}\n", stays(&["-static"]).display()));
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    told_and_listed(&ground, ground.command(Way::Highwire, script), "static");
}

#[test]
fn a_program_with_a_sanitizer_is_told_and_listed() {
    let ground = Ground::new();
    for flag in ["-fsanitize=address", "-fsanitize=thread"] {
        told_and_listed(&ground, ground.command(Way::Highwire, stays(&[flag])), "sanitizer");
    }
}

/// The runtime of AddressSanitizer ends programs in which another library comes before it.
#[test]
fn a_program_with_a_sanitizer_that_a_program_starts_is_told_and_listed() {
    let ground = Ground::new();
    for flag in ["-fsanitize=address", "-fsanitize=thread"] {
        child_is_told_and_listed(&ground, &stays(&[flag]), &[], "sanitizer");
    }
}

#[test]
fn a_program_under_a_filter_is_told_and_listed() {
    let ground = Ground::new();
    let program = stays(&[]);
    // The filter is there before `highwire run` is.
    let mut command = Command::new(&program);
    command.env("FILTER", "yes").env("HIGHWIRE_RUNTIME_DIR", ground.path().join("run"));
    command.args([crate::ground::HIGHWIRE, "run", "--"]).arg(&program);
    told_and_listed(&ground, command, "filter");
    // The filter is made by a program under Highwire, for those that it starts.
    child_is_told_and_listed(&ground, &program, &["FILTER=yes", program.to_str().unwrap()], "filter");
}

/// `env` replaces itself by `execvp`, a program here by `execveat` and `fexecve`.
#[test]
fn a_program_without_the_library_in_its_environment_is_told_and_listed() {
    let ground = Ground::new();
    let program = stays(&[]);
    child_is_told_and_listed(&ground, &program, &["-u", "LD_PRELOAD"], "environment");
    for how in ["at", "in", "by"] {
        child_is_told_and_listed(
            &ground,
            &program,
            &[&format!("EXECUTE={how}"), program.to_str().unwrap()],
            "environment",
        );
    }
}

#[test]
fn a_program_with_file_capabilities_is_told_and_listed() {
    if !is_root("file capabilities under Highwire") {
        return;
    }
    let ground = Ground::new();
    let nobody = Nobody::new(&ground);
    let program = copy(&ground, "capable", 0o755);
    // Version 2, effective at once: CAP_NET_RAW.
    let words: [u32; 5] = [0x0200_0001, 1 << 13, 0, 0, 0];
    let value: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    rustix::fs::setxattr(&program, c"security.capability", &value, rustix::fs::XattrFlags::empty()).unwrap();
    told_and_listed(&ground, nobody.highwire(&program), "capabilities");
}

#[test]
fn a_set_uid_program_is_told_and_listed() {
    if !is_root("set-uid programs under Highwire") {
        return;
    }
    let ground = Ground::new();
    let nobody = Nobody::new(&ground);
    told_and_listed(&ground, nobody.highwire(&copy(&ground, "root's", 0o4755)), "set-uid");
    // Root also becomes another user by one that is not root's.
    let program = copy(&ground, "nobody's", 0o755);
    std::os::unix::fs::chown(&program, Some(65534), Some(65534)).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    told_and_listed(&ground, ground.command(Way::Highwire, program), "set-uid");
}

/// Bits that change nothing for the user at hand are no reason.
#[test]
fn a_set_uid_program_of_the_same_user_has_lanes() {
    let ground = Ground::new();
    let program = copy(&ground, "own", 0o4755);
    let mut actor = Actor::start("own", &mut ground.command(Way::Highwire, program));
    actor.told("hold");
    let ended = actor.ended();
    assert_eq!((ended.status.code(), ended.errors.as_str()), (Some(7), ""), "{ended:?}");
}

#[test]
fn a_read_only_dev_shm_is_told_and_the_program_listed() {
    if !is_root("a read-only /dev/shm") {
        return;
    }
    let ground = Ground::new();
    // Of this mount namespace only: the file system itself stays as it is for others.
    let script = "mount --make-rprivate / && mount --bind /dev/shm /dev/shm && mount -o remount,bind,ro /dev/shm && exec \
                  \"$@\"";
    let highwire = ground.command(Way::Highwire, stays(&[]));
    let mut command = Command::new(installed("unshare", "util-linux"));
    command.args(["-m", "sh", "-c", script, "sh"]).arg(highwire.get_program()).args(highwire.get_args());
    command.envs(highwire.get_envs().filter_map(|(name, value)| Some((name, value?))));
    told_and_listed(&ground, command, "unprepared");
}

/// What the library shows of a program is a file of two megabytes, and beyond the limit the kernel ends whoever makes it.
#[test]
fn programs_run_with_a_limit_on_the_size_of_files() {
    let ground = Ground::new();
    assert!(run("true", &mut ground.command(Way::Highwire, "true")).status.success(), "the library is in its place");
    let script = "ulimit -f 64; exec \"$@\"";
    let limited = |highwire: &Command| {
        let mut command = Command::new("bash");
        command.args(["-c", script, "bash"]).arg(highwire.get_program()).args(highwire.get_args());
        command.envs(highwire.get_envs().filter_map(|(name, value)| Some((name, value?))));
        run("limited", &mut command)
    };
    let mut socket = ground.command(Way::Highwire, installed("python3", "python3"));
    let ended = limited(socket.args(["-c", "import socket; socket.socket(); print('made')"]));
    assert_eq!((ended.errors.as_str(), ended.output.join("")), ("", "made".to_owned()), "{ended:?}");
    // Where there is no library yet, the program runs plain: for a user of its own, there is none.
    if is_root("a user without a library") {
        let nobody = Nobody::numbered(&ground, 61_234);
        let _ = std::fs::remove_dir_all("/tmp/highwire-61234");
        let ended = limited(nobody.highwire(std::path::Path::new("/bin/echo")).arg("it ran"));
        assert_eq!(ended.output, ["it ran"], "{ended:?}");
        assert!(ended.errors.contains("runs plain") && ended.errors.contains("ulimit -f"), "{ended:?}");
    }
}

#[test]
fn programs_run_under_valgrind() {
    let ground = Ground::new();
    let valgrind = installed("valgrind", "valgrind");
    let client = installed("redis-cli", "redis-tools");
    let both = [Way::Plain, Way::Highwire].map(|way| {
        let mut command = ground.command(way, &valgrind);
        run("valgrind", command.args(["-q", "--error-exitcode=9"]).arg(&client).arg("--version"))
    });
    assert_eq!(both[1].status.code(), Some(0), "{both:?}");
    assert_eq!((&both[0].output, &both[0].errors), (&both[1].output, &both[1].errors));
}

/// The program at hand, with these flags for the compiler.
fn stays(flags: &[&str]) -> PathBuf {
    let mut all = vec!["-O1", "-pthread"];
    all.extend(flags);
    compile("stays", "stays", &all)
}

fn copy(ground: &Ground, name: &str, mode: u32) -> PathBuf {
    let program = ground.path().join(name);
    std::fs::copy(stays(&[]), &program).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
    program
}

/// Started by `highwire run` itself: the line is there without being asked for.
fn told_and_listed(ground: &Ground, mut command: Command, reason: &str) {
    let mut actor = Actor::start(reason, command.arg("argument"));
    let process = actor.told("hold");
    listed(ground, &process, reason);
    let ended = actor.ended();
    assert_eq!(ended.status.code(), Some(7), "{ended:?}");
    assert!(ended.output.contains(&"argument".to_owned()), "{ended:?}");
    let lines: Vec<&str> = ended.errors.lines().collect();
    assert!(matches!(lines[..], [line] if line.contains(" runs plain: ")), "one line says why: {ended:?}");
}

/// Started by a program that runs under Highwire: the line is for those that ask for a log.
fn child_is_told_and_listed(ground: &Ground, program: &Path, before: &[&str], reason: &str) {
    for log in [false, true] {
        let mut command = ground.highwire(if log { &["run", "--log", "--"] } else { &["run", "--"] });
        command.args(["sh", "-c", "env \"$@\"; exit $?", "sh"]).args(before).arg(program).arg("argument");
        let mut actor = Actor::start(reason, &mut command);
        let process = actor.told("hold");
        listed(ground, &process, reason);
        let ended = actor.ended();
        assert_eq!((ended.status.code(), ended.output[0].as_str()), (Some(7), "argument"), "{ended:?}");
        let lines: Vec<&str> = ended.errors.lines().collect();
        let told = matches!(lines[..], [line] if line.contains(&process) && line.contains(" runs plain: "));
        assert!(if log { told } else { lines.is_empty() }, "with the log one line says why: {ended:?}");
    }
}

fn listed(ground: &Ground, process: &str, reason: &str) {
    let ended = run("explain", &mut ground.highwire(&["explain", "--json"]));
    let told = ended.well("explain").join("");
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let of_process = |entry: &&serde_json::Value| entry["pid"].as_u64() == process.parse().ok();
    let entry = told["processes"].as_array().unwrap().iter().find(of_process);
    let entry = entry.unwrap_or_else(|| panic!("process {process} is not listed: {told}"));
    assert_eq!(entry["plain"], reason, "{entry}");
    assert!(entry["plain_words"].as_str().is_some_and(|words| !words.is_empty()), "{entry}");
    let ended = run("explain", &mut ground.highwire(&["explain", process]));
    assert!(ended.well("explain").join(" ").contains("runs plain: "), "process {process}");
}
