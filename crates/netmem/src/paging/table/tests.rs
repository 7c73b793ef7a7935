use super::*;
use crate::paging::age::{AgeQueue, Budget};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A page as the simplest model has it: what it contains (a version), here and at its home.
#[derive(Clone, Copy, Debug, Default)]
struct Modelled {
    /// Every write adds one.
    written: u32,
    /// What its home has; 0 without a home.
    at_home: u32,
    /// What is mapped, if anything is.
    here: Option<u32>,
    pins: u32,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Read(u64),
    Write(u64),
    Pin(u64),
    Unpin(u64),
    /// The oldest pages take their turn; the store takes so many of the dirty ones.
    Evict {
        turns: usize,
        taken: usize,
    },
    EvictClean {
        turns: usize,
    },
    Flush {
        taken: usize,
    },
    /// A fetch fails.
    Fail(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let page = 0..PAGES;
    let step = prop_oneof![
        4 => page.clone().prop_map(Step::Read),
        4 => page.clone().prop_map(Step::Write),
        1 => page.clone().prop_map(Step::Pin),
        2 => page.clone().prop_map(Step::Unpin),
        2 => (1..8_usize, 0..8_usize).prop_map(|(turns, taken)| Step::Evict { turns, taken }),
        1 => (1..8_usize).prop_map(|turns| Step::EvictClean { turns }),
        1 => (0..12_usize).prop_map(|taken| Step::Flush { taken }),
        1 => page.prop_map(Step::Fail),
    ];
    prop::collection::vec(step, 1..200)
}

const PAGES: u64 = 16;
const BUDGET: u64 = 6;

/// The bookkeeping without memory: who would map, protect and copy does it to the model.
struct World {
    table: Table,
    ages: AgeQueue,
    budget: Budget,
    model: [Modelled; PAGES as usize],
    epoch: u64,
}

impl World {
    fn new() -> World {
        World {
            table: Table::new(PAGES),
            ages: AgeQueue::new(PAGES),
            budget: Budget::new(BUDGET, PAGES),
            model: [Modelled::default(); PAGES as usize],
            epoch: 0,
        }
    }

    fn bring(&mut self, page: u64, write: bool) -> bool {
        let model = &mut self.model[page as usize];
        match self.table.load(page).phase() {
            Phase::Away => {
                assert_eq!(model.here, None);
                if self.budget.reserve(1).is_none() && !self.budget.overdraw() {
                    return false;
                }
                let home = self.table.claim_arrival(page).unwrap();
                assert_eq!(home == Home::Zeros, model.at_home == 0, "zeros are what was never stored");
                model.here = Some(model.at_home);
                self.table.arrived(page, write, self.epoch);
                self.ages.enter(std::iter::once(page));
            }
            Phase::Clean if write => {
                assert!(self.table.claim_opening(page));
                self.table.opened(page, true);
            }
            Phase::Clean | Phase::Dirty => {}
            other => panic!("page {page} stayed in {other:?}"),
        }
        true
    }

    /// A page leaves, or stays because nobody took it.
    fn leave(&mut self, page: u64, dirty: bool, taken: &mut usize) {
        let model = &mut self.model[page as usize];
        assert_eq!(model.pins, 0, "page {page} is pinned");
        if dirty && *taken == 0 {
            self.table.stayed(page, None);
            self.ages.enter(std::iter::once(page));
            return;
        }
        let mut home = self.table.load(page).home();
        if dirty {
            *taken -= 1;
            model.at_home = model.here.unwrap();
            home = Home::Store;
        }
        assert_eq!(Some(model.at_home), model.here, "page {page} was dropped with a write in it");
        model.here = None;
        self.table.left(page, home, self.epoch);
        self.budget.give_back(1);
        self.epoch += 1;
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Read(page) => {
                if self.bring(page, false) {
                    let model = self.model[page as usize];
                    assert_eq!(model.here, Some(model.written), "page {page} lost a write");
                }
            }
            Step::Write(page) => {
                if self.bring(page, true) {
                    assert_eq!(self.table.load(page).phase(), Phase::Dirty);
                    let model = &mut self.model[page as usize];
                    model.written += 1;
                    model.here = Some(model.written);
                }
            }
            Step::Pin(page) => {
                let resident = self.model[page as usize].here.is_some();
                assert_eq!(self.table.pin(page).is_ok(), resident);
                self.model[page as usize].pins += u32::from(resident);
            }
            Step::Unpin(page) => {
                if self.model[page as usize].pins > 0 {
                    self.table.unpin(page);
                    self.model[page as usize].pins -= 1;
                }
            }
            Step::Evict { turns, mut taken } => {
                let mercy = if turns % 2 == 0 { Mercy::None } else { Mercy::SecondChance };
                let mut turned = vec![0; turns];
                for &page in self.ages.take(&mut turned) {
                    let resident = self.table.load(page).is_resident();
                    match self.table.claim_leaving(page, mercy) {
                        Leave::Clean => self.leave(page, false, &mut taken),
                        Leave::Dirty => self.leave(page, true, &mut taken),
                        Leave::Later => {
                            assert!(mercy == Mercy::SecondChance || !resident);
                            self.ages.enter(std::iter::once(page));
                        }
                        Leave::Pinned => {
                            assert!(self.model[page as usize].pins > 0);
                            self.ages.enter(std::iter::once(page));
                        }
                    }
                }
            }
            Step::EvictClean { turns } => {
                let mut turned = vec![0; turns];
                for &page in self.ages.take(&mut turned) {
                    if self.table.claim_leaving_clean(page, Mercy::SecondChance) {
                        self.leave(page, false, &mut 0);
                    } else {
                        self.ages.enter(std::iter::once(page));
                    }
                }
            }
            Step::Flush { mut taken } => {
                for page in 0..PAGES {
                    let generation = self.table.load(page).generation();
                    if let Some(pinned) = self.table.claim_cleaning(page) {
                        let model = &mut self.model[page as usize];
                        assert_eq!(pinned, model.pins > 0);
                        let home = (taken > 0 && !pinned).then_some(Home::Store);
                        if home.is_some() {
                            taken -= 1;
                            model.at_home = model.here.unwrap();
                        }
                        self.table.stayed(page, home);
                        assert_ne!(self.table.load(page).generation(), generation, "its home may have changed");
                    }
                }
            }
            Step::Fail(page) => {
                if self.table.load(page).phase() == Phase::Away {
                    let before = self.table.load(page);
                    assert!(self.table.claim_arrival(page).is_some() && self.table.claim_arrival(page).is_none());
                    self.table.arrival_failed(page, Some(Failure::Lost));
                    let after = self.table.load(page);
                    assert_eq!((after.phase(), after.failure()), (Phase::Away, Some(Failure::Lost)));
                    assert_eq!((after.home(), after.generation()), (before.home(), before.generation()));
                }
            }
        }
    }

    /// What must hold after every step.
    fn check(&self) {
        let mut resident = 0;
        for page in 0..PAGES {
            let (word, model) = (self.table.load(page), self.model[page as usize]);
            assert_eq!(word.is_resident(), model.here.is_some(), "page {page}: {word:?}");
            assert_eq!(word.pins(), u64::from(model.pins));
            let only_here = model.here.is_some_and(|here| here != model.at_home);
            assert!(
                !only_here || word.phase() == Phase::Dirty,
                "page {page} has a write that nobody knows of: {word:?}"
            );
            if word.phase() == Phase::Away {
                assert_eq!(model.at_home, model.written, "page {page} lost a write");
            }
            resident += u64::from(word.is_resident());
        }
        assert_eq!((self.budget.used(), self.ages.len()), (resident, resident));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_history_agrees_with_the_model(steps in steps()) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            world.check();
        }
        // Every page that is here stands in the queue once.
        let mut turned = [0; 2 * PAGES as usize];
        let turned = world.ages.take(&mut turned);
        let distinct: BTreeSet<_> = turned.iter().collect();
        prop_assert_eq!(distinct.len(), turned.len());
        prop_assert!(turned.iter().all(|&page| world.model[page as usize].here.is_some()));
    }
}

#[test]
fn a_page_that_comes_back_at_once_gets_a_second_chance_and_others_do_not() {
    let table = Table::new(1);
    let stay = |left, back| {
        assert!(table.claim_arrival(0).is_some());
        table.arrived(0, false, left);
        while table.claim_leaving(0, Mercy::SecondChance) == Leave::Later {}
        table.left(0, Home::Store, left);
        assert!(table.claim_arrival(0).is_some());
        table.arrived(0, false, back);
        let later = table.claim_leaving(0, Mercy::SecondChance);
        while later == Leave::Later && table.claim_leaving(0, Mercy::SecondChance) == Leave::Later {}
        table.left(0, Home::Store, 100);
        later
    };
    assert_eq!(stay(7, 7), Leave::Later);
    assert_eq!(stay(7, 8), Leave::Later);
    assert_eq!(stay(7, 9), Leave::Clean);
    assert_eq!(stay(255, 256), Leave::Later);
}

#[test]
fn one_thread_at_a_time_has_a_page_and_the_others_wait() {
    let table = Table::new(4);
    let inside = [const { AtomicU64::new(0) }; 4];
    let brought = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (table, inside, brought) = (&table, &inside, &brought);
            scope.spawn(move || {
                for round in 0..20_000_u64 {
                    let page = (round * 7 + thread) % 4;
                    let word = table.load(page);
                    match word.phase() {
                        Phase::Away if table.claim_arrival(page).is_some() => {
                            assert_eq!(inside[page as usize].fetch_add(1, Ordering::Relaxed), 0);
                            brought.fetch_add(1, Ordering::Relaxed);
                            inside[page as usize].fetch_sub(1, Ordering::Relaxed);
                            table.arrived(page, round % 2 == 0, 0);
                        }
                        Phase::Clean | Phase::Dirty
                            if table.claim_leaving(page, Mercy::SecondChance) != Leave::Later =>
                        {
                            assert_eq!(inside[page as usize].fetch_add(1, Ordering::Relaxed), 0);
                            inside[page as usize].fetch_sub(1, Ordering::Relaxed);
                            table.left(page, Home::Store, 200);
                        }
                        Phase::Arriving | Phase::Leaving => table.wait(page, word),
                        _ => {}
                    }
                }
            });
        }
    });
    assert!(brought.into_inner() > 1000);
}
