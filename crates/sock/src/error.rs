//! What goes wrong, in the words of `std::io`.

use highwire_mem::CourierError;
use highwire_vi::{AcceptError, ConnectError, Failure, ListenError, WireError};
use std::io::{Error, ErrorKind};

pub(crate) fn connecting(error: ConnectError) -> Error {
    let kind = match &error {
        ConnectError::Address(_) => ErrorKind::InvalidInput,
        ConnectError::NobodyThere { .. }
        | ConnectError::Refused { .. }
        | ConnectError::Courier { source: CourierError::Closed, .. } => ErrorKind::ConnectionRefused,
        ConnectError::Denied { .. } | ConnectError::NotAllowed { .. } | ConnectError::UserNotMapped { .. } => {
            ErrorKind::PermissionDenied
        }
        ConnectError::TimedOut { .. } => ErrorKind::TimedOut,
        ConnectError::Version { .. } | ConnectError::Protocol { .. } | ConnectError::BadMemory { .. } => {
            ErrorKind::InvalidData
        }
        ConnectError::NoWire(_) | ConnectError::ForkedChild => ErrorKind::Unsupported,
        ConnectError::Wire { reason, .. } => wire(reason),
        ConnectError::RuntimeDir(_)
        | ConnectError::Region(_)
        | ConnectError::NoRoom(_)
        | ConnectError::Courier { .. } => ErrorKind::Other,
    };
    Error::new(kind, error)
}

pub(crate) fn listening(error: ListenError) -> Error {
    let kind = match &error {
        ListenError::Address(_) => ErrorKind::InvalidInput,
        ListenError::InUse { .. } | ListenError::NotSocket(_) => ErrorKind::AddrInUse,
        ListenError::Io { source, .. } => source.kind(),
        ListenError::Wire { reason, .. } => wire(reason),
        ListenError::NoWire(_) | ListenError::ForkedChild => ErrorKind::Unsupported,
        ListenError::RuntimeDir(_) => ErrorKind::Other,
    };
    Error::new(kind, error)
}

pub(crate) fn accepting(error: AcceptError) -> Error {
    let kind = match &error {
        AcceptError::TimedOut(_) => ErrorKind::WouldBlock,
        AcceptError::Socket(source) => source.kind(),
        AcceptError::Wire(reason) => wire(reason),
        AcceptError::ForkedChild => ErrorKind::Unsupported,
    };
    Error::new(kind, error)
}

fn wire(error: &WireError) -> ErrorKind {
    match error {
        WireError::Address(_) => ErrorKind::InvalidInput,
        WireError::Name { .. } => ErrorKind::NotFound,
        WireError::InUse(_) => ErrorKind::AddrInUse,
        WireError::NoKey(_) | WireError::OtherUser { .. } => ErrorKind::PermissionDenied,
        WireError::NoOwners { .. } => ErrorKind::Unsupported,
        WireError::NoAnswer(_) | WireError::NotAccepted { .. } => ErrorKind::TimedOut,
        WireError::Refused { .. } => ErrorKind::ConnectionRefused,
        WireError::Over { .. } => ErrorKind::ConnectionReset,
        WireError::Socket(_) => ErrorKind::Other,
    }
}

/// The stream was reset: by the other side, or for this reason.
pub(crate) fn reset(failure: Option<Failure>) -> Error {
    match failure {
        None => Error::new(ErrorKind::ConnectionReset, "the other side closed the stream without reading all of it"),
        Some(failure) => Error::new(ErrorKind::ConnectionReset, Broken(failure)),
    }
}

/// This side said that it writes no more.
pub(crate) fn shut_down() -> Error {
    Error::new(ErrorKind::BrokenPipe, "this side shut the stream down for writing")
}

/// No process will read it: the other side closed the stream, or it was reset for this reason, which was told before.
pub(crate) fn broken_pipe(reset: Option<Failure>) -> Error {
    match reset {
        None => Error::new(ErrorKind::BrokenPipe, "the other side closed the stream"),
        Some(failure) => Error::new(ErrorKind::BrokenPipe, Broken(failure)),
    }
}

pub(crate) fn forked() -> Error {
    Error::new(ErrorKind::Unsupported, "a stream of the parent process; a forked child has to connect for itself")
}

#[derive(Debug, thiserror::Error)]
#[error("the stream is broken: {0}")]
struct Broken(Failure);
