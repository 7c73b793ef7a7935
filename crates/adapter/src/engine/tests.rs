//! Engines on real sockets, over loopback.

use super::*;
use highwire_link::{ListField, UdpLink, UdpOptions};
use highwire_proto::{
    Assurance, ClusterKey, EndpointConfig, EndpointEvent, Event, Incoming, Keys, Outgoing, PacketSize, SeededEntropy,
};
use std::time::Instant;

mod landing;
mod paths;

type Side = Engine<UdpLink, Vec<u8>, Vec<u8>>;

fn side(address: &str, keys: Keys, seed: u64) -> Side {
    let link = UdpLink::bind(address.parse().unwrap(), UdpOptions::default()).unwrap();
    let mut entropy = SeededEntropy::new(seed);
    let config = EndpointConfig { listening: true, ..EndpointConfig::default() };
    let endpoint = Endpoint::new(keys, config, &mut entropy);
    Engine::new(link, endpoint, Box::new(entropy))
}

fn exchange(address: &str, keys: fn() -> Keys) {
    let mut sides = [side(address, keys(), 1), side(address, keys(), 2)];
    let mut numbers = [0; 2];
    let start = Instant::now();
    let to = sides[1].link().local_address();
    sides[0].connect(start.elapsed(), to).unwrap();
    let payload: Vec<u8> = (0..3_000_000u32).map(|at| (at ^ at >> 8) as u8).collect();
    let (mut sent, mut arrived) = (false, 0);
    while !sent || arrived < 4 {
        assert!(start.elapsed() < Duration::from_secs(30), "stuck with {arrived}: {:?}", sides[0].counters());
        for (index, side) in sides.iter_mut().enumerate() {
            let now = start.elapsed();
            side.turn(now).unwrap();
            while let Some(event) = side.endpoint().poll_event() {
                match event {
                    EndpointEvent::Connected(number) | EndpointEvent::Accepted(number, _) => {
                        numbers[index] = number;
                        let session = side.endpoint().session(number).unwrap();
                        session.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
                        for token in 0..4 {
                            let target = Some(vec![0; payload.len()]);
                            session.post_receive(1, Incoming { token, target }).unwrap();
                            if index == 0 {
                                let payload = Some(payload.clone());
                                let message =
                                    Outgoing { token, control: vec![], immediate: 7, payload_token: None, payload };
                                session.post_send(1, message).unwrap();
                            }
                        }
                    }
                    EndpointEvent::Session(_, Event::Received { target: Some(target), status: Ok(()), .. }) => {
                        assert_eq!(target, payload);
                        arrived += 1;
                    }
                    EndpointEvent::Session(_, Event::Sent { status: Ok(()), token: 3, .. }) => sent = true,
                    EndpointEvent::Session(_, Event::Sent { status: Ok(()), .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    // Loopback carries the largest packets that there are.
    for (side, number) in sides.iter_mut().zip(numbers) {
        let refused = side.counters().refused;
        let session = side.endpoint().session(number).unwrap();
        assert_eq!((session.packet_bytes(), refused), (PacketSize::MOST, 0), "{:?}", session.stats());
    }
}

#[test]
fn large_messages_arrive_over_loopback_sealed_and_not() {
    exchange("127.0.0.1:0", || Keys::new(ClusterKey::from_random([3; 32])));
    exchange("127.0.0.1:0", Keys::insecure);
}

#[test]
fn and_over_ipv6() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        eprintln!("SKIPPED: this machine has no IPv6 on loopback");
        return;
    }
    exchange("[::1]:0", || Keys::new(ClusterKey::from_random([3; 32])));
}

/// One who receives from several has a socket of its own for one of them, and lists for some of the others.
#[test]
fn large_messages_of_several_senders_come_by_lists() {
    const SENDERS: usize = 4;
    const MESSAGES: u64 = 6;
    let options = UdpOptions { lists: Some(ListField { count: 2, at: Header::LIST_AT }), ..UdpOptions::default() };
    let side = |number: u64| {
        let link = UdpLink::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let mut entropy = SeededEntropy::new(number);
        let config = EndpointConfig { listening: true, ..EndpointConfig::default() };
        Engine::new(link, Endpoint::new(Keys::insecure(), config, &mut entropy), Box::new(entropy))
    };
    let mut sides: Vec<Side> = (0..=SENDERS as u64).map(side).collect();
    let start = Instant::now();
    let to = sides[0].link().local_address();
    for sender in &mut sides[1..] {
        sender.connect(start.elapsed(), to).unwrap();
    }
    let payload: Vec<u8> = (0..2_000_000u32).map(|at| (at ^ at >> 8) as u8).collect();
    let mut arrived = 0;
    while arrived < SENDERS as u64 * MESSAGES || sides[0].endpoint().lists_in_use() != 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "stuck with {arrived}: {:?}", sides[0].endpoint().stats());
        for (index, side) in sides.iter_mut().enumerate() {
            side.turn(start.elapsed()).unwrap();
            while let Some(event) = side.endpoint().poll_event() {
                match event {
                    EndpointEvent::Connected(number) | EndpointEvent::Accepted(number, _) => {
                        let session = side.endpoint().session(number).unwrap();
                        session.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
                        for token in 0..MESSAGES {
                            let payload = Some(payload.clone());
                            let message =
                                Outgoing { token, control: vec![], immediate: 7, payload_token: None, payload };
                            match index {
                                0 => {
                                    let target = Some(vec![0; 2_000_000]);
                                    session.post_receive(1, Incoming { token, target }).unwrap();
                                }
                                _ => session.post_send(1, message).unwrap(),
                            }
                        }
                    }
                    EndpointEvent::Session(_, Event::Received { token, target, status: Ok(()), .. }) => {
                        assert!(target.as_ref() == Some(&payload), "message {token} is not what was sent");
                        arrived += 1;
                    }
                    EndpointEvent::Session(_, Event::Sent { status: Ok(()), .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    let (stats, counters) = (sides[0].endpoint().stats(), sides[0].link().counters());
    assert!(stats.list_grants >= 2 && counters.packets_by_lists > 0, "{stats:?} {counters:?}");
    assert_eq!((counters.lists_refused, counters.lists_lost), (0, 0));
}

/// The favourite has a socket of its own and needs no list, though it asks for one as everybody does: another peer
/// gets the only one.
#[test]
fn the_favourite_leaves_lists_to_others() {
    const BYTES: usize = 1 << 20;
    let options = UdpOptions { lists: Some(ListField { count: 1, at: Header::LIST_AT }), ..UdpOptions::default() };
    let side = |number: u64| {
        let link = UdpLink::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let mut entropy = SeededEntropy::new(number);
        let config = EndpointConfig { listening: true, ..EndpointConfig::default() };
        Engine::new(link, Endpoint::new(Keys::insecure(), config, &mut entropy), Box::new(entropy))
    };
    let mut sides: Vec<Side> = (0..3).map(side).collect();
    let (start, to) = (Instant::now(), sides[0].link().local_address());
    sides[1].connect(start.elapsed(), to).unwrap();
    // Of the receiver the latest number, which is the second's once there is one.
    let (mut arrived, mut numbers, mut by_lists_before) = (0, [0; 3], None);
    let by_lists = |sides: &mut [Side]| sides[0].link().counters().packets_by_lists;
    while by_lists_before.is_none_or(|before| by_lists(&mut sides) < before + 100) {
        assert!(start.elapsed() < Duration::from_secs(60), "stuck: {:?}", sides[0].endpoint().stats());
        for (index, side) in sides.iter_mut().enumerate() {
            side.turn(start.elapsed()).unwrap();
            while let Some(event) = side.endpoint().poll_event() {
                let message =
                    |token, payload| Outgoing { token, control: vec![], immediate: 0, payload_token: None, payload };
                match event {
                    EndpointEvent::Connected(number) | EndpointEvent::Accepted(number, _) => {
                        numbers[index] = number;
                        let session = side.endpoint().session(number).unwrap();
                        session.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
                        for token in 0..8 {
                            match index {
                                0 => session.post_receive(1, Incoming { token, target: Some(vec![0; BYTES]) }).unwrap(),
                                _ => session.post_send(1, message(token, Some(vec![1; BYTES]))).unwrap(),
                            }
                        }
                    }
                    EndpointEvent::Session(number, Event::Received { token, target, .. }) => {
                        arrived += 1;
                        let session = side.endpoint().session(number).unwrap();
                        session.post_receive(1, Incoming { token, target }).unwrap();
                    }
                    EndpointEvent::Session(number, Event::Sent { token, payload, .. }) => {
                        side.endpoint().session(number).unwrap().post_send(1, message(token, payload)).unwrap();
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        // By then the first one is the favourite.
        if by_lists_before.is_none() && arrived > 300 {
            by_lists_before = Some(by_lists(&mut sides));
            sides[2].connect(start.elapsed(), to).unwrap();
        }
    }
    let stats = sides[0].endpoint().stats();
    assert!(stats.lists_astray + stats.lists_idle > 0, "{stats:?}");
    let second = sides[2].endpoint().session(numbers[2]).unwrap().stats();
    assert!(second.fast_grants > 0, "{second:?}");
}
