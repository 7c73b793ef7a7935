//! Clients that say what cannot be: the server ends their connection, and nobody else notices.

use crate::support::raw::{self, BODY_IN_PAYLOAD, Call, Head, Hello, IS_OFFER, MALFORMED, Raw};
use crate::support::service::{COUNT, DIGEST, ECHO, ECHO_ON_POOL, FETCH, RESULT, decoded, digest, encoded};
use crate::support::{Served, World, buffer_of, content, everywhere, open_descriptors, until, within_patience};
use highwire_rpc::{Client, ServerOptions};
use highwire_vi::Nic;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A server that is to live, and an honest client of it.
struct Scene {
    served: Served,
    honest: Client,
    nic: Nic,
}

impl Scene {
    fn open(world: &World<'_>, options: ServerOptions) -> Scene {
        let served = world.serve_with(options);
        let honest = world.client(&served.address);
        Scene { served, honest, nic: world.nic() }
    }

    /// A raw client that has been welcomed.
    fn welcomed(&self) -> (Raw, raw::Welcome) {
        static NEXT: AtomicU64 = AtomicU64::new(1000);
        Raw::hello(&self.nic, &self.served.address, Hello::new(NEXT.fetch_add(1, Ordering::Relaxed).into()))
    }

    fn stranger(&self) -> Raw {
        Raw::connect(&self.nic, &self.served.address)
    }

    /// The honest client is served as before.
    fn goes_on(&self) {
        let honest = self.honest.clone();
        let calls = move || {
            assert_eq!(&*honest.call(ECHO).arguments(b"on").wait().unwrap().body, b"on");
            assert_eq!(&*honest.call(ECHO_ON_POOL).arguments(b"and on").wait().unwrap().body, b"and on");
            let bytes = content(1, 70_000);
            let payload = buffer_of(honest.rpc().nic(), &bytes);
            let answer = honest.call(DIGEST).payload(payload).wait().unwrap();
            assert_eq!(decoded::<(u64, u64)>(&answer.body), digest(&bytes));
        };
        within_patience("an honest client", calls);
    }

    /// The last word that it hears is that it is malformed.
    fn is_turned_out(mut raw: Raw, what: &str) {
        let last = raw.hear_out();
        let last = last.as_deref().and_then(|message| message.get(..2));
        assert_eq!(last, Some(&[8, MALFORMED][..]), "{what}");
    }
}

#[test]
fn nonsense_ends_the_connection_and_nothing_else() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let mut stray = Head::of(5);
        stray.put(8, &1u64.to_le_bytes()).put(20, &[1]);
        let far: Vec<u8> = Call::new(ECHO, 1 << 60).encode(b"");
        let nonsense: [(&str, Vec<u8>); 11] = [
            ("nothing", vec![]),
            ("one byte", vec![3]),
            ("less than a head", vec![3; 31]),
            ("ones", vec![0xff; 32]),
            ("zeros", vec![0; 32]),
            ("as much as fits", vec![0x5a; 4224]),
            ("a kind that is none", Head::of(9).and(&[])),
            ("an unused byte", stray.and(&[])),
            ("a call without number", Call::new(ECHO, 0).encode(b"")),
            ("a number out of range", far),
            ("a flag that is none", Call { flags: 4, ..Call::new(ECHO, 1) }.encode(b"")),
        ];
        for (what, message) in nonsense {
            for welcomed in [false, true] {
                let mut raw = if welcomed { scene.welcomed().0 } else { scene.stranger() };
                raw.say(&message);
                Scene::is_turned_out(raw, what);
            }
        }
        scene.goes_on();
    });
}

#[test]
fn every_kind_of_message_at_the_wrong_time_ends_the_connection_or_does_nothing() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let welcome = raw::Welcome::to(16).encode();
        let out_of_place: [(&str, Vec<u8>); 6] = [
            ("a welcome", welcome),
            ("an answer", raw::Reply::to(1).encode(b"x")),
            ("room", raw::about(6, 1)),
            ("a payload without one", raw::about(7, 1)),
            ("leaving", raw::leaving(1)),
            ("another hello", Hello { attempt: 2, ..Hello::new(5) }.encode()),
        ];
        for (what, message) in &out_of_place {
            let (mut raw, _) = scene.welcomed();
            raw.say(message);
            Scene::is_turned_out(raw, what);
        }
        for (what, message) in &out_of_place[..5] {
            let mut raw = scene.stranger();
            raw.say(message);
            Scene::is_turned_out(raw, what);
        }
        let mut raw = scene.stranger();
        raw.say(&Call::new(COUNT, 1).encode(&encoded(&1u64)));
        Scene::is_turned_out(raw, "a call before the hello");
        assert_eq!(scene.served.service.count_of(1), 0);
        // Who cancels what never was does no harm.
        let (mut raw, _) = scene.welcomed();
        for sequence in [1, 2, 77, (1 << 60) - 1] {
            raw.say(&raw::about(5, sequence));
        }
        raw.say(&Call::new(ECHO, 1).encode(b"still here"));
        assert_eq!(raw::answered(&raw.hear()).body, b"still here");
        scene.goes_on();
    });
}

#[test]
fn a_hello_that_cannot_be_is_refused_with_the_reason() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        for window in [0, 3, 1 << 20, u32::MAX] {
            let mut raw = scene.stranger();
            raw.say(&Hello { window, ..Hello::new(1) }.encode());
            assert_eq!(raw.hear()[..2], [8, 3], "a window of {window}");
        }
        let mut other_version = Hello::new(1).encode();
        other_version[2] = 9;
        let mut raw = scene.stranger();
        raw.say(&other_version);
        assert_eq!(raw.hear()[..2], [8, 4]);
        // Numbers that are only strange are no reason.
        let strange = Hello { acknowledged: u64::MAX, attempt: u32::MAX, incarnation: u64::MAX, ..Hello::new(2) };
        let (mut raw, welcome) = Raw::hello(&scene.nic, &scene.served.address, strange);
        assert!(!welcome.known);
        raw.say(&Call::new(ECHO, 1).encode(b""));
        scene.goes_on();
    });
}

#[test]
fn calls_outside_the_window_end_the_connection() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        for (sequence, unanswered) in [(1, 1), (1, u32::MAX), (17, 16), (100, 99), ((1 << 60) - 1, 16)] {
            let (mut raw, _) = scene.welcomed();
            raw.say(&Call { unanswered, ..Call::new(COUNT, sequence) }.encode(&encoded(&5u64)));
            Scene::is_turned_out(raw, &format!("call {sequence} with {unanswered} before it"));
        }
        assert_eq!(scene.served.service.count_of(5), 0);
        scene.goes_on();
    });
}

#[test]
fn lies_about_lengths_end_the_connection() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        for body in [1, 4, 1000, u16::MAX] {
            let (mut raw, _) = scene.welcomed();
            raw.say(&Call { body: Some(body), ..Call::new(ECHO, 1) }.encode(b"abc"));
            Scene::is_turned_out(raw, "a body that is not as long as it says");
        }
        // Arguments that are said to be in a payload, which is shorter.
        let (mut raw, welcome) = scene.welcomed();
        assert!(welcome.frames > 0);
        let call = Call { flags: BODY_IN_PAYLOAD, body: Some(5000), ..Call::new(ECHO, 1) };
        raw.say_with(&call.encode(b""), &[7; 100], raw::frame_token(0));
        Scene::is_turned_out(raw, "arguments beyond the payload");
        // Or in one that is not there at all.
        let (mut raw, _) = scene.welcomed();
        let call = Call { flags: BODY_IN_PAYLOAD, body: Some(60), ..Call::new(FETCH, 1) };
        raw.say(&call.encode(b""));
        let heard = raw.next().unwrap();
        assert!(heard.message[..2] == [8, MALFORMED] || raw::answered(&heard.message).status != raw::DONE);
        // An offer that does not say how long it is.
        let (mut raw, _) = scene.welcomed();
        let mut offer = Call { flags: IS_OFFER, ..Call::new(ECHO, 1) }.encode(&[0; 4]);
        offer.truncate(34);
        raw.say(&offer);
        Scene::is_turned_out(raw, "an offer without length");
        scene.goes_on();
    });
}

#[test]
fn payloads_that_nobody_made_room_for_land_nowhere() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let (mut raw, welcome) = scene.welcomed();
        let call = |sequence| Call::new(COUNT, sequence).encode(&encoded(&6u64));
        for token in [0, 1, raw::frame_token(welcome.frames), raw::frame_token(u32::MAX), raw::offer_token(1), u64::MAX]
        {
            raw.say_with(&call(1), &content(1, 10_000), token);
        }
        raw.say(&Call::new(ECHO, 2).encode(b"still here"));
        assert_eq!(raw::answered(&raw.hear()).body, b"still here");
        assert_eq!(scene.served.service.count_of(6), 0);
        // Too long for the frame: that is no message that could be taken.
        raw.say_with(&call(3), &content(1, 70_000), raw::frame_token(0));
        scene.goes_on();
        assert_eq!(scene.served.service.count_of(6), 0);
    });
}

#[test]
fn a_frame_is_not_used_twice() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let (mut raw, _) = scene.welcomed();
        for sequence in [1, 2] {
            raw.say_with(&Call::new(DIGEST, sequence).encode(b""), &content(sequence, 100), raw::frame_token(0));
        }
        raw.say(&Call::new(ECHO, 3).encode(b"last"));
        assert_eq!(raw::answered(&raw.hear()).sequence, 1);
        assert_eq!(raw::answered(&raw.hear()).sequence, 3);
        scene.goes_on();
    });
}

#[test]
fn offers_without_end_end_the_connection_and_take_no_memory() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions { window_max: 256, ..ServerOptions::default() });
        let before = resident_bytes();
        let (mut raw, _) = scene.welcomed();
        let length = (1u32 << 20).to_le_bytes();
        for sequence in 1..2000 {
            raw.say(&Call { flags: IS_OFFER, ..Call::new(DIGEST, sequence) }.encode(&length));
            // What it hears is of no interest: that it can go on saying so is.
            while raw.vi.poll().is_some() {}
            if matches!(raw.vi.state(), highwire_vi::State::Ended(_)) {
                break;
            }
        }
        raw.await_end();
        let grown = resident_bytes().saturating_sub(before);
        assert!(grown < 100 << 20, "{grown} bytes for offers of nothing");
        scene.goes_on();
    });
}

#[test]
fn offers_of_nothing_and_of_too_much_are_answered() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let (mut raw, _) = scene.welcomed();
        for (sequence, length) in [(1, u32::MAX), (2, (256 << 20) + 1), (3, 0)] {
            raw.say(&Call { flags: IS_OFFER, ..Call::new(DIGEST, sequence) }.encode(&length.to_le_bytes()));
            let answer = raw::answered(&raw.hear());
            assert_eq!((answer.sequence, answer.status), (sequence, 6));
        }
        // A payload for an offer that came twice, was cancelled, or is shorter than was said.
        let offer = |sequence| Call { flags: IS_OFFER, ..Call::new(DIGEST, sequence) }.encode(&500u32.to_le_bytes());
        raw.say(&offer(4));
        assert_eq!(raw.hear()[..], raw::about(6, 4)[..]);
        raw.say(&raw::about(5, 4));
        raw.say_with(&raw::about(7, 4), &[1; 500], raw::offer_token(4));
        raw.say(&offer(5));
        assert_eq!(raw.hear()[..], raw::about(6, 5)[..]);
        raw.say_with(&raw::about(7, 5), &[1; 300], raw::offer_token(5));
        let answer = raw::answered(&raw.hear());
        assert_eq!((answer.sequence, decoded::<(u64, u64)>(&answer.body)), (5, digest(&[1; 300])));
        scene.goes_on();
    });
}

#[test]
fn who_never_reads_is_put_out_and_holds_nobody_up() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let vi = scene.nic.connect(&scene.served.address).unwrap();
        let mut raw = Raw::silent(&scene.nic, vi);
        raw.say(&Hello { window: 256, ..Hello::new(50) }.encode());
        let arguments = encoded(&500u32);
        let mut ended = false;
        for sequence in 1..20_000u64 {
            let message = Call::new(RESULT, sequence).encode(&arguments);
            let mut full = 0;
            while let Err(error) = raw.vi.send_bytes(highwire_vi::QUIET, &message) {
                ended = !matches!(error, highwire_vi::PostError::NoRoom { .. });
                full += 1;
                if ended || full > 20_000 {
                    break;
                }
                std::thread::sleep(Duration::from_micros(50));
                // What was sent is done with; nothing is received, as nothing was posted.
                while raw.vi.sender().poll().is_some() {}
            }
            if ended || full > 20_000 {
                break;
            }
            if sequence % 5_000 == 0 {
                scene.goes_on();
            }
        }
        scene.goes_on();
        // It may have said it all before the server came to it.
        raw.await_end();
    });
}

#[test]
fn who_vanishes_in_the_middle_of_a_payload_is_forgotten() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let mut before = usize::MAX;
        for round in 0..10 {
            if round == 1 {
                // What the server opens once it has opened by now.
                scene.goes_on();
                std::thread::sleep(Duration::from_millis(300));
                before = open_descriptors();
            }
            // Memory that was handed over is kept as long as its owner lives: this one does not live long.
            let (mut raw, _) = Raw::hello(&world.nic(), &scene.served.address, Hello::new(round));
            let length = (1u32 << 20).to_le_bytes();
            raw.say(&Call { flags: IS_OFFER, ..Call::new(DIGEST, 1) }.encode(&length));
            assert_eq!(raw.hear()[0], 6);
            raw.say_with(&raw::about(7, 1), &content(1, 1 << 20), raw::offer_token(1));
            drop(raw);
        }
        scene.goes_on();
        until("descriptors that are closed", || open_descriptors() <= before + 2);
    });
}

fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("the size of this process");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages") * 4096
}

#[test]
fn who_does_not_say_hello_is_sent_away() {
    everywhere(|world| {
        let scene = Scene::open(world, ServerOptions::default());
        let mut raw = scene.stranger();
        raw.await_end();
        scene.goes_on();
    });
}
