//! Memory of this library's own: the program's allocator may be in the middle of something when a hook is called.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

const BYTES: usize = 512 * 1024;

/// Gives memory out and never takes it back: the little that is needed is for regions, which stay.
pub(crate) struct Arena {
    memory: UnsafeCell<[u8; BYTES]>,
    used: AtomicUsize,
}

// SAFETY: every allocation is a part of the memory that nobody else was given.
unsafe impl Sync for Arena {}

impl Arena {
    pub(crate) const fn new() -> Arena {
        Arena { memory: UnsafeCell::new([0; BYTES]), used: AtomicUsize::new(0) }
    }

    /// Whether there is enough left for another region.
    pub(crate) fn has_room(&self) -> bool {
        self.used.load(Ordering::Relaxed) < BYTES - 16 * 1024
    }
}

// SAFETY: parts do not overlap, since `used` only grows, and are aligned as asked.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let begin = self.memory.get().cast::<u8>();
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let start = (begin as usize + used).next_multiple_of(layout.align()) - begin as usize;
            let Some(end) = start.checked_add(layout.size()).filter(|end| *end <= BYTES) else {
                return std::ptr::null_mut();
            };
            match self.used.compare_exchange_weak(used, end, Ordering::Relaxed, Ordering::Relaxed) {
                // SAFETY: inside the array.
                Ok(_) => return unsafe { begin.add(start) },
                Err(now) => used = now,
            }
        }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}
