//! Random numbers that nobody can guess, from the kernel.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::fs::File;
use std::io::Read;

/// Fills `bytes` with random numbers of the kernel. Waits until it has collected enough randomness, shortly after boot.
///
/// Panics if it gives none, neither by `getrandom` nor by `/dev/urandom`: a number that others can guess, as the clock
/// is, would let them pass for somebody else.
pub fn fill_random(bytes: &mut [u8]) {
    let call = |bytes: &mut [u8]| getrandom(bytes, GetRandomFlags::empty());
    fill(bytes, call, |bytes| File::open("/dev/urandom").and_then(|mut file| file.read_exact(bytes)));
}

fn fill(
    bytes: &mut [u8],
    mut call: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    read_device: impl FnOnce(&mut [u8]) -> std::io::Result<()>,
) {
    let mut filled = 0;
    while filled < bytes.len() {
        match call(&mut bytes[filled..]) {
            Ok(more) => filled += more,
            Err(Errno::INTR) => {}
            // A sandbox may forbid the call and allow the device.
            Err(forbidden) => {
                return read_device(&mut bytes[filled..])
                    .unwrap_or_else(|error| panic!("the system has no random numbers: {forbidden}, {error}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_filled_and_differently_each_time() {
        let (mut one, mut other) = ([0; 300], [0; 300]);
        fill_random(&mut one);
        fill_random(&mut other);
        assert_ne!(one, other);
        assert!(one.chunks(30).all(|chunk| chunk.iter().any(|byte| *byte != 0)));
    }

    #[test]
    fn a_call_that_is_interrupted_or_forbidden_is_made_good() {
        let mut calls = [Err(Errno::INTR), Ok(3), Err(Errno::INTR), Err(Errno::PERM)].into_iter();
        let mut bytes = [0; 8];
        let call = |bytes: &mut [u8]| {
            let made = calls.next().unwrap()?;
            bytes[..made].fill(1);
            Ok(made)
        };
        fill(&mut bytes, call, |rest| {
            rest.fill(2);
            Ok(())
        });
        assert_eq!(bytes, [1, 1, 1, 2, 2, 2, 2, 2]);
    }

    #[test]
    #[should_panic(expected = "no random numbers")]
    fn nothing_takes_the_place_of_random_numbers() {
        fill(&mut [0; 8], |_| Err(Errno::NOSYS), |_| Err(std::io::ErrorKind::NotFound.into()));
    }
}
