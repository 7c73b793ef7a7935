//! Processes in namespaces of their own, as containers have them: of PIDs, mounts, users and networks. Needs root, and
//! `unshare` of util-linux.

use crate::support::seeded::{bytes, verify};
use crate::support::{A_WHILE, CONTAINER, Line, PATIENCE, Stage, buffer, buffer_of, is_root, until};
use highwire_vi::{
    AcceptError, Allow, ConnectError, Failure, ListenError, Message, Nic, Path, Receive, Refusal, RuntimeDirError,
    ViListener, ViOptions,
};
use std::time::{Duration, Instant};

/// Namespaces that containers of one user share with the host, and those that they do not.
const NAMESPACES: [&[&str]; 5] =
    [&["--pid", "--mount-proc"], &["--mount"], &["--net"], &["--user", "--map-current-user"], &CONTAINER];
/// Users that no namespace made by `--map-current-user` maps.
const STRANGERS: [u32; 2] = [4711, 4712];
const SIZES: [usize; 4] = [50, 9000, 70_000, 3_000_000];

/// Sends messages by every path and takes their echoes, awake and asleep.
fn sends(nic: &Nic, line: &mut Line) {
    for (seed, size) in SIZES.into_iter().enumerate() {
        line.vi.post_recv(Receive::new(0).into(buffer(nic, size))).unwrap();
        line.vi.post_send(Message::new(0).payload(buffer_of(nic, &bytes(seed as u64, size)))).unwrap();
        line.sent();
        verify(seed as u64, &line.received().into_buffer().unwrap());
        // Long enough for the other side to fall asleep.
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn echoes(nic: &Nic, line: &mut Line) {
    for size in SIZES {
        line.vi.post_recv(Receive::new(0).into(buffer(nic, size))).unwrap();
        let came = line.received().into_buffer().unwrap();
        line.vi.post_send(Message::new(0).payload(came)).unwrap();
        line.sent();
    }
}

/// Two VIs, of which the second goes by what the first has brought about, to a listener that echoes.
fn connects(stage: &Stage) {
    let nic = stage.nic();
    let mut first = connect_when_there(&nic, "shm:echo", &ViOptions::new());
    sends(&nic, &mut first);
    let mut second = Line::connect_with(&nic, "shm:echo", &ViOptions::new().path(Path::Referenced));
    sends(&nic, &mut second);
    sends(&nic, &mut first);
    second.vi.disconnect(PATIENCE).unwrap();
    first.vi.disconnect(PATIENCE).unwrap();
}

fn listens(stage: &Stage) {
    let nic = stage.nic();
    let listener = nic.listen("shm:echo").unwrap();
    let mut first = Line::accept(&listener);
    echoes(&nic, &mut first);
    let mut second = Line::accept_with(&listener, &ViOptions::new().path(Path::Referenced));
    echoes(&nic, &mut second);
    echoes(&nic, &mut first);
    assert_eq!(second.end().0, Failure::PeerClosed);
    assert_eq!(first.end().0, Failure::PeerClosed);
}

fn connect_when_there(nic: &Nic, address: &str, options: &ViOptions<'_>) -> Line {
    let mut vi = None;
    until("a listener", || match nic.connect_with(address, options) {
        Ok(connected) => {
            vi = Some(connected);
            true
        }
        Err(ConnectError::NobodyThere { .. }) => false,
        Err(error) => panic!("{error}"),
    });
    Line::new(vi.expect("just connected"))
}

#[test]
fn messages_cross_namespaces_of_every_kind_in_both_directions() {
    let stage = Stage::open();
    stage.role("connects", connects);
    stage.role("listens", listens);
    if !is_root("messages between namespaces") {
        return;
    }
    for namespaces in NAMESPACES {
        let other = stage.start_in(namespaces, "connects", "");
        listens(&stage);
        other.finish();
        let other = stage.start_in(namespaces, "listens", "");
        connects(&stage);
        other.finish();
    }
}

/// Neither has a number in the namespace of the other.
#[test]
fn messages_go_between_two_containers() {
    let stage = Stage::open();
    stage.role("connects", connects);
    stage.role("listens", listens);
    if !is_root("messages between two containers") {
        return;
    }
    let one = stage.start_in(&CONTAINER, "listens", "");
    let other = stage.start_in(&CONTAINER, "connects", "");
    other.finish();
    one.finish();
}

#[test]
fn a_peer_that_has_no_number_here_is_named_without_one() {
    let stage = Stage::open();
    stage.role("listens", |stage| {
        let nic = stage.nic();
        let listener = nic.listen("shm:echo").unwrap();
        let line = Line::accept(&listener);
        let peer = line.vi.peer().process().unwrap();
        assert_eq!((peer.pid, peer.uid), (None, Some(0)));
        assert_eq!(peer.to_string(), "a process of user 0 in another PID namespace");
        stage.mark("seen");
    });
    if !is_root("the name of a process in another PID namespace") {
        return;
    }
    let other = stage.start_in(&["--pid", "--mount-proc"], "listens", "");
    let nic = stage.nic();
    let line = connect_when_there(&nic, "shm:echo", &ViOptions::new());
    let peer = line.vi.peer().process().unwrap();
    assert!(peer.pid.is_some_and(|pid| pid != other.pid() as u32) && peer.uid == Some(0), "{peer:?}");
    stage.await_mark("seen");
    other.finish();
}

/// In both directions: seen from the host, where it has a number, and from a container, where it has none.
#[test]
fn a_death_in_another_pid_namespace_is_noticed() {
    let stage = Stage::open();
    stage.role("sleeps", |stage| {
        let nic = stage.nic();
        let _line = connect_when_there(&nic, "shm:echo", &ViOptions::new());
        stage.mark("connected");
        std::thread::sleep(Duration::from_secs(1000));
    });
    stage.role("listens", |stage| {
        let nic = stage.nic();
        let listener = nic.listen("shm:echo").unwrap();
        let mut line = Line::accept(&listener);
        stage.mark("accepted");
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, 100))).unwrap();
        let (failure, left) = line.end();
        assert_eq!((failure, left.len()), (Failure::PeerDied, 1));
        stage.mark("noticed");
    });
    if !is_root("a death in another PID namespace") {
        return;
    }
    let listens = stage.start_in(&CONTAINER, "listens", "");
    let mut sleeps = stage.start_in(&CONTAINER, "sleeps", "");
    stage.await_mark("accepted");
    stage.await_mark("connected");
    sleeps.kill();
    let since = Instant::now();
    stage.await_mark("noticed");
    assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
    listens.finish();
}

/// Two containers on a kernel before 6.5, played by a filter of system calls that refuses `SO_PEERPIDFD`: each VI makes a
/// pair of its own, and a death is told by the hang-up.
#[test]
fn without_pidfds_of_peers_messages_go_between_containers_and_a_death_is_noticed() {
    let stage = Stage::open();
    stage.role("connects", |stage| {
        let courier = std::os::unix::net::UnixStream::pair().unwrap().0;
        let nowhere = highwire_mem::Credentials { pid: None, uid: None, gid: None };
        assert!(highwire_mem::peer_pidfd(&courier, nowhere).unwrap().is_none(), "the filter is not there");
        connects(stage);
    });
    stage.role("sleeps", |stage| {
        let nic = stage.nic();
        let _line = connect_when_there(&nic, "shm:echo", &ViOptions::new());
        stage.mark("connected");
        std::thread::sleep(Duration::from_secs(1000));
    });
    stage.role("listens", |stage| {
        listens(stage);
        let nic = stage.nic();
        let listener = nic.listen("shm:echo").unwrap();
        let mut line = Line::accept(&listener);
        stage.mark("accepted");
        assert_eq!(line.end().0, Failure::PeerDied);
    });
    if !is_root("containers on an older kernel") {
        return;
    }
    let by = ["python3", "-c", WITHOUT_PEER_PIDFDS];
    let listens = stage.start_in_by(&CONTAINER, &by, "listens", "");
    stage.start_in_by(&CONTAINER, &by, "connects", "").finish();
    let mut sleeps = stage.start_in_by(&CONTAINER, &by, "sleeps", "");
    stage.await_mark("accepted");
    stage.await_mark("connected");
    sleeps.kill();
    listens.finish();
}

/// Becomes a program for which the option does not exist.
const WITHOUT_PEER_PIDFDS: &str = r#"
import ctypes, os, platform, struct, sys
GETSOCKOPT = {"x86_64": 55, "aarch64": 209}[platform.machine()]
SO_PEERPIDFD, ENOPROTOOPT = 77, 92
LOAD, UNLESS, RETURN = 0x20, 0x15, 0x06
ERRNO, ALLOW = 0x50000, 0x7fff0000
NUMBER, OPTION = 0, 32
program = b"".join(struct.pack("HBBI", *instruction) for instruction in [
    (LOAD, 0, 0, NUMBER), (UNLESS, 0, 3, GETSOCKOPT),
    (LOAD, 0, 0, OPTION), (UNLESS, 0, 1, SO_PEERPIDFD),
    (RETURN, 0, 0, ERRNO | ENOPROTOOPT), (RETURN, 0, 0, ALLOW),
])
instructions = ctypes.create_string_buffer(program, len(program))
filter = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// A listener of user 0 in a namespace that maps no other user, for everyone: both strangers read as 65534 there.
fn serves_strangers(stage: &Stage, allow: Allow) -> (Nic, ViListener) {
    let nic = stage.nic_with(|config| config.users_max = 1);
    let listener = nic.listen_with(&address(stage), allow).unwrap();
    stage.mark("listens");
    (nic, listener)
}

fn address(stage: &Stage) -> String {
    format!("shm:{}", stage.open_dir().join("door").display())
}

fn is_refused(stage: &Stage, reason: Refusal) {
    let options = ViOptions::new().allow(Allow::Users(vec![0]));
    let error = stage.nic().connect_with(&address(stage), &options).unwrap_err();
    assert!(matches!(&error, ConnectError::Refused { reason: found, .. } if *found == reason), "{error}");
}

/// With one shared, each could take the other's rings and count what wakes the other side.
#[test]
fn two_users_that_are_not_mapped_share_no_doorbell_page() {
    let stage = Stage::open();
    stage.role("listens", |stage| {
        let (nic, listener) = serves_strangers(stage, Allow::Everyone);
        let mut first = Line::accept(&listener);
        assert_eq!(first.vi.peer().process().unwrap().uid, None);
        stage.mark("accepted");
        while !stage.is_marked("refused") {
            assert!(matches!(listener.accept(Duration::from_millis(20)), Err(AcceptError::TimedOut(_))));
        }
        echoes(&nic, &mut first);
        // Its other VIs have the page that it has.
        let mut second = Line::accept(&listener);
        echoes(&nic, &mut second);
        assert_eq!((second.end().0, first.end().0), (Failure::PeerClosed, Failure::PeerClosed));
        drop((first, second));
        stage.mark("left");
        // Its page is not in the way of the next one.
        let mut next = Line::accept(&listener);
        echoes(&nic, &mut next);
        assert_eq!(next.end().0, Failure::PeerClosed);
    });
    let options = || ViOptions::new().allow(Allow::Users(vec![0]));
    stage.role("first", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect_with(&nic, &address(stage), &options());
        stage.await_mark("refused");
        sends(&nic, &mut line);
        let mut second = Line::connect_with(&nic, &address(stage), &options());
        sends(&nic, &mut second);
        second.vi.disconnect(PATIENCE).unwrap();
        line.vi.disconnect(PATIENCE).unwrap();
    });
    stage.role("second", |stage| {
        is_refused(stage, Refusal::NoRoom);
        stage.mark("refused");
        stage.await_mark("left");
        let nic = stage.nic();
        let mut line = Line::connect_with(&nic, &address(stage), &options());
        sends(&nic, &mut line);
        line.vi.disconnect(PATIENCE).unwrap();
    });
    if !is_root("users that a namespace does not map") {
        return;
    }
    stage.open_dir();
    let listens = stage.start_in(&["--user", "--map-current-user"], "listens", "");
    stage.await_mark("listens");
    let first = stage.start_as("first", STRANGERS[0]);
    stage.await_mark("accepted");
    let second = stage.start_as("second", STRANGERS[1]);
    first.finish();
    second.finish();
    listens.finish();
}

#[test]
fn a_user_that_is_not_mapped_is_none_that_is_named() {
    let stage = Stage::open();
    stage.role("listens", |stage| {
        let (_nic, listener) = serves_strangers(stage, Allow::Users(vec![65_534]));
        while !stage.is_marked("refused") {
            let accepted = listener.accept(Duration::from_millis(20));
            assert!(matches!(accepted, Err(AcceptError::TimedOut(_))), "{accepted:?}");
        }
    });
    stage.role("stranger", |stage| {
        is_refused(stage, Refusal::User);
        stage.mark("refused");
    });
    if !is_root("users that a namespace does not map") {
        return;
    }
    stage.open_dir();
    let listens = stage.start_in(&["--user", "--map-current-user"], "listens", "");
    stage.await_mark("listens");
    stage.start_as("stranger", STRANGERS[0]).finish();
    listens.finish();
}

/// All that it sees is 65534, itself too: whose the directory and the listener are cannot be known.
#[test]
fn a_process_whose_own_user_is_not_mapped_trusts_nobody_by_user() {
    let stage = Stage::open();
    stage.role("nameless", |stage| {
        let nic = stage.nic();
        let error = nic.listen("shm:name").unwrap_err();
        assert!(matches!(&error, ListenError::RuntimeDir(RuntimeDirError::OwnerNotMapped { .. })), "{error}");
        let error = nic.connect(&address(stage)).unwrap_err();
        assert!(matches!(&error, ConnectError::UserNotMapped { .. }), "{error}");
        assert!(error.to_string().contains("uid_map"), "{error}");
        let mut line = Line::connect_with(&nic, &address(stage), &ViOptions::new().allow(Allow::Everyone));
        sends(&nic, &mut line);
        line.vi.disconnect(PATIENCE).unwrap();
    });
    if !is_root("a process whose user is not mapped") {
        return;
    }
    let nic = stage.nic();
    let listener = nic.listen_with(&address(&stage), Allow::Everyone).unwrap();
    let nameless = stage.start_in(&["--user"], "nameless", "");
    let mut line = loop {
        match listener.accept(A_WHILE) {
            Ok(vi) => break Line::new(vi),
            Err(AcceptError::TimedOut(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    echoes(&nic, &mut line);
    assert_eq!(line.end().0, Failure::PeerClosed);
    nameless.finish();
}
