//! How large packets may be: nobody tells, so it is tried out [W-66].
//!
//! ```text
//!              a size arrives: it is the present one, the next is aimed at
//!                ┌────┐
//!                ▼    │                   nothing larger is left that has not failed
//!  session ──▶ Searching ──────────────────────────────────────────────────────────────▶ Found
//!                ▲    │ a size is lost three times or refused: it has failed,            │  │
//!                │    └─▶ the next smaller above the present one is aimed at             │  │
//!                │                                                                       │  │
//!                ├──────────── ten minutes, and data to send: nothing has failed ────────┘  │
//!                └── fall: packets of the present size do not arrive any more, or are ──────┘
//!                    refused; present is the least again (from Searching, too)
//! ```
//!
//! A size is tried with a packet that carries nothing, so that nothing is lost with it.

use std::time::Duration;

/// How large the packets of a session are, with their headers: what UDP carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketSize {
    /// As large as the path takes, which is tried out, and not larger than this.
    Search {
        /// Bytes.
        most: usize,
    },
    /// So many bytes, whatever the path takes.
    Fixed(usize),
}

impl PacketSize {
    /// Every path takes packets of so many bytes. It is what a hello has.
    pub const LEAST: usize = 1200;
    /// No packet is larger. The largest that every family of addresses carries in one piece over loopback and
    /// over InfiniBand in connected mode (65,520 bytes, of which IPv6 and UDP take 48).
    pub const MOST: usize = 65_472;
}

impl Default for PacketSize {
    fn default() -> PacketSize {
        PacketSize::Search { most: PacketSize::MOST }
    }
}

/// Sizes that paths are known to have, without IP and UDP. Each line is a kind of path, the smaller ones
/// are tried where the first does not pass:
///
/// * Ethernet: 1,500 bytes, of which IPv4 takes 28 with UDP and IPv6 takes 48;
/// * InfiniBand without connections, and whatever has 4 KiB: 4,092 bytes and IPv6;
/// * jumbo frames: 9,000 bytes with IPv4 and IPv6, and the 8,896 of a large cloud with IPv6;
/// * 16 KiB and 32 KiB, of tunnels and odd loopbacks, with IPv6: a kernel cuts 64 KiB into four and two;
/// * loopback.
const LADDER: [&[usize]; 6] = [&[1472, 1452], &[4044], &[8972, 8952, 8848], &[16_336], &[32_720], &[PacketSize::MOST]];

/// What is tried on the way from what every path takes to what this one takes.
#[derive(Debug)]
pub(crate) struct SizeSearch {
    /// Bytes of a packet that data goes in.
    present: usize,
    most: usize,
    /// The smallest size that has failed.
    failed: usize,
    /// What is tried, and how often that was lost.
    aim: Option<(usize, u32)>,
    /// The number of the packet that tries it, while that is on its way.
    on_its_way: Option<u64>,
    /// When larger sizes are tried again.
    raise_at: Duration,
    /// From what it fell last, and when.
    fell: Option<(usize, Duration)>,
}

impl SizeSearch {
    pub(crate) fn new(size: PacketSize) -> SizeSearch {
        let (present, most) = match size {
            PacketSize::Fixed(bytes) => (bytes.clamp(FIXED_LEAST, PacketSize::MOST), 0),
            PacketSize::Search { most } => (most.clamp(FIXED_LEAST, PacketSize::LEAST), most.min(PacketSize::MOST)),
        };
        let raise_at = Duration::MAX;
        let mut search =
            SizeSearch { present, most, failed: usize::MAX, aim: None, on_its_way: None, raise_at, fell: None };
        search.aim(Duration::ZERO);
        search
    }

    /// Bytes of a packet that data goes in.
    pub(crate) fn present(&self) -> usize {
        self.present
    }

    /// True if packets are of a size that was tried out, and may cease to pass.
    pub(crate) fn may_fall(&self) -> bool {
        self.present > PacketSize::LEAST && self.most > 0
    }

    /// The size that is to be tried now. At most one is on its way.
    pub(crate) fn due(&self) -> Option<usize> {
        self.aim.filter(|_| self.on_its_way.is_none()).map(|(size, _)| size)
    }

    /// True if the search is over for now.
    pub(crate) fn is_over(&self) -> bool {
        self.aim.is_none()
    }

    /// The packet with this number tries it.
    pub(crate) fn note_sent(&mut self, number: u64) {
        self.on_its_way = Some(number);
    }

    /// Data is sent: it may be time to look whether the path takes more by now.
    pub(crate) fn note_traffic(&mut self, now: Duration) {
        if now >= self.raise_at {
            self.failed = usize::MAX;
            self.aim(now);
        }
    }

    /// A packet of this size has arrived that tried it. True if it is the present size now.
    pub(crate) fn handle_arrival(&mut self, now: Duration, size: usize) -> bool {
        if !self.is_tried(size) {
            return false;
        }
        self.present = size;
        self.aim(now);
        true
    }

    /// It is lost.
    pub(crate) fn handle_loss(&mut self, now: Duration, size: usize) {
        if !self.is_tried(size) {
            return;
        }
        self.on_its_way = None;
        let Some((_, losses)) = &mut self.aim else { return };
        *losses += 1;
        if *losses >= LOSSES_MAX {
            self.failed = size;
            self.aim(now);
        }
    }

    /// It was refused, and will be as long as the path is the same. Tells the number of the packet, if one of
    /// this size was tried.
    pub(crate) fn handle_refusal(&mut self, now: Duration, size: usize) -> Option<u64> {
        if !self.is_tried(size) {
            return None;
        }
        let number = self.on_its_way;
        self.failed = size;
        self.aim(now);
        number
    }

    /// Packets of the present size do not pass any more: begins again. If that happens twice in a short time,
    /// the size does not pass in a way that trying it does not show; it counts as failed then.
    pub(crate) fn fall(&mut self, now: Duration) {
        let again = self.fell.is_some_and(|(size, at)| size >= self.present && now < at + RAISE_AFTER);
        self.fell = Some((self.present, now));
        self.failed = if again { self.present } else { usize::MAX };
        self.present = PacketSize::LEAST;
        self.aim(now);
    }

    fn is_tried(&self, size: usize) -> bool {
        self.on_its_way.is_some() && self.aim.is_some_and(|(aim, _)| aim == size)
    }

    /// Aims at the next size: of the smallest kind of path that has a larger one, the largest that has not
    /// failed.
    fn aim(&mut self, now: Duration) {
        let is_left = |size: &usize| *size > self.present && *size <= self.most && *size < self.failed;
        let next = LADDER.iter().find_map(|kind| kind.iter().copied().find(is_left));
        (self.aim, self.on_its_way) = (next.map(|size| (size, 0)), None);
        let is_largest = self.failed == usize::MAX;
        self.raise_at = if next.is_some() || is_largest { Duration::MAX } else { now + RAISE_AFTER };
    }
}

/// A packet may be lost for any reason, but not three times.
const LOSSES_MAX: u32 = 3;
/// Paths change seldom (RFC 8899, section 5.1.1: PMTU_RAISE_TIMER).
const RAISE_AFTER: Duration = Duration::from_secs(600);
/// A first packet has room for header, preface and control bytes.
const FIXED_LEAST: usize = 320;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Tries sizes until the search is over, on a path that takes so much; what was tried.
    fn search(search: &mut SizeSearch, now: Duration, path: usize, refuses: bool) -> Vec<usize> {
        let mut tried = Vec::new();
        while let Some(size) = search.due() {
            search.note_sent(tried.len() as u64);
            assert_eq!(search.due(), None, "one at a time");
            tried.push(size);
            match size <= path {
                true => assert!(search.handle_arrival(now, size)),
                false if refuses => assert_eq!(search.handle_refusal(now, size), Some(tried.len() as u64 - 1)),
                false => search.handle_loss(now, size),
            }
        }
        assert!(search.is_over());
        tried
    }

    fn fresh() -> SizeSearch {
        SizeSearch::new(PacketSize::default())
    }

    #[test]
    fn it_finds_the_largest_of_the_ladder_that_passes_however_the_path_says_no() {
        for path in (1200..66_000).step_by(4) {
            let ladder = LADDER.iter().flat_map(|kind| kind.iter());
            let expected = ladder.copied().filter(|size| *size <= path).max().unwrap_or(PacketSize::LEAST);
            for refuses in [false, true] {
                let mut it = fresh();
                let tried = search(&mut it, SECOND, path, refuses);
                assert_eq!(it.present(), expected, "a path of {path} bytes, tried {tried:?}");
                assert!(tried.len() <= 11 && tried[0] == 1472, "{tried:?}");
            }
        }
    }

    #[test]
    fn an_ethernet_takes_one_packet_to_find_and_one_or_three_to_be_sure() {
        assert_eq!(search(&mut fresh(), SECOND, 1472, true), [1472, 4044]);
        assert_eq!(search(&mut fresh(), SECOND, 1452, true), [1472, 1452]);
        assert_eq!(search(&mut fresh(), SECOND, 1472, false), [1472, 4044, 4044, 4044]);
        assert_eq!(search(&mut fresh(), SECOND, 9000, true), [1472, 4044, 8972, 16_336]);
        assert_eq!(search(&mut fresh(), SECOND, 65_507, true), [1472, 4044, 8972, 16_336, 32_720, 65_472]);
    }

    #[test]
    fn larger_sizes_are_tried_again_after_minutes_if_there_is_traffic() {
        let mut it = fresh();
        search(&mut it, SECOND, 1472, true);
        it.note_traffic(RAISE_AFTER);
        assert_eq!(it.due(), None);
        it.note_traffic(SECOND + RAISE_AFTER);
        assert_eq!(search(&mut it, 2 * RAISE_AFTER, 9000, true), [4044, 8972, 16_336]);
        // What nothing is above of is not looked for again.
        let mut it = fresh();
        search(&mut it, SECOND, 70_000, true);
        it.note_traffic(100 * RAISE_AFTER);
        assert_eq!(it.due(), None);
    }

    #[test]
    fn a_fall_begins_again_and_the_second_bars_the_size() {
        let mut it = fresh();
        search(&mut it, SECOND, 9000, true);
        it.fall(2 * SECOND);
        assert_eq!((it.present(), it.may_fall()), (1200, false));
        search(&mut it, 2 * SECOND, 9000, true);
        assert_eq!(it.present(), 8972);
        it.fall(3 * SECOND);
        search(&mut it, 3 * SECOND, 9000, true);
        assert_eq!(it.present(), 8952, "the next smaller");
        it.note_traffic(3 * SECOND + RAISE_AFTER);
        search(&mut it, 4 * SECOND, 9000, true);
        assert_eq!(it.present(), 8972);
    }

    #[test]
    fn an_answer_to_what_is_not_asked_any_more_is_none() {
        let mut it = fresh();
        it.note_sent(1);
        it.fall(SECOND);
        assert!(!it.handle_arrival(SECOND, 1472), "it left before the fall");
        it.handle_loss(SECOND, 1472);
        assert_eq!(it.handle_refusal(SECOND, 1472), None);
        assert_eq!((it.due(), it.present()), (Some(1472), 1200));
    }

    #[test]
    fn a_fixed_size_is_never_looked_for_and_a_limit_is_kept() {
        let it = SizeSearch::new(PacketSize::Fixed(1472));
        assert_eq!((it.present(), it.due(), it.may_fall()), (1472, None, false));
        let mut it = SizeSearch::new(PacketSize::Search { most: 9000 });
        assert_eq!(search(&mut it, SECOND, 70_000, true), [1472, 4044, 8972]);
        assert_eq!(SizeSearch::new(PacketSize::Search { most: 1000 }).present(), 1000);
    }
}
