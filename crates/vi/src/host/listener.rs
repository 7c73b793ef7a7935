//! A name that processes of this host connect to.

use crate::config::ViOptions;
use crate::error::{AcceptError, ListenError};
use crate::host::handover;
use crate::host::rendezvous::{MESSAGE_BYTES, Refusal};
use crate::nic::NicInner;
use crate::vi::Vi;
use highwire_mem::{Allow, Courier, CourierError, CourierListener, deadline, mapped_user};
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const BACKLOG: i32 = 1024;
/// How long a connection may take over its request before it is dropped.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// How long one of the listener's own user is left its place, however many others call.
const GRACE: Duration = Duration::from_millis(100);

/// The user of this process, as others' users are known.
fn own_user() -> Option<u32> {
    mapped_user(rustix::process::geteuid().as_raw())
}

/// Accepts connections at an address. Its lock lasts as long as the process, whatever ends it, so
/// a name left behind by a dead listener is replaced by the next one.
#[derive(Debug)]
pub(crate) struct HostListener {
    nic: Arc<NicInner>,
    path: PathBuf,
    socket: CourierListener,
    /// The socket, unless there are too many half-open connections; those; and the timer, while there are any.
    callers: OwnedFd,
    timer: OwnedFd,
    allow: Allow,
    half_open: Mutex<HalfOpens>,
    _lock: OwnedFd,
    /// Dropped after the lock's descriptor, whose closing gives the lock up.
    _name: NameHeld,
}

/// Names that this process listens at. The lock on a name's file is the process's, so that it ends
/// with it even if a forked child lives on; within the process it says nothing.
static NAMES: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

#[derive(Debug)]
struct NameHeld(PathBuf);

impl NameHeld {
    fn take(path: &Path) -> Option<NameHeld> {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(path.to_owned()).then(|| NameHeld(path.to_owned()))
    }
}

impl Drop for NameHeld {
    fn drop(&mut self) {
        NAMES.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.0);
    }
}

/// Connections that have not asked yet, and what is watched because of them.
#[derive(Debug, Default)]
struct HalfOpens {
    list: Vec<HalfOpen>,
    full: bool,
    /// How often the timer wakes.
    every: Duration,
}

/// A connection that was greeted and has not asked for anything yet.
#[derive(Debug)]
struct HalfOpen {
    courier: Arc<Courier>,
    /// `None` for one that this user namespace does not map.
    user: Option<u32>,
    since: Instant,
}

impl HalfOpen {
    /// It is to be given a moment: one of the listener's own user that has just been greeted.
    fn is_fresh(&self, own: Option<u32>) -> bool {
        self.user == own && self.since.elapsed() < GRACE
    }
}

impl HalfOpens {
    /// Whether all places are taken by connections that are to be given a moment.
    fn is_full(&self, own: Option<u32>, most: usize) -> bool {
        self.list.len() >= most && self.list.iter().all(|half| half.is_fresh(own))
    }

    /// Makes room for one more of this user: where its share or all places are taken, an older one gives way, of the user
    /// that has the most.
    fn make_room(&mut self, user: Option<u32>, own: Option<u32>, most: usize) {
        let count = |user| self.list.iter().filter(|half| half.user == user).count();
        // Other users have half of the places each, and leave some to the listener's own.
        let share_taken = user != own && count(user) >= most.div_ceil(2);
        if self.list.len() < most && !share_taken {
            return;
        }
        let may_go = |half: &HalfOpen| if share_taken { half.user == user } else { !half.is_fresh(own) };
        let candidates = self.list.iter().enumerate().filter(|(_, half)| may_go(half));
        let first = candidates.max_by_key(|(_, half)| (count(half.user), std::cmp::Reverse(half.since)));
        if let Some((index, _)) = first {
            handover::refuse(&self.list.swap_remove(index).courier, Refusal::Overtaken);
        }
    }
}

impl HostListener {
    pub(crate) fn bind(
        nic: Arc<NicInner>,
        address: &str,
        path: PathBuf,
        allow: Allow,
    ) -> Result<HostListener, ListenError> {
        let failed = |source: io::Error| ListenError::Io { path: path.clone(), source };
        let name = NameHeld::take(&path).ok_or_else(|| ListenError::InUse { address: address.to_owned() })?;
        let lock_path = path.with_added_extension("lock");
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let lock = rustix::fs::open(&lock_path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| failed(e.into()))?;
        match rustix::fs::fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::ACCESS | Errno::AGAIN) => return Err(ListenError::InUse { address: address.to_owned() }),
            Err(errno) => return Err(failed(errno.into())),
        }
        remove_old_socket(&path)?;
        let socket = CourierListener::bind(&path, BACKLOG).map_err(|e| failed(e.into()))?;
        let mode = if allow == Allow::SameUser { 0o600 } else { 0o666 };
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).map_err(failed)?;
        let callers = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        watch(&callers, &socket).map_err(|e| failed(e.into()))?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(|e| failed(e.into()))?;
        watch(&callers, &timer).map_err(|e| failed(e.into()))?;
        let half_open = Mutex::default();
        Ok(HostListener { nic, path, socket, callers, timer, allow, half_open, _lock: lock, _name: name })
    }

    pub(crate) fn accept_with(&self, timeout: Duration, options: &ViOptions<'_>) -> Result<Vi, AcceptError> {
        if !self.nic.process.is_this() {
            return Err(AcceptError::ForkedChild);
        }
        let deadline = deadline(timeout);
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
        loop {
            if let Some(vi) = self.answer_one(options) {
                return Ok(vi);
            }
            if self.greet_one()? {
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(AcceptError::TimedOut(timeout));
            }
            self.wait(left)?;
        }
    }

    /// Answers the first half-open connection that has asked, and forgets those that are too slow.
    fn answer_one(&self, options: &ViOptions<'_>) -> Option<Vi> {
        let mut half_opens = self.half_open.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = self.answer_first(&mut half_opens.list, options);
        self.watch_for(&mut half_opens);
        answered
    }

    /// A caller that waits by the descriptor is to be woken by what can be done something about.
    fn watch_for(&self, half_opens: &mut HalfOpens) {
        let full = half_opens.is_full(own_user(), self.nic.config.half_open_max);
        let every = match (full, half_opens.list.is_empty()) {
            (true, _) => GRACE,
            (false, false) => REQUEST_TIMEOUT,
            (false, true) => Duration::ZERO,
        };
        if full != std::mem::replace(&mut half_opens.full, full) {
            // It fails for want of memory only; then it is found at the next look.
            let _ = if full { epoll::delete(&self.callers, &self.socket) } else { watch(&self.callers, &self.socket) };
        }
        if every != std::mem::replace(&mut half_opens.every, every) {
            let every = Timespec { tv_sec: every.as_secs() as i64, tv_nsec: every.subsec_nanos().into() };
            let _ = timerfd_settime(
                &self.timer,
                TimerfdTimerFlags::empty(),
                &Itimerspec { it_interval: every, it_value: every },
            );
        }
    }

    fn answer_first(&self, half_open: &mut Vec<HalfOpen>, options: &ViOptions<'_>) -> Option<Vi> {
        let mut index = 0;
        while index < half_open.len() {
            let mut bytes = [0; MESSAGE_BYTES];
            let (courier, since) = (half_open[index].courier.clone(), half_open[index].since);
            let request = match courier.try_receive(&mut bytes) {
                Ok(Some(request)) => request,
                Ok(None) if since.elapsed() < REQUEST_TIMEOUT => {
                    index += 1;
                    continue;
                }
                Ok(None) | Err(CourierError::Closed) => {
                    half_open.swap_remove(index);
                    continue;
                }
                Err(error) => {
                    handover::refuse(&courier, Refusal::of_courier(&error));
                    half_open.swap_remove(index);
                    continue;
                }
            };
            half_open.swap_remove(index);
            // It may stay as the pair's, whose news are not for us.
            let _ = epoll::delete(&self.callers, &*courier);
            let (length, descriptors) = request;
            match handover::answer(&self.nic, &courier, &bytes[..length], descriptors, options) {
                Ok(vi) => return Some(vi),
                Err(refusal) => handover::refuse(&courier, refusal),
            }
        }
        None
    }

    /// Takes a connection from the backlog; false if there was none.
    fn greet_one(&self) -> Result<bool, AcceptError> {
        let mut half_opens = self.half_open.lock().unwrap_or_else(PoisonError::into_inner);
        let (own, most) = (own_user(), self.nic.config.half_open_max);
        if half_opens.is_full(own, most) {
            return Ok(false);
        }
        let Some(courier) = self.socket.accept().map_err(|errno| AcceptError::Socket(errno.into()))? else {
            return Ok(false);
        };
        let Ok(credentials) = courier.credentials() else { return Ok(true) };
        if !self.allow.admits(credentials.uid) {
            handover::refuse(&courier, Refusal::User);
        } else if handover::greet(&self.nic, &courier).is_ok() {
            // Whoever is not watched is found at the next look.
            let _ = watch(&self.callers, &courier);
            half_opens.make_room(credentials.uid, own, most);
            let (courier, user) = (Arc::new(courier), credentials.uid);
            half_opens.list.push(HalfOpen { courier, user, since: Instant::now() });
            self.watch_for(&mut half_opens);
        }
        Ok(true)
    }

    fn wait(&self, left: Duration) -> Result<(), AcceptError> {
        let (couriers, full): (Vec<Arc<Courier>>, bool) = {
            let half_open = self.half_open.lock().unwrap_or_else(PoisonError::into_inner);
            let full = half_open.is_full(own_user(), self.nic.config.half_open_max);
            (half_open.list.iter().map(|half| half.courier.clone()).collect(), full)
        };
        let mut polled: Vec<PollFd<'_>> =
            couriers.iter().map(|courier| PollFd::from_borrowed_fd(courier.as_fd(), PollFlags::IN)).collect();
        if !full {
            polled.push(PollFd::new(&self.socket, PollFlags::IN));
        }
        // With half-open connections about, look again in time to forget the slow ones.
        let left = match couriers.is_empty() {
            true => left,
            false => left.min(if full { GRACE / 4 } else { REQUEST_TIMEOUT / 4 }),
        };
        let left =
            rustix::time::Timespec::try_from(left).unwrap_or(rustix::time::Timespec { tv_sec: 3600, tv_nsec: 0 });
        match rustix::event::poll(&mut polled, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(AcceptError::Socket(errno.into())),
        }
    }
}

impl AsFd for HostListener {
    /// Readable when somebody connects, or goes on connecting.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.callers.as_fd()
    }
}

impl Drop for HostListener {
    fn drop(&mut self) {
        if self.nic.process.is_this() {
            // Under the lock, which goes after this. The lock file stays: removing it would let two
            // listeners hold locks on two files of one name.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn watch(callers: &OwnedFd, socket: impl AsFd) -> Result<(), Errno> {
    epoll::add(callers, socket, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
}

fn remove_old_socket(path: &Path) -> Result<(), ListenError> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            std::fs::remove_file(path).map_err(|source| ListenError::Io { path: path.into(), source })
        }
        Ok(_) => Err(ListenError::NotSocket(path.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(ListenError::Io { path: path.into(), source }),
    }
}
