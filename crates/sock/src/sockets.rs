//! Over which interface sockets go, and how they behave.

use crate::config::SockConfig;
use crate::error;
use crate::handling::{Handling, Threads};
use crate::listener::Listener;
use crate::stream::Stream;
use highwire_adapter::{UdpWire, WireConfig, read_key};
use highwire_proto::{ClusterKey, Keys};
use highwire_vi::{Allow, Config, Nic};
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// An interface and how its sockets behave. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Sockets {
    nic: Nic,
    config: SockConfig,
    threads: Arc<Threads>,
}

/// Names the file of the key that [`Stream::connect`] and [`Listener::bind`] reach other hosts with.
pub const KEY_VARIABLE: &str = "HIGHWIRE_KEY";
/// Names the file of another key that callers of [`Listener::bind`] may use, while the key is being changed.
pub const ALSO_ACCEPT_VARIABLE: &str = "HIGHWIRE_ALSO_ACCEPT";

impl Sockets {
    /// Sockets over `nic`, with the default behaviour.
    pub fn new(nic: &Nic) -> Sockets {
        Sockets { nic: nic.clone(), config: SockConfig::default(), threads: Arc::default() }
    }

    /// Sockets over `nic` that behave as `config` says.
    pub fn with(nic: &Nic, config: SockConfig) -> io::Result<Sockets> {
        config.check(nic.config().depth)?;
        Ok(Sockets { config, ..Sockets::new(nic) })
    }

    /// Those of [`Stream::connect`] and [`Listener::bind`]: an interface of the process, opened when it is first used.
    pub fn of_process() -> io::Result<Sockets> {
        static SOCKETS: OnceLock<Sockets> = OnceLock::new();
        if let Some(sockets) = SOCKETS.get() {
            return Ok(sockets.clone());
        }
        let wire = WireConfig { keys: keys_of_process()?, ..WireConfig::default() };
        let nic = Nic::with_wire(Config::default(), Arc::new(UdpWire::new(wire))).map_err(io::Error::other)?;
        Ok(SOCKETS.get_or_init(|| Sockets::new(&nic)).clone())
    }

    /// Connects to whoever listens at `shm:name`, `shm:/path` or `udp:host:port`.
    pub fn connect(&self, address: &str) -> io::Result<Stream> {
        self.connect_timeout(address, self.nic.config().connect_timeout)
    }

    /// The same, within `timeout`.
    pub fn connect_timeout(&self, address: &str, timeout: Duration) -> io::Result<Stream> {
        let handling = self.handling()?;
        let options = handling.options().connect_timeout(timeout);
        let vi = self.nic.connect_with(address, &options).map_err(error::connecting)?;
        Ok(Stream::called(vi, self.config, &handling, address))
    }

    /// Listens at `shm:name` or `shm:/path` for the users that the interface allows, or at `udp:host:port` for all that
    /// have the key; without a key, on this host, for those users as well.
    pub fn bind(&self, address: &str) -> io::Result<Listener> {
        self.bind_for(address, self.nic.config().allow.clone())
    }

    /// Listens for the users that `allow` names. Others cannot reach a `shm:name`.
    pub fn bind_for(&self, address: &str, allow: Allow) -> io::Result<Listener> {
        let listener = self.nic.listen_with(address, allow).map_err(error::listening)?;
        Ok(Listener::new(self.clone(), listener))
    }

    pub(crate) fn config(&self) -> SockConfig {
        self.config
    }

    pub(crate) fn handling(&self) -> io::Result<Handling> {
        self.threads.handling(&self.nic, self.config.strategy)
    }
}

fn keys_of_process() -> io::Result<Keys> {
    let Some(key) = key_of_process(KEY_VARIABLE)? else {
        return match key_of_process(ALSO_ACCEPT_VARIABLE)? {
            None => Ok(Keys::insecure()),
            Some(_) => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{ALSO_ACCEPT_VARIABLE} is set, and {KEY_VARIABLE}, the key to call with, is not"),
            )),
        };
    };
    let keys = Keys::new(key);
    Ok(match key_of_process(ALSO_ACCEPT_VARIABLE)? {
        Some(other) => keys.also_accepting(other),
        None => keys,
    })
}

fn key_of_process(variable: &str) -> io::Result<Option<ClusterKey>> {
    let Some(file) = std::env::var_os(variable).filter(|file| !file.is_empty()) else { return Ok(None) };
    let named = |error| io::Error::new(io::ErrorKind::InvalidInput, format!("{variable}: {error}"));
    read_key(Path::new(&file)).map(Some).map_err(named)
}
