//! Every lie that a peer can write into its memory, one by one: the connection ends with an error
//! that names it, every descriptor comes back, and another connection goes on.

use crate::support::liar::{ABORTED, CLOSED, FIRST, LAST, Liar, OPEN, Slot, TOKEN, WRITTEN, region_letter};
use crate::support::seeded::bytes;
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, buffer, buffer_of};
use highwire_mem::{News, OwnRegion, RegionKind};
use highwire_vi::{
    Config, Failure, InPlace, Lie, Message, Nic, Path, PayloadToken, Pulses, Receive, Reliability, State, ViOptions,
    WaitError,
};
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A victim with an honest connection besides the lying one.
struct Scene {
    nic: Nic,
    liar: Liar,
    line: Line,
    honest: (Line, Line),
    _stage: Stage,
}

impl Scene {
    fn new() -> Scene {
        Scene::with(|_| (), &ViOptions::new())
    }

    fn with(change: fn(&mut Config), options: &ViOptions<'_>) -> Scene {
        let stage = Stage::open();
        let (nic, other) = (stage.nic_with(change), stage.nic());
        let honest = both_ends(&nic, &other, &ViOptions::new(), &ViOptions::new());
        let listener = nic.listen("shm:victim").unwrap();
        let (depth, loans) = (nic.config().depth, nic.config().loans);
        let path = stage.runtime_dir().join("victim.sock");
        let (liar, vi) = Liar::meet_with(&listener, &path, options, |letter| {
            (letter.depth, letter.loans) = (depth, loans);
        });
        Scene { nic, liar, line: Line::new(vi), honest, _stage: stage }
    }

    /// Receives of every kind, tokens 1 to 6. The first in line is token 1.
    fn post_receives(&mut self, first: Receive) {
        self.line.vi.post_recv(first).unwrap();
        self.line.vi.post_recv(Receive::new(2).into(buffer(&self.nic, 500)).into(buffer(&self.nic, 500))).unwrap();
        self.line.vi.post_recv(Receive::new(3).in_place()).unwrap();
        self.line.vi.post_recv(Receive::new(4)).unwrap();
        self.line.vi.expect(PayloadToken(5), Receive::new(5).into(buffer(&self.nic, 100))).unwrap();
        self.line.vi.expect(PayloadToken(6), Receive::new(6).in_place()).unwrap();
    }

    /// The lie ends the connection and is named; these tokens come back, each once.
    fn end_with_lie(mut self, tokens: impl IntoIterator<Item = u64>, what: &str) -> Lie {
        let (failure, done) = self.line.end();
        let Failure::PeerLied(lie) = failure else { panic!("{what}: ended as {failure}") };
        assert_eq!(self.line.vi.state(), State::Ended(failure), "{what}");
        assert_eq!(self.liar.their_state(), ABORTED, "{what}: the peer is told");
        let came: Vec<u64> = done.iter().map(|done| done.token).collect();
        let unique: BTreeSet<u64> = came.iter().copied().collect();
        assert_eq!(unique.len(), came.len(), "{what}: none twice");
        assert_eq!(unique, tokens.into_iter().collect(), "{what}: every descriptor comes back");
        let failed = done.iter().filter(|done| done.status == Err(failure)).count();
        assert!(failed > 0 || done.is_empty(), "{what}");
        assert!(self.line.vi.post_recv(Receive::new(9)).is_err(), "{what}");
        assert!(!lie.to_string().is_empty());
        still_works(&mut self.honest);
        lie
    }
}

fn still_works(honest: &mut (Line, Line)) {
    let (near, far) = honest;
    near.vi.post_recv(Receive::new(1)).unwrap();
    far.vi.post_send(Message::new(2).immediate(77)).unwrap();
    assert_eq!(near.received().immediate, 77);
    far.sent();
}

/// Where the victim's first receive is to land.
fn targets(nic: &Nic) -> [Receive; 3] {
    let into = Receive::new(1).into(buffer(nic, 1000));
    let scattered = Receive::new(1).into(buffer(nic, 1)).into(buffer(nic, 999));
    [into, scattered, Receive::new(1).in_place()]
}

/// Sends these slots to a victim with everything posted, into each kind of target.
fn caught(what: &str, slots: &[Slot], expected: fn(&Lie) -> bool) {
    for target in 0..3 {
        let mut scene = Scene::with(|config| config.message_bytes_max = 1 << 20, &ViOptions::new());
        let mut targets = targets(&scene.nic);
        let first = std::mem::replace(&mut targets[target], Receive::new(0));
        scene.post_receives(first);
        for slot in slots {
            scene.liar.send(slot);
        }
        let lie = scene.end_with_lie(1..=6, what);
        assert!(expected(&lie), "{what}: {lie}");
    }
}

#[test]
fn slots_of_an_unknown_kind_are_named() {
    for kind in [0, 4, 255] {
        let slot = Slot { kind, ..Slot::inline(b"x") };
        caught("an unknown kind", &[slot], |lie| matches!(lie, Lie::UnknownKind { index: 0, .. }));
    }
}

#[test]
fn slots_whose_parts_do_not_fit_are_named() {
    let x = || Slot::inline(b"x");
    let overfull: [(&str, Slot); 11] = [
        ("too long inside", Slot { length: 241, ..x() }),
        ("a length of all ones", Slot { length: u32::MAX, ..x() }),
        ("too much control", Slot { control: 129, ..x() }),
        ("control and payload", Slot { control: 128, length: 113, ..x() }),
        ("no spans", Slot { spans: 0, ..Slot::spans(&[(0, 0, 10)]) }),
        ("sixteen spans", Slot { spans: 16, ..Slot::spans(&[(0, 0, 10)]) }),
        ("all spans", Slot { spans: 255, ..Slot::spans(&[(0, 0, 10)]) }),
        ("spans beside an inline payload", Slot { spans: 1, ..x() }),
        ("a write with a payload", Slot { kind: WRITTEN, length: 5, ..x() }),
        ("unknown flags", Slot { flags: 0x83, ..x() }),
        ("a token and spans", Slot { spans: 15, flags: FIRST | LAST | TOKEN, ..Slot::spans(&[(0, 0, 10)]) }),
    ];
    for (what, slot) in overfull {
        caught(what, &[slot], |lie| matches!(lie, Lie::SlotOverfull { index: 0, .. }));
    }
    let begun = Slot::first_of(100, b"begun");
    for (what, slot) in [
        ("control in the middle", Slot { flags: LAST, control: 1, ..x() }),
        ("a token in the middle", Slot { flags: LAST | TOKEN, ..x() }),
    ] {
        caught(what, &[begun.clone(), slot], |lie| matches!(lie, Lie::SlotOverfull { index: 1, .. }));
    }
}

#[test]
fn slots_out_of_place_are_named() {
    let out_of_place = |lie: &Lie| matches!(lie, Lie::OutOfPlace { .. });
    caught("goes on, never begun", &[Slot { flags: 0, ..Slot::inline(b"x") }], out_of_place);
    caught("ends, never begun", &[Slot { flags: LAST, ..Slot::inline(b"x") }], out_of_place);
    let begun = Slot::first_of(100, b"begun");
    caught("begins inside another", &[begun.clone(), begun.clone()], out_of_place);
    caught("a whole one inside another", &[begun.clone(), Slot::inline(b"x")], out_of_place);
    caught(
        "a write inside another",
        &[begun.clone(), Slot { kind: WRITTEN, length: 0, ..Slot::inline(b"") }],
        out_of_place,
    );
    caught("ends too early", &[begun, Slot { flags: LAST, ..Slot::inline(b"x") }], out_of_place);
}

#[test]
fn parts_that_do_not_add_up_are_named() {
    let overrun = |lie: &Lie| matches!(lie, Lie::MessageOverrun { .. });
    let first = Slot::first_of(10, b"01234567");
    caught("more than announced", &[first.clone(), Slot { flags: LAST, ..Slot::inline(b"01234567") }], overrun);
    caught("more at once", &[Slot::first_of(3, b"01234567")], overrun);
    let spans = Slot::spans(&[(0, 0, 10), (0, 0, 20)]);
    caught("spans shorter than the slot", &[Slot { length: 31, ..spans.clone() }], overrun);
    caught("spans longer than the slot", &[Slot { length: 29, ..spans }], overrun);
    let too_long = |lie: &Lie| matches!(lie, Lie::MessageTooLong { limit: 0x10_0000, .. });
    for total in [(1 << 20) + 1, u64::from(u32::MAX), u64::MAX] {
        caught("longer than allowed", &[Slot::first_of(total, b"x")], too_long);
    }
    caught("one span longer than allowed", &[Slot::spans(&[(0, 0, (1 << 20) + 1)])], too_long);
}

#[test]
fn payloads_outside_every_region_are_named() {
    let end = Liar::REGION_BYTES as u64;
    let outside = |lie: &Lie| matches!(lie, Lie::SpanOutside { region: 0, .. });
    for (what, offset, length) in [
        ("behind the end", end, 1),
        ("across the end", end - 9, 10),
        ("far away", 1 << 60, 10),
        ("around", u64::MAX, 10),
        ("around to the start", u64::MAX - 9, 10),
    ] {
        caught(what, &[Slot::spans(&[(0, offset, length)])], outside);
        caught(what, &[Slot::spans(&[(0, 4096, 5), (0, offset, length)])], outside);
    }
    caught("a region that never was", &[Slot::spans(&[(4711, 0, 10)])], |lie| {
        matches!(lie, Lie::UnknownRegion { region: 4711 })
    });
}

#[test]
fn payloads_outside_a_handed_over_region_are_named() {
    for in_place in [false, true] {
        let mut scene = Scene::new();
        let target = if in_place { Receive::new(1).in_place() } else { Receive::new(1).into(buffer(&scene.nic, 4096)) };
        scene.post_receives(target);
        let region = OwnRegion::create(1 << 20).unwrap();
        scene.liar.mail(&region_letter(9, RegionKind::Registered.number(), 0, 1 << 20), &[region.as_fd()]);
        region.memory().copy_in(5000, b"good");
        scene.liar.send(&Slot::spans(&[(9, 5000, 4)]));
        let done = scene.line.received();
        assert_eq!((done.token, done.length), (1, 4));
        scene.line.vi.post_recv(Receive::new(1).into(buffer(&scene.nic, 4096))).unwrap();
        scene.line.vi.revoke(PayloadToken(5)).unwrap();
        scene.liar.send(&Slot::spans(&[(9, (1 << 20) - 3, 4)]));
        // Token 2 is the next in line; what is in place was given back by then.
        let lie = scene.end_with_lie([1, 2, 3, 4, 6], "outside a region");
        assert_eq!(lie, Lie::SpanOutside { region: 9, offset: (1 << 20) - 3, length: 4, bytes: 1 << 20 });
    }
}

/// Posts one message by each way under reliable reception: tokens 1 to 4, the last waiting for room.
fn post_sends(scene: &mut Scene) {
    let nic = &scene.nic;
    let mut post = |token: u64, size: usize, path: Path| {
        scene.line.vi.post_send(Message::new(token).payload(buffer_of(nic, &bytes(token, size))).by(path)).unwrap();
    };
    post(1, 100, Path::Choose);
    post(2, 5000, Path::Referenced);
    post(3, 5000, Path::Buffered);
    post(4, 1 << 20, Path::Buffered);
}

fn sending_scene() -> Scene {
    let options = ViOptions::new().reliability(Reliability::Reception).pulses(Pulses::Whole);
    Scene::with(|config| (config.payload_bytes_start, config.payload_bytes_max) = (64 << 10, 64 << 10), &options)
}

#[test]
fn progress_that_cannot_be_is_named() {
    for claimed in [1 << 20, 65, u64::MAX] {
        let mut scene = sending_scene();
        post_sends(&mut scene);
        scene.liar.claim_consumed(claimed);
        scene.liar.rope.ring(News::Slots);
        let lie = scene.end_with_lie(1..=4, "consumed more than was sent");
        assert!(matches!(lie, Lie::Consumed { claimed: found, least: 0, .. } if found == claimed), "{lie}");
    }
    let mut scene = sending_scene();
    post_sends(&mut scene);
    scene.liar.claim_consumed(2);
    scene.liar.rope.ring(News::Slots);
    assert_eq!((scene.line.sent().token, scene.line.sent().token), (1, 2));
    scene.liar.claim_consumed(1);
    scene.liar.rope.ring(News::Slots);
    let lie = scene.end_with_lie([3, 4], "consumed backwards");
    assert!(matches!(lie, Lie::Consumed { claimed: 1, least: 2, .. }), "{lie}");
}

#[test]
fn a_lie_found_while_posting_loses_nothing() {
    // The ring is full, so that the next post has to look at the peer's progress.
    for path in [Path::Choose, Path::Buffered, Path::Referenced] {
        let mut scene = Scene::new();
        for token in 0..64 {
            scene.line.vi.post_send(Message::new(token).payload(buffer(&scene.nic, 300))).unwrap();
        }
        scene.liar.claim_consumed(1 << 40);
        let message = Message::new(64).payload(buffer(&scene.nic, 300)).by(path);
        match scene.line.vi.post_send(message) {
            Ok(()) => {}
            Err(refused) => {
                assert!(refused.to_string().contains("the peer lies"), "{refused}");
                scene.end_with_lie(0..64, "found while posting");
                continue;
            }
        }
        scene.end_with_lie(0..65, "found while posting");
    }
}

#[test]
fn a_lie_found_in_the_middle_of_a_long_message_loses_nothing() {
    // The peer's progress is looked at between the pulses of one message.
    let scene = &mut Scene::new();
    scene.liar.claim_consumed(1 << 40);
    let message = Message::new(1).payload(buffer(&scene.nic, 1 << 20)).by(Path::Buffered);
    let posted = scene.line.vi.post_send(message);
    let (failure, done) = scene.line.end();
    assert!(matches!(failure, Failure::PeerLied(Lie::Consumed { .. })), "{failure}");
    let back = match posted {
        Ok(()) => done.into_iter().find(|done| done.token == 1).and_then(|done| done.into_buffer()),
        Err(_) => return,
    };
    assert_eq!(back.map(|buffer| buffer.len()), Some(1 << 20), "the buffer comes back with the reason");
}

#[test]
fn giving_back_what_is_not_held_is_named() {
    let mut scene = sending_scene();
    post_sends(&mut scene);
    scene.liar.claim_held(1);
    scene.liar.claim_consumed(2);
    scene.liar.rope.ring(News::Slots);
    assert_eq!(scene.line.sent().token, 1);
    scene.liar.claim_released(0, 0);
    scene.liar.rope.ring(News::Slots);
    let lie = scene.end_with_lie([2, 3, 4], "released what it never held");
    assert_eq!(lie, Lie::ReleasedUnheld { index: 0 });
}

#[test]
fn giving_back_twice_is_named() {
    let options = ViOptions::new().path(Path::Referenced);
    let mut scene = Scene::with(|_| (), &options);
    for token in 1..=3 {
        scene.line.vi.post_send(Message::new(token).payload(buffer(&scene.nic, 5000))).unwrap();
        scene.liar.claim_held(token - 1);
    }
    scene.liar.claim_consumed(3);
    scene.liar.claim_released(0, 1);
    scene.liar.rope.ring(News::Slots);
    assert_eq!(scene.line.sent().token, 2);
    scene.liar.claim_released(1, 1);
    scene.liar.rope.ring(News::Slots);
    assert_eq!(scene.end_with_lie([1, 3], "released twice"), Lie::ReleasedUnheld { index: 1 });
}

#[test]
fn holding_more_than_allowed_is_named() {
    let mut scene = Scene::with(|config| config.loans = 2, &ViOptions::new().path(Path::Referenced));
    for token in 0..5 {
        scene.line.vi.post_send(Message::new(token).payload(buffer(&scene.nic, 5000))).unwrap();
        scene.liar.claim_held(token);
    }
    scene.liar.claim_consumed(5);
    scene.liar.rope.ring(News::Slots);
    assert_eq!(scene.end_with_lie(0..5, "holds too much"), Lie::HoldsTooMany { limit: 2 });
}

#[test]
fn a_state_that_no_side_can_be_in_ends_the_connection() {
    let words = [0, 3 << 30, u32::MAX, 78 << 2 | OPEN, 77 << 2];
    for word in words {
        let mut scene = Scene::new();
        scene.post_receives(Receive::new(1).into(buffer(&scene.nic, 10)));
        scene.liar.set_state_word(word);
        scene.liar.rope.ring(News::Slots);
        let (failure, done) = scene.line.end();
        assert!(
            matches!(failure, Failure::PeerClosed | Failure::PeerAborted | Failure::PeerLied(_)),
            "{word}: {failure}"
        );
        assert_eq!(done.len(), 6);
        still_works(&mut scene.honest);
    }
    for (state, expected) in [(CLOSED, Failure::PeerClosed), (ABORTED, Failure::PeerAborted)] {
        let mut scene = Scene::new();
        scene.liar.set_state(state);
        assert_eq!(scene.line.end().0, expected);
    }
}

#[test]
fn what_only_hurts_the_liar_changes_nothing() {
    let mut scene = Scene::new();
    scene.post_receives(Receive::new(1).into(buffer(&scene.nic, 10)));
    // Sequences that are not the next one, in every slot; tables that nobody has reason to read;
    // any CPU, any attention.
    for index in 0..64 {
        scene.liar.memory().store32(scene.liar.slot_at(index), 0x1000 + index as u32);
        scene.liar.claim_held(1000 + index);
    }
    for number in 0..128 {
        scene.liar.claim_released(number, 1000 + number as u64);
    }
    scene.liar.memory().store32(0x40, 0);
    scene.liar.set_attention_word(u32::MAX);
    scene.liar.rope.ring(News::Slots);
    assert!(matches!(scene.line.vi.wait(A_WHILE), Err(WaitError::TimedOut(_))));
    let rings = scene.liar.rings();
    scene.line.vi.send_bytes(1, b"x").unwrap();
    scene.line.sent();
    assert!(scene.liar.rings() > rings, "who asks to be rung for everything is");
    assert!(scene.liar.has_sent(0));
    scene.liar.send(&Slot::inline(b"hello"));
    assert_eq!(scene.line.received().length, 5);
    still_works(&mut scene.honest);
}

#[test]
fn who_never_reads_and_never_gives_back_holds_up_nobody_else() {
    let mut scene = Scene::with(|_| (), &ViOptions::new().path(Path::Referenced));
    for token in 0..200 {
        scene.line.vi.post_send(Message::new(token).payload(buffer(&scene.nic, 300))).unwrap();
    }
    scene.liar.claim_held(0);
    scene.liar.claim_held(1);
    scene.liar.claim_consumed(2);
    assert!(matches!(scene.line.vi.wait(A_WHILE), Err(WaitError::TimedOut(_))), "nothing comes back");
    still_works(&mut scene.honest);
    let start = Instant::now();
    let left = scene.line.vi.disconnect(A_WHILE);
    assert_eq!(left, Err(WaitError::TimedOut(A_WHILE)));
    assert!(start.elapsed() < PATIENCE);
    assert_eq!(scene.liar.their_state(), ABORTED);
    still_works(&mut scene.honest);
}

#[test]
fn a_payload_in_place_may_change_and_is_still_only_bytes() {
    let mut scene = Scene::new();
    scene.line.vi.post_recv(Receive::new(1).in_place()).unwrap();
    scene.liar.memory().copy_in(1 << 20, &[1; 5000]);
    scene.liar.send(&Slot::spans(&[(0, 1 << 20, 5000)]));
    let payload: InPlace = scene.line.received().into_in_place().unwrap();
    assert_eq!((payload.byte(0), payload.byte(4999)), (1, 1));
    scene.liar.memory().copy_in(1 << 20, &[2; 5000]);
    assert_eq!((payload.byte(0), payload.byte(4999)), (2, 2), "read where it is");
    assert!(payload.as_slice().is_none(), "so there is no slice of it");
    // The slot itself may change, and be given away again, while its payload is held.
    scene.liar.write(0, &Slot::spans(&[(9, u64::MAX, u32::MAX)]));
    let mut copy = [0; 5000];
    payload.copy_to(0, &mut copy);
    assert_eq!(copy, [2; 5000]);
    scene.line.vi.receiver().release(payload);
    still_works(&mut scene.honest);
}

#[test]
fn a_region_that_claims_to_be_frozen_and_is_not_is_never_lent() {
    let mut scene = Scene::new();
    scene.post_receives(Receive::new(1).in_place());
    let region = OwnRegion::create(1 << 20).unwrap();
    scene.liar.mail(&region_letter(9, RegionKind::Frozen.number(), 0, 1 << 20), &[region.as_fd()]);
    scene.liar.send(&Slot::spans(&[(9, 5000, 4)]));
    let (failure, done) = scene.line.end();
    assert_eq!(done.len(), 6, "{failure}");
    assert!(done.iter().all(|done| done.status.is_err()));
    still_works(&mut scene.honest);
}

/// What a liar may send on the pair's socket that is no honest region.
fn bad_mail(what: &str, bytes: &[u8], descriptors: usize) {
    let mut scene = Scene::new();
    scene.post_receives(Receive::new(1).into(buffer(&scene.nic, 100)));
    let region = OwnRegion::create(1 << 20).unwrap();
    let given = vec![region.as_fd(); descriptors];
    scene.liar.mail(bytes, &given);
    let start = Instant::now();
    let (failure, done) = scene.line.end();
    assert_eq!(done.len(), 6, "{what}");
    assert!(start.elapsed() < Duration::from_secs(5), "{what}");
    assert_ne!(failure, Failure::PeerDied, "{what}: the peer lives, and lied");
    still_works(&mut scene.honest);
}

#[test]
fn garbage_on_the_pairs_socket_ends_the_pair_and_is_not_called_a_death() {
    let registered = RegionKind::Registered.number();
    bad_mail("no message at all", b"garbage", 0);
    bad_mail("a region without a descriptor", &region_letter(9, registered, 0, 1 << 20), 0);
    bad_mail("a region of an unknown kind", &region_letter(9, 77, 0, 1 << 20), 1);
    bad_mail("a region larger than it is", &region_letter(9, registered, 0, 2 << 20), 1);
    bad_mail("an empty region", &region_letter(9, registered, 0, 0), 1);
    bad_mail("a region larger than allowed", &region_letter(9, registered, 0, u64::MAX), 1);
    bad_mail(
        "an exported region that cannot be written",
        &region_letter(9, RegionKind::Exported.number(), 0, 1 << 20),
        1,
    );
    bad_mail("a message too long", &[0; 500], 0);
}
