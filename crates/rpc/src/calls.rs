//! The numbers of a client's calls: which are outstanding, and what becomes of them when the connection is made anew.
//!
//! ```text
//!            begin                   sent                answer, or given up
//!   (none) ─────────▶ outstanding ─────────▶ on its way ─────────────────────▶ (none)
//!                          ▲                      │ the connection ends
//!                          │  same server, which  ▼
//!                          └── has the session ── ? ── another incarnation, or the session expired ──▶ outcome unknown
//! ```
//! No I/O here, and no time.

/// Calls of one session.
#[derive(Debug)]
pub struct Calls {
    /// Of the session at the server, once it has said.
    incarnation: u64,
    next: u64,
    /// All before this one are answered.
    oldest: u64,
    /// The place of call `n` is `n % window`.
    places: Vec<Progress>,
    outstanding: u32,
    attempts: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    None,
    /// Nothing of it has left.
    Waiting,
    Sent,
}

/// What a welcome means for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is to be sent, for the first time or once more.
    Send,
    /// The server cannot say whether it ran.
    Unknown,
}

impl Calls {
    /// For `window` outstanding calls: a power of two.
    pub fn new(window: u32) -> Calls {
        assert!(window.is_power_of_two(), "a window of {window} calls");
        Calls {
            incarnation: 0,
            next: 1,
            oldest: 1,
            places: vec![Progress::None; window as usize],
            outstanding: 0,
            attempts: 0,
        }
    }

    /// The incarnation that the last welcome said; 0 before the first.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Numbers a new connection, so that the server can tell which of two is the later.
    pub fn attempt(&mut self) -> u32 {
        self.attempts = self.attempts.saturating_add(1);
        self.attempts
    }

    /// Answers to all calls before this one have arrived.
    pub fn acknowledged(&self) -> u64 {
        self.oldest
    }

    /// Calls that are outstanding.
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    #[inline]
    fn at(&self, sequence: u64) -> usize {
        (sequence & (self.places.len() as u64 - 1)) as usize
    }

    /// The number that the next call will have.
    #[inline]
    pub fn next_sequence(&self) -> u64 {
        self.next
    }

    /// The number of a new call; `None` while there are as many as there may be.
    #[inline]
    pub fn begin(&mut self) -> Option<u64> {
        let sequence = self.next;
        // The oldest that is unanswered holds its place, and so do all after it.
        if sequence - self.oldest >= self.places.len() as u64 {
            return None;
        }
        self.next += 1;
        self.outstanding += 1;
        let at = self.at(sequence);
        self.places[at] = Progress::Waiting;
        Some(sequence)
    }

    /// True if the next call has a place.
    pub fn has_room(&self) -> bool {
        self.next - self.oldest < self.places.len() as u64
    }

    /// It is about to leave. How many before it are unanswered, for its head.
    #[inline]
    pub fn send(&mut self, sequence: u64) -> u32 {
        let at = self.at(sequence);
        self.places[at] = Progress::Sent;
        (sequence - self.oldest) as u32
    }

    /// True if it has left before.
    #[inline]
    pub fn is_sent(&self, sequence: u64) -> bool {
        self.is_outstanding(sequence) && self.places[self.at(sequence)] == Progress::Sent
    }

    /// True if it is outstanding.
    #[inline]
    pub fn is_outstanding(&self, sequence: u64) -> bool {
        (self.oldest..self.next).contains(&sequence) && self.places[self.at(sequence)] != Progress::None
    }

    /// It is answered, or nobody waits for it any more. True if it was outstanding.
    #[inline]
    pub fn end(&mut self, sequence: u64) -> bool {
        if !self.is_outstanding(sequence) {
            return false;
        }
        let at = self.at(sequence);
        self.places[at] = Progress::None;
        self.outstanding -= 1;
        while self.oldest < self.next && self.places[self.at(self.oldest)] == Progress::None {
            self.oldest += 1;
        }
        true
    }

    /// The server welcomes the session, which it `knows` still or not: what becomes of the calls that are outstanding,
    /// in their order. Those whose fate is unknown are outstanding no longer.
    pub fn welcome(&mut self, incarnation: u64, knows: bool) -> Vec<(u64, Fate)> {
        let same = knows && self.incarnation == incarnation;
        self.incarnation = incarnation;
        let outstanding: Vec<u64> =
            (self.oldest..self.next).filter(|sequence| self.is_outstanding(*sequence)).collect();
        let fates: Vec<_> = outstanding
            .into_iter()
            .map(|sequence| match self.places[self.at(sequence)] {
                Progress::Sent if !same => (sequence, Fate::Unknown),
                _ => (sequence, Fate::Send),
            })
            .collect();
        for (sequence, _) in fates.iter().filter(|(_, fate)| *fate == Fate::Unknown) {
            self.end(*sequence);
        }
        fates
    }

    /// The session is over: all that is outstanding, and whether it was ever sent. None is outstanding afterwards.
    pub fn abandon(&mut self) -> Vec<(u64, bool)> {
        let outstanding: Vec<u64> =
            (self.oldest..self.next).filter(|sequence| self.is_outstanding(*sequence)).collect();
        outstanding
            .into_iter()
            .map(|sequence| {
                let sent = self.places[self.at(sequence)] == Progress::Sent;
                self.end(sequence);
                (sequence, sent)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
