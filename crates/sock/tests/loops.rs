//! Loops around descriptors: epoll, level and edge, `poll(2)`, mio and tokio. Each echoes what comes and misses nothing.

use crate::support::pattern::Pattern;
use crate::support::socket::{Socket, Wire};
use crate::support::wire::{Reach, STRATEGIES, bad_wire, sealed};
use crate::support::{PATIENCE, Stage};
use highwire_sock::{SockConfig, Stream};
use mio::unix::SourceFd;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use tokio::io::unix::AsyncFd;

const BYTES: u64 = 600_000;
/// An echo that holds so much reads no more.
const HELD_MAX: usize = 10_000;

/// A stream that does not wait, and what it has read and not yet written back.
struct Echo {
    stream: Stream,
    held: Vec<u8>,
    ended: bool,
    shut: bool,
}

impl Echo {
    fn new(stream: Stream) -> Echo {
        stream.set_nonblocking(true).unwrap();
        Echo { stream, held: Vec::new(), ended: false, shut: false }
    }

    /// Reads and writes once, as far as it goes.
    fn step(&mut self) {
        self.read();
        self.write();
    }

    /// Everything that can be done now, until neither reading nor writing goes on: edges are told once.
    fn run_dry(&mut self) {
        loop {
            let read = self.read();
            if !self.write() && !read {
                return;
            }
        }
    }

    /// True if something came.
    fn read(&mut self) -> bool {
        let mut bytes = [0; 3000];
        if self.held.len() >= HELD_MAX || self.ended {
            return false;
        }
        let read = when_ready((&self.stream).read(&mut bytes));
        self.ended = read == Some(0);
        self.held.extend_from_slice(&bytes[..read.unwrap_or(0)]);
        read.is_some()
    }

    /// True if something went.
    fn write(&mut self) -> bool {
        let mut written = None;
        if !self.held.is_empty() {
            written = when_ready((&self.stream).write(&self.held));
            self.held.drain(..written.unwrap_or(0));
        }
        if self.ended && self.held.is_empty() && !self.shut {
            self.stream.shutdown(Shutdown::Write).unwrap();
            self.shut = true;
        }
        written.is_some()
    }
}

fn when_ready(result: io::Result<usize>) -> Option<usize> {
    match result {
        Ok(count) => Some(count),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            None
        }
    }
}

/// Sends the pattern, and has it back; slowly at times, so that there is nothing to read, or no room to write.
fn converse(stream: &Stream) {
    let pattern = Pattern::new(1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut position = 0;
            while position < BYTES {
                let count = (1 + position % 9000).min(BYTES - position) as usize;
                (&*stream).write_all(pattern.at(position, count)).unwrap();
                position += count as u64;
                if position % 7 == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
            }
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let (mut position, mut bytes) = (0, [0; 5000]);
        loop {
            let count = (&*stream).read(&mut bytes).unwrap();
            assert_eq!(pattern.first_wrong(position, &bytes[..count]), None);
            position += count as u64;
            if count == 0 {
                break;
            }
            if position % 11 == 0 {
                std::thread::sleep(Duration::from_micros(500));
            }
        }
        assert_eq!(position, BYTES);
    });
}

/// An echo of this kind, with every strategy, on one host and over a bad wire, and with a window that is soon full.
fn echoes(echo: fn(Echo)) {
    let stage = Stage::open();
    for strategy in STRATEGIES {
        let usual = SockConfig { strategy, ..SockConfig::default() };
        let small = SockConfig { window: 4, acknowledge: 2, chunk_bytes: 1000, ..usual };
        let reaches = [
            Reach::on_one_host(&stage, usual),
            Reach::on_one_host(&stage, small),
            Reach::by_wire(&stage, &bad_wire(sealed()), usual),
        ];
        for reach in reaches {
            eprintln!("{strategy:?} at {}", reach.address);
            let [one, other] = reach.pair();
            std::thread::scope(|scope| {
                scope.spawn(move || echo(Echo::new(other)));
                converse(&one);
            });
        }
    }
}

fn epoll_of(descriptor: BorrowedFd<'_>, flags: epoll::EventFlags) -> OwnedFd {
    let poller = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&poller, descriptor, epoll::EventData::new_u64(7), flags).unwrap();
    poller
}

/// Waits for one event; what it shows.
fn next_event(poller: &impl AsFd) -> epoll::EventFlags {
    let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 4];
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let count = epoll::wait(poller, &mut events[..], Some(&patience)).unwrap();
    assert_eq!(count, 1, "an event within {PATIENCE:?}");
    events[0].flags
}

#[test]
fn an_echo_by_epoll_with_levels() {
    echoes(|mut echo| {
        let poller = epoll_of(echo.stream.as_fd(), epoll::EventFlags::IN);
        while !echo.shut {
            let mut wanted = epoll::EventFlags::empty();
            wanted.set(epoll::EventFlags::IN, echo.held.len() < HELD_MAX && !echo.ended);
            wanted.set(epoll::EventFlags::OUT, !echo.held.is_empty());
            epoll::modify(&poller, echo.stream.as_fd(), epoll::EventData::new_u64(7), wanted).unwrap();
            let shown = next_event(&poller);
            assert!(shown.intersects(wanted | epoll::EventFlags::HUP | epoll::EventFlags::ERR), "{shown:?}");
            echo.step();
        }
    });
}

#[test]
fn an_echo_by_epoll_with_edges() {
    echoes(|mut echo| {
        let both = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        let poller = epoll_of(echo.stream.as_fd(), both);
        while !echo.shut {
            next_event(&poller);
            echo.run_dry();
        }
    });
}

#[test]
fn an_echo_by_poll() {
    echoes(|mut echo| {
        while !echo.shut {
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::IN, echo.held.len() < HELD_MAX && !echo.ended);
            wanted.set(PollFlags::OUT, !echo.held.is_empty());
            let mut fds = [PollFd::from_borrowed_fd(echo.stream.as_fd(), wanted)];
            let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            assert_eq!(poll(&mut fds, Some(&patience)).unwrap(), 1, "an event within {PATIENCE:?}");
            echo.step();
        }
    });
}

#[test]
fn an_echo_by_mio() {
    echoes(|mut echo| {
        let mut poller = mio::Poll::new().unwrap();
        let mut events = mio::Events::with_capacity(8);
        let descriptor = echo.stream.as_fd().as_raw_fd();
        let both = mio::Interest::READABLE | mio::Interest::WRITABLE;
        poller.registry().register(&mut SourceFd(&descriptor), mio::Token(3), both).unwrap();
        while !echo.shut {
            poller.poll(&mut events, Some(PATIENCE)).unwrap();
            let event = events.iter().next().expect("an event within the time");
            assert!(event.token() == mio::Token(3) && (event.is_readable() || event.is_writable()));
            echo.run_dry();
        }
    });
}

#[test]
fn an_echo_by_tokio() {
    echoes(|echo| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let descriptor = echo.stream.as_fd().try_clone_to_owned().unwrap();
            let stream = register(descriptor).unwrap();
            let mut bytes = [0; 3000];
            loop {
                let mut ready = patient(stream.readable()).await.unwrap();
                let Ok(read) = ready.try_io(|_| (&echo.stream).read(&mut bytes)) else { continue };
                let mut left = &bytes[..read.unwrap()];
                if left.is_empty() {
                    break echo.stream.shutdown(Shutdown::Write).unwrap();
                }
                while !left.is_empty() {
                    let mut ready = patient(stream.writable()).await.unwrap();
                    if let Ok(written) = ready.try_io(|_| (&echo.stream).write(left)) {
                        left = &left[written.unwrap()..];
                    }
                }
            }
        });
    });
}

/// The descriptor stays open for as long as it is registered, which is what tokio asks for.
#[expect(deprecated, reason = "what replaces it is unsafe, and its condition is kept")]
fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(descriptor)
}

async fn patient<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("an event within the time")
}

#[test]
fn a_listener_is_shown_by_its_descriptor() {
    let stage = Stage::open();
    let config = SockConfig::default();
    for reach in [Reach::on_one_host(&stage, config), Reach::by_wire(&stage, &bad_wire(sealed()), config)] {
        let poller = epoll_of(reach.listener.as_fd(), epoll::EventFlags::IN);
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 4];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(epoll::wait(&poller, &mut events[..], Some(&at_once)).unwrap(), 0, "nobody calls");
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| reach.here.connect(&reach.address).unwrap());
            reach.listener.set_nonblocking(true).unwrap();
            let accepted = loop {
                next_event(&poller);
                match reach.listener.accept() {
                    Ok((stream, _)) => break stream,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                }
            };
            drop((caller.join().unwrap(), accepted));
        });
    }
}

#[test]
fn a_clone_has_the_same_descriptor_and_shows_the_same() {
    let stage = Stage::open();
    for strategy in STRATEGIES {
        let [one, other] = Reach::on_one_host(&stage, SockConfig { strategy, ..SockConfig::default() }).pair();
        let clone = Wire(other.try_clone().unwrap());
        let poller = epoll_of(clone.descriptor(), epoll::EventFlags::IN);
        (&one).write_all(b"hello").unwrap();
        assert_eq!(next_event(&poller), epoll::EventFlags::IN);
        (&other).read_exact(&mut [0; 5]).unwrap();
        drop(other);
        (&one).write_all(b"more").unwrap();
        assert_eq!(next_event(&poller), epoll::EventFlags::IN);
    }
}
