//! Virtual interfaces between real processes: what they promise, how they fail, and whom they
//! withstand. Every test has a runtime directory and processes of its own.

mod support;

mod crash;
mod delivery;
mod descriptors;
mod fork;
mod hostile;
mod in_place;
mod lies;
mod namespaces;
mod oracle;
mod other_users;
mod posts;
mod queues;
mod refusals;
mod remote_memory;
mod sends;
mod sleep_wake;
mod strangers;
mod streams;
mod threads;
mod tokens;
