//! Whether any process could write to a file while it was sent.

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Watches a file for writers, at the cost of a few system calls at the beginning and at the end.
///
/// The time of change does not tell: a write through a mapping updates it at its first fault on a page and not at the
/// next, and on tmpfs often not at all. But a mapping comes from a descriptor that was opened for writing:
///
/// ```text
///    watch begins   no writer now      the file is read         no writer now    no writer has closed,
///         │              │         ◀──────────────────────▶          │           nothing was written
///         ▼              ▼                                           ▼                    ▼
///   a writer of this time closes before, or is found at the end, or its close is reported
/// ```
#[derive(Debug)]
pub struct WriterWatch<'a> {
    file: &'a File,
    /// None if the file had writers at the beginning, or if that cannot be known.
    watching: Option<Watching>,
}

impl WriterWatch<'_> {
    /// Begins to watch, before the file is read.
    pub fn begin(file: &File) -> WriterWatch<'_> {
        // Before the writers are counted: from then on none may come and go unseen.
        let watching = Watching::begin(file).ok().filter(|_| is_local(file) && !has_writers(file));
        WriterWatch { file, watching }
    }

    /// True if no process could write to the file from [`WriterWatch::begin`] until now. False also where that cannot
    /// be known.
    pub fn saw_no_writer(&self) -> bool {
        // In this order: a writer's close is reported before the writer is no longer counted.
        self.watching.as_ref().is_some_and(|watching| !has_writers(self.file) && watching.has_no_event())
    }
}

/// True if a process is known to have the file open for writing now.
pub(crate) fn is_being_written(file: &File) -> bool {
    is_local(file) && matches!(highwire_mem::has_writers(file), Ok(true))
}

/// An inotify instance that watches one file: for a descriptor closed that was open for writing, and for bytes written.
#[derive(Debug)]
struct Watching {
    instance: Option<OwnedFd>,
    watch: i32,
}

impl Watching {
    fn begin(file: &File) -> rustix::io::Result<Watching> {
        let instance = match idle_instances().pop() {
            Some((process, instance)) if process == std::process::id() => instance,
            // A forked child would share its parent's events.
            _ => inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?,
        };
        // By its descriptor: its path may be another file's by now.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let watch = inotify::add_watch(&instance, path, WatchFlags::CLOSE_WRITE | WatchFlags::MODIFY)?;
        Ok(Watching { instance: Some(instance), watch })
    }

    fn has_no_event(&self) -> bool {
        self.instance.as_ref().is_some_and(|instance| read_event(instance) == Err(Errno::AGAIN))
    }
}

impl Drop for Watching {
    /// Keeps the instance for the next file: to close one that was just used takes 20 ms.
    fn drop(&mut self) {
        let Some(instance) = self.instance.take() else { return };
        let ended = inotify::remove_watch(&instance, self.watch);
        let end = loop {
            if let Err(end) = read_event(&instance) {
                break end;
            }
        };
        let mut idle = idle_instances();
        if ended.is_ok() && end == Errno::AGAIN && idle.len() < IDLE_MAX {
            idle.push((std::process::id(), instance));
        }
    }
}

fn read_event(instance: &OwnedFd) -> rustix::io::Result<usize> {
    // Larger than any event without a name.
    rustix::io::read(instance, &mut [0; 64])
}

/// Instances that watch nothing and have no event, each with the process that made it.
fn idle_instances() -> std::sync::MutexGuard<'static, Vec<(u32, OwnedFd)>> {
    static IDLE: Mutex<Vec<(u32, OwnedFd)>> = Mutex::new(Vec::new());
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True also where the kernel does not say.
fn has_writers(file: &File) -> bool {
    highwire_mem::has_writers(file).unwrap_or(true)
}

/// True for file systems all of whose writers the kernel counts at the file itself. Over a network other hosts write; and
/// a file of overlayfs that is mapped is counted at the file below it.
fn is_local(file: &File) -> bool {
    // Its type has another width on each architecture; the numbers have 32 bits.
    rustix::fs::fstatfs(file).is_ok_and(|found| LOCAL.contains(&(found.f_type as u32)))
}

/// Instances kept for the next files, a descriptor each.
const IDLE_MAX: usize = 4;
/// btrfs, ext2 to ext4, f2fs, tmpfs, xfs: from the kernel's `magic.h`.
const LOCAL: [u32; 5] = [0x9123_683e, 0xef53, 0xf2f5_2010, 0x0102_1994, 0x5846_5342];
