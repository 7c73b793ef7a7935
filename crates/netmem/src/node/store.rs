//! What a node holds: named objects in donated pages, which age and end.

use crate::donation::{Donation, DonationError, PAGE_BYTES};
use crate::map::BUCKETS;
use crate::node::config::Config;
use crate::request::{Figures, Refusal, Stat};
use crate::types::{Name, PageHandle, Version};
use std::collections::{BTreeMap, BTreeSet};

/// An object's pages and what is said of it.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) version: Version,
    pub(crate) length: u64,
    pub(crate) pages: Vec<PageHandle>,
    /// When its lease ends.
    pub(crate) ends: u64,
    pub(crate) pinned: bool,
    /// The place among all objects by their last use.
    used: u64,
}

impl Object {
    pub(crate) fn stat(&self, now: u64) -> Stat {
        let Object { version, length, pinned, .. } = *self;
        Stat { version, length, lease_left_ns: self.ends.saturating_sub(now), pinned }
    }
}

/// Bytes that have pages and no name yet.
#[derive(Debug)]
pub(crate) struct Staged {
    pub(crate) pages: Vec<PageHandle>,
    pub(crate) length: u64,
}

/// Objects by bucket and name, and the pages that they and paged regions share.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) donation: Donation,
    buckets: Vec<BTreeMap<Name, Object>>,
    /// Objects that may age, by last use.
    uses: BTreeMap<u64, (u16, Name)>,
    ends: BTreeSet<(u64, u16, Name)>,
    next_use: u64,
    ageable_pages: u32,
    pub(crate) figures: Figures,
}

impl Store {
    pub(crate) fn new(donation: Donation) -> Store {
        let mut store = Store {
            donation,
            buckets: vec![BTreeMap::new(); usize::from(BUCKETS)],
            uses: BTreeMap::new(),
            ends: BTreeSet::new(),
            next_use: 0,
            ageable_pages: 0,
            figures: Figures::default(),
        };
        store.begin(0);
        store
    }

    /// Empties everything, for another life.
    pub(crate) fn begin(&mut self, incarnation: u64) {
        self.donation.incarnate(incarnation);
        self.buckets.iter_mut().for_each(BTreeMap::clear);
        self.uses.clear();
        self.ends.clear();
        self.ageable_pages = 0;
        self.figures = Figures { pages: self.donation.pages(), ..Figures::default() };
    }

    pub(crate) fn figures(&self) -> Figures {
        Figures { free_pages: self.donation.free_pages(), ..self.figures }
    }

    /// Takes pages, for which objects may have to go that have not been used for the longest time. All or none.
    pub(crate) fn take(&mut self, count: u64) -> Result<Vec<PageHandle>, Refusal> {
        let reachable = u64::from(self.donation.free_pages()) + u64::from(self.ageable_pages);
        if count > reachable {
            return Err(self.full(count));
        }
        let mut pages = Vec::with_capacity(count as usize);
        while (pages.len() as u64) < count {
            match self.donation.take() {
                Ok(page) => pages.push(page),
                Err(error) => {
                    // Where the machine has no memory, pages of aged objects still have theirs.
                    if self.age_one() {
                        continue;
                    }
                    self.give(pages);
                    return Err(match error {
                        DonationError::NoMemory { .. } => Refusal::NoMemory { asked: count },
                        _ => self.full(count),
                    });
                }
            }
        }
        Ok(pages)
    }

    pub(crate) fn give(&mut self, pages: Vec<PageHandle>) {
        for page in pages {
            let _ = self.donation.free(page);
        }
    }

    /// Pages that there are for content, some of them where objects have to go.
    pub(crate) fn room(&self) -> u32 {
        self.donation.available_pages().saturating_add(self.ageable_pages)
    }

    /// Pages that a bucket's objects have.
    pub(crate) fn bucket_pages(&self, bucket: u16) -> u64 {
        self.buckets[usize::from(bucket)].values().map(|object| object.pages.len() as u64).sum()
    }

    pub(crate) fn is_empty(&self, bucket: u16) -> bool {
        self.buckets[usize::from(bucket)].is_empty()
    }

    fn full(&self, asked: u64) -> Refusal {
        let Figures { pages, free_pages: free, pinned_pages: pinned, paged_pages: paged, .. } = self.figures();
        Refusal::Full { asked, free, pages, pinned, paged }
    }

    /// Puts bytes into pages of their own.
    pub(crate) fn stage(&mut self, config: &Config, bytes: &[u8]) -> Result<Staged, Refusal> {
        self.check_room(config, bytes.len() as u64)?;
        let mut staged = Staged { pages: Vec::new(), length: 0 };
        self.stage_more(&mut staged, bytes)?;
        Ok(staged)
    }

    /// Whether an object of so many bytes may be, and has room if others go.
    pub(crate) fn check_room(&self, config: &Config, length: u64) -> Result<(), Refusal> {
        if length > config.object_bytes_max {
            return Err(Refusal::TooLarge { bytes: length, most: config.object_bytes_max });
        }
        let (asked, free) = (length.div_ceil(PAGE_BYTES as u64), u64::from(self.donation.free_pages()));
        if asked > free + u64::from(self.ageable_pages) { Err(self.full(asked)) } else { Ok(()) }
    }

    /// Puts more bytes behind those that are there, which fill their pages.
    pub(crate) fn stage_more(&mut self, staged: &mut Staged, bytes: &[u8]) -> Result<(), Refusal> {
        debug_assert!(staged.length.is_multiple_of(PAGE_BYTES as u64));
        let mut pages = self.take((bytes.len() as u64).div_ceil(PAGE_BYTES as u64))?;
        for (page, bytes) in pages.iter().zip(bytes.chunks(PAGE_BYTES)) {
            self.donation.write(*page, 0, bytes).expect("the page was just taken");
        }
        staged.pages.append(&mut pages);
        staged.length += bytes.len() as u64;
        Ok(())
    }

    /// Whether one more name would be too many.
    pub(crate) fn check_count(&self, config: &Config, bucket: u16, name: &Name) -> Result<(), Refusal> {
        let known = self.buckets[usize::from(bucket)].contains_key(name);
        if !known && self.figures.objects >= config.objects_max {
            return Err(Refusal::TooMany { most: config.objects_max });
        }
        Ok(())
    }

    /// Gives bytes a name. What it had before is freed when the new content is in place: who has handles of the old
    /// pages reads the old content whole, or learns that it is gone.
    pub(crate) fn commit(
        &mut self,
        bucket: u16,
        name: &Name,
        staged: Staged,
        version: Version,
        ends: u64,
        pinned: bool,
    ) {
        self.remove(bucket, name);
        let used = self.next_use;
        self.next_use += 1;
        let count = staged.pages.len() as u32;
        self.figures.objects += 1;
        self.figures.object_pages += count;
        if pinned {
            self.figures.pinned_pages += count;
        } else {
            self.ageable_pages += count;
            self.uses.insert(used, (bucket, name.clone()));
        }
        self.ends.insert((ends, bucket, name.clone()));
        let object = Object { version, length: staged.length, pages: staged.pages, ends, pinned, used };
        self.buckets[usize::from(bucket)].insert(name.clone(), object);
    }

    pub(crate) fn remove(&mut self, bucket: u16, name: &Name) -> bool {
        let Some(object) = self.buckets[usize::from(bucket)].remove(name) else { return false };
        let count = object.pages.len() as u32;
        self.figures.objects -= 1;
        self.figures.object_pages -= count;
        if object.pinned {
            self.figures.pinned_pages -= count;
        } else {
            self.ageable_pages -= count;
            self.uses.remove(&object.used);
        }
        self.ends.remove(&(object.ends, bucket, name.clone()));
        self.give(object.pages);
        true
    }

    /// What a name has. Content whose lease is over is freed, and said to be over this once.
    pub(crate) fn find(&mut self, now: u64, bucket: u16, name: &Name) -> Result<Option<&Object>, Refusal> {
        let ends = self.buckets[usize::from(bucket)].get(name).map(|object| object.ends);
        match ends {
            Some(ends) if ends <= now => {
                self.remove(bucket, name);
                self.figures.expired += 1;
                Err(Refusal::Expired { ago_ns: now - ends })
            }
            _ => Ok(self.buckets[usize::from(bucket)].get(name)),
        }
    }

    /// What a name has, whether its lease is over or not.
    pub(crate) fn peek(&self, bucket: u16, name: &Name) -> Option<&Object> {
        self.buckets[usize::from(bucket)].get(name)
    }

    /// The names of a bucket after one of them.
    pub(crate) fn after<'a>(
        &'a self,
        bucket: u16,
        after: Option<&'a Name>,
    ) -> impl Iterator<Item = (&'a Name, &'a Object)> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        self.buckets[usize::from(bucket)].range::<Name, _>((from, Unbounded))
    }

    /// The object was used just now.
    pub(crate) fn touch(&mut self, bucket: u16, name: &Name) {
        let Some(object) = self.buckets[usize::from(bucket)].get_mut(name) else { return };
        if !object.pinned {
            self.uses.remove(&object.used);
            object.used = self.next_use;
            self.uses.insert(object.used, (bucket, name.clone()));
            self.next_use += 1;
        }
    }

    pub(crate) fn set_end(&mut self, bucket: u16, name: &Name, ends: u64) {
        let Some(object) = self.buckets[usize::from(bucket)].get_mut(name) else { return };
        self.ends.remove(&(object.ends, bucket, name.clone()));
        object.ends = ends;
        self.ends.insert((ends, bucket, name.clone()));
    }

    /// The bytes of these pages.
    pub(crate) fn bytes(&self, pages: &[PageHandle], length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        for (page, chunk) in pages.iter().zip(bytes.chunks_mut(PAGE_BYTES)) {
            self.donation.read(*page, 0, chunk).expect("an object's page is in use");
        }
        bytes
    }

    pub(crate) fn clear_bucket(&mut self, bucket: u16) {
        for name in self.buckets[usize::from(bucket)].keys().cloned().collect::<Vec<_>>() {
            self.remove(bucket, &name);
        }
    }

    /// Makes the handles worthless that were given out of a bucket's pages.
    pub(crate) fn regenerate_bucket(&mut self, bucket: u16) {
        let names: Vec<_> = self.buckets[usize::from(bucket)].keys().cloned().collect();
        for name in names {
            let object = self.buckets[usize::from(bucket)].get_mut(&name).expect("it is there");
            let donation = &mut self.donation;
            let fresh: Result<Vec<_>, _> = object.pages.iter().map(|page| donation.regenerate(*page)).collect();
            match fresh {
                Ok(pages) => object.pages = pages,
                // A page's generations are spent, once in 2³² uses. Some of its pages have new handles, so that they
                // cannot be freed by the old ones; the object goes, as if it had aged.
                Err(_) => {
                    let pages = std::mem::take(&mut object.pages);
                    self.forget_pages(bucket, &name, pages);
                }
            }
        }
    }

    fn forget_pages(&mut self, bucket: u16, name: &Name, pages: Vec<PageHandle>) {
        let count = pages.len() as u32;
        let pinned = self.peek(bucket, name).is_some_and(|object| object.pinned);
        self.figures.object_pages -= count;
        if pinned {
            self.figures.pinned_pages -= count
        } else {
            self.ageable_pages -= count
        }
        for page in pages {
            let next = PageHandle { generation: page.generation.wrapping_add(1), ..page };
            let _ = self.donation.free(page).or_else(|_| self.donation.free(next));
        }
        self.remove(bucket, name);
        self.figures.aged += 1;
    }

    /// Frees what has ended, and gives memory back.
    pub(crate) fn sweep(&mut self, now: u64, keep_blocks: usize) {
        while let Some((ends, bucket, name)) = self.ends.first().cloned() {
            if ends > now {
                break;
            }
            self.remove(bucket, &name);
            self.figures.expired += 1;
        }
        self.donation.give_back(keep_blocks);
    }

    fn age_one(&mut self) -> bool {
        let Some((_, (bucket, name))) = self.uses.pop_first() else { return false };
        self.remove(bucket, &name);
        self.figures.aged += 1;
        true
    }
}
