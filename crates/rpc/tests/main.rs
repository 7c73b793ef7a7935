//! Calls between interfaces and between processes: what comes of them, what they withstand and how they are refused.
//! Every behaviour holds on one host and over packets.

mod support;

mod calls;
mod crash;
mod deadlines;
mod deferred;
mod descriptors;
mod hostile_clients;
mod hostile_servers;
mod idle;
mod namespaces;
mod payloads;
mod pool;
mod refusals;
mod sessions;
mod sizes;
mod waking;
