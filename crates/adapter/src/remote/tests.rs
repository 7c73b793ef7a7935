//! A peer that lies about remote memory, against a port on a real socket.

use super::*;
use crate::note::{FIRST_VI, NOTES};
use crate::{Engine, UdpWire, WireConfig};
use highwire_link::{UdpLink, UdpOptions};
use highwire_mem::work::{Carrier, Done, Line, Place, Side, Wire, Work};
use highwire_mem::{Allow, Buffer, Exported, Region, Tag};
use highwire_proto::{Endpoint, EndpointConfig, EndpointEvent, Entropy, Event, Keys, SeededEntropy};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
const ENDS: Ends = Ends { local: FIRST_VI, remote: 0 };

/// The victim's end: a line of an honest port.
struct Victim {
    line: Arc<Line>,
    _wire: UdpWire,
}

impl Victim {
    fn carrier(&self) -> Arc<dyn Carrier> {
        self.line.terms().unwrap().carrier.clone()
    }

    fn export(&self, bytes: usize) -> (Exported, u32) {
        let exported = Exported::create(bytes, Tag(0)).unwrap();
        self.carrier().grant(Granted::exported(&exported)).unwrap();
        (exported.clone(), exported.id())
    }

    fn post(&self, work: impl FnOnce(Errand) -> Work, token: u64, parcel: Parcel) {
        let errand = Errand { token, handle: 7, tag: Tag(0), offset: 0, immediate: None, parcel };
        self.carrier().post(&self.line, work(errand));
    }
}

/// The liar's: it says what it likes.
struct Liar {
    engine: Engine<UdpLink, Vec<u8>, Vec<u8>>,
    session: u32,
    /// The victim's number of the VI.
    vi: u32,
    start: Instant,
    notes: VecDeque<Note>,
    payloads: VecDeque<Vec<u8>>,
    /// Of its payloads, and of its notes.
    arrived: usize,
    heard: usize,
    /// It gives no room for further notes.
    is_deaf: bool,
}

fn meet() -> (Liar, Victim) {
    let wire = UdpWire::new(WireConfig::default());
    let listener = wire.listen("127.0.0.1:0", &Allow::SameUser).unwrap();
    let line = Arc::new(Line::new(|| {}));
    let to = listener.address();
    let mut entropy = SeededEntropy::new(1);
    let link = UdpLink::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let endpoint = Endpoint::new(Keys::insecure(), EndpointConfig::default(), &mut entropy);
    let mut engine = Engine::new(link, endpoint, Box::new(entropy));
    let session = engine.connect(Duration::ZERO, to).unwrap();
    let (notes, payloads) = (VecDeque::new(), VecDeque::new());
    let (start, is_deaf) = (Instant::now(), false);
    let mut liar = Liar { engine, session, vi: 0, start, notes, payloads, arrived: 0, heard: 0, is_deaf };
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(listener.accept(&line, true, PATIENCE).unwrap()));
        let Note::Accepted { vi, .. } = liar.next_note() else { panic!("no other note") };
        liar.vi = vi;
    });
    let ends = Ends { remote: liar.vi, ..ENDS };
    let session = liar.session();
    for (local, remote) in [(ends.local, ends.remote), (ends.payloads(), ends.remote | PAYLOADS)] {
        session.open_vi(local, remote, Assurance::Reliable, Assurance::Reliable).unwrap();
    }
    (liar, Victim { line, _wire: wire })
}

impl Liar {
    fn session(&mut self) -> &mut Session<Vec<u8>, Vec<u8>> {
        self.engine.endpoint().session(self.session).unwrap()
    }

    fn tell(&mut self, note: Note) {
        let control = note.encode();
        let mut message = Outgoing { token: 0, control, immediate: 0, payload_token: None, payload: None };
        // So many may be outstanding, and no more.
        while let Err((refusal, back)) = self.session().post_send(NOTES, message) {
            assert!(matches!(refusal, highwire_proto::Refusal::Full { .. }), "{refusal}");
            message = back;
            self.turn();
        }
    }

    fn request(&mut self, kind: RequestKind, id: u32, handle: u32, offset: u64, length: u64) {
        let request = Request { kind, id, handle, tag: 0, offset, length };
        self.tell(Note::Request { to: self.vi, request });
    }

    /// Asks to write, and is let in.
    fn ask(&mut self, id: u32, handle: u32, offset: u64, length: u64) -> u64 {
        self.request(RequestKind::Write, id, handle, offset, length);
        match self.next_note() {
            Note::Go { id: of, token, .. } if of == id => token,
            other => panic!("{other:?}"),
        }
    }

    fn send(&mut self, token: u64, payload: Vec<u8>) {
        let (payload_token, payload) = (Some(token), Some(payload));
        let message = Outgoing { token: 9, control: vec![], immediate: 0, payload_token, payload };
        self.session().post_send(FIRST_VI | PAYLOADS, message).unwrap();
    }

    fn expect(&mut self, token: u64, bytes: usize) {
        let place = Incoming { token, target: Some(vec![0; bytes]) };
        self.session().expect(FIRST_VI | PAYLOADS, token, place).unwrap();
    }

    fn turn(&mut self) {
        self.engine.turn(self.start.elapsed()).unwrap();
        while let Some(event) = self.engine.endpoint().poll_event() {
            match event {
                EndpointEvent::Connected(_) => {
                    let session = self.session();
                    session.open_vi(NOTES, NOTES, Assurance::Reliable, Assurance::Reliable).unwrap();
                    (0..64).for_each(|_| session.post_receive(NOTES, Incoming { token: 0, target: None }).unwrap());
                    self.tell(Note::Open { vi: FIRST_VI, reliable: true });
                }
                EndpointEvent::Session(_, Event::Received { vi: NOTES, control, status: Ok(()), .. }) => {
                    if !self.is_deaf {
                        self.session().post_receive(NOTES, Incoming { token: 0, target: None }).unwrap();
                    }
                    self.notes.extend(Note::decode(&control));
                }
                EndpointEvent::Session(_, Event::Received { target: Some(target), status: Ok(()), .. }) => {
                    self.payloads.push_back(target);
                }
                EndpointEvent::Session(_, Event::Sent { token: 9, status: Ok(()), .. }) => self.arrived += 1,
                EndpointEvent::Session(_, Event::Sent { vi: NOTES, .. }) => self.heard += 1,
                EndpointEvent::Session(_, Event::Sent { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn until<T>(&mut self, mut look: impl FnMut(&mut Liar) -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            self.turn();
            if let Some(found) = look(self) {
                return found;
            }
            assert!(Instant::now() < until, "nothing came");
        }
    }

    fn next_note(&mut self) -> Note {
        self.until(|liar| liar.notes.pop_front())
    }

    fn verdict(&mut self) -> (u32, Verdict) {
        match self.next_note() {
            Note::Denied { id, verdict, .. } => (id, verdict),
            other => panic!("{other:?}"),
        }
    }

    /// An honest write works all the same.
    fn goes_on(&mut self, victim: &Victim) {
        let (exported, handle) = victim.export(100);
        let token = self.ask(4711, handle, 10, 3);
        self.send(token, vec![1, 2, 3]);
        assert_eq!(self.next_note(), Note::Written { to: FIRST_VI, id: 4711 });
        assert_eq!(bytes(&exported)[9..14], [0, 1, 2, 3, 0]);
        victim.carrier().withdraw(handle);
    }

    /// What the victim has done, when it has.
    fn done_at(&mut self, victim: &Victim) -> Done {
        self.until(|_| victim.line.take(Side::Sent))
    }
}

fn bytes(exported: &Exported) -> Vec<u8> {
    let mut bytes = vec![0; exported.memory().len()];
    exported.memory().copy_out(0, &mut bytes);
    bytes
}

#[test]
fn a_payload_of_another_length_changes_nothing_outside_its_range() {
    let (mut liar, victim) = meet();
    let (exported, handle) = victim.export(20_000);
    for (id, length) in [(1, 9_000), (2, 1_001), (3, 999), (4, 0)] {
        let token = liar.ask(id, handle, 5_000, 1_000);
        liar.send(token, vec![0xee; length]);
        assert_eq!(liar.verdict(), (id, Verdict::Mismatch), "{length}");
        let found = bytes(&exported);
        assert!(found[..5_000].iter().chain(&found[6_000..]).all(|byte| *byte == 0), "{length}");
        liar.goes_on(&victim);
    }
}

#[test]
fn a_token_is_good_for_one_payload_and_one_that_was_not_given_for_none() {
    let (mut liar, victim) = meet();
    let (exported, handle) = victim.export(4096);
    let token = liar.ask(1, handle, 0, 4096);
    liar.send(token, vec![1; 4096]);
    assert_eq!(liar.next_note(), Note::Written { to: FIRST_VI, id: 1 });
    for other in (0..100).chain([token, u64::MAX]) {
        liar.send(other, vec![2; 4096]);
    }
    liar.until(|liar| (liar.arrived == 103).then_some(()));
    assert_eq!(bytes(&exported), [1; 4096]);
    liar.goes_on(&victim);
}

#[test]
fn requests_that_are_wrong_in_any_way_are_denied_with_the_reason() {
    let (mut liar, victim) = meet();
    let (exported, handle) = victim.export(4096);
    let region = Region::create(4096, Tag(0)).unwrap();
    victim.carrier().grant(Granted::registered(&region).unwrap()).unwrap();
    let huge = Exported::create(1 << 30, Tag(0)).unwrap();
    victim.carrier().grant(Granted::exported(&huge)).unwrap();
    let outside = Verdict::OutOfRange { bytes: 4096 };
    let read = RequestKind::Read { token: 1 };
    let cases = [
        (RequestKind::Write, handle, 4096, 1, outside),
        (RequestKind::Write, handle, 0, 4097, outside),
        (RequestKind::Write, handle, u64::MAX, 1, outside),
        (RequestKind::Write, handle, 1, u64::MAX, outside),
        (RequestKind::Write, handle, u64::MAX, u64::MAX, outside),
        (read, handle, 4096, 1, outside),
        (read, handle, 1, u64::MAX, outside),
        (RequestKind::Write, handle + 1000, 0, 1, Verdict::NotGranted),
        (read, 0, 0, 0, Verdict::NotGranted),
        (RequestKind::Write, region.id(), 0, 1, Verdict::ReadOnly),
        // Longer than any message.
        (RequestKind::Write, huge.id(), 0, 1 << 30, Verdict::Mismatch),
        (read, huge.id(), 0, 1 << 30, Verdict::Mismatch),
    ];
    for (id, (kind, handle, offset, length, verdict)) in cases.into_iter().enumerate() {
        liar.request(kind, id as u32, handle, offset, length);
        assert_eq!(liar.verdict(), (id as u32, verdict), "{kind:?} {offset} {length}");
    }
    let request = Request { kind: read, id: 99, handle, tag: 5, offset: 0, length: 1 };
    liar.tell(Note::Request { to: liar.vi, request });
    assert_eq!(liar.verdict(), (99, Verdict::WrongTag));
    // Of VIs that are not there nothing is said; nor is anything of what nobody asked for.
    for to in [0, 1, FIRST_VI + 50, liar.vi | PAYLOADS] {
        liar.tell(Note::Request { to, request });
    }
    liar.tell(Note::Go { to: liar.vi, id: 5, token: 5 });
    liar.tell(Note::Written { to: liar.vi, id: 5 });
    liar.tell(Note::Denied { to: liar.vi, id: 5, verdict: Verdict::Busy });
    liar.goes_on(&victim);
    assert_eq!(bytes(&exported), [0; 4096]);
}

#[test]
fn a_flood_of_requests_is_served_up_to_the_limit_and_denied_beyond() {
    let (mut liar, victim) = meet();
    let (exported, handle) = victim.export(1 << 16);
    // All under the same number.
    for _ in 0..1000 {
        liar.request(RequestKind::Write, 7, handle, 0, 10);
    }
    let (mut tokens, mut denied) = (Vec::new(), 0);
    while tokens.len() + denied < 1000 {
        match liar.next_note() {
            Note::Go { id: 7, token, .. } => tokens.push(token),
            Note::Denied { id: 7, verdict: Verdict::Busy, .. } => denied += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((tokens.len(), denied), (SERVED_MAX, 1000 - SERVED_MAX));
    // When they are done there is room again.
    for token in tokens {
        liar.send(token, vec![3; 10]);
        assert_eq!(liar.next_note(), Note::Written { to: FIRST_VI, id: 7 });
    }
    liar.goes_on(&victim);
    // And of reads that nobody takes: they are dropped where they arrive.
    for _ in 0..1000 {
        liar.request(RequestKind::Read { token: 5 }, 8, handle, 0, 1 << 16);
    }
    liar.expect(6, 1 << 16);
    let read = RequestKind::Read { token: 6 };
    liar.until(|liar| {
        let busy = liar.notes.drain(..).filter(|note| matches!(note, Note::Denied { id: 9, .. })).count();
        if busy > 0 || liar.payloads.is_empty() && liar.session().is_quiet() {
            liar.request(read, 9, handle, 0, 1 << 16);
        }
        liar.payloads.pop_front()
    });
    assert_eq!(bytes(&exported)[..20], [[3; 10], [0; 10]].concat()[..]);
}

#[test]
fn a_flood_from_one_who_takes_no_answers_takes_no_memory_either() {
    let (mut liar, victim) = meet();
    let (_exported, handle) = victim.export(100);
    liar.is_deaf = true;
    for round in 0..20 {
        let before = liar.heard;
        for id in 0..500 {
            liar.request(RequestKind::Write, id, handle + 1, 0, 10);
        }
        liar.until(|liar| (liar.heard == before + 500).then_some(()));
        assert!(victim.line.ended().is_none(), "{round}");
    }
    assert_eq!(liar.notes.len(), 64, "as many as it had room for");
    // It is heard all the while, and by and by gets what was kept for it: not ten thousand answers.
    liar.is_deaf = false;
    (0..64).for_each(|_| liar.session().post_receive(NOTES, Incoming { token: 0, target: None }).unwrap());
    let (mut answers, mut last) = (0, Instant::now());
    liar.until(|liar| {
        if liar.notes.drain(..).inspect(|_| answers += 1).count() > 0 {
            last = Instant::now();
        }
        (last.elapsed() > Duration::from_millis(200)).then_some(())
    });
    assert!(answers < 1000, "{answers}");
    liar.goes_on(&victim);
    liar.tell(Note::Closed { to: liar.vi, aborted: false });
    liar.until(|_| victim.line.ended());
}

/// A buffer of `bytes`, filled.
fn buffer(bytes: usize, with: u8) -> Buffer {
    let mut buffer = Region::create(bytes.max(1), Tag(0)).unwrap().slice(0..bytes).unwrap();
    buffer.fill(with);
    buffer
}

fn asked(note: Note) -> (u32, RequestKind) {
    match note {
        Note::Request { request, .. } => (request.id, request.kind),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_owner_that_lies_harms_nobody_but_itself() {
    let (mut liar, victim) = meet();
    let to = liar.vi;
    // Word of a write that was not let in, or that is not one, is not heard.
    victim.post(Work::Write, 1, Parcel::Buffer(buffer(1000, 5)));
    let (id, _) = asked(liar.next_note());
    liar.tell(Note::Written { to, id });
    liar.tell(Note::Go { to, id: id + 1, token: 3 });
    liar.tell(Note::Denied { to, id: id + 9, verdict: Verdict::Busy });
    liar.expect(3, 1000);
    for _ in 0..3 {
        liar.tell(Note::Go { to, id, token: 3 });
    }
    let payload = liar.until(|liar| liar.payloads.pop_front());
    assert_eq!(payload, [5; 1000]);
    assert!(victim.line.take(Side::Sent).is_none(), "it is not there before its owner says so");
    liar.tell(Note::Written { to, id });
    liar.tell(Note::Written { to, id });
    let done = liar.done_at(&victim);
    assert_eq!((done.token, done.deed, done.status, done.length), (1, Deed::Write, Ok(()), 1000));
    // A read that is answered with too much, too little, twice, or under another token.
    for (token, length, status) in [
        (2, 2000, Err(Fault::Denied(Denial::Mismatch))),
        (3, 999, Err(Fault::Denied(Denial::Mismatch))),
        (4, 1000, Ok(())),
    ] {
        victim.post(Work::Read, token, Parcel::Buffer(buffer(1000, 5)));
        let (id, kind) = asked(liar.next_note());
        let RequestKind::Read { token: at } = kind else { panic!("{kind:?}") };
        liar.tell(Note::Go { to, id, token: 1 });
        liar.tell(Note::Written { to, id });
        liar.send(at + 1, vec![1; 1000]);
        liar.send(at, vec![token as u8; length]);
        liar.send(at, vec![9; 1000]);
        let done = liar.done_at(&victim);
        assert_eq!((done.token, done.deed, done.status), (token, Deed::Read, status));
        let Parcel::Buffer(buffer) = done.parcel else { panic!("the buffer comes back") };
        assert!(status.is_err() || buffer.iter().all(|byte| *byte == token as u8));
    }
    // Denied, and answered all the same: nothing lands in a buffer that is back.
    victim.post(Work::Read, 5, Parcel::Buffer(buffer(1000, 5)));
    let (id, kind) = asked(liar.next_note());
    let RequestKind::Read { token: at } = kind else { panic!("{kind:?}") };
    liar.tell(Note::Denied { to, id, verdict: Verdict::OutOfRange { bytes: 12 } });
    let done = liar.done_at(&victim);
    assert_eq!(done.status, Err(Fault::Denied(Denial::OutOfRange { end: 1000, bytes: 12 })));
    liar.send(at, vec![9; 1000]);
    let arrived = liar.arrived;
    liar.until(|liar| (liar.arrived > arrived).then_some(()));
    let Parcel::Buffer(buffer) = done.parcel else { panic!("the buffer comes back") };
    assert!(buffer.iter().all(|byte| *byte == 5));
    liar.goes_on(&victim);
}

/// Notes and payloads at random, some of them nearly right. Only bytes that the liar may write can change, what was
/// not granted does not, and messages arrive as before.
#[test]
fn whatever_a_liar_says_at_random_it_writes_what_it_was_granted_and_no_more() {
    let (mut random, mut written) = (SeededEntropy::new(2), false);
    for _ in 0..16 {
        let (mut liar, victim) = meet();
        let ((granted, handle), secret) = (victim.export(20_000), Exported::create(20_000, Tag(0)).unwrap());
        let mut tokens: Vec<u64> = vec![0, 1, u64::MAX];
        for _ in 0..400 {
            match random.below(8) {
                // In the range that it is for, or far beyond.
                0..=2 => {
                    let kind = match random.below(2) {
                        0 => RequestKind::Write,
                        _ => RequestKind::Read { token: tokens[random.below(tokens.len() as u64) as usize] },
                    };
                    let handle = [handle, handle, secret.id(), random.below(9) as u32][random.below(4) as usize];
                    let offset = [5_000, 5_000 + random.below(500), u64::MAX - 10, 20_000][random.below(4) as usize];
                    let length = if offset < 6_000 { 100 * random.below(5) } else { 1 + random.below(u64::MAX) };
                    liar.request(kind, random.below(20) as u32, handle, offset, length);
                }
                3 => {
                    let (to, id, token) = (liar.vi, random.below(20) as u32, random.below(20));
                    liar.tell([Note::Go { to, id, token }, Note::Written { to, id }][random.below(2) as usize]);
                }
                4 => {
                    let mut control = vec![0u8; random.below(60) as usize];
                    random.fill(&mut control);
                    // Those below open and close VIs, which is not what this is about.
                    control.iter_mut().take(1).for_each(|kind| *kind = *kind % 8 + 6);
                    let message = Outgoing { token: 0, control, immediate: 0, payload_token: None, payload: None };
                    liar.session().post_send(NOTES, message).unwrap();
                }
                _ => {
                    let token = tokens[random.below(tokens.len() as u64) as usize];
                    let bytes = if random.chance(0.8) { 100 * random.below(5) } else { random.below(700) };
                    liar.send(token, vec![0xee; bytes as usize]);
                }
            }
            (0..3).for_each(|_| liar.turn());
            let told = std::mem::take(&mut liar.notes);
            tokens.extend(told.into_iter().filter_map(|note| match note {
                Note::Go { token, .. } => Some(token),
                _ => None,
            }));
        }
        // A message still arrives, behind all of that.
        let place = Place { token: 5, parcel: Parcel::Bytes(Vec::new()), limit: usize::MAX };
        victim.carrier().post(&victim.line, Work::Receive(place));
        let payload = Some(b"after all".to_vec());
        let message = Outgoing { token: 1, control: vec![], immediate: 0, payload_token: None, payload };
        liar.session().post_send(FIRST_VI, message).unwrap();
        let done = liar.until(|_| victim.line.take(Side::Received));
        assert_eq!((done.token, done.status, done.length), (5, Ok(()), 9));
        let found = bytes(&granted);
        assert!(found[..5_000].iter().chain(&found[6_000..]).all(|byte| *byte == 0));
        written |= found[5_000..6_000].contains(&0xee);
        assert!(bytes(&secret).iter().all(|byte| *byte == 0));
        assert_eq!(victim.line.ended(), None);
    }
    assert!(written, "nothing was ever written");
}

/// A VI that is connected cannot be refused any more. Everything comes back when it is closed.
#[test]
fn a_connected_vi_is_not_refused() {
    let (mut liar, victim) = meet();
    victim.post(Work::Write, 1, Parcel::Buffer(buffer(1000, 5)));
    asked(liar.next_note());
    let to = liar.vi;
    liar.tell(Note::Refused { to, reason: crate::note::Refusal::Busy });
    liar.tell(Note::Closed { to, aborted: true });
    let done = liar.done_at(&victim);
    assert_eq!((done.token, done.status), (1, Err(Fault::PeerAborted)));
    liar.until(|_| victim.line.ended());
}
