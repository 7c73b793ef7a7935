//! Payloads both ways: gathered, scattered, in frames and on offer; and every buffer comes back.

use crate::support::service::{
    AWAIT_GATE, DIGEST, ECHO, FETCH, FETCH_BEHIND_GATE, KEEP, RESULT_BESIDE, TURN_OVER, decoded, digest, encoded,
};
use crate::support::{
    A_WHILE, block_on, buffer, buffer_of, content, everywhere_and_unsealed, places, until, within_patience,
};
use highwire_rpc::{Answer, CallError, Pending, ServerOptions};
use highwire_vi::{Payload, PostError, Segment, Tag};

/// In frames, at their edge, and on offer.
const LENGTHS: [usize; 7] = [1, 4096, 65_535, 65_536, 65_537, 1 << 20, 20 << 20];

#[test]
fn payloads_of_every_length_arrive_whole_and_their_buffers_come_back() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for length in LENGTHS {
            let bytes = content(length as u64, length);
            let payload = buffer_of(&nic, &bytes);
            let place = (payload.region_id(), payload.offset(), length);
            let answer = client.call(DIGEST).payload(payload).wait().unwrap();
            assert_eq!(decoded::<(u64, u64)>(&answer.body), digest(&bytes), "{length} bytes there");
            assert_eq!(places(answer.sent), [place]);

            let room = buffer(&nic, length);
            let place = (room.region_id(), room.offset(), length);
            let arguments = encoded(&(length as u64, length as u32));
            let answer = client.call(FETCH).arguments(&arguments).into(room).wait().unwrap();
            assert_eq!((answer.length, decoded::<u64>(&answer.body)), (length, length as u64));
            let landed = answer.into_buffer().unwrap();
            assert_eq!((landed.region_id(), landed.offset(), landed.len()), place);
            assert!(landed[..] == bytes[..], "{length} bytes back");
        }
    });
}

#[test]
fn payloads_go_both_ways_at_once() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for length in [1, 1000, 65_536, 65_537, 3_000_001] {
            let mut bytes = content(3, length);
            let made = client.call(TURN_OVER).payload(buffer_of(&nic, &bytes)).into(buffer(&nic, length));
            let answer = block_on(made.start()).unwrap();
            assert_eq!(decoded::<(u64, u64)>(&answer.body), digest(&bytes));
            bytes.reverse();
            assert!(answer.into_buffer().unwrap()[..] == bytes[..], "{length} bytes");
        }
    });
}

#[test]
fn pieces_are_gathered_in_their_order_and_come_back_as_they_were() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        // In a frame, and on offer.
        for piece in [1000, 100_000] {
            let region = nic.register_freezable(2 * piece, Tag(0)).unwrap();
            let mut filled = region.slice(0..2 * piece).unwrap();
            filled.copy_from_slice(&content(3, 2 * piece));
            drop(filled);
            let frozen = region.freeze().unwrap();
            let shared = buffer_of(&nic, &content(2, piece)).share();
            let first = buffer_of(&nic, &content(1, piece));
            let all =
                [content(1, piece), content(2, piece), content(3, 2 * piece)[7..piece].to_vec(), content(2, piece)];
            let expected = [
                (first.region_id(), first.offset(), piece),
                (shared.buffer().region_id(), shared.buffer().offset(), piece),
                (frozen.id(), 7, piece - 7),
                (shared.buffer().region_id(), shared.buffer().offset(), piece),
            ];
            for arguments in [10, 500] {
                let first = buffer_of(&nic, &content(1, piece));
                let place = (first.region_id(), first.offset(), piece);
                let arguments = vec![7; arguments];
                let made = client.call(DIGEST).arguments(&arguments).payload(first).shared(shared.clone());
                let answer = made.frozen(&frozen, 7..piece).shared(shared.clone()).wait().unwrap();
                assert_eq!(decoded::<(u64, u64)>(&answer.body), digest(&all.concat()));
                let mut back = places(answer.sent);
                assert_eq!(back.remove(0), place);
                assert_eq!(back, expected[1..]);
            }
            assert!(shared.into_exclusive().is_ok(), "nobody else has a piece of it any more");
        }
    });
}

#[test]
fn answers_are_scattered_over_the_buffers_in_their_order() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for (lengths, bytes) in [([10, 1, 5000], 5011), ([10, 1, 5000], 12), ([100_000, 1, 300_000], 350_000)] {
            let mut made = client.call(FETCH);
            let arguments = encoded(&(4u64, bytes as u32));
            made = made.arguments(&arguments);
            let mut expected = Vec::new();
            for length in lengths {
                let room = buffer(&nic, length);
                expected.push((room.region_id(), room.offset(), length));
                made = made.into(room);
            }
            let Answer { payload, length, .. } = made.wait().unwrap();
            assert_eq!(length, bytes);
            let segments = payload.into_segments();
            let landed: Vec<u8> = segments.iter().flat_map(|segment| segment.bytes().to_vec()).collect();
            assert!(landed[..bytes] == content(4, bytes)[..]);
            let back = segments.into_iter().fold(Payload::None, Payload::and);
            assert_eq!(places(back), expected);
        }
    });
}

#[test]
fn more_calls_with_payloads_are_outstanding_than_there_are_frames() {
    everywhere_and_unsealed(|world| {
        for frames in [0, 1, 8] {
            let served = world.serve_with(ServerOptions { frames, ..ServerOptions::default() });
            let client = world.client(&served.address);
            let nic = client.rpc().nic().clone();
            let pool = nic.pool(20_000, 60).unwrap();
            let bytes: Vec<Vec<u8>> = (0..60).map(|call| content(call, 10_000 + call as usize)).collect();
            let start = |bytes: &Vec<u8>| {
                let mut payload = pool.frame().unwrap();
                payload.set_len(bytes.len());
                payload.copy_from_slice(bytes);
                client.call(TURN_OVER).payload(payload).into(buffer(&nic, bytes.len())).start()
            };
            let pending: Vec<Pending> = bytes.iter().map(start).collect();
            for (mut bytes, pending) in bytes.into_iter().zip(pending) {
                let answer = block_on(pending).unwrap();
                bytes.reverse();
                assert!(answer.into_buffer().unwrap()[..] == bytes[..], "with {frames} frames");
            }
            assert_eq!(pool.free(), pool.frames());
        }
    });
}

#[test]
fn frames_that_a_handler_keeps_are_done_without() {
    everywhere_and_unsealed(|world| {
        let served = world.serve_with(ServerOptions { frames: 2, ..ServerOptions::default() });
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for call in 0..20 {
            client.call(KEEP).payload(buffer_of(&nic, &[call; 100])).wait().unwrap();
        }
        served.service.forget_kept();
        for call in 0..20 {
            let answer = client.call(DIGEST).payload(buffer_of(&nic, &[call; 100])).wait().unwrap();
            assert_eq!(decoded::<(u64, u64)>(&answer.body), digest(&[call; 100]));
        }
    });
}

#[test]
fn empty_payloads_are_payloads_too() {
    everywhere_and_unsealed(|world| {
        for frames in [0, 8] {
            let served = world.serve_with(ServerOptions { frames, ..ServerOptions::default() });
            let client = world.client(&served.address);
            let call = move || {
                let nic = client.rpc().nic().clone();
                let answer = client.call(DIGEST).payload(buffer(&nic, 0)).wait().expect("an empty payload is taken");
                assert_eq!((decoded::<(u64, u64)>(&answer.body), places(answer.sent).len()), (digest(&[]), 1));
                // An answer with an empty payload, to a caller with room for some, for none, and without a word of it.
                let arguments = encoded(&(5u32, 0u32));
                for room in [100, 0] {
                    let made = client.call(RESULT_BESIDE).arguments(&arguments).into(buffer(&nic, room));
                    let answer = made.wait().unwrap();
                    assert_eq!((answer.length, answer.payload.total()), (0, room as u64));
                }
                let answer = client.call(RESULT_BESIDE).arguments(&arguments).wait().unwrap();
                assert_eq!((answer.length, answer.body.len()), (0, 5));
            };
            within_patience("a call with an empty payload", call);
        }
    });
}

#[test]
fn a_payload_that_the_server_does_not_take_is_refused_with_the_numbers() {
    everywhere_and_unsealed(|world| {
        let served = world.serve_with(ServerOptions { request_bytes_max: 100_000, ..ServerOptions::default() });
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        let payload = buffer(&nic, 100_001);
        let place = (payload.region_id(), payload.offset(), 100_001);
        let failed = client.call(DIGEST).payload(payload).into(buffer(&nic, 10)).wait().unwrap_err();
        assert_eq!(failed.error, CallError::RequestTooLarge { bytes: 100_001, most: 100_000 });
        assert_eq!((places(failed.sent), failed.room.total()), (vec![place], 10));
        client.call(DIGEST).payload(buffer(&nic, 100_000)).wait().unwrap();
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn an_answer_that_is_larger_than_the_room_is_refused_with_the_numbers() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        for (room, bytes) in [(0, 1), (99, 100), (1 << 16, 1 << 20)] {
            let arguments = encoded(&(1u64, bytes as u32));
            let made = client.call(FETCH).arguments(&arguments);
            let failed = match room {
                0 => made.wait(),
                _ => made.into(buffer(&nic, room)).wait(),
            };
            let failed = failed.unwrap_err();
            assert_eq!(failed.error, CallError::PayloadTooLarge { bytes, room: room as u64 });
            assert_eq!(failed.room.total(), room as u64);
        }
        client.call(ECHO).wait().unwrap();
    });
}

#[test]
fn room_in_memory_that_others_may_read_and_of_another_tag_is_refused() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        let strange = nic.register_tagged(100, Tag(7)).unwrap();
        let failed = client.call(FETCH).into(strange.slice(0..50).unwrap()).wait().unwrap_err();
        assert!(matches!(&failed.error, CallError::Buffer(why) if matches!(**why, PostError::WrongTag { .. })));
        assert_eq!(failed.room.total(), 50);
        let call = client.clone();
        let payload = strange.slice(50..100).unwrap();
        let outcome =
            within_patience("a call with a strange payload", move || call.call(DIGEST).payload(payload).wait());
        let failed = outcome.expect_err("a payload of another tag cannot be sent");
        assert!(matches!(&failed.error, CallError::Buffer(_)), "{:?}", failed.error);
        client.call(ECHO).wait().unwrap();
        assert_eq!(client.outstanding(), 0);
    });
}

#[test]
fn frames_are_free_again_whatever_becomes_of_their_calls() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        let pool = nic.pool(100_000, 32).unwrap();
        served.service.gate.open();
        for round in 0..4u64 {
            let mut pending = Vec::new();
            for call in 0..12 {
                let made = client.call(if call % 2 == 0 { DIGEST } else { FETCH_BEHIND_GATE });
                let arguments = encoded(&(round, 90_000u32));
                let made = made.arguments(&arguments).payload(pool.frame().unwrap()).into(pool.frame().unwrap());
                pending.push(made.start());
            }
            for (call, pending) in pending.into_iter().enumerate() {
                match call % 3 {
                    0 => drop(pending),
                    1 => drop(pending.cancel()),
                    _ => drop(pending.wait().unwrap()),
                }
            }
            until("all frames", || {
                client.poll();
                pool.free() == pool.frames()
            });
        }
        client.call(ECHO).wait().unwrap();
    });
}

#[test]
fn nothing_lands_in_the_room_of_a_call_that_was_given_up() {
    everywhere_and_unsealed(|world| {
        let served = world.serve();
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        let region = nic.register(8 << 20).unwrap();
        for cancelled in [false, true] {
            for bytes in [60_000u32, 8 << 20] {
                served.service.gate.close();
                let before = served.service.begun();
                let room = region.slice(0..bytes as usize).unwrap();
                let pending = client.call(FETCH_BEHIND_GATE).arguments(&encoded(&(1u64, bytes))).into(room).start();
                until("the call at the server", || served.service.begun() > before);
                // Half of the time the payload is on its way when the call is given up.
                served.service.gate.open();
                if !cancelled {
                    drop(pending);
                } else if let Err(failed) = pending.cancel() {
                    assert_eq!((failed.error, failed.room.total()), (CallError::Cancelled, bytes.into()));
                }
                let mut room = None;
                until("the room", || {
                    client.poll();
                    room = region.slice(0..bytes as usize).ok();
                    room.is_some()
                });
                let mut room = room.unwrap();
                room.fill(0xa5);
                std::thread::sleep(A_WHILE);
                client.call(ECHO).wait().unwrap();
                assert!(room.iter().all(|byte| *byte == 0xa5), "something landed in memory that was given back");
            }
        }
    });
}

#[test]
fn a_payload_that_was_on_offer_comes_back_when_the_call_is_given_up() {
    everywhere_and_unsealed(|world| {
        let served = world.serve_with(ServerOptions { workers: 1, ..ServerOptions::default() });
        let client = world.client(&served.address);
        let nic = client.rpc().nic().clone();
        let held = client.call(AWAIT_GATE).start();
        let pool = nic.pool(1 << 20, 8).unwrap();
        for call in 0..8 {
            let pending = client.call(TURN_OVER).payload(pool.frame().unwrap()).start();
            if call % 2 == 0 {
                std::thread::sleep(A_WHILE / 10);
            }
            drop(pending);
        }
        until("the frames", || {
            client.poll();
            pool.free() == pool.frames()
        });
        served.service.gate.open();
        held.wait().unwrap();
        let answer = client.call(DIGEST).payload(pool.frame().unwrap()).wait().unwrap();
        assert!(matches!(answer.sent.into_segments()[..], [Segment::Buffer(_)]));
    });
}
