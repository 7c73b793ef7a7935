//! A VI as its completion queue sees it: is there something to poll?

use crate::bells::{BellHome, QueueShared};
use crate::error::{Failure, WaitError};
use crate::host::peer::Peer;
use crate::spin::SpinRules;
use crate::vi::ViId;
use highwire_mem::{
    Attention, BellIndex, Block, CreditWatch, Process, ReleaseWatch, SlotWatch, current_cpu, deadline, light_barrier,
};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How a side stands to a connection, in the two low bits of its block's state word; the serial of
/// the connection is above them, so that a block's next use is not taken for this one.
pub(crate) const STATE_OPEN: u32 = 1;
pub(crate) const STATE_CLOSED: u32 = 2;
pub(crate) const STATE_ABORTED: u32 = 3;

/// The word for a serial and one of the states above.
pub(crate) fn state_word(serial: u32, state: u32) -> u32 {
    serial << 2 | state
}

#[derive(Debug)]
pub(crate) struct HostMember {
    pub id: ViId,
    pub process: Process,
    pub peer: Arc<Peer>,
    pub queue: Arc<QueueShared>,
    pub home: Arc<BellHome>,
    pub bell: BellIndex,
    pub block: Block,
    pub peer_block: Block,
    pub serial: u32,
    pub slots: SlotWatch,
    pub credit: CreditWatch,
    pub releases: ReleaseWatch,
    /// Completions lie ready on the send side, or on the receive side.
    pub sent: AtomicBool,
    pub received: AtomicBool,
    /// Payloads were given back away from the receive side.
    pub returned: AtomicBool,
    /// A slot that comes can be consumed.
    pub receivable: AtomicBool,
    /// No further payload can be held before one is given back.
    pub loans_out: AtomicBool,
    /// Progress of the peer matters to the send side.
    pub awaiting: AtomicBool,
    /// Ended from this side: a lie was found, or it was closed.
    pub broken: OnceLock<Failure>,
    /// A half went with sends outstanding, which are void now.
    pub aborting: AtomicBool,
    /// Payload areas of a send half that is gone.
    pub areas: Mutex<Vec<(usize, usize)>>,
    /// Threads that sleep until this VI has something.
    pub sleepers: Mutex<u32>,
    /// In its queue's list of those to look at.
    pub active: AtomicBool,
    /// Its queue is not to tell of what came.
    pub muted: AtomicBool,
    /// Halves of the VI that have noticed its end.
    pub ended: AtomicU32,
    /// Halves that exist.
    pub halves: AtomicU32,
}

impl HostMember {
    /// True if polling the VI would bring something.
    #[inline]
    pub(crate) fn ready(&self) -> bool {
        (self.receivable.load(Relaxed) && self.slot_ready())
            || self.sent.load(Relaxed)
            || self.received.load(Relaxed)
            || self.returned.load(Relaxed)
            || self.has_credit_news()
            || self.end_unnoticed()
    }

    /// True if the send side waits for progress of the peer, and there is some.
    #[inline]
    pub(crate) fn has_credit_news(&self) -> bool {
        self.awaiting.load(Relaxed) && (self.credit.moved() || self.releases.moved())
    }

    /// The same, or it is over and whoever waits for room does not know.
    pub(crate) fn has_write_news(&self) -> bool {
        self.has_credit_news() || self.awaiting.load(Relaxed) && self.over()
    }

    #[inline]
    fn slot_ready(&self) -> bool {
        if self.loans_out.load(Relaxed) { self.slots.ready_without_loan() } else { self.slots.ready() }
    }

    #[inline]
    fn end_unnoticed(&self) -> bool {
        self.over() && self.ended.load(Relaxed) < self.halves.load(Relaxed)
    }

    /// True once the connection is over, for whatever reason.
    #[inline]
    pub(crate) fn over(&self) -> bool {
        !self.peer_open() || self.peer.is_gone() || self.broken.get().is_some()
    }

    /// Why it is over.
    pub(crate) fn end(&self) -> Option<Failure> {
        if let Some(failure) = self.broken.get() {
            return Some(*failure);
        }
        let gone = self.peer.is_gone();
        match self.peer_state() {
            STATE_OPEN if gone => Some(self.peer.parting()),
            STATE_OPEN => None,
            STATE_ABORTED => Some(Failure::PeerAborted),
            _ => Some(Failure::PeerClosed),
        }
    }

    /// Ends it from this side, and tells the peer.
    pub(crate) fn break_off(&self, failure: Failure) {
        if self.broken.set(failure).is_ok() {
            self.block.set_state(self.peer.ours(), state_word(self.serial, STATE_ABORTED));
        }
    }

    /// Something to poll has come about that no ring shows.
    #[inline(always)]
    pub(crate) fn show(&self, flag: &AtomicBool) {
        flag.store(true, Relaxed);
        light_barrier();
        self.queue.ring_locally(self.id);
    }

    /// Whether a look or two may bring something: not while the peer cannot run.
    #[inline]
    pub(crate) fn worth_a_glance(&self) -> bool {
        !self.peer.on_this_cpu(current_cpu())
    }

    /// Waits until `look` finds something, spinning and sleeping by the rules.
    pub(crate) fn wait_for<T>(
        &self,
        spin: &SpinRules,
        timeout: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T, WaitError> {
        if !self.process.is_this() {
            return Err(WaitError::ForkedChild);
        }
        let beside = |cpu| self.peer.on_this_cpu(cpu);
        let deadline = deadline(timeout);
        loop {
            if let Some(found) = spin.spin(deadline, beside, &mut look) {
                return Ok(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return look().ok_or(WaitError::TimedOut(timeout));
            }
            let home = std::slice::from_ref(&self.home);
            if let Ok(found) = self.queue.sleep(home, Some(left), |asleep| self.set_attention(asleep), &mut look) {
                return Ok(found);
            }
            if let Some(found) = look() {
                return Ok(found);
            }
        }
    }

    /// True while the other side has neither closed nor aborted.
    #[inline]
    pub(crate) fn peer_open(&self) -> bool {
        self.peer_block.state(self.peer.theirs()) == state_word(self.serial, STATE_OPEN)
    }

    /// How the other side ended it, if it has.
    pub(crate) fn peer_state(&self) -> u32 {
        let word = self.peer_block.state(self.peer.theirs());
        if word >> 2 == self.serial { word & 3 } else { STATE_CLOSED }
    }

    /// A sleeper comes or goes: while there is one, the peer is asked to ring.
    pub(crate) fn set_attention(&self, asleep: bool) {
        let mut sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        *sleepers = if asleep { *sleepers + 1 } else { *sleepers - 1 };
        self.announce(*sleepers);
    }

    /// The queue has become one of many VIs, or of few again.
    pub(crate) fn refresh_attention(&self) {
        let sleepers = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        self.announce(*sleepers);
    }

    /// With `sleepers` locked. A block that was left may be another's.
    fn announce(&self, sleepers: u32) {
        if self.halves.load(SeqCst) == 0 {
            return;
        }
        let wanted = if sleepers > 0 || self.queue.many.load(Relaxed) { Attention::ALL } else { Attention::NONE };
        wanted.announce(self.peer.ours(), self.block);
    }

    /// Called once for each half that is dropped; true for the last.
    pub(crate) fn half_gone(&self) -> bool {
        self.halves.fetch_sub(1, SeqCst) == 1
    }
}
