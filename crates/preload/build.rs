//! Compiles the shim with the system's C compiler, which every Rust on Linux needs to link anyway.

use std::path::PathBuf;
use std::process::Command;

const UNITS: [&str; 11] = [
    "begin",
    "by_number",
    "descriptors",
    "inside",
    "parts",
    "processes",
    "real",
    "receiving",
    "sending",
    "stdio",
    "waiting",
];

fn main() {
    println!("cargo::rerun-if-changed=src/shim");
    println!("cargo::rerun-if-env-changed=CC");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says where to"));
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let flags = [
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O2",
        "-g1",
        "-fPIC",
        "-fexceptions",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
    ];
    // What unwinds these frames is a cancelled thread, which must find them.
    let more = ["-fasynchronous-unwind-tables", "-U_FORTIFY_SOURCE", "-Wno-clobbered", "-c"];
    let objects = UNITS.map(|unit| {
        let object = out.join(unit).with_extension("o");
        run(Command::new(&compiler).args(flags).args(more).arg(format!("src/shim/{unit}.c")).arg("-o").arg(&object));
        object
    });
    let archive = out.join("libhighwire_shim.a");
    let _ = std::fs::remove_file(&archive);
    run(Command::new("ar").arg("crs").arg(&archive).args(&objects));
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static:+whole-archive=highwire_shim");
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}; is a C compiler installed?"));
    assert!(status.success(), "{command:?} failed");
}
