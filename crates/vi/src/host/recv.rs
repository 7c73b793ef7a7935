//! The receiving half of a VI.
//!
//! A message is one slot, or several when it moves in pulses. It lands in the receive that was
//! posted first, or in the one that its payload token names; without either it stays where it is,
//! and the credit window holds its sender back.
//!
//! ```text
//!            post_recv, expect                       first slot
//!  nothing ───────────────────▶ receives posted ───────────────────▶ landing ──┐ more slots
//!                                     ▲                                │   ▲   │
//!                                     └──────── completion ◀── last ───┘   └───┘
//!  any state ── the peer dies, closes, lies ──▶ ended: every receive comes back with the reason
//! ```

pub(crate) mod stream;

use crate::descriptor::{
    Completion, Control, InPlace, InPlaceParts, Operation, Payload, PayloadToken, Receive, Returns, Target,
};
use crate::error::{Failure, PostError, Refused, WaitError};
use crate::halves::RecvStats;
use crate::host::gather::SPAN_BYTES;
use crate::host::member::{HostMember, STATE_ABORTED};
use crate::host::pulse_log::{PulseLog, PulseRecord};
use crate::nic::NicInner;
use crate::vi::ViId;
use highwire_mem::{
    BellRope, Buffer, Flags, Kind, Lie, News, PeerBytes, PeerMemory, RawHead, RegionKind, ReleaseLog, RemoteRegion,
    SlotHead, SlotReader, Tag,
};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::Duration;

/// Slots that one poll looks at, at most.
const SLOTS_PER_POLL: u32 = 4096;

/// The receiving half. It belongs to one thread at a time.
#[derive(Debug)]
pub(crate) struct HostReceiver {
    member: Arc<HostMember>,
    nic: Arc<NicInner>,
    reader: SlotReader,
    rope: Arc<BellRope>,
    posted: VecDeque<Receive>,
    expected: HashMap<u64, Receive>,
    landing: Option<Landing>,
    done: VecDeque<Completion>,
    log: ReleaseLog,
    returns: Arc<Returns>,
    held: u32,
    loans_max: u32,
    descriptors_max: usize,
    /// A payload given back, kept for the next one.
    shell: Option<InPlace>,
    /// What the next slot waits for.
    stuck: Option<Want>,
    /// The end of the connection was taken note of.
    noticed: bool,
    ended: Option<Failure>,
    tag: Tag,
    /// The last region that payloads came from.
    source: Option<(u32, RemoteRegion)>,
    /// Its number, if it is a registered one.
    plain_source: u32,
    stats: RecvStats,
    pulses: PulseLog,
}

/// A message of which the first slot has come.
#[derive(Debug)]
struct Landing {
    /// `None` drops the message: nobody expects it any more.
    receive: Option<Receive>,
    total: u64,
    got: u64,
    immediate: u32,
    control: Control,
    payload_token: Option<PayloadToken>,
    /// The payload of an in-place receive that comes in several slots.
    copied: Vec<u8>,
}

/// What is missing for a slot to be consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    /// A receive to be posted.
    Receive,
    /// A payload to be given back.
    Release,
}

enum Step {
    Completed(Completion),
    /// Something was done; look at the next slot.
    Next,
    /// The next slot has to wait.
    Stuck(Want),
}

impl HostReceiver {
    pub(crate) fn new(
        member: Arc<HostMember>,
        nic: Arc<NicInner>,
        reader: SlotReader,
        rope: Arc<BellRope>,
        tag: Tag,
    ) -> HostReceiver {
        let log = ReleaseLog::new(member.peer.ours().clone(), member.block);
        let returns = Arc::new(Returns::new(member.clone()));
        let (loans_max, descriptors_max) = (member.block.shape().loans(), nic.config.descriptors_max);
        HostReceiver {
            member,
            nic,
            reader,
            rope,
            posted: VecDeque::new(),
            expected: HashMap::new(),
            landing: None,
            done: VecDeque::new(),
            log,
            returns,
            held: 0,
            loans_max,
            descriptors_max,
            shell: None,
            stuck: None,
            noticed: false,
            ended: None,
            tag,
            source: None,
            plain_source: 0,
            stats: RecvStats::default(),
            pulses: PulseLog::default(),
        }
    }

    /// The VI's number in this process.
    pub fn id(&self) -> ViId {
        self.member.id
    }

    /// What it has done so far.
    pub fn stats(&self) -> RecvStats {
        self.stats
    }

    /// Gives a place for the next message. Messages fill receives in the order both were posted.
    #[inline(always)]
    pub fn post_recv(&mut self, receive: Receive) -> Result<(), Refused<Receive>> {
        if let Err(reason) = self.check(&receive) {
            return Err(Refused { reason, descriptor: receive });
        }
        self.posted.push_back(receive);
        self.unstick(Want::Receive);
        Ok(())
    }

    /// Gives a place for the message that was sent with this payload token, whatever comes between:
    /// an entry of the incoming payload table.
    pub fn expect(&mut self, token: PayloadToken, receive: Receive) -> Result<(), Refused<Receive>> {
        let checked = self.check(&receive).and_then(|()| match self.expected.contains_key(&token.0) {
            true => Err(PostError::TokenInUse(token.0)),
            false => Ok(()),
        });
        match checked {
            Ok(()) => {
                self.expected.insert(token.0, receive);
                self.unstick(Want::Receive);
                Ok(())
            }
            Err(reason) => Err(Refused { reason, descriptor: receive }),
        }
    }

    /// Takes an expected place back. Nothing lands in it afterwards: a message for it that is
    /// already on its way is dropped, and one that is just landing comes to nothing.
    pub fn revoke(&mut self, token: PayloadToken) -> Option<Receive> {
        if let Some(receive) = self.expected.remove(&token.0) {
            return Some(receive);
        }
        let landing = self.landing.as_mut().filter(|landing| landing.payload_token == Some(token))?;
        landing.receive.take()
    }

    #[inline(always)]
    fn check(&self, receive: &Receive) -> Result<(), PostError> {
        if !self.member.process.is_this() {
            return Err(PostError::ForkedChild);
        }
        if let Some(failure) = self.ended {
            return Err(PostError::NotConnected(failure));
        }
        let limit = self.descriptors_max;
        if self.posted.len() + self.expected.len() >= limit {
            return Err(PostError::QueueFull { limit });
        }
        receive.check(self.tag)
    }

    /// The next completion, if there is one. Does not wait.
    #[inline(always)]
    pub fn poll(&mut self) -> Option<Completion> {
        match self.poll_small() {
            None => self.poll_any(),
            small => small,
        }
    }

    /// The common cases on their own, so that a completion is built where it is wanted: a whole
    /// message in one slot, for a receive with one buffer or in place. Everything else is left as
    /// it is.
    #[inline(always)]
    pub(crate) fn poll_small(&mut self) -> Option<Completion> {
        let head = self.reader.peek()?;
        let usual =
            self.member.process.is_this() && self.landing.is_none() && self.ended.is_none() && self.done.is_empty();
        if !usual {
            return None;
        }
        let (token, payload) = match self.posted.front_mut()?.target {
            Target::Buffer(ref mut buffer) if head.is_plain() && buffer.len() >= head.length as usize => {
                self.reader.content(0, &mut buffer[..head.length as usize]);
                self.stats.inline += 1;
                let (token, buffer) = self.filled(head)?;
                (token, Payload::Buffer(buffer))
            }
            Target::Buffer(_) if head.is_plain_span() => {
                let (token, buffer) = self.poll_copied(head)?;
                (token, Payload::Buffer(buffer))
            }
            Target::InPlace if head.is_plain_span() => {
                let (token, payload) = self.poll_held(head)?;
                (token, Payload::InPlace(payload))
            }
            _ => return None,
        };
        self.stats.messages += 1;
        self.stats.bytes += u64::from(head.length);
        Some(Completion {
            token,
            operation: Operation::Receive,
            status: Ok(()),
            length: head.length as usize,
            immediate: head.immediate,
            control: Control::EMPTY,
            payload,
        })
    }

    /// The common case of a payload that was copied: all of the message in one span of the sender's
    /// payload area.
    #[inline(never)]
    fn poll_copied(&mut self, head: RawHead) -> Option<(u64, Buffer)> {
        let (region, length, offset) = self.first_span();
        let theirs = self.member.peer.theirs();
        let inside = offset.checked_add(u64::from(length)).is_some_and(|end| end <= theirs.len() as u64);
        if region != 0 || length != head.length || !inside {
            return None;
        }
        let Some(Receive { target: Target::Buffer(buffer), .. }) = self.posted.front_mut() else { return None };
        let length = length as usize;
        let started = self.pulses.begin();
        theirs.copy_out(offset as usize, buffer.get_mut(..length)?);
        self.pulses.end(started, self.stats.messages, length);
        self.stats.buffered += 1;
        self.filled(head)
    }

    /// The posted buffer was just filled from a plain slot.
    #[inline(always)]
    fn filled(&mut self, head: RawHead) -> Option<(u64, Buffer)> {
        let Receive { token, target: Target::Buffer(buffer) } = self.posted.pop_front()? else { return None };
        if self.posted.is_empty() {
            self.note_receivable();
        }
        self.reader.consume(false, false);
        if head.is_plain_reference() {
            self.reader.publish_soon();
        }
        if self.reader.publish_due_when_free() {
            self.publish_progress();
        }
        Some((token, buffer))
    }

    /// The common case of a payload in place: all of the message in one span of a registered region.
    #[inline(always)]
    fn poll_held(&mut self, head: RawHead) -> Option<(u64, InPlace)> {
        if self.held >= self.loans_max {
            return None;
        }
        if self.reader.publish_due() {
            self.publish_progress();
        }
        let (region, length, offset) = self.first_span();
        // The payload area is no such region, and has the number zero.
        if region != self.plain_source || region == 0 || length != head.length {
            return None;
        }
        let (_, remote) = self.source.as_ref()?;
        let offset = usize::try_from(offset).ok()?;
        // A payload given back before is turned to the new place: nothing has to be counted.
        let mut payload = self.shell.take().unwrap_or_else(|| self.new_shell());
        let turned = payload.parts.first.as_mut().is_some_and(|bytes| remote.turn(bytes, offset, length as usize));
        if !turned {
            payload.parts.first = Some(PeerBytes::new(remote.memory(), offset, length as usize)?);
        }
        payload.parts.slot = Some(self.reader.tail());
        let receive = self.posted.pop_front()?;
        let token = receive.token;
        // In place: it has nothing to drop.
        std::mem::forget(receive);
        if self.posted.is_empty() {
            self.note_receivable();
        }
        self.stats.referenced += 1;
        self.count_held();
        self.reader.consume(false, true);
        if head.is_plain_reference() {
            self.reader.publish_soon();
        }
        // The first line of the next payload can be on its way meanwhile.
        if let Some((next, offset)) = self.reader.look_on()
            && next == region
            && let Some((_, remote)) = &self.source
        {
            remote.prefetch(offset);
        }
        Some((token, payload))
    }

    /// Region, length and offset of the next slot's span, where there is nothing before it.
    #[inline(always)]
    fn first_span(&self) -> (u32, u32, u64) {
        let mut bytes = [0; SPAN_BYTES];
        self.reader.content(0, &mut bytes);
        span_fields(&bytes)
    }

    #[inline(never)]
    pub(crate) fn poll_any(&mut self) -> Option<Completion> {
        if !self.member.process.is_this() {
            return None;
        }
        if !self.done.is_empty() || self.ended.is_some() {
            return self.take_done();
        }
        if self.returns.waiting.load(Acquire) {
            self.take_returns();
        }
        if self.reader.publish_due() {
            self.publish_progress();
        }
        // A peer that keeps sending what completes nothing must not keep us here.
        for _ in 0..SLOTS_PER_POLL {
            let step = match self.reader.head() {
                Ok(Some(head)) => self.handle(&head),
                Ok(None) => {
                    if !self.rest() {
                        return self.take_done();
                    }
                    continue;
                }
                Err(lie) => Err(lie),
            };
            match step {
                Ok(Step::Completed(completion)) => return Some(completion),
                Ok(Step::Next) => {}
                Ok(Step::Stuck(want)) => {
                    self.publish_progress();
                    self.stuck = Some(want);
                    self.note_receivable();
                    if self.ended.is_none() && self.member.over() {
                        self.notice_end_of_stuck();
                    }
                    return self.take_done();
                }
                Err(lie) => {
                    self.lied(lie);
                    return self.take_done();
                }
            }
        }
        None
    }

    /// Waits for the next completion, at most `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion, WaitError> {
        let (member, nic) = (self.member.clone(), self.nic.clone());
        member.wait_for(&nic.spin, timeout, || self.poll_or_end())?
    }

    pub(crate) fn poll_or_end(&mut self) -> Option<Result<Completion, WaitError>> {
        let polled = self.poll().map(Ok);
        polled.or_else(|| self.waits_in_vain().map(|failure| Err(WaitError::NotConnected(failure))))
    }

    /// Why nothing will complete any more: it is over, or the peer is gone and what it left needs a
    /// receive to be posted, or a payload to be given back.
    pub(crate) fn waits_in_vain(&self) -> Option<Failure> {
        self.ended.or_else(|| if self.stuck.is_some() && self.noticed { self.member.end() } else { None })
    }

    /// Gives a payload back to its sender at once.
    #[inline(always)]
    pub fn release(&mut self, mut payload: InPlace) {
        if !self.member.process.is_this() {
            return;
        }
        let ours = payload.parts.returns.as_ref().is_some_and(|returns| Arc::ptr_eq(returns, &self.returns));
        // One of another VI goes back the long way, when it is dropped.
        if ours && let Some(slot) = payload.parts.slot.take() {
            if self.release_slot(slot) {
                self.ring_if(self.reader.bell_wanted());
            }
            if self.shell.is_none() && payload.parts.extra.is_none() {
                // There was none: nothing has to be dropped.
                std::mem::forget(self.shell.replace(payload));
            }
        }
    }

    /// Starts recording pulses, the first `capacity` of them.
    pub fn record_pulses(&mut self, capacity: usize) {
        self.pulses.start(capacity);
    }

    /// The pulses recorded so far.
    pub fn take_pulses(&mut self) -> Vec<PulseRecord> {
        self.pulses.take()
    }

    /// Why the VI is over, once this half has noticed.
    pub fn ended(&self) -> Option<Failure> {
        self.ended
    }

    #[inline]
    fn take_done(&mut self) -> Option<Completion> {
        let next = self.done.pop_front();
        if self.done.is_empty() {
            self.member.received.store(false, Relaxed);
        }
        next
    }

    fn handle(&mut self, head: &SlotHead) -> Result<Step, Lie> {
        if head.flags.has(Flags::FIRST) { self.begin(head) } else { self.go_on(head) }
    }

    /// The first slot of a message.
    fn begin(&mut self, head: &SlotHead) -> Result<Step, Lie> {
        let index = self.reader.tail();
        if self.landing.is_some() {
            return Err(Lie::OutOfPlace { index, what: "a message begins inside another" });
        }
        if head.flags.has(Flags::OPEN) {
            return Err(Lie::OutOfPlace { index, what: "it is part of a stream, and this VI takes messages" });
        }
        let mut at = 0;
        let payload_token = head.flags.has(Flags::TOKEN).then(|| PayloadToken(self.read_u64(&mut at)));
        let whole = head.flags.has(Flags::LAST);
        let total = if whole { u64::from(head.length) } else { self.read_u64(&mut at) };
        let limit = self.nic.config.message_bytes_max;
        if total > limit {
            return Err(Lie::MessageTooLong { total, limit });
        }
        let place = match payload_token {
            Some(token) => self.expected.get(&token.0),
            None if self.posted.is_empty() => return Ok(Step::Stuck(Want::Receive)),
            None => self.posted.front(),
        };
        let capacity = place.map_or(u64::MAX, Receive::capacity);
        let in_place = place.is_some_and(|receive| matches!(receive.target, Target::InPlace));
        let holds = in_place && whole && head.kind == Kind::Spans;
        if holds && self.held >= self.loans_max {
            return Ok(Step::Stuck(Want::Release));
        }
        let receive = match payload_token {
            Some(token) => self.take_expected(token),
            None => Some(self.take_posted()),
        };
        if total > capacity
            && let Some(receive) = receive
        {
            // The message stays: a receive that is large enough gets it.
            let failure = Failure::TooLong { message: total, buffer: capacity };
            return Ok(Step::Completed(failed(receive, payload_token, failure)));
        }
        if receive.is_none() {
            self.stats.orphans += 1;
        }
        let mut control = self.read_control(head, head.prefix_bytes());
        control.set_token(payload_token);
        let mut landing =
            Landing { receive, total, got: 0, immediate: head.immediate, control, payload_token, copied: Vec::new() };
        if holds {
            return match self.hold(head, at) {
                Ok(payload) => Ok(Step::Completed(self.complete_in_place(landing, payload))),
                Err(lie) => self.broken_off(landing, lie),
            };
        }
        if let Err(lie) = self.land(head, at, &mut landing) {
            return self.broken_off(landing, lie);
        }
        if self.is_void(head) {
            return Ok(self.drop_void(landing));
        }
        self.step_over(head, false);
        if whole {
            return Ok(self.finish(landing));
        }
        self.landing = Some(landing);
        self.note_receivable();
        Ok(Step::Next)
    }

    /// A later slot of a message.
    fn go_on(&mut self, head: &SlotHead) -> Result<Step, Lie> {
        let index = self.reader.tail();
        let Some(mut landing) = self.landing.take() else {
            return Err(Lie::OutOfPlace { index, what: "a message goes on that was never begun" });
        };
        if head.length == 0 {
            return self.broken_off(landing, Lie::OutOfPlace { index, what: "a message goes on with nothing" });
        }
        if let Err(lie) = self.land(head, 0, &mut landing) {
            return self.broken_off(landing, lie);
        }
        if self.is_void(head) {
            return Ok(self.drop_void(landing));
        }
        self.step_over(head, false);
        if !head.flags.has(Flags::LAST) {
            self.landing = Some(landing);
            return Ok(Step::Next);
        }
        if landing.got != landing.total {
            return self.broken_off(landing, Lie::OutOfPlace { index, what: "a message ends before all of it came" });
        }
        self.note_receivable();
        Ok(self.finish(landing))
    }

    /// A lie in the middle of a message: its receive comes back with the others.
    #[cold]
    fn broken_off(&mut self, landing: Landing, lie: Lie) -> Result<Step, Lie> {
        self.landing = Some(landing);
        Err(lie)
    }

    /// True if the sender aborted, so that memory it referred to may have been reused while we read.
    fn is_void(&self, head: &SlotHead) -> bool {
        head.kind == Kind::Spans && self.member.peer_state() == STATE_ABORTED
    }

    #[cold]
    fn drop_void(&mut self, landing: Landing) -> Step {
        self.landing = Some(landing);
        self.end(Failure::PeerAborted);
        Step::Stuck(Want::Receive)
    }

    fn finish(&mut self, landing: Landing) -> Step {
        let Landing { receive, got, immediate, control, copied, .. } = landing;
        let Some(receive) = receive else { return Step::Next };
        if matches!(receive.target, Target::InPlace) {
            let mut completion = self.complete(receive, got as usize, immediate, control);
            completion.payload = Payload::InPlace(InPlace::copied(copied));
            return Step::Completed(completion);
        }
        Step::Completed(self.complete(receive, got as usize, immediate, control))
    }

    /// Copies what this slot carries to where its message lands.
    fn land(&mut self, head: &SlotHead, spans_at: usize, landing: &mut Landing) -> Result<(), Lie> {
        let reached = landing.got + u64::from(head.length);
        if reached > landing.total {
            return Err(Lie::MessageOverrun { total: landing.total, reached });
        }
        let started = self.pulses.begin();
        match head.kind {
            Kind::Written => {}
            Kind::Inline => {
                self.stats.inline += 1;
                let at = head.prefix_bytes() + usize::from(head.control);
                let mut bytes = [0; highwire_mem::CONTENT_BYTES];
                let bytes = &mut bytes[..head.length as usize];
                self.reader.content(at, bytes);
                scatter(landing, |from, into| into.copy_from_slice(&bytes[from..from + into.len()]), bytes.len());
            }
            Kind::Spans => {
                let mut sum = 0;
                for number in 0..usize::from(head.spans) {
                    let (memory, offset, length) = self.span(spans_at + number * SPAN_BYTES)?;
                    sum += length as u64;
                    if sum > u64::from(head.length) {
                        break;
                    }
                    scatter(landing, |from, into| memory.copy_out(offset + from, into), length);
                }
                self.check_spans(head, sum)?;
            }
        }
        self.pulses.end(started, self.stats.messages, head.length as usize);
        Ok(())
    }

    fn new_shell(&self) -> InPlace {
        InPlace::new(InPlaceParts { first: None, extra: None, slot: None, returns: Some(self.returns.clone()) })
    }

    #[inline(always)]
    fn count_held(&mut self) {
        self.held += 1;
        if self.held >= self.loans_max {
            self.member.loans_out.store(true, Relaxed);
        }
    }

    /// Keeps this slot's payload where it is.
    fn hold(&mut self, head: &SlotHead, spans_at: usize) -> Result<InPlace, Lie> {
        let mut payload = self.new_shell();
        let mut sum = 0;
        for number in 0..usize::from(head.spans) {
            let (memory, offset, length) = self.span(spans_at + number * SPAN_BYTES)?;
            sum += length as u64;
            let Some(bytes) = PeerBytes::new(memory, offset, length) else { break };
            if payload.parts.first.is_none() {
                let frozen = self.source.as_ref().filter(|(_, region)| region.kind() == RegionKind::Frozen);
                if let Some((_, region)) = frozen
                    && head.spans == 1
                {
                    payload.parts.extra.get_or_insert_default().frozen = Some((region.clone(), offset));
                }
                payload.parts.first = Some(bytes);
            } else {
                payload.parts.extra.get_or_insert_default().rest.push(bytes);
            }
        }
        self.check_spans(head, sum)?;
        payload.parts.slot = Some(self.reader.tail());
        self.count_held();
        self.step_over(head, true);
        if head.flags.has(Flags::ACKNOWLEDGE) {
            // The application has it, which is what the sender waits for.
            self.publish_progress();
        }
        Ok(payload)
    }

    fn check_spans(&self, head: &SlotHead, sum: u64) -> Result<(), Lie> {
        if sum != u64::from(head.length) {
            return Err(Lie::MessageOverrun { total: u64::from(head.length), reached: sum });
        }
        Ok(())
    }

    /// Where a span is: a place that was checked to lie inside one of the peer's regions.
    #[inline]
    fn span(&mut self, at: usize) -> Result<(PeerMemory, usize, usize), Lie> {
        let mut bytes = [0; SPAN_BYTES];
        self.reader.content(at, &mut bytes);
        let (region, length, offset) = span_fields(&bytes);
        let memory = if region == 0 {
            (self.source, self.plain_source) = (None, 0);
            self.stats.buffered += 1;
            self.member.peer.theirs().clone()
        } else {
            self.stats.referenced += 1;
            self.source_region(region)?
        };
        let inside = offset.checked_add(u64::from(length)).is_some_and(|end| end <= memory.len() as u64);
        if !inside {
            return Err(Lie::SpanOutside { region, offset, length, bytes: memory.len() as u64 });
        }
        Ok((memory, offset as usize, length as usize))
    }

    fn source_region(&mut self, region: u32) -> Result<PeerMemory, Lie> {
        if let Some((last, remote)) = &self.source
            && *last == region
        {
            return Ok(remote.memory());
        }
        let remote = self.member.peer.remote_region(region)?;
        let memory = remote.memory();
        self.plain_source = if remote.kind() == RegionKind::Registered { region } else { 0 };
        self.source = Some((region, remote));
        Ok(memory)
    }

    fn complete_in_place(&mut self, landing: Landing, payload: InPlace) -> Completion {
        let length = payload.len();
        let token = landing.receive.as_ref().map_or(0, |receive| receive.token);
        let mut completion = self.complete(Receive::new(token).in_place(), length, landing.immediate, landing.control);
        completion.payload = Payload::InPlace(payload);
        completion
    }

    #[inline]
    fn complete(&mut self, receive: Receive, length: usize, immediate: u32, control: Control) -> Completion {
        self.stats.messages += 1;
        self.stats.bytes += length as u64;
        Completion {
            token: receive.token,
            operation: Operation::Receive,
            status: Ok(()),
            length,
            immediate,
            control,
            payload: receive.into_payload(),
        }
    }

    #[inline(always)]
    fn take_posted(&mut self) -> Receive {
        let receive = self.posted.pop_front().expect("looked at before");
        if self.posted.is_empty() {
            self.note_receivable();
        }
        receive
    }

    fn take_expected(&mut self, token: PayloadToken) -> Option<Receive> {
        let receive = self.expected.remove(&token.0);
        self.note_receivable();
        receive
    }

    /// What was wanted is there, perhaps.
    #[inline(always)]
    fn unstick(&mut self, given: Want) {
        if self.stuck == Some(given) {
            self.stuck = None;
        }
        self.note_receivable();
    }

    #[inline]
    fn note_receivable(&self) {
        // A message that is landing needs no further receive. One with a token can always be
        // consumed, but nobody expects it: it waits for the next poll.
        let wanted = !self.posted.is_empty() || !self.expected.is_empty() || self.landing.is_some();
        let receivable = wanted && self.stuck.is_none();
        if self.member.receivable.load(Relaxed) != receivable {
            self.member.receivable.store(receivable, Relaxed);
        }
    }

    #[inline]
    fn read_control(&self, head: &SlotHead, at: usize) -> Control {
        let mut control = Control::EMPTY;
        if head.control > 0 {
            self.reader.content(at, control.space(usize::from(head.control)));
        }
        control
    }

    fn read_u64(&self, at: &mut usize) -> u64 {
        let mut bytes = [0; 8];
        self.reader.content(*at, &mut bytes);
        *at += 8;
        u64::from_le_bytes(bytes)
    }

    /// Done with a slot. Progress past one that is held waits for its release or the next look: if
    /// it is given back before, the sender never has to know that it was held.
    #[inline(always)]
    fn step_over(&mut self, head: &SlotHead, hold: bool) {
        self.reader.consume(head.flags.has(Flags::ACKNOWLEDGE), hold);
        if head.flags.has(Flags::SOON) {
            self.reader.publish_soon();
        }
        if !hold && self.reader.publish_due_when_free() {
            self.publish_progress();
        }
    }

    #[inline(always)]
    fn publish_progress(&mut self) {
        if self.reader.unpublished() {
            let wanted = self.reader.publish();
            self.ring_if(wanted);
        }
    }

    #[inline(always)]
    fn ring_if(&mut self, wanted: bool) {
        if wanted {
            self.rope.ring(News::Credit);
            self.stats.rings += 1;
        }
    }

    /// True if the sender is to be told by the log, and may want its bell rung.
    #[inline(always)]
    fn release_slot(&mut self, slot: u64) -> bool {
        self.held -= 1;
        if self.member.loans_out.load(Relaxed) {
            self.member.loans_out.store(false, Relaxed);
        }
        if self.stuck.is_some() {
            self.unstick(Want::Release);
        }
        if self.reader.release_unpublished(slot) {
            // Never seen as held: it goes with the next progress that is published.
            if self.reader.publish_due_when_free() {
                self.publish_progress();
            }
            return false;
        }
        self.log.release(slot);
        true
    }

    #[cold]
    fn take_returns(&mut self) {
        let mut told = false;
        for slot in self.returns.take() {
            told |= self.release_slot(slot);
        }
        self.ring_if(told && self.reader.bell_wanted());
    }

    /// Nothing to read: tell the writer how far we are, and see whether it is still there. True if
    /// there is something to read after all.
    #[inline]
    fn rest(&mut self) -> bool {
        self.publish_progress();
        if !self.member.over() {
            return false;
        }
        // What was published before the end comes first; the state was read with acquire order.
        let void = self.member.peer_state() == STATE_ABORTED || self.member.broken.get().is_some();
        if !void && self.reader.ready() {
            return true;
        }
        if let Some(failure) = self.member.end() {
            self.end(failure);
        }
        false
    }

    /// The peer is gone and left a message that no receive was posted for. It stays until one is,
    /// so the VI is over only for the sending half; but a void connection is over for both.
    #[cold]
    fn notice_end_of_stuck(&mut self) {
        self.notice();
        if self.member.peer_state() == STATE_ABORTED || self.member.broken.get().is_some() {
            let failure = self.member.end().unwrap_or(Failure::PeerAborted);
            self.end(failure);
        }
    }

    /// The queue need not tell of the end again.
    fn notice(&mut self) {
        if !std::mem::replace(&mut self.noticed, true) {
            self.member.ended.fetch_add(1, Relaxed);
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
        self.ended = Some(failure);
        self.notice();
        let landing = self.landing.take().and_then(|landing| Some((landing.receive?, landing.payload_token)));
        let posted = self.posted.drain(..).map(|receive| (receive, None));
        let expected = self.expected.drain().map(|(token, receive)| (receive, Some(PayloadToken(token))));
        let all: Vec<_> = landing.into_iter().chain(posted).chain(expected).collect();
        self.done.extend(all.into_iter().map(|(receive, token)| failed(receive, token, failure)));
        self.member.receivable.store(false, Relaxed);
        if !self.done.is_empty() {
            self.member.show(&self.member.received);
        }
    }

    pub(crate) fn member(&self) -> &Arc<HostMember> {
        &self.member
    }
}

/// Walks through the buffers of a landing message and lets `copy` fill `length` bytes from its
/// place on. `copy` is told how far into the source it is.
#[inline]
fn scatter(landing: &mut Landing, mut copy: impl FnMut(usize, &mut [u8]), length: usize) {
    let at = landing.got as usize;
    landing.got += length as u64;
    match landing.receive.as_mut().map(|receive| &mut receive.target) {
        None | Some(Target::Nowhere) => {}
        Some(Target::Buffer(buffer)) => copy(0, &mut buffer[at..at + length]),
        Some(Target::InPlace) => {
            landing.copied.resize(at + length, 0);
            copy(0, &mut landing.copied[at..]);
        }
        Some(Target::Scatter(buffers)) => {
            let (mut skip, mut from) = (at, 0);
            for buffer in buffers {
                if skip >= buffer.len() {
                    skip -= buffer.len();
                    continue;
                }
                let take = (buffer.len() - skip).min(length - from);
                copy(from, &mut buffer[skip..skip + take]);
                from += take;
                skip = 0;
                if from == length {
                    break;
                }
            }
        }
    }
}

/// Region, length and offset.
#[inline]
fn span_fields(bytes: &[u8; SPAN_BYTES]) -> (u32, u32, u64) {
    let region = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    (region, length, u64::from_le_bytes(std::array::from_fn(|i| bytes[8 + i])))
}

fn failed(receive: Receive, payload_token: Option<PayloadToken>, failure: Failure) -> Completion {
    let mut control = Control::EMPTY;
    control.set_token(payload_token);
    Completion {
        token: receive.token,
        operation: Operation::Receive,
        status: Err(failure),
        length: 0,
        immediate: 0,
        control,
        payload: receive.into_payload(),
    }
}

impl Drop for HostReceiver {
    fn drop(&mut self) {
        if self.member.process.is_this() {
            // What was received was delivered, and what was given back is free.
            self.take_returns();
            self.publish_progress();
        }
        super::half_dropped(&self.member, &self.rope);
    }
}
