//! Where nothing may block: continuations and quick handlers run in the loop that brings everybody's answers.

use std::cell::Cell;

thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });

/// Runs `run` as something that may not block.
#[inline]
pub(crate) fn inside<T>(run: impl FnOnce() -> T) -> T {
    // However it ends: a thread that survives a panic may block again.
    let _outside = Restore(INSIDE.replace(true));
    run()
}

struct Restore(bool);

impl Drop for Restore {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

/// Whether this thread is inside such a thing.
#[inline]
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}
