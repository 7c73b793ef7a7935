//! tmp
use highwire_vi::*;
use std::time::{Duration, Instant};
fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
fn main() {
    let arg: Vec<String> = std::env::args().collect();
    let size: usize = arg.get(1).map_or(4, |s| s.parse().unwrap());
    let path = match arg.get(2).map(|s| s.as_str()) {
        Some("b") => Path::Buffered,
        Some("r") => Path::Referenced,
        _ => Path::Choose,
    };
    let one = arg.get(3).is_some();
    let n = if size > 1000 { 20_000 } else { 3_000_000 };
    let n = if one { 20000 } else { n };
    let nic = Nic::open().unwrap();
    let l = nic.listen("shm:pp").unwrap();
    let t = std::thread::spawn(move || {
        pin(if one { 0 } else { 1 });
        let nic = Nic::open().unwrap();
        let mut cq = nic.completion_queue().unwrap();
        let mut vi = nic.connect_with("shm:pp", &ViOptions::new().queue(&cq).path(path)).unwrap();
        let r = nic.register(4 * size.max(64)).unwrap();
        let mut sb = vec![
            r.slice(2 * size.max(64)..2 * size.max(64) + size).unwrap(),
            r.slice(size.max(64)..size.max(64) + size).unwrap(),
        ];
        vi.post_recv(Receive::new(0).into(r.slice(0..size).unwrap())).unwrap();
        let mut c = 0;
        while c < n {
            cq.wait(Duration::from_secs(5)).unwrap();
            while let Some(d) = vi.poll() {
                if d.status.is_err() {
                    break;
                }
                if d.operation == Operation::Receive {
                    vi.post_recv(Receive::new(0).into(d.into_buffer().unwrap())).unwrap();
                    vi.post_send(Message::new(1).payload(sb.pop().unwrap())).unwrap();
                    c += 1;
                } else {
                    sb.push(d.into_buffer().unwrap());
                }
            }
        }
        vi.disconnect(Duration::from_secs(1)).unwrap();
    });
    pin(0);
    let mut cq = nic.completion_queue().unwrap();
    let mut vi = l.accept_with(Duration::from_secs(5), &ViOptions::new().queue(&cq).path(path)).unwrap();
    let r = nic.register(4 * size.max(64)).unwrap();
    let mut sb = vec![
        r.slice(2 * size.max(64)..2 * size.max(64) + size).unwrap(),
        r.slice(size.max(64)..size.max(64) + size).unwrap(),
    ];
    vi.post_recv(Receive::new(0).into(r.slice(0..size).unwrap())).unwrap();
    let mut s = Instant::now();
    let mut laps = Vec::new();
    let mut i = 0;
    vi.post_send(Message::new(1).payload(sb.pop().unwrap())).unwrap();
    while i < n {
        cq.wait(Duration::from_secs(5)).unwrap();
        while let Some(d) = vi.poll() {
            if d.status.is_err() {
                break;
            }
            if d.operation == Operation::Receive {
                vi.post_recv(Receive::new(0).into(d.into_buffer().unwrap())).unwrap();
                i += 1;
                if i % 500 == 0 {
                    laps.push(s.elapsed().as_nanos() as f64 / 1000.0);
                    s = Instant::now();
                }
                if i < n {
                    vi.post_send(Message::new(1).payload(sb.pop().unwrap())).unwrap();
                }
            } else {
                sb.push(d.into_buffer().unwrap());
            }
        }
    }
    laps.sort_by(f64::total_cmp);
    println!(
        "{size} B one-way p10 {:.1} p50 {:.1} p90 {:.1} ns  {:?} {:?}",
        laps[laps.len() / 10],
        laps[laps.len() / 2],
        laps[laps.len() * 9 / 10],
        vi.sender().stats(),
        vi.receiver().stats()
    );
    t.join().unwrap();
}
