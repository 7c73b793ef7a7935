use super::*;
use proptest::prelude::*;

prop_compose! {
    fn headers()(
        kind in prop::sample::select(vec![Kind::Hello, Kind::Data, Kind::Ack, Kind::Probe, Kind::Close, Kind::Fast, Kind::Renew]),
        (flags, list, length, control, epoch) in (0u8..128, any::<u8>(), 0u16..2000, 0u8..=128, any::<u8>()),
        (session, vi, message, offset) in any::<(u32, u32, u32, u32)>(),
        (number, ack, credit, receive) in any::<(u64, u64, u32, u32)>(),
    ) -> Header {
        let flags = HeaderFlags(flags);
        Header { kind, flags, list, session, number, vi, message, offset, length, control, epoch, ack, credit, receive }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(header in headers(), old in any::<u8>()) {
        let mut packet = vec![old; Header::BYTES + usize::from(header.length)];
        header.write(&mut packet);
        prop_assert_eq!(Header::parse(&packet), Ok(header));
        prop_assert!(packet[TAG_AT..Header::BYTES].iter().all(|byte| *byte == 0));
        prop_assert!(packet[Header::BYTES..].iter().all(|byte| *byte == old), "the payload is not touched");
    }

    #[test]
    fn arbitrary_bytes_are_a_header_or_an_error(mut packet in prop::collection::vec(any::<u8>(), 0..200), near in any::<bool>()) {
        if near && packet.len() >= Header::BYTES {
            // Most random bytes fail at the first check; these get further.
            packet[0] = WIRE_VERSION;
            packet[1] %= 9;
            packet[2] &= 127;
            packet[28] = (packet.len() - Header::BYTES) as u8;
            packet[29] = 0;
        }
        if let Ok(header) = Header::parse(&packet) {
            let mut again = packet.clone();
            header.write(&mut again);
            prop_assert_eq!(&again[..TAG_AT], &packet[..TAG_AT], "a header says all that its bytes say");
        }
    }
}

#[test]
fn every_field_is_at_its_place() {
    let header = Header {
        kind: Kind::Data,
        flags: HeaderFlags::FIRST.with(HeaderFlags::SEALED),
        list: 0x03,
        session: 0x0807_0605,
        number: 0x100f_0e0d_0c0b_0a09,
        vi: 0x1413_1211,
        message: 0x1817_1615,
        offset: 0x1c1b_1a19,
        length: 0x0201,
        control: 0x1f,
        epoch: 0x20,
        ack: 0x2827_2625_2423_2221,
        credit: 0x2c2b_2a29,
        receive: 0x302f_2e2d,
    };
    let mut packet = [0xff; Header::BYTES];
    header.write(&mut packet);
    let mut expected = [0; Header::BYTES];
    for (index, byte) in expected[..TAG_AT].iter_mut().enumerate() {
        *byte = index as u8 + 1;
    }
    expected[0] = 1;
    expected[1] = 3;
    expected[2] = 66;
    expected[3] = 3;
    expected[28..32].copy_from_slice(&[0x01, 0x02, 0x1f, 0x20]);
    assert_eq!(packet, expected);
}

fn data(length: u16) -> Vec<u8> {
    let mut packet = vec![0; Header::BYTES + usize::from(length)];
    let mut header = Header::new(Kind::Data);
    header.length = length;
    header.write(&mut packet);
    packet
}

fn changed(at: usize, byte: u8) -> Result<Header, Malformed> {
    let mut packet = data(10);
    packet[at] = byte;
    Header::parse(&packet)
}

#[test]
fn each_fault_has_its_name_and_numbers() {
    assert_eq!(Header::parse(&[]), Err(Malformed::TooShort { bytes: 0 }));
    assert_eq!(Header::parse(&data(0)[..63]), Err(Malformed::TooShort { bytes: 63 }));
    assert_eq!(Header::parse(&[9, 1, 2]), Err(Malformed::UnknownVersion { version: 9 }));
    assert_eq!(changed(0, 2), Err(Malformed::UnknownVersion { version: 2 }));
    assert_eq!(changed(1, 0), Err(Malformed::UnknownKind { kind: 0 }));
    assert_eq!(changed(1, 9), Err(Malformed::UnknownKind { kind: 9 }));
    assert_eq!(changed(2, 128), Err(Malformed::UnknownFlags { flags: 128 }));
    assert_eq!(changed(30, 129), Err(Malformed::TooMuchControl { control: 129 }));
    assert!(changed(30, 128).is_ok());
    assert_eq!(changed(28, 9), Err(Malformed::WrongLength { length: 9, bytes: 74 }));
    assert_eq!(changed(28, 11), Err(Malformed::WrongLength { length: 11, bytes: 74 }));
}

#[test]
fn only_a_hello_may_be_padded() {
    let mut packet = data(10);
    packet[28] = 4;
    for kind in 1..=8 {
        packet[1] = kind;
        assert_eq!(Header::parse(&packet).is_ok(), kind == Kind::Hello as u8, "kind {kind}");
    }
    packet[1] = Kind::Hello as u8;
    packet[28] = 11;
    assert_eq!(Header::parse(&packet), Err(Malformed::WrongLength { length: 11, bytes: 74 }));
}

#[test]
fn flags_are_added_and_taken_away() {
    let both = HeaderFlags::FIRST.with(HeaderFlags::LAST);
    assert!(both.has(HeaderFlags::FIRST) && both.has(HeaderFlags::LAST) && both.has(both));
    assert!(!both.has(HeaderFlags::TOKEN) && !HeaderFlags::FIRST.has(both));
    assert_eq!(both.without(HeaderFlags::LAST), HeaderFlags::FIRST);
    assert_eq!(both.bits(), 6);
    assert_eq!(HeaderFlags::default(), HeaderFlags::NONE);
}
