//! A descriptor whose readiness is ours to decide: the *ears*, one end of a pair of sockets of which the other is the
//! *wire*.
//!
//! ```text
//!  a byte from the wire waits at the ears   ⟺  the ears are readable
//!  the ears have filled the way to the wire ⟺  they are not writable, until somebody empties the wire
//! ```

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::OwnedFd;

/// Ears and their wire. Those of one VI alone are streams, which can be filled; the wire of a queue is in the hands of
/// many peers, one of whom could end a stream for all.
pub(crate) fn wire(own: bool) -> Result<(OwnedFd, OwnedFd), Errno> {
    let kind = if own { SocketType::STREAM } else { SocketType::DGRAM };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ears, wire) = rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None)?;
    if own {
        // As little as the kernel grants: it is to be filled with little.
        rustix::net::sockopt::set_socket_send_buffer_size(&ears, 1)?;
    }
    Ok((ears, wire))
}

/// Makes the ears readable.
pub(crate) fn set_readable(wire: &OwnedFd) {
    // If it is full it is readable already.
    let _ = rustix::net::send(wire, b"!", SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Makes them not readable; false if whoever has the wire has shut it down, and they always are.
pub(crate) fn clear_readable(ears: &OwnedFd) -> bool {
    drain(ears)
}

/// Makes them writable.
pub(crate) fn set_writable(wire: &OwnedFd) {
    drain(wire);
}

/// Makes them not writable; false as above.
pub(crate) fn clear_writable(ears: &OwnedFd) -> bool {
    for _ in 0..LOOKS_MAX {
        match rustix::net::send(ears, &[0; FILLER_BYTES], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => {}
            Err(errno) => return errno != Errno::PIPE,
        }
    }
    true
}

/// Reads all there is. Bounded, or whoever goes on sending would keep us here.
fn drain(socket: &OwnedFd) -> bool {
    let mut bytes = [0u8; 4096];
    for _ in 0..LOOKS_MAX {
        match rustix::net::recv(socket, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((_, count)) if count == bytes.len() => {}
            Ok((_, 0)) => return false,
            Ok(_) | Err(_) => break,
        }
    }
    true
}

const LOOKS_MAX: usize = 64;
const FILLER_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags};

    fn readiness(ears: &OwnedFd) -> (bool, bool) {
        let mut polled = [PollFd::new(ears, PollFlags::IN | PollFlags::OUT)];
        rustix::event::poll(&mut polled, Some(&rustix::time::Timespec::default())).unwrap();
        (polled[0].revents().contains(PollFlags::IN), polled[0].revents().contains(PollFlags::OUT))
    }

    #[test]
    fn both_kinds_of_readiness_are_decided_apart() {
        let (ears, wire) = wire(true).unwrap();
        for _ in 0..1000 {
            assert_eq!(readiness(&ears), (false, true));
            clear_writable(&ears);
            assert_eq!(readiness(&ears), (false, false));
            set_readable(&wire);
            set_readable(&wire);
            assert_eq!(readiness(&ears), (true, false));
            set_writable(&wire);
            assert_eq!(readiness(&ears), (true, true));
            clear_readable(&ears);
        }
    }
}
