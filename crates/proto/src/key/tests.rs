use super::*;
use proptest::prelude::*;

const TEXT: &str = "highwire-key-1 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

fn counting() -> ClusterKey {
    ClusterKey::from_random(std::array::from_fn(|index| index as u8))
}

proptest! {
    #[test]
    fn a_key_survives_its_text(random in any::<[u8; 32]>()) {
        let key = ClusterKey::from_random(random);
        prop_assert_eq!(&ClusterKey::parse(&key.to_text()).unwrap().secret[..], &random[..]);
    }

    #[test]
    fn no_text_panics(text in "(#.*\n|highwire-key-1[ \t]?|[0-9a-fA-F]{0,70}|\\PC{0,80}){0,4}") {
        let _ = ClusterKey::parse(&text);
    }
}

#[test]
fn the_file_may_have_comments_blank_lines_and_other_line_ends() {
    for text in [
        TEXT.to_string(),
        format!("{TEXT}\n"),
        format!("# made on Monday\r\n\r\n  {TEXT}  \r\n# end\r\n"),
        TEXT.to_uppercase().replace("HIGHWIRE-KEY-1 ", "highwire-key-1\t  "),
    ] {
        assert_eq!(ClusterKey::parse(&text).unwrap().fingerprint(), counting().fingerprint(), "{text:?}");
    }
}

#[test]
fn each_fault_of_a_file_is_told_apart() {
    let fault = |text: &str| ClusterKey::parse(text).unwrap_err();
    assert_eq!(fault(""), KeyError::Empty);
    assert_eq!(fault("# nothing\n\n"), KeyError::Empty);
    assert_eq!(fault(&TEXT.replace("key-1", "key-2")), KeyError::WrongPrefix);
    assert_eq!(fault(&TEXT[15..]), KeyError::WrongPrefix);
    assert_eq!(fault("highwire-key-1"), KeyError::WrongLength { digits: 0 });
    assert_eq!(fault(&TEXT[..TEXT.len() - 1]), KeyError::WrongLength { digits: 63 });
    assert_eq!(fault(&format!("{TEXT}00")), KeyError::WrongLength { digits: 66 });
    assert_eq!(fault(&TEXT.replace("0a0b", "0a0g")), KeyError::NotHex { position: 23 });
    assert_eq!(fault(&format!("{TEXT} 00")), KeyError::NotHex { position: 64 });
    assert_eq!(fault(&TEXT.replace("0a0b", "0aé")), KeyError::NotHex { position: 22 });
    assert_eq!(fault(&format!("{TEXT}\n{TEXT}")), KeyError::SeveralKeys);
}

#[test]
fn no_message_repeats_the_text() {
    for text in [&TEXT[15..], &TEXT.replace('1', "x"), &format!("{TEXT}\n{TEXT}"), &TEXT[..40]] {
        let message = ClusterKey::parse(text).unwrap_err().to_string();
        assert!(!message.contains("0203") && !message.contains("0x0"), "{message}");
    }
}

#[test]
fn debug_shows_the_fingerprint_only() {
    let shown = format!("{:?} {:?}", counting(), Keys::new(counting()));
    assert!(shown.contains(&counting().fingerprint().to_string()), "{shown}");
    assert!(!shown.contains("1e1f") && !shown.contains("30, 31"), "{shown}");
}

#[test]
fn fingerprint_and_psk_are_those_of_the_document() {
    // Computed from `docs/protocol/wire.md` by another implementation (Python's `hashlib` and `hmac`).
    assert_eq!(counting().fingerprint().to_string(), "456d-947f-c5cd-9ed8");
    assert_eq!(
        hexadecimal(counting().noise_psk().as_ref()),
        "ad1e6186b95ba43df23eb9ecbd302a7711983e784900cd562c976f363129b4f5"
    );
}

#[test]
fn the_key_to_call_with_is_tried_first() {
    let (new, old) = (counting(), ClusterKey::from_random([7; 32]));
    let keys = Keys::new(new.clone()).also_accepting(old.clone());
    let listed: Vec<Fingerprint> = keys.accepted().map(ClusterKey::fingerprint).collect();
    assert_eq!(listed, [new.fingerprint(), old.fingerprint()]);
    assert_eq!(keys.to_call_with().unwrap().fingerprint(), new.fingerprint());
    let print = |byte| Some(ClusterKey::from_random([byte; 32]).fingerprint());
    assert!(keys.accept(print(7)) && !keys.accept(print(8)) && !keys.accept(None));
    assert!(Keys::insecure().accept(None) && !Keys::insecure().accept(print(7)));
    assert!(!keys.is_insecure() && Keys::insecure().is_insecure() && Keys::insecure().accepted().next().is_none());
}

#[test]
#[should_panic(expected = "beside the one to call with")]
fn an_insecure_endpoint_accepts_no_key() {
    let _ = Keys::insecure().also_accepting(counting());
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
