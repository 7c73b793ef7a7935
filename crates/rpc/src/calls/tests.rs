//! The two halves of a session together, over a link that is cut, with servers that die: no call runs twice, and none
//! is lost without word.

use super::*;
use crate::session::{Admission, Session};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

#[test]
fn numbers_go_up_and_the_window_holds() {
    let mut calls = Calls::new(4);
    for sequence in 1..=4 {
        assert_eq!(calls.begin(), Some(sequence));
        assert_eq!(calls.send(sequence), sequence as u32 - 1);
    }
    assert_eq!(calls.begin(), None);
    assert!(calls.end(3) && !calls.end(3) && !calls.end(9));
    assert_eq!((calls.begin(), calls.outstanding(), calls.acknowledged()), (None, 3, 1));
    assert!(calls.end(1));
    assert_eq!(calls.begin(), Some(5));
    assert_eq!(calls.send(5), 3);
    assert!(!calls.is_outstanding(3) && calls.is_outstanding(5));
}

#[test]
fn another_incarnation_or_a_forgotten_session_leaves_what_was_sent_unknown() {
    for (incarnation, knows) in [(8, true), (8, false), (7, false)] {
        let mut calls = Calls::new(8);
        assert_eq!(calls.welcome(7, false), []);
        for _ in 0..3 {
            calls.begin();
        }
        calls.send(1);
        calls.send(2);
        assert_eq!(calls.welcome(7, true), [(1, Fate::Send), (2, Fate::Send), (3, Fate::Send)]);
        assert_eq!(calls.welcome(incarnation, knows), [(1, Fate::Unknown), (2, Fate::Unknown), (3, Fate::Send)]);
        assert_eq!(calls.acknowledged(), 3);
        assert_eq!(calls.abandon(), [(3, false)]);
        assert_eq!(calls.outstanding(), 0);
    }
}

/// A small generator of numbers: everything in a run comes from its seed.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

const WINDOW: u32 = 8;

#[derive(Clone, Debug)]
enum Message {
    Hello { acknowledged: u64, incarnation: u64, attempt: u32 },
    Welcome { incarnation: u64, knows: bool },
    Call { sequence: u64, unanswered: u32, what: u64 },
    Answer { sequence: u64, text: Vec<u8> },
    Forgotten { sequence: u64 },
    Cancel { sequence: u64 },
}

/// A connection: messages arrive in order, and those on the way when it is cut may or may not have.
#[derive(Default)]
struct Link {
    there: VecDeque<Message>,
    back: VecDeque<Message>,
}

struct Server {
    /// Of the session.
    incarnation: u64,
    sessions: Option<Session>,
    /// The last connection that it was asked for.
    attempt: u32,
    /// Which link the session goes by.
    link: Option<usize>,
    /// Handlers that run: the call, what it does.
    running: Vec<(u64, u64)>,
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Answer(u64),
    Unknown,
    Forgotten,
    Cancelled,
}

/// A call does what its number says: numbers divisible by 3 may be repeated, those divisible by 5 have answers that
/// are not kept.
fn may_repeat(what: u64) -> bool {
    what.is_multiple_of(3)
}
fn is_kept(what: u64) -> bool {
    !what.is_multiple_of(5)
}

struct Run {
    seeded: Seeded,
    calls: Calls,
    /// What each outstanding call is to do.
    asked: BTreeMap<u64, u64>,
    outcomes: HashMap<u64, Outcome>,
    links: Vec<Link>,
    /// The client's connection, and whether it was welcomed.
    link: Option<usize>,
    welcomed: bool,
    server: Server,
    incarnations: u64,
    /// How often each call was begun.
    begun: HashMap<u64, u32>,
    dead: BTreeSet<usize>,
    next_what: u64,
}

impl Run {
    fn new(seed: u64) -> Run {
        let server = Server { incarnation: 0, sessions: None, attempt: 0, link: None, running: Vec::new() };
        Run {
            seeded: Seeded(seed),
            calls: Calls::new(WINDOW),
            asked: BTreeMap::new(),
            outcomes: HashMap::new(),
            links: Vec::new(),
            link: None,
            welcomed: false,
            server,
            incarnations: 0,
            begun: HashMap::new(),
            dead: BTreeSet::new(),
            next_what: 1,
        }
    }

    fn outcome(&mut self, sequence: u64, outcome: Outcome) {
        let what = self.asked.remove(&sequence).expect("a call that is outstanding");
        if let Outcome::Answer(answer) = outcome {
            assert_eq!(answer, what, "the answer of another call");
            assert!(self.begun[&what] >= 1, "an answer to what never ran");
        }
        assert!(self.outcomes.insert(what, outcome).is_none(), "two outcomes of call {what}");
    }

    fn send_call(&mut self, sequence: u64) {
        let unanswered = self.calls.send(sequence);
        let what = self.asked[&sequence];
        if let Some(link) = self.link {
            self.links[link].there.push_back(Message::Call { sequence, unanswered, what });
        }
    }

    fn begin(&mut self) {
        let Some(sequence) = self.calls.begin() else { return };
        self.asked.insert(sequence, self.next_what);
        self.next_what += 1;
        if self.link.is_some() && self.welcomed {
            self.send_call(sequence);
        }
    }

    fn connect(&mut self) {
        let mut link = Link::default();
        let (acknowledged, incarnation) = (self.calls.acknowledged(), self.calls.incarnation());
        let attempt = self.calls.attempt();
        link.there.push_back(Message::Hello { acknowledged, incarnation, attempt });
        self.links.push(link);
        (self.link, self.welcomed) = (Some(self.links.len() - 1), false);
    }

    fn at_client(&mut self, message: Message) {
        match message {
            Message::Welcome { incarnation, knows } => {
                self.welcomed = true;
                for (sequence, fate) in self.calls.welcome(incarnation, knows) {
                    match fate {
                        Fate::Send => self.send_call(sequence),
                        Fate::Unknown => self.outcome(sequence, Outcome::Unknown),
                    }
                }
            }
            Message::Answer { sequence, text } => {
                if self.calls.end(sequence) {
                    let answer = u64::from_le_bytes(text.try_into().expect("eight bytes"));
                    self.outcome(sequence, Outcome::Answer(answer));
                }
            }
            Message::Forgotten { sequence } => {
                if self.calls.end(sequence) {
                    self.outcome(sequence, Outcome::Forgotten);
                }
            }
            _ => unreachable!("{message:?} at the client"),
        }
    }

    fn at_server(&mut self, link: usize, message: Message) {
        let server = &mut self.server;
        match message {
            // One that was overtaken by a later one.
            Message::Hello { attempt, .. } if server.sessions.is_some() && attempt <= server.attempt => {}
            Message::Hello { acknowledged, incarnation, attempt } => {
                server.attempt = attempt;
                let knows = incarnation == server.incarnation && server.sessions.is_some();
                if !knows {
                    // A welcome to it may be lost: only who has seen that knows which session it has.
                    self.incarnations += 1;
                    server.incarnation = self.incarnations;
                    server.sessions = Some(Session::new(acknowledged, WINDOW));
                }
                server.link = Some(link);
                let incarnation = server.incarnation;
                self.links[link].back.push_back(Message::Welcome { incarnation, knows });
            }
            // Another connection has the session now, or it has expired.
            _ if server.link != Some(link) => {}
            Message::Call { sequence, unanswered, what } => {
                let Some(session) = &mut server.sessions else { return };
                let answer = match session.admit(sequence, unanswered, may_repeat(what)).expect("inside the window") {
                    Admission::Begin => {
                        server.running.push((sequence, what));
                        *self.begun.entry(what).or_default() += 1;
                        return;
                    }
                    Admission::Running | Admission::Stale => return,
                    Admission::Answered(text) => Message::Answer { sequence, text: text.to_vec() },
                    Admission::Forgotten => Message::Forgotten { sequence },
                };
                self.links[link].back.push_back(answer);
            }
            Message::Cancel { sequence } => {
                if let Some(session) = &mut server.sessions {
                    session.cancel(sequence);
                }
            }
            _ => unreachable!("{message:?} at the server"),
        }
    }

    fn finish_one(&mut self) {
        let server = &mut self.server;
        if server.running.is_empty() {
            return;
        }
        let at = self.seeded.below(server.running.len() as u64) as usize;
        let (sequence, what) = server.running.swap_remove(at);
        let Some(session) = &mut server.sessions else { return };
        let text = what.to_le_bytes();
        let wanted = session.finish(sequence, is_kept(what).then_some(&text[..]));
        if let Some(link) = server.link
            && wanted
        {
            self.links[link].back.push_back(Message::Answer { sequence, text: text.to_vec() });
        }
    }

    fn step(&mut self) {
        match self.seeded.below(100) {
            0..25 => self.begin(),
            25..50 => {
                // Something arrives at the server, on any connection that is still carried.
                let waiting: Vec<usize> = (0..self.links.len())
                    .filter(|at| !self.dead.contains(at) && !self.links[*at].there.is_empty())
                    .collect();
                if !waiting.is_empty() {
                    let link = waiting[self.seeded.below(waiting.len() as u64) as usize];
                    let message = self.links[link].there.pop_front().expect("one waits");
                    self.at_server(link, message);
                }
            }
            50..75 => {
                if let Some(link) = self.link
                    && let Some(message) = self.links[link].back.pop_front()
                {
                    self.at_client(message);
                }
            }
            75..90 => self.finish_one(),
            90..93 => {
                // The client notices that its connection is over; what it sent may arrive yet.
                self.link = None;
            }
            93..95 => {
                let cut = self.seeded.below(self.links.len().max(1) as u64) as usize;
                self.dead.insert(cut);
                if self.link == Some(cut) {
                    self.link = None;
                }
            }
            95 => {
                // The server dies and returns; its connections die with it.
                self.server = Server { incarnation: 0, sessions: None, attempt: 0, link: None, running: Vec::new() };
                self.dead.extend(0..self.links.len());
                self.link = None;
            }
            96 => {
                // A session without a connection expires; its handlers may still run.
                if self.link.is_none() {
                    (self.server.sessions, self.server.link) = (None, None);
                }
            }
            97 => {
                let given_up = self.asked.keys().copied().nth(self.seeded.below(WINDOW.into()) as usize);
                if let Some(sequence) = given_up
                    && self.calls.end(sequence)
                {
                    self.outcome(sequence, Outcome::Cancelled);
                    if let (Some(link), true) = (self.link, self.welcomed) {
                        self.links[link].there.push_back(Message::Cancel { sequence });
                    }
                }
            }
            _ => {
                if self.link.is_none() {
                    self.connect();
                }
            }
        }
    }

    fn run(&mut self) {
        for _ in 0..600 {
            self.step();
        }
        // Quiet at last: everything outstanding must come to an end.
        for _ in 0..200 {
            if self.link.is_none() {
                self.connect();
            }
            while let Some(link) = self.link {
                let (there, back) = (self.links[link].there.pop_front(), self.links[link].back.pop_front());
                if there.is_none() && back.is_none() && self.server.running.is_empty() {
                    break;
                }
                if let Some(message) = there {
                    self.at_server(link, message);
                }
                if let Some(message) = back {
                    self.at_client(message);
                }
                self.finish_one();
            }
            if self.asked.is_empty() {
                break;
            }
        }
        assert!(self.asked.is_empty(), "calls without an outcome: {:?}", self.asked);
        for (what, times) in &self.begun {
            assert!(*times <= 1 || may_repeat(*what), "call {what} ran {times} times");
        }
        for (what, outcome) in &self.outcomes {
            let begun = self.begun.get(what).copied().unwrap_or(0);
            match outcome {
                Outcome::Answer(_) => assert!(begun >= 1),
                Outcome::Forgotten => assert!(begun == 1 && !is_kept(*what) && !may_repeat(*what)),
                Outcome::Unknown | Outcome::Cancelled => {}
            }
        }
    }
}

#[test]
fn no_call_runs_twice_and_none_is_lost_without_word() {
    let seeds = std::env::var("HIGHWIRE_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5000);
    let (mut answered, mut unknown, mut forgotten) = (0, 0, 0);
    for seed in 0..seeds {
        let outcome = std::panic::catch_unwind(|| {
            let mut run = Run::new(seed);
            run.run();
            run.outcomes
        });
        let outcomes = outcome.unwrap_or_else(|panic| {
            let why = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            panic!("seed {seed}: {why}")
        });
        answered += outcomes.values().filter(|outcome| matches!(outcome, Outcome::Answer(_))).count();
        unknown += outcomes.values().filter(|outcome| **outcome == Outcome::Unknown).count();
        forgotten += outcomes.values().filter(|outcome| **outcome == Outcome::Forgotten).count();
    }
    assert!(
        answered > 0 && unknown > 0 && forgotten > 0,
        "the runs were to be eventful: {answered} {unknown} {forgotten}"
    );
}
