//! `kill -9` at any moment: the other side has an error soon, everything it had posted comes back,
//! and nothing is left behind but a listener's name.

use crate::support::forked::fork_that_sleeps;
use crate::support::seeded::Seeded;
use crate::support::{A_WHILE, Actor, Line, PATIENCE, Stage, buffer, open_descriptors, until};
use highwire_vi::{
    Background, Completion, ConnectError, Failure, ListenError, Message, Nic, Path, PayloadToken, PostError, Receive,
    Reliability, State, ViOptions, WaitError,
};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// What is asserted; what is promised, 100 ms, is printed beside what was measured.
const AT_MOST: Duration = Duration::from_secs(1);

/// Kills the actor, waits for the end and checks that it is noticed in time, with every posted
/// token coming back once.
fn kill_and_count(actor: &mut Actor, line: &mut Line, posted: &[u64]) -> Vec<Completion> {
    let start = Instant::now();
    actor.kill();
    let (failure, done) = line.end();
    let noticed = start.elapsed();
    eprintln!("the death was noticed after {noticed:?} (promised: 100 ms)");
    assert_eq!(failure, Failure::PeerDied);
    assert_eq!(line.vi.state(), State::Ended(Failure::PeerDied));
    assert!(noticed < AT_MOST, "noticed after {noticed:?}");
    let tokens: Vec<u64> = done.iter().map(|done| done.token).collect();
    let unique: BTreeSet<u64> = tokens.iter().copied().collect();
    assert_eq!(unique.len(), tokens.len(), "no descriptor completes twice: {tokens:?}");
    assert_eq!(unique, posted.iter().copied().collect(), "every descriptor completes");
    let refused = line.vi.post_send(Message::new(1)).unwrap_err();
    assert_eq!(refused.reason, PostError::NotConnected(Failure::PeerDied));
    done
}

/// Everything that can be outstanding, with a token each. The payload area is small, so that the
/// large message waits for room.
fn post_everything(nic: &Nic, line: &mut Line) -> Vec<u64> {
    for token in 10..20 {
        line.vi.post_recv(Receive::new(token).into(buffer(nic, 64))).unwrap();
        line.vi.expect(PayloadToken(token), Receive::new(10 + token).into(buffer(nic, 64))).unwrap();
    }
    line.vi.post_recv(Receive::new(30).in_place()).unwrap();
    line.vi.post_send(Message::new(31).payload(buffer(nic, 50))).unwrap();
    line.vi.post_send(Message::new(32).payload(buffer(nic, 5000)).by(Path::Referenced)).unwrap();
    line.vi.post_send(Message::new(33).payload(buffer(nic, 5000)).by(Path::Buffered)).unwrap();
    line.vi.post_send(Message::new(34).payload(buffer(nic, 1 << 20)).by(Path::Buffered)).unwrap();
    line.vi.post_send(Message::new(35).payload(buffer(nic, 50))).unwrap();
    (10..36).collect()
}

fn small_areas(stage: &Stage) -> Nic {
    stage.nic_with(|config| (config.payload_bytes_start, config.payload_bytes_max) = (64 << 10, 64 << 10))
}

/// The test's side: everything is posted, then the peer is killed as it plays `role`.
fn dies_while(role: impl FnOnce(&Stage, Line)) {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let line = Line::connect(&small_areas(stage), "shm:crash");
        role(stage, line);
    });
    let nic = small_areas(&stage);
    let listener = nic.listen("shm:crash").unwrap();
    let mut victim = stage.start("victim");
    let mut line = Line::accept_with(&listener, &ViOptions::new().reliability(Reliability::Reception));
    let posted = post_everything(&nic, &mut line);
    stage.await_mark("ready");
    let done = kill_and_count(&mut victim, &mut line, &posted);
    for done in done {
        let (token, failed) = (done.token, done.status == Err(Failure::PeerDied));
        assert!(failed || done.status.is_ok(), "{done:?}");
        assert!(failed || ![34, 35].contains(&token), "never sent in full: {done:?}");
        assert!(token == 30 || done.into_buffer().is_some(), "the buffer of {token} comes back");
    }
}

#[test]
fn a_peer_that_dies_spinning_is_noticed() {
    dies_while(|stage, mut line| {
        stage.mark("ready");
        loop {
            assert!(line.vi.poll().is_none());
        }
    });
}

#[test]
fn a_peer_that_dies_asleep_is_noticed() {
    dies_while(|stage, mut line| {
        stage.mark("ready");
        let _ = line.vi.wait(Duration::from_secs(1000));
    });
}

#[test]
fn a_peer_that_dies_stopped_is_noticed() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let _line = Line::connect(&stage.nic(), "shm:stopped");
        stage.mark("ready");
        std::thread::sleep(Duration::from_secs(1000));
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:stopped").unwrap();
    let mut victim = stage.start("victim");
    let mut line = Line::accept(&listener);
    stage.await_mark("ready");
    victim.freeze();
    line.vi.post_recv(Receive::new(3)).unwrap();
    assert!(matches!(line.vi.wait(A_WHILE), Err(WaitError::TimedOut(_))), "a stopped peer lives");
    kill_and_count(&mut victim, &mut line, &[3]);
}

#[test]
fn a_peer_that_dies_in_the_middle_of_receiving_is_noticed() {
    dies_while(|stage, mut line| {
        let nic = stage.nic();
        for (token, size) in [(0, 50), (1, 5000), (2, 5000), (3, 1 << 20)] {
            line.vi.post_recv(Receive::new(token).into(buffer(&nic, size))).unwrap();
        }
        (0..3).for_each(|_| drop(line.received()));
        // Some of the large one has come, and no more of it is taken.
        assert!(line.vi.poll().is_none());
        stage.mark("ready");
        std::thread::sleep(Duration::from_secs(1000));
    });
}

#[test]
fn a_peer_that_dies_in_the_middle_of_sending_is_noticed() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let nic = small_areas(stage);
        let mut line = Line::connect(&nic, "shm:mid-send");
        line.vi.post_send(Message::new(1).payload(buffer(&nic, 1 << 20)).by(Path::Buffered)).unwrap();
        stage.mark("ready");
        std::thread::sleep(Duration::from_secs(1000));
    });
    let nic = small_areas(&stage);
    let listener = nic.listen("shm:mid-send").unwrap();
    let mut victim = stage.start("victim");
    let mut line = Line::accept(&listener);
    stage.await_mark("ready");
    line.vi.post_recv(Receive::new(3).into(buffer(&nic, 1 << 20))).unwrap();
    line.vi.post_recv(Receive::new(4).into(buffer(&nic, 8))).unwrap();
    assert!(line.vi.poll().is_none(), "only a part of it has come");
    let done = kill_and_count(&mut victim, &mut line, &[3, 4]);
    assert!(done.iter().all(|done| done.status == Err(Failure::PeerDied) && done.length == 0));
}

#[test]
fn a_peer_that_dies_holding_payloads_gives_them_all_back() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let mut line = Line::connect(&stage.nic(), "shm:holding");
        let mut held = Vec::new();
        for token in 0..30 {
            line.vi.post_recv(Receive::new(token).in_place()).unwrap();
            held.push(line.received());
        }
        assert!(line.vi.poll().is_none());
        stage.mark("ready");
        std::thread::sleep(Duration::from_secs(1000));
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:holding").unwrap();
    let mut victim = stage.start("victim");
    let mut line = Line::accept(&listener);
    let pool = nic.pool(8192, 40).unwrap();
    for token in 0..40 {
        line.vi.post_send(Message::new(token).payload(pool.frame().unwrap()).by(Path::Referenced)).unwrap();
    }
    stage.await_mark("ready");
    assert_eq!(pool.free(), 0);
    let done = kill_and_count(&mut victim, &mut line, &(0..40).collect::<Vec<_>>());
    assert!(done.iter().all(|done| done.status == Err(Failure::PeerDied)));
    drop(done);
    assert_eq!(pool.free(), 40);
}

#[test]
fn a_peer_killed_at_any_moment_of_a_busy_exchange_is_noticed() {
    let exchange = |nic: &Nic, line: &mut Line, seeded: &mut Seeded, number: u64| {
        let size = *seeded.pick(&[8, 300, 30_000, 300_000]);
        let path = *seeded.pick(&[Path::Choose, Path::Buffered, Path::Referenced]);
        line.vi.post_recv(Receive::new(2 * number).into(buffer(nic, 300_000))).ok()?;
        line.vi.post_send(Message::new(2 * number + 1).payload(buffer(nic, size)).by(path)).ok()
    };
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:busy");
        stage.mark(&stage.argument());
        let mut seeded = Seeded::fresh();
        for number in 0.. {
            exchange(&nic, &mut line, &mut seeded, number).expect("the other side lives");
            while !line.vi.wait(PATIENCE).unwrap().token.is_multiple_of(2) {}
        }
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:busy").unwrap();
    let mut seeded = Seeded::fresh();
    for round in 0..12 {
        let mut victim = stage.start_with("victim", &format!("round-{round}"));
        let mut line = Line::accept(&listener);
        stage.await_mark(&format!("round-{round}"));
        let lifetime = Duration::from_micros(seeded.below(20_000) as u64);
        let start = Instant::now();
        let (mut posted, mut done) = (BTreeSet::new(), BTreeSet::new());
        let mut killed = None;
        for number in 0.. {
            if killed.is_none() && start.elapsed() > lifetime {
                victim.kill();
                killed = Some(Instant::now());
            }
            if exchange(&nic, &mut line, &mut seeded, number).is_some() {
                posted.extend([2 * number, 2 * number + 1]);
            }
            let ended = loop {
                match line.vi.wait(Duration::from_millis(5)) {
                    Ok(completion) => assert!(done.insert(completion.token), "{} completes twice", completion.token),
                    Err(WaitError::TimedOut(_)) => break false,
                    Err(WaitError::NotConnected(failure)) => {
                        assert_eq!(failure, Failure::PeerDied);
                        break true;
                    }
                    Err(error) => panic!("{error}"),
                }
                if done.len() > posted.len() / 2 {
                    break false;
                }
            };
            if ended {
                break;
            }
            let late = killed.map_or(Duration::ZERO, |killed: Instant| killed.elapsed());
            assert!(late < PATIENCE, "the death is not noticed after {late:?}");
        }
        // A receive may have been refused after its message was taken: only what was posted counts.
        assert!(posted.is_subset(&done), "lost: {:?}", posted.difference(&done).collect::<Vec<_>>());
    }
}

#[test]
fn a_death_is_noticed_though_a_forked_child_keeps_the_socket_open() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let _line = Line::connect(&stage.nic(), "shm:orphan");
        stage.mark(&format!("child-{}", fork_that_sleeps()));
        std::thread::sleep(Duration::from_secs(1000));
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:orphan").unwrap();
    let mut victim = stage.start("victim");
    let mut line = Line::accept(&listener);
    let child = stage.await_mark_after("child-");
    line.vi.post_recv(Receive::new(3)).unwrap();
    kill_and_count(&mut victim, &mut line, &[3]);
    assert!(std::path::Path::new("/proc").join(&child).exists(), "the child is still there, and so is the socket");
    let child = rustix::process::Pid::from_raw(child.parse().unwrap()).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn the_death_of_one_peer_does_not_disturb_another() {
    let stage = Stage::open();
    stage.role("honest", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:one");
        loop {
            line.vi.post_recv(Receive::new(0).into(buffer(&nic, 64))).unwrap();
            if line.next(highwire_vi::Operation::Receive).status.is_err() {
                return;
            }
            line.vi.send_bytes(0, b"pong").unwrap();
            line.sent();
        }
    });
    stage.role("mortal", |stage| {
        let mut line = Line::connect(&stage.nic(), "shm:other");
        let _ = line.vi.wait(Duration::from_secs(1000));
    });
    let nic = stage.nic();
    let (one, other) = (nic.listen("shm:one").unwrap(), nic.listen("shm:other").unwrap());
    let queue = nic.completion_queue().unwrap();
    let honest = stage.start("honest");
    let mut line = Line::accept_with(&one, &ViOptions::new().queue(&queue));
    for round in 0..10 {
        let mut mortal = stage.start("mortal");
        let mut doomed = Line::accept_with(&other, &ViOptions::new().queue(&queue));
        doomed.vi.post_recv(Receive::new(1)).unwrap();
        if round % 2 == 0 {
            kill_and_count(&mut mortal, &mut doomed, &[1]);
        } else {
            mortal.kill();
        }
        for _ in 0..20 {
            line.vi.post_recv(Receive::new(0).into(buffer(&nic, 64))).unwrap();
            line.vi.send_bytes(0, b"ping").unwrap();
            assert_eq!(line.received().length, 4);
        }
    }
    drop(line);
    honest.finish();
}

#[test]
fn who_lingers_or_works_in_the_background_hears_of_the_death_too() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let nic = stage.nic();
        let _lines = [Line::connect(&nic, "shm:linger"), Line::connect(&nic, "shm:linger")];
        stage.mark("ready");
        std::thread::sleep(Duration::from_secs(1000));
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:linger").unwrap();
    let mut victim = stage.start("victim");
    let mut lingering = Line::accept(&listener);
    let background = Background::spawn(listener.accept(PATIENCE).unwrap()).unwrap();
    stage.await_mark("ready");
    background.post_recv(Receive::new(7).into(buffer(&nic, 8))).unwrap();
    lingering.vi.post_send(Message::new(1).payload(buffer(&nic, 5000)).by(Path::Referenced)).unwrap();
    let linger = std::thread::spawn(move || lingering.vi.disconnect(PATIENCE));
    std::thread::sleep(A_WHILE);
    let start = Instant::now();
    victim.kill();
    assert_eq!(linger.join().unwrap(), Err(WaitError::NotConnected(Failure::PeerDied)));
    let done = background.wait(PATIENCE).unwrap();
    assert_eq!((done.token, done.status), (7, Err(Failure::PeerDied)));
    assert_eq!(background.wait(PATIENCE).unwrap_err(), WaitError::NotConnected(Failure::PeerDied));
    assert!(start.elapsed() < AT_MOST, "{:?}", start.elapsed());
}

/// What is in the runtime directory.
fn left_behind(stage: &Stage) -> Vec<String> {
    let entries = std::fs::read_dir(stage.runtime_dir()).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_dead_listeners_name_is_replaced_and_a_living_ones_refused() {
    let stage = Stage::open();
    stage.role("listener", |stage| {
        let nic = stage.nic();
        let _listener = nic.listen("shm:name").unwrap();
        stage.mark(&stage.argument());
        std::thread::sleep(Duration::from_secs(1000));
    });
    let nic = stage.nic_with(|config| config.connect_timeout = A_WHILE);
    for round in 0..3 {
        let mark = format!("listening-{round}");
        let mut listening = stage.start_with("listener", &mark);
        stage.await_mark(&mark);
        let refused = nic.listen("shm:name").unwrap_err();
        assert!(matches!(&refused, ListenError::InUse { address } if address == "shm:name"), "{refused}");
        assert!(refused.to_string().contains("is in use"), "{refused}");
        listening.kill();
        listening.status();
        assert_eq!(left_behind(&stage), ["name.sock", "name.sock.lock"]);
        let nobody = nic.connect("shm:name").unwrap_err();
        assert!(matches!(nobody, ConnectError::NobodyThere { .. }), "{nobody}");
    }
    let listener = nic.listen("shm:name").expect("the name of the dead");
    assert!(matches!(nic.listen("shm:name"), Err(ListenError::InUse { .. })), "also from this very process");
    drop(listener);
    assert_eq!(left_behind(&stage), ["name.sock.lock"], "the lock stays, or two could hold one name");
    assert!(nic.listen("shm:name").is_ok());
}

#[test]
fn a_dead_listeners_name_is_free_though_its_forked_child_lives() {
    let stage = Stage::open();
    stage.role("listener", |stage| {
        let nic = stage.nic();
        let _listener = nic.listen("shm:parent").unwrap();
        stage.mark(&format!("child-{}", fork_that_sleeps()));
        std::thread::sleep(Duration::from_secs(1000));
    });
    let mut listening = stage.start("listener");
    let child = stage.await_mark_after("child-");
    listening.kill();
    listening.status();
    let again = stage.nic().listen("shm:parent");
    let child = rustix::process::Pid::from_raw(child.parse().unwrap()).unwrap();
    rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    assert!(again.is_ok(), "{:?}", again.err().map(|error| error.to_string()));
}

/// Mappings of ours in this process.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("memfd:highwire")).count()
}

#[test]
fn many_deaths_leave_no_descriptor_mapping_or_name_behind() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:leaks");
        line.vi.post_send(Message::new(0).payload(buffer(&nic, 5000)).by(Path::Referenced)).unwrap();
        line.vi.post_send(Message::new(0).payload(buffer(&nic, 5000)).by(Path::Buffered)).unwrap();
        let _ = line.vi.wait(Duration::from_secs(1000));
        std::thread::sleep(Duration::from_secs(1000));
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:leaks").unwrap();
    let exported = nic.export(4096, highwire_vi::Tag(0)).unwrap();
    let mut before = (0, 0);
    for round in 0..40 {
        let mut victim = stage.start("victim");
        let mut line = Line::accept(&listener);
        line.vi.grant_exported(&exported).unwrap();
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, 5000))).unwrap();
        drop(line.received());
        line.vi.post_recv(Receive::new(1).in_place()).unwrap();
        line.vi.post_send(Message::new(2).payload(buffer(&nic, 6000))).unwrap();
        victim.kill();
        assert_eq!(line.end().0, Failure::PeerDied);
        drop(line);
        // The first round leaves what a Nic keeps: its own doorbell page.
        if round == 0 {
            until("the first is forgotten", || {
                before = (open_descriptors(), mappings());
                std::thread::sleep(A_WHILE);
                before == (open_descriptors(), mappings())
            });
        }
    }
    until("all are forgotten", || (open_descriptors(), mappings()) <= before);
    assert_eq!(left_behind(&stage), ["leaks.sock", "leaks.sock.lock"]);
}

#[test]
fn a_death_is_told_though_a_message_without_a_receive_is_left() {
    let stage = Stage::open();
    stage.role("leaver", |stage| {
        let mut line = Line::connect(&stage.nic(), "shm:left");
        line.vi.send_bytes(1, b"the last word").unwrap();
        stage.mark("sent");
        line.end();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:left").unwrap();
    let mut leaver = stage.start("leaver");
    let mut line = Line::accept(&listener);
    stage.await_mark("sent");
    leaver.kill();
    assert_eq!(line.vi.wait(PATIENCE).unwrap_err(), WaitError::NotConnected(Failure::PeerDied));
    // What it said before is not lost.
    line.vi.post_recv(Receive::new(7).into(buffer(&nic, 64))).unwrap();
    let done = line.vi.wait(PATIENCE).unwrap();
    assert_eq!((done.token, done.length, done.status), (7, 13, Ok(())));
    assert_eq!(line.vi.wait(PATIENCE).unwrap_err(), WaitError::NotConnected(Failure::PeerDied));
}
