//! Memory larger than what is here: pages are fetched when they are touched, and pushed out by age.
//!
//! The way in is [`PagedRegion`]. Its pages are kept by a [`PageStore`].
//!
//! A fault costs no change of threads: userfaultfd raises SIGBUS in the thread that touches a page that is away, and the
//! handler fetches the page and puts it in place. Pages come in protected, so that their first write faults as well; a page
//! that was not written since it came is given up without being stored again.

#![deny(unsafe_code)]

mod age;
mod engine;
#[allow(unsafe_code)]
mod fault;
mod pager;
mod requests;
mod spill;
mod store;
mod streams;
#[allow(unsafe_code)]
mod sys;
mod table;

pub use fault::EXIT_PAGE_LOST;
pub use store::{MemoryStore, PAGE_BYTES, PageError, PageRun, PageStore, StoreError};

use age::{AgeQueue, Budget};
use engine::{Access, Bringer, Counters, Engine, count};
use fault::Registered;
use highwire_mem::Process;
use pager::PagerBell;
use requests::Requests;
use spill::Spill;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use streams::Streams;
use sys::{Mapping, Staging, Zeros};
use table::{Home, Phase, Table, Word};

/// How a region is paged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagingOptions {
    /// Bytes of pages that are here at most, as long as the store takes the others. At least [`BUDGET_BYTES_MIN`].
    pub budget_bytes: u64,
    /// Bytes that may be here when the store is full and nothing spills. Less than the budget counts as the budget.
    pub limit_bytes: u64,
    /// Whether to bring pages ahead of need when they are touched in order.
    pub prefetch: bool,
    /// A directory for a file that takes pages when the store is full.
    pub spill: Option<PathBuf>,
    /// Threads that fetch what cannot be fetched without blocking: so many such faults are answered at once.
    pub fetch_threads: usize,
}

impl PagingOptions {
    /// A budget, and the limit twice as large; with prefetch, without spilling, with two fetching threads.
    pub fn new(budget_bytes: u64) -> PagingOptions {
        PagingOptions {
            budget_bytes,
            limit_bytes: budget_bytes.saturating_mul(2),
            prefetch: true,
            spill: None,
            fetch_threads: 2,
        }
    }
}

/// The smallest budget: with fewer pages the instructions of a few threads push each other's pages out before using them.
pub const BUDGET_BYTES_MIN: u64 = 64 * PAGE_BYTES as u64;

/// Why a region cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PagingError {
    /// The kernel was built without it.
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD); paging needs it")]
    NoUserfaultfd,
    /// The kernel is too old.
    #[error("this kernel lacks {missing}: paging needs Linux {}.{} or later; please update the kernel", least.0, least.1)]
    KernelTooOld {
        /// What it does not have.
        missing: &'static str,
        /// The version needed.
        least: (u32, u32),
    },
    /// The kernel or a sandbox refuses it.
    #[error(
        "userfaultfd is refused: {}; no privilege is needed for it (nor /proc/sys/vm/unprivileged_userfaultfd), so look at \
         the seccomp profile of the container or service",
        std::io::Error::from_raw_os_error(*errno)
    )]
    FaultsRefused {
        /// The kernel's error number.
        errno: i32,
    },
    /// No address space.
    #[error(
        "cannot map {bytes} bytes: {}; look at the limit of address space (ulimit -v), at vm.max_map_count and at \
         vm.overcommit_memory",
        std::io::Error::from_raw_os_error(*errno)
    )]
    Mapping {
        /// The size of the region.
        bytes: u64,
        /// The kernel's error number.
        errno: i32,
    },
    /// Pages of another size than the store's.
    #[error("this kernel has pages of {page_bytes} bytes: paging is made for pages of {PAGE_BYTES}")]
    PageSize {
        /// Bytes of a page.
        page_bytes: usize,
    },
    /// A size that cannot be.
    #[error("a region has between 1 byte and 16 TiB, not {bytes} bytes")]
    Size {
        /// The size asked for.
        bytes: u64,
    },
    /// A budget that is too small.
    #[error("a budget of {budget_bytes} bytes is too small: at least {BUDGET_BYTES_MIN} are needed")]
    Budget {
        /// The budget asked for.
        budget_bytes: u64,
    },
    /// The spill file cannot be made.
    #[error("no spill file in {}: {}", directory.display(), std::io::Error::from_raw_os_error(*errno))]
    Spill {
        /// Where.
        directory: PathBuf,
        /// The kernel's error number.
        errno: i32,
    },
    /// No thread.
    #[error("cannot start a thread for paging: {}; look at the limit of processes (ulimit -u)", std::io::Error::from_raw_os_error(*errno))]
    Thread {
        /// The kernel's error number.
        errno: i32,
    },
    /// Too many.
    #[error("a process has at most {} paged regions", fault::REGIONS_MAX)]
    TooMany,
}

/// What a region has done so far, and what it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagingStats {
    /// Signals: raw accesses to pages that were away, or first writes to pages that were protected.
    pub faults: u64,
    /// Pages that came from the store into the region.
    pub fetched: u64,
    /// Pages that were brought before anybody touched them.
    pub prefetched: u64,
    /// Those of them that a stream reached: an estimate, for touching a page that is here goes unnoticed.
    pub prefetch_hits: u64,
    /// Pages that were pushed out.
    pub evicted: u64,
    /// Pages that the store took.
    pub stored: u64,
    /// Pages that the spill file took.
    pub spilled: u64,
    /// Pages that `read_at` copied from the store to its caller without bringing them.
    pub read_directly: u64,
    /// How often a fault found no room and had to see to it itself.
    pub waited_for_room: u64,
    /// Bytes of pages that are here or on their way.
    pub resident_bytes: u64,
}

/// A range of memory larger than the part of it that is here.
///
/// [`read_at`](PagedRegion::read_at) and [`write_at`](PagedRegion::write_at) copy, and return an error for a page whose
/// content cannot be had. [`words`](PagedRegion::words) are the memory itself, and so is [`as_ptr`](PagedRegion::as_ptr).
/// Whoever uses the memory itself must know:
///
/// * An access to a page whose content cannot be had ends the process with a message on standard error and the exit code
///   [`EXIT_PAGE_LOST`]. It never returns wrong content.
/// * The kernel cannot bring pages: a system call that is given an address in the region fails with `EFAULT`, or does less
///   than it was asked for, if it reads a page that is away or writes one that was not written since it came. Nor does it
///   keep pages from leaving: what goes on using them after the call has returned (direct or asynchronous input and output)
///   uses memory that the region may have given up. Use [`hold`](PagedRegion::hold) for such calls, or `read_at` and
///   `write_at` around them.
/// * A thread that touches the region must not block SIGBUS. A program that installs a handler for SIGBUS after the first
///   region was made must pass on what it does not know.
/// * Handlers of other signals must not touch the region: they may have interrupted the one who is bringing that page.
/// * A forked child does not have the memory: touching it is a SIGSEGV, and the methods return an error.
/// * Nobody else may change the mapping by `madvise`, `mprotect` or the like. A process that locks its memory (`mlockall`)
///   does not lock this: the region unlocks it, or no page could leave.
/// * A fault runs on the stack of the thread, and takes some 8 KiB of it besides what the store's `fetch_now` takes.
/// * The memory allocator of the program must not keep its own records there: the region's threads allocate.
///
/// Pages that were never written read as zeros, and the store is never asked for them.
///
/// ```
/// use highwire_netmem::{MemoryStore, PagedRegion, PagingOptions};
///
/// # if cfg!(miri) { return }
/// let store = std::sync::Arc::new(MemoryStore::new(64 << 20));
/// let region = PagedRegion::create(64 << 20, PagingOptions::new(1 << 20), store).unwrap();
/// region.write_at(40 << 20, b"beyond the budget").unwrap();
/// let mut back = [0; 17];
/// region.read_at(40 << 20, &mut back).unwrap();
/// assert_eq!(&back, b"beyond the budget");
/// ```
pub struct PagedRegion {
    engine: Arc<Engine>,
    bytes: u64,
    /// None once it is being dropped.
    registered: Option<Registered>,
    threads: Vec<JoinHandle<()>>,
}

impl PagedRegion {
    /// A region of zeros. `bytes` is rounded up to whole pages for the memory itself.
    pub fn create(bytes: u64, options: PagingOptions, store: Arc<dyn PageStore>) -> Result<PagedRegion, PagingError> {
        check_page_size(rustix::param::page_size())?;
        let page_bytes = PAGE_BYTES as u64;
        if bytes == 0 || bytes > BYTES_MAX {
            return Err(PagingError::Size { bytes });
        }
        if options.budget_bytes < BUDGET_BYTES_MIN {
            return Err(PagingError::Budget { budget_bytes: options.budget_bytes });
        }
        let pages = bytes.div_ceil(page_bytes);
        // More than the whole region is never here.
        let budget = (options.budget_bytes / page_bytes).min(pages.max(BUDGET_BYTES_MIN / page_bytes));
        let limit = (options.limit_bytes / page_bytes).min(pages).max(budget);
        // Half a budget brought at once would push out what was just brought.
        let window = if options.prefetch { (1 << (budget / 8).ilog2()).min(WINDOW_PAGES_MAX) } else { 1 };
        let staged_bytes = window as usize * PAGE_BYTES;
        let no_memory = PagingError::Mapping { bytes: staged_bytes as u64, errno: libc::ENOMEM };
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let engine = Arc::new(Engine {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            process: Process::current(),
            mapping: Mapping::create((pages * page_bytes) as usize)?,
            table: Table::new(pages),
            ages: AgeQueue::new(limit),
            budget: Budget::new(budget, limit),
            arrivals: Streams::new(window),
            openings: Streams::new(window),
            staging: Staging::create(staged_bytes).ok_or(no_memory.clone())?,
            zeros: Zeros::create(staged_bytes).ok_or(no_memory)?,
            requests: Requests::new(),
            bell: PagerBell::default(),
            store,
            spill: options.spill.as_deref().map(Spill::create).transpose()?,
            counters: Counters::default(),
        });
        let registered = Registered::new(engine.clone()).ok_or(PagingError::TooMany)?;
        let mut region = PagedRegion { engine, bytes, registered: Some(registered), threads: Vec::new() };
        region.start("pager", Engine::keep_room)?;
        for _ in 0..options.fetch_threads.max(1) {
            region.start("page-fetch", Engine::serve_requests)?;
        }
        Ok(region)
    }

    fn start(&mut self, name: &str, work: fn(&Engine)) -> Result<(), PagingError> {
        let engine = self.engine.clone();
        let run = move || {
            sys::block_signals();
            // Threads that fault wait for this one: without it they would wait for ever.
            let _end = EndsProcess;
            work(&engine);
        };
        let thread = std::thread::Builder::new().name(name.into()).spawn(run);
        let errno = |error: std::io::Error| PagingError::Thread { errno: error.raw_os_error().unwrap_or(libc::EAGAIN) };
        self.threads.push(thread.map_err(errno)?);
        Ok(())
    }

    /// Bytes of the region.
    pub fn len(&self) -> u64 {
        self.bytes
    }

    /// False: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The memory itself. It is valid as long as the region; see there for the rules.
    pub fn as_ptr(&self) -> *mut u8 {
        self.engine.mapping.base()
    }

    /// The memory itself, as double words that any thread may read and write; up to the end of the last page. Words of one
    /// size are the only view of it: what atomic accesses of different sizes do to one place at the same time is not
    /// defined. Bytes are copied, by [`read_at`](PagedRegion::read_at) and [`write_at`](PagedRegion::write_at), which may
    /// meet accesses to words.
    ///
    /// ```compile_fail,E0599
    /// fn at_the_same_time(region: &highwire_netmem::PagedRegion) {
    ///     let _ = (region.words()[0].as_ptr(), region.bytes()[0].as_ptr());
    /// }
    /// ```
    pub fn words(&self) -> &[AtomicU64] {
        self.engine.mapping.atomic_words()
    }

    /// Copies bytes out. Large pieces that are away are copied straight from the store, and stay away; so are small ones the
    /// first time, if the store has them at hand.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<(), PageError> {
        self.check(offset, into.len())?;
        if fault::is_paged(into) {
            return self.read_into_paged(offset, into);
        }
        let (mut at, mut into) = (offset, into);
        while !into.is_empty() {
            let (page, inside) = (at / PAGE_BYTES as u64, at as usize % PAGE_BYTES);
            if inside == 0 && into.len() >= DIRECT_PAGES_MIN * PAGE_BYTES {
                let direct = self.read_directly(page, into)?;
                if direct > 0 {
                    (at, into) = (at + direct as u64, &mut into[direct..]);
                    continue;
                }
            }
            let (now, later) = into.split_at_mut((PAGE_BYTES - inside).min(into.len()));
            if !self.read_away(page, inside, now) {
                self.read_here(at, now)?;
            }
            (at, into) = (at + now.len() as u64, later);
        }
        Ok(())
    }

    /// Copies bytes in. Whole pages that are away are not fetched before.
    pub fn write_at(&self, offset: u64, from: &[u8]) -> Result<(), PageError> {
        self.check(offset, from.len())?;
        if fault::is_paged(from) {
            return self.write_from_paged(offset, from);
        }
        let (mut at, mut from) = (offset, from);
        while !from.is_empty() {
            let (page, inside) = (at / PAGE_BYTES as u64, at as usize % PAGE_BYTES);
            if inside == 0 && from.len() >= PAGE_BYTES && self.engine.table.load(page).phase() == Phase::Away {
                let placed = self.place(page, from)?;
                (at, from) = (at + placed as u64, &from[placed..]);
                continue;
            }
            let (now, later) = from.split_at((PAGE_BYTES - inside).min(from.len()));
            let pinned = self.pin(page, Access::Write)?;
            // A flush may protect the page again right now; the copy then faults like any raw write.
            self.engine.mapping.copy_in(at as usize, now);
            drop(pinned);
            (at, from) = (at + now.len() as u64, later);
        }
        Ok(())
    }

    /// Brings a range of the memory and keeps it here, so that using it neither faults nor ends the process, and the kernel can
    /// use it too: for system calls, and wherever an error is better than an end. At most half of the budget; all that is
    /// held at once should be less.
    pub fn hold(&self, offset: u64, bytes: usize, how: Hold) -> Result<Held<'_>, PageError> {
        self.check(offset, bytes)?;
        let (first, end) = (offset / PAGE_BYTES as u64, (offset + bytes as u64).div_ceil(PAGE_BYTES as u64));
        let mut held = Held { region: self, offset, bytes, first, end: first };
        let (resident, most) = (self.engine.budget.used(), self.engine.budget.pages() / 2);
        if bytes > 0 && end - first > most {
            let (resident_bytes, limit_bytes) = (resident * PAGE_BYTES as u64, most * PAGE_BYTES as u64);
            return Err(PageError::NoRoom { resident_bytes, limit_bytes });
        }
        let access = if how == Hold::Read { Access::Read } else { Access::Write };
        while bytes > 0 && held.end < end {
            std::mem::forget(self.pin(held.end, access)?);
            held.end += 1;
        }
        Ok(held)
    }

    /// Copies what is only here to the store (or, as far as that is full, to the spill file). Everything written before the
    /// call is kept when it returns.
    pub fn flush(&self) -> Result<(), PageError> {
        self.check(0, 0)?;
        self.engine.flush()
    }

    /// What it has done so far.
    pub fn stats(&self) -> PagingStats {
        let counters = &self.engine.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PagingStats {
            faults: of(&counters.faults),
            fetched: of(&counters.fetched),
            prefetched: of(&counters.prefetched),
            prefetch_hits: of(&counters.prefetch_hits),
            evicted: of(&counters.evicted),
            stored: of(&counters.stored),
            spilled: of(&counters.spilled),
            read_directly: of(&counters.read_directly),
            waited_for_room: of(&counters.waited_for_room),
            resident_bytes: self.engine.budget.used() * PAGE_BYTES as u64,
        }
    }

    fn check(&self, offset: u64, bytes: usize) -> Result<(), PageError> {
        if !self.engine.process.is_this() {
            return Err(PageError::OtherProcess);
        }
        let inside = offset.checked_add(bytes as u64).is_some_and(|end| end <= self.bytes);
        let outside = PageError::Outside { offset, bytes: bytes as u64, region_bytes: self.bytes };
        if inside { Ok(()) } else { Err(outside) }
    }

    /// Copies pages that are away, from their home to the caller, and says how many bytes. Nothing is claimed: what turns out
    /// to have changed meanwhile is not counted, and read again.
    fn read_directly(&self, first: u64, into: &mut [u8]) -> Result<usize, PageError> {
        let engine = &self.engine;
        let home = engine.table.load(first).home();
        let mut seen = [None::<Word>; WINDOW_PAGES_MAX as usize];
        let most = (into.len() / PAGE_BYTES).min(seen.len());
        // Up to the last that is away; how many of them are, and how many were here since.
        let (mut pages, mut away, mut here) = (0, 0, 0);
        for (at, (seen, page)) in seen[..most].iter_mut().zip(first..).enumerate() {
            let word = engine.table.load(page);
            match word.phase() {
                _ if word.home() != home => break,
                Phase::Away => (pages, away, here) = (at + 1, away + 1, 0),
                // A few that are here do not make several reads of one.
                Phase::Clean if home == Home::Store && here < BRIDGED_PAGES_MAX => here += 1,
                _ => break,
            }
            *seen = Some(word);
        }
        if away < DIRECT_PAGES_MIN {
            return Ok(0);
        }
        let (seen, into) = (&mut seen[..pages], &mut into[..pages * PAGE_BYTES]);
        match (home, &engine.spill) {
            (Home::Zeros, _) => into.fill(0),
            // What a store at hand has of those that are here is copied faster with the others than apart from them.
            (Home::Store, _) if engine.store.fetch_now(first, into) => {}
            (Home::Store, _) => {
                let is_away = |page: u64| seen[(page - first) as usize].is_some_and(|word| word.phase() == Phase::Away);
                let each = (first..).zip(into.chunks_mut(PAGE_BYTES));
                let (mut away, here): (Vec<_>, Vec<_>) = each.partition(|(page, _)| is_away(*page));
                // First, while they are here: asking takes long.
                for (page, into) in here {
                    self.read_here(page * PAGE_BYTES as u64, into)?;
                    seen[(page - first) as usize] = None;
                }
                engine.store.fetch_each(&mut away)?;
            }
            (Home::Spill, Some(spill)) => spill.read(first, into)?,
            (Home::Spill, None) => unreachable!("a page spilled, so there is a file"),
        }
        // What its home has is the page's content if it had it before, and nobody replaced it since.
        let same = |seen: &Option<Word>, page| {
            seen.is_none_or(|word| engine.table.load(page).generation() == word.generation())
        };
        let unchanged = seen.iter().zip(first..).take_while(|(seen, page)| same(seen, *page)).count();
        count(&engine.counters.read_directly, seen[..unchanged].iter().flatten().count() as u64);
        Ok(unchanged * PAGE_BYTES)
    }

    /// Reads a part of a page in memory of this process, where it is brought if it is away.
    fn read_here(&self, at: u64, into: &mut [u8]) -> Result<(), PageError> {
        let _pinned = self.pin(at / PAGE_BYTES as u64, Access::Read)?;
        self.engine.mapping.copy_out(at as usize, into);
        Ok(())
    }

    /// Reads a part of a page that is away, where that is cheap: a page is brought when it is wanted the second time, for
    /// bringing it costs more than copying it. False: it is to be brought.
    fn read_away(&self, page: u64, inside: usize, into: &mut [u8]) -> bool {
        let engine = &self.engine;
        let word = engine.table.load(page);
        if word.phase() != Phase::Away {
            return false;
        }
        match word.home() {
            Home::Zeros => into.fill(0),
            Home::Store if !engine.table.is_recent(word, engine.epoch()) => {
                if into.len() == PAGE_BYTES {
                    if !engine.store.fetch_now(page, into) {
                        return false;
                    }
                } else {
                    let mut staged = engine.staging.take(PAGE_BYTES);
                    if !engine.store.fetch_now(page, &mut staged) {
                        return false;
                    }
                    into.copy_from_slice(&staged[inside..][..into.len()]);
                }
                engine.table.read_away(page, engine.epoch());
            }
            Home::Store | Home::Spill => return false,
        }
        let unchanged = engine.table.load(page).generation() == word.generation();
        count(&engine.counters.read_directly, u64::from(unchanged));
        unchanged
    }

    /// Puts whole pages in place that are away, without asking for what they were.
    fn place(&self, page: u64, from: &[u8]) -> Result<usize, PageError> {
        let most = (from.len() / PAGE_BYTES).min(WINDOW_PAGES_MAX as usize);
        let Some(mut claim) = self.engine.claim(page, most as u32, Bringer::Caller)? else {
            return Ok(0);
        };
        let bytes = claim.run().bytes();
        claim.place(&from[..bytes], true, true)?;
        Ok(claim.run().bytes())
    }

    /// Keeps a page here for a moment.
    fn pin(&self, page: u64, access: Access) -> Result<Pinned<'_>, PageError> {
        loop {
            match self.engine.table.pin(page) {
                Ok(word) => {
                    let pinned = Pinned { engine: &self.engine, page };
                    if access == Access::Write && word.phase() == Phase::Clean {
                        self.engine.bring(page, access, Bringer::Caller)?;
                    }
                    return Ok(pinned);
                }
                // As many threads as a word counts have it; they copy, and are done.
                Err(word) if word.is_resident() => sys::yield_now(),
                Err(_) => self.engine.bring(page, access, Bringer::Caller)?,
            }
        }
    }

    /// The store must not write into paged memory: it may hold a lock that the fault needs.
    fn read_into_paged(&self, offset: u64, into: &mut [u8]) -> Result<(), PageError> {
        let mut buffer = vec![0; into.len().min(BOUNCE_BYTES)];
        for (piece, at) in into.chunks_mut(BOUNCE_BYTES).zip((offset..).step_by(BOUNCE_BYTES)) {
            let buffer = &mut buffer[..piece.len()];
            self.read_at(at, buffer)?;
            piece.copy_from_slice(buffer);
        }
        Ok(())
    }

    /// The kernel cannot read from paged memory.
    fn write_from_paged(&self, offset: u64, from: &[u8]) -> Result<(), PageError> {
        let mut buffer = Vec::with_capacity(from.len().min(BOUNCE_BYTES));
        for (piece, at) in from.chunks(BOUNCE_BYTES).zip((offset..).step_by(BOUNCE_BYTES)) {
            buffer.clear();
            buffer.extend_from_slice(piece);
            self.write_at(at, &buffer)?;
        }
        Ok(())
    }
}

impl Drop for PagedRegion {
    fn drop(&mut self) {
        if !self.engine.process.is_this() {
            // In a forked child there are neither the threads nor the memory, and what is at its address now may belong to
            // somebody else.
            std::mem::forget(self.registered.take());
            std::mem::take(&mut self.threads).into_iter().for_each(std::mem::forget);
            return;
        }
        self.registered = None;
        self.engine.bell.close();
        self.engine.requests.close();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for PagedRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PagedRegion({} bytes, {:?})", self.bytes, self.stats())
    }
}

/// What a range is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// To be read. A write, by the thread or by the kernel, may still fault.
    Read,
    /// To be read and written. All of it counts as written, whether it is or not.
    Write,
}

/// A range of a region that stays here as long as this value lives.
#[derive(Debug)]
pub struct Held<'a> {
    region: &'a PagedRegion,
    offset: u64,
    bytes: usize,
    /// The pages that are pinned.
    first: u64,
    end: u64,
}

impl Held<'_> {
    /// The memory: every double word that has a byte of the range. See [`PagedRegion::words`].
    pub fn words(&self) -> &[AtomicU64] {
        const WORD: usize = size_of::<AtomicU64>();
        let begin = self.offset as usize;
        match self.bytes {
            0 => &[],
            // Whole pages are held, and no word is in two of them.
            bytes => &self.region.words()[begin / WORD..(begin + bytes).div_ceil(WORD)],
        }
    }

    /// Its address, for system calls.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr().wrapping_add(self.offset as usize)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        (self.first..self.end).for_each(|page| self.region.engine.table.unpin(page));
    }
}

/// Pages go and come one by one, which the kernel does for whole pages of its own only.
fn check_page_size(page_bytes: usize) -> Result<(), PagingError> {
    if page_bytes == PAGE_BYTES { Ok(()) } else { Err(PagingError::PageSize { page_bytes }) }
}

/// A page that cannot leave.
struct Pinned<'a> {
    engine: &'a Engine,
    page: u64,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.engine.table.unpin(self.page);
    }
}

/// A thread of a region that panics takes the process with it.
struct EndsProcess;

impl Drop for EndsProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "highwire: a thread of a paged region failed, and whoever waits for its pages would wait for ever"
            );
            std::process::abort();
        }
    }
}

/// A page's number fits the queue's words.
const BYTES_MAX: u64 = 1 << 44;

/// Pages that are brought at once: 1 MiB.
const WINDOW_PAGES_MAX: u32 = 256;

/// Pieces of fewer pages than this are worth bringing; larger ones go straight to the caller.
const DIRECT_PAGES_MIN: usize = 8;
/// Pages in a row that are here and are read at their home all the same, between others.
const BRIDGED_PAGES_MAX: usize = 8;

const BOUNCE_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_with_pages_of_another_size_is_refused_by_name() {
        assert_eq!(check_page_size(4096), Ok(()));
        let refused = check_page_size(65_536).unwrap_err().to_string();
        assert!(refused.contains("65536") && refused.contains("4096"), "{refused}");
    }
}
