//! PostgreSQL for `bench apps`: where its programs are, and a cluster of its own that is gone with the run.

use crate::BenchError;
use crate::launch::{self, become_user};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program of PostgreSQL. Debian keeps them apart, and has a script on the path that finds those of a cluster.
pub(super) fn program(name: &str) -> Option<PathBuf> {
    let on_path = launch::find("pgbench")?;
    let mut versions: Vec<PathBuf> = std::fs::read_dir(DEBIAN)
        .map(|versions| versions.filter_map(|version| Some(version.ok()?.path().join("bin"))).collect())
        .unwrap_or_default();
    versions.sort();
    let beside = on_path.parent().map(Path::to_owned);
    versions.into_iter().rev().chain(beside).map(|place| place.join(name)).find(|program| program.is_file())
}

/// What is missing here for it.
pub(super) fn missing() -> Option<String> {
    let lost = ["postgres", "initdb", "pgbench"].into_iter().find(|name| program(name).is_none())?;
    Some(format!("`{lost}` is not installed (Debian: apt install postgresql)"))
}

/// Nothing is written for good: it is the connections that are measured.
pub(super) fn arguments(port: &str, folder: &str) -> String {
    let settings =
        "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c autovacuum=off -c max_connections=40";
    format!("-D {folder}/data -h 127.0.0.1 -p {port} -k {folder} {settings}")
}

/// Makes a cluster in this folder. The server refuses to be root.
pub(super) fn prepare(folder: &Path, user: Option<&str>) -> Result<(), BenchError> {
    if let Some(user) = user {
        run(Command::new("chown").arg(user).arg(folder))?;
    }
    let Some(initdb) = program("initdb") else { return Err(BenchError::Missing(missing().unwrap_or_default())) };
    let mut command = match user {
        Some(user) => {
            let [setpriv, arguments @ ..] = become_user(user);
            let mut command = Command::new(setpriv);
            command.args(arguments).arg(initdb);
            command
        }
        None => Command::new(initdb),
    };
    run(command.args(["--no-sync", "--no-locale", "--auth=trust", "--username", USER, "-D"]).arg(folder.join("data")))
}

/// Makes the tables that pgbench asks about.
pub(super) fn fill(port: u16) -> Result<(), BenchError> {
    let Some(pgbench) = program("pgbench") else { return Err(BenchError::Missing(missing().unwrap_or_default())) };
    let port = port.to_string();
    run(Command::new(pgbench).args(["-i", "-q", "-s", "1", "-h", "127.0.0.1", "-p", &port, "-U", USER, "postgres"]))
}

fn run(command: &mut Command) -> Result<(), BenchError> {
    let output = command.current_dir("/").stdin(Stdio::null()).output().map_err(BenchError::Start)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    Err(BenchError::Program { name: "postgres", why: format!("{}: {said}", output.status) })
}

/// The user of its server, and of its database.
pub(super) const USER: &str = "postgres";
const DEBIAN: &str = "/usr/lib/postgresql";
