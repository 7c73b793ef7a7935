//! The signal handler: a thread that touches a page that is away, or writes one that is protected, gets SIGBUS, and brings
//! or opens the page itself before it goes on.
//!
//! The handler is installed once for the process. A SIGBUS that is not for a paged region goes on to whatever handled it
//! before. The handler runs with all signals blocked, on the stack of the thread that faulted.

use super::engine::{Access, Bringer, Engine, count};
use super::store::{PAGE_BYTES, PageError};
use std::fmt::Write;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// How a process ends that touches, by a raw access, a page whose content cannot be had: `EX_IOERR` of `sysexits.h`.
pub const EXIT_PAGE_LOST: i32 = 74;

/// Regions that a process may have at once.
pub(super) const REGIONS_MAX: usize = 64;

/// Where a region is. Its version is odd while it changes; a handler that sees the version change was looking at the place of
/// another region than its own, for its own lives as long as somebody touches it.
struct Place {
    version: AtomicU32,
    start: AtomicUsize,
    end: AtomicUsize,
    engine: AtomicPtr<Engine>,
}

static PLACES: [Place; REGIONS_MAX] = [const {
    Place {
        version: AtomicU32::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        engine: AtomicPtr::new(std::ptr::null_mut()),
    }
}; REGIONS_MAX];

/// Places from this on were never used: most programs have one region, and look at one place.
static PLACES_USED: AtomicUsize = AtomicUsize::new(0);

/// For whoever changes a place; handlers never take it.
static CHANGES: Mutex<()> = Mutex::new(());

/// What handled SIGBUS before.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

impl Place {
    fn set(&self, start: usize, end: usize, engine: *mut Engine) {
        // SeqCst throughout: regions are made seldom, and the order is then plain.
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.end.store(end, Ordering::SeqCst);
        self.engine.store(engine, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    fn holds(&self, address: usize) -> Option<(*mut Engine, usize)> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let engine = self.engine.load(Ordering::SeqCst);
        let same = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        (same && (start..end).contains(&address)).then(|| (engine, address - start))
    }
}

fn places() -> &'static [Place] {
    // Acquire pairs with the Release in `Registered::new`. Whoever may touch a region sees the place of it as used.
    &PLACES[..PLACES_USED.load(Ordering::Acquire)]
}

/// The region of an address, and the offset in it.
fn find(address: usize) -> Option<(*mut Engine, usize)> {
    places().iter().find_map(|place| place.holds(address))
}

/// True if any byte of the slice belongs to a paged region: the kernel cannot use it, and code that holds a lock must not.
pub(super) fn is_paged(bytes: &[u8]) -> bool {
    let (start, end) = (bytes.as_ptr() as usize, bytes.as_ptr() as usize + bytes.len());
    places().iter().any(|place| place.start.load(Ordering::Relaxed) < end && start < place.end.load(Ordering::Relaxed))
}

/// Keeps a region known to the handler.
pub(super) struct Registered {
    place: &'static Place,
    /// The handler uses it.
    _engine: Arc<Engine>,
}

impl Registered {
    /// None if there are too many already.
    pub(super) fn new(engine: Arc<Engine>) -> Option<Registered> {
        let _changing = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        if BEFORE.load(Ordering::Acquire).is_null() {
            install();
        }
        let free = PLACES.iter().position(|place| place.engine.load(Ordering::SeqCst).is_null())?;
        let place = &PLACES[free];
        let start = engine.mapping.base() as usize;
        place.set(start, start + engine.mapping.bytes(), Arc::as_ptr(&engine).cast_mut());
        PLACES_USED.fetch_max(free + 1, Ordering::Release);
        Some(Registered { place, _engine: engine })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _changing = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        self.place.set(0, 0, std::ptr::null_mut());
    }
}

fn install() {
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks for the present action, into memory for one.
    unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) };
    // SAFETY: filled by the call, and zeros are valid too. It stays for ever: a handler may use it at any time.
    let before = Box::leak(Box::new(unsafe { before.assume_init() }));
    // Known before the handler is, which may run at once.
    BEFORE.store(before, Ordering::Release);
    // SAFETY: the handler uses only what a handler may. The flags leave out SA_ONSTACK: the small stacks that programs give
    // to handlers may be too small for a store's `fetch_now`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: this thread's own error number, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes what it says of the signal, for as long as the handler runs.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    match find(address).filter(|_| code == libc::BUS_ADRERR) {
        Some((engine, offset)) => {
            // SAFETY: the address is in the region's mapping, and this thread touches it, which by the rules of raw access
            // it does only while the region lives.
            let engine = unsafe { &*engine };
            let page = (offset / PAGE_BYTES) as u64;
            // SAFETY: the context is that of this signal.
            let access = unsafe { access_of(context) };
            count(&engine.counters.faults, 1);
            if let Err(error) = engine.bring(page, access, Bringer::Handler) {
                end_process(engine, page, error);
            }
            // SAFETY: as above.
            unsafe { *libc::__errno_location() = errno };
        }
        // SAFETY: the same signal goes on with what the kernel gave.
        None => unsafe { pass_on(signal, info, context, code) },
    }
}

/// Whether the fault was a read or a write, where the processor's context tells.
///
/// # Safety
///
/// `context` is what the kernel passed to a handler.
unsafe fn access_of(context: *mut libc::c_void) -> Access {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: the kernel passes a user context.
        let context = unsafe { &*context.cast::<libc::ucontext_t>() };
        // The second bit of the page fault's error code.
        let write = context.uc_mcontext.gregs[libc::REG_ERR as usize] & 2 != 0;
        if write { Access::Write } else { Access::Read }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = context;
        Access::Unknown
    }
}

/// Gives a signal that is not for us to whatever handled it before.
///
/// # Safety
///
/// The arguments are those of the handler.
unsafe fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void, code: i32) {
    // SAFETY: it was stored before the handler was installed, and stays for ever.
    let before = unsafe { &*BEFORE.load(Ordering::Acquire) };
    match before.sa_sigaction {
        // Sent by somebody, and not wanted. A fault cannot be ignored.
        libc::SIG_IGN if code <= 0 => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: back to the default action. A fault then happens again and ends the process as it would have without
            // us; a signal that was sent is sent again, and waits until the handler returns.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if code <= 0 {
                    libc::raise(signal);
                }
            }
        }
        handler => {
            // SAFETY: the signals that the earlier handler wanted blocked, besides those that were; then the handler as it
            // was installed. It may not return, which is why nothing is undone here: the kernel restores the mask.
            unsafe {
                let mut blocked = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
                for other in 1..=64 {
                    if libc::sigismember(&raw const before.sa_mask, other) == 1 {
                        libc::sigaddset(&raw mut blocked, other);
                    }
                }
                if before.sa_flags & libc::SA_NODEFER == 0 {
                    libc::sigaddset(&raw mut blocked, signal);
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const blocked, std::ptr::null_mut());
                if before.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(handler);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(i32) = std::mem::transmute(handler);
                    handler(signal);
                }
            }
        }
    }
}

/// Says why, and ends the process: the access can neither be completed nor skipped.
fn end_process(engine: &Engine, page: u64, error: PageError) -> ! {
    let mut message = Message { bytes: [0; 512], len: 0 };
    let pages = engine.table.pages();
    let _ =
        write!(message, "highwire: paged region {} ({pages} pages): page {page} cannot be accessed: ", engine.number);
    // Not the error's own words, which allocate where they name an error of the kernel.
    let _ = match error {
        PageError::Lost { .. } => write!(message, "it is lost, the node that kept it is gone"),
        PageError::Unreachable { .. } => write!(message, "its store does not answer"),
        PageError::Spill { errno, .. } => write!(message, "the spill file cannot be read (error {errno})"),
        PageError::Kernel { errno, .. } => write!(message, "the kernel refuses the page (error {errno})"),
        PageError::NoRoom { resident_bytes, limit_bytes } => write!(
            message,
            "no place for it: {resident_bytes} bytes are here, the limit is {limit_bytes}, and the store and the spill \
             file take no more"
        ),
        other => write!(message, "{other}"),
    };
    let _ = writeln!(message, "; use read_at and write_at to get an error instead");
    // SAFETY: the bytes are valid; the process ends without running anything of the program, which is in the middle of
    // an instruction.
    unsafe {
        libc::write(2, message.bytes.as_ptr().cast(), message.len);
        libc::_exit(EXIT_PAGE_LOST)
    }
}

/// A text of limited length, made without allocating.
struct Message {
    bytes: [u8; 512],
    len: usize,
}

impl Write for Message {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.bytes[self.len..];
        let fits = text.len().min(room.len());
        room[..fits].copy_from_slice(&text.as_bytes()[..fits]);
        self.len += fits;
        Ok(())
    }
}
