//! A bad network, made from any link.
//!
//! Each packet goes through these steps when it is sent, all decided by the seed:
//!
//! ```text
//! partition? ─► lost? ─► corrupted? ─► doubled? ─► delayed ─► overtaken? ─► the link beneath
//!   dropped     dropped   1 to 3 bits   once more    heap      few packets
//! ```
//!
//! What is held back goes out in later calls of `send` or `receive`, or in [`Impaired::flush_due`];
//! [`Impaired::next_due`] tells when that is worth a call.

use crate::link::ask_beneath;
use crate::random::Random;
use crate::{Burst, Clock, Guide, Inbox, Link, ReceiveError, SendError};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

/// What goes wrong. The default is nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Impairments {
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet goes twice.
    pub duplication: f64,
    /// Probability that a packet is overtaken by the one to four packets after it.
    pub reordering: f64,
    /// Probability that one to three bits of a packet are changed.
    pub corruption: f64,
    /// What every packet is held back.
    pub delay: Duration,
    /// What a packet is held back on top, evenly spread; packets with less overtake those with more.
    pub jitter: Duration,
    /// While the clock is in one of these, every packet is lost that is sent, or due to go after it was
    /// held back.
    pub partitions: Vec<Range<Duration>>,
}

/// What was done to packets so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImpairedCounters {
    /// Lost.
    pub lost: u64,
    /// Lost to a partition.
    pub partitioned: u64,
    /// Changed.
    pub corrupted: u64,
    /// Sent twice.
    pub duplicated: u64,
    /// Held back for others to overtake.
    pub reordered: u64,
    /// Held back packets that the link beneath refused when their time had come.
    pub refused: u64,
}

/// A link that treats what it sends badly.
#[derive(Debug)]
pub struct Impaired<L> {
    link: L,
    impairments: Impairments,
    random: Random,
    clock: Clock,
    counters: ImpairedCounters,
    /// Packets so far, for their order.
    admitted: u64,
    /// The number of the current burst.
    burst: u64,
    delayed: BinaryHeap<Reverse<Held>>,
    overtaken: VecDeque<Overtaken>,
    /// Free to go, but the link beneath was full.
    ready: VecDeque<Packet>,
    /// Packets that go together; used again and again.
    joined: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Packet {
    to: SocketAddr,
    bytes: Box<[u8]>,
    /// The burst it came with.
    burst: u64,
}

/// Ordered by time, then by the order of sending.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Held {
    due: Duration,
    number: u64,
    reordered: bool,
    packet: Packet,
}

#[derive(Debug)]
struct Overtaken {
    /// Packets that still have to pass it.
    passes: usize,
    /// When it goes although too few came.
    due: Duration,
    packet: Packet,
}

/// Most packets that overtake one.
const PASSES_MAX: usize = 4;
/// How long a packet waits to be overtaken, where nothing follows it.
const OVERTAKE_WAIT: Duration = Duration::from_millis(5);
const BITS_MAX: usize = 3;
/// Packets that one system call takes as a burst.
const JOINED_MAX: usize = 64;
/// Most packets held back; then the link is full for now.
const HELD_MAX: usize = 1 << 16;

impl Impairments {
    fn are_apart(&self, now: Duration) -> bool {
        self.partitions.iter().any(|partition| partition.contains(&now))
    }

    fn are_none(&self) -> bool {
        *self == Impairments::default()
    }
}

impl<L: Link> Impaired<L> {
    /// Impairs what is sent over `link`, by the time of `clock` and the randomness of `seed`.
    pub fn new(link: L, impairments: Impairments, seed: u64, clock: Clock) -> Impaired<L> {
        let (delayed, overtaken, ready) = (BinaryHeap::new(), VecDeque::new(), VecDeque::new());
        let counters = ImpairedCounters::default();
        let random = Random::new(seed);
        let joined = Vec::new();
        Impaired {
            link,
            impairments,
            random,
            clock,
            counters,
            admitted: 0,
            burst: 0,
            delayed,
            overtaken,
            ready,
            joined,
        }
    }

    /// From now on, other things go wrong. What is held back keeps its time.
    pub fn set_impairments(&mut self, impairments: Impairments) {
        self.impairments = impairments;
    }

    /// What was done to packets so far; [`Link::counters`] are those of the link beneath.
    pub fn impaired_counters(&self) -> ImpairedCounters {
        self.counters
    }

    /// Packets held back now.
    pub fn held(&self) -> usize {
        self.delayed.len() + self.overtaken.len() + self.ready.len()
    }

    /// When the next packet that is held back may go. Not later than now: the link was full.
    pub fn next_due(&self) -> Option<Duration> {
        let delayed = self.delayed.peek().map(|Reverse(held)| held.due);
        let overtaken = self.overtaken.iter().map(|held| held.due).min();
        let ready = (!self.ready.is_empty()).then_some(Duration::ZERO);
        [delayed, overtaken, ready].into_iter().flatten().min()
    }

    /// Sends what is due; how many packets went. A packet that the link beneath refuses is lost.
    pub fn flush_due(&mut self) -> usize {
        // No burst is being sent now, so no error is anyone's to handle.
        self.burst += 1;
        self.flush().unwrap_or(0)
    }

    /// The link beneath; what is held back is lost.
    pub fn into_inner(self) -> L {
        self.link
    }

    /// Sends what is due. An error speaks of a packet of the current burst, which is given up.
    fn flush(&mut self) -> Result<usize, SendError> {
        self.release_due();
        let mut sent = 0;
        while !self.ready.is_empty() {
            let run = self.join_ready();
            if run > 1 {
                let burst = Burst { to: self.ready[0].to, bytes: &self.joined, segment: self.ready[0].bytes.len() };
                match self.link.send(&[burst]) {
                    Ok(0) => break,
                    Ok(_) => {
                        self.ready.drain(..run);
                        sent += run;
                        continue;
                    }
                    // Packet by packet it turns out which is at fault.
                    Err(_) => {}
                }
            }
            let singles = self.ready.iter().take(run);
            let bursts: Vec<_> = singles.map(|packet| Burst::single(packet.to, &packet.bytes)).collect();
            match self.link.send(&bursts) {
                Ok(0) => break,
                Ok(count) => {
                    self.ready.drain(..count);
                    sent += count;
                }
                Err(error) => {
                    let burst = self.ready.pop_front().map(|packet| packet.burst);
                    // Whoever sends now must not take the fault of an older packet for its own.
                    if burst == Some(self.burst) {
                        let current = self.burst;
                        self.ready.retain(|packet| packet.burst != current);
                        return Err(error);
                    }
                    self.counters.refused += 1;
                }
            }
        }
        Ok(sent)
    }

    /// Puts the first packets that are ready together, as far as they can go as one burst, so that a bad
    /// network is no slower than it has to be; how many, at least one.
    fn join_ready(&mut self) -> usize {
        self.joined.clear();
        let Some(first) = self.ready.front() else { return 0 };
        let (segment, limit) = (first.bytes.len(), self.link.burst_bytes_max());
        let mut count = 0;
        for packet in self.ready.iter().take(JOINED_MAX) {
            let fits = packet.bytes.len() <= segment && self.joined.len() + packet.bytes.len() <= limit;
            if count > 0 && (packet.to != first.to || !fits || packet.bytes.is_empty()) {
                break;
            }
            self.joined.extend_from_slice(&packet.bytes);
            count += 1;
            if packet.bytes.len() < segment || segment == 0 {
                break;
            }
        }
        count
    }

    /// Decides what happens to a packet, and puts what is left of it among the delayed.
    fn admit(&mut self, to: SocketAddr, bytes: &[u8], now: Duration) {
        if self.impairments.are_apart(now) {
            self.counters.partitioned += 1;
            return;
        }
        if self.random.chance(self.impairments.loss) {
            self.counters.lost += 1;
            return;
        }
        let mut packet = Packet { to, bytes: bytes.into(), burst: self.burst };
        if self.random.chance(self.impairments.corruption) && !packet.bytes.is_empty() {
            self.corrupt(&mut packet.bytes);
        }
        if self.random.chance(self.impairments.duplication) {
            self.counters.duplicated += 1;
            self.delay(packet.clone(), now);
        }
        self.delay(packet, now);
    }

    fn delay(&mut self, packet: Packet, now: Duration) {
        let due = now + self.impairments.delay + self.random.duration_below(self.impairments.jitter);
        let reordered = self.random.chance(self.impairments.reordering);
        self.counters.reordered += u64::from(reordered);
        self.delayed.push(Reverse(Held { due, number: self.admitted, reordered, packet }));
        self.admitted += 1;
    }

    /// Flips one to three bits, each another: two flips of one bit would change nothing.
    fn corrupt(&mut self, bytes: &mut [u8]) {
        let bits = bytes.len() * 8;
        let wanted = 1 + self.random.below(BITS_MAX);
        let mut flipped = Vec::with_capacity(wanted);
        while flipped.len() < wanted {
            let bit = self.random.below(bits);
            if !flipped.contains(&bit) {
                bytes[bit / 8] ^= 1 << (bit % 8);
                flipped.push(bit);
            }
        }
        self.counters.corrupted += 1;
    }

    /// Moves what may go to `ready`.
    fn release_due(&mut self) {
        let now = self.clock.now();
        while let Some(Reverse(held)) = self.delayed.pop() {
            if held.due > now {
                self.delayed.push(Reverse(held));
                break;
            }
            if self.impairments.are_apart(held.due) {
                self.counters.partitioned += 1;
                continue;
            }
            if held.reordered {
                let passes = 1 + self.random.below(PASSES_MAX);
                self.overtaken.push_back(Overtaken { passes, due: held.due + OVERTAKE_WAIT, packet: held.packet });
                continue;
            }
            self.ready.push_back(held.packet);
            self.overtaken.iter_mut().for_each(|waiting| waiting.passes = waiting.passes.saturating_sub(1));
            self.release_overtaken(now, |waiting| waiting.passes == 0);
        }
        self.release_overtaken(now, |waiting| waiting.due <= now);
    }

    fn release_overtaken(&mut self, now: Duration, is_free: impl Fn(&Overtaken) -> bool) {
        for _ in 0..self.overtaken.len() {
            let waiting = self.overtaken.pop_front().expect("as many as were counted");
            if !is_free(&waiting) {
                self.overtaken.push_back(waiting);
            } else if self.impairments.are_apart(waiting.due.min(now)) {
                self.counters.partitioned += 1;
            } else {
                self.ready.push_back(waiting.packet);
            }
        }
    }
}

impl<L: Link> Link for Impaired<L> {
    /// As the trait says; what is held back counts as sent, and if the link beneath refuses it later
    /// it is lost.
    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        self.flush_due();
        if self.impairments.are_none() && self.held() == 0 {
            // Whole bursts, as fast as the link beneath takes them.
            return self.link.send(bursts);
        }
        for (index, burst) in bursts.iter().enumerate() {
            if !self.ready.is_empty() || self.held() >= HELD_MAX {
                return Ok(index);
            }
            self.burst += 1;
            let now = self.clock.now();
            burst.packets().for_each(|packet| self.admit(burst.to, packet, now));
            match self.flush() {
                Ok(_) => {}
                Err(error) if index == 0 => return Err(error),
                Err(_) => return Ok(index),
            }
        }
        Ok(bursts.len())
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        self.flush_due();
        self.link.receive(inbox)
    }

    fn receive_guided(&mut self, inbox: &mut Inbox, guide: &mut dyn Guide) -> Result<usize, ReceiveError> {
        self.flush_due();
        self.link.receive_guided(inbox, guide)
    }

    ask_beneath!(self, self.link);
}
