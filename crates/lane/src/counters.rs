//! What a process tells of its connections: a file in memory that it writes and others read.

use std::ffi::CStr;

/// "HWCOUNT1", little-endian, in the first word of a file that is ready.
pub const MAGIC: u64 = u64::from_le_bytes(*b"HWCOUNT1");
/// Word of the header: the process.
pub const PROCESS_WORD: usize = 1;
/// Word of the header: not zero while lanes are switched off.
pub const SWITCH_WORD: usize = 2;
/// Words before the first connection: a page.
pub const HEADER_WORDS: usize = PAGE_BYTES / size_of::<u64>();
/// Bytes of the pages that the file is made of. Where the kernel has others, a process has no such file: it is mapped over
/// memory of this alignment, and would replace what else is on its first and its last page.
pub const PAGE_BYTES: usize = 4096;
/// Words of a connection.
pub const SLOT_WORDS: usize = 16;
/// Counters of a connection.
pub const COUNTERS: usize = Counter::Reason as usize + 1;

/// Words of a connection, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Descriptor plus one; zero for a place that no connection has.
    Descriptor,
    /// Bytes received through the lane.
    LaneBytesIn,
    /// Calls that received through the lane.
    LaneCallsIn,
    /// Bytes received by TCP.
    TcpBytesIn,
    /// Calls that received by TCP.
    TcpCallsIn,
    /// Bytes sent through the lane.
    LaneBytesOut,
    /// Calls that sent through the lane.
    LaneCallsOut,
    /// Bytes sent by TCP.
    TcpBytesOut,
    /// Calls that sent by TCP.
    TcpCallsOut,
    /// Times that a reader slept in the kernel and was woken.
    Sleeps,
    /// Times that a reader spun.
    Spins,
    /// Times that spinning found something.
    SpinsGood,
    /// System calls that the program did not make.
    CallsAvoided,
    /// Bytes that went by TCP because the lane was full.
    FullBytes,
    /// The kernel's number of the socket.
    Cookie,
    /// Why not more went by the lane; see [`Reason`].
    Reason,
}

/// Why bytes of a connection go by TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Reason {
    /// Not used enough yet.
    Young,
    /// The other end has not come: it is not run with Highwire, or not used enough yet.
    OtherEnd,
    /// No registry answers.
    NoRegistry,
    /// All lanes are in use.
    Exhausted,
    /// The registry refused.
    Refused,
    /// It has a lane; what went by TCP went while nobody was looking or the lane was full.
    Paired,
    /// A port that was not to be used, by --only or --never.
    Port,
    /// Several processes have the descriptor.
    Shared,
    /// Used through stdio.
    Stdio,
    /// Signals tell of its readiness.
    Signals,
    /// An option or a call that only the kernel can serve.
    Option,
    /// Out-of-band bytes.
    OutOfBand,
    /// The process gave up rights, or changed its root or user, before there was a lane.
    Sandbox,
    /// The process uses io_uring.
    Ring,
    /// The lane said what cannot be true.
    Lie,
    /// Watched through several epoll sets, or in a way that only the kernel can serve.
    Epoll,
    /// Switched off.
    SwitchedOff,
    /// Memory could not be mapped.
    Memory,
}

impl Reason {
    /// The reason of this number.
    pub fn from_number(number: u64) -> Option<Reason> {
        ALL.iter().copied().find(|reason| *reason as u64 == number)
    }

    /// In words, with what can be done.
    pub fn words(self) -> &'static str {
        match self {
            Reason::Young => "not used enough yet: a lane comes after 8 receives or 64 KiB",
            Reason::OtherEnd => "the other end has not come: is it on this host, and run with `highwire run`?",
            Reason::NoRegistry => "no registry answers: the next `highwire run` starts one",
            Reason::Exhausted => "all lanes are in use",
            Reason::Refused => {
                "the registry refused: the connection is not open both ways, or the process is in another namespace"
            }
            Reason::Paired => "paired; by TCP went what nobody was looking for, or what found the lane full",
            Reason::Port => "its port is excluded by --only or --never",
            Reason::Shared => "several processes have the descriptor",
            Reason::Stdio => "used through stdio, which does not go through the library",
            Reason::Signals => "its readiness is told by signals (O_ASYNC), which only the kernel can send",
            Reason::Option => "an option or call is used that only the kernel can serve",
            Reason::OutOfBand => "out-of-band bytes are used",
            Reason::Sandbox => {
                "the process changed its root, user or namespace, or limited its system calls, before there was a lane"
            }
            Reason::Ring => "the process uses io_uring, which does not go through the library",
            Reason::Lie => "the lane's memory said what cannot be true; the connection went on by TCP",
            Reason::Epoll => "watched by several epoll sets, or in a way that only the kernel can serve",
            Reason::SwitchedOff => "switched off by `highwire lanes off`",
            Reason::Memory => "memory for the lane could not be mapped",
        }
    }
}

const ALL: [Reason; 18] = [
    Reason::Young,
    Reason::OtherEnd,
    Reason::NoRegistry,
    Reason::Exhausted,
    Reason::Refused,
    Reason::Paired,
    Reason::Port,
    Reason::Shared,
    Reason::Stdio,
    Reason::Signals,
    Reason::Option,
    Reason::OutOfBand,
    Reason::Sandbox,
    Reason::Ring,
    Reason::Lie,
    Reason::Epoll,
    Reason::SwitchedOff,
    Reason::Memory,
];

/// Where processes of a user have their files, or the file of one of them.
pub fn directory(user: u32, process: Option<u32>, into: &mut [u8; 64]) -> &CStr {
    let mut used = 0;
    let mut put = |bytes: &[u8]| {
        into[used..used + bytes.len()].copy_from_slice(bytes);
        used += bytes.len();
    };
    put(b"/dev/shm/highwire-");
    put(digits(user, &mut [0; 10]));
    if let Some(process) = process {
        put(b"/");
        put(digits(process, &mut [0; 10]));
    }
    put(b"\0");
    CStr::from_bytes_until_nul(into).unwrap_or_default()
}

/// A number in decimal, without memory of anybody's.
pub fn digits(mut number: u32, into: &mut [u8; 10]) -> &[u8] {
    let mut begin = into.len();
    loop {
        begin -= 1;
        into[begin] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &into[begin..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_of_user_and_process() {
        assert_eq!(directory(0, None, &mut [0; 64]), c"/dev/shm/highwire-0");
        assert_eq!(directory(1000, Some(4_294_967_295), &mut [0; 64]), c"/dev/shm/highwire-1000/4294967295");
    }

    #[test]
    fn every_reason_has_its_number() {
        assert!(ALL.iter().enumerate().all(|(index, reason)| *reason as usize == index));
        assert_eq!(Reason::from_number(99), None);
    }
}
