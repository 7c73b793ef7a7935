//! Stream sockets: what they share with kernel TCP, what they withstand, and how they refuse. Every test has a runtime
//! directory and processes of its own.

mod support;

mod bulk;
mod crash;
mod loops;
mod namespaces;
mod oracle;
mod refusals;
mod threads;
