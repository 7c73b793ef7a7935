//! A sending half that is used as a stream of bytes.
//!
//! While the reader is behind, what is written goes into the last slot, which stays *open*: its length grows until the
//! next slot is published. So a busy pipe combines, an idle one sends, and no byte waits for a timer or another call:
//! when a write returns, the reader sees it, even if the writer dies.
//!
//! ```text
//!                 idle: a slot of its own                 busy: into the open slot, while it has room
//!  write ──────▶ ┌──────┬──────┬─────────────┐ ◀────────── write
//!                │ slot │ slot │ open slot ▸ │            full: a new one, of a whole chunk
//!                └──────┴──────┴─────────────┘
//!                ▲ consumed                  ▲ head       head - consumed ≤ window
//! ```

use super::HostSender;
use crate::error::{Failure, PostError};
use crate::halves::SendStats;
use crate::stream::{Combining, StreamRules};
use highwire_mem::{CONTENT_BYTES, Flags, Kind, SlotHead};

/// With so many slots that the reader has not given back it is idle: it keeps the open one until there is another.
const IDLE_SLOTS: u64 = 1;

#[derive(Debug)]
pub(crate) struct HostStreamSender {
    tx: HostSender,
    window: u64,
    chunk_bytes: usize,
    combining: Combining,
    open: Option<Open>,
}

/// The last slot, while it may grow.
#[derive(Clone, Copy, Debug)]
struct Open {
    length: usize,
    capacity: usize,
    /// Where its bytes are in our region, if not in the slot.
    area: Option<usize>,
}

impl HostStreamSender {
    pub(crate) fn new(tx: HostSender, rules: &StreamRules) -> HostStreamSender {
        // Marks need a slot, whatever the window.
        let window = u64::from(rules.window).clamp(1, tx.writer.depth() - MARKS);
        HostStreamSender { tx, window, chunk_bytes: rules.chunk_bytes.max(1), combining: rules.combining, open: None }
    }

    pub(crate) fn set_combining(&mut self, combining: Combining) {
        self.combining = combining;
        self.open = None;
    }

    pub(crate) fn stats(&self) -> SendStats {
        self.tx.stats
    }

    pub(crate) fn ended(&mut self) -> Option<Failure> {
        self.tx.notice_end();
        self.tx.ended
    }

    /// Takes as many of `bytes` as there is room for, at least one.
    #[inline(always)]
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<usize, PostError> {
        self.tx.check_open()?;
        let slots = self.slots_in_use()?;
        if self.is_busy(slots)
            && let Some(open) = self.open
            && open.capacity - open.length >= bytes.len()
        {
            self.append(open, bytes);
            return Ok(bytes.len());
        }
        self.write_slot(bytes, slots)
    }

    /// With so many slots in use, what is written goes where there is room for more.
    #[inline(always)]
    fn is_busy(&self, slots: u64) -> bool {
        match self.combining {
            Combining::WhileBusy => slots > IDLE_SLOTS,
            Combining::WhenFull => slots + 1 >= self.window,
            Combining::Never => false,
        }
    }

    #[inline(never)]
    fn write_slot(&mut self, bytes: &[u8], slots: u64) -> Result<usize, PostError> {
        if slots < self.window {
            return self.publish(bytes, self.is_busy(slots));
        }
        // What there is room for goes behind the rest.
        match self.open {
            Some(open) if open.length < open.capacity => {
                let part = &bytes[..bytes.len().min(open.capacity - open.length)];
                self.append(open, part);
                Ok(part.len())
            }
            _ => Err(self.tx.want(PostError::NoRoom { bytes: bytes.len() })),
        }
    }

    /// Says something beside the bytes, in its place among them.
    pub(crate) fn mark(&mut self, mark: u32) -> Result<(), PostError> {
        self.tx.check_open()?;
        self.slots_in_use()?;
        if self.tx.writer.credit() == 0 {
            return Err(self.tx.want(PostError::NoRoom { bytes: 0 }));
        }
        self.open = None;
        let head = SlotHead { immediate: mark, ..self.head(Kind::Inline, Flags::WHOLE, 0) };
        self.tx.writer.publish_plain(head, &[]);
        self.tx.ring_if_wanted();
        Ok(())
    }

    /// True if a byte could be written now, or an error would come at once.
    pub(crate) fn has_room(&mut self) -> bool {
        let Ok(slots) = self.slots_in_use() else { return true };
        let room = slots < self.window || self.open.is_some_and(|open| open.length < open.capacity);
        if !room {
            let _ = self.tx.want(PostError::NoRoom { bytes: 1 });
        }
        room || self.ended().is_some()
    }

    /// Slots that the reader has not given back, as far as is known after a look.
    #[inline(always)]
    fn slots_in_use(&mut self) -> Result<u64, PostError> {
        if let Err(lie) = self.tx.look_at_credit() {
            self.tx.lied(lie);
            return Err(PostError::NotConnected(Failure::PeerLied(lie)));
        }
        Ok(self.tx.writer.head() - self.tx.writer.consumed())
    }

    #[inline(always)]
    fn append(&mut self, open: Open, bytes: &[u8]) {
        let length = open.length + bytes.len();
        match open.area {
            None => self.tx.writer.append(open.length, bytes),
            Some(offset) => {
                self.tx.member.peer.ours().copy_in(offset + open.length, bytes);
                self.tx.writer.lengthen(length as u32);
            }
        }
        self.open = Some(Open { length, ..open });
        self.tx.stats.bytes += bytes.len() as u64;
        self.tx.ring_if_wanted();
    }

    /// A slot with as many of `bytes` as it takes. While the reader is `busy` it has room for more.
    fn publish(&mut self, bytes: &[u8], busy: bool) -> Result<usize, PostError> {
        let length = bytes.len().min(self.chunk_bytes);
        if length <= CONTENT_BYTES && !busy {
            return Ok(self.publish_inline(&bytes[..length]));
        }
        let capacity = if busy { self.chunk_bytes } else { length };
        let Some(extent) = self.tx.take_piece(length.min(PIECE_BYTES_LEAST), capacity) else {
            if self.tx.ended.is_some() {
                return Err(PostError::NotConnected(self.tx.ended.unwrap_or(Failure::Closed)));
            }
            // Memory is short, so slots have to do.
            return Ok(self.publish_inline(&bytes[..length.min(CONTENT_BYTES)]));
        };
        let length = length.min(extent.len);
        let open = length < extent.len;
        let flags = if open { Flags::WHOLE.with(Flags::OPEN) } else { Flags::WHOLE };
        let head = self.head(Kind::Spans, flags, length);
        self.tx.in_flight.push(self.tx.writer.head(), Some(extent.id), None, false);
        self.tx.member.peer.ours().copy_in(extent.offset, &bytes[..length]);
        self.tx.writer.publish_open_span(head, extent.len as u32, extent.offset as u64);
        self.tx.ring_if_wanted();
        self.tx.stats.buffered += 1;
        self.tx.count_message(length);
        self.open = open.then_some(Open { length, capacity: extent.len, area: Some(extent.offset) });
        Ok(length)
    }

    #[inline(always)]
    fn publish_inline(&mut self, bytes: &[u8]) -> usize {
        let open = self.combining == Combining::WhileBusy && bytes.len() < CONTENT_BYTES;
        let flags = if open { Flags::WHOLE.with(Flags::OPEN) } else { Flags::WHOLE };
        let head = self.head(Kind::Inline, flags, bytes.len());
        self.tx.writer.publish_plain(head, bytes);
        self.tx.ring_if_wanted();
        self.tx.stats.inline += 1;
        self.tx.count_message(bytes.len());
        self.open = open.then_some(Open { length: bytes.len(), capacity: CONTENT_BYTES, area: None });
        bytes.len()
    }

    #[inline(always)]
    fn head(&self, kind: Kind, flags: Flags, length: usize) -> SlotHead {
        SlotHead { kind, flags, control: 0, spans: 0, length: length as u32, immediate: 0 }
    }
}

/// Slots that are kept for marks.
const MARKS: u64 = 2;
/// A piece of the payload area is worth having from this size on, if it is not all that was asked for.
const PIECE_BYTES_LEAST: usize = 4 << 10;
