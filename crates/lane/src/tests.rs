//! One direction with a TCP connection that is a queue: whatever the order of steps, the stream stays one stream.

use crate::{Incoming, Next, Outgoing, Published, Side};
use highwire_mem::SharedMemory;

#[cfg(loom)]
mod modelled;
#[cfg(not(loom))]
mod simulated;

/// Byte number `at` of the stream.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 24) as u8
}

/// Writes `len` bytes of the stream from `from` on into the lane, if they may go there.
fn publish(out: Outgoing<'_>, from: u64, len: usize) -> Published {
    let bytes: Vec<u8> = (from..from + len as u64).map(byte).collect();
    out.publish(len, |memory: &SharedMemory, at| {
        memory.copy_in(at, &bytes);
        len
    })
}

/// Takes up to `most` bytes of a record and checks them.
fn take(from: Incoming<'_>, record: crate::Record, at: u64, most: usize) -> u64 {
    let mut bytes = vec![0; most.min(record.left())];
    let len = bytes.len();
    from.take(record, most, true, |memory, place, _| memory.copy_out(place, &mut bytes));
    for (index, found) in bytes.iter().enumerate() {
        assert_eq!(*found, byte(at + index as u64), "byte {} of the stream", at + index as u64);
    }
    len as u64
}
