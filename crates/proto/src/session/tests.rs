//! Two sessions and a network between them that loses, repeats, reorders, damages and delays, all from a
//! seed.

use super::*;
use crate::SeededEntropy;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

mod size;
mod speculation;

type Side = Session<Vec<u8>, Vec<u8>>;

#[derive(Clone, Copy, Debug, Default)]
struct Weather {
    loss: f64,
    duplication: f64,
    reordering: f64,
    corruption: f64,
    delay_us: u64,
    jitter_us: u64,
    /// Nothing passes between these moments, in milliseconds.
    partition_ms: Option<(u64, u64)>,
}

/// What a direction carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Path {
    /// Bytes of the largest packet.
    mtu: usize,
    /// A larger one is refused where it is sent; otherwise it is lost on the way.
    refuses: bool,
}

/// When it arrives, which it is, for whom, and the packet.
type Flying = (Duration, u64, usize, Vec<u8>);

struct World {
    sides: [Side; 2],
    now: Duration,
    on_the_way: BinaryHeap<Reverse<Flying>>,
    posted: u64,
    weather: Weather,
    random: SeededEntropy,
    events: [Vec<Event<Vec<u8>, Vec<u8>>>; 2],
    packets: u64,
    /// What each side's packets go by, and how that will change: after how many packets, whose, and to what.
    paths: [Path; 2],
    changes: VecDeque<(u64, usize, Path)>,
    /// Packets of each side that were too large, probes of a size apart from others.
    oversized: [(u64, u64); 2],
    /// Who puts payloads where they are expected, if anybody.
    kernel: Option<speculation::Kernel>,
}

/// What is counted of VIs is what looking at each of them tells.
fn check_counts(side: &Side) {
    if side.ended().is_some() {
        return;
    }
    let states = || side.vis.values();
    assert_eq!(side.blocked, states().filter(|state| state.can_send_or_is_blocked().1).count());
    assert_eq!(side.news, states().filter(|state| state.credit_is_news()).count());
    for (vi, state) in &side.vis {
        let turns = side.turns.iter().filter(|turn| *turn == vi).count();
        assert_eq!(turns, usize::from(state.in_turns), "VI {vi}");
        assert!(state.in_turns || !state.can_send_or_is_blocked().0, "VI {vi} can send and has no turn");
    }
}

fn offer(session: u32) -> Offer {
    Offer { session, message_bytes_max: 64 << 20, death_ms: 10_000, incarnation: u64::from(session) }
}

fn plain(number: u32, peer: u32, config: &SessionConfig) -> Side {
    let established =
        Established { sealing: Sealing::checksummed(), peer: offer(peer), fingerprint: None, calls: false };
    Session::new(established, number, config.clone(), Duration::ZERO)
}

/// Packets of so many bytes, whatever the path takes.
fn fixed(bytes: usize) -> SessionConfig {
    SessionConfig { packet_size: PacketSize::Fixed(bytes), ..SessionConfig::default() }
}

/// Two sides that have met by a real handshake.
fn sealed(seed: u64, config: &SessionConfig) -> [Side; 2] {
    let mut entropy = SeededEntropy::new(seed);
    let key = crate::ClusterKey::from_random([7; 32]);
    let (initiator, hello) = crate::Initiator::new(Some(&key), offer(1), &mut entropy).unwrap();
    let (theirs, welcome) = crate::respond(&crate::Keys::new(key), &hello, offer(2), &mut entropy).unwrap();
    let ours = initiator.handle_welcome(&welcome).map_err(|(_, error)| error).unwrap();
    let side = |established, number| Session::new(established, number, config.clone(), Duration::ZERO);
    [side(ours, 1), side(theirs, 2)]
}

impl World {
    fn new(seed: u64, weather: Weather, sides: [Side; 2]) -> World {
        let mut world = World {
            sides,
            now: Duration::ZERO,
            on_the_way: BinaryHeap::new(),
            posted: 0,
            weather,
            random: SeededEntropy::new(seed),
            events: [Vec::new(), Vec::new()],
            packets: 0,
            paths: [Path { mtu: 1472, refuses: false }; 2],
            changes: VecDeque::new(),
            oversized: [(0, 0); 2],
            kernel: None,
        };
        for side in &mut world.sides {
            for vi in 1..=VIS {
                side.open_vi(vi, vi, Assurance::Reliable, Assurance::Reliable).unwrap();
            }
        }
        world
    }

    fn fine(seed: u64) -> World {
        let config = SessionConfig::default();
        World::new(seed, Weather { delay_us: 50, ..Weather::default() }, [plain(1, 2, &config), plain(2, 1, &config)])
    }

    fn toss(&mut self, from: usize, packet: &[u8]) {
        self.packets += 1;
        while let Some((_, side, path)) = self.changes.pop_front_if(|change| change.0 <= self.packets) {
            self.paths[side] = path;
        }
        let Path { mtu, refuses } = self.paths[from];
        if packet.len() > mtu {
            let is_probe = Header::parse(packet).is_ok_and(|header| header.kind == Kind::Probe);
            let (probes, others) = &mut self.oversized[from];
            *if is_probe { probes } else { others } += 1;
            if refuses {
                self.sides[from].handle_too_large(self.now, packet.len());
            }
            return;
        }
        let ms = self.now.as_millis() as u64;
        let apart = self.weather.partition_ms.is_some_and(|(start, end)| (start..end).contains(&ms));
        if apart || self.random.chance(self.weather.loss) {
            return;
        }
        let copies = if self.random.chance(self.weather.duplication) { 2 } else { 1 };
        for _ in 0..copies {
            let mut packet = packet.to_vec();
            if self.random.chance(self.weather.corruption) {
                let bit = self.random.below(packet.len() as u64 * 8);
                packet[(bit / 8) as usize] ^= 1 << (bit % 8);
            }
            let mut delay = self.weather.delay_us + self.random.below(self.weather.jitter_us + 1);
            if self.random.chance(self.weather.reordering) {
                delay += self.random.below(2000);
            }
            self.posted += 1;
            let at = self.now + Duration::from_micros(delay);
            self.on_the_way.push(Reverse((at, self.posted, 1 - from, packet)));
        }
    }

    fn pump(&mut self) {
        self.sides.iter().for_each(check_counts);
        for from in 0..2 {
            let mut out = Vec::new();
            while let Some(segment) = self.sides[from].poll_transmit(self.now, 16, &mut out) {
                assert!(segment > 0 && !out.is_empty());
                for packet in std::mem::take(&mut out).chunks(segment) {
                    self.toss(from, packet);
                }
            }
            while let Some(event) = self.sides[from].poll_event() {
                self.events[from].push(event);
            }
        }
    }

    /// Goes to the next thing that happens; false if nothing ever will, or it is past `until`.
    fn step(&mut self, until: Duration) -> bool {
        self.pump();
        let arrival = self.on_the_way.peek().map(|Reverse(packet)| packet.0);
        let timeout = self.sides.iter().filter_map(Session::poll_timeout).min();
        let Some(next) = [arrival, timeout].into_iter().flatten().min() else { return false };
        if next > until {
            self.now = until;
            return false;
        }
        self.now = self.now.max(next);
        let mut arrived = [Vec::new(), Vec::new()];
        while self.on_the_way.peek().is_some_and(|Reverse(packet)| packet.0 <= self.now) {
            let Some(Reverse((_, _, to, packet))) = self.on_the_way.pop() else { break };
            match self.kernel {
                Some(_) => arrived[to].push(packet),
                None => drop(self.sides[to].handle_packet(self.now, &packet)),
            }
        }
        for (to, packets) in arrived.iter().enumerate() {
            self.receive_in_batches(to, packets);
        }
        for side in &mut self.sides {
            if side.poll_timeout().is_some_and(|at| at <= self.now) {
                side.handle_timeout(self.now);
            }
        }
        true
    }

    fn run(&mut self, limit: Duration, mut done: impl FnMut(&World) -> bool) -> bool {
        let until = self.now + limit;
        loop {
            self.pump();
            if done(self) {
                return true;
            }
            if !self.step(until) {
                self.pump();
                return done(self);
            }
        }
    }
}

fn send(token: u64, payload: Vec<u8>) -> Outgoing<Vec<u8>> {
    Outgoing { token, control: Vec::new(), immediate: token as u32, payload_token: None, payload: Some(payload) }
}

fn place(token: u64, bytes: usize) -> Incoming<Vec<u8>> {
    Incoming { token, target: Some(vec![0; bytes]) }
}

/// The bytes of message `number` on a VI: recognisable anywhere.
fn content(vi: u32, number: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at as u64 ^ number.wrapping_mul(31) ^ u64::from(vi) << 3) as u8).collect()
}

fn received(events: &[Event<Vec<u8>, Vec<u8>>]) -> usize {
    events.iter().filter(|event| matches!(event, Event::Received { status: Ok(()), .. })).count()
}

/// Sends `count` messages of random lengths each way on every VI, and checks each byte.
fn exchange(seed: u64, weather: Weather, sides: [Side; 2], count: u64, bytes_max: u64) -> World {
    exchange_in(World::new(seed, weather, sides), seed, count, bytes_max)
}

/// The same in this world.
fn exchange_in(mut world: World, seed: u64, count: u64, bytes_max: u64) -> World {
    let mut expected: HashMap<(usize, u32), VecDeque<Vec<u8>>> = HashMap::new();
    let mut to_post: HashMap<(usize, u32), u64> = HashMap::new();
    for side in 0..2 {
        for vi in 1..=VIS {
            for number in 0..count {
                let bytes = if world.random.chance(0.5) { 40 } else { bytes_max };
                let payload = content(vi, number, world.random.below(bytes + 1) as usize);
                expected.entry((1 - side, vi)).or_default().push_back(payload.clone());
                world.sides[side].post_send(vi, send(number, payload)).unwrap();
            }
            to_post.insert((side, vi), count);
        }
    }
    let total = (2 * u64::from(VIS) * count) as usize;
    let deadline = Duration::from_secs(600);
    loop {
        // Receives are posted a few at a time: senders have to wait for credit.
        for ((side, vi), left) in &mut to_post {
            let few = world.random.below(3).min(*left);
            for _ in 0..few {
                world.sides[*side].post_receive(*vi, place(count - *left, bytes_max as usize)).unwrap();
                *left -= 1;
            }
        }
        let done = received(&world.events[0]) + received(&world.events[1]);
        if done == total {
            break;
        }
        assert!(world.step(deadline) && world.now < deadline, "seed {seed}: stuck with {done} of {total}");
    }
    world.run(Duration::from_secs(60), |world| {
        let sent = |event: &Event<Vec<u8>, Vec<u8>>| matches!(event, Event::Sent { .. });
        world.events.iter().flatten().filter(|event| sent(event)).count() == total
    });
    for side in 0..2 {
        let mut next_sent: HashMap<u32, u64> = HashMap::new();
        for event in std::mem::take(&mut world.events[side]) {
            match event {
                Event::Sent { vi, token, status, .. } => {
                    let next = next_sent.entry(vi).or_default();
                    assert_eq!((token, status), (*next, Ok(())), "seed {seed}: completions in order");
                    *next += 1;
                }
                Event::Received { vi, target, length, status, immediate, token, .. } => {
                    assert_eq!(status, Ok(()), "seed {seed}");
                    let want = expected.get_mut(&(side, vi)).and_then(VecDeque::pop_front).expect("one too many");
                    assert_eq!(&target.unwrap()[..length], &want[..], "seed {seed}: message {immediate} on {vi}");
                    assert_eq!(u64::from(immediate), token, "seed {seed}: each in its own receive, in order");
                }
                Event::Ended(ending) => panic!("seed {seed}: ended: {ending}"),
            }
        }
        assert!(next_sent.values().all(|sent| *sent == count), "seed {seed}: {next_sent:?}");
    }
    assert!(expected.values().all(VecDeque::is_empty), "seed {seed}");
    world
}

fn stormy(seed: u64) -> Weather {
    let mut random = SeededEntropy::new(seed ^ 0x5eed);
    let rate = |random: &mut SeededEntropy, most: f64| {
        if random.chance(0.3) { 0.0 } else { random.below(1000) as f64 / 1000.0 * most }
    };
    Weather {
        loss: rate(&mut random, 0.2),
        duplication: rate(&mut random, 0.1),
        reordering: rate(&mut random, 0.2),
        corruption: rate(&mut random, 0.05),
        delay_us: random.below(20_000),
        jitter_us: random.below(3_000),
        partition_ms: random.chance(0.2).then(|| (50, 50 + random.below(3_000))),
    }
}

#[test]
fn a_message_arrives_and_both_are_told() {
    let mut world = World::fine(1);
    world.sides[1].post_receive(1, place(9, 100)).unwrap();
    world.sides[0].post_send(1, send(5, b"hello".to_vec())).unwrap();
    assert!(world.run(Duration::from_secs(1), |world| received(&world.events[1]) == 1));
    assert!(world.run(Duration::from_secs(1), |world| !world.events[0].is_empty()));
    assert!(matches!(&world.events[0][0], Event::Sent { vi: 1, token: 5, status: Ok(()), .. }));
    let Event::Received { token, target: Some(target), length, immediate, .. } = &world.events[1][0] else { panic!() };
    assert_eq!((*token, &target[..*length], *immediate), (9, &b"hello"[..], 5));
    assert!(world.now < Duration::from_millis(10), "it took {:?}", world.now);
}

#[test]
fn question_and_answer_are_one_packet_each() {
    let mut world = World::fine(1);
    world.sides.iter_mut().for_each(|side| (0..9).for_each(|n| side.post_receive(1, place(n, 64)).unwrap()));
    world.run(Duration::from_millis(20), |_| false);
    let before = world.packets;
    for round in 0..500 {
        for from in 0..2 {
            world.sides[from].post_send(1, send(round, vec![1; 4])).unwrap();
            let events = world.events[1 - from].len();
            let arrived = world.run(Duration::from_millis(1), |world| received(&world.events[1 - from][events..]) == 1);
            assert!(arrived, "message {round} of side {from}");
            world.sides[1 - from].post_receive(1, place(round, 64)).unwrap();
        }
    }
    assert_eq!(world.packets - before, 1000);
}

#[test]
fn any_weather_delivers_exactly_once_and_in_order() {
    let seeds = std::env::var("HIGHWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
    let range = seeds.map_or(0..SEEDS, |seed: u64| seed..seed + 1);
    for seed in range {
        let config = SessionConfig::default();
        exchange(seed, stormy(seed), [plain(1, 2, &config), plain(2, 1, &config)], 6, 6000);
    }
}

#[test]
fn sealed_sessions_do_the_same() {
    for seed in 0..SEEDS / 10 {
        exchange(seed, stormy(seed), sealed(seed, &SessionConfig::default()), 6, 6000);
    }
}

#[test]
fn a_fifth_lost_is_progress_still() {
    let config = SessionConfig::default();
    let weather = Weather { loss: 0.2, delay_us: 500, ..Weather::default() };
    let world = exchange(3, weather, [plain(1, 2, &config), plain(2, 1, &config)], 3, 200_000);
    let stats = world.sides[0].stats();
    assert!(stats.packets_again > 0 && stats.packets_again < stats.packets_sent, "{stats:?}");
}

#[test]
fn one_who_posts_no_receive_holds_back_its_own_vi_and_no_other() {
    let mut world = World::fine(4);
    for number in 0..20 {
        world.sides[0].post_send(1, send(number, content(1, number, 5000))).unwrap();
        world.sides[0].post_send(2, send(number, content(2, number, 5000))).unwrap();
        world.sides[1].post_receive(2, place(number, 5000)).unwrap();
    }
    assert!(world.run(Duration::from_secs(2), |world| received(&world.events[1]) == 20));
    let packets = world.packets;
    assert!(!world.run(Duration::from_secs(2), |world| received(&world.events[1]) > 20));
    assert!(world.packets < packets + 40, "the one held back keeps quiet: {} packets", world.packets - packets);
    for number in 0..20 {
        world.sides[1].post_receive(1, place(number, 5000)).unwrap();
    }
    assert!(world.run(Duration::from_secs(2), |world| received(&world.events[1]) == 40));
}

#[test]
fn a_silent_peer_is_dead_after_the_death_time_and_everything_comes_back() {
    let mut world = World::fine(5);
    world.weather.partition_ms = Some((0, u64::MAX));
    world.sides[0].post_send(1, send(1, vec![1; 10_000])).unwrap();
    world.sides[0].post_receive(2, place(2, 10)).unwrap();
    let death = Ending::Silence(Duration::from_secs(10));
    assert!(world.run(Duration::from_secs(11), |world| world.sides[0].ended() == Some(death)));
    world.pump();
    let events = &world.events[0];
    assert!(
        matches!(&events[0], Event::Sent { token: 1, payload: Some(payload), status: Err(_), .. } if payload.len() == 10_000)
    );
    assert!(matches!(&events[1], Event::Received { token: 2, status: Err(_), .. }));
    assert!(matches!(&events[2], Event::Ended(ending) if *ending == death));
    assert!(world.now >= Duration::from_secs(10));
}

#[test]
fn an_idle_session_stays_alive_with_few_packets() {
    let mut world = World::fine(6);
    assert!(!world.run(Duration::from_secs(60), |world| world.sides.iter().any(|side| side.ended().is_some())));
    assert!(world.packets < 120, "{} packets in a minute", world.packets);
}

#[test]
fn a_partition_shorter_than_death_is_survived() {
    let mut world = World::fine(7);
    world.weather.partition_ms = Some((1, 8_000));
    world.sides[1].post_receive(1, place(0, 300_000)).unwrap();
    world.sides[0].post_send(1, send(0, content(1, 0, 300_000))).unwrap();
    assert!(world.run(Duration::from_secs(20), |world| received(&world.events[1]) == 1));
}

#[test]
fn a_machine_that_was_suspended_asks_before_it_gives_up() {
    let mut world = World::fine(8);
    assert!(!world.run(Duration::from_secs(1), |_| false));
    // An hour later: its clock has jumped, and the peer's has not noticed.
    world.sides[0].handle_timeout(world.now + Duration::from_secs(3600));
    assert_eq!(world.sides[0].ended(), None);
}

#[test]
fn closing_delivers_what_was_sent_and_tells_both() {
    let config = SessionConfig::default();
    let weather = Weather { loss: 0.1, delay_us: 300, ..Weather::default() };
    let mut world = World::new(9, weather, [plain(1, 2, &config), plain(2, 1, &config)]);
    world.sides[1].post_receive(1, place(0, 100_000)).unwrap();
    world.sides[1].post_receive(1, place(1, 100_000)).unwrap();
    world.sides[0].post_send(1, send(0, content(1, 0, 100_000))).unwrap();
    world.sides[0].close();
    assert!(world.sides[0].post_send(1, send(1, vec![])).is_err());
    assert!(world.run(Duration::from_secs(20), |world| world.sides.iter().all(|side| side.ended().is_some())));
    world.pump();
    assert_eq!(world.sides[0].ended(), Some(Ending::Closed));
    assert_eq!(world.sides[1].ended(), Some(Ending::PeerClosed));
    assert_eq!(received(&world.events[1]), 1);
    assert!(matches!(&world.events[0][0], Event::Sent { status: Ok(()), .. }));
    assert!(matches!(world.events[1].last(), Some(Event::Ended(Ending::PeerClosed))));
}

#[test]
fn a_message_longer_than_its_place_is_a_named_error_and_the_next_arrives() {
    let mut world = World::fine(10);
    world.sides[1].post_receive(1, place(0, 100)).unwrap();
    world.sides[1].post_receive(1, place(1, 100)).unwrap();
    world.sides[0].post_send(1, send(0, vec![1; 5000])).unwrap();
    world.sides[0].post_send(1, send(1, vec![2; 50])).unwrap();
    assert!(world.run(Duration::from_secs(2), |world| received(&world.events[1]) == 1));
    let Event::Received { status, token, .. } = &world.events[1][0] else { panic!() };
    assert_eq!((*token, *status), (0, Err(Ending::TooLong { message: 5000, buffer: 100 })));
}

#[test]
fn a_payload_lands_where_its_token_says_whatever_comes_between() {
    let mut world = World::fine(11);
    world.sides[1].post_receive(1, place(1, 100)).unwrap();
    world.sides[1].expect(1, 77, place(2, 9000)).unwrap();
    let named = Outgoing { payload_token: Some(77), ..send(5, content(1, 5, 9000)) };
    world.sides[0].post_send(1, named).unwrap();
    world.sides[0].post_send(1, send(6, vec![6; 10])).unwrap();
    // Nobody expects this one: it is dropped, and its sender is not held up.
    world.sides[0].post_send(1, Outgoing { payload_token: Some(78), ..send(7, vec![7; 10]) }).unwrap();
    assert!(world.run(Duration::from_secs(2), |world| world.events[0].len() == 3 && received(&world.events[1]) == 2));
    let Event::Received { token: 2, target: Some(target), payload_token: Some(77), .. } = &world.events[1][0] else {
        panic!("{:?}", world.events[1])
    };
    assert_eq!(target, &content(1, 5, 9000));
    assert!(matches!(&world.events[1][1], Event::Received { token: 1, length: 10, .. }));
}

#[test]
fn an_unreliable_message_is_lost_or_whole_and_never_comes_twice() {
    let config = SessionConfig::default();
    let weather = Weather { loss: 0.3, duplication: 0.2, delay_us: 100, ..Weather::default() };
    let mut world = World::new(12, weather, [plain(1, 2, &config), plain(2, 1, &config)]);
    for side in &mut world.sides {
        side.open_vi(50, 50, Assurance::Unreliable, Assurance::Unreliable).unwrap();
    }
    for number in 0..200 {
        world.sides[1].post_receive(50, place(number, 3000)).unwrap();
        world.sides[0].post_send(50, send(number, content(50, number, 3000))).unwrap();
    }
    assert!(world.run(Duration::from_secs(5), |world| world.events[0].len() == 200), "all of them left");
    world.run(Duration::from_secs(1), |_| false);
    let mut last = None;
    for event in &world.events[1] {
        let Event::Received { immediate, target: Some(target), status: Ok(()), .. } = event else {
            panic!("{event:?}")
        };
        assert_eq!(target, &content(50, u64::from(*immediate), 3000));
        assert!(last < Some(*immediate), "in order, once");
        last = Some(*immediate);
    }
    let got = world.events[1].len();
    assert!(got > 20 && got < 180, "{got} of 200 arrived");
}

#[test]
fn forged_replayed_and_foreign_packets_change_nothing() {
    let mut world = World::new(13, Weather { delay_us: 10, ..Weather::default() }, sealed(13, &fixed(1472)));
    world.sides[1].post_receive(1, place(0, 4000)).unwrap();
    world.sides[0].post_send(1, send(0, content(1, 0, 4000))).unwrap();
    let mut out = Vec::new();
    let segment = world.sides[0].poll_transmit(Duration::ZERO, 16, &mut out);
    assert_eq!(segment, None, "nothing leaves without credit");
    world.pump();
    while world.sides[0].poll_transmit(world.now, 1, &mut out).is_none() {
        assert!(world.step(Duration::from_secs(1)));
    }
    let before = world.sides[1].stats();
    for bit in 0..out.len() * 8 {
        let mut forged = out.clone();
        forged[bit / 8] ^= 1 << (bit % 8);
        assert!(world.sides[1].handle_packet(world.now, &forged).is_err(), "bit {bit}");
    }
    for length in 0..out.len() {
        assert!(world.sides[1].handle_packet(world.now, &out[..length]).is_err(), "cut to {length}");
    }
    let after = world.sides[1].stats();
    assert_eq!((before.packets_received, before.messages_received), (after.packets_received, after.messages_received));
    assert!(world.sides[1].handle_packet(world.now, &out).is_ok());
    assert!(matches!(world.sides[1].handle_packet(world.now, &out), Err(Dropped::Replayed(_))));
    let stats = world.sides[1].stats();
    assert!(world.run(Duration::from_secs(1), |world| received(&world.events[1]) == 1), "{stats:?}");
}

#[test]
fn an_acknowledgement_of_what_was_never_sent_is_not_believed() {
    let mut world = World::fine(14);
    world.sides[1].post_receive(1, place(0, 100)).unwrap();
    world.sides[0].post_send(1, send(0, vec![1; 50])).unwrap();
    let mut header = Header::new(Kind::Probe);
    (header.session, header.ack, header.number) = (1, 1000 << 16 | 1000, 0);
    let mut packet = vec![0; Header::BYTES];
    header.write(&mut packet);
    Sealing::checksummed().seal(&mut packet).unwrap();
    world.sides[0].handle_packet(Duration::ZERO, &packet).unwrap();
    assert!(world.sides[0].poll_event().is_none());
}

#[test]
fn limits_are_refusals_with_their_number() {
    let config = SessionConfig { messages_max: 2, receives_max: 2, vis_max: 4, ..SessionConfig::default() };
    let mut side = plain(1, 2, &config);
    assert_eq!(side.post_send(9, send(0, vec![])).unwrap_err().0, Refusal::UnknownVi(9));
    for vi in 1..=4 {
        side.open_vi(vi, vi, Assurance::Reliable, Assurance::Reliable).unwrap();
    }
    assert_eq!(
        side.open_vi(5, 5, Assurance::Reliable, Assurance::Reliable),
        Err(Refusal::NoSuchRoom { vi: 5, limit: 4 })
    );
    side.post_send(1, send(0, vec![])).unwrap();
    side.post_send(1, send(1, vec![])).unwrap();
    assert_eq!(side.post_send(1, send(2, vec![])).unwrap_err().0, Refusal::Full { limit: 2 });
    side.post_receive(1, place(0, 1)).unwrap();
    side.post_receive(1, place(1, 1)).unwrap();
    assert_eq!(side.post_receive(1, place(2, 1)).unwrap_err().0, Refusal::Full { limit: 2 });
    let long = Outgoing { control: vec![0; 129], ..send(0, vec![]) };
    assert_eq!(side.post_send(2, long).unwrap_err().0, Refusal::ControlTooLong { bytes: 129, limit: 128 });
    let huge = send(0, vec![0; (64 << 20) + 1]);
    assert_eq!(side.post_send(2, huge).unwrap_err().0, Refusal::TooLong { bytes: (64 << 20) + 1, limit: 64 << 20 });
}

#[test]
fn a_probe_is_one_packet_however_much_waits() {
    let mut world = World::fine(20);
    world.sides[1].post_receive(1, place(0, 30_000_000)).unwrap();
    world.sides[0].post_send(1, send(0, vec![1; 30_000_000])).unwrap();
    assert!(world.run(Duration::from_secs(1), |world| world.packets > 100));
    let now = world.now.as_millis() as u64;
    world.weather.partition_ms = Some((now, now + 2_500));
    let before = world.sides[0].stats().packets_sent;
    world.run(Duration::from_secs(2), |_| false);
    let sent = world.sides[0].stats().packets_sent - before;
    assert!(sent < 1_500, "{sent} packets left into silence");
    assert!(world.run(Duration::from_secs(60), |world| received(&world.events[1]) == 1));
}

#[test]
fn credit_that_came_before_its_vi_was_open_is_asked_for_again() {
    let mut world = World::fine(21);
    world.sides[1].open_vi(70, 71, Assurance::Reliable, Assurance::Reliable).unwrap();
    for token in 0..3 {
        world.sides[1].post_receive(70, place(token, 100)).unwrap();
    }
    world.run(Duration::from_secs(1), |_| false);
    world.sides[0].open_vi(71, 70, Assurance::Reliable, Assurance::Reliable).unwrap();
    world.sides[0].post_send(71, send(1, vec![7; 50])).unwrap();
    assert!(world.run(Duration::from_secs(1), |world| received(&world.events[1]) == 1));
}

#[test]
fn a_named_payload_that_comes_before_its_vi_is_open_is_not_lost() {
    let mut world = World::fine(22);
    world.sides[0].open_vi(71, 70, Assurance::Reliable, Assurance::Reliable).unwrap();
    world.sides[0].post_send(71, Outgoing { payload_token: Some(5), ..send(1, vec![7; 50]) }).unwrap();
    assert!(!world.run(Duration::from_millis(300), |world| !world.events[0].is_empty()));
    world.sides[1].open_vi(70, 71, Assurance::Reliable, Assurance::Reliable).unwrap();
    world.sides[1].expect(70, 5, place(9, 50)).unwrap();
    assert!(world.run(Duration::from_secs(5), |world| received(&world.events[1]) == 1));
}

#[test]
fn news_of_credit_on_very_many_vis_is_told_at_once() {
    let mut world = World::fine(23);
    for vi in 100..1000 {
        for side in &mut world.sides {
            side.open_vi(vi, vi, Assurance::Reliable, Assurance::Reliable).unwrap();
        }
        world.sides[0].post_send(vi, send(u64::from(vi), vec![3; 10])).unwrap();
        world.sides[1].post_receive(vi, place(0, 10)).unwrap();
    }
    assert!(world.run(Duration::from_secs(2), |world| received(&world.events[1]) == 900));
}

#[test]
fn the_number_of_a_closed_vi_is_not_used_again() {
    let mut world = World::fine(24);
    world.sides[0].post_send(1, send(1, vec![1; 10])).unwrap();
    world.sides[0].close_vi(1);
    assert!(matches!(world.sides[0].poll_event(), Some(Event::Sent { status: Err(Ending::ViClosed), .. })));
    let again = world.sides[0].open_vi(1, 1, Assurance::Reliable, Assurance::Reliable);
    assert!(matches!(again, Err(Refusal::NoSuchRoom { vi: 1, .. })), "{again:?}");
}

#[test]
fn an_unreliable_vi_survives_that_very_much_is_lost() {
    let config = SessionConfig { messages_max: 10_000, receives_max: 10_000, ..SessionConfig::default() };
    let weather = Weather { delay_us: 100, ..Weather::default() };
    let mut world = World::new(25, weather, [plain(1, 2, &config), plain(2, 1, &config)]);
    for side in &mut world.sides {
        side.open_vi(50, 50, Assurance::Unreliable, Assurance::Unreliable).unwrap();
    }
    (0..100).for_each(|token| world.sides[1].post_receive(50, place(token, 10)).unwrap());
    world.weather.loss = 1.0;
    (0..5000).for_each(|number| world.sides[0].post_send(50, send(number, vec![1; 10])).unwrap());
    world.run(Duration::from_secs(8), |world| world.events[0].len() == 5000);
    world.weather.loss = 0.0;
    (0..100).for_each(|number| world.sides[0].post_send(50, send(5000 + number, vec![1; 10])).unwrap());
    assert!(world.run(Duration::from_secs(8), |world| received(&world.events[1]) >= 100));
}

#[test]
fn two_who_close_while_each_waits_for_credit_come_to_an_end() {
    let mut world = World::fine(26);
    for side in &mut world.sides {
        side.post_send(1, send(1, vec![1; 10])).unwrap();
        side.close();
    }
    assert!(world.run(Duration::from_secs(15), |world| world.sides.iter().all(|side| side.ended().is_some())));
    let undone = |event: &Event<_, _>| matches!(event, Event::Sent { status: Err(_), .. });
    assert!(world.events.iter().all(|events| events.iter().any(undone)), "{:?}", world.events);
}

#[test]
fn a_forged_close_gets_no_answer_from_a_session_that_is_over() {
    let mut world =
        World::new(27, Weather { delay_us: 10, ..Weather::default() }, sealed(27, &SessionConfig::default()));
    world.sides[0].close();
    assert!(world.run(Duration::from_secs(1), |world| world.sides.iter().all(|side| side.ended().is_some())));
    let mut header = Header::new(Kind::Close);
    (header.session, header.number) = (2, 99);
    let mut forged = vec![0; Header::BYTES];
    header.write(&mut forged);
    forged[2] |= 64;
    let _ = world.sides[1].handle_packet(world.now, &forged);
    assert_eq!(world.sides[1].poll_transmit(world.now, 1, &mut Vec::new()), None);
}

#[test]
fn a_packet_number_beyond_all_is_dropped() {
    let mut world = World::fine(28);
    for number in [1 << 48, u64::MAX - 1, u64::MAX] {
        let mut header = Header::new(Kind::Probe);
        (header.session, header.number) = (1, number);
        let mut packet = vec![0; Header::BYTES];
        header.write(&mut packet);
        Sealing::checksummed().seal(&mut packet).unwrap();
        assert_eq!(world.sides[0].handle_packet(Duration::ZERO, &packet), Err(Dropped::NotOurs));
    }
}

const VIS: u32 = 3;
const SEEDS: u64 = 1000;

#[test]
fn nothing_lands_in_a_place_that_was_taken_back() {
    let config = SessionConfig::default();
    let weather = Weather { delay_us: 50, jitter_us: 2000, ..Weather::default() };
    let mut world = World::new(31, weather, [plain(1, 2, &config), plain(2, 1, &config)]);
    world.sides[1].expect(1, 77, place(2, 9000)).unwrap();
    assert_eq!(world.sides[1].revoke(1, 77).map(|place| place.token), Some(2));
    assert!(world.sides[1].revoke(1, 77).is_none());
    world.sides[1].expect(1, 78, place(3, 90_000)).unwrap();
    world.sides[1].post_receive(1, place(4, 10)).unwrap();
    for (token, payload_token) in [(1, Some(77)), (2, Some(78)), (3, None)] {
        let bytes = if payload_token.is_some() { 90_000 } else { 10 };
        world.sides[0].post_send(1, Outgoing { payload_token, ..send(token, content(1, token, bytes)) }).unwrap();
    }
    // Half of the second has landed when it is taken back.
    let half = |world: &World| {
        let mut arriving = world.sides[1].vis[&1].arriving.values();
        arriving.any(|message| message.place.is_some() && message.landed.len() > 3)
    };
    assert!(world.run(Duration::from_secs(1), half));
    let back = world.sides[1].revoke(1, 78).expect("it was there").target.expect("a place");
    let before = back.clone();
    assert!(world.run(Duration::from_secs(1), |world| world.events[0].len() == 3), "{:?}", world.events[0].len());
    assert_eq!(back, before);
    let [Event::Received { token: 4, length: 10, .. }] = &world.events[1][..] else { panic!("{:?}", world.events[1]) };
}

#[test]
fn each_side_decides_how_sure_it_wants_to_be() {
    let config = SessionConfig::default();
    let weather = Weather { loss: 0.3, delay_us: 100, ..Weather::default() };
    let mut world = World::new(32, weather, [plain(1, 2, &config), plain(2, 1, &config)]);
    let (sure, unsure) = (Assurance::Reliable, Assurance::Unreliable);
    world.sides[0].open_vi(50, 50, unsure, sure).unwrap();
    world.sides[1].open_vi(50, 50, sure, unsure).unwrap();
    for number in 0..100 {
        for side in 0..2 {
            world.sides[side].post_receive(50, place(number, 3000)).unwrap();
            world.sides[side].post_send(50, send(number, content(50, number, 3000))).unwrap();
        }
    }
    world.run(Duration::from_secs(5), |_| false);
    let (got, lossy) = (received(&world.events[0]), received(&world.events[1]));
    assert!(got == 100 && lossy > 10 && lossy < 90, "{got} and {lossy} of 100 arrived");
}

#[test]
fn packets_that_go_from_where_they_lie_are_the_same_packets() {
    // What leaves by the three ways: copied, gathered, and gathered by a link that was full.
    let mut ways = Vec::new();
    for way in 0..3 {
        let mut side = plain(1, 2, &fixed(1472));
        side.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
        let preface = Outgoing { control: vec![5; 100], payload_token: Some(7), ..send(0, content(1, 1, 70_000)) };
        side.post_send(1, preface).unwrap();
        side.post_send(1, Outgoing { payload_token: Some(8), ..send(1, content(1, 2, 30_000)) }).unwrap();
        let (mut all, mut gathered) = (Vec::new(), 0);
        loop {
            let mut out = Vec::new();
            let transmit = match way {
                0 => side.poll_transmit(Duration::ZERO, 44, &mut out).map(Transmit::Written),
                _ => side.poll_transmit_with(Duration::ZERO, 44, &mut out, &mut |pulse| {
                    gathered += 1;
                    if way == 1 {
                        all.extend(pulse.to_bytes());
                    }
                    way == 1
                }),
            };
            match transmit {
                Some(_) => all.extend(out),
                None => break,
            }
        }
        assert_eq!(gathered > 0, way > 0);
        assert_eq!(side.stats().packets_sent, 64, "the first window, whole");
        ways.push(all);
    }
    assert!(ways[0] == ways[1] && ways[0] == ways[2]);
}

/// Sends a message ahead if it may, or else posts it; whether it went ahead.
fn send_ahead(world: &mut World, from: usize, message: Outgoing<Vec<u8>>) -> bool {
    let (now, mut packet) = (world.now, Vec::new());
    if !world.sides[from].write_ahead(1, &message, &mut packet) {
        assert!(packet.is_empty());
        world.sides[from].post_send(1, message).unwrap();
        return false;
    }
    world.toss(from, &packet);
    world.sides[from].note_ahead(now, 1, message, packet.len());
    true
}

#[test]
fn what_goes_ahead_is_what_would_have_gone() {
    for secret in [false, true] {
        // The same questions and answers, in packets that were posted and in packets that went ahead.
        let mut ways = Vec::new();
        for ahead in [false, true] {
            let config = SessionConfig::default();
            let sides = if secret { sealed(7, &config) } else { [plain(1, 2, &config), plain(2, 1, &config)] };
            let mut world = World::new(5, Weather { delay_us: 50, ..Weather::default() }, sides);
            world.sides.iter_mut().for_each(|side| (0..9).for_each(|n| side.post_receive(1, place(n, 2000)).unwrap()));
            world.run(Duration::from_millis(20), |_| false);
            let (mut packets, mut went_ahead) = (Vec::new(), 0);
            for round in 0..300u64 {
                let from = (round % 2) as usize;
                let control = vec![3; round as usize % 129];
                let message = Outgoing { control, ..send(round, content(1, round, round as usize * 7 % 1500)) };
                match ahead {
                    true => went_ahead += usize::from(send_ahead(&mut world, from, message)),
                    false => world.sides[from].post_send(1, message).unwrap(),
                }
                world.sides.iter().for_each(check_counts);
                let events = world.events[1 - from].len();
                let arrived = world.run(Duration::from_millis(1), |world| {
                    packets.extend(world.on_the_way.iter().map(|Reverse(packet)| packet.3.clone()));
                    received(&world.events[1 - from][events..]) == 1
                });
                assert!(arrived, "message {round}");
                world.sides[1 - from].post_receive(1, place(round, 2000)).unwrap();
            }
            assert_eq!(went_ahead > 150, ahead, "{went_ahead} went ahead");
            packets.dedup();
            let stats = world.sides.each_ref().map(Session::stats);
            let deadlines = world.sides.each_ref().map(Session::poll_timeout);
            ways.push((packets, stats, deadlines, world.now, format!("{:?}", world.events)));
        }
        let [(posted, ..), (ahead, ..)] = &ways[..] else { unreachable!() };
        let differs = posted.iter().zip(ahead).position(|(posted, ahead)| posted != ahead);
        assert_eq!((differs, posted.len()), (None, ahead.len()), "sealed: {secret}");
        assert_eq!(ways[0], ways[1], "sealed: {secret}");
    }
}

#[test]
fn questions_and_answers_go_ahead_in_any_weather() {
    let mut went_ahead = 0;
    for seed in 0..60 {
        let config = SessionConfig::default();
        let sides = if seed % 3 == 0 { sealed(seed, &config) } else { [plain(1, 2, &config), plain(2, 1, &config)] };
        let mut world = World::new(seed, Weather { partition_ms: None, ..stormy(seed) }, sides);
        let mut sent = [0, 0];
        world.sides.iter_mut().for_each(|side| (0..20).for_each(|n| side.post_receive(1, place(n, 3000)).unwrap()));
        for round in 0..80 {
            for (side, sent) in sent.iter_mut().enumerate() {
                if world.random.chance(0.8) {
                    world.sides[side].post_receive(1, place(round, 3000)).unwrap();
                }
                // Sometimes one waits for the other, sometimes both talk at once.
                for _ in 0..world.random.below(2 + round % 2) {
                    let bytes = world.random.below(3000) as usize;
                    let message = send(*sent, content(1, *sent, if bytes < 2000 { 4 } else { bytes }));
                    went_ahead += usize::from(send_ahead(&mut world, side, message));
                    world.sides.iter().for_each(check_counts);
                    *sent += 1;
                }
            }
            let patience = Duration::from_micros(world.random.below(100_000));
            world.run(patience, |_| false);
        }
        for side in 0..2 {
            (0..160).for_each(|n| world.sides[side].post_receive(1, place(n, 3000)).unwrap());
        }
        let all = |world: &World| (0..2).all(|side| received(&world.events[1 - side]) as u64 == sent[side]);
        assert!(world.run(Duration::from_secs(600), all), "seed {seed}: stuck");
        let told = |world: &World| (0..2).all(|side| world.sides[side].stats().messages_sent == sent[side]);
        assert!(world.run(Duration::from_secs(60), told), "seed {seed}: not all were told");
        for side in 0..2 {
            let mut next = 0;
            for event in &world.events[side] {
                let Event::Received { target: Some(target), length, immediate, status, .. } = event else { continue };
                assert_eq!((*status, u64::from(*immediate)), (Ok(()), next), "seed {seed}");
                assert_eq!(&target[..*length], &content(1, next, *length)[..], "seed {seed}");
                next += 1;
            }
        }
    }
    assert!(went_ahead > 500, "{went_ahead} went ahead");
}

/// Two sides that talk as callers do: what came is handed out, and only then the rest is seen to.
fn callers() -> World {
    let mut world = World::fine(5);
    world.sides.iter_mut().for_each(|side| (0..300).for_each(|n| side.post_receive(1, place(n, 30_000)).unwrap()));
    world.run(Duration::from_millis(20), |_| false);
    world
}

/// Hands one side what is on its way there, and takes events, without letting it send.
fn deliver(world: &mut World, to: usize) {
    let mut others = BinaryHeap::new();
    while let Some(Reverse(packet)) = world.on_the_way.pop() {
        if packet.2 != to {
            others.push(Reverse(packet));
            continue;
        }
        world.now = world.now.max(packet.0);
        world.sides[to].handle_packet(world.now, &packet.3).unwrap();
    }
    world.on_the_way = others;
    while let Some(event) = world.sides[to].poll_event() {
        world.events[to].push(event);
    }
}

/// Lets one side send what it has, and its timers run that are due.
fn see_to_the_rest(world: &mut World, of: usize) {
    if world.sides[of].poll_timeout().is_some_and(|at| at <= world.now) {
        world.sides[of].handle_timeout(world.now);
    }
    let mut out = Vec::new();
    while let Some(segment) = world.sides[of].poll_transmit(world.now, 64, &mut out) {
        for packet in std::mem::take(&mut out).chunks(segment) {
            world.toss(of, packet);
        }
    }
}

#[test]
fn an_answer_that_was_thought_about_is_sent_once() {
    let mut world = callers();
    // Sizes that were lost before have had their probes.
    let before = world.sides.each_ref().map(|side| side.stats().probes);
    for round in 0..200 {
        let from = (round % 2) as usize;
        world.now += Duration::from_micros(if from == 1 { 3500 } else { 0 });
        assert!(send_ahead(&mut world, from, send(round, content(1, round, 64))), "message {round}");
        see_to_the_rest(&mut world, from);
        see_to_the_rest(&mut world, from);
        deliver(&mut world, 1 - from);
    }
    let stats = world.sides.each_ref().map(Session::stats);
    assert_eq!(stats.map(|stats| stats.probes), before, "{stats:?}");
    assert!(stats.iter().all(|stats| stats.packets_again == 0), "{stats:?}");
}

#[test]
fn word_of_what_went_is_due_at_once() {
    let mut world = callers();
    for round in 0..50 {
        let from = (round % 2) as usize;
        send_ahead(&mut world, from, send(round, content(1, round, 64)));
        see_to_the_rest(&mut world, from);
        deliver(&mut world, 1 - from);
        let other = &world.sides[1 - from];
        assert!(round == 0 || other.ack_left.is_some() && other.poll_timeout().unwrap() <= world.now);
    }
}

#[test]
fn an_acknowledgement_that_was_left_does_not_make_the_path_seem_faster() {
    // With each acknowledgement taken at once, and left until something has gone.
    let windows = [true, false].map(|at_once| {
        let mut world = callers();
        let mut window = Vec::new();
        for round in 0..8 {
            world.now += Duration::from_millis(5);
            world.sides[0].post_send(1, send(round, content(1, round, 20_000))).unwrap();
            see_to_the_rest(&mut world, 0);
            // The path takes its time.
            world.now += Duration::from_millis(1);
            for _ in 0..2 {
                deliver(&mut world, 1);
                send_ahead(&mut world, 1, send(round, content(1, round, 8)));
                see_to_the_rest(&mut world, 1);
                deliver(&mut world, 0);
                if at_once {
                    world.sides[0].take_ack_left();
                }
                send_ahead(&mut world, 0, send(round, content(1, round, 8)));
                see_to_the_rest(&mut world, 0);
            }
            deliver(&mut world, 1);
            window.push((world.sides[0].controller.window(), world.sides[0].controller.pace()));
        }
        window
    });
    assert_eq!(windows[0], windows[1]);
}

/// A peer who lies about tokens cannot keep a place that is taken back.
#[test]
fn a_place_that_is_taken_back_is_taken_from_whoever_has_it() {
    for (second, lie) in [(false, 0), (false, 999), (true, 0)] {
        let config = fixed(600);
        let [mut from, mut to] = [plain(1, 2, &config), plain(2, 1, &config)];
        for side in [&mut from, &mut to] {
            side.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
        }
        to.expect(1, 77, place(5, 2000)).unwrap();
        for token in 0..2 {
            let payload = Some(vec![0xaa; 2000]);
            let message = Outgoing { token, control: vec![], immediate: 0, payload_token: Some(77), payload };
            from.post_send(1, message).unwrap();
        }
        let (mut packets, mut out) = (Vec::new(), Vec::new());
        while let Some(segment) = from.poll_transmit(Duration::ZERO, 64, &mut out) {
            packets.extend(std::mem::take(&mut out).chunks(segment).map(<[u8]>::to_vec));
        }
        let of = |message: u32| {
            let is_of = move |packet: &&Vec<u8>| Header::parse(packet).unwrap().message == message;
            packets.iter().filter(is_of).cloned().collect::<Vec<_>>()
        };
        let (first, other) = if second { (of(1), of(0)) } else { (of(0), of(1)) };
        to.handle_packet(Duration::ZERO, &first[0]).unwrap();
        // The other message under the same token, or the same one that begins with another.
        let mut lies = other[0].clone();
        if lie != 0 {
            lies[20..24].copy_from_slice(&first[0][20..24]);
            lies[Header::BYTES + 8..][..8].copy_from_slice(&u64::to_le_bytes(lie));
            Sealing::checksummed().seal(&mut lies).unwrap();
        }
        let _ = to.handle_packet(Duration::ZERO, &lies);
        let back = to.revoke(1, 77).expect("it is taken back").target.unwrap();
        assert!(back[..500].iter().all(|byte| *byte == 0xaa) && back[600..].iter().all(|byte| *byte == 0));
        for packet in &first[1..] {
            let _ = to.handle_packet(Duration::ZERO, packet);
        }
        assert!(to.poll_event().is_none(), "nothing is told of it");
    }
}

#[test]
fn credit_that_came_before_its_vi_does_not_go_back() {
    let mut side = plain(1, 2, &SessionConfig::default());
    [3, 5, 4, 0].into_iter().for_each(|credit| side.take_credit(7, credit));
    side.open_vi(7, 7, Assurance::Reliable, Assurance::Reliable).unwrap();
    assert_eq!(side.vis[&7].credit, 5);
}

#[test]
fn a_packet_that_cannot_be_sealed_ends_the_session_with_the_reason() {
    let [mut used_up, mut misused] = sealed(1, &SessionConfig::default());
    used_up.sealing.set_limits(crate::KeyLimits { change_after: 1, end: 2 });
    let probe = |side: &mut Side| {
        side.ask();
        side.poll_transmit(Duration::ZERO, 1, &mut Vec::new())
    };
    // The peer acknowledges nothing, so that the second key is the last.
    assert_eq!((0..4).filter_map(|_| probe(&mut used_up)).count(), 3);
    assert_eq!(used_up.ended(), Some(Ending::KeysUsedUp));
    // A number that was used is no matter of keys.
    let mut packet = [0; Header::BYTES];
    Header { number: 1 << 40, ..Header::new(Kind::Probe) }.write(&mut packet);
    misused.sealing.seal(&mut packet).unwrap();
    assert_eq!(probe(&mut misused), None);
    assert_eq!(misused.ended(), Some(Ending::NotSealed));
}

#[test]
fn keys_change_though_next_to_nothing_is_sent() {
    let mut world = World::new(1, Weather { delay_us: 50, ..Weather::default() }, sealed(1, &SessionConfig::default()));
    assert!(!world.run(Duration::from_secs(600), |world| world.sides.iter().any(|side| side.ended().is_some())));
    for side in &world.sides {
        let stats = side.sealing.stats();
        assert!((4..=6).contains(&stats.sending_keys_changed), "{stats:?}");
        assert!((4..=6).contains(&stats.receiving_keys_changed), "{stats:?}");
    }
}
