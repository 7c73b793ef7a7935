//! Where packets arrive.
//!
//! One flat buffer, cut into slots. A slot takes one datagram of the kernel, which may be a batch of
//! packets of equal size from one sender; the batch is cut when it is looked at, not when it comes.

use crate::landing::{HEADS_MAX, Landed, Landing};
use std::net::SocketAddr;

/// Where packets arrive; used again and again, allocated once.
///
/// A link that coalesces hands over batches of up to 64 KiB, so an inbox with smaller slots loses
/// whole batches to truncation; give it small slots only where coalescing is off.
#[derive(Debug)]
pub struct Inbox {
    buffer: Box<[u8]>,
    /// Bytes of a slot.
    bytes_each: usize,
    /// From the start of one slot to the start of the next.
    stride: usize,
    datagrams: usize,
    arrivals: Vec<Arrival>,
    packets: usize,
    drops: u64,
    /// By which socket, as the link counts them.
    way: usize,
    /// A batch whose payloads are elsewhere; its heads are here, and what spilled is in the first slot.
    landed: Option<Landed>,
    heads: Vec<u8>,
}

/// A datagram in the buffer.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    from: SocketAddr,
    start: usize,
    len: usize,
    /// Bytes of each packet but the last; never 0.
    segment: usize,
}

/// Why a packet did not get into an inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeliverError {
    /// Every slot is taken.
    #[error("all {datagrams} slots of the inbox are taken")]
    Full {
        /// Slots of the inbox.
        datagrams: usize,
    },
    /// The packet is longer than a slot.
    #[error("a packet of {bytes} bytes does not fit a slot of {bytes_each}")]
    TooLong {
        /// Bytes of the packet.
        bytes: usize,
        /// Bytes of a slot.
        bytes_each: usize,
    },
}

/// The way of a link's first list: the main socket and the favourite's come before.
pub(crate) const FIRST_LIST: usize = 2;
const DATAGRAMS: usize = 32;
const DATAGRAM_BYTES: usize = 64 << 10;
/// Left between slots, so that the beginnings of all packets do not compete for the same few lines
/// of the cache.
const SKEW: usize = 128;

impl Default for Inbox {
    fn default() -> Inbox {
        Inbox::new()
    }
}

impl Inbox {
    /// Room for 32 datagrams of 64 KiB, which is enough for any batch.
    pub fn new() -> Inbox {
        Inbox::with_capacity(DATAGRAMS, DATAGRAM_BYTES)
    }

    /// Room for `datagrams` of `bytes_each`; both at least 1.
    pub fn with_capacity(datagrams: usize, bytes_each: usize) -> Inbox {
        assert!(
            datagrams > 0 && bytes_each > 0,
            "an inbox of {datagrams} datagrams of {bytes_each} bytes holds nothing"
        );
        let stride = bytes_each.next_multiple_of(64) + SKEW;
        Inbox {
            buffer: vec![0; datagrams * stride].into_boxed_slice(),
            bytes_each,
            stride,
            datagrams,
            arrivals: Vec::with_capacity(datagrams),
            packets: 0,
            drops: 0,
            way: 0,
            landed: None,
            heads: Vec::new(),
        }
    }

    /// The packet and its sender, if there is only one.
    #[inline]
    pub fn only(&self) -> Option<(SocketAddr, &[u8])> {
        match &self.arrivals[..] {
            [only] if only.len <= only.segment => Some((only.from, &self.buffer[only.start..only.start + only.len])),
            _ => None,
        }
    }

    /// The packets in the order of their arrival, with their senders.
    pub fn packets(&self) -> impl Iterator<Item = (SocketAddr, &[u8])> {
        self.arrivals.iter().flat_map(|arrival| {
            let bytes = &self.buffer[arrival.start..arrival.start + arrival.len];
            // A datagram without bytes is a packet too, but `chunks` has none for it.
            let empty = bytes.is_empty().then_some(bytes);
            empty.into_iter().chain(bytes.chunks(arrival.segment)).map(|packet| (arrival.from, packet))
        })
    }

    /// Calls `f` for each packet in the order of arrival, so that it can be opened where it lies.
    pub fn for_each_mut(&mut self, mut f: impl FnMut(SocketAddr, &mut [u8])) {
        for arrival in &self.arrivals {
            let bytes = &mut self.buffer[arrival.start..arrival.start + arrival.len];
            if bytes.is_empty() {
                f(arrival.from, bytes);
            } else {
                bytes.chunks_mut(arrival.segment).for_each(|packet| f(arrival.from, packet));
            }
        }
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        self.arrivals.clear();
        (self.packets, self.way) = (0, 0);
        self.landed = None;
    }

    /// How many packets are in it.
    pub fn len(&self) -> usize {
        self.packets
    }

    /// Whether no packet is in it.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// How many datagrams its link has lost so far since the kernel's buffer was full, as far as it was told.
    pub fn drops(&self) -> u64 {
        self.drops
    }

    pub(crate) fn note_drops(&mut self, drops: u64) {
        self.drops = drops;
    }

    /// By which way all of it came: a number that is the same for what comes by one socket.
    pub fn way(&self) -> usize {
        self.way
    }

    /// By which list of its link all that is in it came; 0 if by none. That need not be the list that packets
    /// say.
    pub fn list(&self) -> u8 {
        (self.way + 1).saturating_sub(FIRST_LIST) as u8
    }

    pub(crate) fn note_way(&mut self, way: usize) {
        self.way = way;
    }

    /// The batch that was received where its payloads were expected, with all of its heads that were. Its packets
    /// are counted by [`Inbox::len`], and are none of [`Inbox::packets`].
    pub fn landed(&self) -> Option<(Landed, &[u8])> {
        self.landed.map(|landed| (landed, &self.heads[..landed.cut.heads(landed.place)]))
    }

    /// Puts the packets of the batch that landed together again, from packet `first` on, wherever they lie; all but
    /// the last have the bytes of its segment. `place` is where their payloads were expected; without it they are
    /// lost, unless all of them spilled.
    pub fn put_together(&self, first: usize, place: &[u8], into: &mut Vec<u8>) {
        let Some(landed) = self.landed else { return };
        // Where the parts of the list lie in the batch, one behind the other.
        let (from, mut at) = (first * landed.segment, 0);
        let mut add = |part: &[u8], at: usize| {
            let end = part.len().min(landed.bytes.saturating_sub(at));
            into.extend_from_slice(&part[from.saturating_sub(at).min(end)..end]);
        };
        for (head, payload) in landed.cut.slots(landed.place) {
            let (head_at, payload_at) = (at, at + head.len());
            at = payload_at + payload.len();
            if at <= from {
                continue;
            }
            let Some(payload) = place.get(payload) else { return };
            add(&self.heads[head], head_at);
            add(payload, payload_at);
        }
        add(&self.buffer[..self.bytes_each], at);
    }

    /// Room for heads, and for what spills; both are the kernel's to write to.
    pub(crate) fn for_landing(&mut self, landing: &Landing<'_>) -> (&mut [u8], &mut [u8]) {
        let heads = landing.cut.heads(landing.place.len());
        assert!(heads <= HEADS_MAX, "{heads} bytes of heads, of {HEADS_MAX} at most");
        if self.heads.len() < heads {
            self.heads.resize(heads, 0);
        }
        (&mut self.heads[..heads], &mut self.buffer[..self.bytes_each])
    }

    /// Says that a batch was received so.
    pub(crate) fn note_landed(&mut self, landed: Landed) {
        self.packets += landed.packets();
        self.landed = Some(landed);
    }

    /// Copies a batch of packets of `segment` bytes in, as a kernel would receive it: how links without one do it.
    /// False, and nothing has changed, if it is too long.
    pub(crate) fn land(
        &mut self,
        landing: &mut Landing<'_>,
        from: SocketAddr,
        batch: &[u8],
        segment: usize,
        looked: bool,
    ) -> bool {
        let place = landing.place.len();
        let room = landing.cut.heads(place) + place + self.bytes_each;
        if batch.len() > room {
            return false;
        }
        let (heads, spill) = self.for_landing(landing);
        let mut rest = batch;
        let mut fill = |part: &mut [u8]| {
            let (now, later) = rest.split_at(rest.len().min(part.len()));
            part[..now.len()].copy_from_slice(now);
            rest = later;
        };
        for (head, payload) in landing.cut.slots(place) {
            fill(&mut heads[head]);
            fill(&mut landing.place[payload]);
        }
        fill(spill);
        let (cut, bytes) = (landing.cut, batch.len());
        self.note_landed(Landed { from, cut, place, bytes, segment: segment.max(1), looked });
        true
    }

    /// Datagrams it has room for.
    pub fn datagrams(&self) -> usize {
        self.datagrams
    }

    /// Copies one packet in: how links without a kernel behind them fill it.
    pub fn deliver(&mut self, from: SocketAddr, packet: &[u8]) -> Result<(), DeliverError> {
        if packet.len() > self.bytes_each {
            return Err(DeliverError::TooLong { bytes: packet.len(), bytes_each: self.bytes_each });
        }
        let slot = self.arrivals.len();
        if slot == self.datagrams {
            return Err(DeliverError::Full { datagrams: self.datagrams });
        }
        let start = slot * self.stride;
        self.buffer[start..start + packet.len()].copy_from_slice(packet);
        self.note_arrival(slot, from, packet.len(), packet.len());
        Ok(())
    }

    /// The empty slots, for the kernel to write to.
    pub(crate) fn slots(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let bytes_each = self.bytes_each;
        self.buffer.chunks_exact_mut(self.stride).map(move |slot| &mut slot[..bytes_each])
    }

    /// The first of them.
    pub(crate) fn first_slot(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes_each]
    }

    /// Says that `len` bytes lie in `slot`, of packets of `segment` bytes.
    pub(crate) fn note_arrival(&mut self, slot: usize, from: SocketAddr, len: usize, segment: usize) {
        assert!(slot < self.datagrams && len <= self.bytes_each, "slot {slot} cannot hold {len} bytes");
        let segment = segment.max(1);
        self.arrivals.push(Arrival { from, start: slot * self.stride, len, segment });
        // Mostly one, and a division takes long.
        self.packets += if len <= segment { 1 } else { len.div_ceil(segment) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sender() -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], 9))
    }

    proptest! {
        /// Whatever batches came, the packets are the batches cut, in order, and `len` counts them.
        #[test]
        fn batches_are_cut_at_their_segment_size(batches in prop::collection::vec((0usize..300, 1usize..80), 0..8)) {
            let mut inbox = Inbox::with_capacity(8, 300);
            let mut expected: Vec<Vec<u8>> = Vec::new();
            for (slot, &(len, segment)) in batches.iter().enumerate() {
                let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + slot) as u8).collect();
                inbox.slots().nth(slot).unwrap()[..len].copy_from_slice(&bytes);
                inbox.note_arrival(slot, sender(), len, segment);
                if bytes.is_empty() {
                    expected.push(bytes);
                } else {
                    expected.extend(bytes.chunks(segment).map(<[u8]>::to_vec));
                }
            }
            prop_assert_eq!(inbox.len(), expected.len());
            let seen: Vec<Vec<u8>> = inbox.packets().map(|(_, packet)| packet.to_vec()).collect();
            prop_assert_eq!(&seen, &expected);
            let mut again = Vec::new();
            inbox.for_each_mut(|_, packet| again.push(packet.to_vec()));
            prop_assert_eq!(again, expected);
        }
    }

    #[test]
    fn a_full_inbox_and_a_long_packet_are_refused() {
        let mut inbox = Inbox::with_capacity(1, 10);
        assert_eq!(inbox.deliver(sender(), &[0; 11]), Err(DeliverError::TooLong { bytes: 11, bytes_each: 10 }));
        assert_eq!(inbox.deliver(sender(), &[1; 10]), Ok(()));
        assert_eq!(inbox.deliver(sender(), &[2; 1]), Err(DeliverError::Full { datagrams: 1 }));
        assert_eq!(inbox.len(), 1);
        inbox.clear();
        assert!(inbox.is_empty());
        assert_eq!(inbox.deliver(sender(), &[]), Ok(()));
        assert_eq!(inbox.packets().collect::<Vec<_>>(), [(sender(), &[][..])]);
    }

    #[test]
    fn packets_can_be_changed_in_place() {
        let mut inbox = Inbox::with_capacity(2, 10);
        inbox.deliver(sender(), b"abc").unwrap();
        inbox.for_each_mut(|_, packet| packet.reverse());
        assert_eq!(inbox.packets().next().unwrap().1, b"cba");
    }
}
