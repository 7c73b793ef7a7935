//! Lost pages, full stores, full disks, and what cannot be.

use super::{PAGE, fill, region, region_with, role, run_as, text, word};
use highwire_netmem::{EXIT_PAGE_LOST, MemoryStore, PAGE_BYTES, PageError, PagedRegion, PagingError, PagingOptions};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
    const NAME: &str = "failures::a_raw_access_to_a_lost_page_ends_the_process";
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
    const NAME: &str = "failures::with_no_place_left_a_raw_access_ends_the_process";
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
            assert_eq!(super::word(&region, page).load(Ordering::Relaxed).to_ne_bytes()[0], page as u8);
        }
    });
    let unmounted = Command::new("umount").arg(directory.path()).status().unwrap();
    assert!(unmounted.success());
    outcome.unwrap();
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
    assert_eq!((region.len(), region.words().len()), (5000, 1024));
}

/// In a process of its own, where no other test wants a region meanwhile.
#[test]
fn a_process_has_so_many_regions_and_no_more() {
    const NAME: &str = "failures::a_process_has_so_many_regions_and_no_more";
    if role().is_none() {
        let output = run_as(NAME, "many");
        assert!(output.status.success(), "{}", text(&output));
        return;
    }
    let store = Arc::new(MemoryStore::new(PAGE));
    let create = || PagedRegion::create(PAGE, PagingOptions::new(1 << 20), store.clone());
    let regions: Vec<_> = (0..64).map(|_| create().unwrap()).collect();
    assert_eq!(create().unwrap_err(), PagingError::TooMany);
    drop(regions);
    create().unwrap();
}
