//! Streams between processes in namespaces of their own, as containers have them. Needs root, and `unshare` of util-linux.

use crate::support::seeded::{bytes, verify};
use crate::support::wire::STRATEGIES;
use crate::support::{CONTAINER, Stage, is_root, until};
use highwire_sock::{SockAddress, SockConfig, Sockets, Strategy, Stream};
use highwire_vi::Nic;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;

const SIZES: [usize; 3] = [1, 5000, 4_000_000];

fn sockets(stage: &Stage, strategy: Strategy) -> Sockets {
    let nic = Nic::with(stage.config()).unwrap();
    Sockets::with(&nic, SockConfig { strategy, ..SockConfig::default() }).unwrap()
}

fn strategy_told(stage: &Stage) -> Strategy {
    let name = stage.argument();
    STRATEGIES.into_iter().find(|strategy| format!("{strategy:?}") == name).expect("a strategy")
}

/// Writes and has its bytes back, then closes and reads to the end.
fn connects(stage: &Stage, strategy: Strategy) {
    let sockets = sockets(stage, strategy);
    let mut stream = None;
    until("a listener", || match sockets.connect("shm:echo") {
        Ok(connected) => {
            stream = Some(connected);
            true
        }
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => false,
        Err(error) => panic!("{error}"),
    });
    let mut stream: Stream = stream.expect("just connected");
    let mut writer = stream.try_clone().unwrap();
    for (seed, size) in SIZES.into_iter().enumerate() {
        let mut back = vec![0; size];
        std::thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&bytes(seed as u64, size)).unwrap());
            stream.read_exact(&mut back).unwrap();
        });
        verify(seed as u64, &back);
    }
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(stream.read(&mut [0; 10]).unwrap(), 0, "the end");
}

fn listens(stage: &Stage, strategy: Strategy) -> SockAddress {
    let listener = sockets(stage, strategy).bind("shm:echo").unwrap();
    let (mut stream, address) = listener.accept().unwrap();
    let mut piece = vec![0; 64 << 10];
    loop {
        match stream.read(&mut piece).unwrap() {
            0 => return address,
            length => stream.write_all(&piece[..length]).unwrap(),
        }
    }
}

#[test]
fn streams_cross_namespaces_in_both_directions_and_between_two_containers() {
    let stage = Stage::open();
    stage.role("connects", |stage| connects(stage, strategy_told(stage)));
    stage.role("listens", |stage| {
        let address = listens(stage, strategy_told(stage));
        assert_eq!(address, SockAddress::Process { pid: None, uid: Some(0) });
        assert_eq!(address.to_string(), "a process of user 0 in another PID namespace");
    });
    if !is_root("streams between namespaces") {
        return;
    }
    for strategy in STRATEGIES {
        let name = format!("{strategy:?}");
        let other = stage.start_in(&CONTAINER, "connects", &name);
        let address = listens(&stage, strategy);
        assert!(matches!(address, SockAddress::Process { pid: Some(_), uid: Some(0) }), "{address:?}");
        other.finish();
        let other = stage.start_in(&CONTAINER, "listens", &name);
        connects(&stage, strategy);
        other.finish();
        let [one, other] = ["listens", "connects"].map(|role| stage.start_in(&CONTAINER, role, &name));
        other.finish();
        one.finish();
    }
}
