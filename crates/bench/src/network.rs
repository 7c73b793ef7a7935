//! The network of `bench wire`, `bench landing`, `bench sockets` and `bench rpc`: two network namespaces, joined by two
//! pairs of virtual Ethernet devices.
//!
//! ```text
//! namespace highwire-bench-PID-driver            namespace highwire-bench-PID-peer
//!   whole      10.77.0.1  ──────────── veth ────────────  10.77.0.2  whole
//!   segmented  10.77.1.1  ──── veth, offloads off ──────  10.77.1.2  segmented
//! ```
//!
//! A process of its own, the *keeper*, makes it and takes it away again. Ctrl-C does not reach the
//! keeper, which is in a process group of its own. It reads from a pipe whose other end only the
//! measuring process has: however that one ends, the pipe closes, and the keeper removes what it made.
//! What a keeper left behind that was itself killed, the next one removes; names tell whose it was.

use crate::BenchError;
use crate::launch;
use crate::pair::{Role, own_executable};
use rustix::thread::{CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

/// The hidden subcommand under which a `highwire` binary is the keeper of a network.
pub const NETWORK_COMMAND: &str = "bench-network";

/// How packets go from one process to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    /// As the kernel likes best: what a sender hands over at once stays in one piece.
    Whole,
    /// Cut into packets of 1500 bytes by the sender's CPU, each received by itself.
    Segmented,
}

/// Where the two processes of a measurement are, and how they reach each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Network {
    /// Namespaces of the driver and of the peer; none where both stay where they were started.
    namespaces: Option<[String; 2]>,
    whole: [Ipv4Addr; 2],
    segmented: Option<[Ipv4Addr; 2]>,
    /// Programs of one host are compared: see [`Network::of_one_host`].
    one_host: bool,
}

impl Network {
    /// The loopback device of the namespace that both are in.
    pub(crate) fn loopback() -> Network {
        Network { namespaces: None, whole: [Ipv4Addr::LOCALHOST; 2], segmented: None, one_host: false }
    }

    /// The same where programs of one host are compared, as most of them are: TCP goes over loopback, and whoever makes
    /// calls that block runs where the kernel puts it. A process that may use a single CPU does not spin before it
    /// sleeps.
    pub(crate) fn of_one_host(self) -> Network {
        Network { one_host: true, ..self }
    }

    /// Whether that is so.
    pub(crate) fn is_of_one_host(&self) -> bool {
        self.one_host
    }

    /// The address of one side, where there is such a wire.
    pub(crate) fn address(&self, wire: Wire, role: Role) -> Option<IpAddr> {
        let addresses = match wire {
            Wire::Whole => Some(self.whole),
            Wire::Segmented => self.segmented,
        };
        addresses.map(|addresses| IpAddr::V4(addresses[place(role)]))
    }

    /// Moves this thread, and whatever it starts from now on, to where this side belongs.
    pub(crate) fn enter(&self, role: Role) -> Result<Home, BenchError> {
        let Some(namespaces) = &self.namespaces else { return Ok(Home(None)) };
        let home = File::open("/proc/thread-self/ns/net")?;
        let there = File::open(Path::new(NAMESPACES).join(&namespaces[place(role)]))?;
        move_into_link_name_space(there.as_fd(), Some(LinkNameSpaceType::Network)).map_err(io::Error::from)?;
        Ok(Home(Some(home)))
    }
}

/// Where a thread was before it entered a network; it goes back when this is dropped.
#[derive(Debug)]
pub(crate) struct Home(Option<File>);

impl Drop for Home {
    fn drop(&mut self) {
        if let Some(home) = &self.0 {
            let _ = move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Network));
        }
    }
}

/// Whether this process may make namespaces and devices.
pub(crate) fn is_allowed() -> bool {
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::NET_ADMIN;
    capabilities(None).is_ok_and(|sets| sets.effective.contains(needed))
}

/// What a keeper says once, when it has made its network or failed to.
#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Made; the second is why there is no wire with offloads off, where one was wanted.
    Made(Network, Option<String>),
    Failed(String),
}

/// The measuring process's hold on its network.
#[derive(Debug)]
pub(crate) struct Keeper {
    child: Child,
    hold: Option<ChildStdin>,
    pub(crate) network: Network,
    /// Why there is no wire with offloads off, where one was wanted.
    pub(crate) not_segmented: Option<String>,
}

impl Keeper {
    pub(crate) fn start(segmented: bool) -> Result<Keeper, BenchError> {
        let mut child = own_executable()?
            .args([NETWORK_COMMAND, &std::process::id().to_string(), &segmented.to_string()])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(BenchError::Start)?;
        let hold = child.stdin.take();
        let mut line = String::new();
        if let Some(said) = child.stdout.take() {
            BufReader::new(said).read_line(&mut line)?;
        }
        let mut keeper = Keeper { child, hold, network: Network::loopback(), not_segmented: None };
        if line.is_empty() {
            return Err(BenchError::Network("the process that makes it ended without a word".to_owned()));
        }
        match serde_json::from_str(&line)? {
            Answer::Made(network, not_segmented) => {
                (keeper.network, keeper.not_segmented) = (network, not_segmented);
                Ok(keeper)
            }
            Answer::Failed(why) => Err(BenchError::Network(format!("{why}; `--loopback` does without a network"))),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.hold.take());
        let _ = self.child.wait();
    }
}

/// What a process does whose first argument is [`NETWORK_COMMAND`]: it makes the network of process
/// `owner`, and removes it when that one lets go of this process's standard input.
pub fn keep_network(owner: u32, segmented: bool) -> Result<(), BenchError> {
    for name in stale() {
        // Another keeper may be at the same.
        let _ = ip(&["netns", "del", &name]);
    }
    let names = ["driver", "peer"].map(|side| format!("{PREFIX}{owner}-{side}"));
    let answer = match make(names.clone(), segmented) {
        Ok((network, not_segmented)) => Answer::Made(network, not_segmented),
        Err(why) => Answer::Failed(why.to_string()),
    };
    let mut said = serde_json::to_vec(&answer)?;
    said.push(b'\n');
    // Whoever does not hear it has ended, and the pipe is closed.
    let _ = io::stdout().write_all(&said);
    let _ = io::stdin().read(&mut [0]);
    for name in names.iter().filter(|name| Path::new(NAMESPACES).join(name).exists()) {
        ip(&["netns", "del", name]).map_err(|why| BenchError::Network(why.to_string()))?;
    }
    Ok(())
}

/// Names of networks whose owners have ended.
fn stale() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(NAMESPACES) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| owner(name).is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists())).collect()
}

/// The process that a network of this name belongs to.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

fn make(names: [String; 2], segmented: bool) -> Result<(Network, Option<String>), MakeError> {
    for name in &names {
        ip(&["netns", "add", name])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
    }
    let whole = join(&names, "whole", 0)?;
    let mut network = Network { namespaces: Some(names.clone()), whole, segmented: None, one_host: false };
    if !segmented {
        return Ok((network, None));
    }
    let addresses = join(&names, "segmented", 1)?;
    match switch_offloads_off(&names, "segmented") {
        Ok(()) => network.segmented = Some(addresses),
        Err(why) => return Ok((network, Some(why.to_string()))),
    }
    Ok((network, None))
}

/// Joins the two namespaces by a pair of devices.
fn join(names: &[String; 2], device: &str, subnet: u8) -> Result<[Ipv4Addr; 2], MakeError> {
    let [driver, peer] = names;
    ip(&["-n", driver, "link", "add", device, "type", "veth", "peer", "name", device, "netns", peer])?;
    let addresses = [1, 2].map(|host| Ipv4Addr::new(10, 77, subnet, host));
    for (name, address) in names.iter().zip(addresses) {
        ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", device])?;
        ip(&["-n", name, "link", "set", device, "up"])?;
    }
    Ok(addresses)
}

fn switch_offloads_off(names: &[String; 2], device: &str) -> Result<(), MakeError> {
    let ethtool = find("ethtool", "ethtool")?;
    let ethtool = ethtool.to_string_lossy();
    for name in names {
        let set = ["netns", "exec", name, &ethtool, "-K", device];
        ip(&[&set[..], &["tso", "off", "gso", "off", "gro", "off"]].concat())?;
        // Kernels that do not know it do not do it.
        let _ = ip(&[&set[..], &["tx-udp-segmentation", "off"]].concat());
    }
    Ok(())
}

/// Why a network could not be made or removed.
#[derive(Debug, thiserror::Error)]
enum MakeError {
    #[error("the program `{program}` is missing (Debian: apt install {package})")]
    Missing { program: &'static str, package: &'static str },
    #[error("`{command}` could not be started: {why}")]
    Start { command: String, why: io::Error },
    #[error("`{command}` failed: {said}")]
    Refused { command: String, said: String },
}

fn ip(arguments: &[&str]) -> Result<(), MakeError> {
    let program = find("ip", "iproute2")?;
    let command = || format!("ip {}", arguments.join(" "));
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|why| MakeError::Start { command: command(), why })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(MakeError::Refused { command: command(), said })
}

fn find(program: &'static str, package: &'static str) -> Result<PathBuf, MakeError> {
    launch::find(program).ok_or(MakeError::Missing { program, package })
}

fn place(role: Role) -> usize {
    match role {
        Role::Driver => 0,
        Role::Peer => 1,
    }
}

/// Where `ip netns` keeps its names.
const NAMESPACES: &str = "/var/run/netns";
const PREFIX: &str = "highwire-bench-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_tells_whose_network_it_is() {
        assert_eq!(owner("highwire-bench-4711-driver"), Some(4711));
        for other in ["highwire-bench-x-peer", "highwire-bench", "docker-4711", "highwire-bench--1-peer"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }

    #[test]
    fn a_missing_program_is_told_with_its_package() {
        let missing = find("no-such-program", "some-package").unwrap_err().to_string();
        assert!(missing.contains("`no-such-program`") && missing.contains("apt install some-package"), "{missing}");
    }

    #[test]
    fn loopback_has_one_wire_and_no_place_to_go_to() {
        let network = Network::loopback();
        assert_eq!(network.address(Wire::Whole, Role::Peer), Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert_eq!(network.address(Wire::Segmented, Role::Driver), None);
        assert!(network.enter(Role::Peer).unwrap().0.is_none());
    }
}
