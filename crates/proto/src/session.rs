//! A session: everything between two endpoints, under one pair of keys.
//!
//! The way in is [`Session`]. It does no I/O: packets and time go in by `handle_*`, packets, deadlines
//! and events come out by `poll_*`. Many VIs share one space of packet numbers, one set of
//! acknowledgements and one controller; each has its own messages and its own credits, and none waits for
//! another.
//!
//! ```text
//!            close              all that was sent has arrived           acknowledged, or out of patience
//!   Open ────────────▶ Draining ─────────────────────────────▶ Closing ───────────────────────────────▶ Ended
//!    │                    │                                       │
//!    └────────────────────┴──── the peer closes, or is silent ────┴──────────────────────────────────▶ Ended
//! ```

mod acks;
mod cutting;
mod landing;
mod renewal;
mod size;
mod speculation;

use crate::admission::{Fast, Word};
use crate::congestion::{Controller, Fate, RateBased, Room, unit};
use crate::handshake::{Established, Offer};
use crate::header::{CONTROL_BYTES_MAX, Header, HeaderFlags, Kind, NUMBERS};
use crate::key::Fingerprint;
use crate::ledger::{Cargo, Departure, Ledger, Run};
use crate::message::{InMessage, Incoming, OutMessage, Outgoing, PREFACE_BYTES_MOST, Places, Preface, Sink, Source};
use crate::ranges::Ranges;
use crate::renewal::Renewal;
use crate::replay::ReplayWindow;
use crate::rtt::RoundTrip;
use crate::seal::{KEY_TICK, SealError, Sealing};
use crate::size::{PacketSize, SizeSearch};
use acks::run_of;
pub(crate) use cutting::PULSE_PACKETS_MOST;
use landing::Opened;
use speculation::{Course, Guessed};
pub use speculation::{Guess, LandingStats};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// What a session may use, and how it behaves.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// How large packets are.
    pub packet_size: PacketSize,
    /// Silence of so long is death.
    pub death: Duration,
    /// An acknowledgement is held back at most so long.
    pub acknowledge_delay: Duration,
    /// And for at most so many packets, where the peer does not ask for one before.
    pub acknowledge_every: u32,
    /// Longest message that is taken.
    pub message_bytes_max: u32,
    /// Messages of one VI that are sent and not complete, at most. A message is a few hundred bytes
    /// beside its payload.
    pub messages_max: usize,
    /// Receives posted on one VI, at most.
    pub receives_max: usize,
    /// VIs, at most.
    pub vis_max: usize,
    /// Holes in what has arrived, of packets and of each message. What would make more is not taken.
    pub holes_max: usize,
    /// A message of so many bytes asks the receiver for a list of its own, if it is not sealed.
    pub fast_bytes: u32,
}

impl Default for SessionConfig {
    fn default() -> SessionConfig {
        SessionConfig {
            packet_size: PacketSize::default(),
            death: Duration::from_secs(10),
            acknowledge_delay: Duration::from_millis(1),
            acknowledge_every: 256,
            message_bytes_max: 64 << 20,
            messages_max: 1024,
            receives_max: 1024,
            vis_max: 1024,
            holes_max: 1024,
            fast_bytes: 256 << 10,
        }
    }
}

/// How sure a sender wants to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assurance {
    /// Complete when it left; it may be lost, and never comes twice.
    Unreliable,
    /// Complete when it has arrived.
    Reliable,
}

/// Why a session, or what it carried, came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ending {
    /// This side closed it.
    #[error("this side closed the session")]
    Closed,
    /// The peer closed it.
    #[error("the peer closed the session")]
    PeerClosed,
    /// Nothing was heard for so long.
    #[error("nothing was heard of the peer for {0:?}")]
    Silence(Duration),
    /// A key has sealed all the packets that it may.
    #[error("the keys of the session are used up")]
    KeysUsedUp,
    /// A packet could not be sealed: what was to be sent is no packet, or its number was used.
    #[error("a packet of the session could not be sealed")]
    NotSealed,
    /// One of both sides no longer accepts the key of the session.
    #[error("the key of the session is not accepted any more: give both sides the present one")]
    KeyRemoved,
    /// This machine or process was put back to an earlier state.
    #[error("this machine or process was put back to an earlier state: connect again")]
    Restored,
    /// The peer has as many sessions as it takes.
    #[error("the peer has as many sessions as it takes: call again when others have ended, or raise its limit")]
    PeerFull,
    /// The VI was closed.
    #[error("the VI was closed")]
    ViClosed,
    /// The message is longer than the place that was given for it, and was dropped.
    #[error("a message of {message} bytes does not fit the posted buffer of {buffer} bytes")]
    TooLong {
        /// Bytes of the message.
        message: u32,
        /// Bytes of the place.
        buffer: usize,
    },
}

/// Why a close packet ends a session [W-99].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    Done = 0,
    Full = 1,
    KeyRemoved = 2,
}

impl Reason {
    /// What the side is told that receives it.
    fn ending(told: u32) -> Ending {
        match told {
            told if told == Reason::Full as u32 => Ending::PeerFull,
            told if told == Reason::KeyRemoved as u32 => Ending::KeyRemoved,
            // Others of a later version are an end as well.
            _ => Ending::PeerClosed,
        }
    }
}

/// Why a message or a receive was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no such VI.
    #[error("there is no VI {0}")]
    UnknownVi(u32),
    /// The VI exists already, or there are too many.
    #[error("VI {vi} cannot be opened: it exists, or there are {limit} already")]
    NoSuchRoom {
        /// Its number.
        vi: u32,
        /// The limit in force.
        limit: usize,
    },
    /// Too many are outstanding.
    #[error("{limit} are outstanding already")]
    Full {
        /// The limit in force.
        limit: usize,
    },
    /// The message is too long.
    #[error("a message of {bytes} bytes is longer than the limit of {limit}")]
    TooLong {
        /// Its bytes.
        bytes: usize,
        /// The limit in force.
        limit: u32,
    },
    /// Too many control bytes.
    #[error("{bytes} control bytes are more than {limit}")]
    ControlTooLong {
        /// How many.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The token is in use.
    #[error("a place is expected under token {0} already")]
    TokenInUse(u64),
    /// The session is over.
    #[error("the session is over: {0}")]
    Over(Ending),
}

/// What has happened.
#[derive(Debug)]
pub enum Event<S, T> {
    /// A message that was sent is complete.
    Sent {
        /// On this VI.
        vi: u32,
        /// The sender's mark.
        token: u64,
        /// The payload, free again.
        payload: Option<S>,
        /// Whether it arrived.
        status: Result<(), Ending>,
    },
    /// A message has arrived, or a receive came to nothing.
    Received {
        /// On this VI.
        vi: u32,
        /// The receiver's mark.
        token: u64,
        /// The place, with the payload in it.
        target: Option<T>,
        /// Bytes of payload.
        length: usize,
        /// Immediate data.
        immediate: u32,
        /// Control bytes.
        control: Vec<u8>,
        /// The token that it came under.
        payload_token: Option<u64>,
        /// Whether there is a message.
        status: Result<(), Ending>,
    },
    /// The session is over, and everything has come back.
    Ended(Ending),
}

/// Why a packet was dropped. It is counted; nothing else has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Dropped {
    /// It is no packet of a session.
    #[error("not a packet of a session")]
    NotOurs,
    /// It came before, or is too old to tell.
    #[error("packet {0} came before")]
    Replayed(u64),
    /// It was not sealed by the peer, or is damaged.
    #[error("not authentic")]
    Forged,
    /// It is authentic, but there is no room or no place for it now: it will be sent again.
    #[error("no place for it now")]
    NoPlace,
}

/// What a session has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionStats {
    /// Packets sent.
    pub packets_sent: u64,
    /// Packets that carried something again.
    pub packets_again: u64,
    /// Packets given up for lost.
    pub packets_lost: u64,
    /// Probes after silence.
    pub probes: u64,
    /// Probes of a size.
    pub size_probes: u64,
    /// Times that packets of the size found did not pass any more.
    pub size_falls: u64,
    /// Authentic packets received.
    pub packets_received: u64,
    /// Dropped since they came before.
    pub replayed: u64,
    /// Dropped since they were not authentic.
    pub forged: u64,
    /// Dropped for want of a place.
    pub without_place: u64,
    /// Messages sent that are complete.
    pub messages_sent: u64,
    /// Messages received.
    pub messages_received: u64,
    /// Requests for a receive list of the peer's.
    pub fast_requests: u64,
    /// Times it granted one.
    pub fast_grants: u64,
    /// Times it refused one, or took it back.
    pub fast_refusals: u64,
}

#[derive(Debug)]
struct ViState<S, T> {
    remote: u32,
    // Sending: messages in order, the oldest is number `first_message` [W-35].
    messages: VecDeque<OutMessage<S>>,
    sends: Assurance,
    first_message: u32,
    /// Position of the first message that was not sent in full.
    sending: usize,
    next_receive: u32,
    credit: u32,
    again: VecDeque<(u32, u32)>,
    // Receiving.
    receives: Assurance,
    places: Places<T>,
    arriving: BTreeMap<u32, InMessage<T>>,
    next_delivery: u32,
    credit_told: u32,
    /// What was told may be lost.
    credit_untold: bool,
    // What the session counts or lists of it, so that it need not look at each.
    in_turns: bool,
    is_blocked: bool,
    has_news: bool,
    course: Course,
    landing: LandingStats,
}

impl<S: Source, T> ViState<S, T> {
    fn message(&mut self, number: u32) -> Option<&mut OutMessage<S>> {
        self.messages.get_mut(number.wrapping_sub(self.first_message) as usize)
    }

    /// True if a packet of this message has left that is larger than `segment`.
    fn outgrows(&self, number: u32, segment: usize) -> bool {
        let message = self.messages.get(number.wrapping_sub(self.first_message) as usize);
        message.is_some_and(|message| message.outgrows(segment))
    }

    /// Cuts messages anew of which such packets have left. What is not known to have arrived goes again.
    fn cut_anew(&mut self, segment: usize) {
        let mut again = std::mem::take(&mut self.again);
        again.retain(|(number, _)| !self.outgrows(*number, segment));
        for (position, message) in self.messages.iter_mut().enumerate().filter(|(_, message)| message.outgrows(segment))
        {
            message.cut_anew(segment);
            if self.sends == Assurance::Reliable {
                let number = self.first_message.wrapping_add(position as u32);
                let missing = (0..message.next).filter(|index| !message.has_arrived(*index));
                again.extend(missing.map(|index| (number, index)));
            }
        }
        self.again = again;
    }

    /// Whether something of it can be sent now, as far as the peer's credit goes, and whether only that
    /// credit is missing [W-40].
    fn can_send_or_is_blocked(&self) -> (bool, bool) {
        if !self.again.is_empty() {
            return (true, false);
        }
        let next = self.messages.get(self.sending).map(|message| self.has_credit(message));
        (next == Some(true), next == Some(false))
    }

    /// Bytes that were never sent of the message that is being sent, if it was begun.
    fn rest(&self) -> u32 {
        let begun = self.messages.get(self.sending).filter(|message| message.next > 0 && !message.all_sent());
        begun.map_or(0, |message| message.preface.total - message.range(message.next).start as u32)
    }

    fn has_credit(&self, message: &OutMessage<S>) -> bool {
        message.next > 0
            || self.sends == Assurance::Unreliable
            || message.preface.payload_token.is_some()
            || self.has_credit_for(message.receive)
    }

    fn has_credit_for(&self, receive: u32) -> bool {
        self.credit.wrapping_sub(receive).wrapping_sub(1) < u32::MAX / 2
    }

    /// A packet tells the peer its credit.
    fn note_told(&mut self, news: &mut usize) {
        (self.credit_told, self.credit_untold) = (self.places.credit(), false);
        count_news(self, news);
    }

    fn credit_is_news(&self) -> bool {
        self.credit_untold || self.places.credit() != self.credit_told
    }

    /// The peer may be waiting for credit.
    fn credit_is_urgent(&self) -> bool {
        let ahead = self.credit_told.wrapping_sub(self.places.first());
        self.credit_is_news() && (ahead as usize) * 2 <= self.places.len()
    }
}

/// Packets to one place whose payload lies apart: each is a head and a piece of the payload, and all but
/// the last have `segment` bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pulse<'a> {
    /// The heads, one behind the other: the first has `first_head` bytes, each further one
    /// [`Header::BYTES`].
    pub heads: &'a [u8],
    /// Bytes of the first head.
    pub first_head: usize,
    /// The payload, which is cut in as many pieces.
    pub payload: &'a [u8],
    /// Bytes of each packet but the last.
    pub segment: usize,
}

impl Pulse<'_> {
    /// The packets in one piece.
    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.heads.len() + self.payload.len());
        let (mut heads, mut payload, mut head) = (self.heads, self.payload, self.first_head);
        while !heads.is_empty() {
            let piece = payload.len().min(self.segment - head);
            bytes.extend_from_slice(&heads[..head]);
            bytes.extend_from_slice(&payload[..piece]);
            (heads, payload, head) = (&heads[head..], &payload[piece..], Header::BYTES);
        }
        bytes
    }
}

/// What became of packets that were to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transmit {
    /// They were appended; all but the last have this length.
    Written(usize),
    /// They have gone.
    Sent,
}

/// Where the payload of a [`Pulse`] lies.
#[derive(Debug)]
struct Weft {
    vi: u32,
    message: u32,
    first_head: usize,
    payload: Range<usize>,
}

/// What this side can take in, as peers are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Intake {
    /// Bytes of the buffer in which packets wait; 0 if that is not known.
    pub buffer: u32,
    /// Datagrams dropped so far since it was full, modulo 2^32.
    pub overruns: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Draining,
    Closing,
    Ended(Ending),
}

/// Everything between two endpoints. `S` is what payloads are sent from, `T` what they land in.
#[derive(Debug)]
pub struct Session<S, T> {
    number: u32,
    peer: Offer,
    config: SessionConfig,
    /// A quarter of the time after which silence is death.
    death_quarter: Duration,
    sealing: Sealing,
    state: State,
    /// Ordered, so that a run is the same each time.
    vis: BTreeMap<u32, ViState<S, T>>,
    /// What was told of VIs that are not open yet, of a few of them.
    early_credits: BTreeMap<u32, u32>,
    /// Numbers of VIs that were closed.
    closed: Ranges,
    /// VIs that have something to send and credit for it, each in turn; and how many packets the first may still
    /// send in its.
    turns: VecDeque<u32>,
    turn_left: u32,
    /// How many VIs wait for nothing but credit.
    blocked: usize,
    /// How many VIs have credit that is news to the peer.
    news: usize,
    ledger: Ledger,
    /// Bytes that packets have behind their headers, at most: as `search` says.
    segment: usize,
    search: SizeSearch,
    /// How often in a row packets were lost, and only those larger than every path takes; and when that was
    /// noticed last.
    suspicions: (u32, Duration),
    /// A size was lost or refused when this was the number of the next packet, and the peer may tell of the hole
    /// in what it has received.
    hole_below: Option<u64>,
    trip: RoundTrip,
    controller: Box<dyn Controller>,
    /// What the peer's buffer takes.
    room: Room,
    /// What ours takes.
    intake: Intake,
    /// What the peer was told of it, and when.
    intake_told: (Intake, Duration),
    delivered: u64,
    delivered_at: Duration,
    flight_began: Duration,
    // Received.
    window: ReplayWindow,
    received: Ranges,
    largest_at: Duration,
    unacknowledged: u32,
    acknowledge_by: Option<Duration>,
    acknowledge_now: bool,
    // Timers.
    lost_by: Option<Duration>,
    probe_by: Option<Duration>,
    probes: u32,
    probe_wanted: bool,
    /// When to ask for credit that may have been missed, and how long that was put off last.
    ask_by: Option<Duration>,
    ask_after: Duration,
    /// VIs to ask for.
    asking: VecDeque<u32>,
    /// Closing takes no longer than this.
    close_by: Option<Duration>,
    /// When the keys are told that time has passed.
    key_by: Duration,
    /// The packet taken last was the highest so far.
    newest: bool,
    fingerprint: Option<Fingerprint>,
    renewal: Renewal,
    /// The peer has asked for fresh keys, and the endpoint has not answered.
    renewal_asked: bool,
    next_send: Duration,
    last_heard: Duration,
    last_sent: Duration,
    last_run: Duration,
    close_sent: bool,
    /// The answer to the peer's last word, which may be lost and is then given again.
    last_words: Vec<u8>,
    last_words_wanted: bool,
    events: VecDeque<Event<S, T>>,
    scratch: Vec<u8>,
    /// Bytes of data packets since an acknowledgement was asked for, short packets counted as [`unit`].
    unasked: u64,
    /// Where the payload of the pulse that was written last lies, if it was left there; none between calls.
    weft: Option<Weft>,
    /// What an acknowledgement has settled; empty between calls.
    runs: Vec<Run>,
    /// The acknowledgement in the last header: the same again says nothing.
    ack_taken: u64,
    /// One that came with a whole message, and when: whoever waits for the message has it first.
    ack_left: Option<(u64, Duration)>,
    /// Receive lists: asked for here, answered to the peer.
    fast: Fast,
    stats: SessionStats,
    /// Where the payloads of the next packets are expected.
    guessed: Option<Guessed>,
    /// Of VIs that were closed.
    landing_closed: LandingStats,
}

impl<S: Source, T: Sink> Session<S, T> {
    /// The session that a handshake has established; `number` is this side's number for it.
    pub fn new(established: Established, number: u32, mut config: SessionConfig, now: Duration) -> Session<S, T> {
        let Established { sealing, peer, fingerprint, calls } = established;
        // What would not work is brought to what does.
        config.holes_max = config.holes_max.max(16);
        let search = SizeSearch::new(config.packet_size);
        let packet = search.present();
        let key_by = if sealing.is_sealed() { now + KEY_TICK } else { Duration::MAX };
        Session {
            number,
            peer,
            fast: Fast::new(config.fast_bytes, sealing.is_sealed()),
            sealing,
            state: State::Open,
            vis: BTreeMap::new(),
            early_credits: BTreeMap::new(),
            closed: Ranges::new(),
            turns: VecDeque::new(),
            turn_left: 0,
            blocked: 0,
            news: 0,
            ledger: Ledger::default(),
            segment: packet - Header::BYTES,
            search,
            suspicions: (0, now),
            hole_below: None,
            trip: RoundTrip::new(),
            controller: Box::new(RateBased::new(packet)),
            room: Room::new(packet),
            intake: Intake::default(),
            intake_told: (Intake::default(), now),
            delivered: 0,
            delivered_at: now,
            flight_began: now,
            window: ReplayWindow::new(),
            received: Ranges::new(),
            largest_at: now,
            unacknowledged: 0,
            acknowledge_by: None,
            acknowledge_now: false,
            lost_by: None,
            probe_by: None,
            probes: 0,
            probe_wanted: false,
            ask_by: None,
            ask_after: ASK_AFTER,
            asking: VecDeque::new(),
            close_by: None,
            key_by,
            newest: false,
            fingerprint,
            renewal: Renewal::new(calls),
            renewal_asked: false,
            next_send: now,
            last_heard: now,
            last_sent: now,
            last_run: now,
            close_sent: false,
            last_words: Vec::new(),
            last_words_wanted: false,
            events: VecDeque::new(),
            scratch: Vec::with_capacity(packet),
            unasked: 0,
            weft: None,
            runs: Vec::new(),
            ack_taken: 0,
            ack_left: None,
            stats: SessionStats::default(),
            guessed: None,
            landing_closed: LandingStats::default(),
            death_quarter: config.death / 4,
            config,
        }
    }

    /// This side's number for it.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// True if nothing is on its way whose arrival is awaited.
    pub fn is_quiet(&self) -> bool {
        self.ledger.is_empty() || self.ack_left.is_some_and(|(ack, _)| self.settles_all(ack))
    }

    /// True if everything that is on its way has arrived, as this acknowledgement says.
    fn settles_all(&self, ack: u64) -> bool {
        self.ledger.is_settled_by(&run_of(ack))
    }

    /// True if something is to be sent now that does not wait well: data, an acknowledgement that was asked
    /// for, a question.
    pub fn owes(&self) -> bool {
        self.acknowledge_now
            || self.probe_wanted
            || self.last_words_wanted
            || self.state != State::Open
            || !self.asking.is_empty()
            || self.fast.is_due()
            || self.renewal.is_due()
            || self.has_data()
    }

    /// When something authentic was heard last.
    pub fn heard_at(&self) -> Duration {
        self.last_heard
    }

    /// What the peer offered.
    pub fn peer(&self) -> &Offer {
        &self.peer
    }

    /// The key that it was established with; none in the insecure form.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }

    /// True if its packets are sealed, not merely checksummed.
    #[inline]
    pub fn is_sealed(&self) -> bool {
        self.sealing.is_sealed()
    }

    /// True if the packet that was taken last has the highest number so far: its sender is where it came
    /// from, and not where it was when an older one left.
    pub fn heard_newest(&self) -> bool {
        self.newest
    }

    /// What it has done.
    pub fn stats(&self) -> SessionStats {
        self.stats
    }

    /// Why it is over, if it is.
    pub fn ended(&self) -> Option<Ending> {
        match self.state {
            State::Ended(ending) => Some(ending),
            _ => None,
        }
    }

    /// The smoothed round trip.
    pub fn round_trip(&self) -> Duration {
        self.trip.smoothed()
    }

    /// What has become of the packets that were sent.
    fn fate(&self) -> Fate {
        Fate { sent: self.stats.packets_sent, lost: self.stats.packets_lost }
    }

    /// What this side can take in has changed.
    pub(crate) fn set_intake(&mut self, intake: Intake) {
        self.intake = intake;
    }

    /// A VI that both sides have agreed on: `local` here, `remote` at the peer, and how sure each wants to
    /// be of what it sends.
    pub fn open_vi(&mut self, local: u32, remote: u32, sends: Assurance, receives: Assurance) -> Result<(), Refusal> {
        self.check_open()?;
        // A number is used once: what was acknowledged for an earlier VI must not complete a later one.
        let used = self.closed.contains(&(u64::from(local)..u64::from(local) + 1));
        if used || self.vis.contains_key(&local) || self.vis.len() >= self.config.vis_max {
            return Err(Refusal::NoSuchRoom { vi: local, limit: self.config.vis_max });
        }
        let state = ViState {
            remote,
            sends,
            messages: VecDeque::new(),
            first_message: 0,
            sending: 0,
            next_receive: 0,
            credit: 0,
            again: VecDeque::new(),
            receives,
            places: Places::new(),
            arriving: BTreeMap::new(),
            next_delivery: 0,
            credit_told: 0,
            credit_untold: false,
            in_turns: false,
            is_blocked: false,
            has_news: false,
            course: Course::default(),
            landing: LandingStats::default(),
        };
        self.vis.insert(local, state);
        if let Some(credit) = self.early_credits.remove(&local) {
            self.take_credit(local, credit);
        }
        Ok(())
    }

    /// Forgets a VI; everything outstanding on it comes back.
    pub fn close_vi(&mut self, local: u32) {
        self.take_ack_left();
        self.fast.forget(local);
        self.flush_vi(local, Ending::ViClosed);
        if let Some(state) = self.vis.remove(&local) {
            self.landing_closed += state.landing;
            self.turns.retain(|vi| *vi != local);
            self.blocked -= usize::from(state.is_blocked);
            self.news -= usize::from(state.has_news);
        }
        // Whether it was open or not: what comes for it is too late.
        self.closed.insert(u64::from(local)..u64::from(local) + 1, usize::MAX);
    }

    /// Sends a message; nothing has left before [`Session::poll_transmit`]. Limits are refusals [W-32].
    pub fn post_send(&mut self, vi: u32, message: Outgoing<S>) -> Result<(), (Refusal, Outgoing<S>)> {
        if let Err(refusal) = self.check_open() {
            return Err((refusal, message));
        }
        let limit = self.config.message_bytes_max.min(self.peer.message_bytes_max);
        let Some(state) = self.vis.get_mut(&vi) else { return Err((Refusal::UnknownVi(vi), message)) };
        if let Err(refusal) = check_send(&message, state.messages.len(), self.config.messages_max, limit) {
            return Err((refusal, message));
        }
        let receive = state.next_receive;
        if message.payload_token.is_none() {
            state.next_receive = receive.wrapping_add(1);
        }
        state.messages.push_back(OutMessage::new(message, receive, self.segment));
        line_up(vi, state, &mut self.turns, &mut self.blocked);
        Ok(())
    }

    /// Appends the packet of a message that is all of it, if nothing is in its way: nothing else is to be
    /// sent, and everything before has arrived. Then it can leave before anything is noted of it, which
    /// [`Session::note_ahead`] must do next. False, and nothing has changed, if it has to be posted.
    pub fn write_ahead(&mut self, vi: u32, message: &Outgoing<S>, out: &mut Vec<u8>) -> bool {
        let idle = self.state == State::Open && !self.owes() && self.is_quiet();
        if !idle || self.next_send > self.last_run || !self.has_window() {
            return false;
        }
        let Some(state) = self.vis.get(&vi).filter(|state| state.sends == Assurance::Reliable) else { return false };
        let total = message.payload.as_ref().map_or(0, Source::total);
        let control = message.control.len();
        let fits = PREFACE_BYTES_MOST + control + total <= self.segment && control <= CONTROL_BYTES_MAX.into();
        let room = state.messages.len() == state.sending && state.messages.len() < self.config.messages_max;
        let next = state.next_receive;
        // What it does not take is refused where it is posted.
        if !fits || !room || message.payload_token.is_some() || !state.has_credit_for(next) {
            return false;
        }
        if total > self.peer.message_bytes_max.min(self.config.message_bytes_max) as usize {
            return false;
        }
        let begin = out.len();
        out.extend_from_slice(&[0; Header::BYTES]);
        let (total, immediate) = (total as u32, message.immediate);
        Preface::write_parts(total, immediate, None, &message.control, out);
        if let Some(payload) = &message.payload {
            payload.append(0..total as usize, out);
        }
        let header = Header {
            kind: Kind::Data,
            flags: HeaderFlags::FIRST.with(HeaderFlags::LAST),
            list: 0,
            session: self.peer.session,
            number: self.ledger.next_number(),
            vi: state.remote,
            message: state.first_message.wrapping_add(state.messages.len() as u32),
            offset: 0,
            length: (out.len() - begin - Header::BYTES) as u16,
            control: message.control.len() as u8,
            epoch: 0,
            ack: self.latest_run(),
            credit: state.places.credit(),
            receive: next,
        };
        header.write(&mut out[begin..]);
        if self.sealing.seal(&mut out[begin..]).is_err() {
            out.truncate(begin);
            return false;
        }
        true
    }

    /// The packet of `bytes` that [`Session::write_ahead`] wrote of this message has left.
    pub fn note_ahead(&mut self, now: Duration, vi: u32, message: Outgoing<S>, bytes: usize) {
        self.last_run = self.last_run.max(now);
        let Some(state) = self.vis.get_mut(&vi) else { return };
        let number = state.first_message.wrapping_add(state.messages.len() as u32);
        let mut message = OutMessage::new(message, state.next_receive, self.segment);
        message.next = 1;
        state.messages.push_back(message);
        (state.sending, state.next_receive) = (state.sending + 1, state.next_receive.wrapping_add(1));
        let tells = state.has_news;
        self.piggyback(tells);
        if let Some(state) = self.vis.get_mut(&vi) {
            state.note_told(&mut self.news);
        }
        self.search.note_traffic(now);
        self.begin_departure(now);
        self.unasked += unit(self.packet_bytes() as u64).max(bytes as u64);
        self.ledger.push(Cargo::Data { vi, message: number, index: 0 }, bytes as u16);
        self.ledger.hold_back();
        self.note_departed(now, 1, bytes);
    }

    /// Gives a place for the next message on a VI.
    pub fn post_receive(&mut self, vi: u32, place: Incoming<T>) -> Result<(), (Refusal, Incoming<T>)> {
        if let Err(refusal) = self.check_open() {
            return Err((refusal, place));
        }
        let limit = self.config.receives_max;
        let Some(state) = self.vis.get_mut(&vi) else { return Err((Refusal::UnknownVi(vi), place)) };
        if state.places.len() >= limit {
            return Err((Refusal::Full { limit }, place));
        }
        state.places.post(place);
        count_news(state, &mut self.news);
        if state.credit_is_urgent() {
            self.acknowledge_now = true;
        } else {
            self.acknowledge_after(self.last_run);
        }
        Ok(())
    }

    /// Gives a place for the message under `token`, whatever comes between [W-47].
    pub fn expect(&mut self, vi: u32, token: u64, place: Incoming<T>) -> Result<(), (Refusal, Incoming<T>)> {
        if let Err(refusal) = self.check_open() {
            return Err((refusal, place));
        }
        let limit = self.config.receives_max;
        let Some(state) = self.vis.get_mut(&vi) else { return Err((Refusal::UnknownVi(vi), place)) };
        // What arrives under it may be abandoned, and its place expected again.
        let arriving = state.receives == Assurance::Unreliable
            && state.arriving.values().any(|message| message.token == Some(token));
        if arriving || state.places.expected.contains_key(&token) {
            return Err((Refusal::TokenInUse(token), place));
        }
        if state.places.expected.len() >= limit {
            return Err((Refusal::Full { limit }, place));
        }
        state.places.expected.insert(token, place);
        Ok(())
    }

    /// Takes back the place that was given for the message under `token`: nothing lands in it afterwards.
    /// What is on its way to it is dropped when it comes.
    pub fn revoke(&mut self, vi: u32, token: u64) -> Option<Incoming<T>> {
        let state = self.vis.get_mut(&vi)?;
        if let Some(place) = state.places.expected.remove(&token) {
            return Some(place);
        }
        state.arriving.values_mut().find(|message| message.token == Some(token))?.place.take()
    }

    fn check_open(&self) -> Result<(), Refusal> {
        match self.state {
            State::Open => Ok(()),
            State::Ended(ending) => Err(Refusal::Over(ending)),
            _ => Err(Refusal::Over(Ending::Closed)),
        }
    }

    /// Asks the peer for a receive list for what is sent on this VI from now on, as a large message does by
    /// itself. It may be refused, and comes back when nothing is sent for a while; nothing but speed depends
    /// on it [W-90].
    pub fn request_fast(&mut self, vi: u32) -> Result<(), Refusal> {
        self.check_open()?;
        let state = self.vis.get(&vi).ok_or(Refusal::UnknownVi(vi))?;
        if state.sends == Assurance::Reliable {
            self.fast.ask(vi, state.remote, 0);
        }
        Ok(())
    }

    /// Ends the session when everything sent has arrived; the peer is told [W-55].
    pub fn close(&mut self) {
        if self.state == State::Open {
            self.state = State::Draining;
            // A peer that gives no credit, or never answers, does not hold it open for ever.
            self.close_by = Some(self.last_run + self.config.death);
            self.drain();
        }
    }

    /// Asks the peer for a sign of life.
    pub fn ask(&mut self) {
        self.probe_wanted = true;
    }

    /// The next thing that happened.
    pub fn poll_event(&mut self) -> Option<Event<S, T>> {
        self.events.pop_front()
    }

    /// True if something happened that was not told.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// When [`Session::handle_timeout`] is to be called next.
    pub fn poll_timeout(&self) -> Option<Duration> {
        if self.ended().is_some() {
            return None;
        }
        let death = self.last_heard + self.config.death;
        let alive = self.last_sent.max(self.last_heard) + self.death_quarter;
        let mut by = death.min(alive).min(self.key_by);
        // What was left for later is done at the next occasion.
        if let Some((_, at)) = self.ack_left {
            by = by.min(at);
        }
        for timer in [self.acknowledge_by, self.lost_by, self.probe_by, self.close_by, self.ask_by] {
            by = timer.map_or(by, |timer| timer.min(by));
        }
        if self.fast.is_active() {
            by = self.fast.deadline().map_or(by, |timer| timer.min(by));
        }
        if self.has_data() && self.has_window() {
            by = by.min(self.next_send);
        }
        Some(by)
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.take_ack_left();
        if self.ended().is_some() {
            return;
        }
        self.notice_sleep(now);
        // [W-53]
        let unanswered = self.ledger.oldest().is_some_and(|(_, sent_at)| now >= sent_at + 2 * self.config.death);
        if now >= self.last_heard + self.config.death || unanswered {
            return self.end(Ending::Silence(self.config.death));
        }
        if self.close_by.is_some_and(|by| by <= now) {
            return self.end(Ending::Closed);
        }
        if self.key_by <= now {
            self.key_by = now + KEY_TICK;
            self.sealing.tick();
            self.renewal.tick();
            if self.renewal.is_overdue() {
                return self.end_for_key(now);
            }
        }
        if self.ask_by.is_some_and(|by| by <= now) {
            self.ask_for_credit(now);
        }
        if self.fast.is_active() {
            let vis = &self.vis;
            self.fast.handle_timeout(now, |vi| vis.get(&vi).is_some_and(|state| state.can_send_or_is_blocked().0));
        }
        // [W-52]
        if now >= self.last_sent.max(self.last_heard) + self.death_quarter {
            self.probe_wanted = true;
        }
        if self.acknowledge_by.is_some_and(|by| by <= now) {
            self.acknowledge_now = true;
        }
        if self.lost_by.is_some_and(|by| by <= now) {
            self.detect_lost(now);
        }
        if self.probe_by.is_some_and(|by| by <= now) {
            self.probe(now);
        }
    }

    /// A machine that was suspended, or a process that was stopped, has heard nothing for its own
    /// fault: the peer gets time to answer [W-54].
    fn notice_sleep(&mut self, now: Duration) {
        if now.saturating_sub(self.last_run) > self.config.death / 2 {
            self.last_heard = self.last_heard.max(now.saturating_sub(self.config.death / 2));
            self.probe_wanted = true;
        }
        self.last_run = now;
    }

    /// Nothing was acknowledged for long: what was sent first is sent again [W-44].
    fn probe(&mut self, now: Duration) {
        self.probes += 1;
        self.stats.probes += 1;
        if self.probes >= 2 {
            self.controller.handle_silence(now);
        }
        if self.ledger.oldest_is_large() {
            self.suspect_size(now);
        }
        match self.ledger.oldest().map(|(cargo, _)| cargo) {
            Some(Cargo::Data { vi, message, index }) => self.send_again(vi, message, index),
            Some(Cargo::Close) => self.close_sent = false,
            Some(Cargo::Credit) => self.tell_credit_again(),
            Some(Cargo::Probe | Cargo::Size(_) | Cargo::Fast) | None => {}
        }
        self.probe_wanted = true;
        self.set_probe_timer(now);
    }

    fn set_probe_timer(&mut self, now: Duration) {
        self.probe_by = None;
        if !self.ledger.is_empty() {
            let timeout = self.trip.probe_timeout(self.config.acknowledge_delay);
            let timeout = if self.probes == 0 { timeout } else { timeout * (1 << self.probes.min(10)) };
            self.probe_by = Some(now + timeout.min(self.death_quarter));
        }
    }

    fn send_again(&mut self, vi: u32, message: u32, index: u32) {
        let Some(state) = self.vis.get_mut(&vi) else { return };
        if state.message(message).is_none_or(|message| message.has_arrived(index)) {
            // It arrived in another packet; but this one may have carried news of credit.
            state.credit_untold = true;
            count_news(state, &mut self.news);
            self.acknowledge_after(self.last_run);
            return;
        }
        state.again.push_back((message, index));
        line_up(vi, state, &mut self.turns, &mut self.blocked);
    }

    fn detect_lost(&mut self, now: Duration) {
        let mut lost = std::mem::take(&mut self.runs);
        let before = self.ledger.in_flight();
        self.lost_by = self.ledger.detect_lost(now, &self.trip, &mut lost);
        if before > self.ledger.in_flight() {
            self.controller.handle_loss(now, before - self.ledger.in_flight());
        }
        for run in lost.drain(..) {
            self.stats.packets_lost += u64::from(run.count);
            match run.cargo {
                // That is what it was for: it says nothing about the rate that the path takes.
                Cargo::Size(bytes) => {
                    self.stats.packets_lost -= 1;
                    self.search.handle_loss(now, usize::from(bytes));
                    self.hole_below = Some(self.ledger.next_number());
                }
                Cargo::Data { vi, message, index } => {
                    if self.vis.get(&vi).is_some_and(|state| state.sends == Assurance::Reliable) {
                        (index..index + run.count).for_each(|index| self.send_again(vi, message, index));
                    }
                }
                Cargo::Close => self.close_sent = false,
                Cargo::Credit => self.tell_credit_again(),
                Cargo::Probe | Cargo::Fast => {}
            }
        }
        self.runs = lost;
        self.fill_hole();
        // What left together counts once, however much of it is lost.
        if self.ledger.take_large_lost().is_some_and(|sent_at| sent_at > self.suspicions.1) {
            self.suspect_size(now);
        }
    }

    /// [W-39]
    fn tell_credit_again(&mut self) {
        for state in self.vis.values_mut() {
            state.credit_untold = true;
            count_news(state, &mut self.news);
        }
        self.acknowledge_now = true;
    }

    fn has_data(&self) -> bool {
        !self.turns.is_empty()
    }

    fn has_window(&self) -> bool {
        self.ledger.in_flight() + self.packet_bytes() as u64 <= self.window()
    }

    /// Most bytes on the way.
    fn window(&self) -> u64 {
        self.controller.window().min(self.room.bytes())
    }

    /// Bytes of a full packet, with its header, as they leave now.
    pub fn packet_bytes(&self) -> usize {
        self.segment + Header::BYTES
    }

    // ── Sending ──────────────────────────────────────────────────────────────────────────────────

    /// Appends up to `segments` packets to `out`: all of one length but the last. That length, or
    /// `None` if there is nothing to send now.
    pub fn poll_transmit(&mut self, now: Duration, segments: usize, out: &mut Vec<u8>) -> Option<usize> {
        self.write_next(now, segments, false, out)
    }

    /// The same, but packets whose payload is neither encrypted nor in several pieces are handed to `send`
    /// where they lie, so that nothing is copied. It tells whether they have gone; if not, they are
    /// appended like the others.
    pub fn poll_transmit_with(
        &mut self,
        now: Duration,
        segments: usize,
        out: &mut Vec<u8>,
        send: &mut dyn FnMut(Pulse<'_>) -> bool,
    ) -> Option<Transmit> {
        let begin = out.len();
        let segment = self.write_next(now, segments, true, out)?;
        let Some(weft) = self.weft.take() else { return Some(Transmit::Written(segment)) };
        let message = self.vis.get_mut(&weft.vi).and_then(|state| state.message(weft.message));
        let payload = message.and_then(|message| message.payload.as_ref()?.piece(weft.payload)).unwrap_or_default();
        let pulse = Pulse { heads: &out[begin..], first_head: weft.first_head, payload, segment };
        if send(pulse) {
            out.truncate(begin);
            return Some(Transmit::Sent);
        }
        let packets = pulse.to_bytes();
        out.truncate(begin);
        out.extend_from_slice(&packets);
        Some(Transmit::Written(segment))
    }

    fn write_next(&mut self, now: Duration, segments: usize, weave: bool, out: &mut Vec<u8>) -> Option<usize> {
        if std::mem::take(&mut self.last_words_wanted) && !self.last_words.is_empty() {
            out.extend_from_slice(&self.last_words);
            return Some(self.last_words.len());
        }
        // A message that can go goes first.
        if self.turns.is_empty() || !self.is_quiet() {
            self.take_ack_left();
        }
        if self.ended().is_some() {
            return None;
        }
        if self.has_nothing_to_send() {
            self.note_blocked(now);
            return None;
        }
        let begin = out.len();
        // An acknowledgement on its own comes first: the peer may be waiting for it.
        if self.acknowledge_now && (self.received.len() > 1 || !self.can_send_now(now) || self.has_more_to_tell(now)) {
            self.write_acknowledgement(now, out)?;
            return Some(out.len() - begin);
        }
        if self.fast.is_due()
            && let Some((vi, word)) =
                self.fast.next(now, |vi| self.vis.get(&vi).map_or(0, ViState::rest), &mut self.stats)
        {
            self.write_fast(now, vi, word, out)?;
            return Some(out.len() - begin);
        }
        if self.renewal.is_due() {
            self.write_renewal(now, out)?;
            return Some(out.len() - begin);
        }
        if self.can_send_now(now)
            && let Some(packet) = self.write_pulse(now, segments, weave, out)
        {
            return Some(packet);
        }
        if self.state == State::Closing && !self.close_sent {
            self.close_sent = true;
            self.probe_wanted = false;
            self.write_close(now, Reason::Done, out)?;
            return Some(out.len() - begin);
        }
        if let Some(vi) = self.asking.pop_front() {
            self.write_probe(now, vi, out)?;
            return Some(out.len() - begin);
        }
        if self.probe_wanted {
            self.probe_wanted = false;
            self.write_probe(now, 0, out)?;
            return Some(out.len() - begin);
        }
        if self.acknowledge_now {
            // What seemed to be data came to nothing.
            self.write_acknowledgement(now, out)?;
            return Some(out.len() - begin);
        }
        if let Some(bytes) = self.search.due().filter(|_| self.state == State::Open) {
            self.write_size_probe(now, bytes, out)?;
            return Some(bytes);
        }
        self.note_blocked(now);
        None
    }

    fn has_nothing_to_send(&self) -> bool {
        let asked = self.acknowledge_now || self.probe_wanted || !self.asking.is_empty();
        let asked = asked || self.fast.is_due() || self.renewal.is_due();
        self.turns.is_empty() && !asked && self.state != State::Closing && self.search.due().is_none()
    }

    /// Credit is news that can be missed: it may have come before the VI was open here. Whoever waits for
    /// it asks, less and less often.
    fn note_blocked(&mut self, now: Duration) {
        match (self.blocked > 0, self.ask_by) {
            (true, None) => self.ask_by = Some(now + self.ask_after),
            (false, Some(_)) => (self.ask_by, self.ask_after) = (None, ASK_AFTER),
            _ => {}
        }
    }

    fn ask_for_credit(&mut self, now: Duration) {
        let blocked = self.vis.values().filter(|state| state.is_blocked).map(|state| state.remote);
        self.asking = blocked.take(CREDITS_TOLD).collect();
        self.ask_after = (self.ask_after * 2).min(self.config.death / 4);
        self.ask_by = (!self.asking.is_empty()).then_some(now + self.ask_after);
    }

    /// A probe goes though the window is full.
    fn is_probing(&self) -> bool {
        self.probe_wanted && self.probes > 0
    }

    fn can_send_now(&self, now: Duration) -> bool {
        (self.is_probing() || self.has_window() && self.next_send <= now) && self.has_data()
    }

    /// True if there is more to tell than the next data packet does: credit of other VIs than its own, or
    /// what this side can take in.
    fn has_more_to_tell(&self, now: Duration) -> bool {
        let first_tells = || self.turns.front().and_then(|vi| self.vis.get(vi)).is_some_and(|state| state.has_news);
        let intake_is_news = self.intake.buffer != 0
            && (self.intake != self.intake_told.0 || now.saturating_sub(self.intake_told.1) >= INTAKE_EVERY);
        intake_is_news || self.news > 1 || self.news == 1 && !first_tells()
    }

    fn complete_sends(&mut self, vi: u32) {
        if let Some(state) = self.vis.get_mut(&vi) {
            complete_sends(vi, state, &mut self.events, &mut self.stats);
        }
    }

    /// A packet that asks for a sign of life, about a VI or, with 0, about the session.
    fn write_probe(&mut self, now: Duration, vi: u32, out: &mut Vec<u8>) -> Option<()> {
        let header = Header { vi, ..self.bare_header(Kind::Probe) };
        let header = self.with_settled(header);
        self.write_bare(now, Cargo::Probe, header, out)
    }

    /// The last word.
    fn write_close(&mut self, now: Duration, reason: Reason, out: &mut Vec<u8>) -> Option<()> {
        let header = Header { offset: reason as u32, ..self.bare_header(Kind::Close) };
        self.write_bare(now, Cargo::Close, header, out)
    }

    /// A packet that is nothing but its header.
    fn write_bare(&mut self, now: Duration, cargo: Cargo, header: Header, out: &mut Vec<u8>) -> Option<()> {
        let begin = out.len();
        out.resize(begin + Header::BYTES, 0);
        self.seal(&header, begin, out).then_some(())?;
        self.note_sent(now, cargo, out.len() - begin);
        Some(())
    }

    /// A word about a receive list.
    fn write_fast(&mut self, now: Duration, vi: u32, word: Word, out: &mut Vec<u8>) -> Option<()> {
        let header = word.header(vi, self.bare_header(Kind::Fast));
        self.write_bare(now, Cargo::Fast, header, out)
    }

    fn bare_header(&mut self, kind: Kind) -> Header {
        let (session, number) = (self.peer.session, self.ledger.next_number());
        Header { session, number, ack: self.piggyback(false), ..Header::new(kind) }
    }

    /// False, with nothing appended, if it cannot be sealed: that ends the session.
    fn seal(&mut self, header: &Header, begin: usize, out: &mut Vec<u8>) -> bool {
        header.write(&mut out[begin..]);
        if let Err(error) = self.sealing.seal(&mut out[begin..]) {
            out.truncate(begin);
            self.end_unsealed(error);
            return false;
        }
        true
    }

    fn end_unsealed(&mut self, error: SealError) {
        self.end(match error {
            SealError::KeyExhausted { .. } => Ending::KeysUsedUp,
            SealError::Malformed(_) | SealError::NumberUsed { .. } => Ending::NotSealed,
        });
    }

    /// A packet other than data has left.
    fn note_sent(&mut self, now: Duration, cargo: Cargo, bytes: usize) {
        self.begin_departure(now);
        self.ledger.push(cargo, bytes as u16);
        if !self.has_data() {
            self.ledger.hold_back();
        }
        self.note_departed(now, 1, bytes);
    }

    /// Packets are about to leave.
    fn begin_departure(&mut self, now: Duration) {
        let mut delivered = self.delivered;
        if self.is_quiet() {
            // A new flight: what the path can do is measured from here on, and there is nothing to ask for. What
            // an acknowledgement settles that was left for later has arrived.
            (self.flight_began, self.delivered_at, self.unasked) = (now, now, 0);
            delivered += self.ledger.in_flight();
        }
        self.ledger.depart(Departure {
            sent_at: now,
            delivered: (delivered, self.delivered_at),
            flight_began: self.flight_began,
            held_back: false,
            list: 0,
        });
    }

    /// They have left.
    fn note_departed(&mut self, now: Duration, packets: u64, bytes: usize) {
        self.stats.packets_sent += packets;
        self.last_sent = now;
        if let Some(pace) = self.controller.pace() {
            let interval = Duration::from_nanos((bytes as u64).saturating_mul(1_000_000_000) / pace.max(1));
            // What was not sent in the last moment may be caught up on.
            let next = self.next_send.max(now.saturating_sub(CATCH_UP)) + interval;
            // The pace of a moment ago does not bind for long.
            self.next_send = next.min(now + AHEAD_MAX);
        }
        if self.probe_by.is_none() {
            self.set_probe_timer(now);
        }
    }

    // ── Receiving ────────────────────────────────────────────────────────────────────────────────

    /// A packet has come. Nothing changes unless it is authentic [W-28].
    pub fn handle_packet(&mut self, now: Duration, packet: &[u8]) -> Result<(), Dropped> {
        let header = Header::parse(packet).map_err(|_| Dropped::NotOurs)?;
        self.handle_parsed(now, header, packet)
    }

    /// The same for a packet with this header.
    pub(crate) fn handle_parsed(&mut self, now: Duration, header: Header, packet: &[u8]) -> Result<(), Dropped> {
        if header.session != self.number || header.number >= NUMBERS {
            return Err(Dropped::NotOurs);
        }
        if self.ended().is_some() {
            // A close that is sent again was not answered; one that is forged is not either. A peer that does not
            // know of the end asks.
            let answered = header.kind == Kind::Close || header.kind == Kind::Probe;
            self.last_words_wanted |= answered && self.open(&header, packet).is_ok();
            return Err(Dropped::NotOurs);
        }
        if matches!(header.kind, Kind::Hello | Kind::Welcome) {
            return Err(Dropped::NotOurs);
        }
        self.take_ack_left();
        if !self.window.would_accept(header.number) {
            self.stats.replayed += 1;
            // The peer may not know that it came.
            return Err(Dropped::Replayed(header.number));
        }
        let continued = match self.continue_message(&header, packet) {
            Some(result) => result.map(|()| true),
            None => Ok(false),
        };
        let opened = continued.and_then(|done| if done { Ok(Opened::Taken) } else { self.open(&header, packet) });
        let opened = opened.inspect_err(|_| self.stats.forged += 1)?;
        self.last_run = self.last_run.max(now);
        self.stats.packets_received += 1;
        self.notice_fresh_keys();
        let taken = match header.kind {
            Kind::Data => self.take_opened(&header, opened, packet),
            Kind::Ack => {
                // One that comes late tells what was.
                if self.window.highest().is_none_or(|highest| header.number > highest) {
                    self.room.handle_report(now, header.offset, header.message, self.fate());
                }
                self.take_acknowledgement(now);
                true
            }
            Kind::Fast => {
                if let Some(word) = Word::parse(&header) {
                    self.fast.handle(now, header.vi, word, &mut self.stats);
                }
                true
            }
            Kind::Renew => {
                self.take_renewal(&header);
                true
            }
            _ => true,
        };
        self.take_header_ack(now, header.ack);
        if header.kind == Kind::Data {
            self.take_credit(header.vi, header.credit);
        }
        if !taken {
            self.stats.without_place += 1;
            return Err(Dropped::NoPlace);
        }
        self.last_heard = now;
        self.note_received(now, &header);
        if header.kind == Kind::Close {
            self.end_after_answer(now, Reason::ending(header.offset));
        }
        Ok(())
    }

    /// The acknowledgement in a header: the same again says nothing.
    #[inline(always)]
    fn take_header_ack(&mut self, now: Duration, ack: u64) {
        if ack == self.ack_taken {
            return;
        }
        self.ack_taken = ack;
        if self.settles_all(ack) && self.state == State::Open && self.has_events() {
            self.ack_left = Some((ack, now));
        } else {
            self.handle_ack(now, ack);
        }
    }

    fn note_arrived(&mut self, vi: u32, message: u32, index: u32, count: u32) {
        let Some(state) = self.vis.get_mut(&vi) else { return };
        let Some(sent) = state.message(message) else { return };
        sent.note_run(index, count);
        complete_sends(vi, state, &mut self.events, &mut self.stats);
    }

    // ── Receive lists ────────────────────────────────────────────────────────────────────────────

    /// Whether a list can be granted for what comes on this VI; `None` if there is no such VI.
    pub(crate) fn can_be_fast(&self, vi: u32) -> Option<bool> {
        let state = self.vis.get(&vi).filter(|_| self.ended().is_none())?;
        Some(state.receives == Assurance::Reliable && !self.sealing.is_sealed())
    }

    /// The least round trip that was seen, as far as one was.
    pub(crate) fn round_trip_least(&self) -> Duration {
        self.trip.least().unwrap_or_default()
    }

    /// The answer to a request for a list.
    pub(crate) fn answer_fast(&mut self, vi: u32, word: Word) {
        if let Some(state) = self.vis.get(&vi) {
            self.fast.answer(vi, state.remote, word);
        }
    }

    /// Packets of this VI name a list that is not its own: the peer is told, from time to time.
    pub(crate) fn refuse_list(&mut self, now: Duration, vi: u32, word: Word) {
        if self.vis.contains_key(&vi) && self.fast.note_foreign(now, vi) {
            self.answer_fast(vi, word);
        }
    }

    // ── The end ──────────────────────────────────────────────────────────────────────────────────

    fn drain(&mut self) {
        if self.vis.values().all(|state| state.messages.is_empty()) {
            self.state = State::Closing;
        }
    }

    /// The peer has closed. It repeats that until it is answered; the answer goes out before everything
    /// comes back [W-56].
    fn end_after_answer(&mut self, now: Duration, ending: Ending) {
        let mut answer = Vec::new();
        if self.write_acknowledgement(now, &mut answer).is_some() {
            (self.last_words, self.last_words_wanted) = (answer, true);
        }
        self.end(ending);
    }

    /// Ends it at once, since its key is not accepted any more. The peer is told, and again when it asks.
    pub(crate) fn end_for_key(&mut self, now: Duration) {
        let mut word = Vec::new();
        if self.write_close(now, Reason::KeyRemoved, &mut word).is_some() {
            (self.last_words, self.last_words_wanted) = (word, true);
        }
        self.end(Ending::KeyRemoved);
    }

    /// Ends it without a further packet: what this side would seal, it may have sealed before.
    pub(crate) fn end_restored(&mut self) {
        self.end(Ending::Restored);
        self.last_words = Vec::new();
    }

    /// The word to a caller that there is no room for its session.
    pub(crate) fn refuse(&mut self, now: Duration) -> Option<Vec<u8>> {
        let mut word = Vec::new();
        self.write_close(now, Reason::Full, &mut word)?;
        Some(word)
    }

    fn flush_vi(&mut self, vi: u32, ending: Ending) {
        let Some(state) = self.vis.get_mut(&vi) else { return };
        for message in state.messages.drain(..) {
            let (token, payload) = (message.token, message.payload);
            self.events.push_back(Event::Sent { vi, token, payload, status: Err(ending) });
        }
        let arriving = std::mem::take(&mut state.arriving);
        let places = arriving.into_values().filter_map(|message| message.place).chain(state.places.drain());
        for place in places {
            self.events.push_back(Event::Received {
                vi,
                token: place.token,
                target: place.target,
                length: 0,
                immediate: 0,
                control: Vec::new(),
                payload_token: None,
                status: Err(ending),
            });
        }
    }

    /// Everything comes back, then the end is told [W-29].
    fn end(&mut self, ending: Ending) {
        self.take_ack_left();
        if self.ended().is_some() {
            return;
        }
        self.state = State::Ended(ending);
        let vis: Vec<u32> = self.vis.keys().copied().collect();
        for vi in vis {
            self.flush_vi(vi, ending);
        }
        self.events.push_back(Event::Ended(ending));
    }
}

/// A VI gets its turn if it can send, and is counted if only credit is missing. Called whenever one of that
/// may have changed.
fn line_up<S: Source, T>(vi: u32, state: &mut ViState<S, T>, turns: &mut VecDeque<u32>, blocked: &mut usize) {
    let (can_send, is_blocked) = state.can_send_or_is_blocked();
    if can_send && !state.in_turns {
        state.in_turns = true;
        turns.push_back(vi);
    }
    if is_blocked != state.is_blocked {
        state.is_blocked = is_blocked;
        *blocked = if is_blocked { *blocked + 1 } else { *blocked - 1 };
    }
}

/// A VI whose credit is news is counted. Called whenever that may have changed.
fn count_news<S: Source, T>(state: &mut ViState<S, T>, news: &mut usize) {
    let has_news = state.credit_is_news();
    if has_news != state.has_news {
        state.has_news = has_news;
        *news = if has_news { *news + 1 } else { *news - 1 };
    }
}

/// Whether a message may be sent on a VI with so many already.
fn check_send<S: Source>(
    message: &Outgoing<S>,
    messages: usize,
    messages_max: usize,
    limit: u32,
) -> Result<(), Refusal> {
    if messages >= messages_max {
        return Err(Refusal::Full { limit: messages_max });
    }
    let bytes = message.payload.as_ref().map_or(0, Source::total);
    if bytes > limit as usize {
        return Err(Refusal::TooLong { bytes, limit });
    }
    let limit = usize::from(CONTROL_BYTES_MAX);
    if message.control.len() > limit {
        return Err(Refusal::ControlTooLong { bytes: message.control.len(), limit });
    }
    Ok(())
}

/// Tells of messages that are complete, in order, though a later one may be complete before: an
/// unreliable one when it has left [W-49], any other when it has arrived.
fn complete_sends<S: Source, T>(
    vi: u32,
    state: &mut ViState<S, T>,
    events: &mut VecDeque<Event<S, T>>,
    stats: &mut SessionStats,
) {
    let is_complete = match state.sends {
        Assurance::Unreliable => OutMessage::all_sent,
        Assurance::Reliable => OutMessage::all_arrived,
    };
    while state.messages.front().is_some_and(is_complete) {
        let Some(message) = state.messages.pop_front() else { break };
        state.first_message = state.first_message.wrapping_add(1);
        state.sending = state.sending.saturating_sub(1);
        stats.messages_sent += 1;
        events.push_back(Event::Sent { vi, token: message.token, payload: message.payload, status: Ok(()) });
    }
}

const CREDITS_TOLD: usize = 64;
/// How often the peer is told what this side can take in, though acknowledgements go with data.
const INTAKE_EVERY: Duration = Duration::from_millis(20);
const ASK_AFTER: Duration = Duration::from_millis(50);
/// How much of a late start is made good.
const CATCH_UP: Duration = Duration::from_micros(100);
/// How far one pulse puts off the next.
const AHEAD_MAX: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests;
