//! Brings the two ends of connections together.
//!
//! One process on the host, started by whoever first runs a program with lanes, answers claims. Whichever end of a
//! connection comes second completes the pair; until then the first is told to wait, and asks again when it has more to
//! do. The registry sees no byte of any connection, and its death costs only new pairs.

use crate::claim::{
    BOARD_AT, BOARD_BYTES, BOARD_WORDS, MESSAGE_BYTES, Refusal, Reply, Request, address, connect_by_name, receive,
    socket,
};
use crate::layout::{CAPACITY_LEAST, EndState, LANES, Lane, LaneRegion, REGION_BYTES, Side, UNBORN};
pub use highwire_mem::keep_descriptors_from_programs;
use highwire_mem::{
    Credentials, OwnMemory, OwnRegion, RegionError, SharedMemory, TcpState, bound_device, network_namespace,
    socket_names,
};
use refuge::Refuge;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::collections::{BTreeSet, HashMap};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// Why a registry could not begin.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Another one is there already, which is as good.
    #[error("a registry of this user is running already")]
    Running,
    /// The kernel did not allow it.
    #[error("the registry could not listen: {0}")]
    Listen(#[source] Errno),
    /// There is no memory for it.
    #[error("the registry could not begin: {0}")]
    Memory(#[from] RegionError),
}

/// What all lanes together may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Lanes at a time.
    pub lanes: usize,
    /// Bytes by which all lanes together may grow beyond what they start with.
    pub growth: u64,
    /// Without a lane or a claim for so long, it ends.
    pub idle: Duration,
}

impl Default for Limits {
    /// 1,024 lanes of 128 KiB and 96 MiB to grow: below 256 MiB in all.
    fn default() -> Limits {
        Limits { lanes: 1024, growth: 96 << 20, idle: Duration::from_secs(30) }
    }
}

/// One end of a connection, by the names that the kernel gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct End {
    namespace: u64,
    local: SocketAddr,
    remote: SocketAddr,
}

impl End {
    /// Word of the board that tells of it; others may share it.
    fn place(self) -> usize {
        (usize::from(self.local.port()) * 31 + usize::from(self.remote.port())) % BOARD_WORDS
    }

    fn mirrored(self) -> End {
        End { local: self.remote, remote: self.local, ..self }
    }
}

/// A process that claims, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Caller {
    process: u32,
    user: u32,
}

/// A socket, as the kernel tells it from others.
#[derive(Clone, Copy, Debug)]
struct Socket {
    /// The kernel's number of it, which is never used again.
    cookie: u64,
    /// The device that it is bound to; zero for none.
    device: u32,
}

#[derive(Debug)]
struct Claim {
    caller: Caller,
    /// Other processes that asked for the same socket before there was a lane. Each of them sends and receives by TCP, and
    /// would not be among the holders of a lane that the caller gets.
    others: Vec<u32>,
    socket: Socket,
    place: Option<Place>,
    asked: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    region: usize,
    lane: usize,
    side: Side,
}

struct Region {
    /// Never used again, so that nobody takes the memory that he has mapped for this one.
    number: u64,
    memory: SharedMemory,
    descriptor: OwnedFd,
    /// Which processes it was given to.
    members: [Caller; 2],
    /// Whose processes ever had it. What they do with the descriptor nobody can know: others of theirs may have it too.
    users: BTreeSet<u32>,
    /// Ends that the lanes were given to.
    lanes: [Option<[End; 2]>; LANES],
    /// Ends of which the last sweep found no holder, by lane and side.
    absent: BTreeSet<(usize, usize)>,
    /// What it may grow by when all its lanes are new.
    spare: u64,
}

impl Region {
    fn lane(&self, index: usize) -> Option<Lane<'_>> {
        LaneRegion::own(&self.memory).lane(index)
    }

    fn is_unused(&self) -> bool {
        self.lanes.iter().all(Option::is_none)
    }

    /// Whether all who have it mapped are dead or among these.
    fn is_left_to(&self, members: &[Caller]) -> bool {
        self.is_unused() && self.members.iter().all(|member| members.contains(member) || !is_alive(member.process))
    }

    /// Whether nobody of another user has ever seen it.
    fn is_of_users(&self, members: [Caller; 2]) -> bool {
        self.users.iter().all(|user| members.iter().any(|member| member.user == *user))
    }
}

/// The registry of one user in one network namespace.
pub struct Registry {
    listener: OwnedFd,
    limits: Limits,
    /// Number of the next region; the first is random, so that those of another registry have others.
    number: u64,
    claims: HashMap<End, Claim>,
    regions: Vec<Region>,
    callers: Vec<(OwnedFd, Instant)>,
    board: OwnRegion,
    lanes_used: usize,
    growth_left: u64,
    /// The network namespace that this process can ask the kernel about.
    namespace: Option<u64>,
    /// Where it listens instead, while another user has its name.
    _refuge: Option<Refuge>,
}

/// Whether the name of a user's registry is that user's. One that is busy answers soon; another user's may never.
fn is_of(user: u32) -> bool {
    let until = Instant::now() + BUSY;
    loop {
        match connect_by_name(user) {
            Err(Errno::AGAIN) if Instant::now() < until => std::thread::sleep(BUSY / 20),
            Err(Errno::PERM | Errno::AGAIN) => return false,
            // There, or gone this moment: the caller tries again.
            _ => return true,
        }
    }
}

impl Registry {
    /// Takes the name of this user's registry.
    pub fn listen(limits: Limits) -> Result<Registry, RegistryError> {
        let user = rustix::process::geteuid().as_raw();
        let named = Registry::listen_at(&address(user).map_err(RegistryError::Listen)?, limits);
        if !matches!(named, Err(RegistryError::Running)) || is_of(user) {
            return named;
        }
        let listener = socket().map_err(RegistryError::Listen)?;
        let refuge = Refuge::bind(&listener, user)?;
        let mut registry = Registry::on(listener, limits)?;
        registry._refuge = Some(refuge);
        Ok(registry)
    }

    fn listen_at(name: &SocketAddrUnix, limits: Limits) -> Result<Registry, RegistryError> {
        let listener = socket().map_err(RegistryError::Listen)?;
        rustix::net::bind(&listener, name).map_err(|errno| match errno {
            Errno::ADDRINUSE => RegistryError::Running,
            other => RegistryError::Listen(other),
        })?;
        Registry::on(listener, limits)
    }

    /// On a socket that has its name.
    fn on(listener: OwnedFd, limits: Limits) -> Result<Registry, RegistryError> {
        rustix::net::listen(&listener, 128).map_err(RegistryError::Listen)?;
        let mut random = [0; 8];
        highwire_mem::fill_random(&mut random);
        let number = u64::from_le_bytes(random);
        let board = OwnRegion::create(BOARD_BYTES)?;
        // No word is what it was on the board of the registry before: who waited for that one asks this one.
        for place in 0..BOARD_WORDS {
            board.memory().store64(BOARD_AT + 8 * place, number);
        }
        Ok(Registry {
            namespace: network_namespace(listener.as_fd()).ok(),
            listener,
            limits,
            number,
            claims: HashMap::new(),
            regions: Vec::new(),
            callers: Vec::new(),
            board,
            lanes_used: 0,
            growth_left: limits.growth,
            _refuge: None,
        })
    }

    /// Answers claims until nobody has a lane or waits for one.
    pub fn serve(&mut self) {
        highwire_mem::run_like_anybody();
        let mut busy = Instant::now();
        let mut swept = Instant::now();
        loop {
            self.wait();
            let now = Instant::now();
            if self.accept(now) | self.answer(now) {
                busy = now;
            }
            if now.duration_since(swept) >= SWEEP {
                self.sweep(now);
                swept = now;
            }
            if !self.claims.is_empty() || !self.regions.iter().all(Region::is_unused) {
                busy = now;
            } else if now.duration_since(busy) > self.limits.idle {
                return;
            }
        }
    }

    fn wait(&self) {
        let mut wanted = Vec::with_capacity(1 + self.callers.len());
        wanted.push(PollFd::new(&self.listener, PollFlags::IN));
        wanted.extend(self.callers.iter().map(|(caller, _)| PollFd::new(caller, PollFlags::IN)));
        // An idle registry looks around now and then.
        let limit = rustix::event::Timespec { tv_sec: SWEEP.as_secs().cast_signed(), tv_nsec: 0 };
        // Interrupted or not: the next look tells.
        let _ = rustix::event::poll(&mut wanted, Some(&limit));
    }

    fn accept(&mut self, now: Instant) -> bool {
        let mut any = false;
        while self.callers.len() < CALLERS_MAX {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let Ok(caller) = rustix::net::accept_with(&self.listener, flags) else { break };
            self.callers.push((caller, now));
            any = true;
        }
        any
    }

    fn answer(&mut self, now: Instant) -> bool {
        let mut any = false;
        for (caller, came) in std::mem::take(&mut self.callers) {
            let mut message = [0; MESSAGE_BYTES];
            match receive(caller.as_fd(), &mut message) {
                Ok((0, _)) => {}
                Ok((bytes, proof)) => {
                    any = true;
                    let reply = self.decide(caller.as_fd(), &message[..bytes], proof, now);
                    self.reply(caller.as_fd(), &reply);
                }
                Err(Errno::AGAIN | Errno::INTR) if now.duration_since(came) < PATIENCE => {
                    self.callers.push((caller, came));
                }
                Err(_) => {}
            }
        }
        any
    }

    fn reply(&self, caller: BorrowedFd<'_>, reply: &Reply) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors: [BorrowedFd<'_>; 1];
        if let Reply::Paired { region, .. } = reply {
            let Some(region) = self.regions.iter().find(|known| known.number == *region) else { return };
            descriptors = [region.descriptor.as_fd()];
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        } else if let Reply::Waiting { .. } = reply {
            descriptors = [self.board.as_fd()];
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        let message = reply.encode();
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        // One that has gone away asks again or does not.
        let _ = rustix::net::sendmsg(caller, &[IoSlice::new(&message)], &mut ancillary, flags);
    }

    fn decide(&mut self, caller: BorrowedFd<'_>, message: &[u8], proof: Option<OwnedFd>, now: Instant) -> Reply {
        let (Some(request), Some(proof)) = (Request::decode(message), proof) else {
            return Reply::Refused(Refusal::Malformed);
        };
        let Ok(credentials) = Credentials::of_peer(caller) else { return Reply::Refused(Refusal::Malformed) };
        // Holders of a lane are told by process number, which must mean the same to all; and users that have no number
        // here cannot be told from each other, so that one might get a region of another's.
        let caller = match credentials {
            Credentials { pid: Some(process), uid: Some(user), .. } if process == request.process => {
                Caller { process, user }
            }
            _ => return Reply::Refused(Refusal::OtherNamespace),
        };
        let Some((end, socket)) = self.identify(proof.as_fd()) else { return Reply::Refused(Refusal::NotConnected) };
        // The program may close its descriptor any moment, and this copy must not keep the connection open.
        drop(proof);
        self.claim(end, socket, caller, now)
    }

    /// The names of a connection, and its socket. A new claim is for a connection that is open both ways. A
    /// socket that has a lane is known by its number in every state: a program may come to it after a FIN or a reset, when
    /// the kernel may no longer know its peer, and what lies in the lane is the program's to read.
    fn identify(&self, socket: BorrowedFd<'_>) -> Option<(End, Socket)> {
        use rustix::net::sockopt;
        if sockopt::socket_type(socket).ok()? != SocketType::STREAM {
            return None;
        }
        let state = TcpState::of(socket).ok()?;
        let cookie = sockopt::socket_cookie(socket).ok()?;
        let namespace = network_namespace(socket).ok()?;
        if state != TcpState::Established {
            let known = |(end, claim): &(&End, &Claim)| {
                claim.socket.cookie == cookie && end.namespace == namespace && claim.place.is_some()
            };
            return self.claims.iter().find(known).map(|(end, claim)| (*end, claim.socket));
        }
        let [local, remote] = socket_names(socket).map(|name| name.map(plain));
        let end = End { namespace, local: local?, remote: remote? };
        // One that is connected to itself has no other end.
        let device = bound_device(socket).ok()?;
        (end.local != end.remote).then_some((end, Socket { cookie, device }))
    }

    fn claim(&mut self, end: End, socket: Socket, caller: Caller, now: Instant) -> Reply {
        let mut place = None;
        if let Some(claim) = self.claims.get_mut(&end) {
            if claim.socket.cookie == socket.cookie {
                claim.asked = now;
                claim.note_caller(caller);
                place = claim.place;
            } else if let Some(old) = self.claims.remove(&end) {
                self.leave(old.place);
            }
        }
        if place.is_none() {
            if self.claims.len() >= CLAIMS_MAX {
                return Reply::Refused(Refusal::Exhausted);
            }
            let fresh = || Claim { caller, others: Vec::new(), socket, place: None, asked: now };
            self.claims.entry(end).or_insert_with(fresh);
            match self.pair(end, caller) {
                Ok(found) => place = found,
                Err(refusal) => return Reply::Refused(refusal),
            }
        }
        match place {
            Some(Place { region, lane, side }) => {
                let region = &mut self.regions[region];
                // A connection may have been passed on, to another user's process too.
                region.users.insert(caller.user);
                Reply::Paired { region: region.number, lane, side }
            }
            None => {
                let value = self.board.memory().load64(BOARD_AT + 8 * end.place());
                Reply::Waiting { place: end.place() as u16, value }
            }
        }
    }

    /// Gives a lane to an end whose other end has come before.
    fn pair(&mut self, end: End, caller: Caller) -> Result<Option<Place>, Refusal> {
        let mirrored = end.mirrored();
        let Some(other) = self.claims.get(&mirrored) else { return Ok(None) };
        // A claim of a socket that is gone, whose names the kernel has given to this connection: one that was paired already,
        // with another socket than this new one, or whose process or socket is no longer there. Paired with it, this end
        // would have a lane that its real other end never comes to.
        if other.place.is_some()
            || !is_alive(other.caller.process)
            || self.is_held(mirrored, other.socket) == Some(false)
        {
            let place = other.place;
            self.claims.remove(&mirrored);
            self.leave(place);
            return Ok(None);
        }
        let is_shared = |end| self.claims.get(end).is_some_and(Claim::is_shared);
        if is_shared(&mirrored) || is_shared(&end) {
            return Ok(None);
        }
        let members = [other.caller, caller];
        let (region, lane) = self.free_lane(members).ok_or(Refusal::Exhausted)?;
        self.regions[region].lanes[lane] = Some([mirrored, end]);
        self.lanes_used += 1;
        for (whose, side) in [(mirrored, Side::First), (end, Side::Second)] {
            if let Some(claim) = self.claims.get_mut(&whose) {
                claim.place = Some(Place { region, lane, side });
            }
        }
        // The one that waits learns it there.
        change(self.board.memory(), mirrored);
        Ok(Some(Place { region, lane, side: Side::Second }))
    }

    /// Whether a descriptor of this socket is open anywhere, as the kernel says. Of other network namespaces it says nothing.
    fn is_held(&self, end: End, socket: Socket) -> Option<bool> {
        let here = self.namespace == Some(end.namespace);
        here.then(|| held::is_held(end.local, end.remote, socket.cookie, socket.device).ok()).flatten()
    }

    fn leave(&mut self, place: Option<Place>) {
        let Some(Place { region, lane, side }) = place else { return };
        if let Some(lane) = self.regions.get(region).and_then(|region| region.lane(lane)) {
            lane.set_state(side, EndState::Gone);
        }
    }

    fn free_lane(&mut self, members: [Caller; 2]) -> Option<(usize, usize)> {
        if self.lanes_used >= self.limits.lanes {
            // Whether processes live is asked once a second, and not for each of many claims that find no lane.
            self.take_back();
            if self.lanes_used >= self.limits.lanes {
                return None;
            }
        }
        let same = |region: &Region| {
            region.is_of_users(members) && (region.members == members || region.members == [members[1], members[0]])
        };
        let free = |region: &Region| region.lanes.iter().position(Option::is_none);
        if let Some(found) = self
            .regions
            .iter()
            .enumerate()
            .find_map(|(index, region)| Some((index, free(region).filter(|_| same(region))?)))
        {
            return Some(found);
        }
        // One that nobody uses any more can be given to others of the same users.
        let fit = |region: &Region| region.is_left_to(&members) && region.is_of_users(members);
        if let Some(index) = self.regions.iter().position(fit) {
            self.regions[index].members = members;
            self.regions[index].users.extend(members.map(|member| member.user));
            return Some((index, 0));
        }
        // Of one whose members are dead only the place and what it may grow by.
        let left = self.regions.iter().position(|region| region.is_left_to(&[]));
        let returned = left.map_or(0, |index| self.regions[index].spare);
        let spare = (self.growth_left + returned).min(GROWTH_OF_REGION);
        let region = Region::create(self.number, members, spare).ok()?;
        self.number = self.number.wrapping_add(1);
        self.growth_left = self.growth_left + returned - spare;
        if let Some(index) = left {
            self.regions[index] = region;
            return Some((index, 0));
        }
        self.regions.push(region);
        Some((self.regions.len() - 1, 0))
    }

    /// Takes lanes back whose ends are both gone, and forgets claims of the dead.
    fn sweep(&mut self, now: Instant) {
        let board = self.board.memory();
        self.claims.retain(|end, claim| {
            if claim.place.is_some() {
                return true;
            }
            let before = claim.others.len();
            claim.others.retain(|other| is_alive(*other));
            if claim.others.len() < before {
                change(board, *end);
            }
            let (alive, fresh) = (is_alive(claim.caller.process), now.duration_since(claim.asked) <= CLAIM_LIFE);
            if alive && !fresh {
                // It asks again when it next has something to do, or the other end would find nobody.
                change(board, *end);
            }
            alive && fresh
        });
        self.find_gone();
        self.take_back();
    }

    /// Ends that no process has any more: two sweeps in a row have found no holder. The kernel forgets the names of a socket
    /// that was reset, so that one in a message between two processes is found nowhere until the second of them asks for it.
    fn find_gone(&mut self) {
        for number in 0..self.regions.len() {
            let region = &self.regions[number];
            let mut absent = BTreeSet::new();
            for (index, ends) in region.lanes.iter().enumerate() {
                let (Some(ends), Some(lane)) = (ends, region.lane(index)) else { continue };
                for (end, side) in ends.iter().zip([Side::First, Side::Second]) {
                    if lane.state(side) == EndState::Gone || self.has_holder(*end, lane, side) {
                        continue;
                    }
                    if region.absent.contains(&(index, side.number())) {
                        lane.set_state(side, EndState::Gone);
                    } else {
                        absent.insert((index, side.number()));
                    }
                }
            }
            self.regions[number].absent = absent;
        }
    }

    fn has_holder(&self, end: End, lane: Lane<'_>, side: Side) -> bool {
        if lane.holders(side).others(0).any(is_alive) {
            return true;
        }
        // One that has not come, and whose other end is gone, will not come any more.
        let late = lane.state(side) == EndState::Empty && lane.state(side.other()) == EndState::Gone;
        let Some(claim) = self.claims.get(&end).filter(|_| !late) else { return false };
        // A descriptor may be with a process that is not known here, or in a message on its way to one; and the process that
        // claimed it may have closed it without a word, while a child could have had it.
        self.is_held(end, claim.socket).unwrap_or_else(|| is_alive(claim.caller.process))
    }

    /// Lanes whose ends are both gone.
    fn take_back(&mut self) {
        for (number, region) in self.regions.iter_mut().enumerate() {
            for index in 0..LANES {
                let (Some(ends), Some(lane)) = (region.lanes[index], region.lane(index)) else { continue };
                if [Side::First, Side::Second].iter().any(|side| lane.state(*side) != EndState::Gone) {
                    continue;
                }
                lane.clear();
                region.lanes[index] = None;
                region.absent.retain(|(absent, _)| *absent != index);
                self.lanes_used -= 1;
                for end in ends {
                    let here =
                        |claim: &Claim| claim.place.is_some_and(|place| (place.region, place.lane) == (number, index));
                    if self.claims.get(&end).is_some_and(here) {
                        self.claims.remove(&end);
                    }
                }
            }
            if region.is_unused() {
                LaneRegion::prepare(&region.memory, region.spare);
            }
        }
    }
}

impl Region {
    fn create(number: u64, members: [Caller; 2], spare: u64) -> Result<Region, RegionError> {
        let (memory, descriptor) = SharedMemory::create(REGION_BYTES)?;
        LaneRegion::prepare(&memory, spare);
        let users = members.map(|member| member.user).into();
        Ok(Region { number, memory, descriptor, members, users, lanes: [None; LANES], absent: BTreeSet::new(), spare })
    }
}

impl Claim {
    fn note_caller(&mut self, caller: Caller) {
        let before = std::mem::replace(&mut self.caller, caller).process;
        self.others.retain(|other| *other != caller.process);
        // More are as good as these.
        if self.place.is_none() && before != caller.process && self.others.len() < OTHERS_MAX {
            self.others.push(before);
        }
    }

    fn is_shared(&self) -> bool {
        self.others.iter().any(|other| is_alive(*other))
    }
}

/// Changes the word of the board that an end looks at.
fn change(board: &OwnMemory, end: End) {
    let word = BOARD_AT + 8 * end.place();
    board.store64(word, board.load64(word).wrapping_add(1));
}

/// An IPv4 address is the same connection's whichever family its socket has.
fn plain(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4),
        v4 => v4,
    };
    SocketAddr::new(ip, address.port())
}

fn is_alive(process: u32) -> bool {
    // A number of the region may be anything; of groups and of everybody the kernel is not asked.
    let number = i32::try_from(process).ok().and_then(rustix::process::Pid::from_raw);
    process == UNBORN || number.is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

const SWEEP: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(1);
const CLAIM_LIFE: Duration = Duration::from_secs(60);
/// How long one that has more callers than may wait is taken for a registry.
const BUSY: Duration = Duration::from_millis(200);
const CALLERS_MAX: usize = 256;
const CLAIMS_MAX: usize = 65_536;
const OTHERS_MAX: usize = 16;
/// What the first regions may grow by; later ones get what is left.
const GROWTH_OF_REGION: u64 = 16 << 20;
const _: () = assert!(CAPACITY_LEAST * 2 * 1024 + (96 << 20) < 256 << 20);

mod held;
mod refuge;

#[cfg(test)]
mod tests;
