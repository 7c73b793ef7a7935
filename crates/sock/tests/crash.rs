//! `kill -9` of either end in every state: the survivor has everything that was written, then an error, soon; and
//! nothing of the other stays behind in it.

use crate::support::pattern::Pattern;
use crate::support::socket::{Socket, Wire, ready};
use crate::support::wire::{STRATEGIES, sealed, wire_nic};
use crate::support::{A_WHILE, Actor, PATIENCE, Stage, until};
use highwire_adapter::WireConfig;
use highwire_sock::{SockConfig, Sockets, Strategy, Stream};
use highwire_vi::Nic;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

/// One killing: who listens, how messages are handled, and a name that both processes know it by.
struct Scene<'a> {
    stage: &'a Stage,
    strategy: Strategy,
    victim_listens: bool,
    name: String,
}

impl<'a> Scene<'a> {
    fn new(stage: &'a Stage, strategy: Strategy, victim_listens: bool, round: usize) -> Scene<'a> {
        let name = format!("{strategy:?}-{victim_listens}-{round}");
        Scene { stage, strategy, victim_listens, name }
    }

    /// As it was said to the victim.
    fn told(stage: &'a Stage) -> Scene<'a> {
        let name = stage.argument();
        let strategy = STRATEGIES.into_iter().find(|strategy| name.starts_with(&format!("{strategy:?}-")));
        let victim_listens = name.contains("-true-");
        Scene { stage, strategy: strategy.expect("a strategy"), victim_listens, name }
    }

    fn sockets(&self) -> Sockets {
        let nic = Nic::with(self.stage.config()).unwrap();
        Sockets::with(&nic, SockConfig { strategy: self.strategy, ..SockConfig::default() }).unwrap()
    }

    fn address(&self) -> String {
        format!("shm:{}", self.name)
    }

    fn mark(&self, what: &str) {
        self.stage.mark(&format!("{}-{what}", self.name));
    }

    fn await_mark(&self, what: &str) {
        self.stage.await_mark(&format!("{}-{what}", self.name));
    }

    /// The stream, at either end.
    fn stream(&self, listens: bool) -> Stream {
        let sockets = self.sockets();
        if !listens {
            self.await_mark("listens");
            return sockets.connect(&self.address()).unwrap();
        }
        let listener = sockets.bind(&self.address()).unwrap();
        self.mark("listens");
        listener.accept().unwrap().0
    }

    fn start_victim(&self) -> Actor {
        self.stage.start_with("victim", &self.name)
    }
}

/// Lets victims play, either end of the stream and with every strategy; each is killed by what survives it.
fn killed(play: fn(&Scene<'_>, Stream), survive: impl Fn(&Scene<'_>, Stream, &mut Actor)) {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let scene = Scene::told(stage);
        play(&scene, scene.stream(scene.victim_listens));
        panic!("a victim is killed");
    });
    for strategy in STRATEGIES {
        for victim_listens in [false, true] {
            let scene = Scene::new(&stage, strategy, victim_listens, 0);
            let mut victim = scene.start_victim();
            let stream = scene.stream(!victim_listens);
            survive(&scene, stream, &mut victim);
        }
    }
}

fn for_ever() {
    std::thread::sleep(Duration::from_secs(1000));
}

/// Reads to the end: how many bytes came, all of them right, and how it ended.
fn read_out(stream: &Stream, pattern: Pattern) -> (u64, Result<(), ErrorKind>) {
    let (mut position, mut bytes) = (0, vec![0; 50_000]);
    loop {
        match (&*stream).read(&mut bytes) {
            Ok(0) => return (position, Ok(())),
            Ok(count) => {
                assert_eq!(pattern.first_wrong(position, &bytes[..count]), None);
                position += count as u64;
            }
            Err(error) => return (position, Err(error.kind())),
        }
    }
}

/// The connection is over, was told so once, and stays over.
fn stays_dead(stream: &Stream) {
    assert_eq!((&*stream).read(&mut [0; 9]).unwrap(), 0);
    assert_eq!((&*stream).write(b"late").unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert!(stream.take_error().unwrap().is_none());
}

/// Writes until there is no room; how much it was.
fn fill(stream: &Stream, pattern: Pattern) -> u64 {
    stream.set_nonblocking(true).unwrap();
    let mut written = 0;
    loop {
        match (&*stream).write(pattern.at(written, 10_000)) {
            Ok(count) => written += count as u64,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error} after {written} bytes"),
        }
    }
    stream.set_nonblocking(false).unwrap();
    written
}

/// Takes the time from the kill on.
fn soon(victim: &mut Actor, end: impl FnOnce()) {
    let since = Instant::now();
    victim.kill();
    end();
    let took = since.elapsed();
    eprintln!("the death was told after {took:?}");
    assert!(took < AT_MOST, "told after {took:?}");
}

const AT_MOST: Duration = Duration::from_secs(1);

#[test]
fn one_that_dies_idle_is_a_reset() {
    killed(
        |scene, _stream| {
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            scene.await_mark("ready");
            soon(victim, || assert_eq!(read_out(&stream, Pattern::new(0)), (0, Err(ErrorKind::ConnectionReset))));
            stays_dead(&stream);
        },
    );
}

#[test]
fn one_that_dies_idle_is_told_to_whoever_writes() {
    killed(
        |scene, _stream| {
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            scene.await_mark("ready");
            soon(victim, || {
                let first = loop {
                    match (&stream).write_all(b"anybody there?") {
                        Ok(()) => std::thread::sleep(Duration::from_millis(1)),
                        Err(error) => break error.kind(),
                    }
                };
                assert_eq!(first, ErrorKind::ConnectionReset);
            });
            stays_dead(&stream);
        },
    );
}

#[test]
fn one_that_dies_idle_is_shown_by_its_descriptor() {
    killed(
        |scene, _stream| {
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            scene.await_mark("ready");
            let stream = Wire(stream);
            assert!(!ready(&stream).input && ready(&stream).output);
            soon(victim, || until("a descriptor that shows the death", || ready(&stream).input));
            assert_eq!(stream.take_error().unwrap().unwrap().kind(), ErrorKind::ConnectionReset);
            stays_dead(&stream.0);
        },
    );
}

#[test]
fn one_that_dies_in_a_read_is_a_reset_for_who_is_in_a_read_too() {
    killed(
        |scene, mut stream| {
            scene.mark("ready");
            let _ = stream.read(&mut [0; 100]);
        },
        |scene, stream, victim| {
            scene.await_mark("ready");
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| read_out(&stream, Pattern::new(0)));
                std::thread::sleep(A_WHILE);
                assert!(!reader.is_finished());
                soon(victim, || assert_eq!(reader.join().unwrap(), (0, Err(ErrorKind::ConnectionReset))));
            });
            stays_dead(&stream);
        },
    );
}

#[test]
fn one_that_dies_with_unread_bytes_frees_who_waits_for_room() {
    killed(
        |scene, _stream| {
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            scene.await_mark("ready");
            fill(&stream, Pattern::new(0));
            std::thread::scope(|scope| {
                let writer = scope.spawn(|| (&stream).write(&[0; 100_000]).unwrap_err().kind());
                std::thread::sleep(A_WHILE);
                assert!(!writer.is_finished());
                soon(victim, || assert_eq!(writer.join().unwrap(), ErrorKind::ConnectionReset));
            });
            stays_dead(&stream);
        },
    );
}

#[test]
fn all_is_read_of_one_that_dies_waiting_for_room() {
    killed(
        |scene, stream| {
            let written = fill(&stream, Pattern::new(3));
            scene.mark(&format!("{written}-ready"));
            let _ = (&stream).write_all(Pattern::new(3).at(written, 60_000));
        },
        |scene, stream, victim| {
            let written: u64 = scene.stage.await_mark_between(&format!("{}-", scene.name), "-ready").parse().unwrap();
            std::thread::sleep(A_WHILE);
            soon(victim, || {
                let (read, end) = read_out(&stream, Pattern::new(3));
                assert!(read >= written, "{read} of {written} bytes came");
                assert_eq!(end, Err(ErrorKind::ConnectionReset));
            });
            stays_dead(&stream);
        },
    );
}

#[test]
fn all_is_read_that_a_write_has_returned_for() {
    killed(
        |scene, stream| {
            for (position, count) in [(0, 1), (1, 200), (201, 40_000), (40_201, 5)] {
                (&stream).write_all(Pattern::new(4).at(position, count)).unwrap();
            }
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            scene.await_mark("ready");
            soon(victim, || {
                // Even if it was noticed long before.
                std::thread::sleep(Duration::from_millis(300));
                assert_eq!(read_out(&stream, Pattern::new(4)), (40_206, Err(ErrorKind::ConnectionReset)));
            });
            stays_dead(&stream);
        },
    );
}

#[test]
fn an_end_that_was_said_before_is_an_end() {
    killed(
        |scene, stream| {
            (&stream).write_all(Pattern::new(5).at(0, 5000)).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            scene.await_mark("ready");
            soon(victim, || assert_eq!(read_out(&stream, Pattern::new(5)), (5000, Ok(()))));
            assert_eq!((&stream).read(&mut [0]).unwrap(), 0, "an end stays one");
            until("writes that fail", || (&stream).write(b"late").is_err());
            assert_eq!((&stream).write(b"late").unwrap_err().kind(), ErrorKind::BrokenPipe);
        },
    );
}

#[test]
fn one_that_dies_after_the_survivor_has_said_its_end_is_a_reset() {
    killed(
        |scene, mut stream| {
            assert_eq!(stream.read(&mut [0; 10]).unwrap(), 0);
            (&stream).write_all(Pattern::new(6).at(0, 7000)).unwrap();
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            stream.shutdown(Shutdown::Write).unwrap();
            scene.await_mark("ready");
            soon(victim, || assert_eq!(read_out(&stream, Pattern::new(6)), (7000, Err(ErrorKind::ConnectionReset))));
            stays_dead(&stream);
        },
    );
}

#[test]
fn one_that_dies_when_both_have_said_their_end_is_nothing_new() {
    killed(
        |scene, stream| {
            stream.shutdown(Shutdown::Write).unwrap();
            assert_eq!((&stream).read(&mut [0; 10]).unwrap(), 0);
            scene.mark("ready");
            for_ever();
        },
        |scene, stream, victim| {
            stream.shutdown(Shutdown::Write).unwrap();
            scene.await_mark("ready");
            assert_eq!((&stream).read(&mut [0]).unwrap(), 0);
            victim.kill();
            std::thread::sleep(A_WHILE);
            stays_dead(&stream);
        },
    );
}

#[test]
fn one_that_dies_in_the_middle_of_a_transfer_was_right_until_then() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let scene = Scene::told(stage);
        let stream = scene.stream(scene.victim_listens);
        let other = stream.try_clone().unwrap();
        std::thread::spawn(move || read_out(&other, Pattern::new(8)));
        write_on(&stream, Pattern::new(7));
    });
    for round in 0..12 {
        let scene = Scene::new(&stage, STRATEGIES[round % 3], round % 2 == 0, round);
        let mut victim = scene.start_victim();
        let stream = scene.stream(!scene.victim_listens);
        std::thread::scope(|scope| {
            scope.spawn(|| write_on(&stream, Pattern::new(8)));
            assert_eq!(stream.peek(&mut [0]).unwrap(), 1, "it has begun");
            let reader = scope.spawn(|| read_out(&stream, Pattern::new(7)));
            std::thread::sleep(Duration::from_millis(20 + 7 * round as u64));
            soon(&mut victim, || {
                let (read, end) = reader.join().unwrap();
                assert!(read > 0);
                // The writer may have been told first.
                assert!(matches!(end, Err(ErrorKind::ConnectionReset) | Ok(())), "{end:?}");
            });
        });
        stays_dead(&stream);
    }
}

/// Writes until that fails.
fn write_on(stream: &Stream, pattern: Pattern) {
    let mut position = 0;
    while let Ok(count) = (&*stream).write(pattern.at(position, 1 + (position % 20_000) as usize)) {
        position += count as u64;
    }
}

#[test]
fn one_that_dies_before_it_is_accepted_costs_the_listener_nothing() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let scene = Scene::told(stage);
        scene.await_mark("listens");
        scene.mark("calls");
        let _ = scene.sockets().connect_timeout(&scene.address(), PATIENCE);
    });
    stage.role("friend", |stage| {
        let mut stream = Scene::told(stage).sockets().connect(&Scene::told(stage).address()).unwrap();
        stream.write_all(b"hello").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    });
    for strategy in STRATEGIES {
        let scene = Scene::new(&stage, strategy, false, 0);
        let listener = scene.sockets().bind(&scene.address()).unwrap();
        scene.mark("listens");
        let mut victim = scene.start_victim();
        scene.await_mark("calls");
        std::thread::sleep(A_WHILE);
        victim.kill();
        std::thread::sleep(A_WHILE);
        let friend = stage.start_with("friend", &scene.name);
        let greeted = loop {
            let (stream, _) = listener.accept().unwrap();
            let mut greeting = [0; 5];
            match (&stream).read_exact(&mut greeting) {
                Ok(()) => break greeting,
                // The dead one, that was just about to be accepted.
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            }
        };
        assert_eq!(&greeted, b"hello");
        friend.finish();
    }
}

#[test]
fn a_listener_that_dies_before_it_accepts_refuses() {
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let scene = Scene::told(stage);
        let _listener = scene.sockets().bind(&scene.address()).unwrap();
        scene.mark("listens");
        for_ever();
    });
    for strategy in STRATEGIES {
        let scene = Scene::new(&stage, strategy, true, 0);
        let mut victim = scene.start_victim();
        scene.await_mark("listens");
        let sockets = scene.sockets();
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| sockets.connect_timeout(&scene.address(), PATIENCE).unwrap_err());
            std::thread::sleep(A_WHILE);
            assert!(!caller.is_finished(), "nobody accepts");
            soon(&mut victim, || {
                let error = caller.join().unwrap();
                let told = matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset);
                assert!(told, "{error:?}");
            });
        });
        // And what it leaves behind is a name at which nobody is.
        let nobody = sockets.connect(&scene.address()).unwrap_err();
        assert_eq!(nobody.kind(), ErrorKind::ConnectionRefused, "{nobody}");
    }
}

#[test]
fn a_host_that_dies_is_a_reset_after_the_time_for_it() {
    let death = Duration::from_millis(600);
    let stage = Stage::open();
    let sockets = |stage: &Stage| {
        let wire = WireConfig { keys: sealed(), death, ..WireConfig::default() };
        Sockets::new(&wire_nic(stage, &wire))
    };
    stage.role("victim", |stage| {
        let stream = sockets(stage).connect(&stage.argument()).unwrap();
        (&stream).write_all(Pattern::new(9).at(0, 30_000)).unwrap();
        assert_eq!((&stream).read(&mut [0]).unwrap(), 1);
        stage.mark("ready");
        for_ever();
    });
    let listener = sockets(&stage).bind("udp:127.0.0.1:0").unwrap();
    let mut victim = stage.start_with("victim", &listener.local_addr().unwrap().to_string());
    let (mut stream, _) = listener.accept().unwrap();
    let mut bytes = vec![0; 30_000];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(Pattern::new(9).first_wrong(0, &bytes), None);
    stream.write_all(&[1]).unwrap();
    stage.await_mark("ready");
    let since = Instant::now();
    victim.kill();
    // Something is under way: silence is noticed by whoever waits for an acknowledgement.
    stream.write_all(b"still there?").unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let took = since.elapsed();
    assert!(took > death / 2 && took < death + AT_MOST, "told after {took:?}");
    stays_dead(&stream);
    // The error that was told is not the last to say why.
    let late = stream.write(b"late").unwrap_err().to_string();
    assert!(late.contains("nothing was heard of the peer for"), "{late}");
}

#[test]
fn nothing_of_the_dead_stays_in_the_survivor() {
    const ROUNDS: usize = 100;
    let stage = Stage::open();
    stage.role("victim", |stage| {
        let scene = Scene::told(stage);
        let stream = scene.sockets().connect("shm:survivor").unwrap();
        let _descriptor = Wire(stream.try_clone().unwrap()).descriptor().try_clone_to_owned().unwrap();
        (&stream).write_all(&[7; 70_000]).unwrap();
        for_ever();
    });
    for strategy in STRATEGIES {
        let scene = Scene::new(&stage, strategy, false, 0);
        let listener = scene.sockets().bind("shm:survivor").unwrap();
        let mut before = None;
        for round in 0..ROUNDS / 3 {
            let mut victim = scene.start_victim();
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[1; 70_000]).unwrap();
            stream.read_exact(&mut [0; 1000]).unwrap();
            if round % 2 == 0 {
                assert!(ready(&Wire(stream.try_clone().unwrap())).output);
            }
            victim.kill();
            if round % 3 == 0 {
                while stream.read(&mut [0; 50_000]).is_ok_and(|count| count > 0) {}
            }
            drop(stream);
            // The first rounds make what is kept for all.
            if round == 5 {
                before = Some(settled(held()));
            }
        }
        let before = before.expect("more than 5 rounds");
        until(&format!("{before:?} descriptors and maps, as before"), || {
            let now = held();
            now.0 <= before.0 && now.1 <= before.1 + MAPS_SLACK
        });
    }
}

/// Descriptors, and places where memory is mapped.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    // What the allocator and the stacks of threads take comes and goes.
    (descriptors, maps.lines().filter(|line| line.contains("memfd:") || line.contains("/dev/shm")).count())
}

/// What is being taken down is counted once it is.
fn settled(mut held_now: (usize, usize)) -> (usize, usize) {
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let next = held();
        if next == held_now {
            return next;
        }
        held_now = next;
    }
}

/// Neighbouring maps are one or two, as it happens.
const MAPS_SLACK: usize = 2;
