//! Highwire's stream sockets, used as TCP's are.
//!
//! Who spins does so as `tcp-spin` does: it reads and writes without blocking, again and again. All others make the
//! calls that block, which look for a while before they sleep.

use super::files::Carrier;
use super::sockets::{Socket, first};
use super::{Contestant, Exercise, Transport, vi};
use crate::BenchError;
use crate::network::Wire;
use crate::pair::{Link, PATIENCE, Role};
use highwire::{Listener, Nic, SockConfig, Sockets, Strategy, Stream};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

pub(super) fn meet(contestant: Contestant, link: &mut Link) -> Result<Box<dyn Transport>, BenchError> {
    let name = contestant.name();
    let nic = match contestant {
        Contestant::SockUdpSealed => vi::nic_over_udp(contestant)?,
        _ => Nic::open().map_err(BenchError::library(name, "opening a Nic"))?,
    };
    let sockets = Sockets::with(&nic, config(contestant)).map_err(BenchError::library(name, "making sockets"))?;
    // On one CPU whoever looks without pause keeps the other from answering.
    let spinning = link.spinning && !contestant.blocks(Exercise::Stream);
    let stream = connect(contestant, &sockets, link)?;
    stream.set_nonblocking(spinning)?;
    let files = match contestant {
        Contestant::Sock => {
            let stream = connect(contestant, &sockets, link)?;
            Some(Carrier::new(contestant, Some(stream), link))
        }
        _ => None,
    };
    link.meet()?;
    Ok(Box::new(Streams { messages: Socket::new(contestant, stream), spinning, files }))
}

/// Connects this process's end; the driver listens.
fn connect(contestant: Contestant, sockets: &Sockets, link: &mut Link) -> Result<Stream, BenchError> {
    let name = contestant.name();
    let stream = match link.role {
        Role::Driver => {
            let listener = listen(contestant, sockets, link).map_err(BenchError::library(name, "listening"))?;
            let address = listener.local_addr().map_err(BenchError::library(name, "listening"))?;
            link.tell(&address.to_string(), &[])?;
            listener.set_nonblocking(true)?;
            first(|| listener.accept())?
        }
        Role::Peer => {
            let (address, _) = link.hear::<String>()?;
            sockets.connect_timeout(&address, PATIENCE).map_err(BenchError::library(name, "connecting"))?
        }
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    // At the end of a run the other side is gone first, and nobody is to wait for it.
    stream.set_linger(Some(Duration::ZERO))?;
    Ok(stream)
}

/// Listens at this side's address, or under the first name that nobody else has.
fn listen(contestant: Contestant, sockets: &Sockets, link: &Link) -> io::Result<Listener> {
    if contestant == Contestant::SockUdpSealed {
        let address = link.address(Wire::Whole).map_err(io::Error::other)?;
        return sockets.bind(&format!("udp:{}", SocketAddr::new(address, 0)));
    }
    let mut number = 0;
    loop {
        match sockets.bind(&format!("shm:bench-{number}")) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && number < vi::NAMES_MAX => number += 1,
            bound => return bound,
        }
    }
}

fn config(contestant: Contestant) -> SockConfig {
    let usual = SockConfig::default();
    match contestant {
        Contestant::SockHandler => SockConfig { strategy: Strategy::Handler, ..usual },
        Contestant::SockNotify => SockConfig { strategy: Strategy::Notify, ..usual },
        Contestant::Window1 => SockConfig { window: 1, acknowledge: 1, combine: false, ..usual },
        Contestant::Window32 => SockConfig { window: 32, acknowledge: 1, combine: false, ..usual },
        Contestant::DelayedAcks => SockConfig { window: 32, acknowledge: 16, combine: false, ..usual },
        Contestant::Combining => SockConfig { window: 32, acknowledge: 16, combine: true, ..usual },
        _ => usual,
    }
}

/// One end of a stream, and of a second one for files where there are any.
struct Streams {
    messages: Socket<Stream>,
    spinning: bool,
    files: Option<Carrier<Stream>>,
}

impl Streams {
    fn files(&mut self) -> Result<&mut Carrier<Stream>, BenchError> {
        self.files.as_mut().ok_or(BenchError::NobodyLeft)
    }
}

impl Transport for Streams {
    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.messages.ping(size, count)
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.messages.pong(size, count)
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.messages.pour(size, count)
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.messages.drain(size, count)
    }

    fn prepare_for(&mut self, role: Role, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        match exercise {
            Exercise::File => self.files()?.prepare_for(role, exercise, size, count),
            _ => self.messages.prepare_for(role, exercise, size, count),
        }
    }

    fn send_file(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.files()?.send_file(size, count)
    }

    fn receive_file(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.files()?.receive_file(size, count)
    }

    fn check(&mut self) -> Result<(), BenchError> {
        self.files.as_mut().map_or(Ok(()), Carrier::check)
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        if self.spinning {
            // Whoever looks acknowledges what came over the wire.
            let _ = self.messages.stream().peek(&mut [0]);
        }
        Ok(true)
    }
}
