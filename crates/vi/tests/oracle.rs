//! Random operations on both ends, against an oracle that is nothing but a queue of messages.

use crate::support::seeded::{Seeded, bytes, verify};
use crate::support::{Line, PATIENCE, Stage, both_ends};
use highwire_vi::{
    Buffer, Completion, Config, Failure, InPlace, Message, Nic, Operation, Path, Payload, PayloadToken, PostError,
    Pulses, Receive, Region, Reliability, Segment, ViOptions, WaitError,
};
use std::collections::{BTreeSet, HashMap, VecDeque};

/// What a message was made of; its bytes come from its number.
#[derive(Clone, Debug)]
struct Sent {
    number: u64,
    size: usize,
    control: usize,
    payload_token: Option<PayloadToken>,
}

/// One region from which all buffers of a side are cut.
struct Memory(Region);

impl Memory {
    const BYTES: usize = 256 << 20;

    fn new(nic: &Nic) -> Memory {
        Memory(nic.register(Memory::BYTES).unwrap())
    }

    /// A piece that nobody has, somewhere.
    fn buffer(&self, seeded: &mut Seeded, size: usize) -> Buffer {
        loop {
            let start = seeded.below(Memory::BYTES - size);
            if let Ok(buffer) = self.0.slice(start..start + size) {
                return buffer;
            }
        }
    }

    fn buffer_of(&self, seeded: &mut Seeded, bytes: &[u8]) -> Buffer {
        let mut buffer = self.buffer(seeded, bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
}

/// One end, and what it must see next.
struct End {
    memory: Memory,
    line: Line,
    /// Messages on their way to this end, in order: the oracle.
    coming: VecDeque<Sent>,
    /// Receives posted here: token and capacity (`None`: in place).
    posted: VecDeque<(u64, Option<u64>)>,
    expected: HashMap<PayloadToken, u64>,
    /// Sends of this end that have not completed.
    outstanding: BTreeSet<u64>,
    held: Vec<(Sent, InPlace)>,
    next: u64,
}

const SIZES: [usize; 7] = [0, 60, 240, 241, 5000, 40_000, 300_000];
/// The capacity of a receive that takes any message.
const ENOUGH: usize = 300_000;

impl End {
    fn new(nic: &Nic, line: Line, first: u64) -> End {
        End {
            memory: Memory::new(nic),
            line,
            coming: VecDeque::new(),
            posted: VecDeque::new(),
            expected: HashMap::new(),
            outstanding: BTreeSet::new(),
            held: Vec::new(),
            next: first,
        }
    }

    fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Posts a message; what the other end is to see of it.
    fn send(&mut self, seeded: &mut Seeded, payload_token: Option<PayloadToken>) -> Option<Sent> {
        let number = self.next_number();
        let most = *seeded.pick(&SIZES);
        let sent = Sent { number, size: seeded.below(most + 1), control: seeded.below(129), payload_token };
        let content = bytes(number, sent.size);
        let mut message = Message::new(number).control(&bytes(!number, sent.control)).immediate(number as u32);
        message = message.by(*seeded.pick(&[Path::Choose, Path::Choose, Path::Buffered, Path::Referenced]));
        if let Some(token) = payload_token {
            message = message.lands_at(token);
        }
        let mut at = 0;
        for _ in 0..seeded.below(4) {
            let piece = seeded.below(sent.size - at + 1);
            message = message.payload(self.memory.buffer_of(seeded, &content[at..at + piece]));
            at += piece;
        }
        message = message.payload(self.memory.buffer_of(seeded, &content[at..]));
        match self.line.vi.post_send(message) {
            Ok(()) => {
                self.outstanding.insert(number);
                Some(sent)
            }
            Err(refused) => {
                let full = matches!(refused.reason, PostError::QueueFull { .. });
                assert!(full, "message {number} is refused: {refused}");
                None
            }
        }
    }

    /// A receive of any kind, for the next message or for a token.
    fn receive(&mut self, seeded: &mut Seeded, payload_token: Option<PayloadToken>) -> bool {
        let token = self.next_number();
        let room = if payload_token.is_some() { ENOUGH } else { *seeded.pick(&[0, 250, 6000, ENOUGH]) };
        let (receive, capacity) = match seeded.below(4) {
            0 => (Receive::new(token).in_place(), None),
            1 => {
                let cut = seeded.below(room + 1);
                let pieces = [cut, room - cut].map(|size| self.memory.buffer(seeded, size));
                (pieces.into_iter().fold(Receive::new(token), Receive::into), Some(room as u64))
            }
            _ => (Receive::new(token).into(self.memory.buffer(seeded, room)), Some(room as u64)),
        };
        match payload_token {
            Some(name) => {
                let taken = self.line.vi.expect(name, receive).is_ok();
                if taken {
                    self.expected.insert(name, token);
                }
                taken
            }
            None => {
                let taken = self.line.vi.post_recv(receive).is_ok();
                if taken {
                    self.posted.push_back((token, capacity));
                }
                taken
            }
        }
    }

    /// Takes completions, at most `most` of them, and compares each with the oracle.
    fn poll(&mut self, most: usize) -> bool {
        for taken in 0..most {
            let Some(done) = self.line.vi.poll() else { return taken > 0 };
            self.check(done);
        }
        true
    }

    fn check(&mut self, done: Completion) {
        if done.operation == Operation::Send {
            assert!(self.outstanding.remove(&done.token), "send {} completes, and was not outstanding", done.token);
            assert_eq!(done.status, Ok(()), "send {}", done.token);
            return;
        }
        let sent = self.coming.front().expect("a message arrived that was not sent").clone();
        let capacity = match done.payload_token() {
            Some(name) => {
                assert_eq!(sent.payload_token, Some(name), "message {}", sent.number);
                assert_eq!(self.expected.remove(&name), Some(done.token), "message {}", sent.number);
                None
            }
            None => {
                let (token, capacity) = self.posted.pop_front().expect("a receive completed that was not posted");
                assert_eq!((token, sent.payload_token), (done.token, None), "receives are filled in order");
                capacity
            }
        };
        if let Some(capacity) = capacity.filter(|capacity| (*capacity as usize) < sent.size) {
            let too_long = Failure::TooLong { message: sent.size as u64, buffer: capacity };
            assert_eq!(done.status, Err(too_long), "message {}", sent.number);
            return;
        }
        self.coming.pop_front();
        assert_eq!((done.status, done.length), (Ok(()), sent.size), "message {}", sent.number);
        assert_eq!(done.immediate, sent.number as u32);
        assert_eq!(done.control.len(), sent.control, "message {}", sent.number);
        verify(!sent.number, &done.control);
        match done.payload {
            Payload::InPlace(payload) => self.held.push((sent, payload)),
            payload => verify(sent.number, &joined(payload)[..sent.size]),
        }
    }

    /// Gives a held payload back, which must be what it was when it came.
    fn let_go(&mut self, seeded: &mut Seeded) {
        if self.held.is_empty() {
            return;
        }
        let (sent, payload) = self.held.swap_remove(seeded.below(self.held.len()));
        let mut found = vec![0; payload.len()];
        payload.copy_to(0, &mut found);
        verify(sent.number, &found);
        if seeded.once_in(2) { self.line.vi.receiver().release(payload) } else { drop(payload) }
    }
}

fn joined(payload: Payload) -> Vec<u8> {
    match payload {
        Payload::None => Vec::new(),
        Payload::Buffer(buffer) => buffer.to_vec(),
        Payload::Segments(segments) => segments
            .into_iter()
            .flat_map(|segment| match segment {
                Segment::Buffer(buffer) => buffer.to_vec(),
                other => panic!("a receive gave back {other:?}"),
            })
            .collect(),
        Payload::InPlace(payload) => panic!("{payload:?} where a copy was asked for"),
    }
}

fn step(from: &mut End, to: &mut End, seeded: &mut Seeded) {
    match seeded.below(10) {
        0..3 => {
            // A token is expected before the message that names it is sent.
            let name = PayloadToken(seeded.next());
            let expected = seeded.once_in(5) && to.receive(seeded, Some(name));
            match from.send(seeded, expected.then_some(name)) {
                Some(sent) => to.coming.push_back(sent),
                None if expected => {
                    assert!(to.line.vi.revoke(name).is_some());
                    to.expected.remove(&name);
                }
                None => {}
            }
        }
        3..6 => drop(to.receive(seeded, None)),
        6 => drop(from.poll(1 + seeded.below(4))),
        7 | 8 => drop(to.poll(1 + seeded.below(4))),
        _ => to.let_go(seeded),
    }
}

/// Lets everything arrive, complete and come back.
fn settle(one: &mut End, other: &mut End, seeded: &mut Seeded) {
    for round in 0.. {
        for end in [&mut *one, &mut *other] {
            while !end.held.is_empty() {
                end.let_go(seeded);
            }
            if end.posted.len() < 4 && !end.coming.is_empty() {
                end.receive(seeded, None);
            }
            end.poll(usize::MAX);
        }
        let left = |end: &End| end.coming.len() + end.outstanding.len() + end.held.len();
        if left(one) + left(other) == 0 {
            return;
        }
        assert!(round < 200_000, "stuck: {:?} and {:?}", one.coming.front(), other.coming.front());
    }
}

fn against_the_oracle(steps: usize, change: fn(&mut Config), options: &ViOptions<'_>) {
    let stage = Stage::open();
    let (one, other) = (stage.nic_with(change), stage.nic_with(change));
    let mut seeded = Seeded::fresh();
    let (near, far) = both_ends(&one, &other, options, options);
    let (mut near, mut far) = (End::new(&one, near, 1 << 40), End::new(&other, far, 1 << 50));
    for _ in 0..steps {
        if seeded.once_in(2) {
            step(&mut near, &mut far, &mut seeded);
        } else {
            step(&mut far, &mut near, &mut seeded);
        }
    }
    settle(&mut near, &mut far, &mut seeded);
}

#[test]
fn random_operations_agree_with_a_queue() {
    against_the_oracle(4000, |_| (), &ViOptions::new());
}

#[test]
fn random_operations_agree_with_a_queue_when_everything_is_scarce() {
    let scarce = |config: &mut Config| {
        (config.depth, config.loans, config.descriptors_max) = (4, 2, 8);
        (config.payload_bytes_start, config.payload_bytes_max) = (16 << 10, 64 << 10);
        config.first_index = u64::from(u32::MAX) - 100;
    };
    against_the_oracle(4000, scarce, &ViOptions::new().reliability(Reliability::Reception));
}

#[test]
fn random_operations_agree_with_a_queue_without_payload_areas() {
    against_the_oracle(2000, |config| config.payload_bytes_total_max = 0, &ViOptions::new());
}

#[test]
fn random_operations_agree_with_a_queue_in_whole_pieces() {
    let few = |config: &mut Config| (config.depth, config.loans) = (16, 16);
    against_the_oracle(3000, few, &ViOptions::new().pulses(Pulses::Whole).path(Path::Buffered));
}

#[test]
fn random_operations_agree_with_a_queue_of_the_least_and_of_the_greatest_depth() {
    against_the_oracle(1500, |config| (config.depth, config.loans) = (2, 2), &ViOptions::new());
    against_the_oracle(1500, |config| (config.depth, config.loans) = (4096, 4096), &ViOptions::new());
}

/// The messages of one direction, known to both processes by their seed.
fn script(seed: u64, count: usize) -> (Seeded, Vec<(usize, Path)>) {
    let mut seeded = Seeded::from(seed);
    let all = (0..count)
        .map(|_| {
            let most = *seeded.pick(&SIZES);
            (seeded.below(most + 1), *seeded.pick(&[Path::Choose, Path::Buffered, Path::Referenced]))
        })
        .collect();
    (seeded, all)
}

/// Sends one script and receives the other, at random, both at once.
fn exchange(nic: &Nic, line: &mut Line, ours: u64, theirs: u64, count: usize) {
    let (mut seeded, sending) = script(ours, count);
    let (_, receiving) = script(theirs, count);
    let (mut posted, mut arrived, mut completed, mut sent) = (0, 0, 0, 0);
    let (memory, mut held) = (Memory::new(nic), Vec::new());
    while arrived < count || completed < count {
        if sent < count && seeded.once_in(2) {
            let (size, path) = sending[sent];
            let payload = memory.buffer_of(&mut seeded, &bytes(ours ^ sent as u64, size));
            match line.vi.post_send(Message::new(sent as u64).payload(payload).by(path)) {
                Ok(()) => sent += 1,
                Err(refused) => assert!(matches!(refused.reason, PostError::QueueFull { .. }), "{refused}"),
            }
        }
        if posted < count && posted - arrived < 8 && seeded.once_in(2) {
            let (size, _) = receiving[posted];
            let receive = Receive::new(posted as u64);
            let receive = match seeded.once_in(2) {
                true => receive.in_place(),
                false => receive.into(memory.buffer(&mut seeded, size)),
            };
            line.vi.post_recv(receive).unwrap();
            posted += 1;
        }
        let idle = sent == count && posted == count.min(arrived + 8);
        let done = if idle { line.vi.wait(PATIENCE).map(Some) } else { Ok(line.vi.poll()) };
        let done = match done {
            Ok(Some(done)) => done,
            Ok(None) => continue,
            Err(WaitError::NotConnected(failure)) => panic!("{failure} after {arrived} of {count}"),
            Err(error) => panic!("{error} after {arrived} of {count}, {completed} completed"),
        };
        assert_eq!(done.status, Ok(()));
        if done.operation == Operation::Send {
            completed += 1;
            continue;
        }
        let (size, _) = receiving[arrived];
        assert_eq!((done.token, done.length), (arrived as u64, size));
        match done.payload {
            Payload::InPlace(payload) => held.push((theirs ^ arrived as u64, payload)),
            payload => verify(theirs ^ arrived as u64, &joined(payload)),
        }
        arrived += 1;
        while held.len() > 4 || !held.is_empty() && (arrived == count || seeded.once_in(3)) {
            let (seed, payload): (u64, InPlace) = held.swap_remove(seeded.below(held.len()));
            let mut found = vec![0; payload.len()];
            payload.copy_to(0, &mut found);
            verify(seed, &found);
            line.vi.receiver().release(payload);
        }
    }
    line.vi.poll();
}

#[test]
fn two_processes_exchange_random_messages_and_none_is_lost_changed_or_out_of_order() {
    const COUNT: usize = 3000;
    let stage = Stage::open();
    stage.role("other", |stage| {
        let seed: u64 = stage.argument().parse().unwrap();
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:script");
        exchange(&nic, &mut line, seed + 1, seed, COUNT);
        stage.await_mark("over");
    });
    let seeded = Seeded::fresh();
    let seed = seeded.seed();
    let nic = stage.nic();
    let listener = nic.listen("shm:script").unwrap();
    let other = stage.start_with("other", &seed.to_string());
    let mut line = Line::accept(&listener);
    exchange(&nic, &mut line, seed, seed + 1, COUNT);
    stage.mark("over");
    other.finish();
}
