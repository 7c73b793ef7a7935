//! `kill -9` of one end in the middle of a transfer: the other one sees what TCP shows.

use crate::actor::Actor;
use crate::ground::{Ground, Way};
use crate::scenario::Scenario;
use std::time::Duration;

#[test]
fn what_a_killed_writer_had_written_arrives_and_then_the_end() {
    for (round, (server, client)) in rounds().enumerate() {
        let ground = Ground::new();
        let progress = ground.file("progress", vec![0; 4096]);
        let scenario = Scenario::new(&ground, "moving", "killed_writer").with(progress.to_str().unwrap());
        killed(&scenario, round, server, client, "everything that was written, then the end");
    }
}

#[test]
fn whoever_writes_to_a_killed_reader_hears_of_it() {
    for (round, (server, client)) in rounds().enumerate() {
        let ground = Ground::new();
        killed(&Scenario::new(&ground, "moving", "killed_reader"), round, server, client, "broken");
    }
}

#[test]
fn a_conversation_ends_with_a_killed_process() {
    for (round, (server, client)) in rounds().enumerate() {
        let ground = Ground::new();
        killed(&Scenario::new(&ground, "moving", "killed_talker"), round, server, client, "ended");
    }
}

/// Plainly once, to know that the test is right; then under Highwire, at several moments.
fn rounds() -> impl Iterator<Item = (Way, Way)> {
    [(Way::Plain, Way::Plain), (Way::Plain, Way::Highwire), (Way::Highwire, Way::Plain)]
        .into_iter()
        .chain(std::iter::repeat_n((Way::Highwire, Way::Highwire), 6))
}

/// The client is killed some time after it has begun; then the server says this.
fn killed(scenario: &Scenario<'_>, round: usize, server: Way, client: Way, says: &str) {
    let (serving, mut command) = scenario.roles(server, client);
    let mut victim = Actor::start("victim", &mut command);
    victim.told("now");
    // Another moment each time; what the process is about to do then is as random as it gets.
    std::thread::sleep(Duration::from_micros(500 + 7_300 * round as u64));
    victim.kill();
    let said = serving.ended_well();
    assert_eq!(said.last().map(String::as_str), Some(says), "round {round} ({server:?}, {client:?})");
}
