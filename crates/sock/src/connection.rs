//! A connected stream: its two directions, and what becomes of them.
//!
//! The paper's figure 11, as far as it is this layer's. *FIN* says that there are no more bytes, *RESET* that the stream
//! was given up; both are marks, in their place among the bytes. That a FIN has arrived, which the paper acknowledges
//! with FINACK, is for virtual interfaces to see to: on one host it is where the other side reads it as soon as it is
//! sent, and stays there; between hosts the close thread waits for its completion (`closing`).
//!
//! ```text
//!             connect, accept
//!                   │
//!                   ▼          shutdown(Write), close: FIN ▶
//!                NORMAL ──────────────────────────────────────▶ FIN_WAIT
//!                   │                                              │
//!                   │ ◀ FIN                                        │ ◀ FIN (also when both are sent at once)
//!                   ▼          shutdown(Write), close: FIN ▶       ▼
//!              CLOSE_WAIT ───────────────────────────────────▶  CLOSED
//!
//!  any ── ◀ RESET, the peer is gone or lies ──▶ RESET: one error, then end of file and broken pipe
//!  any ── close with unread bytes or with a linger of zero: RESET ▶
//!  any ── close: nobody reads any more, so writes of the other side fail (BrokenPipe)
//! ```

use crate::closing;
use crate::config::SockConfig;
use crate::error;
use crate::handling::Handling;
use highwire_mem::{OwnerGuard, OwnerLock, Process};
use highwire_vi::{Failure, PostError, StreamReceiver, StreamSender, StreamWatch, Taken, Vi, WaitError};
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Bytes go both ways.
    Normal,
    /// This side has ended its direction.
    FinWait,
    /// The other side has.
    CloseWait,
    /// Both have.
    Closed,
    /// It was given up by the other side, which may be gone.
    Reset,
}

#[derive(Debug)]
pub(crate) struct Connection {
    /// In a forked child nobody knows who was at it when it was made.
    process: Process,
    outgoing: OwnerLock<Outgoing>,
    incoming: OwnerLock<Incoming>,
    watch: StreamWatch,
    config: SockConfig,
    handling: Handling,
    /// With a thread that handles messages: how often it has seen some, or others were to look.
    arrivals: Mutex<u64>,
    arrived: Condvar,
    shut_reading: AtomicBool,
    /// A reset was seen: nobody reads any more.
    reset: AtomicBool,
    /// The error of a reset was told.
    reset_told: AtomicBool,
    nonblocking: AtomicBool,
    /// In nanoseconds; 0 is none.
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
    linger: Mutex<Option<Duration>>,
    nodelay: AtomicBool,
}

#[derive(Debug)]
struct Outgoing {
    /// Until the close thread has it.
    sender: Option<StreamSender>,
    fin_sent: bool,
    /// What the descriptor shows, if anything; and whether something was written since.
    shown: Option<bool>,
    written: bool,
}

#[derive(Debug)]
struct Incoming {
    /// Until it is closed.
    receiver: Option<StreamReceiver>,
    /// Bytes that were looked at and not taken.
    peeked: VecDeque<u8>,
    end: Option<End>,
    /// What the descriptor shows, if anything; and whether something was taken since.
    shown: Option<bool>,
    taken: bool,
}

/// Why nothing comes any more.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Fin,
    Reset(Option<Failure>),
}

/// Marks among the bytes.
const FIN: u32 = 1;
const RESET: u32 = 2;

/// Looks one upon the other before the rules of waiting begin: most answers come within them.
const GLANCES: u32 = 128;

impl Connection {
    pub(crate) fn new(vi: Vi, config: SockConfig, handling: &Handling) -> Arc<Connection> {
        let (sender, receiver, watch) = vi.into_stream(&config.rules());
        let id = watch.id();
        let connection = Arc::new(Connection {
            process: Process::current(),
            outgoing: OwnerLock::new(Outgoing { sender: Some(sender), fin_sent: false, shown: None, written: false }),
            incoming: OwnerLock::new(Incoming {
                receiver: Some(receiver),
                peeked: VecDeque::new(),
                end: None,
                shown: None,
                taken: false,
            }),
            watch,
            config,
            handling: handling.clone(),
            arrivals: Mutex::new(0),
            arrived: Condvar::new(),
            shut_reading: AtomicBool::new(false),
            reset: AtomicBool::new(false),
            reset_told: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
            linger: Mutex::default(),
            nodelay: AtomicBool::new(false),
        });
        handling.enter(id, &connection);
        connection
    }

    pub(crate) fn watch(&self) -> &StreamWatch {
        &self.watch
    }

    #[inline(always)]
    fn outgoing(&self) -> OwnerGuard<'_, Outgoing> {
        self.outgoing.lock()
    }

    #[inline(always)]
    fn incoming(&self) -> OwnerGuard<'_, Incoming> {
        self.incoming.lock()
    }

    // ── Reading ──────────────────────────────────────────────────────────────────────────────────

    /// Reads what there is, or waits for it.
    #[inline]
    pub(crate) fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        self.when_readable(|incoming| incoming.take(into))
    }

    /// Reads what is there already, if anything is; the end, if it is there, is for the next call.
    pub(crate) fn read_at_hand(&self, into: &mut [u8]) -> usize {
        let mut incoming = self.incoming();
        match incoming.take(into) {
            Found::Bytes(count) => {
                incoming.taken = true;
                self.show_readable(&mut incoming);
                count
            }
            Found::End(_) | Found::Nothing | Found::Forked => 0,
        }
    }

    /// The same as [`Connection::read`], and leaves it there.
    pub(crate) fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        self.when_readable(|incoming| incoming.peek(into))
    }

    #[inline(always)]
    fn check_process(&self) -> io::Result<()> {
        if self.process.is_this() { Ok(()) } else { Err(error::forked()) }
    }

    #[inline(always)]
    fn when_readable(&self, mut take: impl FnMut(&mut Incoming) -> Found) -> io::Result<usize> {
        self.check_process()?;
        let mut incoming = self.incoming();
        let found = take(&mut incoming);
        if found != Found::Nothing {
            return self.finish_reading(&mut incoming, found);
        }
        let nonblocking = self.nonblocking.load(Relaxed);
        if !nonblocking && !self.handling.has_thread() && self.watch.worth_a_glance() {
            for _ in 0..GLANCES {
                let found = take(&mut incoming);
                if found != Found::Nothing {
                    return self.finish_reading(&mut incoming, found);
                }
            }
        }
        if self.shut_reading.load(SeqCst) {
            return self.finish_reading(&mut incoming, Found::End(End::Fin));
        }
        if nonblocking {
            // Whoever rang late, or for nothing, has made the descriptor readable.
            incoming.taken = true;
            self.show_readable(&mut incoming);
            // Something may have come while that was shown.
            return match take(&mut incoming) {
                Found::Nothing => Err(ErrorKind::WouldBlock.into()),
                found => self.finish_reading(&mut incoming, found),
            };
        }
        drop(incoming);
        self.wait_readable(take)
    }

    #[inline(never)]
    fn wait_readable(&self, mut take: impl FnMut(&mut Incoming) -> Found) -> io::Result<usize> {
        let timeout = duration(&self.read_timeout);
        let look = || {
            let mut incoming = self.incoming();
            let found = match take(&mut incoming) {
                Found::Nothing if self.shut_reading.load(SeqCst) => Found::End(End::Fin),
                Found::Nothing => return None,
                found => found,
            };
            Some(self.finish_reading(&mut incoming, found))
        };
        if self.handling.has_thread() { self.wait_for_thread(timeout, look) } else { self.wait_for(timeout, look) }
    }

    /// Something was found; what it is to the caller.
    #[inline(always)]
    fn finish_reading(&self, incoming: &mut Incoming, found: Found) -> io::Result<usize> {
        if self.watch.is_descriptor_used() {
            incoming.taken = true;
            self.show_readable(incoming);
        }
        match found {
            Found::Bytes(count) => Ok(count),
            Found::End(end) => self.finish_at_end(end),
            Found::Nothing => Ok(0),
            Found::Forked => Err(error::forked()),
        }
    }

    #[cold]
    fn finish_at_end(&self, end: End) -> io::Result<usize> {
        self.note_end(end);
        // Other readers would not be told: it was taken.
        self.wake();
        match end {
            End::Fin => Ok(0),
            End::Reset(failure) => self.reset_error(failure).map_or(Ok(0), Err),
        }
    }

    fn note_end(&self, end: End) {
        if end != End::Fin {
            self.reset.store(true, SeqCst);
        }
    }

    /// The error of a reset, which is told once.
    fn reset_error(&self, failure: Option<Failure>) -> Option<io::Error> {
        (!self.reset_told.swap(true, SeqCst)).then(|| error::reset(failure))
    }

    /// Has the descriptor show whether there is something to read.
    fn show_readable(&self, incoming: &mut Incoming) {
        if !self.watch.is_descriptor_used() {
            return;
        }
        let shut = self.shut_reading.load(SeqCst);
        for _ in 0..2 {
            let readable = shut || incoming.has_more();
            if incoming.shown == Some(readable) && (readable || !incoming.taken) {
                return;
            }
            incoming.shown = Some(readable);
            incoming.taken = false;
            self.watch.show_readable(readable);
            if readable {
                return;
            }
            // The thread that handles messages is to tell of the next.
            self.watch.mute(false);
        }
    }

    // ── Writing ──────────────────────────────────────────────────────────────────────────────────

    /// Writes as much as there is room for; all of it, waiting for room, unless that is not wanted.
    #[inline]
    pub(crate) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.check_process()?;
        let mut outgoing = self.outgoing();
        match self.write_some(&mut outgoing, bytes) {
            Some(Ok(count)) if count == bytes.len() => Ok(count),
            Some(Err(error)) => Err(error),
            partly => {
                drop(outgoing);
                let written = partly.and_then(Result::ok).unwrap_or(0);
                self.write_rest(bytes, written)
            }
        }
    }

    #[inline(never)]
    fn write_rest(&self, bytes: &[u8], mut written: usize) -> io::Result<usize> {
        if self.nonblocking.load(Relaxed) {
            // What is left finds room in the next message, if the first one was full.
            while written > 0 && written < bytes.len() {
                match self.write_some(&mut self.outgoing(), &bytes[written..]) {
                    Some(Ok(count)) => written += count,
                    _ => break,
                }
            }
            return if written > 0 { Ok(written) } else { Err(ErrorKind::WouldBlock.into()) };
        }
        let timeout = duration(&self.write_timeout);
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        while written < bytes.len() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            match self.wait_for(left, || self.write_some(&mut self.outgoing(), &bytes[written..])) {
                Ok(count) => written += count,
                // What was written was written.
                Err(_) if written > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(written)
    }

    /// `None` if there is no room.
    #[inline(always)]
    fn write_some(&self, outgoing: &mut Outgoing, bytes: &[u8]) -> Option<io::Result<usize>> {
        let open = !outgoing.fin_sent && !self.reset.load(Relaxed);
        let Some(sender) = outgoing.sender.as_mut().filter(|_| open) else {
            return Some(Err(self.write_error(outgoing, None)));
        };
        if bytes.is_empty() {
            return Some(Ok(0));
        }
        let written = match sender.write(bytes) {
            Ok(count) => Some(Ok(count)),
            Err(PostError::NoRoom { .. }) => None,
            Err(PostError::ForkedChild) => return Some(Err(error::forked())),
            Err(error) => Some(Err(self.write_error(outgoing, Some(error)))),
        };
        if self.watch.is_descriptor_used() {
            outgoing.written = true;
            return self.show_room(outgoing, written, bytes);
        }
        written
    }

    /// Has the descriptor show whether there is room, and tries once more if there is and was none.
    fn show_room(
        &self,
        outgoing: &mut Outgoing,
        written: Option<io::Result<usize>>,
        bytes: &[u8],
    ) -> Option<io::Result<usize>> {
        self.show_writable(outgoing);
        match (written, outgoing.shown, outgoing.sender.as_mut()) {
            (None, Some(true), Some(sender)) => match sender.write(bytes) {
                Ok(count) => Some(Ok(count)),
                Err(PostError::NoRoom { .. }) => None,
                Err(error) => Some(Err(self.write_error(outgoing, Some(error)))),
            },
            (written, ..) => written,
        }
    }

    fn show_writable(&self, outgoing: &mut Outgoing) {
        if !self.watch.is_descriptor_used() {
            return;
        }
        for _ in 0..2 {
            // Whoever may not write learns that at once.
            let over = outgoing.fin_sent || self.reset.load(SeqCst);
            let writable = over || outgoing.sender.as_mut().is_none_or(StreamSender::has_room);
            if let Some(sender) = outgoing.sender.as_mut().filter(|_| !writable && self.handling.has_thread()) {
                sender.await_room();
            }
            let written = std::mem::take(&mut outgoing.written);
            if outgoing.shown.replace(writable) != Some(writable) || !writable && written {
                self.watch.show_writable(writable);
            }
            if writable {
                return;
            }
            // Some may have come while that was shown.
        }
    }

    /// Why nothing can be written: a reset, which is told once as such, or that the stream is closed.
    #[cold]
    fn write_error(&self, outgoing: &Outgoing, refused: Option<PostError>) -> io::Error {
        if let Some(error) = self.take_error() {
            return error;
        }
        match (self.look_to_the_end(), refused) {
            (Some(End::Reset(failure @ Some(_))), _) => error::broken_pipe(failure),
            _ if outgoing.fin_sent => error::shut_down(),
            // Behind more unread bytes than are looked at, the end is not seen.
            (_, Some(PostError::NotConnected(failure))) if !is_close(failure) => error::broken_pipe(Some(failure)),
            _ => error::broken_pipe(None),
        }
    }

    // ── Waiting ──────────────────────────────────────────────────────────────────────────────────

    /// Waits until `look` finds something; [`ErrorKind::WouldBlock`] if that takes too long, as it is with sockets.
    fn wait_for<T>(&self, timeout: Option<Duration>, mut look: impl FnMut() -> Option<io::Result<T>>) -> io::Result<T> {
        loop {
            match self.watch.wait_for(timeout.unwrap_or(A_DAY), &mut look) {
                Ok(found) => return found,
                Err(WaitError::TimedOut(_)) if timeout.is_none() => {}
                Err(WaitError::TimedOut(_)) => return Err(ErrorKind::WouldBlock.into()),
                Err(WaitError::ForkedChild) => return Err(error::forked()),
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }

    /// The same where a thread handles messages and wakes whoever waits.
    fn wait_for_thread<T>(
        &self,
        timeout: Option<Duration>,
        mut look: impl FnMut() -> Option<io::Result<T>>,
    ) -> io::Result<T> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let seen = *lock(&self.arrivals);
            // From here on the thread tells of what comes; what came before is seen now.
            self.watch.mute(false);
            if let Some(found) = look() {
                return found;
            }
            let left = deadline.map_or(A_DAY, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(ErrorKind::WouldBlock.into());
            }
            let arrivals = lock(&self.arrivals);
            let _ = self.arrived.wait_timeout_while(arrivals, left, |arrivals| *arrivals == seen);
        }
    }

    /// The thread that handles messages has one.
    pub(crate) fn notice_arrival(&self) {
        // What was gathered goes when what was sent before has arrived.
        let mut outgoing = self.outgoing();
        if let Some(sender) = &mut outgoing.sender {
            let _ = sender.ended();
        }
        self.show_writable(&mut outgoing);
        drop(outgoing);
        // It is not told again before somebody has looked.
        if self.watch.mute(true) {
            return;
        }
        self.count_arrival();
        if self.watch.is_descriptor_used() {
            let mut incoming = self.incoming();
            incoming.taken = true;
            self.show_readable(&mut incoming);
        }
    }

    fn count_arrival(&self) {
        *lock(&self.arrivals) += 1;
        self.arrived.notify_all();
    }

    fn wake(&self) {
        self.count_arrival();
        self.watch.wake();
    }

    // ── Ending ───────────────────────────────────────────────────────────────────────────────────

    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.check_process()?;
        if matches!(self.state(), State::Closed | State::Reset) {
            return Err(io::Error::new(ErrorKind::NotConnected, "the stream is closed in both directions already"));
        }
        if how != Shutdown::Read {
            self.send_fin()?;
        }
        if how != Shutdown::Write {
            self.shut_reading.store(true, SeqCst);
            self.show_readable(&mut self.incoming());
        }
        self.wake();
        Ok(())
    }

    fn send_fin(&self) -> io::Result<()> {
        let mut outgoing = self.outgoing();
        if outgoing.fin_sent {
            return Ok(());
        }
        outgoing.fin_sent = true;
        let sent = outgoing.sender.as_mut().map_or(Ok(()), |sender| sender.mark(FIN));
        self.show_writable(&mut outgoing);
        drop(outgoing);
        match sent {
            Err(PostError::ForkedChild) => Err(error::forked()),
            // If the other side is gone there is nobody to tell.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// The last handle is gone. Whoever handles messages may still know it for a moment.
    pub(crate) fn close(&self) {
        if !self.process.is_this() {
            return;
        }
        self.watch.mute(true);
        self.handling.leave(self.watch.id());
        let linger = self.linger();
        let mut incoming = self.incoming();
        let reset = linger == Some(Duration::ZERO) || incoming.has_unread();
        let receiver = incoming.receiver.take();
        drop(incoming);
        let mut outgoing = self.outgoing();
        let fin_sent = outgoing.fin_sent;
        let sender = outgoing.sender.take();
        drop(outgoing);
        let Some(mut sender) = sender else { return };
        let told = match (reset, fin_sent) {
            (true, _) => sender.mark(RESET),
            (false, false) => sender.mark(FIN),
            (false, true) => Ok(()),
        };
        // With both ends gone the other side knows that nobody reads.
        drop(receiver);
        if told.is_ok() && !sender.is_delivered() {
            closing::deliver(sender, linger);
        }
    }

    /// How it stands, after a look.
    pub(crate) fn state(&self) -> State {
        if !self.process.is_this() {
            return State::Reset;
        }
        match (self.look_to_the_end(), self.outgoing().fin_sent) {
            (Some(End::Reset(_)), _) => State::Reset,
            (Some(End::Fin), true) => State::Closed,
            (Some(End::Fin), false) => State::CloseWait,
            (None, true) => State::FinWait,
            (None, false) => State::Normal,
        }
    }

    /// A reset that nobody was told of yet.
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        if let Err(forked) = self.check_process() {
            return Some(forked);
        }
        match self.look_to_the_end() {
            Some(End::Reset(failure)) => self.reset_error(failure),
            _ => None,
        }
    }

    /// How what comes ends, if that is known.
    fn look_to_the_end(&self) -> Option<End> {
        let mut incoming = self.incoming();
        let (end, found) = incoming.look_to_the_end();
        if let Some(end) = end {
            self.note_end(end);
        }
        if found {
            self.show_readable(&mut incoming);
            drop(incoming);
            // Whoever waits for it would not be told: it was taken.
            self.wake();
        }
        end
    }

    // ── Choices ──────────────────────────────────────────────────────────────────────────────────

    pub(crate) fn set_nonblocking(&self, nonblocking: bool) {
        self.nonblocking.store(nonblocking, SeqCst);
    }

    pub(crate) fn set_nodelay(&self, nodelay: bool) {
        self.nodelay.store(nodelay, SeqCst);
        if self.process.is_this()
            && let Some(sender) = &mut self.outgoing().sender
        {
            sender.set_combining(self.config.combining(nodelay));
        }
    }

    pub(crate) fn nodelay(&self) -> bool {
        self.nodelay.load(SeqCst)
    }

    pub(crate) fn set_linger(&self, linger: Option<Duration>) {
        *lock(&self.linger) = linger;
    }

    pub(crate) fn linger(&self) -> Option<Duration> {
        *lock(&self.linger)
    }

    pub(crate) fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_duration(&self.read_timeout, timeout)
    }

    pub(crate) fn read_timeout(&self) -> Option<Duration> {
        duration(&self.read_timeout)
    }

    pub(crate) fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        set_duration(&self.write_timeout, timeout)
    }

    pub(crate) fn write_timeout(&self) -> Option<Duration> {
        duration(&self.write_timeout)
    }

    /// The descriptor, which from now on shows what can be done.
    pub(crate) fn descriptor(&self) -> io::Result<BorrowedFd<'_>> {
        self.check_process()?;
        let first = !self.watch.is_descriptor_used();
        let descriptor = self.watch.descriptor()?;
        if first {
            self.show_readable(&mut self.incoming());
            self.show_writable(&mut self.outgoing());
        }
        Ok(descriptor)
    }
}

impl Incoming {
    /// Takes what there is.
    #[inline(always)]
    fn take(&mut self, into: &mut [u8]) -> Found {
        if !self.peeked.is_empty() {
            return self.take_peeked(into);
        }
        if let Some(end) = self.end {
            return Found::End(end);
        }
        let taken = self.look(into);
        self.note(taken)
    }

    #[inline(always)]
    fn look(&mut self, into: &mut [u8]) -> Taken {
        match &mut self.receiver {
            Some(receiver) => receiver.read(into),
            None => Taken::Ended(Failure::Closed),
        }
    }

    #[inline(always)]
    fn note(&mut self, taken: Taken) -> Found {
        let end = match taken {
            Taken::Bytes(count) => return Found::Bytes(count),
            Taken::Nothing => return Found::Nothing,
            Taken::Ended(Failure::ForkedChild) => return Found::Forked,
            Taken::Mark(FIN) => End::Fin,
            Taken::Mark(_) => End::Reset(None),
            Taken::Ended(failure) => End::Reset(Some(failure)),
        };
        self.end = Some(end);
        Found::End(end)
    }

    /// What was looked at, and what has come since.
    #[cold]
    fn take_peeked(&mut self, into: &mut [u8]) -> Found {
        let count = self.copy_peeked(into);
        self.peeked.drain(..count);
        if count < into.len() && self.end.is_none() {
            let taken = self.look(&mut into[count..]);
            if let Found::Bytes(more) = self.note(taken) {
                return Found::Bytes(count + more);
            }
        }
        Found::Bytes(count)
    }

    fn copy_peeked(&self, into: &mut [u8]) -> usize {
        let (first, second) = self.peeked.as_slices();
        let count = self.peeked.len().min(into.len());
        let split = first.len().min(count);
        into[..split].copy_from_slice(&first[..split]);
        into[split..count].copy_from_slice(&second[..count - split]);
        count
    }

    /// Copies what there is, and keeps it.
    fn peek(&mut self, into: &mut [u8]) -> Found {
        while self.peeked.len() < into.len() && self.end.is_none() {
            let taken = self.look(into);
            match self.note(taken) {
                Found::Bytes(count) => self.peeked.extend(&into[..count]),
                Found::Forked => return Found::Forked,
                Found::End(_) | Found::Nothing => break,
            }
        }
        match (self.copy_peeked(into), self.end) {
            (0, Some(end)) => Found::End(end),
            (0, None) => Found::Nothing,
            (count, _) => Found::Bytes(count),
        }
    }

    /// Looks at everything that has come, and keeps it: how it ends, if it does, and whether something was found.
    fn look_to_the_end(&mut self) -> (Option<End>, bool) {
        let (mut bytes, mut found) = ([0; 4096], false);
        while self.end.is_none() && self.peeked.len() < PEEKED_BYTES_MAX {
            let taken = self.look(&mut bytes);
            match self.note(taken) {
                Found::Bytes(count) => self.peeked.extend(&bytes[..count]),
                Found::Nothing | Found::Forked => break,
                Found::End(_) => {}
            }
            found = true;
        }
        (self.end, found)
    }

    fn has_more(&mut self) -> bool {
        !self.peeked.is_empty() || self.end.is_some() || self.receiver.as_mut().is_none_or(StreamReceiver::has_more)
    }

    /// True if there are bytes that nobody has read.
    fn has_unread(&mut self) -> bool {
        !self.peeked.is_empty() || self.end.is_none() && matches!(self.look(&mut [0]), Taken::Bytes(_))
    }
}

/// Whether the other side closed the stream, and nothing else happened.
fn is_close(failure: Failure) -> bool {
    matches!(failure, Failure::PeerClosed | Failure::PeerAborted | Failure::Closed)
}

/// What a look at what has come found.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Found {
    Bytes(usize),
    End(End),
    Nothing,
    Forked,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn duration(nanoseconds: &AtomicU64) -> Option<Duration> {
    Some(nanoseconds.load(Relaxed)).filter(|nanoseconds| *nanoseconds > 0).map(Duration::from_nanos)
}

fn set_duration(nanoseconds: &AtomicU64, timeout: Option<Duration>) -> io::Result<()> {
    if timeout == Some(Duration::ZERO) {
        let text = "a time-out of zero would be none at all; use set_nonblocking";
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    let value = timeout.map_or(0, |timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
    nanoseconds.store(value, SeqCst);
    Ok(())
}

/// Whoever looks for the end takes no more than this off the other side's hands.
const PEEKED_BYTES_MAX: usize = 1 << 20;
const A_DAY: Duration = Duration::from_secs(24 * 3600);
