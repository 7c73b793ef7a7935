//! How requests and answers travel: as calls of one service.
//!
//! The arguments are the encoded request, the result is the encoded answer, and bytes of objects and pages are payloads.
//! An answer that is too long for a result is the first part of the payload: the result says how long that part is.

use crate::coordinator::{CoordinatorAnswer, CoordinatorRequest};
use crate::request::{Answer, PeerAnswer, PeerRequest, Request};
use highwire_rpc::{BODY_BYTES_BESIDE_MAX, BODY_BYTES_MAX, CallError, Client, Failed, Method, Reply};
use highwire_vi::{Buffer, Nic, Pool};
use rustix::time::ClockId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// The service of network memory.
pub(crate) const SERVICE: u32 = 0x6e6d_656d;
/// Its version.
///
/// * 1: the first.
pub(crate) const VERSION: u16 = 1;

/// What is asked, and of whom.
pub(crate) trait Question: Serialize + DeserializeOwned {
    type Answer: Serialize + DeserializeOwned;
    /// Requests that change nothing may be asked again.
    fn method(&self) -> u16;
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
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let mut call = client.call(method).arguments(&arguments).deadline(left);
        if let Some(buffer) = payload.take() {
            call = call.payload(buffer);
        }
        if room > 0 {
            let Some(buffer) = frames.buffer(room) else { return (Err(CallError::ServerBusy), None) };
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
            Err(Failed { error: CallError::PayloadTooLarge { bytes, .. }, sent, .. }) if room < bytes as usize => {
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

/// Nanoseconds of the boot clock, which all processes of a host have in common. A signal handler may ask.
pub(crate) fn boot_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A number that nobody can guess.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    // It fails only before the machine has collected any randomness; then the clock has to do.
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) != Ok(bytes.len()) {
        return boot_ns();
    }
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
