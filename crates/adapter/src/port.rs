//! A port: a switchboard with those who turn it.
//!
//! A thread of its own turns it, or the threads of the application do whenever they post or look, which
//! saves two wake-ups a message. Then the thread only stands in: while every caller is asleep, or has been
//! away for a moment.
//!
//! ```text
//!  Thread:  caller posts ── bell ──▶ thread turns ── notice ──▶ caller
//!  Caller:  caller posts and turns;   caller looks and turns;   caller rests on the socket
//!           thread naps; it takes over when nobody has turned for NAP, and whenever a caller sleeps elsewhere;
//!           while a caller rests, that one looks after everything, and wakes the thread when it leaves
//! ```

use crate::restore::RestoreWatch;
use crate::switchboard::{Found, Key, Standing, Switchboard};
use highwire_mem::Granted;
use highwire_mem::work::{Carrier, Dispatch, Done, Landings, Line, Place, Terms, WireError, Work};
use highwire_proto::{ConnectError, Keys, SessionInfo};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::time::Timespec;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Who carries messages between VIs and the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Driver {
    /// A thread of its own: a connection lives on while the application computes.
    #[default]
    Thread,
    /// The thread that posts or looks, for the lowest latency. A thread of its own stands in while nobody
    /// looks. What is posted while earlier messages are still on their way may wait until the next look,
    /// to go together with others.
    Caller,
}

/// A switchboard with those who turn it.
pub(crate) struct Port {
    number: u64,
    local: SocketAddr,
    driver: Driver,
    start: Instant,
    board: Mutex<Switchboard>,
    /// Those who connect or accept wait for it.
    changed: Condvar,
    /// Lines with work, which was posted while somebody else had the board.
    pending: Mutex<Vec<Key>>,
    has_pending: AtomicBool,
    /// Receives were handed to a session, which may have to tell its peer. Written with the board.
    untold: AtomicBool,
    /// Messages posted since something was sent last. With the board.
    gathered: AtomicU32,
    /// Copies of the link's descriptors and their places among them, until the port ends.
    sockets: Mutex<Arc<[(usize, OwnedFd)]>>,
    /// The thread's.
    bell: OwnedFd,
    /// In microseconds of the port's clock; 0 while the thread is awake, or naps, or has been woken.
    sleeps_until: AtomicU64,
    /// The thread sleeps until whoever rests is awake.
    relies: AtomicBool,
    /// A resting caller's, and until when it means to sleep; 0 while it is awake.
    rest_bell: OwnedFd,
    resting: AtomicBool,
    rests_until: AtomicU64,
    /// Microseconds of the port's clock; the engine's next deadline, and whether the link was full.
    deadline: AtomicU64,
    held_up: AtomicBool,
    /// Which socket was.
    full_descriptor: AtomicUsize,
    /// Which sockets a sleeper found readable since the last look, a bit for each.
    readable: AtomicUsize,
    /// Turns by callers, and callers who sleep.
    turns: AtomicU64,
    away: AtomicU32,
    /// Readable while somebody waits to be accepted.
    callers: OwnedFd,
    callers_shown: AtomicBool,
    /// Somebody may still connect or accept by it.
    held: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

impl Port {
    /// Starts a port for this board.
    pub(crate) fn start(mut board: Switchboard, driver: Driver) -> io::Result<Arc<Port>> {
        let link = board.engine().link();
        let local = link.local_address();
        let sockets = link.descriptors().into_iter().enumerate().filter_map(|(index, socket)| Some((index, socket?)));
        let sockets = sockets.map(|(index, socket)| Ok((index, rustix::io::fcntl_dupfd_cloexec(socket, 3)?)));
        let sockets: Arc<[(usize, OwnedFd)]> = sockets.collect::<io::Result<_>>()?;
        if sockets.is_empty() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let eventfd = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let port = Arc::new(Port {
            number: NEXT_NUMBER.fetch_add(1, SeqCst),
            local,
            driver,
            start: Instant::now(),
            board: Mutex::new(board),
            changed: Condvar::new(),
            pending: Mutex::default(),
            has_pending: AtomicBool::new(false),
            untold: AtomicBool::new(false),
            gathered: AtomicU32::new(0),
            sockets: Mutex::new(sockets),
            bell: eventfd()?,
            sleeps_until: AtomicU64::new(0),
            relies: AtomicBool::new(false),
            rest_bell: eventfd()?,
            resting: AtomicBool::new(false),
            rests_until: AtomicU64::new(0),
            deadline: AtomicU64::new(u64::MAX),
            held_up: AtomicBool::new(false),
            full_descriptor: AtomicUsize::new(0),
            readable: AtomicUsize::new(0),
            turns: AtomicU64::new(0),
            away: AtomicU32::new(0),
            callers: eventfd()?,
            callers_shown: AtomicBool::new(false),
            held: AtomicBool::new(true),
            thread: Mutex::default(),
        });
        let inside = port.clone();
        let thread = std::thread::Builder::new().name("highwire-wire".into()).spawn(move || inside.run())?;
        *lock(&port.thread) = Some(thread);
        Ok(port)
    }

    /// Where it is bound.
    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    /// True while somebody may connect or accept by it.
    pub(crate) fn is_held(&self) -> bool {
        self.held.load(SeqCst)
    }

    /// Changes the keys.
    pub(crate) fn set_keys(&self, keys: Keys) {
        let mut board = self.board();
        board.engine().set_keys(self.now(), keys);
        // What was asked for with another key is asked for again.
        board.send(self.now());
        self.finish(board);
    }

    /// Ends the sessions that were not established under a present key; how many.
    pub(crate) fn end_old_sessions(&self) -> usize {
        let mut board = self.board();
        let ended = board.engine().endpoint().end_old_sessions(self.now());
        board.send(self.now());
        self.finish(board);
        ended
    }

    /// The sessions that are there.
    pub(crate) fn sessions(&self) -> Vec<SessionInfo> {
        self.board().engine().endpoint().sessions().collect()
    }

    /// Readable while somebody waits to be accepted.
    pub(crate) fn callers(&self) -> BorrowedFd<'_> {
        self.callers.as_fd()
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn board(&self) -> MutexGuard<'_, Switchboard> {
        lock(&self.board)
    }

    // ── Connecting and accepting ─────────────────────────────────────────────────────────────────

    /// Connects a line to whoever listens at `to`.
    pub(crate) fn connect(
        self: &Arc<Port>,
        to: SocketAddr,
        line: &Arc<Line>,
        reliable: bool,
        timeout: Duration,
    ) -> Result<(), WireError> {
        let mut board = self.board();
        let asked = board.connect(self.now(), to, line, reliable);
        let key = asked.map_err(|error| WireError::Socket(error.to_string()))?;
        board.send(self.now());
        self.finish(board);
        let answered = self.wait_until(timeout, |board| match board.standing(key) {
            Standing::Asking => None,
            Standing::Connected => Some(Ok(())),
            Standing::Failed(error) => Some(Err(error)),
        });
        let not_accepted = || WireError::NotAccepted { to, after: timeout };
        let result = answered.unwrap_or_else(|| {
            let mut board = self.board();
            if board.is_established(key) {
                return Err(not_accepted());
            }
            let fingerprint = board.engine().endpoint().fingerprint();
            Err(WireError::NoAnswer(ConnectError::NoAnswer { to, after: timeout, fingerprint }.to_string()))
        });
        let result = result.and_then(|()| self.connected(key, line).ok_or_else(not_accepted));
        if result.is_err() {
            self.close(key, usize::MAX);
        }
        result
    }

    /// Connects a line to the next who calls; false if nobody did in time.
    pub(crate) fn accept(self: &Arc<Port>, line: &Arc<Line>, reliable: bool, timeout: Duration) -> bool {
        let accepted = self.wait_until(timeout, |board| {
            let key = board.accept(line, reliable)?;
            board.send(self.now());
            Some(key)
        });
        accepted.is_some_and(|key| self.connected(key, line).is_some())
    }

    /// Which of this host's addresses `peer` sees, where the port has all of them.
    fn local_to(&self, peer: SocketAddr) -> SocketAddr {
        let local = self.local();
        if !local.ip().is_unspecified() {
            return local;
        }
        // Nothing is sent: the kernel only says which way it would go.
        let any = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { IpAddr::from(Ipv6Addr::UNSPECIFIED) };
        let way = UdpSocket::bind((any, 0)).and_then(|socket| socket.connect(peer).and(socket.local_addr()));
        way.map_or(local, |way| SocketAddr::new(way.ip(), local.port()))
    }

    fn connected(self: &Arc<Port>, key: Key, line: &Arc<Line>) -> Option<()> {
        let (peer, message_bytes_max) = self.board().reach(key)?;
        let carrier = Arc::new(Carriage { port: self.clone(), key });
        line.connected(Terms { peer, local: self.local_to(peer), message_bytes_max, carrier });
        Some(())
    }

    /// Waits until `look` finds something on the board, which somebody else turns meanwhile.
    fn wait_until<T>(&self, timeout: Duration, mut look: impl FnMut(&mut Switchboard) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + timeout.min(Duration::from_secs(1 << 30));
        let mut is_away = false;
        let mut board = self.board();
        let found = loop {
            if let Some(found) = look(&mut board) {
                break Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break None;
            }
            if !std::mem::replace(&mut is_away, true) {
                // Not for a single look: the thread would keep those from their CPU who do the work.
                self.hand_over(true);
            }
            board = self.changed.wait_timeout(board, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        self.finish(board);
        if is_away {
            self.hand_over(false);
        }
        found
    }

    /// Nobody will accept here any more.
    pub(crate) fn stop_listening(&self) {
        let mut board = self.board();
        board.stop_listening();
        board.send(self.now());
        let done = board.is_idle() && board.is_done();
        self.finish(board);
        self.let_go();
        let thread = lock(&self.thread).take();
        if let (true, Some(thread)) = (done, thread) {
            // It has nothing left to do; when it has ended, the address is free for the next.
            let _ = thread.join();
        }
    }

    /// Closes the socket, though somebody may still hold the port.
    fn shut(&self, board: &mut Switchboard) {
        board.cut_off();
        *lock(&self.sockets) = Arc::new([]);
    }

    /// Nobody will connect or accept by it any more: it ends with its last line.
    pub(crate) fn let_go(&self) {
        self.held.store(false, SeqCst);
        ring(&self.bell);
    }

    /// A line is not used any more, with so many messages whose completions nobody has taken.
    fn close(&self, key: Key, outstanding: usize) {
        let mut board = self.board();
        // What was posted before it was closed goes nowhere, but comes out of the line.
        board.take_work(key);
        // Word of what has arrived may have been left for later.
        board.send(self.now());
        board.close(key, outstanding);
        board.send(self.now());
        self.finish(board);
        if !self.held.load(SeqCst) {
            ring(&self.bell);
        }
    }

    // ── Turning ──────────────────────────────────────────────────────────────────────────────────

    fn take_pending(&self, board: &mut Switchboard) {
        while self.has_pending.load(SeqCst) && self.has_pending.swap(false, SeqCst) {
            let keys = std::mem::take(&mut *lock(&self.pending));
            for key in keys {
                board.take_work(key);
            }
        }
    }

    /// Whoever has the board sends everything now.
    fn note_sending(&self) {
        self.gathered.store(0, Relaxed);
        self.untold.store(false, Relaxed);
    }

    /// True if something was posted that nobody has looked after yet.
    fn has_work(&self) -> bool {
        self.has_pending.load(SeqCst) || self.untold.load(SeqCst)
    }

    /// Takes what was posted and does what can be done now. True if a packet moved.
    fn turn(&self, board: &mut Switchboard) -> bool {
        self.take_pending(board);
        self.note_sending();
        self.note_readable(board);
        // The kernel refuses to receive only for want of memory, which passes.
        board.turn(self.now()).unwrap_or(false)
    }

    /// Lets go of the board, and tells everybody whom the last turn concerns.
    fn finish(&self, mut board: MutexGuard<'_, Switchboard>) {
        let (changed, callers) = (std::mem::take(&mut board.changed), board.has_callers());
        let mut deadline = board.deadline().map_or(u64::MAX, |at| at.as_micros() as u64);
        let held_up = board.engine().is_held_up();
        if held_up {
            // What is to be sent is overdue until the link has room, which wakes whoever sleeps.
            deadline = deadline.max((self.now() + FULL).as_micros() as u64);
        }
        self.deadline.store(deadline, Relaxed);
        if held_up {
            self.full_descriptor.store(board.engine().link().full_descriptor(), Relaxed);
        }
        self.held_up.store(held_up, Relaxed);
        // Still with the board: two who show what was true one after the other would hide a caller for good.
        if callers != self.callers_shown.load(Relaxed) {
            self.callers_shown.store(callers, Relaxed);
            if callers { ring(&self.callers) } else { hush(&self.callers) }
        }
        let told = self.tell(&mut board);
        drop(board);
        // Sleepers announce themselves, and then look at the deadline and at what is done. Here both are written,
        // and then it is looked for sleepers: one of the two sees the other.
        fence(SeqCst);
        if changed {
            self.changed.notify_all();
        }
        if deadline < self.sleeps_until.load(SeqCst) {
            // It was told of a later one.
            self.rouse();
        }
        let concerned = changed || told || deadline < self.rests_until.load(SeqCst);
        if concerned && self.resting.load(SeqCst) {
            ring(&self.rest_bell);
        }
    }

    /// The board, unless somebody has it, who then sees what is pending.
    fn try_board(&self) -> Option<MutexGuard<'_, Switchboard>> {
        match self.board.try_lock() {
            Ok(board) => Some(board),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Leaves work to whoever has the board next.
    fn keep(&self, line: &Line, key: Key, work: Work) {
        line.post(work);
        let mut pending = lock(&self.pending);
        if pending.last() != Some(&key) {
            pending.push(key);
        }
        drop(pending);
        self.has_pending.store(true, SeqCst);
    }

    /// A caller posts, and sends if this is the time.
    fn post_by_caller(&self, line: &Line, key: Key, work: Work) {
        match (self.try_board(), work) {
            (Some(board), Work::Send(dispatch)) => self.send_by_caller(board, key, dispatch),
            (Some(mut board), work @ (Work::Write(_) | Work::Read(_))) => {
                self.take_pending(&mut board);
                let quiet = board.post(key, work);
                self.send_or_gather(&mut board, quiet);
                self.note_turn();
                self.finish(board);
            }
            (Some(mut board), work) => {
                self.take_pending(&mut board);
                board.post(key, work);
                self.untold.store(true, SeqCst);
                if !board.news.is_empty() {
                    self.finish(board);
                }
            }
            (None, work) => self.keep(line, key, work),
        }
        // Of those who found the board taken, or our own if it has been let go since.
        while self.has_pending.load(SeqCst)
            && let Some(mut board) = self.try_board()
        {
            self.take_pending(&mut board);
            let quiet = board.is_quiet(key.session);
            self.send_or_gather(&mut board, quiet);
            self.finish(board);
        }
        if self.has_work() {
            // It waits for the next look, or whoever has the board accepts or closes and does not look. Those
            // who are awake do soon.
            self.rouse();
            if self.resting.load(SeqCst) {
                ring(&self.rest_bell);
            }
        }
    }

    fn send_by_caller(&self, mut board: MutexGuard<'_, Switchboard>, key: Key, dispatch: Dispatch) {
        // What was posted before goes before.
        self.take_pending(&mut board);
        match board.send_ahead(key, dispatch, || self.now()) {
            Ok(()) => self.note_sending(),
            Err(dispatch) => {
                let quiet = board.post(key, Work::Send(dispatch));
                self.send_or_gather(&mut board, quiet);
            }
        }
        self.note_turn();
        self.finish(board);
    }

    /// An idle pipe sends; a busy one gathers.
    fn send_or_gather(&self, board: &mut Switchboard, quiet: bool) {
        let gathered = self.gathered.load(Relaxed);
        if quiet || gathered >= GATHERED_MAX {
            self.note_sending();
            board.send(self.now());
        } else {
            self.gathered.store(gathered + 1, Relaxed);
        }
    }

    /// A caller looks for what has come. Mostly there is nothing, and then it is to cost nothing but the
    /// look.
    ///
    /// Whoever looks at a line may be handed what came on it at once.
    fn look(&self, line: Option<Key>) -> Option<Done> {
        let handed = self.try_board().and_then(|mut board| {
            board.looked_at = line;
            self.look_at(board)
        });
        // Of those who found the board taken.
        while self.has_pending.load(SeqCst)
            && let Some(mut board) = self.try_board()
        {
            self.turn(&mut board);
            self.finish(board);
        }
        handed
    }

    fn look_at(&self, mut board: MutexGuard<'_, Switchboard>) -> Option<Done> {
        let now = self.now();
        let due = now.as_micros() as u64 >= self.deadline.load(Relaxed);
        let work = self.has_work() || self.gathered.load(Relaxed) > 0 || self.held_up.load(Relaxed);
        let mut moved = if due || work {
            self.turn(&mut board)
        } else {
            self.note_readable(&mut board);
            match board.look(now) {
                Found::Nothing => return board.take_handed(),
                Found::Completions => {
                    // What else there is to do is overdue: the next look does it, and nobody sleeps before.
                    // Whoever is about to announces that and then looks at the deadline; here it is the other
                    // way round. An exchange, since whoever looked waits, and a fence takes thrice as long.
                    self.deadline.swap(0, SeqCst);
                    // The thread is woken by what came, but may have to wait for this very CPU.
                    self.rouse();
                    if !board.news.is_empty() {
                        // The same holds for what is done.
                        fence(SeqCst);
                    }
                    if self.is_alone() {
                        self.tell(&mut board);
                        return board.take_handed();
                    }
                }
                Found::More => {}
            }
            true
        };
        // Whoever waits for a long message would sleep next, and be woken for the rest of it.
        for _ in 1..LOOKS_MAX {
            if !moved || board.has_completions() {
                break;
            }
            moved = board.look(self.now()) != Found::Nothing;
        }
        let handed = board.take_handed();
        self.finish(board);
        handed
    }

    /// Wakes the thread, if it sleeps and nobody has done so. Whoever is held up between the two steps holds up
    /// others who rely on it, until then or until the thread wakes by itself.
    fn rouse(&self) {
        if self.sleeps_until.load(SeqCst) != 0 && self.sleeps_until.swap(0, SeqCst) != 0 {
            ring(&self.bell);
        }
    }

    /// True if nobody sleeps who relies on being told of deadlines.
    fn is_alone(&self) -> bool {
        self.sleeps_until.load(SeqCst) == 0 && !self.resting.load(SeqCst)
    }

    /// Tells everybody for whom something is done; false if that is nobody.
    fn tell(&self, board: &mut Switchboard) -> bool {
        if board.news.is_empty() {
            return false;
        }
        fence(SeqCst);
        board.news.drain(..).for_each(|line| line.tell());
        true
    }

    /// The thread does not take over from who turns the board.
    fn note_turn(&self) {
        // Two at once may count as one: it matters only that it changes.
        self.turns.store(self.turns.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// The thread.
    fn run(&self) {
        let mut watch = RestoreWatch::begin();
        let mut notified = false;
        let mut seen = 0;
        let mut leaving: Option<Instant> = None;
        loop {
            if watch.was_restored(std::mem::take(&mut notified)) {
                let mut board = self.board();
                board.engine().forget_past(self.now());
                board.send(self.now());
                self.finish(board);
            }
            let turns = self.turns.load(SeqCst);
            let attended = self.resting.load(SeqCst) || std::mem::replace(&mut seen, turns) != turns;
            if self.driver == Driver::Caller && self.away.load(SeqCst) == 0 && attended && leaving.is_none() {
                self.relies.store(true, SeqCst);
                let rests = self.resting.load(SeqCst);
                self.relies.store(rests, SeqCst);
                notified = self.sleep(&watch, false, if rests { Duration::MAX } else { self.now() + NAP });
                self.relies.store(false, SeqCst);
                continue;
            }
            let mut board = self.board();
            let moved = self.turn(&mut board);
            if !self.held.load(SeqCst) && board.is_idle() {
                // Nobody is left; the peers are told, and given a moment to hear it.
                let since = *leaving.get_or_insert_with(Instant::now);
                board.close_sessions();
                if board.is_done() || since.elapsed() > GOODBYE {
                    self.shut(&mut board);
                    return self.finish(board);
                }
            }
            self.finish(board);
            if !moved {
                let deadline = Duration::from_micros(self.deadline.load(SeqCst));
                let latest = if leaving.is_some() { self.now() + GOODBYE / 10 } else { Duration::MAX };
                notified = self.sleep(&watch, true, deadline.min(latest));
            }
        }
    }

    /// The thread sleeps until its bell rings, the time has come, or, if it attends, the socket has something. True if
    /// `watch` has.
    fn sleep(&self, watch: &RestoreWatch, attends: bool, until: Duration) -> bool {
        if !attends {
            let events = watch.events().map(|events| (EVENTS, PollFd::from_borrowed_fd(events, PollFlags::IN)));
            return await_bell(&self.bell, events, until.saturating_sub(self.now())) != 0;
        }
        let mut notified = false;
        self.sleeps_until.store(until.as_micros().clamp(1, u128::from(u64::MAX)) as u64, SeqCst);
        // Whoever posted or set an earlier deadline before that has not rung the bell.
        let earlier = Duration::from_micros(self.deadline.load(SeqCst)) < until;
        if !earlier && !self.has_work() {
            notified = self.await_socket(&self.bell, watch.events(), until.saturating_sub(self.now()));
        }
        self.sleeps_until.store(0, SeqCst);
        notified
    }

    /// True if `events` are readable.
    fn await_socket(&self, bell: &OwnedFd, events: Option<BorrowedFd<'_>>, left: Duration) -> bool {
        let full = if self.held_up.load(SeqCst) { PollFlags::OUT } else { PollFlags::empty() };
        let sockets = lock(&self.sockets).clone();
        // Only the one that was full: others may have room all the time.
        let full_one = self.full_descriptor.load(Relaxed);
        let sockets = sockets.iter().map(|(index, socket)| {
            let room = if *index == full_one { full } else { PollFlags::empty() };
            (*index, PollFd::new(socket, PollFlags::IN | room))
        });
        let events = events.map(|events| (EVENTS, PollFd::from_borrowed_fd(events, PollFlags::IN)));
        let readable = await_bell(bell, sockets.chain(events), left);
        let notified = readable & 1 << EVENTS;
        if readable != notified {
            self.readable.fetch_or(readable & !notified, Relaxed);
        }
        notified != 0
    }

    /// Tells the link what a sleeper has found.
    fn note_readable(&self, board: &mut Switchboard) {
        if self.readable.load(Relaxed) == 0 {
            return;
        }
        let readable = self.readable.swap(0, Relaxed);
        let each = (0..usize::BITS as usize).filter(|index| readable & 1 << index != 0);
        each.for_each(|index| board.engine().link().note_ready(index));
    }

    fn hand_over(&self, asleep: bool) {
        if !asleep {
            self.away.fetch_sub(1, SeqCst);
        } else if self.away.fetch_add(1, SeqCst) == 0 && self.driver == Driver::Caller {
            ring(&self.bell);
        }
    }
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port").field("local", &self.local).field("driver", &self.driver).finish_non_exhaustive()
    }
}

/// Carries one line.
#[derive(Debug)]
struct Carriage {
    port: Arc<Port>,
    key: Key,
}

impl Carrier for Carriage {
    fn post(&self, line: &Line, work: Work) {
        let port = &self.port;
        match port.driver {
            Driver::Thread => {
                port.keep(line, self.key, work);
                port.rouse();
            }
            Driver::Caller => port.post_by_caller(line, self.key, work),
        }
    }

    fn attend(&self, receiving: bool) -> Option<Done> {
        if self.port.driver != Driver::Caller {
            return None;
        }
        self.port.note_turn();
        self.port.look(receiving.then_some(self.key))
    }

    fn number(&self) -> u64 {
        self.port.number
    }

    fn hand_over(&self, asleep: bool) {
        self.port.hand_over(asleep);
    }

    fn rest(&self, timeout: Duration, look: &mut dyn FnMut() -> bool) -> bool {
        let port = &self.port;
        if port.driver != Driver::Caller || port.resting.swap(true, SeqCst) {
            return false;
        }
        if !look() {
            let now = port.now();
            let latest = now.saturating_add(timeout).as_micros().min(u128::from(u64::MAX)) as u64;
            let until = latest.min(port.deadline.load(SeqCst));
            port.rests_until.store(until, SeqCst);
            // Whoever posted or set an earlier deadline before that has not rung the bell.
            if port.deadline.load(SeqCst) >= until && !port.has_work() {
                port.await_socket(&port.rest_bell, None, Duration::from_micros(until).saturating_sub(now));
            }
            port.rests_until.store(0, SeqCst);
        }
        port.resting.store(false, SeqCst);
        if port.relies.swap(false, SeqCst) {
            ring(&port.bell);
        }
        true
    }

    fn wake(&self) {
        if self.port.resting.load(SeqCst) {
            ring(&self.port.rest_bell);
        }
    }

    fn revoke(&self, payload_token: u64) -> Option<Place> {
        let mut board = self.port.board();
        let place = board.revoke(self.key, payload_token);
        self.port.finish(board);
        place
    }

    fn landings(&self, all: bool) -> Landings {
        self.port.board().landings((!all).then_some(self.key))
    }

    fn grant(&self, memory: Granted) -> Result<(), usize> {
        self.port.board().grant(self.key, memory)
    }

    fn withdraw(&self, handle: u32) -> bool {
        let mut board = self.port.board();
        let withdrawn = board.withdraw(self.key, handle);
        board.send(self.port.now());
        self.port.finish(board);
        withdrawn
    }

    fn request_fast(&self) {
        let mut board = self.port.board();
        board.request_fast(self.key, self.port.now());
        self.port.finish(board);
    }

    fn close(&self, outstanding: usize) {
        self.port.close(self.key, outstanding);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ring(bell: &OwnedFd) {
    // A counter that is full is readable already.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

fn hush(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0u8; 8]);
}

/// Waits for a bell, and for other descriptors; which of those are readable, a bit for each number. A bell that
/// has rung is hushed; one that rings later wakes whoever waits next, who finds nothing new at worst.
fn await_bell<'a>(bell: &'a OwnedFd, others: impl IntoIterator<Item = (usize, PollFd<'a>)>, left: Duration) -> usize {
    let left = Timespec::try_from(left.min(Duration::from_secs(1 << 30))).ok();
    let (mut descriptors, mut numbers) = (vec![PollFd::new(bell, PollFlags::IN)], Vec::new());
    for (number, descriptor) in others {
        descriptors.push(descriptor);
        numbers.push(number);
    }
    // A signal is as good as an event: everything is looked at again.
    if rustix::event::poll(&mut descriptors, left.as_ref()).is_err() {
        return 0;
    }
    // An error is news as well: it stays until it is received.
    let readable = |descriptor: &PollFd<'_>| descriptor.revents().intersects(PollFlags::IN | PollFlags::ERR);
    if readable(&descriptors[0]) {
        hush(bell);
    }
    let others = numbers.iter().zip(&descriptors[1..]);
    others.fold(0, |bits, (number, descriptor)| bits | usize::from(readable(descriptor)) << number)
}

/// The number of what a [`RestoreWatch`] listens to, beyond those of a link's sockets.
const EVENTS: usize = usize::BITS as usize - 1;
/// How long the thread leaves a board alone that a caller has turned.
const NAP: Duration = Duration::from_millis(10);
/// How long timers wait, at most, while the link is full.
const FULL: Duration = Duration::from_millis(1);
/// How long sessions are given to end in good order.
const GOODBYE: Duration = Duration::from_secs(1);
/// So many posts go together, at most.
const GATHERED_MAX: u32 = 32;
/// How often a caller takes in what has come before it is asked again, at most.
const LOOKS_MAX: usize = 16;
