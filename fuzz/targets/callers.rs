//! Whatever callers send to a listener: it accepts or refuses, and keeps nothing of the refused.
#![no_main]

use arbitrary::Arbitrary;
use highwire_fuzz::liar::{CONNECT, Caller, Letter, Props};
use highwire_fuzz::{Mail, stage};
use highwire_vi::{AcceptError, Config, Nic, ViListener};
use libfuzzer_sys::fuzz_target;
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[derive(Arbitrary, Debug)]
struct Input {
    callers: Vec<(Vec<Mail>, bool)>,
}

fn listener() -> &'static ViListener {
    static LISTENER: OnceLock<ViListener> = OnceLock::new();
    LISTENER.get_or_init(|| {
        let config = Config {
            runtime_dir: Some(stage().to_owned()),
            region_bytes: 4 << 20,
            peer_region_bytes_max: 1 << 30,
            half_open_max: 1000,
            ..Config::default()
        };
        Nic::with(config).expect("a Nic").listen("shm:door").expect("a listener")
    })
}

fuzz_target!(|input: Input| {
    let listener = listener();
    for (mails, patient) in input.callers.iter().take(4) {
        let caller = Caller::at(&stage().join("door.sock"));
        accept_all(listener);
        for mail in mails.iter().take(3) {
            let (bytes, given) = mail.make(&Letter::honest(CONNECT), Props::honest().descriptors);
            let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
            let _ = caller.courier.send(&bytes, &given, Duration::from_millis(1));
            if *patient {
                accept_all(listener);
            }
        }
    }
    accept_all(listener);
    nothing_is_left();
});

fn accept_all(listener: &ViListener) {
    loop {
        match listener.accept(Duration::ZERO) {
            Ok(_) => {}
            Err(AcceptError::TimedOut(_)) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Now and then: descriptors do not grow without end.
fn nothing_is_left() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    if RUNS.fetch_add(1, Ordering::Relaxed) % 1000 == 999 {
        let open = std::fs::read_dir("/proc/self/fd").expect("the list of descriptors").count();
        assert!(open < 200, "{open} descriptors are open");
    }
}
