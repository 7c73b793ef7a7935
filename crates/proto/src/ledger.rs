//! Packets that were sent, until they are acknowledged or given up for lost.

use crate::rtt::RoundTrip;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// What a packet carried, so that it can be carried again in another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cargo {
    /// Packet `index` of a message.
    Data { vi: u32, message: u32, index: u32 },
    /// A question whether the peer is there.
    Probe,
    /// Credits that are news to the peer.
    Credit,
    /// The last word of a session.
    Close,
}

/// A packet on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentPacket {
    pub cargo: Cargo,
    pub bytes: u32,
    pub sent_at: Duration,
    /// What was delivered when it left, and when that was known: the rate is measured against it.
    pub delivered: (u64, Duration),
    /// When the first packet of its flight left.
    pub flight_began: Duration,
    pub held_back: bool,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Live(SentPacket),
    /// Given up, but its acknowledgement may still come [W-43].
    Lost(Cargo),
    /// Acknowledged, or never to be acknowledged.
    Settled,
}

/// All of one session, by packet number.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entries: VecDeque<Entry>,
    /// The number of the first entry.
    first: u64,
    live: usize,
    in_flight: u64,
    largest_acknowledged: Option<u64>,
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

    /// A packet that is to be acknowledged has left.
    pub(crate) fn push(&mut self, packet: SentPacket) {
        self.in_flight += u64::from(packet.bytes);
        self.live += 1;
        self.entries.push_back(Entry::Live(packet));
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

    /// Takes note of an acknowledged range. `each` is told of every cargo that has arrived now, with
    /// its packet unless that was given up before.
    pub(crate) fn acknowledge(&mut self, range: Range<u64>, mut each: impl FnMut(Cargo, Option<&SentPacket>)) {
        let (start, end) = (range.start.max(self.first), range.end.min(self.next_number()));
        for number in start..end {
            let entry = &mut self.entries[(number - self.first) as usize];
            match std::mem::replace(entry, Entry::Settled) {
                Entry::Live(packet) => {
                    self.live -= 1;
                    self.in_flight -= u64::from(packet.bytes);
                    each(packet.cargo, Some(&packet));
                }
                Entry::Lost(cargo) => each(cargo, None),
                Entry::Settled => {}
            }
        }
        if end > start {
            self.largest_acknowledged = Some(self.largest_acknowledged.map_or(end - 1, |largest| largest.max(end - 1)));
        }
        self.forget_settled();
    }

    /// Gives up what is lost by the packet threshold or by time; tells each, and when the next one
    /// would be lost by time [W-42].
    pub(crate) fn detect_lost(
        &mut self,
        now: Duration,
        trip: &RoundTrip,
        mut each: impl FnMut(Cargo, u32),
    ) -> Option<Duration> {
        let largest = self.largest_acknowledged?;
        let delay = trip.loss_delay();
        let mut next = None;
        let before = largest.saturating_sub(self.first).min(self.entries.len() as u64) as usize;
        for (position, entry) in self.entries.iter_mut().take(before).enumerate() {
            let Entry::Live(packet) = entry else { continue };
            let overtaken = largest - (self.first + position as u64) >= PACKET_THRESHOLD;
            if overtaken && packet.sent_at + delay / 4 <= now || packet.sent_at + delay <= now {
                let (cargo, bytes) = (packet.cargo, packet.bytes);
                self.live -= 1;
                self.in_flight -= u64::from(bytes);
                *entry = Entry::Lost(cargo);
                each(cargo, bytes);
            } else {
                let due = packet.sent_at + if overtaken { delay / 4 } else { delay };
                next = Some(next.map_or(due, |next: Duration| next.min(due)));
            }
        }
        self.forget_settled();
        next
    }

    /// The oldest packet that is still awaited.
    pub(crate) fn oldest(&self) -> Option<&SentPacket> {
        self.entries.iter().find_map(|entry| match entry {
            Entry::Live(packet) => Some(packet),
            _ => None,
        })
    }

    fn forget_settled(&mut self) {
        while matches!(self.entries.front(), Some(Entry::Settled)) {
            self.entries.pop_front();
            self.first += 1;
        }
        // One that was lost long ago will not be acknowledged any more.
        while self.entries.len() > REMEMBERED && matches!(self.entries.front(), Some(Entry::Lost(_) | Entry::Settled)) {
            self.entries.pop_front();
            self.first += 1;
        }
    }
}

/// So many later packets acknowledged, and it is lost; unless it left a moment ago.
const PACKET_THRESHOLD: u64 = 3;
/// Packets that are remembered although they were given up.
const REMEMBERED: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(number: u32, sent_at_ms: u64) -> SentPacket {
        SentPacket {
            cargo: Cargo::Data { vi: 1, message: 0, index: number },
            bytes: 100,
            sent_at: Duration::from_millis(sent_at_ms),
            delivered: (0, Duration::ZERO),
            flight_began: Duration::ZERO,
            held_back: false,
        }
    }

    fn trip(ms: u64) -> RoundTrip {
        let mut trip = RoundTrip::new();
        (0..50).for_each(|_| trip.update(Duration::from_millis(ms), Duration::ZERO));
        trip
    }

    fn indexes(cargo: Cargo) -> u32 {
        let Cargo::Data { index, .. } = cargo else { unreachable!("only data here") };
        index
    }

    #[test]
    fn what_is_overtaken_by_three_is_lost_and_may_still_arrive() {
        let mut ledger = Ledger::default();
        (0..6).for_each(|n| ledger.push(packet(n, 0)));
        let mut arrived = Vec::new();
        ledger.acknowledge(4..5, |cargo, packet| arrived.push((indexes(cargo), packet.is_some())));
        let mut lost = Vec::new();
        let next = ledger.detect_lost(Duration::from_millis(10), &trip(20), |cargo, _| lost.push(indexes(cargo)));
        assert_eq!((arrived, lost, ledger.in_flight()), (vec![(4, true)], vec![0, 1], 300));
        assert!(next.is_some_and(|at| at > Duration::from_millis(20)), "{next:?}");
        let mut late = Vec::new();
        ledger.acknowledge(0..4, |cargo, packet| late.push((indexes(cargo), packet.is_some())));
        assert_eq!(late, [(0, false), (1, false), (2, true), (3, true)]);
        assert_eq!((ledger.in_flight(), ledger.next_number()), (100, 6));
        ledger.acknowledge(0..6, |cargo, _| assert_eq!(indexes(cargo), 5, "the others were told before"));
        assert!(ledger.is_empty() && ledger.entries.is_empty());
    }

    #[test]
    fn what_is_old_is_lost_though_only_one_overtook_it() {
        let mut ledger = Ledger::default();
        ledger.push(packet(0, 0));
        ledger.push(packet(1, 1));
        ledger.acknowledge(1..2, |_, _| {});
        let mut lost = 0;
        let due = ledger.detect_lost(Duration::from_millis(10), &trip(20), |_, _| lost += 1).expect("one may be lost");
        assert_eq!(lost, 0);
        ledger.detect_lost(due, &trip(20), |_, _| lost += 1);
        assert_eq!((lost, ledger.in_flight()), (1, 0));
    }

    #[test]
    fn ranges_that_were_never_sent_are_harmless() {
        let mut ledger = Ledger::default();
        ledger.push(packet(0, 0));
        ledger.push_unanswered();
        assert!(ledger.was_sent(1) && !ledger.was_sent(2));
        ledger.acknowledge(5..900, |_, _| unreachable!("nothing like it was sent"));
        assert_eq!(ledger.in_flight(), 100);
    }
}
