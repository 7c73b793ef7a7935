//! The pool of a server, and how a server goes.

use crate::support::service::{AWAIT_GATE, COUNT_BEHIND_GATE, ECHO, ECHO_ON_POOL, decoded, encoded};
use crate::support::{PATIENCE, block_on, elapsed_within, everywhere, until, within_patience};
use highwire_rpc::{CallError, ClientOptions, Pending, ServerOptions, StillRunning};
use std::time::{Duration, Instant};

/// Gives up soon after the server is gone.
fn impatient() -> ClientOptions {
    ClientOptions {
        reconnect_for: Duration::from_millis(200),
        connect_timeout: Duration::from_millis(1500),
        ..ClientOptions::default()
    }
}

#[test]
fn a_slow_handler_stalls_nobody() {
    everywhere(|world| {
        let served = world.serve_with(ServerOptions { workers: 2, ..ServerOptions::default() });
        let [client, other] = [0, 1].map(|_| world.client(&served.address));
        let slow = client.call(AWAIT_GATE).start();
        until("the slow call", || served.service.begun() == 1);
        let rounds = {
            let (client, other) = (client.clone(), other.clone());
            move || {
                for _ in 0..50 {
                    for client in [&client, &other] {
                        client.call(ECHO).wait().unwrap();
                        client.call(ECHO_ON_POOL).wait().unwrap();
                        block_on(client.call(ECHO).start()).unwrap();
                    }
                }
            }
        };
        within_patience("quick calls", rounds);
        served.service.gate.open();
        slow.wait().unwrap();
    });
}

#[test]
fn with_the_whole_pool_busy_quick_calls_go_on_and_others_are_refused_at_the_limit() {
    everywhere(|world| {
        let options = ServerOptions { workers: 2, waiting_max: 3, ..ServerOptions::default() };
        let served = world.serve_with(options);
        let client = world.client(&served.address);
        let mut taken: Vec<Pending> = Vec::new();
        for number in 0..2 {
            taken.push(client.call(AWAIT_GATE).arguments(&[number]).start());
        }
        until("a pool that is busy", || served.service.begun() == 2);
        for number in 2..5 {
            taken.push(client.call(AWAIT_GATE).arguments(&[number]).start());
        }
        client.call(ECHO).wait().unwrap();
        for _ in 0..3 {
            assert_eq!(client.call(AWAIT_GATE).wait().unwrap_err().error, CallError::ServerBusy);
        }
        served.service.gate.open();
        for (number, pending) in taken.into_iter().enumerate() {
            assert_eq!(*pending.wait().unwrap().body, [number as u8]);
        }
        client.call(ECHO_ON_POOL).wait().unwrap();
    });
}

#[test]
fn a_server_that_leaves_finishes_what_it_took_and_begins_nothing_more() {
    everywhere(|world| {
        let mut served = world.serve_with(ServerOptions { workers: 1, ..ServerOptions::default() });
        let client = world.client_with(&served.address, impatient());
        let other = world.client_with(&served.address, impatient());
        let taken: Vec<Pending> =
            (0..5u64).map(|number| client.call(COUNT_BEHIND_GATE).arguments(&encoded(&number)).start()).collect();
        client.call(ECHO).wait().unwrap();
        until("the first of them", || served.service.begun() == 1);
        let server = served.server.take().unwrap();
        let leaving = std::thread::spawn(move || server.leave(PATIENCE));
        until("that the server leaves", || {
            let outcome = other.call(ECHO).wait();
            outcome.is_err_and(|failed| failed.error == CallError::ServerLeaving)
        });
        let late = client.call(COUNT_BEHIND_GATE).arguments(&encoded(&9u64)).wait().unwrap_err();
        assert_eq!(late.error, CallError::ServerLeaving);
        served.service.gate.open();
        for pending in taken {
            assert_eq!(decoded::<u32>(&pending.wait().unwrap().body), 1);
        }
        assert_eq!(within_patience("leaving", move || leaving.join().unwrap()), Ok(()));
        assert_eq!(served.service.count_of(9), 0);
        let gone = within_patience("a call to nobody", move || client.call(ECHO).wait().map(|_| ()));
        let error = gone.unwrap_err().error;
        assert!(matches!(error, CallError::NotSent(_) | CallError::OutcomeUnknown(_)), "{error}");
    });
}

#[test]
fn a_server_with_a_stuck_handler_leaves_in_time_and_says_so() {
    everywhere(|world| {
        let mut served = world.serve();
        let client = world.client_with(&served.address, impatient());
        let stuck = client.call(AWAIT_GATE).start();
        until("the stuck call", || served.service.begun() == 1);
        let server = served.server.take().unwrap();
        let began = Instant::now();
        let left = within_patience("leaving", move || server.leave(Duration::from_millis(200)));
        assert_eq!(left, Err(StillRunning { calls: 1, clients: 0 }));
        elapsed_within(began, PATIENCE / 2);
        let outcome = within_patience("the stuck call", move || stuck.wait().map(|_| ()));
        assert!(matches!(outcome.unwrap_err().error, CallError::OutcomeUnknown(_)));
    });
}

#[test]
fn a_server_that_is_dropped_leaves_nobody_waiting() {
    everywhere(|world| {
        for is_stuck in [false, true] {
            let mut served = world.serve();
            let client = world.client_with(&served.address, impatient());
            let stuck = is_stuck.then(|| client.call(AWAIT_GATE).start());
            if is_stuck {
                until("the stuck call", || served.service.begun() == 1);
            }
            let server = served.server.take().unwrap();
            within_patience("dropping the server", move || drop(server));
            if let Some(stuck) = stuck {
                let outcome = within_patience("the stuck call", move || stuck.wait().map(|_| ()));
                assert!(matches!(outcome.unwrap_err().error, CallError::OutcomeUnknown(_)));
            }
            if is_stuck {
                continue;
            }
            let after = client.clone();
            let outcome = within_patience("a call to nobody", move || after.call(ECHO).wait().map(|_| ()));
            let error = outcome.unwrap_err().error;
            assert!(matches!(error, CallError::NotSent(_) | CallError::OutcomeUnknown(_)), "{error}");
        }
    });
}

#[test]
fn another_server_at_the_same_address_is_found_again() {
    everywhere(|world| {
        let mut served = world.serve();
        let client = world.client(&served.address);
        client.call(ECHO).wait().unwrap();
        served.server.take().unwrap().leave(PATIENCE).unwrap();
        let again = world.rpc();
        let address = served.address.clone();
        let services = served.service.services();
        let mut server = None;
        until("another server", || {
            server = again.serve(&address, services.clone()).ok();
            server.is_some()
        });
        // What was lost with the first server is lost; the next call finds the second.
        until("a call that is answered", || client.call(ECHO).wait().is_ok());
        assert_eq!(&*block_on(client.call(ECHO).arguments(b"anew").start()).unwrap().body, b"anew");
    });
}

#[test]
fn a_window_larger_than_the_server_gives_is_refused() {
    everywhere(|world| {
        let served = world.serve_with(ServerOptions { window_max: 16, ..ServerOptions::default() });
        let rpc = world.rpc();
        let error = rpc.connect(&served.address).unwrap_err();
        assert!(matches!(error, highwire_rpc::OpenError::Refused { why: highwire_rpc::Leaving::Full, .. }), "{error}");
        let client = rpc.connect_with(&served.address, ClientOptions { window: 16, ..Default::default() }).unwrap();
        client.call(ECHO).wait().unwrap();
    });
}
