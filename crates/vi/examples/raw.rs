//! tmp
use highwire_mem::*;
use std::time::Instant;
const D: u32 = 64;
fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
fn run(a: &OwnRegion, b: PeerRegion, first: bool, n: usize, extra: u32) -> Vec<f64> {
    let shape = BlockShape::new(D, 64).unwrap();
    let block = Block::new(1024, shape, 1 << 20).unwrap();
    let mut w = SlotWriter::new(a.memory().clone(), block, b.memory().clone(), block, 0, false);
    let mut r = SlotReader::new(a.memory().clone(), block, b.memory().clone(), block, 0, false);
    let mut laps = Vec::new();
    let mut s = Instant::now();
    let mut i = 0;
    let mut buf = [0u8; 64];
    let head = SlotHead { kind: Kind::Inline, flags: Flags::WHOLE, control: 0, spans: 0, length: 4, immediate: 0 };
    if first {
        w.publish(head, &[], &[], &buf[..4]);
    }
    loop {
        let mut k = 0u32;
        let h = loop {
            if let Some(h) = r.head().unwrap() {
                break h;
            };
            if extra & 2 != 0 && k == 0 {
                if r.publish() {
                    println!("x")
                }
            }
            k += 1;
        };
        r.content(0, &mut buf[..h.length as usize]);
        r.consume(false, false);
        if extra & 1 != 0 {
            if r.publish_due() {
                r.publish();
            }
        } else if extra & 2 == 0 {
            r.publish();
        }
        if w.credit() == 0 {
            while !w.refresh().unwrap() {}
        }
        w.publish(head, &[], &[], &buf[..4]);
        if extra & 4 != 0 && w.bell_wanted() {
            println!("y")
        }
        i += 1;
        if i % 500 == 0 {
            laps.push(s.elapsed().as_nanos() as f64 / 1000.0);
            s = Instant::now();
        }
        if i >= n {
            break;
        }
    }
    laps
}
fn main() {
    use std::os::fd::AsFd;
    for extra in [0, 1, 2, 5, 6] {
        let n = 1000000;
        let a = OwnRegion::create(1 << 20).unwrap();
        let b = OwnRegion::create(1 << 20).unwrap();
        let shape = BlockShape::new(D, 64).unwrap();
        let block = Block::new(1024, shape, 1 << 20).unwrap();
        block.prepare(a.memory(), 0, true);
        block.prepare(b.memory(), 0, true);
        let pa = PeerRegion::adopt(a.as_fd().try_clone_to_owned().unwrap(), 1 << 20, 1 << 30).unwrap();
        let pb = PeerRegion::adopt(b.as_fd().try_clone_to_owned().unwrap(), 1 << 20, 1 << 30).unwrap();
        let t = std::thread::spawn(move || {
            pin(1);
            run(&b, pa, false, n, extra)
        });
        pin(0);
        let mut laps = run(&a, pb, true, n, extra);
        laps.sort_by(f64::total_cmp);
        println!(
            "extra {extra} one-way p10 {:.1} p50 {:.1} p90 {:.1} ns",
            laps[laps.len() / 10],
            laps[laps.len() / 2],
            laps[laps.len() * 9 / 10]
        );
        t.join().unwrap();
    }
}
