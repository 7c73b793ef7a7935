//! The calls themselves: what each gives in both stacks, and what it means for the model.

use super::{Outcome, Play};
use crate::oracle::model::{KERNEL, SUBJECT};
use crate::support::socket::{is_hung_up, ready};
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::net::Shutdown;
use std::time::{Duration, Instant};

impl Play {
    fn write_once(&self, stack: usize, end: usize, pieces: &[usize]) -> Outcome {
        let way = &self.ways[end];
        let mut rest = way.pattern.at(way.written[stack], pieces.iter().sum());
        let slices: Vec<IoSlice<'_>> = pieces
            .iter()
            .map(|piece| {
                let (this, others) = rest.split_at(*piece);
                rest = others;
                IoSlice::new(this)
            })
            .collect();
        let socket = self.socket(stack, end);
        match &slices[..] {
            [whole] => socket.write(whole).into(),
            several => socket.write_vectored(several).into(),
        }
    }

    pub(super) fn write(&mut self, end: usize, pieces: &[usize]) -> [Outcome; 2] {
        let bytes: usize = pieces.iter().sum();
        let fails = self.ends[end].fails_writes();
        let doomed = self.ends[1 - end].closed && !fails;
        let kernel = self.write_once(KERNEL, end, pieces);
        let mut subject = self.write_once(SUBJECT, end, pieces);
        if self.nature.delayed && (fails || doomed) {
            self.patiently(|| {
                let taken = matches!(subject, Outcome::Bytes(_) | Outcome::Failed(ErrorKind::WouldBlock));
                let told = bytes == 0 || !taken;
                if !told {
                    subject = self.write_once(SUBJECT, end, pieces);
                }
                told
            });
        }
        if self.nature.delayed && !fails && !doomed {
            subject = self.write_through(end, bytes, subject);
        }
        if !doomed {
            if (kernel, subject) == (Outcome::Bytes(bytes), Outcome::Bytes(bytes)) {
                self.ways[end].wrote(pieces, &self.nature);
            }
            return [kernel, subject];
        }
        if bytes > 0 {
            self.end_in_tcp(end);
        }
        let refused = Outcome::Failed(ErrorKind::BrokenPipe);
        let at_once = !self.nature.swallows && kernel == Outcome::Bytes(bytes) && subject == refused;
        if at_once { [subject, subject] } else { [kernel, subject] }
    }

    /// Writes the rest of so many bytes: that there is room again may be known only later.
    fn write_through(&self, end: usize, bytes: usize, mut outcome: Outcome) -> Outcome {
        let way = &self.ways[end];
        let mut written = 0;
        self.patiently(|| {
            match outcome {
                Outcome::Bytes(some) => written += some,
                Outcome::Failed(ErrorKind::WouldBlock) => {}
                _ => return true,
            }
            let rest = way.pattern.at(way.written[SUBJECT] + written as u64, bytes - written);
            if !rest.is_empty() {
                outcome = self.socket(SUBJECT, end).write(rest).into();
            }
            rest.is_empty()
        });
        if written == bytes { Outcome::Bytes(written) } else { outcome }
    }

    /// TCP's connection is over for this end, with an error that nobody else has.
    fn end_in_tcp(&mut self, end: usize) {
        self.ends[end].over = true;
        for stack in [KERNEL, SUBJECT] {
            if self.is_tcp(stack) {
                self.patiently(|| is_hung_up(self.socket(stack, end)));
                drop(self.socket(stack, end).take_error());
            }
        }
    }

    pub(super) fn fill(&mut self, end: usize) -> [Outcome; 2] {
        let outcomes = self.both(|play, stack| {
            let polled = stack == KERNEL || play.nature.polled[end];
            let mut full = 0;
            loop {
                match play.write_once(stack, end, &[FILL_BYTES]) {
                    Outcome::Bytes(bytes) => {
                        play.ways[end].written[stack] += bytes as u64;
                        full = 0;
                    }
                    Outcome::Failed(ErrorKind::WouldBlock) => {
                        let shown = polled && ready(play.socket(stack, end)).output;
                        full = if shown { 0 } else { full + 1 };
                        // What is on its way inside may make room for some more.
                        if play.nature.delayed {
                            std::thread::sleep(Duration::from_micros(300));
                        }
                    }
                    other => return other,
                }
                if full == 3 {
                    return Outcome::Failed(ErrorKind::WouldBlock);
                }
                if play.ways[end].in_flight(stack) > NEVER_BYTES {
                    return Outcome::NeverFull;
                }
            }
        });
        self.ways[end].stuffed = true;
        outcomes
    }

    /// One read into these pieces, checked against what was written.
    fn read_once(&mut self, stack: usize, end: usize, pieces: &[usize]) -> Outcome {
        let bytes: usize = pieces.iter().sum();
        let mut into = std::mem::take(&mut self.scratch);
        into.resize(into.len().max(bytes), 0);
        let socket = self.socket(stack, end);
        let outcome = match pieces {
            [whole] => socket.read(&mut into[..*whole]).into(),
            several => {
                let mut rest = &mut into[..];
                let mut slices = Vec::new();
                for piece in several {
                    let (this, others) = rest.split_at_mut(*piece);
                    slices.push(IoSliceMut::new(this));
                    rest = others;
                }
                socket.read_vectored(&mut slices).into()
            }
        };
        let outcome = self.checked(stack, end, &into, outcome);
        if let Outcome::Bytes(bytes) = outcome {
            self.ways[1 - end].took(stack, bytes);
        }
        self.scratch = into;
        outcome
    }

    fn checked(&self, stack: usize, end: usize, found: &[u8], outcome: Outcome) -> Outcome {
        let way = &self.ways[1 - end];
        let Outcome::Bytes(bytes) = outcome else { return outcome };
        let wrong = way.pattern.first_wrong(way.read[stack], &found[..bytes]);
        let beyond = (bytes as u64 > way.in_flight(stack)).then_some(way.written[stack]);
        wrong.or(beyond).map_or(outcome, Outcome::WrongByteAt)
    }

    /// The same, again and again where the model says that something comes.
    fn read_what_comes(&mut self, stack: usize, end: usize, pieces: &[usize]) -> Outcome {
        let mut outcome = self.read_once(stack, end, pieces);
        let since = Instant::now();
        while self.is_early(stack, end, outcome) && since.elapsed() < self.nature.patience {
            std::thread::yield_now();
            outcome = self.read_once(stack, end, pieces);
        }
        outcome
    }

    /// Something comes that is not there yet.
    fn is_early(&self, stack: usize, end: usize, outcome: Outcome) -> bool {
        match outcome {
            // What was written on one host is there when the write has returned; with TCP it nearly always is.
            Outcome::Failed(ErrorKind::WouldBlock) => {
                (self.nature.delayed || self.is_tcp(stack)) && self.is_readable(stack, end)
            }
            // Who has shut reads the end where nothing has come so far.
            Outcome::Bytes(0) => {
                let way = &self.ways[1 - end];
                let delayed = (self.nature.delayed || way.stuffed) && self.ends[end].shut_read;
                delayed && (way.in_flight(stack) > 0 || self.reset_comes && !way.fin)
            }
            _ => false,
        }
    }

    pub(super) fn read(&mut self, stack: usize, end: usize, pieces: &[usize]) -> Outcome {
        let bytes: usize = pieces.iter().sum();
        if self.nature.delayed && self.ways[1 - end].in_flight(stack) > 0 {
            self.peek(stack, end, bytes);
        }
        self.read_what_comes(stack, end, pieces)
    }

    pub(super) fn read_through(&mut self, stack: usize, end: usize, bytes: usize) -> Outcome {
        let all = bytes.min(self.ways[1 - end].in_flight(stack) as usize);
        let mut got = 0;
        loop {
            match self.read_what_comes(stack, end, &[bytes - got]) {
                Outcome::Bytes(some) if got + some < all && some > 0 => got += some,
                Outcome::Bytes(some) => return Outcome::Bytes(got + some),
                other => return other,
            }
        }
    }

    /// Looks until everything is there that was written, as far as it is looked.
    pub(super) fn peek(&mut self, stack: usize, end: usize, bytes: usize) -> Outcome {
        let all = bytes.min(self.ways[1 - end].in_flight(stack) as usize);
        let mut into = std::mem::take(&mut self.scratch);
        let since = Instant::now();
        let outcome = loop {
            let seen = self.socket(stack, end).peek(&mut into[..bytes]).into();
            let comes = match seen {
                Outcome::Bytes(seen) if seen > 0 => seen < all,
                other => self.is_early(stack, end, other),
            };
            if !comes || since.elapsed() > self.nature.patience {
                break self.checked(stack, end, &into, seen);
            }
            std::thread::yield_now();
        };
        self.scratch = into;
        outcome
    }

    /// What comes after everything that was written; whether all of that came is checked where it must.
    pub(super) fn drain(&mut self, end: usize) -> [Outcome; 2] {
        let reset = self.ends[end].reset;
        let outcomes = self.both(|play, stack| {
            while play.ways[1 - end].in_flight(stack) > 0 {
                match play.read_what_comes(stack, end, &[FILL_BYTES]) {
                    Outcome::Bytes(bytes) if bytes > 0 => {}
                    Outcome::Bytes(_) if !reset => return Outcome::WrongByteAt(play.ways[1 - end].read[stack]),
                    other => return other,
                }
            }
            // A stack that lost nothing comes to the error only now.
            let more = play.has_ended(end) || play.ends[end].nonblocking;
            if more { play.read_what_comes(stack, end, &[1]) } else { Outcome::Done }
        });
        if !reset {
            return outcomes;
        }
        let way = &mut self.ways[1 - end];
        let overtaken = way.fin && (way.stuffed || self.nature.delayed);
        way.lose_the_rest();
        let either = [Outcome::Bytes(0), Outcome::Failed(ErrorKind::ConnectionReset)];
        if overtaken && outcomes.iter().all(|outcome| either.contains(outcome)) {
            // The reset may come before the end of what was held back, or after it.
            self.settled = true;
            return [outcomes[SUBJECT]; 2];
        }
        outcomes
    }

    pub(super) fn read_in_vain(&mut self, end: usize) -> [Outcome; 2] {
        let nonblocking = std::mem::replace(&mut self.ends[end].nonblocking, false);
        let outcomes = self.both(|play, stack| {
            let socket = play.socket(stack, end);
            socket.set_nonblocking(false).expect("a blocking socket");
            socket.set_read_timeout(Some(IN_VAIN)).expect("a time-out");
            assert!(socket.read_timeout().expect("the time-out just set").is_some_and(|set| set >= IN_VAIN));
            let since = Instant::now();
            let outcome = play.read_once(stack, end, &[10]);
            let took = since.elapsed();
            let socket = play.socket(stack, end);
            socket.set_read_timeout(None).expect("no time-out");
            socket.set_nonblocking(nonblocking).expect("as it was");
            // The kernel counts in ticks, and may have one too many.
            let least = if play.is_tcp(stack) { IN_VAIN / 50 } else { IN_VAIN };
            if took < least { Outcome::Early(took) } else { outcome }
        });
        self.ends[end].nonblocking = nonblocking;
        outcomes
    }

    pub(super) fn shutdown(&mut self, end: usize, how: Shutdown) -> [Outcome; 2] {
        let ended = self.ways.iter().all(|way| way.fin);
        let coming = self.ways[1 - end].in_flight(SUBJECT) as usize;
        if self.nature.delayed && how != Shutdown::Write && coming > 0 {
            // Whoever shuts before anything came reads the end, until it comes.
            self.peek(SUBJECT, end, coming);
        }
        let shut = |stack| Outcome::from(self.socket(stack, end).shutdown(how));
        let (kernel, mut subject) = (shut(KERNEL), shut(SUBJECT));
        if self.nature.delayed && kernel == Outcome::Failed(ErrorKind::NotConnected) && !self.ends[end].over {
            // The other's end may not have come.
            self.patiently(|| {
                let told = subject == kernel;
                if !told {
                    subject = shut(SUBJECT);
                }
                told
            });
        }
        // While data is held back, so is the end that comes after it.
        let held_back = ended && self.ways.iter().any(|way| way.stuffed);
        let undetermined = self.ends[end].over || held_back;
        self.ends[end].shut_read |= how != Shutdown::Write;
        if how != Shutdown::Read {
            self.ends[end].shut_write = true;
            self.ways[end].fin = true;
        }
        let either = [Outcome::Done, Outcome::Failed(ErrorKind::NotConnected)];
        if undetermined && either.contains(&kernel) && either.contains(&subject) {
            return [subject, subject];
        }
        [kernel, subject]
    }

    pub(super) fn take_error(&mut self, end: usize) -> [Outcome; 2] {
        let taken = |stack| match self.socket(stack, end).take_error() {
            Ok(error) => Outcome::Error(error.map(|error| error.kind())),
            Err(error) => Outcome::Failed(error.kind()),
        };
        let (kernel, mut subject) = (taken(KERNEL), taken(SUBJECT));
        if self.nature.delayed && self.ends[end].reset {
            self.patiently(|| {
                let settled = subject == kernel;
                if !settled {
                    subject = taken(SUBJECT);
                }
                settled
            });
        }
        [kernel, subject]
    }

    pub(super) fn close(&mut self, end: usize) -> [Outcome; 2] {
        let other = 1 - end;
        if self.ways[other].least() != self.ways[other].most() {
            let emptied = self.both(|play, stack| {
                let left = play.ways[other].in_flight(stack) as usize;
                play.read_through_all(stack, end, left)
            });
            if emptied[KERNEL] != emptied[SUBJECT] {
                return emptied;
            }
        }
        let unread = self.ways[other].most() > 0;
        if unread && self.nature.delayed {
            // Whoever closes before anything came has left nothing unread.
            self.both(|play, stack| play.peek(stack, end, 1));
        }
        let this = self.ends[end];
        // An end that is held back behind data, or on its way, was not told yet.
        let told = self.ways.iter().all(|way| way.fin && !way.stuffed) && !self.nature.delayed;
        let ended = told || this.reset || this.over;
        for stack in &mut self.stacks {
            stack[end].clear();
        }
        self.ends[end].closed = true;
        if (unread || this.linger_zero) && !ended {
            self.ends[other].reset = true;
            let overtaken = self.ways[end].stuffed || self.nature.delayed;
            if self.ways[end].fin && !overtaken && !self.ends[other].closed {
                self.end_in_tcp(other);
            }
        } else {
            self.ways[end].fin = true;
        }
        [Outcome::Done; 2]
    }

    fn read_through_all(&mut self, stack: usize, end: usize, bytes: usize) -> Outcome {
        let mut left = bytes;
        while left > 0 {
            match self.read_what_comes(stack, end, &[left.min(FILL_BYTES)]) {
                Outcome::Bytes(some) if some > 0 => left -= some,
                other => return other,
            }
        }
        Outcome::Done
    }
}

/// How long a read waits that is to wait in vain.
const IN_VAIN: Duration = Duration::from_millis(1);
const FILL_BYTES: usize = 16 << 10;
/// More than any buffer holds.
const NEVER_BYTES: u64 = 64 << 20;
