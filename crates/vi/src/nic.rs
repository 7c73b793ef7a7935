//! A process's own network interface.

use crate::address::Address;
use crate::bells::QueueShared;
use crate::config::{Config, ViOptions};
use crate::error::{ConnectError, ListenError, NicError, RuntimeDirError};
use crate::host::handover;
use crate::host::peer::{Introduction, PayloadBudget, Peer};
use crate::host::rendezvous::{Name, random_name};
use crate::host::runtime_dir::runtime_dir;
use crate::listener::ViListener;
use crate::queue::CompletionQueue;
use crate::spin::SpinRules;
use crate::vi::Vi;
use crate::wire::{Calling, is_reliable};
use highwire_mem::work::Wire;
use highwire_mem::{
    Allow, BlockShape, Credentials, Exported, Pool, Process, ProcessIdentity, Region, RegionError, Tag, Watcher,
    heavy_barrier_available, kernel_check,
};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The way into the network. Cheap to clone; all clones are one interface.
///
/// ```
/// use highwire_vi::{Nic, Receive};
/// use std::time::Duration;
///
/// let nic = Nic::open()?;
/// let listener = nic.listen(&format!("shm:doc-{}", std::process::id()))?;
/// let caller = nic.clone();
/// let address = listener.address().to_owned();
/// let thread = std::thread::spawn(move || {
///     let mut vi = caller.connect(&address).unwrap();
///     vi.send_bytes(1, b"hello").unwrap();
///     vi.disconnect(Duration::from_secs(1)).unwrap();
/// });
/// let mut vi = listener.accept(Duration::from_secs(5))?;
/// vi.post_recv(Receive::new(7).into(nic.register(64)?.slice(0..64)?))?;
/// let done = vi.wait(Duration::from_secs(5))?;
/// assert_eq!((done.token, done.length), (7, 5));
/// assert_eq!(&done.into_buffer().unwrap()[..5], b"hello");
/// thread.join().unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Nic {
    inner: Arc<NicInner>,
}

#[derive(Debug)]
pub(crate) struct NicInner {
    pub process: Process,
    pub name: Name,
    pub config: Arc<Config>,
    pub shape: BlockShape,
    pub queue: Arc<QueueShared>,
    pub spin: SpinRules,
    budget: Arc<PayloadBudget>,
    watcher: Arc<Watcher>,
    peers: Mutex<HashMap<Name, Weak<Peer>>>,
    connecting: Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>,
    next_queue: AtomicU64,
    wire: Option<Arc<dyn Wire>>,
}

impl Nic {
    /// Opens an interface with the default configuration.
    pub fn open() -> Result<Nic, NicError> {
        Nic::with(Config::default())
    }

    /// Opens an interface for this host.
    pub fn with(config: Config) -> Result<Nic, NicError> {
        Nic::open_with(config, None)
    }

    /// Opens an interface that reaches other hosts by `wire`.
    pub fn with_wire(config: Config, wire: Arc<dyn Wire>) -> Result<Nic, NicError> {
        Nic::open_with(config, Some(wire))
    }

    fn open_with(config: Config, wire: Option<Arc<dyn Wire>>) -> Result<Nic, NicError> {
        kernel_check()?;
        check(&config)?;
        // Before anybody can share memory with us.
        heavy_barrier_available();
        let shape = BlockShape::new(config.depth, config.loans).ok_or(NicError::Config {
            name: "depth or loans",
            value: u64::from(config.depth),
            rule: "both must be powers of two from 2 to 4096",
        })?;
        let inner = NicInner {
            process: Process::current(),
            name: random_name(),
            shape,
            queue: Arc::new(QueueShared::new(0, config.users_max)),
            spin: SpinRules::new(config.spin),
            budget: Arc::new(PayloadBudget::new(config.payload_bytes_total_max)),
            watcher: Arc::new(Watcher::spawn().map_err(NicError::Watcher)?),
            peers: Mutex::default(),
            connecting: Mutex::default(),
            next_queue: AtomicU64::new(1),
            wire,
            config: Arc::new(config),
        };
        Ok(Nic { inner: Arc::new(inner) })
    }

    /// Registers `bytes` of new memory under tag 0.
    pub fn register(&self, bytes: usize) -> Result<Region, RegionError> {
        Region::create(bytes, Tag(0))
    }

    /// Registers memory under a protection tag.
    pub fn register_tagged(&self, bytes: usize, tag: Tag) -> Result<Region, RegionError> {
        Region::create(bytes, tag)
    }

    /// Memory that can be written now, frozen, and then lent to receivers as slices.
    pub fn register_freezable(&self, bytes: usize, tag: Tag) -> Result<Region, RegionError> {
        Region::create_freezable(bytes, tag)
    }

    /// A pool of page-aligned frames.
    pub fn pool(&self, frame_bytes: usize, frames: usize) -> Result<Pool, RegionError> {
        Pool::create(frame_bytes, frames, Tag(0))
    }

    /// Memory that peers may write once it is granted to them.
    pub fn export(&self, bytes: usize, tag: Tag) -> Result<Exported, RegionError> {
        Exported::create(bytes, tag)
    }

    /// A queue that watches many VIs.
    pub fn completion_queue(&self) -> Result<CompletionQueue, NicError> {
        let queue = QueueShared::new(self.inner.next_queue_id(), self.inner.config.users_max);
        Ok(CompletionQueue::new(Arc::new(queue), self.inner.clone()))
    }

    /// Listens at `shm:name` or `shm:/path` for the users that [`Config::allow`] names, or at `udp:host:port` for all that
    /// have the key; without a key, on this host, for those users as well.
    pub fn listen(&self, address: &str) -> Result<ViListener, ListenError> {
        self.listen_with(address, self.inner.config.allow.clone())
    }

    /// Listens for the users that `allow` names. Others cannot reach a `shm:name`.
    pub fn listen_with(&self, address: &str, allow: Allow) -> Result<ViListener, ListenError> {
        if !self.inner.process.is_this() {
            return Err(ListenError::ForkedChild);
        }
        let path = match Address::parse(address)? {
            Address::Name(name) => socket_path(runtime_dir(&self.inner.config)?, &name),
            Address::Path(path) => path,
            Address::Host(host) => {
                let wire = self.inner.wire.as_ref().ok_or_else(|| ListenError::NoWire(address.to_owned()))?;
                let failed = |reason| ListenError::Wire { address: address.to_owned(), reason };
                return Ok(ViListener::at_port(self.inner.clone(), wire.listen(&host, &allow).map_err(failed)?));
            }
        };
        ViListener::at_path(self.inner.clone(), address, path, allow)
    }

    /// Connects to a listener of this user, or of another host.
    pub fn connect(&self, address: &str) -> Result<Vi, ConnectError> {
        self.connect_with(address, &ViOptions::new())
    }

    /// Connects with choices.
    pub fn connect_with(&self, address: &str, options: &ViOptions<'_>) -> Result<Vi, ConnectError> {
        if !self.inner.process.is_this() {
            return Err(ConnectError::ForkedChild);
        }
        let path = match Address::parse(address)? {
            Address::Name(name) => socket_path(runtime_dir(&self.inner.config)?, &name),
            Address::Path(path) => path,
            Address::Host(host) => return self.connect_wire(address, &host, options),
        };
        handover::connect(&self.inner, address, &path, options)
    }

    fn connect_wire(&self, address: &str, host: &str, options: &ViOptions<'_>) -> Result<Vi, ConnectError> {
        let wire = self.inner.wire.as_ref().ok_or_else(|| ConnectError::NoWire(address.to_owned()))?;
        let calling = Calling::new(&self.inner, options);
        let timeout = options.connect_timeout.unwrap_or(self.inner.config.connect_timeout);
        wire.connect(host, &calling.line, is_reliable(options), timeout, self.inner.allowed(options))
            .map_err(|reason| ConnectError::Wire { address: address.to_owned(), reason })?;
        let nobody = || ConnectError::NobodyThere { address: address.to_owned() };
        Vi::connected(calling, &self.inner, options).ok_or_else(nobody)
    }

    /// Where names live, checked as it is before somebody listens there: for what a service keeps beside its socket.
    pub fn runtime_dir(&self) -> Result<PathBuf, RuntimeDirError> {
        runtime_dir(&self.inner.config)
    }

    /// The configuration it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.config
    }
}

fn socket_path(dir: PathBuf, name: &str) -> PathBuf {
    dir.join(format!("{name}.sock"))
}

fn check(config: &Config) -> Result<(), NicError> {
    let bad = |name, value: usize, rule| Err(NicError::Config { name, value: value as u64, rule });
    if config.region_bytes < 1 << 20 || config.region_bytes > 1 << 40 {
        return bad("region_bytes", config.region_bytes, "a region has from 1 MiB to 1 TiB");
    }
    if config.payload_bytes_start < 4096 || !config.payload_bytes_start.is_multiple_of(4096) {
        return bad("payload_bytes_start", config.payload_bytes_start, "it must be a multiple of 4096");
    }
    if config.payload_bytes_max < config.payload_bytes_start || !config.payload_bytes_max.is_multiple_of(4096) {
        return bad("payload_bytes_max", config.payload_bytes_max, "it must be a multiple of 4096, at least the start");
    }
    if config.users_max == 0 || config.users_max > 127 {
        return bad("users_max", config.users_max, "from 1 to 127 users are possible");
    }
    if config.first_index > handover::FIRST_INDEX_MAX {
        return Err(NicError::Config {
            name: "first_index",
            value: config.first_index,
            rule: "the first slot's index is at most 2^61",
        });
    }
    if config.message_bytes_max > u64::from(u32::MAX) {
        return Err(NicError::Config {
            name: "message_bytes_max",
            value: config.message_bytes_max,
            rule: "a message has less than 4 GiB",
        });
    }
    Ok(())
}

impl NicInner {
    fn next_queue_id(&self) -> u64 {
        self.next_queue.fetch_add(1, Ordering::Relaxed)
    }

    /// Whose listener may answer.
    pub(crate) fn allowed<'a>(&'a self, options: &'a ViOptions<'_>) -> &'a Allow {
        options.allow.as_ref().unwrap_or(&self.config.allow)
    }

    /// The queue that a VI with these choices belongs to.
    pub(crate) fn queue_for(&self, options: &ViOptions<'_>) -> Arc<QueueShared> {
        match (&options.queue, options.notify) {
            (Some(queue), _) => queue.shared().clone(),
            (None, Some(notify)) => notify.shared(),
            _ if options.own_bell => Arc::new(QueueShared::of_one(self.next_queue_id())),
            _ => self.queue.clone(),
        }
    }

    /// One connection at a time to each address: two first ones at once would make two pairs.
    pub(crate) fn turn_to_connect(&self, path: &Path) -> Arc<Mutex<()>> {
        let mut turns = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        turns.entry(path.to_owned()).or_default().clone()
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<Name, Weak<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A living peer of this pair, and of this process and user.
    pub(crate) fn known_pair(
        &self,
        pair: Name,
        credentials: Credentials,
        identity: Option<ProcessIdentity>,
    ) -> Option<Arc<Peer>> {
        let peer = self.peers().get(&pair).and_then(Weak::upgrade)?;
        (!peer.is_gone() && peer.is_process(credentials, identity)).then_some(peer)
    }

    /// A living peer that is this Nic.
    pub(crate) fn known_peer(
        &self,
        nic: Name,
        credentials: Credentials,
        identity: Option<ProcessIdentity>,
    ) -> Option<Arc<Peer>> {
        let peers: Vec<_> = self.peers().values().filter_map(Weak::upgrade).collect();
        // The initiator of a pair in one process and its acceptor have the same Nic name, and only
        // one of the two can be looked up by it: a Nic that connects to itself makes a pair a VI.
        let other = |peer: &Arc<Peer>| peer.nic == nic && nic != self.name;
        peers.into_iter().find(|peer| other(peer) && !peer.is_gone() && peer.is_process(credentials, identity))
    }

    pub(crate) fn introduce(&self, made: Introduction) -> std::io::Result<Arc<Peer>> {
        let own_end = made.nic == self.name;
        let peer = Peer::new(made, self.config.clone(), self.budget.clone(), self.watcher.clone())?;
        let mut peers = self.peers();
        peers.retain(|_, peer| peer.strong_count() > 0);
        if !own_end {
            peers.insert(peer.pair, Arc::downgrade(&peer));
        }
        Ok(peer)
    }
}
