//! Claims, proven by real connections over loopback; and what is refused, limited and taken back.

use super::*;
use crate::claim::{Answer, Pairing, Patience, board_word, claim_from, connect_at, map, map_board};
use crate::layout::{CONTROL_BYTES, CONTROLS_AT, END_BYTES, ENDS_AT, HOLDERS, HOLDERS_AT};
use crate::{Next, Published};
use rustix::net::AddressFamily;
use std::io::Read;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

/// A socket with this cookie.
fn numbered(cookie: u64) -> Socket {
    Socket { cookie, device: 0 }
}

/// When such patience ends.
fn within(patience: Patience) -> Instant {
    Instant::now() + patience.time()
}

/// A registry at a name of its own, so that it is nobody else's.
struct Served {
    name: SocketAddrUnix,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Registry>>,
}

impl Served {
    fn new(limits: Limits) -> Served {
        let name = own_name();
        let mut registry = Registry::listen_at(&name, limits).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Acquire) {
                registry.wait();
                registry.accept(Instant::now());
                registry.answer(Instant::now());
            }
            registry
        });
        Served { name, stop, thread: Some(thread) }
    }

    fn claim(&self, socket: impl AsFd) -> Answer {
        claim_from(&connect_at(&self.name).unwrap(), socket.as_fd(), within(Patience::Much)).unwrap()
    }

    fn pair(&self, first: &TcpStream, second: &TcpStream) -> (Pairing, Pairing) {
        let Answer::Waiting { .. } = self.claim(first) else { panic!("nobody has come yet") };
        let second = paired(self.claim(second));
        (paired(self.claim(first)), second)
    }

    /// Sends a message as it is; the answer, if there is one.
    fn say(&self, message: &[u8], proof: Option<BorrowedFd<'_>>) -> Option<Vec<u8>> {
        let registry = connect_at(&self.name).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let proof = proof.as_slice();
        if !proof.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(proof));
        }
        rustix::net::sendmsg(&registry, &[IoSlice::new(message)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        let mut readable = [PollFd::new(&registry, PollFlags::IN)];
        let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut readable, Some(&limit)), Ok(1), "neither an answer nor the end");
        let mut reply = [0; 64];
        let (bytes, _) = receive(registry.as_fd(), &mut reply).unwrap();
        (bytes > 0).then(|| reply[..bytes].to_vec())
    }

    /// Ends it; what it has come to.
    fn end(mut self) -> Registry {
        self.stop_thread().unwrap()
    }

    fn stop_thread(&mut self) -> Option<Registry> {
        self.stop.store(true, Ordering::Release);
        let caller = connect_at(&self.name);
        let registry = self.thread.take()?.join().ok();
        drop(caller);
        registry
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop_thread();
    }
}

fn own_name() -> SocketAddrUnix {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("highwire-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()
}

fn registry(limits: Limits) -> Registry {
    Registry::listen_at(&own_name(), limits).unwrap()
}

fn connection(at: &str) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(at).unwrap_or_else(|error| panic!("{at}: {error}"));
    let port = listener.local_addr().unwrap().port();
    let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    (client, listener.accept().unwrap().0)
}

fn paired(answer: Answer) -> Pairing {
    match answer {
        Answer::Paired(pairing) => pairing,
        other => panic!("{other:?}"),
    }
}

fn refusal(answer: &Answer) -> Option<Refusal> {
    if let Answer::Refused(why) = answer { Some(*why) } else { None }
}

fn end(port: u16) -> End {
    let name = |port| SocketAddr::from(([127, 0, 0, 1], port));
    End { namespace: 1, local: name(port), remote: name(9) }
}

fn own_number() -> u32 {
    std::process::id()
}

fn caller(process: u32) -> Caller {
    Caller { process, user: 0 }
}

/// The number of a process that is no more.
fn dead_number() -> u32 {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let number = child.id();
    child.wait().unwrap();
    number
}

fn place_of(reply: &Reply) -> (usize, Side) {
    let Reply::Paired { lane, side, .. } = reply else { panic!("it has no lane") };
    (*lane, *side)
}

#[test]
fn two_ends_of_a_connection_get_the_two_ends_of_a_lane() {
    let served = Served::new(Limits::default());
    let (client, server) = connection("127.0.0.1:0");
    let Answer::Waiting { board: Some(board), place, value } = served.claim(&client) else { panic!("nobody has come") };
    let board = map_board(board.as_fd()).unwrap();
    assert_eq!(board_word(&board, place.into()), value);
    let second = paired(served.claim(&server));
    assert_ne!(board_word(&board, place.into()), value, "who waits is not told");
    let first = paired(served.claim(&client));
    assert_eq!((first.side, second.side), (Side::First, Side::Second));
    assert_eq!((first.region, first.lane), (second.region, second.lane));

    // What one end publishes the other one finds.
    let memory = [&first, &second].map(|pairing| map(pairing.memory.as_fd()).unwrap());
    let lane = |number: usize| LaneRegion::adopt(&memory[number]).unwrap().lane(first.lane).unwrap();
    assert!(lane(1).incoming(Side::Second).look());
    let fill = |memory: &SharedMemory, at: usize| {
        memory.copy_in(at, b"word");
        4
    };
    assert_eq!(lane(0).outgoing(Side::First).publish(4, fill), Published::Done(4));
    let Next::Record(record) = lane(1).incoming(Side::Second).next() else { panic!("there is no record") };
    assert_eq!(record.left(), 4);
}

#[test]
fn an_end_that_asks_again_gets_the_lane_that_it_has() {
    let served = Served::new(Limits::default());
    let (client, server) = connection("127.0.0.1:0");
    let (first, _) = served.pair(&client, &server);
    let again = paired(served.claim(&client));
    // A copy of the descriptor is the same socket.
    let copied = paired(served.claim(client.try_clone().unwrap()));
    for answer in [again, copied] {
        assert_eq!((answer.region, answer.lane, answer.side), (first.region, first.lane, first.side));
    }
    assert_eq!(served.end().lanes_used, 1);
}

#[test]
fn an_end_that_asks_again_in_any_state_gets_the_lane_that_it_has() {
    let served = Served::new(Limits::default());
    let same = |asked: Answer, had: &Pairing, when: &str| {
        assert!(matches!(&asked, Answer::Paired(_)), "{when}: {asked:?}");
        let answer = paired(asked);
        assert_eq!((answer.region, answer.lane, answer.side), (had.region, had.lane, had.side), "{when}");
    };
    let (client, mut server) = connection("127.0.0.1:0");
    let (first, second) = served.pair(&client, &server);
    client.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(server.read(&mut [0]).unwrap(), 0);
    same(served.claim(&client), &first, "it has sent its FIN");
    same(served.claim(&server), &second, "the peer has sent its FIN");
    server.shutdown(std::net::Shutdown::Write).unwrap();
    same(served.claim(&server), &second, "both have sent their FIN");
    same(served.claim(&client), &first, "both have sent their FIN");
    let (client, mut server) = connection("127.0.0.1:0");
    let (_, second) = served.pair(&client, &server);
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    assert!(server.read(&mut [0]).is_err(), "the peer has reset it");
    assert!(server.peer_addr().is_err(), "the kernel knows no peer any more");
    same(served.claim(&server), &second, "the peer has reset it");
    assert_eq!(served.end().lanes_used, 2);
}

/// An end is gone when two sweeps in a row find no holder of it.
fn sweep_twice(registry: &mut Registry, now: Instant) {
    registry.sweep(now);
    registry.sweep(now + SWEEP);
}

/// One that the peer has reset is in a message: the kernel knows no socket of its names any more.
#[test]
fn a_lane_stays_for_a_socket_that_was_reset_and_is_passed_on() {
    let name = own_name();
    let mut registry = Registry::listen_at(&name, Limits::default()).unwrap();
    let now = Instant::now();
    let (client, mut server) = connection("127.0.0.1:0");
    let claim = |registry: &mut Registry, socket: &TcpStream| {
        let (end, socket) = registry.identify(socket.as_fd()).expect("it has a lane, or may get one");
        registry.claim(end, socket, caller(own_number()), now)
    };
    claim(&mut registry, &client);
    let (lane, side) = place_of(&claim(&mut registry, &server));
    let lane_of = |registry: &Registry, side| registry.regions[0].lane(lane).unwrap().state(side);
    for side in [Side::First, Side::Second] {
        registry.regions[0].lane(lane).unwrap().set_state(side, EndState::Joined);
    }
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    assert!(server.read(&mut [0]).is_err(), "the peer has reset it");
    registry.sweep(now);
    assert_eq!([side, side.other()].map(|side| lane_of(&registry, side)), [EndState::Joined; 2]);
    assert_eq!(
        place_of(&claim(&mut registry, &server)),
        (lane, side),
        "the process that gets it finds what lies there"
    );
    registry.regions[0].lane(lane).unwrap().holders(side).add(own_number());
    registry.sweep(now + SWEEP);
    assert_eq!([side, side.other()].map(|side| lane_of(&registry, side)), [EndState::Joined, EndState::Gone]);
    registry.regions[0].lane(lane).unwrap().holders(side).remove(own_number());
    sweep_twice(&mut registry, now + 2 * SWEEP);
    assert_eq!(registry.lanes_used, 0);
}

#[test]
fn a_lane_stays_while_the_socket_is_held_by_a_process_that_is_not_known() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    let (client, server) = connection("127.0.0.1:0");
    for socket in [&client, &server] {
        let (end, cookie) = registry.identify(socket.as_fd()).unwrap();
        registry.claim(end, cookie, caller(own_number()), now);
    }
    for side in [Side::First, Side::Second] {
        registry.regions[0].lane(0).unwrap().set_state(side, EndState::Joined);
    }
    let dead = dead_number();
    registry.claims.values_mut().for_each(|claim| claim.caller.process = dead);
    sweep_twice(&mut registry, now);
    assert_eq!(registry.lanes_used, 1, "both sockets are open");
    client.shutdown(std::net::Shutdown::Write).unwrap();
    drop(client);
    sweep_twice(&mut registry, now);
    assert_eq!(registry.lanes_used, 1, "one socket is open");
    drop(server);
    sweep_twice(&mut registry, now);
    assert_eq!((registry.lanes_used, registry.claims.len()), (0, 0));
}

#[test]
fn connections_of_the_same_processes_share_a_region_and_no_lane() {
    let served = Served::new(Limits::default());
    let connections: Vec<_> = (0..LANES + 1).map(|_| connection("127.0.0.1:0")).collect();
    let places: Vec<_> = connections
        .iter()
        .map(|(client, server)| {
            let (first, _) = served.pair(client, server);
            (first.region, first.lane)
        })
        .collect();
    let regions: Vec<u64> = places.iter().map(|(region, _)| *region).collect();
    assert!(regions[..LANES].iter().all(|region| *region == regions[0]));
    assert_ne!(regions[LANES], regions[0], "a region has {LANES} lanes");
    let different: std::collections::HashSet<_> = places.iter().collect();
    assert_eq!(different.len(), places.len());
}

#[test]
fn an_ipv4_connection_at_an_ipv6_socket_has_one_name() {
    let served = Served::new(Limits::default());
    let (client, server) = connection("[::]:0");
    assert!(server.local_addr().unwrap().is_ipv6() && client.local_addr().unwrap().is_ipv4());
    served.pair(&client, &server);
}

#[test]
fn what_is_not_a_connection_open_both_ways_is_refused() {
    let served = Served::new(Limits::default());
    let refused = |what: &str, socket: BorrowedFd<'_>| {
        assert_eq!(refusal(&served.claim(socket)), Some(Refusal::NotConnected), "{what}");
    };
    let unconnected = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    refused("a socket that is not connected", unconnected.as_fd());
    refused("one that listens", TcpListener::bind("127.0.0.1:0").unwrap().as_fd());
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.connect(udp.local_addr().unwrap()).unwrap();
    refused("one of UDP", udp.as_fd());
    refused("one of Unix", UnixStream::pair().unwrap().0.as_fd());
    refused("a file", std::fs::File::open("/dev/null").unwrap().as_fd());
    let (client, server) = connection("127.0.0.1:0");
    client.shutdown(std::net::Shutdown::Write).unwrap();
    refused("one that was shut down", client.as_fd());
    // The end has come when it can be read.
    let mut byte = [0];
    assert_eq!(std::io::Read::read(&mut &server, &mut byte).unwrap(), 0);
    refused("one whose other end was shut down", server.as_fd());
    let registry = served.end();
    assert!(registry.claims.is_empty() && registry.lanes_used == 0);
}

#[test]
fn a_connection_to_itself_is_refused() {
    let served = Served::new(Limits::default());
    let own = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&own, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let name = SocketAddr::try_from(rustix::net::getsockname(&own).unwrap()).unwrap();
    rustix::net::connect(&own, &name).unwrap();
    assert_eq!(refusal(&served.claim(&own)), Some(Refusal::NotConnected));
}

#[test]
fn requests_that_cannot_be_read_are_refused_and_others_answered() {
    let served = Served::new(Limits::default());
    let (client, server) = connection("127.0.0.1:0");
    let proof = Some(client.as_fd());
    let right = Request { process: own_number() }.encode();
    let changed = |at: usize| {
        let mut message = right;
        message[at] ^= 0x40;
        message
    };
    let refused = |why: Refusal| Some(Reply::Refused(why).encode().to_vec());
    assert_eq!(served.say(&changed(0), proof), refused(Refusal::Malformed), "another magic number");
    assert_eq!(served.say(&changed(4), proof), refused(Refusal::Malformed), "another version");
    assert_eq!(served.say(&changed(8), proof), refused(Refusal::Malformed), "another kind");
    assert_eq!(served.say(&right[..31], proof), refused(Refusal::Malformed), "too short");
    assert_eq!(served.say(&right, None), refused(Refusal::Malformed), "without a proof");
    assert_eq!(served.say(&changed(14), proof), refused(Refusal::OtherNamespace), "of another process");
    // One that does not fit is not even looked at.
    assert_eq!(served.say(&[right.as_slice(), &[0]].concat(), proof), None, "too long");
    served.pair(&client, &server);
}

/// The registry is in a container: this process has no number there.
#[test]
fn a_process_that_has_no_number_here_is_refused_as_one_of_another_namespace() {
    apart_from_the_registry(
        "a_process_that_has_no_number_here_is_refused_as_one_of_another_namespace",
        &["--pid", "--mount-proc"],
        || (),
    );
}

/// Two of them could be given one region: this namespace has one number for both.
#[test]
fn a_user_that_has_no_number_here_is_refused_as_one_of_another_namespace() {
    apart_from_the_registry(
        "a_user_that_has_no_number_here_is_refused_as_one_of_another_namespace",
        &["--user", "--map-current-user"],
        || {
            // Of this thread only, before it connects.
            let stranger = rustix::process::Uid::from_raw(4711);
            rustix::thread::set_thread_res_uid(None, stranger, None).unwrap();
        },
    );
}

/// Claims, after `change`, from a registry that a process in these namespaces is; the test is the role of that process too.
fn apart_from_the_registry(test: &str, namespaces: &[&str], change: impl FnOnce() + Send) {
    const ROLE: &str = "HIGHWIRE_TEST_REGISTRY";
    let named = |name: &str| SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    if let Ok(name) = std::env::var(ROLE) {
        let limits = Limits { idle: Duration::from_secs(30), ..Limits::default() };
        Registry::listen_at(&named(&name), limits).unwrap().serve();
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("NOT TESTED, needs root: a registry in another namespace");
        return;
    }
    let name = format!("highwire-apart-{}", std::process::id());
    let mut registry = std::process::Command::new("unshare")
        .args(namespaces)
        .args(["--fork", "--kill-child"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("registry::tests::{test}"), "--nocapture"])
        .env(ROLE, &name)
        .spawn()
        .unwrap();
    let began = Instant::now();
    while connect_at(&named(&name)).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "the registry does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (client, _server) = connection("127.0.0.1:0");
    let claim = || {
        change();
        claim_from(&connect_at(&named(&name)).unwrap(), client.as_fd(), within(Patience::Much)).unwrap()
    };
    let answer = std::thread::scope(|scope| scope.spawn(claim).join().unwrap());
    registry.kill().unwrap();
    registry.wait().unwrap();
    assert_eq!(refusal(&answer), Some(Refusal::OtherNamespace), "{answer:?}");
}

#[test]
fn lanes_beyond_the_limit_are_refused_until_one_is_given_back() {
    let served = Served::new(Limits { lanes: 2, ..Limits::default() });
    let connections: Vec<_> = (0..3).map(|_| connection("127.0.0.1:0")).collect();
    let (first, _) = served.pair(&connections[0].0, &connections[0].1);
    served.pair(&connections[1].0, &connections[1].1);
    let Answer::Waiting { .. } = served.claim(&connections[2].0) else { panic!("nobody has come") };
    assert_eq!(refusal(&served.claim(&connections[2].1)), Some(Refusal::Exhausted));

    let memory = map(first.memory.as_fd()).unwrap();
    let lane = LaneRegion::adopt(&memory).unwrap().lane(first.lane).unwrap();
    // Used, and left by both ends.
    assert!(lane.incoming(Side::Second).look());
    lane.outgoing(Side::First).publish(1, |_, _| 1);
    for side in [Side::First, Side::Second] {
        lane.set_state(side, EndState::Gone);
    }
    // Both have come by now.
    let again = paired(served.claim(&connections[2].0));
    assert_eq!((again.region, again.lane), (first.region, first.lane));
    assert_eq!(lane.incoming(Side::Second).published(), 0, "it is not as new");
    assert_eq!(lane.state(Side::First), EndState::Empty);
}

#[test]
fn a_lane_stays_while_one_end_is_held() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    let dead = dead_number();
    registry.claim(end(1), numbered(1), caller(dead), now);
    // The other end finds nobody: the one that came first is dead.
    assert!(matches!(registry.claim(end(1).mirrored(), numbered(2), caller(own_number()), now), Reply::Waiting { .. }));
    registry.claim(end(2), numbered(3), caller(own_number()), now);
    let (lane, side) = place_of(&registry.claim(end(2).mirrored(), numbered(4), caller(own_number()), now));
    assert_eq!(side, Side::Second);
    let held = |registry: &Registry| registry.regions[0].lane(lane).unwrap().holders(Side::First).add(own_number());
    assert!(held(&registry));
    for claim in registry.claims.values_mut() {
        claim.caller.process = dead;
    }
    sweep_twice(&mut registry, now);
    let state = |registry: &Registry, side| registry.regions[0].lane(lane).unwrap().state(side);
    assert_eq!(state(&registry, Side::First), EndState::Empty, "a process still holds it");
    assert_eq!(state(&registry, Side::Second), EndState::Gone);
    assert_eq!(registry.lanes_used, 1);
    registry.regions[0].lane(lane).unwrap().holders(Side::First).remove(own_number());
    sweep_twice(&mut registry, now);
    assert_eq!(registry.lanes_used, 0);
    assert!(!registry.claims.contains_key(&end(2)) && !registry.claims.contains_key(&end(2).mirrored()));
}

#[test]
fn claims_that_nobody_answers_are_forgotten() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    registry.claim(end(1), numbered(1), caller(own_number()), now);
    registry.sweep(now + CLAIM_LIFE);
    assert_eq!(registry.claims.len(), 1);
    registry.sweep(now + CLAIM_LIFE + Duration::from_millis(1));
    assert!(registry.claims.is_empty());
    registry.claim(end(1), numbered(1), caller(dead_number()), now);
    registry.sweep(now);
    assert!(registry.claims.is_empty(), "a dead process waits for nobody");
}

/// One end has waited for too long, and only then the other one comes.
#[test]
fn an_end_whose_claim_was_forgotten_is_told_to_ask_again() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    let own = caller(own_number());
    let Reply::Waiting { value, .. } = registry.claim(end(1), numbered(1), own, now) else { panic!("nobody has come") };
    let word = |registry: &Registry| registry.board.memory().load64(BOARD_AT + 8 * end(1).place());
    registry.sweep(now + CLAIM_LIFE);
    assert_eq!(word(&registry), value, "it is not forgotten yet");
    let late = now + CLAIM_LIFE + Duration::from_millis(1);
    registry.sweep(late);
    assert_ne!(word(&registry), value, "it does not know that it is forgotten");
    let Reply::Waiting { .. } = registry.claim(end(1).mirrored(), numbered(2), own, late) else {
        panic!("nobody is known")
    };
    let (_, side) = place_of(&registry.claim(end(1), numbered(1), own, late));
    assert_eq!(side, Side::Second);
    assert_eq!(place_of(&registry.claim(end(1).mirrored(), numbered(2), own, late)).1, Side::First);
}

#[test]
fn another_socket_of_the_same_names_does_not_inherit_a_lane() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    registry.claim(end(1), numbered(1), caller(own_number()), now);
    let (old, _) = place_of(&registry.claim(end(1).mirrored(), numbered(2), caller(own_number()), now));
    // The kernel gave the port to the next one, whose other end is another socket too, and has not come yet.
    let waiting = registry.claim(end(1).mirrored(), numbered(3), caller(own_number()), now);
    assert!(matches!(waiting, Reply::Waiting { .. }), "paired with the claim of a socket that is gone: {waiting:?}");
    let left = registry.regions[0].lane(old).unwrap();
    assert_eq!([Side::First, Side::Second].map(|side| left.state(side)), [EndState::Gone; 2]);
    let (new, side) = place_of(&registry.claim(end(1), numbered(4), caller(own_number()), now));
    assert_ne!(old, new);
    assert_eq!(side, Side::Second);
    assert_eq!(
        place_of(&registry.claim(end(1).mirrored(), numbered(3), caller(own_number()), now)),
        (new, Side::First)
    );
}

#[test]
fn an_end_that_two_processes_ask_for_waits_until_one_is_left() {
    let now = Instant::now();
    let (own, parent) = (caller(own_number()), caller(std::os::unix::process::parent_id()));
    for (other, pairs) in [(parent, false), (caller(dead_number()), true), (own, true)] {
        let mut registry = registry(Limits::default());
        registry.claim(end(1), numbered(1), other, now);
        registry.claim(end(1), numbered(1), own, now);
        let mirrored = registry.claim(end(1).mirrored(), numbered(2), own, now);
        assert_eq!(matches!(mirrored, Reply::Paired { .. }), pairs, "{other:?}");
    }
}

#[test]
fn the_other_end_is_told_when_one_of_two_processes_is_gone() {
    let mut registry = registry(Limits::default());
    let (now, own) = (Instant::now(), caller(own_number()));
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    registry.claim(end(1), numbered(1), caller(child.id()), now);
    let Reply::Waiting { place, value } = registry.claim(end(1), numbered(1), own, now) else { panic!("nobody came") };
    assert!(matches!(registry.claim(end(1).mirrored(), numbered(2), own, now), Reply::Waiting { .. }));
    child.kill().unwrap();
    child.wait().unwrap();
    registry.sweep(now);
    assert_ne!(registry.board.memory().load64(BOARD_AT + 8 * usize::from(place)), value);
    assert!(matches!(registry.claim(end(1), numbered(1), own, now), Reply::Paired { .. }));
}

#[test]
fn a_claim_that_waits_is_forgotten_with_its_socket() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    let (client, server) = connection("127.0.0.1:0");
    let (end, cookie) = registry.identify(server.as_fd()).unwrap();
    registry.claim(end, cookie, caller(own_number()), now);
    let (mirrored, other) = registry.identify(client.as_fd()).unwrap();
    drop(server);
    // Its process lives on, and has no such socket any more.
    let answer = registry.claim(mirrored, other, caller(own_number()), now);
    assert!(matches!(answer, Reply::Waiting { .. }), "{answer:?}");
    assert!(!registry.claims.contains_key(&end));
}

#[test]
fn a_region_is_seen_by_two_processes_and_no_third() {
    let mut registry = registry(Limits { growth: GROWTH_OF_REGION + 4096, ..Limits::default() });
    let [one, two, three] = [own_number(), 1, std::os::unix::process::parent_id()].map(caller);
    let mut take = |members: [Caller; 2]| {
        let (region, lane) = registry.free_lane(members).unwrap();
        registry.regions[region].lanes[lane] = Some([end(1), end(2)]);
        (region, lane)
    };
    assert_eq!(take([one, two]), (0, 0));
    assert_eq!(take([two, one]), (0, 1));
    assert_eq!(take([one, one]), (1, 0));
    if three != two {
        assert_eq!(take([one, three]), (2, 0));
        assert_eq!(registry.regions[2].spare, 0, "nothing is left to grow by");
    }
    assert_eq!(registry.regions[0].spare, GROWTH_OF_REGION);
    assert_eq!(registry.regions[1].spare, 4096);
    // Its lanes are given back: others get it only when those who have it mapped are dead.
    registry.regions[1].lanes = [None; LANES];
    let count = registry.regions.len();
    assert_eq!(registry.free_lane([two, two]), Some((count, 0)));
    registry.regions[count].lanes = [Some([end(3), end(4)]); LANES];
    registry.regions[1].members = [caller(dead_number()), two];
    let number = registry.regions[1].number;
    assert_eq!(registry.free_lane([two, two]), Some((1, 0)));
    assert_eq!(registry.regions[1].number, number, "it is mapped already");
}

/// A process can leave the descriptor to others before it dies.
#[test]
fn memory_that_another_user_has_seen_is_given_to_nobody() {
    let mut registry = registry(Limits { growth: GROWTH_OF_REGION, ..Limits::default() });
    let server = caller(own_number());
    let [of_one, of_another] = [1000, 1001].map(|user| Caller { process: dead_number(), user });
    assert_eq!(registry.free_lane([server, of_one]), Some((0, 0)));
    let number = registry.regions[0].number;
    assert_eq!(registry.free_lane([of_another, server]), Some((1, 0)), "the other one's is not given to him");
    assert_eq!(registry.regions[1].spare, 0);
    let later = Caller { process: dead_number(), ..of_one };
    assert_eq!(registry.free_lane([server, later]), Some((0, 0)), "one of the same user gets it");
    assert_eq!(registry.regions[0].number, number);
    // All who saw it are dead: its place and what it may grow by are there for others, its memory is not.
    registry.regions[0].members = [of_one; 2];
    assert_eq!(registry.free_lane([of_another; 2]), Some((0, 0)));
    assert_ne!(registry.regions[0].number, number);
    assert_eq!(registry.regions[0].spare, GROWTH_OF_REGION);
    assert_eq!((registry.regions.len(), registry.growth_left), (2, 0));
}

#[test]
fn memory_that_a_third_user_was_handed_gets_no_more_lanes() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    let own = caller(own_number());
    registry.claim(end(1), numbered(1), own, now);
    registry.claim(end(1).mirrored(), numbered(2), own, now);
    // The connection was passed on, to a process of another user.
    let other = Caller { user: own.user + 1, ..own };
    assert!(
        matches!(registry.claim(end(1), numbered(1), other, now), Reply::Paired { .. }),
        "what lies there is read first"
    );
    assert_eq!(registry.free_lane([own, own]), Some((1, 0)));
}

/// Whatever those of a region write to it, its lanes come back when they are dead, and as new.
#[test]
fn lanes_of_scribbled_memory_are_taken_back() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    registry.claim(end(1), numbered(1), caller(own_number()), now);
    let (lane, _) = place_of(&registry.claim(end(1).mirrored(), numbered(2), caller(own_number()), now));
    let memory = &registry.regions[0].memory;
    memory.store64(0, 7);
    memory.store64(64, u64::MAX);
    // Holders that cannot be: groups of processes.
    for (side, place) in (0..2).flat_map(|side| (0..HOLDERS).map(move |place| (side, place))) {
        let end = CONTROLS_AT + CONTROL_BYTES * lane + ENDS_AT + END_BYTES * side;
        memory.store32(end + HOLDERS_AT + 4 * place, 0x8000_0001 + place as u32);
    }
    for claim in registry.claims.values_mut() {
        claim.caller.process = dead_number();
    }
    sweep_twice(&mut registry, now);
    assert_eq!((registry.lanes_used, registry.claims.len()), (0, 0));
    let region = LaneRegion::adopt(&registry.regions[0].memory).expect("it is one again");
    assert_eq!(region.spare(), registry.regions[0].spare);
    assert_eq!(region.lane(lane).unwrap().holders(Side::First).others(0).count(), 0);
}

#[test]
fn callers_who_say_nothing_do_not_stay_and_are_limited() {
    let name = own_name();
    let mut registry = Registry::listen_at(&name, Limits::default()).unwrap();
    let now = Instant::now();
    let mut silent = Vec::new();
    // The kernel's queue of those who wait is shorter than the limit.
    while silent.len() < CALLERS_MAX + 8 {
        silent.push(connect_at(&name).unwrap());
        if silent.len().is_multiple_of(64) {
            registry.accept(now);
        }
    }
    registry.accept(now);
    assert_eq!(registry.callers.len(), CALLERS_MAX);
    registry.answer(now);
    assert_eq!(registry.callers.len(), CALLERS_MAX, "they have a moment to speak");
    registry.answer(now + PATIENCE);
    assert!(registry.callers.is_empty());
    registry.accept(now);
    assert_eq!(registry.callers.len(), 8, "the next ones are heard");
}

/// Who waited for one registry and looks at the board of the next finds another word, and asks.
#[test]
fn words_of_two_registries_are_not_equal() {
    let [one, next] = [(); 2].map(|()| registry(Limits::default()));
    let own = caller(own_number());
    let low = |registry: Registry, end| {
        let mut registry = registry;
        let Reply::Waiting { value, .. } = registry.claim(end, numbered(1), own, Instant::now()) else {
            panic!("who has come?")
        };
        // As much of it is compared.
        value << 16
    };
    assert_ne!(low(one, end(1)), low(next, end(1)));
}

#[test]
fn there_is_one_registry_of_a_name() {
    let name = own_name();
    let first = Registry::listen_at(&name, Limits::default()).unwrap();
    let second = Registry::listen_at(&name, Limits::default());
    assert!(matches!(second, Err(RegistryError::Running)));
    drop(first);
    Registry::listen_at(&name, Limits::default()).unwrap();
}

#[test]
fn a_registry_that_nobody_needs_ends() {
    let idle = Duration::from_millis(1);
    let began = Instant::now();
    registry(Limits { idle, ..Limits::default() }).serve();
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_lane_that_is_taken_back_leaves_claims_of_other_regions() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    registry.claim(end(1), numbered(1), caller(own_number()), now);
    registry.claim(end(1).mirrored(), numbered(2), caller(own_number()), now);
    // Two other sockets of the same names, of which one is another process's.
    registry.claim(end(1).mirrored(), numbered(3), caller(std::os::unix::process::parent_id()), now);
    registry.claim(end(1), numbered(4), caller(own_number()), now);
    assert_eq!(registry.claims[&end(1)].place.map(|place| (place.region, place.lane)), Some((1, 0)));
    registry.sweep(now);
    assert!(registry.claims.contains_key(&end(1)));
}

#[test]
fn a_lane_is_taken_back_from_an_end_that_never_came_when_the_other_one_is_gone() {
    let mut registry = registry(Limits::default());
    let now = Instant::now();
    registry.claim(end(1), numbered(1), caller(own_number()), now);
    registry.claim(end(1).mirrored(), numbered(2), caller(own_number()), now);
    registry.sweep(now);
    assert_eq!(registry.lanes_used, 1, "both may still come");
    let place = registry.claims[&end(1)].place.unwrap();
    registry.regions[place.region].lane(place.lane).unwrap().set_state(Side::Second, EndState::Gone);
    sweep_twice(&mut registry, now);
    assert_eq!(registry.lanes_used, 0);
}

/// Who may have bytes in a lane waits for an answer that others do without.
#[test]
fn a_late_answer_is_waited_for_where_bytes_may_lie_in_a_lane() {
    let name = own_name();
    let mut registry = Registry::listen_at(&name, Limits::default()).unwrap();
    let (client, _server) = connection("127.0.0.1:0");
    let hasty = claim_from(&connect_at(&name).unwrap(), client.as_fd(), within(Patience::Little));
    assert!(matches!(hasty, Err(Errno::TIMEDOUT)));
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        registry.accept(Instant::now());
        registry.answer(Instant::now());
    });
    let patient = claim_from(&connect_at(&name).unwrap(), client.as_fd(), within(Patience::Much));
    late.join().unwrap();
    assert!(matches!(patient, Ok(Answer::Waiting { .. })), "{patient:?}");
}
