//! Messages are cut into packets: which go next, how many in one pulse, and how each is written.

use super::{Assurance, SealError, Session, ViState, Weft, line_up};
use crate::congestion::unit;
use crate::header::{Header, HeaderFlags, Kind, Malformed};
use crate::ledger::Cargo;
use crate::message::{OutMessage, Sink, Source};
use crate::seal::Sealing;
use std::ops::Range;
use std::time::Duration;

impl<S: Source, T: Sink> Session<S, T> {
    /// Writes data packets, up to `segments` and as far as the window goes; how many bytes each has but the
    /// last, or `None` if there are none. With `weave`, payload may be left where it is: `weft` tells.
    ///
    /// The pace says when a pulse begins, not how long it is: a system call carries many packets as
    /// cheaply as one. What goes too early now makes the next pulse later.
    pub(super) fn write_pulse(
        &mut self,
        now: Duration,
        segments: usize,
        weave: bool,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        let (mut bytes, mut packet, full) = (0, 0, self.packet_bytes());
        let mut pulse_list = 0;
        let room = self.window().saturating_sub(self.ledger.in_flight()) / full as u64;
        let probing = self.is_probing();
        let mut left = match probing {
            // One packet is the probe; the others wait for window and pace.
            true => 1,
            false => segments.min(room as usize),
        };
        self.search.note_traffic(now);
        self.begin_departure(now);
        let first_number = self.ledger.next_number();
        while left > 0 {
            let Some(&vi) = self.turns.front() else { break };
            let list = if self.fast.is_active() { self.fast.list(now, vi) } else { 0 };
            if bytes == 0 {
                self.ledger.depart_by(list);
            } else if list != pulse_list {
                // A receiver's kernel sorts a pulse by its first packet.
                break;
            }
            pulse_list = list;
            self.turns.pop_front();
            if self.turn_left == 0 {
                self.turn_left = PULSE_PACKETS_MOST as u32;
            }
            // One that is alone goes on.
            let limit = if self.turns.is_empty() { left } else { left.min(self.turn_left as usize) };
            let Some(state) = self.vis.get_mut(&vi) else { continue };
            state.in_turns = false;
            let run = next_run(state, limit as u32, self.segment, bytes == 0 && !probing);
            line_up(vi, state, &mut self.turns, &mut self.blocked);
            let has_more = state.in_turns;
            let Some(mut run) = run else {
                self.turn_left = 0;
                continue;
            };
            run.list = list;
            self.turn_left = if has_more { self.turn_left.saturating_sub(run.count) } else { 0 };
            if self.turn_left > 0 && self.turns.pop_back_if(|last| *last == vi).is_some() {
                // VIs take turns, of a pulse each.
                self.turns.push_front(vi);
            }
            // What is woven is a pulse of its own.
            let woven = weave && bytes == 0 && self.can_weave(vi, &run);
            let written = self.write_run(vi, &run, woven, out);
            packet = if bytes == 0 { written.min(run.packet) } else { packet };
            bytes += written;
            left = left.saturating_sub(run.count as usize);
            // One that is shorter is the last, or of a message that was cut before packets became larger.
            if woven || written < run.count as usize * full {
                break;
            }
        }
        if self.ledger.next_number() == first_number {
            return None;
        }
        if self.is_probing() {
            self.probe_wanted = false;
        }
        if !self.has_data() {
            self.ledger.hold_back();
        }
        self.note_departed(now, self.ledger.next_number() - first_number, bytes);
        Some(packet)
    }

    /// True if the payload of these packets can stay where it is until they have gone.
    fn can_weave(&mut self, vi: u32, run: &NextRun) -> bool {
        if (run.count as usize) * run.packet < WEAVE_BYTES_LEAST || self.sealing.is_sealed() {
            return false;
        }
        let Some(state) = self.vis.get_mut(&vi).filter(|state| state.sends == Assurance::Reliable) else {
            return false;
        };
        let message = state.message(run.message);
        message.is_some_and(|message| {
            let range = run_range(message, run);
            range.len() >= WEAVE_BYTES_LEAST
                && message.payload.as_ref().is_some_and(|payload| payload.piece(range).is_some())
        })
    }

    /// Writes packets of one message, or their heads alone; how many bytes they are together. None are
    /// written if the session ends.
    fn write_run(&mut self, vi: u32, run: &NextRun, woven: bool, out: &mut Vec<u8>) -> usize {
        let ack = self.piggyback(run.tells);
        let (window, full) = (self.window(), self.packet_bytes() as u64);
        let asks = if window < self.room.bytes() { ASKS_A_WINDOW } else { ASKS_A_ROOM };
        let Some(state) = self.vis.get_mut(&vi) else { return 0 };
        state.note_told(&mut self.news);
        let (credit, remote, assurance) = (state.credit_told, state.remote, state.sends);
        let Some(message) = state.message(run.message) else { return 0 };
        if run.index == 0 && assurance == Assurance::Reliable && self.fast.wants(message.preface.total) {
            self.fast.ask(vi, remote, message.preface.total);
        }
        let mut flags = HeaderFlags::default();
        for (flag, wanted) in [
            (HeaderFlags::TOKEN, message.preface.payload_token.is_some()),
            (HeaderFlags::UNRELIABLE, assurance == Assurance::Unreliable),
        ] {
            flags = if wanted { flags.with(flag) } else { flags };
        }
        let mut header = Header {
            kind: Kind::Data,
            flags,
            list: run.list,
            session: self.peer.session,
            number: 0,
            vi: remote,
            message: run.message,
            offset: 0,
            length: 0,
            control: 0,
            epoch: 0,
            ack,
            credit,
            receive: message.receive,
        };
        let (mut total, begin) = (0, out.len());
        self.unasked += weight(message, run, full);
        let ask = self.unasked >= window / asks;
        for index in run.index..run.index + run.count {
            let begin = out.len();
            header.number = self.ledger.next_number();
            if ask && index == run.index + run.count - 1 {
                header.flags = header.flags.with(HeaderFlags::ACKNOWLEDGE);
                self.unasked = 0;
            }
            let written = match woven {
                true => write_head(&mut self.sealing, header, message, index, out),
                false => write_packet(&mut self.sealing, header, message, index, out),
            };
            let bytes = match written {
                Ok(bytes) => bytes,
                Err(error) => {
                    out.truncate(begin);
                    self.end_unsealed(error);
                    return total;
                }
            };
            self.ledger.push(Cargo::Data { vi, message: run.message, index }, bytes as u16);
            total += bytes;
        }
        if woven {
            let first_head = out.len() - begin - (run.count as usize - 1) * Header::BYTES;
            self.weft = Some(Weft { vi, message: run.message, first_head, payload: run_range(message, run) });
        }
        self.stats.packets_again += if run.again { u64::from(run.count) } else { 0 };
        if assurance == Assurance::Unreliable {
            self.complete_sends(vi);
        }
        total
    }
}

/// Packets of one message that leave one after the other.
struct NextRun {
    message: u32,
    index: u32,
    count: u32,
    /// Bytes of each but the last, with its header.
    packet: usize,
    /// They were sent before.
    again: bool,
    /// The credit of their VI is news.
    tells: bool,
    /// The receive list that they go by.
    list: u8,
}

/// The next packets of a VI, at most `limit` of `segment`: something lost first, then something new. `alone`
/// if no others go before them in one pulse, so that several may have another length.
fn next_run<S: Source, T>(state: &mut ViState<S, T>, limit: u32, segment: usize, alone: bool) -> Option<NextRun> {
    while let Some((number, index)) = state.again.pop_front() {
        if let Some(message) = state.message(number).filter(|message| !message.has_arrived(index)) {
            let packet = message.segment() + Header::BYTES;
            let tells = state.has_news;
            return Some(NextRun { message: number, index, count: 1, packet, again: true, tells, list: 0 });
        }
    }
    let position = state.sending;
    let message = state.messages.get(position)?;
    if !state.has_credit(message) {
        return None;
    }
    let number = state.first_message.wrapping_add(position as u32);
    let message = state.messages.get_mut(position)?;
    let mut limit = limit;
    if message.segment() != segment {
        limit = limit_of_another_cut(message, limit, segment, alone);
    }
    let packet = message.segment() + Header::BYTES;
    let (index, count) = (message.next, message.unsent().min(limit));
    message.next += count;
    if message.all_sent() {
        state.sending += 1;
    }
    Some(NextRun { message: number, index, count, packet, again: false, tells: state.has_news, list: 0 })
}

/// A message was cut when packets had another size. One of which nothing has left is cut anew; of any other,
/// as many packets go as have the bytes of `limit` packets of `segment`.
#[cold]
fn limit_of_another_cut<S: Source>(message: &mut OutMessage<S>, limit: u32, segment: usize, alone: bool) -> u32 {
    if message.next == 0 {
        message.cut_anew(segment);
        return limit;
    }
    let bytes = limit as usize * (segment + Header::BYTES);
    if alone { (bytes / (message.segment() + Header::BYTES)).clamp(1, PULSE_PACKETS_MOST) as u32 } else { 1 }
}

/// What packets count for when it is time to ask for an acknowledgement: their bytes, but a short one as much as
/// a full one of an Ethernet.
fn weight<S: Source>(message: &OutMessage<S>, run: &NextRun, full: u64) -> u64 {
    let (packets, least) = (u64::from(run.count), unit(full));
    if full == least {
        return packets * full;
    }
    let bytes = run_range(message, run).len() as u64 + packets * Header::BYTES as u64;
    bytes.max(packets * least)
}

/// The bytes of a message that packets of it carry.
fn run_range<S: Source>(message: &OutMessage<S>, run: &NextRun) -> Range<usize> {
    message.range(run.index).start..message.range(run.index + run.count - 1).end
}

/// What the header of packet `index` says of its place in the message; which bytes it carries.
fn place_in_message<S: Source>(header: &mut Header, message: &OutMessage<S>, index: u32) -> Range<usize> {
    if index == 0 {
        header.flags = header.flags.with(HeaderFlags::FIRST);
        header.control = message.preface.control.len() as u8;
    }
    if message.is_last(index) {
        header.flags = header.flags.with(HeaderFlags::LAST);
    }
    let range = message.range(index);
    header.offset = range.start as u32;
    range
}

/// Appends the head of packet `index` of a message, whose payload stays where it is: header and preface,
/// with the checksum of all. Bytes of the packet.
fn write_head<S: Source>(
    sealing: &mut Sealing,
    mut header: Header,
    message: &OutMessage<S>,
    index: u32,
    out: &mut Vec<u8>,
) -> Result<usize, SealError> {
    let begin = out.len();
    let range = place_in_message(&mut header, message, index);
    let piece = message.payload.as_ref().and_then(|payload| payload.piece(range));
    // Only a payload that lies in one piece is written so.
    let piece = piece.ok_or(Malformed::TooShort { bytes: 0 })?;
    out.extend_from_slice(&[0; Header::BYTES]);
    if index == 0 {
        message.preface.write(out);
    }
    let bytes = out.len() - begin + piece.len();
    header.length = (bytes - Header::BYTES) as u16;
    header.write(&mut out[begin..]);
    sealing.checksum_apart(&mut out[begin..], piece)?;
    Ok(bytes)
}

/// Appends packet `index` of a message, sealed; its bytes.
fn write_packet<S: Source>(
    sealing: &mut Sealing,
    mut header: Header,
    message: &OutMessage<S>,
    index: u32,
    out: &mut Vec<u8>,
) -> Result<usize, SealError> {
    let begin = out.len();
    let range = place_in_message(&mut header, message, index);
    // What lies in one piece is sealed from where it is: that is the only copy.
    if sealing.is_sealed()
        && index > 0
        && let Some(piece) = message.payload.as_ref().and_then(|payload| payload.piece(range))
    {
        header.length = piece.len() as u16;
        out.resize(begin + Header::BYTES + piece.len(), 0);
        header.write(&mut out[begin..]);
        sealing.seal_from(&mut out[begin..], piece)?;
        return Ok(out.len() - begin);
    }
    out.extend_from_slice(&[0; Header::BYTES]);
    message.write(index, out);
    let packet = &mut out[begin..];
    header.length = (packet.len() - Header::BYTES) as u16;
    header.write(packet);
    sealing.seal(packet)?;
    Ok(packet.len())
}

/// How often a sender asks for an acknowledgement while a window leaves: that is wider than the path.
const ASKS_A_WINDOW: u64 = 2;
/// And while the peer's buffer is the limit, which may be narrower.
const ASKS_A_ROOM: u64 = 3;
/// Fewer are copied: then one system call can take several messages. On an Ethernet these are 15 packets.
const WEAVE_BYTES_LEAST: usize = 20 << 10;
/// Packets of one pulse.
pub(crate) const PULSE_PACKETS_MOST: usize = 64;
