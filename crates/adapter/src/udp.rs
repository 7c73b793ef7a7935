//! The way to other hosts by UDP, as VIs see it.

use crate::Engine;
use crate::entropy::SystemEntropy;
use crate::owner::{Owner, SocketOwners, UserGate};
use crate::port::{Driver, Port, lock};
use crate::switchboard::Switchboard;
use highwire_link::{
    BindError, Clock, Impaired, Impairments, LengthField, Link, ListField, Recorded, Recording, UdpLink, UdpOptions,
};
use highwire_mem::work::{Line, Wire, WireError, WireListener};
use highwire_mem::{Allow, Process, deadline};
use highwire_proto::{
    Endpoint, EndpointConfig, Gate, Header, Keys, Kind, PacketSize, SessionConfig, SessionInfo, Speculation,
};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How a program reaches other hosts. The default has no key, and stays on this host.
#[derive(Clone, Debug)]
pub struct WireConfig {
    /// The cluster key to call with, and another one that is accepted as well while it is being changed. Without
    /// one packets are only checksummed.
    pub keys: Keys,
    /// Reach other hosts, and be reached, without a key.
    pub insecure: bool,
    /// Who carries messages.
    pub driver: Driver,
    /// Silence of so long is death.
    pub death: Duration,
    /// The longest message that is taken. A receive in place may take so much memory.
    pub message_bytes_max: u32,
    /// Sessions of one port, at most.
    pub sessions_max: usize,
    /// VIs of one session, at most.
    pub vis_max: usize,
    /// How large packets are: what the path takes, unless that is to be limited or fixed.
    pub packet_size: PacketSize,
    /// How payloads are received that are not encrypted.
    pub speculation: Speculation,
    /// Receive lists of each port, for large transfers to its VIs: queues of their own, so that what comes next
    /// in each is known. Each is a socket with a receive buffer, of which the kernel takes memory only for what
    /// waits in it; an idle one costs two kilobytes and a descriptor. At most 15. Ports with a key have none:
    /// what is sealed cannot be put into its place before it is opened.
    pub lists: u8,
    /// A message of so many bytes asks its receiver for a list.
    pub fast_bytes: u32,
    /// What is asked of the kernel. Where packets say their list is known here: `lists` in it is not looked at.
    pub udp: UdpOptions,
    /// Treat what is sent badly, from a seed, to see how a program bears it.
    pub impairments: Option<(Impairments, u64)>,
    /// Take down every packet that is sent or received, for Wireshark. All ports write to this one file, and
    /// so does every other interface that is given a clone. Impairments come after it: what they lose was
    /// sent.
    pub record: Option<Recording>,
}

impl Default for WireConfig {
    fn default() -> WireConfig {
        let session = SessionConfig::default();
        WireConfig {
            keys: Keys::insecure(),
            insecure: false,
            driver: Driver::Thread,
            death: session.death,
            message_bytes_max: session.message_bytes_max,
            sessions_max: EndpointConfig::default().sessions_max,
            vis_max: session.vis_max,
            packet_size: session.packet_size,
            speculation: Speculation::default(),
            lists: 4,
            fast_bytes: session.fast_bytes,
            udp: UdpOptions { length: Some(LENGTH), ..UdpOptions::default() },
            impairments: None,
            record: None,
        }
    }
}

/// Packets say how long they are, but for the first of a session, which is padded.
const LENGTH: LengthField =
    LengthField { at: Header::LENGTH_AT, uncounted: Header::BYTES, padded: Some((Header::KIND_AT, Kind::Hello as u8)) };

/// The way to other hosts by UDP. Ports are opened when they are needed.
#[derive(Debug)]
pub struct UdpWire {
    process: Process,
    config: WireConfig,
    /// One lock: a port that is being opened is listed, or has the keys that were set meanwhile.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    keys: Keys,
    /// The ports that connect, one for each family of addresses.
    connecting: [Option<Arc<Port>>; 2],
    /// All that were opened, some of which may be gone; those that listen are marked.
    ports: Vec<(bool, Weak<Port>)>,
}

impl State {
    fn ports(&self) -> impl Iterator<Item = (bool, Arc<Port>)> {
        self.ports.iter().filter_map(|(listens, port)| Some((*listens, port.upgrade()?)))
    }

    /// Lists a port that was opened.
    fn note(&mut self, listens: bool, port: &Arc<Port>) {
        self.ports.retain(|(_, port)| port.strong_count() > 0);
        self.ports.push((listens, Arc::downgrade(port)));
    }
}

impl UdpWire {
    /// A way with this configuration.
    pub fn new(config: WireConfig) -> UdpWire {
        let state = State { keys: config.keys.clone(), connecting: [None, None], ports: Vec::new() };
        UdpWire { process: Process::current(), config, state: Mutex::new(state) }
    }

    /// Changes the keys while connections go on, in the steps that [`Keys`] describes. Sessions that are there keep
    /// the keys that they were established with: [`UdpWire::end_old_sessions`] ends those that were shut out.
    ///
    /// No key at all is refused, and nothing changes, while this wire listens beyond this host, unless `insecure`
    /// was said.
    pub fn set_keys(&self, keys: Keys) -> Result<(), WireError> {
        let mut state = lock(&self.state);
        let mut listening = state.ports().filter(|(listens, port)| *listens && port.is_held());
        listening.try_for_each(|(_, port)| self.check_key(&keys, port.local()))?;
        drop(listening);
        state.keys = keys.clone();
        state.ports().for_each(|(_, port)| port.set_keys(keys.clone()));
        Ok(())
    }

    /// Ends the sessions that were not established under a key of the present ones; how many. Their connections
    /// fail, and the peers are told that the key is not accepted any more.
    pub fn end_old_sessions(&self) -> usize {
        lock(&self.state).ports().map(|(_, port)| port.end_old_sessions()).sum()
    }

    /// The sessions that are there, with the keys that they were established with.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        lock(&self.state).ports().flat_map(|(_, port)| port.sessions()).collect()
    }

    /// [`WireError::NoKey`] where nobody but this host may be reached.
    fn check_key(&self, keys: &Keys, address: SocketAddr) -> Result<(), WireError> {
        let allowed = self.config.insecure || !keys.is_insecure() || address.ip().is_loopback();
        if allowed { Ok(()) } else { Err(WireError::NoKey(address)) }
    }

    /// Opens a port that listens for these users, or one that calls.
    fn open(&self, keys: &Keys, at: SocketAddr, listening: Option<&Allow>) -> Result<Arc<Port>, WireError> {
        let count = if keys.is_insecure() { self.config.lists } else { 0 };
        let options = UdpOptions { lists: Some(ListField { count, at: Header::LIST_AT }), ..self.config.udp };
        let link = UdpLink::bind(at, options).map_err(|error| match error {
            BindError::Address { address, errno: Errno::ADDRINUSE } => WireError::InUse(address),
            other => WireError::Socket(other.to_string()),
        })?;
        let gate = match listening {
            Some(allow) => self.gate(keys, link.local_address(), allow)?,
            None => None,
        };
        let link: Box<dyn Link + Send> = match &self.config.impairments {
            Some((impairments, seed)) => Box::new(Impaired::new(link, impairments.clone(), *seed, Clock::real())),
            None => Box::new(link),
        };
        let link: Box<dyn Link + Send> = match &self.config.record {
            Some(recording) => Box::new(Recorded::new(link, recording.clone(), Clock::real())),
            None => link,
        };
        let session = SessionConfig {
            packet_size: self.config.packet_size,
            death: self.config.death,
            message_bytes_max: self.config.message_bytes_max,
            // The NIC's limits are lower, and known to the application.
            messages_max: DESCRIPTORS_MAX,
            receives_max: DESCRIPTORS_MAX,
            // One more for notes, and one for each to carry the payloads of remote memory.
            vis_max: 2 * self.config.vis_max + 1,
            fast_bytes: self.config.fast_bytes,
            ..SessionConfig::default()
        };
        let sessions_max = self.config.sessions_max;
        let speculation = self.config.speculation;
        let listens = listening.is_some();
        let endpoint =
            EndpointConfig { session, listening: listens, sessions_max, speculation, ..EndpointConfig::default() };
        let mut entropy = SystemEntropy;
        let mut endpoint = Endpoint::new(keys.clone(), endpoint, &mut entropy);
        endpoint.set_gate(gate);
        let engine = Engine::new(link, endpoint, Box::new(entropy));
        let limits = (self.config.message_bytes_max as usize, self.config.vis_max);
        let board = Switchboard::new(engine, listens, limits.0, limits.1);
        Port::start(board, self.config.driver).map_err(|error| WireError::Socket(error.to_string()))
    }

    /// Whether only the user tells who may be at the other end, at an address of this host.
    fn goes_by_user(&self, keys: &Keys, local: SocketAddr, allow: &Allow) -> bool {
        keys.is_insecure() && !self.config.insecure && local.ip().is_loopback() && *allow != Allow::Everyone
    }

    /// Keeps out callers of other users while there is no key.
    fn gate(&self, keys: &Keys, local: SocketAddr, allow: &Allow) -> Result<Option<Box<dyn Gate>>, WireError> {
        if !self.goes_by_user(&Keys::insecure(), local, allow) {
            return Ok(None);
        }
        match UserGate::new(local, allow.clone()) {
            Ok(gate) => Ok(Some(Box::new(gate))),
            // It is asked only if the key is taken away: then nobody is let in.
            Err(_) if !keys.is_insecure() => Ok(Some(Box::new(Shut))),
            Err(error) => Err(WireError::NoOwners { at: local, reason: error.to_string() }),
        }
    }

    /// Whether the listener at `to` may be spoken to, as far as only its user tells; false if there is none.
    fn check_user(&self, keys: &Keys, port: &Port, to: SocketAddr, allow: &Allow) -> Result<bool, WireError> {
        if !self.goes_by_user(keys, to, allow) {
            return Ok(true);
        }
        let unknown = |error: std::io::Error| WireError::NoOwners { at: to, reason: error.to_string() };
        match SocketOwners::open().and_then(|mut owners| owners.owner(to, port.local())).map_err(unknown)? {
            Owner::User(owner) if !allow.admits(owner) => Err(WireError::OtherUser { at: to, owner }),
            owner => Ok(owner != Owner::Nobody),
        }
    }

    /// The port that connects to addresses like this one.
    fn connecting(&self, to: SocketAddr) -> Result<Arc<Port>, WireError> {
        let mut state = lock(&self.state);
        // Without a key nobody else may reach it either: a checksum keeps no one from joining in.
        let stays = !self.config.insecure && state.keys.is_insecure();
        let family = usize::from(to.is_ipv6());
        if let Some(port) = state.connecting[family].as_ref().filter(|port| port.local().ip().is_loopback() == stays) {
            return Ok(port.clone());
        }
        let from: IpAddr = match (to, stays) {
            (SocketAddr::V4(_), true) => Ipv4Addr::LOCALHOST.into(),
            (SocketAddr::V4(_), false) => Ipv4Addr::UNSPECIFIED.into(),
            (SocketAddr::V6(_), true) => Ipv6Addr::LOCALHOST.into(),
            (SocketAddr::V6(_), false) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let opened = self.open(&state.keys, SocketAddr::new(from, 0), None)?;
        state.note(false, &opened);
        if let Some(earlier) = state.connecting[family].replace(opened.clone()) {
            // There was no key when it was opened. It ends with its last line.
            earlier.let_go();
        }
        Ok(opened)
    }
}

impl Wire for UdpWire {
    fn connect(
        &self,
        to: &str,
        line: &Arc<Line>,
        reliable: bool,
        timeout: Duration,
        allow: &Allow,
    ) -> Result<(), WireError> {
        let addresses = resolve(to)?;
        let each = timeout / addresses.len() as u32;
        let keys = lock(&self.state).keys.clone();
        let mut result = Err(WireError::Address(to.to_owned()));
        for address in addresses {
            result = self.check_key(&keys, address).and_then(|()| {
                let port = self.connecting(address)?;
                // Before, so that the caller has a reason and not silence.
                self.check_user(&keys, &port, address, allow)?;
                call(&port, address, line, reliable, each)?;
                // And of the one that has answered, which is the one that matters.
                let Some(terms) = line.terms() else { return Ok(()) };
                let gone = || WireError::Over { to: terms.peer, reason: "its socket is closed".to_owned() };
                let trusted = self.check_user(&keys, &port, terms.peer, allow);
                let trusted = trusted.and_then(|is_there| if is_there { Ok(()) } else { Err(gone()) });
                trusted.inspect_err(|_| terms.carrier.close(0))
            });
            if result.is_ok() {
                break;
            }
        }
        result
    }

    fn listen(&self, at: &str, allow: &Allow) -> Result<Box<dyn WireListener>, WireError> {
        let address = *resolve(at)?.first().ok_or_else(|| WireError::Address(at.to_owned()))?;
        let mut state = lock(&self.state);
        self.check_key(&state.keys, address)?;
        let port = self.open(&state.keys, address, Some(allow))?;
        state.note(true, &port);
        Ok(Box::new(UdpListener { process: self.process, port }))
    }
}

/// Calls for `timeout`. A session gives up before that may be over; then it is asked for again.
fn call(
    port: &Arc<Port>,
    to: SocketAddr,
    line: &Arc<Line>,
    reliable: bool,
    timeout: Duration,
) -> Result<(), WireError> {
    let until = deadline(timeout);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match port.connect(to, line, reliable, left) {
            Err(WireError::NoAnswer(_)) if Instant::now() + CALL_LEAST < until => {}
            result => return result,
        }
    }
}

/// A call is not worth making below this.
const CALL_LEAST: Duration = Duration::from_millis(100);

impl Drop for UdpWire {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // The ports are the parent's, and who knows who held their locks when the child was made.
            return;
        }
        let mut state = lock(&self.state);
        state.connecting.iter_mut().filter_map(Option::take).for_each(|port| port.let_go());
    }
}

/// Lets nobody in.
#[derive(Debug)]
struct Shut;

impl Gate for Shut {
    fn admits(&mut self, _from: SocketAddr) -> bool {
        false
    }
}

#[derive(Debug)]
struct UdpListener {
    process: Process,
    port: Arc<Port>,
}

impl WireListener for UdpListener {
    fn address(&self) -> SocketAddr {
        self.port.local()
    }

    fn accept(&self, line: &Arc<Line>, reliable: bool, timeout: Duration) -> Result<bool, WireError> {
        Ok(self.port.accept(line, reliable, timeout))
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.port.callers()
    }
}

impl Drop for UdpListener {
    fn drop(&mut self) {
        if self.process.is_this() {
            self.port.stop_listening();
        }
    }
}

/// The addresses of `host:port`, at least one.
fn resolve(text: &str) -> Result<Vec<SocketAddr>, WireError> {
    if let Ok(address) = text.parse() {
        return Ok(vec![address]);
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(|| WireError::Address(text.to_owned()))?;
    if port.parse::<u16>().is_err() || host.is_empty() || host.contains([':', '[', ']', '/', ' ']) {
        return Err(WireError::Address(text.to_owned()));
    }
    let unknown = |reason: String| WireError::Name { host: host.to_owned(), reason };
    let found: Vec<SocketAddr> = text.to_socket_addrs().map_err(|error| unknown(error.to_string()))?.collect();
    if found.is_empty() { Err(unknown("it has no address".to_owned())) } else { Ok(found) }
}

/// Messages and receives that a session takes from one VI; more wait in the line.
const DESCRIPTORS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_hosts_with_ports() {
        assert_eq!(resolve("127.0.0.1:7").unwrap(), ["127.0.0.1:7".parse().unwrap()]);
        assert_eq!(resolve("[::1]:7").unwrap(), ["[::1]:7".parse().unwrap()]);
        assert!(resolve("localhost:7").unwrap().iter().all(|address| address.ip().is_loopback()));
        for bad in ["", "7", "host", "host:", "host:x", ":7", "::1:7", "host:65536", "a/b:7", "[::1:7"] {
            assert_eq!(resolve(bad), Err(WireError::Address(bad.to_owned())), "{bad}");
        }
        assert!(matches!(resolve("no-such-host.invalid:7"), Err(WireError::Name { .. })));
    }
}
