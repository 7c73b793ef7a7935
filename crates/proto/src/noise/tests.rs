use super::*;

fn bytes(digits: &str) -> Vec<u8> {
    digits.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn key(digits: &str) -> Zeroizing<[u8; KEY_BYTES]> {
    Zeroizing::new(bytes(digits).try_into().unwrap())
}

/// The vector of `Noise_NNpsk0_25519_AESGCM_SHA256` from cacophony, the collection that
/// implementations of Noise are checked against.
#[test]
fn the_primitives_give_the_published_handshake() {
    let psk = key("54686973206973206d7920417573747269616e20706572737065637469766521");
    let prologue = bytes("4a6f686e2047616c74");
    let first = key("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a");
    let second = key("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b");
    let mut initiator = begin(Role::Initiator, &psk, &prologue, &first);
    let mut responder = begin(Role::Responder, &psk, &prologue, &second);
    let (mut message, mut payload) = ([0; 200], [0; 200]);

    let said = bytes("4c756477696720766f6e204d69736573");
    let length = initiator.write_message(&said, &mut message).unwrap();
    let expected = "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1";
    assert_eq!(message[..length], bytes(expected));
    let heard = responder.read_message(&message[..length], &mut payload).unwrap();
    assert_eq!(payload[..heard], said);

    let said = bytes("4d757272617920526f746862617264");
    let length = responder.write_message(&said, &mut message).unwrap();
    let expected = "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461";
    assert_eq!(message[..length], bytes(expected));
    let heard = initiator.read_message(&message[..length], &mut payload).unwrap();
    assert_eq!(payload[..heard], said);

    let hash = bytes("9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530");
    assert_eq!(initiator.get_handshake_hash(), hash);
    assert_eq!(responder.get_handshake_hash(), hash);
    assert_eq!(initiator.dangerously_get_raw_split(), responder.dangerously_get_raw_split());
}

#[test]
fn an_ephemeral_key_is_drawn_once() {
    let mut draw = OneDraw(Some(Zeroizing::new([3; KEY_BYTES])));
    let mut drawn = [0; KEY_BYTES];
    draw.try_fill_bytes(&mut drawn).unwrap();
    assert_eq!(drawn, [3; KEY_BYTES]);
    assert_eq!(draw.try_fill_bytes(&mut drawn), Err(Error::Rng));
}

#[test]
fn public_keys_of_small_order_are_refused() {
    let mut ours = X25519 { private: Zeroizing::new([0; KEY_BYTES]), public: [0; PUBLIC_BYTES] };
    ours.set(&[5; KEY_BYTES]);
    let mut shared = [0; PUBLIC_BYTES];
    let mut one = [0; PUBLIC_BYTES];
    one[0] = 1;
    let order_eight = bytes("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800");
    for point in [&[0; PUBLIC_BYTES][..], &one, &order_eight] {
        assert_eq!(ours.dh(point, &mut shared), Err(Error::Dh), "{point:?}");
    }
}

/// The first message of a handshake whose ephemeral public key is zero, otherwise authentic.
pub(crate) fn small_order_message(psk: &[u8; KEY_BYTES], prologue: &[u8], payload: &[u8]) -> Vec<u8> {
    let resolver = Box::new(SmallOrderPrimitives(Primitives { ephemeral: Zeroizing::new([5; KEY_BYTES]) }));
    let builder = Builder::with_resolver(PATTERN.parse().unwrap(), resolver);
    let mut noise = builder.psk(0, psk).unwrap().prologue(prologue).unwrap().build_initiator().unwrap();
    let mut message = vec![0; 200];
    let length = noise.write_message(payload, &mut message).unwrap();
    message.truncate(length);
    message
}

#[test]
fn an_authentic_key_of_small_order_passes_the_reading_and_fails_the_answer() {
    let (psk, ephemeral) = ([1; KEY_BYTES], Zeroizing::new([2; KEY_BYTES]));
    let mut responder = begin(Role::Responder, &psk, b"", &ephemeral);
    let message = small_order_message(&psk, b"", b"offer");
    assert_eq!(message[..PUBLIC_BYTES], [0; PUBLIC_BYTES]);
    assert_eq!(responder.read_message(&message, &mut [0; 5]), Ok(5));
    assert_eq!(responder.write_message(b"offer", &mut [0; 200]), Err(Error::Dh));
}

struct SmallOrderPrimitives(Primitives);

impl CryptoResolver for SmallOrderPrimitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        self.0.resolve_rng()
    }

    fn resolve_dh(&self, _: &DHChoice) -> Option<Box<dyn Dh>> {
        Some(Box::new(SmallOrder))
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        self.0.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        self.0.resolve_cipher(choice)
    }
}

struct SmallOrder;

impl Dh for SmallOrder {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        PUBLIC_BYTES
    }

    fn priv_len(&self) -> usize {
        KEY_BYTES
    }

    fn set(&mut self, _: &[u8]) {}

    fn generate(&mut self, _: &mut dyn Random) -> Result<(), Error> {
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &[0; PUBLIC_BYTES]
    }

    fn privkey(&self) -> &[u8] {
        &[0; KEY_BYTES]
    }

    fn dh(&self, _: &[u8], _: &mut [u8]) -> Result<(), Error> {
        Err(Error::Dh)
    }
}
