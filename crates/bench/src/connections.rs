//! Many virtual interfaces between two processes: what they cost, and how fast a message on a random
//! one of them is, when each side waits for all of them on one completion queue.

use crate::contest::{Burst, Command, Contest, Landed};
use crate::machine::kilobytes;
use crate::network::Network;
use crate::pair::{Link, PATIENCE, Pair, Patience, Role};
use crate::progress::Progress;
use crate::rounds::{Record, Shuffle};
use crate::stats::{Cost, Measure, Row, Trial};
use crate::transports::{Contestant, Exercise, vi};
use crate::{BenchError, Options, Report, State};
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
    nic: Nic,
    _memory: Region,
}

impl Crowd {
    /// Connects `count` VIs; both sides call this.
    pub(crate) fn meet(link: &mut Link, count: usize) -> Result<Crowd, BenchError> {
        let nic = Nic::open().map_err(BenchError::library(NAME, "opening a Nic"))?;
        let queue = nic.completion_queue().map_err(BenchError::library(NAME, "making a completion queue"))?;
        let memory = nic.register(count * BUFFER_BYTES).map_err(BenchError::library(NAME, "registering memory"))?;
        let vis = vi::connect_many(NAME, &nic, link, None, &vec![ViOptions::new().queue(&queue); count])?;
        let by_id = vis.iter().enumerate().map(|(place, vi)| (vi.id(), place)).collect();
        let mut crowd =
            Crowd { vis, by_id, queue, spinning: link.spinning, arrived: Vec::new(), nic, _memory: memory.clone() };
        for (place, vi) in crowd.vis.iter_mut().enumerate() {
            let buffer = memory
                .slice(place * BUFFER_BYTES..(place + 1) * BUFFER_BYTES)
                .map_err(BenchError::library(NAME, "taking a buffer"))?;
            vi.post_recv(Receive::new(0).into(buffer)).map_err(BenchError::library(NAME, "posting a receive"))?;
        }
        link.meet()?;
        // Every slot of every ring is used once, so that all memory they will ever need is there.
        for place in 0..count {
            for _ in 0..crowd.nic.config().depth {
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
                Some(self.queue.wait(PATIENCE).map_err(BenchError::library(NAME, "waiting"))?)
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
    let mut record = Record::new(options, began);
    let pair = Pair::start(options.one_core, &Network::loopback())?;
    record.note_place(&pair);
    let note = "memory is the growth of both processes (Pss, shared pages counted once) after every slot was used";
    record.notes.push(note.to_owned());
    let progress = Progress::new(options, began);
    let mut contest = Contest::open(pair);
    let measured = measure(&mut contest, &mut record, &progress);
    progress.done();
    let memory = measured.map_err(|error| contest.pair.explain(error))?;
    drop(contest);
    let mut report = record.report()?;
    report.rows.extend(memory);
    Ok(report)
}

fn measure(contest: &mut Contest, record: &mut Record<'_>, progress: &Progress) -> Result<Vec<Row>, BenchError> {
    let numbers = record.options.sizes_of(Exercise::PingPong);
    // The first VI of a process pays for what comes only once: threads, heaps, pages of code.
    let _warm = crowd(&mut contest.pair, 1)?;
    let mut crowds = Vec::new();
    let mut memory = Vec::new();
    for number in &numbers {
        progress.say(&format!("connecting {number}"));
        let before = memory_bytes(&contest.pair)?;
        crowds.push(crowd(&mut contest.pair, *number)?);
        let growth = memory_bytes(&contest.pair)? - before;
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
            of_vi: None,
            cost: Cost::default(),
        });
    }

    let mut random = Shuffle::new();
    let mut order: Vec<usize> = (0..crowds.len()).collect();
    let mut longest = Duration::ZERO;
    for round in 0.. {
        if !record.wait_for_state(contest, progress)? || Instant::now() + longest > record.deadline {
            break;
        }
        let clock = Instant::now();
        random.shuffle(&mut order);
        for place in &order {
            // The crowd that only warmed up is the peer's first.
            let burst = trial(&mut contest.pair, &mut crowds[*place], place + 1, random.next())?;
            record.note_crossings(burst.state, burst.before_ns, burst.after_ns);
            record.trials.push(Trial {
                round,
                contestant: NAME,
                measure: Measure::LatencyNs,
                size: numbers[*place] as u64,
                value: burst.nanoseconds / ROUND_TRIPS as f64 / 2.0,
                state: burst.state,
                preempted: burst.preempted,
                cost: Cost::default(),
            });
            progress.step(round, burst.state);
        }
        longest = longest.max(clock.elapsed());
    }
    Ok(memory)
}

/// Round trips on random VIs of a crowd, between two probes.
fn trial(pair: &mut Pair, crowd: &mut Crowd, number: usize, seed: u64) -> Result<Burst, BenchError> {
    let link = &mut pair.link;
    link.tell(&Command::Roam { crowd: number, rounds: ROUND_TRIPS, seed }, &[])?;
    let waited = link.note_wait();
    let before_ns = link.probe()?;
    let peer_waited = link.peer_wait();
    link.meet()?;
    let start = Instant::now();
    crowd.roam(Role::Driver, ROUND_TRIPS, seed)?;
    let nanoseconds = start.elapsed().as_nanos() as f64;
    let now_waited = link.note_wait();
    let after_ns = link.probe()?;
    let lost = (now_waited - waited).max(link.peer_wait().saturating_sub(peer_waited));
    let spinning = link.spinning;
    let state = if spinning { State::of_trial(before_ns, after_ns) } else { State::OneCore };
    let preempted = spinning && lost as f64 > Contestant::Vi.lost_ns_max(Exercise::PingPong, nanoseconds);
    Ok(Burst {
        nanoseconds,
        delivery: None,
        cpu_ns: [0; 2],
        landed: Landed::default(),
        interfering: 0,
        before_ns,
        after_ns,
        state,
        preempted,
    })
}

fn crowd(pair: &mut Pair, count: usize) -> Result<Crowd, BenchError> {
    pair.link.tell(&Command::Connections(count), &[])?;
    Crowd::meet(&mut pair.link, count)
}

/// The peer's part of a trial.
pub(crate) fn follow(link: &mut Link, crowd: &mut Crowd, rounds: usize, seed: u64) -> Result<(), BenchError> {
    link.note_wait();
    link.probe()?;
    link.meet()?;
    crowd.roam(Role::Peer, rounds, seed)?;
    link.note_wait();
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
const MESSAGE_BYTES: usize = 4;
const BUFFER_BYTES: usize = 64;
/// Round trips of a trial.
const ROUND_TRIPS: usize = 500;
