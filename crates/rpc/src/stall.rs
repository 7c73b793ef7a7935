//! Where nothing may block: continuations and quick handlers run in the loop that brings everybody's answers.

use std::cell::Cell;

thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });

/// Runs `run` as something that may not block.
#[inline]
pub(crate) fn inside<T>(run: impl FnOnce() -> T) -> T {
    let before = INSIDE.replace(true);
    let result = run();
    INSIDE.set(before);
    result
}

/// Whether this thread is inside such a thing.
#[inline]
pub(crate) fn is_inside() -> bool {
    INSIDE.get()
}
