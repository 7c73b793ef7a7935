use super::*;
use crate::map::{BUCKETS, Member, Owner};
use crate::types::Version;

const MS: u64 = 1_000_000;

fn map(epoch: u64, nodes: &[u64]) -> Map {
    let mut map = Map::empty(5, Epoch(epoch), 1, BUCKETS);
    for node in nodes {
        map.nodes.push(Member {
            node: NodeId(*node),
            incarnation: node + 100,
            address: format!("at {node}"),
            leaving: false,
        });
    }
    for bucket in &mut map.buckets {
        bucket.owners = nodes
            .first()
            .map(|node| Owner { incarnation: node + 100, since: Epoch(1), full: true })
            .into_iter()
            .collect();
    }
    map
}

fn client() -> Client {
    let mut client = Client::new(Config::default(), 1);
    client.handle_map(map(10, &[1, 2]));
    client
}

fn get() -> Ask {
    Ask::Get { name: Name::new("a").unwrap(), bytes: true, places: false }
}

fn put() -> Ask {
    Ask::Put { name: Name::new("a").unwrap(), lease_ns: 1, pinned: false, only_if: None }
}

fn page() -> PageHandle {
    PageHandle { incarnation: 102, index: 3, generation: 4 }
}

fn is_sent(step: &Step, to: Incarnation) -> bool {
    matches!(step, Step::Send { request, .. } if request.to == to)
}

#[test]
fn a_client_without_a_map_fetches_one_first() {
    let mut client = Client::new(Config::default(), 1);
    let mut operation = client.begin(0, get(), None, 1000 * MS);
    assert_eq!(client.next(0, &mut operation), Step::Fetch { have: None });
    client.handle_map(map(10, &[1, 2]));
    assert!(is_sent(&client.next(MS, &mut operation), 101));
    // One that is not newer is not taken.
    client.handle_map(map(9, &[2]));
    assert_eq!(client.map().unwrap().epoch, Epoch(10));
    // One of another coordinator is.
    client.handle_map(Map { lineage: 6, ..map(3, &[2]) });
    assert_eq!(client.map().unwrap().epoch, Epoch(3));
}

#[test]
fn an_old_map_is_fetched_again_at_once() {
    let mut client = client();
    let mut operation = client.begin(0, put(), None, 1000 * MS);
    assert!(is_sent(&client.next(0, &mut operation), 101));
    let old = Answer::Refused(Refusal::OldEpoch { yours: Epoch(10), mine: Epoch(11) });
    let step = client.handle_answer(0, &mut operation, old);
    assert_eq!(step, Step::Fetch { have: Some((5, Epoch(10))) });
    client.handle_map(map(11, &[2]));
    assert!(is_sent(&client.next(0, &mut operation), 102));
    let stored = Answer::Stored { version: Version { led_since: Epoch(1), count: 1 } };
    assert_eq!(client.handle_answer(0, &mut operation, stored.clone()), Step::Done(Ok(stored)));
}

#[test]
fn what_will_be_right_soon_is_asked_again_after_growing_waits() {
    let mut client = client();
    let mut operation = client.begin(0, put(), None, 1000 * MS);
    let (mut now, mut waits) = (0, Vec::new());
    let mut step = client.next(now, &mut operation);
    loop {
        step = match step {
            Step::Send { .. } => {
                client.handle_answer(now, &mut operation, Answer::Refused(Refusal::Arriving { bucket: 3 }))
            }
            Step::Wait { until } => {
                waits.push(until - now);
                now = until;
                client.next(now, &mut operation)
            }
            other => {
                step = other;
                break;
            }
        };
    }
    assert!(matches!(step, Step::Done(Err(Failed::TimedOut { last: Some(Refusal::Arriving { .. }), .. }))), "{step:?}");
    assert!(waits[0] < 2 * MS && (10..40).contains(&waits.len()), "{waits:?}");
    assert!(waits.iter().all(|wait| *wait <= 100 * MS));
}

#[test]
fn a_change_without_an_answer_is_in_doubt_and_a_question_is_asked_again() {
    let mut client = client();
    let mut operation = client.begin(0, put(), None, 1000 * MS);
    client.next(0, &mut operation);
    let step = client.handle_failure(0, &mut operation, Failure::NoAnswer);
    assert_eq!(step, Step::Done(Err(Failed::InDoubt)));
    let mut operation = client.begin(0, put(), None, 1000 * MS);
    client.next(0, &mut operation);
    let step = client.handle_failure(0, &mut operation, Failure::NotSent);
    assert!(matches!(step, Step::Wait { .. }), "{step:?}");
    let mut operation = client.begin(0, get(), None, 1000 * MS);
    client.next(0, &mut operation);
    let step = client.handle_failure(0, &mut operation, Failure::NoAnswer);
    assert!(matches!(step, Step::Wait { .. }), "{step:?}");
    assert!(matches!(client.next(MS, &mut operation), Step::Fetch { .. }));
    assert!(is_sent(&client.next(MS, &mut operation), 101));
}

#[test]
fn a_page_that_was_written_by_an_attempt_without_an_answer_is_written() {
    let mut client = client();
    let write = Ask::WritePage { owner: 1, page: page(), at: 0, version: 7 };
    let mut operation = client.begin(0, write, None, 1000 * MS);
    assert!(is_sent(&client.next(0, &mut operation), 102));
    let written = Answer::Refused(Refusal::PageVersion { found: 8, expected: 7 });
    let mut other = operation.clone();
    client.handle_failure(0, &mut operation, Failure::NoAnswer);
    let step = client.handle_answer(MS, &mut operation, written.clone());
    assert_eq!(step, Step::Done(Ok(Answer::Written { version: 8 })));
    let step = client.handle_answer(MS, &mut other, written);
    assert!(matches!(step, Step::Done(Err(Failed::Refused(Refusal::PageVersion { .. })))));
}

#[test]
fn a_page_of_a_node_that_is_not_there_any_more_is_gone() {
    let mut client = client();
    let read = Ask::ReadPage { page: page(), at: 0, length: 1 };
    let mut operation = client.begin(0, read, None, 1000 * MS);
    assert!(is_sent(&client.next(0, &mut operation), 102));
    client.handle_map(map(11, &[1]));
    client.handle_failure(0, &mut operation, Failure::NotSent);
    assert!(matches!(client.next(MS, &mut operation), Step::Fetch { .. }));
    let gone = Failed::Gone { node: Some(NodeId(2)), incarnation: 102 };
    assert_eq!(client.next(MS, &mut operation), Step::Done(Err(gone)));
}

#[test]
fn places_are_remembered_until_the_lease_ends_or_a_read_fails() {
    let mut client = client();
    let stat = Stat { version: Version { led_since: Epoch(1), count: 1 }, length: 1, lease_left_ns: 50, pinned: false };
    let name = |number: u32| Name::new(&format!("n{number}")).unwrap();
    client.remember(100, name(1), stat, vec![page()]);
    client.remember(100, name(2), stat, vec![page()]);
    assert!(client.places(149, &name(1)).is_some());
    assert!(client.places(150, &name(1)).is_none());
    assert!(client.places(149, &name(2)).is_some() && client.places(149, &name(3)).is_none());
    assert_eq!(client.after_read(&name(2), Read::Done, 1), Next::Use);
    assert_eq!(client.after_read(&name(2), Read::Busy, 1), Next::Again);
    assert_eq!(client.after_read(&name(2), Read::Changed, 3), Next::Call);
    assert!(client.places(149, &name(2)).is_some());
    assert_eq!(client.after_read(&name(2), Read::Freed, 1), Next::Call);
    assert!(client.places(149, &name(2)).is_none());
    assert_eq!(client.take_uses(), vec![(101, Ask::Used { names: vec![name(1), name(2)] })]);
    assert_eq!(client.take_uses(), vec![]);
    client.config.places_max = 2;
    (10..20).for_each(|number| client.remember(100, name(number), stat, vec![]));
    assert_eq!(client.places.len(), 2);
    assert!(client.order.len() <= 4);
}
