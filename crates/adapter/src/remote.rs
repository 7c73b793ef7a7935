//! Remote memory of one VI: what this side wants of the peer's, and what the peer may do to ours.
//!
//! Requests and verdicts are notes; payloads go under payload tokens, on a VI beside the one that they
//! belong to, which both sides open when they need it first [W-81]. A write or a read of ours:
//!
//! ```text
//!            room, and nothing before it           Go                        all of it has arrived
//!            touches the same bytes
//!   Waiting ──────────┬──────────────▶ Asked ──────────────▶ Sending ──────────────────────────▶ Landing
//!                     │ (a write)        │                      │ Denied: noted                     │ Written,
//!                     │                  │ Denied               │                                   │ or Denied
//!                     │ (a read)         ▼                      ▼ the payload is back               ▼
//!                     └──▶ Reading ───▶ Done ◀──────────────────┴───────────────────────────────────┘
//!                               it has landed, or Denied
//! ```
//!
//! They are done in the order in which they were posted.

use crate::load::Load;
use crate::note::{Note, Request, RequestKind, Verdict};
use highwire_mem::Granted;
use highwire_mem::work::{Deed, Denial, Errand, Fault, Parcel};
use highwire_proto::{Assurance, Incoming, Outgoing, Session};
use std::collections::{BTreeMap, VecDeque};

/// The number of the VI for payloads beside VI `vi` [W-81].
pub(crate) const PAYLOADS: u32 = 1 << 31;

/// Both numbers of a VI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub local: u32,
    pub remote: u32,
}

impl Ends {
    fn payloads(self) -> u32 {
        self.local | PAYLOADS
    }
}

/// Remote memory, as one VI has to do with it.
#[derive(Debug, Default)]
pub(crate) struct Remote {
    /// The VI for payloads is open.
    is_open: bool,
    /// Tokens under which payloads are expected here, of the peer's writes and of our reads.
    next_token: u64,
    // What this side wants, in order. The first `begun` are under way or done.
    errands: VecDeque<Ongoing>,
    begun: usize,
    next_id: u32,
    done: u64,
    /// It is over, for this reason.
    over: Option<Fault>,
    // What the peer wants.
    grants: BTreeMap<u32, Granted>,
    /// Its writes whose payload is expected, by token.
    landings: BTreeMap<u64, Landing>,
    /// Its reads whose payload is on the way.
    answers: usize,
    /// Notes that are to be told, in order.
    pub outbox: VecDeque<Note>,
}

#[derive(Debug)]
struct Ongoing {
    id: u32,
    deed: Deed,
    errand: Errand,
    length: u64,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    /// A write was asked for.
    Asked,
    /// A read was asked for, and its place is with the session.
    Reading {
        token: u64,
    },
    /// The payload of a write is with the session. What the owner said of it, if it has.
    Sending {
        verdict: Option<Result<(), Denial>>,
    },
    /// All of the payload has arrived, and the owner is to say that it is in its place.
    Landing,
    Done(Result<(), Fault>),
}

/// A write of the peer's that was let in.
#[derive(Clone, Copy, Debug)]
struct Landing {
    id: u32,
    handle: u32,
    length: u64,
}

/// A write or a read of this side that is done.
#[derive(Debug)]
pub(crate) struct Finished {
    pub deed: Deed,
    pub errand: Errand,
    pub length: usize,
    pub status: Result<(), Fault>,
    /// How many were done before.
    pub sequence: u64,
}

impl Ongoing {
    fn end(&self) -> u64 {
        self.errand.offset.saturating_add(self.length)
    }

    /// Whether the outcome depends on which of the two comes first.
    fn conflicts(&self, other: &Ongoing) -> bool {
        (self.deed == Deed::Write || other.deed == Deed::Write)
            && self.errand.handle == other.errand.handle
            && self.errand.offset < other.end()
            && other.errand.offset < self.end()
    }
}

impl Remote {
    /// True if something that this side wants is not done.
    pub(crate) fn is_busy(&self) -> bool {
        !self.errands.is_empty()
    }

    /// True if a message may leave that was posted after so many writes and reads.
    pub(crate) fn is_past(&self, errands: u64) -> bool {
        self.done >= errands
    }

    // ── What this side wants ─────────────────────────────────────────────────────────────────────

    /// Takes a write or a read; [`Remote::advance`] begins it.
    pub(crate) fn post(&mut self, deed: Deed, errand: Errand) {
        let length = errand.parcel.len() as u64;
        self.next_id = self.next_id.wrapping_add(1);
        let stage = self.over.map_or(Stage::Waiting, |fault| Stage::Done(Err(fault)));
        self.errands.push_back(Ongoing { id: self.next_id, deed, errand, length, stage });
    }

    /// Asks for what may be asked for now.
    pub(crate) fn advance(&mut self, session: &mut Session<Load, Load>, ends: Ends) {
        while self.over.is_none() && self.begun < self.errands.len().min(REQUESTS_MAX) {
            let (before, next) = (self.errands.range(..self.begun), &self.errands[self.begun]);
            let under_way = |other: &&Ongoing| !matches!(other.stage, Stage::Done(_));
            if before.filter(under_way).any(|other| next.conflicts(other)) {
                return;
            }
            self.begun += 1;
            let is_open = self.open(session, ends);
            let token = self.next_token;
            let Some(next) = self.errands.get_mut(self.begun - 1) else { return };
            let kind = match next.deed {
                _ if !is_open => None,
                Deed::Read => {
                    let target = Load::new(std::mem::take(&mut next.errand.parcel), 0);
                    match session.expect(ends.payloads(), token, Incoming { token, target: Some(target) }) {
                        Ok(()) => {
                            self.next_token += 1;
                            next.stage = Stage::Reading { token };
                            Some(RequestKind::Read { token })
                        }
                        Err((_, place)) => {
                            next.errand.parcel = place.target.map_or(Parcel::Empty, |load| load.parcel);
                            None
                        }
                    }
                }
                Deed::Write | Deed::Message => {
                    next.stage = Stage::Asked;
                    Some(RequestKind::Write)
                }
            };
            let Some(kind) = kind else {
                next.stage = Stage::Done(Err(Fault::Denied(Denial::Busy)));
                continue;
            };
            let Errand { handle, tag, offset, .. } = next.errand;
            let request = Request { kind, id: next.id, handle, tag: tag.0, offset, length: next.length };
            self.outbox.push_back(Note::Request { to: ends.remote, request });
        }
    }

    /// The owner takes a write.
    pub(crate) fn take_go(&mut self, session: &mut Session<Load, Load>, ends: Ends, id: u32, token: u64) {
        let Some(write) = self.under_way(id).filter(|write| write.stage == Stage::Asked) else { return };
        let payload = match std::mem::take(&mut write.errand.parcel) {
            Parcel::Empty => None,
            parcel => Some(Load::new(parcel, 0)),
        };
        let message =
            Outgoing { token: u64::from(id), control: Vec::new(), immediate: 0, payload_token: Some(token), payload };
        write.stage = match session.post_send(ends.payloads(), message) {
            Ok(()) => Stage::Sending { verdict: None },
            Err((_, message)) => {
                // Not for want of room, of which there is enough for all requests; the session is over, perhaps.
                write.errand.parcel = message.payload.map_or(Parcel::Empty, |load| load.parcel);
                Stage::Done(Err(Fault::Denied(Denial::Busy)))
            }
        };
    }

    /// The owner has a write in its place.
    pub(crate) fn take_written(&mut self, id: u32) {
        self.take_verdict(id, Ok(()));
    }

    /// The owner does not take a write, or does not answer a read.
    pub(crate) fn take_denied(&mut self, session: &mut Session<Load, Load>, ends: Ends, id: u32, verdict: Verdict) {
        let Some(ongoing) = self.under_way(id) else { return };
        let denied = Err(verdict.denial(ongoing.end()));
        let Stage::Reading { token } = ongoing.stage else { return self.take_verdict(id, denied) };
        // If the payload has come all the same, that is told next.
        if let Some(place) = session.revoke(ends.payloads(), token) {
            ongoing.errand.parcel = place.target.map_or(Parcel::Empty, |load| load.parcel);
            ongoing.stage = Stage::Done(denied.map_err(Fault::Denied));
        }
    }

    fn take_verdict(&mut self, id: u32, verdict: Result<(), Denial>) {
        let Some(write) = self.under_way(id) else { return };
        match write.stage {
            Stage::Asked if verdict.is_err() => write.stage = Stage::Done(verdict.map_err(Fault::Denied)),
            // The buffer is still with the session.
            Stage::Sending { verdict: None } => write.stage = Stage::Sending { verdict: Some(verdict) },
            Stage::Landing => write.stage = Stage::Done(verdict.map_err(Fault::Denied)),
            // Only one who lies says that.
            _ => {}
        }
    }

    fn under_way(&mut self, id: u32) -> Option<&mut Ongoing> {
        let begun = self.begun;
        self.errands.range_mut(..begun).find(|ongoing| ongoing.id == id)
    }

    /// A payload has arrived, or come back: of a write of ours, or for a read of the peer's.
    pub(crate) fn note_sent(&mut self, token: u64, payload: Option<Load>, status: Result<(), Fault>) {
        if token == ANSWER {
            self.answers -= 1;
            return;
        }
        let Some(write) = self.under_way(token as u32) else { return };
        let Stage::Sending { verdict } = write.stage else { return };
        write.errand.parcel = payload.map_or(Parcel::Empty, |load| load.parcel);
        write.stage = match (status, verdict) {
            (Err(fault), _) => Stage::Done(Err(fault)),
            (Ok(()), Some(verdict)) => Stage::Done(verdict.map_err(Fault::Denied)),
            (Ok(()), None) => Stage::Landing,
        };
    }

    /// A payload has landed, or its place came back: of a write of the peer's, or of a read of ours.
    pub(crate) fn note_received(
        &mut self,
        ends: Ends,
        token: u64,
        target: Option<Load>,
        length: usize,
        status: Result<(), Fault>,
    ) {
        if let Some(landing) = self.landings.remove(&token) {
            return match status {
                Ok(()) if length as u64 == landing.length => {
                    self.tell(Note::Written { to: ends.remote, id: landing.id });
                }
                Ok(()) | Err(Fault::TooLong { .. }) => {
                    let verdict = Verdict::Mismatch;
                    self.tell(Note::Denied { to: ends.remote, id: landing.id, verdict });
                }
                // The VI is closed, which says it all.
                Err(_) => {}
            };
        }
        let Some(read) = self.errands.iter_mut().find(|read| read.stage == Stage::Reading { token }) else { return };
        read.errand.parcel = target.map_or(Parcel::Empty, |load| load.parcel);
        read.stage = Stage::Done(match status {
            Ok(()) if length as u64 == read.length => Ok(()),
            Ok(()) | Err(Fault::TooLong { .. }) => Err(Fault::Denied(Denial::Mismatch)),
            Err(fault) => Err(fault),
        });
    }

    /// The next write or read that is done, in order.
    pub(crate) fn poll_done(&mut self) -> Option<Finished> {
        let Stage::Done(status) = self.errands.front()?.stage else { return None };
        let Ongoing { deed, errand, length, .. } = self.errands.pop_front()?;
        let sequence = self.done;
        self.done += 1;
        self.begun = self.begun.saturating_sub(1);
        let length = if status.is_ok() { length as usize } else { 0 };
        Some(Finished { deed, errand, length, status, sequence })
    }

    /// It is over for this reason: everything is done whose buffers are here. The others come back from the
    /// session.
    pub(crate) fn fail(&mut self, fault: Fault) {
        for ongoing in &mut self.errands {
            if matches!(ongoing.stage, Stage::Waiting | Stage::Asked | Stage::Landing) {
                ongoing.stage = Stage::Done(Err(fault));
            }
        }
        (self.over, self.is_open) = (Some(fault), false);
        self.outbox.clear();
        self.grants.clear();
    }

    // ── What the peer wants ──────────────────────────────────────────────────────────────────────

    /// Lets the peer at this memory; `Err` tells the limit.
    pub(crate) fn grant(&mut self, memory: Granted) -> Result<(), usize> {
        if self.over.is_some() {
            // It ends with its VI, which has ended.
            return Ok(());
        }
        if self.grants.len() >= GRANTS_MAX && !self.grants.contains_key(&memory.handle()) {
            return Err(GRANTS_MAX);
        }
        // One that is there already is the same, and may be in use.
        self.grants.entry(memory.handle()).or_insert(memory);
        Ok(())
    }

    /// Takes a grant back; false if there is none. Nothing lands in the memory afterwards.
    pub(crate) fn withdraw(&mut self, session: Option<&mut Session<Load, Load>>, ends: Ends, handle: u32) -> bool {
        if self.grants.remove(&handle).is_none() {
            return false;
        }
        let Some(session) = session else { return true };
        let of_it = self.landings.iter().filter(|(_, landing)| landing.handle == handle);
        let of_it: Vec<(u64, u32)> = of_it.map(|(token, landing)| (*token, landing.id)).collect();
        for (token, id) in of_it {
            // One that has landed in full is told of next, as it is.
            if session.revoke(ends.payloads(), token).is_some() {
                self.landings.remove(&token);
                self.tell(Note::Denied { to: ends.remote, id, verdict: Verdict::Withdrawn });
            }
        }
        true
    }

    /// The peer wants to write or to read; messages have at most `limit` bytes.
    pub(crate) fn serve(&mut self, session: &mut Session<Load, Load>, ends: Ends, limit: usize, request: Request) {
        let (to, id) = (ends.remote, request.id);
        match self.admit(session, ends, limit, request) {
            Ok(Some(token)) => self.tell(Note::Go { to, id, token }),
            Ok(None) => {}
            Err(verdict) => self.tell(Note::Denied { to, id, verdict }),
        }
    }

    /// Expects what is written, under the token that is told; or answers what is read.
    fn admit(
        &mut self,
        session: &mut Session<Load, Load>,
        ends: Ends,
        limit: usize,
        request: Request,
    ) -> Result<Option<u64>, Verdict> {
        let Request { kind, id, handle, tag, offset, length } = request;
        if self.landings.len() + self.answers >= SERVED_MAX {
            return Err(Verdict::Busy);
        }
        let granted = self.grants.get(&handle).ok_or(Verdict::NotGranted)?;
        if granted.tag().0 != tag {
            return Err(Verdict::WrongTag);
        }
        let out_of_range = Verdict::OutOfRange { bytes: granted.len() as u64 };
        let window = granted.window(offset, length).ok_or(out_of_range)?;
        if kind == RequestKind::Write && !granted.is_writable() {
            return Err(Verdict::ReadOnly);
        }
        if window.len() > limit {
            return Err(Verdict::Mismatch);
        }
        if !self.open(session, ends) {
            return Err(Verdict::Busy);
        }
        let load = Load::new(Parcel::Window(Box::new(window)), 0);
        match kind {
            RequestKind::Write => {
                let token = self.next_token;
                let place = Incoming { token, target: Some(load) };
                session.expect(ends.payloads(), token, place).map_err(|_| Verdict::Busy)?;
                self.next_token += 1;
                self.landings.insert(token, Landing { id, handle, length });
                Ok(Some(token))
            }
            RequestKind::Read { token } => {
                let (payload_token, payload) = (Some(token), Some(load));
                let answer = Outgoing { token: ANSWER, control: Vec::new(), immediate: 0, payload_token, payload };
                session.post_send(ends.payloads(), answer).map_err(|_| Verdict::Busy)?;
                self.answers += 1;
                Ok(None)
            }
        }
    }

    /// Opens the VI for payloads, if it is not; false if there is no room for it.
    fn open(&mut self, session: &mut Session<Load, Load>, ends: Ends) -> bool {
        if !self.is_open && self.over.is_none() {
            let (local, remote) = (ends.payloads(), ends.remote | PAYLOADS);
            self.is_open = session.open_vi(local, remote, Assurance::Reliable, Assurance::Reliable).is_ok();
        }
        self.is_open
    }

    /// A peer that asks and does not take the answers loses them.
    fn tell(&mut self, note: Note) {
        if self.outbox.len() < OUTBOX_MAX {
            self.outbox.push_back(note);
        }
    }
}

/// Writes and reads of one VI that are under way, at most; others wait here [W-82].
pub(crate) const REQUESTS_MAX: usize = 32;
/// Those of the peer that are served at once. More than it may have under way: of its reads it knows before we
/// do that they have arrived.
const SERVED_MAX: usize = 4 * REQUESTS_MAX;
/// Notes that wait to be told, at most. Who keeps to its limit has twice as many to be answered as it may have
/// under way, and so have we.
const OUTBOX_MAX: usize = 4 * REQUESTS_MAX;
/// Regions granted on one VI.
const GRANTS_MAX: usize = 1024;
/// The mark of a payload that answers a read; those of writes are their numbers.
const ANSWER: u64 = u64::MAX;

#[cfg(test)]
mod tests;
