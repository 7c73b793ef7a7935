//! Work that a VI hands to an adapter, and what comes back when it is done.
//!
//! VIs and adapters know each other by this alone. A [`Line`] is one VI's end of the way to another
//! host: descriptors go in by value with their buffers, and each comes out again, done or failed.
//!
//! ```text
//!  vi ── Carrier::post ───────────────────▶ adapter ──▶ network
//!           └─ post ──▶ posted ── take_posted ─▲  while somebody else is at it
//!  vi ◀── take ── done ◀──── complete ───── adapter ◀── network
//!     ◀── Carrier::attend ────────────────  where the one who looks carries
//!     ◀─────────── notice ────────────────
//! ```
//!
//! The locks are held for a push or a pop.

use crate::{Allow, Buffer, Frozen, Granted, SharedBuffer, Tag, Window};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// A piece of an outgoing payload.
#[derive(Debug)]
pub enum Segment {
    /// Registered memory, ours until the completion.
    Buffer(Buffer),
    /// Registered memory that several messages may carry.
    Shared(SharedBuffer),
    /// A range of a region that never changes.
    Frozen(Frozen, Range<usize>),
}

impl Segment {
    /// Its bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Segment::Buffer(buffer) => buffer,
            Segment::Shared(buffer) => buffer,
            Segment::Frozen(region, range) => &region[range.clone()],
        }
    }
}

/// A payload on its way, or the place for one.
#[derive(Debug, Default)]
pub enum Parcel {
    /// None; a place for nothing.
    #[default]
    Empty,
    /// One buffer.
    Buffer(Buffer),
    /// Several pieces; a place has buffers only.
    Segments(Box<[Segment]>),
    /// Memory of the adapter's own: bytes that were copied in, or a place that takes what it needs.
    Bytes(Vec<u8>),
    /// Granted memory that a peer reads or writes. The adapter's own too: no VI posts or is given it.
    Window(Box<Window>),
    /// A payload that is in remote memory by now: only the news of it goes. The adapter's own as well.
    Written(Box<Parcel>),
}

impl Parcel {
    /// Bytes that go, or that there is room for. A place that takes what it needs has what it took.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Parcel::Empty | Parcel::Written(_) => 0,
            Parcel::Buffer(buffer) => buffer.len(),
            Parcel::Segments(segments) => segments.iter().map(|segment| segment.bytes().len()).sum(),
            Parcel::Bytes(bytes) => bytes.len(),
            Parcel::Window(window) => window.len(),
        }
    }

    /// True if that is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a VI wants done.
#[derive(Debug)]
pub enum Work {
    /// Send a message.
    Send(Dispatch),
    /// Fill this with the next message.
    Receive(Place),
    /// Fill this with the message that comes under a payload token.
    Expect(u64, Place),
    /// Write remote memory.
    Write(Errand),
    /// Read remote memory.
    Read(Errand),
}

/// A message to be sent.
#[derive(Debug)]
pub struct Dispatch {
    /// The descriptor's token.
    pub token: u64,
    /// Bytes beside the payload.
    pub control: Vec<u8>,
    /// Immediate data.
    pub immediate: u32,
    /// Where the receiver is to put it, if not in its next receive.
    pub payload_token: Option<u64>,
    /// It leaves when so many writes and reads of this line are done: those that were posted before it.
    pub after: u64,
    /// The payload.
    pub parcel: Parcel,
}

/// What is to be done with memory that the peer granted.
#[derive(Debug)]
pub struct Errand {
    /// The descriptor's token.
    pub token: u64,
    /// The region, by its owner's number.
    pub handle: u32,
    /// The tag in its key.
    pub tag: Tag,
    /// Where in the region.
    pub offset: u64,
    /// For a write: tell the peer when it is done, with this immediate data. It takes a receive.
    pub immediate: Option<u32>,
    /// What is written, or the place for what is read.
    pub parcel: Parcel,
}

/// A place for a message.
#[derive(Debug)]
pub struct Place {
    /// The descriptor's token.
    pub token: u64,
    /// Where the payload goes.
    pub parcel: Parcel,
    /// The longest message that a place takes which takes what it needs.
    pub limit: usize,
}

/// Which of a VI's two queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Messages that were sent.
    Sent,
    /// Messages that came.
    Received,
}

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// A message went or came.
    Message,
    /// Remote memory was written.
    Write,
    /// Remote memory was read.
    Read,
}

/// A piece of work that is done, or has failed.
#[derive(Debug)]
pub struct Done {
    /// What it was.
    pub deed: Deed,
    /// The descriptor's token.
    pub token: u64,
    /// Whether it was.
    pub status: Result<(), Fault>,
    /// Bytes of payload.
    pub length: usize,
    /// Immediate data received.
    pub immediate: u32,
    /// Control bytes received.
    pub control: Vec<u8>,
    /// The payload token that a message came under.
    pub payload_token: Option<u64>,
    /// The payload, or its place.
    pub parcel: Parcel,
}

/// Why work, or a whole line, failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This side closed it.
    Closed,
    /// The peer closed it.
    PeerClosed,
    /// The peer closed it with messages outstanding.
    PeerAborted,
    /// Nothing was heard of the peer for so long.
    Silence(Duration),
    /// The keys of the session are used up.
    KeysUsedUp,
    /// A packet of the session could not be sealed.
    NotSealed,
    /// The key of the session is not accepted any more, here or by the peer.
    KeyRemoved,
    /// This machine or process was put back to an earlier state.
    Restored,
    /// The message does not fit its place, and was dropped.
    TooLong {
        /// Bytes of the message.
        message: u64,
        /// Bytes of the place.
        place: u64,
    },
    /// A write or a read of remote memory was refused. The line goes on.
    Denied(Denial),
}

/// Why remote memory was not written or read, as its owner's adapter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// The owner has not granted the region on this VI, or no longer does.
    #[error("the region is not granted on this VI, or was withdrawn; ask its owner for a key")]
    NotGranted,
    /// The key's tag is not the region's.
    #[error("the tag in the key is not the region's; use the key as its owner made it")]
    WrongTag,
    /// The range is not inside the region.
    #[error("the range ends at {end}, outside the remote region of {bytes} bytes")]
    OutOfRange {
        /// Where the range ends.
        end: u64,
        /// Bytes of the region.
        bytes: u64,
    },
    /// The region may only be read.
    #[error("the remote region may only be read; its owner must export it for writing")]
    ReadOnly,
    /// The owner withdrew the region while it was written.
    #[error("the region was withdrawn while it was written; some of the bytes may have landed")]
    Withdrawn,
    /// There is no room for the request.
    #[error("there is no room for the request at one of both sides; take completions, then post it again")]
    Busy,
    /// As many bytes moved as were not asked for.
    #[error("another length moved than was asked for: the peer does not keep to the protocol")]
    Mismatch,
}

/// One VI's end of the way to another host.
pub struct Line {
    posted: Mutex<VecDeque<Work>>,
    sent: Queue,
    received: Queue,
    ended: OnceLock<Fault>,
    terms: OnceLock<Terms>,
    notice: Box<dyn Fn() + Send + Sync>,
}

#[derive(Debug, Default)]
struct Queue {
    done: Mutex<VecDeque<Done>>,
    some: AtomicBool,
}

/// What holds for a line once it is connected.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Where the peer is.
    pub peer: SocketAddr,
    /// Where we are. All addresses of this host, where it was not said which.
    pub local: SocketAddr,
    /// The longest message.
    pub message_bytes_max: u64,
    /// Who carries it.
    pub carrier: Arc<dyn Carrier>,
}

impl Line {
    /// A line that calls `notice` whenever something is done.
    pub fn new(notice: impl Fn() + Send + Sync + 'static) -> Line {
        Line {
            posted: Mutex::default(),
            sent: Queue::default(),
            received: Queue::default(),
            ended: OnceLock::new(),
            terms: OnceLock::new(),
            notice: Box::new(notice),
        }
    }

    // ── For the VI ───────────────────────────────────────────────────────────────────────────────

    /// Takes the next thing that is done.
    #[inline]
    pub fn take(&self, side: Side) -> Option<Done> {
        let queue = self.queue(side);
        if !queue.some.load(Ordering::SeqCst) {
            return None;
        }
        let mut done = lock(&queue.done);
        let next = done.pop_front();
        queue.some.store(!done.is_empty(), Ordering::Release);
        next
    }

    /// True if something is done.
    #[inline]
    pub fn has_done(&self, side: Side) -> bool {
        self.queue(side).some.load(Ordering::SeqCst)
    }

    /// How many things are done and not taken.
    pub fn done_count(&self, side: Side) -> usize {
        lock(&self.queue(side).done).len()
    }

    /// Why the first of those failed that are done and not taken, if one did. What the owner of memory refused
    /// is answered, as far as this goes.
    pub fn failed(&self, side: Side) -> Option<Fault> {
        let failed = |done: &Done| done.status.err().filter(|fault| !matches!(fault, Fault::Denied(_)));
        lock(&self.queue(side).done).iter().find_map(failed)
    }

    /// Why it is over, if it is. Everything that was posted has come back then.
    pub fn ended(&self) -> Option<Fault> {
        self.ended.get().copied()
    }

    /// What holds for it, once it is connected.
    pub fn terms(&self) -> Option<&Terms> {
        self.terms.get()
    }

    // ── For the adapter ──────────────────────────────────────────────────────────────────────────

    /// It is connected.
    pub fn connected(&self, terms: Terms) {
        let _ = self.terms.set(terms);
    }

    /// Keeps work, in order, until somebody takes it.
    pub fn post(&self, work: Work) {
        lock(&self.posted).push_back(work);
    }

    /// Takes all work that was kept.
    pub fn take_posted(&self, into: &mut VecDeque<Work>) {
        into.append(&mut lock(&self.posted));
    }

    /// Something is done; [`Line::tell`] makes it known.
    pub fn complete(&self, side: Side, done: Done) {
        let queue = self.queue(side);
        let mut queued = lock(&queue.done);
        queued.push_back(done);
        queue.some.store(true, Ordering::Release);
    }

    /// It is over, and everything has come back.
    pub fn end(&self, fault: Fault) {
        let _ = self.ended.set(fault);
    }

    /// Wakes whoever waits for what is done. A sleeper announces itself and then looks; here it was done, and
    /// then it is looked for sleepers: a fence (`SeqCst`) has to lie between, one for all that was done.
    pub fn tell(&self) {
        (self.notice)();
    }

    fn queue(&self, side: Side) -> &Queue {
        match side {
            Side::Sent => &self.sent,
            Side::Received => &self.received,
        }
    }
}

impl Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("ended", &self.ended).field("terms", &self.terms).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What has become of payloads that came from another host, counted in packets of messages that have more than
/// one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Landings {
    /// They were received into their place, which was guessed.
    pub hits: u64,
    /// They were received into their place, after a look at how the first of them begins.
    pub seen: u64,
    /// They were received elsewhere and copied to their place: since nothing was guessed, or wrongly.
    pub copied: u64,
    /// Packets for which the guess was wrong.
    pub misses: u64,
    /// Looks at how packets begin.
    pub looks: u64,
    /// Bytes that were moved from where they had landed by a wrong guess.
    pub moved_bytes: u64,
}

impl Landings {
    /// How many of a hundred packets landed in a place that was guessed; none of none.
    pub fn success_percent(&self) -> Option<f64> {
        let all = self.hits + self.seen + self.copied;
        (all > 0).then(|| self.hits as f64 * 100.0 / all as f64)
    }
}

/// Who carries a line's work to the network and back.
pub trait Carrier: Debug + Send + Sync {
    /// Takes work of this line, in order. A place for a message is not urgent, all else is.
    fn post(&self, line: &Line, work: Work);

    /// Somebody looks for completions. Where the application's own thread does the carrying, now is the
    /// time. With `receiving`, and if nothing that came is left on the line, the next message may be handed
    /// over at once; only who takes what came from this line may ask for that.
    fn attend(&self, receiving: bool) -> Option<Done>;

    /// The same for all lines that one look serves.
    fn number(&self) -> u64;

    /// Somebody who attended goes to sleep (`true`), or is awake again: others must carry meanwhile.
    fn hand_over(&self, asleep: bool);

    /// Sleeps for the caller until the network has something or `timeout` is over, unless `look` finds
    /// something that is done after everything is prepared. It need not attend: what the network has keeps
    /// nobody asleep. False if that is not for this caller to do.
    fn rest(&self, timeout: Duration, look: &mut dyn FnMut() -> bool) -> bool;

    /// Wakes whoever rests.
    fn wake(&self);

    /// Takes an expected place back: nothing lands in it afterwards.
    fn revoke(&self, payload_token: u64) -> Option<Place>;

    /// What has become of the payloads that came for this line; for all lines that one look serves, with `all`.
    fn landings(&self, all: bool) -> Landings;

    /// Lets the peer at this memory, through this line alone, until it is withdrawn or the line is closed.
    /// `Err` tells how many regions a line can grant, which it does.
    fn grant(&self, memory: Granted) -> Result<(), usize>;

    /// Takes that back: nothing lands in the memory afterwards. False if it was not granted.
    fn withdraw(&self, handle: u32) -> bool;

    /// Asks the peer for a receive list for what is sent here from now on, as far as there are any.
    fn request_fast(&self);

    /// The VI is gone, and has not taken the completions of so many messages. If some of those are not even done,
    /// the peer is told that the VI was aborted.
    fn close(&self, outstanding: usize);
}

/// The way to other hosts: what an adapter offers to VIs.
pub trait Wire: Debug + Send + Sync {
    /// Connects a line to the listener at `host:port`. `reliable` says how this side's messages go; `allow`, whose
    /// listener it may be where nothing but the user tells.
    fn connect(
        &self,
        to: &str,
        line: &Arc<Line>,
        reliable: bool,
        timeout: Duration,
        allow: &Allow,
    ) -> Result<(), WireError>;

    /// Listens at `host:port`, for these users where nothing but the user tells.
    fn listen(&self, at: &str, allow: &Allow) -> Result<Box<dyn WireListener>, WireError>;
}

/// Where lines of others come in.
pub trait WireListener: Debug + Send + Sync {
    /// Where it listens, with the port that was chosen.
    fn address(&self) -> SocketAddr;

    /// Connects a line to the next who calls; false if nobody did in time.
    fn accept(&self, line: &Arc<Line>, reliable: bool, timeout: Duration) -> Result<bool, WireError>;

    /// Readable when somebody calls.
    fn descriptor(&self) -> BorrowedFd<'_>;
}

/// A user as messages name one; `None` for one that this user namespace does not map.
pub(crate) fn user(owner: Option<u32>) -> String {
    owner.map_or_else(|| "a user that this user namespace does not map".to_owned(), |owner| format!("user {owner}"))
}

/// Why there is no line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Not an address of a host.
    #[error("{0:?} is not the address of a host; write HOST:PORT, with brackets around an IPv6 address")]
    Address(String),
    /// The name is not known.
    #[error("the host {host:?} is not found: {reason}")]
    Name {
        /// The name.
        host: String,
        /// What the resolver said.
        reason: String,
    },
    /// The address is taken.
    #[error("{0} is in use: another process listens there; stop it or take another port")]
    InUse(SocketAddr),
    /// Beyond loopback a key is needed.
    #[error(
        "{0} is beyond this host, and there is no key: make one (highwire key new FILE) and give it to both sides (--key FILE), or say --insecure"
    )]
    NoKey(SocketAddr),
    /// On this host without a key, another user is at the other end.
    #[error(
        "{at} is served by {}, and without a key only this user's own processes are trusted: allow that user (--allow), or give both sides a key (--key FILE)",
        user(*.owner)
    )]
    OtherUser {
        /// Where.
        at: SocketAddr,
        /// Which user; `None` for one that this user namespace does not map.
        owner: Option<u32>,
    },
    /// Without a key a listener on this host has to know the users of those who call, and cannot.
    #[error(
        "whose a caller at {at} is cannot be known, since the kernel does not tell the owners of UDP sockets ({reason}): use a key (--key FILE), or let everybody in (--allow everyone)"
    )]
    NoOwners {
        /// Where.
        at: SocketAddr,
        /// What it said.
        reason: String,
    },
    /// The socket could not be had.
    #[error("{0}")]
    Socket(String),
    /// Nobody answered.
    #[error("{0}")]
    NoAnswer(String),
    /// There is somebody, who does not accept.
    #[error("{to} is there, but has not accepted within {after:?}")]
    NotAccepted {
        /// Who.
        to: SocketAddr,
        /// The time given.
        after: Duration,
    },
    /// The other side said no.
    #[error("{to} refused: {reason}")]
    Refused {
        /// Who.
        to: SocketAddr,
        /// Why.
        reason: &'static str,
    },
    /// The session ended before the line was there.
    #[error("the session with {to} is over: {reason}")]
    Over {
        /// Who.
        to: SocketAddr,
        /// Why.
        reason: String,
    },
}
