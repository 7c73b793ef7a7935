//! One socket of a link, with what is remembered of it.

use super::{BindError, UdpOptions, sys};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

/// One socket of a link.
pub(super) struct Socket {
    descriptor: OwnedFd,
    /// The kernel's count of drops when it was last told; it wraps.
    drops_seen: u32,
    pub(super) pace: Pace,
    /// It was full, and is watched until it has room.
    pub(super) awaits_room: bool,
    /// Nothing was in its queue at the last look.
    pub(super) is_empty: bool,
    /// How many datagrams of one small packet may come until batches are no longer expected.
    batches: u8,
}

/// Packets so large are worth a call of their own, as batches are.
const LARGE_BYTES: usize = 4096;
/// The last packets of a message are often no batch.
const SINGLES_BETWEEN_BATCHES: u8 = 4;

impl Socket {
    /// A socket for `address`, not bound yet, with what the link cannot do without.
    pub(super) fn open(address: SocketAddr, options: UdpOptions) -> Result<Socket, BindError> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let descriptor = rustix::net::socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP))
            .map_err(|errno| BindError::Socket { address, errno })?;
        set_needed(&descriptor, address, options)?;
        // The system's limits stand: the kernel gives what they allow, without an error.
        if let Some(bytes) = options.receive_buffer_bytes {
            let _ = sockopt::set_socket_recv_buffer_size(&descriptor, bytes);
        }
        if let Some(bytes) = options.send_buffer_bytes {
            let _ = sockopt::set_socket_send_buffer_size(&descriptor, bytes);
        }
        Ok(Socket { descriptor, drops_seen: 0, pace: Pace::new(), awaits_room: false, is_empty: false, batches: 0 })
    }

    /// Whether what comes next is likely to be a batch.
    pub(super) fn expects_batches(&self) -> bool {
        self.batches > 0
    }

    /// A datagram came, of packets of so many bytes.
    pub(super) fn note_batch(&mut self, bytes: usize, segment: usize) {
        let is_batch = bytes > segment || bytes >= LARGE_BYTES;
        self.batches = if is_batch { SINGLES_BETWEEN_BATCHES } else { self.batches.saturating_sub(1) };
    }

    /// Its descriptor is not ours any more: it is not closed.
    pub(super) fn abandon(self) {
        let _ = self.descriptor.into_raw_fd();
    }

    /// How many datagrams were dropped since the kernel last told its count, which is now `drops`.
    pub(super) fn note_drops(&mut self, drops: u32) -> u64 {
        u64::from(drops.wrapping_sub(std::mem::replace(&mut self.drops_seen, drops)))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Sets what the link cannot do without.
fn set_needed(socket: &OwnedFd, address: SocketAddr, options: UdpOptions) -> Result<(), BindError> {
    let needed = |option, level, name, value| {
        sys::set_option(socket.as_fd(), level, name, value).map_err(|errno| BindError::Option {
            address,
            option,
            errno,
        })
    };
    needed("SO_RXQ_OVFL", libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
    if address.is_ipv6() {
        needed("IPV6_V6ONLY", libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, i32::from(!options.dual_stack))?;
        needed("IPV6_MTU_DISCOVER", libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)?;
    }
    if address.is_ipv4() || options.dual_stack {
        needed("IP_MTU_DISCOVER", libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
    }
    Ok(())
}

/// How many slots to offer in a call: few where batches are large, so that they stay in the nearest
/// caches; many where many small ones wait; one where packets come one by one, since a call for more
/// looks for a second in vain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    slots: usize,
    /// Calls for one that brought one, without an empty look between them.
    singles: u32,
    /// After so many of them a call for more is tried; the more such calls were in vain, the rarer.
    singles_max: u32,
    /// Small datagrams that came one by one since the kernel was last asked for all that it knows of them.
    calm: u32,
}

/// What one call brings stays in the nearest caches while it is looked at.
const HOT_BYTES: u64 = 128 << 10;
const SINGLES_LEAST: u32 = 2;
const SINGLES_MOST: u32 = 64;
/// Of one packet.
const CALM_BYTES_MOST: u64 = 2048;
/// From so many on they are received plainly, and up to so many: the kernel also tells what was dropped.
const CALM: std::ops::Range<u32> = 4..64;

impl Pace {
    fn new() -> Pace {
        Pace { slots: 1, singles: 0, singles_max: SINGLES_LEAST, calm: 0 }
    }

    /// Slots to offer, of `most` that there are.
    pub(super) fn offer(&self, most: usize) -> usize {
        self.slots.min(most)
    }

    /// Small datagrams come one by one.
    pub(super) fn is_calm(&self) -> bool {
        self.slots == 1 && CALM.contains(&self.calm)
    }

    /// A call for one brought one, of so many bytes.
    pub(super) fn note_single(&mut self, bytes: u64) {
        self.calm = match self.calm + 1 {
            _ if bytes > CALM_BYTES_MOST => 0,
            // The kernel was asked just now.
            calm if calm > CALM.end => CALM.start,
            calm => calm,
        };
        self.singles += 1;
        if self.singles >= self.singles_max && bytes <= HOT_BYTES / 2 {
            (self.slots, self.singles) = (2, 0);
        }
    }

    /// A call for `offered`, more than one, brought `count`, of so many bytes in all.
    pub(super) fn note_many(&mut self, offered: usize, count: usize, bytes: u64) {
        if count <= 1 {
            (self.slots, self.singles_max) = (1, (self.singles_max * 2).min(SINGLES_MOST));
            return;
        }
        (self.singles_max, self.calm) = (SINGLES_LEAST, 0);
        if bytes > HOT_BYTES {
            self.slots = offered.div_ceil(2);
        } else if count == offered && bytes <= HOT_BYTES / 2 {
            self.slots = offered * 2;
        }
    }

    /// There was nothing.
    pub(super) fn note_empty(&mut self, offered: usize) {
        (self.slots, self.singles) = (offered.div_ceil(2), 0);
    }
}
