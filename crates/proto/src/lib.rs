//! The packets that travel between hosts, and the keys that protect them. No I/O, no clock and no
//! randomness of its own: time and [`Entropy`] are arguments, so that a run can be repeated.
//!
//! The way in is [`Initiator::new`] and [`respond`]: one hello, one welcome, and both ends hold an
//! [`Established`] with a [`Sealing`] in it. From then on every packet is a [`Header`] and a
//! payload, sealed by [`Sealing::seal`] and opened by [`Sealing::open`]; a [`ReplayWindow`] refuses
//! what was received before.
//!
//! ```
//! use highwire_proto::{ClusterKey, Header, Initiator, Keys, Kind, Offer, SeededEntropy, respond};
//!
//! let mut entropy = SeededEntropy::new(7);
//! let key = ClusterKey::from_random([9; 32]);
//! let ours = Offer { session: 1, message_bytes_max: 1 << 20, death_ms: 5_000, incarnation: 11 };
//! let theirs = Offer { session: 2, incarnation: 12, ..ours };
//!
//! let (initiator, hello) = Initiator::new(Some(&key), ours, &mut entropy)?;
//! let (mut far, welcome) = respond(&Keys::new(key), &hello, theirs, &mut entropy)?;
//! let mut near = initiator.handle_welcome(&welcome).map_err(|(_, error)| error)?;
//!
//! let mut packet = [0; Header::BYTES + 5];
//! let mut header = Header::new(Kind::Data);
//! header.session = near.peer.session;
//! header.length = 5;
//! header.write(&mut packet);
//! packet[Header::BYTES..].copy_from_slice(b"hello");
//! near.sealing.seal(&mut packet)?;
//!
//! let mut payload = [0; 5];
//! far.sealing.open(&Header::parse(&packet)?, &packet, &mut payload)?;
//! assert_eq!(&payload, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/protocol/wire.md` describes every byte; comments cite its requirements as `[W-12]`.

#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod admission;
mod congestion;
mod endpoint;
mod entropy;
mod handshake;
mod header;
mod key;
mod ledger;
mod message;
mod noise;
mod ranges;
mod renewal;
mod replay;
mod rtt;
mod seal;
mod session;
mod size;

pub use congestion::{Controller, Delivery, RateBased};
pub use endpoint::{
    ConnectError, Endpoint, EndpointConfig, EndpointEvent, EndpointStats, Expectation, Gate, SessionInfo, Speculation,
};
pub use entropy::{Entropy, SeededEntropy};
pub use handshake::{Established, HELLO_BYTES, HandshakeError, Initiator, Offer, respond};
pub use header::{CONTROL_BYTES_MAX, Header, HeaderFlags, Kind, Malformed, WIRE_VERSION};
pub use key::{ClusterKey, Fingerprint, KeyError, Keys};
pub use message::{Incoming, Outgoing, Sink, Source};
pub use ranges::Ranges;
pub use replay::ReplayWindow;
pub use rtt::RoundTrip;
pub use seal::{KEY_TICK, KeyLimits, OpenError, SealError, Sealing, SealingStats};
pub use session::{
    Assurance, Dropped, Ending, Event, Guess, LandingStats, Pulse, Refusal, Session, SessionConfig, SessionStats,
    Transmit,
};
pub use size::PacketSize;
