use super::*;
use crate::entropy::SeededEntropy;
use crate::seal::KeyLimits;
use proptest::prelude::*;

fn key(byte: u8) -> ClusterKey {
    ClusterKey::from_random([byte; 32])
}

fn offer(session: u32) -> Offer {
    Offer { session, message_bytes_max: 1 << 20, death_ms: 5_000, incarnation: 0xabcd_0000 + u64::from(session) }
}

fn keys_of(key: Option<&ClusterKey>) -> Keys {
    key.map_or_else(Keys::insecure, |key| Keys::new(key.clone()))
}

/// A hello, who sent it, and the welcome it gets.
fn exchange(key: Option<&ClusterKey>, seed: u64) -> (Initiator, Vec<u8>, Established, Vec<u8>) {
    let mut entropy = SeededEntropy::new(seed);
    let (initiator, hello) = Initiator::new(key, offer(7), &mut entropy).unwrap();
    let (responder, welcome) = respond(&keys_of(key), &hello, offer(9), &mut entropy).unwrap();
    (initiator, hello, responder, welcome)
}

fn respond_error(keys: &Keys, packet: &[u8]) -> HandshakeError {
    respond(keys, packet, offer(9), &mut SeededEntropy::new(1)).expect_err("the hello is wrong")
}

/// Hands a wrong welcome over and takes the initiator back.
fn welcome_error(initiator: Initiator, packet: &[u8]) -> (Initiator, HandshakeError) {
    initiator.handle_welcome(packet).expect_err("the welcome is wrong")
}

/// One packet from `from` to `to`.
fn carry(from: &mut Established, to: &mut Established, number: u64, payload: &[u8]) {
    let mut header = Header::new(Kind::Data);
    header.session = from.peer.session;
    header.number = number;
    header.length = payload.len() as u16;
    let mut packet = vec![0; Header::BYTES + payload.len()];
    header.write(&mut packet);
    packet[Header::BYTES..].copy_from_slice(payload);
    from.sealing.seal(&mut packet).unwrap();
    let mut received = vec![0; payload.len()];
    to.sealing.open(&Header::parse(&packet).unwrap(), &packet, &mut received).unwrap();
    assert_eq!(received, payload);
}

#[test]
fn both_ends_learn_each_others_offer_and_can_talk() {
    let key = key(1);
    for key in [Some(&key), None] {
        let (initiator, hello, mut far, welcome) = exchange(key, 1);
        assert_eq!(hello.len(), HELLO_BYTES);
        assert!(welcome.len() <= hello.len());
        let mut near = initiator.handle_welcome(&welcome).unwrap();
        assert_eq!((near.peer, far.peer), (offer(9), offer(7)));
        assert_eq!(near.fingerprint, key.map(ClusterKey::fingerprint));
        assert_eq!(far.fingerprint, near.fingerprint);
        assert_eq!(near.sealing.is_sealed(), key.is_some());
        for number in 0..3 {
            carry(&mut near, &mut far, number, b"there");
            carry(&mut far, &mut near, number, b"and back");
        }
    }
}

#[test]
fn the_offer_of_a_sealed_hello_is_not_readable() {
    let (_, hello, ..) = exchange(Some(&key(1)), 1);
    let secret = offer(7).incarnation.to_le_bytes();
    assert!(!hello.windows(8).any(|window| window == secret));
    let (_, hello, ..) = exchange(None, 1);
    assert!(hello.windows(8).any(|window| window == secret), "the plain form is plain");
}

#[test]
fn a_seed_repeats_a_handshake_and_another_does_not() {
    let key = key(1);
    for key in [Some(&key), None] {
        let (_, hello, _, welcome) = exchange(key, 5);
        let (_, hello_again, _, welcome_again) = exchange(key, 5);
        let (_, hello_other, _, welcome_other) = exchange(key, 6);
        assert_eq!((&hello, &welcome), (&hello_again, &welcome_again));
        assert!(hello != hello_other && welcome != welcome_other);
    }
}

#[test]
fn either_of_two_keys_is_accepted_and_named() {
    let (new, old) = (key(1), key(2));
    let keys = Keys::new(new.clone()).also_accepting(old.clone());
    for key in [&new, &old] {
        let mut entropy = SeededEntropy::new(3);
        let (initiator, hello) = Initiator::new(Some(key), offer(7), &mut entropy).unwrap();
        let (mut far, welcome) = respond(&keys, &hello, offer(9), &mut entropy).unwrap();
        assert_eq!(far.fingerprint, Some(key.fingerprint()));
        let mut near = initiator.handle_welcome(&welcome).unwrap();
        carry(&mut near, &mut far, 0, b"x");
    }
    let (_, hello) = Initiator::new(Some(&key(3)), offer(7), &mut SeededEntropy::new(3)).unwrap();
    assert_eq!(respond_error(&keys, &hello), HandshakeError::NotAuthentic);
}

#[test]
fn sealed_and_plain_endpoints_refuse_each_other() {
    let key = key(1);
    let (sealed, sealed_hello, _, sealed_welcome) = exchange(Some(&key), 1);
    let (plain, plain_hello, _, plain_welcome) = exchange(None, 1);
    assert_eq!(respond_error(&Keys::new(key), &plain_hello), HandshakeError::PlainRefused);
    assert_eq!(respond_error(&Keys::insecure(), &sealed_hello), HandshakeError::SealedRefused);
    let (sealed, error) = welcome_error(sealed, &plain_welcome);
    assert_eq!(error, HandshakeError::PlainRefused);
    let (plain, error) = welcome_error(plain, &sealed_welcome);
    assert_eq!(error, HandshakeError::SealedRefused);
    assert!(sealed.handle_welcome(&sealed_welcome).is_ok());
    assert!(plain.handle_welcome(&plain_welcome).is_ok());
}

#[test]
fn every_single_bit_of_hello_and_welcome_counts() {
    let key = key(1);
    for key in [Some(&key), None] {
        let (mut initiator, mut hello, _, mut welcome) = exchange(key, 11);
        let keys = keys_of(key);
        for bit in 0..8 * hello.len() {
            hello[bit / 8] ^= 1 << (bit % 8);
            let error = respond_error(&keys, &hello);
            if bit < 8 {
                let version = hello[0];
                assert_eq!(error, HandshakeError::Malformed(Malformed::UnknownVersion { version }));
            }
            hello[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(respond(&keys, &hello, offer(9), &mut SeededEntropy::new(1)).is_ok(), "the hello is whole again");
        for bit in 0..8 * welcome.len() {
            welcome[bit / 8] ^= 1 << (bit % 8);
            (initiator, _) = welcome_error(initiator, &welcome);
            welcome[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(initiator.handle_welcome(&welcome).is_ok(), "thousands of wrong welcomes did no harm");
    }
}

#[test]
fn every_truncation_and_any_more_bytes_are_refused() {
    let key = key(1);
    for key in [Some(&key), None] {
        let (mut initiator, mut hello, _, mut welcome) = exchange(key, 12);
        let keys = keys_of(key);
        for length in 0..hello.len() {
            respond_error(&keys, &hello[..length]);
        }
        for length in 0..welcome.len() {
            (initiator, _) = welcome_error(initiator, &welcome[..length]);
        }
        hello.push(0);
        assert_eq!(respond_error(&keys, &hello), HandshakeError::WrongSize { expected: HELLO_BYTES, bytes: 1201 });
        welcome.push(0);
        let (_, error) = welcome_error(initiator, &welcome);
        assert!(matches!(error, HandshakeError::Malformed(Malformed::WrongLength { .. })), "{error}");
    }
}

#[test]
fn a_welcome_answers_one_hello_only() {
    let key = key(1);
    for (key, expected) in [(Some(&key), HandshakeError::NotAuthentic), (None, HandshakeError::WrongChallenge)] {
        let (first, _, _, first_welcome) = exchange(key, 1);
        let (second, _, _, second_welcome) = exchange(key, 2);
        let (first, error) = welcome_error(first, &second_welcome);
        assert_eq!(error, expected);
        let (second, error) = welcome_error(second, &first_welcome);
        assert_eq!(error, expected);
        assert!(first.handle_welcome(&first_welcome).is_ok() && second.handle_welcome(&second_welcome).is_ok());
    }
}

#[test]
fn a_welcome_for_another_session_is_told_apart() {
    let key = key(1);
    let mut entropy = SeededEntropy::new(4);
    let (initiator, hello) = Initiator::new(Some(&key), offer(8), &mut entropy).unwrap();
    let (_, _, _, welcome) = exchange(Some(&key), 4);
    let (_, error) = welcome_error(initiator, &welcome);
    assert_eq!(error, HandshakeError::WrongSession { expected: 8, session: 7 });
    let (initiator, ..) = exchange(Some(&key), 4);
    let (_, error) = welcome_error(initiator, &hello);
    assert_eq!(error, HandshakeError::WrongKind { expected: Kind::Welcome, kind: Kind::Hello });
}

#[test]
fn a_replayed_hello_gives_a_session_in_which_nothing_verifies() {
    let key = key(1);
    let (initiator, hello, _, welcome) = exchange(Some(&key), 1);
    let mut near = initiator.handle_welcome(&welcome).unwrap();
    let (mut replayed, _) = respond(&Keys::new(key), &hello, offer(10), &mut SeededEntropy::new(99)).unwrap();
    let mut packet = vec![0; Header::BYTES];
    Header::new(Kind::Data).write(&mut packet);
    near.sealing.seal(&mut packet).unwrap();
    let header = Header::parse(&packet).unwrap();
    assert!(replayed.sealing.open(&header, &packet, &mut []).is_err());
}

#[test]
fn two_handshakes_of_the_same_nodes_share_no_keys() {
    let key = key(1);
    let (first, _, _, first_welcome) = exchange(Some(&key), 1);
    let (_, _, mut second, _) = exchange(Some(&key), 2);
    let mut near = first.handle_welcome(&first_welcome).unwrap();
    let mut packet = vec![0; Header::BYTES];
    Header::new(Kind::Data).write(&mut packet);
    near.sealing.seal(&mut packet).unwrap();
    assert!(second.sealing.open(&Header::parse(&packet).unwrap(), &packet, &mut []).is_err());
}

#[test]
fn session_zero_is_no_session() {
    let key = key(1);
    let mut entropy = SeededEntropy::new(1);
    let zero = Initiator::new(Some(&key), offer(0), &mut entropy).err();
    assert_eq!(zero, Some(HandshakeError::SessionZero));
    let (_, hello, ..) = exchange(Some(&key), 1);
    assert_eq!(respond(&Keys::new(key), &hello, offer(0), &mut entropy).err(), Some(HandshakeError::SessionZero));
}

/// A member of the cluster that speaks a later version of the offer, or nonsense.
#[test]
fn an_authentic_offer_is_still_checked() {
    let member = key(1);
    let ephemeral = Zeroizing::new([5; KEY_BYTES]);
    let hello_with = |bytes: [u8; OFFER_BYTES]| {
        let mut noise = noise::begin(Role::Initiator, &member.noise_psk(), &prologue(), &ephemeral);
        let mut message = [0; NOISE_MESSAGE_BYTES];
        noise.write_message(&bytes, &mut message).unwrap();
        sealed_packet(Kind::Hello, 0, &message)
    };
    let keys = Keys::new(member.clone());
    let mut bytes = offer(7).encode();
    assert!(respond(&keys, &hello_with(bytes), offer(9), &mut SeededEntropy::new(1)).is_ok());
    bytes[0] = 1;
    assert_eq!(respond_error(&keys, &hello_with(bytes)), HandshakeError::UnknownOffer { version: 1 });
    bytes = offer(7).encode();
    bytes[2] = 1;
    assert_eq!(respond_error(&keys, &hello_with(bytes)), HandshakeError::OfferReservedNotZero);
    bytes = offer(0).encode();
    assert_eq!(respond_error(&keys, &hello_with(bytes)), HandshakeError::SessionZero);
}

#[test]
fn a_wrong_offer_in_an_authentic_welcome_leaves_the_initiator_as_it_was() {
    let member = key(1);
    let (initiator, hello, _, welcome) = exchange(Some(&member), 1);
    let mut noise = noise::begin(Role::Responder, &member.noise_psk(), &prologue(), &Zeroizing::new([6; KEY_BYTES]));
    noise.read_message(&hello[Header::BYTES..][..NOISE_MESSAGE_BYTES], &mut [0; OFFER_BYTES]).unwrap();
    let mut answer = [0; NOISE_MESSAGE_BYTES];
    noise.write_message(&offer(0).encode(), &mut answer).unwrap();
    let (initiator, error) = welcome_error(initiator, &sealed_packet(Kind::Welcome, 7, &answer));
    assert_eq!(error, HandshakeError::SessionZero);
    assert!(initiator.handle_welcome(&welcome).is_ok());
}

/// Only a holder of the key can get this far.
#[test]
fn a_peer_with_a_public_key_of_small_order_gets_no_answer() {
    let member = key(1);
    let message = noise::tests::small_order_message(&member.noise_psk(), &prologue(), &offer(7).encode());
    let hello = sealed_packet(Kind::Hello, 0, &message.try_into().unwrap());
    assert_eq!(respond_error(&Keys::new(member), &hello), HandshakeError::NotAuthentic);
}

proptest! {
    #[test]
    fn random_packets_are_refused(
        mut packet in prop::collection::vec(any::<u8>(), 0..1300),
        form in 0..3,
        sealed in any::<bool>(),
        noise in any::<[u8; NOISE_MESSAGE_BYTES]>(),
    ) {
        let key = sealed.then(|| key(1));
        let (initiator, ..) = exchange(key.as_ref(), 1);
        match form {
            1 => packet = sealed_packet(Kind::Hello, 0, &noise),
            2 => packet = sealed_packet(Kind::Welcome, 7, &noise),
            _ => {}
        }
        prop_assert!(respond(&keys_of(key.as_ref()), &packet, offer(9), &mut SeededEntropy::new(1)).is_err());
        prop_assert!(initiator.handle_welcome(&packet).is_err());
    }

    #[test]
    fn offers_survive_the_wire(session in 1u32.., message_bytes_max: u32, death_ms: u32, incarnation: u64) {
        let offer = Offer { session, message_bytes_max, death_ms, incarnation };
        prop_assert_eq!(Offer::decode(&offer.encode()), Ok(offer));
    }

    #[test]
    fn other_keys_open_nothing(one: [u8; 32], other: [u8; 32], seed: u64) {
        prop_assume!(one != other);
        let (one, other) = (ClusterKey::from_random(one), ClusterKey::from_random(other));
        let (_, hello) = Initiator::new(Some(&one), offer(7), &mut SeededEntropy::new(seed)).unwrap();
        prop_assert_eq!(respond_error(&Keys::new(other), &hello), HandshakeError::NotAuthentic);
    }
}

/// Gives the same byte for ever.
pub(crate) struct Constant(pub(crate) u8);

impl Entropy for Constant {
    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.fill(self.0);
    }
}

/// The cluster key and the offers of both ends in the vector at the end of `docs/protocol/wire.md`.
pub(crate) fn of_the_document() -> (ClusterKey, Offer, Offer) {
    let key = ClusterKey::from_random(std::array::from_fn(|index| index as u8));
    let ours = Offer { session: 7, message_bytes_max: 1 << 20, death_ms: 5_000, incarnation: 0x0102_0304_0506_0708 };
    let theirs = Offer { session: 9, message_bytes_max: 1 << 16, death_ms: 4_000, incarnation: 0x1112_1314_1516_1718 };
    (key, ours, theirs)
}

/// The vector at the end of `docs/protocol/wire.md`, made by an implementation in another language from that
/// document alone.
#[test]
fn the_bytes_are_those_of_the_document() {
    let (key, ours, theirs) = of_the_document();
    let (initiator, hello) = Initiator::new(Some(&key), ours, &mut Constant(0x11)).unwrap();
    assert_eq!(hexadecimal(&hello[..136]), HELLO);
    assert!(hello[136..].iter().all(|byte| *byte == 0));
    let (mut far, welcome) = respond(&Keys::new(key), &hello, theirs, &mut Constant(0x22)).unwrap();
    assert_eq!(hexadecimal(&welcome), WELCOME);
    let mut near = initiator.handle_welcome(&welcome).unwrap();
    for (end, expected) in [(&mut near, FROM_INITIATOR), (&mut far, FROM_RESPONDER)] {
        end.sealing.set_limits(KeyLimits { change_after: 1, end: 2 });
        for (place, expected) in expected.into_iter().enumerate() {
            let mut header = Header::new(Kind::Data);
            header.session = end.peer.session;
            header.number = 0x0a0b_0c00 + place as u64;
            header.length = 5;
            let mut packet = [0; Header::BYTES + 5];
            header.write(&mut packet);
            packet[Header::BYTES..].copy_from_slice(b"hello");
            end.sealing.seal(&mut packet).unwrap();
            assert_eq!(hexadecimal(&packet), expected);
        }
    }
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const HELLO: &str = "0101400000000000000000000000000000000000000000000000000048000000000000000000000000000000000000000000\
    00000000000000000000000000007b4e909bbe7ffe44c465a220037d608ee35897d31ef972f07f74892cb0f73f13826c0ca1\
    62c37d4a9d17884a8a0f1e7b75523a62de4a9abcc0e2442eceb2ef3da4cd965f3d692ed4";
const WELCOME: &str = "0102400007000000000000000000000000000000000000000000000048000000000000000000000000000000000000000000\
    00000000000000000000000000000faa684ed28867b97f4a6a2dee5df8ce974e76b7018e3f22a1c4cf2678570f2007571866\
    930a2faeb5c2395b986810a6a3d57f70d1b96445b3cf967c29e791022ce2448226a47e50";
const FROM_INITIATOR: [&str; 2] = [
    "0103400009000000000c0b0a000000000000000000000000000000000500000000000000000000000000000000000000\
    1ba4dee1aedb0d899a20e7f1d1acb322ab27b3cb19",
    "0103410009000000010c0b0a000000000000000000000000000000000500000000000000000000000000000000000000\
    fe1287bd5cecafc7b0ca2488e252b07c2008232ad0",
];
const FROM_RESPONDER: [&str; 2] = [
    "0103400007000000000c0b0a000000000000000000000000000000000500000000000000000000000000000000000000\
    eb242b520dbb0d7d5ecf72ee62b4801e455ae47762",
    "0103410007000000010c0b0a000000000000000000000000000000000500000000000000000000000000000000000000\
    f91f98e93c045427cb0625e28c0578b61efc2e8a41",
];

#[test]
fn a_session_can_move_to_another_thread() {
    fn moves<T: Send + 'static>() {}
    moves::<Established>();
    moves::<Initiator>();
}
