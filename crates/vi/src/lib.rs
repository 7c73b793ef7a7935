//! Virtual interfaces: a program's own connection to the network, used without the kernel.
//!
//! The way in is [`Nic`]; the centre is [`Vi`], a connected pair of work queues. Descriptors
//! ([`Message`], [`Receive`]) go in by value with their buffers and come back as [`Completion`]s,
//! success or not, so that safe code cannot touch what the other side is reading or writing.
//!
//! ```no_run
//! use highwire_vi::{Nic, Receive};
//! use std::time::Duration;
//!
//! let nic = Nic::open()?;
//! let mut vi = nic.connect("shm:echo")?;
//! let memory = nic.register(1 << 20)?;
//! vi.post_recv(Receive::new(1).into(memory.slice(0..8192)?))?;
//! vi.send_bytes(2, b"hello")?;
//! let done = vi.wait(Duration::from_secs(1))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Threads
//!
//! [`Nic`], [`ViListener`] and regions are `Send` and `Sync`. A [`Vi`] is `Send` but its methods take
//! `&mut self`: one thread uses it at a time, and no lock is on its path. [`Vi::split`] makes two
//! halves for two threads: one sends, one receives. A [`CompletionQueue`] watches many VIs, which
//! may belong to other threads. [`Background`] gives a VI a thread of its own.
#![forbid(unsafe_code)]

mod address;
mod background;
mod bells;
mod config;
mod descriptor;
mod ears;
mod error;
mod halves;
mod host;
mod listener;
mod member;
mod nic;
mod queue;
mod spin;
mod stream;
mod vi;
mod watch;
mod wire;

pub use address::Address;
pub use background::Background;
pub use config::{Config, Path, Reliability, ViOptions};
pub use descriptor::{
    Completion, Control, InPlace, Message, Operation, Payload, PayloadToken, QUIET, RdmaRead, RdmaWrite, Receive,
};
pub use error::{
    AcceptError, AddressError, ConnectError, Failure, GrantError, ListenError, NicError, PostError, Refused,
    RuntimeDirError, WaitError, WithdrawError,
};
pub use halves::{RecvQueue, RecvStats, SendQueue, SendStats};
pub use host::pulse_log::PulseRecord;
pub use host::remote::RemoteKey;
pub use host::rendezvous::Refusal;
pub use listener::ViListener;
pub use nic::Nic;
pub use queue::{Armed, CompletionQueue, Notify, QueueHandle};
pub use stream::{Combining, StreamReceiver, StreamRules, StreamSender, StreamWatch, Taken};
pub use vi::{PeerId, State, Vi, ViId};
pub use watch::Watch;

pub use highwire_mem::work::{Denial, Landings, Segment, Wire, WireError};
pub use highwire_mem::{
    Allow, Buffer, CONTROL_BYTES_MAX, Credentials, Exported, Frozen, KernelTooOld, Lie, PeerBytes, Pool, PoolError,
    Region, RegionError, SharedBuffer, Tag,
};
pub use highwire_pulse::Pulses;
