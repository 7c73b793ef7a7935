//! Calls between processes, on one host and between hosts, with payloads that land where the caller says.
//!
//! A service is a Rust trait ([`service!`]). Whoever serves it gives it to [`Rpc::serve`]; whoever calls it connects with
//! [`Rpc::connect`], to `shm:name` or `udp:host:port`. A call is one message of 32 bytes and its arguments; what is large
//! goes as payload, from buffers that are given by value and come back with the answer or the error, into buffers that
//! are named beforehand: there is no copy but the network's own.
//!
//! ```text
//!  caller                                              server
//!  Call::wait, start, then                             Serve::serve
//!    │ client.rs: a number, a place                        ▲ server/connection.rs: once? known? quick?
//!    ▼                                                     │
//!  line.rs: head and arguments ──▶ VI ──▶ line.rs ─────────┘──▶ server/jobs.rs: handlers that may take long
//!    ▲                                                     │
//!    │ payload lands in the frame that was named           ▼
//!  line.rs ◀────────────────────── VI ◀── line.rs: the answer, kept in session.rs until it has arrived
//! ```
//!
//! # At most once
//!
//! A call runs once or not at all, however often connections are lost. The client numbers its calls and sends those
//! that are outstanding again when it has connected again; the server knows which it has begun and keeps the answers until
//! they have arrived. If the server has started anew, or has given the session up, nobody knows whether a call that was
//! on its way has run: it ends with [`CallError::OutcomeUnknown`], and is never tried again behind the caller's back.
//! A deadline that passes says no more than that either; every other error says whether the call ran.
//!
//! # Threads
//!
//! A [`Client`] is shared by threads. Whoever waits for an answer takes what has come for everybody; futures need no
//! runtime: they are woken by whichever thread does that, and by one driver thread of the [`Rpc`] while nobody does.
//!
//! `docs/protocol/rpc.md` describes every byte.
#![forbid(unsafe_code)]

mod body;
mod calls;
mod client;
mod error;
pub mod head;
mod hub;
mod line;
mod server;
mod service;
pub mod session;
mod stall;
mod tokens;

pub use body::Body;
pub use client::{Answer, Call, Client, ClientOptions, Method, Pending};
pub use error::{CallError, Failed, Lost, OpenError, Outcome};
pub use head::Leaving;
pub use hub::Rpc;
pub use line::{BODY_BYTES_BESIDE_MAX, BODY_BYTES_MAX};
pub use server::{Deferred, Manner, Reply, Request, Serve, ServeError, Server, ServerOptions, Services, StillRunning};
pub use service::{Bulk, Completed, Service, TypedCall, TypedPending};
