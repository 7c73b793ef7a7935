//! An endpoint on a link.

use highwire_link::{Advice, Burst, Cut, Guide, Inbox, Landing, Link, ReceiveError, SendError, Woven};
use highwire_proto::{
    ConnectError, Endpoint, Entropy, Expectation, Guess, Header, Keys, Outgoing, Pulse, Sink, Source, Transmit,
};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

/// What an engine has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineCounters {
    /// Times the link was full, so that packets waited.
    pub link_full: u64,
    /// Bursts that the link refused; the protocol takes them for lost.
    pub refused: u64,
}

/// An endpoint on a link. It does nothing by itself: [`Engine::turn`] moves it.
pub struct Engine<L, S, T> {
    link: L,
    endpoint: Endpoint<S, T>,
    entropy: Box<dyn Entropy + Send>,
    inbox: Inbox,
    /// Packets that are to be sent, in `out`.
    bursts: VecDeque<(SocketAddr, Range<usize>, usize)>,
    out: Vec<u8>,
    /// Packets that did not land where they belong.
    moved: Vec<u8>,
    counters: EngineCounters,
    /// The link's lists, and those of them that it was told are granted.
    lists: u16,
    lists_noted: u16,
}

impl<L: Link, S: Source, T: Sink> Engine<L, S, T> {
    /// An engine for this endpoint on this link.
    pub fn new(link: L, mut endpoint: Endpoint<S, T>, entropy: Box<dyn Entropy + Send>) -> Engine<L, S, T> {
        endpoint.set_receive_buffer(link.receive_buffer_bytes());
        let lists = link.lists();
        endpoint.set_lists(lists);
        Engine {
            link,
            endpoint,
            entropy,
            inbox: Inbox::new(),
            bursts: VecDeque::new(),
            out: Vec::with_capacity(2 * OUT_BYTES),
            moved: Vec::new(),
            counters: EngineCounters::default(),
            lists,
            lists_noted: 0,
        }
    }

    /// The endpoint.
    pub fn endpoint(&mut self) -> &mut Endpoint<S, T> {
        &mut self.endpoint
    }

    /// The link.
    pub fn link(&mut self) -> &mut L {
        &mut self.link
    }

    /// What it has done.
    pub fn counters(&self) -> EngineCounters {
        self.counters
    }

    /// Asks for a session with whoever listens at `to`; its number.
    pub fn connect(&mut self, now: Duration, to: SocketAddr) -> Result<u32, ConnectError> {
        self.endpoint.connect(now, to, &mut *self.entropy)
    }

    /// Changes the keys: see [`Endpoint::set_keys`].
    pub fn set_keys(&mut self, now: Duration, keys: Keys) {
        self.endpoint.set_keys(now, keys, &mut *self.entropy);
    }

    /// This machine or process was put back to an earlier state: see [`Endpoint::forget_past`].
    pub fn forget_past(&mut self, now: Duration) {
        self.endpoint.forget_past(now, &mut *self.entropy);
    }

    /// Does what can be done now: sends what waits, takes in what has come, lets timers run, answers. True
    /// if a packet moved: then there may be more to do.
    pub fn turn(&mut self, now: Duration) -> Result<bool, ReceiveError> {
        // What the application has posted does not wait for a look at what has come.
        let sent = self.send(now);
        let received = self.receive(now);
        // Time passes though nothing can be received: what is due would be due for ever.
        if !self.run_timers(now) && !matches!(received, Ok(true)) {
            return received.map(|_| sent);
        }
        let answered = self.send(now);
        received.map(|received| sent || received || answered)
    }

    /// Lets timers run that are due. True if one was.
    pub fn run_timers(&mut self, now: Duration) -> bool {
        let due = self.endpoint.poll_timeout().is_some_and(|at| at <= now);
        if due {
            self.endpoint.handle_timeout(now, &mut *self.entropy);
            self.note_lists();
        }
        due
    }

    /// Tells the link which lists are granted, and the endpoint which are left.
    fn note_lists(&mut self) {
        if self.lists != 0 && self.lists != self.link.lists() {
            self.lists = self.link.lists();
            self.endpoint.set_lists(self.lists);
        }
        let granted = self.endpoint.lists_in_use();
        let changed = granted ^ std::mem::replace(&mut self.lists_noted, granted);
        for list in (1..u16::BITS as u8).filter(|list| changed & 1 << list != 0) {
            self.link.note_list(list, granted & 1 << list != 0);
        }
    }

    /// When it is to be turned again, if nothing comes before.
    pub fn deadline(&self) -> Option<Duration> {
        self.endpoint.poll_timeout()
    }

    /// True if packets wait for room in the link.
    pub fn is_held_up(&self) -> bool {
        !self.bursts.is_empty()
    }

    /// Takes in one call's worth, so that a flood does not keep us from answering. True if a packet has come.
    pub fn receive(&mut self, now: Duration) -> Result<bool, ReceiveError> {
        if self.link.receive_guided(&mut self.inbox, &mut Expected(&mut self.endpoint))? == 0 {
            return Ok(false);
        }
        self.endpoint.note_overruns(self.inbox.drops());
        self.endpoint.set_way(self.inbox.way(), self.inbox.list());
        let (endpoint, entropy) = (&mut self.endpoint, &mut *self.entropy);
        if self.inbox.landed().is_some() {
            self.take_landed(now);
        } else if let Some((from, packet)) = self.inbox.only() {
            endpoint.handle_packet(now, from, packet, entropy);
        } else {
            self.inbox.packets().for_each(|(from, packet)| endpoint.handle_packet(now, from, packet, entropy));
        }
        if self.endpoint.lists_in_use() != self.lists_noted {
            self.note_lists();
        }
        Ok(true)
    }

    /// Takes in a batch that was received where its payloads were expected. What is not where it belongs is moved
    /// out of there first, all of it, since one packet's place may be where another one lies.
    fn take_landed(&mut self, now: Duration) {
        let Some((landed, heads)) = self.inbox.landed() else { return };
        let hits = match landed.is_cut_right() {
            true => self.endpoint.take_landed(now, landed.from, heads, landed.bytes, landed.looked),
            false => 0,
        };
        let missed = landed.packets() - hits;
        self.moved.clear();
        if missed > 0 {
            let place = self.endpoint.landing_place().map_or(&[][..], |place| place);
            self.inbox.put_together(hits, place, &mut self.moved);
            let first = &self.moved[..landed.segment.min(self.moved.len())];
            self.endpoint.note_missed(first, missed, self.moved.len());
        }
        if hits > 0 {
            self.endpoint.finish_landed();
        }
        for packet in self.moved.chunks(landed.segment) {
            self.endpoint.handle_packet(now, landed.from, packet, &mut *self.entropy);
        }
    }

    /// Sends a message at once if nothing is in its way, and only then reads the clock and takes note of it;
    /// what else there is to send waits. A message that has to be posted comes back.
    pub fn send_ahead(
        &mut self,
        session: u32,
        vi: u32,
        message: Outgoing<S>,
        now: impl FnOnce() -> Duration,
    ) -> Result<Duration, Outgoing<S>> {
        if self.is_held_up() {
            return Err(message);
        }
        self.out.clear();
        let Some(to) = self.endpoint.write_ahead(session, vi, &message, &mut self.out) else { return Err(message) };
        let bytes = self.out.len();
        let sent = self.link.send(&[Burst { to, bytes: &self.out, segment: bytes }]);
        match sent {
            Ok(0) => {
                // It waits for room.
                self.counters.link_full += 1;
                self.bursts.push_back((to, 0..bytes, bytes));
            }
            Ok(_) => {}
            // It is lost, as far as the protocol is concerned, and will be noticed.
            Err(_) => self.counters.refused += 1,
        }
        let now = now();
        if let Some(session) = self.endpoint.session(session) {
            session.note_ahead(now, vi, message, bytes);
        }
        if let Err(error) = &sent {
            note_refusal(&mut self.endpoint, now, to, error);
        }
        Ok(now)
    }

    /// Sends what is to be sent now. True if a packet went.
    pub fn send(&mut self, now: Duration) -> bool {
        let mut any = false;
        for _ in 0..SENDS_A_TURN {
            if self.bursts.is_empty() && self.gather(now) {
                any = true;
                continue;
            }
            if self.bursts.is_empty() {
                break;
            }
            if !self.flush(now) {
                self.counters.link_full += 1;
                break;
            }
            any = true;
        }
        any
    }

    /// Collects packets until there are enough for a call or nothing more is to be sent. True if packets
    /// went from where they lay, and none were collected.
    fn gather(&mut self, now: Duration) -> bool {
        self.out.clear();
        let burst_bytes = self.link.burst_bytes_max();
        while self.out.len() < OUT_BYTES && self.bursts.len() < BURSTS_A_CALL {
            let begin = self.out.len();
            if !self.bursts.is_empty() {
                // What is alone does not wait until everybody was asked.
                if !self.endpoint.owes() {
                    break;
                }
                // What was collected goes first.
                let Some((to, segment)) = self.endpoint.poll_transmit(now, burst_bytes, &mut self.out) else { break };
                self.bursts.push_back((to, begin..self.out.len(), segment));
                continue;
            }
            let (link, counters, mut refused) = (&mut self.link, &mut self.counters, None);
            let send = |to, pulse: Pulse<'_>| {
                let Pulse { heads, first_head, payload, segment } = pulse;
                let burst = Woven { to, heads, first_head, head: Header::BYTES, payload, segment };
                let sent = link.send_woven(&burst);
                if let Err(error) = &sent {
                    counters.refused += 1;
                    refused = Some((to, *error));
                }
                sent.unwrap_or(true)
            };
            let transmit = self.endpoint.poll_transmit_with(now, burst_bytes, &mut self.out, send);
            if let Some((to, error)) = refused {
                note_refusal(&mut self.endpoint, now, to, &error);
            }
            match transmit {
                Some((to, Transmit::Written(segment))) => {
                    self.bursts.push_back((to, begin..self.out.len(), segment));
                }
                Some((_, Transmit::Sent)) => return true,
                None => break,
            }
        }
        false
    }

    /// Sends what was gathered; false if the link is full.
    fn flush(&mut self, now: Duration) -> bool {
        while let Some(first) = self.bursts.front() {
            let burst = |(to, range, segment): &(SocketAddr, Range<usize>, usize)| Burst {
                to: *to,
                bytes: &self.out[range.clone()],
                segment: *segment,
            };
            let sent = match self.bursts.len() {
                1 => self.link.send(&[burst(first)]),
                _ => self.link.send(&self.bursts.iter().map(burst).collect::<Vec<_>>()),
            };
            match sent {
                Ok(0) => return false,
                Ok(sent) if sent == self.bursts.len() => self.bursts.clear(),
                Ok(sent) => drop(self.bursts.drain(..sent)),
                Err(error) => {
                    self.counters.refused += 1;
                    if let Some((to, ..)) = self.bursts.pop_front() {
                        note_refusal(&mut self.endpoint, now, to, &error);
                    }
                }
            }
        }
        true
    }
}

/// Tells a link where an endpoint expects payloads.
struct Expected<'a, S, T>(&'a mut Endpoint<S, T>);

impl<S: Source, T: Sink> Guide for Expected<'_, S, T> {
    fn advise(&mut self, way: usize, head: Option<&[u8]>) -> Advice<'_> {
        match self.0.expect_landing(way, head) {
            Expectation::None => Advice::Aside,
            Expectation::Look => Advice::Look,
            Expectation::There(Guess { first_head, packet, place }) => {
                Advice::Land(Landing { cut: Cut::new(first_head, Header::BYTES, packet), place })
            }
        }
    }
}

/// What the link refuses is lost, as far as the protocol is concerned, and will be noticed. Only that packets
/// are too large is known for certain, and nothing need be waited for.
fn note_refusal<S: Source, T: Sink>(endpoint: &mut Endpoint<S, T>, now: Duration, to: SocketAddr, error: &SendError) {
    match error {
        SendError::TooLarge { bytes } => endpoint.handle_too_large(now, to, *bytes),
        SendError::WrongFamily { .. } | SendError::System { .. } => {}
    }
}

/// Bytes gathered for one call: what has just been written is still in the nearest caches.
const OUT_BYTES: usize = 64 << 10;
const BURSTS_A_CALL: usize = 8;
/// Few, so that acknowledgements are seen, and time is told anew, between them.
const SENDS_A_TURN: usize = 2;

#[cfg(test)]
mod tests;
