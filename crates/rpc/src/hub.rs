//! What the clients of one interface share: a queue that sees all their connections, and the one thread that drives
//! those whose tasks and continuations nobody else brings their answers.

use crate::client::{Client, ClientOptions, Shared};
use crate::error::OpenError;
use highwire_mem::Process;
use highwire_vi::{CompletionQueue, Nic, NicError, QueueHandle, ViId, WaitError};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The way into calls: makes clients and servers of one interface. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Rpc {
    hub: Arc<Hub>,
}

impl Rpc {
    /// Calls by way of this interface.
    pub fn new(nic: &Nic) -> Result<Rpc, NicError> {
        let queue = nic.completion_queue()?;
        let handle = queue.handle();
        let driver = Mutex::new(Driver { queue: Some(queue), thread: None, engaged: HashMap::new(), next: None });
        let (clients, signal, process) = (Mutex::default(), Arc::default(), Process::current());
        let hub = Hub { nic: nic.clone(), queue: handle, clients, driver, signal, process };
        Ok(Rpc { hub: Arc::new(hub) })
    }

    pub(crate) fn of(hub: Arc<Hub>) -> Rpc {
        Rpc { hub }
    }

    /// Connects to a server.
    pub fn connect(&self, address: &str) -> Result<Client, OpenError> {
        self.connect_with(address, ClientOptions::default())
    }

    /// Connects with choices.
    pub fn connect_with(&self, address: &str, options: ClientOptions) -> Result<Client, OpenError> {
        Client::connect(&self.hub, address, options)
    }

    /// The interface, for buffers.
    pub fn nic(&self) -> &Nic {
        &self.hub.nic
    }
}

#[derive(Debug)]
pub(crate) struct Hub {
    nic: Nic,
    queue: QueueHandle,
    clients: Mutex<HashMap<ViId, Weak<Shared>>>,
    driver: Mutex<Driver>,
    signal: Arc<Signal>,
    process: Process,
}

/// What the driver has in hand while it waits: the hub can go meanwhile.
#[derive(Debug, Default)]
struct Signal {
    /// Somebody has engaged the driver since it last looked.
    news: AtomicBool,
    stop: AtomicBool,
    lock: Mutex<()>,
    parked: Condvar,
}

impl Signal {
    fn is_raised(&self) -> bool {
        self.news.load(SeqCst) || self.stop.load(SeqCst)
    }

    /// Waits until there is something to drive.
    fn park(&self) {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.is_raised() {
            lock = self.parked.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn unpark(&self) {
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.parked.notify_all();
    }
}

#[derive(Debug)]
struct Driver {
    /// Until the thread has it.
    queue: Option<CompletionQueue>,
    thread: Option<JoinHandle<()>>,
    /// Clients whose tasks or continuations wait.
    engaged: HashMap<usize, Weak<Shared>>,
    /// The first deadline of one of those.
    next: Option<Instant>,
}

impl Hub {
    pub(crate) fn nic(&self) -> &Nic {
        &self.nic
    }

    pub(crate) fn queue(&self) -> &QueueHandle {
        &self.queue
    }

    fn driver(&self) -> MutexGuard<'_, Driver> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<ViId, Weak<Shared>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whose connection this is.
    pub(crate) fn know(&self, id: ViId, client: &Arc<Shared>) {
        let mut clients = self.clients();
        clients.retain(|_, client| client.strong_count() > 0);
        clients.insert(id, Arc::downgrade(client));
    }

    pub(crate) fn forget(&self, id: ViId) {
        self.clients().remove(&id);
    }

    /// A task or continuation of this client waits, until then at most: the driver is to bring what it waits for.
    pub(crate) fn engage(self: &Arc<Hub>, client: &Arc<Shared>, deadline: Option<Instant>) {
        let mut driver = self.driver();
        let known = driver.engaged.insert(Arc::as_ptr(client) as usize, Arc::downgrade(client)).is_some();
        let sooner = match (deadline, driver.next) {
            (Some(deadline), Some(next)) => deadline < next,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if sooner {
            driver.next = deadline;
        }
        // Whoever is being driven this moment, and was found to wait for nothing, is to be looked at again.
        self.signal.news.store(true, SeqCst);
        if known && !sooner {
            return;
        }
        if driver.thread.is_none()
            && let Some(queue) = driver.queue.take()
        {
            let (hub, signal) = (Arc::downgrade(self), self.signal.clone());
            let run = move || drive(&hub, &signal, queue);
            driver.thread = std::thread::Builder::new().name("highwire-rpc".into()).spawn(run).ok();
        }
        drop(driver);
        self.signal.unpark();
        self.queue.wake();
    }

    /// Takes what has come on this connection, though it be for nobody who is engaged: it would be found again and
    /// again.
    fn take_for(&self, id: ViId) {
        let client = self.clients().get(&id).and_then(Weak::upgrade);
        if let Some(client) = client {
            client.drive();
        }
    }

    /// Drives everybody who is engaged. How long nothing happens by itself then; `None` if nobody is engaged.
    fn round(&self) -> Option<Duration> {
        let mut driver = self.driver();
        self.signal.news.store(false, SeqCst);
        let engaged: Vec<_> = driver.engaged.values().filter_map(Weak::upgrade).collect();
        driver.next = None;
        drop(driver);
        let mut idle = Vec::new();
        let mut next: Option<Instant> = None;
        for client in engaged {
            let driven = client.drive();
            if !driven.engaged {
                idle.push(Arc::as_ptr(&client) as usize);
            }
            next = [next, driven.next].into_iter().flatten().min();
        }
        let mut driver = self.driver();
        if !self.signal.news.load(SeqCst) {
            driver.engaged.retain(|at, client| !idle.contains(at) && client.strong_count() > 0);
        }
        driver.next = [next, driver.next].into_iter().flatten().min();
        let left = driver.next.map_or(LONG, |next| next.saturating_duration_since(Instant::now()));
        (!driver.engaged.is_empty()).then(|| left.max(SHORTEST))
    }
}

/// The driver's thread.
fn drive(hub: &Weak<Hub>, signal: &Signal, mut queue: CompletionQueue) {
    while !signal.stop.load(SeqCst) {
        let Some(wait) = hub.upgrade().map(|hub| hub.round()) else { return };
        let Some(wait) = wait else {
            signal.park();
            continue;
        };
        match queue.wait_or(wait, || signal.is_raised()) {
            Ok(Some(id)) => {
                let Some(hub) = hub.upgrade() else { return };
                hub.take_for(id);
            }
            Ok(None) | Err(WaitError::TimedOut(_)) => {}
            Err(_) => return,
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A forked child has no such thread to wait for.
            let driver = self.driver.get_mut().unwrap_or_else(PoisonError::into_inner);
            return std::mem::forget(driver.thread.take());
        }
        self.signal.stop.store(true, SeqCst);
        self.queue.wake();
        self.signal.unpark();
        let driver = self.driver.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = driver.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

const LONG: Duration = Duration::from_secs(3600);
const SHORTEST: Duration = Duration::from_micros(100);
