//! Randomness from the system.

use highwire_proto::Entropy;
use rustix::rand::{GetRandomFlags, getrandom};

/// The kernel's random numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemEntropy;

impl Entropy for SystemEntropy {
    fn fill(&mut self, bytes: &mut [u8]) {
        let mut filled = 0;
        while filled < bytes.len() {
            match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
                Ok(more) => filled += more,
                Err(rustix::io::Errno::INTR) => {}
                // Keys that are not random are worse than no keys.
                Err(error) => panic!("the system has no random numbers: {error}"),
            }
        }
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
