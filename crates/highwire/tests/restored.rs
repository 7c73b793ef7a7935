//! A machine that was put back to an earlier state, in a network namespace of the test's own: what the kernel reports to one
//! namespace, others do not hear.

use highwire::{Failure, ViOptions, WaitError, WireConfig};
use loopback::{PATIENCE, sealed, two_ends};
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, SendFlags, SocketType};
use std::process::Command;

#[allow(dead_code, reason = "other tests need more of it")]
mod loopback;

/// Has the kernel report that the machine has a new generation, as its driver does after a snapshot was restored.
fn report_a_new_generation() {
    let words = b"change@/devices/platform/vmgenid\0ACTION=change\0NEW_VMGENID=1\0";
    let mut message = Vec::new();
    let (kind, request) = (16u16, 1u16);
    message.extend_from_slice(&(16 + words.len() as u32).to_ne_bytes());
    message.extend_from_slice(&[kind.to_ne_bytes(), request.to_ne_bytes()].concat());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(words);
    let socket = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, Some(KOBJECT_UEVENT)).unwrap();
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0)).unwrap();
}

/// Runs the test of this name once more, alone with the network.
fn in_a_namespace(test: &str) {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root has network namespaces and can have the kernel report something");
        return;
    }
    let mut alone = Command::new("unshare");
    alone.args(["--net", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]).arg(std::env::current_exe().unwrap());
    let status = alone.args([test, "--exact", "--nocapture"]).env(ALONE, "1").status().expect("unshare, of util-linux");
    assert!(status.success(), "{status}");
}

const ALONE: &str = "HIGHWIRE_TEST_ALONE";

#[test]
fn sessions_of_a_machine_that_was_put_back_end_at_once_and_others_can_be_opened() {
    if std::env::var_os(ALONE).is_none() {
        return in_a_namespace("sessions_of_a_machine_that_was_put_back_end_at_once_and_others_can_be_opened");
    }
    for driver in [highwire::Driver::Thread, highwire::Driver::Caller] {
        let wire = WireConfig { keys: sealed(), driver, ..WireConfig::default() };
        let [(_caller, mut here), (_listening, mut there)] = two_ends(&wire, "udp:127.0.0.1:0", &ViOptions::new());
        report_a_new_generation();
        for vi in [&mut here, &mut there] {
            assert_eq!(vi.wait(PATIENCE).err(), Some(WaitError::NotConnected(Failure::Restored)));
        }
        two_ends(&wire, "udp:127.0.0.1:0", &ViOptions::new());
    }
}
