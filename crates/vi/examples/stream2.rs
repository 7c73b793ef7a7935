//! tmp
use highwire_vi::*;
use std::time::{Duration, Instant};
fn pin(cpu: usize) { let mut set = rustix::thread::CpuSet::new(); set.set(cpu); rustix::thread::sched_setaffinity(None, &set).unwrap(); }
fn main() {
    let size: usize = std::env::args().nth(1).unwrap().parse().unwrap();
    let n = (1usize << 30) / size;
    let max: usize = std::env::args().nth(2).unwrap().parse().unwrap(); let nic = Nic::with(Config { payload_bytes_max: max << 20, ..Config::default() }).unwrap();
    let l = nic.listen("shm:st").unwrap();
    let t = std::thread::spawn(move || {
        pin(1);
        let nic = Nic::open().unwrap();
        let mut vi = nic.connect("shm:st").unwrap();
        let r = nic.register(2 * size).unwrap();
        vi.post_recv(Receive::new(0).into(r.slice(0..size).unwrap())).unwrap();
        vi.post_recv(Receive::new(0).into(r.slice(size..2 * size).unwrap())).unwrap();
        let (mut i, mut empty) = (0, 0u64);
        while i < n { if let Some(d) = vi.poll() { if d.operation == Operation::Receive { i += 1; vi.post_recv(Receive::new(0).into(d.into_buffer().unwrap())).unwrap(); } } else { empty += 1 } }
        println!("receiver empty {empty}");
        vi.send_bytes(0, b"x").unwrap();
        std::thread::sleep(Duration::from_millis(100));
    });
    pin(0);
    let mut vi = l.accept_with(Duration::from_secs(5), &ViOptions::new().path(Path::Buffered)).unwrap();
    let r = nic.register(2 * size + 64).unwrap();
    let mut f = vec![r.slice(0..size).unwrap(), r.slice(size..2 * size).unwrap()];
    let rb = r.slice(2*size..2*size+64).unwrap();
    vi.post_recv(Receive::new(0).into(rb)).unwrap();
    let s = Instant::now();
    let mut waits = 0u64;
    for _ in 0..n {
        let b = loop { if let Some(b) = f.pop() { break b } if let Some(d) = vi.poll() { f.push(d.into_buffer().unwrap()) } else { waits += 1 } };
        vi.post_send(Message::new(1).payload(b)).unwrap();
    }
    loop { if let Some(d) = vi.poll() { if d.operation == Operation::Receive { break } } }
    println!("{} B: {:.1} ns {:.2} GB/s waits {waits} {:?}", size, s.elapsed().as_nanos() as f64 / n as f64, (n * size) as f64 / s.elapsed().as_nanos() as f64, vi.sender().stats());
    t.join().unwrap();
}
