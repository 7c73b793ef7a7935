//! Payloads that a reader keeps in place, and gives back one by one in any order.
//!
//! The reader marks a consumed slot as held (`held` in its block) and later appends the slot's
//! index to a log in its own memory, the [`ReleaseLog`]. The writer keeps a [`LoanBook`] of what is
//! out, of bounded length, and checks every entry against it.

use crate::layout::Block;
use crate::memory::{OwnMemory, PeerMemory};
use crate::ring::{Lie, lap_mark};
use std::collections::VecDeque;

/// The reader's log of payloads given back.
#[derive(Debug)]
pub struct ReleaseLog {
    own: OwnMemory,
    block: Block,
    next: u64,
}

impl ReleaseLog {
    /// The log in `block` of `own`.
    pub fn new(own: OwnMemory, block: Block, fresh: bool) -> ReleaseLog {
        if !fresh {
            for index in 0..u64::from(block.shape().loans()) {
                own.store64(block.release(index), 0);
            }
        }
        ReleaseLog { own, block, next: 0 }
    }

    /// Gives the payload of slot `index` back. The caller must hold no more than the shape's
    /// `loans` at once, or entries that were not read yet are overwritten.
    pub fn release(&mut self, index: u64) {
        let entry = u64::from(lap_mark(self.next, self.block.shape().loans())) << 32 | u64::from(index as u32);
        // Release: pairs with the acquire in `LoanBook::poll`; the reader's last look at the
        // payload comes before.
        self.own.store64(self.block.release(self.next), entry);
        self.next += 1;
    }
}

/// The writer's record of what its reader holds, each with something of the writer's attached.
#[derive(Debug)]
pub struct LoanBook<T> {
    peer: PeerMemory,
    block: Block,
    next: u64,
    out: VecDeque<(u32, T)>,
}

impl<T> LoanBook<T> {
    /// The book for the reader that answers in `block` of `peer`.
    pub fn new(peer: PeerMemory, block: Block) -> LoanBook<T> {
        LoanBook { peer, block, next: 0, out: VecDeque::new() }
    }

    /// Enters slot `index` as held.
    pub fn lend(&mut self, index: u64, what: T) -> Result<(), (Lie, T)> {
        let limit = self.block.shape().loans();
        if self.out.len() >= limit as usize {
            return Err((Lie::HoldsTooMany { limit }, what));
        }
        self.out.push_back((index as u32, what));
        Ok(())
    }

    /// True if something is out.
    pub fn outstanding(&self) -> bool {
        !self.out.is_empty()
    }

    /// The next payload given back, if any.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<T>, Lie> {
        if self.out.is_empty() {
            return Ok(None);
        }
        let entry = self.peer.load64(self.block.release(self.next));
        if (entry >> 32) as u32 != lap_mark(self.next, self.block.shape().loans()) {
            return Ok(None);
        }
        let index = entry as u32;
        // Mostly given back in the order lent, so the first is mostly the one.
        let Some(position) = self.out.iter().position(|(held, _)| *held == index) else {
            return Err(Lie::ReleasedUnheld { index });
        };
        self.next += 1;
        Ok(self.out.remove(position).map(|(_, what)| what))
    }

    /// Everything that is out; the reader is gone.
    pub fn recall(&mut self) -> impl Iterator<Item = T> {
        self.out.drain(..).map(|(_, what)| what)
    }
}
