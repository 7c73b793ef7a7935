use super::*;
use crate::coordinator::{self, Coordinator};
use crate::donation::{PAGE_BYTES, Read, View};
use crate::map::bucket_of;
use crate::request::{Expect, Figures};
use crate::types::{Loss, PageHandle, Version};
use highwire_mem::PeerMemory;
use std::collections::BTreeMap;
use std::os::fd::AsFd;

const MS: u64 = 1_000_000;
const LEASE: u64 = 60_000 * MS;

/// Nodes and a coordinator that hear each other at once.
struct Cluster {
    now: u64,
    coordinator: Coordinator,
    nodes: Vec<Node>,
    token: u64,
    answers: BTreeMap<u64, (Answer, Vec<u8>)>,
    /// Nodes that nobody hears any more.
    dead: Vec<usize>,
    /// Nodes do not hear each other.
    cut: bool,
}

impl Cluster {
    fn new(copies: u8, nodes: usize, pages: u64) -> Cluster {
        let config = coordinator::Config { copies, alone: true, ..coordinator::Config::default() };
        let coordinator = Coordinator::new(config, 0, 1_000_000, 77);
        let mut cluster = Cluster {
            now: 0,
            coordinator,
            nodes: Vec::new(),
            token: 0,
            answers: BTreeMap::new(),
            dead: Vec::new(),
            cut: false,
        };
        for _ in 0..nodes {
            cluster.add(pages);
            cluster.pass(10_000);
        }
        cluster
    }

    fn add(&mut self, pages: u64) {
        let id = NodeId(self.nodes.len() as u64 + 1);
        let donation = Donation::create(pages).unwrap();
        self.nodes.push(Node::new(id, String::new(), donation, Config::default(), id.0 * 1000));
    }

    fn lives(&self, at: usize) -> bool {
        !self.dead.contains(&at)
    }

    /// Lets everything be said that is to be said.
    fn deliver(&mut self) {
        let mut said = true;
        while std::mem::take(&mut said) {
            for at in 0..self.nodes.len() {
                while let Some(output) = self.nodes[at].poll_output() {
                    said = true;
                    match output {
                        _ if !self.lives(at) => {}
                        Output::Answer { token, answer, body } => drop(self.answers.insert(token, (answer, body))),
                        Output::Coordinator { ticket, request } => {
                            let answer = self.coordinator.handle(self.now, request);
                            self.nodes[at].handle_coordinator(self.now, ticket, answer);
                        }
                        Output::Peer { ticket, request, body } => {
                            let to = self.nodes.iter().position(|node| node.incarnation() == Some(request.to));
                            if let Some(to) = to.filter(|to| self.lives(*to) && !self.cut) {
                                let answer = self.nodes[to].handle_peer(self.now, request, &body);
                                self.nodes[at].handle_peer_answer(self.now, ticket, answer);
                            }
                        }
                    }
                }
            }
        }
    }

    fn pass(&mut self, milliseconds: u64) {
        let end = self.now + milliseconds * MS;
        while self.now < end {
            self.now = (self.now + 10 * MS).min(end);
            self.coordinator.handle_timeout(self.now);
            for at in 0..self.nodes.len() {
                if self.lives(at) {
                    self.nodes[at].handle_timeout(self.now);
                }
            }
            self.deliver();
        }
    }

    fn ask_node(&mut self, at: usize, epoch: Epoch, ask: Ask, body: &[u8]) -> (Answer, Vec<u8>) {
        self.token += 1;
        let to = self.nodes[at].incarnation().unwrap_or(0);
        self.nodes[at].handle_request(self.now, self.token, Request { epoch, to, ask }, body);
        self.deliver();
        self.answers.remove(&self.token).unwrap_or((Answer::Refused(Refusal::InDoubt), Vec::new()))
    }

    /// The node that leads a name's bucket.
    fn leader(&self, name: &Name) -> usize {
        let leader = self.coordinator.map().leader(bucket_of(name)).unwrap().incarnation;
        self.nodes.iter().position(|node| node.incarnation() == Some(leader)).unwrap()
    }

    fn ask(&mut self, name: &str, ask: impl FnOnce(Name) -> Ask, body: &[u8]) -> (Answer, Vec<u8>) {
        let name = name_of(name);
        let (at, epoch) = (self.leader(&name), self.coordinator.map().epoch);
        self.ask_node(at, epoch, ask(name), body)
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> Answer {
        self.ask(name, |name| Ask::Put { name, lease_ns: LEASE, pinned: false, only_if: None }, bytes).0
    }

    fn get(&mut self, name: &str) -> Result<Vec<u8>, Refusal> {
        match self.ask(name, |name| Ask::Get { name, bytes: true, places: false }, &[]) {
            (Answer::Object { .. }, body) => Ok(body),
            (Answer::Refused(refusal), _) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    fn places(&mut self, name: &str) -> Vec<PageHandle> {
        match self.ask(name, |name| Ask::Get { name, bytes: false, places: true }, &[]).0 {
            Answer::Object { pages, .. } => pages,
            other => panic!("{other:?}"),
        }
    }

    fn remove(&mut self, name: &str) -> Answer {
        self.ask(name, |name| Ask::Remove { name, only_if: None }, &[]).0
    }

    fn view(&self, at: usize) -> View {
        let (fd, bytes) = self.nodes[at].donation().to_read().unwrap();
        View::new(PeerMemory::borrow(fd.as_fd(), bytes, u64::MAX).unwrap()).unwrap()
    }

    fn epoch(&self) -> Epoch {
        self.coordinator.map().epoch
    }
}

fn name_of(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn version(answer: Answer) -> Version {
    match answer {
        Answer::Stored { version } => version,
        other => panic!("{other:?}"),
    }
}

fn refused(answer: &Answer) -> &Refusal {
    match answer {
        Answer::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_object_is_put_got_and_removed() {
    let mut cluster = Cluster::new(1, 1, 100);
    let bytes: Vec<u8> = (0..10_000u32).map(|at| at as u8).collect();
    let first = version(cluster.put("a", &bytes));
    assert_eq!(cluster.get("a"), Ok(bytes));
    assert!(version(cluster.put("a", b"")) > first);
    assert_eq!(cluster.get("a"), Ok(vec![]));
    assert_eq!(cluster.remove("a"), Answer::Removed { existed: true });
    assert_eq!(cluster.get("a"), Err(Refusal::NotFound { lost: None }));
    assert_eq!(cluster.remove("a"), Answer::Removed { existed: false });
    assert_eq!(cluster.nodes[0].figures().free_pages, 100);
}

#[test]
fn a_reader_with_handles_sees_the_whole_old_object_or_that_it_is_freed() {
    let mut cluster = Cluster::new(1, 1, 100);
    cluster.put("a", &[1; 2 * PAGE_BYTES]);
    let (pages, view, now) = (cluster.places("a"), cluster.view(0), cluster.now);
    let mut found = [0; PAGE_BYTES];
    for page in &pages {
        assert_eq!((view.read(*page, 0, &mut found, || now), found), (Read::Done, [1; PAGE_BYTES]));
    }
    cluster.put("a", &[2; 2 * PAGE_BYTES]);
    assert!(pages.iter().all(|page| view.read(*page, 0, &mut found, || now) == Read::Freed));
    let pages = cluster.places("a");
    assert_eq!((view.read(pages[1], 0, &mut found, || now), found), (Read::Done, [2; PAGE_BYTES]));
    // Stopped, it cannot say any more that it is in charge.
    assert_eq!(view.read(pages[1], 0, &mut found, || now + 10_000 * MS), Read::Lapsed);
}

#[test]
fn what_is_expected_decides_whether_a_change_is_made() {
    let mut cluster = Cluster::new(1, 1, 100);
    let put = |cluster: &mut Cluster, only_if| {
        let ask = |name| Ask::Put { name, lease_ns: LEASE, pinned: false, only_if };
        cluster.ask("a", ask, b"x").0
    };
    let first = version(put(&mut cluster, Some(Expect::Absent)));
    assert_eq!(refused(&put(&mut cluster, Some(Expect::Absent))), &Refusal::Unexpected { found: Some(first) });
    let second = version(put(&mut cluster, Some(Expect::Version(first))));
    let remove = |name| Ask::Remove { name, only_if: Some(Expect::Version(first)) };
    assert_eq!(refused(&cluster.ask("a", remove, &[]).0), &Refusal::Unexpected { found: Some(second) });
    assert_eq!(cluster.nodes[0].figures().object_pages, 1, "what was refused has no pages");
}

#[test]
fn leases_end_and_are_renewed() {
    let mut cluster = Cluster::new(1, 1, 100);
    for name in ["a", "b", "c"] {
        cluster.put(name, b"x");
    }
    cluster.pass(50_000);
    let renewed = cluster.ask("b", |name| Ask::Renew { name, lease_ns: LEASE }, &[]).0;
    assert_eq!(renewed, Answer::Renewed);
    cluster.pass(9_999);
    assert!(cluster.get("a").is_ok());
    cluster.now += MS;
    assert_eq!(cluster.get("a"), Err(Refusal::Expired { ago_ns: 0 }));
    assert_eq!(cluster.get("a"), Err(Refusal::NotFound { lost: None }));
    cluster.pass(2_000);
    let Figures { objects, expired, .. } = cluster.nodes[0].figures();
    assert_eq!((objects, expired), (1, 2), "the third was swept");
    assert!(cluster.get("b").is_ok());
    let short = cluster.ask("b", |name| Ask::Renew { name, lease_ns: 1 }, &[]).0;
    assert!(matches!(refused(&short), Refusal::BadLease { asked_ns: 1, .. }));
}

#[test]
fn the_least_recently_used_object_goes_when_memory_is_short() {
    let mut cluster = Cluster::new(1, 1, 4);
    cluster.ask("pinned", |name| Ask::Put { name, lease_ns: LEASE, pinned: true, only_if: None }, b"x");
    for name in ["a", "b", "c"] {
        cluster.put(name, b"x");
    }
    cluster.get("a").unwrap();
    let names = vec![name_of("b"), name_of("unknown")];
    assert_eq!(cluster.ask("b", |_| Ask::Used { names }, &[]).0, Answer::Done);
    version(cluster.put("d", b"x"));
    assert_eq!(cluster.get("c"), Err(Refusal::NotFound { lost: None }));
    version(cluster.put("e", &[0; 3 * PAGE_BYTES]));
    assert!(cluster.get("a").is_err() && cluster.get("b").is_err() && cluster.get("d").is_err());
    assert!(cluster.get("pinned").is_ok());
    let full = Refusal::Full { asked: 4, free: 0, pages: 4, pinned: 1, paged: 0 };
    assert_eq!(refused(&cluster.put("f", &[0; 4 * PAGE_BYTES])), &full);
    assert!(cluster.get("e").is_ok(), "nothing goes for what would not fit all the same");
    assert_eq!(cluster.nodes[0].figures().aged, 4);
}

#[test]
fn a_machine_with_less_memory_than_was_donated_ages_objects_and_then_refuses() {
    let mut cluster = Cluster::new(1, 1, 100);
    cluster.nodes[0].limit_memory(32);
    let pinned = |name| Ask::Put { name, lease_ns: LEASE, pinned: true, only_if: None };
    version(cluster.put("a", &[1; 16 * PAGE_BYTES]));
    version(cluster.ask("pinned", pinned, &[2; 16 * PAGE_BYTES]).0);
    version(cluster.put("b", &[3; 16 * PAGE_BYTES]));
    assert!(cluster.get("a").is_err(), "its pages have memory");
    assert_eq!(refused(&cluster.put("c", &[4; 17 * PAGE_BYTES])), &Refusal::NoMemory { asked: 17 });
    assert!(cluster.get("pinned").is_ok());
    // What is free is given back after a while.
    cluster.remove("pinned");
    cluster.nodes[0].config.keep_blocks = 0;
    cluster.pass(2_000);
    assert_eq!(cluster.nodes[0].donation().populated(), 0);
}

#[test]
fn limits_are_kept() {
    let mut cluster = Cluster::new(1, 1, 10);
    cluster.nodes[0].config = Config { objects_max: 2, object_bytes_max: 5000, ..Config::default() };
    assert_eq!(refused(&cluster.put("a", &[0; 5001])), &Refusal::TooLarge { bytes: 5001, most: 5000 });
    version(cluster.put("a", b"x"));
    version(cluster.put("b", b"x"));
    assert_eq!(refused(&cluster.put("c", b"x")), &Refusal::TooMany { most: 2 });
    version(cluster.put("a", b"y"));
    assert!(Name::new(&"n".repeat(256)).is_err() && Name::new("").is_err());
}

#[test]
fn names_of_a_bucket_are_listed_in_order() {
    let mut cluster = Cluster::new(1, 1, 100);
    let bucket = bucket_of(&name_of("a"));
    let mut names: Vec<_> =
        (0..).map(|at| format!("n{at}")).filter(|name| bucket_of(&name_of(name)) == bucket).take(5).collect();
    names.sort();
    for name in &names {
        version(cluster.put(name, b"x"));
    }
    let epoch = cluster.epoch();
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        match cluster.ask_node(0, epoch, Ask::List { bucket, after: after.clone(), most: 2 }, &[]).0 {
            Answer::Listed { objects, more } => {
                found.extend(objects.iter().map(|(name, _)| name.as_str().to_owned()));
                after = objects.last().map(|(name, _)| name.clone());
                if !more {
                    break;
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(found, names);
}

#[test]
fn pages_of_a_paged_region_never_age_and_end_with_their_owner() {
    let mut cluster = Cluster::new(1, 1, 4);
    let epoch = cluster.epoch();
    cluster.put("a", b"x");
    let take = |turn| Ask::TakePages { owner: 5, count: 3, lease_ns: LEASE, turn };
    let Answer::Pages { pages } = cluster.ask_node(0, epoch, take(1), &[]).0 else { panic!() };
    assert_eq!(cluster.ask_node(0, epoch, take(1), &[]).0, Answer::Pages { pages: pages.clone() });
    let full = Refusal::Full { asked: 3, free: 0, pages: 4, pinned: 0, paged: 3 };
    assert_eq!(refused(&cluster.ask_node(0, epoch, take(2), &[]).0), &full);
    let write = |version| Ask::WritePage { owner: 5, page: pages[0], at: 10, version };
    assert_eq!(cluster.ask_node(0, epoch, write(0), b"hello").0, Answer::Written { version: 1 });
    let late = cluster.ask_node(0, epoch, write(0), b"older").0;
    assert_eq!(refused(&late), &Refusal::PageVersion { found: 1, expected: 0 });
    let other = Ask::WritePage { owner: 6, page: pages[0], at: 0, version: 1 };
    assert_eq!(refused(&cluster.ask_node(0, epoch, other, b"x").0), &Refusal::NoOwner { owner: 6 });
    let read = Ask::ReadPage { page: pages[0], at: 10, length: 5 };
    assert_eq!(cluster.ask_node(0, epoch, read.clone(), &[]), (Answer::Page { version: 1 }, b"hello".to_vec()));
    let beyond = Ask::ReadPage { page: pages[0], at: 4090, length: 7 };
    assert!(matches!(refused(&cluster.ask_node(0, epoch, beyond, &[]).0), Refusal::OutOfPage { .. }));
    // The object ages, the pages do not.
    version(cluster.put("b", b"y"));
    assert!(cluster.get("a").is_err());
    let free = Ask::FreePages { owner: 5, pages: pages[1..2].to_vec() };
    assert_eq!(cluster.ask_node(0, epoch, free, &[]).0, Answer::Done);
    cluster.pass(30_000);
    let renew = Ask::RenewOwner { owner: 5, lease_ns: LEASE };
    assert_eq!(cluster.ask_node(0, epoch, renew.clone(), &[]).0, Answer::Renewed);
    cluster.pass(LEASE / MS + 2000);
    assert_eq!(cluster.nodes[0].figures().paged_pages, 0);
    assert_eq!(refused(&cluster.ask_node(0, epoch, renew, &[]).0), &Refusal::NoOwner { owner: 5 });
    assert_eq!(refused(&cluster.ask_node(0, epoch, read, &[]).0), &Refusal::NoPage { page: pages[0] });
}

#[test]
fn other_epochs_and_other_lives_are_refused() {
    let mut cluster = Cluster::new(1, 1, 10);
    let (mine, get) = (cluster.epoch(), Ask::Get { name: name_of("a"), bytes: true, places: false });
    let old = cluster.ask_node(0, Epoch(mine.0 - 1), get.clone(), &[]).0;
    assert_eq!(refused(&old), &Refusal::OldEpoch { yours: Epoch(mine.0 - 1), mine });
    let new = cluster.ask_node(0, Epoch(mine.0 + 1), get.clone(), &[]).0;
    assert_eq!(refused(&new), &Refusal::NodeBehind { yours: Epoch(mine.0 + 1), mine });
    let request = Request { epoch: mine, to: 99, ask: get };
    cluster.nodes[0].handle_request(cluster.now, 1000, request, &[]);
    cluster.deliver();
    assert_eq!(refused(&cluster.answers[&1000].0), &Refusal::Gone { node: NodeId(1), incarnation: 99 });
}

#[test]
fn content_moves_to_a_node_that_comes_and_back_when_it_leaves() {
    for copies in [1, 2] {
        let mut cluster = Cluster::new(copies, 1, 1000);
        let names: Vec<_> = (0..200).map(|at| format!("object {at}")).collect();
        for name in &names {
            version(cluster.put(name, name.as_bytes()));
        }
        for nodes in 2..=3 {
            cluster.add(1000);
            cluster.pass(10_000);
            assert_eq!(cluster.coordinator.map().nodes.len(), nodes);
            for name in &names {
                assert_eq!(cluster.get(name), Ok(name.as_bytes().to_vec()), "{copies} copies on {nodes} nodes");
            }
            let objects: u64 = cluster.nodes.iter().map(|node| node.figures().objects).sum();
            assert_eq!(objects, 200 * u64::from(copies));
            assert!(cluster.nodes[nodes - 1].figures().objects > 30);
        }
        cluster.nodes[1].leave(cluster.now);
        cluster.pass(10_000);
        assert!(cluster.nodes[1].has_left());
        for name in &names {
            assert_eq!(cluster.get(name), Ok(name.as_bytes().to_vec()), "after one left");
        }
        assert_eq!(cluster.nodes[1].figures().objects, 0);
    }
}

#[test]
fn a_former_leaders_handles_are_worthless_before_the_next_one_answers() {
    let mut cluster = Cluster::new(2, 1, 1000);
    let names: Vec<_> = (0..50).map(|at| format!("object {at}")).collect();
    for name in &names {
        version(cluster.put(name, b"x"));
    }
    let places: Vec<_> = names.iter().map(|name| cluster.places(name)[0]).collect();
    let view = cluster.view(0);
    cluster.add(1000);
    cluster.pass(10_000);
    let now = cluster.now;
    let mut moved = 0;
    for (name, place) in names.iter().zip(places) {
        let stays = cluster.leader(&name_of(name)) == 0;
        let read = view.read(place, 0, &mut [0], || now);
        assert_eq!(read, if stays { Read::Done } else { Read::Freed });
        moved += usize::from(!stays);
    }
    assert!(moved > 10);
}

#[test]
fn what_was_on_a_lost_node_is_said_to_be_lost() {
    let mut cluster = Cluster::new(1, 3, 1000);
    let names: Vec<_> = (0..100).map(|at| format!("object {at}")).collect();
    for name in &names {
        version(cluster.put(name, name.as_bytes()));
    }
    let led: Vec<_> = names.iter().map(|name| cluster.leader(&name_of(name))).collect();
    cluster.dead.push(1);
    cluster.pass(10_000);
    let mut lost = 0;
    for (name, leader) in names.iter().zip(led) {
        match cluster.get(name) {
            Ok(bytes) => assert_eq!((bytes, leader == 1), (name.as_bytes().to_vec(), false)),
            Err(Refusal::NotFound { lost: Some(Loss { node: NodeId(2), .. }) }) => {
                assert_eq!(leader, 1);
                lost += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(lost > 15);
    // It notices too.
    let now = cluster.now;
    cluster.nodes[1].handle_timeout(now);
    assert_eq!((cluster.nodes[1].incarnation(), cluster.nodes[1].figures().objects), (None, 0));
    // It comes back, empty.
    cluster.dead.clear();
    cluster.pass(20_000);
    assert_eq!(cluster.coordinator.map().nodes.len(), 3);
}

#[test]
fn with_two_copies_one_lost_node_loses_nothing() {
    for dead in 0..3 {
        let mut cluster = Cluster::new(2, 3, 1000);
        let names: Vec<_> = (0..100).map(|at| format!("object {at}")).collect();
        for name in &names {
            version(cluster.put(name, name.as_bytes()));
        }
        names[..20].iter().for_each(|name| drop(cluster.remove(name)));
        cluster.dead.push(dead);
        cluster.pass(10_000);
        for name in &names[20..] {
            assert_eq!(cluster.get(name), Ok(name.as_bytes().to_vec()));
        }
        for name in &names[..20] {
            assert_eq!(cluster.get(name), Err(Refusal::NotFound { lost: None }));
        }
        // And another one, since the copies were made again.
        cluster.dead.push((dead + 1) % 3);
        cluster.pass(10_000);
        for name in &names[20..] {
            assert_eq!(cluster.get(name), Ok(name.as_bytes().to_vec()));
        }
    }
}

#[test]
fn a_follower_that_cannot_be_reached_does_not_hold_up_changes_for_long() {
    let mut cluster = Cluster::new(2, 2, 100);
    let name = (0..).map(|at| format!("n{at}")).find(|name| cluster.leader(&name_of(name)) == 0).unwrap();
    version(cluster.put(&name, b"first"));
    cluster.cut = true;
    assert_eq!(refused(&cluster.put(&name, b"second")), &Refusal::InDoubt, "nobody answered yet");
    let token = cluster.token;
    cluster.pass(4_000);
    assert!(matches!(cluster.answers.remove(&token), Some((Answer::Stored { .. }, _))));
    assert_eq!(cluster.coordinator.map().nodes.len(), 2, "both are still there");
    version(cluster.put(&name, b"third"));
    cluster.cut = false;
    cluster.pass(4_000);
    assert!(cluster.coordinator.is_quiet());
    cluster.dead.push(0);
    cluster.pass(10_000);
    assert_eq!(cluster.get(&name), Ok(b"third".to_vec()));
}

#[test]
fn a_put_waits_for_a_node_with_room_and_is_refused_when_none_has() {
    let mut cluster = Cluster::new(1, 2, 10);
    let epoch = cluster.epoch();
    let take = |count, turn| Ask::TakePages { owner: 1, count, lease_ns: LEASE, turn };
    assert!(matches!(cluster.ask_node(0, epoch, take(9, 1), &[]).0, Answer::Pages { .. }));
    let led = |cluster: &Cluster, name: &String| cluster.leader(&name_of(name)) == 0;
    let names = (0..).map(|at| format!("n{at}")).filter(|name| led(&cluster, name)).take(3).collect::<Vec<_>>();
    version(cluster.put(&names[0], b"small"));
    let two = [1; 2 * PAGE_BYTES];
    let bucket = bucket_of(&name_of(&names[1]));
    assert_eq!(refused(&cluster.put(&names[1], &two)), &Refusal::Arriving { bucket });
    cluster.pass(3_000);
    assert_eq!(cluster.leader(&name_of(&names[1])), 1);
    version(cluster.put(&names[1], &two));
    // Those without content came along, the one with content did not.
    assert_eq!((cluster.leader(&name_of(&names[2])), cluster.leader(&name_of(&names[0]))), (1, 0));
    assert_eq!(cluster.get(&names[0]), Ok(b"small".to_vec()));
    assert_eq!(cluster.get(&names[1]), Ok(two.to_vec()));
    // No node has so much: that is known as soon as the coordinator was asked, and not for ever.
    let nine = [2; 11 * PAGE_BYTES];
    let name = &names[0];
    assert!(matches!(refused(&cluster.put(name, &nine)), Refusal::Arriving { .. }));
    assert!(matches!(refused(&cluster.put(name, &nine)), Refusal::Full { .. }));
    let before = cluster.epoch();
    cluster.pass(2_000);
    assert_eq!(cluster.epoch(), before, "nothing moves for it");
    assert!(matches!(refused(&cluster.put(name, &two)), Refusal::Arriving { .. }));
    cluster.pass(3_000);
    version(cluster.put(name, &two));
    assert_eq!(cluster.nodes[1].figures().objects, 2);
}

#[test]
fn what_is_in_a_bucket_stays_where_it_is_if_the_node_that_had_room_for_it_has_none_any_more() {
    for copies in [1, 2] {
        let mut cluster = Cluster::new(copies, usize::from(copies) + 1, 10);
        let take = |count, turn| Ask::TakePages { owner: 1, count, lease_ns: LEASE, turn };
        let name = (0..).map(|at| format!("n{at}")).find(|name| cluster.leader(&name_of(name)) == 0).unwrap();
        let pinned = |name| Ask::Put { name, lease_ns: LEASE, pinned: true, only_if: None };
        let four = [4; 4 * PAGE_BYTES];
        version(cluster.ask(&name, pinned, &four).0);
        let epoch = cluster.epoch();
        assert!(matches!(cluster.ask_node(0, epoch, take(6, 1), &[]).0, Answer::Pages { .. }));
        cluster.pass(2_000);
        let two = [2; 2 * PAGE_BYTES];
        let (answer, _) = cluster.ask(&name, pinned, &two);
        assert!(matches!(refused(&answer), Refusal::Arriving { .. }));
        // The coordinator knows of much room at the others, which is taken before the content is there.
        for at in 1..cluster.nodes.len() {
            let free = cluster.nodes[at].figures().free_pages;
            let epoch = cluster.epoch();
            assert!(matches!(cluster.ask_node(at, epoch, take(free, 2), &[]).0, Answer::Pages { .. }));
        }
        cluster.pass(10_000);
        assert_eq!(cluster.get(&name), Ok(four.to_vec()), "{copies} copies");
        assert_eq!(cluster.leader(&name_of(&name)), 0);
    }
}

#[test]
fn a_second_node_without_room_refuses_for_both() {
    let mut cluster = Cluster::new(2, 2, 10);
    let owner = |cluster: &mut Cluster, at: usize, count| {
        let epoch = cluster.epoch();
        cluster.ask_node(at, epoch, Ask::TakePages { owner: 1, count, lease_ns: LEASE, turn: 1 }, &[]).0
    };
    assert!(matches!(owner(&mut cluster, 1, 10), Answer::Pages { .. }));
    let name = (0..).map(|at| format!("n{at}")).find(|name| cluster.leader(&name_of(name)) == 0).unwrap();
    assert_eq!(refused(&cluster.put(&name, b"x")), &Refusal::SecondFull);
    assert_eq!(cluster.get(&name), Err(Refusal::NotFound { lost: None }));
    assert_eq!(cluster.nodes[0].figures().free_pages, 10);
}

#[test]
fn what_has_no_room_at_a_node_that_comes_stays_where_it_is() {
    let mut cluster = Cluster::new(1, 1, 1000);
    let pinned = |name| Ask::Put { name, lease_ns: LEASE, pinned: true, only_if: None };
    let names: Vec<_> = (0..100).map(|at| format!("object {at}")).collect();
    for name in &names {
        version(cluster.ask(name, pinned, b"x").0);
    }
    cluster.add(10);
    cluster.pass(10_000);
    let found = names.iter().filter(|name| cluster.get(name).is_ok()).count() as u64;
    let figures = [0, 1].map(|at| cluster.nodes[at].figures());
    assert_eq!((found, figures[0].objects + figures[1].objects), (100, 100));
    assert!((1..=10).contains(&figures[1].objects), "{} objects moved", figures[1].objects);
    assert!(figures[1].dropped > 20, "those that were tried");
}

#[test]
fn a_node_empties_itself_when_a_new_coordinator_does_not_know_it() {
    let mut cluster = Cluster::new(1, 2, 100);
    cluster.put("a", b"x");
    let before: Vec<_> = cluster.nodes.iter().map(|node| node.incarnation()).collect();
    let config = coordinator::Config::default();
    cluster.coordinator = Coordinator::new(config, cluster.now, 2_000_000, 78);
    cluster.pass(2_000);
    assert!(cluster.nodes.iter().all(|node| node.incarnation().is_none() && node.figures().objects == 0));
    assert!(cluster.coordinator.map().nodes.is_empty(), "it waits for leases that it knows nothing of");
    cluster.pass(20_000);
    let after: Vec<_> = cluster.nodes.iter().map(|node| node.incarnation()).collect();
    assert!(after.iter().all(Option::is_some) && after.iter().all(|life| !before.contains(life)));
    assert_eq!(cluster.get("a"), Err(Refusal::NotFound { lost: None }));
}

#[test]
fn a_leaving_node_gives_out_no_pages() {
    let mut cluster = Cluster::new(1, 1, 100);
    cluster.nodes[0].leaving = true;
    let epoch = cluster.epoch();
    let take = Ask::TakePages { owner: 5, count: 3, lease_ns: LEASE, turn: 1 };
    assert_eq!(refused(&cluster.ask_node(0, epoch, take, &[]).0), &Refusal::Leaving);
}

/// Three nodes that all have a bucket, and messages that a test lets through or not.
struct Trio {
    nodes: Vec<Node>,
    epoch: u64,
}

impl Trio {
    const LIVES: [u64; 3] = [11, 12, 13];

    /// The first leads, and the others follow with everything.
    fn new() -> Trio {
        let nodes = (0..3u64).map(|at| {
            let donation = Donation::create(100).unwrap();
            let mut node = Node::new(NodeId(at), String::new(), donation, Config::default(), at);
            node.handle_timeout(0);
            let Some(Output::Coordinator { ticket, .. }) = node.poll_output() else { panic!() };
            let (incarnation, map) = (Trio::LIVES[at as usize], Trio::map(1, &[0, 1, 2], 1));
            node.handle_coordinator(0, ticket, CoordinatorAnswer::Joined { incarnation, lease_ns: LEASE, map });
            node
        });
        let mut trio = Trio { nodes: nodes.collect(), epoch: 1 };
        trio.deliver(|_| true);
        trio
    }

    fn map(epoch: u64, owners: &[usize], led_since: u64) -> Map {
        let mut map = Map::empty(1, Epoch(epoch), 2, 1);
        let member = |at: usize| crate::map::Member {
            node: NodeId(at as u64),
            incarnation: Trio::LIVES[at],
            address: String::new(),
            leaving: false,
        };
        let owner = |at: usize| crate::map::Owner { incarnation: Trio::LIVES[at], since: Epoch(1), full: true };
        map.nodes = owners.iter().map(|at| member(*at)).collect();
        map.buckets[0].owners = owners.iter().map(|at| owner(*at)).collect();
        map.buckets[0].led_since = Epoch(led_since);
        map
    }

    /// The first of these leads from now on; who is not among them is lost.
    fn lead(&mut self, owners: &[usize]) {
        self.epoch += 1;
        for at in owners {
            self.nodes[*at].adopt(0, Trio::map(self.epoch, owners, self.epoch));
        }
    }

    /// Delivers what nodes say to each other, if it may pass; returns answers to clients.
    fn deliver(&mut self, passes: impl Fn(&PeerRequest) -> bool) -> Vec<(Answer, Vec<u8>)> {
        let mut answers = Vec::new();
        while let Some((at, output)) = (0..3).find_map(|at| self.nodes[at].poll_output().map(|output| (at, output))) {
            match output {
                Output::Peer { ticket, request, body } if passes(&request) => {
                    let to = Trio::LIVES.iter().position(|life| *life == request.to).unwrap();
                    let answer = self.nodes[to].handle_peer(0, request, &body);
                    self.nodes[at].handle_peer_answer(0, ticket, answer);
                }
                Output::Answer { answer, body, .. } => answers.push((answer, body)),
                Output::Peer { .. } | Output::Coordinator { .. } => {}
            }
        }
        answers
    }

    fn ask(&mut self, at: usize, ask: Ask, body: &[u8]) {
        let request = Request { epoch: Epoch(self.epoch), to: Trio::LIVES[at], ask };
        self.nodes[at].handle_request(0, 1, request, body);
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.ask(at, Ask::Put { name: name_of("k"), lease_ns: LEASE, pinned: false, only_if: None }, bytes);
    }

    fn get(&mut self, at: usize) -> Vec<u8> {
        self.deliver(|_| true);
        self.ask(at, Ask::Get { name: name_of("k"), bytes: true, places: false }, &[]);
        let answers = self.deliver(|_| true);
        assert!(matches!(answers[..], [(Answer::Object { .. }, _)]), "{answers:?}");
        answers[0].1.clone()
    }

    /// A change that the second node made and the third did not, when the first was lost.
    fn with_a_change_in_doubt() -> Trio {
        let mut trio = Trio::new();
        trio.put(0, b"first");
        assert!(matches!(trio.deliver(|_| true)[..], [(Answer::Stored { .. }, _)]));
        trio.put(0, b"second");
        assert_eq!(trio.deliver(|request| request.to == Trio::LIVES[1]), []);
        trio
    }
}

#[test]
fn a_change_in_doubt_that_was_seen_is_not_undone_by_the_next_leader() {
    let mut trio = Trio::with_a_change_in_doubt();
    trio.lead(&[1, 2]);
    // Before the third agrees, nobody is told anything.
    trio.ask(1, Ask::Get { name: name_of("k"), bytes: true, places: false }, &[]);
    let answers = trio.deliver(|_| false);
    assert_eq!(refused(&answers[0].0), &Refusal::Arriving { bucket: 0 });
    trio.nodes[1].handle_timeout(Config::default().retry_ns);
    assert_eq!(trio.get(1), b"second");
    trio.lead(&[2]);
    assert_eq!(trio.get(2), b"second");
}

#[test]
fn a_change_in_doubt_that_the_new_leader_has_not_made_is_undone_on_its_followers() {
    let mut trio = Trio::with_a_change_in_doubt();
    trio.lead(&[2, 1]);
    assert_eq!(trio.get(2), b"first");
    trio.lead(&[1]);
    assert_eq!(trio.get(1), b"first");
}

#[test]
fn a_follower_refuses_a_leader_of_an_old_map_and_steps_out_of_turn() {
    use crate::request::{Change, PeerAnswer, PeerAsk, PeerRefusal, Session};
    let mut trio = Trio::new();
    let session = Session { led_since: Epoch(1), since: Epoch(1) };
    let step = |step, from| PeerRequest {
        epoch: Epoch(1),
        from,
        to: Trio::LIVES[1],
        bucket: 0,
        ask: PeerAsk::Step { session, step, change: Change::Drop { name: name_of("k") } },
    };
    let refused = |refusal| PeerAnswer::Refused(refusal);
    let node = &mut trio.nodes[1];
    assert_eq!(node.handle_peer(0, step(2, 11), &[]), refused(PeerRefusal::OutOfStep));
    assert_eq!(node.handle_peer(0, step(1, 13), &[]), refused(PeerRefusal::NotOwner));
    assert_eq!(node.handle_peer(0, step(1, 11), &[]), PeerAnswer::Stepped);
    assert_eq!(node.handle_peer(0, step(1, 11), &[]), PeerAnswer::Stepped, "it is made once and answered twice");
    let other = PeerRequest { bucket: 1, ..step(1, 11) };
    assert_eq!(node.handle_peer(0, other, &[]), refused(PeerRefusal::NotOwner));
    let other = PeerRequest { to: 99, ..step(1, 11) };
    assert_eq!(node.handle_peer(0, other, &[]), refused(PeerRefusal::Gone));
    trio.lead(&[1, 2]);
    let (yours, mine) = (Epoch(1), Epoch(2));
    assert_eq!(trio.nodes[1].handle_peer(0, step(2, 11), &[]), refused(PeerRefusal::OldEpoch { yours, mine }));
}
