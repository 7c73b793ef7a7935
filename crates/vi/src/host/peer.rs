//! The other process: one pair of regions, however many VIs run between the two.

use crate::error::{Failure, GrantError};
use crate::host::member::{STATE_OPEN, state_word};
use crate::host::rendezvous::{MESSAGE_BYTES, Name, Refusal, Rendezvous};
use highwire_mem::{
    BellPage, Block, BlockShape, Courier, CourierError, Credentials, Exported, Extents, Frozen, Lie, OwnMemory,
    OwnRegion, PeerMemory, PeerRegion, Process, ProcessIdentity, REGION_HEADER_BYTES, Region, RegionKind, RemoteRegion,
    Tag, WatchKey, Watcher,
};
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use crate::bells::QueueShared;
use crate::config::Config;

/// Blocks and payload areas are cut in multiples of this.
const GRANULE: usize = 1024;
/// Messages read from the socket at once: a peer that floods it must not keep us from the others.
const NEWS_PER_LOOK: usize = 64;
/// Regions that a process of another user may hand over.
const REGIONS_OF_OTHERS_MAX: usize = 64;
/// Places in which such a process may have blocks. An honest one uses places again.
const BLOCKS_OF_OTHERS_MAX: usize = 1024;
/// A peer that does not read its socket must not hold us up.
const HANDOVER_TIMEOUT: Duration = Duration::ZERO;

/// What all payload areas of a Nic together may take.
#[derive(Debug)]
pub(crate) struct PayloadBudget {
    used: AtomicUsize,
    limit: usize,
}

impl PayloadBudget {
    pub(crate) fn new(limit: usize) -> PayloadBudget {
        PayloadBudget { used: AtomicUsize::new(0), limit }
    }

    fn take(&self, bytes: usize) -> bool {
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= self.limit)
        });
        taken.is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Parts of our region that a closed VI used and its peer may still read.
#[derive(Debug)]
struct Leftover {
    stretches: Vec<(usize, usize)>,
    peer_block: Block,
    serial: u32,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub process: Process,
    pub pair: Name,
    pub nic: Name,
    pub credentials: Credentials,
    identity: Option<ProcessIdentity>,
    pub config: Arc<Config>,
    /// The other side's sleepers rely on our fences.
    pub fences: bool,
    own: OwnMemory,
    region: PeerRegion,
    courier: Arc<Courier>,
    gone: AtomicBool,
    /// Why it is gone for us, if it did not die.
    broken: OnceLock<Failure>,
    extents: Mutex<Extents>,
    leftovers: Mutex<Vec<Leftover>>,
    budget: Arc<PayloadBudget>,
    remote: RwLock<HashMap<u32, RemoteRegion>>,
    /// Places of the other side's blocks, of a process of another user.
    blocks: Mutex<HashSet<usize>>,
    given: Mutex<HashSet<u32>>,
    /// Pages of the other side's queues, by queue.
    pages: Mutex<HashMap<u64, BellPage>>,
    /// Our queues whose page the other side has, and the page's number in its queue.
    pages_given: Mutex<HashMap<u64, u32>>,
    queues: Mutex<Vec<Weak<QueueShared>>>,
    watcher: Arc<Watcher>,
    keys: Mutex<Vec<WatchKey>>,
}

/// What [`Peer::new`] is made of, once both sides have handed over their region.
pub(crate) struct Introduction {
    pub pair: Name,
    pub nic: Name,
    pub credentials: Credentials,
    /// What tells its process from others, if anything does.
    pub identity: Option<ProcessIdentity>,
    pub fences: bool,
    pub own: OwnRegion,
    pub extents: Extents,
    pub region: PeerRegion,
    pub courier: Arc<Courier>,
    /// None where the kernel gives none; the hang-up of the socket is all that tells of a death then.
    pub pidfd: Option<OwnedFd>,
}

impl Peer {
    /// The free space of a new region.
    pub(crate) fn new_extents(region_bytes: usize) -> Extents {
        Extents::new(REGION_HEADER_BYTES, region_bytes, GRANULE)
    }

    pub(crate) fn new(
        made: Introduction,
        config: Arc<Config>,
        budget: Arc<PayloadBudget>,
        watcher: Arc<Watcher>,
    ) -> std::io::Result<Arc<Peer>> {
        let Introduction { pair, nic, credentials, identity, fences, own, extents, region, courier, pidfd } = made;
        let peer = Arc::new(Peer {
            process: Process::current(),
            pair,
            nic,
            credentials,
            identity,
            config,
            fences,
            // The listener has a copy of the descriptor by now where it is still to be sent.
            own: own.into_memory(),
            region,
            courier: courier.clone(),
            gone: AtomicBool::new(false),
            broken: OnceLock::new(),
            extents: Mutex::new(extents),
            leftovers: Mutex::default(),
            budget,
            remote: RwLock::default(),
            blocks: Mutex::default(),
            given: Mutex::default(),
            pages: Mutex::default(),
            pages_given: Mutex::default(),
            queues: Mutex::default(),
            watcher: watcher.clone(),
            keys: Mutex::default(),
        });
        if let Some(pidfd) = pidfd {
            let weak = Arc::downgrade(&peer);
            let life = watcher.watch(Arc::new(pidfd), move || {
                if let Some(peer) = weak.upgrade() {
                    peer.mark_gone();
                }
                highwire_mem::Watch::Forget
            })?;
            lock(&peer.keys).push(life);
        }
        let weak = Arc::downgrade(&peer);
        let news = watcher.watch(courier, move || match weak.upgrade() {
            Some(peer) if peer.read_news() => highwire_mem::Watch::Keep,
            _ => highwire_mem::Watch::Forget,
        })?;
        lock(&peer.keys).push(news);
        Ok(peer)
    }

    #[inline]
    pub(crate) fn ours(&self) -> &OwnMemory {
        &self.own
    }

    #[inline]
    pub(crate) fn theirs(&self) -> &PeerMemory {
        self.region.memory()
    }

    /// Whether the other end of a new connection is this very process. One that nothing tells from others is none.
    pub(crate) fn is_process(&self, credentials: Credentials, identity: Option<ProcessIdentity>) -> bool {
        self.credentials == credentials && identity.is_some() && self.identity == identity
    }

    /// True once the process died or let go of us.
    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// What a VI is told once the peer is gone.
    pub(crate) fn parting(&self) -> Failure {
        self.broken.get().copied().unwrap_or(Failure::PeerDied)
    }

    /// What a VI is told that met a lie, which it may be for want of something that this process had no room for.
    pub(crate) fn after(&self, lie: Lie) -> Failure {
        self.broken.get().copied().filter(|failure| *failure == Failure::Exhausted).unwrap_or(Failure::PeerLied(lie))
    }

    /// Tells the peer where we run; true if it last waited on this same CPU.
    #[inline]
    pub(crate) fn on_this_cpu(&self, cpu: u32) -> bool {
        self.own.note_cpu(cpu);
        self.region.cpu() == cpu
    }

    fn mark_gone(&self) {
        // What it sent before it died is still in its memory, and news in the socket.
        self.gone.store(true, Ordering::Release);
        lock(&self.queues).retain(|queue| queue.upgrade().inspect(|queue| queue.wake()).is_some());
    }

    /// A queue to wake when the peer dies.
    pub(crate) fn tell(&self, queue: &Arc<QueueShared>) {
        let mut queues = lock(&self.queues);
        queues.retain(|known| known.strong_count() > 0);
        let weak = Arc::downgrade(queue);
        if !queues.iter().any(|known| known.ptr_eq(&weak)) {
            queues.push(weak);
        }
    }

    /// Reads what came on the socket; false when nothing more will.
    fn read_news(&self) -> bool {
        // One reader at a time, so that regions are entered in the order they were sent.
        let mut remote = self.remote.write().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; MESSAGE_BYTES];
        for _ in 0..NEWS_PER_LOOK {
            let taken = match self.courier.try_receive(&mut bytes) {
                Ok(None) => return true,
                Ok(Some((length, descriptors))) => self.take_region(&bytes[..length], descriptors, &mut remote),
                Err(CourierError::TooLong(_)) => Err(Failure::PeerLied(Lie::BadHandover)),
                Err(CourierError::NoDescriptors) => Err(Failure::Exhausted),
                Err(_) => Err(Failure::PeerDied),
            };
            if let Err(failure) = taken {
                drop(remote);
                let _ = self.broken.set(failure);
                self.mark_gone();
                return false;
            }
        }
        true
    }

    fn take_region(
        &self,
        bytes: &[u8],
        mut descriptors: Vec<OwnedFd>,
        remote: &mut HashMap<u32, RemoteRegion>,
    ) -> Result<(), Failure> {
        let lie = Failure::PeerLied(Lie::BadHandover);
        let Some(Rendezvous::Region { region, kind, tag, bytes }) = Rendezvous::decode(bytes) else { return Err(lie) };
        let kind = RegionKind::from_number(kind).ok_or(lie)?;
        let descriptor = descriptors.pop().ok_or(lie)?;
        // One too many is not taken; a message that names it will be a lie.
        if remote.len() >= self.regions_max() {
            return Ok(());
        }
        let limit = self.config.allotment(self.credentials.uid);
        let adopted = RemoteRegion::adopt_beside(remote.values(), descriptor, kind, Tag(tag), bytes, limit);
        let adopted = adopted.map_err(|error| match Refusal::of_region(&error) {
            Refusal::BadMemory => lie,
            _ => Failure::Exhausted,
        })?;
        remote.insert(region, adopted);
        Ok(())
    }

    /// A region that the peer handed over.
    pub(crate) fn remote_region(&self, region: u32) -> Result<RemoteRegion, Lie> {
        let find = || self.remote.read().unwrap_or_else(PoisonError::into_inner).get(&region).cloned();
        // The descriptor was sent before the slot that names it, but the watcher may not have come
        // to it yet; it may also be the last thing that came before the end. An honest peer has not
        // sent more than it may.
        let looks = 1 + self.config.peer_regions_max / NEWS_PER_LOOK;
        let look = |_| {
            self.read_news();
            find()
        };
        find().or_else(|| (0..looks).find_map(look)).ok_or(Lie::UnknownRegion { region })
    }

    fn give(
        &self,
        region: u32,
        kind: RegionKind,
        tag: Tag,
        bytes: usize,
        fd: BorrowedFd<'_>,
    ) -> Result<(), GrantError> {
        let mut given = lock(&self.given);
        if given.contains(&region) {
            return Ok(());
        }
        if self.is_gone() {
            return Err(GrantError::NotConnected(Failure::PeerDied));
        }
        // The other side has a limit like ours.
        let limit = self.regions_max();
        if given.len() >= limit {
            return Err(GrantError::TooMany { limit });
        }
        let message = Rendezvous::Region { region, kind: kind.number(), tag: tag.0, bytes: bytes as u64 };
        self.courier
            .send(&message.encode(), &[fd], HANDOVER_TIMEOUT)
            .map_err(|error| GrantError::Courier(error.to_string()))?;
        given.insert(region);
        Ok(())
    }

    /// Lets the peer map a registered region for reading.
    pub(crate) fn give_region(&self, region: &Region) -> Result<(), GrantError> {
        let descriptor = region.descriptor().map_err(|_| GrantError::NotFrozenYet)?;
        self.give(region.id(), RegionKind::Registered, region.tag(), region.len(), descriptor)
    }

    /// Lets the peer map a frozen region.
    pub(crate) fn give_frozen(&self, region: &Frozen) -> Result<(), GrantError> {
        self.give(region.id(), RegionKind::Frozen, region.tag(), region.len(), region.as_fd())
    }

    /// Lets the peer map an exported region for writing.
    pub(crate) fn give_exported(&self, region: &Exported) -> Result<(), GrantError> {
        self.give(region.id(), RegionKind::Exported, region.tag(), region.memory().len(), region.as_fd())
    }

    fn is_of_another_user(&self) -> bool {
        self.credentials.uid != Some(rustix::process::geteuid().as_raw())
    }

    /// Regions that either side hands over. Between users each costs the other side a descriptor.
    fn regions_max(&self) -> usize {
        let most = self.config.peer_regions_max;
        if self.is_of_another_user() { most.min(REGIONS_OF_OTHERS_MAX) } else { most }
    }

    /// Notes where the other side has a block. False if a process of another user has had blocks in too many places: pages
    /// that it never wrote to take memory of this process's when their words are read, until it gives up its region.
    pub(crate) fn note_block(&self, offset: usize) -> bool {
        if !self.is_of_another_user() {
            return true;
        }
        let mut blocks = lock(&self.blocks);
        blocks.contains(&offset) || blocks.len() < BLOCKS_OF_OTHERS_MAX && blocks.insert(offset)
    }

    /// A block of our region, and whether its memory was never used.
    pub(crate) fn take_block(&self, shape: BlockShape) -> Option<(Block, bool)> {
        self.sweep();
        let (offset, fresh) = lock(&self.extents).take(shape.bytes())?;
        Some((Block::new(offset as u64, shape, self.ours().len())?, fresh))
    }

    /// Gives back a block of which the other side never heard, or which it refused.
    pub(crate) fn return_block(&self, block: Block) {
        lock(&self.extents).give_back(block.offset(), block.shape().bytes());
    }

    /// A payload area, within the limits.
    pub(crate) fn take_payload_area(&self, bytes: usize) -> Option<usize> {
        if !self.budget.take(bytes) {
            return None;
        }
        let taken = lock(&self.extents).take(bytes);
        if taken.is_none() {
            self.budget.give_back(bytes);
        }
        taken.map(|(offset, _)| offset)
    }

    pub(crate) fn return_payload_area(&self, offset: usize, bytes: usize) {
        self.budget.give_back(bytes);
        lock(&self.extents).give_back(offset, bytes);
    }

    /// Gives a closed VI's parts of our region back, as soon as the peer has closed it too.
    pub(crate) fn leave(&self, block: Block, areas: Vec<(usize, usize)>, peer_block: Block, serial: u32) {
        self.budget.give_back(areas.iter().map(|(_, bytes)| bytes).sum());
        let mut stretches = areas;
        stretches.push((block.offset(), block.shape().bytes()));
        lock(&self.leftovers).push(Leftover { stretches, peer_block, serial });
    }

    fn sweep(&self) {
        let mut extents = lock(&self.extents);
        lock(&self.leftovers).retain(|left| {
            let reading = left.peer_block.state(self.theirs()) == state_word(left.serial, STATE_OPEN);
            if !reading {
                for (offset, bytes) in &left.stretches {
                    extents.give_back(*offset, *bytes);
                }
            }
            reading
        });
    }

    /// Enters a page that came with a handshake. It replaces an earlier one of the same queue.
    pub(crate) fn enter_page(&self, queue: u64, page: BellPage) -> bool {
        let mut pages = lock(&self.pages);
        if pages.len() >= self.config.peer_regions_max && !pages.contains_key(&queue) {
            return false;
        }
        pages.insert(queue, page);
        true
    }

    pub(crate) fn page(&self, queue: u64) -> Option<BellPage> {
        lock(&self.pages).get(&queue).cloned()
    }

    /// Whether the other side has this page of a queue of ours.
    pub(crate) fn page_given(&self, queue: u64, number: u32) -> bool {
        lock(&self.pages_given).get(&queue) == Some(&number)
    }

    pub(crate) fn set_page_given(&self, queue: u64, number: u32) {
        lock(&self.pages_given).insert(queue, number);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Peer {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // The socket and the watcher are the parent's: leave both as they are.
            return;
        }
        for key in lock(&self.keys).drain(..) {
            self.watcher.forget(key);
        }
        // The watcher may be about to look at the socket: tell the other side now.
        let _ = rustix::net::shutdown(self.courier.as_fd(), rustix::net::Shutdown::Both);
    }
}
