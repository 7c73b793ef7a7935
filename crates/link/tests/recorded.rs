//! What goes and comes over a recorded link is in its file, byte by byte, and nothing else is.

use highwire_link::{
    Burst, Clock, Impaired, Impairments, Inbox, Link, LinkCounters, Network, NetworkConfig, ReceiveError, Recorded,
    Recording, RecordingError, RecordingOptions, SendError, UdpLink, UdpOptions, Woven,
};
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

#[test]
fn the_bytes_of_a_file_over_ipv4() {
    // Seven bytes from 192.0.2.1:4000 to 192.0.2.2:4001, at 3.000000007 s.
    let expected = "
        4d3cb2a1 0200 0400 00000000 00000000 00000400 65000000
        03000000 07000000 23000000 23000000
        4500 0023 0000 4000 4011 b6c6 c0000201 c0000202
        0fa0 0fa1 000f 0000
        70617373776f72";
    assert_file(["192.0.2.1:4000", "192.0.2.2:4001"], b"passwor", RecordingOptions::default(), expected);
}

#[test]
fn the_bytes_of_a_file_over_ipv6_with_packets_cut() {
    // The checksum is that of all seven bytes, of which four are kept.
    let expected = "
        4d3cb2a1 0200 0400 00000000 00000000 34000000 65000000
        03000000 07000000 34000000 37000000
        60000000 000f 11 40 20010db8000000000000000000000001 20010db8000000000000000000000002
        0fa0 0fa1 000f b7d5
        70617373";
    let cut = RecordingOptions { packet_bytes_max: 4 };
    assert_file(["[2001:db8::1]:4000", "[2001:db8::2]:4001"], b"passwor", cut, expected);
}

fn assert_file(ends: [&str; 2], packet: &[u8], options: RecordingOptions, expected: &str) {
    let [left, right] = ends.map(|end| end.parse().unwrap());
    let network = Network::new(NetworkConfig::default());
    let place = Place::new();
    let recording = Recording::with(&place.file, options).unwrap();
    let mut link = Recorded::new(network.link(left), recording, Clock::Simulated(network.clone()));
    network.advance_to(Duration::new(3, 7));
    assert_eq!(link.send(&[Burst::single(right, packet)]), Ok(1));
    drop(link);
    let written = std::fs::read(&place.file).unwrap();
    let hex: String = written.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, expected.split_whitespace().collect::<String>());
}

#[test]
fn bursts_are_there_packet_by_packet_in_the_order_of_both_directions() {
    let place = Place::new();
    let network = Network::new(NetworkConfig::default());
    let (here, there) = (address("192.0.2.1:7"), address("192.0.2.2:8"));
    let mut link = place.record(network.link(here), Clock::Simulated(network.clone()));
    let mut other = network.link(there);
    let contents: Vec<Vec<u8>> = (0..40).map(|i| pattern([0, 1, 50, 150, 275][i % 5], i)).collect();
    let bursts: Vec<_> = contents.iter().map(|bytes| Burst { to: there, bytes, segment: 50 }).collect();
    assert_eq!(link.send(&bursts), Ok(40));
    let mut expected: Vec<_> = bursts.iter().flat_map(Burst::packets).map(|bytes| seen(here, there, bytes)).collect();
    other.send(&[Burst { to: here, bytes: &contents[4], segment: 100 }]).unwrap();
    network.advance_to(network.next_arrival().unwrap());
    assert_eq!(link.receive(&mut Inbox::new()), Ok(3));
    expected.extend(contents[4].chunks(100).map(|bytes| seen(there, here, bytes)));
    drop(link);
    assert_eq!(place.packets(), expected);
    let times: Vec<Duration> = place.read().iter().map(|packet| packet.time).collect();
    let (first, last) = (times[0], times[times.len() - 1]);
    assert_eq!((first, last), (Duration::ZERO, NetworkConfig::default().latency));
}

#[test]
fn a_woven_burst_is_there_packet_by_packet() {
    // Heads of odd lengths: pieces do not begin at a word of the checksum.
    let (heads, payload) = (pattern(17 + 2 * 9, 1), pattern(33 + 41 + 20, 2));
    for there in ["192.0.2.2:8", "[2001:db8::2]:8"].map(address) {
        let here = SocketAddr::new(if there.is_ipv4() { [192, 0, 2, 1].into() } else { IpAddr::from([0x99; 16]) }, 7);
        let burst = Woven { to: there, heads: &heads, first_head: 17, head: 9, payload: &payload, segment: 50 };
        let network = Network::new(NetworkConfig::default());
        let place = Place::new();
        let mut link = place.record(network.link(here), Clock::Simulated(network.clone()));
        assert_eq!(link.send_woven(&burst), Ok(true));
        drop(link);
        let expected: Vec<_> = burst.to_bytes().chunks(50).map(|bytes| seen(here, there, bytes)).collect();
        assert_eq!(expected.len(), 3);
        assert_eq!(place.packets(), expected);
    }
}

#[test]
fn what_the_kernel_coalesced_is_there_packet_by_packet_with_date_and_time() {
    for at in ["127.0.0.1:0", "[::1]:0"] {
        let Ok(link) = UdpLink::bind(address(at), UdpOptions::default()) else {
            assert!(at.starts_with('['), "no {at}");
            continue;
        };
        let place = Place::new();
        let mut link = place.record(link, Clock::real());
        let mut other = UdpLink::bind(address(at), UdpOptions::default()).unwrap();
        let (here, there) = (link.local_address(), other.local_address());
        let began = UNIX_EPOCH.elapsed().unwrap();
        let (question, answer) = (pattern(20_005, 1), pattern(30_007, 2));
        link.send(&[Burst { to: there, bytes: &question, segment: 1400 }]).unwrap();
        other.send(&[Burst { to: here, bytes: &answer, segment: 1300 }]).unwrap();
        receive(&mut link, 24);
        let mut expected: Vec<_> = question.chunks(1400).map(|bytes| seen(here, there, bytes)).collect();
        expected.extend(answer.chunks(1300).map(|bytes| seen(there, here, bytes)));
        drop(link);
        assert_eq!(place.packets(), expected);
        let times: Vec<Duration> = place.read().iter().map(|packet| packet.time).collect();
        assert!(times.is_sorted() && times[0] >= began && times[times.len() - 1] <= UNIX_EPOCH.elapsed().unwrap());
    }
}

#[test]
fn a_link_at_all_addresses_is_shown_at_the_one_that_its_peer_sees() {
    for at in ["0.0.0.0:0", "[::]:0"] {
        // Both reach IPv4, the second as a guest of IPv6.
        let Ok(link) = UdpLink::bind(address(at), UdpOptions::default()) else {
            assert!(at.starts_with('['), "no {at}");
            continue;
        };
        let place = Place::new();
        let mut link = place.record(link, Clock::real());
        let mut other = UdpLink::bind(address("127.0.0.1:0"), UdpOptions::default()).unwrap();
        let (here, there) = (address(&format!("127.0.0.1:{}", link.local_address().port())), other.local_address());
        link.send(&[Burst::single(there, b"question")]).unwrap();
        other.send(&[Burst::single(here, b"answer")]).unwrap();
        receive(&mut link, 1);
        drop(link);
        assert_eq!(place.packets(), [seen(here, there, b"question"), seen(there, here, b"answer")]);
    }
}

#[test]
fn only_what_the_link_took_is_there() {
    let place = Place::new();
    let (here, there) = (address("192.0.2.1:7"), address("192.0.2.2:8"));
    let mut link = place.record(Narrow { room: 0, here }, Clock::real());
    let bursts = [b"one", b"two", b"six"].map(|bytes| Burst::single(there, bytes));
    let woven = Woven { to: there, heads: b"h", first_head: 1, head: 1, payload: b"ead", segment: 4 };
    let refused = SendError::TooLarge { bytes: 0 };
    for (room, sent, woven_sent) in [(0, Ok(0), Ok(false)), (2, Ok(2), Ok(true)), (9, Err(refused), Err(refused))] {
        link.beneath().room = room;
        assert_eq!(link.send(&bursts), sent);
        assert_eq!(link.send_woven(&woven), woven_sent);
    }
    drop(link);
    let expected = [&b"one"[..], b"two", b"head"].map(|bytes| seen(here, there, bytes));
    assert_eq!(place.packets(), expected);
}

#[test]
fn what_is_lost_later_was_sent_all_the_same() {
    let place = Place::new();
    let network = Network::new(NetworkConfig::default());
    let (here, there) = (address("192.0.2.1:7"), address("192.0.2.2:8"));
    let all = Impairments { loss: 1.0, ..Impairments::default() };
    let bad = Impaired::new(network.link(here), all, 1, Clock::Simulated(network.clone()));
    let mut link = place.record(bad, Clock::Simulated(network.clone()));
    link.send(&[Burst::single(there, b"lost")]).unwrap();
    assert_eq!(link.beneath().impaired_counters().lost, 1);
    drop(link);
    assert_eq!(place.packets(), [seen(here, there, b"lost")]);
}

#[test]
fn the_file_can_be_read_while_it_is_written() {
    let place = Place::new();
    let network = Network::new(NetworkConfig::default());
    let (here, there) = (address("192.0.2.1:7"), address("192.0.2.2:8"));
    let recording = Recording::create(&place.file).unwrap();
    assert_eq!(place.packets(), []);
    let mut link = Recorded::new(network.link(here), recording.clone(), Clock::Simulated(network.clone()));
    let bytes = pattern(1000, 1);
    let burst = Burst::single(there, &bytes);
    let mut expected = vec![seen(here, there, &bytes)];
    // A receive that finds nothing.
    link.send(&[burst]).unwrap();
    assert_eq!(link.receive(&mut Inbox::new()), Ok(0));
    assert_eq!(place.packets(), expected);
    // A word.
    link.send(&[burst]).unwrap();
    recording.flush();
    expected.push(expected[0].clone());
    assert_eq!(place.packets(), expected);
    // Nobody has time: so many that they are written anyway, and whole ones only.
    (0..500).for_each(|_| assert_eq!(link.send(&[burst]), Ok(1)));
    let written = place.packets().len();
    assert!(written > 400 && written < 502, "{written} of 502");
    assert_eq!(recording.packets(), 502);
    link.into_inner();
    assert_eq!(place.packets().len(), 502);
}

#[test]
fn two_links_share_a_file() {
    let place = Place::new();
    let network = Network::new(NetworkConfig::default());
    let recording = Recording::create(&place.file).unwrap();
    let ends = [address("192.0.2.1:7"), address("192.0.2.2:8")];
    let link = |at| Recorded::new(network.link(at), recording.clone(), Clock::Simulated(network.clone()));
    let [mut left, mut right] = ends.map(link);
    left.send(&[Burst::single(ends[1], b"question")]).unwrap();
    network.advance_to(network.next_arrival().unwrap());
    assert_eq!(right.receive(&mut Inbox::new()), Ok(1));
    right.send(&[Burst::single(ends[0], b"answer")]).unwrap();
    drop((left, right));
    let question = seen(ends[0], ends[1], b"question");
    assert_eq!(place.packets(), [question.clone(), question, seen(ends[1], ends[0], b"answer")]);
}

#[test]
fn a_file_that_cannot_be_created_is_named() {
    let path = PathBuf::from("/nowhere/at/all.pcap");
    let error = Recording::create(&path).unwrap_err();
    assert_eq!(error, RecordingError::Create { path, errno: Errno::NOENT });
    assert!(error.to_string().contains("/nowhere/at/all.pcap"), "{error}");
}

#[test]
fn a_full_disk_ends_the_recording_and_not_the_traffic() {
    let recording = Recording::create("/dev/full").unwrap();
    let network = Network::new(NetworkConfig::default());
    let ends = [address("192.0.2.1:7"), address("192.0.2.2:8")];
    let mut left = Recorded::new(network.link(ends[0]), recording.clone(), Clock::Simulated(network.clone()));
    let mut right = network.link(ends[1]);
    for _ in 0..3 {
        assert_eq!(left.send(&[Burst { to: ends[1], bytes: &[7; 100_000], segment: 1000 }]), Ok(1));
        network.advance_to(network.next_arrival().unwrap());
        assert_eq!(receive(&mut right, 100), 100);
        assert_eq!(left.receive(&mut Inbox::new()), Ok(0));
    }
    let path = PathBuf::from("/dev/full");
    assert_eq!(recording.error(), Some(RecordingError::Write { path, packets: 0, errno: Errno::NOSPC }));
    assert_eq!(recording.packets(), 0);
}

#[test]
fn a_disk_that_fills_up_leaves_whole_packets() {
    // A pipe whose reader leaves stands for a disk that has room for some.
    let place = Place::new();
    let pipe = place.file.with_extension("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let reader = std::thread::spawn({
        let (pipe, file) = (pipe.clone(), place.file.clone());
        move || {
            let mut pipe = std::fs::File::open(pipe).unwrap();
            let mut bytes = vec![0; 24 + 16 + 28 + 4];
            std::io::Read::read_exact(&mut pipe, &mut bytes).unwrap();
            std::fs::write(file, bytes).unwrap();
        }
    });
    let recording = Recording::create(&pipe).unwrap();
    let (here, there) = (address("192.0.2.1:7"), address("192.0.2.2:8"));
    let mut link = Recorded::new(Narrow { room: 1, here }, recording.clone(), Clock::real());
    link.send(&[Burst::single(there, b"once")]).unwrap();
    recording.flush();
    reader.join().unwrap();
    for _ in 0..2 {
        assert_eq!(link.send(&[Burst::single(there, b"more")]), Ok(1));
        recording.flush();
    }
    assert_eq!(place.packets(), [seen(here, there, b"once")]);
    assert_eq!(recording.error(), Some(RecordingError::Write { path: pipe, packets: 1, errno: Errno::PIPE }));
    assert_eq!(recording.packets(), 1);
}

/// Takes so many bursts of each call, and refuses all if that is more than there are.
#[derive(Debug)]
struct Narrow {
    room: usize,
    here: SocketAddr,
}

impl Link for Narrow {
    fn local_address(&self) -> SocketAddr {
        self.here
    }

    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        if self.room > 5 { Err(SendError::TooLarge { bytes: 0 }) } else { Ok(self.room.min(bursts.len())) }
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        inbox.clear();
        Ok(0)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn burst_bytes_max(&self) -> usize {
        65_507
    }

    fn counters(&self) -> LinkCounters {
        LinkCounters::default()
    }
}

/// A directory with a file of its own.
struct Place {
    file: PathBuf,
    _directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        Place { file: directory.path().join("packets.pcap"), _directory: directory }
    }

    fn record<L: Link>(&self, link: L, clock: Clock) -> Recorded<L> {
        Recorded::new(link, Recording::create(&self.file).unwrap(), clock)
    }

    fn read(&self) -> Vec<Packet> {
        read(&self.file)
    }

    fn packets(&self) -> Vec<Seen> {
        self.read().into_iter().map(|packet| packet.seen).collect()
    }
}

/// From, to, payload.
type Seen = (SocketAddr, SocketAddr, Vec<u8>);

fn seen(from: SocketAddr, to: SocketAddr, bytes: &[u8]) -> Seen {
    (from, to, bytes.to_vec())
}

#[derive(Debug)]
struct Packet {
    time: Duration,
    seen: Seen,
}

/// Reads a file in which nothing is cut, and checks every field on the way.
fn read(path: &Path) -> Vec<Packet> {
    let bytes = std::fs::read(path).unwrap();
    let little = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!((little(0), little(4), little(8), little(12)), (0xa1b2_3c4d, 0x0004_0002, 0, 0));
    assert_eq!((little(16), little(20)), (256 << 10, 101));
    let mut packets = Vec::new();
    let mut at = 24;
    while at < bytes.len() {
        let time = Duration::new(little(at).into(), little(at + 4));
        let kept = little(at + 8) as usize;
        assert_eq!(little(at + 12) as usize, kept);
        packets.push(Packet { time, seen: parse(&bytes[at + 16..at + 16 + kept]) });
        at += 16 + kept;
    }
    packets
}

fn parse(bytes: &[u8]) -> Seen {
    let big = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let ip = |at: usize, length: usize| match length {
        4 => IpAddr::from(<[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap()),
        _ => IpAddr::from(<[u8; 16]>::try_from(&bytes[at..at + 16]).unwrap()),
    };
    let (udp, from, to) = match bytes[0] {
        0x45 => {
            assert_eq!((bytes[1], big(2) as usize, big(4), big(6)), (0, bytes.len(), 0, 0x4000));
            assert_eq!((bytes[8], bytes[9]), (64, 17));
            assert_eq!(sum(&bytes[..20]), 0xffff, "the checksum of the header");
            assert_eq!(big(26), 0, "over IPv4 there need be no checksum");
            (20, ip(12, 4), ip(16, 4))
        }
        0x60 => {
            assert_eq!((&bytes[1..4], big(4) as usize), (&[0; 3][..], bytes.len() - 40));
            assert_eq!((bytes[6], bytes[7]), (17, 64));
            assert_ne!(big(46), 0, "over IPv6 there must be a checksum");
            let pseudo = [&bytes[8..40], &[0, 0, bytes[4], bytes[5], 0, 0, 0, 17], &bytes[40..]].concat();
            assert_eq!(sum(&pseudo), 0xffff, "the checksum of the datagram");
            (40, ip(8, 16), ip(24, 16))
        }
        other => panic!("no version of IP begins with {other:#x}"),
    };
    assert_eq!(big(udp + 4) as usize, bytes.len() - udp);
    let (from, to) = (SocketAddr::new(from, big(udp)), SocketAddr::new(to, big(udp + 2)));
    (from, to, bytes[udp + 8..].to_vec())
}

/// 0xffff over anything whose checksum is right.
fn sum(bytes: &[u8]) -> u16 {
    bytes.chunks(2).fold(0u16, |sum, word| {
        let word = u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)]);
        let (sum, over) = sum.overflowing_add(word);
        sum + u16::from(over)
    })
}

/// Receives until `count` packets came, and once more; how many came.
fn receive(link: &mut impl Link, count: usize) -> usize {
    let (mut inbox, mut received, start) = (Inbox::new(), 0, Instant::now());
    while received < count {
        assert!(start.elapsed() < Duration::from_secs(5), "only {received} of {count} came");
        received += link.receive(&mut inbox).unwrap();
    }
    received
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + salt * 7919).wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}
