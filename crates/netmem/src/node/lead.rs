//! A node's part in a bucket: to lead it, or to follow.
//!
//! The leader answers for the bucket's names. What it changes it first has its followers change, one change of a
//! bucket at a time, and only then itself: so a change that was confirmed is on all of them, and they differ in at most
//! one change that was not.
//!
//! ```text
//!   leader's stream to a follower
//!
//!     Begin, keep ──▶ Assert the last names ──▶ Full      it had everything when another led
//!     Begin ────────▶ Copy, name by name ─────▶ Full      it had nothing
//! ```
//!
//! A new leader does not answer before every follower that had everything agrees with it on the one name that they may
//! differ in: otherwise a client could see a change that was not confirmed, and then, when the next node leads, see it
//! undone. That name is the last one that the leader changed, or the last one that the follower did.

use crate::map::{Bucket, Owner};
use crate::node::store::Staged;
use crate::request::{Expect, PeerAnswer, Session};
use crate::types::{Epoch, Incarnation, Loss, Name, Version};
use std::collections::VecDeque;

/// What a node knows of a bucket that it has.
#[derive(Debug)]
pub(crate) struct Place {
    /// Since when it has had it, without a break.
    pub(crate) since: Epoch,
    pub(crate) loss: Option<Loss>,
    /// The name that was changed last.
    pub(crate) last: Option<Name>,
    pub(crate) part: Part,
}

#[derive(Debug)]
pub(crate) enum Part {
    Lead(Lead),
    Follow(Follow),
}

#[derive(Debug)]
pub(crate) struct Follow {
    pub(crate) session: Option<Session>,
    /// The last step made, and what was answered: asked again, it is not made again.
    pub(crate) step: u64,
    pub(crate) answer: PeerAnswer,
    /// Whether it has everything that the leader has.
    pub(crate) complete: bool,
}

impl Follow {
    pub(crate) fn new(complete: bool) -> Follow {
        Follow { session: None, step: 0, answer: PeerAnswer::Stepped, complete }
    }
}

#[derive(Debug)]
pub(crate) struct Lead {
    pub(crate) since: Epoch,
    /// Whether the node that led before has stopped.
    pub(crate) yielded: bool,
    pub(crate) streams: Vec<Stream>,
    /// The change that is being made.
    pub(crate) round: Option<Round>,
    pub(crate) waiting: VecDeque<Op>,
    /// Changes made, for versions.
    pub(crate) count: u64,
    /// Whether copying comes before the next change: they take turns.
    pub(crate) copy_turn: bool,
}

impl Lead {
    pub(crate) fn new(bucket: &Bucket) -> Lead {
        Lead {
            since: bucket.led_since,
            yielded: bucket.from.is_none(),
            streams: bucket.owners.iter().skip(1).map(Stream::new).collect(),
            round: None,
            waiting: VecDeque::new(),
            count: 0,
            copy_turn: false,
        }
    }

    /// Goes on under another map, in which it still leads since the same epoch.
    pub(crate) fn update(&mut self, bucket: &Bucket) {
        self.yielded |= bucket.from.is_none();
        let same = |stream: &Stream, owner: &Owner| stream.to == owner.incarnation && stream.since == owner.since;
        let mut old = std::mem::take(&mut self.streams);
        for owner in bucket.owners.iter().skip(1) {
            let found = old.iter().position(|stream| same(stream, owner));
            self.streams.push(found.map_or_else(|| Stream::new(owner), |at| old.swap_remove(at)));
        }
        // Those that are out are not waited for any more.
        if let Some(round) = &mut self.round {
            round.first = round.first.filter(|to| !old.iter().any(|stream| stream.to == *to));
            round.rest.retain(|to| !old.iter().any(|stream| stream.to == *to));
        }
    }

    /// Whether it answers for the bucket.
    pub(crate) fn is_open(&self) -> bool {
        let agrees = |stream: &Stream| !matches!(stream.stage, Stage::Begin { keep: true } | Stage::Assert(_));
        self.yielded && self.streams.iter().all(agrees)
    }

    /// Whether all that the map asks is done.
    pub(crate) fn is_settled(&self) -> bool {
        self.yielded && self.streams.iter().all(|stream| matches!(stream.stage, Stage::Full))
    }

    /// Followers without whose answers nothing goes on, and since when these are waited for.
    pub(crate) fn silent(&self) -> impl Iterator<Item = (Incarnation, u64)> {
        let blocks =
            |stream: &&Stream| stream.pending.is_some() && !matches!(stream.stage, Stage::Begin { keep: false });
        self.streams.iter().filter(blocks).map(|stream| (stream.to, stream.asked))
    }

    pub(crate) fn session(&self, stream: &Stream) -> Session {
        Session { led_since: self.since, since: stream.since }
    }
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) to: Incarnation,
    /// Since when the follower has the bucket.
    pub(crate) since: Epoch,
    pub(crate) stage: Stage,
    /// Steps made or being made.
    pub(crate) step: u64,
    /// What the follower was asked and has not confirmed.
    pub(crate) pending: Option<Pending>,
    /// When it was asked for the first time.
    pub(crate) asked: u64,
    /// The change of the round under way, if it has made it.
    pub(crate) made: Option<Version>,
    /// The request that asked it last.
    pub(crate) ticket: Option<u64>,
    /// Whether the follower lacks content for which it had no room.
    pub(crate) crowded: bool,
}

impl Stream {
    fn new(owner: &Owner) -> Stream {
        Stream {
            to: owner.incarnation,
            since: owner.since,
            stage: Stage::Begin { keep: owner.full },
            step: 0,
            pending: None,
            asked: 0,
            made: None,
            ticket: None,
            crowded: false,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Stage {
    Begin { keep: bool },
    Assert(VecDeque<Name>),
    Copy { after: Option<Name> },
    Full,
}

#[derive(Debug)]
pub(crate) enum Pending {
    Begin,
    /// The present content of a name.
    Name(Name),
    Complete,
    /// The change of the round.
    Op,
}

/// A change on its way through the followers.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) op: Op,
    pub(crate) version: Version,
    /// The follower that makes the promised second copy, or leads next; it is asked before all others, since it may have no
    /// room.
    pub(crate) first: Option<Incarnation>,
    pub(crate) asked_rest: bool,
    pub(crate) rest: Vec<Incarnation>,
}

/// A change that a client wants.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) token: u64,
    pub(crate) name: Name,
    pub(crate) deed: Deed,
    pub(crate) only_if: Option<Expect>,
}

#[derive(Debug)]
pub(crate) enum Deed {
    Put { staged: Staged, lease_ns: u64, pinned: bool },
    Remove,
    Renew { lease_ns: u64 },
}
