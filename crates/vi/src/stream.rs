//! A VI used as two streams of bytes, one each way, beneath sockets.
//!
//! Its messages are parts of a stream: who writes them and who reads them cut them differently. A *mark* says something
//! beside the bytes, in its place among them: that there are no more, for instance.

use crate::ears;
use crate::error::{Failure, PostError, WaitError};
use crate::halves::{Receiver, SendStats, Sender};
use crate::host::recv::stream::HostStreamReceiver;
use crate::host::send::stream::HostStreamSender;
use crate::member::Member;
use crate::nic::NicInner;
use crate::vi::{PeerId, Vi, ViId};
use crate::wire::stream::{WireStreamReceiver, WireStreamSender};
use highwire_mem::{Bell, Lie, WireUse};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How a stream's bytes become messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRules {
    /// Messages that the reader has not given back, at most.
    pub window: u32,
    /// The reader gives them back when it has so many, and when it has read all.
    pub acknowledge: u32,
    /// Bytes of a message, at most.
    pub chunk_bytes: usize,
    /// Whether what is written goes into the last message, while that has room.
    pub combining: Combining,
}

/// When what is written is combined with what was written before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Combining {
    /// Never: every write is a message, and waits for the window.
    Never,
    /// When the window is full: until then every write is a message.
    WhenFull,
    /// While the reader is behind; for an idle one every write is a message.
    #[default]
    WhileBusy,
}

/// What a look at a stream found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Taken {
    /// So many bytes, which are where they were asked for.
    Bytes(usize),
    /// A mark, not 0, that was set behind all bytes read so far.
    Mark(u32),
    /// Nothing now.
    Nothing,
    /// Nothing any more.
    Ended(Failure),
}

/// The writing end of a stream. It belongs to one thread at a time.
#[derive(Debug)]
pub struct StreamSender(SenderPath);

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the fast path is to be where the stream is")]
enum SenderPath {
    Host(HostStreamSender),
    Wire(WireStreamSender),
}

impl StreamSender {
    /// Takes a copy of as many of `bytes` as there is room for, which is at least one, or refuses with
    /// [`PostError::NoRoom`]. On one host the reader sees them when this returns, even if this process dies.
    #[inline(always)]
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, PostError> {
        match &mut self.0 {
            SenderPath::Host(tx) => tx.write(bytes),
            SenderPath::Wire(tx) => tx.write(bytes),
        }
    }

    /// Sets a mark, which is not 0, behind everything written so far. Windows do not hold it back.
    pub fn mark(&mut self, mark: u32) -> Result<(), PostError> {
        match &mut self.0 {
            SenderPath::Host(tx) => tx.mark(mark),
            SenderPath::Wire(tx) => tx.mark(mark),
        }
    }

    /// True if a byte could be written now, or an error would come at once.
    pub fn has_room(&mut self) -> bool {
        match &mut self.0 {
            SenderPath::Host(tx) => tx.has_room(),
            SenderPath::Wire(tx) => tx.has_room(),
        }
    }

    /// Has a completion queue tell of the VI when there may be room. To other hosts it always does.
    pub fn await_room(&mut self) {
        if let SenderPath::Host(tx) = &mut self.0 {
            tx.await_room();
        }
    }

    /// True if everything that was written is with the other side, or on one host where it can be read.
    pub fn is_delivered(&mut self) -> bool {
        match &mut self.0 {
            SenderPath::Host(_) => true,
            SenderPath::Wire(tx) => tx.is_delivered(),
        }
    }

    /// Why nothing can be written any more, if that is so.
    pub fn ended(&mut self) -> Option<Failure> {
        match &mut self.0 {
            SenderPath::Host(tx) => tx.ended(),
            SenderPath::Wire(tx) => tx.ended(),
        }
    }

    /// Changes when writes are combined.
    pub fn set_combining(&mut self, combining: Combining) {
        match &mut self.0 {
            SenderPath::Host(tx) => tx.set_combining(combining),
            SenderPath::Wire(tx) => tx.set_combining(combining),
        }
    }

    /// What it has done so far: messages, and bytes in them.
    pub fn stats(&self) -> SendStats {
        match &self.0 {
            SenderPath::Host(tx) => tx.stats(),
            SenderPath::Wire(tx) => tx.stats(),
        }
    }
}

/// The reading end of a stream. It belongs to one thread at a time.
#[derive(Debug)]
pub struct StreamReceiver(ReceiverPath);

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "the fast path is to be where the stream is")]
enum ReceiverPath {
    Host(HostStreamReceiver),
    Wire(WireStreamReceiver),
}

impl StreamReceiver {
    /// Takes what there is, up to the length of `into`, which is not 0. A mark comes alone.
    #[inline(always)]
    pub fn read(&mut self, into: &mut [u8]) -> Taken {
        match &mut self.0 {
            ReceiverPath::Host(rx) => rx.read(into),
            ReceiverPath::Wire(rx) => rx.read(into),
        }
    }

    /// True if the next look finds something: bytes, a mark, the end.
    pub fn has_more(&mut self) -> bool {
        match &mut self.0 {
            ReceiverPath::Host(rx) => rx.has_more(),
            ReceiverPath::Wire(rx) => rx.has_more(),
        }
    }

    /// Why nothing comes any more, once everything was read.
    pub fn ended(&self) -> Option<Failure> {
        match &self.0 {
            ReceiverPath::Host(rx) => rx.ended(),
            ReceiverPath::Wire(rx) => rx.ended(),
        }
    }
}

/// What the two ends of a process know of each other: whether the two sides talk in turn.
#[derive(Debug, Default)]
pub(crate) struct Talk {
    /// Something was read since something was written.
    heard: AtomicBool,
    /// Something was written since something was read.
    said: AtomicBool,
}

impl Talk {
    /// Something is written: true if something was read since the last time.
    #[inline(always)]
    pub(crate) fn note_said(&self) -> bool {
        note(&self.said, &self.heard)
    }

    /// Something was read: true if something was written since the last time.
    #[inline(always)]
    pub(crate) fn note_heard(&self) -> bool {
        note(&self.heard, &self.said)
    }
}

/// Written only where it changes: the two ends may be in the hands of two threads.
#[inline(always)]
fn note(this: &AtomicBool, other: &AtomicBool) -> bool {
    if !this.load(Relaxed) {
        this.store(true, Relaxed);
    }
    let turned = other.load(Relaxed);
    if turned {
        other.store(false, Relaxed);
    }
    turned
}

/// Waits for either end of a stream, for any number of threads and for a descriptor.
#[derive(Debug)]
pub struct StreamWatch {
    member: Member,
    nic: Arc<NicInner>,
    peer: PeerId,
    signal: Arc<Signal>,
}

/// The descriptor, and what it shows.
#[derive(Debug, Default)]
struct Signal {
    /// Somebody asked for the descriptor.
    used: AtomicBool,
    /// Ears and wire, where the doorbell has none that are for this stream alone.
    pair: OnceLock<(OwnedFd, OwnedFd)>,
    armed: Mutex<WireUse>,
}

impl Vi {
    /// The VI as two streams of bytes. Both sides have to, before anything is sent; there are no messages any more.
    pub fn into_stream(self, rules: &StreamRules) -> (StreamSender, StreamReceiver, StreamWatch) {
        let (member, nic, peer) = (self.member().clone(), self.nic().clone(), self.peer());
        let (tx, rx) = self.split();
        let (sender, receiver) = match (tx.0, rx.0) {
            (Sender::Host(tx), Receiver::Host(rx)) => {
                let talk = Arc::<Talk>::default();
                let sender = SenderPath::Host(HostStreamSender::new(tx, rules, talk.clone()));
                (sender, ReceiverPath::Host(HostStreamReceiver::new(rx, rules, talk)))
            }
            (Sender::Wire(tx), Receiver::Wire(rx)) => {
                let sender = SenderPath::Wire(WireStreamSender::new(*tx, rules));
                (sender, ReceiverPath::Wire(WireStreamReceiver::new(*rx, rules)))
            }
            _ => unreachable!("the halves of a VI take one path"),
        };
        let signal = Arc::new(Signal::default());
        let watch = StreamWatch { member, nic, peer, signal };
        watch.listen(&sender);
        (StreamSender(sender), StreamReceiver(receiver), watch)
    }
}

impl StreamWatch {
    /// Has everything done that is to be done when somebody in this process rings: an adapter, or the watcher of a peer.
    fn listen(&self, sender: &SenderPath) {
        let queue = self.member.queue();
        if !queue.own {
            return;
        }
        let (member, signal) = (self.member.downgrade(), Arc::downgrade(&self.signal));
        let flush = match sender {
            SenderPath::Host(_) => None,
            SenderPath::Wire(tx) => Some(tx.flusher()),
        };
        queue.set_hook(move || {
            let ends = member.upgrade().zip(signal.upgrade());
            // What has arrived is taken by the flush.
            let may_write = ends.as_ref().is_some_and(|(member, _)| member.may_write());
            if let Some(flush) = &flush {
                flush();
            }
            if let Some((member, signal)) = ends {
                signal.ring(&member, may_write);
            }
        });
    }

    /// Who is at the other end.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// Where this end is, if the other is on another host.
    pub fn local(&self) -> Option<SocketAddr> {
        match &self.member {
            Member::Host(_) => None,
            Member::Wire(member) => Some(member.terms.local),
        }
    }

    /// Its VI, as a [`crate::Notify`] names it.
    pub fn id(&self) -> ViId {
        self.member.id()
    }

    /// Keeps a completion queue from telling of what came, or no longer. Whoever lifts that has to look then. True if
    /// it was kept from that.
    pub fn mute(&self, muted: bool) -> bool {
        self.member.muted().swap(muted, SeqCst)
    }

    /// Whether a look or two may bring something: not while a peer on this host cannot run.
    #[inline]
    pub fn worth_a_glance(&self) -> bool {
        match &self.member {
            Member::Host(member) => member.worth_a_glance(),
            Member::Wire(_) => false,
        }
    }

    /// Waits until `look` finds something, spinning and sleeping by the rules. Any end of the stream may be looked at.
    pub fn wait_for<T>(&self, timeout: Duration, look: impl FnMut() -> Option<T>) -> Result<T, WaitError> {
        self.member.wait_for(&self.nic.spin, timeout, look)
    }

    /// Has everybody who waits look again.
    pub fn wake(&self) {
        self.member.wake();
    }

    /// A descriptor for poll, epoll and the like: readable and writable as [`StreamWatch::show_readable`] and
    /// [`StreamWatch::show_writable`] said last, or as the peer has made it since. The first call has effects: from
    /// then on both must be called after every look.
    pub fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.signal.prepare(&self.member)?;
        if !self.signal.used.swap(true, SeqCst)
            && let Member::Wire(member) = &self.member
        {
            // Whoever looks at the descriptor does not look at the network.
            member.carrier().hand_over(true);
        }
        let (ears, _) = self.signal.ends(&self.member).ok_or(io::ErrorKind::NotFound)?;
        Ok(ears.as_fd())
    }

    /// True once somebody has asked for the descriptor.
    #[inline]
    pub fn is_descriptor_used(&self) -> bool {
        self.signal.used.load(SeqCst)
    }

    /// A peer that has shut the wire down would have whoever polls look without end.
    fn see_to_wire(&self, sound: bool) {
        if !sound && let Member::Host(member) = &self.member {
            member.break_off(Failure::PeerLied(Lie::BadHandover));
        }
    }

    /// Says whether there is something to read. If not, it has to be looked once more after this: what came before is
    /// not shown, what comes after is.
    pub fn show_readable(&self, readable: bool) {
        let Some((ears, wire)) = self.signal.ends(&self.member) else { return };
        let mut armed = self.signal.armed();
        if readable {
            self.signal.arm(&self.member, &mut armed, |armed| armed.without(WireUse::SLOTS));
            ears::set_readable(wire);
        } else {
            self.see_to_wire(ears::clear_readable(ears));
            self.signal.arm(&self.member, &mut armed, |armed| armed.with(WireUse::SLOTS));
        }
    }

    /// Says whether there is room to write; the same holds.
    pub fn show_writable(&self, writable: bool) {
        let Some((ears, wire)) = self.signal.ends(&self.member) else { return };
        let mut armed = self.signal.armed();
        if writable {
            self.signal.arm(&self.member, &mut armed, |armed| armed.without(WireUse::CREDIT));
            ears::set_writable(wire);
        } else {
            self.see_to_wire(ears::clear_writable(ears));
            self.signal.arm(&self.member, &mut armed, |armed| armed.with(WireUse::CREDIT));
        }
    }
}

impl Signal {
    fn armed(&self) -> MutexGuard<'_, WireUse> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prepare(&self, member: &Member) -> io::Result<()> {
        if self.ends(member).is_none() {
            let pair = ears::wire(true)?;
            let _ = self.pair.set(pair);
        }
        Ok(())
    }

    /// Ears and wire: the doorbell's, where it is for this stream alone, and the peer has the wire.
    fn ends<'a>(&'a self, member: &'a Member) -> Option<(&'a OwnedFd, &'a OwnedFd)> {
        match member {
            Member::Host(member) if member.queue.own => Some((&member.home.ears, &member.home.wire)),
            _ => self.pair.get().map(|(ears, wire)| (ears, wire)),
        }
    }

    /// Asks whoever brings news to use the wire, or no longer.
    fn arm(&self, member: &Member, armed: &mut WireUse, change: impl FnOnce(WireUse) -> WireUse) {
        let (before, now) = (*armed, change(*armed));
        if before == now {
            return;
        }
        *armed = now;
        let queue = member.queue();
        if !queue.own {
            // Whoever handles its messages shows what there is.
            return;
        }
        if before.is_any() != now.is_any() {
            queue.count_sleeper(now.is_any());
            member.set_attention(now.is_any());
        }
        if let Member::Host(member) = member {
            member.home.bell.arm(now);
        }
        if now.is_any() {
            Bell::settle();
        }
    }

    /// Somebody in this process has rung: an adapter has brought something, or a peer is gone.
    fn ring(&self, member: &Member, may_write: bool) {
        if !self.used.load(SeqCst) {
            return;
        }
        let Some((_, wire)) = self.ends(member) else { return };
        // Whoever has it waits for nothing but the kernel.
        let armed = self.armed();
        if armed.has(WireUse::SLOTS) && member.may_read() {
            ears::set_readable(wire);
        }
        if armed.has(WireUse::CREDIT) && may_write {
            ears::set_writable(wire);
        }
    }
}

impl Drop for StreamWatch {
    fn drop(&mut self) {
        if !self.member.process().is_this() {
            return;
        }
        let mut armed = self.signal.armed();
        self.signal.arm(&self.member, &mut armed, |_| WireUse::NOT);
        if self.signal.used.load(SeqCst)
            && let Member::Wire(member) = &self.member
        {
            member.carrier().hand_over(false);
        }
    }
}
