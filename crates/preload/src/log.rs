//! What `highwire run --log` tells: a line on standard error for each connection that gets a lane, does not, or ends.

use crate::process;
use crate::raw;
use highwire_lane::counters::Reason;
use libc::c_int;
use rustix::fd::BorrowedFd;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static WANTED: AtomicBool = AtomicBool::new(false);

/// A line, without memory of anybody's.
struct Line {
    bytes: [u8; 512],
    used: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // One that is too long is cut.
        let room = &mut self.bytes[self.used..];
        let bytes = text.len().min(room.len());
        room[..bytes].copy_from_slice(&text.as_bytes()[..bytes]);
        self.used += bytes;
        Ok(())
    }
}

/// In the constructor: whether there is to be a log.
pub(crate) fn begin() {
    // SAFETY: called from the constructor, when nothing else runs that could change the environment.
    let wanted = unsafe { !libc::getenv(c"HIGHWIRE_LANES_LOG".as_ptr()).is_null() };
    WANTED.store(wanted, Ordering::Relaxed);
}

/// Tells how it is with the connection of a descriptor.
pub(crate) fn tell(fd: c_int, reason: Reason) {
    if !WANTED.load(Ordering::Relaxed) || process::is_sandboxed() {
        return;
    }
    // SAFETY: the program's descriptor, which it is in the middle of using.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut line = Line { bytes: [0; 512], used: 0 };
    let _ = write!(line, "highwire: process {}, descriptor {fd}", process::number());
    if let [Some(local), Some(remote)] = highwire_mem::socket_names(socket) {
        let _ = write!(line, ", {local} to {remote}");
    }
    let _ = writeln!(line, ": {}", reason.words());
    let _ = raw::write(2, &line.bytes[..line.used]);
}
