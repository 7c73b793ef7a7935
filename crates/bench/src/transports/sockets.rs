//! Streams of bytes: the kernel's own, TCP and Unix stream sockets, and whatever reads and writes like them; spinning
//! or blocking.
//!
//! The burst before the clock starts carries a pattern that its reader checks byte by byte; after it, only lengths are
//! checked.

use super::{Contestant, Exercise, Ordinary, Transport, pattern};
use crate::BenchError;
use crate::pair::{Link, PATIENCE, Patience, Role};
use highwire_mem::CourierError;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// A TCP connection, with the kernel's combining of small writes switched off.
pub(super) fn tcp(contestant: Contestant, link: &mut Link, spinning: bool) -> Result<Box<dyn Transport>, BenchError> {
    let stream = tcp_stream(contestant, link)?;
    stream.set_nonblocking(spinning)?;
    Ok(Box::new(Socket::new(contestant, stream)))
}

/// This side's end of a TCP connection that blocks.
pub(super) fn tcp_stream(contestant: Contestant, link: &mut Link) -> Result<TcpStream, BenchError> {
    let stream = match link.role {
        // The two processes may be in different namespaces, and this is over the loopback device of one of them.
        Role::Driver if link.network.is_of_one_host() => {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let theirs = TcpStream::connect_timeout(&listener.local_addr()?, PATIENCE)?;
            link.tell(&(), &[theirs.as_fd()])?;
            accept(&listener)?
        }
        Role::Peer if link.network.is_of_one_host() => TcpStream::from(handed(link)?),
        Role::Driver => {
            let listener = TcpListener::bind((link.address(contestant.wire())?, 0))?;
            link.tell(&listener.local_addr()?, &[])?;
            accept(&listener)?
        }
        Role::Peer => TcpStream::connect_timeout(&link.hear::<SocketAddr>()?.0, PATIENCE)?,
    };
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// The socket that the other side hands over.
fn handed(link: &mut Link) -> Result<OwnedFd, BenchError> {
    let (_, descriptors) = link.hear::<()>()?;
    Ok(descriptors.into_iter().next().ok_or(CourierError::Closed)?)
}

fn accept(listener: &TcpListener) -> Result<TcpStream, BenchError> {
    listener.set_nonblocking(true)?;
    first(|| listener.accept())
}

/// The first connection to a listener that does not block; not waited for without end, since the other side may have
/// failed.
pub(super) fn first<S, A>(accept: impl Fn() -> io::Result<(S, A)>) -> Result<S, BenchError> {
    let mut patience = Patience::default();
    loop {
        match accept() {
            Ok((stream, _)) => return Ok(stream),
            Err(error) => retry(&error, &mut patience)?,
        }
    }
}

/// A pair of Unix stream sockets.
pub(super) fn unix(contestant: Contestant, link: &mut Link, spinning: bool) -> Result<Box<dyn Transport>, BenchError> {
    let stream = match link.role {
        Role::Driver => {
            let (stream, theirs) = UnixStream::pair()?;
            link.tell(&(), &[theirs.as_fd()])?;
            stream
        }
        Role::Peer => UnixStream::from(handed(link)?),
    };
    stream.set_nonblocking(spinning)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(Box::new(Socket::new(contestant, stream)))
}

/// One end of a stream.
pub(super) struct Socket<S> {
    name: &'static str,
    stream: S,
    /// While what is written and read is the pattern: how far both have come.
    checked: Option<Places>,
    sent: Ordinary,
    received: Ordinary,
}

impl<S: Read + Write> Socket<S> {
    pub(super) fn new(contestant: Contestant, stream: S) -> Socket<S> {
        let (sent, received) = (Ordinary::new(), Ordinary::new());
        Socket { name: contestant.name(), stream, checked: None, sent, received }
    }

    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    fn send(&mut self, size: usize) -> Result<(), BenchError> {
        if let Some(places) = &mut self.checked {
            pattern::fill(self.sent.of(size), places.sent);
            places.sent += size as u64;
        }
        let mut done = 0;
        let mut patience = Patience::default();
        while done < size {
            match self.stream.write(&self.sent.of(size)[done..]) {
                Ok(0) => return Err(io::Error::from(ErrorKind::WriteZero).into()),
                Ok(written) => done += written,
                Err(error) => retry(&error, &mut patience)?,
            }
        }
        Ok(())
    }

    /// Waits until the other side says that it has everything.
    fn await_word(&mut self) -> Result<(), BenchError> {
        self.receive(1, 1)?;
        self.checked = None;
        Ok(())
    }

    /// Receives `total` bytes into a buffer of `most`.
    fn receive(&mut self, total: usize, most: usize) -> Result<(), BenchError> {
        let mut done = 0;
        let mut patience = Patience::default();
        while done < total {
            let room = most.min(total - done);
            match self.stream.read(self.received.of(room)) {
                Ok(0) => return Err(CourierError::Closed.into()),
                Ok(read) => {
                    done += read;
                    if let Some(places) = &mut self.checked {
                        pattern::check(self.name, &self.received.of(room)[..read], places.received)?;
                        places.received += read as u64;
                    }
                }
                Err(error) => retry(&error, &mut patience)?,
            }
        }
        Ok(())
    }
}

/// A TCP connection as the paper's is, on which the kernel combines small writes. What it keeps back at the end of a
/// burst it would send after 40 ms: it is told to send it at once, as programs do that know of this.
pub(super) struct Nagle(Socket<TcpStream>);

impl Nagle {
    pub(super) fn meet(link: &mut Link) -> Result<Box<dyn Transport>, BenchError> {
        let stream = tcp_stream(Contestant::TcpNagle, link)?;
        Ok(Box::new(Nagle(Socket::new(Contestant::TcpNagle, stream))))
    }
}

impl Transport for Nagle {
    fn ping(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("nothing is combined where each message is answered")
    }

    fn pong(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("nothing is combined where each message is answered")
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.0.stream.set_nodelay(false)?;
        for _ in 0..count {
            self.0.send(size)?;
        }
        self.0.stream.set_nodelay(true)?;
        self.0.await_word()
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.0.drain(size, count)
    }

    fn prepare_for(&mut self, role: Role, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        self.0.prepare_for(role, exercise, size, count)
    }
}

/// How far a stream has come.
#[derive(Default)]
struct Places {
    sent: u64,
    received: u64,
}

/// Nothing there yet: a spinning socket looks again. A blocking one has waited out its time-out.
#[inline]
fn retry(error: &io::Error, patience: &mut Patience) -> Result<(), BenchError> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => patience.spin(),
        kind => Err(io::Error::from(kind).into()),
    }
}

impl<S: Read + Write> Transport for Socket<S> {
    fn prepare_for(&mut self, _role: Role, _exercise: Exercise, _size: usize, _count: usize) -> Result<(), BenchError> {
        self.checked = Some(Places::default());
        Ok(())
    }

    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.send(size)?;
            self.receive(size, size)?;
        }
        self.checked = None;
        Ok(())
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.receive(size, size)?;
            self.send(size)?;
        }
        self.checked = None;
        Ok(())
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.send(size)?;
        }
        self.await_word()
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        // A stream has no messages: reading as much as there is, is its best.
        self.receive(size * count, size.max(READ_BYTES))?;
        self.send(1)?;
        self.checked = None;
        Ok(self.stream.flush()?)
    }
}

const READ_BYTES: usize = 64 << 10;
