//! Epoll sets. What the kernel says of a set is right always; here is added what only the lanes know.
//!
//! Each connection remembers the one set that watches it, and how. A set remembers which of its connections have lanes.
//! A thread about to sleep on a set stops looking at all of them first.

use crate::counters::{add, explain};
use crate::raw;
use crate::spin::{self, Found};
use crate::table::{self, Slot, flag, set_of, slot_number, slot_of};
use highwire_lane::counters::{Counter, Reason};
use highwire_mem::ticks;
use libc::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const SETS: usize = 64;
const MEMBERS: usize = 1024;

struct Set {
    used: AtomicU32,
    /// Threads that sleep on it.
    sleepers: AtomicU32,
    flags: AtomicU32,
    /// Slots with lanes, plus one; zero for a free place.
    members: [AtomicU32; MEMBERS],
    /// Places that were ever used.
    end: AtomicU32,
    /// When the kernel was last asked, and how often it was not since.
    asked: AtomicU64,
    skipped: AtomicU32,
}

/// Watched itself, or held by several: only the kernel can say.
const SPOILT: u32 = 1;
/// Somebody wants to know when he may write, by level: the kernel is asked each time.
const WRITERS: u32 = 1 << 1;

static TABLE: [Set; SETS] = [const {
    Set {
        used: AtomicU32::new(0),
        sleepers: AtomicU32::new(0),
        flags: AtomicU32::new(0),
        members: [const { AtomicU32::new(0) }; MEMBERS],
        end: AtomicU32::new(0),
        asked: AtomicU64::new(0),
        skipped: AtomicU32::new(0),
    }
}; SETS];

const OTHERWISE: u32 = (libc::EPOLLONESHOT | libc::EPOLLEXCLUSIVE) as u32;
const IN: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const EDGE: u32 = libc::EPOLLET as u32;
/// The kernel is asked at least after so many answers from lanes alone, or so many microseconds.
const SKIPS_MAX: u32 = 32;
const SKIPPED_FOR: u64 = 50;

/// Whether somebody may look at a connection as far as the set that watches it is concerned.
pub(crate) fn may_look(slot: &Slot) -> bool {
    let Some(set) = (slot.epoll.load(Ordering::SeqCst) as usize).checked_sub(1).and_then(|set| TABLE.get(set)) else {
        return true;
    };
    set.sleepers.load(Ordering::SeqCst) == 0 && set.flags.load(Ordering::SeqCst) & SPOILT == 0
}

/// The kernel has changed a set.
pub(crate) fn control(set: c_int, operation: c_int, fd: c_int, event: Option<libc::epoll_event>) {
    if let Some(inner) = set_of(fd) {
        // It is watched itself: whoever sleeps on the outer one sleeps on the inner one.
        spoil(inner);
        return;
    }
    let Some(slot) = slot_of(fd) else { return };
    let Some(index) = set_of(set).or_else(|| make(set)) else {
        watch_otherwise(slot);
        return;
    };
    let watched = slot.epoll.load(Ordering::SeqCst);
    match (operation, event) {
        (libc::EPOLL_CTL_DEL, _) => {
            if watched == index as u32 + 1 {
                unwatch(slot);
            }
        }
        (_, Some(event)) => {
            let several = slot.descriptors.load(Ordering::SeqCst) > 1;
            if watched != 0 && watched != index as u32 + 1 || event.events & OTHERWISE != 0 || several {
                watch_otherwise(slot);
            }
            slot.epoll_events.store(event.events, Ordering::SeqCst);
            slot.epoll_data.store(event.u64, Ordering::SeqCst);
            // A change tells an edge-triggered watcher again of what is there.
            slot.epoll_told.store(u64::MAX, Ordering::SeqCst);
            slot.epoll.store(index as u32 + 1, Ordering::SeqCst);
            if event.events & OUT != 0 && event.events & EDGE == 0 {
                TABLE[index].flags.fetch_or(WRITERS, Ordering::SeqCst);
            }
            if slot.end().is_some() {
                note_lane(slot);
            }
        }
        _ => {}
    }
}

fn watch_otherwise(slot: &Slot) {
    slot.set(flag::WATCHED_OTHERWISE);
    explain(slot, Reason::Epoll);
    if let Some(end) = slot.end() {
        end.incoming.turn_away();
    }
}

fn make(fd: c_int) -> Option<usize> {
    let index =
        TABLE.iter().position(|set| set.used.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_ok())?;
    let set = &TABLE[index];
    set.sleepers.store(0, Ordering::SeqCst);
    set.flags.store(0, Ordering::SeqCst);
    set.end.store(0, Ordering::SeqCst);
    table::make_set(fd, index);
    Some(index)
}

/// The set is closed.
pub(crate) fn remove_set(index: usize) {
    let Some(set) = TABLE.get(index) else { return };
    for slot in table::slots().filter(|slot| slot.epoll.load(Ordering::SeqCst) == index as u32 + 1) {
        slot.epoll.store(0, Ordering::SeqCst);
    }
    for member in &set.members[..set.end.load(Ordering::SeqCst) as usize] {
        member.store(0, Ordering::SeqCst);
    }
    set.used.store(0, Ordering::SeqCst);
}

/// Only the kernel can say what is ready in it.
pub(crate) fn spoil(index: usize) {
    let Some(set) = TABLE.get(index) else { return };
    set.flags.fetch_or(SPOILT, Ordering::SeqCst);
    for slot in members(set) {
        explain(slot, Reason::Epoll);
        if let Some(end) = slot.end() {
            end.incoming.turn_away();
        }
    }
}

/// In a forked child: all sets are the parent's too.
pub(crate) fn share_all() {
    for (index, set) in TABLE.iter().enumerate() {
        set.sleepers.store(0, Ordering::SeqCst);
        if set.used.load(Ordering::SeqCst) != 0 {
            spoil(index);
        }
    }
}

/// A connection is not watched any more.
pub(crate) fn unwatch(slot: &Slot) {
    let Some(index) = (slot.epoll.swap(0, Ordering::SeqCst) as usize).checked_sub(1) else { return };
    let Some(set) = TABLE.get(index) else { return };
    let number = slot.index() as u32 + 1;
    for member in &set.members[..set.end.load(Ordering::SeqCst) as usize] {
        if member.compare_exchange(number, 0, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            break;
        }
    }
}

/// A watched connection has a lane now.
pub(crate) fn note_lane(slot: &Slot) {
    let Some(index) = (slot.epoll.load(Ordering::SeqCst) as usize).checked_sub(1) else { return };
    let Some(set) = TABLE.get(index) else { return };
    let number = slot.index() as u32 + 1;
    let end = set.end.load(Ordering::SeqCst) as usize;
    if set.members[..end].iter().any(|member| member.load(Ordering::SeqCst) == number) {
        return;
    }
    for (place, member) in set.members.iter().enumerate() {
        if member.compare_exchange(0, number, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            set.end.fetch_max(place as u32 + 1, Ordering::SeqCst);
            return;
        }
    }
    watch_otherwise(slot);
}

fn members(set: &Set) -> impl Iterator<Item = &'static Slot> {
    let end = (set.end.load(Ordering::Acquire) as usize).min(MEMBERS);
    set.members[..end]
        .iter()
        .filter_map(|member| slot_number((member.load(Ordering::Acquire) as usize).checked_sub(1)?))
}

/// Whether a connection is to be told to its watcher, and as what.
#[inline]
fn ready(slot: &Slot) -> Option<u32> {
    let incoming = slot.end()?.incoming;
    let events = slot.epoll_events.load(Ordering::Relaxed);
    if events & IN == 0 || !incoming.has_records() {
        return None;
    }
    let published = incoming.published();
    if events & EDGE != 0 {
        if slot.epoll_told.load(Ordering::Relaxed) == published {
            return None;
        }
        slot.epoll_told.store(published, Ordering::Relaxed);
    }
    // An edge tells everything that is so; a connection that may not be written is seen when it is tried.
    let out = if events & EDGE != 0 { events & OUT } else { 0 };
    Some(events & IN | out)
}

fn collect(set: &Set, events: &mut [libc::epoll_event]) -> usize {
    let mut used = 0;
    for slot in members(set) {
        if used == events.len() {
            break;
        }
        if let Some(found) = ready(slot) {
            events[used] = libc::epoll_event { events: found, u64: slot.epoll_data.load(Ordering::Relaxed) };
            used += 1;
        }
    }
    used
}

/// True if some connection of the set has something to tell.
fn any(set: &Set) -> bool {
    members(set).any(|slot| {
        slot.end().is_some_and(|end| {
            let looking = end.incoming.is_looking();
            let news = end.incoming.has_records() || looking && (end.incoming.has_news() || end.incoming.is_closing());
            news && (slot.epoll_events.load(Ordering::Relaxed) & EDGE == 0
                || slot.epoll_told.load(Ordering::Relaxed) != end.incoming.published())
        })
    })
}

/// Adds what the kernel says to what the lanes said.
fn merge(fd: c_int, set: &Set, events: &mut [libc::epoll_event], used: usize) -> usize {
    set.asked.store(ticks(), Ordering::Relaxed);
    set.skipped.store(0, Ordering::Relaxed);
    let Ok(more) = raw::epoll(fd, &mut events[used..]) else { return used };
    let mut end = used;
    for index in used..used + more {
        let event = events[index];
        let data = event.u64;
        match events[..used].iter_mut().find(|earlier| ({ earlier.u64 }) == data) {
            Some(earlier) => earlier.events |= event.events,
            None => {
                events[end] = event;
                end += 1;
            }
        }
    }
    end
}

/// What is to be done about a wait.
pub(crate) enum Wait {
    /// So many events are there.
    Ready(usize),
    /// The kernel is asked, which does not wait.
    Ask,
    /// The kernel is asked, where the thread may sleep: nobody looks at any connection of the set.
    Sleep,
}

/// Decides a wait.
pub(crate) fn wait(fd: c_int, events: &mut [libc::epoll_event], timeout: i64) -> Wait {
    crate::process::notice_fork();
    let Some(set) = set_of(fd).and_then(|index| TABLE.get(index)) else { return Wait::Ask };
    if set.end.load(Ordering::Acquire) == 0 || set.flags.load(Ordering::Acquire) & SPOILT != 0 {
        set.sleepers.fetch_add(1, Ordering::SeqCst);
        return Wait::Sleep;
    }
    loop {
        let used = collect(set, events);
        if used > 0 {
            let skipped = set.skipped.load(Ordering::Relaxed) + 1;
            set.skipped.store(skipped, Ordering::Relaxed);
            let long = ticks().wrapping_sub(set.asked.load(Ordering::Relaxed)) > spin::microseconds(SKIPPED_FOR);
            if used < events.len() && (skipped > SKIPS_MAX || long || set.flags.load(Ordering::Relaxed) & WRITERS != 0)
            {
                return Wait::Ready(merge(fd, set, events, used));
            }
            return Wait::Ready(used);
        }
        if timeout == 0 {
            return Wait::Ask;
        }
        let looked_at = members(set).find(|slot| slot.end().is_some_and(|end| end.incoming.is_looking()));
        if let Some(slot) = looked_at
            && spin::may_spin(slot.end().and_then(|end| end.incoming.writer_cpu()))
        {
            let mut told = 0;
            let found = spin::spin(
                slot,
                timeout,
                || any(set),
                || {
                    told = merge(fd, set, events, 0);
                    told > 0
                },
            );
            if told > 0 {
                return Wait::Ready(told);
            }
            if found == Found::Something {
                let used = collect(set, events);
                let used = if used == 0 { merge(fd, set, events, 0) } else { used };
                if used > 0 {
                    return Wait::Ready(used);
                }
            }
        }
        // About to sleep.
        set.sleepers.fetch_add(1, Ordering::SeqCst);
        if members(set).all(stop_looking) {
            return Wait::Sleep;
        }
        set.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Stops looking at a connection, unless there is something to tell of it.
fn stop_looking(slot: &'static Slot) -> bool {
    let Some(end) = slot.end() else { return true };
    let seen = end.incoming.published();
    let events = slot.epoll_events.load(Ordering::Relaxed);
    let told = events & EDGE != 0 && slot.epoll_told.load(Ordering::Relaxed) == seen;
    if events & IN != 0 && end.incoming.has_records() && !told {
        return false;
    }
    if end.incoming.is_looking() {
        add(slot, Counter::Sleeps, 1);
    }
    end.incoming.stop_looking(seen)
}

/// The set that a descriptor stands for, for [`waited`].
pub(crate) fn number(fd: c_int) -> u32 {
    set_of(fd).map_or(0, |index| index as u32 + 1)
}

/// The wait is over.
pub(crate) fn waited(number: u32) {
    if let Some(set) = (number as usize).checked_sub(1).and_then(|index| TABLE.get(index)) {
        let _ = set.sleepers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |sleepers| sleepers.checked_sub(1));
    }
}
