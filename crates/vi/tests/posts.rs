//! Descriptors that are not taken: each refusal says why, gives everything back and changes nothing.

use crate::support::seeded::{bytes, verify};
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, buffer, buffer_of};
use highwire_vi::{
    ConnectError, Failure, GrantError, Message, Nic, Path, Payload, PayloadToken, PostError, Receive, Refusal, Segment,
    State, Tag, ViOptions, WaitError,
};
use std::time::{Duration, Instant};

struct Pair {
    one: Nic,
    other: Nic,
    near: Line,
    far: Line,
    _stage: Stage,
}

impl Pair {
    fn with(change: impl Fn(&mut highwire_vi::Config), options: &ViOptions<'_>) -> Pair {
        let stage = Stage::open();
        let (one, other) = (stage.nic_with(&change), stage.nic_with(&change));
        let (near, far) = both_ends(&one, &other, options, options);
        Pair { one, other, near, far, _stage: stage }
    }

    fn new() -> Pair {
        Pair::with(|_| (), &ViOptions::new())
    }

    /// Posts a message that must be refused: why, in words too, and how many of its segments came back.
    fn refused(&mut self, message: Message) -> (PostError, String) {
        let refused = self.near.vi.post_send(message).unwrap_err();
        assert_eq!(self.near.vi.state(), State::Connected, "a refusal is no failure");
        let text = refused.to_string();
        (refused.reason, text)
    }

    /// A message still goes.
    fn still_works(&mut self, tag: Tag) {
        let of = |nic: &Nic, bytes: &[u8]| {
            let region = nic.register_tagged(bytes.len(), tag).unwrap();
            let mut buffer = region.slice(0..bytes.len()).unwrap();
            buffer.copy_from_slice(bytes);
            buffer
        };
        self.near.vi.post_send(Message::new(99).payload(of(&self.one, &bytes(3, 5000)))).unwrap();
        self.far.vi.post_recv(Receive::new(98).into(of(&self.other, &[0; 5000]))).unwrap();
        verify(3, &self.far.received().into_buffer().unwrap());
        self.far.vi.poll();
        self.near.sent();
    }
}

#[test]
fn buffers_of_another_tag_are_refused_in_every_place() {
    let mut pair = Pair::with(|_| (), &ViOptions::new().tag(Tag(3)));
    let wrong = PostError::WrongTag { buffer: Tag(0), vi: Tag(3) };
    let other = buffer(&pair.one, 10);
    let (reason, text) = pair.refused(Message::new(1).payload(other));
    assert_eq!((reason, &text[..]), (wrong.clone(), "the buffer's region has Tag(0), the VI has Tag(3)"));
    let shared = buffer(&pair.one, 10).share();
    assert_eq!(pair.refused(Message::new(1).shared(shared)).0, wrong);
    let frozen = pair.one.register_freezable(10, Tag(0)).unwrap().freeze().unwrap();
    assert_eq!(pair.refused(Message::new(1).frozen(&frozen, 0..10)).0, wrong);
    let mine = pair.one.register_tagged(10, Tag(3)).unwrap().slice(0..10).unwrap();
    let other = buffer(&pair.one, 10);
    assert_eq!(pair.refused(Message::new(1).payload(mine).payload(other)).0, wrong);
    let mine = pair.one.register_tagged(10, Tag(3)).unwrap().slice(0..10).unwrap();
    let receive = Receive::new(1).into(mine).into(buffer(&pair.one, 10));
    assert_eq!(pair.near.vi.post_recv(receive).unwrap_err().reason, wrong);
    let receive = Receive::new(1).into(buffer(&pair.one, 10));
    assert_eq!(pair.near.vi.expect(PayloadToken(1), receive).unwrap_err().reason, wrong);
    pair.still_works(Tag(3));
}

#[test]
fn too_many_control_bytes_are_refused_with_their_number() {
    let mut pair = Pair::new();
    for bytes in [129, 4096] {
        let (reason, text) = pair.refused(Message::new(1).control(&vec![0; bytes]));
        assert_eq!(reason, PostError::ControlTooLong { bytes });
        assert_eq!(text, format!("{bytes} control bytes; a message carries at most 128"));
    }
    pair.still_works(Tag(0));
}

#[test]
fn too_many_segments_are_refused_with_the_limit_and_all_come_back() {
    let mut pair = Pair::new();
    let gather = |pair: &Pair, count: usize| {
        (0..count).fold(Message::new(1), |message, _| message.payload(buffer(&pair.one, 300)))
    };
    let message = gather(&pair, 65);
    let refused = pair.near.vi.post_send(message).unwrap_err();
    assert_eq!(refused.reason, PostError::TooManySegments { segments: 65, limit: 64 });
    assert_eq!(refused.to_string(), "65 segments; a message carries at most 64");
    // Fifteen spans fill a slot; control bytes and a token take room from them.
    for (message, limit) in [
        (gather(&pair, 16), 15),
        (gather(&pair, 15).lands_at(PayloadToken(1)), 14),
        (gather(&pair, 8).control(&[0; 128]), 7),
    ] {
        let segments = limit + 1;
        assert_eq!(pair.refused(message.by(Path::Referenced)).0, PostError::TooManySegments { segments, limit });
    }
    let receive = (0..65).fold(Receive::new(1), |receive, _| receive.into(buffer(&pair.one, 1)));
    let refused = pair.near.vi.post_recv(receive).unwrap_err();
    assert_eq!(refused.reason, PostError::TooManySegments { segments: 65, limit: 64 });
    // The most that is allowed goes.
    let message = gather(&pair, 64);
    pair.near.vi.post_send(message).unwrap();
    pair.far.vi.post_recv(Receive::new(1).into(buffer(&pair.other, 64 * 300))).unwrap();
    assert_eq!(pair.far.received().length, 64 * 300);
    let done = pair.near.sent();
    assert!(matches!(&done.payload, Payload::Segments(segments) if segments.len() == 64), "all come back");
    pair.still_works(Tag(0));
}

#[test]
fn a_region_yet_to_be_frozen_is_neither_referred_to_nor_granted() {
    let mut pair = Pair::new();
    let region = pair.one.register_freezable(20_000, Tag(0)).unwrap();
    let message = Message::new(1).payload(region.slice(0..20_000).unwrap()).by(Path::Referenced);
    let (reason, text) = pair.refused(message);
    assert_eq!(reason, PostError::NotFrozenYet);
    assert!(text.contains("freeze it before sending"), "{text}");
    let granted = pair.near.vi.grant(&region).unwrap_err();
    assert_eq!(granted, GrantError::NotFrozenYet);
    assert!(granted.to_string().contains("freeze it before granting"), "{granted}");
    let frozen = region.freeze().unwrap();
    pair.near.vi.grant_frozen(&frozen).unwrap();
    pair.still_works(Tag(0));
}

#[test]
fn a_token_expected_twice_is_refused_and_the_first_stays() {
    let mut pair = Pair::new();
    pair.near.vi.expect(PayloadToken(7), Receive::new(1).into(buffer(&pair.one, 4))).unwrap();
    let refused = pair.near.vi.expect(PayloadToken(7), Receive::new(2).into(buffer(&pair.one, 4))).unwrap_err();
    assert_eq!(refused.reason, PostError::TokenInUse(7));
    assert_eq!(refused.to_string(), "payload token 7 is already expected");
    pair.far.vi.post_send(Message::new(1).payload(buffer(&pair.other, 4)).lands_at(PayloadToken(7))).unwrap();
    assert_eq!(pair.near.received().token, 1);
}

#[test]
fn more_descriptors_than_allowed_are_refused_until_some_complete() {
    let mut pair = Pair::with(|config| (config.descriptors_max, config.depth) = (10, 4), &ViOptions::new());
    let full = PostError::QueueFull { limit: 10 };
    for token in 0..10 {
        let receive = Receive::new(token).into(buffer(&pair.one, 8));
        if token % 2 == 0 {
            pair.near.vi.post_recv(receive)
        } else {
            pair.near.vi.expect(PayloadToken(token), receive)
        }
        .unwrap();
    }
    let refused = pair.near.vi.post_recv(Receive::new(10).into(buffer(&pair.one, 8))).unwrap_err();
    assert_eq!(refused.reason, full);
    assert_eq!(refused.to_string(), "10 descriptors are already waiting; poll for completions first");
    assert_eq!(pair.near.vi.expect(PayloadToken(99), refused.descriptor).unwrap_err().reason, full);
    pair.near.vi.revoke(PayloadToken(1)).unwrap();
    pair.near.vi.post_recv(Receive::new(11).into(buffer(&pair.one, 8))).unwrap();
    // Four fill the ring, ten wait: of the first kind, none waits for the peer.
    for token in 0..14 {
        pair.near.vi.post_send(Message::new(token).payload(buffer(&pair.one, 8))).unwrap();
    }
    let refused = pair.near.vi.post_send(Message::new(14).payload(buffer(&pair.one, 8))).unwrap_err();
    assert_eq!(refused.reason, full);
    for token in 0..14 {
        pair.far.vi.post_recv(Receive::new(token).into(buffer(&pair.other, 8))).unwrap();
        pair.far.received();
        pair.far.vi.poll();
        assert_eq!(pair.near.sent().token, token, "none was lost");
    }
    pair.near.vi.post_send(refused.descriptor).unwrap();
}

#[test]
fn bytes_without_room_are_refused_whole_and_go_when_the_peer_has_read() {
    let mut pair = Pair::with(
        |config| (config.depth, config.payload_bytes_start, config.payload_bytes_max) = (4, 4096, 4096),
        &ViOptions::new(),
    );
    (0..4).for_each(|token| pair.near.vi.send_bytes(token, b"slot").unwrap());
    let refused = pair.near.vi.send_bytes(4, b"slot").unwrap_err();
    assert_eq!(refused, PostError::NoRoom { bytes: 4 });
    assert_eq!(refused.to_string(), "no room for 4 bytes now; the other side has to read first");
    for _ in 0..4 {
        pair.far.vi.post_recv(Receive::new(0).into(buffer(&pair.other, 4096))).unwrap();
        assert_eq!(pair.far.received().length, 4);
    }
    pair.far.vi.poll();
    pair.near.vi.send_bytes(5, &[7; 4096]).unwrap();
    assert_eq!(pair.near.vi.send_bytes(6, &[7; 1000]), Err(PostError::NoRoom { bytes: 1000 }), "the area is full");
    pair.far.vi.post_recv(Receive::new(0).into(buffer(&pair.other, 4096))).unwrap();
    assert_eq!(pair.far.received().length, 4096);
    pair.far.vi.poll();
    pair.near.vi.send_bytes(6, &[7; 1000]).unwrap();
}

#[test]
fn ranges_outside_a_region_or_in_use_are_refused_with_their_numbers() {
    let nic = Stage::open().nic();
    let region = nic.register(65_536).unwrap();
    let outside = region.slice(70_000..74_096).unwrap_err().to_string();
    assert_eq!(outside, "offset 70000 + 4096 is outside the region of 65536 bytes");
    #[expect(clippy::reversed_empty_ranges, reason = "what is tested")]
    let reversed = region.slice(10..5);
    assert!(reversed.is_err());
    let held = region.slice(1000..2000).unwrap();
    for range in [0..1001, 1000..2000, 1500..1600, 1999..3000, 0..65_536] {
        let clash = region.slice(range).unwrap_err().to_string();
        assert!(clash.contains("overlaps a buffer that is in use"), "{clash}");
    }
    let around = (region.slice(0..1000).unwrap(), region.slice(2000..65_536).unwrap());
    drop(held);
    assert!(region.slice(1000..2000).is_ok());
    drop(around);
    assert!(nic.register(0).unwrap_err().to_string().contains("region of 0 bytes"));
}

#[test]
fn grants_on_a_closed_vi_are_refused_with_the_reason() {
    let Pair { one, mut near, far, _stage, .. } = Pair::new();
    drop(far);
    near.end();
    let closed = GrantError::NotConnected(Failure::PeerClosed);
    assert_eq!(near.vi.grant(&one.register(64).unwrap()).unwrap_err(), closed);
    assert_eq!(near.vi.grant_exported(&one.export(64, Tag(0)).unwrap()).unwrap_err(), closed);
    let frozen = one.register_freezable(64, Tag(0)).unwrap().freeze().unwrap();
    assert_eq!(near.vi.grant_frozen(&frozen).unwrap_err(), closed);
    assert_eq!(closed.to_string(), "the VI is not connected: the peer disconnected");
}

#[test]
fn more_regions_than_a_peer_takes_are_refused_and_the_connection_goes_on() {
    let mut pair = Pair::with(|config| config.peer_regions_max = 4, &ViOptions::new());
    let regions: Vec<_> = (0..6).map(|_| pair.one.register(4096).unwrap()).collect();
    let granted: Vec<_> = regions.iter().map(|region| pair.near.vi.grant(region)).collect();
    let end = pair.far.vi.wait(A_WHILE).unwrap_err();
    assert!(matches!(end, WaitError::TimedOut(_)), "an honest peer that grants much is no dead peer: {end}");
    assert!(granted[4..].iter().all(|granted| granted.is_err()), "{granted:?}");
    pair.still_works(Tag(0));
}

#[test]
fn a_user_that_shares_more_than_it_may_is_told_so_and_no_other_reason() {
    let stage = Stage::open();
    let listening = stage.nic_with(|config| config.peer_bytes_total_max = 1 << 20);
    let caller = stage.nic_with(|config| config.region_bytes = 2 << 20);
    let listener = listening.listen("shm:small").unwrap();
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| caller.connect("shm:small").unwrap_err());
        assert!(listener.accept(A_WHILE).is_err());
        let refused = refused.join().unwrap();
        assert!(matches!(&refused, ConnectError::Refused { reason: Refusal::Allotment, .. }), "{refused}");
        assert!(refused.to_string().contains("peer_bytes_total_max"), "{refused}");
    });
    // What comes later ends the connection that brought it.
    let mut pair = Pair::with(|config| config.peer_bytes_total_max = 1 << 30, &ViOptions::new());
    pair.near.vi.grant(&pair.one.register(1 << 30).unwrap()).unwrap();
    let end = pair.far.vi.wait(PATIENCE).unwrap_err();
    assert_eq!(end, WaitError::NotConnected(Failure::Exhausted));
    assert!(end.to_string().contains("peer_bytes_total_max"), "{end}");
}

#[test]
fn handing_regions_to_a_peer_that_is_stopped_is_an_error_and_not_a_hang() {
    let stage = Stage::open();
    stage.role("stopped", |stage| {
        let mut line = Line::connect(&stage.nic(), "shm:stopped");
        stage.mark("ready");
        line.end();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:stopped").unwrap();
    let stopped = stage.start("stopped");
    let mut line = Line::accept(&listener);
    stage.await_mark("ready");
    stopped.freeze();
    let mut slowest = Duration::ZERO;
    let mut refused = None;
    for token in 0..1000 {
        let message = Message::new(token).payload(buffer_of(&nic, &[1; 300])).by(Path::Referenced);
        let start = Instant::now();
        let posted = line.vi.post_send(message);
        slowest = slowest.max(start.elapsed());
        if let Err(error) = posted {
            refused = Some(error);
            break;
        }
    }
    stopped.thaw();
    let refused = refused.expect("a socket that nobody reads fills up");
    assert!(
        matches!(&refused.reason, PostError::Handover(GrantError::Courier(_)) | PostError::QueueFull { .. }),
        "{refused}"
    );
    assert!(slowest < Duration::from_secs(1), "posting waited {slowest:?} for a peer that does nothing");
    drop(line);
    stopped.finish();
}

#[test]
fn segments_that_come_back_are_those_that_went() {
    let mut pair = Pair::with(|config| config.descriptors_max = 1, &ViOptions::new());
    let frozen = pair.one.register_freezable(500, Tag(0)).unwrap().freeze().unwrap();
    let message = Message::new(1)
        .payload(buffer_of(&pair.one, &bytes(1, 400)))
        .shared(buffer_of(&pair.one, &bytes(2, 500)).share())
        .frozen(&frozen, 100..200)
        .by(Path::Referenced);
    pair.near.vi.post_send(message).unwrap();
    pair.far.vi.post_recv(Receive::new(1).into(buffer(&pair.other, 1000))).unwrap();
    assert_eq!(pair.far.received().length, 1000);
    let done = pair.near.sent();
    let Payload::Segments(segments) = done.payload else { panic!("{:?}", done.payload) };
    let [Segment::Buffer(first), Segment::Shared(second), Segment::Frozen(_, range)] = &segments[..] else {
        panic!("{segments:?}")
    };
    verify(1, first);
    verify(2, second);
    assert_eq!(*range, 100..200);
}
