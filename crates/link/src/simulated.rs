//! A network in virtual time, the same on every run of a seed.
//!
//! It is one switch that every host is plugged into. Each host's port of the switch sends at the
//! bottleneck's rate from a queue of its own, which is where packets wait and are dropped when many
//! come at once; then they take the latency to arrive:
//!
//! ```text
//! send ──► queue of the destination ──► wire (bytes_per_second) ──► latency + jitter ──► receive
//!            └─ full: dropped
//! ```
//!
//! Packets to one host arrive in the order they were sent, jitter or not; [`crate::Impaired`] is
//! what reorders. Time stands still until [`Network::advance_to`] moves it.

use crate::inbox::FIRST_LIST;
use crate::landing::LOOKED_AT;
use crate::random::Random;
use crate::{Advice, Burst, DeliverError, Guide, Inbox, Link, LinkCounters, ListField, ReceiveError, SendError};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a simulated network is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkConfig {
    /// Decides all that is random.
    pub seed: u64,
    /// What every packet takes at least.
    pub latency: Duration,
    /// What a packet may take longer, evenly spread.
    pub jitter: Duration,
    /// The rate of each host's port; None is without limit, and then nothing queues.
    pub bytes_per_second: Option<u64>,
    /// Most bytes that wait at a port; a packet that would go beyond is dropped.
    pub queue_bytes: usize,
    /// Most bytes of a packet, until [`Network::set_mtu`] says otherwise for a sender.
    pub mtu: usize,
    /// What becomes of a larger one.
    pub oversize: Oversize,
    /// Which byte of a packet is the number of its receive list, if hosts have some: what is of another list may be
    /// received before what came earlier.
    pub list_at: Option<usize>,
}

/// What becomes of a packet that is larger than its path takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oversize {
    /// The sender's own device refuses it: [`SendError::TooLarge`].
    Refused,
    /// Somebody on the way drops it, and says nothing.
    Dropped,
}

impl Default for NetworkConfig {
    /// A quiet local network: 50 microseconds, no limit of rate, packets as Ethernet has them.
    fn default() -> NetworkConfig {
        NetworkConfig {
            seed: 0,
            latency: Duration::from_micros(50),
            jitter: Duration::ZERO,
            bytes_per_second: None,
            queue_bytes: 1 << 20,
            mtu: 1472,
            oversize: Oversize::Refused,
            list_at: None,
        }
    }
}

/// What became of the packets of a network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkCounters {
    /// Put on their way.
    pub carried: u64,
    /// Dropped because a queue was full.
    pub dropped: u64,
    /// Sent to an address that no link has.
    pub unreachable: u64,
    /// Dropped on the way because they were too large.
    pub oversized: u64,
}

/// A simulated network. Clones are the same network.
#[derive(Clone, Debug)]
pub struct Network {
    state: Arc<Mutex<State>>,
}

/// One end of a simulated network; its address is free again when it is dropped.
#[derive(Debug)]
pub struct SimulatedLink {
    network: Network,
    local: SocketAddr,
    /// The list that something was received by last.
    list: u8,
    counters: LinkCounters,
}

#[derive(Debug)]
struct State {
    config: NetworkConfig,
    random: Random,
    now: Duration,
    /// Ordered, so that nothing depends on how a hash table walks.
    ports: BTreeMap<SocketAddr, Port>,
    /// What packets of a sender may be like, where that was changed.
    mtus: BTreeMap<SocketAddr, (usize, Oversize)>,
    counters: NetworkCounters,
    next_port: u16,
}

#[derive(Debug, Default)]
struct Port {
    /// When the last packet in the queue will have left it.
    idle_at: Duration,
    /// On the way or waiting to be received, in the order of arrival.
    packets: VecDeque<Flying>,
    /// Of the last packet on its way: later ones do not overtake it.
    last_arrival: Duration,
}

#[derive(Debug)]
struct Flying {
    arrival: Duration,
    from: SocketAddr,
    bytes: Box<[u8]>,
}

/// The same as over UDP, so that callers size their bursts alike.
const BURST_BYTES_MAX: usize = 65_507;
/// Most packets of a batch.
const BATCH_PACKETS_MAX: usize = 64;
const FIRST_PORT: u16 = 49_152;
const NANOS_PER_SECOND: u128 = 1_000_000_000;

impl Network {
    /// A network at time zero.
    pub fn new(config: NetworkConfig) -> Network {
        assert!(config.bytes_per_second != Some(0), "a network of 0 bytes a second carries nothing");
        let random = Random::new(config.seed);
        let (ports, counters) = (BTreeMap::new(), NetworkCounters::default());
        let mtus = BTreeMap::new();
        let state = State { config, random, now: Duration::ZERO, ports, mtus, counters, next_port: FIRST_PORT };
        Network { state: Arc::new(Mutex::new(state)) }
    }

    /// A link at `address`, which must not be taken; port 0 lets the network choose one.
    pub fn link(&self, address: SocketAddr) -> SimulatedLink {
        let mut state = self.lock();
        let mut local = address;
        while local.port() == 0 || (address.port() == 0 && state.ports.contains_key(&local)) {
            local.set_port(state.next_port);
            state.next_port = state.next_port.checked_add(1).unwrap_or(FIRST_PORT);
        }
        let before = state.ports.insert(local, Port::default());
        assert!(before.is_none(), "the simulated address {local} is taken");
        SimulatedLink { network: self.clone(), local, list: 0, counters: LinkCounters::default() }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.lock().now
    }

    /// Moves time forward; it never goes back.
    pub fn advance_to(&self, time: Duration) {
        let mut state = self.lock();
        state.now = state.now.max(time);
    }

    /// From now on packets from this address may have so many bytes. What is on its way arrives.
    pub fn set_mtu(&self, from: SocketAddr, bytes: usize, oversize: Oversize) {
        self.lock().mtus.insert(from, (bytes, oversize));
    }

    /// When the next packet arrives, after now. What has arrived already and waits to be received is
    /// left out, so that a host that does not look cannot stop the time.
    pub fn next_arrival(&self) -> Option<Duration> {
        let state = self.lock();
        let next = |port: &Port| {
            let arrived = port.packets.partition_point(|packet| packet.arrival <= state.now);
            port.packets.get(arrived).map(|packet| packet.arrival)
        };
        state.ports.values().filter_map(next).min()
    }

    /// What became of the packets so far.
    pub fn counters(&self) -> NetworkCounters {
        self.lock().counters
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that panics while it holds the lock leaves whole numbers behind.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn mtu(&self, from: SocketAddr) -> (usize, Oversize) {
        self.mtus.get(&from).copied().unwrap_or((self.config.mtu, self.config.oversize))
    }

    fn carry(&mut self, from: SocketAddr, to: SocketAddr, packet: &[u8]) {
        let Some(port) = self.ports.get_mut(&to) else {
            self.counters.unreachable += 1;
            return;
        };
        let mut departure = self.now;
        if let Some(rate) = self.config.bytes_per_second {
            let rate = u128::from(rate);
            let wait = port.idle_at.saturating_sub(self.now);
            let queued = (wait.as_nanos() * rate).div_ceil(NANOS_PER_SECOND);
            if queued + packet.len() as u128 > self.config.queue_bytes as u128 {
                self.counters.dropped += 1;
                return;
            }
            departure += wait + nanoseconds((packet.len() as u128 * NANOS_PER_SECOND).div_ceil(rate));
            port.idle_at = departure;
        }
        let arrival = departure + self.config.latency + self.random.duration_below(self.config.jitter);
        port.last_arrival = port.last_arrival.max(arrival);
        port.packets.push_back(Flying { arrival: port.last_arrival, from, bytes: packet.into() });
        self.counters.carried += 1;
    }
}

fn nanoseconds(count: u128) -> Duration {
    Duration::from_nanos(u64::try_from(count).expect("less than five hundred years"))
}

impl SimulatedLink {
    /// Takes what has arrived by one list: by each in turn, as one who has several sockets looks at them.
    fn take_arrived(&mut self) -> VecDeque<Flying> {
        let mut state = self.network.lock();
        let (now, list_at) = (state.now, state.config.list_at);
        let port = state.ports.get_mut(&self.local).expect("a link has its port until it is dropped");
        let list = |packet: &Flying| {
            let named = list_at.and_then(|at| packet.bytes.get(at)).copied();
            named.filter(|list| *list <= ListField::COUNT_MAX).unwrap_or(0)
        };
        let arrived = port.packets.partition_point(|packet| packet.arrival <= now);
        let later = port.packets.split_off(arrived);
        let lists = port.packets.iter().map(list);
        let next = lists.clone().filter(|list| *list > self.list).min();
        self.list = next.or_else(|| lists.min()).unwrap_or(0);
        let (taken, left) = port.packets.drain(..).partition(|packet| list(packet) == self.list);
        port.packets = left;
        port.packets.extend(later);
        taken
    }

    /// Puts back what was taken and does not fit.
    fn give_back(&mut self, packets: VecDeque<Flying>) {
        let mut state = self.network.lock();
        let port = state.ports.get_mut(&self.local).expect("a link has its port until it is dropped");
        packets.into_iter().rev().for_each(|packet| port.packets.push_front(packet));
    }

    /// Puts packets into the inbox, as many as fit; how many.
    fn fill(&mut self, inbox: &mut Inbox, mut packets: VecDeque<Flying>) -> usize {
        while let Some(packet) = packets.front() {
            match inbox.deliver(packet.from, &packet.bytes) {
                Ok(()) => self.counters.bytes_received += packet.bytes.len() as u64,
                Err(DeliverError::TooLong { .. }) => self.counters.truncated += 1,
                Err(DeliverError::Full { .. }) => break,
            }
            packets.pop_front();
        }
        self.give_back(packets);
        self.note_received(inbox)
    }

    fn note_received(&mut self, inbox: &mut Inbox) -> usize {
        inbox.note_way(self.way());
        self.counters.packets_received += inbox.len() as u64;
        inbox.len()
    }

    fn way(&self) -> usize {
        if self.list == 0 { 0 } else { FIRST_LIST + usize::from(self.list) - 1 }
    }
}

impl Link for SimulatedLink {
    fn local_address(&self) -> SocketAddr {
        self.local
    }

    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        let mut state = self.network.lock();
        for (index, burst) in bursts.iter().enumerate() {
            let bytes = burst.packet_bytes_max();
            let (mtu, oversize) = state.mtu(self.local);
            if bytes > mtu && oversize == Oversize::Refused {
                return if index == 0 { Err(SendError::TooLarge { bytes }) } else { Ok(index) };
            }
            for packet in burst.packets() {
                match packet.len() <= mtu {
                    true => state.carry(self.local, burst.to, packet),
                    false => state.counters.oversized += 1,
                }
                self.counters.packets_sent += 1;
                self.counters.bytes_sent += packet.len() as u64;
            }
        }
        Ok(bursts.len())
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        inbox.clear();
        let packets = self.take_arrived();
        Ok(self.fill(inbox, packets))
    }

    /// Packets of one sender and one size that have arrived are a batch, as a kernel makes them.
    fn receive_guided(&mut self, inbox: &mut Inbox, guide: &mut dyn Guide) -> Result<usize, ReceiveError> {
        inbox.clear();
        let mut packets = self.take_arrived();
        let Some(first) = packets.front() else { return Ok(0) };
        let (mut advice, mut looked) = (guide.advise(self.way(), None), false);
        if matches!(advice, Advice::Look) {
            self.counters.looks_ahead += 1;
            advice = guide.advise(self.way(), Some(&first.bytes[..first.bytes.len().min(LOOKED_AT)]));
            looked = true;
        }
        let Advice::Land(mut landing) = advice else { return Ok(self.fill(inbox, packets)) };
        let (from, segment, mut batch, mut count) = (first.from, first.bytes.len(), Vec::new(), 0);
        for packet in packets.iter().take(BATCH_PACKETS_MAX) {
            let fits = packet.bytes.len() <= segment && batch.len() + packet.bytes.len() <= BURST_BYTES_MAX;
            if packet.from != from || !fits || packet.bytes.is_empty() && count > 0 {
                break;
            }
            batch.extend_from_slice(&packet.bytes);
            count += 1;
            if packet.bytes.len() < segment {
                break;
            }
        }
        packets.drain(..count);
        match inbox.land(&mut landing, from, &batch, segment, looked) {
            true => self.counters.bytes_received += batch.len() as u64,
            false => self.counters.truncated += 1,
        }
        self.give_back(packets);
        Ok(self.note_received(inbox))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn burst_bytes_max(&self) -> usize {
        BURST_BYTES_MAX
    }

    fn counters(&self) -> LinkCounters {
        self.counters
    }
}

impl Drop for SimulatedLink {
    fn drop(&mut self) {
        self.network.lock().ports.remove(&self.local);
    }
}
