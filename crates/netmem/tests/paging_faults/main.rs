//! Paged regions with real faults: threads against an oracle, races, and everything that can go wrong.
//!
//! A test that must die, or that changes its process, runs this binary again for that test alone.

mod failures;
mod held;
mod measure;
mod processes;
mod threads;

use highwire_netmem::{MemoryStore, PAGE_BYTES, PagedRegion, PagingOptions};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
    let output = command.output().unwrap();
    assert!(text(&output).contains("running 1 test"), "there is no test {test}: {}", text(&output));
    output
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
