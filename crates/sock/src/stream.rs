//! The stream that programs hold.

use crate::address::SockAddress;
use crate::config::SockConfig;
use crate::connection::{Connection, State};
use crate::handling::Handling;
use crate::sockets::Sockets;
use highwire_vi::Vi;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

/// A stream of bytes to another program, of this host or another; used as `std::net::TcpStream` is.
///
/// Writes are always copied, and return when the other side can have the bytes: on one host they are read even if the
/// writer dies then. Small writes are combined while the reader is behind; while it is not, each is sent at once.
///
/// Differences to a TCP stream:
/// * Connecting waits until the other side accepts; nobody answers for it meanwhile.
/// * A write to a peer that has closed the stream fails at once; with TCP the first one is lost without an error.
/// * A peer that died, or exited without closing, is [`io::ErrorKind::ConnectionReset`], after everything that it had
///   written; with TCP it can look like an orderly end.
/// * Between hosts, what was written and has not arrived is lost if the writer is killed, or exits without closing the
///   stream: it is in its memory.
/// * It belongs to its process: a forked child cannot use it, and its descriptor is for polling alone.
/// * There is no urgent data and no time to live, and no half-open stream without an error: peers that fall silent are
///   noticed.
#[derive(Debug)]
pub struct Stream {
    connection: Arc<Connection>,
    handle: Arc<Handle>,
}

/// What all clones of a stream have; it is closed with the last of them.
#[derive(Debug)]
struct Handle {
    connection: Arc<Connection>,
    local: SockAddress,
    peer: SockAddress,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.connection.close();
    }
}

impl Stream {
    /// Connects to `shm:name`, `shm:/path` or `udp:host:port` by the interface of the process: see
    /// [`Sockets::of_process`].
    pub fn connect(address: &str) -> io::Result<Stream> {
        Sockets::of_process()?.connect(address)
    }

    /// The same, within `timeout`.
    pub fn connect_timeout(address: &str, timeout: Duration) -> io::Result<Stream> {
        Sockets::of_process()?.connect_timeout(address, timeout)
    }

    /// One that this side asked for.
    pub(crate) fn called(vi: Vi, config: SockConfig, handling: &Handling, address: &str) -> Stream {
        let connection = Connection::new(vi, config, handling);
        let watch = connection.watch();
        let (local, peer) = match watch.local() {
            Some(local) => (SockAddress::Host(local), SockAddress::from(watch.peer())),
            None => (this_process(), SockAddress::Named(address.to_owned())),
        };
        Stream::new(connection, local, peer)
    }

    /// One that came to a listener at `address`.
    pub(crate) fn accepted(vi: Vi, config: SockConfig, handling: &Handling, address: &str) -> Stream {
        let connection = Connection::new(vi, config, handling);
        let peer = SockAddress::from(connection.watch().peer());
        let local =
            connection.watch().local().map_or_else(|| SockAddress::Named(address.to_owned()), SockAddress::Host);
        Stream::new(connection, local, peer)
    }

    fn new(connection: Arc<Connection>, local: SockAddress, peer: SockAddress) -> Stream {
        let handle = Arc::new(Handle { connection: connection.clone(), local, peer });
        Stream { connection, handle }
    }

    /// Another handle to the same stream, which is closed with the last of them. Time-outs and modes are common to all.
    pub fn try_clone(&self) -> io::Result<Stream> {
        Ok(Stream { connection: self.connection.clone(), handle: self.handle.clone() })
    }

    /// Where the other end is: where it listens, if this side called; who it is, if it did.
    pub fn peer_addr(&self) -> io::Result<SockAddress> {
        Ok(self.handle.peer.clone())
    }

    /// Where this end is.
    pub fn local_addr(&self) -> io::Result<SockAddress> {
        Ok(self.handle.local.clone())
    }

    /// Ends one direction, or both. Whoever reads on the other side gets what was written, and then the end of file.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.connection.shutdown(how)
    }

    /// Reads without taking.
    pub fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        self.connection.peek(into)
    }

    /// Whether calls wait, or fail with [`io::ErrorKind::WouldBlock`] where they would have to.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.connection.set_nonblocking(nonblocking);
        Ok(())
    }

    /// Limits how long a read waits; then it fails with [`io::ErrorKind::WouldBlock`]. Zero is an error.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.connection.set_read_timeout(timeout)
    }

    /// The limit, if there is one.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.connection.read_timeout())
    }

    /// Limits how long a write waits for room; then it fails with [`io::ErrorKind::WouldBlock`], or tells how much was
    /// written. Zero is an error.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.connection.set_write_timeout(timeout)
    }

    /// The limit, if there is one.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.connection.write_timeout())
    }

    /// Whether every write is a message of its own, as long as the window has room for it.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.connection.set_nodelay(nodelay);
        Ok(())
    }

    /// Whether that is so.
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.connection.nodelay())
    }

    /// What closing does. `None`: it returns at once, and what was written arrives. A time: it waits until everything
    /// is with the other host, at most so long; on one host that is so already. Zero: it resets the stream.
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        self.connection.set_linger(linger);
        Ok(())
    }

    /// What was set.
    pub fn linger(&self) -> io::Result<Option<Duration>> {
        Ok(self.connection.linger())
    }

    /// A reset that no call was told of yet.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        Ok(self.connection.take_error())
    }

    /// How it stands.
    pub fn state(&self) -> State {
        self.connection.state()
    }

    /// The descriptor of [`AsFd`], where it may fail: there may be no more descriptors.
    pub fn try_as_fd(&self) -> io::Result<BorrowedFd<'_>> {
        self.connection.descriptor()
    }
}

impl Read for &Stream {
    #[inline]
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.connection.read(into)
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for part in into.iter_mut().filter(|part| !part.is_empty()) {
            let count = match total {
                0 => self.connection.read(part)?,
                // Only the first may wait.
                _ => self.connection.read_at_hand(part),
            };
            total += count;
            if count < part.len() {
                break;
            }
        }
        Ok(total)
    }
}

impl Write for &Stream {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.connection.write(bytes)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut total = 0;
        for part in parts.iter().filter(|part| !part.is_empty()) {
            let count = match self.connection.write(part) {
                Ok(count) => count,
                // What was written was written.
                Err(_) if total > 0 => break,
                Err(error) => return Err(error),
            };
            total += count;
            if count < part.len() {
                break;
            }
        }
        Ok(total)
    }

    fn flush(&mut self) -> io::Result<()> {
        // Nothing is kept back.
        Ok(())
    }
}

impl Read for Stream {
    #[inline]
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self).read(into)
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self).read_vectored(into)
    }
}

impl Write for Stream {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    /// For poll, epoll and the like: readable and writable as the stream is. Not to be read or written itself. Panics if
    /// no descriptor can be had, which [`Stream::try_as_fd`] does not.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.try_as_fd().expect("a descriptor for the stream; is the limit (ulimit -n) exhausted?")
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

fn this_process() -> SockAddress {
    SockAddress::Process {
        pid: Some(std::process::id()),
        uid: highwire_mem::mapped_user(rustix::process::geteuid().as_raw()),
    }
}
