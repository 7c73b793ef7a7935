//! How leaders and followers of buckets keep together.

use super::lead::{Deed, Follow, Lead, Op, Part, Pending, Place, Round, Stage, Stream};
use super::{Node, Output};
use crate::map::Map;
use crate::request::{Answer, Change, Expect, PeerAnswer, PeerAsk, PeerRefusal, PeerRequest, Refusal, Session};
use crate::types::{Epoch, Incarnation, Loss, Name, Version};
use std::collections::{BTreeMap, BTreeSet};

/// Requests to other nodes that wait for their answers.
#[derive(Debug, Default)]
pub(super) struct Calls {
    last_ticket: u64,
    open: BTreeMap<u64, Call>,
    /// How many of them carry an object for a follower that does not have everything yet.
    copying: u32,
    /// Buckets that wait until there are fewer of those.
    patient: BTreeSet<u16>,
    /// By bucket: successors that do not know yet that this node has stopped.
    yields: BTreeMap<u16, Successor>,
}

#[derive(Clone, Copy, Debug)]
struct Successor {
    to: Incarnation,
    led_since: Epoch,
    /// When it was first told.
    told: u64,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    bucket: u16,
    /// When it was made, and as much later as its bytes may take: a large object that is sent again while it is on its way
    /// only takes longer.
    since: u64,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Step,
    Copy,
    Yield,
}

impl Calls {
    pub(super) fn new_ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    /// When the oldest of them was made.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.open.values().map(|call| call.since).min()
    }

    pub(super) fn yields(&self) -> bool {
        !self.yields.is_empty()
    }

    fn insert(&mut self, ticket: u64, call: Call) {
        self.copying += u32::from(call.what == What::Copy);
        self.open.insert(ticket, call);
    }

    fn remove(&mut self, ticket: u64) -> Option<Call> {
        let call = self.open.remove(&ticket)?;
        self.copying -= u32::from(call.what == What::Copy);
        Some(call)
    }

    pub(super) fn clear(&mut self) {
        self.open.clear();
        self.patient.clear();
        self.copying = 0;
        self.yields.clear();
    }
}

/// The parts of a leading place that are used at the same time.
struct Leading<'a> {
    bucket: u16,
    loss: Option<Loss>,
    last: &'a mut Option<Name>,
    lead: &'a mut Lead,
}

impl Node {
    /// Puts a change in line.
    pub(super) fn enqueue(&mut self, now: u64, op: Op) {
        let bucket = self.bucket_of(&op.name);
        self.leading(bucket, |_, leading| leading.lead.waiting.push_back(op));
        self.run(now, bucket);
    }

    /// Takes a place out to work on it, with the rest of the node at hand.
    fn leading<T>(&mut self, bucket: u16, work: impl FnOnce(&mut Node, &mut Leading<'_>) -> T) -> Option<T> {
        let mut place = self.places[usize::from(bucket)].take()?;
        let result = match &mut place {
            Place { loss, last, part: Part::Lead(lead), .. } => {
                Some(work(self, &mut Leading { bucket, loss: *loss, last, lead }))
            }
            _ => None,
        };
        self.places[usize::from(bucket)] = Some(place);
        result
    }

    /// Does whatever can be done for a bucket that this node leads.
    fn run(&mut self, now: u64, bucket: u16) {
        self.leading(bucket, |node, leading| while node.run_once(now, leading) {});
    }

    /// One thing; false if nothing more can be done before an answer comes.
    fn run_once(&mut self, now: u64, leading: &mut Leading<'_>) -> bool {
        for at in 0..leading.lead.streams.len() {
            let stream = &mut leading.lead.streams[at];
            if stream.pending.is_some() {
                continue;
            }
            match &mut stream.stage {
                Stage::Begin { .. } => self.ask(now, leading, at, Pending::Begin),
                Stage::Assert(names) => match names.pop_front() {
                    Some(name) => self.ask(now, leading, at, Pending::Name(name)),
                    None => stream.stage = Stage::Full,
                },
                Stage::Copy { .. } | Stage::Full => {}
            }
        }
        if leading.lead.round.is_some() {
            return self.advance_round(now, leading);
        }
        if !leading.lead.is_open() {
            return false;
        }
        let copies = |stream: &Stream| matches!(stream.stage, Stage::Copy { .. });
        let copying = leading.lead.streams.iter().any(copies);
        let first_copy = copying && leading.lead.copy_turn;
        if !leading.lead.waiting.is_empty() && !first_copy {
            // A change of a name that is being copied would overtake it.
            if leading.lead.streams.iter().any(|stream| copies(stream) && stream.pending.is_some()) {
                return false;
            }
            leading.lead.copy_turn = true;
            self.start_round(now, leading);
            return true;
        }
        leading.lead.copy_turn = false;
        for at in 0..leading.lead.streams.len() {
            let Stream { stage: Stage::Copy { after }, pending: None, .. } = &mut leading.lead.streams[at] else {
                continue;
            };
            let next = self.store.after(leading.bucket, after.as_ref()).next().map(|(name, _)| name.clone());
            if next.is_some() && self.calls.copying >= self.config.copying_max {
                self.calls.patient.insert(leading.bucket);
                continue;
            }
            let pending = match next {
                Some(name) => {
                    *after = Some(name.clone());
                    Pending::Name(name)
                }
                None => Pending::Complete,
            };
            self.ask(now, leading, at, pending);
        }
        false
    }

    /// Begins the change that is next in line, if what it expects is there.
    fn start_round(&mut self, now: u64, leading: &mut Leading<'_>) {
        let Some(op) = leading.lead.waiting.pop_front() else { return };
        let found = self.store.find(now, leading.bucket, &op.name).map(|found| found.map(|object| object.version));
        let refusal = match (&op.deed, &op.only_if, found) {
            (Deed::Renew { .. }, _, Err(expired)) => Some(expired),
            (Deed::Renew { .. }, _, Ok(None)) => Some(Refusal::NotFound { lost: leading.loss }),
            (_, Some(expected), found) => {
                let found = found.unwrap_or(None);
                let as_expected = match expected {
                    Expect::Absent => found.is_none(),
                    Expect::Version(version) => found == Some(*version),
                };
                (!as_expected).then_some(Refusal::Unexpected { found })
            }
            _ => None,
        };
        if let Some(refusal) = refusal {
            self.refuse(op, refusal);
            return;
        }
        leading.lead.count += 1;
        let version = Version { led_since: leading.lead.since, count: leading.lead.count };
        let full = |stream: &&Stream| matches!(stream.stage, Stage::Full);
        let first = leading.lead.streams.iter().find(full).map(|stream| stream.to);
        leading.lead.round = Some(Round { op, version, first, asked_rest: false, rest: Vec::new() });
        if let Some(first) = first {
            let at = leading.lead.streams.iter().position(|stream| stream.to == first).expect("it was just found");
            self.ask(now, leading, at, Pending::Op);
        }
    }

    fn advance_round(&mut self, now: u64, leading: &mut Leading<'_>) -> bool {
        let Some(round) = &mut leading.lead.round else { return false };
        if round.first.is_some() || !round.rest.is_empty() {
            return false;
        }
        if round.asked_rest {
            self.commit(now, leading);
            return true;
        }
        round.asked_rest = true;
        for at in 0..leading.lead.streams.len() {
            let stream = &leading.lead.streams[at];
            let follows = matches!(stream.stage, Stage::Copy { .. } | Stage::Full);
            let round = leading.lead.round.as_mut().expect("it is under way");
            // The one that was asked first has made the change.
            let made = stream.made == Some(round.version);
            if follows && !made && stream.pending.is_none() {
                round.rest.push(stream.to);
                self.ask(now, leading, at, Pending::Op);
            }
        }
        true
    }

    /// All followers have made the change.
    fn commit(&mut self, now: u64, leading: &mut Leading<'_>) {
        let Some(Round { op: Op { token, name, deed, .. }, version, .. }) = leading.lead.round.take() else { return };
        leading.lead.streams.iter_mut().for_each(|stream| stream.made = None);
        let bucket = leading.bucket;
        let answer = match deed {
            Deed::Put { staged, lease_ns, pinned } => {
                self.store.commit(bucket, &name, staged, version, now.saturating_add(lease_ns), pinned);
                Answer::Stored { version }
            }
            Deed::Remove => Answer::Removed { existed: self.store.remove(bucket, &name) },
            Deed::Renew { lease_ns } if self.store.peek(bucket, &name).is_some() => {
                self.store.set_end(bucket, &name, now.saturating_add(lease_ns));
                Answer::Renewed
            }
            // It aged, or its lease ended, while the followers were asked.
            Deed::Renew { .. } => Answer::Refused(Refusal::NotFound { lost: leading.loss }),
        };
        *leading.last = Some(name);
        self.answer(token, answer);
    }

    fn refuse(&mut self, op: Op, refusal: Refusal) {
        if let Deed::Put { staged, .. } = op.deed {
            self.store.give(staged.pages);
        }
        self.answer(op.token, Answer::Refused(refusal));
    }

    /// Asks a follower for the next step.
    fn ask(&mut self, now: u64, leading: &mut Leading<'_>, at: usize, pending: Pending) {
        let stream = &mut leading.lead.streams[at];
        if !matches!(pending, Pending::Begin) {
            stream.step += 1;
        }
        (stream.pending, stream.asked) = (Some(pending), now);
        self.send(now, leading, at);
    }

    /// Sends, once more perhaps, what is pending.
    fn send(&mut self, now: u64, leading: &mut Leading<'_>, at: usize) {
        let (Some(map), Some(from)) = (&self.map, self.incarnation()) else { return };
        let (epoch, bucket) = (map.epoch, leading.bucket);
        let stream = &leading.lead.streams[at];
        let (session, to, step) = (leading.lead.session(stream), stream.to, stream.step);
        let (change, body) = match &stream.pending {
            None => return,
            Some(Pending::Begin) => (None, Vec::new()),
            Some(Pending::Complete) => (Some(Change::Complete), Vec::new()),
            Some(Pending::Name(name)) => {
                let (change, body) = self.present(now, bucket, name);
                (Some(change), body)
            }
            Some(Pending::Op) => {
                let Some(round) = &leading.lead.round else { return };
                let (change, body) = self.change_of(round, round.first == Some(to));
                (Some(change), body)
            }
        };
        let ask = match change {
            Some(change) => PeerAsk::Step { session, step, change },
            None => {
                let keep = matches!(stream.stage, Stage::Begin { keep: true });
                PeerAsk::Begin { session, keep, loss: leading.loss }
            }
        };
        let ticket = self.calls.new_ticket();
        let copies = matches!((&stream.stage, &stream.pending), (Stage::Copy { .. }, Some(Pending::Name(_))));
        let what = if copies { What::Copy } else { What::Step };
        let since = now + body.len() as u64 * SLOW_BYTE_NS;
        self.calls.insert(ticket, Call { bucket, since, what });
        leading.lead.streams[at].ticket = Some(ticket);
        let request = PeerRequest { epoch, from, to, bucket, ask };
        self.outputs.push_back(Output::Peer { ticket, request, body });
    }

    /// What a name has at present, as a change.
    fn present(&self, now: u64, bucket: u16, name: &Name) -> (Change, Vec<u8>) {
        let name = name.clone();
        match self.store.peek(bucket, &name).filter(|object| object.ends > now) {
            Some(object) => {
                let body = self.store.bytes(&object.pages, object.length);
                let (version, pinned, lease_left_ns) = (object.version, object.pinned, object.ends - now);
                (Change::Store { name, version, lease_left_ns, pinned, must: false }, body)
            }
            None => (Change::Drop { name }, Vec::new()),
        }
    }

    fn change_of(&self, round: &Round, must: bool) -> (Change, Vec<u8>) {
        let name = round.op.name.clone();
        match &round.op.deed {
            Deed::Put { staged, lease_ns, pinned } => {
                let body = self.store.bytes(&staged.pages, staged.length);
                let (version, pinned, lease_left_ns) = (round.version, *pinned, *lease_ns);
                (Change::Store { name, version, lease_left_ns, pinned, must }, body)
            }
            Deed::Remove => (Change::Drop { name }, Vec::new()),
            Deed::Renew { lease_ns } => (Change::Lease { name, lease_left_ns: *lease_ns }, Vec::new()),
        }
    }

    /// Another node's answer.
    pub fn handle_peer_answer(&mut self, now: u64, ticket: u64, answer: PeerAnswer) {
        self.lapse(now);
        let Some(call) = self.calls.open.get(&ticket).copied() else { return };
        if let PeerAnswer::Refused(refusal) = answer {
            // It is asked again after a while; with another map, if there is one.
            if matches!(refusal, PeerRefusal::OldEpoch { .. }) {
                self.ask_at = self.ask_at.min(now);
            }
            self.handle_timeout(now);
            return;
        }
        self.calls.remove(ticket);
        if call.what == What::Yield {
            if answer == PeerAnswer::Yielded {
                self.calls.yields.remove(&call.bucket);
            }
        } else {
            self.leading(call.bucket, |node, leading| node.stepped(now, leading, ticket, answer));
            self.run(now, call.bucket);
        }
        self.handle_timeout(now);
    }

    fn stepped(&mut self, now: u64, leading: &mut Leading<'_>, ticket: u64, answer: PeerAnswer) {
        let lead = &mut *leading.lead;
        let Some(stream) = lead.streams.iter_mut().find(|stream| stream.ticket == Some(ticket)) else { return };
        stream.ticket = None;
        let Some(pending) = stream.pending.take() else { return };
        if answer == PeerAnswer::Dropped {
            if !std::mem::replace(&mut stream.crowded, true) {
                // The coordinator is not to have the follower lead.
                self.ask_at = self.ask_at.min(now);
            }
            self.unplaced += u64::from(self.leaving && matches!(pending, Pending::Name(_)));
        }
        match (pending, answer) {
            (Pending::Begin, PeerAnswer::Begun { last }) => {
                stream.stage = match stream.stage {
                    // The follower's first, then its own: so the follower's last name is this one's if it leads next.
                    Stage::Begin { keep: true } => {
                        Stage::Assert(last.into_iter().chain(leading.last.clone()).collect())
                    }
                    _ => Stage::Copy { after: None },
                };
            }
            (Pending::Complete, _) => stream.stage = Stage::Full,
            (Pending::Op, answer) => {
                let Some(round) = &mut lead.round else { return };
                let to = stream.to;
                stream.made = Some(round.version);
                if round.first == Some(stream.to) {
                    round.first = None;
                    if answer == PeerAnswer::NoRoom {
                        lead.streams.iter_mut().for_each(|stream| stream.made = None);
                        if let Some(round) = lead.round.take() {
                            let length = match &round.op.deed {
                                Deed::Put { staged, .. } => staged.length,
                                Deed::Remove | Deed::Renew { .. } => 0,
                            };
                            let (bucket, at) = (leading.bucket, to);
                            let refusal = self.without_room(now, bucket, at, length, Refusal::SecondFull);
                            self.refuse(round.op, refusal);
                        }
                    }
                } else {
                    round.rest.retain(|to| *to != stream.to);
                }
            }
            (Pending::Begin | Pending::Name(_), _) => {}
        }
    }

    /// Asks again what was not answered in time, and goes on with what waited for its turn.
    pub(super) fn retry(&mut self, now: u64) {
        let retry_ns = self.config.retry_ns;
        let due = |(_, call): &(&u64, &Call)| now >= call.since + retry_ns;
        let due: Vec<_> = self.calls.open.iter().filter(due).map(|(ticket, call)| (*ticket, *call)).collect();
        for (ticket, call) in due {
            self.calls.remove(ticket);
            if call.what == What::Yield {
                self.send_yield(now, call.bucket);
                continue;
            }
            self.leading(call.bucket, |node, leading| {
                let at = leading.lead.streams.iter().position(|stream| stream.ticket == Some(ticket));
                if let Some(at) = at {
                    node.send(now, leading, at);
                }
            });
        }
        while self.calls.copying < self.config.copying_max {
            let Some(bucket) = self.calls.patient.pop_first() else { break };
            self.run(now, bucket);
        }
    }

    /// Buckets in which nothing goes on for want of an answer, and whose.
    pub(super) fn stuck(&self, now: u64) -> Vec<(u16, Incarnation)> {
        let long = |since: u64| now >= since.saturating_add(self.config.stall_ns);
        let yields = self.calls.yields.iter().map(|(bucket, successor)| (*bucket, successor.to, successor.told));
        let silent = self.places.iter().zip(0u16..).filter_map(|(place, bucket)| match place {
            Some(Place { part: Part::Lead(lead), .. }) => {
                Some(lead.silent().map(move |(to, asked)| (bucket, to, asked)))
            }
            _ => None,
        });
        let all = yields.chain(silent.flatten());
        all.filter(|(_, _, since)| long(*since)).map(|(bucket, to, _)| (bucket, to)).collect()
    }

    /// Followers of buckets that this node leads, which had no room for all that is there.
    pub(super) fn crowded(&self) -> Vec<(u16, Incarnation)> {
        let followers = self.places.iter().zip(0u16..).filter_map(|(place, bucket)| match place {
            Some(Place { part: Part::Lead(lead), .. }) => {
                Some(lead.streams.iter().filter(|stream| stream.crowded).map(move |stream| (bucket, stream.to)))
            }
            _ => None,
        });
        followers.flatten().collect()
    }

    /// Under a new map: says where it has stopped, and asks everything again that is under way.
    pub(super) fn ask_again(&mut self, now: u64) {
        let Some(me) = self.incarnation() else { return };
        for bucket in 0..self.map.as_ref().map_or(0, Map::bucket_count) {
            let successor = self.map.as_ref().and_then(|map| successor(map, bucket, me));
            if let Some((to, led_since)) = successor {
                self.calls.yields.insert(bucket, Successor { to, led_since, told: now });
                self.send_yield(now, bucket);
            }
            self.leading(bucket, |node, leading| {
                (0..leading.lead.streams.len()).for_each(|at| node.send(now, leading, at));
            });
            self.run(now, bucket);
        }
    }

    fn send_yield(&mut self, now: u64, bucket: u16) {
        let (Some(map), Some(from)) = (&self.map, self.incarnation()) else { return };
        let Some(Successor { to, led_since, .. }) = self.calls.yields.get(&bucket).copied() else { return };
        let ticket = self.calls.new_ticket();
        self.calls.insert(ticket, Call { bucket, since: now, what: What::Yield });
        let request = PeerRequest { epoch: map.epoch, from, to, bucket, ask: PeerAsk::Yield { led_since } };
        self.outputs.push_back(Output::Peer { ticket, request, body: Vec::new() });
    }

    /// A request of another node, and its answer.
    pub fn handle_peer(&mut self, now: u64, request: PeerRequest, body: &[u8]) -> PeerAnswer {
        self.lapse(now);
        let answer = self.try_peer(now, request, body).unwrap_or_else(PeerAnswer::Refused);
        self.handle_timeout(now);
        answer
    }

    fn try_peer(&mut self, now: u64, request: PeerRequest, body: &[u8]) -> Result<PeerAnswer, PeerRefusal> {
        let PeerRequest { epoch: yours, from, to, bucket, ask } = request;
        let (Some(me), Some(map)) = (self.incarnation(), &self.map) else { return Err(PeerRefusal::Gone) };
        if to != me {
            return Err(PeerRefusal::Gone);
        }
        let mine = map.epoch;
        if yours < mine {
            return Err(PeerRefusal::OldEpoch { yours, mine });
        }
        if yours > mine {
            self.ask_at = self.ask_at.min(now);
            return Err(PeerRefusal::NodeBehind { yours, mine });
        }
        if bucket >= map.bucket_count() {
            return Err(PeerRefusal::NotOwner);
        }
        let written = map.bucket(bucket);
        let leader = written.owners.first().map(|owner| owner.incarnation);
        let (led_since, expected) = (written.led_since, written.from);
        if let PeerAsk::Yield { led_since: since } = ask {
            if leader != Some(me) || since != led_since || expected != Some(from) {
                return Err(PeerRefusal::NotOwner);
            }
            self.leading(bucket, |_, leading| leading.lead.yielded = true);
            self.run(now, bucket);
            return Ok(PeerAnswer::Yielded);
        }
        let Some(mut place) = self.places[usize::from(bucket)].take() else { return Err(PeerRefusal::NotOwner) };
        let session = Session { led_since, since: place.since };
        let right = leader == Some(from);
        let answer = match (&mut place.part, ask) {
            (Part::Follow(follow), PeerAsk::Begin { session: asked, keep, loss }) if right && asked == session => {
                if follow.session != Some(session) {
                    if !keep {
                        self.store.clear_bucket(bucket);
                        place.last = None;
                    }
                    *follow = Follow { session: Some(session), ..Follow::new(keep && follow.complete) };
                    place.loss = loss;
                }
                Ok(PeerAnswer::Begun { last: place.last.clone() })
            }
            (Part::Follow(follow), PeerAsk::Step { session: asked, step, change }) if right && asked == session => {
                self.step(now, bucket, follow, &mut place.last, (step, change), body)
            }
            _ => Err(PeerRefusal::NotOwner),
        };
        self.places[usize::from(bucket)] = Some(place);
        answer
    }

    fn step(
        &mut self,
        now: u64,
        bucket: u16,
        follow: &mut Follow,
        last: &mut Option<Name>,
        (step, change): (u64, Change),
        body: &[u8],
    ) -> Result<PeerAnswer, PeerRefusal> {
        if follow.session.is_none() || (step != follow.step && step != follow.step + 1) {
            return Err(PeerRefusal::OutOfStep);
        }
        if step == follow.step {
            return Ok(follow.answer.clone());
        }
        let answer = match change {
            Change::Store { name, version, lease_left_ns, pinned, must } => {
                let room = self.store.check_count(&self.config, bucket, &name);
                let answer = match room.and_then(|()| self.store.stage(&self.config, body)) {
                    Ok(staged) => {
                        let ends = now.saturating_add(lease_left_ns);
                        self.store.commit(bucket, &name, staged, version, ends, pinned);
                        PeerAnswer::Stepped
                    }
                    Err(_) if must => PeerAnswer::NoRoom,
                    Err(_) => {
                        // Rather nothing than what is out of date.
                        self.store.remove(bucket, &name);
                        self.store.figures.dropped += 1;
                        PeerAnswer::Dropped
                    }
                };
                if answer != PeerAnswer::NoRoom {
                    *last = Some(name);
                }
                answer
            }
            Change::Drop { name } => {
                self.store.remove(bucket, &name);
                *last = Some(name);
                PeerAnswer::Stepped
            }
            Change::Lease { name, lease_left_ns } => {
                self.store.set_end(bucket, &name, now.saturating_add(lease_left_ns));
                *last = Some(name);
                PeerAnswer::Stepped
            }
            Change::Complete => {
                follow.complete = true;
                PeerAnswer::Stepped
            }
        };
        (follow.step, follow.answer) = (step, answer.clone());
        Ok(answer)
    }
}

/// Whom a node has to tell that it no longer leads a bucket.
fn successor(map: &Map, bucket: u16, me: Incarnation) -> Option<(Incarnation, Epoch)> {
    let bucket = map.bucket(bucket);
    let leader = bucket.owners.first()?.incarnation;
    (bucket.from == Some(me)).then_some((leader, bucket.led_since))
}

/// Nanoseconds for a byte on a network that is slower than most: 50 MB/s.
const SLOW_BYTE_NS: u64 = 20;
