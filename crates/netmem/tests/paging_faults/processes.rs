//! A region in its process: privileges, signals, children, locked memory, system calls.

use super::threads::against_oracle;
use super::{fill, region, role, run_as, text, word};
use highwire_netmem::{PAGE_BYTES, PageError};
use std::sync::atomic::{AtomicU64, Ordering};

#[test]
fn no_privilege_is_needed() {
    const NAME: &str = "processes::no_privilege_is_needed";
    if role().is_some() {
        // SAFETY: numbers only; this process has no other use for its rights.
        let dropped = unsafe {
            libc::setgroups(0, std::ptr::null());
            libc::setgid(65534) == 0 && libc::setuid(65534) == 0
        };
        assert!(dropped);
        let (region, _store) = region(512, 64);
        against_oracle(&region, 2, 3000, 1);
        println!("it worked for user {}", std::fs::read_to_string("/proc/self/loginuid").unwrap_or_default());
        return;
    }
    // SAFETY: takes nothing.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("SKIPPED: no_privilege_is_needed needs root, to drop it; the other tests run without privilege here");
        return;
    }
    let output = run_as(NAME, "drop");
    assert!(output.status.success() && text(&output).contains("it worked"), "{}", text(&output));
}

static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn count_and_leave(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel's description of the signal.
    let address = unsafe { (*info).si_addr() } as u64;
    HANDLED.store(address, Ordering::SeqCst);
    if signal == libc::SIGBUS {
        // SAFETY: ends the process at once; 42 says that the handler ran.
        unsafe { libc::_exit(42) };
    }
}

/// Memory behind the end of its file.
fn bad_memory() -> *mut u8 {
    let file = tempfile::tempfile().unwrap();
    // SAFETY: a new mapping; it outlives the descriptor.
    let bad = unsafe {
        use std::os::fd::AsRawFd;
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    assert!(bad != libc::MAP_FAILED);
    bad.cast()
}

#[test]
fn other_bus_errors_go_to_whoever_handled_them_before() {
    const NAME: &str = "processes::other_bus_errors_go_to_whoever_handled_them_before";
    let Some(role) = role() else {
        let output = run_as(NAME, "handler");
        assert_eq!(output.status.code(), Some(42), "{}", text(&output));
        for role in ["fault", "sent"] {
            use std::os::unix::process::ExitStatusExt;
            let output = run_as(NAME, role);
            assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{role} {}", text(&output));
        }
        let output = run_as(NAME, "ignored");
        assert!(output.status.success(), "{}", text(&output));
        return;
    };
    // SAFETY: handlers that the process wants in this test.
    unsafe {
        match role.as_str() {
            "handler" => {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = count_and_leave as extern "C" fn(_, _, _) as usize;
                action.sa_flags = libc::SA_SIGINFO;
                libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
            }
            "ignored" => {
                libc::signal(libc::SIGBUS, libc::SIG_IGN);
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            }
        }
    }
    let (region, _store) = region(256, 64);
    fill(&region);
    if role == "sent" || role == "ignored" {
        // SAFETY: a signal to this thread.
        unsafe { libc::raise(libc::SIGBUS) };
        assert_eq!(role, "ignored");
        fill(&region);
        return;
    }
    // SAFETY: ends the process, as the test wants.
    let byte = unsafe { bad_memory().read_volatile() };
    panic!("read {byte} behind the end of a file");
}

#[test]
fn a_forked_child_has_nothing_and_is_told() {
    const NAME: &str = "processes::a_forked_child_has_nothing_and_is_told";
    if role().is_none() {
        let output = run_as(NAME, "fork");
        assert!(output.status.success(), "{}", text(&output));
        return;
    }
    let (region, _store) = region(256, 64);
    fill(&region);
    let fork = |child: &dyn Fn()| {
        // SAFETY: the child calls what needs no other thread, and ends by _exit.
        unsafe {
            let pid = libc::fork();
            if pid == 0 {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                child();
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
            status
        }
    };
    let status = fork(&|| {
        let there = word(&region, 255).load(Ordering::Relaxed);
        // SAFETY: ends the child.
        unsafe { libc::_exit(there as i32 & 0x3f | 1) };
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
    let status = fork(&|| {
        let refused = region.read_at(0, &mut [0; 8]) == Err(PageError::OtherProcess);
        let refused = refused && region.write_at(0, &[0; 8]) == Err(PageError::OtherProcess);
        // SAFETY: ends the child.
        unsafe { libc::_exit(if refused && region.flush().is_err() { 7 } else { 8 }) };
    });
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
    fill(&region);
    for page in 0..256 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
    let region = std::mem::ManuallyDrop::new(region);
    let status = fork(&|| {
        // SAFETY: dropped once in this child, which has its own copy of the value.
        drop(unsafe { std::ptr::read(&raw const *region) });
    });
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    drop(std::mem::ManuallyDrop::into_inner(region));
}

#[test]
fn a_process_that_locks_its_memory_has_no_more_of_it_here() {
    const NAME: &str = "processes::a_process_that_locks_its_memory_has_no_more_of_it_here";
    if role().is_none() {
        let output = run_as(NAME, "lock");
        assert!(output.status.success(), "{}", text(&output));
        return;
    }
    // SAFETY: takes numbers.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        eprintln!("SKIPPED: {NAME}: this process may not lock its memory");
        return;
    }
    let (region, _store) = region(1024, 64);
    against_oracle(&region, 2, 3000, 4);
    assert!(region.stats().evicted > 1000);
}

#[test]
fn a_process_that_locks_its_memory_later_goes_on_paging() {
    const NAME: &str = "processes::a_process_that_locks_its_memory_later_goes_on_paging";
    if role().is_none() {
        let output = run_as(NAME, "lock");
        assert!(output.status.success(), "{}", text(&output));
        return;
    }
    let (region, _store) = region(1024, 64);
    fill(&region);
    for round in 1..=3 {
        let evicted = region.stats().evicted;
        // SAFETY: takes numbers.
        if unsafe { libc::mlockall(libc::MCL_CURRENT) } != 0 {
            eprintln!("SKIPPED: {NAME}: this process may not lock its memory");
            return;
        }
        for page in 0..1024 {
            assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1, "round {round}");
        }
        fill(&region);
        assert!(region.stats().evicted > evicted + 1000, "round {round}");
        assert!(region.stats().resident_bytes <= 128 * PAGE_BYTES as u64);
    }
    // SAFETY: as above.
    assert_eq!(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) }, 0);
    region.flush().unwrap();
    for page in 0..1024 {
        assert_eq!(word(&region, page).load(Ordering::Relaxed), page + 1);
    }
}

#[test]
fn a_system_call_cannot_bring_pages() {
    let (region, _store) = region(256, 64);
    fill(&region);
    let file = tempfile::tempfile().unwrap();
    // SAFETY: the first page of the region, as the kernel reads it.
    let written = unsafe {
        use std::os::fd::AsRawFd;
        libc::write(file.as_raw_fd(), region.as_ptr().cast(), PAGE_BYTES)
    };
    let error = std::io::Error::last_os_error();
    assert_eq!((written, error.raw_os_error()), (-1, Some(libc::EFAULT)));
    let mut page = [0; PAGE_BYTES];
    region.read_at(0, &mut page).unwrap();
    assert_eq!(page[..8], 1_u64.to_ne_bytes());
}
