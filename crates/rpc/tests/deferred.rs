//! Calls that are answered later: from other threads, from other calls, or never.

use crate::support::{
    A_WHILE, PATIENCE, World, buffer, buffer_of, content, everywhere, everywhere_and_unsealed, until, within_patience,
};
use highwire_rpc::{
    CallError, Client, Deferred, Manner, Method, Outcome, Reply, Request, Rpc, Serve, Server, Service, Services,
};
use std::sync::{Arc, Mutex};

const SERVICE: u32 = 0x6c61_7465;
/// Waits for somebody to answer it.
const LATER: Method = Method { service: SERVICE, version: 1, method: 1 };
/// The same, on the pool.
const LATER_ON_POOL: Method = Method { service: SERVICE, version: 1, method: 2 };
/// Answers the oldest that waits with its arguments, from within.
const ANSWER_OLDEST: Method = Method { service: SERVICE, version: 1, method: 3 };
const NOTHING: Method = Method { service: SERVICE, version: 1, method: 4 };

/// Calls that wait, the oldest first.
#[derive(Clone, Default)]
struct Waiting(Arc<Mutex<Vec<Deferred>>>);

impl Waiting {
    fn take(&self, at: usize) -> Deferred {
        until("a call that waits", || self.0.lock().unwrap().len() > at);
        self.0.lock().unwrap().remove(at)
    }

    fn count(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl Serve for Waiting {
    fn manner(&self, method: u16) -> Option<Manner> {
        let manner = Manner::default();
        (1..=4).contains(&method).then(|| if method == LATER_ON_POOL.method { manner } else { manner.quick() })
    }

    fn serve(&self, request: Request<'_>, reply: &mut Reply) {
        match request.method() {
            1 | 2 => self.0.lock().unwrap().push(request.defer(reply)),
            3 => self.take(0).answer(|reply| reply.body(request.arguments())),
            _ => {}
        }
    }
}

fn serve(world: &World<'_>) -> (Rpc, Server, Waiting) {
    let (rpc, waiting) = (world.rpc(), Waiting::default());
    let services = Services::new().and(Service::new(SERVICE, 1, waiting.clone()));
    let server = rpc.serve(&world.address(), services).unwrap();
    (rpc, server, waiting)
}

/// A call goes there and back: what was sent before it has been seen.
fn settle(client: &Client) {
    client.call(NOTHING).wait().unwrap();
}

#[test]
fn answers_come_in_the_order_in_which_they_are_made_and_payloads_land_where_they_belong() {
    everywhere_and_unsealed(|world| {
        let (rpc, server, waiting) = serve(world);
        let client = world.client(server.address());
        let nic = client.rpc().nic().clone();
        for length in [1, 4096, 100_000, 3 << 20] {
            let mut pending = Vec::new();
            for method in [LATER, LATER_ON_POOL, LATER] {
                pending.push(client.call(method).into(buffer(&nic, length)).start());
                until("that it waits", || waiting.count() == pending.len());
            }
            // Nobody else waits for them.
            settle(&client);
            let bytes: Vec<Vec<u8>> = (0..3).map(|number| content(number, length)).collect();
            for at in [2, 0, 1] {
                let deferred = waiting.take(if at == 1 { 0 } else { at });
                let (own, bytes) = (rpc.nic().clone(), bytes[at].clone());
                let answering = std::thread::spawn(move || {
                    deferred.answer(|reply| {
                        reply.body(&[at as u8]);
                        reply.payload(buffer_of(&own, &bytes));
                    });
                });
                answering.join().unwrap();
            }
            for (number, pending) in pending.into_iter().enumerate() {
                let answer = within_patience("an answer", move || pending.wait().unwrap());
                assert_eq!((*answer.body).to_vec(), [number as u8]);
                assert!(answer.into_buffer().unwrap()[..] == bytes[number][..], "{length} bytes");
            }
        }
    });
}

#[test]
fn one_that_is_dropped_is_a_handler_that_failed() {
    everywhere(|world| {
        let (_rpc, server, waiting) = serve(world);
        let client = world.client(server.address());
        let nic = client.rpc().nic().clone();
        let pending = client.call(LATER).into(buffer(&nic, 1000)).start();
        drop(waiting.take(0));
        let failed = within_patience("its end", move || pending.wait().unwrap_err());
        assert_eq!(failed.error, CallError::Panicked);
        assert_eq!(failed.room.total(), 1000, "its buffer is back");
        settle(&client);
    });
}

#[test]
fn a_call_answers_another_from_within() {
    everywhere(|world| {
        let (_rpc, server, waiting) = serve(world);
        let [client, other] = [0, 1].map(|_| world.client(server.address()));
        let first = client.call(LATER).start();
        until("a call that waits", || waiting.count() == 1);
        let second = other.call(LATER).start();
        until("two of them", || waiting.count() == 2);
        // By its own connection, which has the lock, and by another's.
        client.call(ANSWER_OLDEST).arguments(b"one").wait().unwrap();
        client.call(ANSWER_OLDEST).arguments(b"two").wait().unwrap();
        let answers = within_patience("both answers", move || [first, second].map(|call| call.wait().unwrap().body));
        assert_eq!(answers.map(|body| body.to_vec()), [b"one", b"two"]);
    });
}

#[test]
fn an_answer_that_nobody_waits_for_goes_nowhere() {
    everywhere_and_unsealed(|world| {
        let (rpc, server, waiting) = serve(world);
        let client = world.client(server.address());
        let nic = client.rpc().nic().clone();
        let call = || client.call(LATER).into(buffer_of(&nic, &[7; 5000]));
        let late = call().deadline(A_WHILE).wait().unwrap_err();
        assert!(matches!(late.error, CallError::DeadlinePassed { .. }), "{:?}", late.error);
        let given_up = call().start();
        until("the second", || waiting.count() == 2);
        let given_up = given_up.cancel().unwrap_err();
        assert_eq!(given_up.error, CallError::Cancelled);
        // Both have begun: neither may be made again as if it had not.
        assert_eq!([late.error.outcome(), given_up.error.outcome()], [Outcome::Unknown; 2]);
        settle(&client);
        let rooms = [late.room, given_up.room].map(|room| room.into_buffer().unwrap());
        for _ in 0..2 {
            waiting.take(0).answer(|reply| reply.payload(buffer_of(rpc.nic(), &[1; 5000])));
        }
        // What comes of the next shows that both were seen.
        let pending = call().start();
        waiting.take(0).answer(|reply| reply.payload(buffer_of(rpc.nic(), &[2; 5000])));
        let answer = within_patience("the third", move || pending.wait().unwrap());
        assert!(answer.into_buffer().unwrap()[..] == [2; 5000]);
        assert!(rooms.iter().all(|room| room[..] == [7; 5000]), "something landed where nobody expected it any more");
    });
}

#[test]
fn one_with_more_than_there_is_room_for_is_an_error() {
    everywhere(|world| {
        let (rpc, server, waiting) = serve(world);
        let client = world.client(server.address());
        let nic = client.rpc().nic().clone();
        let pending = client.call(LATER).into(buffer(&nic, 999)).start();
        waiting.take(0).answer(|reply| reply.payload(buffer_of(rpc.nic(), &[1; 1000])));
        let failed = within_patience("its end", move || pending.wait().unwrap_err());
        assert_eq!(failed.error, CallError::PayloadTooLarge { bytes: 1000, room: 999 });
    });
}

#[test]
fn a_server_that_leaves_waits_for_them() {
    everywhere(|world| {
        let (_rpc, server, waiting) = serve(world);
        let client = world.client(server.address());
        let pending = client.call(LATER).start();
        let deferred = waiting.take(0);
        let leaving = std::thread::spawn(move || server.leave(PATIENCE));
        until("that the server leaves", || {
            client.call(NOTHING).wait().is_err_and(|failed| failed.error == CallError::ServerLeaving)
        });
        assert!(!leaving.is_finished());
        deferred.answer(|reply| reply.body(b"after all"));
        assert_eq!(*within_patience("the answer", move || pending.wait().unwrap()).body, *b"after all");
        leaving.join().unwrap().unwrap();
        // One that never comes is not waited for beyond the time given.
        let (_rpc, server, waiting) = serve(world);
        let client = world.client(server.address());
        let _pending = client.call(LATER).start();
        let _kept = waiting.take(0);
        assert_eq!(server.leave(A_WHILE).unwrap_err().calls, 1);
    });
}
