//! Whatever a listener answers to who connects: a connection or a typed error.
#![no_main]

use arbitrary::Arbitrary;
use highwire_fuzz::liar::{ACCEPT, Caller, GREETING, Letter, Liar, NEW_PAGE, NEW_PAIR, Props};
use highwire_fuzz::{Mail, stage};
use highwire_mem::CourierListener;
use highwire_vi::{Config, ConnectError, Nic};
use libfuzzer_sys::fuzz_target;
use std::os::fd::AsFd;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// What the listener says first, and then.
#[derive(Arbitrary, Clone, Debug)]
struct Script {
    greeting: Option<Mail>,
    answer: Mail,
}

struct Scene {
    nic: Nic,
    scripts: Mutex<SyncSender<Script>>,
}

fn scene() -> &'static Scene {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    SCENE.get_or_init(|| {
        let config = Config {
            runtime_dir: Some(stage().to_owned()),
            region_bytes: 4 << 20,
            peer_region_bytes_max: 1 << 30,
            connect_timeout: Duration::from_secs(2),
            ..Config::default()
        };
        let listener = CourierListener::bind(&stage().join("liar.sock"), 16).expect("a socket");
        let (scripts, next) = sync_channel(1);
        std::thread::spawn(move || {
            loop {
                match next.recv_timeout(Duration::from_millis(1)) {
                    Ok(script) => play(&listener, &script),
                    // Who tries again, with a new pair or since it was overtaken, meets a closed door.
                    Err(RecvTimeoutError::Timeout) => while let Ok(Some(_)) = listener.accept() {},
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        });
        Scene { nic: Nic::with(config).expect("a Nic"), scripts: Mutex::new(scripts) }
    })
}

fuzz_target!(|script: Script| {
    let scene = scene();
    scene.scripts.lock().unwrap_or_else(PoisonError::into_inner).send(script).expect("the listener lives");
    match scene.nic.connect("shm:liar") {
        Ok(mut vi) => {
            let _ = vi.send_bytes(1, b"hello");
            let _ = vi.poll();
        }
        Err(ConnectError::TimedOut { .. }) => panic!("a listener that hung up is not waited for"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});

/// Answers callers until one was answered in full; those who try again are hung up on.
fn play(listener: &CourierListener, script: &Script) {
    let mut courier = None;
    while courier.is_none() {
        courier = listener.accept().expect("a listening socket");
        std::hint::spin_loop();
    }
    let Some(courier) = courier else { return };
    let caller = Caller { courier };
    let greeting = Letter::honest(GREETING);
    let say = |bytes: &[u8], given: &[std::os::fd::OwnedFd]| {
        let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        let _ = caller.courier.send(bytes, &given, Duration::from_millis(1));
    };
    match &script.greeting {
        Some(mail) => {
            let (bytes, given) = mail.make(&greeting, Vec::new());
            say(&bytes, &given);
        }
        None => say(&greeting.encode(), &[]),
    }
    let mut asked = [0; 128];
    let heard = caller.courier.receive(&mut asked, Duration::from_millis(20));
    let asked = match heard {
        Ok((128, _)) => Letter::decode(&asked),
        _ => Letter::honest(ACCEPT),
    };
    let letter = Letter {
        kind: ACCEPT,
        nic: greeting.nic,
        queue: 5,
        bell: 0,
        block_offset: 1024,
        region_bytes: Liar::REGION_BYTES as u64,
        flags: NEW_PAIR | NEW_PAGE,
        ..asked
    };
    let (bytes, given) = script.answer.make(&letter, Props::honest().descriptors);
    say(&bytes, &given);
}
