//! Engines between network namespaces, whose devices carry packets of a size that is chosen here.
//!
//! ```text
//!  namespace near ── veth ── namespace router ── veth ── namespace far
//! ```

use super::*;
use rustix::thread::{CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

/// Three namespaces, removed when this is dropped.
struct Paths {
    names: [String; 3],
}

impl Paths {
    /// `None`, and it was said why, where namespaces cannot be made.
    fn make(test: &str) -> Option<Paths> {
        let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
        if !capabilities(None).is_ok_and(|sets| sets.effective.contains(needed)) {
            eprintln!("SKIPPED: network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN");
            return None;
        }
        if Command::new("ip").arg("-V").output().is_err() {
            eprintln!("SKIPPED: the program `ip` is missing (Debian: apt install iproute2)");
            return None;
        }
        let process = std::process::id();
        let paths = Paths { names: ["near", "router", "far"].map(|name| format!("highwire-{test}-{process}-{name}")) };
        for name in &paths.names {
            ip(&["netns", "add", name]);
            ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        let [near, router, far] = paths.names.each_ref().map(String::as_str);
        for (side, other, subnet) in [(near, "near", 1), (far, "far", 2)] {
            ip(&["-n", side, "link", "add", "wire", "type", "veth", "peer", "name", other, "netns", router]);
            for (name, device, host) in [(side, "wire", 1), (router, other, 2)] {
                ip(&["-n", name, "address", "add", &format!("10.78.{subnet}.{host}/24"), "dev", device]);
                ip(&["-n", name, "address", "add", &format!("fd78:{subnet}::{host}/64"), "dev", device, "nodad"]);
                ip(&["-n", name, "link", "set", device, "up"]);
            }
            ip(&["-n", side, "route", "add", "default", "via", &format!("10.78.{subnet}.2")]);
            ip(&["-n", side, "route", "add", "default", "via", &format!("fd78:{subnet}::2")]);
        }
        for switch in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
            ip(&["netns", "exec", router, "sysctl", "-qw", switch]);
        }
        Some(paths)
    }

    /// The devices at both ends of the way from one side to the router take so many bytes.
    fn set_mtu(&self, side: &str, bytes: usize) {
        let [near, router, far] = &self.names;
        let own = if side == "near" { near } else { far };
        for (name, device) in [(own, "wire"), (router, side)] {
            ip(&["-n", name, "link", "set", device, "mtu", &bytes.to_string()]);
        }
    }

    /// A side whose sockets are in a namespace; they stay there.
    fn side(&self, namespace: usize, address: &str, seed: u64) -> Side {
        let home = File::open("/proc/thread-self/ns/net").unwrap();
        let there = File::open(Path::new("/var/run/netns").join(&self.names[namespace])).unwrap();
        move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        let side = side(address, Keys::new(ClusterKey::from_random([3; 32])), seed);
        move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        side
    }
}

impl Drop for Paths {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {}: {said}", arguments.join(" "));
}

/// Two sides and a session between them.
struct Pair {
    sides: [Side; 2],
    numbers: [u32; 2],
    start: Instant,
    arrived: usize,
}

impl Pair {
    fn connect(sides: [Side; 2]) -> Pair {
        let mut pair = Pair { sides, numbers: [0; 2], start: Instant::now(), arrived: 0 };
        let to = pair.sides[1].link().local_address();
        pair.sides[0].connect(pair.start.elapsed(), to).unwrap();
        pair.run("a session", |pair| pair.numbers.iter().all(|number| *number != 0));
        pair
    }

    fn run(&mut self, what: &str, mut done: impl FnMut(&mut Pair) -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < until, "{what} never came: {:?}", self.describe());
            for index in 0..2 {
                self.sides[index].turn(self.start.elapsed()).unwrap();
                while let Some(event) = self.sides[index].endpoint().poll_event() {
                    self.handle(index, event);
                }
            }
        }
    }

    fn handle(&mut self, index: usize, event: EndpointEvent<Vec<u8>, Vec<u8>>) {
        match event {
            EndpointEvent::Connected(number) | EndpointEvent::Accepted(number, _) => {
                self.numbers[index] = number;
                let session = self.sides[index].endpoint().session(number).unwrap();
                session.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
            }
            EndpointEvent::Session(_, Event::Received { target: Some(target), status: Ok(()), .. }) => {
                assert!(target == content(target.len()));
                self.arrived += 1;
            }
            EndpointEvent::Session(_, Event::Sent { status: Ok(()), .. }) => {}
            other => panic!("{other:?}"),
        }
    }

    fn describe(&mut self) -> [String; 2] {
        [0, 1].map(|index| {
            let (counters, number) = (self.sides[index].counters(), self.numbers[index]);
            let session = self.sides[index].endpoint().session(number);
            let stats = session.map(|session| (session.packet_bytes(), session.stats()));
            format!("{stats:?}, {counters:?}")
        })
    }

    /// The sizes that were found, once they are.
    fn sizes(&mut self) -> [usize; 2] {
        let numbers = self.numbers;
        let sessions = |pair: &mut Pair| {
            let [near, far] = &mut pair.sides;
            [near, far]
                .into_iter()
                .zip(numbers)
                .all(|(side, number)| side.endpoint().session(number).unwrap().is_size_found())
        };
        self.run("an end of the search", sessions);
        [0, 1].map(|index| self.sides[index].endpoint().session(numbers[index]).unwrap().packet_bytes())
    }

    /// Begins to send messages from the first side to the other.
    fn post(&mut self, messages: u64, bytes: usize) {
        for (index, number) in [(1, self.numbers[1]), (0, self.numbers[0])] {
            let session = self.sides[index].endpoint().session(number).unwrap();
            for token in 0..messages {
                if index == 1 {
                    session.post_receive(1, Incoming { token, target: Some(vec![0; bytes]) }).unwrap();
                } else {
                    let payload = Some(content(bytes));
                    let message = Outgoing { token, control: vec![], immediate: 0, payload_token: None, payload };
                    session.post_send(1, message).unwrap();
                }
            }
        }
    }
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes as u32).map(|at| (at ^ at >> 8) as u8).collect()
}

#[test]
fn ethernet_and_jumbo_frames_are_found_by_both_families() {
    let Some(paths) = Paths::make("size") else { return };
    for (mtu, v4, v6) in [(9000, 8972, 8952), (1500, 1472, 1452), (1400, 1200, 1200)] {
        ["near", "far"].iter().for_each(|side| paths.set_mtu(side, mtu));
        for (near, far, expected) in [("10.78.1.1:0", "10.78.2.1:0", v4), ("[fd78:1::1]:0", "[fd78:2::1]:0", v6)] {
            let mut pair = Pair::connect([paths.side(0, near, 1), paths.side(2, far, 2)]);
            assert_eq!(pair.sizes(), [expected; 2], "devices of {mtu} bytes, {near}: {:?}", pair.describe());
            pair.post(4, 1_000_000);
            pair.run("four messages", |pair| pair.arrived == 4);
        }
    }
}

#[test]
fn a_router_with_a_narrow_way_behind_it_is_found_out() {
    let Some(paths) = Paths::make("narrow") else { return };
    paths.set_mtu("near", 9000);
    paths.set_mtu("far", 1500);
    // Near sends what the router drops, and is told so by the network, which it does not believe.
    let mut pair = Pair::connect([paths.side(0, "10.78.1.1:0", 1), paths.side(2, "10.78.2.1:0", 2)]);
    assert_eq!(pair.sizes(), [1472, 1472], "{:?}", pair.describe());
    pair.post(4, 1_000_000);
    pair.run("four messages", |pair| pair.arrived == 4);
}

#[test]
fn a_way_that_becomes_narrow_carries_what_is_under_way() {
    // The sender's own device refuses, or a router drops.
    for (test, narrowed) in [("refuse", ["near", "far"].as_slice()), ("drop", ["far"].as_slice())] {
        let Some(paths) = Paths::make(test) else { return };
        ["near", "far"].iter().for_each(|side| paths.set_mtu(side, 9000));
        let mut pair = Pair::connect([paths.side(0, "10.78.1.1:0", 1), paths.side(2, "10.78.2.1:0", 2)]);
        assert_eq!(pair.sizes(), [8972; 2]);
        pair.post(20, 3_000_000);
        pair.run("the first message", |pair| pair.arrived == 1);
        narrowed.iter().for_each(|side| paths.set_mtu(side, 1500));
        pair.run("all messages", |pair| pair.arrived == 20);
        assert_eq!(pair.sizes()[0], 1472, "{test}: {:?}", pair.describe());
        assert_eq!(pair.sides[0].link().counters().gso_refused, 0, "the kernel still cuts bursts");
    }
}
