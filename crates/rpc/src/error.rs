//! What can become of a call other than its answer.

use crate::head::{Leaving, Malformed};
use highwire_vi::{ConnectError, Failure, Payload, PostError, RegionError, WaitError};
use std::time::Duration;

/// Why a call has no answer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CallError {
    /// The server has no such service. It did not run.
    #[error("the server has no service {service:#010x}; is the address that of another program?")]
    UnknownService {
        /// Which.
        service: u32,
    },
    /// The server has the service in another version. It did not run.
    #[error(
        "the server has version {has} of service {service:#010x}, this program speaks {asked}; update the older one"
    )]
    UnknownVersion {
        /// Which service.
        service: u32,
        /// The caller's version.
        asked: u16,
        /// The server's.
        has: u16,
    },
    /// The service has no such method. It did not run.
    #[error("service {service:#010x} has no method {method}")]
    UnknownMethod {
        /// Which service.
        service: u32,
        /// Which method.
        method: u16,
    },
    /// The server could not decode the arguments. It did not run.
    #[error("the server could not decode the arguments; are both sides built from the same service?")]
    BadArguments,
    /// The result could not be decoded. It ran.
    #[error("the result could not be decoded; are both sides built from the same service?")]
    BadResult,
    /// The payload of the answer does not fit the buffer that was named. It ran.
    #[error("the answer's payload of {bytes} bytes is larger than the {room} bytes of room for it")]
    PayloadTooLarge {
        /// Bytes of the payload.
        bytes: u64,
        /// Bytes of the buffers named.
        room: u64,
    },
    /// The payload of the call is larger than the server takes. It did not run.
    #[error("the call's payload of {bytes} bytes is larger than the {most} that the server takes; send it in pieces")]
    RequestTooLarge {
        /// Bytes of the payload.
        bytes: u64,
        /// What it takes.
        most: u64,
    },
    /// More room for an answer than there can be. It did not run.
    #[error("{bytes} bytes of room for an answer are more than {most}")]
    RoomTooLarge {
        /// Bytes of the buffers named.
        bytes: u64,
        /// Bytes that there can be.
        most: u64,
    },
    /// There is no memory here for its arguments, or for the payload of its answer. It did not run.
    #[error("there is no memory for {bytes} bytes of a call; is a limit of memory or descriptors reached?")]
    NoMemory {
        /// Bytes asked for.
        bytes: usize,
    },
    /// More bytes of arguments than a call carries. It did not run.
    #[error("{bytes} bytes of arguments are more than {most}; send large data as payload")]
    ArgumentsTooLong {
        /// Bytes given.
        bytes: usize,
        /// Bytes that a call carries.
        most: usize,
    },
    /// The result is longer than results may be. It ran.
    #[error("a result of {bytes} bytes is more than an answer carries; the service is to return large data as payload")]
    ResultTooLong {
        /// Its bytes.
        bytes: u64,
    },
    /// The deadline passed. It may have run, and may run yet.
    #[error("the deadline of {after:?} has passed; the call may or may not have run")]
    DeadlinePassed {
        /// How long it was given.
        after: Duration,
    },
    /// The deadline had passed when the server came to it. It did not run.
    #[error("the deadline had passed before the server began; the call did not run")]
    TooLate,
    /// It was given up. It may have run, and may run yet, unless it had not been sent.
    #[error("the call was given up; it may or may not have run")]
    Cancelled,
    /// The handler panicked. It ran, in part.
    #[error("the handler panicked; the server's standard error says where")]
    Panicked,
    /// The server is shutting down. It did not run.
    #[error("the server is shutting down, and did not begin the call")]
    ServerLeaving,
    /// The server has as many calls waiting as it may. It did not run.
    #[error("the server has as many calls waiting as it may; try again later")]
    ServerBusy,
    /// It ran once; its answer was lost with a connection and is too large to be kept, or the server had no memory to
    /// make it.
    #[error("the call ran, and its answer was lost; only calls that may be repeated are answered again")]
    AnswerForgotten,
    /// The connection was lost, and nobody can say whether it ran.
    #[error("the call may or may not have run: {0}")]
    OutcomeUnknown(Box<Lost>),
    /// The connection was lost, or never came about. It did not run.
    #[error("the call was not sent: {0}")]
    NotSent(Box<Lost>),
    /// As many calls are outstanding as may be, and it was not to wait. It did not run.
    #[error("{outstanding} calls are outstanding, as many as may be; wait for one of them")]
    WindowFull {
        /// How many.
        outstanding: u32,
    },
    /// A blocking call was made, or waited for, where nothing may block. It did not run, unless it was started before.
    #[error(
        "a blocking call inside a continuation or a quick handler would stall the very loop that brings its answer"
    )]
    WouldStall,
    /// A buffer that cannot be used. It did not run.
    #[error("a buffer of the call cannot be used: {0}")]
    Buffer(Box<PostError>),
    /// Room for an answer in memory that others read. It did not run.
    #[error("an answer can only land in a buffer that is the caller's alone")]
    SharedRoom,
    /// Used in a forked child.
    #[error("this client belongs to the parent process; connect in the child")]
    ForkedChild,
}

/// Whether a call that failed has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did not run, and will not: it can be made again without harm.
    DidNotRun,
    /// It ran, once and perhaps not to its end.
    Ran,
    /// It may have run, or may run yet.
    Unknown,
}

impl CallError {
    /// Whether the call has run: what decides whether it can be made again.
    pub fn outcome(&self) -> Outcome {
        match self {
            CallError::UnknownService { .. }
            | CallError::UnknownVersion { .. }
            | CallError::UnknownMethod { .. }
            | CallError::BadArguments
            | CallError::RequestTooLarge { .. }
            | CallError::RoomTooLarge { .. }
            | CallError::NoMemory { .. }
            | CallError::ArgumentsTooLong { .. }
            | CallError::TooLate
            | CallError::ServerLeaving
            | CallError::ServerBusy
            | CallError::NotSent(_)
            | CallError::WindowFull { .. }
            | CallError::Buffer(_)
            | CallError::SharedRoom => Outcome::DidNotRun,
            CallError::BadResult
            | CallError::PayloadTooLarge { .. }
            | CallError::ResultTooLong { .. }
            | CallError::Panicked
            | CallError::AnswerForgotten => Outcome::Ran,
            CallError::DeadlinePassed { .. }
            | CallError::Cancelled
            | CallError::OutcomeUnknown(_)
            // These two also end calls that were started before.
            | CallError::WouldStall
            | CallError::ForkedChild => Outcome::Unknown,
        }
    }
}

/// Why a session with a server went on no longer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Lost {
    /// The connection ended, and could not be made again in time.
    #[error("the connection ended ({failure}), and none came about again within {within:?}: {last}")]
    Ended {
        /// Why it ended.
        failure: Failure,
        /// How long was tried.
        within: Duration,
        /// Why the last attempt failed.
        last: String,
    },
    /// The server has started anew since, and knows nothing of the session.
    #[error("the server has started anew, or has given up the session")]
    ServerForgot,
    /// Another client has taken the session.
    #[error("another client uses the same session")]
    SessionTaken,
    /// The server refused the connection, or was given up for this reason, with the call's payload on its way.
    #[error("the server refused, or was given up: {0:?}")]
    Refused(Leaving),
    /// The client was closed.
    #[error("the client was closed")]
    Closed,
    /// The connection was made again, and the call could not be sent by it.
    #[error("the connection ended after it was sent, and it could not be sent again: {0}")]
    NotSentAgain(CallError),
}

/// Why a client could not connect.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Nobody is there, or nobody may be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// Memory for messages could not be had.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Whoever listens there said nothing, or no longer.
    #[error("whoever listens at {address} does not answer as a server of calls does: {reason}")]
    NoWelcome {
        /// Where.
        address: String,
        /// What came of waiting for it.
        reason: WaitError,
    },
    /// Whoever listens there says what cannot be.
    #[error("whoever listens at {address} is not a server of calls: {reason}")]
    NotRpc {
        /// Where.
        address: String,
        /// What is wrong with it.
        reason: Malformed,
    },
    /// The server refused.
    #[error("the server at {address} refused: {why:?}")]
    Refused {
        /// Where.
        address: String,
        /// Why.
        why: Leaving,
    },
    /// The two speak different versions.
    #[error(
        "the server at {address} speaks version {theirs} of the protocol, this program {ours}; update the older one"
    )]
    Version {
        /// Where.
        address: String,
        /// The server's.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// A thread could not be started.
    #[error("a thread could not be started: {0}; is the process limit (ulimit -u) exhausted?")]
    Thread(#[source] std::io::Error),
}

/// A call without an answer. Its buffers are back, all but those that the server may still be reading: these return to
/// their pool or region by themselves.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failed {
    /// What became of it.
    #[source]
    pub error: CallError,
    /// The payload that was sent.
    pub sent: Payload,
    /// The room for the answer's.
    pub room: Payload,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outcome_is_what_the_error_says_in_words() {
        let lost = || Box::new(Lost::Closed);
        let cases = [
            (CallError::BadArguments, Outcome::DidNotRun),
            (CallError::NoMemory { bytes: 1 }, Outcome::DidNotRun),
            (CallError::ServerBusy, Outcome::DidNotRun),
            (CallError::NotSent(lost()), Outcome::DidNotRun),
            (CallError::TooLate, Outcome::DidNotRun),
            (CallError::BadResult, Outcome::Ran),
            (CallError::Panicked, Outcome::Ran),
            (CallError::AnswerForgotten, Outcome::Ran),
            (CallError::PayloadTooLarge { bytes: 2, room: 1 }, Outcome::Ran),
            (CallError::Cancelled, Outcome::Unknown),
            (CallError::DeadlinePassed { after: Duration::ZERO }, Outcome::Unknown),
            (CallError::OutcomeUnknown(lost()), Outcome::Unknown),
            (CallError::OutcomeUnknown(Box::new(Lost::NotSentAgain(CallError::SharedRoom))), Outcome::Unknown),
        ];
        for (error, outcome) in cases {
            assert_eq!(error.outcome(), outcome, "{error}");
        }
    }
}
