//! The kernel's own: TCP and Unix stream sockets, spinning or blocking.

use super::{Contestant, Ordinary, Transport};
use crate::BenchError;
use crate::pair::{Link, PATIENCE, Patience, Role};
use highwire_mem::CourierError;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// A TCP connection, with the kernel's combining of small writes switched off.
pub(super) fn tcp(contestant: Contestant, link: &mut Link, spinning: bool) -> Result<Box<dyn Transport>, BenchError> {
    let stream = match link.role {
        Role::Driver => {
            let listener = TcpListener::bind((link.address(contestant.wire())?, 0))?;
            link.tell(&listener.local_addr()?, &[])?;
            accept(&listener)?
        }
        Role::Peer => TcpStream::connect_timeout(&link.hear::<SocketAddr>()?.0, PATIENCE)?,
    };
    stream.set_nodelay(true)?;
    stream.set_nonblocking(spinning)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(Box::new(Socket::new(stream)))
}

/// The first connection; not waited for without end, since the other side may have failed.
fn accept(listener: &TcpListener) -> Result<TcpStream, BenchError> {
    listener.set_nonblocking(true)?;
    let mut patience = Patience::default();
    loop {
        match listener.accept() {
            Ok((stream, _)) => return Ok(stream),
            Err(error) => retry(&error, &mut patience)?,
        }
    }
}

/// A pair of Unix stream sockets.
pub(super) fn unix(link: &mut Link, spinning: bool) -> Result<Box<dyn Transport>, BenchError> {
    let stream = match link.role {
        Role::Driver => {
            let (stream, theirs) = UnixStream::pair()?;
            link.tell(&(), &[theirs.as_fd()])?;
            stream
        }
        Role::Peer => {
            let (_, descriptors) = link.hear::<()>()?;
            UnixStream::from(descriptors.into_iter().next().ok_or(CourierError::Closed)?)
        }
    };
    stream.set_nonblocking(spinning)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(Box::new(Socket::new(stream)))
}

struct Socket<S> {
    stream: S,
    sent: Ordinary,
    received: Ordinary,
}

impl<S: Read + Write> Socket<S> {
    fn new(stream: S) -> Socket<S> {
        Socket { stream, sent: Ordinary::new(), received: Ordinary::new() }
    }

    fn send(&mut self, size: usize) -> Result<(), BenchError> {
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

    /// Receives `total` bytes into a buffer of `most`.
    fn receive(&mut self, total: usize, most: usize) -> Result<(), BenchError> {
        let mut done = 0;
        let mut patience = Patience::default();
        while done < total {
            let room = most.min(total - done);
            match self.stream.read(self.received.of(room)) {
                Ok(0) => return Err(CourierError::Closed.into()),
                Ok(read) => done += read,
                Err(error) => retry(&error, &mut patience)?,
            }
        }
        Ok(())
    }
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
    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.send(size)?;
            self.receive(size, size)?;
        }
        Ok(())
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.receive(size, size)?;
            self.send(size)?;
        }
        Ok(())
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.send(size)?;
        }
        self.receive(1, 1)
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        // A stream has no messages: reading as much as there is, is its best.
        self.receive(size * count, size.max(READ_BYTES))?;
        self.send(1)
    }
}

const READ_BYTES: usize = 64 << 10;
