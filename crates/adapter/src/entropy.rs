//! Randomness from the system.

use highwire_proto::Entropy;

/// The kernel's random numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn fill(&mut self, bytes: &mut [u8]) {
        highwire_mem::fill_random(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fills_everything_and_differently_each_time() {
        let (mut one, mut other) = ([0; 300], [0; 300]);
        SystemEntropy.fill(&mut one);
        SystemEntropy.fill(&mut other);
        assert_ne!(one, other);
        assert!(one.chunks(30).all(|chunk| chunk.iter().any(|byte| *byte != 0)));
    }
}
