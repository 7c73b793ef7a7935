//! Folders that are gone after a run, however it ends, and with them the processes that are registered there.

use crate::BenchError;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A directory of this process's own. A shell of its own process group, which Ctrl-C does not reach, waits for the end
/// of a pipe that only this process holds; then it ends the process groups of which it was told, and removes the
/// directory.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    keeper: Child,
}

impl Folder {
    /// Makes the directory, which must have a name that nobody else takes.
    pub(crate) fn make(path: &Path) -> Result<Folder, BenchError> {
        // Another process that had this number may have been killed together with its keeper.
        let _ = std::fs::remove_dir_all(path);
        let keeper = Command::new("sh")
            .args(["-c", KEEPER])
            .arg(path)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(BenchError::Start)?;
        let folder = Folder { path: path.to_owned(), keeper };
        std::fs::create_dir(path).map_err(|source| BenchError::Report { path: path.to_owned(), source })?;
        Ok(folder)
    }

    /// The directory for programs and what they need.
    pub(crate) fn for_programs() -> Result<Folder, BenchError> {
        Folder::make(&std::env::temp_dir().join(format!("highwire-bench-{}", std::process::id())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a file of it.
    pub(crate) fn write(&self, name: &str, contents: &[u8]) -> Result<PathBuf, BenchError> {
        let path = self.path.join(name);
        let written = std::fs::write(&path, contents);
        written.map_err(|source| BenchError::Report { path: path.clone(), source })?;
        Ok(path)
    }

    /// From now on this process group ends with the directory.
    pub(crate) fn watch(&mut self, group: u32) -> Result<(), BenchError> {
        self.tell(&format!("{group}\n"))
    }

    /// Those that were watched have ended, and their numbers may be others'.
    pub(crate) fn forget_groups(&mut self) -> Result<(), BenchError> {
        self.tell("none\n")
    }

    fn tell(&mut self, line: &str) -> Result<(), BenchError> {
        match &mut self.keeper.stdin {
            Some(pipe) => Ok(pipe.write_all(line.as_bytes())?),
            None => Ok(()),
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // It ends with the pipe, and leaves nothing.
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// The directory is removed once more if somebody was still writing.
const KEEPER: &str = r#"
groups=
while read group; do
    if [ "$group" = none ]; then groups=; else groups="$groups -$group"; fi
done
[ -z "$groups" ] || { kill -- $groups; sleep 0.2; kill -9 -- $groups; }
rm -rf -- "$0" || { sleep 1; rm -rf -- "$0"; }
"#;

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn make(name: &str) -> Folder {
        Folder::make(&std::env::temp_dir().join(format!("highwire-folder-{name}-{}", std::process::id()))).unwrap()
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("60").process_group(0).spawn().unwrap()
    }

    #[test]
    fn a_folder_and_the_processes_registered_in_it_are_gone_with_it() {
        let mut folder = make("gone");
        folder.write("file", b"contents").unwrap();
        let path = folder.path().to_owned();
        let mut watched = sleeper();
        folder.watch(watched.id()).unwrap();
        assert!(path.join("file").exists());
        drop(folder);
        assert!(!path.exists());
        let deadline = Instant::now() + Duration::from_secs(10);
        while watched.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "it lives on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn processes_that_were_forgotten_live_on() {
        let mut folder = make("forgotten");
        let mut forgotten = sleeper();
        folder.watch(forgotten.id()).unwrap();
        folder.forget_groups().unwrap();
        drop(folder);
        let lives = forgotten.try_wait().unwrap().is_none();
        forgotten.kill().unwrap();
        forgotten.wait().unwrap();
        assert!(lives);
    }
}
