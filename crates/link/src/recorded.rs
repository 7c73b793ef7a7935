//! Any link, with its packets in a capture file.

use crate::link::ask_beneath;
use crate::{Burst, Clock, Guide, Inbox, Link, ReceiveError, Recording, SendError, Woven};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, UNIX_EPOCH};

/// A link that takes down each packet that goes or comes, for Wireshark and its like.
///
/// What is sent is taken down once the link has taken it: a burst of which only a part went, and which goes
/// again, is there once. It is what this side sent and received, so what the network loses on the way to
/// the other side is in the file, and what it loses on the way here is not.
///
/// ```
/// use highwire_link::{Burst, Clock, Link, Recorded, Recording, UdpLink, UdpOptions};
///
/// let recording = Recording::create("/dev/null")?;
/// let link = UdpLink::bind("127.0.0.1:0".parse()?, UdpOptions::default())?;
/// let mut link = Recorded::new(link, recording.clone(), Clock::real());
/// link.send(&[Burst { to: link.local_address(), bytes: b"onetwo", segment: 3 }])?;
/// assert_eq!((recording.packets(), recording.error()), (2, None));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Recorded<L> {
    link: L,
    tap: Option<Tap>,
}

/// Where a link's packets go.
#[derive(Debug)]
struct Tap {
    recording: Recording,
    clock: Clock,
    locals: Locals,
}

/// This side's address, which a link that is bound to all addresses does not know.
#[derive(Debug)]
struct Locals {
    bound: SocketAddr,
    /// The one from which the kernel reaches a peer.
    found: BTreeMap<IpAddr, IpAddr>,
}

impl<L: Link> Recorded<L> {
    /// Takes down what goes through `link`: with the date and time where the clock is the machine's, with
    /// the time since its beginning where that is a simulated network's.
    pub fn new(link: L, recording: Recording, clock: Clock) -> Recorded<L> {
        let locals = Locals { bound: canonical(link.local_address()), found: BTreeMap::new() };
        Recorded { link, tap: Some(Tap { recording, clock, locals }) }
    }

    /// Takes nothing down: for who decides at run time and wants one type.
    pub fn without(link: L) -> Recorded<L> {
        Recorded { link, tap: None }
    }

    /// The link beneath. What is sent there is not taken down.
    pub fn beneath(&mut self) -> &mut L {
        &mut self.link
    }

    /// The link, no longer recorded.
    pub fn into_inner(self) -> L {
        self.link
    }

    fn time(&self) -> Duration {
        self.tap.as_ref().map_or(Duration::ZERO, |tap| time_of(&tap.clock))
    }

    fn note_sent<'a>(&mut self, time: Duration, packets: impl Iterator<Item = (SocketAddr, [&'a [u8]; 2])>) {
        if let Some(Tap { recording, locals, .. }) = &mut self.tap {
            let packets = packets.map(|(to, pieces)| (canonical(to), pieces));
            recording.note(time, packets.map(|(to, pieces)| (locals.towards(to), to, pieces)));
        }
    }
}

impl<L: Link> Link for Recorded<L> {
    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        // Before the answer can have come.
        let time = self.time();
        let sent = self.link.send(bursts)?;
        let packets = bursts[..sent].iter().flat_map(|burst| burst.packets().map(|packet| (burst.to, packet)));
        self.note_sent(time, packets.map(|(to, packet)| (to, [packet, &[]])));
        Ok(sent)
    }

    fn send_woven(&mut self, burst: &Woven<'_>) -> Result<bool, SendError> {
        let time = self.time();
        let sent = self.link.send_woven(burst)?;
        if sent {
            self.note_sent(time, burst.packets().map(|(head, piece)| (burst.to, [head, piece])));
        }
        Ok(sent)
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        let received = self.link.receive(inbox)?;
        let Some(Tap { recording, clock, locals }) = &mut self.tap else { return Ok(received) };
        if received == 0 {
            // Whoever finds nothing has time, and may sleep next, for long or for ever.
            recording.flush();
        } else {
            let packets = inbox.packets().map(|(from, packet)| (canonical(from), packet));
            recording.note(time_of(clock), packets.map(|(from, packet)| (from, locals.towards(from), [packet, &[]])));
        }
        Ok(received)
    }

    /// What is taken down has to lie in one piece: then nothing lands.
    fn receive_guided(&mut self, inbox: &mut Inbox, guide: &mut dyn Guide) -> Result<usize, ReceiveError> {
        match self.tap {
            Some(_) => self.receive(inbox),
            None => self.link.receive_guided(inbox, guide),
        }
    }

    ask_beneath!(self, self.link);
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.recording.flush();
    }
}

impl Locals {
    /// This side's address as `peer` sees it, of the same family.
    fn towards(&mut self, peer: SocketAddr) -> SocketAddr {
        if self.bound.is_ipv4() == peer.is_ipv4() && !self.bound.ip().is_unspecified() {
            return self.bound;
        }
        if self.found.len() >= FOUND_MAX && !self.found.contains_key(&peer.ip()) {
            self.found.clear();
        }
        let ip = *self.found.entry(peer.ip()).or_insert_with(|| source_towards(peer));
        SocketAddr::new(ip, self.bound.port())
    }
}

/// The address that the kernel would send from; that of nobody if it knows no way.
fn source_towards(peer: SocketAddr) -> IpAddr {
    let nobody: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // To connect a datagram socket chooses the way, and sends nothing.
    let found = UdpSocket::bind((nobody, 0)).and_then(|socket| {
        socket.connect(peer)?;
        socket.local_addr()
    });
    found.map_or(nobody, |found| found.ip())
}

/// An IPv4 address in the clothes of IPv6 goes as IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn time_of(clock: &Clock) -> Duration {
    match clock {
        Clock::Real(_) => UNIX_EPOCH.elapsed().unwrap_or_default(),
        Clock::Simulated(network) => network.now(),
    }
}

/// Peers whose way is remembered; then they are looked up anew.
const FOUND_MAX: usize = 1024;
