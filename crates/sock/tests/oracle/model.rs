//! What is known of a connection by the calls that were made: enough to say which results are determined, and which
//! calls cannot hang.

use crate::support::pattern::Pattern;
use std::collections::VecDeque;
use std::time::Duration;

/// Kernel TCP, and whoever is compared with it.
pub const KERNEL: usize = 0;
pub const SUBJECT: usize = 1;

/// How the subject differs from TCP, as is stated for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nature {
    /// The first write to an end that has closed is taken, and lost.
    pub swallows: bool,
    /// What was done at one end arrives at the other some time later, and data that has not arrived is lost in a
    /// reset.
    pub delayed: bool,
    /// Messages that surely fit before a writer has to wait, each of so many bytes at most.
    pub messages: usize,
    pub chunk_bytes: usize,
    /// Whether each end is ever asked for its descriptor.
    pub polled: [bool; 2],
    /// How long something may take to arrive.
    pub patience: Duration,
}

/// One end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End {
    pub closed: bool,
    pub shut_read: bool,
    pub shut_write: bool,
    pub nonblocking: bool,
    pub linger_zero: bool,
    /// The other end's close was a reset.
    pub reset: bool,
    /// It has written to an end that had closed, or was reset after an orderly end: TCP's connection is over by that.
    pub over: bool,
}

impl End {
    /// A write fails, whatever the other end does.
    pub fn fails_writes(&self) -> bool {
        self.shut_write || self.reset || self.over
    }
}

/// From one end to the other, in each stack.
#[derive(Clone, Debug)]
pub struct Way {
    pub pattern: Pattern,
    pub written: [u64; 2],
    pub read: [u64; 2],
    /// Where the subject's unread messages end.
    messages: VecDeque<u64>,
    /// Filled until the writer had to wait, and not emptied since: how much there is differs.
    pub stuffed: bool,
    /// After this nothing comes.
    pub fin: bool,
}

impl Way {
    pub fn new(number: u64) -> Way {
        let pattern = Pattern::new(number);
        Way { pattern, written: [0; 2], read: [0; 2], messages: VecDeque::new(), stuffed: false, fin: false }
    }

    pub fn in_flight(&self, stack: usize) -> u64 {
        self.written[stack] - self.read[stack]
    }

    /// Bytes that are on their way in both.
    pub fn least(&self) -> u64 {
        self.in_flight(KERNEL).min(self.in_flight(SUBJECT))
    }

    pub fn most(&self) -> u64 {
        self.in_flight(KERNEL).max(self.in_flight(SUBJECT))
    }

    /// Whether a write of these pieces is taken whole, by either.
    pub fn takes(&self, pieces: &[usize], nature: &Nature) -> bool {
        let more: usize = pieces.iter().map(|piece| piece.div_ceil(nature.chunk_bytes)).sum();
        let bytes: usize = pieces.iter().sum();
        !self.stuffed
            && self.messages.len() + more <= nature.messages
            && self.most() + bytes as u64 <= IN_FLIGHT_BYTES_MAX
    }

    /// These pieces were written in both.
    pub fn wrote(&mut self, pieces: &[usize], nature: &Nature) {
        for piece in pieces {
            let mut left = *piece;
            while left > 0 {
                let message = left.min(nature.chunk_bytes);
                left -= message;
                for written in &mut self.written {
                    *written += message as u64;
                }
                self.messages.push_back(self.written[SUBJECT]);
            }
        }
    }

    /// So many were read in this stack.
    pub fn took(&mut self, stack: usize, bytes: usize) {
        self.read[stack] += bytes as u64;
        while self.messages.front().is_some_and(|end| *end <= self.read[SUBJECT]) {
            self.messages.pop_front();
        }
        self.stuffed &= self.most() > 0;
    }

    /// Whatever is left does not come any more.
    pub fn lose_the_rest(&mut self) {
        self.read = self.written;
        self.messages.clear();
        self.stuffed = false;
    }
}

/// What fits into the kernel's buffers with room to spare: they are [`KERNEL_BUFFER_BYTES`] each.
const IN_FLIGHT_BYTES_MAX: u64 = 48 << 10;
pub const KERNEL_BUFFER_BYTES: usize = 64 << 10;
