//! Where an end of a stream is.

use highwire_vi::{Credentials, PeerId};
use std::fmt;
use std::net::SocketAddr;

/// Where an end of a stream is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SockAddress {
    /// Where somebody listens on this host: what [`crate::Stream::connect`] takes.
    Named(String),
    /// A process of this host that called.
    Process {
        /// Its number when it called; `None` in a PID namespace that this process does not see.
        pid: Option<u32>,
        /// Its user; `None` for one that this user namespace does not map.
        uid: Option<u32>,
    },
    /// A port of a host.
    Host(SocketAddr),
}

impl fmt::Display for SockAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SockAddress::Named(name) => f.write_str(name),
            SockAddress::Process { pid, uid } => Credentials { pid: *pid, uid: *uid, gid: None }.fmt(f),
            SockAddress::Host(address) => write!(f, "udp:{address}"),
        }
    }
}

impl From<PeerId> for SockAddress {
    fn from(peer: PeerId) -> SockAddress {
        match peer {
            PeerId::Process(process) => SockAddress::Process { pid: process.pid, uid: process.uid },
            PeerId::Host(address) => SockAddress::Host(address),
        }
    }
}
