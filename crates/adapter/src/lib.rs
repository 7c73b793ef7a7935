//! The engine between queues and the wire: it drives [`highwire_proto`] over a [`highwire_link`].
//!
//! The way in is [`UdpWire`], which carries the lines of VIs ([`highwire_mem::work`]) to other hosts. Its
//! heart is [`Engine`]: an endpoint on a link. Whoever owns it calls [`Engine::turn`]; that may be the
//! application's own thread, a thread of its own, or a [`Simulation`] in virtual time.
//!
//! ```text
//!  VI ── line ──▶ port ──▶ switchboard ──▶ engine ──▶ endpoint, sessions ──▶ link
//!                 who turns  which line      packets    the protocol
//!                            goes where      in and out
//! ```
#![forbid(unsafe_code)]

mod engine;
mod entropy;
mod key_file;
mod load;
mod note;
mod owner;
mod port;
mod remote;
mod restore;
mod simulation;
mod switchboard;
mod udp;

pub use engine::{Engine, EngineCounters};
pub use entropy::SystemEntropy;
pub use key_file::{KeyFileError, create_key, read_key};
pub use port::Driver;
pub use simulation::{Outcome, Report, Scenario, Simulation};
pub use udp::{UdpWire, WireConfig};
