//! What connections between hosts cost in memory, both ends counted. A process of its own for each test.

use highwire::{Config, Driver, Message, Nic, Operation, Receive, Vi, WireConfig};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

/// Memory that this process has taken and touched, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

fn nic() -> Nic {
    let wire = WireConfig { driver: Driver::Caller, ..WireConfig::default() };
    Nic::with_wire(Config::default(), wire).unwrap()
}

fn meet(caller: &Nic, listener: &highwire::ViListener) -> (Vi, Vi) {
    std::thread::scope(|scope| {
        let here = scope.spawn(|| caller.connect(listener.address()).unwrap());
        let there = listener.accept(PATIENCE).unwrap();
        (here.join().unwrap(), there)
    })
}

#[test]
fn an_idle_vi_takes_less_than_8_kib() {
    const VIS: usize = 500;
    let (caller, listening) = (nic(), nic());
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let mut vis = vec![meet(&caller, &listener)];
    let before = resident();
    vis.extend((0..VIS).map(|_| meet(&caller, &listener)));
    let each = resident().saturating_sub(before) / VIS / 2;
    assert!(each < 8 << 10, "{each} bytes for each end of a VI");
}

#[test]
fn a_connection_takes_less_than_4_mib_however_much_it_carries() {
    const BYTES: usize = 1 << 20;
    let (caller, listening) = (nic(), nic());
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let (mut here, mut there) = meet(&caller, &listener);
    // What the application gives is its own.
    let memory = caller.register(4 * BYTES).unwrap();
    let mut slices: Vec<_> = (0..4).map(|at| memory.slice(at * BYTES..(at + 1) * BYTES).unwrap()).collect();
    slices.iter_mut().for_each(|slice| slice.fill(1));
    let before = resident();
    for slice in slices.drain(2..) {
        there.post_recv(Receive::new(0).into(slice)).unwrap();
    }
    for slice in slices {
        here.post_send(Message::new(0).payload(slice)).unwrap();
    }
    let (mut arrived, mut most) = (0, 0);
    while arrived < 100 {
        if let Some(done) = here.poll() {
            here.post_send(Message::new(0).payload(done.into_buffer().unwrap())).unwrap();
        }
        if let Some(done) = there.poll() {
            assert_eq!((done.operation, done.length), (Operation::Receive, BYTES));
            there.post_recv(Receive::new(0).into(done.into_buffer().unwrap())).unwrap();
            arrived += 1;
            most = most.max(resident().saturating_sub(before));
        }
    }
    assert!(most < 4 << 20, "{most} bytes for both ends");
}

/// The place of a message that is read in place is as long as the message, not as the longest that may come.
#[test]
fn a_message_in_place_takes_its_own_bytes() {
    let (caller, listening) = (nic(), nic());
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let (mut here, mut there) = meet(&caller, &listener);
    let memory = caller.register(300).unwrap();
    let mut payload = memory.slice(0..300).unwrap();
    payload.fill(7);
    let mut payload = Some(payload);
    for turn in 0..100 {
        if turn == 1 {
            LARGEST.store(0, Ordering::SeqCst);
        }
        there.post_recv(Receive::new(0).in_place()).unwrap();
        here.post_send(Message::new(0).payload(payload.take().unwrap())).unwrap();
        let mut arrived = false;
        while !arrived || payload.is_none() {
            payload = here.poll().and_then(|done| done.into_buffer()).or(payload);
            if let Some(done) = there.poll() {
                assert_eq!(done.into_in_place().unwrap().as_slice(), Some(&[7; 300][..]));
                arrived = true;
            }
        }
    }
    let largest = LARGEST.load(Ordering::SeqCst);
    assert!(largest <= 128 << 10, "{largest} bytes at once");
}

/// Waits until no more is allocated than before these connections, but for what tables of their numbers take.
fn until_given_back(before: usize, connections: usize) {
    let (most, until) = (before + connections * 32, Instant::now() + PATIENCE);
    loop {
        let now = ALLOCATED.load(Ordering::SeqCst);
        if now <= most {
            break;
        }
        assert!(Instant::now() < until, "{} bytes for each connection", now.saturating_sub(before) / connections);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A session stays for a second after its end, for a peer that repeats its last packet: what the process has resident
/// follows the most sessions that there were at once. What is allocated tells whether all are forgotten, though nothing
/// comes any more.
#[test]
fn connections_that_are_over_leave_nothing() {
    const CONNECTIONS: usize = 300;
    let (caller, listening) = (nic(), nic());
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    for each_has_a_session in [false, true] {
        let connect = || {
            let other = each_has_a_session.then(nic);
            drop(meet(other.as_ref().unwrap_or(&caller), &listener));
        };
        connect();
        let before = ALLOCATED.load(Ordering::SeqCst);
        (0..CONNECTIONS).for_each(|_| connect());
        until_given_back(before, CONNECTIONS);
    }
}

/// A caller that gives up before the handshake does, as against a host that is gone.
#[test]
fn connections_that_were_given_up_leave_nothing() {
    const CONNECTIONS: usize = 100;
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = format!("udp:{}", silent.local_addr().unwrap());
    let config = Config { connect_timeout: Duration::from_millis(10), ..Config::default() };
    let nic = Nic::with_wire(config, WireConfig::default()).unwrap();
    nic.connect(&address).unwrap_err();
    let before = ALLOCATED.load(Ordering::SeqCst);
    (0..CONNECTIONS).for_each(|_| drop(nic.connect(&address).unwrap_err()));
    until_given_back(before, CONNECTIONS);
}

/// Counts the bytes of small allocations: large ones are buffers of an interface, which are few and stay.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
/// The largest allocation, of any size.
static LARGEST: AtomicUsize = AtomicUsize::new(0);
#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn counted(layout: Layout) -> usize {
    if layout.size() <= 16 << 10 { layout.size() } else { 0 }
}

// SAFETY: all is passed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(counted(layout), Ordering::SeqCst);
        LARGEST.fetch_max(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller keeps to the contract of this very function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(counted(layout), Ordering::SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}
