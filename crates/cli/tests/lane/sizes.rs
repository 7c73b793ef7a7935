//! Many connections: what they cost in memory, and in CPU while nobody speaks.

use crate::actor::{Actor, run};
use crate::compiled::compiled;
use crate::ground::{Ground, Way, is_root};
use crate::scenario::Scenario;
use std::process::Command;
use std::time::Duration;

#[test]
fn a_thousand_connections_cost_less_than_256_mib() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "many", "thousand");
    let plain = scenario.play(Way::Plain, Way::Plain);

    let before = shared_memory();
    let (server, mut command) = scenario.roles(Way::Highwire, Way::Highwire);
    let mut client = Actor::start("thousand client", &mut command);
    client.told("hold");
    let used = shared_memory().saturating_sub(before);
    client.end_input();
    let spoken: Vec<String> = client.ended_well().into_iter().filter(|line| !line.starts_with("hold ")).collect();
    assert_eq!(spoken, plain.client);
    let spoken: Vec<String> = server.ended_well().into_iter().filter(|line| !line.starts_with("port ")).collect();
    assert_eq!(spoken, plain.server);
    println!("1,000 connections: {} KiB of shared memory", used / 1024);
    assert!(used < 256 << 20, "1,000 connections take {used} bytes of shared memory");
}

#[test]
fn fifty_connections_that_rest_use_no_cpu() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "many", "resting");
    let (mut server, mut command) = scenario.roles(Way::Highwire, Way::Highwire);
    let mut client = Actor::start("resting client", &mut command);
    server.told("hold");
    client.told("hold");
    // Whoever spins before it sleeps has done so by then.
    std::thread::sleep(Duration::from_millis(300));
    let before = [cpu_ns(server.id()), cpu_ns(client.id())];
    std::thread::sleep(REST);
    let used = [cpu_ns(server.id()) - before[0], cpu_ns(client.id()) - before[1]].map(Duration::from_nanos);
    client.end_input();
    client.ended_well();
    server.ended_well();
    for (who, used) in ["the server, in epoll_wait,", "the client, with a thread in recv for each,"].iter().zip(used) {
        assert!(used < REST_CPU_MAX, "{who} used {used:?} of CPU in {REST:?}, at most {REST_CPU_MAX:?} are allowed");
    }
}

#[test]
fn hundreds_of_connections_while_dev_shm_is_full() {
    if !is_root("a /dev/shm that is full") {
        return;
    }
    let ground = Ground::new();
    let mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm || exit";
    // The program fills it itself; or it is full before the program starts.
    let full = "head -c 1M /dev/zero 2> /dev/null > /dev/shm/before";
    for (way, before) in [(Way::Plain, ":"), (Way::Plain, full), (Way::Highwire, ":"), (Way::Highwire, full)] {
        let program = ground.command(way, compiled("many"));
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &format!("{mount}; {before}; exec \"$@\""), "sh"]);
        command.arg(program.get_program()).args(program.get_args()).args(["crowded", "server", "0"]);
        let ended = run("crowded", command.env("HIGHWIRE_RUNTIME_DIR", ground.path().join("run")));
        assert_eq!(ended.well("crowded").last().map(String::as_str), Some("300 connections"), "{way:?} {before}");
    }
}

#[test]
fn two_ends_on_one_cpu_talk_by_the_lane_and_rest_without_cpu() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "many", "one_cpu");
    scenario.play(Way::Plain, Way::Plain);
    let (mut server, mut command) = scenario.roles(Way::Highwire, Way::Highwire);
    let mut client = Actor::start("one_cpu client", &mut command);
    let bytes: u64 = server.told("rests").parse().unwrap();
    client.told("hold");
    let moved = ground.lane_bytes(server.id());
    std::thread::sleep(Duration::from_millis(300));
    let before = cpu_ns(server.id());
    std::thread::sleep(Duration::from_secs(1));
    let used = Duration::from_nanos(cpu_ns(server.id()) - before);
    client.end_input();
    client.ended_well();
    server.ended_well();
    assert!(moved > Some(bytes / 2), "{moved:?} of {bytes} bytes went by the lane");
    assert!(used < REST_CPU_MAX, "who waits in recv used {used:?} of CPU in a second");
}

/// All shared memory of this machine, in bytes.
fn shared_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("Shmem:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// The time for which threads of a process have run, in nanoseconds: the scheduler counts finer than ticks.
fn cpu_ns(process: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("schedstat")).ok())
        .map(|text| text.split(' ').next().unwrap().parse::<u64>().unwrap())
        .sum()
}

const REST: Duration = Duration::from_secs(3);
const REST_CPU_MAX: Duration = Duration::from_millis(20);
