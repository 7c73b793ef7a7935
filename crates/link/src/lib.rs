//! Ways for packets to another host: system calls and nothing else.
//!
//! A [`Link`] sends [`Burst`]s and fills an [`Inbox`]; it knows nothing of connections, and promises
//! no more than a network does: a packet may be lost, doubled or late, and comes whole or not at all.
//!
//! * [`UdpLink`] is the real one: UDP, with the kernel's segmentation and coalescing where it has them.
//! * [`SimulatedLink`] is one end of a [`Network`] in virtual time, the same on every run of a seed.
//! * [`Impaired`] loses, doubles, delays, reorders and corrupts what is sent over any link.
//! * [`Traced`] writes a line for each packet of any link.
//! * [`Recorded`] writes the packets of any link to a capture file, a [`Recording`].
//!
//! ```
//! use highwire_link::{Burst, Inbox, Link, UdpLink, UdpOptions};
//!
//! let mut left = UdpLink::bind("127.0.0.1:0".parse()?, UdpOptions::default())?;
//! let mut right = UdpLink::bind("127.0.0.1:0".parse()?, UdpOptions::default())?;
//! // Three packets, of 4, 4 and 2 bytes, in one system call.
//! let burst = Burst { to: right.local_address(), bytes: b"onetwo3333", segment: 4 };
//! assert_eq!(left.send(&[burst])?, 1);
//!
//! let mut inbox = Inbox::new();
//! while right.receive(&mut inbox)? == 0 {}
//! let (from, packet) = inbox.packets().next().unwrap();
//! assert_eq!((from, packet), (left.local_address(), &b"onet"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]
#![deny(missing_docs)]

mod burst;
mod clock;
mod impaired;
mod inbox;
mod landing;
mod link;
mod pcap;
mod random;
mod recorded;
mod simulated;
mod traced;
mod udp;

pub use burst::{Burst, Woven};
pub use clock::Clock;
pub use impaired::{Impaired, ImpairedCounters, Impairments};
pub use inbox::{DeliverError, Inbox};
pub use landing::{Advice, Cut, Guide, Landed, Landing};
pub use link::{Link, LinkCounters, ReceiveError, SendError};
pub use pcap::{Recording, RecordingError, RecordingOptions};
pub use recorded::Recorded;
pub use simulated::{Network, NetworkConfig, NetworkCounters, Oversize, SimulatedLink};
pub use traced::Traced;
pub use udp::{BindError, LengthField, ListField, UdpLink, UdpOptions};
