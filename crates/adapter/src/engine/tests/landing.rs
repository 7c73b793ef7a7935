//! Landing on real sockets, with somebody beside who sends what is none of his.

use super::*;
use highwire_link::{ListField, Network, NetworkConfig, SimulatedLink};
use highwire_proto::{HeaderFlags, Kind, LandingStats, SessionStats, Speculation};

/// A receive in the middle of memory that is not to change.
#[derive(Debug)]
struct Guarded(Vec<u8>);

const GUARD_BYTES: usize = 4096;
const GUARD: u8 = 0xa5;

impl Guarded {
    fn new(bytes: usize) -> Guarded {
        Guarded([vec![GUARD; GUARD_BYTES], vec![0; bytes], vec![GUARD; GUARD_BYTES]].concat())
    }

    /// What was received; no byte around it has changed.
    fn check(&self) -> &[u8] {
        let (before, rest) = self.0.split_at(GUARD_BYTES);
        let (inside, after) = rest.split_at(rest.len() - GUARD_BYTES);
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD), "bytes around a receive have changed");
        inside
    }
}

impl AsMut<[u8]> for Guarded {
    fn as_mut(&mut self) -> &mut [u8] {
        let end = self.0.len() - GUARD_BYTES;
        &mut self.0[GUARD_BYTES..end]
    }
}

type LandingSide = Engine<UdpLink, Vec<u8>, Guarded>;

fn side(seed: u64, speculation: Speculation) -> LandingSide {
    let lists = Some(ListField { count: 4, at: Header::LIST_AT });
    let link = UdpLink::bind("127.0.0.1:0".parse().unwrap(), UdpOptions { lists, ..UdpOptions::default() }).unwrap();
    let mut entropy = SeededEntropy::new(seed);
    let mut config = EndpointConfig { listening: true, speculation, ..EndpointConfig::default() };
    config.session.packet_size = PacketSize::Fixed(PACKET);
    let endpoint = Endpoint::new(Keys::insecure(), config, &mut entropy);
    Engine::new(link, endpoint, Box::new(entropy))
}

const PACKET: usize = 1472;
const MESSAGES: u64 = 40;
const BYTES: usize = 300_000;

fn content(message: u64) -> Vec<u8> {
    (0..BYTES as u64).map(|at| (at ^ at >> 8 ^ (message * 77)) as u8).collect()
}

/// Sends messages from one side to the other while `disturb` does what it likes, and checks every byte. The side that
/// received them, and its session.
fn transfer(speculation: Speculation, mut disturb: impl FnMut(u64, SocketAddr, u32)) -> (LandingSide, u32) {
    let mut sides = [side(1, Speculation::Guess), side(2, speculation)];
    let start = Instant::now();
    let to = sides[1].link().local_address();
    sides[0].connect(start.elapsed(), to).unwrap();
    let (mut session, mut arrived, mut posted, mut round) = (None, 0, 0, 0);
    while arrived < MESSAGES {
        assert!(start.elapsed() < Duration::from_secs(60), "stuck with {arrived}");
        for (index, side) in sides.iter_mut().enumerate() {
            side.turn(start.elapsed()).unwrap();
            while let Some(event) = side.endpoint().poll_event() {
                match event {
                    EndpointEvent::Connected(number) | EndpointEvent::Accepted(number, _) => {
                        let session_of = side.endpoint().session(number).unwrap();
                        session_of.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
                        for message in (0..MESSAGES).filter(|_| index == 0) {
                            let payload = Some(content(message));
                            let message = Outgoing {
                                token: message,
                                control: vec![],
                                immediate: 0,
                                payload_token: None,
                                payload,
                            };
                            session_of.post_send(1, message).unwrap();
                        }
                        session = if index == 1 { Some(number) } else { session };
                    }
                    EndpointEvent::Session(_, Event::Received { token, target: Some(target), status, .. }) => {
                        assert_eq!((token, status), (arrived, Ok(())));
                        assert!(target.check() == content(arrived), "message {arrived} is changed");
                        arrived += 1;
                    }
                    EndpointEvent::Session(_, Event::Sent { status: Ok(()), .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        if let Some(number) = session {
            disturb(round, to, number);
            round += 1;
            let receiver = sides[1].endpoint().session(number).unwrap();
            while posted < MESSAGES.min(arrived + 3) {
                receiver.post_receive(1, Incoming { token: posted, target: Some(Guarded::new(BYTES)) }).unwrap();
                posted += 1;
            }
        }
    }
    let [_, receiver] = sides;
    (receiver, session.unwrap())
}

#[test]
fn in_each_way_of_receiving_all_arrives() {
    for speculation in [Speculation::Guess, Speculation::Never, Speculation::AlwaysLook, Speculation::AlwaysWrong] {
        let (mut side, _) = transfer(speculation, |_, _, _| {});
        let landing = side.endpoint().landing();
        let (most, others) = match speculation {
            Speculation::Guess => (landing.hits, landing.seen + landing.copied),
            Speculation::Never => (landing.copied, landing.hits + landing.seen + landing.misses),
            Speculation::AlwaysLook => (landing.seen, landing.hits),
            Speculation::AlwaysWrong => (landing.misses.min(landing.copied), landing.hits + landing.seen),
        };
        assert!(most > 5 * others, "{speculation:?}: {landing:?}");
        assert!(speculation != Speculation::AlwaysWrong || landing.moved_bytes > 1_000_000, "{landing:?}");
    }
}

/// Packets that look like the next ones of a message, and are not.
fn forgeries(session: u32, round: u64, random: &mut SeededEntropy) -> Vec<u8> {
    let mut packets = Vec::new();
    for index in 0..=random.below(40) as u32 {
        let mut header = Header::new(Kind::Data);
        header.session = session;
        header.vi = 1;
        header.message = random.below(MESSAGES) as u32;
        header.receive = header.message;
        header.number = random.below(20_000);
        header.offset = 1400 + (random.below(200) as u32 + index) * 1408;
        header.length = (PACKET - Header::BYTES) as u16;
        header.list = (round % 7) as u8;
        if random.chance(0.1) {
            (header.flags, header.offset) = (HeaderFlags::FIRST, 0);
        }
        let begin = packets.len();
        packets.resize(begin + PACKET, 0x77);
        header.write(&mut packets[begin..]);
    }
    packets
}

#[test]
fn whoever_sends_between_changes_nothing_and_is_counted() {
    let mut stranger = UdpLink::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let mut random = SeededEntropy::new(9);
    let (mut side, session) = transfer(Speculation::Guess, |round, to, session| {
        let bytes = match round % 5 {
            0 => forgeries(session, round, &mut random),
            1 => forgeries(session + 1, round, &mut random),
            // Short ones, and some that only seem to be packets.
            2 => vec![1; 1 + random.below(70) as usize],
            3 => vec![round as u8; 60_000],
            _ => return,
        };
        let segment = if round % 5 < 2 { PACKET } else { bytes.len() };
        // Whatever does not go is not missed.
        let _ = stranger.send(&[Burst { to, bytes: &bytes, segment }]);
    });
    let landing = side.endpoint().landing();
    assert!(landing.hits > 0 && landing.misses > 0 && landing.looks > 0, "{landing:?}");
    let strangers = side.endpoint().stats().strangers;
    let stats = side.endpoint().session(session).unwrap().stats();
    // It speaks from another address, so that the session does not even look.
    assert!(strangers > 1000 && stats.forged == 0, "{strangers} strangers, {stats:?}");
    assert_eq!(stats.messages_received, MESSAGES);
}

/// Sends messages of these lengths on these VIs over a network that loses nothing. What the sender did, and where
/// payloads landed.
fn over_a_quiet_network(speculation: Speculation, messages: &[(u32, usize)]) -> (SessionStats, LandingStats) {
    let network = Network::new(NetworkConfig::default());
    let make = |seed: u64| -> Engine<SimulatedLink, Vec<u8>, Vec<u8>> {
        let mut entropy = SeededEntropy::new(seed);
        let mut config = EndpointConfig { listening: true, speculation, ..EndpointConfig::default() };
        config.session.packet_size = PacketSize::Fixed(PACKET);
        let link = network.link("192.0.2.1:0".parse().unwrap());
        Engine::new(link, Endpoint::new(Keys::insecure(), config, &mut entropy), Box::new(entropy))
    };
    let mut sides = [make(1), make(2)];
    let to = sides[1].link().local_address();
    sides[0].connect(Duration::ZERO, to).unwrap();
    let (mut arrived, mut sender) = (0, 0);
    while arrived < messages.len() {
        let now = network.now();
        assert!(now < Duration::from_secs(60), "stuck with {arrived}");
        let mut moved = false;
        for (index, side) in sides.iter_mut().enumerate() {
            moved |= side.turn(now).unwrap();
            while let Some(event) = side.endpoint().poll_event() {
                match event {
                    EndpointEvent::Connected(number) | EndpointEvent::Accepted(number, _) => {
                        sender = if index == 0 { number } else { sender };
                        let session = side.endpoint().session(number).unwrap();
                        for vi in 1..=2 {
                            session.open_vi(vi, vi, Assurance::Reliable, Assurance::Reliable).unwrap();
                        }
                        for (token, (vi, bytes)) in (0..).zip(messages) {
                            let place = Incoming { token, target: Some(vec![0; 70_000]) };
                            session.post_receive(*vi, place).unwrap();
                            let payload = Some(vec![token as u8; *bytes]);
                            let message =
                                Outgoing { token, control: vec![], immediate: 0, payload_token: None, payload };
                            if index == 0 {
                                session.post_send(*vi, message).unwrap();
                            }
                        }
                    }
                    EndpointEvent::Session(_, Event::Received { token, target: Some(target), length, .. }) => {
                        assert_eq!(length, messages[token as usize].1);
                        assert!(target[..length].iter().all(|byte| *byte == token as u8));
                        arrived += 1;
                    }
                    EndpointEvent::Session(_, Event::Sent { .. }) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        if !moved {
            let deadlines = sides.iter().filter_map(Engine::deadline);
            let next = deadlines.chain(network.next_arrival()).min().unwrap();
            network.advance_to(next.max(now + Duration::from_micros(1)));
        }
    }
    let landing = sides[1].endpoint().landing();
    (sides[0].endpoint().session(sender).unwrap().stats(), landing)
}

/// Whatever was guessed, what came is not thrown away: not either where a message ends in the middle of a batch.
#[test]
fn what_came_is_not_sent_again() {
    for bytes in [1400, 500, 1400 + 3 * 1408, 2000] {
        let mut messages = vec![(1, bytes); 500];
        messages[0] = (1, 60_000);
        for speculation in [Speculation::Never, Speculation::Guess, Speculation::AlwaysLook, Speculation::AlwaysWrong] {
            let (stats, landing) = over_a_quiet_network(speculation, &messages);
            assert_eq!((stats.packets_again, stats.packets_lost), (0, 0), "{bytes}, {speculation:?}: {landing:?}");
        }
    }
}

#[test]
fn messages_of_one_packet_are_not_guessed_at() {
    let mut messages = vec![(1, 500); 500];
    messages[0] = (1, 60_000);
    let (_, landing) = over_a_quiet_network(Speculation::Guess, &messages);
    // One batch, perhaps.
    assert!(landing.misses < 65 && landing.looks < 3, "{landing:?}");
}

#[test]
fn two_vis_of_a_session_land_side_by_side() {
    let messages: Vec<(u32, usize)> = (0..100).map(|number| (1 + number % 2, 60_000)).collect();
    let (stats, landing) = over_a_quiet_network(Speculation::Guess, &messages);
    assert_eq!((stats.packets_again, stats.packets_lost), (0, 0));
    // Here batches do not end where pulses do.
    assert!(landing.hits + landing.seen > 2 * landing.copied, "{landing:?}");
    // One that goes on alone is guessed again, though the other was last when the guess was wrong.
    let messages: Vec<(u32, usize)> =
        (0..100).map(|number| (if number < 4 { 1 + number % 2 } else { 2 }, 60_000)).collect();
    let (_, landing) = over_a_quiet_network(Speculation::Guess, &messages);
    assert!(landing.hits > 3 * landing.seen, "{landing:?}");
}
