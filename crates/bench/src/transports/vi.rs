//! The library itself: two virtual interfaces, each on a completion queue, used as a program would.
//!
//! Where the library copies payloads in, they come from one buffer again and again, as they do for
//! `raw-ring`. Where it leaves them in place (`vi` from some size on), each message of a burst is
//! another frame that was filled before the clock started: what the receiver copies is then in the
//! sender's cache, not in its own, and the application's part of the work is left out for everybody.
//! Of `vi-referenced`'s frames only the first line is written and read, within the burst.

use super::{Contestant, Ordinary, Transport};
use crate::BenchError;
use crate::pair::{Link, PATIENCE, Patience, Role};
use crate::trace::Pulse;
use highwire::{
    Buffer, ClusterKey, Completion, CompletionQueue, Config, Driver, Impairments, Keys, ListenError, Message, Nic,
    Operation, Path, Payload, PostError, PulseRecord, Pulses, Receive, SharedBuffer, Vi, ViListener, ViOptions,
    WireConfig,
};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

pub(super) fn meet(contestant: Contestant, link: &mut Link, size_max: usize) -> Result<Box<dyn Transport>, BenchError> {
    let nic = Nic::open().map_err(BenchError::library(contestant.name(), "opening a Nic"))?;
    let ends = Ends::meet(contestant, &nic, link, 1)?.pop().ok_or(BenchError::NobodyLeft)?;
    let interface = Interface::new(contestant, nic, ends, link.spinning, size_max, POSTED)?;
    link.meet()?;
    Ok(Box::new(interface))
}

/// The same between hosts.
pub(super) fn meet_over_udp(
    contestant: Contestant,
    link: &mut Link,
    size_max: usize,
) -> Result<Box<dyn Transport>, BenchError> {
    let nic = nic_over_udp(contestant)?;
    let count = if size_max > SMALL_BYTES_MAX { 2 } else { 1 };
    let mut ends = Ends::meet(contestant, &nic, link, count)?;
    let interface = |ends, bytes, posted| Interface::new(contestant, nic.clone(), ends, link.spinning, bytes, posted);
    let large = if count == 2 { ends.pop() } else { None };
    let large = large.map(|ends| interface(ends, size_max, POSTED_LARGE)).transpose()?;
    let small = ends.pop().ok_or(BenchError::NobodyLeft)?;
    let small = interface(small, size_max.min(SMALL_BYTES_MAX), POSTED_SMALL)?;
    link.meet()?;
    Ok(Box::new(BySize { small, large }))
}

/// A Nic that sends over UDP, driven by whoever waits for it.
pub(crate) fn nic_over_udp(contestant: Contestant) -> Result<Nic, BenchError> {
    let keys = match contestant {
        // What it protects is worth nothing; both sides just have to have the same.
        Contestant::ViUdpSealed | Contestant::SockUdpSealed | Contestant::UdpSealed => {
            Keys::new(ClusterKey::from_random([1; 32]))
        }
        _ => Keys::insecure(),
    };
    let impairments = match contestant {
        Contestant::ViUdpImpaired0 => Some((Impairments::default(), SEED)),
        Contestant::ViUdpImpaired1 => {
            Some((Impairments { loss: 0.01, reordering: 0.01, ..Impairments::default() }, SEED))
        }
        _ => None,
    };
    let wire = WireConfig { keys, insecure: true, driver: Driver::Caller, impairments, ..WireConfig::default() };
    // Who waits asleep is to sleep.
    let config = Config { spin: Some(Duration::ZERO), ..Config::default() };
    Nic::with_wire(config, wire).map_err(BenchError::library(contestant.name(), "opening a Nic over UDP"))
}

/// One side's end of a connected virtual interface.
struct Interface {
    name: &'static str,
    nic: Nic,
    vi: Vi,
    queue: CompletionQueue,
    spinning: bool,
    /// The queue said that the VI has something, and it was not found empty since.
    hot: bool,
    in_place: bool,
    chooses: bool,
    /// The sender keeps a message until the receiver has said that it has it.
    over_udp: bool,
    /// Messages posted for sending that the library has not copied yet, or still keeps.
    uncopied: usize,
    /// Buffers to send from, for messages of `size`; the token of a send is its size.
    frames: VecDeque<Buffer>,
    size: usize,
    /// Between hosts: one buffer for each size.
    shared: BTreeMap<usize, SharedBuffer>,
    /// The buffers of other sizes.
    parked: BTreeMap<usize, VecDeque<Buffer>>,
    /// Bytes that the next message must have.
    expected: usize,
    /// Messages that have arrived and were not asked for yet.
    arrived: usize,
    /// Receives to be posted again.
    spare: Vec<Receive>,
    ordinary: Ordinary,
}

/// A virtual interface and the queue that watches it.
struct Ends {
    vi: Vi,
    queue: CompletionQueue,
}

impl Ends {
    /// So many of them, through one listener.
    fn meet(contestant: Contestant, nic: &Nic, link: &mut Link, count: usize) -> Result<Vec<Ends>, BenchError> {
        let name = contestant.name();
        let queue = |_| nic.completion_queue().map_err(BenchError::library(name, "making a completion queue"));
        let queues = (0..count).map(queue).collect::<Result<Vec<_>, _>>()?;
        let at = if contestant.needs_tending() { Some(link.address(contestant.wire())?) } else { None };
        let choices: Vec<ViOptions<'_>> = queues.iter().map(|queue| options(contestant).queue(queue)).collect();
        let vis = connect_many(name, nic, link, at, &choices)?;
        Ok(vis.into_iter().zip(queues).map(|(vi, queue)| Ends { vi, queue }).collect())
    }
}

impl Interface {
    fn new(
        contestant: Contestant,
        nic: Nic,
        ends: Ends,
        spinning: bool,
        size_max: usize,
        posted: usize,
    ) -> Result<Interface, BenchError> {
        let Ends { vi, queue } = ends;
        let name = contestant.name();
        let over_udp = contestant.needs_tending();
        let in_place = contestant == Contestant::ViReferenced;
        let mut interface = Interface {
            name,
            nic,
            vi,
            queue,
            spinning,
            hot: true,
            in_place,
            chooses: contestant == Contestant::Vi,
            over_udp,
            uncopied: 0,
            frames: VecDeque::new(),
            size: 0,
            shared: BTreeMap::new(),
            parked: BTreeMap::new(),
            expected: 0,
            arrived: 0,
            spare: Vec::new(),
            ordinary: Ordinary::new(),
        };
        if in_place {
            interface.spare.extend((0..POSTED_IN_PLACE).map(|_| Receive::new(0).in_place()));
        } else {
            for buffer in interface.buffers(size_max, posted)? {
                interface.spare.push(Receive::new(0).into(buffer));
            }
        }
        interface.restock()?;
        Ok(interface)
    }

    fn buffers(&self, size: usize, count: usize) -> Result<VecDeque<Buffer>, BenchError> {
        let pool = self.nic.pool(size, count).map_err(BenchError::library(self.name, "making a pool"))?;
        let mut buffers = VecDeque::new();
        for _ in 0..count {
            let mut buffer = pool.frame().map_err(BenchError::library(self.name, "taking a frame"))?;
            buffer.set_len(size);
            buffer.fill(1);
            buffers.push_back(buffer);
        }
        Ok(buffers)
    }

    /// True if a payload of this size stays in the application's memory, from where the receiver
    /// copies all of it.
    fn stays(&self, size: usize) -> bool {
        self.chooses && size >= self.nic.config().reference_from
    }

    /// True if the library copies a posted payload of this size into its payload area.
    #[inline]
    fn is_copied(&self, size: usize) -> bool {
        !self.in_place && !self.stays(size)
    }

    /// Handles the next completion: what the VI has, or else what the completion queue waits for.
    #[inline(always)]
    fn next(&mut self) -> Result<(), BenchError> {
        let mut patience = Patience::default();
        loop {
            // Between hosts each look is a system call, whether at the queue or at the VI.
            if self.hot || self.over_udp && self.spinning {
                if let Some(done) = self.vi.poll() {
                    return self.handle(done);
                }
                self.hot = false;
            }
            if !self.spinning {
                self.queue.wait(PATIENCE).map_err(BenchError::library(self.name, "waiting"))?;
                self.hot = true;
            } else if !self.over_udp && self.queue.poll().is_some() {
                self.hot = true;
            } else {
                patience.spin()?;
            }
        }
    }

    /// Puts everything back to where it is needed next.
    #[inline(always)]
    fn handle(&mut self, done: Completion) -> Result<(), BenchError> {
        let Completion { token, operation, status, length, payload, .. } = done;
        if let Err(failure) = status {
            return Err(BenchError::library(self.name, "an operation")(failure));
        }
        if operation == Operation::Receive {
            assert!(length == self.expected, "a message of another length arrived");
            self.arrived += 1;
        }
        match payload {
            Payload::InPlace(payload) => {
                let mut line = [0; LINE];
                if length >= LINE {
                    payload.copy_to(0, &mut line);
                } else {
                    payload.copy_to(0, &mut line[..length]);
                }
                std::hint::black_box(&line);
                self.vi.receiver().release(payload);
                return self.post(Receive::new(0).in_place());
            }
            Payload::Buffer(buffer) if operation == Operation::Receive => self.spare.push(Receive::new(0).into(buffer)),
            Payload::Buffer(buffer) => {
                let size = token as usize;
                if self.is_copied(size) {
                    self.uncopied -= 1;
                }
                if size == self.size {
                    self.frames.push_back(buffer);
                } else {
                    self.parked.entry(size).or_default().push_back(buffer);
                }
            }
            // A copy of bytes was sent.
            _ if self.over_udp && operation == Operation::Send => self.uncopied -= 1,
            _ => {}
        }
        Ok(())
    }

    #[inline(always)]
    fn post(&mut self, receive: Receive) -> Result<(), BenchError> {
        self.vi.post_recv(receive).map_err(BenchError::library(self.name, "posting a receive"))
    }

    /// Posts again what was received into.
    #[inline(always)]
    fn restock(&mut self) -> Result<(), BenchError> {
        while let Some(receive) = self.spare.pop() {
            self.post(receive)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn send(&mut self, size: usize) -> Result<(), BenchError> {
        if self.over_udp {
            self.send_over_udp(size)
        } else if size <= SEND_BYTES_MAX && !self.in_place {
            self.send_copy(size)
        } else {
            self.send_buffer(size)
        }
    }

    #[cold]
    #[inline(never)]
    fn send_over_udp(&mut self, size: usize) -> Result<(), BenchError> {
        while self.uncopied >= UNDER_WAY_MAX {
            self.give_way()?;
        }
        if size <= SEND_BYTES_MAX { self.send_copy(size) } else { self.send_shared(size) }
    }

    #[inline(always)]
    fn send_copy(&mut self, size: usize) -> Result<(), BenchError> {
        let mut patience = Patience::default();
        loop {
            match self.vi.send_bytes(size as u64, self.ordinary.of(size)) {
                Ok(()) => {
                    self.uncopied += usize::from(self.over_udp);
                    return Ok(());
                }
                // A refused copy leaves nothing behind that could be waited for; a posted one does.
                Err(PostError::NoRoom { .. }) if !self.spinning => return self.send_buffer(size),
                Err(PostError::NoRoom { .. }) => self.put_away()?,
                Err(error) => return Err(BenchError::library(self.name, "sending")(error)),
            }
            patience.spin()?;
        }
    }

    #[inline(always)]
    fn send_buffer(&mut self, size: usize) -> Result<(), BenchError> {
        if size != self.size {
            self.change_size(size)?;
        }
        let mut frame = loop {
            match self.frames.pop_front() {
                Some(frame) => break frame,
                None => self.give_way()?,
            }
        };
        if self.in_place {
            match frame.first_chunk_mut::<LINE>() {
                Some(line) => line.fill(2),
                None => frame.fill(2),
            }
        } else if self.is_copied(size) {
            self.uncopied += 1;
        }
        let message = Message::new(size as u64).payload(frame);
        self.vi.post_send(message).map_err(BenchError::library(self.name, "posting a send"))
    }

    /// Sends from one buffer again and again, as TCP does.
    fn send_shared(&mut self, size: usize) -> Result<(), BenchError> {
        while self.uncopied >= self.frames_of(size) {
            self.give_way()?;
        }
        let shared = match self.shared.get(&size) {
            Some(shared) => shared.clone(),
            None => {
                let buffer = self.buffers(size, 1)?.pop_back().ok_or(BenchError::NobodyLeft)?;
                self.shared.entry(size).or_insert(buffer.share()).clone()
            }
        };
        self.uncopied += 1;
        let message = Message::new(size as u64).shared(shared);
        self.vi.post_send(message).map_err(BenchError::library(self.name, "posting a send"))
    }

    /// Takes out the buffers for messages of another size.
    #[cold]
    fn change_size(&mut self, size: usize) -> Result<(), BenchError> {
        let frames = match self.parked.remove(&size) {
            Some(frames) => frames,
            None => self.buffers(size, self.frames_of(size))?,
        };
        let parked = std::mem::replace(&mut self.frames, frames);
        self.parked.insert(std::mem::replace(&mut self.size, size), parked);
        Ok(())
    }

    /// Buffers to send messages of a size from: what may be under way at a time.
    fn frames_of(&self, size: usize) -> usize {
        match self.over_udp {
            _ if self.in_place => FRAMES_IN_PLACE,
            true if size <= SMALL_BYTES_MAX => POSTED_SMALL,
            true => POSTED_LARGE,
            false => 2,
        }
    }

    /// Puts away what has completed.
    fn put_away(&mut self) -> Result<(), BenchError> {
        while let Some(done) = self.vi.poll() {
            self.handle(done)?;
        }
        Ok(())
    }

    /// Waits for a completion and puts it away.
    #[cold]
    fn give_way(&mut self) -> Result<(), BenchError> {
        self.hot = true;
        self.next()
    }

    /// Stays until everything sent is copied: nobody else moves the rest of a message that waits for
    /// room.
    fn settle(&mut self) -> Result<(), BenchError> {
        while self.uncopied > 0 {
            self.give_way()?;
        }
        Ok(())
    }

    /// Waits for one message.
    #[inline(always)]
    fn receive(&mut self) -> Result<(), BenchError> {
        while self.arrived == 0 {
            self.next()?;
        }
        self.arrived -= 1;
        Ok(())
    }
}

impl Transport for Interface {
    fn prepare(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        if !self.stays(size) {
            return Ok(());
        }
        // Frames of the last burst are back by now, but for those whose end was not noticed yet.
        self.put_away()?;
        if size != self.size {
            self.change_size(size)?;
        }
        if let Some(missing) = count.checked_sub(self.frames.len()).filter(|missing| *missing > 0) {
            let more = self.buffers(size, missing)?;
            self.frames.extend(more);
        }
        let bytes = self.ordinary.of(size);
        for frame in self.frames.iter_mut().take(count) {
            frame.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.expected = size;
        for _ in 0..count {
            self.send(size)?;
            self.restock()?;
            self.receive()?;
        }
        self.restock()
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.expected = size;
        for _ in 0..count {
            self.receive()?;
            self.send(size)?;
            self.restock()?;
        }
        self.settle()
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        // The acknowledgement.
        self.expected = 1;
        for sent in 0..count {
            self.send(size)?;
            if sent % SENDS_BETWEEN_POLLS == 0 {
                self.put_away()?;
            }
        }
        self.receive()?;
        self.restock()
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.expected = size;
        for _ in 0..count {
            self.receive()?;
            self.restock()?;
        }
        self.send(1)?;
        self.settle()
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.spinning = !asleep;
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        self.put_away()?;
        Ok(self.uncopied == 0)
    }

    fn record_pulses(&mut self, capacity: usize) {
        self.vi.sender().record_pulses(capacity);
        self.vi.receiver().record_pulses(capacity);
    }

    fn take_pulses(&mut self, role: Role) -> Vec<Pulse> {
        let records = match role {
            Role::Driver => self.vi.sender().take_pulses(),
            Role::Peer => self.vi.receiver().take_pulses(),
        };
        let pulse = |record: PulseRecord| Pulse {
            message: record.message,
            bytes: record.bytes as u64,
            started: record.started,
            ended: record.ended,
        };
        records.into_iter().map(pulse).collect()
    }
}

/// Between hosts, receives must lie ready for all that is under way: many for small messages, few for
/// large ones, or they would not stay in the caches. So there is a VI for each.
struct BySize {
    small: Interface,
    large: Option<Interface>,
}

impl BySize {
    fn of(&mut self, size: usize) -> &mut Interface {
        match &mut self.large {
            Some(large) if size > SMALL_BYTES_MAX => large,
            _ => &mut self.small,
        }
    }
}

impl Transport for BySize {
    fn prepare(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.of(size).prepare(size, count)
    }

    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.of(size).ping(size, count)
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.of(size).pong(size, count)
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.of(size).pour(size, count)
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.of(size).drain(size, count)
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.small.wait_asleep(asleep);
        self.large.iter_mut().for_each(|large| large.wait_asleep(asleep));
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        let large = self.large.as_mut().map_or(Ok(true), Interface::tend)?;
        Ok(self.small.tend()? && large)
    }
}

fn options<'a>(contestant: Contestant) -> ViOptions<'a> {
    let buffered = |pulses| ViOptions::new().path(Path::Buffered).pulses(pulses);
    match contestant {
        Contestant::ViBuffered | Contestant::Adaptive => buffered(Pulses::Adaptive),
        Contestant::Fixed1408 => buffered(Pulses::Fixed(1408)),
        Contestant::StoreAndForward => buffered(Pulses::Whole),
        Contestant::ViReferenced => ViOptions::new().path(Path::Referenced),
        _ => ViOptions::new(),
    }
}

/// Connects this process's ends of `count` VIs; the driver listens, at its own address where it has one
/// on a network.
pub(crate) fn connect_many(
    name: &'static str,
    nic: &Nic,
    link: &mut Link,
    at: Option<IpAddr>,
    options: &[ViOptions<'_>],
) -> Result<Vec<Vi>, BenchError> {
    match link.role {
        Role::Driver => {
            // Given up again as soon as all have met.
            let listener = match at {
                Some(address) => nic.listen(&format!("udp:{}", SocketAddr::new(address, 0))),
                None => listen(nic),
            };
            let listener = listener.map_err(BenchError::library(name, "listening"))?;
            link.tell(&listener.address(), &[])?;
            let accept = |options: &ViOptions<'_>| {
                listener.accept_with(PATIENCE, options).map_err(BenchError::library(name, "accepting"))
            };
            options.iter().map(accept).collect()
        }
        Role::Peer => {
            let (address, _) = link.hear::<String>()?;
            let connect = |options: &ViOptions<'_>| {
                nic.connect_with(&address, options).map_err(BenchError::library(name, "connecting"))
            };
            options.iter().map(connect).collect()
        }
    }
}

/// Listens under the first name that nobody else has: few names, so that runs that were killed leave
/// few behind.
fn listen(nic: &Nic) -> Result<ViListener, ListenError> {
    let mut number = 0;
    loop {
        match nic.listen(&format!("shm:bench-{number}")) {
            Err(ListenError::InUse { .. }) if number < NAMES_MAX => number += 1,
            listening => return listening,
        }
    }
}

pub(super) const NAMES_MAX: u32 = 64;
const LINE: usize = 64;

/// What decides which packets are lost.
const SEED: u64 = 1;
/// Receives posted ahead: one is filled while the other is handed back.
const POSTED: usize = 2;
const POSTED_IN_PLACE: usize = 64;

/// Messages under way between hosts, and receives posted for them.
const POSTED_SMALL: usize = 64;
const POSTED_LARGE: usize = 2;
const SMALL_BYTES_MAX: usize = 64 << 10;
/// Most messages that the receiver has not said to have: a little less than a VI takes.
const UNDER_WAY_MAX: usize = 1000;

/// Up to here a program sends bytes; beyond, it posts registered buffers.
const SEND_BYTES_MAX: usize = 4096;
const SENDS_BETWEEN_POLLS: usize = 64;

/// Frames of `vi-referenced`.
const FRAMES_IN_PLACE: usize = 128;
