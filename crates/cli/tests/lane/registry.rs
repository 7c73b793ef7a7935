//! A registry that ends, and one that hangs, while programs go on. Each test has one of its own, in a network of its own: the
//! others' is left alone.

use crate::actor::Actor;
use crate::compiled::compiled;
use crate::ground::{Ground, Way, is_root, until};
use crate::network::{Namespace, ip};
use rustix::process::{Pid, Signal, kill_process};
use std::process::Command;

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
