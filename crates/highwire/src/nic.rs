//! An interface that reaches this host and others.

use highwire_adapter::{UdpWire, WireConfig};
use highwire_proto::{Keys, SessionInfo};
use highwire_vi::{Config, NicError, WireError};
use std::ops::Deref;
use std::sync::Arc;

/// The way into the network: a [`highwire_vi::Nic`] that also reaches other hosts, at `udp:host:port`.
/// Cheap to clone; all clones are one interface.
///
/// ```
/// use highwire::{ClusterKey, Config, Keys, Nic, Receive, WireConfig};
/// use std::time::Duration;
///
/// // Both sides have the key, from a file that `highwire key new` made.
/// let keys = || Keys::new(ClusterKey::from_random([7; 32]));
/// let nic = Nic::with_wire(Config::default(), WireConfig { keys: keys(), ..WireConfig::default() })?;
/// let listener = nic.listen("udp:127.0.0.1:0")?;
/// let address = listener.address().to_owned();
/// let other = std::thread::spawn(move || {
///     let nic = Nic::with_wire(Config::default(), WireConfig { keys: keys(), ..WireConfig::default() }).unwrap();
///     let mut vi = nic.connect(&address).unwrap();
///     vi.send_bytes(1, b"hello").unwrap();
///     vi.disconnect(Duration::from_secs(5)).unwrap();
/// });
/// let mut vi = listener.accept(Duration::from_secs(5))?;
/// vi.post_recv(Receive::new(7).into(nic.register(64)?.slice(0..64)?))?;
/// let done = vi.wait(Duration::from_secs(5))?;
/// assert_eq!(&done.into_buffer().unwrap()[..5], b"hello");
/// other.join().unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Nic {
    vi: highwire_vi::Nic,
    wire: Arc<UdpWire>,
}

impl Nic {
    /// Opens an interface with the default configuration. Without a key it reaches this host only.
    pub fn open() -> Result<Nic, NicError> {
        Nic::with(Config::default())
    }

    /// Opens an interface. Without a key it reaches this host only.
    pub fn with(config: Config) -> Result<Nic, NicError> {
        Nic::with_wire(config, WireConfig::default())
    }

    /// Opens an interface that reaches other hosts as `wire` says.
    pub fn with_wire(config: Config, wire: WireConfig) -> Result<Nic, NicError> {
        let wire = Arc::new(UdpWire::new(wire));
        Ok(Nic { vi: highwire_vi::Nic::with_wire(config, wire.clone())?, wire })
    }

    /// Changes the keys while connections go on: see [`UdpWire::set_keys`].
    pub fn set_keys(&self, keys: Keys) -> Result<(), WireError> {
        self.wire.set_keys(keys)
    }

    /// Ends the sessions of keys that are not accepted any more: see [`UdpWire::end_old_sessions`].
    pub fn end_old_sessions(&self) -> usize {
        self.wire.end_old_sessions()
    }

    /// The sessions with other hosts, and the keys that they were established with.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.wire.sessions()
    }
}

impl Deref for Nic {
    type Target = highwire_vi::Nic;
    fn deref(&self) -> &highwire_vi::Nic {
        &self.vi
    }
}
