//! Bringing pages: what a fault does, in a signal handler or on behalf of `read_at` and `write_at`.
//!
//! Everything here that a handler reaches is made of atomic operations and system calls: it neither allocates nor locks.

use super::age::{AgeQueue, Budget};
use super::pager::PagerBell;
use super::requests::{Request, Requests};
use super::spill::Spill;
use super::store::{PAGE_BYTES, PageError, PageStore};
use super::streams::Streams;
use super::sys::{self, Mapping, Run, Staging, Zeros};
use super::table::{Failure, Home, Phase, Table};
use highwire_mem::Process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A region without its threads: what they, the signal handlers and the callers share.
pub(super) struct Engine {
    /// For messages: regions are numbered in the order of their making.
    pub(super) number: u64,
    pub(super) process: Process,
    pub(super) mapping: Mapping,
    pub(super) table: Table,
    pub(super) ages: AgeQueue,
    pub(super) budget: Budget,
    /// Faults for pages that are away.
    pub(super) arrivals: Streams,
    /// First writes to pages that are here.
    pub(super) openings: Streams,
    pub(super) staging: Staging,
    pub(super) zeros: Zeros,
    pub(super) requests: Requests,
    pub(super) bell: PagerBell,
    pub(super) store: Arc<dyn PageStore>,
    pub(super) spill: Option<Spill>,
    pub(super) counters: Counters,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) faults: AtomicU64,
    pub(super) fetched: AtomicU64,
    pub(super) prefetched: AtomicU64,
    pub(super) prefetch_hits: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) stored: AtomicU64,
    pub(super) spilled: AtomicU64,
    pub(super) read_directly: AtomicU64,
    pub(super) waited_for_room: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// What a thread wants of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    /// A fault of which the processor does not tell which it was. On a page that is here it can only have been a write.
    #[cfg_attr(target_arch = "x86_64", allow(dead_code))]
    Unknown,
}

/// Who brings a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bringer {
    /// A signal handler, which leaves what may block to the fetching threads.
    Handler,
    /// A caller of this crate, who may block.
    Caller,
}

impl Engine {
    /// Makes a page accessible. Another thread may push it out again at any moment; the access is then repeated.
    pub(super) fn bring(&self, page: u64, access: Access, bringer: Bringer) -> Result<(), PageError> {
        let mut waited = false;
        loop {
            let word = self.table.load(page);
            match word.phase() {
                Phase::Away => {
                    // Whoever brought it for us failed. Without having waited, a failure is an old one: try again.
                    if let Some(failure) = word.failure().filter(|_| waited) {
                        return Err(failure.error(page));
                    }
                    if self.bring_from_home(page, access == Access::Write, bringer)? {
                        return Ok(());
                    }
                }
                Phase::Arriving | Phase::Leaving | Phase::Opening => {
                    self.table.wait(page, word);
                    waited = true;
                }
                Phase::Clean if access != Access::Read => {
                    if self.open(page)? {
                        return Ok(());
                    }
                }
                // Somebody else was faster.
                Phase::Clean | Phase::Dirty => return Ok(()),
            }
        }
    }

    /// Brings a page that was away a moment ago, and those after it if it is part of a stream. False: look again.
    fn bring_from_home(&self, page: u64, write: bool, bringer: Bringer) -> Result<bool, PageError> {
        let advice = self.arrivals.fault(page, write);
        let Some(mut claim) = self.claim(page, advice.pages, bringer)? else {
            return Ok(false);
        };
        count(&self.counters.prefetch_hits, u64::from(advice.used));
        let all_written = write && advice.writes;
        // Whether a thread blocks for it, and whether that is another thread.
        let (mut blocks, mut handed) = (false, false);
        match claim.home {
            Home::Zeros => claim.place(&self.zeros[..claim.run().bytes()], write, all_written)?,
            Home::Spill => {
                let mut staged = self.staging.take(claim.run().bytes());
                let spill = self.spill.as_ref().expect("a page spilled, so there is a file");
                spill.read(page, &mut staged).map_err(|error| claim.failed(error))?;
                claim.place(&staged, write, all_written)?;
            }
            Home::Store => {
                let mut staged = self.staging.take(claim.run().bytes());
                if self.store.fetch_now(page, &mut staged) {
                    count(&self.counters.fetched, u64::from(claim.run().pages));
                    claim.place(&staged, write, all_written)?;
                } else {
                    (blocks, handed) = (true, bringer == Bringer::Handler);
                    if !handed {
                        self.fetch(&mut claim, &mut staged, write, all_written)?;
                    }
                }
            }
        }
        let brought = claim.run();
        if handed {
            self.hand_over(claim, write, all_written);
        }
        let (next, further) = if blocks && advice.is_stream() {
            self.ask_ahead(brought, advice.pages, all_written)
        } else {
            (brought.end(), 0)
        };
        let ahead = brought.pages - 1 + further;
        count(&self.counters.prefetched, u64::from(ahead));
        self.arrivals.brought(advice, next, ahead, write);
        Ok(!handed)
    }

    /// Fetches, blocking. If not all of the pages can be had, then the first alone.
    fn fetch(&self, claim: &mut Claim<'_>, staged: &mut [u8], write: bool, all: bool) -> Result<(), PageError> {
        let run = claim.run();
        let bytes = match self.store.fetch(run.first, staged) {
            Ok(()) => staged.len(),
            Err(_) if run.pages > 1 => {
                claim.shorten(1);
                let first = &mut staged[..PAGE_BYTES];
                self.store.fetch(run.first, first).map_err(|error| claim.failed(error))?;
                PAGE_BYTES
            }
            Err(error) => return Err(claim.failed(error)),
        };
        count(&self.counters.fetched, (bytes / PAGE_BYTES) as u64);
        claim.place(&staged[..bytes], write, all)
    }

    /// Leaves claimed pages to the fetching threads.
    fn hand_over(&self, claim: Claim<'_>, write: bool, all_written: bool) {
        let request = Request { run: claim.run(), write, all_written, awaited: true };
        claim.keep();
        while !self.requests.push(request) {
            sys::yield_now();
        }
    }

    /// Asks for the pages that a stream will need after those that it has. The first of them is left out: the fault on it
    /// tells that the stream came this far, and that it is time to ask for more.
    fn ask_ahead(&self, brought: Run, window: u32, all_written: bool) -> (u64, u32) {
        let end = self.table.pages().min(brought.end() + u64::from(window));
        let next = (brought.end()..end).find(|&page| self.table.load(page).phase() == Phase::Away).unwrap_or(end);
        let first = next + 1;
        if first >= self.table.pages() || self.table.load(first).home() != Home::Store {
            return (next, 0);
        }
        let Some(claim) = self.budget.reserve(window).and_then(|pages| self.claim_reserved(first, pages)) else {
            return (next, 0);
        };
        if claim.home != Home::Store {
            return (next, 0);
        }
        let request = Request { run: claim.run(), write: all_written, all_written, awaited: false };
        if self.requests.push(request) {
            claim.keep();
            return (next, request.run.pages);
        }
        (next, 0)
    }

    /// A fetching thread: brings what handlers asked for, until the region ends.
    pub(super) fn serve_requests(&self) {
        let mut buffer = Vec::new();
        while let Some(request) = self.requests.wait() {
            let run = request.run;
            let mut claim = Claim { engine: self, run, done: 0, home: Home::Store };
            buffer.resize(buffer.len().max(run.bytes()), 0);
            let staged = &mut buffer[..run.bytes()];
            if request.awaited {
                // Whoever waits learns of an error by the page's word.
                let _ = self.fetch(&mut claim, staged, request.write, request.all_written);
            } else if self.store.fetch(run.first, staged).is_ok() {
                count(&self.counters.fetched, u64::from(run.pages));
                let _ = claim.place(staged, request.write, request.all_written);
            }
            self.call_pager_if_low();
        }
    }

    /// Lets a page be written that was protected, and those after it if it is part of a stream of writes. False: look again.
    pub(super) fn open(&self, page: u64) -> Result<bool, PageError> {
        if !self.table.claim_opening(page) {
            return Ok(false);
        }
        let advice = self.openings.fault(page, true);
        let mut run = Run { first: page, pages: 1 };
        while run.pages < advice.pages && run.end() < self.table.pages() && self.table.claim_opening(run.end()) {
            run.pages += 1;
        }
        let outcome = self.mapping.protect(run, false);
        (run.first..run.end()).for_each(|page| self.table.opened(page, outcome.is_ok()));
        self.openings.brought(advice, run.end(), run.pages - 1, true);
        outcome.map(|()| true).map_err(|sys::Errno(errno)| PageError::Kernel { page, errno })
    }

    /// Room for up to `want` pages and claims for as many of them as are away and have the same home as the first.
    /// None: the first is not away any more.
    pub(super) fn claim(&self, first: u64, want: u32, bringer: Bringer) -> Result<Option<Claim<'_>>, PageError> {
        let room = self.make_room(want, bringer)?;
        Ok(self.claim_reserved(first, room))
    }

    fn claim_reserved(&self, first: u64, room: u32) -> Option<Claim<'_>> {
        let Some(home) = self.table.claim_arrival(first) else {
            self.budget.give_back(room);
            return None;
        };
        let mut run = Run { first, pages: 1 };
        while run.pages < room && run.end() < self.table.pages() {
            match self.table.claim_arrival(run.end()) {
                Some(same) if same == home => run.pages += 1,
                Some(_) => {
                    self.table.arrival_failed(run.end(), None);
                    break;
                }
                None => break,
            }
        }
        if room > run.pages {
            self.budget.give_back(room - run.pages);
        }
        Some(Claim { engine: self, run, done: 0, home })
    }

    /// Reserves between one and `want` pages. Ordinarily the pager has made room before, and this is one atomic operation.
    fn make_room(&self, want: u32, bringer: Bringer) -> Result<u32, PageError> {
        let (mut begun, mut stuck) = (None, 0);
        loop {
            if let Some(granted) = self.budget.reserve(want) {
                self.call_pager_if_low();
                return Ok(granted);
            }
            count(&self.counters.waited_for_room, 1);
            if self.evict_oldest_clean::<HANDLER_EVICTS>() > 0 {
                continue;
            }
            // One pass of the pager may be under way already and have missed what happened since; the one after it has not.
            let seen = self.bell.passes();
            let passes = seen.wrapping_sub(*begun.get_or_insert(seen));
            if passes >= 2 && self.bell.is_stuck() {
                if self.budget.overdraw() {
                    return Ok(1);
                }
                // A caller can do something about it. A handler can only end the process, and hopes for a while.
                stuck += 1;
                if bringer == Bringer::Caller || stuck == HANDLER_HOPES {
                    return Err(PageError::NoRoom {
                        resident_bytes: self.budget.used() * PAGE_BYTES as u64,
                        limit_bytes: self.budget.limit() * PAGE_BYTES as u64,
                    });
                }
                self.bell.wait_for_pass(seen, Duration::from_millis(100));
            } else if passes >= 2 {
                // What could go is in somebody's hands, a flush's for instance: asking at once again would not help.
                self.bell.wait_for_pass(seen, Duration::from_micros(200));
            }
            self.bell.call();
            if !self.budget.has_free() {
                self.bell.wait_for_pass(seen, Duration::from_millis(100));
            }
        }
    }

    pub(super) fn call_pager_if_low(&self) {
        if self.budget.is_low() {
            self.bell.call();
        }
    }

    /// Turnovers of the whole budget so far.
    pub(super) fn epoch(&self) -> u64 {
        self.counters.evicted.load(Ordering::Relaxed) / self.budget.pages()
    }
}

/// Pages that this thread has claimed, with room for them. Given back when dropped, unless they were placed.
pub(super) struct Claim<'a> {
    engine: &'a Engine,
    run: Run,
    /// Pages of the run that have arrived.
    done: u32,
    pub(super) home: Home,
}

impl Claim<'_> {
    pub(super) fn run(&self) -> Run {
        self.run
    }

    /// Puts the content in place: the first page as one that is written if `write`, the others if `all`.
    pub(super) fn place(&mut self, content: &[u8], write: bool, all: bool) -> Result<(), PageError> {
        assert_eq!(content.len(), self.run.bytes());
        let first_alone = if write == all { 0 } else { PAGE_BYTES };
        let (first, others) = content.split_at(first_alone);
        let mut outcome = self.place_next(first, write);
        if outcome.is_ok() {
            outcome = self.place_next(others, all);
        }
        // Without the others it is still what was asked for.
        if self.done > 0 { Ok(()) } else { outcome }
    }

    fn place_next(&mut self, content: &[u8], dirty: bool) -> Result<(), PageError> {
        if content.is_empty() {
            return Ok(());
        }
        let engine = self.engine;
        let first = self.run.first + u64::from(self.done);
        let (placed, outcome) = engine.mapping.place(first, content, !dirty);
        let epoch = engine.epoch();
        let pages = (0..placed).map(|index| first + u64::from(index));
        pages.clone().for_each(|page| engine.table.arrived(page, dirty, epoch));
        engine.ages.enter(pages);
        self.done += placed;
        outcome.map_err(|sys::Errno(errno)| self.failed(PageError::Kernel { page: first + u64::from(placed), errno }))
    }

    /// Gives all but the first `pages` back.
    fn shorten(&mut self, pages: u32) {
        for page in self.run.first + u64::from(pages)..self.run.end() {
            self.engine.table.arrival_failed(page, None);
        }
        self.engine.budget.give_back(self.run.pages - pages);
        self.run.pages = pages;
    }

    /// Gives back what has not arrived, and tells those who wait for the first page why.
    fn failed(&mut self, error: PageError) -> PageError {
        for page in self.run.first + u64::from(self.done)..self.run.end() {
            let awaited = page == self.run.first;
            self.engine.table.arrival_failed(page, awaited.then(|| Failure::of(error)));
        }
        self.engine.budget.give_back(self.run.pages - self.done);
        self.run.pages = self.done;
        error
    }

    /// The claim goes to another thread.
    fn keep(mut self) {
        self.done = self.run.pages;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.done < self.run.pages {
            self.shorten(self.done);
        }
    }
}

impl Failure {
    fn error(self, page: u64) -> PageError {
        match self {
            Failure::Lost => PageError::Lost { page },
            Failure::Unreachable => PageError::Unreachable { page },
            // The number itself is with the thread that failed; these are what it most likely was.
            Failure::Spill => PageError::Spill { page, errno: libc::EIO },
            Failure::Kernel => PageError::Kernel { page, errno: libc::ENOMEM },
        }
    }
}

/// Pages that a fault pushes out by itself when the pager is late.
const HANDLER_EVICTS: usize = 32;

/// How often a fault tries again that finds no place left, a tenth of a second after the other.
const HANDLER_HOPES: u32 = 20;
