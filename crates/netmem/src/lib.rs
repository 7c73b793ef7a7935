//! The memory of other nodes as a store.
//!
//! Nodes donate memory; clients keep pages and named, volatile objects in it. What is on a node that is lost is
//! gone, and is said to be.
//!
//! | | |
//! |---|---|
//! | [`donation`] | the memory of a node, which processes of its host read without asking |
//! | [`node`] | what a node holds, and its place among the others |
//! | [`map`], [`coordinator`] | which nodes there are, and which of them has which names |
//! | [`client`] | a client's way to the right node |
//! | [`request`] | what is asked and answered |
//!
//! None of these does I/O or has a clock: time is an argument, in nanoseconds of the boot clock.
//! `docs/protocol/netmem.md` has the protocol and what is promised.

#![deny(unsafe_code)]

pub mod client;
pub mod coordinator;
pub mod donation;
mod exchange;
pub mod map;
mod mark;
mod memory;
pub mod node;
mod paging;
mod remote_pages;
pub mod request;
mod server;
#[cfg(test)]
mod simulation;
mod spare;
mod types;

pub use memory::{Keep, Memory, MemoryError, MemoryOptions, NodeStat};
pub use paging::{
    BUDGET_BYTES_MIN, EXIT_PAGE_LOST, Held, Hold, MemoryStore, PAGE_BYTES, PageError, PageRun, PageStore, PagedRegion,
    PagingError, PagingOptions, PagingStats, StoreError,
};
pub use server::{LeaveReport, NodeOptions, NodeServer, OBJECT_BYTES_MAX, StartError};
pub use types::{BadName, Epoch, Incarnation, Loss, NAME_BYTES_MAX, Name, NodeId, PageHandle, Version};
