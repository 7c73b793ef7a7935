//! The C programs, compiled once for all tests.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program of `c/`, as programs usually are: linked to libc, which is loaded when it starts.
pub fn compiled(program: &str) -> PathBuf {
    compile(program, program, &["-O1", "-g", "-pthread"])
}

/// A program of `c/`, compiled with these arguments under this name.
pub fn compile(program: &str, name: &str, arguments: &[&str]) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lane/c");
    let source = sources.join(format!("{program}.c"));
    let mut hasher = DefaultHasher::new();
    for file in [&source, &sources.join("lane.h")] {
        std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display())).hash(&mut hasher);
    }
    arguments.hash(&mut hasher);
    // Every test is a process of its own; what another one compiled is taken as it is.
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("lane-{:016x}", hasher.finish()));
    let binary = directory.join(name);
    if binary.exists() {
        return binary;
    }
    std::fs::create_dir_all(&directory).unwrap();
    let unfinished = directory.join(format!("{name}.{}", std::process::id()));
    let output = Command::new("cc")
        .args(arguments)
        .args(["-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&unfinished)
        .arg(&source)
        .output()
        .expect("cc is not installed (Debian: apt-get install gcc libc6-dev)");
    assert!(
        output.status.success(),
        "cc {arguments:?} {}:\n{}",
        source.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::rename(&unfinished, &binary).unwrap();
    binary
}
