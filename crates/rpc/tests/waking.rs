//! Whoever waits is told, whoever else takes what has come: wake-ups that could be lost.

use crate::support::raw::{self, Raw, Welcome};
use crate::support::service::{AWAIT_GATE, ECHO, ECHO_ON_POOL, RESULT, SLEEP, encoded};
use crate::support::{A_WHILE, Over, block_on, cpu_time, everywhere, until, window, within_patience};
use highwire_rpc::{Answer, CallError, ClientOptions, Failed, Pending};
use std::time::{Duration, Instant};

#[test]
fn a_thread_has_its_answer_though_another_took_it_from_the_line() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let over = Over::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.is_over() {
                    client.poll();
                }
            });
            let _ended = over.at_the_end();
            for _ in 0..100 {
                let waiting = client.clone();
                // On the pool, so that the one who waits has gone to sleep when the answer comes.
                let call = move || waiting.call(SLEEP).arguments(&encoded(&1u64)).wait().map(|_| ());
                within_patience("the call", call).unwrap();
            }
        });
    });
}

#[test]
fn a_thread_has_its_answer_though_others_hold_the_lock_when_it_comes() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let over = Over::default();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.is_over() {
                        client.outstanding();
                    }
                });
            }
            let _ended = over.at_the_end();
            let rounds = Instant::now() + Duration::from_secs(1);
            while Instant::now() < rounds {
                let waiting = client.clone();
                within_patience("the call", move || waiting.call(ECHO_ON_POOL).wait().map(|_| ())).unwrap();
            }
        });
    });
}

/// One call holds the only place while a thread waits for one; `free` lets the place go.
fn place_is_freed_by(free: impl Fn(Pending, &dyn Fn()) + Copy) {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(1));
        let held = client.call(AWAIT_GATE).start();
        until("the call that holds the place", || served.service.begun() == 1);
        let waiting = client.clone();
        let waiting = std::thread::spawn(move || waiting.call(ECHO).arguments(b"next").wait());
        // It waits for a place by now, most of the time.
        std::thread::sleep(A_WHILE);
        free(held, &|| served.service.gate.open());
        let answer = within_patience("the thread that waits for a place", move || waiting.join().unwrap());
        assert_eq!(&*answer.unwrap().body, b"next");
    });
}

#[test]
fn a_thread_that_waits_for_a_place_has_that_of_a_call_that_is_dropped() {
    place_is_freed_by(|held, _| drop(held));
}

#[test]
fn a_thread_that_waits_for_a_place_has_that_of_a_call_that_is_cancelled() {
    place_is_freed_by(|held, _| assert_eq!(held.cancel().unwrap_err().error, CallError::Cancelled));
}

#[test]
fn a_thread_that_waits_for_a_place_has_that_of_a_call_that_is_answered_to_a_task() {
    place_is_freed_by(|held, open| {
        open();
        block_on(held).unwrap();
    });
}

#[test]
fn a_thread_that_waits_for_a_place_has_that_of_a_continuation() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(1));
        client.call(AWAIT_GATE).then(|outcome| drop(outcome.unwrap()));
        let waiting = client.clone();
        let waiting = std::thread::spawn(move || waiting.call(ECHO).wait().map(|_| ()));
        std::thread::sleep(A_WHILE);
        served.service.gate.open();
        within_patience("the thread that waits for a place", move || waiting.join().unwrap()).unwrap();
    });
}

#[test]
fn a_task_that_waits_for_a_place_has_that_of_a_call_that_is_dropped() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(1));
        let held = client.call(AWAIT_GATE).start();
        let next = client.call(ECHO).arguments(b"next").start();
        let waiting = std::thread::spawn(move || block_on(next));
        std::thread::sleep(A_WHILE);
        drop(held);
        let answer = within_patience("the task that waits for a place", move || waiting.join().unwrap());
        assert_eq!(&*answer.unwrap().body, b"next");
    });
}

#[test]
fn answers_that_found_no_room_come_as_soon_as_somebody_reads() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(2048));
        // Far more than the line holds, and nobody reads while they are made.
        let pending: Vec<Pending> =
            (0..1500).map(|_| client.call(RESULT).arguments(&encoded(&4000u32)).start()).collect();
        std::thread::sleep(A_WHILE);
        let outcomes = within_patience("the calls", || pending.into_iter().map(Pending::wait).collect::<Vec<_>>());
        assert!(outcomes.iter().all(|outcome| outcome.as_ref().is_ok_and(|answer| answer.body.len() == 4000)));
    });
}

#[test]
fn calls_that_found_no_room_leave_as_soon_as_the_server_reads() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(2048));
        let arguments = [5; 4000];
        let pending: Vec<Pending> =
            (0..1000).map(|_| client.call(ECHO_ON_POOL).arguments(&arguments).start()).collect();
        let outcomes = within_patience("the calls", move || {
            // Backwards, and by task: the driver is the only one to send what waits.
            pending.into_iter().rev().map(block_on).collect::<Vec<_>>()
        });
        assert!(outcomes.iter().all(|outcome| outcome.as_ref().is_ok_and(|answer| *answer.body == arguments)));
    });
}

/// A server that takes a few calls, does something, and has them wait: all who wait must hear of it.
fn everybody_who_waits_hears(end: fn(&mut Raw), expected: fn(&Result<Answer, Failed>) -> bool) {
    everywhere(|world| {
        let nic = world.nic();
        let listener = nic.listen(&world.address()).unwrap();
        let address = listener.address().to_owned();
        let options = ClientOptions { reconnect_for: Duration::from_millis(200), ..ClientOptions::default() };
        let options = ClientOptions { connect_timeout: Duration::from_millis(1500), ..options };
        let connecting = {
            let (rpc, address) = (world.rpc(), address.clone());
            std::thread::spawn(move || rpc.connect_with(&address, options).unwrap())
        };
        let mut server = Raw::accept(&nic, &listener);
        let _ = raw::session_of(&server.hear());
        server.say(&Welcome::to(256).encode());
        let client = connecting.join().unwrap();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let client = client.clone();
                std::thread::spawn(move || match thread % 2 {
                    0 => client.call(ECHO).wait(),
                    _ => block_on(client.call(ECHO).start()),
                })
            })
            .collect();
        for _ in 0..4 {
            assert_eq!(server.hear()[0], 3);
        }
        // All of them are asleep by now, most of the time.
        std::thread::sleep(A_WHILE);
        drop(listener);
        end(&mut server);
        for thread in threads {
            let outcome = within_patience("who waits", move || thread.join().unwrap());
            assert!(expected(&outcome), "{outcome:?}");
        }
    });
}

fn is_unknown(outcome: &Result<Answer, Failed>) -> bool {
    matches!(outcome, Err(Failed { error: CallError::OutcomeUnknown(_), .. }))
}

#[test]
fn everybody_who_waits_hears_of_a_server_that_leaves() {
    everybody_who_waits_hears(|server| server.say(&raw::leaving(raw::SHUTDOWN)), is_unknown);
}

#[test]
fn everybody_who_waits_hears_of_a_server_that_talks_nonsense() {
    everybody_who_waits_hears(|server| server.say(&[0xff; 50]), is_unknown);
}

#[test]
fn everybody_who_waits_hears_of_a_session_that_was_taken() {
    everybody_who_waits_hears(|server| server.say(&raw::leaving(raw::SESSION_TAKEN)), is_unknown);
}

#[test]
fn everybody_who_waits_hears_when_all_answers_come_at_once() {
    everybody_who_waits_hears(
        |server| (1..=4).for_each(|sequence| server.say(&raw::Reply::to(sequence).encode(&[]))),
        Result::is_ok,
    );
}

#[test]
fn the_driver_sleeps_while_answers_lie_that_nobody_fetches() {
    everywhere(|world| {
        let served = world.serve();
        let rpc = world.rpc();
        let clients = [0, 1].map(|_| rpc.connect(&served.address).unwrap());
        // Answered at once, and left lying: nobody waits for it now.
        let lying = clients[0].call(ECHO).start();
        let waiting = clients[1].call(AWAIT_GATE).start();
        let waiting = std::thread::spawn(move || block_on(waiting));
        until("the call at the server", || served.service.begun() == 1);
        std::thread::sleep(Duration::from_millis(300));
        let before = cpu_time();
        std::thread::sleep(Duration::from_secs(1));
        let used = cpu_time() - before;
        assert!(used < Duration::from_millis(100), "{used:?} of CPU in a second");
        served.service.gate.open();
        within_patience("the task", move || waiting.join().unwrap()).unwrap();
        lying.wait().unwrap();
    });
}
