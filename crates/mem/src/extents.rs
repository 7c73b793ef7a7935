//! Which parts of an own region are in use: first fit, whole pieces, neighbours joined.

use std::collections::BTreeMap;

/// Free stretches of a region, by offset.
#[derive(Debug)]
pub struct Extents {
    free: BTreeMap<usize, usize>,
    /// Beyond this offset nothing was ever handed out: the kernel's zeros are still there.
    fresh_from: usize,
    granule: usize,
}

impl Extents {
    /// All bytes from `start` to `end`, handed out in multiples of `granule`.
    pub fn new(start: usize, end: usize, granule: usize) -> Extents {
        let start = start.next_multiple_of(granule);
        let mut free = BTreeMap::new();
        if end > start {
            free.insert(start, end - start);
        }
        Extents { free, fresh_from: start, granule }
    }

    /// Takes `len` bytes; tells the offset and whether they were never used before.
    pub fn take(&mut self, len: usize) -> Option<(usize, bool)> {
        let len = len.next_multiple_of(self.granule);
        let (offset, size) = self.free.iter().find(|(_, size)| **size >= len).map(|(o, s)| (*o, *s))?;
        self.free.remove(&offset);
        if size > len {
            self.free.insert(offset + len, size - len);
        }
        let fresh = offset >= self.fresh_from;
        self.fresh_from = self.fresh_from.max(offset + len);
        Some((offset, fresh))
    }

    /// Gives `len` bytes at `offset` back.
    pub fn give_back(&mut self, offset: usize, len: usize) {
        let mut len = len.next_multiple_of(self.granule);
        let mut offset = offset;
        if let Some(next) = self.free.remove(&(offset + len)) {
            len += next;
        }
        if let Some((before, size)) = self.free.range(..offset).next_back().map(|(o, s)| (*o, *s)) {
            assert!(before + size <= offset, "a stretch of a region is given back once");
            if before + size == offset {
                self.free.remove(&before);
                offset = before;
                len += size;
            }
        }
        self.free.insert(offset, len);
    }

    /// Bytes that are free, in all.
    pub fn free_bytes(&self) -> usize {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stretches_never_overlap_and_all_come_back(lens in proptest::collection::vec(1usize..5000, 1..60), order in any::<u64>()) {
            let mut extents = Extents::new(1024, 1 << 20, 1024);
            let whole = extents.free_bytes();
            let mut taken: Vec<(usize, usize)> = Vec::new();
            let mut order = order;
            for len in lens {
                if let Some((offset, _)) = extents.take(len) {
                    prop_assert!(offset >= 1024 && offset + len <= 1 << 20);
                    prop_assert!(taken.iter().all(|(o, l)| offset + len <= *o || o + l <= offset));
                    taken.push((offset, len));
                }
                order = order.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                if order & 1 == 0 && !taken.is_empty() {
                    let (offset, len) = taken.swap_remove(order as usize / 2 % taken.len());
                    extents.give_back(offset, len);
                }
            }
            for (offset, len) in taken {
                extents.give_back(offset, len);
            }
            prop_assert_eq!(extents.free_bytes(), whole);
            prop_assert!(extents.take(whole).is_some(), "neighbours were joined");
        }
    }

    #[test]
    fn memory_is_fresh_only_once() {
        let mut extents = Extents::new(0, 8192, 1024);
        let (first, fresh) = extents.take(1000).unwrap();
        assert!(fresh);
        extents.give_back(first, 1000);
        assert_eq!(extents.take(1000), Some((first, false)));
        assert_eq!(extents.take(8192), None);
    }
}
