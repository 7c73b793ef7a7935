//! An endpoint: one address, and the sessions that come and go there.
//!
//! ```text
//!  connect ──▶ Greeting ── welcome ──▶ session          hello ──▶ half open ── first sealed packet ──▶ session
//!                 │ hello again, less and less often                  │ few, short-lived
//!                 └── out of patience ──▶ Failed                      └── out of patience ──▶ forgotten
//! ```
//!
//! It is silent to a caller with the wrong key, and gives memory only to a caller that has shown the right one: a
//! half-open record is one of a few, and is gone after a moment. A caller that has shown it and finds no room is told.

mod speculation;

use crate::admission::{Admission, Holder, Use, Word};
use crate::entropy::Entropy;
use crate::handshake::{Initiator, Offer, respond};
use crate::header::{Header, Kind};
use crate::key::{Fingerprint, Keys};
use crate::message::{Outgoing, Sink, Source};
use crate::session::{Dropped, Event, Intake, PULSE_PACKETS_MOST, Pulse, Session, SessionConfig, Transmit};
pub use speculation::{Expectation, Speculation};
use speculation::{WAYS, Way};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// What an endpoint may use, and how it behaves.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Of each session.
    pub session: SessionConfig,
    /// Answers hellos.
    pub listening: bool,
    /// Sessions, at most. A caller that finds no room is told so.
    pub sessions_max: usize,
    /// Half-open sessions, at most; each takes about four kilobytes.
    pub half_open_max: usize,
    /// How long one is kept: longer than a peer is patient, so that no welcome comes too late.
    pub half_open_for: Duration,
    /// How long a hello is repeated before connecting has failed.
    pub patience: Duration,
    /// How payloads are received.
    pub speculation: Speculation,
}

impl Default for EndpointConfig {
    fn default() -> EndpointConfig {
        EndpointConfig {
            session: SessionConfig::default(),
            listening: false,
            sessions_max: 1024,
            half_open_max: 64,
            half_open_for: Duration::from_secs(6),
            patience: Duration::from_secs(5),
            speculation: Speculation::default(),
        }
    }
}

/// Says who may call an endpoint that has no key, by the address alone. A caller that it does not admit gets no answer.
pub trait Gate: std::fmt::Debug + Send {
    /// Whether a session may be opened from there.
    fn admits(&mut self, from: SocketAddr) -> bool;
}

/// Why a session did not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answered.
    #[error(
        "no answer from {to} within {after:?}: nothing listens there, UDP is blocked on the way, or the keys differ (ours: {})",
        key_name(fingerprint)
    )]
    NoAnswer {
        /// Who was asked.
        to: SocketAddr,
        /// For how long.
        after: Duration,
        /// Which key was used; none in the insecure form.
        fingerprint: Option<Fingerprint>,
    },
    /// There are too many sessions.
    #[error("{limit} sessions are open already")]
    TooMany {
        /// The limit in force.
        limit: usize,
    },
    /// The hello could not be made.
    #[error("the handshake could not begin")]
    Handshake,
}

fn key_name(fingerprint: &Option<Fingerprint>) -> String {
    fingerprint.as_ref().map_or("none".to_string(), ToString::to_string)
}

/// What has happened at an endpoint.
#[derive(Debug)]
pub enum EndpointEvent<S, T> {
    /// A session that this side asked for is there.
    Connected(u32),
    /// It will not be.
    Failed(u32, ConnectError),
    /// A peer's session is there.
    Accepted(u32, SocketAddr),
    /// Something happened in a session.
    Session(u32, Event<S, T>),
}

/// What an endpoint has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointStats {
    /// Packets that are none of ours: too short, of another version, of no session.
    pub strangers: u64,
    /// Hellos that were not answered: wrong key, damaged, or nobody listens.
    pub unanswered: u64,
    /// Hellos that found no room.
    pub turned_away: u64,
    /// Packets that a session dropped.
    pub dropped: u64,
    /// Requests of peers for a receive list.
    pub list_requests: u64,
    /// Those that were granted one, again or for the first time.
    pub list_grants: u64,
    /// Those that were refused.
    pub list_refusals: u64,
    /// Lists that came back since nobody used them.
    pub lists_idle: u64,
    /// Lists that were taken back since what named them came another way.
    pub lists_astray: u64,
    /// Packets that named a list that was not their VI's.
    pub foreign_lists: u64,
}

#[derive(Debug)]
struct Greeting {
    initiator: Initiator,
    hello: Vec<u8>,
    to: SocketAddr,
    began: Duration,
    again_at: Duration,
    interval: Duration,
    due: bool,
}

impl Greeting {
    fn new(
        keys: &Keys,
        offer: Offer,
        to: SocketAddr,
        now: Duration,
        entropy: &mut dyn Entropy,
    ) -> Result<Greeting, ConnectError> {
        let made = Initiator::new(keys.to_call_with(), offer, entropy);
        let (initiator, hello) = made.map_err(|_| ConnectError::Handshake)?;
        let interval = HELLO_INTERVAL;
        Ok(Greeting { initiator, hello, to, began: now, again_at: now + interval, interval, due: true })
    }
}

#[derive(Debug)]
struct HalfOpen<S, T> {
    session: Session<S, T>,
    from: SocketAddr,
    since: Duration,
    /// Its hello, all of it [W-11].
    hello: Vec<u8>,
    /// The welcome; or the word that there is no room.
    answer: Vec<u8>,
    due: bool,
    /// There was no room: it is never accepted.
    refused: bool,
}

#[derive(Debug)]
struct Open<S, T> {
    session: Session<S, T>,
    peer: SocketAddr,
}

/// Whether a packet from this address may be the peer's: without a key the address is all that tells the peer from others
/// on its host [W-98].
#[inline]
fn may_come_from<S: Source, T: Sink>(session: &Session<S, T>, peer: SocketAddr, from: SocketAddr) -> bool {
    session.is_sealed() || peer == from
}

/// How a session stands, for people who change keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// This side's number for it.
    pub number: u32,
    /// Where the peer is.
    pub peer: SocketAddr,
    /// The key that it was established with; none in the insecure form.
    pub fingerprint: Option<Fingerprint>,
}

/// One address and its sessions.
#[derive(Debug)]
pub struct Endpoint<S, T> {
    keys: Keys,
    config: EndpointConfig,
    gate: Option<Box<dyn Gate>>,
    incarnation: u64,
    greetings: BTreeMap<u32, Greeting>,
    half_open: VecDeque<HalfOpen<S, T>>,
    sessions: BTreeMap<u32, Open<S, T>>,
    /// Sessions, each in turn.
    turns: VecDeque<u32>,
    events: VecDeque<EndpointEvent<S, T>>,
    stats: EndpointStats,
    intake: Intake,
    admission: Admission,
    /// Nothing was to be sent when it was last looked for, and nothing has happened since that could
    /// change that: sessions need not be asked before `deadline`.
    at_rest: bool,
    deadline: Option<Duration>,
    /// The same for events.
    all_told: bool,
    /// The session that was last concerned: most likely something happened there.
    last: u32,
    /// By which way comes what is handed in.
    way: usize,
    /// And by which receive list; 0 if by none.
    list: u8,
    ways: [Way; WAYS],
    /// The session that was asked last where payloads are expected.
    guesser: Option<u32>,
}

impl<S: Source, T: Sink> Endpoint<S, T> {
    /// An endpoint with these keys; none makes it insecure.
    pub fn new(keys: Keys, config: EndpointConfig, entropy: &mut dyn Entropy) -> Endpoint<S, T> {
        let mut incarnation = [0; 8];
        entropy.fill(&mut incarnation);
        Endpoint {
            keys,
            config,
            gate: None,
            incarnation: u64::from_le_bytes(incarnation),
            greetings: BTreeMap::new(),
            half_open: VecDeque::new(),
            sessions: BTreeMap::new(),
            turns: VecDeque::new(),
            events: VecDeque::new(),
            stats: EndpointStats::default(),
            intake: Intake::default(),
            admission: Admission::new(),
            at_rest: false,
            deadline: None,
            all_told: false,
            last: 0,
            way: 0,
            list: 0,
            ways: [Way::default(); WAYS],
            guesser: None,
        }
    }

    /// Something happens: there may be packets to send and events to tell.
    fn stir(&mut self) {
        (self.at_rest, self.all_told) = (false, false);
    }

    /// How many bytes can wait to be handed to this endpoint, as the kernel counts them; peers are told, and
    /// send no more at once than that takes. 0 if that is not known.
    pub fn set_receive_buffer(&mut self, bytes: usize) {
        self.intake.buffer = bytes.min(u32::MAX as usize) as u32;
        self.tell_intake();
    }

    /// So many datagrams were dropped so far since that buffer was full. Peers are told.
    pub fn note_overruns(&mut self, datagrams: u64) {
        if self.intake.overruns != datagrams as u32 {
            self.intake.overruns = datagrams as u32;
            self.tell_intake();
        }
    }

    /// These receive lists can be granted to transfers, a bit for each: bit n is list n, bit 0 is not looked
    /// at. Without this there are none.
    pub fn set_lists(&mut self, lists: u16) {
        self.stir();
        self.admission.set_lists(lists);
    }

    /// The receive lists that are granted, a bit for each.
    pub fn lists_in_use(&self) -> u16 {
        self.admission.granted()
    }

    /// The session and the VI, as this side numbers them, whose packets are to come by a list.
    #[cfg(test)]
    pub(crate) fn list_holder(&self, list: u8) -> Option<(u32, u32)> {
        self.admission.holder(list)
    }

    fn tell_intake(&mut self) {
        let half_open = self.half_open.iter_mut().map(|half| &mut half.session);
        let open = self.sessions.values_mut().map(|open| &mut open.session);
        half_open.chain(open).for_each(|session| session.set_intake(self.intake));
    }

    /// Asks `gate` about callers while there is no key; without one all are let in.
    pub fn set_gate(&mut self, gate: Option<Box<dyn Gate>>) {
        self.gate = gate;
    }

    /// Changes the keys while sessions go on: see [`Keys`] for the steps. What is not established yet under a key
    /// that is not listed any more is begun again with the new one, or forgotten if the peer began it [W-61].
    pub fn set_keys(&mut self, now: Duration, keys: Keys, entropy: &mut dyn Entropy) {
        self.stir();
        self.keys = keys;
        self.half_open.retain(|half| self.keys.accept(half.session.fingerprint()));
        let fingerprint = self.fingerprint();
        self.sessions.values_mut().for_each(|open| open.session.renew_with(fingerprint));
        let outdated = |greeting: &Greeting| !self.keys.accept(greeting.initiator.fingerprint());
        let outdated: Vec<u32> =
            self.greetings.iter().filter(|(_, greeting)| outdated(greeting)).map(|(number, _)| *number).collect();
        self.begin_anew(now, outdated, entropy);
    }

    /// Ends the sessions that were not established under a listed key; how many. Their peers are told, and what was
    /// under way comes back.
    pub fn end_old_sessions(&mut self, now: Duration) -> usize {
        self.stir();
        let keys = &self.keys;
        let mut ended = 0;
        for open in self.sessions.values_mut() {
            if open.session.ended().is_none() && !keys.accept(open.session.fingerprint()) {
                open.session.end_for_key(now);
                ended += 1;
            }
        }
        self.release_ended();
        ended
    }

    /// This machine or process was put back to an earlier state: sessions end without a further packet, and handshakes
    /// under way begin anew, since what was drawn and sealed before may be known [W-105].
    pub fn forget_past(&mut self, now: Duration, entropy: &mut dyn Entropy) {
        self.stir();
        let mut incarnation = [0; 8];
        entropy.fill(&mut incarnation);
        self.incarnation = u64::from_le_bytes(incarnation);
        self.half_open.clear();
        self.sessions.values_mut().for_each(|open| open.session.end_restored());
        self.release_ended();
        let greetings: Vec<u32> = self.greetings.keys().copied().collect();
        self.begin_anew(now, greetings, entropy);
    }

    /// Begins handshakes again with what is drawn anew, and the present key.
    fn begin_anew(&mut self, now: Duration, greetings: Vec<u32>, entropy: &mut dyn Entropy) {
        for number in greetings {
            let (offer, greeting) = (self.offer(number), self.greetings.get_mut(&number));
            if let Some(greeting) = greeting
                && let Ok(again) = Greeting::new(&self.keys, offer, greeting.to, now, entropy)
            {
                *greeting = Greeting { began: greeting.began, ..again };
            }
        }
    }

    /// The sessions that are there, in no order.
    pub fn sessions(&self) -> impl Iterator<Item = SessionInfo> {
        let alive = self.sessions.iter().filter(|(_, open)| open.session.ended().is_none());
        alive.map(|(number, open)| SessionInfo {
            number: *number,
            peer: open.peer,
            fingerprint: open.session.fingerprint(),
        })
    }

    /// The key that new sessions are asked for with; none in the insecure form.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.keys.to_call_with().map(|key| key.fingerprint())
    }

    /// Answers hellos from now on, or no longer. Sessions that are there go on.
    pub fn set_listening(&mut self, listening: bool) {
        self.config.listening = listening;
    }

    /// What it has done.
    pub fn stats(&self) -> EndpointStats {
        self.stats
    }

    /// A session of this endpoint.
    pub fn session(&mut self, number: u32) -> Option<&mut Session<S, T>> {
        self.stir();
        self.sessions.get_mut(&number).map(|open| &mut open.session)
    }

    /// Appends the packet of a message, to leave before anything is noted of it: see
    /// [`Session::write_ahead`]. Where it goes, or `None` if it has to be posted.
    pub fn write_ahead(
        &mut self,
        number: u32,
        vi: u32,
        message: &Outgoing<S>,
        out: &mut Vec<u8>,
    ) -> Option<SocketAddr> {
        let open = self.sessions.get_mut(&number)?;
        open.session.write_ahead(vi, message, out).then_some(open.peer)
    }

    /// Where the peer of a session is.
    pub fn peer(&self, number: u32) -> Option<SocketAddr> {
        self.sessions.get(&number).map(|open| open.peer)
    }

    /// The link refuses packets of so many bytes to this peer: see [`Session::handle_too_large`].
    pub fn handle_too_large(&mut self, now: Duration, to: SocketAddr, bytes: usize) {
        self.stir();
        let concerned = self.sessions.values_mut().filter(|open| open.peer == to);
        concerned.for_each(|open| open.session.handle_too_large(now, bytes));
    }

    /// True if something is to be sent now that does not wait well; also if there are too many sessions to
    /// ask each.
    pub fn owes(&self) -> bool {
        let few = self.sessions.len() <= 4;
        self.pending() > 0 || !few || self.sessions.values().any(|open| open.session.owes())
    }

    /// Half-open sessions and those that are being asked for.
    pub fn pending(&self) -> usize {
        self.half_open.len() + self.greetings.len()
    }

    /// True if there is no room for one more session, counting those that are being asked for.
    fn is_full(&self) -> bool {
        self.sessions.len() + self.greetings.len() >= self.config.sessions_max
    }

    /// A number for a new session. It is drawn, so that nobody knows others from their own [W-97].
    fn number(&self, entropy: &mut dyn Entropy) -> u32 {
        loop {
            let mut number = [0; 4];
            entropy.fill(&mut number);
            let number = u32::from_le_bytes(number);
            let half_open = self.half_open.iter().any(|half| half.session.number() == number);
            if number != 0
                && !half_open
                && !self.sessions.contains_key(&number)
                && !self.greetings.contains_key(&number)
            {
                return number;
            }
        }
    }

    fn offer(&self, session: u32) -> Offer {
        Offer {
            session,
            message_bytes_max: self.config.session.message_bytes_max,
            death_ms: self.config.session.death.as_millis().min(u128::from(u32::MAX)) as u32,
            incarnation: self.incarnation,
        }
    }

    /// Asks for a session; its number. An event tells how it ended.
    pub fn connect(&mut self, now: Duration, to: SocketAddr, entropy: &mut dyn Entropy) -> Result<u32, ConnectError> {
        self.stir();
        if self.is_full() {
            return Err(ConnectError::TooMany { limit: self.config.sessions_max });
        }
        let number = self.number(entropy);
        let greeting = Greeting::new(&self.keys, self.offer(number), to, now, entropy)?;
        self.greetings.insert(number, greeting);
        Ok(number)
    }

    /// Forgets a session that has ended.
    pub fn forget(&mut self, number: u32) {
        self.stir();
        self.sessions.remove(&number);
        self.admission.release_unless(|(session, _)| session != number);
        self.turns.retain(|turn| *turn != number);
    }

    /// A packet has come from `from`.
    pub fn handle_packet(&mut self, now: Duration, from: SocketAddr, packet: &[u8], entropy: &mut dyn Entropy) {
        let Ok(header) = Header::parse(packet) else {
            self.stats.strangers += 1;
            return;
        };
        self.stir();
        match header.kind {
            Kind::Hello => self.handle_hello(now, from, packet, entropy),
            Kind::Welcome => self.handle_welcome(now, from, header.session, packet),
            _ => self.handle_sealed(now, from, header, packet, entropy),
        }
    }

    fn handle_hello(&mut self, now: Duration, from: SocketAddr, packet: &[u8], entropy: &mut dyn Entropy) {
        self.forget_stale(now);
        // The same bytes are the same hello, from whatever address; the answer goes where the first came from.
        if let Some(half) = self.half_open.iter_mut().find(|half| half.hello == packet) {
            half.due |= half.from == from;
            return;
        }
        if !self.config.listening {
            self.stats.unanswered += 1;
            return;
        }
        let number = self.number(entropy);
        match respond(&self.keys, packet, self.offer(number), entropy) {
            Ok(_) if self.keys.is_insecure() && self.gate.as_mut().is_some_and(|gate| !gate.admits(from)) => {
                self.stats.unanswered += 1;
            }
            Ok((established, answer)) => {
                if self.half_open.len() >= self.config.half_open_max {
                    // An honest caller goes on within a round trip: the oldest is the least likely to.
                    self.stats.turned_away += 1;
                    self.half_open.pop_front();
                }
                let mut session = Session::new(established, number, self.config.session.clone(), now);
                session.set_intake(self.intake);
                let (hello, refused) = (packet.to_vec(), false);
                self.half_open.push_back(HalfOpen { session, from, since: now, hello, answer, due: true, refused });
            }
            // Silence: the sender learns nothing [W-8] [W-59].
            Err(_) => self.stats.unanswered += 1,
        }
    }

    fn handle_welcome(&mut self, now: Duration, from: SocketAddr, number: u32, packet: &[u8]) {
        let Some(greeting) = self.greetings.remove(&number) else {
            self.stats.strangers += 1;
            return;
        };
        match greeting.initiator.handle_welcome(packet) {
            Ok(established) => {
                let mut session = Session::new(established, number, self.config.session.clone(), now);
                session.set_intake(self.intake);
                // The other side gives memory when it sees something sealed [W-10].
                session.ask();
                self.sessions.insert(number, Open { session, peer: from });
                self.turns.push_back(number);
                self.events.push_back(EndpointEvent::Connected(number));
            }
            Err((initiator, _)) => {
                self.stats.strangers += 1;
                self.greetings.insert(number, Greeting { initiator, ..greeting });
            }
        }
    }

    fn handle_sealed(
        &mut self,
        now: Duration,
        from: SocketAddr,
        header: Header,
        packet: &[u8],
        entropy: &mut dyn Entropy,
    ) {
        let number = header.session;
        if let Some(open) = self.sessions.get_mut(&number) {
            if !may_come_from(&open.session, open.peer, from) {
                self.stats.strangers += 1;
                return;
            }
            self.last = number;
            let taken = open.session.handle_parsed(now, header, packet);
            if header.kind == Kind::Renew {
                open.session.answer_renewal(now, &self.keys, entropy);
            }
            match taken {
                // It is authentic and newer than all before, so its sender is where it came from [W-60].
                Ok(()) if open.session.heard_newest() => {
                    open.peer = from;
                    self.note_course(number, &header);
                }
                // Older than another that came, or taken by nobody and so perhaps a copy: it says nothing
                // about where its sender is now.
                Ok(()) | Err(Dropped::NoPlace) => {}
                Err(_) => self.stats.dropped += 1,
            }
            if taken.is_ok() && (header.list != 0 || matches!(header.kind, Kind::Fast | Kind::Close)) {
                self.handle_fast(now, &header);
            }
            return;
        }
        let full = self.is_full();
        let Some(position) = self.half_open.iter().position(|half| half.session.number() == number) else {
            self.stats.strangers += 1;
            return;
        };
        let half = &mut self.half_open[position];
        if !may_come_from(&half.session, half.from, from) {
            self.stats.strangers += 1;
            return;
        }
        if !matches!(half.session.handle_packet(now, packet), Ok(()) | Err(Dropped::NoPlace)) {
            self.stats.dropped += 1;
            return;
        }
        if full || half.refused {
            // Told as often as it asks. What it says when it was told is not answered.
            if header.kind != Kind::Ack
                && let Some(answer) = half.session.refuse(now)
            {
                self.stats.turned_away += u64::from(!half.refused);
                (half.answer, half.due, half.refused) = (answer, true, true);
            }
            return;
        }
        if let Some(half) = self.half_open.remove(position) {
            self.sessions.insert(number, Open { session: half.session, peer: from });
            self.turns.push_back(number);
            self.events.push_back(EndpointEvent::Accepted(number, from));
        }
    }

    /// A packet that was taken and names a receive list, or is about one, or ends its session [W-92].
    #[inline(never)]
    pub(super) fn handle_fast(&mut self, now: Duration, header: &Header) {
        let holder = (header.session, header.vi);
        let word = match header.kind {
            Kind::Data => {
                match self.admission.note_use(now, holder, header.list, self.list) {
                    Use::Own => return,
                    Use::Astray => self.stats.lists_astray += 1,
                    Use::Foreign => self.stats.foreign_lists += 1,
                }
                let after = Some(self.admission.retry_after(now, holder));
                let word = Word::Refusal { request: 0, list: header.list, after };
                if let Some(open) = self.sessions.get_mut(&header.session) {
                    open.session.refuse_list(now, header.vi, word);
                }
                return;
            }
            Kind::Close => return self.release_ended(),
            Kind::Fast => Word::parse(header),
            _ => return,
        };
        match word {
            Some(Word::Request { request, .. }) => self.answer_request(now, holder, request),
            Some(Word::Done { request, .. }) => self.admission.release(holder, request),
            _ => {}
        }
    }

    fn answer_request(&mut self, now: Duration, holder: Holder, request: u32) {
        if !self.admission.has_free() {
            self.release_ended();
            self.stats.lists_idle += self.admission.release_idle(now);
        }
        let Some(open) = self.sessions.get_mut(&holder.0) else { return };
        // A VI that is not open yet will be, perhaps: then it is asked for again.
        let Some(can_be_fast) = open.session.can_be_fast(holder.1) else { return };
        self.stats.list_requests += 1;
        let word = if !can_be_fast || !self.admission.has_lists() {
            Word::Refusal { request, list: 0, after: None }
        } else if let Some(list) = self.admission.grant(now, holder, request, open.session.round_trip_least()) {
            Word::Grant { request, list }
        } else {
            Word::Refusal { request, list: 0, after: Some(self.admission.retry_after(now, holder)) }
        };
        let granted = matches!(word, Word::Grant { .. });
        *(if granted { &mut self.stats.list_grants } else { &mut self.stats.list_refusals }) += 1;
        open.session.answer_fast(holder.1, word);
    }

    /// Lists of sessions and VIs that are no more come back.
    fn release_ended(&mut self) {
        let sessions = &self.sessions;
        self.admission.release_unless(|(session, vi)| {
            sessions.get(&session).is_some_and(|open| open.session.can_be_fast(vi).is_some())
        });
    }

    /// [W-58]
    fn forget_stale(&mut self, now: Duration) {
        let keep = self.config.half_open_for;
        self.half_open.retain(|half| now.saturating_sub(half.since) < keep);
    }

    /// Appends packets to `out`, of at most `burst_bytes` together if that is more than one packet: where they
    /// go, and their length (the last may be shorter).
    pub fn poll_transmit(
        &mut self,
        now: Duration,
        burst_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Option<(SocketAddr, usize)> {
        let transmit = self.transmit(out, |session, _, out| {
            let segments = packets_of_burst(session, burst_bytes);
            session.poll_transmit(now, segments, out).map(Transmit::Written)
        });
        match transmit? {
            (to, Transmit::Written(segment)) => Some((to, segment)),
            (_, Transmit::Sent) => None,
        }
    }

    /// The same, but packets that can go from where they lie are handed to `send`:
    /// see [`Session::poll_transmit_with`].
    pub fn poll_transmit_with(
        &mut self,
        now: Duration,
        burst_bytes: usize,
        out: &mut Vec<u8>,
        mut send: impl FnMut(SocketAddr, Pulse<'_>) -> bool,
    ) -> Option<(SocketAddr, Transmit)> {
        self.transmit(out, |session, to, out| {
            let segments = packets_of_burst(session, burst_bytes);
            session.poll_transmit_with(now, segments, out, &mut |pulse| send(to, pulse))
        })
    }

    fn transmit(
        &mut self,
        out: &mut Vec<u8>,
        mut of_session: impl FnMut(&mut Session<S, T>, SocketAddr, &mut Vec<u8>) -> Option<Transmit>,
    ) -> Option<(SocketAddr, Transmit)> {
        if self.at_rest {
            return None;
        }
        self.all_told = false;
        if self.pending() > 0
            && let Some((to, bytes)) = self.write_greeting(out)
        {
            return Some((to, Transmit::Written(bytes)));
        }
        for _ in 0..self.turns.len() {
            let number = self.turns.pop_front()?;
            self.turns.push_back(number);
            let Some(open) = self.sessions.get_mut(&number) else { continue };
            if let Some(transmit) = of_session(&mut open.session, open.peer, out) {
                return Some((open.peer, transmit));
            }
        }
        (self.at_rest, self.deadline) = (true, self.next_deadline());
        None
    }

    /// Appends a hello or the answer to one that is due: where it goes, and its length.
    fn write_greeting(&mut self, out: &mut Vec<u8>) -> Option<(SocketAddr, usize)> {
        let hellos = self.greetings.values_mut().map(|greeting| (&mut greeting.due, greeting.to, &greeting.hello));
        let answers = self.half_open.iter_mut().map(|half| (&mut half.due, half.from, &half.answer));
        let (due, to, packet) = hellos.chain(answers).find(|(due, ..)| **due)?;
        *due = false;
        out.extend_from_slice(packet);
        Some((to, packet.len()))
    }

    /// When [`Endpoint::handle_timeout`] is to be called next.
    pub fn poll_timeout(&self) -> Option<Duration> {
        if self.at_rest { self.deadline } else { self.next_deadline() }
    }

    fn next_deadline(&self) -> Option<Duration> {
        let sessions = self.sessions.values().filter_map(|open| open.session.poll_timeout()).min();
        let sessions = match self.admission.deadline() {
            None => sessions,
            lists => lists.into_iter().chain(sessions).min(),
        };
        if self.pending() == 0 {
            return sessions;
        }
        let greetings = self.greetings.values().map(|greeting| greeting.again_at);
        let half_open = self.half_open.iter().map(|half| half.since + self.config.half_open_for);
        greetings.chain(half_open).chain(sessions).min()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Duration, entropy: &mut dyn Entropy) {
        self.stir();
        self.forget_stale(now);
        let mut failed = Vec::new();
        for (number, greeting) in &mut self.greetings {
            if greeting.again_at > now {
                continue;
            }
            if now.saturating_sub(greeting.began) >= self.config.patience {
                failed.push((*number, greeting.to));
            } else {
                greeting.due = true;
                greeting.interval = (greeting.interval * 2).min(HELLO_INTERVAL_MAX);
                greeting.again_at = (now + greeting.interval).min(greeting.began + self.config.patience).max(now);
            }
        }
        let fingerprint = self.fingerprint();
        for (number, to) in failed {
            self.greetings.remove(&number);
            let error = ConnectError::NoAnswer { to, after: self.config.patience, fingerprint };
            self.events.push_back(EndpointEvent::Failed(number, error));
        }
        for open in self.sessions.values_mut() {
            if open.session.poll_timeout().is_some_and(|at| at <= now) {
                open.session.handle_timeout(now);
                // Without a key to call with it is not asked, and ends when it is overdue.
                if open.session.wants_renewal()
                    && let Some(key) = self.keys.to_call_with()
                {
                    open.session.renew(key, entropy);
                }
            }
        }
        if self.admission.granted() != 0 {
            self.release_ended();
            self.stats.lists_idle += self.admission.release_idle(now);
        }
    }

    /// The next thing that happened.
    pub fn poll_event(&mut self) -> Option<EndpointEvent<S, T>> {
        if let Some(event) = self.events.pop_front() {
            return Some(event);
        }
        if self.all_told {
            return None;
        }
        let alone = self.sessions.len() == 1;
        if let Some(open) = self.sessions.get_mut(&self.last)
            && let Some(event) = open.session.poll_event()
        {
            self.all_told = alone && !open.session.has_events();
            return Some(EndpointEvent::Session(self.last, event));
        }
        let next = self.sessions.iter().find(|(_, open)| open.session.has_events()).map(|(number, _)| *number);
        self.all_told = next.is_none();
        self.last = next?;
        self.poll_event()
    }
}

/// How many full packets of a session have so many bytes.
fn packets_of_burst<S: Source, T: Sink>(session: &Session<S, T>, burst_bytes: usize) -> usize {
    (burst_bytes / session.packet_bytes()).clamp(1, PULSE_PACKETS_MOST)
}

// [W-57]
const HELLO_INTERVAL: Duration = Duration::from_millis(100);
const HELLO_INTERVAL_MAX: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests;
