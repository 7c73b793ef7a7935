//! Compiles the programs that measurements start: plain C, by the system's own compiler, so that they are programs like
//! any other. Their bytes become part of this crate.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to put it"));
    println!("cargo:rerun-if-changed=programs/stream.h");
    for name in ["pingpong", "memcached_get", "threads"] {
        let source = Path::new("programs").join(name).with_extension("c");
        println!("cargo:rerun-if-changed={}", source.display());
        compile(&source, &out.join(name));
    }
}

fn compile(source: &Path, program: &Path) {
    let Some(compiler) = compiler() else {
        println!(
            "cargo:warning=no C compiler for this target is known: `bench lane` and a part of `bench apps` will not run"
        );
        std::fs::write(program, []).expect("the place that cargo gave can be written to");
        return;
    };
    let compiled = Command::new(&compiler).args(["-O2", "-Wall", "-pthread", "-o"]).arg(program).arg(source).status();
    match compiled {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{compiler} could not compile {}: {status}", source.display()),
        Err(error) => panic!("{compiler} could not be started: {error}; please install a C compiler, or name it in CC"),
    }
}

/// The compiler for this target, as the `cc` crate names it. For another machine than this one there need be none: to
/// check the crate it is enough that something is there.
fn compiler() -> Option<String> {
    let [target, host] = ["TARGET", "HOST"].map(|name| env::var(name).unwrap_or_default());
    let named = [format!("CC_{target}"), format!("CC_{}", target.replace('-', "_"))];
    for name in named.iter().map(String::as_str).chain((target == host).then_some("CC")) {
        println!("cargo:rerun-if-env-changed={name}");
        if let Ok(compiler) = env::var(name) {
            return Some(compiler);
        }
    }
    (target == host).then(|| "cc".to_owned())
}
