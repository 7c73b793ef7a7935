//! How a run goes: rounds of trials, interleaved, until the time is used up.
//!
//! ```text
//! set-up     start the second process, let every contestant meet its other end
//! calibrate  each contestant at each size: how many messages make a trial of fitting length?
//! rounds     for each size, one heat: every contestant once, in an order drawn anew
//! select     rows from one state of the machine (`stats`)
//! ```

use crate::contest::{Burst, Contest, Start, WARM_AREA_BYTES};
use crate::folder::Folder;
use crate::netmem;
use crate::network::Network;
use crate::outsiders::Outsiders;
use crate::pair::{Link, Pair};
use crate::progress::Progress;
use crate::report::size_label;
use crate::rpc;
use crate::stats::{Cost, Measure, Trial, median, select};
use crate::transports::programs::{PINGPONG, unpack};
use crate::transports::{Contestant, Exercise, files};
use crate::{Bench, BenchError, Machine, Options, Report, State};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Runs a benchmark whose contestants are transports.
pub(crate) fn run(options: &Options, began: Instant) -> Result<Report, BenchError> {
    measure(Record::new(options, began), &Network::loopback())
}

/// The same, on this network.
pub(crate) fn measure(mut record: Record<'_>, network: &Network) -> Result<Report, BenchError> {
    let Record { options, began, .. } = record;
    let pair = Pair::start(options.one_core, network)?;
    record.note_place(&pair);
    let spinning = pair.link.spinning;
    let mut contestants = entrants(options, &pair.link, &mut record.notes)?;
    let mut contest = Contest::open(pair);
    let of_messages = |(exercise, size)| {
        let parts = contestants.iter().filter_map(move |contestant: &Contestant| contestant.part(exercise, size));
        parts.filter(|(exercise, _)| *exercise != Exercise::File).map(|(_, size)| size).max()
    };
    let size_max = options.programme().into_iter().filter_map(of_messages).max().unwrap_or(1);
    let starts_programs = options.bench == Bench::Lane || contestants.iter().any(|contestant| contestant.is_served());
    let mut folder = starts_programs.then(Folder::for_programs).transpose()?;
    let pingpong = match &folder {
        Some(folder) if options.bench == Bench::Lane => Some(unpack(folder, "pingpong", PINGPONG)?),
        _ => None,
    };
    let mut lost = Vec::new();
    for contestant in &contestants {
        match &mut folder {
            _ if contestant.reads_pages() => {
                if let Err(why) = netmem::admit(&mut contest, *contestant, options) {
                    record.leave_out(*contestant, why)?;
                    lost.push(*contestant);
                }
            }
            Some(folder) if contestant.is_served() => {
                let sizes = [options.sizes_of(Exercise::Fetch), options.sizes_of(Exercise::FetchMany)].concat();
                if let Err(why) = rpc::admit(&mut contest, *contestant, &sizes, folder) {
                    record.leave_out(*contestant, why)?;
                    lost.push(*contestant);
                }
            }
            _ => match &pingpong {
                Some(program) => contest.admit_program(*contestant, program)?,
                None => contest.admit(*contestant, size_max)?,
            },
        }
    }
    contestants.retain(|contestant| !lost.contains(contestant));
    if contestants.is_empty() {
        return Err(BenchError::NobodyLeft);
    }
    let progress = Progress::new(options, began);
    progress.say("calibrating");
    let mut cards = programme(&mut contest, &contestants, &mut record)?;
    let mut outsiders = Outsiders::new(options, contest.pair.cpus, spinning, &mut record.notes);
    rounds(&mut contest, &mut cards, &mut outsiders, &mut record, &progress)?;
    progress.done();
    record.note_left_out(cards.iter().filter(|card| card.is_idle_file()).map(|card| (card.exercise, card.size)));
    record.notes.extend(outsiders.notes());
    let trace = match options.bench {
        Bench::Pipelining => crate::pipelining::trace(&mut contest, &contestants)?,
        _ => None,
    };
    drop(contest);
    if let Some(folder) = &mut folder {
        folder.forget_groups()?;
    }
    Ok(Report { trace, ..record.report()? })
}

/// All contestants at one size.
struct Card {
    exercise: Exercise,
    size: usize,
    starts: Vec<Start>,
    longest: Duration,
    /// What it has taken in all.
    used: Duration,
}

impl Card {
    /// Whether it is of a file that was never sent.
    fn is_idle_file(&self) -> bool {
        self.exercise == Exercise::File && self.used.is_zero()
    }

    /// Whether others are to go on without it: a large file takes as long as everything else together.
    fn is_out_of_turn(&self, record: &Record<'_>) -> bool {
        let too_much = self.used > record.began.elapsed().mul_f64(FILE_PART_MAX);
        self.exercise == Exercise::File && (too_much || Instant::now() + self.longest > record.deadline)
    }
}

/// Everything that is to be measured, in the order of a round.
fn programme(
    contest: &mut Contest,
    contestants: &[Contestant],
    record: &mut Record<'_>,
) -> Result<Vec<Card>, BenchError> {
    let options = record.options;
    let mut cards = Vec::new();
    let mut left_out = Vec::new();
    for (exercise, size) in options.programme() {
        let part = |contestant: &Contestant| {
            let (exercise, size) = contestant.part(exercise, size)?;
            Some(Start { contestant: *contestant, exercise, size, count: 1 })
        };
        let taking_part: Vec<Start> = contestants.iter().filter_map(part).collect();
        if taking_part.is_empty() {
            continue;
        }
        if exercise == Exercise::File
            && let Some(why) = files::too_large(size)
        {
            record.notes.push(why);
            continue;
        }
        if record.began.elapsed().as_secs_f64() < options.seconds * CALIBRATION_PART_MAX {
            cards.push(calibrate(contest, options.bench, taking_part, exercise, size)?);
        } else {
            left_out.push((exercise, size));
        }
    }
    record.note_left_out(left_out.into_iter());
    Ok(cards)
}

fn rounds(
    contest: &mut Contest,
    cards: &mut [Card],
    outsiders: &mut Outsiders,
    record: &mut Record<'_>,
    progress: &Progress,
) -> Result<(), BenchError> {
    let mut random = Shuffle::new();
    for round in 0.. {
        if cards.is_empty() {
            break;
        }
        let only_files = cards.iter().all(|card| card.exercise == Exercise::File);
        for card in &mut *cards {
            if !only_files && card.is_out_of_turn(record) {
                continue;
            }
            if !record.wait_for_state(contest, progress)? || Instant::now() + card.longest > record.deadline {
                return Ok(());
            }
            let clock = Instant::now();
            random.shuffle(&mut card.starts);
            let bursts = contest.heat(&card.starts)?;
            for (start, burst) in card.starts.iter().zip(&bursts) {
                record.note_burst(round, start, burst);
            }
            card.longest = card.longest.max(clock.elapsed());
            card.used += clock.elapsed();
            outsiders.take_part(contest, round, card.exercise, card.size, record)?;
            progress.step(round, bursts.last().map_or(State::Disturbed, |burst| burst.state));
        }
    }
    Ok(())
}

/// What a run has found so far.
pub(crate) struct Record<'a> {
    pub(crate) options: &'a Options,
    pub(crate) began: Instant,
    /// When the last trial must have ended.
    pub(crate) deadline: Instant,
    pub(crate) trials: Vec<Trial>,
    pub(crate) notes: Vec<String>,
    /// What packets went through.
    pub(crate) network: Option<&'static str>,
    /// Bytes sent and bytes arrived, of those who may lose some.
    deliveries: BTreeMap<Contestant, (u64, u64)>,
    machine: Machine,
    spinning: bool,
    crossings: Vec<(State, f64)>,
    last_crossing: f64,
}

impl<'a> Record<'a> {
    pub(crate) fn new(options: &'a Options, began: Instant) -> Record<'a> {
        let measured = (options.seconds - TIME_FOR_THE_END).max(0.1);
        Record {
            options,
            began,
            deadline: began + Duration::from_secs_f64(measured),
            trials: Vec::new(),
            notes: Vec::new(),
            network: None,
            deliveries: BTreeMap::new(),
            // Before the processes are put on their CPUs, to see all that are allowed.
            machine: Machine::this(highwire_mem::cpus_allowed(), (0, 0)),
            spinning: false,
            crossings: Vec::new(),
            last_crossing: 0.0,
        }
    }

    /// Where the two processes run.
    pub(crate) fn note_place(&mut self, pair: &Pair) {
        self.machine.cpus_used = pair.cpus;
        self.spinning = pair.link.spinning;
        if !self.spinning && !self.options.one_core {
            let note = "only one CPU is allowed to this process: both processes run on it, as with --one-core";
            self.notes.push(note.to_owned());
        }
    }

    /// Tells that somebody cannot take part; where it was asked for by name, the run ends.
    fn leave_out(&mut self, contestant: Contestant, why: BenchError) -> Result<(), BenchError> {
        if self.options.contestants.contains(&contestant) {
            return Err(why);
        }
        self.notes.push(format!("{contestant} IS LEFT OUT: {why}"));
        Ok(())
    }

    fn note_left_out(&mut self, cards: impl Iterator<Item = (Exercise, usize)>) {
        let bench = self.options.bench.name();
        let label = |(exercise, size): (Exercise, usize)| {
            format!("{} of {}", exercise.figure(), size_label(bench, exercise.measure(), size as u64))
        };
        let labels: Vec<String> = cards.map(label).collect();
        if !labels.is_empty() {
            let seconds = self.options.seconds;
            self.notes.push(format!("left out, since {seconds} seconds are too few: {}", labels.join(", ")));
        }
    }

    /// The state that was asked for, where there are states.
    fn wanted(&self) -> Option<State> {
        self.options.state.filter(|_| self.spinning)
    }

    /// Waits until the machine is in the state wanted; false when the time is up.
    pub(crate) fn wait_for_state(&mut self, contest: &mut Contest, progress: &Progress) -> Result<bool, BenchError> {
        let Some(wanted) = self.wanted() else { return Ok(true) };
        loop {
            self.last_crossing = contest.probe()?;
            if State::of_crossing(self.last_crossing) == wanted {
                return Ok(true);
            }
            if Instant::now() + WAIT_FOR_STATE > self.deadline {
                return Ok(false);
            }
            progress.say(&format!("waiting for {wanted}, now {:.0} ns", self.last_crossing));
            std::thread::sleep(WAIT_FOR_STATE);
        }
    }

    fn note_burst(&mut self, round: u32, start: &Start, burst: &Burst) {
        let Start { contestant, size, .. } = *start;
        let figures = self.options.bench.figures(start, burst);
        if let Some(delivery) = burst.delivery {
            let (sent, arrived) = self.deliveries.entry(contestant).or_default();
            *sent += delivery.sent;
            *arrived += delivery.bytes;
        }
        self.note_crossings(burst.state, burst.before_ns, burst.after_ns);
        self.trials.extend(figures.into_iter().map(|(measure, value)| Trial {
            round,
            contestant: contestant.name(),
            measure,
            size: size as u64,
            value,
            state: burst.state,
            preempted: burst.preempted,
            cost: Cost::default(),
        }));
    }

    pub(crate) fn note_crossings(&mut self, state: State, before_ns: f64, after_ns: f64) {
        self.crossings.push((state, (before_ns + after_ns) / 2.0));
        self.last_crossing = after_ns;
    }

    /// The rows, and what is needed to judge them.
    pub(crate) fn report(mut self) -> Result<Report, BenchError> {
        let seconds = self.options.seconds;
        let wanted = self.wanted();
        let Some(selection) = select(self.options.bench.name(), &self.trials, wanted) else {
            return Err(match wanted {
                Some(wanted) => BenchError::StateNeverSeen { wanted, seconds, last_ns: self.last_crossing },
                None => BenchError::TooShort { seconds },
            });
        };
        if selection.state == State::Disturbed {
            let note = "THE MACHINE WAS NEVER AT REST: every round was disturbed, and the figures mean little";
            self.notes.push(note.to_owned());
        }
        if !selection.disturbed.is_empty() {
            let bench = self.options.bench.name();
            let label = |(name, measure, size): &(String, Measure, u64)| {
                format!("{name} at {}", size_label(bench, *measure, *size))
            };
            let mut rows: Vec<String> = selection.disturbed.iter().map(label).collect();
            rows.sort();
            rows.dedup();
            self.notes.push(format!("something else ran during nearly every trial of {}", rows.join(", ")));
        }
        for (contestant, (sent, arrived)) in &self.deliveries {
            let part = 100.0 * *arrived as f64 / *sent as f64;
            self.notes.push(format!("{contestant}: {part:.1} % of what was sent arrived, and is what counts"));
        }
        let of_state = |(state, crossing): &(State, f64)| (*state == selection.state).then_some(*crossing);
        let crossings: Vec<f64> = self.crossings.iter().filter_map(of_state).collect();
        Ok(Report {
            bench: self.options.bench.name().to_owned(),
            command: self.options.command.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine: self.machine,
            network: self.network.map(str::to_owned),
            state: selection.state,
            crossing_ns: (self.spinning && !crossings.is_empty()).then(|| median(&crossings)),
            rounds: selection.rounds,
            seconds: self.began.elapsed().as_secs_f64(),
            notes: self.notes,
            rows: selection.rows,
            trace: None,
        })
    }
}

/// Who takes part: those chosen, less those who would only spin on a single CPU, those whose wire is not there, and
/// those whose program is not.
fn entrants(options: &Options, link: &Link, notes: &mut Vec<String>) -> Result<Vec<Contestant>, BenchError> {
    let mut leave_out = |those: Vec<Contestant>, why: &str| {
        if !those.is_empty() {
            let names: Vec<&str> = those.into_iter().map(Contestant::name).collect();
            notes.push(format!("left out, since {why}: {}", names.join(", ")));
        }
    };
    let chosen = options.contestants_or_default();
    let (can, cannot): (Vec<_>, Vec<_>) =
        chosen.into_iter().partition(|contestant| link.spinning || !contestant.only_spins());
    leave_out(cannot, "two processes cannot spin on one CPU");
    let (can, cannot): (Vec<_>, Vec<_>) =
        can.into_iter().partition(|contestant| link.address(contestant.wire()).is_ok());
    leave_out(cannot, "there is no device with its offloads off");
    let mut here = Vec::new();
    for contestant in can {
        match rpc::missing(contestant).or_else(|| netmem::missing(contestant)) {
            None => here.push(contestant),
            Some(why) if options.contestants.contains(&contestant) => {
                return Err(BenchError::Missing(format!("{contestant} cannot be measured: {why}")));
            }
            Some(why) => notes.push(format!("{contestant} IS LEFT OUT: {why}")),
        }
    }
    if here.is_empty() { Err(BenchError::NobodyLeft) } else { Ok(here) }
}

/// Finds how many messages make a trial of fitting length, and warms everything up.
fn calibrate(
    contest: &mut Contest,
    bench: Bench,
    mut starts: Vec<Start>,
    exercise: Exercise,
    size: usize,
) -> Result<Card, BenchError> {
    if exercise == Exercise::File {
        return calibrate_files(contest, &starts, size);
    }
    let largest = starts.iter().map(|start| start.contestant.message_bytes(start.size)).max();
    for start in &mut starts {
        start.count = match start.exercise {
            Exercise::PingPong | Exercise::Call | Exercise::Fetch => 4,
            Exercise::FetchMany => 16,
            Exercise::Calls => 2 * size,
            Exercise::RandomPages | Exercise::Sequential => 16,
            Exercise::Stream | Exercise::StreamAsleep | Exercise::Interfered | Exercise::File => {
                (WARM_AREA_BYTES / largest.unwrap_or(1)).clamp(4, 500)
            }
        };
    }
    contest.heat(&starts)?;
    // A few messages take as long as it takes to begin: what they say is tried, and corrected.
    let tries = match bench {
        Bench::Wire | Bench::Sockets | Bench::Lane if exercise == Exercise::PingPong => 3,
        Bench::Rpc | Bench::Netmem => 2,
        _ => 1,
    };
    let (mut warm, mut expected) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..tries {
        let clock = Instant::now();
        let bursts = contest.heat(&starts)?;
        warm = clock.elapsed();
        expected = Duration::ZERO;
        for (start, burst) in starts.iter_mut().zip(bursts) {
            let each = burst.nanoseconds / start.count as f64;
            start.count = match bench {
                Bench::Rpc if start.exercise.is_of_calls() => calls(start, each),
                Bench::Netmem if start.exercise.is_of_pages() => pages(start, each),
                Bench::Rpc | Bench::Netmem if start.contestant.needs_tending() => {
                    messages_on_a_wire(start.exercise, each)
                }
                Bench::Rpc | Bench::Netmem => messages(start.contestant, start.exercise, start.size, each),
                Bench::Wire | Bench::Landing => messages_on_a_wire(exercise, each),
                Bench::Lane => messages_of_a_program(exercise, size, each),
                Bench::Sockets if !matches!(start.contestant, Contestant::Vi | Contestant::ViBuffered) => {
                    messages_of_a_stream(start, each)
                }
                _ => messages(start.contestant, exercise, size, each),
            };
            expected += Duration::from_nanos((each * start.count as f64) as u64);
        }
    }
    Ok(Card { exercise, size, starts, longest: expected.max(warm), used: Duration::ZERO })
}

/// One file is a trial. How long it takes is tried with the part of it that takes little.
fn calibrate_files(contest: &mut Contest, starts: &[Start], size: usize) -> Result<Card, BenchError> {
    let exercise = Exercise::File;
    let part = size.min(FILE_TRIED_BYTES);
    let sized = |size| move |start: &Start| Start { exercise, size, count: 1, ..*start };
    let tried: Vec<Start> = starts.iter().map(sized(part)).collect();
    let clock = Instant::now();
    contest.heat(&tried)?;
    let longest = clock.elapsed().mul_f64(size as f64 / part as f64);
    Ok(Card { exercise, size, starts: starts.iter().map(sized(size)).collect(), longest, used: Duration::ZERO })
}

/// How many messages, each taking so long in a first try, a trial has.
fn messages(contestant: Contestant, exercise: Exercise, size: usize, each_ns: f64) -> usize {
    match exercise {
        Exercise::PingPong => {
            let least = if size > 16 << 10 { 4 } else { 16 };
            ((PING_PONG_NS / each_ns.max(1.0)) as usize).clamp(least, 2000)
        }
        _ => {
            // Long against the payload area that can be filled at once, or one side of a copy would
            // be measured; short enough that all of it stays in the caches.
            let fitting = (STREAM_BYTES / size).max(4);
            let most = match contestant {
                Contestant::ViReferenced => STREAM_MESSAGES_MAX,
                // Each message is another frame: no more of them than a payload area has bytes.
                Contestant::Vi => (WARM_AREA_BYTES / size).max(4),
                _ => fitting,
            };
            let least = most.min(STREAM_MESSAGES_LEAST);
            ((STREAM_NS / each_ns.max(1.0)) as usize).clamp(least, most.min(STREAM_MESSAGES_MAX))
        }
    }
}

/// How many calls a trial has; where several are under way, it is mostly so.
fn calls(start: &Start, each_ns: f64) -> usize {
    let (nanoseconds, least) = match start.exercise {
        Exercise::Calls => (CALLS_NS, CALLS_LEAST.max(4 * start.size)),
        Exercise::FetchMany => (FETCHES_NS, 32),
        _ => (CALLS_NS, if start.size > 16 << 10 { 4 } else { CALLS_LEAST }),
    };
    ((nanoseconds / each_ns.max(1.0)) as usize).clamp(least, CALLS_MAX)
}

/// How many pages or pieces of a region a trial has. None of them comes twice where the region is of the usual size.
fn pages(start: &Start, each_ns: f64) -> usize {
    let (nanoseconds, most) = match start.exercise {
        Exercise::RandomPages => (RANDOM_PAGES_NS, RANDOM_PAGES_MAX),
        _ => (SEQUENTIAL_NS, SEQUENTIAL_BYTES_MAX / start.size),
    };
    ((nanoseconds / each_ns.max(1.0)) as usize).clamp(16, most.max(16))
}

/// The same of a stream socket. Much is under way at a time; nothing of it needs a place of its own in the caches.
fn messages_of_a_stream(start: &Start, each_ns: f64) -> usize {
    let nanoseconds = match (start.exercise, start.contestant.needs_tending()) {
        (Exercise::PingPong, false) => PING_PONG_NS,
        (Exercise::PingPong, true) => WIRE_PING_PONG_NS,
        (_, false) => STREAM_SOCKET_NS,
        (_, true) => WIRE_STREAM_SOCKET_NS,
    };
    let least = (STREAM_SOCKET_BYTES_LEAST / start.size).clamp(4, 64);
    ((nanoseconds / each_ns.max(1.0)) as usize).clamp(least, STREAM_SOCKET_WRITES_MAX)
}

/// The same of a program, which has to be told to begin, and to be heard.
fn messages_of_a_program(exercise: Exercise, size: usize, each_ns: f64) -> usize {
    let (nanoseconds, least) = match exercise {
        Exercise::PingPong => (WIRE_PING_PONG_NS, 16),
        _ => (WIRE_STREAM_NS, (STREAM_SOCKET_BYTES_LEAST / size).clamp(4, 64)),
    };
    ((nanoseconds / each_ns.max(1.0)) as usize).clamp(least, STREAM_SOCKET_WRITES_MAX)
}

/// The same on a wire, where much is under way at a time, and a window has to open again after a rest.
fn messages_on_a_wire(exercise: Exercise, each_ns: f64) -> usize {
    let (nanoseconds, least) = match exercise {
        Exercise::PingPong => (WIRE_PING_PONG_NS, 8),
        Exercise::Stream => (WIRE_STREAM_NS, 16),
        Exercise::StreamAsleep => (WIRE_ASLEEP_NS, 16),
        Exercise::Interfered => (WIRE_INTERFERED_NS, 16),
        _ => (0.0, 1),
    };
    ((nanoseconds / each_ns.max(1.0)) as usize).clamp(least, STREAM_MESSAGES_MAX)
}

impl Bench {
    pub(crate) fn exercises(self) -> &'static [Exercise] {
        match self {
            Bench::Latency | Bench::Connections => &[Exercise::PingPong],
            Bench::Bandwidth => &[Exercise::Stream],
            Bench::Pipelining | Bench::Lane => &[Exercise::PingPong, Exercise::Stream],
            Bench::Wire => &[Exercise::PingPong, Exercise::Stream, Exercise::StreamAsleep],
            Bench::Landing => &[Exercise::Stream, Exercise::StreamAsleep, Exercise::Interfered],
            Bench::Sockets => &[Exercise::PingPong, Exercise::Stream, Exercise::File],
            Bench::Netmem => &[Exercise::RandomPages, Exercise::Sequential],
            Bench::Rpc => &[Exercise::Call, Exercise::Fetch, Exercise::FetchMany, Exercise::Calls],
            Bench::Apps => &[],
        }
    }

    /// What a burst says.
    pub(crate) fn figures(self, start: &Start, burst: &Burst) -> Vec<(Measure, f64)> {
        let count = start.count as f64;
        let nanoseconds = burst.nanoseconds;
        let bytes = burst.delivery.map_or(start.bytes() as f64, |delivery| delivery.bytes as f64);
        let bandwidth = bytes / burst.delivery.map_or(nanoseconds, |delivery| delivery.nanoseconds);
        match (start.exercise, self) {
            (Exercise::PingPong, _) => {
                let ways = if start.contestant.is_exchange() { 1.0 } else { 2.0 };
                vec![(Measure::LatencyNs, nanoseconds / count / ways)]
            }
            (Exercise::Stream, Bench::Sockets) if start.size != MESSAGES_OF_BYTES => {
                vec![(Measure::BandwidthGbS, bandwidth)]
            }
            (Exercise::Call, _) => vec![(Measure::CallNs, nanoseconds / count)],
            (Exercise::Fetch, _) => vec![(Measure::FetchNs, nanoseconds / count)],
            (Exercise::FetchMany, _) => vec![(Measure::FetchGbS, bandwidth)],
            (Exercise::Calls, _) => vec![(Measure::CallsPerS, count * 1e9 / nanoseconds)],
            (Exercise::RandomPages, _) => vec![(Measure::RandomPageNs, nanoseconds / count)],
            (Exercise::Sequential, _) => vec![(Measure::SequentialGbS, bandwidth)],
            (Exercise::File, _) => vec![(Measure::FileMbS, 1e3 * bandwidth)],
            (Exercise::Stream, Bench::Pipelining | Bench::Wire | Bench::Lane | Bench::Rpc | Bench::Netmem) => {
                vec![(Measure::BandwidthGbS, bandwidth)]
            }
            (Exercise::Stream, Bench::Landing) if start.contestant.has_destination() => {
                vec![(Measure::BandwidthGbS, bandwidth)]
            }
            (Exercise::Stream, Bench::Landing) => {
                let success = 100.0 * (1.0 - burst.landed.failed_and_copied().0);
                vec![(Measure::BandwidthGbS, bandwidth), (Measure::SuccessPercent, success)]
            }
            (Exercise::Interfered, _) => {
                let (failed, copied) = burst.landed.failed_and_copied();
                let packets = burst.landed.packets.max(1) as f64;
                vec![
                    (Measure::BandwidthGbS, bandwidth),
                    (Measure::FailedPackets, PACKETS_INTERFERED * failed),
                    (Measure::CopiedPackets, PACKETS_INTERFERED * copied),
                    (Measure::InterferingPackets, PACKETS_INTERFERED * burst.interfering as f64 / packets),
                ]
            }
            (Exercise::Stream, _) => {
                vec![(Measure::BandwidthGbS, bandwidth), (Measure::MessagesPerS, count * 1e9 / nanoseconds)]
            }
            (Exercise::StreamAsleep, _) => {
                let [sender, receiver] = burst.cpu_ns.map(|nanoseconds| nanoseconds as f64 / bytes.max(1.0));
                vec![(Measure::SenderCpuSPerGb, sender), (Measure::ReceiverCpuSPerGb, receiver)]
            }
        }
    }
}

/// An order drawn anew for each round, so that nobody always follows the same one.
pub(crate) struct Shuffle(pub(crate) u64);

impl Shuffle {
    pub(crate) fn new() -> Shuffle {
        Shuffle(0x9e37_79b9_7f4a_7c15 ^ u64::from(std::process::id()))
    }

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
/// The part of the time that calibration may take.
const CALIBRATION_PART_MAX: f64 = 0.4;
const WAIT_FOR_STATE: Duration = Duration::from_millis(20);

const PING_PONG_NS: f64 = 300_000.0;
const STREAM_NS: f64 = 800_000.0;
const WIRE_PING_PONG_NS: f64 = 3_000_000.0;
const WIRE_STREAM_NS: f64 = 20_000_000.0;
const WIRE_ASLEEP_NS: f64 = 40_000_000.0;
/// About the 100,000 packets of the paper's table.
const WIRE_INTERFERED_NS: f64 = 60_000_000.0;
/// The packets of which it is told how many failed.
const PACKETS_INTERFERED: f64 = 100_000.0;
/// Some tens of calls over TCP, and as much of everybody else.
const CALLS_NS: f64 = 2_000_000.0;
const CALLS_LEAST: usize = 16;
const CALLS_MAX: usize = 50_000;
const FETCHES_NS: f64 = 20_000_000.0;
/// Some dozens of reads of a disk, and a good part of the region where nothing has to be read from there.
const RANDOM_PAGES_NS: f64 = 20_000_000.0;
const RANDOM_PAGES_MAX: usize = 4096;
const SEQUENTIAL_NS: f64 = 40_000_000.0;
const SEQUENTIAL_BYTES_MAX: usize = 128 << 20;
/// Long against all that a stream takes before its reader reads.
const STREAM_SOCKET_NS: f64 = 2_000_000.0;
const WIRE_STREAM_SOCKET_NS: f64 = 10_000_000.0;
const STREAM_SOCKET_BYTES_LEAST: usize = 1 << 20;
const STREAM_SOCKET_WRITES_MAX: usize = 200_000;
/// The size at which messages are counted by themselves.
const MESSAGES_OF_BYTES: usize = 64;
/// The part of the time that files of one size may take, once they have been sent at all.
const FILE_PART_MAX: f64 = 0.15;
/// What tells how long a file will take.
const FILE_TRIED_BYTES: usize = 4 << 20;
const STREAM_BYTES: usize = 8 << 20;
const STREAM_MESSAGES_LEAST: usize = 256;
const STREAM_MESSAGES_MAX: usize = 50_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contest::Landed;
    use crate::transports::Delivery;

    #[test]
    fn trials_are_long_enough_and_not_too_long() {
        let ring = |exercise, size, each| messages(Contestant::RawRing, exercise, size, each);
        assert_eq!(ring(Exercise::PingPong, 4, 110.0), 2000);
        assert_eq!(ring(Exercise::PingPong, 4, 50_000.0), 16);
        assert_eq!(ring(Exercise::PingPong, 1 << 20, 1e9), 4);
        assert_eq!(ring(Exercise::Stream, 32 << 10, 1e9), 256);
        assert_eq!(ring(Exercise::Stream, 32 << 10, 1.0), 256);
        assert_eq!(ring(Exercise::Stream, 1 << 20, 1e9), 8);
        assert_eq!(messages(Contestant::Vi, Exercise::Stream, 1 << 20, 1e9), 4);
        assert_eq!(ring(Exercise::Stream, 4, 1.0), 50_000);
        // Who copies nothing must send many to be measured at all.
        assert_eq!(messages(Contestant::ViReferenced, Exercise::Stream, 1 << 20, 40.0), 20_000);
    }

    #[test]
    fn a_slow_stream_is_not_waited_for_longer_than_it_takes_to_see_that() {
        let start = |contestant, exercise, size| Start { contestant, exercise, size, count: 4 };
        let sock = |exercise, size, each| messages_of_a_stream(&start(Contestant::Sock, exercise, size), each);
        assert_eq!(sock(Exercise::PingPong, 4, 150.0), 2000);
        assert_eq!(sock(Exercise::Stream, 64, 40.0), 50_000);
        assert_eq!(sock(Exercise::Stream, 4, 1.0), STREAM_SOCKET_WRITES_MAX);
        assert_eq!(sock(Exercise::Stream, 1 << 20, 1e9), 4);
        let program = |exercise, size, each| messages_of_a_program(exercise, size, each);
        assert_eq!(program(Exercise::PingPong, 4, 300.0), 10_000);
        assert_eq!(program(Exercise::PingPong, 4, 1e9), 16);
        assert_eq!(program(Exercise::Stream, 1 << 20, 1e9), 4);
        let sealed = start(Contestant::SockUdpSealed, Exercise::Stream, 32768);
        assert_eq!(messages_of_a_stream(&sealed, 20_000.0), 500);
    }

    #[test]
    fn as_many_calls_are_made_as_are_to_be_under_way_and_more() {
        let start = |exercise, size| Start { contestant: Contestant::Redis, exercise, size, count: 4 };
        assert_eq!(calls(&start(Exercise::Call, 0), 20_000.0), 100);
        assert_eq!(calls(&start(Exercise::Call, 0), 1e9), 16);
        assert_eq!(calls(&start(Exercise::Fetch, 1 << 20), 1e9), 4);
        assert_eq!(calls(&start(Exercise::Calls, 256), 1e9), 1024);
        assert_eq!(calls(&start(Exercise::Calls, 1), 1.0), CALLS_MAX);
    }

    #[test]
    fn what_is_chosen_of_calls_and_pages_is_measured() {
        let usual = Options::new(Bench::Rpc);
        let of = |options: &Options, wanted| -> Vec<usize> {
            options.programme().into_iter().filter(|(exercise, _)| *exercise == wanted).map(|(_, size)| size).collect()
        };
        assert_eq!(of(&usual, Exercise::Call), [0]);
        assert_eq!(of(&usual, Exercise::Fetch), [8192, 1 << 20]);
        assert_eq!(of(&usual, Exercise::FetchMany), [1 << 20]);
        assert_eq!(of(&usual, Exercise::Calls), [1, 2, 4, 8, 16, 32, 64, 128, 256]);
        let chosen = Options { sizes: vec![64], outstanding: vec![7, 3], ..usual.clone() };
        assert_eq!(of(&chosen, Exercise::Call), [0]);
        assert_eq!([of(&chosen, Exercise::Fetch), of(&chosen, Exercise::FetchMany)], [[64], [64]]);
        assert_eq!(of(&chosen, Exercise::Calls), [3, 7]);
        let one = Options { measures: vec![Measure::CallsPerS], ..chosen };
        assert_eq!(one.programme(), [(Exercise::Calls, 3), (Exercise::Calls, 7)]);
        let pages = Options { sizes: vec![65536], ..Options::new(Bench::Netmem) };
        assert_eq!(pages.programme(), [(Exercise::RandomPages, 4096), (Exercise::Sequential, 65536)]);
        // Other libraries take part where they are wanted.
        assert!(!usual.contestants_or_default().contains(&Contestant::Tarpc));
        let peers = Options { peers: true, contestants: vec![Contestant::Redis], ..usual };
        assert_eq!(peers.contestants_or_default(), [Contestant::Redis, Contestant::Tonic, Contestant::Tarpc]);
    }

    #[test]
    fn a_burst_says_what_its_bench_asks() {
        let start = |exercise, size, count| Start { contestant: Contestant::UdpGso, exercise, size, count };
        let (before_ns, after_ns, state, preempted) = (50.0, 50.0, State::Near, false);
        let (delivery, cpu_ns, landed) = (None, [0; 2], Landed::default());
        let burst = Burst {
            nanoseconds: 5000.0,
            delivery,
            cpu_ns,
            landed,
            interfering: 2,
            before_ns,
            after_ns,
            state,
            preempted,
        };
        let latency = Bench::Latency.figures(&start(Exercise::PingPong, 4, 50), &burst);
        assert_eq!(latency, [(Measure::LatencyNs, 50.0)]);
        let stream = start(Exercise::Stream, 1000, 10);
        let bandwidth = Bench::Bandwidth.figures(&stream, &burst);
        assert_eq!(bandwidth, [(Measure::BandwidthGbS, 2.0), (Measure::MessagesPerS, 2e6)]);
        assert_eq!(Bench::Pipelining.figures(&stream, &burst).len(), 1);
        // Of what may be lost, only what arrived counts, and the time that took.
        let delivery = Some(Delivery { sent: 10_000, bytes: 8000, nanoseconds: 2000.0 });
        let burst = Burst { delivery, cpu_ns: [4000, 2000], ..burst };
        assert_eq!(Bench::Wire.figures(&stream, &burst), [(Measure::BandwidthGbS, 4.0)]);
        let cpu = Bench::Wire.figures(&start(Exercise::StreamAsleep, 1000, 10), &burst);
        assert_eq!(cpu, [(Measure::SenderCpuSPerGb, 0.5), (Measure::ReceiverCpuSPerGb, 0.25)]);
        // Where messages have one length, a size is something else.
        let landed = Landed { hits: 990, copied: 5, packets: 1000 };
        let burst = Burst { nanoseconds: 2.0 * 1_048_576.0, delivery: None, landed, ..burst };
        let start = |contestant, exercise, size| Start { contestant, exercise, size, count: 4 };
        let interfered = Bench::Landing.figures(&start(Contestant::Interference, Exercise::Interfered, 100), &burst);
        assert_eq!(interfered[0], (Measure::BandwidthGbS, 2.0));
        assert!(matches!(interfered[1], (Measure::FailedPackets, failed) if (failed - 1000.0).abs() < 1e-6));
        assert!(matches!(interfered[2], (Measure::CopiedPackets, copied) if (copied - 500.0).abs() < 1e-6));
        assert!(matches!(interfered[3], (Measure::InterferingPackets, sent) if (sent - 200.0).abs() < 1e-6));
        let four = Bench::Landing.figures(&start(Contestant::FourSenders, Exercise::Stream, 1 << 20), &burst);
        assert!(matches!(four[1], (Measure::SuccessPercent, percent) if (percent - 99.0).abs() < 1e-6));
        // Small messages are counted, at one size.
        let combined = |size| Bench::Sockets.figures(&start(Contestant::Combining, Exercise::Stream, size), &burst);
        assert_eq!(combined(64).last().map(|figure| figure.0), Some(Measure::MessagesPerS));
        assert_eq!(combined(256).len(), 1);
        let file = Start { count: 1, ..start(Contestant::Sock, Exercise::File, 4 << 20) };
        assert_eq!(Bench::Sockets.figures(&file, &burst), [(Measure::FileMbS, 2000.0)]);
        let rpc = |exercise, size| Bench::Rpc.figures(&start(Contestant::Redis, exercise, size), &burst)[0];
        assert_eq!(rpc(Exercise::Call, 0), (Measure::CallNs, 524_288.0));
        assert_eq!(rpc(Exercise::Fetch, 8192), (Measure::FetchNs, 524_288.0));
        assert_eq!(rpc(Exercise::FetchMany, 1 << 20), (Measure::FetchGbS, 2.0));
        assert!(matches!(rpc(Exercise::Calls, 256), (Measure::CallsPerS, rate) if (rate - 1907.3).abs() < 0.1));
        let landing = Bench::Landing.figures(&start(Contestant::Landing, Exercise::Stream, 1 << 20), &burst);
        assert_eq!(landing, [(Measure::BandwidthGbS, 2.0)]);
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
