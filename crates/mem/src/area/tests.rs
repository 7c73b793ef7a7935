use super::*;
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve { least: usize, most: usize },
    Free(usize),
    Move { lines: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (1usize..3000, 0usize..3000).prop_map(|(least, more)| Step::Reserve { least, most: least + more }),
        5 => any::<usize>().prop_map(Step::Free),
        1 => (1usize..200).prop_map(|lines| Step::Move { lines }),
    ];
    proptest::collection::vec(step, 1..200)
}

/// What the area must be like: extents that are out, stretches that it has been given.
#[derive(Default)]
struct Oracle {
    live: Vec<Extent>,
    stretches: Vec<(usize, usize)>,
    next_offset: usize,
}

impl Oracle {
    /// A stretch of the region that nobody has: one that came back, or a new one.
    fn stretch(&mut self, len: usize, returned: &mut Vec<(usize, usize)>) -> (usize, usize) {
        let again = returned.iter().position(|(_, size)| *size == len).map(|index| returned.swap_remove(index));
        let stretch = again.unwrap_or((self.next_offset, len));
        self.next_offset = self.next_offset.max(stretch.0 + len + 4096);
        self.stretches.push(stretch);
        stretch
    }

    fn check(&self, extent: Extent, least: usize, most: usize) -> Result<(), TestCaseError> {
        let (offset, len) = *self.stretches.last().unwrap();
        prop_assert!((least..=most).contains(&extent.len), "{extent:?} is not {least} to {most} bytes");
        prop_assert!(extent.offset.is_multiple_of(64), "{extent:?} begins inside a cache line");
        prop_assert!(offset <= extent.offset && extent.offset + extent.len <= offset + len, "{extent:?} is outside");
        // Two extents must not share a cache line either: the reader of one would wait for the other.
        let lines = |extent: &Extent| (extent.offset / 64, (extent.offset + extent.len).div_ceil(64));
        let (first, end) = lines(&extent);
        for other in &self.live {
            let (other_first, other_end) = lines(other);
            prop_assert!(end <= other_first || other_end <= first, "{extent:?} overlaps {other:?}");
            prop_assert_ne!(extent.id, other.id);
        }
        Ok(())
    }

    fn took_back(&mut self, offset: usize, len: usize) -> Result<(), TestCaseError> {
        let position = self.stretches.iter().position(|stretch| *stretch == (offset, len));
        prop_assert!(position.is_some(), "{len} bytes at {offset} came back, but were not out");
        self.stretches.remove(position.unwrap());
        let used = self.live.iter().find(|extent| (offset..offset + len).contains(&extent.offset));
        prop_assert!(used.is_none(), "{len} bytes at {offset} came back with {used:?} in them");
        Ok(())
    }
}

proptest! {
    #[test]
    fn extents_never_overlap_and_every_stretch_comes_back(steps in steps()) {
        let (mut area, mut oracle) = (PayloadArea::new(), Oracle { next_offset: 1024, ..Oracle::default() });
        let mut returned = Vec::new();
        for step in steps {
            match step {
                Step::Reserve { least, most } => {
                    if let Some(extent) = area.reserve(least, most) {
                        oracle.check(extent, least, most)?;
                        oracle.live.push(extent);
                    } else {
                        // Never refused where it is empty and large enough.
                        prop_assert!(!area.is_idle() || area.size() < least);
                    }
                }
                Step::Free(which) if !oracle.live.is_empty() => {
                    let extent = oracle.live.swap_remove(which % oracle.live.len());
                    let before = returned.len();
                    area.free(extent.id, |offset, len| returned.push((offset, len)));
                    for (offset, len) in returned[before..].iter().copied() {
                        oracle.took_back(offset, len)?;
                    }
                }
                Step::Free(_) => {}
                Step::Move { lines } => {
                    let (offset, len) = oracle.stretch(lines * 64, &mut returned);
                    area.move_to(offset, len);
                    prop_assert_eq!(area.size(), len);
                }
            }
        }
        // Everything that was out is given back: only the last stretch stays.
        let mut freed_any = false;
        while let Some(extent) = oracle.live.pop() {
            freed_any = true;
            let mut back = Vec::new();
            area.free(extent.id, |offset, len| back.push((offset, len)));
            for (offset, len) in back {
                oracle.took_back(offset, len)?;
            }
        }
        prop_assert!(area.is_idle());
        prop_assert!(!freed_any || oracle.stretches.len() == 1, "left behind: {:?}", oracle.stretches);
        let mut back = Vec::new();
        area.abandon(|offset, len| back.push((offset, len)));
        for (offset, len) in back {
            oracle.took_back(offset, len)?;
        }
        prop_assert!(oracle.stretches.is_empty());
        prop_assert_eq!(area.size(), 0);
    }

    /// A queue of messages in order, as most traffic is: the area is used to its last line.
    #[test]
    fn first_in_first_out_uses_all_of_it(lens in proptest::collection::vec(1usize..5000, 1..100)) {
        let mut area = PayloadArea::new();
        area.move_to(4096, 8192);
        let mut live: VecDeque<Extent> = VecDeque::new();
        for len in lens {
            let extent = loop {
                match area.reserve(len, len) {
                    Some(extent) => break extent,
                    None => {
                        let oldest = live.pop_front();
                        prop_assert!(oldest.is_some(), "{} bytes do not fit an empty area of 8192", len);
                        area.free(oldest.unwrap().id, |_, _| unreachable!("there is one stretch"));
                    }
                }
            };
            let apart = |other: &Extent| {
                extent.offset + extent.len <= other.offset || other.offset + other.len <= extent.offset
            };
            prop_assert!(live.iter().all(apart));
            live.push_back(extent);
        }
    }
}

#[test]
fn it_walks_on_rather_than_reuse_what_was_just_read() {
    let mut area = PayloadArea::new();
    area.move_to(0, 4096);
    let mut seen = Vec::new();
    for _ in 0..8 {
        let extent = area.reserve(1000, 1000).unwrap();
        seen.push(extent.offset);
        area.free(extent.id, |_, _| {});
    }
    assert_eq!(seen, [0, 1024, 2048, 3072, 0, 1024, 2048, 3072]);
}

#[test]
fn a_piece_may_be_smaller_than_wished_but_not_than_needed() {
    let mut area = PayloadArea::new();
    assert_eq!(area.reserve(1, 1), None, "no ground yet");
    area.move_to(0, 4096);
    let first = area.reserve(1, 3000).unwrap();
    assert_eq!(first.len, 3000);
    let second = area.reserve(1000, 3000).unwrap();
    assert_eq!((second.offset, second.len), (3008, 4096 - 3008), "the rest, and no more");
    assert_eq!(area.reserve(1, 1), None, "full");
    area.free(first.id, |_, _| {});
    assert_eq!(area.reserve(3009, 4000), None);
    assert_eq!(area.reserve(3008, 4000).unwrap().len, 3008, "up to the extent that is still out");
}

#[test]
fn an_extent_held_for_long_stops_the_walk_when_it_comes_round() {
    let mut area = PayloadArea::new();
    area.move_to(0, 4096);
    let held = area.reserve(64, 64).unwrap();
    for _ in 0..3 {
        let extent = area.reserve(1024, 1024).unwrap();
        area.free(extent.id, |_, _| {});
    }
    // In turn means in turn: what was freed behind a held extent waits for it.
    assert_eq!(area.reserve(1024, 1024), None);
    area.free(held.id, |_, _| {});
    assert!(area.reserve(1024, 1024).is_some());
}

#[test]
fn a_stretch_that_was_empty_when_the_area_moved_on_comes_back_too() {
    let mut area = PayloadArea::new();
    area.move_to(0, 4096);
    assert_eq!(area.reserve(8192, 8192), None, "larger than all of it");
    area.move_to(65536, 16384);
    let extent = area.reserve(8192, 8192).unwrap();
    let mut returned = Vec::new();
    area.free(extent.id, |offset, len| returned.push((offset, len)));
    assert_eq!(returned, [(0, 4096)]);
}

#[test]
#[should_panic(expected = "an extent is freed once")]
fn freeing_twice_is_a_bug() {
    let mut area = PayloadArea::new();
    area.move_to(0, 4096);
    let first = area.reserve(64, 64).unwrap();
    let _second = area.reserve(64, 64).unwrap();
    area.free(first.id, |_, _| {});
    area.free(first.id, |_, _| {});
}
