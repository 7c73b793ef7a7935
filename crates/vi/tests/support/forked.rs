//! A forked child that has everything of its parent, as a careless program would make it.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `inside` in a forked child and fails if it failed there. What the parent has, the child
/// has too: `inside` may use and drop it.
pub fn in_child(inside: impl FnOnce()) {
    // SAFETY: the child has one thread. It allocates, which glibc makes safe after a fork, and takes
    // no lock that another thread of the parent could have held: the tests see to it.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "a fork");
    if pid == 0 {
        // It has no thread that would end it when it hangs, or when its parent is ended.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        // SAFETY: takes a number.
        unsafe { libc::alarm(HUNG_SECONDS) };
        let outcome = catch_unwind(AssertUnwindSafe(inside));
        // SAFETY: ends the process without running what belongs to the parent.
        unsafe { libc::_exit(if outcome.is_ok() { 0 } else { 101 }) }
    }
    let mut status = 0;
    // SAFETY: waits for the child just made; the kernel writes one number.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "the child's end");
    assert_eq!(status, 0, "the forked child failed (its message is above)");
}

const HUNG_SECONDS: u32 = 30;
