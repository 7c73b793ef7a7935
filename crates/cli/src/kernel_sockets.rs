//! What the kernel says of the TCP sockets of a process: `/proc/PID/fd` and `/proc/PID/net`.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;

/// A TCP socket that has an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelSocket {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) state: State,
}

/// Its state, by the kernel's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(u8);

impl State {
    pub(crate) const LISTEN: State = State(10);
    const CLOSE: State = State(7);
    #[cfg(test)]
    pub(crate) const ESTABLISHED: State = State(1);

    pub(crate) fn name(self) -> &'static str {
        let names = [
            "established",
            "syn-sent",
            "syn-received",
            "fin-wait-1",
            "fin-wait-2",
            "time-wait",
            "closed",
            "close-wait",
            "last-ack",
            "listening",
            "closing",
            "syn-received",
        ];
        usize::from(self.0).checked_sub(1).and_then(|index| names.get(index)).copied().unwrap_or("unknown")
    }

    /// Whether bytes go, or went, both ways.
    pub(crate) fn is_connection(self) -> bool {
        self != State::LISTEN && self != State::CLOSE
    }
}

type Sockets = HashMap<u64, KernelSocket>;

/// The tables of network namespaces, each read once: they list every connection of the host.
#[derive(Default)]
pub(crate) struct KernelTables {
    by_namespace: HashMap<PathBuf, Rc<Sockets>>,
}

impl KernelTables {
    /// The TCP sockets that a process can have, by their inodes.
    pub(crate) fn of(&mut self, process: u32) -> Rc<Sockets> {
        let read = || {
            let mut sockets = Sockets::new();
            for table in ["tcp", "tcp6"] {
                let lines = fs::read_to_string(format!("/proc/{process}/net/{table}")).unwrap_or_default();
                sockets.extend(lines.lines().skip(1).filter_map(parse_line));
            }
            Rc::new(sockets)
        };
        match fs::read_link(format!("/proc/{process}/ns/net")) {
            Ok(namespace) => self.by_namespace.entry(namespace).or_insert_with(read).clone(),
            // Another user's: which namespace it is in is not told.
            Err(_) => read(),
        }
    }
}

/// The sockets among the descriptors of a process, in order, with their inodes; nothing if that may not be known.
pub(crate) fn socket_descriptors(process: u32) -> Option<Vec<(u32, u64)>> {
    let mut found: Vec<(u32, u64)> = fs::read_dir(format!("/proc/{process}/fd"))
        .ok()?
        .flatten()
        .filter_map(|entry| {
            let descriptor = entry.file_name().to_str()?.parse().ok()?;
            let target = fs::read_link(entry.path()).ok()?;
            let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
            Some((descriptor, inode))
        })
        .collect();
    found.sort_unstable();
    Some(found)
}

/// A line of `/proc/net/tcp` or `tcp6`.
fn parse_line(line: &str) -> Option<(u64, KernelSocket)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let local = parse_address(fields.next()?)?;
    let remote = parse_address(fields.next()?)?;
    let state = State(u8::from_str_radix(fields.next()?, 16).ok()?);
    let inode = fields.nth(5)?.parse().ok()?;
    Some((inode, KernelSocket { local, remote, state }))
}

/// The kernel prints addresses as words of the machine, and ports as numbers.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |index: usize| {
        let digits = address.get(8 * index..8 * index + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let address = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for index in 0..4 {
                bytes[4 * index..4 * index + 4].copy_from_slice(&word(index)?);
            }
            // An IPv4 address in an IPv6 socket is told as the other end tells it.
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    #[test]
    fn the_kernel_and_this_process_agree_on_its_sockets() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let process = std::process::id();
            let inodes: HashMap<u32, u64> = socket_descriptors(process).unwrap().into_iter().collect();
            let sockets = KernelTables::default().of(process);
            let told = |fd: i32| sockets[&inodes[&u32::try_from(fd).unwrap()]];
            let told_stream = told(stream.as_raw_fd());
            assert_eq!(told_stream.local, stream.local_addr().unwrap());
            assert_eq!(told_stream.remote, stream.peer_addr().unwrap());
            assert_eq!(told_stream.state.name(), "established");
            assert!(told_stream.state.is_connection());
            let told_listener = told(listener.as_raw_fd());
            assert_eq!((told_listener.local, told_listener.state), (listener.local_addr().unwrap(), State::LISTEN));
        }
    }

    #[test]
    fn a_mapped_address_is_told_as_the_other_end_tells_it() {
        let line = "   3: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:C350 08 \
                    00000000:00000000 00:00000000 00000000  1000        0 77 1 0000000000000000 20 4 0 10 -1";
        // The words of the example are those of a little-endian machine.
        if cfg!(target_endian = "little") {
            let (inode, socket) = parse_line(line).unwrap();
            assert_eq!((inode, socket.local), (77, "127.0.0.1:8080".parse().unwrap()));
            assert_eq!((socket.remote, socket.state.name()), ("127.0.0.1:50000".parse().unwrap(), "close-wait"));
        }
    }

    #[test]
    fn lines_that_are_none_are_left_out() {
        for line in ["", "  sl  local_address", "0: 0100007F:1F90 0100007F", "0: xx:1F90 0100007F:C350 01 0 0 0 0 0 7"]
        {
            assert_eq!(parse_line(line), None, "{line:?}");
        }
    }
}
