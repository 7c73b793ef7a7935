//! Endpoints and a network between them that loses what a test tells it to: lists are granted to few, come
//! back from everybody, and whatever goes wrong, messages arrive.

use super::*;
use crate::session::{Assurance, Event};
use crate::{
    ClusterKey, Endpoint, EndpointConfig, EndpointEvent, Expectation, HeaderFlags, Incoming, Keys, Outgoing,
    PacketSize, Sealing, SeededEntropy, SessionStats,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::net::SocketAddr;

const MS: Duration = Duration::from_millis(1);
const LATENCY: Duration = Duration::from_micros(50);
/// What a packet takes to leave, so that a message takes four milliseconds.
const PACE: Duration = Duration::from_micros(10);
const MESSAGE: usize = 600_000;
const PACKET: usize = 1472;

/// What becomes of a packet: None is lost.
type Meddle = Box<dyn FnMut(usize, Header, Vec<u8>) -> Option<Vec<u8>>>;

/// Endpoint 0 receives; the others are connected to it, each with a session of its own.
struct World {
    endpoints: Vec<Endpoint<Vec<u8>, Vec<u8>>>,
    /// Of each endpoint but the first its own number of the session, and the first one's.
    numbers: Vec<(u32, u32)>,
    entropy: SeededEntropy,
    now: Duration,
    on_the_way: BTreeMap<(Duration, u64), (usize, usize, Vec<u8>)>,
    posted: u64,
    /// When each endpoint's last packet will have left.
    busy_until: Vec<Duration>,
    meddle: Meddle,
    /// Payloads are received where they are expected.
    lands: bool,
    /// Endpoints that do nothing any more.
    dead: Vec<usize>,
    /// Senders whose packets come by none, whatever they name.
    elsewhere: Vec<usize>,
    /// Packets that named lists, by sender and list.
    listed: BTreeMap<(usize, u8), u64>,
    /// Words that were sent, by sender and what they say.
    words: BTreeMap<(usize, u32), u64>,
    arrived: BTreeMap<u32, usize>,
    most_in_use: u32,
}

fn address(endpoint: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, endpoint as u8 + 1], 7))
}

impl World {
    fn new(senders: usize, lists: u16, keys: impl Fn() -> Keys) -> World {
        let mut entropy = SeededEntropy::new(5);
        let mut endpoints = Vec::new();
        for index in 0..=senders {
            let mut config = EndpointConfig { listening: index == 0, ..EndpointConfig::default() };
            config.session.packet_size = PacketSize::Fixed(PACKET);
            endpoints.push(Endpoint::new(keys(), config, &mut entropy));
        }
        endpoints[0].set_lists(lists);
        let mut world = World {
            endpoints,
            numbers: vec![(0, 0); senders + 1],
            entropy,
            now: Duration::ZERO,
            on_the_way: BTreeMap::new(),
            posted: 0,
            busy_until: vec![Duration::ZERO; senders + 1],
            meddle: Box::new(|_, _, packet| Some(packet)),
            lands: false,
            dead: Vec::new(),
            elsewhere: Vec::new(),
            listed: BTreeMap::new(),
            words: BTreeMap::new(),
            arrived: BTreeMap::new(),
            most_in_use: 0,
        };
        for index in 1..=senders {
            world.endpoints[index].connect(world.now, address(0), &mut world.entropy).unwrap();
        }
        world.until(|world| world.numbers[1..].iter().all(|(own, theirs)| *own != 0 && *theirs != 0));
        world
    }

    fn plain(senders: usize, lists: u16) -> World {
        World::new(senders, lists, Keys::insecure)
    }

    /// Everything happens up to the next moment at which something does.
    fn step(&mut self) {
        let next = self.endpoints.iter().enumerate().filter(|(index, _)| !self.dead.contains(index));
        let timers = next.filter_map(|(_, endpoint)| endpoint.poll_timeout()).min();
        let arrival = self.on_the_way.keys().next().map(|(at, _)| *at);
        self.now = timers.into_iter().chain(arrival).min().unwrap_or(self.now).max(self.now);
        self.act();
    }

    /// What can be done now is done.
    fn act(&mut self) {
        while let Some(first) = self.on_the_way.first_entry().filter(|first| first.key().0 <= self.now) {
            let (from, to, packet) = first.remove();
            let list = if self.elsewhere.contains(&from) { 0 } else { packet[Header::LIST_AT] };
            self.endpoints[to].set_way(0, list);
            let is_taken = self.dead.contains(&to) || self.lands && self.land(from, to, &packet);
            if !is_taken {
                self.endpoints[to].handle_packet(self.now, address(from), &packet, &mut self.entropy);
            }
        }
        for index in 0..self.endpoints.len() {
            if self.dead.contains(&index) {
                continue;
            }
            if self.endpoints[index].poll_timeout().is_some_and(|at| at <= self.now) {
                self.endpoints[index].handle_timeout(self.now, &mut self.entropy);
            }
            self.send(index);
            while let Some(event) = self.endpoints[index].poll_event() {
                self.handle(index, event);
            }
        }
        self.most_in_use = self.most_in_use.max(self.endpoints[0].lists_in_use().count_ones());
    }

    /// True if the packet was where it was expected.
    fn land(&mut self, from: usize, to: usize, packet: &[u8]) -> bool {
        let endpoint = &mut self.endpoints[to];
        let Expectation::There(mut guess) = endpoint.expect_landing(0, Some(packet)) else { return false };
        let heads = guess.receive(packet);
        let landed = endpoint.take_landed(self.now, address(from), &heads, packet.len(), true) == 1;
        endpoint.finish_landed();
        landed
    }

    fn send(&mut self, from: usize) {
        let mut out = Vec::new();
        while let Some((to, segment)) = self.endpoints[from].poll_transmit(self.now, 8 * PACKET, &mut out) {
            let to = (0..self.endpoints.len()).find(|index| address(*index) == to).unwrap();
            for packet in out.chunks(segment) {
                let header = Header::parse(packet).unwrap();
                if header.kind == Kind::Fast {
                    *self.words.entry((from, header.offset)).or_default() += 1;
                }
                if let Some(packet) = (self.meddle)(from, header, packet.to_vec()) {
                    let list = packet[Header::LIST_AT];
                    if list != 0 {
                        *self.listed.entry((from, list)).or_default() += 1;
                    }
                    self.posted += 1;
                    self.busy_until[from] = self.busy_until[from].max(self.now) + PACE;
                    self.on_the_way.insert((self.busy_until[from] + LATENCY, self.posted), (from, to, packet));
                }
            }
            out.clear();
        }
    }

    fn handle(&mut self, index: usize, event: EndpointEvent<Vec<u8>, Vec<u8>>) {
        let number = match event {
            EndpointEvent::Connected(number) => {
                self.numbers[index].0 = number;
                number
            }
            EndpointEvent::Accepted(number, from) => {
                let sender = (0..self.endpoints.len()).find(|index| address(*index) == from).unwrap();
                self.numbers[sender].1 = number;
                number
            }
            EndpointEvent::Session(number, Event::Received { target, length, status: Ok(()), .. }) => {
                assert!(target.unwrap()[..length].iter().enumerate().all(|(at, byte)| *byte == at as u8));
                *self.arrived.entry(number).or_default() += 1;
                return;
            }
            _ => return,
        };
        let session = self.endpoints[index].session(number).unwrap();
        for vi in 1..=VIS {
            // Its number at the other side is another.
            session
                .open_vi(vi + if index == 0 { 10 } else { 0 }, vi + if index == 0 { 0 } else { 10 }, RELIABLE, RELIABLE)
                .unwrap();
        }
    }

    fn post(&mut self, sender: usize, vi: u32, bytes: usize) {
        let theirs = self.numbers[sender].1;
        let place = Incoming { token: 1, target: Some(vec![0; bytes]) };
        self.endpoints[0].session(theirs).unwrap().post_receive(vi + 10, place).unwrap();
        self.post_without_place(sender, vi, bytes);
    }

    /// A message that waits for credit.
    fn post_without_place(&mut self, sender: usize, vi: u32, bytes: usize) {
        let own = self.numbers[sender].0;
        let payload = Some((0..bytes).map(|at| at as u8).collect());
        let message = Outgoing { token: 1, control: vec![], immediate: 0, payload_token: None, payload };
        self.endpoints[sender].session(own).unwrap().post_send(vi, message).unwrap();
    }

    fn arrived(&self, sender: usize) -> usize {
        self.arrived.get(&self.numbers[sender].1).copied().unwrap_or(0)
    }

    fn until(&mut self, done: impl Fn(&World) -> bool) {
        self.act();
        for _ in 0..200_000 {
            if done(self) {
                return;
            }
            self.step();
        }
        panic!("stuck at {:?}: {:?}", self.now, self.endpoints[0].stats());
    }

    /// Lets so much time pass.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        self.act();
        loop {
            let timers = (0..self.endpoints.len()).filter(|index| !self.dead.contains(index));
            let timers = timers.filter_map(|index| self.endpoints[index].poll_timeout()).min();
            let next = timers.into_iter().chain(self.on_the_way.keys().next().map(|(at, _)| *at)).min();
            if next.is_none_or(|next| next > end) {
                self.now = end;
                return self.act();
            }
            self.step();
        }
    }

    fn until_arrived(&mut self, sender: usize, messages: usize) {
        self.until(|world| world.arrived(sender) == messages);
    }

    fn stats(&mut self, sender: usize) -> SessionStats {
        let number = self.numbers[sender].0;
        self.endpoints[sender].session(number).unwrap().stats()
    }

    fn listed(&self, sender: usize) -> u64 {
        self.listed.iter().filter(|((from, _), _)| *from == sender).map(|(_, count)| count).sum()
    }
}

fn none_left(_vi: u32) -> u32 {
    0
}

const VIS: u32 = 3;
const RELIABLE: Assurance = Assurance::Reliable;

/// The packet with another header, and the checksum that belongs to it.
fn rewritten(header: Header, mut packet: Vec<u8>) -> Vec<u8> {
    packet[48..64].fill(0);
    let header = Header { flags: header.flags.without(HeaderFlags::PHASE), ..header };
    header.write(&mut packet);
    Sealing::checksummed().seal(&mut packet).unwrap();
    packet
}

#[test]
fn a_large_message_is_sent_by_a_list_once_that_is_granted() {
    let mut world = World::plain(1, 0b110);
    world.post(1, 1, MESSAGE);
    world.until_arrived(1, 1);
    // What left before the answer came went in the common way.
    let (listed, packets) = (world.listed(1), (MESSAGE / 1408) as u64);
    assert!(listed > packets / 2 && listed < packets, "{listed} of {packets} packets");
    assert_eq!(
        (world.endpoints[0].lists_in_use(), world.endpoints[0].list_holder(1)),
        (0b10, Some((world.numbers[1].1, 11)))
    );
    // The next message finds it granted.
    world.post(1, 1, MESSAGE);
    world.until_arrived(1, 2);
    assert!(world.listed(1) > listed + packets - 3);
    world.pass(12 * MS);
    assert_eq!((world.endpoints[0].lists_in_use(), world.words[&(1, DONE)]), (0, 1));
    let (stats, endpoint) = (world.stats(1), world.endpoints[0].stats());
    assert_eq!((stats.fast_requests, stats.fast_grants, stats.fast_refusals), (1, 1, 0));
    assert_eq!((endpoint.list_requests, endpoint.list_grants, endpoint.list_refusals), (1, 1, 0));
    assert_eq!((endpoint.lists_idle, endpoint.foreign_lists), (0, 0));
}

#[test]
fn what_lands_by_a_list_keeps_it_and_what_lands_by_anothers_does_not() {
    let mut world = World::plain(1, 0b10);
    world.lands = true;
    world.post(1, 1, 20 * MESSAGE);
    world.until_arrived(1, 1);
    assert!(world.now > 2 * IDLE_FOR && world.endpoints[0].landing().seen > 1000, "{:?}", world.endpoints[0].landing());
    let stats = world.endpoints[0].stats();
    assert_eq!((stats.list_grants, stats.lists_idle, stats.foreign_lists), (1, 0, 0));
    world.endpoints[0].set_lists(0);
    world.post(1, 1, MESSAGE);
    world.until_arrived(1, 2);
    assert!(world.endpoints[0].stats().foreign_lists > 0 && world.words[&(0, REFUSAL)] > 0);
}

#[test]
fn small_messages_unreliable_ones_and_sealed_ones_ask_for_nothing() {
    let mut world = World::plain(1, 0b110);
    (0..20).for_each(|_| world.post(1, 1, 200_000));
    world.until_arrived(1, 20);
    assert!(world.words.is_empty());
    let mut world = World::new(1, 0b110, || Keys::new(ClusterKey::from_random([3; 32])));
    world.post(1, 1, MESSAGE);
    let own = world.numbers[1].0;
    world.endpoints[1].session(own).unwrap().request_fast(1).unwrap();
    world.until_arrived(1, 1);
    assert!(world.words.is_empty() && world.listed.is_empty());
}

#[test]
fn a_vi_that_is_told_to_asks_whatever_it_sends() {
    let mut world = World::plain(1, 0b110);
    let own = world.numbers[1].0;
    let session = world.endpoints[1].session(own).unwrap();
    assert!(session.request_fast(99).is_err());
    session.request_fast(2).unwrap();
    world.pass(MS);
    assert_eq!(world.endpoints[0].lists_in_use(), 0b10);
    world.post(1, 2, 3_000);
    world.until_arrived(1, 1);
    assert_eq!(world.listed(1), 3);
    world.pass(12 * MS);
    assert_eq!(world.endpoints[0].lists_in_use(), 0);
}

#[test]
fn without_lists_a_session_asks_once() {
    let mut world = World::plain(1, 0);
    for messages in 1..=3 {
        world.post(1, 1, MESSAGE);
        world.until_arrived(1, messages);
    }
    world.pass(100 * MS);
    assert_eq!((world.words[&(1, REQUEST)], world.words[&(0, REFUSAL)], world.listed(1)), (1, 1, 0));
}

#[test]
fn four_senders_share_two_lists_and_all_arrives() {
    let mut world = World::plain(4, 0b110);
    for sender in 1..=4 {
        world.post(sender, 1, 5 * MESSAGE);
    }
    world.until(|world| (1..=4).all(|sender| world.arrived(sender) == 1));
    let stats = world.endpoints[0].stats();
    assert!(stats.list_refusals > 0 && world.most_in_use == 2, "{stats:?}");
    assert_eq!(stats.foreign_lists, 0);
    world.pass(50 * MS);
    assert_eq!(world.endpoints[0].lists_in_use(), 0);
}

#[test]
fn who_is_refused_gets_the_list_when_another_has_ended() {
    let mut world = World::plain(2, 0b10);
    world.post(1, 1, MESSAGE);
    world.pass(MS / 2);
    assert_eq!(world.endpoints[0].list_holder(1), Some((world.numbers[1].1, 11)));
    world.post(2, 1, 20 * MESSAGE);
    world.until_arrived(2, 1);
    assert_eq!(world.arrived(1), 1);
    let stats = world.stats(2);
    assert!(stats.fast_refusals > 0 && stats.fast_grants == 1 && world.listed(2) > 0, "{stats:?}");
}

#[test]
fn the_list_of_one_who_dies_comes_back() {
    let mut world = World::plain(2, 0b10);
    world.post(1, 1, 20 * MESSAGE);
    world.pass(2 * MS);
    assert!(world.listed(1) > 0 && world.endpoints[0].lists_in_use() == 0b10);
    world.dead.push(1);
    world.post(2, 1, 20 * MESSAGE);
    world.until(|world| world.listed(2) > 0);
    assert_eq!(world.endpoints[0].stats().lists_idle, 1);
    world.until_arrived(2, 1);
    world.pass(Duration::from_secs(30));
    assert_eq!(world.endpoints[0].lists_in_use(), 0);
}

#[test]
fn a_list_that_nobody_uses_comes_back() {
    let mut world = World::plain(1, 0b10);
    // Done is lost too.
    world.meddle = Box::new(|_, header, packet| (header.kind != Kind::Fast || header.offset != DONE).then_some(packet));
    let own = world.numbers[1].0;
    world.endpoints[1].session(own).unwrap().request_fast(1).unwrap();
    world.pass(15 * MS);
    assert_eq!((world.endpoints[0].lists_in_use(), world.words[&(1, DONE)]), (0b10, 1));
    world.pass(6 * MS);
    assert_eq!((world.endpoints[0].lists_in_use(), world.endpoints[0].stats().lists_idle), (0, 1));
}

#[test]
fn lost_requests_and_answers_only_take_time() {
    for lost in [REQUEST, GRANT] {
        let mut world = World::plain(1, 0b10);
        let mut left = 3;
        world.meddle = Box::new(move |_, header, packet| {
            let hit = header.kind == Kind::Fast && header.offset == lost && left > 0;
            left -= i32::from(hit);
            (!hit).then_some(packet)
        });
        world.post(1, 1, 20 * MESSAGE);
        world.until_arrived(1, 1);
        let stats = world.stats(1);
        assert!(stats.fast_requests >= 4 && stats.fast_grants == 1 && world.listed(1) > 0, "{stats:?}");
    }
}

#[test]
fn a_grant_that_comes_too_late_is_not_used() {
    let (mut fast, mut stats) = (Fast::new(1, false), SessionStats::default());
    let first = Word::Grant { request: 1, list: 3 };
    fast.ask(5, 9, 100);
    assert_eq!(fast.next(MS, none_left, &mut stats), Some((9, Word::Request { request: 1, bytes: 100 })));
    fast.handle(2 * MS, 5, first, &mut stats);
    assert_eq!((fast.list(3 * MS, 5), fast.list(12 * MS, 5)), (3, 3));
    // Its timers were not run.
    assert_eq!((fast.list(22 * MS, 5), fast.list(22 * MS, 5)), (0, 0));
    fast.handle(22 * MS, 5, first, &mut stats);
    assert_eq!(fast.next(22 * MS, none_left, &mut stats), Some((9, Word::Done { request: 1, list: 3 })));
    fast.ask(5, 9, 100);
    assert_eq!(fast.next(23 * MS, none_left, &mut stats), Some((9, Word::Request { request: 2, bytes: 100 })));
    // The answer to the first request, once more.
    fast.handle(23 * MS, 5, first, &mut stats);
    assert_eq!((fast.list(23 * MS, 5), stats.fast_grants), (0, 1));
    fast.handle(24 * MS, 5, Word::Grant { request: 2, list: 4 }, &mut stats);
    // A refusal of another list, and an old one of none.
    fast.handle(24 * MS, 5, Word::Refusal { request: 0, list: 3, after: Some(MS) }, &mut stats);
    fast.handle(24 * MS, 5, Word::Refusal { request: 2, list: 0, after: Some(MS) }, &mut stats);
    assert_eq!((fast.list(24 * MS, 5), stats.fast_refusals), (4, 0));
    fast.handle(24 * MS, 5, Word::Refusal { request: 0, list: 4, after: Some(MS) }, &mut stats);
    assert_eq!((fast.list(24 * MS, 5), stats.fast_refusals), (0, 1));
    // It asks again when it was told, and only if it has something to send.
    assert_eq!(fast.deadline(), Some(25 * MS));
    fast.handle_timeout(25 * MS, |_| true);
    assert!(matches!(fast.next(25 * MS, none_left, &mut stats), Some((9, Word::Request { request: 2, .. }))));
    fast.handle(25 * MS, 5, Word::Refusal { request: 2, list: 0, after: Some(MS) }, &mut stats);
    // The second in a row is for twice as long.
    assert_eq!(fast.deadline(), Some(27 * MS));
    fast.handle_timeout(27 * MS, |_| false);
    assert!(!fast.is_active() && fast.next(27 * MS, none_left, &mut stats).is_none() && !fast.is_due());
}

#[test]
fn a_vi_that_is_closed_gives_its_list_back() {
    for closes in [0, 1] {
        let mut world = World::plain(1, 0b10);
        world.post(1, 1, 20 * MESSAGE);
        world.pass(2 * MS);
        assert_eq!(world.endpoints[0].lists_in_use(), 0b10);
        let (own, theirs) = world.numbers[1];
        if closes == 1 {
            world.endpoints[1].session(own).unwrap().close_vi(1);
            world.until(|world| world.endpoints[0].lists_in_use() == 0);
            assert_eq!(world.endpoints[0].stats().lists_idle, 0);
        } else {
            world.endpoints[0].session(theirs).unwrap().close_vi(11);
            // The next one who asks gets it at once.
            world.endpoints[1].session(own).unwrap().request_fast(2).unwrap();
            world.until(|world| world.endpoints[0].list_holder(1) == Some((theirs, 12)));
            assert_eq!(world.endpoints[0].stats().list_refusals, 0);
            world.pass(50 * MS);
        }
        assert_eq!(world.endpoints[0].lists_in_use(), 0);
    }
    // The same for a session.
    let mut world = World::plain(1, 0b10);
    let own = world.numbers[1].0;
    world.endpoints[1].session(own).unwrap().request_fast(2).unwrap();
    world.pass(MS);
    assert_eq!(world.endpoints[0].lists_in_use(), 0b10);
    world.endpoints[1].session(own).unwrap().close();
    world.pass(MS);
    assert_eq!(world.endpoints[0].lists_in_use(), 0);
}

#[test]
fn who_uses_lists_of_others_is_told_and_disturbs_nobody() {
    let mut world = World::plain(2, 0b10);
    let mut list = 0u8;
    world.meddle = Box::new(move |from, header, packet| {
        if from != 2 || header.kind != Kind::Data {
            return Some(packet);
        }
        // Every number that there is.
        list = list.wrapping_add(1).max(1);
        Some(rewritten(Header { list, ..header }, packet))
    });
    world.post(1, 1, 10 * MESSAGE);
    world.pass(MS / 4);
    assert_eq!(world.endpoints[0].list_holder(1), Some((world.numbers[1].1, 11)));
    world.post(2, 1, 200_000);
    world.until(|world| world.arrived(1) == 1 && world.arrived(2) == 1);
    let stats = world.endpoints[0].stats();
    assert!(stats.foreign_lists >= 143 && stats.lists_idle == 0, "{stats:?}");
    let told = world.words[&(0, REFUSAL)];
    assert!(told >= 1 && u128::from(told) <= 1 + world.now.as_millis() / TELL_EVERY.as_millis(), "{told} times");
    assert_eq!((world.stats(1).fast_refusals, world.endpoints[0].lists_in_use()), (0, 0b10));
}

#[test]
fn a_flood_of_requests_gets_one_answer_for_each_vi() {
    let mut world = World::plain(1, 0b10);
    world.pass(10 * MS);
    let theirs = world.numbers[1].1;
    for number in 0..5_000 {
        let bare = Header { session: theirs, number: 1_000 + number, ..Header::new(Kind::Fast) };
        // VIs that are there, and many that are not.
        let header = Word::Request { request: number as u32, bytes: 1 }.header(number as u32 % 100, bare);
        let packet = rewritten(header, vec![0; Header::BYTES]);
        let (now, entropy) = (world.now, &mut world.entropy);
        world.endpoints[0].handle_packet(now, address(1), &packet, entropy);
    }
    let before = world.posted;
    world.send(0);
    assert!(world.posted - before <= u64::from(VIS) + 1, "{} packets", world.posted - before);
    let stats = world.endpoints[0].stats();
    assert_eq!((stats.list_requests, stats.list_grants, stats.list_refusals), (150, 50, 100));
    world.pass(25 * MS);
    assert_eq!(world.endpoints[0].lists_in_use(), 0);
}

#[test]
fn lists_that_are_lost_are_granted_no_longer() {
    let mut world = World::plain(2, 0b110);
    world.post(1, 1, 20 * MESSAGE);
    world.pass(MS);
    assert_eq!(world.endpoints[0].lists_in_use(), 0b10);
    world.endpoints[0].set_lists(0b101);
    assert_eq!(world.endpoints[0].lists_in_use(), 0);
    world.until_arrived(1, 1);
    // It was told, asked again, and got the other.
    assert!(world.endpoints[0].stats().foreign_lists > 0 && world.listed.contains_key(&(1, 2)), "{:?}", world.listed);
    world.endpoints[0].set_lists(0);
    world.post(2, 1, MESSAGE);
    world.until_arrived(2, 1);
    assert_eq!(world.listed(2), 0);
}

#[test]
fn who_waits_for_credit_asks_for_nothing() {
    let mut world = World::plain(2, 0b10);
    world.post(1, 1, 100 * MESSAGE);
    world.pass(2 * MS);
    world.post(2, 1, MESSAGE);
    (0..3).for_each(|_| world.post_without_place(2, 1, MESSAGE));
    world.until_arrived(2, 1);
    let asked = world.words[&(2, REQUEST)];
    let stats = world.stats(2);
    assert!(stats.fast_refusals > 0 && stats.fast_grants == 0, "{stats:?}");
    world.pass(300 * MS);
    assert_eq!((world.arrived(1), world.words[&(2, REQUEST)]), (0, asked), "the list is another's all the time");
}

#[test]
fn who_is_refused_again_waits_twice_as_long_until_it_is_granted_one() {
    let (mut fast, mut stats, mut now) = (Fast::new(1, false), SessionStats::default(), MS);
    let refusal = |after| Word::Refusal { request: 1, list: 0, after: Some(after) };
    fast.ask(5, 9, 100);
    for pause in [5, 10, 20, 40, 80, 160, 320, 320, 320] {
        assert!(matches!(fast.next(now, none_left, &mut stats), Some((9, Word::Request { .. }))));
        fast.handle(now, 5, refusal(RETRY_AFTER), &mut stats);
        assert_eq!(fast.deadline(), Some(now + pause * MS));
        now += pause * MS;
        fast.handle_timeout(now, |_| true);
    }
    // What the peer says is the least, and what another VI was told is not this one's.
    fast.next(now, none_left, &mut stats);
    fast.handle(now, 5, refusal(APART_FOR), &mut stats);
    assert_eq!(fast.deadline(), Some(now + APART_FOR));
    fast.ask(6, 9, 100);
    fast.next(now, none_left, &mut stats);
    fast.handle(now, 6, Word::Refusal { request: 2, list: 0, after: Some(RETRY_AFTER) }, &mut stats);
    assert_eq!(fast.deadline(), Some(now + RETRY_AFTER));
    fast.forget(6);
    // A message that ends between does not make it forget.
    now += APART_FOR;
    fast.handle_timeout(now, |_| false);
    assert!(!fast.is_active());
    let again = |fast: &mut Fast, now: Duration, request: u32| {
        fast.ask(5, 9, 100);
        assert!(matches!(fast.next(now, none_left, &mut SessionStats::default()), Some((9, Word::Request { .. }))));
        fast.handle(now, 5, Word::Refusal { request, list: 0, after: Some(RETRY_AFTER) }, &mut SessionStats::default());
        let pause = fast.deadline().unwrap() - now;
        fast.handle_timeout(now + pause, |_| false);
        pause
    };
    assert_eq!(again(&mut fast, now, 3), PAUSE_MOST);
    // Much later it begins anew, and so it does after a grant.
    now += PAUSE_MOST + IN_A_ROW;
    assert_eq!((again(&mut fast, now, 4), again(&mut fast, now + 5 * MS, 5)), (5 * MS, 10 * MS));
    now += 20 * MS;
    fast.ask(5, 9, 100);
    fast.next(now, none_left, &mut stats);
    fast.handle(now, 5, Word::Grant { request: 6, list: 3 }, &mut stats);
    fast.handle(now, 5, Word::Refusal { request: 0, list: 3, after: Some(RETRY_AFTER) }, &mut stats);
    assert_eq!(fast.deadline(), Some(now + RETRY_AFTER));
}

#[test]
fn a_message_that_goes_on_after_a_pause_gets_a_list_again() {
    let mut world = World::plain(1, 0b10);
    world.post(1, 1, 20 * MESSAGE);
    world.pass(2 * MS);
    let listed = world.listed(1);
    assert!(listed > 0);
    // The sender is not run for a while.
    world.dead.push(1);
    world.pass(3 * IDLE_FOR);
    world.dead.clear();
    world.until_arrived(1, 1);
    let stats = world.stats(1);
    assert_eq!((stats.fast_grants, world.words[&(1, DONE)]), (2, 1), "{stats:?}");
    assert!(world.listed(1) > listed + 5_000, "{} packets, {listed} of them before", world.listed(1));
    world.pass(50 * MS);
    assert_eq!((world.endpoints[0].lists_in_use(), world.stats(1).fast_requests), (0, stats.fast_requests));
}

#[test]
fn what_is_left_of_a_message_is_worth_a_list_only_when_it_is_large() {
    for (left, asks) in [(100, true), (99, false)] {
        let (mut fast, mut stats) = (Fast::new(100, false), SessionStats::default());
        fast.ask(5, 9, 200);
        fast.next(MS, none_left, &mut stats);
        fast.handle(MS, 5, Word::Grant { request: 1, list: 3 }, &mut stats);
        fast.handle_timeout(MS + KEEP_FOR, |_| true);
        assert_eq!(fast.next(12 * MS, |_| left, &mut stats), Some((9, Word::Done { request: 1, list: 3 })));
        // Not before something is sent.
        assert_eq!((fast.next(12 * MS, |_| left, &mut stats), fast.deadline()), (None, None));
        assert_eq!((fast.is_active(), fast.list(20 * MS, 5)), (asks, 0));
        let request = asks.then_some((9, Word::Request { request: 2, bytes: 100 }));
        assert_eq!(fast.next(20 * MS, |_| left, &mut stats), request);
    }
}

#[test]
fn who_is_told_of_a_list_that_is_not_its_own_still_hears_of_its_grant() {
    let mut fast = Fast::new(1, false);
    let grant = Word::Grant { request: 4, list: 2 };
    fast.answer(5, 9, grant);
    assert!(!fast.note_foreign(MS, 5));
    assert_eq!(fast.next(MS, none_left, &mut SessionStats::default()), Some((9, grant)));
    assert!(fast.note_foreign(MS, 5) && !fast.note_foreign(MS, 5), "it was not told yet");
}

/// As the packets of a peer do that has a socket of its own at the receiver.
#[test]
fn a_list_by_which_nothing_comes_is_left_to_others() {
    let mut world = World::plain(2, 0b10);
    world.elsewhere.push(1);
    world.post(1, 1, 100 * MESSAGE);
    world.pass(5 * MS);
    let stats = world.endpoints[0].stats();
    assert_eq!((stats.lists_astray, stats.lists_idle, world.endpoints[0].lists_in_use()), (1, 0, 0));
    world.post(2, 1, 20 * MESSAGE);
    world.until(|world| world.listed(2) > 0);
    assert_eq!(world.endpoints[0].list_holder(1), Some((world.numbers[2].1, 11)));
    world.until_arrived(2, 1);
    assert_eq!((world.stats(2).fast_refusals, world.arrived(1)), (0, 0));
    // It asks again after a second, and not before.
    assert_eq!((world.words[&(1, REQUEST)], world.endpoints[0].lists_in_use() & !0b10), (1, 0));
    world.until_arrived(1, 1);
    world.pass(APART_FOR);
    assert!(world.words[&(1, REQUEST)] <= 1 + world.now.as_secs(), "{:?} at {:?}", world.words, world.now);
}

#[test]
fn so_is_one_whose_holder_sends_little_and_another_way() {
    let mut world = World::plain(1, 0b10);
    world.elsewhere.push(1);
    let own = world.numbers[1].0;
    for messages in 1..=200 {
        world.endpoints[1].session(own).unwrap().request_fast(1).unwrap();
        world.post(1, 1, 1_000);
        world.until_arrived(1, messages);
        world.pass(4 * MS);
    }
    let stats = world.endpoints[0].stats();
    assert_eq!((stats.list_grants, stats.lists_idle, stats.lists_astray), (1, 1, 0), "{stats:?}");
    assert_eq!(world.stats(1).fast_requests, 1);
}

#[test]
fn a_few_packets_by_another_way_cost_nobody_a_list() {
    let (mut admission, holder) = (Admission::new(), (1, 2));
    admission.set_lists(0b10);
    assert_eq!(admission.grant(MS, holder, 1, Duration::ZERO), Some(1));
    for _ in 0..10 {
        assert!((1..STRAYS_MOST).all(|_| admission.note_use(MS, holder, 1, 0) == Use::Own));
        assert_eq!(admission.note_use(MS, holder, 1, 1), Use::Own);
    }
    // Only what comes by it keeps it.
    assert_eq!(admission.note_use(15 * MS, holder, 1, 3), Use::Own);
    assert_eq!(admission.release_idle(MS + IDLE_FOR), 1);
    assert_eq!(admission.retry_after(MS + IDLE_FOR, holder), RETRY_AFTER, "it was of use");
    assert_eq!(admission.grant(30 * MS, holder, 2, Duration::ZERO), Some(1));
    assert!((1..STRAYS_MOST).all(|_| admission.note_use(30 * MS, holder, 1, 0) == Use::Own));
    assert_eq!(admission.note_use(30 * MS, holder, 1, 0), Use::Astray);
    assert_eq!((admission.granted(), admission.note_use(30 * MS, holder, 1, 1)), (0, Use::Foreign));
    assert_eq!(admission.grant(40 * MS, holder, 3, Duration::ZERO), None);
    assert_eq!(admission.retry_after(40 * MS, holder), APART_FOR - 10 * MS);
    assert_eq!(admission.grant(40 * MS, (1, 3), 4, Duration::ZERO), Some(1), "another VI can have it");
    admission.release((1, 3), 4);
    assert_eq!(admission.grant(30 * MS + APART_FOR, holder, 5, Duration::ZERO), Some(1));
}

proptest! {
    #[test]
    fn a_word_is_what_its_header_says(request: u32, number: u32, list in 1u8.., micros in 0..NEVER, vi: u32) {
        let bare = Header { session: 4, number: 5, ack: 6, ..Header::new(Kind::Fast) };
        for word in [
            Word::Request { request, bytes: number },
            Word::Grant { request, list },
            Word::Refusal { request, list: 0, after: None },
            Word::Refusal { request: 0, list, after: Some(Duration::from_micros(u64::from(micros))) },
            Word::Done { request, list },
        ] {
            let header = word.header(vi, bare);
            prop_assert_eq!((Word::parse(&header), header.vi, header.list), (Some(word), vi, 0));
        }
    }

    /// Whatever is said, by whom, and when: what is granted is there, to one holder each, and comes back.
    #[test]
    fn any_order_of_requests_and_releases_keeps_the_books(
        steps in prop::collection::vec((0u8..6, 0u32..4, 0u32..3, 0u8..20, 0u64..15), 0..200),
    ) {
        let (mut admission, mut now) = (Admission::new(), Duration::ZERO);
        admission.set_lists(0b1110);
        for (what, session, vi, list, ms) in steps {
            now += MS * ms as u32;
            match what {
                0 | 1 => drop(admission.grant(now, (session, vi), vi, Duration::ZERO)),
                2 => _ = admission.note_use(now, (session, vi), list, list),
                5 => (0..40).for_each(|_| _ = admission.note_use(now, (session, vi), list, 0)),
                3 => admission.release((session, vi), u32::from(list)),
                _ => drop(admission.release_idle(now)),
            }
            let holders: Vec<Holder> = (0..16).filter_map(|list| admission.holder(list)).collect();
            let mut once = holders.clone();
            once.sort_unstable();
            once.dedup();
            prop_assert_eq!(once.len(), holders.len());
            prop_assert_eq!(admission.granted().count_ones() as usize, holders.len());
            prop_assert_eq!(admission.granted() & !0b1110, 0);
            prop_assert_eq!(admission.deadline().is_some(), !holders.is_empty());
        }
        admission.release_idle(now + IDLE_FOR);
        prop_assert_eq!(admission.granted(), 0);
    }
}
