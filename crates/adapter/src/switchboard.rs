//! Which line of which VI goes by which session: an engine, and everything that is connected to it.
//!
//! It has neither threads nor waits; [`crate::port`] has them. Lines that have something new are listed in
//! `news` until whoever turned the board tells them.

use crate::engine::Engine;
use crate::load::Load;
use crate::note::{FIRST_VI, NOTES, NOTES_MAX, Note, Refusal};
use crate::remote::{Ends, Finished, PAYLOADS, Remote};
use highwire_link::{Burst, Inbox, Link, LinkCounters, ReceiveError, SendError};
use highwire_mem::Granted;
use highwire_mem::work::{Deed, Dispatch, Done, Errand, Fault, Landings, Line, Parcel, Place, Side, WireError, Work};
use highwire_proto::{
    Assurance, ConnectError, Ending, EndpointEvent, Event, Incoming, LandingStats, Outgoing, Session,
};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// The engine of a port.
pub(crate) type PortEngine = Engine<Box<dyn Link + Send>, Load, Load>;

/// A VI of a session: the session's number and the VI's, both this side's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub session: u32,
    pub vi: u32,
}

/// What a look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    /// Something for VIs, and that is all: whoever waits for it is to have it first, and what else there is to
    /// do can wait until then.
    Completions,
    /// Something that was answered.
    More,
}

/// How a line stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The session is being asked for, or the VI.
    Asking,
    Connected,
    /// It will not be.
    Failed(WireError),
}

#[derive(Debug)]
struct Circuit {
    line: Arc<Line>,
    reliable: bool,
    standing: Standing,
    /// The peer's number for it.
    remote: u32,
    /// Work that was taken from the line just now.
    posted: VecDeque<Work>,
    /// Work that the session has no room for yet: sends, receives, expected places. Sends wait too for remote
    /// memory that is to be written or read before.
    waiting: [VecDeque<Work>; 3],
    memory: Remote,
    /// Why it is being closed.
    fault: Fault,
}

#[derive(Debug)]
struct Party {
    peer: SocketAddr,
    /// This side asked for the session, and ends it when its last VI is gone.
    ours: bool,
    established: bool,
    /// It takes no further VIs.
    closing: bool,
    next_vi: u32,
    circuits: BTreeMap<u32, Circuit>,
    /// Notes that were posted and have not arrived.
    notes: usize,
    /// VIs whose notes wait for those.
    unsaid: VecDeque<u32>,
    /// Over; until then it answers a peer who repeats its last word.
    over: Option<Duration>,
}

/// Somebody who wants to be accepted.
#[derive(Clone, Copy, Debug)]
struct Caller {
    session: u32,
    vi: u32,
    reliable: bool,
}

/// An engine, and everything that is connected to it.
pub(crate) struct Switchboard {
    engine: PortEngine,
    parties: BTreeMap<u32, Party>,
    callers: VecDeque<Caller>,
    listening: bool,
    message_bytes_max: usize,
    /// VIs of one session, at most.
    vis_max: usize,
    /// When events were handed out last.
    now: Duration,
    /// When the link is asked to look everywhere.
    everywhere_at: Duration,
    /// When the next session that is over is forgotten.
    forget_at: Option<Duration>,
    /// Lines to be told.
    pub news: Vec<Arc<Line>>,
    /// Something changed for those who connect or accept.
    pub changed: bool,
    /// The line that somebody looks at who takes what came at once, and the first of it.
    pub looked_at: Option<Key>,
    handed: Option<Done>,
}

impl Switchboard {
    pub(crate) fn new(engine: PortEngine, listening: bool, message_bytes_max: usize, vis_max: usize) -> Switchboard {
        Switchboard {
            engine,
            parties: BTreeMap::new(),
            callers: VecDeque::new(),
            listening,
            message_bytes_max,
            vis_max,
            now: Duration::ZERO,
            everywhere_at: Duration::ZERO,
            forget_at: None,
            news: Vec::new(),
            changed: false,
            looked_at: None,
            handed: None,
        }
    }

    pub(crate) fn engine(&mut self) -> &mut PortEngine {
        &mut self.engine
    }

    /// Does what can be done now; see [`Engine::turn`]. True if a packet moved: then there may be more to do.
    pub(crate) fn turn(&mut self, now: Duration) -> Result<bool, ReceiveError> {
        let moved = self.engine.turn(now);
        // Notes may have been answered, and work that waited taken.
        let answered = self.dispatch(now) && self.engine.send(now);
        self.forget_parties(now);
        moved.map(|moved| moved || answered)
    }

    /// When there is something to do though nothing comes: what is over is forgotten then, and its memory is given back.
    pub(crate) fn deadline(&mut self) -> Option<Duration> {
        let engine = self.engine.deadline();
        [engine, self.forget_at].into_iter().flatten().min()
    }

    /// Takes in what has come, if something has, and answers. For who knows that there is nothing else to do.
    pub(crate) fn look(&mut self, now: Duration) -> Found {
        if now >= self.everywhere_at {
            // Who looks rarely is not to wait for the link's own count of looks.
            self.everywhere_at = now + EVERYWHERE;
            self.engine.link().note_ready(0);
            self.engine.link().note_ready(2);
        }
        // The kernel refuses to receive only for want of memory, which passes.
        if !self.engine.receive(now).unwrap_or(false) {
            return Found::Nothing;
        }
        self.dispatch(now);
        let more = self.changed || !self.callers.is_empty() || self.engine.endpoint().owes();
        if more || !self.has_completions() {
            self.send(now);
            return Found::More;
        }
        Found::Completions
    }

    /// What was handed over; whoever looked at a line does so no longer.
    pub(crate) fn take_handed(&mut self) -> Option<Done> {
        self.looked_at = None;
        self.handed.take()
    }

    /// True if something is done that was not told.
    pub(crate) fn has_completions(&self) -> bool {
        self.handed.is_some() || !self.news.is_empty()
    }

    /// Sends what was handed in, without looking for what has come.
    pub(crate) fn send(&mut self, now: Duration) {
        self.engine.send(now);
        self.dispatch(now);
    }

    /// True if nothing that this session has sent is on its way.
    pub(crate) fn is_quiet(&mut self, session: u32) -> bool {
        self.engine.endpoint().session(session).is_none_or(|session| session.is_quiet())
    }

    /// True if nobody uses it: it only waits for its sessions to end.
    pub(crate) fn is_idle(&self) -> bool {
        !self.listening && self.parties.values().all(|party| party.circuits.is_empty())
    }

    /// True if there is nothing left to wait for.
    pub(crate) fn is_done(&self) -> bool {
        self.parties.values().all(|party| party.over.is_some())
    }

    /// Takes the link away: nothing goes out or comes in any more.
    pub(crate) fn cut_off(&mut self) {
        let local = self.engine.link().local_address();
        *self.engine.link() = Box::new(Cut(local));
    }

    /// Ends every session that this side may end.
    pub(crate) fn close_sessions(&mut self) {
        for (number, party) in &mut self.parties {
            party.closing = true;
            if let Some(session) = self.engine.endpoint().session(*number) {
                session.close();
            }
        }
    }

    // ── Connecting and accepting ─────────────────────────────────────────────────────────────────

    /// Asks for a VI to whoever listens at `to`, by a session that is there or a new one.
    pub(crate) fn connect(
        &mut self,
        now: Duration,
        to: SocketAddr,
        line: &Arc<Line>,
        reliable: bool,
    ) -> Result<Key, ConnectError> {
        // Those that are over must not keep others out, though nothing has moved since.
        self.forget_parties(now);
        let known = self.parties.iter().find(|(_, party)| party.is_open_to(to)).map(|(number, _)| *number);
        let endpoint = self.engine.endpoint();
        // One that was silent for a while may be dead, and its peer have come back as another.
        let is_fresh = |number: &u32| endpoint.session(*number).is_none_or(|s| now < s.heard_at() + FRESH);
        let session = match known.filter(is_fresh) {
            Some(number) => number,
            None => {
                let number = self.engine.connect(now, to)?;
                self.parties.insert(number, Party::new(to, true));
                number
            }
        };
        let Some(party) = self.parties.get_mut(&session) else { return Err(ConnectError::Handshake) };
        let vi = party.take_number();
        party.circuits.insert(vi, Circuit::new(line, reliable));
        if party.established {
            self.tell(session, Note::Open { vi, reliable });
        }
        Ok(Key { session, vi })
    }

    /// How a line stands that was asked for.
    pub(crate) fn standing(&self, key: Key) -> Standing {
        self.circuit(key).map_or(Standing::Asking, |circuit| circuit.standing.clone())
    }

    /// Whether the session of a line is there.
    pub(crate) fn is_established(&self, key: Key) -> bool {
        self.parties.get(&key.session).is_some_and(|party| party.established)
    }

    /// Where the other end of a line is, and how long messages to it may be.
    pub(crate) fn reach(&mut self, key: Key) -> Option<(SocketAddr, u64)> {
        let peer = self.parties.get(&key.session)?.peer;
        let limit = self.engine.endpoint().session(key.session)?.peer().message_bytes_max;
        Some((peer, u64::from(limit).min(self.message_bytes_max as u64)))
    }

    /// True if somebody waits to be accepted.
    pub(crate) fn has_callers(&self) -> bool {
        !self.callers.is_empty()
    }

    /// Connects a line to the next who waits, if anybody does.
    pub(crate) fn accept(&mut self, line: &Arc<Line>, reliable: bool) -> Option<Key> {
        while let Some(Caller { session, vi: remote, reliable: theirs }) = self.callers.pop_front() {
            let Some(party) = self.parties.get_mut(&session).filter(|party| party.over.is_none()) else { continue };
            let vi = party.take_number();
            let has_room = party.connected() < self.vis_max;
            let opened = match self.engine.endpoint().session(session).filter(|_| has_room) {
                Some(session) => session.open_vi(vi, remote, assurance(reliable), assurance(theirs)).is_ok(),
                None => false,
            };
            if !opened {
                self.tell(session, Note::Refused { to: remote, reason: Refusal::Busy });
                continue;
            }
            let circuit = Circuit { standing: Standing::Connected, remote, ..Circuit::new(line, reliable) };
            party.circuits.insert(vi, circuit);
            self.tell(session, Note::Accepted { to: remote, vi, reliable });
            return Some(Key { session, vi });
        }
        None
    }

    /// Nobody listens any more; those who wait are told.
    pub(crate) fn stop_listening(&mut self) {
        self.listening = false;
        self.engine.endpoint().set_listening(false);
        while let Some(caller) = self.callers.pop_front() {
            self.tell(caller.session, Note::Refused { to: caller.vi, reason: Refusal::NobodyThere });
        }
    }

    /// This side is done with a line, and has not taken the completions of so many messages. What it still held
    /// is dropped with it.
    pub(crate) fn close(&mut self, key: Key, outstanding: usize) {
        let Some(party) = self.parties.get_mut(&key.session) else { return };
        let Some(circuit) = party.circuits.remove(&key.vi) else { return };
        let aborted = outstanding > circuit.line.done_count(Side::Sent);
        party.closing = party.ours && party.circuits.is_empty();
        let last = party.closing;
        if let Some(over) = party.over.filter(|_| party.circuits.is_empty()) {
            note_earlier(&mut self.forget_at, over);
        }
        match circuit.standing {
            Standing::Connected => self.tell(key.session, Note::Closed { to: circuit.remote, aborted }),
            Standing::Asking => self.tell(key.session, Note::Withdrawn { vi: key.vi }),
            Standing::Failed(_) => {}
        }
        if let Some(session) = self.engine.endpoint().session(key.session) {
            session.close_vi(key.vi);
            session.close_vi(key.vi | PAYLOADS);
            if last {
                session.close();
            }
        }
    }

    // ── Work ─────────────────────────────────────────────────────────────────────────────────────

    /// Hands on work of a line. True if nothing that its session has sent is on its way.
    pub(crate) fn post(&mut self, key: Key, work: Work) -> bool {
        // A line that is closed posts nothing.
        let Some(circuit) = circuit_of(&mut self.parties, key.session, key.vi) else { return true };
        if circuit.is_waiting() || matches!(work, Work::Write(_) | Work::Read(_)) {
            // There may be room for what waits, which goes first.
            circuit.line.post(work);
            self.take_work(key);
            return self.is_quiet(key.session);
        }
        let (taken, quiet) = match self.engine.endpoint().session(key.session) {
            Some(session) => (circuit.hand_on_one(session, key.vi, self.message_bytes_max, work), session.is_quiet()),
            // What is asked of a session that is forgotten comes back.
            None => {
                circuit.posted.push_back(work);
                circuit.give_back();
                (false, true)
            }
        };
        if !taken {
            self.news.push(circuit.line.clone());
        }
        quiet
    }

    /// Sends a message of a line before anything else is done, if it may go; see [`Engine::send_ahead`]. It
    /// comes back if it has to be posted.
    pub(crate) fn send_ahead(
        &mut self,
        key: Key,
        dispatch: Dispatch,
        now: impl FnOnce() -> Duration,
    ) -> Result<(), Dispatch> {
        let Some(circuit) = circuit_of(&mut self.parties, key.session, key.vi) else { return Err(dispatch) };
        if circuit.is_waiting() {
            return Err(dispatch);
        }
        let message = outgoing(dispatch, self.message_bytes_max);
        let now = self.engine.send_ahead(key.session, key.vi, message, now).map_err(dispatch_of)?;
        self.send(now);
        Ok(())
    }

    /// Takes what was left on a line.
    pub(crate) fn take_work(&mut self, key: Key) {
        let Some(circuit) = circuit_of(&mut self.parties, key.session, key.vi) else { return };
        circuit.line.take_posted(&mut circuit.posted);
        let limit = self.message_bytes_max;
        match self.engine.endpoint().session(key.session) {
            Some(session) => circuit.hand_on(session, key.vi, limit),
            // What is asked of a session that is forgotten comes back.
            None => circuit.give_back(),
        }
        if circuit.line.has_done(Side::Sent) || circuit.line.has_done(Side::Received) {
            self.news.push(circuit.line.clone());
        }
        self.say(key);
    }

    /// Lets the peer of a line at this memory; `Err` tells the limit.
    pub(crate) fn grant(&mut self, key: Key, memory: Granted) -> Result<(), usize> {
        // A line that is closed grants nothing, and its end is told.
        self.circuit_mut(key.session, key.vi).map_or(Ok(()), |circuit| circuit.memory.grant(memory))
    }

    /// Takes that back: nothing lands in the memory afterwards. False if it was not granted.
    pub(crate) fn withdraw(&mut self, key: Key, handle: u32) -> bool {
        let Some(circuit) = circuit_of(&mut self.parties, key.session, key.vi) else { return false };
        let ends = circuit.ends(key.vi);
        let withdrawn = circuit.memory.withdraw(self.engine.endpoint().session(key.session), ends, handle);
        self.say(key);
        withdrawn
    }

    /// What has become of the payloads that came for a line, or for all of them.
    pub(crate) fn landings(&mut self, key: Option<Key>) -> Landings {
        let endpoint = self.engine.endpoint();
        let stats = match key {
            None => endpoint.landing(),
            Some(Key { session, vi }) => {
                endpoint.session(session).map_or(LandingStats::default(), |s| s.landing(Some(vi)))
            }
        };
        let LandingStats { hits, seen, copied, misses, looks, moved_bytes } = stats;
        Landings { hits, seen, copied, misses, looks, moved_bytes }
    }

    /// Takes an expected place back.
    pub(crate) fn revoke(&mut self, key: Key, payload_token: u64) -> Option<Place> {
        self.take_work(key);
        let circuit = self.circuit_mut(key.session, key.vi)?;
        let expected = |work: &Work| matches!(work, Work::Expect(token, _) if *token == payload_token);
        let waiting = &mut circuit.waiting[EXPECTED];
        if let Some(at) = waiting.iter().position(expected)
            && let Some(Work::Expect(_, place)) = waiting.remove(at)
        {
            return Some(place);
        }
        self.engine.endpoint().session(key.session)?.revoke(key.vi, payload_token).map(unload)
    }

    /// Asks for a receive list for what this line sends. One that is over needs none.
    pub(crate) fn request_fast(&mut self, key: Key, now: Duration) {
        if let Some(session) = self.engine.endpoint().session(key.session) {
            let _ = session.request_fast(key.vi);
        }
        self.send(now);
    }

    // ── What happened ────────────────────────────────────────────────────────────────────────────

    /// Hands out what happened; true if something did.
    fn dispatch(&mut self, now: Duration) -> bool {
        let mut any = false;
        self.now = now;
        while let Some(event) = self.engine.endpoint().poll_event() {
            any = true;
            match event {
                EndpointEvent::Connected(session) => self.note_session(session, None),
                EndpointEvent::Accepted(session, from) => self.note_session(session, Some(from)),
                EndpointEvent::Failed(session, error) => self.fail_session(session, &error),
                EndpointEvent::Session(session, Event::Ended(ending)) => self.end_session(session, ending),
                EndpointEvent::Session(session, event) => self.note_event(session, event),
            }
        }
        any
    }

    /// A session is there: the VI for notes, and the VIs that wait for it.
    fn note_session(&mut self, number: u32, from: Option<SocketAddr>) {
        if let Some(from) = from {
            self.parties.insert(number, Party::new(from, false));
        }
        let Some(party) = self.parties.get_mut(&number) else { return };
        party.established = true;
        self.changed = true;
        let Some(session) = self.engine.endpoint().session(number) else { return };
        // It cannot fail for a session that has just begun.
        let _ = session.open_vi(NOTES, NOTES, Assurance::Reliable, Assurance::Reliable);
        for _ in 0..NOTES_MAX {
            let _ = session.post_receive(NOTES, Incoming { token: 0, target: None });
        }
        let asking: Vec<Note> =
            party.circuits.iter().map(|(vi, circuit)| Note::Open { vi: *vi, reliable: circuit.reliable }).collect();
        if party.closing {
            // Whoever asked for it has given up meanwhile.
            session.close();
        }
        asking.into_iter().for_each(|note| self.tell(number, note));
    }

    fn fail_session(&mut self, number: u32, error: &ConnectError) {
        let Some(party) = self.parties.remove(&number) else { return };
        // The caller looks at its circuit, which therefore stays, unless the caller has given up before.
        let mut failed = Party::new(party.peer, true);
        failed.over = Some(Duration::ZERO);
        failed.circuits = party.circuits;
        if failed.circuits.is_empty() {
            note_earlier(&mut self.forget_at, Duration::ZERO);
        }
        for circuit in failed.circuits.values_mut() {
            circuit.standing = Standing::Failed(WireError::NoAnswer(error.to_string()));
        }
        self.parties.insert(number, failed);
        self.changed = true;
    }

    fn end_session(&mut self, number: u32, ending: Ending) {
        let now = self.now;
        let Some(party) = self.parties.get_mut(&number) else { return };
        // A peer that closed it repeats that, and one that was shut out asks.
        let has_last_words = matches!(ending, Ending::PeerClosed | Ending::PeerFull | Ending::KeyRemoved);
        let over = if has_last_words { now + LAST_WORDS } else { now };
        party.over = Some(over);
        if party.circuits.is_empty() {
            note_earlier(&mut self.forget_at, over);
        }
        self.callers.retain(|caller| caller.session != number);
        let fault = fault(ending, Fault::PeerClosed);
        for circuit in party.circuits.values_mut() {
            if circuit.standing == Standing::Asking {
                let reason = ending.to_string();
                circuit.standing = Standing::Failed(WireError::Over { to: party.peer, reason });
            }
            circuit.fault = fault;
            if circuit.standing != Standing::Connected {
                // It may still be connected to the next address of its host.
                continue;
            }
            circuit.line.take_posted(&mut circuit.posted);
            circuit.give_back();
            circuit.line.end(fault);
            self.news.push(circuit.line.clone());
        }
        self.changed = true;
    }

    fn note_event(&mut self, number: u32, event: Event<Load, Load>) {
        match event {
            Event::Received { vi: NOTES, control, status: Ok(()), .. } => {
                if let Some(session) = self.engine.endpoint().session(number) {
                    let _ = session.post_receive(NOTES, Incoming { token: 0, target: None });
                }
                if let Some(note) = Note::decode(&control) {
                    self.take_note(number, note);
                }
            }
            Event::Sent { vi: NOTES, .. } => self.say_more(number),
            Event::Received { vi: NOTES, .. } | Event::Ended(_) => {}
            Event::Sent { vi, token, payload, status } if vi & PAYLOADS != 0 => {
                self.with_memory(number, vi & !PAYLOADS, |circuit, _| {
                    let status = status.map_err(|ending| fault(ending, circuit.fault));
                    circuit.memory.note_sent(token, payload, status);
                });
            }
            Event::Received { vi, token, target, length, status, .. } if vi & PAYLOADS != 0 => {
                self.with_memory(number, vi & !PAYLOADS, |circuit, ends| {
                    let status = status.map_err(|ending| fault(ending, circuit.fault));
                    circuit.memory.note_received(ends, token, target, length, status);
                });
            }
            Event::Sent { vi, token, payload, status } => self.complete(number, vi, Side::Sent, |closed| {
                let status = status.map_err(|ending| fault(ending, closed));
                let done = done(token, status, parcel_of(payload));
                let length = if done.status.is_ok() { done.parcel.len() } else { 0 };
                Done { length, ..done }
            }),
            Event::Received { vi, token, target, length, immediate, control, payload_token, status } => {
                self.complete(number, vi, Side::Received, |closed| {
                    let status = status.map_err(|ending| fault(ending, closed));
                    let mut parcel = parcel_of(target);
                    if let Parcel::Bytes(bytes) = &mut parcel {
                        bytes.truncate(length);
                    }
                    Done { length, immediate, control, payload_token, ..done(token, status, parcel) }
                });
            }
        }
    }

    /// Something on this VI is complete: whoever waits is told, and more may have room now.
    fn complete(&mut self, number: u32, vi: u32, side: Side, done: impl FnOnce(Fault) -> Done) {
        let Some(circuit) = circuit_of(&mut self.parties, number, vi) else { return };
        let done = done(circuit.fault);
        let at_once = self.looked_at == Some(Key { session: number, vi })
            && side == Side::Received
            && self.handed.is_none()
            && !circuit.line.has_done(side);
        if at_once {
            self.handed = Some(done);
        } else {
            circuit.line.complete(side, done);
        }
        if !at_once && self.news.last().is_none_or(|last| !Arc::ptr_eq(last, &circuit.line)) {
            self.news.push(circuit.line.clone());
        }
        if circuit.is_waiting()
            && let Some(session) = self.engine.endpoint().session(number).filter(|session| session.ended().is_none())
        {
            circuit.hand_on(session, vi, self.message_bytes_max);
            self.say(Key { session: number, vi });
        }
    }

    /// Something happened to the remote memory of a VI: what is done is told, and more may begin.
    fn with_memory(&mut self, number: u32, vi: u32, note: impl FnOnce(&mut Circuit, Ends)) {
        let Some(circuit) = circuit_of(&mut self.parties, number, vi) else { return };
        let before = circuit.line.done_count(Side::Sent);
        note(circuit, circuit.ends(vi));
        match self.engine.endpoint().session(number).filter(|session| session.ended().is_none()) {
            Some(session) => circuit.hand_on(session, vi, self.message_bytes_max),
            None => {
                circuit.settle();
            }
        }
        let done = circuit.line.done_count(Side::Sent) != before;
        if done && self.news.last().is_none_or(|last| !Arc::ptr_eq(last, &circuit.line)) {
            self.news.push(circuit.line.clone());
        }
        self.say(Key { session: number, vi });
    }

    /// A note about the remote memory of a VI, on a session that is there.
    fn take_memory_note(
        &mut self,
        number: u32,
        vi: u32,
        take: impl FnOnce(&mut Remote, &mut Session<Load, Load>, Ends),
    ) {
        let connected = |circuit: &&mut Circuit| circuit.standing == Standing::Connected;
        let Some(circuit) = circuit_of(&mut self.parties, number, vi).filter(connected) else { return };
        let ends = circuit.ends(vi);
        let Some(session) = self.engine.endpoint().session(number).filter(|session| session.ended().is_none()) else {
            return;
        };
        take(&mut circuit.memory, session, ends);
        self.with_memory(number, vi, |_, _| {});
    }

    fn take_note(&mut self, number: u32, note: Note) {
        match note {
            Note::Open { vi, reliable } => {
                let waiting = self.callers.iter().any(|caller| (caller.session, caller.vi) == (number, vi));
                let refusal = match () {
                    () if !self.listening => Some(Refusal::NobodyThere),
                    () if !waiting && !self.make_room_for_caller(number) => Some(Refusal::Busy),
                    () => None,
                };
                match refusal {
                    Some(reason) => self.tell(number, Note::Refused { to: vi, reason }),
                    None if waiting => {}
                    None => self.callers.push_back(Caller { session: number, vi, reliable }),
                }
            }
            Note::Accepted { to, vi, reliable } => {
                let ours = self.circuit_mut(number, to).filter(|circuit| circuit.standing == Standing::Asking);
                let Some(circuit) = ours else {
                    // Whoever asked has given up.
                    return self.tell(number, Note::Closed { to: vi, aborted: true });
                };
                let sends = assurance(circuit.reliable);
                (circuit.remote, circuit.standing) = (vi, Standing::Connected);
                let has_room = self.parties.get(&number).is_some_and(|party| party.connected() <= self.vis_max);
                let opened = match self.engine.endpoint().session(number) {
                    Some(session) => has_room && session.open_vi(to, vi, sends, assurance(reliable)).is_ok(),
                    None => return,
                };
                if !opened {
                    self.tell(number, Note::Closed { to: vi, aborted: true });
                    self.fail(number, to, Refusal::Busy);
                }
            }
            Note::Refused { to, reason } => {
                if self.circuit_mut(number, to).is_some_and(|circuit| circuit.standing == Standing::Asking) {
                    self.fail(number, to, reason);
                }
            }
            Note::Closed { to, aborted } => self.close_by_peer(number, to, aborted),
            Note::Withdrawn { vi } => self.callers.retain(|caller| (caller.session, caller.vi) != (number, vi)),
            // Nobody who connects or accepts waits for these.
            Note::Request { to, request } => {
                let limit = self.message_bytes_max;
                return self.take_memory_note(number, to, |memory, session, ends| {
                    memory.serve(session, ends, limit, request);
                });
            }
            Note::Go { to, id, token } => {
                return self.take_memory_note(number, to, |memory, session, ends| {
                    memory.take_go(session, ends, id, token);
                });
            }
            Note::Written { to, id } => {
                return self.take_memory_note(number, to, |memory, _, _| memory.take_written(id));
            }
            Note::Denied { to, id, verdict } => {
                return self.take_memory_note(number, to, |memory, session, ends| {
                    memory.take_denied(session, ends, id, verdict);
                });
            }
        }
        self.changed = true;
    }

    /// Where too many wait to be accepted, the last of the session with the most of them makes room: a peer that asks
    /// for very many VIs keeps no other out. False if that is the one that asks.
    fn make_room_for_caller(&mut self, number: u32) -> bool {
        if self.callers.len() < CALLERS_MAX {
            return true;
        }
        let mut waiting: BTreeMap<u32, usize> = BTreeMap::new();
        for caller in &self.callers {
            *waiting.entry(caller.session).or_default() += 1;
        }
        let own = waiting.get(&number).copied().unwrap_or_default();
        let Some((greedy, most)) = waiting.into_iter().max_by_key(|(_, most)| *most) else { return true };
        // It must be left with as many as this one will have.
        if own + 1 >= most {
            return false;
        }
        if let Some(last) = self.callers.iter().rposition(|caller| caller.session == greedy)
            && let Some(caller) = self.callers.remove(last)
        {
            self.tell(greedy, Note::Refused { to: caller.vi, reason: Refusal::Busy });
        }
        true
    }

    fn fail(&mut self, number: u32, vi: u32, reason: Refusal) {
        let Some(party) = self.parties.get_mut(&number) else { return };
        if let Some(circuit) = party.circuits.get_mut(&vi) {
            circuit.standing = Standing::Failed(WireError::Refused { to: party.peer, reason: reason.reason() });
        }
    }

    fn close_by_peer(&mut self, number: u32, vi: u32, aborted: bool) {
        let Some(circuit) = self.circuit_mut(number, vi).filter(|circuit| circuit.standing == Standing::Connected)
        else {
            return;
        };
        let fault = if aborted { Fault::PeerAborted } else { Fault::PeerClosed };
        circuit.fault = fault;
        // What the session has comes back first: it was posted before what waits.
        let waiting = std::mem::take(&mut circuit.waiting);
        circuit.memory.fail(fault);
        if let Some(session) = self.engine.endpoint().session(number) {
            session.close_vi(vi);
            session.close_vi(vi | PAYLOADS);
        }
        self.flush_events(number);
        let Some(circuit) = self.circuit_mut(number, vi) else { return };
        circuit.waiting = waiting;
        circuit.line.take_posted(&mut circuit.posted);
        circuit.give_back();
        // Everything has come back before the end is told.
        circuit.line.end(fault);
        let line = circuit.line.clone();
        self.news.push(line);
    }

    /// Hands out what a session has, so that nothing comes after what is told next.
    fn flush_events(&mut self, number: u32) {
        while let Some(event) = self.engine.endpoint().session(number).and_then(Session::poll_event) {
            match event {
                // It is told in its turn; the session has no other event after it.
                Event::Ended(ending) => return self.end_session(number, ending),
                event => self.note_event(number, event),
            }
        }
    }

    fn tell(&mut self, number: u32, note: Note) {
        let Some(session) = self.engine.endpoint().session(number) else { return };
        let message = Outgoing { token: 0, control: note.encode(), immediate: 0, payload_token: None, payload: None };
        // A session that is over needs no notes.
        if session.post_send(NOTES, message).is_ok()
            && let Some(party) = self.parties.get_mut(&number)
        {
            party.notes += 1;
        }
    }

    /// Tells what there is to tell about the remote memory of a VI, or lets it wait while much is untold: notes
    /// that open and close VIs are not to wait for it.
    fn say(&mut self, key: Key) {
        let Some(party) = self.parties.get_mut(&key.session) else { return };
        let Some(circuit) = party.circuits.get_mut(&key.vi) else { return };
        if circuit.memory.outbox.is_empty() {
            return;
        }
        if party.notes >= NOTES_AHEAD {
            if !party.unsaid.contains(&key.vi) {
                party.unsaid.push_back(key.vi);
            }
            return;
        }
        // A VI has few.
        for note in std::mem::take(&mut circuit.memory.outbox) {
            self.tell(key.session, note);
        }
    }

    /// A note has arrived: another may be told.
    fn say_more(&mut self, number: u32) {
        let Some(party) = self.parties.get_mut(&number) else { return };
        party.notes = party.notes.saturating_sub(1);
        while let Some(party) = self.parties.get_mut(&number)
            && party.notes < NOTES_AHEAD
            && let Some(vi) = party.unsaid.pop_front()
        {
            self.say(Key { session: number, vi });
        }
    }

    fn circuit(&self, key: Key) -> Option<&Circuit> {
        self.parties.get(&key.session)?.circuits.get(&key.vi)
    }

    fn circuit_mut(&mut self, session: u32, vi: u32) -> Option<&mut Circuit> {
        circuit_of(&mut self.parties, session, vi)
    }

    /// Sessions that are over are forgotten when nobody looks at them any more.
    fn forget_parties(&mut self, now: Duration) {
        if self.forget_at.is_none_or(|at| now < at) {
            return;
        }
        let endpoint = self.engine.endpoint();
        let mut next: Option<Duration> = None;
        self.parties.retain(|number, party| {
            let Some(over) = party.over.filter(|_| party.circuits.is_empty()) else { return true };
            let stays = now < over;
            if stays {
                note_earlier(&mut next, over);
            } else {
                endpoint.forget(*number);
            }
            stays
        });
        self.forget_at = next;
    }
}

fn circuit_of(parties: &mut BTreeMap<u32, Party>, session: u32, vi: u32) -> Option<&mut Circuit> {
    parties.get_mut(&session)?.circuits.get_mut(&vi)
}

/// What is left of a link that was taken away.
struct Cut(SocketAddr);

impl Link for Cut {
    fn local_address(&self) -> SocketAddr {
        self.0
    }

    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        Ok(bursts.len())
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        inbox.clear();
        Ok(0)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn burst_bytes_max(&self) -> usize {
        usize::from(u16::MAX)
    }

    fn counters(&self) -> LinkCounters {
        LinkCounters::default()
    }
}

impl Party {
    fn new(peer: SocketAddr, ours: bool) -> Party {
        let circuits = BTreeMap::new();
        Party {
            peer,
            ours,
            established: false,
            closing: false,
            next_vi: FIRST_VI,
            circuits,
            notes: 0,
            unsaid: VecDeque::new(),
            over: None,
        }
    }

    fn is_open_to(&self, to: SocketAddr) -> bool {
        self.ours && self.peer == to && !self.closing && self.over.is_none()
    }

    fn connected(&self) -> usize {
        let connected = |circuit: &&Circuit| circuit.standing == Standing::Connected && circuit.line.ended().is_none();
        self.circuits.values().filter(connected).count()
    }

    fn take_number(&mut self) -> u32 {
        let vi = self.next_vi;
        self.next_vi += 1;
        vi
    }
}

impl Circuit {
    fn new(line: &Arc<Line>, reliable: bool) -> Circuit {
        Circuit {
            line: line.clone(),
            reliable,
            standing: Standing::Asking,
            remote: 0,
            posted: VecDeque::new(),
            waiting: Default::default(),
            memory: Remote::default(),
            fault: Fault::Closed,
        }
    }

    fn ends(&self, local: u32) -> Ends {
        Ends { local, remote: self.remote }
    }

    /// Hands on what the session has room for. Sends, receives and expected places do not wait for each
    /// other: two peers who send much before they receive would wait for ever.
    fn hand_on(&mut self, session: &mut Session<Load, Load>, vi: u32, limit: usize) {
        loop {
            if !self.hand_on_waiting(session, vi, limit) {
                return self.give_back();
            }
            while let Some(work) = self.posted.pop_front() {
                if !self.hand_on_one(session, vi, limit, work) {
                    return;
                }
            }
            self.memory.advance(session, self.ends(vi));
            // Messages may have waited for what is done.
            if !self.settle() {
                return;
            }
        }
    }

    /// Hands on what waits, as far as there is room. False if the session is over.
    fn hand_on_waiting(&mut self, session: &mut Session<Load, Load>, vi: u32, limit: usize) -> bool {
        for lane in &mut self.waiting {
            while let Some(work) = lane.pop_front() {
                if !may_leave(&work, &self.memory) {
                    lane.push_front(work);
                    break;
                }
                match offer(session, vi, limit, work) {
                    Ok(()) => {}
                    Err((work, later)) => {
                        lane.push_front(work);
                        if !later {
                            return false;
                        }
                        break;
                    }
                }
            }
        }
        true
    }

    /// Hands work on, or lets it wait behind its like. False if the session is over, and everything came back.
    fn hand_on_one(&mut self, session: &mut Session<Load, Load>, vi: u32, limit: usize, work: Work) -> bool {
        // Work is not moved for this: most of it is messages, and large.
        if matches!(work, Work::Write(_) | Work::Read(_)) {
            match work {
                Work::Write(errand) => self.memory.post(Deed::Write, errand),
                Work::Read(errand) => self.memory.post(Deed::Read, errand),
                Work::Send(_) | Work::Receive(_) | Work::Expect(..) => {}
            }
            return true;
        }
        let lane = &mut self.waiting[lane(&work)];
        if !lane.is_empty() || !may_leave(&work, &self.memory) {
            lane.push_back(work);
            return true;
        }
        match offer(session, vi, limit, work) {
            Ok(()) => true,
            Err((work, later)) => {
                lane.push_back(work);
                if !later {
                    self.give_back();
                }
                later
            }
        }
    }

    fn is_waiting(&self) -> bool {
        self.memory.is_busy() || self.waiting.iter().any(|lane| !lane.is_empty())
    }

    /// Hands out writes and reads that are done; true if there were some. A write that is to be told of becomes a
    /// message, in its turn.
    fn settle(&mut self) -> bool {
        let mut any = false;
        while let Some(finished) = self.memory.poll_done() {
            any = true;
            let Finished { deed, errand, length, status, sequence } = finished;
            let Errand { token, immediate, parcel, .. } = errand;
            match immediate {
                Some(immediate) if status.is_ok() => {
                    let lane = &mut self.waiting[SENDS];
                    let at = lane.partition_point(|work| !matches!(work, Work::Send(send) if send.after > sequence));
                    let (control, parcel) = (Vec::new(), Parcel::Written(Box::new(parcel)));
                    let news = Dispatch { token, control, immediate, payload_token: None, after: sequence, parcel };
                    lane.insert(at, Work::Send(news));
                }
                _ => {
                    let done = Done { deed, length, ..done(token, status, parcel) };
                    self.line.complete(Side::Sent, done);
                }
            }
        }
        any
    }

    /// Everything that the session never saw comes back.
    fn give_back(&mut self) {
        self.memory.fail(self.fault);
        self.settle();
        let waiting = self.waiting.iter_mut().flat_map(|lane| lane.drain(..));
        for work in waiting.chain(self.posted.drain(..)) {
            let (side, deed, token, parcel) = match work {
                Work::Send(Dispatch { token, parcel, .. }) => (Side::Sent, Deed::Message, token, parcel),
                Work::Receive(Place { token, parcel, .. }) | Work::Expect(_, Place { token, parcel, .. }) => {
                    (Side::Received, Deed::Message, token, parcel)
                }
                Work::Write(Errand { token, parcel, .. }) => (Side::Sent, Deed::Write, token, parcel),
                Work::Read(Errand { token, parcel, .. }) => (Side::Sent, Deed::Read, token, parcel),
            };
            let done = done(token, Err(self.fault), parcel);
            let deed = if deed == Deed::Message { done.deed } else { deed };
            self.line.complete(side, Done { deed, ..done });
        }
    }
}

/// Whether remote memory was written and read as it should be before this message.
fn may_leave(work: &Work, memory: &Remote) -> bool {
    !matches!(work, Work::Send(dispatch) if !memory.is_past(dispatch.after))
}

/// Where work waits.
fn lane(work: &Work) -> usize {
    match work {
        Work::Send(_) | Work::Write(_) | Work::Read(_) => SENDS,
        Work::Receive(_) => 1,
        Work::Expect(..) => EXPECTED,
    }
}

/// Offers work to a session. What it does not take comes back, with whether it may later: there is room
/// when something else is complete.
fn offer(session: &mut Session<Load, Load>, vi: u32, limit: usize, work: Work) -> Result<(), (Work, bool)> {
    let refused = match work {
        Work::Send(dispatch) => session
            .post_send(vi, outgoing(dispatch, limit))
            .map_err(|(refusal, message)| (refusal, Work::Send(dispatch_of(message)))),
        Work::Receive(place) => {
            let posted = session.post_receive(vi, incoming(place, limit));
            posted.map_err(|(refusal, place)| (refusal, Work::Receive(unload(place))))
        }
        Work::Expect(payload_token, place) => {
            let posted = session.expect(vi, payload_token, incoming(place, limit));
            posted.map_err(|(refusal, place)| (refusal, Work::Expect(payload_token, unload(place))))
        }
        // A circuit keeps them.
        Work::Write(_) | Work::Read(_) => Ok(()),
    };
    refused.map_err(|(refusal, work)| {
        let later = matches!(refusal, highwire_proto::Refusal::Full { .. } | highwire_proto::Refusal::TokenInUse(_));
        (work, later)
    })
}

fn done(token: u64, status: Result<(), Fault>, parcel: Parcel) -> Done {
    // The news of a write stands for the write.
    let (deed, parcel) = match parcel {
        Parcel::Written(parcel) => (Deed::Write, *parcel),
        parcel => (Deed::Message, parcel),
    };
    Done { deed, token, status, length: 0, immediate: 0, control: Vec::new(), payload_token: None, parcel }
}

fn outgoing(dispatch: Dispatch, limit: usize) -> Outgoing<Load> {
    let Dispatch { token, control, immediate, payload_token, after: _, parcel } = dispatch;
    Outgoing { token, control, immediate, payload_token, payload: load(parcel, limit) }
}

fn dispatch_of(message: Outgoing<Load>) -> Dispatch {
    let Outgoing { token, control, immediate, payload_token, payload } = message;
    // Only what may leave is handed to a session.
    Dispatch { token, control, immediate, payload_token, after: 0, parcel: parcel_of(payload) }
}

fn incoming(place: Place, limit: usize) -> Incoming<Load> {
    Incoming { token: place.token, target: load(place.parcel, limit.min(place.limit)) }
}

fn load(parcel: Parcel, limit: usize) -> Option<Load> {
    match parcel {
        Parcel::Empty => None,
        parcel => Some(Load::new(parcel, limit)),
    }
}

fn parcel_of(load: Option<Load>) -> Parcel {
    load.map_or(Parcel::Empty, |load| load.parcel)
}

fn unload(place: Incoming<Load>) -> Place {
    let limit = place.target.as_ref().map_or(0, Load::limit);
    Place { token: place.token, parcel: parcel_of(place.target), limit }
}

fn assurance(reliable: bool) -> Assurance {
    if reliable { Assurance::Reliable } else { Assurance::Unreliable }
}

/// Makes `earliest` no later than `at`.
fn note_earlier(earliest: &mut Option<Duration>, at: Duration) {
    *earliest = Some(earliest.map_or(at, |known| known.min(at)));
}

/// What a VI is told of an ending; `closed` says who closed it.
fn fault(ending: Ending, closed: Fault) -> Fault {
    match ending {
        Ending::Closed => Fault::Closed,
        Ending::PeerClosed => Fault::PeerClosed,
        Ending::Silence(after) => Fault::Silence(after),
        Ending::KeysUsedUp => Fault::KeysUsedUp,
        Ending::NotSealed => Fault::NotSealed,
        Ending::KeyRemoved => Fault::KeyRemoved,
        Ending::Restored => Fault::Restored,
        // It had no line yet.
        Ending::PeerFull => Fault::PeerClosed,
        Ending::ViClosed => closed,
        Ending::TooLong { message, buffer } => Fault::TooLong { message: u64::from(message), place: buffer as u64 },
    }
}

/// How long a socket that is looked at rarely may be left alone.
const EVERYWHERE: Duration = Duration::from_micros(100);
/// Where messages wait.
const SENDS: usize = 0;
/// Where expected places wait.
const EXPECTED: usize = 2;
/// So many notes are under way or wait for the peer before those about remote memory wait here [W-83].
const NOTES_AHEAD: usize = 256;
/// A session that was heard so lately is used for another VI.
const FRESH: Duration = Duration::from_secs(1);
/// Callers that wait to be accepted, at most.
const CALLERS_MAX: usize = 1024;
/// How long a session that is over answers a peer who repeats its last word.
const LAST_WORDS: Duration = Duration::from_secs(1);
