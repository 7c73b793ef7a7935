//! Which faults follow one another, and how many pages to bring at once.
//!
//! A fault on the page where an earlier one expected the next is a stream; each time that happens its window doubles. A
//! fault that nobody expected begins a stream of its own with a window of one page, so random faults bring one page each.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What to do about a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Advice {
    /// Pages to bring from this one on.
    pub(super) pages: u32,
    /// Pages that were brought ahead for this stream and, as it came this far, were of use.
    pub(super) used: u32,
    /// The stream's last fault was a write as well, so that its next pages will be written too.
    pub(super) writes: bool,
    slot: usize,
}

impl Advice {
    /// True if the fault continued a stream.
    pub(super) fn is_stream(self) -> bool {
        self.pages > 1
    }
}

/// The streams last seen. Threads update it without care for one another: a lost update costs a smaller window.
#[derive(Debug)]
pub(super) struct Streams {
    slots: [AtomicU64; STREAMS],
    next_victim: AtomicU32,
    window_max: u32,
}

#[derive(Clone, Copy)]
struct Stream {
    next: u64,
    window: u32,
    ahead: u32,
    writes: bool,
}

impl Stream {
    fn unpack(bits: u64) -> Stream {
        Stream {
            next: bits & NEXT,
            window: 1 << (bits >> 40 & 0xf),
            ahead: (bits >> 44 & 0xffff) as u32,
            writes: bits >> 60 & 1 == 1,
        }
    }

    fn pack(self) -> u64 {
        let ahead = u64::from(self.ahead.min(0xffff));
        self.next & NEXT | u64::from(self.window.ilog2()) << 40 | ahead << 44 | u64::from(self.writes) << 60
    }

    fn expects(self, page: u64) -> bool {
        // Pages that were here already are passed without a fault, so an established stream may turn up a bit further on.
        let slack = if self.window == 1 { 0 } else { u64::from(self.window.min(SLACK_MAX)) };
        (self.next..=self.next + slack).contains(&page)
    }
}

impl Streams {
    /// With windows of up to `window_max` pages, a power of two; of one page, if there is to be no prefetch.
    pub(super) fn new(window_max: u32) -> Streams {
        assert!(window_max.is_power_of_two() && window_max <= 1 << 15);
        // No region has a page of this number, so nothing is expected yet.
        let nowhere = Stream { next: NEXT, window: 1, ahead: 0, writes: false }.pack();
        let slots = std::array::from_fn(|_| AtomicU64::new(nowhere));
        Streams { slots, next_victim: AtomicU32::new(0), window_max }
    }

    /// A fault on this page. The answer goes back to [`brought`](Streams::brought).
    pub(super) fn fault(&self, page: u64, write: bool) -> Advice {
        for (slot, bits) in self.slots.iter().enumerate() {
            let stream = Stream::unpack(bits.load(Ordering::Relaxed));
            if stream.expects(page) {
                let pages = (stream.window * 2).min(self.window_max);
                return Advice { pages, used: stream.ahead, writes: write && stream.writes, slot };
            }
        }
        Advice { pages: 1, used: 0, writes: false, slot: self.victim() }
    }

    /// A place for a new stream: the next whose window is one page. Those that are passed over shrink, so that a stream that
    /// is not continued gives its place up, and one that is has several chances.
    fn victim(&self) -> usize {
        loop {
            let slot = self.next_victim.fetch_add(1, Ordering::Relaxed) as usize % STREAMS;
            let bits = self.slots[slot].load(Ordering::Relaxed);
            let stream = Stream::unpack(bits);
            if stream.window == 1 {
                return slot;
            }
            let less = Stream { window: stream.window / 2, ..stream };
            let _ = self.slots[slot].compare_exchange(bits, less.pack(), Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// What became of a fault: the stream's next fault is expected at `next`, and `ahead` pages before that were brought that
    /// nobody asked for yet.
    pub(super) fn brought(&self, advice: Advice, next: u64, ahead: u32, write: bool) {
        let stream = Stream { next, window: advice.pages, ahead, writes: write };
        self.slots[advice.slot].store(stream.pack(), Ordering::Relaxed);
    }
}

const STREAMS: usize = 16;
/// Pages by which an established stream may be further on than expected.
const SLACK_MAX: u32 = 16;
const NEXT: u64 = (1 << 40) - 1;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Faults as a reader would cause them who has no other pages: the numbers of pages brought.
    fn read(streams: &Streams, from: u64, until: u64) -> Vec<u32> {
        let (mut page, mut brought) = (from, Vec::new());
        while page < until {
            let advice = streams.fault(page, false);
            page += u64::from(advice.pages);
            streams.brought(advice, page, advice.pages - 1, false);
            brought.push(advice.pages);
        }
        brought
    }

    #[test]
    fn a_stream_doubles_its_window_up_to_the_limit() {
        let streams = Streams::new(16);
        assert_eq!(read(&streams, 100, 200)[..8], [1, 2, 4, 8, 16, 16, 16, 16]);
        assert_eq!(read(&Streams::new(1), 0, 4), [1, 1, 1, 1]);
    }

    #[test]
    fn a_stream_of_writes_is_known_as_one() {
        let streams = Streams::new(16);
        let advice = streams.fault(7, true);
        assert!(!advice.writes);
        streams.brought(advice, 8, 0, true);
        assert!(streams.fault(8, true).writes && !streams.fault(8, false).writes);
    }

    #[test]
    fn what_was_brought_ahead_and_reached_is_counted() {
        let streams = Streams::new(8);
        streams.brought(streams.fault(0, false), 1, 0, false);
        streams.brought(streams.fault(1, false), 3, 1, false);
        assert_eq!(streams.fault(3, false).used, 1);
    }

    #[test]
    fn random_faults_in_a_small_region_find_no_streams() {
        let streams = Streams::new(256);
        let (mut state, mut brought) = (1_u64, 0);
        for _ in 0..100_000 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            let page = (state >> 33) % 4096;
            let advice = streams.fault(page, false);
            brought += advice.pages;
            streams.brought(advice, page + u64::from(advice.pages), advice.pages - 1, false);
        }
        assert!(brought < 105_000, "{brought} pages for 100000 faults");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn interleaved_streams_are_told_apart(order in prop::collection::vec(0..8_u64, 400..600)) {
            let streams = Streams::new(256);
            let mut at: Vec<u64> = (0..8).map(|number| number << 24).collect();
            let mut faults = [0_u32; 8];
            for number in order {
                let page = &mut at[number as usize];
                let advice = streams.fault(*page, false);
                // Before all have begun, a stream may have shrunk to make place for another.
                if faults.iter().all(|&faults| faults > 16) {
                    prop_assert_eq!(advice.pages, 256);
                }
                *page += u64::from(advice.pages);
                streams.brought(advice, *page, advice.pages - 1, false);
                faults[number as usize] += 1;
            }
        }

        #[test]
        fn faults_far_from_each_other_bring_one_page_each(pages in prop::collection::hash_set(0..1_u64 << 20, 1..500)) {
            let streams = Streams::new(256);
            for page in pages {
                let advice = streams.fault(page * 3, false);
                prop_assert_eq!(advice.pages, 1);
                streams.brought(advice, page * 3 + 1, 0, false);
            }
        }
    }
}
