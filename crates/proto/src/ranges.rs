//! Sets of numbers as few ranges: packets received, bytes landed.

use std::ops::Range;

/// A set of `u64`, kept as ranges that neither touch nor overlap, in order. It has a limit: what
/// would need more ranges than that is not taken in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    ranges: Vec<Range<u64>>,
}

impl Ranges {
    /// None.
    pub const fn new() -> Ranges {
        Ranges { ranges: Vec::new() }
    }

    /// Adds a range; false, and nothing is changed, if that would make more than `limit` ranges.
    pub fn insert(&mut self, added: Range<u64>, limit: usize) -> bool {
        if added.is_empty() {
            return true;
        }
        // Mostly right behind the last.
        match self.ranges.last_mut() {
            Some(last) if added.start >= last.start && added.start <= last.end => {
                last.end = last.end.max(added.end);
                return true;
            }
            _ => {}
        }
        let first = self.ranges.partition_point(|range| range.end < added.start);
        let after = self.ranges.partition_point(|range| range.start <= added.end);
        if first == after {
            if self.ranges.len() >= limit {
                return false;
            }
            self.ranges.insert(first, added);
        } else {
            let merged = added.start.min(self.ranges[first].start)..added.end.max(self.ranges[after - 1].end);
            self.ranges.splice(first..after, [merged]);
        }
        true
    }

    /// True if all of `range` is in it.
    pub fn contains(&self, range: &Range<u64>) -> bool {
        // Mostly there is one, which has it or not.
        if let [only] = &self.ranges[..] {
            return range.is_empty() || only.start <= range.start && range.end <= only.end;
        }
        range.is_empty() || self.holder(range.start).is_some_and(|holder| holder.end >= range.end)
    }

    /// True if nothing of `range` is in it.
    pub fn is_free(&self, range: &Range<u64>) -> bool {
        // Mostly behind the last.
        if self.ranges.last().is_none_or(|last| range.start >= last.end) {
            return true;
        }
        let after = self.ranges.partition_point(|held| held.end <= range.start);
        range.is_empty() || self.ranges.get(after).is_none_or(|held| held.start >= range.end)
    }

    /// The parts of `range` that are not in it, in order.
    pub fn gaps(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let first = self.ranges.partition_point(|held| held.end <= range.start);
        let held = self.ranges[first..].iter().take_while(move |held| held.start < range.end);
        let ends = held.clone().map(|held| held.start).chain([range.end]);
        let starts = [range.start].into_iter().chain(held.map(|held| held.end));
        starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty())
    }

    /// The range that `number` is in.
    pub fn holder(&self, number: u64) -> Option<&Range<u64>> {
        let after = self.ranges.partition_point(|range| range.end <= number);
        self.ranges.get(after).filter(|range| range.start <= number)
    }

    /// Adds the number right behind the last range to that; false, and nothing is changed, if `number`
    /// is another one.
    pub fn extend_last(&mut self, number: u64) -> bool {
        match self.ranges.last_mut() {
            Some(last) if last.end == number => {
                last.end += 1;
                true
            }
            _ => false,
        }
    }

    /// Forgets everything below `number`.
    pub fn forget_below(&mut self, number: u64) {
        let gone = self.ranges.partition_point(|range| range.end <= number);
        self.ranges.drain(..gone);
        if let Some(first) = self.ranges.first_mut() {
            first.start = first.start.max(number);
        }
    }

    /// Forgets the lowest range.
    pub fn forget_lowest(&mut self) {
        if !self.ranges.is_empty() {
            self.ranges.remove(0);
        }
    }

    /// The highest range.
    pub fn last(&self) -> Option<&Range<u64>> {
        self.ranges.last()
    }

    /// The ranges, lowest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Range<u64>> + ExactSizeIterator {
        self.ranges.iter()
    }

    /// How many ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// True if there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn ranges_say_what_a_plain_set_says(steps in prop::collection::vec((0u64..64, 0u64..9), 0..60), below in 0u64..70) {
            let (mut ranges, mut set) = (Ranges::new(), BTreeSet::new());
            for (start, length) in steps {
                prop_assert!(ranges.insert(start..start + length, usize::MAX));
                set.extend(start..start + length);
                for pair in ranges.ranges.windows(2) {
                    prop_assert!(pair[0].end < pair[1].start, "{ranges:?}");
                }
            }
            let told: BTreeSet<u64> = ranges.iter().cloned().flatten().collect();
            prop_assert_eq!(&told, &set);
            for start in 0..70 {
                for end in start..start + 5 {
                    prop_assert_eq!(ranges.contains(&(start..end)), (start..end).all(|n| set.contains(&n)));
                    prop_assert_eq!(ranges.is_free(&(start..end)), (start..end).all(|n| !set.contains(&n)));
                }
            }
            ranges.forget_below(below);
            let left: BTreeSet<u64> = ranges.iter().cloned().flatten().collect();
            prop_assert_eq!(left, set.range(below..).copied().collect::<BTreeSet<_>>());
        }

        #[test]
        fn a_limit_refuses_a_further_range_and_nothing_else(steps in prop::collection::vec((0u64..64, 1u64..5), 0..60)) {
            let mut ranges = Ranges::new();
            for (start, length) in steps {
                let before = ranges.clone();
                if !ranges.insert(start..start + length, 4) {
                    prop_assert_eq!(&ranges, &before);
                    prop_assert!(ranges.insert(start..start + length, 5) && ranges.len() == 5);
                    ranges = before;
                }
                prop_assert!(ranges.len() <= 4);
            }
        }
    }
}
