//! One client's connection at the server.

use super::Inner;
use super::handler::{Received, Reply, Request};
use super::jobs::Job;
use super::sessions::Ticket;
use crate::head::{CallHead, HEAD_BYTES, Head, Leaving, OFFER_BYTES, ReplyHead, SESSION_BYTES, Status};
use crate::line::{Event, Line, Next, compose};
use crate::session::{Admission, Session};
use crate::{stall, tokens};
use highwire_vi::{Payload, PayloadToken, PeerId, Pool, ViId};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Debug)]
pub(super) struct Connection {
    pub id: ViId,
    pub peer: PeerId,
    link: Mutex<Link>,
}

/// What is under a connection's lock.
#[derive(Debug)]
pub(super) struct Link {
    pub line: Line,
    pub session: Option<(u128, Session)>,
    incarnation: u64,
    /// For payloads of calls.
    frames: Option<Pool>,
    /// Frames granted so far.
    granted: u32,
    /// Frames that are yet to be granted again.
    missing: u32,
    /// Calls whose payload is yet to come.
    offers: HashMap<u64, Offer>,
    /// Bytes of room that was made for them.
    offered_bytes: u64,
    reply: Reply,
    message: Vec<u8>,
}

/// A call whose payload is yet to come.
#[derive(Debug)]
struct Offer {
    call: CallHead,
    body: Vec<u8>,
    bytes: u64,
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    GoesOn,
    /// It is over; told why, if that is its client's fault.
    Ends(Option<Leaving>),
}

/// Payloads as long as there may be, that one client may have offered at once.
const OFFERS_AT_ONCE: u64 = 4;
/// Messages that may wait for a client's VI beyond those of its window.
const BACKLOG_BEYOND: usize = 64;
/// Events that are taken from one connection before others have their turn.
const EVENTS_PER_TURN: usize = 64;

impl Connection {
    pub(super) fn new(id: ViId, peer: PeerId, line: Line, frames: Option<Pool>) -> Connection {
        let link = Link {
            line,
            session: None,
            incarnation: 0,
            frames,
            granted: 0,
            missing: 0,
            offers: HashMap::new(),
            offered_bytes: 0,
            reply: Reply::default(),
            message: Vec::new(),
        };
        Connection { id, peer, link: Mutex::new(link) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what has come, for a while.
    pub(super) fn turn(self: &Arc<Connection>, inner: &Arc<Inner>) -> Turn {
        let mut link = self.lock();
        for _ in 0..EVENTS_PER_TURN {
            let turn = match link.line.next() {
                Next::Nothing => {
                    return if link.line.ended().is_some() { Turn::Ends(None) } else { Turn::GoesOn };
                }
                Next::Plain(buffer, length) => {
                    let turn = match Head::decode(&buffer[..length]) {
                        // Arguments in a payload that is not there.
                        Ok((Head::Call(call), _)) if call.body_in_payload && !call.is_offer => {
                            Turn::Ends(Some(Leaving::Malformed))
                        }
                        Ok((Head::Call(call), body)) => link.call(self, inner, call, body, Received::default()),
                        Ok((head, body)) => self.rare(inner, &mut link, head, body),
                        Err(_) => Turn::Ends(Some(Leaving::Malformed)),
                    };
                    link.line.give_back(buffer);
                    turn
                }
                Next::Event => match link.line.take_event() {
                    Some(Event::Bulk { control, token, payload, length }) => {
                        link.bulk(self, inner, &control, token, payload, length)
                    }
                    Some(Event::Refused { token: sequence, .. }) => {
                        link.say_unsendable(sequence);
                        Turn::GoesOn
                    }
                    // A payload of ours is back, or room that nobody used: both are dropped.
                    Some(Event::Sent { .. } | Event::Unused { .. }) | None => Turn::GoesOn,
                },
            };
            if turn != Turn::GoesOn {
                return turn;
            }
        }
        Turn::GoesOn
    }

    #[cold]
    fn rare(self: &Arc<Connection>, inner: &Arc<Inner>, link: &mut Link, head: Head, body: &[u8]) -> Turn {
        match head {
            Head::Hello { version, window, acknowledged, attempt, incarnation } if link.session.is_none() => {
                let session = u128::from_le_bytes(std::array::from_fn::<_, SESSION_BYTES, _>(|at| body[at]));
                let asked = super::sessions::Asked { version, window, acknowledged, attempt, incarnation };
                match inner.sessions.open(session, asked, self) {
                    Ok(opened) => {
                        link.session = Some((session, opened.session));
                        link.incarnation = opened.incarnation;
                        // An answer and word of room for each call that may be outstanding, and some of those given up.
                        link.line.limit_backlog(2 * window as usize + BACKLOG_BEYOND);
                        link.grant(inner.options.frames);
                        let welcome = Head::Welcome {
                            version: crate::head::RPC_VERSION,
                            known: opened.known,
                            window,
                            incarnation: opened.incarnation,
                            frames: link.granted,
                            frame_bytes: if link.frames.is_some() { inner.options.frame_bytes } else { 0 },
                            request_bytes_max: inner.options.request_bytes_max,
                        };
                        compose(&mut link.message, &welcome, &[]);
                        link.line.send(&link.message);
                        Turn::GoesOn
                    }
                    Err(why) => Turn::Ends(Some(why)),
                }
            }
            Head::Leaving(Leaving::Shutdown) => {
                if let Some((id, _)) = link.session.take() {
                    inner.sessions.forget(id, self);
                }
                Turn::Ends(None)
            }
            Head::Cancel { sequence } => {
                if let Some((_, session)) = &mut link.session {
                    session.cancel(sequence);
                }
                if let Some(offer) = link.offers.remove(&sequence) {
                    link.offered_bytes -= offer.bytes;
                    drop(link.line.revoke(tokens::offer(sequence)));
                }
                Turn::GoesOn
            }
            _ => Turn::Ends(Some(Leaving::Malformed)),
        }
    }
}

impl Link {
    /// Grants frames, as far as there are free ones.
    fn grant(&mut self, more: u32) {
        self.missing += more;
        let Some(frames) = &self.frames else { return };
        while self.missing > 0
            && let Ok(frame) = frames.frame()
        {
            let token = tokens::frame(self.granted);
            if self.line.expect(token, Payload::Buffer(frame)).is_err() {
                return;
            }
            self.granted = self.granted.wrapping_add(1);
            self.missing -= 1;
        }
    }

    /// A message with a payload.
    #[inline(never)]
    fn bulk(
        &mut self,
        connection: &Arc<Connection>,
        inner: &Arc<Inner>,
        control: &[u8],
        token: PayloadToken,
        payload: Payload,
        length: usize,
    ) -> Turn {
        let malformed = Turn::Ends(Some(Leaving::Malformed));
        let in_frame = tokens::frame_of(token).is_some();
        if in_frame {
            self.grant(1);
        }
        match Head::decode(control) {
            Ok((Head::Call(call), body)) if !call.is_offer && in_frame => {
                self.with_payload(connection, inner, call, body, payload, length)
            }
            Ok((Head::Offered { sequence }, _)) if tokens::offer_of(token) == Some(sequence) => {
                match self.offers.remove(&sequence) {
                    Some(Offer { call, body, bytes }) => {
                        self.offered_bytes -= bytes;
                        self.with_payload(connection, inner, call, &body, payload, length)
                    }
                    None => Turn::GoesOn,
                }
            }
            _ => malformed,
        }
    }

    fn with_payload(
        &mut self,
        connection: &Arc<Connection>,
        inner: &Arc<Inner>,
        call: CallHead,
        body: &[u8],
        payload: Payload,
        length: usize,
    ) -> Turn {
        let call = CallHead { is_offer: false, ..call };
        if !call.body_in_payload {
            return self.call(connection, inner, call, body, Received { payload, start: 0, end: length });
        }
        let start = usize::from(call.body);
        let received = Received { payload, start, end: length };
        // The payload is at once what is called with and where the arguments are.
        let Some(arguments) = received.bytes().get(..start).map(<[u8]>::to_vec) else {
            return Turn::Ends(Some(Leaving::Malformed));
        };
        self.call(connection, inner, call, &arguments, received)
    }

    /// A call, with all that belongs to it.
    #[inline]
    fn call(
        &mut self,
        connection: &Arc<Connection>,
        inner: &Arc<Inner>,
        call: CallHead,
        arguments: &[u8],
        received: Received,
    ) -> Turn {
        let found = inner.find(&call);
        let Some((id, session)) = &mut self.session else { return Turn::Ends(Some(Leaving::Malformed)) };
        let may_repeat = found.as_ref().is_ok_and(|(_, manner)| manner.may_repeat);
        let sequence = call.sequence;
        // One that ran before its connection ended is answered without its payload: that there is no memory for it now
        // would say that it did not run.
        if call.is_offer && !session.was_begun(sequence, may_repeat) {
            return self.offer(inner, call, arguments);
        }
        let ticket = Ticket { session: *id, incarnation: self.incarnation, sequence, room: call.reply_room };
        match session.admit(sequence, call.unanswered, may_repeat) {
            Ok(Admission::Begin) => {}
            Ok(Admission::Running | Admission::Stale) => return Turn::GoesOn,
            Ok(Admission::Answered(answer)) => {
                self.message.clear();
                self.message.extend_from_slice(answer);
                // What was granted on the connection that it was first sent by means nothing here.
                self.message[16..20].copy_from_slice(&self.granted.to_le_bytes());
                self.line.send(&self.message);
                return Turn::GoesOn;
            }
            Ok(Admission::Forgotten) => {
                self.reply.clear();
                self.reply.fail(Status::Forgotten);
                self.answer(sequence, 0, true);
                return Turn::GoesOn;
            }
            Err(_) => return Turn::Ends(Some(Leaving::Malformed)),
        }
        self.reply.clear();
        match found {
            Err(status) => self.reply.fail(status),
            Ok(_) if inner.is_leaving() => self.reply.fail(Status::Leaving),
            Ok((service, manner)) if manner.is_quick => {
                let request = Request {
                    method: call.method,
                    arguments,
                    payload: received,
                    peer: connection.peer,
                    ticket,
                    server: inner,
                };
                let reply = &mut self.reply;
                let ran = catch_unwind(AssertUnwindSafe(|| stall::inside(|| service.serve(request, reply))));
                if ran.is_err() {
                    self.reply.fail(Status::Panicked);
                }
                if self.reply.is_deferred {
                    return Turn::GoesOn;
                }
            }
            Ok((service, _)) => {
                let deadline = (call.deadline_ms > 0)
                    .then(|| Instant::now() + std::time::Duration::from_millis(call.deadline_ms.into()));
                let job = Job {
                    ticket,
                    method: call.method,
                    deadline,
                    service: service.clone(),
                    arguments: arguments.to_vec(),
                    received,
                    peer: connection.peer,
                };
                if inner.jobs.push(job) {
                    return Turn::GoesOn;
                }
                self.reply.fail(Status::Busy);
            }
        }
        self.answer(sequence, call.reply_room, false);
        Turn::GoesOn
    }

    /// A call whose payload comes when there is room for it. It is begun then, not before: should the connection be lost
    /// on the way, it comes again.
    #[cold]
    fn offer(&mut self, inner: &Arc<Inner>, call: CallHead, body: &[u8]) -> Turn {
        let Some((body, length)) = body.split_last_chunk::<OFFER_BYTES>() else {
            return Turn::Ends(Some(Leaving::Malformed));
        };
        let (bytes, sequence) = (u32::from_le_bytes(*length), call.sequence);
        // Nobody has more calls outstanding than its window.
        if self.session.as_ref().is_none_or(|(_, session)| self.offers.len() >= session.window() as usize) {
            return Turn::Ends(Some(Leaving::Malformed));
        }
        let most = inner.options.request_bytes_max;
        // One that repeats itself, or more than anybody has at once.
        let is_too_much = self.offers.contains_key(&sequence)
            || self.offered_bytes + u64::from(bytes) > OFFERS_AT_ONCE * u64::from(most);
        let room = (bytes <= most && bytes > 0)
            .then(|| inner.nic.register(bytes as usize).and_then(|region| region.slice(0..bytes as usize)).ok());
        let status = match room {
            Some(_) if is_too_much => Status::Busy,
            Some(Some(buffer)) => match self.line.expect(tokens::offer(sequence), Payload::Buffer(buffer)) {
                Ok(()) => {
                    self.offered_bytes += u64::from(bytes);
                    self.offers.insert(sequence, Offer { call, body: body.to_vec(), bytes: bytes.into() });
                    compose(&mut self.message, &Head::Room { sequence }, &[]);
                    self.line.send(&self.message);
                    return Turn::GoesOn;
                }
                Err(_) => Status::Busy,
            },
            Some(None) => Status::Busy,
            None => Status::RequestTooLarge(bytes.into()),
        };
        self.reply.clear();
        self.reply.fail(status);
        // It was not begun, so that there is no answer to be kept.
        self.answer(sequence, 0, true);
        Turn::GoesOn
    }

    /// Sends the reply that was made. `beside_session` for one of which the session knows nothing.
    #[inline]
    pub(super) fn answer(&mut self, sequence: u64, room: u32, beside_session: bool) {
        self.reply.check(room);
        let Reply { message, body, payload, status, .. } = &mut self.reply;
        let head = ReplyHead { sequence, status: *status, body: *body as u16, frames: self.granted };
        message[..HEAD_BYTES].copy_from_slice(&Head::Reply(head).encode());
        let message = &message[..HEAD_BYTES + *body];
        let payload = std::mem::take(payload);
        let is_bulk = !matches!(payload, Payload::None);
        let wanted = match &mut self.session {
            _ if beside_session => true,
            Some((_, session)) => session.finish(sequence, (!is_bulk).then_some(message)),
            None => false,
        };
        if !wanted {
            return;
        }
        if is_bulk {
            if self.line.send_with(sequence, message, payload, PayloadToken(sequence)).is_err() {
                self.say_unsendable(sequence);
            }
        } else {
            self.line.send(message);
        }
        if self.missing > 0 {
            self.grant(0);
        }
    }

    /// A handler made an answer that no line carries, of memory with another tag or of too many pieces: that is its
    /// fault, as a panic is.
    #[cold]
    fn say_unsendable(&mut self, sequence: u64) {
        let head = ReplyHead { sequence, status: Status::Panicked, body: 0, frames: self.granted };
        compose(&mut self.message, &Head::Reply(head), &[]);
        self.line.send(&self.message);
    }

    /// Sends a reply that was made elsewhere.
    pub(super) fn answer_with(&mut self, sequence: u64, room: u32, reply: &mut Reply) {
        std::mem::swap(&mut self.reply, reply);
        self.answer(sequence, room, false);
        std::mem::swap(&mut self.reply, reply);
    }

    /// Tells the client why this is over.
    pub(super) fn leave(&mut self, why: Leaving) {
        compose(&mut self.message, &Head::Leaving(why), &[]);
        self.line.send(&self.message);
    }
}
