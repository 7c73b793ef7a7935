//! The path to other hosts: work goes to an adapter and comes back, by a [`Line`].

pub(crate) mod stream;

use crate::bells::QueueShared;
use crate::config::{Reliability, ViOptions};
use crate::descriptor::{
    Completion, Control, InPlace, Message, Operation, Payload, PayloadToken, QUIET, RdmaRead, RdmaWrite, Receive,
    Target,
};
use crate::error::{Failure, GrantError, PostError, Refused, WaitError, WithdrawError};
use crate::halves::{RecvStats, SendStats};
use crate::host::remote::RemoteKey;
use crate::member::Member;
use crate::nic::NicInner;
use crate::spin::SpinRules;
use crate::vi::ViId;
use highwire_mem::work::{
    Carrier, Deed, Dispatch, Done, Errand, Fault, Line, Parcel, Place, Segment, Side, Terms, Work,
};
use highwire_mem::{CONTROL_BYTES_MAX, Exported, Frozen, Granted, Process, Region, Tag, deadline};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};
use std::time::{Duration, Instant};

/// What is known of a VI before it is connected.
pub(crate) struct Calling {
    id: ViId,
    queue: Arc<QueueShared>,
    pub line: Arc<Line>,
}

impl Calling {
    pub(crate) fn new(nic: &NicInner, options: &ViOptions<'_>) -> Calling {
        let queue = nic.queue_for(options);
        let id = ViId::next();
        let bell = queue.clone();
        Calling { id, queue, line: Arc::new(Line::new(move || bell.ring_locally(id))) }
    }

    /// The two halves of a VI whose line is connected.
    pub(crate) fn connected(
        self,
        nic: &Arc<NicInner>,
        options: &ViOptions<'_>,
    ) -> Option<(WireSender, WireReceiver, Arc<WireMember>)> {
        let Calling { id, queue, line } = self;
        let terms = line.terms()?.clone();
        let member = Arc::new(WireMember {
            id,
            process: nic.process,
            queue: queue.clone(),
            terms,
            line,
            outstanding: AtomicUsize::new(0),
            active: AtomicBool::new(false),
            muted: AtomicBool::new(false),
            ended: AtomicU32::new(0),
            halves: AtomicU32::new(2),
        });
        queue.join(Member::Wire(member.clone()));
        let tag = options.tag.unwrap_or(Tag(0));
        let tx = WireSender {
            member: member.clone(),
            nic: nic.clone(),
            tag,
            message_bytes_max: nic.config.message_bytes_max.min(member.terms.message_bytes_max),
            copied: 0,
            spare: Vec::new(),
            errands: 0,
            ended: None,
            stats: SendStats::default(),
        };
        let rx = WireReceiver {
            member: member.clone(),
            nic: nic.clone(),
            tag,
            posted: 0,
            expected: HashSet::new(),
            ended: None,
            stats: RecvStats::default(),
        };
        Some((tx, rx, member))
    }
}

/// How this side's messages go.
pub(crate) fn is_reliable(options: &ViOptions<'_>) -> bool {
    options.reliability != Reliability::Unreliable
}

/// What the halves of a VI and its completion queue share.
#[derive(Debug)]
pub(crate) struct WireMember {
    pub id: ViId,
    pub process: Process,
    pub queue: Arc<QueueShared>,
    pub terms: Terms,
    pub line: Arc<Line>,
    /// Messages posted whose completion was not taken. Only the sending half writes it.
    outstanding: AtomicUsize,
    pub active: AtomicBool,
    /// Its queue is not to tell of what came.
    pub muted: AtomicBool,
    /// Halves that have noticed the end, of those that exist.
    ended: AtomicU32,
    halves: AtomicU32,
}

impl WireMember {
    pub(crate) fn carrier(&self) -> &Arc<dyn Carrier> {
        &self.terms.carrier
    }

    /// Looks at the network for everybody.
    pub(crate) fn attend(&self) {
        let handed = self.carrier().attend(false);
        debug_assert!(handed.is_none(), "nobody asked for it");
    }

    pub(crate) fn ready(&self) -> bool {
        self.line.has_done(Side::Sent) || self.line.has_done(Side::Received) || self.end_unnoticed()
    }

    fn end_unnoticed(&self) -> bool {
        self.line.ended().is_some() && self.ended.load(SeqCst) < self.halves.load(SeqCst)
    }

    fn count_outstanding(&self, change: isize) {
        let outstanding = self.outstanding.load(Relaxed).wrapping_add_signed(change);
        self.outstanding.store(outstanding, Release);
    }

    /// Why the connection is over, if it is.
    pub(crate) fn end(&self) -> Option<Failure> {
        self.line.ended().map(failure)
    }

    /// Whether something may be posted.
    fn check_open(&self) -> Result<(), PostError> {
        if !self.process.is_this() {
            return Err(PostError::ForkedChild);
        }
        self.end().map_or(Ok(()), |failure| Err(PostError::NotConnected(failure)))
    }

    /// A half with so much outstanding found nothing: `ended` is set once the connection is over and everything
    /// is back, what was posted while the end came too.
    fn notice_end(&self, ended: &mut Option<Failure>, outstanding: usize) {
        if ended.is_none()
            && outstanding == 0
            && let Some(failure) = self.end()
        {
            *ended = Some(failure);
            self.ended.fetch_add(1, SeqCst);
        }
    }

    /// Waits until `look` finds something. It is told whether to attend to the network, or only to look at what
    /// is done.
    pub(crate) fn wait_for<T>(
        &self,
        spin: &SpinRules,
        timeout: Duration,
        mut look: impl FnMut(bool) -> Option<T>,
    ) -> Result<T, WaitError> {
        if !self.process.is_this() {
            return Err(WaitError::ForkedChild);
        }
        let deadline = deadline(timeout);
        // Once: whoever has slept is woken by each packet of a long message, and each look is a system call.
        if let Some(found) = spin.spin(deadline, |_| false, || look(true)) {
            return Ok(found);
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return look(true).ok_or(WaitError::TimedOut(timeout));
            }
            let mut found = None;
            let mut look_once = || {
                found = look(false);
                found.is_some()
            };
            if !self.carrier().rest(left, &mut look_once) {
                let announce = |asleep| self.carrier().hand_over(asleep);
                found = self.queue.sleep(&[], Some(left), announce, || look(true)).ok();
            }
            if let Some(found) = found.or_else(|| look(true)) {
                return Ok(found);
            }
        }
    }

    /// A half is gone; with the last one the connection ends.
    fn half_dropped(&self, noticed: bool) {
        if !self.process.is_this() {
            return;
        }
        if noticed {
            // It does not count for the other half.
            self.ended.fetch_sub(1, SeqCst);
        }
        if self.halves.fetch_sub(1, SeqCst) > 1 {
            return;
        }
        self.queue.part(self.id);
        self.carrier().close(self.outstanding.load(SeqCst));
    }
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct WireSender {
    member: Arc<WireMember>,
    nic: Arc<NicInner>,
    tag: Tag,
    message_bytes_max: u64,
    /// Bytes of copies that are on their way.
    copied: usize,
    /// Memory of copies that have come back, for the next.
    spare: Vec<Vec<u8>>,
    /// Writes and reads of remote memory that were posted.
    errands: u64,
    ended: Option<Failure>,
    stats: SendStats,
}

impl WireSender {
    pub(crate) fn member(&self) -> &Arc<WireMember> {
        &self.member
    }

    pub(crate) fn stats(&self) -> SendStats {
        self.stats
    }

    pub(crate) fn ended(&self) -> Option<Failure> {
        self.ended
    }

    fn check(&mut self, bytes: u64) -> Result<(), PostError> {
        self.member.check_open()?;
        let limit = self.nic.config.descriptors_max;
        if self.member.outstanding.load(SeqCst) >= limit {
            return Err(PostError::QueueFull { limit });
        }
        if bytes > self.message_bytes_max {
            return Err(PostError::TooLong { bytes, limit: self.message_bytes_max });
        }
        Ok(())
    }

    // Away from the path between processes, which is counted in nanoseconds.
    #[cold]
    #[inline(never)]
    pub(crate) fn post_send(&mut self, message: Message) -> Result<(), Refused<Message>> {
        let total = message.payload.total();
        let checked = self.check(total).and_then(|()| {
            message.payload.check_tags(self.tag)?;
            message.payload.check_segments()?;
            match message.control_given {
                bytes if bytes > CONTROL_BYTES_MAX => Err(PostError::ControlTooLong { bytes }),
                _ => Ok(()),
            }
        });
        if let Err(reason) = checked {
            return Err(Refused { reason, descriptor: message });
        }
        let Message { token, control, immediate, payload, .. } = message;
        let payload_token = control.token().map(|token| token.0);
        let parcel = parcel(payload);
        let (control, after) = (control.to_vec(), self.errands);
        self.post(Dispatch { token, control, immediate, payload_token, after, parcel }, total);
        Ok(())
    }

    // Away from the path between processes, which is counted in nanoseconds.
    #[cold]
    #[inline(never)]
    pub(crate) fn send_bytes(&mut self, token: u64, bytes: &[u8]) -> Result<(), PostError> {
        let limit = self.nic.config.payload_bytes_max;
        if bytes.len() > limit {
            return Err(PostError::TooLong { bytes: bytes.len() as u64, limit: limit as u64 });
        }
        let no_room = PostError::NoRoom { bytes: bytes.len() };
        self.check(bytes.len() as u64).map_err(|error| match error {
            PostError::QueueFull { .. } => no_room.clone(),
            error => error,
        })?;
        if self.copied + bytes.len() > limit {
            return Err(no_room);
        }
        self.copied += bytes.len();
        let parcel = if bytes.is_empty() { Parcel::Empty } else { Parcel::Bytes(self.copy(bytes)) };
        let (control, after) = (Vec::new(), self.errands);
        let dispatch = Dispatch { token, control, immediate: 0, payload_token: None, after, parcel };
        self.post(dispatch, bytes.len() as u64);
        Ok(())
    }

    fn copy(&mut self, bytes: &[u8]) -> Vec<u8> {
        if bytes.len() <= SPARE_BYTES
            && let Some(mut copy) = self.spare.pop()
        {
            copy.extend_from_slice(bytes);
            return copy;
        }
        bytes.to_vec()
    }

    /// A copy has come back.
    fn keep_spare(&mut self, mut copy: Vec<u8>) {
        self.copied -= copy.len();
        if copy.capacity() <= SPARE_BYTES && self.spare.len() < SPARES_MAX {
            copy.clear();
            self.spare.push(copy);
        }
    }

    fn post(&mut self, dispatch: Dispatch, bytes: u64) {
        self.stats.messages += 1;
        self.stats.bytes += bytes;
        self.member.count_outstanding(1);
        self.member.carrier().post(&self.member.line, Work::Send(dispatch));
    }

    /// Checks what can be known here; the owner's adapter checks the rest, and this again.
    fn check_remote(&mut self, key: RemoteKey, offset: u64, bytes: u64) -> Result<(), PostError> {
        self.check(bytes)?;
        if key.tag != self.tag {
            return Err(PostError::WrongTag { buffer: key.tag, vi: self.tag });
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= key.bytes => Ok(()),
            _ => Err(PostError::OutOfRange { offset, bytes, region_bytes: key.bytes }),
        }
    }

    pub(crate) fn rdma_write(&mut self, write: RdmaWrite) -> Result<(), Refused<RdmaWrite>> {
        let checked = self.check_remote(write.key, write.offset, write.payload.total());
        if let Err(reason) = checked.and_then(|()| write.payload.check_tags(self.tag)) {
            return Err(Refused { reason, descriptor: write });
        }
        let RdmaWrite { token, key, offset, immediate, payload } = write;
        let (handle, tag, parcel) = (key.region, key.tag, parcel(payload));
        self.post_errand(Work::Write(Errand { token, handle, tag, offset, immediate, parcel }));
        Ok(())
    }

    pub(crate) fn rdma_read(&mut self, read: RdmaRead) -> Result<(), Refused<RdmaRead>> {
        let checked = self.check_remote(read.key, read.offset, read.into.len() as u64);
        let checked = checked.and_then(|()| match read.into.tag() {
            tag if tag == self.tag => Ok(()),
            buffer => Err(PostError::WrongTag { buffer, vi: self.tag }),
        });
        if let Err(reason) = checked {
            return Err(Refused { reason, descriptor: read });
        }
        let RdmaRead { token, key, offset, into } = read;
        let (handle, tag, parcel) = (key.region, key.tag, Parcel::Buffer(into));
        self.post_errand(Work::Read(Errand { token, handle, tag, offset, immediate: None, parcel }));
        Ok(())
    }

    pub(crate) fn request_fast(&self) {
        if self.member.process.is_this() && self.member.end().is_none() {
            self.member.carrier().request_fast();
        }
    }

    fn post_errand(&mut self, work: Work) {
        self.errands += 1;
        self.member.count_outstanding(1);
        self.member.carrier().post(&self.member.line, work);
    }

    pub(crate) fn grant(&self, region: &Region) -> Result<RemoteKey, GrantError> {
        self.check_grant(region.tag())?;
        if region.is_freezable() {
            return Err(GrantError::NotFrozenYet);
        }
        self.hand_to_adapter(Granted::registered(region).map_err(|error| GrantError::Memory(error.to_string()))?)
    }

    pub(crate) fn grant_exported(&self, region: &Exported) -> Result<RemoteKey, GrantError> {
        self.check_grant(region.tag())?;
        self.hand_to_adapter(Granted::exported(region))
    }

    pub(crate) fn grant_frozen(&self, region: &Frozen) -> Result<RemoteKey, GrantError> {
        self.check_grant(region.tag())?;
        self.hand_to_adapter(Granted::frozen(region))
    }

    fn check_grant(&self, region: Tag) -> Result<(), GrantError> {
        match self.usable() {
            Err(failure) => Err(GrantError::NotConnected(failure)),
            Ok(()) if region != self.tag => Err(GrantError::WrongTag { region, vi: self.tag }),
            Ok(()) => Ok(()),
        }
    }

    fn usable(&self) -> Result<(), Failure> {
        let foreign = (!self.member.process.is_this()).then_some(Failure::ForkedChild);
        foreign.or_else(|| self.member.end()).map_or(Ok(()), Err)
    }

    fn hand_to_adapter(&self, memory: Granted) -> Result<RemoteKey, GrantError> {
        let key = RemoteKey { region: memory.handle(), tag: memory.tag(), bytes: memory.len() as u64 };
        self.member.carrier().grant(memory).map_err(|limit| GrantError::TooMany { limit })?;
        Ok(key)
    }

    pub(crate) fn withdraw(&self, key: &RemoteKey) -> Result<(), WithdrawError> {
        self.usable().map_err(WithdrawError::NotConnected)?;
        match self.member.carrier().withdraw(key.region) {
            true => Ok(()),
            false => Err(WithdrawError::NotGranted { region: key.region }),
        }
    }

    // Away from the path between processes, which is counted in nanoseconds.
    #[cold]
    #[inline(never)]
    pub(crate) fn poll(&mut self) -> Option<Completion> {
        if !self.member.process.is_this() {
            return None;
        }
        if !self.member.line.has_done(Side::Sent) {
            self.member.attend();
        }
        self.take()
    }

    /// What is done, without looking at the network.
    pub(crate) fn take(&mut self) -> Option<Completion> {
        loop {
            let done = self.take_any()?;
            if done.token != QUIET || done.operation != Operation::Send || done.status.is_err() {
                return Some(done);
            }
        }
    }

    fn take_any(&mut self) -> Option<Completion> {
        let Some(done) = self.member.line.take(Side::Sent) else {
            self.member.notice_end(&mut self.ended, self.member.outstanding.load(SeqCst));
            return None;
        };
        self.member.count_outstanding(-1);
        let payload = match done.parcel {
            Parcel::Empty => Payload::None,
            Parcel::Buffer(buffer) => Payload::Buffer(buffer),
            Parcel::Segments(segments) => Payload::Segments(segments),
            Parcel::Bytes(bytes) => {
                self.keep_spare(bytes);
                Payload::None
            }
            Parcel::Window(_) | Parcel::Written(_) => Payload::None,
        };
        let operation = match done.deed {
            Deed::Message => Operation::Send,
            Deed::Write => Operation::RdmaWrite,
            Deed::Read => Operation::RdmaRead,
        };
        Some(Completion {
            token: done.token,
            operation,
            status: done.status.map_err(failure),
            length: done.length,
            immediate: 0,
            control: Control::EMPTY,
            payload,
        })
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        let (member, nic) = (self.member.clone(), self.nic.clone());
        member.wait_for(&nic.spin, timeout, |attend| {
            let polled = if attend { self.poll() } else { self.take() }.map(Ok);
            polled.or_else(|| self.ended.map(|failure| Err(WaitError::NotConnected(failure))))
        })?
    }

    pub(crate) fn flush(&mut self, timeout: Duration) -> Result<(), WaitError> {
        let (member, nic) = (self.member.clone(), self.nic.clone());
        member.wait_for(&nic.spin, timeout, |attend| {
            if member.outstanding.load(SeqCst) <= member.line.done_count(Side::Sent) {
                // What came back undone is not with the peer.
                let failed = member.line.failed(Side::Sent);
                return Some(failed.map_or(Ok(()), |fault| Err(WaitError::NotConnected(failure(fault)))));
            }
            if let Some(failure) = member.end() {
                return Some(Err(WaitError::NotConnected(failure)));
            }
            if attend {
                member.attend();
            }
            None
        })?
    }
}

impl Drop for WireSender {
    fn drop(&mut self) {
        self.member.half_dropped(self.ended.is_some());
    }
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct WireReceiver {
    member: Arc<WireMember>,
    nic: Arc<NicInner>,
    tag: Tag,
    /// Receives that did not come back, the expected ones too.
    posted: usize,
    expected: HashSet<u64>,
    ended: Option<Failure>,
    stats: RecvStats,
}

impl WireReceiver {
    pub(crate) fn member(&self) -> &Arc<WireMember> {
        &self.member
    }

    pub(crate) fn stats(&self) -> RecvStats {
        self.stats
    }

    pub(crate) fn ended(&self) -> Option<Failure> {
        self.ended
    }

    fn check(&self, receive: &Receive) -> Result<(), PostError> {
        self.member.check_open()?;
        let limit = self.nic.config.descriptors_max;
        if self.posted >= limit {
            return Err(PostError::QueueFull { limit });
        }
        receive.check(self.tag)
    }

    // Away from the path between processes, which is counted in nanoseconds.
    #[cold]
    #[inline(never)]
    pub(crate) fn post_recv(&mut self, receive: Receive) -> Result<(), Refused<Receive>> {
        if let Err(reason) = self.check(&receive) {
            return Err(Refused { reason, descriptor: receive });
        }
        self.post(Work::Receive(place(receive)));
        Ok(())
    }

    pub(crate) fn expect(&mut self, token: PayloadToken, receive: Receive) -> Result<(), Refused<Receive>> {
        let checked = self.check(&receive).and_then(|()| match self.expected.contains(&token.0) {
            true => Err(PostError::TokenInUse(token.0)),
            false => Ok(()),
        });
        if let Err(reason) = checked {
            return Err(Refused { reason, descriptor: receive });
        }
        self.expected.insert(token.0);
        self.post(Work::Expect(token.0, place(receive)));
        Ok(())
    }

    fn post(&mut self, work: Work) {
        self.posted += 1;
        self.member.carrier().post(&self.member.line, work);
    }

    pub(crate) fn revoke(&mut self, token: PayloadToken) -> Option<Receive> {
        if !self.member.process.is_this() || !self.expected.contains(&token.0) {
            return None;
        }
        let Place { token: mark, parcel, .. } = self.member.carrier().revoke(token.0)?;
        self.expected.remove(&token.0);
        self.posted -= 1;
        let target = match parcel {
            Parcel::Empty => Target::Nowhere,
            Parcel::Buffer(buffer) => Target::Buffer(buffer),
            Parcel::Segments(segments) => {
                let buffers = segments.into_vec().into_iter().filter_map(|segment| match segment {
                    Segment::Buffer(buffer) => Some(buffer),
                    Segment::Shared(_) | Segment::Frozen(..) => None,
                });
                Target::Scatter(buffers.collect())
            }
            Parcel::Bytes(_) => Target::InPlace,
            Parcel::Window(_) | Parcel::Written(_) => Target::Nowhere,
        };
        Some(Receive { token: mark, target })
    }

    // Away from the path between processes, which is counted in nanoseconds.
    #[cold]
    #[inline(never)]
    pub(crate) fn poll(&mut self) -> Option<Completion> {
        if !self.member.process.is_this() {
            return None;
        }
        if !self.member.line.has_done(Side::Received)
            && let Some(done) = self.attend()
        {
            return Some(done);
        }
        self.take()
    }

    /// Looks at the network; what came may be handed over at once.
    pub(crate) fn attend(&mut self) -> Option<Completion> {
        let done = self.member.carrier().attend(true)?;
        Some(self.hand_out(done))
    }

    /// What is done, without looking at the network.
    pub(crate) fn take(&mut self) -> Option<Completion> {
        let Some(done) = self.member.line.take(Side::Received) else {
            self.member.notice_end(&mut self.ended, self.posted);
            return None;
        };
        Some(self.hand_out(done))
    }

    fn hand_out(&mut self, done: Done) -> Completion {
        self.posted -= 1;
        let Done { deed: _, token, status, length, immediate, control, payload_token, parcel } = done;
        if let Some(token) = payload_token {
            self.expected.remove(&token);
        }
        if status.is_ok() {
            self.stats.messages += 1;
            self.stats.bytes += length as u64;
        }
        let payload = match parcel {
            Parcel::Empty => Payload::None,
            Parcel::Buffer(buffer) => Payload::Buffer(buffer),
            Parcel::Segments(segments) => Payload::Segments(segments),
            Parcel::Bytes(bytes) if status.is_ok() => Payload::InPlace(InPlace::copied(bytes)),
            Parcel::Bytes(_) | Parcel::Window(_) | Parcel::Written(_) => Payload::None,
        };
        let mut control = Control::new(&control).unwrap_or_default();
        control.set_token(payload_token.map(PayloadToken));
        let status = status.map_err(failure);
        Completion { token, operation: Operation::Receive, status, length, immediate, control, payload }
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        let (member, nic) = (self.member.clone(), self.nic.clone());
        member.wait_for(&nic.spin, timeout, |attend| {
            let polled = if attend { self.poll() } else { self.take() }.map(Ok);
            polled.or_else(|| self.ended.map(|failure| Err(WaitError::NotConnected(failure))))
        })?
    }
}

impl Drop for WireReceiver {
    fn drop(&mut self) {
        self.member.half_dropped(self.ended.is_some());
    }
}

fn place(receive: Receive) -> Place {
    let Receive { token, target } = receive;
    let parcel = match target {
        Target::Nowhere => Parcel::Empty,
        Target::Buffer(buffer) => Parcel::Buffer(buffer),
        Target::Scatter(buffers) => Parcel::Segments(buffers.into_iter().map(Segment::Buffer).collect()),
        Target::InPlace => Parcel::Bytes(Vec::new()),
    };
    Place { token, parcel, limit: usize::MAX }
}

fn parcel(payload: Payload) -> Parcel {
    match payload {
        Payload::None | Payload::InPlace(_) => Parcel::Empty,
        Payload::Buffer(buffer) => Parcel::Buffer(buffer),
        Payload::Segments(segments) => Parcel::Segments(segments),
    }
}

fn failure(fault: Fault) -> Failure {
    match fault {
        Fault::Closed => Failure::Closed,
        Fault::PeerClosed => Failure::PeerClosed,
        Fault::PeerAborted => Failure::PeerAborted,
        Fault::Silence(after) => Failure::PeerSilent(after),
        Fault::KeysUsedUp => Failure::KeysUsedUp,
        Fault::NotSealed => Failure::NotSealed,
        Fault::KeyRemoved => Failure::KeyRemoved,
        Fault::Restored => Failure::Restored,
        Fault::TooLong { message, place } => Failure::TooLong { message, buffer: place },
        Fault::Denied(denial) => Failure::Denied(denial),
    }
}

/// Copies whose memory is kept for the next: small ones, for which it would be asked most often.
const SPARE_BYTES: usize = 4096;
const SPARES_MAX: usize = 64;
