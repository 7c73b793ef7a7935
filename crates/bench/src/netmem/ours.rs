//! Our own memory of other nodes: `paged` and `paged-udp`.

use super::{PAGE_BYTES, Reader, Region, Side, fill};
use crate::BenchError;
use crate::pair::{Link, PATIENCE, Role, Workers};
use crate::transports::vi::nic_over_udp;
use crate::transports::{Contestant, Exercise};
use highwire::netmem::{Memory, MemoryOptions, NodeOptions, NodeServer, PagedRegion, PagingOptions};
use highwire::rpc::Rpc;
use std::sync::atomic::Ordering::Relaxed;

/// Why they cannot be measured here.
pub(super) fn missing() -> Option<String> {
    None
}

/// This process's end: [`Side::Reads`] in the driver, with a region that has what [`super::fill`] says;
/// [`Side::Donates`] in the peer.
pub(super) fn meet(contestant: Contestant, link: &mut Link, region: Region) -> Result<Side, BenchError> {
    let name = contestant.name();
    let nic = nic_over_udp(contestant)?;
    let rpc = Rpc::new(&nic).map_err(BenchError::library(name, "making ready for calls"))?;
    let side = match link.role {
        Role::Peer => {
            let address = match contestant {
                Contestant::Paged | Contestant::PagedMapped => {
                    format!("shm:bench-{name}-{}", std::process::id())
                }
                _ => format!("udp:{}", std::net::SocketAddr::new(link.address(contestant.wire())?, 0)),
            };
            // What the region is divided into may not fill a node to the last page.
            let options = NodeOptions::new((region.bytes + region.bytes / 4) as u64, &address);
            let node = NodeServer::start(&rpc, options).map_err(BenchError::library(name, "donating memory"))?;
            if !node.wait_until_in(PATIENCE) {
                return Err(BenchError::NobodyLeft);
            }
            link.tell(&node.addresses()[0], &[])?;
            Side::Donates(Box::new(Node { node, spinning: link.spinning }))
        }
        Role::Driver => {
            let (address, _) = link.hear::<String>()?;
            let copies = contestant != Contestant::PagedMapped;
            Side::Reads(Box::new(Paged::make(name, &rpc, &address, region, copies)?))
        }
    };
    link.meet()?;
    Ok(side)
}

struct Paged {
    name: &'static str,
    region: PagedRegion,
    bytes: usize,
    /// Whether what is read in order is copied by `read_at`.
    copies: bool,
    in_order: bool,
}

impl Paged {
    fn make(name: &'static str, rpc: &Rpc, address: &str, region: Region, copies: bool) -> Result<Paged, BenchError> {
        let memory = Memory::connect(rpc, address, MemoryOptions::default());
        let memory = memory.map_err(BenchError::library(name, "finding nodes"))?;
        let paged = memory.paged_region(region.bytes as u64, PagingOptions::new(region.budget as u64));
        let paged = paged.map_err(BenchError::library(name, "making a paged region"))?;
        let mut piece = vec![0; FILLED_AT_A_TIME];
        for at in (0..region.bytes).step_by(FILLED_AT_A_TIME) {
            let piece = &mut piece[..FILLED_AT_A_TIME.min(region.bytes - at)];
            fill(at, piece);
            paged.write_at(at as u64, piece).map_err(BenchError::library(name, "filling a paged region"))?;
        }
        paged.flush().map_err(BenchError::library(name, "storing a paged region"))?;
        Ok(Paged { name, region: paged, bytes: region.bytes, copies, in_order: false })
    }
}

impl Reader for Paged {
    /// What earlier trials left in its budget stays: that is what a budget is for.
    fn prepare(&mut self, exercise: Exercise) -> Result<(), BenchError> {
        self.in_order = exercise == Exercise::Sequential;
        Ok(())
    }

    /// Single pages are read as the memory that they are: those that are away come by faults, as for any program.
    #[inline]
    fn read(&mut self, at: usize, into: &mut [u8]) -> Result<(), BenchError> {
        assert!(at.is_multiple_of(PAGE_BYTES) && at + into.len() <= self.bytes, "{at} + {}", into.len());
        if self.in_order && self.copies {
            self.region.read_at(at as u64, into).map_err(BenchError::library(self.name, "reading a paged region"))?;
            std::hint::black_box(into);
            return Ok(());
        }
        let words = &self.region.words()[at / 8..(at + into.len()) / 8];
        for (word, into) in words.iter().zip(into.chunks_exact_mut(8)) {
            into.copy_from_slice(&word.load(Relaxed).to_le_bytes());
        }
        std::hint::black_box(into);
        Ok(())
    }
}

struct Node {
    node: NodeServer,
    spinning: bool,
}

impl Workers for Node {
    fn expect_work(&mut self, some: bool) {
        self.node.set_busy(some && self.spinning);
    }
}

const FILLED_AT_A_TIME: usize = 1 << 20;
