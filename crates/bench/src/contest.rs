//! How a run goes: rounds of trials, interleaved, until the time is used up.
//!
//! ```text
//! set-up     start the second process, let every contestant meet its other end
//! calibrate  each contestant at each size: how many messages make a trial of fitting length?
//! rounds     for each size: one trial of every contestant, in an order drawn anew,
//!            probe · trial · probe · trial · probe …      each trial stands between two probes
//! select     rows from one state of the machine (`stats`)
//! ```

use crate::connections;
use crate::outsiders::Outsiders;
use crate::pair::{Link, Pair, Role};
use crate::progress::Progress;
use crate::stats::{Measure, Trial, median, select};
use crate::transports::{Contestant, Exercise, Transport};
use crate::{Bench, BenchError, Machine, Options, Report, State};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What the driver asks of the second process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Meet for this contestant, whose messages have up to so many bytes.
    Admit(Contestant, usize),
    /// Run these trials, one after the other.
    Heat(Vec<Start>),
    /// Take part in one probe.
    Probe,
    /// Record the pulses of this burst and tell them.
    Trace(Start),
    /// Open this many virtual interfaces on one completion queue.
    Connections(usize),
    /// Exchange messages on random ones of them.
    Roam {
        /// Which of the crowds opened so far.
        crowd: usize,
        rounds: usize,
        seed: u64,
    },
}

/// One trial.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) contestant: Contestant,
    pub(crate) exercise: Exercise,
    pub(crate) size: usize,
    pub(crate) count: usize,
}

impl Start {
    /// Messages before the clock starts: those who ran before have left nothing of ours in the
    /// caches. A stream goes once through a payload area; frames that were just filled are warm.
    fn warm(&self) -> usize {
        match self.exercise {
            Exercise::Stream if self.contestant != Contestant::Vi => (WARM_AREA_BYTES / self.size).clamp(1, self.count),
            _ => (self.count / 8).clamp(1, 32),
        }
    }
}

/// How a trial went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burst {
    pub(crate) nanoseconds: f64,
    before_ns: f64,
    after_ns: f64,
    state: State,
}

/// The driver's side of everybody who takes part.
pub(crate) struct Contest {
    pub(crate) pair: Pair,
    pub(crate) transports: BTreeMap<Contestant, Box<dyn Transport>>,
}

impl Contest {
    pub(crate) fn open(pair: Pair) -> Contest {
        Contest { pair, transports: BTreeMap::new() }
    }

    pub(crate) fn admit(&mut self, contestant: Contestant, size_max: usize) -> Result<(), BenchError> {
        let link = &mut self.pair.link;
        link.tell(&Command::Admit(contestant, size_max), &[])?;
        match contestant.meet(link, size_max) {
            Ok(transport) => {
                self.transports.insert(contestant, transport);
                Ok(())
            }
            Err(error) => Err(self.pair.explain(error)),
        }
    }

    pub(crate) fn probe(&mut self) -> Result<f64, BenchError> {
        self.pair.link.tell(&Command::Probe, &[])?;
        self.pair.link.probe()
    }

    /// Runs trials one after the other, each between two probes.
    pub(crate) fn heat(&mut self, starts: &[Start]) -> Result<Vec<Burst>, BenchError> {
        let link = &mut self.pair.link;
        link.tell(&Command::Heat(starts.to_vec()), &[])?;
        let mut run = || {
            let mut bursts = Vec::with_capacity(starts.len());
            let mut waited = link.note_wait();
            let mut before_ns = link.probe()?;
            let mut peer_waited = link.peer_wait();
            for start in starts {
                let transport = self.transports.get_mut(&start.contestant).ok_or(BenchError::NobodyLeft)?;
                let Start { exercise, size, count, .. } = *start;
                transport.prepare_for(Role::Driver, exercise, size, start.warm() + count)?;
                link.meet()?;
                transport.lead(exercise, size, start.warm())?;
                let clock = Instant::now();
                transport.lead(exercise, size, count)?;
                let nanoseconds = clock.elapsed().as_nanos() as f64;
                let now_waited = link.note_wait();
                let after_ns = link.probe()?;
                let peer_now = link.peer_wait();
                let lost = (now_waited - waited).max(peer_now.saturating_sub(peer_waited));
                let state = match link.spinning {
                    false => State::OneCore,
                    true if lost as f64 > start.contestant.lost_part_max() * nanoseconds + LOST_NS => State::Disturbed,
                    true => State::of_trial(before_ns, after_ns),
                };
                bursts.push(Burst { nanoseconds, before_ns, after_ns, state });
                (before_ns, waited, peer_waited) = (after_ns, now_waited, peer_now);
            }
            Ok(bursts)
        };
        run().map_err(|error| self.pair.explain(error))
    }
}

/// The peer's side of [`Contest`]: does as it is told until the driver is gone.
pub(crate) fn serve(link: &mut Link) -> Result<(), BenchError> {
    let mut transports: BTreeMap<Contestant, Box<dyn Transport>> = BTreeMap::new();
    let mut crowds = Vec::new();
    while let Some((command, _)) = link.hear_command::<Command>()? {
        match command {
            Command::Admit(contestant, size_max) => {
                transports.insert(contestant, contestant.meet(link, size_max)?);
            }
            Command::Heat(starts) => {
                link.note_wait();
                link.probe()?;
                for start in starts {
                    let Start { contestant, exercise, size, count } = start;
                    let transport = transports.get_mut(&contestant).ok_or(BenchError::NobodyLeft)?;
                    transport.prepare_for(Role::Peer, exercise, size, start.warm() + count)?;
                    link.meet()?;
                    transport.follow(exercise, size, start.warm())?;
                    transport.follow(exercise, size, count)?;
                    link.note_wait();
                    link.probe()?;
                }
            }
            Command::Probe => {
                link.probe()?;
            }
            Command::Trace(start) => crate::pipelining::follow(link, &mut transports, start)?,
            Command::Connections(count) => crowds.push(connections::Crowd::meet(link, count)?),
            Command::Roam { crowd, rounds, seed } => {
                let crowd = crowds.get_mut(crowd).ok_or(BenchError::NobodyLeft)?;
                connections::follow(link, crowd, rounds, seed)?;
            }
        }
    }
    debug_assert_eq!(link.role, Role::Peer);
    Ok(())
}

/// All contestants at one size.
struct Card {
    exercise: Exercise,
    size: usize,
    starts: Vec<Start>,
    longest: Duration,
}

/// Runs a benchmark whose contestants are transports.
pub(crate) fn run(options: &Options, began: Instant) -> Result<Report, BenchError> {
    let deadline = began + Duration::from_secs_f64((options.seconds - TIME_FOR_THE_END).max(0.1));
    let mut notes = Vec::new();
    let cpus = highwire_mem::cpus_allowed();
    let pair = Pair::start(options.one_core)?;
    let spinning = pair.link.spinning;
    if !spinning && !options.one_core {
        notes.push("only one CPU is allowed to this process: both processes run on it, as with --one-core".to_owned());
    }
    let mut contest = Contest::open(pair);
    let contestants = entrants(options, spinning, &mut notes);
    if contestants.is_empty() {
        return Err(BenchError::NobodyLeft);
    }
    let sizes = options.sizes_or_default();
    let size_max = sizes.iter().copied().max().unwrap_or(1);
    for contestant in &contestants {
        contest.admit(*contestant, size_max)?;
    }

    let progress = Progress::new(options, began);
    progress.say("calibrating");
    let mut cards = Vec::new();
    for exercise in options.bench.exercises() {
        for size in &sizes {
            cards.push(calibrate(&mut contest, &contestants, *exercise, *size)?);
        }
    }
    let mut outsiders = Outsiders::new(options, contest.pair.cpus, spinning, &mut notes);

    let mut trials = Vec::new();
    let mut crossings: Vec<(State, f64)> = Vec::new();
    let mut last_crossing = 0.0;
    let mut random = Shuffle(0x9e37_79b9_7f4a_7c15 ^ u64::from(std::process::id()));
    let mut round = 0;
    'rounds: loop {
        for card in &mut cards {
            if let Some(wanted) = options.state.filter(|_| spinning)
                && !wait_for(&mut contest, wanted, deadline, &progress, &mut last_crossing)?
            {
                break 'rounds;
            }
            if Instant::now() + card.longest > deadline {
                break 'rounds;
            }
            let clock = Instant::now();
            random.shuffle(&mut card.starts);
            let bursts = contest.heat(&card.starts)?;
            for (start, burst) in card.starts.iter().zip(&bursts) {
                crossings.push((burst.state, (burst.before_ns + burst.after_ns) / 2.0));
                last_crossing = burst.after_ns;
                for (measure, value) in options.bench.figures(card.exercise, card.size, start.count, burst.nanoseconds)
                {
                    let contestant = start.contestant.name();
                    trials.push(Trial {
                        round,
                        contestant,
                        measure,
                        size: card.size as u64,
                        value,
                        state: burst.state,
                    });
                }
            }
            card.longest = card.longest.max(clock.elapsed());
            outsiders.take_part(&mut contest, round, card.exercise, card.size, deadline, &mut trials)?;
            progress.step(round, bursts.last().map_or(State::Disturbed, |burst| burst.state));
        }
        round += 1;
    }
    progress.done();
    notes.extend(outsiders.notes());
    let trace = match options.bench {
        Bench::Pipelining => crate::pipelining::trace(&mut contest, &contestants)?,
        _ => None,
    };

    let used = contest.pair.cpus;
    drop(contest);
    let wanted = options.state.filter(|_| spinning);
    let Some(selection) = select(&trials, wanted) else {
        return Err(match wanted {
            Some(wanted) => BenchError::StateNeverSeen { wanted, seconds: options.seconds, last_ns: last_crossing },
            None => BenchError::TooShort { seconds: options.seconds },
        });
    };
    if selection.state == State::Disturbed {
        notes.push("the machine was never at rest: every round was disturbed, and the figures mean little".to_owned());
    }
    let crossings: Vec<f64> =
        crossings.iter().filter(|(state, _)| *state == selection.state).map(|(_, crossing)| *crossing).collect();
    Ok(Report {
        bench: options.bench.name().to_owned(),
        command: options.command.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        machine: Machine::this(cpus, used),
        state: selection.state,
        crossing_ns: (spinning && !crossings.is_empty()).then(|| median(&crossings)),
        rounds: selection.rounds,
        seconds: began.elapsed().as_secs_f64(),
        notes,
        rows: selection.rows,
        trace,
    })
}

/// Who takes part: those chosen, less those who would only spin on a single CPU.
fn entrants(options: &Options, spinning: bool, notes: &mut Vec<String>) -> Vec<Contestant> {
    let chosen = options.contestants_or_default();
    let (can, cannot): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|contestant| spinning || !contestant.only_spins());
    if !cannot.is_empty() {
        let names: Vec<&str> = cannot.into_iter().map(Contestant::name).collect();
        notes.push(format!("left out, since two processes cannot spin on one CPU: {}", names.join(", ")));
    }
    can
}

/// Waits until the machine is in the state wanted; false when the time is up.
fn wait_for(
    contest: &mut Contest,
    wanted: State,
    deadline: Instant,
    progress: &Progress,
    last_crossing: &mut f64,
) -> Result<bool, BenchError> {
    loop {
        *last_crossing = contest.probe()?;
        if State::of_crossing(*last_crossing) == wanted {
            return Ok(true);
        }
        if Instant::now() + WAIT_FOR_STATE > deadline {
            return Ok(false);
        }
        progress.say(&format!("waiting for {wanted}, now {:.0} ns", *last_crossing));
        std::thread::sleep(WAIT_FOR_STATE);
    }
}

/// Finds how many messages make a trial of fitting length, and warms everything up.
fn calibrate(
    contest: &mut Contest,
    contestants: &[Contestant],
    exercise: Exercise,
    size: usize,
) -> Result<Card, BenchError> {
    let first = match exercise {
        Exercise::PingPong => 4,
        Exercise::Stream => (WARM_BYTES / size).clamp(4, 2000),
    };
    let start = |contestant| Start { contestant, exercise, size, count: first };
    let mut starts: Vec<Start> = contestants.iter().copied().map(start).collect();
    let clock = Instant::now();
    contest.heat(&starts)?;
    let bursts = contest.heat(&starts)?;
    let warm = clock.elapsed();
    let mut expected = Duration::ZERO;
    for (start, burst) in starts.iter_mut().zip(bursts) {
        let each = burst.nanoseconds / start.count as f64;
        start.count = messages(start.contestant, exercise, size, each);
        expected += Duration::from_nanos((each * start.count as f64) as u64);
    }
    Ok(Card { exercise, size, starts, longest: expected.max(warm / 2) })
}

/// How many messages, each taking so long in a first try, a trial has.
fn messages(contestant: Contestant, exercise: Exercise, size: usize, each_ns: f64) -> usize {
    match exercise {
        Exercise::PingPong => {
            let least = if size > 16 << 10 { 4 } else { 16 };
            ((PING_PONG_NS / each_ns.max(1.0)) as usize).clamp(least, 2000)
        }
        Exercise::Stream => {
            // Long against the payload area that can be filled at once, or one side of a copy would
            // be measured; short enough that all of it stays in the caches.
            let fitting = (STREAM_BYTES / size).max(16);
            let most = if contestant == Contestant::ViReferenced { STREAM_MESSAGES_MAX } else { fitting };
            let least = fitting.min(STREAM_MESSAGES_LEAST);
            ((STREAM_NS / each_ns.max(1.0)) as usize).clamp(least, most.min(STREAM_MESSAGES_MAX))
        }
    }
}

impl Bench {
    fn exercises(self) -> &'static [Exercise] {
        match self {
            Bench::Latency | Bench::Connections => &[Exercise::PingPong],
            Bench::Bandwidth => &[Exercise::Stream],
            Bench::Pipelining => &[Exercise::PingPong, Exercise::Stream],
        }
    }

    /// What a burst of `count` messages in so many nanoseconds says.
    pub(crate) fn figures(
        self,
        exercise: Exercise,
        size: usize,
        count: usize,
        nanoseconds: f64,
    ) -> Vec<(Measure, f64)> {
        let count = count as f64;
        let bandwidth = (Measure::BandwidthGbS, size as f64 * count / nanoseconds);
        match (exercise, self) {
            (Exercise::PingPong, _) => vec![(Measure::LatencyNs, nanoseconds / count / 2.0)],
            (Exercise::Stream, Bench::Pipelining) => vec![bandwidth],
            (Exercise::Stream, _) => vec![bandwidth, (Measure::MessagesPerS, count * 1e9 / nanoseconds)],
        }
    }
}

/// An order drawn anew for each round, so that nobody always follows the same one.
pub(crate) struct Shuffle(pub(crate) u64);

impl Shuffle {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
    }
}

/// Seconds kept back for the trace, the rows and the report.
const TIME_FOR_THE_END: f64 = 0.2;
const WAIT_FOR_STATE: Duration = Duration::from_millis(20);

/// What any trial may wait for its CPU without being disturbed.
const LOST_NS: f64 = 5_000.0;

const PING_PONG_NS: f64 = 300_000.0;
const STREAM_NS: f64 = 800_000.0;
const STREAM_BYTES: usize = 8 << 20;
const STREAM_MESSAGES_LEAST: usize = 256;
const STREAM_MESSAGES_MAX: usize = 50_000;
const WARM_BYTES: usize = 16 << 20;
const WARM_AREA_BYTES: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trials_are_long_enough_and_not_too_long() {
        let ring = |exercise, size, each| messages(Contestant::RawRing, exercise, size, each);
        assert_eq!(ring(Exercise::PingPong, 4, 110.0), 2000);
        assert_eq!(ring(Exercise::PingPong, 4, 50_000.0), 16);
        assert_eq!(ring(Exercise::PingPong, 1 << 20, 1e9), 4);
        assert_eq!(ring(Exercise::Stream, 32 << 10, 1e9), 256);
        assert_eq!(ring(Exercise::Stream, 32 << 10, 1.0), 256);
        assert_eq!(ring(Exercise::Stream, 1 << 20, 1e9), 16);
        assert_eq!(ring(Exercise::Stream, 4, 1.0), 50_000);
        // Who copies nothing must send many to be measured at all.
        assert_eq!(messages(Contestant::ViReferenced, Exercise::Stream, 1 << 20, 40.0), 20_000);
    }

    #[test]
    fn a_burst_says_what_its_bench_asks() {
        let latency = Bench::Latency.figures(Exercise::PingPong, 4, 100, 11_200.0);
        assert_eq!(latency, [(Measure::LatencyNs, 56.0)]);
        let bandwidth = Bench::Bandwidth.figures(Exercise::Stream, 1000, 10, 5000.0);
        assert_eq!(bandwidth, [(Measure::BandwidthGbS, 2.0), (Measure::MessagesPerS, 2e6)]);
        assert_eq!(Bench::Pipelining.figures(Exercise::Stream, 1000, 10, 5000.0).len(), 1);
    }

    #[test]
    fn every_order_comes_and_nobody_is_lost() {
        let mut random = Shuffle(7);
        let mut firsts = [0; 4];
        for _ in 0..4000 {
            let mut items = [0, 1, 2, 3];
            random.shuffle(&mut items);
            firsts[items[0]] += 1;
            items.sort_unstable();
            assert_eq!(items, [0, 1, 2, 3]);
        }
        assert!(firsts.iter().all(|count| (800..1200).contains(count)), "{firsts:?}");
    }
}
