//! The size of packets, as a session sees it: what is tried, what is refused, and what happens to messages
//! under way when packets cease to pass. [`SizeSearch`] decides what is tried.

use super::{Session, line_up};
use crate::header::{Header, Kind};
use crate::ledger::Cargo;
use crate::message::{Sink, Source};
use crate::size::PacketSize;
#[cfg(doc)]
use crate::size::SizeSearch;
use std::time::Duration;

impl<S: Source, T: Sink> Session<S, T> {
    /// True if the search for the largest packets that pass is over for now.
    pub fn is_size_found(&self) -> bool {
        self.search.is_over()
    }

    /// Packets of so many bytes cannot be sent to the peer: the link refuses them. It is the answer to a probe
    /// of that size; or else the path has changed, and smaller ones carry what was refused [W-69].
    pub fn handle_too_large(&mut self, now: Duration, bytes: usize) {
        self.take_ack_left();
        if self.ended().is_some() {
            return;
        }
        if let Some(number) = self.search.handle_refusal(now, bytes) {
            self.ledger.settle(number);
            if self.ledger.is_empty() {
                self.probe_by = None;
            }
            self.hole_below = Some(self.ledger.next_number());
            self.fill_hole();
        } else if bytes > PacketSize::LEAST && bytes <= self.packet_bytes() && self.search.may_fall() {
            self.fall(now);
        }
    }

    /// A size that did not pass leaves a hole in what the peer has received, of which it would tell for long.
    /// As soon as nothing else is awaited that left before, a probe fills it: that of the next size, or one
    /// for this alone [W-67].
    pub(super) fn fill_hole(&mut self) {
        if self.hole_below.is_some_and(|number| self.ledger.settled_below() >= number) && self.search.due().is_none() {
            self.probe_wanted = true;
        }
    }

    /// Packets are lost that are larger than every path takes, and no others; that may be chance [W-70].
    pub(super) fn suspect_size(&mut self, now: Duration) {
        if !self.search.may_fall() {
            return;
        }
        let (suspicions, _) = self.suspicions;
        self.suspicions = (suspicions + 1, now);
        if suspicions + 1 >= SUSPICIONS_MAX {
            self.fall(now);
        }
    }

    /// Packets have the size that the search has found.
    pub(super) fn set_size(&mut self) {
        let bytes = self.search.present();
        self.segment = bytes - Header::BYTES;
        self.controller.set_packet_bytes(bytes);
        self.room.set_packet_bytes(bytes);
    }

    /// Packets of the present size do not pass any more. Everything that is under way is cut anew, and goes
    /// again as far as it is not known to have arrived: what is acknowledged late of the larger packets
    /// counts for nothing [W-70].
    fn fall(&mut self, now: Duration) {
        self.stats.size_falls += 1;
        self.suspicions = (0, now);
        self.search.fall(now);
        self.set_size();
        let (vis, segment) = (&mut self.vis, self.segment);
        self.ledger.disown(|vi, message| vis.get(&vi).is_some_and(|state| state.outgrows(message, segment)));
        for (vi, state) in vis {
            state.cut_anew(segment);
            line_up(*vi, state, &mut self.turns, &mut self.blocked);
        }
        // The larger packets also told of credit.
        self.tell_credit_again();
    }

    /// A packet of zeros that asks whether so many bytes pass. It may well be lost: what it says of packets that
    /// have come, another says too. It counts for no window, so that no data waits for it [W-66].
    pub(super) fn write_size_probe(&mut self, now: Duration, bytes: usize, out: &mut Vec<u8>) -> Option<()> {
        let begin = out.len();
        out.resize(begin + bytes, 0);
        let (session, number, ack) = (self.peer.session, self.ledger.next_number(), self.latest_run());
        let length = (bytes - Header::BYTES) as u16;
        let header = self.with_settled(Header { session, number, ack, length, ..Header::new(Kind::Probe) });
        self.seal(&header, begin, out).then_some(())?;
        self.search.note_sent(number);
        self.stats.size_probes += 1;
        self.begin_departure(now);
        self.ledger.push(Cargo::Size(bytes as u16), 0);
        if !self.has_data() {
            self.ledger.hold_back();
        }
        self.note_departed(now, 1, 0);
        Some(())
    }

    /// A probe tells below which number nothing is awaited any more.
    pub(super) fn with_settled(&mut self, header: Header) -> Header {
        let settled = self.ledger.settled_below();
        if self.hole_below.is_some_and(|number| settled >= number) {
            self.hole_below = None;
        }
        Header { message: settled as u32, offset: (settled >> 32) as u32, ..header }
    }
}

/// Losses of large packets and no others, one after the other.
const SUSPICIONS_MAX: u32 = 3;
