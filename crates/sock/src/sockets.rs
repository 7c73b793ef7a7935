//! Over which interface sockets go, and how they behave.

use crate::config::SockConfig;
use crate::error;
use crate::handling::{Handling, Threads};
use crate::listener::Listener;
use crate::stream::Stream;
use highwire_adapter::{UdpWire, WireConfig, read_key};
use highwire_proto::Keys;
use highwire_vi::{Allow, Config, Nic};
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// An interface and how its sockets behave. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub struct Sockets {
    nic: Nic,
    config: SockConfig,
    threads: Arc<Threads>,
}

/// Names the file of the key that [`Stream::connect`] and [`Listener::bind`] reach other hosts with; two, with a colon
/// between, while it is being changed, the newer one first.
pub const KEY_VARIABLE: &str = "HIGHWIRE_KEY";

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
    let Some(files) = std::env::var_os(KEY_VARIABLE).filter(|files| !files.is_empty()) else {
        return Ok(Keys::insecure());
    };
    let named = |error: String| io::Error::new(io::ErrorKind::InvalidInput, format!("{KEY_VARIABLE}: {error}"));
    let read = |file: std::path::PathBuf| read_key(&file).map_err(|error| named(error.to_string()));
    let files: Vec<_> = std::env::split_paths(&files).collect();
    match <[_; 2]>::try_from(files) {
        Ok([newer, older]) => Ok(Keys::new(read(newer)?).also_accepting(read(older)?)),
        Err(files) => match <[_; 1]>::try_from(files) {
            Ok([only]) => Ok(Keys::new(read(only)?)),
            Err(files) => Err(named(format!("{} files; two are accepted while a key is being changed", files.len()))),
        },
    }
}
