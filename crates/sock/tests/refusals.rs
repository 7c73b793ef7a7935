//! What is refused, with the kind of error that users of `std::net` know, and what to do about it.

use crate::support::forked::in_child;
use crate::support::wire::{Reach, STRATEGIES, sealed, wire_nic};
use crate::support::{A_WHILE, Stage, is_root, until};
use highwire_adapter::WireConfig;
use highwire_proto::Keys;
use highwire_sock::{SockConfig, Sockets};
use highwire_vi::Nic;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{Shutdown, UdpSocket};
use std::time::{Duration, Instant};

/// This kind, and a text that says these.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, kind: ErrorKind, says: &[&str]) {
    let error = result.expect_err("it is refused");
    let text = chain(&error);
    assert_eq!(error.kind(), kind, "{text}");
    for part in says {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
}

/// What it says, and what is behind it.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(deeper) = source {
        text += &format!(": {deeper}");
        source = deeper.source();
    }
    text
}

fn sockets(stage: &Stage) -> Sockets {
    Sockets::new(&Nic::with(stage.config()).unwrap())
}

fn wired(stage: &Stage, keys: Keys) -> Sockets {
    Sockets::new(&wire_nic(stage, &WireConfig { keys, ..WireConfig::default() }))
}

#[test]
fn addresses_that_are_none_say_how_they_are_written() {
    let stage = Stage::open();
    let sockets = sockets(&stage);
    for bad in ["", "echo", "tcp:127.0.0.1:80", "127.0.0.1:80"] {
        refused(sockets.connect(bad), ErrorKind::InvalidInput, &["shm:NAME", "udp:"]);
        refused(sockets.bind(bad), ErrorKind::InvalidInput, &["shm:NAME", "udp:"]);
    }
    for bad in ["shm:", "shm:a b", "shm:.hidden"] {
        refused(sockets.connect(bad), ErrorKind::InvalidInput, &[]);
        refused(sockets.bind(bad), ErrorKind::InvalidInput, &[]);
    }
    let wired = wired(&stage, sealed());
    for bad in ["udp:", "udp:127.0.0.1", "udp:127.0.0.1:99999"] {
        refused(wired.connect(bad), ErrorKind::InvalidInput, &[]);
        refused(wired.bind(bad), ErrorKind::InvalidInput, &[]);
    }
}

#[test]
fn nobody_there_is_a_refused_connection() {
    let stage = Stage::open();
    let here = sockets(&stage);
    refused(here.connect("shm:nobody"), ErrorKind::ConnectionRefused, &["nobody"]);
    let path = format!("shm:{}", stage.open_dir().join("nobody").display());
    refused(here.connect(&path), ErrorKind::ConnectionRefused, &["nobody"]);
    // One that was there, and is gone.
    drop(here.bind("shm:gone").unwrap());
    refused(here.connect("shm:gone"), ErrorKind::ConnectionRefused, &["gone"]);
}

#[test]
fn a_write_that_nobody_will_read_says_which_side_ended_the_stream() {
    let stage = Stage::open();
    let listener = sockets(&stage).bind("shm:ends").unwrap();
    let pair = || {
        let other = sockets(&stage);
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| other.connect("shm:ends").unwrap());
            (listener.accept().unwrap().0, connecting.join().unwrap())
        })
    };
    let (mut one, _other) = pair();
    one.shutdown(Shutdown::Write).unwrap();
    refused(one.write(b"late"), ErrorKind::BrokenPipe, &["this side shut the stream down"]);
    let (mut one, other) = pair();
    drop(other);
    let mut ended = None;
    until("a write that fails", || {
        ended = one.write(b"late").err();
        ended.is_some()
    });
    let text = chain(&ended.expect("just seen"));
    assert!(text.contains("the other side closed the stream") && !text.contains("this side"), "{text}");
}

#[test]
fn a_port_at_which_nobody_answers_times_out() {
    let stage = Stage::open();
    // Somebody who does not understand a word.
    let deaf = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = format!("udp:{}", deaf.local_addr().unwrap());
    let since = Instant::now();
    let timeout = Duration::from_millis(300);
    refused(wired(&stage, sealed()).connect_timeout(&address, timeout), ErrorKind::TimedOut, &[]);
    let took = since.elapsed();
    assert!(took >= timeout && took < timeout * 5, "{took:?}");
}

#[test]
fn a_listener_that_does_not_accept_lets_callers_time_out() {
    let stage = Stage::open();
    let reaches = |config| {
        let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
        [Reach::on_one_host(&stage, config), Reach::by_wire(&stage, &wire, config)]
    };
    for strategy in STRATEGIES {
        for reach in reaches(SockConfig { strategy, ..SockConfig::default() }) {
            let since = Instant::now();
            let timeout = Duration::from_millis(200);
            refused(reach.here.connect_timeout(&reach.address, timeout), ErrorKind::TimedOut, &[]);
            let took = since.elapsed();
            assert!(took >= timeout && took < timeout * 5, "{took:?} at {}", reach.address);
            // Who gave up is not accepted, or is gone at once; who calls next is served.
            let [mut one, _other] = std::thread::scope(|scope| {
                let accepted = scope.spawn(|| {
                    loop {
                        let (mut stream, _) = reach.listener.accept().unwrap();
                        let mut greeting = [0; 5];
                        if stream.read_exact(&mut greeting).is_ok() {
                            assert_eq!(&greeting, b"hello");
                            break stream;
                        }
                    }
                });
                let mut one = reach.here.connect(&reach.address).unwrap();
                one.write_all(b"hello").unwrap();
                [one, accepted.join().unwrap()]
            });
            one.write_all(b"more").unwrap();
        }
    }
}

#[test]
fn a_name_or_a_port_is_in_use_once() {
    let stage = Stage::open();
    let (here, there) = (sockets(&stage), sockets(&stage));
    let listener = here.bind("shm:taken").unwrap();
    refused(here.bind("shm:taken"), ErrorKind::AddrInUse, &["taken"]);
    refused(there.bind("shm:taken"), ErrorKind::AddrInUse, &["taken"]);
    drop(listener);
    drop(there.bind("shm:taken").unwrap());
    let (here, there) = (wired(&stage, sealed()), wired(&stage, sealed()));
    let listener = here.bind("udp:127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    assert!(!address.ends_with(":0"), "the port that was chosen is told: {address}");
    refused(there.bind(&address), ErrorKind::AddrInUse, &[]);
}

#[test]
fn other_hosts_are_not_reached_without_a_key_or_with_a_wrong_one() {
    let stage = Stage::open();
    let none = wired(&stage, Keys::insecure());
    refused(none.bind("udp:0.0.0.0:0"), ErrorKind::PermissionDenied, &["key"]);
    refused(none.connect("udp:192.0.2.1:7"), ErrorKind::PermissionDenied, &["key"]);
    let there = wired(&stage, sealed());
    let listener = there.bind("udp:127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    refused(sockets(&stage).connect(&address), ErrorKind::Unsupported, &[]);
    let other = wired(&stage, Keys::new(highwire_proto::ClusterKey::from_random([10; 32])));
    let strange = other.connect_timeout(&address, Duration::from_millis(300));
    refused(strange, ErrorKind::TimedOut, &[]);
}

#[test]
fn accepting_without_waiting_says_that_nobody_calls() {
    let stage = Stage::open();
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    let config = SockConfig::default();
    for reach in [Reach::on_one_host(&stage, config), Reach::by_wire(&stage, &wire, config)] {
        reach.listener.set_nonblocking(true).unwrap();
        refused(reach.listener.accept(), ErrorKind::WouldBlock, &[]);
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| reach.here.connect(&reach.address).unwrap());
            let mut accepted = None;
            until("somebody who calls", || {
                match reach.listener.accept() {
                    Ok((stream, _)) => accepted = Some(stream),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                }
                accepted.is_some()
            });
            let (here, there) = (caller.join().unwrap(), accepted.unwrap());
            // The listener does not wait; what it accepts does, until it is told otherwise.
            there.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            let since = Instant::now();
            refused((&there).read(&mut [0]), ErrorKind::WouldBlock, &[]);
            assert!(since.elapsed() >= Duration::from_millis(20));
            drop(here);
        });
        refused(reach.listener.accept(), ErrorKind::WouldBlock, &[]);
    }
}

#[test]
fn a_time_out_of_zero_is_refused_as_in_std() {
    let stage = Stage::open();
    let [one, _other] = Reach::on_one_host(&stage, SockConfig::default()).pair();
    refused(one.set_read_timeout(Some(Duration::ZERO)), ErrorKind::InvalidInput, &["set_nonblocking"]);
    refused(one.set_write_timeout(Some(Duration::ZERO)), ErrorKind::InvalidInput, &["set_nonblocking"]);
    assert_eq!((one.read_timeout().unwrap(), one.write_timeout().unwrap()), (None, None));
    one.set_read_timeout(Some(A_WHILE)).unwrap();
    assert_eq!(one.read_timeout().unwrap(), Some(A_WHILE));
    one.set_read_timeout(None).unwrap();
    assert_eq!(one.read_timeout().unwrap(), None);
}

#[test]
fn sockets_that_cannot_work_are_refused_with_what_would() {
    let stage = Stage::open();
    let nic = Nic::with(stage.config()).unwrap();
    let usual = SockConfig::default();
    for (bad, says) in [
        (SockConfig { window: 0, ..usual }, "window = 0"),
        (SockConfig { window: 64, ..usual }, "1 to 62"),
        (SockConfig { acknowledge: 0, ..usual }, "acknowledge = 0"),
        (SockConfig { acknowledge: 33, ..usual }, "1 to the window, 32"),
        (SockConfig { chunk_bytes: 255, ..usual }, "256"),
        (SockConfig { chunk_bytes: 2 << 20, ..usual }, "1048576"),
    ] {
        refused(Sockets::with(&nic, bad), ErrorKind::InvalidInput, &[says]);
    }
}

#[test]
fn a_forked_child_is_refused_and_its_parent_does_not_notice() {
    let stage = Stage::open();
    for strategy in STRATEGIES {
        let reach = Reach::on_one_host(&stage, SockConfig { strategy, ..SockConfig::default() });
        let [one, other] = reach.pair();
        (&other).write_all(b"for the parent").unwrap();
        let everything = (reach, one, other);
        let (_reach, one, other) = in_child(everything, |(reach, one, other)| {
            refused((&one).read(&mut [0; 4]), ErrorKind::Unsupported, &["child"]);
            refused(one.peek(&mut [0; 4]), ErrorKind::Unsupported, &["child"]);
            refused((&one).write(b"no"), ErrorKind::Unsupported, &["child"]);
            refused(one.shutdown(Shutdown::Write), ErrorKind::Unsupported, &["child"]);
            refused(reach.here.connect(&reach.address), ErrorKind::Unsupported, &["child"]);
            refused(reach.listener.accept(), ErrorKind::Unsupported, &["child"]);
            drop((one, other, reach));
        });
        let mut bytes = [0; 14];
        (&one).read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"for the parent");
        (&one).write_all(b"thanks").unwrap();
        (&other).read_exact(&mut bytes[..6]).unwrap();
        drop(one);
        assert_eq!((&other).read(&mut bytes).unwrap(), 0);
    }
}

#[test]
fn other_users_are_denied() {
    let stage = Stage::open();
    let address = |stage: &Stage| format!("shm:{}", stage.open_dir().join("door").display());
    stage.role("nobody", |stage| {
        // The runtime directory of the stage is another user's.
        refused(sockets(stage).connect(&address(stage)), ErrorKind::PermissionDenied, &[]);
        stage.mark("refused");
    });
    if !is_root("that streams of other users are denied") {
        return;
    }
    let here = sockets(&stage);
    let listener = here.bind(&address(&stage)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let nobody = stage.start_as("nobody", 65534);
    until("the refusal", || {
        refused(listener.accept(), ErrorKind::WouldBlock, &[]);
        stage.is_marked("refused")
    });
    nobody.finish();
}

#[test]
fn addresses_are_told_and_can_be_called() {
    let stage = Stage::open();
    let [one, other] = Reach::on_one_host(&stage, SockConfig::default()).pair();
    assert!(one.peer_addr().unwrap().to_string().starts_with("shm:reach-"));
    assert_eq!(other.local_addr().unwrap(), one.peer_addr().unwrap());
    let process = format!("process {} ", std::process::id());
    assert!(other.peer_addr().unwrap().to_string().starts_with(&process));
    assert!(one.local_addr().unwrap().to_string().starts_with(&process));
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    let [one, other] = Reach::by_wire(&stage, &wire, SockConfig::default()).pair();
    assert_eq!(one.peer_addr().unwrap(), other.local_addr().unwrap());
    assert_eq!(other.peer_addr().unwrap(), one.local_addr().unwrap());
    assert!(one.peer_addr().unwrap().to_string().starts_with("udp:127.0.0.1:"));
}

/// Whoever speaks to a stream without being one cannot make it take more than a part of a stream.
#[test]
fn a_message_that_no_stream_sends_ends_the_stream() {
    let stage = Stage::open();
    let wire = WireConfig { keys: sealed(), ..WireConfig::default() };
    let reach = Reach::by_wire(&stage, &wire, SockConfig::default());
    let stranger = wire_nic(&stage, &wire);
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| stranger.connect(&reach.address).unwrap());
        let (mut stream, _) = reach.listener.accept().unwrap();
        let mut vi = caller.join().unwrap();
        vi.send_bytes(1, b"some").unwrap();
        vi.send_bytes(2, &vec![0; (1 << 20) + 1]).unwrap();
        let mut bytes = [0; 100];
        assert_eq!(stream.read(&mut bytes).unwrap(), 4);
        refused(stream.read(&mut bytes), ErrorKind::ConnectionReset, &["1048577"]);
    });
}
