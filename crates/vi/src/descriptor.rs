//! Descriptors: what goes into a work queue by value, and comes back with its completion.

use crate::config::Path;
use crate::error::{Failure, PostError};
use crate::host::remote::RemoteKey;
use highwire_mem::work::Segment;
use highwire_mem::{Buffer, CONTROL_BYTES_MAX, Frozen, PeerBytes, RemoteRegion, SharedBuffer, Tag};
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::host::member::HostMember;

/// Segments of a message. Between processes of one host, more than fit a slot are copied rather than
/// referenced.
const SEGMENTS_MAX: usize = 64;

/// Names a place that a payload is to land in: see [`crate::RecvQueue::expect`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PayloadToken(pub u64);

/// The token of a message of which nobody wants to hear again: it has a completion only if it fails. For
/// [`crate::SendQueue::send_bytes`], whose bytes are their sender's at once.
pub const QUIET: u64 = u64::MAX;

/// Up to 128 bytes that travel beside the payload. Costs nothing when empty.
#[derive(Clone, Default)]
pub struct Control(Option<Box<Beside>>);

/// What few messages have, kept out of the way of those that do not.
#[derive(Clone)]
struct Beside {
    bytes: [u8; CONTROL_BYTES_MAX],
    len: u8,
    token: Option<PayloadToken>,
}

impl Control {
    /// None.
    pub const EMPTY: Control = Control(None);

    /// These bytes, if they are not too many.
    pub fn new(from: &[u8]) -> Option<Control> {
        let mut control = Control::EMPTY;
        if from.len() > CONTROL_BYTES_MAX {
            return None;
        }
        if !from.is_empty() {
            control.space(from.len()).copy_from_slice(from);
        }
        Some(control)
    }

    fn beside(&mut self) -> &mut Beside {
        self.0.get_or_insert_with(|| Box::new(Beside { bytes: [0; CONTROL_BYTES_MAX], len: 0, token: None }))
    }

    #[inline]
    pub(crate) fn space(&mut self, len: usize) -> &mut [u8] {
        let beside = self.beside();
        beside.len = len as u8;
        &mut beside.bytes[..len]
    }

    pub(crate) fn set_token(&mut self, token: Option<PayloadToken>) {
        if token.is_some() {
            self.beside().token = token;
        }
    }

    /// True if there is neither a byte nor a token.
    #[inline(always)]
    pub(crate) fn is_nothing(&self) -> bool {
        self.0.is_none()
    }

    #[inline]
    pub(crate) fn token(&self) -> Option<PayloadToken> {
        self.0.as_ref().and_then(|beside| beside.token)
    }
}

impl Deref for Control {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |beside| &beside.bytes[..usize::from(beside.len)])
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Control({} bytes)", self.len())
    }
}

/// A message to be sent.
#[derive(Debug)]
pub struct Message {
    pub(crate) token: u64,
    pub(crate) control: Control,
    /// How many control bytes were given, so that too many can be refused with their number.
    pub(crate) control_given: usize,
    pub(crate) immediate: u32,
    pub(crate) path: Option<Path>,
    pub(crate) payload: Payload,
}

impl Message {
    /// An empty message; `token` is yours, and comes back with the completion.
    #[inline(always)]
    pub fn new(token: u64) -> Message {
        Message { token, control: Control::EMPTY, control_given: 0, immediate: 0, path: None, payload: Payload::None }
    }

    /// A message with this payload.
    pub fn carrying(token: u64, payload: Payload) -> Message {
        Message { payload, ..Message::new(token) }
    }

    /// Up to 128 bytes beside the payload.
    #[must_use]
    pub fn control(mut self, bytes: &[u8]) -> Message {
        self.control_given = bytes.len();
        let token = self.control.token();
        self.control = Control::new(bytes).unwrap_or_default();
        self.control.set_token(token);
        self
    }

    /// The 32 bits of immediate data.
    #[must_use]
    #[inline(always)]
    pub fn immediate(mut self, immediate: u32) -> Message {
        self.immediate = immediate;
        self
    }

    /// Adds a piece of payload; pieces go in the order they are added.
    #[must_use]
    #[inline(always)]
    pub fn payload(self, buffer: Buffer) -> Message {
        let Message { token, control, control_given, immediate, path, payload } = self;
        let payload = match payload {
            Payload::None => {
                // Nothing to drop, which a call would have to find out.
                std::mem::forget(payload);
                Payload::Buffer(buffer)
            }
            some => some.and(Segment::Buffer(buffer)),
        };
        Message { token, control, control_given, immediate, path, payload }
    }

    /// Adds a piece of payload that other messages may carry too.
    #[must_use]
    pub fn shared(self, buffer: SharedBuffer) -> Message {
        self.segment(Segment::Shared(buffer))
    }

    /// Adds a range of a frozen region, which the receiver may borrow as a slice. Panics if the
    /// range is not inside.
    #[must_use]
    pub fn frozen(self, region: &Frozen, range: Range<usize>) -> Message {
        assert!(
            range.start <= range.end && range.end <= region.len(),
            "{range:?} is outside a frozen region of {} bytes",
            region.len()
        );
        self.segment(Segment::Frozen(region.clone(), range))
    }

    fn segment(mut self, segment: Segment) -> Message {
        self.payload = self.payload.and(segment);
        self
    }

    /// The payload is to land where the receiver expects this token.
    #[must_use]
    pub fn lands_at(mut self, token: PayloadToken) -> Message {
        self.control.set_token(Some(token));
        self
    }

    /// The buffers, of a message that was refused.
    pub fn into_payload(self) -> Payload {
        self.payload
    }

    /// How this payload travels.
    #[must_use]
    #[inline(always)]
    pub fn by(mut self, path: Path) -> Message {
        self.path = Some(path);
        self
    }
}

/// A place for a message to arrive in.
#[derive(Debug)]
pub struct Receive {
    pub(crate) token: u64,
    pub(crate) target: Target,
}

#[derive(Debug)]
pub(crate) enum Target {
    /// Nowhere: only control and immediate data are wanted, and an empty payload.
    Nowhere,
    Buffer(Buffer),
    Scatter(Vec<Buffer>),
    InPlace,
}

impl Receive {
    /// Room for control and immediate data only; `token` is yours, and comes back.
    #[inline(always)]
    pub fn new(token: u64) -> Receive {
        Receive { token, target: Target::Nowhere }
    }

    /// Room for a payload in these buffers, filled in their order. Only pieces that are the caller's alone can be filled:
    /// with others they come back.
    pub fn filling(token: u64, room: Payload) -> Result<Receive, Payload> {
        let target = match room {
            Payload::None => Target::Nowhere,
            Payload::Buffer(buffer) => Target::Buffer(buffer),
            Payload::Segments(segments) if segments.iter().all(|segment| matches!(segment, Segment::Buffer(_))) => {
                let buffers = segments.into_iter().filter_map(|segment| match segment {
                    Segment::Buffer(buffer) => Some(buffer),
                    Segment::Shared(_) | Segment::Frozen(..) => None,
                });
                Target::Scatter(buffers.collect())
            }
            other => return Err(other),
        };
        Ok(Receive { token, target })
    }

    /// The payload is copied into `buffer`; several are filled in the order given.
    #[must_use]
    #[inline(always)]
    pub fn into(self, buffer: Buffer) -> Receive {
        match self {
            Receive { token, target: Target::Nowhere } => Receive { token, target: Target::Buffer(buffer) },
            some => some.and_into(buffer),
        }
    }

    #[cold]
    fn and_into(mut self, buffer: Buffer) -> Receive {
        self.target = match self.target {
            Target::Nowhere | Target::InPlace => Target::Buffer(buffer),
            Target::Buffer(first) => Target::Scatter(vec![first, buffer]),
            Target::Scatter(mut buffers) => {
                buffers.push(buffer);
                Target::Scatter(buffers)
            }
        };
        self
    }

    /// The payload stays in the sender's memory and is read there.
    #[must_use]
    #[inline(always)]
    pub fn in_place(self) -> Receive {
        let Receive { token, target } = self;
        match target {
            // Nothing to drop, which a call would have to find out.
            Target::Nowhere => std::mem::forget(target),
            given => drop(given),
        }
        Receive { token, target: Target::InPlace }
    }

    pub(crate) fn capacity(&self) -> u64 {
        match &self.target {
            Target::Nowhere => 0,
            Target::Buffer(buffer) => buffer.len() as u64,
            Target::Scatter(buffers) => buffers.iter().map(|buffer| buffer.len() as u64).sum(),
            Target::InPlace => u64::MAX,
        }
    }

    /// Whether its buffers are of this protection tag, and not too many.
    #[inline(always)]
    pub(crate) fn check(&self, vi: Tag) -> Result<(), PostError> {
        let wrong = |buffer: &Buffer| (buffer.tag() != vi).then(|| buffer.tag());
        let wrong_tag = match &self.target {
            Target::Buffer(buffer) => wrong(buffer),
            Target::Scatter(buffers) if buffers.len() > SEGMENTS_MAX => {
                return Err(PostError::TooManySegments { segments: buffers.len(), limit: SEGMENTS_MAX });
            }
            Target::Scatter(buffers) => buffers.iter().find_map(wrong),
            Target::Nowhere | Target::InPlace => None,
        };
        match wrong_tag {
            Some(buffer) => Err(PostError::WrongTag { buffer, vi }),
            None => Ok(()),
        }
    }

    /// The buffers, of a receive that came back or was revoked.
    #[inline(always)]
    pub fn into_payload(self) -> Payload {
        match self.target {
            Target::Nowhere | Target::InPlace => Payload::None,
            Target::Buffer(buffer) => Payload::Buffer(buffer),
            Target::Scatter(buffers) => Payload::Segments(buffers.into_iter().map(Segment::Buffer).collect()),
        }
    }
}

/// A write into a peer's exported memory.
#[derive(Debug)]
pub struct RdmaWrite {
    pub(crate) token: u64,
    pub(crate) key: RemoteKey,
    pub(crate) offset: u64,
    pub(crate) immediate: Option<u32>,
    pub(crate) payload: Payload,
}

impl RdmaWrite {
    /// Writes at `offset` of what `key` grants.
    pub fn new(token: u64, key: RemoteKey, offset: u64) -> RdmaWrite {
        RdmaWrite { token, key, offset, immediate: None, payload: Payload::None }
    }

    /// What is written.
    #[must_use]
    pub fn payload(mut self, buffer: Buffer) -> RdmaWrite {
        self.payload = Payload::Buffer(buffer);
        self
    }

    /// Tells the peer afterwards, with this immediate data: it consumes one of its receives.
    #[must_use]
    pub fn immediate(mut self, immediate: u32) -> RdmaWrite {
        self.immediate = Some(immediate);
        self
    }
}

/// A read from a peer's exported or registered memory.
#[derive(Debug)]
pub struct RdmaRead {
    pub(crate) token: u64,
    pub(crate) key: RemoteKey,
    pub(crate) offset: u64,
    pub(crate) into: Buffer,
}

impl RdmaRead {
    /// Fills `into` from `offset` of what `key` grants.
    pub fn new(token: u64, key: RemoteKey, offset: u64, into: Buffer) -> RdmaRead {
        RdmaRead { token, key, offset, into }
    }
}

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A message was sent.
    Send,
    /// A message arrived, or a remote write with immediate data.
    Receive,
    /// Remote memory was written.
    RdmaWrite,
    /// Remote memory was read.
    RdmaRead,
}

/// Buffers on their way, or back.
#[derive(Debug, Default)]
pub enum Payload {
    /// None.
    #[default]
    None,
    /// One buffer.
    Buffer(Buffer),
    /// Several pieces.
    Segments(Box<[Segment]>),
    /// A message that stays where its sender put it.
    InPlace(InPlace),
}

impl Payload {
    /// This and one more piece.
    #[must_use]
    pub fn and(self, segment: Segment) -> Payload {
        match (self, segment) {
            (Payload::None, Segment::Buffer(buffer)) => Payload::Buffer(buffer),
            (payload, segment) => payload.and_more(segment),
        }
    }

    /// The pieces, in order.
    pub fn into_segments(self) -> Vec<Segment> {
        match self {
            Payload::None | Payload::InPlace(_) => Vec::new(),
            Payload::Buffer(buffer) => vec![Segment::Buffer(buffer)],
            Payload::Segments(segments) => segments.into_vec(),
        }
    }

    #[cold]
    fn and_more(self, segment: Segment) -> Payload {
        let mut segments = self.into_segments();
        segments.push(segment);
        Payload::Segments(segments.into())
    }

    /// The buffer; the first that is nobody else's, of several pieces.
    #[inline(always)]
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Payload::Buffer(buffer) => Some(buffer),
            payload => payload.into_first_buffer(),
        }
    }

    #[cold]
    fn into_first_buffer(self) -> Option<Buffer> {
        self.into_segments().into_iter().find_map(|segment| match segment {
            Segment::Buffer(buffer) => Some(buffer),
            Segment::Shared(_) | Segment::Frozen(..) => None,
        })
    }

    /// Whether its buffers are of this protection tag.
    pub(crate) fn check_tags(&self, vi: Tag) -> Result<(), PostError> {
        let check = |buffer: Tag| match buffer == vi {
            true => Ok(()),
            false => Err(PostError::WrongTag { buffer, vi }),
        };
        match self {
            Payload::None | Payload::InPlace(_) => Ok(()),
            Payload::Buffer(buffer) => check(buffer.tag()),
            Payload::Segments(segments) => segments.iter().try_for_each(|segment| match segment {
                Segment::Buffer(buffer) => check(buffer.tag()),
                Segment::Shared(buffer) => check(buffer.buffer().tag()),
                Segment::Frozen(region, _) => check(region.tag()),
            }),
        }
    }

    /// How many pieces it has, if that is not too many.
    pub(crate) fn check_segments(&self) -> Result<usize, PostError> {
        match self {
            Payload::Segments(segments) if segments.len() > SEGMENTS_MAX => {
                Err(PostError::TooManySegments { segments: segments.len(), limit: SEGMENTS_MAX })
            }
            Payload::Segments(segments) => Ok(segments.len()),
            _ => Ok(1),
        }
    }

    /// Bytes in all.
    #[inline]
    pub fn total(&self) -> u64 {
        match self {
            Payload::None => 0,
            Payload::Buffer(buffer) => buffer.len() as u64,
            Payload::Segments(segments) => segments.iter().map(|segment| segment.bytes().len() as u64).sum(),
            Payload::InPlace(payload) => payload.len() as u64,
        }
    }
}

/// A descriptor's end: it is done, or failed, and everything it held is here.
#[derive(Debug)]
pub struct Completion {
    /// The descriptor's token.
    pub token: u64,
    /// What was done.
    pub operation: Operation,
    /// Whether it was.
    pub status: Result<(), Failure>,
    /// Payload bytes moved.
    pub length: usize,
    /// Immediate data received.
    pub immediate: u32,
    /// Control bytes received.
    pub control: Control,
    /// The buffers.
    pub payload: Payload,
}

// Completions move through queues and returns by value, so they are kept small.
const _: () = assert!(size_of::<Completion>() <= 96);

impl Completion {
    /// For a receive that was expected by token, which.
    pub fn payload_token(&self) -> Option<PayloadToken> {
        self.control.token()
    }

    /// The buffer, of a descriptor that had one; the first, of one that had several.
    #[inline(always)]
    pub fn into_buffer(self) -> Option<Buffer> {
        self.payload.into_buffer()
    }

    /// The payload in place, of a receive that asked for it.
    #[inline(always)]
    pub fn into_in_place(self) -> Option<InPlace> {
        match self.payload {
            Payload::InPlace(payload) => Some(payload),
            _ => None,
        }
    }
}

/// Where payloads go back to when they are dropped away from their queue.
#[derive(Debug)]
pub(crate) struct Returns {
    slots: Mutex<Vec<u64>>,
    pub waiting: AtomicBool,
    member: Arc<HostMember>,
}

impl Returns {
    pub(crate) fn new(member: Arc<HostMember>) -> Returns {
        Returns { slots: Mutex::default(), waiting: AtomicBool::new(false), member }
    }

    fn put(&self, slot: u64) {
        if !self.member.process.is_this() {
            // A forked child has a copy of the value, but the payload is its parent's.
            return;
        }
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        self.waiting.store(true, Ordering::Release);
        self.member.show(&self.member.returned);
    }

    pub(crate) fn take(&self) -> Vec<u64> {
        self.member.returned.store(false, Ordering::Relaxed);
        self.waiting.store(false, Ordering::Release);
        std::mem::take(&mut *self.slots.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A received payload that is still in its sender's memory. The sender may change it at any time
/// unless it is frozen. Give it back with [`crate::RecvQueue::release`]; one that is only dropped
/// goes back when the queue is polled next.
///
/// It is one pointer wide; those given back are used again.
#[derive(Debug)]
pub struct InPlace {
    pub(crate) parts: Box<InPlaceParts>,
}

#[derive(Debug)]
pub(crate) struct InPlaceParts {
    pub first: Option<PeerBytes>,
    pub extra: Option<Box<Extra>>,
    /// The slot that is held, until it is given back.
    pub slot: Option<u64>,
    pub returns: Option<Arc<Returns>>,
}

/// What few payloads have.
#[derive(Debug, Default)]
pub(crate) struct Extra {
    pub rest: Vec<PeerBytes>,
    /// A payload that came in the slot itself or in several pulses, copied.
    pub copied: Vec<u8>,
    pub frozen: Option<(RemoteRegion, usize)>,
}

impl InPlace {
    pub(crate) fn copied(bytes: Vec<u8>) -> InPlace {
        let extra = Extra { copied: bytes, ..Extra::default() };
        InPlace::new(InPlaceParts { first: None, extra: Some(Box::new(extra)), slot: None, returns: None })
    }

    pub(crate) fn new(parts: InPlaceParts) -> InPlace {
        InPlace { parts: Box::new(parts) }
    }

    /// The pieces, in order; none if the payload was so small that it was copied.
    pub fn spans(&self) -> impl Iterator<Item = &PeerBytes> {
        self.parts.first.iter().chain(self.parts.extra.iter().flat_map(|extra| &extra.rest))
    }

    fn copied_bytes(&self) -> &[u8] {
        self.parts.extra.as_ref().map_or(&[], |extra| &extra.copied)
    }

    /// Bytes in all.
    #[inline]
    pub fn len(&self) -> usize {
        let first = self.parts.first.as_ref().map_or(0, PeerBytes::len);
        let extra = |extra: &Extra| extra.copied.len() + extra.rest.iter().map(PeerBytes::len).sum::<usize>();
        first + self.parts.extra.as_deref().map_or(0, extra)
    }

    /// True for an empty payload.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Byte `at`, as it is now. Panics past the end.
    #[inline]
    pub fn byte(&self, at: usize) -> u8 {
        let mut at = at;
        for span in self.spans() {
            if at < span.len() {
                return span.byte(at);
            }
            at -= span.len();
        }
        self.copied_bytes()[at]
    }

    /// Copies from `at` on. Panics past the end.
    #[inline(always)]
    pub fn copy_to(&self, at: usize, into: &mut [u8]) {
        match &self.parts.first {
            Some(only) if self.parts.extra.is_none() => only.copy_to(at, into),
            _ => self.copy_pieces(at, into),
        }
    }

    fn copy_pieces(&self, mut at: usize, mut into: &mut [u8]) {
        for span in self.spans() {
            if at >= span.len() {
                at -= span.len();
                continue;
            }
            let take = into.len().min(span.len() - at);
            let (now, later) = into.split_at_mut(take);
            span.copy_to(at, now);
            into = later;
            at = 0;
        }
        if !into.is_empty() {
            into.copy_from_slice(&self.copied_bytes()[at..at + into.len()]);
        }
    }

    /// The whole payload as a slice, where nobody can change it: frozen, or copied.
    pub fn as_slice(&self) -> Option<&[u8]> {
        let Some(first) = &self.parts.first else { return Some(self.copied_bytes()) };
        let (region, offset) = self.parts.extra.as_ref()?.frozen.as_ref()?;
        region.frozen_bytes(*offset, first.len())
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        if let (Some(slot), Some(returns)) = (self.parts.slot, &self.parts.returns) {
            returns.put(slot);
        }
    }
}
