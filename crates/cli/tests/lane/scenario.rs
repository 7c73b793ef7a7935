//! Two roles of a C program, played against each other, and what they said compared with what they say plainly.

use crate::actor::Actor;
use crate::compiled::compiled;
use crate::ground::{Ground, PATIENCE, Way};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// What two programs are to do.
pub struct Scenario<'a> {
    ground: &'a Ground,
    binary: PathBuf,
    name: &'a str,
    extra: Vec<String>,
    logged: bool,
}

/// What they did.
#[derive(Debug)]
pub struct Outcome {
    pub server: Vec<String>,
    pub client: Vec<String>,
    /// Bytes that the ends had moved by lanes when they held, if they did and tell.
    pub lane: Option<u64>,
}

/// Whether bytes have to go by the lane for the test to say anything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    Expected,
    Unsaid,
}

impl<'a> Scenario<'a> {
    pub fn new(ground: &'a Ground, program: &str, name: &'a str) -> Scenario<'a> {
        Scenario { ground, binary: compiled(program), name, extra: Vec::new(), logged: false }
    }

    /// A run that fails shows what became of each connection, too. Not for programs that have a socket as standard error.
    pub fn logged(mut self) -> Scenario<'a> {
        self.logged = true;
        self
    }

    fn command(&self, way: Way) -> Command {
        let mut command = self.ground.command(way, &self.binary);
        if self.logged {
            command.env("HIGHWIRE_LANES_LOG", "1");
        }
        command
    }

    /// One more argument for both roles, after the port.
    pub fn with(mut self, argument: impl Into<String>) -> Scenario<'a> {
        self.extra.push(argument.into());
        self
    }

    /// The server, which listens, and the client, not started yet.
    pub fn roles(&self, server: Way, client: Way) -> (Actor, Command) {
        let mut command = self.command(server);
        let mut actor = Actor::start(
            &format!("{} server ({server:?})", self.name),
            command.args([self.name, "server", "0"]).args(&self.extra),
        );
        let mut port = actor.told("port");
        // Some change it: the last one that is told counts.
        if self.name == "reuseport" {
            port = actor.told("port");
        }
        let mut command = self.command(client);
        command.args([self.name, "client", &port]).args(&self.extra);
        (actor, command)
    }

    /// Plays it to its end.
    pub fn play(&self, server: Way, client: Way) -> Outcome {
        let (mut serving, mut command) = self.roles(server, client);
        let mut asking = Actor::start(&format!("{} client ({client:?})", self.name), &mut command);
        let mut said = [Vec::new(), Vec::new()];
        let mut lane = None;
        let began = Instant::now();
        // Both speak while both run: whoever holds is looked at and let go. One that fails leaves the other waiting.
        while !(serving.has_ended() && asking.has_ended()) && began.elapsed() < PATIENCE {
            let ended = [serving.has_ended(), asking.has_ended()];
            for (number, actor) in [&mut serving, &mut asking].into_iter().enumerate() {
                while let Some(line) = actor.line(Duration::from_millis(1)) {
                    if let Some(process) = line.strip_prefix("hold ") {
                        let bytes = self.ground.lane_bytes(process.parse().unwrap());
                        lane = bytes.map(|bytes| bytes + lane.unwrap_or(0)).or(lane);
                        actor.end_input();
                    } else {
                        said[number].push(line);
                    }
                }
                if ended[1 - number] {
                    actor.end_input();
                }
            }
        }
        let ends = [serving.ended(), asking.ended()];
        let whole =
            |number: usize| ends[number].output.iter().filter(|line| !line.starts_with("hold ")).cloned().collect();
        let both: [Vec<String>; 2] = [whole(0), whole(1)];
        assert!(
            ends.iter().all(|end| end.status.success()),
            "{} ({server:?}, {client:?})\nserver: {}, {:?}\n{}\nclient: {}, {:?}\n{}",
            self.name,
            ends[0].status,
            both[0],
            ends[0].errors,
            ends[1].status,
            both[1],
            ends[1].errors
        );
        let [server, client] = both;
        let server = server.into_iter().filter(|line| !line.starts_with("port ")).collect();
        Outcome { server, client, lane }
    }

    /// Plainly, under Highwire, and with one end of both: the same is said.
    pub fn compare(&self, lane: Lane) {
        let plain = self.play(Way::Plain, Way::Plain);
        for (server, client) in
            [(Way::Highwire, Way::Highwire), (Way::Highwire, Way::Plain), (Way::Plain, Way::Highwire)]
        {
            let both = server == client;
            let mut moved = None;
            // Whether a lane is used depends on who sleeps when, and that on what else the machine does.
            for _attempt in 0..3 {
                let run = self.play(server, client);
                assert_eq!(run.server, plain.server, "{}: the server ({server:?}, {client:?})", self.name);
                assert_eq!(run.client, plain.client, "{}: the client ({server:?}, {client:?})", self.name);
                moved = run.lane;
                if !both || lane == Lane::Unsaid || moved > Some(0) {
                    break;
                }
            }
            if !both {
                assert!(moved.is_none_or(|bytes| bytes == 0), "{}: {moved:?} bytes by a lane with one end", self.name);
            } else if lane == Lane::Expected {
                assert!(moved > Some(0), "{}: no byte went by a lane: {moved:?}", self.name);
            }
        }
    }
}
