//! Random calls on both ends of a connection, compared with what kernel TCP does on loopback: what is read, how much,
//! which errors, and what `poll(2)` shows. One thread plays both ends, so that it knows what is determined.
//!
//! What is meant to differ, and is not held against a stream:
//!
//! * A write to an end that has closed fails at once, where TCP takes the first one and loses it.
//! * How much fits before a writer has to wait; that it has to wait at last, and is not shown as writable then, is
//!   compared, and so is everything that was written.
//! * A reset after an orderly end is no error, where TCP has a broken pipe to tell, and no longer is connected.
//! * What a reset takes along of the data that was on its way: all that was read before it is right, and the error is
//!   the same.
//!
//! Left out: writing to an end that has shut both ways and is not closed, for which TCP resets the connection, and
//! writing nothing to one that is gone.
//!
//! `HIGHWIRE_SEED=17` plays one sequence and prints each call with both results; `HIGHWIRE_SEEDS=100000` plays so many.

mod model;
mod play;
mod wrong;

use crate::support::Stage;
use crate::support::seeded::Seeded;
use crate::support::socket::{Socket, Tcp, Unix, Wire};
use crate::support::wire::{Reach, STRATEGIES, bad_wire, sealed};
use highwire_proto::Keys;
use highwire_sock::SockConfig;
use model::{KERNEL_BUFFER_BYTES, Nature};
use play::{Disagreement, Play, Stack, Tally};
use rustix::net::sockopt;
use std::net::{TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use wrong::{FAULTS, Wrong};

/// What is compared with TCP: what it is, how it differs, and a new connection of it.
type Subject = (String, Nature, Stack);

/// Plays the seeds of one test, each on a new connection of kernel TCP and a new one of the subject's.
struct Tournament {
    listener: TcpListener,
    /// The call that is being made, for whoever wonders what hangs.
    call: Arc<Mutex<String>>,
    stage: Stage,
}

impl Tournament {
    fn new() -> Tournament {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, KERNEL_BUFFER_BYTES).unwrap();
        let call = Arc::new(Mutex::new(String::new()));
        let now = call.clone();
        let limit = Duration::from_secs(100) + Duration::from_millis(100) * asked_seeds().unwrap_or(0) as u32;
        let stage = Stage::open_and_say(limit, move || now.lock().unwrap().clone());
        Tournament { listener, call, stage }
    }

    fn tcp_pair(&self) -> [Tcp; 2] {
        let one = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        let (other, _) = self.listener.accept().unwrap();
        for stream in [&one, &other] {
            sockopt::set_socket_send_buffer_size(stream, KERNEL_BUFFER_BYTES).unwrap();
            sockopt::set_socket_recv_buffer_size(stream, KERNEL_BUFFER_BYTES).unwrap();
        }
        [Tcp(one), Tcp(other)]
    }

    /// One sequence.
    fn play(&self, seed: u64, subject: impl FnOnce(&mut Seeded) -> Subject) -> Result<Tally, Disagreement> {
        let mut seeded = Seeded::from(seed);
        let (title, nature, subject) = subject(&mut seeded);
        let (call, aloud) = (self.call.clone(), only_seed().is_some());
        let told = move |line: &str| {
            *call.lock().unwrap() = format!("seed {seed}: {line}");
            if aloud {
                eprintln!("{line}");
            }
        };
        Play::new(title, seeded, nature, [stack(self.tcp_pair()), subject], told).run()
    }

    /// So many sequences, or as many as the environment says; fails with the first that differs.
    fn play_all(&self, count: u64, mut subject: impl FnMut(&mut Seeded) -> Subject) -> Tally {
        let mut all = Tally::new();
        for seed in seeds(count) {
            match self.play(seed, &mut subject) {
                Ok(tally) => tally.into_iter().for_each(|(what, times)| *all.entry(what).or_default() += times),
                Err(disagreement) => {
                    let test = std::thread::current().name().unwrap_or_default().to_owned();
                    let again = format!("HIGHWIRE_SEED={seed} cargo nextest run -p highwire-sock --no-capture {test}");
                    panic!("{disagreement}\nto play it again: {again}");
                }
            }
        }
        all
    }
}

fn stack<S: Socket + 'static>(pair: [S; 2]) -> Stack {
    pair.map(|socket| vec![Box::new(socket) as Box<dyn Socket>])
}

fn only_seed() -> Option<u64> {
    std::env::var("HIGHWIRE_SEED").ok()?.parse().ok()
}

fn seeds(count: u64) -> RangeInclusive<u64> {
    only_seed().map_or(1..=asked_seeds().unwrap_or(count), |only| only..=only)
}

fn asked_seeds() -> Option<u64> {
    std::env::var("HIGHWIRE_SEEDS").ok()?.parse().ok()
}

/// As TCP itself is.
fn tcp(seeded: &mut Seeded, pair: Stack) -> Subject {
    let polled = [seeded.once_in(2), seeded.once_in(2)];
    let nature =
        Nature { swallows: true, delayed: false, messages: 16, chunk_bytes: 32 << 10, polled, patience: PATIENCE };
    ("TCP".to_owned(), nature, pair)
}

/// Streams over every kind of interface that there is, one of which each seed picks.
struct Arena {
    reaches: Vec<(Reach, SockConfig)>,
    delayed: bool,
}

impl Arena {
    /// Every strategy, and a window that is soon full.
    fn new(delayed: bool, mut reach: impl FnMut(SockConfig) -> Reach) -> Arena {
        let mut reaches = Vec::new();
        for strategy in STRATEGIES {
            let usual = SockConfig { strategy, ..SockConfig::default() };
            let small = SockConfig { window: 8, acknowledge: 3, chunk_bytes: 1000, combine: false, ..usual };
            reaches.extend([usual, small].map(|config| (reach(config), config)));
        }
        Arena { reaches, delayed }
    }

    fn pair(&self, seeded: &mut Seeded) -> Subject {
        let (reach, config) = seeded.pick(&self.reaches);
        let nature = Nature {
            swallows: false,
            delayed: self.delayed,
            // So many are not yet acknowledged, though they were read.
            messages: (config.window - config.acknowledge) as usize,
            chunk_bytes: config.chunk_bytes,
            polled: [seeded.once_in(2), seeded.once_in(2)],
            patience: PATIENCE,
        };
        (format!("{config:?}"), nature, stack(reach.pair().map(Wire)))
    }
}

/// Whoever compares nothing finds no difference.
fn everything_was_seen(all: &Tally) {
    if only_seed().is_some() {
        return;
    }
    for seen in [
        "Read: Bytes",
        "Read: Bytes(0)",
        "Read: Failed(WouldBlock)",
        "Read: Failed(ConnectionReset)",
        "Peek: Bytes",
        "Peek: Bytes(0)",
        "Write: Bytes",
        "Write: Failed(BrokenPipe)",
        "Write: Failed(ConnectionReset)",
        "Fill: Failed(WouldBlock)",
        "Drain: Failed(ConnectionReset)",
        "ReadInVain: Failed(WouldBlock)",
        "Shutdown: Failed(NotConnected)",
        "TakeError: Error(Some(ConnectionReset))",
    ] {
        assert!(all.get(seen).is_some_and(|times| *times >= 5), "{seen} was seen in fewer than 5 places: {all:#?}");
    }
}

#[test]
fn streams_of_one_host_agree_with_tcp() {
    let tournament = Tournament::new();
    let arena = Arena::new(false, |config| Reach::on_one_host(&tournament.stage, config));
    let all = tournament.play_all(3000, |seeded| arena.pair(seeded));
    everything_was_seen(&all);
}

#[test]
fn streams_over_a_bad_wire_agree_with_tcp() {
    let tournament = Tournament::new();
    let arena = Arena::new(true, |config| Reach::by_wire(&tournament.stage, &bad_wire(Keys::insecure()), config));
    tournament.play_all(200, |seeded| arena.pair(seeded));
}

#[test]
fn streams_over_a_bad_wire_that_is_sealed_agree_with_tcp() {
    let tournament = Tournament::new();
    let arena = Arena::new(true, |config| Reach::by_wire(&tournament.stage, &bad_wire(sealed()), config));
    tournament.play_all(200, |seeded| arena.pair(seeded));
}

#[test]
fn tcp_agrees_with_itself_and_shows_everything_that_is_compared() {
    let tournament = Tournament::new();
    let all = tournament.play_all(1500, |seeded| tcp(seeded, stack(tournament.tcp_pair())));
    everything_was_seen(&all);
}

#[test]
fn unix_sockets_are_told_from_tcp() {
    let tournament = Tournament::new();
    let pair = || stack(<[UnixStream; 2]>::from(UnixStream::pair().unwrap()).map(Unix::new));
    let found = (1..=200).filter_map(|seed| {
        let subject = |seeded: &mut Seeded| {
            let (title, nature, pair) = tcp(seeded, pair());
            (title, Nature { swallows: false, ..nature }, pair)
        };
        tournament.play(seed, subject).err()
    });
    let found: Vec<Disagreement> = found.take(20).collect();
    found.iter().for_each(|found| eprintln!("{found}\n"));
    assert!(found.len() == 20, "{} of 200 sequences differ", found.len());
}

#[test]
fn every_fault_is_found() {
    let tournament = Tournament::new();
    for fault in FAULTS {
        let found = (1..=300).find_map(|seed| {
            let subject = |seeded: &mut Seeded| {
                let pair = tournament.tcp_pair().map(|tcp| Wrong::new(tcp, fault));
                // What comes, comes at once.
                let patience = Duration::from_millis(200);
                let (_, nature, pair) = tcp(seeded, stack(pair));
                (format!("{fault:?}"), Nature { patience, ..nature }, pair)
            };
            tournament.play(seed, subject).err()
        });
        let found = found.unwrap_or_else(|| panic!("{fault:?} was not found in 300 sequences"));
        eprintln!("{fault:?}: seed {}, step {}, {:?}", found.seed, found.step, found.call);
    }
}

/// How long anything may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);
