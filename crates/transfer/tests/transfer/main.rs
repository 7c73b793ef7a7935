//! Transfers over a pair of sockets, in one process.

mod exchange;
mod hostile;
mod mapped;
mod place;
