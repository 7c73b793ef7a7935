//! A receiving half that is used as a stream of bytes: the counterpart of the sending one.
//!
//! A slot that is open is read as far as it goes, again and again, and consumed when the next one is there: only then
//! it has all that it will have.

use super::HostReceiver;
use crate::error::Failure;
use crate::stream::{StreamRules, Taken};
use highwire_mem::{CONTENT_BYTES, Flags, Kind, Lie, News};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[derive(Debug)]
pub(crate) struct HostStreamReceiver {
    rx: HostReceiver,
    current: Option<Current>,
    /// Bytes taken of the current slot.
    taken: u32,
    /// Counts reads that found something, for the sending half.
    heard: Arc<AtomicU64>,
}

/// The slot at the tail, checked.
#[derive(Clone, Copy, Debug)]
struct Current {
    /// Where its bytes are in the peer's region, if not in the slot.
    area: Option<usize>,
    /// Bytes of it when it was first seen.
    length: u32,
    capacity: u32,
    open: bool,
    mark: u32,
}

impl HostStreamReceiver {
    pub(crate) fn new(mut rx: HostReceiver, rules: &StreamRules, heard: Arc<AtomicU64>) -> HostStreamReceiver {
        rx.reader.set_threshold(rules.acknowledge);
        rx.member.receivable.store(true, Relaxed);
        HostStreamReceiver { rx, current: None, taken: 0, heard }
    }

    /// Takes as much as there is, up to `into`.
    #[inline(always)]
    pub(crate) fn read(&mut self, into: &mut [u8]) -> Taken {
        match self.take(into) {
            Ok(Some(taken)) => taken,
            Ok(None) => self.rest(into),
            Err(lie) => self.lied(lie),
        }
    }

    pub(crate) fn has_more(&mut self) -> bool {
        self.rx.ended.is_some() || self.rx.reader.ready() || self.rx.member.over()
    }

    /// Why the connection is over, once everything was read.
    pub(crate) fn ended(&self) -> Option<Failure> {
        self.rx.ended
    }

    #[inline(always)]
    fn take(&mut self, into: &mut [u8]) -> Result<Option<Taken>, Lie> {
        let mut got = 0;
        if !self.rx.member.process.is_this() || self.rx.ended.is_some() {
            return Ok(None);
        }
        loop {
            let current = match self.current {
                Some(current) => current,
                None => match self.begin()? {
                    Some(current) => current,
                    None => break,
                },
            };
            if current.mark != 0 {
                if got == 0 {
                    self.consume();
                    return Ok(Some(Taken::Mark(current.mark)));
                }
                break;
            }
            let length = self.length(current)?;
            if length > self.taken {
                let count = ((length - self.taken) as usize).min(into.len() - got);
                self.copy(current, &mut into[got..got + count]);
                self.taken += count as u32;
                got += count;
                self.rx.reader.note_taken(self.taken);
                if got == into.len() && (current.open || self.taken < length) {
                    break;
                }
            }
            if self.taken == length && !self.leave(current, length) || got == into.len() {
                break;
            }
        }
        if got == 0 {
            return Ok(None);
        }
        self.rx.stats.bytes += got as u64;
        self.heard.store(self.heard.load(Relaxed).wrapping_add(1), Relaxed);
        if self.rx.reader.publish_due() {
            self.rx.publish_progress();
        }
        Ok(Some(Taken::Bytes(got)))
    }

    /// The slot at the tail, if there is one.
    #[inline(always)]
    fn begin(&mut self) -> Result<Option<Current>, Lie> {
        let Some(raw) = self.rx.reader.peek() else { return Ok(None) };
        let current = if raw.is_plain() {
            Current { area: None, length: raw.length, capacity: raw.length, open: false, mark: raw.immediate }
        } else {
            let index = self.rx.reader.tail();
            match self.rx.reader.head()? {
                Some(head) if head.is_bare_whole() => self.placed(head, index)?,
                _ => return Err(Lie::OutOfPlace { index, what: "no part of a stream is like this" }),
            }
        };
        if current.mark == 0 && current.length == 0 || current.mark != 0 && (current.length != 0 || current.open) {
            let index = self.rx.reader.tail();
            return Err(Lie::OutOfPlace { index, what: "a part of a stream has bytes or a mark" });
        }
        self.taken = 0;
        self.rx.stats.messages += 1;
        self.current = Some(current);
        Ok(Some(current))
    }

    fn placed(&mut self, head: highwire_mem::SlotHead, index: u64) -> Result<Current, Lie> {
        let (mark, open) = (head.immediate, head.flags.has(Flags::OPEN));
        match head.kind {
            Kind::Inline => {
                self.rx.stats.inline += 1;
                let capacity = if open { CONTENT_BYTES as u32 } else { head.length };
                Ok(Current { area: None, length: head.length, capacity, open, mark })
            }
            Kind::Spans if head.spans == 1 => {
                let (region, capacity, offset) = self.rx.first_span();
                let bytes = self.rx.member.peer.theirs().len() as u64;
                let inside = offset.checked_add(u64::from(capacity)).is_some_and(|end| end <= bytes);
                if region != 0 || !inside {
                    return Err(Lie::SpanOutside { region, offset, length: capacity, bytes });
                }
                self.rx.stats.buffered += 1;
                Ok(Current { area: Some(offset as usize), length: head.length, capacity, open, mark })
            }
            _ => Err(Lie::OutOfPlace { index, what: "no part of a stream is like this" }),
        }
    }

    /// How many bytes the current slot has by now.
    #[inline(always)]
    fn length(&self, current: Current) -> Result<u32, Lie> {
        let length = if current.open { self.rx.reader.length_now() } else { current.length };
        if length < self.taken || length > current.capacity {
            let index = self.rx.reader.tail();
            return Err(Lie::SlotOverfull { index, control: 0, spans: 0, length });
        }
        Ok(length)
    }

    #[inline(always)]
    fn copy(&self, current: Current, into: &mut [u8]) {
        match current.area {
            None => self.rx.reader.content(self.taken as usize, into),
            Some(offset) => self.rx.member.peer.theirs().copy_out(offset + self.taken as usize, into),
        }
    }

    /// All `length` bytes of the current slot were taken: goes on to the next, or stays if it may still grow.
    #[inline(always)]
    fn leave(&mut self, current: Current, length: u32) -> bool {
        if current.open && length < current.capacity {
            if !self.rx.reader.is_sealed() {
                return false;
            }
            if self.rx.reader.length_now() != length {
                // It grew before the next was published.
                return true;
            }
        }
        self.consume();
        true
    }

    #[inline(always)]
    fn consume(&mut self) {
        self.current = None;
        self.taken = 0;
        self.rx.reader.note_taken(0);
        self.rx.reader.consume(false, false);
    }

    /// Nothing there: the writer is told how far we are, and it is seen whether it is still there.
    fn rest(&mut self, into: &mut [u8]) -> Taken {
        if let Some(failure) = self.rx.ended {
            return Taken::Ended(failure);
        }
        if !self.rx.member.process.is_this() {
            return Taken::Ended(Failure::ForkedChild);
        }
        if !self.rx.rest() {
            return self.rx.ended.map_or(Taken::Nothing, Taken::Ended);
        }
        // There is something after all.
        match self.take(into) {
            Ok(taken) => taken.unwrap_or(Taken::Nothing),
            Err(lie) => self.lied(lie),
        }
    }

    #[cold]
    fn lied(&mut self, lie: Lie) -> Taken {
        self.rx.member.break_off(Failure::PeerLied(lie));
        self.rx.rope.ring(News::End);
        self.rx.end(Failure::PeerLied(lie));
        Taken::Ended(Failure::PeerLied(lie))
    }
}
