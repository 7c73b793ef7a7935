//! Packets that were sent, until they are acknowledged or given up for lost.
//!
//! Packets that leave together share one [`Departure`], so that the entry of a packet is small.

use crate::rtt::RoundTrip;
use crate::size::PacketSize;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// What a packet carried, so that it can be carried again in another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cargo {
    /// Packet `index` of a message.
    Data { vi: u32, message: u32, index: u32 },
    /// A question whether the peer is there; or what was awaited, and is carried by others now.
    Probe,
    /// A question whether packets of so many bytes pass.
    Size(u16),
    /// Credits that are news to the peer.
    Credit,
    /// The last word of a session.
    Close,
    /// A word about a receive list: it is never sent again.
    Fast,
}

/// What packets that left together have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Departure {
    pub sent_at: Duration,
    /// What was delivered when they left, and when that was known: the rate is measured against it.
    pub delivered: (u64, Duration),
    /// When the first packet of their flight left.
    pub flight_began: Duration,
    pub held_back: bool,
    /// The receive list that they go by.
    pub list: u8,
}

/// Packets that have arrived, or are lost: `count` of them, in the first of them `cargo`, in each further
/// one the next piece of the same message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub cargo: Cargo,
    pub count: u32,
}

/// A packet on its way. Its time is that of its departure.
#[derive(Clone, Copy, Debug)]
struct Live {
    cargo: Cargo,
    departure: u32,
    bytes: u16,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Live(Live),
    /// Given up, but its acknowledgement may still come [W-43]; and its bytes.
    Lost(Cargo, u16),
    /// Acknowledged, or never to be acknowledged.
    Settled,
}

/// There is one for each packet on the way, and each is written and read once.
const _: () = assert!(size_of::<Entry>() <= 24);

/// All of one session, by packet number.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entries: VecDeque<Entry>,
    /// The number of the first entry.
    first: u64,
    /// In order; the first has the number `first_departure`.
    departures: VecDeque<Departure>,
    first_departure: u32,
    live: usize,
    in_flight: u64,
    largest_acknowledged: Option<u64>,
    /// The same of each list, and one more; empty while none is used. Packets of one list do not overtake each
    /// other more than on any path, but the receiver looks at lists in turn.
    acknowledged_by_list: Vec<u64>,
    /// Bytes of the largest packet that has arrived since it was last asked for.
    bytes_arrived_most: u16,
    /// When the latest packet left that is lost and larger than every path takes.
    large_lost: Option<Duration>,
}

impl Ledger {
    /// The number of the next packet [W-30].
    pub(crate) fn next_number(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    /// Bytes on the way.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// True if everything sent so far has arrived once this range has.
    pub(crate) fn is_settled_by(&self, range: &Range<u64>) -> bool {
        range.start <= self.first && range.end == self.next_number()
    }

    /// Packets that are pushed from now on leave so.
    pub(crate) fn depart(&mut self, departure: Departure) {
        if self.departures.back() != Some(&departure) {
            self.departures.push_back(departure);
        }
    }

    /// Those go by this list.
    pub(crate) fn depart_by(&mut self, list: u8) {
        let Some(last) = self.departures.back().filter(|last| last.list != list) else { return };
        let departure = Departure { list, ..*last };
        self.departures.push_back(departure);
        self.acknowledged_by_list.resize(usize::from(u8::MAX) + 1, 0);
    }

    /// A packet that is to be acknowledged has left, with the latest departure.
    pub(crate) fn push(&mut self, cargo: Cargo, bytes: u16) {
        let departure = self.first_departure.wrapping_add(self.departures.len() as u32).wrapping_sub(1);
        self.in_flight += u64::from(bytes);
        self.live += 1;
        self.entries.push_back(Entry::Live(Live { cargo, departure, bytes }));
    }

    /// What was pushed last was the last that there was to send.
    pub(crate) fn hold_back(&mut self) {
        if let Some(departure) = self.departures.back_mut() {
            departure.held_back = true;
        }
    }

    /// A packet that nobody acknowledges has left [W-37].
    pub(crate) fn push_unanswered(&mut self) {
        self.entries.push_back(Entry::Settled);
        self.forget_settled();
    }

    /// True if a packet with such a number was ever sent.
    pub(crate) fn was_sent(&self, number: u64) -> bool {
        number < self.next_number()
    }

    /// Takes note of an acknowledged range. What has arrived now is appended to `arrived`; tells the
    /// departure of the latest packet in it that was not given up before.
    pub(crate) fn acknowledge(&mut self, range: Range<u64>, arrived: &mut Vec<Run>) -> Option<Departure> {
        let (start, end) = (range.start.max(self.first), range.end.min(self.next_number()));
        if start >= end {
            return None;
        }
        self.largest_acknowledged = Some(self.largest_acknowledged.map_or(end - 1, |largest| largest.max(end - 1)));
        if let (1, Some(Entry::Live(packet))) = (self.entries.len(), self.entries.front()) {
            // The only one, as where question and answer alternate.
            arrived.push(Run { cargo: packet.cargo, count: 1 });
            self.bytes_arrived_most = self.bytes_arrived_most.max(packet.bytes);
            let departure = *self.departure(packet.departure);
            if let Some(largest) = self.acknowledged_by_list.get_mut(usize::from(departure.list)) {
                *largest = end;
            }
            (self.live, self.in_flight, self.first) = (0, 0, self.first + 1);
            self.first_departure = self.first_departure.wrapping_add(self.departures.len() as u32);
            self.entries.clear();
            self.departures.clear();
            return Some(departure);
        }
        let (mut latest, mut most) = (None, 0);
        let positions = (start - self.first) as usize..(end - self.first) as usize;
        let by_list = !self.acknowledged_by_list.is_empty();
        for (entry, number) in self.entries.range_mut(positions).zip(start..) {
            match std::mem::replace(entry, Entry::Settled) {
                Entry::Live(packet) => {
                    if by_list {
                        let departure = packet.departure.wrapping_sub(self.first_departure);
                        let list = self.departures[departure as usize].list;
                        let largest = &mut self.acknowledged_by_list[usize::from(list)];
                        *largest = (*largest).max(number + 1);
                    }
                    self.live -= 1;
                    self.in_flight -= u64::from(packet.bytes);
                    latest = Some(packet.departure);
                    most = packet.bytes.max(most);
                    note(arrived, packet.cargo);
                }
                Entry::Lost(cargo, bytes) => {
                    most = bytes.max(most);
                    note(arrived, cargo);
                }
                Entry::Settled => {}
            }
        }
        self.bytes_arrived_most = self.bytes_arrived_most.max(most);
        let departure = latest.map(|number| *self.departure(number));
        self.forget_settled();
        departure
    }

    /// Gives up what is lost by the packet threshold or by time: it is appended to `lost`. Tells when the
    /// next one would be lost by time [W-42].
    pub(crate) fn detect_lost(&mut self, now: Duration, trip: &RoundTrip, lost: &mut Vec<Run>) -> Option<Duration> {
        let largest = self.largest_acknowledged?;
        let before = largest.saturating_sub(self.first).min(self.entries.len() as u64) as usize;
        if before == 0 {
            return None;
        }
        let delay = trip.loss_delay();
        let mut next = None;
        for position in 0..before {
            let Entry::Live(packet) = self.entries[position] else { continue };
            let Departure { sent_at, list, .. } = *self.departure(packet.departure);
            let largest = self.acknowledged_by_list.get(usize::from(list)).map_or(largest, |end| end.saturating_sub(1));
            let overtaken = largest >= self.first + position as u64 + PACKET_THRESHOLD;
            if overtaken && sent_at + delay / 4 <= now || sent_at + delay <= now {
                self.live -= 1;
                self.in_flight -= u64::from(packet.bytes);
                self.entries[position] = match packet.cargo {
                    // What it asked has its answer; it is in nobody's way.
                    Cargo::Size(_) => Entry::Settled,
                    cargo => Entry::Lost(cargo, packet.bytes),
                };
                if usize::from(packet.bytes) > PacketSize::LEAST {
                    self.large_lost = self.large_lost.max(Some(sent_at));
                }
                note(lost, packet.cargo);
            } else {
                let due = sent_at + if overtaken { delay / 4 } else { delay };
                next = Some(next.map_or(due, |next: Duration| next.min(due)));
            }
        }
        self.forget_settled();
        next
    }

    /// The oldest packet that is still awaited: what it carried, and when it left.
    pub(crate) fn oldest(&self) -> Option<(Cargo, Duration)> {
        let packet = self.oldest_live()?.1;
        Some((packet.cargo, self.departure(packet.departure).sent_at))
    }

    /// True if that packet is larger than every path takes.
    pub(crate) fn oldest_is_large(&self) -> bool {
        self.oldest_live().is_some_and(|(_, packet)| usize::from(packet.bytes) > PacketSize::LEAST)
    }

    /// The number below which nothing is awaited any more: it has arrived, or was given up.
    pub(crate) fn settled_below(&self) -> u64 {
        self.oldest_live().map_or(self.next_number(), |(position, _)| self.first + position as u64)
    }

    fn oldest_live(&self) -> Option<(usize, &Live)> {
        self.entries.iter().enumerate().find_map(|(position, entry)| match entry {
            Entry::Live(packet) => Some((position, packet)),
            _ => None,
        })
    }

    /// True if a packet has arrived since this was last asked that is larger than every path takes.
    pub(crate) fn take_large_arrived(&mut self) -> bool {
        usize::from(std::mem::take(&mut self.bytes_arrived_most)) > PacketSize::LEAST
    }

    /// When the latest such packet left that was lost since this was last asked.
    pub(crate) fn take_large_lost(&mut self) -> Option<Duration> {
        self.large_lost.take()
    }

    /// Nothing is awaited of this packet, which never left.
    pub(crate) fn settle(&mut self, number: u64) {
        let Some(position) = number.checked_sub(self.first) else { return };
        if let Some(entry) = self.entries.get_mut(position as usize)
            && let Entry::Live(packet) = std::mem::replace(entry, Entry::Settled)
        {
            self.live -= 1;
            self.in_flight -= u64::from(packet.bytes);
        }
        self.forget_settled();
    }

    /// What these packets of messages carried will be carried by others, cut in another way.
    pub(crate) fn disown(&mut self, is_cut_anew: impl Fn(u32, u32) -> bool) {
        for entry in &mut self.entries {
            if let Entry::Live(Live { cargo, .. }) | Entry::Lost(cargo, _) = entry
                && let Cargo::Data { vi, message, .. } = *cargo
                && is_cut_anew(vi, message)
            {
                *cargo = Cargo::Probe;
            }
        }
    }

    fn departure(&self, number: u32) -> &Departure {
        &self.departures[number.wrapping_sub(self.first_departure) as usize]
    }

    fn forget_settled(&mut self) {
        let settled = |entry: &&Entry| matches!(entry, Entry::Settled);
        self.forget(self.entries.iter().take_while(settled).count());
        // One that was lost long ago will not be acknowledged any more.
        while self.entries.len() > REMEMBERED && matches!(self.entries.front(), Some(Entry::Lost(..) | Entry::Settled))
        {
            self.forget(1);
        }
        // A departure goes when the first packet that awaits something is of a later one.
        let needed = match self.entries.front() {
            Some(Entry::Live(packet)) => packet.departure.wrapping_sub(self.first_departure) as usize,
            Some(_) => 0,
            None => self.departures.len(),
        };
        self.departures.drain(..needed);
        self.first_departure = self.first_departure.wrapping_add(needed as u32);
    }

    fn forget(&mut self, count: usize) {
        self.entries.drain(..count);
        self.first += count as u64;
    }
}

/// Adds `cargo` to the last run if it goes on there, or as a run of its own.
fn note(runs: &mut Vec<Run>, cargo: Cargo) {
    if let (Cargo::Data { vi, message, index }, Some(Run { cargo: Cargo::Data { vi: v, message: m, index: i }, count })) =
        (cargo, runs.last_mut())
        && (vi, message) == (*v, *m)
        && index == *i + *count
    {
        *count += 1;
    } else {
        runs.push(Run { cargo, count: 1 });
    }
}

/// So many later packets acknowledged, and it is lost; unless it left a moment ago.
const PACKET_THRESHOLD: u64 = 3;
/// Packets that are remembered although they were given up.
const REMEMBERED: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn push(ledger: &mut Ledger, index: u32, sent_at_ms: u64) {
        ledger.depart(Departure {
            sent_at: Duration::from_millis(sent_at_ms),
            delivered: (0, Duration::ZERO),
            flight_began: Duration::ZERO,
            held_back: false,
            list: 0,
        });
        ledger.push(Cargo::Data { vi: 1, message: 0, index }, 100);
    }

    fn trip(ms: u64) -> RoundTrip {
        let mut trip = RoundTrip::new();
        (0..50).for_each(|_| trip.update(Duration::from_millis(ms), Duration::ZERO));
        trip
    }

    fn indexes(runs: &[Run]) -> Vec<u32> {
        let each = |run: &Run| {
            let Cargo::Data { index, .. } = run.cargo else { unreachable!("only data here") };
            index..index + run.count
        };
        runs.iter().flat_map(each).collect()
    }

    #[test]
    fn what_is_overtaken_by_three_is_lost_and_may_still_arrive() {
        let mut ledger = Ledger::default();
        (0..6).for_each(|index| push(&mut ledger, index, 0));
        let (mut arrived, mut lost) = (Vec::new(), Vec::new());
        assert!(ledger.acknowledge(4..5, &mut arrived).is_some());
        let next = ledger.detect_lost(Duration::from_millis(10), &trip(20), &mut lost);
        assert_eq!((indexes(&arrived), indexes(&lost), ledger.in_flight()), (vec![4], vec![0, 1], 300));
        assert!(next.is_some_and(|at| at > Duration::from_millis(20)), "{next:?}");
        let mut late = Vec::new();
        assert!(ledger.acknowledge(0..2, &mut late).is_none(), "given up before");
        assert!(ledger.acknowledge(2..4, &mut late).is_some());
        assert_eq!(indexes(&late), [0, 1, 2, 3]);
        assert_eq!((ledger.in_flight(), ledger.next_number()), (100, 6));
        let mut rest = Vec::new();
        ledger.acknowledge(0..6, &mut rest);
        assert_eq!(indexes(&rest), [5], "the others were told before");
        assert!(ledger.is_empty() && ledger.entries.is_empty() && ledger.departures.is_empty());
    }

    #[test]
    fn what_is_old_is_lost_though_only_one_overtook_it() {
        let mut ledger = Ledger::default();
        push(&mut ledger, 0, 0);
        push(&mut ledger, 1, 1);
        ledger.acknowledge(1..2, &mut Vec::new());
        let mut lost = Vec::new();
        let due = ledger.detect_lost(Duration::from_millis(10), &trip(20), &mut lost).expect("one may be lost");
        assert!(lost.is_empty());
        ledger.detect_lost(due, &trip(20), &mut lost);
        assert_eq!((indexes(&lost), ledger.in_flight()), (vec![0], 0));
    }

    #[test]
    fn ranges_that_were_never_sent_are_harmless() {
        let mut ledger = Ledger::default();
        push(&mut ledger, 0, 0);
        ledger.push_unanswered();
        assert!(ledger.was_sent(1) && !ledger.was_sent(2));
        let mut arrived = Vec::new();
        assert!(ledger.acknowledge(5..900, &mut arrived).is_none() && arrived.is_empty());
        assert_eq!(ledger.in_flight(), 100);
    }

    #[test]
    fn a_question_of_size_weighs_nothing_and_leaves_no_trace() {
        let mut ledger = Ledger::default();
        push(&mut ledger, 0, 0);
        ledger.push(Cargo::Size(9000), 0);
        ledger.push(Cargo::Size(9000), 0);
        push(&mut ledger, 1, 0);
        assert_eq!((ledger.in_flight(), ledger.settled_below()), (200, 0));
        ledger.acknowledge(0..1, &mut Vec::new());
        assert_eq!(ledger.settled_below(), 1);
        ledger.settle(1);
        assert_eq!(ledger.settled_below(), 2);
        ledger.acknowledge(3..4, &mut Vec::new());
        let mut lost = Vec::new();
        ledger.detect_lost(Duration::from_secs(1), &trip(20), &mut lost);
        assert_eq!(lost, [Run { cargo: Cargo::Size(9000), count: 1 }]);
        assert!(ledger.is_empty() && ledger.entries.is_empty() && ledger.is_settled_by(&(4..4)));
    }

    #[test]
    fn what_is_cut_anew_is_carried_by_others() {
        let mut ledger = Ledger::default();
        (0..6).for_each(|index| push(&mut ledger, index, 0));
        ledger.acknowledge(4..5, &mut Vec::new());
        ledger.detect_lost(Duration::from_millis(10), &trip(20), &mut Vec::new());
        ledger.disown(|vi, message| (vi, message) == (1, 0));
        let mut arrived = Vec::new();
        assert!(ledger.acknowledge(0..6, &mut arrived).is_some());
        assert!(arrived.iter().all(|run| run.cargo == Cargo::Probe) && ledger.is_empty(), "{arrived:?}");
    }

    #[test]
    fn each_packet_keeps_its_departure_while_earlier_ones_are_forgotten() {
        let mut ledger = Ledger::default();
        (0..100).for_each(|index| push(&mut ledger, index, u64::from(index / 10)));
        for index in 0..100 {
            assert_eq!(ledger.oldest().map(|(_, at)| at.as_millis() as u64), Some(index / 10));
            let departure = ledger.acknowledge(index..index + 1, &mut Vec::new()).expect("it was live");
            assert_eq!(departure.sent_at.as_millis() as u64, index / 10);
        }
        assert!(ledger.departures.is_empty());
    }
}
