//! Any stream socket, so that one driver plays on all of them.

use highwire_sock::Stream;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv, sockopt};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What `std::net::TcpStream` can do.
pub trait Socket: Send + Sync {
    fn read(&self, into: &mut [u8]) -> io::Result<usize>;
    fn read_vectored(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize>;
    fn peek(&self, into: &mut [u8]) -> io::Result<usize>;
    fn write(&self, from: &[u8]) -> io::Result<usize>;
    fn write_vectored(&self, from: &[IoSlice<'_>]) -> io::Result<usize>;
    fn shutdown(&self, how: Shutdown) -> io::Result<()>;
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()>;
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;
    fn read_timeout(&self) -> io::Result<Option<Duration>>;
    fn set_nodelay(&self, nodelay: bool) -> io::Result<()>;
    fn nodelay(&self) -> io::Result<bool>;
    fn set_linger(&self, linger: Option<Duration>) -> io::Result<()>;
    fn linger(&self) -> io::Result<Option<Duration>>;
    fn take_error(&self) -> io::Result<Option<io::Error>>;
    fn try_clone(&self) -> io::Result<Box<dyn Socket>>;
    /// What `poll(2)` waits on.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

/// What `poll(2)` shows of this socket at once.
pub fn ready(socket: &dyn Socket) -> Ready {
    let shown = polled(socket, PollFlags::IN | PollFlags::OUT);
    Ready { input: shown.contains(PollFlags::IN), output: shown.contains(PollFlags::OUT) }
}

/// What `poll(2)` shows of a socket of the kernel once its connection is over: both ways ended, or reset.
pub fn is_hung_up(socket: &dyn Socket) -> bool {
    polled(socket, PollFlags::empty()).contains(PollFlags::HUP)
}

fn polled(socket: &dyn Socket, wanted: PollFlags) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(socket.descriptor(), wanted)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("a descriptor that can be polled");
    fds[0].revents()
}

/// `POLLIN` and `POLLOUT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    pub input: bool,
    pub output: bool,
}

/// What the sockets here have by the same names.
macro_rules! as_in_std {
    () => {
        fn read(&self, into: &mut [u8]) -> io::Result<usize> {
            (&self.0).read(into)
        }
        fn read_vectored(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
            (&self.0).read_vectored(into)
        }
        fn write(&self, from: &[u8]) -> io::Result<usize> {
            (&self.0).write(from)
        }
        fn write_vectored(&self, from: &[IoSlice<'_>]) -> io::Result<usize> {
            (&self.0).write_vectored(from)
        }
        fn shutdown(&self, how: Shutdown) -> io::Result<()> {
            self.0.shutdown(how)
        }
        fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
            self.0.set_nonblocking(nonblocking)
        }
        fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
            self.0.set_read_timeout(timeout)
        }
        fn read_timeout(&self) -> io::Result<Option<Duration>> {
            self.0.read_timeout()
        }
        fn take_error(&self) -> io::Result<Option<io::Error>> {
            self.0.take_error()
        }
        fn descriptor(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    };
}

/// What TCP has beyond that, and Highwire's streams with it.
macro_rules! as_in_tcp {
    () => {
        as_in_std!();

        fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
            self.0.peek(into)
        }
        fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
            self.0.set_nodelay(nodelay)
        }
        fn nodelay(&self) -> io::Result<bool> {
            self.0.nodelay()
        }
        fn try_clone(&self) -> io::Result<Box<dyn Socket>> {
            Ok(Box::new(Self(self.0.try_clone()?)))
        }
    };
}

/// Kernel TCP: what all others are compared with.
pub struct Tcp(pub TcpStream);

impl Socket for Tcp {
    as_in_tcp!();

    fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        Ok(sockopt::set_socket_linger(&self.0, linger)?)
    }
    fn linger(&self) -> io::Result<Option<Duration>> {
        Ok(sockopt::socket_linger(&self.0)?)
    }
}

/// Unix stream sockets: nearly TCP, so whoever cannot tell them apart sees nothing.
pub struct Unix(pub UnixStream, Arc<AtomicBool>);

impl Unix {
    pub fn new(stream: UnixStream) -> Unix {
        Unix(stream, Arc::new(AtomicBool::new(false)))
    }
}

impl Socket for Unix {
    as_in_std!();

    fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        Ok(recv(&self.0, into, RecvFlags::PEEK)?.1)
    }
    fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.1.store(nodelay, Ordering::Relaxed);
        Ok(())
    }
    fn nodelay(&self) -> io::Result<bool> {
        Ok(self.1.load(Ordering::Relaxed))
    }
    fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        Ok(sockopt::set_socket_linger(&self.0, linger)?)
    }
    fn linger(&self) -> io::Result<Option<Duration>> {
        Ok(sockopt::socket_linger(&self.0)?)
    }
    fn try_clone(&self) -> io::Result<Box<dyn Socket>> {
        Ok(Box::new(Unix(self.0.try_clone()?, self.1.clone())))
    }
}

/// Highwire's.
pub struct Wire(pub Stream);

impl Socket for Wire {
    as_in_tcp!();

    fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        self.0.set_linger(linger)
    }
    fn linger(&self) -> io::Result<Option<Duration>> {
        self.0.linger()
    }
}
