//! What a handler is given, and what it gives.

use super::Inner;
use super::sessions::Ticket;
use crate::head::{HEAD_BYTES, Status};
use crate::line::{BODY_BYTES_BESIDE_MAX, BODY_BYTES_MAX};
use highwire_vi::{Buffer, Frozen, Nic, Payload, PeerId, Segment, SharedBuffer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// A service: what its methods do.
pub trait Serve: Send + Sync + 'static {
    /// How a method is to be run; `None` if there is no such method.
    fn manner(&self, method: u16) -> Option<Manner>;

    /// Runs it.
    fn serve(&self, request: Request<'_>, reply: &mut Reply);
}

/// How a method is run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Manner {
    /// It takes about a microsecond and never blocks: it runs in the loop that takes calls from the network, where it
    /// costs no other thread. Others run on a pool.
    pub is_quick: bool,
    /// Running it twice does no harm. Only such methods can be answered again after a connection was lost with an
    /// answer that has a payload: other answers are kept until the caller has them.
    pub may_repeat: bool,
}

impl Manner {
    /// The same, for a method that is quick.
    #[must_use]
    pub const fn quick(self) -> Manner {
        Manner { is_quick: true, ..self }
    }

    /// The same, for a method that may run twice.
    #[must_use]
    pub const fn repeatable(self) -> Manner {
        Manner { may_repeat: true, ..self }
    }
}

/// A call, to whoever runs it.
#[derive(Debug)]
pub struct Request<'a> {
    pub(super) method: u16,
    pub(super) arguments: &'a [u8],
    pub(super) payload: Received,
    pub(super) peer: PeerId,
    pub(super) ticket: Ticket,
    pub(super) server: &'a Arc<Inner>,
}

/// The payload of a call.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub payload: Payload,
    /// Before it are the arguments.
    pub start: usize,
    pub end: usize,
}

impl Received {
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.payload {
            Payload::Buffer(buffer) => &buffer[..self.end],
            _ => &[],
        }
    }
}

impl Request<'_> {
    /// Which method.
    pub fn method(&self) -> u16 {
        self.method
    }

    /// The encoded arguments.
    pub fn arguments(&self) -> &[u8] {
        self.arguments
    }

    /// The arguments, if they are what the method takes.
    #[inline]
    pub fn decode<T: DeserializeOwned>(&self) -> Option<T> {
        let (value, rest) = postcard::take_from_bytes(self.arguments).ok()?;
        rest.is_empty().then_some(value)
    }

    /// The payload.
    pub fn payload(&self) -> &[u8] {
        self.payload.bytes().get(self.payload.start..).unwrap_or_default()
    }

    /// The frame that the payload landed in, and where in it the payload is: once. It returns to the server's pool when it is
    /// dropped: whoever keeps it long leaves other calls without.
    pub fn take_payload(&mut self) -> Option<(Buffer, Range<usize>)> {
        let Received { payload, start, end } = std::mem::take(&mut self.payload);
        match payload {
            Payload::Buffer(buffer) => Some((buffer, start..end)),
            _ => None,
        }
    }

    /// Bytes of room that the caller has for the payload of the answer.
    pub fn room(&self) -> usize {
        self.ticket.room as usize
    }

    /// Who calls.
    pub fn peer(&self) -> PeerId {
        self.peer
    }

    /// The server's interface, for buffers.
    pub fn nic(&self) -> &Nic {
        &self.server.nic
    }

    /// Answers later, from any thread: what is in `reply` is not sent. The handler returns at once and occupies nobody.
    pub fn defer(&self, reply: &mut Reply) -> Deferred {
        reply.is_deferred = true;
        self.server.deferred.fetch_add(1, SeqCst);
        Deferred { server: self.server.clone(), ticket: self.ticket, is_answered: false }
    }
}

/// A call that is answered later. Dropped without an answer, its caller hears that the handler failed.
#[derive(Debug)]
pub struct Deferred {
    server: Arc<Inner>,
    ticket: Ticket,
    is_answered: bool,
}

impl Deferred {
    /// Answers with what `make` puts into the reply.
    pub fn answer(mut self, make: impl FnOnce(&mut Reply)) {
        self.is_answered = true;
        let mut reply = Reply::default();
        make(&mut reply);
        self.send(reply);
    }

    fn send(&self, reply: Reply) {
        self.server.finish_deferred(self.ticket, reply);
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        if !self.is_answered {
            let mut reply = Reply::default();
            reply.fail(Status::Panicked);
            self.send(reply);
        }
    }
}

/// The answer to a call, as it is being made.
#[derive(Debug)]
pub struct Reply {
    /// Room for the head, then the body.
    pub(super) message: Vec<u8>,
    pub(super) body: usize,
    pub(super) payload: Payload,
    pub(super) status: Status,
    /// It is made later, elsewhere.
    pub(super) is_deferred: bool,
}

impl Default for Reply {
    fn default() -> Reply {
        Reply {
            message: vec![0; HEAD_BYTES + BODY_BYTES_MAX],
            body: 0,
            payload: Payload::None,
            status: Status::Done,
            is_deferred: false,
        }
    }
}

impl Reply {
    /// The result.
    #[inline]
    pub fn encode<T: Serialize>(&mut self, result: &T) {
        let room = self.message.get_mut(HEAD_BYTES..).unwrap_or_default();
        match postcard::to_slice(result, room) {
            Ok(written) => self.body = written.len(),
            Err(_) => self.fail(Status::ResultTooLong(encoded_bytes(result))),
        }
    }

    /// The encoded result.
    pub fn body(&mut self, bytes: &[u8]) {
        match self.message.get_mut(HEAD_BYTES..HEAD_BYTES + bytes.len()) {
            Some(room) => {
                room.copy_from_slice(bytes);
                self.body = bytes.len();
            }
            None => self.fail(Status::ResultTooLong(bytes.len() as u64)),
        }
    }

    /// Adds a piece of payload, which lands where the caller said. Beside a payload the result has at most 92 bytes.
    pub fn payload(&mut self, buffer: Buffer) {
        self.segment(Segment::Buffer(buffer));
    }

    /// Adds a piece that other answers may carry too.
    pub fn shared(&mut self, buffer: SharedBuffer) {
        self.segment(Segment::Shared(buffer));
    }

    /// Adds a range of a frozen region. Panics if it is not inside.
    pub fn frozen(&mut self, region: &Frozen, range: Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= region.len(),
            "{range:?} is outside a frozen region of {} bytes",
            region.len()
        );
        self.segment(Segment::Frozen(region.clone(), range));
    }

    fn segment(&mut self, segment: Segment) {
        self.payload = std::mem::take(&mut self.payload).and(segment);
    }

    /// There is no such method.
    pub fn unknown_method(&mut self) {
        self.fail(Status::UnknownMethod);
    }

    /// The server cannot do it now, and has changed nothing: the caller takes it that the call did not run.
    pub fn fail_busy(&mut self) {
        self.fail(Status::Busy);
    }

    /// The call ran, and its answer cannot be made: the caller takes it that it ran.
    pub fn fail_forgotten(&mut self) {
        self.fail(Status::Forgotten);
    }

    /// The arguments are not those of the method.
    pub fn bad_arguments(&mut self) {
        self.fail(Status::BadArguments);
    }

    pub(super) fn fail(&mut self, status: Status) {
        (self.status, self.body) = (status, 0);
        self.payload = Payload::None;
    }

    pub(super) fn clear(&mut self) {
        (self.status, self.body, self.is_deferred) = (Status::Done, 0, false);
        self.payload = Payload::None;
    }

    /// What cannot be sent becomes an error that says so.
    #[inline]
    pub(super) fn check(&mut self, room: u32) {
        if matches!(self.payload, Payload::None) {
            return;
        }
        let bytes = self.payload.total();
        if bytes == 0 {
            // There is nothing to land, and a caller without room would not hear of it.
            self.payload = Payload::None;
        } else if bytes > room.into() {
            self.fail(Status::PayloadTooLarge(bytes));
        } else if self.body > BODY_BYTES_BESIDE_MAX {
            self.fail(Status::ResultTooLong(self.body as u64));
        }
    }
}

#[cold]
fn encoded_bytes<T: Serialize>(value: &T) -> u64 {
    postcard::to_allocvec(value).map_or(0, |bytes| bytes.len() as u64)
}
