//! Accepts streams at an address.

use crate::address::SockAddress;
use crate::error;
use crate::sockets::Sockets;
use crate::stream::Stream;
use highwire_vi::ViListener;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

/// Accepts streams at an address. Its descriptor is readable when somebody calls.
#[derive(Debug)]
pub struct Listener {
    sockets: Sockets,
    listener: ViListener,
    nonblocking: AtomicBool,
}

impl Listener {
    pub(crate) fn new(sockets: Sockets, listener: ViListener) -> Listener {
        Listener { sockets, listener, nonblocking: AtomicBool::new(false) }
    }

    /// Listens at an address by the interface of the process: see [`Sockets::of_process`] and [`Sockets::bind`].
    pub fn bind(address: &str) -> io::Result<Listener> {
        Sockets::of_process()?.bind(address)
    }

    /// The next stream, and who called.
    pub fn accept(&self) -> io::Result<(Stream, SockAddress)> {
        let handling = self.sockets.handling()?;
        let timeout = if self.nonblocking.load(SeqCst) { Duration::ZERO } else { A_DAY };
        loop {
            let vi = match self.listener.accept_with(timeout, &handling.options()) {
                Err(highwire_vi::AcceptError::TimedOut(_)) if !timeout.is_zero() => continue,
                accepted => accepted.map_err(error::accepting)?,
            };
            let peer = SockAddress::from(vi.peer());
            return Ok((Stream::accepted(vi, self.sockets.config(), &handling, self.listener.address()), peer));
        }
    }

    /// Streams as they come.
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming(self)
    }

    /// Whether [`Listener::accept`] waits, or fails with [`io::ErrorKind::WouldBlock`] when nobody calls. A call takes
    /// several steps: it may be shown by the descriptor before it can be accepted.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.nonblocking.store(nonblocking, SeqCst);
        Ok(())
    }

    /// Where it listens, with the port that was chosen, where that was left open.
    pub fn local_addr(&self) -> io::Result<SockAddress> {
        Ok(SockAddress::Named(self.listener.address().to_owned()))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Streams as they come: see [`Listener::incoming`].
#[derive(Debug)]
pub struct Incoming<'a>(&'a Listener);

impl Iterator for Incoming<'_> {
    type Item = io::Result<Stream>;

    fn next(&mut self) -> Option<io::Result<Stream>> {
        Some(self.0.accept().map(|(stream, _)| stream))
    }
}

const A_DAY: Duration = Duration::from_secs(24 * 3600);
