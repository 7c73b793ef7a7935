//! Payloads land where they belong: packets are verified, their bytes go to their places, and messages that are
//! complete are handed out in order.

use super::{Assurance, Dropped, Ending, Event, Session, ViState};
use crate::header::{Header, HeaderFlags, Kind};
use crate::message::{InMessage, Incoming, Preface, Sink, Source};
use std::ops::Range;

impl<S: Source, T: Sink> Session<S, T> {
    /// The short way of most packets: one that is verified and lands in a message that is arriving, at a
    /// place that is known and free. `None`, and nothing has changed, if it has to go the long way.
    pub(super) fn continue_message(&mut self, header: &Header, packet: &[u8]) -> Option<Result<(), Dropped>> {
        if header.kind != Kind::Data || header.flags.has(HeaderFlags::FIRST) {
            return None;
        }
        let state = self.vis.get_mut(&header.vi)?;
        if state.receives == Assurance::Unreliable || header.flags.has(HeaderFlags::UNRELIABLE) {
            return None;
        }
        let message = state.arriving.get_mut(&header.message)?;
        let range = u64::from(header.offset)..u64::from(header.offset) + u64::from(header.length);
        let known = !message.too_long && message.landed.len() < self.config.holes_max && message.landed.is_free(&range);
        let target = message.place.as_mut().filter(|_| known)?.target.as_mut()?;
        if range.end > target.capacity() as u64 {
            return None;
        }
        let piece = target.piece(range.start as usize..range.end as usize)?;
        if self.sealing.open(header, packet, piece).is_err() {
            return Some(Err(Dropped::Forged));
        }
        state.course.note(header, range.end);
        state.landing.copied += 1;
        message.landed.insert(range, self.config.holes_max);
        if message.is_complete() {
            self.deliver(header.vi);
        }
        Some(Ok(()))
    }

    /// Verifies the packet. Payload that is expected lands in its place at once [W-33].
    pub(super) fn open(&mut self, header: &Header, packet: &[u8]) -> Result<Opened, Dropped> {
        let range = u64::from(header.offset)..u64::from(header.offset) + u64::from(header.length);
        let plain = header.kind == Kind::Data && !header.flags.has(HeaderFlags::FIRST);
        let target = match plain {
            true => self.vis.get_mut(&header.vi).and_then(|state| landing_place(state, header, &range)),
            false => None,
        };
        let (verified, opened) = match target {
            Some(target) => (self.sealing.open(header, packet, target), Opened::Landed),
            None if header.kind == Kind::Data && !self.sealing.is_sealed() => {
                (self.sealing.verify_plain(header, packet), Opened::InPacket)
            }
            None => {
                self.scratch.resize(usize::from(header.length), 0);
                (self.sealing.open(header, packet, &mut self.scratch), Opened::InScratch)
            }
        };
        verified.map(|()| opened).map_err(|_| Dropped::Forged)
    }

    /// A data packet that is authentic; false if there is no place for it now [W-34].
    pub(super) fn take_opened(&mut self, header: &Header, opened: Opened, packet: &[u8]) -> bool {
        match opened {
            Opened::Taken => true,
            Opened::Landed => self.take_data(header, true, &[]),
            Opened::InPacket => {
                let payload = &packet[Header::BYTES..];
                self.take_whole(header, payload) || self.take_data(header, false, payload)
            }
            Opened::InScratch => {
                let payload = std::mem::take(&mut self.scratch);
                let taken = self.take_whole(header, &payload) || self.take_data(header, false, &payload);
                self.scratch = payload;
                taken
            }
        }
    }

    /// The short way of a message that is one packet, comes in order, and fits the receive that it is for.
    /// False, and nothing has changed, if it has to go the long way.
    fn take_whole(&mut self, header: &Header, payload: &[u8]) -> bool {
        let of_interest =
            HeaderFlags::FIRST.with(HeaderFlags::LAST).with(HeaderFlags::TOKEN).with(HeaderFlags::UNRELIABLE);
        if header.flags.bits() & of_interest.bits() != HeaderFlags::FIRST.with(HeaderFlags::LAST).bits() {
            return false;
        }
        let Some(state) = self.vis.get_mut(&header.vi) else { return false };
        let next = header.message == state.next_delivery && header.offset == 0;
        if !next || state.receives == Assurance::Unreliable {
            return false;
        }
        if !state.arriving.is_empty() && state.arriving.contains_key(&header.message) {
            return false;
        }
        let Some((preface, data)) = Preface::parse(payload, false, usize::from(header.control)) else { return false };
        let Some(place) = state.places.peek(header.receive) else { return false };
        let whole = preface.total as usize == data.len() && preface.total <= self.config.message_bytes_max;
        if !whole || data.len() > capacity(place) {
            return false;
        }
        let Some(mut place) = state.places.take(header.receive) else { return false };
        if let Some(target) = place.target.as_mut() {
            // First: a place that takes what it needs would take all that it may for a message of unknown length.
            target.prepare(data.len());
            target.write(0, data);
        }
        state.next_delivery = state.next_delivery.wrapping_add(1);
        state.course.note_whole();
        let more = !state.arriving.is_empty();
        self.stats.messages_received += 1;
        self.events.push_back(Event::Received {
            vi: header.vi,
            token: place.token,
            target: place.target,
            length: data.len(),
            immediate: preface.immediate,
            control: preface.control,
            payload_token: None,
            status: Ok(()),
        });
        if more {
            self.deliver(header.vi);
        }
        true
    }

    /// Data whose payload has `landed`, or else is `payload`.
    fn take_data(&mut self, header: &Header, landed: bool, payload: &[u8]) -> bool {
        let Some(state) = self.vis.get_mut(&header.vi) else {
            // A VI that is closed takes nothing, and wants nothing sent again. One that is not open yet
            // will be, perhaps.
            let number = u64::from(header.vi);
            return self.closed.contains(&(number..number + 1));
        };
        let ahead = header.message.wrapping_sub(state.next_delivery);
        let unreliable = state.receives == Assurance::Unreliable;
        // Both ends agreed on what the VI is; one who says otherwise is not one of ours.
        if ahead > u32::MAX / 2 || header.flags.has(HeaderFlags::UNRELIABLE) != unreliable {
            return true;
        }
        if ahead >= MESSAGES_AHEAD && !unreliable {
            return false;
        }
        let first = header.flags.has(HeaderFlags::FIRST);
        let has_token = header.flags.has(HeaderFlags::TOKEN);
        let preface = match first {
            true => match Preface::parse(payload, has_token, usize::from(header.control)) {
                Some((preface, _)) if preface.total <= self.config.message_bytes_max => Some(preface),
                // An authentic packet that makes no sense: its sender is not one of ours.
                _ => return true,
            },
            false => None,
        };
        if unreliable {
            abandon_before(state, header.message);
        }
        if !state.arriving.contains_key(&header.message) {
            let place = match (has_token, &preface) {
                (true, None) => return false,
                (true, Some(preface)) => preface.payload_token.and_then(|token| state.places.expected.remove(&token)),
                (false, _) if unreliable => state.places.take(state.places.first()),
                (false, _) => state.places.take(header.receive),
            };
            if place.is_none() && !has_token {
                // An unreliable one is lost; any other comes again.
                return unreliable;
            }
            let token = preface.as_ref().and_then(|preface| preface.payload_token);
            state.arriving.insert(header.message, InMessage::new(place, token));
        }
        let Some(message) = state.arriving.get_mut(&header.message) else { return false };
        if preface.is_some() && message.preface.is_some() && preface != message.preface {
            // One message does not begin in two ways: its sender is not one of ours.
            return true;
        }
        let from = u64::from(header.offset);
        let data_bytes = match &preface {
            Some(preface) => payload.len() - preface.bytes(),
            None => usize::from(header.length),
        };
        let range = from..from + data_bytes as u64;
        let capacity = message.place.as_mut().map_or(u64::MAX, |place| capacity(place) as u64);
        let total = preface.as_ref().or(message.preface.as_ref()).map(|preface| u64::from(preface.total));
        if total.is_some_and(|total| range.end > total) {
            // It goes on behind its own end: its sender is not one of ours.
            return true;
        }
        message.too_long |= total.unwrap_or(range.end) > capacity;
        if let Some(preface) = &preface
            && !message.too_long
            && let Some(target) = message.place.as_mut().and_then(|place| place.target.as_mut())
        {
            // Before anything lands: a place that takes what it needs takes it once, and not by moving.
            target.prepare(preface.total as usize);
        }
        if !landed
            && !message.too_long
            && let Some(target) = message.place.as_mut().and_then(|place| place.target.as_mut())
        {
            let data = &payload[payload.len() - data_bytes..];
            if message.landed.is_free(&range) {
                target.write(range.start as usize, data);
            } else {
                // A message that was cut anew comes in pieces that overlap [W-70]; what has landed stays [W-33].
                for gap in message.landed.gaps(range.clone()) {
                    let piece = (gap.start - range.start) as usize..(gap.end - range.start) as usize;
                    target.write(gap.start as usize, &data[piece]);
                }
            }
        }
        let holes_max = if message.place.is_some() { self.config.holes_max } else { HOLES_WITHOUT_PLACE };
        let end = range.end;
        if !message.landed.insert(range, holes_max) {
            return false;
        }
        if !(first && header.flags.has(HeaderFlags::LAST)) {
            state.course.note(header, end);
            state.landing.copied += 1;
        }
        if let Some(preface) = preface {
            state.course.note_preface(&preface);
            message.preface = Some(preface);
        }
        self.deliver(header.vi);
        true
    }

    /// Hands out what is complete, in order [W-35].
    pub(super) fn deliver(&mut self, vi: u32) {
        let Some(state) = self.vis.get_mut(&vi) else { return };
        while state.arriving.get(&state.next_delivery).is_some_and(InMessage::is_complete) {
            let Some(message) = state.arriving.remove(&state.next_delivery) else { break };
            state.next_delivery = state.next_delivery.wrapping_add(1);
            let (Some(mut place), Some(preface)) = (message.place, message.preface) else { continue };
            let status = match message.too_long {
                true => Err(Ending::TooLong { message: preface.total, buffer: capacity(&mut place) }),
                false => Ok(()),
            };
            self.stats.messages_received += u64::from(status.is_ok());
            self.events.push_back(Event::Received {
                vi,
                token: place.token,
                target: place.target,
                length: if status.is_ok() { preface.total as usize } else { 0 },
                immediate: preface.immediate,
                control: preface.control,
                payload_token: preface.payload_token,
                status,
            });
        }
    }
}

/// Where the payload of a packet is that was found to be authentic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// In its place, and noted there.
    Taken,
    /// In its place.
    Landed,
    /// Where it was: nothing is encrypted.
    InPacket,
    InScratch,
}

/// Where the payload of a packet that is not the first of its message goes, if that is known and free.
/// Nothing changes: the packet is not verified yet.
fn landing_place<'a, S, T: Sink>(
    state: &'a mut ViState<S, T>,
    header: &Header,
    range: &Range<u64>,
) -> Option<&'a mut [u8]> {
    let place = match state.arriving.get_mut(&header.message) {
        Some(message) if message.landed.is_free(range) => message.place.as_mut()?,
        Some(_) => return None,
        None if header.flags.has(HeaderFlags::TOKEN) || header.flags.has(HeaderFlags::UNRELIABLE) => return None,
        None if header.message.wrapping_sub(state.next_delivery) >= MESSAGES_AHEAD => return None,
        None => state.places.peek(header.receive)?,
    };
    place.target.as_mut()?.piece(range.start as usize..range.end as usize)
}

/// Unreliable messages before this one that are not complete never will be: their places are for the
/// next ones [W-50].
fn abandon_before<S, T>(state: &mut ViState<S, T>, message: u32) {
    if message.wrapping_sub(state.next_delivery) > u32::MAX / 2 {
        return;
    }
    let later = state.arriving.split_off(&message);
    let abandoned = std::mem::replace(&mut state.arriving, later);
    for message in abandoned.into_values().rev() {
        match (message.place, message.token) {
            (Some(place), Some(token)) if !state.places.expected.contains_key(&token) => {
                state.places.expected.insert(token, place);
            }
            // Only one who lies names a token twice; no place is lost by it.
            (Some(place), _) => state.places.give_back(place),
            (None, _) => {}
        }
    }
    state.next_delivery = message;
}

fn capacity<T: Sink>(place: &mut Incoming<T>) -> usize {
    place.target.as_mut().map_or(0, Sink::capacity)
}

const HOLES_WITHOUT_PLACE: usize = 64;
/// Messages of a VI that may arrive before an earlier one is complete.
pub(super) const MESSAGES_AHEAD: u32 = 4096;
