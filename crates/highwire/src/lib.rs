//! Highwire: network I/O at wire speed, in user space, on ordinary Linux machines.
//!
//! A program opens its own network interface, a [`Nic`], and connects virtual interfaces, [`Vi`]s. An
//! address picks the path. On one host (`shm:name`) they are queues in memory that both processes map: a
//! message costs one cache line and no system call. To another (`udp:host:port`) they are sessions over
//! UDP, authenticated and encrypted with a key that both have. Start with [`Nic`];
//! `docs/architecture.md` shows the path of a message.
#![forbid(unsafe_code)]

mod nic;

/// Between hosts, beneath VIs: the engine, keys, and whole runs in virtual time.
pub use highwire_adapter as adapter;
pub use highwire_adapter::{Driver, KeyFileError, WireConfig, create_key, read_key};
pub use highwire_link::{Impairments, Recording, RecordingError, RecordingOptions, UdpOptions};
pub use highwire_mem::{Ticks, ticks, ticks_per_second};
/// The memory of other nodes as a store, and regions larger than the memory they may use.
pub use highwire_netmem as netmem;
pub use highwire_proto::{ClusterKey, Fingerprint, Keys, PacketSize, SessionInfo, Speculation};
pub use highwire_pulse::Pulse;
/// Calls, on this host and between hosts.
pub use highwire_rpc as rpc;
/// How a stream stands: see [`Stream::state`].
pub use highwire_sock::State as StreamState;
pub use highwire_sock::{
    ALSO_ACCEPT_VARIABLE, Incoming, KEY_VARIABLE, Listener, SockAddress, SockConfig, Sockets, Strategy, Stream,
};
#[cfg(feature = "tokio")]
pub use highwire_sock::{AsyncListener, AsyncStream};
// A name that is given here stands before the same name from there: `Nic` is ours.
pub use highwire_vi::*;
pub use nic::Nic;
