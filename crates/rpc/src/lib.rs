//! Calls.
#![forbid(unsafe_code)]

mod body;
mod calls;
mod client;
mod error;
mod head;
mod hub;
mod line;
mod server;
mod session;
mod stall;
mod tokens;

pub use body::Body;
pub use client::{Answer, Call, Client, ClientOptions, Method, Pending};
pub use error::{CallError, Failed, Lost, OpenError};
pub use head::Leaving;
pub use hub::Rpc;
pub use server::{Manner, Reply, Request, Serve, ServeError, Server, ServerOptions, Services, StillRunning};
