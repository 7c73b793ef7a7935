//! Shared memory between processes that do not trust each other, and the queues laid out in it.
//!
//! The way in is [`SlotWriter`] and [`SlotReader`]: the two ends of a ring of 256-byte slots. The
//! writer's slots live in memory that only it can write ([`OwnMemory`]); the reader maps them
//! read-only ([`PeerMemory`]) and publishes its progress in memory of its own. `docs/protocol/shared-memory.md`
//! describes every byte.
//!
//! Two rules hold everywhere in this crate, and they are why its unsafe code is sound:
//!
//! 1. No `&` or `&mut` is ever formed over memory that a peer can change. Words are read and
//!    written by atomic operations, bytes are copied in or out by instructions that the compiler cannot
//!    look into, so that other threads of this process may do anything that a peer may do. Words of
//!    memory that is mapped to be read are loaded relaxed, with a fence behind where order matters:
//!    no other load of such memory is defined.
//! 2. Whatever is read from a peer's memory is copied once and then checked. A value that cannot
//!    be true is a [`Lie`], which ends the connection and nothing else.
//!
//! All unsafe code of shared memory is here; the crates above forbid it.

mod area;
mod bell;
mod layout;
mod loans;
mod memory;
// Under loom only its own model uses it.
#[cfg(any(not(loom), test))]
mod owner_lock;
mod ring;
mod sync;

#[cfg(not(loom))]
mod allotment;
#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
mod copy;
#[cfg(not(loom))]
mod courier;
#[cfg(not(loom))]
mod credentials;
#[cfg(not(loom))]
mod extents;
#[cfg(not(loom))]
mod fork;
#[cfg(not(loom))]
mod granted;
#[cfg(not(loom))]
mod holes;
#[cfg(not(loom))]
mod lent;
#[cfg(not(loom))]
mod mapped_file;
#[cfg(not(loom))]
mod peer_bytes;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
mod random;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod sys;
#[cfg(not(loom))]
mod tcp;
#[cfg(not(loom))]
mod watcher;
#[cfg(not(loom))]
mod words;
#[cfg(not(loom))]
pub mod work;
#[cfg(not(loom))]
mod writers;

pub use area::{Extent, PayloadArea};
pub use bell::{Attention, BELLS_MAX, Bell, BellIndex, BellRope, News, WireUse};
pub use layout::{
    Block, BlockShape, CONTENT_BYTES, CONTROL_BYTES_MAX, HEAD_BYTES, LAYOUT_VERSION, REGION_HEADER_BYTES, SLOT_BYTES,
};
pub use loans::{LoanBook, ReleaseLog, ReleaseWatch};
pub use memory::{OwnMemory, PeerMemory, SharedMemory};
pub use ring::{CreditWatch, Flags, Kind, Lie, RawHead, SlotHead, SlotReader, SlotWatch, SlotWriter};

#[cfg(not(loom))]
pub use {
    allotment::Allotment,
    bell::BellPage,
    clock::{Ticks, ticks, ticks_per_second},
    courier::{Courier, CourierError, CourierListener, deadline},
    credentials::{Allow, Credentials, ProcessIdentity, mapped_user, peer_pidfd},
    extents::Extents,
    fork::Process,
    granted::{Granted, Window},
    lent::LentRegion,
    mapped_file::{MappedFile, Reading},
    owner_lock::{OwnerGuard, OwnerLock},
    peer_bytes::PeerBytes,
    pool::{Pool, PoolError},
    random::fill_random,
    region::{
        Buffer, Exported, Frozen, OwnRegion, PeerRegion, Region, RegionError, RegionKind, RemoteRegion, SharedBuffer,
        Tag,
    },
    sys::{
        KernelTooOld, Sleep, SleepOutcome, at_exit, cpus_allowed, current_cpu, heavy_barrier, heavy_barrier_available,
        keep_descriptors_from_programs, kernel_check, light_barrier, pause, run_like_anybody,
    },
    tcp::{TcpCounts, TcpState, bound_device, network_namespace, socket_names},
    watcher::{Watch, WatchKey, Watcher},
    words::Words,
    writers::has_writers,
};
