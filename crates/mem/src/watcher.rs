//! A thread that sleeps until one of the descriptors it watches has news: a rendezvous socket with
//! a message or a hang-up, a pidfd whose process died. It costs nothing while nothing happens.

use crate::fork::Process;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// What to do with a descriptor after its news were handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Go on watching it.
    Keep,
    /// Forget it.
    Forget,
}

type Action = Box<dyn FnMut() -> Watch + Send>;

struct Shared {
    epoll: OwnedFd,
    stop: OwnedFd,
    actions: Mutex<Table>,
}

/// Names a descriptor that is being watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchKey(u64);

#[derive(Default)]
struct Table {
    next: u64,
    /// Whose action runs, and whether it was forgotten since that began.
    running: Option<u64>,
    forgotten: bool,
    entries: HashMap<u64, (Arc<dyn AsFd + Send + Sync>, Action)>,
}

/// The handle of the thread; dropping it ends the thread.
pub struct Watcher {
    process: Process,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

const STOP: u64 = u64::MAX;

impl Watcher {
    /// Starts the thread.
    pub fn spawn() -> std::io::Result<Watcher> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared { epoll, stop, actions: Mutex::default() });
        let inside = shared.clone();
        let thread = std::thread::Builder::new()
            .name("highwire-watch".into())
            .stack_size(256 << 10)
            .spawn(move || inside.run())?;
        Ok(Watcher { process: Process::current(), shared, thread: Some(thread) })
    }

    /// Calls `action` on the watcher's thread whenever `descriptor` is readable or hung up, until
    /// it says [`Watch::Forget`].
    pub fn watch(
        &self,
        descriptor: Arc<dyn AsFd + Send + Sync>,
        action: impl FnMut() -> Watch + Send + 'static,
    ) -> std::io::Result<WatchKey> {
        let mut table = self.shared.lock();
        let key = table.next;
        table.next += 1;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        epoll::add(&self.shared.epoll, descriptor.as_fd(), epoll::EventData::new_u64(key), flags)?;
        table.entries.insert(key, (descriptor, Box::new(action)));
        Ok(WatchKey(key))
    }

    /// Stops watching. An action that runs at this moment finishes, and is not called again.
    pub fn forget(&self, key: WatchKey) {
        let mut table = self.shared.lock();
        let removed = table.entries.remove(&key.0);
        table.forgotten |= table.running == Some(key.0);
        // What an action owns is dropped without the lock: its end may forget something else.
        drop(table);
        if let Some((descriptor, _)) = removed {
            let _ = epoll::delete(&self.shared.epoll, descriptor.as_fd());
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Table> {
        self.actions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut events = Vec::with_capacity(16);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            for event in &events {
                let key = event.data.u64();
                if key == STOP {
                    return;
                }
                self.handle(key);
            }
        }
    }

    fn handle(&self, key: u64) {
        // The action runs without the lock: it may watch something new.
        let mut table = self.lock();
        let Some((descriptor, mut action)) = table.entries.remove(&key) else { return };
        table.running = Some(key);
        drop(table);
        let outcome = action();
        let mut table = self.lock();
        table.running = None;
        let forgotten = std::mem::take(&mut table.forgotten);
        if outcome == Watch::Forget || forgotten {
            let _ = epoll::delete(&self.epoll, descriptor.as_fd());
            drop(table);
            return;
        }
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        if epoll::modify(&self.epoll, descriptor.as_fd(), epoll::EventData::new_u64(key), flags).is_ok() {
            table.entries.insert(key, (descriptor, action));
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // The thread is the parent's, and so is the eventfd.
            std::mem::forget(self.thread.take());
            return;
        }
        let _ = rustix::io::write(&self.shared.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watcher({} descriptors)", self.shared.lock().entries.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Courier;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    /// A watched socket whose action counts the messages, and what it answers after each.
    struct Counted {
        one: Courier,
        other: Arc<Courier>,
        seen: Arc<AtomicU32>,
    }

    impl Counted {
        fn watched_by(watcher: &Watcher, last: u32) -> (Counted, WatchKey) {
            let (one, other) = Courier::pair().unwrap();
            let counted = Counted { one, other: Arc::new(other), seen: Arc::default() };
            let (inside, count) = (counted.other.clone(), counted.seen.clone());
            let key = watcher.watch(counted.other.clone(), move || {
                let mut bytes = [0; 8];
                while let Ok(Some(_)) = inside.try_receive(&mut bytes) {
                    count.fetch_add(1, Ordering::SeqCst);
                }
                if count.load(Ordering::SeqCst) >= last { Watch::Forget } else { Watch::Keep }
            });
            (counted, key.unwrap())
        }

        fn send(&self) {
            self.one.send(b"news", &[], Duration::from_secs(1)).unwrap();
        }

        fn wait_for(&self, expected: u32) {
            let start = Instant::now();
            while self.seen.load(Ordering::SeqCst) < expected && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(self.seen.load(Ordering::SeqCst), expected);
        }
    }

    const NOT_TO_COME: Duration = Duration::from_millis(20);

    #[test]
    fn news_reach_the_action_until_it_forgets() {
        let watcher = Watcher::spawn().unwrap();
        let (counted, _) = Counted::watched_by(&watcher, 2);
        for expected in 1..=2 {
            counted.send();
            counted.wait_for(expected);
        }
        counted.send();
        std::thread::sleep(NOT_TO_COME);
        counted.wait_for(2);
    }

    #[test]
    fn what_is_forgotten_is_not_called_again() {
        let watcher = Watcher::spawn().unwrap();
        let (counted, key) = Counted::watched_by(&watcher, u32::MAX);
        counted.send();
        counted.wait_for(1);
        watcher.forget(key);
        counted.send();
        std::thread::sleep(NOT_TO_COME);
        counted.wait_for(1);
        watcher.forget(key);

        // Forgetting one twice has not harmed the next.
        let (counted, _) = Counted::watched_by(&watcher, u32::MAX);
        for expected in 1..=3 {
            counted.send();
            counted.wait_for(expected);
        }
    }

    #[test]
    fn an_action_forgotten_while_it_runs_is_its_last() {
        let watcher = Arc::new(Watcher::spawn().unwrap());
        let (one, other) = Courier::pair().unwrap();
        let other = Arc::new(other);
        let (key_in, key_out) = std::sync::mpsc::channel();
        let calls = Arc::new(AtomicU32::new(0));
        let (inside, count, forgetting) = (other.clone(), calls.clone(), watcher.clone());
        let key = watcher.watch(other, move || {
            let _ = inside.try_receive(&mut [0; 8]);
            if count.fetch_add(1, Ordering::SeqCst) == 0 {
                forgetting.forget(key_out.recv().unwrap());
            }
            Watch::Keep
        });
        key_in.send(key.unwrap()).unwrap();
        for _ in 0..2 {
            let _ = one.send(b"news", &[], Duration::from_secs(1));
        }
        std::thread::sleep(NOT_TO_COME);
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }
}
