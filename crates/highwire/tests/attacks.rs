//! What an honest session and an honest caller notice of a flood.

use highwire::{PeerId, Receive, ViOptions, WireConfig};
use loopback::{PATIENCE, nic, sealed, two_ends};
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[allow(dead_code, reason = "other tests need more of it")]
mod loopback;

/// A sealed wire with the receive buffer that the system gives by default: a burst of a flood fills it.
fn stock() -> WireConfig {
    let mut wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    wire.udp.receive_buffer_bytes = None;
    wire
}

/// Sends datagrams to a port until it is told that it is over: so many a second, in bursts.
fn flood(to: SocketAddr, per_second: u64, over: &AtomicBool, mut datagram: impl FnMut(u64, &mut [u8]) -> usize) -> u64 {
    const BURST: u64 = 500;
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(to).unwrap();
    let (began, mut sent, mut bytes) = (Instant::now(), 0, [0; 2048]);
    while !over.load(Relaxed) {
        if sent as f64 > began.elapsed().as_secs_f64() * per_second as f64 {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        for number in sent..sent + BURST {
            let length = datagram(number, &mut bytes);
            let _ = socket.send(&bytes[..length]);
        }
        sent += BURST;
    }
    sent
}

/// Bytes that look random and are no packets.
fn junk(number: u64, bytes: &mut [u8]) -> usize {
    for (at, byte) in bytes[..64].iter_mut().enumerate() {
        *byte = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 57)) as u8;
    }
    64
}

/// The header of a sealed hello, and a key and an offer that nobody made.
fn forged_hello(number: u64, bytes: &mut [u8]) -> usize {
    bytes.fill(0);
    (bytes[0], bytes[1], bytes[2], bytes[28]) = (1, 1, 64, 72);
    junk(number, &mut bytes[64..]);
    1200
}

/// Sends a message every 4 ms, which is 8 MB/s; how much of that arrives before, during and after something.
fn shares(during: impl FnOnce(SocketAddr, &AtomicBool) + Send) -> [f64; 3] {
    const BYTES: usize = 32 << 10;
    const PLACES: usize = 32;
    const EVERY: Duration = Duration::from_millis(4);
    let wire = stock();
    let [(_caller, mut here), (listening, mut there)] = two_ends(&wire, "udp:127.0.0.1:0", &ViOptions::new());
    let PeerId::Host(to) = here.peer() else { panic!("a peer of another host") };
    let (arrived, over, calm) = (AtomicU64::new(0), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let memory = listening.register(PLACES * BYTES).unwrap();
            let place = |at: usize| memory.slice(at * BYTES..(at + 1) * BYTES).unwrap();
            (0..PLACES).for_each(|at| there.post_recv(Receive::new(at as u64).into(place(at))).unwrap());
            while let Ok(received) = there.wait(PATIENCE) {
                if received.status.is_err() {
                    break;
                }
                arrived.fetch_add(received.length as u64, Relaxed);
                let token = received.token;
                drop(received);
                there.post_recv(Receive::new(token).into(place(token as usize))).unwrap();
            }
        });
        scope.spawn(|| {
            let (bytes, mut next) = (vec![7; BYTES], Instant::now());
            while !over.load(Relaxed) {
                here.send_bytes(1, &bytes).unwrap();
                let _ = here.poll();
                next += EVERY;
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
            }
            here.disconnect(PATIENCE).unwrap();
        });
        let measure = |length: Duration| {
            let (began, before) = (Instant::now(), arrived.load(Relaxed));
            std::thread::sleep(length);
            let sent = began.elapsed().as_secs_f64() / EVERY.as_secs_f64() * BYTES as f64;
            (arrived.load(Relaxed) - before) as f64 / sent
        };
        let before = measure(Duration::from_secs(1));
        let attack = scope.spawn(|| during(to, &calm));
        let meanwhile = measure(Duration::from_secs(3));
        calm.store(true, Relaxed);
        let attack = attack.join();
        let after = measure(Duration::from_secs(1));
        over.store(true, Relaxed);
        attack.expect("an attack");
        eprintln!("{before:.2} of what is sent arrives before, {meanwhile:.2} meanwhile, {after:.2} after");
        [before, meanwhile, after]
    })
}

/// A burst may be late, and come a moment later.
fn assert_undisturbed([before, meanwhile, after]: [f64; 3]) {
    assert!(before > 0.9 && meanwhile >= 0.8 && after >= 0.8, "{before:.2}, {meanwhile:.2}, {after:.2}");
}

#[test]
fn junk_at_its_port_leaves_a_session_its_rate() {
    assert_undisturbed(shares(|to, calm| assert!(flood(to, 50_000, calm, junk) > 50_000)));
}

#[test]
fn forged_hellos_leave_a_session_its_rate_and_let_a_caller_in() {
    assert_undisturbed(shares(|to, calm| assert!(flood(to, 40_000, calm, forged_hello) > 40_000)));
    let wire = stock();
    let listening = nic(&wire);
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let to = listener.address().strip_prefix("udp:").and_then(|to| to.parse().ok()).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flooding = scope.spawn(|| flood(to, 40_000, &over, forged_hello));
        let calls = scope.spawn(|| {
            let each = (0..5).map(|_| {
                let began = Instant::now();
                nic(&wire).connect(listener.address()).unwrap();
                began.elapsed()
            });
            each.max()
        });
        (0..5).for_each(|_| drop(listener.accept(PATIENCE).unwrap()));
        let slowest = calls.join().unwrap();
        over.store(true, Relaxed);
        flooding.join().unwrap();
        eprintln!("the slowest of five callers took {slowest:?}");
        assert!(slowest < Some(Duration::from_secs(1)), "{slowest:?}");
    });
}
