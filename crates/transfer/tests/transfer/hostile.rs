//! The other side lies: whatever it says, nothing is written where it does not belong, and nobody panics.

use crate::place::{Place, pair};
use highwire_transfer::{
    BLOCK_BYTES, CHUNK_BYTES_MAX, Checksum, FileName, Offer, PeerError, Reason, ReceiveError, Record, SendError,
    Source, Tag, Violation, receive, send,
};
use proptest::prelude::*;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::thread;

/// What a receiver makes of these bytes, all sent at once.
fn received(place: &Place, bytes: &[u8]) -> Result<(), ReceiveError> {
    let (mut near, mut far) = pair();
    let bytes = bytes.to_vec();
    let liar = thread::spawn(move || {
        let _ = near.write_all(&bytes);
        let _ = near.shutdown(std::net::Shutdown::Write);
        let _ = near.read_to_end(&mut Vec::new());
    });
    let received = receive(&mut far, &place.destination(), |_| ());
    drop(far);
    liar.join().unwrap();
    received.map(|_| ())
}

/// What a sender of the place's file makes of these answers.
fn sent(place: &Place, answers: &[u8]) -> Result<(), SendError> {
    let source = Source::open(&place.source()).unwrap();
    let (mut near, mut far) = pair();
    far.write_all(answers).unwrap();
    let liar = thread::spawn(move || {
        let _ = far.shutdown(std::net::Shutdown::Write);
        let _ = far.read_to_end(&mut Vec::new());
    });
    let sent = send(&mut near, &source, |_| ());
    drop(near);
    liar.join().unwrap();
    sent.map(|_| ())
}

fn offer(size: u64) -> Vec<u8> {
    Offer { name: FileName::new(b"letter").unwrap(), size, modified: (0, 0), mode: 0o600 }.encode()
}

fn record(tag: Tag, number: u32, value: u64, checksum: Checksum) -> Vec<u8> {
    Record { tag, number, value, checksum }.encode().to_vec()
}

fn of_receiver(result: Result<(), ReceiveError>) -> Violation {
    match result {
        Err(ReceiveError::Peer(PeerError::Violation(violation))) => violation,
        other => panic!("{other:?}"),
    }
}

fn of_sender(result: Result<(), SendError>) -> Violation {
    match result {
        Err(SendError::Peer(PeerError::Violation(violation))) => violation,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sender_that_lies_about_places_and_lengths_is_refused() {
    let place = Place::new(0);
    let empty = Checksum::EMPTY;
    let from = record(Tag::From, 0, 0, empty);
    let ten = empty.then(&[7; 10]);
    let data = |number, value| [record(Tag::Data, number, value, ten), vec![7; 10]].concat();
    let position = |tag, found, from, to| Violation::Position { tag, found, from, to };
    let cases = [
        (10, record(Tag::From, 0, 5, empty), position(Tag::From, 5, 0, 0)),
        (10, record(Tag::From, 0, 0, ten), Violation::Checksum { tag: Tag::From, bytes: 0 }),
        (10, record(Tag::Data, 1, 0, empty), Violation::UnexpectedTag { found: Tag::Data }),
        (10, [from.clone(), data(0, 0)].concat(), Violation::ChunkBytes(0)),
        (10, [from.clone(), data(u32::MAX, 0)].concat(), Violation::ChunkBytes(u32::MAX)),
        (1 << 40, [from.clone(), data(CHUNK_BYTES_MAX as u32 + 1, 0)].concat(), Violation::ChunkBytes(1_048_577)),
        (10, [from.clone(), data(10, 1)].concat(), position(Tag::Data, 1, 0, 10)),
        (10, [from.clone(), data(10, u64::MAX)].concat(), position(Tag::Data, u64::MAX, 0, 10)),
        (9, [from.clone(), data(10, 0)].concat(), position(Tag::Data, 10, 0, 9)),
        (0, [from.clone(), data(10, 0)].concat(), position(Tag::Data, 10, 0, 0)),
        (10, [from.clone(), record(Tag::Done, 0, 10, ten)].concat(), position(Tag::Done, 0, 10, 10)),
        (10, [from.clone(), data(10, 0), record(Tag::Done, 0, 9, ten)].concat(), position(Tag::Done, 9, 10, 10)),
        (
            10,
            [from.clone(), data(10, 0), record(Tag::Done, 0, 10, empty)].concat(),
            Violation::Checksum { tag: Tag::Done, bytes: 10 },
        ),
        (10, [from.clone(), b"evil".repeat(6)].concat(), Violation::UnknownTag { found: *b"evil" }),
        (10, [from.clone(), record(Tag::Kept, 0, 0, empty)].concat(), Violation::UnexpectedTag { found: Tag::Kept }),
    ];
    for (size, said, expected) in cases {
        assert_eq!(of_receiver(received(&place, &[offer(size), said].concat())), expected);
        assert!(!place.whole().exists());
        let _ = fs::remove_file(place.part());
    }
    let whole = [offer(10), from, data(10, 0), record(Tag::Done, 0, 10, ten)].concat();
    received(&place, &whole).unwrap();
    assert_eq!(fs::read(place.whole()).unwrap(), [7; 10]);
}

#[test]
fn a_receiver_that_lies_about_what_it_has_gets_nothing_confirmed() {
    let place = Place::new(1000);
    let whole = Checksum::EMPTY.then(&place.bytes);
    let empty = Checksum::EMPTY;
    let have = record(Tag::Have, 1, 0, empty);
    let position = |tag, found, from, to| Violation::Position { tag, found, from, to };
    let cases = [
        (record(Tag::Have, 1, 1001, empty), position(Tag::Have, 1001, 0, 1000)),
        (record(Tag::Done, 1, 1000, whole), Violation::UnexpectedTag { found: Tag::Done }),
        ([have.clone(), record(Tag::Kept, 0, 0, empty)].concat(), position(Tag::Kept, 0, 1, 1000)),
        ([have.clone(), record(Tag::Kept, 0, 1001, empty)].concat(), position(Tag::Kept, 1001, 1, 1000)),
        (
            [have.clone(), record(Tag::Kept, 0, 5, empty), record(Tag::Kept, 0, 5, empty)].concat(),
            position(Tag::Kept, 5, 6, 1000),
        ),
        (
            [have.clone(), record(Tag::Done, 0, 1000, empty)].concat(),
            Violation::Checksum { tag: Tag::Done, bytes: 1000 },
        ),
        ([record(Tag::Have, 1, 10, empty), record(Tag::Kept, 0, 9, empty)].concat(), position(Tag::Kept, 9, 10, 10)),
        ([have.clone(), have.clone()].concat(), Violation::UnexpectedTag { found: Tag::Have }),
    ];
    for (said, expected) in cases {
        assert_eq!(of_sender(sent(&place, &said)), expected);
    }
    let version = sent(&place, &record(Tag::Have, 2, 0, empty));
    assert!(matches!(version, Err(SendError::Peer(PeerError::Version { theirs: 2 }))), "{version:?}");
    let stopped = sent(&place, &record(Tag::Stop, 99, 0, empty));
    assert!(matches!(stopped, Err(SendError::Stopped { reason: Reason::Unknown(99) })), "{stopped:?}");
    // Its disk fails while it reads what it has.
    let failing = [record(Tag::Have, 1, 10, empty), Record::stop(Reason::Storage).encode().to_vec()].concat();
    let stopped = sent(&place, &failing);
    assert!(matches!(stopped, Err(SendError::Stopped { reason: Reason::Storage })), "{stopped:?}");
    let silent = sent(&place, &have);
    assert!(matches!(silent, Err(SendError::Unconfirmed { .. })), "{silent:?}");
    sent(&place, &[have, record(Tag::Done, 0, 1000, whole)].concat()).unwrap();
}

#[test]
fn a_receiver_that_does_not_report_is_not_run_away_from() {
    let place = Place::new(0);
    // A hole costs no disk.
    File::options().write(true).open(place.source()).unwrap().set_len(5 * BLOCK_BYTES).unwrap();
    let source = Source::open(&place.source()).unwrap();
    let (mut near, mut far) = pair();
    let silent = thread::spawn(move || {
        far.write_all(&record(Tag::Have, 1, 0, Checksum::EMPTY)).unwrap();
        let mut buffer = vec![0; 1 << 20];
        let mut came = 0;
        while came < 4 * BLOCK_BYTES {
            came += far.read(&mut buffer).unwrap() as u64;
        }
        far.set_read_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
        while let Ok(more @ 1..) = far.read(&mut buffer) {
            came += more as u64;
        }
        far.write_all(&Record::stop(Reason::Full).encode()).unwrap();
        came
    });
    let stopped = send(&mut near, &source, |_| ());
    assert!(matches!(stopped, Err(SendError::Stopped { reason: Reason::Full })), "{stopped:?}");
    let came = silent.join().unwrap();
    assert!(came < 4 * BLOCK_BYTES + BLOCK_BYTES / 2, "{came} bytes came");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_bytes_behind_an_offer_put_nothing_in_place(
        size in 1..200_u64,
        said in prop::collection::vec((0..7_usize, 0..300_u32, 0..300_u64, 0..40_usize), 0..6),
    ) {
        let place = Place::new(0);
        let tags = [Tag::Have, Tag::From, Tag::Data, Tag::Kept, Tag::Done];
        let mut bytes = [offer(size), record(Tag::From, 0, 0, Checksum::EMPTY)].concat();
        for (tag, number, value, more) in said {
            bytes.extend(tags.get(tag).map_or(vec![0xa5; 24], |tag| record(*tag, number, value, Checksum::EMPTY)));
            bytes.extend(vec![0x5a; more]);
        }
        // Not one checksum in it is right, but for that of nothing.
        prop_assert!(received(&place, &bytes).is_err());
        prop_assert!(!place.whole().exists());
        prop_assert_eq!(fs::metadata(place.part()).map_or(0, |part| part.len()), 0);
    }
}
