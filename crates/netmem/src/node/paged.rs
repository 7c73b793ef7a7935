//! Pages of paged regions: they belong to an owner with a lease and never age.

use crate::donation::PAGE_BYTES;
use crate::node::config::Config;
use crate::node::store::Store;
use crate::request::{Answer, Refusal};
use crate::types::PageHandle;
use std::collections::{HashMap, HashSet};

#[derive(Debug, Default)]
struct Owner {
    ends: u64,
    pages: HashSet<PageHandle>,
    /// The last request for pages and what it got, in case the answer was lost.
    last: Option<(u64, Vec<PageHandle>)>,
}

/// The owners of paged regions, and their pages here.
#[derive(Debug, Default)]
pub(crate) struct Paged {
    owners: HashMap<u64, Owner>,
}

impl Paged {
    /// For another life: the pages are gone already.
    pub(crate) fn begin(&mut self) {
        self.owners.clear();
    }

    pub(crate) fn take(
        &mut self,
        (store, config, now): (&mut Store, &Config, u64),
        owner: u64,
        count: u32,
        lease_ns: u64,
        turn: u64,
    ) -> Result<Answer, Refusal> {
        config.check_lease(lease_ns)?;
        self.expire(store, now, owner);
        if count > config.take_max {
            return Err(Refusal::TooMany { most: u64::from(config.take_max) });
        }
        let owners = self.owners.len() as u64;
        if !self.owners.contains_key(&owner) && owners >= config.owners_max {
            return Err(Refusal::TooMany { most: config.owners_max });
        }
        let last = self.owners.get(&owner).and_then(|state| state.last.as_ref());
        if let Some((_, pages)) = last.filter(|(last, _)| *last == turn) {
            return Ok(Answer::Pages { pages: pages.clone() });
        }
        let pages = store.take(u64::from(count))?;
        store.figures.paged_pages += count;
        let state = self.owners.entry(owner).or_default();
        state.ends = now + lease_ns;
        state.pages.extend(pages.iter().copied());
        state.last = Some((turn, pages.clone()));
        Ok(Answer::Pages { pages })
    }

    pub(crate) fn write(
        &mut self,
        (store, now): (&mut Store, u64),
        owner: u64,
        page: PageHandle,
        at: u16,
        version: u32,
        bytes: &[u8],
    ) -> Result<Answer, Refusal> {
        self.check(store, now, owner, page)?;
        check_range(at, bytes.len() as u64)?;
        let found = store.donation.version(page).map_err(|_| Refusal::NoPage { page })?;
        if found != version {
            return Err(Refusal::PageVersion { found, expected: version });
        }
        let version = store.donation.write(page, usize::from(at), bytes).map_err(|_| Refusal::NoPage { page })?;
        Ok(Answer::Written { version })
    }

    /// Whoever has the handle may read.
    pub(crate) fn read(store: &Store, page: PageHandle, at: u16, length: u16) -> Result<(Answer, Vec<u8>), Refusal> {
        check_range(at, u64::from(length))?;
        let mut bytes = vec![0; usize::from(length)];
        store.donation.read(page, usize::from(at), &mut bytes).map_err(|_| Refusal::NoPage { page })?;
        let version = store.donation.version(page).map_err(|_| Refusal::NoPage { page })?;
        Ok((Answer::Page { version }, bytes))
    }

    /// Writes whole pages. All of them, or none but those that an earlier attempt wrote.
    pub(crate) fn write_all(
        &mut self,
        (store, config, now): (&mut Store, &Config, u64),
        owner: u64,
        pages: &[(PageHandle, u32)],
        bytes: &[u8],
    ) -> Result<Answer, Refusal> {
        check_count(config, pages.len())?;
        if bytes.len() != pages.len() * PAGE_BYTES {
            return Err(Refusal::OutOfPage { at: 0, length: bytes.len() as u64 });
        }
        let mut due = Vec::with_capacity(pages.len());
        for (page, expected) in pages {
            self.check(store, now, owner, *page)?;
            let found = store.donation.version(*page).map_err(|_| Refusal::NoPage { page: *page })?;
            if found != *expected && found != next_version(*expected) {
                return Err(Refusal::PageVersion { found, expected: *expected });
            }
            due.push(found == *expected);
        }
        for (((page, _), content), due) in pages.iter().zip(bytes.chunks(PAGE_BYTES)).zip(due) {
            if due {
                store.donation.write(*page, 0, content).map_err(|_| Refusal::NoPage { page: *page })?;
            }
        }
        Ok(Answer::Done)
    }

    /// Whoever has the handles may read.
    pub(crate) fn read_all(store: &Store, config: &Config, pages: &[PageHandle]) -> Result<(Answer, Vec<u8>), Refusal> {
        check_count(config, pages.len())?;
        let mut bytes = vec![0; pages.len() * PAGE_BYTES];
        for (page, into) in pages.iter().zip(bytes.chunks_mut(PAGE_BYTES)) {
            store.donation.read(*page, 0, into).map_err(|_| Refusal::NoPage { page: *page })?;
        }
        Ok((Answer::Done, bytes))
    }

    pub(crate) fn free(
        &mut self,
        store: &mut Store,
        now: u64,
        owner: u64,
        pages: &[PageHandle],
    ) -> Result<Answer, Refusal> {
        self.expire(store, now, owner);
        let state = self.owners.get_mut(&owner).ok_or(Refusal::NoOwner { owner })?;
        let own: Vec<_> = pages.iter().copied().filter(|page| state.pages.remove(page)).collect();
        store.figures.paged_pages -= own.len() as u32;
        store.give(own);
        Ok(Answer::Done)
    }

    pub(crate) fn renew(
        &mut self,
        store: &mut Store,
        config: &Config,
        now: u64,
        owner: u64,
        lease_ns: u64,
    ) -> Result<Answer, Refusal> {
        config.check_lease(lease_ns)?;
        self.expire(store, now, owner);
        self.owners.get_mut(&owner).ok_or(Refusal::NoOwner { owner })?.ends = now + lease_ns;
        Ok(Answer::Renewed)
    }

    pub(crate) fn end(&mut self, store: &mut Store, owner: u64) {
        let Some(state) = self.owners.remove(&owner) else { return };
        store.figures.paged_pages -= state.pages.len() as u32;
        store.give(state.pages.into_iter().collect());
    }

    pub(crate) fn sweep(&mut self, store: &mut Store, now: u64) {
        let ended: Vec<_> =
            self.owners.iter().filter(|(_, state)| state.ends <= now).map(|(owner, _)| *owner).collect();
        ended.into_iter().for_each(|owner| self.end(store, owner));
    }

    fn expire(&mut self, store: &mut Store, now: u64, owner: u64) {
        if self.owners.get(&owner).is_some_and(|state| state.ends <= now) {
            self.end(store, owner);
        }
    }

    fn check(&mut self, store: &mut Store, now: u64, owner: u64, page: PageHandle) -> Result<(), Refusal> {
        self.expire(store, now, owner);
        let state = self.owners.get(&owner).ok_or(Refusal::NoOwner { owner })?;
        if state.pages.contains(&page) { Ok(()) } else { Err(Refusal::NoPage { page }) }
    }
}

/// The version of a page after it was written once more.
pub(crate) fn next_version(version: u32) -> u32 {
    version.wrapping_add(1) & (u32::MAX >> 1)
}

fn check_count(config: &Config, pages: usize) -> Result<(), Refusal> {
    if pages <= config.take_max as usize { Ok(()) } else { Err(Refusal::TooMany { most: config.take_max.into() }) }
}

fn check_range(at: u16, length: u64) -> Result<(), Refusal> {
    if u64::from(at) + length <= PAGE_BYTES as u64 { Ok(()) } else { Err(Refusal::OutOfPage { at, length }) }
}
