//! The engine between queues and the wire: it drives [`highwire_proto`] over a [`highwire_link`].
//!
//! The way in is [`Engine`]: an endpoint on a link. Whoever owns it calls [`Engine::turn`]; that may be the
//! application's own thread, a thread of its own, or a [`Simulation`] in virtual time.
#![forbid(unsafe_code)]

mod engine;
mod entropy;
mod key_file;
mod simulation;

pub use engine::{Engine, EngineCounters};
pub use entropy::SystemEntropy;
pub use key_file::{KeyFileError, create_key, read_key};
pub use simulation::{Outcome, Report, Scenario, Simulation};
