//! A session over a path of 100 Mbit/s and 50 ms while a third host floods the receiver's port: the junk fills the receive
//! buffer that the system gives by default, and the session's packets are dropped with it.
//!
//! Three network namespaces of the test's own: the sender's and the receiver's, with `wan.py` between them, and the
//! attacker's, which has a link to the receiver of its own.

use highwire::{Config, Driver, Message, Nic, Receive, Vi, ViOptions, WireConfig};
use loopback::{PATIENCE, sealed};
use std::io::{BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[allow(dead_code, reason = "other tests need more of it")]
mod loopback;

const ROLE: &str = "HIGHWIRE_TEST_ROLE";
const TEST: &str = "junk_at_a_far_port_leaves_a_session_its_rate";
const BYTES: usize = 32 << 10;
const PLACES: usize = 64;
const SECONDS: u64 = 13;
const FLOOD_AT: Duration = Duration::from_secs(4);
const FLOOD_FOR: Duration = Duration::from_secs(5);
const FLOOD_PER_SECOND: u32 = 50_000;

fn nic() -> Nic {
    let mut wire = WireConfig { keys: sealed(), driver: Driver::Thread, ..WireConfig::default() };
    wire.udp.receive_buffer_bytes = None;
    Nic::with_wire(Config::default(), wire).unwrap()
}

/// Receives, and says in each tenth of a second how many bytes have come since the beginning.
fn sink() {
    let nic = nic();
    let listener = nic.listen("udp:10.78.0.2:7300").unwrap();
    println!("listening");
    let mut vi = listener.accept_with(PATIENCE, &ViOptions::new()).unwrap();
    let memory = nic.register(PLACES * BYTES).unwrap();
    let post = |vi: &mut Vi, at: usize| {
        vi.post_recv(Receive::new(at as u64).into(memory.slice(at * BYTES..(at + 1) * BYTES).unwrap())).unwrap();
    };
    (0..PLACES).for_each(|at| post(&mut vi, at));
    let (began, mut bytes, mut said) = (Instant::now(), 0, 0);
    while let Ok(received) = vi.wait(PATIENCE) {
        if received.status.is_err() {
            return;
        }
        bytes += received.length as u64;
        let token = received.token as usize;
        drop(received);
        post(&mut vi, token);
        let tenths = began.elapsed().as_millis() / 100;
        if tenths > said {
            said = tenths;
            println!("{tenths} {bytes}");
        }
    }
}

/// Sends as fast as it may.
fn source() {
    let nic = nic();
    let mut vi = nic.connect("udp:10.78.0.2:7300").unwrap();
    let memory = nic.register(PLACES * BYTES).unwrap();
    let post = |vi: &mut Vi, at: usize| {
        let payload = memory.slice(at * BYTES..(at + 1) * BYTES).unwrap();
        vi.post_send(Message::new(at as u64).payload(payload)).unwrap();
    };
    (0..PLACES).for_each(|at| post(&mut vi, at));
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(SECONDS) {
        let sent = vi.wait(PATIENCE).unwrap();
        sent.status.unwrap();
        let token = sent.token as usize;
        drop(sent);
        post(&mut vi, token);
    }
    vi.disconnect(PATIENCE).unwrap();
}

/// Datagrams that are no packets, so many a second for so long.
fn flood() {
    let socket = UdpSocket::bind("10.79.0.1:0").unwrap();
    socket.connect("10.79.0.2:7300").unwrap();
    let (began, mut sent) = (Instant::now(), 0u32);
    while began.elapsed() < FLOOD_FOR {
        if f64::from(sent) > began.elapsed().as_secs_f64() * f64::from(FLOOD_PER_SECOND) {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        for number in sent..sent + 200 {
            let _ = socket.send(&[number as u8; 30]);
        }
        sent += 200;
    }
}

struct Namespaces([String; 3]);

impl Namespaces {
    fn new() -> Namespaces {
        let names = ["a", "b", "c"].map(|tag| format!("hwfar{}{tag}", std::process::id()));
        names.iter().for_each(|name| ip(&["netns", "add", name]));
        let [_, b, c] = &names;
        ip(&["link", "add", "att-b", "netns", b, "type", "veth", "peer", "name", "att-c", "netns", c]);
        for (name, device, address) in [(b, "att-b", "10.79.0.2/24"), (c, "att-c", "10.79.0.1/24")] {
            ip(&["-n", name, "address", "add", address, "dev", device]);
            ip(&["-n", name, "link", "set", device, "up"]);
        }
        Namespaces(names)
    }

    /// This test once more, as another role, in the namespace of this place.
    fn start(&self, place: usize, role: &str) -> Child {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[place]]).arg(std::env::current_exe().unwrap());
        command.args([TEST, "--exact", "--nocapture"]).env(ROLE, role).stdout(Stdio::piped());
        command.spawn().unwrap()
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().expect("ip, of iproute2");
    assert!(status.success(), "ip {}: {status}", arguments.join(" "));
}

/// A process that is ended with this value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn junk_at_a_far_port_leaves_a_session_its_rate() {
    match std::env::var(ROLE).as_deref() {
        Ok("sink") => return sink(),
        Ok("source") => return source(),
        Ok("flood") => return flood(),
        _ => {}
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root has network namespaces");
        return;
    }
    let namespaces = Namespaces::new();
    let [a, b, _] = &namespaces.0;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/wan.py");
    let mut wan = Command::new("python3");
    wan.args([script, a, "10.78.0.1/24", b, "10.78.0.2/24", "12500000", "25", "1250000"]);
    let mut wan = Ended(wan.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3"));
    let mut ready = String::new();
    BufReader::new(wan.0.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");
    let mut sink = Ended(namespaces.start(1, "sink"));
    let mut told = BufReader::new(sink.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(told.any(|line| line == "listening"));
    let _source = Ended(namespaces.start(0, "source"));
    let mut arrived: Vec<(f64, f64)> = Vec::new();
    let mut flood = None;
    for line in told.by_ref() {
        let Some((tenths, bytes)) = line.split_once(' ') else { continue };
        let (Ok(tenths), Ok(bytes)) = (tenths.parse::<u32>(), bytes.parse::<u64>()) else { continue };
        arrived.push((f64::from(tenths) / 10.0, bytes as f64));
        if flood.is_none() && f64::from(tenths) / 10.0 >= FLOOD_AT.as_secs_f64() {
            flood = Some(Ended(namespaces.start(2, "flood")));
        }
    }
    let rate = |from: f64, to: f64| {
        let at =
            |time: f64| *arrived.iter().find(|(seconds, _)| *seconds >= time).unwrap_or_else(|| panic!("{arrived:?}"));
        let ((begin, first), (end, last)) = (at(from), at(to));
        (last - first) / (end - begin) / 1e6
    };
    let flood_at = FLOOD_AT.as_secs_f64();
    let (before, meanwhile) = (rate(flood_at - 2.0, flood_at), rate(flood_at + 1.0, flood_at + 5.0));
    let after = rate(flood_at + 6.0, SECONDS as f64 - 1.0);
    let _ = writeln!(std::io::stderr(), "{before:.2} MB/s before, {meanwhile:.2} meanwhile, {after:.2} after");
    // The receive buffer, of which a window is told, holds less than the path.
    assert!(flood.is_some() && before > 1.0, "{before:.2} MB/s");
    assert!(meanwhile >= 0.8 * before && after >= 0.8 * before, "{before:.2}, {meanwhile:.2}, {after:.2} MB/s");
}
