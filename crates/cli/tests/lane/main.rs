//! Programs that know nothing of Highwire, plainly and under `highwire run`: what they print and transfer is the same.
//!
//! The C programs of `c/` come in two roles each, a server and a client ([`scenario`]); real programs are in
//! [`programs`], the command itself in [`command`].

#![forbid(unsafe_code)]

mod actor;
mod behaviours;
mod command;
mod compiled;
mod ends;
mod ground;
mod network;
mod plainly;
mod programs;
mod reasons;
mod registry;
mod scenario;
mod sizes;
mod users;
