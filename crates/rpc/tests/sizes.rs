//! Arguments and results of every length.

use crate::support::service::{DIGEST, ECHO, ECHO_ON_POOL, RESULT, RESULT_BESIDE, decoded, digest, encoded};
use crate::support::{block_on, buffer, buffer_of, content, everywhere_and_unsealed, places};
use highwire_rpc::CallError;

/// Around every length at which the way changes.
const LENGTHS: [usize; 16] = [0, 1, 91, 92, 93, 127, 128, 129, 4063, 4064, 4096, 4191, 4192, 4193, 20_000, 60 << 10];
/// The longest result.
const RESULT_MAX: usize = 4192;

#[test]
fn arguments_of_every_length_arrive_whole() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        for method in [ECHO, ECHO_ON_POOL] {
            for length in LENGTHS {
                let arguments = content(length as u64, length);
                let outcome = client.call(method).arguments(&arguments).wait();
                match length <= RESULT_MAX {
                    true => assert!(*outcome.unwrap().body == arguments[..], "{length} bytes"),
                    false => {
                        let error = outcome.unwrap_err().error;
                        assert_eq!(error, CallError::ResultTooLong { bytes: length as u64 });
                    }
                }
            }
        }
    });
}

#[test]
fn arguments_of_every_length_go_beside_a_payload() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for payload_bytes in [1, 3000, 65_536, 65_537] {
            let bytes = content(9, payload_bytes);
            for length in LENGTHS {
                let arguments = content(length as u64, length);
                let payload = buffer_of(&nic, &bytes);
                let place = (payload.region_id(), payload.offset(), payload.len());
                let answer = client.call(DIGEST).arguments(&arguments).payload(payload).wait().unwrap();
                let about = format!("{length} bytes of arguments beside {payload_bytes}");
                assert_eq!(decoded::<(u64, u64)>(&answer.body), digest(&bytes), "{about}");
                assert_eq!(places(answer.sent), [place], "{about}: the arguments are not the caller's to have back");
            }
            // The arguments are those that were given, too.
            let arguments = content(5, 4000);
            let answer = client.call(ECHO).arguments(&arguments).payload(buffer_of(&nic, &bytes)).wait().unwrap();
            assert!(*answer.body == arguments[..]);
        }
    });
}

#[test]
fn many_calls_with_long_arguments_are_outstanding_at_once() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let arguments: Vec<Vec<u8>> = (0..40).map(|call| content(call, 30_000)).collect();
        let pending: Vec<_> =
            arguments.iter().map(|bytes| client.call(ECHO_ON_POOL).arguments(bytes).start()).collect();
        for pending in pending {
            let error = block_on(pending).unwrap_err().error;
            assert_eq!(error, CallError::ResultTooLong { bytes: 30_000 });
        }
    });
}

#[test]
fn arguments_that_are_too_long_are_refused_and_the_buffers_are_back() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let most = 60 << 10;
        let arguments = vec![0; most + 1];
        let nic = client.rpc().nic().clone();
        let (payload, room) = (buffer(&nic, 10), buffer(&nic, 20));
        let failed = client.call(ECHO).arguments(&arguments).payload(payload).into(room).wait().unwrap_err();
        assert_eq!(failed.error, CallError::ArgumentsTooLong { bytes: most + 1, most });
        assert_eq!((failed.sent.total(), failed.room.total()), (10, 20));
        let failed = block_on(client.call(ECHO).arguments(&arguments).start()).unwrap_err();
        assert_eq!(failed.error, CallError::ArgumentsTooLong { bytes: most + 1, most });
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn results_of_every_length_arrive_whole_or_say_that_they_are_too_long() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        for length in [0, 1, 56, 57, 92, 93, 128, 129, 4000, 4096, RESULT_MAX, RESULT_MAX + 1, 65_535, 65_536, 1 << 20]
        {
            let outcome = client.call(RESULT).arguments(&encoded(&(length as u32))).wait();
            match length <= RESULT_MAX {
                true => assert!(*outcome.unwrap().body == content(1, length)[..], "{length} bytes"),
                false => {
                    assert_eq!(outcome.unwrap_err().error, CallError::ResultTooLong { bytes: length as u64 });
                }
            }
        }
    });
}

#[test]
fn results_go_beside_payloads_up_to_a_limit() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for payload_bytes in [1u32, 5000, 200_000] {
            for body in [0u32, 1, 91, 92, 93, 128, 4000] {
                let arguments = encoded(&(body, payload_bytes));
                let room = buffer(&nic, payload_bytes as usize);
                let outcome = client.call(RESULT_BESIDE).arguments(&arguments).into(room).wait();
                if body > 92 {
                    let failed = outcome.unwrap_err();
                    assert_eq!(failed.error, CallError::ResultTooLong { bytes: body.into() });
                    assert_eq!(failed.room.total(), u64::from(payload_bytes));
                    continue;
                }
                let answer = outcome.unwrap();
                assert!(*answer.body == content(2, body as usize)[..], "{body} bytes");
                assert_eq!(answer.length, payload_bytes as usize);
                assert!(answer.into_buffer().unwrap()[..] == content(3, payload_bytes as usize)[..]);
            }
        }
    });
}
