//! Both ends of a lane whose region a third hand writes to: no panic, no hang, no record outside its area. Until the first
//! word is scribbled the streams come out whole and in order, and the region's spare bytes are all accounted for.
#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use highwire_fuzz::steps;
use highwire_lane::{
    AREA_BYTES, CAPACITY_LEAST, Incoming, LANES, Lane, LaneRegion, Next, Outgoing, Published, RECORD_MAX, REGION_BYTES,
    Record, Side,
};
use highwire_mem::SharedMemory;
use libfuzzer_sys::fuzz_target;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};

#[derive(Debug)]
struct Input {
    /// Doublings that the region allows.
    spare: u8,
    /// Records that were published and read before, so that their number may wrap around.
    count: u32,
    /// Bytes that went by TCP before there was a lane.
    before: u16,
    steps: Vec<(bool, Step)>,
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> arbitrary::Result<Input> {
        Ok(Input {
            spare: input.arbitrary()?,
            count: input.arbitrary()?,
            before: input.arbitrary()?,
            steps: steps(input)?,
        })
    }
}

#[derive(Arbitrary, Debug)]
enum Step {
    // The honest ends, of one direction.
    Write { len: u16, times: u8, during: During },
    SendByTcp { len: u16 },
    BeginTcp { len: u16 },
    EndTcp,
    Read { most: u16, times: u8 },
    Peek { most: u16 },
    Look,
    StopLooking { after: During },
    TurnAway { by_writer: bool },
    Sleep { after: During },
    ReadAsleep { most: u16 },
    Wake,
    ForgetSleepers,
    ForgetSends,
    Close { urgent: bool },
    Lock { writer: bool, thread: u8, take_over: bool },
    Holders { add: u8, replace: u8, remove: u8 },
    Ask,
    // Whoever scribbles.
    Store { place: Place, value: Value },
    TakeStale { most: u16, consume: bool },
}

/// What happens in the middle of a call.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum During {
    Nothing,
    ReaderTurnsAway,
    WriterTurnsAway,
    SendByTcp(u16),
    /// There is less to fill in than was said.
    Short(u16),
    Scribble(Place, Value),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Place {
    /// The words of this direction.
    Direction(u8),
    /// The whole control block.
    Control(u8),
    /// Head of the record that is read next: the bytes before it, or its length.
    Reading {
        length: bool,
    },
    /// The same of any other.
    Record {
        unit: u16,
        length: bool,
    },
    Spare,
    Magic,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Value {
    Any(u64),
    Small(u16),
    Halves(u32, u16),
    Ones,
    Added(i8),
    Flipped(u8),
}

fn memory() -> &'static Mutex<SharedMemory> {
    static MEMORY: OnceLock<Mutex<SharedMemory>> = OnceLock::new();
    MEMORY.get_or_init(|| Mutex::new(SharedMemory::create(REGION_BYTES).expect("memory").0))
}

fuzz_target!(|input: Input| {
    let memory = memory().lock().unwrap_or_else(PoisonError::into_inner);
    let spare = u64::from(input.spare % 33) * CAPACITY_LEAST as u64;
    let region = LaneRegion::prepare(&memory, spare);
    let lane = region.lane(LANE).expect("a lane");
    lane.clear();
    let scribbled = Cell::new(false);
    let flows = [Side::First, Side::Second].map(|from| {
        let flow = Flow {
            memory: &memory,
            lane,
            from,
            scribbled: &scribbled,
            stream: RefCell::default(),
            asleep: Cell::new(0),
            stale: Cell::new(None),
        };
        memory.store64(flow.control() + WORD_AT, u64::from(input.count));
        memory.store64(flow.control() + PROGRESS_AT, u64::from(input.count) << 32);
        memory.store64(flow.control() + KNOWN_AT, u64::from(input.count) << 32);
        assert!(flow.out().adopt_tcp(0, input.before.into()));
        assert!(flow.incoming().adopt_tcp(0, input.before.into()));
        flow
    });
    for (second, step) in &input.steps {
        flows[usize::from(*second)].step(step);
        let grown = (lane.bytes() - 2 * CAPACITY_LEAST) as u64;
        assert!(scribbled.get() || region.spare() + grown == spare, "spare bytes are lost or made");
    }
    for flow in &flows {
        flow.end();
    }
    // What is beside the lane is not its own.
    let area = AREAS_AT + LANE * 2 * AREA_BYTES;
    let control = CONTROLS_AT + LANE * CONTROL_BYTES;
    let beside = [area - 64, area + 2 * AREA_BYTES, control - 64, control + CONTROL_BYTES];
    assert!(
        beside.iter().flat_map(|from| (0..64).step_by(8).map(move |at| from + at)).all(|at| memory.load64(at) == 0)
    );
});

/// One direction: its ends, its TCP connection, and what is in the stream.
struct Flow<'m> {
    memory: &'m SharedMemory,
    lane: Lane<'m>,
    from: Side,
    scribbled: &'m Cell<bool>,
    stream: RefCell<Stream>,
    asleep: Cell<u32>,
    /// A record as it once was.
    stale: Cell<Option<Record>>,
}

#[derive(Default)]
struct Stream {
    /// Parts of the stream that are in the kernel.
    tcp: VecDeque<Range<u64>>,
    written: u64,
    read: u64,
    /// Sends that are under way, and the bytes of each.
    sending: Vec<u64>,
}

impl Stream {
    fn send(&mut self, len: u64) {
        self.tcp.push_back(self.written..self.written + len);
        self.written += len;
    }
}

impl<'m> Flow<'m> {
    fn out(&self) -> Outgoing<'m> {
        self.lane.outgoing(self.from)
    }

    fn incoming(&self) -> Incoming<'m> {
        self.lane.incoming(self.from.other())
    }

    fn number(&self) -> usize {
        usize::from(self.from == Side::Second)
    }

    fn control(&self) -> usize {
        CONTROLS_AT + LANE * CONTROL_BYTES + self.number() * DIRECTION_BYTES
    }

    fn area(&self) -> usize {
        AREAS_AT + (LANE * 2 + self.number()) * AREA_BYTES
    }

    fn honest(&self) -> bool {
        !self.scribbled.get()
    }

    fn step(&self, step: &Step) {
        let (out, from) = (self.out(), self.incoming());
        match *step {
            Step::Write { len, times, during } => {
                (0..=times % 8).for_each(|_| self.write(u64::from(len) + 1, during));
            }
            Step::SendByTcp { len } => self.send_by_tcp(u64::from(len) + 1),
            Step::BeginTcp { len } => {
                out.begin_tcp();
                let mut stream = self.stream.borrow_mut();
                stream.send(len.into());
                stream.sending.push(len.into());
            }
            Step::EndTcp => self.end_tcp(),
            Step::Read { most, times } => {
                (0..=times % 8).for_each(|_| {
                    self.read(u64::from(most) + 1);
                });
            }
            Step::Peek { most } => {
                if let Next::Record(record) = from.next() {
                    self.stale.set(Some(record));
                    self.take(record, most.into(), false);
                }
            }
            Step::Look => {
                let looks = from.look();
                assert!(!looks || !self.honest() || self.asleep.get() == 0, "behind the back of a sleeper");
            }
            Step::StopLooking { after } => {
                let seen = from.published();
                self.happen(after);
                let stopped = from.stop_looking(seen);
                assert!(!stopped || !from.is_looking());
                assert_eq!(stopped, from.published() == seen);
            }
            Step::TurnAway { by_writer } => {
                if by_writer {
                    out.turn_away()
                } else {
                    from.turn_away()
                }
                assert!(!from.is_looking() && !out.is_looked_at());
            }
            Step::Sleep { after } => {
                let seen = from.published();
                if from.next() == Next::Nothing {
                    self.happen(after);
                    if from.sleep(seen) {
                        assert!(!from.is_looking(), "it looks in its sleep");
                        self.asleep.set(self.asleep.get() + 1);
                    }
                }
            }
            Step::ReadAsleep { most } => {
                // All that comes now comes by TCP, counted or not.
                if self.asleep.get() > 0 {
                    assert!(!self.honest() || !from.has_records());
                    self.read_tcp(most.into());
                }
            }
            Step::Wake => {
                if self.asleep.get() > 0 {
                    self.asleep.set(self.asleep.get() - 1);
                    from.wake();
                }
            }
            Step::ForgetSleepers => {
                self.asleep.set(0);
                from.forget_sleepers();
            }
            Step::ForgetSends => {
                while !self.stream.borrow().sending.is_empty() {
                    self.end_tcp();
                }
                out.forget_sends();
            }
            Step::Close { urgent: true } => out.announce_urgent(),
            Step::Close { urgent: false } => out.announce_closing(),
            Step::Lock { writer, thread, take_over } => {
                let lock = if writer { out.lock() } else { from.lock() };
                let thread = u32::from(thread) + 1;
                if let Err(owner) = lock.try_lock(thread)
                    && take_over
                {
                    assert!(lock.take_over(owner, thread));
                }
                lock.unlock(thread);
            }
            Step::Holders { add, replace, remove } => {
                let holders = self.lane.holders(self.from);
                let _ = holders.add(u32::from(add) + 1);
                let _ = holders.replace(replace.into(), u32::from(add) + 1);
                holders.remove(remove.into());
                assert!(holders.others(add.into()).count() <= 8);
            }
            Step::Ask => self.ask(),
            Step::Store { place, value } => self.scribble(place, value),
            Step::TakeStale { most, consume } => {
                if let Some(record) = self.stale.take() {
                    // Two readers, who do not hold the lock.
                    self.scribbled.set(true);
                    self.take(record, most.into(), consume);
                }
            }
        }
    }

    fn happen(&self, during: During) {
        match during {
            During::Nothing | During::Short(_) => {}
            During::ReaderTurnsAway => self.incoming().turn_away(),
            During::WriterTurnsAway => self.out().turn_away(),
            During::SendByTcp(len) => self.send_by_tcp(len.into()),
            During::Scribble(place, value) => self.scribble(place, value),
        }
    }

    /// What a writing program's call does: as much by the lane as goes, the rest by TCP.
    fn write(&self, len: u64, during: During) {
        let mut left = len;
        while left > 0 {
            let most = left.min(RECORD_MAX as u64) as usize;
            let written = self.stream.borrow().written;
            let published = self.out().publish(most, |memory, at| {
                self.inside(at, most);
                self.happen(during);
                let len = if let During::Short(len) = during { usize::from(len).min(most) } else { most };
                memory.copy_in(at, content(written, len));
                len
            });
            match published {
                Published::Done(0) => return,
                Published::Done(len) => {
                    self.stream.borrow_mut().written += len as u64;
                    left -= len as u64;
                    let now = self.stream.borrow();
                    assert!(!self.honest() || now.written == written + len as u64, "bytes of TCP came before it");
                    assert!(!self.honest() || now.sending.is_empty(), "published while a send is under way");
                }
                Published::Full | Published::NotLooked => break,
                Published::Lie => {
                    assert!(!self.honest(), "nobody lied");
                    break;
                }
            }
        }
        if left > 0 {
            self.send_by_tcp(left);
        }
    }

    fn send_by_tcp(&self, len: u64) {
        self.out().begin_tcp();
        self.stream.borrow_mut().send(len);
        self.out().sent_by_tcp(len);
        self.out().end_tcp();
    }

    fn end_tcp(&self) {
        let Some(len) = self.stream.borrow_mut().sending.pop() else { return };
        self.out().sent_by_tcp(len);
        self.out().end_tcp();
    }

    /// What a reading program's call does; returns the bytes that it got.
    fn read(&self, most: u64) -> u64 {
        let mut left = most;
        while left > 0 {
            let got = match self.incoming().next() {
                Next::Record(record) => {
                    self.stale.set(Some(record));
                    self.take(record, left as usize, true)
                }
                Next::Tcp(bound) => {
                    let got = self.read_tcp(left.min(bound));
                    assert!(got > 0 || !self.honest(), "announced bytes are there");
                    got
                }
                Next::Nothing => 0,
                Next::Lie => {
                    assert!(!self.honest(), "nobody lied");
                    0
                }
            };
            if got == 0 {
                break;
            }
            left -= got;
        }
        most - left
    }

    fn take(&self, record: Record, most: usize, consume: bool) -> u64 {
        let wanted = most.min(record.left());
        let mut bytes = vec![0; wanted];
        let got = self.incoming().take(record, most, consume, |memory, at, len| {
            assert_eq!(len, wanted);
            self.inside(at, len);
            memory.copy_out(at, &mut bytes);
        });
        assert_eq!(got, wanted);
        let mut stream = self.stream.borrow_mut();
        assert!(!self.honest() || bytes == content(stream.read, wanted), "not what was written at {}", stream.read);
        stream.read += if consume { got as u64 } else { 0 };
        got as u64
    }

    fn read_tcp(&self, most: u64) -> u64 {
        let mut stream = self.stream.borrow_mut();
        let mut got = 0;
        while got < most
            && let Some(first) = stream.tcp.front_mut()
        {
            let (from, len) = (first.start, (first.end - first.start).min(most - got));
            first.start += len;
            if first.is_empty() {
                stream.tcp.pop_front();
            }
            assert!(!self.honest() || len == 0 || stream.read == from, "byte {from} after byte {}", stream.read);
            stream.read += len;
            got += len;
        }
        self.incoming().read_by_tcp(got);
        got
    }

    fn inside(&self, at: usize, len: usize) {
        let area = self.area();
        assert!(at >= area + 16 && at + len <= area + AREA_BYTES, "{at} + {len} is outside the area");
    }

    fn ask(&self) {
        let (out, from) = (self.out(), self.incoming());
        let records = from.waiting().map(|(_, record)| record.left()).sum::<usize>();
        assert!(from.waiting().count() <= AREA_BYTES / 64);
        assert_eq!(records, from.bytes_waiting());
        let _ = (from.has_news(), from.is_closing(), from.is_urgent(), from.may_be_sent());
        let _ = (from.writer_cpu(), out.reader_cpu(), out.tcp_written(), self.lane.state(self.from));
        let _ = LaneRegion::adopt(self.memory);
        from.note_cpu(Some(1));
        out.note_cpu(None);
        if self.honest() {
            let stream = self.stream.borrow();
            let tcp = stream.tcp.iter().map(|part| part.end - part.start).sum::<u64>();
            assert_eq!(records as u64 + tcp, stream.written - stream.read, "unread bytes");
            assert_eq!(out.unread() as usize, from.waiting().count());
            assert_eq!(from.has_records(), out.unread() > 0);
            assert_eq!(from.may_be_sent(), !stream.sending.is_empty());
        }
    }

    fn scribble(&self, place: Place, value: Value) {
        self.scribbled.set(true);
        let head = |unit: usize, length: bool| self.area() + unit % (AREA_BYTES / 64) * 64 + usize::from(length) * 8;
        let at = match place {
            Place::Direction(word) => self.control() + usize::from(word) % 21 * 8,
            Place::Control(word) => CONTROLS_AT + LANE * CONTROL_BYTES + usize::from(word) * 8 % CONTROL_BYTES,
            Place::Reading { length } => {
                head((self.memory.load64(self.control() + PROGRESS_AT) as u32 >> 16) as usize, length)
            }
            Place::Record { unit, length } => head(unit.into(), length),
            Place::Spare => 64,
            Place::Magic => 0,
        };
        let now = self.memory.load64(at);
        self.memory.store64(
            at,
            match value {
                Value::Any(value) => value,
                Value::Small(value) => value.into(),
                Value::Halves(high, low) => u64::from(high) << 32 | u64::from(low),
                Value::Ones => u64::MAX,
                Value::Added(value) => now.wrapping_add_signed(value.into()),
                Value::Flipped(bit) => now ^ 1 << (bit % 64),
            },
        );
    }

    /// Everything that was written arrives, if nobody scribbled.
    fn end(&self) {
        while !self.stream.borrow().sending.is_empty() {
            self.end_tcp();
        }
        if self.honest() {
            while self.read(1 << 16) > 0 {}
            let stream = self.stream.borrow();
            assert!(stream.read == stream.written, "something is lost");
        }
        self.ask();
    }
}

/// The stream from byte `at` on.
fn content(at: u64, len: usize) -> &'static [u8] {
    // A prime, so that equal places of records have different bytes.
    const PERIOD: usize = 65_521;
    static CONTENT: OnceLock<Vec<u8>> = OnceLock::new();
    let bytes = |len: usize| (0..len).map(|at| ((at % PERIOD).wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let from = (at % PERIOD as u64) as usize;
    &CONTENT.get_or_init(|| bytes(PERIOD + RECORD_MAX))[from..from + len]
}

/// In the middle, with others on both sides.
const LANE: usize = 3;
const _: () = assert!(LANE + 1 < LANES);

// As `docs/protocol/lane.md` has them.
const CONTROLS_AT: usize = 4096;
const CONTROL_BYTES: usize = 2048;
const DIRECTION_BYTES: usize = 512;
const AREAS_AT: usize = 131_072;
const WORD_AT: usize = 0;
const PROGRESS_AT: usize = 128;
const KNOWN_AT: usize = 280;
