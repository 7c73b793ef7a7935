//! A client's way to the right node: from the map and a request to whom to send it, and from what came back to what to
//! do next.
//!
//! ```text
//!            ┌───────────────────── wait a little ◀──── Arriving, NodeBehind, Busy
//!            ▼                                              │
//!   begin ─▶ next ──▶ Send ──▶ handle_answer ───────────────┼──▶ Done
//!            ▲                 handle_failure               │
//!            └── Fetch, handle_map ◀──── OldEpoch, NotOwner, no answer
//! ```
//!
//! A request that asks for a change and gets no answer is not sent again: it may still be on its way, and would then
//! be made twice, the second time perhaps after somebody else's change. The caller learns that it is in doubt
//! ([`Failed::InDoubt`]). With [`Expect`](crate::request::Expect) it can be asked again without harm. Requests about
//! pages are made so that they can be sent again: they carry a page's version, or the turn.

use crate::donation::Read;
use crate::map::{Map, mix};
use crate::request::{Answer, Ask, Refusal, Request, Stat};
use crate::types::{Epoch, Incarnation, Name, Nanoseconds, NodeId, PageHandle};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// What a client is told at its start. Times are nanoseconds.
#[derive(Clone, Debug)]
pub struct Config {
    /// The first wait before a request is sent again.
    pub wait_ns_min: u64,
    /// The longest wait, to which it doubles.
    pub wait_ns_max: u64,
    /// Objects whose pages are remembered.
    pub places_max: usize,
    /// Reads without a call of objects that are remembered before their node is told that they were used.
    pub uses_max: usize,
    /// Reads of a page that changes all the time, before it is asked for by a call.
    pub reads_max: u32,
}

impl Default for Config {
    fn default() -> Config {
        Config { wait_ns_min: 1_000_000, wait_ns_max: 100_000_000, places_max: 65_536, uses_max: 1024, reads_max: 3 }
    }
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    /// The node refused, for a reason that asking again does not change.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A change was asked for and not confirmed.
    #[error("the change was not confirmed: it may have been made or may yet be made; look what is there")]
    InDoubt,
    /// The time is up.
    #[error("not done after {tries} tries within {}; the last time: {}", Nanoseconds(*within_ns), last.as_ref().map_or("no answer".to_owned(), Refusal::to_string))]
    TimedOut {
        /// How often it was sent.
        tries: u32,
        /// Within which time.
        within_ns: u64,
        /// What was said last.
        last: Option<Refusal>,
    },
    /// The node is not there any more.
    #[error("{} in its life {incarnation:x} is gone, and all that it held", node.map_or("the node".to_owned(), |node| node.to_string()))]
    Gone {
        /// The node, if it was known.
        node: Option<NodeId>,
        /// Its life.
        incarnation: Incarnation,
    },
}

/// How an attempt to send failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The node cannot have received it.
    NotSent,
    /// It was sent, and nothing came back.
    NoAnswer,
}

/// What to do next for an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this, and bring back the answer or the failure.
    Send {
        /// To whom.
        node: NodeId,
        /// Where it is reached.
        address: String,
        /// The request.
        request: Request,
    },
    /// Ask the coordinator for the map, hand it to [`Client::handle_map`], and call [`Client::next`].
    Fetch {
        /// The lineage and epoch of the one that is here.
        have: Option<(u64, Epoch)>,
    },
    /// Call [`Client::next`] at this time.
    Wait {
        /// The time.
        until: u64,
    },
    /// It is over.
    Done(Result<Answer, Failed>),
}

/// Something that a client wants done.
#[derive(Clone, Debug)]
pub struct Operation {
    ask: Ask,
    /// The node, where the request does not tell it.
    node: Option<Incarnation>,
    began: u64,
    deadline: u64,
    tries: u32,
    wait_ns: u64,
    waits_until: u64,
    /// Whether a map must be fetched first, and with which one it was asked before.
    fetch: bool,
    /// A map was fetched since it was noticed that the node is not in it.
    looked: bool,
    /// An earlier attempt had no answer.
    unanswered: bool,
    last: Option<Refusal>,
}

/// A client's state.
#[derive(Debug)]
pub struct Client {
    config: Config,
    map: Option<Map>,
    /// Nodes by their lives, those that are gone included.
    lives: BTreeMap<Incarnation, NodeId>,
    random: u64,
    places: HashMap<Name, Places>,
    /// The order in which they were remembered.
    order: VecDeque<Name>,
    used: Vec<Name>,
}

/// Where an object can be read without a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// What the node said of it.
    pub stat: Stat,
    /// Its pages in their order.
    pub pages: Vec<PageHandle>,
    /// Until when, on the boot clock.
    pub until: u64,
}

/// What to do after a read without a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The bytes are good.
    Use,
    /// Read again.
    Again,
    /// Ask the node.
    Call,
}

impl Client {
    /// A client without a map.
    pub fn new(config: Config, random: u64) -> Client {
        Client {
            config,
            map: None,
            lives: BTreeMap::new(),
            random,
            places: HashMap::new(),
            order: VecDeque::new(),
            used: Vec::new(),
        }
    }

    /// The map it has.
    pub fn map(&self) -> Option<&Map> {
        self.map.as_ref()
    }

    /// Begins something, to be done until `deadline`. `node` is for requests about pages that no handle names yet, and
    /// for figures.
    pub fn begin(&self, now: u64, ask: Ask, node: Option<Incarnation>, deadline: u64) -> Operation {
        Operation {
            ask,
            node,
            began: now,
            deadline,
            tries: 0,
            wait_ns: self.config.wait_ns_min,
            waits_until: now,
            fetch: false,
            looked: false,
            unanswered: false,
            last: None,
        }
    }

    /// The coordinator's map. One of the same lineage that is not newer is passed over.
    pub fn handle_map(&mut self, map: Map) {
        let newer = self.map.as_ref().is_none_or(|mine| mine.lineage != map.lineage || mine.epoch < map.epoch);
        if newer && map.check().is_ok() {
            self.lives.extend(map.nodes.iter().map(|member| (member.incarnation, member.node)));
            while self.lives.len() > LIVES_MAX {
                self.lives.pop_first();
            }
            self.map = Some(map);
        }
    }

    /// What to do now.
    pub fn next(&mut self, now: u64, operation: &mut Operation) -> Step {
        if now >= operation.deadline {
            return Step::Done(Err(self.time_is_up(operation)));
        }
        if now < operation.waits_until {
            return Step::Wait { until: operation.waits_until.min(operation.deadline) };
        }
        let Some(map) = self.map.as_ref().filter(|_| !operation.fetch) else {
            // Once: whoever fetches calls this again when the map is there, or when it could not be had.
            operation.fetch = false;
            operation.looked = true;
            if self.map.is_none() {
                self.delay(now, operation);
            }
            return Step::Fetch { have: self.map.as_ref().map(|map| (map.lineage, map.epoch)) };
        };
        let wanted = operation.node.or_else(|| node_of(&operation.ask));
        let member = match (wanted, bucket_named(map, &operation.ask)) {
            (Some(incarnation), _) => map.member(incarnation),
            (None, Some(bucket)) => map.buckets.get(usize::from(bucket)).and_then(|_| map.leader(bucket)),
            (None, None) => None,
        };
        if let Some(member) = member {
            operation.tries += 1;
            let request = Request { epoch: map.epoch, to: member.incarnation, ask: operation.ask.clone() };
            return Step::Send { node: member.node, address: member.address.clone(), request };
        }
        match wanted {
            Some(incarnation) if operation.looked => {
                let node = self.lives.get(&incarnation).copied();
                Step::Done(Err(Failed::Gone { node, incarnation }))
            }
            Some(_) => {
                operation.fetch = true;
                self.next(now, operation)
            }
            // There are no nodes yet.
            None => {
                operation.fetch = true;
                self.delay(now, operation);
                self.next(now, operation)
            }
        }
    }

    /// The answer to what was sent.
    pub fn handle_answer(&mut self, now: u64, operation: &mut Operation, answer: Answer) -> Step {
        let refusal = match answer {
            Answer::Refused(refusal) => refusal,
            answer => return Step::Done(Ok(answer)),
        };
        operation.last = Some(refusal.clone());
        match refusal {
            Refusal::OldEpoch { .. } | Refusal::NotOwner { .. } => {
                operation.fetch = true;
                // At once the first time; then the coordinator and the node do not agree yet.
                if operation.tries > 1 {
                    self.delay(now, operation);
                }
            }
            Refusal::Gone { .. } if operation.node.or_else(|| node_of(&operation.ask)).is_none() => {
                operation.fetch = true;
                self.delay(now, operation);
            }
            Refusal::Gone { node, incarnation } => {
                return Step::Done(Err(Failed::Gone { node: Some(node), incarnation }));
            }
            Refusal::NoLease => {
                operation.fetch = true;
                self.delay(now, operation);
            }
            Refusal::NodeBehind { .. } | Refusal::Arriving { .. } | Refusal::Busy { .. } => self.delay(now, operation),
            Refusal::InDoubt => return Step::Done(Err(Failed::InDoubt)),
            // Only the owner writes: it is its own earlier attempt that made this version.
            Refusal::PageVersion { found, expected }
                if operation.unanswered && found == expected.wrapping_add(1) & (u32::MAX >> 1) =>
            {
                return Step::Done(Ok(Answer::Written { version: found }));
            }
            refusal => return Step::Done(Err(refusal.into())),
        }
        self.next(now, operation)
    }

    /// It could not be sent, or nothing came back.
    pub fn handle_failure(&mut self, now: u64, operation: &mut Operation, failure: Failure) -> Step {
        if failure == Failure::NoAnswer {
            if operation.ask.changes_names() {
                return Step::Done(Err(Failed::InDoubt));
            }
            operation.unanswered = true;
        }
        operation.fetch = true;
        self.delay(now, operation);
        self.next(now, operation)
    }

    /// Remembers where an object is, as an answer to a request made at `asked` said.
    pub fn remember(&mut self, asked: u64, name: Name, stat: Stat, pages: Vec<PageHandle>) {
        let places = Places { stat, pages, until: asked.saturating_add(stat.lease_left_ns) };
        if self.places.insert(name.clone(), places).is_none() {
            self.order.push_back(name);
        }
        while self.places.len() > self.config.places_max {
            let Some(oldest) = self.order.pop_front() else { break };
            self.places.remove(&oldest);
        }
        // Names that were forgotten in between are still in line.
        if self.order.len() > 2 * self.config.places_max {
            self.order.retain(|name| self.places.contains_key(name));
        }
    }

    /// Where an object can be read without a call, and that it will be.
    pub fn places(&mut self, now: u64, name: &Name) -> Option<&Places> {
        if self.places.get(name).is_some_and(|places| places.until <= now) {
            self.places.remove(name);
        }
        let places = self.places.get(name)?;
        if self.used.len() < self.config.uses_max {
            self.used.push(name.clone());
        }
        Some(places)
    }

    /// What to do after the `tries`th read of a page without a call.
    pub fn after_read(&mut self, name: &Name, read: Read, tries: u32) -> Next {
        match read {
            Read::Done => Next::Use,
            Read::Changed | Read::Busy if tries < self.config.reads_max => Next::Again,
            Read::Changed | Read::Busy => Next::Call,
            Read::Freed | Read::Lapsed => {
                self.places.remove(name);
                Next::Call
            }
        }
    }

    /// Objects that were read without a call since this was last asked, by the node that leads them: to be sent now and
    /// then, so that they do not age.
    pub fn take_uses(&mut self) -> Vec<(Incarnation, Ask)> {
        let mut used = std::mem::take(&mut self.used);
        used.sort();
        used.dedup();
        let mut by_node: BTreeMap<Incarnation, Vec<Name>> = BTreeMap::new();
        for name in used {
            let leader = self.map.as_ref().and_then(|map| map.leader(map.bucket_of(&name)));
            if let Some(leader) = leader {
                by_node.entry(leader.incarnation).or_default().push(name);
            }
        }
        by_node.into_iter().map(|(node, names)| (node, Ask::Used { names })).collect()
    }

    fn time_is_up(&self, operation: &Operation) -> Failed {
        let within_ns = operation.deadline - operation.began;
        Failed::TimedOut { tries: operation.tries, within_ns, last: operation.last.clone() }
    }

    /// Waits, longer each time, and not as long as all the others do.
    fn delay(&mut self, now: u64, operation: &mut Operation) {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let half = operation.wait_ns / 2;
        operation.waits_until = now + half + mix(self.random) % half.max(1);
        operation.wait_ns = (operation.wait_ns * 2).min(self.config.wait_ns_max);
    }
}

/// The life that a request's pages belong to.
fn node_of(ask: &Ask) -> Option<Incarnation> {
    match ask {
        Ask::WritePage { page, .. } | Ask::ReadPage { page, .. } => Some(page.incarnation),
        Ask::WritePages { pages, .. } => pages.first().map(|(page, _)| page.incarnation),
        Ask::ReadPages { pages } => pages.first().map(|page| page.incarnation),
        Ask::FreePages { pages, .. } => pages.first().map(|page| page.incarnation),
        _ => None,
    }
}

fn bucket_named(map: &Map, ask: &Ask) -> Option<u16> {
    match ask {
        Ask::Put { name, .. }
        | Ask::Get { name, .. }
        | Ask::Renew { name, .. }
        | Ask::Remove { name, .. }
        | Ask::Stat { name } => Some(map.bucket_of(name)),
        Ask::List { bucket, .. } => Some(*bucket),
        Ask::Used { names } => names.first().map(|name| map.bucket_of(name)),
        _ => None,
    }
}

/// Lives of nodes that are remembered.
const LIVES_MAX: usize = 4096;

#[cfg(test)]
mod tests;
