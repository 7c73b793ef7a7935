//! Servers that say what cannot be: the client's calls end, with an error that says what can be known.

use crate::support::raw::{self, Raw, Reply, Welcome};
use crate::support::service::{DIGEST, ECHO, FETCH};
use crate::support::{Over, World, buffer, everywhere, places, within_patience};
use highwire_rpc::{Answer, CallError, Client, ClientOptions, Failed, Leaving, OpenError};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Gives up soon, so that a lost connection is seen.
fn impatient() -> ClientOptions {
    ClientOptions {
        window: 16,
        reconnect_for: Duration::from_millis(100),
        connect_timeout: Duration::from_millis(1500),
        ..ClientOptions::default()
    }
}

/// What connecting to somebody comes to who says this after the hello.
fn connecting_to(world: &World<'_>, say: impl Fn(&mut Raw)) -> OpenError {
    let nic = world.nic();
    let listener = nic.listen(&world.address()).unwrap();
    let (rpc, address) = (world.rpc(), listener.address().to_owned());
    let connecting = std::thread::spawn(move || rpc.connect_with(&address, impatient()).map(|_| ()));
    let mut raw = Raw::accept(&nic, &listener);
    raw.hear();
    say(&mut raw);
    within_patience("connecting", move || connecting.join().unwrap()).unwrap_err()
}

#[test]
fn a_welcome_that_is_none_is_an_error_that_says_so() {
    everywhere(|world| {
        for nonsense in [vec![], vec![2], vec![0xff; 32], vec![0; 4000], raw::about(5, 1), Reply::to(1).encode(b"")] {
            let error = connecting_to(world, |raw| raw.say(&nonsense));
            assert!(matches!(error, OpenError::NotRpc { .. }), "{nonsense:?}: {error}");
        }
        let mut other = Welcome::to(16).encode();
        other[2] = 7;
        let error = connecting_to(world, |raw| raw.say(&other));
        assert!(matches!(error, OpenError::Version { theirs: 7, ours: 1, .. }), "{error}");
        let error = connecting_to(world, |raw| raw.say(&Welcome::to(32).encode()));
        assert!(matches!(error, OpenError::Refused { .. }), "another window: {error}");
        let error = connecting_to(world, |raw| raw.say(&raw::leaving(3)));
        assert!(matches!(error, OpenError::Refused { why: Leaving::Full, .. }), "{error}");
        let error = connecting_to(world, |_| ());
        assert!(matches!(error, OpenError::NoWelcome { .. }), "silence: {error}");
        let nobody = Welcome { incarnation: 0, ..Welcome::to(16) }.encode();
        let error = connecting_to(world, |raw| raw.say(&nobody));
        assert!(matches!(error, OpenError::NotRpc { .. }), "no incarnation: {error}");
    });
}

/// A client, and the raw server that it is connected to; who comes back is turned away.
struct Scene {
    client: Client,
    raw: Raw,
    over: Arc<Over>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        drop(self.over.at_the_end());
    }
}

impl Scene {
    fn open(world: &World<'_>, welcome: Welcome) -> Scene {
        let nic = world.nic();
        let listener = nic.listen(&world.address()).unwrap();
        let (rpc, address) = (world.rpc(), listener.address().to_owned());
        let connecting = std::thread::spawn(move || rpc.connect_with(&address, impatient()).unwrap());
        let mut raw = Raw::accept(&nic, &listener);
        raw.hear();
        raw.say(&welcome.encode());
        let client = connecting.join().unwrap();
        let over = Arc::new(Over::default());
        let turning_away = over.clone();
        std::thread::spawn(move || {
            let mut turned_away = Vec::new();
            while !turning_away.is_over() {
                if let Ok(vi) = listener.accept(Duration::from_millis(50)) {
                    let mut raw = Raw::new(&nic, vi);
                    raw.say(&raw::leaving(3));
                    turned_away.push(raw);
                }
            }
        });
        Scene { client, raw, over }
    }

    /// A call of which the server has heard, and whoever waits for it.
    fn called(&mut self, make: impl FnOnce(&Client) -> highwire_rpc::Pending) -> Waiting {
        let pending = make(&self.client);
        assert_eq!(self.raw.hear()[0], 3);
        Waiting(std::thread::spawn(move || pending.wait()))
    }
}

struct Waiting(JoinHandle<Result<Answer, Failed>>);

impl Waiting {
    fn outcome(self) -> Result<Answer, Failed> {
        within_patience("the call", move || self.0.join().unwrap())
    }

    fn has_unknown_outcome(self, what: &str) {
        let outcome = self.outcome();
        assert!(
            matches!(&outcome, Err(Failed { error: CallError::OutcomeUnknown(_), .. })),
            "after {what}: {outcome:?}"
        );
    }
}

#[test]
fn nonsense_from_the_server_ends_the_connection_and_the_calls() {
    everywhere(|world| {
        let mut lies_about_body = Reply::to(1).encode(b"abc");
        lies_about_body[4] = 200;
        let nonsense = [
            ("nothing", vec![]),
            ("ones", vec![0xff; 100]),
            ("a call", raw::Call::new(ECHO, 1).encode(b"")),
            ("a hello", raw::Hello::new(1).encode()),
            ("another welcome", Welcome::to(16).encode()),
            ("a cancellation", raw::about(5, 1)),
            ("an offered payload", raw::about(7, 1)),
            ("room that was not asked for", raw::about(6, 1)),
            ("a status that is none", Reply { status: 99, ..Reply::to(1) }.encode(b"")),
            ("an answer to call 0", Reply::to(0).encode(b"")),
            ("a lie about the body", lies_about_body),
        ];
        for (what, message) in nonsense {
            let mut scene = Scene::open(world, Welcome::to(16));
            let waiting = scene.called(|client| client.call(ECHO).start());
            scene.raw.say(&message);
            waiting.has_unknown_outcome(what);
        }
    });
}

#[test]
fn answers_to_calls_that_were_never_made_are_nobodys() {
    everywhere(|world| {
        let mut scene = Scene::open(world, Welcome::to(16));
        let waiting = scene.called(|client| client.call(ECHO).start());
        for sequence in [2, 3, 17, 1000, (1 << 60) - 1] {
            scene.raw.say(&Reply { frames: u32::MAX, ..Reply::to(sequence) }.encode(b"wrong"));
        }
        scene.raw.say(&Reply::to(1).encode(b"right"));
        assert_eq!(&*waiting.outcome().unwrap().body, b"right");
        // Once more, and to the next.
        let waiting = scene.called(|client| client.call(ECHO).start());
        scene.raw.say(&Reply::to(1).encode(b"wrong"));
        scene.raw.say(&Reply::to(2).encode(b"second"));
        scene.raw.say(&Reply::to(2).encode(b"wrong"));
        assert_eq!(&*waiting.outcome().unwrap().body, b"second");
        let waiting = scene.called(|client| client.call(ECHO).start());
        scene.raw.say(&Reply::to(3).encode(b"third"));
        assert_eq!(&*waiting.outcome().unwrap().body, b"third");
    });
}

#[test]
fn room_that_is_said_twice_ends_the_connection() {
    everywhere(|world| {
        let mut scene = Scene::open(world, Welcome::to(16));
        let nic = scene.client.rpc().nic().clone();
        let waiting = scene.called(|client| client.call(DIGEST).payload(buffer(&nic, 200_000)).start());
        scene.raw.say(&raw::about(6, 1));
        scene.raw.say(&raw::about(6, 1));
        waiting.has_unknown_outcome("room said twice");
    });
}

#[test]
fn an_offer_that_nobody_takes_up_ends_with_its_deadline() {
    everywhere(|world| {
        let mut scene = Scene::open(world, Welcome::to(16));
        let nic = scene.client.rpc().nic().clone();
        let payload = buffer(&nic, 200_000);
        let place = (payload.region_id(), payload.offset(), 200_000);
        let after = Duration::from_millis(200);
        let waiting = scene.called(|client| client.call(DIGEST).payload(payload).deadline(after).start());
        let failed = waiting.outcome().unwrap_err();
        assert_eq!((failed.error, places(failed.sent)), (CallError::DeadlinePassed { after }, vec![place]));
        // Room for what was given up is nobody's.
        scene.raw.say(&raw::about(6, 1));
        assert_eq!(scene.raw.hear()[..], raw::about(5, 1)[..]);
        let waiting = scene.called(|client| client.call(ECHO).start());
        scene.raw.say(&Reply::to(2).encode(b"on"));
        assert_eq!(&*waiting.outcome().unwrap().body, b"on");
    });
}

#[test]
fn frames_that_were_granted_and_are_not_there_cost_the_deadline_at_most() {
    everywhere(|world| {
        let mut scene = Scene::open(world, Welcome { frames: 1000, ..Welcome::to(16) });
        let nic = scene.client.rpc().nic().clone();
        let after = Duration::from_millis(200);
        let client = scene.client.clone();
        let payload = buffer(&nic, 1000);
        let outcome = within_patience("the call", move || client.call(DIGEST).payload(payload).deadline(after).wait());
        assert_eq!(outcome.unwrap_err().error, CallError::DeadlinePassed { after });
        assert_eq!(scene.raw.hear()[..], raw::about(5, 1)[..]);
        let waiting = scene.called(|client| client.call(ECHO).start());
        scene.raw.say(&Reply::to(2).encode(b"on"));
        assert_eq!(&*waiting.outcome().unwrap().body, b"on");
    });
}

#[test]
fn an_answer_that_is_longer_than_the_room_does_not_land_beyond_it() {
    everywhere(|world| {
        let mut scene = Scene::open(world, Welcome::to(16));
        let region = scene.client.rpc().nic().register(10_000).unwrap();
        let mut beyond = region.slice(100..10_000).unwrap();
        beyond.fill(0xa5);
        let room = region.slice(0..100).unwrap();
        let after = Duration::from_secs(2);
        let waiting = scene.called(|client| client.call(FETCH).into(room).deadline(after).start());
        scene.raw.say_with(&Reply::to(1).encode(b""), &[1; 5000], 1);
        let outcome = waiting.outcome();
        let error = outcome.expect_err("an answer that does not fit").error;
        assert!(matches!(error, CallError::OutcomeUnknown(_) | CallError::DeadlinePassed { .. }), "{error}");
        assert!(beyond.iter().all(|byte| *byte == 0xa5));
    });
}

#[test]
fn a_payload_for_another_call_is_not_an_answer() {
    everywhere(|world| {
        let mut scene = Scene::open(world, Welcome::to(16));
        let nic = scene.client.rpc().nic().clone();
        let [one, two] = [0, 1].map(|_| buffer(&nic, 100));
        let first = scene.called(|client| client.call(FETCH).into(one).start());
        let second = scene.called(|client| client.call(FETCH).into(two).start());
        scene.raw.say_with(&Reply::to(1).encode(b""), &[1; 100], 2);
        first.has_unknown_outcome("an answer at another's place");
        second.has_unknown_outcome("an answer at another's place");
    });
}
