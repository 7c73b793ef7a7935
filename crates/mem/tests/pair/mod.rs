//! Two sides of one connection in one process: each has its own region and maps the other's.

// Every test file uses its own part of this.
#![allow(dead_code)]

use highwire_mem::{
    Block, BlockShape, Flags, Kind, OwnMemory, OwnRegion, PeerMemory, PeerRegion, REGION_HEADER_BYTES, SlotHead,
    SlotReader, SlotWriter,
};
use std::os::fd::AsFd;

pub struct Side {
    pub own: OwnMemory,
    pub peer: PeerMemory,
    pub block: Block,
    pub start: u64,
}

impl Side {
    pub fn pair(depth: u32, loans: u32, start: u64) -> (Side, Side) {
        let shape = BlockShape::new(depth, loans).unwrap();
        let bytes = REGION_HEADER_BYTES + shape.bytes();
        let block = Block::new(REGION_HEADER_BYTES as u64, shape, bytes).unwrap();
        let memory = || {
            let region = OwnRegion::create(bytes).unwrap();
            block.prepare(region.memory(), start, true);
            let fd = region.as_fd().try_clone_to_owned().unwrap();
            let seen = PeerRegion::adopt(fd, bytes as u64, bytes as u64).unwrap();
            (region.memory().clone(), seen.memory().clone())
        };
        let ((one, one_seen), (other, other_seen)) = (memory(), memory());
        (Side { own: one, peer: other_seen, block, start }, Side { own: other, peer: one_seen, block, start })
    }

    pub fn writer(&self, full_fence: bool) -> SlotWriter {
        SlotWriter::new(self.own.clone(), self.block, self.peer.clone(), self.block, self.start, full_fence)
    }

    pub fn reader(&self, full_fence: bool) -> SlotReader {
        SlotReader::new(self.own.clone(), self.block, self.peer.clone(), self.block, self.start, full_fence)
    }
}

/// The head of a whole message of `length` bytes in its slot.
pub fn inline(length: u32, immediate: u32) -> SlotHead {
    SlotHead { kind: Kind::Inline, flags: Flags::WHOLE, control: 0, spans: 0, length, immediate }
}

/// Numbers from a seed; the seed is in the message of every test that fails.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}
