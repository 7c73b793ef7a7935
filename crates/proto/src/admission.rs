//! Fast transfers: who sends by which receive list [W-90].
//!
//! A receiver has few lists, and each is worth something only as long as one transfer uses it. So it grants
//! them: [`Admission`] is the endpoint's, for all its sessions. A sender asks when a large message begins,
//! and goes on sending in the common way until it is granted one: [`Fast`] is a session's, both for what it
//! asks and for what it answers.
//!
//! ```text
//!   the sender, for each VI                                        the receiver, for each list
//!
//!   (nothing) ── a large message, or asked to ──▶ Asking            free ◀──────────────────────────┐
//!       ▲ ▲              nothing that can be sent │ │ ▲             │ request                        │
//!       │ └───────────────────────────────────────┘ │ │ time        ▼                                │
//!       │                                  refusal ─┼─┼─▶ Refused   granted to a VI of a session ────┘
//!       │ done                                      │ │ refusal       done, end of VI or session,
//!   Leaving ◀── 10 ms without a packet ── Granted ◀─┘─┘               20 ms without a packet by it,
//!       │ done, in the middle of a large message                      64 in a row by another way
//!       └──▶ Left ── a packet leaves ──▶ Asking
//! ```
//!
//! Any of these packets may be lost. Requests are repeated; each is answered; what nobody uses comes back.
//! So nothing here is sent again, and the worst that a loss, a lie or a delay does is a packet by the wrong
//! list, which costs speed and nothing else.

use crate::header::{Header, Kind};
use crate::session::SessionStats;
use std::collections::BTreeMap;
use std::time::Duration;

#[cfg(test)]
mod tests;

/// What a packet of kind [`Kind::Fast`] says [W-91].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// May I send by a list?
    Request {
        /// Comes back in the answer.
        request: u32,
        /// Bytes of the message that begins, 0 if that is not known. For whoever reads along: the receiver
        /// does not look at it.
        bytes: u32,
    },
    /// By this one.
    Grant { request: u32, list: u8 },
    /// Not now, or never.
    Refusal {
        /// 0 if none was made.
        request: u32,
        /// The list that was used and is another's; 0 in an answer.
        list: u8,
        /// When to ask again; `None` is never.
        after: Option<Duration>,
    },
    /// What was granted for this request is needed no longer.
    Done {
        request: u32,
        /// For whoever reads along, too: the request says which.
        list: u8,
    },
}

const REQUEST: u32 = 1;
const GRANT: u32 = 2;
const REFUSAL: u32 = 3;
const DONE: u32 = 4;
/// In the place of microseconds.
const NEVER: u32 = u32::MAX;

impl Word {
    /// The header of a packet that says it about a VI, which is the receiver's. Its own list stays 0: that
    /// would choose the socket that it comes to.
    pub(crate) fn header(self, vi: u32, bare: Header) -> Header {
        let header = Header { kind: Kind::Fast, vi, ..bare };
        match self {
            Word::Request { request, bytes } => Header { offset: REQUEST, message: request, credit: bytes, ..header },
            Word::Grant { request, list } => {
                Header { offset: GRANT, message: request, receive: u32::from(list), ..header }
            }
            Word::Refusal { request, list, after } => {
                let micros = after.map_or(NEVER, |after| after.as_micros().min(u128::from(NEVER - 1)) as u32);
                Header { offset: REFUSAL, message: request, credit: u32::from(list), receive: micros, ..header }
            }
            Word::Done { request, list } => {
                Header { offset: DONE, message: request, receive: u32::from(list), ..header }
            }
        }
    }

    /// What a header says; `None` if that is nothing that this version knows.
    pub(crate) fn parse(header: &Header) -> Option<Word> {
        let list = |word: u32| u8::try_from(word).ok();
        let request = header.message;
        match header.offset {
            REQUEST => Some(Word::Request { request, bytes: header.credit }),
            GRANT => Some(Word::Grant { request, list: list(header.receive).filter(|list| *list != 0)? }),
            REFUSAL => {
                let after = Some(header.receive).filter(|micros| *micros != NEVER);
                let after = after.map(|micros| Duration::from_micros(u64::from(micros)));
                Some(Word::Refusal { request, list: list(header.credit)?, after })
            }
            DONE => Some(Word::Done { request, list: list(header.receive)? }),
            _ => None,
        }
    }
}

/// What a session has to do with lists: those that it asks for, and its answers.
#[derive(Debug)]
pub(crate) struct Fast {
    /// Messages of so many bytes ask for one.
    bytes_least: u32,
    /// It may ask. Not if its packets are sealed, nor after the peer has said never.
    may_ask: bool,
    /// By VI; those that are there, and those that were closed and have a word to say.
    transfers: BTreeMap<u32, Transfer>,
    /// By VI, the latest for each: a peer that asks without end gets one answer at a time [W-94].
    answers: BTreeMap<u32, (u32, Word)>,
    /// There may be something to send.
    is_due: bool,
    next_request: u32,
    /// When the peer was last told that a list is not its own.
    refused_at: Option<Duration>,
    /// By VI, how often in a row the peer refused one, and when it could be asked again.
    refusals: BTreeMap<u32, (u32, Duration)>,
}

#[derive(Debug)]
struct Transfer {
    /// The peer's number of the VI.
    remote: u32,
    request: u32,
    bytes: u32,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// With the request to be sent now, or again at some time.
    Asking {
        again_at: Option<Duration>,
        tries: u32,
    },
    Granted {
        list: u8,
        used_at: Duration,
    },
    Refused {
        again_at: Duration,
    },
    /// The peer is to be told.
    Leaving {
        list: u8,
    },
    /// It was told in the middle of a large message: whenever that goes on, a list is asked for again.
    Left,
}

impl Fast {
    pub(crate) fn new(bytes_least: u32, sealed: bool) -> Fast {
        Fast {
            bytes_least: if sealed { u32::MAX } else { bytes_least },
            may_ask: !sealed,
            transfers: BTreeMap::new(),
            answers: BTreeMap::new(),
            is_due: false,
            next_request: 0,
            refused_at: None,
            refusals: BTreeMap::new(),
        }
    }

    /// Whether a message of so many bytes is worth a request.
    #[inline]
    pub(crate) fn wants(&self, bytes: u32) -> bool {
        bytes >= self.bytes_least && self.may_ask
    }

    /// Something may be to be sent.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Some VI asks for a list, or has one.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        !self.transfers.is_empty()
    }

    /// Asks for a list for this VI, unless it has one, or asks, or was refused a moment ago.
    pub(crate) fn ask(&mut self, vi: u32, remote: u32, bytes: u32) {
        if !self.may_ask {
            return;
        }
        let transfer = self.transfers.get(&vi);
        // One that is leaving and was not told stays: whoever has a list and asks is told the same.
        if transfer.is_none_or(|transfer| matches!(transfer.step, Step::Leaving { .. } | Step::Left)) {
            // 0 is no request.
            self.next_request = self.next_request.wrapping_add(1).max(1);
            let step = Step::Asking { again_at: None, tries: 0 };
            self.transfers.insert(vi, Transfer { remote, request: self.next_request, bytes, step });
            self.is_due = true;
        }
    }

    /// The list of packets that leave now; 0 without one.
    pub(crate) fn list(&mut self, now: Duration, vi: u32) -> u8 {
        let Some(transfer) = self.transfers.get_mut(&vi) else { return 0 };
        if transfer.step == Step::Left {
            let (remote, bytes) = (transfer.remote, transfer.bytes);
            self.ask(vi, remote, bytes);
            return 0;
        }
        let Step::Granted { list, used_at } = &mut transfer.step else { return 0 };
        let list = *list;
        if now.saturating_sub(*used_at) >= KEEP_FOR {
            // It may be another's by now [W-93].
            transfer.step = Step::Leaving { list };
            self.is_due = true;
            return 0;
        }
        *used_at = now;
        list
    }

    /// The VI is closed.
    pub(crate) fn forget(&mut self, vi: u32) {
        self.answers.remove(&vi);
        self.refusals.remove(&vi);
        let Some(transfer) = self.transfers.get_mut(&vi) else { return };
        let list = match transfer.step {
            Step::Granted { list, .. } | Step::Leaving { list } => Some(list),
            // The grant may be on its way.
            Step::Asking { tries: 1.., .. } => Some(0),
            Step::Asking { .. } | Step::Refused { .. } | Step::Left => None,
        };
        match list {
            Some(list) => (transfer.step, self.is_due) = (Step::Leaving { list }, true),
            None => drop(self.transfers.remove(&vi)),
        }
    }

    /// The peer answers, or says that a list is not this VI's.
    pub(crate) fn handle(&mut self, now: Duration, vi: u32, word: Word, stats: &mut SessionStats) {
        let Some(transfer) = self.transfers.get_mut(&vi) else { return };
        let asked = matches!(transfer.step, Step::Asking { .. }).then_some(transfer.request);
        match word {
            Word::Grant { request, list } if asked == Some(request) => {
                stats.fast_grants += 1;
                transfer.step = Step::Granted { list, used_at: now };
                self.refusals.remove(&vi);
            }
            Word::Refusal { request, list, after } => {
                let lost = matches!(transfer.step, Step::Granted { list: had, .. } if had == list);
                if !lost && (list != 0 || asked != Some(request)) {
                    return;
                }
                stats.fast_refusals += 1;
                match after {
                    Some(after) => {
                        let (times, again_at) = self.refusals.entry(vi).or_insert((0, now));
                        *times = if now.saturating_sub(*again_at) < IN_A_ROW { *times } else { 0 };
                        let after = after.clamp(AFTER_LEAST, AFTER_MOST);
                        *again_at = now + (after * (1 << *times)).min(after.max(PAUSE_MOST));
                        *times = (*times + 1).min(DOUBLINGS_MOST);
                        transfer.step = Step::Refused { again_at: *again_at };
                    }
                    None => {
                        self.may_ask = false;
                        self.transfers.clear();
                        self.refusals.clear();
                    }
                }
            }
            _ => {}
        }
    }

    /// Answers a request, or tells a peer of a list that is not its own.
    pub(crate) fn answer(&mut self, vi: u32, remote: u32, word: Word) {
        self.answers.insert(vi, (remote, word));
        self.is_due = true;
    }

    /// A packet of this VI names a list that is not its own. True if the peer is to be told now: not if an answer
    /// is to be sent first, which may be a grant.
    pub(crate) fn note_foreign(&mut self, now: Duration, vi: u32) -> bool {
        let tell =
            !self.answers.contains_key(&vi) && self.refused_at.is_none_or(|at| now.saturating_sub(at) >= TELL_EVERY);
        if tell {
            self.refused_at = Some(now);
        }
        tell
    }

    /// What is to be sent next, and about which of the peer's VIs. `rest` tells how many bytes a message has left
    /// that was begun on a VI.
    pub(crate) fn next(
        &mut self,
        now: Duration,
        rest: impl Fn(u32) -> u32,
        stats: &mut SessionStats,
    ) -> Option<(u32, Word)> {
        if let Some((_, answer)) = self.answers.pop_first() {
            return Some(answer);
        }
        let is_due = |step: &Step| matches!(step, Step::Asking { again_at: None, .. } | Step::Leaving { .. });
        let Some((&vi, transfer)) = self.transfers.iter_mut().find(|(_, transfer)| is_due(&transfer.step)) else {
            self.is_due = false;
            return None;
        };
        let (remote, request) = (transfer.remote, transfer.request);
        if let Step::Leaving { list } = transfer.step {
            let bytes = rest(vi);
            // Nobody else would ask before the next message begins.
            if bytes >= self.bytes_least {
                (transfer.step, transfer.bytes) = (Step::Left, bytes);
            } else {
                self.transfers.remove(&vi);
            }
            return Some((remote, Word::Done { request, list }));
        }
        let tries = if let Step::Asking { tries, .. } = transfer.step { tries } else { 0 };
        let again_at = Some(now + ASK_EVERY * (1 << tries.min(4)));
        transfer.step = Step::Asking { again_at, tries: tries.saturating_add(1) };
        stats.fast_requests += 1;
        Some((remote, Word::Request { request, bytes: transfer.bytes }))
    }

    /// When [`Fast::handle_timeout`] is to be called.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let due = |transfer: &Transfer| match transfer.step {
            Step::Asking { again_at, .. } => again_at,
            Step::Granted { used_at, .. } => Some(used_at + KEEP_FOR),
            Step::Refused { again_at } => Some(again_at),
            Step::Leaving { .. } | Step::Left => None,
        };
        self.transfers.values().filter_map(due).min()
    }

    /// Time has passed. `waits` tells whether a VI has something to send, and credit for it.
    pub(crate) fn handle_timeout(&mut self, now: Duration, waits: impl Fn(u32) -> bool) {
        let mut is_due = self.is_due;
        self.transfers.retain(|vi, transfer| {
            match transfer.step {
                Step::Asking { again_at: Some(at), tries } if at <= now => {
                    if tries >= TRIES_IDLE && !waits(*vi) {
                        return false;
                    }
                    transfer.step = Step::Asking { again_at: None, tries };
                }
                Step::Refused { again_at } if again_at <= now => {
                    if !waits(*vi) {
                        return false;
                    }
                    transfer.step = Step::Asking { again_at: None, tries: 0 };
                }
                Step::Granted { list, used_at } if now.saturating_sub(used_at) >= KEEP_FOR => {
                    transfer.step = Step::Leaving { list };
                }
                _ => return true,
            }
            is_due = true;
            true
        });
        self.is_due = is_due;
    }
}

/// The lists of an endpoint, and who has them.
#[derive(Debug)]
pub(crate) struct Admission {
    /// Those that there are, a bit for each; never bit 0.
    lists: u16,
    granted: u16,
    grants: [Option<Grant>; LISTS],
    /// Of each list the last holder whose packets came another way, and until when it gets none.
    apart: [Option<(Holder, Duration)>; LISTS],
}

/// Session and VI, as this side numbers them.
pub(crate) type Holder = (u32, u32);

#[derive(Clone, Copy, Debug)]
struct Grant {
    holder: Holder,
    /// The latest that it was told for.
    request: u32,
    /// When a packet came by it last, or when it was granted.
    heard_at: Duration,
    /// How long it is kept without.
    patience: Duration,
    /// Something came by it.
    used: bool,
    /// Packets in a row that name it and came another way.
    strays: u32,
}

/// What becomes of a list that a packet names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// It is its VI's.
    Own,
    /// It was until now: what is sent by it does not come by it.
    Astray,
    /// It is not.
    Foreign,
}

impl Admission {
    pub(crate) fn new() -> Admission {
        Admission { lists: 0, granted: 0, grants: [None; LISTS], apart: [None; LISTS] }
    }

    /// These lists can be granted, a bit for each.
    pub(crate) fn set_lists(&mut self, lists: u16) {
        self.lists = lists & !1;
        (1..LISTS).filter(|list| self.lists & 1 << list == 0).for_each(|list| self.grants[list] = None);
        self.granted &= self.lists;
    }

    /// The lists that are granted, a bit for each.
    #[inline]
    pub(crate) fn granted(&self) -> u16 {
        self.granted
    }

    pub(crate) fn has_lists(&self) -> bool {
        self.lists != 0
    }

    pub(crate) fn has_free(&self) -> bool {
        self.lists != self.granted
    }

    #[cfg(test)]
    pub(crate) fn holder(&self, list: u8) -> Option<Holder> {
        self.grants.get(usize::from(list))?.map(|grant| grant.holder)
    }

    /// The list that this one has, or a free one; `None` if there is none.
    pub(crate) fn grant(&mut self, now: Duration, holder: Holder, request: u32, round_trip: Duration) -> Option<u8> {
        let own = |grant: &Option<Grant>| grant.is_some_and(|grant| grant.holder == holder);
        if let Some(list) = self.grants.iter().position(own) {
            if let Some(grant) = &mut self.grants[list] {
                // Without use it comes back all the same.
                grant.request = request;
            }
            return Some(list as u8);
        }
        let free = self.lists & !self.granted;
        if free == 0 || self.stays_apart(now, holder).is_some() {
            return None;
        }
        let list = free.trailing_zeros() as usize;
        let patience = IDLE_FOR.max((2 * round_trip).min(IDLE_FOR_MOST));
        self.grants[list] = Some(Grant { holder, request, heard_at: now, patience, used: false, strays: 0 });
        self.granted |= 1 << list;
        Some(list as u8)
    }

    /// When one who was refused may ask again.
    pub(crate) fn retry_after(&self, now: Duration, holder: Holder) -> Duration {
        self.stays_apart(now, holder).unwrap_or(RETRY_AFTER)
    }

    /// How long this one gets no list, since none was of use to it.
    fn stays_apart(&self, now: Duration, holder: Holder) -> Option<Duration> {
        let until = self.apart.iter().flatten().filter(|(apart, _)| *apart == holder).map(|(_, until)| *until).max()?;
        until.checked_sub(now).filter(|rest| !rest.is_zero())
    }

    /// A packet names this list, and came `by` that one [W-96]. Only what comes by a list is a use of it: a peer
    /// that has a socket of its own here needs none, and does not know.
    #[inline]
    pub(crate) fn note_use(&mut self, now: Duration, holder: Holder, list: u8, by: u8) -> Use {
        let Some(Some(grant)) = self.grants.get_mut(usize::from(list)) else { return Use::Foreign };
        if grant.holder != holder {
            return Use::Foreign;
        }
        if by == list {
            (grant.heard_at, grant.used, grant.strays) = (now, true, 0);
            return Use::Own;
        }
        grant.strays += 1;
        if grant.strays < STRAYS_MOST {
            return Use::Own;
        }
        self.apart[usize::from(list)] = Some((holder, now + APART_FOR));
        self.grants[usize::from(list)] = None;
        self.granted &= !(1 << list);
        Use::Astray
    }

    /// What was granted for this request is needed no longer. A word that was overtaken by a later request
    /// says nothing.
    pub(crate) fn release(&mut self, holder: Holder, request: u32) {
        self.keep(|grant| (grant.holder, grant.request) != (holder, request));
    }

    /// All come back but those of holders that are still there.
    pub(crate) fn release_unless(&mut self, is_there: impl Fn(Holder) -> bool) {
        self.keep(|grant| is_there(grant.holder));
    }

    /// Those that nobody used for long come back; how many.
    pub(crate) fn release_idle(&mut self, now: Duration) -> u64 {
        let before = self.granted;
        let is_idle = |grant: &Grant| now.saturating_sub(grant.heard_at) >= grant.patience;
        for (grant, apart) in self.grants.iter().zip(&mut self.apart) {
            // It did send, only slower than it takes to be found out.
            if let Some(grant) = grant.filter(|grant| is_idle(grant) && grant.strays > 0 && !grant.used) {
                *apart = Some((grant.holder, now + APART_FOR));
            }
        }
        self.keep(|grant| !is_idle(grant));
        u64::from((before & !self.granted).count_ones())
    }

    fn keep(&mut self, keeps: impl Fn(&Grant) -> bool) {
        for (list, grant) in self.grants.iter_mut().enumerate() {
            if grant.as_ref().is_some_and(|grant| !keeps(grant)) {
                *grant = None;
                self.granted &= !(1 << list);
            }
        }
    }

    /// When one comes back unless something comes by it.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        if self.granted == 0 {
            return None;
        }
        self.grants.iter().flatten().map(|grant| grant.heard_at + grant.patience).min()
    }
}

/// List 0 is none.
const LISTS: usize = 16;
/// How soon a request is repeated at first. Then it takes longer each time.
const ASK_EVERY: Duration = Duration::from_millis(5);
/// So many requests are made though nothing is to be sent: somebody asked for it.
const TRIES_IDLE: u32 = 4;
/// How long a sender keeps a list without sending: less than its receiver does.
const KEEP_FOR: Duration = Duration::from_millis(10);
/// How long a receiver leaves a list to one who sends nothing by it.
const IDLE_FOR: Duration = Duration::from_millis(20);
/// And where two round trips take longer than that: its packets have to come first.
const IDLE_FOR_MOST: Duration = Duration::from_secs(1);
/// So many packets in a row that come another way than by the list that they name show that it is of no use.
const STRAYS_MOST: u32 = 64;
/// How long whoever sent them gets no other.
const APART_FOR: Duration = Duration::from_secs(1);
/// When whoever found no list free may ask again.
const RETRY_AFTER: Duration = Duration::from_millis(5);
/// A refusal of this side's request is believed within limits.
const AFTER_LEAST: Duration = Duration::from_millis(1);
const AFTER_MOST: Duration = Duration::from_secs(1);
/// With each further one in a row the pause doubles, up to this.
const PAUSE_MOST: Duration = Duration::from_millis(320);
/// As often as the shortest may.
const DOUBLINGS_MOST: u32 = 9;
/// They are in a row if no more than this lies between a pause and the next refusal.
const IN_A_ROW: Duration = Duration::from_secs(1);
/// How often a peer is told that it uses lists that are not its own.
const TELL_EVERY: Duration = Duration::from_millis(5);
