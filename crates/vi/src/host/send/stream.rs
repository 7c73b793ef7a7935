//! A sending half that is used as a stream of bytes.
//!
//! What is written goes into the last slot, while that has room: it stays *open*, and its length grows until the next slot
//! is published. So a busy pipe combines, an idle one sends, and no byte waits for a timer or another call: when a write
//! returns, the reader sees it, even if the writer dies. A slot of its own is read with one cache line less, so whoever
//! has heard of the peer since its last write, and is most likely waited for, takes one.
//!
//! ```text
//!      something was heard: a slot of its own             nothing was: into the open slot
//!  write ──────▶ ┌──────┬──────┬─────────────┐ ◀────────── write
//!                │ slot │ slot │ open slot ▸ │            full: a new one, twice as large, up to a chunk
//!                └──────┴──────┴─────────────┘
//!                ▲ consumed                  ▲ head       head - consumed ≤ window
//! ```
//! `consumed` is in the reader's memory, and looked at only when the window seems to be full.

use super::HostSender;
use crate::error::{Failure, PostError};
use crate::halves::SendStats;
use crate::stream::{Combining, StreamRules, Talk};
use highwire_mem::{CONTENT_BYTES, Flags, Kind, SlotHead};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct HostStreamSender {
    tx: HostSender,
    window: u64,
    chunk_bytes: usize,
    combining: Combining,
    open: Option<Open>,
    talk: Arc<Talk>,
    /// Bytes written since something was heard.
    unanswered: usize,
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
    pub(crate) fn new(tx: HostSender, rules: &StreamRules, talk: Arc<Talk>) -> HostStreamSender {
        // Marks need a slot, whatever the window.
        let window = u64::from(rules.window).clamp(1, tx.writer.depth() - MARKS);
        HostStreamSender {
            tx,
            window,
            chunk_bytes: rules.chunk_bytes.max(1),
            combining: rules.combining,
            open: None,
            talk,
            unanswered: 0,
        }
    }

    pub(crate) fn set_combining(&mut self, combining: Combining) {
        // What is open stays so: its reader waits for more of it, or for the next slot.
        self.combining = combining;
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
        if self.talk.note_said() {
            self.unanswered = 0;
        } else if self.combining == Combining::WhileBusy
            && let Some(open) = self.open
            && open.capacity - open.length >= bytes.len()
        {
            self.append(open, bytes);
            return Ok(bytes.len());
        }
        self.write_slot(bytes)
    }

    #[inline(never)]
    fn write_slot(&mut self, bytes: &[u8]) -> Result<usize, PostError> {
        let mut slots = self.tx.writer.head() - self.tx.writer.consumed();
        if slots + 1 >= self.window {
            slots = self.slots_in_use()?;
        }
        let last = slots + 1 >= self.window;
        let full = slots >= self.window;
        match self.open {
            // What there is room for goes behind the rest.
            Some(open) if full && open.length < open.capacity => {
                let part = &bytes[..bytes.len().min(open.capacity - open.length)];
                self.append(open, part);
                Ok(part.len())
            }
            _ if full => Err(PostError::NoRoom { bytes: bytes.len() }),
            _ => self.publish(bytes, last),
        }
    }

    /// Says something beside the bytes, in its place among them.
    pub(crate) fn mark(&mut self, mark: u32) -> Result<(), PostError> {
        self.tx.check_open()?;
        self.slots_in_use()?;
        if self.tx.writer.credit() == 0 {
            return Err(PostError::NoRoom { bytes: 0 });
        }
        self.open = None;
        let head = SlotHead { immediate: mark, ..head(Kind::Inline, false, 0) };
        self.tx.writer.publish_plain(head, &[]);
        self.tx.ring_if_wanted();
        Ok(())
    }

    /// True if a byte could be written now, or an error would come at once.
    pub(crate) fn has_room(&mut self) -> bool {
        let Ok(slots) = self.slots_in_use() else { return true };
        let room = slots < self.window || self.open.is_some_and(|open| open.length < open.capacity);
        room || self.ended().is_some()
    }

    /// Has the completion queue tell when the reader has given something back.
    pub(crate) fn await_room(&mut self) {
        let _ = self.tx.want(PostError::NoRoom { bytes: 1 });
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
                let memory = self.tx.member.peer.ours();
                memory.copy_in(offset + open.length, bytes);
                self.tx.writer.lengthen(length as u32);
                // The lines are with the reader since the last lap; fetched one by one they would be what takes the time.
                for line in (0..bytes.len()).step_by(LINE) {
                    memory.prefetch_to_write(offset + (length + AHEAD + line).min(open.capacity - 1));
                }
            }
        }
        self.open = Some(Open { length, ..open });
        self.unanswered += bytes.len();
        self.tx.stats.bytes += bytes.len() as u64;
        self.tx.ring_if_wanted();
    }

    /// A slot with as many of `bytes` as it takes.
    fn publish(&mut self, bytes: &[u8], last: bool) -> Result<usize, PostError> {
        let length = bytes.len().min(self.chunk_bytes);
        let capacity = match self.combining {
            Combining::WhileBusy => length.max(self.unanswered).min(self.chunk_bytes),
            Combining::WhenFull if last => self.chunk_bytes,
            Combining::WhenFull | Combining::Never => length,
        };
        if capacity <= CONTENT_BYTES {
            return Ok(self.publish_inline(&bytes[..length]));
        }
        let Some(extent) = self.tx.take_piece(length.min(PIECE_BYTES_LEAST), capacity) else {
            if let Some(failure) = self.tx.ended {
                return Err(PostError::NotConnected(failure));
            }
            // Memory is short, so slots have to do.
            return Ok(self.publish_inline(&bytes[..length.min(CONTENT_BYTES)]));
        };
        let length = length.min(extent.len);
        let open = length < extent.len;
        let head = head(Kind::Spans, open, length);
        self.tx.in_flight.push(self.tx.writer.head(), Some(extent.id), None, false);
        self.tx.member.peer.ours().copy_in(extent.offset, &bytes[..length]);
        self.tx.writer.publish_open_span(head, extent.len as u32, extent.offset as u64);
        self.tx.ring_if_wanted();
        self.tx.stats.buffered += 1;
        self.tx.count_message(length);
        self.unanswered += length;
        self.open = open.then_some(Open { length, capacity: extent.len, area: Some(extent.offset) });
        Ok(length)
    }

    #[inline(always)]
    fn publish_inline(&mut self, bytes: &[u8]) -> usize {
        let open = self.combining == Combining::WhileBusy && bytes.len() < CONTENT_BYTES;
        let head = head(Kind::Inline, open, bytes.len());
        self.tx.writer.publish_plain(head, bytes);
        self.tx.ring_if_wanted();
        self.tx.stats.inline += 1;
        self.tx.count_message(bytes.len());
        self.unanswered += bytes.len();
        self.open = open.then_some(Open { length: bytes.len(), capacity: CONTENT_BYTES, area: None });
        bytes.len()
    }
}

/// The head of a slot that may grow, or is what it is.
#[inline(always)]
fn head(kind: Kind, open: bool, length: usize) -> SlotHead {
    let flags = if open { Flags::WHOLE.with(Flags::OPEN) } else { Flags::WHOLE };
    SlotHead { kind, flags, control: 0, spans: 0, length: length as u32, immediate: 0 }
}

const LINE: usize = 64;
/// So far ahead of what is written lines are asked for.
const AHEAD: usize = 16 * LINE;
/// Slots that are kept for marks.
const MARKS: u64 = 2;
/// A piece of the payload area is worth having from this size on, if it is not all that was asked for.
const PIECE_BYTES_LEAST: usize = 4 << 10;
