//! Pushing pages out: a thread that keeps some room free ahead of need, and `flush`.

use super::engine::{Engine, count};
use super::store::{PAGE_BYTES, PageError, PageRun};
use super::sys::{self, Run};
use super::table::{Home, Leave, Mercy, Phase};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// How faults call the pager, and learn what it did.
#[derive(Debug, Default)]
pub(super) struct PagerBell {
    called: AtomicU32,
    passes: AtomicU32,
    stuck: AtomicBool,
    closed: AtomicBool,
}

impl PagerBell {
    /// Asks for more room. A system call only if the pager sleeps.
    pub(super) fn call(&self) {
        if self.called.load(Ordering::Relaxed) == 0 && self.called.swap(1, Ordering::AcqRel) == 0 {
            sys::wake(&self.called, 1);
        }
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.called.store(1, Ordering::SeqCst);
        sys::wake(&self.called, 1);
    }

    pub(super) fn passes(&self) -> u32 {
        self.passes.load(Ordering::Acquire)
    }

    /// True if the last pass found no place for anything, or nothing that could go.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Acquire)
    }

    pub(super) fn wait_for_pass(&self, seen: u32, at_most: Duration) {
        sys::wait(&self.passes, seen, Some(at_most));
    }

    fn passed(&self, stuck: bool) {
        self.stuck.store(stuck, Ordering::Release);
        self.passes.fetch_add(1, Ordering::AcqRel);
        sys::wake(&self.passes, i32::MAX as u32);
    }
}

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pass {
    freed: u64,
    /// Pages that had to stay, for nobody took them.
    refused: u64,
    /// All had their turns, and none could go: they are pinned, all of them.
    all_pinned: bool,
}

/// Two turns for every page.
struct Rounds {
    all: u64,
    left: u64,
}

impl Rounds {
    fn new(pages: u64) -> Rounds {
        Rounds { all: 2 * pages, left: 2 * pages }
    }

    fn take(&mut self, turns: usize) -> Mercy {
        let mercy = if self.left > self.all / 2 { Mercy::SecondChance } else { Mercy::None };
        self.left = self.left.saturating_sub(turns as u64);
        mercy
    }
}

impl Engine {
    /// The pager: sleeps until room becomes scarce, and makes more, until the region ends.
    pub(super) fn keep_room(&self) {
        let mut buffer = Vec::new();
        while !self.bell.closed.load(Ordering::SeqCst) {
            // Acquire: what led to the call is seen after it. Who calls from here on is heard in the next round.
            if self.bell.called.swap(0, Ordering::AcqRel) == 0 {
                sys::wait(&self.bell.called, 0, None);
                continue;
            }
            loop {
                let wanted = self.budget.shortage();
                let pass = if wanted > 0 { self.pass(wanted, &mut buffer) } else { Pass::default() };
                self.bell.passed(pass.freed == 0 && (pass.refused > 0 || pass.all_pinned));
                if pass.freed == 0 || self.bell.closed.load(Ordering::SeqCst) {
                    break;
                }
            }
        }
    }

    /// Pushes out the oldest pages until `wanted` are gone, one found no place, or everything had its turn twice: once with
    /// a second chance, and once without.
    fn pass(&self, wanted: u64, buffer: &mut Vec<u8>) -> Pass {
        let mut pass = Pass::default();
        let mut rounds = Rounds::new(self.budget.used());
        let (mut turned, mut pinned) = ([0; BATCH], 0);
        // A store that was full is asked with one page whether it still is.
        let mut batch = if self.bell.is_stuck() { 1 } else { BATCH as u64 };
        while pass.freed < wanted && pass.refused == 0 && rounds.left > 0 {
            let most = batch.min(rounds.left).min(wanted - pass.freed);
            let turned = self.ages.take(&mut turned[..most as usize]);
            if turned.is_empty() {
                // Somebody else takes them just now, or is about to enter the oldest.
                sys::yield_now();
                break;
            }
            let mercy = rounds.take(turned.len());
            let (mut clean, mut dirty, mut later) = (Vec::new(), Vec::new(), Vec::new());
            for &page in turned {
                match self.table.claim_leaving(page, mercy) {
                    Leave::Clean => clean.push(page),
                    Leave::Dirty => dirty.push(page),
                    Leave::Later => later.push(page),
                    Leave::Pinned => {
                        pinned += 1;
                        later.push(page);
                    }
                }
            }
            self.ages.enter(later.into_iter());
            pass.freed += self.drop_pages(&mut clean);
            if !dirty.is_empty() {
                self.push_out(&mut dirty, buffer, &mut pass);
                batch = BATCH as u64;
            }
        }
        pass.all_pinned = rounds.left == 0 && pinned == rounds.all;
        // What is clean can go however full the store is.
        let mut rounds = Rounds::new(if pass.refused > 0 { self.budget.used() } else { 0 });
        while pass.freed < wanted && rounds.left > 0 {
            let mercy = rounds.take(BATCH);
            pass.freed += self.evict_clean::<BATCH>(self.ages.take(&mut turned), mercy) as u64;
        }
        pass
    }

    /// Pages that are Leaving and whose homes have them: unmaps them.
    fn drop_pages(&self, pages: &mut [u64]) -> u64 {
        if pages.is_empty() {
            return 0;
        }
        pages.sort_unstable();
        self.mapping.drop_runs(&runs_of(pages));
        let epoch = self.epoch();
        for &page in &*pages {
            self.table.left(page, self.table.load(page).home(), epoch);
        }
        self.gone(pages.len());
        pages.len() as u64
    }

    fn gone(&self, pages: usize) {
        count(&self.counters.evicted, pages as u64);
        self.budget.give_back(pages as u32);
    }

    /// Pages that are Leaving and whose content is only here: keeps it elsewhere and unmaps them, or lets them stay.
    fn push_out(&self, pages: &mut [u64], buffer: &mut Vec<u8>, pass: &mut Pass) {
        pages.sort_unstable();
        let (homes, _) = self.keep_elsewhere(pages, true, buffer);
        let (mut gone, mut spilled_before) = (Vec::new(), Vec::new());
        for (&page, home) in pages.iter().zip(homes) {
            match home {
                Some(home) => gone.push((page, home)),
                None => {
                    self.let_stay(page);
                    self.ages.enter(std::iter::once(page));
                    pass.refused += 1;
                }
            }
        }
        let numbers: Vec<u64> = gone.iter().map(|&(page, _)| page).collect();
        self.mapping.drop_runs(&runs_of(&numbers));
        let epoch = self.epoch();
        for &(page, home) in &gone {
            if self.table.load(page).home() == Home::Spill && home == Home::Store {
                spilled_before.push(page);
            }
            self.table.left(page, home, epoch);
        }
        self.release_spilled(&spilled_before);
        self.gone(gone.len());
        pass.freed += gone.len() as u64;
    }

    /// A page that nobody took is written again without a fault.
    fn let_stay(&self, page: u64) {
        let open = self.mapping.protect(Run { first: page, pages: 1 }, false);
        assert_eq!(open, Ok(()), "the kernel does not let page {page} be written again");
        self.table.stayed(page, None);
    }

    /// Copies the content of pages that are Leaving, in order, to the store or else to the spill file. Says where each went,
    /// and why the first that went nowhere did not.
    fn keep_elsewhere(
        &self,
        pages: &[u64],
        protected: bool,
        buffer: &mut Vec<u8>,
    ) -> (Vec<Option<Home>>, Option<PageError>) {
        let mut homes = vec![None; pages.len()];
        if pages.is_empty() {
            return (homes, None);
        }
        buffer.resize(buffer.len().max(pages.len() * PAGE_BYTES), 0);
        let runs = runs_of(pages);
        for run in runs.iter().filter(|_| protected) {
            // From here on a write to these pages waits, so that the copy is what the page ends with.
            if let Err(sys::Errno(errno)) = self.mapping.protect(*run, true) {
                return (homes, Some(PageError::Kernel { page: run.first, errno }));
            }
        }
        let mut rest = &mut buffer[..pages.len() * PAGE_BYTES];
        let mut copies = Vec::with_capacity(runs.len());
        for run in &runs {
            let (copy, later) = rest.split_at_mut(run.bytes());
            self.mapping.copy_out(run.first as usize * PAGE_BYTES, copy);
            copies.push(PageRun { first: run.first, content: copy });
            rest = later;
        }
        let (kept_pages, mut reason) = match self.store.store(&copies) {
            Ok(()) => (pages.len(), None),
            Err(refused) => (refused.kept_pages.min(pages.len()), Some(refused.reason)),
        };
        homes[..kept_pages].fill(Some(Home::Store));
        count(&self.counters.stored, kept_pages as u64);
        if let Some(spill) = self.spill.as_ref().filter(|_| reason.is_some()) {
            reason = None;
            for (home, (&page, copy)) in homes.iter_mut().zip(pages.iter().zip(buffer.chunks_exact(PAGE_BYTES))) {
                if home.is_none() {
                    match spill.write(page, copy) {
                        Ok(()) => *home = Some(Home::Spill),
                        Err(error) => {
                            reason.get_or_insert(error);
                        }
                    }
                }
            }
            let spilled = homes.iter().filter(|home| **home == Some(Home::Spill)).count();
            count(&self.counters.spilled, spilled as u64);
        }
        if let Some(PageError::Full { pages: without }) = &mut reason {
            *without = (pages.len() - kept_pages) as u64;
        }
        (homes, reason)
    }

    /// Their new content is in the store; what the file has is old.
    fn release_spilled(&self, pages: &[u64]) {
        if let Some(spill) = &self.spill {
            runs_of(pages).into_iter().for_each(|run| spill.release(run));
        }
    }

    /// Pushes out those of the `MOST` oldest pages that need no copying; for a signal handler, which leaves all others in
    /// their order to the pager.
    pub(super) fn evict_oldest_clean<const MOST: usize>(&self) -> usize {
        let mut turned = [0; MOST];
        let is_clean = |page| self.table.load(page).phase() == Phase::Clean;
        self.evict_clean::<MOST>(self.ages.take_while(&mut turned, is_clean), Mercy::SecondChance)
    }

    /// Of pages whose turn it is, pushes out those that need no copying.
    fn evict_clean<const MOST: usize>(&self, turned: &[u64], mercy: Mercy) -> usize {
        let (mut leaving, mut count) = ([0; MOST], 0);
        for &page in turned {
            if self.table.claim_leaving_clean(page, mercy) {
                leaving[count] = page;
                count += 1;
            } else {
                self.ages.enter(std::iter::once(page));
            }
        }
        let leaving = &mut leaving[..count];
        leaving.sort_unstable();
        let mut runs = [Run { first: 0, pages: 0 }; MOST];
        let mut run_count = 0;
        for_each_run(leaving, |run| {
            runs[run_count] = run;
            run_count += 1;
        });
        self.mapping.drop_runs(&runs[..run_count]);
        let epoch = self.epoch();
        for &page in &*leaving {
            self.table.left(page, self.table.load(page).home(), epoch);
        }
        self.gone(count);
        count
    }

    /// Copies every page whose content is only here to the store, or else to the spill file. They stay here.
    pub(super) fn flush(&self) -> Result<(), PageError> {
        let mut flush =
            Flush { engine: self, pages: Vec::new(), pinned: Vec::new(), buffer: Vec::new(), outcome: Ok(()) };
        for page in 0..self.table.pages() {
            loop {
                let word = self.table.load(page);
                match word.phase() {
                    Phase::Dirty => match self.table.claim_cleaning(page) {
                        Some(false) => break flush.pages.push(page),
                        Some(true) => break flush.pinned.push(page),
                        None => {}
                    },
                    // On its way to a home, or just being written: then it is dirty next time.
                    Phase::Leaving | Phase::Opening => {
                        // Nobody may wait for pages that we hold while we wait for others.
                        flush.copy();
                        self.table.wait(page, word);
                    }
                    Phase::Away | Phase::Arriving | Phase::Clean => break,
                }
            }
            if flush.pages.len() + flush.pinned.len() == BATCH {
                flush.copy();
            }
        }
        flush.copy();
        flush.outcome
    }
}

/// Pages that a flush has claimed and not copied yet.
struct Flush<'a> {
    engine: &'a Engine,
    pages: Vec<u64>,
    /// They are copied as they are at some moment, without being protected, and stay dirty.
    pinned: Vec<u64>,
    buffer: Vec<u8>,
    outcome: Result<(), PageError>,
}

impl Flush<'_> {
    fn copy(&mut self) {
        let engine = self.engine;
        let (homes, reason) = engine.keep_elsewhere(&self.pages, true, &mut self.buffer);
        let mut spilled_before = Vec::new();
        for (page, home) in self.pages.drain(..).zip(homes) {
            match home {
                Some(home) => {
                    if engine.table.load(page).home() == Home::Spill && home == Home::Store {
                        spilled_before.push(page);
                    }
                    engine.table.stayed(page, Some(home));
                }
                None => engine.let_stay(page),
            }
        }
        engine.release_spilled(&spilled_before);
        self.failed(reason);
        let (_, reason) = engine.keep_elsewhere(&self.pinned, false, &mut self.buffer);
        self.pinned.drain(..).for_each(|page| engine.table.stayed(page, None));
        self.failed(reason);
    }

    /// The first reason is the one to be told; pages without a place are counted.
    fn failed(&mut self, reason: Option<PageError>) {
        self.outcome = match (self.outcome, reason) {
            (Err(PageError::Full { pages }), Some(PageError::Full { pages: more })) => {
                Err(PageError::Full { pages: pages + more })
            }
            (Ok(()), Some(reason)) => Err(reason),
            (before, _) => before,
        };
    }
}

fn runs_of(pages: &[u64]) -> Vec<Run> {
    let mut runs = Vec::new();
    for_each_run(pages, |run| runs.push(run));
    runs
}

/// The runs in page numbers that ascend.
fn for_each_run(pages: &[u64], mut each: impl FnMut(Run)) {
    let mut current: Option<Run> = None;
    for &page in pages {
        match &mut current {
            Some(run) if run.end() == page => run.pages += 1,
            _ => {
                current.replace(Run { first: page, pages: 1 }).map(&mut each);
            }
        }
    }
    current.map(each);
}

/// Pages that take their turn together: as many as go to the store in one call.
const BATCH: usize = 256;
