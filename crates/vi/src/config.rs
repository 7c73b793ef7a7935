//! Every limit is a number here, with the memory it costs.

use crate::queue::{CompletionQueue, Notify, QueueHandle};
use highwire_mem::{Allotment, Allow, Tag};
use highwire_pulse::Pulses;
use std::path::PathBuf;
use std::time::Duration;

/// Limits and habits of a [`crate::Nic`]. The default is right for most programs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Slots of a work queue, a power of two from 2 to 4096. Each costs 256 bytes on each side.
    pub depth: u32,
    /// Payloads that the receiver may hold in place at once, a power of two from 2 to 4096.
    /// Each costs 8 bytes.
    pub loans: u32,
    /// Descriptors that may wait for room on a send queue, and receives that may be posted.
    pub descriptors_max: usize,
    /// Address space for each peer process. Memory is taken only where it is used: a VI costs about
    /// 17 KiB on each side with the default depth, more only for bulk.
    pub region_bytes: usize,
    /// The largest region accepted from a peer.
    pub peer_region_bytes_max: u64,
    /// What regions of all processes of one user may take of this process's address space, those of the process's other
    /// interfaces among them.
    pub peer_bytes_total_max: u64,
    /// A VI's payload area, when it first needs one.
    pub payload_bytes_start: usize,
    /// What it may grow to under bulk traffic.
    pub payload_bytes_max: usize,
    /// What all payload areas of this Nic together may take.
    pub payload_bytes_total_max: usize,
    /// The longest message.
    pub message_bytes_max: u64,
    /// Regions that one peer may hand over; 64 at most between users, where each costs a descriptor.
    pub peer_regions_max: usize,
    /// Users whose processes may be connected at once. Each costs a page for each completion queue. A process of a user
    /// that this user namespace does not map counts like a user; at most half of them may be such processes.
    pub users_max: usize,
    /// Half-open connections that a listener keeps.
    pub half_open_max: usize,
    /// From this size on, a payload in registered memory is referenced rather than copied first.
    pub reference_from: usize,
    /// The least that is worth a pulse of its own.
    pub minpulse: usize,
    /// Whose processes may be at the other end on this host, where nothing else is said.
    pub allow: Allow,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// Spin at most this long before sleeping; `None` measures what a wake-up costs and takes that.
    pub spin: Option<Duration>,
    /// Where names live; `None` finds the user's runtime directory.
    pub runtime_dir: Option<PathBuf>,
    /// The index of the first slot of new connections; for testing wrap-around.
    pub first_index: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            depth: 64,
            loans: 64,
            descriptors_max: 1024,
            region_bytes: 256 << 20,
            peer_region_bytes_max: 64 << 30,
            peer_bytes_total_max: 4 << 40,
            payload_bytes_start: 256 << 10,
            payload_bytes_max: 4 << 20,
            payload_bytes_total_max: 256 << 20,
            message_bytes_max: 1 << 30,
            peer_regions_max: 1024,
            users_max: 64,
            half_open_max: 16,
            reference_from: 16 << 10,
            minpulse: 8 << 10,
            allow: Allow::SameUser,
            connect_timeout: Duration::from_secs(5),
            spin: None,
            runtime_dir: None,
            first_index: 0,
        }
    }
}

impl Config {
    /// What a peer of this user may have mapped here.
    pub(crate) fn allotment(&self, user: Option<u32>) -> Allotment {
        Allotment { region: self.peer_region_bytes_max, user: Some((user, self.peer_bytes_total_max)) }
    }
}

/// When a send completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Reliability {
    /// When it left. On one host nothing is lost on the way, so this is as good as delivery, except
    /// that a message for which there is no room at all is dropped rather than held back.
    Unreliable,
    /// When the other side has it: its slot is visible and the peer lives.
    #[default]
    Delivery,
    /// When the other side's application has it: copied out, or held in place.
    Reception,
}

/// How a payload travels.
// A whole word: a message that is moved right after it was made is read in words, and a word of which
// one byte was just written is there only when all stores before it are, those to slots too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u32)]
pub enum Path {
    /// The library chooses by size.
    #[default]
    Choose,
    /// Copied into the sender's payload area; the buffer is free at once.
    Buffered,
    /// Read by the receiver where it is; the buffer comes back when the receiver is done.
    Referenced,
}

/// Choices for one VI.
#[derive(Clone, Debug, Default)]
pub struct ViOptions<'a> {
    pub(crate) queue: Option<QueueHandle>,
    pub(crate) reliability: Reliability,
    pub(crate) tag: Option<Tag>,
    pub(crate) path: Path,
    pub(crate) pulses: Pulses,
    pub(crate) allow: Option<Allow>,
    pub(crate) notify: Option<&'a Notify>,
    pub(crate) own_bell: bool,
    pub(crate) connect_timeout: Option<Duration>,
}

impl<'a> ViOptions<'a> {
    /// The defaults: reliable delivery, tag 0, the library's choices.
    pub fn new() -> ViOptions<'a> {
        ViOptions::default()
    }

    /// The completion queue that watches this VI.
    #[must_use]
    pub fn queue(mut self, queue: &'a CompletionQueue) -> Self {
        self.queue = Some(queue.handle());
        self
    }

    /// The same, of a queue that another thread waits on.
    #[must_use]
    pub fn queue_of(mut self, queue: &QueueHandle) -> Self {
        self.queue = Some(queue.clone());
        self
    }

    /// When sends complete.
    #[must_use]
    pub fn reliability(mut self, reliability: Reliability) -> Self {
        self.reliability = reliability;
        self
    }

    /// The protection tag: buffers of regions with another tag are refused.
    #[must_use]
    pub fn tag(mut self, tag: Tag) -> Self {
        self.tag = Some(tag);
        self
    }

    /// How payloads travel where the message does not say.
    #[must_use]
    pub fn path(mut self, path: Path) -> Self {
        self.path = path;
        self
    }

    /// How large copied messages are cut.
    #[must_use]
    pub fn pulses(mut self, pulses: Pulses) -> Self {
        self.pulses = pulses;
        self
    }

    /// The thread that calls back when this VI has something.
    #[must_use]
    pub fn notify(mut self, notify: &'a Notify) -> Self {
        self.notify = Some(notify);
        self
    }

    /// A doorbell for this VI alone, rather than that of a completion queue. Whoever sleeps for another VI is then not
    /// woken for this one. It costs a page and three descriptors; a stream that is to be polled needs it. With a queue or
    /// a notifier it says that this VI is the only one that they will ever have.
    #[must_use]
    pub fn own_bell(mut self) -> Self {
        self.own_bell = true;
        self
    }

    /// How long connecting may take, if not as long as [`Config::connect_timeout`] says.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = Some(timeout);
        self
    }

    /// Whose listener may answer when connecting, where [`Config::allow`] is not to be asked.
    #[must_use]
    pub fn allow(mut self, allow: Allow) -> Self {
        self.allow = Some(allow);
        self
    }
}
