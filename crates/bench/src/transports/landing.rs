//! Streams of messages of 1 MiB, received in the way that is measured: where payloads are expected, aside, after a
//! look, or where they do not belong. The peer receives and listens, at one address for all; the driver sends,
//! from one Nic or from several, each of which has a port and a session of its own.
//!
//! Each message is stamped by its sender in three words, the first, the last and one that lies elsewhere each time,
//! and the receiver checks them: whatever landed in the wrong place ends the measurement.

use super::{Contestant, Transport};
use crate::BenchError;
use crate::network::Wire;
use crate::pair::{Link, PATIENCE, Patience, Role};
use highwire::{
    Buffer, Completion, CompletionQueue, Config, Driver, Keys, Landings, Message, Nic, Operation, PacketSize, Payload,
    PostError, Receive, Speculation, Vi, ViOptions, WireConfig,
};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Bytes of every message.
pub(crate) const MESSAGE_BYTES: usize = 1 << 20;

/// How many receives of a message are used in turn, where the destination is to have so many bytes.
pub(crate) fn buffers(destination: usize) -> usize {
    match destination / MESSAGE_BYTES {
        0 | 1 => BUFFERS_USUAL,
        buffers => buffers,
    }
}

pub(super) fn meet(contestant: Contestant, link: &mut Link, size_max: usize) -> Result<Box<dyn Transport>, BenchError> {
    let met: Box<dyn Transport> = match link.role {
        Role::Driver => Box::new(Senders::meet(contestant, link)?),
        Role::Peer => Box::new(Receiver::meet(contestant, link, size_max)?),
    };
    link.meet()?;
    Ok(met)
}

fn nic(contestant: Contestant) -> Result<Nic, BenchError> {
    let speculation = match contestant {
        Contestant::Copying => Speculation::Never,
        Contestant::Peek => Speculation::AlwaysLook,
        Contestant::AlwaysWrong => Speculation::AlwaysWrong,
        _ => Speculation::Guess,
    };
    let usual = WireConfig::default();
    let lists = if contestant == Contestant::FourSendersNoLists { 0 } else { usual.lists };
    let wire = WireConfig {
        keys: Keys::insecure(),
        insecure: true,
        driver: Driver::Caller,
        speculation,
        lists,
        // Loopback would take packets of 64 KiB, each of which is a batch by itself; and a search that is misled by a
        // busy machine would leave some contestants with others than the rest.
        packet_size: PacketSize::Fixed(PACKET_BYTES),
        ..usual
    };
    // Who waits asleep is to sleep.
    let config = Config { spin: Some(Duration::ZERO), ..Config::default() };
    Nic::with_wire(config, wire).map_err(BenchError::library(contestant.name(), "opening a Nic over UDP"))
}

/// Senders of large messages.
fn senders(contestant: Contestant) -> usize {
    match contestant {
        Contestant::FourSenders | Contestant::FourSendersNoLists => 4,
        _ => 1,
    }
}

/// Messages go in turn to every sender: how many of `count` from `first` on are the business of this one.
fn share(first: usize, count: usize, sender: usize, senders: usize) -> usize {
    let before = |message: usize| (message + senders - 1 - sender) / senders;
    before(first + count) - before(first)
}

/// Where message `number` is stamped.
fn places(number: u64) -> [usize; 3] {
    let elsewhere = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    [0, WORD * (elsewhere as usize % (MESSAGE_BYTES / WORD)), MESSAGE_BYTES - WORD]
}

fn stamp(sender: usize, number: u64, place: usize) -> u64 {
    ((number << 8 | sender as u64) ^ (place as u64) << 40).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

fn write_stamps(message: &mut [u8], sender: usize, number: u64) {
    for place in places(number) {
        message[place..place + WORD].copy_from_slice(&stamp(sender, number, place).to_le_bytes());
    }
}

fn check_stamps(name: &'static str, message: &[u8], sender: usize, number: u64) -> Result<(), BenchError> {
    for place in places(number) {
        let expected = stamp(sender, number, place).to_le_bytes();
        if message.get(place..place + WORD) != Some(&expected[..]) {
            return Err(BenchError::Contents { contestant: name, sender, message: number, place });
        }
    }
    Ok(())
}

/// The driver's end: everybody who sends.
struct Senders {
    name: &'static str,
    spinning: bool,
    senders: Vec<Sender>,
    interferer: Option<Interferer>,
    /// Messages of all of them so far.
    messages: usize,
    /// The receiver said that it has everything.
    acknowledged: bool,
}

struct Sender {
    vi: Vi,
    queue: CompletionQueue,
    frames: VecDeque<Buffer>,
    /// Messages to be posted, as soon as there are frames.
    left: usize,
    /// The number of the next one.
    number: u64,
    nic: Nic,
}

impl Senders {
    fn meet(contestant: Contestant, link: &mut Link) -> Result<Senders, BenchError> {
        let name = contestant.name();
        let (address, _) = link.hear::<String>()?;
        let connect = |nic: &Nic, queue: &CompletionQueue| {
            let options = ViOptions::new().queue(queue);
            nic.connect_with(&address, &options).map_err(BenchError::library(name, "connecting"))
        };
        let mut senders = Vec::new();
        for _ in 0..self::senders(contestant) {
            let nic = nic(contestant)?;
            let queue = queue(name, &nic)?;
            let mut vi = connect(&nic, &queue)?;
            // For the word that everything is there.
            for buffer in pool(name, &nic, WORD, 2)? {
                post(name, &mut vi, buffer)?;
            }
            let frames = pool(name, &nic, MESSAGE_BYTES, UNDER_WAY)?;
            senders.push(Sender { vi, queue, frames, left: 0, number: 0, nic });
        }
        let interfering = match (contestant, senders.first()) {
            (Contestant::Interference, _) => Some(nic(contestant)?),
            (Contestant::InterferenceWithin, Some(sender)) => Some(sender.nic.clone()),
            _ => None,
        };
        let interferer = match interfering {
            Some(nic) => {
                let queue = queue(name, &nic)?;
                Some(Interferer {
                    vi: connect(&nic, &queue)?,
                    sent: 0,
                    sent_before: 0,
                    under_way: 0,
                    owed: 0,
                    _queue: queue,
                    _nic: nic,
                })
            }
            None => None,
        };
        Ok(Senders { name, spinning: link.spinning, senders, interferer, messages: 0, acknowledged: false })
    }

    /// Posts what there are frames for and takes what is done: how many messages the receiver has since.
    fn turn(&mut self) -> Result<usize, BenchError> {
        let mut delivered = 0;
        for (place, sender) in self.senders.iter_mut().enumerate() {
            while sender.left > 0 {
                let Some(mut frame) = sender.frames.pop_front() else { break };
                write_stamps(&mut frame, place, sender.number);
                (sender.left, sender.number) = (sender.left - 1, sender.number + 1);
                let posted = sender.vi.post_send(Message::new(0).payload(frame));
                posted.map_err(BenchError::library(self.name, "posting a send"))?;
            }
            while let Some(done) = sender.vi.poll() {
                match sound(self.name, done)? {
                    Completion { operation: Operation::Send, payload: Payload::Buffer(frame), .. } => {
                        sender.frames.push_back(frame);
                        delivered += 1;
                    }
                    Completion { operation: Operation::Receive, payload: Payload::Buffer(word), .. } => {
                        self.acknowledged = true;
                        post(self.name, &mut sender.vi, word)?;
                    }
                    _ => {}
                }
            }
        }
        if let Some(interferer) = &mut self.interferer {
            interferer.look(self.name)?;
        }
        Ok(delivered)
    }

    /// Nothing was there.
    fn pause(&mut self, patience: &mut Patience) -> Result<(), BenchError> {
        match &mut self.senders[..] {
            _ if self.spinning => patience.spin(),
            [only] if self.interferer.is_none() => {
                only.queue.wait(PATIENCE).map(drop).map_err(BenchError::library(self.name, "waiting"))
            }
            // Each Nic has a queue of its own, and none may be kept waiting by another.
            _ => {
                std::thread::yield_now();
                patience.spin()
            }
        }
    }
}

impl Transport for Senders {
    fn ping(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("messages go one way here")
    }

    fn pong(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("messages go one way here")
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        let all = self.senders.len();
        for (place, sender) in self.senders.iter_mut().enumerate() {
            sender.left += share(self.messages, count, place, all);
        }
        self.messages += count;
        if let Some(interferer) = &mut self.interferer {
            (interferer.owed, interferer.sent_before) = (0, interferer.sent);
        }
        let mut pace = Pace::new(size);
        let mut patience = Patience::default();
        self.acknowledged = false;
        while !self.acknowledged {
            let delivered = self.turn()?;
            if let Some(interferer) = &mut self.interferer {
                interferer.keep_up(self.name, pace.due(delivered))?;
            }
            if delivered > 0 {
                patience = Patience::default();
            } else if !self.acknowledged {
                self.pause(&mut patience)?;
            }
        }
        Ok(())
    }

    fn drain(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("the driver sends")
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.spinning = !asleep;
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        self.turn()?;
        let rests = self.senders.iter().all(|sender| sender.frames.len() == UNDER_WAY);
        Ok(rests && self.interferer.as_ref().is_none_or(|interferer| interferer.under_way == 0))
    }

    fn interfering(&self) -> u64 {
        self.interferer.as_ref().map_or(0, |interferer| interferer.sent - interferer.sent_before)
    }
}

/// Sends small messages among the packets of large ones.
struct Interferer {
    vi: Vi,
    /// All of its messages so far, and those before this burst.
    sent: u64,
    sent_before: u64,
    under_way: usize,
    /// Messages that are due and not sent.
    owed: usize,
    _queue: CompletionQueue,
    _nic: Nic,
}

impl Interferer {
    /// Sends what is due, as far as the receiver has room for it.
    fn keep_up(&mut self, name: &'static str, due: usize) -> Result<(), BenchError> {
        self.owed += due;
        while self.owed > 0 && self.under_way < SMALL_UNDER_WAY {
            match self.vi.send_bytes(0, &self.sent.to_le_bytes()) {
                Ok(()) => {
                    self.sent += 1;
                    self.under_way += 1;
                    self.owed -= 1;
                }
                Err(PostError::NoRoom { .. }) => break,
                Err(error) => return Err(BenchError::library(name, "sending")(error)),
            }
        }
        Ok(())
    }

    fn look(&mut self, name: &'static str) -> Result<(), BenchError> {
        while let Some(done) = self.vi.poll() {
            sound(name, done)?;
            self.under_way -= 1;
        }
        Ok(())
    }
}

/// When interfering messages are due: evenly among the packets of a stream. Of these only the end of each message
/// is seen; between two ends, time tells how far it has come.
struct Pace {
    /// Interfering messages for each message of the stream.
    each: f64,
    delivered: f64,
    /// When the last message of the stream was delivered, and how long it took on average.
    last: Instant,
    usual: Option<f64>,
    told: f64,
}

impl Pace {
    fn new(per_100_000: usize) -> Pace {
        let each = per_100_000 as f64 * MESSAGE_BYTES as f64 / PAYLOAD_BYTES / 100_000.0;
        Pace { each, delivered: 0.0, last: Instant::now(), usual: None, told: 0.0 }
    }

    /// How many are due now that so many more messages of the stream were delivered.
    fn due(&mut self, delivered: usize) -> usize {
        let since = self.last.elapsed().as_secs_f64();
        if delivered > 0 {
            let took = since / delivered as f64;
            self.usual = Some(self.usual.map_or(took, |usual| usual * 0.75 + took * 0.25));
            self.delivered += delivered as f64;
            self.last = Instant::now();
        }
        let begun = self.usual.map_or(0.0, |usual| (self.last.elapsed().as_secs_f64() / usual).min(1.0));
        let due = ((self.delivered + begun) * self.each - self.told).floor().max(0.0);
        self.told += due;
        due as usize
    }
}

/// The peer's end: one listener, and a VI for everybody who sends.
struct Receiver {
    name: &'static str,
    spinning: bool,
    queue: CompletionQueue,
    streams: Vec<Stream>,
    /// Where small messages come that nobody counts.
    small: Option<(Vi, u64)>,
    /// Messages of all streams that were prepared for so far.
    messages: usize,
    arrived: usize,
    /// Words to the sender that it does not have yet.
    under_way: usize,
    _nic: Nic,
}

struct Stream {
    vi: Vi,
    /// The number of the next message.
    number: u64,
    /// Messages for which receives are still to be posted: none is left posted when a trial is over, so that the
    /// next one may have another destination.
    due: usize,
    /// The buffers of this destination, used in turn, and all others.
    turn: VecDeque<Buffer>,
    others: VecDeque<Buffer>,
}

impl Stream {
    fn restock(&mut self, name: &'static str) -> Result<(), BenchError> {
        while self.due > 0 {
            let Some(buffer) = self.turn.pop_front() else { break };
            post(name, &mut self.vi, buffer)?;
            self.due -= 1;
        }
        Ok(())
    }
}

impl Receiver {
    fn meet(contestant: Contestant, link: &mut Link, size_max: usize) -> Result<Receiver, BenchError> {
        let name = contestant.name();
        let nic = nic(contestant)?;
        let queue = queue(name, &nic)?;
        let at = SocketAddr::new(link.address(Wire::Whole)?, 0);
        let listener = nic.listen(&format!("udp:{at}")).map_err(BenchError::library(name, "listening"))?;
        link.tell(&listener.address(), &[])?;
        let accept = || {
            let options = ViOptions::new().queue(&queue);
            listener.accept_with(PATIENCE, &options).map_err(BenchError::library(name, "accepting"))
        };
        let buffers = if contestant.has_destination() { buffers(size_max).max(BUFFERS_USUAL) } else { BUFFERS_USUAL };
        let mut streams = Vec::new();
        for _ in 0..senders(contestant) {
            let (vi, others) = (accept()?, pool(name, &nic, MESSAGE_BYTES, buffers)?);
            streams.push(Stream { vi, number: 0, due: 0, turn: VecDeque::new(), others });
        }
        let mut small = None;
        if matches!(contestant, Contestant::Interference | Contestant::InterferenceWithin) {
            let (vi, _) = small.insert((accept()?, 0));
            for buffer in pool(name, &nic, WORD, SMALL_UNDER_WAY)? {
                post(name, vi, buffer)?;
            }
        }
        let spinning = link.spinning;
        Ok(Receiver { name, spinning, queue, streams, small, messages: 0, arrived: 0, under_way: 0, _nic: nic })
    }

    /// Takes what has come: false if there is nothing.
    fn turn(&mut self) -> Result<bool, BenchError> {
        let mut found = false;
        for (place, stream) in self.streams.iter_mut().enumerate() {
            while let Some(done) = stream.vi.poll() {
                found = true;
                match sound(self.name, done)? {
                    Completion { operation: Operation::Receive, payload: Payload::Buffer(buffer), length, .. } => {
                        check_stamps(self.name, &buffer[..length], place, stream.number)?;
                        stream.number += 1;
                        self.arrived += 1;
                        stream.turn.push_back(buffer);
                        stream.restock(self.name)?;
                    }
                    _ => self.under_way -= 1,
                }
            }
        }
        if let Some((vi, number)) = &mut self.small {
            while let Some(done) = vi.poll() {
                found = true;
                let done = sound(self.name, done)?;
                let Some(buffer) = done.into_buffer() else { continue };
                if buffer[..] != number.to_le_bytes() {
                    return Err(BenchError::Contents { contestant: self.name, sender: 1, message: *number, place: 0 });
                }
                *number += 1;
                post(self.name, vi, buffer)?;
            }
        }
        Ok(found)
    }

    fn turn_until(&mut self, over: impl Fn(&Receiver) -> bool) -> Result<(), BenchError> {
        let mut patience = Patience::default();
        while !over(self) {
            if self.turn()? {
                patience = Patience::default();
            } else if self.spinning {
                patience.spin()?;
            } else {
                self.queue.wait(PATIENCE).map_err(BenchError::library(self.name, "waiting"))?;
            }
        }
        Ok(())
    }
}

impl Transport for Receiver {
    fn ping(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("messages go one way here")
    }

    fn pong(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("messages go one way here")
    }

    fn pour(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        unreachable!("the peer receives")
    }

    fn prepare_for(
        &mut self,
        _role: Role,
        _exercise: super::Exercise,
        size: usize,
        count: usize,
    ) -> Result<(), BenchError> {
        let all = self.streams.len();
        for (place, stream) in self.streams.iter_mut().enumerate() {
            stream.others.append(&mut stream.turn);
            let kept = stream.others.len().saturating_sub(buffers(size));
            stream.turn = stream.others.split_off(kept);
            stream.due = share(self.messages, count, place, all);
            stream.restock(self.name)?;
        }
        self.messages += count;
        Ok(())
    }

    fn drain(&mut self, _size: usize, count: usize) -> Result<(), BenchError> {
        self.turn_until(|receiver| receiver.arrived >= count)?;
        self.arrived -= count;
        let stream = self.streams.first_mut().ok_or(BenchError::NobodyLeft)?;
        stream.vi.send_bytes(0, &[1]).map_err(BenchError::library(self.name, "sending"))?;
        self.under_way += 1;
        self.turn_until(|receiver| receiver.under_way == 0)
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.spinning = !asleep;
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        self.turn()?;
        Ok(true)
    }

    fn landings(&self) -> Landings {
        let mut all = Landings::default();
        for landings in self.streams.iter().map(|stream| stream.vi.landings()) {
            all.hits += landings.hits;
            all.seen += landings.seen;
            all.copied += landings.copied;
        }
        all
    }
}

fn queue(name: &'static str, nic: &Nic) -> Result<CompletionQueue, BenchError> {
    nic.completion_queue().map_err(BenchError::library(name, "making a completion queue"))
}

fn pool(name: &'static str, nic: &Nic, size: usize, count: usize) -> Result<VecDeque<Buffer>, BenchError> {
    let pool = nic.pool(size, count).map_err(BenchError::library(name, "making a pool"))?;
    let frame = |_| {
        let mut buffer = pool.frame().map_err(BenchError::library(name, "taking a frame"))?;
        buffer.set_len(size);
        // Memory that was never written is not there yet.
        buffer.fill(1);
        Ok(buffer)
    };
    (0..count).map(frame).collect()
}

fn post(name: &'static str, vi: &mut Vi, buffer: Buffer) -> Result<(), BenchError> {
    vi.post_recv(Receive::new(0).into(buffer)).map_err(BenchError::library(name, "posting a receive"))
}

/// A completion, unless what it completes has failed.
fn sound(name: &'static str, done: Completion) -> Result<Completion, BenchError> {
    match done.status {
        Ok(_) => Ok(done),
        Err(failure) => Err(BenchError::library(name, "an operation")(failure)),
    }
}

/// What fits an Ethernet of 1,500 bytes.
const PACKET_BYTES: usize = 1472;
/// What is left of it for payload.
const PAYLOAD_BYTES: f64 = (PACKET_BYTES - 64) as f64;
const WORD: usize = 8;

/// Receives of a stream where nothing else is asked for.
const BUFFERS_USUAL: usize = 4;
/// Messages that each sender has under way, in as many frames.
const UNDER_WAY: usize = 4;
/// Small messages under way, and receives posted for them.
const SMALL_UNDER_WAY: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_messages_are_shared_out_however_the_counts_are_cut() {
        for senders in [1, 4] {
            for (warm, count) in [(4, 17), (1, 1), (3, 100), (0, 5)] {
                for first in 0..9 {
                    let mut all = 0;
                    for sender in 0..senders {
                        let parts = share(first, warm, sender, senders) + share(first + warm, count, sender, senders);
                        assert_eq!(parts, share(first, warm + count, sender, senders));
                        all += parts;
                    }
                    assert_eq!(all, warm + count, "{senders} senders from {first}");
                }
            }
        }
    }

    #[test]
    fn a_message_that_is_not_the_one_expected_is_noticed() {
        let mut message = vec![0; MESSAGE_BYTES];
        write_stamps(&mut message, 2, 7);
        assert!(check_stamps("landing", &message, 2, 7).is_ok());
        for (sender, number) in [(2, 8), (1, 7), (0, 0)] {
            assert!(check_stamps("landing", &message, sender, number).is_err());
        }
        for place in places(7) {
            let mut damaged = message.clone();
            damaged[place + 3] ^= 1;
            let told = check_stamps("landing", &damaged, 2, 7).unwrap_err().to_string();
            assert!(told.contains(&format!("byte {place}")), "{told}");
        }
        assert!(check_stamps("landing", &message[1..], 2, 7).is_err(), "it came one byte too early");
    }

    #[test]
    fn interfering_messages_are_as_many_as_the_rate_says() {
        let mut none = Pace::new(0);
        let mut many = Pace::new(10_000);
        let (mut told_none, mut told_many) = (0, 0);
        for _ in 0..100 {
            told_none += none.due(1);
            told_many += many.due(1);
        }
        assert_eq!(told_none, 0);
        // 745 packets make a message, and a part of the next may have begun.
        assert!((7440..=7450 + 75).contains(&told_many), "{told_many}");
    }

    #[test]
    fn a_destination_has_as_many_buffers_as_it_has_messages() {
        assert_eq!([0, 100, 1 << 20, 2 << 20, 64 << 20].map(buffers), [4, 4, 4, 2, 64]);
    }
}
