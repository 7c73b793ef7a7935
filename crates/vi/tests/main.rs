//! Virtual interfaces between real processes: what they promise, how they fail, and whom they
//! withstand. Every test has a runtime directory and processes of its own.

#[allow(dead_code)]
mod support;

mod delivery;
mod in_place;
mod queues;
mod remote_memory;
mod sends;
mod sleep_wake;
mod tokens;
