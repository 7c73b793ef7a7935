//! `kill -9` of either side in the middle of calls: every call has an outcome, and none ran twice.

use crate::support::service::{AWAIT_GATE, ECHO};
use crate::support::{
    Actor, PATIENCE, Stage, Transport, World, block_on, buffer, open_descriptors, until, within_patience,
};
use highwire_rpc::{
    CallError, Client, ClientOptions, Lost, Manner, Method, Reply, Request, Serve, ServerOptions, Services,
};
use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

const DIARY: u32 = 0xd1a4;
const WRITE: Method = Method { service: DIARY, version: 1, method: 1 };
const WRITE_ON_POOL: Method = Method { service: DIARY, version: 1, method: 2 };

/// Writes down every call that runs, where it outlives the process.
struct Diary(File);

impl Serve for Diary {
    fn manner(&self, method: u16) -> Option<Manner> {
        Some(Manner { is_quick: method == WRITE.method, may_repeat: false })
    }

    fn serve(&self, request: Request<'_>, reply: &mut Reply) {
        let number: u64 = request.decode().expect("a number");
        // One write, which is there whole or not at all.
        (&self.0).write_all(&number.to_le_bytes()).expect("an entry");
        reply.encode(&number);
    }
}

fn diary(stage: &Stage) -> PathBuf {
    stage.runtime_dir().with_file_name("diary")
}

/// How often each call ran.
fn entries(stage: &Stage) -> HashMap<u64, usize> {
    let mut counts = HashMap::new();
    for entry in std::fs::read(diary(stage)).unwrap_or_default().chunks_exact(8) {
        *counts.entry(u64::from_le_bytes(entry.try_into().expect("8 bytes"))).or_insert(0) += 1;
    }
    counts
}

/// A process that serves at an address, as it was told: `transport address`.
fn serve_as_told(stage: &Stage) {
    let argument = stage.argument();
    let (transport, address) = argument.split_once(' ').expect("a transport and an address");
    let world = World { transport: Transport::named(transport), stage };
    let file = File::options().create(true).append(true).open(diary(stage)).expect("a diary");
    let rpc = world.rpc();
    let mut server = None;
    // The one before may still be on its way out.
    until("a place to listen", || {
        let services = Services::new().with(DIARY, 1, Diary(file.try_clone().expect("a diary")));
        server = rpc.serve(address, services).ok();
        server.is_some()
    });
    stage.mark(&format!("serves-{}", std::process::id()));
    std::thread::sleep(Duration::from_secs(1000));
}

/// An address at which one server can follow another.
fn lasting_address(world: &World<'_>) -> String {
    match world.transport {
        Transport::Shared => world.address(),
        Transport::Sealed | Transport::Plain => {
            let port = std::net::UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port");
            format!("udp:{port}")
        }
    }
}

fn start_server(world: &World<'_>, address: &str) -> Actor {
    let actor = world.stage.start_with("server", &format!("{:?} {address}", world.transport));
    world.stage.await_mark(&format!("serves-{}", actor.pid()));
    actor
}

fn call(client: &Client, number: u64) -> Result<(), CallError> {
    let arguments = postcard::to_allocvec(&number).expect("arguments");
    let made = client.call(if number.is_multiple_of(3) { WRITE_ON_POOL } else { WRITE }).arguments(&arguments);
    let outcome = match number % 2 {
        0 => made.wait(),
        _ => block_on(made.start()),
    };
    let answer = outcome.map_err(|failed| failed.error)?;
    assert_eq!(postcard::from_bytes::<u64>(&answer.body), Ok(number), "the answer to another call");
    Ok(())
}

#[test]
fn a_server_killed_in_the_middle_of_a_thousand_calls_leaves_none_without_outcome() {
    let stage = Stage::open();
    stage.role("server", serve_as_told);
    for transport in Transport::BOTH {
        let world = World { transport, stage: &stage };
        let _ = std::fs::remove_file(diary(&stage));
        let address = lasting_address(&world);
        let mut server = start_server(&world, &address);
        let options = ClientOptions { reconnect_for: Duration::from_millis(300), ..ClientOptions::default() };
        let options = ClientOptions { connect_timeout: Duration::from_millis(1500), ..options };
        let client = world.client_with(&address, options);
        call(&client, 0).unwrap();
        let killer = std::thread::spawn({
            let stage_diary = diary(&stage);
            move || {
                until("calls that ran", || std::fs::metadata(&stage_diary).is_ok_and(|diary| diary.len() > 8 * 200));
                server.kill();
                server
            }
        });
        // Threads of which each makes the next call when it has the outcome of the one before, for as long as there
        // are calls to be made; after the server's death each costs the time that is tried to find it again.
        let outcomes = within_patience("a thousand calls", {
            let client = client.clone();
            move || {
                let threads: Vec<_> = (0..8u64)
                    .map(|thread| {
                        let client = client.clone();
                        std::thread::spawn(move || {
                            let mut outcomes = Vec::new();
                            for number in (1..=1000u64).filter(|number| number % 8 == thread) {
                                let outcome = call(&client, number);
                                let ended = outcome.is_err();
                                outcomes.push((number, outcome));
                                if ended {
                                    break;
                                }
                            }
                            outcomes
                        })
                    })
                    .collect();
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            }
        });
        drop(killer.join().unwrap());
        let ran = entries(&stage);
        assert!(ran.values().all(|count| *count == 1), "{transport:?}: a call ran twice");
        for (number, outcome) in &outcomes {
            match outcome {
                Ok(()) => assert!(ran.contains_key(number), "{transport:?}: call {number} was answered"),
                Err(CallError::NotSent(_)) => assert!(!ran.contains_key(number), "call {number} was not sent"),
                Err(CallError::OutcomeUnknown(_)) => {}
                Err(other) => panic!("{transport:?}: call {number}: {other}"),
            }
        }
        assert!(outcomes.iter().any(|(_, outcome)| outcome.is_err()), "{transport:?}: the server was killed");
        assert_eq!(client.outstanding(), 0);
    }
}

#[test]
fn a_server_that_is_started_again_answers_the_next_calls_and_none_of_before() {
    let stage = Stage::open();
    stage.role("server", serve_as_told);
    for transport in Transport::BOTH {
        let world = World { transport, stage: &stage };
        let _ = std::fs::remove_file(diary(&stage));
        let address = lasting_address(&world);
        let mut server = start_server(&world, &address);
        let options =
            ClientOptions { reconnect_for: PATIENCE, connect_timeout: PATIENCE / 4, ..ClientOptions::default() };
        let client = world.client_with(&address, options);
        let mut unknown = 0;
        for round in 0..3u64 {
            // Some are answered, some on their way, and none is sent when the server is gone.
            let first = round * 1000;
            let pending: Vec<_> = (first..first + 200)
                .map(|number| {
                    let arguments = postcard::to_allocvec(&number).unwrap();
                    client.call(WRITE_ON_POOL).arguments(&arguments).start()
                })
                .collect();
            server.kill();
            let again = start_server(&world, &address);
            drop(std::mem::replace(&mut server, again));
            let waiting = move || pending.into_iter().map(block_on).collect::<Vec<_>>();
            for (number, outcome) in (first..).zip(within_patience("the calls of before", waiting)) {
                match outcome.map_err(|failed| failed.error) {
                    Ok(answer) => assert_eq!(postcard::from_bytes::<u64>(&answer.body), Ok(number)),
                    Err(CallError::OutcomeUnknown(lost)) if *lost == Lost::ServerForgot => unknown += 1,
                    Err(other) => panic!("{transport:?}: call {number}: {other}"),
                }
            }
            for number in first + 500..first + 520 {
                call(&client, number).unwrap();
            }
        }
        eprintln!("{transport:?}: {unknown} of 600 calls have an unknown outcome");
        assert!(entries(&stage).values().all(|count| *count == 1), "{transport:?}: a call ran twice");
        for number in [500, 1519, 2519] {
            assert_eq!(entries(&stage).get(&number), Some(&1));
        }
    }
}

#[test]
fn a_client_that_is_killed_leaves_nothing_behind() {
    let stage = Stage::open();
    stage.role("client", |stage| {
        let argument = stage.argument();
        let (transport, address) = argument.split_once(' ').expect("a transport and an address");
        let client = World { transport: Transport::named(transport), stage }.client(address);
        let nic = client.rpc().nic().clone();
        // One that runs, some that wait, and payloads on their way.
        let _held: Vec<_> = (0..20)
            .map(|_| client.call(AWAIT_GATE).payload(buffer(&nic, 200_000)).into(buffer(&nic, 1000)).start())
            .collect();
        client.call(ECHO).wait().expect("an answer");
        stage.mark(&format!("called-{}", std::process::id()));
        loop {
            client.poll();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    for transport in Transport::BOTH {
        let world = World { transport, stage: &stage };
        let options = ServerOptions { keep_sessions: Duration::from_millis(100), ..ServerOptions::default() };
        let served = world.serve_with(ServerOptions { workers: 2, sessions_max: 2, ..options });
        let other = world.client(&served.address);
        other.call(ECHO).wait().unwrap();
        let before = open_descriptors();
        for _ in 0..2 {
            let begun = served.service.begun();
            let mut client = stage.start_with("client", &format!("{transport:?} {}", served.address));
            stage.await_mark(&format!("called-{}", client.pid()));
            until("calls of the client", || served.service.begun() > begun);
            client.kill();
            client.status();
            let survivor = other.clone();
            within_patience("the other client", move || {
                (0..20).for_each(|_| drop(survivor.call(ECHO).wait().unwrap()))
            });
            served.service.gate.open();
            // With two sessions at most, there is room for another only when that of the dead is forgotten.
            let mut newcomer = None;
            until("a session for another", || {
                newcomer = world.rpc().connect(&served.address).ok();
                newcomer.is_some()
            });
            newcomer.unwrap().call(ECHO).wait().unwrap();
            served.service.gate.close();
            // The newcomer is gone too, and its session with it.
            let mut last = None;
            until("that the newcomer is forgotten", || {
                last = world.rpc().connect(&served.address).ok();
                last.is_some()
            });
            drop(last);
            std::thread::sleep(Duration::from_millis(500));
        }
        until("descriptors that are closed", || open_descriptors() <= before + 4);
        other.call(ECHO).wait().unwrap();
    }
}
