//! Notices that this machine or process was put back to an earlier state, as far as the kernel tells.
//!
//! What was restored from a snapshot would seal other packets with numbers that it used before, and that gives the keys of
//! its sessions away. Hypervisors tell a machine that it is another one now (VM generation), which the kernel reports to
//! everybody who listens (uevents, Linux 6.10). A process that was restored from a checkpoint on another machine, or after a
//! reboot, finds another boot id.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Since when this is one run of one machine.
#[derive(Debug)]
pub(crate) struct RestoreWatch {
    /// None in a sandbox that has no such sockets.
    events: Option<OwnedFd>,
    /// None without /proc.
    boot: Option<BootId>,
    boot_read: Instant,
}

type BootId = [u8; 36];

impl RestoreWatch {
    pub(crate) fn begin() -> RestoreWatch {
        RestoreWatch { events: listen().ok(), boot: boot_id(), boot_read: Instant::now() }
    }

    /// Readable when there may be something to notice.
    pub(crate) fn events(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref().map(AsFd::as_fd)
    }

    /// Whether it happened since the last call. `notified` says that [`RestoreWatch::events`] is readable.
    pub(crate) fn was_restored(&mut self, notified: bool) -> bool {
        let now = Instant::now();
        // The clock of another boot may be behind.
        let is_due = now.checked_duration_since(self.boot_read).is_none_or(|since| since >= BOOT_ID_EVERY);
        // A thread that is busy sleeps on nothing.
        let generation = (notified || is_due) && self.events.as_ref().is_some_and(has_new_generation);
        if !generation && !is_due {
            return false;
        }
        self.boot_read = now;
        let boot = boot_id();
        let other_boot = self.boot.is_some() && boot.is_some() && self.boot != boot;
        self.boot = boot.or(self.boot);
        generation || other_boot
    }
}

/// What the kernel reports of devices, in the group that every user may hear.
fn listen() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(KOBJECT_UEVENT))?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
    Ok(socket)
}

/// Takes all reports; whether one was of a new generation of the machine.
fn has_new_generation(socket: &OwnedFd) -> bool {
    let mut found = false;
    let mut report = [0; 8192];
    loop {
        match rustix::net::recv(socket, &mut report, RecvFlags::empty()) {
            Ok((length, _)) if length > 0 => found |= is_new_generation(&report[..length.min(8192)]),
            // Some were lost in a storm of reports, which are hardly ever of this kind.
            Err(Errno::INTR | Errno::NOBUFS) => {}
            _ => return found,
        }
    }
}

/// A report is a line for people and then words `NAME=value`, each with a zero behind it.
fn is_new_generation(report: &[u8]) -> bool {
    report.split(|byte| *byte == 0).any(|word| word == b"NEW_VMGENID=1")
}

fn boot_id() -> Option<BootId> {
    let file =
        rustix::fs::open("/proc/sys/kernel/random/boot_id", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 36];
    (rustix::io::read(file, &mut text) == Ok(text.len())).then_some(text)
}

const KERNEL_GROUP: u32 = 1;
const BOOT_ID_EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_new_generation_of_the_machine_is_noticed() {
        let of_a_machine = b"change@/devices/platform/vmgenid\0ACTION=change\0NEW_VMGENID=1\0SEQNUM=7\0";
        assert!(is_new_generation(of_a_machine));
        for other in [&b"add@/devices/virtual/net/veth0\0ACTION=add\0SEQNUM=8\0"[..], b"", b"XNEW_VMGENID=1\0"] {
            assert!(!is_new_generation(other), "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn another_boot_id_is_noticed_once() {
        let mut watch = RestoreWatch::begin();
        assert!(!watch.was_restored(false), "nothing has happened");
        watch.boot = Some([b'0'; 36]);
        assert!(!watch.was_restored(false), "it is read about once in a second");
        watch.boot_read -= BOOT_ID_EVERY;
        assert!(watch.was_restored(false));
        watch.boot_read -= BOOT_ID_EVERY;
        assert!(!watch.was_restored(false));
    }
}
