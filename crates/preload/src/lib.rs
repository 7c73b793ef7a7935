//! The library that `highwire run` preloads: sockets of programs that know nothing of Highwire become fast.
//!
//! The folder `shim` has the hooks as libc's callers see them, in C, and everything that may wait. Here is what they ask:
//! whether bytes go by the lane ([`send`], [`receive`]), whether there is something to read ([`wait`], [`epoll`]), which
//! descriptor is which connection ([`table`]), when to ask for a lane ([`pair`]), and what forks change ([`process`]).
//! Nothing here waits, takes memory from the program's allocator, or starts a thread.
//!
//! What a hook does not know stays plain TCP, which is always right.

mod arena;
mod counters;
mod epoll;
mod hooks;
mod log;
mod pair;
mod process;
mod raw;
mod receive;
mod send;
mod spin;
mod table;
mod wait;

#[global_allocator]
static MEMORY: arena::Arena = arena::Arena::new();
