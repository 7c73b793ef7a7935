//! The coordinator: the one that says which nodes there are.
//!
//! It keeps nothing across a restart. What makes that safe:
//!
//! * **Leases.** A node that has not heard from the coordinator for the time of a lease empties itself. It counts from
//!   when it asked, the coordinator from when it answered and a little longer ([`Config::margin_ns`], for clocks that
//!   run at different speeds): when a node is taken out of the map, it has already stopped.
//! * **A restart waits.** A new coordinator knows nothing of nodes that an earlier one gave a lease to, so it lets
//!   nobody in for as long as such a lease can last. Then all of them are empty, and those that come anew begin empty:
//!   a restart that takes longer than a lease, or a coordinator that is gone, empties the store. An operator who knows
//!   that there was no earlier one says so ([`Config::alone`]).
//! * **Epochs only grow.** They begin at the real time in nanoseconds when the coordinator starts and grow by one with
//!   each change, of which there are fewer than one in a nanosecond. If the real time was set back, nodes and clients
//!   that ask tell the highest epoch they saw, and the coordinator goes on above it. Where nobody is left who could tell,
//!   numbers may come twice. That does no harm to content: which names a node answers for is decided by what it was told itself, by the leases and
//!   by the handing over between nodes; the epoch in a request only makes sure that a client notices sooner.
//! * **Incarnations are random** numbers of 64 bits, made from randomness that each coordinator gets at its start.
//!
//! # How content moves
//!
//! ```text
//!   settled ── a node comes, leaves or is lost ──▶ nodes that should have a bucket follow ──▶ all have everything
//!      ▲                                                                                            │
//!      └── the former leaders have stopped ◀── those that should lead do, the others are out ◀──────┘
//! ```
//!
//! A node that should have a bucket first follows its leader, until the leader reports that it has everything; then the
//! lead passes on, and the former leader says to the new one that it has stopped. Only then do further nodes come or
//! leave. A node can be lost at any time: then a follower that has everything leads at once.
//!
//! # Where there is no room
//!
//! Which nodes should have a bucket is computed without regard to what they donate. A leader that has no room for a put,
//! or whose follower has none, says so, and the coordinator chooses another node for that one, the one with the most room
//! as nodes report it: a placement, which holds until its nodes are gone. The bucket moves as after any other change, and
//! with it go those without content that the leader names, so that the next puts find room at once.

use crate::map::{BUCKETS, Map, Member, Owner, mix, ranking};
use crate::types::{Epoch, Incarnation, Loss, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the coordinator is told at its start.
#[derive(Clone, Debug)]
pub struct Config {
    /// Copies of each object: 1 or 2.
    pub copies: u8,
    /// Buckets that names are divided into: a power of two up to [`BUCKETS`], which is what it should be but for a small
    /// cluster whose nodes come and go all the time.
    pub buckets: u16,
    /// How long a node may go on without hearing from the coordinator.
    pub lease_ns: u64,
    /// How much longer the coordinator waits than the lease lasts.
    pub margin_ns: u64,
    /// Nodes that there can be at most.
    pub nodes_max: usize,
    /// That there was no earlier coordinator within the time of a lease, so that it need not wait.
    pub alone: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            copies: 1,
            buckets: BUCKETS,
            lease_ns: 3_000_000_000,
            margin_ns: 300_000_000,
            nodes_max: 1024,
            alone: false,
        }
    }
}

/// What is asked of the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CoordinatorRequest {
    /// A node comes, with nothing in it.
    Join {
        /// The node.
        node: NodeId,
        /// Where it is reached.
        address: String,
        /// A random number for this attempt: asked again with it, the answer is the same.
        nonce: u64,
        /// The highest epoch that the node ever saw.
        known: Epoch,
    },
    /// A node goes on.
    Renew {
        /// Its life.
        incarnation: Incarnation,
        /// The map that it has.
        epoch: Epoch,
        /// Whether all that this map asks of it is done.
        settled: bool,
        /// Whether it wants to leave.
        leaving: bool,
        /// Buckets in which nothing goes on because this other node does not answer: as a follower, or as the one that
        /// leads next.
        stuck: Vec<(u16, Incarnation)>,
        /// Pages that the node has for more content.
        room: u32,
        /// Buckets that it leads and that should be elsewhere, for want of room.
        short: Vec<Shortage>,
        /// Buckets that it leads, and followers that had no room for all that is in them.
        crowded: Vec<(u16, Incarnation)>,
    },
    /// A client wants the map.
    Map {
        /// The lineage and the epoch that it has.
        have: Option<(u64, Epoch)>,
    },
}

/// A bucket that should be elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// The bucket.
    pub bucket: u16,
    /// Which of its nodes has no room.
    pub at: Incarnation,
    /// Pages that the bucket needs with what is to come. None: nothing is in it, and it may go where others go.
    pub pages: u64,
}

/// What the coordinator says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CoordinatorAnswer {
    /// The node is in.
    Joined {
        /// Its life.
        incarnation: Incarnation,
        /// How long it may go on, counted from when it asked.
        lease_ns: u64,
        /// The map.
        map: Map,
    },
    /// The node may go on.
    Renewed {
        /// For how long, counted from when it asked.
        lease_ns: u64,
        /// The map, if it is another.
        map: Option<Map>,
        /// Buckets of those that should be elsewhere for which no node has room.
        full: Vec<u16>,
    },
    /// Not yet: ask again after this time.
    Wait {
        /// Nanoseconds.
        nanoseconds: u64,
    },
    /// There is no such life, perhaps no longer: the node begins a new one, empty.
    Unknown,
    /// The node has left: nothing is on it any more.
    Left,
    /// The map; none if the client's is the present one.
    Map(Option<Map>),
    /// There are as many nodes as there can be.
    TooMany {
        /// The limit.
        most: u64,
    },
}

/// What a node says when it goes on.
struct Renewal<'a> {
    incarnation: Incarnation,
    epoch: Epoch,
    settled: bool,
    leaving: bool,
    room: u32,
    short: &'a [Shortage],
}

#[derive(Debug)]
struct Node {
    nonce: u64,
    incarnation: Incarnation,
    ends: u64,
    /// The map that it settled on last.
    settled: Epoch,
    /// Pages that it has for more content, as it said last, less what was placed there since.
    room: u64,
}

/// A bucket whose nodes were chosen by the room that they have, not by [`ranking`].
#[derive(Debug)]
struct Placement {
    /// As many as there should be copies, the leader first.
    nodes: Vec<Incarnation>,
    /// Pages that it needs.
    pages: u64,
}

/// The coordinator's state.
#[derive(Debug)]
pub struct Coordinator {
    config: Config,
    map: Map,
    nodes: Vec<Node>,
    placements: BTreeMap<u16, Placement>,
    /// Lives that left in good order, the last of them.
    left: Vec<Incarnation>,
    random: u64,
    opens: u64,
    /// The highest epoch that anybody ever saw, as far as it is known.
    floor: Epoch,
    /// The epoch at which nothing is left to be moved.
    placed: Epoch,
}

impl Coordinator {
    /// Starts at `now` on the boot clock, `real_ns` since 1970, with a number that nobody can guess.
    pub fn new(config: Config, now: u64, real_ns: u64, random: u64) -> Coordinator {
        let opens = if config.alone { now } else { now + config.lease_ns + config.margin_ns };
        let copies = config.copies.clamp(1, 2);
        let buckets = config.buckets.clamp(1, BUCKETS).next_power_of_two();
        let map = Map::empty(mix(random), Epoch(real_ns), copies, buckets);
        Coordinator {
            config,
            map,
            nodes: Vec::new(),
            placements: BTreeMap::new(),
            left: Vec::new(),
            random,
            opens,
            floor: Epoch(0),
            placed: Epoch(0),
        }
    }

    /// The map as it is.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Whether nothing is to be moved, and every node has what it should have.
    pub fn is_quiet(&self) -> bool {
        self.placed == self.map.epoch
    }

    /// From when on it lets nodes in, on the boot clock.
    pub fn opens(&self) -> u64 {
        self.opens
    }

    /// Answers a request.
    pub fn handle(&mut self, now: u64, request: CoordinatorRequest) -> CoordinatorAnswer {
        self.handle_timeout(now);
        match request {
            CoordinatorRequest::Join { node, address, nonce, known } => self.join(now, node, address, nonce, known),
            CoordinatorRequest::Renew { incarnation, epoch, settled, leaving, stuck, room, short, crowded } => {
                // Of a node with an old map it is not known whether it would still be stuck.
                if epoch == self.map.epoch {
                    crowded.iter().for_each(|(bucket, at)| self.keep(incarnation, *bucket, *at));
                    self.unblock(incarnation, &stuck);
                }
                self.renew(now, Renewal { incarnation, epoch, settled, leaving, room, short: &short })
            }
            CoordinatorRequest::Map { have } => {
                if let Some((_, known)) = have {
                    self.note(known);
                }
                let same = have == Some((self.map.lineage, self.map.epoch));
                CoordinatorAnswer::Map((!same).then(|| self.map.clone()))
            }
        }
    }

    /// When to call [`handle_timeout`](Coordinator::handle_timeout).
    pub fn next_timeout(&self) -> Option<u64> {
        self.nodes.iter().map(|node| node.ends).min()
    }

    /// Takes nodes out whose lease is over.
    pub fn handle_timeout(&mut self, now: u64) {
        // All of them before the first is taken out: what it had must not go to another that is lost as well.
        let (lost, kept) = std::mem::take(&mut self.nodes).into_iter().partition(|node| node.ends <= now);
        self.nodes = kept;
        let lost: Vec<Node> = lost;
        for node in &lost {
            self.new_epoch();
            self.take_out(node.incarnation);
        }
        if !lost.is_empty() {
            self.arrange(false);
        }
    }

    fn join(&mut self, now: u64, node: NodeId, address: String, nonce: u64, known: Epoch) -> CoordinatorAnswer {
        self.note(known);
        if now < self.opens {
            return CoordinatorAnswer::Wait { nanoseconds: self.opens - now };
        }
        let ends = now + self.config.lease_ns + self.config.margin_ns;
        if let Some(member) = self.map.nodes.iter().find(|member| member.node == node) {
            let incarnation = member.incarnation;
            let state = self.state(incarnation).expect("a member has a state");
            if state.nonce != nonce {
                // Its former life may still be there and answer.
                return CoordinatorAnswer::Wait { nanoseconds: state.ends - now };
            }
            state.ends = ends;
            return self.joined(incarnation);
        }
        if self.nodes.len() >= self.config.nodes_max {
            return CoordinatorAnswer::TooMany { most: self.config.nodes_max as u64 };
        }
        // One change at a time: content that moves does so from one node to another, not along a chain.
        if !self.is_settled() || self.map.nodes.iter().any(|member| member.leaving) {
            return CoordinatorAnswer::Wait { nanoseconds: self.config.lease_ns / 8 };
        }
        let incarnation = self.new_incarnation();
        self.nodes.push(Node { nonce, incarnation, ends, settled: Epoch(0), room: 0 });
        self.mark_full();
        self.map.nodes.push(Member { node, incarnation, address, leaving: false });
        self.new_epoch();
        self.arrange(false);
        self.joined(incarnation)
    }

    fn joined(&self, incarnation: Incarnation) -> CoordinatorAnswer {
        CoordinatorAnswer::Joined { incarnation, lease_ns: self.config.lease_ns, map: self.map.clone() }
    }

    fn renew(
        &mut self,
        now: u64,
        Renewal { incarnation, epoch, settled, leaving, room, short }: Renewal<'_>,
    ) -> CoordinatorAnswer {
        if self.left.contains(&incarnation) {
            return CoordinatorAnswer::Left;
        }
        let (ends, present) = (now + self.config.lease_ns + self.config.margin_ns, self.map.epoch);
        let Some(node) = self.state(incarnation) else {
            self.note(epoch);
            return CoordinatorAnswer::Unknown;
        };
        let ended = std::mem::replace(&mut node.ends, ends);
        node.room = room.into();
        if settled && epoch == present {
            node.settled = epoch;
        }
        let member = self.map.nodes.iter_mut().find(|member| member.incarnation == incarnation);
        let member = member.expect("a node with a state is a member");
        let wants = leaving && !member.leaving;
        if (wants || self.placed != self.map.epoch) && self.is_settled() {
            self.advance(wants.then_some(incarnation));
        }
        if self.left.contains(&incarnation) {
            return CoordinatorAnswer::Left;
        }
        // Nobody stays who could take over what they have. They may go, but until they are known to have stopped, which
        // is when their leases end, nobody else gets it.
        if self.is_quiet() && self.map.nodes.iter().all(|member| member.leaving) {
            if let Some(node) = self.state(incarnation) {
                node.ends = ended;
            }
            return CoordinatorAnswer::Left;
        }
        let full = if epoch == self.map.epoch { self.place(incarnation, short) } else { Vec::new() };
        let map = (epoch != self.map.epoch).then(|| self.map.clone());
        CoordinatorAnswer::Renewed { lease_ns: self.config.lease_ns, map, full }
    }

    /// Places buckets where there is room, once nothing else is to be moved. Returns those for which there is none.
    fn place(&mut self, asks: Incarnation, short: &[Shortage]) -> Vec<u16> {
        if !self.is_quiet() || !self.is_settled() || self.map.nodes.iter().any(|member| member.leaving) {
            return Vec::new();
        }
        let mut full = Vec::new();
        let mut most = 0;
        // Those without content come along with what has to go, and not where that could not.
        for Shortage { bucket: number, at, pages } in short.iter().copied().filter(|short| short.pages > 0) {
            match self.place_one(asks, number, at, pages) {
                Some(true) => most = most.max(pages),
                Some(false) => full.push(number),
                None => {}
            }
        }
        if most > 0 {
            for Shortage { bucket: number, at, .. } in short.iter().filter(|short| short.pages == 0) {
                self.place_one(asks, *number, *at, 1);
            }
            self.new_epoch();
            self.arrange(false);
        }
        full
    }

    /// Chooses another node for one of a bucket's. Whether there was one; `None` if the bucket is not where it was said.
    fn place_one(&mut self, asks: Incarnation, number: u16, at: Incarnation, pages: u64) -> Option<bool> {
        let owners = &self.map.buckets.get(usize::from(number))?.owners;
        let mut nodes: Vec<_> = owners.iter().map(|owner| owner.incarnation).collect();
        let position = nodes.iter().position(|life| *life == at).filter(|_| nodes[0] == asks)?;
        let roomy = |node: &&mut Node| node.room >= pages && !nodes.contains(&node.incarnation);
        let Some(node) = self.nodes.iter_mut().filter(roomy).max_by_key(|node| node.room) else { return Some(false) };
        node.room -= pages;
        nodes[position] = node.incarnation;
        self.placements.insert(number, Placement { nodes, pages });
        Some(true)
    }

    /// Chooses others, with room if there are such, in place of nodes that are gone or about to leave.
    fn replace(&mut self) {
        let stays = |map: &Map, life: Incarnation| map.member(life).is_some_and(|member| !member.leaving);
        for placement in self.placements.values_mut() {
            let before = placement.nodes.len();
            placement.nodes.retain(|life| stays(&self.map, *life));
            while placement.nodes.len() < before {
                let free = |node: &&mut Node| {
                    stays(&self.map, node.incarnation) && !placement.nodes.contains(&node.incarnation)
                };
                let Some(node) = self.nodes.iter_mut().filter(free).max_by_key(|node| node.room) else { break };
                node.room = node.room.saturating_sub(placement.pages);
                placement.nodes.push(node.incarnation);
            }
        }
        self.placements.retain(|_, placement| !placement.nodes.is_empty());
    }

    /// Buckets that were placed by the room that nodes have.
    pub fn placed(&self) -> usize {
        self.placements.len()
    }

    /// Everybody has done what the present map asks.
    fn is_settled(&self) -> bool {
        self.nodes.iter().all(|node| node.settled == self.map.epoch)
    }

    /// The next step of a change, once all is settled.
    fn advance(&mut self, leaves: Option<Incarnation>) {
        self.mark_full();
        if let Some(member) = self.map.nodes.iter_mut().find(|member| Some(member.incarnation) == leaves) {
            member.leaving = true;
            self.new_epoch();
            self.arrange(false);
            return;
        }
        let before = self.map.clone();
        self.new_epoch();
        self.arrange(true);
        if self.map.buckets != before.buckets {
            return;
        }
        // Nothing is left to be moved: who wanted to leave may.
        let idle = |member: &Member| {
            let has = |owner: &Owner| owner.incarnation == member.incarnation;
            !self.map.buckets.iter().any(|bucket| bucket.owners.iter().any(has))
        };
        let gone = self.map.nodes.iter().find(|member| member.leaving && idle(member)).map(|member| member.incarnation);
        match gone {
            Some(gone) => {
                self.nodes.retain(|node| node.incarnation != gone);
                self.left.push(gone);
                if self.left.len() > LEFT_MAX {
                    self.left.remove(0);
                }
                self.take_out(gone);
            }
            None => {
                self.map = before;
                self.placed = self.map.epoch;
            }
        }
    }

    /// Helps a node on that another one does not answer, though both are there.
    ///
    /// A follower begins again with nothing, and is not waited for until it has answered that. A leader that waits to
    /// hear from the one before need not any more: that one has this map, so it has stopped.
    fn unblock(&mut self, asks: Incarnation, stuck: &[(u16, Incarnation)]) {
        let next = Epoch(self.map.epoch.max(self.floor).0 + 1);
        let mut changed = false;
        for (number, silent) in stuck {
            let Some(bucket) = self.map.buckets.get_mut(usize::from(*number)) else { continue };
            let leads = bucket.owners.first().map(|owner| owner.incarnation);
            if leads == Some(asks) {
                let follower = bucket.owners.iter_mut().skip(1).find(|owner| owner.incarnation == *silent);
                if let Some(follower) = follower {
                    (follower.since, follower.full) = (next, false);
                    changed = true;
                }
            } else if leads == Some(*silent) && bucket.from == Some(asks) {
                bucket.from = None;
                changed = true;
            }
        }
        if changed {
            self.map.epoch = next;
        }
    }

    /// A follower had no room for all that is in a bucket: it does not lead it next, and what is there stays where it is.
    fn keep(&mut self, leader: Incarnation, number: u16, crowded: Incarnation) {
        let Some(bucket) = self.map.buckets.get(usize::from(number)) else { return };
        let leads = bucket.owners.first().is_some_and(|owner| owner.incarnation == leader);
        let follows = bucket.owners.iter().skip(1).any(|owner| owner.incarnation == crowded);
        let kept = self.placements.get(&number).is_some_and(|placement| placement.nodes.first() == Some(&leader));
        if !leads || !follows || kept {
            return;
        }
        let pages = self.placements.get(&number).map_or(0, |placement| placement.pages);
        self.placements.insert(number, Placement { nodes: vec![leader], pages });
    }

    /// All followers have everything: their leaders said so.
    fn mark_full(&mut self) {
        for bucket in &mut self.map.buckets {
            bucket.from = None;
            bucket.owners.iter_mut().for_each(|owner| owner.full = true);
        }
    }

    /// Takes a node out of all buckets, in the present epoch.
    fn take_out(&mut self, gone: Incarnation) {
        let Some(at) = self.map.nodes.iter().position(|member| member.incarnation == gone) else { return };
        let member = self.map.nodes.remove(at);
        let epoch = self.map.epoch;
        let there = |member: &&Member| self.nodes.iter().any(|node| node.incarnation == member.incarnation);
        let mut heirs: Vec<&Member> = self.map.nodes.iter().filter(there).collect();
        if heirs.iter().any(|member| !member.leaving) {
            heirs.retain(|member| !member.leaving);
        }
        for (bucket, number) in self.map.buckets.iter_mut().zip(0..BUCKETS) {
            if bucket.from == Some(gone) {
                bucket.from = None;
            }
            let Some(at) = bucket.owners.iter().position(|owner| owner.incarnation == gone) else { continue };
            bucket.owners.remove(at);
            if at > 0 {
                continue;
            }
            bucket.led_since = epoch;
            if let Some(full) = bucket.owners.iter().position(|owner| owner.full) {
                bucket.owners[..=full].rotate_right(1);
            } else {
                bucket.loss = Some(Loss { node: member.node, epoch });
                if bucket.owners.is_empty() {
                    let nodes = heirs.iter().map(|member| (member.node, member.incarnation));
                    let heir = |incarnation| Owner { incarnation, since: epoch, full: true };
                    bucket.owners.extend(ranking(number, nodes, 1).into_iter().map(heir));
                }
            }
            // Followers without everything begin again, with nothing: what changes until the new leader reaches them
            // does not wait for them, so that what they have may be out of date.
            let partial = bucket.owners.iter_mut().skip(1).filter(|owner| !owner.full);
            partial.for_each(|owner| owner.since = epoch);
            // A node that led before the one that is gone, and may not know yet that it no longer does, is still
            // waited for: `from` stays, unless it is that node itself that leads again.
            if let Some(leader) = bucket.owners.first_mut() {
                leader.full = true;
                bucket.from = bucket.from.filter(|from| *from != leader.incarnation);
            }
        }
    }

    /// Brings the buckets nearer to where they should be, in the present epoch: who should have one and does not is to
    /// follow. If `complete` is said, all that follow have everything, and the lead may pass on.
    fn arrange(&mut self, complete: bool) {
        self.replace();
        let Map { epoch, copies, ref nodes, ref mut buckets, .. } = self.map;
        for (bucket, number) in buckets.iter_mut().zip(0..BUCKETS) {
            let stay = nodes.iter().filter(|member| !member.leaving).map(|member| (member.node, member.incarnation));
            let mut wanted = ranking(number, stay, copies);
            if let Some(Placement { nodes, .. }) = self.placements.get(&number) {
                let others = std::mem::take(&mut wanted).into_iter().filter(|life| !nodes.contains(life));
                wanted = nodes.iter().copied().chain(others).take(usize::from(copies)).collect();
            }
            if wanted.is_empty() {
                continue;
            }
            let Some(leader) = bucket.owners.first().map(|owner| owner.incarnation) else {
                // Nobody ever had it, or everybody who did is lost.
                let fresh = |incarnation: &Incarnation| Owner { incarnation: *incarnation, since: epoch, full: false };
                bucket.owners = wanted.iter().map(fresh).collect();
                bucket.owners[0].full = true;
                (bucket.led_since, bucket.from) = (epoch, None);
                continue;
            };
            let has = |incarnation: &Incarnation| bucket.owners.iter().any(|owner| owner.incarnation == *incarnation);
            let missing: Vec<_> = wanted.iter().copied().filter(|incarnation| !has(incarnation)).collect();
            if !missing.is_empty() {
                let follow = |incarnation| Owner { incarnation, since: epoch, full: false };
                bucket.owners.extend(missing.into_iter().map(follow));
            } else if complete {
                let find = |incarnation: &Incarnation| {
                    *bucket.owners.iter().find(|owner| owner.incarnation == *incarnation).expect("none is missing")
                };
                bucket.owners = wanted.iter().map(find).collect();
                if wanted[0] != leader {
                    (bucket.led_since, bucket.from) = (epoch, Some(leader));
                }
            }
        }
    }

    /// Somebody saw this epoch.
    fn note(&mut self, known: Epoch) {
        // As far as numbers can go that a coordinator ever gave out.
        self.floor = self.floor.max(known.min(EPOCH_MAX));
    }

    fn new_epoch(&mut self) {
        self.map.epoch = Epoch(self.map.epoch.max(self.floor).0 + 1);
    }

    fn new_incarnation(&mut self) -> Incarnation {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // Zero is no life.
        mix(self.random).max(1)
    }

    fn state(&mut self, incarnation: Incarnation) -> Option<&mut Node> {
        self.nodes.iter_mut().find(|node| node.incarnation == incarnation)
    }
}

/// Real time reaches it in the year 2262.
const EPOCH_MAX: Epoch = Epoch(1 << 63);
/// Nodes that left are remembered, so that one whose last answer was lost learns that it has left.
const LEFT_MAX: usize = 64;

#[cfg(test)]
mod tests;
