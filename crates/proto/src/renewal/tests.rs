use super::*;
use crate::entropy::SeededEntropy;
use crate::handshake::tests::{Constant, hexadecimal, of_the_document};
use crate::{Established, Header, Initiator, KeyLimits, Kind, respond};

fn key(byte: u8) -> ClusterKey {
    ClusterKey::from_random([byte; 32])
}

/// A caller that has asked, and a listener, after an hour.
fn asked(with: u8, entropy: &mut SeededEntropy) -> (Renewal, Renewal, Message) {
    let (mut caller, mut listener) = (Renewal::new(true), Renewal::new(false));
    for _ in 0..RENEW_TICKS {
        assert!(!caller.wants_key() && !listener.wants_key());
        caller.tick();
        listener.tick();
    }
    assert!(caller.wants_key() && !listener.wants_key(), "the end that called asks");
    caller.begin(&key(with), entropy);
    let Some((Word::Question, question)) = caller.take_due() else { panic!("a question") };
    assert!(!caller.wants_key() && caller.take_due().is_none());
    (caller, listener, question)
}

#[test]
fn both_ends_have_the_same_fresh_keys_each_way() {
    let mut entropy = SeededEntropy::new(1);
    let (mut caller, mut listener, question) = asked(1, &mut entropy);
    assert!(matches!(listener.handle(Word::Question as u32, &question), Heard::Question));
    let theirs =
        listener.answer(&Keys::new(key(2)).also_accepting(key(1)), &mut entropy).expect("a key that is accepted");
    let Some((Word::Answer, answer)) = listener.take_due() else { panic!("an answer") };
    let Heard::Keys(ours) = caller.handle(Word::Answer as u32, &answer) else { panic!("keys") };
    assert_eq!((&*ours.sending, &*ours.receiving), (&*theirs.receiving, &*theirs.sending));
    assert!(caller.is_turning() && listener.is_turning());
    for end in [&mut caller, &mut listener] {
        assert_eq!(end.finish(), Some(key(1).fingerprint()));
        assert!(!end.is_turning() && !end.is_due() && !end.wants_key());
    }
    // The network repeats the question: the handshake is over.
    assert!(matches!(listener.handle(Word::Question as u32, &question), Heard::Nothing));
    assert!(listener.answer(&Keys::new(key(1)), &mut entropy).is_none());
}

#[test]
fn what_is_lost_is_said_again_and_the_answer_to_the_same_question_is_the_same() {
    let mut entropy = SeededEntropy::new(2);
    let (mut caller, mut listener, question) = asked(1, &mut entropy);
    caller.tick();
    assert_eq!(caller.take_due(), Some((Word::Question, question)));
    assert!(matches!(listener.handle(Word::Question as u32, &question), Heard::Question));
    assert!(listener.answer(&Keys::new(key(1)), &mut entropy).is_some());
    let answer = listener.take_due();
    assert!(matches!(listener.handle(Word::Question as u32, &question), Heard::Nothing));
    assert!(answer.is_some() && listener.take_due() == answer);
}

#[test]
fn a_question_with_a_key_that_was_changed_is_asked_anew() {
    let mut entropy = SeededEntropy::new(5);
    let (mut caller, ..) = asked(1, &mut entropy);
    caller.call_with(Some(key(1).fingerprint()));
    assert!(!caller.wants_key());
    caller.tick();
    caller.call_with(Some(key(2).fingerprint()));
    assert!(caller.wants_key() && caller.take_due().is_none());
}

#[test]
fn a_peer_that_puts_off_the_end_of_a_handshake_does_not_put_off_the_next() {
    let mut entropy = SeededEntropy::new(6);
    let (_, mut listener, question) = asked(1, &mut entropy);
    listener.handle(Word::Question as u32, &question);
    listener.answer(&Keys::new(key(1)), &mut entropy).expect("a key that is accepted");
    (1..GRACE_TICKS).for_each(|_| listener.tick());
    listener.finish();
    (GRACE_TICKS..RENEW_TICKS + GRACE_TICKS).for_each(|_| listener.tick());
    assert!(!listener.is_overdue());
    listener.tick();
    assert!(listener.is_overdue());
}

#[test]
fn a_key_that_is_not_accepted_gets_no_answer() {
    let mut entropy = SeededEntropy::new(3);
    let (_, mut listener, question) = asked(1, &mut entropy);
    assert!(matches!(listener.handle(Word::Question as u32, &question), Heard::Question));
    assert!(listener.answer(&Keys::new(key(2)), &mut entropy).is_none());
    assert!(!listener.is_due());
}

#[test]
fn messages_that_make_no_sense_change_nothing() {
    let mut entropy = SeededEntropy::new(4);
    let (mut caller, mut listener, question) = asked(1, &mut entropy);
    for (word, message) in [(0, &question[..]), (3, &question[..]), (1, &question[1..]), (1, &[]), (2, &question[..])] {
        assert!(matches!(listener.handle(word, message), Heard::Nothing), "{word}, {} bytes", message.len());
    }
    assert!(matches!(caller.handle(Word::Question as u32, &question), Heard::Nothing), "a caller answers nothing");
    assert!(matches!(caller.handle(Word::Answer as u32, &question), Heard::Nothing));
    assert!(caller.wants_key(), "after a false answer it asks anew");
}

#[test]
fn a_session_without_a_fresh_handshake_is_overdue() {
    for calls in [true, false] {
        let mut end = Renewal::new(calls);
        (1..RENEW_TICKS + GRACE_TICKS).for_each(|_| end.tick());
        assert!(!end.is_overdue());
        end.tick();
        assert!(end.is_overdue());
    }
}

/// A data packet of this number.
fn sealed(end: &mut Established, number: u64) -> String {
    let header = Header { session: end.peer.session, number, length: 5, ..Header::new(Kind::Data) };
    let mut packet = [0; Header::BYTES + 5];
    header.write(&mut packet);
    packet[Header::BYTES..].copy_from_slice(b"hello");
    end.sealing.seal(&mut packet).unwrap();
    hexadecimal(&packet)
}

/// What follows the vector of the handshake at the end of `docs/protocol/wire.md`.
#[test]
fn the_bytes_are_those_of_the_document() {
    let (key, ours, theirs) = of_the_document();
    let (initiator, hello) = Initiator::new(Some(&key), ours, &mut Constant(0x11)).unwrap();
    let keys = Keys::new(key.clone());
    let (mut far, welcome) = respond(&keys, &hello, theirs, &mut Constant(0x22)).unwrap();
    let mut near = initiator.handle_welcome(&welcome).unwrap();
    let (mut caller, mut listener) = (Renewal::new(true), Renewal::new(false));
    (0..RENEW_TICKS).for_each(|_| listener.tick());
    caller.begin(&key, &mut Constant(0x11));
    let question = caller.take_due().unwrap().1;
    assert_eq!(hexadecimal(&question), QUESTION);
    listener.handle(Word::Question as u32, &question);
    let of_far = listener.answer(&keys, &mut Constant(0x22)).unwrap();
    let answer = listener.take_due().unwrap().1;
    assert_eq!(hexadecimal(&answer), ANSWER);
    let Heard::Keys(of_near) = caller.handle(Word::Answer as u32, &answer) else { panic!("keys") };
    for (end, fresh, expected) in [(&mut near, of_near, FROM_INITIATOR), (&mut far, of_far, FROM_RESPONDER)] {
        end.sealing.set_limits(KeyLimits { change_after: 1, end: 2 });
        sealed(end, 0x0a0b_0c00);
        sealed(end, 0x0a0b_0c01);
        end.sealing.handle_acknowledged(0x0a0b_0c02);
        end.sealing.renew(fresh, true);
        assert_eq!(sealed(end, 0x0a0b_0c02), expected);
    }
}

const QUESTION: &str =
    "7b4e909bbe7ffe44c465a220037d608ee35897d31ef972f07f74892cb0f73f1328d37f11cfe02f234e48e0667784e125";
const ANSWER: &str = "0faa684ed28867b97f4a6a2dee5df8ce974e76b7018e3f22a1c4cf2678570f20a51fe251378d4c04588ed55117f20baf";
const FROM_INITIATOR: &str = "0103400009000000020c0b0a000000000000000000000000000000000500000100000000000000000000000000000000\
    4ac8c63d3753ec45614703d39353f72fd7e612a04f";
const FROM_RESPONDER: &str = "0103400007000000020c0b0a000000000000000000000000000000000500000100000000000000000000000000000000\
    b5a5744a0d88780ab4b1aa75d32e788a1e5722c98b";
