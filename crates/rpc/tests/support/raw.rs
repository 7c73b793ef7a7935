//! A peer that says whatever it likes, by a VI and with heads of its own making, as the protocol lays them out.

use super::{PATIENCE, buffer_of};
use highwire_vi::{
    Completion, Failure, Message, Nic, Operation, Payload, PayloadToken, QUIET, Receive, Region, Vi, ViListener,
    WaitError,
};
use std::time::{Duration, Instant};

pub struct Raw {
    pub vi: Vi,
    pub nic: Nic,
    _memory: Region,
}

const MESSAGE_BYTES: usize = 8192;

impl Raw {
    pub fn new(nic: &Nic, vi: Vi) -> Raw {
        let mut raw = Raw::silent(nic, vi);
        for at in 0..16 {
            let buffer = raw._memory.slice(at * MESSAGE_BYTES..(at + 1) * MESSAGE_BYTES).expect("a buffer");
            raw.vi.post_recv(Receive::new(0).into(buffer)).expect("a receive");
        }
        raw
    }

    /// One that never reads.
    pub fn silent(nic: &Nic, vi: Vi) -> Raw {
        Raw { vi, nic: nic.clone(), _memory: nic.register(16 * MESSAGE_BYTES).expect("memory") }
    }

    pub fn connect(nic: &Nic, address: &str) -> Raw {
        Raw::new(nic, nic.connect(address).expect("a connection"))
    }

    pub fn accept(nic: &Nic, listener: &ViListener) -> Raw {
        Raw::new(nic, listener.accept(PATIENCE).expect("somebody who connects"))
    }

    /// Connects as a client of this session, and is welcomed.
    pub fn hello(nic: &Nic, address: &str, hello: Hello) -> (Raw, Welcome) {
        let mut raw = Raw::connect(nic, address);
        raw.say(&hello.encode());
        let welcome = Welcome::decode(&raw.hear());
        (raw, welcome)
    }

    /// Sends a message without payload. Whether it is still heard does not matter here.
    pub fn say(&mut self, message: &[u8]) {
        let until = Instant::now() + PATIENCE;
        while let Err(highwire_vi::PostError::NoRoom { .. }) = self.vi.send_bytes(QUIET, message) {
            assert!(Instant::now() < until, "the other side takes nothing");
            std::thread::sleep(Duration::from_micros(100));
            while self.vi.sender().poll().is_some() {}
        }
    }

    /// Sends a message with a payload, to land there.
    pub fn say_with(&mut self, message: &[u8], payload: &[u8], token: u64) {
        let buffer = buffer_of(&self.nic, payload);
        let message = Message::new(QUIET).control(message).payload(buffer).lands_at(PayloadToken(token));
        let _ = self.vi.post_send(message);
    }

    /// A place for a payload.
    pub fn expect(&mut self, token: u64, bytes: usize) {
        let buffer = super::buffer(&self.nic, bytes);
        self.vi.expect(PayloadToken(token), Receive::new(token).into(buffer)).expect("a place");
    }

    /// What comes next, a message or the payload of one; `None` at the end.
    pub fn next(&mut self) -> Result<Heard, Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.vi.wait(until.saturating_duration_since(Instant::now())) {
                Ok(done) if done.operation == Operation::Receive && done.status.is_ok() => {
                    let token = done.payload_token();
                    let Completion { length, control, payload, .. } = done;
                    let Payload::Buffer(buffer) = payload else { continue };
                    let bytes = buffer[..length].to_vec();
                    if token.is_none() {
                        let mut buffer = buffer;
                        buffer.set_len(MESSAGE_BYTES);
                        let _ = self.vi.post_recv(Receive::new(0).into(buffer));
                        return Ok(Heard { message: bytes, payload: None });
                    }
                    return Ok(Heard { message: control.to_vec(), payload: Some(bytes) });
                }
                Ok(_) => {}
                Err(WaitError::NotConnected(failure)) => return Err(failure),
                Err(error) => panic!("nothing is heard: {error}"),
            }
        }
    }

    /// The next message, which must come.
    pub fn hear(&mut self) -> Vec<u8> {
        self.next().expect("a message, not the end").message
    }

    /// What is heard until the other side ends it: the last message, if there was one.
    pub fn hear_out(&mut self) -> Option<Vec<u8>> {
        let mut last = None;
        while let Ok(heard) = self.next() {
            last = Some(heard.message);
        }
        last
    }

    /// Waits until the other side has ended it, without reading.
    pub fn await_end(&mut self) {
        super::until("the end of the connection", || {
            while self.vi.poll().is_some() {}
            matches!(self.vi.state(), highwire_vi::State::Ended(_))
        });
    }
}

/// What a raw peer hears.
#[derive(Debug)]
pub struct Heard {
    pub message: Vec<u8>,
    pub payload: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Hello {
    pub session: u128,
    pub window: u32,
    pub acknowledged: u64,
    pub attempt: u32,
    pub incarnation: u64,
}

impl Hello {
    pub fn new(session: u128) -> Hello {
        Hello { session, window: 16, acknowledged: 1, attempt: 1, incarnation: 0 }
    }

    pub fn encode(self) -> Vec<u8> {
        let mut head = Head::of(1);
        head.put(2, &1u16.to_le_bytes()).put(4, &self.window.to_le_bytes()).put(8, &self.acknowledged.to_le_bytes());
        head.put(16, &self.attempt.to_le_bytes()).put(24, &self.incarnation.to_le_bytes());
        head.and(&self.session.to_le_bytes())
    }
}

/// A head as the protocol lays it out.
#[derive(Clone, Copy, Debug)]
pub struct Head(pub [u8; 32]);

impl Head {
    pub fn of(kind: u8) -> Head {
        let mut bytes = [0; 32];
        bytes[0] = kind;
        Head(bytes)
    }

    pub fn put(&mut self, at: usize, bytes: &[u8]) -> &mut Head {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    pub fn and(&self, body: &[u8]) -> Vec<u8> {
        [&self.0[..], body].concat()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    pub known: bool,
    pub window: u32,
    pub incarnation: u64,
    pub frames: u32,
    pub frame_bytes: u32,
    pub request_bytes_max: u32,
}

impl Welcome {
    /// Of a server that is nobody in particular.
    pub fn to(window: u32) -> Welcome {
        Welcome { known: false, window, incarnation: 77, frames: 0, frame_bytes: 65536, request_bytes_max: 1 << 20 }
    }

    pub fn encode(self) -> Vec<u8> {
        let mut head = Head::of(2);
        head.put(1, &[self.known.into()]).put(2, &1u16.to_le_bytes()).put(4, &self.window.to_le_bytes());
        head.put(8, &self.incarnation.to_le_bytes()).put(16, &self.frames.to_le_bytes());
        head.put(24, &self.frame_bytes.to_le_bytes()).put(28, &self.request_bytes_max.to_le_bytes());
        head.and(&[])
    }

    pub fn decode(message: &[u8]) -> Welcome {
        assert_eq!((message.len(), message[0]), (32, 2), "a welcome, not {message:?}");
        Welcome {
            known: message[1] == 1,
            window: u32_at(message, 4),
            incarnation: u64_at(message, 8),
            frames: u32_at(message, 16),
            frame_bytes: u32_at(message, 24),
            request_bytes_max: u32_at(message, 28),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub method: highwire_rpc::Method,
    pub sequence: u64,
    pub unanswered: u32,
    pub flags: u8,
    pub reply_room: u32,
    pub deadline_ms: u32,
    /// Bytes of arguments, if that is to be a lie.
    pub body: Option<u16>,
}

pub const BODY_IN_PAYLOAD: u8 = 1;
pub const IS_OFFER: u8 = 2;

impl Call {
    pub fn new(method: highwire_rpc::Method, sequence: u64) -> Call {
        Call { method, sequence, unanswered: 0, flags: 0, reply_room: 0, deadline_ms: 0, body: None }
    }

    pub fn encode(self, body: &[u8]) -> Vec<u8> {
        let offer = if self.flags & IS_OFFER != 0 { 4 } else { 0 };
        let said = self.body.unwrap_or((body.len() - offer) as u16);
        let mut head = Head::of(3);
        head.put(1, &[self.flags]).put(2, &self.method.method.to_le_bytes());
        head.put(4, &self.method.service.to_le_bytes()).put(8, &self.sequence.to_le_bytes());
        head.put(16, &self.unanswered.to_le_bytes()).put(20, &self.method.version.to_le_bytes());
        head.put(22, &said.to_le_bytes()).put(24, &self.reply_room.to_le_bytes());
        head.put(28, &self.deadline_ms.to_le_bytes());
        head.and(body)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Reply {
    pub sequence: u64,
    pub status: u16,
    pub frames: u32,
    pub detail: u64,
}

impl Reply {
    pub fn to(sequence: u64) -> Reply {
        Reply { sequence, status: 0, frames: 0, detail: 0 }
    }

    pub fn encode(self, body: &[u8]) -> Vec<u8> {
        let mut head = Head::of(4);
        head.put(2, &self.status.to_le_bytes()).put(4, &(body.len() as u32).to_le_bytes());
        head.put(8, &self.sequence.to_le_bytes()).put(16, &self.frames.to_le_bytes());
        head.put(24, &self.detail.to_le_bytes());
        head.and(body)
    }
}

/// Cancel (5), Room (6) or Offered (7) of a call.
pub fn about(kind: u8, sequence: u64) -> Vec<u8> {
    let mut head = Head::of(kind);
    head.put(8, &sequence.to_le_bytes());
    head.and(&[])
}

/// That the server leaves, and why.
pub fn leaving(why: u8) -> Vec<u8> {
    let mut head = Head::of(8);
    head.put(1, &[why]);
    head.and(&[])
}

pub const SHUTDOWN: u8 = 0;
pub const SESSION_TAKEN: u8 = 1;
pub const MALFORMED: u8 = 2;

/// The token of a frame that was granted.
pub fn frame_token(count: u32) -> u64 {
    1 << 61 | u64::from(count)
}

/// The token of the room for a call's offer.
pub fn offer_token(sequence: u64) -> u64 {
    1 << 60 | sequence
}

/// What an answer says.
pub struct Answered {
    pub sequence: u64,
    pub status: u16,
    pub body: Vec<u8>,
}

pub fn answered(message: &[u8]) -> Answered {
    assert_eq!(message[0], 4, "an answer, not {message:?}");
    let status = u16::from_le_bytes([message[2], message[3]]);
    Answered { sequence: u64_at(message, 8), status, body: message[32..].to_vec() }
}

pub const DONE: u16 = 0;
pub const TOO_LATE: u16 = 8;
pub const FORGOTTEN: u16 = 13;

/// The session of a hello.
pub fn session_of(hello: &[u8]) -> u128 {
    assert_eq!((hello.len(), hello[0]), (48, 1), "a hello, not {hello:?}");
    u128::from_le_bytes(std::array::from_fn(|at| hello[32 + at]))
}

pub fn u32_at(message: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| message[at + i]))
}

pub fn u64_at(message: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| message[at + i]))
}
