//! Who knocks at a listener and does not come in: slow, silent, babbling, or lying about what it
//! hands over. Honest callers are accepted all the same, and nothing is left of the others.

use crate::support::liar::{CONNECT, Caller, GREETING, Letter, Liar, NEW_PAGE, NEW_PAIR, Props, knock};
use crate::support::seeded::Seeded;
use crate::support::{Line, PATIENCE, Stage, buffer, open_descriptors, until};
use highwire_mem::{Courier, CourierListener, OwnRegion};
use highwire_vi::{AcceptError, ConnectError, Nic, Receive, RegionError, ViListener, ViOptions};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const VERSION: u32 = 1;
const LIMITS: u32 = 3;
const UNKNOWN_PAIR: u32 = 4;
const BAD_MEMORY: u32 = 5;
const MALFORMED: u32 = 7;

struct Door {
    nic: Nic,
    caller: Nic,
    listener: ViListener,
    path: PathBuf,
    _stage: Stage,
}

impl Door {
    fn open() -> Door {
        let stage = Stage::open();
        let nic = stage.nic_with(|config| config.peer_region_bytes_max = 1 << 30);
        let (caller, listener) = (stage.nic(), nic.listen("shm:door").unwrap());
        let path = stage.runtime_dir().join("door.sock");
        Door { nic, caller, listener, path, _stage: stage }
    }

    /// An honest caller comes in, and a message of its arrives.
    fn admits_the_honest(&self) {
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                let mut line = Line::connect(&self.caller, "shm:door");
                line.vi.send_bytes(1, b"honest").unwrap();
                line.vi.disconnect(PATIENCE).unwrap();
            });
            let mut line = Line::accept(&self.listener);
            line.vi.post_recv(Receive::new(1).into(buffer(&self.nic, 8))).unwrap();
            assert_eq!(line.received().length, 6);
            connecting.join().unwrap();
        });
    }

    /// Knocks with a changed letter or changed props: the number of the refusal.
    fn refuses(&self, change: impl FnOnce(&mut Letter, &mut Props)) -> u32 {
        let (mut letter, mut props) = (Letter::honest(CONNECT), Props::honest());
        change(&mut letter, &mut props);
        let shown = format!("{letter:?}");
        let (outcome, vi) = knock(&self.listener, &self.path, &ViOptions::new(), letter, props);
        assert!(vi.is_none(), "a VI came of {shown}");
        outcome.err().expect("a refusal")
    }
}

#[test]
fn silent_and_closing_callers_do_not_keep_others_out() {
    let door = Door::open();
    let before = open_descriptors();
    let silent: Vec<Caller> = (0..10).map(|_| Caller::at(&door.path)).collect();
    (0..10).for_each(|_| drop(Caller::at(&door.path)));
    let start = Instant::now();
    door.admits_the_honest();
    assert!(start.elapsed() < Duration::from_secs(2), "nobody waited for the silent: {:?}", start.elapsed());
    drop(silent);
    assert!(matches!(door.listener.accept(Duration::from_millis(50)), Err(AcceptError::TimedOut(_))));
    until("their sockets are closed", || {
        let _ = door.listener.accept(Duration::ZERO);
        open_descriptors() <= before + 6
    });
}

#[test]
fn more_silent_callers_than_are_kept_are_forgotten_in_time() {
    let door = Door::open();
    // More than the half-open connections that a listener keeps: it makes room when they are late.
    let _silent: Vec<Caller> = (0..24).map(|_| Caller::at(&door.path)).collect();
    door.admits_the_honest();
}

#[test]
fn babbling_callers_are_refused_and_do_not_keep_others_out() {
    let door = Door::open();
    let mut seeded = Seeded::fresh();
    for _ in 0..60 {
        let caller = Caller::at(&door.path);
        let _ = door.listener.accept(Duration::ZERO);
        let length = *seeded.pick(&[0, 1, 4, 127, 128, 129, 1000]);
        let mut bytes: Vec<u8> = (0..length).map(|_| seeded.next() as u8).collect();
        if length >= 4 && seeded.once_in(2) {
            bytes[..4].copy_from_slice(b"HWRV");
        }
        if length == 128 && seeded.once_in(2) {
            bytes[4..8].copy_from_slice(&(seeded.below(7) as u32).to_le_bytes());
            bytes[8..12].copy_from_slice(&1u32.to_le_bytes());
        }
        // Descriptors too, of whatever kind: none of them may stay.
        let given: Vec<OwnedFd> = (0..seeded.below(4)).map(|_| anything(&mut seeded)).collect();
        let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
        let _ = caller.courier.send(&bytes, &given, PATIENCE);
        let came = door.listener.accept(Duration::from_millis(2));
        assert!(matches!(came, Err(AcceptError::TimedOut(_))), "seed {}", seeded.seed());
    }
    let before = open_descriptors();
    door.admits_the_honest();
    // What the Nics keep for a user.
    assert!(open_descriptors() <= before + 6);
}

/// A descriptor of any kind.
fn anything(seeded: &mut Seeded) -> OwnedFd {
    match seeded.below(5) {
        0 => std::fs::File::open("/dev/zero").unwrap().into(),
        1 => rustix::pipe::pipe().unwrap().0,
        2 => std::fs::File::open("/proc/self/exe").unwrap().into(),
        3 => memfd(4096, SealFlags::empty()),
        _ => Courier::pair().unwrap().0.as_fd().try_clone_to_owned().unwrap(),
    }
}

/// A memfd of `bytes` with these seals.
fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("liar", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Regions that are not what they should be, and what is wrong with them.
fn bad_regions() -> Vec<(&'static str, OwnedFd)> {
    let bytes = Liar::REGION_BYTES as u64;
    let honest = |bytes: usize| OwnRegion::create(bytes).unwrap().as_fd().try_clone_to_owned().unwrap();
    vec![
        ("unsealed", memfd(bytes, SealFlags::empty())),
        ("open to growing", memfd(bytes, SealFlags::SHRINK | SealFlags::FUTURE_WRITE | SealFlags::SEAL)),
        ("open to shrinking", memfd(bytes, SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL)),
        ("open to writing by others", memfd(bytes, SIZE_SEALS)),
        ("open to more seals", memfd(bytes, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE)),
        ("without a header", memfd(bytes, SIZE_SEALS | SealFlags::FUTURE_WRITE)),
        ("smaller than announced", honest(Liar::REGION_BYTES - 4096)),
        ("larger than announced", honest(Liar::REGION_BYTES + 4096)),
        ("a pipe", rustix::pipe::pipe().unwrap().0),
        ("a device", std::fs::File::open("/dev/zero").unwrap().into()),
        ("a file", std::fs::File::open("/proc/self/exe").unwrap().into()),
        ("a socket", Courier::pair().unwrap().0.as_fd().try_clone_to_owned().unwrap()),
    ]
}

#[test]
fn memory_that_is_not_as_announced_is_refused_before_it_is_touched() {
    let door = Door::open();
    door.admits_the_honest();
    let before = open_descriptors();
    for (what, region) in bad_regions() {
        assert_eq!(door.refuses(|_, props| props.descriptors[0] = region), BAD_MEMORY, "a region {what}");
    }
    let pages = [
        ("unsealed", memfd(4096, SealFlags::empty())),
        ("too large", memfd(8192, SIZE_SEALS)),
        ("empty", memfd(0, SIZE_SEALS)),
        ("that cannot be written", memfd(4096, SIZE_SEALS | SealFlags::WRITE)),
        ("that is a pipe", rustix::pipe::pipe().unwrap().0),
    ];
    for (what, page) in pages {
        assert_eq!(door.refuses(|_, props| props.descriptors[1] = page), BAD_MEMORY, "a page {what}");
    }
    for left in 0..3 {
        assert_eq!(door.refuses(|_, props| props.descriptors.truncate(left)), BAD_MEMORY, "{left} of 3 descriptors");
    }
    until("nothing is left of them", || open_descriptors() <= before);
    door.admits_the_honest();
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    let door = Door::open();
    for (field, value) in
        [("depth", 0), ("depth", 3), ("depth", 8192), ("depth", u32::MAX), ("loans", 0), ("loans", 5000)]
    {
        let refused = door.refuses(|letter, _| match field {
            "depth" => letter.depth = value,
            _ => letter.loans = value,
        });
        assert_eq!(refused, LIMITS, "{field} {value}");
    }
    let region = Liar::REGION_BYTES as u64;
    for offset in [0, 1, 0x300, 0x401, region - 256, region, region + 256, 1 << 63, u64::MAX - 255] {
        assert_eq!(door.refuses(|letter, _| letter.block_offset = offset), LIMITS, "offset {offset}");
    }
    for bell in [4096, u32::MAX] {
        assert_eq!(door.refuses(|letter, _| letter.bell = bell), LIMITS, "bell {bell}");
    }
    for bytes in [0, region - 1, 2 * region, 1 << 31, u64::MAX] {
        assert_eq!(door.refuses(|letter, _| letter.region_bytes = bytes), BAD_MEMORY, "{bytes} bytes announced");
    }
    assert_eq!(door.refuses(|letter, _| letter.serial = 1 << 30), MALFORMED);
    assert_eq!(door.refuses(|letter, _| letter.first_index = u64::MAX), MALFORMED);
    assert_eq!(door.refuses(|letter, _| letter.version = 9), VERSION);
    assert_eq!(door.refuses(|letter, _| letter.kind = GREETING), MALFORMED);
    assert_eq!(door.refuses(|letter, _| letter.magic = *b"HTTP"), MALFORMED);
    assert_eq!(
        door.refuses(|letter, props| {
            letter.flags = NEW_PAGE;
            props.descriptors.remove(0);
        }),
        UNKNOWN_PAIR
    );
    // A page that was never given cannot be rung.
    let refused = door.refuses(|letter, _| letter.flags = NEW_PAIR);
    assert!([BAD_MEMORY, MALFORMED].contains(&refused), "{refused}");
    door.admits_the_honest();
}

/// The connecting side's error when a hand-made listener hands over something wrong.
fn connecting_to(change: impl FnOnce(&mut Letter, &mut Props) + Send) -> ConnectError {
    let stage = Stage::open();
    let nic = stage.nic_with(|config| config.peer_region_bytes_max = 1 << 30);
    let listener = CourierListener::bind(&stage.runtime_dir().join("liar.sock"), 4).unwrap();
    std::thread::scope(|scope| {
        let answering = scope.spawn(|| Liar::answer_wrongly(&listener, change));
        let error = nic.connect("shm:liar").expect_err("nothing comes of this");
        drop(answering.join().unwrap());
        error
    })
}

#[test]
fn memory_handed_over_by_a_lying_listener_is_refused_with_what_is_wrong() {
    for (what, region) in bad_regions() {
        let error = connecting_to(|_, props| props.descriptors[0] = region);
        let ConnectError::BadMemory { source, .. } = &error else { panic!("a region {what}: {error}") };
        let named = match what {
            "without a header" => matches!(source, RegionError::WrongHeader),
            _ if what.contains("announced") => matches!(source, RegionError::WrongSize { .. }),
            _ => matches!(source, RegionError::Unsealed { .. }),
        };
        assert!(named, "a region {what}: {error}");
    }
    let error = connecting_to(|letter, _| letter.region_bytes = 1 << 40);
    assert!(error.to_string().contains("outside the limits"), "{error}");
    let error = connecting_to(|_, props| props.descriptors.truncate(1));
    assert!(matches!(&error, ConnectError::BadMemory { .. }), "{error}");
    let error = connecting_to(|_, props| props.descriptors[1] = memfd(8192, SIZE_SEALS));
    assert!(
        matches!(&error, ConnectError::BadMemory { source: RegionError::WrongSize { found: 8192, .. }, .. }),
        "{error}"
    );
}

#[test]
fn numbers_of_a_lying_listener_are_refused() {
    let region = Liar::REGION_BYTES as u64;
    for offset in [0, 0x401, region, u64::MAX - 255] {
        let error = connecting_to(|letter, _| letter.block_offset = offset);
        assert!(!error.to_string().is_empty() && !matches!(&error, ConnectError::TimedOut { .. }), "{error}");
    }
    let error = connecting_to(|letter, _| letter.bell = 4096);
    assert!(!matches!(&error, ConnectError::TimedOut { .. }), "{error}");
    let error = connecting_to(|letter, _| letter.version = 9);
    assert!(matches!(&error, ConnectError::Version { theirs: 9, .. } | ConnectError::Protocol { .. }), "{error}");
}

#[test]
fn a_slow_listener_does_not_keep_others_from_connecting() {
    // One thread waits for a listener that never answers; another wants to reach an honest one.
    let stage = Stage::open();
    let nic = stage.nic_with(|config| config.connect_timeout = Duration::from_secs(4));
    let silent = CourierListener::bind(&stage.runtime_dir().join("silent.sock"), 4).unwrap();
    let honest = stage.nic().listen("shm:honest").unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| nic.connect("shm:silent").map(drop));
        until("it waits", || {
            silent.accept().unwrap().is_some_and(|courier| {
                scope.spawn(|| {
                    let _courier = courier;
                    std::thread::sleep(Duration::from_secs(4));
                });
                true
            })
        });
        let accepting = scope.spawn(|| drop(Line::accept(&honest)));
        let start = Instant::now();
        let connected = nic.connect("shm:honest");
        let took = start.elapsed();
        assert!(connected.is_ok(), "{:?}", connected.err());
        accepting.join().unwrap();
        assert!(waiting.join().unwrap().is_err());
        assert!(took < Duration::from_secs(2), "connecting elsewhere took {took:?}");
    });
}
