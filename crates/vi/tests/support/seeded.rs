//! Choices and bytes that come from one number, so that a failure can be played again.

/// A small generator (splitmix64). Its seed is printed if the test fails while it exists; the
/// environment variable `HIGHWIRE_SEED` sets it.
pub struct Seeded {
    seed: u64,
    state: u64,
}

impl Seeded {
    /// From `HIGHWIRE_SEED`, or a new seed.
    pub fn fresh() -> Seeded {
        let given = std::env::var("HIGHWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
        Seeded::from(given.unwrap_or_else(|| {
            let now =
                std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_nanos());
            now as u64 ^ u64::from(std::process::id()) << 40
        }))
    }

    /// From this seed.
    pub fn from(seed: u64) -> Seeded {
        Seeded { seed, state: seed }
    }

    /// The seed it began with.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// True once in `of` times.
    pub fn once_in(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    /// One of these.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}

impl Drop for Seeded {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed was {}: run again with HIGHWIRE_SEED={}", self.seed, self.seed);
        }
    }
}

/// Fills `bytes` from a seed.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    let mut word = Stream::new(seed);
    let mut chunks = bytes.chunks_exact_mut(8);
    for chunk in &mut chunks {
        chunk.copy_from_slice(&word.next().to_le_bytes());
    }
    let rest = chunks.into_remainder();
    let count = rest.len();
    rest.copy_from_slice(&word.next().to_le_bytes()[..count]);
}

/// That many bytes from a seed.
pub fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    fill(seed, &mut bytes);
    bytes
}

/// Where `found` first differs from what [`fill`] would have put there.
pub fn first_difference(seed: u64, found: &[u8]) -> Option<usize> {
    let mut word = Stream::new(seed);
    for (index, chunk) in found.chunks(8).enumerate() {
        let expected = &word.next().to_le_bytes()[..chunk.len()];
        if expected != chunk {
            return chunk.iter().zip(expected).position(|(found, expected)| found != expected).map(|at| index * 8 + at);
        }
    }
    None
}

/// Fails unless `found` is what [`fill`] puts for this seed.
#[track_caller]
pub fn verify(seed: u64, found: &[u8]) {
    let wrong = first_difference(seed, found);
    assert_eq!(wrong, None, "{} bytes of seed {seed} differ first at this offset", found.len());
}

/// Words of a cheap sequence: quick even without optimisation.
struct Stream(u64);

impl Stream {
    fn new(seed: u64) -> Stream {
        Stream(seed ^ 0x5851_f42d_4c95_7f2d)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0
    }
}
