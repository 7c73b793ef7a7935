//! UDP, as fast as sockets go: the kernel cuts bursts into packets and puts packets together again, and
//! one system call carries many of them. The peer that a link talks to most has a connected socket of
//! its own, which nobody outside sees; and packets that say so come by lists of their own.
//!
//! Don't-fragment is set and the kernel's own idea of the path is ignored, so that the caller alone
//! decides how large packets are; one too large for the device is refused.

mod favourite;
mod lists;
mod socket;
#[expect(unsafe_code, reason = "system calls that no crate wraps")]
mod sys;
#[cfg(test)]
mod tests;

use crate::inbox::FIRST_LIST;
use crate::landing::LOOKED_AT;
use crate::{Advice, Burst, Guide, Inbox, Landed, Link, LinkCounters, ReceiveError, SendError, Woven};
use favourite::{Favourite, Look, Votes, Watch};
pub use lists::ListField;
use lists::{Lists, Order};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, sockopt};
use socket::Socket;
use std::net::{SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;
use sys::{Datagram, Incoming, Message, Outgoing};

/// What a [`UdpLink`] asks of the kernel. What it refuses is done without, and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpOptions {
    /// Let the kernel or the network card cut bursts into packets (UDP_SEGMENT).
    pub segmentation: bool,
    /// Let the kernel put packets that came together into one datagram (UDP_GRO).
    pub coalescing: bool,
    /// Ask for a receive buffer of this size; None leaves the system's default.
    pub receive_buffer_bytes: Option<usize>,
    /// Ask for a send buffer of this size; None leaves the system's default.
    pub send_buffer_bytes: Option<usize>,
    /// Let a link bound to `[::]` reach and be reached by IPv4 too.
    pub dual_stack: bool,
    /// Give the peer that is talked to most a connected socket of its own.
    pub favourite: bool,
    /// Where packets say how long they are, if they do. Then what comes one by one from the favourite is
    /// received without asking the kernel where packets end and who sent them, which takes longer.
    pub length: Option<LengthField>,
    /// Where packets say by which of several lists they come, if they do. Each list costs a socket with a
    /// receive buffer, and memory of the kernel when something waits there.
    pub lists: Option<ListField>,
}

/// A number of two bytes in each packet, the lower byte first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthField {
    /// Where it is.
    pub at: usize,
    /// Bytes of a packet that it does not count.
    pub uncounted: usize,
    /// A byte of those packets that are longer than they say, and what it is: they are padded, and come alone.
    pub padded: Option<(usize, u8)>,
}

impl LengthField {
    /// How long the first packet in `bytes` says that it is, if it is not all of them.
    fn read(self, bytes: &[u8]) -> Option<usize> {
        if self.padded.is_some_and(|(at, value)| bytes.get(at) == Some(&value)) {
            return None;
        }
        let field = bytes.get(self.at..)?.first_chunk::<2>()?;
        let length = usize::from(u16::from_le_bytes(*field)) + self.uncounted;
        (length < bytes.len()).then_some(length)
    }
}

impl Default for UdpOptions {
    fn default() -> UdpOptions {
        UdpOptions {
            segmentation: true,
            coalescing: true,
            receive_buffer_bytes: Some(BUFFER_BYTES),
            send_buffer_bytes: Some(BUFFER_BYTES),
            dual_stack: true,
            favourite: true,
            length: None,
            lists: None,
        }
    }
}

/// Why a link could not be bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// No socket of this family; IPv6 may be switched off.
    #[error("no UDP socket for {address}: {errno}")]
    Socket {
        /// The address asked for.
        address: SocketAddr,
        /// What the kernel said.
        errno: Errno,
    },
    /// The socket lacks something that this link cannot do without.
    #[error("the UDP socket for {address} does not take {option}: {errno}")]
    Option {
        /// The address asked for.
        address: SocketAddr,
        /// The option.
        option: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
    /// The address is taken, or not of this host.
    #[error("{address} cannot be bound: {errno}")]
    Address {
        /// The address asked for.
        address: SocketAddr,
        /// What the kernel said.
        errno: Errno,
    },
}

impl BindError {
    /// What the kernel said.
    fn errno(self) -> Errno {
        match self {
            BindError::Socket { errno, .. } | BindError::Option { errno, .. } | BindError::Address { errno, .. } => {
                errno
            }
        }
    }
}

/// A UDP socket, a second one for the peer that is talked to most, and those of the lists.
pub struct UdpLink {
    main: Socket,
    favourite: Option<Box<Favourite>>,
    lists: Option<Box<Lists>>,
    votes: Votes,
    /// Of all sockets, once somebody has asked for one descriptor for them.
    watch: OnceLock<Option<Watch>>,
    /// Of the two that send, which was full last.
    full_descriptor: usize,
    local: SocketAddr,
    receive_buffer_bytes: usize,
    segmentation: bool,
    coalescing: bool,
    length: Option<LengthField>,
    outgoing: Outgoing,
    incoming: Incoming,
    counters: LinkCounters,
}

/// The main socket's place among the descriptors, and that of the lists.
const MAIN: usize = 0;
/// And the favourite's.
const FAVOURITE: usize = 1;
const LISTS: usize = 2;
/// Most bytes of a datagram over IPv4, and so of what the kernel cuts into packets.
const DATAGRAM_BYTES_MAX: usize = 65_507;
/// Most packets the kernel cuts one message into; newer ones do 128, older ones 64.
const SEGMENTS_MAX: usize = 64;
/// Most messages of one call: a burst whose packets go one by one fits a call.
const MESSAGES_MAX: usize = SEGMENTS_MAX;
/// Asked for by default; the system's limit (`net.core.rmem_max`) is usually far below.
const BUFFER_BYTES: usize = 4 << 20;
/// After so many errors in a row, receiving gives up until the next call.
const SOFT_ERRORS_MAX: usize = 16;

impl UdpLink {
    /// A link at `address`; port 0 lets the kernel choose one.
    pub fn bind(address: SocketAddr, options: UdpOptions) -> Result<UdpLink, BindError> {
        let main = Socket::open(address, options)?;
        let mut counters = LinkCounters::default();
        let mut offload = |wanted: bool, name, value, refused: fn(&mut LinkCounters) -> &mut u64| {
            let given = wanted && sys::set_option(main.as_fd(), libc::SOL_UDP, name, value).is_ok();
            *refused(&mut counters) += u64::from(wanted && !given);
            given
        };
        // Setting the segment size of the whole socket to none changes nothing, and tells whether
        // the kernel knows of it: one that does not would ignore it in a message.
        let segmentation = offload(options.segmentation, libc::UDP_SEGMENT, 0, |counters| &mut counters.gso_refused);
        let coalescing = offload(options.coalescing, libc::UDP_GRO, 1, |counters| &mut counters.gro_refused);
        rustix::net::bind(&main, &address).map_err(|errno| BindError::Address { address, errno })?;
        let local = rustix::net::getsockname(&main)
            .and_then(SocketAddr::try_from)
            .map_err(|errno| BindError::Address { address, errno })?;
        let options = UdpOptions { coalescing, ..options };
        let lists = options.lists.filter(|field| field.count > 0).and_then(|field| {
            let bound = Lists::bind(&main, local, field, options);
            counters.lists_refused += u64::from(bound.is_err());
            bound.ok().map(Box::new)
        });
        Ok(UdpLink {
            receive_buffer_bytes: sockopt::socket_recv_buffer_size(&main).unwrap_or(0),
            main,
            // Where anything about it fails, the main socket goes on alone.
            favourite: options.favourite.then(|| Favourite::open(local, options).ok()).flatten().map(Box::new),
            lists,
            votes: Votes::new(),
            watch: OnceLock::new(),
            full_descriptor: 0,
            local,
            segmentation,
            coalescing,
            length: options.length,
            outgoing: Outgoing::new(MESSAGES_MAX),
            incoming: Incoming::new(),
            counters,
        })
    }

    /// Bytes of the receive buffer as the kernel counts them: twice what was given, since its own
    /// bookkeeping of each packet counts too.
    pub fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }

    /// Whether the kernel cuts bursts into packets. It can change from true to false, when a path
    /// turns out to refuse it.
    pub fn segmentation(&self) -> bool {
        self.segmentation
    }

    /// Whether the kernel puts packets together.
    pub fn coalescing(&self) -> bool {
        self.coalescing
    }

    /// Sends a burst of one packet, which goes faster by a call of its own.
    fn send_single(&mut self, burst: &Burst<'_>) -> Result<usize, SendError> {
        let mut strikes = 0;
        loop {
            self.counters.system_calls += 1;
            let favourite = self.favourite_for(burst.to, strikes);
            let by_favourite = favourite.is_some();
            let result = match favourite {
                Some(socket) => rustix::net::send(socket, burst.bytes, SendFlags::DONTWAIT),
                None => {
                    let to = mapped(burst.to, self.local);
                    rustix::net::sendto(&self.main, burst.bytes, SendFlags::DONTWAIT, &to)
                }
            };
            match result {
                Ok(_) => {
                    self.counters.packets_sent += 1;
                    self.counters.bytes_sent += burst.bytes.len() as u64;
                    self.note_sent(burst.to, by_favourite);
                    return Ok(1);
                }
                Err(Errno::INTR) => {}
                Err(errno) if is_full(errno) => {
                    self.note_room(by_favourite, false);
                    return Ok(0);
                }
                Err(errno) if by_favourite => strikes = self.note_strike(strikes, errno),
                Err(errno) if is_soft(errno) => {
                    self.counters.soft_errors += 1;
                    return Ok(1);
                }
                Err(errno) => return Err(self.send_error(errno, burst)),
            }
        }
    }

    /// The connected socket, if it is for `to` and was not at fault twice.
    #[inline]
    fn favourite_for(&self, to: SocketAddr, strikes: u32) -> Option<BorrowedFd<'_>> {
        let favourite = self.favourite.as_ref().filter(|favourite| favourite.peer == Some(to) && strikes < 2)?;
        Some(favourite.socket.as_fd())
    }

    /// The connected socket refused. First it may have told of a packet before this one, of which the network
    /// told it; the second time the main socket is asked, which has no memory. How often it refused by now.
    #[cold]
    #[inline(never)]
    fn note_strike(&mut self, strikes: u32, errno: Errno) -> u32 {
        self.counters.soft_errors += u64::from(is_soft(errno));
        let harmless = matches!(errno, Errno::CONNREFUSED | Errno::MSGSIZE) || may_be_refusal(errno);
        if let Some(favourite) = self.favourite.as_mut().filter(|_| strikes > 0 && !harmless) {
            favourite.peer = None;
        }
        strikes + 1
    }

    /// Something went to `to`.
    #[inline]
    fn note_sent(&mut self, to: SocketAddr, by_favourite: bool) {
        let Some(favourite) = &mut self.favourite else {
            if self.main.awaits_room {
                self.note_room(by_favourite, true);
            }
            return;
        };
        let full = if by_favourite {
            favourite.note_sent();
            self.votes.cast_for_favourite();
            favourite.socket.awaits_room
        } else {
            // Once it is bound, receiving finds a good moment for a change.
            if self.votes.cast(to) && !favourite.is_bound() {
                let is_shared = self.lists.is_some();
                self.votes.settle(favourite.bind(&self.main, self.local, to, is_shared).is_ok());
            }
            self.main.awaits_room
        };
        if full {
            self.note_room(by_favourite, true);
        }
    }

    /// Whether there is room in a socket that is to send. The watch stays readable if it is not told.
    #[cold]
    fn note_room(&mut self, by_favourite: bool, room: bool) {
        let socket = match &mut self.favourite {
            // Then the descriptor is the main socket itself.
            None if self.lists.is_none() => return,
            Some(favourite) if by_favourite => &mut favourite.socket,
            _ => &mut self.main,
        };
        if !room {
            self.full_descriptor = usize::from(by_favourite);
        }
        let changed = std::mem::replace(&mut socket.awaits_room, !room) == room;
        if let Some(Some(watch)) = self.watch.get_mut().filter(|_| changed || !room) {
            watch.note(socket);
        }
    }

    /// Sends bursts, in as few calls as they take. Apart, so that it does not weigh on single packets.
    #[inline(never)]
    fn send_many(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        let mut rest = Messages {
            bursts,
            burst: 0,
            offset: 0,
            segmentation: self.segmentation,
            local: self.local,
            limit: usize::MAX,
        };
        // Set while one packet goes plain, to learn whether it was the segmentation that was refused.
        let mut in_doubt = false;
        let mut strikes = 0;
        let to = bursts.first().filter(|first| bursts.iter().all(|burst| burst.to == first.to)).map(|first| first.to);
        loop {
            rest.segmentation = self.segmentation && !in_doubt;
            rest.limit = if in_doubt { 1 } else { usize::MAX };
            let Some(first) = rest.clone().next() else { return Ok(bursts.len()) };
            self.counters.system_calls += 1;
            let favourite =
                self.favourite.as_ref().filter(|favourite| strikes < 2 && to.is_some() && favourite.peer == to);
            let by_favourite = favourite.is_some();
            let socket = favourite.map_or(&self.main, |favourite| &favourite.socket);
            match self.outgoing.send(socket.as_fd(), by_favourite, rest.clone()) {
                Ok(count) => {
                    self.note_sent(bursts[rest.burst].to, by_favourite);
                    for _ in 0..count {
                        let message = rest.next().expect("no more were sent than there are");
                        self.count_sent(&message);
                    }
                    if in_doubt {
                        self.segmentation = false;
                        self.counters.gso_refused += 1;
                    }
                    in_doubt = false;
                }
                Err(Errno::INTR) => {}
                Err(errno) if is_full(errno) => {
                    self.note_room(by_favourite, false);
                    return Ok(rest.burst);
                }
                Err(errno) if by_favourite => strikes = self.note_strike(strikes, errno),
                Err(errno) if is_soft(errno) => {
                    self.counters.soft_errors += 1;
                    rest.next();
                    in_doubt = false;
                }
                Err(errno) if first.segment < first.bytes.len() && may_be_refusal(errno) => in_doubt = true,
                // The next call begins with this burst and gets the error.
                Err(_) if rest.burst > 0 => return Ok(rest.burst),
                Err(errno) => return Err(self.send_error(errno, &bursts[0])),
            }
        }
    }

    fn count_sent(&mut self, message: &Message<'_>) {
        self.counters.packets_sent += message.bytes.len().div_ceil(message.segment) as u64;
        self.counters.bytes_sent += message.bytes.len() as u64;
    }

    /// Receives at the main socket; false if nothing was there.
    fn receive_at_main(
        &mut self,
        inbox: &mut Inbox,
        guide: Option<&mut (dyn Guide + '_)>,
    ) -> Result<bool, ReceiveError> {
        inbox.note_way(MAIN);
        let found = receive_at(&mut self.main, &mut self.incoming, &mut self.counters, inbox, guide, is_soft);
        if let (Some(favourite), Ok(found)) = (&mut self.favourite, &found) {
            favourite.note_main(*found);
        }
        found.map_err(|errno| ReceiveError::System { local: self.local, errno })
    }

    /// Receives at the favourite's socket, if there is one; false if nothing was there.
    fn receive_at_favourite(&mut self, inbox: &mut Inbox, mut guide: Option<&mut (dyn Guide + '_)>) -> bool {
        let Some(favourite) = &mut self.favourite else { return false };
        inbox.note_way(FAVOURITE);
        // The network may tell a connected socket of anything.
        let mut look = |favourite: &mut Favourite| {
            let sender = self.length.and_then(|length| Some((length, favourite.only_sender()?)));
            let socket = &mut favourite.socket;
            if let Some((length, from)) = sender.filter(|_| socket.pace.is_calm()) {
                return receive_plain(socket, &mut self.counters, inbox, length, from);
            }
            let guide = guide.as_deref_mut();
            receive_at(socket, &mut self.incoming, &mut self.counters, inbox, guide, |_| true).unwrap_or(false)
        };
        let mut found = look(favourite);
        if !found && let Some(peer) = self.votes.winner().filter(|_| !favourite.is_leaving()) {
            favourite.leave_for(peer);
            found = look(favourite);
        }
        if found {
            favourite.note_heard();
            return true;
        }
        favourite.note_empty();
        if favourite.is_leaving() {
            self.votes.settle(favourite.turn(self.local).is_ok());
        }
        false
    }
}

impl UdpLink {
    /// Receives at the main socket or the favourite's; false if nothing was there.
    #[inline(always)]
    fn receive_at_either(
        &mut self,
        inbox: &mut Inbox,
        mut guide: Option<&mut (dyn Guide + '_)>,
    ) -> Result<bool, ReceiveError> {
        match self.favourite.as_mut().map_or(Look::Main, |favourite| favourite.next_look()) {
            Look::Main => self.receive_at_main(inbox, guide),
            Look::Favourite => Ok(self.receive_at_favourite(inbox, guide)),
            Look::FavouriteThenMain => {
                Ok(self.receive_at_favourite(inbox, guide.as_deref_mut()) || self.receive_at_main(inbox, guide)?)
            }
            Look::MainThenFavourite => {
                Ok(self.receive_at_main(inbox, guide.as_deref_mut())? || self.receive_at_favourite(inbox, guide))
            }
        }
    }

    /// Receives at one of the lists, if there are any; false if nothing was there.
    fn receive_at_lists(&mut self, inbox: &mut Inbox, mut guide: Option<&mut (dyn Guide + '_)>) -> bool {
        let Some(lists) = &mut self.lists else { return false };
        let (incoming, counters) = (&mut self.incoming, &mut self.counters);
        let (found, lost) = lists.receive(|index, socket| {
            inbox.note_way(FIRST_LIST + index);
            receive_at(socket, incoming, counters, inbox, guide.as_deref_mut(), is_soft)
        });
        self.counters.lists_lost += lost;
        if found {
            self.counters.packets_by_lists += inbox.len() as u64;
        }
        found
    }

    /// Receives at a list, and at the other sockets if that has nothing, or the other way round. Apart, so
    /// that it does not weigh on links whose lists are not used.
    #[inline(never)]
    fn receive_by_lists(
        &mut self,
        inbox: &mut Inbox,
        mut guide: Option<&mut (dyn Guide + '_)>,
        lists_first: bool,
    ) -> Result<(), ReceiveError> {
        if lists_first && self.receive_at_lists(inbox, guide.as_deref_mut()) {
            return Ok(());
        }
        let found = self.receive_at_either(inbox, guide.as_deref_mut());
        if let Some(lists) = &mut self.lists {
            lists.note_others(!matches!(found, Ok(false)));
        }
        if !found? && !lists_first {
            self.receive_at_lists(inbox, guide);
        }
        Ok(())
    }
}

impl Link for UdpLink {
    fn local_address(&self) -> SocketAddr {
        self.local
    }

    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        match bursts {
            [only] if !only.bytes.is_empty() && only.bytes.len() <= only.segment => self.send_single(only),
            _ => self.send_many(bursts),
        }
    }

    fn send_woven(&mut self, burst: &Woven<'_>) -> Result<bool, SendError> {
        let bytes = burst.heads.len() + burst.payload.len();
        if self.segmentation && bytes <= DATAGRAM_BYTES_MAX && bytes <= SEGMENTS_MAX * burst.segment {
            self.counters.system_calls += 1;
            let favourite = self.favourite.as_ref().filter(|favourite| favourite.peer == Some(burst.to));
            let by_favourite = favourite.is_some();
            let socket = favourite.map_or(&self.main, |favourite| &favourite.socket);
            let to = (!by_favourite).then(|| mapped(burst.to, self.local));
            match self.outgoing.send_woven(socket.as_fd(), to, burst) {
                Ok(()) => {
                    self.note_sent(burst.to, by_favourite);
                    self.counters.packets_sent += bytes.div_ceil(burst.segment) as u64;
                    self.counters.bytes_sent += bytes as u64;
                    return Ok(true);
                }
                Err(errno) if is_full(errno) => {
                    self.note_room(by_favourite, false);
                    return Ok(false);
                }
                // What else may be wrong, the common way finds out.
                Err(_) => {}
            }
        }
        let bytes = burst.to_bytes();
        self.send(&[Burst { to: burst.to, bytes: &bytes, segment: burst.segment }]).map(|sent| sent == 1)
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        self.receive_somewhere(inbox, None)
    }

    fn receive_guided(&mut self, inbox: &mut Inbox, guide: &mut dyn Guide) -> Result<usize, ReceiveError> {
        self.receive_somewhere(inbox, Some(guide))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        if self.favourite.is_none() && self.lists.is_none() {
            return Some(self.main.as_fd());
        }
        let watch = self.watch.get_or_init(|| {
            let favourite = self.favourite.as_ref().map(|favourite| &favourite.socket);
            let lists = self.lists.as_ref().map(|lists| lists.as_fd());
            Watch::new(std::iter::once(&self.main).chain(favourite), lists).ok()
        });
        watch.as_ref().map(Watch::as_fd)
    }

    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; 3] {
        let favourite = self.favourite.as_ref().map(|favourite| favourite.socket.as_fd());
        [Some(self.main.as_fd()), favourite, self.lists.as_ref().map(|lists| lists.as_fd())]
    }

    fn full_descriptor(&self) -> usize {
        self.full_descriptor
    }

    fn note_ready(&mut self, descriptor: usize) {
        match (&mut self.favourite, &mut self.lists) {
            (_, Some(lists)) if descriptor == LISTS => lists.note_ready(),
            (Some(favourite), _) if descriptor != LISTS => favourite.note_ready(descriptor == MAIN),
            _ => {}
        }
    }

    fn lists(&self) -> u16 {
        self.lists.as_ref().map_or(0, |lists| lists.mask())
    }

    fn note_list(&mut self, list: u8, in_use: bool) {
        if let Some(lists) = &mut self.lists {
            lists.note_in_use(list, in_use);
        }
    }

    fn burst_bytes_max(&self) -> usize {
        DATAGRAM_BYTES_MAX
    }

    fn counters(&self) -> LinkCounters {
        self.counters
    }

    fn receive_buffer_bytes(&self) -> usize {
        self.receive_buffer_bytes
    }
}

impl UdpLink {
    /// Receives where something is most likely to be.
    #[inline(always)]
    fn receive_somewhere(
        &mut self,
        inbox: &mut Inbox,
        guide: Option<&mut (dyn Guide + '_)>,
    ) -> Result<usize, ReceiveError> {
        inbox.clear();
        if let Some(Some(watch)) = self.watch.get_mut()
            && watch.note_look()
        {
            self.note_room(false, true);
            self.note_room(true, true);
        }
        let counters = &mut self.counters;
        match self.lists.as_mut().map_or(Order::Without, |lists| lists.next_look(counters)) {
            Order::Without => drop(self.receive_at_either(inbox, guide)?),
            Order::ListsFirst => self.receive_by_lists(inbox, guide, true)?,
            Order::ListsLast => self.receive_by_lists(inbox, guide, false)?,
        }
        self.counters.packets_received += inbox.len() as u64;
        inbox.note_drops(self.counters.kernel_drops);
        Ok(inbox.len())
    }

    fn send_error(&self, errno: Errno, burst: &Burst<'_>) -> SendError {
        match errno {
            Errno::MSGSIZE => SendError::TooLarge { bytes: burst.packet_bytes_max() },
            Errno::AFNOSUPPORT => SendError::WrongFamily { to: burst.to, local: self.local },
            errno => SendError::System { to: burst.to, errno },
        }
    }
}

impl std::fmt::Debug for UdpLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UdpLink")
            .field("local", &self.local)
            .field("segmentation", &self.segmentation)
            .field("coalescing", &self.coalescing)
            .field("counters", &self.counters)
            .finish_non_exhaustive()
    }
}

/// Receives one datagram from the only one who can have sent it; false if nothing was there.
#[inline]
fn receive_plain(
    socket: &mut Socket,
    counters: &mut LinkCounters,
    inbox: &mut Inbox,
    length: LengthField,
    from: SocketAddr,
) -> bool {
    counters.system_calls += 1;
    let slot = inbox.first_slot();
    match rustix::net::recv(socket.as_fd(), &mut *slot, RecvFlags::DONTWAIT) {
        Ok((len, _)) => {
            // One that lies about its length only spoils what came with it, as if that were lost.
            let segment = length.read(&slot[..len]).unwrap_or(len);
            inbox.note_arrival(0, from, len, segment);
            socket.pace.note_single(len as u64);
            counters.bytes_received += len as u64;
            true
        }
        Err(errno) => {
            // The network may tell a connected socket of anything, and does so once.
            socket.is_empty = errno == Errno::AGAIN;
            counters.soft_errors += u64::from(!matches!(errno, Errno::AGAIN | Errno::INTR));
            socket.pace.note_empty(1);
            false
        }
    }
}

/// Receives once, into as many slots as seem worth it; false if nothing was there.
fn receive_at(
    socket: &mut Socket,
    incoming: &mut Incoming,
    counters: &mut LinkCounters,
    inbox: &mut Inbox,
    mut guide: Option<&mut (dyn Guide + '_)>,
    is_soft: impl Fn(Errno) -> bool,
) -> Result<bool, Errno> {
    socket.is_empty = false;
    for _ in 0..SOFT_ERRORS_MAX {
        counters.system_calls += 1;
        let offered = socket.pace.offer(inbox.datagrams());
        let landed = match guide.as_deref_mut().filter(|_| socket.expects_batches()) {
            Some(guide) => receive_landing(socket, incoming, counters, inbox, guide),
            None => None,
        };
        let received = if let Some(landed) = landed {
            landed
        } else if offered == 1 {
            sys::receive_one(socket.as_fd(), inbox.first_slot()).map(|datagram| {
                socket.pace.note_single(datagram.len as u64);
                take_in(socket, counters, inbox, 0, &datagram);
            })
        } else {
            receive_many(socket, incoming, counters, inbox, offered)
        };
        match received {
            Ok(()) => return Ok(true),
            Err(Errno::AGAIN) => {
                socket.is_empty = true;
                socket.pace.note_empty(offered);
                return Ok(false);
            }
            Err(Errno::INTR) => {}
            Err(errno) if is_soft(errno) => {
                counters.soft_errors += 1;
                // A second error may wait behind the first, and would be the answer to a send.
                let _ = sockopt::socket_error(&*socket);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(false)
}

/// Receives a batch where its payloads are expected; `None` if it is to be received aside.
#[inline(never)]
fn receive_landing(
    socket: &mut Socket,
    incoming: &mut Incoming,
    counters: &mut LinkCounters,
    inbox: &mut Inbox,
    guide: &mut dyn Guide,
) -> Option<Result<(), Errno>> {
    let (mut advice, mut looked) = (guide.advise(inbox.way(), None), false);
    if matches!(advice, Advice::Look) {
        let mut head = [0; LOOKED_AT];
        match rustix::net::recv(socket.as_fd(), &mut head, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok((len, _)) => (advice, looked) = (guide.advise(inbox.way(), Some(&head[..len])), true),
            // The only call, which is counted, and nothing was seen.
            Err(errno) => return Some(Err(errno)),
        }
        counters.system_calls += 1;
        counters.looks_ahead += 1;
    }
    let Advice::Land(mut landing) = advice else { return None };
    let (cut, place) = (landing.cut, landing.place.len());
    let (heads, spill) = inbox.for_landing(&landing);
    let received = incoming.receive_landing(socket.as_fd(), &mut landing, heads, spill);
    Some(received.map(|datagram| {
        let Datagram { len: bytes, segment, .. } = datagram;
        socket.pace.note_single(bytes as u64);
        if let Some(from) = accept(socket, counters, &datagram) {
            inbox.note_landed(Landed { from, cut, place, bytes, segment: segment.max(1), looked });
        }
    }))
}

/// Receives into `offered` slots, more than one. Apart, so that it does not weigh on single packets.
#[inline(never)]
fn receive_many(
    socket: &mut Socket,
    incoming: &mut Incoming,
    counters: &mut LinkCounters,
    inbox: &mut Inbox,
    offered: usize,
) -> Result<(), Errno> {
    let count = incoming.receive(socket.as_fd(), offered, inbox.slots())?;
    let before = counters.bytes_received;
    for slot in 0..count {
        take_in(socket, counters, inbox, slot, &incoming.datagram(slot));
    }
    socket.pace.note_many(offered, count, counters.bytes_received - before);
    Ok(())
}

/// Puts what was received into a slot on the inbox's list.
#[inline(always)]
fn take_in(socket: &mut Socket, counters: &mut LinkCounters, inbox: &mut Inbox, slot: usize, datagram: &Datagram) {
    if let Some(from) = accept(socket, counters, datagram) {
        inbox.note_arrival(slot, from, datagram.len, datagram.segment);
    }
}

/// Counts a datagram; who sent it, unless it is of no use.
#[inline(always)]
fn accept(socket: &mut Socket, counters: &mut LinkCounters, datagram: &Datagram) -> Option<SocketAddr> {
    if let Some(drops) = datagram.drops {
        counters.kernel_drops += socket.note_drops(drops);
    }
    socket.note_batch(datagram.len, datagram.segment);
    match datagram.from {
        _ if datagram.truncated => counters.truncated += 1,
        None => counters.soft_errors += 1,
        Some(from) => {
            counters.bytes_received += datagram.len as u64;
            return Some(unmapped(from));
        }
    }
    None
}

/// Bursts cut into what the kernel takes as one message each, from a place in them on.
#[derive(Clone, Debug)]
struct Messages<'a> {
    bursts: &'a [Burst<'a>],
    burst: usize,
    offset: usize,
    segmentation: bool,
    local: SocketAddr,
    limit: usize,
}

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        self.limit = self.limit.checked_sub(1)?;
        while self.bursts.get(self.burst)?.bytes.is_empty() {
            self.burst += 1;
        }
        let burst = &self.bursts[self.burst];
        assert!(burst.segment > 0, "a burst of {} bytes with segments of 0 bytes", burst.bytes.len());
        let packets = if self.segmentation { (DATAGRAM_BYTES_MAX / burst.segment).clamp(1, SEGMENTS_MAX) } else { 1 };
        let left = &burst.bytes[self.offset..];
        // A segment may be as long as the caller likes where the burst is shorter.
        let bytes = &left[..left.len().min(packets.saturating_mul(burst.segment))];
        self.offset += bytes.len();
        if self.offset == burst.bytes.len() {
            (self.burst, self.offset) = (self.burst + 1, 0);
        }
        Some(Message { to: mapped(burst.to, self.local), bytes, segment: burst.segment })
    }
}

/// Errors that mean no more than a lost packet. A network may lose packets, so they must not stop a
/// link that has other peers to talk to.
fn is_soft(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::HOSTDOWN | Errno::NETDOWN | Errno::PERM
    )
}

/// Errors that mean that there is no room for now.
fn is_full(errno: Errno) -> bool {
    matches!(errno, Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM)
}

/// Errors by which a kernel or device refuses to segment. They have other causes too.
fn may_be_refusal(errno: Errno) -> bool {
    matches!(errno, Errno::IO | Errno::INVAL | Errno::NOPROTOOPT | Errno::OPNOTSUPP)
}

/// An IPv4 address in the form that a socket of IPv6 wants.
fn mapped(to: SocketAddr, local: SocketAddr) -> SocketAddr {
    match (to, local) {
        (SocketAddr::V4(to), SocketAddr::V6(_)) => SocketAddrV6::new(to.ip().to_ipv6_mapped(), to.port(), 0, 0).into(),
        _ => to,
    }
}

/// The IPv4 address that a socket of IPv6 tells in its own form.
fn unmapped(from: SocketAddr) -> SocketAddr {
    match from {
        SocketAddr::V6(address) => match address.ip().to_ipv4_mapped() {
            Some(ip) => SocketAddr::new(ip.into(), address.port()),
            None => from,
        },
        SocketAddr::V4(_) => from,
    }
}
