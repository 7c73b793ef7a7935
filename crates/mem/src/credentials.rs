//! The process at the other end of a Unix socket, as far as the namespaces of this process let the kernel tell.
//!
//! A process outside this PID namespace has no number here: the kernel reports 0. A user outside this user namespace has
//! none either: the kernel reports the overflow number, 65534, for all of them alike. Neither number is a name, so neither
//! leaves this module.

use crate::sys;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// The process that connected, or that was listening, as the kernel says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id when it connected or began to listen; `None` in a PID namespace that this process does not see.
    pub pid: Option<u32>,
    /// User id; `None` for a user that this user namespace does not map. Two of them may be two users.
    pub uid: Option<u32>,
    /// Group id; `None` for a group that this user namespace does not map.
    pub gid: Option<u32>,
}

impl Credentials {
    /// Of the other end of a Unix socket.
    pub fn of_peer(socket: impl AsFd) -> Result<Credentials, Errno> {
        let (pid, uid, gid) = sys::peer_credentials(socket)?;
        Ok(Credentials {
            pid: u32::try_from(pid).ok().filter(|pid| *pid != 0),
            uid: mapped_user(uid),
            gid: mapped(gid, c"/proc/sys/kernel/overflowgid", &OVERFLOW_GROUP, c"/proc/self/gid_map"),
        })
    }
}

impl fmt::Display for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid}")?,
            None => f.write_str("a process")?,
        }
        match self.uid {
            Some(uid) => write!(f, " of user {uid}")?,
            None => f.write_str(" of a user that this user namespace does not map")?,
        }
        if self.pid.is_none() {
            f.write_str(if self.uid.is_some() { " in another PID namespace" } else { ", in another PID namespace" })?;
        }
        Ok(())
    }
}

/// Tells one process from another for as long as either is held on to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessIdentity {
    /// Number in this PID namespace.
    Number(u32),
    /// Inode of its pidfd, which no other process ever has.
    Inode(u64),
}

impl ProcessIdentity {
    /// Of the process at the other end; `None` where it has no number and the kernel's pidfds do not tell processes apart.
    pub fn of_peer(socket: impl AsFd, credentials: Credentials) -> Result<Option<ProcessIdentity>, Errno> {
        if let Some(pid) = credentials.pid {
            return Ok(Some(ProcessIdentity::Number(pid)));
        }
        let Some(pidfd) = peer_pidfd(socket, credentials)? else { return Ok(None) };
        // Before Linux 6.9 all pidfds share one anonymous inode.
        if rustix::fs::fstatfs(&pidfd)?.f_type != PIDFS_MAGIC {
            return Ok(None);
        }
        Ok(Some(ProcessIdentity::Inode(rustix::fs::fstat(&pidfd)?.st_ino)))
    }
}

/// A descriptor that becomes readable when the process at the other end dies. `None` where the kernel has no
/// `SO_PEERPIDFD` (before Linux 6.5) and the process no number here: the hang-up of the socket tells of its death then,
/// unless a child of it still holds the socket.
pub fn peer_pidfd(socket: impl AsFd, credentials: Credentials) -> Result<Option<OwnedFd>, Errno> {
    pidfd_by(sys::peer_pidfd(socket), credentials)
}

fn pidfd_by(asked: Result<OwnedFd, Errno>, credentials: Credentials) -> Result<Option<OwnedFd>, Errno> {
    match asked {
        Ok(pidfd) => return Ok(Some(pidfd)),
        Err(Errno::NOPROTOOPT | Errno::INVAL | Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(errno),
    }
    // By number. The socket's other end is open, so the number is still its.
    let pid = credentials.pid.and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
    pid.map(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())).transpose()
}

/// This user if its number stands for one user only; `None` for the number that users have which this user namespace does
/// not map. It is `None` also for a mapped user of that number where others are not mapped: nothing tells them apart.
pub fn mapped_user(uid: u32) -> Option<u32> {
    mapped(uid, c"/proc/sys/kernel/overflowuid", &OVERFLOW_USER, c"/proc/self/uid_map")
}

/// Without memory of the program's allocator: the preloaded library asks too.
fn mapped(id: u32, overflow: &std::ffi::CStr, known: &AtomicU32, map: &std::ffi::CStr) -> Option<u32> {
    if known.load(Ordering::Relaxed) == NOT_READ {
        let number = first_line(overflow, |numbers| numbers.next()).unwrap_or(OVERFLOW_DEFAULT);
        known.store(number, Ordering::Relaxed);
    }
    if id != known.load(Ordering::Relaxed) {
        return Some(id);
    }
    // The one map that leaves no number out: that of the first namespace, and of those that are given all of it.
    let all = first_line(map, |numbers| {
        let mut numbers = numbers.skip(2);
        numbers.next()
    });
    (all == Some(u32::MAX)).then_some(id)
}

/// What `take` makes of the numbers in the first line of a short file; `None` for a file that cannot be read.
fn first_line(path: &std::ffi::CStr, take: impl FnOnce(&mut dyn Iterator<Item = u32>) -> Option<u32>) -> Option<u32> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 128];
    let bytes = rustix::io::read(&file, &mut text).ok()?;
    let line = text[..bytes].split(|byte| *byte == b'\n').next()?;
    let mut numbers = line
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|word| !word.is_empty())
        .map_while(|word| std::str::from_utf8(word).ok()?.parse().ok());
    take(&mut numbers)
}

/// Which users may be at the other end.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Allow {
    /// This process's own user.
    #[default]
    SameUser,
    /// These users too. A number that stands for all users which this user namespace does not map (65534) names none.
    Users(Vec<u32>),
    /// Anybody.
    Everyone,
}

impl Allow {
    /// Whether this user may be there. `None` is a user that this user namespace does not map: the same as no other, not
    /// even as this process's own where that is not mapped either.
    pub fn admits(&self, uid: Option<u32>) -> bool {
        let own = rustix::process::geteuid().as_raw();
        match self {
            _ if uid == Some(own) => true,
            Allow::SameUser => false,
            Allow::Users(users) => uid.is_some_and(|uid| users.contains(&uid)),
            Allow::Everyone => true,
        }
    }
}

static OVERFLOW_USER: AtomicU32 = AtomicU32::new(NOT_READ);
static OVERFLOW_GROUP: AtomicU32 = AtomicU32::new(NOT_READ);
/// No id has this number.
const NOT_READ: u32 = u32::MAX;
const OVERFLOW_DEFAULT: u32 = 65_534;
const PIDFS_MAGIC: rustix::fs::FsWord = 0x5049_4446;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    fn pair() -> (OwnedFd, OwnedFd) {
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn the_peer_of_a_pair_is_this_process() {
        let (one, _other) = pair();
        let found = Credentials::of_peer(&one).unwrap();
        assert_eq!(found.pid, Some(std::process::id()));
        assert_eq!(found.uid, mapped_user(rustix::process::geteuid().as_raw()));
        assert_eq!(ProcessIdentity::of_peer(&one, found).unwrap(), Some(ProcessIdentity::Number(std::process::id())));
    }

    #[test]
    fn a_kernel_without_the_option_is_asked_by_number_and_without_a_number_says_nothing() {
        let (one, _other) = pair();
        let here = Credentials::of_peer(&one).unwrap();
        let nowhere = Credentials { pid: None, ..here };
        for lacks in [Errno::NOPROTOOPT, Errno::INVAL] {
            assert!(pidfd_by(Err(lacks), here).unwrap().is_some());
            assert!(pidfd_by(Err(lacks), nowhere).unwrap().is_none());
        }
        // Anything else is a failure, and nothing that a number would mend.
        for fails in [Errno::MFILE, Errno::SRCH] {
            assert_eq!(pidfd_by(Err(fails), here).unwrap_err(), fails);
        }
    }

    #[test]
    fn two_processes_without_numbers_are_told_apart_by_their_pidfds() {
        let (one, _other) = pair();
        let nowhere = Credentials { pid: None, ..Credentials::of_peer(&one).unwrap() };
        let Some(own) = ProcessIdentity::of_peer(&one, nowhere).unwrap() else {
            eprintln!("NOT TESTED, needs Linux 6.9: identities of pidfds");
            return;
        };
        assert_eq!(ProcessIdentity::of_peer(&one, nowhere).unwrap(), Some(own), "the same one");
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let other = ProcessIdentity::Inode(rustix::fs::fstat(&pidfd).unwrap().st_ino);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_ne!(own, other);
    }

    #[test]
    fn users_of_the_first_namespace_are_all_mapped() {
        let all = std::fs::read_to_string("/proc/self/uid_map").unwrap();
        let mapped = all.split_whitespace().nth(2) == Some("4294967295");
        assert_eq!(mapped_user(0), Some(0));
        assert_eq!(mapped_user(4711), Some(4711));
        assert_eq!(mapped_user(65_534), mapped.then_some(65_534));
    }

    #[test]
    fn a_file_that_is_missing_or_says_nothing_maps_nobody() {
        let known = AtomicU32::new(OVERFLOW_DEFAULT);
        let of = |id, map: &std::ffi::CStr| mapped(id, c"/nonexistent", &known, map);
        assert_eq!((of(65_534, c"/nonexistent"), of(7, c"/nonexistent")), (None, Some(7)));
        for (text, whole) in [
            ("", false),
            ("nonsense\n", false),
            ("         0       1000          1\n", false),
            ("         0     100000      65536\n", false),
            ("         0          0 4294967295\n", true),
        ] {
            let map = rustix::fs::memfd_create("map", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&map, text.as_bytes()).unwrap();
            let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&map));
            let path = std::ffi::CString::new(path).unwrap();
            assert_eq!(of(65_534, &path), whole.then_some(65_534), "{text:?}");
        }
        // Without the sysctl the number is what it is everywhere.
        assert_eq!(mapped(65_534, c"/nonexistent", &AtomicU32::new(NOT_READ), c"/nonexistent"), None);
    }

    #[test]
    fn a_process_is_named_by_what_is_known_of_it() {
        let known = Credentials { pid: Some(7), uid: Some(1000), gid: Some(1000) };
        assert_eq!(known.to_string(), "process 7 of user 1000");
        let elsewhere = Credentials { pid: None, ..known };
        assert_eq!(elsewhere.to_string(), "a process of user 1000 in another PID namespace");
        let stranger = Credentials { uid: None, ..known };
        assert_eq!(stranger.to_string(), "process 7 of a user that this user namespace does not map");
    }
}
