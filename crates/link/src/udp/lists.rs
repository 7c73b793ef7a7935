//! Receive lists: sockets beside the main one, among which the kernel sorts packets by a byte in each.
//!
//! A receiver that has told a peer to write a list's number into its packets finds them at that socket
//! and nothing else: it can say where their payloads are to land before they have come.
//!
//! ```text
//!   packet ──▶ a connected socket for its sender? ── yes ──▶ the favourite's
//!                     │ no
//!              the filter reads the byte ── 1 to n ──▶ socket n of the group
//!                     └── anything else, or too short for it ──▶ the main socket
//! ```
//!
//! All sockets share address and port (SO_REUSEPORT). The main one is bound first and alone, so that an
//! address that is in use is found to be; then the lists, in order: the kernel numbers the sockets of a
//! group as they are bound, and the filter's result is such a number. The main socket and the lists keep
//! the option, since the kernel asks the filter only for those that have it. So a process of the same user
//! that asks to share the address could join; links never ask.
//!
//! The favourite's socket is bound later, behind the lists, and leaves the group when it is connected.
//! What its peer sends comes to it whatever the byte says: it is a list of its own.
//!
//! Every packet may come to every socket. The kernel sorts what it coalesced by its first packet, and when
//! a socket of the group is closed its number goes to the last one. A wrong list costs speed and nothing
//! else, so nobody is told.

#[cfg(test)]
mod tests;

use super::socket::Socket;
use super::{UdpOptions, sys};
use crate::LinkCounters;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where a packet says by which list it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListField {
    /// Lists beside the main socket; those above [`ListField::COUNT_MAX`] are not opened. Each is a socket
    /// with a receive buffer of its own.
    pub count: u8,
    /// Which byte of a packet is the number of its list, from 1 on.
    pub at: usize,
}

impl ListField {
    /// Most lists of a link.
    pub const COUNT_MAX: u8 = 15;
}

/// The lists of a link, never empty.
pub(super) struct Lists {
    /// List n is at n - 1.
    each: Vec<List>,
    at: usize,
    /// Tells which of them have something. What it has told of is silent until it is watched again, and one that is
    /// lost never is: somebody else may hold the socket, a child for instance, and then something may wait there
    /// for ever that nobody can receive. It is never replaced, since others hold it and poll it.
    epoll: OwnedFd,
    /// Somebody polled it, and found that one has.
    ready: bool,
    /// One of them may be looked at before the kernel is asked.
    any_warm: bool,
    /// Looks until it is asked.
    countdown: u32,
    /// Where the next look begins, so that each has its turn.
    next: usize,
    /// Finds here since the other sockets were looked at first, and how many there may be.
    finds: u32,
    finds_max: u32,
}

struct List {
    /// None once it is lost.
    socket: Option<Socket>,
    /// A peer was told to send here.
    in_use: bool,
    /// Looks from one at it to the next, which grow while nothing is there; [`COLD`] is never.
    interval: u32,
    countdown: u32,
}

/// What a link does first when it receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// No list is looked at.
    Without,
    ListsFirst,
    ListsLast,
}

/// How the kernel watches a list: it tells once, and stays readable until it has told.
const WATCHED: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);
/// An interval: not looked at before the kernel says that something is there.
const COLD: u32 = 64;
/// The longest interval of a list in use.
const WARM: u32 = 8;
/// Looks between two questions to the kernel which lists have something: one system call for all.
const ASK_EVERY: u32 = 64;
/// While others have nothing, lists come first so often in a row, at most.
const FINDS_MAX: u32 = 4;

impl Lists {
    /// Binds lists beside `main`, which is bound to `local` and shares that from now on. If that cannot be
    /// done it shares nothing.
    pub(super) fn bind(
        main: &Socket,
        local: SocketAddr,
        field: ListField,
        options: UdpOptions,
    ) -> Result<Lists, Errno> {
        let bound = Lists::bind_sharing(main, local, field, options);
        if bound.is_err() {
            let _ = sockopt::set_socket_reuseport(main, false);
        }
        bound
    }

    fn bind_sharing(main: &Socket, local: SocketAddr, field: ListField, options: UdpOptions) -> Result<Lists, Errno> {
        sockopt::set_socket_reuseport(main, true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let count = field.count.min(ListField::COUNT_MAX);
        let mut each = Vec::with_capacity(usize::from(count));
        for number in 1..=count {
            let socket = Socket::open(local, options).map_err(|error| error.errno())?;
            if options.coalescing {
                sys::set_option(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1)?;
            }
            sockopt::set_socket_reuseport(&socket, true)?;
            rustix::net::bind(&socket, &local)?;
            if number == 1 {
                // There is a group now. Without a filter the kernel would deal packets out.
                sys::attach_filter(main.as_fd(), &filter(field.at, count, 0))?;
            }
            epoll::add(&epoll, &socket, epoll::EventData::new_u64(u64::from(number)), WATCHED)?;
            each.push(List { socket: Some(socket), in_use: false, interval: COLD, countdown: 0 });
        }
        let (ready, countdown, next) = (false, ASK_EVERY, 0);
        Ok(Lists { each, at: field.at, epoll, ready, any_warm: false, countdown, next, finds: 0, finds_max: 1 })
    }

    /// The lists that there are, a bit for each: bit n is list n.
    pub(super) fn mask(&self) -> u16 {
        let there = self.each.iter().enumerate().filter(|(_, list)| list.socket.is_some());
        there.fold(0, |mask, (index, _)| mask | 2 << index)
    }

    /// A peer was told to send by this list, or need not any longer.
    pub(super) fn note_in_use(&mut self, number: u8, in_use: bool) {
        let Some(list) = usize::from(number).checked_sub(1).and_then(|index| self.each.get_mut(index)) else { return };
        list.in_use = in_use;
        if in_use {
            list.warm();
            self.any_warm = true;
        }
    }

    /// Whoever polled found that one of them has something.
    pub(super) fn note_ready(&mut self) {
        self.ready = true;
    }

    /// Whether lists are looked at this time. Calls of the kernel are counted, and lists that are found to be lost.
    #[inline]
    pub(super) fn next_look(&mut self, counters: &mut LinkCounters) -> Order {
        self.countdown -= 1;
        if self.countdown == 0 || self.ready {
            self.ask(counters);
        }
        if !self.any_warm {
            return Order::Without;
        }
        self.any_warm = false;
        let mut any = false;
        for list in self.each.iter_mut().filter(|list| list.interval < COLD) {
            self.any_warm = true;
            list.countdown = list.countdown.saturating_sub(1);
            any |= list.countdown == 0;
        }
        match any {
            false => Order::Without,
            true if self.finds < self.finds_max => Order::ListsFirst,
            true => Order::ListsLast,
        }
    }

    /// Asks the kernel which of them have something.
    #[cold]
    fn ask(&mut self, counters: &mut LinkCounters) {
        (self.ready, self.countdown) = (false, ASK_EVERY);
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; ListField::COUNT_MAX as usize];
        counters.system_calls += 1;
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&now)) else { return };
        for event in events {
            let (number, data) = (event.data.u64() as usize, event.data);
            let Some(index) = number.checked_sub(1).filter(|index| *index < self.each.len()) else { continue };
            let Some(socket) = &self.each[index].socket else { continue };
            counters.system_calls += 1;
            match epoll::modify(&self.epoll, socket, data, WATCHED) {
                Ok(()) => {
                    self.each[index].warm();
                    self.any_warm = true;
                }
                // Its number is not that of the socket that was added.
                Err(_) => {
                    self.lose(index);
                    counters.lists_lost += 1;
                }
            }
        }
    }

    /// Looks at the lists whose turn it is, until one has something. `look` receives at a socket, the first of them
    /// number 0; whether one had something, and how many were found to be lost.
    pub(super) fn receive(&mut self, mut look: impl FnMut(usize, &mut Socket) -> Result<bool, Errno>) -> (bool, u64) {
        let (count, mut lost) = (self.each.len(), 0);
        for step in 0..count {
            let index = (self.next + step) % count;
            let list = &mut self.each[index];
            let Some(socket) = list.socket.as_mut().filter(|_| list.interval < COLD && list.countdown == 0) else {
                continue;
            };
            match look(index, socket) {
                Ok(true) => {
                    list.warm();
                    self.next = (index + 1) % count;
                    self.finds += 1;
                    return (true, lost);
                }
                Err(Errno::BADF | Errno::NOTSOCK) => {
                    self.lose(index);
                    lost += 1;
                }
                // The network may tell a socket of anything.
                Ok(false) | Err(_) => list.cool(),
            }
        }
        (false, lost)
    }

    /// What a look at the other sockets found, which was before the lists or instead of them.
    pub(super) fn note_others(&mut self, found: bool) {
        self.finds_max = if found { 1 } else { (self.finds_max * 2).min(FINDS_MAX) };
        self.finds = 0;
    }

    /// Somebody has closed a list's descriptor, or put another in its place.
    #[cold]
    fn lose(&mut self, index: usize) {
        let Some(socket) = self.each[index].socket.take() else { return };
        // The number may be another's by now.
        socket.abandon();
        self.each[index].interval = COLD;
        // What peers still send by it comes to the main socket, and not to whoever has its number now.
        let Some(left) = self.each.iter().find_map(|list| list.socket.as_ref()) else { return };
        let count = self.each.len() as u8;
        let lost = !self.mask() & ((2 << count) - 1) as u16 & !1;
        let _ = sys::attach_filter(left.as_fd(), &filter(self.at, count, lost));
    }
}

impl List {
    fn warm(&mut self) {
        if self.socket.is_some() {
            (self.interval, self.countdown) = (1, 0);
        }
    }

    fn cool(&mut self) {
        let longest = if self.in_use { WARM } else { COLD };
        self.interval = (self.interval * 2).min(longest);
        self.countdown = self.interval;
    }
}

impl AsFd for Lists {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A program of the kernel's classic filter: the number of the socket that a packet is for. One that is too
/// short for the byte ends it with 0, the main socket.
fn filter(at: usize, count: u8, lost: u16) -> Vec<sys::Instruction> {
    use sys::Instruction;
    let lost: Vec<u32> = (1..=u32::from(count)).filter(|number| lost & 1 << number != 0).collect();
    let mut program = vec![Instruction::LoadByte { at: at as u32 }];
    // Jumps count from the instruction behind them; the last one is that to return 0.
    for (index, number) in lost.iter().enumerate() {
        program.push(Instruction::JumpIfEqual { to: *number, by: (lost.len() - index + 1) as u8 });
    }
    program.push(Instruction::JumpIfGreater { than: u32::from(count), by: 1 });
    program.push(Instruction::ReturnLoaded);
    program.push(Instruction::Return(0));
    program
}
