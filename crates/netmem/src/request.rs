//! Requests to nodes, and answers.
//!
//! Bytes of objects and pages travel beside a request or an answer, not in it, so that whoever sends them can do so
//! without another copy: the *body*.

use crate::types::{Epoch, Incarnation, Loss, Name, Nanoseconds, NodeId, PageHandle, Version};
use serde::{Deserialize, Serialize};

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The map that it was made from.
    pub epoch: Epoch,
    /// The life of the node that it is meant for.
    pub to: Incarnation,
    /// What is asked.
    pub ask: Ask,
}

/// What can be asked of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Stores the body under a name, in place of what is there.
    Put {
        /// The name.
        name: Name,
        /// For how long from when it is stored, in nanoseconds.
        lease_ns: u64,
        /// Whether it must not be aged out when memory is short.
        pinned: bool,
        /// Only if the name has this content at present.
        only_if: Option<Expect>,
    },
    /// Asks for an object.
    Get {
        /// Its name.
        name: Name,
        /// Whether its bytes are wanted, as the body of the answer.
        bytes: bool,
        /// Whether handles of its pages are wanted, to read them without a call from now on.
        places: bool,
    },
    /// Sets an object's lease anew, from now on.
    Renew {
        /// Its name.
        name: Name,
        /// For how long.
        lease_ns: u64,
    },
    /// Removes an object.
    Remove {
        /// Its name.
        name: Name,
        /// Only if it has this content at present.
        only_if: Option<Expect>,
    },
    /// Names in a bucket, in their order.
    List {
        /// The bucket.
        bucket: u16,
        /// Only names after this one.
        after: Option<Name>,
        /// So many at most.
        most: u32,
    },
    /// Everything about an object but its bytes.
    Stat {
        /// Its name.
        name: Name,
    },
    /// Objects that were read without a call, so that they do not age.
    Used {
        /// Their names; those that are not there are passed over.
        names: Vec<Name>,
    },
    /// Pages for a paged region.
    TakePages {
        /// Whose they will be: a random number that the client chose.
        owner: u64,
        /// How many.
        count: u32,
        /// How long the owner keeps all its pages from now on.
        lease_ns: u64,
        /// A number that the owner's requests for pages have in turn: the same one gets the same pages.
        turn: u64,
    },
    /// Writes the body into a page.
    WritePage {
        /// Whose it is.
        owner: u64,
        /// The page.
        page: PageHandle,
        /// Where in it.
        at: u16,
        /// The page's version before, so that a request which was held up cannot undo a later one.
        version: u32,
    },
    /// Reads a page: the body of the answer.
    ReadPage {
        /// The page.
        page: PageHandle,
        /// Where in it.
        at: u16,
        /// How many bytes.
        length: u16,
    },
    /// Writes the body into whole pages, one after the other, of a node's own life. A page that has the version after
    /// the one given was written by an earlier attempt at the same request, and is passed over.
    WritePages {
        /// Whose they are.
        owner: u64,
        /// The pages, each with its version before.
        pages: Vec<(PageHandle, u32)>,
    },
    /// Reads whole pages: the body of the answer.
    ReadPages {
        /// The pages.
        pages: Vec<PageHandle>,
    },
    /// Frees pages.
    FreePages {
        /// Whose they are.
        owner: u64,
        /// The pages; those that are not its own are passed over.
        pages: Vec<PageHandle>,
    },
    /// Sets an owner's lease anew, from now on.
    RenewOwner {
        /// The owner.
        owner: u64,
        /// For how long.
        lease_ns: u64,
    },
    /// Frees all pages of an owner.
    EndOwner {
        /// The owner.
        owner: u64,
    },
    /// How full the node is, and what it has done.
    Figures,
}

impl Ask {
    /// Whether it changes which names there are, or what they have: made twice, the second time perhaps after another
    /// client's change, it would do harm.
    pub(crate) fn changes_names(&self) -> bool {
        matches!(self, Ask::Put { .. } | Ask::Remove { .. })
    }
}

/// What a name must have for a change to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expect {
    /// Nothing.
    Absent,
    /// This content.
    Version(Version),
}

/// What a node says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It is stored.
    Stored {
        /// As this version.
        version: Version,
    },
    /// An object, whose bytes are the body if they were asked for.
    Object {
        /// What there is to say of it.
        stat: Stat,
        /// Its pages in their order, if they were asked for.
        pages: Vec<PageHandle>,
    },
    /// The lease runs for so long from now on.
    Renewed,
    /// It is not there any more.
    Removed {
        /// Whether it was there before.
        existed: bool,
    },
    /// Names.
    Listed {
        /// In their order.
        objects: Vec<(Name, Stat)>,
        /// Whether there are more after them.
        more: bool,
    },
    /// Pages for a paged region, which read as zeros.
    Pages {
        /// The pages.
        pages: Vec<PageHandle>,
    },
    /// The page is written.
    Written {
        /// Its version now.
        version: u32,
    },
    /// Bytes of a page are the body.
    Page {
        /// The page's version.
        version: u32,
    },
    /// It is done.
    Done,
    /// How full the node is.
    Figures(Figures),
    /// It was not done.
    Refused(Refusal),
}

/// What there is to say of an object besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    /// Which content.
    pub version: Version,
    /// Bytes.
    pub length: u64,
    /// Nanoseconds that its lease still runs.
    pub lease_left_ns: u64,
    /// Whether it never ages out.
    pub pinned: bool,
}

/// How full a node is, and what it did since it began this life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Figures {
    /// Pages donated.
    pub pages: u32,
    /// Of these free.
    pub free_pages: u32,
    /// Of these in objects.
    pub object_pages: u32,
    /// Of these in objects that never age out.
    pub pinned_pages: u32,
    /// Of these in paged regions.
    pub paged_pages: u32,
    /// Objects.
    pub objects: u64,
    /// Objects that were aged out for want of memory.
    pub aged: u64,
    /// Objects whose lease ran out.
    pub expired: u64,
    /// Objects of other nodes that had no room here when they were handed over.
    pub dropped: u64,
}

/// Why a node did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Refusal {
    /// The request was made from an old map.
    #[error("the request is of {yours}, the node has {mine}: fetch the map again")]
    OldEpoch {
        /// The request's.
        yours: Epoch,
        /// The node's.
        mine: Epoch,
    },
    /// The node has not heard of the map yet.
    #[error("the request is of {yours}, the node has only {mine}: it will know soon, ask again")]
    NodeBehind {
        /// The request's.
        yours: Epoch,
        /// The node's.
        mine: Epoch,
    },
    /// Another node has the name.
    #[error("bucket {bucket} is not led by this node at {epoch}: fetch the map again")]
    NotOwner {
        /// The bucket.
        bucket: u16,
        /// The node's map.
        epoch: Epoch,
    },
    /// The content is on its way from the node that had it before.
    #[error("bucket {bucket} is being handed over: ask again in a moment")]
    Arriving {
        /// The bucket.
        bucket: u16,
    },
    /// There is no such object.
    #[error("there is no such object{}", lost.map_or(String::new(), |loss| format!("; what was in its bucket was {loss}")))]
    NotFound {
        /// If content of its bucket was lost: with whom.
        lost: Option<Loss>,
    },
    /// The object's lease ran out.
    #[error("the object's lease ended {} ago: renew leases in time", Nanoseconds(*ago_ns))]
    Expired {
        /// How long ago.
        ago_ns: u64,
    },
    /// Nothing is free that may be.
    #[error(
        "{asked} pages are needed, {free} of {pages} are free, {pinned} hold pinned objects and {paged} paged regions: \
         free some, or donate more memory"
    )]
    Full {
        /// Pages asked for.
        asked: u64,
        /// Pages free.
        free: u32,
        /// Pages in all.
        pages: u32,
        /// Pages of pinned objects.
        pinned: u32,
        /// Pages of paged regions.
        paged: u32,
    },
    /// The machine has less memory than it donated.
    #[error(
        "the node's machine, or the limit of its control group, has no memory left for {asked} pages: remove objects or stop \
         other programs there, or raise the limit"
    )]
    NoMemory {
        /// Pages asked for.
        asked: u64,
    },
    /// The node that holds the second copy has no room.
    #[error("the node of the second copy has no room: free some, or donate more memory")]
    SecondFull,
    /// The object is too large.
    #[error("an object of {bytes} bytes is larger than the limit of {most}: divide it")]
    TooLarge {
        /// Its bytes.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// There are too many objects or owners.
    #[error("the node has {most} of them, its limit: remove some")]
    TooMany {
        /// The limit.
        most: u64,
    },
    /// So many changes of the bucket wait for their turn.
    #[error("{waiting} changes of the bucket wait for their turn: ask again in a moment")]
    Busy {
        /// How many.
        waiting: u32,
    },
    /// The lease is too short or too long.
    #[error("a lease of {} is outside the limits of {} to {}", Nanoseconds(*asked_ns), Nanoseconds(*least_ns), Nanoseconds(*most_ns))]
    BadLease {
        /// Asked for.
        asked_ns: u64,
        /// The shortest.
        least_ns: u64,
        /// The longest.
        most_ns: u64,
    },
    /// The content is not the expected one.
    #[error("the content is not the expected one: it is {found:?}")]
    Unexpected {
        /// What it is.
        found: Option<Version>,
    },
    /// What is asked for was on a node, or in a life of it, that is over.
    #[error("{node} in its life {incarnation:x} is gone, and all that it held")]
    Gone {
        /// The node.
        node: NodeId,
        /// Its life.
        incarnation: Incarnation,
    },
    /// The node is not in charge of anything at present.
    #[error("the node has no lease from the coordinator at present: ask again in a moment")]
    NoLease,
    /// The node is about to leave and gives out no more pages.
    #[error("the node is leaving: take pages elsewhere, and move those that are here")]
    Leaving,
    /// The page is not in use, or not the owner's.
    #[error("page {} of generation {} is not the owner's", page.index, page.generation)]
    NoPage {
        /// The page.
        page: PageHandle,
    },
    /// The owner has no pages here; perhaps its lease ended.
    #[error("there is no owner {owner:x}; if it had pages, its lease ended: renew leases in time")]
    NoOwner {
        /// The owner.
        owner: u64,
    },
    /// The page was written since.
    #[error("the page has version {found}, not {expected}")]
    PageVersion {
        /// What it has.
        found: u32,
        /// What was expected.
        expected: u32,
    },
    /// A range that is not inside a page.
    #[error("{at} + {length} is outside a page")]
    OutOfPage {
        /// Where it begins.
        at: u16,
        /// Bytes.
        length: u64,
    },
    /// The change may have happened or may yet happen.
    #[error("the node was replaced before it could confirm the change: look what is there, or change it again")]
    InDoubt,
}

/// A request of the node that leads a bucket to one that follows, or to its successor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerRequest {
    /// The map that it was made from.
    pub epoch: Epoch,
    /// The life of the node that asks.
    pub from: Incarnation,
    /// The life of the node that it is meant for.
    pub to: Incarnation,
    /// The bucket.
    pub bucket: u16,
    /// What is asked.
    pub ask: PeerAsk,
}

/// One leader's dealings with one follower about one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Session {
    /// Since when the leader leads.
    pub led_since: Epoch,
    /// Since when the follower has the bucket.
    pub since: Epoch,
}

/// What one node asks another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerAsk {
    /// A session begins; its steps are numbered from 1.
    Begin {
        /// Which.
        session: Session,
        /// Whether what the follower has is to be kept: it had everything.
        keep: bool,
        /// What is known to be lost of the bucket.
        loss: Option<Loss>,
    },
    /// One change after the other.
    Step {
        /// The session.
        session: Session,
        /// Its number.
        step: u64,
        /// The change.
        change: Change,
    },
    /// The asker has stopped to lead the bucket.
    Yield {
        /// Since when the one that is asked leads it.
        led_since: Epoch,
    },
}

/// What a follower is to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Change {
    /// A name has the body as its content.
    Store {
        /// The name.
        name: Name,
        /// Which content.
        version: Version,
        /// Nanoseconds that its lease still runs.
        lease_left_ns: u64,
        /// Whether it never ages out.
        pinned: bool,
        /// Whether to refuse and keep what is there where there is no room, instead of dropping the name.
        must: bool,
    },
    /// A name has no content.
    Drop {
        /// The name.
        name: Name,
    },
    /// A name has another lease.
    Lease {
        /// The name.
        name: Name,
        /// Nanoseconds that its lease runs.
        lease_left_ns: u64,
    },
    /// The follower has everything.
    Complete,
}

/// What a node says to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerAnswer {
    /// The session has begun.
    Begun {
        /// The name that was changed last, of which the two may have different content.
        last: Option<Name>,
    },
    /// The change is made.
    Stepped,
    /// There is no room: the name was dropped.
    Dropped,
    /// There is no room: nothing was changed.
    NoRoom,
    /// The successor knows.
    Yielded,
    /// It was not done.
    Refused(PeerRefusal),
}

/// Why a node did not do what another asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum PeerRefusal {
    /// The asker has an old map.
    #[error("the request is of {yours}, the node has {mine}")]
    OldEpoch {
        /// The request's.
        yours: Epoch,
        /// The node's.
        mine: Epoch,
    },
    /// The node that is asked has an old map, or none.
    #[error("the request is of {yours}, the node has only {mine}")]
    NodeBehind {
        /// The request's.
        yours: Epoch,
        /// The node's.
        mine: Epoch,
    },
    /// The map does not give the two nodes these parts in the bucket.
    #[error("the nodes do not have these parts in the bucket")]
    NotOwner,
    /// The session never began, or a step is missing.
    #[error("the session is at another step")]
    OutOfStep,
    /// It is meant for another life of the node.
    #[error("the node is in another life")]
    Gone,
}
