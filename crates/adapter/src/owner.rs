//! Whose a UDP socket of this host is.
//!
//! Without a key a packet from this host's own addresses proves nothing of its sender but the address, which the kernel
//! writes. The kernel's socket tables (`sock_diag`) tell which socket has that address, and whose it is. A session
//! without a key takes packets from that address alone [W-98], so what is true of a caller when it calls stays true: a
//! process that gets the address later does not know the number of the session.

use highwire_mem::{Allow, mapped_user};
use highwire_proto::Gate;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

/// The owner of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// There is no such socket.
    Nobody,
    /// Its user; `None` for one that this user namespace does not map.
    User(Option<u32>),
}

/// The kernel's socket tables.
#[derive(Debug)]
pub(crate) struct SocketOwners {
    netlink: OwnedFd,
    number: u32,
}

impl SocketOwners {
    pub(crate) fn open() -> io::Result<SocketOwners> {
        let netlink = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            Some(SOCK_DIAG),
        )?;
        Ok(SocketOwners { netlink, number: 0 })
    }

    /// Whose the socket is that receives what is sent from `from` to `at`.
    pub(crate) fn owner(&mut self, at: SocketAddr, from: SocketAddr) -> io::Result<Owner> {
        self.number = self.number.wrapping_add(1);
        rustix::net::send(&self.netlink, &question(self.number, at, from), SendFlags::empty())?;
        let mut answer = [0; 1024];
        loop {
            // The kernel answers before it returns from the question.
            let (length, _) = rustix::net::recv(&self.netlink, &mut answer, RecvFlags::empty())?;
            // What an earlier question was told, which failed in between, is passed over.
            if let Some(owner) = read_answer(self.number, &answer[..length])? {
                return Ok(owner);
            }
        }
    }
}

/// `struct nlmsghdr`, and `struct inet_diag_req_v2`: the socket by its exact addresses.
fn question(number: u32, at: SocketAddr, from: SocketAddr) -> Vec<u8> {
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut bytes = Vec::with_capacity(QUESTION_BYTES);
    bytes.extend((QUESTION_BYTES as u32).to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend(number.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend([family.as_raw() as u8, IPPROTO_UDP, 0, 0]);
    bytes.extend(ALL_STATES.to_ne_bytes());
    // The source is the sender of a packet, the destination the socket that receives it.
    bytes.extend(from.port().to_be_bytes());
    bytes.extend(at.port().to_be_bytes());
    for address in [from.ip(), at.ip()] {
        match address {
            IpAddr::V4(address) => bytes.extend([&address.octets()[..], &[0; 12]].concat()),
            IpAddr::V6(address) => bytes.extend(address.octets()),
        }
    }
    let interface = if let SocketAddr::V6(at) = at { at.scope_id() } else { 0 };
    bytes.extend(interface.to_ne_bytes());
    bytes.extend([0xff; 8]);
    bytes
}

/// `None` if it answers another question.
fn read_answer(number: u32, answer: &[u8]) -> io::Result<Option<Owner>> {
    let malformed = || io::Error::other("an answer of the kernel's socket tables is cut short");
    let word = |at: usize| answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or_else(malformed);
    let word = |at: usize| word(at).map(u32::from_ne_bytes);
    if word(8)? != number {
        return Ok(None);
    }
    match word(4)? as u16 {
        NLMSG_ERROR => match io::Error::from_raw_os_error(word(16)?.cast_signed().wrapping_neg()) {
            error if error.kind() == io::ErrorKind::NotFound => Ok(Some(Owner::Nobody)),
            error => Err(error),
        },
        SOCK_DIAG_BY_FAMILY => Ok(Some(Owner::User(mapped_user(word(UID_AT)?)))),
        _ => Err(io::Error::other("the kernel's socket tables gave another answer than was asked for")),
    }
}

/// Who may call a listener that has no key.
#[derive(Debug)]
pub(crate) struct UserGate {
    owners: SocketOwners,
    local: SocketAddr,
    allow: Allow,
}

impl UserGate {
    /// For a listener that is bound at `local`, an address that only this host reaches.
    pub(crate) fn new(local: SocketAddr, allow: Allow) -> io::Result<UserGate> {
        let mut owners = SocketOwners::open()?;
        // A kernel that does not keep such tables finds no socket at all.
        match owners.owner(local, SocketAddr::new(local.ip(), PORT_OF_NOBODY))? {
            Owner::Nobody => Err(io::Error::other("it does not find a socket that is there")),
            Owner::User(_) => Ok(UserGate { owners, local, allow }),
        }
    }
}

impl Gate for UserGate {
    fn admits(&mut self, from: SocketAddr) -> bool {
        let owner = self.owners.owner(from, self.local);
        matches!(owner, Ok(Owner::User(user)) if self.allow.admits(user))
    }
}

const QUESTION_BYTES: usize = 72;
/// In the answer: `struct nlmsghdr`, then `struct inet_diag_msg`.
const UID_AT: usize = 80;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const IPPROTO_UDP: u8 = 17;
const ALL_STATES: u32 = u32::MAX;
/// "Discard", which no client sends from.
const PORT_OF_NOBODY: u16 = 9;

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    fn own() -> Owner {
        Owner::User(mapped_user(rustix::process::geteuid().as_raw()))
    }

    #[test]
    fn a_socket_is_found_by_its_address_and_only_while_it_is_there() {
        let mut owners = SocketOwners::open().unwrap();
        for ip in ["127.0.0.1", "::1"] {
            let ip: IpAddr = ip.parse().unwrap();
            let (socket, other) = (UdpSocket::bind((ip, 0)).unwrap(), UdpSocket::bind((ip, 0)).unwrap());
            let (at, from) = (socket.local_addr().unwrap(), other.local_addr().unwrap());
            assert_eq!(owners.owner(at, from).unwrap(), own(), "{at}");
            // One that takes packets from one sender is found for that one.
            socket.connect(from).unwrap();
            assert_eq!(owners.owner(at, from).unwrap(), own());
            assert_eq!(owners.owner(at, SocketAddr::new(ip, PORT_OF_NOBODY)).unwrap(), Owner::Nobody);
            drop(socket);
            assert_eq!(owners.owner(at, from).unwrap(), Owner::Nobody);
        }
    }

    #[test]
    fn answers_are_read_whole_or_not_at_all() {
        let mut answer = vec![0; 124];
        answer[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        answer[8..12].copy_from_slice(&7u32.to_ne_bytes());
        answer[UID_AT..UID_AT + 4].copy_from_slice(&1000u32.to_ne_bytes());
        assert_eq!(read_answer(7, &answer).unwrap(), Some(Owner::User(Some(1000))));
        assert_eq!(read_answer(8, &answer).unwrap(), None);
        for length in (0..12).chain([UID_AT, UID_AT + 3]) {
            assert!(read_answer(7, &answer[..length]).is_err(), "{length} bytes");
        }
        answer[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
        answer[16..20].copy_from_slice(&(-2i32).to_ne_bytes());
        assert_eq!(read_answer(7, &answer).unwrap(), Some(Owner::Nobody));
        answer[16..20].copy_from_slice(&(-1i32).to_ne_bytes());
        assert_eq!(read_answer(7, &answer).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
