//! Processes of other users: refused, unless each side says otherwise. Needs root to have any.

use crate::support::seeded::{bytes, verify};
use crate::support::{Line, PATIENCE, Stage, buffer, buffer_of, is_root, until};
use highwire_vi::{
    AcceptError, Allow, ConnectError, Failure, ListenError, Message, Nic, Operation, Path, Pulses, RdmaRead, Receive,
    Refusal, RemoteKey, RuntimeDirError, ViOptions,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use std::time::{Duration, Instant};

const NOBODY: u32 = 65534;

/// A Nic of whoever asks: the stage's runtime directory is the test's own.
fn nic(stage: &Stage) -> Nic {
    stage.nic()
}

fn address(stage: &Stage) -> String {
    format!("shm:{}", stage.open_dir().join("door").display())
}

/// The connecting side's outcome, played by another user against a listener that allows these.
fn nobody_connects_to(allow: Allow, play: fn(&Stage)) {
    let stage = Stage::open();
    stage.role("nobody", play);
    if !is_root("whom a listener admits") {
        return;
    }
    let nic = nic(&stage);
    let listener = nic.listen_with(&address(&stage), allow).unwrap();
    let nobody = stage.start_as("nobody", NOBODY);
    let accepted = loop {
        match listener.accept(Duration::from_millis(50)) {
            Ok(vi) => break Some(vi),
            Err(AcceptError::TimedOut(_)) if stage.is_marked("refused") => break None,
            Err(AcceptError::TimedOut(_)) => {}
            Err(error) => panic!("{error}"),
        }
    };
    if let Some(vi) = accepted {
        let mut line = Line::new(vi);
        assert_eq!(
            (line.vi.peer().process().unwrap().uid, line.vi.peer().process().unwrap().pid),
            (Some(NOBODY), Some(nobody.pid().unsigned_abs())),
            "as the kernel says"
        );
        for (seed, size) in [50, 9000, 70_000].into_iter().enumerate() {
            line.vi.post_recv(Receive::new(0).into(buffer(&nic, size))).unwrap();
            verify(seed as u64, &line.received().into_buffer().unwrap());
            line.vi.post_send(Message::new(0).payload(buffer_of(&nic, &bytes(seed as u64, size)))).unwrap();
            line.sent();
        }
        line.vi.disconnect(PATIENCE).unwrap();
    }
    nobody.finish();
}

fn exchanges(stage: &Stage) {
    let nic = nic(stage);
    let options = ViOptions::new().allow(Allow::Users(vec![0]));
    let mut line = Line::connect_with(&nic, &address(stage), &options);
    assert_eq!(line.vi.peer().process().unwrap().uid, Some(0));
    for (seed, size) in [50, 9000, 70_000].into_iter().enumerate() {
        line.vi.post_send(Message::new(0).payload(buffer_of(&nic, &bytes(seed as u64, size)))).unwrap();
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, size))).unwrap();
        verify(seed as u64, &line.received().into_buffer().unwrap());
    }
    assert_eq!(line.end().0, Failure::PeerClosed);
}

#[test]
fn a_user_that_is_named_is_admitted() {
    nobody_connects_to(Allow::Users(vec![NOBODY]), exchanges);
}

#[test]
fn everyone_is_admitted_where_everyone_is_allowed() {
    nobody_connects_to(Allow::Everyone, exchanges);
}

#[test]
fn a_user_that_is_not_named_is_refused_by_the_listener() {
    nobody_connects_to(Allow::Users(vec![4711]), |stage| {
        let options = ViOptions::new().allow(Allow::Everyone);
        let error = nic(stage).connect_with(&address(stage), &options).unwrap_err();
        assert!(matches!(&error, ConnectError::Refused { reason: Refusal::User, .. }), "{error}");
        assert!(error.to_string().contains("this user is not allowed"), "{error}");
        stage.mark("refused");
    });
}

#[test]
fn a_listener_for_its_own_user_is_closed_to_others() {
    nobody_connects_to(Allow::SameUser, |stage| {
        let options = ViOptions::new().allow(Allow::Everyone);
        let error = nic(stage).connect_with(&address(stage), &options).unwrap_err();
        assert!(matches!(&error, ConnectError::Denied { .. }), "{error}");
        assert!(error.to_string().contains("the listener must allow it"), "{error}");
        stage.mark("refused");
    });
}

#[test]
fn a_listener_of_another_user_is_not_trusted_by_default() {
    nobody_connects_to(Allow::Everyone, |stage| {
        let error = nic(stage).connect(&address(stage)).unwrap_err();
        assert!(matches!(&error, ConnectError::NotAllowed { uid: 0, .. }), "{error}");
        assert!(error.to_string().contains("served by user 0"), "{error}");
        stage.mark("refused");
    });
}

#[test]
fn memory_that_another_user_never_wrote_to_is_read_as_zeros_and_costs_nothing() {
    const BYTES: usize = 8 << 20;
    let stage = Stage::open();
    stage.role("nobody", |stage| {
        let nic = nic(stage);
        let options = ViOptions::new().allow(Allow::Everyone).path(Path::Referenced).pulses(Pulses::Whole);
        let mut line = Line::connect_with(&nic, &address(stage), &options);
        let region = nic.register(2 * BYTES).unwrap();
        for (number, control) in [(0, None), (1, None), (2, Some(line.vi.grant(&region).unwrap().to_bytes()))] {
            let buffer = region.slice(number % 2 * BYTES..(number % 2 + 1) * BYTES).unwrap();
            let message = Message::new(0).payload(buffer);
            line.vi.post_send(control.iter().fold(message, |message, key| message.control(key))).unwrap();
            line.sent();
        }
        assert_eq!(line.end().0, Failure::PeerClosed);
        let taken = rustix::fs::fstat(region.descriptor().unwrap()).unwrap().st_blocks;
        assert_eq!(taken, 0, "blocks that were taken for what nobody wrote");
    });
    if !is_root("a sender of another user") {
        return;
    }
    let nic = nic(&stage);
    let listener = nic.listen_with(&address(&stage), Allow::Everyone).unwrap();
    let nobody = stage.start_as("nobody", NOBODY);
    let mut line = Line::accept(&listener);
    line.vi.post_recv(Receive::new(0).in_place()).unwrap();
    let payload = line.received().into_in_place().unwrap();
    assert_eq!((payload.len(), payload.byte(BYTES - 1)), (BYTES, 0));
    let mut part = vec![1; BYTES / 2];
    payload.copy_to(5, &mut part);
    assert!(part.iter().all(|byte| *byte == 0));
    drop(payload);
    for _ in 0..2 {
        line.vi.post_recv(Receive::new(0).into(buffer_of(&nic, &vec![1; BYTES]))).unwrap();
        let done = line.received();
        let key = RemoteKey::from_bytes(&done.control);
        assert!(done.into_buffer().unwrap().iter().all(|byte| *byte == 0));
        let Some(key) = key else { continue };
        line.vi.rdma_read(RdmaRead::new(1, key, 3, buffer_of(&nic, &vec![1; BYTES]))).unwrap();
        assert!(line.next(Operation::RdmaRead).into_buffer().unwrap().iter().all(|byte| *byte == 0));
    }
    line.vi.disconnect(PATIENCE).unwrap();
    nobody.finish();
}

#[test]
fn the_runtime_directory_of_another_user_is_refused() {
    let stage = Stage::open();
    stage.role("nobody", |stage| {
        let nic = nic(stage);
        let error = nic.listen("shm:name").unwrap_err();
        let not_ours =
            matches!(&error, ListenError::RuntimeDir(RuntimeDirError::NotOurs { owner: 0, user: NOBODY, .. }));
        assert!(not_ours, "{error}");
        assert!(error.to_string().contains("HIGHWIRE_RUNTIME_DIR"), "{error}");
        let error = nic.connect("shm:name").unwrap_err();
        assert!(matches!(&error, ConnectError::RuntimeDir(RuntimeDirError::NotOurs { .. })), "{error}");
    });
    if is_root("the runtime directory of another user") {
        stage.start_as("nobody", NOBODY).finish();
    }
}

#[test]
fn more_users_than_allowed_are_refused_and_the_first_stay() {
    let stage = Stage::open();
    stage.role("nobody", |stage| {
        let options = ViOptions::new().allow(Allow::Everyone);
        let error = nic(stage).connect_with(&address(stage), &options).unwrap_err();
        assert!(matches!(&error, ConnectError::Refused { reason: Refusal::NoRoom, .. }), "{error}");
        stage.mark("refused");
    });
    stage.role("friend", |stage| {
        let nic = nic(stage);
        let mut line = Line::connect(&nic, &address(stage));
        stage.await_mark("refused");
        line.vi.send_bytes(1, b"still here").unwrap();
        line.vi.disconnect(PATIENCE).unwrap();
    });
    if !is_root("a limit of users") {
        return;
    }
    let nic = stage.nic_with(|config| config.users_max = 1);
    let listener = nic.listen_with(&address(&stage), Allow::Everyone).unwrap();
    let friend = stage.start("friend");
    let mut line = Line::accept(&listener);
    let nobody = stage.start_as("nobody", NOBODY);
    while !stage.is_marked("refused") {
        assert!(matches!(listener.accept(Duration::from_millis(20)), Err(AcceptError::TimedOut(_))));
    }
    nobody.finish();
    line.vi.post_recv(Receive::new(0).into(buffer(&nic, 16))).unwrap();
    assert_eq!(line.received().length, 10);
    friend.finish();
}

#[test]
fn a_killed_process_of_another_user_is_noticed() {
    let stage = Stage::open();
    stage.role("nobody", |stage| {
        let nic = nic(stage);
        let options = ViOptions::new().allow(Allow::Users(vec![0])).path(Path::Referenced);
        let mut line = Line::connect_with(&nic, &address(stage), &options);
        line.vi.post_send(Message::new(1).payload(buffer(&nic, 5000))).unwrap();
        line.vi.wait(Duration::from_secs(1000)).unwrap();
        std::thread::sleep(Duration::from_secs(1000));
    });
    if !is_root("the death of another user's process") {
        return;
    }
    let nic = nic(&stage);
    let listener = nic.listen_with(&address(&stage), Allow::Everyone).unwrap();
    let mut nobody = stage.start_as("nobody", NOBODY);
    let mut line = Line::accept(&listener);
    line.vi.post_recv(Receive::new(1).into(buffer(&nic, 5000))).unwrap();
    line.received();
    line.vi.post_recv(Receive::new(2).into(buffer(&nic, 5000))).unwrap();
    nobody.kill();
    let (failure, left) = line.end();
    assert_eq!((failure, left.len()), (Failure::PeerDied, 1));
}

#[test]
fn silent_callers_of_another_user_keep_nobody_out() {
    let stage = Stage::open();
    stage.role("nobody", |stage| {
        let path = stage.open_dir().join("door");
        let call = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).ok().map(|()| socket)
        };
        let mut silent = Vec::new();
        // What was dropped calls again, all the time.
        while !stage.is_marked("over") {
            silent.retain(|socket| {
                let mut bytes = [0; 256];
                !matches!(rustix::net::recv(socket, &mut bytes, RecvFlags::empty()), Ok((0, _)) | Err(Errno::CONNRESET))
            });
            while silent.len() < 900
                && let Some(socket) = call()
            {
                silent.push(socket);
            }
            stage.mark("calling");
        }
    });
    if !is_root("silent callers of another user") {
        return;
    }
    let nic = nic(&stage);
    let listener = nic.listen_with(&address(&stage), Allow::Everyone).unwrap();
    let nobody = stage.start_as("nobody", NOBODY);
    until("they call", || stage.is_marked("calling"));
    let slowest = std::thread::scope(|scope| {
        let honest = scope.spawn(|| {
            let each = (0..10).map(|_| {
                let began = Instant::now();
                let _vi = stage.nic().connect(&address(&stage)).unwrap();
                began.elapsed()
            });
            each.max()
        });
        (0..10).for_each(|_| drop(listener.accept(PATIENCE).unwrap()));
        honest.join().unwrap()
    });
    stage.mark("over");
    assert!(slowest < Some(Duration::from_secs(1)), "{slowest:?}");
    nobody.finish();
}
