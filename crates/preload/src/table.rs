//! Which descriptor is which connection.
//!
//! A descriptor has an entry; several descriptors of one connection share a slot. Both are fixed tables of atomic
//! words: hooks are called from everywhere, at any moment. A descriptor without an entry is the kernel's alone.

use crate::counters::{self, explain};
use crate::raw;
use highwire_lane::counters::{Counter, Reason};
use highwire_lane::{EndState, Incoming, Lane, Outgoing, Side};
use highwire_mem::SharedMemory;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

pub(crate) const DESCRIPTORS: usize = 65536;
pub(crate) const SLOTS: usize = 16384;
pub(crate) const REGIONS: usize = 1024;
/// For [`Slot::descriptors`].
const CLOSING: u32 = 1 << 31;
/// Epoll sets that may watch one connection.
pub(crate) const WATCHERS: usize = 4;

/// What the shim looks at first: zero for a descriptor that does not concern us.
#[unsafe(no_mangle)]
pub(crate) static hw_descriptors: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(0) }; DESCRIPTORS];

const SOCKET: u32 = 0x8000_0000;
const EPOLL: u32 = 0x4000_0000;
/// Known to be none of ours.
const OTHER: u32 = 1;
/// An epoll set that was made and not used yet; the shim's `IS_NEW_SET`.
const NEW_SET: u32 = 2;

static TABLE: [Slot; SLOTS] = [const { Slot::new() }; SLOTS];
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Memory that was mapped; it stays for the life of the process.
pub(crate) static MAPPED: [AtomicPtr<SharedMemory>; REGIONS] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; REGIONS];

/// A connection, as this process knows it.
pub(crate) struct Slot {
    /// Descriptors that stand for it; [`CLOSING`] while the last one goes.
    pub(crate) descriptors: AtomicU32,
    /// Changes when the slot is given to another connection.
    pub(crate) generation: AtomicU32,
    pub(crate) flags: AtomicU32,
    /// Where its lane is; zero for none.
    lane: AtomicU64,
    /// Threads that wait in the kernel for bytes of it, by polling.
    pub(crate) poll_sleepers: AtomicU32,
    /// Calls that are in the kernel now, or whose bytes are not counted yet, in the lower half; in the upper half a number
    /// that changes with every such call.
    inside: AtomicU32,
    /// Calls and bytes, until there is a lane.
    pub(crate) calls: AtomicU32,
    pub(crate) bytes: AtomicU64,
    /// Where the registry tells that something changed, and what it told last.
    pub(crate) board: AtomicU64,
    pub(crate) asked_at_calls: AtomicU32,
    /// When the kernel was last asked for bytes, or whether the connection is well.
    pub(crate) kernel_asked: AtomicU64,
    pub(crate) health_asked: AtomicU64,
    /// The frame that took the lock, to know one that was left behind.
    pub(crate) receive_frame: AtomicU64,
    pub(crate) send_frame: AtomicU64,
    /// How epoll sets watch it: numbers of registrations, plus one.
    pub(crate) watched: [AtomicU32; WATCHERS],
    /// Records published when a watcher last went to sleep: one that got none since is not looked at again until it has
    /// something.
    pub(crate) slept_at: AtomicU64,
    /// Bytes that must be there for it to be readable, where that was set.
    pub(crate) low_water: AtomicU32,
    /// Spins that found nothing, one after the other.
    pub(crate) vain_spins: AtomicU32,
    pub(crate) shared_asked: AtomicU64,
    /// Receives for which the sender was on the same CPU.
    pub(crate) met: AtomicU32,
    /// The kernel's number of the socket, where it was asked for; else zero.
    pub(crate) cookie: AtomicU64,
    /// The process that may use it too, while there is no lane with a list of holders; [`MANY`] for several.
    pub(crate) other: AtomicU32,
    /// How far the reader had come when a send last waited in vain for it to make room, with every bit changed: zero before.
    pub(crate) stuck_at: AtomicU64,
    /// Bytes of the record that was read last.
    pub(crate) record_bytes: AtomicU32,
    /// What had come the other way when a send last waited for room.
    pub(crate) heard: AtomicU64,
}

/// For [`Slot::other`].
pub(crate) const MANY: u32 = u32::MAX;

/// One call, in [`Slot::inside`].
const CALL: u32 = 1 << 16;

/// Bits of [`Slot::flags`].
pub(crate) mod flag {
    /// Calls on it do not wait.
    pub(crate) const NONBLOCKING: u32 = 1;
    /// Plain TCP from now on.
    pub(crate) const PLAIN: u32 = 1 << 1;
    /// Other processes have it too.
    pub(crate) const SHARED: u32 = 1 << 2;
    /// Nothing more is written.
    pub(crate) const SHUT_WRITE: u32 = 1 << 3;
    /// Nothing more is to be read.
    pub(crate) const SHUT_READ: u32 = 1 << 4;
    /// Bytes wait in the kernel for more (`MSG_MORE`).
    pub(crate) const HELD_BACK: u32 = 1 << 5;
    /// `TCP_CORK` is set.
    pub(crate) const CORKED: u32 = 1 << 6;
    /// The kernel's counts are being taken over.
    pub(crate) const ADOPTING: u32 = 1 << 7;
    /// A call was torn away: the kernel's counts must be asked again.
    pub(crate) const UNSURE: u32 = 1 << 8;
    /// Watched in a way that only the kernel can serve.
    pub(crate) const WATCHED_OTHERWISE: u32 = 1 << 9;
    /// A child duplicates it into a descriptor that exec does not close: programs that are started have it too, perhaps.
    pub(crate) const HANDED: u32 = 1 << 10;
    /// The kernel said that the connection ends: sending goes by TCP.
    pub(crate) const ENDING: u32 = 1 << 11;
    /// It was passed to another process, which may not have come yet.
    pub(crate) const PASSED: u32 = 1 << 18;
    /// Its ports were looked at.
    pub(crate) const PORTS_SEEN: u32 = 1 << 12;
    /// The program wants its small segments held back (Nagle); the kernel is told otherwise, see [`crate::pair`].
    pub(crate) const COMBINING: u32 = 1 << 13;
    /// A watcher stopped looking at it to sleep, and looks again when it wakes.
    pub(crate) const LOOK_AGAIN: u32 = 1 << 14;
    /// A send that would not wait was refused: whether more can be sent is the kernel's to say.
    pub(crate) const REFUSED: u32 = 1 << 15;
    /// The other end's program sends in a way that nobody announces.
    pub(crate) const UNANNOUNCED: u32 = 1 << 16;
    /// `SO_RCVLOWAT` is set.
    pub(crate) const LOW_WATER: u32 = 1 << 17;
    /// It has no lane, and another process may use it, whose bytes nobody would count: [`Slot::other`].
    pub(crate) const UNCOUNTED: u32 = 1 << 19;
    /// One of its descriptors is a standard one, to which stdio may write: such bytes are not counted.
    pub(crate) const STDIO: u32 = 1 << 20;
    /// It is the standard input, from which stdio may read.
    pub(crate) const STDIO_READS: u32 = 1 << 21;
    /// Nothing that reads looks for records.
    pub(crate) const NOT_READING: u32 =
        PLAIN | SHARED | SHUT_READ | ADOPTING | UNSURE | WATCHED_OTHERWISE | STDIO_READS;
    /// Nothing that writes publishes records.
    pub(crate) const NOT_WRITING: u32 = PLAIN | SHARED | SHUT_WRITE | HELD_BACK | ADOPTING | UNSURE | ENDING | STDIO;
}

/// Both directions of a connection's lane.
#[derive(Clone, Copy)]
pub(crate) struct End {
    pub(crate) incoming: Incoming<'static>,
    pub(crate) outgoing: Outgoing<'static>,
    pub(crate) lane: Lane<'static>,
    pub(crate) side: Side,
}

impl Slot {
    const fn new() -> Slot {
        Slot {
            descriptors: AtomicU32::new(0),
            generation: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            lane: AtomicU64::new(0),
            poll_sleepers: AtomicU32::new(0),
            inside: AtomicU32::new(0),
            calls: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            board: AtomicU64::new(0),
            asked_at_calls: AtomicU32::new(0),
            kernel_asked: AtomicU64::new(0),
            health_asked: AtomicU64::new(0),
            receive_frame: AtomicU64::new(0),
            send_frame: AtomicU64::new(0),
            watched: [const { AtomicU32::new(0) }; WATCHERS],
            slept_at: AtomicU64::new(0),
            low_water: AtomicU32::new(0),
            vain_spins: AtomicU32::new(0),
            shared_asked: AtomicU64::new(0),
            met: AtomicU32::new(0),
            cookie: AtomicU64::new(0),
            other: AtomicU32::new(0),
            stuck_at: AtomicU64::new(0),
            record_bytes: AtomicU32::new(0),
            heard: AtomicU64::new(0),
        }
    }

    #[inline(always)]
    pub(crate) fn index(&self) -> usize {
        (std::ptr::from_ref(self).addr() - TABLE.as_ptr().addr()) / size_of::<Slot>()
    }

    #[inline(always)]
    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags.load(Ordering::Relaxed) & flags != 0
    }

    pub(crate) fn set(&self, flags: u32) {
        self.flags.fetch_or(flags, Ordering::SeqCst);
    }

    pub(crate) fn unset(&self, flags: u32) {
        self.flags.fetch_and(!flags, Ordering::SeqCst);
    }

    /// Sets or unsets.
    pub(crate) fn put(&self, flags: u32, on: bool) {
        if on { self.set(flags) } else { self.unset(flags) }
    }

    /// Whether a call with these flags waits.
    #[inline]
    pub(crate) fn waits(&self, flags: i32) -> bool {
        !self.has(flag::NONBLOCKING) && flags & libc::MSG_DONTWAIT == 0
    }

    /// Whether the lane makes it readable: with a record, where no more bytes are asked for.
    #[inline]
    pub(crate) fn is_readable(&self, end: End, fd: i32) -> bool {
        if !end.incoming.has_records() {
            return false;
        }
        if !self.has(flag::LOW_WATER) {
            return true;
        }
        end.incoming.bytes_waiting() + raw::unread(fd) >= self.low_water.load(Ordering::Relaxed) as usize
    }

    /// Its lane, if it has one.
    #[inline(always)]
    pub(crate) fn end(&self) -> Option<End> {
        let word = self.lane.load(Ordering::SeqCst);
        if word == 0 { None } else { end_of(word) }
    }

    pub(crate) fn set_lane(&self, region: usize, lane: usize, side: Side) {
        let side = u64::from(side == Side::Second);
        // Before anybody asks who sleeps: who goes to sleep says so, and then asks whether there is a lane.
        self.lane.store(1 << 63 | (region as u64) << 16 | (lane as u64) << 1 | side, Ordering::SeqCst);
    }

    pub(crate) fn drop_lane(&self) {
        self.lane.store(0, Ordering::Release);
    }

    /// Says that it is plain TCP from now on. What is in the lane already is still read first.
    pub(crate) fn make_plain(&self, reason: Reason) {
        self.set(flag::PLAIN);
        explain(self, reason);
        if let Some(end) = self.end() {
            end.incoming.turn_away();
            end.outgoing.turn_away();
            // A reader that is told so asks the kernel, and does not look again.
            end.outgoing.announce_closing();
        }
    }

    /// A call begins that the kernel counts.
    #[inline(always)]
    pub(crate) fn enter_kernel(&self) {
        self.inside.fetch_add(1 + CALL, Ordering::SeqCst);
    }

    /// Its bytes are counted.
    #[inline(always)]
    pub(crate) fn leave_kernel(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    /// Nothing of the sort is under way; a number to compare with later.
    pub(crate) fn quiet(&self) -> Option<u32> {
        let inside = self.inside.load(Ordering::SeqCst);
        inside.is_multiple_of(CALL).then_some(inside)
    }

    /// In a forked child: no call of this process is under way.
    pub(crate) fn start_over(&self) {
        self.poll_sleepers.store(0, Ordering::SeqCst);
        self.inside.store(0, Ordering::SeqCst);
    }

    fn clear(&self) {
        self.watched.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        for word in [
            &self.flags,
            &self.poll_sleepers,
            &self.inside,
            &self.calls,
            &self.asked_at_calls,
            &self.vain_spins,
            &self.other,
            &self.record_bytes,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [
            &self.lane,
            &self.bytes,
            &self.board,
            &self.kernel_asked,
            &self.health_asked,
            &self.receive_frame,
            &self.send_frame,
            &self.slept_at,
            &self.shared_asked,
            &self.cookie,
            &self.heard,
            &self.stuck_at,
        ] {
            word.store(0, Ordering::Relaxed);
        }
    }
}

#[inline]
fn end_of(word: u64) -> Option<End> {
    let region = (word >> 16) as usize & (REGIONS - 1);
    let memory = MAPPED[region].load(Ordering::Acquire);
    // SAFETY: set once, by `pair`, to a box that is never given back.
    let memory: &'static SharedMemory = unsafe { memory.as_ref()? };
    let side = if word & 1 == 0 { Side::First } else { Side::Second };
    let lane = highwire_lane::LaneRegion::adopt(memory)?.lane((word >> 1) as usize & 0x7fff)?;
    Some(End { incoming: lane.incoming(side), outgoing: lane.outgoing(side), lane, side })
}

#[inline(always)]
fn word_of(fd: i32) -> Option<&'static AtomicU32> {
    hw_descriptors.get(usize::try_from(fd).ok()?)
}

#[inline(always)]
fn entry(fd: i32) -> u32 {
    word_of(fd).map_or(0, |word| word.load(Ordering::Acquire))
}

fn set_entry(fd: i32, value: u32) -> bool {
    let Some(word) = word_of(fd) else { return false };
    word.store(value, Ordering::Release);
    true
}

/// The connection of a descriptor.
#[inline(always)]
pub(crate) fn slot_of(fd: i32) -> Option<&'static Slot> {
    let entry = entry(fd);
    if entry & SOCKET == 0 { None } else { TABLE.get((entry & 0xffff) as usize) }
}

/// The epoll set of a descriptor.
#[inline(always)]
pub(crate) fn set_of(fd: i32) -> Option<usize> {
    let entry = entry(fd);
    (entry & EPOLL != 0).then_some((entry & 0xffff) as usize)
}

/// A descriptor is known as an epoll set from now on. False if it already is one, or a connection, or has no entry.
pub(crate) fn make_set(fd: i32, set: usize) -> bool {
    let Some(word) = word_of(fd) else { return false };
    let change = |entry: u32| (entry & (EPOLL | SOCKET) == 0).then_some(EPOLL | set as u32);
    word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change).is_ok()
}

/// An epoll set was made. It gets a place among the sets as soon as it is watched or watches something.
pub(crate) fn new_set(fd: i32) {
    forget(fd);
    set_entry(fd, NEW_SET);
}

/// Whether it is an epoll set that has no place among the sets yet.
pub(crate) fn is_new_set(fd: i32) -> bool {
    entry(fd) == NEW_SET
}

/// The slot of this number, if it is still the same connection's.
pub(crate) fn slot_at(index: u32, generation: u32) -> Option<&'static Slot> {
    let slot = TABLE.get(index.checked_sub(1)? as usize)?;
    (slot.generation.load(Ordering::Acquire) == generation).then_some(slot)
}

/// A slot by its place in the table.
pub(crate) fn slot_number(index: usize) -> Option<&'static Slot> {
    TABLE.get(index)
}

/// Every connection that has a descriptor.
pub(crate) fn slots() -> impl Iterator<Item = &'static Slot> {
    let used = (NEXT.load(Ordering::Relaxed) as usize).min(SLOTS);
    TABLE[..used].iter().filter(|slot| slot.descriptors.load(Ordering::Relaxed) > 0)
}

/// Descriptors with an entry, up to the highest that ever had one.
pub(crate) fn descriptors() -> impl Iterator<Item = (i32, &'static Slot)> {
    let end = HIGHEST.load(Ordering::Relaxed) as usize + 1;
    (0..end.min(DESCRIPTORS) as i32).filter_map(|fd| Some((fd, slot_of(fd)?)))
}

/// A descriptor of a connection.
pub(crate) fn descriptor_of(slot: &Slot) -> Option<i32> {
    descriptors().find(|(_, known)| std::ptr::eq(*known, slot)).map(|(fd, _)| fd)
}

static HIGHEST: AtomicU32 = AtomicU32::new(0);

/// A new connection, or one to be. What the descriptor stood for before is gone, in whatever way.
pub(crate) fn add(fd: i32, nonblocking: bool) {
    forget(fd);
    if let Some(slot) = reserve(fd, nonblocking) {
        publish(fd, slot, OTHER);
    }
}

/// A slot for the connection of a descriptor. Other threads find it once it is published.
pub(crate) fn reserve(fd: i32, nonblocking: bool) -> Option<&'static Slot> {
    let slot = take_slot()?;
    if nonblocking {
        slot.set(flag::NONBLOCKING);
    }
    counters::show();
    counters::clear(slot);
    counters::set(slot, Counter::Descriptor, fd as u64 + 1);
    Some(slot)
}

/// Publishes the slot of a descriptor that was not known.
pub(crate) fn publish_found(fd: i32, slot: &Slot) {
    publish(fd, slot, 0);
}

/// Publishes the slot of a descriptor whose entry is `before`; gives it back if the entry has changed meanwhile.
fn publish(fd: i32, slot: &Slot, before: u32) {
    if replace_entry(fd, before, SOCKET | slot.index() as u32) {
        HIGHEST.fetch_max(fd as u32, Ordering::Relaxed);
        note_standard(slot, fd);
    } else {
        give_back(slot, None);
    }
}

/// Whether a descriptor was not looked at yet.
pub(crate) fn is_unknown(fd: i32) -> bool {
    word_of(fd).is_some_and(|word| word.load(Ordering::Acquire) == 0)
}

/// A descriptor that was not known is none of ours.
pub(crate) fn ignore(fd: i32) {
    replace_entry(fd, 0, OTHER);
}

fn replace_entry(fd: i32, before: u32, after: u32) -> bool {
    word_of(fd).is_some_and(|word| word.compare_exchange(before, after, Ordering::SeqCst, Ordering::Relaxed).is_ok())
}

fn take_slot() -> Option<&'static Slot> {
    let take = |slot: &'static Slot| {
        let taken = slot.descriptors.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        taken.then(|| {
            slot.generation.fetch_add(1, Ordering::SeqCst);
            slot.clear();
            slot
        })
    };
    // Those that were given back first: the table in use stays small.
    let used = (NEXT.load(Ordering::Relaxed) as usize).min(SLOTS);
    let begin = SEARCH.load(Ordering::Relaxed) as usize;
    for step in 0..used.min(64) {
        let index = (begin + step) % used;
        if let Some(slot) = take(&TABLE[index]) {
            SEARCH.store(((index + 1) % used) as u32, Ordering::Relaxed);
            return Some(slot);
        }
    }
    SEARCH.store(((begin + 64) % used.max(1)) as u32, Ordering::Relaxed);
    loop {
        let fresh = NEXT.fetch_add(1, Ordering::Relaxed) as usize;
        if fresh >= SLOTS {
            NEXT.store(SLOTS as u32, Ordering::Relaxed);
            return None;
        }
        // It counts as one in use from the addition on, so another thread may have taken it.
        if let Some(slot) = take(&TABLE[fresh]) {
            return Some(slot);
        }
    }
}

static SEARCH: AtomicU32 = AtomicU32::new(0);

/// Another descriptor for the same connection, or the same epoll set.
pub(crate) fn duplicate(from: i32, to: i32) {
    // Both are found out when they are used.
    if entry(from) == 0 {
        return unknown(to);
    }
    forget(to);
    if is_new_set(from) {
        crate::epoll::see(from);
    }
    if let Some(slot) = slot_of(from) {
        // A set knows a connection by descriptor and file.
        crate::epoll::tell_kernel_of(slot);
        if !add_to(slot, to) {
            // Another thread closes it meanwhile: what is left is found out when it is used.
            set_entry(to, 0);
        }
    } else if let Some(set) = set_of(from) {
        if word_of(to).is_some() {
            crate::epoll::note_copy(set);
            set_entry(to, EPOLL | set as u32);
        } else {
            // What is watched by it would not be seen.
            crate::epoll::spoil(set);
        }
    }
}

/// One more descriptor of a connection. False if it is just going.
pub(crate) fn add_to(slot: &'static Slot, fd: i32) -> bool {
    let more = |count: u32| (1..CLOSING).contains(&count).then(|| count + 1);
    if slot.descriptors.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_err() {
        return false;
    }
    if set_entry(fd, SOCKET | slot.index() as u32) {
        HIGHEST.fetch_max(fd as u32, Ordering::Relaxed);
        note_standard(slot, fd);
    } else {
        slot.descriptors.fetch_sub(1, Ordering::SeqCst);
    }
    true
}

/// Standard descriptors are those of stdio, whose calls do not come through the hooks.
const STANDARD: std::ops::Range<i32> = 0..3;

fn note_standard(slot: &Slot, fd: i32) {
    if !STANDARD.contains(&fd) {
        return;
    }
    slot.set(if fd == 0 { flag::STDIO | flag::STDIO_READS } else { flag::STDIO });
    explain(slot, Reason::Stdio);
    if let Some(end) = slot.end().filter(|_| fd == 0) {
        end.incoming.turn_away();
    }
}

/// Stdio no longer has the connection: the kernel's counts are right again.
fn note_no_longer_standard(slot: &Slot) {
    let known = |fd| slot_of(fd).is_some_and(|known| std::ptr::eq(known, slot));
    if slot.has(flag::STDIO) && !STANDARD.into_iter().any(known) {
        slot.set(flag::UNSURE);
        slot.unset(flag::STDIO | flag::STDIO_READS);
    }
}

/// The connection of the socket with this number, if it is known by it.
pub(crate) fn slot_of_cookie(cookie: u64) -> Option<&'static Slot> {
    slots().find(|slot| slot.cookie.load(Ordering::Relaxed) == cookie)
}

/// A descriptor means something else now, and nobody said that it was closed.
pub(crate) fn forget(fd: i32) {
    if let Some(set) = set_of(fd) {
        // Of two threads that close one number, one closes the set's.
        if !replace_entry(fd, EPOLL | set as u32, OTHER) {
            return;
        }
        let other = || (0..DESCRIPTORS as i32).find(|other| set_of(*other) == Some(set));
        crate::epoll::leave_set(set, fd, other);
        return;
    }
    if slot_of(fd).is_some() {
        release(fd, false);
    }
    set_entry(fd, OTHER);
}

/// A descriptor came from another process, and has to be looked at.
pub(crate) fn unknown(fd: i32) {
    forget(fd);
    set_entry(fd, 0);
}

/// A descriptor is about to be closed.
pub(crate) fn close(fd: i32) {
    if slot_of(fd).is_some() {
        release(fd, true);
    } else {
        forget(fd);
    }
}

fn release(fd: i32, orderly: bool) {
    let Some(slot) = slot_of(fd) else { return };
    // Not zero: who uses the number meanwhile would find the socket, which is still open, and take it for a new one. Of two
    // threads that close one number, one closes the connection's.
    if !replace_entry(fd, SOCKET | slot.index() as u32, OTHER) {
        return;
    }
    // Whoever takes the last one off says so in the same step, and the slot is nobody else's until all is done.
    let less = |count: u32| Some(if count == 1 { CLOSING } else { count - 1 });
    let before = slot.descriptors.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    if before.is_ok_and(|before| before > 1) {
        note_no_longer_standard(slot);
        // It is known by another one from now on, unless that one has gone meanwhile.
        if let Some(other) = descriptor_of(slot) {
            counters::set(slot, Counter::Descriptor, other as u64 + 1);
            // Pairs with the exchange of the entry: either it is seen here, or its thread sets the counter after this one.
            std::sync::atomic::fence(Ordering::SeqCst);
            if !slot_of(other).is_some_and(|known| std::ptr::eq(known, slot)) {
                counters::unset(slot, Counter::Descriptor, other as u64 + 1);
            }
        }
        return;
    }
    give_back(slot, orderly.then_some(fd));
}

/// The connection has no descriptor any more; `closing` is the one that is about to be closed, if there is one.
fn give_back(slot: &Slot, closing: Option<i32>) {
    crate::epoll::unwatch_all(slot);
    if let Some(end) = slot.end() {
        end.leave(slot, closing);
    }
    counters::set(slot, Counter::Descriptor, 0);
    slot.generation.fetch_add(1, Ordering::SeqCst);
    slot.drop_lane();
    slot.descriptors.store(0, Ordering::Release);
}

impl End {
    /// This process has no descriptor of the connection any more; the one that it closes, if it does.
    fn leave(self, slot: &Slot, closing: Option<i32>) {
        let process = crate::process::number();
        let holders = self.lane.holders(self.side);
        holders.remove(process);
        let alone = !holders.others(process).any(|other| crate::process::is_sandboxed() || raw::exists(other));
        self.incoming.turn_away();
        // Another process has it, or will have.
        if !alone || slot.has(flag::PASSED) || crate::process::is_spawning() {
            return;
        }
        self.outgoing.announce_closing();
        // The kernel resets a connection that is closed with bytes unread; it does not know of those in the lane.
        if let Some(fd) = closing.filter(|_| self.incoming.has_records() && !crate::process::is_sandboxed()) {
            raw::reset_at_close(fd);
        }
        self.lane.set_state(self.side, EndState::Gone);
    }
}
