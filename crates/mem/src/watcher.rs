//! A thread that sleeps until one of the descriptors it watches has news: a rendezvous socket with
//! a message or a hang-up, a pidfd whose process died. It costs nothing while nothing happens.

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

#[derive(Default)]
struct Table {
    next: u64,
    entries: HashMap<u64, (Arc<dyn AsFd + Send + Sync>, Action)>,
}

/// The handle of the thread; dropping it ends the thread.
pub struct Watcher {
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
        Ok(Watcher { shared, thread: Some(thread) })
    }

    /// Calls `action` on the watcher's thread whenever `descriptor` is readable or hung up, until
    /// it says [`Watch::Forget`].
    pub fn watch(
        &self,
        descriptor: Arc<dyn AsFd + Send + Sync>,
        action: impl FnMut() -> Watch + Send + 'static,
    ) -> std::io::Result<()> {
        let mut table = self.shared.lock();
        let key = table.next;
        table.next += 1;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        epoll::add(&self.shared.epoll, descriptor.as_fd(), epoll::EventData::new_u64(key), flags)?;
        table.entries.insert(key, (descriptor, Box::new(action)));
        Ok(())
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
        let Some((descriptor, mut action)) = self.lock().entries.remove(&key) else { return };
        if action() == Watch::Forget {
            let _ = epoll::delete(&self.epoll, descriptor.as_fd());
            return;
        }
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
        let mut table = self.lock();
        if epoll::modify(&self.epoll, descriptor.as_fd(), epoll::EventData::new_u64(key), flags).is_ok() {
            table.entries.insert(key, (descriptor, action));
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        if crate::in_forked_child() {
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

    #[test]
    fn news_reach_the_action_until_it_forgets() {
        let watcher = Watcher::spawn().unwrap();
        let (one, other) = Courier::pair().unwrap();
        let other = Arc::new(other);
        let seen = Arc::new(AtomicU32::new(0));
        let (inside, count) = (other.clone(), seen.clone());
        watcher
            .watch(other, move || {
                let mut bytes = [0; 8];
                while let Ok(Some(_)) = inside.try_receive(&mut bytes) {
                    count.fetch_add(1, Ordering::SeqCst);
                }
                if count.load(Ordering::SeqCst) >= 2 { Watch::Forget } else { Watch::Keep }
            })
            .unwrap();
        let start = Instant::now();
        for expected in 1..=2 {
            one.send(b"news", &[], Duration::from_secs(1)).unwrap();
            while seen.load(Ordering::SeqCst) < expected && start.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        one.send(b"more", &[], Duration::from_secs(1)).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(seen.load(Ordering::SeqCst), 2);
    }
}
