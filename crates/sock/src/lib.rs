//! Stream sockets over virtual interfaces, in the shape of `std::net`.
//!
//! [`Stream`] and [`Listener`] are used as `TcpStream` and `TcpListener` are, and so are their errors; only the
//! address is another: `shm:name` for a program of this host, `udp:host:port` for any other.
//!
//! ```
//! use highwire_sock::{Listener, Stream};
//! use std::io::{Read, Write};
//!
//! # let name = format!("shm:doc-{}", std::process::id());
//! let listener = Listener::bind(&name)?;
//! let client = std::thread::spawn(move || -> std::io::Result<String> {
//!     let mut stream = Stream::connect(&name)?;
//!     stream.write_all(b"hello")?;
//!     stream.shutdown(std::net::Shutdown::Write)?;
//!     let mut answer = String::new();
//!     stream.read_to_string(&mut answer)?;
//!     Ok(answer)
//! });
//! let (mut stream, _) = listener.accept()?;
//! let mut question = String::new();
//! stream.read_to_string(&mut question)?;
//! stream.write_all(question.to_uppercase().as_bytes())?;
//! drop(stream);
//! assert_eq!(client.join().unwrap()?, "HELLO");
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! The way in is [`Stream`]; [`Sockets`] says over which interface, and how. `connection` has the states.
//!
//! # Threads
//!
//! Everything here is `Send` and `Sync`. Any number of threads may read, write, shut down and close a stream; one
//! reader and one writer do not hold each other up.
#![forbid(unsafe_code)]

mod address;
#[cfg(feature = "tokio")]
mod asynchronous;
mod closing;
mod config;
mod connection;
mod error;
mod handling;
mod listener;
mod sockets;
mod stream;

pub use address::SockAddress;
#[cfg(feature = "tokio")]
pub use asynchronous::{AsyncListener, AsyncStream};
pub use config::{SockConfig, Strategy};
pub use connection::State;
pub use listener::{Incoming, Listener};
pub use sockets::{ALSO_ACCEPT_VARIABLE, KEY_VARIABLE, Sockets};
pub use stream::Stream;
