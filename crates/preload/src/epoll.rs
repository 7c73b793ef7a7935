//! Epoll sets. What the kernel says of a set is right always; here is added what only the lanes know.
//!
//! A registration says how a set watches a connection, or another set. A set remembers those of its registrations that
//! matter here: of connections with lanes, and of sets. A thread about to sleep on a set stops looking at all its
//! connections first, and at those of the sets in it, and until it wakes nobody looks at them.

mod answers;

use crate::counters::{add, explain};
use crate::process;
use crate::raw;
use crate::spin::{self, Found};
use crate::table::{self, Slot, flag, set_of, slot_number, slot_of};
use highwire_lane::counters::{Counter, Reason};
use highwire_mem::ticks;
use libc::{c_int, epoll_event};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

const SETS: usize = 256;
const MEMBERS: usize = 1024;
const REGISTRATIONS: usize = 8192;
/// Sets in sets in sets.
const DEPTH: u32 = 4;

/// How one set watches something.
struct Registration {
    /// [`FREE`], [`TAKEN`] or [`IN_USE`].
    used: AtomicU32,
    /// Set that watches, by its place.
    set: AtomicU32,
    /// Slot that is watched, by its place; or a set, with [`NESTED`].
    target: AtomicU32,
    descriptor: AtomicI32,
    events: AtomicU32,
    data: AtomicU64,
    /// Records that an edge-triggered watcher was told of.
    told: AtomicU64,
    /// Whether a one-shot watcher was told, and not set again.
    spent: AtomicU32,
    /// Whether the program has it in the set, and whether the kernel has.
    wanted: AtomicU32,
    in_kernel: AtomicU32,
    /// Whether the kernel is still to be told of a change.
    put_off: AtomicU32,
}

const NESTED: u32 = 1 << 31;
const FREE: u32 = 0;
/// It still says what it was used for before.
const TAKEN: u32 = 1;
const IN_USE: u32 = 2;

struct Set {
    used: AtomicU32,
    descriptor: AtomicI32,
    /// Threads that sleep on it, and in the upper half threads that are about to begin to look at one of its members.
    state: AtomicU32,
    flags: AtomicU32,
    /// Registrations that matter, plus one; zero for a free place.
    members: [AtomicU32; MEMBERS],
    /// Places that were ever used.
    end: AtomicU32,
    /// Connections whose watcher wants to know when it may write, by level.
    writers: AtomicU32,
    /// Registrations for one time.
    one_shots: AtomicU32,
    /// When the kernel was last asked, and how many answers it was not asked for since.
    asked: AtomicU64,
    skipped: AtomicU32,
    /// Place of the member that the next answer begins with, after one that had no room for all that were ready.
    begin: AtomicU32,
    /// Whether the last answer had room for one event, which was the kernel's: the next one is the lanes'.
    deferred: AtomicU32,
    /// Registrations of which the kernel is still to be told.
    put_off: AtomicU32,
    /// Whether a set was ever put into it.
    has_sets: AtomicU32,
    /// Descriptors that it is known by, less one.
    copies: AtomicU32,
    /// Wakes sleepers whom the kernel would not wake, plus one; zero while there is none.
    bell: AtomicI32,
}

const LOOKER: u32 = 1 << 16;
const SLEEPERS: u32 = LOOKER - 1;
/// Held by several processes, or known by several descriptors: only the kernel can say.
const SPOILT: u32 = 1;

static TABLE: [Set; SETS] = [const {
    Set {
        used: AtomicU32::new(0),
        descriptor: AtomicI32::new(-1),
        state: AtomicU32::new(0),
        flags: AtomicU32::new(0),
        members: [const { AtomicU32::new(0) }; MEMBERS],
        end: AtomicU32::new(0),
        writers: AtomicU32::new(0),
        one_shots: AtomicU32::new(0),
        asked: AtomicU64::new(0),
        skipped: AtomicU32::new(0),
        begin: AtomicU32::new(0),
        deferred: AtomicU32::new(0),
        put_off: AtomicU32::new(0),
        has_sets: AtomicU32::new(0),
        copies: AtomicU32::new(0),
        bell: AtomicI32::new(0),
    }
}; SETS];

static WATCHES: [Registration; REGISTRATIONS] = [const {
    Registration {
        used: AtomicU32::new(0),
        set: AtomicU32::new(0),
        target: AtomicU32::new(0),
        descriptor: AtomicI32::new(-1),
        events: AtomicU32::new(0),
        data: AtomicU64::new(0),
        told: AtomicU64::new(0),
        spent: AtomicU32::new(0),
        wanted: AtomicU32::new(0),
        in_kernel: AtomicU32::new(0),
        put_off: AtomicU32::new(0),
    }
}; REGISTRATIONS];
static NEXT: AtomicU32 = AtomicU32::new(0);
/// Places that were ever used.
static HIGHEST: AtomicU32 = AtomicU32::new(0);

const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
const IN: u32 = libc::EPOLLIN as u32 | libc::EPOLLRDNORM as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const EDGE: u32 = libc::EPOLLET as u32;
/// What the kernel allows beside `EPOLLEXCLUSIVE`.
const MAY_BE_EXCLUSIVE: u32 = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP) as u32
    | (libc::EPOLLWAKEUP | libc::EPOLLET | libc::EPOLLEXCLUSIVE) as u32;
/// Says that an event is ours.
const BELL: u64 = u64::from_le_bytes(*b"hw bell\xff");
/// Runs `look` unless somebody sleeps on a set that watches the connection; nobody can go to sleep meanwhile without
/// seeing what it did.
pub(crate) fn with_nobody_asleep(slot: &Slot, look: impl FnOnce() -> bool) {
    let mut entered = [None; table::WATCHERS];
    let mut free = true;
    for (place, registration) in entered.iter_mut().zip(registrations(slot)) {
        let set = registration.of();
        let enter = |state: u32| (state & SLEEPERS == 0).then_some(state + LOOKER);
        free = set.flags.load(Ordering::SeqCst) & SPOILT == 0
            && set.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, enter).is_ok();
        if !free {
            break;
        }
        *place = Some(set);
    }
    // Somebody may sleep all the same: on a set that began to watch it meanwhile, or who gave up waiting for us.
    if free && look() {
        for set in registrations(slot).map(Registration::of) {
            set.stop_looking_at(slot);
        }
    }
    entered.iter().flatten().for_each(|set| {
        set.state.fetch_sub(LOOKER, Ordering::SeqCst);
    });
}

fn registrations(slot: &Slot) -> impl Iterator<Item = &'static Registration> {
    slot.watched.iter().filter_map(|word| WATCHES.get((word.load(Ordering::SeqCst) as usize).checked_sub(1)?))
}

impl Registration {
    fn of(&self) -> &'static Set {
        &TABLE[self.set.load(Ordering::SeqCst) as usize % SETS]
    }

    fn number(&self) -> u32 {
        ((std::ptr::from_ref(self).addr() - WATCHES.as_ptr().addr()) / size_of::<Registration>()) as u32 + 1
    }

    fn is_used(&self) -> bool {
        self.used.load(Ordering::SeqCst) == IN_USE
    }

    fn slot(&self) -> Option<&'static Slot> {
        let target = self.target.load(Ordering::Relaxed);
        if target & NESTED == 0 { slot_number(target as usize) } else { None }
    }

    fn inner(&self) -> Option<&'static Set> {
        let target = self.target.load(Ordering::Relaxed);
        if target & NESTED == 0 { None } else { TABLE.get((target & !NESTED) as usize) }
    }

    fn free(&self) {
        let set = self.of();
        let events = self.events.swap(0, Ordering::SeqCst);
        count(set, events, 0);
        if self.put_off.swap(0, Ordering::SeqCst) != 0 {
            set.put_off.fetch_sub(1, Ordering::SeqCst);
        }
        let number = self.number();
        if let Some(member) = set.members[..set.end()].iter().find(|member| member.load(Ordering::SeqCst) == number) {
            member.store(0, Ordering::SeqCst);
        }
        self.used.store(FREE, Ordering::SeqCst);
    }

    /// What there is to tell, of what the kernel does not know. Telling it is left to [`Registration::tell`].
    #[inline]
    fn ready(&self) -> u32 {
        let events = self.events.load(Ordering::Relaxed);
        if self.spent.load(Ordering::Relaxed) != 0 || self.wanted.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let Some(slot) = self.slot() else {
            let Some(inner) = self.inner().filter(|inner| inner.has_news(DEPTH)) else { return 0 };
            let news = events & EDGE == 0 || self.told.load(Ordering::Relaxed) != inner.published();
            return if news { events & IN } else { 0 };
        };
        let Some(end) = slot.end() else { return 0 };
        let mut found = 0;
        // What does not fit into the lane is refused when it is tried, and then asked of the kernel.
        let writes = wants_to_write(events) && !slot.has(flag::NOT_WRITING | flag::REFUSED);
        if writes && end.outgoing.is_looked_at() {
            found |= OUT;
        }
        if events & IN != 0 && slot.is_readable(end, self.descriptor.load(Ordering::Relaxed)) {
            if events & EDGE == 0 {
                found |= events & IN;
            } else if self.told.load(Ordering::Relaxed) != end.incoming.published() {
                // An edge tells everything that is so; a connection that cannot be written is seen when it is tried.
                found |= events & (IN | OUT);
            }
        }
        found
    }

    /// What the kernel would add, for a watcher who is told once only.
    fn last_words(&self) -> u32 {
        let events = self.events.load(Ordering::Relaxed);
        if events & ONE_SHOT == 0 || process::is_sandboxed() {
            return 0;
        }
        let Some(fd) = self.open_descriptor() else { return 0 };
        let mut question = [libc::pollfd { fd, events: events as i16, revents: 0 }];
        let _ = raw::poll(&mut question);
        // The same bits mean the same.
        question[0].revents.cast_unsigned().into()
    }

    /// A number under which what is watched is open. It stays in the set after the one that it was put in by was closed,
    /// as long as there is another.
    fn open_descriptor(&self) -> Option<c_int> {
        let fd = self.descriptor.load(Ordering::Relaxed);
        match self.slot() {
            Some(slot) if slot_of(fd).is_some_and(|now| std::ptr::eq(now, slot)) => Some(fd),
            Some(slot) => table::descriptor_of(slot),
            None => set_of(fd).map(|_| fd),
        }
    }

    fn tell(&self, found: u32) {
        let events = self.events.load(Ordering::Relaxed);
        if found & IN != 0 {
            let published = match self.inner() {
                Some(inner) => inner.published(),
                None => self.slot().and_then(Slot::end).map_or(0, |end| end.incoming.published()),
            };
            self.told.store(published, Ordering::Relaxed);
        }
        if events & ONE_SHOT != 0 && self.spent.swap(1, Ordering::SeqCst) == 0 {
            if self.slot().is_some_and(|slot| slot.has(flag::SHARED)) {
                self.disarm();
            } else {
                self.put_off();
            }
        }
    }

    /// What the lane had of a connection that several processes have was told, once. The kernel has bytes of it too, and is
    /// not to tell of them. Were it taken out of the kernel's set, another process that arms it again would be told that it
    /// is not there.
    fn disarm(&self) {
        if self.in_kernel.load(Ordering::SeqCst) == 0 || process::is_sandboxed() {
            return;
        }
        let events = self.events.load(Ordering::SeqCst) & (ONE_SHOT | EDGE);
        let event = epoll_event { events, u64: self.data.load(Ordering::SeqCst) };
        let (set, fd) = (self.of().descriptor.load(Ordering::SeqCst), self.descriptor.load(Ordering::SeqCst));
        let _ = raw::epoll_control(set, libc::EPOLL_CTL_MOD, fd, event);
    }

    /// The kernel is told of a change before it is next asked.
    fn put_off(&self) {
        let set = self.of();
        if self.put_off.swap(1, Ordering::SeqCst) == 0 {
            set.put_off.fetch_add(1, Ordering::SeqCst);
        }
        if set.has_sleepers() {
            set.tell_kernel();
        }
    }

    /// Makes the kernel's set what the program's is. A one-shot registration that was told is none, for the kernel: it
    /// would go on to tell of hang-ups.
    fn tell_kernel(&self) {
        if self.put_off.swap(0, Ordering::SeqCst) == 0 {
            return;
        }
        let set = self.of();
        set.put_off.fetch_sub(1, Ordering::SeqCst);
        let wanted = self.wanted.load(Ordering::SeqCst) != 0 && self.spent.load(Ordering::SeqCst) == 0;
        let known = self.in_kernel.swap(wanted.into(), Ordering::SeqCst) != 0;
        let operation = match (known, wanted) {
            (false, true) => libc::EPOLL_CTL_ADD,
            (true, true) => libc::EPOLL_CTL_MOD,
            (true, false) => libc::EPOLL_CTL_DEL,
            (false, false) => return,
        };
        let event = epoll_event { events: self.events.load(Ordering::SeqCst), u64: self.data.load(Ordering::SeqCst) };
        let (set, fd) = (set.descriptor.load(Ordering::SeqCst), self.descriptor.load(Ordering::SeqCst));
        let _ = raw::epoll_control(set, operation, fd, event);
    }

    /// What the program wants from now on.
    fn change(&self, event: epoll_event) {
        count(self.of(), self.events.swap(event.events, Ordering::SeqCst), event.events);
        self.data.store(event.u64, Ordering::SeqCst);
        // A change tells an edge-triggered or one-shot watcher again of what is there.
        self.told.store(u64::MAX, Ordering::SeqCst);
        self.spent.store(0, Ordering::SeqCst);
        self.wanted.store(1, Ordering::SeqCst);
    }
}

/// By level: one that waits for an edge is told of it with the next thing that is read, or by the kernel.
fn wants_to_write(events: u32) -> bool {
    events & OUT != 0 && events & EDGE == 0
}

fn count(set: &Set, before: u32, after: u32) {
    let change = |word: &AtomicU32, before: bool, after: bool| match (before, after) {
        (false, true) => _ = word.fetch_add(1, Ordering::SeqCst),
        (true, false) => _ = word.fetch_sub(1, Ordering::SeqCst),
        _ => {}
    };
    change(&set.writers, wants_to_write(before), wants_to_write(after));
    change(&set.one_shots, before & ONE_SHOT != 0, after & ONE_SHOT != 0);
}

/// A change that the kernel need not be told of at once, since the connection has a lane and its set is this process's
/// alone: what the call returns. `None` for all others.
pub(crate) fn put_off(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: Option<epoll_event>,
) -> Option<Result<(), c_int>> {
    let slot = slot_of(fd)?;
    let index = set_of(set)?;
    let set = TABLE.get(index)?;
    slot.end()?;
    let registration = registrations(slot).find(|registration| {
        registration.set.load(Ordering::SeqCst) == index as u32 && registration.descriptor.load(Ordering::SeqCst) == fd
    })?;
    let exclusive = |events: u32| events & libc::EPOLLEXCLUSIVE as u32 != 0;
    let plain =
        event.is_none_or(|event| !exclusive(event.events)) && !exclusive(registration.events.load(Ordering::SeqCst));
    if !plain || process::is_sandboxed() || set.flags.load(Ordering::SeqCst) & SPOILT != 0 {
        // From here on it is the kernel's again; but of a one-shot registration that was told it knows nothing.
        registration.tell_kernel();
        let there = registration.wanted.load(Ordering::SeqCst) != 0;
        let unknown = there && registration.in_kernel.load(Ordering::SeqCst) == 0;
        let valid = event.is_some_and(|event| event.events & !MAY_BE_EXCLUSIVE == 0);
        return (unknown && valid && operation == libc::EPOLL_CTL_ADD).then_some(Err(libc::EEXIST));
    }
    // By several descriptors, or by several processes: the kernel is told at once.
    let later = slot.descriptors.load(Ordering::SeqCst) == 1 && !slot.has(flag::PLAIN | flag::SHARED);
    let wanted = registration.wanted.load(Ordering::SeqCst) != 0;
    let answer = match (operation, wanted) {
        (libc::EPOLL_CTL_ADD, true) => Err(libc::EEXIST),
        (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, false) => Err(libc::ENOENT),
        (libc::EPOLL_CTL_DEL, true) => {
            registration.wanted.store(0, Ordering::SeqCst);
            count(set, registration.events.swap(0, Ordering::SeqCst), 0);
            Ok(())
        }
        (libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD, _) => {
            registration.change(event?);
            Ok(())
        }
        _ => return None,
    };
    if answer.is_ok() {
        join(set, registration);
        registration.put_off();
        if !later {
            registration.tell_kernel();
        }
        set.stop_looking_at(slot);
    }
    Some(answer)
}

/// Tells the kernel everything, before others than this process use its sets.
pub(crate) fn tell_kernel() {
    TABLE.iter().filter(|set| set.used.load(Ordering::SeqCst) != 0).for_each(Set::tell_kernel);
}

/// Tells the kernel everything of one connection.
pub(crate) fn tell_kernel_of(slot: &Slot) {
    registrations(slot).for_each(Registration::tell_kernel);
}

/// The kernel has changed a set.
pub(crate) fn control(set: c_int, operation: c_int, fd: c_int, event: Option<epoll_event>) {
    let slot = slot_of(fd);
    // A set may be watched before it watches anything.
    if table::is_new_set(fd) {
        see(fd);
    }
    let inner = set_of(fd);
    if slot.is_none() && inner.is_none() {
        return;
    }
    let Some(index) = set_of(set).or_else(|| make(set)) else {
        slot.into_iter().for_each(watch_otherwise);
        inner.into_iter().for_each(spoil);
        return;
    };
    let target = match (slot, inner) {
        (Some(slot), _) => slot.index() as u32,
        (None, inner) => inner.unwrap_or(0) as u32 | NESTED,
    };
    let matches = |registration: &&Registration| {
        registration.is_used()
            && registration.set.load(Ordering::SeqCst) == index as u32
            && registration.target.load(Ordering::SeqCst) == target
            && registration.descriptor.load(Ordering::SeqCst) == fd
    };
    let end = (HIGHEST.load(Ordering::SeqCst) as usize).min(REGISTRATIONS);
    let known = match slot {
        Some(slot) => registrations(slot).find(matches),
        None => WATCHES[..end].iter().find(matches),
    };
    if operation == libc::EPOLL_CTL_DEL {
        if let Some(registration) = known {
            if let Some(slot) = slot {
                forget_watcher(slot, registration.number());
            }
            registration.free();
        }
        return;
    }
    let Some(event) = event else { return };
    let Some(registration) = known.or_else(|| register(slot, index, target, fd)) else {
        slot.into_iter().for_each(watch_otherwise);
        inner.into_iter().for_each(spoil);
        return;
    };
    registration.change(event);
    registration.in_kernel.store(1, Ordering::SeqCst);
    if slot.is_none_or(|slot| slot.end().is_some()) {
        join(&TABLE[index], registration);
    }
    match (slot, inner) {
        (Some(slot), _) => TABLE[index].stop_looking_at(slot),
        // Who sleeps does not sleep on what is in it.
        (None, Some(inner)) if TABLE[index].has_sleepers() => {
            spoil(inner);
            TABLE[index].ring();
        }
        _ => {}
    }
}

fn register(slot: Option<&Slot>, set: usize, target: u32, fd: c_int) -> Option<&'static Registration> {
    let begin = NEXT.load(Ordering::SeqCst) as usize;
    let registration =
        (0..REGISTRATIONS).map(|step| &WATCHES[(begin + step) % REGISTRATIONS]).find(|registration| {
            registration.used.compare_exchange(FREE, TAKEN, Ordering::SeqCst, Ordering::Relaxed).is_ok()
        })?;
    NEXT.store(registration.number() % REGISTRATIONS as u32, Ordering::SeqCst);
    HIGHEST.fetch_max(registration.number(), Ordering::SeqCst);
    registration.set.store(set as u32, Ordering::SeqCst);
    registration.target.store(target, Ordering::SeqCst);
    registration.descriptor.store(fd, Ordering::SeqCst);
    for word in [&registration.events, &registration.spent, &registration.in_kernel, &registration.put_off] {
        word.store(0, Ordering::SeqCst);
    }
    registration.used.store(IN_USE, Ordering::SeqCst);
    if let Some(slot) = slot {
        let number = registration.number();
        let noted = slot
            .watched
            .iter()
            .any(|word| word.compare_exchange(0, number, Ordering::SeqCst, Ordering::Relaxed).is_ok());
        if !noted {
            registration.used.store(FREE, Ordering::SeqCst);
            return None;
        }
    }
    Some(registration)
}

/// Adds a registration to those that its set looks at.
fn join(set: &Set, registration: &Registration) {
    if registration.inner().is_some() {
        set.has_sets.store(1, Ordering::SeqCst);
    }
    let number = registration.number();
    if set.members[..set.end()].iter().any(|member| member.load(Ordering::SeqCst) == number) {
        return;
    }
    for (place, member) in set.members.iter().enumerate() {
        if member.compare_exchange(0, number, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            set.end.fetch_max(place as u32 + 1, Ordering::SeqCst);
            return;
        }
    }
    registration.slot().into_iter().for_each(watch_otherwise);
    registration.inner().into_iter().for_each(Set::spoil);
}

/// A connection that is watched has a lane now.
pub(crate) fn note_lane(slot: &Slot) {
    registrations(slot).for_each(|registration| join(registration.of(), registration));
}

fn watch_otherwise(slot: &Slot) {
    slot.set(flag::WATCHED_OTHERWISE);
    explain(slot, Reason::Epoll);
    if let Some(end) = slot.end() {
        end.incoming.turn_away();
    }
}

fn forget_watcher(slot: &Slot, number: u32) {
    for word in &slot.watched {
        let _ = word.compare_exchange(number, 0, Ordering::SeqCst, Ordering::Relaxed);
    }
}

/// A connection is closed.
pub(crate) fn unwatch_all(slot: &Slot) {
    registrations(slot).for_each(Registration::free);
    slot.watched.iter().for_each(|word| word.store(0, Ordering::SeqCst));
}

fn make(fd: c_int) -> Option<usize> {
    let take = |set: &Set| set.used.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    let index = TABLE.iter().position(take)?;
    let set = &TABLE[index];
    let words =
        [&set.state, &set.flags, &set.end, &set.writers, &set.one_shots, &set.put_off, &set.has_sets, &set.copies];
    for word in words.into_iter().chain([&set.skipped, &set.begin, &set.deferred]) {
        word.store(0, Ordering::SeqCst);
    }
    set.asked.store(0, Ordering::SeqCst);
    set.descriptor.store(fd, Ordering::SeqCst);
    if table::make_set(fd, index) {
        return Some(index);
    }
    set.used.store(0, Ordering::SeqCst);
    set_of(fd)
}

/// A set is used: from its first use on every thread that sleeps on it is known.
pub(crate) fn see(fd: c_int) {
    let _ = make(fd);
}

/// There is one more descriptor of the set. Which of them it is watched by, and which of them watches, is all the same.
pub(crate) fn note_copy(index: usize) {
    TABLE.get(index).into_iter().for_each(|set| _ = set.copies.fetch_add(1, Ordering::SeqCst));
}

/// This descriptor of the set is closed. The set goes on by another one, if there is any.
pub(crate) fn leave_set(index: usize, fd: c_int, other: impl Fn() -> Option<c_int>) {
    let Some(set) = TABLE.get(index) else { return };
    // Of two threads that close duplicates at once, one takes the last off.
    let fewer = |copies: u32| copies.checked_sub(1);
    if set.copies.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer).is_err() {
        remove_set(index);
    } else if let Some(other) = other() {
        let _ = set.descriptor.compare_exchange(fd, other, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// The set is closed.
fn remove_set(index: usize) {
    let Some(set) = TABLE.get(index) else { return };
    let concerns = |registration: &&Registration| {
        let own = registration.set.load(Ordering::SeqCst) == index as u32;
        registration.is_used() && (own || registration.target.load(Ordering::SeqCst) == index as u32 | NESTED)
    };
    for registration in WATCHES.iter().filter(concerns) {
        if let Some(slot) = registration.slot() {
            forget_watcher(slot, registration.number());
        }
        registration.free();
    }
    let bell = set.bell.swap(0, Ordering::SeqCst);
    if bell > 0 && !process::is_sandboxed() {
        raw::close(bell - 1);
    }
    set.used.store(0, Ordering::SeqCst);
}

/// Only the kernel can say what is ready in it.
pub(crate) fn spoil(index: usize) {
    TABLE.get(index).into_iter().for_each(Set::spoil);
}

/// In a forked child: all sets are the parent's too.
pub(crate) fn share_all() {
    for set in TABLE.iter().filter(|set| set.used.load(Ordering::SeqCst) != 0) {
        set.state.store(0, Ordering::SeqCst);
        // The kernel was told before the fork; what came since is another thread's of the parent, and told by it.
        set.members().for_each(|registration| registration.put_off.store(0, Ordering::SeqCst));
        set.put_off.store(0, Ordering::SeqCst);
        set.spoil();
    }
}

impl Set {
    #[inline]
    fn end(&self) -> usize {
        (self.end.load(Ordering::Acquire) as usize).min(MEMBERS)
    }

    #[inline]
    fn members(&self) -> impl Iterator<Item = &'static Registration> {
        self.members[..self.end()].iter().filter_map(registration_of)
    }

    /// Tells the kernel what was put off, of this set and of those in it, whose readiness it is asked for too.
    fn tell_kernel(&self) {
        self.tell_kernel_down_to(DEPTH);
    }

    fn tell_kernel_down_to(&self, depth: u32) {
        if process::is_sandboxed() {
            return;
        }
        if self.put_off.load(Ordering::SeqCst) > 0 {
            self.members().for_each(Registration::tell_kernel);
        }
        if depth > 0 && self.has_sets.load(Ordering::SeqCst) != 0 {
            self.members().filter_map(Registration::inner).for_each(|inner| inner.tell_kernel_down_to(depth - 1));
        }
    }

    fn spoil(&self) {
        self.tell_kernel();
        self.flags.fetch_or(SPOILT, Ordering::SeqCst);
        for slot in self.members().filter_map(Registration::slot) {
            explain(slot, Reason::Epoll);
            if let Some(end) = slot.end() {
                end.incoming.turn_away();
            }
        }
    }

    /// Whether some member has something to tell.
    fn has_news(&self, depth: u32) -> bool {
        depth > 0
            && self.members().any(|registration| match registration.inner() {
                Some(inner) => registration.events.load(Ordering::Relaxed) & IN != 0 && inner.has_news(depth - 1),
                None => registration.ready() != 0,
            })
    }

    /// Records published in all of its connections: a number that changes when there is news.
    fn published(&self) -> u64 {
        let ends = self.members().filter_map(|registration| registration.slot()?.end());
        ends.map(|end| end.incoming.published()).fold(0, u64::wrapping_add)
    }

    /// A connection in it that is looked at.
    fn looked_at(&self, depth: u32) -> Option<&'static Slot> {
        self.members().find_map(|registration| match registration.inner() {
            Some(inner) if depth > 0 => inner.looked_at(depth - 1),
            Some(_) => None,
            None => registration.slot().filter(|slot| slot.end().is_some_and(|end| end.incoming.is_looking())),
        })
    }

    /// True if it is worth to ask: a member has something to tell, or the kernel may have of one that is looked at.
    fn stirs(&self, depth: u32) -> bool {
        self.members().any(|registration| {
            if registration.ready() != 0 {
                return true;
            }
            if let Some(inner) = registration.inner() {
                return depth > 0 && inner.stirs(depth - 1);
            }
            let Some(end) = registration.slot().and_then(Slot::end) else { return false };
            let incoming = end.incoming;
            incoming.is_looking() && !incoming.has_records() && (incoming.has_news() || incoming.is_closing())
        })
    }

    fn has_sleepers(&self) -> bool {
        self.state.load(Ordering::SeqCst) & SLEEPERS != 0
    }

    /// A connection that is looked at came to a set on which somebody sleeps: nobody looks, and what the lane has by then is
    /// told.
    fn stop_looking_at(&self, slot: &Slot) {
        if !self.has_sleepers() {
            return;
        }
        if let Some(end) = slot.end() {
            end.incoming.turn_away();
        }
        if registrations(slot).any(|registration| registration.ready() & IN != 0) {
            self.ring();
        }
    }

    /// Wakes those who sleep on it: there is something that the kernel does not know of.
    fn ring(&self) {
        if !self.has_sleepers() || process::is_sandboxed() {
            return;
        }
        if self.bell.load(Ordering::SeqCst) == 0
            && let Ok(bell) = raw::event()
        {
            let event = epoll_event { events: libc::EPOLLIN as u32, u64: BELL };
            let set = self.descriptor.load(Ordering::SeqCst);
            if raw::epoll_control(set, libc::EPOLL_CTL_ADD, bell, event).is_err()
                || self.bell.compare_exchange(0, bell + 1, Ordering::SeqCst, Ordering::Relaxed).is_err()
            {
                raw::close(bell);
            }
        }
        let bell = self.bell.load(Ordering::SeqCst);
        if bell > 0 {
            let _ = raw::write(bell - 1, &1u64.to_ne_bytes());
        }
    }

    fn quiet_bell(&self) {
        let bell = self.bell.load(Ordering::SeqCst);
        if bell > 0 {
            raw::read_word(bell - 1);
        }
    }

    /// Stops looking at everything in it, for who goes to sleep on it. False if there is something to tell first.
    fn sleep(&self, depth: u32) -> bool {
        self.state.fetch_add(1, Ordering::SeqCst);
        // Whoever was about to look has looked; one that does not come back was interrupted by us.
        let mut looks = 0;
        while self.state.load(Ordering::SeqCst) >= LOOKER && looks < 1000 {
            looks += 1;
            highwire_mem::pause();
        }
        let mut entered = 0;
        let asleep = self.members().all(|registration| match registration.inner() {
            Some(inner) if depth > 0 => {
                entered += 1;
                inner.sleep(depth - 1)
            }
            Some(_) => true,
            None => stop_looking(registration),
        });
        if asleep {
            self.tell_kernel();
        } else {
            // Those that were entered, in the same order.
            self.members().filter_map(Registration::inner).take(entered).for_each(|inner| inner.wake(depth - 1));
            self.state.fetch_sub(1, Ordering::SeqCst);
        }
        asleep
    }

    fn wake(&self, depth: u32) {
        let less = |state: u32| (state & SLEEPERS != 0).then(|| state - 1);
        let _ = self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        for registration in self.members() {
            match registration.inner() {
                Some(inner) if depth > 0 => inner.wake(depth - 1),
                Some(_) => {}
                None => look_again(registration),
            }
        }
    }
}

#[inline]
fn registration_of(member: &AtomicU32) -> Option<&'static Registration> {
    WATCHES.get((member.load(Ordering::Acquire) as usize).checked_sub(1)?)
}

/// Stops looking at a connection, unless there is something to tell of it.
fn stop_looking(registration: &Registration) -> bool {
    let Some(slot) = registration.slot() else { return true };
    let Some(end) = slot.end() else { return true };
    let seen = end.incoming.published();
    if registration.ready() & IN != 0 {
        return false;
    }
    if !end.incoming.is_looking() {
        return end.incoming.stop_looking(seen);
    }
    add(slot, Counter::Sleeps, 1);
    let stopped = end.incoming.stop_looking(seen);
    if stopped && slot.slept_at.swap(seen, Ordering::Relaxed) != seen {
        slot.set(flag::LOOK_AGAIN);
    }
    stopped
}

/// Who was busy before the sleep is expected to be busy after it.
fn look_again(registration: &Registration) {
    if let Some(slot) = registration.slot().filter(|slot| slot.has(flag::LOOK_AGAIN)) {
        slot.unset(flag::LOOK_AGAIN);
        if let Some(end) = slot.end() {
            crate::receive::try_to_look(slot, end);
        }
    }
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
pub(crate) fn wait(fd: c_int, events: &mut [epoll_event], timeout: i64) -> Wait {
    process::notice_fork();
    let Some(set) = set_of(fd).and_then(|index| TABLE.get(index)) else { return Wait::Ask };
    if set.end() == 0 {
        set.state.fetch_add(1, Ordering::SeqCst);
        if set.end() == 0 {
            return Wait::Sleep;
        }
        set.state.fetch_sub(1, Ordering::SeqCst);
    }
    loop {
        let used = set.answer(fd, events, timeout);
        if used > 0 {
            return Wait::Ready(used);
        }
        if timeout == 0 {
            set.tell_kernel();
            return Wait::Ask;
        }
        // Somebody may be able to write, as the kernel knows.
        if set.writers.load(Ordering::Relaxed) > 0 {
            let told = set.merge(fd, events, 0);
            if told > 0 {
                return Wait::Ready(told);
            }
        }
        let told = spin_on(set, fd, events, timeout);
        if told > 0 {
            return Wait::Ready(told);
        }
        if set.sleep(DEPTH) {
            return Wait::Sleep;
        }
    }
}

fn spin_on(set: &Set, fd: c_int, events: &mut [epoll_event], timeout: i64) -> usize {
    let Some(slot) = set.looked_at(DEPTH) else { return 0 };
    let other = slot.end().and_then(|end| end.incoming.writer_cpu());
    if !spin::may_spin(other) {
        return 0;
    }
    let mut told = 0;
    let beside = || {
        told = set.merge(fd, events, 0);
        told > 0
    };
    let found = spin::spin(slot, other, timeout, || set.stirs(DEPTH), beside);
    if told == 0 && found == Found::Something {
        told = set.answer(fd, events, timeout);
        if told == 0 {
            told = set.merge(fd, events, 0);
        }
    }
    told
}

/// The set that a descriptor stands for, for [`waited`].
pub(crate) fn number(fd: c_int) -> u32 {
    set_of(fd).map_or(0, |index| index as u32 + 1)
}

/// The wait is over, and the kernel told this; what is left of it is the program's.
pub(crate) fn waited(number: u32, asleep: bool, events: &mut [epoll_event]) -> usize {
    let Some(set) = (number as usize).checked_sub(1).and_then(|index| TABLE.get(index)) else { return events.len() };
    if asleep {
        set.wake(DEPTH);
    }
    set.note_asked();
    note_told(events.len());
    set.review(events)
}

/// When the kernel last told something of a set.
static TOLD: AtomicU64 = AtomicU64::new(0);

fn note_told(events: usize) {
    if events > 0 {
        TOLD.store(ticks(), Ordering::Relaxed);
    }
}

/// Whether the kernel told something since: what it said before does not hold any more.
pub(crate) fn told_since(then: u64) -> bool {
    TOLD.load(Ordering::Relaxed) >= then
}

/// For who asks the kernel about a set.
pub(crate) fn tell_kernel_of_set(index: usize) {
    TABLE.get(index).into_iter().for_each(Set::tell_kernel);
}

/// For who polls a set: whether it has something to tell that the kernel does not know of.
pub(crate) fn is_ready(index: usize) -> bool {
    TABLE.get(index).is_some_and(|set| set.has_news(DEPTH))
}

/// For who sleeps by polling a set. False if there is something to tell first.
pub(crate) fn sleep_on(index: usize) -> bool {
    TABLE.get(index).is_none_or(|set| set.sleep(DEPTH))
}

/// That sleep is over.
pub(crate) fn wake_from(index: usize) {
    TABLE.get(index).into_iter().for_each(|set| set.wake(DEPTH));
}
