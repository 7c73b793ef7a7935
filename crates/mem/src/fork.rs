//! Knowing that one is a forked child: the memory is shared with the parent then, and must not be
//! touched as if it were one's own.

use crate::sys::wipe_on_fork_page;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

struct Page(Option<NonNull<AtomicU32>>);

// SAFETY: the page is mapped for as long as the process lives and only read as an atomic.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

static PAGE: OnceLock<Page> = OnceLock::new();

/// True in a child that was forked after this process first used Highwire, however it was forked.
/// One load, once the page is there.
#[inline]
pub fn in_forked_child() -> bool {
    match PAGE.get_or_init(|| Page(wipe_on_fork_page())).0 {
        // SAFETY: mapped forever by `wipe_on_fork_page`.
        Some(word) => unsafe { word.as_ref() }.load(Ordering::Relaxed) == 0,
        None => false,
    }
}
