//! A connection as both ends of it use it: messages of head and body, with payloads beside some of them.
//!
//! A message without payload is plain: head and body are what the VI carries, and land in the next of a few receives
//! that are always posted. One with a payload has head and body as the VI's control bytes, and lands by token: where
//! the caller said, for an answer; in a frame that the server granted, for a call.

use crate::head::{HEAD_BYTES, Head, OFFER_BYTES};
use highwire_vi::{
    Buffer, CONTROL_BYTES_MAX, Completion, Control, Failure, Message, Nic, Operation, Payload, PayloadToken, PeerId,
    PostError, QUIET, Receive, Region, RegionError, Vi, Watch,
};
use std::collections::VecDeque;

/// The longest body of a message without payload.
pub const BODY_BYTES_MAX: usize = MESSAGE_BYTES - HEAD_BYTES;
/// The longest body of a message with one.
pub const BODY_BYTES_BESIDE_MAX: usize = CONTROL_BYTES_MAX - HEAD_BYTES - OFFER_BYTES;

/// Room for a plain message. Not a multiple of 4 KiB: heads a page apart would fight for the same few cache lines.
const MESSAGE_BYTES: usize = 4096 + 128;
/// Receives that stand ready; what comes beyond them waits in the VI.
const RECEIVES: usize = 16;
/// A receive for plain messages; those that are sent are quiet.
const PLAIN: u64 = QUIET;
/// Messages that may wait for room, at most.
const BACKLOG_MAX: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Line {
    vi: Vi,
    watch: Watch,
    /// The other side is on this host: whether it has sent something shows in memory, at the cost of a look.
    is_near: bool,
    // The receives are cut from it.
    _messages: Region,
    /// A receive to be posted again as soon as there is nothing to do.
    spare: Option<Buffer>,
    /// What was found last and is to be taken.
    event: Option<Event>,
    backlog: VecDeque<Waiting>,
    backlog_max: usize,
    ended: Option<Failure>,
}

/// A message that has to wait for room.
#[derive(Debug)]
enum Waiting {
    Plain(Vec<u8>),
    Bulk(u64, Message),
}

/// What a look at a line finds. As small as it is, it comes in registers.
#[derive(Debug)]
pub(crate) enum Next {
    /// A message without payload. The buffer goes back with [`Line::give_back`].
    Plain(Buffer, usize),
    /// Something else, which [`Line::take_event`] has.
    Event,
    Nothing,
}

/// Something that has come, or is done, other than a plain message.
#[derive(Debug)]
pub(crate) enum Event {
    /// A message with a payload, which has landed.
    Bulk { control: Control, token: PayloadToken, payload: Payload, length: usize },
    /// A payload that was sent is its sender's again, under the token that it was sent with.
    Sent { token: u64, payload: Payload },
    /// A place for a payload, which nothing will land in any more.
    Unused { token: PayloadToken, payload: Payload },
    /// A message that had to wait for room, and turned out to be one that cannot be sent.
    Refused { token: u64, unsendable: Unsendable },
}

/// A payload that the line cannot carry.
#[derive(Debug)]
pub(crate) struct Unsendable {
    pub reason: PostError,
    pub payload: Payload,
}

impl Line {
    pub(crate) fn new(nic: &Nic, vi: Vi) -> Result<Line, RegionError> {
        let messages = nic.register(RECEIVES * MESSAGE_BYTES)?;
        let watch = vi.watch();
        let is_near = matches!(vi.peer(), PeerId::Process(_));
        let mut line = Line {
            vi,
            watch,
            is_near,
            _messages: messages.clone(),
            spare: None,
            event: None,
            backlog: VecDeque::new(),
            backlog_max: BACKLOG_MAX,
            ended: None,
        };
        for at in 0..RECEIVES {
            let buffer = messages.slice(at * MESSAGE_BYTES..(at + 1) * MESSAGE_BYTES)?;
            line.post_receive(buffer);
        }
        Ok(line)
    }

    /// From now on at most so many messages wait for room.
    pub(crate) fn limit_backlog(&mut self, messages: usize) {
        self.backlog_max = messages;
    }

    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    pub(crate) fn peer(&self) -> PeerId {
        self.vi.peer()
    }

    /// Why it is over.
    pub(crate) fn ended(&self) -> Option<Failure> {
        self.ended
    }

    /// Sends a plain message, head and body together.
    #[inline]
    pub(crate) fn send(&mut self, message: &[u8]) {
        if self.backlog.is_empty() {
            match self.vi.send_bytes(PLAIN, message) {
                Ok(()) => return,
                Err(PostError::NoRoom { .. }) => {}
                Err(error) => return self.fail(error),
            }
        }
        self.put_back(Waiting::Plain(message.to_vec()));
    }

    /// Sends a message with a payload, which lands where the other side expects it.
    /// Back if it can never be sent; [`Event::Refused`] says so of one that had to wait first.
    pub(crate) fn send_with(
        &mut self,
        token: u64,
        message: &[u8],
        payload: Payload,
        lands_at: PayloadToken,
    ) -> Result<(), Unsendable> {
        let message = Message::carrying(token, payload).control(message).lands_at(lands_at);
        if !self.backlog.is_empty() {
            self.put_back(Waiting::Bulk(token, message));
            return Ok(());
        }
        self.post(token, message)
    }

    fn post(&mut self, token: u64, message: Message) -> Result<(), Unsendable> {
        let Err(refused) = self.vi.post_send(message) else { return Ok(()) };
        match refused.reason {
            // It goes when there is room.
            PostError::QueueFull { .. } | PostError::NoRoom { .. } => {}
            // It comes back with what else waits.
            reason @ (PostError::NotConnected(_) | PostError::ForkedChild) => self.fail(reason),
            // That is the fault of this message, not of the line.
            reason => return Err(Unsendable { reason, payload: refused.descriptor.into_payload() }),
        }
        self.backlog.push_front(Waiting::Bulk(token, refused.descriptor));
        Ok(())
    }

    #[cold]
    fn put_back(&mut self, waiting: Waiting) {
        self.backlog.push_back(waiting);
        if self.backlog.len() > self.backlog_max {
            // The other side takes nothing, and asks for more all the time.
            self.ended.get_or_insert(Failure::Closed);
        }
    }

    #[cold]
    fn fail(&mut self, error: PostError) {
        let failure = match error {
            PostError::NotConnected(failure) => failure,
            _ => Failure::Closed,
        };
        self.ended.get_or_insert(failure);
    }

    /// Sends what waited for room, as far as there is some, or to the first that can never be sent.
    #[cold]
    fn send_backlog(&mut self) -> Option<Event> {
        while let Some(next) = self.backlog.pop_front() {
            match next {
                Waiting::Plain(message) => match self.vi.send_bytes(PLAIN, &message) {
                    Ok(()) => {}
                    Err(PostError::NoRoom { .. }) => {
                        self.backlog.push_front(Waiting::Plain(message));
                        return None;
                    }
                    Err(error) => {
                        self.fail(error);
                        return None;
                    }
                },
                Waiting::Bulk(token, message) => {
                    let waiting = self.backlog.len();
                    match self.post(token, message) {
                        Ok(()) if self.backlog.len() > waiting => return None,
                        Ok(()) => {}
                        Err(unsendable) => return Some(Event::Refused { token, unsendable }),
                    }
                }
            }
        }
        None
    }

    /// Gives a place for the payload that comes with this token; back if it cannot be.
    pub(crate) fn expect(&mut self, token: PayloadToken, room: Payload) -> Result<(), (Option<PostError>, Payload)> {
        let receive = Receive::filling(token.0, room).map_err(|room| (None, room))?;
        self.vi.expect(token, receive).map_err(|refused| {
            if let PostError::NotConnected(failure) = refused.reason {
                self.ended.get_or_insert(failure);
            }
            (Some(refused.reason), refused.descriptor.into_payload())
        })
    }

    /// Takes it back: nothing lands there from now on.
    pub(crate) fn revoke(&mut self, token: PayloadToken) -> Option<Payload> {
        self.vi.revoke(token).map(Receive::into_payload)
    }

    /// Has a receive for plain messages again, which is posted when nobody waits for what else there is to do.
    #[inline]
    pub(crate) fn give_back(&mut self, buffer: Buffer) {
        if let Some(spare) = self.spare.replace(buffer) {
            self.post_receive(spare);
        }
    }

    fn post_receive(&mut self, buffer: Buffer) {
        if let Err(refused) = self.vi.post_recv(Receive::new(PLAIN).into(buffer)) {
            self.fail(refused.reason);
        }
    }

    /// What has come or is done next, if anything.
    #[inline]
    pub(crate) fn next(&mut self) -> Next {
        loop {
            if !self.backlog.is_empty()
                && let Some(refused) = self.send_backlog()
            {
                self.event = Some(refused);
                return Next::Event;
            }
            // The end of the connection is something too: it shows here until it was polled for.
            if self.is_near && !self.watch.is_ready() {
                if let Some(spare) = self.spare.take() {
                    self.post_receive(spare);
                }
                return Next::Nothing;
            }
            let Some(done) = self.vi.poll() else {
                // The look may have taken in the news that there is room, of which nobody is told again.
                let waiting = self.backlog.len();
                if waiting > 0 {
                    if let Some(refused) = self.send_backlog() {
                        self.event = Some(refused);
                        return Next::Event;
                    }
                    if self.backlog.len() < waiting {
                        continue;
                    }
                }
                self.note_end();
                return Next::Nothing;
            };
            match done {
                Completion { token: PLAIN, operation: Operation::Receive, status: Ok(()), length, payload, .. } => {
                    if let Payload::Buffer(buffer) = payload {
                        return Next::Plain(buffer, length);
                    }
                }
                done => {
                    self.event = self.rare(done);
                    if self.event.is_some() {
                        return Next::Event;
                    }
                }
            }
        }
    }

    /// What [`Line::next`] said is there.
    pub(crate) fn take_event(&mut self) -> Option<Event> {
        self.event.take()
    }

    #[inline(never)]
    fn note_end(&mut self) {
        if self.ended.is_none()
            && let highwire_vi::State::Ended(failure) = self.vi.state()
        {
            self.ended = Some(failure);
        }
    }

    #[inline(never)]
    fn rare(&mut self, done: Completion) -> Option<Event> {
        let at = done.payload_token();
        let Completion { token, operation, status, length, control, payload, .. } = done;
        if let Err(failure) = status
            && operation == Operation::Receive
        {
            self.ended.get_or_insert(failure);
        }
        match (operation, at) {
            (Operation::Receive, Some(at)) if status.is_ok() => {
                Some(Event::Bulk { control, token: at, payload, length })
            }
            // The descriptor's own token is that of the payload, for those expected.
            (Operation::Receive, _) if token != PLAIN => Some(Event::Unused { token: PayloadToken(token), payload }),
            (Operation::Send, _) if token != PLAIN => Some(Event::Sent { token, payload }),
            _ => None,
        }
    }

    /// Once it has ended: the payloads of messages that never left, each under its token.
    pub(crate) fn take_backlog(&mut self) -> Vec<(u64, Payload)> {
        let waiting = self.backlog.drain(..).filter_map(|waiting| match waiting {
            Waiting::Plain(_) => None,
            Waiting::Bulk(token, message) => Some((token, message.into_payload())),
        });
        waiting.collect()
    }

    /// Ends it from this side: whoever looks next finds it over.
    pub(crate) fn give_up(&mut self) {
        self.ended.get_or_insert(Failure::Closed);
    }

    /// Waits until everything is with the other side.
    pub(crate) fn flush(&mut self, timeout: std::time::Duration) -> bool {
        while self.send_backlog().is_some() {}
        self.backlog.is_empty() && self.vi.sender().flush(timeout).is_ok()
    }
}

/// Head and body, one after the other, in `into`.
#[inline]
pub(crate) fn compose(into: &mut Vec<u8>, head: &Head, body: &[u8]) {
    into.clear();
    into.extend_from_slice(&head.encode());
    into.extend_from_slice(body);
}
