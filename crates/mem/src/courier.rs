//! Carries messages and descriptors between two processes over a Unix socket, and tells who is at
//! the other end and whether it still lives. Rendezvous only: nothing fast goes this way.

use crate::credentials::{Credentials, ProcessIdentity, peer_pidfd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Most descriptors that one message carries.
const DESCRIPTORS_MAX: usize = 4;

/// Why a message did not go or come.
#[derive(Debug, thiserror::Error)]
pub enum CourierError {
    /// The other end is gone, or closed the connection.
    #[error("the other side closed the connection")]
    Closed,
    /// It did not answer in time.
    #[error("the other side did not answer within {0:?}")]
    TimedOut(Duration),
    /// A message longer than any in this protocol, or with too many descriptors.
    #[error("the other side sent a message that is cut off at {0} bytes")]
    TooLong(usize),
    /// This process, or the system, has no descriptor left: for a socket, or for one that came with a message.
    #[error("no descriptor is left in this process; raise its limit (ulimit -n), or have it do with fewer")]
    NoDescriptors,
    /// The socket itself failed.
    #[error("the rendezvous socket failed: {0}")]
    Socket(#[source] Errno),
}

impl From<Errno> for CourierError {
    fn from(errno: Errno) -> CourierError {
        match errno {
            Errno::MFILE | Errno::NFILE => CourierError::NoDescriptors,
            errno => CourierError::Socket(errno),
        }
    }
}

/// One end of a connection that keeps message boundaries and carries descriptors.
#[derive(Debug)]
pub struct Courier {
    socket: OwnedFd,
}

/// A socket on which others can reach us by path.
#[derive(Debug)]
pub struct CourierListener {
    socket: OwnedFd,
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

impl CourierListener {
    /// Listens at `path`, which must not exist.
    pub fn bind(path: &Path, backlog: i32) -> Result<CourierListener, Errno> {
        let socket = new_socket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&socket, backlog)?;
        Ok(CourierListener { socket })
    }

    /// The next connection, if one waits.
    pub fn accept(&self) -> Result<Option<Courier>, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Ok(Some(Courier { socket })),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for CourierListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Courier {
    /// Connects to the listener at `path`. A full backlog is waited out until `timeout`.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Courier, CourierError> {
        let address = SocketAddrUnix::new(path)?;
        let deadline = deadline(timeout);
        loop {
            let socket = new_socket()?;
            match rustix::net::connect(&socket, &address) {
                Ok(()) => return Ok(Courier { socket }),
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(Errno::AGAIN) => return Err(CourierError::TimedOut(timeout)),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Two ends of one connection, for processes that share an ancestor.
    pub fn pair() -> Result<(Courier, Courier), CourierError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Courier { socket: one }, Courier { socket: other }))
    }

    /// Sends one message with descriptors. Waits while the socket is full, at most `timeout`.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>], timeout: Duration) -> Result<(), CourierError> {
        assert!(descriptors.len() <= DESCRIPTORS_MAX, "a message carries at most 4 descriptors");
        let deadline = deadline(timeout);
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => {
                    self.wait(rustix::event::PollFlags::OUT, deadline, timeout)?;
                }
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => return Err(CourierError::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The next message, if one is there: its length and its descriptors.
    pub fn try_receive(&self, into: &mut [u8]) -> Result<Option<(usize, Vec<OwnedFd>)>, CourierError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let length = into.len();
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = match rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(into)], &mut ancillary, flags) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(Errno::CONNRESET | Errno::PIPE | Errno::NOTCONN) => return Err(CourierError::Closed),
            Err(errno) => return Err(errno.into()),
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) && descriptors.len() < DESCRIPTORS_MAX {
            // There was room for more: the kernel found no number for the next one.
            return Err(CourierError::NoDescriptors);
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(CourierError::TooLong(length));
        }
        if received.bytes == 0 {
            return Err(CourierError::Closed);
        }
        Ok(Some((received.bytes, descriptors)))
    }

    /// The next message, waited for.
    pub fn receive(&self, into: &mut [u8], timeout: Duration) -> Result<(usize, Vec<OwnedFd>), CourierError> {
        let deadline = deadline(timeout);
        loop {
            if let Some(received) = self.try_receive(into)? {
                return Ok(received);
            }
            self.wait(rustix::event::PollFlags::IN, deadline, timeout)?;
        }
    }

    fn wait(&self, what: rustix::event::PollFlags, deadline: Instant, timeout: Duration) -> Result<(), CourierError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(CourierError::TimedOut(timeout));
        }
        let left = rustix::time::Timespec::try_from(left).unwrap_or(rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut polled = [rustix::event::PollFd::new(&self.socket, what)];
        match rustix::event::poll(&mut polled, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The process that connected, or that was listening.
    pub fn credentials(&self) -> Result<Credentials, CourierError> {
        Ok(Credentials::of_peer(&self.socket)?)
    }

    /// What tells that process from others, if anything does.
    pub fn identity(&self, credentials: Credentials) -> Result<Option<ProcessIdentity>, CourierError> {
        Ok(ProcessIdentity::of_peer(&self.socket, credentials)?)
    }

    /// A descriptor that becomes readable when the process at the other end dies; see [`peer_pidfd`].
    pub fn pidfd(&self, credentials: Credentials) -> Result<Option<OwnedFd>, CourierError> {
        Ok(peer_pidfd(&self.socket, credentials)?)
    }
}

impl AsFd for Courier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for Courier {
    fn from(socket: OwnedFd) -> Courier {
        Courier { socket }
    }
}

/// The moment `timeout` from now; a year from now for those who wait for ever.
pub fn deadline(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Instant::now() + timeout.min(YEAR)
}
