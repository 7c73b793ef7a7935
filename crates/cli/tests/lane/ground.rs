//! Where a test's programs run, and how one is started: plainly, or under `highwire run`.

use highwire_lane::counters::{self, Counter};
use std::fs::{DirBuilder, Permissions};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The command under test.
pub const HIGHWIRE: &str = env!("CARGO_BIN_EXE_highwire");

/// How long a program may take for what takes it a second.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How a program is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By itself.
    Plain,
    /// By `highwire run`.
    Highwire,
}

/// Directories of a test's own. While it lives no other test of this file runs: they keep both CPUs busy.
pub struct Ground {
    directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Ground {
    pub fn new() -> Ground {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::Builder::new().prefix("hwlane").tempdir().unwrap();
        // Servers that change their user still find their files.
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        DirBuilder::new().mode(0o700).create(directory.path().join("run")).unwrap();
        Ground { directory, _alone: alone }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A new directory here, which everybody may read.
    pub fn directory(&self, name: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// A file here with these contents.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, contents).unwrap();
        path
    }

    /// A program, not started yet. This is the one place that says how Highwire is had.
    pub fn command(&self, way: Way, program: impl AsRef<Path>) -> Command {
        let mut command = match way {
            Way::Plain => Command::new(program.as_ref()),
            Way::Highwire => {
                let mut command = self.highwire(&["run", "--"]);
                command.arg(program.as_ref());
                command
            }
        };
        command.env("HIGHWIRE_RUNTIME_DIR", self.path().join("run")).stdin(Stdio::null());
        command
    }

    /// The command under test itself.
    pub fn highwire(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(HIGHWIRE);
        command.args(arguments).env("HIGHWIRE_RUNTIME_DIR", self.path().join("run")).stdin(Stdio::null());
        command
    }

    /// How many bytes the sockets of a process sent and received by lanes; `None` for one that tells nothing, since it runs
    /// plainly or has had no TCP socket yet.
    pub fn lane_bytes(&self, process: u32) -> Option<u64> {
        let slots = slots_of(process)?;
        Some(slots.iter().map(|slot| slot[Counter::LaneBytesIn as usize] + slot[Counter::LaneBytesOut as usize]).sum())
    }

    /// How many sockets a process has, as it tells itself.
    pub fn sockets(&self, process: u32) -> Option<usize> {
        Some(slots_of(process)?.iter().filter(|slot| slot[Counter::Descriptor as usize] != 0).count())
    }
}

/// The words of each connection in the counters' file of a process.
fn slots_of(process: u32) -> Option<Vec<[u64; counters::SLOT_WORDS]>> {
    let user = std::fs::metadata(format!("/proc/{process}")).ok()?.uid();
    let mut name = [0; 64];
    let path = counters::directory(user, Some(process), &mut name).to_str().unwrap();
    let words: Vec<u64> =
        std::fs::read(path).ok()?.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words.first(), Some(&counters::MAGIC), "{path} is of another version");
    Some(words[counters::HEADER_WORDS..].as_chunks().0.to_vec())
}

/// A user without privileges, who has the command under test where it can be read.
pub struct Nobody {
    user: u32,
    highwire: PathBuf,
    own: PathBuf,
}

impl Nobody {
    pub fn new(ground: &Ground) -> Nobody {
        Nobody::numbered(ground, NOBODY)
    }

    /// One of several.
    pub fn numbered(ground: &Ground, user: u32) -> Nobody {
        let highwire = ground.directory("binaries").join("highwire");
        if !highwire.exists() {
            std::fs::copy(HIGHWIRE, &highwire).unwrap();
        }
        let own = ground.directory(&format!("own-{user}"));
        std::fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(&own, Some(user), Some(user)).unwrap();
        Nobody { user, highwire, own }
    }

    /// A program as this user runs it.
    pub fn command(&self, program: &Path) -> Command {
        let user = self.user;
        let mut command = Command::new(installed("setpriv", "util-linux"));
        command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups", "--"]).arg(program);
        command.env("HIGHWIRE_RUNTIME_DIR", &self.own).env("HOME", &self.own).current_dir("/").stdin(Stdio::null());
        command
    }

    /// The same under Highwire.
    pub fn highwire(&self, program: &Path) -> Command {
        let mut command = self.command(&self.highwire);
        command.args(["run", "--"]).arg(program);
        command
    }
}

const NOBODY: u32 = 65534;

/// A port at which nobody listens at the moment.
pub fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// A program of the machine. Where it is missing, the test fails and says what to install.
pub fn installed(program: &str, package: &str) -> PathBuf {
    ["/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/bin"]
        .iter()
        .map(|directory| Path::new(directory).join(program))
        .find(|path| path.exists())
        .unwrap_or_else(|| panic!("{program} is not installed (Debian: apt-get install {package})"))
}

/// Waits until something is so.
pub fn until(what: &str, mut so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !so() {
        assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until somebody listens at this port.
pub fn until_listening(port: u16) {
    // By looking: a connection would be one more that the server has to serve.
    let wanted = format!("0100007F:{port:04X} 00000000:0000 0A");
    let anywhere = format!("00000000:{port:04X} 00000000:0000 0A");
    until(&format!("somebody listens at port {port}"), || {
        let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
        sockets.contains(&wanted) || sockets.contains(&anywhere)
    });
}

/// Whether this is root; if not, says loudly what is left out.
pub fn is_root(what: &str) -> bool {
    let root = std::fs::metadata("/proc/self").unwrap().uid() == 0;
    if !root {
        eprintln!("SKIPPED: {what}: only root can test it");
    }
    root
}
