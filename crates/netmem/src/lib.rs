//! The memory of other nodes as a store.
//!
//! Nodes donate memory; clients keep pages and named, volatile objects in it. What is on a node that is lost is
//! gone, and is said to be.
