//! A lock that costs the thread that usually takes it next to nothing.
//!
//! A mutex costs two atomic exchanges, each of which waits until every store before it is done: those to a line that the
//! peer is reading, too. Here the *owner*, the thread that took it last, announces itself with a plain store and looks
//! whether somebody wants it; whoever does says so, has every CPU settle ([`crate::heavy_barrier`]), and waits until the
//! owner is out. That is dear, so a lock that changes hands often becomes a plain mutex.
//!
//! ```text
//!        owner                                another
//!   O1  inside[tenure] = true            A1  takes the mutex; wanted = true
//!       ── light barrier ──                  ── heavy barrier ──
//!   O2  wanted, or owned by another?     A2  waits while inside[tenure]
//!       no: it has the lock              A3  owner = itself, tenure + 1; wanted = false
//!       yes: inside[tenure] = false, mutex
//! ```
//! As with doorbells: one of O2 and A2 sees the other.

use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, Ordering, sleeper_fence, writer_fence, yield_now};
#[cfg(not(loom))]
use std::cell::UnsafeCell;
#[cfg(not(loom))]
use std::ops::{Deref, DerefMut};

/// Nobody took it yet.
const NOBODY: usize = 0;
/// It changed hands too often: the mutex is the lock.
const EVERYBODY: usize = usize::MAX;
/// So often it may.
const CHANGES_MAX: u32 = 8;
/// So many can be told apart, by the highest bits of the owner; no thread's number has any of them.
const TENURES: usize = 16;
const TENURE_SHIFT: u32 = usize::BITS - TENURES.ilog2();
const THREAD: usize = (1 << TENURE_SHIFT) - 1;
const _: () = assert!((CHANGES_MAX as usize) < TENURES - 1);

/// Who may be inside, without what is inside.
#[derive(Debug)]
pub(crate) struct OwnerGate {
    /// The thread, and in the highest bits which tenure this is.
    owner: AtomicUsize,
    /// One for each tenure: whoever comes too late, and takes its announcement back, must not take back another's.
    inside: [AtomicBool; TENURES],
    wanted: AtomicBool,
    /// How often it changed hands.
    changes: Mutex<u32>,
}

/// How somebody came in.
pub(crate) enum Entry<'a> {
    /// As its owner, in this tenure.
    Owner(usize),
    /// With the mutex; as the owner of this tenure too, if there is one.
    Mutex(#[expect(dead_code, reason = "it is held")] MutexGuard<'a, u32>, Option<usize>),
}

impl OwnerGate {
    pub(crate) fn new() -> OwnerGate {
        let owner = if plain() { EVERYBODY } else { NOBODY };
        OwnerGate {
            owner: AtomicUsize::new(owner),
            inside: std::array::from_fn(|_| AtomicBool::new(false)),
            wanted: AtomicBool::new(false),
            changes: Mutex::new(0),
        }
    }

    /// Comes in as thread `me`, which is neither 0 nor the highest number. Not again before it is out.
    #[inline(always)]
    pub(crate) fn enter(&self, me: usize) -> Entry<'_> {
        let owner = self.owner.load(Ordering::Relaxed);
        if owner & THREAD == me {
            let tenure = owner >> TENURE_SHIFT;
            let inside = &self.inside[tenure];
            // Acquire: pairs with the release in `leave`, of a thread that had this number before. Nobody but the owner
            // of this tenure ever writes it.
            assert!(!inside.load(Ordering::Acquire), "a thread takes a lock that it has");
            inside.store(true, Ordering::Relaxed);
            writer_fence(false);
            // Acquire: who has taken it meanwhile, and wants nothing any more, is seen to be the owner.
            if !self.wanted.load(Ordering::Acquire) && self.owner.load(Ordering::Relaxed) == owner {
                return Entry::Owner(tenure);
            }
            inside.store(false, Ordering::Release);
        }
        self.enter_by_mutex(me)
    }

    #[cold]
    #[inline(never)]
    fn enter_by_mutex(&self, me: usize) -> Entry<'_> {
        let mut changes = lock(&self.changes);
        let owner = self.owner.load(Ordering::Relaxed);
        if owner != EVERYBODY && owner & THREAD != me {
            if owner != NOBODY {
                self.wanted.store(true, Ordering::SeqCst);
                sleeper_fence();
                // Acquire: pairs with the release in `leave`.
                let mut looks = 0u32;
                while self.inside[owner >> TENURE_SHIFT].load(Ordering::Acquire) {
                    looks += 1;
                    yield_now(looks);
                }
                *changes += 1;
            }
            let next = if *changes > CHANGES_MAX { EVERYBODY } else { me | (*changes as usize) << TENURE_SHIFT };
            self.owner.store(next, Ordering::Relaxed);
            self.wanted.store(false, Ordering::Release);
        }
        let owner = self.owner.load(Ordering::Relaxed);
        let tenure = (owner != EVERYBODY).then_some(owner >> TENURE_SHIFT);
        if let Some(tenure) = tenure {
            // Should this thread come again, it sees that it is inside.
            self.inside[tenure].store(true, Ordering::Relaxed);
        }
        Entry::Mutex(changes, tenure)
    }

    /// Goes out; whoever has the mutex lets go of it after this.
    #[inline(always)]
    pub(crate) fn leave(&self, entry: &Entry<'_>) {
        if let Entry::Owner(tenure) | Entry::Mutex(_, Some(tenure)) = entry {
            self.inside[*tenure].store(false, Ordering::Release);
        }
    }
}

#[cfg(not(loom))]
fn plain() -> bool {
    !crate::heavy_barrier_available()
}

#[cfg(loom)]
fn plain() -> bool {
    false
}

fn lock(mutex: &Mutex<u32>) -> MutexGuard<'_, u32> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A lock that costs the thread that usually takes it next to nothing. A thread that has it and takes it again panics, or
/// waits for ever.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct OwnerLock<T> {
    gate: OwnerGate,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a guard, of which there is one at a time, so that sharing the lock is handing
// the value from thread to thread.
#[cfg(not(loom))]
unsafe impl<T: Send> Sync for OwnerLock<T> {}

/// Has the lock.
#[cfg(not(loom))]
#[must_use]
pub struct OwnerGuard<'a, T> {
    lock: &'a OwnerLock<T>,
    entry: Entry<'a>,
    /// The lock is the thread's that took it.
    _here: std::marker::PhantomData<*const ()>,
}

#[cfg(not(loom))]
impl<T> OwnerLock<T> {
    /// A lock around `value`.
    pub fn new(value: T) -> OwnerLock<T> {
        OwnerLock { gate: OwnerGate::new(), value: UnsafeCell::new(value) }
    }

    /// Waits until nobody has it.
    #[inline(always)]
    pub fn lock(&self) -> OwnerGuard<'_, T> {
        let entry = self.gate.enter(this_thread());
        OwnerGuard { lock: self, entry, _here: std::marker::PhantomData }
    }

    /// The value, of which nobody else knows any more.
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

/// A number that no two living threads have.
#[cfg(not(loom))]
#[inline(always)]
fn this_thread() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here) as usize)
}

#[cfg(not(loom))]
impl<T> Deref for OwnerGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: whoever has come in through the gate is alone.
        unsafe { &*self.lock.value.get() }
    }
}

#[cfg(not(loom))]
impl<T> DerefMut for OwnerGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: whoever has come in through the gate is alone.
        unsafe { &mut *self.lock.value.get() }
    }
}

#[cfg(not(loom))]
impl<T> Drop for OwnerGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.lock.gate.leave(&self.entry);
    }
}

#[cfg(test)]
mod tests;
