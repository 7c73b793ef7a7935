//! `highwire up`: a node that donates memory, until it is ended.

use crate::wire::{KeyArgs, known_by};
use crate::{figures, warn};
use anyhow::Context;
use clap::Args;
use highwire::netmem::{LeaveReport, Memory, MemoryError, MemoryOptions, NodeOptions, NodeServer};
use highwire::rpc::Rpc;
use highwire::{Address, Driver, Nic};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Memory to donate, as 64M or 8G: from 1M to what the machine has. It is taken as it is used
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    memory: u64,
    /// The node's name, which no other node may have; made of the host's name and the address if it is not given
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    name: Option<String>,
    /// Where to listen: shm:NAME, shm:/PATH or udp:HOST:PORT, as others reach it; several times for several ways
    ///
    /// It is shm:highwire if it is not given: for processes of this user on this host.
    #[arg(long, value_name = "ADDRESS")]
    listen: Vec<String>,
    /// Join the nodes of the coordinator at this address
    #[arg(long, value_name = "COORDINATOR", requires = "listen")]
    join: Option<String>,
    /// Copies of each object, on different nodes: with 2 they survive the loss of one node. The coordinator says it for all
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "join",
          value_parser = clap::value_parser!(u8).range(1..=2))]
    copies: u8,
    #[command(flatten)]
    key: KeyArgs,
    /// When the key files are read again (SIGUSR1), end the sessions whose key is in neither of them
    #[arg(long, requires = "key")]
    end_old: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// Where nodes and their users meet if nobody says otherwise.
pub(crate) const ADDRESS: &str = "shm:highwire";

fn parse_memory(text: &str) -> Result<u64, String> {
    let rule = "write a number of bytes, or one with K, M, G or T, as 512M or 8G";
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        Some((at, 'T' | 't')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().map_err(|_| rule.to_owned())?;
    let bytes = number.checked_mul(1 << shift).ok_or_else(|| rule.to_owned())?;
    if bytes < MEMORY_MIN {
        return Err(format!("{} are too few: a node donates at least 1M", figures::bytes(bytes)));
    }
    let system = rustix::system::sysinfo();
    let has = (system.totalram as u64).saturating_mul(system.mem_unit.into());
    if bytes > has {
        let (asked, has) = (figures::bytes(bytes), figures::bytes(has));
        return Err(format!("{asked} are more than the {has} of this machine: donate less"));
    }
    Ok(bytes)
}

fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.chars().any(char::is_control) {
        return Err("a name has at least one character, and none that cannot be printed".to_owned());
    }
    Ok(text.to_owned())
}

/// A client takes five descriptors, and shells allow 1,024 by default: a node takes as many as it may without asking.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    // A limit that cannot be raised is what it was.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Runs a node until it is told to end.
pub(crate) fn run(args: &UpArgs) -> anyhow::Result<()> {
    if let Some(join) = &args.join {
        // A node waits for a coordinator that is not there yet, but not for what is no address.
        Address::parse(join)?;
    }
    allow_descriptors();
    // Before there is anything to lose.
    let signals = Received::new()?;
    let (nic, known_by) = args.key.nic(CONNECT, Driver::Thread, None)?;
    let rpc = Rpc::new(&nic)?;
    let listen = if args.listen.is_empty() { vec![ADDRESS.to_owned()] } else { args.listen.clone() };
    let name = args.name.clone().unwrap_or_else(|| default_name(&listen[0]));
    let mut options = NodeOptions::new(args.memory, &listen[0]);
    options.name.clone_from(&name);
    options.listen = listen;
    options.coordinator.clone_from(&args.join);
    options.coordinating.copies = args.copies;
    let node = NodeServer::start(&rpc, options)?;
    let teller = Teller { json: args.json };
    teller.started(args, &node, &name, &known_by);
    let opens_in = node.opens_in();
    if !opens_in.is_zero() {
        warn(&format!(
            "a coordinator was here less than a lease ago, and nodes may still hold what it gave them: nobody is let in for \
             {:.1} s",
            opens_in.as_secs_f64()
        ));
    }
    let watched = watch(args, &nic, &rpc, &node, &name, &teller, &signals);
    if watched.is_ok() {
        let others = node.others();
        if args.join.is_some() && others > 0 && node.incarnation().is_some() {
            teller.leaving(node.figures().objects, others);
        }
    }
    teller.left(args, &node.leave(LEAVE_FOR));
    watched
}

/// Tells how the node stands, until it is to end.
fn watch(
    args: &UpArgs,
    nic: &Nic,
    rpc: &Rpc,
    node: &NodeServer,
    name: &str,
    teller: &Teller,
    signals: &Received,
) -> anyhow::Result<()> {
    let (mut life, mut out_since, mut told) = (None, Instant::now(), false);
    loop {
        let now = node.incarnation();
        if now != life {
            match (&args.join, now) {
                (Some(join), Some(_)) => teller.joined(join, node.others()),
                (None, Some(_)) if told => warn("nodes are let in now"),
                (_, None) => warn("the lease has ended, and with it all that was here: the coordinator did not answer"),
                (None, Some(_)) => {}
            }
            (life, out_since, told) = (now, Instant::now(), false);
        }
        if now.is_none() && !told && out_since.elapsed() > OUT_FOR {
            told = true;
            if let Some(join) = &args.join {
                tell_why_out(rpc, node, name, join)?;
            }
        }
        match signals.wait(if now.is_some() { LOOK_EVERY } else { LOOK_OFTEN }) {
            None => {}
            Some(SIGUSR1) => match read_keys(args, nic) {
                Ok(keys) => teller.changed_keys(&keys),
                Err(error) => warn(&format!("{error:#}; the keys are what they were")),
            },
            Some(_) => return Ok(()),
        }
    }
}

/// What came of reading the key files again.
struct KeysNow {
    known_by: String,
    ended: usize,
    /// How many sessions there are, by the fingerprint of their key.
    sessions: BTreeMap<String, usize>,
}

/// Reads the key files again, and uses what is in them from now on.
fn read_keys(args: &UpArgs, nic: &Nic) -> anyhow::Result<KeysNow> {
    let keys = args.key.keys()?;
    let known_by = known_by(&keys);
    nic.set_keys(keys)?;
    let ended = if args.end_old { nic.end_old_sessions() } else { 0 };
    let mut sessions = BTreeMap::new();
    for session in nic.sessions() {
        let fingerprint = session.fingerprint.map_or_else(|| "none".to_owned(), |fingerprint| fingerprint.to_string());
        *sessions.entry(fingerprint).or_default() += 1;
    }
    Ok(KeysNow { known_by, ended, sessions })
}

/// Says why the coordinator has not let this node in. What does not change by itself is an error.
fn tell_why_out(rpc: &Rpc, node: &NodeServer, name: &str, join: &str) -> anyhow::Result<()> {
    let reason = match Memory::connect(rpc, join, MemoryOptions::default()) {
        Err(error @ MemoryError::NotCoordinator { .. }) => return Err(error.into()),
        Err(error) => error.to_string(),
        Ok(memory) => {
            let members = memory.map().map(|map| map.nodes).unwrap_or_default();
            if members.iter().any(|member| member.node == node.id()) {
                format!("there is a node {name:?} already; if it is another one, give this one another --name")
            } else {
                format!("the coordinator at {join} lets nobody in at present")
            }
        }
    };
    warn(&format!("{reason}; it goes on trying"));
    Ok(())
}

/// Makes a name that is another on each host and at each address.
fn default_name(address: &str) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    match address.ends_with(":0") {
        // Its port is not known yet.
        true => format!("{host} {address} {}", std::process::id()),
        false => format!("{host} {address}"),
    }
}

/// Signals that were received: SIGINT and SIGTERM to end, SIGUSR1 to read the key files again.
struct Received(Receiver<i32>);

impl Received {
    fn new() -> anyhow::Result<Received> {
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1]).context("signals cannot be watched")?;
        let (sender, received) = mpsc::channel();
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            let mut ends = false;
            for signal in signals.forever() {
                if signal != SIGUSR1 && std::mem::replace(&mut ends, true) {
                    // A second one does not wait for anything.
                    warn("ended at once: what was here is lost");
                    std::process::exit(1);
                }
                // Nothing receives it while the process is ending already.
                let _ = sender.send(signal);
            }
        })?;
        Ok(Received(received))
    }

    /// The next, if there is one in time.
    fn wait(&self, timeout: Duration) -> Option<i32> {
        match self.0.recv_timeout(timeout) {
            Ok(signal) => Some(signal),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(SIGTERM),
        }
    }
}

/// Prints, if anybody reads: a node goes on without.
struct Teller {
    json: bool,
}

impl Teller {
    fn tell(&self, text: &str, object: &Value) {
        let _ = crate::print(&if self.json { format!("{object}\n") } else { text.to_owned() });
    }

    fn started(&self, args: &UpArgs, node: &NodeServer, name: &str, known_by: &str) {
        let mut text = String::new();
        for address in node.addresses() {
            text += &format!("listening at {address} with {known_by}; stop with Ctrl-C\n");
        }
        text += &format!(
            "donating {} as {name:?}: what is put here is gone when this ends, unless other nodes take it over\n",
            figures::bytes(args.memory)
        );
        let at = args.join.as_deref().unwrap_or(&node.addresses()[0]);
        let at = if at == ADDRESS { String::new() } else { format!(" --at {at}") };
        text += &format!("use it: highwire mem put NAME FILE{at}; highwire mem get NAME{at}\n");
        let object = json!({
            "event": "up", "addresses": node.addresses(), "memory_bytes": args.memory, "name": name,
            "coordinator": args.join.is_none(), "join": args.join, "known_by": known_by,
            "opens_in_s": node.opens_in().as_secs_f64(),
        });
        self.tell(&text, &object);
    }

    fn changed_keys(&self, keys: &KeysNow) {
        let KeysNow { known_by, ended, sessions } = keys;
        let mut text = format!("read the key files again: {known_by}");
        for (fingerprint, number) in sessions {
            text += &format!("; {} under {fingerprint}", count(*number as u64, "session"));
        }
        if *ended > 0 {
            text += &format!("; ended {}", count(*ended as u64, "session"));
        }
        let object = json!({ "event": "keys", "known_by": known_by, "sessions": sessions, "ended": ended });
        self.tell(&format!("{text}\n"), &object);
    }

    fn joined(&self, join: &str, others: usize) {
        let nodes = if others == 1 { "1 other node".to_owned() } else { format!("{others} other nodes") };
        let object = json!({ "event": "joined", "coordinator": join, "other_nodes": others });
        self.tell(&format!("joined the nodes of {join}: {nodes}\n"), &object);
    }

    fn leaving(&self, objects: u64, others: usize) {
        let object = json!({ "event": "leaving", "objects": objects, "other_nodes": others });
        let (objects, nodes) = (count(objects, "object"), count(others as u64, "other node"));
        self.tell(&format!("handing {objects} over to {nodes}; Ctrl-C again ends at once\n"), &object);
    }

    fn left(&self, args: &UpArgs, report: &LeaveReport) {
        let LeaveReport { handed_over, objects_lost, pages_lost, nodes_orphaned } = *report;
        let mut text = if handed_over { "left, and handed its objects over".to_owned() } else { "ended".to_owned() };
        let mut lost = Vec::new();
        if objects_lost > 0 {
            lost.push(count(objects_lost, "object"));
        }
        if pages_lost > 0 {
            lost.push(format!("{} of paged regions", count(pages_lost.into(), "page")));
        }
        text += &match lost.is_empty() {
            true => "; nothing is lost here".to_owned(),
            false => format!("; lost: {}", lost.join(" and ")),
        };
        if nodes_orphaned > 0 {
            let nodes = count(nodes_orphaned as u64, "other node");
            text += &format!("; this was the coordinator: {nodes} lost it, and empty themselves");
        }
        let object = json!({
            "event": "left", "coordinator": args.join.is_none(), "handed_over": handed_over,
            "objects_lost": objects_lost, "pages_lost": pages_lost, "nodes_orphaned": nodes_orphaned,
        });
        self.tell(&format!("{text}\n"), &object);
    }
}

fn count(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

const MEMORY_MIN: u64 = 1 << 20;
const CONNECT: Duration = Duration::from_secs(5);
/// A node whose coordinator is gone stops by itself, long before.
const LEAVE_FOR: Duration = Duration::from_secs(3600);
/// How long the coordinator may take to let a node in before somebody wants to know why.
const OUT_FOR: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_secs(1);
const LOOK_OFTEN: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_or_refused() {
        assert_eq!(parse_memory("1048576"), Ok(1 << 20));
        assert_eq!(["1024K", "2M", "2m"].map(parse_memory), [Ok(1 << 20), Ok(2 << 20), Ok(2 << 20)]);
        for nonsense in ["", "M", "much", "1.5G", "-1M", "1MB", "99999999999T", "8 G", "½"] {
            assert!(parse_memory(nonsense).unwrap_err().contains("as 512M or 8G"), "{nonsense}");
        }
        assert!(parse_memory("1023K").unwrap_err().contains("at least 1M"));
        assert!(parse_memory("0").unwrap_err().contains("at least 1M"));
        assert!(parse_memory("1000T").unwrap_err().contains("of this machine"));
    }
}
