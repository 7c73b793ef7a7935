//! Completion queues: many VIs, one place to wait.
//!
//! With a few VIs it looks at the next slot of each. With more it asks every peer to ring, and
//! looks only at the word that says who did: a thousand connections wait as cheaply as one.

use crate::bells::{BellHome, QueueShared};
use crate::error::WaitError;
use crate::host::peer::Peer;
use crate::member::Member;
use crate::nic::NicInner;
use crate::spin::FREE_LOOKS;
use crate::vi::ViId;
use highwire_mem::work::Carrier;
use highwire_mem::{Bell, Process, WireUse, current_cpu, deadline};
use rustix::event::{EventfdFlags, epoll};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Up to this many VIs are looked at one by one.
const FEW: usize = 8;

/// Watches the VIs that were made with it. It says which of them has something; the VI itself
/// hands the completion out. Used by one thread at a time.
#[derive(Debug)]
pub struct CompletionQueue {
    shared: Arc<QueueShared>,
    nic: Arc<NicInner>,
    version: u32,
    members: Vec<Member>,
    homes: Vec<Arc<BellHome>>,
    peers: Vec<Arc<Peer>>,
    /// One for each port of an adapter that has members.
    carriers: Vec<Arc<dyn Carrier>>,
    /// Where to look first, so that no VI starves another.
    next: usize,
    many: Option<Many>,
    epoll: Option<OwnedFd>,
    /// Those whose peers were asked to ring for the descriptor.
    armed: Vec<Member>,
    armed_carriers: Vec<Arc<dyn Carrier>>,
    is_armed: bool,
}

/// A queue as those see it who do not wait on it: VIs are made with it, and whoever waits can be woken.
#[derive(Clone, Debug)]
pub struct QueueHandle {
    shared: Arc<QueueShared>,
}

impl QueueHandle {
    pub(crate) fn shared(&self) -> &Arc<QueueShared> {
        &self.shared
    }

    /// Has whoever waits on the queue look again; [`CompletionQueue::wait_or`] asks its `stop` then.
    pub fn wake(&self) {
        self.shared.wake();
    }
}

/// What a queue of many VIs keeps.
#[derive(Debug)]
struct Many {
    by_bell: HashMap<(u32, u32), Member>,
    by_id: HashMap<ViId, Member>,
    /// Those that rang, and have not been found empty since.
    active: VecDeque<Member>,
    alarm: u32,
}

/// What [`CompletionQueue::arm`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// This VI has something now; the queue is not armed.
    Ready(ViId),
    /// Nothing now: the descriptor becomes readable when something comes.
    Waiting,
}

impl CompletionQueue {
    pub(crate) fn new(shared: Arc<QueueShared>, nic: Arc<NicInner>) -> CompletionQueue {
        CompletionQueue {
            version: shared.version.load(Ordering::SeqCst),
            shared,
            nic,
            members: Vec::new(),
            homes: Vec::new(),
            peers: Vec::new(),
            carriers: Vec::new(),
            next: 0,
            many: None,
            epoll: None,
            armed: Vec::new(),
            armed_carriers: Vec::new(),
            is_armed: false,
        }
    }

    pub(crate) fn shared(&self) -> Arc<QueueShared> {
        self.shared.clone()
    }

    /// What VIs are made with, by whichever thread, to be watched by this queue.
    pub fn handle(&self) -> QueueHandle {
        QueueHandle { shared: self.shared() }
    }

    /// VIs that it watches.
    pub fn len(&self) -> usize {
        self.shared.members().len()
    }

    /// True if it watches none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A VI that has something, if one does. Poll it until it has nothing more.
    #[inline]
    pub fn poll(&mut self) -> Option<ViId> {
        if !self.nic.process.is_this() {
            return None;
        }
        if self.version != self.shared.version.load(Ordering::Acquire) {
            self.reload();
        }
        for carrier in &self.carriers {
            let _ = carrier.attend(false);
        }
        self.find_ready()
    }

    /// A VI that has something, without looking at the network.
    #[inline]
    fn find_ready(&mut self) -> Option<ViId> {
        if self.many.is_some() {
            return self.poll_many();
        }
        let count = self.members.len();
        for step in 0..count {
            let at = if self.next + step < count { self.next + step } else { self.next + step - count };
            if self.members[at].ready() {
                self.next = if at + 1 < count { at + 1 } else { 0 };
                return Some(self.members[at].id());
            }
        }
        None
    }

    fn poll_many(&mut self) -> Option<ViId> {
        let many = self.many.as_mut()?;
        for home in &self.homes {
            home.bell.take(|index| {
                if let Some(member) = many.by_bell.get(&(home.number, index.number())) {
                    activate(&mut many.active, member);
                }
            });
        }
        if self.shared.local_rung.load(Ordering::Acquire) {
            for id in self.shared.take_local() {
                if let Some(member) = many.by_id.get(&id) {
                    activate(&mut many.active, member);
                }
            }
        }
        let alarm = self.shared.alarm.count();
        if alarm != many.alarm {
            // A peer died, or a member joined: it may concern anybody.
            many.alarm = alarm;
            self.members.iter().for_each(|member| activate(&mut many.active, member));
        }
        while let Some(member) = many.active.pop_front() {
            if member.ready() {
                let id = member.id();
                many.active.push_back(member);
                return Some(id);
            }
            // From here on it rings again: its attention stays set.
            member.active().store(false, Ordering::Relaxed);
        }
        None
    }

    /// Looks for a while, one look upon the other, and does not sleep: for a thread that has a CPU of its own. Peers learn
    /// which CPU that is, as from those who wait.
    #[inline]
    pub fn glance(&mut self) -> Option<ViId> {
        if let Some(id) = self.poll() {
            return Some(id);
        }
        all_beside(&self.peers, current_cpu());
        (0..FREE_LOOKS).find_map(|_| self.poll())
    }

    /// Waits for a VI that has something, at most `timeout`.
    #[inline]
    pub fn wait(&mut self, timeout: Duration) -> Result<ViId, WaitError> {
        self.wait_or(timeout, || false)?.ok_or(WaitError::TimedOut(timeout))
    }

    /// The same, or until `stop` says so: it is asked after every [`QueueHandle::wake`], and may be asked at other times.
    /// `Ok(None)` if it stopped.
    #[inline]
    pub fn wait_or(&mut self, timeout: Duration, mut stop: impl FnMut() -> bool) -> Result<Option<ViId>, WaitError> {
        if !self.nic.process.is_this() {
            return Err(WaitError::ForkedChild);
        }
        if let Some(id) = self.poll() {
            return Ok(Some(id));
        }
        // A queue without peers has nobody to look out for; those of other hosts are beside nobody.
        let cpu = current_cpu();
        if self.carriers.is_empty() && !all_beside(&self.peers, cpu) {
            for _ in 0..FREE_LOOKS {
                if let Some(id) = self.poll() {
                    return Ok(Some(id));
                }
            }
        }
        self.wait_longer(timeout, &mut stop)
    }

    #[inline(never)]
    fn wait_longer(&mut self, timeout: Duration, stop: &mut dyn FnMut() -> bool) -> Result<Option<ViId>, WaitError> {
        let nic = self.nic.clone();
        let deadline = deadline(timeout);
        let mut rested = false;
        loop {
            // Not for as long as it waits: those that leave meanwhile are to be let go of.
            let peers = self.peers.clone();
            let elsewhere = !self.carriers.is_empty();
            let beside = |cpu| all_beside(&peers, cpu) && !elsewhere;
            // Whoever has slept on a socket is woken by each packet of a long message, and each look there is a
            // system call.
            let mut look = || match self.poll() {
                Some(id) => Some(Some(id)),
                None => stop().then_some(None),
            };
            let found = if rested { look() } else { nic.spin.spin(deadline, beside, look) };
            drop(peers);
            if let Some(found) = found {
                return Ok(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return self.poll().map(Some).ok_or(WaitError::TimedOut(timeout));
            }
            if let Some(found) = self.rest(left, stop) {
                rested = true;
                match found {
                    Some(id) => return Ok(Some(id)),
                    None => continue,
                }
            }
            if let Some(id) = self.sleep(left, &mut *stop) {
                return Ok(Some(id));
            }
            if let Some(id) = self.poll() {
                return Ok(Some(id));
            }
            if stop() {
                return Ok(None);
            }
        }
    }

    /// Sleeps on the socket of the one port that all VIs go by, if there is only one, and it is for this
    /// thread to carry what comes. What was found, or nothing; `None` if it is not.
    fn rest(&mut self, timeout: Duration, stop: &mut dyn FnMut() -> bool) -> Option<Option<ViId>> {
        let [carrier] = &self.carriers[..] else { return None };
        if !self.peers.is_empty() {
            return None;
        }
        let (carrier, mut found) = (carrier.clone(), None);
        // Whoever joins meanwhile may come by another way.
        self.shared.set_resting(Some(carrier.clone()));
        let rested = carrier.rest(timeout, &mut || {
            found = self.find_ready();
            found.is_some() || self.version != self.shared.version.load(Ordering::SeqCst) || stop()
        });
        self.shared.set_resting(None);
        rested.then_some(found)
    }

    /// A descriptor for poll, epoll and the like: readable when something comes while the queue is
    /// armed. `arm`, wait until readable, `disarm`, poll, and again.
    pub fn descriptor(&mut self) -> io::Result<BorrowedFd<'_>> {
        if self.epoll.is_none() {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let alarm = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            epoll::add(&epoll, &alarm, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
            let _ = self.shared.alarm_fd.set(alarm);
            self.epoll = Some(epoll);
            self.homes.clear();
            self.reload();
        }
        self.epoll.as_ref().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Asks for the descriptor to become readable at the next event. Call [`CompletionQueue::descriptor`] first.
    pub fn arm(&mut self) -> Armed {
        if !self.nic.process.is_this() {
            return Armed::Waiting;
        }
        if self.version != self.shared.version.load(Ordering::Acquire) {
            self.reload();
        }
        if !std::mem::replace(&mut self.is_armed, true) {
            self.set_armed(true);
        }
        Bell::settle();
        match self.poll() {
            Some(id) => {
                self.disarm();
                Armed::Ready(id)
            }
            None => Armed::Waiting,
        }
    }

    /// Takes that back, and whatever made the descriptor readable.
    pub fn disarm(&mut self) {
        if !self.nic.process.is_this() || !std::mem::take(&mut self.is_armed) {
            return;
        }
        self.set_armed(false);
        self.homes.iter().for_each(|home| home.drain());
        if let Some(alarm) = self.shared.alarm_fd.get() {
            let _ = rustix::io::read(alarm, &mut [0u8; 8]);
        }
    }

    fn set_armed(&mut self, armed: bool) {
        self.shared.count_sleeper(armed);
        let wire = if armed { WireUse::ALWAYS } else { WireUse::NOT };
        self.homes.iter().for_each(|home| home.bell.arm(wire));
        if armed {
            self.armed = self.members.clone();
            self.armed.iter().for_each(|member| member.set_attention(true));
            self.armed_carriers = self.carriers.clone();
            self.armed_carriers.iter().for_each(|carrier| carrier.hand_over(true));
        } else {
            self.armed.drain(..).for_each(|member| member.set_attention(false));
            self.armed_carriers.drain(..).for_each(|carrier| carrier.hand_over(false));
        }
    }

    /// Runs `callback` on a thread of its own whenever a VI has something. The callback owns the
    /// VIs and polls them; the thread ends when the handle is dropped.
    pub fn notify(self, callback: impl FnMut(ViId) + Send + 'static) -> io::Result<Notify> {
        Notify::spawn(self, callback)
    }

    /// The members or their pages have changed.
    #[cold]
    fn reload(&mut self) {
        self.version = self.shared.version.load(Ordering::SeqCst);
        let homes = self.shared.homes();
        if let Some(epoll) = &self.epoll {
            for home in homes.iter().filter(|home| !self.homes.iter().any(|known| Arc::ptr_eq(known, home))) {
                // It fails only for a page that is there already.
                let _ = epoll::add(epoll, &home.ears, epoll::EventData::new_u64(1), epoll::EventFlags::IN);
            }
        }
        self.homes = homes;
        self.members = self.shared.members().clone();
        self.peers.clear();
        self.carriers.clear();
        for member in &self.members {
            match member {
                Member::Host(member) if !self.peers.iter().any(|peer| Arc::ptr_eq(peer, &member.peer)) => {
                    self.peers.push(member.peer.clone());
                }
                Member::Wire(member) if !self.carriers.iter().any(|c| c.number() == member.carrier().number()) => {
                    self.carriers.push(member.carrier().clone());
                }
                _ => {}
            }
        }
        self.next = 0;
        let many = self.members.len() > FEW;
        self.shared.many.store(many, Ordering::SeqCst);
        for member in &self.members {
            member.refresh_attention();
            member.active().store(false, Ordering::Relaxed);
        }
        self.many = many.then(|| Many {
            by_bell: self.members.iter().filter_map(|m| m.bell().map(|bell| (bell, m.clone()))).collect(),
            by_id: self.members.iter().map(|m| (m.id(), m.clone())).collect(),
            active: VecDeque::new(),
            alarm: self.shared.alarm.count().wrapping_sub(1),
        });
        // Whoever did not see the attention yet is seen when all members are looked at once.
        Bell::settle();
    }
}

/// Tells every peer where we run; true if all of them last waited on this same CPU.
fn all_beside(peers: &[Arc<Peer>], cpu: u32) -> bool {
    peers.iter().filter(|peer| !peer.on_this_cpu(cpu)).count() == 0
}

fn activate(active: &mut VecDeque<Member>, member: &Member) {
    if !member.active().swap(true, Ordering::Relaxed) {
        active.push_back(member.clone());
    }
}

/// A thread that calls back when VIs have something.
#[derive(Debug)]
pub struct Notify {
    process: Process,
    stop: Arc<AtomicBool>,
    shared: Arc<QueueShared>,
    thread: Option<JoinHandle<()>>,
}

impl Notify {
    pub(crate) fn shared(&self) -> Arc<QueueShared> {
        self.shared.clone()
    }

    fn spawn(mut queue: CompletionQueue, mut callback: impl FnMut(ViId) + Send + 'static) -> io::Result<Notify> {
        const LONG: Duration = Duration::from_secs(3600);
        let (stop, shared, process) = (Arc::new(AtomicBool::new(false)), queue.shared(), queue.nic.process);
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("highwire-notify".into()).spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                let ready = queue.poll().or_else(|| queue.sleep(LONG, || stopped.load(Ordering::SeqCst)));
                if let Some(id) = ready {
                    callback(id);
                }
            }
        })?;
        Ok(Notify { process, stop, shared, thread: Some(thread) })
    }
}

impl CompletionQueue {
    /// Sleeps once: until something comes, the members change, or `stop` says so.
    fn sleep(&mut self, timeout: Duration, mut stop: impl FnMut() -> bool) -> Option<ViId> {
        // With many members the attention stands all the time.
        let members = if self.many.is_none() { self.members.clone() } else { Vec::new() };
        let (shared, homes, version) = (self.shared.clone(), self.homes.clone(), self.version);
        let carriers = self.carriers.clone();
        let announce = |asleep| {
            members.iter().for_each(|member| member.set_attention(asleep));
            carriers.iter().for_each(|carrier| carrier.hand_over(asleep));
        };
        let look = || {
            let found = self.poll().map(Some);
            // A member that joined in between was not asked to ring.
            found.or_else(|| (self.version != version || stop()).then_some(None))
        };
        shared.sleep(&homes, Some(timeout), announce, look).ok().flatten()
    }
}

impl Drop for Notify {
    fn drop(&mut self) {
        if !self.process.is_this() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.disarm();
    }
}
