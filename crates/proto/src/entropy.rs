//! Randomness as an argument.

/// Where random bytes come from. In production this is the kernel's generator; a handshake is only
/// as secret as these bytes are.
pub trait Entropy {
    /// Fills all of `bytes`.
    fn fill(&mut self, bytes: &mut [u8]);
}

/// Bytes that follow from a seed: xoshiro256** started by splitmix64.
///
/// **For simulations and tests only.** Whoever has seen a few of its bytes knows all that follow,
/// so keys made from it protect nothing.
#[derive(Clone, Debug)]
pub struct SeededEntropy {
    state: [u64; 4],
}

impl SeededEntropy {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> SeededEntropy {
        let mut word = seed;
        let state = std::array::from_fn(|_| {
            word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            mixed ^ (mixed >> 31)
        });
        SeededEntropy { state }
    }

    /// The next 64 bits.
    pub fn next_word(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.state;
        let result = b.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let shifted = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= shifted;
        *d = d.rotate_left(45);
        result
    }

    /// A number below `limit`, or 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next_word() % limit.max(1)
    }

    /// A number from 0 to 1.
    pub fn fraction(&mut self) -> f64 {
        (self.next_word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.fraction() < probability
    }
}

impl Entropy for SeededEntropy {
    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_those_of_the_published_generators() {
        // splitmix64 of 1234567 is listed by its authors' test vectors.
        let seeded = SeededEntropy::new(1_234_567);
        assert_eq!(seeded.state[0], 6_457_827_717_110_365_317);
        assert_eq!(seeded.state[1], 3_203_168_211_198_807_973);
        // xoshiro256** from the state 1, 2, 3, 4.
        let mut fixed = SeededEntropy { state: [1, 2, 3, 4] };
        assert_eq!([fixed.next_word(), fixed.next_word(), fixed.next_word()], [11520, 0, 1_509_978_240]);
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes_whatever_their_number() {
        let (mut one, mut two) = ([0; 37], [0; 37]);
        SeededEntropy::new(5).fill(&mut one);
        SeededEntropy::new(5).fill(&mut two);
        assert_eq!(one, two);
        assert!(one[32..].iter().any(|byte| *byte != 0), "the last, partial word is filled too");
    }
}
