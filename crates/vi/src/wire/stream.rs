//! A VI to another host, used as two streams of bytes.
//!
//! What is written while messages are on their way is gathered here, and goes when they have arrived: whoever learns of
//! that sends it, be it the adapter's thread. See `host::send::stream` for the way on one host, where nothing has to wait.

use super::{WireReceiver, WireSender};
use crate::descriptor::{InPlace, Payload};
use crate::error::{Failure, PostError};
use crate::halves::SendStats;
use crate::stream::{Combining, StreamRules, Taken};
use highwire_mem::work::{Dispatch, Parcel, Place, Side, Work};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// With so many messages on their way it is idle.
const IDLE_MESSAGES: usize = 1;

#[derive(Debug)]
pub(crate) struct WireStreamSender {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    outbox: Mutex<Outbox>,
    /// Something may have arrived that whoever had the outbox has not seen.
    missed: AtomicBool,
}

#[derive(Debug)]
struct Outbox {
    tx: WireSender,
    rules: StreamRules,
    gathered: Vec<u8>,
    /// The adapter is asked to ring when something has arrived.
    waits: bool,
    failed: Option<Failure>,
}

impl WireStreamSender {
    pub(crate) fn new(tx: WireSender, rules: &StreamRules) -> WireStreamSender {
        let outbox = Outbox { tx, rules: *rules, gathered: Vec::new(), waits: false, failed: None };
        WireStreamSender { shared: Arc::new(Shared { outbox: Mutex::new(outbox), missed: AtomicBool::new(false) }) }
    }

    /// What whoever rings is to call.
    pub(crate) fn flusher(&self) -> impl Fn() + Send + Sync + 'static {
        let shared = Arc::downgrade(&self.shared);
        move || {
            if let Some(shared) = shared.upgrade() {
                shared.missed.store(true, SeqCst);
                shared.catch_up();
            }
        }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<usize, PostError> {
        let written = self.shared.with(|outbox| outbox.write(bytes));
        match written {
            Err(PostError::NoRoom { .. }) => {
                // Where the caller carries, word of what has arrived may lie at the door.
                self.attend();
                self.shared.with(|outbox| outbox.write(bytes))
            }
            written => written,
        }
    }

    fn attend(&self) {
        let member = self.shared.lock().tx.member.clone();
        member.attend();
    }

    pub(crate) fn mark(&mut self, mark: u32) -> Result<(), PostError> {
        self.shared.with(|outbox| outbox.mark(mark))
    }

    pub(crate) fn has_room(&mut self) -> bool {
        self.attend();
        self.shared.with(|outbox| {
            outbox.reap();
            outbox.room() > 0 || outbox.ended().is_some()
        })
    }

    pub(crate) fn is_delivered(&mut self) -> bool {
        self.attend();
        self.shared.with(|outbox| {
            outbox.reap();
            outbox.gathered.is_empty() && outbox.outstanding() == 0
        })
    }

    pub(crate) fn ended(&mut self) -> Option<Failure> {
        self.shared.with(|outbox| {
            outbox.reap();
            outbox.ended()
        })
    }

    pub(crate) fn set_combining(&mut self, combining: Combining) {
        self.shared.with(|outbox| {
            outbox.rules.combining = combining;
            outbox.flush();
        });
    }

    pub(crate) fn stats(&self) -> SendStats {
        self.shared.lock().tx.stats()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, act: impl FnOnce(&mut Outbox) -> T) -> T {
        let result = act(&mut self.lock());
        // Who rang meanwhile found the outbox taken.
        self.catch_up();
        result
    }

    fn catch_up(&self) {
        while self.missed.load(SeqCst) {
            let mut outbox = match self.outbox.try_lock() {
                Ok(outbox) => outbox,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // It sees it when it is done.
                Err(TryLockError::WouldBlock) => return,
            };
            if self.missed.swap(false, SeqCst) {
                outbox.reap();
            }
        }
    }
}

impl Outbox {
    fn outstanding(&self) -> usize {
        self.tx.member.outstanding.load(SeqCst)
    }

    fn ended(&self) -> Option<Failure> {
        self.failed.or_else(|| self.tx.member.end())
    }

    /// Takes note of what has arrived, and sends what waited for that.
    fn reap(&mut self) {
        while let Some(done) = self.tx.take() {
            if let Err(failure) = done.status {
                self.failed.get_or_insert(failure);
            }
        }
        self.flush();
    }

    fn write(&mut self, bytes: &[u8]) -> Result<usize, PostError> {
        self.tx.member.check_open()?;
        self.reap();
        if let Some(failure) = self.failed {
            return Err(PostError::NotConnected(failure));
        }
        if self.gathered.is_empty() && !self.is_busy() && self.outstanding() < self.window() {
            let count = bytes.len().min(self.rules.chunk_bytes);
            self.send(&bytes[..count], 0);
            return Ok(count);
        }
        let count = bytes.len().min(self.room());
        if count == 0 {
            self.set_waits(true);
            // What arrived in between was not told.
            if self.tx.member.line.has_done(Side::Sent) {
                return self.write(bytes);
            }
            return Err(PostError::NoRoom { bytes: bytes.len() });
        }
        self.gathered.extend_from_slice(&bytes[..count]);
        self.flush();
        Ok(count)
    }

    fn window(&self) -> usize {
        self.rules.window as usize
    }

    /// Bytes that can be taken now.
    fn room(&self) -> usize {
        let full = self.outstanding() >= self.window();
        match self.rules.combining {
            Combining::Never if full => 0,
            _ => self.rules.chunk_bytes - self.gathered.len().min(self.rules.chunk_bytes),
        }
    }

    fn is_busy(&self) -> bool {
        match self.rules.combining {
            Combining::WhileBusy => self.outstanding() > IDLE_MESSAGES,
            Combining::WhenFull => self.outstanding() >= self.window(),
            Combining::Never => false,
        }
    }

    /// Sends what was gathered, if it is time.
    fn flush(&mut self) {
        let full = self.gathered.len() >= self.rules.chunk_bytes;
        if !self.gathered.is_empty() && self.outstanding() < self.window() && (full || !self.is_busy()) {
            self.send_gathered();
        }
        self.set_waits(!self.gathered.is_empty());
        if !self.gathered.is_empty() && self.tx.member.line.has_done(Side::Sent) {
            self.reap();
        }
    }

    fn send_gathered(&mut self) {
        let gathered = std::mem::take(&mut self.gathered);
        self.send(&gathered, 0);
    }

    fn send(&mut self, bytes: &[u8], mark: u32) {
        self.tx.copied += bytes.len();
        let parcel = if bytes.is_empty() { Parcel::Empty } else { Parcel::Bytes(self.tx.copy(bytes)) };
        let dispatch =
            Dispatch { token: 0, control: Vec::new(), immediate: mark, payload_token: None, after: 0, parcel };
        self.tx.post(dispatch, bytes.len() as u64);
    }

    fn mark(&mut self, mark: u32) -> Result<(), PostError> {
        self.tx.member.check_open()?;
        self.reap();
        if !self.gathered.is_empty() {
            self.send_gathered();
            self.set_waits(false);
        }
        self.send(&[], mark);
        Ok(())
    }

    /// Whoever brings word of arrivals rings only for those who wait.
    fn set_waits(&mut self, waits: bool) {
        if std::mem::replace(&mut self.waits, waits) != waits {
            self.tx.member.queue.count_sleeper(waits);
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.set_waits(false);
    }
}

#[derive(Debug)]
pub(crate) struct WireStreamReceiver {
    rx: WireReceiver,
    acknowledge: usize,
    current: Option<(InPlace, usize)>,
    /// A mark behind what was read last.
    mark: Option<u32>,
    /// Receives to be posted again.
    spent: usize,
    /// What came was no part of a stream.
    broken: Option<Failure>,
}

impl WireStreamReceiver {
    pub(crate) fn new(rx: WireReceiver, rules: &StreamRules) -> WireStreamReceiver {
        let window = rules.window.max(1) as usize;
        let acknowledge = (rules.acknowledge as usize).clamp(1, window);
        // One for each message of the window, and for marks.
        let spent = window + MARKS;
        let mut stream = WireStreamReceiver { rx, acknowledge, current: None, mark: None, spent, broken: None };
        stream.post_spent();
        stream
    }

    pub(crate) fn ended(&self) -> Option<Failure> {
        self.broken.or(self.rx.ended)
    }

    pub(crate) fn has_more(&mut self) -> bool {
        let line = &self.rx.member.line;
        self.current.is_some()
            || self.mark.is_some()
            || self.broken.is_some()
            || line.has_done(Side::Received)
            || line.ended().is_some()
    }

    pub(crate) fn read(&mut self, into: &mut [u8]) -> Taken {
        let mut got = 0;
        while got < into.len() && self.mark.is_none() && self.broken.is_none() {
            if let Some((payload, taken)) = &mut self.current {
                let count = (payload.len() - *taken).min(into.len() - got);
                payload.copy_to(*taken, &mut into[got..got + count]);
                got += count;
                *taken += count;
                if *taken == payload.len() {
                    self.current = None;
                    self.spend();
                }
                continue;
            }
            // More may have come, but a look at the network is for who has nothing.
            let next = if got == 0 { self.rx.poll() } else { self.rx.take() };
            let Some(done) = next else { break };
            if let Err(failure) = done.status {
                if let Failure::TooLong { .. } = failure {
                    self.broken = Some(failure);
                }
                continue;
            }
            match (done.immediate, done.payload) {
                (0, Payload::InPlace(payload)) if !payload.is_empty() => self.current = Some((payload, 0)),
                // Bytes beside a mark are nobody's: the stream is given up.
                (mark, Payload::InPlace(payload)) if mark != 0 && !payload.is_empty() => self.mark = Some(u32::MAX),
                (mark, _) => {
                    self.mark = Some(mark).filter(|mark| *mark != 0);
                    self.spend();
                }
            }
        }
        if got > 0 {
            return Taken::Bytes(got);
        }
        if let Some(mark) = self.mark.take() {
            return Taken::Mark(mark);
        }
        self.post_spent();
        self.ended().map_or(Taken::Nothing, Taken::Ended)
    }

    /// A message was read: its place can take another.
    fn spend(&mut self) {
        self.spent += 1;
        if self.spent >= self.acknowledge {
            self.post_spent();
        }
    }

    fn post_spent(&mut self) {
        while self.spent > 0 {
            if self.rx.member.check_open().is_err() {
                // Nothing will come.
                return;
            }
            let place = Place { token: 0, parcel: Parcel::Bytes(Vec::new()), limit: MESSAGE_BYTES_MAX };
            self.rx.post(Work::Receive(place));
            self.spent -= 1;
        }
    }
}

/// No part of a stream is longer.
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// Receives for marks.
const MARKS: usize = 2;
