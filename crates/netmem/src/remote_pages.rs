//! Pages of a paged region, kept in the memory of nodes.

use crate::client::Failed;
use crate::donation::{PAGE_BYTES, Read, View};
use crate::exchange::{boot_ns, random};
use crate::memory::{Memory, MemoryError};
use crate::node::next_version;
use crate::paging::{PageError, PageRun, PageStore, PagedRegion, PagingError, PagingOptions, StoreError};
use crate::request::{Answer, Ask, Refusal};
use crate::types::{Incarnation, PageHandle};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

impl Memory {
    /// A region of `bytes` whose pages are kept by the nodes, but for as many as its budget allows here.
    pub fn paged_region(&self, bytes: u64, options: PagingOptions) -> Result<PagedRegion, PagingError> {
        let store = RemotePages::new(self.clone(), bytes.div_ceil(PAGE_BYTES as u64));
        PagedRegion::create(bytes, options, store)
    }
}

/// The pages of one region.
#[derive(Debug)]
struct RemotePages {
    memory: Memory,
    owner: u64,
    places: Box<[Place]>,
    /// Nodes that have pages of it. Set once each, and looked at by signal handlers.
    nodes: Box<[OnceLock<Holder>]>,
    spare: Mutex<Spare>,
    ending: Arc<Ending>,
}

/// Where a page is. Written by one thread at a time, read by any.
#[derive(Debug, Default)]
struct Place {
    /// Index and generation of the page at its node.
    page: AtomicU64,
    /// The node's number here plus one, and the page's version; 0 while it has no place.
    node: AtomicU64,
}

#[derive(Debug)]
struct Holder {
    incarnation: Incarnation,
    view: Option<View>,
}

/// Pages that were taken and not used yet.
#[derive(Debug, Default)]
struct Spare {
    pages: Vec<PageHandle>,
    turn: u64,
    /// Which node is asked first next time.
    next: usize,
}

#[derive(Debug, Default)]
struct Ending {
    over: AtomicBool,
    lock: Mutex<()>,
    told: Condvar,
}

impl RemotePages {
    fn new(memory: Memory, pages: u64) -> Arc<RemotePages> {
        let store = Arc::new(RemotePages {
            memory,
            owner: random() | 1,
            places: std::iter::repeat_with(Place::default).take(pages as usize).collect(),
            nodes: std::iter::repeat_with(OnceLock::new).take(NODES_MAX).collect(),
            spare: Mutex::default(),
            ending: Arc::default(),
        });
        let (weak, ending) = (Arc::downgrade(&store), store.ending.clone());
        // Without it the lease ends, and pages are lost: then that is what is said of them.
        let renewing = std::thread::Builder::new().name("highwire-renew".into()).spawn(move || renew(&weak, &ending));
        drop(renewing);
        store
    }

    fn spare(&self) -> MutexGuard<'_, Spare> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a node here; `None` if there are too many.
    fn number(&self, incarnation: Incarnation) -> Option<usize> {
        for (number, holder) in self.nodes.iter().enumerate() {
            let holder = holder.get_or_init(|| {
                let view = self.memory.link_to(incarnation).and_then(|link| link.view.clone());
                Holder { incarnation, view }
            });
            if holder.incarnation == incarnation {
                return Some(number);
            }
        }
        None
    }

    /// Where a page is, its version, and who has it. It neither blocks nor allocates.
    fn place(&self, page: u64) -> Option<(PageHandle, u32, &Holder)> {
        let place = self.places.get(page as usize)?;
        // Acquires what `keep` released.
        let node = place.node.load(Acquire);
        let holder = self.nodes.get(((node >> 32) as usize).checked_sub(1)?)?.get()?;
        let word = place.page.load(Relaxed);
        let handle =
            PageHandle { incarnation: holder.incarnation, index: (word >> 32) as u32, generation: word as u32 };
        Some((handle, node as u32, holder))
    }

    fn keep(&self, page: u64, handle: PageHandle, number: usize, version: u32) {
        let place = &self.places[page as usize];
        place.page.store(u64::from(handle.index) << 32 | u64::from(handle.generation), Relaxed);
        // Releases the word before.
        place.node.store((number as u64 + 1) << 32 | u64::from(version), Release);
    }

    /// Pages that nobody uses, as many as there can be up to `count`, at least one.
    fn take(&self, count: usize) -> Result<Vec<PageHandle>, PageError> {
        let mut spare = self.spare();
        if spare.pages.is_empty() {
            self.take_more(&mut spare)?;
        }
        let keep = spare.pages.len().saturating_sub(count);
        // The first that were taken come first, so that pages that follow each other lie together.
        let mut taken = spare.pages.split_off(keep);
        taken.reverse();
        Ok(taken)
    }

    fn take_more(&self, spare: &mut Spare) -> Result<(), PageError> {
        let mut nodes = self.memory.lives();
        if nodes.is_empty() {
            let _ = self.memory.refresh();
            nodes = self.memory.lives();
        }
        let full = PageError::Full { pages: 1 };
        if nodes.is_empty() {
            return Err(full);
        }
        // All at once where there is room, less and less where there is not.
        let mut count = TAKE_AT_ONCE;
        while count > 0 {
            for step in 0..nodes.len() {
                let node = nodes[(spare.next + step) % nodes.len()];
                if self.number(node).is_none() {
                    continue;
                }
                spare.turn += 1;
                let (owner, lease_ns, turn) = (self.owner, LEASE.as_nanos() as u64, spare.turn);
                let ask = Ask::TakePages { owner, count, lease_ns, turn };
                if let Ok((answered, _)) = self.memory.ask(ask, node, None, count as usize * HANDLE_BYTES)
                    && let Answer::Pages { mut pages } = answered.answer
                {
                    spare.next = (spare.next + step + 1) % nodes.len();
                    pages.reverse();
                    spare.pages = pages;
                    return Ok(());
                }
            }
            count /= 8;
        }
        Err(full)
    }

    /// Stores a few pages that follow each other. What a node had that is gone gets another place: all of a page's content
    /// is here.
    fn store_some(&self, pages: &[(u64, &[u8])]) -> Result<(), PageError> {
        // Each attempt that fails forgets a node.
        for _ in 0..NODES_MAX {
            let Some(gone) = self.try_store(pages)? else { return Ok(()) };
            self.spare().pages.retain(|page| page.incarnation != gone);
            for (page, _) in pages {
                if self.place(*page).is_some_and(|(handle, ..)| handle.incarnation == gone) {
                    self.places[*page as usize].node.store(0, Release);
                }
            }
        }
        Err(PageError::Unreachable { page: pages[0].0 })
    }

    /// The same; the node that did not take its pages since it is gone, or has given them up.
    fn try_store(&self, pages: &[(u64, &[u8])]) -> Result<Option<Incarnation>, PageError> {
        let mut new = Vec::new();
        let missing = pages.iter().filter(|(page, _)| self.place(*page).is_none()).count();
        while new.len() < missing {
            match self.take(missing - new.len()) {
                Ok(mut taken) => new.append(&mut taken),
                Err(error) => {
                    self.spare().pages.extend(new);
                    return Err(error);
                }
            }
        }
        let mut new = new.into_iter();
        let mut targets: Vec<(PageHandle, u32)> = Vec::with_capacity(pages.len());
        for (page, _) in pages {
            let target = match self.place(*page) {
                Some((handle, version, _)) => (handle, version),
                None => (new.next().ok_or(PageError::Full { pages: 1 })?, 0),
            };
            targets.push(target);
        }
        let mut at = 0;
        while at < pages.len() {
            let node = targets[at].0.incarnation;
            let end =
                targets[at..].iter().position(|(page, _)| page.incarnation != node).map_or(pages.len(), |n| at + n);
            if let Err(error) = self.write(node, &pages[at..end], &targets[at..end]) {
                // Pages that were taken for this and that no request has named. What the node was asked to write may
                // have a version already: it stays the owner's until the region ends.
                let unnamed = pages[at..].iter().zip(&targets[at..]);
                let unnamed =
                    unnamed.filter(|((page, _), _)| self.place(*page).is_none()).map(|(_, (handle, _))| *handle);
                self.spare().pages.extend(unnamed.filter(|handle| handle.incarnation != node));
                return if let PageError::Lost { .. } = error { Ok(Some(node)) } else { Err(error) };
            }
            at = end;
        }
        Ok(None)
    }

    fn write(&self, node: Incarnation, pages: &[(u64, &[u8])], targets: &[(PageHandle, u32)]) -> Result<(), PageError> {
        let first = pages[0].0;
        let unreachable = PageError::Unreachable { page: first };
        let mut buffer = self.memory.frames().buffer(pages.len() * PAGE_BYTES).ok_or(unreachable)?;
        for ((_, content), into) in pages.iter().zip(buffer.chunks_mut(PAGE_BYTES)) {
            into.copy_from_slice(content);
        }
        let ask = Ask::WritePages { owner: self.owner, pages: targets.to_vec() };
        self.memory.ask(ask, node, Some(buffer), 0).map_err(|error| page_error(&error, first))?;
        let number = self.number(node).ok_or(unreachable)?;
        for ((page, _), (handle, version)) in pages.iter().zip(targets) {
            self.keep(*page, *handle, number, next_version(*version));
        }
        Ok(())
    }

    /// Reads pages from one node by a call.
    fn read(&self, handles: Vec<PageHandle>, pages: &mut [(u64, &mut [u8])]) -> Result<(), PageError> {
        let (node, first, room) = (handles[0].incarnation, pages[0].0, handles.len() * PAGE_BYTES);
        let answered = self.memory.ask(Ask::ReadPages { pages: handles }, node, None, room);
        let (answered, _) = answered.map_err(|error| page_error(&error, first))?;
        if answered.bytes().len() != room {
            return Err(PageError::Unreachable { page: first });
        }
        for ((_, into), content) in pages.iter_mut().zip(answered.bytes().chunks(PAGE_BYTES)) {
            into.copy_from_slice(content);
        }
        Ok(())
    }
}

impl PageStore for RemotePages {
    fn fetch_each(&self, pages: &mut [(u64, &mut [u8])]) -> Result<(), PageError> {
        let mut rest = pages;
        while let [(page, into), ..] = rest {
            let page = *page;
            let (handle, _, holder) = self.place(page).ok_or(PageError::Lost { page })?;
            if holder.view.as_ref().is_some_and(|view| read_now(view, handle, into)) {
                rest = &mut rest[1..];
                continue;
            }
            let places = rest.iter().map_while(|(page, _)| self.place(*page)).map(|(handle, ..)| handle);
            let same = places.take_while(|next| next.incarnation == handle.incarnation);
            let handles: Vec<PageHandle> = same.take(READ_AT_ONCE).collect();
            let count = handles.len();
            self.read(handles, &mut rest[..count])?;
            rest = &mut rest[count..];
        }
        Ok(())
    }

    fn fetch_now(&self, first: u64, into: &mut [u8]) -> bool {
        // The clock is looked at once for the pages of a node that follow one another.
        let mut copied: Option<(u64, &View)> = None;
        let is_valid = |copied: Option<(u64, &View)>| copied.is_none_or(|(_, view)| view.is_valid(boot_ns()));
        for (into, page) in into.chunks_mut(PAGE_BYTES).zip(first..) {
            let Some((handle, _, Holder { view: Some(view), .. })) = self.place(page) else { return false };
            let is_other = copied.is_some_and(|(incarnation, _)| incarnation != handle.incarnation);
            if is_other && !is_valid(copied) || !copy_now(view, handle, into) {
                return false;
            }
            copied = Some((handle.incarnation, view));
        }
        is_valid(copied)
    }

    fn store(&self, runs: &[PageRun<'_>]) -> Result<(), StoreError> {
        let pages: Vec<(u64, &[u8])> = runs
            .iter()
            .flat_map(|run| {
                run.content.chunks(PAGE_BYTES).enumerate().map(|(at, content)| (run.first + at as u64, content))
            })
            .collect();
        for (at, some) in pages.chunks(WRITE_AT_ONCE).enumerate() {
            let kept_pages = at * WRITE_AT_ONCE;
            self.store_some(some).map_err(|reason| StoreError { kept_pages, reason })?;
        }
        Ok(())
    }
}

/// Reads a page from memory of this host; false if that has to be asked for.
fn read_now(view: &View, handle: PageHandle, into: &mut [u8]) -> bool {
    copy_now(view, handle, into) && view.is_valid(boot_ns())
}

fn copy_now(view: &View, handle: PageHandle, into: &mut [u8]) -> bool {
    for _ in 0..TRIES {
        match view.copy(handle, 0, into) {
            Read::Done => return true,
            Read::Changed | Read::Busy => {}
            Read::Freed | Read::Lapsed => return false,
        }
    }
    false
}

/// Keeps the lease on the pages until the region is gone.
fn renew(store: &Weak<RemotePages>, ending: &Ending) {
    loop {
        let lock = ending.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if !ending.over.load(SeqCst) {
            drop(ending.told.wait_timeout(lock, LEASE / 4));
        }
        let Some(store) = store.upgrade().filter(|_| !ending.over.load(SeqCst)) else { return };
        for holder in store.nodes.iter().map_while(OnceLock::get) {
            let ask = Ask::RenewOwner { owner: store.owner, lease_ns: LEASE.as_nanos() as u64 };
            // A node that is gone is noticed by whoever wants a page of it.
            let _ = store.memory.ask(ask, holder.incarnation, None, 0);
        }
    }
}

impl Drop for RemotePages {
    fn drop(&mut self) {
        self.ending.over.store(true, SeqCst);
        drop(self.ending.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.ending.told.notify_all();
        for holder in self.nodes.iter().map_while(OnceLock::get) {
            // Should it not arrive, the lease ends by itself.
            let _ = self.memory.ask(Ask::EndOwner { owner: self.owner }, holder.incarnation, None, 0);
        }
    }
}

fn page_error(error: &MemoryError, page: u64) -> PageError {
    match error {
        MemoryError::Failed(
            Failed::Gone { .. }
            | Failed::Refused(Refusal::Gone { .. } | Refusal::NoPage { .. } | Refusal::NoOwner { .. }),
        ) => PageError::Lost { page },
        MemoryError::Failed(Failed::Refused(Refusal::Full { .. } | Refusal::NoMemory { .. })) => {
            PageError::Full { pages: 1 }
        }
        _ => PageError::Unreachable { page },
    }
}

/// Nodes that may have pages of one region.
const NODES_MAX: usize = 256;
/// How long a region that says nothing keeps its pages.
const LEASE: Duration = Duration::from_secs(60);
/// Pages that are taken from a node at once: 1 MiB.
const TAKE_AT_ONCE: u32 = 256;
/// Bytes of an encoded handle, at most.
const HANDLE_BYTES: usize = 24;
/// Pages that are written by one call: what fits a frame of the server.
const WRITE_AT_ONCE: usize = 16;
/// Pages that are read by one call: 1 MiB.
const READ_AT_ONCE: usize = 256;
/// Looks at a page that is being written.
const TRIES: u32 = 8;
