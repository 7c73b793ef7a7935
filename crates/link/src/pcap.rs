//! Packets as a capture file has them: classic pcap, nanoseconds, raw IP.
//!
//! ```text
//! file    magic a1b23c4d · version 2.4 · 0 · 0 · most bytes kept · link type 101      24 bytes, little-endian
//! record  seconds · nanoseconds · bytes kept · bytes there were                       16 bytes
//!         IPv4 (20) or IPv6 (40) · UDP (8) · the packet as the link took it
//! ```
//!
//! A link knows addresses and payloads. The headers between are made here, as the kernel would make them;
//! what it adds of its own (identification, time to live) has a usual value.

use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What is kept of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingOptions {
    /// Bytes of each packet that are kept; the IP and UDP headers come on top. The default keeps all; 64 keep
    /// the header of the protocol between hosts and no payload.
    pub packet_bytes_max: usize,
}

impl Default for RecordingOptions {
    fn default() -> RecordingOptions {
        RecordingOptions { packet_bytes_max: PACKET_BYTES_MAX }
    }
}

/// A capture file that links write to: see [`crate::Recorded`]. Clones are the same file, so several links
/// may share it.
///
/// The file holds whole packets at any time, also after a `kill -9`. What is not in it yet is written when
/// some 64 KiB have come together, when a receive finds nothing, when a link is dropped, and by
/// [`Recording::flush`]. If writing fails the recording ends there, and [`Recording::error`] says why; the
/// traffic goes on.
#[derive(Clone, Debug)]
pub struct Recording {
    tape: Arc<Mutex<Tape>>,
}

/// Why packets are not recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordingError {
    /// There is no such file, and none can be made.
    #[error("{path:?} cannot be created to record packets: {errno}")]
    Create {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        errno: Errno,
    },
    /// The file takes no more.
    #[error("{path:?} ends after {packets} packets, and later ones are not recorded: {errno}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Packets that are in it.
        packets: u64,
        /// What the kernel said.
        errno: Errno,
    },
}

#[derive(Debug)]
struct Tape {
    path: PathBuf,
    file: File,
    options: RecordingOptions,
    /// Whole records that are not in the file yet.
    pending: Vec<u8>,
    pending_packets: u64,
    /// What is in the file.
    bytes: u64,
    packets: u64,
    error: Option<RecordingError>,
}

impl Recording {
    /// Creates the file, or empties the one that is there, and keeps packets as they are.
    pub fn create(path: impl AsRef<Path>) -> Result<Recording, RecordingError> {
        Recording::with(path, RecordingOptions::default())
    }

    /// Creates the file, or empties the one that is there.
    pub fn with(path: impl AsRef<Path>, options: RecordingOptions) -> Result<Recording, RecordingError> {
        let path = path.as_ref().to_owned();
        let file = File::create(&path)
            .map_err(|error| RecordingError::Create { path: path.clone(), errno: errno_of(&error) })?;
        let options = RecordingOptions { packet_bytes_max: options.packet_bytes_max.min(PACKET_BYTES_MAX) };
        let pending = file_header(options);
        let mut tape = Tape { path, file, options, pending, pending_packets: 0, bytes: 0, packets: 0, error: None };
        // From now on there is a file that can be read, though nothing may ever come.
        tape.flush();
        Ok(Recording { tape: Arc::new(Mutex::new(tape)) })
    }

    /// Writes what has come so far to the file.
    pub fn flush(&self) {
        self.lock().flush();
    }

    /// Packets so far, those among them that are not in the file yet.
    pub fn packets(&self) -> u64 {
        let tape = self.lock();
        tape.packets + tape.pending_packets
    }

    /// Why the recording ended early, if it did.
    pub fn error(&self) -> Option<RecordingError> {
        self.lock().error.clone()
    }

    /// Takes down packets that went or came at one time: from, to, and the pieces of each.
    pub(crate) fn note<'a>(
        &self,
        time: Duration,
        packets: impl Iterator<Item = (SocketAddr, SocketAddr, [&'a [u8]; 2])>,
    ) {
        let mut tape = self.lock();
        for (from, to, pieces) in packets {
            if tape.error.is_some() {
                return;
            }
            tape.append(time, from, to, pieces);
            if tape.pending.len() >= PENDING_BYTES {
                tape.flush();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tape> {
        self.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tape {
    /// Makes a record. Both addresses are of one family.
    fn append(&mut self, time: Duration, from: SocketAddr, to: SocketAddr, pieces: [&[u8]; 2]) {
        let record = self.pending.len();
        self.pending.extend([0; RECORD_HEADER_BYTES]);
        let start = self.pending.len();
        let length = pieces.iter().map(|piece| piece.len()).sum();
        let headers = append_headers(&mut self.pending, from, to, length);
        pieces.iter().for_each(|piece| self.pending.extend_from_slice(piece));
        let there = self.pending.len() - start;
        if from.is_ipv6() {
            // Over all of the packet, also where less is kept.
            fill_udp_checksum(&mut self.pending[start..]);
        }
        self.pending.truncate(start + headers + length.min(self.options.packet_bytes_max));
        let kept = self.pending.len() - start;
        let fields = [time.as_secs() as u32, time.subsec_nanos(), kept as u32, there as u32];
        for (place, field) in self.pending[record..start].chunks_exact_mut(4).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        self.pending_packets += 1;
    }

    fn flush(&mut self) {
        if self.pending.is_empty() || self.error.is_some() {
            return;
        }
        match self.file.write_all(&self.pending) {
            Ok(()) => {
                self.bytes += self.pending.len() as u64;
                self.packets += self.pending_packets;
            }
            Err(error) => {
                // A part of it may be there. Without it, the file ends with a whole packet.
                let _ = self.file.set_len(self.bytes);
                let (path, packets) = (self.path.clone(), self.packets);
                self.error = Some(RecordingError::Write { path, packets, errno: errno_of(&error) });
            }
        }
        self.pending.clear();
        self.pending_packets = 0;
    }
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

fn file_header(options: RecordingOptions) -> Vec<u8> {
    let kept_max = (options.packet_bytes_max + HEADERS_BYTES_MAX) as u32;
    let mut header = Vec::with_capacity(24);
    header.extend(MAGIC.to_le_bytes());
    header.extend(2u16.to_le_bytes());
    header.extend(4u16.to_le_bytes());
    header.extend([0; 8]);
    header.extend(kept_max.to_le_bytes());
    header.extend(LINK_TYPE_RAW.to_le_bytes());
    header
}

/// Writes the headers of IP and UDP for a payload of `length` bytes; how many bytes they are.
fn append_headers(out: &mut Vec<u8>, from: SocketAddr, to: SocketAddr, length: usize) -> usize {
    let start = out.len();
    let udp_length = UDP_BYTES + length;
    match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            out.extend([0x45, 0]);
            out.extend(length_field(IPV4_BYTES + udp_length));
            // Identification 0, not to be fragmented.
            out.extend([0, 0, 0x40, 0, HOPS, UDP, 0, 0]);
            out.extend(source.octets());
            out.extend(destination.octets());
            let checksum = !ones_sum(&out[start..], 0);
            out[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
        }
        (source, destination) => {
            out.extend([0x60, 0, 0, 0]);
            out.extend(length_field(udp_length));
            out.extend([UDP, HOPS]);
            out.extend(v6_octets(source));
            out.extend(v6_octets(destination));
        }
    }
    out.extend(from.port().to_be_bytes());
    out.extend(to.port().to_be_bytes());
    out.extend(length_field(udp_length));
    out.extend([0, 0]);
    out.len() - start
}

/// A length in 16 bits. 0 is how captures and jumbograms say that it is longer; simulated packets may be.
fn length_field(length: usize) -> [u8; 2] {
    u16::try_from(length).unwrap_or(0).to_be_bytes()
}

fn v6_octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Puts the checksum into an IPv6 packet that carries UDP: over both addresses, the length, the protocol,
/// and everything from the UDP header on. IPv6 demands one; over IPv4 0 says that there is none.
fn fill_udp_checksum(packet: &mut [u8]) {
    let length = (packet.len() - IPV6_BYTES) as u64;
    let beside = (length >> 16) + (length & 0xffff) + u64::from(UDP);
    // The addresses are the end of the IP header: one run with what follows it.
    let sum = !ones_sum(&packet[IPV6_ADDRESSES_AT..], beside);
    let checksum = if sum == 0 { 0xffff } else { sum };
    packet[IPV6_BYTES + 6..IPV6_BYTES + 8].copy_from_slice(&checksum.to_be_bytes());
}

/// The sum of all 16-bit words in ones' complement, with `sum` added; an odd byte at the end is the upper
/// half of a word.
fn ones_sum(bytes: &[u8], sum: u64) -> u16 {
    let words = bytes.chunks(2).map(|word| u64::from(word[0]) << 8 | u64::from(*word.get(1).unwrap_or(&0)));
    let mut sum = words.fold(sum, |sum, word| sum + word);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Nanoseconds; microseconds have another number.
const MAGIC: u32 = 0xa1b2_3c4d;
/// IPv4 or IPv6, without anything before it.
const LINK_TYPE_RAW: u32 = 101;
const RECORD_HEADER_BYTES: usize = 16;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const IPV6_ADDRESSES_AT: usize = 8;
const UDP_BYTES: usize = 8;
const HEADERS_BYTES_MAX: usize = IPV6_BYTES + UDP_BYTES;
/// The most that programs which read captures take, headers left out.
const PACKET_BYTES_MAX: usize = (256 << 10) - HEADERS_BYTES_MAX;
const HOPS: u8 = 64;
const UDP: u8 = 17;
/// Then they are written, whether anybody has time or not.
const PENDING_BYTES: usize = 64 << 10;
