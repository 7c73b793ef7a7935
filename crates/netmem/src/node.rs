//! A node: the store in its donated memory, and its place among the others.
//!
//! [`Node`] does no I/O and has no clock. Requests come in by `handle_*` with the time on the boot clock in
//! nanoseconds; what is to be sent comes out of [`poll_output`](Node::poll_output).
//!
//! ```text
//!            Joined                    lease over, or Unknown: empties itself
//!   out ────────────────▶ in a life ───────────────────────────────────────────▶ out
//!    │                        │
//!    └ asks until it is let in└── Left: all content is elsewhere ──▶ left
//! ```

mod config;
mod lead;
mod paged;
mod replicate;
mod room;
mod store;

pub use config::Config;
pub(crate) use paged::next_version;

use crate::coordinator::{CoordinatorAnswer, CoordinatorRequest};
use crate::donation::Donation;
use crate::map::{BUCKETS, Map, mix};
use crate::request::{Answer, Ask, PeerRequest, Refusal, Request};
use crate::types::{Epoch, Incarnation, Name, NodeId};
use lead::{Deed, Follow, Lead, Op, Part, Place};
use paged::Paged;
use replicate::Calls;
use room::Wants;
use std::collections::VecDeque;
use store::{Staged, Store};

/// What a node wants sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// An answer to the request that came with this token.
    Answer {
        /// The token.
        token: u64,
        /// The answer.
        answer: Answer,
        /// The bytes that go with it.
        body: Vec<u8>,
    },
    /// A request to another node; the answer goes to [`Node::handle_peer_answer`].
    Peer {
        /// What the answer is to be handed over with.
        ticket: u64,
        /// The request, which says to whom.
        request: PeerRequest,
        /// The bytes that go with it.
        body: Vec<u8>,
    },
    /// A request to the coordinator; the answer goes to [`Node::handle_coordinator`].
    Coordinator {
        /// What the answer is to be handed over with.
        ticket: u64,
        /// The request.
        request: CoordinatorRequest,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Out,
    In { incarnation: Incarnation, ends: u64 },
    Left,
}

/// Bytes that are being brought to a node piece by piece, for an object: see [`Node::stage`].
#[derive(Debug)]
pub struct Staging {
    life: Incarnation,
    staged: Staged,
}

/// A node's state.
#[derive(Debug)]
pub struct Node {
    id: NodeId,
    address: String,
    config: Config,
    standing: Standing,
    store: Store,
    paged: Paged,
    map: Option<Map>,
    /// The highest epoch ever seen.
    known: Epoch,
    places: Vec<Option<Place>>,
    calls: Calls,
    wants: Wants,
    outputs: VecDeque<Output>,
    random: u64,
    nonce: u64,
    leaving: bool,
    /// The body of the request that is being handled, if it was brought before.
    staged: Option<Staged>,
    /// Objects that no other node had room for when this one was to leave.
    unplaced: u64,
    /// The request to the coordinator that waits for its answer, and when it was made.
    asking: Option<(u64, u64)>,
    /// When to ask the coordinator next.
    ask_at: u64,
    /// The map that the coordinator was told to be done.
    reported: Epoch,
    /// A bucket that was not in order when it was last looked.
    undone: usize,
    sweep_at: u64,
}

impl Node {
    /// A node that is not in yet. `random` is a number that nobody can guess.
    pub fn new(id: NodeId, address: String, donation: Donation, config: Config, random: u64) -> Node {
        Node {
            id,
            address,
            config,
            standing: Standing::Out,
            store: Store::new(donation),
            paged: Paged::default(),
            map: None,
            known: Epoch(0),
            places: (0..BUCKETS).map(|_| None).collect(),
            calls: Calls::default(),
            wants: Wants::default(),
            outputs: VecDeque::new(),
            random,
            nonce: mix(random),
            leaving: false,
            staged: None,
            unplaced: 0,
            asking: None,
            ask_at: 0,
            reported: Epoch(0),
            undone: 0,
            sweep_at: 0,
        }
    }

    /// Where others reach it, before it has asked to be let in.
    pub fn set_address(&mut self, address: String) {
        self.address = address;
    }

    /// Its number.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Its life, while it is in one.
    pub fn incarnation(&self) -> Option<Incarnation> {
        match self.standing {
            Standing::In { incarnation, .. } => Some(incarnation),
            Standing::Out | Standing::Left => None,
        }
    }

    /// The map that it has, with the addresses of the others.
    pub fn map(&self) -> Option<&Map> {
        self.map.as_ref()
    }

    /// The memory that it donates, to hand to readers.
    pub fn donation(&self) -> &Donation {
        &self.store.donation
    }

    /// Lets no more of the donated pages than these have memory; see [`Donation::limit_memory`].
    pub fn limit_memory(&mut self, pages: u32) {
        self.store.donation.limit_memory(pages);
    }

    /// How full it is.
    pub fn figures(&self) -> crate::request::Figures {
        self.store.figures()
    }

    /// True when it has left in good order.
    pub fn has_left(&self) -> bool {
        self.standing == Standing::Left
    }

    /// Objects that no other node had room for while this one handed them over: they are lost when it has left.
    pub fn unplaced(&self) -> u64 {
        self.unplaced
    }

    /// Hands everything over and leaves. Pages of paged regions cannot be handed over: their owners move them, or lose
    /// them. [`figures`](Node::figures) tells how many there are.
    pub fn leave(&mut self, now: u64) {
        self.leaving = true;
        self.ask_at = now;
        self.handle_timeout(now);
    }

    /// Somebody has a map of this epoch: if it is a later one, the coordinator is asked for it at once.
    pub fn hint(&mut self, now: u64, epoch: Epoch) {
        if self.map.as_ref().is_some_and(|map| map.epoch < epoch) {
            self.ask_at = self.ask_at.min(now);
            self.handle_timeout(now);
        }
    }

    /// The next thing to send.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call [`handle_timeout`](Node::handle_timeout) at the latest.
    pub fn next_timeout(&self) -> u64 {
        let ends = match self.standing {
            Standing::In { ends, .. } => ends,
            Standing::Out => u64::MAX,
            Standing::Left => return u64::MAX,
        };
        let ask = self.asking.map_or(self.ask_at, |(_, since)| since + self.config.retry_ns);
        let call = self.calls.oldest().map_or(u64::MAX, |since| since + self.config.retry_ns);
        ends.min(ask).min(call).min(self.sweep_at)
    }

    /// Does what time asks for.
    pub fn handle_timeout(&mut self, now: u64) {
        self.lapse(now);
        if self.standing == Standing::Left {
            return;
        }
        self.retry(now);
        if now >= self.sweep_at {
            self.sweep_at = now + self.config.sweep_ns;
            self.store.sweep(now, self.config.keep_blocks);
            self.paged.sweep(&mut self.store, now);
        }
        self.ask_coordinator(now);
    }

    fn ask_coordinator(&mut self, now: u64) {
        let epoch = self.map.as_ref().map(|map| map.epoch);
        // Once all is done that a map asks, it stays so.
        let settled = epoch.is_some_and(|epoch| self.reported == epoch) || (epoch.is_some() && self.is_settled());
        if settled && epoch.is_some_and(|epoch| self.reported < epoch) {
            self.ask_at = self.ask_at.min(now);
        }
        let due = match self.asking {
            Some((_, since)) => now >= since + self.config.retry_ns,
            None => now >= self.ask_at,
        };
        if !due {
            return;
        }
        let request = match (self.standing, &self.map) {
            (Standing::In { incarnation, .. }, Some(map)) => {
                let (epoch, leaving) = (map.epoch, self.leaving);
                if settled {
                    self.reported = epoch;
                }
                let (stuck, room, short) = (self.stuck(now), self.store.room(), self.shortages(now));
                let crowded = self.crowded();
                CoordinatorRequest::Renew { incarnation, epoch, settled, leaving, stuck, room, short, crowded }
            }
            (Standing::Left, _) => return,
            _ => CoordinatorRequest::Join {
                node: self.id,
                address: self.address.clone(),
                nonce: self.nonce,
                known: self.known,
            },
        };
        let ticket = self.calls.new_ticket();
        self.asking = Some((ticket, now));
        self.outputs.push_back(Output::Coordinator { ticket, request });
    }

    /// The coordinator's answer.
    pub fn handle_coordinator(&mut self, now: u64, ticket: u64, answer: CoordinatorAnswer) {
        self.lapse(now);
        // An answer to an earlier request than the last says nothing that the last one's will not.
        let Some((_, asked)) = self.asking.filter(|(asking, _)| *asking == ticket) else { return };
        self.asking = None;
        self.ask_at = now + self.config.retry_ns;
        match (answer, self.standing) {
            (CoordinatorAnswer::Joined { incarnation, lease_ns, map }, Standing::Out) => {
                let ends = asked.saturating_add(lease_ns);
                if ends > now && map.check().is_ok() {
                    self.store.begin(incarnation);
                    self.paged.begin();
                    self.standing = Standing::In { incarnation, ends };
                    self.map = None;
                    self.reported = Epoch(0);
                    self.store.donation.set_valid_until(ends);
                    self.ask_at = asked.saturating_add(lease_ns / 3);
                    self.adopt(now, map);
                }
            }
            (CoordinatorAnswer::Renewed { lease_ns, map, full }, Standing::In { incarnation, ends }) => {
                let ends = ends.max(asked.saturating_add(lease_ns));
                self.standing = Standing::In { incarnation, ends };
                self.store.donation.set_valid_until(ends);
                self.ask_at = asked.saturating_add(lease_ns / 3);
                self.wants.deny(now, &full);
                if let Some(map) = map.filter(|map| map.check().is_ok()) {
                    self.adopt(now, map);
                }
                if self.wants.is_waiting() {
                    self.ask_at = self.ask_at.min(now + self.config.retry_ns);
                }
            }
            (CoordinatorAnswer::Unknown, Standing::In { .. }) => {
                self.empty();
                self.ask_at = now;
            }
            (CoordinatorAnswer::Left, Standing::In { .. }) => {
                self.empty();
                self.standing = Standing::Left;
            }
            (CoordinatorAnswer::Wait { nanoseconds }, _) => {
                self.ask_at = now.saturating_add(nanoseconds.min(self.config.lease_ns_max));
            }
            _ => {}
        }
        self.handle_timeout(now);
    }

    /// A request of a client. Its answer may come at once or later, with this token.
    pub fn handle_request(&mut self, now: u64, token: u64, request: Request, body: &[u8]) {
        self.lapse(now);
        match self.try_request(now, token, request, body) {
            Ok(Some((answer, body))) => self.outputs.push_back(Output::Answer { token, answer, body }),
            Ok(None) => {}
            Err(refusal) => self.answer(token, Answer::Refused(refusal)),
        }
        self.handle_timeout(now);
    }

    /// Begins to bring the bytes of an object of `length`, so that a large one does not keep the node from everything else,
    /// its lease included. What has begun ends in [`handle_staged`](Node::handle_staged) or [`unstage`](Node::unstage).
    pub fn begin_staging(&mut self, now: u64, length: u64) -> Result<Staging, Refusal> {
        self.lapse(now);
        let life = self.incarnation().ok_or(Refusal::NoLease)?;
        self.store.check_room(&self.config, length)?;
        Ok(Staging { life, staged: Staged { pages: Vec::new(), length: 0 } })
    }

    /// Brings a piece; each but the last fills its pages.
    pub fn stage(&mut self, now: u64, staging: &mut Staging, piece: &[u8]) -> Result<(), Refusal> {
        self.lapse(now);
        if self.incarnation() != Some(staging.life) {
            return Err(Refusal::NoLease);
        }
        self.store.stage_more(&mut staging.staged, piece)?;
        self.handle_timeout(now);
        Ok(())
    }

    /// Gives up what was brought.
    pub fn unstage(&mut self, staging: Staging) {
        // Pages of a life that is over were freed with it.
        if self.incarnation() == Some(staging.life) {
            self.store.give(staging.staged.pages);
        }
    }

    /// A request to put what was brought.
    pub fn handle_staged(&mut self, now: u64, token: u64, request: Request, staging: Staging) {
        self.lapse(now);
        if self.incarnation() != Some(staging.life) {
            return self.answer(token, Answer::Refused(Refusal::NoLease));
        }
        self.staged = Some(staging.staged);
        self.handle_request(now, token, request, &[]);
        if let Some(refused) = self.staged.take() {
            self.store.give(refused.pages);
        }
    }

    fn answer(&mut self, token: u64, answer: Answer) {
        self.outputs.push_back(Output::Answer { token, answer, body: Vec::new() });
    }

    fn try_request(
        &mut self,
        now: u64,
        token: u64,
        request: Request,
        body: &[u8],
    ) -> Result<Option<(Answer, Vec<u8>)>, Refusal> {
        let (Some(incarnation), Some(map)) = (self.incarnation(), &self.map) else { return Err(Refusal::NoLease) };
        let Request { epoch: yours, to, ask } = request;
        if to != incarnation {
            return Err(Refusal::Gone { node: self.id, incarnation: to });
        }
        let mine = map.epoch;
        if yours < mine {
            return Err(Refusal::OldEpoch { yours, mine });
        }
        let plain = |answer: Answer| Ok(Some((answer, Vec::new())));
        let at = (&mut self.store, &self.config, now);
        // Pages of a life of this node are in no other place whatever the map says: a later map changes nothing.
        match ask {
            Ask::TakePages { .. } if self.leaving => return Err(Refusal::Leaving),
            Ask::TakePages { owner, count, lease_ns, turn } => {
                return plain(self.paged.take(at, owner, count, lease_ns, turn)?);
            }
            Ask::WritePage { owner, page, at, version } => {
                return plain(self.paged.write((&mut self.store, now), owner, page, at, version, body)?);
            }
            Ask::ReadPage { page, at, length } => return Paged::read(&self.store, page, at, length).map(Some),
            Ask::WritePages { owner, pages } => {
                return plain(self.paged.write_all(at, owner, &pages, body)?);
            }
            Ask::ReadPages { pages } => return Paged::read_all(&self.store, &self.config, &pages).map(Some),
            Ask::FreePages { owner, pages } => return plain(self.paged.free(&mut self.store, now, owner, &pages)?),
            Ask::RenewOwner { owner, lease_ns } => {
                return plain(self.paged.renew(&mut self.store, &self.config, now, owner, lease_ns)?);
            }
            Ask::EndOwner { owner } => {
                self.paged.end(&mut self.store, owner);
                return plain(Answer::Done);
            }
            Ask::Figures => return plain(Answer::Figures(self.store.figures())),
            _ => {}
        }
        if yours > mine {
            self.ask_at = self.ask_at.min(now);
            return Err(Refusal::NodeBehind { yours, mine });
        }
        match ask {
            Ask::Get { name, bytes, places } => self.look(now, &name, bytes, places, true).map(Some),
            Ask::Stat { name } => self.look(now, &name, false, false, false).map(Some),
            Ask::List { bucket, after, most } => plain(self.list(now, bucket, after.as_ref(), most)?),
            Ask::Used { names } => {
                for name in names {
                    self.store.touch(self.bucket_of(&name), &name);
                }
                plain(Answer::Done)
            }
            Ask::Put { name, lease_ns, pinned, only_if } => {
                self.config.check_lease(lease_ns)?;
                let bucket = self.check_open(self.bucket_of(&name))?;
                self.store.check_count(&self.config, bucket, &name)?;
                let staged = match self.staged.take() {
                    Some(staged) => staged,
                    None => match self.store.stage(&self.config, body) {
                        Ok(staged) => staged,
                        Err(full) => return Err(self.without_room(now, bucket, to, body.len() as u64, full)),
                    },
                };
                self.enqueue(now, Op { token, name, deed: Deed::Put { staged, lease_ns, pinned }, only_if });
                Ok(None)
            }
            Ask::Remove { name, only_if } => {
                self.check_open(self.bucket_of(&name))?;
                self.enqueue(now, Op { token, name, deed: Deed::Remove, only_if });
                Ok(None)
            }
            Ask::Renew { name, lease_ns } => {
                self.config.check_lease(lease_ns)?;
                self.check_open(self.bucket_of(&name))?;
                self.enqueue(now, Op { token, name, deed: Deed::Renew { lease_ns }, only_if: None });
                Ok(None)
            }
            _ => unreachable!("requests about pages were answered above"),
        }
    }

    /// The bucket of a name, while there is a map.
    fn bucket_of(&self, name: &Name) -> u16 {
        self.map.as_ref().map_or(0, |map| map.bucket_of(name))
    }

    /// The bucket's part here, if this node answers for it.
    fn open_place(&self, bucket: u16) -> Result<(&Place, &Lead), Refusal> {
        let epoch = self.map.as_ref().map_or(Epoch(0), |map| map.epoch);
        let not = Refusal::NotOwner { bucket, epoch };
        let place = self.places.get(usize::from(bucket)).and_then(Option::as_ref);
        match place.map(|place| (place, &place.part)) {
            Some((place, Part::Lead(lead))) if lead.is_open() => Ok((place, lead)),
            Some((_, Part::Lead(_))) => Err(Refusal::Arriving { bucket }),
            _ => Err(not),
        }
    }

    /// The same, with room for one more change.
    fn check_open(&self, bucket: u16) -> Result<u16, Refusal> {
        let (_, lead) = self.open_place(bucket)?;
        let waiting = lead.waiting.len() as u32;
        if waiting >= self.config.waiting_max { Err(Refusal::Busy { waiting }) } else { Ok(bucket) }
    }

    fn look(
        &mut self,
        now: u64,
        name: &Name,
        bytes: bool,
        places: bool,
        touch: bool,
    ) -> Result<(Answer, Vec<u8>), Refusal> {
        let bucket = self.bucket_of(name);
        let lost = self.open_place(bucket)?.0.loss;
        if touch {
            self.store.touch(bucket, name);
        }
        let object = self.store.find(now, bucket, name)?.ok_or(Refusal::NotFound { lost })?;
        let (stat, pages) = (object.stat(now), object.pages.clone());
        let body = if bytes { self.store.bytes(&pages, stat.length) } else { Vec::new() };
        Ok((Answer::Object { stat, pages: if places { pages } else { Vec::new() } }, body))
    }

    fn list(&mut self, now: u64, bucket: u16, after: Option<&Name>, most: u32) -> Result<Answer, Refusal> {
        self.open_place(bucket)?;
        let most = most.min(self.config.list_max) as usize;
        let live = self.store.after(bucket, after).filter(|(_, object)| object.ends > now);
        let mut objects: Vec<_> = live.take(most + 1).map(|(name, object)| (name.clone(), object.stat(now))).collect();
        let more = objects.len() > most;
        objects.truncate(most);
        Ok(Answer::Listed { objects, more })
    }

    /// Empties itself if its lease is over.
    fn lapse(&mut self, now: u64) {
        if matches!(self.standing, Standing::In { ends, .. } if ends <= now) {
            self.empty();
            self.ask_at = now;
        }
    }

    /// Ends this life: nothing is here any more.
    fn empty(&mut self) {
        for bucket in 0..BUCKETS {
            if let Some(Place { part: Part::Lead(lead), .. }) = self.places[usize::from(bucket)].take() {
                self.abandon(lead, &Refusal::NoLease);
            }
        }
        self.standing = Standing::Out;
        self.map = None;
        self.calls.clear();
        self.wants.clear();
        self.asking = None;
        self.store.begin(0);
        self.paged.begin();
        // The coordinator must not take this for the life that is over.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.nonce = mix(self.random);
    }

    /// Answers those whose changes will not be made here.
    fn abandon(&mut self, lead: Lead, unmade: &Refusal) {
        let doubtful = lead.round.map(|round| (round.op, Refusal::InDoubt));
        let untouched = lead.waiting.into_iter().map(|op| (op, unmade.clone()));
        for (op, refusal) in doubtful.into_iter().chain(untouched) {
            if let Deed::Put { staged, .. } = op.deed {
                self.store.give(staged.pages);
            }
            self.answer(op.token, Answer::Refused(refusal));
        }
    }

    /// Takes on its parts in another map.
    fn adopt(&mut self, now: u64, map: Map) {
        let Some(incarnation) = self.incarnation() else { return };
        if self.map.as_ref().is_some_and(|mine| mine.epoch >= map.epoch) {
            return;
        }
        if map.member(incarnation).is_none() {
            // The coordinator has given it up.
            self.empty();
            self.ask_at = now;
            return;
        }
        self.known = self.known.max(map.epoch);
        // What is under way is of the former map, and is asked again.
        self.calls.clear();
        for number in 0..map.bucket_count() {
            self.adopt_bucket(incarnation, number, &map);
        }
        self.map = Some(map);
        self.forget_wants();
        self.ask_again(now);
    }

    fn adopt_bucket(&mut self, me: Incarnation, number: u16, map: &Map) {
        let bucket = map.bucket(number);
        let position = bucket.owners.iter().position(|owner| owner.incarnation == me);
        let mut place = self.places[usize::from(number)].take();
        let unmade = Refusal::NotOwner { bucket: number, epoch: map.epoch };
        let mine = position.map(|at| bucket.owners[at]);
        // What it has of an earlier time may be out of date.
        if mine.is_none_or(|owner| place.as_ref().is_none_or(|place| place.since != owner.since)) {
            if let Some(Place { part: Part::Lead(lead), .. }) = place.take() {
                self.abandon(lead, &unmade);
            }
            self.store.clear_bucket(number);
        }
        let place = match (position, mine) {
            (Some(position), Some(owner)) => {
                let fresh =
                    Place { since: owner.since, loss: bucket.loss, last: None, part: Part::Follow(Follow::new(false)) };
                let Place { since, mut loss, last, part } = place.unwrap_or(fresh);
                let part = match (part, position) {
                    (Part::Lead(mut lead), 0) if lead.since == bucket.led_since => {
                        lead.update(bucket);
                        Part::Lead(lead)
                    }
                    (Part::Lead(lead), 0) => {
                        self.abandon(lead, &unmade);
                        Part::Lead(Lead::new(bucket))
                    }
                    (Part::Lead(lead), _) => {
                        self.abandon(lead, &unmade);
                        // From now on another node changes the content, and no longer this one says when it has.
                        self.store.regenerate_bucket(number);
                        Part::Follow(Follow::new(true))
                    }
                    (Part::Follow(follow), 0) => {
                        if !follow.complete {
                            loss = bucket.loss;
                        }
                        Part::Lead(Lead::new(bucket))
                    }
                    (follow, _) => follow,
                };
                Some(Place { since, loss, last, part })
            }
            _ => None,
        };
        self.places[usize::from(number)] = place;
    }

    /// Whether all that the map asks is done.
    fn is_settled(&mut self) -> bool {
        if self.calls.yields() {
            return false;
        }
        // The bucket that was not done the last time is likely not done yet.
        let all = usize::from(BUCKETS);
        let undone = (0..all).map(|step| (self.undone + step) % all).find(|bucket| match &self.places[*bucket] {
            Some(Place { part: Part::Lead(lead), .. }) => !lead.is_settled(),
            _ => false,
        });
        self.undone = undone.unwrap_or(0);
        undone.is_none()
    }
}

#[cfg(test)]
mod tests;
