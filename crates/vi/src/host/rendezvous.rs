//! What two processes say to each other before they share memory, byte by byte.
//!
//! Messages are datagrams of 128 bytes on a Unix socket, all numbers little-endian:
//!
//! ```text
//! greeting (listener → connecting side)     region (either side, once connected)
//!   0  "HWRV"                                  0  "HWRV"
//!   4  kind = 1                                4  kind = 5
//!   8  layout version: u32                     8  layout version: u32
//!  16  Nic: 16 bytes                          16  region: u32
//!                                             20  kind of region: u32
//! connect = 2, accept = 3                     24  tag: u32
//!   0  "HWRV"                                 32  bytes: u64
//!   4  kind                                   + descriptor of the region
//!   8  layout version: u32
//!  12  flags: u32 (1 new pair, 2 new page,   refuse (listener → connecting side)
//!      4 this side's sleepers need fences)     0  "HWRV"
//!  16  Nic: 16 bytes                           4  kind = 4
//!  32  pair: 16 bytes                          8  layout version: u32
//!  48  bytes of the pair's region: u64        12  reason: u32
//!  56  offset of the VI's block: u64
//!  64  index of the first slot: u64
//!  72  depth: u32, 76  loans: u32
//!  80  serial: u32, 84  bell: u32
//!  88  queue: u64
//!  + descriptors: the region if the pair is new; page and wire if the page is new
//! ```

use highwire_mem::{CourierError, LAYOUT_VERSION, RegionError};
use rustix::io::Errno;

/// Bytes of every message.
pub(crate) const MESSAGE_BYTES: usize = 128;

const MAGIC: &[u8; 4] = b"HWRV";
const FLAG_NEW_PAIR: u32 = 1;
const FLAG_NEW_PAGE: u32 = 2;
const FLAG_NEEDS_FENCES: u32 = 4;
const FLAG_OWN_PAGE: u32 = 8;

/// A number that names a Nic, or a pair of them; nobody can guess it.
pub(crate) type Name = [u8; 16];

/// Why a listener says no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Another layout version.
    #[error("the versions differ")]
    Version,
    /// A user it does not allow.
    #[error("this user is not allowed")]
    User,
    /// More slots, loans or memory than it gives.
    #[error("the queue depths or sizes asked for are outside its limits")]
    Limits,
    /// A pair that it does not know (any more).
    #[error("it does not know this pair of processes")]
    UnknownPair,
    /// A descriptor that is missing or not safe.
    #[error("the memory handed over was refused")]
    BadMemory,
    /// It has no room for another VI.
    #[error("it has no room for another VI")]
    NoRoom,
    /// The message made no sense.
    #[error("the request was malformed")]
    Malformed,
    /// No descriptor is left in the listener's process.
    #[error("no descriptor is left in its process; raise its limit (ulimit -n), or close other connections to it")]
    NoDescriptors,
    /// The caller's user shares more memory with the listener's process than it may.
    #[error(
        "processes of this user share more memory with its process than it takes of one user (peer_bytes_total_max); close \
         other connections to it, or have it raise that"
    )]
    Allotment,
    /// No address space, or no memory, is left in the listener's process.
    #[error(
        "its process has no address space left (ulimit -v), or no memory; have it do with less, or raise its limit"
    )]
    NoMemory,
    /// Others called at the same time, and this caller had said nothing yet. It calls again by itself.
    #[error("very many call it at once; call again")]
    Overtaken,
}

impl Refusal {
    const ALL: [Refusal; 11] = [
        Refusal::Version,
        Refusal::User,
        Refusal::Limits,
        Refusal::UnknownPair,
        Refusal::BadMemory,
        Refusal::NoRoom,
        Refusal::Malformed,
        Refusal::NoDescriptors,
        Refusal::Allotment,
        Refusal::NoMemory,
        Refusal::Overtaken,
    ];

    /// Why a listener says no whose own system call failed.
    pub(crate) fn of_errno(errno: Option<Errno>) -> Refusal {
        match errno {
            Some(Errno::MFILE | Errno::NFILE) => Refusal::NoDescriptors,
            Some(Errno::NOMEM) => Refusal::NoMemory,
            _ => Refusal::NoRoom,
        }
    }

    /// Why a listener says no after this.
    pub(crate) fn of_courier(error: &CourierError) -> Refusal {
        match error {
            CourierError::NoDescriptors => Refusal::NoDescriptors,
            CourierError::Socket(errno) => Refusal::of_errno(Some(*errno)),
            CourierError::Closed | CourierError::TimedOut(_) | CourierError::TooLong(_) => Refusal::Malformed,
        }
    }

    /// Why a listener says no that did not take the memory handed to it.
    pub(crate) fn of_region(error: &RegionError) -> Refusal {
        match error {
            RegionError::Map(error) => match Errno::from_io_error(error) {
                Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Refusal::of_errno(Errno::from_io_error(error)),
                _ => Refusal::BadMemory,
            },
            RegionError::Allotment { .. } => Refusal::Allotment,
            _ => Refusal::BadMemory,
        }
    }

    fn number(self) -> u32 {
        Refusal::ALL.iter().position(|refusal| *refusal == self).map_or(0, |index| index as u32 + 1)
    }
}

/// One side's half of a connection: in `connect` and in `accept`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Half {
    pub new_pair: bool,
    pub new_page: bool,
    pub needs_fences: bool,
    /// The page is for this VI alone.
    pub own_page: bool,
    pub nic: Name,
    pub pair: Name,
    pub region_bytes: u64,
    pub block_offset: u64,
    pub first_index: u64,
    pub depth: u32,
    pub loans: u32,
    pub serial: u32,
    pub bell: u32,
    pub queue: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rendezvous {
    Greeting { version: u32, nic: Name },
    Connect { version: u32, half: Half },
    Accept { version: u32, half: Half },
    Refuse { version: u32, reason: Refusal },
    Region { region: u32, kind: u32, tag: u32, bytes: u64 },
}

impl Rendezvous {
    pub(crate) fn greeting(nic: Name) -> Rendezvous {
        Rendezvous::Greeting { version: LAYOUT_VERSION, nic }
    }

    pub(crate) fn connect(half: Half) -> Rendezvous {
        Rendezvous::Connect { version: LAYOUT_VERSION, half }
    }

    pub(crate) fn accept(half: Half) -> Rendezvous {
        Rendezvous::Accept { version: LAYOUT_VERSION, half }
    }

    pub(crate) fn refuse(reason: Refusal) -> Rendezvous {
        Rendezvous::Refuse { version: LAYOUT_VERSION, reason }
    }

    pub(crate) fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut out = Fields([0; MESSAGE_BYTES]);
        out.put(0, MAGIC);
        let (kind, version) = match *self {
            Rendezvous::Greeting { version, nic } => {
                out.put(16, &nic);
                (1, version)
            }
            Rendezvous::Connect { version, half } => {
                out.put_half(&half);
                (2, version)
            }
            Rendezvous::Accept { version, half } => {
                out.put_half(&half);
                (3, version)
            }
            Rendezvous::Refuse { version, reason } => {
                out.put(12, &reason.number().to_le_bytes());
                (4, version)
            }
            Rendezvous::Region { region, kind, tag, bytes } => {
                out.put(16, &region.to_le_bytes());
                out.put(20, &kind.to_le_bytes());
                out.put(24, &tag.to_le_bytes());
                out.put(32, &bytes.to_le_bytes());
                (5, LAYOUT_VERSION)
            }
        };
        out.put(4, &u32::to_le_bytes(kind));
        out.put(8, &version.to_le_bytes());
        out.0
    }

    /// `None` for anything that is not one of these messages. Versions are for the caller to judge:
    /// all versions keep the first 16 bytes and the greeting.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Rendezvous> {
        let bytes = Fields(bytes.try_into().ok()?);
        if &bytes.0[..4] != MAGIC {
            return None;
        }
        let version = bytes.u32(8);
        Some(match bytes.u32(4) {
            1 => Rendezvous::Greeting { version, nic: bytes.name(16) },
            2 => Rendezvous::Connect { version, half: bytes.half() },
            3 => Rendezvous::Accept { version, half: bytes.half() },
            4 => {
                let index = (bytes.u32(12) as usize).checked_sub(1)?;
                Rendezvous::Refuse { version, reason: *Refusal::ALL.get(index)? }
            }
            5 => Rendezvous::Region {
                region: bytes.u32(16),
                kind: bytes.u32(20),
                tag: bytes.u32(24),
                bytes: bytes.u64(32),
            },
            _ => return None,
        })
    }
}

struct Fields([u8; MESSAGE_BYTES]);

impl Fields {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.0[at + i]))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|i| self.0[at + i]))
    }

    fn name(&self, at: usize) -> Name {
        std::array::from_fn(|i| self.0[at + i])
    }

    fn put_half(&mut self, half: &Half) {
        let flag = |set: bool, bit: u32| if set { bit } else { 0 };
        let flags = flag(half.new_pair, FLAG_NEW_PAIR)
            | flag(half.new_page, FLAG_NEW_PAGE)
            | flag(half.needs_fences, FLAG_NEEDS_FENCES)
            | flag(half.own_page, FLAG_OWN_PAGE);
        self.put(12, &flags.to_le_bytes());
        self.put(16, &half.nic);
        self.put(32, &half.pair);
        self.put(48, &half.region_bytes.to_le_bytes());
        self.put(56, &half.block_offset.to_le_bytes());
        self.put(64, &half.first_index.to_le_bytes());
        self.put(72, &half.depth.to_le_bytes());
        self.put(76, &half.loans.to_le_bytes());
        self.put(80, &half.serial.to_le_bytes());
        self.put(84, &half.bell.to_le_bytes());
        self.put(88, &half.queue.to_le_bytes());
    }

    fn half(&self) -> Half {
        let flags = self.u32(12);
        Half {
            new_pair: flags & FLAG_NEW_PAIR != 0,
            new_page: flags & FLAG_NEW_PAGE != 0,
            needs_fences: flags & FLAG_NEEDS_FENCES != 0,
            own_page: flags & FLAG_OWN_PAGE != 0,
            nic: self.name(16),
            pair: self.name(32),
            region_bytes: self.u64(48),
            block_offset: self.u64(56),
            first_index: self.u64(64),
            depth: self.u32(72),
            loans: self.u32(76),
            serial: self.u32(80),
            bell: self.u32(84),
            queue: self.u64(88),
        }
    }
}

/// An unguessable name.
pub(crate) fn random_name() -> Name {
    let mut name = [0; 16];
    highwire_mem::fill_random(&mut name);
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_survive_the_wire(flags in 0u8..16, nic: Name, pair: Name, numbers: [u64; 4], small: [u32; 4]) {
            let half = Half {
                new_pair: flags & 1 != 0, new_page: flags & 2 != 0, needs_fences: flags & 4 != 0,
                own_page: flags & 8 != 0, nic, pair,
                region_bytes: numbers[0], block_offset: numbers[1], first_index: numbers[2], queue: numbers[3],
                depth: small[0], loans: small[1], serial: small[2], bell: small[3],
            };
            for message in [
                Rendezvous::greeting(nic), Rendezvous::connect(half), Rendezvous::accept(half),
                Rendezvous::refuse(Refusal::NoRoom),
                Rendezvous::Region { region: small[0], kind: small[1], tag: small[2], bytes: numbers[0] },
            ] {
                prop_assert_eq!(Rendezvous::decode(&message.encode()), Some(message));
            }
        }

        #[test]
        fn arbitrary_bytes_are_a_message_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Rendezvous::decode(&bytes);
        }
    }
}
