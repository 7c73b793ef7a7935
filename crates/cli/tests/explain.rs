//! `highwire explain` and `highwire top` beside real processes: two that play ping-pong under `highwire run`, some that
//! have no lane, and some of which nothing can be said.
#![forbid(unsafe_code)]

use assert_cmd::assert::{Assert, OutputAssertExt};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use rustix::thread::CpuSet;
use serde_json::Value;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[test]
fn every_byte_of_both_ends_is_told_by_its_way() {
    if play_role() {
        return;
    }
    let _alone = alone();
    let (server, client) = ping_pong(Way::Highwire(&[]), Way::Highwire(&[]), ROUNDS);

    let told = json(&highwire(&["explain", "--json"]).assert().code(0));
    assert_eq!(told["version"], 1);
    let (at_server, at_client) = (only_socket(&told, server.id()), only_socket(&told, client.id()));
    for (name, one, other) in [("server", &at_server, &at_client), ("client", &at_client, &at_server)] {
        assert_eq!((&one["local"], &one["state"]), (&other["remote"], &"established".into()), "{name}: {one}");
        assert_eq!(one["reason"], "paired", "{name}: {one}");
        for way in ["lane", "tcp"] {
            assert_eq!(one[way]["bytes_out"], other[way]["bytes_in"], "{name}: {one} {other}");
        }
        for direction in ["in", "out"] {
            let count = |way: &str, what: &str| number(&one[way][format!("{what}_{direction}")]);
            assert_eq!(count("lane", "bytes") + count("tcp", "bytes"), ROUNDS * SIZE, "{name}: {one}");
            // Both always look. By TCP goes what there is before a lane: 8 messages, and those while it is made.
            assert!(count("lane", "bytes") >= ROUNDS * SIZE * 9 / 10, "{name}: {one}");
            // No message goes partly by the one way and partly by the other.
            for way in ["lane", "tcp"] {
                assert_eq!(count(way, "messages") * SIZE, count(way, "bytes"), "{name}, {way} {direction}: {one}");
            }
        }
        let lane = number(&one["lane"]["bytes_in"]) + number(&one["lane"]["bytes_out"]);
        let share = one["lane_share"].as_f64().unwrap();
        assert!((share - lane as f64 / (2 * ROUNDS * SIZE) as f64).abs() < 1e-9, "{name}: {one}");
        let messages = number(&one["lane"]["messages_in"]) + number(&one["lane"]["messages_out"]);
        assert!(number(&one["calls_avoided"]) >= messages * 9 / 10, "{name}: {one}");
        assert!(number(&one["spins_good"]) <= number(&one["spins"]), "{name}: {one}");
    }

    // The same for people, of one process.
    let pid = server.id().to_string();
    let text = stdout(&highwire(&["explain", &pid]).assert().code(0));
    let remote = at_server["remote"].as_str().unwrap();
    for expected in [&format!("process {pid} of user "), remote, " established\n", "paired; ", "MB", " sleeps, "] {
        assert!(text.contains(expected), "{expected:?} is missing in:\n{text}");
    }
    assert!(!text.contains(&client.id().to_string()) && !text.contains(" listening\n"), "{text}");
    assert_eq!(text.lines().find(|line| line.chars().count() > 100), None);
    let all = stdout(&highwire(&["explain", "--all", &pid]).assert().code(0));
    assert!(all.contains(" listening\n"), "{all}");

    highwire(&["lanes", "off", &pid]).assert().code(0);
    let off = json(&highwire(&["explain", "--json", &pid]).assert().code(0));
    assert_eq!(off["processes"].as_array().map(Vec::len), Some(1), "{off}");
    assert_eq!(off["processes"][0]["switched_off"], true, "{off}");
    let text = stdout(&highwire(&["explain", &pid]).assert().code(0));
    assert!(text.contains(&format!("switched off, `highwire lanes on {pid}`")), "{text}");

    // Of processes that are gone nothing is told, however they went.
    let (server, client) = (server.end(), client.kill());
    let told = json(&highwire(&["explain", "--json"]).assert().code(0));
    for gone in [server, client] {
        assert_eq!(sockets(&told, gone), None, "{gone} is gone");
        assert!(!Path::new(&format!("/dev/shm/highwire-{}/{gone}", user())).exists(), "its file is removed");
    }
}

#[test]
fn connections_without_a_lane_say_why() {
    let _alone = alone();
    let rounds = 200;
    let (server, _client) = ping_pong(Way::Highwire(&[]), Way::Plain, rounds);
    assert_went_by_tcp(&server, rounds, "other-end", "is it on this host, and run with `highwire run`?");

    let (server, _client) = ping_pong(Way::Highwire(&["--only", "1"]), Way::Highwire(&[]), rounds);
    assert_went_by_tcp(&server, rounds, "port", "excluded by --only or --never");

    let (_server, client) = ping_pong(Way::Highwire(&[]), Way::Highwire(&[]), 3);
    assert_went_by_tcp(&client, 3, "young", "a lane comes after 8 receives or 64 KiB");
}

#[test]
fn a_connection_is_told_by_a_descriptor_that_it_still_has() {
    let _alone = alone();
    let mut server = Player::start(Way::Highwire(&[]), "duplicating server", 200);
    let mut client = Player::start(Way::Highwire(&[]), &server.listens_at(), 200);
    let descriptor = server.reads("done");
    client.reads("done");
    let told = json(&highwire(&["explain", "--json"]).assert().code(0));
    let socket = only_socket(&told, server.id());
    assert_eq!(socket["descriptor"].to_string(), descriptor, "{socket}");
    assert_eq!((&socket["state"], &socket["reason"]), (&"established".into(), &"paired".into()), "{socket}");
    for direction in ["bytes_in", "bytes_out"] {
        let sum = number(&socket["lane"][direction]) + number(&socket["tcp"][direction]);
        assert_eq!(sum, 200 * SIZE, "of both descriptors: {socket}");
    }
}

#[test]
fn a_forked_child_tells_of_what_it_inherited() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("forking");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/explain/forking.c");
    let mut compiler = Command::new("cc");
    let compiled = compiler.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).status();
    assert!(compiled.expect("needs a C compiler: install gcc").success());
    let rounds = 1000;
    let mut command = highwire(&["run", "--"]);
    let mut server = Player::from(command.arg(&program).arg(rounds.to_string()));
    let mut client = Player::start(Way::Highwire(&[]), &server.listens_at(), rounds);
    let child: u32 = server.reads("done").parse().unwrap();
    client.reads("done");
    let told = json(&highwire(&["explain", "--json"]).assert().code(0));
    let socket = only_socket(&told, child);
    assert_eq!(&socket["remote"], &only_socket(&told, client.id())["local"], "{socket}");
    for direction in ["bytes_in", "bytes_out"] {
        let sum = number(&socket["lane"][direction]) + number(&socket["tcp"][direction]);
        assert_eq!(sum, rounds * SIZE, "{socket}");
    }
    assert_eq!(sockets(&told, server.id()).map(Vec::len), Some(0), "the parent carried nothing");
}

fn assert_went_by_tcp(player: &Player, rounds: u64, reason: &str, words: &str) {
    let told = json(&highwire(&["explain", "--json"]).assert().code(0));
    let socket = only_socket(&told, player.id());
    assert_eq!((&socket["reason"], &socket["lane_share"]), (&reason.into(), &0.0.into()), "{socket}");
    assert!(socket["reason_words"].as_str().unwrap().contains(words), "{socket}");
    for direction in ["bytes_in", "bytes_out"] {
        assert_eq!((number(&socket["lane"][direction]), number(&socket["tcp"][direction])), (0, rounds * SIZE));
    }
    let text = stdout(&highwire(&["explain", &player.id().to_string()]).assert().code(0));
    assert!(text.contains(words), "{words:?} is missing in:\n{text}");
}

#[test]
fn a_process_of_which_nothing_can_be_said_is_told_why() {
    let _alone = alone();
    let fails = |pid: u32, expected: &str| {
        let failed = highwire(&["explain", &pid.to_string()]).assert().code(1);
        let said = stderr(&failed);
        assert!(said.starts_with(&format!("highwire: process {pid}: ")) && said.contains(expected), "{said}");
        assert_eq!(stdout(&failed), "");
    };
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    fails(gone.id(), "there is no such process");

    let plain = Sleeper(Command::new("sleep").arg("60").spawn().unwrap());
    fails(plain.0.id(), "it was not started with `highwire run`\n");

    let without = Sleeper(highwire(&["run", "--", "sleep", "60"]).spawn().unwrap());
    until(|| std::fs::read_to_string(format!("/proc/{}/comm", without.0.id())).is_ok_and(|name| name == "sleep\n"));
    until(|| maps(without.0.id()).contains("/libhighwire-"));
    fails(without.0.id(), "has no TCP socket yet");

    for (arguments, expected) in [
        (&["explain", "0"][..], "0 is not in 1.."),
        (&["explain", "redis"], "invalid value 'redis'"),
        (&["explain", "1", "2"], "unexpected argument '2'"),
        (&["top", "--interval", "0"], "from 0.1 to 3600"),
    ] {
        let wrong = highwire(arguments).assert().code(2);
        assert!(stderr(&wrong).contains(expected), "{arguments:?}: {}", stderr(&wrong));
    }
}

#[test]
fn each_user_sees_his_own_and_root_sees_all() {
    if user() != 0 {
        // Not by `eprintln`: the test runner would swallow what is said there.
        writeln!(std::io::stderr(), "NOT TESTED, needs root: explain for another user").unwrap();
        return;
    }
    let _alone = alone();
    let others = OtherUser::new();
    let nothing = others.highwire(&["explain"]).assert().code(0);
    assert!(stdout(&nothing).contains("no process runs under Highwire"), "{}", stdout(&nothing));
    let nothing = json(&others.highwire(&["explain", "--json"]).assert().code(0));
    assert_eq!(nothing["processes"], Value::Array(Vec::new()));
    let nothing = others.highwire(&["top", "--once", "--interval", "0.1"]).assert().code(0);
    assert!(stdout(&nothing).contains("no process runs under Highwire"), "{}", stdout(&nothing));

    let rounds = 20;
    let (server, client) = ping_pong(Way::Highwire(&[]), Way::OtherUser(&others), rounds);
    let denied = others.highwire(&["explain", &server.id().to_string()]).assert().code(1);
    for expected in ["permission denied", "belongs to user 0", "sudo highwire explain"] {
        assert!(stderr(&denied).contains(expected), "{expected:?} is missing in {}", stderr(&denied));
    }
    let own = json(&others.highwire(&["explain", "--json"]).assert().code(0));
    assert_eq!(own["processes"].as_array().map(Vec::len), Some(1), "{own}");
    only_socket(&own, client.id());
    let all = json(&highwire(&["explain", "--json"]).assert().code(0));
    only_socket(&all, server.id());
    only_socket(&all, client.id());
    let text = stdout(&highwire(&["explain", &client.id().to_string()]).assert().code(0));
    assert!(text.contains(&format!("of user {OTHER_USER}: ")), "{text}");
}

#[test]
fn top_without_a_terminal_prints_blocks_of_what_goes_by_now() {
    let _alone = alone();
    let mut server = Player::start(Way::Highwire(&[]), "server", ENDLESS);
    let client = Player::start(Way::Highwire(&[]), &server.listens_at(), ENDLESS);
    until(|| {
        let told = json(&highwire(&["explain", "--json"]).assert().code(0));
        sockets(&told, client.id()).is_some_and(|sockets| sockets.iter().any(|socket| socket["reason"] == "paired"))
    });
    let once = stdout(&highwire(&["top", "--once", "--interval", "0.5"]).assert().code(0));
    assert_eq!(once.matches("highwire top: ").count(), 1, "{once}");
    assert_eq!(once.lines().find(|line| line.chars().count() > 100), None);
    assert!(!once.contains('\x1b'), "{once:?}");
    for process in [server.id(), client.id()] {
        let mut lines = once.lines().skip_while(|line| line.split_whitespace().next() != Some(&process.to_string()));
        let total = cells(lines.next().unwrap_or_else(|| panic!("{process} is missing in:\n{once}")));
        let connection = lines.next().unwrap();
        assert!(connection.contains("127.0.0.1:"), "{once}");
        // Both always look: nothing goes by TCP any more, and every message is a call that was not made.
        assert!(total[0] > 100.0 && total[4] >= total[0] * 0.9, "{total:?} in:\n{once}");
        assert!(total[1] <= total[0] / 10.0, "{total:?} in:\n{once}");
        assert_eq!(cells(connection), total, "it has one connection:\n{once}");
    }

    // Blocks come until nobody reads them any more, which is not a failure.
    let mut several = highwire(&["top", "--interval", "0.1"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(several.stdout.take().unwrap()).lines();
    let heads = lines.map(Result::unwrap).filter(|line| line.starts_with("highwire top: "));
    assert_eq!(heads.take(3).count(), 3);
    let mut several = Sleeper(several);
    until(|| several.0.try_wait().unwrap().is_some());
    assert!(several.0.wait().unwrap().success());
}

#[test]
fn top_leaves_the_terminal_as_it_was() {
    let _alone = alone();
    for key in ["q", "\x03"] {
        let (terminal, far) = terminal();
        let before = format!("{:?}", tcgetattr(&far).unwrap());
        let ours = || Stdio::from(far.try_clone().unwrap());
        let mut command = highwire(&["top", "--interval", "0.2"]);
        let mut top = Sleeper(command.stdin(ours()).stdout(ours()).stderr(ours()).spawn().unwrap());
        let mut seen = String::new();
        read_until(&terminal, &mut seen, "\x1b[?25l");
        // The first page says that it looks; the next ones have something to tell.
        read_until(&terminal, &mut seen, "q ends");
        let first = seen.len();
        read_until(&terminal, &mut seen, "q ends");
        assert!(seen[first..].contains("highwire top"), "{seen:?}");
        assert_ne!(format!("{:?}", tcgetattr(&far).unwrap()), before, "keys are read one by one");
        // Not asked to end, it does not.
        rustix::io::write(&terminal, b"x\r ").unwrap();
        read_until(&terminal, &mut seen, "q ends");
        assert!(top.0.try_wait().unwrap().is_none());
        rustix::io::write(&terminal, key.as_bytes()).unwrap();
        read_until(&terminal, &mut seen, "\x1b[?25h\x1b[?1049l");
        until(|| top.0.try_wait().unwrap().is_some());
        assert!(top.0.wait().unwrap().success(), "{key:?}");
        assert_eq!(format!("{:?}", tcgetattr(&far).unwrap()), before, "{key:?}");
    }
}

/// A terminal of 80 columns and the far end, which the program has.
fn terminal() -> (OwnedFd, OwnedFd) {
    let terminal = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    rustix::pty::grantpt(&terminal).unwrap();
    rustix::pty::unlockpt(&terminal).unwrap();
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let far = rustix::pty::ioctl_tiocgptpeer(&terminal, flags).unwrap();
    tcsetwinsize(&far, Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    (terminal, far)
}

/// Reads on until the new part has these words.
fn read_until(terminal: &OwnedFd, seen: &mut String, words: &str) {
    let begin = seen.len();
    let patience = Timespec::try_from(PATIENCE).unwrap();
    while !seen[begin..].contains(words) {
        let mut polled = [PollFd::new(terminal, PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut polled, Some(&patience)), Ok(1), "{words:?} did not come: {seen:?}");
        // One at a time, so that nothing behind the words is taken.
        let mut byte = [0; 1];
        assert_eq!(rustix::io::read(terminal, &mut byte), Ok(1));
        seen.push(char::from(byte[0]));
    }
}

/// The five figures at the end of a line of `top`, without their units.
fn cells(line: &str) -> Vec<f64> {
    let mut cells = Vec::new();
    let mut unit = 1.0;
    for word in line.split_whitespace().rev() {
        match word.trim_end_matches("B/s") {
            "" => unit = 1.0,
            "k" => unit = 1e3,
            "M" => unit = 1e6,
            "G" => unit = 1e9,
            figure => {
                cells.push(unit * figure.parse::<f64>().unwrap_or_else(|_| panic!("{figure:?} in {line:?}")));
                unit = 1.0;
            }
        }
        if cells.len() == 5 {
            cells.reverse();
            return cells;
        }
    }
    panic!("{line:?} has no five figures")
}

/// How a process is started.
enum Way<'a> {
    Plain,
    Highwire(&'a [&'a str]),
    OtherUser(&'a OtherUser),
}

/// One end of a ping-pong, a process of its own: this test once more, in another role.
struct Player {
    child: Child,
    /// What it ends by when it is closed.
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Player {
    /// A server, or a client of the server at this port.
    fn start(way: Way<'_>, role: &str, rounds: u64) -> Player {
        let own = std::env::current_exe().unwrap();
        let mut command = match way {
            Way::Plain => Command::new(own),
            Way::Highwire(options) => {
                let mut command = Command::new(BINARY);
                command.arg("run").args(options).arg("--").arg(own);
                command
            }
            Way::OtherUser(user) => {
                let mut command = user.highwire(&["run", "--"]);
                command.arg(&user.player);
                command
            }
        };
        command.args(["--exact", "every_byte_of_both_ends_is_told_by_its_way", "--nocapture"]);
        command.env(ROLE, role).env(ROUNDS_OF_ROLE, rounds.to_string());
        Player::from(&mut command)
    }

    fn from(command: &mut Command) -> Player {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Player { stdin: child.stdin.take(), stdout, child }
    }

    fn id(&self) -> u32 {
        self.child.id()
    }

    /// The rest of the next line that begins with this word.
    fn reads(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "it ended before it said {word:?}");
            // The test runner of the other process talks too, and does not always end its lines.
            if let Some((_, rest)) = line.split_once(&format!("{MARK}{word}")) {
                return rest.trim().to_owned();
            }
        }
    }

    fn listens_at(&mut self) -> String {
        self.reads("port")
    }

    /// Lets it end by itself; its number.
    fn end(mut self) -> u32 {
        self.stdin = None;
        until(|| self.child.try_wait().unwrap().is_some());
        assert!(self.child.wait().unwrap().success());
        self.id()
    }

    fn kill(mut self) -> u32 {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.id()
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two processes that have played, and are still there.
fn ping_pong(server: Way<'_>, client: Way<'_>, rounds: u64) -> (Player, Player) {
    let mut server = Player::start(server, "server", rounds);
    let mut client = Player::start(client, &server.listens_at(), rounds);
    server.reads("done");
    client.reads("done");
    (server, client)
}

/// Plays ping-pong, if this process is there for that.
fn play_role() -> bool {
    let Ok(role) = std::env::var(ROLE) else { return false };
    let rounds: u64 = std::env::var(ROUNDS_OF_ROLE).unwrap().parse().unwrap();
    let serves = role.ends_with("server");
    stay_on_a_cpu(usize::from(serves));
    // Looking is asking too, and who asks often enough is not young any more.
    let looks = rounds > 8;
    let mut message = [7; SIZE as usize];
    // The listener lives for as long as somebody may ask for it.
    let listener = serves.then(|| TcpListener::bind("127.0.0.1:0").unwrap());
    let mut stream = match &listener {
        Some(listener) => {
            println!("{MARK}port {}", listener.local_addr().unwrap().port());
            listener.accept().unwrap().0
        }
        None => TcpStream::connect(("127.0.0.1", role.parse().unwrap())).unwrap(),
    };
    stream.set_nonblocking(looks).unwrap();
    for round in 0..rounds {
        if serves {
            receive(&mut stream, &mut message);
            stream.write_all(&message).unwrap();
        } else {
            stream.write_all(&message).unwrap();
            receive(&mut stream, &mut message);
        }
        if role.starts_with("duplicating") && round == rounds / 2 {
            // The first descriptor is closed when the other takes its place.
            stream = stream.try_clone().unwrap();
        }
    }
    println!("{MARK}done {}", stream.as_raw_fd());
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    true
}

/// Two that always look have to be on two CPUs: beside its reader, on one CPU, a writer has nobody to look.
fn stay_on_a_cpu(which: usize) {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    assert!(cpus.len() > 1, "lanes need two CPUs");
    let mut own = CpuSet::new();
    own.set(cpus[which]);
    rustix::thread::sched_setaffinity(None, &own).unwrap();
}

/// Reads a message whose reader always looks, and never sleeps.
fn receive(stream: &mut TcpStream, message: &mut [u8]) {
    let mut done = 0;
    let deadline = Instant::now() + PATIENCE;
    while done < message.len() {
        match stream.read(&mut message[done..]) {
            Ok(0) => panic!("the other end is gone"),
            Ok(length) => done += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                assert!(Instant::now() < deadline, "nothing came for {PATIENCE:?}");
                std::thread::yield_now();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A user who has nothing to do with the one who runs the tests, and copies of the programs: the way to those that were
/// built may be closed to others.
struct OtherUser {
    _folder: tempfile::TempDir,
    highwire: PathBuf,
    player: PathBuf,
}

impl OtherUser {
    fn new() -> OtherUser {
        let folder =
            tempfile::Builder::new().prefix("hw").permissions(Permissions::from_mode(0o755)).tempdir().unwrap();
        let (highwire, player) = (folder.path().join("highwire"), folder.path().join("player"));
        std::fs::copy(BINARY, &highwire).unwrap();
        std::fs::copy(std::env::current_exe().unwrap(), &player).unwrap();
        OtherUser { _folder: folder, highwire, player }
    }

    fn highwire(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.highwire);
        command.args(arguments).uid(OTHER_USER).gid(OTHER_USER).current_dir("/").env("HOME", "/nonexistent");
        command
    }
}

impl Drop for OtherUser {
    fn drop(&mut self) {
        for folder in [format!("/dev/shm/highwire-{OTHER_USER}"), format!("/tmp/highwire-{OTHER_USER}")] {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// A process that does not outlive the test.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The sockets of a process in what `explain --json` told.
fn sockets(told: &Value, process: u32) -> Option<&Vec<Value>> {
    let processes = told["processes"].as_array().unwrap();
    processes.iter().find(|each| each["pid"] == process).map(|process| process["sockets"].as_array().unwrap())
}

fn only_socket(told: &Value, process: u32) -> Value {
    let numbers = || told["processes"].as_array().unwrap().iter().map(|each| each["pid"].clone()).collect::<Vec<_>>();
    let sockets = sockets(told, process).unwrap_or_else(|| panic!("{process} is not among {:?}", numbers()));
    assert_eq!(sockets.len(), 1, "{sockets:#?}");
    sockets[0].clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn maps(process: u32) -> String {
    std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default()
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// While it is kept, no other test of this file runs: those who play keep two CPUs busy.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The command under test.
fn highwire(arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(arguments).stdin(Stdio::null());
    command
}

fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn json(assert: &Assert) -> Value {
    serde_json::from_str(&stdout(assert)).unwrap()
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8_lossy(&assert.get_output().stdout).into_owned()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8_lossy(&assert.get_output().stderr).into_owned()
}

const BINARY: &str = env!("CARGO_BIN_EXE_highwire");
const ROLE: &str = "HIGHWIRE_TEST_ROLE";
const ROUNDS_OF_ROLE: &str = "HIGHWIRE_TEST_ROUNDS";
const MARK: &str = "player: ";
const SIZE: u64 = 100;
const ROUNDS: u64 = 20_000;
const ENDLESS: u64 = u64::MAX;
const PATIENCE: Duration = Duration::from_secs(20);
const OTHER_USER: u32 = 61_234;
