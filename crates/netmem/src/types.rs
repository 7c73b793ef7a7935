//! What requests, answers and the map are made of.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A node, by the number that its operator gave it or that was made from its name. It stays when the node restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {:x}", self.0)
    }
}

/// One life of a node, which begins empty: a random number, never zero, that the coordinator gives out.
pub type Incarnation = u64;

/// The number of a map; later maps have greater ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}", self.0)
    }
}

/// A page of a node: good until it is freed, and then never again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageHandle {
    /// The life of the node that it belongs to.
    pub incarnation: Incarnation,
    /// Which page.
    pub index: u32,
    /// Which use of it.
    pub generation: u32,
}

/// What distinguishes one content of a name from every other that it had or will have. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// Since when the node that stored it leads its bucket.
    pub led_since: Epoch,
    /// Which of that node's changes of the bucket it was.
    pub count: u64,
}

/// Content that was lost with a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Loss {
    /// The node.
    pub node: NodeId,
    /// The first map without it.
    pub epoch: Epoch,
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lost with {} at {}", self.node, self.epoch)
    }
}

/// The name of an object: 1 to 255 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(Box<str>);

/// A name that is empty or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a name of {bytes} bytes is outside the limits of 1 to {NAME_BYTES_MAX} bytes")]
pub struct BadName {
    /// Its bytes.
    pub bytes: usize,
}

impl Name {
    /// The name, if it is one.
    pub fn new(text: &str) -> Result<Name, BadName> {
        if (1..=NAME_BYTES_MAX).contains(&text.len()) {
            Ok(Name(text.into()))
        } else {
            Err(BadName { bytes: text.len() })
        }
    }

    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = BadName;
    fn try_from(text: String) -> Result<Name, BadName> {
        Name::new(&text)
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0.into()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Nanoseconds, for people.
pub(crate) struct Nanoseconds(pub(crate) u64);

impl fmt::Display for Nanoseconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", std::time::Duration::from_nanos(self.0))
    }
}

/// The longest name.
pub const NAME_BYTES_MAX: usize = 255;
