//! Slots in flight: published, and something is still to be done about them.

use crate::descriptor::Payload;
use highwire_mem::Buffer;

/// A slot that was published and about which something is to be done when it is consumed.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    pub index: u64,
    /// The piece of the payload area that holds a copy.
    pub extent: Option<u64>,
    pub finish: Option<Finish>,
    /// The reader may keep its payload.
    pub lendable: bool,
}

/// What a completion is made of.
#[derive(Debug)]
pub(crate) struct Finish {
    pub token: u64,
    pub length: usize,
    pub payload: Payload,
}

/// Those of one send queue, oldest first. There are never more than slots in the ring, so that they
/// stay in one place and are written where they will be read.
#[derive(Debug)]
pub(crate) struct Flights {
    slots: Box<[InFlight]>,
    mask: usize,
    oldest: usize,
    next: usize,
}

impl Flights {
    pub(crate) fn new(depth: u32) -> Flights {
        let slots: Box<[InFlight]> = (0..depth).map(|_| InFlight::default()).collect();
        Flights { mask: slots.len() - 1, slots, oldest: 0, next: 0 }
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.oldest == self.next
    }

    #[inline(always)]
    pub(crate) fn front(&self) -> Option<&InFlight> {
        if self.is_empty() { None } else { self.slots.get(self.oldest & self.mask) }
    }

    pub(crate) fn newest(&self) -> Option<&InFlight> {
        if self.is_empty() { None } else { self.slots.get((self.next - 1) & self.mask) }
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, index: u64, extent: Option<u64>, finish: Option<Finish>, lendable: bool) {
        let slot = self.claim(index);
        slot.extent = extent;
        slot.lendable = lendable;
        slot.finish = finish;
    }

    /// A buffer that the reader was referred to. What is entered is put together in its place: see
    /// [`crate::SendQueue::post_send`].
    #[inline(always)]
    pub(crate) fn push_reference(&mut self, index: u64, token: u64, length: usize, buffer: Buffer) {
        let slot = self.claim(index);
        slot.extent = None;
        slot.lendable = true;
        let finish = Finish { token, length, payload: Payload::Buffer(buffer) };
        // There was nothing, so nothing has to be dropped: that might unwind, and would need `finish`
        // to be in memory.
        std::mem::forget(slot.finish.replace(finish));
    }

    #[inline(always)]
    fn claim(&mut self, index: u64) -> &mut InFlight {
        assert!(self.next - self.oldest <= self.mask, "a slot in flight was forgotten");
        let slot = &mut self.slots[self.next & self.mask];
        debug_assert!(slot.finish.is_none(), "what was there was taken when it was popped");
        slot.index = index;
        self.next += 1;
        slot
    }

    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Option<InFlight> {
        if self.is_empty() {
            return None;
        }
        let slot = &mut self.slots[self.oldest & self.mask];
        self.oldest += 1;
        Some(InFlight { index: slot.index, extent: slot.extent, finish: slot.finish.take(), lendable: slot.lendable })
    }

    /// Puts back the one that was just taken.
    pub(crate) fn put_back(&mut self, slot: InFlight) {
        self.oldest -= 1;
        self.slots[self.oldest & self.mask] = slot;
    }
}
