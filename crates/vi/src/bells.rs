//! The doorbells of one completion queue: a page for each user whose processes talk to it, and one for each process of
//! users that nothing tells apart.

use highwire_mem::work::Carrier;
use highwire_mem::{BELLS_MAX, Bell, BellIndex, RegionError, Sleep, SleepOutcome};
use rustix::net::RecvFlags;
use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use crate::error::ConnectError;
use crate::host::rendezvous::Name;
use crate::member::Member;
use crate::vi::ViId;

/// Rings that are taken from a wire at once; more make it readable again.
const RINGS_MAX: usize = 1024;

/// The processes that have a page in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BellOwner {
    /// Those of this user, which could stop each other anyway.
    User(u32),
    /// The process of this pair alone: its user is none that this namespace maps, so that another of the same number may
    /// be another user.
    Pair(Name),
}

impl BellOwner {
    pub(crate) fn new(uid: Option<u32>, pair: Name) -> BellOwner {
        uid.map_or(BellOwner::Pair(pair), BellOwner::User)
    }
}

/// One page, and the bells on it.
#[derive(Debug)]
pub(crate) struct BellHome {
    /// Never used again in its queue.
    pub number: u32,
    owner: BellOwner,
    pub bell: Bell,
    page: Mutex<Option<Arc<OwnedFd>>>,
    /// Given to peers together with the page.
    pub wire: OwnedFd,
    /// Our end of it: readable when somebody rang while we were armed.
    pub ears: OwnedFd,
    taken: Mutex<HashSet<u32>>,
}

impl BellHome {
    fn create(number: u32, owner: BellOwner, own: bool) -> Result<BellHome, RegionError> {
        let (bell, page) = Bell::create()?;
        let (ears, wire) = crate::ears::wire(own).map_err(|errno| RegionError::Create(errno.into()))?;
        let page = Mutex::new(Some(Arc::new(page)));
        Ok(BellHome { number, owner, bell, page, wire, ears, taken: Mutex::default() })
    }

    /// The page's descriptor, for peers.
    pub(crate) fn page(&self) -> Option<Arc<OwnedFd>> {
        self.page.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Nobody else will be given the page.
    pub(crate) fn close_page(&self) {
        *self.page.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// A bell that nobody has.
    fn take_index(&self) -> Option<BellIndex> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let free = (0..BELLS_MAX).find(|index| !taken.contains(index))?;
        taken.insert(free);
        BellIndex::new(free)
    }

    /// Whether no bell is left in use.
    fn return_index(&self, index: BellIndex) -> bool {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.remove(&index.number());
        taken.is_empty()
    }

    /// Takes what the wire brought, so that it can become readable again.
    pub(crate) fn drain(&self) {
        let mut byte = [0u8; 16];
        // Bounded, or a peer that goes on ringing would keep us here.
        for _ in 0..RINGS_MAX {
            if rustix::net::recv(&self.ears, &mut byte, RecvFlags::DONTWAIT).is_err() {
                break;
            }
        }
    }
}

/// What a completion queue and its VIs share.
#[derive(Debug)]
pub(crate) struct QueueShared {
    /// Tells peers which of our queues a page belongs to.
    pub id: u64,
    pub alarm: Sleep,
    /// For those who wait with a descriptor; nobody outside this process has it.
    pub alarm_fd: OnceLock<OwnedFd>,
    pub sleepers: AtomicU32,
    /// True while there are too many members to look at each.
    pub many: AtomicBool,
    homes: RwLock<Vec<Arc<BellHome>>>,
    next_home: AtomicU32,
    members: Mutex<Vec<Member>>,
    /// Grows with every change of `members` or `homes`.
    pub version: AtomicU32,
    /// In `many` mode: members that have something of their own making to poll.
    local: Mutex<Vec<ViId>>,
    pub local_rung: AtomicBool,
    resting: Mutex<Option<Arc<dyn Carrier>>>,
    users_max: usize,
    /// For one VI alone.
    pub own: bool,
    /// Called at every wake-up.
    hook: OnceLock<Hook>,
}

struct Hook(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

impl QueueShared {
    pub(crate) fn new(id: u64, users_max: usize) -> QueueShared {
        QueueShared {
            id,
            alarm: Sleep::new(),
            alarm_fd: OnceLock::new(),
            sleepers: AtomicU32::new(0),
            many: AtomicBool::new(false),
            homes: RwLock::default(),
            next_home: AtomicU32::new(0),
            members: Mutex::default(),
            version: AtomicU32::new(0),
            local: Mutex::default(),
            local_rung: AtomicBool::new(false),
            resting: Mutex::default(),
            users_max,
            own: false,
            hook: OnceLock::new(),
        }
    }

    /// The bell of one VI alone, which nobody watches but who waits for that.
    pub(crate) fn of_one(id: u64) -> QueueShared {
        QueueShared { own: true, ..QueueShared::new(id, 1) }
    }

    /// Has `hook` called whenever whoever waits is woken, by the thread that wakes. It must not wait for anything.
    pub(crate) fn set_hook(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.hook.set(Hook(Box::new(hook)));
    }

    /// Counts somebody who wants to be woken (`true`), or no longer.
    pub(crate) fn count_sleeper(&self, comes: bool) {
        if comes {
            self.sleepers.fetch_add(1, Ordering::SeqCst);
        } else {
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// The page of these processes, and a bell on it.
    ///
    /// Users that have no number here have a page for each of their processes, of which there may be any number: they get
    /// half of all pages, so that users who are known find one.
    pub(crate) fn take_bell(&self, owner: BellOwner) -> Result<(Arc<BellHome>, BellIndex), ConnectError> {
        let no_bell = || ConnectError::NoRoom("a completion queue watches at most 4096 VIs of a user");
        let mut homes = self.homes.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(home) = homes.iter().find(|home| home.owner == owner) {
            return Ok((home.clone(), home.take_index().ok_or_else(no_bell)?));
        }
        let is_pair = |owner: &BellOwner| matches!(owner, BellOwner::Pair(_));
        let pairs = homes.iter().filter(|home| is_pair(&home.owner)).count();
        if homes.len() >= self.users_max || is_pair(&owner) && pairs >= self.users_max.div_ceil(2) {
            return Err(ConnectError::NoRoom("a completion queue has no doorbell page left; raise users_max"));
        }
        let number = self.next_home.fetch_add(1, Ordering::Relaxed);
        let home = Arc::new(BellHome::create(number, owner, self.own)?);
        let index = home.take_index().ok_or_else(no_bell)?;
        homes.push(home.clone());
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok((home, index))
    }

    /// Gives a bell back. The page of a user stays for its next process; that of one process goes with its last VI, or
    /// those that come and go would use up the pages.
    pub(crate) fn return_bell(&self, home: &Arc<BellHome>, index: BellIndex) {
        // Under the lock with which bells are taken: nobody finds the page in between.
        let mut homes = self.homes.write().unwrap_or_else(PoisonError::into_inner);
        if home.return_index(index) && matches!(home.owner, BellOwner::Pair(_)) {
            homes.retain(|known| !Arc::ptr_eq(known, home));
            self.version.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(crate) fn homes(&self) -> Vec<Arc<BellHome>> {
        self.homes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn members(&self) -> MutexGuard<'_, Vec<Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn join(&self, member: Member) {
        self.members().push(member);
        self.version.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn part(&self, id: ViId) {
        self.members().retain(|member| member.id() != id);
        self.version.fetch_add(1, Ordering::SeqCst);
        // Whoever sleeps holds on to what it waits for, and with that to the memory of its peer.
        self.wake();
    }

    /// Somebody sleeps where this carrier's messages come, or no longer does.
    pub(crate) fn set_resting(&self, resting: Option<Arc<dyn Carrier>>) {
        *self.resting.lock().unwrap_or_else(PoisonError::into_inner) = resting;
    }

    /// Wakes whoever waits, however it waits.
    pub(crate) fn wake(&self) {
        self.alarm.wake();
        let resting = self.resting.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(carrier) = resting {
            carrier.wake();
        }
        if let Some(fd) = self.alarm_fd.get() {
            // A counter that is full is readable already.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
        if let Some(Hook(hook)) = self.hook.get() {
            hook();
        }
    }

    /// A member has something to poll that no ring shows.
    #[inline(always)]
    pub(crate) fn ring_locally(&self, id: ViId) {
        if self.many.load(Ordering::Relaxed) || self.sleepers.load(Ordering::SeqCst) != 0 {
            self.ring_locally_aloud(id);
        }
    }

    #[cold]
    fn ring_locally_aloud(&self, id: ViId) {
        if self.many.load(Ordering::Relaxed) {
            let mut local = self.local.lock().unwrap_or_else(PoisonError::into_inner);
            if local.len() < RINGS_MAX {
                local.push(id);
                self.local_rung.store(true, Ordering::Release);
            } else {
                // Nobody looks: when somebody does, it looks at all.
                self.alarm.wake();
            }
        }
        if self.sleepers.load(Ordering::SeqCst) != 0 {
            self.wake();
        }
    }

    pub(crate) fn take_local(&self) -> Vec<ViId> {
        self.local_rung.store(false, Ordering::Release);
        std::mem::take(&mut *self.local.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sleeps unless `look` finds something after everything is prepared. `homes` is the caller's
    /// recent copy. `announce` sets (true) and clears (false) the attention of what is waited for.
    pub(crate) fn sleep<T>(
        &self,
        homes: &[Arc<BellHome>],
        timeout: Option<Duration>,
        mut announce: impl FnMut(bool),
        look: impl FnOnce() -> Option<T>,
    ) -> Result<T, SleepOutcome> {
        self.count_sleeper(true);
        let alarm = self.alarm.count();
        for home in homes {
            home.bell.enter();
        }
        announce(true);
        Bell::settle();
        let counts: Vec<_> = homes.iter().map(|home| (&home.bell, home.bell.count())).collect();
        let outcome = match look() {
            Some(found) => Ok(found),
            None => Err(self.alarm.sleep(alarm, &counts, timeout)),
        };
        announce(false);
        for home in homes {
            home.bell.leave();
        }
        self.count_sleeper(false);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_that_are_not_mapped_leave_pages_for_those_that_are() {
        let queue = QueueShared::new(1, 4);
        let pairs: Vec<_> = (0..8).map(|pair| queue.take_bell(BellOwner::Pair([pair; 16]))).collect();
        assert_eq!(pairs.iter().filter(|taken| taken.is_ok()).count(), 2);
        let users: Vec<_> = (0..8).map(|user| queue.take_bell(BellOwner::User(user))).collect();
        assert_eq!(users.iter().filter(|taken| taken.is_ok()).count(), 2);
        assert!(matches!(&users[2], Err(ConnectError::NoRoom(reason)) if reason.contains("users_max")));
        // A page goes with the last VI of its pair.
        let (home, index) = pairs.into_iter().next().unwrap().unwrap();
        queue.return_bell(&home, index);
        assert!(queue.take_bell(BellOwner::User(9)).is_ok());
    }
}
