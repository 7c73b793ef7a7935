//! Messages on their way out and in: how they are cut into packets, and put together again.
//!
//! The first packet of a message begins with a preface: total length, immediate data, the payload token
//! if there is one, the control bytes. Every other packet is nothing but payload. All packets but the
//! last are full, so packet `index` of a message carries the same bytes, however often it is sent [W-31];
//! unless packets of that size do not pass any more, and the message is cut anew [W-70].

use crate::ranges::Ranges;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// What a message is sent from. Anything that is a slice of bytes will do.
pub trait Source {
    /// How many bytes there are.
    fn total(&self) -> usize;
    /// The bytes of `range`, if they lie in one piece.
    fn piece(&self, range: Range<usize>) -> Option<&[u8]>;
    /// Appends the bytes of `range`, wherever they lie.
    fn append(&self, range: Range<usize>, to: &mut Vec<u8>);
}

impl<B: AsRef<[u8]>> Source for B {
    fn total(&self) -> usize {
        self.as_ref().len()
    }

    fn piece(&self, range: Range<usize>) -> Option<&[u8]> {
        self.as_ref().get(range)
    }

    fn append(&self, range: Range<usize>, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.as_ref()[range]);
    }
}

/// What a message lands in. Anything that is a mutable slice of bytes will do.
pub trait Sink {
    /// Bytes that it takes, at most.
    fn capacity(&mut self) -> usize;
    /// A message of so many bytes will land here, no more than the capacity. It is authentic, so this is
    /// the time to take memory.
    fn prepare(&mut self, _bytes: usize) {}
    /// How many bytes lie in one piece from byte `at` on, at most.
    fn reach(&mut self, at: usize) -> usize {
        self.capacity().saturating_sub(at)
    }
    /// Where the bytes of `range` go, if that lies in one piece. Nothing is known of their sender yet.
    fn piece(&mut self, range: Range<usize>) -> Option<&mut [u8]>;
    /// The bytes from `at` on, so many of them, are about to be written: who can have them in a cache by then does.
    fn expect(&mut self, _at: usize, _bytes: usize) {}
    /// Puts bytes that are authentic where they belong.
    fn write(&mut self, at: usize, bytes: &[u8]);
}

impl<B: AsMut<[u8]>> Sink for B {
    fn capacity(&mut self) -> usize {
        self.as_mut().len()
    }

    fn piece(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        self.as_mut().get_mut(range)
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        self.as_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// A message to be sent.
#[derive(Debug)]
pub struct Outgoing<S> {
    /// The sender's own mark; it comes back with the completion.
    pub token: u64,
    /// Up to 128 bytes beside the payload.
    pub control: Vec<u8>,
    /// 32 bits of immediate data.
    pub immediate: u32,
    /// Where the receiver is to put it, if not in the next receive.
    pub payload_token: Option<u64>,
    /// The payload.
    pub payload: Option<S>,
}

/// A place for a message.
#[derive(Debug)]
pub struct Incoming<T> {
    /// The receiver's own mark.
    pub token: u64,
    /// Where the payload goes.
    pub target: Option<T>,
}

/// Bytes of a preface, at most, beside its control bytes.
pub(crate) const PREFACE_BYTES_MOST: usize = 16;

/// What stands before the payload in the first packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Preface {
    pub total: u32,
    pub immediate: u32,
    pub payload_token: Option<u64>,
    pub control: Vec<u8>,
}

impl Preface {
    /// Bytes that every preface has.
    pub(crate) const FIXED_BYTES: usize = 8;

    pub(crate) fn bytes(&self) -> usize {
        Preface::FIXED_BYTES + if self.payload_token.is_some() { 8 } else { 0 } + self.control.len()
    }

    pub(crate) fn write(&self, into: &mut Vec<u8>) {
        Preface::write_parts(self.total, self.immediate, self.payload_token, &self.control, into);
    }

    pub(crate) fn write_parts(total: u32, immediate: u32, token: Option<u64>, control: &[u8], into: &mut Vec<u8>) {
        into.extend_from_slice(&total.to_le_bytes());
        into.extend_from_slice(&immediate.to_le_bytes());
        if let Some(token) = token {
            into.extend_from_slice(&token.to_le_bytes());
        }
        into.extend_from_slice(control);
    }

    /// Reads it from the payload of a first packet; `None` if that is too short.
    pub(crate) fn parse(payload: &[u8], has_token: bool, control: usize) -> Option<(Preface, &[u8])> {
        let (total, rest) = payload.split_first_chunk::<4>()?;
        let (immediate, rest) = rest.split_first_chunk::<4>()?;
        let (payload_token, rest) = match has_token {
            true => rest.split_first_chunk::<8>().map(|(token, rest)| (Some(u64::from_le_bytes(*token)), rest))?,
            false => (None, rest),
        };
        let (control, data) = rest.split_at_checked(control)?;
        let (total, immediate) = (u32::from_le_bytes(*total), u32::from_le_bytes(*immediate));
        Some((Preface { total, immediate, payload_token, control: control.to_vec() }, data))
    }
}

/// A message that is being sent.
#[derive(Debug)]
pub(crate) struct OutMessage<S> {
    pub token: u64,
    pub preface: Preface,
    pub payload: Option<S>,
    /// The number of the receive that it fills.
    pub receive: u32,
    segment: usize,
    packets: u32,
    /// The next packet that was never sent.
    pub next: u32,
    /// One bit for each packet; those of the first 64 take no memory of their own.
    arrived: u64,
    arrived_later: Vec<u64>,
    awaited: u32,
}

impl<S: Source> OutMessage<S> {
    /// Cuts a message into packets of up to `segment` bytes behind the header.
    pub(crate) fn new(message: Outgoing<S>, receive: u32, segment: usize) -> OutMessage<S> {
        let total = message.payload.as_ref().map_or(0, Source::total);
        let Outgoing { token, control, immediate, payload_token, payload } = message;
        let preface = Preface { total: total as u32, immediate, payload_token, control };
        let packets = packets_of(&preface, segment);
        let arrived_later = if packets <= 64 { Vec::new() } else { vec![0; packets.div_ceil(64) as usize - 1] };
        OutMessage {
            token,
            preface,
            payload,
            receive,
            segment,
            packets,
            next: 0,
            arrived: 0,
            arrived_later,
            awaited: packets,
        }
    }

    /// Bytes that its packets have behind their headers, at most.
    pub(crate) fn segment(&self) -> usize {
        self.segment
    }

    /// True if a packet of it has left that is larger than this. One whose only packet is not stays as it is.
    pub(crate) fn outgrows(&self, segment: usize) -> bool {
        let bytes = self.preface.bytes() + self.preface.total as usize;
        self.next > 0 && self.segment > segment && bytes > segment
    }

    /// Cuts it into packets of another size. Bytes that have arrived need not go again: a packet has arrived
    /// if all of its bytes have. One whose bytes were sent in part counts as not sent.
    pub(crate) fn cut_anew(&mut self, segment: usize) {
        let mut arrived = Ranges::new();
        for index in (0..self.next).filter(|index| self.has_arrived(*index)) {
            let range = self.range(index);
            arrived.insert(range.start as u64..range.end as u64, usize::MAX);
        }
        let (total, begun) = (self.preface.total as usize, self.next > 0);
        let sent = if begun { self.range(self.next - 1).end } else { 0 };
        (self.segment, self.packets) = (segment, packets_of(&self.preface, segment));
        self.arrived_later = vec![0; self.packets.div_ceil(64) as usize - 1];
        (self.arrived, self.awaited, self.next) = (0, self.packets, 0);
        while begun && self.next < self.packets && self.range(self.next).end <= sent {
            let range = self.range(self.next);
            // An empty message has no bytes by which it could be told.
            if total > 0 && arrived.contains(&(range.start as u64..range.end as u64)) {
                self.note_run(self.next, 1);
            }
            self.next += 1;
        }
    }

    pub(crate) fn all_sent(&self) -> bool {
        self.next == self.packets
    }

    pub(crate) fn all_arrived(&self) -> bool {
        self.awaited == 0
    }

    pub(crate) fn has_arrived(&self, index: u32) -> bool {
        let word = match index / 64 {
            0 => self.arrived,
            later => self.arrived_later[later as usize - 1],
        };
        word & 1 << (index % 64) != 0
    }

    /// Packets `index` and `count - 1` further ones have arrived.
    pub(crate) fn note_run(&mut self, index: u32, count: u32) {
        let (mut from, end) = (index, index + count);
        while from < end {
            let until = end.min((from / 64 + 1) * 64);
            let bits = (u64::MAX >> (64 - (until - from))) << (from % 64);
            let word = match from / 64 {
                0 => &mut self.arrived,
                later => &mut self.arrived_later[later as usize - 1],
            };
            self.awaited -= (bits & !*word).count_ones();
            *word |= bits;
            from = until;
        }
    }

    /// Packets that were never sent.
    pub(crate) fn unsent(&self) -> u32 {
        self.packets - self.next
    }

    pub(crate) fn is_last(&self, index: u32) -> bool {
        index + 1 == self.packets
    }

    /// Which bytes of the message packet `index` carries.
    pub(crate) fn range(&self, index: u32) -> Range<usize> {
        let total = self.preface.total as usize;
        let first = (self.segment - self.preface.bytes()).min(total);
        match index {
            0 => 0..first,
            _ => {
                let from = first + (index - 1) as usize * self.segment;
                from..total.min(from + self.segment)
            }
        }
    }

    /// Appends the payload of packet `index`; tells its offset in the message.
    pub(crate) fn write(&self, index: u32, into: &mut Vec<u8>) -> u32 {
        let range = self.range(index);
        if index == 0 {
            self.preface.write(into);
        }
        let from = range.start as u32;
        if let Some(payload) = &self.payload {
            payload.append(range, into);
        }
        from
    }
}

/// How many packets a message is cut into.
fn packets_of(preface: &Preface, segment: usize) -> u32 {
    let total = preface.total as usize;
    let first = (segment - preface.bytes()).min(total);
    if first == total { 1 } else { 1 + (total - first).div_ceil(segment) as u32 }
}

/// A message that is arriving.
#[derive(Debug)]
pub(crate) struct InMessage<T> {
    /// Where it lands; `None` drops it, since nobody expects it any more [W-48].
    pub place: Option<Incoming<T>>,
    /// The token under which that was expected, if it was.
    pub token: Option<u64>,
    pub preface: Option<Preface>,
    pub landed: Ranges,
    /// It is longer than its place [W-51].
    pub too_long: bool,
}

impl<T> InMessage<T> {
    pub(crate) fn new(place: Option<Incoming<T>>, token: Option<u64>) -> InMessage<T> {
        let token = token.filter(|_| place.is_some());
        InMessage { place, token, preface: None, landed: Ranges::new(), too_long: false }
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.preface.as_ref().is_some_and(|preface| self.landed.contains(&(0..u64::from(preface.total))))
    }
}

/// Receives that were posted, by number; they are taken in any order.
#[derive(Debug)]
pub(crate) struct Places<T> {
    posted: VecDeque<Option<Incoming<T>>>,
    first: u32,
    pub expected: BTreeMap<u64, Incoming<T>>,
}

impl<T> Places<T> {
    pub(crate) fn new() -> Places<T> {
        Places { posted: VecDeque::new(), first: 0, expected: BTreeMap::new() }
    }

    pub(crate) fn post(&mut self, place: Incoming<T>) {
        self.posted.push_back(Some(place));
    }

    /// The number that the next receive to be posted will have: senders may fill all below.
    pub(crate) fn credit(&self) -> u32 {
        self.first.wrapping_add(self.posted.len() as u32)
    }

    pub(crate) fn len(&self) -> usize {
        self.posted.len()
    }

    /// The number of the oldest receive that is not taken.
    pub(crate) fn first(&self) -> u32 {
        self.first
    }

    pub(crate) fn peek(&mut self, number: u32) -> Option<&mut Incoming<T>> {
        self.posted.get_mut(number.wrapping_sub(self.first) as usize)?.as_mut()
    }

    pub(crate) fn take(&mut self, number: u32) -> Option<Incoming<T>> {
        let place = self.posted.get_mut(number.wrapping_sub(self.first) as usize)?.take();
        while matches!(self.posted.front(), Some(None)) {
            self.posted.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        place
    }

    /// A place that was taken and not used: it comes first again.
    pub(crate) fn give_back(&mut self, place: Incoming<T>) {
        self.first = self.first.wrapping_sub(1);
        self.posted.push_front(Some(place));
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Incoming<T>> {
        let expected = std::mem::take(&mut self.expected);
        self.posted.drain(..).flatten().chain(expected.into_values())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packets_of_a_message_put_together_are_the_message(
            payload in prop::collection::vec(any::<u8>(), 0..5000),
            control in prop::collection::vec(any::<u8>(), 0..=128),
            immediate: u32,
            payload_token: Option<u64>,
            segment in 200usize..1500,
        ) {
            let outgoing = Outgoing { token: 1, control: control.clone(), immediate, payload_token, payload: Some(payload.clone()) };
            let message = OutMessage::new(outgoing, 0, segment);
            let mut got = vec![0; payload.len()];
            let mut landed = Ranges::new();
            // In any order; here backwards.
            for index in (0..message.packets).rev() {
                let mut bytes = Vec::new();
                let offset = message.write(index, &mut bytes) as usize;
                prop_assert!(bytes.len() <= segment && (bytes.len() == segment || message.is_last(index)));
                let data = match index {
                    0 => {
                        let (preface, data) = Preface::parse(&bytes, payload_token.is_some(), control.len()).unwrap();
                        prop_assert_eq!(preface, message.preface.clone());
                        data
                    }
                    _ => &bytes[..],
                };
                got[offset..offset + data.len()].copy_from_slice(data);
                prop_assert!(landed.is_free(&(offset as u64..(offset + data.len()) as u64)));
                landed.insert(offset as u64..(offset + data.len()) as u64, usize::MAX);
            }
            prop_assert!(landed.contains(&(0..payload.len() as u64)));
            prop_assert_eq!(got, payload);
        }

        /// However often it is cut anew: a packet counts as arrived if the bytes that were known to have arrived
        /// are all of its own, and never if one of them has not; the same for what has left.
        #[test]
        fn a_message_that_is_cut_anew_knows_which_bytes_have_arrived(
            total in 0usize..20_000,
            cuts in prop::collection::vec((200usize..5000, 0u32..40, prop::collection::vec(0u32..40, 0..20)), 1..5),
        ) {
            let outgoing =
                Outgoing { token: 1, control: vec![], immediate: 0, payload_token: None, payload: Some(vec![0; total]) };
            let mut message = OutMessage::new(outgoing, 0, cuts[0].0);
            let (mut arrived, mut sent) = (Ranges::new(), 0);
            for (segment, sends, arrivals) in cuts {
                let mut known = Ranges::new();
                for index in (0..message.packets).filter(|index| message.has_arrived(*index)) {
                    let range = message.range(index);
                    known.insert(range.start as u64..range.end as u64, usize::MAX);
                }
                message.cut_anew(segment);
                prop_assert_eq!(message.segment(), segment);
                let is_sent = |message: &OutMessage<_>, index| message.range(index).end <= sent && index < message.packets;
                let none = message.next == 0;
                prop_assert!(none || is_sent(&message, message.next - 1));
                prop_assert!(sent == 0 || message.all_sent() || !is_sent(&message, message.next));
                prop_assert_eq!(message.all_sent() && total > 0, sent == total && total > 0);
                let mut awaited = message.packets;
                for index in 0..message.packets {
                    let range = message.range(index);
                    let range = range.start as u64..range.end as u64;
                    prop_assert!(arrived.contains(&range) || !message.has_arrived(index));
                    let whole = total > 0 && index < message.next && known.contains(&range);
                    prop_assert_eq!(message.has_arrived(index), whole);
                    awaited -= u32::from(message.has_arrived(index));
                }
                prop_assert_eq!(message.awaited, awaited);
                message.next = message.packets.min(message.next + sends);
                let next = message.next;
                for index in arrivals.into_iter().filter(|index| *index < next) {
                    message.note_run(index, 1);
                    let range = message.range(index);
                    arrived.insert(range.start as u64..range.end as u64, usize::MAX);
                }
                // One whose first packet is now longer than all that had left begins anew.
                sent = if message.next > 0 { message.range(message.next - 1).end } else { 0 };
            }
        }

        #[test]
        fn a_preface_that_is_cut_short_is_refused(bytes in prop::collection::vec(any::<u8>(), 0..20), token: bool, control in 0usize..129) {
            let needed = 8 + if token { 8 } else { 0 } + control;
            prop_assert_eq!(Preface::parse(&bytes, token, control).is_some(), bytes.len() >= needed);
        }
    }

    #[test]
    fn what_arrives_twice_is_counted_once_across_words() {
        let outgoing = Outgoing {
            token: 1,
            control: vec![],
            immediate: 0,
            payload_token: None,
            payload: Some(vec![0; 199 * 256]),
        };
        let mut message = OutMessage::new(outgoing, 0, 256);
        assert_eq!(message.packets, 200);
        for (index, count, awaited) in [(60, 10, 190), (0, 64, 130), (63, 66, 71), (191, 9, 62), (0, 200, 0)] {
            message.note_run(index, count);
            assert!((index..index + count).all(|index| message.has_arrived(index)));
            assert_eq!(message.awaited, awaited, "after {count} from {index}");
        }
        assert!(message.all_arrived());
    }

    #[test]
    fn receives_are_taken_in_any_order_and_credit_only_grows() {
        let mut places = Places::<Vec<u8>>::new();
        (0..4).for_each(|token| places.post(Incoming { token, target: None }));
        assert_eq!(places.credit(), 4);
        assert_eq!(places.take(2).unwrap().token, 2);
        assert!(places.take(2).is_none() && places.take(9).is_none() && places.peek(2).is_none());
        assert_eq!(places.take(0).unwrap().token, 0);
        assert_eq!((places.credit(), places.len()), (4, 3));
        assert_eq!(places.take(1).unwrap().token, 1);
        assert_eq!((places.credit(), places.len()), (4, 1));
        places.post(Incoming { token: 9, target: None });
        assert_eq!((places.credit(), places.take(4).unwrap().token), (5, 9));
    }
}
