//! What every way to another host can do.

use crate::{Burst, Guide, Inbox, Woven};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// A way for packets to other hosts. No call waits.
pub trait Link {
    /// Where answers reach this link.
    fn local_address(&self) -> SocketAddr;

    /// Sends bursts in order; how many bursts went entirely. Less than all: the link is full for now,
    /// or the next burst is at fault, which the call that begins with it will say.
    ///
    /// An error speaks of the first burst, and nothing was sent, unless that burst was longer than
    /// [`Link::burst_bytes_max`] or the kernel does not segment: then packets at its beginning may
    /// have gone, and go again when it is sent again. What is lost on the way counts as sent.
    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError>;

    /// Sends a burst whose packets do not lie in one piece; false if the link is full for now. A link that
    /// cannot gather puts them together first.
    fn send_woven(&mut self, burst: &Woven<'_>) -> Result<bool, SendError> {
        let bytes = burst.to_bytes();
        self.send(&[Burst { to: burst.to, bytes: &bytes, segment: burst.segment }]).map(|sent| sent == 1)
    }

    /// Fills the inbox, which it clears first, with what is there, without waiting; how many packets.
    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError>;

    /// The same, where somebody may know where payloads go: see [`Guide`]. A link that cannot do better
    /// receives aside.
    fn receive_guided(&mut self, inbox: &mut Inbox, _guide: &mut dyn Guide) -> Result<usize, ReceiveError> {
        self.receive(inbox)
    }

    /// A descriptor that polls readable when something arrives; None where there is none (simulated).
    ///
    /// It stays the same as long as the link lives. After a call that found the link full it also polls
    /// readable, or writable, once there is room: ask for both. Asking for it may make each packet dearer;
    /// who can poll several descriptors asks for [`Link::descriptors`] instead.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;

    /// Descriptors to be polled together: one of them polls readable when something arrives. They stay the
    /// same as long as the link lives.
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; 3] {
        [self.descriptor(), None, None]
    }

    /// Which of [`Link::descriptors`] polls writable once there is room, after a call that found the link
    /// full. Others may have room all the time.
    fn full_descriptor(&self) -> usize {
        0
    }

    /// Whoever polled found this one of [`Link::descriptors`] readable: the next look is there too.
    fn note_ready(&mut self, _descriptor: usize) {}

    /// Lists by which packets can be told to come, a bit for each: bit n is list n, and bit 0 is never set. One
    /// that is lost is no longer among them. A packet that comes by another list than its own is received all
    /// the same.
    fn lists(&self) -> u16 {
        0
    }

    /// A peer was told to send by this list, or need not any longer: where nobody is expected, looks are rare.
    fn note_list(&mut self, _list: u8, _in_use: bool) {}

    /// Most bytes of a burst that one system call takes, if it has no more than 64 packets, so that
    /// callers can size bursts.
    fn burst_bytes_max(&self) -> usize;

    /// What went through so far.
    fn counters(&self) -> LinkCounters;

    /// Bytes of the buffer in which packets wait to be received, as the kernel counts them, so that senders
    /// can be told; 0 where that is not known.
    fn receive_buffer_bytes(&self) -> usize {
        0
    }
}

/// What went through a link since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkCounters {
    /// Packets handed to the network, those among them that it lost at once (`soft_errors`) left out.
    pub packets_sent: u64,
    /// Their bytes.
    pub bytes_sent: u64,
    /// Packets put into inboxes.
    pub packets_received: u64,
    /// Their bytes.
    pub bytes_received: u64,
    /// Those among the packets that came by lists.
    pub packets_by_lists: u64,
    /// System calls for sending and receiving.
    pub system_calls: u64,
    /// Errors that mean a lost packet and nothing more: no route, a firewall, a closed port.
    pub soft_errors: u64,
    /// Datagrams that came while the receive buffer was full.
    pub kernel_drops: u64,
    /// 1 once the kernel or the path refused to segment: packets go one by one since.
    pub gso_refused: u64,
    /// 1 if the kernel refused to coalesce.
    pub gro_refused: u64,
    /// Looks at how a batch begins before it is received.
    pub looks_ahead: u64,
    /// 1 if the kernel refused to open lists, or to sort packets among them.
    pub lists_refused: u64,
    /// Lists that are out of use since somebody closed their descriptors, or put others there.
    pub lists_lost: u64,
    /// Datagrams dropped because a slot of the inbox was too short for them.
    pub truncated: u64,
}

/// Why a burst cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// A packet is larger than the path takes.
    #[error("a packet of {bytes} bytes is larger than this path takes")]
    TooLarge {
        /// Bytes of the packet.
        bytes: usize,
    },
    /// The link speaks IPv4 and the address is of IPv6.
    #[error("{to} cannot be reached from {local}, which is of another family of addresses")]
    WrongFamily {
        /// Where it should have gone.
        to: SocketAddr,
        /// Where the link is bound.
        local: SocketAddr,
    },
    /// The kernel refused for another reason.
    #[error("sending to {to} failed: {errno}")]
    System {
        /// Where it should have gone.
        to: SocketAddr,
        /// What the kernel said.
        errno: Errno,
    },
}

/// Why nothing can be received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The kernel refused.
    #[error("receiving at {local} failed: {errno}")]
    System {
        /// Where the link is bound.
        local: SocketAddr,
        /// What the kernel said.
        errno: Errno,
    },
}

/// Everything about a link that one around another link does not change: all but sending and receiving.
macro_rules! ask_beneath {
    ($self:ident, $link:expr) => {
        fn local_address(&$self) -> std::net::SocketAddr {
            ($link).local_address()
        }

        fn descriptor(&$self) -> Option<std::os::fd::BorrowedFd<'_>> {
            ($link).descriptor()
        }

        fn descriptors(&$self) -> [Option<std::os::fd::BorrowedFd<'_>>; 3] {
            ($link).descriptors()
        }

        fn full_descriptor(&$self) -> usize {
            ($link).full_descriptor()
        }

        fn note_ready(&mut $self, descriptor: usize) {
            ($link).note_ready(descriptor);
        }

        fn lists(&$self) -> u16 {
            ($link).lists()
        }

        fn note_list(&mut $self, list: u8, in_use: bool) {
            ($link).note_list(list, in_use);
        }

        fn burst_bytes_max(&$self) -> usize {
            ($link).burst_bytes_max()
        }

        fn counters(&$self) -> crate::LinkCounters {
            ($link).counters()
        }

        fn receive_buffer_bytes(&$self) -> usize {
            ($link).receive_buffer_bytes()
        }
    };
}
pub(crate) use ask_beneath;

impl<L: Link + ?Sized> Link for Box<L> {
    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        (**self).send(bursts)
    }

    fn send_woven(&mut self, burst: &Woven<'_>) -> Result<bool, SendError> {
        (**self).send_woven(burst)
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        (**self).receive(inbox)
    }

    fn receive_guided(&mut self, inbox: &mut Inbox, guide: &mut dyn Guide) -> Result<usize, ReceiveError> {
        (**self).receive_guided(inbox, guide)
    }

    ask_beneath!(self, **self);
}
