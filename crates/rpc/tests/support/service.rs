//! A service that does what it is told, and remembers what it did.

use super::content;
use highwire_rpc::{Manner, Method, Reply, Request, Serve, Services};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

pub const SERVICE: u32 = 0x7e57;
pub const VERSION: u16 = 3;

const fn method(method: u16) -> Method {
    Method { service: SERVICE, version: VERSION, method }
}

/// The arguments come back as the result.
pub const ECHO: Method = method(1);
/// The same, on the pool.
pub const ECHO_ON_POOL: Method = method(2);
/// How many bytes of payload came, and their digest.
pub const DIGEST: Method = method(3);
/// `(seed, bytes)`: the content of that seed as payload. May be repeated.
pub const FETCH: Method = method(4);
/// Sleeps for so many milliseconds, on the pool.
pub const SLEEP: Method = method(5);
/// Counts a number, once for each time that it runs, and returns how often that was.
pub const COUNT: Method = method(6);
/// Waits on the pool until the gate is open, then returns the arguments.
pub const AWAIT_GATE: Method = method(7);
pub const PANIC: Method = method(8);
pub const PANIC_ON_POOL: Method = method(9);
/// A result of so many bytes.
pub const RESULT: Method = method(10);
/// Takes a number and a name, and returns the name so many times.
pub const TYPED: Method = method(11);
/// On the pool: the payload comes back turned over, with its digest as result.
pub const TURN_OVER: Method = method(12);
/// Counts, and answers with a payload. May not be repeated.
pub const FETCH_ONCE: Method = method(13);
/// Counts, and answers with a payload. May be repeated.
pub const FETCH_AGAIN: Method = method(14);
/// `(body, payload)`: a result of so many bytes beside a payload of so many.
pub const RESULT_BESIDE: Method = method(15);
/// Counts on the pool when the gate is open.
pub const COUNT_BEHIND_GATE: Method = method(16);
/// The payload is kept by the service until it is told to forget.
pub const KEEP: Method = method(17);
/// On the pool, behind the gate: answers with a payload.
pub const FETCH_BEHIND_GATE: Method = method(18);

/// What all clones share.
#[derive(Clone, Default)]
pub struct Service {
    pub gate: Arc<Gate>,
    counts: Arc<Mutex<HashMap<u64, u32>>>,
    kept: Arc<Mutex<Vec<highwire_vi::Buffer>>>,
    pub begun: Arc<AtomicUsize>,
}

/// Something to wait for.
#[derive(Default)]
pub struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub fn open(&self) {
        *self.is_open.lock().expect("a gate") = true;
        self.opened.notify_all();
    }

    pub fn close(&self) {
        *self.is_open.lock().expect("a gate") = false;
    }

    fn pass(&self) {
        drop(self.opened.wait_while(self.is_open.lock().expect("a gate"), |is_open| !*is_open).expect("a gate"));
    }
}

impl Service {
    pub fn services(&self) -> Services {
        Services::new().with(SERVICE, VERSION, self.clone())
    }

    /// How often `number` was counted.
    pub fn count_of(&self, number: u64) -> u32 {
        self.counts.lock().expect("counts").get(&number).copied().unwrap_or(0)
    }

    /// Calls that began to wait for the gate.
    pub fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    pub fn forget_kept(&self) {
        self.kept.lock().expect("what is kept").clear();
    }

    fn count(&self, number: u64) -> u32 {
        let mut counts = self.counts.lock().expect("counts");
        let count = counts.entry(number).or_insert(0);
        *count += 1;
        *count
    }

    fn pass_gate(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.gate.pass();
    }
}

impl Serve for Service {
    fn manner(&self, number: u16) -> Option<Manner> {
        let on_pool = [ECHO_ON_POOL, SLEEP, AWAIT_GATE, PANIC_ON_POOL, TURN_OVER, COUNT_BEHIND_GATE, FETCH_BEHIND_GATE];
        let may_repeat = [FETCH, FETCH_AGAIN];
        let is = |methods: &[Method]| methods.iter().any(|known| known.method == number);
        (1..=18).contains(&number).then(|| Manner { is_quick: !is(&on_pool), may_repeat: is(&may_repeat) })
    }

    fn serve(&self, mut request: Request<'_>, reply: &mut Reply) {
        let nic = request.nic().clone();
        let payload_of = |seed: u64, bytes: u32| super::buffer_of(&nic, &content(seed, bytes as usize));
        match method(request.method()) {
            ECHO | ECHO_ON_POOL => reply.body(request.arguments()),
            DIGEST => reply.encode(&digest(request.payload())),
            FETCH => match request.decode::<(u64, u32)>() {
                Some((seed, bytes)) => {
                    reply.payload(payload_of(seed, bytes));
                    reply.encode(&seed);
                }
                None => reply.bad_arguments(),
            },
            SLEEP => {
                let milliseconds: u64 = request.decode().expect("a time");
                std::thread::sleep(Duration::from_millis(milliseconds));
                reply.encode(&milliseconds);
            }
            COUNT => reply.encode(&self.count(request.decode().expect("a number"))),
            AWAIT_GATE => {
                self.pass_gate();
                reply.body(request.arguments());
            }
            PANIC | PANIC_ON_POOL => {
                reply.body(b"half an answer");
                panic!("as the test wants");
            }
            RESULT => {
                let bytes: u32 = request.decode().expect("a length");
                reply.body(&content(1, bytes as usize));
            }
            TYPED => match request.decode::<(u32, String)>() {
                Some((times, name)) => reply.encode(&name.repeat(times as usize)),
                None => reply.bad_arguments(),
            },
            TURN_OVER => {
                let mut bytes = request.payload().to_vec();
                reply.encode(&digest(&bytes));
                bytes.reverse();
                reply.payload(super::buffer_of(&nic, &bytes));
            }
            FETCH_ONCE | FETCH_AGAIN => {
                let (number, bytes): (u64, u32) = request.decode().expect("a number and a length");
                let count = self.count(number);
                reply.payload(payload_of(number, bytes));
                reply.encode(&count);
            }
            RESULT_BESIDE => {
                let (body, bytes): (u32, u32) = request.decode().expect("two lengths");
                reply.body(&content(2, body as usize));
                reply.payload(payload_of(3, bytes));
            }
            COUNT_BEHIND_GATE => {
                self.pass_gate();
                reply.encode(&self.count(request.decode().expect("a number")));
            }
            KEEP => {
                if let Some((buffer, _)) = request.take_payload() {
                    self.kept.lock().expect("what is kept").push(buffer);
                }
            }
            FETCH_BEHIND_GATE => {
                let (seed, bytes): (u64, u32) = request.decode().expect("a seed and a length");
                self.pass_gate();
                reply.payload(payload_of(seed, bytes));
            }
            _ => reply.unknown_method(),
        }
    }
}

/// Encoded arguments.
pub fn encoded<T: serde::Serialize>(value: &T) -> Vec<u8> {
    postcard::to_allocvec(value).expect("encoded arguments")
}

/// The decoded result.
pub fn decoded<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> T {
    postcard::from_bytes(bytes).expect("a result")
}

/// How many bytes, and what they are.
pub fn digest(bytes: &[u8]) -> (u64, u64) {
    // Eight at a time: some of them are many, and unoptimized tests take their time.
    let (words, rest) = bytes.as_chunks::<8>();
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let sum = words.iter().fold(0xcbf2_9ce4_8422_2325, |sum, word| mix(sum, u64::from_le_bytes(*word)));
    (bytes.len() as u64, rest.iter().fold(sum, |sum, byte| mix(sum, u64::from(*byte))))
}
