//! An idle connection costs no CPU, as the kernel counts it.

use highwire::{Failure, Nic, Receive, ViOptions, WaitError};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn an_idle_pair_uses_no_measurable_cpu_over_ten_seconds() {
    if let Some(role) = std::env::var_os(ROLE) {
        let play = if role == "listens" { listen_and_wait } else { connect_and_wait };
        return play(&PathBuf::from(std::env::var_os(PLACE).unwrap()));
    }
    let place = tempfile::Builder::new().prefix("hw").tempdir().unwrap();
    let mut listening = start("listens", place.path());
    let mut connecting = start("connects", place.path());
    until(|| ["listens", "connects"].iter().all(|role| place.path().join(role).exists()));
    // Both are about to wait; the time for which they spin is over soon.
    std::thread::sleep(Duration::from_millis(500));

    let pids = [listening.id(), connecting.id()];
    let before = pids.map(cpu_ticks);
    std::thread::sleep(IDLE);
    let after = pids.map(cpu_ticks);
    assert!(listening.try_wait().unwrap().is_none() && connecting.try_wait().unwrap().is_none(), "both still wait");
    let used = after.iter().sum::<u64>() - before.iter().sum::<u64>();
    assert!(used <= TICKS_MAX, "{used} ticks of CPU in {IDLE:?} of waiting, at most {TICKS_MAX} are allowed");

    // They were connected all the time: the one hears of the other's death.
    listening.kill().unwrap();
    listening.wait().unwrap();
    until(|| connecting.try_wait().unwrap().is_some());
    assert!(connecting.wait().unwrap().success());
}

/// Waits on its completion queue, for ever.
fn listen_and_wait(place: &Path) {
    let nic = Nic::open().unwrap();
    let mut queue = nic.completion_queue().unwrap();
    let listener = nic.listen("shm:idle").unwrap();
    let mut vi = listener.accept_with(PATIENCE, &ViOptions::new().queue(&queue)).unwrap();
    vi.post_recv(Receive::new(1).into(nic.register(64).unwrap().slice(0..64).unwrap())).unwrap();
    std::fs::write(place.join("listens"), "").unwrap();
    let _ = queue.wait(PATIENCE);
}

/// Waits on its VI, until the other side dies.
fn connect_and_wait(place: &Path) {
    let nic = Nic::open().unwrap();
    until(|| place.join("idle.sock").exists());
    let mut vi = nic.connect("shm:idle").unwrap();
    vi.post_recv(Receive::new(1).into(nic.register(64).unwrap().slice(0..64).unwrap())).unwrap();
    std::fs::write(place.join("connects"), "").unwrap();
    let done = vi.wait(PATIENCE).expect("the receive comes back with a reason");
    assert_eq!(done.status, Err(Failure::PeerDied));
    assert!(matches!(vi.wait(PATIENCE), Err(WaitError::NotConnected(Failure::PeerDied))));
}

/// This test once more, as another process.
fn start(role: &str, place: &Path) -> Actor {
    let test = std::thread::current().name().unwrap().to_owned();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &test, "--nocapture"]).env(ROLE, role).env(PLACE, place);
    Actor(command.env("HIGHWIRE_RUNTIME_DIR", place).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
}

/// A process that does not outlive the test.
struct Actor(Child);

impl std::ops::Deref for Actor {
    type Target = Child;
    fn deref(&self) -> &Child {
        &self.0
    }
}

impl std::ops::DerefMut for Actor {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// CPU time of a process and all its threads, in user space and in the kernel: of 1/100 s each.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Fields 14 and 15; the name, field 2, may hold spaces.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    [fields[11], fields[12]].map(|field| field.parse::<u64>().unwrap()).iter().sum()
}

fn until(mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !look() {
        assert!(Instant::now() < deadline, "waited 20 seconds in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const IDLE: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);
/// A tick that began before is counted in the end; one for each process.
const TICKS_MAX: u64 = 2;
const ROLE: &str = "HIGHWIRE_TEST_ROLE";
const PLACE: &str = "HIGHWIRE_TEST_STAGE";
