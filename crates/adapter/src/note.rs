//! What two adapters tell each other about VIs, on a VI of their own.
//!
//! ```text
//!  connects                                   listens
//!  Open { vi, reliable } ───────────────────▶  waits to be accepted
//!       ◀─────────────── Accepted { to, vi, reliable }, or Refused { to, reason }
//!  Closed { to, aborted } ──── from either ──▶
//!  Withdrawn { vi } ───── tired of waiting ──▶
//! ```

/// The VI that notes go by; each session has it from the beginning [W-64].
pub(crate) const NOTES: u32 = 1;
/// The first number for other VIs.
pub(crate) const FIRST_VI: u32 = 2;
/// Notes that may be under way to one side.
pub(crate) const NOTES_MAX: usize = 64;

/// A note, twelve bytes in the control part of a message [W-65].
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
        };
        let mut bytes = vec![kind, detail, 0, 0];
        bytes.extend_from_slice(&u32::to_le_bytes(to));
        bytes.extend_from_slice(&u32::to_le_bytes(vi));
        bytes
    }

    /// `None` for what a later version may say: it is passed over.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Note> {
        let (head, rest) = bytes.split_first_chunk::<4>()?;
        let (to, rest) = rest.split_first_chunk::<4>()?;
        let (vi, _) = rest.split_first_chunk::<4>()?;
        let (to, vi) = (u32::from_le_bytes(*to), u32::from_le_bytes(*vi));
        let yes = head[1] == 1;
        match head[0] {
            1 => Some(Note::Open { vi, reliable: yes }),
            2 => Some(Note::Accepted { to, vi, reliable: yes }),
            3 => Some(Note::Refused { to, reason: if yes { Refusal::Busy } else { Refusal::NobodyThere } }),
            4 => Some(Note::Closed { to, aborted: yes }),
            5 => Some(Note::Withdrawn { vi }),
            _ => None,
        }
    }
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
        ] {
            assert_eq!(Note::decode(&note.encode()), Some(note));
            for length in 0..12 {
                assert_eq!(Note::decode(&note.encode()[..length]), None);
            }
        }
        assert_eq!(Note::decode(&[9; 12]), None);
    }
}
