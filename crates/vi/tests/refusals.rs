//! Connections and listeners that do not come about, each with its reason and what to do.

use crate::support::liar::{ACCEPT, Caller, GREETING, Letter, Liar, Props, REFUSE};
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, open_descriptors, until};
use highwire_mem::{CourierError, CourierListener};
use highwire_vi::{
    AcceptError, AddressError, ConnectError, ListenError, Nic, NicError, Refusal, RegionError, RuntimeDirError, Vi,
    ViListener, ViOptions, WaitError,
};
use rustix::process::{Resource, Rlimit};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn limits_that_cannot_be_are_refused_by_name_and_value() {
    let stage = Stage::open();
    let refused = |change: fn(&mut highwire_vi::Config)| {
        let mut config = stage.config();
        change(&mut config);
        let error = Nic::with(config).expect_err("an impossible configuration");
        assert!(matches!(error, NicError::Config { .. }), "{error}");
        error.to_string()
    };
    assert!(refused(|config| config.depth = 3).contains("powers of two from 2 to 4096"));
    assert!(refused(|config| config.loans = 8192).contains("powers of two from 2 to 4096"));
    assert!(refused(|config| config.region_bytes = 4096).contains("region_bytes = 4096"));
    assert!(refused(|config| config.payload_bytes_start = 5000).contains("payload_bytes_start = 5000"));
    assert!(refused(|config| config.payload_bytes_max = 4096).contains("payload_bytes_max = 4096"));
    assert!(refused(|config| config.users_max = 0).contains("users_max = 0"));
    assert!(refused(|config| config.users_max = 128).contains("from 1 to 127"));
    assert!(refused(|config| config.message_bytes_max = 1 << 32).contains("less than 4 GiB"));
    assert!(refused(|config| config.first_index = 1 << 62).contains("first_index"));
}

#[test]
fn addresses_that_are_none_are_refused_with_what_to_write() {
    let nic = Stage::open().nic();
    for address in ["echo", "tcp:host:80", ""] {
        let error = nic.connect(address).unwrap_err();
        assert!(matches!(&error, ConnectError::Address(AddressError::Scheme(_))), "{error}");
        assert!(error.to_string().contains("shm:NAME, shm:/PATH or udp:HOST:PORT"), "{error}");
    }
    for address in ["shm:", "shm:../up", "shm:.hidden", "shm:two words"] {
        let error = nic.listen(address).unwrap_err();
        assert!(matches!(&error, ListenError::Address(AddressError::Name(_))), "{error}");
        assert!(error.to_string().contains("1 to 64 letters"), "{error}");
    }
    let error = nic.connect("udp:127.0.0.1:7").unwrap_err();
    assert!(matches!(&error, ConnectError::NoWire(_)) && error.to_string().contains("highwire::Nic"), "{error}");
    assert!(matches!(nic.listen("udp:127.0.0.1:7"), Err(ListenError::NoWire(_))));
    let error = nic.listen(&format!("shm:/{}", "x".repeat(100))).unwrap_err();
    assert!(error.to_string().contains("101 bytes"), "{error}");
}

#[test]
fn a_runtime_directory_that_is_not_safe_is_refused_on_both_sides() {
    let stage = Stage::open();
    let with = |dir: PathBuf| stage.nic_with(|config| config.runtime_dir = Some(dir));
    let missing = with(stage.runtime_dir().join("missing"));
    let error = missing.listen("shm:x").unwrap_err();
    assert!(matches!(&error, ListenError::RuntimeDir(RuntimeDirError::Missing(_))), "{error}");
    assert!(
        error.to_string().contains("mkdir -m 700") && error.to_string().contains("HIGHWIRE_RUNTIME_DIR"),
        "{error}"
    );
    let error = missing.connect("shm:x").unwrap_err();
    assert!(matches!(&error, ConnectError::RuntimeDir(RuntimeDirError::Missing(_))), "{error}");
    let file = stage.runtime_dir().join("file");
    std::fs::write(&file, "").unwrap();
    let error = with(file).listen("shm:x").unwrap_err();
    assert!(matches!(&error, ListenError::RuntimeDir(RuntimeDirError::NotDirectory(_))), "{error}");
    let nic = stage.nic();
    std::fs::set_permissions(stage.runtime_dir(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = nic.connect("shm:x").unwrap_err();
    assert!(
        matches!(&error, ConnectError::RuntimeDir(RuntimeDirError::WritableByOthers { mode: 0o777, .. })),
        "{error}"
    );
    assert!(error.to_string().contains("chmod 700"), "{error}");
}

#[test]
fn a_path_that_is_something_else_is_neither_removed_nor_listened_at() {
    let stage = Stage::open();
    let nic = stage.nic();
    let file = stage.runtime_dir().join("precious");
    std::fs::write(&file, "content").unwrap();
    let error = nic.listen(&format!("shm:{}", file.display())).unwrap_err();
    assert!(matches!(&error, ListenError::NotSocket(path) if *path == file), "{error}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "content");
    let error = nic.listen("shm:/nowhere/at/all").unwrap_err();
    assert!(matches!(&error, ListenError::Io { .. }), "{error}");
    assert!(error.to_string().contains("cannot listen at \"/nowhere/at/all\""), "{error}");
}

#[test]
fn where_nobody_listens_or_answers_the_error_says_so() {
    let stage = Stage::open();
    let nic = stage.nic_with(|config| config.connect_timeout = A_WHILE);
    let error = nic.connect("shm:nobody").unwrap_err();
    assert!(matches!(&error, ConnectError::NobodyThere { .. }), "{error}");
    assert!(error.to_string().contains("start the other side first"), "{error}");
    let listener = nic.listen("shm:busy").unwrap();
    let start = Instant::now();
    let error = nic.connect("shm:busy").unwrap_err();
    assert!(matches!(&error, ConnectError::TimedOut { timeout, .. } if *timeout == A_WHILE), "{error}");
    assert!(error.to_string().contains("is its process accepting"), "{error}");
    assert!(start.elapsed() >= A_WHILE && start.elapsed() < PATIENCE);
    let start = Instant::now();
    let error = listener.accept(A_WHILE).unwrap_err();
    assert!(matches!(error, AcceptError::TimedOut(timeout) if timeout == A_WHILE), "{error}");
    assert!(start.elapsed() >= A_WHILE, "the one that gave up is not accepted");
}

/// The connecting side's error when the listener is this function.
fn answered_by(answer: impl FnOnce(CourierListener) + Send) -> ConnectError {
    let stage = Stage::open();
    let nic = stage.nic_with(|config| config.connect_timeout = Duration::from_millis(500));
    let before = open_descriptors();
    let listener = CourierListener::bind(&stage.runtime_dir().join("liar.sock"), 4).unwrap();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| answer(listener));
        nic.connect("shm:liar").expect_err("nothing comes of this")
    });
    // What its Nic keeps for a user: page, wire and ears.
    assert!(open_descriptors() <= before + 3, "descriptors are left of {error}");
    error
}

fn next_caller(listener: &CourierListener) -> Caller {
    let mut caller = None;
    until("a caller", || {
        caller = listener.accept().unwrap();
        caller.is_some()
    });
    Caller { courier: caller.unwrap() }
}

#[test]
fn a_listener_of_another_version_is_named_with_both_versions() {
    let error = answered_by(|listener| {
        let caller = next_caller(&listener);
        caller.say(&Letter { version: 9, ..Letter::honest(GREETING) }, &[]);
        std::thread::sleep(A_WHILE);
    });
    assert!(matches!(&error, ConnectError::Version { theirs: 9, ours: 2, .. }), "{error}");
    assert!(error.to_string().contains("speaks layout version 9, this side 2"), "{error}");
}

#[test]
fn a_listener_that_does_not_keep_to_the_protocol_is_told_apart() {
    for bytes in [&b"hello"[..], &[0; 128], &Letter::honest(ACCEPT).encode(), &Letter::honest(77).encode()] {
        let error = answered_by(|listener| {
            next_caller(&listener).courier.send(bytes, &[], PATIENCE).unwrap();
        });
        assert!(matches!(&error, ConnectError::Protocol { what: "it did not greet", .. }), "{error}");
    }
    let error = answered_by(|listener| {
        let caller = next_caller(&listener);
        caller.courier.send(&[1; 300], &[], PATIENCE).unwrap();
        std::thread::sleep(A_WHILE);
    });
    assert!(matches!(&error, ConnectError::Courier { source: CourierError::TooLong(_), .. }), "{error}");
    let error = answered_by(|listener| drop(next_caller(&listener)));
    assert!(matches!(&error, ConnectError::Courier { source: CourierError::Closed, .. }), "{error}");
    let error = answered_by(|listener| {
        let caller = next_caller(&listener);
        caller.say(&Letter::honest(GREETING), &[]);
        caller.hear();
        caller.say(&Letter::honest(GREETING), &[]);
        std::thread::sleep(A_WHILE);
    });
    assert!(matches!(&error, ConnectError::Protocol { what: "it did not answer the request", .. }), "{error}");
    for change in [
        (|letter, _| letter.pair[0] ^= 1) as fn(&mut Letter, &mut Props),
        |letter, _| letter.serial ^= 1,
        |letter, _| letter.flags &= !1,
        |letter, _| letter.nic[0] ^= 1,
    ] {
        let error = answered_by(|listener| {
            drop(Liar::answer_wrongly(&listener, change));
        });
        assert!(matches!(&error, ConnectError::Protocol { what: "its answer is for somebody else", .. }), "{error}");
    }
}

#[test]
fn a_listener_that_never_answers_is_given_up() {
    let error = answered_by(|listener| {
        let caller = next_caller(&listener);
        caller.say(&Letter::honest(GREETING), &[]);
        caller.hear();
        std::thread::sleep(Duration::from_millis(800));
    });
    assert!(matches!(&error, ConnectError::TimedOut { .. }), "{error}");
}

#[test]
fn every_refusal_reaches_the_connecting_side_in_words() {
    let words = [
        "versions differ",
        "user is not allowed",
        "outside its limits",
        "does not know this pair",
        "memory handed over",
        "no room",
        "malformed",
        "no descriptor is left",
        "share more memory",
        "no address space left",
    ];
    for (number, words) in words.into_iter().enumerate() {
        let error = answered_by(|listener| {
            loop {
                // An unknown pair is tried again with a new one.
                let Some(caller) = wait_a_moment(&listener) else { return };
                caller.say(&Letter::honest(GREETING), &[]);
                caller.hear();
                caller.say(&Letter { flags: number as u32 + 1, ..Letter::honest(REFUSE) }, &[]);
            }
        });
        assert!(matches!(&error, ConnectError::Refused { .. }), "{error}");
        assert!(error.to_string().contains(words), "{number}: {error}");
    }
    // One that was overtaken calls again, until it is told something else.
    let error = answered_by(|listener| {
        for reason in [11, 11, 2] {
            let caller = next_caller(&listener);
            caller.say(&Letter { flags: reason, ..Letter::honest(REFUSE) }, &[]);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert!(error.to_string().contains("user is not allowed"), "{error}");
    for number in [0, 12, u32::MAX] {
        let error = answered_by(|listener| {
            let caller = next_caller(&listener);
            caller.say(&Letter { flags: number, ..Letter::honest(REFUSE) }, &[]);
            std::thread::sleep(A_WHILE);
        });
        assert!(matches!(&error, ConnectError::Protocol { .. }), "{error}");
    }
}

fn wait_a_moment(listener: &CourierListener) -> Option<Caller> {
    let deadline = Instant::now() + 3 * A_WHILE;
    while Instant::now() < deadline {
        if let Some(courier) = listener.accept().unwrap() {
            return Some(Caller { courier });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// Runs `calls` while everything that comes to `listener` is accepted, and kept in the list.
fn while_accepting(listener: &ViListener, calls: impl FnOnce(&Mutex<Vec<Vi>>)) {
    let (accepted, over) = (Mutex::new(Vec::new()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let vi = listener.accept(Duration::from_millis(10));
                accepted.lock().unwrap().extend(vi.ok());
            }
        });
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| calls(&accepted)));
        over.store(true, Ordering::SeqCst);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn a_full_region_refuses_another_vi_and_takes_it_when_one_is_gone() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic_with(|config| config.region_bytes = 1 << 20));
    let listener = one.listen("shm:full").unwrap();
    while_accepting(&listener, |accepted| {
        let mut connected = Vec::new();
        let refused = loop {
            match other.connect("shm:full") {
                Ok(vi) => connected.push(vi),
                Err(error) => break error,
            }
        };
        assert!(matches!(&refused, ConnectError::NoRoom(_)), "{refused}");
        assert!(refused.to_string().contains("raise region_bytes"), "{refused}");
        assert!(connected.len() > 20, "{} VIs fit a region of 1 MiB", connected.len());
        // Both sides of one go: its place is free again.
        connected.pop();
        until("the last is accepted", || accepted.lock().unwrap().len() > connected.len());
        accepted.lock().unwrap().pop();
        assert!(other.connect("shm:full").is_ok());
    });
}

#[test]
fn refused_attempts_use_up_nothing() {
    // The listener has no room; the connecting side has. Asking often must not fill its region.
    let stage = Stage::open();
    let one = stage.nic_with(|config| config.region_bytes = 1 << 20);
    let other = stage.nic_with(|config| config.region_bytes = 2 << 20);
    let listener = one.listen("shm:full").unwrap();
    while_accepting(&listener, |accepted| {
        let mut connected = Vec::new();
        let full = |attempt: Result<Vi, ConnectError>| match attempt {
            Err(ConnectError::Refused { reason: Refusal::NoRoom, .. }) => None,
            Err(error) => panic!("{error}"),
            vi => vi.ok(),
        };
        while let Some(vi) = full(other.connect("shm:full")) {
            connected.push(vi);
        }
        for _ in 0..100 {
            assert!(full(other.connect("shm:full")).is_none());
        }
        let left = connected.len() - 2;
        connected.truncate(left);
        accepted.lock().unwrap().truncate(left);
        assert!(full(other.connect("shm:full")).is_some());
    });
}

#[test]
fn without_descriptors_left_every_side_says_so_and_recovers() {
    let stage = Stage::open();
    stage.role("poor", |stage| {
        let nic = stage.nic();
        let listener = nic.listen("shm:poor").unwrap();
        stage.mark("listening");
        let limit = rustix::process::getrlimit(Resource::Nofile);
        let allow = |more: u64| {
            // The limit is on numbers, and the lowest free one is next.
            let next = listener.as_fd().try_clone_to_owned().unwrap().as_raw_fd();
            let current = Some(next as u64 + more);
            rustix::process::setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
        };
        stage.await_mark("connecting");
        allow(0);
        let error = loop {
            match listener.accept(PATIENCE) {
                Err(AcceptError::TimedOut(_)) => {}
                other => break other.expect_err("no descriptor for it"),
            }
        };
        assert!(matches!(&error, AcceptError::Socket(_)), "{error}");
        assert!(error.to_string().contains("Too many open files"), "{error}");
        assert!(matches!(nic.connect("shm:rich"), Err(ConnectError::Courier { .. })));
        rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
        allow(2);
        let error = nic.connect("shm:rich").unwrap_err();
        assert!(matches!(&error, ConnectError::Region(RegionError::Create(_))), "{error}");
        assert!(error.to_string().contains("ulimit -n"), "{error}");
        rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
        let mut line = Line::accept(&listener);
        line.end();
    });
    let nic = stage.nic();
    let rich = nic.listen("shm:rich").unwrap();
    let poor = stage.start("poor");
    stage.await_mark("listening");
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| nic.connect_with("shm:poor", &ViOptions::new()));
        let greeter = scope.spawn(|| rich.accept(Duration::from_secs(1)));
        stage.mark("connecting");
        drop(caller.join().unwrap().expect("a connection, once there are descriptors again"));
        let _ = greeter.join().unwrap();
    });
    poor.finish();
}

#[test]
fn a_vi_that_waits_for_ever_does_not_wait_for_ever_when_the_time_is_long() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (mut near, far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let waiting = std::thread::spawn(move || near.vi.wait(Duration::MAX).unwrap_err());
    std::thread::sleep(A_WHILE);
    drop(far);
    assert!(matches!(waiting.join().unwrap(), WaitError::NotConnected(_)));
    let listener = one.listen("shm:forever").unwrap();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| listener.accept(Duration::MAX).is_ok());
        assert!(other.connect("shm:forever").is_ok());
        assert!(accepting.join().unwrap());
    });
}
