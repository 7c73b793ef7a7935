//! What a call costs, beside two messages of a VI. Run with `--ignored`.

use highwire_rpc::{Manner, Method, Reply, Request, Rpc, Serve, Services};
use highwire_vi::{Config, Frozen, Nic, Receive};
use std::time::{Duration, Instant};

const SERVICE: u32 = 7;
const ECHO: Method = Method { service: SERVICE, version: 1, method: 1 };
const FETCH: Method = Method { service: SERVICE, version: 1, method: 2 };

struct Store(Frozen);

impl Serve for Store {
    fn manner(&self, _: u16) -> Option<Manner> {
        Some(Manner { is_quick: true, may_repeat: true })
    }
    fn serve(&self, request: Request<'_>, reply: &mut Reply) {
        match request.method() {
            1 => {}
            _ => {
                let bytes: u32 = request.decode().unwrap();
                reply.frozen(&self.0, 0..bytes as usize);
            }
        }
    }
}

fn main() {
    let asked = |what: &str| std::env::args().any(|argument| argument == what);
    // Whoever lists the tests asks for those that are ignored too: there are none here.
    if !asked("--ignored") || asked("--list") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let config = || Config { runtime_dir: Some(place.path().to_owned()), ..Config::default() };
    let server_nic = Nic::with(config()).unwrap();
    let region = server_nic.register_freezable(4 << 20, highwire_vi::Tag(0)).unwrap();
    let frozen = region.freeze().unwrap();
    let rpc = Rpc::new(&server_nic).unwrap();
    let _server = rpc.serve("shm:measure", Services::new().with(SERVICE, 1, Store(frozen))).unwrap();
    let listener = server_nic.listen("shm:vi").unwrap();
    let memory = server_nic.register(1 << 16).unwrap();
    std::thread::spawn(move || {
        let mut vi = listener.accept(Duration::from_secs(5)).unwrap();
        for at in 0..4 {
            vi.post_recv(Receive::new(1).into(memory.slice(at * 4096..at * 4096 + 4096).unwrap())).unwrap();
        }
        while let Ok(done) = vi.wait(Duration::from_secs(1000)) {
            if done.operation == highwire_vi::Operation::Receive {
                if done.status.is_err() {
                    return;
                }
                let n = done.length;
                let buffer = done.into_buffer().unwrap();
                vi.send_bytes(2, &buffer[..n]).unwrap();
                vi.post_recv(Receive::new(1).into(buffer)).unwrap();
            }
        }
    });
    let nic = Nic::with(config()).unwrap();
    let mut vi = nic.connect("shm:vi").unwrap();
    let memory = nic.register(1 << 16).unwrap();
    for at in 0..4 {
        vi.post_recv(Receive::new(1).into(memory.slice(at * 4096..at * 4096 + 4096).unwrap())).unwrap();
    }
    let rpc = Rpc::new(&nic).unwrap();
    let client = rpc.connect("shm:measure").unwrap();
    let mut frame = nic.register(8 << 20).unwrap().slice(0..8192).unwrap();
    let frames = nic.pool(1 << 20, 16).unwrap();
    for _ in 0..8 {
        let n = 100_000u32;
        let start = Instant::now();
        for _ in 0..n {
            vi.send_bytes(2, b"ping").unwrap();
            loop {
                let done = vi.wait(Duration::from_secs(1)).unwrap();
                if done.operation == highwire_vi::Operation::Receive {
                    vi.post_recv(Receive::new(1).into(done.into_buffer().unwrap())).unwrap();
                    break;
                }
            }
        }
        let vi_ns = start.elapsed().as_nanos() as f64 / f64::from(n);
        let start = Instant::now();
        for _ in 0..n {
            client.call(ECHO).wait().unwrap();
        }
        let call_ns = start.elapsed().as_nanos() as f64 / f64::from(n);
        let mut rates = Vec::new();
        for window in [1usize, 8, 32, 128] {
            let start = Instant::now();
            let mut pending = std::collections::VecDeque::new();
            for _ in 0..n {
                if pending.len() == window {
                    let p: highwire_rpc::Pending = pending.pop_front().unwrap();
                    p.wait().unwrap();
                }
                pending.push_back(client.call(ECHO).start());
            }
            for p in pending {
                p.wait().unwrap();
            }
            rates.push((f64::from(n) / start.elapsed().as_secs_f64() / 1e6 * 100.0).round() / 100.0);
        }
        let n8 = 20_000u32;
        let start = Instant::now();
        let arguments = postcard::to_allocvec(&8192u32).unwrap();
        for _ in 0..n8 {
            frame.set_len(8192);
            frame = client.call(FETCH).arguments(&arguments).into(frame).wait().unwrap().into_buffer().unwrap();
        }
        let fetch_ns = start.elapsed().as_nanos() as f64 / f64::from(n8);
        let arguments = postcard::to_allocvec(&(1u32 << 20)).unwrap();
        let nm = 2000;
        let start = Instant::now();
        let mut pending = std::collections::VecDeque::new();
        for _ in 0..nm {
            if pending.len() == 8 {
                let p: highwire_rpc::Pending = pending.pop_front().unwrap();
                p.wait().unwrap();
            }
            pending.push_back(client.call(FETCH).arguments(&arguments).into(frames.frame().unwrap()).start());
        }
        for p in pending {
            p.wait().unwrap();
        }
        let gbs = f64::from(nm) * (1 << 20) as f64 / start.elapsed().as_secs_f64() / 1e9;
        println!(
            "two messages {vi_ns:.0} ns, call {call_ns:.0} ns ({:.2}), M/s by window {rates:?}, fetch 8 KiB {fetch_ns:.0} ns, 1 MiB {gbs:.1} GB/s",
            call_ns / vi_ns
        );
    }
}
