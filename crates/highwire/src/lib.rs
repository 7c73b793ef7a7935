//! Highwire: network I/O at wire speed, in user space, on ordinary Linux machines.
//!
//! A program opens its own network interface, a [`Nic`], and connects virtual interfaces, [`Vi`]s.
//! On one host they are queues in memory that both processes map: a message costs one cache line
//! and no system call. Start with [`Nic`]; `docs/architecture.md` shows the path of a message.
#![forbid(unsafe_code)]

/// Between hosts: the engine, keys, and whole runs in virtual time. VIs do not take this way yet.
pub use highwire_adapter as adapter;
pub use highwire_mem::{Ticks, ticks, ticks_per_second};
pub use highwire_pulse::Pulse;
pub use highwire_vi::*;
