//! The kernel's UDP without anything above it: what a network allows.

use super::{Contestant, Delivery, Ordinary, Transport};
use crate::BenchError;
use crate::pair::{Link, PATIENCE, Patience, Role};
use highwire_link::{Burst, Inbox, Link as _, UdpLink, UdpOptions};
use highwire_mem::CourierError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Payload bytes of the largest packet on an Ethernet of 1500 bytes.
const PACKET_BYTES: usize = 1472;

/// Two sockets, both ends looking without pause. A message is as many packets as it needs; none of
/// them is lost, since all of them fit the receiver's buffer at once.
pub(super) struct UdpSpin {
    socket: UdpSocket,
    sent: Ordinary,
    received: Ordinary,
}

impl UdpSpin {
    pub(super) fn meet(link: &mut Link) -> Result<Box<dyn Transport>, BenchError> {
        let socket = UdpSocket::bind((link.address(Contestant::UdpSpin.wire())?, 0))?;
        socket.connect(exchange(link, socket.local_addr()?)?)?;
        socket.set_nonblocking(true)?;
        // Nothing is sent before both can receive.
        link.meet()?;
        Ok(Box::new(UdpSpin { socket, sent: Ordinary::new(), received: Ordinary::new() }))
    }

    fn send(&mut self, size: usize) -> Result<(), BenchError> {
        let mut patience = Patience::default();
        for packet in self.sent.of(size).chunks(PACKET_BYTES) {
            while let Err(error) = self.socket.send(packet) {
                retry(error, &mut patience)?;
            }
        }
        Ok(())
    }

    fn receive(&mut self, size: usize) -> Result<(), BenchError> {
        let mut patience = Patience::default();
        let mut done = 0;
        while done < size {
            match self.socket.recv(&mut self.received.of(size)[done..]) {
                Ok(read) => done += read,
                Err(error) => retry(error, &mut patience)?,
            }
        }
        Ok(())
    }
}

fn retry(error: io::Error, patience: &mut Patience) -> Result<(), BenchError> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => patience.spin(),
        _ => Err(error.into()),
    }
}

impl Transport for UdpSpin {
    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.send(size)?;
            self.receive(size)?;
        }
        Ok(())
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.receive(size)?;
            self.send(size)?;
        }
        Ok(())
    }

    fn pour(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("packets of a stream would be lost")
    }

    fn drain(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("packets of a stream would be lost")
    }
}

/// Full packets one way, as many to a system call as the kernel takes, and as fast as one process
/// can send them. Nothing keeps them from being lost: what counts is what arrives. Messages have no
/// meaning here; a stream of them is their bytes, which come from one buffer of their size again and again,
/// as they do for TCP.
pub(super) struct Blast {
    link: UdpLink,
    to: SocketAddr,
    /// On which the sender says that it is done, and the receiver what it got.
    control: UnixStream,
    inbox: Inbox,
    bytes: Vec<u8>,
    asleep: bool,
    delivery: Option<Delivery>,
}

impl Blast {
    pub(super) fn meet(contestant: Contestant, link: &mut Link) -> Result<Box<dyn Transport>, BenchError> {
        let name = contestant.name();
        let address = SocketAddr::new(link.address(contestant.wire())?, 0);
        let udp = UdpLink::bind(address, UdpOptions::default()).map_err(BenchError::library(name, "binding"))?;
        let to = exchange(link, udp.local_address())?;
        let control = match link.role {
            Role::Driver => {
                let (control, theirs) = UnixStream::pair()?;
                link.tell(&(), &[theirs.as_fd()])?;
                control
            }
            Role::Peer => {
                let (_, descriptors) = link.hear::<()>()?;
                UnixStream::from(descriptors.into_iter().next().ok_or(CourierError::Closed)?)
            }
        };
        control.set_read_timeout(Some(PATIENCE))?;
        control.set_write_timeout(Some(PATIENCE))?;
        Ok(Box::new(Blast {
            link: udp,
            to,
            control,
            inbox: Inbox::new(),
            bytes: Vec::new(),
            asleep: !link.spinning,
            delivery: None,
        }))
    }

    fn send(&mut self, bytes: std::ops::Range<usize>) -> Result<(), BenchError> {
        let burst = Burst { to: self.to, bytes: &self.bytes[bytes], segment: PACKET_BYTES };
        let mut patience = Patience::default();
        while self.link.send(&[burst]).map_err(io::Error::other)? == 0 {
            if self.asleep {
                let full = self.link.descriptors()[self.link.full_descriptor()];
                let full = full.ok_or(BenchError::NobodyLeft)?;
                wait(&mut [PollFd::from_borrowed_fd(full, PollFlags::OUT)], PATIENCE)?;
            }
            patience.spin()?;
        }
        Ok(())
    }

    /// Whether the sender has said that it is done.
    fn is_over(&self) -> Result<bool, BenchError> {
        match rustix::net::recv(&self.control, &mut [0], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(CourierError::Closed.into()),
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::AGAIN) => Ok(false),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// Sleeps until something arrives or, where that is still to come, the sender is done.
    fn sleep(&self, over: bool) -> Result<(), BenchError> {
        let udp = PollFd::from_borrowed_fd(socket(&self.link), PollFlags::IN);
        if over {
            return wait(&mut [udp], STRAGGLERS);
        }
        wait(&mut [udp, PollFd::from_borrowed_fd(self.control.as_fd(), PollFlags::IN)], PATIENCE)
    }
}

impl Transport for Blast {
    fn ping(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("packets that may be lost cannot be waited for")
    }

    fn pong(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("packets that may be lost cannot be waited for")
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        let total = (size * count).max(BLAST_BYTES_LEAST);
        self.bytes.resize(size.max(BURST_BYTES), 1);
        let clock = Instant::now();
        let (mut sent, mut at) = (0, 0);
        while sent < total {
            let bytes = BURST_BYTES.min(total - sent).min(self.bytes.len() - at);
            self.send(at..at + bytes)?;
            sent += bytes;
            at = (at + bytes) % self.bytes.len();
        }
        let sending_ns = clock.elapsed().as_nanos() as f64;
        self.control.write_all(&[0])?;
        let mut got = [[0; 8]; 2];
        self.control.read_exact(got.as_flattened_mut())?;
        let [bytes, nanoseconds] = got.map(u64::from_le_bytes);
        // A receiver that was late finds much in its buffer, and is faster than the wire for a while.
        let nanoseconds = sending_ns.max(nanoseconds as f64);
        self.delivery = Some(Delivery { sent: total as u64, bytes, nanoseconds });
        Ok(())
    }

    fn drain(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        let before = self.link.counters().bytes_received;
        let (mut first, mut last) = (None, Instant::now());
        let mut patience = Patience::default();
        let mut over_since = None;
        loop {
            if self.link.receive(&mut self.inbox).map_err(io::Error::other)? > 0 {
                last = Instant::now();
                first.get_or_insert(last);
                patience = Patience::default();
                continue;
            }
            match over_since {
                None => over_since = self.is_over()?.then(Instant::now),
                Some(since) if since.max(last).elapsed() > STRAGGLERS => break,
                Some(_) => {}
            }
            if self.asleep {
                self.sleep(over_since.is_some())?;
            }
            patience.spin()?;
        }
        let bytes = self.link.counters().bytes_received - before;
        let nanoseconds = first.map_or(0, |first| last.duration_since(first).as_nanos() as u64);
        self.control.write_all([bytes, nanoseconds.max(1)].map(u64::to_le_bytes).as_flattened())?;
        Ok(())
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.asleep = asleep;
    }

    fn take_delivery(&mut self) -> Option<Delivery> {
        self.delivery.take()
    }
}

/// Tells the other side this address and hears its own.
fn exchange(link: &mut Link, mine: SocketAddr) -> Result<SocketAddr, BenchError> {
    link.tell(&mine, &[])?;
    Ok(link.hear::<SocketAddr>()?.0)
}

fn socket(link: &UdpLink) -> std::os::fd::BorrowedFd<'_> {
    link.descriptor().expect("a UDP link is a socket")
}

fn wait(descriptors: &mut [PollFd<'_>], longest: Duration) -> Result<(), BenchError> {
    let longest = Timespec::try_from(longest).expect("seconds, not ages");
    match poll(descriptors, Some(&longest)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}

/// What the kernel cuts into packets at once: as many whole packets as one datagram holds.
const BURST_BYTES: usize = 44 * PACKET_BYTES;
/// So that there is something to measure between the first and the last.
const BLAST_BYTES_LEAST: usize = 1 << 20;
/// How long packets may still come after the sender said that it is done.
const STRAGGLERS: Duration = Duration::from_millis(1);
