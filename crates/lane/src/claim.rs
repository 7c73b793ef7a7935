//! How a process asks the registry for the other end of a connection: the messages, and the asking.
//!
//! A claim is proven by the TCP descriptor itself, which goes with it. Asking takes one connection to the registry, made
//! for the question and closed with the answer: no descriptor stays in the program.

use crate::counters::{digits, directory};
use crate::layout::{LANES, REGION_BYTES, Side};
use highwire_mem::{Credentials, PeerRegion, RegionError, SharedMemory, mapped_user, network_namespace};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A lane for an end of a connection.
#[derive(Debug)]
pub struct Pairing {
    /// Number of the region on this host.
    pub region: u64,
    /// The region; to be mapped where it is not known yet.
    pub memory: OwnedFd,
    /// Lane in the region.
    pub lane: usize,
    /// End of the lane.
    pub side: Side,
}

/// Answer to a claim.
#[derive(Debug)]
pub enum Answer {
    /// Both ends have come.
    Paired(Pairing),
    /// The other end has not come yet. It is worth asking again when the word at `place` of the registry's board has
    /// changed.
    Waiting {
        /// The board, which all who wait share.
        board: Option<OwnedFd>,
        /// Word on it.
        place: u16,
        /// What the word was.
        value: u64,
    },
    /// There will be no lane for this connection now.
    Refused(Refusal),
}

/// Why there is no lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Refusal {
    /// The descriptor is not a TCP connection that is open both ways.
    NotConnected = 1,
    /// All lanes are in use.
    Exhausted = 2,
    /// The claim came from another PID namespace, or from a user that the registry's user namespace does not map.
    OtherNamespace = 3,
    /// The claim could not be read.
    Malformed = 4,
}

impl Refusal {
    fn from_number(number: u32) -> Option<Refusal> {
        match number {
            1 => Some(Refusal::NotConnected),
            2 => Some(Refusal::Exhausted),
            3 => Some(Refusal::OtherNamespace),
            4 => Some(Refusal::Malformed),
            _ => None,
        }
    }
}

/// How long to wait for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// A lane is better than none: a program's call waits for it.
    Little,
    /// There may be a lane already, in which somebody left bytes: without an answer they are missed.
    Much,
}

impl Patience {
    /// How long that is.
    pub fn time(self) -> Duration {
        match self {
            Patience::Little => Duration::from_millis(5),
            Patience::Much => Duration::from_secs(1),
        }
    }
}

/// Asks the registry of root, or else of this user, for a lane for `socket`. Takes well under a millisecond.
pub fn claim(socket: BorrowedFd<'_>, patience: Patience) -> Result<Answer, Errno> {
    let until = Instant::now() + patience.time();
    let user = rustix::process::geteuid().as_raw();
    loop {
        let answer = connect(user).and_then(|registry| claim_from(&registry, socket, until));
        match answer {
            // More programs ask at once than may wait in its queue, or it has no memory or descriptors left for this one.
            Err(error) if patience == Patience::Much && may_pass(error) && Instant::now() < until => {
                // Not libc's, in which a thread can be cancelled.
                let _ = rustix::thread::nanosleep(&BUSY_PAUSE);
            }
            answer => return answer,
        }
    }
}

/// Whether a registry may answer after all that failed so: none is there, or another user has its name, for longer.
fn may_pass(error: Errno) -> bool {
    error != Errno::CONNREFUSED && error != Errno::PERM
}

/// Asks a registry that is connected to.
pub(crate) fn claim_from(registry: &OwnedFd, socket: BorrowedFd<'_>, until: Instant) -> Result<Answer, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let proof = [socket];
    ancillary.push(SendAncillaryMessage::ScmRights(&proof));
    let request = Request { process: rustix::process::getpid().as_raw_nonzero().get().cast_unsigned() }.encode();
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(registry, &[IoSlice::new(&request)], &mut ancillary, flags)?;
    wait_for_answer(registry.as_fd(), until)?;
    let mut reply = [0; MESSAGE_BYTES];
    let (bytes, memory) = receive(registry.as_fd(), &mut reply)?;
    decode_answer(&reply[..bytes], memory).ok_or(Errno::BADMSG)
}

/// Whether the number of this process's user names that user only. Where its user namespace does not map it, others have the
/// same number, and what belongs to it may be theirs.
pub fn own_user_is_mapped() -> bool {
    mapped_user(rustix::process::geteuid().as_raw()).is_some()
}

/// Asks the registry of a user whether it is there.
pub fn registry_answers(user: u32) -> bool {
    connect_to(user).is_ok()
}

fn connect(user: u32) -> Result<OwnedFd, Errno> {
    match connect_to(0) {
        Err(_) if user != 0 => connect_to(user),
        answer => answer,
    }
}

fn connect_to(user: u32) -> Result<OwnedFd, Errno> {
    let named = connect_by_name(user);
    if named.is_ok() {
        return named;
    }
    // Another user may have the name.
    let namespace = network_namespace(socket()?.as_fd())?;
    let mut path = [0; 96];
    let refuge = |folder: &Folder| {
        let address = SocketAddrUnix::new(refuge(*folder, user, namespace, &mut path)).ok()?;
        trusted(connect_at(&address).ok()?, user).ok()
    };
    Folder::of(user).iter().find_map(refuge).map_or(named, Ok)
}

/// The registry at the name of a user's, if it is that user's.
pub(crate) fn connect_by_name(user: u32) -> Result<OwnedFd, Errno> {
    trusted(connect_at(&address(user)?)?, user)
}

/// A connection to a process, if that is this user's.
pub(crate) fn trusted(socket: OwnedFd, user: u32) -> Result<OwnedFd, Errno> {
    // Any process that has the name could take descriptors that are passed to it. Of a user that this namespace does not
    // map, nothing is known but that it may be another.
    if Credentials::of_peer(&socket)?.uid != Some(user) {
        return Err(Errno::PERM);
    }
    Ok(socket)
}

/// A socket to ask or to answer by.
pub(crate) fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

pub(crate) fn connect_at(name: &SocketAddrUnix) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    rustix::net::connect(&socket, name)?;
    Ok(socket)
}

/// Folders in which only one user can have a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folder {
    /// `/run/highwire`, root's.
    Run,
    /// `/run/user/USER`, which the system makes for a user that is logged in.
    OfUser,
    /// That of the counters.
    Counters,
}

impl Folder {
    /// Those of a user, in the order in which they are asked.
    pub(crate) fn of(user: u32) -> &'static [Folder] {
        if user == 0 { &[Folder::Run, Folder::Counters] } else { &[Folder::OfUser, Folder::Counters] }
    }

    /// The mode that it is made with, if it is for a registry to make.
    pub(crate) fn made_with(self) -> Option<u32> {
        match self {
            // All users ask root's registry.
            Folder::Run => Some(0o755),
            Folder::OfUser => None,
            Folder::Counters => Some(0o700),
        }
    }
}

/// Path of a registry in a folder. Names in folders are of all network namespaces, so that the path says which one.
pub(crate) fn refuge(folder: Folder, user: u32, namespace: u64, into: &mut [u8; 96]) -> &std::ffi::CStr {
    let mut used = 0;
    let mut put = |bytes: &[u8]| {
        into[used..used + bytes.len()].copy_from_slice(bytes);
        used += bytes.len();
    };
    match folder {
        Folder::Run => put(b"/run/highwire"),
        Folder::OfUser => {
            put(b"/run/user/");
            put(digits(user, &mut [0; 10]));
        }
        Folder::Counters => put(directory(user, None, &mut [0; 64]).to_bytes()),
    }
    put(b"/highwire-lanes-2-");
    put(digits((namespace >> 32) as u32, &mut [0; 10]));
    put(b"-");
    put(digits(namespace as u32, &mut [0; 10]));
    put(b"\0");
    std::ffi::CStr::from_bytes_until_nul(into).unwrap_or_default()
}

/// Name of a user's registry; names of this kind are of one network namespace.
pub(crate) fn address(user: u32) -> Result<SocketAddrUnix, Errno> {
    const PREFIX: &[u8] = b"highwire-lanes-2-";
    let mut name = [0u8; PREFIX.len() + 10];
    name[..PREFIX.len()].copy_from_slice(PREFIX);
    let mut rest = user;
    for digit in name[PREFIX.len()..].iter_mut().rev() {
        (*digit, rest) = (b'0' + (rest % 10) as u8, rest / 10);
    }
    SocketAddrUnix::new_abstract_name(&name)
}

fn wait_for_answer(registry: BorrowedFd<'_>, until: Instant) -> Result<(), Errno> {
    let mut wanted = [rustix::event::PollFd::from_borrowed_fd(registry, rustix::event::PollFlags::IN)];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let limit =
            rustix::event::Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut wanted, Some(&limit)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => return Ok(()),
            // The program's signals are no answer.
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// For how long a registry that did not answer is not asked. Times are milliseconds, of any clock that does not go back.
#[derive(Debug, Default)]
pub struct Silence {
    /// When it ends; zero for none.
    until: AtomicU64,
    length: AtomicU64,
}

impl Silence {
    /// Nobody has failed to answer.
    pub const fn new() -> Silence {
        Silence { until: AtomicU64::new(0), length: AtomicU64::new(0) }
    }

    /// Whether a registry is better not asked now.
    pub fn holds(&self, now: u64) -> bool {
        now < self.until.load(Ordering::Relaxed)
    }

    /// There was an answer.
    pub fn broken(&self) {
        self.until.store(0, Ordering::Relaxed);
        self.length.store(0, Ordering::Relaxed);
    }

    /// There was none. Asking one that hangs takes time, more and more rarely; that there is none is found out at once, and
    /// the next may be there any moment.
    pub fn begin(&self, why: Errno, now: u64) {
        let hangs = why == Errno::TIMEDOUT || why == Errno::AGAIN;
        let longer = if hangs { self.length.load(Ordering::Relaxed) * 2 } else { 0 };
        let length = longer.clamp(SILENCE_LEAST_MS, SILENCE_MOST_MS);
        self.length.store(length, Ordering::Relaxed);
        self.until.store(now + length, Ordering::Relaxed);
    }
}

/// Between attempts to reach a registry that is busy.
const BUSY_PAUSE: rustix::thread::Timespec = rustix::thread::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
const SILENCE_LEAST_MS: u64 = 200;
const SILENCE_MOST_MS: u64 = 60_000;

/// Receives one message and at most one descriptor.
pub(crate) fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut ancillary, flags)?;
    let mut descriptor = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptor = descriptors.last().or(descriptor);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::BADMSG);
    }
    Ok((received.bytes, descriptor))
}

/// Bytes of each message.
pub const MESSAGE_BYTES: usize = 32;
const MAGIC: u32 = u32::from_le_bytes(*b"HWCL");
const VERSION: u32 = 1;

/// What comes with the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The process, as it knows itself.
    pub process: u32,
}

impl Request {
    /// As it is sent.
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        encode(1, self.process, 0, 0)
    }

    /// One that was received; `None` for what [`encode`](Request::encode) does not write.
    pub fn decode(bytes: &[u8]) -> Option<Request> {
        match fields(bytes)? {
            (1, process, 0, 0) => Some(Request { process }),
            _ => None,
        }
    }
}

/// What the registry says; a descriptor may come with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The other end has not come yet.
    Waiting {
        /// Word of the board.
        place: u16,
        /// What it was.
        value: u64,
    },
    /// Both ends have come.
    Paired {
        /// Number of the region.
        region: u64,
        /// Lane in it.
        lane: usize,
        /// End of the lane.
        side: Side,
    },
    /// There is no lane.
    Refused(Refusal),
}

impl Reply {
    /// As it is sent.
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        match *self {
            Reply::Waiting { place, value } => encode(2, place.into(), 0, value),
            Reply::Paired { region, lane, side } => encode(3, lane as u32, side.number() as u32, region),
            Reply::Refused(why) => encode(4, why as u32, 0, 0),
        }
    }

    /// One that was received; `None` for what no registry says, also of places and lanes that there are not.
    pub fn decode(bytes: &[u8]) -> Option<Reply> {
        match fields(bytes)? {
            (2, place, 0, value) if (place as usize) < BOARD_WORDS => {
                Some(Reply::Waiting { place: place as u16, value })
            }
            (3, lane, side, region) if (lane as usize) < LANES => {
                Some(Reply::Paired { region, lane: lane as usize, side: Side::from_number(side)? })
            }
            (4, why, 0, 0) => Refusal::from_number(why).map(Reply::Refused),
            _ => None,
        }
    }
}

fn decode_answer(bytes: &[u8], memory: Option<OwnedFd>) -> Option<Answer> {
    Some(match Reply::decode(bytes)? {
        Reply::Waiting { place, value } => Answer::Waiting { board: memory, place, value },
        Reply::Paired { region, lane, side } => Answer::Paired(Pairing { region, memory: memory?, lane, side }),
        Reply::Refused(why) => Answer::Refused(why),
    })
}

fn encode(kind: u32, first: u32, second: u32, wide: u64) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    let words = [MAGIC, VERSION, kind, first, second, wide as u32, (wide >> 32) as u32];
    for (word, place) in words.iter().zip(bytes.chunks_exact_mut(4)) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Kind, first, second and wide word of a message.
fn fields(bytes: &[u8]) -> Option<(u32, u32, u32, u64)> {
    let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
    let mut words = [0; MESSAGE_BYTES / 4];
    for (word, place) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*place);
    }
    let [MAGIC, VERSION, kind, first, second, low, high, 0] = words else { return None };
    Some((kind, first, second, u64::from(low) | u64::from(high) << 32))
}

/// Bytes of a board, and its words after the header.
pub(crate) const BOARD_BYTES: usize = 8192;
pub(crate) const BOARD_AT: usize = 4096;
pub(crate) const BOARD_WORDS: usize = (BOARD_BYTES - BOARD_AT) / 8;

/// Maps the registry's board, which it alone can write.
pub fn map_board(memory: BorrowedFd<'_>) -> Result<PeerRegion, RegionError> {
    let memory = memory.try_clone_to_owned().map_err(RegionError::Map)?;
    PeerRegion::adopt(memory, BOARD_BYTES as u64, BOARD_BYTES as u64)
}

/// The word at a place of the board; zero where there is none.
pub fn board_word(board: &PeerRegion, place: usize) -> u64 {
    if place < BOARD_WORDS { board.memory().load64(BOARD_AT + 8 * place) } else { 0 }
}

/// Maps a region that was handed over.
pub fn map(memory: BorrowedFd<'_>) -> Result<SharedMemory, RegionError> {
    SharedMemory::adopt(memory, REGION_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn some_descriptor() -> Option<OwnedFd> {
        std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
    }

    #[test]
    fn refuges_are_of_user_and_network() {
        let path = |folder, user| refuge(folder, user, 5 << 32 | 7, &mut [0; 96]).to_str().unwrap().to_owned();
        assert_eq!(path(Folder::Run, 0), "/run/highwire/highwire-lanes-2-5-7");
        assert_eq!(path(Folder::OfUser, 1000), "/run/user/1000/highwire-lanes-2-5-7");
        assert_eq!(path(Folder::Counters, u32::MAX), "/dev/shm/highwire-4294967295/highwire-lanes-2-5-7");
        let longest = refuge(Folder::Counters, u32::MAX, u64::MAX, &mut [0; 96]).to_bytes().len();
        assert!(longest < 96, "{longest} bytes and a zero");
    }

    #[test]
    fn names_of_registries_are_of_one_length() {
        assert_eq!(address(0).unwrap().abstract_name(), Some(b"highwire-lanes-2-0000000000".as_slice()));
        assert_eq!(address(u32::MAX).unwrap().abstract_name(), Some(b"highwire-lanes-2-4294967295".as_slice()));
    }

    #[test]
    fn answers_come_as_they_were_given() {
        let waiting = Reply::Waiting { place: 511, value: u64::MAX - 1 }.encode();
        assert!(matches!(
            decode_answer(&waiting, None),
            Some(Answer::Waiting { board: None, place: 511, value }) if value == u64::MAX - 1
        ));
        let paired = Reply::Paired { region: 1 << 40, lane: 31, side: Side::Second }.encode();
        let Some(Answer::Paired(pairing)) = decode_answer(&paired, some_descriptor()) else {
            panic!("it is a pairing")
        };
        assert_eq!((pairing.region, pairing.lane, pairing.side), (1 << 40, 31, Side::Second));
        assert!(decode_answer(&paired, None).is_none(), "a lane without its memory");
        for why in [Refusal::NotConnected, Refusal::Exhausted, Refusal::OtherNamespace, Refusal::Malformed] {
            let answer = decode_answer(&Reply::Refused(why).encode(), None);
            assert!(matches!(answer, Some(Answer::Refused(found)) if found == why));
        }
    }

    #[test]
    fn a_registry_that_hangs_costs_a_moment() {
        let name =
            SocketAddrUnix::new_abstract_name(format!("highwire-hangs-{}", std::process::id()).as_bytes()).unwrap();
        let hanging = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::bind(&hanging, &name).unwrap();
        rustix::net::listen(&hanging, 1).unwrap();
        // The machine may be busy with something else now and then.
        let least = (0..10)
            .map(|_| {
                let (registry, began) = (connect_at(&name).unwrap(), std::time::Instant::now());
                assert!(matches!(
                    claim_from(&registry, hanging.as_fd(), Instant::now() + Patience::Little.time()),
                    Err(Errno::TIMEDOUT)
                ));
                drop((registry, rustix::net::accept(&hanging).unwrap()));
                began.elapsed()
            })
            .min();
        assert!(least < Some(std::time::Duration::from_millis(20)), "the program waited {least:?}");
    }

    #[test]
    fn who_hangs_is_asked_more_and_more_rarely() {
        let silence = Silence::new();
        let mut now = 1_000_000;
        assert!(!silence.holds(now));
        let mut lengths = Vec::new();
        for _ in 0..11 {
            silence.begin(Errno::TIMEDOUT, now);
            let length = (1..).find(|length| !silence.holds(now + length)).unwrap();
            lengths.push(length);
            now += length;
        }
        assert_eq!(lengths, [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000]);
        // Where there is none another one may be any moment, and be asked.
        silence.begin(Errno::CONNREFUSED, now);
        assert!(silence.holds(now + 199) && !silence.holds(now + 200));
        silence.begin(Errno::AGAIN, now);
        assert!(silence.holds(now + 399) && !silence.holds(now + 400));
        silence.broken();
        assert!(!silence.holds(now));
        silence.begin(Errno::TIMEDOUT, now);
        assert!(!silence.holds(now + 200), "an answer was forgotten");
    }

    #[test]
    fn words_of_the_request_are_where_the_document_says() {
        let message = Request { process: 0x0403_0201 }.encode();
        assert_eq!(message[..16], *b"HWCL\x01\0\0\0\x01\0\0\0\x01\x02\x03\x04");
        assert_eq!(message[16..], [0; 16]);
    }

    #[test]
    fn what_nobody_says_is_not_understood() {
        let nonsense = [
            (1, 7, 1, 0, "a request with more to say"),
            (1, 7, 0, 1, "a request with still more"),
            (2, BOARD_WORDS as u32, 0, 0, "a place beyond the board"),
            (2, 0, 1, 0, "a word that is not used"),
            (3, LANES as u32, 0, 0, "a lane beyond the last"),
            (3, 0, 2, 0, "a third end"),
            (4, 0, 0, 0, "no reason"),
            (4, 5, 0, 0, "an unknown reason"),
            (4, 1, 0, 1, "a reason with more to say"),
            (5, 0, 0, 0, "an unknown kind"),
        ];
        for (kind, first, second, wide, what) in nonsense {
            let message = encode(kind, first, second, wide);
            assert!(Request::decode(&message).is_none() && Reply::decode(&message).is_none(), "{what}");
        }
        let mut message = Reply::Waiting { place: 0, value: 0 }.encode();
        message[MESSAGE_BYTES - 1] = 1;
        assert!(Reply::decode(&message).is_none(), "a last word that is not used");
    }

    proptest! {
        #[test]
        fn whatever_a_registry_says_is_an_answer_or_none(
            kind in 0u32..6, first in 0u32..600, second in 0u32..3, wide in any::<u64>(), cut in 0usize..40,
        ) {
            let message = [encode(kind, first, second, wide).as_slice(), &[0; 8]].concat();
            let answer = decode_answer(&message[..cut], some_descriptor());
            prop_assert!(cut == MESSAGE_BYTES || answer.is_none());
            if let Some(Answer::Paired(pairing)) = answer {
                prop_assert_eq!(pairing.lane, first as usize);
                prop_assert!(first < LANES as u32 && second < 2);
            }
            if let Some(reply) = Reply::decode(&message[..cut]) {
                prop_assert_eq!(reply.encode().to_vec(), &message[..cut]);
            }
        }
    }
}
