//! The pool that runs handlers which may take long.

use super::Inner;
use super::handler::{Received, Reply, Request, Serve};
use super::sessions::Ticket;
use crate::head::Status;
use highwire_vi::PeerId;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A call that waits for a thread.
pub(super) struct Job {
    pub ticket: Ticket,
    pub method: u16,
    pub deadline: Option<Instant>,
    pub service: Arc<dyn Serve>,
    pub arguments: Vec<u8>,
    pub received: Received,
    pub peer: PeerId,
}

#[derive(Debug)]
pub(super) struct Jobs {
    state: Mutex<State>,
    /// There is a job, or no more will come.
    come: Condvar,
    waiting_max: usize,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    running: usize,
    stopped: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} waiting, {} running", self.waiting.len(), self.running)
    }
}

impl Jobs {
    pub(super) fn new(waiting_max: usize) -> Jobs {
        Jobs { state: Mutex::default(), come: Condvar::new(), waiting_max }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if as many wait as may.
    pub(super) fn push(&self, job: Job) -> bool {
        let mut state = self.state();
        if state.waiting.len() >= self.waiting_max || state.stopped {
            return false;
        }
        state.waiting.push_back(job);
        drop(state);
        self.come.notify_one();
        true
    }

    /// Jobs that wait or run.
    pub(super) fn left(&self) -> usize {
        let state = self.state();
        state.waiting.len() + state.running
    }

    /// No further one begins.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        state.waiting.clear();
        drop(state);
        self.come.notify_all();
    }

    /// What a thread of the pool does.
    pub(super) fn work(&self, inner: &Arc<Inner>) {
        let mut reply = Reply::default();
        loop {
            let mut state = self.state();
            let job = loop {
                if let Some(job) = state.waiting.pop_front() {
                    break job;
                }
                if state.stopped {
                    return;
                }
                state = self.come.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.running += 1;
            drop(state);
            run(inner, job, &mut reply);
            let mut state = self.state();
            state.running -= 1;
            let last = state.running == 0 && state.waiting.is_empty();
            drop(state);
            if last && inner.is_leaving() {
                inner.queue.wake();
            }
        }
    }
}

fn run(inner: &Arc<Inner>, job: Job, reply: &mut Reply) {
    let Job { ticket, method, deadline, service, arguments, received, peer } = job;
    reply.clear();
    if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        reply.fail(Status::DeadlinePassed);
    } else if !inner.sessions.is_wanted(ticket) {
        reply.fail(Status::Cancelled);
    } else {
        let request = Request { method, arguments: &arguments, payload: received, peer, ticket, server: inner };
        if catch_unwind(AssertUnwindSafe(|| service.serve(request, reply))).is_err() {
            reply.fail(Status::Panicked);
        }
        if reply.is_deferred {
            return;
        }
    }
    inner.sessions.finish(ticket, reply);
    // What was not sent is not to wait for the next call.
    reply.clear();
}
