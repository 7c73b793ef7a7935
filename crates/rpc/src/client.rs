//! The calling side.
//!
//! Threads share a client. Whoever waits for an answer takes what has come from the line, for everybody: answers go to
//! their places, tasks are woken, continuations run. While nobody waits but tasks and continuations, one driver thread
//! of the [`Rpc`] does that.

mod core;

use crate::body::Body;
use crate::error::{CallError, Failed, Lost, OpenError};
use crate::head::{Head, Leaving, RPC_VERSION};
use crate::hub::{Hub, Rpc};
use crate::line::{Line, Next, compose};
use crate::stall;
use core::{Afterwards, Core, Deadline, Request, State, Welcome};
use highwire_mem::Process;
use highwire_vi::{Buffer, Frozen, Payload, Segment, SharedBuffer, ViOptions, WaitError};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Names a method of a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Method {
    /// The service.
    pub service: u32,
    /// Its version.
    pub version: u16,
    /// The method.
    pub method: u16,
}

/// Choices for one client. The default is right for most programs.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Calls that may be outstanding, a power of two up to 65,536. Each costs about 300 bytes on both sides.
    pub window: u32,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// How long calls wait for a lost connection to be made again. Then they end with an error that says whether they
    /// may have run.
    pub reconnect_for: Duration,
    /// Looks without pause while it waits, and never sleeps: for a thread that has a CPU of its own.
    pub busy: bool,
    /// The session's number; `None` takes a new random one, which is right unless a test wants two clients to have one.
    pub session: Option<u128>,
}

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        ClientOptions {
            window: 256,
            connect_timeout: Duration::from_secs(5),
            reconnect_for: Duration::from_secs(5),
            busy: false,
            session: None,
        }
    }
}

/// A session with a server. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    hub: Arc<Hub>,
    address: String,
    options: ClientOptions,
    session: u128,
    busy: AtomicBool,
    core: Mutex<Core>,
    /// The connection came or went.
    changed: Condvar,
    /// How often threads that wait were told to look.
    told: AtomicU32,
    process: Process,
}

/// What came of a call.
#[derive(Debug)]
pub struct Answer {
    /// The encoded result.
    pub body: Body,
    /// The room that was named, with the payload in it.
    pub payload: Payload,
    /// Bytes of that payload.
    pub length: usize,
    /// The payload that was sent.
    pub sent: Payload,
}

impl Answer {
    /// The first buffer of the room that was named, cut to what has landed there.
    pub fn into_buffer(self) -> Option<Buffer> {
        first_buffer(self.payload, self.length)
    }
}

/// The first buffer of a payload of `length` bytes, cut to what is in it.
pub(crate) fn first_buffer(payload: Payload, length: usize) -> Option<Buffer> {
    let mut buffer = payload.into_buffer()?;
    buffer.set_len(length.min(buffer.len()));
    Some(buffer)
}

/// What runs with the outcome of a call.
pub(crate) struct Continuation(Box<dyn FnOnce(Result<Answer, Failed>) + Send>);

impl Continuation {
    /// One that panics has said so on standard error. The thread that brought its answer is not its own: it has other
    /// answers to bring.
    fn run(self, outcome: Result<Answer, Failed>) {
        let _ = catch_unwind(AssertUnwindSafe(|| stall::inside(|| (self.0)(outcome))));
    }
}

impl std::fmt::Debug for Continuation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Continuation")
    }
}

/// A call that is being put together.
#[derive(Debug)]
#[must_use = "a call is made by `wait`, `start` or `then`"]
pub struct Call<'a> {
    client: &'a Client,
    method: Method,
    arguments: &'a [u8],
    payload: Payload,
    room: Payload,
    deadline: Option<Duration>,
}

impl<'a> Call<'a> {
    /// The encoded arguments. Up to 128 bytes they cost nothing; from 4 KiB on, or beside a payload from 92 bytes on, they
    /// go with the payload.
    pub fn arguments(mut self, bytes: &'a [u8]) -> Call<'a> {
        self.arguments = bytes;
        self
    }

    /// Adds a piece of payload, which comes back with the answer.
    pub fn payload(self, buffer: Buffer) -> Call<'a> {
        self.segment(Segment::Buffer(buffer))
    }

    /// Adds a piece of payload that others may send too.
    pub fn shared(self, buffer: SharedBuffer) -> Call<'a> {
        self.segment(Segment::Shared(buffer))
    }

    /// Adds a range of a frozen region. Panics if it is not inside.
    pub fn frozen(self, region: &Frozen, range: Range<usize>) -> Call<'a> {
        assert!(
            range.start <= range.end && range.end <= region.len(),
            "{range:?} is outside a frozen region of {} bytes",
            region.len()
        );
        self.segment(Segment::Frozen(region.clone(), range))
    }

    /// The same call with arguments that need not live as long.
    #[inline]
    pub(crate) fn with_arguments<'b>(self, arguments: &'b [u8]) -> Call<'b>
    where
        'a: 'b,
    {
        let Call { client, method, payload, room, deadline, .. } = self;
        Call { client, method, arguments, payload, room, deadline }
    }

    fn segment(mut self, segment: Segment) -> Call<'a> {
        self.payload = self.payload.and(segment);
        self
    }

    /// The answer's payload lands in `buffer`; several are filled in the order given.
    pub fn into(mut self, buffer: Buffer) -> Call<'a> {
        self.room = self.room.and(Segment::Buffer(buffer));
        self
    }

    /// Gives up after so long.
    pub fn deadline(mut self, after: Duration) -> Call<'a> {
        self.deadline = Some(after);
        self
    }

    fn request(self) -> (&'a Client, Request<'a>) {
        let Call { client, method, arguments, payload, room, deadline } = self;
        let deadline = deadline.map(|given| Deadline { at: highwire_mem::deadline(given), given });
        (client, Request { method, arguments, payload, room, deadline })
    }

    /// Makes the call and waits for its answer.
    pub fn wait(self) -> Result<Answer, Failed> {
        let (client, request) = self.request();
        client.shared.call(request)
    }

    /// Makes the call and goes on: the answer is fetched by [`Pending::wait`], or by awaiting.
    ///
    /// If as many calls are outstanding as may be, it is made as soon as another has been answered and fetched.
    pub fn start(self) -> Pending {
        let (client, request) = self.request();
        client.shared.start(request)
    }

    /// Makes the call and has `continuation` run with what comes of it, by whichever thread takes the answer from the
    /// line. It must not block, and must not make blocking calls: they end with [`CallError::WouldStall`].
    pub fn then(self, continuation: impl FnOnce(Result<Answer, Failed>) + Send + 'static) {
        let (client, request) = self.request();
        client.shared.then(request, Continuation(Box::new(continuation)));
    }
}

impl Client {
    pub(crate) fn connect(hub: &Arc<Hub>, address: &str, options: ClientOptions) -> Result<Client, OpenError> {
        let window = options.window.clamp(1, WINDOW_MAX).next_power_of_two();
        let session = options.session.unwrap_or_else(random);
        let shared = Arc::new(Shared {
            hub: hub.clone(),
            address: address.to_owned(),
            busy: AtomicBool::new(options.busy),
            options,
            session,
            core: Mutex::new(Core::new(window)),
            changed: Condvar::new(),
            told: AtomicU32::new(0),
            process: Process::current(),
        });
        let mut core = shared.lock();
        let hello = shared.hello(&mut core);
        let (line, welcome) = shared.open(hello)?;
        hub.know(line.watch().id(), &shared);
        core.adopt(line, welcome);
        drop(core);
        Ok(Client { shared })
    }

    /// A call of a method.
    pub fn call(&self, method: Method) -> Call<'_> {
        Call { client: self, method, arguments: &[], payload: Payload::None, room: Payload::None, deadline: None }
    }

    /// Takes what has come, and runs continuations. For those who poll rather than wait.
    pub fn poll(&self) {
        self.shared.drive();
    }

    /// Whether to look without pause from now on: see [`ClientOptions::busy`].
    pub fn set_busy(&self, busy: bool) {
        self.shared.busy.store(busy, Relaxed);
    }

    /// The number of its session.
    pub fn session(&self) -> u128 {
        self.shared.session
    }

    /// Calls that are outstanding.
    pub fn outstanding(&self) -> u32 {
        self.shared.lock().calls.outstanding()
    }

    /// Where it is connected to.
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Who is at the other end, while it is connected.
    pub fn peer(&self) -> Option<highwire_vi::PeerId> {
        self.shared.lock().line.as_ref().map(Line::peer)
    }

    /// The interface that it goes by, for buffers.
    pub fn rpc(&self) -> Rpc {
        Rpc::of(self.shared.hub.clone())
    }

    /// Whether it has a connection at present. If not, the next call makes one.
    pub fn is_connected(&self) -> bool {
        self.shared.lock().state == State::Up
    }
}

impl Shared {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the lock and does what was found to be done.
    #[inline]
    fn release(self: &Arc<Shared>, mut core: MutexGuard<'_, Core>) {
        if core.afterwards.is_nothing() {
            return;
        }
        let afterwards = std::mem::take(&mut core.afterwards);
        let watch = core.line.as_ref().map(|line| line.watch().clone());
        drop(core);
        self.after(afterwards, watch);
    }

    #[inline(never)]
    fn after(self: &Arc<Shared>, afterwards: Afterwards, watch: Option<highwire_vi::Watch>) {
        let Afterwards { wakers, continuations, threads, left, reconnect } = afterwards;
        if reconnect {
            self.reconnect();
        }
        if threads {
            // Before they are woken: who falls asleep this moment sees the one or the other.
            self.told.fetch_add(1, SeqCst);
        }
        if let Some(left) = left {
            left.wake();
        }
        if threads {
            self.changed.notify_all();
            if let Some(watch) = watch {
                watch.wake();
            }
        }
        wakers.into_iter().for_each(std::task::Waker::wake);
        for (continuation, outcome) in continuations {
            continuation.run(outcome);
        }
    }

    fn hello(&self, core: &mut Core) -> Head {
        Head::Hello {
            version: RPC_VERSION,
            window: core.window(),
            acknowledged: core.calls.acknowledged(),
            attempt: core.calls.attempt(),
            incarnation: core.calls.incarnation(),
        }
    }

    /// Connects, and introduces the session.
    fn open(&self, hello: Head) -> Result<(Line, Welcome), OpenError> {
        let timeout = self.options.connect_timeout;
        let deadline = highwire_mem::deadline(timeout);
        let options = ViOptions::new().queue_of(self.hub.queue()).connect_timeout(timeout);
        let vi = self.hub.nic().connect_with(&self.address, &options)?;
        let mut line = Line::new(self.hub.nic(), vi)?;
        let mut message = Vec::new();
        compose(&mut message, &hello, &self.session.to_le_bytes());
        line.send(&message);
        let watch = line.watch().clone();
        let address = || self.address.clone();
        let left = deadline.saturating_duration_since(Instant::now());
        let came = watch.wait_for(left, || match line.next() {
            Next::Nothing => line.ended().map(Err),
            next => Some(Ok(next)),
        });
        let (buffer, length) = match came {
            Ok(Ok(Next::Plain(buffer, length))) => (buffer, length),
            Ok(Ok(_)) => {
                let reason = crate::head::Malformed::Short { bytes: 0 };
                return Err(OpenError::NotRpc { address: address(), reason });
            }
            Ok(Err(failure)) => {
                return Err(OpenError::NoWelcome { address: address(), reason: WaitError::NotConnected(failure) });
            }
            Err(reason) => return Err(OpenError::NoWelcome { address: address(), reason }),
        };
        let head = Head::decode(&buffer[..length]).map(|(head, _)| head);
        line.give_back(buffer);
        match head {
            Ok(Head::Welcome { version, known, window, incarnation, frames, frame_bytes, request_bytes_max }) => {
                if version != RPC_VERSION {
                    return Err(OpenError::Version { address: address(), theirs: version, ours: RPC_VERSION });
                }
                let Head::Hello { window: asked, .. } = hello else { unreachable!("it is a hello") };
                if window != asked {
                    return Err(OpenError::Refused { address: address(), why: Leaving::Full });
                }
                Ok((line, Welcome { known, incarnation, frames, frame_bytes, request_bytes_max }))
            }
            Ok(Head::Leaving(why)) => Err(OpenError::Refused { address: address(), why }),
            Ok(_) => {
                let reason = crate::head::Malformed::Field { field: "kind", value: 0 };
                Err(OpenError::NotRpc { address: address(), reason })
            }
            Err(reason) => Err(OpenError::NotRpc { address: address(), reason }),
        }
    }

    /// Makes the connection again, on a thread of its own: it takes as long as it takes, and nobody is to wait for it
    /// who has a deadline, or other things to do.
    #[cold]
    fn reconnect(self: &Arc<Shared>) {
        let weak = Arc::downgrade(self);
        let started = std::thread::Builder::new().name("highwire-reconnect".into()).spawn(move || reconnect(&weak));
        if let Err(error) = started {
            self.no_connection(&error.to_string());
        }
    }

    /// Nothing came of connecting again.
    fn no_connection(self: &Arc<Shared>, last: &str) {
        let mut core = self.lock();
        let failure = match &mut core.state {
            State::Down { failure, reconnecting } => {
                *reconnecting = false;
                *failure
            }
            State::Up | State::Over(_) => return,
        };
        let lost = Lost::Ended { failure, within: self.options.reconnect_for, last: last.to_owned() };
        core.finish_outstanding(&lost);
        self.release(core);
    }

    #[inline]
    fn call(self: &Arc<Shared>, request: Request<'_>) -> Result<Answer, Failed> {
        if let Some(error) = self.why_no_call() {
            return Err(Failed { error, sent: request.payload, room: request.room });
        }
        let deadline = request.deadline;
        let mut core = self.lock();
        core.threads += 1;
        if core.line.as_ref().is_some_and(|line| line.watch().is_ready()) {
            // A server that is leaving may have said so.
            core.progress();
        }
        if !core.has_room() {
            match self.wait_for_room(core, deadline) {
                Ok(free) => core = free,
                Err((mut core, error)) => {
                    core.threads -= 1;
                    self.release(core);
                    return Err(Failed { error, sent: request.payload, room: request.room });
                }
            }
        }
        match core.submit(self.hub.nic(), request) {
            Ok(sequence) => self.wait_engaged(core, sequence, deadline),
            Err(failed) => {
                core.threads -= 1;
                self.release(core);
                Err(failed)
            }
        }
    }

    /// Waits for a call, with the lock in hand as a thread that waits, which it is no longer afterwards.
    #[inline]
    fn wait_engaged(
        self: &Arc<Shared>,
        mut core: MutexGuard<'_, Core>,
        sequence: u64,
        deadline: Option<Deadline>,
    ) -> Result<Answer, Failed> {
        if let Some(outcome) = self.glance(&mut core, sequence) {
            if core.calls.outstanding() > 0 {
                // What came behind it is others', and its sender waits for the room.
                core.progress();
            }
            core.threads -= 1;
            self.release(core);
            return outcome;
        }
        self.release(core);
        let outcome = self.wait_for_call(sequence, deadline);
        let mut core = self.lock();
        core.threads -= 1;
        self.release(core);
        outcome
    }

    /// Looks for an answer for a while, with the lock in hand: most come within that. A busy client looks longer, as long
    /// as nobody else waits.
    #[inline]
    fn glance(&self, core: &mut Core, sequence: u64) -> Option<Result<Answer, Failed>> {
        if let Some(outcome) = core.take(sequence) {
            return Some(outcome);
        }
        let mut glances = if self.busy.load(Relaxed) { GLANCES_BUSY } else { 1 };
        while glances > 0 {
            for _ in 0..core.line.as_ref()?.watch().free_looks() {
                if core.step()
                    && let Some(outcome) = core.take(sequence)
                {
                    return Some(outcome);
                }
            }
            glances = if core.threads > 1 { 0 } else { glances - 1 };
        }
        None
    }

    /// Waits until the call is done, or its deadline. The caller counts as a thread that waits.
    #[inline(never)]
    fn wait_for_call(self: &Arc<Shared>, sequence: u64, deadline: Option<Deadline>) -> Result<Answer, Failed> {
        self.wait(deadline, |core| core.take(sequence)).unwrap_or_else(|error| {
            let mut core = self.lock();
            // It may have come after all.
            let outcome = core.take(sequence).or_else(|| core.give_up(sequence, error.clone()).map(Err));
            self.release(core);
            outcome.unwrap_or(Err(Failed { error, sent: Payload::None, room: Payload::None }))
        })
    }

    #[inline(never)]
    fn wait_for_room<'a>(
        self: &'a Arc<Shared>,
        core: MutexGuard<'a, Core>,
        deadline: Option<Deadline>,
    ) -> Result<MutexGuard<'a, Core>, (MutexGuard<'a, Core>, CallError)> {
        self.release(core);
        loop {
            let waited = self.wait(deadline, |core| core.has_room().then_some(()));
            let core = self.lock();
            match waited {
                Err(error) => return Err((core, error)),
                // Another thread may have been quicker.
                Ok(()) if core.has_room() => return Ok(core),
                Ok(()) => self.release(core),
            }
        }
    }

    /// Waits until `look` finds something under the lock. Takes what comes from the line meanwhile.
    fn wait<T>(
        self: &Arc<Shared>,
        deadline: Option<Deadline>,
        mut look: impl FnMut(&mut Core) -> Option<T>,
    ) -> Result<T, CallError> {
        loop {
            let left = match deadline {
                None => LONG,
                Some(deadline) => deadline.at.saturating_duration_since(Instant::now()),
            };
            let mut core = self.lock();
            core.progress();
            if let Some(found) = look(&mut core) {
                self.release(core);
                return Ok(found);
            }
            if left.is_zero() {
                self.release(core);
                let after = deadline.map_or(LONG, |deadline| deadline.given);
                return Err(CallError::DeadlinePassed { after });
            }
            let Some(watch) = core.line.as_ref().map(|line| line.watch().clone()) else {
                // Whoever reconnects tells.
                if !core.afterwards.is_nothing() {
                    self.release(core);
                    continue;
                }
                drop(self.changed.wait_timeout(core, left));
                continue;
            };
            let mut told = self.told.load(SeqCst);
            self.release(core);
            let mut look = || {
                let mut core = match self.core.try_lock() {
                    Ok(core) => core,
                    Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                    // Whoever has it may have looked before this came, and not look again; or may be another than the
                    // one who told us.
                    Err(TryLockError::WouldBlock) if watch.is_ready() || self.told.load(SeqCst) != told => self.lock(),
                    // Whoever has it wakes us if there is something for us.
                    Err(TryLockError::WouldBlock) => return None,
                };
                told = self.told.load(SeqCst);
                core.progress();
                let found = look(&mut core);
                let is_other_line = core.line.as_ref().is_none_or(|line| line.watch().id() != watch.id());
                self.release(core);
                match found {
                    Some(found) => Some(Some(found)),
                    None => is_other_line.then_some(None),
                }
            };
            let waited = match self.busy.load(Relaxed) {
                // Until the deadline is looked at again.
                true => Ok((0..LOOKS_PER_CLOCK).find_map(|_| look()).flatten()),
                false => watch.wait_for(left, look),
            };
            match waited {
                Ok(Some(found)) => return Ok(found),
                Ok(None) | Err(WaitError::TimedOut(_)) => {}
                Err(WaitError::ForkedChild) => return Err(CallError::ForkedChild),
                Err(_) => {}
            }
        }
    }

    /// Why this thread cannot make a call and wait for it.
    #[inline]
    fn why_no_call(&self) -> Option<CallError> {
        self.why_no_start().or_else(|| stall::is_inside().then_some(CallError::WouldStall))
    }

    /// Why no call can be made: a forked child has neither the connection nor the threads of its parent.
    #[inline]
    fn why_no_start(&self) -> Option<CallError> {
        (!self.process.is_this()).then_some(CallError::ForkedChild)
    }

    fn start(self: &Arc<Shared>, request: Request<'_>) -> Pending {
        if let Some(error) = self.why_no_start() {
            let failed = Failed { error, sent: request.payload, room: request.room };
            return Pending { shared: self.clone(), stage: Stage::Done(Some(Box::new(Err(failed)))) };
        }
        let mut core = self.lock();
        core.aside(Core::progress);
        if !core.has_room() {
            let queued = Queued {
                method: request.method,
                arguments: request.arguments.into(),
                payload: request.payload,
                room: request.room,
                deadline: request.deadline,
            };
            self.release(core);
            return Pending { shared: self.clone(), stage: Stage::Queued(Box::new(queued)) };
        }
        let deadline = request.deadline;
        let stage = match core.submit(self.hub.nic(), request) {
            Ok(sequence) => Stage::Outstanding { sequence, deadline },
            Err(failed) => Stage::Done(Some(Box::new(Err(failed)))),
        };
        self.release(core);
        Pending { shared: self.clone(), stage }
    }

    fn then(self: &Arc<Shared>, request: Request<'_>, continuation: Continuation) {
        if let Some(error) = self.why_no_start() {
            return continuation.run(Err(Failed { error, sent: request.payload, room: request.room }));
        }
        let deadline = request.deadline;
        let mut core = self.lock();
        core.aside(Core::progress);
        let refused = match core.has_room() {
            true => match core.submit(self.hub.nic(), request) {
                Ok(sequence) => {
                    core.aside(|core| core.run_when_done(sequence, continuation));
                    None
                }
                Err(failed) => Some((continuation, failed)),
            },
            // It is for the caller to slow down: nothing waits here that nobody knows of.
            false => {
                let error = CallError::WindowFull { outstanding: core.calls.outstanding() };
                Some((continuation, Failed { error, sent: request.payload, room: request.room }))
            }
        };
        self.release(core);
        match refused {
            Some((continuation, failed)) => continuation.run(Err(failed)),
            None => self.hub.engage(self, deadline.map(|deadline| deadline.at)),
        }
    }

    /// Takes what has come, for tasks and continuations. The next deadline of one of them, if any of them waits.
    pub(crate) fn drive(self: &Arc<Shared>) -> Driven {
        let mut core = self.lock();
        let next = core.aside(|core| {
            core.progress();
            if core.is_engaged() { core.expire(Instant::now()) } else { None }
        });
        let engaged = core.is_engaged();
        self.release(core);
        Driven { engaged, next }
    }
}

/// How a client stands after it was driven.
pub(crate) struct Driven {
    /// Tasks or continuations wait.
    pub engaged: bool,
    /// The first deadline of one of them.
    pub next: Option<Instant>,
}

/// Tries until it works, nobody waits any more, or the time is over.
fn reconnect(weak: &Weak<Shared>) {
    let began = Instant::now();
    let mut pause = PAUSE_FIRST;
    loop {
        let Some(shared) = weak.upgrade() else { return };
        let mut core = shared.lock();
        if !matches!(core.state, State::Down { .. }) {
            return;
        }
        let hello = shared.hello(&mut core);
        drop(core);
        let last = match shared.open(hello) {
            Ok((line, welcome)) => {
                let mut core = shared.lock();
                shared.hub.know(line.watch().id(), &shared);
                core.adopt(line, welcome);
                shared.changed.notify_all();
                let engaged = core.engaged > 0;
                shared.release(core);
                if engaged {
                    shared.hub.engage(&shared, None);
                }
                return;
            }
            Err(OpenError::Refused { why: Leaving::SessionTaken, .. }) => {
                let mut core = shared.lock();
                core.finish_all(Lost::SessionTaken);
                return shared.release(core);
            }
            Err(error) => error.to_string(),
        };
        if began.elapsed() + pause > shared.options.reconnect_for {
            return shared.no_connection(&last);
        }
        drop(shared);
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MOST);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let core = self.core.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = &mut core.line {
            self.hub.forget(line.watch().id());
            // So that the server need not keep the session for somebody who never comes back.
            line.send(&Head::Leaving(Leaving::Shutdown).encode());
        }
        // Continuations hear of it; nobody else can be waiting.
        core.finish_all(Lost::Closed);
        let afterwards = std::mem::take(&mut core.afterwards);
        for (continuation, outcome) in afterwards.continuations {
            continuation.run(outcome);
        }
    }
}

/// A call on its way. Await it, or [`Pending::wait`] for it. Dropped, it is given up: nothing lands in its buffers any
/// more, and the server is told.
#[derive(Debug)]
#[must_use = "dropped, the call is given up"]
pub struct Pending {
    shared: Arc<Shared>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// There was no room for it yet.
    Queued(Box<Queued>),
    Outstanding {
        sequence: u64,
        deadline: Option<Deadline>,
    },
    Done(Option<Box<Result<Answer, Failed>>>),
}

#[derive(Debug)]
struct Queued {
    method: Method,
    arguments: Box<[u8]>,
    payload: Payload,
    room: Payload,
    deadline: Option<Deadline>,
}

impl Queued {
    fn request(&mut self) -> Request<'_> {
        let (payload, room) = (std::mem::take(&mut self.payload), std::mem::take(&mut self.room));
        Request { method: self.method, arguments: &self.arguments, payload, room, deadline: self.deadline }
    }
}

impl Pending {
    /// Waits for the answer.
    pub fn wait(mut self) -> Result<Answer, Failed> {
        match std::mem::replace(&mut self.stage, Stage::Done(None)) {
            Stage::Queued(mut queued) => self.shared.call(queued.request()),
            Stage::Outstanding { sequence, .. } if stall::is_inside() => {
                let mut core = self.shared.lock();
                let failed = core.aside(|core| core.give_up(sequence, CallError::WouldStall));
                self.shared.release(core);
                let nothing = Failed { error: CallError::WouldStall, sent: Payload::None, room: Payload::None };
                Err(failed.unwrap_or(nothing))
            }
            Stage::Outstanding { sequence, deadline } => {
                let mut core = self.shared.lock();
                core.threads += 1;
                core.wait_with_thread(sequence);
                self.shared.wait_engaged(core, sequence, deadline)
            }
            Stage::Done(outcome) => outcome.map_or_else(gone, |outcome| *outcome),
        }
    }

    /// Gives the call up. Its buffers, all but those that the server may still be reading; or its answer, if that had
    /// come.
    pub fn cancel(mut self) -> Result<Answer, Failed> {
        match std::mem::replace(&mut self.stage, Stage::Done(None)) {
            Stage::Queued(mut queued) => {
                let Request { payload, room, .. } = queued.request();
                Err(Failed { error: CallError::Cancelled, sent: payload, room })
            }
            Stage::Outstanding { sequence, .. } => {
                let mut core = self.shared.lock();
                let outcome = core.aside(|core| {
                    core.progress();
                    core.take(sequence).or_else(|| core.give_up(sequence, CallError::Cancelled).map(Err))
                });
                self.shared.release(core);
                outcome.unwrap_or_else(gone)
            }
            Stage::Done(outcome) => outcome.map_or_else(gone, |outcome| *outcome),
        }
    }
}

/// There is nothing more to be had of a call.
fn gone() -> Result<Answer, Failed> {
    Err(Failed { error: CallError::Cancelled, sent: Payload::None, room: Payload::None })
}

impl Future for Pending {
    type Output = Result<Answer, Failed>;

    fn poll(mut self: Pin<&mut Pending>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let shared = self.shared.clone();
        let mut core = shared.lock();
        core.aside(Core::progress);
        if let Stage::Queued(queued) = &mut self.stage {
            let deadline = queued.deadline;
            if !core.has_room() {
                if let Some(Deadline { at, given }) = deadline
                    && at <= Instant::now()
                {
                    shared.release(core);
                    let Request { payload, room, .. } = queued.request();
                    self.stage = Stage::Done(None);
                    let error = CallError::DeadlinePassed { after: given };
                    return Poll::Ready(Err(Failed { error, sent: payload, room }));
                }
                let until = deadline.map(|deadline| deadline.at);
                core.want_room(context.waker(), until);
                shared.release(core);
                shared.hub.engage(&shared, until);
                return Poll::Pending;
            }
            self.stage = match core.submit(shared.hub.nic(), queued.request()) {
                Ok(sequence) => Stage::Outstanding { sequence, deadline },
                Err(failed) => Stage::Done(Some(Box::new(Err(failed)))),
            };
        }
        let outcome = match &mut self.stage {
            Stage::Outstanding { sequence, deadline } => match core.aside(|core| core.take(*sequence)) {
                Some(outcome) => Some(outcome),
                None => {
                    core.wake_when_done(*sequence, context.waker());
                    let deadline = deadline.map(|deadline| deadline.at);
                    shared.release(core);
                    shared.hub.engage(&shared, deadline);
                    return Poll::Pending;
                }
            },
            Stage::Done(outcome) => Some(outcome.take().map_or_else(gone, |outcome| *outcome)),
            Stage::Queued(_) => None,
        };
        shared.release(core);
        self.stage = Stage::Done(None);
        Poll::Ready(outcome.unwrap_or_else(gone))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Stage::Outstanding { sequence, .. } = self.stage
            && self.shared.process.is_this()
        {
            let mut core = self.shared.lock();
            let buffers = core.aside(|core| core.give_up(sequence, CallError::Cancelled));
            self.shared.release(core);
            drop(buffers);
        }
    }
}

pub(crate) fn random() -> u128 {
    let mut bytes = [0; 16];
    highwire_mem::fill_random(&mut bytes);
    u128::from_le_bytes(bytes)
}

/// The most calls outstanding.
pub(crate) const WINDOW_MAX: u32 = 1 << 16;
/// When nothing says how long to wait.
const LONG: Duration = Duration::from_secs(24 * 3600);
/// Rounds of looks with the lock in hand, of a busy client: a few hundred microseconds.
const GLANCES_BUSY: u32 = 256;
/// Looks without pause between two at the clock.
const LOOKS_PER_CLOCK: u32 = 256;
const PAUSE_FIRST: Duration = Duration::from_millis(1);
const PAUSE_MOST: Duration = Duration::from_millis(100);
