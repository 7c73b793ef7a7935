//! Knowing that one is a forked child: the memory is shared with the parent then, and must not be
//! touched as if it were one's own.

use crate::sys::wipe_on_fork_page;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

/// Stands for the page until it is there, and where the kernel has none.
static UNWATCHED: AtomicU32 = AtomicU32::new(0);
static WORD: AtomicPtr<AtomicU32> = AtomicPtr::new((&raw const UNWATCHED).cast_mut());

/// The process that something belongs to. A child that is forked later is another one, however it
/// was forked, and may have things of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process(u32);

impl Process {
    /// This process. The kernel clears the word in every child, which then writes its own.
    pub fn current() -> Process {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            if let Some(word) = wipe_on_fork_page() {
                WORD.store(word.as_ptr(), Ordering::Release);
            }
        });
        let own = std::process::id();
        word().store(own, Ordering::Relaxed);
        Process(own)
    }

    /// True in a process that has not asked who it is: at first, and in every forked child.
    #[inline(always)]
    pub fn is_new() -> bool {
        word().load(Ordering::Relaxed) == 0
    }

    /// Its number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// False in a forked child of the process that it stands for. Two loads and a comparison.
    #[inline(always)]
    pub fn is_this(self) -> bool {
        word().load(Ordering::Relaxed) == self.0
    }
}

#[inline(always)]
fn word() -> &'static AtomicU32 {
    // SAFETY: the pointer is to a static, or to a page that stays mapped for ever.
    unsafe { &*WORD.load(Ordering::Acquire) }
}
