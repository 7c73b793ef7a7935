//! A registry that ends, and one that hangs, while programs go on. Each test has one of its own, in a network of its own: the
//! others' is left alone.

use crate::actor::{Actor, run};
use crate::compiled::compiled;
use crate::ground::{Ground, Nobody, Way, installed, is_root, until};
use crate::network::{Namespace, ip};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn a_server_that_outlives_the_registry_has_lanes_from_the_next() {
    if !is_root("a registry of a test's own") {
        return;
    }
    let ground = Ground::new();
    let apart = Apart::new("lasting");
    let mut server = Actor::start("server", &mut apart.command(&ground, &["lasting", "server", "0", "3"]));
    let port = server.told("port");
    for generation in 1..=3 {
        let mut client = Actor::start("client", &mut apart.command(&ground, &["lasting", "client", &port]));
        let process = client.told("hold").parse().unwrap();
        let bytes = ground.lane_bytes(process);
        assert!(bytes > Some(0), "no byte went by a lane with registry {generation}: {bytes:?}");
        client.end_input();
        assert_eq!(client.ended_well().last().map(String::as_str), Some("client done"));
        apart.end_registry();
    }
    assert_eq!(server.ended_well().last().map(String::as_str), Some("server done"));
}

/// What waits for a lock, or for the end of a pipe, does not wait for the registry.
#[test]
fn a_registry_inherits_nothing_of_the_program_that_starts_it() {
    if !is_root("a registry of a test's own") {
        return;
    }
    let ground = Ground::new();
    // The library is in its place, for which the limits below have no room.
    assert!(run("true", &mut ground.command(Way::Highwire, "true")).status.success());
    let apart = Apart::new("clean");
    let lock = ground.file("lock", "");
    let script = format!(
        "exec 9>{} 700</dev/null; flock -n 9 || exit 3; ulimit -S -n 256; ulimit -S -f 8; ulimit -S -t 600; exec nice -n 5 \"$@\"",
        lock.display()
    );
    let highwire = ground.command(Way::Highwire, "true");
    let mut command = Command::new("bash");
    command.args(["-c", &script, "bash"]).arg(highwire.get_program()).args(highwire.get_args());
    command.envs(highwire.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let ended = run("true", &mut apart.namespace.enter(&command));
    assert!(ended.status.success() && ended.errors.is_empty(), "{ended:?}");
    // The lock is free as soon as the program has ended.
    assert!(run("flock", Command::new("flock").arg("-n").arg(&lock).arg("true")).status.success(), "the lock is held");

    let registry = apart.registry().expect("there is a registry").as_raw_nonzero().get();
    let proc = std::path::PathBuf::from(format!("/proc/{registry}"));
    let open: Vec<std::path::PathBuf> = std::fs::read_dir(proc.join("fd"))
        .unwrap()
        .flatten()
        .map(|entry| std::fs::read_link(entry.path()).unwrap())
        .collect();
    let of_another = |target: &&std::path::PathBuf| {
        let name = target.to_string_lossy();
        name.starts_with('/') && !name.starts_with("/memfd:")
    };
    let foreign: Vec<_> = open.iter().filter(of_another).filter(|target| *target != Path::new("/dev/null")).collect();
    assert!(
        foreign.is_empty() && open.iter().filter(|target| **target == Path::new("/dev/null")).count() == 3,
        "{open:?}"
    );
    let stat = std::fs::read_to_string(proc.join("stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
    let (session, nice) = (fields[3], fields[16]);
    assert_eq!((session, nice), (registry.to_string().as_str(), "0"), "its session and nice value: {stat}");
    let limits = std::fs::read_to_string(proc.join("limits")).unwrap();
    let soft = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().split_ascii_whitespace().next().unwrap().to_owned()
    };
    assert_eq!((soft("Max file size"), soft("Max cpu time")), ("unlimited".to_owned(), "unlimited".to_owned()));
    assert!(soft("Max open files").parse::<u64>().unwrap() >= 1024, "{limits}");
}

/// Only one thread of a process asks at a time; a child that is forked meanwhile has no such thread.
#[test]
fn a_child_that_is_forked_while_a_thread_asks_has_lanes() {
    if !is_root("a registry of a test's own") {
        return;
    }
    let ground = Ground::new();
    let apart = Apart::new("asking");
    let mut server = Actor::start("server", &mut apart.command(&ground, &["asking", "server", "0"]));
    let port = server.told("port");
    let registry = apart.registry().unwrap().as_raw_nonzero().to_string();
    let mut client = Actor::start("client", &mut apart.command(&ground, &["asking", "client", &port, &registry]));
    let child = client.told("hold").parse().unwrap();
    let bytes = ground.lane_bytes(child);
    assert!(bytes > Some(0), "no byte of the child went by a lane: {bytes:?}");
    client.end_input();
    assert_eq!(client.ended_well().last().map(String::as_str), Some("client done"));
    assert_eq!(server.ended_well().last().map(String::as_str), Some("server done"));
}

/// An abstract name is whose process takes it first: another user's, that never answers, or does not even let others wait.
#[test]
fn a_registry_whose_name_another_user_has_is_found_all_the_same() {
    if !is_root("a registry of a test's own") {
        return;
    }
    let ground = Ground::new();
    let nobody = Nobody::new(&ground);
    let script = ground.file(
        "squat.py",
        "import socket, sys\n\
         s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
         s.bind('\\0highwire-lanes-2-0000000000')\n\
         s.listen(0)\n\
         kept = []\n\
         for i in range(int(sys.argv[1])):\n\
         \x20   c = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
         \x20   c.setblocking(False)\n\
         \x20   try: c.connect(s.getsockname()); kept.append(c)\n\
         \x20   except BlockingIOError: pass\n\
         print('hold', 1, flush=True)\n\
         sys.stdin.read()\n",
    );
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    for (tag, waiting) in [("squat", "0"), ("full", "3")] {
        let apart = Apart::new(tag);
        let mut squat = nobody.command(&installed("python3", "python3"));
        let mut squatter = Actor::start("squatter", &mut apart.namespace.enter(squat.arg(&script).arg(waiting)));
        squatter.told("hold");
        let began = Instant::now();
        let mut server = Actor::start("server", &mut apart.command(&ground, &["lasting", "server", "0", "1"]));
        let port = server.told("port");
        assert!(began.elapsed() < Duration::from_secs(1), "it waited {:?} for a registry", began.elapsed());
        let mut client = Actor::start("client", &mut apart.command(&ground, &["lasting", "client", &port]));
        let process = client.told("hold").parse().unwrap();
        let bytes = ground.lane_bytes(process);
        assert!(bytes > Some(0), "no byte went by a lane: {bytes:?}");
        client.end_input();
        assert_eq!(client.ended_well().last().map(String::as_str), Some("client done"));
        assert_eq!(server.ended_well().last().map(String::as_str), Some("server done"));
        squatter.end_input();
        squatter.ended_well();
    }
}

/// A network namespace and the registry that is there, which ends with it.
struct Apart {
    namespace: Namespace,
}

impl Apart {
    fn new(tag: &str) -> Apart {
        Apart { namespace: Namespace::new(tag) }
    }

    /// A role of the program, under Highwire.
    fn command(&self, ground: &Ground, arguments: &[&str]) -> Command {
        self.namespace.enter(ground.command(Way::Highwire, compiled("registry")).args(arguments))
    }

    /// The registry that is there.
    fn registry(&self) -> Option<Pid> {
        let is_registry = |process: &&str| {
            std::fs::read_to_string(format!("/proc/{process}/cmdline"))
                .is_ok_and(|line| line.contains("lanes-registry"))
        };
        let processes = ip(&["netns", "pids", &self.namespace.name]);
        Pid::from_raw(processes.lines().find(is_registry)?.parse().ok()?)
    }

    fn end_registry(&self) {
        if let Some(registry) = self.registry() {
            kill_process(registry, Signal::KILL).unwrap();
            until("the registry has ended", || self.registry().is_none());
        }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        if let Some(registry) = self.registry() {
            let _ = kill_process(registry, Signal::KILL);
        }
    }
}
