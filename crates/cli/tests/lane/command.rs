//! The command itself: what it says of wrong use, how it ends, and the switches.

use crate::actor::{Actor, ended_by, run};
use crate::compiled::{compile, compiled};
use crate::ground::{Ground, HIGHWIRE, Nobody, Way, installed, is_root};
use crate::scenario::Scenario;
use rustix::process::Signal;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn run_without_a_program_says_how_it_is_used() {
    let ground = Ground::new();
    for arguments in [&["run"][..], &["run", "--"]] {
        let ended = run("run", &mut ground.highwire(arguments));
        assert_eq!(ended.status.code(), Some(2), "{arguments:?}: {ended:?}");
        assert!(ended.errors.contains("Usage") || ended.errors.contains("usage"), "{arguments:?}: {ended:?}");
    }
}

#[test]
fn a_program_that_cannot_be_run_is_told_as_env_tells_it() {
    let ground = Ground::new();
    let text = ground.file("text", "not a program\n");
    std::fs::set_permissions(&text, Permissions::from_mode(0o644)).unwrap();
    let directory = ground.directory("directory");
    let cases: [(PathBuf, i32); 4] =
        [("/no/such/program".into(), 127), ("no-such-program-anywhere".into(), 127), (text, 126), (directory, 126)];
    for (program, code) in cases {
        let ended = run("run", &mut ground.command(Way::Highwire, &program));
        assert_eq!(ended.status.code(), Some(code), "{program:?}: {ended:?}");
        assert!(ended.errors.contains(program.to_str().unwrap()), "it is named: {ended:?}");
        let env = run("env", Command::new("env").arg(&program));
        assert_eq!(env.status.code(), Some(code), "env says the same");
    }
}

#[test]
fn exit_codes_and_deaths_by_signal_are_passed_on() {
    let ground = Ground::new();
    for code in [0, 1, 7, 125, 255] {
        let ended = run("sh", ground.command(Way::Highwire, "sh").args(["-c", &format!("exit {code}")]));
        assert_eq!(ended.status.code(), Some(code), "{ended:?}");
    }
    for signal in [Signal::KILL, Signal::TERM, Signal::ABORT, Signal::SEGV] {
        let number = signal.as_raw();
        let ended = run("sh", ground.command(Way::Highwire, "sh").args(["-c", &format!("kill -{number} $$")]));
        assert_eq!(ended_by(&ended), Some(number), "{ended:?}");
    }
}

#[test]
fn output_input_and_arguments_are_the_programs_own() {
    let ground = Ground::new();
    let hello = compile("hello", "hello", &[]);
    let odd = ["--", "-x", "", "a b", "--only", "run", "\u{e9}"];
    let plain = run("plain", ground.command(Way::Plain, &hello).args(odd));
    let highwire = run("highwire", ground.command(Way::Highwire, &hello).args(odd));
    assert_eq!((highwire.status, &highwire.output, &highwire.errors), (plain.status, &plain.output, &plain.errors));
    // By its name alone, as the shell finds it, and in the directory and with the umask that it was started with.
    let script = "pwd; umask; ulimit -n; echo $0 $PPID | cut -d' ' -f1; cat";
    let both = [Way::Plain, Way::Highwire].map(|way| {
        let mut command = ground.command(way, "sh");
        command.args(["-c", script]).current_dir(ground.path());
        run("sh", &mut command)
    });
    assert_eq!(both[0].output, both[1].output);
    assert_eq!(both[1].errors, "");
}

/// Scripts, programs that something else is preloaded into, and Highwire under Highwire.
#[test]
fn programs_that_bring_their_own_surroundings() {
    let ground = Ground::new();
    let script = ground.file("script", "#!/bin/sh\necho it ran with $1\n");
    std::fs::set_permissions(&script, Permissions::from_mode(0o755)).unwrap();
    let ended = run("script", ground.command(Way::Highwire, &script).arg("this"));
    assert_eq!((ended.output.as_slice(), ended.errors.as_str()), (&["it ran with this".to_owned()][..], ""));

    let other = compile("preloaded", "preloaded.so", &["-shared", "-fPIC"]);
    let hello = compile("hello", "hello", &[]);
    let plain = run("plain", ground.command(Way::Plain, &hello).env("LD_PRELOAD", &other));
    assert!(plain.output.contains(&"preloaded".to_owned()), "{plain:?}");
    let under = run("highwire", ground.command(Way::Highwire, &hello).env("LD_PRELOAD", &other));
    assert_eq!((under.status, &under.output, under.errors.as_str()), (plain.status, &plain.output, ""));

    let twice = run("twice", &mut ground.highwire(&["run", "--", HIGHWIRE, "run", "--", "echo", "twice"]));
    assert_eq!(twice.well("twice"), ["twice"]);
}

/// The counters' file is mapped over the library's own pages. Where the kernel's are larger, it would take the place of what
/// lies behind, too.
#[test]
fn counters_are_not_shown_where_pages_are_larger() {
    let ground = Ground::new();
    let script = "import os, socket
listener = socket.create_server(('127.0.0.1', 0))
one = socket.create_connection(listener.getsockname())
other = listener.accept()[0]
def play():
    for number in range(100):
        one.sendall(b'x' * number)
        other.recv(number, socket.MSG_WAITALL)
    print('/dev/shm/highwire-' in open('/proc/self/maps').read(), flush=True)
play()
child = os.fork()
if child == 0:
    play()
    os._exit(0)
print(os.waitpid(child, 0)[1])
";
    let larger = compile("large_pages", "large_pages.so", &["-shared", "-fPIC"]);
    let common =
        run("common", ground.highwire(&["run", "--log", "--", "python3", "-c", script]).env_remove("LD_PRELOAD"));
    assert_eq!(common.well("common"), ["True", "True", "0"]);
    let under =
        run("larger", ground.highwire(&["run", "--log", "--", "python3", "-c", script]).env("LD_PRELOAD", &larger));
    assert!(under.status.success(), "{under:?}");
    assert_eq!(under.output, ["False", "False", "0"]);
    assert!(under.errors.contains("pages of 65536 bytes"), "{}", under.errors);
}

/// Constructors of a program's libraries run before those of what is preloaded.
#[test]
fn libraries_that_begin_before_highwire_does() {
    let ground = Ground::new();
    let library = compile("early", "libearly.so", &["-shared", "-fPIC"]);
    let path = library.parent().unwrap().to_str().unwrap();
    // The library comes after the source that needs it, or the linker leaves it out.
    let flags = ["-DUSER", "-Wl,--no-as-needed", library.to_str().unwrap(), &format!("-Wl,-rpath,{path}")];
    let program = compile("early", "early", &flags);
    let plain = run("plain", &mut ground.command(Way::Plain, &program));
    assert!(plain.status.success() && plain.output[0].contains("status=7"), "{plain:?}");
    let under = run("highwire", &mut ground.command(Way::Highwire, &program));
    assert_eq!((under.status, &under.output, under.errors.as_str()), (plain.status, &plain.output, ""));
}

/// Each of the functions that are looked up late is the first of all hooks to be called, in a constructor that comes before
/// the library's own.
#[test]
fn each_function_may_be_the_first_before_highwire_begins() {
    let ground = Ground::new();
    let library = compile("first", "libfirst.so", &["-shared", "-fPIC"]);
    let path = library.parent().unwrap().to_str().unwrap();
    let flags = ["-DUSER", "-Wl,--no-as-needed", library.to_str().unwrap(), &format!("-Wl,-rpath,{path}")];
    let program = compile("first", "first", &flags);
    let functions = [
        "vfork",
        "fork",
        "_Fork",
        "clone",
        "posix_spawn",
        "posix_spawnp",
        "execv",
        "execvp",
        "execvpe",
        "fexecve",
        "execveat",
        "posix_spawn_file_actions_adddup2",
        "system",
        "popen",
        "select",
        "pselect",
        "epoll_pwait2",
        "closefrom",
        "fdopen",
        "vdprintf",
    ];
    for function in functions {
        let [plain, under] =
            [Way::Plain, Way::Highwire].map(|way| run(function, ground.command(way, &program).env("FIRST", function)));
        assert!(plain.output.first().is_none_or(|told| told != "-2"), "{function} was called: {plain:?}");
        assert_eq!(
            (under.status, &under.output, &under.errors),
            (plain.status, &plain.output, &plain.errors),
            "{function}"
        );
    }
}

#[test]
fn the_program_is_the_process_that_was_started() {
    let ground = Ground::new();
    let mut actor = Actor::start("sh", ground.command(Way::Highwire, "sh").args(["-c", "echo pid $$; cat"]));
    assert_eq!(actor.told("pid"), actor.id().to_string(), "it is executed, not started beside");
    actor.signal(Signal::INT);
    assert_eq!(ended_by(&actor.ended()), Some(Signal::INT.as_raw()));
}

/// Ctrl-C at a terminal, typed.
#[test]
fn ctrl_c_ends_the_program() {
    let ground = Ground::new();
    let python = installed("python3", "python3");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lane/python/terminal.py");
    let mut command = Command::new(python);
    command.args([script, HIGHWIRE, "run", "--", "sh", "-c", "echo ready; exec sleep 60"]);
    command.env("HIGHWIRE_RUNTIME_DIR", ground.path().join("run"));
    let ended = run("terminal", &mut command);
    assert_eq!(ended.output, ["ended by signal 2"], "{ended:?}");
}

#[test]
fn a_user_without_privileges_can_run_programs() {
    if !is_root("Highwire for a user without privileges") {
        return;
    }
    let ground = Ground::new();
    let nobody = Nobody::new(&ground);
    let readiness = ground.path().join("binaries/readiness");
    std::fs::copy(compiled("readiness"), &readiness).unwrap();
    let mut server = Actor::start("server", nobody.highwire(&readiness).args(["half_close", "server", "0"]));
    let port = server.told("port");
    let client = run("client", nobody.highwire(&readiness).args(["half_close", "client", &port]));
    assert_eq!(client.errors, "");
    assert_eq!(client.well("client"), ["client done: 2011"]);
    assert_eq!(server.ended().errors, "");
}

#[test]
fn nonsense_for_ports_is_refused_before_anything_runs() {
    let ground = Ground::new();
    for nonsense in ["", "x", "0", "65536", "-1", "80-", "-80", "90-80", "80,,90", "80;90", "1-2-3", "80 90x", "+80"] {
        for option in ["--only", "--never"] {
            let ended =
                run("run", &mut ground.highwire(&["run", &format!("{option}={nonsense}"), "--", "echo", "it ran"]));
            assert_eq!(ended.status.code(), Some(2), "{option}={nonsense:?}: {ended:?}");
            assert!(ended.output.is_empty(), "{option}={nonsense:?}: {ended:?}");
            assert!(ended.errors.contains(option), "{option}={nonsense:?} is named: {ended:?}");
        }
    }
    for sense in ["80", "1-65535", "80,443,8000-8100", "6379"] {
        for option in ["--only", "--never"] {
            let ended = run("run", &mut ground.highwire(&["run", option, sense, "--", "echo", "it ran"]));
            assert_eq!(ended.well("run"), ["it ran"], "{option} {sense}");
        }
    }
}

#[test]
fn lanes_are_made_only_at_the_ports_that_were_named() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "readiness", "waits");
    let plain = scenario.play(Way::Plain, Way::Plain);
    let used = |options: &dyn Fn(u16) -> Vec<String>| -> Option<u64> {
        let mut lane = None;
        // Whether a lane is used depends on who sleeps when, and that on what else the machine does.
        for attempt in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(100 * attempt));
            let port = crate::ground::free_port();
            let start = |role: &str| {
                let mut command = ground.highwire(&["run"]);
                command.args(options(port)).arg("--").arg(compiled("readiness")).args([
                    "waits",
                    role,
                    &port.to_string(),
                ]);
                Actor::start(role, &mut command)
            };
            let mut server = start("server");
            server.told("port");
            let client = start("client");
            let process = server.told("hold").parse().unwrap();
            lane = ground.lane_bytes(process);
            server.end_input();
            assert_eq!(client.ended_well(), plain.client);
            let said: Vec<String> = server.ended_well();
            assert_eq!(said.last(), plain.server.last());
            if lane > Some(0) {
                break;
            }
        }
        lane
    };
    let some = |lane: Option<u64>| assert!(lane > Some(0), "no byte went by a lane: {lane:?}");
    let none = |lane: Option<u64>| assert!(lane.is_none_or(|bytes| bytes == 0), "{lane:?} bytes went by a lane");
    some(used(&|port| vec!["--only".into(), port.to_string()]));
    some(used(&|port| vec!["--only".into(), format!("1,{}-{}", port - 1, port + 1)]));
    some(used(&|_| vec!["--never".into(), "1-1023".into()]));
    none(used(&|_| vec!["--only".into(), "1-1023".into()]));
    none(used(&|port| vec!["--never".into(), port.to_string()]));
    none(used(&|port| vec!["--only".into(), port.to_string(), "--never".into(), format!("{port}-{}", port + 1)]));
}

#[test]
fn the_log_names_connections_and_says_nothing_else_of_the_program() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "readiness", "half_close");
    let plain = scenario.play(Way::Plain, Way::Plain);
    let (mut server, _) = scenario.roles(Way::Highwire, Way::Highwire);
    let port = server.port();
    let mut command = ground.highwire(&["run", "--log", "--"]);
    let client = run("client", command.arg(compiled("readiness")).args(["half_close", "client", &port]));
    assert!(client.errors.contains(&port), "no word of the connection to port {port}: {client:?}");
    assert!(client.errors.lines().all(|line| line.starts_with("highwire")), "whose lines they are is said: {client:?}");
    assert_eq!(client.well("client"), plain.client);
    server.told("hold");
    server.end_input();
    assert_eq!(server.ended().errors, "", "only who asks for a log gets one");
}

#[test]
fn the_log_tells_once_of_each_connection_of_a_program_with_io_uring() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "kernel", "uring").logged();
    let (server, mut client) = scenario.roles(Way::Highwire, Way::Highwire);
    let client = run("client", &mut client);
    let server = server.ended();
    if server.output.iter().any(|line| line.contains("forbidden")) {
        eprintln!("SKIPPED: io_uring on sockets: this kernel forbids it");
        return;
    }
    let told = server.errors.lines().filter(|line| line.contains("io_uring")).count();
    assert_eq!((client.status.success(), told), (true, 3), "of three connections: {server:?}");
}

/// Lanes are switched off and on, again and again, while two programs talk: not one byte is wrong.
#[test]
fn lanes_are_switched_while_programs_talk() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "switched", "switched");
    let (server, mut command) = scenario.roles(Way::Highwire, Way::Highwire);
    let client = Actor::start("client", &mut command);
    for turn in 0..20 {
        let process = if turn % 4 < 2 { server.id() } else { client.id() }.to_string();
        let word = if turn % 2 == 0 { "off" } else { "on" };
        let ended = run("lanes", &mut ground.highwire(&["lanes", word, &process]));
        assert!(ended.status.success(), "lanes {word} {process}: {ended:?}");
        std::thread::sleep(std::time::Duration::from_millis(40));
    }
    // Off means off: what comes now goes by TCP.
    for process in [server.id(), client.id()] {
        assert!(run("lanes", &mut ground.highwire(&["lanes", "off", &process.to_string()])).status.success());
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    let before = ground.lane_bytes(server.id());
    assert!(before > Some(0), "no byte went by a lane before: {before:?}");
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert_eq!(ground.lane_bytes(server.id()), before, "bytes went by the lane though it is off");
    // And on again is on.
    for process in [server.id(), client.id()] {
        assert!(run("lanes", &mut ground.highwire(&["lanes", "on", &process.to_string()])).status.success());
    }
    let began = std::time::Instant::now();
    while ground.lane_bytes(server.id()) == before {
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "no byte went by the lane after it was on again");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    client.signal(Signal::TERM);
    assert_eq!(client.ended_well().last().map(String::as_str), Some("client done"));
    assert_eq!(server.ended_well().last().map(String::as_str), Some("server done"));
}

#[test]
fn lanes_of_who_is_not_there_cannot_be_switched() {
    let ground = Ground::new();
    let mut plain = Actor::start("cat", &mut Command::new("cat"));
    for process in [plain.id().to_string(), "4194304".to_owned(), "0".to_owned(), "-1".to_owned(), "x".to_owned()] {
        let ended = run("lanes", &mut ground.highwire(&["lanes", "off", "--", &process]));
        assert!(!ended.status.success(), "lanes off {process}: {ended:?}");
        assert!(!ended.errors.is_empty(), "lanes off {process} says why: {ended:?}");
    }
    plain.end_input();
    plain.ended_well();
}
