//! What can go wrong, one small enum for each operation, with the numbers in them.

use highwire_mem::work::{Denial, WireError};
use highwire_mem::{CourierError, KernelTooOld, Lie, RegionError, Tag};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a Nic could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The kernel lacks what is needed.
    #[error(transparent)]
    Kernel(#[from] KernelTooOld),
    /// A limit in the configuration that cannot be.
    #[error("the configuration says {name} = {value}, but {rule}")]
    Config {
        /// Which limit.
        name: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// The watcher thread or its descriptors could not be had.
    #[error("the watcher could not be started: {0}; is the descriptor or process limit (ulimit -n, -u) exhausted?")]
    Watcher(#[source] io::Error),
    /// Shared memory could not be had.
    #[error(transparent)]
    Region(#[from] RegionError),
}

/// Why an address is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// No known scheme.
    #[error("{0:?} is not an address; write shm:NAME, shm:/PATH or udp:HOST:PORT")]
    Scheme(String),
    /// A name with characters or a length that names do not have.
    #[error("{0:?} is not a name: use 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.'")]
    Name(String),
    /// A path longer than a Unix socket's may be.
    #[error("{path:?} has {bytes} bytes; the path of a Unix socket has at most 100")]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
}

/// Why the runtime directory is not used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeDirError {
    /// It is not there.
    #[error("the runtime directory {0:?} is missing; create it (mkdir -m 700 {0:?}) or set HIGHWIRE_RUNTIME_DIR")]
    Missing(PathBuf),
    /// It is something else.
    #[error("{0:?} is not a directory; remove it or set HIGHWIRE_RUNTIME_DIR to a directory of yours")]
    NotDirectory(PathBuf),
    /// It belongs to somebody else.
    #[error(
        "the runtime directory {path:?} belongs to user {owner}, not to user {user}; set HIGHWIRE_RUNTIME_DIR to a directory of yours"
    )]
    NotOurs {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// We.
        user: u32,
    },
    /// This user namespace does not map its owner, whose number many users share.
    #[error(
        "the runtime directory {path:?} belongs to a user whom this user namespace does not map, and who could be anybody; \
         map that user (see /proc/self/uid_map) or set HIGHWIRE_RUNTIME_DIR to a directory of yours"
    )]
    OwnerNotMapped {
        /// The directory.
        path: PathBuf,
    },
    /// Others could replace what is in it.
    #[error("the runtime directory {path:?} has mode {mode:03o}: others may write it; run chmod 700 {path:?}")]
    WritableByOthers {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The system says no.
    #[error("the runtime directory {path:?} cannot be used: {source}")]
    Io {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why nobody can listen at an address.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Not an address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// No place for the name.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// Another process listens there.
    #[error("{address:?} is in use: another process listens there; stop it or take another name")]
    InUse {
        /// The address.
        address: String,
    },
    /// A path that is something else than a socket of ours.
    #[error("{0:?} exists and is not a socket; remove it or listen elsewhere")]
    NotSocket(PathBuf),
    /// The system says no.
    #[error("cannot listen at {path:?}: {source}")]
    Io {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is no way to other hosts, or not at this address.
    #[error("cannot listen at {address:?}: {reason}")]
    Wire {
        /// Where.
        address: String,
        /// Why.
        reason: WireError,
    },
    /// The Nic was opened without a way to other hosts.
    #[error("{0:?} is an address of other hosts, and this Nic has no way there; open it with highwire::Nic")]
    NoWire(String),
    /// Used in a forked child.
    #[error("this Nic belongs to the parent process; open one in the child")]
    ForkedChild,
}

/// Why a connection did not come about.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Not an address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// No place for the name.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// Nobody listens.
    #[error("nobody listens at {address:?}; start the other side first, as the same user, or check the name")]
    NobodyThere {
        /// The address.
        address: String,
    },
    /// The socket may not be used by this user.
    #[error("{address:?} does not admit this user; the listener must allow it")]
    Denied {
        /// The address.
        address: String,
    },
    /// Another user's process listens there.
    #[error("{address:?} is served by user {uid}, whom this side does not allow")]
    NotAllowed {
        /// The address.
        address: String,
        /// Whose process it is.
        uid: u32,
    },
    /// The process that listens there belongs to a user that this user namespace does not map.
    #[error(
        "{address:?} is served by a user whom this user namespace does not map, and who could be anybody; map that user \
         (see /proc/self/uid_map) or allow everyone"
    )]
    UserNotMapped {
        /// The address.
        address: String,
    },
    /// It did not answer in time.
    #[error(
        "{address:?} did not answer within {timeout:?}; is its process accepting, or out of descriptors (ulimit -n)?"
    )]
    TimedOut {
        /// The address.
        address: String,
        /// The time given.
        timeout: Duration,
    },
    /// It said no.
    #[error("{address:?} refused the connection: {reason}")]
    Refused {
        /// The address.
        address: String,
        /// Why.
        reason: crate::host::rendezvous::Refusal,
    },
    /// It speaks another version.
    #[error("{address:?} speaks layout version {theirs}, this side {ours}; run the same version on both sides")]
    Version {
        /// The address.
        address: String,
        /// Its version.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// What it sent makes no sense.
    #[error("{address:?} does not keep to the rendezvous protocol: {what}")]
    Protocol {
        /// The address.
        address: String,
        /// What is wrong.
        what: &'static str,
    },
    /// The memory it handed over is not safe to use.
    #[error("{address:?} handed over memory that is refused: {source}")]
    BadMemory {
        /// The address.
        address: String,
        /// Why.
        source: RegionError,
    },
    /// Our own memory could not be had.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The region for this peer has no room for another VI.
    #[error("no room for another VI: {0}")]
    NoRoom(&'static str),
    /// The socket failed.
    #[error("connecting to {address:?} failed: {source}")]
    Courier {
        /// The address.
        address: String,
        /// Why.
        source: CourierError,
    },
    /// The other host was not reached.
    #[error("connecting to {address:?} failed: {reason}")]
    Wire {
        /// The address.
        address: String,
        /// Why.
        reason: WireError,
    },
    /// The Nic was opened without a way to other hosts.
    #[error("{0:?} is an address of other hosts, and this Nic has no way there; open it with highwire::Nic")]
    NoWire(String),
    /// Used in a forked child.
    #[error("this Nic belongs to the parent process; open one in the child")]
    ForkedChild,
}

/// Why no connection was accepted.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// Nobody came in time.
    #[error("nobody connected within {0:?}")]
    TimedOut(Duration),
    /// The listening socket failed.
    #[error("the listening socket failed: {0}; is the descriptor limit (ulimit -n) exhausted?")]
    Socket(#[source] io::Error),
    /// The port of an adapter failed.
    #[error(transparent)]
    Wire(WireError),
    /// Used in a forked child.
    #[error("this listener belongs to the parent process; open one in the child")]
    ForkedChild,
}

/// Why a descriptor was not taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PostError {
    /// The VI is no longer connected.
    #[error("the VI is not connected: {0}")]
    NotConnected(Failure),
    /// Too many descriptors wait already.
    #[error("{limit} descriptors are already waiting; poll for completions first")]
    QueueFull {
        /// The limit in force.
        limit: usize,
    },
    /// No room to copy the bytes now.
    #[error("no room for {bytes} bytes now; the other side has to read first")]
    NoRoom {
        /// Bytes to be copied.
        bytes: usize,
    },
    /// A region of another protection tag.
    #[error("the buffer's region has {buffer:?}, the VI has {vi:?}")]
    WrongTag {
        /// The buffer's.
        buffer: Tag,
        /// The VI's.
        vi: Tag,
    },
    /// More control bytes than a message carries.
    #[error("{bytes} control bytes; a message carries at most 128")]
    ControlTooLong {
        /// Bytes given.
        bytes: usize,
    },
    /// More segments than a message carries.
    #[error("{segments} segments; a message carries at most {limit}")]
    TooManySegments {
        /// Segments given.
        segments: usize,
        /// The limit in force.
        limit: usize,
    },
    /// Longer than messages may be.
    #[error("a message of {bytes} bytes; the limit is {limit}")]
    TooLong {
        /// Bytes given.
        bytes: u64,
        /// The limit in force.
        limit: u64,
    },
    /// A region that is yet to be frozen cannot be sent from.
    #[error("the buffer's region is made to be frozen; freeze it before sending from it")]
    NotFrozenYet,
    /// A key that the peer did not grant.
    #[error("region {region} was not granted by the peer")]
    UnknownRegion {
        /// The region in the key.
        region: u32,
    },
    /// A range that is not inside the remote region.
    #[error("offset {offset} + {bytes} is outside the remote region of {region_bytes} bytes")]
    OutOfRange {
        /// Offset asked for.
        offset: u64,
        /// Bytes to be moved.
        bytes: u64,
        /// Bytes of the region.
        region_bytes: u64,
    },
    /// A remote region that may only be read.
    #[error("remote region {region} may only be read; its owner must export it for writing")]
    ReadOnly {
        /// The region in the key.
        region: u32,
    },
    /// A payload token that is already expected.
    #[error("payload token {0} is already expected")]
    TokenInUse(u64),
    /// The region could not be handed to the peer.
    #[error("the buffer's region could not be handed over: {0}")]
    Handover(GrantError),
    /// Used in a forked child.
    #[error("this VI belongs to the parent process; open a Nic in the child")]
    ForkedChild,
}

/// A descriptor that was not taken, with the reason.
#[derive(thiserror::Error)]
#[error("{reason}")]
pub struct Refused<D> {
    /// Why.
    pub reason: PostError,
    /// The descriptor, buffers and all.
    pub descriptor: D,
}

impl<D> std::fmt::Debug for Refused<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Refused({:?})", self.reason)
    }
}

/// How an operation, or a whole VI, failed.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The peer process died.
    #[error("the peer process died")]
    PeerDied,
    /// The peer disconnected in good order.
    #[error("the peer disconnected")]
    PeerClosed,
    /// The peer disconnected with sends outstanding, which are void.
    #[error("the peer aborted the connection")]
    PeerAborted,
    /// Nothing was heard of the peer, on another host, for so long: it died, or the network is down.
    #[error("nothing was heard of the peer for {0:?}: it died, or the network is down")]
    PeerSilent(Duration),
    /// A session sealed all the packets that its keys may, and the peer acknowledged no change of keys.
    #[error("the keys of the session are used up")]
    KeysUsedUp,
    /// A packet of the session could not be sealed, which is a fault of this side.
    #[error("a packet of the session could not be sealed: connect again, and report it")]
    NotSealed,
    /// The key of the session is not accepted any more, here or by the peer.
    #[error("the key of the session is not accepted any more: give both sides the present one, and connect again")]
    KeyRemoved,
    /// This machine or process was put back to an earlier state, from a snapshot or a checkpoint, where its sessions to
    /// other hosts cannot go on.
    #[error("this machine or process was put back to an earlier state, which ends its sessions: connect again")]
    Restored,
    /// This side disconnected.
    #[error("this side disconnected")]
    Closed,
    /// The peer's memory says what cannot be true.
    #[error("the peer lies: {0}")]
    PeerLied(#[from] Lie),
    /// The message is longer than the buffer. On one host it stays for the next receive; from another
    /// host it is dropped, since nothing holds it here.
    #[error("a message of {message} bytes does not fit the posted buffer of {buffer} bytes")]
    TooLong {
        /// Bytes of the message.
        message: u64,
        /// Bytes of the buffer.
        buffer: u64,
    },
    /// The owner of memory on another host did not let this side write or read it. The VI goes on.
    #[error("{0}")]
    Denied(Denial),
    /// The receive was revoked before anything landed.
    #[error("the expected payload was revoked")]
    Revoked,
    /// There was no room, and the VI is unreliable.
    #[error("there was no room, and the VI is unreliable")]
    Dropped,
    /// The peer handed over a region for which this process had no descriptor or no memory, or which is more than the
    /// peer's user may share with it.
    #[error(
        "this process has no descriptor or no memory left for a region of the peer, or takes no more of the peer's user; raise \
         its limits (ulimit -n, -v, peer_bytes_total_max), or have it do with fewer"
    )]
    Exhausted,
    /// Used in a forked child.
    #[error("this VI belongs to the parent process; open a Nic in the child")]
    ForkedChild,
}

/// Why waiting ended without a completion.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum WaitError {
    /// The time is up.
    #[error("nothing completed within {0:?}")]
    TimedOut(Duration),
    /// The VI failed, and all its descriptors have been returned.
    #[error("the VI is not connected: {0}")]
    NotConnected(Failure),
    /// Used in a forked child.
    #[error("this queue belongs to the parent process; open a Nic in the child")]
    ForkedChild,
}

/// Why a region could not be granted.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GrantError {
    /// The VI is no longer connected.
    #[error("the VI is not connected: {0}")]
    NotConnected(Failure),
    /// A region of another protection tag.
    #[error("the region has {region:?}, the VI has {vi:?}")]
    WrongTag {
        /// The region's.
        region: Tag,
        /// The VI's.
        vi: Tag,
    },
    /// A region that is yet to be frozen cannot be granted.
    #[error("the region is made to be frozen; freeze it before granting it")]
    NotFrozenYet,
    /// More regions than one peer is given.
    #[error("{limit} regions were given to this peer already, the most there may be")]
    TooMany {
        /// The limit in force.
        limit: usize,
    },
    /// The region could not be mapped once more, to be read for the peer.
    #[error("{0}")]
    Memory(String),
    /// The message did not get through.
    #[error("the region could not be sent: {0}")]
    Courier(String),
}

/// Why a grant was not withdrawn.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WithdrawError {
    /// The VI is no longer connected, and its grants ended with it.
    #[error("the VI is not connected: {0}")]
    NotConnected(Failure),
    /// The region is not granted on this VI.
    #[error("region {region} is not granted on this VI")]
    NotGranted {
        /// The region in the key.
        region: u32,
    },
    /// The peer is a process of this host, and has the region mapped.
    #[error(
        "a process of this host keeps what it was granted, since it has it mapped; grant it a region that you can do without"
    )]
    Mapped,
}
