//! A session as the server keeps it: which calls were begun, and the answers that may be asked for again.
//!
//! ```text
//!                admit                     finish                    a later call says
//!   (unknown) ─────────▶ Running ───────────────────▶ Answered ───────────────────────▶ forgotten
//!                           │ ▲                          │          that it has arrived
//!           admit again:    └─┘                          └── admit again: the answer, once more;
//!           nothing, the answer comes                        or run again, if it was not kept and may be
//! ```
//! A call is begun once however often it comes. No I/O here, and no time.

/// The calls of one client.
#[derive(Debug)]
pub struct Session {
    /// Answers to all calls before this one have arrived.
    acknowledged: u64,
    /// The place of call `n` is `n % window`.
    places: Vec<Place>,
}

#[derive(Debug, Default)]
struct Place {
    /// The call that was here last; 0 for none.
    sequence: u64,
    state: State,
    /// The answer, as it was sent.
    answer: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    Running,
    /// It runs, and nobody waits for its answer.
    Cancelled,
    Kept,
    /// The answer was too large to keep, or there never was a call.
    #[default]
    NotKept,
}

/// What is to be done with a call that has come.
#[derive(Debug, PartialEq, Eq)]
pub enum Admission<'a> {
    /// Begin it.
    Begin,
    /// It has been begun: its answer comes by itself.
    Running,
    /// It was answered: send this again.
    Answered(&'a [u8]),
    /// It was answered, with more than is kept, and may not run twice.
    Forgotten,
    /// The caller has its answer already: a late copy of the call.
    Stale,
}

/// A client that does not keep to the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("call {sequence} with {unanswered} before it unanswered is outside a window of {window} calls")]
pub struct OutsideWindow {
    /// The call's number.
    pub sequence: u64,
    /// How many before it are unanswered, as it says.
    pub unanswered: u32,
    /// How many may be outstanding.
    pub window: u32,
}

impl Session {
    /// A session whose first call is `first` or later. `window` calls may be outstanding: a power of two.
    pub fn new(first: u64, window: u32) -> Session {
        assert!(window.is_power_of_two(), "a window of {window} calls");
        let places = std::iter::repeat_with(Place::default).take(window as usize).collect();
        Session { acknowledged: first.max(1), places }
    }

    /// Calls that may be outstanding.
    pub fn window(&self) -> u32 {
        self.places.len() as u32
    }

    /// A call has come. `may_repeat` if it does no harm to run it again.
    #[inline]
    pub fn admit(&mut self, sequence: u64, unanswered: u32, may_repeat: bool) -> Result<Admission<'_>, OutsideWindow> {
        let window = self.places.len() as u64;
        let outside = OutsideWindow { sequence, unanswered, window: window as u32 };
        let arrived = sequence.checked_sub(unanswered.into()).filter(|first| *first > 0).ok_or(outside)?;
        if u64::from(unanswered) >= window {
            return Err(outside);
        }
        self.acknowledged = self.acknowledged.max(arrived);
        if sequence < self.acknowledged {
            return Ok(Admission::Stale);
        }
        let place = &mut self.places[(sequence & (window - 1)) as usize];
        if place.sequence != sequence {
            // Within a window there is one call for each place, and what was here before has been acknowledged.
            place.sequence = sequence;
            place.state = State::Running;
            return Ok(Admission::Begin);
        }
        Ok(match place.state {
            State::Running | State::Cancelled => Admission::Running,
            State::Kept => Admission::Answered(&place.answer),
            State::NotKept if may_repeat => {
                place.state = State::Running;
                Admission::Begin
            }
            State::NotKept => Admission::Forgotten,
        })
    }

    /// True if [`Session::admit`] would not say that this call is to be begun: it was, or its caller has the answer.
    pub fn was_begun(&self, sequence: u64, may_repeat: bool) -> bool {
        let place = &self.places[(sequence & (self.places.len() as u64 - 1)) as usize];
        let runs_again = may_repeat && place.state == State::NotKept;
        sequence < self.acknowledged || (place.sequence == sequence && !runs_again)
    }

    /// A call that was begun has its answer; `None` if that is too large to be kept. True if somebody waits for it.
    #[inline]
    pub fn finish(&mut self, sequence: u64, answer: Option<&[u8]>) -> bool {
        let at = (sequence & (self.places.len() as u64 - 1)) as usize;
        let place = &mut self.places[at];
        if place.sequence != sequence {
            // The caller gave it up long ago, and has made others since.
            return false;
        }
        let wanted = match place.state {
            State::Running => true,
            State::Cancelled => false,
            // A call that may be repeated was answered twice.
            State::Kept | State::NotKept => return false,
        };
        place.answer.clear();
        place.state = match answer {
            Some(answer) => {
                place.answer.extend_from_slice(answer);
                State::Kept
            }
            None => State::NotKept,
        };
        wanted
    }

    /// The caller does not wait any more. True if the call runs.
    pub fn cancel(&mut self, sequence: u64) -> bool {
        let at = (sequence & (self.places.len() as u64 - 1)) as usize;
        let place = &mut self.places[at];
        let runs = place.sequence == sequence && place.state == State::Running;
        if runs {
            place.state = State::Cancelled;
        }
        runs
    }

    /// True if this call runs and somebody waits for its answer.
    pub fn is_wanted(&self, sequence: u64) -> bool {
        let place = &self.places[(sequence & (self.places.len() as u64 - 1)) as usize];
        place.sequence == sequence && place.state == State::Running
    }

    /// Bytes of answers that are kept.
    #[cfg(test)]
    pub fn kept_bytes(&self) -> usize {
        self.places.iter().map(|place| place.answer.capacity()).sum()
    }

    /// Gives back the room of answers that have arrived.
    pub fn shrink(&mut self) {
        let acknowledged = self.acknowledged;
        for place in self.places.iter_mut().filter(|place| place.sequence < acknowledged) {
            place.answer = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_begun_once_and_its_answer_is_told_again() {
        let mut session = Session::new(1, 4);
        assert_eq!(session.admit(1, 0, false), Ok(Admission::Begin));
        assert_eq!(session.admit(1, 0, false), Ok(Admission::Running));
        assert!(session.is_wanted(1));
        assert!(session.finish(1, Some(b"one")));
        assert_eq!(session.admit(1, 0, false), Ok(Admission::Answered(b"one")));
        assert!(!session.finish(1, Some(b"two")), "it has been answered");
        assert_eq!(session.admit(2, 1, false), Ok(Admission::Begin));
        assert_eq!(session.admit(1, 0, false), Ok(Admission::Answered(b"one")), "nobody said that it arrived");
        assert_eq!(session.admit(3, 1, false), Ok(Admission::Begin));
        assert_eq!(session.admit(1, 0, false), Ok(Admission::Stale));
    }

    #[test]
    fn an_answer_that_is_not_kept_is_made_again_or_said_to_be_forgotten() {
        let mut session = Session::new(1, 4);
        for sequence in [1, 2] {
            assert_eq!(session.admit(sequence, sequence as u32 - 1, true), Ok(Admission::Begin));
            assert!(session.finish(sequence, None));
        }
        assert!(!session.was_begun(1, true) && session.was_begun(2, false));
        assert_eq!(session.admit(1, 0, true), Ok(Admission::Begin));
        assert_eq!(session.admit(2, 1, false), Ok(Admission::Forgotten));
        assert!(session.was_begun(1, true) && !session.was_begun(3, false));
    }

    #[test]
    fn what_was_cancelled_is_not_wanted_and_not_begun_again() {
        let mut session = Session::new(1, 4);
        assert_eq!(session.admit(1, 0, false), Ok(Admission::Begin));
        assert!(session.cancel(1));
        assert!(!session.cancel(1) && !session.is_wanted(1));
        assert_eq!(session.admit(1, 0, false), Ok(Admission::Running));
        assert!(!session.finish(1, Some(b"late")));
        // Its place is another's by the time that it ends.
        assert_eq!(session.admit(2, 0, false), Ok(Admission::Begin));
        assert!(session.cancel(2));
        assert_eq!(session.admit(6, 0, false), Ok(Admission::Begin));
        assert!(!session.finish(2, Some(b"late")));
        assert!(session.is_wanted(6));
    }

    #[test]
    fn nobody_leaves_the_window() {
        let mut session = Session::new(1, 4);
        for (sequence, unanswered) in [(5, 4), (1, 1), (3, 3), (9, u32::MAX)] {
            assert!(session.admit(sequence, unanswered, false).is_err(), "{sequence} after {unanswered}");
        }
        assert_eq!(session.admit(1 << 40, 0, false), Ok(Admission::Begin), "calls may be skipped");
    }

    #[test]
    fn memory_of_answers_that_arrived_is_given_back() {
        let mut session = Session::new(1, 4);
        for sequence in 1..=3u64 {
            session.admit(sequence, sequence as u32 - 1, false).unwrap();
            session.finish(sequence, Some(&[0; 1000]));
        }
        assert!(session.kept_bytes() >= 3000);
        session.admit(4, 1, false).unwrap();
        session.shrink();
        assert!((1000..2000).contains(&session.kept_bytes()), "call 3 may be asked for again");
    }
}
