//! Connections that are cut while both sides live: a call runs once, and its answer is told again as long as it is kept.

use crate::support::raw::{self, Call, Hello, Raw, Welcome};
use crate::support::service::{
    AWAIT_GATE, COUNT, COUNT_BEHIND_GATE, DIGEST, ECHO, FETCH, FETCH_AGAIN, FETCH_ONCE, SLEEP, decoded, encoded,
};
use crate::support::{
    PATIENCE, Transport, World, block_on, buffer, buffer_of, content, everywhere, places, until, window,
    within_patience,
};
use highwire_rpc::{CallError, Client, ClientOptions, Leaving, Lost, OpenError, Rpc, ServerOptions};
use highwire_vi::{Nic, ViListener};
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The session of a raw client that comes back.
fn again(hello: Hello, welcome: Welcome) -> Hello {
    Hello { attempt: hello.attempt + 1, incarnation: welcome.incarnation, ..hello }
}

#[test]
fn a_call_that_comes_again_is_told_the_answer_that_was_kept() {
    everywhere(|world| {
        let served = world.serve();
        let (nic, hello) = (world.nic(), Hello::new(1));
        let (mut raw, welcome) = Raw::hello(&nic, &served.address, hello);
        assert!(!welcome.known && welcome.incarnation != 0);
        let call = Call::new(COUNT, 1).encode(&encoded(&7u64));
        raw.say(&call);
        assert_eq!(decoded::<u32>(&raw::answered(&raw.hear()).body), 1);
        drop(raw);
        let (mut raw, second) = Raw::hello(&nic, &served.address, again(hello, welcome));
        assert_eq!((second.known, second.incarnation), (true, welcome.incarnation));
        raw.say(&call);
        let answer = raw::answered(&raw.hear());
        assert_eq!((answer.sequence, answer.status, decoded::<u32>(&answer.body)), (1, raw::DONE, 1));
        assert_eq!(served.service.count_of(7), 1);
        // The next call says that it has arrived.
        raw.say(&Call::new(COUNT, 2).encode(&encoded(&8u64)));
        assert_eq!(raw::answered(&raw.hear()).sequence, 2);
        raw.say(&call);
        raw.say(&Call::new(COUNT, 3).encode(&encoded(&9u64)));
        assert_eq!(raw::answered(&raw.hear()).sequence, 3, "nobody is answered who has the answer");
        assert_eq!((served.service.count_of(7), served.service.count_of(9)), (1, 1));
    });
}

#[test]
fn a_call_that_ran_is_not_said_to_have_not_run_though_its_payload_finds_no_place_now() {
    everywhere(|world| {
        let served = world.serve();
        let (nic, hello) = (world.nic(), Hello::new(6));
        let (mut raw, welcome) = Raw::hello(&nic, &served.address, hello);
        raw.say(&Call::new(COUNT, 1).encode(&encoded(&7u64)));
        assert_eq!(raw::answered(&raw.hear()).status, raw::DONE);
        drop(raw);
        let (mut raw, second) = Raw::hello(&nic, &served.address, again(hello, welcome));
        assert!(second.known);
        // More than the server takes, as if its memory were exhausted.
        let offer = [encoded(&7u64), u32::MAX.to_le_bytes().to_vec()].concat();
        raw.say(&Call { flags: raw::IS_OFFER, ..Call::new(COUNT, 1) }.encode(&offer));
        let answer = raw::answered(&raw.hear());
        assert_eq!((answer.sequence, answer.status, decoded::<u32>(&answer.body)), (1, raw::DONE, 1));
        assert_eq!(served.service.count_of(7), 1);
    });
}

#[test]
fn a_call_that_runs_while_its_connection_is_made_anew_is_answered_there() {
    everywhere(|world| {
        let served = world.serve();
        let (nic, hello) = (world.nic(), Hello::new(2));
        let (mut raw, welcome) = Raw::hello(&nic, &served.address, hello);
        let call = Call::new(COUNT_BEHIND_GATE, 1).encode(&encoded(&7u64));
        raw.say(&call);
        until("the call", || served.service.begun() == 1);
        drop(raw);
        let (mut raw, second) = Raw::hello(&nic, &served.address, again(hello, welcome));
        assert!(second.known);
        raw.say(&call);
        raw.say(&Call { unanswered: 1, ..Call::new(ECHO, 2) }.encode(b""));
        assert_eq!(raw::answered(&raw.hear()).sequence, 2);
        served.service.gate.open();
        let answer = raw::answered(&raw.hear());
        assert_eq!((answer.sequence, decoded::<u32>(&answer.body)), (1, 1));
        assert_eq!((served.service.begun(), served.service.count_of(7)), (1, 1));
    });
}

#[test]
fn a_call_that_ends_while_nobody_is_connected_has_its_answer_kept() {
    everywhere(|world| {
        let served = world.serve();
        let (nic, hello) = (world.nic(), Hello::new(3));
        let (mut raw, welcome) = Raw::hello(&nic, &served.address, hello);
        let call = Call::new(COUNT_BEHIND_GATE, 1).encode(&encoded(&7u64));
        raw.say(&call);
        until("the call", || served.service.begun() == 1);
        drop(raw);
        served.service.gate.open();
        until("its end", || served.service.count_of(7) == 1);
        let (mut raw, second) = Raw::hello(&nic, &served.address, again(hello, welcome));
        assert!(second.known);
        raw.say(&call);
        assert_eq!(decoded::<u32>(&raw::answered(&raw.hear()).body), 1);
        assert_eq!(served.service.count_of(7), 1);
    });
}

#[test]
fn an_answer_with_a_payload_is_made_again_only_where_that_does_no_harm() {
    everywhere(|world| {
        let served = world.serve();
        let nic = world.nic();
        for (session, method, number) in [(4, FETCH_AGAIN, 70u64), (5, FETCH_ONCE, 71)] {
            let hello = Hello::new(session);
            let (mut raw, welcome) = Raw::hello(&nic, &served.address, hello);
            let call = Call { reply_room: 5000, ..Call::new(method, 1) }.encode(&encoded(&(number, 5000u32)));
            raw.expect(1, 5000);
            raw.say(&call);
            assert!(raw.next().unwrap().payload.unwrap() == content(number, 5000));
            drop(raw);
            let (mut raw, second) = Raw::hello(&nic, &served.address, again(hello, welcome));
            assert!(second.known);
            raw.expect(1, 5000);
            raw.say(&call);
            let heard = raw.next().unwrap();
            let answer = raw::answered(&heard.message);
            if method == FETCH_AGAIN {
                assert_eq!((answer.status, served.service.count_of(number)), (raw::DONE, 2));
                assert!(heard.payload.unwrap() == content(number, 5000));
            } else {
                assert_eq!((answer.status, served.service.count_of(number)), (raw::FORGOTTEN, 1));
            }
        }
    });
}

#[test]
fn a_session_that_nobody_came_back_for_is_begun_anew() {
    everywhere(|world| {
        let options = ServerOptions { keep_sessions: Duration::from_millis(50), ..ServerOptions::default() };
        let served = world.serve_with(ServerOptions { sessions_max: 1, ..options });
        let (nic, mut hello) = (world.nic(), Hello::new(6));
        let (raw, welcome) = Raw::hello(&nic, &served.address, hello);
        // There is no room for another while it is kept.
        let mut other = Raw::connect(&nic, &served.address);
        other.say(&Hello::new(66).encode());
        assert_eq!(other.hear()[..2], [8, 3]);
        drop((raw, other));
        std::thread::sleep(Duration::from_millis(1000));
        hello = again(hello, welcome);
        let (_raw, second) = Raw::hello(&nic, &served.address, hello);
        assert!(!second.known && second.incarnation != welcome.incarnation);
    });
}

#[test]
fn another_client_with_the_same_session_is_refused() {
    everywhere(|world| {
        let served = world.serve();
        let options = ClientOptions { session: Some(99), ..ClientOptions::default() };
        let first = world.client_with(&served.address, options.clone());
        assert_eq!(first.session(), 99);
        let error = world.rpc().connect_with(&served.address, options).unwrap_err();
        assert!(matches!(error, OpenError::Refused { why: Leaving::SessionTaken, .. }), "{error}");
        first.call(ECHO).wait().unwrap();
    });
}

#[test]
fn a_client_whose_session_was_taken_is_told_so_for_every_call() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(16));
        let outstanding = client.call(AWAIT_GATE).start();
        until("the call", || served.service.begun() == 1);
        // A later connection of the same session, though that of another.
        let hello = Hello { attempt: 100, ..Hello::new(client.session()) };
        let (_taker, welcome) = Raw::hello(&world.nic(), &served.address, hello);
        assert!(!welcome.known, "who was never welcomed to a session begins anew");
        let error = within_patience("the outstanding call", move || outstanding.wait().map(|_| ())).unwrap_err().error;
        assert_eq!(error, CallError::OutcomeUnknown(Box::new(Lost::SessionTaken)));
        let expected = CallError::NotSent(Box::new(Lost::SessionTaken));
        // More of them than there are places.
        for call in 0..40 {
            let client = client.clone();
            let error = within_patience("a call without session", move || match call % 2 {
                0 => client.call(ECHO).wait().unwrap_err().error,
                _ => block_on(client.call(ECHO).start()).unwrap_err().error,
            });
            assert_eq!(error, expected);
        }
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn the_answer_to_a_call_of_an_older_session_is_not_that_of_a_newer_one() {
    everywhere(|world| {
        let options = ServerOptions { keep_sessions: Duration::from_millis(50), ..ServerOptions::default() };
        let served = world.serve_with(options);
        let nic = world.nic();
        let (mut old, _) = Raw::hello(&nic, &served.address, Hello::new(8));
        old.say(&Call::new(SLEEP, 1).encode(&encoded(&1800u64)));
        old.say(&Call { unanswered: 1, ..Call::new(ECHO, 2) }.encode(b""));
        assert_eq!(raw::answered(&old.hear()).sequence, 2, "the first has begun");
        drop(old);
        std::thread::sleep(Duration::from_millis(1000));
        let (mut new, welcome) = Raw::hello(&nic, &served.address, Hello::new(8));
        assert!(!welcome.known);
        new.say(&Call::new(AWAIT_GATE, 1).encode(b"new"));
        until("the new call", || served.service.begun() == 1);
        // The old one ends meanwhile.
        std::thread::sleep(Duration::from_millis(1200));
        served.service.gate.open();
        assert_eq!(raw::answered(&new.hear()).body, b"new");
    });
}

/// A client and the raw server that it is connected to.
struct Scene {
    nic: Nic,
    listener: ViListener,
    client: Client,
    session: u128,
}

impl Scene {
    fn open(world: &World<'_>, welcome: Welcome) -> (Scene, Raw) {
        let nic = world.nic();
        let listener = nic.listen(&world.address()).unwrap();
        let address = listener.address().to_owned();
        let rpc: Rpc = world.rpc();
        let options = ClientOptions { window: welcome.window, ..ClientOptions::default() };
        let connecting = std::thread::spawn(move || rpc.connect_with(&address, options).unwrap());
        let mut raw = Raw::accept(&nic, &listener);
        let session = raw::session_of(&raw.hear());
        for frame in 0..welcome.frames {
            raw.expect(raw::frame_token(frame), 65_536);
        }
        raw.say(&welcome.encode());
        (Scene { nic, listener, client: connecting.join().unwrap(), session }, raw)
    }

    /// The client comes back, and is welcomed so.
    fn again(&self, welcome: Welcome) -> Raw {
        let mut raw = Raw::accept(&self.nic, &self.listener);
        let hello = raw.hear();
        assert_eq!((raw::session_of(&hello), raw::u64_at(&hello, 24)), (self.session, 77));
        for frame in 0..welcome.frames {
            raw.expect(raw::frame_token(frame), 65_536);
        }
        raw.say(&welcome.encode());
        raw
    }
}

#[test]
fn a_client_comes_back_with_what_was_not_answered() {
    everywhere(|world| {
        let welcome = Welcome { frames: 2, ..Welcome::to(16) };
        let (scene, mut raw) = Scene::open(world, welcome);
        let nic = scene.client.rpc().nic().clone();
        let bytes = content(5, 30_000);
        let room = buffer(&nic, 300);
        let place = (room.region_id(), room.offset(), 300);
        let pending = [
            scene.client.call(ECHO).arguments(b"one").start(),
            scene.client.call(DIGEST).payload(buffer_of(&nic, &bytes)).start(),
            scene.client.call(FETCH).into(room).start(),
        ];
        for call in 0..3 {
            let heard = raw.next().unwrap();
            assert_eq!(heard.message[0], 3);
            assert!(heard.payload.is_none_or(|payload| payload == bytes), "call {call}");
        }
        drop(raw);
        // By a task, so that nobody else brings the connection back.
        let waiting = std::thread::spawn(move || pending.map(|pending| block_on(pending).unwrap()));
        let mut raw = scene.again(Welcome { known: true, ..welcome });
        let mut sequences = Vec::new();
        for _ in 0..3 {
            let heard = raw.next().unwrap();
            let (sequence, method) = (raw::u64_at(&heard.message, 8), u16::from(heard.message[2]));
            sequences.push(sequence);
            assert_eq!(heard.payload.is_some(), method == DIGEST.method);
            assert!(heard.payload.is_none_or(|payload| payload == bytes), "the payload comes again, whole");
            let reply = raw::Reply::to(sequence).encode(&heard.message[32..]);
            match method == FETCH.method {
                true => raw.say_with(&reply, &content(6, 200), sequence),
                false => raw.say(&reply),
            }
        }
        sequences.sort_unstable();
        assert_eq!(sequences, [1, 2, 3]);
        let [one, sent, fetched] = within_patience("the calls", move || waiting.join().unwrap());
        assert_eq!(&*one.body, b"one");
        assert_eq!(sent.sent.total(), 30_000);
        assert_eq!(fetched.length, 200);
        let segments = fetched.payload.into_segments();
        assert!(segments[0].bytes()[..200] == content(6, 200)[..]);
        assert_eq!(places(segments.into_iter().fold(Default::default(), highwire_vi::Payload::and)), [place]);
    });
}

#[test]
fn a_server_that_forgot_the_session_makes_what_was_sent_unknown_and_nothing_else() {
    everywhere(|world| {
        for (known, incarnation) in [(false, 78), (true, 78), (false, 77)] {
            let (scene, mut raw) = Scene::open(world, Welcome::to(16));
            let sent = scene.client.call(ECHO).start();
            raw.hear();
            drop(raw);
            let waiting = std::thread::spawn(move || sent.wait().map(|_| ()).unwrap_err().error);
            let mut raw = scene.again(Welcome { known, incarnation, ..Welcome::to(16) });
            let error = within_patience("the call that was sent", move || waiting.join().unwrap());
            assert_eq!(error, CallError::OutcomeUnknown(Box::new(Lost::ServerForgot)));
            let next = scene.client.call(ECHO).start();
            let sequence = raw::u64_at(&raw.hear(), 8);
            assert!(sequence > 1, "a number is used once");
            raw.say(&raw::Reply::to(sequence).encode(b"next"));
            assert_eq!(&*next.wait().unwrap().body, b"next");
        }
    });
}

#[test]
fn a_call_never_comes_again_without_its_payload() {
    everywhere(|world| {
        let welcome = Welcome { frames: 2, ..Welcome::to(16) };
        let (scene, mut raw) = Scene::open(world, welcome);
        let nic = scene.client.rpc().nic().clone();
        // More than a frame holds: it is offered, and nobody takes what is sent then.
        let pending = scene.client.call(DIGEST).payload(buffer(&nic, 1 << 20)).start();
        let offer = raw.hear();
        assert_eq!(offer[1] & raw::IS_OFFER, raw::IS_OFFER);
        raw.say(&raw::about(6, 1));
        let waiting = std::thread::spawn(move || pending.wait().map(|_| ()).map_err(|failed| failed.error));
        std::thread::sleep(Duration::from_millis(20));
        raw.say(&raw::leaving(raw::SHUTDOWN));
        let listener = &scene.listener;
        let heard = match listener.accept(Duration::from_secs(2)) {
            Err(_) => None,
            Ok(vi) => {
                let mut raw = Raw::new(&scene.nic, vi);
                raw.hear();
                raw.say(&Welcome { known: true, ..welcome }.encode());
                let heard = raw.next().ok();
                if let Some(heard) = &heard {
                    assert_eq!(heard.message[0], 3);
                    assert!(heard.message[1] & raw::IS_OFFER != 0, "a call without its payload");
                    raw.say(&raw::Reply::to(1).encode(b"\0\0"));
                }
                heard
            }
        };
        let outcome = within_patience("the call", move || waiting.join().unwrap());
        assert!(heard.is_some() || matches!(outcome, Err(CallError::OutcomeUnknown(_))), "{outcome:?}");
    });
}

/// Carries packets between one client and a server, unless it is cut.
struct Relay {
    address: String,
    is_cut: Arc<AtomicBool>,
}

impl Relay {
    fn to(server: &str) -> Relay {
        let server = server.strip_prefix("udp:").unwrap().to_owned();
        let [front, back] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        back.connect(server).unwrap();
        let address = format!("udp:{}", front.local_addr().unwrap());
        let is_cut = Arc::new(AtomicBool::new(false));
        let (front, back, client) = (Arc::new(front), Arc::new(back), Arc::new(std::sync::Mutex::new(None)));
        {
            let (front, back, client, is_cut) = (front.clone(), back.clone(), client.clone(), is_cut.clone());
            std::thread::spawn(move || {
                let mut packet = vec![0; 65_536];
                loop {
                    let Ok((bytes, from)) = front.recv_from(&mut packet) else { continue };
                    *client.lock().unwrap() = Some(from);
                    if !is_cut.load(Ordering::SeqCst) {
                        let _ = back.send(&packet[..bytes]);
                    }
                }
            });
        }
        let cut = is_cut.clone();
        std::thread::spawn(move || {
            let mut packet = vec![0; 65_536];
            loop {
                let Ok(bytes) = back.recv(&mut packet) else { continue };
                let to = *client.lock().unwrap();
                if let Some(to) = to
                    && !cut.load(Ordering::SeqCst)
                {
                    let _ = front.send_to(&packet[..bytes], to);
                }
            }
        });
        Relay { address, is_cut }
    }
}

#[test]
fn a_network_that_fails_for_a_while_loses_no_call_and_doubles_none() {
    let stage = crate::support::Stage::open();
    let world = World { transport: Transport::Sealed, stage: &stage };
    let served = world.serve();
    let relay = Relay::to(&served.address);
    let options = ClientOptions { reconnect_for: PATIENCE, ..ClientOptions::default() };
    let client = world.client_with(&relay.address, ClientOptions { connect_timeout: PATIENCE / 4, ..options });
    let nic = client.rpc().nic().clone();
    client.call(COUNT).arguments(&encoded(&1000u64)).wait().unwrap();
    let slow = client.call(COUNT_BEHIND_GATE).arguments(&encoded(&0u64)).start();
    until("the slow call", || served.service.begun() == 1);
    relay.is_cut.store(true, Ordering::SeqCst);
    let cut_off: Vec<_> = (1..20u64).map(|call| client.call(COUNT).arguments(&encoded(&call)).start()).collect();
    let with_payload = client.call(DIGEST).payload(buffer_of(&nic, &content(1, 50_000))).start();
    // It ends while nobody is connected, or while nobody knows yet that nobody is.
    served.service.gate.open();
    until("that the client has noticed", || {
        client.poll();
        !client.is_connected()
    });
    relay.is_cut.store(false, Ordering::SeqCst);
    let waiting = move || {
        let outcomes: Vec<_> = std::iter::once(slow).chain(cut_off).map(block_on).collect();
        (outcomes, block_on(with_payload))
    };
    let (outcomes, with_payload) = within_patience("the calls", waiting);
    for (call, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(decoded::<u32>(&outcome.unwrap().body), 1, "call {call}");
        assert_eq!(served.service.count_of(call as u64), 1);
    }
    let digest: (u64, u64) = decoded(&with_payload.unwrap().body);
    assert_eq!(digest, crate::support::service::digest(&content(1, 50_000)));
}
