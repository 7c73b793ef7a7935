//! A VI with a thread of its own: messages go and land while the application computes.

use crate::descriptor::{Completion, Message, Receive};
use crate::error::{PostError, Refused, WaitError};
use crate::member::Member;
use crate::vi::Vi;
use highwire_mem::deadline;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Completions that the thread has taken from the VI.
#[derive(Debug, Default)]
struct Taken {
    completions: VecDeque<Completion>,
    ended: Option<WaitError>,
}

#[derive(Debug)]
struct Shared {
    vi: Mutex<Vi>,
    taken: Mutex<Taken>,
    arrived: Condvar,
    stop: AtomicBool,
}

/// Drives a VI on a thread of its own. Any number of threads may post and wait.
#[derive(Debug)]
pub struct Background {
    shared: Arc<Shared>,
    member: Member,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Gives `vi` a thread.
    pub fn spawn(vi: Vi) -> io::Result<Background> {
        let (member, nic) = (vi.member().clone(), vi.nic().clone());
        let shared = Arc::new(Shared {
            vi: Mutex::new(vi),
            taken: Mutex::default(),
            arrived: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let (inside, watched) = (shared.clone(), member.clone());
        let thread = std::thread::Builder::new().name("highwire-vi".into()).spawn(move || {
            const LONG: Duration = Duration::from_secs(3600);
            while !inside.stop.load(Ordering::SeqCst) && inside.drain() {
                let ready = || {
                    watched.attend();
                    (watched.ready() || inside.stop.load(Ordering::SeqCst)).then_some(())
                };
                let _ = watched.wait_for(&nic.spin, LONG, ready);
            }
        })?;
        Ok(Background { shared, member, thread: Some(thread) })
    }

    /// Sends a message: see [`crate::SendQueue::post_send`].
    pub fn post_send(&self, message: Message) -> Result<(), Refused<Message>> {
        if !self.member.process().is_this() {
            return Err(Refused { reason: PostError::ForkedChild, descriptor: message });
        }
        let result = lock(&self.shared.vi).post_send(message);
        self.member.queue().wake();
        result
    }

    /// Sends a copy of `bytes`: see [`crate::SendQueue::send_bytes`].
    pub fn send_bytes(&self, token: u64, bytes: &[u8]) -> Result<(), PostError> {
        if !self.member.process().is_this() {
            return Err(PostError::ForkedChild);
        }
        let result = lock(&self.shared.vi).send_bytes(token, bytes);
        self.member.queue().wake();
        result
    }

    /// Gives a place for the next message: see [`crate::RecvQueue::post_recv`].
    pub fn post_recv(&self, receive: Receive) -> Result<(), Refused<Receive>> {
        if !self.member.process().is_this() {
            return Err(Refused { reason: PostError::ForkedChild, descriptor: receive });
        }
        let result = lock(&self.shared.vi).post_recv(receive);
        self.member.queue().wake();
        result
    }

    /// The next completion, if there is one.
    pub fn poll(&self) -> Option<Completion> {
        if !self.member.process().is_this() {
            return None;
        }
        lock(&self.shared.taken).completions.pop_front()
    }

    /// Waits for the next completion, at most `timeout`.
    pub fn wait(&self, timeout: Duration) -> Result<Completion, WaitError> {
        if !self.member.process().is_this() {
            return Err(WaitError::ForkedChild);
        }
        let deadline = deadline(timeout);
        let mut taken = lock(&self.shared.taken);
        loop {
            if let Some(completion) = taken.completions.pop_front() {
                return Ok(completion);
            }
            if let Some(ended) = taken.ended {
                return Err(ended);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(WaitError::TimedOut(timeout));
            }
            taken = self.shared.arrived.wait_timeout(taken, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    /// Takes what the VI has; false when it is over.
    fn drain(&self) -> bool {
        let mut vi = lock(&self.vi);
        loop {
            let polled = vi.poll_or_end();
            let mut taken = lock(&self.taken);
            match polled {
                Some(Ok(completion)) => taken.completions.push_back(completion),
                Some(Err(ended)) => taken.ended = Some(ended),
                None => return true,
            }
            self.arrived.notify_all();
            if taken.ended.is_some() {
                return false;
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Background {
    fn drop(&mut self) {
        if !self.member.process().is_this() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.member.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
