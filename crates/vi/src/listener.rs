//! A name that others connect to, on this host or from another.

use crate::config::ViOptions;
use crate::error::{AcceptError, ListenError};
use crate::host::listener::HostListener;
use crate::nic::NicInner;
use crate::vi::Vi;
use crate::wire::{Calling, is_reliable};
use highwire_mem::Allow;
use highwire_mem::work::WireListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Accepts connections at an address.
#[derive(Debug)]
pub struct ViListener {
    address: String,
    at: At,
}

#[derive(Debug)]
enum At {
    Host(HostListener),
    Wire(WirePort),
}

#[derive(Debug)]
struct WirePort {
    nic: Arc<NicInner>,
    /// A forked child leaves it alone.
    listener: Box<dyn WireListener>,
}

impl WirePort {
    fn accept(&self, timeout: Duration, options: &ViOptions<'_>) -> Result<Vi, AcceptError> {
        if !self.nic.process.is_this() {
            return Err(AcceptError::ForkedChild);
        }
        let calling = Calling::new(&self.nic, options);
        if !self.listener.accept(&calling.line, is_reliable(options), timeout).map_err(AcceptError::Wire)? {
            return Err(AcceptError::TimedOut(timeout));
        }
        Vi::connected(calling, &self.nic, options).ok_or(AcceptError::TimedOut(timeout))
    }
}

impl ViListener {
    pub(crate) fn at_path(
        nic: Arc<NicInner>,
        address: &str,
        path: PathBuf,
        allow: Allow,
    ) -> Result<ViListener, ListenError> {
        let listener = HostListener::bind(nic, address, path, allow)?;
        Ok(ViListener { address: address.to_owned(), at: At::Host(listener) })
    }

    pub(crate) fn at_port(nic: Arc<NicInner>, listener: Box<dyn WireListener>) -> ViListener {
        let address = format!("udp:{}", listener.address());
        ViListener { address, at: At::Wire(WirePort { nic, listener }) }
    }

    /// The address it was opened with; with the port that was chosen, where that was left open.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The next connection, within `timeout`.
    pub fn accept(&self, timeout: Duration) -> Result<Vi, AcceptError> {
        self.accept_with(timeout, &ViOptions::new())
    }

    /// The same, with choices.
    ///
    /// A connection that is not allowed, malformed or too slow is refused and does not disturb the
    /// others; this call goes on waiting.
    pub fn accept_with(&self, timeout: Duration, options: &ViOptions<'_>) -> Result<Vi, AcceptError> {
        match &self.at {
            At::Host(listener) => listener.accept_with(timeout, options),
            At::Wire(port) => port.accept(timeout, options),
        }
    }
}

impl AsFd for ViListener {
    /// Readable when somebody connects.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.at {
            At::Host(listener) => listener.as_fd(),
            At::Wire(port) => port.listener.descriptor(),
        }
    }
}
