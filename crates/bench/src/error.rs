//! Why a measurement did not come to its end.

use crate::State;
use highwire_mem::{CourierError, Lie, RegionError};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a measurement did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The second process could not be started.
    #[error("the second process of the measurement could not be started: {0}")]
    Start(#[source] io::Error),
    /// The second process is gone, or says nothing any more.
    #[error("the second process of the measurement: {0}")]
    Courier(#[from] CourierError),
    /// One side waits for the other in vain.
    #[error("one process waited {0:?} for the other in vain; is something else keeping the CPUs busy?")]
    Stuck(Duration),
    /// The second process failed, and says why.
    #[error("the second process of the measurement failed: {0}")]
    Peer(String),
    /// A message between the two processes was not understood; they are of different versions.
    #[error("the two processes of the measurement do not understand each other: {0}")]
    Misunderstood(#[from] serde_json::Error),
    /// Memory for the measurement could not be had.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// A socket failed.
    #[error("a socket of the measurement failed: {0}")]
    Socket(#[from] io::Error),
    /// The network of the measurement could not be made or removed.
    #[error("the network of the measurement: {0}")]
    Network(String),
    /// The ring below everything says something impossible.
    #[error("the raw ring was given something impossible: {0}")]
    Lie(#[from] Lie),
    /// The library under measurement refused something.
    #[error("{contestant}: {what} failed: {why}")]
    Library {
        /// Which contestant.
        contestant: &'static str,
        /// What was tried.
        what: &'static str,
        /// What the library said.
        why: String,
    },
    /// A message arrived with something else in it than was sent.
    #[error(
        "{contestant}: message {message} of sender {sender} arrived with something else at byte {place} than was sent; \
         this is a fault of Highwire, please report it"
    )]
    Contents {
        /// Which contestant.
        contestant: &'static str,
        /// Which of its senders, from 0 on.
        sender: usize,
        /// Which of the sender's messages, from 0 on.
        message: u64,
        /// Where in the message.
        place: usize,
    },
    /// A stream gave something else than was written to it.
    #[error("{contestant}: something else arrived at byte {place} than was sent")]
    Bytes {
        /// Which contestant.
        contestant: &'static str,
        /// Where in the stream, or in the file.
        place: u64,
    },
    /// A program of the measurement ended, or said what nobody understands.
    #[error("a program of {name} failed: {why}")]
    Program {
        /// Which contestant, or which program.
        name: &'static str,
        /// What it said last.
        why: String,
    },
    /// There is no C program in this executable.
    #[error("this `highwire` was built without a C compiler for its machine, and has no program to measure with")]
    NotCompiled,
    /// A program is not here that a chosen measure needs.
    #[error("{0}")]
    Missing(String),
    /// The state asked for did not occur.
    #[error(
        "the CPUs were never {wanted} within {seconds} seconds (the last crossing of a cache line took {last_ns:.0} ns); \
         the state changes by itself: try again, give more --seconds, or leave --state out"
    )]
    StateNeverSeen {
        /// The state asked for.
        wanted: State,
        /// Seconds that were to be used.
        seconds: f64,
        /// The last probe.
        last_ns: f64,
    },
    /// Not one trial was finished.
    #[error("{seconds} seconds are too few for a single round; give more --seconds, or fewer --sizes or --contestants")]
    TooShort {
        /// Seconds that were to be used.
        seconds: f64,
    },
    /// No contestant is left after the choices made.
    #[error("none of the chosen contestants can run here; choose others with --contestants")]
    NobodyLeft,
    /// A report could not be written.
    #[error("{path}: {source}", path = path.display())]
    Report {
        /// What was being written.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// A plot could not be drawn.
    #[error("{path}: the plot could not be drawn: {why}", path = path.display())]
    Plot {
        /// What was being written.
        path: PathBuf,
        /// What went wrong.
        why: String,
    },
}

impl BenchError {
    /// What the library said about `what`, for contestant `contestant`.
    pub(crate) fn library<E: std::fmt::Display>(
        contestant: &'static str,
        what: &'static str,
    ) -> impl FnOnce(E) -> BenchError {
        move |why| BenchError::Library { contestant, what, why: why.to_string() }
    }
}
