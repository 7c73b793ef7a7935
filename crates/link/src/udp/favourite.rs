//! A connected socket for the peer that a link talks to most.
//!
//! To a connected socket the kernel sends without looking for a route and without reading an address.
//! Such a socket shares address and port with the link's main socket: the kernel hands it what comes
//! from its peer, and everything else to the main one.
//!
//! ```text
//!            votes                                       votes for another
//!  no socket ──────▶ connected: what waits at the main ◀────────────────────▶ deaf: its queue is read,
//!                    socket is read first, then its own     queue empty       the main socket waits
//! ```
//!
//! The socket is opened with the link and lives as long: it is connected again, not closed, so what
//! waits in its queue is read, whoever sent it. The main socket's port is exclusive. It is shared for the
//! few system calls in which the second socket is bound, and only with sockets of the same user that ask
//! to share it; links never ask. A link with [lists](super::lists) shares it all the time.

#[cfg(test)]
mod tests;

use super::socket::Socket;
use super::{BindError, UdpOptions, mapped, sys};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A connected socket beside a link's main one.
pub(super) struct Favourite {
    pub(super) socket: Socket,
    bound: bool,
    /// To whom it sends. None while the main socket does that for everybody.
    pub(super) peer: Option<SocketAddr>,
    /// To whom it will, when its queue is empty.
    next: Option<SocketAddr>,
    /// Sends since it heard its peer last.
    unanswered: u32,
    unanswered_max: u32,
    turn: Turn,
    /// Nobody but the peer can have sent what is in its queue: that was empty after it was connected.
    pure: bool,
}

impl Favourite {
    /// Opens the socket for a link at `local`. It is neither bound nor connected yet, but can be polled, so
    /// that it need not be told to anybody later.
    pub(super) fn open(local: SocketAddr, options: UdpOptions) -> Result<Favourite, BindError> {
        let socket = Socket::open(local, options)?;
        if options.coalescing {
            sys::set_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1).map_err(|errno| BindError::Option {
                address: local,
                option: "UDP_GRO",
                errno,
            })?;
        }
        let unanswered_max = if local.ip().is_unspecified() { UNANSWERED_MAX } else { u32::MAX };
        Ok(Favourite {
            socket,
            bound: false,
            peer: None,
            next: None,
            unanswered: 0,
            unanswered_max,
            turn: Turn::new(),
            pure: false,
        })
    }

    /// Binds it beside `main`, which is bound to `local`, and connects it. One that is bound but cannot be
    /// connected is read all the same: strangers' packets may be in its queue. The port stays shared if it
    /// `is_shared` with lists.
    pub(super) fn bind(
        &mut self,
        main: &Socket,
        local: SocketAddr,
        peer: SocketAddr,
        is_shared: bool,
    ) -> Result<(), Errno> {
        // While two sockets share the port and none is connected, each sender's packets all go to one of
        // them. So the port is shared until this one is connected, or they might change over and back.
        sockopt::set_socket_reuseport(&self.socket, true)?;
        let shared = sockopt::set_socket_reuseport(main, true);
        let bound = shared.and_then(|()| rustix::net::bind(&self.socket, &local));
        let connected = bound.and_then(|()| rustix::net::connect(&self.socket, &mapped(peer, local)));
        if !is_shared {
            let _ = sockopt::set_socket_reuseport(main, false);
        }
        // One that is not connected keeps it beside lists: without, the kernel would prefer it to all of them.
        if !is_shared || connected.is_ok() {
            let _ = sockopt::set_socket_reuseport(&self.socket, false);
        }
        (self.bound, self.peer) = (bound.is_ok(), connected.is_ok().then_some(peer));
        connected
    }

    /// Whether something can come to it.
    pub(super) fn is_bound(&self) -> bool {
        self.bound
    }

    /// Makes it deaf, so that what the old peer sends from now on comes to the main socket, behind what is
    /// in the queue here. It turns to `peer` when that is read.
    pub(super) fn leave_for(&mut self, peer: SocketAddr) {
        (self.peer, self.next, self.pure) = (None, Some(peer), false);
        if let Ok(Some(itself)) = rustix::net::getsockname(&self.socket).map(|local| SocketAddr::try_from(local).ok()) {
            let _ = rustix::net::connect(&self.socket, &itself);
        }
    }

    /// Whether it waits for its queue to be empty.
    pub(super) fn is_leaving(&self) -> bool {
        self.next.is_some()
    }

    /// Connects it to the one for whom it left the old peer.
    pub(super) fn turn(&mut self, local: SocketAddr) -> Result<(), Errno> {
        let Some(peer) = self.next.take() else { return Ok(()) };
        if local.ip().is_unspecified() {
            // The address from which the old peer was reached may be the wrong one now.
            rustix::net::connect_unspec(&self.socket)?;
        }
        rustix::net::connect(&self.socket, &mapped(peer, local))?;
        (self.peer, self.unanswered, self.turn) = (Some(peer), 0, Turn::new());
        Ok(())
    }

    /// A packet went to the peer. One that does not answer may be reached in another way by now, which a
    /// socket that was connected before does not learn of.
    pub(super) fn note_sent(&mut self) {
        self.unanswered += 1;
        if self.unanswered >= self.unanswered_max {
            (self.peer, self.unanswered) = (None, 0);
        }
    }

    /// Who must have sent what is in its queue, if that is certain.
    pub(super) fn only_sender(&self) -> Option<SocketAddr> {
        self.peer.filter(|_| self.pure)
    }

    /// Nothing was received.
    pub(super) fn note_empty(&mut self) {
        self.pure = self.peer.is_some() && self.socket.is_empty;
    }

    /// Something came.
    pub(super) fn note_heard(&mut self) {
        self.unanswered = 0;
        self.turn.main_was_last = false;
    }

    /// Which sockets the next look is at.
    pub(super) fn next_look(&mut self) -> Look {
        if !self.bound {
            return Look::Main;
        }
        if self.next.is_some() {
            return Look::Favourite;
        }
        let turn = &mut self.turn;
        if turn.main_was_last && turn.interval > 1 && !turn.draining {
            // Neither has anything now, and who was heard last is mostly heard next.
            turn.main_looks = turn.main_looks.wrapping_add(1);
            return if turn.main_looks.is_multiple_of(INTERVAL_MAX) { Look::MainThenFavourite } else { Look::Main };
        }
        turn.countdown = turn.countdown.saturating_sub(1);
        if turn.countdown > 0 {
            return Look::Favourite;
        }
        turn.overdue += 1;
        // While it has something they take turns; else it waits until the other has nothing, within limits.
        let main_first = turn.draining || turn.overdue > OVERDUE_MAX || (turn.interval == 1 && !turn.main_was_last);
        if main_first { Look::MainThenFavourite } else { Look::FavouriteThenMain }
    }

    /// The main socket has something, or this one.
    pub(super) fn note_ready(&mut self, main: bool) {
        match main {
            true => self.turn.countdown = 0,
            false => self.turn.main_was_last = false,
        }
    }

    /// What a look at the main socket found.
    pub(super) fn note_main(&mut self, found: bool) {
        let turn = &mut self.turn;
        turn.interval = if found { 1 } else { (turn.interval * 2).min(INTERVAL_MAX) };
        (turn.countdown, turn.overdue) = (turn.interval, 0);
        if found {
            turn.main_was_last = true;
            turn.draining_looks += u32::from(turn.draining);
        }
        turn.draining &= found && turn.draining_looks < DRAINING_LOOKS_MAX;
    }
}

/// Which sockets a look is at; the second where the first has nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Main,
    Favourite,
    FavouriteThenMain,
    MainThenFavourite,
}

/// When the main socket is looked at. Each look costs a system call, and mostly nothing is there.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// Looks until then.
    countdown: u32,
    /// Looks since then at which the favourite had something.
    overdue: u32,
    /// From one to the next; it grows while nothing is there.
    interval: u32,
    /// What came last came there. While it has something, the other has precedence.
    main_was_last: bool,
    /// Looks at it while neither had anything.
    main_looks: u32,
    /// The peer's packets from before it became the favourite may wait there, and come first.
    draining: bool,
    draining_looks: u32,
}

impl Turn {
    fn new() -> Turn {
        Turn {
            countdown: 1,
            overdue: 0,
            interval: 1,
            main_was_last: false,
            main_looks: 0,
            draining: true,
            draining_looks: 0,
        }
    }
}

const INTERVAL_MAX: u32 = 32;
const OVERDUE_MAX: u32 = 8;
/// Others may send to the main socket without end.
const DRAINING_LOOKS_MAX: u32 = 256;
/// Only where the kernel chose the address from which the peer is reached.
const UNANSWERED_MAX: u32 = 64;

/// Who is talked to most, among those who are not the favourite.
///
/// Each send is a vote for its address and one against the candidate, if that is another. Whoever gets
/// most of the sends wins in the end; two who get the same do not.
#[derive(Debug)]
pub(super) struct Votes {
    candidate: Option<SocketAddr>,
    count: u32,
    needed: u32,
}

/// For the first favourite.
const VOTES_FIRST: u32 = 32;
/// For another: changing costs some system calls.
const VOTES_NEXT: u32 = 256;
/// After many failures.
const VOTES_MOST: u32 = 1 << 20;

impl Votes {
    pub(super) fn new() -> Votes {
        Votes { candidate: None, count: 0, needed: VOTES_FIRST }
    }

    /// A packet went to `to`, which is not the favourite. True once that one should be.
    pub(super) fn cast(&mut self, to: SocketAddr) -> bool {
        if self.candidate == Some(to) {
            self.count = (self.count + 1).min(self.needed);
        } else if self.count == 0 {
            (self.candidate, self.count) = (Some(to), 1);
        } else {
            self.count -= 1;
        }
        self.count == self.needed
    }

    /// A packet went to the favourite.
    pub(super) fn cast_for_favourite(&mut self) {
        self.count = self.count.saturating_sub(1);
    }

    /// Who should be the favourite, if anybody.
    pub(super) fn winner(&self) -> Option<SocketAddr> {
        self.candidate.filter(|_| self.count == self.needed)
    }

    /// The winner became the favourite, or could not.
    pub(super) fn settle(&mut self, done: bool) {
        self.needed = if done { VOTES_NEXT } else { (self.needed * 2).min(VOTES_MOST) };
        (self.candidate, self.count) = (None, 0);
    }
}

/// A descriptor that polls readable when one of several sockets has something, or has room after it
/// was full. Made for those who ask for it: to tell it of a packet costs the kernel a quarter of a
/// microsecond, whether anybody polls it or not.
pub(super) struct Watch {
    epoll: OwnedFd,
    /// A socket is watched for room.
    room: Room,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    Enough,
    /// A send found none since the last look.
    Missed,
    /// No send tried since the last look.
    Forgotten,
}

impl Watch {
    /// Watches sockets, and a descriptor that polls readable for others.
    pub(super) fn new<'a>(
        sockets: impl Iterator<Item = &'a Socket>,
        others: Option<BorrowedFd<'_>>,
    ) -> Result<Watch, Errno> {
        let mut watch = Watch { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, room: Room::Enough };
        for socket in sockets {
            epoll::add(&watch.epoll, socket, epoll::EventData::new_u64(0), events(socket))?;
            if socket.awaits_room {
                watch.room = Room::Missed;
            }
        }
        if let Some(others) = others {
            epoll::add(&watch.epoll, others, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(watch)
    }

    /// A socket was found full, or is no longer.
    pub(super) fn note(&mut self, socket: &Socket) {
        if socket.awaits_room {
            self.room = Room::Missed;
        }
        // It was added, so this fails only for want of memory, and then timers go on.
        let _ = epoll::modify(&self.epoll, socket, epoll::EventData::new_u64(0), events(socket));
    }

    /// Something is received. True if nobody has tried to send since it was so last, though a socket is
    /// watched for room: then it need not be.
    pub(super) fn note_look(&mut self) -> bool {
        self.room = match self.room {
            Room::Enough => return false,
            Room::Missed => Room::Forgotten,
            Room::Forgotten => Room::Enough,
        };
        self.room == Room::Enough
    }
}

fn events(socket: &Socket) -> epoll::EventFlags {
    let room = if socket.awaits_room { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
    epoll::EventFlags::IN | room
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
