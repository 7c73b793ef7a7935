//! Ranges that are kept here.

use super::{PAGE, Random, fill, region, word};
use highwire_netmem::{Hold, PAGE_BYTES, PageError, PagedRegion};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// Touches everything else, several times over.
fn press(region: &PagedRegion, seed: u64) {
    let (mut random, pages) = (Random(seed), region.len() / PAGE);
    for _ in 0..pages * 4 {
        word(region, random.below(pages)).load(Ordering::Relaxed);
    }
}

#[test]
fn what_is_held_stays_and_does_not_fault() {
    let (region, _store) = region(512, 64);
    fill(&region);
    let held = region.hold(100 * PAGE + 5, 20 * PAGE_BYTES, Hold::Read).unwrap();
    press(&region, 1);
    let faults = region.stats().faults;
    for page in 100..=120 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
    assert_eq!(region.stats().faults, faults);
    drop(held);
    press(&region, 2);
    assert_eq!(word(&region, 110).load(Ordering::Relaxed), 111);
    assert!(region.stats().faults > faults);
}

#[test]
fn system_calls_use_what_is_held() {
    let (region, store) = region(512, 64);
    fill(&region);
    let file = tempfile::tempfile().unwrap();
    let content: Vec<u8> = (0..8 * PAGE_BYTES).map(|at| (at * 7) as u8).collect();
    std::os::unix::fs::FileExt::write_all_at(&file, &content, 0).unwrap();
    let held = region.hold(200 * PAGE, content.len(), Hold::Write).unwrap();
    // SAFETY: the memory is held for writing, and nobody else uses it.
    let read = || unsafe { libc::pread(file.as_raw_fd(), held.as_ptr().cast(), content.len(), 0) };
    assert_eq!(read(), content.len() as isize);
    // A flush copies what is held for writing, and it can still be written.
    region.flush().unwrap();
    assert_eq!(read(), content.len() as isize);
    assert_eq!(store.stored_pages(), 512);
    let found: Vec<u8> = held.words().iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
    assert!(found == content);
    // Words of a range that begins and ends inside of them, and of none.
    let part = region.hold(200 * PAGE + 5, 12, Hold::Read).unwrap();
    assert!(part.words().iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).eq(content[..24].to_vec()));
    assert!(region.hold(200 * PAGE + 5, 0, Hold::Read).unwrap().words().is_empty());
    drop(held);
    press(&region, 3);
    let mut back = vec![0; content.len()];
    region.read_at(200 * PAGE, &mut back).unwrap();
    assert!(back == content);
}

#[test]
fn no_write_to_held_pages_is_lost_to_flush_and_eviction() {
    let (region, _store) = region(256, 64);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let counting: Vec<_> = (0..3_u64)
            .map(|thread| {
                let region = &region;
                scope.spawn(move || {
                    let mut random = Random(thread + 5);
                    for _ in 0..3000 {
                        let first = random.below(254);
                        let held = region.hold(first * PAGE, 2 * PAGE_BYTES, Hold::Write).unwrap();
                        word(region, first).fetch_add(1, Ordering::Relaxed);
                        word(region, first + 1).fetch_add(1, Ordering::Relaxed);
                        drop(held);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                region.flush().unwrap();
            }
        });
        counting.into_iter().for_each(|thread| thread.join().unwrap());
        done.store(true, Ordering::Relaxed);
    });
    let sum: u64 = (0..256).map(|page| word(&region, page).load(Ordering::Relaxed)).sum();
    assert_eq!(sum, 3 * 3000 * 2);
}

#[test]
fn too_much_is_refused_and_the_rest_goes_on() {
    let (region, store) = region(512, 64);
    fill(&region);
    assert!(matches!(region.hold(0, 33 * PAGE_BYTES, Hold::Read), Err(PageError::NoRoom { .. })));
    assert!(matches!(region.hold(512 * PAGE, 1, Hold::Read), Err(PageError::Outside { .. })));
    // Twice the half of the budget is all of it; others then get by with the limit, which is twice the budget.
    let one = region.hold(0, 32 * PAGE_BYTES, Hold::Read).unwrap();
    let two = region.hold(32 * PAGE, 32 * PAGE_BYTES, Hold::Write).unwrap();
    for page in 64..100 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
    drop((one, two));
    press(&region, 4);
    region.flush().unwrap();
    store.lose(300);
    press_around(&region, 300);
    assert_eq!(region.hold(298 * PAGE, 4 * PAGE_BYTES, Hold::Read).unwrap_err(), PageError::Lost { page: 300 });
    assert!(region.hold(7, 0, Hold::Write).unwrap().words().is_empty());
}

/// Pushes one page out without touching it.
fn press_around(region: &PagedRegion, page: u64) {
    for other in (0..512_u64).filter(|other| other.abs_diff(page) > 20).chain(0..256) {
        word(region, other).load(Ordering::Relaxed);
    }
}
