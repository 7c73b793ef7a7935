//! Acknowledgements: what is told of packets that have come, in a header or in a packet of its own, and what is
//! made of those that the peer tells.

use super::{CREDITS_TOLD, Ending, Session, State, count_news, line_up};
use crate::congestion::Delivery;
use crate::header::{Header, HeaderFlags, Kind};
use crate::ledger::Cargo;
use crate::message::{Sink, Source};
use crate::size::PacketSize;
use std::ops::Range;
use std::time::Duration;

impl<S: Source, T: Sink> Session<S, T> {
    // ── Told ─────────────────────────────────────────────────────────────────────────────────────

    /// The range that was received last, in eight bytes: its end, and how long it is. If that is all
    /// there is to say, no further acknowledgement is needed. Its packet `tells` the credit of a VI that has
    /// news, or of none.
    pub(super) fn piggyback(&mut self, tells: bool) -> u64 {
        let Some(last) = self.received.last() else { return 0 };
        if self.received.len() == 1 && last.end - last.start <= RUN_MAX {
            self.unacknowledged = 0;
            // News of credit on other VIs still has to be told.
            if self.news == usize::from(tells) {
                self.acknowledge_by = None;
                self.acknowledge_now = false;
            }
        }
        self.latest_run()
    }

    pub(super) fn latest_run(&self) -> u64 {
        self.received.last().map_or(0, |last| last.end << 16 | (last.end - last.start).min(RUN_MAX))
    }

    /// All ranges that were received, and all credits that are news.
    pub(super) fn write_acknowledgement(&mut self, now: Duration, out: &mut Vec<u8>) -> Option<()> {
        self.unacknowledged = 0;
        self.acknowledge_by = None;
        self.acknowledge_now = false;
        let begin = out.len();
        out.resize(begin + Header::BYTES, 0);
        let delay = now.saturating_sub(self.largest_at).as_micros().min(u128::from(u32::MAX)) as u32;
        out.extend_from_slice(&delay.to_le_bytes());
        let count = self.received.len().min(RANGES_TOLD);
        out.push(count as u8);
        for range in self.received.iter().rev().take(count) {
            out.extend_from_slice(&range.start.to_le_bytes());
            out.extend_from_slice(&((range.end - range.start).min(u64::from(u32::MAX)) as u32).to_le_bytes());
        }
        let told = self.news.min(CREDITS_TOLD);
        let has_news = told > 0;
        out.push(told as u8);
        if has_news {
            for state in self.vis.values_mut().filter(|state| state.has_news).take(told) {
                state.note_told(&mut self.news);
                out.extend_from_slice(&state.remote.to_le_bytes());
                out.extend_from_slice(&state.credit_told.to_le_bytes());
            }
        }
        // More than one packet tells.
        self.acknowledge_now = self.news > 0;
        self.intake_told = (self.intake, now);
        let mut header = self.bare_header(Kind::Ack);
        header.length = (out.len() - begin - Header::BYTES) as u16;
        (header.message, header.offset) = (self.intake.overruns, self.intake.buffer);
        if has_news {
            // A credit that is lost would hold its sender back for ever [W-39].
            header.flags = header.flags.with(HeaderFlags::ACKNOWLEDGE);
        }
        self.seal(&header, begin, out).then_some(())?;
        if has_news {
            self.note_sent(now, Cargo::Credit, out.len() - begin);
        } else {
            self.ledger.push_unanswered();
            self.stats.packets_sent += 1;
            self.last_sent = now;
        }
        Some(())
    }

    pub(super) fn note_received(&mut self, now: Duration, header: &Header) {
        self.window.accept(header.number);
        if header.kind == Kind::Probe {
            // What tried a size was large, and a session is to take little while it is idle.
            self.scratch.clear();
            self.scratch.shrink_to(PacketSize::LEAST);
            // Holes below are not filled any more [W-67].
            let settled = u64::from(header.offset) << 32 | u64::from(header.message);
            self.received.forget_below(settled.min(header.number));
        }
        let in_order = self.note_number(now, header.number);
        if header.kind == Kind::Probe && header.vi != 0 {
            // Somebody waits for credit on this VI, and may have missed the news.
            if let Some(state) = self.vis.get_mut(&header.vi) {
                state.credit_untold = true;
                count_news(state, &mut self.news);
            }
        }
        if header.kind == Kind::Ack && !header.flags.has(HeaderFlags::ACKNOWLEDGE) {
            // [W-37]
            return;
        }
        let at_once = !in_order
            || header.kind == Kind::Data && header.flags.has(HeaderFlags::ACKNOWLEDGE)
            || matches!(header.kind, Kind::Probe | Kind::Close);
        self.owe_acknowledgement(now, 1, at_once);
    }

    /// Data packets have come whose numbers follow each other; one of them may ask for an acknowledgement.
    pub(super) fn note_received_run(&mut self, now: Duration, first: u64, count: u32, asks: bool) {
        let numbers = first..first + u64::from(count);
        numbers.clone().for_each(|number| {
            self.window.accept(number);
        });
        let in_order = self.note_number(now, first);
        if count > 1 {
            while !self.received.insert(first + 1..numbers.end, self.config.holes_max.min(RANGES_KEPT)) {
                self.received.forget_lowest();
            }
            self.received.forget_below(numbers.end.saturating_sub(PACKETS_TOLD));
        }
        self.owe_acknowledgement(now, count, !in_order || asks);
    }

    /// So many more packets are to be acknowledged [W-36].
    fn owe_acknowledgement(&mut self, now: Duration, packets: u32, at_once: bool) {
        self.unacknowledged += packets;
        if at_once || self.unacknowledged >= self.config.acknowledge_every {
            self.acknowledge_now = true;
        } else {
            self.acknowledge_after(now);
        }
    }

    /// Notes a packet number for acknowledgements; true if it is the one that was to come next.
    fn note_number(&mut self, now: Duration, number: u64) -> bool {
        if self.received.extend_last(number) {
            (self.largest_at, self.newest) = (now, true);
            if number.is_multiple_of(FORGET_EVERY) {
                self.received.forget_below(number.saturating_sub(PACKETS_TOLD));
            }
            return true;
        }
        let largest = self.received.iter().next_back().map_or(0, |range| range.end);
        if number >= largest {
            self.largest_at = now;
        }
        while !self.received.insert(number..number + 1, self.config.holes_max.min(RANGES_KEPT)) {
            self.received.forget_lowest();
        }
        // What is older was told often enough; its sender has given it up by now if it never heard.
        let highest = number.max(largest.saturating_sub(1));
        self.received.forget_below(highest.saturating_sub(PACKETS_TOLD));
        self.newest = number >= largest;
        number == largest
    }

    /// An acknowledgement is due, with others that may come to be.
    pub(super) fn acknowledge_after(&mut self, now: Duration) {
        self.acknowledge_by.get_or_insert(now + self.config.acknowledge_delay);
    }

    // ── Taken ────────────────────────────────────────────────────────────────────────────────────

    /// An acknowledgement packet, in `scratch`.
    pub(super) fn take_acknowledgement(&mut self, now: Duration) {
        let scratch = std::mem::take(&mut self.scratch);
        if let Some((delay, ranges, credits)) = parse_acknowledgement(&scratch) {
            for (start, length) in ranges {
                self.acknowledge(now, start..start.saturating_add(u64::from(length)), delay);
            }
            self.after_acknowledgements(now);
            for (vi, credit) in credits {
                self.take_credit(vi, credit);
            }
        }
        self.scratch = scratch;
    }

    /// Takes the acknowledgement that was left for later.
    pub(super) fn take_ack_left(&mut self) {
        let Some((ack, at)) = self.ack_left.take() else { return };
        let flight = (self.flight_began, self.delivered_at);
        self.acknowledge(at, run_of(ack), Duration::ZERO);
        if !self.ledger.is_empty() {
            // Something has left since, in a flight of its own.
            (self.flight_began, self.delivered_at) = flight;
        }
        // For what has left since, the timer begins when it left.
        self.after_acknowledgements(at.max(self.last_sent));
    }

    /// The acknowledgement in a header, which says nothing about how long it was held back.
    pub(super) fn handle_ack(&mut self, now: Duration, ack: u64) {
        let run = run_of(ack);
        if !run.is_empty() {
            self.acknowledge(now, run, Duration::ZERO);
            self.after_acknowledgements(now);
        }
    }

    pub(super) fn take_credit(&mut self, vi: u32, credit: u32) {
        let Some(state) = self.vis.get_mut(&vi) else {
            // The peer has opened it, and this side is about to. Here too an older packet says less.
            let has_room = self.early_credits.len() < CREDITS_TOLD;
            match self.early_credits.get_mut(&vi) {
                Some(told) if credit.wrapping_sub(*told) <= u32::MAX / 2 => *told = credit,
                None if has_room => drop(self.early_credits.insert(vi, credit)),
                _ => {}
            }
            return;
        };
        // Credit only grows; an older packet says less [W-41].
        if credit != state.credit && credit.wrapping_sub(state.credit) <= u32::MAX / 2 {
            state.credit = credit;
            line_up(vi, state, &mut self.turns, &mut self.blocked);
        }
    }

    fn acknowledge(&mut self, now: Duration, range: Range<u64>, delay: Duration) {
        if range.end == 0 || !self.ledger.was_sent(range.end - 1) {
            // The peer acknowledges what was never sent: nothing of it is believed [W-38].
            return;
        }
        let mut arrived = std::mem::take(&mut self.runs);
        let before = self.ledger.in_flight();
        let latest = self.ledger.acknowledge(range.clone(), &mut arrived);
        let bytes = before - self.ledger.in_flight();
        self.sealing.handle_acknowledged(range.end);
        if let Some(departure) = latest {
            self.probes = 0;
            self.probe_by = None;
            if self.ledger.is_empty() {
                // All of it is acknowledged: there is nothing to ask for.
                self.unasked = 0;
            }
            self.trip.update(now.saturating_sub(departure.sent_at), delay.min(self.config.death));
            self.delivered += bytes;
            self.delivered_at = now;
            self.flight_began = departure.sent_at;
            self.controller.handle_delivery(&Delivery {
                now,
                bytes,
                delivered: self.delivered,
                delivered_before: departure.delivered,
                sent_at: departure.sent_at,
                flight_began: departure.flight_began,
                round_trip: now.saturating_sub(departure.sent_at),
                round_trip_least: self.trip.least().unwrap_or_default(),
                in_flight: self.ledger.in_flight(),
                held_back: departure.held_back,
            });
        }
        for run in arrived.drain(..) {
            match run.cargo {
                Cargo::Data { vi, message, index } => self.note_arrived(vi, message, index, run.count),
                Cargo::Close => self.end(Ending::Closed),
                Cargo::Size(bytes) => {
                    if self.search.handle_arrival(now, usize::from(bytes)) {
                        self.set_size();
                    }
                    self.suspicions.0 = 0;
                }
                Cargo::Probe | Cargo::Credit | Cargo::Fast => {}
            }
        }
        if self.ledger.take_large_arrived() {
            self.suspicions.0 = 0;
        }
        self.runs = arrived;
    }

    fn after_acknowledgements(&mut self, now: Duration) {
        self.detect_lost(now);
        if self.probe_by.is_none() {
            self.set_probe_timer(now);
        }
        if self.state == State::Draining {
            self.drain();
        }
    }
}

/// The packets that the acknowledgement in a header tells of.
pub(super) fn run_of(ack: u64) -> Range<u64> {
    let (end, run) = (ack >> 16, ack & RUN_MAX);
    end.saturating_sub(run)..if run <= end { end } else { 0 }
}

type Acknowledged = (Duration, Vec<(u64, u32)>, Vec<(u32, u32)>);

/// Delay, ranges (start and length), credits (VI and credit).
fn parse_acknowledgement(payload: &[u8]) -> Option<Acknowledged> {
    let (delay, rest) = payload.split_first_chunk::<4>()?;
    let (count, mut rest) = rest.split_first()?;
    let mut ranges = Vec::with_capacity(usize::from(*count));
    for _ in 0..*count {
        let (start, after) = rest.split_first_chunk::<8>()?;
        let (length, after) = after.split_first_chunk::<4>()?;
        ranges.push((u64::from_le_bytes(*start), u32::from_le_bytes(*length)));
        rest = after;
    }
    let (count, mut rest) = rest.split_first()?;
    let mut credits = Vec::with_capacity(usize::from(*count));
    for _ in 0..*count {
        let (vi, after) = rest.split_first_chunk::<4>()?;
        let (credit, after) = after.split_first_chunk::<4>()?;
        credits.push((u32::from_le_bytes(*vi), u32::from_le_bytes(*credit)));
        rest = after;
    }
    let delay = Duration::from_micros(u64::from(u32::from_le_bytes(*delay)));
    rest.is_empty().then_some((delay, ranges, credits))
}

/// Longest run of packets that a header acknowledges.
const RUN_MAX: u64 = 0xffff;
/// Ranges in an acknowledgement packet, the latest ones.
const RANGES_TOLD: usize = 32;
/// Ranges that are kept to be told.
const RANGES_KEPT: usize = 256;
/// Packets that acknowledgements tell of, counted from the highest.
const PACKETS_TOLD: u64 = 4096;
/// How often older ones are forgotten while nothing is lost.
const FORGET_EVERY: u64 = 64;
