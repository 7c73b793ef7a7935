//! What `highwire explain` shows, in a file that it can read while the program runs, and the switch of `highwire lanes`.
//!
//! `docs/protocol/lane.md` has the layout. The file replaces this library's own pages when the process first has a
//! socket; a forked child gets pages of its own again.

use crate::table::{SLOTS, Slot};
use highwire_lane::counters::{
    COUNTERS, Counter, HEADER_WORDS, MAGIC, PAGE_BYTES, PROCESS_WORD, Reason, SLOT_WORDS, SWITCH_WORD, directory,
};
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

#[repr(C, align(4096))]
struct Page {
    header: [AtomicU64; HEADER_WORDS],
    slots: [[AtomicU64; SLOT_WORDS]; SLOTS],
}

static PAGE: Page = Page {
    header: [const { AtomicU64::new(0) }; HEADER_WORDS],
    slots: [const { [const { AtomicU64::new(0) }; SLOT_WORDS] }; SLOTS],
};
const _: () = assert!(COUNTERS <= SLOT_WORDS);
const _: () = assert!(align_of::<Page>() == PAGE_BYTES && size_of::<Page>().is_multiple_of(PAGE_BYTES));

static SHOWN: AtomicBool = AtomicBool::new(false);

/// Adds to a counter of a slot. Two threads that do it at once may lose one of the additions.
#[inline(always)]
pub(crate) fn add(slot: &Slot, counter: Counter, amount: u64) {
    let word = &PAGE.slots[slot.index()][counter as usize];
    word.store(word.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

/// Says something of a slot.
pub(crate) fn set(slot: &Slot, counter: Counter, value: u64) {
    PAGE.slots[slot.index()][counter as usize].store(value, Ordering::Relaxed);
}

/// Takes back what was said of a slot, unless something else was said since.
pub(crate) fn unset(slot: &Slot, counter: Counter, value: u64) {
    let word = &PAGE.slots[slot.index()][counter as usize];
    let _ = word.compare_exchange(value, 0, Ordering::Relaxed, Ordering::Relaxed);
}

/// Says why bytes of a slot do not go by a lane.
pub(crate) fn explain(slot: &Slot, reason: Reason) {
    set(slot, Counter::Reason, reason as u64);
}

/// Whether this is the reason that was said last.
pub(crate) fn is_explained(slot: &Slot, reason: Reason) -> bool {
    PAGE.slots[slot.index()][Counter::Reason as usize].load(Ordering::Relaxed) == reason as u64
}

/// Begins anew for a slot.
pub(crate) fn clear(slot: &Slot) {
    let end = HEADER_WORDS * 8 + (slot.index() + 1) * SLOT_WORDS * 8;
    let backed = !SHOWN.load(Ordering::Relaxed) || end <= BACKED.load(Ordering::Relaxed);
    if !backed && !crate::process::is_sandboxed() && !back(end) {
        give_up();
    }
    PAGE.slots[slot.index()].iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

/// Whether `highwire lanes off` was said.
#[inline(always)]
pub(crate) fn switched_off() -> bool {
    PAGE.header[SWITCH_WORD].load(Ordering::Relaxed) != 0
}

/// Puts the pages into this process's file, once.
pub(crate) fn show() {
    if SHOWN.swap(true, Ordering::Relaxed) || crate::process::is_sandboxed() {
        return;
    }
    if !page_size_is_right() {
        // The pages are backed as they are, and no others are put in their place.
        BACKED.store(usize::MAX, Ordering::Relaxed);
        crate::log::tell_of_pages(kernel_page_bytes());
        return;
    }
    let process = crate::process::number();
    let mut name = [0; 64];
    let path = directory(rustix::process::geteuid().as_raw(), Some(process), &mut name);
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    // A file of an earlier process of this number is of no use to anybody.
    let _ = rustix::fs::unlink(path);
    // Without the directory, which `highwire run` makes, nothing is shown and nothing else changes.
    let Ok(file) = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) else { return };
    // A file beyond this limit would end the program by a signal.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < size_of::<Page>() as u64)
        || rustix::fs::ftruncate(&file, size_of::<Page>() as u64).is_err()
    {
        let _ = rustix::fs::unlink(path);
        return;
    }
    let (read_write, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
    let place = (&raw const PAGE).cast_mut().cast();
    // SAFETY: replaces exactly the pages of PAGE, which are aligned and nothing but atomic words, by pages of zeroes. The
    // kernel's pages are no larger, so that nothing else is on them.
    if unsafe { rustix::mm::mmap(place, size_of::<Page>(), read_write, fixed, &file, 0) }.is_ok() {
        BACKED.store(0, Ordering::Relaxed);
        if !back(PAGE_BYTES) {
            give_up();
            return;
        }
        PAGE.header[PROCESS_WORD].store(process.into(), Ordering::Relaxed);
        PAGE.header[0].store(MAGIC, Ordering::Release);
    }
}

/// Has memory for the beginning of the file, which it gets in pages. False where there is none: to write there would kill the
/// process.
fn back(bytes: usize) -> bool {
    let bytes = bytes.next_multiple_of(PAGE_BYTES);
    let begin = BACKED.load(Ordering::Relaxed).min(bytes);
    // SAFETY: pages of PAGE.
    let backed = unsafe {
        let place = (&raw const PAGE).cast_mut().byte_add(begin).cast();
        rustix::mm::madvise(place, bytes - begin, rustix::mm::Advice::LinuxPopulateWrite).is_ok()
    };
    if backed {
        BACKED.fetch_max(bytes, Ordering::Relaxed);
    }
    backed
}

/// Bytes of the kernel's pages.
fn kernel_page_bytes() -> usize {
    // SAFETY: takes a number.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}

/// Whether the file can be mapped over PAGE and nothing else. With larger pages, what is beside PAGE would be replaced too.
fn page_size_is_right() -> bool {
    kernel_page_bytes() == PAGE_BYTES
}

/// Shows nothing any more, and goes on.
fn give_up() {
    hide();
    detach();
    // Nobody tries again.
    SHOWN.store(true, Ordering::Relaxed);
    BACKED.store(usize::MAX, Ordering::Relaxed);
}

/// Bytes of the file that have memory.
static BACKED: AtomicUsize = AtomicUsize::new(0);

/// In a forked child: pages of its own, as they are.
pub(crate) fn detach() {
    if !SHOWN.swap(false, Ordering::Relaxed) || !page_size_is_right() {
        return;
    }
    let switch = if BACKED.load(Ordering::Relaxed) > 0 { PAGE.header[SWITCH_WORD].load(Ordering::Relaxed) } else { 0 };
    let (read_write, fixed) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
    let place = (&raw const PAGE).cast_mut().cast();
    // SAFETY: as in `show`.
    let _ = unsafe { rustix::mm::mmap_anonymous(place, size_of::<Page>(), read_write, fixed) };
    PAGE.header[SWITCH_WORD].store(switch, Ordering::Relaxed);
}

/// Removes the file of a process that ends in an orderly way.
pub(crate) fn hide() {
    if SHOWN.load(Ordering::Relaxed) && !crate::process::is_sandboxed() {
        let mut name = [0; 64];
        let _ = rustix::fs::unlink(directory(
            rustix::process::geteuid().as_raw(),
            Some(crate::process::number()),
            &mut name,
        ));
    }
}
