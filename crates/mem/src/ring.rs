//! The ring of slots: one writer, one reader, each writing only its own memory.
//!
//! A message goes through it in these steps; `docs/protocol/shared-memory.md` tells them at length.
//!
//! 1. The writer has credit while `head - consumed < depth`, counted with its cached copy of the
//!    reader's `consumed`; it reads the reader's memory again only when that copy is used up.
//! 2. It fills the slot's content and the head behind the sequence word,
//! 3. then stores the sequence (release): the slot is published.
//! 4. The reader polls the sequence word of the slot at its tail (acquire). A value other than
//!    `tail + 1` means "not yet", whatever it is: a peer that lies there only keeps itself waiting.
//! 5. It copies the head once, checks it, copies the content out, and advances its tail.
//! 6. It publishes `consumed` when a quarter of the ring has gathered, before it sleeps, and at
//!    once where the slot asked for it.

use crate::bell::Attention;
use crate::layout::{Block, CONTENT_BYTES, CONTROL_BYTES_MAX, HEAD_BYTES, LENGTH_AT, SLOT_BYTES};
use crate::memory::{OwnMemory, PeerMemory};
use crate::sync::{Ordering, writer_fence, writers_fence};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// Something in a peer's memory that cannot be true. It ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lie {
    /// The reader claims to have consumed slots that were never written, or goes backwards.
    #[error("the peer says it consumed {claimed} slots; between {least} and {most} are possible")]
    Consumed {
        /// What it claims.
        claimed: u64,
        /// The least that can be true.
        least: u64,
        /// The most that can be true.
        most: u64,
    },
    /// A slot of a kind that this version does not know.
    #[error("slot {index} has the unknown kind {kind}")]
    UnknownKind {
        /// The slot's index.
        index: u64,
        /// The kind read.
        kind: u8,
    },
    /// The parts of a slot do not fit into it, or do not go together.
    #[error(
        "slot {index} claims {control} control bytes, {spans} spans and {length} payload bytes, which no slot can hold"
    )]
    SlotOverfull {
        /// The slot's index.
        index: u64,
        /// Control bytes claimed.
        control: u8,
        /// Spans claimed.
        spans: u8,
        /// Payload bytes claimed.
        length: u32,
    },
    /// A slot that continues a message although none was begun, or begins one inside another.
    #[error("slot {index} does not follow the slot before it: {what}")]
    OutOfPlace {
        /// The slot's index.
        index: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The parts of a message add up to more than its beginning announced.
    #[error("a message announced with {total} bytes has parts that reach {reached}")]
    MessageOverrun {
        /// Bytes announced.
        total: u64,
        /// Bytes that the parts reach.
        reached: u64,
    },
    /// A message announced as longer than this side's limit.
    #[error("a message of {total} bytes is announced; the limit is {limit}")]
    MessageTooLong {
        /// Bytes announced.
        total: u64,
        /// The limit in force.
        limit: u64,
    },
    /// A payload span that lies outside the peer's region.
    #[error("a payload of {length} bytes at offset {offset} is outside region {region} of {bytes} bytes")]
    SpanOutside {
        /// Which region.
        region: u32,
        /// Offset claimed.
        offset: u64,
        /// Length claimed.
        length: u32,
        /// Bytes of the region.
        bytes: u64,
    },
    /// A payload in a region that was never handed over.
    #[error("a payload is said to be in region {region}, which was never handed over")]
    UnknownRegion {
        /// The region named.
        region: u32,
    },
    /// The reader gives back a payload that it does not hold.
    #[error("the peer gives back slot {index}, which it does not hold")]
    ReleasedUnheld {
        /// The slot index it names.
        index: u64,
    },
    /// Something came on the pair's socket that is no region that can be taken over.
    #[error("the peer handed over something that is no region, or not a safe one")]
    BadHandover,
    /// The reader holds more payloads than the connection allows.
    #[error("the peer holds more than the {limit} payloads that this connection allows")]
    HoldsTooMany {
        /// The limit in force.
        limit: u32,
    },
}

/// What a slot carries its payload in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// In the slot itself.
    Inline,
    /// In spans of the writer's regions, named in the slot.
    Spans,
    /// Nothing: a remote write has been done, and this tells of it.
    Written,
}

/// Bits of a slot's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flags(u8);

impl Flags {
    /// The first slot of a message.
    pub const FIRST: Flags = Flags(1);
    /// The last slot of a message.
    pub const LAST: Flags = Flags(2);
    /// A whole message in one slot.
    pub const WHOLE: Flags = Flags(3);
    /// A payload token follows the head: the payload goes where the token says.
    pub const TOKEN: Flags = Flags(4);
    /// The reader is asked to publish its progress as soon as it has consumed this slot.
    pub const ACKNOWLEDGE: Flags = Flags(8);

    /// The reader is asked to publish its progress as soon as it has no more use for the payload,
    /// unless it has seen that a further slot is there.
    pub const SOON: Flags = Flags(16);
    /// The payload may grow until the next slot is published: part of a stream.
    pub const OPEN: Flags = Flags(32);

    const KNOWN: u8 = 63;

    /// These bits and those of `other`.
    #[must_use]
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// True where all bits of `other` are set.
    #[inline]
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A slot's head, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotHead {
    /// What the payload is in.
    pub kind: Kind,
    /// Place in the message, and wishes.
    pub flags: Flags,
    /// Control bytes, up to 128.
    pub control: u8,
    /// Number of 16-byte spans.
    pub spans: u8,
    /// Payload bytes that this slot carries.
    pub length: u32,
    /// The immediate data.
    pub immediate: u32,
}

const SPANS: u8 = 2;

/// A slot's head as it was read, in a form that stays in registers. It is what the peer says, and
/// the common cases can be told from it at a glance.
#[derive(Clone, Copy, Debug)]
pub struct RawHead {
    meta: u32,
    /// Payload bytes that this slot is said to carry.
    pub length: u32,
    /// The immediate data.
    pub immediate: u32,
}

impl RawHead {
    /// A whole message in the slot, with nothing beside it, that fits there.
    #[inline(always)]
    pub fn is_plain(self) -> bool {
        self.meta == PLAIN && self.length as usize <= CONTENT_BYTES
    }

    /// A whole message in one span, with nothing beside it.
    #[inline(always)]
    pub fn is_plain_span(self) -> bool {
        self.meta == PLAIN_SPAN || self.is_plain_reference()
    }

    /// The same, and its sender waits for its memory.
    #[inline(always)]
    pub fn is_plain_reference(self) -> bool {
        self.meta == PLAIN_REFERENCE
    }
}

/// The heads of most slots, with nothing beside the payload: a whole message in the slot, in one
/// span, and in one span that is referred to.
const PLAIN: u32 = u32::from_le_bytes([1, Flags::WHOLE.0, 0, 0]);
const PLAIN_SPAN: u32 = u32::from_le_bytes([SPANS, Flags::WHOLE.0, 0, 1]);
const PLAIN_REFERENCE: u32 = u32::from_le_bytes([SPANS, Flags::WHOLE.with(Flags::SOON).0, 0, 1]);

/// How many slots ahead the writer and the reader ask for lines: what arrives while that many are
/// handled.
#[cfg(not(loom))]
const WRITE_AHEAD: u64 = 8;
#[cfg(not(loom))]
const READ_AHEAD: u64 = 3;

#[cfg(not(loom))]
const LINE: usize = 64;

/// So many slots in a row are a stream.
#[cfg(not(loom))]
const STREAM: u32 = 4;

/// How many slots [`SlotReader`] has bits for.
const HOLDING: u64 = 64;

#[inline(always)]
fn holding_bit(index: u64) -> u64 {
    1 << (index % HOLDING)
}

/// Bytes of a span in a slot: region `u32`, length `u32`, offset `u64`.
pub(crate) const SPAN_BYTES: usize = 16;

impl SlotHead {
    /// Bytes before the control bytes: the token, the total length, the spans.
    #[inline]
    pub fn prefix_bytes(&self) -> usize {
        let token = if self.flags.has(Flags::TOKEN) { 8 } else { 0 };
        let total = if self.flags.has(Flags::FIRST) && !self.flags.has(Flags::LAST) { 8 } else { 0 };
        token + total + usize::from(self.spans) * SPAN_BYTES
    }

    /// True of a whole message with nothing beside it.
    pub fn is_bare_whole(&self) -> bool {
        self.flags.has(Flags::WHOLE) && !self.flags.has(Flags::TOKEN) && self.control == 0
    }

    #[inline(always)]
    fn meta(self) -> u32 {
        let kind = match self.kind {
            Kind::Inline => 1,
            Kind::Spans => SPANS,
            Kind::Written => 3,
        };
        u32::from_le_bytes([kind, self.flags.0, self.control, self.spans])
    }

    fn parse(index: u64, raw: RawHead) -> Result<SlotHead, Lie> {
        let RawHead { meta, length, immediate } = raw;
        let [kind, flags, control, spans] = meta.to_le_bytes();
        let kind = match kind {
            1 => Kind::Inline,
            SPANS => Kind::Spans,
            3 => Kind::Written,
            _ => return Err(Lie::UnknownKind { index, kind }),
        };
        let head = SlotHead { kind, flags: Flags(flags), control, spans, length, immediate };
        let inline = if kind == Kind::Inline { length as usize } else { 0 };
        let fits = head.prefix_bytes() + usize::from(control) + inline <= CONTENT_BYTES && inline <= CONTENT_BYTES;
        let goes_together = usize::from(control) <= CONTROL_BYTES_MAX
            && flags & !Flags::KNOWN == 0
            && (kind == Kind::Spans) == (spans > 0)
            && (kind != Kind::Written || length == 0)
            && (head.flags.has(Flags::FIRST) || control == 0 && !head.flags.has(Flags::TOKEN))
            && (!head.flags.has(Flags::OPEN) || head.is_bare_whole() && kind != Kind::Written);
        if fits && goes_together { Ok(head) } else { Err(Lie::SlotOverfull { index, control, spans, length }) }
    }
}

#[inline]
fn sequence(index: u64) -> u32 {
    (index as u32).wrapping_add(1)
}

impl Block {
    /// Makes the block in `own` ready for a connection whose first slot is `start`, before the peer
    /// is told of it. `fresh` says that the memory was never used and still has the kernel's zeros.
    pub fn prepare(self, own: &OwnMemory, start: u64, fresh: bool) {
        let shape = self.shape();
        let depth = u64::from(shape.depth());
        own.store64(self.consumed(), start);
        Attention::NONE.announce(own, self);
        if !fresh {
            (0..depth).for_each(|index| own.store64(self.held(index), 0));
            (0..u64::from(shape.log_entries())).for_each(|index| own.store64(self.release(index), 0));
        }
        if !fresh || start != 0 {
            for index in start..start + depth {
                // What the lap before would have left: never what a reader waits for.
                let at = self.slots() + (index & (depth - 1)) as usize * SLOT_BYTES;
                own.store64(at, u64::from(sequence(index).wrapping_sub(depth as u32)));
            }
        }
    }
}

/// A look at a writer's credit from outside, as a completion queue needs it.
#[derive(Clone, Debug)]
pub struct CreditWatch {
    peer: PeerMemory,
    consumed_at: usize,
    seen: Arc<AtomicU64>,
}

impl CreditWatch {
    /// True if the reader has made progress that the writer has not seen.
    #[inline]
    pub fn moved(&self) -> bool {
        self.peer.load64(self.consumed_at) != self.seen.load(Relaxed)
    }
}

/// The writing end of a ring.
#[derive(Debug)]
pub struct SlotWriter {
    own: OwnMemory,
    peer: PeerMemory,
    slots_at: usize,
    mask: u64,
    peer_block: Block,
    peer_consumed_at: usize,
    peer_attention_at: usize,
    head: u64,
    consumed: u64,
    seen: Arc<AtomicU64>,
    full_fence: bool,
}

impl SlotWriter {
    /// The writer of the ring in `block` of `own`, read by the peer that answers in `peer_block`
    /// of `peer`. `start` is the index of the first slot, agreed by both, for which `block` was
    /// prepared. `full_fence` is for a peer whose sleepers cannot fence for us (no `membarrier`).
    pub fn new(
        own: OwnMemory,
        block: Block,
        peer: PeerMemory,
        peer_block: Block,
        start: u64,
        full_fence: bool,
    ) -> SlotWriter {
        let depth = u64::from(block.shape().depth());
        SlotWriter {
            slots_at: block.slots(),
            mask: depth - 1,
            peer_block,
            peer_consumed_at: peer_block.consumed(),
            peer_attention_at: peer_block.attention(),
            head: start,
            consumed: start,
            seen: Arc::new(AtomicU64::new(start)),
            own,
            peer,
            full_fence: writers_fence(full_fence),
        }
    }

    /// A view of the credit for whoever waits on many writers.
    pub fn watch(&self) -> CreditWatch {
        CreditWatch { peer: self.peer.clone(), consumed_at: self.peer_consumed_at, seen: self.seen.clone() }
    }

    /// Index of the next slot to be written.
    #[inline]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// What the reader was last seen to have consumed.
    #[inline]
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Slots of the ring.
    #[inline]
    pub fn depth(&self) -> u64 {
        self.mask + 1
    }

    /// Slots that can be written now, as far as this side knows without looking.
    #[inline]
    pub fn credit(&self) -> u64 {
        self.mask + 1 - (self.head - self.consumed)
    }

    /// Looks at the reader's progress; true if it moved.
    #[inline]
    pub fn refresh(&mut self) -> Result<bool, Lie> {
        // Acquire: pairs with the release in `SlotReader::publish`.
        let claimed = self.peer.load64(self.peer_consumed_at);
        if claimed == self.consumed {
            return Ok(false);
        }
        if claimed < self.consumed || claimed > self.head {
            return Err(Lie::Consumed { claimed, least: self.consumed, most: self.head });
        }
        self.consumed = claimed;
        self.seen.store(claimed, Relaxed);
        Ok(true)
    }

    /// True if the reader holds the payload of slot `index`, which it has consumed. To be asked
    /// before slot `index + depth` is published: the reader's answer to that one takes its place.
    #[inline]
    pub fn holds(&self, index: u64) -> bool {
        self.peer.load64(self.peer_block.held(index)) == index + 1
    }

    /// Writes the next slot and publishes it. `prefix`, `control` and `inline` are put one after
    /// the other; their lengths must be what `head` says. Panics without credit.
    #[inline]
    pub fn publish(&mut self, head: SlotHead, prefix: &[u8], control: &[u8], inline: &[u8]) -> u64 {
        debug_assert_eq!(prefix.len(), head.prefix_bytes());
        debug_assert_eq!(control.len(), usize::from(head.control));
        let bytes = prefix.len() + control.len() + inline.len();
        let at = self.claim(bytes);
        let mut content = at + HEAD_BYTES;
        for part in [prefix, control, inline] {
            if !part.is_empty() {
                self.own.copy_in(content, part);
                content += part.len();
            }
        }
        self.seal(at, head, bytes)
    }

    /// The same for a message in the slot with nothing beside it. All of `head` stays in registers.
    #[inline(always)]
    pub fn publish_plain(&mut self, head: SlotHead, inline: &[u8]) -> u64 {
        let at = self.claim(inline.len());
        self.own.copy_in(at + HEAD_BYTES, inline);
        self.seal(at, head, inline.len())
    }

    /// The same for one span of `head.length` bytes with nothing beside it.
    #[inline(always)]
    pub fn publish_span(&mut self, head: SlotHead, region: u32, offset: u64) -> u64 {
        let at = self.claim(SPAN_BYTES);
        let span = u128::from(region) | u128::from(head.length) << 32 | u128::from(offset) << 64;
        self.own.copy_in(at + HEAD_BYTES, &span.to_le_bytes());
        self.seal(at, SlotHead { spans: 1, ..head }, SPAN_BYTES)
    }

    /// The same for one span of the writer's region that has `capacity` bytes, of which `head.length` are there.
    #[inline]
    pub fn publish_open_span(&mut self, head: SlotHead, capacity: u32, offset: u64) -> u64 {
        let at = self.claim(SPAN_BYTES);
        let span = u128::from(capacity) << 32 | u128::from(offset) << 64;
        self.own.copy_in(at + HEAD_BYTES, &span.to_le_bytes());
        self.seal(at, SlotHead { spans: 1, ..head }, SPAN_BYTES)
    }

    /// Adds to the content of the last slot, which was published open, of this kind and with `length` bytes so far.
    #[inline(always)]
    pub fn append(&mut self, length: usize, bytes: &[u8]) {
        assert!(length + bytes.len() <= CONTENT_BYTES, "a slot's content is at most 240 bytes");
        self.own.copy_in(self.last_at() + HEAD_BYTES + length, bytes);
        self.lengthen((length + bytes.len()) as u32);
    }

    /// Says that the last slot, which was published open and without immediate data, has `length` bytes by now.
    #[inline(always)]
    pub fn lengthen(&mut self, length: u32) {
        // Release: pairs with the acquire in `SlotReader::length_now`.
        self.own.store64(self.last_at() + LENGTH_AT, u64::from(length));
    }

    /// Where the last slot is.
    #[inline(always)]
    fn last_at(&self) -> usize {
        self.slots_at + (self.head.wrapping_sub(1) & self.mask) as usize * SLOT_BYTES
    }

    /// Where the next slot is.
    #[inline(always)]
    fn claim(&self, bytes: usize) -> usize {
        assert!(self.credit() > 0, "a slot was written without credit");
        assert!(bytes <= CONTENT_BYTES, "a slot's content is at most 240 bytes");
        self.slots_at + (self.head & self.mask) as usize * SLOT_BYTES
    }

    /// The content is there: the head follows, and the sequence last.
    #[inline(always)]
    fn seal(&mut self, at: usize, head: SlotHead, bytes: usize) -> u64 {
        let index = self.head;
        let sizes = u64::from(head.length) | u64::from(head.immediate) << 32;
        self.own.0.store64(at + LENGTH_AT, sizes, Ordering::Relaxed);
        // Release: pairs with the acquire in `SlotReader::ready`.
        self.own.store64(at, u64::from(sequence(index)) | u64::from(head.meta()) << 32);
        self.head = index + 1;
        // The lines of a later slot are still with the reader; in a stream, fetching them one after
        // the other is what would take the time.
        #[cfg(not(loom))]
        {
            let later = self.slots_at + ((index + WRITE_AHEAD) & self.mask) as usize * SLOT_BYTES;
            crate::sys::prefetch_to_write(&self.own.0, later);
            if HEAD_BYTES + bytes > LINE {
                crate::sys::prefetch_to_write(&self.own.0, later + LINE);
            }
        }
        #[cfg(loom)]
        let _ = bytes;
        index
    }

    /// After publishing: does the reader want its bell rung for this?
    #[inline]
    pub fn bell_wanted(&self) -> bool {
        writer_fence(self.full_fence);
        Attention::from_word(self.peer.load32(self.peer_attention_at)).slots
    }
}

/// The reading end of a ring.
#[derive(Debug)]
pub struct SlotReader {
    watch: SlotWatch,
    own: OwnMemory,
    block: Block,
    peer_attention_at: usize,
    published: u64,
    /// A bit for each slot that is held, of the first [`HOLDING`] that the writer does not know to
    /// be consumed yet: most are given back before, and their marks are never written.
    holding: u64,
    threshold: u64,
    acknowledge: bool,
    soon: bool,
    /// The next slot was seen to be there.
    more: bool,
    /// Slots found in a row.
    streak: u32,
    full_fence: bool,
}

/// A look at a reader's next slot from outside, as a completion queue needs it.
#[derive(Clone, Debug)]
pub struct SlotWatch {
    peer: PeerMemory,
    slots_at: usize,
    mask: u64,
    place: Arc<Place>,
}

/// How far a reader is.
#[derive(Debug)]
struct Place {
    tail: AtomicU64,
    /// Bytes that were taken of the slot at the tail, if it is open.
    taken: AtomicU32,
}

impl SlotWatch {
    /// True if the reader has a slot to read, or more of the one that it is at.
    #[inline]
    pub fn ready(&self) -> bool {
        let tail = self.place.tail.load(Relaxed);
        if !self.is_published(tail) {
            return false;
        }
        let taken = self.place.taken.load(Relaxed);
        taken == 0 || self.length(tail) != taken || self.is_published(tail + 1)
    }

    #[inline(always)]
    fn at(&self, index: u64) -> usize {
        self.slots_at + (index & self.mask) as usize * SLOT_BYTES
    }

    #[inline(always)]
    fn is_published(&self, index: u64) -> bool {
        // Acquire: pairs with the release at the end of `SlotWriter::publish`.
        self.peer.load64(self.at(index)) as u32 == sequence(index)
    }

    #[inline(always)]
    fn length(&self, index: u64) -> u32 {
        // Acquire: pairs with the release in `SlotWriter::lengthen`.
        self.peer.load64(self.at(index) + LENGTH_AT) as u32
    }
}

impl SlotWatch {
    /// True if the reader has a slot to read that it cannot want to hold.
    pub fn ready_without_loan(&self) -> bool {
        let tail = self.place.tail.load(Relaxed);
        let first = self.peer.load64(self.at(tail));
        let [kind, flags, ..] = ((first >> 32) as u32).to_le_bytes();
        first as u32 == sequence(tail) && !(kind == SPANS && Flags(flags).has(Flags::WHOLE))
    }
}

impl SlotReader {
    /// The reader of the ring in `peer_block` of `peer`, which answers in `block` of `own`.
    pub fn new(
        own: OwnMemory,
        block: Block,
        peer: PeerMemory,
        peer_block: Block,
        start: u64,
        full_fence: bool,
    ) -> SlotReader {
        let shape = block.shape();
        let depth = u64::from(shape.depth());
        SlotReader {
            watch: SlotWatch {
                peer,
                slots_at: peer_block.slots(),
                mask: depth - 1,
                place: Arc::new(Place { tail: AtomicU64::new(start), taken: AtomicU32::new(0) }),
            },
            own,
            block,
            peer_attention_at: peer_block.attention(),
            published: start,
            holding: 0,
            threshold: (depth / 4).max(1),
            acknowledge: false,
            soon: false,
            more: false,
            streak: 0,
            full_fence: writers_fence(full_fence),
        }
    }

    /// A view of the next slot for whoever waits on many readers.
    pub fn watch(&self) -> SlotWatch {
        self.watch.clone()
    }

    /// Progress is to be published as soon as the payload is no longer in use.
    #[inline]
    pub fn publish_soon(&mut self) {
        if !self.soon {
            self.soon = true;
        }
    }

    /// Index of the next slot to be read.
    #[inline(always)]
    pub fn tail(&self) -> u64 {
        self.watch.place.tail.load(Relaxed)
    }

    #[inline]
    fn slot_at(&self) -> usize {
        self.watch.at(self.tail())
    }

    /// How many bytes the next slot has by now, which is published and open.
    #[inline(always)]
    pub fn length_now(&self) -> u32 {
        self.watch.length(self.tail())
    }

    /// True if the slot behind the next one is published: the next one has all that it will have.
    #[inline(always)]
    pub fn is_sealed(&self) -> bool {
        self.watch.is_published(self.tail() + 1)
    }

    /// So many bytes of the next slot, which is open, were taken.
    #[inline(always)]
    pub fn note_taken(&mut self, taken: u32) {
        self.watch.place.taken.store(taken, Relaxed);
    }

    /// Progress is published when it has come to so many slots.
    pub fn set_threshold(&mut self, slots: u32) {
        self.threshold = u64::from(slots.max(1));
    }

    /// True if the next slot has been published.
    #[inline]
    pub fn ready(&self) -> bool {
        // Acquire: pairs with the release at the end of `SlotWriter::publish`.
        self.watch.ready()
    }

    /// The head of the next slot, copied once and checked; `None` if there is none yet.
    #[inline]
    pub fn head(&mut self) -> Result<Option<SlotHead>, Lie> {
        let Some(raw) = self.peek() else { return Ok(None) };
        SlotHead::parse(self.tail(), raw).map(Some)
    }

    /// The head of the next slot, copied once and not checked; `None` if there is none yet.
    #[inline(always)]
    pub fn peek(&mut self) -> Option<RawHead> {
        let at = self.slot_at();
        // Acquire: pairs with the release at the end of `SlotWriter::publish`.
        let first = self.watch.peer.load64(at);
        if first as u32 != sequence(self.tail()) {
            if self.streak != 0 {
                self.streak = 0;
            }
            return None;
        }
        let sizes = self.watch.peer.glance64(at + LENGTH_AT);
        Some(RawHead { meta: (first >> 32) as u32, length: sizes as u32, immediate: (sizes >> 32) as u32 })
    }

    /// Copies part of the next slot's content. Panics past its 240 bytes.
    #[inline]
    pub fn content(&self, from: usize, into: &mut [u8]) {
        assert!(from + into.len() <= CONTENT_BYTES, "a slot's content is 240 bytes");
        self.watch.peer.copy_out_of_slot(self.slot_at() + HEAD_BYTES + from, into);
    }

    /// In a stream, looks whether a further slot is there already, and tells what is where its first
    /// span would be, region and offset: a hint of what comes, to be checked again when it does.
    #[cfg(not(loom))]
    #[inline(always)]
    pub fn look_on(&mut self) -> Option<(u32, u64)> {
        if !self.in_stream() || !self.ready() {
            return None;
        }
        self.more = true;
        // The line of a later slot can be on its way while this one is handled. Where there is no
        // further one yet, its writer is left alone with it.
        let later = (self.tail() + READ_AHEAD) & self.watch.mask;
        self.watch.peer.prefetch(self.watch.slots_at + later as usize * SLOT_BYTES);
        let (at, peer) = (self.slot_at() + HEAD_BYTES, &self.watch.peer);
        Some((peer.glance64(at) as u32, peer.glance64(at + 8)))
    }

    /// Done with the next slot. `acknowledge` is its flag; with `hold`, its payload stays in use
    /// until [`SlotReader::release_unpublished`] or a [`crate::ReleaseLog`] gives it back.
    #[inline(always)]
    pub fn consume(&mut self, acknowledge: bool, hold: bool) {
        let tail = self.tail();
        if hold {
            if tail - self.published < HOLDING {
                self.holding |= holding_bit(tail);
            } else {
                self.own.store64(self.block.held(tail), tail + 1);
            }
        }
        self.watch.place.tail.store(tail + 1, Relaxed);
        self.acknowledge |= acknowledge;
        self.more = false;
        self.streak = self.streak.saturating_add(1);
    }

    /// True while slots were found without waiting, several in a row.
    #[cfg(not(loom))]
    #[inline]
    fn in_stream(&self) -> bool {
        self.streak >= STREAM
    }

    /// Gives back the payload of a slot that was consumed with `hold`, if the writer cannot know of
    /// that yet; false if it can, and a [`crate::ReleaseLog`] has to tell it.
    #[inline(always)]
    pub fn release_unpublished(&mut self, index: u64) -> bool {
        if index < self.published {
            return false;
        }
        if index - self.published < HOLDING {
            self.holding &= !holding_bit(index);
        } else {
            self.own.store64(self.block.held(index), 0);
        }
        true
    }

    /// What the writer sees as held from the next progress on.
    #[cold]
    fn mark_holding(&mut self) {
        for index in (self.published..self.tail()).take(HOLDING as usize) {
            if self.holding & holding_bit(index) != 0 {
                self.own.store64(self.block.held(index), index + 1);
            }
        }
        self.holding = 0;
    }

    /// True if progress should be published now, by the delayed-acknowledgement rule.
    #[inline(always)]
    pub fn publish_due(&self) -> bool {
        self.acknowledge || self.tail() - self.published >= self.threshold
    }

    /// The same, when a payload is no longer in use.
    #[inline(always)]
    pub fn publish_due_when_free(&self) -> bool {
        self.soon && !self.more || self.publish_due()
    }

    /// True if there is progress that the writer cannot see yet.
    #[inline]
    pub fn unpublished(&self) -> bool {
        self.tail() != self.published
    }

    /// Publishes the progress; true if the writer wants its bell rung for it.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.acknowledge = false;
        self.soon = false;
        if self.holding != 0 {
            self.mark_holding();
        }
        self.published = self.tail();
        // Release: pairs with the acquire in `SlotWriter::refresh`; covers `held` and, since the
        // content was copied before, the slots themselves.
        self.own.store64(self.block.consumed(), self.published);
        self.bell_wanted()
    }

    /// Does the writer want its bell rung for progress and releases?
    #[inline]
    pub fn bell_wanted(&self) -> bool {
        writer_fence(self.full_fence);
        Attention::from_word(self.watch.peer.load32(self.peer_attention_at)).credit
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
