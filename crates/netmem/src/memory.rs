//! The memory of other nodes, to those who use it.

use crate::client::{self, Failed, Failure, Next, Step};
use crate::coordinator::{CoordinatorAnswer, CoordinatorRequest};
use crate::donation::{PAGE_BYTES, Read, View};
use crate::exchange::{self, Answered, Frames, HereItIs, WhereIsIt, boot_ns, random};
use crate::map::{BUCKETS, Map};
use crate::request::{Answer, Ask, Expect, Figures, Refusal, Request, Stat};
use crate::server::{MAP_BYTES, OBJECT_BYTES_MAX, connect};
use crate::types::{BadName, Incarnation, Name, NodeId, PageHandle, Version};
use highwire_mem::PeerMemory;
use highwire_rpc::{CallError, Client, ClientOptions, OpenError, Outcome as Run, Rpc};
use highwire_vi::{Buffer, PeerId};
use rustix::fs::{Mode, OFlags};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Not a name.
    #[error(transparent)]
    Name(#[from] BadName),
    /// No coordinator answers.
    #[error(
        "no coordinator of network memory answers at {address}: {reason}; is `highwire up --memory SIZE` running there?"
    )]
    NoCoordinator {
        /// Where.
        address: String,
        /// Why not.
        reason: String,
    },
    /// What is there is no coordinator.
    #[error("whoever answers at {address} is a node but not the coordinator; give the coordinator's address")]
    NotCoordinator {
        /// Where.
        address: String,
    },
    /// The nodes would not, or could not.
    #[error(transparent)]
    Failed(#[from] Failed),
    /// A node does not answer as nodes do.
    #[error("a node answered something else than what was asked")]
    Unexpected,
    /// There is no memory for what is to be sent or received.
    #[error("there is no memory for {bytes} bytes on their way; put or get less at once")]
    NoMemory {
        /// How many.
        bytes: usize,
    },
}

impl MemoryError {
    /// Why the nodes refused, if they did.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            MemoryError::Failed(Failed::Refused(refusal)) => Some(refusal),
            _ => None,
        }
    }
}

/// Choices of whoever uses network memory.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// How long an operation may take, with everything that has to be tried again.
    pub timeout: Duration,
    /// Whether memory of nodes of this host is read directly, where it can be.
    pub one_sided: bool,
    /// Habits.
    pub client: client::Config,
}

impl Default for MemoryOptions {
    fn default() -> MemoryOptions {
        MemoryOptions { timeout: Duration::from_secs(10), one_sided: true, client: client::Config::default() }
    }
}

/// How an object is to be kept.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// For how long, unless it is renewed.
    pub lease: Duration,
    /// Never aged out for want of memory.
    pub pinned: bool,
    /// Only if the name has this content now.
    pub only_if: Option<Expect>,
}

impl Default for Keep {
    fn default() -> Keep {
        Keep { lease: Duration::from_secs(3600), pinned: false, only_if: None }
    }
}

/// What a node has, and how full it is.
#[derive(Clone, Debug)]
pub struct NodeStat {
    /// The node.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: String,
    /// Whether it is about to leave.
    pub leaving: bool,
    /// How full it is, or why it did not say.
    pub figures: Result<Figures, String>,
}

/// The memory of a cluster's nodes. Cheap to clone; all clones are one.
///
/// Everything in it is volatile: what was on a node that is lost is gone, and is said to be.
#[derive(Clone, Debug)]
pub struct Memory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    rpc: Rpc,
    coordinator: String,
    options: MemoryOptions,
    frames: Frames,
    state: Mutex<client::Client>,
    links: Mutex<HashMap<String, Arc<Link>>>,
    reads: std::sync::atomic::AtomicU64,
}

/// A way to one node.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) client: Client,
    /// Its memory, if it is on this host and of the same user.
    pub(crate) view: Option<View>,
}

impl Memory {
    /// Asks the coordinator at `address` which nodes there are.
    pub fn connect(rpc: &Rpc, address: &str, options: MemoryOptions) -> Result<Memory, MemoryError> {
        let state = client::Client::new(options.client.clone(), random());
        let inner = Inner {
            rpc: rpc.clone(),
            coordinator: address.to_owned(),
            options,
            frames: Frames::new(rpc.nic()),
            state: Mutex::new(state),
            links: Mutex::default(),
            reads: std::sync::atomic::AtomicU64::new(0),
        };
        inner.fetch_map(None)?;
        Ok(Memory { inner: Arc::new(inner) })
    }

    /// Stores bytes under a name, in place of what is there.
    pub fn put(&self, name: &str, bytes: &[u8], keep: Keep) -> Result<Version, MemoryError> {
        let buffer = self.inner.frames.filled(bytes).ok_or(MemoryError::NoMemory { bytes: bytes.len() })?;
        self.put_buffer(name, buffer, keep).map(|(version, _)| version)
    }

    /// The same without a copy; the buffer comes back.
    pub fn put_buffer(&self, name: &str, buffer: Buffer, keep: Keep) -> Result<(Version, Option<Buffer>), MemoryError> {
        let Keep { lease, pinned, only_if } = keep;
        let ask = Ask::Put { name: Name::new(name)?, lease_ns: lease.as_nanos() as u64, pinned, only_if };
        let (answered, buffer) = self.inner.run(ask, None, Some(buffer), 0)?;
        match answered.answer {
            Answer::Stored { version } => Ok((version, buffer)),
            _ => Err(MemoryError::Unexpected),
        }
    }

    /// The content of a name.
    pub fn get(&self, name: &str) -> Result<Vec<u8>, MemoryError> {
        let mut bytes = Vec::new();
        self.get_into(name, &mut bytes)?;
        Ok(bytes)
    }

    /// The content of a name, in place of what is in `into`. On this host it is read from the node's memory, and the node
    /// knows nothing of it.
    pub fn get_into(&self, name: &str, into: &mut Vec<u8>) -> Result<Stat, MemoryError> {
        let name = Name::new(name)?;
        if self.inner.options.one_sided
            && let Some(stat) = self.inner.read_directly(&name, into)?
        {
            return Ok(stat);
        }
        let ask = Ask::Get { name, bytes: true, places: false };
        let (answered, _) = self.inner.run(ask, None, None, ROOM_BYTES)?;
        into.clear();
        into.extend_from_slice(answered.bytes());
        match answered.answer {
            Answer::Object { stat, .. } if stat.length == into.len() as u64 => Ok(stat),
            _ => Err(MemoryError::Unexpected),
        }
    }

    /// Everything about a name but its content.
    pub fn stat(&self, name: &str) -> Result<Stat, MemoryError> {
        let (answered, _) = self.inner.run(Ask::Stat { name: Name::new(name)? }, None, None, 0)?;
        match answered.answer {
            Answer::Object { stat, .. } => Ok(stat),
            _ => Err(MemoryError::Unexpected),
        }
    }

    /// Keeps an object for so long from now on.
    pub fn renew(&self, name: &str, lease: Duration) -> Result<(), MemoryError> {
        let ask = Ask::Renew { name: Name::new(name)?, lease_ns: lease.as_nanos() as u64 };
        self.inner.run(ask, None, None, 0).map(drop)
    }

    /// Removes an object. True if it was there.
    pub fn remove(&self, name: &str, only_if: Option<Expect>) -> Result<bool, MemoryError> {
        let (answered, _) = self.inner.run(Ask::Remove { name: Name::new(name)?, only_if }, None, None, 0)?;
        match answered.answer {
            Answer::Removed { existed } => Ok(existed),
            _ => Err(MemoryError::Unexpected),
        }
    }

    /// All names that begin with `prefix`, in their order. `told` hears of each bucket that was looked at, of so many.
    pub fn list(&self, prefix: &str, mut told: impl FnMut(u16, u16)) -> Result<Vec<(Name, Stat)>, MemoryError> {
        let mut all = Vec::new();
        for bucket in 0..BUCKETS {
            let mut after = None;
            loop {
                let ask = Ask::List { bucket, after: after.take(), most: LIST_AT_ONCE };
                let (answered, _) = self.inner.run(ask, None, None, ROOM_BYTES)?;
                let Answer::Listed { objects, more } = answered.answer else { return Err(MemoryError::Unexpected) };
                after = objects.last().map(|(name, _)| name.clone());
                all.extend(objects.into_iter().filter(|(name, _)| name.as_str().starts_with(prefix)));
                if !more || after.is_none() {
                    break;
                }
            }
            told(bucket + 1, BUCKETS);
        }
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(all)
    }

    /// The nodes, and how full they are.
    pub fn nodes(&self) -> Result<Vec<NodeStat>, MemoryError> {
        self.inner.fetch_map(None)?;
        let members = self.inner.state().map().map(|map| map.nodes.clone()).unwrap_or_default();
        let stat = |member: crate::map::Member| {
            let figures = match self.inner.run(Ask::Figures, Some(member.incarnation), None, 0) {
                Ok((Answered { answer: Answer::Figures(figures), .. }, _)) => Ok(figures),
                Ok(_) => Err(MemoryError::Unexpected.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let crate::map::Member { node, incarnation, address, leaving } = member;
            NodeStat { node, incarnation, address, leaving, figures }
        };
        Ok(members.into_iter().map(stat).collect())
    }

    /// The map as it is known here.
    pub fn map(&self) -> Option<Map> {
        self.inner.state().map().cloned()
    }

    /// Nodes as they are known here, by their lives.
    pub(crate) fn lives(&self) -> Vec<Incarnation> {
        let state = self.inner.state();
        let map = state.map();
        map.map(|map| map.nodes.iter().filter(|node| !node.leaving).map(|node| node.incarnation).collect())
            .unwrap_or_default()
    }

    pub(crate) fn refresh(&self) -> Result<(), MemoryError> {
        self.inner.fetch_map(None)
    }

    /// Asks one node about pages.
    pub(crate) fn ask(&self, ask: Ask, node: Incarnation, payload: Option<Buffer>, room: usize) -> Outcome {
        self.inner.run(ask, Some(node), payload, room)
    }

    pub(crate) fn frames(&self) -> &Frames {
        &self.inner.frames
    }

    /// The way to a node that is in the map.
    pub(crate) fn link_to(&self, node: Incarnation) -> Option<Arc<Link>> {
        let address = self.inner.state().map()?.member(node)?.address.clone();
        self.inner.link(&address).ok()
    }
}

pub(crate) type Outcome = Result<(Answered<Answer>, Option<Buffer>), MemoryError>;

/// Why a call to a node has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unanswered {
    /// There is no memory for it here, which the node has nothing to do with.
    NoMemory {
        bytes: usize,
    },
    Failed(Failure),
}

impl Unanswered {
    fn of(error: &CallError) -> Unanswered {
        match (error, error.outcome()) {
            (CallError::NoMemory { bytes }, _) => Unanswered::NoMemory { bytes: *bytes },
            (_, Run::DidNotRun) => Unanswered::Failed(Failure::NotSent),
            (_, Run::Ran | Run::Unknown) => Unanswered::Failed(Failure::NoAnswer),
        }
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, client::Client> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<String, Arc<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does one thing, with all that has to be tried again for it.
    fn run(&self, ask: Ask, node: Option<Incarnation>, mut payload: Option<Buffer>, room: usize) -> Outcome {
        let now = boot_ns();
        let deadline = now + self.options.timeout.as_nanos() as u64;
        let has_payload = payload.is_some();
        let mut state = self.state();
        let mut operation = state.begin(now, ask, node, deadline);
        let mut step = state.next(now, &mut operation);
        drop(state);
        let mut answered = None;
        loop {
            step = match step {
                Step::Done(Ok(answer)) => {
                    let answered = answered
                        .take()
                        .map(|answered: Answered<Answer>| Answered { answer: answer.clone(), ..answered });
                    let nothing = || Answered { answer, buffer: None, skip: 0 };
                    return Ok((answered.unwrap_or_else(nothing), payload));
                }
                Step::Done(Err(failed)) => return Err(failed.into()),
                Step::Wait { until } => {
                    std::thread::sleep(Duration::from_nanos(until.saturating_sub(boot_ns())));
                    self.state().next(boot_ns(), &mut operation)
                }
                Step::Fetch { have } => {
                    // Without a map it is tried again until the time is up.
                    if let Err(error) = self.fetch_map(have)
                        && boot_ns() >= deadline
                    {
                        return Err(error);
                    }
                    self.state().next(boot_ns(), &mut operation)
                }
                // An earlier attempt took the bytes along, and nobody knows what became of it.
                Step::Send { .. } if has_payload && payload.is_none() => return Err(Failed::InDoubt.into()),
                Step::Send { address, request, .. } => {
                    let outcome = self.send(&address, &request, &mut payload, room, deadline);
                    let mut state = self.state();
                    match outcome {
                        Ok(got) => {
                            let answer = got.answer.clone();
                            answered = Some(got);
                            state.handle_answer(boot_ns(), &mut operation, answer)
                        }
                        Err(Unanswered::NoMemory { bytes }) => return Err(MemoryError::NoMemory { bytes }),
                        Err(Unanswered::Failed(failure)) => state.handle_failure(boot_ns(), &mut operation, failure),
                    }
                }
            };
        }
    }

    fn send(
        &self,
        address: &str,
        request: &Request,
        payload: &mut Option<Buffer>,
        room: usize,
        deadline: u64,
    ) -> Result<Answered<Answer>, Unanswered> {
        let link = self.link(address).map_err(|_| Unanswered::Failed(Failure::NotSent))?;
        let left = Duration::from_nanos(deadline.saturating_sub(boot_ns()));
        let bytes = payload.as_ref().map_or(0, |payload| payload.len() as u64);
        let (answer, back) = exchange::ask(&link.client, &self.frames, request, payload.take(), room, left);
        *payload = back;
        // More than goes there at once: trying again would not help.
        let most = match answer {
            Err(CallError::RequestTooLarge { most, .. }) => Some(most),
            Err(CallError::Buffer(_)) => Some(OBJECT_BYTES_MAX),
            _ => None,
        };
        if let Some(most) = most {
            let answer = Answer::Refused(Refusal::TooLarge { bytes, most });
            return Ok(Answered { answer, buffer: None, skip: 0 });
        }
        answer.map_err(|error| {
            if matches!(error, CallError::NotSent(_) | CallError::OutcomeUnknown(_)) {
                // Whoever is there next is another.
                self.links().remove(address);
            }
            Unanswered::of(&error)
        })
    }

    /// The way to whoever is at this address.
    fn link(&self, address: &str) -> Result<Arc<Link>, Option<OpenError>> {
        if let Some(link) = self.links().get(address) {
            return Ok(link.clone());
        }
        let options =
            ClientOptions { connect_timeout: CONNECT_FOR, reconnect_for: RECONNECT_FOR, ..ClientOptions::default() };
        let client = connect(&self.rpc, address, &options)?;
        let view = if self.options.one_sided { self.view(&client) } else { None };
        let link = Arc::new(Link { client, view });
        self.links().insert(address.to_owned(), link.clone());
        Ok(link)
    }

    /// The node's memory, if it can be mapped here. It can by processes of the same user; not by root, which could map
    /// that of others: a read of a page that the node has given back would be charged to this process.
    fn view(&self, client: &Client) -> Option<View> {
        let PeerId::Process(peer) = client.peer()? else { return None };
        if peer.uid != Some(rustix::process::geteuid().as_raw()) {
            return None;
        }
        let (answer, _) = exchange::ask(client, &self.frames, &WhereIsIt, None, 0, CONNECT_FOR);
        let HereItIs { descriptor, bytes } = answer.ok()?.answer;
        // The number is that of this PID namespace: one of another has none, and other processes have it in its `/proc`.
        let pid = peer.pid.filter(|_| proc_is_of_this_namespace())?;
        let path = format!("/proc/{pid}/fd/{descriptor}");
        let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
        View::new(PeerMemory::borrow(file.as_fd(), bytes, u64::MAX >> 1).ok()?).ok()
    }

    /// Asks the coordinator for its map, if it is not the one that is here.
    fn fetch_map(&self, have: Option<(u64, crate::types::Epoch)>) -> Result<(), MemoryError> {
        let address = || self.coordinator.clone();
        let link = self.link(&self.coordinator).map_err(|error| {
            let reason =
                error.map_or("it is not an address that can be reached from here".to_owned(), |e| e.to_string());
            MemoryError::NoCoordinator { address: address(), reason }
        })?;
        let question = CoordinatorRequest::Map { have };
        let timeout = self.options.timeout;
        let (answer, _) = exchange::ask(&link.client, &self.frames, &question, None, MAP_BYTES, timeout);
        match answer {
            Ok(Answered { answer: CoordinatorAnswer::Map(map), .. }) => {
                if let Some(map) = map {
                    self.state().handle_map(map);
                }
                Ok(())
            }
            Ok(_) => Err(MemoryError::Unexpected),
            Err(CallError::UnknownMethod { .. }) => Err(MemoryError::NotCoordinator { address: address() }),
            Err(error) => {
                self.links().remove(&self.coordinator);
                Err(MemoryError::NoCoordinator { address: address(), reason: error.to_string() })
            }
        }
    }

    /// Reads an object without a call, if its places are known or can be; `None` if it has to be asked for.
    fn read_directly(&self, name: &Name, into: &mut Vec<u8>) -> Result<Option<Stat>, MemoryError> {
        use std::sync::atomic::Ordering::Relaxed;
        let known = self.state().places(boot_ns(), name).cloned();
        let places = match known {
            Some(places) => places,
            None => {
                // Where its node cannot be read from here, places are of no use.
                let leader = {
                    let state = self.state();
                    state
                        .map()
                        .and_then(|map| map.leader(crate::map::bucket_of(name)))
                        .map(|leader| leader.address.clone())
                };
                let near = leader.and_then(|address| self.link(&address).ok()).is_some_and(|link| link.view.is_some());
                if !near {
                    return Ok(None);
                }
                let asked = boot_ns();
                let ask = Ask::Get { name: name.clone(), bytes: false, places: true };
                let (answered, _) = self.run(ask, None, None, ROOM_BYTES)?;
                let Answer::Object { stat, pages } = answered.answer else { return Err(MemoryError::Unexpected) };
                let mut state = self.state();
                state.remember(asked, name.clone(), stat, pages);
                match state.places(boot_ns(), name) {
                    Some(places) => places.clone(),
                    None => return Ok(None),
                }
            }
        };
        into.resize(places.stat.length as usize, 0);
        // All pages of an object are on one node; an empty one has none, and then there is nothing to read.
        let link = match places.pages.first() {
            Some(page) => self.link_of(*page),
            None => return Ok(None),
        };
        let Some(view) = link.as_ref().and_then(|link| link.view.as_ref()) else { return Ok(None) };
        for (bytes, page) in into.chunks_mut(PAGE_BYTES).zip(&places.pages) {
            let mut tries = 0;
            loop {
                let read = view.read(*page, 0, bytes, boot_ns);
                if read == Read::Done {
                    break;
                }
                match self.state().after_read(name, read, tries) {
                    Next::Use => break,
                    Next::Again => tries += 1,
                    Next::Call => return Ok(None),
                }
            }
        }
        if self.reads.fetch_add(1, Relaxed) % USES_EVERY == USES_EVERY - 1 {
            self.report_uses();
        }
        Ok(Some(places.stat))
    }

    fn link_of(&self, page: PageHandle) -> Option<Arc<Link>> {
        let address = self.state().map()?.member(page.incarnation)?.address.clone();
        self.link(&address).ok()
    }

    /// Tells the nodes which objects were read behind their back, so that these do not age.
    #[cold]
    fn report_uses(&self) {
        let uses = self.state().take_uses();
        for (node, ask) in uses {
            // It is no harm if it does not arrive.
            let _ = self.run(ask, Some(node), None, 0);
        }
    }
}

/// Whether processes have the numbers in `/proc` that they have for this one. Not so after `unshare --pid` alone.
fn proc_is_of_this_namespace() -> bool {
    std::fs::read_link("/proc/self").is_ok_and(|own| own.as_os_str() == std::process::id().to_string().as_str())
}

/// Room for an answer of unknown length, at first.
const ROOM_BYTES: usize = 64 << 10;
const LIST_AT_ONCE: u32 = 1024;
/// Reads without a call between two reports of them.
const USES_EVERY: u64 = 1024;
const CONNECT_FOR: Duration = Duration::from_secs(2);
const RECONNECT_FOR: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;
    use highwire_rpc::Lost;

    #[test]
    fn only_what_did_not_run_counts_as_not_sent() {
        let lost = || Box::new(Lost::Closed);
        for error in [CallError::ServerBusy, CallError::TooLate, CallError::NotSent(lost())] {
            assert_eq!(Unanswered::of(&error), Unanswered::Failed(Failure::NotSent), "{error}");
        }
        for error in [CallError::Cancelled, CallError::AnswerForgotten, CallError::OutcomeUnknown(lost())] {
            assert_eq!(Unanswered::of(&error), Unanswered::Failed(Failure::NoAnswer), "{error}");
        }
        assert_eq!(Unanswered::of(&CallError::NoMemory { bytes: 5 }), Unanswered::NoMemory { bytes: 5 });
    }
}
