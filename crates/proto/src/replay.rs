//! Which packet numbers were received already.

/// The last 4,096 packet numbers, one bit each.
///
/// Ask [`ReplayWindow::would_accept`] before the packet is opened, since that is cheaper than
/// opening it, and tell [`ReplayWindow::accept`] afterwards: a forged packet must not be able to
/// use up the number of a true one [W-24].
#[derive(Clone, Debug)]
pub struct ReplayWindow {
    /// The highest number accepted.
    highest: Option<u64>,
    /// Number n has bit n mod 4,096; bits of numbers beyond `highest` are those of old ones and
    /// are cleared when `highest` passes them.
    words: [u64; WORDS],
}

impl ReplayWindow {
    /// Numbers that the window covers. A packet that comes later than this many others is refused.
    pub const WIDTH: u64 = 4096;

    /// A window that has seen nothing.
    pub fn new() -> ReplayWindow {
        ReplayWindow { highest: None, words: [0; WORDS] }
    }

    /// Whether `number` is neither too old nor seen before. Changes nothing.
    pub fn would_accept(&self, number: u64) -> bool {
        let Some(highest) = self.highest else { return true };
        if number > highest {
            return true;
        }
        let (word, bit) = place(number);
        highest - number < ReplayWindow::WIDTH && self.words[word] & bit == 0
    }

    /// Notes that an authentic packet had `number`; false, and no change, if it was to be refused.
    pub fn accept(&mut self, number: u64) -> bool {
        if self.highest.is_some() && number.checked_sub(1) == self.highest {
            // Mostly the next one: its bit is set, whatever it was.
            let (word, bit) = place(number);
            self.words[word] |= bit;
            self.highest = Some(number);
            return true;
        }
        if !self.would_accept(number) {
            return false;
        }
        if self.highest.is_none_or(|highest| number > highest) {
            self.forget_up_to(number);
            self.highest = Some(number);
        }
        let (word, bit) = place(number);
        self.words[word] |= bit;
        true
    }

    /// The highest number accepted.
    pub fn highest(&self) -> Option<u64> {
        self.highest
    }

    /// Clears the bits of the numbers after `highest` up to `number`, word by word.
    fn forget_up_to(&mut self, number: u64) {
        let Some(highest) = self.highest else { return };
        if number - highest >= ReplayWindow::WIDTH {
            self.words.fill(0);
            return;
        }
        let mut from = highest + 1;
        while from <= number {
            let (word, _) = place(from);
            let first = from % 64;
            let count = (64 - first).min(number - from + 1);
            self.words[word] &= !((u64::MAX >> (64 - count)) << first);
            let Some(next) = from.checked_add(count) else { return };
            from = next;
        }
    }
}

impl Default for ReplayWindow {
    fn default() -> ReplayWindow {
        ReplayWindow::new()
    }
}

fn place(number: u64) -> (usize, u64) {
    ((number / 64) as usize % WORDS, 1 << (number % 64))
}

const WORDS: usize = ReplayWindow::WIDTH as usize / 64;

#[cfg(test)]
mod tests;
