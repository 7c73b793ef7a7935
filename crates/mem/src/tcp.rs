//! What the kernel knows of a TCP connection.

use rustix::io::Errno;
use rustix::net::{SocketAddrAny, getpeername, getsockname};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// How far a connection is, as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpState {
    /// Both directions are open.
    Established,
    /// One end or both have sent their FIN. What arrived before can still be read.
    Closing,
    /// Neither end sends any more, after both FINs or a reset; or it was never connected. What arrived can still be read, but
    /// the count of bytes read may be one too high: the kernel no longer says whether a FIN is among them.
    Closed,
}

/// A connection, as the kernel counts it at one moment. Bytes only: neither SYN nor FIN is among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpCounts {
    /// How far the connection is.
    pub state: TcpState,
    /// Bytes that this end's programs have written.
    pub written: u64,
    /// Bytes that this end's programs have read.
    pub read: u64,
}

impl TcpState {
    /// Asks the kernel.
    pub fn of(socket: BorrowedFd<'_>) -> Result<TcpState, Errno> {
        Ok(Info::of(socket)?.state().0)
    }
}

impl TcpCounts {
    /// Asks the kernel. The counts are exact if nobody reads or writes meanwhile; what arrives meanwhile does no harm.
    pub fn of(socket: BorrowedFd<'_>) -> Result<TcpCounts, Errno> {
        loop {
            let before = Info::of(socket)?;
            let waiting = rustix::io::ioctl_fionread(socket)?;
            let unacknowledged = unacknowledged(socket)?;
            let after = Info::of(socket)?;
            // Something arrived, or was acknowledged, between the questions.
            if (before.received, before.acknowledged) != (after.received, after.acknowledged) {
                continue;
            }
            let (state, fin_received) = after.state();
            let written = after.sent.wrapping_sub(after.repeated).wrapping_add(after.unsent);
            // The same by another count, in which the SYN of the end that connected is one.
            let beside = (after.acknowledged + unacknowledged).wrapping_sub(written);
            if state == TcpState::Established && beside > 1 {
                return Err(Errno::PROTO);
            }
            // The FIN of the other end counts as a byte received, and not as one that waits.
            let read = after.received.checked_sub(waiting + fin_received).ok_or(Errno::PROTO)?;
            return Ok(TcpCounts { state, written, read });
        }
    }
}

/// Number of the network namespace that a socket belongs to.
pub fn network_namespace(socket: BorrowedFd<'_>) -> Result<u64, Errno> {
    const SO_NETNS_COOKIE: i32 = 71;
    let mut bytes = [0u8; 8];
    option(socket, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Number of the device that a socket is bound to, as those with link-local addresses are; zero for none.
pub fn bound_device(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    const SO_BINDTOIFINDEX: i32 = 62;
    let mut bytes = [0u8; 4];
    option(socket, libc::SOL_SOCKET, SO_BINDTOIFINDEX, &mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Addresses of a socket, its own and its peer's, as far as it has any.
pub fn socket_names(socket: BorrowedFd<'_>) -> [Option<SocketAddr>; 2] {
    let names: [Option<SocketAddrAny>; 2] = [getsockname(socket).ok(), getpeername(socket).ok().flatten()];
    names.map(|name| name.and_then(|name| name.try_into().ok()))
}

const ESTABLISHED: u8 = 1;
const FIN_WAIT_1: u8 = 4;
const FIN_WAIT_2: u8 = 5;
const CLOSE_WAIT: u8 = 8;
const LAST_ACK: u8 = 9;
const CLOSING: u8 = 11;

struct Info {
    state: u8,
    acknowledged: u64,
    received: u64,
    unsent: u64,
    sent: u64,
    repeated: u64,
}

impl Info {
    /// How far the connection is, and how many FINs are among the bytes that were received.
    fn state(&self) -> (TcpState, u64) {
        match self.state {
            ESTABLISHED => (TcpState::Established, 0),
            FIN_WAIT_1 | FIN_WAIT_2 => (TcpState::Closing, 0),
            CLOSE_WAIT | LAST_ACK | CLOSING => (TcpState::Closing, 1),
            _ => (TcpState::Closed, 0),
        }
    }

    fn of(socket: BorrowedFd<'_>) -> Result<Info, Errno> {
        /// Through `tcpi_bytes_retrans`, of Linux 4.19.
        const BYTES: usize = 216;
        let mut bytes = [0u8; 256];
        if option(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)? < BYTES {
            return Err(Errno::OPNOTSUPP);
        }
        let wide = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
        let narrow = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
        Ok(Info {
            state: bytes[0],
            acknowledged: wide(120),
            received: wide(128),
            unsent: u64::from(narrow(144)),
            sent: wide(200),
            repeated: wide(208),
        })
    }
}

fn option(socket: BorrowedFd<'_>, level: i32, name: i32, into: &mut [u8]) -> Result<usize, Errno> {
    let mut length = into.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `into`.
    let result = unsafe {
        libc::syscall(libc::SYS_getsockopt, socket.as_raw_fd(), level, name, into.as_mut_ptr(), &raw mut length)
    };
    if result == 0 { Ok(length as usize) } else { Err(last_error()) }
}

fn unacknowledged(socket: BorrowedFd<'_>) -> Result<u64, Errno> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one integer to `bytes`.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { Ok(bytes.try_into().unwrap_or(0)) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn counts_are_what_was_written_and_read_at_either_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        let counts = |socket: &TcpStream| TcpCounts::of(socket.as_fd()).unwrap();
        let both = |written, read| TcpCounts { state: TcpState::Established, written, read };
        assert_eq!((counts(&client), counts(&server)), (both(0, 0), both(0, 0)));
        client.write_all(&[1; 1000]).unwrap();
        server.write_all(&[2; 70]).unwrap();
        server.read_exact(&mut [0; 300]).unwrap();
        assert_eq!((counts(&client), counts(&server)), (both(1000, 0), both(70, 300)));
        // More than the buffers take.
        client.set_nonblocking(true).unwrap();
        let mut more = 0;
        while let Ok(bytes) = client.write(&[3; 65536]) {
            more += bytes as u64;
        }
        client.read_exact(&mut [0; 70]).unwrap();
        assert_eq!((counts(&client), counts(&server)), (both(1000 + more, 70), both(70, 300)));
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(counts(&client).state, TcpState::Closing);
        assert_eq!(network_namespace(client.as_fd()), network_namespace(server.as_fd()));
    }

    #[test]
    fn a_fin_is_no_byte_that_was_read_whether_or_not_the_end_was_seen() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        client.write_all(&[1; 1000]).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let closing = |read| TcpCounts { state: TcpState::Closing, written: 0, read };
        let counts = || TcpCounts::of(server.as_fd()).unwrap();
        while counts().state == TcpState::Established {}
        assert_eq!(counts(), closing(0));
        (&server).read_exact(&mut [0; 400]).unwrap();
        assert_eq!(counts(), closing(400));
        (&server).read_exact(&mut [0; 600]).unwrap();
        assert_eq!(counts(), closing(1000));
        assert_eq!((&server).read(&mut [0; 1]).unwrap(), 0);
        assert_eq!(counts(), closing(1000));
        // The end that has sent its FIN has received none.
        server.write_all(&[2; 70]).unwrap();
        client.read_exact(&mut [0; 30]).unwrap();
        let counts = TcpCounts::of(client.as_fd()).unwrap();
        assert_eq!((counts.state, counts.read), (TcpState::Closing, 30));
    }
}
