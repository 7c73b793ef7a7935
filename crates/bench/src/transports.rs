//! The contestants: ways for two processes to exchange messages.
//!
//! Each is a [`Transport`], of which both processes have one end. A trial runs [`Transport::ping`]
//! against [`Transport::pong`], or [`Transport::pour`] against [`Transport::drain`]; the driver
//! takes the time around a whole burst, so that no clock is read between two messages.

pub(crate) mod files;
pub(crate) mod landing;
mod pattern;
pub(crate) mod programs;
mod remote;
mod ring;
mod sockets;
mod streams;
mod udp;
pub(crate) mod vi;

use crate::BenchError;
use crate::network::Wire;
use crate::pair::{Link, Role};
use crate::rpc;
use crate::stats::Measure;
use crate::trace::Pulse;
use highwire::Landings;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Somebody who takes part in a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contestant {
    /// A spinning ring of slots with a payload area and nothing above it: the floor.
    RawRing,
    /// Virtual interfaces, the library choosing how payloads travel.
    Vi,
    /// Virtual interfaces, payloads copied through the payload area.
    ViBuffered,
    /// Virtual interfaces, payloads read where they are; each message is another frame.
    ViReferenced,
    /// TCP, both ends looking without pause.
    TcpSpin,
    /// TCP, both ends asleep while there is nothing.
    TcpBlock,
    /// A Unix stream socket, both ends looking without pause.
    UnixSpin,
    /// A Unix stream socket, both ends asleep while there is nothing.
    UnixBlock,
    /// Buffered virtual interfaces, large messages in pulses of 1408 bytes.
    #[serde(rename = "fixed-1408")]
    Fixed1408,
    /// Buffered virtual interfaces, large messages in one piece.
    StoreAndForward,
    /// Buffered virtual interfaces, pulses as the policy finds them.
    Adaptive,
    /// UDP and nothing above it, both ends looking without pause: the floor of latency on a wire.
    UdpSpin,
    /// UDP packets one way, some of them lost, cut and put together by the kernel: the limit of a wire.
    UdpGso,
    /// The same over devices that take packets one by one.
    UdpSegmented,
    /// `tcp-block` over devices that take packets one by one.
    TcpNoOffload,
    /// Virtual interfaces between hosts, packets with a checksum.
    ViUdp,
    /// Virtual interfaces between hosts, packets encrypted.
    ViUdpSealed,
    /// `vi-udp` over devices that take packets one by one.
    ViUdpSegmented,
    /// `vi-udp` through what can impair packets, which it does not: what impairing costs by itself.
    #[serde(rename = "vi-udp-impaired-0")]
    ViUdpImpaired0,
    /// `vi-udp` with every hundredth packet lost and every hundredth overtaken.
    #[serde(rename = "vi-udp-impaired-1")]
    ViUdpImpaired1,
    /// Remote memory between hosts, written, four writes at a time.
    RdmaWrite,
    /// Remote memory between hosts, read; the time of a whole read.
    RdmaRead,
    /// A short message there and the payload back: what `rdma-read` does, by messages; the time of both.
    SendAndMessage,
    /// Payloads received aside and copied to where they belong.
    Copying,
    /// Payloads received where they belong, after a look at how each batch begins.
    Peek,
    /// Payloads received where they are expected, as is usual.
    Landing,
    /// Payloads received where they do not belong, and moved: the worst that can be.
    AlwaysWrong,
    /// `landing`, to tell how many payloads were where they were expected.
    OneSender,
    /// The same with four senders at a time.
    FourSenders,
    /// The same without receive lists.
    FourSendersNoLists,
    /// `landing` while small messages of another sender come among the packets.
    Interference,
    /// The same with small messages of another virtual interface of the same sender, by the same socket.
    InterferenceWithin,
    /// Stream sockets over virtual interfaces, both ends looking without pause: they read without
    /// blocking, again and again, as `tcp-spin` does. Files go by a second one that blocks.
    Sock,
    /// Stream sockets as most programs use them: calls that block.
    SockBlock,
    /// The same, with one thread that handles the messages of all streams.
    SockHandler,
    /// The same, with a thread for each stream.
    SockNotify,
    /// `sock`, one message at a time.
    #[serde(rename = "window-1")]
    Window1,
    /// `sock`, a window of 32 messages, each acknowledged by itself.
    #[serde(rename = "window-32")]
    Window32,
    /// The same, 16 messages acknowledged at a time.
    DelayedAcks,
    /// The same, small writes combined: all that `sock` does.
    Combining,
    /// `sock` between hosts, packets encrypted.
    SockUdpSealed,
    /// `tcp-block`, the kernel combining small writes, which it is told to send at the end of a burst.
    TcpNagle,
    /// Files over TCP.
    Tcp,
    /// Files copied by one process: the limit of the file system.
    Copy,
    /// A plain C program over TCP, both ends under `highwire run` and looking without pause.
    RunSpin,
    /// The same, both ends in calls that block.
    RunBlock,
    /// The same, only the server under `highwire run`.
    RunOneEnd,
    /// `run-block` with both ends on one CPU.
    RunBlockOneCore,
    /// The same program over plain TCP, both ends on one CPU.
    TcpBlockOneCore,
    /// Programs as they are.
    Plain,
    /// Both ends under `highwire run`.
    Highwire,
    /// Remote procedure calls between two processes of one host.
    Shm,
    /// Remote procedure calls between hosts, packets with a checksum.
    Udp,
    /// Remote procedure calls between hosts, packets encrypted.
    UdpSealed,
    /// Values from redis, over loopback.
    Redis,
    /// Values from memcached, over loopback.
    Memcached,
    /// gRPC by tonic, over loopback.
    Tonic,
    /// Remote procedure calls by tarpc, over loopback.
    Tarpc,
    /// Memory that another process donates, read page by page.
    Paged,
    /// The same of another host.
    PagedUdp,
    /// The same as `paged`, read as the memory that it is from one end to the other, page fault by page fault.
    PagedMapped,
    /// A file on a disk, mapped, of which nothing is in memory.
    MappedFile,
}

impl Contestant {
    /// Everybody, in the order of reports.
    pub const ALL: [Contestant; 62] = [
        Contestant::RawRing,
        Contestant::Vi,
        Contestant::ViBuffered,
        Contestant::ViReferenced,
        Contestant::TcpSpin,
        Contestant::TcpBlock,
        Contestant::UnixSpin,
        Contestant::UnixBlock,
        Contestant::Fixed1408,
        Contestant::StoreAndForward,
        Contestant::Adaptive,
        Contestant::UdpSpin,
        Contestant::UdpGso,
        Contestant::UdpSegmented,
        Contestant::TcpNoOffload,
        Contestant::ViUdp,
        Contestant::ViUdpSealed,
        Contestant::ViUdpSegmented,
        Contestant::ViUdpImpaired0,
        Contestant::ViUdpImpaired1,
        Contestant::RdmaWrite,
        Contestant::RdmaRead,
        Contestant::SendAndMessage,
        Contestant::Copying,
        Contestant::Peek,
        Contestant::Landing,
        Contestant::AlwaysWrong,
        Contestant::OneSender,
        Contestant::FourSenders,
        Contestant::FourSendersNoLists,
        Contestant::Interference,
        Contestant::InterferenceWithin,
        Contestant::Sock,
        Contestant::SockBlock,
        Contestant::SockHandler,
        Contestant::SockNotify,
        Contestant::Window1,
        Contestant::Window32,
        Contestant::DelayedAcks,
        Contestant::Combining,
        Contestant::SockUdpSealed,
        Contestant::TcpNagle,
        Contestant::Tcp,
        Contestant::Copy,
        Contestant::RunSpin,
        Contestant::RunBlock,
        Contestant::RunOneEnd,
        Contestant::RunBlockOneCore,
        Contestant::TcpBlockOneCore,
        Contestant::Plain,
        Contestant::Highwire,
        Contestant::Shm,
        Contestant::Udp,
        Contestant::UdpSealed,
        Contestant::Redis,
        Contestant::Memcached,
        Contestant::Tonic,
        Contestant::Tarpc,
        Contestant::Paged,
        Contestant::PagedUdp,
        Contestant::PagedMapped,
        Contestant::MappedFile,
    ];

    /// Its name, as in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Contestant::RawRing => "raw-ring",
            Contestant::Vi => "vi",
            Contestant::ViBuffered => "vi-buffered",
            Contestant::ViReferenced => "vi-referenced",
            Contestant::TcpSpin => "tcp-spin",
            Contestant::TcpBlock => "tcp-block",
            Contestant::UnixSpin => "unix-spin",
            Contestant::UnixBlock => "unix-block",
            Contestant::Fixed1408 => "fixed-1408",
            Contestant::StoreAndForward => "store-and-forward",
            Contestant::Adaptive => "adaptive",
            Contestant::UdpSpin => "udp-spin",
            Contestant::UdpGso => "udp-gso",
            Contestant::UdpSegmented => "udp-segmented",
            Contestant::TcpNoOffload => "tcp-no-offload",
            Contestant::ViUdp => "vi-udp",
            Contestant::ViUdpSealed => "vi-udp-sealed",
            Contestant::ViUdpSegmented => "vi-udp-segmented",
            Contestant::ViUdpImpaired0 => "vi-udp-impaired-0",
            Contestant::ViUdpImpaired1 => "vi-udp-impaired-1",
            Contestant::RdmaWrite => "rdma-write",
            Contestant::RdmaRead => "rdma-read",
            Contestant::SendAndMessage => "send-and-message",
            Contestant::Copying => "copying",
            Contestant::Peek => "peek",
            Contestant::Landing => "landing",
            Contestant::AlwaysWrong => "always-wrong",
            Contestant::OneSender => "one-sender",
            Contestant::FourSenders => "four-senders",
            Contestant::FourSendersNoLists => "four-senders-no-lists",
            Contestant::Interference => "interference",
            Contestant::InterferenceWithin => "interference-within",
            Contestant::Sock => "sock",
            Contestant::SockBlock => "sock-block",
            Contestant::SockHandler => "sock-handler",
            Contestant::SockNotify => "sock-notify",
            Contestant::Window1 => "window-1",
            Contestant::Window32 => "window-32",
            Contestant::DelayedAcks => "delayed-acks",
            Contestant::Combining => "combining",
            Contestant::SockUdpSealed => "sock-udp-sealed",
            Contestant::TcpNagle => "tcp-nagle",
            Contestant::Tcp => "tcp",
            Contestant::Copy => "copy",
            Contestant::RunSpin => "run-spin",
            Contestant::RunBlock => "run-block",
            Contestant::RunOneEnd => "run-one-end",
            Contestant::RunBlockOneCore => "run-block-one-core",
            Contestant::TcpBlockOneCore => "tcp-block-one-core",
            Contestant::Plain => "plain",
            Contestant::Highwire => "highwire",
            Contestant::Shm => "shm",
            Contestant::Udp => "udp",
            Contestant::UdpSealed => "udp-sealed",
            Contestant::Redis => "redis",
            Contestant::Memcached => "memcached",
            Contestant::Tonic => "tonic",
            Contestant::Tarpc => "tarpc",
            Contestant::Paged => "paged",
            Contestant::PagedUdp => "paged-udp",
            Contestant::PagedMapped => "paged-mapped",
            Contestant::MappedFile => "mapped-file",
        }
    }

    /// True if it can only spin, which two processes on one CPU must not.
    pub fn only_spins(self) -> bool {
        use Contestant::{RawRing, RunSpin, TcpSpin, UdpSpin, UnixSpin};
        matches!(self, RawRing | TcpSpin | UnixSpin | UdpSpin | RunSpin)
    }

    /// How its packets go, if it has any.
    pub(crate) fn wire(self) -> Wire {
        match self {
            Contestant::UdpSegmented | Contestant::TcpNoOffload | Contestant::ViUdpSegmented => Wire::Segmented,
            _ => Wire::Whole,
        }
    }

    /// What it does while others do this exercise with this size, if anything. Virtual interfaces make no calls and fetch
    /// no pages: they are measured beside them with the messages that both are made of.
    pub(crate) fn part(self, exercise: Exercise, size: usize) -> Option<(Exercise, usize)> {
        let is_reference = matches!(self, Contestant::Vi | Contestant::ViUdp | Contestant::ViUdpSealed);
        match exercise {
            Exercise::Call if is_reference => Some((Exercise::PingPong, rpc::REFERENCE_BYTES)),
            Exercise::RandomPages if is_reference => Some((Exercise::PingPong, size)),
            Exercise::FetchMany | Exercise::Sequential if is_reference => Some((Exercise::Stream, size)),
            _ if exercise.is_of_calls() || exercise.is_of_pages() => (!is_reference).then_some((exercise, size)),
            _ => self.takes_part(exercise, size).then_some((exercise, size)),
        }
    }

    /// Whether it does this exercise with messages of this size.
    fn takes_part(self, exercise: Exercise, size: usize) -> bool {
        match self {
            Contestant::Tcp | Contestant::Copy => exercise == Exercise::File,
            _ if exercise == Exercise::File => self == Contestant::Sock,
            Contestant::TcpNagle => exercise == Exercise::Stream,
            _ if self.is_on_one_core() => exercise == Exercise::PingPong,
            _ if self.is_step() => exercise == Exercise::Stream,
            // All packets of a message must fit the receiver's buffer at once.
            Contestant::UdpSpin => exercise == Exercise::PingPong && size <= UDP_MESSAGE_BYTES_MAX,
            Contestant::UdpGso => exercise != Exercise::PingPong,
            Contestant::UdpSegmented
            | Contestant::TcpNoOffload
            | Contestant::ViUdpSegmented
            | Contestant::ViUdpImpaired0
            | Contestant::ViUdpImpaired1 => exercise == Exercise::Stream,
            Contestant::RdmaWrite => exercise != Exercise::PingPong,
            Contestant::RdmaRead | Contestant::SendAndMessage => exercise == Exercise::PingPong,
            Contestant::OneSender | Contestant::FourSenders | Contestant::FourSendersNoLists => {
                exercise == Exercise::Stream
            }
            Contestant::Interference | Contestant::InterferenceWithin => exercise == Exercise::Interfered,
            _ if self.has_destination() => matches!(exercise, Exercise::Stream | Exercise::StreamAsleep),
            Contestant::TcpBlock | Contestant::ViUdp | Contestant::ViUdpSealed => true,
            _ => exercise != Exercise::StreamAsleep,
        }
    }

    /// Whether its messages go over UDP, and stay with the sender until the receiver has said that it
    /// has them: both ends have work left when a burst is over.
    pub(crate) fn needs_tending(self) -> bool {
        matches!(
            self,
            Contestant::ViUdp
                | Contestant::ViUdpSealed
                | Contestant::ViUdpSegmented
                | Contestant::ViUdpImpaired0
                | Contestant::ViUdpImpaired1
                | Contestant::RdmaWrite
                | Contestant::RdmaRead
                | Contestant::SendAndMessage
                | Contestant::SockUdpSealed
                | Contestant::Udp
                | Contestant::UdpSealed
                | Contestant::PagedUdp
        ) || self.lands()
    }

    /// Whether it is of `bench landing`: its messages have [`landing::MESSAGE_BYTES`], and a size is something else.
    pub(crate) fn lands(self) -> bool {
        use Contestant::{FourSenders, FourSendersNoLists, Interference, InterferenceWithin, OneSender};
        let counts = matches!(self, OneSender | FourSenders | FourSendersNoLists | Interference | InterferenceWithin);
        counts || self.has_destination()
    }

    /// Whether a size is how much memory its receives go through in turn.
    pub(crate) fn has_destination(self) -> bool {
        matches!(self, Contestant::Copying | Contestant::Peek | Contestant::Landing | Contestant::AlwaysWrong)
    }

    /// Whether it is one of the steps from one message at a time to all that streams do.
    pub(crate) fn is_step(self) -> bool {
        use Contestant::{Combining, DelayedAcks, Window1, Window32};
        matches!(self, Window1 | Window32 | DelayedAcks | Combining)
    }

    /// Whether both its ends are on one CPU where others have two.
    pub(crate) fn is_on_one_core(self) -> bool {
        matches!(self, Contestant::RunBlockOneCore | Contestant::TcpBlockOneCore)
    }

    /// Whether its server is a program by itself, which the driver starts.
    pub(crate) fn is_served(self) -> bool {
        matches!(self, Contestant::Redis | Contestant::Memcached | Contestant::Tonic | Contestant::Tarpc)
    }

    /// Whether it reads a region page by page.
    pub(crate) fn reads_pages(self) -> bool {
        matches!(self, Contestant::Paged | Contestant::PagedUdp | Contestant::PagedMapped | Contestant::MappedFile)
    }

    /// Bytes of a message at this size.
    pub(crate) fn message_bytes(self, size: usize) -> usize {
        if self.lands() { landing::MESSAGE_BYTES } else { size }
    }

    /// Whether its latency is that of a whole exchange, and not of one way.
    pub(crate) fn is_exchange(self) -> bool {
        matches!(self, Contestant::RdmaRead | Contestant::SendAndMessage)
    }

    /// Whether it makes calls that block.
    pub(crate) fn blocks(self, exercise: Exercise) -> bool {
        use Contestant::{SockBlock, SockHandler, SockNotify, TcpBlock, TcpNagle, TcpNoOffload, UnixBlock};
        matches!(self, SockBlock | SockHandler | SockNotify | TcpBlock | TcpNagle | TcpNoOffload | UnixBlock)
            || matches!(self, Contestant::RunBlock | Contestant::RunOneEnd)
            || self.is_served()
            || self == Contestant::MappedFile
            || exercise == Exercise::File
    }

    /// What it may wait for its CPU in a trial of so many nanoseconds before something else must have
    /// run: whoever sleeps waits a little each time it is woken.
    pub(crate) fn lost_ns_max(self, exercise: Exercise, nanoseconds: f64) -> f64 {
        let part = match self {
            // Their own threads want the same CPU.
            Contestant::SockHandler | Contestant::SockNotify => 1.0,
            // Each waits for the other all the time.
            _ if self.is_on_one_core() => f64::INFINITY,
            _ if self.blocks(exercise) || exercise == Exercise::StreamAsleep => 0.3,
            _ => 0.02,
        };
        part * nanoseconds + 5_000.0
    }

    /// This process's end of it, for messages up to `size_max`. Both sides call this in the same
    /// order.
    pub(crate) fn meet(self, link: &mut Link, size_max: usize) -> Result<Box<dyn Transport>, BenchError> {
        match self {
            Contestant::RawRing => ring::RawRing::meet(link),
            Contestant::TcpSpin => sockets::tcp(self, link, true),
            Contestant::TcpBlock | Contestant::TcpNoOffload => sockets::tcp(self, link, false),
            Contestant::UnixSpin => sockets::unix(self, link, true),
            Contestant::UnixBlock => sockets::unix(self, link, false),
            Contestant::Vi
            | Contestant::ViBuffered
            | Contestant::ViReferenced
            | Contestant::Fixed1408
            | Contestant::StoreAndForward
            | Contestant::Adaptive => vi::meet(self, link, size_max),
            Contestant::UdpSpin => udp::UdpSpin::meet(link),
            Contestant::UdpGso | Contestant::UdpSegmented => udp::Blast::meet(self, link),
            Contestant::ViUdp
            | Contestant::ViUdpSealed
            | Contestant::ViUdpSegmented
            | Contestant::ViUdpImpaired0
            | Contestant::ViUdpImpaired1 => vi::meet_over_udp(self, link, size_max),
            Contestant::RdmaWrite | Contestant::RdmaRead | Contestant::SendAndMessage => {
                remote::Remote::meet(self, link, size_max)
            }
            Contestant::Copying
            | Contestant::Peek
            | Contestant::Landing
            | Contestant::AlwaysWrong
            | Contestant::OneSender
            | Contestant::FourSenders
            | Contestant::FourSendersNoLists
            | Contestant::Interference
            | Contestant::InterferenceWithin => landing::meet(self, link, size_max),
            Contestant::Sock
            | Contestant::SockBlock
            | Contestant::SockHandler
            | Contestant::SockNotify
            | Contestant::Window1
            | Contestant::Window32
            | Contestant::DelayedAcks
            | Contestant::Combining
            | Contestant::SockUdpSealed => streams::meet(self, link),
            Contestant::TcpNagle => sockets::Nagle::meet(link),
            Contestant::Tcp => files::Carrier::over_tcp(link),
            Contestant::Copy => Ok(files::Carrier::alone(link)),
            Contestant::Shm | Contestant::Udp | Contestant::UdpSealed => rpc::meet(self, link, size_max),
            Contestant::RunSpin
            | Contestant::RunBlock
            | Contestant::RunOneEnd
            | Contestant::RunBlockOneCore
            | Contestant::TcpBlockOneCore
            | Contestant::Plain
            | Contestant::Highwire
            | Contestant::Redis
            | Contestant::Memcached
            | Contestant::Tonic
            | Contestant::Tarpc
            | Contestant::Paged
            | Contestant::PagedUdp
            | Contestant::PagedMapped
            | Contestant::MappedFile => unreachable!("{self} is met in another way"),
        }
    }
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that no contestant has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no contestant {0:?}; there are {all}", all = Contestant::ALL.map(Contestant::name).join(", "))]
pub struct UnknownContestant(String);

impl FromStr for Contestant {
    type Err = UnknownContestant;

    fn from_str(name: &str) -> Result<Contestant, UnknownContestant> {
        Contestant::ALL
            .into_iter()
            .find(|contestant| contestant.name() == name)
            .ok_or_else(|| UnknownContestant(name.to_owned()))
    }
}

/// What is done in a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Exercise {
    /// One message there, one back.
    PingPong,
    /// Messages one way, then one short acknowledgement.
    Stream,
    /// The same, both ends asleep while there is nothing, to count the CPU time of it.
    StreamAsleep,
    /// Messages one way, and small ones among their packets: as many for 100,000 of them as the size says.
    Interfered,
    /// A file one way, from memory to memory.
    File,
    /// Remote procedure calls without arguments or results, one at a time.
    Call,
    /// Values of so many bytes, one at a time.
    Fetch,
    /// The same, several at a time.
    FetchMany,
    /// Calls without arguments or results, as many at a time as the size says.
    Calls,
    /// Pages of a region, in random order.
    RandomPages,
    /// Pieces of a region, one after the other.
    Sequential,
}

impl Exercise {
    /// What it is done for.
    pub(crate) fn figure(self) -> &'static str {
        match self {
            Exercise::PingPong => "latency",
            Exercise::Stream => "bandwidth",
            Exercise::StreamAsleep => "CPU time",
            Exercise::Interfered => "interference",
            Exercise::File => "transfer of a file",
            Exercise::Call => "calls",
            Exercise::Fetch => "fetches",
            Exercise::FetchMany => "fetches, several at a time,",
            Exercise::Calls => "calls, several at a time,",
            Exercise::RandomPages => "random pages",
            Exercise::Sequential => "sequential pieces",
        }
    }

    /// The figure whose sizes are those of it.
    pub(crate) fn measure(self) -> Measure {
        match self {
            Exercise::PingPong => Measure::LatencyNs,
            Exercise::Stream | Exercise::Interfered => Measure::BandwidthGbS,
            Exercise::StreamAsleep => Measure::SenderCpuSPerGb,
            Exercise::File => Measure::FileMbS,
            Exercise::Call => Measure::CallNs,
            Exercise::Fetch => Measure::FetchNs,
            Exercise::FetchMany => Measure::FetchGbS,
            Exercise::Calls => Measure::CallsPerS,
            Exercise::RandomPages => Measure::RandomPageNs,
            Exercise::Sequential => Measure::SequentialGbS,
        }
    }

    /// Whether it is one of remote procedure calls.
    pub(crate) fn is_of_calls(self) -> bool {
        matches!(self, Exercise::Call | Exercise::Fetch | Exercise::FetchMany | Exercise::Calls)
    }

    /// Whether it is one of reading a region.
    pub(crate) fn is_of_pages(self) -> bool {
        matches!(self, Exercise::RandomPages | Exercise::Sequential)
    }
}

/// What arrived of a stream of which some may be lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Delivery {
    /// Bytes sent.
    pub(crate) sent: u64,
    /// Bytes arrived.
    pub(crate) bytes: u64,
    /// From the first to the last of them, on the side where that took longer.
    pub(crate) nanoseconds: f64,
}

/// What a contestant says about a burst that takes its own time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Timing {
    pub(crate) nanoseconds: f64,
    /// How long it waited for its CPU meanwhile.
    pub(crate) waited_ns: u64,
}

/// One end of a contestant. What every message has in common: it is data that the receiver does not
/// have in its cache yet, and it is copied to where the receiver wants it; where a contestant does
/// otherwise, its documentation says so.
pub(crate) trait Transport {
    /// Sends `count` messages of `size` bytes, each after the answer to the one before.
    fn ping(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("it sends no messages")
    }

    /// Answers `count` messages with as many bytes.
    fn pong(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("it sends no messages")
    }

    /// Sends `count` messages of `size` bytes; returns when the other side has them all.
    fn pour(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("it sends no messages")
    }

    /// Receives what [`Transport::pour`] sends.
    fn drain(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("it sends no messages")
    }

    /// Sends a file of `size` bytes `count` times; returns when the other side has written it.
    fn send_file(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("it carries no files")
    }

    /// Receives what [`Transport::send_file`] sends.
    fn receive_file(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("it carries no files")
    }

    /// Looks at what arrived, outside of what is timed.
    fn check(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    /// Makes ready for `count` messages of `size` bytes that this side will send, outside of what is
    /// timed.
    fn prepare(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        Ok(())
    }

    /// Whether to sleep from now on while there is nothing, or to look without pause, for those who
    /// can do both.
    fn wait_asleep(&mut self, _asleep: bool) {}

    /// Does what is left to do for the other side after a burst; whether it has nothing left to do of
    /// its own.
    fn tend(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    /// What arrived of what the driver last poured, where that may be less.
    fn take_delivery(&mut self) -> Option<Delivery> {
        None
    }

    /// What has become so far of payloads that came over a wire, where that is counted.
    fn landings(&self) -> Landings {
        Landings::default()
    }

    /// Whether each burst begins with messages before the clock starts, so that nobody else sends any.
    fn warms_itself(&self) -> bool {
        false
    }

    /// What the last burst took, where the contestant takes the time itself.
    fn take_timing(&mut self) -> Option<Timing> {
        None
    }

    /// Messages that were sent among those of the last burst, to get in their way.
    fn interfering(&self) -> u64 {
        0
    }

    /// Starts recording pulses, up to `capacity` of them, where there are any.
    fn record_pulses(&mut self, _capacity: usize) {}

    /// The pulses recorded since: the driver's of what it sent, the peer's of what it received.
    fn take_pulses(&mut self, _role: Role) -> Vec<Pulse> {
        Vec::new()
    }

    /// Makes ready for an exercise.
    fn prepare_for(&mut self, role: Role, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        let sends = role == Role::Driver || exercise == Exercise::PingPong;
        if sends { self.prepare(size, count) } else { Ok(()) }
    }

    /// The driver's part of what goes before the clock starts.
    fn lead_warm(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        if self.warms_itself() { Ok(()) } else { self.lead(exercise, size, count) }
    }

    /// The peer's part of it.
    fn follow_warm(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        if self.warms_itself() { Ok(()) } else { self.follow(exercise, size, count) }
    }

    /// The driver's part of an exercise.
    fn lead(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        match exercise {
            Exercise::PingPong => self.ping(size, count),
            Exercise::Stream | Exercise::StreamAsleep | Exercise::Interfered => self.pour(size, count),
            Exercise::File => self.send_file(size, count),
            _ => unreachable!("it only sends messages and files"),
        }
    }

    /// The peer's part.
    fn follow(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        match exercise {
            Exercise::PingPong => self.pong(size, count),
            Exercise::Stream | Exercise::StreamAsleep | Exercise::Interfered => self.drain(size, count),
            Exercise::File => self.receive_file(size, count),
            _ => unreachable!("it only sends messages and files"),
        }
    }
}

/// Ordinary memory of the application's, from and to which messages are copied.
pub(crate) struct Ordinary {
    bytes: Vec<u8>,
    skip: usize,
}

impl Ordinary {
    pub(crate) fn new() -> Ordinary {
        Ordinary { bytes: Vec::new(), skip: 0 }
    }

    /// At least `size` bytes, beginning on a page as an application's buffers would: where a copy
    /// begins changes how fast it is.
    #[inline(always)]
    pub(crate) fn of(&mut self, size: usize) -> &mut [u8] {
        if self.bytes.len() < size + PAGE {
            self.bytes = vec![1; size + PAGE];
            self.skip = self.bytes.as_ptr().align_offset(PAGE).min(PAGE);
        }
        &mut self.bytes[self.skip..self.skip + size]
    }
}

const PAGE: usize = 4096;
/// Most bytes of a message of several UDP packets.
const UDP_MESSAGE_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_strangers_are_told_who_there_is() {
        for contestant in Contestant::ALL {
            assert_eq!(contestant.name().parse(), Ok(contestant));
            assert_eq!(serde_json::to_value(contestant).unwrap(), contestant.name());
        }
        let refused = "vy".parse::<Contestant>().unwrap_err().to_string();
        assert!(refused.contains("\"vy\"") && refused.contains("vi-referenced"), "{refused}");
    }
}
