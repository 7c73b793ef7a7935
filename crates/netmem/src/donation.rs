//! Donated memory: pages that one node writes and every process of its host can read without asking.
//!
//! One region: a header, a table with a word for each page, the pages. [`Donation`] is the node's side, [`View`] a
//! reader's. `docs/protocol/netmem.md` describes every byte.
//!
//! ```text
//!            take                      write: busy, copy, next version
//!   free ───────────▶ in use ───────────────────────┐
//!    ▲                 │  ▲                         │
//!    │ free:           │  └─────────────────────────┘
//!    │ next generation │
//!    └─────────────────┘   regenerate: next generation, same content
//! ```
//!
//! # Why no torn page passes the check
//!
//! The writer stores the word with its busy bit (W1), fences with release (W2), copies the bytes in (W3), and stores
//! the next version with release (W4). The reader loads the word with acquire (R1), copies the bytes out (R2), fences
//! with acquire (R3), and loads the word again (R4). It has the bytes of one version if R1 and R4 saw the same word
//! without the busy bit:
//!
//! * R1 acquires W4 of that version, or something later in the word's order: every byte of the version is visible to R2.
//! * Had R2 seen a byte of a later write, then R3 would acquire W2 of that write, which comes after its W1: R4 would see
//!   W1 or what came after it, and no word returns, since versions and generations only grow.
//!
//! Versions are 31 bits: a reader would have to sleep between R1 and R4 while a page is written 2³¹ times, which takes
//! minutes at the speed of memory. Freeing and regenerating store a new generation with release, before anything is
//! written under it.
//!
//! # Why a reader of its own host needs the clock
//!
//! A node that lost its lease is replaced by others, whose content may be newer. It empties itself when it notices,
//! but a process that is stopped notices nothing. So the header says until when, on the boot clock that all processes
//! of a host have in common, its content may be relied on; a reader looks at the clock after it copied.

use crate::types::PageHandle;
use highwire_mem::{LentRegion, PeerMemory, RegionError};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{Ordering, fence};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Why memory could not be donated, or a page not taken.
#[derive(Debug, thiserror::Error)]
pub enum DonationError {
    /// The region could not be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// More or fewer pages than there can be.
    #[error("{asked} pages cannot be donated: 1 to {most} can")]
    Size {
        /// Pages asked for.
        asked: u64,
        /// The most that there can be.
        most: u32,
    },
    /// Every page is in use.
    #[error("all {pages} donated pages are in use; free some, or donate more memory")]
    Full {
        /// Pages donated.
        pages: u32,
    },
    /// The machine has no memory for a page that was donated.
    #[error(
        "the machine has no memory for {bytes} more bytes of {in_use} in use: {source}; donate less, or raise its limit"
    )]
    NoMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes that have memory.
        in_use: u64,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A handle names no page that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("page {} of generation {} is no longer in use", handle.index, handle.generation)]
pub struct NotInUse {
    /// The handle.
    pub handle: PageHandle,
}

/// Pages of a block, for which memory is taken and given back at once.
pub const BLOCK_PAGES: u32 = 32;

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// A bit for each page that is in use.
    used: u32,
    /// A bit for each page that can never be used again: its generations are spent.
    retired: u32,
    /// A bit for each page that may have something else than zeros in it.
    dirty: u32,
    populated: bool,
}

/// The node's side: the memory that it donates.
#[derive(Debug)]
pub struct Donation {
    region: LentRegion,
    pages: u32,
    pages_at: usize,
    incarnation: u64,
    blocks: Vec<Block>,
    /// Blocks with memory and a free page; the lowest is used first, so that the highest become free as a whole.
    open: BTreeSet<u32>,
    /// Blocks without memory.
    bare: BTreeSet<u32>,
    in_use: u32,
    populated: u32,
    /// Pages that may have memory.
    populated_max: u32,
}

impl Donation {
    /// Donates `pages`, of which none has memory yet. The table does: 8 bytes for each page.
    pub fn create(pages: u64) -> Result<Donation, DonationError> {
        let size = DonationError::Size { asked: pages, most: PAGES_MAX };
        let Some(pages) = u32::try_from(pages).ok().filter(|pages| (1..=PAGES_MAX).contains(pages)) else {
            return Err(size);
        };
        let pages_at = pages_at(pages);
        let region = LentRegion::create(pages_at + pages as usize * PAGE_BYTES)?;
        region.populate(0, pages_at).map_err(|source| DonationError::NoMemory {
            bytes: pages_at,
            in_use: 0,
            source,
        })?;
        let memory = region.memory();
        memory.store32(LAYOUT_AT, LAYOUT);
        memory.store32(PAGE_BYTES_AT, PAGE_BYTES as u32);
        memory.store64(PAGES_AT, u64::from(pages));
        memory.store64(0, MAGIC);
        let blocks = pages.div_ceil(BLOCK_PAGES);
        let mut donation = Donation {
            region,
            pages,
            pages_at,
            incarnation: 0,
            blocks: vec![Block::default(); blocks as usize],
            open: BTreeSet::new(),
            bare: (0..blocks).collect(),
            in_use: 0,
            populated: 0,
            populated_max: pages,
        };
        // What the last block has no room for is never free.
        let beyond = blocks * BLOCK_PAGES - pages;
        if beyond > 0 {
            donation.blocks[blocks as usize - 1].retired = u32::MAX << (BLOCK_PAGES - beyond);
        }
        Ok(donation)
    }

    /// A descriptor for readers, and the bytes of the region.
    pub fn to_read(&self) -> io::Result<(OwnedFd, u64)> {
        Ok((self.region.to_read()?, self.region.memory().len() as u64))
    }

    /// Pages donated.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Pages in use.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Pages that are free.
    pub fn free_pages(&self) -> u32 {
        self.pages - self.in_use
    }

    /// Free pages that have memory or may get it.
    pub fn available_pages(&self) -> u32 {
        self.populated.max(self.populated_max).saturating_sub(self.in_use).min(self.free_pages())
    }

    /// Pages that have memory.
    pub fn populated(&self) -> u32 {
        self.populated
    }

    /// Lets no more pages than these have memory, besides those that have it already: what the machine can spare. The
    /// kernel fails an allocation that finds no memory, but a control group that reaches its limit has a process killed
    /// instead; whoever watches such a limit tells it here.
    pub fn limit_memory(&mut self, pages: u32) {
        self.populated_max = pages;
    }

    /// The incarnation in whose name pages are taken; 0 while there is none.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Frees everything and goes on under another incarnation (0: under none), valid until somebody says so.
    pub fn incarnate(&mut self, incarnation: u64) {
        // Before the pages are freed: they are no longer what others may rely on.
        self.region.memory().store64(VALID_UNTIL_AT, 0);
        for block in 0..self.blocks.len() as u32 {
            let mut used = self.blocks[block as usize].used;
            while used != 0 {
                let index = block * BLOCK_PAGES + used.trailing_zeros();
                used &= used - 1;
                let generation = (self.word(index) >> 32) as u32;
                let _ = self.free(PageHandle { incarnation: self.incarnation, index, generation });
            }
        }
        self.incarnation = incarnation;
        self.region.memory().store64(INCARNATION_AT, incarnation);
    }

    /// Until when, on the boot clock, readers may rely on what is in it.
    pub fn set_valid_until(&mut self, nanoseconds: u64) {
        self.region.memory().store64(VALID_UNTIL_AT, nanoseconds);
    }

    /// Takes a page that reads as zeros.
    pub fn take(&mut self) -> Result<PageHandle, DonationError> {
        let block = match self.open.first() {
            Some(block) => *block,
            None => self.populate()?,
        };
        let state = &mut self.blocks[block as usize];
        let bit = (!(state.used | state.retired)).trailing_zeros();
        assert!(bit < BLOCK_PAGES, "an open block has a free page");
        state.used |= 1 << bit;
        let dirty = state.dirty & 1 << bit != 0;
        state.dirty |= 1 << bit;
        if state.used | state.retired == u32::MAX {
            self.open.remove(&block);
        }
        self.in_use += 1;
        let index = block * BLOCK_PAGES + bit;
        let word = self.word(index);
        if dirty {
            // Under the generation that nobody has a handle of yet: no reader can take it for content.
            fence(Ordering::Release);
            self.region.memory().copy_in(self.place(index), &[0; PAGE_BYTES]);
        }
        Ok(PageHandle { incarnation: self.incarnation, index, generation: (word >> 32) as u32 })
    }

    /// Memory for the lowest block without.
    fn populate(&mut self) -> Result<u32, DonationError> {
        let Some(block) = self.bare.first().copied() else {
            return Err(DonationError::Full { pages: self.pages });
        };
        let (at, bytes) = self.extent(block);
        let pages = (bytes / PAGE_BYTES) as u32;
        let room = self.populated.saturating_add(pages) <= self.populated_max;
        let result = if room { self.region.populate(at, bytes) } else { Err(io::ErrorKind::OutOfMemory.into()) };
        if let Err(source) = result {
            // What was taken before it failed would otherwise stay.
            let _ = self.region.give_back(at, bytes);
            return Err(DonationError::NoMemory {
                bytes,
                in_use: u64::from(self.populated) * PAGE_BYTES as u64,
                source,
            });
        }
        self.bare.remove(&block);
        let state = &mut self.blocks[block as usize];
        state.populated = true;
        self.populated += pages;
        if state.used | state.retired != u32::MAX {
            self.open.insert(block);
            return Ok(block);
        }
        // Every page of it is retired; the next one.
        self.populate()
    }

    /// Writes into a page, and returns its version afterwards.
    pub fn write(&mut self, handle: PageHandle, at: usize, bytes: &[u8]) -> Result<u32, NotInUse> {
        let word = self.check(handle)?;
        assert!(at <= PAGE_BYTES && bytes.len() <= PAGE_BYTES - at, "{at} + {} is outside a page", bytes.len());
        let version = version_of(word).wrapping_add(1) & VERSION_MASK;
        let place = word_at(handle.index);
        let memory = self.region.memory();
        // W1
        memory.store64(place, word | BUSY);
        // W2: no byte of W3 is visible to anybody before W1 is. Pairs with R3.
        fence(Ordering::Release);
        // W3
        memory.copy_in(self.place(handle.index) + at, bytes);
        // W4: releases the bytes to R1.
        memory.store64(place, word_of(handle.generation, version));
        Ok(version)
    }

    /// The version of a page: how often it was written since it was taken.
    pub fn version(&self, handle: PageHandle) -> Result<u32, NotInUse> {
        Ok(version_of(self.check(handle)?))
    }

    /// Copies out of a page; nobody else writes it.
    pub fn read(&self, handle: PageHandle, at: usize, into: &mut [u8]) -> Result<(), NotInUse> {
        self.check(handle)?;
        assert!(at <= PAGE_BYTES && into.len() <= PAGE_BYTES - at, "{at} + {} is outside a page", into.len());
        self.region.memory().copy_out(self.place(handle.index) + at, into);
        Ok(())
    }

    /// Makes the page's content reachable by a new handle only.
    pub fn regenerate(&mut self, handle: PageHandle) -> Result<PageHandle, NotInUse> {
        let word = self.check(handle)?;
        let Some(generation) = handle.generation.checked_add(1) else {
            // Spent: nothing but the page itself could be taken for what it was.
            return Err(NotInUse { handle });
        };
        self.region.memory().store64(word_at(handle.index), word_of(generation, version_of(word)));
        Ok(PageHandle { generation, ..handle })
    }

    /// Frees a page. Its handle is good for nothing from now on.
    pub fn free(&mut self, handle: PageHandle) -> Result<(), NotInUse> {
        self.check(handle)?;
        let (block, bit) = (handle.index / BLOCK_PAGES, handle.index % BLOCK_PAGES);
        let generation = handle.generation.wrapping_add(1);
        self.region.memory().store64(word_at(handle.index), word_of(generation, 0));
        let state = &mut self.blocks[block as usize];
        state.used &= !(1 << bit);
        // A generation that came round again would make old handles good: such a page stays out of use.
        if generation == 0 {
            state.retired |= 1 << bit;
        } else {
            self.open.insert(block);
        }
        self.in_use -= 1;
        Ok(())
    }

    /// Gives the memory of free blocks back, but for the first `keep_blocks` of them. Returns the pages.
    pub fn give_back(&mut self, keep_blocks: usize) -> u32 {
        let idle = self.open.iter().copied().filter(|block| self.blocks[*block as usize].used == 0);
        let idle: Vec<u32> = idle.skip(keep_blocks).collect();
        let mut pages = 0;
        for block in idle {
            let (at, bytes) = self.extent(block);
            // Where it cannot be given back, it is used again later.
            if self.region.give_back(at, bytes).is_ok() {
                let state = &mut self.blocks[block as usize];
                (state.populated, state.dirty) = (false, 0);
                self.open.remove(&block);
                self.bare.insert(block);
                pages += (bytes / PAGE_BYTES) as u32;
            }
        }
        self.populated -= pages;
        pages
    }

    fn check(&self, handle: PageHandle) -> Result<u64, NotInUse> {
        let not = NotInUse { handle };
        if handle.index >= self.pages || handle.incarnation != self.incarnation {
            return Err(not);
        }
        let used = self.blocks[(handle.index / BLOCK_PAGES) as usize].used & 1 << (handle.index % BLOCK_PAGES) != 0;
        let word = self.word(handle.index);
        if used && (word >> 32) as u32 == handle.generation { Ok(word) } else { Err(not) }
    }

    fn word(&self, index: u32) -> u64 {
        self.region.memory().load64(word_at(index))
    }

    fn place(&self, index: u32) -> usize {
        self.pages_at + index as usize * PAGE_BYTES
    }

    /// Where a block's pages are.
    fn extent(&self, block: u32) -> (usize, usize) {
        let pages = BLOCK_PAGES.min(self.pages - block * BLOCK_PAGES);
        (self.place(block * BLOCK_PAGES), pages as usize * PAGE_BYTES)
    }
}

/// What a one-sided read came to. For all but `Done`, the bytes are worth nothing, and the node is to be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// The bytes are those of one version of the page.
    Done,
    /// The page was written in the meantime.
    Changed,
    /// The page is being written.
    Busy,
    /// The handle is good for nothing: the page was freed, or is of another incarnation, or never was.
    Freed,
    /// The node has not said for too long that it is still in charge.
    Lapsed,
}

/// The memory handed over is no donation that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotADonation {
    /// It begins with something else.
    #[error("the memory handed over does not begin with the header of donated memory, layout {LAYOUT}")]
    Header,
    /// Its pages are not where they must be.
    #[error("{pages} pages would need {needed} bytes, the memory handed over has {bytes}")]
    Size {
        /// Pages, as its header says.
        pages: u64,
        /// Bytes that these need.
        needed: u64,
        /// Bytes there are.
        bytes: u64,
    },
}

/// A reader's side: donated memory of another process, which may lie.
#[derive(Clone, Debug)]
pub struct View {
    memory: PeerMemory,
    pages: u32,
    pages_at: usize,
}

impl View {
    /// Looks at memory that a node handed over.
    pub fn new(memory: PeerMemory) -> Result<View, NotADonation> {
        let bytes = memory.len();
        let good = bytes >= HEADER_BYTES
            && memory.load64(0) == MAGIC
            && memory.load32(LAYOUT_AT) == LAYOUT
            && memory.load32(PAGE_BYTES_AT) == PAGE_BYTES as u32;
        if !good {
            return Err(NotADonation::Header);
        }
        let found = memory.load64(PAGES_AT);
        let pages = u32::try_from(found).ok().filter(|pages| (1..=PAGES_MAX).contains(pages));
        let needed = pages.map(|pages| pages_at(pages) + pages as usize * PAGE_BYTES);
        match (pages, needed) {
            (Some(pages), Some(needed)) if needed == bytes => Ok(View { memory, pages, pages_at: pages_at(pages) }),
            _ => {
                let needed = needed.map_or(u64::MAX, |needed| needed as u64);
                Err(NotADonation::Size { pages: found, needed, bytes: bytes as u64 })
            }
        }
    }

    /// The incarnation that it is of, as the node says.
    pub fn incarnation(&self) -> u64 {
        self.memory.load64(INCARNATION_AT)
    }

    /// Copies bytes of a page out, from `at` on, and says whether they can be relied on. `clock` is the boot clock in
    /// nanoseconds, which is looked at after the bytes were copied.
    ///
    /// It neither allocates, nor blocks, nor locks, nor panics, whatever is in the memory: a signal handler may call it.
    #[inline]
    pub fn read(&self, handle: PageHandle, at: usize, into: &mut [u8], clock: impl FnOnce() -> u64) -> Read {
        match self.copy(handle, at, into) {
            Read::Done if !self.is_valid(clock()) => Read::Lapsed,
            read => read,
        }
    }

    /// Whether what was copied before may be relied on, at this time on the boot clock: for those who copied many pages.
    #[inline]
    pub fn is_valid(&self, now: u64) -> bool {
        now < self.memory.load64(VALID_UNTIL_AT)
    }

    /// [`read`](View::read) without the clock: [`is_valid`](View::is_valid) has to be asked afterwards.
    #[inline]
    pub fn copy(&self, handle: PageHandle, at: usize, into: &mut [u8]) -> Read {
        if handle.index >= self.pages || at > PAGE_BYTES || into.len() > PAGE_BYTES - at {
            return Read::Freed;
        }
        // Not zero: that is a donation which nobody is in charge of.
        if handle.incarnation == 0 || self.incarnation() != handle.incarnation {
            return Read::Freed;
        }
        let place = word_at(handle.index);
        // R1: acquires W4.
        let word = self.memory.load64(place);
        if (word >> 32) as u32 != handle.generation {
            return Read::Freed;
        }
        if word & BUSY != 0 {
            return Read::Busy;
        }
        // R2
        self.memory.copy_out(self.pages_at + handle.index as usize * PAGE_BYTES + at, into);
        // R3: if R2 saw a byte of a later W3, this acquires that write's W2.
        fence(Ordering::Acquire);
        // R4
        let again = self.memory.load64(place);
        if again != word {
            return if again >> 32 == word >> 32 { Read::Changed } else { Read::Freed };
        }
        Read::Done
    }
}

fn word_at(index: u32) -> usize {
    HEADER_BYTES + index as usize * 8
}

fn pages_at(pages: u32) -> usize {
    word_at(pages).next_multiple_of(PAGE_BYTES)
}

fn word_of(generation: u32, version: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(version) << 1
}

fn version_of(word: u64) -> u32 {
    (word as u32) >> 1
}

/// `HWDONAT1`, as bytes in memory.
const MAGIC: u64 = u64::from_le_bytes(*b"HWDONAT1");
const LAYOUT: u32 = 1;
const LAYOUT_AT: usize = 8;
const PAGE_BYTES_AT: usize = 12;
const PAGES_AT: usize = 16;
const INCARNATION_AT: usize = 24;
/// On a line of its own: it is written at each renewal of the lease, the rest once.
const VALID_UNTIL_AT: usize = 64;
const HEADER_BYTES: usize = PAGE_BYTES;
const BUSY: u64 = 1;
const VERSION_MASK: u32 = (1 << 31) - 1;
/// 4 TiB.
const PAGES_MAX: u32 = 1 << 30;

#[cfg(test)]
mod tests;
