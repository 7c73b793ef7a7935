//! A receiving half that is used as a stream of bytes: the counterpart of the sending one.
//!
//! A slot that is open is read as far as it goes, again and again, and consumed when the next one is there: only then
//! it has all that it will have.

use super::HostReceiver;
use crate::error::Failure;
use crate::stream::{StreamRules, Taken, Talk};
use highwire_mem::{CONTENT_BYTES, Flags, Kind, Lie, Ticks, pause, ticks, ticks_per_second};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct HostStreamReceiver {
    rx: HostReceiver,
    current: Option<Current>,
    /// Bytes taken of the current slot.
    taken: u32,
    talk: Arc<Talk>,
    /// How long to leave the writer alone before the next look at a slot that grows, in ticks, and the least.
    patience: Ticks,
    patience_least: Ticks,
}

/// The slot at the tail, checked.
#[derive(Clone, Copy, Debug)]
struct Current {
    /// Where its bytes are in the peer's region, if not in the slot.
    area: Option<usize>,
    /// Bytes of it when it was last looked at.
    length: u32,
    capacity: u32,
    open: bool,
    mark: u32,
}

impl HostStreamReceiver {
    pub(crate) fn new(mut rx: HostReceiver, rules: &StreamRules, talk: Arc<Talk>) -> HostStreamReceiver {
        rx.reader.set_threshold(rules.acknowledge);
        rx.member.receivable.store(true, Relaxed);
        let patience_least = (PATIENCE_LEAST.as_secs_f64() * ticks_per_second()) as Ticks;
        HostStreamReceiver { rx, current: None, taken: 0, talk, patience: 0, patience_least }
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
        if !self.rx.member.process.is_this() || self.rx.ended.is_some() {
            return Ok(None);
        }
        let (mut got, mut looked) = (0, false);
        loop {
            let mut current = match self.current {
                Some(current) => current,
                None => {
                    looked = true;
                    match self.begin()? {
                        Some(current) => current,
                        None => break,
                    }
                }
            };
            if current.mark != 0 {
                if got == 0 {
                    self.consume();
                    return Ok(Some(Taken::Mark(current.mark)));
                }
                break;
            }
            if current.length == self.taken && !looked {
                self.be_patient(got);
                looked = true;
                current = self.look_again(current)?;
            }
            let count = ((current.length - self.taken) as usize).min(into.len() - got);
            if count > 0 {
                self.copy(current, &mut into[got..got + count]);
                self.taken += count as u32;
                got += count;
                self.rx.reader.note_taken(self.taken);
            }
            if self.taken == current.length && current.length == current.capacity {
                self.consume();
                looked = false;
            }
            if got == into.len() {
                break;
            }
            if self.current.is_some() && looked {
                // All that there was, unless the next slot is there and this one grew before.
                if !self.rx.reader.is_sealed() {
                    break;
                }
                if self.look_again(current)?.length == self.taken {
                    self.consume();
                    looked = false;
                }
            }
        }
        if got == 0 {
            return Ok(None);
        }
        self.note_taken(got);
        Ok(Some(Taken::Bytes(got)))
    }

    #[inline(always)]
    fn note_taken(&mut self, got: usize) {
        self.rx.stats.bytes += got as u64;
        let in_turn = self.talk.note_heard();
        let most = self.patience_least * PATIENCE_MOST;
        self.patience = match (in_turn, got) {
            (true, _) => 0,
            (false, 0..ENOUGH_BYTES) => (self.patience * 2).clamp(self.patience_least, most),
            (false, _) => self.patience / 2,
        };
        if self.rx.reader.publish_due() {
            self.rx.publish_progress();
        }
    }

    /// Leaves the writer alone for a moment. Whoever only reads, and finds little each time, would take the line from it
    /// at every write, and each would take as long as the line's way there and back.
    #[inline(always)]
    fn be_patient(&self, got: usize) {
        if self.patience > 0 && got == 0 {
            let began = ticks();
            while ticks().wrapping_sub(began) < self.patience {
                pause();
            }
        }
    }

    /// How much the current slot, which may be open, has by now.
    #[inline(always)]
    fn look_again(&mut self, current: Current) -> Result<Current, Lie> {
        let length = if current.open { self.rx.reader.length_now() } else { current.length };
        if length < current.length || length > current.capacity {
            let index = self.rx.reader.tail();
            return Err(Lie::SlotOverfull { index, control: 0, spans: 0, length });
        }
        let current = Current { length, ..current };
        self.current = Some(current);
        Ok(current)
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
                if head.length > capacity {
                    return Err(Lie::MessageOverrun { total: u64::from(capacity), reached: u64::from(head.length) });
                }
                let capacity = if open { capacity } else { head.length };
                self.rx.stats.buffered += 1;
                Ok(Current { area: Some(offset as usize), length: head.length, capacity, open, mark })
            }
            _ => Err(Lie::OutOfPlace { index, what: "no part of a stream is like this" }),
        }
    }

    #[inline(always)]
    fn copy(&self, current: Current, into: &mut [u8]) {
        match current.area {
            None => self.rx.reader.content(self.taken as usize, into),
            Some(offset) => self.rx.member.peer.theirs().copy_out(offset + self.taken as usize, into),
        }
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
        self.patience = 0;
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
        self.rx.lied(lie);
        Taken::Ended(Failure::PeerLied(lie))
    }
}

/// A read that finds so much was worth it.
const ENOUGH_BYTES: usize = 16384;
/// The least time that the writer is left alone for, and the most, as a multiple.
const PATIENCE_LEAST: Duration = Duration::from_nanos(64);
const PATIENCE_MOST: Ticks = 64;
