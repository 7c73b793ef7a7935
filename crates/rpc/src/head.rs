//! The head of every message: 32 bytes, little-endian, then what the message says (its body).
//!
//! ```text
//!            0     1      2          4         8          16            20         22     24          28
//! Hello      1     -      version    window    acknowledged attempt     -                 incarnation
//! Welcome    2     known  version    window    incarnation              frames            frame_bytes request_bytes
//! Call       3     flags  method     service   sequence   unanswered    service's  body   reply_room  deadline_ms
//!                                                                       version
//! Reply      4     -      status     body      sequence   frames        -                 detail
//! Cancel     5     -      -          -         sequence   -             -                 -
//! Room       6     -      -          -         sequence   -             -                 -
//! Offered    7     -      -          -         sequence   -             -                 -
//! Leaving    8     why    -          -         -          -             -                 -
//! ```
//! `docs/protocol/rpc.md` says what each of them means. Whatever is not used is zero, and refused if it is not.

/// Bytes of a head.
pub const HEAD_BYTES: usize = 32;

/// The version of everything described here.
///
/// * 1: the first.
pub const RPC_VERSION: u16 = 1;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// The first message of a client; the body is the 16 bytes of its session.
    Hello {
        /// [`RPC_VERSION`] of the client.
        version: u16,
        /// Calls that it wants to have outstanding.
        window: u32,
        /// Answers to all calls before this one have arrived.
        acknowledged: u64,
        /// Numbers the connections of the session: a server refuses one that is older than another.
        attempt: u32,
        /// The incarnation that the last welcome said; 0 for a session that is new.
        incarnation: u64,
    },
    /// The answer to it.
    Welcome {
        /// [`RPC_VERSION`] of the server.
        version: u16,
        /// Whether the server has the session still; otherwise it is new.
        known: bool,
        /// Calls that may be outstanding.
        window: u32,
        /// Changes with every start of the server and whenever it begins the session anew, and is never 0. Whoever has
        /// not seen it was never welcomed to this session, though its number may be the same.
        incarnation: u64,
        /// Frames granted for payloads of calls.
        frames: u32,
        /// Bytes of each.
        frame_bytes: u32,
        /// The longest payload of a call.
        request_bytes_max: u32,
    },
    /// A call; the body is its encoded arguments.
    Call(CallHead),
    /// Its answer; the body is its encoded result.
    Reply(ReplyHead),
    /// The caller does not wait for the answer any more. What has begun goes on.
    Cancel {
        /// Which call.
        sequence: u64,
    },
    /// There is room for the payload that a call has offered.
    Room {
        /// Which call.
        sequence: u64,
    },
    /// With the payload that was offered.
    Offered {
        /// Which call.
        sequence: u64,
    },
    /// The server takes no further calls on this connection; from a client, with [`Leaving::Shutdown`], that it will not
    /// come back.
    Leaving(Leaving),
}

/// Why a server leaves a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// It shuts down. Answers to what it took come before this.
    Shutdown,
    /// Another connection has taken the session over.
    SessionTaken,
    /// What came on it cannot be.
    Malformed,
    /// It has as many sessions as it may.
    Full,
    /// The two speak different versions.
    Version,
}

/// The head of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallHead {
    /// Which service.
    pub service: u32,
    /// Its version.
    pub version: u16,
    /// Which of its methods.
    pub method: u16,
    /// Counts the calls of a session from 1.
    pub sequence: u64,
    /// How far before this one the first call is whose answer has not arrived: 0 if that is this one.
    pub unanswered: u32,
    /// Bytes of the arguments.
    pub body: u16,
    /// The arguments are the first bytes of the payload.
    pub body_in_payload: bool,
    /// The payload is not with it: it comes when there is room. The body ends with its length, a u32.
    pub is_offer: bool,
    /// Room for the payload of the answer.
    pub reply_room: u32,
    /// The caller gives up after so many milliseconds; 0 for never.
    pub deadline_ms: u32,
}

impl CallHead {
    /// Bytes that follow the head.
    #[inline]
    fn body_here(&self) -> usize {
        let arguments = if self.body_in_payload { 0 } else { usize::from(self.body) };
        arguments + if self.is_offer { OFFER_BYTES } else { 0 }
    }
}

/// The head of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHead {
    /// Of the session.
    pub sequence: u64,
    /// What became of the call.
    pub status: Status,
    /// Bytes of the result.
    pub body: u16,
    /// Frames granted so far for payloads of calls, in all.
    pub frames: u32,
}

/// What became of a call, as the server says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It ran; the body is what it returned.
    Done,
    /// There is no such service.
    UnknownService,
    /// The service has another version: this one.
    UnknownVersion(u16),
    /// It has no such method.
    UnknownMethod,
    /// The arguments are not those of the method.
    BadArguments,
    /// The payload of the answer, of so many bytes, is larger than the room for it.
    PayloadTooLarge(u64),
    /// The payload of the call is larger than the server takes: so many bytes.
    RequestTooLarge(u64),
    /// The result of so many bytes is larger than results may be.
    ResultTooLong(u64),
    /// The deadline had passed before it began.
    DeadlinePassed,
    /// The caller had cancelled it before it began.
    Cancelled,
    /// The handler panicked.
    Panicked,
    /// The server is shutting down and did not begin it.
    Leaving,
    /// The server has as many calls waiting as it may.
    Busy,
    /// The answer was given before, and is not kept.
    Forgotten,
}

/// Why bytes are not a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Fewer than a head has.
    #[error("{bytes} bytes; a head has {HEAD_BYTES}")]
    Short {
        /// How many there are.
        bytes: usize,
    },
    /// Not a kind of message.
    #[error("there is no message of kind {kind}")]
    Kind {
        /// The kind.
        kind: u8,
    },
    /// A field with a value that it does not have.
    #[error("{field} has the value {value}")]
    Field {
        /// Which.
        field: &'static str,
        /// The value.
        value: u64,
    },
    /// The body is not as long as the head says.
    #[error("a body of {found} bytes where the head says {said}")]
    Body {
        /// As the head says.
        said: usize,
        /// As it is.
        found: usize,
    },
}

const BODY_IN_PAYLOAD: u8 = 1;
const IS_OFFER: u8 = 2;

impl Head {
    /// The 32 bytes.
    #[inline]
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut to = Writer([0; HEAD_BYTES]);
        match *self {
            Head::Hello { version, window, acknowledged, attempt, incarnation } => {
                to.kind(1).u16(2, version).u32(4, window).u64(8, acknowledged);
                to.u32(16, attempt).u64(24, incarnation);
            }
            Head::Welcome { version, known, window, incarnation, frames, frame_bytes, request_bytes_max } => {
                to.kind(2).u8(1, known.into()).u16(2, version).u32(4, window).u64(8, incarnation);
                to.u32(16, frames).u32(24, frame_bytes).u32(28, request_bytes_max);
            }
            Head::Call(call) => {
                let flags = if call.body_in_payload { BODY_IN_PAYLOAD } else { 0 };
                let flags = flags | if call.is_offer { IS_OFFER } else { 0 };
                to.kind(3).u8(1, flags).u16(2, call.method).u32(4, call.service).u64(8, call.sequence);
                to.u32(16, call.unanswered).u16(20, call.version).u16(22, call.body);
                to.u32(24, call.reply_room).u32(28, call.deadline_ms);
            }
            Head::Reply(reply) => {
                let (status, detail) = reply.status.encode();
                to.kind(4).u16(2, status).u32(4, reply.body.into()).u64(8, reply.sequence);
                to.u32(16, reply.frames).u64(24, detail);
            }
            Head::Cancel { sequence } => drop(to.kind(5).u64(8, sequence)),
            Head::Room { sequence } => drop(to.kind(6).u64(8, sequence)),
            Head::Offered { sequence } => drop(to.kind(7).u64(8, sequence)),
            Head::Leaving(why) => drop(to.kind(8).u8(1, why as u8)),
        }
        to.0
    }

    /// The head of a message and its body.
    #[inline]
    pub fn decode(message: &[u8]) -> Result<(Head, &[u8]), Malformed> {
        let Some((head, body)) = message.split_first_chunk::<HEAD_BYTES>() else {
            return Err(Malformed::Short { bytes: message.len() });
        };
        let from = Reader(head);
        let (head, said) = match head[0] {
            3 => {
                let call = from.call()?;
                (Head::Call(call), call.body_here())
            }
            4 => {
                let reply = from.reply()?;
                (Head::Reply(reply), reply.body.into())
            }
            kind => from.rare(kind)?,
        };
        if said == body.len() { Ok((head, body)) } else { Err(Malformed::Body { said, found: body.len() }) }
    }
}

/// Bytes at the end of the body of an offer: how long the payload is.
pub const OFFER_BYTES: usize = 4;

impl Status {
    fn encode(self) -> (u16, u64) {
        match self {
            Status::Done => (0, 0),
            Status::UnknownService => (1, 0),
            Status::UnknownVersion(version) => (2, version.into()),
            Status::UnknownMethod => (3, 0),
            Status::BadArguments => (4, 0),
            Status::PayloadTooLarge(bytes) => (5, bytes),
            Status::RequestTooLarge(bytes) => (6, bytes),
            Status::ResultTooLong(bytes) => (7, bytes),
            Status::DeadlinePassed => (8, 0),
            Status::Cancelled => (9, 0),
            Status::Panicked => (10, 0),
            Status::Leaving => (11, 0),
            Status::Busy => (12, 0),
            Status::Forgotten => (13, 0),
        }
    }

    #[inline]
    fn decode(number: u16, detail: u64) -> Result<Status, Malformed> {
        if number == 0 && detail == 0 {
            return Ok(Status::Done);
        }
        Status::decode_failure(number, detail)
    }

    #[cold]
    fn decode_failure(number: u16, detail: u64) -> Result<Status, Malformed> {
        let status = match number {
            1 => Status::UnknownService,
            2 => Status::UnknownVersion(
                u16::try_from(detail).map_err(|_| Malformed::Field { field: "detail", value: detail })?,
            ),
            3 => Status::UnknownMethod,
            4 => Status::BadArguments,
            5 => return Ok(Status::PayloadTooLarge(detail)),
            6 => return Ok(Status::RequestTooLarge(detail)),
            7 => return Ok(Status::ResultTooLong(detail)),
            8 => Status::DeadlinePassed,
            9 => Status::Cancelled,
            10 => Status::Panicked,
            11 => Status::Leaving,
            12 => Status::Busy,
            13 => Status::Forgotten,
            _ => return Err(Malformed::Field { field: "status", value: number.into() }),
        };
        match status {
            Status::UnknownVersion(_) => Ok(status),
            _ if detail != 0 => Err(Malformed::Field { field: "detail", value: detail }),
            _ => Ok(status),
        }
    }
}

struct Writer([u8; HEAD_BYTES]);

impl Writer {
    fn kind(&mut self, kind: u8) -> &mut Writer {
        self.u8(0, kind)
    }
    fn u8(&mut self, at: usize, value: u8) -> &mut Writer {
        self.0[at] = value;
        self
    }
    fn u16(&mut self, at: usize, value: u16) -> &mut Writer {
        self.0[at..at + 2].copy_from_slice(&value.to_le_bytes());
        self
    }
    fn u32(&mut self, at: usize, value: u32) -> &mut Writer {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self
    }
    fn u64(&mut self, at: usize, value: u64) -> &mut Writer {
        self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        self
    }
}

struct Reader<'a>(&'a [u8; HEAD_BYTES]);

impl Reader<'_> {
    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }
    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.0[at + i]))
    }
    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.0[at + i]))
    }

    /// Everything outside these ranges must be zero.
    fn only(&self, used: &[std::ops::Range<usize>]) -> Result<(), Malformed> {
        let stray = (1..HEAD_BYTES).find(|at| self.0[*at] != 0 && !used.iter().any(|range| range.contains(at)));
        match stray {
            Some(at) => Err(Malformed::Field { field: "an unused byte", value: self.0[at].into() }),
            None => Ok(()),
        }
    }

    #[inline]
    fn sequence(&self) -> Result<u64, Malformed> {
        match self.u64(8) {
            0 => Err(Malformed::Field { field: "sequence", value: 0 }),
            // Tokens of payloads have their own use for the highest bits.
            sequence if sequence >> SEQUENCE_BITS != 0 => Err(Malformed::Field { field: "sequence", value: sequence }),
            sequence => Ok(sequence),
        }
    }

    #[inline]
    fn call(&self) -> Result<CallHead, Malformed> {
        let flags = self.0[1];
        if flags & !(BODY_IN_PAYLOAD | IS_OFFER) != 0 {
            return Err(Malformed::Field { field: "flags", value: flags.into() });
        }
        Ok(CallHead {
            service: self.u32(4),
            version: self.u16(20),
            method: self.u16(2),
            sequence: self.sequence()?,
            unanswered: self.u32(16),
            body: self.u16(22),
            body_in_payload: flags & BODY_IN_PAYLOAD != 0,
            is_offer: flags & IS_OFFER != 0,
            reply_room: self.u32(24),
            deadline_ms: self.u32(28),
        })
    }

    #[inline]
    fn reply(&self) -> Result<ReplyHead, Malformed> {
        let body = self.u32(4);
        if body > u16::MAX.into() {
            return Err(Malformed::Field { field: "body", value: body.into() });
        }
        if self.0[1] != 0 || self.u32(20) != 0 {
            return Err(Malformed::Field {
                field: "an unused byte",
                value: u64::from(self.0[1]) | u64::from(self.u32(20)),
            });
        }
        Ok(ReplyHead {
            sequence: self.sequence()?,
            status: Status::decode(self.u16(2), self.u64(24))?,
            body: body as u16,
            frames: self.u32(16),
        })
    }

    /// Those that are not of every call, and how long the body is.
    #[cold]
    fn rare(&self, kind: u8) -> Result<(Head, usize), Malformed> {
        let one = |head| self.only(std::slice::from_ref(&(8..16))).map(|()| (head, 0));
        match kind {
            1 => {
                // A hello and a welcome are the same in all versions, so that two of them can tell that they differ.
                self.only(&[2..20, 24..32])?;
                let head = Head::Hello {
                    version: self.u16(2),
                    window: self.u32(4),
                    acknowledged: self.u64(8),
                    attempt: self.u32(16),
                    incarnation: self.u64(24),
                };
                Ok((head, SESSION_BYTES))
            }
            2 => {
                self.only(&[1..20, 24..32])?;
                if self.0[1] > 1 {
                    return Err(Malformed::Field { field: "known", value: self.0[1].into() });
                }
                if self.u64(8) == 0 {
                    return Err(Malformed::Field { field: "incarnation", value: 0 });
                }
                let head = Head::Welcome {
                    version: self.u16(2),
                    known: self.0[1] == 1,
                    window: self.u32(4),
                    incarnation: self.u64(8),
                    frames: self.u32(16),
                    frame_bytes: self.u32(24),
                    request_bytes_max: self.u32(28),
                };
                Ok((head, 0))
            }
            5 => one(Head::Cancel { sequence: self.sequence()? }),
            6 => one(Head::Room { sequence: self.sequence()? }),
            7 => one(Head::Offered { sequence: self.sequence()? }),
            8 => {
                self.only(std::slice::from_ref(&(1..2)))?;
                let why = match self.0[1] {
                    0 => Leaving::Shutdown,
                    1 => Leaving::SessionTaken,
                    2 => Leaving::Malformed,
                    3 => Leaving::Full,
                    4 => Leaving::Version,
                    other => return Err(Malformed::Field { field: "why", value: other.into() }),
                };
                Ok((Head::Leaving(why), 0))
            }
            kind => Err(Malformed::Kind { kind }),
        }
    }
}

/// Bytes of a session's number.
pub const SESSION_BYTES: usize = 16;
/// Sequence numbers have so many bits.
pub const SEQUENCE_BITS: u32 = 60;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequences() -> impl Strategy<Value = u64> {
        1..1u64 << SEQUENCE_BITS
    }

    fn statuses() -> impl Strategy<Value = Status> {
        prop_oneof![
            Just(Status::Done),
            Just(Status::UnknownService),
            any::<u16>().prop_map(Status::UnknownVersion),
            Just(Status::UnknownMethod),
            Just(Status::BadArguments),
            any::<u64>().prop_map(Status::PayloadTooLarge),
            any::<u64>().prop_map(Status::RequestTooLarge),
            any::<u64>().prop_map(Status::ResultTooLong),
            Just(Status::DeadlinePassed),
            Just(Status::Cancelled),
            Just(Status::Panicked),
            Just(Status::Leaving),
            Just(Status::Busy),
            Just(Status::Forgotten),
        ]
    }

    prop_compose! {
        fn calls()(
            ids in any::<(u32, u16, u16, u32, u32, u32)>(),
            sequence in sequences(),
            (body, body_in_payload, is_offer) in any::<(u16, bool, bool)>(),
        ) -> CallHead {
            let (service, version, method, unanswered, reply_room, deadline_ms) = ids;
            CallHead {
                service, version, method, sequence, unanswered, body, body_in_payload, is_offer, reply_room, deadline_ms,
            }
        }
    }

    fn heads() -> impl Strategy<Value = Head> {
        let leaving = prop::sample::select(vec![
            Leaving::Shutdown,
            Leaving::SessionTaken,
            Leaving::Malformed,
            Leaving::Full,
            Leaving::Version,
        ]);
        let hello = any::<(u16, u32, u64, u32, u64)>().prop_map(|numbers| {
            let (version, window, acknowledged, attempt, incarnation) = numbers;
            Head::Hello { version, window, acknowledged, attempt, incarnation }
        });
        let welcome = (any::<(u16, bool, u32, u32, u32, u32)>(), 1u64..).prop_map(|(numbers, incarnation)| {
            let (version, known, window, frames, frame_bytes, request_bytes_max) = numbers;
            Head::Welcome { version, known, window, incarnation, frames, frame_bytes, request_bytes_max }
        });
        let reply = (sequences(), statuses(), any::<(u16, u32)>())
            .prop_map(|(sequence, status, (body, frames))| Head::Reply(ReplyHead { sequence, status, body, frames }));
        prop_oneof![
            hello,
            welcome,
            calls().prop_map(Head::Call),
            reply,
            sequences().prop_map(|sequence| Head::Cancel { sequence }),
            sequences().prop_map(|sequence| Head::Room { sequence }),
            sequences().prop_map(|sequence| Head::Offered { sequence }),
            leaving.prop_map(Head::Leaving),
        ]
    }

    fn body_bytes(head: &Head) -> usize {
        match head {
            Head::Hello { .. } => SESSION_BYTES,
            Head::Call(call) => call.body_here(),
            Head::Reply(reply) => reply.body.into(),
            _ => 0,
        }
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(head in heads()) {
            let mut message = head.encode().to_vec();
            message.resize(HEAD_BYTES + body_bytes(&head), 7);
            let (decoded, body) = Head::decode(&message).unwrap();
            prop_assert_eq!(decoded, head);
            prop_assert_eq!(body.len(), body_bytes(&head));
            // One byte more or less is seen.
            message.push(0);
            let refused = matches!(Head::decode(&message), Err(Malformed::Body { .. }));
            prop_assert!(refused);
            message.truncate(message.len() - 2);
            prop_assert!(Head::decode(&message).is_err());
        }

        #[test]
        fn whatever_is_decoded_is_encoded_the_same(mut message in prop::collection::vec(any::<u8>(), 0..64), kind in 0u8..10) {
            if let Some(first) = message.first_mut() {
                *first = kind;
            }
            if let Ok((head, _)) = Head::decode(&message) {
                prop_assert_eq!(&head.encode()[..], &message[..HEAD_BYTES]);
            }
        }
    }

    #[test]
    fn a_body_in_the_payload_is_not_in_the_message() {
        let call = CallHead {
            service: 1,
            version: 1,
            method: 1,
            sequence: 1,
            unanswered: 0,
            body: 200,
            body_in_payload: true,
            is_offer: false,
            reply_room: 0,
            deadline_ms: 0,
        };
        let mut message = Head::Call(call).encode().to_vec();
        assert_eq!(Head::decode(&message).unwrap(), (Head::Call(call), &[][..]));
        message.extend([0; 200]);
        assert!(Head::decode(&message).is_err(), "not in both");
    }
}
