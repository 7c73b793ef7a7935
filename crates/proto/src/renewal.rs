//! A fresh handshake about every hour, in a session that goes on [W-102].
//!
//! The keys of a session follow from one handshake, and each key from the one before: a process that read the memory of
//! one end could read all that follows, and a node whose cluster key was removed would stay. So the end that called asks
//! again, with the key that it calls with by then. The messages are packets of the session.
//!
//! ```text
//!            an hour                    answer              a packet under the fresh keys
//!  caller    Resting ─────▶ Asking ───────────────▶ Turning ──────────────────────────────▶ Resting
//!                           │    ▲
//!                           └────┘ each tick: the question again
//!
//!            question                   `answer`            a packet under the fresh keys
//!  listener  Resting ─────▶ Asked ────────────────▶ Answered ─────────────────────────────▶ Resting
//!                                                   │      ▲
//!                                                   └──────┘ the same question: the answer again
//!
//!  either    an hour and five minutes since the last handshake ──▶ the session ends
//! ```
//!
//! Any of these packets may be lost. The question is repeated, and the answer to the same question is the same.

use crate::entropy::Entropy;
use crate::handshake::secrets_of;
use crate::key::{ClusterKey, Fingerprint, KEY_BYTES, Keys};
use crate::noise::{self, NOISE_TAG_BYTES, PUBLIC_BYTES, Role};
use crate::seal::Renewed;
use snow::HandshakeState;
use std::fmt;
use zeroize::Zeroizing;

/// What a packet of kind [`crate::Kind::Renew`] carries; its `offset` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Question = 1,
    Answer = 2,
}

/// A message of the handshake: a public key, and the tag of no payload.
type Message = [u8; MESSAGE_BYTES];

/// How far a session is with its next handshake.
pub(crate) struct Renewal {
    /// This end asks.
    calls: bool,
    /// Since the question of the last handshake, of [`crate::KEY_TICK`] each.
    ticks: u32,
    /// When the question of the one under way was asked or heard.
    asked_at: u32,
    step: Step,
    /// The message of the present step is to be sent.
    is_due: bool,
    /// The key that the handshake under way was made with.
    fingerprint: Option<Fingerprint>,
}

enum Step {
    Resting,
    Asking { handshake: Box<HandshakeState>, question: Message },
    Turning,
    Asked { question: Message },
    Answered { question: Message, answer: Message },
}

/// What a message of the peer comes to.
pub(crate) enum Heard {
    Nothing,
    /// [`Renewal::answer`] has to be called.
    Question,
    /// Both ends have these keys.
    Keys(Renewed),
}

impl Renewal {
    pub(crate) fn new(calls: bool) -> Renewal {
        Renewal { calls, ticks: 0, asked_at: 0, step: Step::Resting, is_due: false, fingerprint: None }
    }

    /// Time has passed.
    pub(crate) fn tick(&mut self) {
        self.ticks += 1;
        self.is_due |= matches!(self.step, Step::Asking { .. });
    }

    /// True if [`Renewal::begin`] has to be called.
    pub(crate) fn wants_key(&self) -> bool {
        self.calls && self.ticks >= RENEW_TICKS && matches!(self.step, Step::Resting)
    }

    /// True if the last handshake is too long ago: the peer does not ask, or does not answer.
    pub(crate) fn is_overdue(&self) -> bool {
        self.ticks >= RENEW_TICKS + GRACE_TICKS
    }

    /// True if the keys of both ends are settled, and only a packet under them is awaited.
    #[inline]
    pub(crate) fn is_turning(&self) -> bool {
        matches!(self.step, Step::Turning | Step::Answered { .. })
    }

    /// True if a message is to be sent.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Begins a handshake with this key.
    pub(crate) fn begin(&mut self, key: &ClusterKey, entropy: &mut dyn Entropy) {
        let mut handshake = noise_of(Role::Initiator, key, &ephemeral(entropy));
        let Some(question) = write(&mut handshake) else { return };
        self.step = Step::Asking { handshake: Box::new(handshake), question };
        (self.is_due, self.fingerprint, self.asked_at) = (true, Some(key.fingerprint()), self.ticks);
    }

    /// The cluster key was changed: what was asked with another is asked anew.
    pub(crate) fn call_with(&mut self, fingerprint: Option<Fingerprint>) {
        if matches!(self.step, Step::Asking { .. }) && self.fingerprint != fingerprint {
            (self.step, self.is_due) = (Step::Resting, false);
        }
    }

    /// Answers the peer's question with the key that it was made with; nothing if that is none of these keys.
    pub(crate) fn answer(&mut self, keys: &Keys, entropy: &mut dyn Entropy) -> Option<Renewed> {
        let Step::Asked { question } = self.step else { return None };
        let ephemeral = ephemeral(entropy);
        let (mut handshake, fingerprint) = keys.accepted().find_map(|key| {
            let mut handshake = noise_of(Role::Responder, key, &ephemeral);
            handshake.read_message(&question, &mut []).is_ok().then(|| (handshake, key.fingerprint()))
        })?;
        let answer = write(&mut handshake)?;
        self.step = Step::Answered { question, answer };
        (self.is_due, self.fingerprint) = (true, Some(fingerprint));
        Some(secrets_of(&mut handshake, Role::Responder))
    }

    /// The message that is due.
    pub(crate) fn take_due(&mut self) -> Option<(Word, Message)> {
        let is_due = std::mem::take(&mut self.is_due);
        match self.step {
            Step::Asking { question, .. } if is_due => Some((Word::Question, question)),
            Step::Answered { answer, .. } if is_due => Some((Word::Answer, answer)),
            _ => None,
        }
    }

    /// A message of the peer has come, in a packet that verified.
    pub(crate) fn handle(&mut self, word: u32, message: &[u8]) -> Heard {
        let Ok(message) = Message::try_from(message) else { return Heard::Nothing };
        if word == Word::Question as u32 && !self.calls {
            if matches!(self.step, Step::Answered { question, .. } if question == message) {
                self.is_due = true;
                return Heard::Nothing;
            }
            // One that is repeated by the network after its handshake is over must not begin another.
            if self.ticks < RENEW_TICKS / 2 {
                return Heard::Nothing;
            }
            (self.step, self.asked_at) = (Step::Asked { question: message }, self.ticks);
            return Heard::Question;
        }
        let Step::Asking { handshake, .. } = &mut self.step else { return Heard::Nothing };
        if word != Word::Answer as u32 {
            return Heard::Nothing;
        }
        if handshake.read_message(&message, &mut []).is_err() {
            // Made with another key. What was read is spent; the next tick asks anew.
            self.step = Step::Resting;
            return Heard::Nothing;
        }
        let keys = secrets_of(handshake, Role::Initiator);
        (self.step, self.is_due) = (Step::Turning, false);
        Heard::Keys(keys)
    }

    /// The peer seals with the fresh keys: the handshake is over. The key that it was made with. A peer that puts the end
    /// off does not put the next one off with it.
    pub(crate) fn finish(&mut self) -> Option<Fingerprint> {
        (self.step, self.ticks, self.is_due) = (Step::Resting, self.ticks - self.asked_at, false);
        self.fingerprint
    }
}

impl fmt::Debug for Renewal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = match self.step {
            Step::Resting => "resting",
            Step::Asking { .. } => "asking",
            Step::Turning => "turning",
            Step::Asked { .. } => "asked",
            Step::Answered { .. } => "answered",
        };
        formatter.debug_struct("Renewal").field("ticks", &self.ticks).field("step", &step).finish_non_exhaustive()
    }
}

fn ephemeral(entropy: &mut dyn Entropy) -> Zeroizing<[u8; KEY_BYTES]> {
    let mut random = Zeroizing::new([0; KEY_BYTES]);
    entropy.fill(random.as_mut());
    random
}

fn noise_of(role: Role, key: &ClusterKey, ephemeral: &Zeroizing<[u8; KEY_BYTES]>) -> HandshakeState {
    noise::begin(role, &key.noise_psk(), PROLOGUE, ephemeral)
}

/// The next message without a payload. It fails for a public key of small order [W-26].
fn write(handshake: &mut HandshakeState) -> Option<Message> {
    let mut message = [0; MESSAGE_BYTES];
    handshake.write_message(&[], &mut message).ok().map(|_| message)
}

const MESSAGE_BYTES: usize = PUBLIC_BYTES + NOISE_TAG_BYTES;
const PROLOGUE: &[u8] = b"highwire renew 1";
/// An hour.
const RENEW_TICKS: u32 = 120;
/// Five minutes.
const GRACE_TICKS: u32 = 10;

#[cfg(test)]
mod tests;
