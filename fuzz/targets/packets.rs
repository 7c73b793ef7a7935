//! Whatever comes to the door of an endpoint: no panic, and one with a key is silent to all but a hello
//! that was made with it.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use highwire_fuzz::steps;
use highwire_proto::{
    ClusterKey, Endpoint, EndpointConfig, EndpointEvent, Established, HELLO_BYTES, Header, Initiator, Keys, Kind,
    Offer, Sealing, SeededEntropy, respond,
};
use libfuzzer_sys::fuzz_target;
use std::net::SocketAddr;
use std::time::Duration;

#[derive(Debug)]
struct Input {
    insecure: bool,
    steps: Vec<Step>,
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Input> {
        Ok(Input { insecure: input.arbitrary()?, steps: steps(input)? })
    }
}

#[derive(Arbitrary, Debug)]
enum Step {
    Raw {
        from: u8,
        bytes: Vec<u8>,
    },
    /// Of good form, so that more than the form is looked at.
    Formed {
        from: u8,
        kind: u8,
        ours: bool,
        number: u64,
        ack: u64,
        vi: u8,
        checksummed: bool,
        payload: Vec<u8>,
    },
    Hello {
        from: u8,
        which: u8,
        changes: Changes,
    },
    /// To one who waits for it.
    Welcome {
        which: u8,
        changes: Changes,
    },
    /// The first packet of one who was welcomed.
    Member {
        from: u8,
        which: u8,
        kind: u8,
        changes: Changes,
    },
    Wait {
        ms: u16,
    },
}

/// What happened to a true packet on its way.
#[derive(Arbitrary, Debug)]
struct Changes {
    bytes: Vec<(u16, u8)>,
    length: Option<u16>,
    /// The checksum is made to fit: without a key anybody can.
    checksummed: bool,
}

impl Changes {
    fn make(&self, packet: &[u8]) -> Vec<u8> {
        let mut changed = packet.to_vec();
        if let Some(length) = self.length {
            changed.resize(usize::from(length) % (2 * HELLO_BYTES), 0);
        }
        for (at, with) in &self.bytes {
            if let Some(byte) = changed.get_mut(usize::from(*at) % packet.len()) {
                *byte ^= with;
            }
        }
        if self.checksummed {
            let _ = Sealing::checksummed().seal(&mut changed);
        }
        changed
    }
}

fuzz_target!(|input: Input| {
    let key = ClusterKey::from_random([3; 32]);
    let mut entropy = SeededEntropy::new(1);
    let keys = if input.insecure { Keys::insecure() } else { Keys::new(key.clone()) };
    let config = EndpointConfig { listening: true, half_open_max: 4, sessions_max: 4, ..EndpointConfig::default() };
    let callers = (0..CALLERS).map(|which| {
        let key = (!input.insecure).then_some(&key);
        let (initiator, hello) = Initiator::new(key, offer(which), &mut SeededEntropy::new(which)).expect("a hello");
        // Somebody else with the key answers it; the listener is not asked.
        let (_, welcome) = respond(&keys, &hello, offer(9), &mut SeededEntropy::new(9)).expect("a welcome");
        Caller { initiator: Some(initiator), hello, welcome }
    });
    let mut listener = Endpoint::new(keys.clone(), config, &mut entropy);
    listener.set_lists(0b110);
    let mut scene = Scene {
        callers: callers.collect(),
        listener,
        insecure: input.insecure,
        entropy,
        now: Duration::ZERO,
        door: 0,
        members: Vec::new(),
        accepted: 0,
    };
    for step in &input.steps {
        scene.step(step);
    }
});

struct Caller {
    initiator: Option<Initiator>,
    hello: Vec<u8>,
    welcome: Vec<u8>,
}

struct Scene {
    listener: Endpoint<Vec<u8>, Vec<u8>>,
    callers: Vec<Caller>,
    insecure: bool,
    entropy: SeededEntropy,
    now: Duration,
    /// The listener's number for whom it answered last, as an observer may have guessed it.
    door: u32,
    /// Who was answered, and the number of its next packet.
    members: Vec<(Established, u64)>,
    accepted: usize,
}

impl Scene {
    fn step(&mut self, step: &Step) {
        match step {
            Step::Raw { from, bytes } => self.knock(*from, bytes, false),
            Step::Formed { from, kind, ours, number, ack, vi, checksummed, payload } => {
                let mut header = Header::new(KINDS[usize::from(*kind) % KINDS.len()]);
                header.session = if *ours { self.door } else { 0 };
                (header.number, header.ack, header.vi) = (*number, *ack, u32::from(*vi));
                header.length = payload.len() as u16;
                let mut packet = vec![0; Header::BYTES + payload.len()];
                header.write(&mut packet);
                packet[Header::BYTES..].copy_from_slice(payload);
                if *checksummed {
                    let _ = Sealing::checksummed().seal(&mut packet);
                }
                self.knock(*from, &packet, false);
            }
            Step::Hello { from, which, changes } => {
                let hello = &self.callers[usize::from(*which) % self.callers.len()].hello;
                let packet = changes.make(hello);
                let authentic = packet == *hello;
                self.knock(*from, &packet, authentic);
            }
            Step::Welcome { which, changes } => self.welcome(*which, changes),
            Step::Member { from, which, kind, changes } => self.go_on(*from, *which, *kind, changes),
            Step::Wait { ms } => {
                self.now += Duration::from_millis(u64::from(*ms));
                self.listener.handle_timeout(self.now, &mut self.entropy);
                self.look(None);
            }
        }
    }

    fn knock(&mut self, from: u8, packet: &[u8], authentic: bool) {
        if let Ok(header) = Header::parse(packet) {
            assert!(Header::BYTES + usize::from(header.length) <= packet.len(), "{header:?}");
            let mut again = [0; Header::BYTES];
            header.write(&mut again);
            assert_eq!(again[..TAG_AT], packet[..TAG_AT], "a header says all that was in the packet");
        }
        self.listener.handle_packet(self.now, address(from), packet, &mut self.entropy);
        self.look(Some((from, packet, authentic)));
    }

    /// What the listener says and does about a packet, or about nothing.
    fn look(&mut self, heard: Option<(u8, &[u8], bool)>) {
        while let Some(event) = self.listener.poll_event() {
            if let EndpointEvent::Accepted(..) = event {
                self.accepted += 1;
                assert!(self.insecure || !self.members.is_empty(), "accepted without a key: {event:?}");
            }
        }
        assert!(self.listener.pending() <= 4 && self.accepted <= 4, "{} sessions are accepted", self.accepted);
        let mut out = Vec::new();
        for _ in 0..ANSWERS_MAX {
            out.clear();
            let Some((to, _)) = self.listener.poll_transmit(self.now, 8, &mut out) else { return };
            self.note_answer(&out);
            if self.accepted > 0 {
                continue;
            }
            let Some((from, packet, authentic)) = heard else { panic!("it speaks although nobody asked") };
            assert!(self.insecure || authentic, "a packet that was not made with the key is answered");
            assert_eq!(to, address(from), "somebody else is answered");
            assert!(out.len() <= packet.len(), "{} bytes are answered by {}", packet.len(), out.len());
        }
        panic!("it does not stop to speak");
    }

    /// The one whose hello was answered becomes a member, if it is one of ours.
    fn note_answer(&mut self, welcome: &[u8]) {
        for caller in &mut self.callers {
            let Some(initiator) = caller.initiator.take() else { continue };
            match initiator.handle_welcome(welcome) {
                Ok(established) => {
                    self.door = established.peer.session;
                    self.members.push((established, 0));
                    return;
                }
                Err((initiator, _)) => caller.initiator = Some(initiator),
            }
        }
    }

    fn welcome(&mut self, which: u8, changes: &Changes) {
        let which = usize::from(which) % self.callers.len();
        let caller = &mut self.callers[which];
        let packet = changes.make(&caller.welcome);
        let Some(initiator) = caller.initiator.take() else { return };
        match initiator.handle_welcome(&packet) {
            Ok(_) => assert!(self.insecure || packet == caller.welcome, "a changed welcome is taken"),
            Err((initiator, error)) => {
                assert!(packet != caller.welcome, "a true welcome is refused: {error}");
                caller.initiator = Some(initiator);
            }
        }
    }

    fn go_on(&mut self, from: u8, which: u8, kind: u8, changes: &Changes) {
        let Some(which) = usize::from(which).checked_rem(self.members.len()) else { return };
        let (established, number) = &mut self.members[which];
        let mut header =
            Header::new([Kind::Probe, Kind::Ack, Kind::Close, Kind::Fast, Kind::Renew][usize::from(kind) % 5]);
        // What a word about a list says.
        (header.offset, header.list) = (u32::from(kind) / 4 % 8, kind / 32);
        (header.session, header.number) = (established.peer.session, *number);
        *number += 1;
        let mut packet = vec![0; Header::BYTES];
        header.write(&mut packet);
        established.sealing.seal(&mut packet).expect("numbers rise");
        let changed = changes.make(&packet);
        let (before, authentic) = (self.accepted, changed == packet);
        self.knock(from, &changed, false);
        assert!(self.insecure || authentic || self.accepted == before, "a changed packet opens a session");
    }
}

fn offer(session: u64) -> Offer {
    Offer { session: session as u32 + 1, message_bytes_max: 1 << 20, death_ms: 10_000, incarnation: session }
}

fn address(port: u8) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1000 + u16::from(port % 4)))
}

const KINDS: [Kind; 8] =
    [Kind::Hello, Kind::Welcome, Kind::Data, Kind::Ack, Kind::Probe, Kind::Close, Kind::Fast, Kind::Renew];
/// More callers than the listener keeps half open.
const CALLERS: u64 = 6;
const ANSWERS_MAX: usize = 1000;
/// Where a header ends and its tag begins.
const TAG_AT: usize = 48;
