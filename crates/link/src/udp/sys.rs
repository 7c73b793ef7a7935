//! The system calls of UDP that rustix does not have, or not as lean: `sendmmsg`, `recvmmsg` and
//! `recvmsg`, with the control messages that ask for segmentation and tell of coalescing, and the filter that
//! sorts packets among sockets.
//!
//! The arrays that these calls need are made once and filled again for each call. The pointers in
//! them are set right before a call and not looked at after it. A single datagram needs none of them.

use crate::{Landing, Woven};
use libc::{c_int, c_void, cmsghdr, iovec, mmsghdr, msghdr, sockaddr_in, sockaddr_in6};
use rustix::io::Errno;
use std::mem::{MaybeUninit, size_of};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

/// One datagram to send, or several that the kernel cuts at `segment`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'a> {
    pub(super) to: SocketAddr,
    pub(super) bytes: &'a [u8],
    /// Below the length of `bytes` where the kernel is to cut.
    pub(super) segment: usize,
}

/// One datagram that came, or several that the kernel put together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Datagram {
    /// None for a sender that is not of the internet.
    pub(super) from: Option<SocketAddr>,
    pub(super) len: usize,
    pub(super) segment: usize,
    pub(super) truncated: bool,
    /// How many datagrams this socket has lost to a full buffer by then, modulo 2^32.
    pub(super) drops: Option<u32>,
}

/// An address as the kernel wants it; `sin_family` lies at the same place in both.
#[derive(Clone, Copy)]
#[repr(C)]
union RawAddress {
    v4: sockaddr_in,
    v6: sockaddr_in6,
}

/// Room for two control messages of four bytes each, aligned as they must be.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

const CONTROL_BYTES: usize = 64;
const _: () = assert!(align_of::<Control>() >= align_of::<cmsghdr>());
const _: () = assert!(size_of::<cmsghdr>() == 16 && 2 * (16 + 8) <= CONTROL_BYTES);

/// The arrays of one call, all of one length.
struct Arrays {
    headers: Box<[mmsghdr]>,
    vectors: Box<[iovec]>,
    addresses: Box<[RawAddress]>,
    controls: Box<[Control]>,
}

// SAFETY: the pointers inside are written right before each call and read by nobody but the kernel
// during it, so it does not matter which thread makes the call.
unsafe impl Send for Arrays {}
// SAFETY: a shared reference gives no access to anything behind the pointers.
unsafe impl Sync for Arrays {}

impl Arrays {
    fn new(count: usize) -> Arrays {
        // SAFETY: numbers and pointers only, for which all zeros is a valid value (null, 0).
        let (header, address) = unsafe {
            (MaybeUninit::<mmsghdr>::zeroed().assume_init(), MaybeUninit::<RawAddress>::zeroed().assume_init())
        };
        let vector = iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        Arrays {
            headers: vec![header; count].into_boxed_slice(),
            vectors: vec![vector; count].into_boxed_slice(),
            addresses: vec![address; count].into_boxed_slice(),
            controls: vec![Control([0; CONTROL_BYTES]); count].into_boxed_slice(),
        }
    }

    /// Points header `index` at its vector, address and control bytes.
    fn point(&mut self, index: usize, address_len: usize, control_len: usize) {
        let header = &mut self.headers[index].msg_hdr;
        header.msg_name = if address_len == 0 { ptr::null_mut() } else { (&raw mut self.addresses[index]).cast() };
        header.msg_namelen = address_len as libc::socklen_t;
        header.msg_iov = &raw mut self.vectors[index];
        header.msg_iovlen = 1;
        header.msg_control = if control_len == 0 { ptr::null_mut() } else { (&raw mut self.controls[index]).cast() };
        header.msg_controllen = control_len as _;
        header.msg_flags = 0;
    }
}

/// Sends many messages in one call, or one that does not lie in one piece.
pub(super) struct Outgoing {
    arrays: Arrays,
    /// For the latter, used as the arrays are.
    pieces: Vec<iovec>,
}

// SAFETY: as for `Arrays`: the pointers are written before each call and read only by the kernel during it.
unsafe impl Send for Outgoing {}
// SAFETY: a shared reference gives no access to anything behind the pointers.
unsafe impl Sync for Outgoing {}

impl Outgoing {
    pub(super) fn new(count: usize) -> Outgoing {
        Outgoing { arrays: Arrays::new(count), pieces: Vec::new() }
    }

    /// Sends a burst whose packets lie here and there, for the kernel to cut; to the peer of a connected
    /// socket where `to` is None.
    pub(super) fn send_woven(
        &mut self,
        socket: BorrowedFd<'_>,
        to: Option<SocketAddr>,
        burst: &Woven<'_>,
    ) -> Result<(), Errno> {
        self.pieces.clear();
        let vector = |bytes: &[u8]| iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        self.pieces.extend(burst.packets().flat_map(|(head, piece)| [vector(head), vector(piece)]));
        let address_len = to.map_or(0, |to| self.arrays.addresses[0].write(to));
        let total = burst.heads.len() + burst.payload.len();
        let control_len = self.arrays.controls[0].write_segment(burst.segment, total);
        self.arrays.point(0, address_len, control_len);
        let header = &mut self.arrays.headers[0].msg_hdr;
        header.msg_iov = self.pieces.as_mut_ptr();
        header.msg_iovlen = self.pieces.len() as _;
        // SAFETY: the header points at elements of the boxes and of the vector above, and those at bytes
        // that outlive this call and that the kernel only reads.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const *header, libc::MSG_DONTWAIT) };
        if sent < 0 { Err(last_error()) } else { Ok(()) }
    }

    /// Sends as many of `messages` as fit one call, at least one; how many went. A `connected` socket
    /// is told no addresses: all messages must be for its peer.
    pub(super) fn send<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        connected: bool,
        messages: impl Iterator<Item = Message<'a>>,
    ) -> Result<usize, Errno> {
        let mut filled = 0;
        for message in messages.take(self.arrays.headers.len()) {
            let address_len = if connected { 0 } else { self.arrays.addresses[filled].write(message.to) };
            let control_len = self.arrays.controls[filled].write_segment(message.segment, message.bytes.len());
            let base = message.bytes.as_ptr().cast_mut().cast::<c_void>();
            self.arrays.vectors[filled] = iovec { iov_base: base, iov_len: message.bytes.len() };
            self.arrays.point(filled, address_len, control_len);
            filled += 1;
        }
        if filled == 1 {
            // SAFETY: as below, for the first header alone.
            let sent = unsafe {
                libc::sendmsg(socket.as_raw_fd(), &raw const self.arrays.headers[0].msg_hdr, libc::MSG_DONTWAIT)
            };
            return if sent < 0 { Err(last_error()) } else { Ok(1) };
        }
        // SAFETY: the first `filled` headers point at elements of the boxes above, and at bytes that
        // outlive this call ('a) and that the kernel only reads.
        let sent = unsafe {
            libc::sendmmsg(socket.as_raw_fd(), self.arrays.headers.as_mut_ptr(), filled as _, libc::MSG_DONTWAIT as _)
        };
        usize::try_from(sent).map_err(|_| last_error())
    }
}

/// Receives many datagrams in one call, or one into many pieces.
pub(super) struct Incoming {
    arrays: Arrays,
    /// For the latter, used as the arrays are.
    pieces: Vec<iovec>,
}

// SAFETY: as for `Arrays`: the pointers are written before each call and used only by the kernel during it.
unsafe impl Send for Incoming {}
// SAFETY: a shared reference gives no access to anything behind the pointers.
unsafe impl Sync for Incoming {}

impl Incoming {
    pub(super) fn new() -> Incoming {
        Incoming { arrays: Arrays::new(0), pieces: Vec::new() }
    }

    /// Receives one datagram, its heads and payloads where they are expected, and what else there is in the spill.
    pub(super) fn receive_landing(
        &mut self,
        socket: BorrowedFd<'_>,
        landing: &mut Landing<'_>,
        heads: &mut [u8],
        spill: &mut [u8],
    ) -> Result<Datagram, Errno> {
        let place = landing.place.len();
        assert_eq!(heads.len(), landing.cut.heads(place), "as much room for heads as there are");
        self.pieces.clear();
        let (Range { start: mut head_at, end: heads_end }, Range { start: mut place_at, end: place_end }) =
            (heads.as_mut_ptr_range(), landing.place.as_mut_ptr_range());
        for (head, payload) in landing.cut.slots(place) {
            self.pieces.push(iovec { iov_base: head_at.cast(), iov_len: head.len() });
            self.pieces.push(iovec { iov_base: place_at.cast(), iov_len: payload.len() });
            (head_at, place_at) = (head_at.wrapping_add(head.len()), place_at.wrapping_add(payload.len()));
        }
        assert!(head_at == heads_end && place_at == place_end, "the pieces are all heads and all of the place");
        self.pieces.push(iovec { iov_base: spill.as_mut_ptr().cast(), iov_len: spill.len() });
        // SAFETY: the pieces are the heads, the place and the spill, each of them once, which are borrowed mutably
        // for longer than this call: heads and payloads follow one another without a gap and end where the buffers end,
        // as was asserted just now.
        unsafe { receive_into(socket, &mut self.pieces) }
    }

    /// Receives into as many of the `slots` as there are datagrams; how many, for
    /// [`Incoming::datagram`] to tell of. `count` is the number of slots to offer.
    pub(super) fn receive<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        count: usize,
        slots: impl Iterator<Item = &'a mut [u8]>,
    ) -> Result<usize, Errno> {
        if self.arrays.headers.len() < count {
            // Once for each inbox that is larger than those before.
            self.arrays = Arrays::new(count);
        }
        let mut filled = 0;
        for slot in slots.take(count) {
            self.arrays.vectors[filled] = iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() };
            self.arrays.point(filled, size_of::<RawAddress>(), CONTROL_BYTES);
            filled += 1;
        }
        // SAFETY: the first `filled` headers point at elements of the boxes above, and at slots that
        // are borrowed mutably for longer than this call ('a).
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.arrays.headers.as_mut_ptr(),
                filled as _,
                libc::MSG_DONTWAIT as _,
                ptr::null_mut(),
            )
        };
        usize::try_from(received).map_err(|_| last_error())
    }

    /// What the last call received into slot `index`, which must be one of those it filled.
    pub(super) fn datagram(&self, index: usize) -> Datagram {
        let header = &self.arrays.headers[index];
        describe(&header.msg_hdr, header.msg_len as usize, &self.arrays.addresses[index], &self.arrays.controls[index])
    }
}

/// Receives one datagram: where they come one at a time, a call for many costs more, since it looks
/// for a second in vain.
#[inline(always)]
pub(super) fn receive_one(socket: BorrowedFd<'_>, slot: &mut [u8]) -> Result<Datagram, Errno> {
    // SAFETY: the only piece is the slot, which is borrowed mutably for longer than this call.
    unsafe { receive_into(socket, &mut [iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() }]) }
}

/// Receives one datagram into pieces, one behind the other.
///
/// # Safety
///
/// Each piece is so many bytes that may be written until this returns, and that nobody else looks at before. No two
/// of them overlap.
#[inline(always)]
unsafe fn receive_into(socket: BorrowedFd<'_>, pieces: &mut [iovec]) -> Result<Datagram, Errno> {
    // SAFETY: numbers and pointers only, for which all zeros is a valid value (null, 0).
    let (mut header, mut address) =
        unsafe { (MaybeUninit::<msghdr>::zeroed().assume_init(), MaybeUninit::<RawAddress>::zeroed().assume_init()) };
    let mut control = Control([0; CONTROL_BYTES]);
    header.msg_name = (&raw mut address).cast();
    header.msg_namelen = size_of::<RawAddress>() as libc::socklen_t;
    header.msg_iov = pieces.as_mut_ptr();
    header.msg_iovlen = pieces.len() as _;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = CONTROL_BYTES as _;
    // SAFETY: the header points at values above, with their lengths, and at pieces that the caller vouches for; all
    // outlive the call.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT) };
    let len = usize::try_from(received).map_err(|_| last_error())?;
    Ok(describe(&header, len, &address, &control))
}

/// What a call wrote into these.
#[inline(always)]
fn describe(header: &msghdr, len: usize, address: &RawAddress, control: &Control) -> Datagram {
    let mut datagram = Datagram {
        from: address.read(header.msg_namelen as usize),
        len,
        segment: len,
        truncated: header.msg_flags & libc::MSG_TRUNC != 0,
        drops: None,
    };
    control.each(header.msg_controllen.min(CONTROL_BYTES), |level, kind, value| match (level, kind) {
        // A lie here would only cut a stranger's bytes elsewhere; 0 would not cut at all.
        (libc::SOL_UDP, libc::UDP_GRO) if value > 0 => datagram.segment = value as usize,
        (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => datagram.drops = Some(value as u32),
        _ => {}
    });
    datagram
}

impl RawAddress {
    /// Bytes written.
    fn write(&mut self, address: SocketAddr) -> usize {
        match address {
            SocketAddr::V4(address) => {
                self.v4 = sockaddr_in {
                    sin_family: libc::AF_INET as _,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                    sin_zero: [0; 8],
                };
                size_of::<sockaddr_in>()
            }
            SocketAddr::V6(address) => {
                self.v6 = sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as _,
                    sin6_port: address.port().to_be(),
                    // As std has it: the bytes of this number are taken as they are.
                    sin6_flowinfo: address.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                    sin6_scope_id: address.scope_id(),
                };
                size_of::<sockaddr_in6>()
            }
        }
    }

    fn read(&self, len: usize) -> Option<SocketAddr> {
        // SAFETY: every byte is initialized since `Arrays::new`, and any bytes are a valid value of
        // both variants; the family is at the same place in both.
        let (v4, v6) = unsafe { (self.v4, self.v6) };
        match c_int::from(v4.sin_family) {
            libc::AF_INET if len >= size_of::<sockaddr_in>() => {
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

const HEADER_BYTES: usize = size_of::<cmsghdr>();
const LEVEL_AT: usize = std::mem::offset_of!(cmsghdr, cmsg_level);
const KIND_AT: usize = std::mem::offset_of!(cmsghdr, cmsg_type);

impl Control {
    /// Asks the kernel to cut a message of `bytes`, if it is longer than its segment; bytes written.
    fn write_segment(&mut self, segment: usize, bytes: usize) -> usize {
        if segment >= bytes {
            return 0;
        }
        let segment = u16::try_from(segment).expect("a message of several packets is below 64 KiB");
        self.0[..size_of::<usize>()].copy_from_slice(&(HEADER_BYTES + 2).to_ne_bytes());
        self.0[LEVEL_AT..LEVEL_AT + 4].copy_from_slice(&libc::SOL_UDP.to_ne_bytes());
        self.0[KIND_AT..KIND_AT + 4].copy_from_slice(&libc::UDP_SEGMENT.to_ne_bytes());
        self.0[HEADER_BYTES..HEADER_BYTES + 2].copy_from_slice(&segment.to_ne_bytes());
        (HEADER_BYTES + 2).next_multiple_of(align_of::<cmsghdr>())
    }

    /// Calls `f` with the level, kind and value of each control message that holds a number of four
    /// bytes, among the first `len` bytes.
    #[inline(always)]
    fn each(&self, len: usize, mut f: impl FnMut(c_int, c_int, i32)) {
        let word = |at: usize| i32::from_ne_bytes(self.0[at..at + 4].try_into().expect("four bytes"));
        let mut at = 0;
        while at + HEADER_BYTES <= len {
            let size = self.0[at..at + size_of::<usize>()].try_into().expect("the bytes of a length");
            let size = usize::from_ne_bytes(size);
            if size < HEADER_BYTES || size > len - at {
                return;
            }
            if size >= HEADER_BYTES + 4 {
                f(word(at + LEVEL_AT), word(at + KIND_AT), word(at + HEADER_BYTES));
            }
            at += size.next_multiple_of(align_of::<cmsghdr>());
        }
    }
}

/// Sets a socket option that is a number.
pub(super) fn set_option(socket: BorrowedFd<'_>, level: c_int, name: c_int, value: c_int) -> Result<(), Errno> {
    let pointer: *const c_int = &raw const value;
    // SAFETY: points at four bytes that live through the call, which only reads them.
    let result = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, pointer.cast(), size_of::<c_int>() as libc::socklen_t)
    };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// An instruction of the kernel's classic packet filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    /// Loads a byte of the payload; the program ends with 0 if there is none.
    LoadByte { at: u32 },
    /// Passes over so many instructions if what was loaded is this.
    JumpIfEqual { to: u32, by: u8 },
    /// The same if it is more.
    JumpIfGreater { than: u32, by: u8 },
    /// Ends with what was loaded.
    ReturnLoaded,
    /// Ends with this.
    Return(u32),
}

/// Lets a program choose among the sockets that share an address with this one, which must not be alone.
pub(super) fn attach_filter(socket: BorrowedFd<'_>, program: &[Instruction]) -> Result<(), Errno> {
    let encode = |instruction: &Instruction| {
        let (code, jt, k) = match *instruction {
            Instruction::LoadByte { at } => (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 0, at),
            Instruction::JumpIfEqual { to, by } => (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, by, to),
            Instruction::JumpIfGreater { than, by } => (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, by, than),
            Instruction::ReturnLoaded => (libc::BPF_RET | libc::BPF_A, 0, 0),
            Instruction::Return(value) => (libc::BPF_RET | libc::BPF_K, 0, value),
        };
        libc::sock_filter { code: code as u16, jt, jf: 0, k }
    };
    let mut code: Vec<libc::sock_filter> = program.iter().map(encode).collect();
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
    let pointer: *const libc::sock_fprog = &raw const program;
    // SAFETY: points at a program whose instructions live through the call, which only reads them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            pointer.cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
