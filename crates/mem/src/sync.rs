//! The atomics of this crate: the machine's, or loom's when the rings are model-checked.

#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
// For the models of this crate only.
#[cfg(all(loom, test))]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize},
};

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

/// Whether the writers of this process must fence: `asked` by a peer whose sleepers have no heavy
/// barrier, or because this process takes no part in those of others. Taking part begins here.
pub(crate) fn writers_fence(asked: bool) -> bool {
    #[cfg(not(loom))]
    let left_out = !crate::sys::heavy_barrier_available();
    #[cfg(loom)]
    let left_out = false;
    asked || left_out
}

/// The sleeper's half: every writer's earlier stores are visible after it, and the sleeper's own
/// earlier stores are visible to them. Pairs with [`writer_fence`].
pub(crate) fn sleeper_fence() {
    #[cfg(not(loom))]
    crate::sys::heavy_barrier();
    #[cfg(loom)]
    fence(Ordering::SeqCst);
}

/// Lets others run; at first only the CPU's other thread.
#[cfg(any(not(loom), test))]
pub(crate) fn yield_now(looks: u32) {
    #[cfg(not(loom))]
    if looks < 64 {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
    #[cfg(loom)]
    {
        let _ = looks;
        loom::thread::yield_now();
    }
}
