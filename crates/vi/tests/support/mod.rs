//! What the tests stand on: a stage with processes of its own, bytes from a seed, and patience.

pub mod forked;
pub mod liar;
pub mod seeded;
mod stage;

pub use stage::*;

use highwire_vi::{Buffer, Completion, Config, Failure, Nic, Operation, Vi, ViListener, ViOptions, WaitError};
use rustix::process::Signal;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

impl Stage {
    /// The stage of a test that may take so long.
    pub fn open_for(limit: Duration) -> Stage {
        Stage::open_and_say(limit, String::new)
    }

    /// Starts the process named `name`, which needs to be told nothing.
    pub fn start(&self, name: &str) -> Actor {
        self.start_with(name, "")
    }

    /// A Nic with the configuration of this stage.
    pub fn nic(&self) -> Nic {
        self.nic_with(|_| ())
    }

    /// A Nic with something changed.
    pub fn nic_with(&self, change: impl FnOnce(&mut Config)) -> Nic {
        let mut config = self.config();
        change(&mut config);
        Nic::with(config).expect("a Nic")
    }

    /// Waits until a process has marked something that begins so; the rest of it.
    pub fn await_mark_after(&self, beginning: &str) -> String {
        self.await_mark_between(beginning, "")
    }
}

impl Actor {
    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().expect("a child's status")
    }

    /// Stops it where it is.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }
}

/// A VI and the completions that came before somebody asked for them.
pub struct Line {
    pub vi: Vi,
    early: VecDeque<Completion>,
}

impl Line {
    /// A VI, to be asked for completions by kind.
    pub fn new(vi: Vi) -> Line {
        Line { vi, early: VecDeque::new() }
    }

    /// Connects.
    pub fn connect(nic: &Nic, address: &str) -> Line {
        Line::connect_with(nic, address, &ViOptions::new())
    }

    /// Connects with choices.
    pub fn connect_with(nic: &Nic, address: &str, options: &ViOptions<'_>) -> Line {
        Line::new(nic.connect_with(address, options).expect("a connection"))
    }

    /// Accepts.
    pub fn accept(listener: &ViListener) -> Line {
        Line::accept_with(listener, &ViOptions::new())
    }

    /// Accepts with choices.
    pub fn accept_with(listener: &ViListener, options: &ViOptions<'_>) -> Line {
        Line::new(listener.accept_with(PATIENCE, options).expect("somebody who connects"))
    }

    /// The next completion of this kind.
    pub fn next(&mut self, operation: Operation) -> Completion {
        if let Some(at) = self.early.iter().position(|done| done.operation == operation) {
            return self.early.remove(at).expect("just found");
        }
        loop {
            let done = match self.vi.wait(PATIENCE) {
                Ok(done) => done,
                Err(error) => panic!("waiting for a {operation:?}: {error}"),
            };
            if done.operation == operation {
                return done;
            }
            self.early.push_back(done);
        }
    }

    /// Puts a completion aside that was polled otherwise.
    pub fn keep(&mut self, done: Completion) {
        self.early.push_back(done);
    }

    /// The next message sent, which went well.
    pub fn sent(&mut self) -> Completion {
        let done = self.next(Operation::Send);
        assert_eq!(done.status, Ok(()), "send {}", done.token);
        done
    }

    /// The next message received, which came well.
    pub fn received(&mut self) -> Completion {
        let done = self.next(Operation::Receive);
        assert_eq!(done.status, Ok(()), "receive {}", done.token);
        done
    }

    /// Waits for the VI's end: the reason, and every completion until then.
    pub fn end(&mut self) -> (Failure, Vec<Completion>) {
        let mut all: Vec<Completion> = self.early.drain(..).collect();
        loop {
            match self.vi.wait(PATIENCE) {
                Ok(done) => all.push(done),
                Err(WaitError::NotConnected(failure)) => return (failure, all),
                Err(error) => panic!("waiting for the end: {error}"),
            }
        }
    }
}

/// A new buffer of its own.
pub fn buffer(nic: &Nic, bytes: usize) -> Buffer {
    let region = nic.register(bytes.max(1)).expect("a region");
    region.slice(0..bytes).expect("the whole region")
}

/// A new buffer with these bytes.
pub fn buffer_of(nic: &Nic, bytes: &[u8]) -> Buffer {
    let mut buffer = buffer(nic, bytes.len());
    buffer.copy_from_slice(bytes);
    buffer
}

/// Descriptors that this process has open.
pub fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the list of descriptors").count()
}

/// Both ends of a connection in this process, for tests that must decide who moves next: the
/// accepting end, and the connecting one.
pub fn both_ends(accepting: &Nic, connecting: &Nic, ours: &ViOptions<'_>, others: &ViOptions<'_>) -> (Line, Line) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let address = format!("shm:both-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let listener = accepting.listen(&address).expect("a listener");
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| Line::accept_with(&listener, ours));
        let connected = Line::connect_with(connecting, &address, others);
        (accepted.join().expect("an accepted line"), connected)
    })
}
