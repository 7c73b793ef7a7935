//! Several users of one host: each has a registry of his own and lanes among his own processes, unless root's brings all
//! together.

use crate::actor::{Actor, run};
use crate::compiled::compiled;
use crate::ground::{Ground, Nobody, is_root, until};
use crate::network::Namespace;
use rustix::process::Signal;
use serde_json::Value;
use std::path::PathBuf;

#[test]
fn ends_of_different_users_stay_plain_and_those_of_each_have_lanes() {
    if !is_root("lanes of several users") {
        return;
    }
    let place = Place::new("apart");
    let [one, another] = USERS.map(|user| Nobody::numbered(&place.ground, user));
    let between = place.talk(&one, &another);
    for process in between.processes() {
        until("both have asked, each the registry of his own user", || place.told(process).reason == "other-end");
    }
    // Each user's own are paired, at the same time and after it.
    for user in [&one, &another] {
        let among = place.talk(user, user);
        for process in among.processes() {
            until("an end of one user is paired", || {
                let told = place.told(process);
                told.reason == "paired" && told.lane > 0
            });
        }
        among.end();
    }
    for process in between.processes() {
        let told = place.told(process);
        assert_eq!((told.reason.as_str(), told.lane), ("other-end", 0), "{told:?}");
        assert!(told.tcp > 100_000, "they have talked all the time: {told:?}");
    }
    between.end();
}

#[test]
fn the_registry_of_root_brings_ends_of_different_users_together() {
    if !is_root("a registry for several users") {
        return;
    }
    let place = Place::new("together");
    let mut command = place.namespace.enter(&place.ground.highwire(&["run", "--", "true"]));
    run("highwire run by root", &mut command).well("highwire run by root");
    let [one, another] = USERS.map(|user| Nobody::numbered(&place.ground, user));
    let between = place.talk(&one, &another);
    for process in between.processes() {
        until("ends of two users are paired", || {
            let told = place.told(process);
            told.reason == "paired" && told.lane > 0
        });
    }
    between.end();
}

/// A network namespace, in which no registry runs that a test before has left.
struct Place {
    ground: Ground,
    namespace: Namespace,
    program: PathBuf,
}

/// What `highwire explain` tells of the connection of a process.
#[derive(Debug, Default)]
struct Told {
    reason: String,
    lane: u64,
    tcp: u64,
}

impl Place {
    fn new(tag: &str) -> Place {
        let ground = Ground::new();
        let program = ground.directory("binaries").join("switched");
        std::fs::copy(compiled("switched"), &program).unwrap();
        Place { ground, namespace: Namespace::new(tag), program }
    }

    /// A server of one user and a client of another who talk until they are told to end.
    fn talk(&self, serving: &Nobody, asking: &Nobody) -> Talk {
        let role = |user: &Nobody, name: &str, port: &str| {
            let mut command = user.highwire(&self.program);
            Actor::start(name, &mut self.namespace.enter(command.args(["switched", name, port])))
        };
        let mut server = role(serving, "server", "0");
        let client = role(asking, "client", &server.told("port"));
        Talk { server, client }
    }

    /// What root is told of the connection of a process, once it has carried bytes.
    fn told(&self, process: u32) -> Told {
        let command = self.ground.highwire(&["explain", "--json"]);
        let lines = run("explain", &mut self.namespace.enter(&command)).well("explain");
        let told: Value = serde_json::from_str(&lines.join("\n")).unwrap();
        let processes = told["processes"].as_array().unwrap();
        let sockets = processes.iter().find(|each| each["pid"] == process).map(|found| &found["sockets"]);
        let Some(socket) = sockets.and_then(|sockets| sockets.get(0)) else { return Told::default() };
        let bytes = |way: &str| {
            ["bytes_in", "bytes_out"].iter().map(|name| socket[way][name].as_u64().unwrap_or_default()).sum()
        };
        let reason = socket["reason"].as_str().unwrap_or_default().to_owned();
        Told { reason, lane: bytes("lane"), tcp: bytes("tcp") }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for user in USERS {
            let _ = std::fs::remove_dir_all(format!("/dev/shm/highwire-{user}"));
        }
    }
}

struct Talk {
    server: Actor,
    client: Actor,
}

impl Talk {
    fn processes(&self) -> [u32; 2] {
        [self.server.id(), self.client.id()]
    }

    /// Not one byte was wrong, and nobody complained.
    fn end(self) {
        self.client.signal(Signal::TERM);
        assert_eq!(self.client.ended_well().last().map(String::as_str), Some("client done"));
        assert_eq!(self.server.ended_well().last().map(String::as_str), Some("server done"));
    }
}

/// Two that are nobody in particular.
const USERS: [u32; 2] = [61_235, 61_236];
