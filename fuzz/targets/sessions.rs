//! Two sessions, and a network between them that does what the input says; and a peer who has the key
//! and lies. Whatever comes: no panic, every post completes once, no timer spins, memory stays small.
//! Without lies: what arrives was sent, in order and unchanged, and all of it arrives in the end.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use highwire_fuzz::steps;
use highwire_proto::{
    Assurance, Ending, Established, Event, Header, HeaderFlags, Incoming, Kind, Offer, Outgoing, PacketSize, Sealing,
    Session, SessionConfig,
};
use libfuzzer_sys::fuzz_target;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write;
use std::time::Duration;

#[derive(Debug)]
struct Input {
    segment: u8,
    steps: Vec<Step>,
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Input> {
        Ok(Input { segment: input.arbitrary()?, steps: steps(input)? })
    }
}

#[derive(Arbitrary, Debug)]
enum Step {
    // The two who use it.
    Send {
        side: bool,
        vi: u8,
        size: u16,
        control: u8,
        token: Option<u8>,
    },
    Receive {
        side: bool,
        vi: u8,
        size: u16,
    },
    Expect {
        side: bool,
        vi: u8,
        token: u8,
        size: u16,
    },
    Ask {
        side: bool,
    },
    Close {
        side: bool,
    },
    CloseVi {
        side: bool,
        vi: u8,
    },
    ReopenVi {
        side: bool,
        vi: u8,
    },
    // The network.
    Deliver {
        to: bool,
        which: u8,
    },
    DeliverAll {
        to: bool,
    },
    /// Packets that lie one behind the other are received as one, where somebody expects them or not.
    DeliverBatch {
        to: bool,
        count: u8,
        guess: Guessing,
    },
    Drop {
        to: bool,
        which: u8,
    },
    Repeat {
        to: bool,
        which: u8,
    },
    Damage {
        to: bool,
        which: u8,
        at: u16,
        with: u8,
    },
    // Time.
    Wait {
        us: u32,
    },
    WaitForTimer,
    // The peer who lies.
    Lie {
        to: bool,
        lie: Lie,
        times: u8,
        flies: bool,
    },
}

/// How it is guessed where payloads go.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Guessing {
    Next { vi: u8, ahead: u8 },
    Look,
}

#[derive(Arbitrary, Debug)]
struct Lie {
    kind: u8,
    flags: u8,
    number: Number,
    vi: u8,
    message: Number,
    /// The next one is of the next message.
    climbs: bool,
    offset: Number,
    control: u8,
    ack: (Number, u16),
    credit: Number,
    receive: Number,
    payload: Payload,
    list: u8,
}

/// Something small, where the truth is, or anything.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Number {
    Small(u8),
    Any(u64),
}

impl Number {
    fn get(self) -> u64 {
        match self {
            Number::Small(number) => u64::from(number),
            Number::Any(number) => number,
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Payload {
    Any(Vec<u8>),
    First { total: Number, token: Option<u8>, control: u8, bytes: u16 },
    Acknowledgement { delay: u32, ranges: Vec<(Number, Number)>, credits: Vec<(u8, Number)> },
}

fuzz_target!(|input: Input| {
    let mut world = World::new(256 + usize::from(input.segment) * 5);
    for step in &input.steps {
        world.step(step);
        world.settle();
    }
    world.end();
});

type Side = Session<Vec<u8>, Vec<u8>>;

/// What was sent on one VI by one side; message n has n as its immediate data.
#[derive(Default)]
struct Line {
    sent: Vec<Sent>,
    receives: u64,
    expected: Vec<u64>,
    /// The message after the one that was received last.
    next: usize,
    completed: u64,
}

struct Sent {
    payload: Vec<u8>,
    control: Vec<u8>,
    token: Option<u64>,
    /// How many before it fill an ordinary receive.
    receive: u64,
}

struct World {
    sides: [Side; 2],
    now: Duration,
    flying: [VecDeque<Vec<u8>>; 2],
    lines: BTreeMap<(usize, u32), Line>,
    sends: BTreeSet<(usize, u32, u64)>,
    places: BTreeSet<(usize, u32, u64)>,
    /// Bytes of messages, with their headers, that each side has sent.
    data: [usize; 2],
    /// How often each side was asked to probe, or a timer let it: a probe goes though the window is full.
    prompts: [usize; 2],
    /// The highest packet number that came to each side.
    heard: [u64; 2],
    segment: usize,
    lies: usize,
    closed: [bool; 2],
    /// A VI was closed: what was for it is lost.
    vi_closed: bool,
}

impl World {
    fn new(segment: usize) -> World {
        let config = SessionConfig {
            packet_size: PacketSize::Fixed(Header::BYTES + segment),
            messages_max: 8,
            receives_max: 8,
            vis_max: VIS as usize,
            holes_max: 8,
            message_bytes_max: 4096,
            // Some messages ask for a list, which only a lie grants.
            fast_bytes: 1000,
            ..SessionConfig::default()
        };
        let side = |number: u32, peer: u32| {
            let peer = Offer { session: peer, message_bytes_max: 4096, death_ms: 10_000, incarnation: 1 };
            let (sealing, fingerprint, calls) = (Sealing::checksummed(), None, number == 1);
            let established = Established { sealing, peer, fingerprint, calls };
            Side::new(established, number, config.clone(), Duration::ZERO)
        };
        let mut world = World {
            sides: [side(1, 2), side(2, 1)],
            now: Duration::ZERO,
            flying: [VecDeque::new(), VecDeque::new()],
            lines: BTreeMap::new(),
            sends: BTreeSet::new(),
            places: BTreeSet::new(),
            data: [0; 2],
            prompts: [0; 2],
            heard: [0; 2],
            segment,
            lies: 0,
            closed: [false; 2],
            vi_closed: false,
        };
        for side in 0..2 {
            for vi in 0..VIS {
                world.open_vi(side, vi);
            }
        }
        world
    }

    fn open_vi(&mut self, side: usize, vi: u32) {
        let assurance = if vi == UNRELIABLE { Assurance::Unreliable } else { Assurance::Reliable };
        // Another number on each side, so that none is taken for the other.
        let number = |side: usize| vi + 10 * side as u32;
        let _ = self.sides[side].open_vi(number(side), number(1 - side), assurance, assurance);
    }

    fn line(&mut self, side: usize, vi: u32) -> &mut Line {
        self.lines.entry((side, vi)).or_default()
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Send { side, vi, size, control, token } => {
                let token = token.map(|token| u64::from(token % TOKENS));
                self.send(usize::from(side), u32::from(vi) % VIS, usize::from(size) % 4200, control, token);
            }
            Step::Receive { side, vi, size } => {
                self.receive(usize::from(side), u32::from(vi) % VIS, usize::from(size) % 4200);
            }
            Step::Expect { side, vi, token, size } => {
                let (side, vi, token) = (usize::from(side), u32::from(vi) % VIS, u64::from(token % TOKENS));
                let line = self.line(side, vi);
                let mark = EXPECTED + line.expected.len() as u64;
                line.expected.push(token);
                let place = Incoming { token: mark, target: Some(vec![0; usize::from(size) % 4200]) };
                if self.sides[side].expect(vi + 10 * side as u32, token, place).is_ok() {
                    self.places.insert((side, vi, mark));
                }
            }
            Step::Ask { side } => {
                self.sides[usize::from(side)].ask();
                self.prompts[usize::from(side)] += 1;
            }
            Step::Close { side } => {
                self.sides[usize::from(side)].close();
                self.closed[usize::from(side)] = true;
            }
            Step::CloseVi { side, vi } => {
                let (side, vi) = (usize::from(side), u32::from(vi) % VIS);
                self.sides[side].close_vi(vi + 10 * side as u32);
                self.vi_closed = true;
            }
            Step::ReopenVi { side, vi } => self.open_vi(usize::from(side), u32::from(vi) % VIS),
            Step::Deliver { to, which } => {
                if let Some(packet) = self.take(to, which) {
                    self.hear(usize::from(to), &packet);
                }
            }
            Step::DeliverAll { to } => self.deliver_all(usize::from(to)),
            Step::DeliverBatch { to, count, guess } => self.deliver_batch(usize::from(to), usize::from(count), guess),
            Step::Drop { to, which } => drop(self.take(to, which)),
            Step::Repeat { to, which } => {
                let flying = &mut self.flying[usize::from(to)];
                if let Some(at) = usize::from(which).checked_rem(flying.len()) {
                    flying.push_back(flying[at].clone());
                }
            }
            Step::Damage { to, which, at, with } => {
                if let Some(mut packet) = self.take(to, which) {
                    let at = usize::from(at) % packet.len();
                    packet[at] ^= with.max(1);
                    let to = usize::from(to);
                    self.talk(to);
                    let before = self.sides[to].stats().packets_received;
                    self.hear(to, &packet);
                    assert_eq!(self.sides[to].stats().packets_received, before, "a damaged packet is taken");
                    let says = self.sides[to].poll_transmit(self.now, 1, &mut Vec::new());
                    assert_eq!(says, None, "a damaged packet is answered");
                }
            }
            Step::Wait { us } => self.now += Duration::from_micros(u64::from(us % 20_000_000)),
            Step::WaitForTimer => {
                let next = self.sides.iter().filter_map(Side::poll_timeout).min();
                self.now = self.now.max(next.unwrap_or_default());
            }
            Step::Lie { to, ref lie, times, flies } => {
                for time in 0..=u32::from(times) {
                    if self.lies < LIES_MAX {
                        self.lie(usize::from(to), lie, time, flies);
                    }
                }
            }
        }
    }

    fn send(&mut self, side: usize, vi: u32, size: usize, control: u8, token: Option<u64>) {
        let line = self.line(side, vi);
        let number = line.sent.len();
        let payload: Vec<u8> = (0..size).map(|at| (at / 3 + number * 31 + vi as usize) as u8).collect();
        let control = vec![number as u8; usize::from(control) % 140];
        let receive = line.sent.last().map_or(0, |last| last.receive + u64::from(last.token.is_none()));
        let message = Outgoing {
            token: number as u64,
            control: control.clone(),
            immediate: number as u32,
            payload_token: token,
            payload: Some(payload.clone()),
        };
        let (now, mut packet) = (self.now, Vec::new());
        let session = &mut self.sides[side];
        let taken = if session.write_ahead(vi + 10 * side as u32, &message, &mut packet) {
            session.note_ahead(now, vi + 10 * side as u32, message, packet.len());
            self.data[side] += packet.len();
            self.flying[1 - side].push_back(packet);
            true
        } else {
            session.post_send(vi + 10 * side as u32, message).is_ok()
        };
        if taken {
            self.line(side, vi).sent.push(Sent { payload, control, token, receive });
            self.sends.insert((side, vi, number as u64));
        }
    }

    fn receive(&mut self, side: usize, vi: u32, size: usize) {
        let mark = self.line(side, vi).receives;
        let place = Incoming { token: mark, target: Some(vec![0; size]) };
        if self.sides[side].post_receive(vi + 10 * side as u32, place).is_ok() {
            self.line(side, vi).receives += 1;
            self.places.insert((side, vi, mark));
        }
    }

    fn take(&mut self, to: bool, which: u8) -> Option<Vec<u8>> {
        let flying = &mut self.flying[usize::from(to)];
        flying.remove(usize::from(which).checked_rem(flying.len())?)
    }

    fn deliver_all(&mut self, to: usize) {
        for packet in std::mem::take(&mut self.flying[to]) {
            self.hear(to, &packet);
        }
    }

    /// Packets of one length, but the last, land where a guess says. What is taken there is what was sent; the rest
    /// is moved.
    fn deliver_batch(&mut self, to: usize, count: usize, guessing: Guessing) {
        let flying = &mut self.flying[to];
        let Some(segment) = flying.front().map(Vec::len) else { return };
        let same = flying.iter().take(count).take_while(|packet| packet.len() == segment).count();
        let shorter = flying.get(same).is_some_and(|packet| same < count && packet.len() < segment);
        let batch: Vec<Vec<u8>> = flying.drain(..same + usize::from(shorter)).collect();
        let Some(first) = batch.first() else { return };
        let (bytes, side) = (batch.concat(), &mut self.sides[to]);
        let guess = match guessing {
            Guessing::Next { vi, ahead } => side.guess(u32::from(vi) % VIS + 10 * to as u32, usize::from(ahead % 4)),
            Guessing::Look => Header::parse(first).ok().and_then(|header| side.guess_after_look(&header, first).0),
        };
        let mut taken = 0;
        if let Some(mut guess) = guess {
            let (packet, heads) = (guess.packet, guess.receive(&bytes));
            if if batch.len() == 1 { bytes.len() <= packet } else { segment == packet } {
                taken = side.take_landed(self.now, &heads, bytes.len(), matches!(guessing, Guessing::Look));
                side.finish_landed();
            }
            side.note_missed(batch.len() - taken, bytes.len());
        }
        for packet in &batch[..taken] {
            let header = Header::parse(packet).expect("what is taken has a form");
            self.heard[to] = self.heard[to].max(header.number);
        }
        batch[taken..].iter().for_each(|packet| self.hear(to, packet));
    }

    fn hear(&mut self, to: usize, packet: &[u8]) {
        if self.sides[to].handle_packet(self.now, packet).is_ok()
            && let Ok(header) = Header::parse(packet)
        {
            self.heard[to] = self.heard[to].max(header.number);
        }
    }

    /// A packet that the peer's key vouches for, and nothing else.
    fn lie(&mut self, to: usize, lie: &Lie, time: u32, flies: bool) {
        self.lies += 1;
        let payload = lie.payload.make(to as u32 * 10);
        let kinds = [Kind::Data, Kind::Ack, Kind::Probe, Kind::Close, Kind::Fast, Kind::Renew];
        let mut header = Header::new(kinds[usize::from(lie.kind) % kinds.len()]);
        for flag in FLAGS {
            header.flags = if lie.flags & flag.bits() != 0 { header.flags.with(flag) } else { header.flags };
        }
        header.list = lie.list;
        header.session = self.sides[to].number();
        header.number = match lie.number {
            Number::Small(skip) => self.heard[to].saturating_add(1 + u64::from(skip)),
            Number::Any(number) => number.saturating_add(u64::from(time)),
        };
        header.vi = u32::from(lie.vi) % (VIS + 1) + 10 * to as u32;
        header.message = (lie.message.get() as u32).wrapping_add(if lie.climbs { time } else { 0 });
        header.offset = lie.offset.get() as u32;
        header.control = lie.control % 129;
        header.ack = lie.ack.0.get() << 16 | u64::from(lie.ack.1);
        header.credit = lie.credit.get() as u32;
        header.receive = (lie.receive.get() as u32).wrapping_add(if lie.climbs { time } else { 0 });
        header.length = payload.len() as u16;
        let mut packet = vec![0; Header::BYTES];
        header.write(&mut packet);
        packet.extend_from_slice(&payload);
        Sealing::checksummed().seal(&mut packet).expect("a packet");
        match flies {
            true => self.flying[to].push_back(packet),
            false => self.hear(to, &packet),
        }
        self.settle();
    }

    /// Everything that can happen without the network and without time.
    fn settle(&mut self) {
        for side in 0..2 {
            self.talk(side);
            // A timer that is due is due no more after it was served, or its owner would spin.
            let mut rounds = 0;
            while self.sides[side].poll_timeout().is_some_and(|at| at <= self.now) {
                rounds += 1;
                assert!(rounds <= ROUNDS_MAX, "a timer stays due: {:?}", self.sides[side]);
                self.sides[side].handle_timeout(self.now);
                self.prompts[side] += 1;
                self.talk(side);
            }
        }
    }

    /// Takes what a side has to say, and what has happened there.
    fn talk(&mut self, side: usize) {
        let mut out = Vec::new();
        for packets in 0.. {
            assert!(packets < PACKETS_MAX, "it does not stop to send: {:?}", self.sides[side]);
            out.clear();
            let Some(segment) = self.sides[side].poll_transmit(self.now, 4, &mut out) else { break };
            assert!(segment > 0 && !out.is_empty() && out.len() <= 4 * segment);
            for packet in out.chunks(segment) {
                let header = Header::parse(packet).expect("what is sent has a form");
                assert!(packet.len() <= Header::BYTES + self.segment.max(ACKNOWLEDGEMENT_MAX), "{header:?}");
                self.data[side] += if header.kind == Kind::Data { packet.len() } else { 0 };
                self.flying[1 - side].push_back(packet.to_vec());
            }
        }
        let more = self.sides[side].poll_transmit(self.now, 1, &mut out);
        assert_eq!(more, None, "it said that it had nothing more to send: {:?}", self.sides[side]);
        if self.sides[side].stats().packets_received == 0 {
            let most = (WINDOW_FIRST + self.prompts[side]) * (Header::BYTES + self.segment);
            assert!(self.data[side] <= most, "{} bytes are sent to one who never answered", self.data[side]);
        }
        let flying = &mut self.flying[1 - side];
        flying.drain(..flying.len().saturating_sub(FLYING_MAX));
        while let Some(event) = self.sides[side].poll_event() {
            self.note(side, event);
        }
    }

    fn note(&mut self, side: usize, event: Event<Vec<u8>, Vec<u8>>) {
        match event {
            Event::Sent { vi, token, status, .. } => {
                let vi = vi - 10 * side as u32;
                assert!(
                    self.sends.remove(&(side, vi, token)),
                    "send {token} on {vi} completes twice, or was never posted"
                );
                let line = self.line(side, vi);
                assert_eq!(token, line.completed, "sends complete in order: {status:?}");
                line.completed += 1;
            }
            Event::Received { vi, token, target, length, immediate, control, payload_token, status } => {
                let vi = vi - 10 * side as u32;
                assert!(
                    self.places.remove(&(side, vi, token)),
                    "place {token} on {vi} completes twice, or was never posted"
                );
                let target = target.expect("a place comes back with its buffer");
                assert!(length <= target.len());
                let fits = match status {
                    Ok(()) => Some(&target[..length]),
                    Err(Ending::TooLong { .. }) => None,
                    Err(_) => return,
                };
                if self.lies == 0 {
                    self.check(side, vi, token, immediate as usize, fits, (&control, payload_token));
                }
            }
            Event::Ended(_) => {
                assert!(!self.sends.iter().any(|send| send.0 == side), "sends are kept: {:?}", self.sends);
                assert!(!self.places.iter().any(|place| place.0 == side), "places are kept: {:?}", self.places);
            }
        }
    }

    /// A message of an honest peer has arrived: it is the one that was to come.
    fn check(
        &mut self,
        side: usize,
        vi: u32,
        mark: u64,
        number: usize,
        payload: Option<&[u8]>,
        rest: (&[u8], Option<u64>),
    ) {
        if self.vi_closed {
            return;
        }
        let expected = (mark >= EXPECTED).then(|| self.line(side, vi).expected[(mark - EXPECTED) as usize]);
        let line = self.line(1 - side, vi);
        assert!(number >= line.next && number < line.sent.len(), "message {number} comes after {}", line.next);
        // Only what nobody expected is left out, or what may be lost.
        let left_out = line.sent[line.next..number].iter().all(|sent| sent.token.is_some());
        assert!(left_out || vi == UNRELIABLE, "{} to {number} on {vi} are left out", line.next);
        line.next = number + 1;
        let sent = &line.sent[number];
        assert_eq!((&sent.control[..], sent.token), rest, "message {number} on {vi}");
        assert_eq!(sent.token, expected, "message {number} on {vi} lands in place {mark}");
        assert!(
            vi == UNRELIABLE || expected.is_some() || mark == sent.receive,
            "message {number} on {vi} lands in {mark}"
        );
        assert!(payload.is_none_or(|payload| payload == sent.payload), "message {number} on {vi} is changed");
    }

    fn end(mut self) {
        if self.lies > 0 {
            let mut count = Count(0);
            let _ = write!(count, "{:?}", self.sides);
            assert!(count.0 < (4 << 20) + self.lies * 4096, "{} bytes after {} lies", count.0, self.lies);
            return;
        }
        // The weather clears up: whatever was posted completes, unless its session is over or nobody who
        // could post a receive is left.
        if self.vi_closed || self.closed == [true; 2] {
            return;
        }
        let until = self.now + Duration::from_secs(120);
        while !(0..2).all(|side| self.sides[side].ended().is_some() || !self.sends.iter().any(|send| send.0 == side)) {
            for (side, vi) in (0..2).flat_map(|side| (0..VIS).map(move |vi| (side, vi))) {
                self.receive(side, vi, 4096);
            }
            self.settle();
            if self.flying.iter().all(VecDeque::is_empty) {
                // None, if both have just ended.
                let next = self.sides.iter().filter_map(Side::poll_timeout).min();
                self.now = self.now.max(next.unwrap_or_default());
                self.settle();
            }
            self.now += Duration::from_micros(50);
            (0..2).for_each(|side| self.deliver_all(side));
            self.settle();
            assert!(self.now < until, "never complete: {:?} {:?}", self.sends, self.sides);
        }
    }
}

impl Payload {
    fn make(&self, vis_from: u32) -> Vec<u8> {
        let mut payload = Vec::new();
        match self {
            Payload::Any(bytes) => payload.extend_from_slice(bytes),
            Payload::First { total, token, control, bytes } => {
                payload.extend_from_slice(&(total.get() as u32).to_le_bytes());
                payload.extend_from_slice(&7u32.to_le_bytes());
                if let Some(token) = token {
                    payload.extend_from_slice(&u64::from(token % TOKENS).to_le_bytes());
                }
                payload.resize(payload.len() + usize::from(control % 129) + usize::from(bytes % 2000), 7);
            }
            Payload::Acknowledgement { delay, ranges, credits } => {
                payload.extend_from_slice(&delay.to_le_bytes());
                let (ranges, credits) = (&ranges[..ranges.len().min(255)], &credits[..credits.len().min(255)]);
                payload.push(ranges.len() as u8);
                for (start, length) in ranges {
                    payload.extend_from_slice(&start.get().to_le_bytes());
                    payload.extend_from_slice(&(length.get() as u32).to_le_bytes());
                }
                payload.push(credits.len() as u8);
                for (vi, credit) in credits {
                    payload.extend_from_slice(&(u32::from(*vi) % VIS + vis_from).to_le_bytes());
                    payload.extend_from_slice(&(credit.get() as u32).to_le_bytes());
                }
            }
        }
        payload.truncate(usize::from(u16::MAX));
        payload
    }
}

/// Counts what is written: a session in words is about as long as its memory is large.
struct Count(usize);

impl Write for Count {
    fn write_str(&mut self, words: &str) -> std::fmt::Result {
        self.0 += words.len();
        Ok(())
    }
}

const FLAGS: [HeaderFlags; 5] =
    [HeaderFlags::FIRST, HeaderFlags::LAST, HeaderFlags::TOKEN, HeaderFlags::ACKNOWLEDGE, HeaderFlags::UNRELIABLE];
const VIS: u32 = 3;
/// The VI whose messages may be lost.
const UNRELIABLE: u32 = 2;
const TOKENS: u8 = 4;
/// Marks of expected places begin here.
const EXPECTED: u64 = 1 << 32;
const LIES_MAX: usize = 2000;
const FLYING_MAX: usize = 512;
/// A few timers may be due at once, each of which is served in its turn.
const ROUNDS_MAX: u32 = 8;
/// More than all messages that can be outstanding have.
const PACKETS_MAX: u32 = 2000;
/// The window before anything is known, in packets.
const WINDOW_FIRST: usize = 64;
/// An acknowledgement is not cut into segments: 32 ranges, and a credit for each VI.
const ACKNOWLEDGEMENT_MAX: usize = 6 + 32 * 12 + VIS as usize * 8;
