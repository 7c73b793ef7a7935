//! How requests and answers travel: as calls of one service.
//!
//! The arguments are the encoded request, the result is the encoded answer, and bytes of objects and pages are payloads.
//! An answer that is too long for a result is the first part of the payload: the result says how long that part is.

use crate::coordinator::{CoordinatorAnswer, CoordinatorRequest};
use crate::request::{Answer, PeerAnswer, PeerRequest, Request};
use highwire_rpc::{BODY_BYTES_BESIDE_MAX, BODY_BYTES_MAX, CallError, Client, Failed, Method, Reply};
use highwire_vi::{Buffer, Nic, Pool};
use rustix::fs::{Mode, OFlags};
use rustix::time::ClockId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The service of network memory.
pub(crate) const SERVICE: u32 = 0x6e6d_656d;
/// Its version.
///
/// * 1: the first.
/// * 2: nodes tell the coordinator how much room they have, and which buckets have none.
pub(crate) const VERSION: u16 = 2;

/// What is asked, and of whom.
pub(crate) trait Question: Serialize + DeserializeOwned {
    type Answer: Serialize + DeserializeOwned;
    /// Requests that change nothing may be asked again.
    fn method(&self) -> u16;
    /// Whether it does no harm to ask it again though it ran.
    fn may_repeat(&self) -> bool {
        true
    }
}

pub(crate) const CHANGE: u16 = 1;
pub(crate) const LOOK: u16 = 2;
pub(crate) const PEER: u16 = 3;
pub(crate) const COORDINATOR: u16 = 4;
pub(crate) const DONATION: u16 = 5;
/// As [`CHANGE`], [`LOOK`] and [`PEER`], with so many bytes that they would hold up the calls behind them.
pub(crate) const CHANGE_LARGE: u16 = 6;
pub(crate) const LOOK_LARGE: u16 = 7;
pub(crate) const PEER_LARGE: u16 = 8;

/// Bytes beside a request or an answer from which on it is a large one.
pub(crate) const LARGE_BYTES: usize = 4 << 20;

impl Question for Request {
    type Answer = Answer;
    fn method(&self) -> u16 {
        use crate::request::Ask;
        match self.ask {
            Ask::Get { .. }
            | Ask::List { .. }
            | Ask::Stat { .. }
            | Ask::Used { .. }
            | Ask::ReadPage { .. }
            | Ask::ReadPages { .. }
            | Ask::Figures
            | Ask::RenewOwner { .. }
            | Ask::EndOwner { .. } => LOOK,
            Ask::Put { .. }
            | Ask::Renew { .. }
            | Ask::Remove { .. }
            | Ask::TakePages { .. }
            | Ask::WritePage { .. }
            | Ask::WritePages { .. }
            | Ask::FreePages { .. } => CHANGE,
        }
    }

    fn may_repeat(&self) -> bool {
        !self.ask.changes_names()
    }
}

impl Question for PeerRequest {
    type Answer = PeerAnswer;
    fn method(&self) -> u16 {
        PEER
    }
}

impl Question for CoordinatorRequest {
    type Answer = CoordinatorAnswer;
    fn method(&self) -> u16 {
        COORDINATOR
    }
}

/// Asks where the donated memory can be mapped.
#[derive(Clone, Copy, Debug, Serialize, serde::Deserialize)]
pub(crate) struct WhereIsIt;

/// It can be by processes of the same user.
#[derive(Clone, Copy, Debug, Serialize, serde::Deserialize)]
pub(crate) struct HereItIs {
    /// The node's descriptor of it, for reading.
    pub descriptor: i32,
    pub bytes: u64,
}

impl Question for WhereIsIt {
    type Answer = HereItIs;
    fn method(&self) -> u16 {
        DONATION
    }
}

/// Buffers for payloads of any size.
#[derive(Debug)]
pub(crate) struct Frames {
    nic: Nic,
    /// By what their frames hold, the smallest first. Memory is taken for those in use only.
    pools: Vec<(usize, Pool)>,
}

/// Bytes of a frame, and how many there are: for a few pages, and for as many as are read at once.
const FRAMES: [(usize, usize); 2] = [(64 << 10, 64), (1 << 20, 16)];

impl Frames {
    pub(crate) fn new(nic: &Nic) -> Frames {
        let pools = FRAMES.iter().filter_map(|(bytes, count)| Some((*bytes, nic.pool(*bytes, *count).ok()?)));
        Frames { nic: nic.clone(), pools: pools.collect() }
    }

    /// A buffer of so many bytes; `None` if there is no memory for it.
    pub(crate) fn buffer(&self, bytes: usize) -> Option<Buffer> {
        let pool = self.pools.iter().find(|(most, _)| bytes <= *most);
        let pooled = pool.and_then(|(_, pool)| pool.frame().ok());
        let mut buffer = match pooled {
            Some(buffer) => buffer,
            None => self.nic.register(bytes.max(1)).and_then(|region| region.slice(0..bytes.max(1))).ok()?,
        };
        buffer.set_len(bytes);
        Some(buffer)
    }

    /// A buffer with these bytes in it.
    pub(crate) fn filled(&self, bytes: &[u8]) -> Option<Buffer> {
        let mut buffer = self.buffer(bytes.len())?;
        buffer.copy_from_slice(bytes);
        Some(buffer)
    }
}

/// Encodes an answer and what goes with it. `None` if there is no memory for it.
pub(crate) fn answer<A: Serialize>(frames: &Frames, reply: &mut Reply, answer: &A, body: &[u8]) -> Option<()> {
    let encoded = postcard::to_allocvec(answer).ok()?;
    let most = if body.is_empty() { BODY_BYTES_MAX } else { BODY_BYTES_BESIDE_MAX };
    if encoded.len() < most {
        let mut result = Vec::with_capacity(1 + encoded.len());
        result.push(0);
        result.extend_from_slice(&encoded);
        reply.body(&result);
        if !body.is_empty() {
            reply.payload(frames.filled(body)?);
        }
        return Some(());
    }
    let mut result = vec![1];
    result.extend_from_slice(&(encoded.len() as u32).to_le_bytes());
    reply.body(&result);
    reply.payload(frames.filled(&encoded)?);
    if !body.is_empty() {
        reply.payload(frames.filled(body)?);
    }
    Some(())
}

/// An answer and the bytes that came with it.
#[derive(Debug)]
pub(crate) struct Answered<A> {
    pub answer: A,
    /// Where they landed, and how many bytes at its beginning belong to the answer.
    pub buffer: Option<Buffer>,
    pub skip: usize,
}

impl<A> Answered<A> {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[self.skip..])
    }
}

/// Asks, with `payload` beside the question, and with room for so many bytes beside the answer: more is made if that
/// was too little. The payload is back in any case but where the network may still be reading it.
pub(crate) fn ask<Q: Question>(
    client: &Client,
    frames: &Frames,
    question: &Q,
    mut payload: Option<Buffer>,
    mut room: usize,
    timeout: Duration,
) -> (Result<Answered<Q::Answer>, CallError>, Option<Buffer>) {
    let arguments = match postcard::to_allocvec(question) {
        Ok(arguments) => arguments,
        Err(_) => return (Err(CallError::BadArguments), payload),
    };
    let deadline = highwire_mem::deadline(timeout);
    loop {
        let beside = payload.as_ref().map_or(0, |buffer| buffer.len()).max(room);
        let method = match question.method() {
            CHANGE if beside >= LARGE_BYTES => CHANGE_LARGE,
            LOOK if beside >= LARGE_BYTES => LOOK_LARGE,
            method => method,
        };
        let method = Method { service: SERVICE, version: VERSION, method };
        let landing = match room {
            0 => None,
            _ => match frames.buffer(room) {
                Some(buffer) => Some(buffer),
                None => return (Err(CallError::NoMemory { bytes: room }), payload),
            },
        };
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let mut call = client.call(method).arguments(&arguments).deadline(left);
        if let Some(buffer) = payload.take() {
            call = call.payload(buffer);
        }
        if let Some(buffer) = landing {
            call = call.into(buffer);
        }
        match call.wait() {
            Ok(answer) => {
                let sent = answer.sent.into_buffer();
                let mut landed = answer.payload.into_buffer();
                if let Some(buffer) = &mut landed {
                    buffer.set_len(answer.length);
                }
                return (decode(&answer.body, landed).ok_or(CallError::BadResult), sent);
            }
            Err(Failed { error: CallError::PayloadTooLarge { bytes, .. }, sent, .. })
                if question.may_repeat() && room < bytes as usize =>
            {
                payload = sent.into_buffer();
                room = bytes as usize;
            }
            Err(Failed { error, sent, .. }) => return (Err(error), sent.into_buffer()),
        }
    }
}

fn decode<A: DeserializeOwned>(body: &[u8], buffer: Option<Buffer>) -> Option<Answered<A>> {
    match body {
        [0, encoded @ ..] => Some(Answered { answer: postcard::from_bytes(encoded).ok()?, buffer, skip: 0 }),
        [1, length @ ..] => {
            let skip = u32::from_le_bytes(length.try_into().ok()?) as usize;
            let answer = postcard::from_bytes(buffer.as_ref()?.get(..skip)?).ok()?;
            Some(Answered { answer, buffer, skip })
        }
        _ => None,
    }
}

/// An answer that never has anything beside it.
pub(crate) fn decode_short<A: DeserializeOwned>(body: &[u8]) -> Option<A> {
    decode(body, None).map(|answered| answered.answer)
}

/// Nanoseconds of the boot clock, which all processes of a host have in common: without what a time namespace adds to it
/// or takes from it. A signal handler may ask.
pub(crate) fn boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Boottime);
    (now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64).wrapping_sub(added_ns() as u64)
}

/// What this process's time namespace adds to the boot clock of the host.
fn added_ns() -> i64 {
    /// No namespace adds so much.
    const UNKNOWN: i64 = i64::MIN;
    static ADDED: AtomicI64 = AtomicI64::new(UNKNOWN);
    let known = ADDED.load(Relaxed);
    if known != UNKNOWN {
        return known;
    }
    // No lock and no memory of the heap, for the sake of signal handlers; two that ask at once find the same.
    let mut text = [0; 256];
    let opened = rustix::fs::open("/proc/self/timens_offsets", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let length = opened.and_then(|file| rustix::io::read(file, &mut text)).unwrap_or(0);
    // Without that file there are no time namespaces, or none is known of.
    let added = std::str::from_utf8(&text[..length]).ok().and_then(added_of).unwrap_or(0);
    ADDED.store(added, Relaxed);
    added
}

/// From lines of a clock's name, seconds and nanoseconds.
fn added_of(offsets: &str) -> Option<i64> {
    let mut words = offsets.lines().find_map(|line| line.strip_prefix("boottime"))?.split_ascii_whitespace();
    let mut number = || words.next()?.parse::<i64>().ok();
    number()?.checked_mul(1_000_000_000)?.checked_add(number()?)
}

/// A number that nobody can guess.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    highwire_mem::fill_random(&mut bytes);
    u64::from_le_bytes(bytes)
}

/// Tells one host from another, and one boot of it from the next.
pub(crate) fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or(String::new(), |id| id.trim().to_owned())
}

/// Where a node is reached: its addresses, those of shared memory with the host that they are good on.
pub(crate) fn ways(addresses: &[String]) -> String {
    let host = host();
    let way = |address: &String| match address.starts_with("shm:") {
        true => format!("{address}@{host}"),
        false => address.clone(),
    };
    addresses.iter().map(way).collect::<Vec<_>>().join(" ")
}

/// The addresses of them that may be tried from here, the nearest first.
pub(crate) fn reachable(ways: &str) -> Vec<String> {
    let host = host();
    let (mut near, mut far) = (Vec::new(), Vec::new());
    for way in ways.split_whitespace() {
        match way.strip_prefix("shm:").and_then(|_| way.rsplit_once('@')) {
            Some((address, of)) if of == host => near.push(address.to_owned()),
            Some(_) => {}
            None if way.starts_with("shm:") => near.push(way.to_owned()),
            None => far.push(way.to_owned()),
        }
    }
    near.append(&mut far);
    near
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwire_rpc::{Manner, Outcome, Request, Rpc, Serve, Services};
    use highwire_vi::Config;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Answers every request with a payload, and counts them.
    #[derive(Debug, Default)]
    struct Counting(Arc<AtomicUsize>);

    impl Serve for Counting {
        fn manner(&self, _: u16) -> Option<Manner> {
            Some(Manner::default())
        }

        fn serve(&self, request: Request<'_>, reply: &mut Reply) {
            self.0.fetch_add(1, Ordering::SeqCst);
            reply.payload(Frames::new(request.nic()).filled(&[7; 9000]).unwrap());
        }
    }

    /// In the child of the test below.
    const ASKED: &str = "HIGHWIRE_TEST_BOOT_CLOCK";

    #[test]
    fn processes_of_every_time_namespace_have_one_boot_clock() {
        if std::env::var_os(ASKED).is_some() {
            return println!("it is {} here", boot_ns());
        }
        for added in ["100000", "-1"] {
            let mut asked = std::process::Command::new("unshare");
            asked.args(["--user", "--map-current-user", "--time", "--fork", "--boottime", added]);
            let name = "exchange::tests::processes_of_every_time_namespace_have_one_boot_clock";
            asked.arg(std::env::current_exe().unwrap()).args(["--exact", "--nocapture", name]).env(ASKED, "1");
            let before = boot_ns();
            let output = asked.output().unwrap();
            let after = boot_ns();
            let said = String::from_utf8(output.stdout).unwrap();
            let words = said.split_once("it is ").and_then(|(_, rest)| rest.split_once(" here"));
            let told: u64 = words.unwrap_or_else(|| panic!("{said} {:?}", output.stderr)).0.parse().unwrap();
            assert!((before..=after).contains(&told), "{told} is not from {before} to {after}, {added} s added");
        }
    }

    #[test]
    fn what_a_time_namespace_adds_is_read_from_its_line() {
        assert_eq!(
            added_of("monotonic           1         2\nboottime       100000         5\n"),
            Some(100_000_000_000_005)
        );
        assert_eq!(added_of("monotonic 0 0\nboottime -2 999999999\n"), Some(-1_000_000_001));
        assert_eq!(added_of("monotonic 0 0\n"), None);
        assert_eq!(added_of("boottime 9223372036854775807 0\n"), None);
    }

    #[test]
    fn a_request_without_room_here_is_not_sent_and_one_that_ran_is_not_made_twice() {
        let folder = tempfile::tempdir().unwrap();
        let nic = || Nic::with(Config { runtime_dir: Some(folder.path().to_owned()), ..Config::default() }).unwrap();
        let counting = Counting::default();
        let count = counting.0.clone();
        let ran = || count.load(Ordering::SeqCst);
        let services = Services::new().with(SERVICE, VERSION, counting);
        let server = Rpc::new(&nic()).unwrap().serve("shm:counting", services).unwrap();
        let nic = nic();
        let (frames, client) = (Frames::new(&nic), Rpc::new(&nic).unwrap().connect(server.address()).unwrap());
        let name = crate::types::Name::new("name").unwrap();
        let put = crate::request::Ask::Put { name: name.clone(), lease_ns: 1, pinned: false, only_if: None };
        let request = |ask| NodeRequest { epoch: crate::types::Epoch(1), to: 1, ask };
        let ask = |question: &NodeRequest, room| {
            let payload = frames.filled(b"payload");
            ask(&client, &frames, question, payload, room, Duration::from_secs(10))
        };
        // More than any address space has.
        let (refused, payload) = ask(&request(put.clone()), usize::MAX >> 2);
        let refused = refused.unwrap_err();
        assert!(matches!(refused, CallError::NoMemory { .. }), "{refused}");
        assert_eq!((refused.outcome(), ran()), (Outcome::DidNotRun, 0));
        assert_eq!(payload.as_ref().map(|buffer| &buffer[..]), Some(&b"payload"[..]), "it can be sent elsewhere");
        // An answer that finds no room says that the request ran.
        let (failed, _) = ask(&request(put), 10);
        assert_eq!((failed.unwrap_err().outcome(), ran()), (Outcome::Ran, 1));
        // What changes nothing is asked again, with room.
        let (_, _) = ask(&request(crate::request::Ask::Stat { name }), 10);
        assert_eq!(ran(), 3);
    }

    type NodeRequest = crate::request::Request;
}
