//! What the tests stand on: a stage with processes of its own, every transport, a service that does what it is told,
//! and peers that say whatever they like.

#[path = "../../../vi/tests/support/forked.rs"]
#[allow(dead_code, reason = "the tests of VIs need more of it")]
pub mod forked;
pub mod raw;
pub mod service;
#[path = "../../../vi/tests/support/stage.rs"]
#[allow(dead_code, reason = "other tests need more of it")]
mod stage;

pub use stage::*;

use highwire_adapter::{UdpWire, WireConfig};
use highwire_proto::{ClusterKey, Keys};
use highwire_rpc::{Client, ClientOptions, Rpc, Server, ServerOptions};
use highwire_vi::{Buffer, Nic, Payload, Segment};
use service::Service;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// How messages travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// By memory that both sides map.
    Shared,
    /// By packets that are sealed.
    Sealed,
    /// By packets that are only checksummed.
    Plain,
}

impl Transport {
    pub const ALL: [Transport; 3] = [Transport::Shared, Transport::Sealed, Transport::Plain];
    /// Those that differ in what becomes of calls.
    pub const BOTH: [Transport; 2] = [Transport::Shared, Transport::Sealed];

    /// As a process is told.
    pub fn named(name: &str) -> Transport {
        Transport::ALL.into_iter().find(|transport| name == format!("{transport:?}")).expect("a transport")
    }
}

/// One transport on the stage of a test.
pub struct World<'a> {
    pub transport: Transport,
    pub stage: &'a Stage,
}

/// Plays on one host and over packets, in turn.
pub fn everywhere(play: impl Fn(&World<'_>)) {
    on(&Transport::BOTH, play);
}

/// Plays over unsealed packets too, which take another way where payloads are.
pub fn everywhere_and_unsealed(play: impl Fn(&World<'_>)) {
    on(&Transport::ALL, play);
}

fn on(transports: &[Transport], play: impl Fn(&World<'_>)) {
    let stage = Stage::open();
    for transport in transports.iter().copied() {
        eprintln!("over {transport:?}");
        play(&World { transport, stage: &stage });
    }
}

impl World<'_> {
    /// A new interface.
    pub fn nic(&self) -> Nic {
        let keys = match self.transport {
            Transport::Shared => return Nic::with(self.stage.config()).expect("an interface"),
            Transport::Sealed => Keys::new(ClusterKey::from_random([9; 32])),
            Transport::Plain => Keys::insecure(),
        };
        let wire = WireConfig { keys, death: Duration::from_secs(3), ..WireConfig::default() };
        Nic::with_wire(self.stage.config(), Arc::new(UdpWire::new(wire))).expect("an interface")
    }

    pub fn rpc(&self) -> Rpc {
        Rpc::new(&self.nic()).expect("calls")
    }

    /// Where somebody can listen who was nowhere before.
    pub fn address(&self) -> String {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        match self.transport {
            Transport::Shared => format!("shm:calls-{}", NEXT.fetch_add(1, Ordering::Relaxed)),
            Transport::Sealed | Transport::Plain => "udp:127.0.0.1:0".to_owned(),
        }
    }

    /// A server with an interface of its own.
    pub fn serve(&self) -> Served {
        self.serve_with(ServerOptions::default())
    }

    pub fn serve_with(&self, options: ServerOptions) -> Served {
        let (rpc, service) = (self.rpc(), Service::default());
        let server = rpc.serve_with(&self.address(), service.services(), options).expect("a server");
        Served { address: server.address().to_owned(), server: Some(server), service, rpc }
    }

    /// A client with an interface of its own.
    pub fn client(&self, address: &str) -> Client {
        self.client_with(address, ClientOptions::default())
    }

    pub fn client_with(&self, address: &str, options: ClientOptions) -> Client {
        self.rpc().connect_with(address, options).expect("a client")
    }
}

/// A server and what its service has seen.
pub struct Served {
    pub address: String,
    pub server: Option<Server>,
    pub service: Service,
    pub rpc: Rpc,
}

impl Drop for Served {
    fn drop(&mut self) {
        // Handlers that wait for the gate would outlive the test.
        self.service.gate.open();
    }
}

/// A window of so many calls.
pub fn window(window: u32) -> ClientOptions {
    ClientOptions { window, ..ClientOptions::default() }
}

/// Bytes of which no two places, and no two seeds, look alike.
pub fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let word =
        |at: u64| (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    let mut content = Vec::with_capacity(bytes + 8);
    for at in 0..bytes.div_ceil(8) as u64 {
        content.extend_from_slice(&word(at).to_le_bytes());
    }
    content.truncate(bytes);
    content
}

/// A new buffer of its own.
pub fn buffer(nic: &Nic, bytes: usize) -> Buffer {
    nic.register(bytes.max(1)).expect("a region").slice(0..bytes).expect("the whole region")
}

/// A new buffer with these bytes.
pub fn buffer_of(nic: &Nic, bytes: &[u8]) -> Buffer {
    let mut buffer = buffer(nic, bytes.len());
    buffer.copy_from_slice(bytes);
    buffer
}

/// Where the buffers of a payload are: their regions, where in them, and how long.
pub fn places(payload: Payload) -> Vec<(u32, usize, usize)> {
    let place = |segment: &Segment| match segment {
        Segment::Buffer(buffer) => (buffer.region_id(), buffer.offset(), buffer.len()),
        Segment::Shared(buffer) => (buffer.buffer().region_id(), buffer.buffer().offset(), buffer.len()),
        Segment::Frozen(region, range) => (region.id(), range.start, range.len()),
    };
    payload.into_segments().iter().map(place).collect()
}

/// A flag that a waker raises. A task is polled again only after that, so that a wake-up that is lost is seen.
#[derive(Default)]
pub struct Woken {
    count: Mutex<usize>,
    raised: Condvar,
}

impl Wake for Woken {
    fn wake(self: Arc<Woken>) {
        *self.count.lock().expect("a count") += 1;
        self.raised.notify_all();
    }
}

impl Woken {
    pub fn count(&self) -> usize {
        *self.count.lock().expect("a count")
    }

    /// Waits until it was woken more often than `before`; how often that is.
    pub fn await_more_than(&self, before: usize) -> usize {
        let count = self.count.lock().expect("a count");
        let (count, waited) =
            self.raised.wait_timeout_while(count, PATIENCE, |count| *count <= before).expect("a count");
        assert!(!waited.timed_out(), "nobody woke the task within {PATIENCE:?}");
        *count
    }
}

/// Runs a future on this thread, asleep until it is woken.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut future = pin!(future);
    let mut seen = 0;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        seen = woken.await_more_than(seen);
    }
}

/// Runs `work` on a thread, and fails if it takes longer than patience lasts: one that hangs is not waited for.
pub fn within_patience<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, outcome) = std::sync::mpsc::channel();
    let worker = std::thread::spawn(move || {
        let _ = done.send(work());
    });
    match outcome.recv_timeout(PATIENCE) {
        Ok(outcome) => outcome,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what} hangs: not done after {PATIENCE:?}"),
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(worker.join().expect_err("a thread without outcome has panicked"))
        }
    }
}

/// Ends those who do something all the time, also when the test fails.
#[derive(Default)]
pub struct Over(AtomicBool);

impl Over {
    pub fn is_over(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// It is over when this is dropped.
    pub fn at_the_end(&self) -> impl Drop {
        struct Ending<'a>(&'a AtomicBool);
        impl Drop for Ending<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        Ending(&self.0)
    }
}

/// Descriptors that this process has open.
pub fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("the list of descriptors").count()
}

/// It has not taken longer than it may.
pub fn elapsed_within(since: Instant, most: Duration) {
    let took = since.elapsed();
    assert!(took < most, "it took {took:?}, not less than {most:?}");
}
