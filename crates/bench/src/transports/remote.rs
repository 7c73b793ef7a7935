//! Remote memory between hosts: the driver writes and reads what the peer has granted, and the peer does
//! nothing but look. Beside it, what a read is to be compared with: a question and an answer of as many
//! bytes, by messages.

use super::vi::{connect_many, nic_over_udp};
use super::{Contestant, Transport};
use crate::BenchError;
use crate::pair::{Link, PATIENCE, Patience, Role};
use highwire::{
    Buffer, Completion, Exported, Message, Nic, Operation, RdmaRead, RdmaWrite, Receive, RemoteKey, Tag, Vi, ViOptions,
};
use std::collections::VecDeque;

pub(super) struct Remote {
    contestant: Contestant,
    nic: Nic,
    vi: Vi,
    spinning: bool,
    /// The peer's.
    key: Option<RemoteKey>,
    _granted: Option<Exported>,
    size_max: usize,
    /// To write from, to read into, or to answer with.
    frames: VecDeque<Buffer>,
    size: usize,
    /// Receives to be posted again.
    spare: Vec<Buffer>,
    /// Sent, written or read, and not done.
    under_way: usize,
    arrived: usize,
}

impl Remote {
    pub(super) fn meet(
        contestant: Contestant,
        link: &mut Link,
        size_max: usize,
    ) -> Result<Box<dyn Transport>, BenchError> {
        let name = contestant.name();
        let nic = nic_over_udp(contestant)?;
        let at = Some(link.address(contestant.wire())?);
        let vi = connect_many(name, &nic, link, at, &[ViOptions::new()])?.pop().ok_or(BenchError::NobodyLeft)?;
        let mut remote = Remote {
            contestant,
            nic,
            vi,
            spinning: link.spinning,
            key: None,
            _granted: None,
            size_max,
            frames: VecDeque::new(),
            size: 0,
            spare: Vec::new(),
            under_way: 0,
            arrived: 0,
        };
        remote.exchange_keys(link)?;
        remote.spare = remote.buffers(size_max, UNDER_WAY)?.into();
        remote.restock()?;
        link.meet()?;
        Ok(Box::new(remote))
    }

    fn exchange_keys(&mut self, link: &mut Link) -> Result<(), BenchError> {
        let name = self.contestant.name();
        match link.role {
            Role::Driver => {
                let (key, _) = link.hear::<Vec<u8>>()?;
                self.key = RemoteKey::from_bytes(&key);
            }
            Role::Peer => {
                let bytes = self.size_max * UNDER_WAY;
                let granted = self.nic.export(bytes, Tag(0)).map_err(BenchError::library(name, "exporting"))?;
                granted.memory().copy_in(0, &vec![1; bytes]);
                let key = self.vi.grant_exported(&granted).map_err(BenchError::library(name, "granting"))?;
                link.tell(&key.to_bytes().to_vec(), &[])?;
                self._granted = Some(granted);
            }
        }
        Ok(())
    }

    fn buffers(&self, size: usize, count: usize) -> Result<VecDeque<Buffer>, BenchError> {
        let name = self.contestant.name();
        let pool = self.nic.pool(size, count).map_err(BenchError::library(name, "making a pool"))?;
        let mut buffers = VecDeque::new();
        for _ in 0..count {
            let mut buffer = pool.frame().map_err(BenchError::library(name, "taking a frame"))?;
            buffer.set_len(size);
            buffer.fill(1);
            buffers.push_back(buffer);
        }
        Ok(buffers)
    }

    /// A buffer of this size, when one is free.
    fn frame(&mut self, size: usize) -> Result<Buffer, BenchError> {
        if size != self.size {
            self.settle()?;
            (self.frames, self.size) = (self.buffers(size, UNDER_WAY)?, size);
        }
        loop {
            match self.frames.pop_front() {
                Some(frame) => return Ok(frame),
                None => self.next()?,
            }
        }
    }

    fn handle(&mut self, done: Completion) -> Result<(), BenchError> {
        if let Err(failure) = done.status {
            return Err(BenchError::library(self.contestant.name(), "an operation")(failure));
        }
        let is_message = done.operation == Operation::Receive;
        if is_message {
            self.arrived += 1;
        } else {
            self.under_way -= 1;
        }
        match done.into_buffer() {
            Some(buffer) if is_message => self.spare.push(buffer),
            Some(buffer) => self.frames.push_back(buffer),
            None => {}
        }
        Ok(())
    }

    /// Waits for a completion and puts it away.
    fn next(&mut self) -> Result<(), BenchError> {
        if !self.spinning {
            let done = self.vi.wait(PATIENCE).map_err(BenchError::library(self.contestant.name(), "waiting"))?;
            return self.handle(done);
        }
        let mut patience = Patience::default();
        loop {
            if let Some(done) = self.vi.poll() {
                return self.handle(done);
            }
            patience.spin()?;
        }
    }

    fn restock(&mut self) -> Result<(), BenchError> {
        while let Some(buffer) = self.spare.pop() {
            let posted = self.vi.post_recv(Receive::new(0).into(buffer));
            posted.map_err(BenchError::library(self.contestant.name(), "posting a receive"))?;
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), BenchError> {
        while self.under_way > 0 {
            self.next()?;
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<(), BenchError> {
        while self.arrived == 0 {
            self.next()?;
        }
        self.arrived -= 1;
        Ok(())
    }

    fn say(&mut self) -> Result<(), BenchError> {
        self.under_way += 1;
        self.vi.send_bytes(0, b"question").map_err(BenchError::library(self.contestant.name(), "sending"))
    }

    fn send(&mut self, size: usize) -> Result<(), BenchError> {
        let frame = self.frame(size)?;
        self.under_way += 1;
        let sent = self.vi.post_send(Message::new(0).payload(frame));
        sent.map_err(BenchError::library(self.contestant.name(), "posting a send"))
    }

    fn read(&mut self, size: usize) -> Result<(), BenchError> {
        let Some(key) = self.key else { return Err(BenchError::NobodyLeft) };
        let frame = self.frame(size)?;
        self.under_way += 1;
        let posted = self.vi.rdma_read(RdmaRead::new(0, key, 0, frame));
        posted.map_err(BenchError::library(self.contestant.name(), "posting a read"))
    }

    /// Each to another place than those before it that are under way: they would wait for each other.
    fn write(&mut self, size: usize, number: usize) -> Result<(), BenchError> {
        let Some(key) = self.key else { return Err(BenchError::NobodyLeft) };
        let frame = self.frame(size)?;
        self.under_way += 1;
        let write = RdmaWrite::new(0, key, (number % UNDER_WAY * size) as u64).payload(frame);
        self.vi.rdma_write(write).map_err(BenchError::library(self.contestant.name(), "posting a write"))
    }

    /// Looks, so that the other side is served, until that says it is done.
    fn serve(&mut self) -> Result<(), BenchError> {
        self.receive()?;
        self.restock()
    }
}

impl Transport for Remote {
    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        if self.contestant == Contestant::SendAndMessage {
            for _ in 0..count {
                self.say()?;
                self.restock()?;
                self.receive()?;
            }
            return self.restock();
        }
        for _ in 0..count {
            self.read(size)?;
            self.settle()?;
        }
        self.say()
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        if self.contestant != Contestant::SendAndMessage {
            return self.serve();
        }
        for _ in 0..count {
            self.receive()?;
            self.send(size)?;
            self.restock()?;
        }
        self.settle()
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for number in 0..count {
            self.write(size, number)?;
        }
        self.settle()?;
        self.say()
    }

    fn drain(&mut self, _size: usize, _count: usize) -> Result<(), BenchError> {
        self.serve()
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.spinning = !asleep;
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        while let Some(done) = self.vi.poll() {
            self.handle(done)?;
        }
        Ok(self.under_way == 0)
    }
}

/// Writes that are under way at a time.
const UNDER_WAY: usize = 4;
