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
use std::sync::atomic::Ordering;

const IN: i16 = libc::POLLIN | libc::POLLRDNORM;
/// Connections and sets that a thread may sleep on at once; others are not looked at.
const SLEEPS_MAX: usize = 1024;

/// What a thread marked as slept on, so that it is unmarked also when the thread was torn out of its sleep.
struct Sleeping {
    used: Cell<usize>,
    /// Slot and generation; or a set, by [`SET`]. With [`IN_LANE`], the lane counts a sleeper too.
    what: [Cell<(u32, u32)>; SLEEPS_MAX],
}

const SET: u32 = 1 << 31;
const IN_LANE: u32 = 1 << 30;

thread_local! {
    static SLEEPING: Sleeping =
        const { Sleeping { used: Cell::new(0), what: [const { Cell::new((0, 0)) }; SLEEPS_MAX] } };
}

/// Entries whose reader is asked for.
fn asked(list: &[pollfd]) -> impl Iterator<Item = &pollfd> {
    list.iter().filter(|entry| entry.fd >= 0 && entry.events & IN != 0)
}

/// The connections among them with lanes.
fn watched(list: &[pollfd]) -> impl Iterator<Item = (&'static Slot, End)> + '_ {
    asked(list).filter_map(|entry| {
        let slot = slot_of(entry.fd)?;
        Some((slot, slot.end()?))
    })
}

/// Whether the lanes have something for an entry.
fn is_ready(entry: &pollfd) -> bool {
    if let Some(slot) = slot_of(entry.fd) {
        return slot.end().is_some_and(|end| slot.is_readable(end, entry.fd));
    }
    set_of(entry.fd).is_some_and(epoll::is_ready)
}

/// Adds what the lanes have to what the kernel says.
fn merge(list: &mut [pollfd]) -> c_int {
    // Nothing else was asked.
    if let [entry] = list
        && entry.events & !IN == 0
        && slot_of(entry.fd)
            .and_then(Slot::end)
            .is_some_and(|end| end.incoming.is_looking() && !end.incoming.is_closing())
        && is_ready(entry)
    {
        entry.revents = entry.events & IN;
        return 1;
    }
    if process::is_sandboxed() || raw::poll(list).is_err() {
        list.iter_mut().for_each(|entry| entry.revents = 0);
    }
    for entry in list.iter_mut().filter(|entry| entry.fd >= 0 && entry.events & IN != 0) {
        if is_ready(entry) {
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
        if asked(list).any(is_ready) {
            let ready = merge(list);
            if ready > 0 {
                return ready;
            }
            // Another thread has taken it.
            continue;
        }
        if timeout == 0 {
            return 0;
        }
        let looked_at = watched(list).find(|(_, end)| end.incoming.is_looking());
        if let Some((slot, end)) = looked_at
            && spin::may_spin(end.incoming.writer_cpu())
            && spin_on(list, slot, end.incoming.writer_cpu(), timeout)
        {
            let ready = merge(list);
            if ready > 0 {
                return ready;
            }
        }
        if fall_asleep(list) {
            *sleeping = 1;
            return 0;
        }
        wake_up();
    }
}

fn spin_on(list: &[pollfd], slot: &'static Slot, other: Option<u32>, timeout: i64) -> bool {
    let mut others = [pollfd { fd: -1, events: 0, revents: 0 }; 64];
    let known = others.len().min(list.len());
    others[..known].copy_from_slice(&list[..known]);
    let look = || {
        watched(list).any(|(_, end)| {
            let incoming = end.incoming;
            incoming.has_records() || incoming.is_looking() && (incoming.has_news() || incoming.is_closing())
        })
    };
    let beside = || raw::poll(&mut others[..known]).unwrap_or(0) > 0;
    spin::spin(slot, other, timeout, look, beside) == Found::Something
}

/// Marks everything as slept on. False if there is something to tell first.
fn fall_asleep(list: &[pollfd]) -> bool {
    wake_up();
    for entry in asked(list) {
        if let Some(set) = set_of(entry.fd) {
            if !epoll::sleep_on(set) {
                return false;
            }
            note((SET | set as u32, 0), || epoll::spoil(set));
        } else if let Some(slot) = slot_of(entry.fd)
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
fn note(what: (u32, u32), otherwise: impl FnOnce()) {
    SLEEPING.with(|sleeping| {
        let used = sleeping.used.get();
        match sleeping.what.get(used) {
            Some(place) => {
                place.set(what);
                sleeping.used.set(used + 1);
            }
            None => otherwise(),
        }
    });
}

/// The wait is over, or did not come about.
pub(crate) fn wake_up() {
    SLEEPING.with(|sleeping| {
        for place in &sleeping.what[..sleeping.used.replace(0)] {
            let (what, generation) = place.get();
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
