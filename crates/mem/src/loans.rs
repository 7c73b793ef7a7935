//! Payloads that a reader keeps in place, and gives back one by one in any order.
//!
//! The reader marks a consumed slot as held (`held` in its block) and later appends the slot's
//! index to a log in its own memory, the [`ReleaseLog`]. The writer keeps a [`LoanBook`] of what is
//! out, of bounded length, and checks every entry against it.
//!
//! An entry is the slot's index with two bits above it: bit 63 says that there is an entry, bit 62
//! is the parity of the lap through the log. One bit is enough, since an entry that was not
//! overwritten yet is exactly one lap old; and the index is whole, since a payload may be held
//! while any number of slots goes by.

use crate::layout::{Block, BlockShape};
use crate::memory::{OwnMemory, PeerMemory};
use crate::ring::Lie;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The reader's log of payloads given back.
#[derive(Debug)]
pub struct ReleaseLog {
    own: OwnMemory,
    block: Block,
    next: u64,
}

impl ReleaseLog {
    /// The log in `block` of `own`.
    pub fn new(own: OwnMemory, block: Block) -> ReleaseLog {
        ReleaseLog { own, block, next: 0 }
    }

    /// Gives the payload of slot `index` back. Progress past that slot must have been published
    /// before ([`crate::SlotReader::publish`]): a writer that finds an entry for a slot which nobody
    /// has consumed takes it for a lie.
    pub fn release(&mut self, index: u64) {
        debug_assert!(self.own.load64(self.block.consumed()) > index, "slot {index} is released before it is consumed");
        // Release: pairs with the acquire in `LoanBook::poll`; the reader's last look at the
        // payload comes before.
        self.own.store64(self.block.release(self.next), mark(self.next, self.block.shape()) | index);
        self.next += 1;
    }
}

/// The writer's record of what its reader holds, each with something of the writer's attached.
#[derive(Debug)]
pub struct LoanBook<T> {
    peer: PeerMemory,
    block: Block,
    next: u64,
    /// For watches: `next`, or `NOTHING_OUT`.
    expected: Arc<AtomicU64>,
    out: VecDeque<(u64, T)>,
}

/// A look at what was given back, from outside.
#[derive(Clone, Debug)]
pub struct ReleaseWatch {
    peer: PeerMemory,
    block: Block,
    expected: Arc<AtomicU64>,
}

impl ReleaseWatch {
    /// True if the log has an entry that was not read yet. False while nothing is out, so that no
    /// peer can keep a waiter awake with entries that nobody will ever read.
    pub fn moved(&self) -> bool {
        let next = self.expected.load(Relaxed);
        next != NOTHING_OUT && entry(&self.peer, self.block, next).is_some()
    }
}

impl<T> LoanBook<T> {
    /// The book for the reader that answers in `block` of `peer`.
    pub fn new(peer: PeerMemory, block: Block) -> LoanBook<T> {
        LoanBook { peer, block, next: 0, expected: Arc::new(AtomicU64::new(NOTHING_OUT)), out: VecDeque::new() }
    }

    /// A view of the log for whoever waits on many books.
    pub fn watch(&self) -> ReleaseWatch {
        ReleaseWatch { peer: self.peer.clone(), block: self.block, expected: self.expected.clone() }
    }

    /// Enters slot `index` as held. An error is a lie only after [`LoanBook::poll`] has been called
    /// until it found nothing more: what was given back in the meantime makes room.
    pub fn lend(&mut self, index: u64, what: T) -> Result<(), (Lie, T)> {
        let limit = self.block.shape().loans();
        if self.out.len() >= limit as usize {
            return Err((Lie::HoldsTooMany { limit }, what));
        }
        self.out.push_back((index, what));
        self.expected.store(self.next, Relaxed);
        Ok(())
    }

    /// True if something is out.
    pub fn outstanding(&self) -> bool {
        !self.out.is_empty()
    }

    /// The next payload given back, if any. Every held slot before `swept` must have been entered;
    /// an entry for a later one that the reader has consumed by now waits until it is.
    #[inline]
    pub fn poll(&mut self, swept: u64) -> Result<Option<T>, Lie> {
        if self.out.is_empty() {
            return Ok(None);
        }
        let Some(index) = entry(&self.peer, self.block, self.next) else { return Ok(None) };
        // Mostly given back in the order lent, so the first is mostly the one.
        let Some(position) = self.out.iter().position(|(held, _)| *held == index) else {
            // `consumed` was published before the entry, whose acquire makes it visible here.
            let consumed_since = swept..self.peer.load64(self.block.consumed());
            return if consumed_since.contains(&index) { Ok(None) } else { Err(Lie::ReleasedUnheld { index }) };
        };
        self.next += 1;
        let returned = self.out.remove(position).map(|(_, what)| what);
        self.expected.store(if self.out.is_empty() { NOTHING_OUT } else { self.next }, Relaxed);
        Ok(returned)
    }

    /// Everything that is out; the reader is gone.
    pub fn recall(&mut self) -> impl Iterator<Item = T> {
        self.expected.store(NOTHING_OUT, Relaxed);
        self.out.drain(..).map(|(_, what)| what)
    }
}

/// What distinguishes entry number `next` from fresh memory and from the lap before.
fn mark(next: u64, shape: BlockShape) -> u64 {
    let lap = next / u64::from(shape.log_entries());
    ENTRY | (lap & 1) << 62
}

/// The slot index in entry number `next`, once that is written.
#[inline]
fn entry(peer: &PeerMemory, block: Block, next: u64) -> Option<u64> {
    let word = peer.load64(block.release(next));
    (word & !INDEX == mark(next, block.shape())).then_some(word & INDEX)
}

const NOTHING_OUT: u64 = u64::MAX;
const ENTRY: u64 = 1 << 63;
const INDEX: u64 = (1 << 62) - 1;
