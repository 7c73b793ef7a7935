//! Payloads that land where they belong as they are received.
//!
//! Before a call the link asks its [`Guide`] where the payloads of the next packets are expected, and hands
//! the kernel a list of pieces: head, payload, head, payload and so on, and at its end a spill, so that nothing
//! is cut off. A batch that is what was expected is then in its place. One that is not lies anywhere in
//! the list, and [`Inbox::put_together`](crate::Inbox::put_together) has its packets in one piece again.
//!
//! ```text
//!  a batch    | head | payload | head | payload | head | payload | what else came
//!  is put in    heads   place     heads   place    heads   place    spill
//! ```

use std::net::SocketAddr;
use std::ops::Range;

/// Who says where payloads are expected.
pub trait Guide {
    /// What to do with the next batch that comes by `way`, a number that is the same for what comes by one
    /// socket. `head` is how its first packet begins, where that was looked at.
    fn advise(&mut self, way: usize, head: Option<&[u8]>) -> Advice<'_>;
}

/// What to do with a batch.
#[derive(Debug)]
pub enum Advice<'a> {
    /// Receive it aside.
    Aside,
    /// Look how it begins, and ask again.
    Look,
    /// Receive it there.
    Land(Landing<'a>),
}

/// Where the payloads of the next packets are expected.
#[derive(Debug)]
pub struct Landing<'a> {
    /// Where the packets are cut.
    pub cut: Cut,
    /// Where payloads go, one behind the other.
    pub place: &'a mut [u8],
}

/// Where packets are cut into heads and payloads: each has room for its head and for at least one byte of payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    first_head: usize,
    head: usize,
    packet: usize,
}

impl Cut {
    /// Cuts packets of `packet` bytes, of which the last may have fewer: `first_head` bytes of the first come before its
    /// payload, and `head` bytes of each further one.
    ///
    /// # Panics
    ///
    /// If a head leaves no room for payload, or a packet has more than 131,072 bytes, which none has. From such numbers
    /// the kernel would be given pieces that lie outside of the memory.
    #[inline]
    pub const fn new(first_head: usize, head: usize, packet: usize) -> Cut {
        assert!(first_head < packet && head < packet, "a head has fewer bytes than its packet");
        assert!(packet <= PACKET_MAX, "a packet has at most 131,072 bytes");
        Cut { first_head, head, packet }
    }

    /// Bytes before the payload of the first packet.
    pub const fn first_head(self) -> usize {
        self.first_head
    }

    /// Bytes before the payload of each further packet.
    pub const fn head(self) -> usize {
        self.head
    }

    /// Bytes of each packet but the last.
    pub const fn packet(self) -> usize {
        self.packet
    }

    /// For each packet whose payload begins in a place of so many bytes: where its head is among the heads, and
    /// its payload in the place. The last one may have less room than the others.
    pub fn slots(self, place: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let Cut { first_head, head, packet } = self;
        let (mut heads, mut payload, mut next) = (0, 0, first_head);
        std::iter::from_fn(move || {
            if payload >= place {
                return None;
            }
            // Not `payload + packet - next`: `place` may be any number, and the sum may not fit.
            let end = payload + (place - payload).min(packet - next);
            let slot = (heads..heads + next, payload..end);
            (heads, payload, next) = (heads + next, end, head);
            Some(slot)
        })
    }

    /// Bytes of all heads of such a place.
    pub fn heads(self, place: usize) -> usize {
        let (first, further) = (self.packet - self.first_head, self.packet - self.head);
        match place {
            0 => 0,
            _ => {
                place.saturating_sub(first).div_ceil(further).saturating_mul(self.head).saturating_add(self.first_head)
            }
        }
    }
}

/// A batch that was received into a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// Who sent it.
    pub from: SocketAddr,
    /// Where packets were expected to be cut.
    pub cut: Cut,
    /// Bytes of the place.
    pub place: usize,
    /// Bytes of the batch.
    pub bytes: usize,
    /// Bytes of each of its packets but the last, never 0.
    pub segment: usize,
    /// Its beginning was looked at before.
    pub looked: bool,
}

impl Landed {
    /// How many packets there are.
    pub fn packets(&self) -> usize {
        self.bytes.div_ceil(self.segment).max(1)
    }

    /// Whether heads are where heads were expected; otherwise nothing is where it belongs.
    pub fn is_cut_right(&self) -> bool {
        if self.bytes <= self.segment { self.bytes <= self.cut.packet } else { self.segment == self.cut.packet }
    }
}

/// Bytes of a packet that are looked at: its header, and how the first packet of a message goes on.
pub(crate) const LOOKED_AT: usize = 80;
/// Most bytes of a packet: more than UDP carries, since a peer's header may promise more. Sums of them fit any word.
const PACKET_MAX: usize = 128 << 10;
/// Most bytes of all heads: of as many packets as the kernel puts together, at least.
pub(crate) const HEADS_MAX: usize = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slots_cover_heads_and_place_without_a_gap(first_head in 0usize..90, head in 0usize..90, more in 1usize..50, place in 0usize..500) {
            let cut = Cut::new(first_head, head, first_head.max(head) + more);
            let (mut heads, mut payload) = (0, 0);
            for (index, (head_range, range)) in cut.slots(place).enumerate() {
                prop_assert_eq!(head_range.clone(), heads..heads + if index == 0 { first_head } else { head });
                prop_assert_eq!(range.start, payload);
                prop_assert!(range.end == place || head_range.len() + range.len() == cut.packet);
                (heads, payload) = (head_range.end, range.end);
            }
            prop_assert_eq!((heads, payload), (cut.heads(place), place));
        }
    }
    /// What the geometry allows, and nothing else, in release builds too.
    #[test]
    fn heads_that_leave_no_room_for_payload_are_no_cut() {
        let cut =
            |first_head, head, packet| std::panic::catch_unwind(move || Cut::new(first_head, head, packet)).is_ok();
        for (first_head, head, packet) in [(0, 0, 1), (4, 4, 5), (4, 0, 5), (131_071, 131_071, 131_072)] {
            assert!(cut(first_head, head, packet), "{first_head}, {head}, {packet}");
        }
        for (first_head, head, packet) in [
            (0, 0, 0),
            (5, 0, 5),
            (0, 5, 5),
            (0, 10, 5),
            (10, 0, 5),
            (usize::MAX, 0, 5),
            (0, usize::MAX, 5),
            (0, 0, 131_073),
            (usize::MAX - 10, usize::MAX - 10, usize::MAX),
        ] {
            assert!(!cut(first_head, head, packet), "{first_head}, {head}, {packet}");
        }
        // As many heads as no inbox has room for are counted, not wrapped around.
        assert!(Cut::new(131_071, 131_071, 131_072).heads(isize::MAX as usize) >= 1 << 62);
    }
}
