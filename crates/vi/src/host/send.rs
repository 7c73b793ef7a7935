//! The sending half of a VI.
//!
//! A message goes by the first of these ways that fits: *inline*, in the slot; *referenced*, its
//! buffers read by the receiver where they are; *buffered*, copied into this side's payload area,
//! large ones in pulses so that the receiver copies out while we still copy in.
//!
//! ```text
//!  post_send ──▶ pending ──▶ published ──▶ consumed ──┬──▶ freed      (inline, buffered: done at
//!                  │ no room    slot is visible       │                publication; referenced and
//!                  ▼ waits                            └──▶ held ──▶    reliable reception: done
//!               next poll                               released      when freed or consumed)
//!  any state ── the peer dies, closes, lies ──▶ ended: every message comes back with the reason
//! ```

pub(crate) mod stream;

use crate::config::{Path, Reliability, ViOptions};
use crate::descriptor::{Completion, Control, Message, Operation, Payload, PayloadToken, QUIET, RdmaRead, RdmaWrite};
use crate::error::{Failure, GrantError, PostError, Refused, WaitError};
use crate::halves::SendStats;
use crate::host::flight::{Finish, Flights, InFlight};
use crate::host::gather::{Prefix, SPAN_BYTES, for_each_segment, slices, span};
use crate::host::member::HostMember;
use crate::host::pulse_log::{PulseLog, PulseRecord};
use crate::host::remote::RemoteKey;
use crate::nic::NicInner;
use crate::vi::ViId;
use highwire_mem::work::Segment;
use highwire_mem::{
    BellRope, Buffer, CONTENT_BYTES, CONTROL_BYTES_MAX, Exported, Extent, Flags, Frozen, Kind, Lie, LoanBook, News,
    PayloadArea, Region, RemoteRegion, SlotHead, SlotWriter, Tag,
};
use highwire_pulse::{Pulse, Pulses};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A message that is referred to: its buffer comes back on the reader's word, who need not say so
/// while further messages are there.
const REFERENCE: Flags = Flags::WHOLE.with(Flags::SOON);
/// So many slots that the reader has yet to come to are a stream.
const STREAM_SLOTS: u64 = 4;
/// A lap is to be at least so many messages long.
const MESSAGES_TO_A_LAP: usize = 4;
/// A piece of the payload area is not worth having below this.
const PIECE_BYTES_LEAST: usize = 16 << 10;

/// The sending half. It belongs to one thread at a time.
#[derive(Debug)]
pub(crate) struct HostSender {
    member: Arc<HostMember>,
    nic: Arc<NicInner>,
    writer: SlotWriter,
    rope: Arc<BellRope>,
    area: PayloadArea,
    pulse: Pulse,
    reliability: Reliability,
    path: Path,
    tag: Tag,
    descriptors_max: usize,
    message_bytes_max: u64,
    pending: VecDeque<Outgoing>,
    in_flight: Flights,
    loans: LoanBook<Loan>,
    /// Messages in flight or on loan whose completion is still to come.
    finishing: usize,
    done: VecDeque<Completion>,
    ended: Option<Failure>,
    /// A message was copied since a look for completions found nothing: the application sends one
    /// after the other.
    in_a_row: bool,
    /// A send was refused for want of room, and its sender waits for some.
    wanting: bool,
    /// The region that was handed over last: the common case needs no lock.
    given: u32,
    /// Laps of the payload area that were taken note of.
    laps: u64,
    stats: SendStats,
    pulses: PulseLog,
}

/// A message that is not published in full.
#[derive(Debug)]
struct Outgoing {
    message: Message,
    way: Way,
    total: usize,
    sent: usize,
    /// The piece of the payload area being filled, and how much of it is.
    piece: Option<(Extent, usize)>,
    /// Bytes copied into the piece but not published yet.
    buffered: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Inline,
    Buffered,
    Referenced,
    /// Remote memory was written; only the news of it goes.
    Written,
    /// Through the slots alone: there is no payload area to be had.
    Slots,
}

#[derive(Debug)]
struct Loan {
    extent: Option<u64>,
    finish: Option<Finish>,
}

enum Advance {
    Finished,
    Blocked(Outgoing),
}

impl HostSender {
    pub(crate) fn new(
        member: Arc<HostMember>,
        nic: Arc<NicInner>,
        writer: SlotWriter,
        loans: LoanBookParts,
        rope: Arc<BellRope>,
        options: &ViOptions<'_>,
    ) -> HostSender {
        let pulse = Pulse::new(options.pulses, nic.config.minpulse);
        let in_flight = Flights::new(member.block.shape().depth());
        let (descriptors_max, message_bytes_max) = (nic.config.descriptors_max, nic.config.message_bytes_max);
        HostSender {
            member,
            nic,
            writer,
            rope,
            area: PayloadArea::new(),
            pulse,
            reliability: options.reliability,
            path: options.path,
            tag: options.tag.unwrap_or(Tag(0)),
            descriptors_max,
            message_bytes_max,
            pending: VecDeque::new(),
            in_flight,
            loans: loans.0,
            finishing: 0,
            done: VecDeque::new(),
            ended: None,
            in_a_row: false,
            wanting: false,
            given: 0,
            laps: 0,
            stats: SendStats::default(),
            pulses: PulseLog::default(),
        }
    }

    /// The VI's number in this process.
    pub fn id(&self) -> ViId {
        self.member.id
    }

    /// What it has done so far.
    pub fn stats(&self) -> SendStats {
        self.stats
    }

    /// Why the VI is over, once this half has noticed.
    pub fn ended(&self) -> Option<Failure> {
        self.ended
    }

    /// Sends a message. It goes at once where there is room, otherwise as the queue is polled.
    // The common cases are told from the message's parts, so that these never leave their registers:
    // whoever writes them to memory and reads them in larger pieces waits until the stores before
    // are done, those to slots too, whose lines are still with the peer.
    #[inline(always)]
    pub fn post_send(&mut self, message: Message) -> Result<(), Refused<Message>> {
        let Message { token, control, control_given, immediate, path, payload } = message;
        let Payload::Buffer(buffer) = payload else {
            return self.post_any(Message { token, control, control_given, immediate, path, payload });
        };
        let plain = control_given == 0
            && control.is_nothing()
            && buffer.tag() == self.tag
            && self.is_open_with_room()
            && self.is_plain(&buffer, path);
        if !plain {
            let payload = Payload::Buffer(buffer);
            return self.post_any(Message { token, control, control_given, immediate, path, payload });
        }
        let total = buffer.len();
        self.count_message(total);
        if path.unwrap_or(self.path) == Path::Referenced {
            self.publish_reference(token, immediate, buffer, total);
        } else if total <= CONTENT_BYTES {
            self.stats.inline += 1;
            let head = self.head(Kind::Inline, Flags::WHOLE, total, immediate);
            let index = self.writer.publish_plain(head, &buffer);
            self.ring_if_wanted();
            self.finish_at(index, Finish { token, length: total, payload: Payload::Buffer(buffer) });
        } else {
            self.publish_copy(token, immediate, buffer, total);
        }
        Ok(())
    }

    /// True if a buffer can be sent this moment and in one slot, all by itself. If it is to be
    /// copied, there is room for the copy.
    #[inline(always)]
    fn is_plain(&mut self, buffer: &Buffer, path: Option<Path>) -> bool {
        let total = buffer.len();
        match path.unwrap_or(self.path) {
            _ if total as u64 > self.message_bytes_max => false,
            Path::Referenced => total > 0 && buffer.region_id() == self.given,
            _ if total <= CONTENT_BYTES => true,
            path => self.goes_in_one_piece(total, path),
        }
    }

    #[inline(never)]
    fn post_any(&mut self, message: Message) -> Result<(), Refused<Message>> {
        match self.check(&message) {
            Ok((way, total)) => {
                self.count_message(total);
                if way == Way::Inline && self.pending.is_empty() && self.has_credit() {
                    self.publish_inline(message, total);
                } else {
                    self.enqueue(message, way, total);
                }
                Ok(())
            }
            Err(reason) => Err(Refused { reason, descriptor: message }),
        }
    }

    /// True if a message of this length is copied, and best as one pulse: it is no more than one, or
    /// it is one of many, so that the reader has others meanwhile.
    #[inline]
    fn goes_in_one_piece(&mut self, total: usize, path: Path) -> bool {
        let copied = path == Path::Buffered || total < self.nic.config.reference_from;
        if !copied || total > self.nic.config.payload_bytes_max / MESSAGES_TO_A_LAP {
            return false;
        }
        self.pulse.for_message(total, self.in_a_row).is_one(total) || self.reader_is_busy()
    }

    fn reader_is_busy(&mut self) -> bool {
        if self.pulse.policy() != Pulses::Adaptive {
            return false;
        }
        if let Err(lie) = self.refresh() {
            self.lied(lie);
            return false;
        }
        self.writer.head() - self.writer.consumed() >= STREAM_SLOTS
    }

    /// The common case of a message that is copied: one buffer, one pulse, nothing beside it.
    #[inline(never)]
    fn publish_copy(&mut self, token: u64, immediate: u32, buffer: Buffer, total: usize) {
        let Some(extent) = self.take_piece(total, total).filter(|_| self.ended.is_none()) else {
            // No room for now: it waits its turn. Or a lie was found, and it comes back.
            let message = Message::new(token).immediate(immediate).payload(buffer);
            return self.enqueue(message, Way::Buffered, total);
        };
        let started = self.pulses.begin();
        self.stats.buffered += 1;
        self.stats.pulses += 1;
        self.in_a_row = true;
        let head = self.head(Kind::Spans, Flags::WHOLE, total, immediate);
        // The books first: behind a long copy, whose stores take their time, they would wait for it.
        let finish = Finish { token, length: total, payload: Payload::Buffer(buffer) };
        self.after_publication(self.writer.head(), Some(extent.id), finish);
        let entered = match self.reliability {
            Reliability::Reception => self.in_flight.newest().and_then(|slot| slot.finish.as_ref().map(|f| &f.payload)),
            _ => self.done.back().map(|completion| &completion.payload),
        };
        if let Some(Payload::Buffer(buffer)) = entered {
            self.member.peer.ours().copy_in(extent.offset, buffer);
        }
        self.writer.publish_span(head, 0, extent.offset as u64);
        self.ring_if_wanted();
        self.pulses.end(started, self.stats.messages.saturating_sub(1), total);
    }

    #[inline(always)]
    fn count_message(&mut self, bytes: usize) {
        self.stats.messages += 1;
        self.stats.bytes += bytes as u64;
    }

    /// True if a small message can go this moment. That the peer is gone shows when the queue is
    /// polled, or when its credit is used up.
    #[inline(always)]
    fn is_open_with_room(&self) -> bool {
        self.ended.is_none()
            && self.pending.is_empty()
            && self.writer.credit() > 0
            && self.is_swept()
            && self.finishing < self.descriptors_max
            && self.member.process.is_this()
    }

    /// Sends a copy of `bytes`; they are yours again when this returns. Refused, with nothing sent,
    /// when there is no room for all of them now.
    #[inline(always)]
    pub fn send_bytes(&mut self, token: u64, bytes: &[u8]) -> Result<(), PostError> {
        if bytes.len() <= CONTENT_BYTES && self.is_open_with_room() {
            self.publish_bytes(token, bytes);
            return Ok(());
        }
        self.send_any_bytes(token, bytes)
    }

    /// Refused for now: the completion queue tells when it is worth another try.
    #[cold]
    fn want(&mut self, refused: PostError) -> PostError {
        self.wanting = true;
        self.note_awaiting();
        refused
    }

    #[inline(always)]
    fn publish_bytes(&mut self, token: u64, bytes: &[u8]) {
        self.count_message(bytes.len());
        self.stats.inline += 1;
        let head = self.head(Kind::Inline, Flags::WHOLE, bytes.len(), 0);
        let index = self.writer.publish_plain(head, bytes);
        self.ring_if_wanted();
        self.finish_at(index, Finish { token, length: bytes.len(), payload: Payload::None });
    }

    #[inline(never)]
    fn send_any_bytes(&mut self, token: u64, bytes: &[u8]) -> Result<(), PostError> {
        self.check_open()?;
        let no_room = PostError::NoRoom { bytes: bytes.len() };
        if !self.pending.is_empty() {
            self.progress();
        }
        if !self.pending.is_empty() || !self.has_credit() || self.finishing >= self.descriptors_max {
            return Err(self.want(no_room));
        }
        if bytes.len() <= CONTENT_BYTES {
            self.publish_bytes(token, bytes);
            return Ok(());
        }
        self.send_bytes_buffered(token, bytes, no_room)
    }

    fn send_bytes_buffered(&mut self, token: u64, bytes: &[u8], no_room: PostError) -> Result<(), PostError> {
        let limit = self.message_bytes_max.min(self.nic.config.payload_bytes_max as u64);
        if bytes.len() as u64 > limit {
            return Err(PostError::TooLong { bytes: bytes.len() as u64, limit });
        }
        let Some(extent) = self.take_piece(bytes.len(), bytes.len()) else { return Err(self.want(no_room)) };
        self.count_message(bytes.len());
        self.stats.buffered += 1;
        self.member.peer.ours().copy_in(extent.offset, bytes);
        let head = self.head(Kind::Spans, Flags::WHOLE, bytes.len(), 0);
        let index = self.writer.publish_span(head, 0, extent.offset as u64);
        self.stats.pulses += 1;
        self.ring_if_wanted();
        let finish = Finish { token, length: bytes.len(), payload: Payload::None };
        self.after_publication(index, Some(extent.id), finish);
        Ok(())
    }

    /// Writes into memory that the peer exported.
    pub fn rdma_write(&mut self, write: RdmaWrite) -> Result<(), Refused<RdmaWrite>> {
        let checked = self.check_remote(write.key, write.offset, write.payload.total());
        let checked = checked.and_then(|region| {
            if region.writable().is_none() {
                return Err(PostError::ReadOnly { region: write.key.region });
            }
            let limit = self.descriptors_max;
            if write.immediate.is_some() && self.pending.len() + self.finishing >= limit {
                return Err(PostError::QueueFull { limit });
            }
            if write.immediate.is_some() && self.pending.is_empty() && !self.has_credit() {
                return Err(PostError::QueueFull { limit: self.member.block.shape().depth() as usize });
            }
            write.payload.check_tags(self.tag)?;
            Ok(region)
        });
        let region = match checked {
            Ok(region) => region,
            Err(reason) => return Err(Refused { reason, descriptor: write }),
        };
        let RdmaWrite { token, offset, immediate, payload, .. } = write;
        let mut at = offset as usize;
        for_each_segment(&payload, |bytes| {
            if let Some(memory) = region.writable() {
                memory.copy_in(at, bytes);
            }
            at += bytes.len();
        });
        let length = at - offset as usize;
        if let Some(immediate) = immediate {
            // Told of in its turn, after the messages that wait for room.
            let message = Message { payload, ..Message::new(token).immediate(immediate) };
            self.enqueue(message, Way::Written, length);
            return Ok(());
        }
        self.push_done(completion(token, Operation::RdmaWrite, Ok(()), length, payload));
        Ok(())
    }

    /// Reads from memory that the peer granted.
    pub fn rdma_read(&mut self, mut read: RdmaRead) -> Result<(), Refused<RdmaRead>> {
        let length = read.into.len();
        let checked = self.check_remote(read.key, read.offset, length as u64).and_then(|region| {
            if read.into.tag() != self.tag {
                return Err(PostError::WrongTag { buffer: read.into.tag(), vi: self.tag });
            }
            Ok(region)
        });
        match checked {
            Ok(region) => {
                region.memory().copy_out(read.offset as usize, &mut read.into);
                let payload = Payload::Buffer(read.into);
                self.push_done(completion(read.token, Operation::RdmaRead, Ok(()), length, payload));
                Ok(())
            }
            Err(reason) => Err(Refused { reason, descriptor: read }),
        }
    }

    /// Lets the peer read a registered region.
    pub fn grant(&self, region: &Region) -> Result<RemoteKey, GrantError> {
        self.check_grant(region.tag())?;
        if region.is_freezable() {
            return Err(GrantError::NotFrozenYet);
        }
        self.member.peer.give_region(region)?;
        Ok(RemoteKey { region: region.id(), tag: region.tag(), bytes: region.len() as u64 })
    }

    /// Lets the peer read and write an exported region, for as long as it lives.
    pub fn grant_exported(&self, region: &Exported) -> Result<RemoteKey, GrantError> {
        self.check_grant(region.tag())?;
        self.member.peer.give_exported(region)?;
        Ok(RemoteKey { region: region.id(), tag: region.tag(), bytes: region.memory().len() as u64 })
    }

    /// Lets the peer read a frozen region.
    pub fn grant_frozen(&self, region: &Frozen) -> Result<RemoteKey, GrantError> {
        self.check_grant(region.tag())?;
        self.member.peer.give_frozen(region)?;
        Ok(RemoteKey { region: region.id(), tag: region.tag(), bytes: region.len() as u64 })
    }

    fn check_grant(&self, region: Tag) -> Result<(), GrantError> {
        let foreign = (!self.member.process.is_this()).then_some(Failure::ForkedChild);
        match foreign.or_else(|| self.member.end()) {
            Some(failure) => Err(GrantError::NotConnected(failure)),
            None if region != self.tag => Err(GrantError::WrongTag { region, vi: self.tag }),
            None => Ok(()),
        }
    }

    /// The next completion, if there is one. Does not wait; moves messages that wait for room.
    #[inline]
    pub fn poll(&mut self) -> Option<Completion> {
        if !self.member.process.is_this() {
            return None;
        }
        if let Some(done) = self.poll_any() {
            return Some(done);
        }
        self.notice_end();
        self.take_done()
    }

    /// Waits for the next completion, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        let (member, nic) = (self.member.clone(), self.nic.clone());
        member.wait_for(&nic.spin, timeout, || self.poll_or_end())?
    }

    /// Waits until everything posted is published, and every completion that depends on the peer
    /// has come. The completions stay to be polled.
    pub fn flush(&mut self, timeout: Duration) -> Result<(), WaitError> {
        let (member, nic) = (self.member.clone(), self.nic.clone());
        member.wait_for(&nic.spin, timeout, || {
            self.progress();
            if self.finishing == 0 && self.pending.is_empty() {
                return Some(Ok(()));
            }
            self.notice_end();
            self.ended.map(|failure| Err(WaitError::NotConnected(failure)))
        })?
    }

    fn poll_or_end(&mut self) -> Option<Result<Completion, WaitError>> {
        let polled = self.poll().map(Ok);
        polled.or_else(|| self.ended.map(|failure| Err(WaitError::NotConnected(failure))))
    }

    /// Starts recording pulses, the first `capacity` of them.
    pub fn record_pulses(&mut self, capacity: usize) {
        self.pulses.start(capacity);
    }

    /// The pulses recorded so far.
    pub fn take_pulses(&mut self) -> Vec<PulseRecord> {
        self.pulses.take()
    }

    #[inline]
    pub(crate) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    #[inline(always)]
    pub(crate) fn take_done(&mut self) -> Option<Completion> {
        let next = self.done.pop_front();
        if self.done.is_empty() && !self.has_ripe() {
            self.member.sent.store(false, Relaxed);
        }
        next
    }

    /// True if progress could bring something.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        !self.in_flight.is_empty() || !self.pending.is_empty() || self.loans.outstanding()
    }

    fn is_awaiting(&self) -> bool {
        self.finishing > 0 || !self.pending.is_empty() || self.wanting
    }

    #[inline]
    pub(crate) fn notice_end(&mut self) {
        if self.ended.is_none()
            && self.member.over()
            && let Some(failure) = self.member.end()
        {
            self.end(failure);
        }
    }

    #[inline]
    fn check_open(&mut self) -> Result<(), PostError> {
        if !self.member.process.is_this() {
            return Err(PostError::ForkedChild);
        }
        self.notice_end();
        match self.ended {
            Some(failure) => Err(PostError::NotConnected(failure)),
            None => Ok(()),
        }
    }

    fn check_remote(&mut self, key: RemoteKey, offset: u64, bytes: u64) -> Result<RemoteRegion, PostError> {
        self.check_open()?;
        let region = self.member.peer.remote_region(key.region).map_err(|lie| match self.member.peer.after(lie) {
            failure @ Failure::Exhausted => PostError::NotConnected(failure),
            _ => PostError::UnknownRegion { region: key.region },
        })?;
        if region.tag() != self.tag || key.tag != self.tag {
            return Err(PostError::WrongTag { buffer: region.tag(), vi: self.tag });
        }
        let region_bytes = region.memory().len() as u64;
        match offset.checked_add(bytes) {
            Some(end) if end <= region_bytes => Ok(region),
            _ => Err(PostError::OutOfRange { offset, bytes, region_bytes }),
        }
    }

    /// Whether a message may be sent, by which way, and its length.
    #[inline]
    fn check(&mut self, message: &Message) -> Result<(Way, usize), PostError> {
        self.check_open()?;
        message.payload.check_tags(self.tag)?;
        if message.control_given > CONTROL_BYTES_MAX {
            return Err(PostError::ControlTooLong { bytes: message.control_given });
        }
        let limit = self.descriptors_max;
        if self.pending.len() + self.finishing >= limit {
            self.progress();
            if self.pending.len() + self.finishing >= limit {
                return Err(PostError::QueueFull { limit });
            }
        }
        let bytes = message.payload.total();
        if bytes > self.message_bytes_max {
            return Err(PostError::TooLong { bytes, limit: self.message_bytes_max });
        }
        let total = bytes as usize;
        let prefix = if message.control.token().is_some() { 8 } else { 0 };
        let room = CONTENT_BYTES - prefix - message.control.len();
        let path = message.path.unwrap_or(self.path);
        if total == 0 || path != Path::Referenced && total <= room {
            return Ok((Way::Inline, total));
        }
        let segments = message.payload.check_segments()?;
        let refer = match path {
            Path::Buffered => false,
            Path::Referenced => true,
            Path::Choose => total >= self.nic.config.reference_from && segments * SPAN_BYTES <= room,
        };
        if !refer {
            return Ok((Way::Buffered, total));
        }
        if segments * SPAN_BYTES > room {
            return Err(PostError::TooManySegments { segments, limit: room / SPAN_BYTES });
        }
        self.hand_over(&message.payload)?;
        Ok((Way::Referenced, total))
    }

    /// Makes sure that the peer has the regions that a message refers to.
    #[inline]
    fn hand_over(&mut self, payload: &Payload) -> Result<(), PostError> {
        match payload {
            Payload::Buffer(buffer) => self.hand_over_buffer(buffer),
            Payload::Segments(segments) => segments.iter().try_for_each(|segment| match segment {
                Segment::Buffer(buffer) => self.hand_over_buffer(buffer),
                Segment::Shared(buffer) => self.hand_over_buffer(buffer.buffer()),
                Segment::Frozen(region, _) => self.member.peer.give_frozen(region).map_err(PostError::Handover),
            }),
            Payload::None | Payload::InPlace(_) => Ok(()),
        }
    }

    #[inline]
    fn hand_over_buffer(&mut self, buffer: &Buffer) -> Result<(), PostError> {
        if buffer.region_id() == self.given {
            return Ok(());
        }
        if !buffer.is_sendable() {
            return Err(PostError::NotFrozenYet);
        }
        self.member.peer.give_region(&buffer.region()).map_err(PostError::Handover)?;
        self.given = buffer.region_id();
        Ok(())
    }

    /// Credit for a slot, looking at the reader's progress only when the known credit is used up.
    #[inline]
    fn has_credit(&mut self) -> bool {
        if self.writer.credit() == 0 || !self.is_swept() {
            self.look_at_progress();
        }
        self.writer.credit() > 0 && self.ended.is_none()
    }

    /// True if every slot of the last lap was dealt with: the reader's word on what it holds is
    /// good for one lap.
    #[inline(always)]
    fn is_swept(&self) -> bool {
        let depth = self.writer.depth();
        self.in_flight.front().is_none_or(|slot| self.writer.head() - slot.index < depth)
    }

    #[inline(always)]
    fn head(&self, kind: Kind, flags: Flags, length: usize, immediate: u32) -> SlotHead {
        // A send that is to complete on the reader's word asks for it.
        let flags = if self.reliability == Reliability::Reception { flags.with(Flags::ACKNOWLEDGE) } else { flags };
        SlotHead { kind, flags, control: 0, spans: 0, length: length as u32, immediate }
    }

    #[inline]
    fn publish_inline(&mut self, message: Message, total: usize) {
        self.stats.inline += 1;
        let Message { token, control, immediate, payload, .. } = message;
        let payload_token = control.token();
        let mut head = self.head(Kind::Inline, Flags::WHOLE, total, immediate);
        head.control = control.len() as u8;
        let prefix = payload_token.map(|PayloadToken(token)| token.to_le_bytes());
        if prefix.is_some() {
            head.flags = head.flags.with(Flags::TOKEN);
        }
        let prefix = prefix.as_ref().map_or(&[][..], |bytes| &bytes[..]);
        let index = match &payload {
            Payload::None | Payload::InPlace(_) => self.writer.publish(head, prefix, &control, &[]),
            Payload::Buffer(buffer) => self.writer.publish(head, prefix, &control, buffer),
            Payload::Segments(_) => {
                let mut bytes = Vec::with_capacity(total);
                for_each_segment(&payload, |segment| bytes.extend_from_slice(segment));
                self.writer.publish(head, prefix, &control, &bytes)
            }
        };
        self.ring_if_wanted();
        self.finish_at(index, Finish { token, length: total, payload });
    }

    /// Completes a send whose buffers are free already, now or when the reader has it.
    #[inline(always)]
    fn finish_at(&mut self, index: u64, finish: Finish) {
        if self.reliability == Reliability::Reception {
            self.finishing += 1;
            self.in_flight.push(index, None, Some(finish), false);
            self.note_awaiting();
        } else {
            self.push_done(completion(finish.token, Operation::Send, Ok(()), finish.length, finish.payload));
        }
    }

    fn enqueue(&mut self, message: Message, way: Way, total: usize) {
        let outgoing = Outgoing { message, way, total, sent: 0, piece: None, buffered: 0 };
        if self.pending.is_empty() {
            match self.advance(outgoing) {
                Ok(Advance::Finished) => {}
                Ok(Advance::Blocked(outgoing)) if self.drops(&outgoing) => self.drop_unreliable(outgoing),
                Ok(Advance::Blocked(outgoing)) => {
                    self.stats.waits += 1;
                    self.pending.push_back(outgoing);
                }
                Err(lie) => self.lied(lie),
            }
            if self.ended.is_some() {
                // A lie was found on the way.
                self.flush_pending();
            }
        } else {
            self.pending.push_back(outgoing);
            self.progress();
        }
        self.note_awaiting();
    }

    /// An unreliable VI drops what finds no room at all, rather than hold its application back.
    fn drops(&self, outgoing: &Outgoing) -> bool {
        self.reliability == Reliability::Unreliable && outgoing.sent == 0 && outgoing.piece.is_none()
    }

    fn drop_unreliable(&mut self, outgoing: Outgoing) {
        let Message { token, payload, .. } = outgoing.message;
        self.push_done(completion(token, Operation::Send, Err(Failure::Dropped), 0, payload));
    }

    /// Looks at what the peer has done, and moves what waited for it.
    pub(crate) fn progress(&mut self) {
        if self.ended.is_some() {
            return;
        }
        self.look_at_progress();
        while let Some(outgoing) = self.pending.pop_front() {
            match self.advance(outgoing) {
                Ok(Advance::Finished) => {}
                Ok(Advance::Blocked(outgoing)) => {
                    self.pending.push_front(outgoing);
                    break;
                }
                Err(lie) => return self.lied(lie),
            }
        }
        if self.ended.is_some() {
            // A lie was found on the way.
            self.flush_pending();
        }
        self.note_awaiting();
    }

    /// The next completion, as [`HostSender::poll`] without its checks.
    pub(crate) fn poll_any(&mut self) -> Option<Completion> {
        if self.done.is_empty() && self.pending.is_empty() && self.ended.is_none() {
            // Nothing waits for room: it is enough to see what is ripe, one at a time.
            let looked = self.refresh().and_then(|moved| {
                if moved && self.has_ripe() {
                    self.member.show(&self.member.sent);
                }
                self.sweep_to_plain()?;
                self.look_at_releases()
            });
            if let Err(lie) = looked {
                self.lied(lie);
            }
            self.note_awaiting();
            if let Some(done) = self.poll_reference() {
                return Some(done);
            }
        } else if self.is_busy() {
            self.progress();
        }
        let done = self.take_done();
        if done.is_none() && self.pending.is_empty() {
            self.in_a_row = false;
        }
        done
    }

    /// Moves a message as far as it goes.
    fn advance(&mut self, outgoing: Outgoing) -> Result<Advance, Lie> {
        if self.ended.is_some() {
            // The end came while others were moved.
            self.pending.push_front(outgoing);
            self.flush_pending();
            return Ok(Advance::Finished);
        }
        match outgoing.way {
            _ if !self.has_credit() => Ok(Advance::Blocked(outgoing)),
            Way::Inline => {
                self.publish_inline(outgoing.message, outgoing.total);
                Ok(Advance::Finished)
            }
            Way::Referenced => {
                self.publish_referenced(outgoing);
                Ok(Advance::Finished)
            }
            Way::Written => {
                let Message { token, immediate, payload, .. } = outgoing.message;
                let head = self.head(Kind::Written, Flags::WHOLE, 0, immediate);
                self.writer.publish(head, &[], &[], &[]);
                self.ring_if_wanted();
                self.push_done(completion(token, Operation::RdmaWrite, Ok(()), outgoing.total, payload));
                Ok(Advance::Finished)
            }
            Way::Buffered => self.advance_buffered(outgoing),
            Way::Slots => Ok(self.advance_through_slots(outgoing)),
        }
    }

    /// The common case of a message that is referred to: one buffer, and nothing beside it.
    #[inline(always)]
    fn publish_reference(&mut self, token: u64, immediate: u32, buffer: Buffer, total: usize) {
        let (region, offset) = (buffer.region_id(), buffer.offset());
        let head = self.head(Kind::Spans, REFERENCE, total, immediate);
        // The books first: behind the slot, whose line may still be on its way here, they would wait.
        self.stats.referenced += 1;
        self.finishing += 1;
        self.in_flight.push_reference(self.writer.head(), token, total, buffer);
        if self.finishing == 1 {
            self.note_awaiting();
        }
        self.writer.publish_span(head, region, offset as u64);
        self.ring_if_wanted();
    }

    #[inline]
    fn publish_referenced(&mut self, outgoing: Outgoing) {
        let Message { token, control, immediate, payload, .. } = outgoing.message;
        let payload_token = control.token();
        let mut head = self.head(Kind::Spans, REFERENCE, outgoing.total, immediate);
        head.control = control.len() as u8;
        let mut prefix = Prefix::new();
        if let Some(PayloadToken(token)) = payload_token {
            head.flags = head.flags.with(Flags::TOKEN);
            prefix.push(&token.to_le_bytes());
        }
        let mut refer = |region: u32, length: usize, offset: usize| {
            head.spans += 1;
            prefix.push(&span(region, length, offset));
        };
        match &payload {
            Payload::Buffer(buffer) => refer(buffer.region_id(), buffer.len(), buffer.offset()),
            Payload::Segments(segments) => {
                for segment in segments {
                    match segment {
                        Segment::Buffer(buffer) => refer(buffer.region_id(), buffer.len(), buffer.offset()),
                        Segment::Shared(shared) => {
                            let buffer = shared.buffer();
                            refer(buffer.region_id(), buffer.len(), buffer.offset());
                        }
                        Segment::Frozen(region, range) => refer(region.id(), range.len(), range.start),
                    }
                }
            }
            Payload::None | Payload::InPlace(_) => {}
        }
        let index = self.writer.publish(head, prefix.bytes(), &control, &[]);
        self.ring_if_wanted();
        self.stats.referenced += 1;
        self.finishing += 1;
        let finish = Finish { token, length: outgoing.total, payload };
        self.in_flight.push(index, None, Some(finish), true);
        self.note_awaiting();
    }

    fn advance_buffered(&mut self, mut outgoing: Outgoing) -> Result<Advance, Lie> {
        if outgoing.sent == 0 && outgoing.piece.is_none() {
            self.stats.buffered += 1;
        }
        let pulse = self.pulse.for_message(outgoing.total, self.in_a_row);
        let mut started = self.pulses.begin();
        loop {
            if !self.has_credit() {
                return Ok(Advance::Blocked(outgoing));
            }
            let remaining = outgoing.total - outgoing.sent;
            let (extent, used) = match outgoing.piece {
                Some(piece) => piece,
                None => match self.take_piece(remaining.min(PIECE_BYTES_LEAST), remaining) {
                    Some(extent) => (extent, 0),
                    None if self.area.size() == 0 && self.area.is_idle() => {
                        outgoing.way = Way::Slots;
                        return Ok(self.advance_through_slots(outgoing));
                    }
                    None => return Ok(Advance::Blocked(outgoing)),
                },
            };
            let step = pulse.step(remaining, outgoing.buffered).min(extent.len - used);
            self.copy_in(&outgoing.message.payload, outgoing.sent, extent.offset + used, step);
            outgoing.sent += step;
            outgoing.buffered += step;
            let used = used + step;
            outgoing.piece = Some((extent, used));
            let more = outgoing.sent < outgoing.total;
            if more && let Err(lie) = self.look_at_credit() {
                self.pending.push_front(outgoing);
                return Err(lie);
            }
            let idle = self.writer.consumed() == self.writer.head();
            let piece_full = used == extent.len;
            if piece_full || pulse.release(outgoing.buffered, more, idle) {
                let at = extent.offset + used - outgoing.buffered;
                let index = self.publish_pulse(&outgoing, at, more);
                self.pulses.end(started, self.stats.messages.saturating_sub(1), outgoing.buffered);
                started = self.pulses.begin();
                outgoing.buffered = 0;
                let freed = (piece_full || !more).then_some(extent.id);
                if piece_full {
                    outgoing.piece = None;
                }
                if !more {
                    self.in_a_row = true;
                    let Message { token, payload, .. } = outgoing.message;
                    let finish = Finish { token, length: outgoing.total, payload };
                    self.after_publication(index, freed, finish);
                    return Ok(Advance::Finished);
                }
                if freed.is_some() {
                    self.in_flight.push(index, freed, None, false);
                }
            }
        }
    }

    fn publish_pulse(&mut self, outgoing: &Outgoing, at: usize, more: bool) -> u64 {
        let first = outgoing.sent == outgoing.buffered;
        let last = if more { Flags::default() } else { Flags::LAST };
        // While the message goes on, the sink's progress is what the policy goes by.
        let flags = if more || !first { last.with(Flags::ACKNOWLEDGE) } else { last };
        let mut head = self.head(Kind::Spans, flags, outgoing.buffered, outgoing.message.immediate);
        head.spans = 1;
        let mut prefix = Prefix::new();
        let mut control = &[][..];
        if first {
            head.flags = head.flags.with(Flags::FIRST);
            head.control = outgoing.message.control.len() as u8;
            control = &outgoing.message.control;
            if let Some(PayloadToken(token)) = outgoing.message.control.token() {
                head.flags = head.flags.with(Flags::TOKEN);
                prefix.push(&token.to_le_bytes());
            }
            if more {
                prefix.push(&(outgoing.total as u64).to_le_bytes());
            }
        }
        prefix.push(&span(0, outgoing.buffered, at));
        let index = self.writer.publish(head, prefix.bytes(), control, &[]);
        self.stats.pulses += 1;
        self.ring_if_wanted();
        index
    }

    /// A message in pieces of a slot each, for want of a payload area.
    fn advance_through_slots(&mut self, mut outgoing: Outgoing) -> Advance {
        while self.has_credit() {
            let first = outgoing.sent == 0;
            let mut head = self.head(Kind::Inline, Flags::default(), 0, outgoing.message.immediate);
            let mut prefix = Prefix::new();
            let mut control = Control::EMPTY;
            if first {
                head.flags = head.flags.with(Flags::FIRST);
                control = outgoing.message.control.clone();
                head.control = control.len() as u8;
                if let Some(PayloadToken(token)) = outgoing.message.control.token() {
                    head.flags = head.flags.with(Flags::TOKEN);
                    prefix.push(&token.to_le_bytes());
                }
                prefix.push(&(outgoing.total as u64).to_le_bytes());
            }
            let room = CONTENT_BYTES - prefix.bytes().len() - control.len();
            let take = room.min(outgoing.total - outgoing.sent);
            let mut bytes = Vec::with_capacity(take);
            slices(&outgoing.message.payload, outgoing.sent, take, |slice| bytes.extend_from_slice(slice));
            outgoing.sent += take;
            head.length = take as u32;
            let last = outgoing.sent == outgoing.total;
            if last {
                head.flags = head.flags.with(Flags::LAST);
            }
            let index = self.writer.publish(head, prefix.bytes(), &control, &bytes);
            self.ring_if_wanted();
            if last {
                let Message { token, payload, .. } = outgoing.message;
                self.finish_at(index, Finish { token, length: outgoing.total, payload });
                return Advance::Finished;
            }
        }
        Advance::Blocked(outgoing)
    }

    /// A buffered message is published in full: its extent is freed when it is consumed.
    #[inline]
    fn after_publication(&mut self, index: u64, extent: Option<u64>, finish: Finish) {
        let later = self.reliability == Reliability::Reception;
        let finish = if later {
            self.finishing += 1;
            Some(finish)
        } else {
            self.push_done(completion(finish.token, Operation::Send, Ok(()), finish.length, finish.payload));
            None
        };
        self.in_flight.push(index, extent, finish, true);
    }

    /// From `least` to `most` bytes of the payload area, if they can be had now.
    #[inline]
    fn take_piece(&mut self, least: usize, most: usize) -> Option<Extent> {
        if self.area.laps() != self.laps {
            self.after_a_lap(most);
        }
        match self.area.reserve(least, most) {
            None => self.make_room(least, most),
            piece => piece,
        }
    }

    fn make_room(&mut self, least: usize, most: usize) -> Option<Extent> {
        loop {
            self.look_at_progress();
            if let Some(extent) = self.area.reserve(least, most) {
                return Some(extent);
            }
            if !self.grow() {
                return None;
            }
        }
    }

    /// The walk has come round. A stream that gets round while the reader is still at it does better
    /// with a longer way, and so does one of a few long messages: lines that both have long left come
    /// from the shared cache.
    #[cold]
    fn after_a_lap(&mut self, most: usize) {
        let behind = self.writer.head() - self.writer.consumed();
        if behind >= STREAM_SLOTS || self.area.size() < MESSAGES_TO_A_LAP * most {
            self.grow();
        }
        self.laps = self.area.laps();
    }

    /// Gives the payload area more room, within the limits.
    #[cold]
    fn grow(&mut self) -> bool {
        let config = &self.nic.config;
        let size = if self.area.size() == 0 { config.payload_bytes_start } else { self.area.size() * 2 };
        if size > config.payload_bytes_max {
            return false;
        }
        match self.member.peer.take_payload_area(size) {
            Some(offset) => {
                self.area.move_to(offset, size);
                self.stats.growths += 1;
                true
            }
            None => false,
        }
    }

    fn copy_in(&self, payload: &Payload, from: usize, to: usize, length: usize) {
        let memory = self.member.peer.ours();
        let mut at = to;
        slices(payload, from, length, |bytes| {
            memory.copy_in(at, bytes);
            at += bytes.len();
        });
    }

    #[inline(always)]
    fn ring_if_wanted(&mut self) {
        if self.writer.bell_wanted() {
            self.rope.ring(News::Slots);
            self.stats.rings += 1;
        }
    }

    /// The reader's progress: what it has consumed, and what it has given back.
    fn look_at_progress(&mut self) {
        let looked = self.look_at_credit().and_then(|()| self.look_at_releases());
        if let Err(lie) = looked {
            self.lied(lie);
        }
    }

    fn look_at_releases(&mut self) -> Result<(), Lie> {
        // Slots that are consumed but not swept yet are not in the book.
        let consumed = self.writer.consumed();
        let swept = self.in_flight.front().map_or(consumed, |slot| slot.index.min(consumed));
        while let Some(loan) = self.loans.poll(swept)? {
            self.settle(loan);
        }
        Ok(())
    }

    /// What the reader has consumed, and all that follows from it.
    #[inline]
    fn look_at_credit(&mut self) -> Result<(), Lie> {
        if self.refresh()? || self.has_ripe() { self.sweep() } else { Ok(()) }
    }

    #[inline]
    fn refresh(&mut self) -> Result<bool, Lie> {
        let moved = self.writer.refresh()?;
        if moved {
            self.wanting = false;
        }
        Ok(moved)
    }

    /// Deals with every slot that is known to be consumed.
    fn sweep(&mut self) -> Result<(), Lie> {
        while self.has_ripe() {
            self.sweep_one()?;
        }
        Ok(())
    }

    /// Deals with slots that are known to be consumed, up to one that can be handed out as it is.
    fn sweep_to_plain(&mut self) -> Result<(), Lie> {
        while self.has_ripe() && !self.has_plain() {
            self.sweep_one()?;
        }
        Ok(())
    }

    fn sweep_one(&mut self) -> Result<(), Lie> {
        if let Some(mut slot) = self.in_flight.pop() {
            if slot.lendable && self.writer.holds(slot.index) {
                // A copy was received, whoever keeps it; a buffer that was referred to is not free.
                if slot.extent.is_some() {
                    self.complete(slot.finish.take());
                }
                self.lend(slot)?;
            } else {
                self.settle(Loan { extent: slot.extent, finish: slot.finish });
            }
        }
        Ok(())
    }

    /// True if the oldest slot in flight is known to be consumed.
    #[inline(always)]
    fn has_ripe(&self) -> bool {
        self.in_flight.front().is_some_and(|slot| slot.index < self.writer.consumed())
    }

    /// True if the oldest slot in flight is consumed, and nothing but its completion is left of it.
    #[inline(always)]
    fn has_plain(&self) -> bool {
        self.in_flight.front().is_some_and(|slot| {
            slot.index < self.writer.consumed()
                && slot.extent.is_none()
                && slot.finish.is_some()
                && !self.writer.holds(slot.index)
        })
    }

    /// The common case on its own: a payload that was referred to and is free again, handed out
    /// from where it waited.
    #[inline(always)]
    pub(crate) fn poll_reference(&mut self) -> Option<Completion> {
        if !self.done.is_empty() || !self.has_plain() {
            return None;
        }
        let InFlight { finish, lendable, .. } = self.in_flight.pop()?;
        let Finish { token, length, payload } = finish?;
        if lendable && let Payload::Buffer(buffer) = &payload {
            // It was read elsewhere, and is most likely filled anew next.
            buffer.prefetch_to_write();
        }
        self.finishing -= 1;
        if self.finishing == 0 {
            self.note_awaiting();
        }
        if !self.has_ripe() {
            self.member.sent.store(false, Relaxed);
        }
        Some(completion(token, Operation::Send, Ok(()), length, payload))
    }

    fn lend(&mut self, slot: InFlight) -> Result<(), Lie> {
        if let Some(extent) = slot.extent {
            self.area.pin(extent);
        }
        let loan = Loan { extent: slot.extent, finish: slot.finish };
        let Err((_, loan)) = self.loans.lend(slot.index, loan) else { return Ok(()) };
        // The book is full: what was given back in the meantime makes room, or the peer lies.
        let made_room = loop {
            match self.loans.poll(slot.index) {
                Ok(Some(returned)) => self.settle(returned),
                Ok(None) => break Ok(()),
                Err(lie) => break Err(lie),
            }
        };
        let lent = match made_room {
            Ok(()) => self.loans.lend(slot.index, loan),
            Err(lie) => Err((lie, loan)),
        };
        lent.map_err(|(lie, loan)| {
            // It comes back with everything else, when the VI ends in a moment.
            self.in_flight.put_back(InFlight { index: slot.index, extent: None, finish: loan.finish, lendable: false });
            lie
        })
    }

    /// A payload is free again.
    #[inline]
    fn settle(&mut self, loan: Loan) {
        if let Some(extent) = loan.extent {
            let peer = &self.member.peer;
            self.area.free(extent, |offset, bytes| peer.return_payload_area(offset, bytes));
        }
        self.complete(loan.finish);
    }

    #[inline]
    fn complete(&mut self, finish: Option<Finish>) {
        if let Some(Finish { token, length, payload, .. }) = finish {
            self.finishing -= 1;
            self.push_done(completion(token, Operation::Send, Ok(()), length, payload));
        }
    }

    #[inline(always)]
    fn push_done(&mut self, completion: Completion) {
        if completion.token == QUIET && completion.operation == Operation::Send && completion.status.is_ok() {
            return;
        }
        let first = self.done.is_empty();
        self.done.push_back(completion);
        if first {
            self.member.show(&self.member.sent);
        }
    }

    #[inline(always)]
    fn note_awaiting(&self) {
        let awaiting = self.is_awaiting();
        if self.member.awaiting.load(Relaxed) != awaiting {
            self.member.awaiting.store(awaiting, Relaxed);
        }
    }

    #[cold]
    fn lied(&mut self, lie: Lie) {
        let failure = self.member.peer.after(lie);
        self.member.break_off(failure);
        self.rope.ring(News::End);
        self.end(failure);
    }

    #[cold]
    fn end(&mut self, failure: Failure) {
        if self.ended.is_some() {
            return;
        }
        // What the reader had consumed before the end was delivered.
        if !matches!(failure, Failure::PeerLied(_)) {
            let _ = self.look_at_credit().and_then(|()| self.look_at_releases());
        }
        self.ended = Some(failure);
        self.member.ended.fetch_add(1, Relaxed);
        let in_flight: Vec<_> = std::iter::from_fn(|| self.in_flight.pop()).map(|slot| slot.finish).collect();
        let lent: Vec<_> = self.loans.recall().map(|loan| loan.finish).collect();
        for Finish { token, payload, .. } in in_flight.into_iter().chain(lent).flatten() {
            self.push_done(completion(token, Operation::Send, Err(failure), 0, payload));
        }
        self.flush_pending();
        self.finishing = 0;
        self.wanting = false;
        self.note_awaiting();
    }

    fn flush_pending(&mut self) {
        let failure = self.ended.unwrap_or(Failure::Closed);
        while let Some(outgoing) = self.pending.pop_front() {
            let operation = if outgoing.way == Way::Written { Operation::RdmaWrite } else { Operation::Send };
            let Message { token, payload, .. } = outgoing.message;
            self.push_done(completion(token, operation, Err(failure), 0, payload));
        }
    }
}

/// The book of loans, made where the blocks are known.
pub(crate) struct LoanBookParts(LoanBook<Loan>);

impl LoanBookParts {
    pub(crate) fn new(peer: highwire_mem::PeerMemory, block: highwire_mem::Block) -> LoanBookParts {
        LoanBookParts(LoanBook::new(peer, block))
    }

    pub(crate) fn watch(&self) -> highwire_mem::ReleaseWatch {
        self.0.watch()
    }
}

#[inline(always)]
fn completion(
    token: u64,
    operation: Operation,
    status: Result<(), Failure>,
    length: usize,
    payload: Payload,
) -> Completion {
    Completion { token, operation, status, length, immediate: 0, control: Control::EMPTY, payload }
}

impl Drop for HostSender {
    fn drop(&mut self) {
        if self.member.process.is_this() {
            // The peer may be reading what was referred to, or waiting for the rest of a message.
            if (self.finishing > 0 || !self.pending.is_empty()) && self.ended.is_none() {
                self.member.aborting.store(true, Relaxed);
            }
            let mut areas = self.member.areas.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.area.abandon(|offset, bytes| areas.push((offset, bytes)));
        }
        super::half_dropped(&self.member, &self.rope);
    }
}
