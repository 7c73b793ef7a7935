//! Calls by thread, future and continuation, one at a time and many at once.

use crate::support::service::{AWAIT_GATE, ECHO, ECHO_ON_POOL, SLEEP, encoded};
use crate::support::{Over, PATIENCE, Woken, block_on, buffer, everywhere, places, until, window, within_patience};
use highwire_rpc::{Answer, CallError, Client, Failed, Lost, Pending};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Waker};

/// Arguments that no two calls share.
fn arguments(of: usize) -> Vec<u8> {
    format!("call {of}").into_bytes()
}

#[test]
fn a_blocking_call_has_the_answer_to_itself() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        for call in 0..100 {
            let method = if call % 4 == 0 { ECHO_ON_POOL } else { ECHO };
            let answer = client.call(method).arguments(&arguments(call)).wait().unwrap();
            assert_eq!(&*answer.body, &arguments(call)[..]);
            assert_eq!((answer.length, places(answer.payload), places(answer.sent)), (0, vec![], vec![]));
        }
        assert_eq!(client.outstanding(), 0);
    });
}

/// Runs many futures in one task; their outcomes, in order.
fn join(mut pending: Vec<Pending>) -> Vec<Result<Answer, Failed>> {
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut outcomes: Vec<Option<Result<Answer, Failed>>> = pending.iter().map(|_| None).collect();
    let mut seen = 0;
    loop {
        for (outcome, pending) in outcomes.iter_mut().zip(&mut pending) {
            if outcome.is_none()
                && let Poll::Ready(ready) = Pin::new(pending).poll(&mut Context::from_waker(&waker))
            {
                *outcome = Some(ready);
            }
        }
        if outcomes.iter().all(Option::is_some) {
            return outcomes.into_iter().flatten().collect();
        }
        seen = woken.await_more_than(seen);
    }
}

#[test]
fn hundreds_of_futures_are_outstanding_at_once_and_each_has_its_own_answer() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(512));
        let start = |call| {
            let method = if call % 2 == 0 { ECHO_ON_POOL } else { ECHO };
            client.call(method).arguments(&arguments(call)).start()
        };
        for (call, outcome) in join((0..400).map(start).collect()).into_iter().enumerate() {
            assert_eq!(&*outcome.unwrap().body, &arguments(call)[..]);
        }
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn more_futures_than_the_window_holds_are_all_answered() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(4));
        let pending = (0..60).map(|call| client.call(ECHO_ON_POOL).arguments(&arguments(call)).start()).collect();
        for (call, outcome) in join(pending).into_iter().enumerate() {
            assert_eq!(&*outcome.unwrap().body, &arguments(call)[..]);
        }
    });
}

#[test]
fn only_the_last_waker_of_a_task_is_woken() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let mut pending = client.call(AWAIT_GATE).start();
        let [before, last] = [Arc::new(Woken::default()), Arc::new(Woken::default())];
        for woken in [&before, &last] {
            let waker = Waker::from(woken.clone());
            assert!(Pin::new(&mut pending).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        served.service.gate.open();
        last.await_more_than(0);
        assert_eq!(before.count(), 0);
        let waker = Waker::from(last.clone());
        assert!(Pin::new(&mut pending).poll(&mut Context::from_waker(&waker)).is_ready());
    });
}

#[test]
fn threads_that_await_while_nobody_polls_are_brought_their_answers() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let client = client.clone();
                scope.spawn(move || {
                    for call in (0..40).map(|call| thread * 1000 + call) {
                        let method = if call % 3 == 0 { ECHO_ON_POOL } else { ECHO };
                        let answer = block_on(client.call(method).arguments(&arguments(call)).start()).unwrap();
                        assert_eq!(&*answer.body, &arguments(call)[..]);
                    }
                });
            }
        });
    });
}

#[test]
fn an_awaited_call_can_be_waited_for_by_a_thread_instead() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let mut pending = client.call(AWAIT_GATE).arguments(b"either way").start();
        assert!(Pin::new(&mut pending).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let waiting = std::thread::spawn(move || pending.wait());
        served.service.gate.open();
        assert_eq!(&*within_patience("the thread", move || waiting.join().unwrap()).unwrap().body, b"either way");
    });
}

#[test]
fn a_continuation_runs_once_and_can_make_the_next_call() {
    fn chain(client: &Client, left: usize, done: mpsc::Sender<Result<(), CallError>>) {
        let again = client.clone();
        client.call(ECHO).arguments(&arguments(left)).then(move |outcome| match outcome {
            Ok(answer) => {
                assert_eq!(&*answer.body, &arguments(left)[..]);
                match left {
                    0 => done.send(Ok(())).unwrap(),
                    _ => chain(&again, left - 1, done),
                }
            }
            Err(failed) => done.send(Err(failed.error)).unwrap(),
        });
    }
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let (done, outcome) = mpsc::channel();
        for _ in 0..5 {
            chain(&client, 50, done.clone());
        }
        drop(done);
        for _ in 0..5 {
            assert_eq!(outcome.recv_timeout(PATIENCE), Ok(Ok(())), "nobody drives continuations");
        }
        assert_eq!(outcome.recv_timeout(PATIENCE), Err(mpsc::RecvTimeoutError::Disconnected));
    });
}

#[test]
fn whatever_blocks_inside_a_continuation_would_stall() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let (done, outcomes) = mpsc::channel();
        let inner = client.clone();
        client.call(ECHO).then(move |_| {
            done.send(inner.call(ECHO).wait().unwrap_err().error).unwrap();
            done.send(inner.call(ECHO).start().wait().unwrap_err().error).unwrap();
        });
        for _ in 0..2 {
            assert_eq!(outcomes.recv_timeout(PATIENCE), Ok(CallError::WouldStall));
        }
        // Elsewhere it may block as before.
        client.call(ECHO).wait().unwrap();
    });
}

#[test]
fn a_continuation_that_panics_stops_nobody() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        // Brought by the driver, as nobody else waits.
        client.call(ECHO_ON_POOL).then(|_| panic!("as the test wants"));
        until("the continuation", || client.outstanding() == 0);
        assert!(block_on(client.call(ECHO_ON_POOL).start()).is_ok());
        // Brought by a thread that waits for a call of its own.
        let (done, outcome) = mpsc::channel();
        client.call(ECHO).then(|_| panic!("as the test wants"));
        client.call(ECHO).then(move |outcome| done.send(outcome.is_ok()).unwrap());
        let waiting = client.clone();
        let waited = std::thread::spawn(move || {
            waiting.call(ECHO_ON_POOL).wait().unwrap();
            waiting.call(ECHO).wait().unwrap();
        });
        assert_eq!(outcome.recv_timeout(PATIENCE), Ok(true));
        waited.join().expect("a thread that has made its calls");
    });
}

#[test]
fn a_continuation_at_a_full_window_hears_of_it_and_has_its_buffers() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(2));
        let held: Vec<Pending> = (0..2).map(|_| client.call(AWAIT_GATE).start()).collect();
        let (done, outcome) = mpsc::channel();
        let [payload, room] = [100, 200].map(|bytes| buffer(client.rpc().nic(), bytes));
        let [payload_place, room_place] =
            [&payload, &room].map(|buffer| (buffer.region_id(), buffer.offset(), buffer.len()));
        client.call(ECHO).payload(payload).into(room).then(move |outcome| done.send(outcome).unwrap());
        let Ok(Err(Failed { error, sent, room })) = outcome.recv_timeout(PATIENCE) else { panic!("it was refused") };
        assert_eq!(error, CallError::WindowFull { outstanding: 2 });
        assert_eq!((places(sent), places(room)), (vec![payload_place], vec![room_place]));
        served.service.gate.open();
        for pending in held {
            pending.wait().unwrap();
        }
    });
}

#[test]
fn answers_come_in_any_order() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let slow = client.call(AWAIT_GATE).arguments(b"first").start();
        let quick: Vec<Pending> = (0..50).map(|call| client.call(ECHO).arguments(&arguments(call)).start()).collect();
        // The last begun is the first to be asked for.
        for (call, pending) in quick.into_iter().enumerate().rev() {
            assert_eq!(&*pending.wait().unwrap().body, &arguments(call)[..]);
        }
        served.service.gate.open();
        assert_eq!(&*slow.wait().unwrap().body, b"first");
    });
}

#[test]
fn threads_share_a_client_and_each_has_its_own_answers() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client_with(&served.address, window(4));
        let over = Over::default();
        let work = |thread: usize| {
            for call in (0..60).map(|call| thread * 1000 + call) {
                let method = if (call + thread).is_multiple_of(2) { ECHO_ON_POOL } else { ECHO };
                let made = arguments(call);
                let made = client.call(method).arguments(&made);
                let answer = match call % 3 {
                    0 => block_on(made.start()),
                    1 => made.start().wait(),
                    _ => made.wait(),
                };
                assert_eq!(&*answer.unwrap().body, &arguments(call)[..]);
            }
        };
        std::thread::scope(|scope| {
            // Whoever only looks is in nobody's way.
            scope.spawn(|| {
                while !over.is_over() {
                    client.outstanding();
                    std::thread::yield_now();
                }
            });
            let _ended = over.at_the_end();
            let workers: Vec<_> = (0..6).map(|thread| scope.spawn(move || work(thread))).collect();
            workers.into_iter().for_each(|worker| worker.join().unwrap());
        });
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn clients_of_one_interface_go_their_own_ways() {
    everywhere(|world| {
        let served = world.serve();
        let rpc = world.rpc();
        let clients: Vec<Client> = (0..12).map(|_| rpc.connect(&served.address).unwrap()).collect();
        let pending: Vec<Pending> = (0..120)
            .map(|call| clients[call % clients.len()].call(ECHO_ON_POOL).arguments(&arguments(call)).start())
            .collect();
        for (call, outcome) in join(pending).into_iter().enumerate() {
            assert_eq!(&*outcome.unwrap().body, &arguments(call)[..]);
        }
        for (call, client) in clients.iter().enumerate() {
            assert_eq!(&*client.call(ECHO).arguments(&arguments(call)).wait().unwrap().body, &arguments(call)[..]);
        }
    });
}

#[test]
fn a_client_can_call_a_server_of_the_same_interface() {
    everywhere(|world| {
        let served = world.serve();
        let client = served.rpc.connect(&served.address).unwrap();
        assert_eq!(&*client.call(ECHO).arguments(b"me").wait().unwrap().body, b"me");
        assert_eq!(&*block_on(client.call(ECHO_ON_POOL).arguments(b"too").start()).unwrap().body, b"too");
    });
}

#[test]
fn a_client_that_is_dropped_tells_its_continuations() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let (done, outcome) = mpsc::channel();
        client.call(AWAIT_GATE).then(move |outcome| done.send(outcome.unwrap_err().error).unwrap());
        until("the call at the server", || served.service.begun() == 1);
        drop(client);
        let error = outcome.recv_timeout(PATIENCE).expect("the continuation hears of it");
        assert_eq!(error, CallError::OutcomeUnknown(Box::new(Lost::Closed)));
    });
}

#[test]
fn a_client_that_is_dropped_inside_its_own_continuation_goes_in_good_order() {
    everywhere(|world| {
        let served = world.serve();
        let ran = Arc::new(AtomicUsize::new(0));
        for _ in 0..10 {
            let client = world.client(&served.address);
            let (inner, counted) = (client.clone(), ran.clone());
            client.call(SLEEP).arguments(&encoded(&5u64)).then(move |outcome| {
                drop(inner);
                assert!(outcome.is_ok());
                counted.fetch_add(1, Ordering::SeqCst);
            });
        }
        until("all continuations", || ran.load(Ordering::SeqCst) == 10);
    });
}
