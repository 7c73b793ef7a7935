//! Calls.
#![forbid(unsafe_code)]
pub mod calls;
pub mod head;
pub mod session;
