//! What a wait on a set is answered: what its lanes have, and what the kernel says of everything in it.

use super::{BELL, DEPTH, ONE_SHOT, Registration, Set, note_told, registration_of};
use crate::process;
use crate::raw;
use crate::spin;
use highwire_mem::ticks;
use libc::{c_int, epoll_event};
use std::sync::atomic::Ordering;

impl Set {
    /// What the lanes tell; the kernel is asked too when that is due. Zero if the lanes have nothing to tell.
    ///
    /// An answer without the kernel is one that leaves out whatever else is in the set. So the kernel is due after
    /// [`SKIPS_MAX`] of them, or [`SKIPPED_FOR`] microseconds, and then has room in the answer, however small that is. With
    /// room for one event it is the kernel's and the lanes' in turn.
    pub(super) fn answer(&self, fd: c_int, events: &mut [epoll_event], timeout: i64) -> usize {
        let skipped = self.skipped.load(Ordering::Relaxed);
        let since = ticks().wrapping_sub(self.asked.load(Ordering::Relaxed));
        let due = skipped >= SKIPS_MAX || since > spin::microseconds(SKIPPED_FOR);
        if due && !self.has_news(DEPTH) {
            return 0;
        }
        let reserved = match events.len() {
            _ if !due => 0,
            1 => usize::from(self.deferred.load(Ordering::Relaxed) == 0),
            room => (room / 4).max(1),
        };
        let room = events.len() - reserved;
        let begin = self.begin.load(Ordering::Relaxed) as usize;
        let (lanes, seen) = self.collect(&mut events[..room], 0, begin, 0);
        let cut = lanes == room;
        // One that does not wait asks the kernel each time that there is room.
        let asks = due || timeout == 0 && lanes > 0 && !cut;
        if !asks || lanes == events.len() {
            if lanes > 0 {
                self.skipped.store(skipped + 1, Ordering::Relaxed);
                self.deferred.store(0, Ordering::Relaxed);
            }
            return lanes;
        }
        let used = self.merge(fd, events, lanes);
        self.deferred.store((lanes == 0 && used == events.len()).into(), Ordering::Relaxed);
        if cut { self.collect(events, used, begin, seen).0 } else { used }
    }

    /// Adds what the lanes tell to the `used` events that are there already, in the order of members from `begin` on,
    /// without the first `seen` of them; how many events there are then, and how many members were seen. The next answer
    /// begins with the first member for which there was no room: those before it would otherwise hide it for ever.
    fn collect(&self, events: &mut [epoll_event], used: usize, begin: usize, seen: usize) -> (usize, usize) {
        let (end, known) = (self.end(), used);
        let mut used = used;
        for step in seen..end {
            let place = if begin + step < end { begin + step } else { (begin + step) % end };
            if used == events.len() {
                self.begin.store(place as u32, Ordering::Relaxed);
                return (used, step);
            }
            let Some(registration) = registration_of(&self.members[place]) else { continue };
            let mut found = registration.ready();
            if found == 0 {
                continue;
            }
            found |= registration.last_words();
            registration.tell(found);
            let data = registration.data.load(Ordering::Relaxed);
            match events[..known].iter_mut().find(|earlier| ({ earlier.u64 }) == data) {
                Some(earlier) => earlier.events |= found,
                None => {
                    events[used] = epoll_event { events: found, u64: data };
                    used += 1;
                }
            }
        }
        (used, end)
    }

    /// Adds what the kernel says to what the lanes said.
    pub(super) fn merge(&self, fd: c_int, events: &mut [epoll_event], used: usize) -> usize {
        if process::is_sandboxed() {
            return used;
        }
        self.tell_kernel();
        self.note_asked();
        let Ok(more) = raw::epoll(fd, &mut events[used..]) else { return used };
        note_told(more);
        let more = self.review(&mut events[used..used + more]);
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

    /// The kernel is asked now.
    pub(super) fn note_asked(&self) {
        self.asked.store(ticks(), Ordering::Relaxed);
        self.skipped.store(0, Ordering::Relaxed);
    }

    /// What the kernel told, without what is ours; one-shot registrations among it are spent.
    pub(super) fn review(&self, events: &mut [epoll_event]) -> usize {
        if self.bell.load(Ordering::Relaxed) == 0 && self.one_shots.load(Ordering::Relaxed) == 0 {
            return events.len();
        }
        let mut end = 0;
        for index in 0..events.len() {
            let event = events[index];
            let data = event.u64;
            if data == BELL {
                self.quiet_bell();
                continue;
            }
            let spent = |registration: &&Registration| {
                registration.data.load(Ordering::Relaxed) == data
                    && registration.events.load(Ordering::Relaxed) & ONE_SHOT != 0
            };
            if let Some(registration) = self.members().find(spent) {
                let again = registration.spent.swap(1, Ordering::SeqCst) != 0;
                // The kernel tells of the end of one that was disarmed, and would not if it had told the event itself.
                if again && { event.events } & !END == 0 {
                    continue;
                }
            }
            events[end] = event;
            end += 1;
        }
        end
    }
}

/// The kernel is asked at least after so many answers from lanes alone, or so many microseconds.
const SKIPS_MAX: u32 = 32;
const SKIPPED_FOR: u64 = 50;
/// What the kernel tells whether or not it is asked for.
const END: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
