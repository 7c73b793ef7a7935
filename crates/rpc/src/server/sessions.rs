//! The sessions of a server: with a connection, or kept for a while after it was lost.

use super::ServerOptions;
use super::connection::{Connection, Link};
use super::handler::Reply;
use crate::head::{HEAD_BYTES, Head, Leaving, RPC_VERSION, ReplyHead};
use crate::session::Session;
use highwire_vi::Payload;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(super) struct Sessions {
    table: Mutex<Table>,
    max: usize,
    window_max: u32,
    keep: Duration,
}

#[derive(Debug)]
struct Table {
    sessions: HashMap<u128, Entry>,
    /// The incarnation that the next session gets.
    next: u64,
}

impl Table {
    /// The session of a call, unless it has been begun anew since.
    fn of(&mut self, call: Ticket) -> Option<&mut Entry> {
        self.sessions.get_mut(&call.session).filter(|entry| entry.incarnation == call.incarnation)
    }
}

#[derive(Debug)]
struct Entry {
    incarnation: u64,
    /// The last connection that it was asked for.
    attempt: u32,
    place: Place,
}

#[derive(Debug)]
enum Place {
    Connected(Arc<Connection>),
    Kept { session: Session, since: Instant },
}

/// Names a call wherever its handler runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub session: u128,
    /// Of the session: one that was begun anew numbers its calls anew.
    pub incarnation: u64,
    pub sequence: u64,
    /// Bytes of room that the caller has for the answer's payload.
    pub room: u32,
}

/// What a hello asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub version: u16,
    pub window: u32,
    pub acknowledged: u64,
    pub attempt: u32,
    pub incarnation: u64,
}

#[derive(Debug)]
pub(super) struct Opened {
    pub session: Session,
    pub known: bool,
    pub incarnation: u64,
}

impl Sessions {
    /// `first` is the incarnation of the first session: another one at every start.
    pub(super) fn new(first: u64, options: &ServerOptions) -> Sessions {
        let table = Mutex::new(Table { sessions: HashMap::new(), next: first });
        Sessions { table, max: options.sessions_max, window_max: options.window_max, keep: options.keep_sessions }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A hello came on `connection`, whose lock the caller has. The connection that had the session so far is told.
    pub(super) fn open(&self, id: u128, asked: Asked, connection: &Arc<Connection>) -> Result<Opened, Leaving> {
        if asked.version != RPC_VERSION {
            return Err(Leaving::Version);
        }
        if !asked.window.is_power_of_two() || asked.window > self.window_max {
            return Err(Leaving::Full);
        }
        let mut table = self.table();
        let mut known = None;
        if let Some(entry) = table.sessions.get_mut(&id) {
            if asked.attempt <= entry.attempt {
                // A late hello of a connection that is gone, or another client with the same number.
                return Err(Leaving::SessionTaken);
            }
            let place = std::mem::replace(&mut entry.place, Place::Connected(connection.clone()));
            entry.attempt = asked.attempt;
            let session = match place {
                Place::Kept { session, .. } => Some(session),
                Place::Connected(before) => {
                    let mut link = before.lock();
                    let session = link.session.take().map(|(_, session)| session);
                    link.leave(Leaving::SessionTaken);
                    session
                }
            };
            // Whoever was never welcomed to it begins anew, and so does who wants another window.
            known = session
                .filter(|session| entry.incarnation == asked.incarnation && session.window() == asked.window)
                .map(|session| (session, entry.incarnation));
        } else if table.sessions.len() >= self.max {
            return Err(Leaving::Full);
        }
        if let Some((session, incarnation)) = known {
            return Ok(Opened { session, known: true, incarnation });
        }
        let incarnation = table.next;
        // Never 0, which is nobody's.
        table.next = table.next.wrapping_add(1).max(1);
        let place = Place::Connected(connection.clone());
        table.sessions.insert(id, Entry { incarnation, attempt: asked.attempt, place });
        Ok(Opened { session: Session::new(asked.acknowledged, asked.window), known: false, incarnation })
    }

    /// A connection is over: its session is kept for a while.
    pub(super) fn park(&self, connection: &Arc<Connection>, link: &mut Link) {
        let Some((id, mut session)) = link.session.take() else { return };
        session.shrink();
        if let Some(entry) = self.table().sessions.get_mut(&id)
            && matches!(&entry.place, Place::Connected(of) if Arc::ptr_eq(of, connection))
        {
            entry.place = Place::Kept { session, since: Instant::now() };
        }
    }

    /// The client of this connection will not come back.
    pub(super) fn forget(&self, id: u128, connection: &Arc<Connection>) {
        let mut table = self.table();
        let its_own = |entry: &Entry| matches!(&entry.place, Place::Connected(of) if Arc::ptr_eq(of, connection));
        if table.sessions.get(&id).is_some_and(its_own) {
            table.sessions.remove(&id);
        }
    }

    /// Forgets sessions that nobody came back for.
    pub(super) fn sweep(&self, now: Instant) {
        let keep = self.keep;
        self.table().sessions.retain(|_, entry| match &entry.place {
            Place::Connected(_) => true,
            Place::Kept { since, .. } => now.saturating_duration_since(*since) < keep,
        });
    }

    /// Everything is over. A handler that never ends keeps the table alive, and is not to keep connections open by it.
    pub(super) fn close(&self) {
        let sessions = std::mem::take(&mut self.table().sessions);
        drop(sessions);
    }

    /// The connection that has the session now.
    fn connection(&self, call: Ticket) -> Option<Arc<Connection>> {
        match &self.table().of(call)?.place {
            Place::Connected(connection) => Some(connection.clone()),
            Place::Kept { .. } => None,
        }
    }

    /// Whether somebody still waits for the answer to a call.
    pub(super) fn is_wanted(&self, call: Ticket) -> bool {
        match self.connection(call) {
            Some(connection) => match &connection.lock().session {
                Some((of, session)) if *of == call.session => session.is_wanted(call.sequence),
                // It is on its way to another connection.
                _ => true,
            },
            None => match self.table().of(call).map(|entry| &entry.place) {
                Some(Place::Kept { session, .. }) => session.is_wanted(call.sequence),
                Some(Place::Connected(_)) => true,
                None => false,
            },
        }
    }

    /// A call that ran elsewhere is answered, by whichever connection has its session.
    pub(super) fn finish(&self, call: Ticket, reply: &mut Reply) {
        let Ticket { session: id, sequence, room, .. } = call;
        // A session moves from one connection to another at most as often as a client connects.
        loop {
            if let Some(connection) = self.connection(call) {
                let mut link = connection.lock();
                if link.session.as_ref().is_some_and(|(of, _)| *of == id) {
                    return link.answer_with(sequence, room, reply);
                }
                drop(link);
            }
            let mut table = self.table();
            match table.of(call).map(|entry| &mut entry.place) {
                Some(Place::Kept { session, .. }) => {
                    reply.check(room);
                    let status = reply.status;
                    let head = ReplyHead { sequence, status, body: reply.body as u16, frames: 0 };
                    reply.message[..HEAD_BYTES].copy_from_slice(&Head::Reply(head).encode());
                    let message = &reply.message[..HEAD_BYTES + reply.body];
                    session.finish(sequence, matches!(reply.payload, Payload::None).then_some(message));
                    return;
                }
                // It was just given to a connection that is yet to take it.
                Some(Place::Connected(_)) => drop(table),
                None => return,
            }
            std::thread::yield_now();
        }
    }
}
