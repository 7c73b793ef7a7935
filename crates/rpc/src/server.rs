//! The answering side.
//!
//! One thread takes calls from all connections and runs the quick handlers itself; a pool runs the others, so that a slow
//! one stalls nobody; a third thread lets connections in and forgets sessions that nobody came back for.

mod connection;
mod handler;
mod jobs;
mod sessions;

use crate::client::random;
use crate::head::{CallHead, Leaving, Status};
use crate::hub::Rpc;
use crate::line::Line;
use crate::service::Service;
use crate::stall;
use connection::{Connection, Turn};
pub use handler::{Deferred, Manner, Reply, Request, Serve};
use highwire_mem::Process;
use highwire_vi::{
    AcceptError, Allow, CompletionQueue, ListenError, Nic, NicError, QueueHandle, ViId, ViListener, ViOptions,
    WaitError,
};
use jobs::Jobs;
use sessions::{Sessions, Ticket};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Choices for a server. The default is right for most programs.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Threads for handlers that are not quick.
    pub workers: usize,
    /// Calls that may wait for one of them; further ones are told that the server is busy.
    pub waiting_max: usize,
    /// Clients, connected or not, whose sessions are kept.
    pub sessions_max: usize,
    /// How long a session is kept after its connection was lost.
    pub keep_sessions: Duration,
    /// Calls that one client may have outstanding.
    pub window_max: u32,
    /// Frames that stand ready for payloads of one client's calls. Each is taken from memory when it is first used.
    pub frames: u32,
    /// Bytes of each. A payload that is longer, or finds no frame, costs one more message each way.
    pub frame_bytes: u32,
    /// The longest payload of a call.
    pub request_bytes_max: u32,
    /// Looks for calls without pause, and never sleeps: for a thread that has a CPU of its own.
    pub busy: bool,
    /// Whose processes may connect, on this host; `None` for those that the interface allows.
    pub allow: Option<Allow>,
}

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        ServerOptions {
            workers: 4,
            waiting_max: 4096,
            sessions_max: 4096,
            keep_sessions: Duration::from_secs(60),
            window_max: 4096,
            frames: 8,
            frame_bytes: 64 << 10,
            request_bytes_max: 256 << 20,
            busy: false,
            allow: None,
        }
    }
}

/// Services that a server has.
#[derive(Clone, Debug, Default)]
pub struct Services {
    services: Vec<Service>,
}

impl Services {
    /// None.
    pub fn new() -> Services {
        Services::default()
    }

    /// These and one more.
    #[must_use]
    pub fn and(mut self, service: Service) -> Services {
        self.services.push(service);
        self
    }

    /// These and one more, by its number and version.
    #[must_use]
    pub fn with(self, id: u32, version: u16, serve: impl Serve) -> Services {
        self.and(Service::new(id, version, serve))
    }
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Nobody can listen there.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Its queue could not be had.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// A thread could not be started.
    #[error("a thread could not be started: {0}; is the process limit (ulimit -u) exhausted?")]
    Thread(#[from] std::io::Error),
}

/// What was not done when a server had to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{calls} calls did not end in time, and {clients} clients did not take all of their answers; callers of these cannot tell \
     whether they ran"
)]
pub struct StillRunning {
    /// Calls that still ran.
    pub calls: usize,
    /// Clients that did not take all of their answers.
    pub clients: usize,
}

/// A server. Dropped, it stops at once: whatever runs has no answer.
#[derive(Debug)]
pub struct Server {
    inner: Arc<Inner>,
    address: String,
    threads: Vec<JoinHandle<()>>,
    process: Process,
}

#[derive(Debug)]
struct Inner {
    nic: Nic,
    options: ServerOptions,
    services: Services,
    sessions: Sessions,
    jobs: Jobs,
    queue: QueueHandle,
    /// Connections that the polling thread is yet to hear of.
    arrivals: Mutex<Vec<Arc<Connection>>>,
    arrived: AtomicBool,
    /// Calls that are answered later, and answers to such that the polling thread is to send.
    deferred: AtomicUsize,
    finished: Mutex<Vec<Finished>>,
    has_finished: AtomicBool,
    leaving: AtomicBool,
    /// Everything ends now.
    stop: AtomicBool,
    busy: AtomicBool,
    /// Clients that had not taken all their answers at the end.
    untaken: AtomicUsize,
    /// Connections that were told why they are over, and are dropped when they can have heard it.
    parting: Mutex<Vec<(Instant, Arc<Connection>)>>,
    /// Connections that have not said who they are.
    strangers: Mutex<Vec<(Instant, Weak<Connection>)>>,
    /// Connections that the polling thread has.
    connected: AtomicUsize,
    /// Until when what was begun may go on.
    until: Mutex<Option<Instant>>,
}

/// The answer to a call that was deferred.
#[derive(Debug)]
struct Finished {
    ticket: Ticket,
    reply: Reply,
}

impl Rpc {
    /// Serves at an address.
    pub fn serve(&self, address: &str, services: Services) -> Result<Server, ServeError> {
        self.serve_with(address, services, ServerOptions::default())
    }

    /// Serves with choices.
    pub fn serve_with(&self, address: &str, services: Services, options: ServerOptions) -> Result<Server, ServeError> {
        let nic = self.nic().clone();
        let listener = match options.allow.clone() {
            Some(allow) => nic.listen_with(address, allow)?,
            None => nic.listen(address)?,
        };
        let queue = nic.completion_queue()?;
        // Another number at every start, far from those before.
        let first = (random() as u64) >> 1 | 1;
        let inner = Arc::new(Inner {
            nic,
            sessions: Sessions::new(first, &options),
            jobs: Jobs::new(options.waiting_max),
            services,
            queue: queue.handle(),
            arrivals: Mutex::default(),
            arrived: AtomicBool::new(false),
            deferred: AtomicUsize::new(0),
            finished: Mutex::default(),
            has_finished: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            busy: AtomicBool::new(options.busy),
            connected: AtomicUsize::new(0),
            untaken: AtomicUsize::new(0),
            parting: Mutex::default(),
            strangers: Mutex::default(),
            until: Mutex::default(),
            options,
        });
        let (address, process) = (listener.address().to_owned(), Process::current());
        let mut server = Server { inner: inner.clone(), address, threads: Vec::new(), process };
        let polling = inner.clone();
        server.spawn("highwire-serve", move || {
            polling.poll(queue);
            polling.sessions.close();
        })?;
        let accepting = inner.clone();
        server.spawn("highwire-accept", move || accepting.accept(&listener))?;
        for _ in 0..inner.options.workers {
            let working = inner.clone();
            server.spawn("highwire-worker", move || working.jobs.work(&working))?;
        }
        Ok(server)
    }
}

impl Server {
    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), ServeError> {
        self.threads.push(std::thread::Builder::new().name(name.into()).spawn(run)?);
        Ok(())
    }

    /// Where it listens, as others name it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether to look without pause from now on: see [`ServerOptions::busy`].
    pub fn set_busy(&self, busy: bool) {
        self.inner.busy.store(busy, SeqCst);
        self.inner.queue.wake();
    }

    /// Takes no further calls, finishes those that it took, tells its clients, and ends; after `timeout` whatever still
    /// runs is left without an answer.
    pub fn leave(mut self, timeout: Duration) -> Result<(), StillRunning> {
        let until = highwire_mem::deadline(timeout);
        *self.inner.until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
        self.inner.leaving.store(true, SeqCst);
        self.inner.queue.wake();
        let polling = self.threads.remove(0);
        let _ = polling.join();
        match (self.inner.left(), self.inner.untaken.load(SeqCst)) {
            (0, 0) => Ok(()),
            (calls, clients) => Err(StillRunning { calls, clients }),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A forked child has none of these threads, and may leave what they hold to its parent.
            return std::mem::forget(std::mem::take(&mut self.threads));
        }
        self.inner.leaving.store(true, SeqCst);
        self.inner.stop.store(true, SeqCst);
        self.inner.jobs.stop();
        self.inner.queue.wake();
        // A handler that never ends is not waited for; it has no way back any more.
        let running = self.inner.jobs.left() > 0;
        for thread in self.threads.drain(..) {
            if running && thread.thread().name() == Some("highwire-worker") {
                continue;
            }
            let _ = thread.join();
        }
        // Those that came too late to be heard.
        self.inner.arrivals.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Inner {
    fn is_leaving(&self) -> bool {
        self.leaving.load(SeqCst)
    }

    /// Calls that were begun and have no answer.
    fn left(&self) -> usize {
        self.jobs.left() + self.deferred.load(SeqCst)
    }

    /// Sends the answer to a call that was deferred.
    fn finish_deferred(&self, ticket: Ticket, mut reply: Reply) {
        if stall::is_inside() {
            // A handler has the lock of its connection, which may be this one's too.
            self.finished.lock().unwrap_or_else(PoisonError::into_inner).push(Finished { ticket, reply });
            self.has_finished.store(true, SeqCst);
            self.queue.wake();
        } else {
            self.sessions.finish(ticket, &mut reply);
            self.deferred.fetch_sub(1, SeqCst);
            if self.is_leaving() {
                self.queue.wake();
            }
        }
    }

    /// Sends answers that came from within handlers.
    #[cold]
    fn send_finished(&self) {
        let finished = std::mem::take(&mut *self.finished.lock().unwrap_or_else(PoisonError::into_inner));
        for Finished { ticket, mut reply } in finished {
            self.sessions.finish(ticket, &mut reply);
            self.deferred.fetch_sub(1, SeqCst);
        }
    }

    /// Who serves a call, and how.
    #[inline]
    fn find(&self, call: &CallHead) -> Result<(&Arc<dyn Serve>, Manner), Status> {
        let mut other = None;
        for Service { id, version, serve } in &self.services.services {
            if *id == call.service {
                if *version == call.version {
                    let manner = serve.manner(call.method).ok_or(Status::UnknownMethod)?;
                    return Ok((serve, manner));
                }
                other = Some(*version);
            }
        }
        Err(other.map_or(Status::UnknownService, Status::UnknownVersion))
    }

    /// Lets connections in.
    fn accept(&self, listener: &ViListener) {
        let is_far = !listener.address().starts_with("shm:");
        while !self.is_leaving() {
            let options = ViOptions::new().queue_of(&self.queue);
            // Whoever waits at a socket is woken by every packet. While there are connections the polling thread takes
            // those, and this one only looks now and then who has come.
            let is_watched = is_far && self.connected.load(SeqCst) > 0;
            let accepted = listener.accept_with(if is_watched { Duration::ZERO } else { SWEEP_EVERY }, &options);
            if is_watched && accepted.is_err() {
                std::thread::sleep(LOOK_EVERY);
            }
            self.sweep(Instant::now());
            let vi = match accepted {
                Ok(vi) => vi,
                Err(AcceptError::TimedOut(_)) => continue,
                Err(_) => {
                    // One that came to nothing; or something that does not go away by itself.
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                }
            };
            let (id, peer) = (vi.id(), vi.peer());
            let Ok(line) = Line::new(&self.nic, vi) else { continue };
            let frames = 2 * self.options.frames as usize;
            let frames = (frames > 0).then(|| self.nic.pool(self.options.frame_bytes as usize, frames).ok()).flatten();
            let connection = Arc::new(Connection::new(id, peer, line, frames));
            let stranger = (Instant::now(), Arc::downgrade(&connection));
            self.strangers.lock().unwrap_or_else(PoisonError::into_inner).push(stranger);
            self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
            self.arrived.store(true, SeqCst);
            self.queue.wake();
        }
    }

    /// Forgets what nobody came back for, and sends those away who do not say who they are.
    fn sweep(&self, now: Instant) {
        self.sessions.sweep(now);
        let spent = |since: &Instant, most| now.saturating_duration_since(*since) >= most;
        self.parting.lock().unwrap_or_else(PoisonError::into_inner).retain(|(since, _)| !spent(since, PARTING));
        let mut strangers = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        let silent: Vec<_> = strangers.extract_if(.., |(since, _)| spent(since, HELLO_WITHIN)).collect();
        drop(strangers);
        for connection in silent.into_iter().filter_map(|(_, connection)| connection.upgrade()) {
            let mut link = connection.lock();
            if link.session.is_none() {
                link.line.give_up();
                drop(link);
                // The polling thread finds it over.
                self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
                self.arrived.store(true, SeqCst);
                self.queue.wake();
            }
        }
    }

    /// Takes calls from all connections.
    fn poll(self: &Arc<Inner>, mut queue: CompletionQueue) {
        let mut connections: HashMap<ViId, Arc<Connection>> = HashMap::new();
        let mut last: Option<Arc<Connection>> = None;
        loop {
            let raised = || self.arrived.load(SeqCst) || self.has_finished.load(SeqCst) || self.is_leaving();
            let ready = if self.busy.load(Relaxed) {
                queue.glance()
            } else {
                match queue.wait_or(LONG, || raised() || self.busy.load(Relaxed)) {
                    Ok(ready) => ready,
                    Err(WaitError::TimedOut(_)) => None,
                    Err(_) => return,
                }
            };
            // A look first: to swap takes as long as much of a call.
            if self.arrived.load(SeqCst) && self.arrived.swap(false, SeqCst) {
                let arrivals = std::mem::take(&mut *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner));
                for connection in arrivals {
                    connections.insert(connection.id, connection.clone());
                    self.take_turn(&mut connections, &connection);
                }
                last = None;
                self.connected.store(connections.len(), SeqCst);
            }
            if let Some(id) = ready {
                if last.as_ref().is_none_or(|last| last.id != id) {
                    last = connections.get(&id).cloned();
                }
                if let Some(connection) = &last
                    && !self.take_turn(&mut connections, connection)
                {
                    last = None;
                }
            }
            if self.has_finished.load(SeqCst) && self.has_finished.swap(false, SeqCst) {
                self.send_finished();
            }
            if self.is_leaving() && self.wind_up(&mut queue, &mut connections) {
                return;
            }
        }
    }

    /// False if the connection is over.
    #[inline]
    fn take_turn(
        self: &Arc<Inner>,
        connections: &mut HashMap<ViId, Arc<Connection>>,
        connection: &Arc<Connection>,
    ) -> bool {
        match connection.turn(self) {
            Turn::GoesOn => true,
            Turn::Ends(why) => {
                self.end(connections, connection, why);
                false
            }
        }
    }

    #[cold]
    fn end(
        &self,
        connections: &mut HashMap<ViId, Arc<Connection>>,
        connection: &Arc<Connection>,
        why: Option<Leaving>,
    ) {
        let mut link = connection.lock();
        self.sessions.park(connection, &mut link);
        if let Some(why) = why {
            link.leave(why);
            // Nobody waits for it here: who does not listen is not to hold others up.
            self.parting.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), connection.clone()));
        }
        drop(link);
        connections.remove(&connection.id);
        self.connected.store(connections.len(), SeqCst);
    }

    /// Finishes what was taken, and says so; true when that is done.
    fn wind_up(
        self: &Arc<Inner>,
        queue: &mut CompletionQueue,
        connections: &mut HashMap<ViId, Arc<Connection>>,
    ) -> bool {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let over = self.stop.load(SeqCst) || until.is_some_and(|until| until <= Instant::now());
            if over || self.left() == 0 {
                break;
            }
            // Whoever calls meanwhile is told.
            let raised = || self.left() == 0 || self.has_finished.load(SeqCst) || self.stop.load(SeqCst);
            let ready = queue.wait_or(PARTING, raised);
            if self.has_finished.swap(false, SeqCst) {
                self.send_finished();
            }
            if let Ok(Some(id)) = ready
                && let Some(connection) = connections.get(&id).cloned()
            {
                self.take_turn(connections, &connection);
            }
        }
        if self.stop.load(SeqCst) {
            return true;
        }
        connections.values().for_each(|connection| connection.lock().leave(Leaving::Shutdown));
        // At least a little, so that those hear it who listen.
        let until = until.unwrap_or_else(Instant::now).max(Instant::now() + PARTING);
        let mut untaken: Vec<_> = connections.values().cloned().collect();
        while !untaken.is_empty() && Instant::now() < until && !self.stop.load(SeqCst) {
            untaken.retain(|connection| {
                let mut link = connection.lock();
                !link.line.flush(A_MOMENT) && link.line.ended().is_none()
            });
        }
        self.untaken.store(untaken.len(), SeqCst);
        true
    }
}

/// How often who has come is looked for, where the polling thread takes the packets.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often connections that nobody came back for are looked for.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// How long a connection may go without saying who it is.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
const A_MOMENT: Duration = Duration::from_millis(5);
/// How long a last message may take.
const PARTING: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(3600);
