//! A private place for one test, and the processes that play in it.

use highwire_vi::Config;
use rustix::process::{Pid, Signal};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A test says what its other processes do with [`Stage::role`], beside what it does itself, and starts them with
/// [`Stage::start_with`]: the test binary runs once more, up to that role, and ends with it.
pub struct Stage {
    place: PathBuf,
    test: String,
    role: Option<String>,
    over: Arc<AtomicBool>,
    /// Removed at the end, by the process that made it.
    made: Option<(tempfile::TempDir, u32)>,
}

impl Stage {
    /// The stage of this test; the test's name is that of its thread.
    pub fn open() -> Stage {
        Stage::open_and_say(HUNG, String::new)
    }

    /// The same, for a test that may take so long, and can say what it was doing if it takes longer.
    pub fn open_and_say(limit: Duration, doing: impl Fn() -> String + Send + 'static) -> Stage {
        let test = std::thread::current().name().expect("a test runs in a thread of its name").to_owned();
        let role = std::env::var(ROLE).ok();
        let over = Arc::new(AtomicBool::new(false));
        watch(&test, role.as_deref(), limit, doing, over.clone());
        if role.is_some() {
            die_with_parent();
            let place = PathBuf::from(std::env::var_os(PLACE).expect("a role has a stage"));
            return Stage { place, test, role, over, made: None };
        }
        let made = tempfile::Builder::new().prefix("hw").tempdir().expect("a temporary directory");
        let place = made.path().to_owned();
        std::fs::DirBuilder::new().mode(0o700).create(place.join("run")).expect("the runtime directory");
        std::fs::create_dir(place.join("marks")).expect("the directory of marks");
        Stage { place, test, role: None, over, made: Some((made, std::process::id())) }
    }

    /// What the process named `name` does. Returns at once in every other process.
    pub fn role(&self, name: &str, play: impl FnOnce(&Stage)) {
        if self.role.as_deref() == Some(name) {
            play(self);
            std::process::exit(0);
        }
    }

    /// Starts the process named `name`, with something to say to it.
    pub fn start_with(&self, name: &str, argument: &str) -> Actor {
        let program = std::env::current_exe().expect("the path of this test");
        self.spawn(&mut Command::new(program), name, argument)
    }

    /// The same, as another user. Root only.
    pub fn start_as(&self, name: &str, uid: u32) -> Actor {
        // A copy: the way to this binary may be closed to others.
        let program = self.place.join("actor");
        if !program.exists() {
            std::fs::copy(std::env::current_exe().expect("the path of this test"), &program).expect("a copy");
        }
        open_to_all(&self.place);
        open_to_all(&self.place.join("marks"));
        self.spawn(Command::new(program).uid(uid).gid(uid), name, "")
    }

    /// The same in namespaces of its own, which these arguments of `unshare` name. Root only. The actor's number is that
    /// of `unshare`, which takes the process along when it dies.
    pub fn start_in(&self, namespaces: &[&str], name: &str, argument: &str) -> Actor {
        self.start_in_by(namespaces, &[], name, argument)
    }

    /// The same by a program that becomes the process, with these arguments before those of the process.
    pub fn start_in_by(&self, namespaces: &[&str], by: &[&str], name: &str, argument: &str) -> Actor {
        let mut command = Command::new("unshare");
        command.args(namespaces).args(["--fork", "--kill-child"]).args(by);
        command.arg(std::env::current_exe().expect("the path of this test"));
        self.spawn(command.env(UNSHARED, "1"), name, argument)
    }

    fn spawn(&self, command: &mut Command, name: &str, argument: &str) -> Actor {
        let child = command
            .args(["--exact", &self.test, "--nocapture"])
            .env(ROLE, name)
            .env(PLACE, &self.place)
            .env(PARENT, std::process::id().to_string())
            .env(ARGUMENT, argument)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("another process");
        Actor { child, name: name.to_owned() }
    }

    /// What this process was told when it was started.
    pub fn argument(&self) -> String {
        std::env::var(ARGUMENT).unwrap_or_default()
    }

    /// The directory for names, private to this test.
    pub fn runtime_dir(&self) -> PathBuf {
        self.place.join("run")
    }

    /// A directory that every user may enter and write.
    pub fn open_dir(&self) -> PathBuf {
        let dir = self.place.join("open");
        if !dir.exists() {
            std::fs::create_dir(&dir).expect("a directory");
            open_to_all(&self.place);
            open_to_all(&dir);
        }
        dir
    }

    /// The default configuration, with names in this stage.
    pub fn config(&self) -> Config {
        Config { runtime_dir: Some(self.runtime_dir()), ..Config::default() }
    }

    /// Lets the other processes know that `what` has come about. A directory: making it takes no descriptor.
    pub fn mark(&self, what: &str) {
        match std::fs::create_dir(self.place.join("marks").join(what)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => panic!("a mark: {error}"),
            _ => {}
        }
    }

    /// Waits until a process has marked `what`.
    pub fn await_mark(&self, what: &str) {
        let mark = self.place.join("marks").join(what);
        until(&format!("the mark {what:?}"), || mark.exists());
    }

    /// True if a process has marked `what`.
    pub fn is_marked(&self, what: &str) -> bool {
        self.place.join("marks").join(what).exists()
    }

    /// Waits for a mark that begins and ends so; what is between.
    pub fn await_mark_between(&self, beginning: &str, end: &str) -> String {
        let mut between = None;
        until(&format!("a mark {beginning:?}…{end:?}"), || {
            let marks = std::fs::read_dir(self.place.join("marks")).expect("the marks");
            let mut names = marks.filter_map(|mark| mark.ok()?.file_name().into_string().ok());
            between = names.find_map(|name| Some(name.strip_prefix(beginning)?.strip_suffix(end)?.to_owned()));
            between.is_some()
        });
        between.expect("just found")
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        // A forked child has this value too, and must leave the directory to its parent.
        if let Some((made, maker)) = self.made.take()
            && maker != std::process::id()
        {
            std::mem::forget(made);
        }
    }
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("open permissions");
}

/// Ends a process that hangs, so that the test fails rather than stand still.
fn watch(
    test: &str,
    role: Option<&str>,
    limit: Duration,
    doing: impl Fn() -> String + Send + 'static,
    over: Arc<AtomicBool>,
) {
    let who = format!("{test} ({})", role.unwrap_or("itself"));
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        if !over.load(Ordering::SeqCst) {
            eprintln!("{who} hangs: not done after {limit:?}. {}", doing());
            std::process::abort();
        }
    });
}

fn die_with_parent() {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal at the parent's death");
    if std::env::var_os(UNSHARED).is_some() {
        // The parent is `unshare`, which has no number in another PID namespace.
        return;
    }
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().to_string());
    assert_eq!(parent, std::env::var(PARENT).ok(), "the parent died before it could be said");
}

/// Another process of the test. It is ended at the latest when this is dropped.
pub struct Actor {
    pub(super) child: Child,
    name: String,
}

impl Actor {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid()).expect("a process id");
        rustix::process::kill_process(pid, signal).expect("a signal to a child");
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
    }

    /// Waits until it has played its role, which must have gone well.
    pub fn finish(mut self) {
        let status = self.status();
        assert!(status.success(), "the process {:?} ended with {status}", self.name);
    }

    /// Waits until it is gone.
    pub fn status(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait().expect("a child's status") {
                Some(status) => return status,
                None if Instant::now() > deadline => panic!("the process {:?} does not end", self.name),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `look` is true.
pub fn until(what: &str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !look() {
        assert!(Instant::now() < deadline, "{what} did not come about within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// CPU time that this process has used so far.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// True for root; says loudly what is not tested otherwise.
pub fn is_root(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("NOT TESTED, needs root: {what}");
    }
    root
}

/// Arguments of `unshare` for namespaces of every kind that containers have, in which this user stays the same.
pub const CONTAINER: [&str; 8] =
    ["--pid", "--mount-proc", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--map-current-user"];

/// How long anything may take that is to happen. Generous: the machine may be busy with others.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How long to look for something that is not to happen.
pub const A_WHILE: Duration = Duration::from_millis(60);
/// After this a test hangs, and is ended with a message.
const HUNG: Duration = Duration::from_secs(100);

const ROLE: &str = "HIGHWIRE_TEST_ROLE";
const PLACE: &str = "HIGHWIRE_TEST_STAGE";
const PARENT: &str = "HIGHWIRE_TEST_PARENT";
const UNSHARED: &str = "HIGHWIRE_TEST_UNSHARED";
const ARGUMENT: &str = "HIGHWIRE_TEST_ARGUMENT";
