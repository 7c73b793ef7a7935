//! A virtual interface: a connected pair of work queues.

use crate::config::ViOptions;
use crate::descriptor::{Completion, Message, PayloadToken, RdmaRead, RdmaWrite, Receive};
use crate::error::{Failure, GrantError, PostError, Refused, WaitError, WithdrawError};
use crate::halves::{Receiver, RecvQueue, SendQueue, Sender};
use crate::host::peer::Peer;
use crate::host::recv::HostReceiver;
use crate::host::remote::RemoteKey;
use crate::host::send::HostSender;
use crate::host::{self, Parts};
use crate::member::Member;
use crate::nic::NicInner;
use crate::spin::FREE_LOOKS;
use crate::watch::Watch;
use crate::wire::Calling;
use highwire_mem::work::{Landings, Side};
use highwire_mem::{Credentials, Exported, Frozen, Region};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Names a VI within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ViId(u64);

impl ViId {
    pub(crate) fn next() -> ViId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        ViId(NEXT.fetch_add(1, Relaxed))
    }
}

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

/// Who is at the other end of a VI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerId {
    /// A process of this host, as the kernel said when the two met.
    Process(Credentials),
    /// Somebody who has the cluster's key, at this address when the two met. Without a key, anybody.
    Host(SocketAddr),
}

impl PeerId {
    /// The process, if it is one of this host.
    pub fn process(self) -> Option<Credentials> {
        match self {
            PeerId::Process(credentials) => Some(credentials),
            PeerId::Host(_) => None,
        }
    }
}

/// A connected virtual interface. `Send`, and used by one thread at a time.
#[derive(Debug)]
pub struct Vi {
    tx: SendQueue,
    rx: RecvQueue,
    member: Member,
    nic: Arc<NicInner>,
    turn: u32,
}

/// Every so many polls the sending half comes first.
const TURNS: u32 = 64;

impl Vi {
    /// A VI between two processes of this host, from what they agreed on.
    pub(crate) fn assemble(parts: Parts, nic: &Arc<NicInner>, options: &ViOptions<'_>) -> Vi {
        let (tx, rx, member) = host::assemble(parts, nic, options);
        Vi {
            tx: SendQueue(Sender::Host(tx)),
            rx: RecvQueue(Receiver::Host(rx)),
            member: Member::Host(member),
            nic: nic.clone(),
            turn: 0,
        }
    }

    /// A VI to another host, whose line is connected.
    pub(crate) fn connected(calling: Calling, nic: &Arc<NicInner>, options: &ViOptions<'_>) -> Option<Vi> {
        let (tx, rx, member) = calling.connected(nic, options)?;
        Some(Vi {
            tx: SendQueue(Sender::Wire(Box::new(tx))),
            rx: RecvQueue(Receiver::Wire(Box::new(rx))),
            member: Member::Wire(member),
            nic: nic.clone(),
            turn: 0,
        })
    }

    /// Its number in this process.
    pub fn id(&self) -> ViId {
        self.rx.id()
    }

    /// How it stands now.
    pub fn state(&self) -> State {
        let ended = self.tx.ended().or(self.rx.ended()).or_else(|| match &self.member {
            Member::Host(member) => member.end(),
            Member::Wire(member) => member.end(),
        });
        ended.map_or(State::Connected, State::Ended)
    }

    /// Who is at the other end.
    pub fn peer(&self) -> PeerId {
        match &self.member {
            Member::Host(member) => PeerId::Process(member.peer.credentials),
            Member::Wire(member) => PeerId::Host(member.terms.peer),
        }
    }

    /// What those need who wait for this VI while another thread uses it.
    pub fn watch(&self) -> Watch {
        Watch::new(self.member.clone(), self.nic.clone())
    }

    /// What has become of the payloads that came from another host; none of that on this one.
    pub fn landings(&self) -> Landings {
        self.count_landings(false)
    }

    /// The same of all VIs that share its socket.
    pub fn landings_in_all(&self) -> Landings {
        self.count_landings(true)
    }

    fn count_landings(&self, all: bool) -> Landings {
        match &self.member {
            Member::Host(_) => Landings::default(),
            // In a child nobody knows who held the adapter's lock when it was made.
            Member::Wire(member) if !member.process.is_this() => Landings::default(),
            Member::Wire(member) => member.carrier().landings(all),
        }
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

    /// Says that much is about to be sent: see [`SendQueue::request_fast`].
    pub fn request_fast(&self) {
        self.tx.request_fast();
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

    /// Takes back what was granted to a peer on another host: see [`SendQueue::withdraw`].
    pub fn withdraw(&self, key: &RemoteKey) -> Result<(), WithdrawError> {
        self.tx.withdraw(key)
    }

    /// The next completion of either half, if there is one. Does not wait.
    #[inline(always)]
    pub fn poll(&mut self) -> Option<Completion> {
        // A stream of small messages must not keep the sending half from its turn.
        self.turn = self.turn.wrapping_add(1);
        if let (Sender::Host(tx), Receiver::Host(rx)) = (&mut self.tx.0, &mut self.rx.0)
            && !tx.has_done()
            && !self.turn.is_multiple_of(TURNS)
        {
            // What is forgotten is nothing: dropped, it would have to be in memory, and so would the
            // completion that it is not.
            match tx.poll_reference() {
                Some(done) => return Some(done),
                none => std::mem::forget(none),
            }
            match rx.poll_small() {
                Some(done) => return Some(done),
                none => std::mem::forget(none),
            }
        }
        self.poll_any()
    }

    #[inline(never)]
    fn poll_any(&mut self) -> Option<Completion> {
        match (&mut self.tx.0, &mut self.rx.0) {
            (Sender::Host(tx), Receiver::Host(rx)) => poll_host(tx, rx),
            (Sender::Wire(tx), Receiver::Wire(rx)) => {
                let line = &tx.member().line;
                if !tx.member().process.is_this() {
                    return None;
                }
                if !line.has_done(Side::Sent)
                    && !line.has_done(Side::Received)
                    && let Some(done) = rx.attend()
                {
                    return Some(done);
                }
                // What came is mostly waited for, more than word of what went; but both get their turn.
                match self.turn.is_multiple_of(TURNS) {
                    true => tx.take().or_else(|| rx.take()),
                    false => rx.take().or_else(|| tx.take()),
                }
            }
            // The halves of a VI take one path.
            _ => None,
        }
    }

    /// Waits for the next completion of either half, at most `timeout`.
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        if let Member::Host(member) = &self.member
            && member.worth_a_glance()
        {
            for _ in 0..FREE_LOOKS {
                if let Some(done) = self.poll() {
                    return Ok(done);
                }
            }
        }
        let nic = self.nic.clone();
        match self.member.clone() {
            Member::Host(member) => member.wait_for(&nic.spin, timeout, || self.poll_or_end())?,
            Member::Wire(member) => member
                .wait_for(&nic.spin, timeout, |attend| if attend { self.poll_or_end() } else { self.take_or_end() })?,
        }
    }

    #[inline]
    pub(crate) fn poll_or_end(&mut self) -> Option<Result<Completion, WaitError>> {
        let done = self.poll();
        self.or_end(done)
    }

    /// What is done, without looking at the network.
    fn take_or_end(&mut self) -> Option<Result<Completion, WaitError>> {
        let done = match (&mut self.tx.0, &mut self.rx.0) {
            (Sender::Wire(tx), Receiver::Wire(rx)) => tx.take().or_else(|| rx.take()),
            _ => self.poll(),
        };
        self.or_end(done)
    }

    #[inline]
    fn or_end(&self, done: Option<Completion>) -> Option<Result<Completion, WaitError>> {
        if let Some(done) = done {
            return Some(Ok(done));
        }
        let in_vain = match &self.rx.0 {
            Receiver::Host(rx) => rx.waits_in_vain(),
            Receiver::Wire(rx) => rx.ended(),
        };
        let ended = self.tx.ended().and(in_vain);
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

    /// The pair of processes that it belongs to, on one host.
    pub(crate) fn peer_handle(&self) -> Option<&Arc<Peer>> {
        match &self.member {
            Member::Host(member) => Some(&member.peer),
            Member::Wire(_) => None,
        }
    }

    pub(crate) fn member(&self) -> &Member {
        &self.member
    }

    pub(crate) fn nic(&self) -> &Arc<NicInner> {
        &self.nic
    }
}

fn poll_host(tx: &mut HostSender, rx: &mut HostReceiver) -> Option<Completion> {
    if !rx.member().process.is_this() {
        return None;
    }
    if let Some(done) = tx.poll_any() {
        return Some(done);
    }
    if let Some(done) = rx.poll() {
        return Some(done);
    }
    // The receiving half looks at the state of the connection when it finds nothing to read.
    if rx.member().over() {
        tx.notice_end();
        return tx.take_done();
    }
    None
}
