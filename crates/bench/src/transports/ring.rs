//! The floor: two rings of slots and their payload areas, with nothing above them.
//!
//! What is not here is what the library adds and is judged by: descriptors, completions, doorbells,
//! growing, checking. What is here is the same memory: slots of 256 bytes, messages up to 240 bytes
//! inside them, larger ones in a payload area walked through in turn, everything copied in and out.

use super::{Ordinary, Transport};
use crate::BenchError;
use crate::pair::{Link, Patience, Role};
use highwire_mem::{
    Block, BlockShape, CONTENT_BYTES, Flags, Kind, OwnMemory, OwnRegion, PayloadArea, PeerMemory, PeerRegion,
    REGION_HEADER_BYTES, SlotHead, SlotReader, SlotWriter,
};
use std::collections::VecDeque;
use std::os::fd::AsFd;

pub(super) struct RawRing {
    writer: SlotWriter,
    reader: SlotReader,
    own: OwnMemory,
    peer: PeerMemory,
    area: PayloadArea,
    /// Slots whose payload is in the area, oldest first.
    in_area: VecDeque<(u64, u64)>,
    /// Payload bytes read since progress was last published.
    unpublished_bytes: usize,
    sent: Ordinary,
    received: Ordinary,
}

impl RawRing {
    pub(super) fn meet(link: &mut Link) -> Result<Box<dyn Transport>, BenchError> {
        let shape = BlockShape::new(DEPTH, 2).expect("a power of two");
        let area_at = (REGION_HEADER_BYTES + shape.bytes()).next_multiple_of(4096);
        let bytes = area_at + AREA_BYTES;
        let region = OwnRegion::create(bytes)?;
        let handed = match link.role {
            Role::Driver => {
                link.tell(&(), &[region.as_fd()])?;
                link.hear::<()>()?.1
            }
            Role::Peer => {
                let handed = link.hear::<()>()?.1;
                link.tell(&(), &[region.as_fd()])?;
                handed
            }
        };
        let fd = handed.into_iter().next().ok_or(highwire_mem::CourierError::Closed)?;
        let peer = PeerRegion::adopt(fd, bytes as u64, bytes as u64)?.memory().clone();
        let own = region.memory().clone();
        let block = Block::new(REGION_HEADER_BYTES as u64, shape, bytes).expect("the region was made for it");

        // Every page is touched once by its writer and once by its reader, so that no trial pays
        // for page faults.
        own.copy_in(area_at, &vec![1; AREA_BYTES]);
        link.meet()?;
        peer.copy_out(area_at, &mut vec![0; AREA_BYTES]);

        block.prepare(&own, 0, true);
        let mut area = PayloadArea::new();
        area.move_to(area_at, AREA_BYTES);
        let writer = SlotWriter::new(own.clone(), block, peer.clone(), block, 0, false);
        let reader = SlotReader::new(own.clone(), block, peer.clone(), block, 0, false);
        link.meet()?;
        Ok(Box::new(RawRing {
            writer,
            reader,
            own,
            peer,
            area,
            in_area: VecDeque::new(),
            unpublished_bytes: 0,
            sent: Ordinary::new(),
            received: Ordinary::new(),
        }))
    }

    /// Frees the payloads that the reader has passed.
    fn collect(&mut self) -> Result<(), BenchError> {
        if self.writer.refresh()? {
            while let Some((slot, extent)) = self.in_area.front().copied() {
                if slot >= self.writer.consumed() {
                    break;
                }
                self.area.free(extent, |_, _| {});
                self.in_area.pop_front();
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn send(&mut self, size: usize) -> Result<(), BenchError> {
        if size <= CONTENT_BYTES {
            let mut patience = Patience::default();
            while self.writer.credit() == 0 {
                self.collect()?;
                patience.spin()?;
            }
            let head = SlotHead {
                kind: Kind::Inline,
                flags: Flags::WHOLE,
                control: 0,
                spans: 0,
                length: size as u32,
                immediate: 0,
            };
            self.writer.publish_plain(head, self.sent.of(size));
            return Ok(());
        }
        let mut from = 0;
        while from < size {
            let length = (size - from).min(PIECE_BYTES_MAX);
            self.send_piece(size, from, length)?;
            from += length;
        }
        Ok(())
    }

    fn send_piece(&mut self, size: usize, from: usize, length: usize) -> Result<(), BenchError> {
        let mut patience = Patience::default();
        let extent = loop {
            if self.writer.credit() > 0
                && let Some(extent) = self.area.reserve(length + SKEW_BYTES, length + SKEW_BYTES)
            {
                break extent;
            }
            self.collect()?;
            patience.spin()?;
        };
        self.own.copy_in(extent.offset, &self.sent.of(size)[from..from + length]);
        let head = SlotHead {
            kind: Kind::Spans,
            flags: Flags::WHOLE,
            control: 0,
            spans: 1,
            length: length as u32,
            immediate: 0,
        };
        let slot = self.writer.publish_span(head, 0, extent.offset as u64);
        self.in_area.push_back((slot, extent.id));
        Ok(())
    }

    #[inline(always)]
    fn receive(&mut self, size: usize) -> Result<(), BenchError> {
        let mut into = 0;
        while into < size {
            let mut patience = Patience::default();
            let head = loop {
                if let Some(head) = self.reader.head()? {
                    break head;
                }
                patience.spin()?;
            };
            let length = (head.length as usize).min(size - into);
            let target = &mut self.received.of(size)[into..into + length];
            if head.kind == Kind::Inline {
                self.reader.content(0, target);
            } else {
                let mut span = [0; 16];
                self.reader.content(0, &mut span);
                let offset = u64::from_le_bytes(span[8..].try_into().expect("eight bytes"));
                self.peer.copy_out(offset as usize, target);
            }
            into += length;
            self.reader.consume(false, false);
            self.unpublished_bytes += length;
            if self.reader.publish_due() || self.unpublished_bytes >= AREA_BYTES / 16 {
                self.reader.publish();
                self.unpublished_bytes = 0;
            }
        }
        Ok(())
    }
}

impl Transport for RawRing {
    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.send(size)?;
            self.receive(size)?;
        }
        Ok(())
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.receive(size)?;
            self.send(size)?;
        }
        Ok(())
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.send(size)?;
        }
        self.receive(1)
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            self.receive(size)?;
        }
        self.send(1)
    }
}

/// Slots of each ring.
const DEPTH: u32 = 64;
/// Bytes of each payload area: past the 2 MiB from which on lines come from the shared cache.
const AREA_BYTES: usize = 4 << 20;
/// Longer messages take several slots.
const PIECE_BYTES_MAX: usize = 256 << 10;
/// Between two payloads, so that they do not all begin at the same place in a page: a copy from one
/// such place to another is slowed down by the CPU's guess that its loads depend on its stores.
const SKEW_BYTES: usize = 128;
