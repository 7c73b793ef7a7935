//! Polling a list of descriptors.

use crate::counters::add;
use crate::epoll;
use crate::process;
use crate::raw;
use crate::spin::{self, Found};
use crate::table::{End, Slot, flag, set_of, slot_at, slot_of};
use highwire_lane::counters::Counter;
use libc::{c_int, pollfd};
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const IN: i16 = libc::POLLIN | libc::POLLRDNORM;
/// What a thread marked as slept on, so that it is unmarked also when the thread was torn out of its sleep. The memory is of
/// every thread's stack: it has the first few, and the rest is in blocks that threads take and keep.
struct Sleeping {
    used: Cell<usize>,
    first: [Cell<Mark>; FIRST],
    /// Places of blocks in the pool, plus one, in their order.
    blocks: [Cell<u16>; BLOCKS_MAX],
}

/// Slot and generation; or a set, by [`SET`]. With [`IN_LANE`], the lane counts a sleeper too.
type Mark = (u32, u32);

const SET: u32 = 1 << 31;
const IN_LANE: u32 = 1 << 30;
const FIRST: usize = 8;
const BLOCK: usize = 128;
/// A thread may sleep on so many blocks of connections and sets at once; others are not looked at.
const BLOCKS_MAX: usize = 8;
const POOL: usize = 2048;

thread_local! {
    static SLEEPING: Sleeping = const {
        Sleeping {
            used: Cell::new(0),
            first: [const { Cell::new((0, 0)) }; FIRST],
            blocks: [const { Cell::new(0) }; BLOCKS_MAX],
        }
    };
}

/// Whose each block is: a thread's number, or zero. A thread that ends leaves its blocks behind; they are taken from it when
/// all others are in use.
static OWNERS: [AtomicU32; POOL] = [const { AtomicU32::new(0) }; POOL];
static BLOCKS: [[AtomicU64; BLOCK]; POOL] = [const { [const { AtomicU64::new(0) }; BLOCK] }; POOL];

fn take_block() -> Option<usize> {
    let own = spin::thread();
    let take = |place: usize, from: u32| {
        OWNERS[place].compare_exchange(from, own, Ordering::Acquire, Ordering::Relaxed).is_ok().then_some(place)
    };
    (0..POOL).find_map(|place| (OWNERS[place].load(Ordering::Relaxed) == 0).then(|| take(place, 0))?).or_else(|| {
        let process = raw::process();
        (0..POOL).find_map(|place| {
            let owner = OWNERS[place].load(Ordering::Relaxed);
            (owner != own && !raw::has_thread(process, owner)).then(|| take(place, owner))?
        })
    })
}

impl Sleeping {
    /// Remembers a mark. False where there is no room.
    fn push(&self, mark: Mark) -> bool {
        let used = self.used.get();
        if let Some(place) = self.first.get(used) {
            place.set(mark);
        } else {
            let at = used - FIRST;
            let Some(block) = self.blocks.get(at / BLOCK) else { return false };
            if block.get() == 0 {
                let Some(taken) = take_block() else { return false };
                block.set(taken as u16 + 1);
            }
            let word = u64::from(mark.0) << 32 | u64::from(mark.1);
            BLOCKS[usize::from(block.get()) - 1][at % BLOCK].store(word, Ordering::Relaxed);
        }
        self.used.set(used + 1);
        true
    }

    fn mark(&self, at: usize) -> Mark {
        match at.checked_sub(FIRST) {
            None => self.first[at].get(),
            Some(at) => {
                let block = usize::from(self.blocks[at / BLOCK].get()) - 1;
                let word = BLOCKS[block][at % BLOCK].load(Ordering::Relaxed);
                ((word >> 32) as u32, word as u32)
            }
        }
    }
}

/// In a forked child: what the thread's parent marked is the parent's to unmark, and the blocks are those of a thread that
/// is not here.
pub(crate) fn forget_sleeping() {
    SLEEPING.with(|sleeping| {
        sleeping.used.set(0);
        sleeping.blocks.iter().for_each(|block| block.set(0));
    });
    for owner in OWNERS.iter().filter(|owner| owner.load(Ordering::Relaxed) != 0) {
        owner.store(0, Ordering::Relaxed);
    }
}

/// Descriptors whose reader is asked for: entries of a list, or members of a set as `select` takes it.
#[derive(Clone, Copy)]
enum Asked<'a> {
    List(&'a [pollfd]),
    Set(&'a [u64]),
}

impl<'a> Asked<'a> {
    fn descriptors(self) -> impl Iterator<Item = c_int> + use<'a> {
        let (list, set): (&'a [pollfd], &'a [u64]) = match self {
            Asked::List(list) => (list, &[]),
            Asked::Set(set) => (&[], set),
        };
        let listed = list.iter().filter(|entry| entry.fd >= 0 && entry.events & IN != 0).map(|entry| entry.fd);
        let members = set.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(|(index, word)| {
            (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| (64 * index + bit) as c_int)
        });
        // A member that is nothing of ours is the kernel's.
        listed.chain(members.filter(|fd| slot_of(*fd).is_some() || set_of(*fd).is_some()))
    }
}

/// The connections among them with lanes.
fn watched(asked: Asked<'_>) -> impl Iterator<Item = (&'static Slot, End)> {
    asked.descriptors().filter_map(|fd| {
        let slot = slot_of(fd)?;
        Some((slot, slot.end()?))
    })
}

/// Whether the lanes have something for a descriptor.
pub(crate) fn is_ready(fd: c_int) -> bool {
    if let Some(slot) = slot_of(fd) {
        return slot.end().is_some_and(|end| slot.is_readable(end, fd));
    }
    set_of(fd).is_some_and(epoll::is_ready)
}

/// Adds what the lanes have to what the kernel says.
fn merge(list: &mut [pollfd]) -> c_int {
    // Nothing else was asked.
    if let [entry] = list
        && entry.events & !IN == 0
        && slot_of(entry.fd)
            .and_then(Slot::end)
            .is_some_and(|end| end.incoming.is_looking() && !end.incoming.is_closing())
        && is_ready(entry.fd)
    {
        entry.revents = entry.events & IN;
        return 1;
    }
    if process::is_sandboxed() || raw::poll(list).is_err() {
        list.iter_mut().for_each(|entry| entry.revents = 0);
    }
    for entry in list.iter_mut().filter(|entry| entry.fd >= 0 && entry.events & IN != 0) {
        if is_ready(entry.fd) {
            entry.revents |= entry.events & IN;
        }
    }
    list.iter().filter(|entry| entry.revents != 0).count() as c_int
}

/// Decides a poll: how many are ready, or zero for the kernel. `sleeping` is set if something was marked as slept on.
pub(crate) fn poll(list: &mut [pollfd], timeout: i64, sleeping: &mut c_int) -> c_int {
    process::notice_fork();
    list.iter().filter_map(|entry| set_of(entry.fd)).for_each(epoll::tell_kernel_of_set);
    loop {
        if !decide(Asked::List(list), timeout, sleeping) {
            return 0;
        }
        let ready = merge(list);
        if ready > 0 {
            return ready;
        }
        // Another thread has taken it.
    }
}

/// Decides a selection of readers: whether the lanes have something, or it is the kernel's. The memory of a list is not the
/// thread's to have: its stack may be small.
pub(crate) fn select(set: &[u64], timeout: i64, sleeping: &mut c_int) -> bool {
    process::notice_fork();
    let asked = Asked::Set(set);
    asked.descriptors().filter_map(set_of).for_each(epoll::tell_kernel_of_set);
    loop {
        if !decide(asked, timeout, sleeping) {
            return false;
        }
        if asked.descriptors().any(is_ready) {
            return true;
        }
        // The kernel has something to say: it is asked.
        if fall_asleep(asked) {
            *sleeping = 1;
            return false;
        }
        wake_up();
    }
}

/// True if there is something to tell, by the lanes or by the kernel; false if the kernel is to be asked, with `sleeping` set
/// if it may wait.
fn decide(asked: Asked<'_>, timeout: i64, sleeping: &mut c_int) -> bool {
    loop {
        if asked.descriptors().any(is_ready) {
            return true;
        }
        if timeout == 0 {
            return false;
        }
        let looked_at = watched(asked).find(|(_, end)| end.incoming.is_looking());
        if let Some((slot, end)) = looked_at
            && spin::may_spin(end.incoming.writer_cpu())
            && spin_on(asked, slot, end.incoming.writer_cpu(), timeout)
        {
            return true;
        }
        if fall_asleep(asked) {
            *sleeping = 1;
            return false;
        }
        wake_up();
    }
}

fn spin_on(asked: Asked<'_>, slot: &'static Slot, other: Option<u32>, timeout: i64) -> bool {
    let mut others = [pollfd { fd: -1, events: 0, revents: 0 }; 64];
    let mut known = 0;
    match asked {
        Asked::List(list) => {
            known = others.len().min(list.len());
            others[..known].copy_from_slice(&list[..known]);
        }
        Asked::Set(_) => {
            for (place, fd) in others.iter_mut().zip(asked.descriptors()) {
                *place = pollfd { fd, events: libc::POLLIN, revents: 0 };
                known += 1;
            }
        }
    }
    let look = || {
        watched(asked).any(|(_, end)| {
            let incoming = end.incoming;
            incoming.has_records() || incoming.is_looking() && (incoming.has_news() || incoming.is_closing())
        })
    };
    let beside = || raw::poll(&mut others[..known]).unwrap_or(0) > 0;
    spin::spin(slot, other, timeout, look, beside) == Found::Something
}

/// Marks everything as slept on. False if there is something to tell first.
fn fall_asleep(asked: Asked<'_>) -> bool {
    wake_up();
    for fd in asked.descriptors() {
        if let Some(set) = set_of(fd) {
            if !epoll::sleep_on(set) {
                return false;
            }
            note((SET | set as u32, 0), || epoll::spoil(set));
        } else if let Some(slot) = slot_of(fd)
            && !sleep_on(slot)
        {
            return false;
        }
    }
    true
}

fn sleep_on(slot: &'static Slot) -> bool {
    // Also where there is no lane yet: another thread may bring one.
    slot.poll_sleepers.fetch_add(1, Ordering::SeqCst);
    let (what, generation) = (slot.index() as u32 + 1, slot.generation.load(Ordering::SeqCst));
    let otherwise = || slot.set(flag::WATCHED_OTHERWISE);
    let Some(end) = slot.end() else {
        note((what, generation), otherwise);
        return true;
    };
    let seen = end.incoming.published();
    let ready = end.incoming.has_records() && !slot.has(flag::LOW_WATER);
    let looking = end.incoming.is_looking();
    // Until it wakes nobody begins to look, at whatever moment it tries.
    let asleep = !ready && end.incoming.sleep(seen);
    note((if asleep { what | IN_LANE } else { what }, generation), otherwise);
    if looking && asleep {
        add(slot, Counter::Sleeps, 1);
    }
    asleep
}

/// Remembers what was marked, or has it marked for good.
fn note(what: Mark, otherwise: impl FnOnce()) {
    if !SLEEPING.with(|sleeping| sleeping.push(what)) {
        otherwise();
    }
}

/// The wait is over, or did not come about.
pub(crate) fn wake_up() {
    SLEEPING.with(|sleeping| {
        for at in 0..sleeping.used.replace(0) {
            let (what, generation) = sleeping.mark(at);
            if what & SET != 0 {
                epoll::wake_from((what & !SET) as usize);
            } else if let Some(slot) = slot_at(what & !IN_LANE, generation) {
                if let Some(end) = slot.end().filter(|_| what & IN_LANE != 0) {
                    end.incoming.wake();
                }
                let less = |sleepers: u32| sleepers.checked_sub(1);
                let _ = slot.poll_sleepers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            }
        }
    });
}
