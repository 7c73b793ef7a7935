//! Deadlines and giving up: whoever waits goes on in time, and what has not begun does not begin.

use crate::support::raw::{self, Call, Hello, Raw};
use crate::support::service::{AWAIT_GATE, COUNT_BEHIND_GATE, ECHO, ECHO_ON_POOL, encoded};
use crate::support::{
    A_WHILE, PATIENCE, block_on, buffer, elapsed_within, everywhere, places, until, window, within_patience,
};
use highwire_rpc::{CallError, ClientOptions, ServerOptions};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SHORT: Duration = Duration::from_millis(50);

fn passed() -> CallError {
    CallError::DeadlinePassed { after: SHORT }
}

#[test]
fn a_deadline_ends_the_wait_of_a_thread_and_gives_the_buffers_back() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for bytes in [100, 1 << 20] {
            let began = Instant::now();
            let room = buffer(&nic, bytes);
            let place = (room.region_id(), room.offset(), bytes);
            let made = client.call(AWAIT_GATE).payload(buffer(&nic, bytes)).into(room).deadline(SHORT);
            let failed = made.wait().unwrap_err();
            assert_eq!((failed.error, places(failed.room)), (passed(), vec![place]));
            assert!(began.elapsed() >= SHORT);
            elapsed_within(began, PATIENCE / 2);
        }
        let pending = client.call(AWAIT_GATE).deadline(SHORT).start();
        assert_eq!(pending.wait().unwrap_err().error, passed());
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn a_deadline_ends_futures_and_continuations_while_nobody_polls() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        let room = buffer(&nic, 100);
        let place = (room.region_id(), room.offset(), 100);
        let failed = block_on(client.call(AWAIT_GATE).into(room).deadline(SHORT).start()).unwrap_err();
        assert_eq!((failed.error, places(failed.room)), (passed(), vec![place]));
        let (done, outcome) = mpsc::channel();
        // A later deadline first, then an earlier one: the driver must not sleep through it.
        let later = done.clone();
        client.call(AWAIT_GATE).deadline(20 * SHORT).then(move |outcome| later.send(outcome.is_err()).unwrap());
        let room = buffer(&nic, 100);
        client.call(AWAIT_GATE).into(room).deadline(SHORT).then(move |outcome| {
            let failed = outcome.unwrap_err();
            done.send(failed.error == passed() && failed.room.total() == 100).unwrap();
        });
        for _ in 0..2 {
            assert_eq!(outcome.recv_timeout(PATIENCE), Ok(true));
        }
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn a_deadline_ends_the_wait_for_a_place() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(1));
        let _held = client.call(AWAIT_GATE).start();
        let nic = client.rpc().nic().clone();
        let failed = client.call(ECHO).payload(buffer(&nic, 9)).deadline(SHORT).wait().unwrap_err();
        assert_eq!((failed.error, failed.sent.total()), (passed(), 9));
        let failed = client.call(ECHO).payload(buffer(&nic, 9)).deadline(SHORT).start().wait().unwrap_err();
        assert_eq!((failed.error, failed.sent.total()), (passed(), 9));
        let failed = block_on(client.call(ECHO).payload(buffer(&nic, 9)).deadline(SHORT).start()).unwrap_err();
        assert_eq!((failed.error, failed.sent.total()), (passed(), 9));
    });
}

#[test]
fn a_deadline_ends_the_wait_for_a_lost_server() {
    everywhere(|world| {
        let mut served = world.serve();
        let options = ClientOptions { reconnect_for: PATIENCE * 2, ..ClientOptions::default() };
        let client = world.client_with(&served.address, options);
        drop(served.server.take());
        let call = move || {
            assert_eq!(client.call(ECHO).deadline(SHORT).wait().unwrap_err().error, passed());
            assert_eq!(block_on(client.call(ECHO).deadline(SHORT).start()).unwrap_err().error, passed());
            let (done, outcome) = mpsc::channel();
            client.call(ECHO).deadline(SHORT).then(move |outcome| done.send(outcome.unwrap_err().error).unwrap());
            assert_eq!(outcome.recv_timeout(PATIENCE), Ok(passed()));
        };
        within_patience("a call with a deadline", call);
    });
}

#[test]
fn what_has_not_begun_when_its_deadline_passes_does_not_begin() {
    everywhere(|world| {
        let served = world.serve_with(ServerOptions { workers: 1, ..ServerOptions::default() });
        let client = world.client(&served.address);
        let held = client.call(AWAIT_GATE).start();
        until("the call that holds the pool", || served.service.begun() == 1);
        let failed = client.call(COUNT_BEHIND_GATE).arguments(&encoded(&1u64)).deadline(SHORT).wait().unwrap_err();
        assert_eq!(failed.error, passed());
        // One that does not cancel, and is told.
        let (mut raw, _) = Raw::hello(&world.nic(), &served.address, Hello::new(1));
        raw.say(&Call { deadline_ms: 1, ..Call::new(COUNT_BEHIND_GATE, 1) }.encode(&encoded(&2u64)));
        std::thread::sleep(A_WHILE);
        served.service.gate.open();
        held.wait().unwrap();
        assert_eq!(raw::answered(&raw.hear()).status, raw::TOO_LATE);
        client.call(ECHO_ON_POOL).wait().unwrap();
        assert_eq!((served.service.count_of(1), served.service.count_of(2)), (0, 0));
    });
}

#[test]
fn what_was_given_up_before_it_began_does_not_begin() {
    everywhere(|world| {
        let served = world.serve_with(ServerOptions { workers: 1, ..ServerOptions::default() });
        let client = world.client(&served.address);
        let held = client.call(AWAIT_GATE).start();
        until("the call that holds the pool", || served.service.begun() == 1);
        drop(client.call(COUNT_BEHIND_GATE).arguments(&encoded(&1u64)).start());
        let cancelled = client.call(COUNT_BEHIND_GATE).arguments(&encoded(&2u64)).start().cancel();
        assert_eq!(cancelled.unwrap_err().error, CallError::Cancelled);
        // Answered in order after them, so that the server knows of both.
        client.call(ECHO).wait().unwrap();
        served.service.gate.open();
        held.wait().unwrap();
        client.call(ECHO_ON_POOL).wait().unwrap();
        assert_eq!((served.service.count_of(1), served.service.count_of(2)), (0, 0));
    });
}

#[test]
fn late_answers_are_nobodys() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(4));
        for round in 0..10u8 {
            served.service.gate.close();
            for _ in 0..3 {
                let outcome = client.call(AWAIT_GATE).arguments(b"late").deadline(Duration::from_millis(2)).wait();
                assert!(outcome.is_err());
            }
            served.service.gate.open();
            // These have the places of those that were given up.
            for call in 0..8 {
                assert_eq!(*client.call(ECHO_ON_POOL).arguments(&[round, call]).wait().unwrap().body, [round, call]);
            }
        }
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn a_deadline_beyond_all_time_is_none() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        client.call(ECHO).deadline(Duration::MAX).wait().unwrap();
        block_on(client.call(ECHO_ON_POOL).deadline(Duration::MAX).start()).unwrap();
    });
}

#[test]
fn an_answer_that_has_come_is_not_cancelled_any_more() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let pending = client.call(ECHO).arguments(b"here").start();
        // The second answer comes after the first.
        client.call(ECHO).wait().unwrap();
        assert_eq!(&*pending.cancel().unwrap().body, b"here");
    });
}
