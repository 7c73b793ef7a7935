//! Where the payloads of the next packets are expected, and what becomes of them there.
//!
//! While a message arrives, the next packets most likely go on where the last one ended, and after its end
//! the next message fills the next receive. That is a [`Guess`]: a range that is missing in a posted
//! receive, for the kernel to put payloads in. Then heads decide: a packet that is where it belongs is
//! verified there and needs no copy; a run of them is noted as one. Nothing is taken for received before it is
//! verified, and a guess names nothing that was received.

use super::landing::MESSAGES_AHEAD;
use super::{Assurance, Session, State, ViState};
use crate::header::{CONTROL_BYTES_MAX, Header, HeaderFlags, Kind, NUMBERS};
use crate::message::{InMessage, Incoming, Places, Preface, Sink, Source};
use std::ops::Range;
use std::time::Duration;

/// Where the payloads of the next packets are expected.
#[derive(Debug)]
pub struct Guess<'a> {
    /// Bytes before the payload of the first packet; each further one has a header and no more.
    pub first_head: usize,
    /// Bytes of each packet but the last.
    pub packet: usize,
    /// Where payloads go, one behind the other.
    pub place: &'a mut [u8],
}

impl Guess<'_> {
    /// Puts a batch where a kernel would put it; its heads. What does not fit is left out.
    pub fn receive(&mut self, batch: &[u8]) -> Vec<u8> {
        let (mut heads, mut rest, mut at, mut head) = (Vec::new(), batch, 0, self.first_head);
        while at < self.place.len() && !rest.is_empty() {
            let (begin, later) = rest.split_at(rest.len().min(head));
            heads.extend_from_slice(begin);
            let room = (self.packet - head).min(self.place.len() - at);
            let (piece, later) = later.split_at(later.len().min(room));
            self.place[at..at + piece.len()].copy_from_slice(piece);
            (rest, at, head) = (later, at + room, Header::BYTES);
        }
        heads
    }
}

/// What has become of payloads, counted in packets of messages that have more than one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LandingStats {
    /// They were received into their place, which was guessed. A message of one packet may be among them.
    pub hits: u64,
    /// They were received into their place, after a look at how the first of them begins.
    pub seen: u64,
    /// They were received elsewhere and copied to their place: since nothing was guessed, or wrongly.
    pub copied: u64,
    /// Packets for which the guess was wrong.
    pub misses: u64,
    /// Looks at how a batch begins.
    pub looks: u64,
    /// Bytes that were moved from where they had landed by a wrong guess.
    pub moved_bytes: u64,
}

impl std::ops::AddAssign for LandingStats {
    fn add_assign(&mut self, other: LandingStats) {
        self.hits += other.hits;
        self.seen += other.seen;
        self.copied += other.copied;
        self.misses += other.misses;
        self.looks += other.looks;
        self.moved_bytes += other.moved_bytes;
    }
}

/// How the packets of a VI have come lately.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Course {
    /// What is expected next: this message, from this byte on.
    message: u32,
    offset: u32,
    /// Bytes behind the header of a full packet; 0 while that is not known.
    segment: u16,
    /// Bytes of the last preface.
    preface: u16,
    /// The last message named its place by a token.
    has_token: bool,
    /// Messages of one packet that have come since.
    wholes: u8,
}

impl Course {
    /// The payload of this packet has landed, up to byte `end` of its message.
    pub(super) fn note(&mut self, header: &Header, end: u64) {
        if header.flags.has(HeaderFlags::LAST) {
            (self.message, self.offset) = (header.message.wrapping_add(1), 0);
        } else {
            (self.message, self.offset, self.segment) = (header.message, end as u32, header.length);
        }
        self.wholes = 0;
    }

    /// A message has come that is one packet.
    pub(super) fn note_whole(&mut self) {
        self.wholes = self.wholes.saturating_add(1);
    }

    pub(super) fn note_preface(&mut self, preface: &Preface) {
        (self.preface, self.has_token) = (preface.bytes() as u16, preface.payload_token.is_some());
    }
}

/// What was guessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Guessed {
    vi: u32,
    message: u32,
    /// Where in the message the place begins, and how much of it there is.
    offset: usize,
    bytes: usize,
    /// Bytes behind the header of a full packet.
    segment: usize,
    /// Set if the first packet begins a message: what its preface takes, and which place it is to have.
    opening: Option<Opening>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Opening {
    preface: usize,
    place: Named,
    /// Bytes of the message, if that is known: behind them others may lie.
    total: usize,
}

/// How a place is named that no message has taken yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Receive(u32),
    Token(u64),
}

impl Named {
    fn find<T>(self, places: &mut Places<T>) -> Option<&mut Incoming<T>> {
        match self {
            Named::Receive(number) => places.peek(number),
            Named::Token(token) => places.expected.get_mut(&token),
        }
    }
}

impl Guessed {
    /// Where the head of packet `index` is among the heads, and its payload in the place if it has so many
    /// bytes in all.
    fn slot(&self, index: usize, packet_bytes: usize) -> Option<(Range<usize>, Range<usize>)> {
        let preface = self.opening.map_or(0, |opening| opening.preface);
        let (head, payload) = match index {
            0 => (0..Header::BYTES + preface, 0),
            _ => {
                let before = preface + index * Header::BYTES;
                (before..before + Header::BYTES, index * self.segment - preface)
            }
        };
        let bytes = packet_bytes.checked_sub(head.len())?;
        (payload + bytes <= self.bytes).then_some((head, payload..payload + bytes))
    }
}

/// Packets that are where they belong, with numbers one after the other.
struct LandedRun {
    /// The number of the first.
    first: u64,
    last: Header,
    count: u32,
    /// Their bytes of the message.
    range: Range<u64>,
    preface: Option<Preface>,
    /// One of them asks for an acknowledgement.
    asks: bool,
}

impl<S: Source, T: Sink> Session<S, T> {
    /// What became of the payloads of a VI; of all of them that are open or were, without a number.
    pub fn landing(&self, vi: Option<u32>) -> LandingStats {
        match vi {
            Some(vi) => self.vis.get(&vi).map_or(LandingStats::default(), |state| state.landing),
            None => {
                let mut all = self.landing_closed;
                self.vis.values().for_each(|state| all += state.landing);
                all
            }
        }
    }

    /// Where the next packets of a VI are expected, as they have come so far. `ahead` packets are passed over:
    /// none, or what is expected is wrong on purpose.
    pub fn guess(&mut self, vi: u32, ahead: usize) -> Option<Guess<'_>> {
        let guessed = self.guess_next(vi, ahead)?;
        self.act_on(guessed)
    }

    /// Where the packets are expected of which the first begins with `head`, which is not verified; and whether that
    /// was to be expected.
    pub fn guess_after_look(&mut self, header: &Header, head: &[u8]) -> (Option<Guess<'_>>, bool) {
        let expected = self.guess_next(header.vi, 0);
        let Some(guessed) = self.guess_for(header, head) else { return (None, false) };
        let same =
            expected.is_some_and(|expected| (expected.message, expected.offset) == (guessed.message, guessed.offset));
        if let Some(state) = self.vis.get_mut(&header.vi) {
            state.landing.looks += 1;
        }
        (self.act_on(guessed), same)
    }

    fn act_on(&mut self, guessed: Guessed) -> Option<Guess<'_>> {
        self.guessed = Some(guessed);
        let preface = guessed.opening.map_or(0, |opening| opening.preface);
        let place = place_of(self.vis.get_mut(&guessed.vi)?, &guessed)?;
        Some(Guess { first_head: Header::BYTES + preface, packet: Header::BYTES + guessed.segment, place })
    }

    fn guess_next(&mut self, vi: u32, ahead: usize) -> Option<Guessed> {
        let state = self.vis.get_mut(&vi)?;
        let Course { message, offset, segment, preface, has_token, wholes } = state.course;
        if segment == 0 || wholes > WHOLES_MAX {
            return None;
        }
        let behind = message.wrapping_sub(state.next_delivery) > u32::MAX / 2;
        let (message, offset) = if behind { (state.next_delivery, 0) } else { (message, offset as usize) };
        let (segment, preface) = (usize::from(segment), usize::from(preface));
        if state.arriving.contains_key(&message) {
            return self.guess_at(vi, message, offset + ahead * segment, segment, None);
        }
        let place = match has_token {
            true => Named::Token(*state.places.expected.first_key_value()?.0),
            false => Named::Receive(state.places.first()),
        };
        // A message that is not there yet, and not the next, is nothing to go by.
        let opening = (offset == 0 || behind).then_some(Opening { preface, place, total: usize::MAX })?;
        self.guess_at(vi, message, ahead * segment, segment, Some(opening))
    }

    fn guess_for(&mut self, header: &Header, head: &[u8]) -> Option<Guessed> {
        if header.kind != Kind::Data {
            return None;
        }
        let state = self.vis.get_mut(&header.vi)?;
        let mut segment = usize::from(header.length);
        if header.flags.has(HeaderFlags::LAST) {
            segment = segment.max(usize::from(state.course.segment));
        }
        let (message, offset) = (header.message, header.offset as usize);
        if !header.flags.has(HeaderFlags::FIRST) {
            // Its first packet is yet to come, and tells more.
            state.arriving.contains_key(&message).then_some(())?;
            return self.guess_at(header.vi, message, offset, segment, None);
        }
        if state.arriving.contains_key(&message) || offset != 0 {
            return None;
        }
        let has_token = header.flags.has(HeaderFlags::TOKEN);
        if header.flags.has(HeaderFlags::LAST) {
            // A message that is one packet is copied faster than a list is made.
            return None;
        }
        let preface = Preface::FIXED_BYTES + if has_token { 8 } else { 0 } + usize::from(header.control);
        let place = match has_token {
            true => Named::Token(u64::from_le_bytes(*head.get(Header::BYTES + Preface::FIXED_BYTES..)?.first_chunk()?)),
            false => Named::Receive(header.receive),
        };
        let total = u32::from_le_bytes(*head.get(Header::BYTES..)?.first_chunk()?) as usize;
        self.guess_at(header.vi, message, 0, segment, Some(Opening { preface, place, total }))
    }

    /// The range that is missing from there on, cut to whole packets.
    fn guess_at(
        &mut self,
        vi: u32,
        message: u32,
        offset: usize,
        segment: usize,
        opening: Option<Opening>,
    ) -> Option<Guessed> {
        let state = self.vis.get_mut(&vi)?;
        let usable = self.state == State::Open
            && !self.sealing.is_sealed()
            && state.receives == Assurance::Reliable
            && segment >= SEGMENT_BYTES_LEAST
            && message.wrapping_sub(state.next_delivery) < MESSAGES_AHEAD;
        if !usable {
            return None;
        }
        let preface = opening.map_or(0, |opening| opening.preface);
        let (target, gap) = match opening {
            None => {
                let message = state.arriving.get_mut(&message).filter(|message| !message.too_long)?;
                if message.landed.len() >= self.config.holes_max {
                    return None;
                }
                let target = message.place.as_mut()?.target.as_mut()?;
                let total = message.preface.as_ref().map_or(target.capacity(), |preface| preface.total as usize);
                let gap = message.landed.gaps(offset as u64..total as u64).next()?;
                (target, gap.start as usize..gap.end as usize)
            }
            Some(opening) => {
                let target = opening.place.find(&mut state.places)?.target.as_mut()?;
                let end = target.capacity().min(opening.total);
                (target, offset..end)
            }
        };
        let room = gap.len().min(target.reach(gap.start));
        // As much as one call brings.
        let packets = (BATCH_BYTES / (Header::BYTES + segment)).clamp(1, BATCH_PACKETS);
        let most = (packets * segment).checked_sub(preface)?;
        let bytes = match room {
            _ if room >= most => most,
            // The last packet of a message may be shorter.
            _ if room == gap.len() => room,
            // Memory ends before the message does. A packet that goes beyond is for no list.
            _ => ((room + preface) / segment * segment).saturating_sub(preface),
        };
        (bytes > 0).then_some(Guessed { vi, message, offset: gap.start, bytes, segment, opening })
    }

    /// The place of the last guess, if it is still one.
    pub fn guessed_place(&mut self) -> Option<&mut [u8]> {
        let guessed = self.guessed?;
        place_of(self.vis.get_mut(&guessed.vi)?, &guessed)
    }

    /// Packets of `bytes` in all have come, with their heads in `heads` and their payloads in the place of the last
    /// guess, as far as those go: how many of them are where they belong, counted from the first. Nothing has
    /// changed for the others; when they are moved out of there, [`Session::finish_landed`] is to be called.
    pub fn take_landed(&mut self, now: Duration, heads: &[u8], bytes: usize, looked: bool) -> usize {
        let Some(guessed) = self.guessed.filter(|_| self.ended().is_none()) else { return 0 };
        self.take_ack_left();
        let mut taken = 0;
        while let Some(run) = self.verify_run(&guessed, heads, bytes, taken) {
            taken += run.count as usize;
            self.note_run(now, &guessed, run, looked);
        }
        taken
    }

    /// Verifies packets from number `from` on as long as they are where they belong and differ in nothing that has
    /// to be noted of each.
    fn verify_run(&mut self, guessed: &Guessed, heads: &[u8], bytes: usize, from: usize) -> Option<LandedRun> {
        let state = self.vis.get_mut(&guessed.vi)?;
        // The first packet has taken the place, or not: that says how it is named.
        let (target, mut following) = target_and_next(state, guessed)?;
        let packet = Header::BYTES + guessed.segment;
        let mut run: Option<LandedRun> = None;
        for index in from..bytes.div_ceil(packet) {
            let packet_bytes = packet.min(bytes - index * packet);
            let Some((head, payload)) = guessed.slot(index, packet_bytes) else { break };
            let Some(head) = heads.get(head) else { break };
            let Some(header) = head.first_chunk().and_then(|fixed| Header::parse_head(fixed).ok()) else { break };
            let opening = guessed.opening.filter(|_| index == 0);
            let flags = header.flags;
            let fits = header.kind == Kind::Data
                && header.session == self.number
                && header.vi == guessed.vi
                && header.message == guessed.message
                && header.offset as usize == guessed.offset + payload.start
                && Header::BYTES + usize::from(header.length) == packet_bytes
                && flags.has(HeaderFlags::FIRST) == opening.is_some()
                && !flags.has(HeaderFlags::UNRELIABLE)
                && header.number < NUMBERS
                && self.window.would_accept(header.number);
            let goes_on = run.as_ref().is_none_or(|run| {
                header.number == run.last.number + 1 && (header.ack, header.credit) == (run.last.ack, run.last.credit)
            });
            if !fits || !goes_on {
                break;
            }
            let preface = match opening {
                None => None,
                Some(opening) => {
                    let has_token = flags.has(HeaderFlags::TOKEN);
                    let parsed = Preface::parse(&head[Header::BYTES..], has_token, usize::from(header.control));
                    let Some((preface, [])) = parsed else { break };
                    let named = preface.payload_token.map_or(Named::Receive(header.receive), Named::Token);
                    if named != opening.place || preface.total > self.config.message_bytes_max {
                        break;
                    }
                    Some(preface)
                }
            };
            let Some(payload) = target.piece(guessed.offset + payload.start..guessed.offset + payload.end) else {
                break;
            };
            let payload_bytes = payload.len();
            if !self.sealing.verify_apart(&header, head, payload) {
                break;
            }
            // While a packet is verified, memory for the one that comes as much later is fetched.
            let later = header.offset as usize + guessed.bytes;
            match &mut following {
                Some((total, next)) if later >= *total => next.expect(later - *total, payload_bytes),
                _ => target.expect(later, payload_bytes),
            }
            let end = u64::from(header.offset) + payload_bytes as u64;
            let asks = flags.has(HeaderFlags::ACKNOWLEDGE);
            match &mut run {
                None => {
                    let range = u64::from(header.offset)..end;
                    run = Some(LandedRun { first: header.number, last: header, count: 1, range, preface, asks });
                }
                Some(run) => {
                    (run.last, run.count, run.range.end, run.asks) = (header, run.count + 1, end, run.asks | asks);
                }
            }
        }
        run
    }

    /// Notes packets that are verified in their place.
    fn note_run(&mut self, now: Duration, guessed: &Guessed, run: LandedRun, looked: bool) {
        let LandedRun { first, last, count, range, preface, asks } = run;
        let Some(state) = self.vis.get_mut(&guessed.vi) else { return };
        if let (Some(opening), Some(preface)) = (guessed.opening, preface) {
            let (place, token) = match opening.place {
                Named::Receive(number) => (state.places.take(number), None),
                Named::Token(token) => (state.places.expected.remove(&token), Some(token)),
            };
            let mut message = InMessage::new(place, token);
            let target = message.place.as_mut().and_then(|place| place.target.as_mut());
            if let Some(target) = target {
                message.too_long = preface.total as usize > target.capacity();
                if !message.too_long {
                    target.prepare(preface.total as usize);
                }
            }
            state.course.note_preface(&preface);
            message.preface = Some(preface);
            state.arriving.insert(guessed.message, message);
        }
        let Some(message) = state.arriving.get_mut(&guessed.message) else { return };
        state.course.note(&last, range.end);
        // A guess is made only where there is room for one more hole.
        message.landed.insert(range, self.config.holes_max);
        match looked {
            true => state.landing.seen += u64::from(count),
            false => state.landing.hits += u64::from(count),
        }
        self.stats.packets_received += u64::from(count);
        (self.last_run, self.last_heard) = (self.last_run.max(now), now);
        self.take_header_ack(now, last.ack);
        self.take_credit(guessed.vi, last.credit);
        self.note_received_run(now, first, count, asks);
    }

    /// Nothing lies any longer in the place of the last guess but what belongs there: a message that is complete is
    /// handed out. The number of its VI.
    pub fn finish_landed(&mut self) -> Option<u32> {
        let vi = self.guessed?.vi;
        self.deliver(vi);
        Some(vi)
    }

    /// Packets of the last guess were not where they belong, and were moved.
    pub fn note_missed(&mut self, packets: usize, bytes: usize) {
        let state = self.guessed.and_then(|guessed| self.vis.get_mut(&guessed.vi));
        if let Some(state) = state {
            state.landing.misses += packets as u64;
            state.landing.moved_bytes += bytes as u64;
        }
    }
}

/// The place of a guess, if it is there and still missing: nothing that was received is overwritten.
fn place_of<'a, S, T: Sink>(state: &'a mut ViState<S, T>, guessed: &Guessed) -> Option<&'a mut [u8]> {
    let (target, _) = target_and_next(state, guessed)?;
    target.piece(guessed.offset..guessed.offset + guessed.bytes)
}

/// Where the message of a guess goes; and where the next one does, with the bytes of the one before it.
fn target_and_next<'a, S, T>(
    state: &'a mut ViState<S, T>,
    guessed: &Guessed,
) -> Option<(&'a mut T, Option<(usize, &'a mut T)>)> {
    let Some(message) = state.arriving.get_mut(&guessed.message) else {
        return Some((guessed.opening?.place.find(&mut state.places)?.target.as_mut()?, None));
    };
    let total = message.preface.as_ref().map(|preface| preface.total as usize);
    let first = state.places.first();
    let next = state.places.peek(first).and_then(|place| place.target.as_mut());
    Some((message.place.as_mut()?.target.as_mut()?, total.zip(next)))
}

/// What a kernel puts together, at most.
const BATCH_BYTES: usize = 65_535;
const BATCH_PACKETS: usize = 64;
/// After so many messages of one packet nothing is guessed: another such is more likely than a longer one.
const WHOLES_MAX: u8 = 2;
/// For less a list is not worth making.
const SEGMENT_BYTES_LEAST: usize = 256;
// Whatever a packet says of itself, what comes before its payload is shorter than it.
const _: () = assert!(Preface::FIXED_BYTES + size_of::<u64>() + (CONTROL_BYTES_MAX as usize) < SEGMENT_BYTES_LEAST);
