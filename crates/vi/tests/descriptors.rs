//! What two processes cost each other in descriptors, and what is said when one of them has none left.

use crate::support::{Line, PATIENCE, Stage};
use highwire_vi::{AcceptError, ConnectError, Failure, Message, Nic, Receive, Refusal, ViListener};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// So much is referred to, not copied.
const BYTES: usize = 1 << 20;

/// More than meeting takes at any moment.
const ENOUGH: u64 = 14;

/// Leaves this process so many descriptors; what keeps the others taken, and the limit that was.
fn leave(descriptors: u64) -> (Vec<File>, Rlimit) {
    let before = getrlimit(Resource::Nofile);
    // The limit is one of numbers: no lower one is to be free.
    let mut taken = vec![File::open("/dev/null").unwrap()];
    let top =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let top: i32 = top.max().unwrap();
    while taken.last().unwrap().as_raw_fd() < top {
        taken.push(File::open("/dev/null").unwrap());
    }
    let next = taken.last().unwrap().as_raw_fd().max(top) as u64 + 1;
    setrlimit(Resource::Nofile, Rlimit { current: Some(next + descriptors), ..before }).unwrap();
    (taken, before)
}

/// Accepts until it has a connection; how often it was told that there is no descriptor.
fn accept(listener: &ViListener, mut between: impl FnMut()) -> Line {
    loop {
        match listener.accept(Duration::from_millis(5)) {
            Ok(vi) => return Line::new(vi),
            Err(AcceptError::TimedOut(_)) => {}
            Err(error) => assert!(error.to_string().contains("(ulimit -n)"), "{error}"),
        }
        between();
    }
}

fn listener(stage: &Stage) -> (Nic, ViListener) {
    let nic = stage.nic();
    let listener = nic.listen("shm:echo").unwrap();
    (nic, listener)
}

#[test]
fn a_listener_that_runs_out_of_descriptors_at_any_moment_says_so_and_goes_on() {
    let stage = Stage::open();
    stage.role("listens", |stage| {
        let left = stage.argument();
        let (_nic, listener) = listener(stage);
        stage.mark(&format!("listens-{left}"));
        let (_taken, before) = leave(left.parse().unwrap());
        let mut raised = false;
        let mut line = accept(&listener, || {
            if !raised && stage.is_marked(&format!("refused-{left}")) {
                setrlimit(Resource::Nofile, before).unwrap();
                raised = true;
                stage.mark(&format!("raised-{left}"));
            }
        });
        line.end();
    });
    let nic = stage.nic_with(|config| config.connect_timeout = Duration::from_secs(1));
    let mut refused = 0;
    for left in 0..=ENOUGH {
        let other = stage.start_with("listens", &left.to_string());
        stage.await_mark(&format!("listens-{left}"));
        match nic.connect("shm:echo") {
            Ok(vi) => drop(vi),
            Err(error) => {
                // Without one to accept with, the listener alone is told, and a connection waits for as long as it may.
                let expected = match &error {
                    ConnectError::TimedOut { .. } => left == 0,
                    ConnectError::Refused { reason, .. } => *reason == Refusal::NoDescriptors,
                    _ => false,
                };
                assert!(expected, "with {left} descriptors: {error}");
                assert!(error.to_string().contains("(ulimit -n)"), "{error}");
                refused += 1;
                stage.mark(&format!("refused-{left}"));
                stage.await_mark(&format!("raised-{left}"));
                drop(nic.connect("shm:echo").unwrap());
            }
        }
        other.finish();
    }
    assert!((4..ENOUGH).contains(&refused), "{refused} of {ENOUGH} numbers of descriptors were too few");
}

#[test]
fn a_connecting_side_that_runs_out_of_descriptors_at_any_moment_says_so() {
    let stage = Stage::open();
    stage.role("connects", |stage| {
        let nic = stage.nic();
        let (taken, before) = leave(stage.argument().parse().unwrap());
        let outcome = nic.connect("shm:echo");
        setrlimit(Resource::Nofile, before).unwrap();
        drop(taken);
        match outcome {
            Ok(vi) => vi.disconnect(PATIENCE).unwrap(),
            Err(error) => {
                assert!(error.to_string().contains("(ulimit -n)"), "{error}");
                stage.mark(&format!("out-{}", stage.argument()));
                nic.connect("shm:echo").unwrap().disconnect(PATIENCE).unwrap();
            }
        }
    });
    let (_nic, listener) = listener(&stage);
    let mut lines = Vec::new();
    for left in 0..=ENOUGH {
        let mut other = stage.start_with("connects", &left.to_string());
        // The listener may have accepted one that then had no descriptor for the answer.
        let mut status = None;
        while status.is_none() {
            lines.extend(listener.accept(Duration::from_millis(5)).ok());
            status = other.exited();
        }
        assert!(status.unwrap().success(), "with {left} descriptors");
    }
    let out = (0..=ENOUGH).filter(|left| stage.is_marked(&format!("out-{left}"))).count() as u64;
    assert!((4..ENOUGH).contains(&out), "{out} of {ENOUGH} numbers of descriptors were too few");
}

#[test]
fn a_region_that_comes_when_no_descriptor_is_left_ends_the_vi_with_that_reason() {
    let stage = Stage::open();
    stage.role("receives", |stage| {
        let (_nic, listener) = listener(stage);
        stage.mark("listens");
        let mut line = Line::accept(&listener);
        line.vi.post_recv(Receive::new(0).in_place()).unwrap();
        let (_taken, before) = leave(0);
        stage.mark("exhausted");
        let (failure, _) = line.end();
        assert_eq!(failure, Failure::Exhausted);
        assert!(failure.to_string().contains("ulimit -n"), "{failure}");
        setrlimit(Resource::Nofile, before).unwrap();
        // Others have it, and what is new is taken again.
        stage.mark("raised");
        let mut line = Line::accept(&listener);
        line.vi.post_recv(Receive::new(0).in_place()).unwrap();
        assert_eq!(line.received().length, BYTES);
    });
    let other = stage.start("receives");
    stage.await_mark("listens");
    let nic = stage.nic();
    let send = |line: &mut Line| {
        let payload = nic.register(BYTES).unwrap().slice(0..BYTES).unwrap();
        line.vi.post_send(Message::new(0).payload(payload)).unwrap();
    };
    let mut line = Line::connect(&nic, "shm:echo");
    stage.await_mark("exhausted");
    send(&mut line);
    stage.await_mark("raised");
    line.end();
    let mut line = Line::connect(&nic, "shm:echo");
    send(&mut line);
    line.sent();
    other.finish();
}

#[test]
fn a_pair_of_processes_costs_each_three_descriptors_and_its_vis_none() {
    let stage = Stage::open();
    stage.role("connects", |stage| {
        let nic = stage.nic();
        let before = crate::support::open_descriptors();
        let line = Line::connect(&nic, "shm:echo");
        // The doorbell page, its wire and the read end are the queue's, once.
        assert_eq!(crate::support::open_descriptors() - before, 3 + 3);
        stage.await_mark("counted-first");
        let more: Vec<_> = (0..5).map(|_| Line::connect(&nic, "shm:echo")).collect();
        assert_eq!(crate::support::open_descriptors() - before, 3 + 3);
        stage.mark("counted");
        stage.await_mark("counted-all");
        drop((line, more));
    });
    let (_nic, listener) = listener(&stage);
    let count = || crate::support::open_descriptors();
    let before = count();
    let other = stage.start("connects");
    let first = Line::accept(&listener);
    let after_first = count();
    assert_eq!(after_first - before, 3 + 3, "a socket, a pidfd and a wire; and the queue's page, once");
    stage.mark("counted-first");
    let more: Vec<_> = (0..5).map(|_| Line::accept(&listener)).collect();
    stage.await_mark("counted");
    assert_eq!(count(), after_first);
    stage.mark("counted-all");
    other.finish();
    drop((first, more));
}
