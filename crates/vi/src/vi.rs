//! A virtual interface: a connected pair of work queues.

use crate::bells::{BellHome, QueueShared};
use crate::config::ViOptions;
use crate::descriptor::{Completion, Message, PayloadToken, RdmaRead, RdmaWrite, Receive};
use crate::error::{Failure, GrantError, PostError, Refused, WaitError};
use crate::member::{Member, STATE_ABORTED, STATE_CLOSED, state_word};
use crate::nic::NicInner;
use crate::peer::Peer;
use crate::recv::RecvQueue;
use crate::remote::RemoteKey;
use crate::send::{LoanBookParts, SendQueue};
use crate::spin::FREE_LOOKS;
use highwire_mem::{BellIndex, BellRope, Block, Credentials, Exported, Frozen, Region, SlotReader, SlotWriter, Tag};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// Names a VI within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ViId(u64);

/// How a VI stands.
///
/// ```text
///  connect, accept ──▶ Connected ──▶ Ended(reason)
/// ```
/// There is no way back: an ended VI gives its descriptors back and is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum State {
    /// Messages go both ways.
    Connected,
    /// Nothing goes any more, for this reason.
    Ended(Failure),
}

/// What a VI is put together from when both sides have agreed.
pub(crate) struct Parts {
    pub peer: Arc<Peer>,
    pub queue: Arc<QueueShared>,
    pub home: Arc<BellHome>,
    pub bell: BellIndex,
    pub block: Block,
    pub peer_block: Block,
    pub first_index: u64,
    pub serial: u32,
    pub rope: BellRope,
}

/// A connected virtual interface. `Send`, and used by one thread at a time.
#[derive(Debug)]
pub struct Vi {
    tx: SendQueue,
    rx: RecvQueue,
    nic: Arc<NicInner>,
    turn: u32,
}

/// Every so many polls the sending half comes first.
const TURNS: u32 = 64;

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl Vi {
    pub(crate) fn assemble(parts: Parts, nic: &Arc<NicInner>, options: &ViOptions<'_>) -> Vi {
        let Parts { peer, queue, home, bell, block, peer_block, first_index, serial, rope } = parts;
        let (own, theirs) = (peer.ours().clone(), peer.theirs().clone());
        let writer = SlotWriter::new(own.clone(), block, theirs.clone(), peer_block, first_index, peer.fences);
        let reader = SlotReader::new(own, block, theirs.clone(), peer_block, first_index, peer.fences);
        let loans = LoanBookParts::new(theirs, peer_block);
        let rope = Arc::new(rope);
        let member = Arc::new(Member {
            id: ViId(NEXT_ID.fetch_add(1, Relaxed)),
            process: nic.process,
            slots: reader.watch(),
            credit: writer.watch(),
            releases: loans.watch(),
            peer,
            queue: queue.clone(),
            home,
            bell,
            block,
            peer_block,
            serial,
            sent: AtomicBool::new(false),
            received: AtomicBool::new(false),
            returned: AtomicBool::new(false),
            receivable: AtomicBool::new(false),
            loans_out: AtomicBool::new(false),
            awaiting: AtomicBool::new(false),
            broken: OnceLock::new(),
            aborting: AtomicBool::new(false),
            areas: Mutex::default(),
            sleepers: Mutex::default(),
            active: AtomicBool::new(false),
            ended: AtomicU32::new(0),
            halves: AtomicU32::new(2),
        });
        member.refresh_attention();
        member.peer.tell(&queue);
        queue.join(member.clone());
        let tag = options.tag.unwrap_or(Tag(0));
        Vi {
            tx: SendQueue::new(member.clone(), nic.clone(), writer, loans, rope.clone(), options),
            rx: RecvQueue::new(member, nic.clone(), reader, rope, tag),
            nic: nic.clone(),
            turn: 0,
        }
    }

    /// Its number in this process.
    pub fn id(&self) -> ViId {
        self.rx.id()
    }

    /// How it stands now.
    pub fn state(&self) -> State {
        let ended = self.tx.ended().or(self.rx.ended()).or_else(|| self.rx.member().end());
        ended.map_or(State::Connected, State::Ended)
    }

    /// Who is at the other end, as the kernel said when the two processes met.
    pub fn peer(&self) -> Credentials {
        self.rx.member().peer.credentials
    }

    /// Sends a message: see [`SendQueue::post_send`].
    #[inline(always)]
    pub fn post_send(&mut self, message: Message) -> Result<(), Refused<Message>> {
        self.tx.post_send(message)
    }

    /// Sends a copy of `bytes`: see [`SendQueue::send_bytes`].
    #[inline(always)]
    pub fn send_bytes(&mut self, token: u64, bytes: &[u8]) -> Result<(), PostError> {
        self.tx.send_bytes(token, bytes)
    }

    /// Gives a place for the next message: see [`RecvQueue::post_recv`].
    #[inline(always)]
    pub fn post_recv(&mut self, receive: Receive) -> Result<(), Refused<Receive>> {
        self.rx.post_recv(receive)
    }

    /// Gives a place for the payload with this token: see [`RecvQueue::expect`].
    pub fn expect(&mut self, token: PayloadToken, receive: Receive) -> Result<(), Refused<Receive>> {
        self.rx.expect(token, receive)
    }

    /// Takes such a place back: see [`RecvQueue::revoke`].
    pub fn revoke(&mut self, token: PayloadToken) -> Option<Receive> {
        self.rx.revoke(token)
    }

    /// Writes remote memory: see [`SendQueue::rdma_write`].
    pub fn rdma_write(&mut self, write: RdmaWrite) -> Result<(), Refused<RdmaWrite>> {
        self.tx.rdma_write(write)
    }

    /// Reads remote memory: see [`SendQueue::rdma_read`].
    pub fn rdma_read(&mut self, read: RdmaRead) -> Result<(), Refused<RdmaRead>> {
        self.tx.rdma_read(read)
    }

    /// Lets the peer read a registered region.
    pub fn grant(&self, region: &Region) -> Result<RemoteKey, GrantError> {
        self.tx.grant(region)
    }

    /// Lets the peer read and write an exported region.
    pub fn grant_exported(&self, region: &Exported) -> Result<RemoteKey, GrantError> {
        self.tx.grant_exported(region)
    }

    /// Lets the peer read a frozen region.
    pub fn grant_frozen(&self, region: &Frozen) -> Result<RemoteKey, GrantError> {
        self.tx.grant_frozen(region)
    }

    /// The next completion of either half, if there is one. Does not wait.
    #[inline(always)]
    pub fn poll(&mut self) -> Option<Completion> {
        // A stream of small messages must not keep the sending half from its turn.
        self.turn = self.turn.wrapping_add(1);
        if !self.tx.has_done() && !self.turn.is_multiple_of(TURNS) {
            // What is forgotten is nothing: dropped, it would have to be in memory, and so would the
            // completion that it is not.
            match self.tx.poll_reference() {
                Some(done) => return Some(done),
                none => std::mem::forget(none),
            }
            match self.rx.poll_small() {
                Some(done) => return Some(done),
                none => std::mem::forget(none),
            }
        }
        self.poll_any()
    }

    #[inline(never)]
    fn poll_any(&mut self) -> Option<Completion> {
        if !self.rx.member().process.is_this() {
            return None;
        }
        if let Some(done) = self.tx.poll_any() {
            return Some(done);
        }
        if let Some(done) = self.rx.poll() {
            return Some(done);
        }
        // The receiving half looks at the state of the connection when it finds nothing to read.
        if self.rx.member().over() {
            self.tx.notice_end();
            return self.tx.take_done();
        }
        None
    }

    /// Waits for the next completion of either half, at most `timeout`.
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        if self.rx.member().worth_a_glance() {
            for _ in 0..FREE_LOOKS {
                if let Some(done) = self.poll() {
                    return Ok(done);
                }
            }
        }
        let (member, nic) = (self.rx.member().clone(), self.nic.clone());
        member.wait_for(&nic.spin, timeout, || self.poll_or_end())?
    }

    #[inline]
    pub(crate) fn poll_or_end(&mut self) -> Option<Result<Completion, WaitError>> {
        if let Some(done) = self.poll() {
            return Some(Ok(done));
        }
        let ended = self.tx.ended().and(self.rx.waits_in_vain());
        ended.map(|failure| Err(WaitError::NotConnected(failure)))
    }

    /// Two halves for two threads: one sends, one receives. The connection lasts until both are
    /// dropped.
    pub fn split(self) -> (SendQueue, RecvQueue) {
        (self.tx, self.rx)
    }

    /// The sending half, for its statistics and recordings.
    pub fn sender(&mut self) -> &mut SendQueue {
        &mut self.tx
    }

    /// The receiving half, for its statistics and recordings, and to release payloads.
    pub fn receiver(&mut self) -> &mut RecvQueue {
        &mut self.rx
    }

    /// Waits at most `linger` until everything sent is with the peer, then disconnects. What is
    /// still outstanding then is void, and the error says so. Dropping a VI is a linger of zero.
    pub fn disconnect(mut self, linger: Duration) -> Result<(), WaitError> {
        self.tx.flush(linger)
    }

    pub(crate) fn peer_handle(&self) -> &Arc<Peer> {
        &self.rx.member().peer
    }

    pub(crate) fn member(&self) -> &Arc<Member> {
        self.rx.member()
    }

    pub(crate) fn nic(&self) -> &Arc<NicInner> {
        &self.nic
    }
}

/// A half is gone; with the last one the connection ends.
pub(crate) fn half_dropped(member: &Member, rope: &BellRope) {
    if !member.process.is_this() || !member.half_gone() {
        return;
    }
    member.queue.part(member.id);
    if member.broken.get().is_none() {
        let state = if member.aborting.load(Relaxed) { STATE_ABORTED } else { STATE_CLOSED };
        member.block.set_state(member.peer.ours(), state_word(member.serial, state));
    }
    // Whatever it waits for, it is to know.
    rope.ring();
    member.home.return_index(member.bell);
    let areas = std::mem::take(&mut *member.areas.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    member.peer.leave(member.block, areas, member.peer_block, member.serial);
}
