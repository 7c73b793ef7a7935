//! Whose packets come next, by each way.
//!
//! ```text
//!            a packet of a longer message                 a batch that was where it belongs
//!   nothing ───────────────────────────────▶ guessing ◀────────────────────────────────────┐
//!   to go by                                  │      ▲                                      │
//!                                             miss   │ looks that found what was expected ──┘
//!                                             ▼      │
//!                                            looking ┘
//! ```

use super::{Endpoint, may_come_from};
use crate::header::{Header, HeaderFlags, Kind};
use crate::message::{Sink, Source};
use crate::session::{Guess, LandingStats};
use std::net::SocketAddr;
use std::time::Duration;

/// How payloads are received. All but the first are there to be compared with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// Where they are expected, as long as guesses hold.
    #[default]
    Guess,
    /// Aside, and are copied.
    Never,
    /// Where they belong, after a look at how each batch begins.
    AlwaysLook,
    /// Where they do not belong, and are moved.
    AlwaysWrong,
}

/// What to do with the next batch.
#[derive(Debug)]
pub enum Expectation<'a> {
    /// Nothing is known of it.
    None,
    /// Look how it begins, and ask again.
    Look,
    /// Its payloads are expected there.
    There(Guess<'a>),
}

/// What is known of the packets that come by one way.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Way {
    /// The session and VI of the last packet of a longer message.
    last: Option<(u32, u32)>,
    /// Looks that have to find what was expected before anything is guessed again.
    doubts: u8,
    /// How many it takes after the next miss: the more, the more often guesses were wrong lately.
    caution: u8,
}

impl Way {
    fn note_miss(&mut self) {
        self.caution = (self.caution * 2).clamp(1, CAUTION_MAX);
        self.doubts = self.caution;
    }

    fn note_look(&mut self, expected: bool) {
        self.doubts = if expected { self.doubts.saturating_sub(1) } else { self.doubts.max(1) };
    }
}

impl<S: Source, T: Sink> Endpoint<S, T> {
    /// What is handed in next came by this way, a number that is the same for what comes by one socket; and by this
    /// receive list, whatever it names, or by none, which is 0.
    pub fn set_way(&mut self, way: usize, list: u8) {
        (self.way, self.list) = (way.min(WAYS - 1), list);
    }

    /// Where the payloads of the next batch by this way are expected; `head` is how it begins, if that was
    /// looked at.
    pub fn expect_landing(&mut self, way: usize, head: Option<&[u8]>) -> Expectation<'_> {
        let speculation = self.config.speculation;
        let way = &mut self.ways[way.min(WAYS - 1)];
        let Some((number, vi)) = way.last.filter(|_| speculation != Speculation::Never) else {
            return Expectation::None;
        };
        self.guesser = None;
        match head {
            None if speculation == Speculation::AlwaysLook || way.doubts > 0 => Expectation::Look,
            None => {
                let Some(open) = self.sessions.get_mut(&number) else { return Expectation::None };
                self.guesser = Some(number);
                let ahead = usize::from(speculation == Speculation::AlwaysWrong);
                open.session.guess(vi, ahead).map_or(Expectation::None, Expectation::There)
            }
            Some(head) => {
                let header = head.first_chunk().and_then(|fixed| Header::parse_head(fixed).ok());
                let Some(header) = header.filter(|header| header.kind == Kind::Data) else { return Expectation::None };
                let Some(open) = self.sessions.get_mut(&header.session) else { return Expectation::None };
                self.guesser = Some(header.session);
                let (guess, same) = open.session.guess_after_look(&header, head);
                let expected = same && (header.session, header.vi) == (number, vi);
                way.note_look(expected);
                guess.map_or(Expectation::None, Expectation::There)
            }
        }
    }

    /// A batch of `bytes` has come whose heads, as far as they were expected, are `heads`, and whose payloads are in
    /// the place that was told last: how many packets of it are where they belong, from the first on. The others
    /// are to be handed in by [`Endpoint::handle_packet`], after they were moved.
    pub fn take_landed(&mut self, now: Duration, from: SocketAddr, heads: &[u8], bytes: usize, looked: bool) -> usize {
        self.stir();
        let Some(number) = self.guesser else { return 0 };
        let Some(open) = self.sessions.get_mut(&number) else { return 0 };
        if !may_come_from(&open.session, open.peer, from) {
            return 0;
        }
        let taken = open.session.take_landed(now, heads, bytes, looked);
        if taken > 0 {
            let way = &mut self.ways[self.way];
            way.caution = way.caution.saturating_sub(u8::from(!looked));
            self.last = number;
            // [W-60]
            if open.session.heard_newest() {
                open.peer = from;
            }
            // What lies behind the first is of the same message, and almost always by the same list.
            if heads.get(Header::LIST_AT).is_some_and(|list| *list != 0)
                && let Some(Ok(header)) = heads.first_chunk().map(Header::parse_head)
            {
                self.handle_fast(now, &header);
            }
        }
        taken
    }

    /// Nothing lies any longer in the place that was told last but what belongs there.
    pub fn finish_landed(&mut self) {
        let Some(number) = self.guesser else { return };
        let Some(open) = self.sessions.get_mut(&number) else { return };
        if let Some(vi) = open.session.finish_landed() {
            self.ways[self.way].last = Some((number, vi));
        }
    }

    /// The place that was told last, if it still is one.
    pub fn landing_place(&mut self) -> Option<&mut [u8]> {
        self.sessions.get_mut(&self.guesser?)?.session.guessed_place()
    }

    /// So many packets of a batch, the first of which is this, were not where they belong, and so many bytes were
    /// moved.
    pub fn note_missed(&mut self, first: &[u8], packets: usize, bytes: usize) {
        // A word between data says nothing of what comes next.
        let is_data = Header::parse(first).map_or(true, |header| header.kind == Kind::Data);
        if is_data && self.config.speculation != Speculation::AlwaysWrong {
            self.ways[self.way].note_miss();
        }
        if let Some(open) = self.guesser.and_then(|number| self.sessions.get_mut(&number)) {
            open.session.note_missed(packets, bytes);
        }
    }

    /// What became of the payloads of all sessions that are there.
    pub fn landing(&self) -> LandingStats {
        let mut all = LandingStats::default();
        self.sessions.values().for_each(|open| all += open.session.landing(None));
        all
    }

    /// A packet of this session was taken.
    #[inline]
    pub(super) fn note_course(&mut self, number: u32, header: &Header) {
        let whole = HeaderFlags::FIRST.with(HeaderFlags::LAST);
        if header.kind == Kind::Data && !header.flags.has(whole) {
            self.ways[self.way].last = Some((number, header.vi));
        }
    }
}

/// Ways that are told apart: one for each socket of a link.
pub(super) const WAYS: usize = 32;
const CAUTION_MAX: u8 = 16;
