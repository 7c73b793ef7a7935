//! Many virtual interfaces between two processes: what they cost, and how fast a message on a random
//! one of them is, when each side waits for all of them on one completion queue.

use crate::contest::{Command, Shuffle};
use crate::machine::kilobytes;
use crate::pair::{Link, Pair, Patience, Role};
use crate::progress::Progress;
use crate::stats::{Measure, Row, Trial, median, select};
use crate::transports::{Contestant, vi};
use crate::{Bench, BenchError, Machine, Options, Report, State};
use highwire::{Completion, CompletionQueue, Nic, Operation, PostError, Receive, Region, Vi, ViId, ViOptions};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// All virtual interfaces of one number, on one side.
pub(crate) struct Crowd {
    vis: Vec<Vi>,
    by_id: HashMap<ViId, usize>,
    queue: CompletionQueue,
    spinning: bool,
    /// VIs on which a message has arrived that was not asked for yet.
    arrived: Vec<usize>,
    _nic: Nic,
    _memory: Region,
}

impl Crowd {
    /// Connects `count` VIs; both sides call this.
    pub(crate) fn meet(link: &mut Link, count: usize) -> Result<Crowd, BenchError> {
        let nic = Nic::open().map_err(BenchError::library(NAME, "opening a Nic"))?;
        let queue = nic.completion_queue().map_err(BenchError::library(NAME, "making a completion queue"))?;
        let memory = nic.register(count * BUFFER_BYTES).map_err(BenchError::library(NAME, "registering memory"))?;
        let vis = vi::connect_many(NAME, &nic, link, &ViOptions::new().queue(&queue), count)?;
        let by_id = vis.iter().enumerate().map(|(place, vi)| (vi.id(), place)).collect();
        let mut crowd = Crowd {
            vis,
            by_id,
            queue,
            spinning: link.spinning,
            arrived: Vec::new(),
            _nic: nic,
            _memory: memory.clone(),
        };
        for (place, vi) in crowd.vis.iter_mut().enumerate() {
            let buffer = memory
                .slice(place * BUFFER_BYTES..(place + 1) * BUFFER_BYTES)
                .map_err(BenchError::library(NAME, "taking a buffer"))?;
            vi.post_recv(Receive::new(0).into(buffer)).map_err(BenchError::library(NAME, "posting a receive"))?;
        }
        link.meet()?;
        // Every slot of every ring is used once, so that all memory they will ever need is there.
        for place in 0..count {
            for _ in 0..MESSAGES_ON_EACH {
                crowd.exchange(link.role, place)?;
            }
        }
        link.meet()?;
        Ok(crowd)
    }

    /// Sends messages back and forth, each on another VI; both sides call this.
    pub(crate) fn roam(&mut self, role: Role, rounds: usize, seed: u64) -> Result<(), BenchError> {
        let mut random = Shuffle(seed);
        for _ in 0..rounds {
            let place = (random.next() % self.vis.len() as u64) as usize;
            self.exchange(role, place)?;
        }
        Ok(())
    }

    /// One message there and one back. The peer does not know where it comes: the queue tells it.
    fn exchange(&mut self, role: Role, place: usize) -> Result<(), BenchError> {
        if role == Role::Driver {
            self.send(place)?;
        }
        let found = self.receive()?;
        assert_eq!(found, place, "a message arrived on another VI than the one it was sent on");
        if role == Role::Peer {
            self.send(place)?;
        }
        Ok(())
    }

    fn send(&mut self, place: usize) -> Result<(), BenchError> {
        loop {
            match self.vis[place].send_bytes(0, &[1; MESSAGE_BYTES]) {
                Ok(()) => return Ok(()),
                Err(PostError::NoRoom { .. }) => self.drain(place)?,
                Err(error) => return Err(BenchError::library(NAME, "sending")(error)),
            }
        }
    }

    fn receive(&mut self) -> Result<usize, BenchError> {
        let mut patience = Patience::default();
        loop {
            if let Some(place) = self.arrived.pop() {
                return Ok(place);
            }
            let ready = if self.spinning {
                self.queue.poll()
            } else {
                Some(self.queue.wait(TIMEOUT).map_err(BenchError::library(NAME, "waiting"))?)
            };
            match ready.and_then(|id| self.by_id.get(&id).copied()) {
                Some(place) => self.drain(place)?,
                None => patience.spin()?,
            }
        }
    }

    /// Takes everything that a VI has.
    fn drain(&mut self, place: usize) -> Result<(), BenchError> {
        while let Some(done) = self.vis[place].poll() {
            self.handle(place, done)?;
        }
        Ok(())
    }

    fn handle(&mut self, place: usize, done: Completion) -> Result<(), BenchError> {
        if let Err(failure) = done.status {
            return Err(BenchError::library(NAME, "an operation")(failure));
        }
        if done.operation == Operation::Receive {
            self.arrived.push(place);
            if let Some(buffer) = done.into_buffer() {
                let again = Receive::new(0).into(buffer);
                self.vis[place].post_recv(again).map_err(BenchError::library(NAME, "posting a receive"))?;
            }
        }
        Ok(())
    }
}

/// Runs the benchmark: the driver's side.
pub(crate) fn run(options: &Options, began: Instant) -> Result<Report, BenchError> {
    let deadline = began + Duration::from_secs_f64((options.seconds - TIME_FOR_THE_END).max(0.1));
    let cpus = highwire_mem::cpus_allowed();
    let mut pair = Pair::start(options.one_core)?;
    let progress = Progress::new(options, began);
    let outcome = measure(options, deadline, &mut pair, &progress);
    progress.done();
    let Measured { memory, trials, crossings, last_crossing } = outcome.map_err(|error| pair.explain(error))?;
    let (used, spinning) = (pair.cpus, pair.link.spinning);
    drop(pair);

    let wanted = options.state.filter(|_| spinning);
    let Some(mut selection) = select(&trials, wanted) else {
        return Err(match wanted {
            Some(wanted) => BenchError::StateNeverSeen { wanted, seconds: options.seconds, last_ns: last_crossing },
            None => BenchError::TooShort { seconds: options.seconds },
        });
    };
    selection.rows.extend(memory);
    let crossings: Vec<f64> =
        crossings.iter().filter(|(state, _)| *state == selection.state).map(|(_, crossing)| *crossing).collect();
    Ok(Report {
        bench: Bench::Connections.name().to_owned(),
        command: options.command.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: Machine::this(cpus, used),
        state: selection.state,
        crossing_ns: (spinning && !crossings.is_empty()).then(|| median(&crossings)),
        rounds: selection.rounds,
        seconds: began.elapsed().as_secs_f64(),
        notes: vec![format!(
            "memory is the growth of both processes (Pss, shared pages counted once) after {MESSAGES_ON_EACH} \
             messages each way on every VI"
        )],
        rows: selection.rows,
        trace: None,
    })
}

struct Measured {
    memory: Vec<Row>,
    trials: Vec<Trial>,
    crossings: Vec<(State, f64)>,
    last_crossing: f64,
}

fn measure(options: &Options, deadline: Instant, pair: &mut Pair, progress: &Progress) -> Result<Measured, BenchError> {
    let numbers = options.sizes_or_default();
    // The first VI of a process pays for what comes only once: threads, heaps, pages of code.
    let warm = crowd(pair, 1)?;
    let mut crowds = Vec::new();
    let mut memory = Vec::new();
    for number in &numbers {
        progress.say(&format!("connecting {number}"));
        let before = memory_bytes(pair)?;
        crowds.push(crowd(pair, *number)?);
        let growth = memory_bytes(pair)? - before;
        memory.push(Row {
            contestant: NAME.to_owned(),
            measure: Measure::MemoryBytes,
            size: *number as u64,
            median: growth,
            p10: growth,
            p90: growth,
            p99: growth,
            count: 1,
            of_floor: None,
        });
    }
    drop(warm);

    let mut outcome = Measured { memory, trials: Vec::new(), crossings: Vec::new(), last_crossing: 0.0 };
    let mut random = Shuffle(0x9e37_79b9_7f4a_7c15 ^ u64::from(std::process::id()));
    let mut round = 0;
    let mut longest = Duration::ZERO;
    while Instant::now() + longest < deadline {
        let clock = Instant::now();
        if let Some(wanted) = options.state.filter(|_| pair.link.spinning) {
            pair.link.tell(&Command::Probe, &[])?;
            outcome.last_crossing = pair.link.probe()?;
            if State::of_crossing(outcome.last_crossing) != wanted {
                progress.say(&format!("waiting for {wanted}, now {:.0} ns", outcome.last_crossing));
                std::thread::sleep(WAIT_FOR_STATE);
                continue;
            }
        }
        let mut order: Vec<usize> = (0..crowds.len()).collect();
        random.shuffle(&mut order);
        for place in order {
            let seed = random.next();
            // The crowd that only warmed up is the peer's first.
            pair.link.tell(&Command::Roam { crowd: place + 1, rounds: ROUNDS, seed }, &[])?;
            let before = pair.link.probe()?;
            pair.link.meet()?;
            let start = Instant::now();
            crowds[place].roam(Role::Driver, ROUNDS, seed)?;
            let nanoseconds = start.elapsed().as_nanos() as f64;
            let after = pair.link.probe()?;
            let state = if pair.link.spinning { State::of_trial(before, after) } else { State::OneCore };
            outcome.crossings.push((state, (before + after) / 2.0));
            outcome.last_crossing = after;
            outcome.trials.push(Trial {
                round,
                contestant: NAME,
                measure: Measure::LatencyNs,
                size: numbers[place] as u64,
                value: nanoseconds / ROUNDS as f64 / 2.0,
                state,
            });
            progress.step(round, state);
        }
        longest = longest.max(clock.elapsed());
        round += 1;
    }
    Ok(outcome)
}

fn crowd(pair: &mut Pair, count: usize) -> Result<Crowd, BenchError> {
    pair.link.tell(&Command::Connections(count), &[])?;
    Crowd::meet(&mut pair.link, count)
}

/// The peer's part of a trial.
pub(crate) fn follow(link: &mut Link, crowd: &mut Crowd, rounds: usize, seed: u64) -> Result<(), BenchError> {
    link.probe()?;
    link.meet()?;
    crowd.roam(Role::Peer, rounds, seed)?;
    link.probe()?;
    Ok(())
}

/// Memory of both processes. A page that both map counts half in each.
fn memory_bytes(pair: &Pair) -> Result<f64, BenchError> {
    let mut bytes = 0;
    for process in [std::process::id(), pair.peer_id()] {
        let table = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
        bytes += kilobytes(&table, "Pss:").unwrap_or(0) * 1024;
    }
    Ok(bytes as f64)
}

const NAME: &str = Contestant::Vi.name();
const TIMEOUT: Duration = Duration::from_secs(5);
const TIME_FOR_THE_END: f64 = 0.2;
const WAIT_FOR_STATE: Duration = Duration::from_millis(20);
const MESSAGE_BYTES: usize = 4;
const BUFFER_BYTES: usize = 64;
const MESSAGES_ON_EACH: usize = 128;
/// Round trips of a trial.
const ROUNDS: usize = 500;
