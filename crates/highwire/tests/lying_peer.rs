//! A peer that has the key and lies: its handshake and its seals are right, and nothing else need be. Whatever it
//! says, its session goes on or ends with an error that names why, memory stays bounded, and the other sessions of
//! the endpoint keep working.

use highwire::{Config, Failure, Nic, Operation, Receive, State, Vi, ViListener, WaitError, WireConfig};
use highwire_proto::{ClusterKey, Header, Keys};
use highwire_proto::{Established, HeaderFlags, Initiator, Kind, Offer, Ranges, Sealing, SeededEntropy};
use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
/// Silence of so long ends a session.
const SILENCE: Duration = Duration::from_secs(2);

fn key() -> ClusterKey {
    ClusterKey::from_random([5; 32])
}

fn nic() -> Nic {
    let wire = WireConfig { keys: Keys::new(key()), death: SILENCE, ..WireConfig::default() };
    Nic::with_wire(Config::default(), wire).unwrap()
}

/// Memory that this process has taken and touched, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// A session of the protocol with nothing behind it: it says what it is told to say, under a right seal.
struct Liar {
    socket: UdpSocket,
    sealing: Sealing,
    session: u32,
    /// The number of the next packet.
    next: u64,
    /// Numbers of packets of the other side, and of those of this one that it has acknowledged.
    heard: Ranges,
    acknowledged: Ranges,
    acknowledges: bool,
    notes_sent: u32,
    /// Notes that came, by message.
    notes: BTreeMap<u32, Vec<u8>>,
    next_vi: u32,
    since: Instant,
}

/// A VI of a liar's: both sides' numbers for it.
#[derive(Clone, Copy)]
struct Ends {
    theirs: u32,
}

impl Liar {
    fn meet(address: &str) -> Liar {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(address.strip_prefix("udp:").unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        let port = u64::from(socket.local_addr().unwrap().port());
        let mut entropy = SeededEntropy::new(port);
        let offer = Offer { session: 7, message_bytes_max: u32::MAX, death_ms: 0, incarnation: port };
        let (mut initiator, hello) = Initiator::new(Some(&key()), offer, &mut entropy).unwrap();
        let (mut packet, until) = (vec![0; 1 << 16], Instant::now() + PATIENCE);
        let Established { sealing, peer, .. } = loop {
            assert!(Instant::now() < until, "no welcome");
            socket.send(&hello).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            let Ok(bytes) = socket.recv(&mut packet) else { continue };
            match initiator.handle_welcome(&packet[..bytes]) {
                Ok(established) => break established,
                Err((again, _)) => initiator = again,
            }
        };
        Liar {
            socket,
            sealing,
            session: peer.session,
            next: 0,
            heard: Ranges::new(),
            acknowledged: Ranges::new(),
            acknowledges: true,
            notes_sent: 0,
            notes: BTreeMap::new(),
            next_vi: 100,
            since: Instant::now(),
        }
    }

    /// Seals and sends a packet; its number.
    fn say(&mut self, header: Header, payload: &[u8]) -> u64 {
        let number = self.next;
        self.next += 1;
        self.say_as(number, header, payload);
        number
    }

    fn say_as(&mut self, number: u64, header: Header, payload: &[u8]) {
        let header = Header { session: self.session, number, length: payload.len() as u16, ..header };
        let mut packet = vec![0; Header::BYTES];
        header.write(&mut packet);
        packet.extend_from_slice(payload);
        // A seal takes no number below the last: one that has counted to the end is silent from then on.
        if self.sealing.seal(&mut packet).is_ok() {
            let _ = self.socket.send(&packet);
        }
    }

    /// What has been heard last, as an honest header says it.
    fn ack(&self) -> u64 {
        self.heard
            .last()
            .filter(|_| self.acknowledges)
            .map_or(0, |last| last.end << 16 | (last.end - last.start).min(0xffff))
    }

    /// Takes in what has come.
    fn hear(&mut self) {
        let mut packet = vec![0; 1 << 16];
        while let Ok(bytes) = self.socket.recv(&mut packet) {
            let Ok(header) = Header::parse(&packet[..bytes]) else { continue };
            let mut payload = vec![0; usize::from(header.length)];
            if header.kind == Kind::Welcome || self.sealing.open(&header, &packet[..bytes], &mut payload).is_err() {
                continue;
            }
            self.heard.insert(header.number..header.number + 1, usize::MAX);
            let (end, run) = (header.ack >> 16, header.ack & 0xffff);
            self.acknowledged.insert(end.saturating_sub(run)..end, usize::MAX);
            if header.kind == Kind::Ack {
                for range in payload[5..].chunks_exact(12).take(payload[4].into()) {
                    let start = u64::from_le_bytes(range[..8].try_into().unwrap());
                    let length = u32::from_le_bytes(range[8..].try_into().unwrap());
                    self.acknowledged.insert(start..start + u64::from(length), usize::MAX);
                }
            }
            if header.kind == Kind::Data && header.vi == NOTES && header.flags.has(HeaderFlags::FIRST) {
                self.notes.insert(header.message, payload[8..8 + usize::from(header.control)].to_vec());
            }
            if self.acknowledges && header.kind != Kind::Ack {
                self.say(Header { ack: self.ack(), ..Header::new(Kind::Ack) }, &[0; 6]);
            }
        }
    }

    /// Says it again until it is acknowledged; false if it never is.
    fn insist(&mut self, header: Header, payload: &[u8]) -> bool {
        let until = Instant::now() + SILENCE / 2;
        let mut numbers = Vec::new();
        while Instant::now() < until {
            let header = Header { flags: header.flags.with(HeaderFlags::ACKNOWLEDGE), ack: self.ack(), ..header };
            numbers.push(self.say(header, payload));
            let again = Instant::now() + Duration::from_millis(20);
            while Instant::now() < again {
                self.hear();
                if numbers.iter().any(|number| self.acknowledged.contains(&(*number..number + 1))) {
                    return true;
                }
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        false
    }

    /// A note of any bytes.
    fn note(&mut self, control: &[u8]) -> bool {
        let message = self.notes_sent;
        self.notes_sent += 1;
        self.insist(note_header(message, control), &preface(0, None, control))
    }

    /// Opens a VI, as an honest peer would.
    fn open(&mut self, listener: &ViListener) -> (Ends, Vi) {
        let ours = self.next_vi;
        self.next_vi += 1;
        assert!(self.note(&open_note(ours)));
        let there = listener.accept(PATIENCE).unwrap();
        let until = Instant::now() + PATIENCE;
        loop {
            self.hear();
            let accepted = self.notes.values().find(|note| note[0] == ACCEPTED && word(note, 4) == ours);
            if let Some(note) = accepted {
                return (Ends { theirs: word(note, 8) }, there);
            }
            assert!(Instant::now() < until, "the VI is not accepted");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Message `message` of a VI, in one packet.
    fn message(&mut self, ends: Ends, message: u32, payload: &[u8]) -> bool {
        let bytes = [preface(payload.len() as u32, None, &[]), payload.to_vec()].concat();
        self.insist(Header { message, receive: message, ..whole(ends.theirs) }, &bytes)
    }
}

const NOTES: u32 = 1;
const ACCEPTED: u8 = 2;
const REFUSED: u8 = 3;

fn word(note: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(note[at..at + 4].try_into().unwrap())
}

fn open_note(vi: u32) -> Vec<u8> {
    note_of(1, 1, 0, vi, &[])
}

fn note_of(kind: u8, detail: u8, to: u32, vi: u32, more: &[u64]) -> Vec<u8> {
    let mut bytes = vec![kind, detail, 0, 0];
    bytes.extend_from_slice(&to.to_le_bytes());
    bytes.extend_from_slice(&vi.to_le_bytes());
    more.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    bytes
}

fn note_header(message: u32, control: &[u8]) -> Header {
    // More credit than is ever needed, for the notes of the other side.
    Header { message, receive: message, control: control.len() as u8, credit: 1 << 20, ..whole(NOTES) }
}

/// The header of a message that is one packet.
fn whole(vi: u32) -> Header {
    Header { vi, flags: HeaderFlags::FIRST.with(HeaderFlags::LAST), ..Header::new(Kind::Data) }
}

fn preface(total: u32, token: Option<u64>, control: &[u8]) -> Vec<u8> {
    let mut bytes = [total.to_le_bytes(), 0u32.to_le_bytes()].concat();
    token.iter().for_each(|token| bytes.extend_from_slice(&token.to_le_bytes()));
    bytes.extend_from_slice(control);
    bytes
}

/// Two honest ends at the endpoint that the liar meets.
struct Honest {
    here: Vi,
    there: Vi,
    said: u64,
}

impl Honest {
    fn meet(caller: &Nic, listener: &ViListener) -> Honest {
        let (here, there) = std::thread::scope(|scope| {
            let here = scope.spawn(|| caller.connect(listener.address()).unwrap());
            let there = listener.accept(PATIENCE).unwrap();
            (here.join().unwrap(), there)
        });
        Honest { here, there, said: 0 }
    }

    fn go_on(&mut self) {
        self.said += 1;
        let text = vec![self.said as u8; 100_000];
        send_and_take(&mut self.here, &mut self.there, &text);
        send_and_take(&mut self.there, &mut self.here, &text);
    }
}

fn send_and_take(from: &mut Vi, to: &mut Vi, payload: &[u8]) {
    to.post_recv(Receive::new(1).in_place()).unwrap();
    from.send_bytes(2, payload).unwrap();
    let done = to.wait(PATIENCE).unwrap();
    assert_eq!((done.operation, done.status), (Operation::Receive, Ok(())));
    assert!(done.into_in_place().unwrap().as_slice().is_some_and(|bytes| bytes == payload));
    assert_eq!(from.wait(PATIENCE).unwrap().status, Ok(()));
}

/// An endpoint that a liar meets, with honest peers.
struct Endpoint {
    _nics: [Nic; 2],
    caller: Nic,
    listener: ViListener,
    honest: Honest,
}

impl Endpoint {
    fn new() -> Endpoint {
        let (listening, caller) = (nic(), nic());
        let listener = listening.listen("udp:127.0.0.1:0").unwrap();
        let honest = Honest::meet(&caller, &listener);
        Endpoint { _nics: [listening, nic()], caller, listener, honest }
    }

    fn go_on(&mut self) {
        self.honest.go_on();
        // And others are let in.
        Honest::meet(&self.caller, &self.listener).go_on();
    }
}

/// Bytes of the longest message that is taken.
const LONGEST: u32 = 64 << 20;

#[test]
fn long_messages_that_are_only_begun_take_no_memory() {
    let mut endpoint = Endpoint::new();
    for begun_at_the_end in [false, true] {
        let mut liar = Liar::meet(endpoint.listener.address());
        let (ends, mut there) = liar.open(&endpoint.listener);
        for token in 0..32 {
            there.post_recv(Receive::new(token).in_place()).unwrap();
        }
        endpoint.go_on();
        let before = resident();
        for message in 0..32 {
            let header = Header { message, receive: message, vi: ends.theirs, ..Header::new(Kind::Data) };
            let first = Header { flags: HeaderFlags::FIRST, ..header };
            let begin = [preface(LONGEST, None, &[]), vec![1; 500]].concat();
            if begun_at_the_end {
                for offset in [0, LONGEST / 2, LONGEST - 500] {
                    assert!(liar.insist(Header { offset, ..header }, &[2; 500]));
                }
            }
            assert!(liar.insist(first, &begin), "message {message}");
        }
        let taken = resident().saturating_sub(before);
        assert!(taken < 16 << 20, "{taken} bytes for 32 messages of which a packet or four have come");
        endpoint.go_on();
        assert_eq!(there.state(), State::Connected);
    }
}

/// What a liar does to a VI.
type Lie = fn(&mut Liar, Ends);

/// Whether the VI goes on after a lie.
#[derive(Clone, Copy, Debug, PartialEq)]
enum After {
    GoesOn,
    Silent,
    Closed,
}

const LIES: &[(&str, After, Lie)] = &[
    ("acknowledges packets that were never sent", After::GoesOn, |liar, _| {
        for end in [1 << 20, 1 << 40, (1 << 48) - 1] {
            for run in [0, 1, 0xffff] {
                liar.say(Header { ack: end << 16 | run, ..Header::new(Kind::Probe) }, &[]);
            }
        }
        let mut ranges = vec![0xff, 0xff, 0xff, 0xff, 255];
        for range in 0..255u64 {
            ranges.extend_from_slice(&(u64::MAX - range * 7).to_le_bytes());
            ranges.extend_from_slice(&u32::MAX.to_le_bytes());
        }
        ranges.push(0);
        liar.say(Header::new(Kind::Ack), &ranges);
        // More ranges than there are bytes, and none at all.
        liar.say(Header::new(Kind::Ack), &[0, 0, 0, 0, 255, 0]);
        liar.say(Header::new(Kind::Ack), &[]);
    }),
    ("grants credit at every limit", After::GoesOn, |liar, ends| {
        for vi in [ends.theirs, NOTES, 0, u32::MAX, ends.theirs | 1 << 31] {
            let mut credits = vec![0, 0, 0, 0, 0, 8];
            for credit in [1u32 << 20, 1 << 31, u32::MAX, 0, 1 << 30, u32::MAX / 2, u32::MAX, 1] {
                credits.extend_from_slice(&vi.to_le_bytes());
                credits.extend_from_slice(&credit.to_le_bytes());
            }
            liar.say(Header::new(Kind::Ack), &credits);
        }
        for vi in 0..5_000 {
            let credits = [&[0, 0, 0, 0, 0, 1][..], &u32::to_le_bytes(1 << 20 | vi), &[255; 4]].concat();
            liar.say(Header::new(Kind::Ack), &credits);
        }
    }),
    ("takes in nothing, or more than there is", After::GoesOn, |liar, _| {
        for (message, offset) in [(u32::MAX, u32::MAX), (0, 1), (7, 0), (1 << 31, 63), (0, 1 << 20)] {
            liar.say(Header { message, offset, ..Header::new(Kind::Ack) }, &[0; 6]);
        }
    }),
    ("sends beyond its credit", After::GoesOn, |liar, ends| {
        for number in [5, 100, 4_095, 4_096, 1 << 20, u32::MAX / 2, u32::MAX] {
            // Receives 0 and 1 are posted; the honest message comes for the first.
            for (message, receive) in [(number, number), (1, number), (number, 2)] {
                let bytes = [preface(4, None, &[]), vec![9; 4]].concat();
                let header = Header { message, receive, ..whole(ends.theirs) };
                liar.say(header, &bytes);
            }
        }
    }),
    ("announces lengths at every limit", After::GoesOn, |liar, ends| {
        for total in [LONGEST + 1, 1 << 31, u32::MAX] {
            let header = Header { flags: HeaderFlags::FIRST, vi: ends.theirs, ..Header::new(Kind::Data) };
            liar.say(header, &[preface(total, None, &[]), vec![9; 4]].concat());
            liar.say(header, &preface(total, None, &[])[..5]);
        }
        for offset in [LONGEST, 1 << 31, u32::MAX - 1, u32::MAX] {
            let header = Header { message: 1, receive: 1, offset, vi: ends.theirs, ..Header::new(Kind::Data) };
            liar.say(header, &[9; 400]);
        }
    }),
    ("sends packets of every size", After::GoesOn, |liar, ends| {
        for bytes in [0, 1, 7, 8, 1_400, 9_000, 60_000, 65_443] {
            for kind in [Kind::Data, Kind::Ack, Kind::Probe, Kind::Fast, Kind::Renew] {
                let header = Header { message: 2, receive: 2, vi: ends.theirs, control: 128, ..Header::new(kind) };
                liar.say(header, &vec![1; bytes]);
                liar.say(Header { flags: HeaderFlags::FIRST, ..header }, &vec![1; bytes]);
            }
        }
    }),
    ("names tokens that nobody expects", After::GoesOn, |liar, ends| {
        for message in 1..3_000 {
            let flags = HeaderFlags::FIRST.with(HeaderFlags::TOKEN);
            let header = Header { flags, message, control: 128, vi: ends.theirs, ..Header::new(Kind::Data) };
            let token = if message % 2 == 0 { u64::MAX } else { u64::from(message) };
            liar.say(header, &[preface(LONGEST, Some(token), &[7; 128]), vec![9; 4]].concat());
            liar.say(Header { flags: HeaderFlags::TOKEN, offset: message * 9, ..header }, &[1]);
        }
    }),
    ("probes and asks for receive lists as never agreed", After::GoesOn, |liar, ends| {
        for kind in [Kind::Probe, Kind::Fast] {
            for vi in [0, NOTES, ends.theirs, 77, u32::MAX] {
                for (message, offset) in [(0, 0), (1, 1), (u32::MAX, u32::MAX), (2, 3)] {
                    for list in [0, 1, 15, 255] {
                        liar.say(Header { vi, message, offset, list, ..Header::new(kind) }, &[]);
                    }
                }
            }
        }
    }),
    ("asks for fresh keys as never agreed, and answers what nobody asked", After::GoesOn, |liar, _| {
        for word in [0, 1, 2, 3, u32::MAX] {
            for bytes in [0, 47, 48, 49, 1_000] {
                liar.say(Header { offset: word, ..Header::new(Kind::Renew) }, &vec![9; bytes]);
            }
        }
    }),
    ("says notes of every kind about VIs that do not exist", After::GoesOn, |liar, ends| {
        for kind in 2..=12 {
            for to in [0, NOTES, 77, ends.theirs | 1 << 31, 1 << 31, u32::MAX] {
                for vi in [0, u32::MAX] {
                    let more = [u64::MAX, u64::MAX - 1, 1 << 40, 5];
                    assert!(liar.note(&note_of(kind, 1, to, vi, &more)));
                    assert!(liar.note(&note_of(kind, 255, to, vi, &[])));
                }
            }
        }
        (0..12).for_each(|bytes| assert!(liar.note(&vec![6; bytes])));
        assert!(liar.note(&[11; 128]));
    }),
    ("asks for memory that is not granted, and takes no answer", After::GoesOn, |liar, ends| {
        for id in 0..2_000 {
            let more = [u64::from(id) << 32, u64::MAX - 4, 1 << 40, 5];
            assert!(liar.note(&note_of(6 + (id % 2) as u8, 0, ends.theirs, id, &more)));
        }
    }),
    ("says of writes and reads that were never asked for that they are done", After::GoesOn, |liar, ends| {
        for kind in 8..=10 {
            for id in [0, 1, 2, u32::MAX] {
                assert!(liar.note(&note_of(kind, 2, ends.theirs, id, &[u64::MAX])));
            }
        }
    }),
    ("closes its VI twice, and others", After::Closed, |liar, ends| {
        for to in [ends.theirs + 1, ends.theirs, ends.theirs, NOTES, 0] {
            assert!(liar.note(&note_of(4, 0, to, 0, &[])));
        }
    }),
    ("counts its packets to the end", After::Silent, |liar, _| {
        liar.say_as((1 << 48) - 1, Header::new(Kind::Probe), &[]);
        liar.say_as(1 << 48, Header::new(Kind::Probe), &[]);
        liar.say_as(u64::MAX, Header::new(Kind::Probe), &[]);
    }),
    ("acknowledges nothing", After::Silent, |liar, _| {
        liar.acknowledges = false;
    }),
    ("closes, and goes on", After::Closed, |liar, ends| {
        for _ in 0..100 {
            liar.say(Header::new(Kind::Close), &[]);
            liar.say(whole(ends.theirs), &[0; 8]);
        }
    }),
];

#[test]
fn a_lie_at_any_limit_harms_nobody_but_its_session() {
    let mut endpoint = Endpoint::new();
    let mut before = None;
    for (lie, after, tell) in LIES {
        let mut liar = Liar::meet(endpoint.listener.address());
        let (ends, mut there) = liar.open(&endpoint.listener);
        there.post_recv(Receive::new(0).in_place()).unwrap();
        there.post_recv(Receive::new(1).in_place()).unwrap();
        tell(&mut liar, ends);
        endpoint.go_on();
        match after {
            After::GoesOn => {
                assert!(liar.message(ends, 0, b"honest"), "after it {lie}: no answer, and {:?}", there.state());
                let done = there.wait(PATIENCE).unwrap();
                assert_eq!(done.status, Ok(()), "after it {lie}");
                assert_eq!(done.into_in_place().unwrap().as_slice(), Some(&b"honest"[..]), "after it {lie}");
            }
            After::Silent | After::Closed => {
                let _ = there.send_bytes(5, b"is it there?");
                let ended = loop {
                    liar.hear();
                    match there.wait(Duration::from_millis(1)) {
                        Ok(_) | Err(WaitError::TimedOut(_)) if liar.since.elapsed() < PATIENCE => {}
                        other => break other,
                    }
                    // Whoever is there but does not listen is not silent.
                    if *after == After::Silent {
                        liar.say(Header::new(Kind::Probe), &[]);
                    }
                };
                let why = if *after == After::Closed { Failure::PeerClosed } else { Failure::PeerSilent(SILENCE) };
                assert_eq!(ended.unwrap_err(), WaitError::NotConnected(why), "after it {lie}");
            }
        }
        endpoint.go_on();
        let now = resident();
        let grown = now.saturating_sub(*before.get_or_insert(now));
        assert!(grown < 24 << 20, "after it {lie}: {grown} bytes more");
    }
}

#[test]
fn a_flood_of_opens_keeps_no_other_peer_out() {
    let mut endpoint = Endpoint::new();
    let mut liar = Liar::meet(endpoint.listener.address());
    for vi in 0..1_500 {
        assert!(liar.note(&open_note(1_000 + vi)), "open {vi}");
    }
    endpoint.honest.go_on();
    // Another has come later, and is told nothing until it is accepted.
    let mut other = Liar::meet(endpoint.listener.address());
    assert!(other.note(&open_note(77)));
    let until = Instant::now() + PATIENCE;
    loop {
        other.hear();
        liar.hear();
        if let Some(note) = other.notes.values().next() {
            assert_eq!((note[0], word(note, 4)), (ACCEPTED, 77), "it is refused");
            break;
        }
        assert!(Instant::now() < until, "it is not accepted");
        drop(endpoint.listener.accept(Duration::from_millis(10)));
    }
    // Those who found no room were told so.
    let refused = |liar: &Liar| liar.notes.values().any(|note| note[0] == REFUSED);
    while !refused(&liar) {
        assert!(Instant::now() < until, "nobody was refused");
        liar.hear();
        std::thread::sleep(Duration::from_micros(100));
    }
    endpoint.go_on();
}
