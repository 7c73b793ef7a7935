use super::*;
use crate::entropy::SeededEntropy;
use crate::message::{Incoming, Outgoing};
use crate::session::{Assurance, Ending};
use crate::{ClusterKey, HELLO_BYTES};

type End = Endpoint<Vec<u8>, Vec<u8>>;

fn key(byte: u8) -> ClusterKey {
    ClusterKey::from_random([byte; 32])
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Endpoints, each at the port of its place, and packets that take a millisecond.
struct Net {
    ends: Vec<End>,
    entropy: SeededEntropy,
    now: Duration,
    on_the_way: VecDeque<(Duration, SocketAddr, SocketAddr, Vec<u8>)>,
    events: Vec<Vec<EndpointEvent<Vec<u8>, Vec<u8>>>>,
    /// Packets to be lost, of those sent next.
    lose: usize,
    /// Packets of this kind are lost.
    drops: Option<Kind>,
    sent: Vec<usize>,
}

impl Net {
    fn new(keys: Vec<(Keys, bool)>) -> Net {
        let mut entropy = SeededEntropy::new(1);
        let make = |(keys, listening)| {
            let config = EndpointConfig { listening, half_open_max: 4, ..EndpointConfig::default() };
            End::new(keys, config, &mut entropy)
        };
        let ends: Vec<End> = keys.into_iter().map(make).collect();
        let (events, sent) = (ends.iter().map(|_| Vec::new()).collect(), vec![0; ends.len()]);
        Net { ends, entropy, now: Duration::ZERO, on_the_way: VecDeque::new(), events, lose: 0, drops: None, sent }
    }

    fn connect(&mut self, from: usize, to: usize) -> u32 {
        self.ends[from].connect(self.now, address(to as u16), &mut self.entropy).unwrap()
    }

    fn pump(&mut self) {
        for from in 0..self.ends.len() {
            let mut out = Vec::new();
            while let Some((to, segment)) = self.ends[from].poll_transmit(self.now, 12_000, &mut out) {
                for packet in std::mem::take(&mut out).chunks(segment) {
                    self.sent[from] += 1;
                    if self.lose > 0 {
                        self.lose -= 1;
                        continue;
                    }
                    if self.drops.is_some_and(|kind| packet[Header::KIND_AT] == kind as u8) {
                        continue;
                    }
                    let at = self.now + Duration::from_millis(1);
                    self.on_the_way.push_back((at, address(from as u16), to, packet.to_vec()));
                }
            }
            while let Some(event) = self.ends[from].poll_event() {
                self.events[from].push(event);
            }
        }
    }

    fn run(&mut self, for_ms: u64) {
        let until = self.now + Duration::from_millis(for_ms);
        loop {
            self.pump();
            let arrival = self.on_the_way.front().map(|packet| packet.0);
            let timeout = self.ends.iter().filter_map(End::poll_timeout).min();
            let Some(next) = [arrival, timeout].into_iter().flatten().min().filter(|next| *next <= until) else {
                break;
            };
            self.now = self.now.max(next);
            while self.on_the_way.front().is_some_and(|packet| packet.0 <= self.now) {
                let Some((_, from, to, packet)) = self.on_the_way.pop_front() else { break };
                if let Some(end) = self.ends.get_mut(usize::from(to.port())) {
                    end.handle_packet(self.now, from, &packet, &mut self.entropy);
                }
            }
            for end in &mut self.ends {
                if end.poll_timeout().is_some_and(|at| at <= self.now) {
                    end.handle_timeout(self.now, &mut self.entropy);
                }
            }
        }
        self.now = until;
        self.pump();
    }

    fn accepted(&self, end: usize) -> Vec<u32> {
        let number = |event: &EndpointEvent<_, _>| match event {
            EndpointEvent::Accepted(number, _) => Some(*number),
            _ => None,
        };
        self.events[end].iter().filter_map(number).collect()
    }

    fn failure(&self, end: usize) -> Option<String> {
        self.events[end].iter().find_map(|event| match event {
            EndpointEvent::Failed(_, error) => Some(error.to_string()),
            _ => None,
        })
    }
}

fn carry_a_message(net: &mut Net, ours: u32, theirs: u32) {
    for (end, number) in [(0, ours), (1, theirs)] {
        net.ends[end].session(number).unwrap().open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
    }
    let receive = Incoming { token: 1, target: Some(vec![0; 4000]) };
    net.ends[1].session(theirs).unwrap().post_receive(1, receive).unwrap();
    let payload = Some(vec![5; 4000]);
    let message = Outgoing { token: 2, control: vec![], immediate: 0, payload_token: None, payload };
    net.ends[0].session(ours).unwrap().post_send(1, message).unwrap();
    net.run(100);
    let arrived = net.events[1].iter().any(|event| {
        matches!(event, EndpointEvent::Session(number, Event::Received { target: Some(target), status: Ok(()), .. })
            if *number == theirs && target == &vec![5; 4000])
    });
    assert!(arrived, "{:?}", net.events[1]);
}

#[test]
fn two_with_one_key_meet_and_talk() {
    for keys in [[Keys::new(key(1)), Keys::new(key(1))], [Keys::insecure(), Keys::insecure()]] {
        let [ours, theirs] = keys;
        let mut net = Net::new(vec![(ours, false), (theirs, true)]);
        let number = net.connect(0, 1);
        net.run(50);
        assert!(matches!(net.events[0][0], EndpointEvent::Connected(connected) if connected == number));
        let accepted = net.accepted(1);
        assert_eq!((accepted.len(), net.ends[1].peer(accepted[0])), (1, Some(address(0))));
        carry_a_message(&mut net, number, accepted[0]);
        assert_eq!(net.ends[1].pending(), 0);
    }
}

#[test]
fn a_wrong_key_meets_silence_and_a_time_out_that_names_the_causes() {
    for (ours, theirs) in [
        (Keys::new(key(1)), Keys::new(key(2))),
        (Keys::insecure(), Keys::new(key(2))),
        (Keys::new(key(1)), Keys::insecure()),
    ] {
        let fingerprint = ours.to_call_with().map(|key| key.fingerprint().to_string());
        let mut net = Net::new(vec![(ours, false), (theirs, true)]);
        net.connect(0, 1);
        net.run(6_000);
        assert_eq!((net.sent[1], net.accepted(1).len(), net.ends[1].pending()), (0, 0, 0), "silence");
        assert!(net.ends[1].stats().unanswered > 1, "{:?}", net.ends[1].stats());
        let failure = net.failure(0).expect("it failed");
        for cause in ["nothing listens", "UDP is blocked", "keys differ"] {
            assert!(failure.contains(cause), "{failure}");
        }
        assert!(failure.contains(&fingerprint.unwrap_or("none".into())), "{failure}");
        assert!(net.sent[0] < 25, "{} hellos", net.sent[0]);
    }
}

#[test]
fn while_the_key_is_changed_both_are_accepted() {
    let both = Keys::new(key(2)).also_accepting(key(1));
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (both, true), (Keys::new(key(2)), false)]);
    net.connect(0, 1);
    net.connect(2, 1);
    net.run(100);
    assert_eq!(net.accepted(1).len(), 2);
    // Afterwards only the new one; sessions that are there go on.
    let (now, entropy) = (net.now, &mut net.entropy);
    net.ends[1].set_keys(now, Keys::new(key(2)), entropy);
    let late = net.connect(0, 1);
    net.run(6_000);
    assert_eq!(net.accepted(1).len(), 2);
    assert!(net.failure(0).is_some() && net.ends[0].session(late).is_none());
    let alive = net.ends[1].sessions.values().filter(|open| open.session.ended().is_none()).count();
    assert_eq!(alive, 2);
}

#[test]
fn lost_hellos_and_welcomes_are_made_good() {
    for lose in 1..4 {
        let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), true)]);
        net.lose = lose;
        net.connect(0, 1);
        net.run(2_500);
        assert_eq!(net.accepted(1).len(), 1, "{lose} lost");
    }
}

#[test]
fn nobody_is_answered_who_is_not_listened_for() {
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), false)]);
    net.connect(0, 1);
    net.run(6_000);
    assert_eq!((net.sent[1], net.ends[1].pending()), (0, 0));
    assert!(net.failure(0).is_some());
}

#[test]
fn a_flood_of_half_open_sessions_is_bounded_and_passes() {
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), true)]);
    // Hellos by somebody who has the key and never goes on, from many places.
    for port in 100..200 {
        let offer = Offer { session: 9, message_bytes_max: 1, death_ms: 1, incarnation: 1 };
        let (_, hello) = Initiator::new(Some(&key(1)), offer, &mut net.entropy).unwrap();
        for _ in 0..3 {
            net.ends[1].handle_packet(net.now, address(port), &hello, &mut net.entropy);
        }
        assert!(net.ends[1].pending() <= 4);
    }
    assert_eq!((net.ends[1].pending(), net.ends[1].stats().turned_away), (4, 96));
    // The honest one is not kept out.
    net.connect(0, 1);
    net.run(100);
    assert_eq!(net.accepted(1).len(), 1);
}

#[test]
fn a_hello_that_was_cut_short_or_replayed_from_elsewhere_is_not_answered() {
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), true)]);
    let offer = Offer { session: 9, message_bytes_max: 1, death_ms: 1, incarnation: 1 };
    let (_, hello) = Initiator::new(Some(&key(1)), offer, &mut net.entropy).unwrap();
    net.ends[1].handle_packet(net.now, address(100), &hello, &mut net.entropy);
    net.pump();
    assert_eq!(net.sent[1], 1, "the first is answered");
    for length in [96, 136, 1199] {
        net.ends[1].handle_packet(net.now, address(100), &hello[..length], &mut net.entropy);
    }
    for port in 101..200 {
        net.ends[1].handle_packet(net.now, address(port), &hello, &mut net.entropy);
    }
    net.pump();
    assert_eq!((net.sent[1], net.ends[1].pending()), (1, 1));
}

#[test]
fn what_is_no_packet_of_ours_is_counted_and_never_answered() {
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), true)]);
    let number = net.connect(0, 1);
    net.run(50);
    let sent = net.sent[1];
    let mut random = SeededEntropy::new(3);
    for length in (0..1500).chain([HELLO_BYTES; 200]) {
        let mut packet = vec![0; length];
        random.fill(&mut packet);
        if length >= Header::BYTES {
            // As near to a real one as can be made without the key.
            let mut header = Header::new([Kind::Hello, Kind::Welcome, Kind::Data, Kind::Ack, Kind::Close][length % 5]);
            (header.session, header.number) =
                (if length % 2 == 0 { number } else { net.accepted(1)[0] }, length as u64);
            header.length = if header.kind == Kind::Hello { 96 } else { (length - Header::BYTES) as u16 };
            let tag: Vec<u8> = packet[48..64].to_vec();
            header.write(&mut packet);
            packet[48..64].copy_from_slice(&tag);
        }
        for end in 0..2 {
            let (now, entropy) = (net.now, &mut net.entropy);
            net.ends[end].handle_packet(now, address(77), &packet, entropy);
        }
    }
    net.pump();
    assert_eq!(net.sent[1], sent, "nobody was answered");
    let accepted = net.accepted(1)[0];
    assert_eq!(net.ends[1].peer(accepted), Some(address(0)), "and nobody was taken for the peer");
    carry_a_message(&mut net, number, accepted);
}

#[test]
fn a_peer_that_closes_is_told_of_and_a_session_can_be_forgotten() {
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), true)]);
    let number = net.connect(0, 1);
    net.run(50);
    let accepted = net.accepted(1)[0];
    net.ends[0].session(number).unwrap().close();
    net.run(500);
    let ended = |events: &[EndpointEvent<_, _>], ending| {
        events.iter().any(|event| matches!(event, EndpointEvent::Session(_, Event::Ended(with)) if *with == ending))
    };
    assert!(ended(&net.events[0], Ending::Closed) && ended(&net.events[1], Ending::PeerClosed));
    net.ends[1].forget(accepted);
    assert!(net.ends[1].session(accepted).is_none() && net.ends[1].poll_timeout().is_none());
}

#[test]
fn only_the_newest_packet_tells_where_the_peer_is() {
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), true)]);
    let number = net.connect(0, 1);
    net.run(50);
    let accepted = net.accepted(1)[0];
    let ask = |net: &mut Net| {
        net.ends[0].session(number).unwrap().ask();
        net.pump();
        net.on_the_way.pop_back().expect("a probe").3
    };
    let (older, newer, newest) = (ask(&mut net), ask(&mut net), ask(&mut net));
    let mut deliver = |port, packet: &[u8]| {
        net.ends[1].handle_packet(net.now, address(port), packet, &mut net.entropy);
        net.ends[1].peer(accepted).unwrap().port()
    };
    assert_eq!(deliver(7, &newer), 7, "the peer has moved");
    assert_eq!(deliver(8, &older), 7, "where it was when an older packet left is of no interest");
    assert_eq!(deliver(8, &newer), 7, "nor where a copy comes from");
    assert_eq!(deliver(9, &newest), 9);
}

/// A packet of a session without a key, as anybody can make it.
fn unsealed(session: u32, kind: Kind, number: u64) -> Vec<u8> {
    let mut packet = vec![0; Header::BYTES];
    Header { session, number, ..Header::new(kind) }.write(&mut packet);
    crate::Sealing::checksummed().seal(&mut packet).unwrap();
    packet
}

/// What ended the sessions of an endpoint.
fn endings(net: &Net, end: usize) -> Vec<Ending> {
    let ending = |event: &EndpointEvent<_, _>| match event {
        EndpointEvent::Session(_, Event::Ended(ending)) => Some(*ending),
        _ => None,
    };
    net.events[end].iter().filter_map(ending).collect()
}

#[test]
fn the_number_of_a_session_tells_nothing_of_the_next() {
    let mut net = Net::new(vec![(Keys::insecure(), false), (Keys::insecure(), true)]);
    let mut ours = Vec::new();
    for _ in 0..20 {
        ours.push(net.connect(0, 1));
        net.run(10);
    }
    let theirs = net.accepted(1);
    assert_eq!(theirs.len(), 20);
    for numbers in [ours, theirs] {
        let near = numbers.windows(2).filter(|pair| pair[1].wrapping_sub(pair[0]).wrapping_add(1000) < 2000).count();
        assert_eq!(near, 0, "{numbers:?}");
    }
}

#[test]
fn without_a_key_nobody_speaks_for_the_peer_from_another_address() {
    let mut net = Net::new(vec![(Keys::insecure(), false), (Keys::insecure(), true)]);
    let number = net.connect(0, 1);
    net.run(50);
    let accepted = net.accepted(1)[0];
    for (end, session) in [(0, number), (1, accepted)] {
        for kind in [Kind::Probe, Kind::Data, Kind::Ack, Kind::Close] {
            net.ends[end].handle_packet(net.now, address(77), &unsealed(session, kind, 100_000), &mut net.entropy);
        }
        assert_eq!(net.ends[end].peer(session), Some(address(1 - end as u16)));
    }
    assert_eq!(net.ends[1].stats().strangers, 4);
    carry_a_message(&mut net, number, accepted);
    // Nor does it make a session of somebody else's hello.
    net.connect(0, 1);
    net.pump();
    net.now += Duration::from_millis(1);
    let (_, from, _, hello) = net.on_the_way.pop_back().expect("a hello");
    net.ends[1].handle_packet(net.now, from, &hello, &mut net.entropy);
    let half_open = net.ends[1].half_open[0].session.number();
    net.ends[1].handle_packet(net.now, address(77), &unsealed(half_open, Kind::Probe, 1), &mut net.entropy);
    assert_eq!((net.ends[1].pending(), net.ends[1].sessions().count()), (1, 1));
}

#[test]
fn a_caller_that_finds_no_room_is_told_at_once() {
    for keys in [|| Keys::new(key(1)), Keys::insecure] {
        let mut net = Net::new(vec![(keys(), false), (keys(), true), (keys(), false)]);
        net.ends[1].config.sessions_max = 1;
        net.connect(0, 1);
        net.run(50);
        // Its first word is lost, and what it is told as well.
        net.connect(2, 1);
        net.run(2);
        net.lose = 1;
        net.run(1_000);
        assert_eq!((endings(&net, 2), net.accepted(1).len()), (vec![Ending::PeerFull], 1));
        assert_eq!(net.ends[1].stats().turned_away, 1);
        // What was refused is not accepted when there is room again.
        let first = net.accepted(1)[0];
        net.ends[1].forget(first);
        net.run(1_000);
        assert_eq!(net.accepted(1).len(), 1);
        net.connect(2, 1);
        net.run(1_000);
        assert_eq!(net.accepted(1).len(), 2);
    }
}

#[test]
fn sessions_that_are_being_asked_for_take_room() {
    let mut net = Net::new(vec![(Keys::new(key(1)), false), (Keys::new(key(1)), true)]);
    net.ends[1].config.sessions_max = 1;
    // It calls somebody that never answers, and is called meanwhile.
    net.connect(1, 9);
    net.connect(0, 1);
    net.run(1_000);
    assert_eq!((endings(&net, 0), net.accepted(1).len()), (vec![Ending::PeerFull], 0));
}

#[test]
fn a_key_that_is_removed_is_shut_out() {
    for removed in [|| Keys::new(key(1)), Keys::insecure] {
        let mut net = Net::new(vec![(removed(), false), (removed(), true)]);
        let number = net.connect(0, 1);
        net.run(50);
        let accepted = net.accepted(1)[0];
        let fingerprint = removed().to_call_with().map(ClusterKey::fingerprint);
        assert_eq!(net.ends[1].sessions().map(|session| session.fingerprint).collect::<Vec<_>>(), [fingerprint]);
        // Another is half open when the key goes.
        net.connect(0, 1);
        net.run(1);
        assert_eq!(net.ends[1].pending(), 1);
        let (now, entropy) = (net.now, &mut net.entropy);
        net.ends[1].set_keys(now, Keys::new(key(2)), entropy);
        assert_eq!(net.ends[1].pending(), 0);
        net.run(300);
        assert_eq!(net.accepted(1).len(), 1);
        // What was established goes on until it is ended, which is told again if that is lost.
        carry_a_message(&mut net, number, accepted);
        assert_eq!(net.ends[1].end_old_sessions(net.now), 1);
        net.lose = 1;
        assert_eq!((net.ends[1].end_old_sessions(net.now), net.ends[1].sessions().count()), (0, 0));
        net.run(4_000);
        assert!(endings(&net, 0).contains(&Ending::KeyRemoved) && endings(&net, 1) == [Ending::KeyRemoved]);
    }
}

#[test]
fn a_call_that_is_under_way_goes_on_with_the_new_key() {
    for before in [|| Keys::new(key(1)), Keys::insecure] {
        let mut net = Net::new(vec![(before(), false), (Keys::new(key(2)), true)]);
        let number = net.connect(0, 1);
        net.run(250);
        let (now, entropy) = (net.now, &mut net.entropy);
        net.ends[0].set_keys(now, Keys::new(key(2)), entropy);
        net.run(50);
        assert!(matches!(net.events[0][0], EndpointEvent::Connected(connected) if connected == number));
        let prints: Vec<_> = net.ends[0].sessions().map(|session| session.fingerprint).collect();
        assert_eq!(prints, [Some(key(2).fingerprint())]);
        // One under a key that is still accepted goes on as it is.
        net.connect(0, 9);
        net.pump();
        let hello = net.on_the_way.pop_back().expect("a hello").3;
        let (now, entropy) = (net.now, &mut net.entropy);
        net.ends[0].set_keys(now, Keys::new(key(3)).also_accepting(key(2)), entropy);
        net.run(150);
        assert!(net.ends[0].greetings.values().all(|greeting| greeting.hello == hello));
    }
}

/// Endpoints with these keys, and the numbers of the session between them after a message.
fn talking(ours: Keys, theirs: Keys) -> (Net, u32, u32) {
    let mut net = Net::new(vec![(ours, false), (theirs, true)]);
    let number = net.connect(0, 1);
    net.run(50);
    let accepted = net.accepted(1)[0];
    carry_a_message(&mut net, number, accepted);
    (net, number, accepted)
}

const HOUR_MS: u64 = 3_600_000;

fn fingerprints(net: &Net) -> Vec<Option<Fingerprint>> {
    net.ends.iter().flat_map(End::sessions).map(|session| session.fingerprint).collect()
}

/// Sends so many messages, one in every so many milliseconds, and sees each arrive once and in order.
fn keep_talking(net: &mut Net, ours: u32, theirs: u32, messages: u64, every_ms: u64) {
    for number in 0..messages {
        let bytes = number.to_le_bytes();
        let receive = Incoming { token: number, target: Some(vec![0; 8]) };
        net.ends[1].session(theirs).unwrap().post_receive(1, receive).unwrap();
        let payload = Some(bytes.to_vec());
        let message = Outgoing { token: number, control: vec![], immediate: 0, payload_token: None, payload };
        net.ends[0].session(ours).unwrap().post_send(1, message).unwrap();
        net.events[1].clear();
        net.run(every_ms);
        let arrived = net.events[1].iter().any(|event| {
            matches!(event, EndpointEvent::Session(_, Event::Received { target: Some(target), status: Ok(()), .. })
                if target == &bytes)
        });
        assert!(arrived, "message {number}: {:?}", net.events[1]);
    }
}

#[test]
fn about_every_hour_a_session_has_fresh_keys_and_goes_on() {
    for lose_every in [0, 3] {
        let (mut net, ours, theirs) = talking(Keys::new(key(1)), Keys::new(key(1)));
        for hour in 1..=3u64 {
            // Of every few packets around the handshake some are lost.
            net.run(HOUR_MS - 60_000);
            for _ in 0..120 {
                net.lose = if lose_every > 0 && net.now.as_millis() % lose_every == 0 { 2 } else { 0 };
                keep_talking(&mut net, ours, theirs, 1, 2_000);
            }
            for (end, number) in [(0, ours), (1, theirs)] {
                let session = net.ends[end].session(number).unwrap();
                assert_eq!((session.ended(), session.epochs()), (None, (hour as u8, hour as u8)), "end {end}");
                assert_eq!(session.stats().forged, 0);
            }
        }
    }
}

#[test]
fn a_node_that_has_only_a_removed_key_is_out_with_the_next_handshake() {
    // The listener drops the key that the session runs under: the caller asks with it, and is refused.
    let (mut net, ..) = talking(Keys::new(key(1)), Keys::new(key(2)).also_accepting(key(1)));
    let keys = Keys::new(key(2));
    net.ends[1].set_keys(net.now, keys, &mut net.entropy);
    net.run(HOUR_MS - 60_000);
    assert_eq!(fingerprints(&net), [Some(key(1).fingerprint()); 2], "until then it goes on");
    net.run(120_000);
    assert_eq!(fingerprints(&net), []);
    let ended =
        |event: &EndpointEvent<_, _>| matches!(event, EndpointEvent::Session(_, Event::Ended(Ending::KeyRemoved)));
    assert!(net.events.iter().all(|events| events.iter().any(ended)), "{:?}", net.events);

    // The caller drops it: the listener cannot answer what is asked with another.
    let (mut net, ..) = talking(Keys::new(key(1)), Keys::new(key(1)));
    let keys = Keys::new(key(2));
    net.ends[0].set_keys(net.now, keys, &mut net.entropy);
    net.run(HOUR_MS + 60_000);
    assert_eq!(fingerprints(&net), []);
    assert!(net.events.iter().all(|events| events.iter().any(ended)), "{:?}", net.events);
}

#[test]
fn a_session_goes_on_whose_question_was_lost_while_the_key_was_changed() {
    let (mut net, ours, theirs) = talking(Keys::new(key(1)), Keys::new(key(1)));
    net.drops = Some(Kind::Renew);
    net.run(HOUR_MS + 20_000);
    for keys in [Keys::new(key(1)).also_accepting(key(2)), Keys::new(key(2)).also_accepting(key(1)), Keys::new(key(2))]
    {
        for end in [0, 1] {
            net.ends[end].set_keys(net.now, keys.clone(), &mut net.entropy);
        }
    }
    net.drops = None;
    net.run(60_000);
    assert_eq!(fingerprints(&net), [Some(key(2).fingerprint()); 2]);
    keep_talking(&mut net, ours, theirs, 3, 20);
}

#[test]
fn a_session_takes_the_new_key_within_an_hour_of_its_change() {
    let (mut net, ours, theirs) = talking(Keys::new(key(1)), Keys::new(key(1)));
    for end in [1, 0] {
        let keys = Keys::new(key(2)).also_accepting(key(1));
        net.ends[end].set_keys(net.now, keys, &mut net.entropy);
    }
    net.run(HOUR_MS + 60_000);
    assert_eq!(fingerprints(&net), [Some(key(2).fingerprint()); 2]);
    for end in [0, 1] {
        let keys = Keys::new(key(2));
        net.ends[end].set_keys(net.now, keys, &mut net.entropy);
        assert_eq!(net.ends[end].end_old_sessions(net.now), 0);
    }
    keep_talking(&mut net, ours, theirs, 3, 20);
}

#[test]
fn a_caller_that_never_asks_for_fresh_keys_is_put_out() {
    let (mut net, ours, theirs) = talking(Keys::new(key(1)), Keys::new(key(1)));
    // Nothing of the handshake arrives.
    net.drops = Some(Kind::Renew);
    net.run(HOUR_MS + 240_000);
    keep_talking(&mut net, ours, theirs, 3, 20);
    net.run(90_000);
    assert_eq!(fingerprints(&net), []);
}

#[test]
fn an_end_that_was_put_back_seals_nothing_more_in_its_sessions() {
    let (mut net, ours, theirs) = talking(Keys::new(key(1)), Keys::new(key(1)));
    // One more is on its way to a third, which answers late.
    net.lose = 1;
    let asking = net.connect(0, 1);
    net.run(5);
    let sent = net.sent.clone();
    let now = net.now;
    net.ends[0].forget_past(now, &mut net.entropy);
    net.run(50);
    let ended = |event: &EndpointEvent<_, _>| matches!(event, EndpointEvent::Session(number, Event::Ended(Ending::Restored)) if *number == ours);
    assert!(net.events[0].iter().any(ended), "{:?}", net.events[0]);
    assert!(net.events[0].iter().any(|event| matches!(event, EndpointEvent::Connected(number) if *number == asking)));
    assert!(net.ends[1].session(theirs).unwrap().ended().is_none(), "the peer is told nothing");
    assert!(net.sent[0] > sent[0], "the handshake went on");
    // The peer asks, and gets no answer, until it takes this end for dead.
    net.run(11_000);
    assert_eq!(net.ends[1].session(theirs).unwrap().ended(), Some(Ending::Silence(Duration::from_secs(10))));
}

#[test]
fn without_a_key_no_handshake_is_repeated() {
    let (mut net, ours, theirs) = talking(Keys::insecure(), Keys::insecure());
    net.run(2 * HOUR_MS);
    keep_talking(&mut net, ours, theirs, 3, 20);
}
