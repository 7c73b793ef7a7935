//! The close thread: what was written to another host before a stream was closed still arrives.
//!
//! On one host nothing has to be done: what was written is where the other side reads it. Between hosts the bytes are
//! with this process, so somebody has to stay until they have arrived. One thread does, for all streams; it ends when
//! there is nothing left to wait for. When the process exits, it is waited for, [`EXIT_WAIT`] at most.

use highwire_mem::Process;
use highwire_vi::StreamSender;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Streams that were closed and have bytes under way.
static CLOSING: Mutex<Closing> = Mutex::new(Closing { streams: Vec::new(), running: false });
static DONE: Condvar = Condvar::new();
/// Whose they are.
static PROCESS: OnceLock<Process> = OnceLock::new();

struct Closing {
    streams: Vec<(StreamSender, Instant)>,
    running: bool,
}

/// Sees to it that what was written arrives. Waits for it at most as long as `linger` says.
pub(crate) fn deliver(mut sender: StreamSender, linger: Option<Duration>) {
    if let Some(linger) = linger {
        let until = Instant::now() + linger.min(PATIENCE);
        while is_under_way(&mut sender, until) {
            std::thread::sleep(LOOK);
        }
        return;
    }
    PROCESS.get_or_init(|| {
        highwire_mem::at_exit(wait_at_exit);
        Process::current()
    });
    let mut closing = lock();
    closing.streams.push((sender, Instant::now() + PATIENCE));
    if !closing.running {
        let thread = std::thread::Builder::new().name("highwire-close".into()).spawn(run);
        // Without a thread nobody can wait, and the other side is told that the stream broke off.
        closing.running = thread.is_ok();
        if !closing.running {
            closing.streams.clear();
        }
    }
}

/// When the process exits; a forked child has nobody to wait for.
fn wait_at_exit() {
    if !PROCESS.get().is_some_and(|process| process.is_this()) {
        return;
    }
    let closing = lock();
    let _ = DONE.wait_timeout_while(closing, EXIT_WAIT, |closing| closing.running);
}

fn run() {
    let mut pause = LOOK;
    loop {
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOOK_MOST);
        let mut closing = lock();
        closing.streams.retain_mut(|(sender, until)| is_under_way(sender, *until));
        if closing.streams.is_empty() {
            closing.running = false;
            DONE.notify_all();
            return;
        }
    }
}

/// Something has still to arrive, and is waited for.
fn is_under_way(sender: &mut StreamSender, until: Instant) -> bool {
    !sender.is_delivered() && sender.ended().is_none() && Instant::now() < until
}

fn lock() -> MutexGuard<'static, Closing> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process that exits waits so long for what it has written.
const EXIT_WAIT: Duration = Duration::from_secs(5);
/// When it is first looked whether something has arrived, and how long it may come to be from look to look.
const LOOK: Duration = Duration::from_micros(200);
const LOOK_MOST: Duration = Duration::from_millis(10);
/// A peer that does not read for so long does not get the rest.
const PATIENCE: Duration = Duration::from_secs(60);
