//! Where pages are kept that are not here.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::time::Duration;

pub use crate::donation::PAGE_BYTES;

/// Consecutive pages and their content.
#[derive(Clone, Copy, Debug)]
pub struct PageRun<'a> {
    /// The number of the first page.
    pub first: u64,
    /// The content, a multiple of [`PAGE_BYTES`].
    pub content: &'a [u8],
}

/// Keeps the pages of one region that do not fit into its local budget.
///
/// A page is never stored by two threads at once, and a page that was never stored is never asked for. The same page may be
/// fetched by several threads at once, also while it is stored anew: such a fetch may give the old content, the new, or a
/// mixture, and the region asks again.
pub trait PageStore: Send + Sync + 'static {
    /// Reads pages, each to its own [`PAGE_BYTES`]: they need not follow one another, and a store across a network asks for
    /// all of them together. May block. With an error, whatever was read is not used.
    fn fetch_each(&self, pages: &mut [(u64, &mut [u8])]) -> Result<(), PageError>;

    /// The same for the pages from `first` on, as many as fit `into`, which is a multiple of [`PAGE_BYTES`].
    fn fetch(&self, first: u64, into: &mut [u8]) -> Result<(), PageError> {
        self.fetch_each(&mut (first..).zip(into.chunks_mut(PAGE_BYTES)).collect::<Vec<_>>())
    }

    /// The same without blocking, allocating or waiting for a lock, or false: then [`fetch`](PageStore::fetch) is asked.
    ///
    /// It is called in a signal handler: of a thread that may be in the middle of anything, except of code of this store.
    /// It must not touch a paged region.
    fn fetch_now(&self, first: u64, into: &mut [u8]) -> bool;

    /// Keeps pages: many runs at once, so that a store across a network has them all on their way together. May block.
    fn store(&self, runs: &[PageRun<'_>]) -> Result<(), StoreError>;
}

/// Pages that a store did not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} (after {kept_pages} pages)")]
pub struct StoreError {
    /// The pages that it took, counted from the first of the first run.
    pub kept_pages: usize,
    /// Why it took no more: [`PageError::Full`], or whatever keeps it from storing.
    pub reason: PageError,
}

/// Why the content of a page cannot be had, or cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// Nobody has the page any more.
    #[error("page {page} is lost: the node that kept it is gone, or has given it up; restore the data from its origin")]
    Lost {
        /// The page.
        page: u64,
    },
    /// The page may still be there, but its store does not answer.
    #[error("page {page} cannot be reached: its store does not answer; try again when the network is back")]
    Unreachable {
        /// The page.
        page: u64,
    },
    /// The store has no room.
    #[error("{pages} pages have no room in the store; add nodes or memory to it, or give the region a spill directory")]
    Full {
        /// The pages without a place.
        pages: u64,
    },
    /// The spill file cannot be read or written.
    #[error("page {page} in the spill file: {}", std::io::Error::from_raw_os_error(*errno))]
    Spill {
        /// The page.
        page: u64,
        /// The kernel's error number.
        errno: i32,
    },
    /// Neither the store nor a spill file takes another page, and the local limit is reached.
    #[error(
        "no place for another page: {resident_bytes} bytes are here, the limit is {limit_bytes}, and the store is full; \
         raise the limit, add memory to the store or give the region a spill directory with room"
    )]
    NoRoom {
        /// Bytes of pages that are here.
        resident_bytes: u64,
        /// How many may be.
        limit_bytes: u64,
    },
    /// The kernel did not take or protect a page.
    #[error("the kernel refuses page {page}: {} (is a memory limit of the process or its group reached?)", std::io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// The page.
        page: u64,
        /// The kernel's error number.
        errno: i32,
    },
    /// The range is not one of the region.
    #[error("offset {offset} + {bytes} is outside the region of {region_bytes} bytes")]
    Outside {
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
        /// The size of the region.
        region_bytes: u64,
    },
    /// The region belongs to the process that made it, and this is a child of that.
    #[error("the region belongs to the process that made it; a forked child makes its own")]
    OtherProcess,
}

/// A store in the memory of this process, with switches for what can go wrong: for tests and for measuring.
#[derive(Debug)]
pub struct MemoryStore {
    chunks: Box<[RwLock<Chunk>]>,
    stored: AtomicU64,
    capacity: AtomicU64,
    some_lost: AtomicBool,
    lost: Mutex<BTreeSet<u64>>,
    blocking: AtomicBool,
    delay_ns: AtomicU64,
    fetches: AtomicU64,
}

#[derive(Debug, Default)]
struct Chunk {
    content: Vec<u8>,
    /// A bit for each page that was stored.
    stored: [u64; CHUNK_PAGES / 64],
}

const CHUNK_PAGES: usize = 256;

impl MemoryStore {
    /// For a region of so many bytes, with room for all of it.
    pub fn new(bytes: u64) -> MemoryStore {
        let chunks = bytes.div_ceil((CHUNK_PAGES * PAGE_BYTES) as u64);
        MemoryStore {
            chunks: (0..chunks).map(|_| RwLock::default()).collect(),
            stored: AtomicU64::new(0),
            capacity: AtomicU64::new(u64::MAX),
            some_lost: AtomicBool::new(false),
            lost: Mutex::default(),
            blocking: AtomicBool::new(false),
            delay_ns: AtomicU64::new(0),
            fetches: AtomicU64::new(0),
        }
    }

    /// From now on there is room for so many pages in all.
    pub fn set_capacity(&self, pages: u64) {
        self.capacity.store(pages, Ordering::Relaxed);
    }

    /// Loses a page.
    pub fn lose(&self, page: u64) {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).insert(page);
        self.some_lost.store(true, Ordering::Release);
    }

    /// From now on nothing is had without blocking, and everything takes so long.
    pub fn set_slow(&self, delay: Duration) {
        self.delay_ns.store(delay.as_nanos() as u64, Ordering::Relaxed);
        self.blocking.store(true, Ordering::Relaxed);
    }

    /// The pages that it has.
    pub fn stored_pages(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    /// How often it was asked for pages.
    pub fn fetches(&self) -> u64 {
        self.fetches.load(Ordering::Relaxed)
    }

    fn pause(&self) {
        let delay = self.delay_ns.load(Ordering::Relaxed);
        if delay > 0 {
            std::thread::sleep(Duration::from_nanos(delay));
        }
    }

    /// Copies what is there, chunk by chunk; stops at the first page that is not, or that `lock` does not give.
    fn copy<'a, L>(&'a self, first: u64, into: &mut [u8], lock: L) -> Result<(), Option<u64>>
    where
        L: Fn(&'a RwLock<Chunk>) -> Option<RwLockReadGuard<'a, Chunk>>,
    {
        let (mut page, mut into) = (first, into);
        while !into.is_empty() {
            let (chunk, inside) = ((page / CHUNK_PAGES as u64) as usize, page as usize % CHUNK_PAGES);
            let pages = (CHUNK_PAGES - inside).min(into.len() / PAGE_BYTES);
            let chunk = lock(&self.chunks[chunk]).ok_or(None)?;
            if let Some(missing) = (inside..inside + pages).find(|page| chunk.stored[page / 64] >> (page % 64) & 1 == 0)
            {
                return Err(Some(page + (missing - inside) as u64));
            }
            let (now, later) = into.split_at_mut(pages * PAGE_BYTES);
            now.copy_from_slice(&chunk.content[inside * PAGE_BYTES..][..pages * PAGE_BYTES]);
            (page, into) = (page + pages as u64, later);
        }
        Ok(())
    }
}

impl PageStore for MemoryStore {
    fn fetch_each(&self, pages: &mut [(u64, &mut [u8])]) -> Result<(), PageError> {
        self.pause();
        self.fetches.fetch_add(1, Ordering::Relaxed);
        let lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((page, _)) = pages.iter().find(|(page, _)| lost.contains(page)) {
            return Err(PageError::Lost { page: *page });
        }
        drop(lost);
        let lock = |chunk| Some(RwLock::read(chunk).unwrap_or_else(PoisonError::into_inner));
        let mut each = pages.iter_mut();
        each.try_for_each(|(page, into)| self.copy(*page, into, lock).map_err(|_| PageError::Lost { page: *page }))
    }

    fn fetch_now(&self, first: u64, into: &mut [u8]) -> bool {
        let try_lock = |chunk| match RwLock::try_read(chunk) {
            Ok(chunk) => Some(chunk),
            Err(TryLockError::Poisoned(chunk)) => Some(chunk.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        self.fetches.fetch_add(1, Ordering::Relaxed);
        !self.blocking.load(Ordering::Relaxed)
            && !self.some_lost.load(Ordering::Acquire)
            && self.copy(first, into, try_lock).is_ok()
    }

    fn store(&self, runs: &[PageRun<'_>]) -> Result<(), StoreError> {
        self.pause();
        let mut kept_pages = 0;
        let all: usize = runs.iter().map(|run| run.content.len() / PAGE_BYTES).sum();
        for run in runs {
            for (index, content) in run.content.chunks_exact(PAGE_BYTES).enumerate() {
                let page = run.first + index as u64;
                let (chunk, inside) = ((page / CHUNK_PAGES as u64) as usize, page as usize % CHUNK_PAGES);
                let mut chunk = self.chunks[chunk].write().unwrap_or_else(PoisonError::into_inner);
                if chunk.stored[inside / 64] >> (inside % 64) & 1 == 0 {
                    let take = |stored| (stored < self.capacity.load(Ordering::Relaxed)).then_some(stored + 1);
                    if self.stored.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
                        let pages = (all - kept_pages) as u64;
                        return Err(StoreError { kept_pages, reason: PageError::Full { pages } });
                    }
                    chunk.stored[inside / 64] |= 1 << (inside % 64);
                }
                if chunk.content.is_empty() {
                    chunk.content = vec![0; CHUNK_PAGES * PAGE_BYTES];
                }
                chunk.content[inside * PAGE_BYTES..][..PAGE_BYTES].copy_from_slice(content);
                kept_pages += 1;
                if self.some_lost.load(Ordering::Relaxed) {
                    // Stored anew, it is there again.
                    self.lost.lock().unwrap_or_else(PoisonError::into_inner).remove(&page);
                }
            }
        }
        Ok(())
    }
}
