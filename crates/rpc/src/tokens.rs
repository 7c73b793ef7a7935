//! Tokens of payloads. An answer lands at the number of its call; these are for the payloads of calls.

use crate::head::SEQUENCE_BITS;
use highwire_vi::PayloadToken;

const FRAME: u64 = 1 << (SEQUENCE_BITS + 1);
const OFFER: u64 = 1 << SEQUENCE_BITS;

/// The frame that was granted as number `count` of a connection.
pub(crate) fn frame(count: u32) -> PayloadToken {
    PayloadToken(FRAME | u64::from(count))
}

/// Room that was made for one call.
pub(crate) fn offer(sequence: u64) -> PayloadToken {
    PayloadToken(OFFER | sequence)
}

/// Which frame a token names, if it is that of a frame.
pub(crate) fn frame_of(token: PayloadToken) -> Option<u32> {
    (token.0 & FRAME != 0).then_some(token.0 as u32)
}

/// Which call's room, if it is that.
pub(crate) fn offer_of(token: PayloadToken) -> Option<u64> {
    (token.0 & (FRAME | OFFER) == OFFER).then_some(token.0 & (OFFER - 1))
}
