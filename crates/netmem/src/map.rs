//! The map: which nodes there are, and which of them has which names.
//!
//! A name falls into one of 1,024 buckets by its hash. Each bucket has a node that leads it, which answers for its
//! names, and nodes that follow, which have a copy. Which nodes these should be is computed by rendezvous hashing over
//! the nodes' numbers ([`ranking`]): when a node comes or goes, only buckets that it has, or will have, move. Which they
//! *are* is written in the map, because content takes its time to move.

use crate::types::{Epoch, Incarnation, Loss, Name, NodeId};
use serde::{Deserialize, Serialize};

/// Buckets that names are divided into. A coordinator may be told to make fewer, for small clusters.
pub const BUCKETS: u16 = 1024;

/// Who has what, from the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Map {
    /// The life of the coordinator, a random number.
    pub lineage: u64,
    /// Its number; each change has a greater one.
    pub epoch: Epoch,
    /// Copies of each object that there should be: 1 or 2.
    pub copies: u8,
    /// The nodes.
    pub nodes: Vec<Member>,
    /// The buckets, each at its number: 1,024, or a power of two below.
    pub buckets: Vec<Bucket>,
}

/// A node of the map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The node.
    pub node: NodeId,
    /// Its life.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: String,
    /// Whether it is about to leave.
    pub leaving: bool,
}

/// Who has a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// The node that leads it, then those that follow. None while there are no nodes.
    pub owners: Vec<Owner>,
    /// Since when its leader leads it.
    pub led_since: Epoch,
    /// The node that led it before and is still there: the leader waits until it has stopped.
    pub from: Option<Incarnation>,
    /// The last time when content of it was lost.
    pub loss: Option<Loss>,
}

/// A node that has a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Its life.
    pub incarnation: Incarnation,
    /// Since when it has had the bucket without a break, to lead or to follow.
    pub since: Epoch,
    /// Whether it is known to have everything.
    pub full: bool,
}

/// A map that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMap {
    /// Not 1,024 buckets, nor 512, nor 256 …
    #[error("the map has {0} buckets, not {BUCKETS} or a power of two below")]
    Buckets(usize),
    /// A bucket has an owner that is no node of the map, or one twice.
    #[error("bucket {0} has an owner that is not in the map, or one twice")]
    Owner(usize),
}

impl Map {
    /// A map without nodes.
    pub(crate) fn empty(lineage: u64, epoch: Epoch, copies: u8, buckets: u16) -> Map {
        Map { lineage, epoch, copies, nodes: Vec::new(), buckets: vec![Bucket::default(); usize::from(buckets)] }
    }

    /// Checks what came from elsewhere, so that the rest can rely on it.
    pub fn check(&self) -> Result<(), BadMap> {
        if !self.buckets.len().is_power_of_two() || self.buckets.len() > usize::from(BUCKETS) {
            return Err(BadMap::Buckets(self.buckets.len()));
        }
        for (index, bucket) in self.buckets.iter().enumerate() {
            let good = bucket.owners.iter().enumerate().all(|(at, owner)| {
                self.member(owner.incarnation).is_some()
                    && !bucket.owners[..at].iter().any(|other| other.incarnation == owner.incarnation)
            });
            if !good {
                return Err(BadMap::Owner(index));
            }
        }
        Ok(())
    }

    /// How many buckets there are.
    pub fn bucket_count(&self) -> u16 {
        self.buckets.len() as u16
    }

    /// The bucket of a name in this map: its [`bucket_of`] modulo the number of buckets.
    pub fn bucket_of(&self, name: &Name) -> u16 {
        bucket_of(name) % self.bucket_count()
    }

    /// The bucket of this number.
    pub fn bucket(&self, bucket: u16) -> &Bucket {
        &self.buckets[usize::from(bucket)]
    }

    /// The node that leads a bucket.
    pub fn leader(&self, bucket: u16) -> Option<&Member> {
        self.member(self.bucket(bucket).owners.first()?.incarnation)
    }

    /// The node with this life.
    pub fn member(&self, incarnation: Incarnation) -> Option<&Member> {
        self.nodes.iter().find(|member| member.incarnation == incarnation)
    }
}

/// The bucket of a name: the 64-bit FNV-1a hash of its bytes, mixed by [`mix`], modulo 1,024.
pub fn bucket_of(name: &Name) -> u16 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in name.as_str().bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    (mix(hash) % u64::from(BUCKETS)) as u16
}

/// Spreads the bits of a number over all of it (the last steps of SplitMix64).
pub fn mix(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// What a node scores for a bucket; the node with the highest should lead it, the next one follow.
pub fn score(bucket: u16, node: NodeId) -> u64 {
    mix(mix(node.0.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ mix(u64::from(bucket) + 1))
}

/// The `copies` nodes that should have a bucket, the leader first.
pub fn ranking(bucket: u16, nodes: impl Iterator<Item = (NodeId, Incarnation)>, copies: u8) -> Vec<Incarnation> {
    let mut scored: Vec<_> = nodes.map(|(node, incarnation)| (score(bucket, node), node, incarnation)).collect();
    scored.sort_unstable_by(|a, b| b.cmp(a));
    scored.into_iter().take(usize::from(copies)).map(|(_, _, incarnation)| incarnation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_never_changes() {
        let bucket = |text| bucket_of(&Name::new(text).unwrap());
        assert_eq!([bucket("a"), bucket("b"), bucket("object/17"), bucket("ä")], [248, 5, 452, 973]);
        assert_eq!(
            [score(0, NodeId(1)), score(1023, NodeId(1))],
            [4_158_004_636_484_536_377, 4_773_931_607_850_436_381]
        );
    }

    #[test]
    fn names_and_buckets_spread_evenly() {
        let mut names = [0u32; BUCKETS as usize];
        for number in 0..1024 * 100 {
            names[usize::from(bucket_of(&Name::new(&format!("object-{number}")).unwrap()))] += 1;
        }
        assert!(names.iter().all(|count| (50..160).contains(count)), "{names:?}");
        let mut led = [0u32; 8];
        for bucket in 0..BUCKETS {
            let nodes = (1..=8).map(|node| (NodeId(node), node));
            led[ranking(bucket, nodes, 1)[0] as usize - 1] += 1;
        }
        assert!(led.iter().all(|count| (90..170).contains(count)), "{led:?}");
    }

    #[test]
    fn only_what_a_node_has_moves_when_it_goes() {
        for bucket in 0..BUCKETS {
            let with = ranking(bucket, (1..=5).map(|node| (NodeId(node), node)), 2);
            let without = ranking(bucket, (1..=4).map(|node| (NodeId(node), node)), 2);
            let kept: Vec<_> = with.iter().copied().filter(|node| *node != 5).collect();
            assert_eq!(kept, without[..kept.len()]);
        }
    }

    #[test]
    fn a_map_that_cannot_be_is_refused() {
        let mut map = Map::empty(1, Epoch(1), 1, BUCKETS);
        assert_eq!(map.check(), Ok(()));
        map.buckets[7].owners.push(Owner { incarnation: 3, since: Epoch(1), full: true });
        assert_eq!(map.check(), Err(BadMap::Owner(7)));
        map.nodes.push(Member { node: NodeId(1), incarnation: 3, address: String::new(), leaving: false });
        assert_eq!(map.check(), Ok(()));
        map.buckets[7].owners.push(Owner { incarnation: 3, since: Epoch(1), full: true });
        assert_eq!(map.check(), Err(BadMap::Owner(7)));
        map.buckets.pop();
        assert_eq!(map.check(), Err(BadMap::Buckets(1023)));
    }
}
