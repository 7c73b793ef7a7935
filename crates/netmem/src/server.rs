//! A node at work: its state behind calls, and the thread that carries what it wants sent.
//!
//! ```text
//!  calls ──▶ Handler (runs where calls arrive) ──▶ Node ──▶ outputs ──▶ answers, at once or deferred
//!                                                   ▲                └▶ to other nodes and the coordinator
//!                                                   └──── their answers ◀──── carrier thread
//! ```

use crate::coordinator::{self, Coordinator, CoordinatorAnswer, CoordinatorRequest};
use crate::donation::{Donation, DonationError, PAGE_BYTES};
use crate::exchange::{
    self, CHANGE, CHANGE_LARGE, COORDINATOR, DONATION, Frames, HereItIs, LARGE_BYTES, LOOK, LOOK_LARGE, PEER,
    PEER_LARGE, SERVICE, VERSION, boot_ns, random, reachable, ways,
};
use crate::map::mix;
use crate::mark::{self, Marks, Unwritable};
use crate::node::{self, Node, Output, Staging};
use crate::request::{Answer, Figures, PeerRequest, Refusal, Request as Asked};
use crate::spare::Spare;
use crate::types::{Incarnation, NodeId};
use highwire_rpc::{
    Client, ClientOptions, Deferred, Manner, Reply, Request, Rpc, Serve, ServeError, Server, ServerOptions, Services,
};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a node is started with.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Bytes that it donates. They are taken from the machine as they are used.
    pub memory_bytes: u64,
    /// Its name: it keeps its part of the objects when it starts again under the same one.
    pub name: String,
    /// Where it listens: `shm:NAME`, `udp:HOST:PORT`, or several.
    pub listen: Vec<String>,
    /// Where the coordinator is; `None`: it is this one.
    pub coordinator: Option<String>,
    /// Limits of the node.
    pub node: node::Config,
    /// Habits of the coordinator, if it is this one.
    pub coordinating: coordinator::Config,
    /// Whether the coordinator finds out by itself if it has to wait for leases of an earlier one
    /// ([`alone`](coordinator::Config::alone) is not looked at then): it leaves a file beside each address where it
    /// listens, `NAME.coordinator`, and removes it when it ends without other nodes.
    pub marks: bool,
    /// How calls are served.
    pub server: ServerOptions,
}

impl NodeOptions {
    /// A node that coordinates itself.
    pub fn new(memory_bytes: u64, listen: &str) -> NodeOptions {
        NodeOptions {
            memory_bytes,
            name: listen.to_owned(),
            listen: vec![listen.to_owned()],
            coordinator: None,
            node: node::Config { object_bytes_max: OBJECT_BYTES_MAX, ..node::Config::default() },
            coordinating: coordinator::Config::default(),
            marks: true,
            server: ServerOptions { request_bytes_max: OBJECT_BYTES_MAX as u32, ..ServerOptions::default() },
        }
    }
}

/// Why a node could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The memory could not be had.
    #[error(transparent)]
    Donation(#[from] DonationError),
    /// It cannot listen.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// It has no address.
    #[error("a node needs an address to listen at: shm:NAME or udp:HOST:PORT")]
    NoAddress,
    /// An address that means another host to everybody else.
    #[error(
        "others cannot reach a node at {address}: they learn from the map where it listens; give the address of this host \
         that they know it by"
    )]
    Unspecified {
        /// The address.
        address: String,
    },
    /// There is no place for the mark.
    #[error(transparent)]
    RuntimeDir(#[from] highwire_vi::RuntimeDirError),
    /// The mark cannot be written.
    #[error("cannot write {path:?}, from which the coordinator's next start tells whether it must wait: {source}")]
    Mark {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A thread could not be started, or a descriptor not be had.
    #[error("the node could not be started: {0}; is a limit (ulimit -n, -u) exhausted?")]
    Io(#[from] io::Error),
}

/// A node that serves. Dropped, it is gone at once, and all that it holds.
#[derive(Debug)]
pub struct NodeServer {
    shared: Arc<Shared>,
    servers: Vec<Server>,
    addresses: Vec<String>,
    carrier: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    rpc: Rpc,
    frames: Frames,
    node: Mutex<Node>,
    coordinator: Option<Mutex<Coordinator>>,
    /// The coordinator's. Whoever has the lock of both took the coordinator's first.
    marks: Mutex<Option<Marks>>,
    /// Where the coordinator is, if it is another's.
    elsewhere: Option<String>,
    /// Whom to ask how much memory it may still take.
    spare: Spare,
    /// Its memory, for readers of this host.
    readable: OwnedFd,
    readable_bytes: u64,
    deferred: Mutex<HashMap<u64, Deferred>>,
    tokens: AtomicU64,
    outbox: Mutex<VecDeque<Output>>,
    /// The carrier is to look at the outbox and the clock.
    woken: Condvar,
    stop: AtomicBool,
}

/// What became of a node that was to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaveReport {
    /// Whether its objects are with other nodes now, but for those that are lost.
    pub handed_over: bool,
    /// Objects that were on it and are gone.
    pub objects_lost: u64,
    /// Pages of paged regions that were on it and are gone.
    pub pages_lost: u32,
    /// If it was the coordinator: other nodes that were there. Without it their leases end, and they empty themselves.
    pub nodes_orphaned: usize,
}

impl NodeServer {
    /// Starts a node, by way of this interface.
    pub fn start(rpc: &Rpc, options: NodeOptions) -> Result<NodeServer, StartError> {
        if options.listen.is_empty() {
            return Err(StartError::NoAddress);
        }
        if let Some(address) = options.listen.iter().find(|address| is_unspecified(address)) {
            return Err(StartError::Unspecified { address: address.clone() });
        }
        let marked = options.marks && options.coordinator.is_none();
        let mut coordinating = options.coordinating.clone();
        if marked {
            let lease = Duration::from_nanos(coordinating.lease_ns.saturating_add(coordinating.margin_ns));
            coordinating.alone = true;
            for address in &options.listen {
                coordinating.alone &= mark::is_alone(&mark::path_of(rpc.nic(), address)?, lease);
            }
        }
        let donation = Donation::create(options.memory_bytes.div_ceil(PAGE_BYTES as u64))?;
        let (readable, readable_bytes) = donation.to_read()?;
        let now = boot_ns();
        let coordinator = options.coordinator.is_none().then(|| {
            let real = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            Mutex::new(Coordinator::new(coordinating, now, real.as_nanos() as u64, random()))
        });
        let id = NodeId(options.name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| mix(hash ^ u64::from(byte))));
        // It is told where it listens once that is known.
        let node = Node::new(id, String::new(), donation, options.node.clone(), random());
        let shared = Arc::new(Shared {
            rpc: rpc.clone(),
            frames: Frames::new(rpc.nic()),
            node: Mutex::new(node),
            coordinator,
            marks: Mutex::default(),
            elsewhere: options.coordinator.clone(),
            spare: Spare::find(),
            readable,
            readable_bytes,
            deferred: Mutex::default(),
            tokens: AtomicU64::new(1),
            outbox: Mutex::default(),
            woken: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let mut servers = Vec::new();
        // Nobody gets a lease before there is a mark. It is given back before the servers end, if they have to: calls that
        // have come wait for it.
        let closed = shared.coordinator.as_ref().map(lock);
        for address in &options.listen {
            let services = Services::new().with(SERVICE, VERSION, Handler(shared.clone()));
            servers.push(rpc.serve_with(address, services, options.server.clone())?);
        }
        let addresses: Vec<String> = servers.iter().map(|server: &Server| server.address().to_owned()).collect();
        if marked {
            let paths = addresses.iter().map(|address| mark::path_of(rpc.nic(), address)).collect::<Result<_, _>>()?;
            let made = Marks::create(paths).map_err(|Unwritable { path, source }| StartError::Mark { path, source })?;
            *lock(&shared.marks) = Some(made);
        }
        drop(closed);
        shared.node().set_address(ways(&addresses));
        shared.look_for_memory();
        let carrying = shared.clone();
        let carrier = std::thread::Builder::new().name("highwire-node".into()).spawn(move || carrying.carry())?;
        Ok(NodeServer { shared, servers, addresses, carrier: Some(carrier) })
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Whether to look for calls without pause from now on: for a node that has a CPU of its own.
    pub fn set_busy(&self, busy: bool) {
        self.servers.iter().for_each(|server| server.set_busy(busy));
    }

    /// How full it is.
    pub fn figures(&self) -> Figures {
        self.shared.node().figures()
    }

    /// Its number, made from its name.
    pub fn id(&self) -> NodeId {
        self.shared.node().id()
    }

    /// Other nodes that it knows of.
    pub fn others(&self) -> usize {
        self.shared.node().map().map_or(0, |map| map.nodes.len().saturating_sub(1))
    }

    /// If it is the coordinator: how long it still lets nobody in, because of leases that an earlier one may have granted.
    pub fn opens_in(&self) -> Duration {
        let opens = self.shared.coordinator.as_ref().map_or(0, |coordinator| lock(coordinator).opens());
        Duration::from_nanos(opens.saturating_sub(boot_ns()))
    }

    /// Its life, while the coordinator has let it in.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.shared.node().incarnation()
    }

    /// Waits until the coordinator has let it in; false if that took too long.
    pub fn wait_until_in(&self, timeout: Duration) -> bool {
        let deadline = highwire_mem::deadline(timeout);
        while self.incarnation().is_none() {
            if std::time::Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Hands its objects over to the other nodes, and ends. The coordinator has nobody to hand them over to: without it the
    /// others empty themselves.
    pub fn leave(mut self, timeout: Duration) -> LeaveReport {
        let deadline = highwire_mem::deadline(timeout);
        let before = self.figures();
        let orphans = match &self.shared.coordinator {
            Some(coordinator) => lock(coordinator).map().nodes.len().saturating_sub(1),
            None => 0,
        };
        let alone = self.shared.coordinator.is_some() || self.others() == 0;
        let mut left = false;
        if !alone {
            self.shared.node().leave(boot_ns());
            self.shared.pump();
            // Once it is out, by the end of its lease too, it has nothing that could be handed over.
            while self.incarnation().is_some() && std::time::Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            left = self.shared.node().has_left();
        }
        let unplaced = self.shared.node().unplaced();
        for server in self.servers.drain(..) {
            let _ = server.leave(PARTING);
        }
        if orphans == 0
            && let Some(marks) = &mut *lock(&self.shared.marks)
        {
            marks.remove();
        }
        LeaveReport {
            handed_over: left,
            objects_lost: if left { unplaced } else { before.objects },
            pages_lost: before.paged_pages,
            nodes_orphaned: orphans,
        }
    }
}

impl Drop for NodeServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.wake();
        self.servers.clear();
        if let Some(carrier) = self.carrier.take() {
            let _ = carrier.join();
        }
        // Whoever waits for an answer hears that there will be none.
        let deferred = std::mem::take(&mut *lock(&self.shared.deferred));
        drop(deferred);
    }
}

/// Runs where calls arrive: nothing in it blocks. Large ones run elsewhere, where they hold up nobody.
struct Handler(Arc<Shared>);

impl Serve for Handler {
    fn manner(&self, method: u16) -> Option<Manner> {
        match method {
            CHANGE | PEER => Some(Manner::default().quick()),
            LOOK | COORDINATOR | DONATION => Some(Manner::default().quick().repeatable()),
            CHANGE_LARGE | PEER_LARGE => Some(Manner::default()),
            LOOK_LARGE => Some(Manner::default().repeatable()),
            _ => None,
        }
    }

    fn serve(&self, request: Request<'_>, reply: &mut Reply) {
        match request.method() {
            CHANGE | LOOK => self.0.asked(request, reply, None),
            CHANGE_LARGE | LOOK_LARGE => self.0.asked_for_much(request, reply),
            PEER | PEER_LARGE => match request.decode::<PeerRequest>() {
                Some(asked) => {
                    let answer = self.0.node().handle_peer(boot_ns(), asked, request.payload());
                    self.0.give(reply, &answer);
                    self.0.pump();
                }
                None => reply.bad_arguments(),
            },
            COORDINATOR => match (request.decode::<CoordinatorRequest>(), &self.0.coordinator) {
                (Some(asked), Some(coordinator)) => {
                    let answer = self.0.coordinate(coordinator, asked);
                    self.0.give(reply, &answer);
                }
                (None, _) => reply.bad_arguments(),
                (_, None) => reply.unknown_method(),
            },
            DONATION => {
                let here = HereItIs { descriptor: self.0.readable.as_raw_fd(), bytes: self.0.readable_bytes };
                self.0.give(reply, &here);
            }
            _ => reply.unknown_method(),
        }
    }
}

impl Shared {
    fn node(&self) -> MutexGuard<'_, Node> {
        lock(&self.node)
    }

    /// Asks the coordinator that is here.
    fn coordinate(&self, coordinator: &Mutex<Coordinator>, request: CoordinatorRequest) -> CoordinatorAnswer {
        let mut coordinator = lock(coordinator);
        let now = boot_ns();
        let answer = coordinator.handle(now, request);
        if matches!(answer, CoordinatorAnswer::Joined { .. } | CoordinatorAnswer::Renewed { .. })
            && let Some(marks) = &mut *lock(&self.marks)
        {
            marks.refresh(now);
        }
        answer
    }

    fn give<A: serde::Serialize>(&self, reply: &mut Reply, answer: &A) {
        self.answer(reply, answer, &[]);
    }

    /// Answers what was done. Where there is no memory to say so, it was done all the same.
    fn answer<A: serde::Serialize>(&self, reply: &mut Reply, answer: &A, body: &[u8]) {
        if exchange::answer(&self.frames, reply, answer, body).is_none() {
            reply.fail_forgotten();
        }
    }

    /// Something large. The node is told piece by piece, so that it can renew its lease meanwhile.
    fn asked_for_much(self: &Arc<Shared>, request: Request<'_>, reply: &mut Reply) {
        if request.payload().len() < LARGE_BYTES {
            return self.asked(request, reply, None);
        }
        match self.bring(request.payload()) {
            Ok(staging) => self.asked(request, reply, Some(staging)),
            Err(refusal) => {
                let Some(asked) = request.decode::<Asked>() else { return reply.bad_arguments() };
                let length = request.payload().len() as u64;
                let refusal = self.node().refuse_unstaged(boot_ns(), &asked, length, refusal);
                self.give(reply, &Answer::Refused(refusal));
                // The coordinator may have to be asked.
                self.wake();
            }
        }
        self.pump();
    }

    fn bring(&self, bytes: &[u8]) -> Result<Staging, Refusal> {
        let mut staging = self.node().begin_staging(boot_ns(), bytes.len() as u64)?;
        for piece in bytes.chunks(PIECE_BYTES) {
            let mut node = self.node();
            if let Err(refusal) = node.stage(boot_ns(), &mut staging, piece) {
                node.unstage(staging);
                return Err(refusal);
            }
            drop(node);
            self.pump();
            // A lock that is taken again at once is got by nobody else.
            std::thread::sleep(TURN);
        }
        Ok(staging)
    }

    fn asked(self: &Arc<Shared>, request: Request<'_>, reply: &mut Reply, staging: Option<Staging>) {
        let token = self.tokens.fetch_add(1, SeqCst);
        let mut node = self.node();
        let Some(asked) = request.decode::<Asked>() else {
            if let Some(staging) = staging {
                node.unstage(staging);
            }
            return reply.bad_arguments();
        };
        let epoch = asked.epoch;
        match staging {
            Some(staging) => node.handle_staged(boot_ns(), token, asked, staging),
            None => node.handle_request(boot_ns(), token, asked, request.payload()),
        }
        node.hint(boot_ns(), epoch);
        let mut answered = false;
        let mut others = false;
        while let Some(output) = node.poll_output() {
            match output {
                Output::Answer { token: of, answer, body } if of == token => {
                    self.answer(reply, &answer, &body);
                    answered = true;
                }
                output => {
                    lock(&self.outbox).push_back(output);
                    others = true;
                }
            }
        }
        if !answered {
            // While the node is locked: its answer cannot come before it is known whose it is.
            lock(&self.deferred).insert(token, request.defer(reply));
        }
        drop(node);
        if others {
            self.wake();
        }
    }

    /// Takes out what the node wants sent, for the carrier.
    fn pump(&self) {
        let mut node = self.node();
        let mut outbox = lock(&self.outbox);
        let before = outbox.len();
        while let Some(output) = node.poll_output() {
            outbox.push_back(output);
        }
        let some = outbox.len() > before;
        drop((outbox, node));
        if some {
            self.wake();
        }
    }

    fn wake(&self) {
        drop(lock(&self.outbox));
        self.woken.notify_all();
    }

    /// Carries what the node wants sent, and tells it the time.
    /// Lets the node take what memory there is, and no more.
    fn look_for_memory(&self) {
        let pages = u32::try_from(self.spare.bytes() / PAGE_BYTES as u64).unwrap_or(u32::MAX);
        let mut node = self.node();
        let has = node.donation().populated();
        node.limit_memory(has.saturating_add(pages));
    }

    fn carry(self: &Arc<Shared>) {
        let mut links = Links::default();
        let mut looked = boot_ns();
        while !self.stop.load(SeqCst) {
            let now = boot_ns();
            if now >= looked + LONGEST.as_nanos() as u64 {
                looked = now;
                self.look_for_memory();
            }
            if let Some(coordinator) = &self.coordinator {
                lock(coordinator).handle_timeout(now);
            }
            let mut node = self.node();
            node.handle_timeout(now);
            let next = node.next_timeout();
            drop(node);
            self.pump();
            let outputs = std::mem::take(&mut *lock(&self.outbox));
            if outputs.is_empty() {
                let wait = Duration::from_nanos(next.saturating_sub(boot_ns())).clamp(SHORTEST, LONGEST);
                let outbox = lock(&self.outbox);
                if outbox.is_empty() && !self.stop.load(SeqCst) {
                    drop(self.woken.wait_timeout(outbox, wait));
                }
                continue;
            }
            for output in outputs {
                self.send(&mut links, output);
            }
        }
    }

    fn send(self: &Arc<Shared>, links: &mut Links, output: Output) {
        match output {
            Output::Answer { token, answer, body } => {
                let Some(deferred) = lock(&self.deferred).remove(&token) else { return };
                deferred.answer(|reply| self.answer(reply, &answer, &body));
            }
            Output::Coordinator { ticket, request } => match (&self.coordinator, &self.elsewhere) {
                (Some(coordinator), _) => {
                    let answer = self.coordinate(coordinator, request);
                    self.node().handle_coordinator(boot_ns(), ticket, answer);
                }
                (None, Some(address)) => {
                    let Some(client) = links.to(&self.rpc, address) else { return };
                    // A map is long, and the coordinator may be slow: nobody waits for it here.
                    let shared = self.clone();
                    let asked = std::thread::Builder::new().name("highwire-renew".into()).spawn(move || {
                        let (answer, _) = exchange::ask(&client, &shared.frames, &request, None, MAP_BYTES, PATIENCE);
                        if let Ok(answered) = answer {
                            shared.node().handle_coordinator(boot_ns(), ticket, answered.answer);
                            shared.pump();
                        }
                        shared.wake();
                    });
                    drop(asked);
                }
                (None, None) => {}
            },
            Output::Peer { ticket, request, body } => {
                let address =
                    self.node().map().and_then(|map| map.member(request.to)).map(|member| member.address.clone());
                let Some(client) = address.and_then(|address| links.to(&self.rpc, &address)) else { return };
                self.send_to_peer(&client, ticket, &request, &body);
            }
        }
    }

    /// Many are on their way at once: their answers come by continuation.
    fn send_to_peer(self: &Arc<Shared>, client: &Client, ticket: u64, request: &PeerRequest, body: &[u8]) {
        let Ok(arguments) = postcard::to_allocvec(request) else { return };
        let method = if body.len() < LARGE_BYTES { PEER } else { PEER_LARGE };
        let method = highwire_rpc::Method { service: SERVICE, version: VERSION, method };
        let patience = PATIENCE + Duration::from_secs(body.len() as u64 / SLOW_BYTES_A_SECOND);
        let mut call = client.call(method).arguments(&arguments).deadline(patience);
        if !body.is_empty() {
            let Some(buffer) = self.frames.filled(body) else { return };
            call = call.payload(buffer);
        }
        let shared = self.clone();
        call.then(move |outcome| {
            let answer = outcome.ok().and_then(|answer| exchange::decode_short(&answer.body));
            if let Some(answer) = answer {
                shared.node().handle_peer_answer(boot_ns(), ticket, answer);
                shared.pump();
            }
        });
    }
}

/// Connections to other nodes and to the coordinator.
#[derive(Debug, Default)]
struct Links {
    clients: HashMap<String, Client>,
}

impl Links {
    /// The client of whoever is reached by one of these ways; `None` if nobody answers. It is asked again later anyway.
    fn to(&mut self, rpc: &Rpc, ways: &str) -> Option<Client> {
        if let Some(client) = self.clients.get(ways) {
            return Some(client.clone());
        }
        let options = ClientOptions {
            connect_timeout: Duration::from_millis(500),
            reconnect_for: Duration::from_millis(500),
            ..ClientOptions::default()
        };
        let client = connect(rpc, ways, &options).ok()?;
        self.clients.insert(ways.to_owned(), client.clone());
        Some(client)
    }
}

/// Connects by the first of these ways that leads anywhere.
pub(crate) fn connect(
    rpc: &Rpc,
    ways: &str,
    options: &ClientOptions,
) -> Result<Client, Option<highwire_rpc::OpenError>> {
    let mut last = None;
    for address in reachable(ways) {
        match rpc.connect_with(&address, options.clone()) {
            Ok(client) => return Ok(client),
            Err(error) => last = Some(error),
        }
    }
    Err(last)
}

/// Whether it listens at every address of this host, which says to others nothing of where that is.
fn is_unspecified(address: &str) -> bool {
    let host = address.strip_prefix("udp:").and_then(|rest| rest.rsplit_once(':')).map(|(host, _)| host);
    let ip = host.and_then(|host| host.trim_matches(['[', ']']).parse::<IpAddr>().ok());
    ip.is_some_and(|ip| ip.is_unspecified())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The largest object of a node that was told nothing else.
pub const OBJECT_BYTES_MAX: u64 = 64 << 20;
/// Room for a map that is as long as most.
pub(crate) const MAP_BYTES: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(2);
/// A network that is slower than most.
const SLOW_BYTES_A_SECOND: u64 = 50_000_000;
const PARTING: Duration = Duration::from_millis(500);
/// What is brought at once of a large object: a millisecond's work.
const PIECE_BYTES: usize = 1 << 20;
const TURN: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(100);
const LONGEST: Duration = Duration::from_millis(250);
