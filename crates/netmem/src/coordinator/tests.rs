use super::*;

const MS: u64 = 1_000_000;
const LEASE: u64 = 3_000 * MS;

fn coordinator(copies: u8) -> Coordinator {
    Coordinator::new(Config { copies, alone: true, ..Config::default() }, 0, 1000, 42)
}

fn ask_to_join(coordinator: &mut Coordinator, now: u64, node: u64, nonce: u64) -> CoordinatorAnswer {
    let join = CoordinatorRequest::Join { node: NodeId(node), address: format!("at {node}"), nonce, known: Epoch(0) };
    coordinator.handle(now, join)
}

fn join(coordinator: &mut Coordinator, now: u64, node: u64) -> Incarnation {
    match ask_to_join(coordinator, now, node, node) {
        CoordinatorAnswer::Joined { incarnation, .. } => incarnation,
        other => panic!("{other:?}"),
    }
}

fn renewal(incarnation: Incarnation, epoch: Epoch, settled: bool, leaving: bool) -> CoordinatorRequest {
    let (stuck, short, crowded) = (Vec::new(), Vec::new(), Vec::new());
    CoordinatorRequest::Renew { incarnation, epoch, settled, leaving, stuck, room: 0, short, crowded }
}

fn renew(coordinator: &mut Coordinator, now: u64, incarnation: Incarnation, settled: bool) -> CoordinatorAnswer {
    let epoch = coordinator.map().epoch;
    coordinator.handle(now, renewal(incarnation, epoch, settled, false))
}

/// Everybody reports that all is done, until nothing changes any more. Returns how many maps that took.
fn settle(coordinator: &mut Coordinator, now: u64, nodes: &[Incarnation]) -> usize {
    for maps in 0.. {
        let before = coordinator.map().epoch;
        for node in nodes {
            renew(coordinator, now, *node, true);
        }
        coordinator.map().check().unwrap();
        if coordinator.map().epoch == before {
            assert!(coordinator.is_quiet());
            return maps;
        }
    }
    unreachable!()
}

fn wait(answer: CoordinatorAnswer) -> u64 {
    match answer {
        CoordinatorAnswer::Wait { nanoseconds } => nanoseconds,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_new_coordinator_waits_until_no_earlier_lease_can_last() {
    let mut coordinator = Coordinator::new(Config::default(), 500, 1000, 42);
    assert_eq!(wait(ask_to_join(&mut coordinator, 500, 1, 1)), 3_300 * MS);
    assert_eq!(wait(ask_to_join(&mut coordinator, 500 + 3_299 * MS, 1, 1)), MS);
    join(&mut coordinator, 500 + 3_300 * MS, 1);
}

#[test]
fn epochs_begin_at_the_real_time_and_above_all_that_were_seen() {
    let mut coordinator = coordinator(1);
    let (known, lost) = (Epoch(5000), Some((9, Epoch(7000))));
    let join = CoordinatorRequest::Join { node: NodeId(1), address: String::new(), nonce: 1, known };
    assert!(coordinator.map().epoch >= Epoch(1000));
    coordinator.handle(0, CoordinatorRequest::Map { have: lost });
    coordinator.handle(0, join);
    assert_eq!(coordinator.map().epoch, Epoch(7001));
    let mut other = Coordinator::new(Config { alone: true, ..Config::default() }, 0, 1000, 43);
    assert_ne!(join_any(&mut other), coordinator.map().nodes[0].incarnation);
    assert_ne!(other.map().lineage, coordinator.map().lineage);
}

fn join_any(coordinator: &mut Coordinator) -> Incarnation {
    join(coordinator, 0, 1)
}

#[test]
fn a_join_whose_answer_was_lost_is_answered_again() {
    let mut coordinator = coordinator(1);
    let first = ask_to_join(&mut coordinator, 0, 1, 7);
    assert_eq!(ask_to_join(&mut coordinator, MS, 1, 7), first);
    // Another process of the same node waits until the first cannot be there any more.
    assert_eq!(wait(ask_to_join(&mut coordinator, MS, 1, 8)), 3_300 * MS);
    let later = MS + 3_300 * MS;
    assert!(matches!(ask_to_join(&mut coordinator, later, 1, 8), CoordinatorAnswer::Joined { .. }));
}

#[test]
fn one_node_comes_at_a_time() {
    let mut coordinator = coordinator(1);
    let first = join(&mut coordinator, 0, 1);
    wait(ask_to_join(&mut coordinator, 0, 2, 2));
    settle(&mut coordinator, 0, &[first]);
    let second = join(&mut coordinator, 0, 2);
    // The new node follows where it should lead; the old one leads all.
    let follows = |owners: &[Owner]| owners.len() == 2 && owners[0].incarnation == first && !owners[1].full;
    let moving = coordinator.map().buckets.iter().filter(|bucket| follows(&bucket.owners)).count();
    assert!((400..624).contains(&moving), "{moving}");
    renew(&mut coordinator, 0, first, true);
    renew(&mut coordinator, 0, second, false);
    assert!(coordinator.map().buckets.iter().all(|bucket| bucket.owners[0].incarnation == first));
    renew(&mut coordinator, 0, second, true);
    let led = coordinator.map().buckets.iter().filter(|bucket| bucket.owners[0].incarnation == second);
    let led: Vec<_> = led.collect();
    assert_eq!(led.len(), moving);
    assert!(led.iter().all(|bucket| bucket.from == Some(first) && bucket.owners.len() == 1));
    wait(ask_to_join(&mut coordinator, 0, 3, 3));
    settle(&mut coordinator, 0, &[first, second]);
    join(&mut coordinator, 0, 3);
    assert!(coordinator.map().buckets.iter().all(|bucket| bucket.from.is_none()));
}

#[test]
fn a_node_that_does_not_renew_is_lost_with_what_it_had() {
    let mut coordinator = coordinator(1);
    let first = join(&mut coordinator, 0, 1);
    settle(&mut coordinator, 0, &[first]);
    let second = join(&mut coordinator, 0, 2);
    settle(&mut coordinator, 0, &[first, second]);
    let had: Vec<_> = coordinator.map().buckets.iter().map(|bucket| bucket.owners[0].incarnation == second).collect();
    renew(&mut coordinator, 2_000 * MS, first, true);
    let end = LEASE + 300 * MS;
    coordinator.handle_timeout(end - 1);
    assert_eq!(coordinator.map().nodes.len(), 2);
    assert_eq!(coordinator.next_timeout(), Some(end));
    coordinator.handle_timeout(end);
    let epoch = coordinator.map().epoch;
    for (bucket, had) in coordinator.map().buckets.iter().zip(had) {
        assert_eq!(bucket.loss, had.then_some(Loss { node: NodeId(2), epoch }));
        assert_eq!(bucket.owners[0].incarnation, first);
    }
    assert_eq!(renew(&mut coordinator, end, second, true), CoordinatorAnswer::Unknown);
}

#[test]
fn nodes_that_are_lost_at_once_do_not_inherit_from_each_other() {
    let mut coordinator = coordinator(1);
    let mut nodes = Vec::new();
    for node in 1..=4 {
        nodes.push(join(&mut coordinator, 0, node));
        settle(&mut coordinator, 0, &nodes);
    }
    let before = coordinator.map().clone();
    renew(&mut coordinator, 2_000 * MS, nodes[0], true);
    coordinator.handle_timeout(LEASE + 300 * MS);
    coordinator.map().check().unwrap();
    for (old, new) in before.buckets.iter().zip(&coordinator.map().buckets) {
        let leader = before.member(old.owners[0].incarnation).unwrap().node;
        assert_eq!(new.loss.map(|loss| loss.node), Some(leader).filter(|leader| *leader != NodeId(1)));
        assert_eq!(new.owners[0].incarnation, nodes[0]);
    }
}

#[test]
fn with_two_copies_the_node_that_has_everything_leads_next() {
    let mut coordinator = coordinator(2);
    let mut nodes = Vec::new();
    for node in 1..=3 {
        nodes.push(join(&mut coordinator, 0, node));
        settle(&mut coordinator, 0, &nodes);
    }
    let before = coordinator.map().clone();
    assert!(
        before.buckets.iter().all(|bucket| bucket.owners.len() == 2 && bucket.owners.iter().all(|owner| owner.full))
    );
    nodes[..2].iter().for_each(|node| drop(renew(&mut coordinator, 2_000 * MS, *node, true)));
    coordinator.handle_timeout(LEASE + 300 * MS);
    let epoch = coordinator.map().epoch;
    for (old, new) in before.buckets.iter().zip(&coordinator.map().buckets) {
        assert_eq!((new.loss, new.owners.len()), (None, 2));
        let left: Vec<_> = old.owners.iter().filter(|owner| owner.incarnation != nodes[2]).collect();
        assert_eq!(new.owners[0], *left[0]);
        assert_eq!(new.led_since == epoch, old.owners[0].incarnation == nodes[2]);
        // Whoever follows now and did not before has nothing.
        assert_eq!(new.owners[1].full, left.len() == 2);
    }
}

#[test]
fn a_former_leader_that_may_not_know_it_is_waited_for_even_if_its_successor_is_lost() {
    let mut coordinator = coordinator(1);
    let first = join(&mut coordinator, 0, 1);
    settle(&mut coordinator, 0, &[first]);
    let second = join(&mut coordinator, 0, 2);
    renew(&mut coordinator, 0, first, true);
    renew(&mut coordinator, 0, second, true);
    let passed: Vec<_> = coordinator.map().buckets.iter().map(|bucket| bucket.from.is_some()).collect();
    assert!(passed.contains(&true));
    // A third node, as if it had come before: it gets what the second had.
    let third = coordinator.new_incarnation();
    coordinator.nodes.push(Node { nonce: 0, incarnation: third, ends: u64::MAX, settled: Epoch(0), room: 0 });
    let member = Member { node: NodeId(3), incarnation: third, address: String::new(), leaving: false };
    coordinator.map.nodes.push(member);
    coordinator.state(first).unwrap().ends = u64::MAX;
    coordinator.handle_timeout(LEASE + 300 * MS);
    let mut to_third = 0;
    for (bucket, passed) in coordinator.map().buckets.iter().zip(passed) {
        let leader = bucket.owners[0].incarnation;
        assert_eq!(bucket.from, (passed && leader == third).then_some(first));
        to_third += usize::from(bucket.from.is_some());
    }
    assert!(to_third > 100);
}

#[test]
fn followers_without_everything_begin_again_when_the_leader_is_lost() {
    let mut coordinator = coordinator(2);
    let mut nodes = Vec::new();
    for node in 1..=2 {
        nodes.push(join(&mut coordinator, 0, node));
        settle(&mut coordinator, 0, &nodes);
    }
    nodes.push(join(&mut coordinator, 0, 3));
    let before = coordinator.map().clone();
    nodes[1..].iter().for_each(|node| drop(renew(&mut coordinator, 2_000 * MS, *node, false)));
    coordinator.handle_timeout(LEASE + 300 * MS);
    let epoch = coordinator.map().epoch;
    let mut again = 0;
    for (old, new) in before.buckets.iter().zip(&coordinator.map().buckets) {
        assert_eq!((new.owners[0].incarnation, new.loss), (nodes[1], None), "it had everything");
        let follower = new.owners.iter().find(|owner| owner.incarnation == nodes[2]).unwrap();
        let partial = old.owners.len() == 3;
        let led_by_the_lost = old.owners[0].incarnation == nodes[0];
        if partial && led_by_the_lost {
            assert_eq!((follower.since, follower.full), (epoch, false));
            again += 1;
        } else if partial {
            assert_eq!(follower.since, before.epoch);
        }
    }
    assert!(again > 100);
}

#[test]
fn a_node_leaves_when_others_have_what_it_had() {
    let mut coordinator = coordinator(1);
    let first = join(&mut coordinator, 0, 1);
    settle(&mut coordinator, 0, &[first]);
    let second = join(&mut coordinator, 0, 2);
    settle(&mut coordinator, 0, &[first, second]);
    let leave = |coordinator: &mut Coordinator| {
        let epoch = coordinator.map().epoch;
        coordinator.handle(0, renewal(second, epoch, true, true))
    };
    let mut asked = 0;
    while leave(&mut coordinator) != CoordinatorAnswer::Left {
        assert!(coordinator.map().nodes.iter().any(|member| member.leaving));
        wait(ask_to_join(&mut coordinator, 0, 3, 3));
        renew(&mut coordinator, 0, first, true);
        asked += 1;
        assert!(asked < 10);
    }
    assert!(coordinator.map().buckets.iter().all(|bucket| bucket.owners.len() == 1 && bucket.loss.is_none()));
    assert_eq!(leave(&mut coordinator), CoordinatorAnswer::Left, "asked again, it says so again");
}

#[test]
fn who_leaves_last_is_waited_for_until_its_lease_ends() {
    let mut coordinator = coordinator(1);
    let first = join(&mut coordinator, 0, 1);
    settle(&mut coordinator, 0, &[first]);
    let mut now = 0;
    let mut leave = |coordinator: &mut Coordinator| {
        now += MS;
        let epoch = coordinator.map().epoch;
        let renew = renewal(first, epoch, true, true);
        coordinator.handle(now, renew)
    };
    let asked = (1..10).find(|_| leave(&mut coordinator) == CoordinatorAnswer::Left).unwrap();
    let end = (asked - 1) * MS + LEASE + 300 * MS;
    // It may not have heard, and answer still.
    wait(ask_to_join(&mut coordinator, end - 1, 2, 2));
    join(&mut coordinator, end, 2);
    let lost = |bucket: &crate::map::Bucket| bucket.loss.is_some_and(|loss| loss.node == NodeId(1));
    assert!(coordinator.map().buckets.iter().all(lost));
}

#[test]
fn when_the_last_node_is_lost_nobody_has_anything() {
    let mut coordinator = coordinator(1);
    let first = join(&mut coordinator, 0, 1);
    settle(&mut coordinator, 0, &[first]);
    coordinator.handle_timeout(LEASE + 300 * MS);
    assert!(coordinator.map().nodes.is_empty());
    assert!(coordinator.map().buckets.iter().all(|bucket| bucket.owners.is_empty() && bucket.loss.is_some()));
}

#[test]
fn a_bucket_without_room_goes_to_the_node_that_has_the_most_and_on_when_that_leaves() {
    for copies in [1, 2] {
        let mut coordinator = coordinator(copies);
        let mut nodes = Vec::new();
        for node in 1..=4 {
            nodes.push(join(&mut coordinator, 0, node));
            settle(&mut coordinator, 0, &nodes);
        }
        let report = |coordinator: &mut Coordinator, at: usize, room, leaving, short| {
            let (incarnation, epoch, stuck) = (nodes[at], coordinator.map().epoch, Vec::new());
            let (settled, crowded) = (true, Vec::new());
            let renew = CoordinatorRequest::Renew { incarnation, epoch, settled, leaving, stuck, room, short, crowded };
            coordinator.handle(0, renew)
        };
        let rooms = [0, 50, 100, 70];
        let settle = |coordinator: &mut Coordinator, nodes: &[usize]| {
            for _ in 0..10 {
                nodes.iter().for_each(|at| drop(report(coordinator, *at, rooms[*at], false, Vec::new())));
            }
            assert!(coordinator.is_quiet());
        };
        settle(&mut coordinator, &[0, 1, 2, 3]);
        let owners = |coordinator: &Coordinator, bucket: u16| -> Vec<usize> {
            let owners = &coordinator.map().bucket(bucket).owners;
            owners.iter().map(|owner| nodes.iter().position(|node| *node == owner.incarnation).unwrap()).collect()
        };
        // Buckets that the first leads, with the second where there are two copies: one with content, one without.
        let led = |bucket: &u16| owners(&coordinator, *bucket)[..] == [0, 1][..usize::from(copies)];
        let [bucket, empty] = (0..BUCKETS).filter(led).take(2).collect::<Vec<_>>()[..] else { panic!() };
        let short = |bucket, pages| Shortage { bucket, at: nodes[0], pages };
        let before = coordinator.map().clone();
        // No node has so much, and then the others stay where they are.
        let answer = report(&mut coordinator, 0, 0, false, vec![short(bucket, 101), short(empty, 0)]);
        assert!(matches!(answer, CoordinatorAnswer::Renewed { map: None, full, .. } if full == [bucket]));
        // Not the affair of this node, or not of this bucket.
        let answer = report(&mut coordinator, 1, 50, false, vec![short(bucket, 10), short(BUCKETS, 10)]);
        assert!(matches!(answer, CoordinatorAnswer::Renewed { map: None, full, .. } if full.is_empty()));
        assert_eq!(*coordinator.map(), before);
        let answer = report(&mut coordinator, 0, 0, false, vec![short(bucket, 100), short(empty, 0)]);
        assert!(matches!(answer, CoordinatorAnswer::Renewed { map: Some(_), full, .. } if full.is_empty()));
        settle(&mut coordinator, &[0, 1, 2, 3]);
        assert_eq!(owners(&coordinator, bucket), &[2, 1][..usize::from(copies)]);
        // What was placed there counts before the node has said so.
        assert_eq!(owners(&coordinator, empty), &[3, 1][..usize::from(copies)]);
        let others = (0..BUCKETS).filter(|other| ![bucket, empty].contains(other));
        let same = |other: &u16| coordinator.map().bucket(*other).owners == before.bucket(*other).owners;
        assert!(others.clone().all(|other| same(&other)));
        // The one that leaves hands it to the one that has room, not to the one where the bucket would be by its number.
        for _ in 0..10 {
            let left = report(&mut coordinator, 2, 100, true, Vec::new()) == CoordinatorAnswer::Left;
            [0, 1, 3].iter().for_each(|at| drop(report(&mut coordinator, *at, rooms[*at], false, Vec::new())));
            if left {
                break;
            }
        }
        assert_eq!(coordinator.map().nodes.len(), 3);
        settle(&mut coordinator, &[0, 1, 3]);
        let mut now = owners(&coordinator, bucket);
        now.sort_unstable();
        assert_eq!(now, if copies == 1 { vec![3] } else { vec![1, 3] });
        assert_eq!(coordinator.placed(), 2);
    }
}

#[test]
fn there_is_a_limit_to_nodes() {
    let config = Config { nodes_max: 1, alone: true, ..Config::default() };
    let mut coordinator = Coordinator::new(config, 0, 1000, 42);
    let first = join(&mut coordinator, 0, 1);
    settle(&mut coordinator, 0, &[first]);
    assert_eq!(ask_to_join(&mut coordinator, 0, 2, 2), CoordinatorAnswer::TooMany { most: 1 });
}

#[test]
fn a_follower_that_does_not_answer_begins_again_and_a_successor_that_does_not_is_freed() {
    let mut coordinator = coordinator(2);
    let first = join(&mut coordinator, 0, 1);
    settle(&mut coordinator, 0, &[first]);
    let second = join(&mut coordinator, 0, 2);
    settle(&mut coordinator, 0, &[first, second]);
    let epoch = coordinator.map().epoch;
    let led = |coordinator: &Coordinator, by| {
        (0..BUCKETS).find(|number| coordinator.map().bucket(*number).owners[0].incarnation == by).unwrap()
    };
    let (mine, other) = (led(&coordinator, first), led(&coordinator, second));
    let complain = |coordinator: &mut Coordinator, epoch, stuck| {
        let renew = CoordinatorRequest::Renew {
            incarnation: first,
            epoch,
            settled: true,
            leaving: false,
            stuck,
            room: 0,
            short: Vec::new(),
            crowded: Vec::new(),
        };
        coordinator.handle(0, renew);
    };
    complain(&mut coordinator, epoch, vec![(other, second), (mine, first), (9999, second)]);
    complain(&mut coordinator, Epoch(epoch.0 - 1), vec![(mine, second)]);
    assert_eq!(coordinator.map().epoch, epoch, "nothing of this is its affair, or it is out of date");
    complain(&mut coordinator, epoch, vec![(mine, second)]);
    let next = coordinator.map().epoch;
    assert!(next > epoch);
    let follower = coordinator.map().bucket(mine).owners[1];
    assert_eq!((follower.since, follower.full), (next, false));
    assert!(coordinator.map().bucket(other).owners[1].full);
    // Between a map in which the lead passed on, and the next.
    coordinator.map.buckets[usize::from(other)].from = Some(first);
    complain(&mut coordinator, next, vec![(other, second)]);
    assert_eq!(coordinator.map().bucket(other).from, None);
}
