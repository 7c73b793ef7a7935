//! VIs between hosts, by way of loopback: the same VIs, another path.

use highwire::{
    AcceptError, Background, ClusterKey, Completion, Config, ConnectError, Driver, Failure, Impairments, Keys,
    ListenError, Message, Nic, Operation, PacketSize, PayloadToken, PeerId, PostError, Receive, Recording, Region,
    Reliability, State, Vi, ViListener, ViOptions, WaitError, WireConfig, WireError,
};
use loopback::{PATIENCE, nic, sealed, two_ends, wires};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

mod loopback;

/// Two ends of a VI, of two Nics.
struct Pair {
    here: Vi,
    there: Vi,
    memory: Region,
}

impl Pair {
    fn new(wire: &WireConfig) -> Pair {
        Pair::at(wire, "udp:127.0.0.1:0", &ViOptions::new())
    }

    fn at(wire: &WireConfig, address: &str, options: &ViOptions<'_>) -> Pair {
        let [(caller, here), (_, there)] = two_ends(wire, address, options);
        Pair { here, there, memory: caller.register(32 << 20).unwrap() }
    }

    /// Waits until both sides have so many completions, looking at both in turn.
    fn complete(&mut self, here: usize, there: usize) -> (Vec<Completion>, Vec<Completion>) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let until = Instant::now() + PATIENCE;
        while ours.len() < here || theirs.len() < there {
            ours.extend(self.here.poll());
            theirs.extend(self.there.poll());
            assert!(Instant::now() < until, "{} of {here} and {} of {there} are complete", ours.len(), theirs.len());
        }
        (ours, theirs)
    }
}

fn content(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed * 31) >> 24) as u8).collect()
}

#[test]
fn messages_of_every_length_arrive_whole_and_in_order() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let lengths = [0usize, 1, 4, 1399, 1400, 1401, 2808, 65_536, 1 << 20, 5_000_001];
        let mut at = 0;
        for (number, &length) in lengths.iter().enumerate() {
            let mut out = pair.memory.slice(at..at + length.max(1)).unwrap();
            out[..length].copy_from_slice(&content(number as u64, length));
            let place = pair.memory.slice(at + (16 << 20)..at + (16 << 20) + length.max(1)).unwrap();
            at += length.max(1).next_multiple_of(64);
            pair.there.post_recv(Receive::new(number as u64).into(place)).unwrap();
            let message = Message::new(100 + number as u64).control(&[number as u8; 7]).immediate(number as u32);
            let message = if length == 0 { message } else { message.payload(out) };
            pair.here.post_send(message).unwrap();
        }
        let (sent, received) = pair.complete(lengths.len(), lengths.len());
        for (number, (sent, got)) in sent.iter().zip(received).enumerate() {
            assert_eq!((sent.token, sent.operation, sent.status), (100 + number as u64, Operation::Send, Ok(())));
            assert_eq!((sent.length, got.length), (lengths[number], lengths[number]), "{wire:?}");
            assert_eq!((got.token, got.operation, got.status), (number as u64, Operation::Receive, Ok(())));
            assert_eq!((got.immediate, &got.control[..]), (number as u32, &[number as u8; 7][..]));
            let bytes = got.into_buffer().unwrap();
            assert!(bytes[..lengths[number]] == content(number as u64, lengths[number])[..], "message {number}");
        }
        assert!(matches!(pair.here.peer(), PeerId::Host(address) if address.ip().is_loopback()));
    }
}

#[test]
fn both_families_of_addresses_and_names_are_reached() {
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    for address in ["udp:127.0.0.1:0", "udp:[::1]:0", "udp:localhost:0"] {
        let mut pair = Pair::at(&wire, address, &ViOptions::new());
        pair.there.post_recv(Receive::new(1).into(pair.memory.slice(0..100_000).unwrap())).unwrap();
        pair.here.send_bytes(2, &content(1, 100_000)).unwrap();
        let (_, received) = pair.complete(1, 1);
        assert!(
            received.into_iter().next().unwrap().into_buffer().unwrap()[..] == content(1, 100_000)[..],
            "{address}"
        );
    }
}

#[test]
fn the_size_of_packets_can_be_limited_and_fixed() {
    for packet_size in [PacketSize::Fixed(1200), PacketSize::Fixed(9000), PacketSize::Search { most: 1472 }] {
        let wire = WireConfig { packet_size, keys: sealed(), ..WireConfig::default() };
        let mut pair = Pair::new(&wire);
        pair.there.post_recv(Receive::new(1).into(pair.memory.slice(0..1_000_000).unwrap())).unwrap();
        pair.here.send_bytes(2, &content(1, 1_000_000)).unwrap();
        let (_, received) = pair.complete(1, 1);
        let bytes = received.into_iter().next().unwrap().into_buffer().unwrap();
        assert!(bytes[..] == content(1, 1_000_000)[..], "{packet_size:?}");
    }
}

#[test]
fn payloads_are_gathered_scattered_and_received_in_place() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let all = content(3, 10_000);
        let mut message = Message::new(1);
        for (piece, (from, to)) in [(0, 100), (100, 5_000), (5_000, 5_001), (5_001, 10_000)].into_iter().enumerate() {
            let start = piece << 16;
            let mut buffer = pair.memory.slice(start..start + to - from).unwrap();
            buffer.copy_from_slice(&all[from..to]);
            message = message.payload(buffer);
        }
        let mut receive = Receive::new(2);
        for (piece, length) in [(8, 3_000), (9, 1), (10, 8_000)] {
            receive = receive.into(pair.memory.slice(piece << 16..(piece << 16) + length).unwrap());
        }
        pair.there.post_recv(receive).unwrap();
        pair.there.post_recv(Receive::new(3).in_place()).unwrap();
        pair.here.post_send(message).unwrap();
        pair.here.send_bytes(4, &all).unwrap();
        let (_, mut received) = pair.complete(2, 2);
        let in_place = received.pop().unwrap().into_in_place().unwrap();
        assert_eq!(in_place.as_slice(), Some(&all[..]));
        pair.there.receiver().release(in_place);
        let highwire::Payload::Segments(pieces) = received.pop().unwrap().payload else { panic!("several pieces") };
        let joined: Vec<u8> = pieces.iter().flat_map(|piece| piece.bytes().to_vec()).collect();
        assert!(joined[..10_000] == all[..]);
    }
}

#[test]
fn payload_tokens_name_places_and_are_revoked() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        let place = |pair: &Pair, at: usize| pair.memory.slice(at << 12..(at << 12) + 4096).unwrap();
        pair.there.expect(PayloadToken(7), Receive::new(1).into(place(&pair, 1))).unwrap();
        pair.there.expect(PayloadToken(8), Receive::new(2).into(place(&pair, 2))).unwrap();
        let again = pair.there.expect(PayloadToken(8), Receive::new(3).in_place()).unwrap_err();
        assert_eq!(again.reason, PostError::TokenInUse(8));
        pair.there.post_recv(Receive::new(4).into(place(&pair, 4))).unwrap();
        let back = pair.there.revoke(PayloadToken(8)).expect("nothing landed in it");
        assert!(pair.there.revoke(PayloadToken(8)).is_none() && pair.there.revoke(PayloadToken(9)).is_none());
        drop(back);
        for (token, lands) in [(10, Some(8)), (11, None), (12, Some(7))] {
            let mut buffer = place(&pair, token as usize);
            buffer.fill(token as u8);
            let message = Message::new(token).payload(buffer);
            let message = if let Some(lands) = lands { message.lands_at(PayloadToken(lands)) } else { message };
            pair.here.post_send(message).unwrap();
        }
        let (sent, received) = pair.complete(3, 2);
        assert!(sent.iter().all(|done| done.status.is_ok()));
        let seen: Vec<_> = received.iter().map(|done| (done.token, done.payload_token())).collect();
        assert_eq!(seen, [(4, None), (1, Some(PayloadToken(7)))]);
        let filled = received.into_iter().map(|done| done.into_buffer().unwrap()[0]).collect::<Vec<_>>();
        assert_eq!(filled, [11, 12]);
    }
}

#[test]
fn a_receiver_that_posts_nothing_holds_the_sender_back() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        for number in 0..50 {
            pair.here.send_bytes(number, &content(number, 3000)).unwrap();
        }
        let quiet = pair.here.wait(Duration::from_millis(100)).err();
        assert_eq!(quiet, Some(WaitError::TimedOut(Duration::from_millis(100))), "{wire:?}");
        for number in 0..50 {
            let place = pair.memory.slice(number << 12..(number << 12) + 4096).unwrap();
            pair.there.post_recv(Receive::new(number as u64).into(place)).unwrap();
        }
        let (_, received) = pair.complete(50, 50);
        for (number, got) in received.into_iter().enumerate() {
            assert!(got.into_buffer().unwrap()[..3000] == content(number as u64, 3000)[..]);
        }
    }
}

#[test]
fn a_message_that_is_too_long_fails_its_receive_and_the_next_arrives() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        pair.there.post_recv(Receive::new(1).into(pair.memory.slice(0..1000).unwrap())).unwrap();
        pair.there.post_recv(Receive::new(2).into(pair.memory.slice(4096..5096).unwrap())).unwrap();
        pair.here.send_bytes(1, &content(1, 5000)).unwrap();
        pair.here.send_bytes(2, &content(2, 1000)).unwrap();
        let (_, received) = pair.complete(2, 2);
        assert_eq!(received[0].status, Err(Failure::TooLong { message: 5000, buffer: 1000 }));
        assert_eq!((received[1].status, received[1].length), (Ok(()), 1000));
    }
}

#[test]
fn many_vis_share_a_session_and_none_waits_for_another() {
    for wire in wires() {
        let (caller, listening) = (nic(&wire), nic(&wire));
        let listener = listening.listen("udp:127.0.0.1:0").unwrap();
        let mut queue = listening.completion_queue().unwrap();
        let options = ViOptions::new().queue(&queue);
        let to = listener.address().to_owned();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            std::thread::scope(|scope| {
                let here = scope.spawn(|| caller.connect(&to).unwrap());
                theirs.push(listener.accept_with(PATIENCE, &options).unwrap());
                ours.push(here.join().unwrap());
            });
        }
        // The first gets no receives; all others go on.
        let memory = listening.register(1 << 20).unwrap();
        for (number, vi) in theirs.iter_mut().enumerate().skip(1) {
            let place = memory.slice(number << 12..(number << 12) + 4096).unwrap();
            vi.post_recv(Receive::new(number as u64).into(place)).unwrap();
        }
        for (number, vi) in ours.iter_mut().enumerate() {
            vi.send_bytes(0, &[number as u8; 64]).unwrap();
        }
        let mut got = 0;
        while got < 19 {
            let id = queue.wait(PATIENCE).unwrap();
            let (number, vi) = theirs.iter_mut().enumerate().find(|(_, vi)| vi.id() == id).unwrap();
            while let Some(done) = vi.poll() {
                assert_eq!((done.token, done.status, done.length), (number as u64, Ok(()), 64));
                assert_eq!(done.into_buffer().unwrap()[0], number as u8);
                got += 1;
            }
        }
        assert!(theirs[0].poll().is_none());
        // And one that is closed tells its peer, and nobody else.
        drop(ours.remove(5));
        let closed = theirs[5].wait(PATIENCE).err();
        assert!(
            matches!(closed, Some(WaitError::NotConnected(Failure::PeerClosed | Failure::PeerAborted))),
            "{closed:?}"
        );
        assert!(theirs.iter().enumerate().all(|(at, vi)| (vi.state() == State::Connected) == (at != 5)));
    }
}

#[test]
fn an_unreliable_vi_completes_when_it_has_left() {
    for wire in wires() {
        let options = ViOptions::new().reliability(Reliability::Unreliable);
        let mut pair = Pair::at(&wire, "udp:127.0.0.1:0", &options);
        // Nobody receives: what is sent is lost, and complete.
        pair.here.send_bytes(1, b"lost").unwrap();
        assert_eq!(pair.here.wait(PATIENCE).unwrap().status, Ok(()));
        // The loss may still be on its way.
        std::thread::sleep(Duration::from_millis(100));
        pair.there.poll();
        pair.there.post_recv(Receive::new(2).into(pair.memory.slice(0..64).unwrap())).unwrap();
        pair.here.send_bytes(3, b"found").unwrap();
        let (_, received) = pair.complete(1, 1);
        assert_eq!(&received.into_iter().next().unwrap().into_buffer().unwrap()[..5], b"found");
    }
}

#[test]
fn disconnecting_delivers_everything_first_and_the_peer_learns_of_it() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        for number in 0..100 {
            let place = pair.memory.slice(number << 16..(number << 16) + 20_000).unwrap();
            pair.there.post_recv(Receive::new(number as u64).into(place)).unwrap();
            pair.here.send_bytes(number as u64, &content(number as u64, 20_000)).unwrap();
        }
        let Pair { here, mut there, .. } = pair;
        let closing = std::thread::spawn(move || here.disconnect(PATIENCE));
        for number in 0..100 {
            let done = there.wait(PATIENCE).unwrap();
            assert_eq!((done.token, done.status), (number, Ok(())));
            assert!(done.into_buffer().unwrap()[..] == content(number, 20_000)[..]);
        }
        closing.join().unwrap().unwrap();
        assert_eq!(there.wait(PATIENCE).err(), Some(WaitError::NotConnected(Failure::PeerClosed)));
        let late = there.send_bytes(1, b"late").unwrap_err();
        assert_eq!(late, PostError::NotConnected(Failure::PeerClosed));
    }
}

#[test]
fn what_is_outstanding_comes_back_when_the_peer_goes() {
    for wire in wires() {
        let mut pair = Pair::new(&wire);
        pair.here.post_recv(Receive::new(1).into(pair.memory.slice(0..64).unwrap())).unwrap();
        pair.here.post_send(Message::new(2).payload(pair.memory.slice(4096..8192).unwrap())).unwrap();
        drop(pair.there);
        let mut back = Vec::new();
        while back.len() < 2 {
            back.push(pair.here.wait(PATIENCE).unwrap());
        }
        for done in back {
            assert_eq!(done.status, Err(Failure::PeerClosed), "{:?}", done.operation);
            assert!(done.into_buffer().is_some(), "with its buffer");
        }
        assert_eq!(pair.here.wait(PATIENCE).err(), Some(WaitError::NotConnected(Failure::PeerClosed)));
    }
}

#[test]
fn a_peer_that_falls_silent_is_dead_within_the_death_time() {
    for driver in [Driver::Thread, Driver::Caller] {
        let death = Duration::from_secs(1);
        let wire = WireConfig { keys: sealed(), driver, death, ..WireConfig::default() };
        let partition =
            Impairments { partitions: vec![Duration::from_millis(400)..Duration::MAX], ..Impairments::default() };
        let cut = WireConfig { impairments: Some((partition, 1)), ..wire.clone() };
        let listening = nic(&wire);
        let listener = listening.listen("udp:127.0.0.1:0").unwrap();
        let to = listener.address().to_owned();
        let (here, mut there) = std::thread::scope(|scope| {
            let here = scope.spawn(|| nic(&cut).connect(&to).unwrap());
            let there = listener.accept(PATIENCE).unwrap();
            (here.join().unwrap(), there)
        });
        let began = Instant::now();
        assert_eq!(there.wait(PATIENCE).err(), Some(WaitError::NotConnected(Failure::PeerSilent(death))));
        assert!(began.elapsed() > Duration::from_millis(900) && began.elapsed() < Duration::from_secs(4));
        drop(here);
    }
}

#[test]
fn beyond_this_host_a_key_is_needed() {
    let plain = nic(&WireConfig::default());
    for address in ["udp:0.0.0.0:0", "udp:[::]:0"] {
        let refused = plain.listen(address).err();
        assert!(matches!(&refused, Some(ListenError::Wire { reason: WireError::NoKey(_), .. })), "{refused:?}");
        let text = refused.unwrap().to_string();
        assert!(text.contains("highwire key new") && text.contains("--insecure"), "{text}");
    }
    let refused = plain.connect("udp:192.0.2.1:7").err();
    assert!(matches!(&refused, Some(ConnectError::Wire { reason: WireError::NoKey(_), .. })), "{refused:?}");
    assert!(plain.listen("udp:127.0.0.1:0").is_ok());
    let allowed = nic(&WireConfig { insecure: true, ..WireConfig::default() });
    assert!(allowed.listen("udp:0.0.0.0:0").is_ok());
    let keyed = nic(&WireConfig { keys: sealed(), ..WireConfig::default() });
    assert!(keyed.listen("udp:0.0.0.0:0").is_ok());
}

#[test]
fn nobody_there_another_key_and_nobody_accepting_are_told_apart() {
    let config = Config { connect_timeout: Duration::from_millis(700), ..Config::default() };
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    let caller = Nic::with_wire(config, wire.clone()).unwrap();
    let fingerprint = ClusterKey::from_random([9; 32]).fingerprint().to_string();
    let nobody = caller.connect("udp:127.0.0.1:9").unwrap_err().to_string();
    let other = nic(&WireConfig { keys: Keys::new(ClusterKey::from_random([8; 32])), ..WireConfig::default() });
    let listener = other.listen("udp:127.0.0.1:0").unwrap();
    let wrong_key = caller.connect(listener.address()).unwrap_err().to_string();
    for text in [nobody, wrong_key] {
        for cause in ["nothing listens", "UDP is blocked", "keys differ", &fingerprint] {
            assert!(text.contains(cause), "{text}");
        }
    }
    let deaf = nic(&wire).listen("udp:127.0.0.1:0").unwrap();
    let unaccepted = caller.connect(deaf.address()).unwrap_err();
    assert!(matches!(&unaccepted, ConnectError::Wire { reason: WireError::NotAccepted { .. }, .. }), "{unaccepted}");
    // It has gone away by the time the other accepts.
    std::thread::sleep(Duration::from_millis(200));
    let late = deaf.accept(Duration::from_millis(100)).err();
    assert!(matches!(late, Some(AcceptError::TimedOut(_))), "{late:?}");
    let taken = nic(&wire).listen(deaf.address()).unwrap_err();
    assert!(matches!(taken, ListenError::Wire { reason: WireError::InUse(_), .. }), "{taken}");
    for bad in ["udp:", "udp:7", "udp:host", "udp:host:seven"] {
        let error = caller.connect(bad).unwrap_err();
        assert!(matches!(error, ConnectError::Wire { reason: WireError::Address(_), .. }), "{error}");
    }
}

#[test]
fn limits_are_refusals_with_the_descriptor() {
    let wire = WireConfig { message_bytes_max: 10_000, ..WireConfig::default() };
    let mut pair = Pair::new(&wire);
    let long = Message::new(1).payload(pair.memory.slice(0..10_001).unwrap());
    let refused = pair.here.post_send(long).unwrap_err();
    assert_eq!(refused.reason, PostError::TooLong { bytes: 10_001, limit: 10_000 });
    let refused = pair.here.post_send(Message::new(1).control(&[0; 129])).unwrap_err();
    assert_eq!(refused.reason, PostError::ControlTooLong { bytes: 129 });
    for number in 0..1024 {
        pair.here.send_bytes(number, b"x").unwrap();
    }
    assert_eq!(pair.here.send_bytes(0, b"x"), Err(PostError::NoRoom { bytes: 1 }));
    assert_eq!(pair.here.post_send(Message::new(0)).unwrap_err().reason, PostError::QueueFull { limit: 1024 });
}

#[test]
fn loss_reordering_and_corruption_are_made_good() {
    let bad =
        Impairments { loss: 0.05, reordering: 0.05, duplication: 0.02, corruption: 0.01, ..Impairments::default() };
    for driver in [Driver::Thread, Driver::Caller] {
        let wire = WireConfig { keys: sealed(), driver, impairments: Some((bad.clone(), 5)), ..WireConfig::default() };
        let mut pair = Pair::new(&wire);
        for number in 0..20 {
            let place = pair.memory.slice(number << 18..(number << 18) + 200_000).unwrap();
            pair.there.post_recv(Receive::new(number as u64).into(place)).unwrap();
            pair.here.send_bytes(number as u64, &content(number as u64, 200_000)).unwrap();
        }
        let (_, received) = pair.complete(20, 20);
        for (number, done) in received.into_iter().enumerate() {
            assert!(done.into_buffer().unwrap()[..] == content(number as u64, 200_000)[..]);
        }
    }
}

#[test]
fn all_ports_of_an_interface_are_recorded_in_one_file() {
    let folder = tempfile::tempdir().unwrap();
    for wire in wires() {
        let file = folder.path().join("all.pcap");
        let recording = Recording::create(&file).unwrap();
        let wire = WireConfig { record: Some(recording.clone()), ..wire };
        let payloads = [content(1, 500), content(2, 500)];
        for (address, payload) in ["udp:127.0.0.1:0", "udp:[::1]:0"].iter().zip(&payloads) {
            let mut pair = Pair::at(&wire, address, &ViOptions::new());
            let place = pair.memory.slice(0..500).unwrap();
            pair.there.post_recv(Receive::new(1).into(place)).unwrap();
            pair.here.send_bytes(1, payload).unwrap();
            pair.complete(1, 1);
        }
        recording.flush();
        assert_eq!(recording.error(), None);
        let written = std::fs::read(&file).unwrap();
        for payload in &payloads {
            let times = written.windows(payload.len()).filter(|bytes| bytes == payload).count();
            if wire.keys.is_insecure() {
                assert!(times >= 2, "sent and received, but there {times} times: {wire:?}");
            } else {
                assert_eq!(times, 0, "a key keeps it from whoever reads the file");
            }
        }
    }
}

#[test]
fn a_vi_without_a_key_is_granted_a_list_that_it_asks_for() {
    let folder = tempfile::tempdir().unwrap();
    for (wire, lists) in wires().into_iter().flat_map(|wire| [(wire.clone(), 4), (wire, 0)]) {
        let file = folder.path().join("fast.pcap");
        let recording = Recording::create(&file).unwrap();
        let wire = WireConfig { record: Some(recording.clone()), lists, ..wire };
        let mut pair = Pair::new(&wire);
        pair.here.request_fast();
        // And a message that asks by itself.
        for bytes in [100, 1 << 20] {
            let payload = content(3, bytes);
            let place = pair.memory.slice(0..bytes).unwrap();
            pair.there.post_recv(Receive::new(1).into(place)).unwrap();
            pair.here.send_bytes(1, &payload).unwrap();
            let (_, there) = pair.complete(1, 1);
            assert_eq!((there[0].length, &there[0].status), (bytes, &Ok(())));
        }
        recording.flush();
        let written = std::fs::read(&file).unwrap();
        // Version, kind, any flags, no list; and the word: granted, or refused.
        let is_word = |packet: &[u8], word| packet[..4] == [1, 7, 0, 0] && packet[24..28] == [word, 0, 0, 0];
        let said = |word| written.windows(64).any(|packet| is_word(packet, word));
        let plain = wire.keys.is_insecure();
        assert_eq!([said(2), said(3)], [plain && lists > 0, plain && lists == 0], "{wire:?}");
        // Nobody is left to ask.
        drop(pair.there);
        pair.here.request_fast();
    }
}

#[test]
fn the_key_is_changed_while_connections_go_on() {
    let (old, new) = (|| ClusterKey::from_random([1; 32]), || ClusterKey::from_random([2; 32]));
    let config = || Config { connect_timeout: Duration::from_secs(1), ..Config::default() };
    let with = |keys| Nic::with_wire(config(), WireConfig { keys, ..WireConfig::default() }).unwrap();
    let (server, early, late) = (with(Keys::new(old())), with(Keys::new(old())), with(Keys::new(new())));
    let listener = server.listen("udp:127.0.0.1:0").unwrap();
    let to = listener.address().to_owned();
    let meet = |caller: &Nic| {
        std::thread::scope(|scope| {
            let here = scope.spawn(|| caller.connect(&to));
            let there = listener.accept(Duration::from_secs(2));
            here.join().unwrap().ok().zip(there.ok())
        })
    };
    let (mut here, mut there) = meet(&early).expect("the old key");
    assert!(meet(&late).is_none(), "the new key is not known yet");
    server.set_keys(Keys::new(new()).also_accepting(old())).unwrap();
    meet(&late).expect("the new key");
    server.set_keys(Keys::new(new())).unwrap();
    assert!(meet(&with(Keys::new(old()))).is_none(), "the old key is gone");
    early.set_keys(Keys::new(new())).unwrap();
    // What is connected goes on all the while.
    let memory = server.register(4096).unwrap();
    there.post_recv(Receive::new(1).into(memory.slice(0..64).unwrap())).unwrap();
    here.send_bytes(1, b"still here").unwrap();
    assert_eq!(&there.wait(PATIENCE).unwrap().into_buffer().unwrap()[..10], b"still here");
}

#[test]
fn a_key_that_was_removed_ends_its_sessions_when_it_is_said() {
    let new = || ClusterKey::from_random([2; 32]);
    let with = |keys| Nic::with_wire(Config::default(), WireConfig { keys, ..WireConfig::default() }).unwrap();
    for removed in [Keys::insecure, || Keys::new(ClusterKey::from_random([1; 32]))] {
        let (server, caller) = (with(removed()), with(removed()));
        let listener = server.listen("udp:127.0.0.1:0").unwrap();
        let to = listener.address().to_owned();
        let (mut here, mut there) = std::thread::scope(|scope| {
            let here = scope.spawn(|| caller.connect(&to).unwrap());
            (listener.accept(PATIENCE).unwrap(), here.join().unwrap())
        });
        let fingerprint = removed().to_call_with().map(|key| key.fingerprint());
        for nic in [&server, &caller] {
            let sessions = nic.sessions();
            assert_eq!((sessions.len(), sessions[0].fingerprint), (1, fingerprint), "{sessions:?}");
        }
        server.set_keys(Keys::new(new())).unwrap();
        assert_eq!(server.sessions().len(), 1, "it goes on");
        assert_eq!((server.end_old_sessions(), server.end_old_sessions()), (1, 0));
        for vi in [&mut here, &mut there] {
            assert_eq!(vi.wait(PATIENCE).err(), Some(WaitError::NotConnected(Failure::KeyRemoved)));
        }
        assert_eq!(server.sessions(), []);
    }
}

#[test]
fn a_cluster_changes_its_key_under_load_without_a_failed_call() {
    const NODES: usize = 3;
    /// A thread that calls: nodes accept as long as there is one, however it ends.
    struct Calling<'a>(&'a AtomicU32);
    impl Drop for Calling<'_> {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Relaxed);
        }
    }
    let old = || ClusterKey::from_random([1; 32]);
    let nodes: Vec<Nic> =
        (0..NODES).map(|_| nic(&WireConfig { keys: Keys::new(old()), ..WireConfig::default() })).collect();
    let listeners: Vec<_> = nodes.iter().map(|node| node.listen("udp:127.0.0.1:0").unwrap()).collect();
    let (over, calling) = (AtomicBool::new(false), AtomicU32::new(NODES as u32));
    let calls: Vec<AtomicU32> = (0..NODES).map(|_| AtomicU32::new(0)).collect();
    std::thread::scope(|scope| {
        for (node, listener) in nodes.iter().zip(&listeners) {
            scope.spawn(|| {
                let memory = node.register(4096).unwrap();
                while calling.load(Relaxed) > 0 {
                    let Ok(mut vi) = listener.accept(Duration::from_millis(50)) else { continue };
                    vi.post_recv(Receive::new(1).into(memory.slice(0..64).unwrap())).unwrap();
                    let received = vi.wait(PATIENCE).unwrap();
                    assert_eq!(&received.into_buffer().unwrap()[..4], b"call");
                }
            });
        }
        for (number, node) in nodes.iter().enumerate() {
            let (calls, listeners, over, calling) = (&calls, &listeners, &over, Calling(&calling));
            scope.spawn(move || {
                let _calling = calling;
                // Each call is a session of its own: the last one ends with its VI.
                for turn in 0.. {
                    if over.load(Relaxed) {
                        break;
                    }
                    let to = listeners[(number + 1 + turn % (NODES - 1)) % NODES].address();
                    let mut vi = node.connect(to).unwrap_or_else(|error| panic!("node {number}: {error}"));
                    vi.send_bytes(1, b"call").unwrap();
                    vi.wait(PATIENCE).unwrap();
                    vi.disconnect(PATIENCE).unwrap();
                    calls[number].fetch_add(1, Relaxed);
                }
            });
        }
        // Some calls of each node before the next change anywhere.
        let some = |wanted: u32| {
            let before: Vec<u32> = calls.iter().map(|calls| calls.load(Relaxed)).collect();
            let is_done = || calls.iter().zip(&before).all(|(calls, before)| calls.load(Relaxed) >= before + wanted);
            let deadline = Instant::now() + PATIENCE;
            while !is_done() {
                assert!(Instant::now() < deadline, "the nodes call no more: {calls:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let steps: [fn() -> Keys; 3] = [
            || Keys::new(ClusterKey::from_random([1; 32])).also_accepting(ClusterKey::from_random([2; 32])),
            || Keys::new(ClusterKey::from_random([2; 32])).also_accepting(ClusterKey::from_random([1; 32])),
            || Keys::new(ClusterKey::from_random([2; 32])),
        ];
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            some(3);
            for step in steps {
                for node in &nodes {
                    node.set_keys(step()).unwrap();
                    some(3);
                }
            }
        }));
        over.store(true, Relaxed);
        changed.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    let fingerprints = |nic: &Nic| nic.sessions().iter().filter_map(|session| session.fingerprint).collect::<Vec<_>>();
    assert!(nodes.iter().all(|node| !fingerprints(node).contains(&old().fingerprint())));
}

#[test]
fn a_port_that_is_being_opened_does_not_miss_a_change_of_keys() {
    let key = |byte| Keys::new(ClusterKey::from_random([byte; 32]));
    let nic = Nic::with_wire(Config::default(), WireConfig { keys: key(0), ..WireConfig::default() }).unwrap();
    for byte in 1..30 {
        let listener = std::thread::scope(|scope| {
            let opened = scope.spawn(|| nic.listen("udp:127.0.0.1:0").unwrap());
            nic.set_keys(key(byte)).unwrap();
            opened.join().unwrap()
        });
        let config = Config { connect_timeout: Duration::from_secs(10), ..Config::default() };
        let caller = Nic::with_wire(config, WireConfig { keys: key(byte), ..WireConfig::default() }).unwrap();
        std::thread::scope(|scope| {
            let called = scope.spawn(|| caller.connect(listener.address()));
            listener.accept(PATIENCE).unwrap_or_else(|error| panic!("change {byte}: {error}"));
            called.join().unwrap().unwrap();
        });
    }
}

/// Waits until this end knows that the VI is over.
fn until_it_is_over(vi: &Vi) {
    let until = Instant::now() + PATIENCE;
    while vi.state() == State::Connected {
        assert!(Instant::now() < until, "it goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn disconnecting_tells_that_messages_did_not_arrive() {
    for wire in wires() {
        let Pair { mut here, there, .. } = Pair::new(&wire);
        here.send_bytes(1, b"nobody receives this").unwrap();
        drop(there);
        until_it_is_over(&here);
        let told = here.disconnect(Duration::from_secs(2));
        assert_eq!(told, Err(WaitError::NotConnected(Failure::PeerClosed)), "{:?}", wire.driver);
    }
}

/// Connects while somebody accepts; what came of it.
fn meet(caller: &Nic, listener: &ViListener) -> Result<(Vi, Option<Vi>), ConnectError> {
    std::thread::scope(|scope| {
        let here = scope.spawn(|| caller.connect(listener.address()));
        let there = listener.accept(Duration::from_secs(2));
        Ok((here.join().unwrap()?, there.ok()))
    })
}

#[test]
fn a_session_that_is_over_makes_room_for_another() {
    for wire in wires() {
        let (caller, listening) = (nic(&WireConfig { sessions_max: 1, ..wire.clone() }), nic(&wire));
        let listener = listening.listen("udp:127.0.0.1:0").unwrap();
        drop(meet(&caller, &listener).unwrap());
        // Nothing moves any more, and nobody turns the port.
        std::thread::sleep(Duration::from_millis(1500));
        meet(&caller, &listener).unwrap();
    }
}

#[test]
fn a_session_that_comes_after_its_caller_gave_up_is_closed() {
    let wire = WireConfig { keys: sealed(), sessions_max: 1, ..WireConfig::default() };
    let config = Config { connect_timeout: Duration::from_millis(400), ..Config::default() };
    let (caller, listening) = (Nic::with_wire(config, wire.clone()).unwrap(), nic(&wire));
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    caller.connect(&format!("udp:{free}")).unwrap_err();
    // Its hello is repeated for a while, and answered.
    let listener = listening.listen(&format!("udp:{free}")).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    meet(&caller, &listener).unwrap();
}

#[test]
fn receives_do_not_wait_behind_sends() {
    // More than a session takes at once.
    const COUNT: usize = 5000;
    for driver in [Driver::Thread, Driver::Caller] {
        let config = Config { descriptors_max: COUNT, ..Config::default() };
        let wire = WireConfig { keys: sealed(), driver, ..WireConfig::default() };
        let nic = || Nic::with_wire(config.clone(), wire.clone()).unwrap();
        let (caller, listening) = (nic(), nic());
        let listener = listening.listen("udp:127.0.0.1:0").unwrap();
        let (here, there) = meet(&caller, &listener).unwrap();
        let mut pair = Pair { here, there: there.unwrap(), memory: caller.register(4096).unwrap() };
        for vi in [&mut pair.here, &mut pair.there] {
            (0..COUNT).for_each(|number| vi.send_bytes(number as u64, b"x").unwrap());
            (0..COUNT).for_each(|number| vi.post_recv(Receive::new(number as u64)).unwrap());
        }
        let (ours, theirs) = pair.complete(2 * COUNT, 2 * COUNT);
        for done in [ours, theirs] {
            for operation in [Operation::Send, Operation::Receive] {
                let of_it = done.iter().filter(|done| done.operation == operation).map(|done| done.token as usize);
                assert!(of_it.eq(0..COUNT), "{operation:?}");
            }
        }
    }
}

#[test]
fn everything_comes_back_in_order_before_the_end_is_told() {
    for driver in [Driver::Thread, Driver::Caller] {
        let wire = WireConfig { keys: sealed(), driver, ..WireConfig::default() };
        for round in 0..60 {
            let Pair { here, there, .. } = Pair::new(&wire);
            let (mut tx, mut rx) = here.split();
            // The peer goes while both halves post.
            let going = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(37 * round));
                drop(there);
            });
            let sending = std::thread::spawn(move || {
                let (mut posted, mut back) = (0, Vec::new());
                loop {
                    match tx.send_bytes(posted, b"x") {
                        Ok(()) => posted += 1,
                        Err(PostError::NotConnected(_)) => break,
                        Err(_) => back.extend(tx.poll().map(|done| done.token)),
                    }
                }
                while let Ok(done) = tx.wait(PATIENCE) {
                    back.push(done.token);
                }
                (posted, back)
            });
            let (mut posted, mut back) = (0, Vec::new());
            loop {
                match rx.post_recv(Receive::new(posted)).map_err(|refused| refused.reason) {
                    Ok(()) => posted += 1,
                    Err(PostError::NotConnected(_)) => break,
                    Err(_) => back.extend(rx.poll().map(|done| done.token)),
                }
            }
            while let Ok(done) = rx.wait(PATIENCE) {
                back.push(done.token);
            }
            assert!(back.iter().copied().eq(0..posted), "receives, {driver:?}, {round}: {posted} posted");
            let (posted, back) = sending.join().unwrap();
            assert!(back.iter().copied().eq(0..posted), "sends, {driver:?}, {round}: {posted} posted");
            going.join().unwrap();
        }
    }
}

#[test]
fn the_queue_shows_the_end_to_the_half_that_is_left() {
    for wire in wires() {
        let (caller, listening) = (nic(&wire), nic(&wire));
        let listener = listening.listen("udp:127.0.0.1:0").unwrap();
        let mut queue = listening.completion_queue().unwrap();
        let options = ViOptions::new().queue(&queue);
        let (there, here) = std::thread::scope(|scope| {
            let there = scope.spawn(|| caller.connect(listener.address()).unwrap());
            let here = listener.accept_with(PATIENCE, &options).unwrap();
            (there.join().unwrap(), here)
        });
        let (tx, mut rx) = here.split();
        drop(there);
        assert!(matches!(rx.wait(PATIENCE), Err(WaitError::NotConnected(_))));
        drop(rx);
        assert_eq!(queue.wait(Duration::from_secs(2)), Ok(tx.id()), "{:?}", wire.driver);
    }
}

#[test]
fn what_is_lost_is_sent_again_while_another_thread_rests() {
    let lossy = Duration::from_millis(500)..Duration::from_millis(520);
    let impairments = Some((Impairments { partitions: vec![lossy], ..Impairments::default() }, 1));
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    let listening = nic(&wire);
    let caller = nic(&WireConfig { driver: Driver::Caller, impairments, ..wire });
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let began = Instant::now();
    let (here, there) = meet(&caller, &listener).unwrap();
    let mut there = there.unwrap();
    there.post_recv(Receive::new(1)).unwrap();
    let (mut tx, mut rx) = here.split();
    let resting = std::thread::spawn(move || rx.wait(PATIENCE));
    std::thread::sleep(Duration::from_millis(505).saturating_sub(began.elapsed()));
    // It is lost, and who sent it does not look.
    tx.send_bytes(1, b"").unwrap();
    let posted = Instant::now();
    assert_eq!(there.wait(PATIENCE).unwrap().status, Ok(()));
    assert!(posted.elapsed() < Duration::from_secs(1), "{:?}", posted.elapsed());
    drop(there);
    assert!(resting.join().unwrap().is_err());
}

/// How often threads of ports have gone to sleep, in this process.
fn sleeps() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.path());
    let ports = tasks
        .filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "highwire-wire"));
    let sleeps = ports.filter_map(|task| {
        let status = std::fs::read_to_string(task.join("status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse::<u64>().ok()
    });
    sleeps.sum()
}

/// In a process of its own, so that no other test's threads are counted.
#[test]
fn callers_who_turn_or_rest_leave_the_thread_asleep() {
    if std::env::var_os("HIGHWIRE_COUNT_SLEEPS").is_none() {
        let name = "callers_who_turn_or_rest_leave_the_thread_asleep";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let done = alone.args(["--exact", name, "--nocapture"]).env("HIGHWIRE_COUNT_SLEEPS", "1").output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        return;
    }
    let mut pair = Pair::new(&WireConfig { keys: sealed(), driver: Driver::Caller, ..WireConfig::default() });
    let (before, began) = (sleeps(), Instant::now());
    for number in 0..1000 {
        pair.there.post_recv(Receive::new(number)).unwrap();
        pair.here.send_bytes(number, b"x").unwrap();
        pair.complete(1, 1);
    }
    // Two threads look every 10 ms whether they are needed.
    let (turning, naps) = (sleeps() - before, 2 * began.elapsed().as_millis() as u64 / 10);
    assert!(turning < 100 + 3 * naps, "{turning} sleeps for 1000 messages, {naps} naps");
    let Pair { mut here, mut there, .. } = pair;
    let other = std::thread::spawn(move || there.wait(Duration::from_millis(1500)).is_err());
    let _ = here.wait(Duration::from_millis(300));
    let before = sleeps();
    assert!(here.wait(Duration::from_secs(1)).is_err());
    let resting = sleeps() - before;
    assert!(resting < 20, "{resting} sleeps in an idle second");
    assert!(other.join().unwrap());
}

#[test]
fn a_background_thread_ends_at_once() {
    for wire in wires() {
        let Pair { here, there, .. } = Pair::new(&wire);
        let background = Background::spawn(here).unwrap();
        // By now it sleeps.
        std::thread::sleep(Duration::from_millis(300));
        let began = Instant::now();
        drop(background);
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}: {:?}", wire.driver, began.elapsed());
        drop(there);
    }
}

#[test]
fn without_a_key_who_connects_is_bound_to_loopback() {
    let (caller, listening) = (nic(&WireConfig::default()), nic(&WireConfig::default()));
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let (_here, there) = meet(&caller, &listener).unwrap();
    let PeerId::Host(from) = there.unwrap().peer() else { panic!("another host") };
    // Another socket has the port on another address of this host only if ours is not bound to all.
    let beside = std::net::UdpSocket::bind(("127.0.0.2", from.port()));
    assert!(beside.is_ok(), "{from} is bound to every address: {beside:?}");
}

#[test]
fn a_receive_that_is_posted_is_told_though_nobody_looks() {
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    let (caller, listening) = (nic(&wire), nic(&WireConfig { driver: Driver::Caller, ..wire }));
    let listener = listening.listen("udp:127.0.0.1:0").unwrap();
    let (mut here, there) = meet(&caller, &listener).unwrap();
    let mut there = there.unwrap();
    here.send_bytes(1, b"").unwrap();
    // Whoever waits for a receive asks less and less often.
    assert!(here.wait(Duration::from_millis(3500)).is_err());
    there.post_recv(Receive::new(1)).unwrap();
    let posted = Instant::now();
    assert_eq!(here.wait(PATIENCE).unwrap().status, Ok(()));
    assert!(posted.elapsed() < Duration::from_millis(500), "{:?}", posted.elapsed());
}

#[test]
fn a_listener_keeps_its_key_while_others_can_reach_it() {
    let nic = nic(&WireConfig { keys: sealed(), ..WireConfig::default() });
    let listener = nic.listen("udp:0.0.0.0:0").unwrap();
    assert!(matches!(nic.set_keys(Keys::insecure()), Err(WireError::NoKey(_))));
    drop(listener);
    nic.set_keys(Keys::insecure()).unwrap();
}

#[test]
fn an_address_is_free_again_at_once() {
    let wire = WireConfig::default();
    let listening = nic(&wire);
    let mut address = "udp:127.0.0.1:0".to_owned();
    for _ in 0..20 {
        let listener = listening.listen(&address).unwrap();
        address = listener.address().to_owned();
    }
}

#[test]
fn the_first_message_goes_at_once() {
    for wire in wires() {
        for _ in 0..5 {
            let mut pair = Pair::new(&wire);
            pair.there.post_recv(Receive::new(1).in_place()).unwrap();
            pair.here.post_recv(Receive::new(1).in_place()).unwrap();
            let began = Instant::now();
            pair.here.send_bytes(2, b"first").unwrap();
            pair.complete(1, 1);
            assert!(began.elapsed() < Duration::from_millis(40), "{:?} {wire:?}", began.elapsed());
        }
    }
}

/// Looks until a message has come.
fn look_for_message(look: &mut dyn FnMut() -> Option<Completion>) -> Completion {
    let until = Instant::now() + PATIENCE;
    loop {
        match look() {
            Some(done) if done.operation == Operation::Receive => return done,
            _ => assert!(Instant::now() < until, "no message came"),
        }
        std::thread::yield_now();
    }
}

#[test]
fn one_that_is_closed_after_the_answer_was_not_aborted() {
    for wire in wires() {
        for _ in 0..5 {
            let Pair { mut here, mut there, memory: _memory } = Pair::new(&wire);
            let server = std::thread::spawn(move || {
                (0..2).for_each(|_| there.post_recv(Receive::new(1).in_place()).unwrap());
                look_for_message(&mut || there.poll());
                there.send_bytes(2, b"answer").unwrap();
                // The second receive comes back with the end.
                look_for_message(&mut || there.poll()).status
            });
            here.post_recv(Receive::new(1).in_place()).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            here.send_bytes(1, b"question").unwrap();
            // The answer has told that the question arrived, whether that was looked at or not.
            look_for_message(&mut || here.poll());
            drop(here);
            assert_eq!(server.join().unwrap(), Err(Failure::PeerClosed), "{wire:?}");
        }
    }
}

#[test]
fn word_of_what_went_reaches_the_other_half_at_once() {
    const ROUNDS: usize = 60;
    let wire = WireConfig { driver: Driver::Caller, ..WireConfig::default() };
    let Pair { here, mut there, memory: _memory } = Pair::new(&wire);
    let server = std::thread::spawn(move || {
        (0..4).for_each(|_| there.post_recv(Receive::new(1).in_place()).unwrap());
        for _ in 0..ROUNDS {
            look_for_message(&mut || there.poll());
            there.post_recv(Receive::new(1).in_place()).unwrap();
            std::thread::sleep(Duration::from_micros(300));
            there.send_bytes(2, b"answer").unwrap();
        }
        there.sender().flush(PATIENCE).unwrap();
    });
    let (mut tx, mut rx) = here.split();
    (0..ROUNDS).for_each(|_| rx.post_recv(Receive::new(1).in_place()).unwrap());
    let (go, gone) = std::sync::mpsc::channel::<()>();
    let sender = std::thread::spawn(move || {
        let mut told = Vec::new();
        while gone.recv().is_ok() {
            tx.send_bytes(1, b"question").unwrap();
            tx.wait(PATIENCE).unwrap();
            told.push(Instant::now());
        }
        told
    });
    let mut came = Vec::new();
    for _ in 0..ROUNDS {
        go.send(()).unwrap();
        look_for_message(&mut || rx.poll());
        came.push(Instant::now());
        // This half goes on looking; the other one sleeps.
        while came[came.len() - 1].elapsed() < Duration::from_millis(3) {
            assert!(rx.poll().is_none());
            std::thread::yield_now();
        }
    }
    drop(go);
    let told = sender.join().unwrap();
    server.join().unwrap();
    let mut late: Vec<Duration> =
        told.iter().zip(&came).map(|(told, came)| told.saturating_duration_since(*came)).collect();
    late.sort();
    // It would be a millisecond if it waited for a timer.
    assert!(late[ROUNDS / 2] < Duration::from_micros(700), "{late:?}");
}
