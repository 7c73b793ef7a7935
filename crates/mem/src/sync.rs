//! The atomics of this crate: the machine's, or loom's when the rings are model-checked.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The writer's half of the sleep/wake handshake: orders an earlier store before a later load.
///
/// Where [`crate::heavy_barrier`] works, the sleeper pays for both sides with one system call and
/// this is only a barrier to the compiler. Pairs with [`sleeper_fence`].
#[inline(always)]
pub(crate) fn writer_fence(full: bool) {
    #[cfg(not(loom))]
    if full {
        fence(Ordering::SeqCst);
    } else {
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }
    #[cfg(loom)]
    {
        let _ = full;
        fence(Ordering::SeqCst);
    }
}

/// The sleeper's half: every writer's earlier stores are visible after it, and the sleeper's own
/// earlier stores are visible to them. Pairs with [`writer_fence`].
pub(crate) fn sleeper_fence() {
    #[cfg(not(loom))]
    crate::sys::heavy_barrier();
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}
