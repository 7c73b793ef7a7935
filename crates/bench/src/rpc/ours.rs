//! Our own remote procedure calls: `shm`, `udp` and `udp-sealed`.

use super::{Caller, Side};
use crate::BenchError;
use crate::apps::servers::page;
use crate::pair::{Link, Role, Workers};
use crate::transports::Contestant;
use crate::transports::vi::nic_over_udp;
use highwire::rpc::{Bulk, Client, ClientOptions, Rpc, Server, ServerOptions, Services, TypedPending, service};
use highwire::{Buffer, Frozen, Nic, Pool, Tag};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

service! {
    /// What is called.
    pub(crate) trait Values, client ValuesClient, id 0x6265_6e63, version 1 {
        /// Nothing there and nothing back.
        [1, quick] fn call(&self);
        /// A value of so many bytes lands in the caller's buffer.
        [2, quick, repeatable] fn fetch(&self, &mut bulk, bytes: u32);
    }
}

/// Why they cannot be measured here.
pub(super) fn missing() -> Option<String> {
    None
}

/// This process's end, for values up to `size_max`: [`Side::Calls`] in the driver, [`Side::Answers`] in the peer.
pub(super) fn meet(contestant: Contestant, link: &mut Link, size_max: usize) -> Result<Side, BenchError> {
    let name = contestant.name();
    let nic = nic_over_udp(contestant)?;
    let rpc = Rpc::new(&nic).map_err(BenchError::library(name, "making ready for calls"))?;
    let side = match link.role {
        Role::Peer => {
            let address = match contestant {
                Contestant::Shm => format!("shm:bench-rpc-{}", std::process::id()),
                _ => format!("udp:{}", std::net::SocketAddr::new(link.address(contestant.wire())?, 0)),
            };
            let answers = Answers::start(name, &nic, &rpc, &address, size_max, link.spinning)?;
            let (mine, theirs) = UnixStream::pair()?;
            link.tell(&answers.server.address(), &[theirs.as_fd()])?;
            Side::Answers(Some(Box::new(answers)), mine)
        }
        Role::Driver => {
            let (address, descriptors) = link.hear::<String>()?;
            let awake = descriptors.into_iter().next().ok_or(BenchError::NobodyLeft)?;
            Side::Calls(Box::new(Calls::connect(name, &nic, &rpc, &address, size_max, link.spinning)?), awake.into())
        }
    };
    link.meet()?;
    Ok(side)
}

struct Calls {
    name: &'static str,
    client: Client,
    values: ValuesClient,
    frames: Pool,
    spinning: bool,
    pending: VecDeque<TypedPending<()>>,
    last: Option<Buffer>,
}

impl Calls {
    fn connect(
        name: &'static str,
        nic: &Nic,
        rpc: &Rpc,
        address: &str,
        size_max: usize,
        spinning: bool,
    ) -> Result<Calls, BenchError> {
        let options = ClientOptions { window: WINDOW, busy: spinning, ..ClientOptions::default() };
        let client = rpc.connect_with(address, options).map_err(BenchError::library(name, "connecting"))?;
        let frames = nic.pool(size_max.max(1), FRAMES).map_err(BenchError::library(name, "making frames"))?;
        let values = ValuesClient::new(client.clone());
        Ok(Calls { name, client, values, frames, spinning, pending: VecDeque::new(), last: None })
    }

    fn frame(&mut self, size: usize) -> Result<Buffer, BenchError> {
        let frame = self.last.take().map_or_else(|| self.frames.frame(), Ok);
        let mut frame = frame.map_err(BenchError::library(self.name, "taking a frame"))?;
        frame.set_len(size);
        Ok(frame)
    }

    /// Waits for the oldest call.
    fn settle(&mut self, size: Option<usize>) -> Result<(), BenchError> {
        let Some(pending) = self.pending.pop_front() else { return Ok(()) };
        let answer = pending.wait().map_err(BenchError::library(self.name, "calling"))?;
        if let Some(size) = size {
            assert_eq!(answer.length, size, "bytes of a value");
            self.last = answer.into_buffer();
        }
        Ok(())
    }
}

impl Caller for Calls {
    fn call(&mut self, count: usize, outstanding: usize) -> Result<(), BenchError> {
        let failed = BenchError::library(self.name, "calling");
        if outstanding == 1 {
            return (0..count).try_for_each(|_| self.values.call().wait()).map_err(failed);
        }
        for _ in 0..count {
            if self.pending.len() == outstanding {
                self.settle(None)?;
            }
            self.pending.push_back(self.values.call().start());
        }
        while !self.pending.is_empty() {
            self.settle(None)?;
        }
        Ok(())
    }

    fn fetch(&mut self, size: usize, count: usize, outstanding: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            if self.pending.len() == outstanding {
                self.settle(Some(size))?;
            }
            let frame = self.frame(size)?;
            let call = self.values.fetch(size as u32).into(frame);
            if outstanding == 1 {
                let answer = call.complete().map_err(BenchError::library(self.name, "fetching"))?;
                assert_eq!(answer.length, size, "bytes of a value");
                self.last = answer.into_buffer();
            } else {
                self.pending.push_back(call.start());
            }
        }
        while !self.pending.is_empty() {
            self.settle(Some(size))?;
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), BenchError> {
        let Some(value) = &self.last else { return Ok(()) };
        match value.iter().zip(page(value.len())).position(|(found, expected)| *found != expected) {
            Some(place) => Err(BenchError::Bytes { contestant: self.name, place: place as u64 }),
            None => Ok(()),
        }
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        self.client.poll();
        Ok(true)
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.client.set_busy(self.spinning && !asleep);
    }
}

struct Answers {
    server: Server,
    spinning: bool,
    asleep: bool,
}

struct Store {
    value: Frozen,
}

impl Values for Store {
    fn call(&self) {}

    fn fetch(&self, bulk: &mut Bulk<'_>, bytes: u32) {
        bulk.send_frozen(&self.value, 0..bytes as usize);
    }
}

impl Answers {
    fn start(
        name: &'static str,
        nic: &Nic,
        rpc: &Rpc,
        address: &str,
        size_max: usize,
        spinning: bool,
    ) -> Result<Answers, BenchError> {
        let value = nic.register_freezable(size_max.max(1), Tag(0));
        let value = value.map_err(BenchError::library(name, "making a value"))?;
        let mut all = value.slice(0..value.len()).map_err(BenchError::library(name, "making a value"))?;
        all.copy_from_slice(&page(value.len()));
        drop(all);
        let value = value.freeze().map_err(|(_, error)| BenchError::library(name, "freezing a value")(error))?;
        let services = Services::new().and(ValuesClient::serve(Store { value }));
        let server = rpc.serve_with(address, services, ServerOptions { workers: 1, ..ServerOptions::default() });
        let server = server.map_err(BenchError::library(name, "serving"))?;
        Ok(Answers { server, spinning, asleep: false })
    }
}

impl Workers for Answers {
    fn expect_work(&mut self, some: bool) {
        self.server.set_busy(some && self.spinning && !self.asleep);
    }

    fn wait_asleep(&mut self, asleep: bool) {
        self.asleep = asleep;
    }
}

/// Calls that may be outstanding.
const WINDOW: u32 = 1024;
/// Frames for values: those of all fetches under way, and one that was looked at last.
const FRAMES: usize = 16;
