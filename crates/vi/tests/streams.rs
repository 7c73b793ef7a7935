//! VIs used as streams of bytes: what comes is what was written, however it was cut; and a peer that lies about slots that
//! grow ends the stream and nothing else.

use crate::support::liar::{FIRST, LAST, Liar, Slot};
use crate::support::{PATIENCE, Stage, both_ends};
use highwire_mem::News;
use highwire_vi::{
    Combining, Failure, Lie, PostError, Receive, StreamReceiver, StreamRules, StreamSender, StreamWatch, Taken, Vi,
    ViOptions,
};
use proptest::prelude::*;

const RULES: StreamRules =
    StreamRules { window: 32, acknowledge: 16, chunk_bytes: 32 << 10, combining: Combining::WhileBusy };
/// The flag of a slot that may grow.
const GROWS: u8 = 32;
const LENGTH_AT: usize = 8;

type Ends = (StreamSender, StreamReceiver, StreamWatch);

fn streams(rules: StreamRules, stage: &Stage) -> (Ends, Ends) {
    let options = ViOptions::new().own_bell();
    let (near, far) = both_ends(&stage.nic(), &stage.nic(), &options, &options);
    (near.vi.into_stream(&rules), far.vi.into_stream(&rules))
}

fn pattern(at: usize) -> u8 {
    (at.wrapping_mul(0x9e37_79b9) >> 7) as u8
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Writes and reads of any length, in any order: every byte once and in order, and marks in their place.
    #[test]
    fn what_comes_is_what_was_written(
        steps in proptest::collection::vec((any::<bool>(), prop_oneof![1usize..300, 1usize..70_000]), 1..120),
        window in 1u32..62,
        combining in prop_oneof![Just(Combining::Never), Just(Combining::WhenFull), Just(Combining::WhileBusy)],
        chunk_bytes in prop_oneof![Just(256usize), Just(32 << 10)],
    ) {
        let stage = Stage::open();
        let rules = StreamRules { window, acknowledge: window.div_ceil(2), chunk_bytes, combining };
        let ((mut tx, ..), (_, mut rx, _)) = streams(rules, &stage);
        let (mut written, mut read) = (0, 0);
        let check = |bytes: &[u8], at: usize| bytes.iter().enumerate().all(|(i, byte)| *byte == pattern(at + i));
        let mut into = vec![0; 70_000];
        for (writes, length) in steps {
            if writes {
                let bytes: Vec<u8> = (written..written + length).map(pattern).collect();
                match tx.write(&bytes) {
                    Ok(count) => {
                        prop_assert!((1..=length).contains(&count));
                        written += count;
                    }
                    Err(PostError::NoRoom { .. }) => prop_assert!(!tx.has_room() && read < written),
                    Err(error) => prop_assert!(false, "{error}"),
                }
            } else {
                match rx.read(&mut into[..length]) {
                    Taken::Bytes(count) => {
                        prop_assert!(check(&into[..count], read));
                        read += count;
                        // As much as there is.
                        prop_assert!(count == length || read == written);
                    }
                    Taken::Nothing => prop_assert_eq!(read, written),
                    other => prop_assert!(false, "{other:?}"),
                }
            }
        }
        tx.mark(7).unwrap();
        drop(tx);
        while read < written {
            let Taken::Bytes(count) = rx.read(&mut into) else { panic!("{read} of {written} came") };
            prop_assert!(check(&into[..count], read));
            read += count;
        }
        prop_assert_eq!(rx.read(&mut into), Taken::Mark(7));
    }
}

#[test]
fn a_write_that_returned_can_be_read_at_once_and_after_its_writer_is_gone() {
    let stage = Stage::open();
    let ((mut tx, rx_near, watch), (tx_far, mut rx, _)) = streams(RULES, &stage);
    let mut into = [0; 100];
    for number in 0..50u8 {
        assert_eq!(tx.write(&[number; 3]), Ok(3));
        assert_eq!(rx.read(&mut into), Taken::Bytes(3));
        assert_eq!(into[..3], [number; 3]);
        assert_eq!(rx.read(&mut into), Taken::Nothing);
    }
    (0..30u8).for_each(|number| assert_eq!(tx.write(&[number]), Ok(1)));
    drop((tx, rx_near, watch));
    assert_eq!(rx.read(&mut into), Taken::Bytes(30));
    assert_eq!(into[..30], std::array::from_fn::<u8, 30, _>(|number| number as u8));
    assert_eq!(rx.read(&mut into), Taken::Ended(Failure::PeerClosed));
    drop(tx_far);
}

#[test]
fn small_writes_fill_no_more_slots_than_they_need() {
    let stage = Stage::open();
    let ((mut tx, ..), (_, mut rx, _)) = streams(RULES, &stage);
    // More writes than the ring has slots, and nobody reads.
    (0..10_000u32).for_each(|number| assert_eq!(tx.write(&number.to_le_bytes()), Ok(4)));
    assert!(tx.stats().messages < 16, "{:?}", tx.stats());
    let mut into = vec![0; 40_000];
    assert_eq!(rx.read(&mut into), Taken::Bytes(40_000));
    assert!(into.chunks(4).enumerate().all(|(number, bytes)| bytes == (number as u32).to_le_bytes()));
}

/// Lies about parts of a stream, each with what the slot is before it is changed.
#[test]
fn every_lie_about_a_stream_is_named_and_ends_it() {
    let inline = |bytes: &[u8]| Slot { flags: FIRST | LAST | GROWS, ..Slot::inline(bytes) };
    let span = |length: u32, capacity: u32, offset: u64| Slot {
        flags: FIRST | LAST | GROWS,
        length,
        ..Slot::spans(&[(0, offset, capacity)])
    };
    let region = Liar::REGION_BYTES as u64;
    let slots = [
        ("no bytes and no mark", Slot::inline(b"")),
        ("bytes and a mark", Slot { immediate: 1, ..Slot::inline(b"x") }),
        ("a mark that grows", Slot { immediate: 1, ..inline(b"") }),
        ("more than there is room for", span(101, 100, 4096)),
        ("outside the region", span(1, 100, region - 50)),
        ("another region", Slot { flags: FIRST | LAST | GROWS, length: 1, ..Slot::spans(&[(9, 0, 100)]) }),
        ("two spans", Slot { flags: FIRST | LAST, length: 2, ..Slot::spans(&[(0, 4096, 1), (0, 8192, 1)]) }),
        ("a part of a message", Slot::first_of(100, b"abc")),
        ("control bytes", Slot { control: 4, ..Slot::inline(b"abcdefgh") }),
    ];
    for (what, slot) in slots {
        let (mut liar, (_, mut rx, _)) = victim();
        liar.send(&slot);
        let mut into = [0; 300];
        let Taken::Ended(Failure::PeerLied(lie)) = rx.read(&mut into) else { panic!("{what} was believed") };
        assert!(!lie.to_string().is_empty(), "{what}");
    }
}

#[test]
fn a_slot_that_shrinks_or_outgrows_its_room_is_a_lie() {
    for (what, length) in [("shrinks", 2), ("outgrows its slot", 241), ("is absurd", u32::MAX)] {
        let (mut liar, (_, mut rx, _)) = victim();
        let slot = Slot { flags: FIRST | LAST | GROWS, ..Slot::inline(b"abc") };
        liar.send(&slot);
        let mut into = [0; 300];
        assert_eq!(rx.read(&mut into), Taken::Bytes(3), "{what}");
        liar.memory().store64(liar.slot_at(0) + LENGTH_AT, u64::from(length));
        liar.rope.ring(News::Slots);
        let ended = rx.read(&mut into);
        assert!(matches!(ended, Taken::Ended(Failure::PeerLied(Lie::SlotOverfull { .. }))), "{what}: {ended:?}");
    }
}

#[test]
fn a_part_of_a_stream_is_no_message() {
    let (stage, mut liar, mut vi) = victims_vi();
    vi.post_recv(Receive::new(1).in_place()).unwrap();
    liar.send(&Slot { flags: FIRST | LAST | GROWS, ..Slot::inline(b"abc") });
    let done = vi.wait(PATIENCE).unwrap();
    assert!(matches!(done.status, Err(Failure::PeerLied(Lie::OutOfPlace { .. }))), "{:?}", done.status);
    drop(stage);
}

fn victims_vi() -> (Stage, Liar, Vi) {
    let stage = Stage::open();
    let nic = stage.nic();
    let listener = nic.listen("shm:victim").unwrap();
    let path = stage.runtime_dir().join("victim.sock");
    let (depth, loans) = (nic.config().depth, nic.config().loans);
    let (liar, vi) = Liar::meet_with(&listener, &path, &ViOptions::new(), |letter| {
        (letter.depth, letter.loans) = (depth, loans);
    });
    (stage, liar, vi)
}

fn victim() -> (Liar, Ends) {
    let (_stage, liar, vi) = victims_vi();
    (liar, vi.into_stream(&RULES))
}
