//! The pages that are here in the order of their arrival, and how many more may come.
//!
//! Every page that is here stands in the queue exactly once. Arrivals enter at its end, from any thread and from signal
//! handlers; turns to leave are taken at its head, by one thread at a time.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};

/// Arrivals in order. It has a place for every page that may ever be here, so it is never full.
#[derive(Debug)]
pub(super) struct AgeQueue {
    /// A page's number plus one, or 0: nobody, or somebody who has the place and is about to enter.
    places: Box<[AtomicU32]>,
    head: AtomicU64,
    tail: AtomicU64,
    taking: AtomicBool,
}

impl AgeQueue {
    /// For at most so many pages at once.
    pub(super) fn new(pages_max: u64) -> AgeQueue {
        let places = pages_max.next_power_of_two();
        AgeQueue {
            places: (0..places).map(|_| AtomicU32::new(0)).collect(),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            taking: AtomicBool::new(false),
        }
    }

    fn place(&self, ticket: u64) -> &AtomicU32 {
        &self.places[ticket as usize & (self.places.len() - 1)]
    }

    /// Pages that arrived, or whose turn passed.
    pub(super) fn enter(&self, pages: impl ExactSizeIterator<Item = u64>) {
        // In the order of tickets everything before is seen, the emptying of a place by whoever entered again after it too.
        let first = self.tail.fetch_add(pages.len() as u64, Ordering::AcqRel);
        for (ticket, page) in (first..).zip(pages) {
            // Its place is empty: fewer than all places are in use, in order, and it was emptied before the budget was
            // given back that let this page in.
            self.place(ticket).store(page as u32 + 1, Ordering::Release);
        }
    }

    /// Takes the oldest pages into `into`; none while another thread does.
    pub(super) fn take<'a>(&self, into: &'a mut [u64]) -> &'a [u64] {
        self.take_while(into, |_| true)
    }

    /// As `take`, up to the first page that is not wanted, which keeps its place.
    pub(super) fn take_while<'a>(&self, into: &'a mut [u64], wanted: impl Fn(u64) -> bool) -> &'a [u64] {
        // Acquire pairs with the Release below: one thread after another.
        if self.taking.swap(true, Ordering::Acquire) {
            return &[];
        }
        let (head, tail) = (self.head.load(Ordering::Relaxed), self.tail.load(Ordering::Relaxed));
        let mut count = 0;
        for ticket in head..tail.min(head + into.len() as u64) {
            // Acquire pairs with the Release in `enter`.
            let place = self.place(ticket);
            match u64::from(place.load(Ordering::Acquire)).checked_sub(1) {
                Some(page) if wanted(page) => into[count] = page,
                _ => break,
            }
            place.store(0, Ordering::Relaxed);
            count += 1;
        }
        self.head.store(head + count as u64, Ordering::Relaxed);
        self.taking.store(false, Ordering::Release);
        &into[..count]
    }

    /// Pages that stand in it.
    #[cfg(test)]
    pub(super) fn len(&self) -> u64 {
        self.tail.load(Ordering::Relaxed) - self.head.load(Ordering::Relaxed)
    }
}

/// How many pages are here or on their way, and how many may be.
#[derive(Debug)]
pub(super) struct Budget {
    used: AtomicI64,
    pages: i64,
    /// Beyond the budget, for pages that have no other place.
    limit: i64,
    /// Fewer free pages than this, and the pager makes more free.
    low: i64,
}

impl Budget {
    pub(super) fn new(pages: u64, limit: u64) -> Budget {
        assert!(limit >= pages);
        let low = (pages / 16).clamp(4, 1024) as i64;
        Budget { used: AtomicI64::new(0), pages: pages as i64, limit: limit as i64, low }
    }

    /// Up to `want` pages, as far as they are free without waiting.
    pub(super) fn reserve(&self, want: u32) -> Option<u32> {
        self.take(want, self.pages)
    }

    /// One page beyond the budget, when nothing can be pushed out.
    pub(super) fn overdraw(&self) -> bool {
        self.take(1, self.limit).is_some()
    }

    fn take(&self, want: u32, most: i64) -> Option<u32> {
        let granted = |used: i64| (most - used).clamp(0, i64::from(want));
        let take = |used| (granted(used) > 0).then(|| used + granted(used));
        // Acquire pairs with the Release in `give_back`: the pages given back are unmapped, and out of the queue.
        self.used.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).ok().map(|used| granted(used) as u32)
    }

    pub(super) fn give_back(&self, pages: u32) {
        let before = self.used.fetch_sub(i64::from(pages), Ordering::Release);
        debug_assert!(before >= i64::from(pages));
    }

    pub(super) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed).max(0) as u64
    }

    pub(super) fn pages(&self) -> u64 {
        self.pages as u64
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit as u64
    }

    fn free(&self) -> i64 {
        self.pages - self.used.load(Ordering::Relaxed)
    }

    /// True if the pager should make room ahead of need.
    pub(super) fn is_low(&self) -> bool {
        self.free() < self.low
    }

    pub(super) fn has_free(&self) -> bool {
        self.free() > 0
    }

    /// How many pages the pager makes free, so that it sleeps for a while afterwards.
    pub(super) fn shortage(&self) -> u64 {
        (self.low + self.low / 2 - self.free()).max(0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_leave_in_the_order_of_their_arrival() {
        let queue = AgeQueue::new(8);
        let mut taken = [0; 4];
        for round in 0..100_u64 {
            queue.enter([round * 3, round * 3 + 1, round * 3 + 2].into_iter());
            assert_eq!(queue.take(&mut taken), [round * 3, round * 3 + 1, round * 3 + 2]);
            assert_eq!(queue.take(&mut taken), []);
            assert_eq!(queue.len(), 0);
        }
    }

    #[test]
    fn a_page_that_is_not_wanted_keeps_its_place() {
        let queue = AgeQueue::new(8);
        queue.enter((0..6_u32).map(u64::from));
        let mut taken = [0; 8];
        assert_eq!(queue.take_while(&mut taken, |page| page != 2), [0, 1]);
        assert_eq!(queue.take_while(&mut taken, |page| page != 2), []);
        assert_eq!(queue.take(&mut taken), [2, 3, 4, 5]);
    }

    #[test]
    fn no_page_is_missed_nor_doubled_by_threads() {
        const EACH: u64 = 20_000;
        let queue = AgeQueue::new(64);
        let budget = Budget::new(64, 64);
        let mut seen = vec![0_u8; 2 * EACH as usize];
        std::thread::scope(|scope| {
            for half in 0..2 {
                let (queue, budget) = (&queue, &budget);
                scope.spawn(move || {
                    let mut next = half * EACH;
                    while next < (half + 1) * EACH {
                        let want = ((half + 1) * EACH - next).min(7) as u32;
                        let Some(granted) = budget.reserve(want) else {
                            std::thread::yield_now();
                            continue;
                        };
                        queue.enter((0..granted).map(|index| next + u64::from(index)));
                        next += u64::from(granted);
                    }
                });
            }
            let mut count = 0;
            while count < 2 * EACH {
                let mut taken = [0; 5];
                let taken = queue.take(&mut taken);
                for &page in taken {
                    seen[page as usize] += 1;
                }
                budget.give_back(taken.len() as u32);
                count += taken.len() as u64;
            }
        });
        assert!(seen.iter().all(|&times| times == 1));
        assert_eq!((budget.used(), queue.len()), (0, 0));
    }

    #[test]
    fn a_budget_grants_what_is_free_and_the_limit_when_asked() {
        let budget = Budget::new(10, 12);
        assert_eq!(budget.reserve(8), Some(8));
        assert_eq!(budget.reserve(8), Some(2));
        assert_eq!(budget.reserve(1), None);
        assert!(budget.overdraw() && budget.overdraw() && !budget.overdraw());
        budget.give_back(3);
        assert_eq!(budget.reserve(8), Some(1));
        assert_eq!(budget.used(), 10);
    }
}
