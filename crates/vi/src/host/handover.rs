//! Connecting and accepting: the order in which two processes come to share memory.
//!
//! ```text
//! connecting side                          listener
//!     connect(2)  ───────────────────────▶ accept(2), credentials checked
//!     credentials checked ◀── greeting ───
//!     block prepared ─────── connect ────▶ descriptors checked, block prepared
//!     descriptors checked ◀─── accept ────
//! ```
//!
//! The socket of the first VI between two Nics stays, as the pair's; those of later VIs are closed.

use crate::bells::{BellHome, BellOwner, QueueShared};
use crate::config::{Config, ViOptions};
use crate::error::ConnectError;
use crate::host::Parts;
use crate::host::member::{STATE_CLOSED, STATE_OPEN, state_word};
use crate::host::peer::{Introduction, Peer};
use crate::host::rendezvous::{Half, MESSAGE_BYTES, Name, Refusal, Rendezvous, random_name};
use crate::nic::NicInner;
use crate::vi::Vi;
use highwire_mem::{
    BellIndex, BellPage, Block, BlockShape, Courier, CourierError, Credentials, Extents, LAYOUT_VERSION, OwnRegion,
    PeerRegion, ProcessIdentity, RegionError, deadline, heavy_barrier_available,
};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, TryLockError};
use std::time::{Duration, Instant};

/// How often a caller calls again that was overtaken by others, and after which pause.
const OVERTAKEN_MOST: u32 = 50;
const OVERTAKEN_PAUSE: Duration = Duration::from_millis(10);
/// The other side may answer "unknown pair" when it has just let go of it; a new pair is made then.
const TRIES: usize = 3;
/// Slot indexes have 62 bits in the release log, and a connection is to last.
pub(crate) const FIRST_INDEX_MAX: u64 = 1 << 61;
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// How often whoever waits for its turn looks.
const TURN_LOOK: Duration = Duration::from_millis(1);

/// A bell of ours, given back unless the VI comes about.
struct BellLease {
    queue: Arc<QueueShared>,
    home: Arc<BellHome>,
    page: Option<Arc<OwnedFd>>,
    index: Option<BellIndex>,
}

impl BellLease {
    fn take(queue: &Arc<QueueShared>, owner: BellOwner) -> Result<BellLease, ConnectError> {
        let (home, index) = queue.take_bell(owner)?;
        Ok(BellLease { queue: queue.clone(), page: home.page(), home, index: Some(index) })
    }

    fn number(&self) -> u32 {
        self.index.map_or(0, BellIndex::number)
    }
}

impl Drop for BellLease {
    fn drop(&mut self) {
        if let Some(index) = self.index.take() {
            self.queue.return_bell(&self.home, index);
        }
    }
}

/// A block of a pair that exists already, given back unless the VI comes about.
struct BlockLease {
    peer: Option<Arc<Peer>>,
    block: Block,
    serial: u32,
    /// The other side was told of it, and may read it.
    told: bool,
}

impl Drop for BlockLease {
    fn drop(&mut self) {
        let Some(peer) = self.peer.take() else { return };
        if self.told {
            // A VI may have come about there, which would read what the next one writes: the block is not used again.
            self.block.set_state(peer.ours(), state_word(self.serial, STATE_CLOSED));
        } else {
            peer.return_block(self.block);
        }
    }
}

/// Our half before the other side answers: either an existing pair, or a region for a new one.
enum Side {
    Known(Arc<Peer>),
    New { own: OwnRegion, extents: Extents },
}

impl Side {
    fn new(config: &Config) -> Result<Side, ConnectError> {
        let own = OwnRegion::create(config.region_bytes)?;
        Ok(Side::New { own, extents: Peer::new_extents(config.region_bytes) })
    }

    fn take_block(&mut self, shape: BlockShape) -> Result<(Block, bool), ConnectError> {
        let taken = match self {
            Side::Known(peer) => peer.take_block(shape),
            Side::New { own, extents } => {
                let taken = extents.take(shape.bytes());
                taken.and_then(|(at, fresh)| Some((Block::new(at as u64, shape, own.memory().len())?, fresh)))
            }
        };
        taken.ok_or(ConnectError::NoRoom("the region for this peer is full; raise region_bytes"))
    }

    fn memory(&self) -> &highwire_mem::OwnMemory {
        match self {
            Side::Known(peer) => peer.ours(),
            Side::New { own, .. } => own.memory(),
        }
    }
}

/// Our block for a new VI, ready for the other side to look at.
fn prepare(side: &mut Side, shape: BlockShape, first_index: u64, serial: u32) -> Result<BlockLease, ConnectError> {
    let (block, fresh) = side.take_block(shape)?;
    block.prepare(side.memory(), first_index, fresh);
    block.set_state(side.memory(), state_word(serial, STATE_OPEN));
    let peer = if let Side::Known(peer) = side { Some(peer.clone()) } else { None };
    Ok(BlockLease { peer, block, serial, told: false })
}

/// Descriptors in the order of the protocol.
fn descriptors<'a>(side: &'a Side, lease: &'a BellLease, new_page: bool) -> Vec<BorrowedFd<'a>> {
    let mut list = Vec::with_capacity(3);
    if let Side::New { own, .. } = side {
        list.push(own.as_fd());
    }
    if new_page && let Some(page) = &lease.page {
        list.push(page.as_fd());
        list.push(lease.home.wire.as_fd());
    }
    list
}

/// What the other side's half brought, taken out of its descriptors.
struct Theirs {
    region: Option<PeerRegion>,
    page: Option<BellPage>,
}

fn adopt(
    half: &Half,
    descriptors: Vec<OwnedFd>,
    config: &Config,
    credentials: Credentials,
) -> Result<Theirs, RegionError> {
    let missing = || RegionError::WrongHeader;
    let mut descriptors = descriptors.into_iter();
    let region = match half.new_pair {
        true => Some(PeerRegion::adopt(
            descriptors.next().ok_or_else(missing)?,
            half.region_bytes,
            config.allotment(credentials.uid),
        )?),
        false => None,
    };
    let page = match half.new_page {
        true => {
            let page = descriptors.next().ok_or_else(missing)?;
            Some(BellPage::adopt(page, descriptors.next().ok_or_else(missing)?)?)
        }
        false => None,
    };
    Ok(Theirs { region, page })
}

/// Why the halves were not joined.
enum Unjoined {
    /// The other side's half cannot be.
    Theirs(Refusal),
    /// A system call failed on this side.
    Ours(CourierError),
}

impl From<Refusal> for Unjoined {
    fn from(refusal: Refusal) -> Unjoined {
        Unjoined::Theirs(refusal)
    }
}

impl From<std::io::Error> for Unjoined {
    fn from(error: std::io::Error) -> Unjoined {
        Unjoined::Ours(Errno::from_io_error(&error).unwrap_or(Errno::IO).into())
    }
}

/// Joins the two halves.
struct Joining<'a> {
    nic: &'a Arc<NicInner>,
    options: &'a ViOptions<'a>,
    side: Side,
    lease: BellLease,
    block: BlockLease,
    shape: BlockShape,
    first_index: u64,
    serial: u32,
    pair: Name,
    new_page: bool,
    credentials: Credentials,
    identity: Option<ProcessIdentity>,
}

impl Joining<'_> {
    fn half(&self) -> Half {
        Half {
            new_pair: matches!(self.side, Side::New { .. }),
            new_page: self.new_page,
            needs_fences: !heavy_barrier_available(),
            own_page: self.options.own_bell,
            nic: self.nic.name,
            pair: self.pair,
            region_bytes: self.side.memory().len() as u64,
            block_offset: self.block.block.offset() as u64,
            first_index: self.first_index,
            depth: self.shape.depth(),
            loans: self.shape.loans(),
            serial: self.serial,
            bell: self.lease.number(),
            queue: self.lease.queue.id,
        }
    }

    /// The peer, made if the pair is new, and everything that the VI needs of it.
    fn join(mut self, half: &Half, theirs: Theirs, courier: &Arc<Courier>) -> Result<(Vi, bool), Unjoined> {
        // Everything is judged before the pair is made, so that a refusal can still be sent.
        let their_bytes = match (&self.side, &theirs.region) {
            (Side::Known(peer), _) => peer.theirs().len(),
            (Side::New { .. }, Some(region)) => region.memory().len(),
            (Side::New { .. }, None) => return Err(Refusal::BadMemory.into()),
        };
        let peer_block = Block::new(half.block_offset, self.shape, their_bytes).ok_or(Refusal::Limits)?;
        let their_bell = BellIndex::new(half.bell).ok_or(Refusal::Limits)?;
        let known_page = match &self.side {
            Side::Known(peer) => !half.own_page && peer.page(half.queue).is_some(),
            Side::New { .. } => false,
        };
        if theirs.page.is_none() && !known_page {
            return Err(Refusal::BadMemory.into());
        }
        let peer = match self.side {
            Side::Known(peer) => peer,
            Side::New { own, extents } => {
                let pidfd = courier.pidfd(self.credentials).map_err(Unjoined::Ours)?;
                let made = Introduction {
                    pair: self.pair,
                    nic: half.nic,
                    credentials: self.credentials,
                    identity: self.identity,
                    fences: half.needs_fences,
                    own,
                    extents,
                    region: theirs.region.ok_or(Refusal::BadMemory)?,
                    courier: courier.clone(),
                    pidfd,
                };
                self.nic.introduce(made)?
            }
        };
        if !peer.note_block(peer_block.offset()) {
            return Err(Refusal::NoRoom.into());
        }
        let page = match theirs.page {
            // It goes with the VI.
            Some(page) if half.own_page => page,
            Some(page) if !peer.enter_page(half.queue, page.clone()) => return Err(Refusal::NoRoom.into()),
            Some(page) => page,
            None => peer.page(half.queue).ok_or(Refusal::BadMemory)?,
        };
        let rope = page.rope(their_bell);
        let new_page = self.new_page;
        if self.options.own_bell {
            self.lease.home.close_page();
        }
        let bell = self.lease.index.take().ok_or(Refusal::NoRoom)?;
        self.block.peer = None;
        let parts = Parts {
            peer,
            queue: self.lease.queue.clone(),
            home: self.lease.home.clone(),
            bell,
            block: self.block.block,
            peer_block,
            first_index: self.first_index,
            serial: self.serial,
            rope,
        };
        Ok((Vi::assemble(parts, self.nic, self.options), new_page))
    }
}

/// Connects to the listener at `path`.
pub(crate) fn connect(
    nic: &Arc<NicInner>,
    address: &str,
    path: &Path,
    options: &ViOptions<'_>,
) -> Result<Vi, ConnectError> {
    let timeout = options.connect_timeout.unwrap_or(nic.config.connect_timeout);
    let until = deadline(timeout);
    let turn = nic.turn_to_connect(path);
    let _turn = loop {
        match turn.try_lock() {
            Ok(turn) => break turn,
            Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
            Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(TURN_LOOK),
            Err(TryLockError::WouldBlock) => {
                return Err(ConnectError::TimedOut { address: address.to_owned(), timeout });
            }
        }
    };
    let (mut attempt, mut overtaken) = (1, 0);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match connect_once(nic, address, path, options, attempt > 1, left) {
            Err(ConnectError::Refused { reason: Refusal::UnknownPair, .. }) if attempt < TRIES => attempt += 1,
            Err(ConnectError::Refused { reason: Refusal::Overtaken, .. }) if overtaken < OVERTAKEN_MOST => {
                overtaken += 1;
                std::thread::sleep(OVERTAKEN_PAUSE.min(until.saturating_duration_since(Instant::now())));
            }
            Err(ConnectError::TimedOut { address, .. }) => return Err(ConnectError::TimedOut { address, timeout }),
            result => return result,
        }
    }
}

fn connect_once(
    nic: &Arc<NicInner>,
    address: &str,
    path: &Path,
    options: &ViOptions<'_>,
    new_pair: bool,
    timeout: Duration,
) -> Result<Vi, ConnectError> {
    let config = &nic.config;
    let named = || address.to_owned();
    let failed = |source: CourierError| match source {
        CourierError::Socket(Errno::NOENT | Errno::CONNREFUSED) => ConnectError::NobodyThere { address: named() },
        CourierError::Socket(Errno::ACCESS | Errno::PERM) => ConnectError::Denied { address: named() },
        CourierError::TimedOut(timeout) => ConnectError::TimedOut { address: named(), timeout },
        source => ConnectError::Courier { address: named(), source },
    };
    let strange = |what: &'static str| ConnectError::Protocol { address: named(), what };
    let courier = Arc::new(Courier::connect(path, timeout).map_err(failed)?);
    let credentials = courier.credentials().map_err(failed)?;
    if !nic.allowed(options).admits(credentials.uid) {
        return Err(match credentials.uid {
            Some(uid) => ConnectError::NotAllowed { address: named(), uid },
            None => ConnectError::UserNotMapped { address: named() },
        });
    }
    let identity = courier.identity(credentials).map_err(failed)?;
    let mut bytes = [0; MESSAGE_BYTES];
    let (length, _) = courier.receive(&mut bytes, timeout).map_err(failed)?;
    let their_nic = match Rendezvous::decode(&bytes[..length]) {
        Some(Rendezvous::Greeting { version: LAYOUT_VERSION, nic }) => nic,
        Some(Rendezvous::Greeting { version, .. }) => {
            return Err(ConnectError::Version { address: named(), theirs: version, ours: LAYOUT_VERSION });
        }
        Some(Rendezvous::Refuse { reason, .. }) => return Err(ConnectError::Refused { address: named(), reason }),
        _ => return Err(strange("it did not greet")),
    };
    let known = if new_pair { None } else { nic.known_peer(their_nic, credentials, identity) };
    let pair = known.as_ref().map_or_else(random_name, |peer| peer.pair);
    let queue = nic.queue_for(options);
    let lease = BellLease::take(&queue, BellOwner::new(credentials.uid, pair))?;
    let new_page = options.own_bell || known.as_ref().is_none_or(|peer| !peer.page_given(queue.id, lease.home.number));
    let mut side = match known {
        Some(peer) => Side::Known(peer),
        None => Side::new(config)?,
    };
    let random = random_name();
    let serial = u32::from_le_bytes([random[0], random[1], random[2], random[3]]) >> 2;
    let shape = nic.shape;
    let block = prepare(&mut side, shape, config.first_index, serial)?;
    let mut joining = Joining {
        nic,
        options,
        side,
        lease,
        block,
        shape,
        first_index: config.first_index,
        serial,
        pair,
        new_page,
        credentials,
        identity,
    };
    let handed = descriptors(&joining.side, &joining.lease, new_page);
    courier.send(&Rendezvous::connect(joining.half()).encode(), &handed, timeout).map_err(failed)?;
    drop(handed);
    joining.block.told = true;
    let (length, descriptors) = courier.receive(&mut bytes, timeout).map_err(failed)?;
    let half = match Rendezvous::decode(&bytes[..length]) {
        Some(Rendezvous::Accept { version: LAYOUT_VERSION, half }) => half,
        Some(Rendezvous::Refuse { reason, .. }) => {
            joining.block.told = false;
            return Err(ConnectError::Refused { address: named(), reason });
        }
        _ => return Err(strange("it did not answer the request")),
    };
    let ours = joining.half();
    let page_number = joining.lease.home.number;
    if (half.nic, half.pair, half.new_pair, half.serial) != (their_nic, pair, ours.new_pair, serial) {
        return Err(strange("its answer is for somebody else"));
    }
    let theirs = adopt(&half, descriptors, config, credentials)
        .map_err(|source| ConnectError::BadMemory { address: named(), source })?;
    let (vi, new_page) = joining.join(&half, theirs, &courier).map_err(|unjoined| match unjoined {
        Unjoined::Theirs(_) => strange("its half of the connection cannot be"),
        Unjoined::Ours(source) => failed(source),
    })?;
    if new_page
        && !options.own_bell
        && let Some(peer) = vi.peer_handle()
    {
        peer.set_page_given(queue.id, page_number);
    }
    Ok(vi)
}

/// The listener's first word to a connection whose user it allows.
pub(crate) fn greet(nic: &NicInner, courier: &Courier) -> Result<(), CourierError> {
    courier.send(&Rendezvous::greeting(nic.name).encode(), &[], REPLY_TIMEOUT)
}

/// Tells a connection that it is refused.
pub(crate) fn refuse(courier: &Courier, reason: Refusal) {
    let _ = courier.send(&Rendezvous::refuse(reason).encode(), &[], REPLY_TIMEOUT);
}

/// Answers a request to connect.
pub(crate) fn answer(
    nic: &Arc<NicInner>,
    courier: &Arc<Courier>,
    request: &[u8],
    descriptors_given: Vec<OwnedFd>,
    options: &ViOptions<'_>,
) -> Result<Vi, Refusal> {
    let half = match Rendezvous::decode(request) {
        Some(Rendezvous::Connect { version: LAYOUT_VERSION, half }) => half,
        Some(Rendezvous::Connect { .. }) => return Err(Refusal::Version),
        _ => return Err(Refusal::Malformed),
    };
    let shape = BlockShape::new(half.depth, half.loans).ok_or(Refusal::Limits)?;
    if half.serial >= 1 << 30 || half.first_index > FIRST_INDEX_MAX {
        return Err(Refusal::Malformed);
    }
    let credentials = courier.credentials().map_err(|error| Refusal::of_courier(&error))?;
    let identity = courier.identity(credentials).map_err(|error| Refusal::of_courier(&error))?;
    let theirs =
        adopt(&half, descriptors_given, &nic.config, credentials).map_err(|error| Refusal::of_region(&error))?;
    let ours = |error: ConnectError| match error {
        ConnectError::Region(RegionError::Create(error) | RegionError::Map(error)) => {
            Refusal::of_errno(Errno::from_io_error(&error))
        }
        _ => Refusal::NoRoom,
    };
    let mut side = if half.new_pair {
        Side::new(&nic.config).map_err(ours)?
    } else {
        Side::Known(nic.known_pair(half.pair, credentials, identity).ok_or(Refusal::UnknownPair)?)
    };
    let queue = nic.queue_for(options);
    let lease = BellLease::take(&queue, BellOwner::new(credentials.uid, half.pair)).map_err(ours)?;
    let new_page = match &side {
        Side::Known(peer) => options.own_bell || !peer.page_given(queue.id, lease.home.number),
        Side::New { .. } => true,
    };
    let block = prepare(&mut side, shape, half.first_index, half.serial).map_err(|_| Refusal::NoRoom)?;
    let joining = Joining {
        nic,
        options,
        side,
        lease,
        block,
        shape,
        first_index: half.first_index,
        serial: half.serial,
        pair: half.pair,
        new_page,
        credentials,
        identity,
    };
    let reply = Rendezvous::accept(joining.half()).encode();
    let handed: Vec<OwnedFd> = descriptors(&joining.side, &joining.lease, new_page)
        .into_iter()
        .map(|fd| fd.try_clone_to_owned())
        .collect::<Result<_, _>>()
        .map_err(|error: std::io::Error| Refusal::of_errno(Errno::from_io_error(&error)))?;
    let page_number = joining.lease.home.number;
    let (vi, new_page) = joining.join(&half, theirs, courier).map_err(|unjoined| match unjoined {
        Unjoined::Theirs(refusal) => refusal,
        Unjoined::Ours(error) => Refusal::of_courier(&error),
    })?;
    let handed: Vec<BorrowedFd<'_>> = handed.iter().map(AsFd::as_fd).collect();
    // The VI is there before the other side knows: it may send at once.
    courier.send(&reply, &handed, REPLY_TIMEOUT).map_err(|error| Refusal::of_courier(&error))?;
    if new_page
        && !options.own_bell
        && let Some(peer) = vi.peer_handle()
    {
        peer.set_page_given(queue.id, page_number);
    }
    Ok(vi)
}
