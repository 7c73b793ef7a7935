//! A lock in shared memory that names the thread which has it.

use highwire_mem::SharedMemory;

/// Held for the time of a copy, never over a wait. It can be taken from a thread that is dead, since everything that it
/// protects becomes true by one store.
#[derive(Clone, Copy, Debug)]
pub struct ThreadLock<'m> {
    memory: &'m SharedMemory,
    at: usize,
}

impl<'m> ThreadLock<'m> {
    pub(crate) fn new(memory: &'m SharedMemory, at: usize) -> ThreadLock<'m> {
        ThreadLock { memory, at }
    }

    /// Takes it for `thread`, or tells who has it.
    #[inline]
    pub fn try_lock(self, thread: u32) -> Result<(), u32> {
        self.memory.exchange32(self.at, 0, thread)
    }

    /// Takes it from `owner`, who is dead or has left it behind.
    pub fn take_over(self, owner: u32, thread: u32) -> bool {
        self.memory.exchange32(self.at, owner, thread).is_ok()
    }

    /// Gives it back, if it is still this thread's.
    #[inline]
    pub fn unlock(self, thread: u32) {
        if self.memory.load32(self.at) == thread {
            self.memory.store32(self.at, 0);
        }
    }
}
