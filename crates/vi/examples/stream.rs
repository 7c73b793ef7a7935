//! tmp
use highwire_vi::*;
use std::time::{Duration, Instant};
fn main() {
    let nic = Nic::open().unwrap();
    let l = nic.listen("shm:st").unwrap();
    let nic2 = Nic::open().unwrap();
    let t = std::thread::spawn(move || {
        nic2.connect_with("shm:st", &ViOptions::new().path(Path::Referenced)).map(|v| (v, nic2)).unwrap()
    });
    let mut rx = l.accept(Duration::from_secs(5)).unwrap();
    let (mut tx, nic2) = t.join().unwrap();
    let pool = nic2.pool(8192, 64).unwrap();
    let mut frames: Vec<Buffer> = (0..64).map(|_| pool.frame().unwrap()).collect();
    let (mut a, mut b, mut c) = (vec![], vec![], vec![]);
    for _ in 0..20000 {
        let s = Instant::now();
        for _ in 0..48 {
            let f = frames.pop().unwrap();
            tx.post_send(Message::new(7).payload(f)).unwrap();
        }
        let e = Instant::now();
        a.push((e - s).as_nanos() as f64 / 48.0);
        for _ in 0..48 {
            rx.post_recv(Receive::new(1).in_place()).unwrap();
        }
        let s = Instant::now();
        for _ in 0..48 {
            let d = rx.poll().unwrap();
            let p = d.into_in_place().unwrap();
            std::hint::black_box(p.byte(0));
            rx.receiver().release(p);
        }
        let e = Instant::now();
        b.push((e - s).as_nanos() as f64 / 48.0);
        assert!(rx.poll().is_none());
        let s = Instant::now();
        for _ in 0..48 {
            frames.push(tx.poll().unwrap().into_buffer().unwrap());
        }
        let e = Instant::now();
        c.push((e - s).as_nanos() as f64 / 48.0);
    }
    for (n, v) in [("post", &mut a), ("recv", &mut b), ("reap", &mut c)] {
        v.sort_by(f64::total_cmp);
        println!("{n} {:.1} ns", v[v.len() / 2]);
    }
    println!("{:?} {:?}", tx.sender().stats(), rx.receiver().stats());
}
