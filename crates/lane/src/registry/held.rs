//! Whether any process still has a TCP socket, as the kernel says (`NETLINK_SOCK_DIAG`).
//!
//! Processes alone do not tell: a descriptor may be on its way in a message, or belong to a child that is not known here.

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use std::net::{IpAddr, SocketAddr};

/// Whether a descriptor of the connection with these names, this cookie and this device (zero: bound to none) is open
/// anywhere. An error where the kernel does not say.
pub(crate) fn is_held(local: SocketAddr, remote: SocketAddr, cookie: u64, device: u32) -> Result<bool, Errno> {
    let kind = SocketType::DGRAM;
    let socket =
        rustix::net::socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    rustix::net::send(&socket, &request(local, remote, cookie, device), SendFlags::NOSIGNAL)?;
    let mut answer = [0; 1024];
    // The kernel has answered when the request returns.
    let (bytes, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::DONTWAIT)?;
    parse(&answer[..bytes])
}

/// A `struct nlmsghdr` with a `struct inet_diag_req_v2`.
fn request(local: SocketAddr, remote: SocketAddr, cookie: u64, device: u32) -> [u8; REQUEST_BYTES] {
    let mut message = [0; REQUEST_BYTES];
    let mut put = |at: usize, bytes: &[u8]| message[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(REQUEST_BYTES as u32).to_ne_bytes());
    put(4, &SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    put(6, &NLM_F_REQUEST.to_ne_bytes());
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    put(16, &[family.as_raw() as u8, IPPROTO_TCP]);
    // Sockets in every state.
    put(20, &u32::MAX.to_ne_bytes());
    put(24, &local.port().to_be_bytes());
    put(26, &remote.port().to_be_bytes());
    for (at, address) in [(28, local), (44, remote)] {
        match address.ip() {
            IpAddr::V4(ip) => put(at, &ip.octets()),
            IpAddr::V6(ip) => put(at, &ip.octets()),
        }
    }
    put(60, &device.to_ne_bytes());
    put(64, &(cookie as u32).to_ne_bytes());
    put(68, &((cookie >> 32) as u32).to_ne_bytes());
    message
}

/// A `struct inet_diag_msg` with the socket's inode, which is zero where no descriptor is left; or an error.
fn parse(answer: &[u8]) -> Result<bool, Errno> {
    let word = |at: usize| {
        let bytes = answer.get(at..at + 4)?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    };
    match word(4).map(|word| word as u16) {
        Some(SOCK_DIAG_BY_FAMILY) => Ok(word(INODE_AT).ok_or(Errno::BADMSG)? != 0),
        Some(NLMSG_ERROR) => match Errno::from_raw_os_error(word(16).unwrap_or(0).cast_signed().wrapping_neg()) {
            Errno::NOENT => Ok(false),
            error => Err(error),
        },
        _ => Err(Errno::BADMSG),
    }
}

const REQUEST_BYTES: usize = 72;
const INODE_AT: usize = 84;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IPPROTO_TCP: u8 = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::socket_cookie;
    use std::net::{Shutdown, TcpListener, TcpStream};

    fn names(stream: &TcpStream) -> (SocketAddr, SocketAddr, u64) {
        (stream.local_addr().unwrap(), stream.peer_addr().unwrap(), socket_cookie(stream).unwrap())
    }

    #[test]
    fn a_socket_is_held_until_its_last_descriptor_is_closed() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            let (local, remote, cookie) = names(&client);
            assert_eq!(is_held(local, remote, cookie, 0), Ok(true));
            assert_eq!(is_held(local, remote, cookie + 1, 0), Ok(false), "another socket of the same names");
            let other = client.try_clone().unwrap();
            drop(client);
            assert_eq!(is_held(local, remote, cookie, 0), Ok(true), "one of two descriptors was closed");
            server.shutdown(Shutdown::Write).unwrap();
            assert_eq!(is_held(local, remote, cookie, 0), Ok(true), "the peer has sent its FIN");
            other.shutdown(Shutdown::Write).unwrap();
            drop(other);
            assert_eq!(is_held(local, remote, cookie, 0), Ok(false));
        }
    }

    #[test]
    fn a_descriptor_on_its_way_in_a_message_is_one() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (local, remote, cookie) = names(&client);
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let descriptors = [std::os::fd::AsFd::as_fd(&client)];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
        ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&descriptors));
        rustix::net::sendmsg(&here, &[std::io::IoSlice::new(b"x")], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
        drop(client);
        assert_eq!(is_held(local, remote, cookie, 0), Ok(true));
        drop((here, there));
        assert_eq!(is_held(local, remote, cookie, 0), Ok(false));
    }
}
