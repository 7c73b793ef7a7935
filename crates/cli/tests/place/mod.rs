//! Where the command is run, and a process of it that answers.

use std::fs::DirBuilder;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The command under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_highwire");

/// Directories of a test's own. While it lives, no other test of its file runs: most of them keep
/// two CPUs busy.
pub struct Place {
    directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    pub fn new() -> Place {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let directory = tempfile::Builder::new().prefix("hw").tempdir().unwrap();
        DirBuilder::new().mode(0o700).create(directory.path().join("run")).unwrap();
        Place { directory, _alone: alone }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The command, with names in this place.
    pub fn highwire(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command.args(arguments).env("HIGHWIRE_RUNTIME_DIR", self.path().join("run")).stdin(Stdio::null());
        command
    }

    /// `highwire echo`, not started yet.
    pub fn echo(&self, address: &str, with: &[&str]) -> Command {
        let mut command = self.highwire(&["echo", address]);
        command.args(with);
        command
    }
}

/// A process that answers, ended with this value.
pub struct Echo {
    pub child: Child,
    pub address: String,
}

impl Echo {
    /// Starts it, and waits until it says where it listens.
    pub fn start(command: &mut Command) -> Echo {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split(' ').nth(2).unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Echo { child, address }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
