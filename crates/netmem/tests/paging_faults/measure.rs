//! How long it takes.

use super::{PAGE, Random, WORDS, fill, region, word};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What this thread has run so far: on a machine that does other things too, it says more than the clock on the wall.
fn own_time() -> Duration {
    // SAFETY: the structure is valid if zeroed, and filled by the call.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        time
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs `work`, which says how many faults or bytes it was, and prints the time of one by the clock and of this thread.
fn timed(name: &str, unit: &str, work: impl FnOnce() -> u64) {
    let (began, began_own) = (Instant::now(), own_time());
    let count = work() as f64;
    let (took, own) = (began.elapsed().as_nanos() as f64, (own_time() - began_own).as_nanos() as f64);
    match unit {
        "ns" => println!("{name:<24} {:7.0} ns    this thread {:7.0} ns    {count} times", took / count, own / count),
        _ => println!("{name:<24} {:7.2} GB/s  this thread {:7.2} GB/s", count / took, count / own),
    }
}

/// `cargo nextest run -p highwire-netmem --release --run-ignored only --no-capture measure`
#[test]
#[ignore = "prints figures"]
fn measure() {
    extern "C" fn nothing(_signal: i32) {}
    // SAFETY: a handler that does nothing.
    unsafe { libc::signal(libc::SIGUSR1, nothing as extern "C" fn(i32) as usize) };
    let (pages, rounds) = (65536_u64, 3);
    let bytes = pages * PAGE;
    let (region, _store) = region(pages, pages / 4);
    let (from, mut buffer) = (vec![1_u8; 256 << 20], vec![0; 1 << 20]);
    let faults = |work: &mut dyn FnMut()| {
        let before = region.stats().faults;
        work();
        region.stats().faults - before
    };
    let sum = AtomicU64::new(0);
    let read = |index: usize| region.words()[index].load(Ordering::Relaxed);
    for round in 0..rounds {
        timed("written in order", "GB/s", || {
            fill(&region);
            bytes
        });
        region.flush().unwrap();
        let mut random = Random(round + 1);
        timed("random page, read", "ns", || {
            faults(&mut || {
                (0..pages)
                    .for_each(|_| _ = sum.fetch_add(read(random.below(pages) as usize * WORDS), Ordering::Relaxed))
            })
        });
        timed("page here, read_at", "ns", || {
            let mut number = [0; 8];
            (0..1_000_000).for_each(|at| region.read_at(at % 500 * 8, &mut number).unwrap());
            1_000_000
        });
        timed("random page, read_at", "ns", || {
            let missed = || region.stats().fetched + region.stats().read_directly;
            let (mut number, before) = ([0; 8], missed());
            for _ in 0..pages {
                region.read_at(random.below(pages) * PAGE, &mut number).unwrap();
            }
            missed() - before
        });
        timed("random page, written", "ns", || {
            faults(&mut || {
                (0..pages).for_each(|_| _ = word(&region, random.below(pages)).fetch_add(1, Ordering::Relaxed))
            })
        });
        region.flush().unwrap();
        timed("in order, every byte", "GB/s", || {
            (0..pages as usize * WORDS).step_by(WORDS).for_each(|first| {
                sum.fetch_add((first..first + WORDS).map(read).sum(), Ordering::Relaxed);
            });
            bytes
        });
        timed("in order, every page", "GB/s", || {
            (0..pages as usize).for_each(|page| _ = sum.fetch_add(read(page * WORDS), Ordering::Relaxed));
            bytes
        });
        timed("read_at of 1 MiB", "GB/s", || {
            (0..bytes).step_by(buffer.len()).for_each(|at| region.read_at(at, &mut buffer).unwrap());
            bytes
        });
        timed("write_at of 1 MiB", "GB/s", || {
            (0..bytes).step_by(buffer.len()).for_each(|at| region.write_at(at, &buffer).unwrap());
            bytes
        });
        // The limits: a signal without a fault and a page, and a copy without a region.
        timed("limit: a signal", "ns", || {
            // SAFETY: a signal to this thread, whose handler does nothing.
            (0..20_000).for_each(|_| _ = unsafe { libc::raise(libc::SIGUSR1) });
            20_000
        });
        timed("limit: a copy", "GB/s", || {
            for piece in from.chunks(buffer.len()) {
                buffer.copy_from_slice(piece);
                std::hint::black_box(&buffer);
            }
            from.len() as u64
        });
    }
    println!("{:?}", region.stats());
}
