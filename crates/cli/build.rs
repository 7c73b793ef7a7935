//! Builds the library that `highwire run` preloads and makes it part of the command, so that one file is all there is.
//!
//! A library of this kind cannot be a dependency of a program (its functions would become the program's own), so it is
//! built by itself, always optimized, into a place of this build's own.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let own = PathBuf::from(env("CARGO_MANIFEST_DIR"));
    let root = own.join("../..");
    for watched in ["crates/preload", "crates/lane", "crates/mem/src", "Cargo.lock", "Cargo.toml"] {
        println!("cargo::rerun-if-changed={}", root.join(watched).display());
    }
    let into = Path::new(&env("OUT_DIR")).join("preload");
    let mut cargo = Command::new(env("CARGO"));
    cargo.args([
        "build",
        "--locked",
        "--quiet",
        "--package",
        "highwire-preload",
        "--profile",
        "preload",
        "--target-dir",
    ]);
    cargo.arg(&into).current_dir(&root);
    // What was asked for this build's own code: lints of another driver, a model checker, instrumentation.
    let other = [
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "CARGO_ENCODED_RUSTFLAGS",
        "RUSTFLAGS",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET",
    ];
    for name in other {
        cargo.env_remove(name);
    }
    let status = cargo.status().unwrap_or_else(|error| panic!("{cargo:?}: {error}"));
    assert!(status.success(), "{cargo:?} failed");
    let library = into.join("preload/libhighwire_preload.so");
    println!("cargo::rustc-env=HIGHWIRE_PRELOAD={}", library.display());
}

fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}
