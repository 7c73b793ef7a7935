//! Nodes, a coordinator and clients in a network that delays, loses, cuts and reorders, on clocks that differ; nodes
//! that crash, stop, leave and come back; a coordinator that restarts; in some runs a node that has next to no room, whose
//! objects have to be stored elsewhere. All of it from a seed.
//!
//! What is checked is in [`oracle`]. `HIGHWIRE_SEED=17` plays one seed, `HIGHWIRE_SEEDS=100000` so many.

mod clients;
mod nodes;
mod oracle;

use crate::client::{self, Client, Failure, Operation};
use crate::coordinator::{self, Coordinator, CoordinatorAnswer, CoordinatorRequest};
use crate::donation::View;
use crate::map::{Map, mix};
use crate::node::Node;
use crate::request::{Answer, PeerAnswer, PeerRequest, Request};
use crate::types::{Epoch, Incarnation, NodeId};
use oracle::{Deed, Reasons, Record};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

/// A small generator, so that a seed is the same run everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// A boot clock: begins somewhere, and runs a little too fast or too slow.
#[derive(Clone, Copy, Debug)]
struct Clock {
    offset: u64,
    per_mille: u64,
}

impl Clock {
    fn new(random: &mut Random) -> Clock {
        Clock { offset: random.below(1000 * SECOND), per_mille: 980 + random.below(41) }
    }

    fn at(&self, time: u64) -> u64 {
        self.offset + time / 1000 * self.per_mille
    }

    /// When it will show this.
    fn when(&self, shows: u64) -> u64 {
        (shows.saturating_sub(self.offset) / self.per_mille + 1).saturating_mul(1000)
    }
}

/// A process that is or was a node.
struct Process {
    id: NodeId,
    /// Which process of this node it is.
    life: u64,
    node: Option<Node>,
    clock: Clock,
    /// While it is stopped: what came for it.
    stopped: Option<Vec<NodeInput>>,
    leaving: bool,
    timer: u64,
}

struct Customer {
    client: Client,
    clock: Clock,
    /// Which step of which operation answers are for.
    serial: u64,
    doing: Option<(Operation, usize, usize)>,
    /// When the request was made whose answer is waited for, on its clock.
    asked: u64,
}

enum NodeInput {
    Request { token: u64, request: Request, body: Vec<u8> },
    Peer { from: usize, from_life: u64, ticket: u64, request: PeerRequest, body: Vec<u8> },
    PeerAnswer { ticket: u64, answer: PeerAnswer },
    Coordinator { ticket: u64, answer: CoordinatorAnswer },
    Timer,
}

enum ClientInput {
    Answer(Answer, Vec<u8>),
    Failure(Failure),
    Map(Map),
    Wake,
}

enum Event {
    Node {
        at: usize,
        life: u64,
        input: NodeInput,
    },
    Client {
        at: usize,
        serial: u64,
        input: ClientInput,
    },
    /// To the coordinator, from a node or from a client.
    Coordinator {
        life: u64,
        node: Option<(usize, u64, u64)>,
        client: Option<(usize, u64)>,
        request: CoordinatorRequest,
    },
    CoordinatorTimer,
    Operate {
        at: usize,
    },
    Glance {
        at: usize,
    },
    Chaos,
    Resume {
        at: usize,
    },
    Start {
        at: usize,
    },
    StartCoordinator,
    Heal {
        link: (usize, usize),
    },
}

/// What kind of run it is.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    seed: u64,
    copies: u8,
    nodes: usize,
    clients: usize,
    names: usize,
    pages: u64,
    /// Pages of the first node, where it has fewer than the others: most of the pinned objects find no room there.
    small: Option<u64>,
    loss_percent: u64,
    buckets: u16,
    /// Nodes are lost one at a time, when everything is in its place: with two copies nothing may vanish.
    gentle: bool,
    restarts: bool,
    /// Clients pause less, and more happens to nodes.
    hectic: bool,
    seconds: u64,
}

impl Scenario {
    fn new(seed: u64) -> Scenario {
        let mut random = Random(mix(seed) ^ 0x5eed);
        let copies = 1 + random.below(2) as u8;
        let gentle = copies == 2 && random.chance(50);
        let mut scenario = Scenario {
            seed,
            copies,
            nodes: 2 + random.below(4) as usize + usize::from(gentle),
            clients: 2 + random.below(3) as usize,
            names: 2 + random.below(6) as usize,
            // As many as usual take longer: most of them are empty.
            buckets: if random.chance(3) { 1024 } else { 16 },
            pages: if !gentle && random.chance(25) { 3 + random.below(12) } else { ROOMY_PAGES },
            loss_percent: random.below(8),
            gentle,
            restarts: !gentle && random.chance(40),
            hectic: random.chance(30),
            seconds: 20 + random.below(40),
            small: None,
        };
        // Enough others for all copies.
        if scenario.pages >= ROOMY_PAGES && random.chance(20) {
            scenario.small = Some(1 + random.below(3));
            scenario.nodes = scenario.nodes.max(usize::from(copies) + 1);
        }
        scenario
    }
}

struct Simulation {
    scenario: Scenario,
    random: Random,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    what: BTreeMap<(u64, u64), Event>,
    order: u64,
    coordinator: Option<Coordinator>,
    coordinator_life: u64,
    coordinator_clock: Clock,
    /// Epochs and nodes as the coordinator had them last.
    members: BTreeMap<Incarnation, NodeId>,
    highest: Epoch,
    /// The coordinator's real time is not what it was.
    set_back: bool,
    processes: Vec<Process>,
    customers: Vec<Customer>,
    cuts: BTreeSet<(usize, usize)>,
    views: BTreeMap<Incarnation, (View, usize)>,
    histories: Vec<Vec<Record>>,
    next_value: u64,
    reasons: Reasons,
    ending: bool,
    report: Report,
}

/// What happened in a run, to see that something did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Report {
    puts: u64,
    doubts: u64,
    values: u64,
    absences: u64,
    losses: u64,
    glances: u64,
    old_epochs: u64,
    arriving: u64,
    crashes: u64,
    joins: u64,
    leaves: u64,
    failures: u64,
    lapsed: u64,
    /// Buckets that were placed by the room that nodes have, when runs ended.
    placed: u64,
}

/// Pages of a node that has room for all objects of a run.
const ROOMY_PAGES: u64 = 500;
const COORDINATOR: usize = usize::MAX;
const CLIENTS: usize = 1000;

impl Simulation {
    fn new(scenario: Scenario) -> Simulation {
        let mut random = Random(scenario.seed);
        let coordinator_clock = Clock::new(&mut random);
        let processes = (0..scenario.nodes).map(|at| Process {
            id: NodeId(at as u64 + 1),
            life: 0,
            node: None,
            clock: Clock::new(&mut random),
            stopped: None,
            leaving: false,
            timer: u64::MAX,
        });
        let processes = processes.collect();
        let customers = (0..scenario.clients).map(|_| Customer {
            client: Client::new(client::Config::default(), random.next()),
            clock: Clock::new(&mut random),
            serial: 0,
            doing: None,
            asked: 0,
        });
        let customers = customers.collect();
        let mut simulation = Simulation {
            scenario,
            random,
            now: 0,
            events: BinaryHeap::new(),
            what: BTreeMap::new(),
            order: 0,
            coordinator: None,
            coordinator_life: 0,
            coordinator_clock,
            members: BTreeMap::new(),
            highest: Epoch(0),
            set_back: false,
            processes,
            customers,
            cuts: BTreeSet::new(),
            views: BTreeMap::new(),
            histories: vec![Vec::new(); scenario.names],
            next_value: 1,
            reasons: Reasons { loss_is_none: scenario.gentle, ..Reasons::default() },
            ending: false,
            report: Report::default(),
        };
        simulation.start_coordinator(true);
        for at in 0..scenario.nodes {
            let when = simulation.random.below(5 * SECOND);
            simulation.after(when, Event::Start { at });
        }
        for at in 0..scenario.clients {
            simulation.after(SECOND, Event::Operate { at });
            simulation.after(2 * SECOND, Event::Glance { at });
        }
        simulation.after(8 * SECOND, Event::Chaos);
        simulation
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.order += 1;
        let key = (self.now + delay, self.order);
        self.events.push(Reverse(key));
        self.what.insert(key, event);
    }

    /// Sends something from one to another, unless it is lost.
    fn send(&mut self, from: usize, to: usize, event: Event) {
        let loss = if self.ending { 0 } else { self.scenario.loss_percent };
        if self.cuts.contains(&(from.min(to), from.max(to))) || self.random.chance(loss) {
            return;
        }
        let delay = match self.random.below(100) {
            _ if self.ending => MS,
            0 => self.random.below(4 * SECOND),
            1..10 => self.random.below(200 * MS),
            _ => MS / 10 + self.random.below(5 * MS),
        };
        self.after(delay, event);
    }

    fn run(mut self) -> Result<Report, String> {
        let end = self.scenario.seconds * SECOND;
        while let Some(Reverse(key)) = self.events.pop() {
            let event = self.what.remove(&key).expect("every event is kept");
            self.now = key.0;
            if self.now >= end && !self.ending {
                self.end();
            }
            if self.now >= end + 60 * SECOND {
                return Err(format!("after a minute of peace not all is done: {:?}", self.stuck()));
            }
            self.step(event)?;
            if self.ending && self.is_quiet() {
                break;
            }
        }
        for (name, history) in self.histories.iter().enumerate() {
            oracle::check(history, &self.reasons).map_err(|error| {
                let mut text = format!("name {name}: {error}\n");
                history.iter().for_each(|record| text += &format!("  {record:?}\n"));
                text
            })?;
        }
        self.report.placed = self.coordinator.as_ref().map_or(0, |coordinator| coordinator.placed() as u64);
        Ok(self.report)
    }

    /// Peace: everything that is down comes back, nothing is lost any more, and every name is asked for once more.
    fn end(&mut self) {
        self.ending = true;
        self.cuts.clear();
        if self.coordinator.is_none() {
            self.start_coordinator(false);
        }
        for at in 0..self.processes.len() {
            self.resume(at);
            if self.processes[at].node.is_none() {
                self.after(SECOND, Event::Start { at });
            }
        }
    }

    /// Nodes are all in, content is in its place, and clients have seen every name since.
    fn is_quiet(&self) -> bool {
        let since = self.scenario.seconds * SECOND;
        let settled = || self.coordinator.as_ref().is_some_and(Coordinator::is_quiet);
        let joined = |process: &Process| process.node.as_ref().is_some_and(|node| node.incarnation().is_some());
        let looked = |history: &Vec<Record>| {
            let seen = |record: &Record| {
                record.start > since + 20 * SECOND && matches!(record.deed, Deed::Get { seen: Some(_) })
            };
            history.iter().any(seen)
        };
        // What takes the longest to see comes last.
        self.now > since + 20 * SECOND
            && self.processes.iter().all(joined)
            && self.histories.iter().all(looked)
            && settled()
    }

    /// Whether all has been in its place for so long that whatever has room somewhere is to be stored.
    fn is_at_peace(&self, since: u64) -> bool {
        let peace = self.scenario.seconds * SECOND + 20 * SECOND;
        self.ending && since > peace && self.members.len() == self.scenario.nodes
    }

    fn stuck(&self) -> Vec<String> {
        let mut text = vec![format!("{:?}", self.coordinator.as_ref().map(|coordinator| coordinator.is_quiet()))];
        text.extend(self.processes.iter().map(|process| {
            let life = process.node.as_ref().map(|node| (node.incarnation(), node.map().map(|map| map.epoch)));
            format!("{}: {life:?}", process.id)
        }));
        text
    }

    fn step(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Node { at, life, input } if self.processes[at].life == life => return self.node(at, input),
            Event::Node { .. } => {}
            Event::Client { at, serial, input } if self.customers[at].serial == serial => self.client(at, input)?,
            Event::Client { .. } => {}
            Event::Coordinator { life, node, client, request } => self.coordinator(life, node, client, request),
            Event::CoordinatorTimer => self.tick_coordinator(),
            Event::Operate { at } => self.operate(at)?,
            Event::Glance { at } => {
                self.glance(at)?;
                let pause = self.random.below(200 * MS);
                self.after(pause, Event::Glance { at });
            }
            Event::Chaos if self.ending => {}
            Event::Chaos => {
                self.chaos();
                let most = if self.scenario.hectic { SECOND } else { 4 * SECOND };
                let pause = 100 * MS + self.random.below(most);
                self.after(pause, Event::Chaos);
            }
            Event::Resume { at } => self.resume(at),
            Event::Start { at } => self.start(at),
            Event::StartCoordinator => {
                if self.coordinator.is_none() {
                    self.start_coordinator(false);
                }
            }
            Event::Heal { link } => drop(self.cuts.remove(&link)),
        }
        Ok(())
    }

    fn start_coordinator(&mut self, first: bool) {
        let lease_ns = 3 * SECOND;
        let config = coordinator::Config {
            copies: self.scenario.copies,
            buckets: self.scenario.buckets,
            lease_ns,
            margin_ns: lease_ns / 10,
            alone: first,
            ..coordinator::Config::default()
        };
        // Sometimes the real time was set back.
        self.set_back = self.random.chance(30) && !first;
        let real = if self.set_back { 5 } else { 1_000_000_000 + self.now };
        let (now, random) = (self.coordinator_clock.at(self.now), self.random.next());
        self.coordinator_life += 1;
        self.coordinator = Some(Coordinator::new(config, now, real, random));
        if !first {
            // Nodes of the former one empty themselves. The first that comes says which epoch it saw.
            self.members.clear();
        }
        self.after(100 * MS, Event::CoordinatorTimer);
    }

    fn tick_coordinator(&mut self) {
        let now = self.coordinator_clock.at(self.now);
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.handle_timeout(now);
            self.after(100 * MS, Event::CoordinatorTimer);
        }
        self.watch();
    }

    /// Takes down which nodes were lost, and checks that epochs grow.
    fn watch(&mut self) {
        let Some(coordinator) = &self.coordinator else { return };
        let map = coordinator.map();
        let present: BTreeMap<_, _> = map.nodes.iter().map(|member| (member.incarnation, member.node)).collect();
        if self.members.is_empty() && !present.is_empty() && self.coordinator_life > 1 {
            assert!(map.epoch > self.highest || self.set_back, "{} after {}", map.epoch, self.highest);
            self.reasons.restarts.push(self.now);
            self.highest = Epoch(map.epoch.0 - 1);
        }
        for (incarnation, node) in &self.members {
            if !present.contains_key(incarnation) {
                // Several may have gone since it was looked at last, each with an epoch.
                self.reasons.lost.push((*node, self.highest, map.epoch));
                self.report.losses += 1;
            }
        }
        if !present.is_empty() {
            self.highest = self.highest.max(map.epoch);
        }
        self.members = present;
    }

    fn coordinator(
        &mut self,
        life: u64,
        node: Option<(usize, u64, u64)>,
        client: Option<(usize, u64)>,
        request: CoordinatorRequest,
    ) {
        let now = self.coordinator_clock.at(self.now);
        let Some(coordinator) = self.coordinator.as_mut().filter(|_| life == self.coordinator_life) else { return };
        let answer = coordinator.handle(now, request);
        self.watch();
        if let Some((at, life, ticket)) = node {
            self.report.joins += u64::from(matches!(answer, CoordinatorAnswer::Joined { .. }));
            self.report.leaves += u64::from(matches!(answer, CoordinatorAnswer::Left));
            self.send(COORDINATOR, at, Event::Node { at, life, input: NodeInput::Coordinator { ticket, answer } });
        } else if let (Some((at, serial)), CoordinatorAnswer::Map(map)) = (client, answer) {
            let input = map.map_or(ClientInput::Wake, ClientInput::Map);
            self.send(COORDINATOR, CLIENTS + at, Event::Client { at, serial, input });
        }
    }
}

/// On a machine that is busy.
const SEEDS_MIN: u64 = 40;
/// On any other: as many seeds as there is time for.
const QUICK: std::time::Duration = std::time::Duration::from_secs(15);

#[test]
fn nothing_stale_is_seen_and_nothing_vanishes_without_a_reason() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (chosen, count) = (number("HIGHWIRE_SEED"), number("HIGHWIRE_SEEDS"));
    let began = std::time::Instant::now();
    let mut all = Report::default();
    let mut done = 0;
    for seed in chosen.unwrap_or(0).. {
        let enough = match (chosen, count) {
            (Some(_), None) => done == 1,
            (_, Some(count)) => done == count,
            (None, None) => began.elapsed() > QUICK && done >= SEEDS_MIN,
        };
        if enough {
            break;
        }
        let scenario = Scenario::new(seed);
        let outcome = std::panic::catch_unwind(|| Simulation::new(scenario).run());
        match outcome {
            Ok(Ok(report)) => {
                if chosen.is_some() {
                    println!("{scenario:?}\n{report:?}");
                }
                all.add(&report);
            }
            Ok(Err(error)) => panic!("HIGHWIRE_SEED={seed}: {scenario:?}\n{error}"),
            Err(_) => panic!("HIGHWIRE_SEED={seed}: {scenario:?} panicked"),
        }
        done += 1;
    }
    println!("{done} seeds: {all:?}");
    if chosen.is_none() {
        let Report { doubts, values, absences, losses, glances, old_epochs, arriving, leaves, lapsed, placed, .. } =
            all;
        let each = [doubts, values, absences, losses, glances, old_epochs, arriving, leaves, lapsed, placed];
        assert!(each.iter().all(|count| *count > 10), "{done} seeds did too little: {all:?}");
    }
}

#[test]
fn a_seed_is_the_same_run_each_time() {
    for seed in [1, 2] {
        let run = || Simulation::new(Scenario::new(seed)).run().unwrap();
        assert_eq!(run(), run());
    }
}

impl Report {
    fn add(&mut self, other: &Report) {
        self.puts += other.puts;
        self.doubts += other.doubts;
        self.values += other.values;
        self.absences += other.absences;
        self.losses += other.losses;
        self.glances += other.glances;
        self.old_epochs += other.old_epochs;
        self.arriving += other.arriving;
        self.crashes += other.crashes;
        self.joins += other.joins;
        self.leaves += other.leaves;
        self.failures += other.failures;
        self.lapsed += other.lapsed;
        self.placed += other.placed;
    }
}
