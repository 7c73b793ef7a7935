//! Doorbells: how a process that sleeps learns that a peer has something for it.
//!
//! A waiter owns one page for each user whose processes talk to it, and those processes may write
//! it. A bit for each virtual interface says who rang, so that a waiter with a thousand of them
//! looks at one word; a counter is what sleepers wait on. Peers of one user could stop each other
//! anyway, so they may share; other users never do.
//!
//! ```text
//! page  0x000  bell: u32       counts the rings; the futex
//!       0x004  sleepers: u32   how many wait on it
//!       0x008  armed: u32      what the wire is to be used for too, see `WireUse`
//!       0x040  summary: u64    bit i: leaf i is not 0
//!       0x080  leaf: 64 × u64  bit j of leaf i: number 64 i + j rang
//! ```
//!
//! The *wire* is a stream socket that goes with the page, for waiters that need a descriptor to
//! poll: the other end of it. A byte that is sent down the wire makes that readable. A waiter that wants to see
//! when there is room fills the wire from its end, so that it is not writable; emptying the wire makes it so.
//! It is not an eventfd: whether that blocks is decided by a flag that both holders share, so
//! a hostile waiter could stop its ringers; using a socket without blocking is the ringer's
//! own choice in each call.
//!
//! Nobody misses a ring because
//! * the writer publishes, fences, then reads the sleeper's *attention*; the sleeper sets it,
//!   fences, then looks at the ring again: one of them sees the other;
//! * the ringer adds to `bell` before it reads `sleepers`; the sleeper adds to `sleepers` before it
//!   reads `bell`, and the kernel compares `bell` once more before it sleeps.

use crate::layout::Block;
use crate::memory::{OwnMemory, SharedMemory};
use crate::sync::{Ordering, fence, sleeper_fence};
#[cfg(not(loom))]
use std::os::fd::OwnedFd;

/// Most virtual interfaces on one page.
pub const BELLS_MAX: u32 = 4096;

#[cfg_attr(loom, allow(dead_code))]
pub(crate) const BELL_PAGE_BYTES: usize = 4096;
const BELL_AT: usize = 0x00;
const SLEEPERS_AT: usize = 0x04;
const ARMED_AT: usize = 0x08;
const SUMMARY_AT: usize = 0x40;
const LEAVES_AT: usize = 0x80;

/// What is read from a wire at once, and how often: more than its waiter fills it with.
#[cfg(not(loom))]
const WIRE_BYTES: usize = 4096;
#[cfg(not(loom))]
const WIRE_LOOKS: usize = 16;

/// The number of a virtual interface on its waiter's page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BellIndex(u32);

impl BellIndex {
    /// Number `index`, below [`BELLS_MAX`].
    pub fn new(index: u32) -> Option<BellIndex> {
        (index < BELLS_MAX).then_some(BellIndex(index))
    }

    /// The number.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// What a block's owner wants its bell rung for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Attention {
    /// For new slots.
    pub slots: bool,
    /// For progress in its own slots, and payloads given back.
    pub credit: bool,
}

impl Attention {
    /// Nothing: it is looking by itself.
    pub const NONE: Attention = Attention { slots: false, credit: false };
    /// Everything.
    pub const ALL: Attention = Attention { slots: true, credit: true };

    /// Says so in `block` of `own`.
    pub fn announce(self, own: &OwnMemory, block: Block) {
        own.store32(block.attention(), u32::from(self.slots) | u32::from(self.credit) << 1);
    }

    #[inline]
    pub(crate) fn from_word(word: u32) -> Attention {
        Attention { slots: word & 1 != 0, credit: word & 2 != 0 }
    }
}

/// What a bell is rung for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// There are new slots.
    Slots,
    /// There is progress in the slots of the one who is rung for, or a payload was given back.
    Credit,
    /// The connection is over.
    End,
}

/// What ringers are to do with the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct WireUse(u32);

impl WireUse {
    /// Nothing.
    pub const NOT: WireUse = WireUse(0);
    /// Send a byte at every ring.
    pub const ALWAYS: WireUse = WireUse(1);
    /// Send a byte for new slots and the end.
    pub const SLOTS: WireUse = WireUse(2);
    /// Empty it for progress and the end.
    pub const CREDIT: WireUse = WireUse(4);

    /// This and that.
    #[must_use]
    pub const fn with(self, other: WireUse) -> WireUse {
        WireUse(self.0 | other.0)
    }

    /// This without that.
    #[must_use]
    pub const fn without(self, other: WireUse) -> WireUse {
        WireUse(self.0 & !other.0)
    }

    /// True if all of that is in it.
    pub const fn has(self, other: WireUse) -> bool {
        self.0 & other.0 == other.0
    }

    /// True if it is anything at all.
    pub const fn is_any(self) -> bool {
        self.0 != 0
    }

    #[cfg_attr(loom, allow(dead_code))]
    const fn sends(self, news: News) -> bool {
        let bits = if matches!(news, News::Credit) { WireUse::ALWAYS } else { WireUse::ALWAYS.with(WireUse::SLOTS) };
        self.0 & bits.0 != 0
    }

    #[cfg_attr(loom, allow(dead_code))]
    const fn empties(self, news: News) -> bool {
        !matches!(news, News::Slots) && self.0 & WireUse::CREDIT.0 != 0
    }
}

/// The waiter's side of a page.
#[derive(Debug)]
pub struct Bell {
    page: SharedMemory,
}

/// A page that a peer handed over, from which ropes are made.
#[cfg(not(loom))]
#[derive(Clone, Debug)]
pub struct BellPage {
    page: SharedMemory,
    wire: std::sync::Arc<OwnedFd>,
}

#[cfg(not(loom))]
impl BellPage {
    /// Takes over the descriptors of a page and its wire, after checking them.
    pub fn adopt(page: OwnedFd, wire: OwnedFd) -> Result<BellPage, crate::RegionError> {
        let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
        crate::region::check_seals(&page, BELL_PAGE_BYTES as u64, seals)?;
        let mapping = crate::sys::Mapping::of(&page, BELL_PAGE_BYTES, true).map_err(crate::RegionError::Map)?;
        let page = SharedMemory(crate::memory::View::new(std::sync::Arc::new(mapping)));
        Ok(BellPage { page, wire: std::sync::Arc::new(wire) })
    }

    /// The rope of bell `index`.
    pub fn rope(&self, index: BellIndex) -> BellRope {
        BellRope { page: self.page.clone(), index, wire: self.wire.clone() }
    }
}

impl Bell {
    /// A new page; the descriptor is for peers.
    #[cfg(not(loom))]
    pub fn create() -> Result<(Bell, OwnedFd), crate::RegionError> {
        use rustix::fs::SealFlags;
        let fd = crate::sys::memfd(BELL_PAGE_BYTES).map_err(crate::RegionError::Create)?;
        crate::sys::seal(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(crate::RegionError::Create)?;
        let mapping = crate::sys::Mapping::of(&fd, BELL_PAGE_BYTES, true).map_err(crate::RegionError::Map)?;
        Ok((Bell { page: SharedMemory(crate::memory::View::new(std::sync::Arc::new(mapping))) }, fd))
    }

    #[cfg(all(test, loom))]
    pub(crate) fn on(page: SharedMemory) -> Bell {
        Bell { page }
    }

    /// Announces a sleeper. Call before [`Bell::settle`], and [`Bell::leave`] afterwards.
    pub fn enter(&self) {
        self.page.0.add32(SLEEPERS_AT, 1);
    }

    /// Takes the announcement back.
    pub fn leave(&self) {
        self.page.0.add32(SLEEPERS_AT, u32::MAX);
    }

    /// After all attention words are set and all bells entered, before the last look: from here on
    /// every writer either was seen or will ring.
    pub fn settle() {
        sleeper_fence();
    }

    /// The count to sleep on, to be read before the last look.
    pub fn count(&self) -> u32 {
        self.page.0.load32(BELL_AT, Ordering::SeqCst)
    }

    /// Asks ringers to use the wire too, or no longer. Call before [`Bell::settle`] too.
    pub fn arm(&self, armed: WireUse) {
        self.page.0.store32(ARMED_AT, armed.0, Ordering::SeqCst);
    }

    /// True if somebody rang; cheap enough to spin on.
    #[inline]
    pub fn rung(&self) -> bool {
        self.page.load64(SUMMARY_AT) != 0
    }

    /// Who rang since the last call.
    pub fn take(&self, mut rang: impl FnMut(BellIndex)) {
        if !self.rung() {
            return;
        }
        let mut summary = self.page.0.swap64(SUMMARY_AT, 0);
        while summary != 0 {
            let leaf = summary.trailing_zeros();
            summary &= summary - 1;
            let mut bits = self.page.0.swap64(LEAVES_AT + leaf as usize * 8, 0);
            while bits != 0 {
                rang(BellIndex(leaf * 64 + bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
    }

    /// Sleeps while the count is `count`.
    #[cfg(loom)]
    pub fn sleep(&self, count: u32) {
        self.page.0.sleep_while(BELL_AT, count);
    }

    #[cfg(not(loom))]
    pub(crate) fn futex(&self) -> *const u32 {
        self.page.0.futex(BELL_AT)
    }
}

/// The ringer's side: one bell on somebody else's page.
#[derive(Debug)]
pub struct BellRope {
    page: SharedMemory,
    index: BellIndex,
    #[cfg(not(loom))]
    wire: std::sync::Arc<OwnedFd>,
}

impl BellRope {
    #[cfg(all(test, loom))]
    pub(crate) fn new(page: SharedMemory, index: BellIndex) -> BellRope {
        BellRope { page, index }
    }

    /// Rings. A full fence in itself.
    pub fn ring(&self, news: News) {
        let (leaf, bit) = (self.index.0 / 64, self.index.0 % 64);
        // The leaf before the summary: whoever takes the summary bit finds the leaf's.
        self.page.0.or64(LEAVES_AT + leaf as usize * 8, 1 << bit);
        self.page.0.or64(SUMMARY_AT, 1 << leaf);
        self.page.0.add32(BELL_AT, 1);
        // Pairs with the fence in `settle`, which comes between `enter` and `count`.
        fence(Ordering::SeqCst);
        if self.page.0.load32(SLEEPERS_AT, Ordering::SeqCst) != 0 {
            self.page.0.wake(BELL_AT);
        }
        #[cfg(not(loom))]
        self.use_wire(WireUse(self.page.0.load32(ARMED_AT, Ordering::SeqCst)), news);
        #[cfg(loom)]
        let _ = news;
    }

    #[cfg(not(loom))]
    fn use_wire(&self, armed: WireUse, news: News) {
        use rustix::net::{RecvFlags, SendFlags};
        if armed.sends(news) {
            // A socket that is full is readable already, which is all a ring has to achieve.
            let _ = rustix::net::send(&self.wire, b"!", SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
        if armed.empties(news) {
            let mut bytes = [0; WIRE_BYTES];
            // Bounded, or a waiter that goes on filling would keep us here.
            for _ in 0..WIRE_LOOKS {
                if rustix::net::recv(&self.wire, &mut bytes[..], RecvFlags::DONTWAIT).is_err() {
                    break;
                }
            }
        }
    }
}

#[cfg(all(test, loom))]
mod model;
