//! What two adapters tell each other about VIs and remote memory, on a VI of their own.
//!
//! ```text
//!  connects                                   listens
//!  Open { vi, reliable } ───────────────────▶  waits to be accepted
//!       ◀─────────────── Accepted { to, vi, reliable }, or Refused { to, reason }
//!  Closed { to, aborted } ──── from either ──▶
//!  Withdrawn { vi } ───── tired of waiting ──▶
//!
//!  wants to write                             owns the memory
//!  Request { write } ───────────────────────▶  checks it
//!       ◀───────────────────────────── Go { token }, or Denied { reason }
//!  payload, under the token ────────────────▶  it lands
//!       ◀───────────────────────────── Written
//!
//!  wants to read                              owns the memory
//!  Request { read, token } ─────────────────▶  checks it
//!       ◀───────────── payload, under the token, or Denied { reason }
//! ```

use highwire_mem::work::Denial;

/// The VI that notes go by; each session has it from the beginning [W-64].
pub(crate) const NOTES: u32 = 1;
/// The first number for other VIs.
pub(crate) const FIRST_VI: u32 = 2;
/// Notes that may be under way to one side.
pub(crate) const NOTES_MAX: usize = 64;

/// A note, in the control part of a message: twelve bytes [W-65], those about remote memory more [W-80].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// Its sender wants a VI; `vi` is its number for it.
    Open { vi: u32, reliable: bool },
    /// VI `to` of the receiver is connected with VI `vi` of the sender.
    Accepted { to: u32, vi: u32, reliable: bool },
    /// VI `to` of the receiver will not be connected.
    Refused { to: u32, reason: Refusal },
    /// VI `to` of the receiver is closed at the other end.
    Closed { to: u32, aborted: bool },
    /// Its sender has given up waiting for VI `vi`.
    Withdrawn { vi: u32 },
    /// The sender of VI `to` wants to write or to read memory of the receiver's.
    Request { to: u32, request: Request },
    /// Write `id` of VI `to` is as it should be: its payload is expected under `token`.
    Go { to: u32, id: u32, token: u64 },
    /// Write `id` of VI `to` is in its place.
    Written { to: u32, id: u32 },
    /// Write or read `id` of VI `to` came to nothing.
    Denied { to: u32, id: u32, verdict: Verdict },
}

/// What one side wants of the other's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub kind: RequestKind,
    /// Its sender's number for it.
    pub id: u32,
    pub handle: u32,
    pub tag: u32,
    pub offset: u64,
    pub length: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Write,
    /// The payload is expected under `token`.
    Read {
        token: u64,
    },
}

/// Why not. Where the range ends is known to who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    NotGranted,
    WrongTag,
    OutOfRange { bytes: u64 },
    ReadOnly,
    Withdrawn,
    Busy,
    Mismatch,
}

impl Verdict {
    fn number(self) -> u8 {
        match self {
            Verdict::NotGranted => 0,
            Verdict::WrongTag => 1,
            Verdict::OutOfRange { .. } => 2,
            Verdict::ReadOnly => 3,
            Verdict::Withdrawn => 4,
            Verdict::Busy => 5,
            Verdict::Mismatch => 6,
        }
    }

    /// What a later version may give for a reason is no grant.
    fn from_number(number: u8, bytes: u64) -> Verdict {
        match number {
            1 => Verdict::WrongTag,
            2 => Verdict::OutOfRange { bytes },
            3 => Verdict::ReadOnly,
            4 => Verdict::Withdrawn,
            5 => Verdict::Busy,
            6 => Verdict::Mismatch,
            _ => Verdict::NotGranted,
        }
    }

    /// What whoever asked is told of a range that was to end at `end`.
    pub(crate) fn denial(self, end: u64) -> Denial {
        match self {
            Verdict::NotGranted => Denial::NotGranted,
            Verdict::WrongTag => Denial::WrongTag,
            Verdict::OutOfRange { bytes } => Denial::OutOfRange { end, bytes },
            Verdict::ReadOnly => Denial::ReadOnly,
            Verdict::Withdrawn => Denial::Withdrawn,
            Verdict::Busy => Denial::Busy,
            Verdict::Mismatch => Denial::Mismatch,
        }
    }
}

/// Why a VI is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Nobody listens any more.
    NobodyThere,
    /// Too many wait to be accepted, or too many VIs are open.
    Busy,
}

impl Refusal {
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Refusal::NobodyThere => "nobody listens there any more",
            Refusal::Busy => "too many connections are open or wait there",
        }
    }
}

impl Note {
    pub(crate) fn encode(self) -> Vec<u8> {
        let (kind, detail, to, vi) = match self {
            Note::Open { vi, reliable } => (1, u8::from(reliable), 0, vi),
            Note::Accepted { to, vi, reliable } => (2, u8::from(reliable), to, vi),
            Note::Refused { to, reason } => (3, if reason == Refusal::Busy { 1 } else { 0 }, to, 0),
            Note::Closed { to, aborted } => (4, u8::from(aborted), to, 0),
            Note::Withdrawn { vi } => (5, 0, 0, vi),
            Note::Request { to, request: Request { kind: RequestKind::Write, id, .. } } => (6, 0, to, id),
            Note::Request { to, request: Request { kind: RequestKind::Read { .. }, id, .. } } => (7, 0, to, id),
            Note::Go { to, id, .. } => (8, 0, to, id),
            Note::Written { to, id } => (9, 0, to, id),
            Note::Denied { to, id, verdict } => (10, verdict.number(), to, id),
        };
        let mut bytes = vec![kind, detail, 0, 0];
        bytes.extend_from_slice(&u32::to_le_bytes(to));
        bytes.extend_from_slice(&u32::to_le_bytes(vi));
        match self {
            Note::Request { request: Request { kind, handle, tag, offset, length, .. }, .. } => {
                bytes.extend_from_slice(&handle.to_le_bytes());
                bytes.extend_from_slice(&tag.to_le_bytes());
                bytes.extend_from_slice(&offset.to_le_bytes());
                bytes.extend_from_slice(&length.to_le_bytes());
                if let RequestKind::Read { token } = kind {
                    bytes.extend_from_slice(&token.to_le_bytes());
                }
            }
            Note::Go { token, .. } => bytes.extend_from_slice(&token.to_le_bytes()),
            Note::Denied { verdict: Verdict::OutOfRange { bytes: region }, .. } => {
                bytes.extend_from_slice(&region.to_le_bytes());
            }
            _ => {}
        }
        bytes
    }

    /// `None` for what a later version may say: it is passed over.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Note> {
        let mut rest = bytes;
        let [kind, detail, _, _] = take::<4>(&mut rest)?;
        let (to, vi) = (take_u32(&mut rest)?, take_u32(&mut rest)?);
        let yes = detail == 1;
        match kind {
            1 => Some(Note::Open { vi, reliable: yes }),
            2 => Some(Note::Accepted { to, vi, reliable: yes }),
            3 => Some(Note::Refused { to, reason: if yes { Refusal::Busy } else { Refusal::NobodyThere } }),
            4 => Some(Note::Closed { to, aborted: yes }),
            5 => Some(Note::Withdrawn { vi }),
            6 | 7 => {
                let (handle, tag) = (take_u32(&mut rest)?, take_u32(&mut rest)?);
                let (offset, length) = (take_u64(&mut rest)?, take_u64(&mut rest)?);
                let kind =
                    if kind == 6 { RequestKind::Write } else { RequestKind::Read { token: take_u64(&mut rest)? } };
                Some(Note::Request { to, request: Request { kind, id: vi, handle, tag, offset, length } })
            }
            8 => Some(Note::Go { to, id: vi, token: take_u64(&mut rest)? }),
            9 => Some(Note::Written { to, id: vi }),
            10 => {
                let region = if detail == 2 { take_u64(&mut rest)? } else { 0 };
                Some(Note::Denied { to, id: vi, verdict: Verdict::from_number(detail, region) })
            }
            _ => None,
        }
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*first)
}

fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).map(u32::from_le_bytes)
}

fn take_u64(bytes: &mut &[u8]) -> Option<u64> {
    take(bytes).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_were_written() {
        for note in [
            Note::Open { vi: 7, reliable: true },
            Note::Open { vi: 8, reliable: false },
            Note::Accepted { to: 7, vi: u32::MAX, reliable: true },
            Note::Refused { to: 7, reason: Refusal::Busy },
            Note::Refused { to: 7, reason: Refusal::NobodyThere },
            Note::Closed { to: 3, aborted: true },
            Note::Withdrawn { vi: 9 },
            Note::Request { to: 5, request: request(RequestKind::Write) },
            Note::Request { to: 5, request: request(RequestKind::Read { token: u64::MAX - 3 }) },
            Note::Go { to: 5, id: 8, token: 1 << 40 },
            Note::Written { to: 5, id: 8 },
            Note::Denied { to: 5, id: 8, verdict: Verdict::OutOfRange { bytes: 1 << 40 } },
            Note::Denied { to: 5, id: 8, verdict: Verdict::NotGranted },
            Note::Denied { to: 5, id: 8, verdict: Verdict::WrongTag },
            Note::Denied { to: 5, id: 8, verdict: Verdict::ReadOnly },
            Note::Denied { to: 5, id: 8, verdict: Verdict::Withdrawn },
            Note::Denied { to: 5, id: 8, verdict: Verdict::Busy },
            Note::Denied { to: 5, id: 8, verdict: Verdict::Mismatch },
        ] {
            let bytes = note.encode();
            assert_eq!(Note::decode(&bytes), Some(note));
            for length in 0..bytes.len() {
                assert_eq!(Note::decode(&bytes[..length]), None, "{note:?}");
            }
        }
        assert_eq!(Note::decode(&[11; 44]), None);
    }

    fn request(kind: RequestKind) -> Request {
        Request { kind, id: 8, handle: 3, tag: 4, offset: u64::MAX, length: 1 << 33 }
    }
}
