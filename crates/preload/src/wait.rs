//! Polling a list of descriptors.

use crate::counters::add;
use crate::process;
use crate::raw;
use crate::spin::{self, Found};
use crate::table::{End, Slot, set_of, slot_of};
use highwire_lane::counters::Counter;
use libc::{c_int, pollfd};
use std::sync::atomic::Ordering;

const IN: i16 = libc::POLLIN | libc::POLLRDNORM;

/// The connections of a list whose reader is asked for, with lanes.
fn watched(list: &[pollfd]) -> impl Iterator<Item = (usize, &'static Slot, End)> + '_ {
    list.iter().enumerate().filter(|(_, entry)| entry.fd >= 0 && entry.events & IN != 0).filter_map(|(index, entry)| {
        let slot = slot_of(entry.fd)?;
        Some((index, slot, slot.end()?))
    })
}

/// Adds what the lanes have to what the kernel says.
fn merge(list: &mut [pollfd]) -> c_int {
    let _ = raw::poll(list);
    for index in 0..list.len() {
        let entry = list[index];
        if entry.events & IN != 0
            && let Some(end) = slot_of(entry.fd).and_then(Slot::end)
            && end.incoming.has_records()
        {
            list[index].revents |= entry.events & IN;
        }
    }
    list.iter().filter(|entry| entry.revents != 0).count() as c_int
}

/// Decides a poll: how many are ready, or zero for the kernel. `sleeping` is set if connections were marked as slept on.
pub(crate) fn poll(list: &mut [pollfd], timeout: i64, sleeping: &mut c_int) -> c_int {
    process::notice_fork();
    for entry in list.iter() {
        // Whoever sleeps on a set by polling it sleeps on its members.
        if let Some(set) = set_of(entry.fd) {
            crate::epoll::spoil(set);
        }
    }
    loop {
        if watched(list).any(|(_, _, end)| end.incoming.has_records()) {
            return merge(list);
        }
        if timeout == 0 {
            return 0;
        }
        let looked_at = watched(list).find(|(_, _, end)| end.incoming.is_looking()).map(|(_, slot, end)| (slot, end));
        if let Some((slot, end)) = looked_at
            && spin::may_spin(end.incoming.writer_cpu())
        {
            let mut told = 0;
            let mut others = [pollfd { fd: -1, events: 0, revents: 0 }; 64];
            let known = others.len().min(list.len());
            others[..known].copy_from_slice(&list[..known]);
            let look = || {
                watched(list).any(|(_, _, end)| {
                    end.incoming.has_records()
                        || end.incoming.is_looking() && (end.incoming.has_news() || end.incoming.is_closing())
                })
            };
            let beside = || {
                told = raw::poll(&mut others[..known]).unwrap_or(0);
                told > 0
            };
            let found = spin::spin(slot, timeout, look, beside);
            if found == Found::Something {
                let ready = merge(list);
                if ready > 0 {
                    return ready;
                }
            }
        }
        for (_, slot, _) in watched(list) {
            slot.sleepers.fetch_add(1, Ordering::SeqCst);
        }
        let asleep = watched(list).all(|(_, slot, end)| {
            if end.incoming.is_looking() {
                add(slot, Counter::Sleeps, 1);
            }
            end.incoming.stop_looking(end.incoming.published()) && !end.incoming.has_records()
        });
        if asleep {
            *sleeping = 1;
            return 0;
        }
        polled(list);
    }
}

/// The wait is over.
pub(crate) fn polled(list: &[pollfd]) {
    watched(list).for_each(|(_, slot, _)| {
        let _ = slot.sleepers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |sleepers| sleepers.checked_sub(1));
    });
}
