//! What the tests stand on: a stage with processes of its own, sockets of all kinds, and bytes from a seed.

#[path = "../../../vi/tests/support/forked.rs"]
#[allow(dead_code, reason = "the tests of VIs need more of it")]
pub mod forked;
pub mod pattern;
#[path = "../../../vi/tests/support/seeded.rs"]
#[allow(dead_code, reason = "the tests of VIs need more of it")]
pub mod seeded;
pub mod socket;
#[path = "../../../vi/tests/support/stage.rs"]
mod stage;
pub mod wire;

pub use stage::*;
