//! Who handles messages that come.
//!
//! ```text
//!  single    message ─────────────────────────▶ thread that reads
//!  handler   message ──▶ one thread for all ──▶ thread that reads
//!  notify    message ──▶ one for the stream ──▶ thread that reads
//! ```

use crate::config::Strategy;
use crate::connection::Connection;
use highwire_vi::{Nic, Notify, ViId, ViOptions};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The threads of a [`crate::Sockets`].
#[derive(Debug, Default)]
pub(crate) struct Threads {
    handler: Mutex<Option<Handler>>,
}

/// A thread that wakes readers, and whom.
#[derive(Clone, Debug)]
pub(crate) struct Handler {
    /// For one stream.
    alone: bool,
    streams: Arc<Mutex<HashMap<ViId, Weak<Connection>>>>,
    notify: Arc<Notify>,
}

/// How a stream's messages are handled.
#[derive(Clone, Debug)]
pub(crate) struct Handling(Option<Handler>);

impl Threads {
    pub(crate) fn handling(&self, nic: &Nic, strategy: Strategy) -> io::Result<Handling> {
        Ok(Handling(match strategy {
            Strategy::Single => None,
            Strategy::Notify => Some(Handler::spawn(nic, true)?),
            Strategy::Handler => {
                let mut handler = self.handler.lock().unwrap_or_else(PoisonError::into_inner);
                let known = match &*handler {
                    Some(known) => known.clone(),
                    None => handler.insert(Handler::spawn(nic, false)?).clone(),
                };
                Some(known)
            }
        }))
    }
}

impl Handling {
    /// What a VI that is handled so is made with.
    pub(crate) fn options(&self) -> ViOptions<'_> {
        match &self.0 {
            None => ViOptions::new().own_bell(),
            Some(handler) if handler.alone => ViOptions::new().notify(&handler.notify).own_bell(),
            Some(handler) => ViOptions::new().notify(&handler.notify),
        }
    }

    /// True if a thread wakes the reader.
    pub(crate) fn has_thread(&self) -> bool {
        self.0.is_some()
    }

    /// From now on the thread wakes this stream's readers.
    pub(crate) fn enter(&self, id: ViId, connection: &Arc<Connection>) {
        if let Some(handler) = &self.0 {
            lock(&handler.streams).insert(id, Arc::downgrade(connection));
        }
    }

    pub(crate) fn leave(&self, id: ViId) {
        if let Some(handler) = &self.0 {
            lock(&handler.streams).remove(&id);
        }
    }
}

impl Handler {
    fn spawn(nic: &Nic, alone: bool) -> io::Result<Handler> {
        let streams: Arc<Mutex<HashMap<ViId, Weak<Connection>>>> = Arc::default();
        let known = streams.clone();
        let queue = nic.completion_queue().map_err(io::Error::other)?;
        let notify = queue.notify(move |id| {
            let stream = lock(&known).get(&id).and_then(Weak::upgrade);
            match stream {
                Some(stream) => stream.notice_arrival(),
                // It is about to be entered, or to go.
                None => std::thread::yield_now(),
            }
        })?;
        Ok(Handler { alone, streams, notify: Arc::new(notify) })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
