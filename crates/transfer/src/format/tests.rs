use super::*;
use proptest::prelude::*;

fn offer(name: &str) -> Offer {
    let name = FileName::new(name.as_bytes()).unwrap();
    Offer { name, size: 13_827_767, modified: (1_700_000_000, 999_999_999), mode: 0o640 }
}

/// The bytes of an offer with these fields, its checksum right whatever they say.
fn forged(name: &[u8], size: u64, nanoseconds: u32, mode: u32) -> Vec<u8> {
    let mut bytes = offer("x").encode();
    bytes.truncate(OFFER_BYTES);
    bytes[6..8].copy_from_slice(&(name.len() as u16).to_le_bytes());
    bytes[8..16].copy_from_slice(&size.to_le_bytes());
    bytes[24..28].copy_from_slice(&nanoseconds.to_le_bytes());
    bytes[28..32].copy_from_slice(&mode.to_le_bytes());
    let checksum = Checksum::EMPTY.then(&bytes[..CHECKSUM_AT]).then(name);
    bytes[CHECKSUM_AT..].copy_from_slice(&checksum.value().to_le_bytes());
    bytes.extend_from_slice(name);
    bytes
}

fn violation(bytes: &[u8]) -> Violation {
    match Offer::read(&mut &*bytes) {
        Err(PeerError::Violation(violation)) => violation,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_bytes_are_those_of_the_document() {
    let bytes = offer("letter").encode();
    let head = "68776674 0100 0600 b7fed20000000000 00f1536500000000 ffc99a3b a0010000";
    let tail = "6c6574746572";
    assert_eq!(hex(&bytes[..CHECKSUM_AT]), head.replace(' ', ""));
    assert_eq!(hex(&bytes[CHECKSUM_AT..OFFER_BYTES]), "afdf42877eb718a4");
    assert_eq!(hex(&bytes[OFFER_BYTES..]), tail);
    let checksum = Checksum::EMPTY.then(b"dear wire");
    let record = Record { number: 9, ..Record::at(Tag::Data, 0, checksum) };
    assert_eq!(hex(&record.encode()), "6461746109000000000000000000000097a10bbc53df6e19");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_name_that_leads_elsewhere_or_drives_a_terminal_is_none() {
    let cases: &[(&[u8], NameError)] = &[
        (b"", NameError::Empty),
        (b".", NameError::Directory),
        (b"..", NameError::Directory),
        (b"../passwd", NameError::Path),
        (b"/etc/passwd", NameError::Path),
        (b"a/b", NameError::Path),
        (b"nul\0l", NameError::Control),
        (b"\x1b[2J", NameError::Control),
        (b"two\nlines", NameError::Control),
        ("\u{9b}2J".as_bytes(), NameError::Control),
        (b"\xff\xfe", NameError::NotText),
        (&[b'x'; 251], NameError::TooLong { bytes: 251 }),
    ];
    for (name, expected) in cases {
        assert_eq!(FileName::new(name).as_ref(), Err(expected), "{}", name.escape_ascii());
        assert_eq!(violation(&forged(name, 1, 0, 0o600)), Violation::Name(expected.clone()));
    }
    for name in ["x", "..x", "-rf", "naïve file.txt", "日本", &"x".repeat(250)] {
        assert_eq!(FileName::new(name.as_bytes()).map(|name| name.0), Ok(name.to_owned()));
    }
}

#[test]
fn an_offer_that_no_file_can_have_is_refused() {
    assert_eq!(violation(&forged(b"x", u64::MAX, 0, 0o600)), Violation::Size(u64::MAX));
    assert_eq!(violation(&forged(b"x", 1, 1_000_000_000, 0o600)), Violation::Nanoseconds(1_000_000_000));
    assert_eq!(violation(&forged(b"x", 1, 0, 0o4755)), Violation::Mode(0o4755));
    let mut damaged = offer("letter").encode();
    damaged[9] ^= 1;
    assert_eq!(violation(&damaged), Violation::OfferChecksum);
}

#[test]
fn a_stranger_is_known_by_its_first_bytes_and_a_later_version_by_its_number() {
    let http = Offer::read(&mut &b"GET / HTTP/1.1\r\n"[..]).unwrap_err();
    assert!(matches!(http, PeerError::NotHighwire { found } if &found == b"GET "), "{http:?}");
    assert!(http.to_string().contains("it began with \"GET \""), "{http}");
    let later = Offer::read(&mut &b"hwft\x02\x00\x06\x00"[..]).unwrap_err();
    assert!(matches!(later, PeerError::Version { theirs: 2 }), "{later:?}");
    assert!(matches!(Offer::read(&mut &b"hwf"[..]), Err(PeerError::Ended)));
}

#[test]
fn times_that_a_clock_can_say_are_kept_and_others_are_left_out() {
    let at = |modified| Offer { modified, ..offer("x") }.modified();
    assert_eq!(at((0, 1)), Some(SystemTime::UNIX_EPOCH + Duration::from_nanos(1)));
    assert_eq!(at((-1, 0)), Some(SystemTime::UNIX_EPOCH - Duration::from_secs(1)));
    // Whether these have a time or not, they are no panic.
    let _ = (at((i64::MIN, 0)), at((i64::MAX, 999_999_999)));
}

#[test]
fn a_reason_is_the_same_on_both_sides_and_tells_what_to_do() {
    for code in 0..=20 {
        assert_eq!(Reason::parse(code).code(), code);
    }
    assert_eq!(Reason::Exists.code(), 1);
    assert_eq!(Reason::Unreadable.code(), 12);
    assert_eq!((Reason::ForeignPart.code(), Reason::Hidden.code()), (13, 14));
    assert!(Reason::parse(77).to_string().contains("77"));
}

proptest! {
    #[test]
    fn an_offer_is_read_as_it_was_written(
        name in "[^/\\p{Cc}]{1,60}", size in 0..=SIZE_MAX, seconds: i64, nanoseconds in 0..1_000_000_000_u32, mode in 0..=0o777_u32,
    ) {
        prop_assume!(FileName::new(name.as_bytes()).is_ok());
        let written = Offer { name: FileName::new(name.as_bytes()).unwrap(), size, modified: (seconds, nanoseconds), mode };
        let bytes = written.encode();
        prop_assert_eq!(Offer::read(&mut &bytes[..]).unwrap(), written.clone());
        // Not a byte more is taken than is its own, and not one less will do.
        prop_assert!(Offer::read(&mut &bytes[..bytes.len() - 1]).is_err());
        let _ = written.modified();
    }

    #[test]
    fn arbitrary_bytes_are_an_offer_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400), begins: bool) {
        let bytes = if begins { [&b"hwft\x01\x00"[..], &bytes].concat() } else { bytes };
        if let Ok(offer) = Offer::read(&mut &bytes[..]) {
            prop_assert!(bytes.starts_with(&offer.encode()));
        }
    }

    #[test]
    fn arbitrary_fields_are_a_safe_offer_or_an_error(name in prop::collection::vec(any::<u8>(), 0..300), size: u64, nanoseconds: u32, mode: u32) {
        if let Ok(offer) = Offer::read(&mut &forged(&name, size, nanoseconds, mode)[..]) {
            let path = std::path::Path::new("/directory").join(offer.name.as_str());
            prop_assert_eq!(path.parent(), Some(std::path::Path::new("/directory")));
            prop_assert!(offer.mode <= 0o777 && offer.size <= SIZE_MAX);
        }
    }

    #[test]
    fn a_flipped_bit_of_an_offer_is_found(at in 0..46_usize, bit in 0..8_u32) {
        let mut bytes = offer("letter").encode();
        bytes[at] ^= 1 << bit;
        prop_assert!(Offer::read(&mut &bytes[..]).is_err());
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_arbitrary_bytes_are_no_panic(bytes: [u8; RECORD_BYTES], tag in 0..7_usize) {
        let mut bytes = bytes;
        if let Some(known) = [b"have", b"from", b"data", b"kept", b"done", b"stop"].get(tag) {
            bytes[..4].copy_from_slice(*known);
            prop_assert_eq!(Record::decode(bytes).unwrap().encode(), bytes);
        }
        if let Ok(record) = Record::decode(bytes) {
            prop_assert_eq!(record.encode(), bytes);
        }
    }
}
