//! What `highwire run --log` tells: a line on standard error for each connection that gets a lane, does not, or ends, and for
//! each program that is started and runs plain.

use crate::process;
use crate::raw;
use highwire_lane::counters::Reason;
use highwire_lane::program::Unfit;
use libc::{c_char, c_int};
use rustix::fd::{AsFd, BorrowedFd};
use std::ffi::CStr;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

static WANTED: AtomicBool = AtomicBool::new(false);

/// A line, without memory of anybody's.
pub(crate) struct Line {
    bytes: [u8; 512],
    used: usize,
}

impl Line {
    pub(crate) fn new() -> Line {
        Line { bytes: [0; 512], used: 0 }
    }

    pub(crate) fn text(&self) -> &[u8] {
        &self.bytes[..self.used]
    }
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

/// Tells that this process runs plain; before it counts as confined.
pub(crate) fn tell_plain(why: Unfit) {
    if WANTED.load(Ordering::Relaxed) {
        let mut line = Line::new();
        let _ = writeln!(line, "highwire: process {} runs plain: {}", raw::process(), why.words());
        let _ = raw::write(2, line.text());
    }
}

/// The program at a path is about to be executed, by this process or by a child of it: tells if it will run plain. One that
/// loads the library tells itself.
///
/// # Safety
/// As for `execve`, or for `execvp` if it is searched for.
#[unsafe(export_name = "hw_tell_program")]
unsafe extern "C" fn tell_program(path: *const c_char, searched: c_int, environment: *const *const c_char) {
    if !WANTED.load(Ordering::Relaxed) || process::is_sandboxed() || path.is_null() {
        return;
    }
    // SAFETY: by the contract, a string.
    let path = unsafe { CStr::from_ptr(path) };
    let mut place = [0; PATH_MAX];
    let found = if searched != 0 && !path.to_bytes().contains(&b'/') { search(path, &mut place) } else { Some(path) };
    let Some(path) = found.filter(|path| rustix::fs::access(*path, rustix::fs::Access::EXEC_OK).is_ok()) else {
        return;
    };
    // SAFETY: by the contract.
    unsafe { tell_start(path.to_bytes(), highwire_lane::program::unfit(path), environment) };
}

/// The same for a program that is executed by a descriptor, or by a path from there on.
///
/// # Safety
/// As for `execveat`.
#[unsafe(export_name = "hw_tell_program_at")]
unsafe extern "C" fn tell_program_at(
    folder: c_int,
    path: *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) {
    if !WANTED.load(Ordering::Relaxed) || process::is_sandboxed() || path.is_null() {
        return;
    }
    // SAFETY: by the contract, a string.
    let name = unsafe { CStr::from_ptr(path) };
    if folder == libc::AT_FDCWD || name.to_bytes().first() == Some(&b'/') {
        // SAFETY: by the contract.
        return unsafe { tell_program(path, 0, environment) };
    }
    if folder < 0 {
        return;
    }
    // SAFETY: the program's descriptor, by which it is about to execute another one.
    let folder = unsafe { BorrowedFd::borrow_raw(folder) };
    let opened;
    let file = if name.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
        folder
    } else {
        let how = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(folder, name, how, rustix::fs::Mode::empty()) else { return };
        opened = file;
        opened.as_fd()
    };
    let told = if name.is_empty() { b"an open file" } else { name.to_bytes() };
    // SAFETY: by the contract.
    unsafe { tell_start(told, highwire_lane::program::unfit_file(file), environment) };
}

/// Whether a program with this environment is started without the library.
///
/// # Safety
/// As for `execve`.
unsafe fn is_cleared(mut environment: *const *const c_char) -> bool {
    // SAFETY: strings up to a null pointer, by the contract.
    while let Some(variable) = unsafe { environment.as_ref() }.filter(|variable| !variable.is_null()) {
        // SAFETY: the same.
        if highwire_lane::program::preloads(unsafe { CStr::from_ptr(*variable) }.to_bytes()) {
            return false;
        }
        // SAFETY: not behind the null pointer.
        environment = unsafe { environment.add(1) };
    }
    true
}

/// Tells of a program that is unfit for lanes by its file, or by this environment.
///
/// # Safety
/// As for `execve`.
unsafe fn tell_start(path: &[u8], unfit: Option<Unfit>, environment: *const *const c_char) {
    // SAFETY: by the contract.
    let cleared = || unsafe { is_cleared(environment) }.then_some(Unfit::Environment);
    // One that loads the library tells itself.
    let Some(why) = unfit.or_else(cleared).filter(|why| *why != Unfit::Sanitizer) else { return };
    let mut line = Line::new();
    let _ = write!(line, "highwire: process {} starts ", raw::process());
    // A path may be anything; nothing in it moves a cursor.
    for byte in path.iter().take(NAME_MAX) {
        let _ = line.write_char(if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '?' });
    }
    let _ = writeln!(line, ", which runs plain: {}", why.words());
    let _ = raw::write(2, line.text());
}

/// The file that a program's name stands for.
fn search<'p>(name: &CStr, into: &'p mut [u8; PATH_MAX]) -> Option<&'p CStr> {
    // SAFETY: as libc itself does in `execvp`.
    let folders = unsafe { libc::getenv(c"PATH".as_ptr()) };
    if folders.is_null() {
        return None;
    }
    // SAFETY: a string of the environment, which ends with zero.
    let folders = unsafe { CStr::from_ptr(folders) }.to_bytes();
    let name = name.to_bytes();
    let mut length = 0;
    for folder in folders.split(|byte| *byte == b':') {
        let folder = if folder.is_empty() { b"." } else { folder };
        if folder.len() + 1 + name.len() >= into.len() {
            continue;
        }
        let parts = [folder, b"/", name, b"\0"];
        let mut used = 0;
        for part in parts {
            into[used..used + part.len()].copy_from_slice(part);
            used += part.len();
        }
        let path = CStr::from_bytes_with_nul(&into[..used]).ok()?;
        if rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() {
            length = used;
            break;
        }
    }
    CStr::from_bytes_with_nul(&into[..length]).ok()
}

/// Longer paths are not looked at.
const PATH_MAX: usize = 1024;
/// So much of a path is told.
const NAME_MAX: usize = 256;

/// Tells how it is with the connection of a descriptor.
pub(crate) fn tell(fd: c_int, reason: Reason) {
    if !WANTED.load(Ordering::Relaxed) || process::is_sandboxed() {
        return;
    }
    // SAFETY: the program's descriptor, which it is in the middle of using.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut line = Line::new();
    let _ = write!(line, "highwire: process {}, descriptor {fd}", process::number());
    if let [Some(local), Some(remote)] = highwire_mem::socket_names(socket) {
        let _ = write!(line, ", {local} to {remote}");
    }
    let _ = writeln!(line, ": {}", reason.words());
    let _ = raw::write(2, line.text());
}

/// Tells that `highwire explain` and `highwire lanes` cannot know of this process.
pub(crate) fn tell_of_pages(page_bytes: usize) {
    if !WANTED.load(Ordering::Relaxed) || process::is_sandboxed() {
        return;
    }
    let mut line = Line::new();
    let _ = writeln!(
        line,
        "highwire: process {}: not shown by `highwire explain`: this kernel has pages of {page_bytes} bytes, and counters are made \
         for pages of {}",
        process::number(),
        highwire_lane::counters::PAGE_BYTES
    );
    let _ = raw::write(2, line.text());
}
