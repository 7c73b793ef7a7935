//! Doorbells: everyone who rang is heard, whoever else writes the page.
#![cfg(not(loom))]

mod pair;

use highwire_mem::{BELLS_MAX, Bell, BellIndex, BellPage, RegionError, RegionKind, RemoteRegion, SharedMemory};
use highwire_mem::{News, Sleep, SleepOutcome, Tag, WireUse};
use pair::Random;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const PAGE_BYTES: u64 = 4096;

/// A bell, the page as an honest peer has it, and our end of the wire.
fn bell() -> (Bell, BellPage, OwnedFd, UnixDatagram) {
    let (bell, fd) = Bell::create().unwrap();
    let (ears, wire) = UnixDatagram::pair().unwrap();
    ears.set_nonblocking(true).unwrap();
    let page = BellPage::adopt(fd.try_clone().unwrap(), wire.into()).unwrap();
    (bell, page, fd, ears)
}

/// The same page as a hostile peer has it: any word, any time.
fn hostile(fd: impl AsFd) -> SharedMemory {
    let fd = fd.as_fd().try_clone_to_owned().unwrap();
    let region = RemoteRegion::adopt(fd, RegionKind::Exported, Tag(0), PAGE_BYTES, PAGE_BYTES).unwrap();
    region.writable().unwrap().clone()
}

fn index(number: u32) -> BellIndex {
    BellIndex::new(number).unwrap()
}

fn taken(bell: &Bell) -> Vec<u32> {
    let mut rang = Vec::new();
    bell.take(|index| rang.push(index.number()));
    rang
}

proptest! {
    #[test]
    fn exactly_those_who_rang_are_heard(rounds in proptest::collection::vec(proptest::collection::vec(0..BELLS_MAX, 0..50), 1..10)) {
        let (bell, page, ..) = bell();
        for numbers in rounds {
            numbers.iter().for_each(|number| page.rope(index(*number)).ring(News::Slots));
            prop_assert_eq!(bell.rung(), !numbers.is_empty());
            let expected: Vec<u32> = numbers.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
            prop_assert_eq!(taken(&bell), expected, "each once, lowest first");
            prop_assert!(!bell.rung());
        }
    }

    /// Whatever a peer leaves in the page, the rings after it are heard, among spurious ones.
    #[test]
    fn after_a_hostile_write_the_others_are_still_heard(
        writes in proptest::collection::vec((0usize..512, any::<u64>()), 0..100),
        numbers in proptest::collection::vec(0..BELLS_MAX, 1..20),
    ) {
        let (bell, page, fd, _ears) = bell();
        let page_words = hostile(&fd);
        for (word, value) in writes {
            page_words.store64(word * 8, value);
        }
        numbers.iter().for_each(|number| page.rope(index(*number)).ring(News::Slots));
        let heard: BTreeSet<u32> = taken(&bell).into_iter().collect();
        prop_assert!(heard.iter().all(|number| *number < BELLS_MAX));
        prop_assert!(numbers.iter().all(|number| heard.contains(number)));
        prop_assert!(taken(&bell).is_empty(), "spurious ones are heard once");
        // A sleeper comes and goes whatever the number of sleepers is said to be.
        bell.enter();
        bell.leave();
    }
}

/// Each ringer counts up before it rings. When all is quiet, the last count of each was heard of.
#[test]
fn no_ring_of_any_thread_is_lost() {
    const RINGERS: usize = 4;
    const ROUNDS: u64 = 5_000;
    let (bell, page, ..) = bell();
    let sleep = Sleep::new();
    let numbers = [0u32, 1, 63, 4095];
    let published: [AtomicU64; RINGERS] = Default::default();
    let mut heard = [0; RINGERS];
    std::thread::scope(|scope| {
        for (ringer, number) in numbers.into_iter().enumerate() {
            let (published, rope) = (&published, page.rope(index(number)));
            scope.spawn(move || {
                let mut random = Random::new(u64::from(number));
                for round in 1..=ROUNDS {
                    published[ringer].store(round, Ordering::Relaxed);
                    rope.ring(News::Slots);
                    match random.below(100) {
                        0 => std::thread::sleep(Duration::from_micros(random.below(200))),
                        1..10 => std::thread::yield_now(),
                        _ => {}
                    }
                }
            });
        }
        let patience = Instant::now() + Duration::from_secs(60);
        while heard != [ROUNDS; RINGERS] {
            bell.take(|index| {
                let ringer = numbers.iter().position(|number| *number == index.number()).expect("nobody else rings");
                heard[ringer] = published[ringer].load(Ordering::Relaxed);
            });
            bell.enter();
            Bell::settle();
            let (own, count) = (sleep.count(), bell.count());
            if !bell.rung() && heard != [ROUNDS; RINGERS] {
                let outcome = sleep.sleep(own, &[(&bell, count)], Some(Duration::from_secs(10)));
                assert_eq!(outcome, SleepOutcome::LookAgain, "a ring was lost: heard {heard:?}");
            }
            bell.leave();
            assert!(Instant::now() < patience, "heard {heard:?}");
        }
    });
}

/// A peer that writes the page without pause: every look ends, and names only bells there are.
#[test]
fn a_page_written_without_pause_is_only_spurious() {
    for seed in 0..3 {
        let (bell, page, fd, _ears) = bell();
        let (page_words, sleep) = (hostile(&fd), Sleep::new());
        let stop = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let stop_writing = &stop;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while stop_writing.load(Ordering::Relaxed) == 0 {
                    page_words.store64(random.below(512) as usize * 8, random.next());
                }
            });
            let rope = page.rope(index(seed as u32));
            let end = Instant::now() + Duration::from_millis(100);
            while Instant::now() < end {
                rope.ring(News::Slots);
                let mut count = 0;
                bell.take(|_| count += 1);
                assert!(count <= BELLS_MAX, "seed {seed}: {count} indexes in one look");
                bell.enter();
                Bell::settle();
                sleep.sleep(sleep.count(), &[(&bell, bell.count())], Some(Duration::from_micros(50)));
                bell.leave();
            }
            stop.store(1, Ordering::Relaxed);
        });
        bell.take(|_| {});
        page.rope(index(7)).ring(News::Slots);
        assert!(taken(&bell).contains(&7), "seed {seed}: among what the peer left, if anything");
    }
}

#[test]
fn the_wire_is_used_only_while_armed_and_never_blocks() {
    let (bell, page, _fd, ears) = bell();
    let rope = page.rope(index(3));
    let mut byte = [0; 8];
    rope.ring(News::Slots);
    assert!(ears.recv(&mut byte).is_err(), "nobody armed it");
    bell.arm(WireUse::ALWAYS);
    rope.ring(News::Slots);
    assert_eq!(ears.recv(&mut byte).unwrap(), 1);
    // Nobody reads: the socket fills, and ringing goes on.
    for _ in 0..5_000 {
        rope.ring(News::Slots);
    }
    while ears.recv(&mut byte).is_ok() {}
    bell.arm(WireUse::NOT);
    rope.ring(News::Slots);
    assert!(ears.recv(&mut byte).is_err());
    assert_eq!(taken(&bell), [3]);
    // The waiter is gone: no signal, no error.
    bell.arm(WireUse::ALWAYS);
    drop(ears);
    rope.ring(News::Slots);
}

#[test]
fn a_wire_that_is_no_socket_harms_nobody() {
    let (reading, writing) = std::io::pipe().unwrap();
    let zero = std::fs::File::open("/dev/zero").unwrap();
    for wire in [OwnedFd::from(reading), writing.into(), zero.into()] {
        let (bell, fd) = Bell::create().unwrap();
        let page = BellPage::adopt(fd, wire).unwrap();
        bell.arm(WireUse::ALWAYS);
        page.rope(index(9)).ring(News::Slots);
        assert_eq!(taken(&bell), [9]);
    }
}

#[test]
fn pages_that_could_be_cut_short_are_refused() {
    let wire = || OwnedFd::from(UnixDatagram::pair().unwrap().0);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let error = BellPage::adopt(file.into(), wire()).unwrap_err();
    assert!(matches!(error, RegionError::Unsealed { .. }), "{error}");
    let larger = highwire_mem::Exported::create(8192, Tag(0)).unwrap();
    let error = BellPage::adopt(larger.as_fd().try_clone_to_owned().unwrap(), wire()).unwrap_err();
    assert!(matches!(error, RegionError::WrongSize { found: 8192, expected: PAGE_BYTES }), "{error}");
    let unwritable = highwire_mem::Region::create(PAGE_BYTES as usize, Tag(0)).unwrap();
    let error = BellPage::adopt(unwritable.descriptor().unwrap().try_clone_to_owned().unwrap(), wire()).unwrap_err();
    assert!(matches!(error, RegionError::Map(_)), "{error}");
    assert!(BellIndex::new(BELLS_MAX).is_none());
}
