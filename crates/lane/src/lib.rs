//! The fast lane beside a TCP connection: bytes that a reader is looking for go through shared memory, all others by
//! TCP, and the stream stays one stream.
//!
//! The way in is [`Outgoing`] and [`Incoming`], the two halves of one direction; [`Lane`] gives both of an end. Each byte
//! goes by the lane or by TCP. A record in the lane carries the number of TCP bytes that come before it, so the reader
//! always knows what is next:
//!
//! ```text
//!   stream   a b c d e f g h i j k        record "d e f", after 3 bytes of TCP
//!   TCP      a b c . . . g h . . .        record "i j k", after 5
//!   lane     . . . d e f . . i j k
//! ```
//!
//! **The lane carries only what a reader is looking for.** One word holds *looking* and the number of records
//! published. A writer publishes by compare-and-swap, and only while *looking* is set; a reader about to sleep clears it by
//! compare-and-swap, which fails if something was published since it looked. So a sleeper has seen everything that went by
//! the lane, and all that comes later comes by TCP, where the kernel wakes it. Nothing here waits or makes a system call.
//!
//! [`registry`] brings the two ends of a connection together, and [`claim`] is how a process asks it to. [`program`] knows
//! which programs cannot have lanes.

#![forbid(unsafe_code)]

mod incoming;
mod layout;
mod outgoing;
mod progress;
mod thread_lock;

#[cfg(not(loom))]
pub mod claim;
#[cfg(not(loom))]
pub mod counters;
#[cfg(not(loom))]
pub mod program;
#[cfg(not(loom))]
pub mod registry;
#[cfg(test)]
mod tests;

pub use incoming::{Incoming, Next, Record};
pub use layout::{
    AREA_BYTES, CAPACITY_LEAST, EndState, Holders, LANES, Lane, LaneRegion, RECORD_MAX, REGION_BYTES, Side, UNBORN,
};
pub use outgoing::{Outgoing, Published};
pub use thread_lock::ThreadLock;
