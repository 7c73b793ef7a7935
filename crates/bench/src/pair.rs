//! The two processes of a measurement, and how they keep step.
//!
//! The driver starts a second process from its own executable and shares three things with it: a
//! socket for commands, a few words of memory in which they meet while spinning, and their places,
//! one CPU each. The second process dies with the first, however that one ends.

use crate::BenchError;
use crate::contest::Landed;
use crate::network::{Home, Network, Wire};
use crate::transports::files::Ramdisk;
use crate::transports::{Contestant, Exercise, Timing};
use highwire_mem::{Courier, CourierError, Words};
use rustix::thread::CpuSet;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How far apart the two CPUs are: how long a cache line takes from one to the other. On virtual
/// machines this changes by itself, within seconds, and decides every other figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Under 110 ns: they share a cache.
    Near,
    /// Up to 400 ns: they share only the memory.
    Far,
    /// Longer, or different before and after a trial: something else ran.
    Disturbed,
    /// Both processes are on one CPU, and nothing crosses.
    OneCore,
}

impl State {
    /// The state in which a crossing takes this long.
    pub fn of_crossing(nanoseconds: f64) -> State {
        if nanoseconds < NEAR_NS_MAX {
            State::Near
        } else if nanoseconds < FAR_NS_MAX {
            State::Far
        } else {
            State::Disturbed
        }
    }

    /// The state of a trial with these crossings before and after it.
    pub fn of_trial(before_ns: f64, after_ns: f64) -> State {
        let (before, after) = (State::of_crossing(before_ns), State::of_crossing(after_ns));
        if before == after { before } else { State::Disturbed }
    }

    /// Its name, as in reports.
    pub fn name(self) -> &'static str {
        match self {
            State::Near => "near",
            State::Far => "far",
            State::Disturbed => "disturbed",
            State::OneCore => "one-core",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which of the two processes this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The one that measures.
    Driver,
    /// The one that answers.
    Peer,
}

/// Gives up spinning when the other side has plainly stopped.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    spins: u32,
    since: Option<Instant>,
}

impl Patience {
    /// Called each time that nothing was there. Without a pause instruction: its 40 ns would be
    /// most of what is measured.
    #[inline(always)]
    pub(crate) fn spin(&mut self) -> Result<(), BenchError> {
        self.spins = self.spins.wrapping_add(1);
        if self.spins.is_multiple_of(1 << 16) { self.check() } else { Ok(()) }
    }

    #[cold]
    fn check(&mut self) -> Result<(), BenchError> {
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited > PATIENCE {
            return Err(BenchError::Stuck(PATIENCE));
        }
        if waited > Duration::from_millis(1) {
            // Nothing that is measured takes so long: the other side has lost its CPU, perhaps to us.
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// One side's end of everything the two share.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) role: Role,
    /// Both processes have a CPU of their own, so that waiting by looking is right.
    pub(crate) spinning: bool,
    pub(crate) network: Network,
    /// CPUs of the driver and of the peer.
    cpus: (usize, usize),
    /// Where the files are that contestants send.
    pub(crate) ramdisk: Rc<Ramdisk>,
    courier: Courier,
    words: Words,
    step: u64,
    rests: u64,
    ball: u64,
    schedule: Thread,
    /// How long those have waited for their CPU who did the work of trials that this thread slept through, less what it waited
    /// itself meanwhile.
    others_waited: u64,
}

impl Link {
    fn new(role: Role, welcome: Welcome, courier: Courier, words: Words, driver: u32) -> Link {
        let Welcome { cpus, spinning, network } = welcome;
        let ramdisk = Rc::new(Ramdisk::of(driver));
        Link {
            role,
            spinning,
            network,
            cpus,
            ramdisk,
            courier,
            words,
            step: 0,
            rests: 0,
            ball: 0,
            schedule: Thread::this(),
            others_waited: 0,
        }
    }

    /// CPUs of the driver and of the peer.
    pub(crate) fn cpus(&self) -> (usize, usize) {
        self.cpus
    }

    /// Lets this thread, and those it starts, have both CPUs for as long as `roam` takes, if they are to.
    pub(crate) fn let_roam<T>(
        &mut self,
        contestant: Contestant,
        exercise: Exercise,
        roam: impl FnOnce(&mut Link) -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        if !self.network.is_of_one_host() || !contestant.blocks(exercise) {
            return roam(self);
        }
        pin(&[self.cpus.0, self.cpus.1])?;
        let roamed = roam(self);
        pin(&[if self.role == Role::Driver { self.cpus.0 } else { self.cpus.1 }])?;
        roamed
    }

    /// Says something to the other side.
    pub(crate) fn tell<T: Serialize>(&self, what: &T, descriptors: &[BorrowedFd<'_>]) -> Result<(), BenchError> {
        Ok(self.courier.send(&serde_json::to_vec(what)?, descriptors, PATIENCE)?)
    }

    /// What the other side says, waited for as long as anything else.
    pub(crate) fn hear<T: DeserializeOwned>(&self) -> Result<(T, Vec<OwnedFd>), BenchError> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let (length, descriptors) = self.courier.receive(&mut bytes, PATIENCE)?;
        match serde_json::from_slice(&bytes[..length]) {
            Ok(said) => Ok((said, descriptors)),
            // It may have given up rather than said what was expected.
            Err(error) => Err(match serde_json::from_slice::<Complaint>(&bytes[..length]) {
                Ok(Complaint { complaint }) => BenchError::Peer(complaint),
                Err(_) => error.into(),
            }),
        }
    }

    /// The next command, waited for without end: first by looking, so that the CPU stays awake
    /// between trials, then asleep.
    pub(crate) fn hear_command<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>, BenchError> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let awake = Instant::now();
        loop {
            let heard = if self.spinning && awake.elapsed() < Duration::from_millis(5) {
                self.courier.try_receive(&mut bytes)
            } else {
                self.courier.receive(&mut bytes, Duration::from_secs(1)).map(Some)
            };
            match heard {
                Ok(Some((length, descriptors))) => {
                    return Ok(Some((serde_json::from_slice(&bytes[..length])?, descriptors)));
                }
                Ok(None) | Err(CourierError::TimedOut(_)) => {}
                Err(CourierError::Closed) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Both sides are here.
    pub(crate) fn meet(&mut self) -> Result<(), BenchError> {
        if !self.spinning {
            // On one CPU each look would take the other's time: let the kernel do it.
            return match self.role {
                Role::Driver => self.tell(&(), &[]).and_then(|()| self.hear::<()>().map(drop)),
                Role::Peer => self.hear::<()>().and_then(|_| self.tell(&(), &[])),
            };
        }
        let (mine, theirs) = match self.role {
            Role::Driver => (DRIVER_STEP, PEER_STEP),
            Role::Peer => (PEER_STEP, DRIVER_STEP),
        };
        self.step += 1;
        self.words.store(mine, self.step);
        let mut patience = Patience::default();
        while self.words.load(theirs) < self.step {
            patience.spin()?;
        }
        Ok(())
    }

    /// Both sides are here, have done what `tend` does, and go on doing it until the other has too.
    pub(crate) fn meet_tending(
        &mut self,
        mut tend: impl FnMut() -> Result<bool, BenchError>,
    ) -> Result<(), BenchError> {
        let (mine, theirs) = match self.role {
            Role::Driver => (DRIVER_REST, PEER_REST),
            Role::Peer => (PEER_REST, DRIVER_REST),
        };
        self.rests += 1;
        let mut patience = Patience::default();
        loop {
            if tend()? {
                self.words.store(mine, self.rests);
            }
            if self.words.load(mine) == self.rests && self.words.load(theirs) >= self.rests {
                return Ok(());
            }
            if !self.spinning {
                std::thread::sleep(Duration::from_micros(50));
            }
            patience.spin()?;
        }
    }

    /// The address of this side.
    pub(crate) fn address(&self, wire: Wire) -> Result<IpAddr, BenchError> {
        self.network.address(wire, self.role).ok_or(BenchError::NobodyLeft)
    }

    /// Tells the other side what CPU time this one has used for a trial.
    pub(crate) fn note_cpu(&mut self, nanoseconds: u64) {
        self.words.store(if self.role == Role::Driver { DRIVER_CPU } else { PEER_CPU }, nanoseconds);
    }

    /// What the other side noted last, before the last meeting.
    pub(crate) fn peer_cpu(&self) -> u64 {
        self.words.load(if self.role == Role::Driver { PEER_CPU } else { DRIVER_CPU })
    }

    /// Tells the other side where the payloads of a trial were received.
    pub(crate) fn note_landed(&mut self, landed: Landed) {
        self.words.store(PEER_HITS, landed.hits);
        self.words.store(PEER_COPIED, landed.copied);
        self.words.store(PEER_PACKETS, landed.packets);
    }

    /// What the peer noted last, before the last meeting.
    pub(crate) fn peer_landed(&self) -> Landed {
        let [hits, copied, packets] = [PEER_HITS, PEER_COPIED, PEER_PACKETS].map(|place| self.words.load(place));
        Landed { hits, copied, packets }
    }

    /// How long this thread has waited for its CPU so far.
    pub(crate) fn own_wait(&self) -> u64 {
        self.schedule.waited_ns()
    }

    /// Counts what those have waited for their CPU who did the work of a trial: programs, or other threads of this process.
    /// This thread slept since it had waited for so long, and what it took to wake up was after the trial.
    pub(crate) fn count_instead(&mut self, own_before: u64, nanoseconds: u64) {
        let own = self.own_wait().saturating_sub(own_before);
        self.others_waited = self.others_waited.wrapping_add(nanoseconds).wrapping_sub(own);
    }

    /// Notes, for the other side too, how long this process has waited for its CPU so far.
    pub(crate) fn note_wait(&mut self) -> u64 {
        let waited = self.own_wait().wrapping_add(self.others_waited);
        let mine = if self.role == Role::Driver { DRIVER_WAITED } else { PEER_WAITED };
        self.words.store(mine, waited);
        waited
    }

    /// What the other side noted last, before the last meeting.
    pub(crate) fn peer_wait(&self) -> u64 {
        self.words.load(if self.role == Role::Driver { PEER_WAITED } else { DRIVER_WAITED })
    }

    /// Nanoseconds that a cache line takes to cross: the median of several bursts, so that a single
    /// interrupt does not count.
    pub(crate) fn probe(&mut self) -> Result<f64, BenchError> {
        self.meet()?;
        if !self.spinning {
            return Ok(0.0);
        }
        let mut crossings = [0.0; PROBE_BURSTS];
        let mut patience = Patience::default();
        for crossing in &mut crossings {
            let start = Instant::now();
            for _ in 0..PROBE_ROUND_TRIPS {
                self.ball += 1;
                if self.role == Role::Driver {
                    self.words.store(DRIVER_BALL, self.ball);
                    while self.words.load(PEER_BALL) != self.ball {
                        patience.spin()?;
                    }
                } else {
                    while self.words.load(DRIVER_BALL) != self.ball {
                        patience.spin()?;
                    }
                    self.words.store(PEER_BALL, self.ball);
                }
            }
            *crossing = start.elapsed().as_nanos() as f64 / f64::from(2 * PROBE_ROUND_TRIPS);
        }
        crossings.sort_by(f64::total_cmp);
        Ok(crossings[PROBE_BURSTS / 2])
    }
}

/// The kernel's record of a thread: nanoseconds run, nanoseconds waited for a CPU, turns. None where the kernel keeps
/// no such record.
#[derive(Debug)]
pub(crate) struct Thread(Option<File>);

impl Thread {
    /// The one that calls.
    pub(crate) fn this() -> Thread {
        Thread(File::open("/proc/thread-self/schedstat").ok())
    }

    /// How long it has waited for its CPU so far.
    pub(crate) fn waited_ns(&self) -> u64 {
        let waited = |record: &File| {
            let mut text = [0; 96];
            let length = record.read_at(&mut text, 0).ok()?;
            std::str::from_utf8(&text[..length]).ok()?.split_whitespace().nth(1)?.parse().ok()
        };
        self.0.as_ref().and_then(waited).unwrap_or(0)
    }
}

/// Threads of the second process that do its part of a trial, while its first one sleeps.
pub(crate) trait Workers {
    /// From now on there is work, or none for a while: others need the CPU for theirs.
    fn expect_work(&mut self, some: bool);

    /// Whether to sleep from now on while there is nothing, or to look without pause.
    fn wait_asleep(&mut self, _asleep: bool) {}
}

/// A thread that leaves its CPU to them.
#[derive(Debug, Default)]
pub(crate) struct Asleep {
    waited_before: u64,
}

impl Asleep {
    /// The trial begins.
    pub(crate) fn begin(&mut self, workers: &mut dyn Workers) {
        workers.expect_work(true);
        self.waited_before = waited_by_others();
    }

    /// Sleeps until the other side says that it is done; how long they waited for their CPU.
    pub(crate) fn sleep(&self, workers: &mut dyn Workers, done: &mut UnixStream) -> Result<Timing, BenchError> {
        done.read_exact(&mut [0])?;
        workers.expect_work(false);
        Ok(Timing { nanoseconds: 0.0, waited_ns: waited_by_others().saturating_sub(self.waited_before) })
    }
}

/// How long all other threads of this process have waited for their CPUs so far.
fn waited_by_others() -> u64 {
    waited_by(std::process::id()).saturating_sub(Thread::this().waited_ns())
}

/// How long all threads of a process have waited for their CPUs so far.
pub(crate) fn waited_by(process: u32) -> u64 {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else { return 0 };
    let records = threads.filter_map(|thread| File::open(thread.ok()?.path().join("schedstat")).ok());
    records.map(|record| Thread(Some(record)).waited_ns()).sum()
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Welcome {
    cpus: (usize, usize),
    spinning: bool,
    network: Network,
}

/// The driver's hold on the second process.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) link: Link,
    /// CPUs of the driver and of the peer.
    pub(crate) cpus: (usize, usize),
    child: Child,
    unpinned: CpuSet,
    _home: Home,
}

impl Pair {
    /// Starts the second process and takes places: one CPU each, or one for both, and each side's
    /// end of the network.
    pub(crate) fn start(one_core: bool, network: &Network) -> Result<Pair, BenchError> {
        let unpinned = rustix::thread::sched_getaffinity(None).map_err(io::Error::from)?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|cpu| unpinned.is_set(*cpu));
        let first = allowed.next().unwrap_or(0);
        let second = if one_core { first } else { allowed.next().unwrap_or(first) };
        let spinning = second != first;

        let home = network.enter(Role::Driver)?;
        let (courier, theirs) = Courier::pair()?;
        let theirs = theirs.as_fd().try_clone_to_owned()?;
        let child = own_executable()?
            .args([PEER_COMMAND, &std::process::id().to_string()])
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .map_err(BenchError::Start)?;
        let words = Words::create(WORDS)?;
        let welcome = Welcome { cpus: (first, second), spinning, network: network.clone() };
        let link = Link::new(Role::Driver, welcome.clone(), courier, words, std::process::id());
        let mut pair = Pair { link, cpus: (first, second), child, unpinned, _home: home };
        pair.link.tell(&welcome, &[pair.link.words.as_fd()])?;
        pin(&[first])?;
        pair.link.meet()?;
        Ok(pair)
    }

    /// Process number of the peer.
    pub(crate) fn peer_id(&self) -> u32 {
        self.child.id()
    }

    /// Adds what the second process said last to an error of the first, which often only sees that
    /// nothing comes any more.
    pub(crate) fn explain(&mut self, error: BenchError) -> BenchError {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let deadline = Instant::now() + Duration::from_secs(1);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((length, _)) = self.link.courier.receive(&mut bytes, left) else { return error };
            // What it said before it gave up, nobody waits for any more.
            if let Ok(Complaint { complaint }) = serde_json::from_slice(&bytes[..length]) {
                return BenchError::Peer(complaint);
            }
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // It also dies by itself when the socket closes; waiting here leaves no zombie.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = rustix::thread::sched_setaffinity(None, &self.unpinned);
    }
}

/// What a second process says before it gives up.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Complaint {
    pub(crate) complaint: String,
}

/// The peer's side of [`Pair::start`]: the socket is its standard input.
pub(crate) fn join(parent: u32) -> Result<Link, BenchError> {
    die_with(parent)?;
    let courier = Courier::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut bytes = [0; 1024];
    let (length, descriptors) = courier.receive(&mut bytes, PATIENCE)?;
    let welcome: Welcome = serde_json::from_slice(&bytes[..length])?;
    let words = descriptors.into_iter().next().ok_or(CourierError::Closed)?;
    let words = Words::adopt(words, WORDS)?;
    pin(&[welcome.cpus.1])?;
    // It stays there to its end.
    std::mem::forget(welcome.network.enter(Role::Peer)?);
    let mut link = Link::new(Role::Peer, welcome, courier, words, parent);
    link.meet()?;
    Ok(link)
}

/// Sees to it that this process does not outlive `parent`, which started it.
pub(crate) fn die_with(parent: u32) -> Result<(), BenchError> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).map_err(io::Error::from)?;
    // It may have died before the kernel knew of our wish.
    let lives = rustix::process::getppid().is_some_and(|pid| pid.as_raw_nonzero().get().unsigned_abs() == parent);
    if lives { Ok(()) } else { Err(CourierError::Closed.into()) }
}

/// This program once more, for another role.
pub(crate) fn own_executable() -> Result<Command, BenchError> {
    Ok(Command::new(std::env::current_exe().map_err(BenchError::Start)?))
}

/// CPU time that this process has used so far, in itself and in the kernel.
pub(crate) fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Keeps this thread on these CPUs.
pub(crate) fn pin(cpus: &[usize]) -> Result<(), BenchError> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(rustix::thread::sched_setaffinity(None, &set).map_err(io::Error::from)?)
}

/// The hidden subcommand under which a `highwire` binary is the second process.
pub const PEER_COMMAND: &str = "bench-peer";

const NEAR_NS_MAX: f64 = 110.0;
const FAR_NS_MAX: f64 = 400.0;

/// Long enough for a machine under heavy load, short enough for someone who waits.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
const MESSAGE_BYTES_MAX: usize = 64 << 10;

const PROBE_BURSTS: usize = 9;
const PROBE_ROUND_TRIPS: u32 = 32;

const DRIVER_STEP: usize = 0;
const PEER_STEP: usize = 1;
const DRIVER_BALL: usize = 2;
const PEER_BALL: usize = 3;
const DRIVER_WAITED: usize = 4;
const PEER_WAITED: usize = 5;
const DRIVER_CPU: usize = 6;
const PEER_CPU: usize = 7;
const DRIVER_REST: usize = 8;
const PEER_REST: usize = 9;
const PEER_HITS: usize = 10;
const PEER_COPIED: usize = 11;
const PEER_PACKETS: usize = 12;
const WORDS: usize = 13;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crossing_decides_the_state_and_a_change_of_it_disturbs() {
        assert_eq!(State::of_crossing(52.0), State::Near);
        assert_eq!(State::of_crossing(250.0), State::Far);
        assert_eq!(State::of_crossing(4000.0), State::Disturbed);
        assert_eq!(State::of_trial(50.0, 60.0), State::Near);
        assert_eq!(State::of_trial(240.0, 260.0), State::Far);
        assert_eq!(State::of_trial(50.0, 250.0), State::Disturbed);
        assert_eq!(State::of_trial(900.0, 50.0), State::Disturbed);
    }

    #[test]
    fn waiting_for_a_cpu_is_seen() {
        let thread = Thread::this();
        assert!(thread.0.is_some(), "this kernel keeps no schedstat: preemption goes unseen");
        let before = thread.waited_ns();
        std::thread::sleep(Duration::from_millis(1));
        assert!(thread.waited_ns() >= before);
        assert!(waited_by(std::process::id()) >= before);
    }

    #[test]
    fn waiting_in_vain_ends() {
        let mut patience = Patience { spins: 0, since: Some(Instant::now() - 2 * PATIENCE) };
        let ended = (0..1 << 17).find_map(|_| patience.spin().err());
        assert!(matches!(ended, Some(BenchError::Stuck(_))), "{ended:?}");
    }
}
