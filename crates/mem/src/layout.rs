//! Where things are: the region header, the block of a virtual interface, the slot.
//!
//! ```text
//! region   0x000  magic, version, length            (one line, written once)
//!          0x040  cpu                               (the CPU its owner last waited on)
//!          0x400  blocks and payload areas, in the order they were asked for
//!
//! block    0x000  consumed: u64                     line 0: progress in the peer's ring
//!          0x040  attention: u32, state: u32        line 1: rarely written, read at every send
//!          0x080  reserved
//!          0x100  held:    depth × u64              index + 1 of a consumed slot that is held
//!          ...    release: log × u64                a log of those given back, see `log_entries`
//!          ...    slots:   depth × 256              on a multiple of 256
//!
//! slot     0x00   sequence: u32                     written last; index + 1 of the message's slot
//!          0x04   kind u8, flags u8, control u8, spans u8
//!          0x08   length: u32                       payload bytes that this slot carries
//!          0x0c   immediate: u32
//!          0x10   content: 240 bytes
//! ```

/// Version of everything described here, exchanged at rendezvous.
///
/// * 1: the first.
/// * 2: the payload of a slot may grow while it is the last; a doorbell page may be for one VI alone; rings say what
///   they are for.
pub const LAYOUT_VERSION: u32 = 2;

/// Bytes of a slot: four cache lines.
pub const SLOT_BYTES: usize = 256;
/// Bytes of a slot's head.
pub const HEAD_BYTES: usize = 16;
/// Bytes of content that a slot carries.
pub const CONTENT_BYTES: usize = SLOT_BYTES - HEAD_BYTES;
/// Most control bytes of a message.
pub const CONTROL_BYTES_MAX: usize = 128;
/// Bytes at the start of a region that no block may use.
pub const REGION_HEADER_BYTES: usize = 0x400;

#[cfg_attr(loom, allow(dead_code))]
pub(crate) const REGION_MAGIC: u64 = u64::from_le_bytes(*b"highwire");
#[cfg_attr(loom, allow(dead_code))]
pub(crate) const REGION_VERSION_AT: usize = 0x08;
#[cfg_attr(loom, allow(dead_code))]
pub(crate) const REGION_LENGTH_AT: usize = 0x10;
pub(crate) const REGION_CPU_AT: usize = 0x40;

pub(crate) const CONSUMED_AT: usize = 0x00;
pub(crate) const ATTENTION_AT: usize = 0x40;
pub(crate) const STATE_AT: usize = 0x44;
pub(crate) const HELD_AT: usize = 0x100;

pub(crate) const META_AT: usize = 0x04;
pub(crate) const LENGTH_AT: usize = 0x08;
const IMMEDIATE_AT: usize = 0x0c;

const DEPTH_MAX: u32 = 4096;
const LOANS_MAX: u32 = 4096;

/// How many slots and loans a block has; the same on both sides of a virtual interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    depth: u32,
    loans: u32,
}

impl BlockShape {
    /// A shape of `depth` slots, of which the reader may hold up to `loans` payloads in place.
    /// Both are powers of two, from 2 to 4096; anything else is `None`.
    pub fn new(depth: u32, loans: u32) -> Option<BlockShape> {
        let good = |n: u32, max: u32| n.is_power_of_two() && (2..=max).contains(&n);
        (good(depth, DEPTH_MAX) && good(loans, LOANS_MAX)).then_some(BlockShape { depth, loans })
    }

    /// Slots in each direction.
    pub fn depth(self) -> u32 {
        self.depth
    }

    /// Payloads that a reader may hold at once.
    pub fn loans(self) -> u32 {
        self.loans
    }

    /// Bytes of a block of this shape.
    pub fn bytes(self) -> usize {
        self.slots_at() + self.depth as usize * SLOT_BYTES
    }

    /// Entries of the release log. The writer may not have read yet what was given back of the
    /// `loans` in its book, nor of the up to `depth` slots that it has not seen consumed.
    pub(crate) fn log_entries(self) -> u32 {
        (self.loans + self.depth).next_power_of_two()
    }

    pub(crate) fn release_at(self) -> usize {
        HELD_AT + self.depth as usize * 8
    }

    pub(crate) fn slots_at(self) -> usize {
        (self.release_at() + self.log_entries() as usize * 8).next_multiple_of(SLOT_BYTES)
    }
}

/// A block's place in its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    offset: usize,
    shape: BlockShape,
}

impl Block {
    /// A block at `offset` of a region of `region_bytes`, if that is a place where one can be.
    pub fn new(offset: u64, shape: BlockShape, region_bytes: usize) -> Option<Block> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(shape.bytes())?;
        let good = offset.is_multiple_of(SLOT_BYTES) && offset >= REGION_HEADER_BYTES && end <= region_bytes;
        good.then_some(Block { offset, shape })
    }

    /// Byte offset in the region.
    pub fn offset(self) -> usize {
        self.offset
    }

    /// Its shape.
    pub fn shape(self) -> BlockShape {
        self.shape
    }

    pub(crate) fn consumed(self) -> usize {
        self.offset + CONSUMED_AT
    }

    pub(crate) fn attention(self) -> usize {
        self.offset + ATTENTION_AT
    }

    /// Tells the peer how the owner of this block, in `own`, stands to the connection.
    pub fn set_state(self, own: &crate::OwnMemory, state: u32) {
        own.store32(self.offset + STATE_AT, state);
    }

    /// How the owner of this block, in `peer`, stands to the connection.
    #[inline]
    pub fn state(self, peer: &crate::PeerMemory) -> u32 {
        peer.load32(self.offset + STATE_AT)
    }

    #[inline]
    pub(crate) fn held(self, index: u64) -> usize {
        self.offset + HELD_AT + (index as usize & (self.shape.depth as usize - 1)) * 8
    }

    pub(crate) fn release(self, index: u64) -> usize {
        self.offset + self.shape.release_at() + (index as usize & (self.shape.log_entries() as usize - 1)) * 8
    }

    #[inline]
    pub(crate) fn slots(self) -> usize {
        self.offset + self.shape.slots_at()
    }
}

const _: () = {
    assert!(HEAD_BYTES + CONTENT_BYTES == SLOT_BYTES);
    assert!(IMMEDIATE_AT + 4 == HEAD_BYTES);
    assert!(META_AT == 4 && LENGTH_AT == META_AT + 4);
    assert!(CONTROL_BYTES_MAX <= CONTENT_BYTES);
    assert!(REGION_HEADER_BYTES.is_multiple_of(SLOT_BYTES));
    assert!(REGION_CPU_AT >= 64 && REGION_CPU_AT < REGION_HEADER_BYTES);
    // Progress is written often and attention read often: never in one line.
    assert!(ATTENTION_AT / 64 != CONSUMED_AT / 64 && HELD_AT / 64 != ATTENTION_AT / 64);
};
