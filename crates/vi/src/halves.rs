//! The two halves of a VI, whichever path it takes.

use crate::descriptor::{Completion, InPlace, Message, PayloadToken, RdmaRead, RdmaWrite, Receive};
use crate::error::{Failure, GrantError, PostError, Refused, WaitError, WithdrawError};
use crate::host::pulse_log::PulseRecord;
use crate::host::recv::HostReceiver;
use crate::host::remote::RemoteKey;
use crate::host::send::HostSender;
use crate::vi::ViId;
use crate::wire::{WireReceiver, WireSender};
use highwire_mem::{Exported, Frozen, Region};
use std::time::Duration;

/// What a sending half has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendStats {
    /// Messages accepted.
    pub messages: u64,
    /// Payload bytes in them.
    pub bytes: u64,
    /// Messages that went inline.
    pub inline: u64,
    /// Messages that were copied into the payload area.
    pub buffered: u64,
    /// Messages that were referenced.
    pub referenced: u64,
    /// Pulses that copied messages were cut into.
    pub pulses: u64,
    /// Times a message had to wait for room.
    pub waits: u64,
    /// Times the payload area grew.
    pub growths: u64,
    /// Times the peer's bell was rung.
    pub rings: u64,
}

/// What a receiving half has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecvStats {
    /// Messages received.
    pub messages: u64,
    /// Payload bytes received.
    pub bytes: u64,
    /// Messages that came in their slot.
    pub inline: u64,
    /// Slots whose payload was read from the sender's payload area.
    pub buffered: u64,
    /// Slots whose payload was read from the sender's registered memory.
    pub referenced: u64,
    /// Messages for a payload token that nobody expects any more; they were dropped.
    pub orphans: u64,
    /// Times the peer's bell was rung.
    pub rings: u64,
}

/// The sending half. It belongs to one thread at a time.
#[derive(Debug)]
pub struct SendQueue(pub(crate) Sender);

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the fast path is to be where the VI is")]
pub(crate) enum Sender {
    Host(HostSender),
    Wire(Box<WireSender>),
}

impl SendQueue {
    /// The VI's number in this process.
    pub fn id(&self) -> ViId {
        match &self.0 {
            Sender::Host(tx) => tx.id(),
            Sender::Wire(tx) => tx.member().id,
        }
    }

    /// What it has done so far. To another host only messages and bytes are counted.
    pub fn stats(&self) -> SendStats {
        match &self.0 {
            Sender::Host(tx) => tx.stats(),
            Sender::Wire(tx) => tx.stats(),
        }
    }

    /// Why the VI is over, once this half has noticed.
    pub fn ended(&self) -> Option<Failure> {
        match &self.0 {
            Sender::Host(tx) => tx.ended(),
            Sender::Wire(tx) => tx.ended(),
        }
    }

    /// Sends a message. It goes at once where there is room, otherwise as the queue is polled.
    #[inline(always)]
    pub fn post_send(&mut self, message: Message) -> Result<(), Refused<Message>> {
        match &mut self.0 {
            Sender::Host(tx) => tx.post_send(message),
            Sender::Wire(tx) => tx.post_send(message),
        }
    }

    /// Sends a copy of `bytes`; they are yours again when this returns. Refused, with nothing sent,
    /// when there is no room for all of them now. With the token [`crate::QUIET`] there is no completion.
    #[inline(always)]
    pub fn send_bytes(&mut self, token: u64, bytes: &[u8]) -> Result<(), PostError> {
        match &mut self.0 {
            Sender::Host(tx) => tx.send_bytes(token, bytes),
            Sender::Wire(tx) => tx.send_bytes(token, bytes),
        }
    }

    /// Writes into memory that the peer exported. It is done when the bytes are there.
    ///
    /// What was posted before and after takes effect in that order: a message that is sent after a write arrives
    /// after it, and a read of the same bytes finds what was written. Writes and reads do not wait for messages
    /// that were posted before them. On another host the peer's adapter checks key and range, so that a refusal
    /// comes with the completion ([`Failure::Denied`]). Writes and reads are no longer than a message there, and
    /// reliable though the VI may not be; only the message that immediate data makes is as its VI is.
    pub fn rdma_write(&mut self, write: RdmaWrite) -> Result<(), Refused<RdmaWrite>> {
        match &mut self.0 {
            Sender::Host(tx) => tx.rdma_write(write),
            Sender::Wire(tx) => tx.rdma_write(write),
        }
    }

    /// Reads from memory that the peer granted.
    pub fn rdma_read(&mut self, read: RdmaRead) -> Result<(), Refused<RdmaRead>> {
        match &mut self.0 {
            Sender::Host(tx) => tx.rdma_read(read),
            Sender::Wire(tx) => tx.rdma_read(read),
        }
    }

    /// Says that much is about to be sent. Between hosts, and without a key, the receiver is asked for a list
    /// of its own for this VI, as it is anyway when a large message begins; nothing but speed depends on the
    /// answer. On one host it does nothing.
    pub fn request_fast(&self) {
        match &self.0 {
            Sender::Host(_) => {}
            Sender::Wire(tx) => tx.request_fast(),
        }
    }

    /// Lets the peer read a registered region. A grant ends with the VI, and keeps the memory until then. To
    /// another host it holds for this VI alone, and can be withdrawn before.
    pub fn grant(&self, region: &Region) -> Result<RemoteKey, GrantError> {
        match &self.0 {
            Sender::Host(tx) => tx.grant(region),
            Sender::Wire(tx) => tx.grant(region),
        }
    }

    /// Lets the peer read and write an exported region.
    pub fn grant_exported(&self, region: &Exported) -> Result<RemoteKey, GrantError> {
        match &self.0 {
            Sender::Host(tx) => tx.grant_exported(region),
            Sender::Wire(tx) => tx.grant_exported(region),
        }
    }

    /// Lets the peer read a frozen region.
    pub fn grant_frozen(&self, region: &Frozen) -> Result<RemoteKey, GrantError> {
        match &self.0 {
            Sender::Host(tx) => tx.grant_frozen(region),
            Sender::Wire(tx) => tx.grant_frozen(region),
        }
    }

    /// Takes back what was granted to a peer on another host. When this returns nothing further lands in the
    /// memory: a write that is under way fails at the peer, and some of its bytes may have landed. Reads that the
    /// peer asked for before may still be answered.
    pub fn withdraw(&self, key: &RemoteKey) -> Result<(), WithdrawError> {
        match &self.0 {
            Sender::Host(_) => Err(WithdrawError::Mapped),
            Sender::Wire(tx) => tx.withdraw(key),
        }
    }

    /// The next completion, if there is one. Does not wait.
    #[inline(always)]
    pub fn poll(&mut self) -> Option<Completion> {
        match &mut self.0 {
            Sender::Host(tx) => tx.poll(),
            Sender::Wire(tx) => tx.poll(),
        }
    }

    /// Waits for the next completion, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        match &mut self.0 {
            Sender::Host(tx) => tx.wait(timeout),
            Sender::Wire(tx) => tx.wait(timeout),
        }
    }

    /// Waits until everything posted is with the peer, and every completion that depends on it
    /// has come. The completions stay to be polled.
    pub fn flush(&mut self, timeout: Duration) -> Result<(), WaitError> {
        match &mut self.0 {
            Sender::Host(tx) => tx.flush(timeout),
            Sender::Wire(tx) => tx.flush(timeout),
        }
    }

    /// Starts recording pulses, the first `capacity` of them. There are none to another host.
    pub fn record_pulses(&mut self, capacity: usize) {
        if let Sender::Host(tx) = &mut self.0 {
            tx.record_pulses(capacity);
        }
    }

    /// The pulses recorded so far.
    pub fn take_pulses(&mut self) -> Vec<PulseRecord> {
        match &mut self.0 {
            Sender::Host(tx) => tx.take_pulses(),
            Sender::Wire(_) => Vec::new(),
        }
    }
}

/// A payload that was copied: nobody waits for it.
#[cold]
#[inline(never)]
fn forget_copy(payload: InPlace) {
    drop(payload);
}

/// The receiving half. It belongs to one thread at a time.
#[derive(Debug)]
pub struct RecvQueue(pub(crate) Receiver);

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the fast path is to be where the VI is")]
pub(crate) enum Receiver {
    Host(HostReceiver),
    Wire(Box<WireReceiver>),
}

impl RecvQueue {
    /// The VI's number in this process.
    pub fn id(&self) -> ViId {
        match &self.0 {
            Receiver::Host(rx) => rx.id(),
            Receiver::Wire(rx) => rx.member().id,
        }
    }

    /// What it has done so far. From another host only messages and bytes are counted.
    pub fn stats(&self) -> RecvStats {
        match &self.0 {
            Receiver::Host(rx) => rx.stats(),
            Receiver::Wire(rx) => rx.stats(),
        }
    }

    /// Why the VI is over, once this half has noticed.
    pub fn ended(&self) -> Option<Failure> {
        match &self.0 {
            Receiver::Host(rx) => rx.ended(),
            Receiver::Wire(rx) => rx.ended(),
        }
    }

    /// Gives a place for the next message. Messages fill receives in the order both were posted.
    #[inline(always)]
    pub fn post_recv(&mut self, receive: Receive) -> Result<(), Refused<Receive>> {
        match &mut self.0 {
            Receiver::Host(rx) => rx.post_recv(receive),
            Receiver::Wire(rx) => rx.post_recv(receive),
        }
    }

    /// Gives a place for the message that was sent with this payload token, whatever comes between:
    /// an entry of the incoming payload table.
    pub fn expect(&mut self, token: PayloadToken, receive: Receive) -> Result<(), Refused<Receive>> {
        match &mut self.0 {
            Receiver::Host(rx) => rx.expect(token, receive),
            Receiver::Wire(rx) => rx.expect(token, receive),
        }
    }

    /// Takes an expected place back. Nothing lands in it afterwards: a message for it that is
    /// already on its way is dropped, and one that is just landing comes to nothing.
    pub fn revoke(&mut self, token: PayloadToken) -> Option<Receive> {
        match &mut self.0 {
            Receiver::Host(rx) => rx.revoke(token),
            Receiver::Wire(rx) => rx.revoke(token),
        }
    }

    /// The next completion, if there is one. Does not wait.
    #[inline(always)]
    pub fn poll(&mut self) -> Option<Completion> {
        match &mut self.0 {
            Receiver::Host(rx) => rx.poll(),
            Receiver::Wire(rx) => rx.poll(),
        }
    }

    /// Waits for the next completion, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        match &mut self.0 {
            Receiver::Host(rx) => rx.wait(timeout),
            Receiver::Wire(rx) => rx.wait(timeout),
        }
    }

    /// Gives a payload back to its sender at once.
    #[inline(always)]
    pub fn release(&mut self, payload: InPlace) {
        match &mut self.0 {
            Receiver::Host(rx) => rx.release(payload),
            Receiver::Wire(_) => forget_copy(payload),
        }
    }

    /// Starts recording pulses, the first `capacity` of them. There are none from another host.
    pub fn record_pulses(&mut self, capacity: usize) {
        if let Receiver::Host(rx) = &mut self.0 {
            rx.record_pulses(capacity);
        }
    }

    /// The pulses recorded so far.
    pub fn take_pulses(&mut self) -> Vec<PulseRecord> {
        match &mut self.0 {
            Receiver::Host(rx) => rx.take_pulses(),
            Receiver::Wire(_) => Vec::new(),
        }
    }
}
