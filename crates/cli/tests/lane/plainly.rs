//! What runs plainly under Highwire, and is right then: programs that nothing can be preloaded into, and ends that do not see
//! each other.

use crate::actor::{Actor, Ended, run};
use crate::compiled::{compile, compiled};
use crate::ground::{Ground, Nobody, Way, is_root};
use crate::network;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

#[test]
fn a_static_program_runs_plainly_and_run_says_so() {
    let ground = Ground::new();
    let program = compile("hello", "hello-static", &["-static"]);
    says_why(&ground, &program, "static");
}

#[test]
fn a_32_bit_program_runs_plainly_and_run_says_so() {
    let ground = Ground::new();
    // Without a C library, which is not there for 32 bits.
    let program =
        compile("hello_bare", "hello-32", &["-m32", "-static", "-nostdlib", "-ffreestanding", "-fno-pic", "-no-pie"]);
    says_why(&ground, &program, "32");
}

#[test]
fn a_program_of_another_c_library_runs_plainly_and_run_says_so() {
    let ground = Ground::new();
    // Its loader has the name of musl's, and says what the program would.
    let flags = ["-static", "-nostdlib", "-ffreestanding", "-fno-pic", "-no-pie"];
    let loader = ground.path().join("ld-musl-x86_64.so.1");
    std::fs::copy(compile("hello_bare", "loader", &flags), &loader).unwrap();
    std::fs::set_permissions(&loader, Permissions::from_mode(0o755)).unwrap();
    let program = ground.path().join("hello-musl");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lane/c/hello.c");
    let linker = format!("-Wl,--dynamic-linker={}", loader.display());
    let output = Command::new("cc").arg(&linker).arg("-o").arg(&program).arg(source).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    says_why(&ground, &program, "musl");
}

#[test]
fn a_go_program_runs_plainly_and_run_says_so() {
    let ground = Ground::new();
    // What Go's linker leaves in each program, also in those that use libc for names: its sockets are its own.
    let program = compile("hello", "hello-go", &["-DGO"]);
    says_why(&ground, &program, "Go");
}

/// Go's programs begin with megabytes of code; and some are stripped of everything that a program does not need to run.
#[test]
fn a_large_go_program_runs_plainly_and_run_says_so() {
    let ground = Ground::new();
    let program = compile("hello", "hello-large-go", &["-DGO", "-DLARGE"]);
    let mut bytes = std::fs::read(&program).unwrap();
    let place = bytes.windows(14).position(|part| part == b"\xff Go buildinf:").unwrap();
    assert!(place > 1 << 20, "it is at {place}");
    says_why(&ground, &program, "Go");
    // The section header table: its place, and the number of its entries.
    bytes[40..48].fill(0);
    bytes[60..64].fill(0);
    let stripped = ground.file("hello-stripped-go", bytes);
    std::fs::set_permissions(&stripped, Permissions::from_mode(0o755)).unwrap();
    says_why(&ground, &stripped, "Go");
}

#[test]
fn a_set_uid_program_runs_plainly_and_run_says_so() {
    if !is_root("set-uid programs under Highwire") {
        return;
    }
    let ground = Ground::new();
    let program = ground.path().join("hello-set-uid");
    std::fs::copy(compile("hello", "hello", &[]), &program).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o4755)).unwrap();
    // For another user only: root's are root's anyway, and the loader takes what is preloaded.
    let nobody = Nobody::new(&ground);
    let plain = run("plain", nobody.command(&program).arg("argument"));
    let highwire = run("highwire", nobody.highwire(&program).arg("argument"));
    says_so(&plain, &highwire, "set-uid");
}

/// All users that a user namespace does not map have one number there: a library in a folder of that number could be any
/// user's.
#[test]
fn a_program_whose_user_is_not_mapped_runs_plainly_and_run_says_so() {
    if !is_root("a user that its user namespace does not map") {
        return;
    }
    let ground = Ground::new();
    let program = compile("hello", "hello", &[]);
    let unmapped = |way| {
        let command = ground.command(way, &program);
        let mut unshare = Command::new("unshare");
        unshare.arg("--user").arg(command.get_program()).args(command.get_args()).arg("argument");
        unshare
    };
    let plain = run("plain", &mut unmapped(Way::Plain));
    let highwire = run("highwire", &mut unmapped(Way::Highwire));
    says_so(&plain, &highwire, "not mapped");
}

/// The program does what it does, and standard error says that it does so plainly, and why.
fn says_why(ground: &Ground, program: &Path, why: &str) {
    let plain = run("plain", ground.command(Way::Plain, program).arg("argument"));
    let highwire = run("highwire", ground.command(Way::Highwire, program).arg("argument"));
    says_so(&plain, &highwire, why);
}

fn says_so(plain: &Ended, highwire: &Ended, why: &str) {
    assert_eq!(highwire.status, plain.status, "{highwire:?}");
    assert_eq!(highwire.output, plain.output, "{highwire:?}");
    assert!(plain.errors.is_empty(), "{plain:?}");
    assert!(highwire.errors.contains("plain") && highwire.errors.contains(why), "no word of {why:?}: {highwire:?}");
}

#[test]
fn ends_in_different_network_namespaces_stay_plain() {
    if !is_root("ends in different network namespaces") {
        return;
    }
    let ground = Ground::new();
    let [near, far] = network::joined();
    let command = ground.command(Way::Highwire, compiled("namespaces"));
    let mut server = Actor::start("server", near.enter(&command).args(["across", "server", "0"]));
    let port = server.told("port");
    let mut client = Actor::start("client", far.enter(&command).args(["across", "client", &port, "10.99.0.1"]));
    let process = client.told("hold").parse().unwrap();
    assert!(ground.lane_bytes(process).is_none_or(|bytes| bytes == 0), "a lane between two networks");
    client.end_input();
    assert!(client.ended_well().contains(&"client done".to_owned()));
    assert!(server.ended_well().contains(&"server done".to_owned()));
}

/// Both ends at 127.0.0.1, each in a namespace of its own, at the same port: names alone say nothing.
#[test]
fn equal_names_in_different_namespaces_are_not_taken_for_each_other() {
    if !is_root("equal names in different network namespaces") {
        return;
    }
    let ground = Ground::new();
    let both = network::joined();
    let command = ground.command(Way::Highwire, compiled("namespaces"));
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for namespace in &both {
        let mut server = Actor::start("server", namespace.enter(&command).args(["twins", "server", "7700"]));
        assert_eq!(server.told("port"), "7700");
        servers.push(server);
    }
    for (number, namespace) in both.iter().enumerate() {
        // Even the client's port is the same in both.
        let stream = number.to_string();
        let arguments = ["twins", "client", "7700", "127.0.0.1", &stream];
        clients.push(Actor::start("client", namespace.enter(&command).args(arguments)));
    }
    for (number, client) in clients.into_iter().enumerate() {
        assert_eq!(client.ended_well().last().map(String::as_str), Some("client done"), "client {number}");
    }
    for server in servers {
        assert_eq!(server.ended_well().last().map(String::as_str), Some("server done"));
    }
}
