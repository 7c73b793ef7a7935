//! What a client keeps under its lock: its line, its calls, and for each of them who waits and what it holds.

use super::{Answer, Continuation, Method};
use crate::body::Body;
use crate::calls::{Calls, Fate};
use crate::error::{CallError, Failed, Lost};
use crate::head::{CallHead, HEAD_BYTES, Head, Leaving, ReplyHead, Status};
use crate::line::{BODY_BYTES_BESIDE_MAX, BODY_BYTES_MAX, Event, Line, Next, Unsendable, compose};
use crate::tokens;
use highwire_vi::{Failure, Nic, Payload, PayloadToken, Pool, Segment, Watch};
use std::task::Waker;
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Core {
    pub calls: Calls,
    places: Vec<Place>,
    pub line: Option<Line>,
    pub state: State,
    /// What the server has granted for payloads of calls.
    credit: Credit,
    /// A message that is being put together.
    message: Vec<u8>,
    /// What is to be done as soon as the lock is free.
    pub afterwards: Afterwards,
    /// Those who wait for a place, and until when.
    room_wanted: Vec<(Waker, Option<Instant>)>,
    /// Threads that wait for a place or for a call of theirs, and whoever takes what has come without waiting: with
    /// more than one there is somebody to be told.
    pub threads: u32,
    /// Calls that wait for their answer without a thread.
    pub engaged: u32,
    arguments: Option<Pool>,
}

#[derive(Debug, PartialEq)]
pub(super) enum State {
    Up,
    /// Without a connection, since then and for this reason; somebody may be making a new one.
    Down {
        failure: Failure,
        reconnecting: bool,
    },
    /// For good.
    Over(Lost),
}

#[derive(Debug, Default)]
struct Credit {
    granted: u32,
    used: u32,
    frame_bytes: u32,
    request_bytes_max: u32,
}

/// What whoever had the lock does when it is free again.
#[derive(Debug, Default)]
pub(super) struct Afterwards {
    pub wakers: Vec<Waker>,
    pub continuations: Vec<(Continuation, Result<Answer, Failed>)>,
    /// A thread may be asleep whose call is answered, or that can have a place now.
    pub threads: bool,
    /// Of a line that was given up: threads may be asleep there, though nothing ended it but us.
    pub left: Option<Watch>,
    /// The connection is lost, and calls wait.
    pub reconnect: bool,
}

impl Afterwards {
    #[inline]
    pub(super) fn is_nothing(&self) -> bool {
        self.wakers.is_empty()
            && self.continuations.is_empty()
            && !self.threads
            && !self.reconnect
            && self.left.is_none()
    }
}

/// A call that is outstanding, or answered and not yet fetched.
#[derive(Debug, Default)]
struct Place {
    sequence: u64,
    method: Method,
    body: Vec<u8>,
    /// Of arguments, which may be the first piece of the payload.
    argument_bytes: u16,
    body_in_payload: bool,
    /// It was sent by an earlier connection, and may have run.
    is_sent_again: bool,
    sent: Lent,
    room: Lent,
    /// Bytes of room, and bytes that have landed there.
    room_bytes: u64,
    landed: usize,
    outcome: Option<Result<Body, CallError>>,
    waiter: Waiter,
    deadline: Option<Deadline>,
}

/// When a call is given up, and how long it was given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    pub at: Instant,
    pub given: Duration,
}

/// Buffers of a call.
#[derive(Debug, Default)]
enum Lent {
    #[default]
    None,
    /// With the call.
    Here(Payload),
    /// In the VI's hands, from where they come back.
    Away,
    /// Offered to the server, which says when there is room.
    Offered(Payload),
}

impl Lent {
    fn of(payload: Payload) -> Lent {
        if matches!(payload, Payload::None) { Lent::None } else { Lent::Here(payload) }
    }

    fn take(&mut self) -> Payload {
        match std::mem::take(self) {
            Lent::Here(payload) | Lent::Offered(payload) => payload,
            Lent::None | Lent::Away => Payload::None,
        }
    }
}

/// Who waits for a call.
#[derive(Debug, Default)]
enum Waiter {
    /// A thread, or nobody yet.
    #[default]
    Thread,
    Task(Waker),
    Continuation(Continuation),
}

/// A call as it is handed in.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub method: Method,
    pub arguments: &'a [u8],
    pub payload: Payload,
    pub room: Payload,
    pub deadline: Option<Deadline>,
}

impl Core {
    pub(super) fn new(window: u32) -> Core {
        Core {
            calls: Calls::new(window),
            places: std::iter::repeat_with(Place::default).take(window as usize).collect(),
            line: None,
            state: State::Down { failure: Failure::Closed, reconnecting: false },
            credit: Credit::default(),
            message: Vec::new(),
            afterwards: Afterwards::default(),
            room_wanted: Vec::new(),
            threads: 0,
            engaged: 0,
            arguments: None,
        }
    }

    pub(super) fn window(&self) -> u32 {
        self.places.len() as u32
    }

    #[inline]
    fn at(&self, sequence: u64) -> usize {
        (sequence & (self.places.len() as u64 - 1)) as usize
    }

    #[inline]
    fn place(&mut self, sequence: u64) -> Option<&mut Place> {
        let at = self.at(sequence);
        Some(&mut self.places[at]).filter(|place| place.sequence == sequence)
    }

    /// True if the next call has a place. One that is answered holds its own until somebody fetches the answer.
    #[inline]
    pub(super) fn has_room(&self) -> bool {
        self.calls.has_room() && self.places[self.at(self.calls.next_sequence())].sequence == 0
    }

    pub(super) fn want_room(&mut self, waker: &Waker, until: Option<Instant>) {
        match self.room_wanted.iter_mut().find(|(known, _)| known.will_wake(waker)) {
            Some((_, known)) => *known = [*known, until].into_iter().flatten().min(),
            None => self.room_wanted.push((waker.clone(), until)),
        }
    }

    /// Whether somebody waits whom no thread brings what it waits for.
    pub(super) fn is_engaged(&self) -> bool {
        self.engaged > 0 || self.room_wanted.iter().any(|(_, until)| until.is_some())
    }

    /// Takes a call in and sends it if there is a connection. There must be room. Fails, with the buffers, if it cannot
    /// be sent as it is.
    #[inline]
    pub(super) fn submit(&mut self, nic: &Nic, request: Request<'_>) -> Result<u64, Failed> {
        let Request { method, arguments, payload, room, deadline } = request;
        let has_payload = !matches!(payload, Payload::None);
        let beside = if has_payload { BODY_BYTES_BESIDE_MAX } else { BODY_BYTES_MAX };
        let (payload, body_in_payload) = match arguments.len() > beside {
            false => (payload, false),
            true => match self.arguments_first(nic, arguments, payload) {
                Ok(payload) => (payload, true),
                Err((error, sent)) => return Err(Failed { error, sent, room }),
            },
        };
        let (room_bytes, payload_bytes) = (room.total(), payload.total());
        let most = u64::from(u32::MAX);
        let begun = if payload_bytes > most {
            Err(CallError::RequestTooLarge { bytes: payload_bytes, most })
        } else if room_bytes > most {
            Err(CallError::RoomTooLarge { bytes: room_bytes, most })
        } else if !self.has_room() {
            Err(CallError::WindowFull { outstanding: self.calls.outstanding() })
        } else {
            self.calls.begin().ok_or(CallError::WindowFull { outstanding: self.calls.outstanding() })
        };
        let sequence = match begun {
            Ok(sequence) => sequence,
            Err(error) => {
                let sent = if body_in_payload { without_arguments(payload) } else { payload };
                return Err(Failed { error, sent, room });
            }
        };
        let at = self.at(sequence);
        let place = &mut self.places[at];
        place.sequence = sequence;
        place.method = method;
        place.body.clear();
        place.body.extend_from_slice(if body_in_payload { &[] } else { arguments });
        place.argument_bytes = arguments.len() as u16;
        place.body_in_payload = body_in_payload;
        place.is_sent_again = false;
        place.sent = Lent::of(payload);
        place.room = Lent::of(room);
        place.room_bytes = room_bytes;
        place.deadline = deadline;
        match self.state {
            State::Up => self.transmit(sequence),
            State::Down { ref mut reconnecting, .. } => {
                self.afterwards.reconnect |= !std::mem::replace(reconnecting, true);
            }
            State::Over(ref lost) => {
                let error = CallError::NotSent(Box::new(lost.clone()));
                self.calls.end(sequence);
                self.settle(sequence, Err(error));
            }
        }
        Ok(sequence)
    }

    /// Arguments that are too long to go beside the payload go before it.
    #[cold]
    fn arguments_first(
        &mut self,
        nic: &Nic,
        arguments: &[u8],
        payload: Payload,
    ) -> Result<Payload, (CallError, Payload)> {
        if arguments.len() > ARGUMENT_BYTES_MAX {
            let error = CallError::ArgumentsTooLong { bytes: arguments.len(), most: ARGUMENT_BYTES_MAX };
            return Err((error, payload));
        }
        if self.arguments.is_none() {
            self.arguments = nic.pool(ARGUMENT_BYTES_MAX, ARGUMENT_FRAMES).ok();
        }
        let pooled = self.arguments.as_ref().and_then(|pool| pool.frame().ok());
        let buffer = match pooled {
            Some(buffer) => Ok(buffer),
            None => nic.register(arguments.len()).and_then(|region| region.slice(0..arguments.len())),
        };
        let Ok(mut buffer) = buffer else {
            return Err((CallError::NoMemory { bytes: arguments.len() }, payload));
        };
        buffer.set_len(arguments.len());
        buffer.copy_from_slice(arguments);
        let first = Payload::None.and(Segment::Buffer(buffer));
        Ok(payload.into_segments().into_iter().fold(first, Payload::and))
    }

    /// Sends a call, for the first time or after the connection was made anew.
    fn transmit(&mut self, sequence: u64) {
        let is_sent_again = self.calls.is_sent(sequence);
        let unanswered = self.calls.send(sequence);
        let at = self.at(sequence);
        self.places[at].is_sent_again |= is_sent_again;
        let (Some(line), place) = (&mut self.line, &mut self.places[at]) else { return };
        let mut reply_room = 0;
        match std::mem::take(&mut place.room) {
            Lent::Here(room) => match line.expect(PayloadToken(sequence), room) {
                Ok(()) => {
                    place.room = Lent::Away;
                    reply_room = place.room_bytes as u32;
                }
                Err((refused, room)) => {
                    place.room = Lent::Here(room);
                    if line.ended().is_none() {
                        let error =
                            refused.map_or(CallError::SharedRoom, |refused| CallError::Buffer(Box::new(refused)));
                        let error = place.unsent(error);
                        self.calls.end(sequence);
                        return self.settle(sequence, Err(error));
                    }
                }
            },
            other => place.room = other,
        }
        let deadline_ms = match place.deadline {
            None => 0,
            Some(deadline) => {
                let left = deadline.at.saturating_duration_since(Instant::now()).as_millis();
                u32::try_from(left).unwrap_or(u32::MAX).max(1)
            }
        };
        let mut head = CallHead {
            service: place.method.service,
            version: place.method.version,
            method: place.method.method,
            sequence,
            unanswered,
            body: place.argument_bytes,
            body_in_payload: place.body_in_payload,
            is_offer: false,
            reply_room,
            deadline_ms,
        };
        let payload = match std::mem::take(&mut place.sent) {
            Lent::None => {
                compose(&mut self.message, &Head::Call(head), &place.body);
                return line.send(&self.message);
            }
            lent @ Lent::Away => return place.sent = lent,
            Lent::Here(payload) | Lent::Offered(payload) => payload,
        };
        let bytes = payload.total();
        if bytes == 0 {
            // There is nothing to land anywhere.
            place.sent = Lent::Here(payload);
            compose(&mut self.message, &Head::Call(head), &place.body);
            return line.send(&self.message);
        }
        if bytes > self.credit.request_bytes_max.into() {
            place.sent = Lent::Here(payload);
            let error = CallError::RequestTooLarge { bytes, most: self.credit.request_bytes_max.into() };
            let error = place.unsent(error);
            self.end_unanswered(sequence);
            return self.settle(sequence, Err(error));
        }
        if bytes <= self.credit.frame_bytes.into() && self.credit.used != self.credit.granted {
            // A frame stands ready.
            let token = tokens::frame(self.credit.used);
            self.credit.used = self.credit.used.wrapping_add(1);
            compose(&mut self.message, &Head::Call(head), &place.body);
            place.sent = Lent::Away;
            if let Err(unsendable) = line.send_with(sequence, &self.message, payload, token) {
                // The frame is still there for the next.
                self.credit.used = self.credit.used.wrapping_sub(1);
                self.refuse(sequence, unsendable);
            }
        } else {
            head.is_offer = true;
            compose(&mut self.message, &Head::Call(head), &place.body);
            self.message.extend_from_slice(&(bytes as u32).to_le_bytes());
            place.sent = Lent::Offered(payload);
            line.send(&self.message);
        }
    }

    /// Its payload cannot be sent.
    #[cold]
    fn refuse(&mut self, sequence: u64, unsendable: Unsendable) {
        let Unsendable { reason, payload } = unsendable;
        if let Some(place) = self.place(sequence)
            && matches!(place.sent, Lent::Away)
        {
            place.sent = Lent::of(payload);
            let error = place.unsent(CallError::Buffer(Box::new(reason)));
            self.end_unanswered(sequence);
            self.settle(sequence, Err(error));
        }
    }

    /// Nobody is to answer it any more; its room is taken back.
    fn end_unanswered(&mut self, sequence: u64) {
        self.calls.end(sequence);
        let at = self.at(sequence);
        if let (Lent::Away, Some(line)) = (&self.places[at].room, &mut self.line) {
            self.places[at].room = line.revoke(PayloadToken(sequence)).map_or(Lent::None, Lent::Here);
        }
    }

    /// Does what may settle calls or free places, for somebody who does not wait for either.
    #[inline]
    pub(super) fn aside<T>(&mut self, work: impl FnOnce(&mut Core) -> T) -> T {
        self.threads += 1;
        let result = work(self);
        self.threads -= 1;
        result
    }

    /// Takes what has come.
    pub(super) fn progress(&mut self) {
        while self.step() {}
    }

    /// Takes what has come next. False if there was nothing, and nothing has changed.
    #[inline]
    pub(super) fn step(&mut self) -> bool {
        let Some(line) = &mut self.line else { return false };
        match line.next() {
            Next::Nothing => {
                if line.ended().is_none() {
                    return false;
                }
                self.lose_line(Leaving::Malformed);
            }
            Next::Plain(buffer, length) => {
                let lied = match Head::decode(&buffer[..length]) {
                    Ok((Head::Reply(reply), body)) => {
                        let body = Body::new(body);
                        self.answer(reply, body, None);
                        None
                    }
                    Ok((other, _)) => self.rare(other),
                    Err(_) => Some(Leaving::Malformed),
                };
                if let Some(line) = &mut self.line {
                    line.give_back(buffer);
                }
                if let Some(why) = lied {
                    self.lose_line(why);
                }
            }
            Next::Event => {
                let event = line.take_event();
                event.into_iter().for_each(|event| self.handle(event));
            }
        }
        true
    }

    #[inline(never)]
    fn handle(&mut self, event: Event) {
        match event {
            Event::Bulk { control, token, payload, length } => match Head::decode(&control) {
                Ok((Head::Reply(reply), body)) if token.0 == reply.sequence => {
                    let body = Body::new(body);
                    self.answer(reply, body, Some((payload, length)));
                }
                _ => self.lose_line(Leaving::Malformed),
            },
            Event::Sent { token, payload } => {
                if let Some(place) = self.place(token)
                    && matches!(place.sent, Lent::Away)
                {
                    place.sent = Lent::of(payload);
                    self.look_whether_done(token);
                }
            }
            Event::Unused { token, payload } => {
                if let Some(place) = self.place(token.0)
                    && matches!(place.room, Lent::Away)
                {
                    place.room = Lent::of(payload);
                    self.look_whether_done(token.0);
                }
            }
            Event::Refused { token, unsendable } => self.refuse(token, unsendable),
        }
    }

    #[cold]
    fn rare(&mut self, head: Head) -> Option<Leaving> {
        match head {
            Head::Room { sequence } => {
                let place = self.place(sequence)?;
                if place.outcome.is_some() {
                    // It was given up meanwhile, and the server has been told.
                    return None;
                }
                if !matches!(place.sent, Lent::Offered(_)) {
                    return Some(Leaving::Malformed);
                }
                let payload = std::mem::replace(&mut place.sent, Lent::Away).take();
                compose(&mut self.message, &Head::Offered { sequence }, &[]);
                let line = self.line.as_mut()?;
                let sent = line.send_with(sequence, &self.message, payload, tokens::offer(sequence));
                if let Err(unsendable) = sent {
                    self.refuse(sequence, unsendable);
                    self.say_cancelled(sequence);
                }
                None
            }
            Head::Leaving(Leaving::SessionTaken) => {
                self.finish_all(Lost::SessionTaken);
                None
            }
            // Whatever it took is answered; the next call finds another server, or none.
            Head::Leaving(why) => Some(why),
            _ => Some(Leaving::Malformed),
        }
    }

    #[inline]
    fn answer(&mut self, reply: ReplyHead, body: Body, landed: Option<(Payload, usize)>) {
        // Grants only grow.
        if reply.frames.wrapping_sub(self.credit.granted) < 1 << 31 {
            self.credit.granted = reply.frames;
        }
        let sequence = reply.sequence;
        if !self.calls.end(sequence) {
            // Given up before it came; a payload with it would not have landed.
            return;
        }
        let at = self.at(sequence);
        let place = &mut self.places[at];
        match landed {
            Some((payload, length)) => {
                (place.room, place.landed) = (Lent::of(payload), length);
            }
            None => {
                place.landed = 0;
                if let (Lent::Away, Some(line)) = (&place.room, &mut self.line) {
                    place.room = line.revoke(PayloadToken(sequence)).map_or(Lent::None, Lent::of);
                }
            }
        }
        if let Lent::Offered(_) = place.sent {
            place.sent = Lent::of(place.sent.take());
        }
        let outcome = match reply.status {
            Status::Done => Ok(body),
            status => Err(place.error(status, self.credit.request_bytes_max)),
        };
        self.settle(sequence, outcome);
    }

    /// The call has its outcome, once its buffers are back.
    #[inline]
    fn settle(&mut self, sequence: u64, outcome: Result<Body, CallError>) {
        let at = self.at(sequence);
        self.places[at].outcome = Some(outcome);
        self.look_whether_done(sequence);
    }

    #[inline]
    fn look_whether_done(&mut self, sequence: u64) {
        let at = self.at(sequence);
        let place = &mut self.places[at];
        if !place.is_done() {
            return;
        }
        match std::mem::take(&mut place.waiter) {
            Waiter::Thread => self.afterwards.threads |= self.threads > 1,
            Waiter::Task(waker) => {
                self.engaged -= 1;
                self.afterwards.wakers.push(waker);
            }
            Waiter::Continuation(run) => {
                self.engaged -= 1;
                let outcome = self.take(sequence);
                self.afterwards.continuations.extend(outcome.map(|outcome| (run, outcome)));
            }
        }
    }

    /// The outcome of a call, if it has one and its buffers are back. Its place is free then.
    #[inline]
    pub(super) fn take(&mut self, sequence: u64) -> Option<Result<Answer, Failed>> {
        let at = self.at(sequence);
        let place = &mut self.places[at];
        if place.sequence != sequence || !place.is_done() {
            return None;
        }
        place.sequence = 0;
        let outcome = place.outcome.take()?;
        let (sent, room) = (place.sent.take(), place.room.take());
        let sent = if place.body_in_payload { without_arguments(sent) } else { sent };
        let (length, was_task) = (place.landed, std::mem::take(&mut place.waiter));
        if let Waiter::Task(_) = was_task {
            self.engaged -= 1;
        }
        if !self.room_wanted.is_empty() {
            self.afterwards.wakers.extend(self.room_wanted.drain(..).map(|(waker, _)| waker));
        }
        self.afterwards.threads |= self.threads > 1;
        Some(match outcome {
            Ok(body) => Ok(Answer { body, payload: room, length, sent }),
            Err(error) => Err(Failed { error, sent, room }),
        })
    }

    /// Tells the server that nobody waits for a call any more.
    fn say_cancelled(&mut self, sequence: u64) {
        compose(&mut self.message, &Head::Cancel { sequence }, &[]);
        if let (State::Up, Some(line)) = (&self.state, &mut self.line) {
            line.send(&self.message);
        }
    }

    /// Nobody waits for the call any more: nothing lands in its room from now on, and the server is told.
    pub(super) fn give_up(&mut self, sequence: u64, error: CallError) -> Option<Failed> {
        let at = self.at(sequence);
        if self.places[at].sequence != sequence {
            return None;
        }
        if self.places[at].outcome.is_none() {
            self.end_unanswered(sequence);
            self.say_cancelled(sequence);
            self.places[at].outcome = Some(Err(error));
        }
        let place = &mut self.places[at];
        if let Lent::Away = place.room {
            place.room = match &mut self.line {
                Some(line) => line.revoke(PayloadToken(sequence)).map_or(Lent::None, Lent::of),
                None => Lent::None,
            };
        }
        if let Lent::Away = place.sent {
            // The server may be reading it: it returns to its pool when that is done.
            place.sent = Lent::None;
        }
        if let Waiter::Continuation(_) = place.waiter {
            // Run with the error, by whoever has the lock.
            self.look_whether_done(sequence);
            return None;
        }
        match self.take(sequence)? {
            Ok(answer) => Some(Failed { error: CallError::Cancelled, sent: answer.sent, room: answer.payload }),
            Err(failed) => Some(failed),
        }
    }

    /// Has the task woken when the call is done.
    pub(super) fn wake_when_done(&mut self, sequence: u64, waker: &Waker) {
        let at = self.at(sequence);
        match &mut self.places[at].waiter {
            Waiter::Task(known) => known.clone_from(waker),
            waiter => {
                *waiter = Waiter::Task(waker.clone());
                self.engaged += 1;
            }
        }
    }

    /// Nobody is woken for it: a thread waits now.
    pub(super) fn wait_with_thread(&mut self, sequence: u64) {
        let at = self.at(sequence);
        if let Waiter::Task(_) = std::mem::take(&mut self.places[at].waiter) {
            self.engaged -= 1;
        }
    }

    /// Runs `continuation` when the call is done.
    pub(super) fn run_when_done(&mut self, sequence: u64, continuation: Continuation) {
        let at = self.at(sequence);
        self.places[at].waiter = Waiter::Continuation(continuation);
        self.engaged += 1;
        self.look_whether_done(sequence);
    }

    /// Ends those whose deadline has passed and that no thread waits for. The next deadline after that.
    pub(super) fn expire(&mut self, now: Instant) -> Option<Instant> {
        // Who waits for a place finds out by itself that it is too late.
        let late = self.room_wanted.extract_if(.., |(_, until)| until.is_some_and(|until| until <= now));
        self.afterwards.wakers.extend(late.map(|(waker, _)| waker));
        let mut next: Option<Instant> = self.room_wanted.iter().filter_map(|(_, until)| *until).min();
        for at in 0..self.places.len() {
            let place = &self.places[at];
            let (sequence, Some(deadline)) = (place.sequence, place.deadline) else { continue };
            if sequence == 0 || place.outcome.is_some() || matches!(place.waiter, Waiter::Thread) {
                continue;
            }
            if deadline.at > now {
                next = Some(next.map_or(deadline.at, |next| next.min(deadline.at)));
                continue;
            }
            let error = CallError::DeadlinePassed { after: deadline.given };
            match &place.waiter {
                Waiter::Continuation(_) => drop(self.give_up(sequence, error)),
                _ => {
                    // Its task fetches what it is told.
                    self.end_unanswered(sequence);
                    self.say_cancelled(sequence);
                    let place = &mut self.places[at];
                    if let Lent::Away = place.sent {
                        place.sent = Lent::None;
                    }
                    self.settle(sequence, Err(error));
                }
            }
        }
        next
    }

    /// The connection is over, or is given up for this reason if it is not. What was lent to it comes back.
    #[cold]
    fn lose_line(&mut self, why: Leaving) {
        let Some(mut line) = self.line.take() else { return };
        let failure = line.ended().unwrap_or(Failure::Closed);
        if line.ended().is_some() {
            // Answers that came before the end count.
            loop {
                match line.next() {
                    Next::Nothing => break,
                    Next::Plain(buffer, length) => {
                        if let Ok((Head::Reply(reply), body)) = Head::decode(&buffer[..length]) {
                            self.answer(reply, Body::new(body), None);
                        }
                    }
                    Next::Event => line.take_event().into_iter().for_each(|event| self.handle(event)),
                }
            }
            for (sequence, payload) in line.take_backlog() {
                self.handle(Event::Sent { token: sequence, payload });
            }
        }
        for at in 0..self.places.len() {
            let place = &mut self.places[at];
            if place.sequence == 0 {
                continue;
            }
            if let Lent::Away = place.room {
                let room = line.revoke(PayloadToken(place.sequence));
                place.room = room.map_or(Lent::None, Lent::of);
            }
            let sequence = place.sequence;
            if let Lent::Away = place.sent {
                place.sent = Lent::None;
                if place.outcome.is_none() {
                    // Its payload went with the line: it cannot be sent again.
                    place.outcome = Some(Err(CallError::OutcomeUnknown(Box::new(Lost::Refused(why)))));
                    self.calls.end(sequence);
                }
            }
            self.look_whether_done(sequence);
        }
        if let State::Up = self.state {
            let reconnecting = self.calls.outstanding() > 0;
            self.state = State::Down { failure, reconnecting };
            self.afterwards.reconnect |= reconnecting;
        }
        self.afterwards.threads |= self.threads > 0;
        self.afterwards.left = Some(line.watch().clone());
    }

    /// A new connection, on which the server has welcomed the session.
    pub(super) fn adopt(&mut self, line: Line, welcome: Welcome) {
        self.line = Some(line);
        self.state = State::Up;
        self.credit = Credit {
            granted: welcome.frames,
            used: 0,
            frame_bytes: welcome.frame_bytes,
            request_bytes_max: welcome.request_bytes_max,
        };
        for (sequence, fate) in self.calls.welcome(welcome.incarnation, welcome.known) {
            match fate {
                Fate::Send => self.transmit(sequence),
                Fate::Unknown => self.settle(sequence, Err(CallError::OutcomeUnknown(Box::new(Lost::ServerForgot)))),
            }
        }
        self.afterwards.threads |= self.threads > 0;
    }

    /// No connection came about: what is outstanding ends with that.
    pub(super) fn finish_outstanding(&mut self, lost: &Lost) {
        for (sequence, sent) in self.calls.abandon() {
            let error = if sent {
                CallError::OutcomeUnknown(Box::new(lost.clone()))
            } else {
                CallError::NotSent(Box::new(lost.clone()))
            };
            self.settle(sequence, Err(error));
        }
        self.afterwards.threads |= self.threads > 0;
    }

    /// The session is over for good.
    pub(super) fn finish_all(&mut self, lost: Lost) {
        self.state = State::Over(lost.clone());
        self.lose_line(Leaving::SessionTaken);
        self.finish_outstanding(&lost);
    }
}

/// What a welcome said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Welcome {
    pub known: bool,
    pub incarnation: u64,
    pub frames: u32,
    pub frame_bytes: u32,
    pub request_bytes_max: u32,
}

impl Place {
    #[inline]
    fn is_done(&self) -> bool {
        self.outcome.is_some() && !matches!(self.sent, Lent::Away) && !matches!(self.room, Lent::Away)
    }

    /// What it means that the call cannot be sent for this reason: if it was sent before, it may have run.
    #[cold]
    fn unsent(&self, error: CallError) -> CallError {
        match self.is_sent_again {
            true => CallError::OutcomeUnknown(Box::new(Lost::NotSentAgain(error))),
            false => error,
        }
    }

    #[cold]
    fn error(&self, status: Status, request_bytes_max: u32) -> CallError {
        let Method { service, version, method } = self.method;
        match status {
            Status::Done => CallError::BadResult,
            Status::UnknownService => CallError::UnknownService { service },
            Status::UnknownVersion(has) => CallError::UnknownVersion { service, asked: version, has },
            Status::UnknownMethod => CallError::UnknownMethod { service, method },
            Status::BadArguments => CallError::BadArguments,
            Status::PayloadTooLarge(bytes) => CallError::PayloadTooLarge { bytes, room: self.room_bytes },
            Status::RequestTooLarge(bytes) => CallError::RequestTooLarge { bytes, most: request_bytes_max.into() },
            Status::ResultTooLong(bytes) => CallError::ResultTooLong { bytes },
            Status::DeadlinePassed => CallError::TooLate,
            Status::Cancelled => CallError::Cancelled,
            Status::Panicked => CallError::Panicked,
            Status::Leaving => CallError::ServerLeaving,
            Status::Busy => CallError::ServerBusy,
            Status::Forgotten => CallError::AnswerForgotten,
        }
    }
}

/// The caller's own pieces: not the one that arguments were put in.
fn without_arguments(payload: Payload) -> Payload {
    payload.into_segments().into_iter().skip(1).fold(Payload::None, Payload::and)
}

/// The most bytes of arguments.
pub(super) const ARGUMENT_BYTES_MAX: usize = 60 << 10;
/// Frames for long arguments; memory is taken only for those in use.
const ARGUMENT_FRAMES: usize = 16;
const _: () = assert!(HEAD_BYTES + BODY_BYTES_MAX >= 4096 && ARGUMENT_BYTES_MAX < u16::MAX as usize);
