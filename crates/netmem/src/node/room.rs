//! Buckets whose objects find no room on a node that has them.
//!
//! A node that leads a bucket, and has no room for a put, or whose follower has none, asks the coordinator to place the
//! bucket where room is, and has the client wait until it is there. Only when no node has room is the put refused.
//!
//! ```text
//!   put without room ──▶ wanted ── another map: the bucket is elsewhere ──▶ forgotten, the client asks there
//!                          └────── no node has room ──▶ denied: such puts are refused for a while
//! ```

use super::Node;
use super::lead::{Part, Place};
use crate::coordinator::Shortage;
use crate::donation::PAGE_BYTES;
use crate::request::{Ask, Refusal, Request};
use crate::types::Incarnation;
use std::collections::BTreeMap;

/// What this node wants of the coordinator for want of room, by bucket.
#[derive(Debug, Default)]
pub(super) struct Wants {
    by_bucket: BTreeMap<u16, Want>,
}

#[derive(Clone, Copy, Debug)]
struct Want {
    /// The owner of the bucket without room.
    at: Incarnation,
    /// Pages of the bucket with what was put.
    pages: u64,
    denied: bool,
    /// When it is forgotten unless clients ask again.
    until: u64,
}

impl Wants {
    pub(super) fn clear(&mut self) {
        self.by_bucket.clear();
    }

    /// Whether the coordinator is to be asked again soon.
    pub(super) fn is_waiting(&self) -> bool {
        self.by_bucket.values().any(|want| !want.denied)
    }

    /// No node has room for what these buckets want.
    pub(super) fn deny(&mut self, now: u64, buckets: &[u16]) {
        for bucket in buckets {
            if let Some(want) = self.by_bucket.get_mut(bucket) {
                (want.denied, want.until) = (true, now + DENIED_NS);
            }
        }
    }
}

impl Node {
    /// What to say of a put that has no room at `at`, which is this node or one that follows it in the bucket: that it is
    /// to be asked again, if the bucket may come to a node that has room.
    pub(super) fn without_room(
        &mut self,
        now: u64,
        bucket: u16,
        at: Incarnation,
        length: u64,
        refusal: Refusal,
    ) -> Refusal {
        let for_room = matches!(refusal, Refusal::Full { .. } | Refusal::NoMemory { .. } | Refusal::SecondFull);
        let Some(map) = self.map.as_ref().filter(|_| for_room) else { return refusal };
        let owners = &map.bucket(bucket).owners;
        let has = |life: Incarnation| owners.iter().any(|owner| owner.incarnation == life);
        // With more owners than copies the bucket is about to be elsewhere.
        let stays = owners.len() <= usize::from(map.copies);
        if stays && map.nodes.iter().all(|member| member.leaving || has(member.incarnation)) {
            return refusal;
        }
        let pages = length.div_ceil(PAGE_BYTES as u64) + self.store.bucket_pages(bucket);
        let known = self.wants.by_bucket.get(&bucket).filter(|want| want.at == at && want.until > now);
        match known {
            Some(want) if want.denied && want.pages <= pages => return refusal,
            Some(want) if !want.denied && want.pages >= pages => {}
            _ => self.ask_at = self.ask_at.min(now),
        }
        let pages = known.filter(|want| !want.denied).map_or(pages, |want| want.pages.max(pages));
        self.wants.by_bucket.insert(bucket, Want { at, pages, denied: false, until: now + WANTED_NS });
        Refusal::Arriving { bucket }
    }

    /// What to say of a put that had no room before it was looked at.
    pub fn refuse_unstaged(&mut self, now: u64, request: &Request, length: u64, refusal: Refusal) -> Refusal {
        let (Some(me), Some(map)) = (self.incarnation(), &self.map) else { return refusal };
        let (yours, mine) = (request.epoch, map.epoch);
        match &request.ask {
            Ask::Put { .. } if request.to != me => Refusal::Gone { node: self.id, incarnation: request.to },
            Ask::Put { .. } if yours < mine => Refusal::OldEpoch { yours, mine },
            Ask::Put { .. } if yours > mine => Refusal::NodeBehind { yours, mine },
            Ask::Put { name, .. } => match self.check_open(self.bucket_of(name)) {
                Ok(bucket) => self.without_room(now, bucket, me, length, refusal),
                Err(other) => other,
            },
            _ => refusal,
        }
    }

    /// What the coordinator is to be told: the buckets that are wanted elsewhere, and those without content, which may as
    /// well come along.
    pub(super) fn shortages(&mut self, now: u64) -> Vec<Shortage> {
        self.wants.by_bucket.retain(|_, want| want.until > now);
        let Some(map) = &self.map else { return Vec::new() };
        let wants = self.wants.by_bucket.iter().filter(|(_, want)| !want.denied);
        let mut shortages: Vec<_> =
            wants.map(|(bucket, want)| Shortage { bucket: *bucket, at: want.at, pages: want.pages }).collect();
        let mut short: Vec<_> = shortages.iter().map(|shortage| shortage.at).collect();
        short.sort_unstable();
        short.dedup();
        if short.is_empty() {
            return shortages;
        }
        for (bucket, written) in (0..map.bucket_count()).zip(&map.buckets) {
            let leads = matches!(self.places[usize::from(bucket)], Some(Place { part: Part::Lead(_), .. }));
            if !leads || self.wants.by_bucket.contains_key(&bucket) || !self.store.is_empty(bucket) {
                continue;
            }
            let at = short.iter().find(|at| written.owners.iter().any(|owner| owner.incarnation == **at));
            shortages.extend(at.map(|at| Shortage { bucket, at: *at, pages: 0 }));
        }
        shortages
    }

    /// Forgets, under another map, what it changed: where buckets are elsewhere, and that no node had room.
    pub(super) fn forget_wants(&mut self) {
        let (me, map) = (self.incarnation(), self.map.as_ref());
        self.wants.by_bucket.retain(|bucket, want| {
            let owners = map.map_or(&[][..], |map| &map.bucket(*bucket).owners);
            let leads = owners.first().map(|owner| owner.incarnation) == me;
            !want.denied && leads && owners.iter().any(|owner| owner.incarnation == want.at)
        });
    }
}

/// How long a bucket is wanted elsewhere after the last put that found no room.
const WANTED_NS: u64 = 2_000_000_000;
/// How long puts are refused after the coordinator said that no node has room.
const DENIED_NS: u64 = 500_000_000;
