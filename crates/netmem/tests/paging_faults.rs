//! Paged regions with real faults: threads against an oracle, races, and everything that can go wrong.
//!
//! A test that must die, or that changes its process, runs this binary again for that test alone.

use highwire_netmem::{
    BUDGET_BYTES_MIN, EXIT_PAGE_LOST, MemoryStore, PAGE_BYTES, PageError, PagedRegion, PagingError, PagingOptions,
};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE: u64 = PAGE_BYTES as u64;
const WORDS: usize = PAGE_BYTES / 8;

fn region_with(pages: u64, options: PagingOptions) -> (PagedRegion, Arc<MemoryStore>) {
    let store = Arc::new(MemoryStore::new(pages * PAGE));
    (PagedRegion::create(pages * PAGE, options, store.clone()).unwrap(), store)
}

fn region(pages: u64, budget_pages: u64) -> (PagedRegion, Arc<MemoryStore>) {
    region_with(pages, PagingOptions::new(budget_pages * PAGE))
}

/// The same numbers for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u64
    }
}

/// How much longer the threads run than in every test.
fn soak() -> u64 {
    if std::env::var_os("HIGHWIRE_SOAK").is_some() { 20 } else { 1 }
}

/// Other numbers in every long run, and the same in all others.
fn soak_seed() -> u64 {
    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_nanos() as u64);
    if soak() > 1 { now << 8 & 0xffff_ff00 } else { 0 }
}

const CHILD: &str = "HIGHWIRE_PAGING_CHILD";

/// In the test: none. In the process started for it: what that should do.
fn role() -> Option<String> {
    std::env::var(CHILD).ok()
}

fn run_as(test: &str, role: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--include-ignored"]).env(CHILD, role);
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{} {}{}", output.status, String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn word(region: &PagedRegion, page: u64) -> &AtomicU64 {
    &region.words()[page as usize * WORDS]
}

/// Every page with its number in it, most of them pushed out.
fn fill(region: &PagedRegion) {
    for page in 0..region.len() / PAGE {
        word(region, page).store(page + 1, Ordering::Relaxed);
    }
}

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
    assert!(stats.fetched > 1000 && stats.evicted > 2000, "{stats:?}");
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
fn against_oracle(region: &PagedRegion, threads: usize, steps: u64, seed: u64) {
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
fn a_lost_page_is_an_error_and_whole_pages_replace_it() {
    let (region, store) = region(256, 64);
    fill(&region);
    region.flush().unwrap();
    // Page 3 is away by now: 256 were touched after it.
    store.lose(3);
    let mut bytes = [0; 8];
    assert_eq!(region.read_at(3 * PAGE + 5, &mut bytes), Err(PageError::Lost { page: 3 }));
    assert_eq!(region.read_at(3 * PAGE + 5, &mut bytes), Err(PageError::Lost { page: 3 }));
    assert_eq!(region.write_at(3 * PAGE + 5, &bytes), Err(PageError::Lost { page: 3 }));
    assert_eq!(region.read_at(0, &mut vec![0; 20 * PAGE_BYTES]), Err(PageError::Lost { page: 3 }));
    region.read_at(4 * PAGE, &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 5);
    region.write_at(3 * PAGE, &[9; PAGE_BYTES]).unwrap();
    region.read_at(3 * PAGE + 5, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 8]);
}

#[test]
fn a_raw_access_to_a_lost_page_ends_the_process() {
    const NAME: &str = "a_raw_access_to_a_lost_page_ends_the_process";
    if role().is_some() {
        let (region, store) = region(256, 64);
        fill(&region);
        region.flush().unwrap();
        store.lose(3);
        println!("page 3 is {}", word(&region, 3).load(Ordering::Relaxed));
        return;
    }
    let output = run_as(NAME, "die");
    assert_eq!(output.status.code(), Some(EXIT_PAGE_LOST), "{}", text(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("highwire: paged region 0 (256 pages): page 3 cannot be accessed: it is lost"), "{said}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("page 3 is"), "{}", text(&output));
}

#[test]
fn a_stream_stops_before_a_lost_page_that_nobody_asked_for() {
    let (region, store) = region(1024, 256);
    fill(&region);
    region.flush().unwrap();
    store.lose(300);
    for page in 0..300 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
    for page in 301..600 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
}

#[test]
fn a_full_store_leaves_pages_here_up_to_the_limit() {
    let options = PagingOptions { limit_bytes: 160 * PAGE, ..PagingOptions::new(128 * PAGE) };
    let (region, store) = region_with(512, options);
    store.set_capacity(40);
    let page = [7_u8; PAGE_BYTES];
    let mut written = 0;
    let error = loop {
        match region.write_at(written * PAGE, &page) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(written, 200);
    assert_eq!(error, PageError::NoRoom { resident_bytes: 160 * PAGE, limit_bytes: 160 * PAGE });
    assert!(matches!(region.flush(), Err(PageError::Full { pages: 160 })), "{:?}", region.stats());
    let mut all = vec![0; 40 * PAGE_BYTES];
    // Those in the store can still be read past the region, though there is no room for them.
    region.read_at(0, &mut all).unwrap();
    assert!(all.iter().all(|&byte| byte == 7));
    // More memory in the store, and it goes on.
    store.set_capacity(u64::MAX);
    region.write_at(written * PAGE, &page).unwrap();
    region.flush().unwrap();
    assert_eq!(store.stored_pages(), 201);
}

#[test]
fn with_no_place_left_a_raw_access_ends_the_process() {
    const NAME: &str = "with_no_place_left_a_raw_access_ends_the_process";
    if role().is_some() {
        let options = PagingOptions { limit_bytes: 80 * PAGE, ..PagingOptions::new(64 * PAGE) };
        let (region, store) = region_with(512, options);
        store.set_capacity(0);
        for page in 0..80 {
            word(&region, page).store(1, Ordering::Relaxed);
        }
        println!("80 pages have a place");
        word(&region, 80).store(1, Ordering::Relaxed);
        println!("81 pages have a place");
        return;
    }
    let output = run_as(NAME, "die");
    assert_eq!(output.status.code(), Some(EXIT_PAGE_LOST), "{}", text(&output));
    let said = text(&output);
    assert!(said.contains("80 pages have") && !said.contains("81 pages have"), "{said}");
    assert!(said.contains("page 80 cannot be accessed: no place for it: 327680 bytes are here"), "{said}");
}

#[test]
fn what_spilled_goes_to_the_store_when_it_has_room() {
    let directory = tempfile::tempdir().unwrap();
    let options = PagingOptions { spill: Some(directory.path().into()), ..PagingOptions::new(64 * PAGE) };
    let (region, store) = region_with(512, options);
    store.set_capacity(0);
    fill(&region);
    assert!(region.stats().spilled >= 400, "{:?}", region.stats());
    store.set_capacity(u64::MAX);
    for page in 0..512 {
        assert_eq!(word(&region, page).fetch_add(1, Ordering::Relaxed), page + 1);
    }
    region.flush().unwrap();
    assert_eq!(store.stored_pages(), 512);
    for page in 0..512 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 2);
    }
    let mut all = vec![0; 512 * PAGE_BYTES];
    region.read_at(0, &mut all).unwrap();
    assert!(all.chunks(PAGE_BYTES).zip(2_u64..).all(|(page, number)| page[..8] == number.to_ne_bytes()));
}

#[test]
fn a_full_disk_is_an_error_and_loses_nothing() {
    // SAFETY: takes nothing.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: a_full_disk_is_an_error_and_loses_nothing needs root, to mount a small file system");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=256k", "none"]).arg(directory.path()).status();
    if !mounted.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: a_full_disk_is_an_error_and_loses_nothing: no file system can be mounted here");
        return;
    }
    let outcome = std::panic::catch_unwind(|| {
        let options = PagingOptions {
            spill: Some(directory.path().into()),
            limit_bytes: 80 * PAGE,
            ..PagingOptions::new(64 * PAGE)
        };
        let (region, store) = region_with(512, options);
        store.set_capacity(0);
        let mut written = 0;
        let error = loop {
            match region.write_at(written * PAGE, &[written as u8; PAGE_BYTES]) {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, PageError::NoRoom { .. }), "{error}");
        assert!(region.stats().spilled > 30 && written > 110, "{written} {:?}", region.stats());
        assert!(matches!(region.flush(), Err(PageError::Spill { errno: libc::ENOSPC, .. })));
        for page in 0..written {
            let mut found = [0; PAGE_BYTES * 8];
            // Eight at once need no room here.
            let first = (page / 8 * 8).min(written.saturating_sub(8));
            if region.read_at(first * PAGE, &mut found).is_ok() {
                assert_eq!(found[((page - first) * PAGE) as usize], page as u8);
            }
        }
        store.set_capacity(u64::MAX);
        region.flush().unwrap();
        for page in 0..written {
            assert_eq!(region.bytes()[(page * PAGE) as usize].load(Ordering::Relaxed), page as u8);
        }
    });
    let unmounted = Command::new("umount").arg(directory.path()).status().unwrap();
    assert!(unmounted.success());
    outcome.unwrap();
}

#[test]
fn no_privilege_is_needed() {
    const NAME: &str = "no_privilege_is_needed";
    if role().is_some() {
        // SAFETY: numbers only; this process has no other use for its rights.
        let dropped = unsafe {
            libc::setgroups(0, std::ptr::null());
            libc::setgid(65534) == 0 && libc::setuid(65534) == 0
        };
        assert!(dropped);
        let (region, _store) = region(512, 64);
        against_oracle(&region, 2, 3000, 1);
        println!("it worked for user {}", std::fs::read_to_string("/proc/self/loginuid").unwrap_or_default());
        return;
    }
    // SAFETY: takes nothing.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: no_privilege_is_needed needs root, to drop it; the other tests run without privilege here");
        return;
    }
    let output = run_as(NAME, "drop");
    assert!(output.status.success() && text(&output).contains("it worked"), "{}", text(&output));
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

static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_and_leave(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel's description of the signal.
    let address = unsafe { (*info).si_addr() } as u64;
    HANDLED.store(address, Ordering::SeqCst);
    if signal == libc::SIGBUS {
        // SAFETY: ends the process at once; 42 says that the handler ran.
        unsafe { libc::_exit(42) };
    }
}

/// Memory behind the end of its file.
fn bad_memory() -> *mut u8 {
    let file = tempfile::tempfile().unwrap();
    // SAFETY: a new mapping; it outlives the descriptor.
    let bad = unsafe {
        use std::os::fd::AsRawFd;
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert!(bad != libc::MAP_FAILED);
    bad.cast()
}

#[test]
fn other_bus_errors_go_to_whoever_handled_them_before() {
    const NAME: &str = "other_bus_errors_go_to_whoever_handled_them_before";
    let Some(role) = role() else {
        let output = run_as(NAME, "handler");
        assert_eq!(output.status.code(), Some(42), "{}", text(&output));
        for role in ["fault", "sent"] {
            use std::os::unix::process::ExitStatusExt;
            let output = run_as(NAME, role);
            assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{role} {}", text(&output));
        }
        let output = run_as(NAME, "ignored");
        assert!(output.status.success(), "{}", text(&output));
        return;
    };
    // SAFETY: handlers that the process wants in this test.
    unsafe {
        match role.as_str() {
            "handler" => {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = count_and_leave as extern "C" fn(_, _, _) as usize;
                action.sa_flags = libc::SA_SIGINFO;
                libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
            }
            "ignored" => {
                libc::signal(libc::SIGBUS, libc::SIG_IGN);
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            }
        }
    }
    let (region, _store) = region(256, 64);
    fill(&region);
    if role == "sent" || role == "ignored" {
        // SAFETY: a signal to this thread.
        unsafe { libc::raise(libc::SIGBUS) };
        assert_eq!(role, "ignored");
        fill(&region);
        return;
    }
    // SAFETY: ends the process, as the test wants.
    let byte = unsafe { bad_memory().read_volatile() };
    panic!("read {byte} behind the end of a file");
}

#[test]
fn a_forked_child_has_nothing_and_is_told() {
    const NAME: &str = "a_forked_child_has_nothing_and_is_told";
    if role().is_none() {
        let output = run_as(NAME, "fork");
        assert!(output.status.success(), "{}", text(&output));
        return;
    }
    let (region, _store) = region(256, 64);
    fill(&region);
    let fork = |child: &dyn Fn()| {
        // SAFETY: the child calls what needs no other thread, and ends by _exit.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                child();
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            status
        }
    };
    let status = fork(&|| {
        let there = word(&region, 255).load(Ordering::Relaxed);
        // SAFETY: ends the child.
        unsafe { libc::_exit(there as i32 & 0x3f | 1) };
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
    let status = fork(&|| {
        let refused = region.read_at(0, &mut [0; 8]) == Err(PageError::OtherProcess);
        let refused = refused && region.write_at(0, &[0; 8]) == Err(PageError::OtherProcess);
        // SAFETY: ends the child.
        unsafe { libc::_exit(if refused && region.flush().is_err() { 7 } else { 8 }) };
    });
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
    fill(&region);
    for page in 0..256 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
    let region = std::mem::ManuallyDrop::new(region);
    let status = fork(&|| {
        // SAFETY: dropped once in this child, which has its own copy of the value.
        drop(unsafe { std::ptr::read(&raw const *region) });
    });
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    drop(std::mem::ManuallyDrop::into_inner(region));
}

#[test]
fn a_process_that_locks_its_memory_has_no_more_of_it_here() {
    const NAME: &str = "a_process_that_locks_its_memory_has_no_more_of_it_here";
    if role().is_none() {
        let output = run_as(NAME, "lock");
        assert!(output.status.success(), "{}", text(&output));
        return;
    }
    // SAFETY: takes numbers.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        eprintln!("SKIPPED: {NAME}: this process may not lock its memory");
        return;
    }
    let (region, _store) = region(1024, 64);
    against_oracle(&region, 2, 3000, 4);
    assert!(region.stats().evicted > 1000);
}

#[test]
fn a_system_call_cannot_bring_pages() {
    let (region, _store) = region(256, 64);
    fill(&region);
    let file = tempfile::tempfile().unwrap();
    // SAFETY: the first page of the region, as the kernel reads it.
    let written = unsafe {
        use std::os::fd::AsRawFd;
        libc::write(file.as_raw_fd(), region.as_ptr().cast(), PAGE_BYTES)
    };
    let error = std::io::Error::last_os_error();
    assert_eq!((written, error.raw_os_error()), (-1, Some(libc::EFAULT)));
    let mut page = [0; PAGE_BYTES];
    region.read_at(0, &mut page).unwrap();
    assert_eq!(page[..8], 1_u64.to_ne_bytes());
}

#[test]
fn sizes_and_ranges_are_checked() {
    let store = Arc::new(MemoryStore::new(PAGE));
    let create = |bytes, options| PagedRegion::create(bytes, options, store.clone());
    assert_eq!(create(0, PagingOptions::new(1 << 20)).unwrap_err(), PagingError::Size { bytes: 0 });
    assert_eq!(create(PAGE, PagingOptions::new(4096)).unwrap_err(), PagingError::Budget { budget_bytes: 4096 });
    let options = PagingOptions { spill: Some("/nowhere".into()), ..PagingOptions::new(1 << 20) };
    assert!(matches!(create(PAGE, options).unwrap_err(), PagingError::Spill { errno: libc::ENOENT, .. }));
    let region = create(5000, PagingOptions::new(1 << 20)).unwrap();
    let outside = PageError::Outside { offset: 4999, bytes: 2, region_bytes: 5000 };
    assert_eq!(region.read_at(4999, &mut [0; 2]), Err(outside));
    assert_eq!(outside.to_string(), "offset 4999 + 2 is outside the region of 5000 bytes");
    assert!(region.write_at(u64::MAX, &[0; 2]).is_err());
    region.write_at(4998, &[1, 2]).unwrap();
    region.read_at(5000, &mut []).unwrap();
    assert_eq!((region.len(), region.bytes().len()), (5000, 8192));
    let mut more = Vec::new();
    let error = loop {
        match create(PAGE, PagingOptions::new(1 << 20)) {
            Ok(region) => more.push(region),
            Err(error) => break error,
        }
    };
    assert_eq!((error, more.len() < 64), (PagingError::TooMany, true));
}

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
