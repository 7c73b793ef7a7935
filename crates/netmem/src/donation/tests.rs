use super::*;
use proptest::prelude::*;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

fn donation(pages: u64) -> Donation {
    let mut donation = Donation::create(pages).unwrap();
    donation.incarnate(7);
    donation.set_valid_until(100);
    donation
}

fn view(donation: &Donation) -> View {
    let (fd, bytes) = donation.to_read().unwrap();
    View::new(PeerMemory::borrow(fd.as_fd(), bytes, u64::MAX).unwrap()).unwrap()
}

fn now() -> u64 {
    99
}

#[test]
fn what_is_written_is_read_until_it_is_freed() {
    let mut donation = donation(100);
    let view = view(&donation);
    let page = donation.take().unwrap();
    let mut found = [0; 5];
    assert_eq!(view.read(page, 0, &mut found, now), Read::Done);
    assert_eq!(donation.write(page, 4091, b"hello"), Ok(1));
    assert_eq!(view.read(page, 4091, &mut found, now), Read::Done);
    assert_eq!(&found, b"hello");
    let newer = donation.regenerate(page).unwrap();
    assert_eq!(view.read(page, 4091, &mut found, now), Read::Freed);
    assert_eq!((view.read(newer, 4091, &mut found, now), &found), (Read::Done, b"hello"));
    donation.free(newer).unwrap();
    assert_eq!(view.read(newer, 0, &mut found, now), Read::Freed);
    assert_eq!(donation.free(newer), Err(NotInUse { handle: newer }));
    let again = donation.take().unwrap();
    assert_eq!(again.index, page.index);
    assert_eq!((view.read(again, 4091, &mut found, now), found), (Read::Done, [0; 5]), "it begins as zeros");
}

#[test]
fn nothing_is_read_of_a_node_whose_lease_is_over() {
    let mut donation = donation(1);
    let (view, page) = (view(&donation), donation.take().unwrap());
    assert_eq!(view.read(page, 0, &mut [0], || 100), Read::Lapsed);
    donation.set_valid_until(101);
    assert_eq!(view.read(page, 0, &mut [0], || 100), Read::Done);
    donation.incarnate(8);
    assert_eq!(view.read(page, 0, &mut [0], now), Read::Freed);
    assert_eq!(view.read(PageHandle { incarnation: 8, ..page }, 0, &mut [0], now), Read::Freed);
    donation.incarnate(0);
    let nobody = PageHandle { incarnation: 0, index: 0, generation: 1 };
    assert_eq!(view.read(nobody, 0, &mut [0], now), Read::Freed);
}

#[test]
fn a_page_that_is_being_written_is_not_read() {
    let mut donation = donation(1);
    let (view, page) = (view(&donation), donation.take().unwrap());
    donation.region.memory().store64(word_at(0), word_of(page.generation, 3) | BUSY);
    assert_eq!(view.read(page, 0, &mut [0], now), Read::Busy);
}

#[test]
fn a_handle_that_cannot_be_is_refused() {
    let mut donation = donation(3);
    let (view, page) = (view(&donation), donation.take().unwrap());
    for index in [3, 4, 511, u32::MAX] {
        assert_eq!(view.read(PageHandle { index, ..page }, 0, &mut [0], now), Read::Freed);
        assert!(donation.write(PageHandle { index, ..page }, 0, &[0]).is_err());
    }
    for (at, bytes) in [(4096, 1), (0, 4097), (usize::MAX, 1)] {
        assert_eq!(view.read(page, at, &mut vec![0; bytes], now), Read::Freed);
    }
}

#[test]
fn a_header_that_lies_is_refused() {
    let lies: [(usize, u64); 6] = [
        (0, 0),
        (LAYOUT_AT, 2 | 4096 << 32),
        (LAYOUT_AT, 1 | 8192 << 32),
        (PAGES_AT, 0),
        (PAGES_AT, 4),
        (PAGES_AT, u64::MAX),
    ];
    for (at, lie) in lies {
        let donation = donation(3);
        let (fd, bytes) = donation.to_read().unwrap();
        donation.region.memory().store64(at, lie);
        let memory = PeerMemory::borrow(fd.as_fd(), bytes, u64::MAX).unwrap();
        assert!(View::new(memory).is_err(), "{lie} at {at}");
    }
}

#[test]
fn memory_is_taken_as_it_is_used_and_given_back() {
    let mut donation = donation(100);
    assert_eq!(donation.populated(), 0);
    let pages: Vec<_> = (0..100).map(|_| donation.take().unwrap()).collect();
    assert_eq!((donation.populated(), donation.free_pages()), (100, 0));
    assert!(matches!(donation.take(), Err(DonationError::Full { pages: 100 })));
    for page in &pages[32..] {
        donation.write(*page, 0, b"x").unwrap();
        donation.free(*page).unwrap();
    }
    assert_eq!(donation.give_back(1), 36);
    assert_eq!(donation.populated(), 64);
    assert_eq!((donation.give_back(0), donation.populated()), (32, 32));
    let (view, page) = (view(&donation), donation.take().unwrap());
    let mut found = [1];
    assert_eq!((view.read(page, 0, &mut found, now), found), (Read::Done, [0]));
}

#[test]
fn a_machine_without_memory_is_an_error() {
    let mut donation = donation(100);
    donation.limit_memory(31);
    assert!(matches!(donation.take(), Err(DonationError::NoMemory { bytes: 131_072, in_use: 0, .. })));
    donation.limit_memory(32);
    for _ in 0..32 {
        donation.take().unwrap();
    }
    assert!(matches!(donation.take(), Err(DonationError::NoMemory { bytes: 131_072, in_use: 131_072, .. })));
    assert!(matches!(Donation::create(0), Err(DonationError::Size { asked: 0, .. })));
    assert!(matches!(Donation::create(u64::MAX), Err(DonationError::Size { .. })));
}

#[test]
fn a_page_whose_generations_are_spent_is_never_used_again() {
    let mut donation = donation(2);
    let page = donation.take().unwrap();
    donation.region.memory().store64(word_at(page.index), word_of(u32::MAX, 0));
    let last = PageHandle { generation: u32::MAX, ..page };
    assert!(donation.regenerate(last).is_err());
    donation.free(last).unwrap();
    assert_eq!(donation.take().unwrap().index, 1);
    assert!(matches!(donation.take(), Err(DonationError::Full { .. })));
}

proptest! {
    /// Pages are handed out once, keep what was written, and are counted.
    #[test]
    fn pages_behave_like_separate_memories(steps in proptest::collection::vec((0u8..5, any::<u16>()), 1..300)) {
        let mut donation = donation(70);
        let view = view(&donation);
        let mut live: Vec<PageHandle> = Vec::new();
        let mut oracle: HashMap<u32, u8> = HashMap::new();
        let mut gone: Vec<PageHandle> = Vec::new();
        for (step, value) in steps {
            let chosen = (!live.is_empty()).then(|| usize::from(value) % live.len().max(1));
            match (step, chosen) {
                (0 | 1, _) => match donation.take() {
                    Ok(page) => {
                        prop_assert!(oracle.insert(page.index, 0).is_none());
                        live.push(page);
                    }
                    Err(_) => prop_assert_eq!(live.len(), 70),
                },
                (2, Some(at)) => {
                    donation.write(live[at], 100, &[value as u8]).unwrap();
                    oracle.insert(live[at].index, value as u8);
                }
                (3, Some(at)) => {
                    let page = live.swap_remove(at);
                    donation.free(page).unwrap();
                    oracle.remove(&page.index);
                    gone.push(page);
                }
                (4, _) => drop(donation.give_back(usize::from(value % 3))),
                _ => {}
            }
            prop_assert_eq!(donation.in_use() as usize, live.len());
        }
        for page in &live {
            let mut found = [0];
            prop_assert_eq!(view.read(*page, 100, &mut found, now), Read::Done);
            prop_assert_eq!(found[0], oracle[&page.index]);
        }
        for page in &gone {
            prop_assert_eq!(view.read(*page, 100, &mut [0], now), Read::Freed);
        }
    }
}

/// A writer fills pages with one value after another, frees and takes them; no reader may ever see two values in one.
#[test]
fn no_torn_page_passes_the_check() {
    let seconds = if std::env::var_os("HIGHWIRE_SOAK").is_some() { 60 } else { 1 };
    let mut donation = donation(4);
    let view = view(&donation);
    let page = donation.take().unwrap();
    let handle = std::sync::Mutex::new(page);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut counts, mut found) = (HashMap::<String, u64>::new(), [0; PAGE_BYTES]);
            while !stop.load(Ordering::Relaxed) {
                let page = *handle.lock().unwrap();
                for _ in 0..64 {
                    let outcome = view.read(page, 0, &mut found, now);
                    *counts.entry(format!("{outcome:?}")).or_default() += 1;
                    if outcome == Read::Done {
                        assert!(found.iter().all(|byte| *byte == found[0]), "a torn page: {found:?}");
                    }
                }
            }
            counts
        });
        let began = Instant::now();
        let mut page = page;
        for round in 0u32.. {
            donation.write(page, 0, &[round as u8; PAGE_BYTES]).unwrap();
            if round % 1000 == 0 {
                if began.elapsed() > Duration::from_secs(seconds) {
                    break;
                }
                let old = page;
                page = donation.take().unwrap();
                donation.free(old).unwrap();
                *handle.lock().unwrap() = page;
            }
            // Now and then a page stays as it is for as long as it takes to read it.
            if round % 4 == 0 {
                (0..round % 512).for_each(|_| std::hint::spin_loop());
            }
        }
        stop.store(true, Ordering::Relaxed);
        let counts = reader.join().unwrap();
        let count = |name: &str| counts.get(name).copied().unwrap_or(0);
        assert!(count("Done") > 100 && count("Changed") + count("Busy") > 100, "{counts:?}");
    });
}
