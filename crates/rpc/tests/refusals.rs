//! Calls that the server has no answer to, and how it says so.

use crate::support::forked::in_child;
use crate::support::service::{ECHO, PANIC, PANIC_ON_POOL, SERVICE, TYPED, VERSION, encoded};
use crate::support::{block_on, buffer, everywhere, within_patience};
use highwire_rpc::{CallError, Method, OpenError};

#[test]
fn what_the_server_does_not_have_is_said_with_its_name() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let error = |method: Method| client.call(method).wait().unwrap_err().error;
        let service = 0xdead_beef;
        assert_eq!(error(Method { service, ..ECHO }), CallError::UnknownService { service });
        let expected = CallError::UnknownVersion { service: SERVICE, asked: VERSION + 1, has: VERSION };
        assert_eq!(error(Method { version: VERSION + 1, ..ECHO }), expected);
        for method in [0, 99, u16::MAX] {
            assert_eq!(error(Method { method, ..ECHO }), CallError::UnknownMethod { service: SERVICE, method });
        }
        // With all that a call can have, and its buffers come back.
        let nic = client.rpc().nic().clone();
        for bytes in [100, 1 << 20] {
            let made = client.call(Method { service, ..ECHO }).payload(buffer(&nic, bytes)).into(buffer(&nic, 10));
            let failed = block_on(made.start()).unwrap_err();
            assert_eq!(failed.error, CallError::UnknownService { service });
            assert_eq!((failed.sent.total(), failed.room.total()), (bytes as u64, 10));
        }
        client.call(ECHO).wait().unwrap();
    });
}

#[test]
fn arguments_of_another_type_are_refused() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let call = |arguments: &[u8]| client.call(TYPED).arguments(arguments).wait().map_err(|failed| failed.error);
        assert_eq!(call(&encoded(&(2u32, "ab"))).unwrap().body.to_vec(), encoded(&"abab"));
        let longer = [encoded(&(2u32, "ab")), vec![0]].concat();
        for wrong in [&b""[..], &[1], &[1, 5, b'x'], &[0xff; 40], &longer, &[1, 2, 0xff, 0xff], &[7; 5000]] {
            assert_eq!(call(wrong).unwrap_err(), CallError::BadArguments, "{wrong:?}");
        }
        let too_long = encoded(&(3000u32, "ab"));
        assert_eq!(call(&too_long).unwrap_err(), CallError::ResultTooLong { bytes: 6002 });
    });
}

#[test]
fn a_handler_that_panics_answers_for_itself_alone() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        // More often than there are threads that it could take along.
        for method in [PANIC, PANIC_ON_POOL].repeat(6) {
            assert_eq!(client.call(method).wait().unwrap_err().error, CallError::Panicked);
            assert_eq!(&*client.call(ECHO).arguments(b"on").wait().unwrap().body, b"on");
        }
    });
}

#[test]
fn a_forked_child_is_told_that_the_client_is_its_parents() {
    everywhere(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        // So that there is a driver, which the child has not.
        block_on(client.call(ECHO).start()).unwrap();
        let held = client.call(ECHO).start();
        let (client, _served, held) = in_child((client, served, held), |(client, served, held)| {
            let error = client.call(ECHO).payload(buffer(client.rpc().nic(), 0)).wait().unwrap_err().error;
            assert_eq!(error, CallError::ForkedChild);
            assert_eq!(block_on(client.call(ECHO).start()).unwrap_err().error, CallError::ForkedChild);
            let (done, outcome) = std::sync::mpsc::channel();
            client.call(ECHO).then(move |outcome| done.send(outcome.unwrap_err().error).unwrap());
            assert_eq!(outcome.try_recv(), Ok(CallError::ForkedChild));
            drop((held, client, served));
        });
        held.wait().unwrap();
        client.call(ECHO).wait().unwrap();
    });
}

#[test]
fn where_nobody_serves_calls_connecting_says_so() {
    everywhere(|world| {
        let rpc = world.rpc();
        let options = highwire_rpc::ClientOptions {
            connect_timeout: std::time::Duration::from_millis(800),
            ..Default::default()
        };
        let nic = world.nic();
        let listener = nic.listen(&world.address()).unwrap();
        let address = listener.address().to_owned();
        // Somebody is there, and says nothing.
        let silent = std::thread::spawn(move || {
            let vi = listener.accept(crate::support::PATIENCE).ok();
            std::thread::sleep(std::time::Duration::from_secs(1));
            drop((vi, listener));
        });
        let connect = {
            let (rpc, address, options) = (rpc.clone(), address.clone(), options.clone());
            move || rpc.connect_with(&address, options).map(|_| ())
        };
        let error = within_patience("connecting", connect).unwrap_err();
        assert!(matches!(error, OpenError::NoWelcome { .. } | OpenError::Connect(_)), "{error}");
        silent.join().unwrap();
        let gone = within_patience("connecting", move || rpc.connect_with(&address, options).map(|_| ()));
        assert!(matches!(gone, Err(OpenError::Connect(_))), "{gone:?}");
    });
}
