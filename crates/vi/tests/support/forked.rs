//! A forked child that has everything of its parent, as a careless program would make it.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `inside` in a forked child and fails if it failed there. The child has everything that its
/// parent has, and may use and drop it; the parent gets it back as it was.
pub fn in_child<T>(everything: T, inside: impl FnOnce(T)) -> T {
    // SAFETY: the child has one thread. It allocates, which glibc makes safe after a fork, and ends
    // without running what belongs to the parent.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "a fork");
    if pid == 0 {
        // It has no thread that would end it when it hangs, or when its parent is ended.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        // SAFETY: takes a number.
        unsafe { libc::alarm(HUNG_SECONDS) };
        let outcome = catch_unwind(AssertUnwindSafe(|| inside(everything)));
        // SAFETY: ends the process.
        unsafe { libc::_exit(if outcome.is_ok() { 0 } else { 101 }) }
    }
    let mut status = 0;
    // SAFETY: waits for the child just made; the kernel writes one number.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "the child's end");
    assert_eq!(status, 0, "the forked child failed, or hung (14)");
    everything
}

/// Forks a child that keeps everything open and does nothing; its number. Whoever calls this ends
/// it by that number; left alone it ends by itself.
pub fn fork_that_sleeps() -> i32 {
    // SAFETY: the child calls nothing but the two below, which are made for this.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "a fork");
    if pid == 0 {
        // SAFETY: takes a number; the signal that comes then ends the process.
        unsafe { libc::alarm(HUNG_SECONDS) };
        loop {
            // SAFETY: takes nothing.
            unsafe { libc::pause() };
        }
    }
    pid
}

/// A forked child that is not done by then hangs.
const HUNG_SECONDS: u32 = 10;
