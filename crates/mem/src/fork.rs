//! Knowing that one is a forked child: the memory is shared with the parent then, and must not be
//! touched as if it were one's own.

use crate::sys::wipe_on_fork_page;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Stands for the page until it is there, and where the kernel has none.
static NOT_FORKED: AtomicU32 = AtomicU32::new(1);
static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const NOT_FORKED).cast_mut());

/// Begins to watch for forks. Children forked before are not known as such.
pub fn watch_for_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(word) = wipe_on_fork_page() {
            WORD.store(word.as_ptr(), Ordering::Release);
        }
    });
}

/// True in a child that was forked after [`watch_for_forks`], however it was forked. Two loads.
#[inline(always)]
pub fn in_forked_child() -> bool {
    // SAFETY: the pointer is to a static, or to a page that stays mapped for ever.
    unsafe { (*WORD.load(Ordering::Acquire)).load(Ordering::Relaxed) == 0 }
}
