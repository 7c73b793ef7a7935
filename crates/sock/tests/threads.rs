//! Several threads at one stream, and many streams at once.

use crate::support::pattern::Pattern;
use crate::support::seeded::Seeded;
use crate::support::socket::{Wire, ready};
use crate::support::wire::{Reach, STRATEGIES, sealed};
use crate::support::{A_WHILE, PATIENCE, Stage, cpu_time, until};
use highwire_adapter::WireConfig;
use highwire_sock::{SockConfig, Sockets, Stream};
use highwire_vi::Nic;
use rustix::event::epoll;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Streams of every strategy, on one host and over loopback.
fn everywhere(stage: &Stage, mut play: impl FnMut([Stream; 2])) {
    for strategy in STRATEGIES {
        let config = SockConfig { strategy, ..SockConfig::default() };
        eprintln!("{strategy:?} on one host");
        play(Reach::on_one_host(stage, config).pair());
        eprintln!("{strategy:?} over loopback");
        let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
        play(Reach::by_wire(stage, &wire, config).pair());
    }
}

/// Writes until there is no room; how much it was.
fn fill(mut stream: &Stream, pattern: Pattern) -> u64 {
    stream.set_nonblocking(true).unwrap();
    let (mut written, mut full) = (0, 0);
    // Over a wire room comes back while what was written goes.
    while full < 20 {
        match stream.write(pattern.at(written, 10_000)) {
            Ok(count) => (written, full) = (written + count as u64, 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                full += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    stream.set_nonblocking(false).unwrap();
    written
}

fn read_exactly(mut stream: &Stream, pattern: Pattern, count: u64) {
    let (mut position, mut bytes) = (0, vec![0; 70_000]);
    while position < count {
        let most = bytes.len().min((count - position) as usize);
        let some = stream.read(&mut bytes[..most]).unwrap();
        assert!(some > 0, "the end after {position} of {count} bytes");
        assert_eq!(pattern.first_wrong(position, &bytes[..some]), None);
        position += some as u64;
    }
}

#[test]
fn a_reader_wakes_when_its_own_side_shuts_down() {
    let stage = Stage::open();
    for how in [Shutdown::Read, Shutdown::Both] {
        everywhere(&stage, |[one, other]| {
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| (&one).read(&mut [0; 10]).unwrap());
                std::thread::sleep(A_WHILE);
                assert!(!reader.is_finished());
                one.shutdown(how).unwrap();
                assert_eq!(reader.join().unwrap(), 0);
            });
            drop(other);
        });
    }
}

#[test]
fn a_reader_wakes_when_the_other_side_shuts_down_or_closes() {
    let stage = Stage::open();
    for closes in [false, true] {
        everywhere(&stage, |[one, other]| {
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| (&one).read(&mut [0; 10]).unwrap());
                std::thread::sleep(A_WHILE);
                assert!(!reader.is_finished());
                if closes {
                    drop(other)
                } else {
                    other.shutdown(Shutdown::Write).unwrap()
                }
                assert_eq!(reader.join().unwrap(), 0);
            });
        });
    }
}

#[test]
fn several_readers_all_wake_at_the_end() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..4).map(|_| scope.spawn(|| (&one).read(&mut [0; 10]).unwrap())).collect();
            std::thread::sleep(A_WHILE);
            drop(other);
            readers.into_iter().for_each(|reader| assert_eq!(reader.join().unwrap(), 0));
        });
    });
}

#[test]
fn a_writer_that_waits_for_room_wakes_when_its_own_side_shuts_down() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        fill(&one, Pattern::new(1));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (&one).write(&[0; 1000]).unwrap_err().kind());
            std::thread::sleep(A_WHILE);
            assert!(!writer.is_finished());
            one.shutdown(Shutdown::Write).unwrap();
            assert_eq!(writer.join().unwrap(), ErrorKind::BrokenPipe);
        });
        drop(other);
    });
}

#[test]
fn a_writer_that_waits_for_room_wakes_when_there_is_some_and_all_arrives() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        let pattern = Pattern::new(2);
        let filled = fill(&one, pattern);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (&one).write_all(pattern.at(filled, 60_000)).unwrap());
            std::thread::sleep(A_WHILE);
            assert!(!writer.is_finished());
            read_exactly(&other, pattern, filled + 60_000);
            writer.join().unwrap();
        });
    });
}

#[test]
fn a_writer_with_a_time_out_says_how_much_it_wrote_or_that_it_would_have_to_wait() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        let filled = fill(&one, Pattern::new(3));
        let timeout = Duration::from_millis(30);
        one.set_write_timeout(Some(timeout)).unwrap();
        assert_eq!(one.write_timeout().unwrap(), Some(timeout));
        let since = Instant::now();
        assert_eq!((&one).write(&[0; 10_000]).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(since.elapsed() >= timeout);
        read_exactly(&other, Pattern::new(3), filled);
    });
}

#[test]
fn a_slow_reader_gets_everything() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        let pattern = Pattern::new(4);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for position in (0..200_000).step_by(50) {
                    (&one).write_all(pattern.at(position, 50)).unwrap();
                }
            });
            let (mut position, mut bytes) = (0, [0; 3000]);
            loop {
                let count = (&other).read(&mut bytes).unwrap();
                assert_eq!(pattern.first_wrong(position, &bytes[..count]), None);
                position += count as u64;
                if count == 0 {
                    break;
                }
                std::thread::sleep(Duration::from_micros(300));
            }
            assert_eq!(position, 200_000);
        });
    });
}

#[test]
fn reader_and_writer_have_a_clone_each_at_both_ends() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        let clone = |stream: &Stream| stream.try_clone().unwrap();
        let (out, echo) = (clone(&one), clone(&other));
        std::thread::scope(|scope| {
            scope.spawn(move || std::io::copy(&mut &other, &mut &echo).and_then(|_| echo.shutdown(Shutdown::Write)));
            scope.spawn(move || {
                for position in (0..1_000_000).step_by(5000) {
                    (&out).write_all(Pattern::new(5).at(position, 5000)).unwrap();
                }
                out.shutdown(Shutdown::Write).unwrap();
            });
            read_exactly(&one, Pattern::new(5), 1_000_000);
            assert_eq!((&one).read(&mut [0]).unwrap(), 0);
        });
    });
}

/// What several threads write may be mixed, as in TCP where a write has to wait for room; what each writes is in order.
#[test]
fn what_each_of_several_writers_writes_is_all_there_and_in_order() {
    const WRITERS: u8 = 3;
    const BYTES: usize = 500_000;
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let one = &one;
                scope.spawn(move || {
                    // Who wrote a byte is in it, and when.
                    let all: Vec<u8> = (0..BYTES).map(|at| writer << 6 | (at % 64) as u8).collect();
                    let (mut seeded, mut left) = (Seeded::from(u64::from(writer)), &all[..]);
                    while !left.is_empty() {
                        let most = *seeded.pick(&[10, 1000, 50_000]);
                        let (now, later) = left.split_at((1 + seeded.below(most)).min(left.len()));
                        (&*one).write_all(now).unwrap();
                        left = later;
                    }
                });
            }
            let (mut counts, mut bytes) = ([0; WRITERS as usize], vec![0; 50_000]);
            while counts.iter().sum::<usize>() < BYTES * usize::from(WRITERS) {
                let count = (&other).read(&mut bytes).unwrap();
                assert!(count > 0, "the end after {counts:?}");
                for byte in &bytes[..count] {
                    let writer = usize::from(byte >> 6);
                    assert_eq!(usize::from(byte % 64), counts[writer] % 64, "of {writer}, after {counts:?}");
                    counts[writer] += 1;
                }
            }
        });
    });
}

#[test]
fn readers_at_one_stream_share_its_bytes() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        let total = Mutex::new((0u64, 0u64));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut bytes = [0; 700];
                    loop {
                        let count = (&other).read(&mut bytes).unwrap();
                        if count == 0 {
                            break;
                        }
                        let sum: u64 = bytes[..count].iter().map(|byte| u64::from(*byte)).sum();
                        let mut total = total.lock().unwrap();
                        *total = (total.0 + count as u64, total.1 + sum);
                    }
                });
            }
            for number in 0..3000u32 {
                (&one).write_all(&[number as u8; 100]).unwrap();
            }
            one.shutdown(Shutdown::Write).unwrap();
        });
        let sum: u64 = (0..3000u32).map(|number| 100 * u64::from(number as u8)).sum();
        assert_eq!(*total.lock().unwrap(), (300_000, sum));
    });
}

/// Serves everybody who calls, by one epoll; each gets back what it sends.
fn serve_echo(sockets: &Sockets, address: &str, ready: impl FnOnce()) {
    let listener = sockets.bind(address).unwrap();
    let poller = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
    let streams: Arc<Mutex<HashMap<u64, Stream>>> = Arc::default();
    let (known, adding) = (streams.clone(), poller.clone());
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let (number, stream) = (number as u64, stream.unwrap());
            stream.set_nonblocking(true).unwrap();
            epoll::add(&adding, stream.as_fd(), epoll::EventData::new_u64(number), epoll::EventFlags::IN).unwrap();
            known.lock().unwrap().insert(number, stream);
        }
    });
    ready();
    let mut bytes = vec![0; 4096];
    loop {
        let mut events = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 64];
        let count = epoll::wait(&*poller, &mut events[..], None).unwrap();
        for event in &events[..count] {
            let mut streams = streams.lock().unwrap();
            let number = event.data.u64();
            let Some(mut stream) = streams.get(&number) else { continue };
            match stream.read(&mut bytes) {
                Ok(0) => {
                    epoll::delete(&*poller, stream.as_fd()).unwrap();
                    streams.remove(&number);
                }
                Ok(count) => stream.write_all(&bytes[..count]).unwrap(),
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
        }
    }
}

#[test]
fn a_thousand_streams_between_two_processes() {
    const STREAMS: usize = 1000;
    const ROUNDS: usize = 5;
    let stage = Stage::open();
    allow_many_descriptors();
    let sockets = |stage: &Stage| {
        let strategy = STRATEGIES.into_iter().find(|strategy| stage.argument() == format!("{strategy:?}"));
        let config = SockConfig { strategy: strategy.unwrap_or_default(), ..SockConfig::default() };
        Sockets::with(&Nic::with(stage.config()).unwrap(), config).unwrap()
    };
    stage.role("server", |stage| {
        let strategy = stage.argument();
        serve_echo(&sockets(stage), &format!("shm:{strategy}"), || stage.mark(&strategy));
    });
    // A thread for each of a thousand is not what that strategy is for.
    for strategy in &STRATEGIES[..2] {
        let name = format!("{strategy:?}");
        let server = stage.start_with("server", &name);
        stage.await_mark(&name);
        let since = Instant::now();
        let here = Sockets::new(&Nic::with(stage.config()).unwrap());
        let streams: Vec<Stream> = (0..STREAMS).map(|_| here.connect(&format!("shm:{name}")).unwrap()).collect();
        let connected = since.elapsed();
        for round in 0..ROUNDS {
            for (number, mut stream) in streams.iter().enumerate() {
                stream.write_all(&question(number, round)).unwrap();
            }
            for (number, mut stream) in streams.iter().enumerate() {
                let expected = question(number, round);
                let mut answer = vec![0; expected.len()];
                stream.read_exact(&mut answer).unwrap();
                assert!(answer == expected, "the answer at stream {number} of round {round}");
            }
        }
        drop(streams);
        let took = since.elapsed();
        eprintln!("{name}: {STREAMS} connected in {connected:?}, {ROUNDS} rounds after {took:?}");
        assert!(took < Duration::from_secs(20), "{took:?}");
        drop(server);
    }
}

fn question(number: usize, round: usize) -> Vec<u8> {
    let mut seeded = Seeded::from((number * 100 + round) as u64);
    let size = 1 + seeded.below(300);
    (0..size).map(|at| (at + number + round) as u8).collect()
}

/// As many as this user may have.
fn allow_many_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
}

#[test]
fn idle_streams_use_no_cpu() {
    const IDLE: Duration = Duration::from_secs(2);
    let stage = Stage::open();
    for strategy in STRATEGIES {
        let config = SockConfig { strategy, ..SockConfig::default() };
        let reach = Reach::on_one_host(&stage, config);
        let pairs: Vec<[Stream; 2]> = (0..10).map(|_| reach.pair()).collect();
        std::thread::scope(|scope| {
            for [one, other] in &pairs {
                (&*one).write_all(b"hello").unwrap();
                scope.spawn(|| {
                    (&*other).read_exact(&mut [0; 5]).unwrap();
                    assert_eq!((&*other).read(&mut [0]).unwrap(), 0);
                });
                // Shown to whoever polls, which nobody does.
                assert!(ready(&Wire(one.try_clone().unwrap())).output);
            }
            std::thread::sleep(Duration::from_millis(300));
            let before = cpu_time();
            std::thread::sleep(IDLE);
            let used = cpu_time() - before;
            eprintln!("{strategy:?}: {used:?} of CPU in {IDLE:?}");
            assert!(used < IDLE / 200, "{strategy:?}: {used:?} of CPU in {IDLE:?}");
            for [one, _] in &pairs {
                one.shutdown(Shutdown::Write).unwrap();
            }
        });
    }
}

#[test]
fn streams_outlive_their_sockets_and_their_listener() {
    let stage = Stage::open();
    everywhere(&stage, |[one, other]| {
        // What made them is gone here.
        (&one).write_all(b"ping").unwrap();
        let mut bytes = [0; 4];
        (&other).read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"ping");
        until("a stream that is empty", || !ready(&Wire(other.try_clone().unwrap())).input);
        other.set_read_timeout(Some(PATIENCE)).unwrap();
        drop(one);
        assert_eq!((&other).read(&mut bytes).unwrap(), 0);
    });
}

#[test]
fn streams_one_after_another_between_the_same_two() {
    let stage = Stage::open();
    for strategy in STRATEGIES {
        let config = SockConfig { strategy, ..SockConfig::default() };
        let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
        for reach in [Reach::on_one_host(&stage, config), Reach::by_wire(&stage, &wire, config)] {
            for round in 0..30 {
                let [one, other] = reach.pair();
                if round % 2 == 0 {
                    (&one).write_all(b"unread").unwrap();
                }
                // Either end may be the first to go.
                if round % 3 == 0 { drop((one, other)) } else { drop((other, one)) }
            }
        }
    }
}

/// More streams than a peer may hand over pages for: each takes its own with it.
#[test]
fn streams_with_a_thread_of_their_own_leave_nothing_behind() {
    let stage = Stage::open();
    let config = SockConfig { strategy: highwire_sock::Strategy::Notify, ..SockConfig::default() };
    let reach = Reach::on_one_host(&stage, config);
    let _kept = reach.pair();
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for _ in 0..1100 {
        drop(reach.pair());
    }
    assert!(open() <= before + 8, "{before} descriptors have become {}", open());
}

#[test]
fn a_window_of_one_goes_on_whatever_is_said_of_combining() {
    let stage = Stage::open();
    let [mut one, mut other] =
        Reach::on_one_host(&stage, SockConfig { window: 1, acknowledge: 1, ..SockConfig::default() }).pair();
    one.set_write_timeout(Some(PATIENCE)).unwrap();
    other.set_read_timeout(Some(PATIENCE)).unwrap();
    for round in 0..100u8 {
        one.set_nodelay(round % 2 == 0).unwrap();
        one.write_all(&[round; 5]).unwrap();
        let mut bytes = [0; 5];
        other.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, [round; 5]);
    }
}

/// Who calls and says nothing takes a place at the listener for a while, and nobody is kept busy by that.
#[test]
fn callers_that_say_nothing_do_not_keep_a_listener_from_others() {
    let _stage = Stage::open();
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("door");
    let address = format!("shm:{}", socket.display());
    let [here, there] = [Nic::open().unwrap(), Nic::open().unwrap()].map(|nic| Sockets::new(&nic));
    let listener = there.bind(&address).unwrap();
    listener.set_nonblocking(true).unwrap();
    let silent: Vec<_> = (0..20).map(|_| highwire_mem::Courier::connect(&socket, PATIENCE).unwrap()).collect();
    let (began, mut turns) = (Instant::now(), 0);
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| here.connect_timeout(&address, PATIENCE).unwrap());
        let accepted = loop {
            assert!(began.elapsed() < PATIENCE, "nobody was accepted");
            let mut polled = [rustix::event::PollFd::new(&listener, rustix::event::PollFlags::IN)];
            let second = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
            rustix::event::poll(&mut polled, Some(&second)).unwrap();
            turns += 1;
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
        };
        (&accepted).write_all(b"x").unwrap();
        (&caller.join().unwrap()).read_exact(&mut [0]).unwrap();
    });
    assert!(turns < 200, "{turns} turns");
    drop(silent);
}
