//! A random sequence of calls from a seed, played on kernel TCP and on another socket in lockstep, by one thread.

mod calls;

use super::model::{End, KERNEL, Nature, SUBJECT, Way};
use crate::support::pattern::PIECE_MAX;
use crate::support::seeded::Seeded;
use crate::support::socket::{Ready, Socket, is_hung_up, ready};
use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::net::Shutdown;
use std::time::{Duration, Instant};

/// Both ends of a connection; each end with all its clones.
pub type Stack = [Vec<Box<dyn Socket>>; 2];

/// One of the calls of an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Pieces of one write; several are a vectored one.
    Write(Vec<usize>),
    /// Writes until it would have to wait.
    Fill,
    /// Pieces of one read, once everything is there that it can take.
    Read(Vec<usize>),
    /// The same amount, in as many reads as it takes.
    ReadThrough(usize),
    /// Everything that is there, and what comes after.
    Drain,
    Peek(usize),
    /// A blocking read where nothing comes.
    ReadInVain,
    Shutdown(Shutdown),
    SetNonblocking(bool),
    SetNodelay(bool),
    SetLingerZero(bool),
    Clone,
    DropClone,
    TakeError,
    Close,
    /// Not a call: what `poll(2)` shows.
    Poll,
}

/// What a call gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Bytes(usize),
    Failed(ErrorKind),
    Flag(bool),
    Error(Option<ErrorKind>),
    Shows(Ready),
    /// The byte at this position is another than was written there.
    WrongByteAt(u64),
    /// It came back before its time.
    Early(Duration),
    NeverFull,
}

impl<T: Into<Outcome>> From<std::io::Result<T>> for Outcome {
    fn from(result: std::io::Result<T>) -> Outcome {
        result.map_or_else(|error| Outcome::Failed(error.kind()), Into::into)
    }
}

impl From<()> for Outcome {
    fn from((): ()) -> Outcome {
        Outcome::Done
    }
}

impl From<usize> for Outcome {
    fn from(bytes: usize) -> Outcome {
        Outcome::Bytes(bytes)
    }
}

impl From<bool> for Outcome {
    fn from(flag: bool) -> Outcome {
        Outcome::Flag(flag)
    }
}

/// The two differ where they must not.
#[derive(Debug)]
pub struct Disagreement {
    pub seed: u64,
    pub step: usize,
    pub call: Call,
    trace: String,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Disagreement { seed, step, call, trace } = self;
        write!(f, "{trace}seed {seed}, step {step}: the two differ in {call:?}")
    }
}

/// How often each outcome was seen and found the same in both: a test that sees nothing shows here.
pub type Tally = BTreeMap<String, usize>;

/// One sequence.
pub struct Play {
    /// What is compared with TCP.
    title: String,
    seeded: Seeded,
    nature: Nature,
    stacks: [Stack; 2],
    ends: [End; 2],
    /// From each end to the other.
    ways: [Way; 2],
    /// One end was just reset by the other, and was not told yet.
    reset_comes: bool,
    /// What comes from here on is not determined.
    settled: bool,
    /// By which of an end's clones the call of this step is made.
    clone: usize,
    trace: Vec<(usize, Call, [Outcome; 2])>,
    scratch: Vec<u8>,
    /// Told of each call before it is made.
    told: Box<dyn Fn(&str)>,
}

impl Play {
    pub fn new(
        title: String,
        seeded: Seeded,
        nature: Nature,
        stacks: [Stack; 2],
        told: impl Fn(&str) + 'static,
    ) -> Play {
        let ways = [Way::new(2 * seeded.seed()), Way::new(2 * seeded.seed() + 1)];
        Play {
            title,
            seeded,
            nature,
            stacks,
            ends: [End::default(); 2],
            ways,
            reset_comes: false,
            settled: false,
            clone: 0,
            trace: Vec::new(),
            scratch: vec![0; PIECE_MAX],
            told: Box::new(told),
        }
    }

    /// Plays it to the end; what was compared.
    pub fn run(mut self) -> Result<Tally, Disagreement> {
        for stack in [KERNEL, SUBJECT] {
            if self.is_tcp(stack) {
                (0..2).for_each(|end| self.send_at_once(stack, end));
            }
        }
        let steps = 5 + self.seeded.below(60);
        let mut at = 0;
        while at < steps && !self.settled && self.ends.iter().any(|end| !end.closed) {
            let end = self.seeded.below(2);
            if self.ends[end].closed {
                continue;
            }
            if let Some(call) = self.choose(end) {
                self.perform(end, call)?;
                self.compare_readiness()?;
                at += 1;
            }
        }
        // Nothing is lost: one end closes, if none has, and the other has everything.
        let first = self.seeded.below(2);
        for end in [first, 1 - first] {
            if !self.ends[end].closed && !self.settled {
                let last = self.ends[1 - end].closed;
                self.perform(end, if last { Call::Drain } else { Call::Close })?;
                self.compare_readiness()?;
            }
        }
        let mut tally = Tally::new();
        for (_, call, [_, outcome]) in &self.trace {
            let call = format!("{call:?}");
            let name = call.split('(').next().expect("the first of several");
            let outcome = match outcome {
                Outcome::Bytes(0) => "Bytes(0)".to_owned(),
                Outcome::Bytes(_) => "Bytes".to_owned(),
                other => format!("{other:?}"),
            };
            *tally.entry(format!("{name}: {outcome}")).or_default() += 1;
        }
        Ok(tally)
    }

    fn note(&mut self, end: usize, call: &Call, outcomes: [Outcome; 2]) {
        self.trace.push((end, call.clone(), outcomes));
        (self.told)(&format!("     {}", shown(&outcomes)));
    }

    fn differ(&self, call: Call) -> Disagreement {
        let mut trace = format!("{}, {:?}\n", self.title, self.nature);
        for (step, (end, call, outcomes)) in self.trace.iter().enumerate() {
            trace += &format!("{step:3}  end {end}  {call:?}: {}\n", shown(outcomes));
        }
        Disagreement { seed: self.seeded.seed(), step: self.trace.len() - 1, call, trace }
    }

    /// A call whose result is determined, or `None` if the one thought of is not.
    fn choose(&mut self, end: usize) -> Option<Call> {
        let (this, back) = (self.ends[end], &self.ways[1 - end]);
        let uneven = back.least() != back.most();
        self.clone = self.seeded.next() as usize;
        let call = match self.seeded.below(100) {
            0..30 => {
                let pieces = self.pieces(5000);
                if !self.write_is_determined(end, &pieces) {
                    return None;
                }
                Call::Write(pieces)
            }
            30..33 => {
                let filled = this.nonblocking && !this.fails_writes() && !self.ways[end].stuffed;
                let read = !self.ends[1 - end].closed && !self.ends[1 - end].shut_read;
                if !(filled && read) {
                    return None;
                }
                Call::Fill
            }
            33..62 => {
                let most = if uneven { back.least().min(9000) as usize } else { 9000 };
                if most == 0 {
                    return self.read_cannot_hang(end).then_some(Call::Drain);
                }
                if !self.read_cannot_hang(end) {
                    return None;
                }
                let through = self.seeded.once_in(3);
                if through { Call::ReadThrough(1 + self.seeded.below(most)) } else { Call::Read(self.pieces_of(most)) }
            }
            62..64 if self.read_cannot_hang(end) => Call::Drain,
            64..70 if self.read_cannot_hang(end) && !uneven => Call::Peek(1 + self.seeded.below(9000)),
            70 if !self.has_ended(end) && back.most() == 0 => Call::ReadInVain,
            71..74 => {
                let how = *self.seeded.pick(&[Shutdown::Read, Shutdown::Write, Shutdown::Both]);
                let shuts_read = this.shut_read || how != Shutdown::Write;
                let shuts_write = this.shut_write || how != Shutdown::Read;
                // What is held back would come to an end that has shut both ways.
                if back.stuffed && shuts_read && (shuts_write || self.nature.delayed) {
                    return None;
                }
                Call::Shutdown(how)
            }
            74..84 => Call::SetNonblocking(self.seeded.once_in(2)),
            84..87 => Call::SetNodelay(self.seeded.once_in(2)),
            87..89 => Call::SetLingerZero(self.seeded.once_in(2)),
            89..92 => Call::Clone,
            92..95 if self.stacks[KERNEL][end].len() > 1 => Call::DropClone,
            95..98 => Call::TakeError,
            98 => Call::Close,
            _ => return None,
        };
        Some(call)
    }

    /// What is read or written by one call: mostly one piece, at times up to four.
    fn pieces(&mut self, most: usize) -> Vec<usize> {
        match self.seeded.below(4) {
            0 => vec![self.seeded.below(40)],
            1 => (0..2 + self.seeded.below(3)).map(|at| at.min(1) + self.seeded.below(most / 4)).collect(),
            _ => vec![self.seeded.below(most)],
        }
    }

    fn pieces_of(&mut self, most: usize) -> Vec<usize> {
        let mut pieces: Vec<usize> = self.pieces(most).into_iter().map(|piece| piece.clamp(1, most)).collect();
        while pieces.iter().sum::<usize>() > most {
            pieces.pop();
        }
        pieces
    }

    fn write_is_determined(&self, end: usize, pieces: &[usize]) -> bool {
        let other = self.ends[1 - end];
        let empty = pieces.iter().sum::<usize>() == 0;
        if self.ends[end].fails_writes() {
            return !empty || !(self.ends[end].reset || self.ends[end].over);
        }
        if other.closed {
            // TCP resets the connection, and loses what is held back.
            return !self.ways[1 - end].stuffed;
        }
        self.ways[end].takes(pieces, &self.nature) && !(other.shut_read && other.shut_write)
    }

    /// What comes after the last byte has come: the end of all, or an error.
    fn has_ended(&self, end: usize) -> bool {
        let this = self.ends[end];
        self.ways[1 - end].fin || this.reset || this.shut_read || this.over
    }

    fn is_readable(&self, stack: usize, end: usize) -> bool {
        self.ways[1 - end].in_flight(stack) > 0 || self.has_ended(end)
    }

    fn read_cannot_hang(&self, end: usize) -> bool {
        self.ends[end].nonblocking || self.has_ended(end) || self.ways[1 - end].least() > 0
    }

    fn is_tcp(&self, stack: usize) -> bool {
        stack == KERNEL || self.nature.swallows
    }

    /// Nagle's algorithm would hold back what counts as arrived here, until a delayed acknowledgement.
    fn send_at_once(&self, stack: usize, end: usize) {
        self.socket(stack, end).set_nodelay(true).expect("TCP without delay");
    }

    fn socket(&self, stack: usize, end: usize) -> &dyn Socket {
        let clones = &self.stacks[stack][end];
        &*clones[self.clone % clones.len()]
    }

    /// Makes the call at one end of both, compares, and remembers what it means.
    fn perform(&mut self, end: usize, call: Call) -> Result<(), Disagreement> {
        (self.told)(&format!("{:3}  end {end}  {call:?}", self.trace.len()));
        self.await_what_was_done(end);
        let outcomes = match &call {
            Call::Write(pieces) => self.write(end, pieces),
            Call::Fill => self.fill(end),
            Call::Read(pieces) => self.both(|play, stack| play.read(stack, end, pieces)),
            Call::ReadThrough(bytes) => self.both(|play, stack| play.read_through(stack, end, *bytes)),
            Call::Drain => self.drain(end),
            Call::Peek(bytes) => self.both(|play, stack| play.peek(stack, end, *bytes)),
            Call::ReadInVain => self.read_in_vain(end),
            Call::Shutdown(how) => self.shutdown(end, *how),
            Call::SetNonblocking(nonblocking) => {
                self.ends[end].nonblocking = *nonblocking;
                self.both(|play, stack| play.socket(stack, end).set_nonblocking(*nonblocking).into())
            }
            Call::SetNodelay(nodelay) => self.both(|play, stack| {
                let socket = play.socket(stack, end);
                let set = socket.set_nodelay(*nodelay).and_then(|()| socket.nodelay());
                if play.is_tcp(stack) {
                    play.send_at_once(stack, end);
                }
                set.into()
            }),
            Call::SetLingerZero(zero) => {
                self.ends[end].linger_zero = *zero;
                self.both(|play, stack| {
                    let (socket, linger) = (play.socket(stack, end), zero.then_some(Duration::ZERO));
                    socket.set_linger(linger).and_then(|()| socket.linger()).map(|now| now == linger).into()
                })
            }
            Call::Clone => self.both(|play, stack| {
                let made = play.socket(stack, end).try_clone();
                made.map(|clone| play.stacks[stack][end].push(clone)).into()
            }),
            Call::DropClone => {
                for stack in &mut self.stacks {
                    let which = self.clone % stack[end].len();
                    drop(stack[end].swap_remove(which));
                }
                [Outcome::Done; 2]
            }
            Call::TakeError => self.take_error(end),
            Call::Close => self.close(end),
            Call::Poll => unreachable!("compared after every call"),
        };
        let agreed = outcomes[KERNEL] == outcomes[SUBJECT];
        self.note(end, &call, outcomes);
        if !agreed {
            return Err(self.differ(call));
        }
        // What a reset took along differs; what comes after it does not.
        let other = 1 - end;
        let loses = self.nature.delayed || self.ways[end].stuffed;
        if call == Call::Close && self.ends[other].reset && !self.ends[other].closed && loses {
            self.reset_comes = true;
            let drained = self.perform(other, Call::Drain);
            self.reset_comes = false;
            return drained;
        }
        Ok(())
    }

    fn both(&mut self, mut each: impl FnMut(&mut Play, usize) -> Outcome) -> [Outcome; 2] {
        [each(self, KERNEL), each(self, SUBJECT)]
    }

    /// Waits until this end can know what the other has done.
    fn await_what_was_done(&self, end: usize) {
        let kernel = &*self.stacks[KERNEL][end][0];
        if self.ends[end].reset {
            self.patiently(|| is_hung_up(kernel));
        }
        if self.is_readable(KERNEL, end) {
            self.patiently(|| ready(kernel).input);
        }
        if self.is_readable(SUBJECT, end) && self.nature.polled[end] {
            self.patiently(|| ready(&*self.stacks[SUBJECT][end][0]).input);
        }
    }

    /// Both show the room that there is, and each whether there is something to read; who was filled further has more.
    fn is_shown(&self, end: usize, shown: [Ready; 2]) -> bool {
        let reads = [KERNEL, SUBJECT].iter().all(|stack| shown[*stack].input == self.is_readable(*stack, end));
        reads && shown[KERNEL].output == shown[SUBJECT].output
    }

    /// Waits until `look` is true, but not for ever: whatever did not come shows in the comparison after it.
    fn patiently(&self, mut look: impl FnMut() -> bool) {
        let since = Instant::now();
        while !look() && since.elapsed() < self.nature.patience {
            std::thread::yield_now();
        }
    }

    /// What `poll(2)` shows of every end is the same in both, as soon as everything has arrived.
    fn compare_readiness(&mut self) -> Result<(), Disagreement> {
        for end in 0..2 {
            if self.ends[end].closed || !self.nature.polled[end] {
                continue;
            }
            let room_differs = self.ways[end].stuffed && !self.ends[end].fails_writes();
            let look = |stack: usize| {
                let shown = ready(self.socket(stack, end));
                Ready { output: shown.output || room_differs, ..shown }
            };
            let mut shown = [look(KERNEL), look(SUBJECT)];
            self.patiently(|| {
                let settled = self.is_shown(end, shown);
                if !settled {
                    shown = [look(KERNEL), look(SUBJECT)];
                }
                settled
            });
            if !self.is_shown(end, shown) {
                self.note(end, &Call::Poll, shown.map(Outcome::Shows));
                return Err(self.differ(Call::Poll));
            }
        }
        Ok(())
    }
}

fn shown([kernel, subject]: &[Outcome; 2]) -> String {
    if kernel == subject { format!("{kernel:?}") } else { format!("kernel {kernel:?}, other {subject:?}") }
}
