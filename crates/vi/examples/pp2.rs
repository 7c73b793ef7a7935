//! tmp
use highwire_vi::*;
use std::time::{Duration, Instant};
fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
fn run(mut vi: Vi, mut cq: CompletionQueue, nic: Nic, first: bool, n: usize, mode: u32) -> Vec<f64> {
    let r = nic.register(4096).unwrap();
    vi.post_recv(Receive::new(0).into(r.slice(0..64).unwrap())).unwrap();
    let mut laps = Vec::new();
    let mut s = Instant::now();
    let mut i = 0;
    if first {
        vi.send_bytes(1, b"abcd").unwrap();
    }
    loop {
        if mode & 1 != 0 {
            if cq.wait(Duration::from_secs(1)).is_err() {
                break;
            }
        }
        match vi.poll() {
            Some(d) => {
                if d.status.is_err() {
                    break;
                }
                if d.operation == Operation::Receive {
                    if mode & 2 != 0 {
                        vi.post_recv(Receive::new(0).into(d.into_buffer().unwrap())).unwrap();
                        vi.send_bytes(1, b"abcd").unwrap();
                    } else {
                        vi.send_bytes(1, b"abcd").unwrap();
                        vi.post_recv(Receive::new(0).into(d.into_buffer().unwrap())).unwrap();
                    }
                    i += 1;
                    if i % 500 == 0 {
                        laps.push(s.elapsed().as_nanos() as f64 / 1000.0);
                        s = Instant::now();
                        if i >= n && first {
                            break;
                        }
                    }
                }
            }
            None => {}
        }
    }
    laps
}
fn main() {
    for mode in [0, 1, 2, 3] {
        let n = 1000000;
        let nic = Nic::open().unwrap();
        let l = nic.listen("shm:pp").unwrap();
        let t = std::thread::spawn(move || {
            pin(1);
            let nic = Nic::open().unwrap();
            let cq = nic.completion_queue().unwrap();
            let vi = nic.connect_with("shm:pp", &ViOptions::new().queue(&cq)).unwrap();
            run(vi, cq, nic, false, n, mode);
        });
        pin(0);
        let cq = nic.completion_queue().unwrap();
        let vi = l.accept_with(Duration::from_secs(5), &ViOptions::new().queue(&cq)).unwrap();
        let mut laps = run(vi, cq, nic, true, n, mode);
        laps.sort_by(f64::total_cmp);
        println!(
            "mode {mode} one-way p10 {:.1} p50 {:.1} p90 {:.1} ns",
            laps[laps.len() / 10],
            laps[laps.len() / 2],
            laps[laps.len() * 9 / 10]
        );
        t.join().unwrap();
    }
}
