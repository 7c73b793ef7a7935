//! What threads write is what they read, however often its pages come and go.

use super::{PAGE, Random, fill, region, region_with, soak, soak_seed, word};
use highwire_netmem::{BUDGET_BYTES_MIN, Hold, PAGE_BYTES, PagedRegion, PagingOptions};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn pages_never_written_are_zeros_and_nobody_is_asked() {
    let (region, store) = region(1024, 128);
    let mut random = Random(7);
    for _ in 0..5000 {
        assert_eq!(word(&region, random.below(1024)).load(Ordering::Relaxed), 0);
    }
    let mut all = vec![1; 1024 * PAGE_BYTES];
    region.read_at(0, &mut all).unwrap();
    assert!(all.iter().all(|&byte| byte == 0));
    region.flush().unwrap();
    assert_eq!((store.fetches(), store.stored_pages()), (0, 0));
    let stats = region.stats();
    assert!(stats.evicted > 1000 && stats.resident_bytes <= 128 * PAGE, "{stats:?}");
}

#[test]
fn what_was_written_comes_back() {
    let (region, store) = region(1024, 128);
    fill(&region);
    assert!(store.stored_pages() > 800);
    for page in (0..1024).rev() {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1, "page {page}");
    }
    let mut number = [0; 8];
    for page in 0..1024 {
        region.read_at(page * PAGE, &mut number).unwrap();
        assert_eq!(u64::from_ne_bytes(number), page + 1);
    }
    let stats = region.stats();
    assert!(stats.fetched + stats.read_directly > 1700 && stats.evicted > 1500, "{stats:?}");
}

#[test]
fn clean_pages_are_not_stored_again() {
    let (region, _store) = region(512, 64);
    fill(&region);
    region.flush().unwrap();
    let stored = region.stats().stored;
    for page in 0..512 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
    region.flush().unwrap();
    assert_eq!(region.stats().stored, stored);
}

/// Threads that share pages but not words, each with its own idea of what its words are.
pub(super) fn against_oracle(region: &PagedRegion, threads: usize, steps: u64, seed: u64) {
    let (steps, seed) = (steps * soak(), seed ^ soak_seed());
    let words = region.words().len() / threads;
    let work = |thread: usize| {
        let mut random = Random(seed ^ (thread as u64 + 1) << 32);
        let mut oracle = vec![0_u64; words];
        let own = |index: usize| index * threads + thread;
        for step in 0..steps {
            // Half of the accesses are near each other, so that some of what is here is used.
            let index = match random.below(2) {
                0 => random.below(words as u64),
                _ => random.below(words as u64 / 16),
            } as usize;
            let offset = own(index) as u64 * 8;
            let raw = &region.words()[own(index)];
            match random.below(8) {
                0..3 => {
                    assert_eq!(raw.load(Ordering::Relaxed), oracle[index], "seed {seed} thread {thread} step {step}")
                }
                3..6 => {
                    oracle[index] = random.next();
                    raw.store(oracle[index], Ordering::Relaxed);
                }
                6 => {
                    let mut found = [0; 8];
                    region.read_at(offset, &mut found).unwrap();
                    assert_eq!(u64::from_ne_bytes(found), oracle[index], "seed {seed} thread {thread} step {step}");
                }
                _ => {
                    oracle[index] = random.next();
                    region.write_at(offset, &oracle[index].to_ne_bytes()).unwrap();
                }
            }
        }
        (thread, oracle)
    };
    let oracles: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut all = vec![0; region.len() as usize];
    region.read_at(0, &mut all).unwrap();
    for (thread, oracle) in oracles {
        for (index, expected) in oracle.into_iter().enumerate() {
            let at = (index * threads + thread) * 8;
            assert_eq!(all[at..at + 8], expected.to_ne_bytes(), "seed {seed} thread {thread} word {index}");
        }
    }
}

#[test]
fn many_threads_see_what_they_wrote() {
    for seed in 1..=4 {
        let (region, _store) = region(1024, 256);
        against_oracle(&region, 4, 30_000, seed);
    }
}

#[test]
fn many_threads_see_what_they_wrote_through_a_slow_store() {
    let (region, store) = region(1024, 256);
    store.set_slow(Duration::from_micros(200));
    against_oracle(&region, 8, 1500, 5);
}

#[test]
fn many_threads_see_what_they_wrote_with_the_smallest_budget() {
    let (region, _store) = region(256, BUDGET_BYTES_MIN / PAGE);
    against_oracle(&region, 8, 10_000, 6);
}

#[test]
fn many_threads_see_what_they_wrote_through_a_spill_file() {
    let directory = tempfile::tempdir().unwrap();
    let options = PagingOptions { spill: Some(directory.path().into()), ..PagingOptions::new(128 * PAGE) };
    let (region, store) = region_with(512, options);
    store.set_capacity(100);
    against_oracle(&region, 4, 15_000, 8);
    let stats = region.stats();
    assert!(stats.spilled > 100 && stats.stored >= 100, "{stats:?}");
}

/// Adding is a read and a write in one instruction: a write that gets lost between the copy of a page and its end is missed
/// in the sum.
fn count_up(flush: bool, slow: Option<Duration>, steps: u64) {
    let steps = steps * soak();
    let (region, store) = region(256, BUDGET_BYTES_MIN / PAGE);
    if let Some(delay) = slow {
        store.set_slow(delay);
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let counting: Vec<_> = (0..4)
            .map(|thread| {
                let region = &region;
                scope.spawn(move || {
                    let mut random = Random((thread + 99) ^ soak_seed());
                    for _ in 0..steps {
                        word(region, random.below(256)).fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        if flush {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    region.flush().unwrap();
                }
            });
        }
        counting.into_iter().for_each(|thread| thread.join().unwrap());
        done.store(true, Ordering::Relaxed);
    });
    let sum: u64 = (0..256).map(|page| word(&region, page).load(Ordering::Relaxed)).sum();
    assert_eq!(sum, 4 * steps, "{:?}", region.stats());
}

#[test]
fn no_write_is_lost_to_eviction() {
    count_up(false, None, 60_000);
}

#[test]
fn no_write_is_lost_to_eviction_and_flush() {
    count_up(true, None, 40_000);
}

#[test]
fn no_write_is_lost_to_eviction_into_a_slow_store() {
    count_up(true, Some(Duration::from_micros(300)), 1000);
}

#[test]
fn large_pieces_are_whole() {
    let (region, _store) = region(2048, 256);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let region = &region;
            scope.spawn(move || {
                let mut random = Random(thread + 1);
                let (from, bytes) = (thread * 512 * PAGE, 512 * PAGE);
                let mut oracle = vec![0_u8; bytes as usize];
                for _ in 0..60 {
                    let at = random.below(bytes) as usize;
                    let end = at + 1 + random.below((bytes as usize - at).min(300_000) as u64) as usize;
                    if random.below(2) == 0 {
                        let seed = random.next();
                        let content: Vec<u8> = (at..end).map(|at| (at as u64 ^ seed) as u8).collect();
                        oracle[at..end].copy_from_slice(&content);
                        region.write_at(from + at as u64, &content).unwrap();
                    } else {
                        let mut found = vec![0; end - at];
                        region.read_at(from + at as u64, &mut found).unwrap();
                        assert!(found == oracle[at..end], "thread {thread}, {at}..{end}");
                    }
                }
            });
        }
    });
    assert!(region.stats().read_directly > 0);
}

#[test]
fn a_direct_read_never_sees_what_was_replaced_before_it_began() {
    for flush in [false, true] {
        read_while_replacing(flush);
    }
}

/// Flushed, pages that are here have their content at their home too, where direct reads find it until they are written.
fn read_while_replacing(flush: bool) {
    let (region, _store) = region(512, BUDGET_BYTES_MIN / PAGE);
    let written = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=300_u64 {
                for page in 0..128 {
                    word(&region, page).store(round, Ordering::Relaxed);
                }
                written.store(round, Ordering::SeqCst);
            }
            done.store(true, Ordering::SeqCst);
        });
        scope.spawn(|| {
            while flush && !done.load(Ordering::SeqCst) {
                region.flush().unwrap();
            }
        });
        let mut all = vec![0; 128 * PAGE_BYTES];
        while !done.load(Ordering::SeqCst) {
            let least = written.load(Ordering::SeqCst);
            region.read_at(0, &mut all).unwrap();
            for page in all.chunks(PAGE_BYTES) {
                let found = u64::from_ne_bytes(page[..8].try_into().unwrap());
                assert!(found >= least, "{found} was replaced by {least}");
            }
        }
    });
}

#[test]
fn a_direct_read_goes_on_over_a_few_pages_that_are_here() {
    let (region, store) = region(512, 128);
    fill(&region);
    region.flush().unwrap();
    // Most of the first half is away; some pages of it are here, and some of those are newer than what the store has.
    (256..512).for_each(|page| assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1));
    let here = |page: u64| page % 16 == 3;
    let newer = |page: u64| page % 80 == 3;
    for page in (0..256).filter(|page| here(*page)) {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
        if newer(page) {
            word(&region, page).store(1000 + page, Ordering::Relaxed);
        }
    }
    let mut all = vec![0; 256 * PAGE_BYTES];
    let mut read = || {
        let before = region.stats();
        region.read_at(0, &mut all).unwrap();
        for (page, content) in all.chunks(PAGE_BYTES).enumerate() {
            let page = page as u64;
            let expected = if newer(page) { 1000 + page } else { page + 1 };
            assert_eq!(content[..8], expected.to_ne_bytes(), "page {page}");
        }
        region.stats().read_directly - before.read_directly
    };
    let newer_pages = (0..256).filter(|page| newer(*page)).count() as u64;
    let direct = read();
    assert!(direct >= 256 - 2 * newer_pages, "{direct} of 256 pages");
    // A store that has to be asked is not asked for what is here.
    store.set_slow(Duration::ZERO);
    let direct = read();
    assert!(direct <= 256 - (0..256).filter(|page| here(*page)).count() as u64, "{direct} of 256 pages");
    // Nor does it matter whether it still has that.
    let _held = region.hold(19 * PAGE, PAGE_BYTES, Hold::Read).unwrap();
    store.lose(19);
    read();
}

#[test]
fn streams_are_brought_in_batches() {
    let (region, store) = region(4096, 1024);
    fill(&region);
    region.flush().unwrap();
    let (asked, before) = (store.fetches(), region.stats());
    let sum: u64 = (0..4096).map(|page| word(&region, page).load(Ordering::Relaxed)).sum();
    assert_eq!(sum, (1..=4096).sum());
    let (asked, after) = (store.fetches() - asked, region.stats());
    assert!(asked < 200, "{asked} fetches for 4096 pages");
    assert!(after.faults - before.faults < 200, "{after:?}");
    assert!(after.prefetch_hits - before.prefetch_hits > 2000, "{after:?}");
}

#[test]
fn streams_through_a_slow_store_are_fetched_ahead() {
    let (region, store) = region(4096, 1024);
    fill(&region);
    region.flush().unwrap();
    store.set_slow(Duration::from_millis(1));
    let (asked, began) = (store.fetches(), Instant::now());
    let sum: u64 = (0..4096).map(|page| word(&region, page).load(Ordering::Relaxed)).sum();
    assert_eq!(sum, (1..=4096).sum());
    // One by one it would be more than four seconds.
    let (asked, took) = (store.fetches() - asked, began.elapsed());
    assert!(asked < 300 && took < Duration::from_secs(2), "{asked} fetches in {took:?}");
}

#[test]
fn random_faults_bring_no_more_than_was_asked_for() {
    let (region, _store) = region(4096, 512);
    fill(&region);
    region.flush().unwrap();
    let before = region.stats();
    let mut random = Random(3);
    for _ in 0..4000 {
        let page = random.below(4096);
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
    let after = region.stats();
    assert!(after.prefetched - before.prefetched < 400, "{after:?}");
}

#[test]
fn without_prefetch_every_page_is_a_fault() {
    let (region, _store) = region_with(512, PagingOptions { prefetch: false, ..PagingOptions::new(BUDGET_BYTES_MIN) });
    fill(&region);
    let stats = region.stats();
    assert!(stats.prefetched == 0 && stats.faults >= 512, "{stats:?}");
}

#[test]
fn two_regions_are_two() {
    let ((one, _), (two, _)) = (region(512, 64), region(512, 64));
    std::thread::scope(|scope| {
        scope.spawn(|| against_oracle(&one, 2, 10_000, 1));
        scope.spawn(|| against_oracle(&two, 2, 10_000, 2));
    });
}

#[test]
fn regions_come_and_go() {
    let (lasting, _store) = region(256, 64);
    std::thread::scope(|scope| {
        scope.spawn(|| against_oracle(&lasting, 2, 20_000, 3));
        for _ in 0..100 {
            let (passing, _store) = region(256, 64);
            fill(&passing);
        }
    });
}

#[test]
fn bytes_are_copied_between_regions_and_within_one() {
    let ((one, _), (two, _)) = (region(512, 64), region(512, 64));
    fill(&one);
    // SAFETY: nobody else touches these pages of the region while the slice lives.
    let inside = unsafe { std::slice::from_raw_parts_mut(two.as_ptr(), 512 * PAGE_BYTES) };
    one.read_at(0, inside).unwrap();
    one.write_at(0, &inside[PAGE_BYTES..]).unwrap();
    for page in 0..511 {
        assert_eq!(word(&two, page).load(Ordering::Relaxed), page + 1);
        assert_eq!(word(&one, page).load(Ordering::Relaxed), page + 2);
    }
    // SAFETY: as above.
    let own = unsafe { std::slice::from_raw_parts(one.as_ptr(), 256 * PAGE_BYTES) };
    one.write_at(256 * PAGE, own).unwrap();
    for page in 0..256 {
        assert_eq!(word(&one, page + 256).load(Ordering::Relaxed), page + 2);
    }
}

/// A flush has all pages in its hands while the store takes its time: no reason to say that there is no room.
#[test]
fn a_slow_flush_of_everything_is_not_taken_for_a_full_store() {
    let options = PagingOptions { limit_bytes: BUDGET_BYTES_MIN, ..PagingOptions::new(BUDGET_BYTES_MIN) };
    let (region, store) = region_with(256, options);
    fill(&region);
    store.set_slow(Duration::from_millis(20));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                region.flush().unwrap();
            }
        });
        let mut random = Random(17);
        for _ in 0..60 {
            let page = random.below(256);
            region.write_at(page * PAGE, &(page + 1).to_ne_bytes()).unwrap();
            assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn small_pieces_are_brought_when_wanted_again() {
    let (region, _store) = region(1024, 64);
    fill(&region);
    region.flush().unwrap();
    let mut number = [0; 8];
    // Long ago pushed out, as far as the region can tell.
    let mut read = |page: u64| {
        let before = region.stats();
        region.read_at(page * PAGE, &mut number).unwrap();
        assert_eq!(u64::from_ne_bytes(number), page + 1);
        let after = region.stats();
        (after.read_directly - before.read_directly, after.fetched - before.fetched)
    };
    assert_eq!(read(100), (1, 0));
    assert_eq!(read(100), (0, 1));
    assert_eq!(read(100), (0, 0));
}

/// Pages that are used all the time have second chances without end; somebody must go nevertheless.
#[test]
fn pages_in_constant_use_make_room_too() {
    let options = PagingOptions { limit_bytes: BUDGET_BYTES_MIN, ..PagingOptions::new(BUDGET_BYTES_MIN) };
    let (region, _store) = region_with(256, options);
    fill(&region);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let region = &region;
            scope.spawn(move || {
                let (mut random, mut number) = (Random(thread + 1), [0; 8]);
                for _ in 0..20_000 {
                    let page = random.below(72);
                    region.read_at(page * PAGE, &mut number).unwrap();
                    assert_eq!(u64::from_ne_bytes(number), page + 1);
                }
            });
        }
    });
}
