//! How much may be on the way, and how fast it is let go.
//!
//! The controller goes by the rate at which data arrives and by the shortest round trip, not by loss:
//! a controller that takes every lost packet for a full queue falls to a tenth of the rate at one per
//! cent loss.
//!
//! ```text
//!  Startup ── the rate has stopped growing ──▶ Drain ── what is on the way fits the path ──▶ Cruise
//!                                                                                            │  ▲
//!                                                        every few round trips: probe up, ───┘  │
//!                                                        drain what that queued ────────────────┘
//! ```

use std::collections::VecDeque;
use std::time::Duration;

/// What an acknowledgement tells a controller.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    /// When it came.
    pub now: Duration,
    /// Bytes newly acknowledged.
    pub bytes: u64,
    /// Bytes acknowledged since the session began, these among them.
    pub delivered: u64,
    /// The same when the packet left that was acknowledged last, and when that was known.
    pub delivered_before: (u64, Duration),
    /// When that packet left.
    pub sent_at: Duration,
    /// When the first packet of that flight left.
    pub flight_began: Duration,
    /// Its round trip.
    pub round_trip: Duration,
    /// The shortest round trip of the session.
    pub round_trip_least: Duration,
    /// Bytes still on the way.
    pub in_flight: u64,
    /// The sender had nothing more to send when the packet left, so the rate says little.
    pub held_back: bool,
}

/// Decides the window and the pace of a session.
pub trait Controller: std::fmt::Debug + Send {
    /// Data arrived.
    fn handle_delivery(&mut self, delivery: &Delivery);
    /// Packets are lost.
    fn handle_loss(&mut self, now: Duration, bytes: u64);
    /// Nothing has arrived for so long that everything on the way may be lost.
    fn handle_silence(&mut self, now: Duration);
    /// Most bytes on the way.
    fn window(&self) -> u64;
    /// Bytes a second, once something is known.
    fn pace(&self) -> Option<u64>;
    /// Packets have so many bytes from now on.
    fn set_packet_bytes(&mut self, bytes: usize);
}

/// By measured rate and shortest round trip.
#[derive(Debug)]
pub struct RateBased {
    mode: Mode,
    /// The best rates of the last rounds, bytes a second, by round, falling.
    rates: VecDeque<(u64, u64)>,
    round: u64,
    /// The round is over when so much was delivered.
    round_ends: u64,
    /// The best rate when it was last seen to grow, and the rounds since.
    plateau: (u64, u32),
    round_trip_least: Duration,
    packet: u64,
    silent: bool,
    /// What window and pace were reckoned from: rate, mode and shortest round trip.
    settled: (Option<u64>, Mode, Duration),
    path_bytes: u64,
    window: u64,
    pace: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Startup,
    Drain,
    /// The step of the cycle, and when it began.
    Cruise(usize, Duration),
}

impl RateBased {
    /// A controller for packets of so many bytes.
    pub fn new(packet_bytes: usize) -> RateBased {
        let mut controller = RateBased {
            mode: Mode::Startup,
            rates: VecDeque::new(),
            round: 0,
            round_ends: 0,
            plateau: (0, 0),
            round_trip_least: Duration::MAX,
            packet: packet_bytes as u64,
            silent: false,
            settled: (None, Mode::Startup, Duration::MAX),
            path_bytes: u64::MAX,
            window: 0,
            pace: None,
        };
        controller.reckon(None);
        controller
    }

    fn rate(&self) -> Option<u64> {
        self.rates.front().map(|(_, rate)| *rate)
    }

    /// Reckons window and pace anew if something has changed that they depend on: they are asked for more
    /// often.
    fn settle(&mut self) {
        let present = (self.rate(), self.mode, self.round_trip_least);
        let before = std::mem::replace(&mut self.settled, present);
        if present != before {
            self.reckon(present.0);
        }
    }

    fn reckon(&mut self, rate: Option<u64>) {
        let Some(rate) = rate else {
            (self.path_bytes, self.pace) = (u64::MAX, None);
            self.window = (WINDOW_PACKETS_FIRST * unit(self.packet)).max(self.window_least());
            return;
        };
        // What fits the path: rate by shortest round trip.
        let least = self.round_trip_least.max(ROUND_TRIP_LEAST);
        self.path_bytes = (rate as f64 * least.as_secs_f64()) as u64;
        // Twice the path: half of it covers acknowledgements that come late and in batches.
        let window = self.path_bytes.saturating_mul(2).saturating_add(WINDOW_PACKETS_SPARE * unit(self.packet));
        self.window = window.max(self.window_least());
        // Before the path is known, the first window goes in a round trip whatever was seen so far.
        let pace_least = match self.mode {
            Mode::Startup => (WINDOW_PACKETS_FIRST * unit(self.packet)) as f64 / self.round_trip_least.as_secs_f64(),
            _ => PACE_LEAST as f64,
        };
        self.pace = Some((rate as f64 * self.gain()).max(pace_least) as u64);
    }

    fn window_least(&self) -> u64 {
        (WINDOW_PACKETS_LEAST * unit(self.packet)).max(LARGE_PACKETS_LEAST * self.packet)
    }

    /// So many bytes arrived within such a time.
    fn note_arrival(&mut self, bytes: u64, interval: Duration, held_back: bool) {
        while self.rates.front().is_some_and(|(round, _)| round + RATE_ROUNDS < self.round) {
            self.rates.pop_front();
        }
        let seconds = interval.as_nanos() as u64 as f64 * 1e-9;
        // A sender that had nothing to send shows less than the path can do.
        if held_back && self.rate().is_none_or(|best| best as f64 * seconds > bytes as f64) {
            return;
        }
        let rate = (bytes as f64 / seconds) as u64;
        while self.rates.back().is_some_and(|(_, earlier)| *earlier <= rate) {
            self.rates.pop_back();
        }
        self.rates.push_back((self.round, rate));
    }

    fn gain(&self) -> f64 {
        match self.mode {
            Mode::Startup => STARTUP_GAIN,
            Mode::Drain => 1.0 / STARTUP_GAIN,
            Mode::Cruise(step, _) => CYCLE[step],
        }
    }

    fn at_end_of_round(&mut self, held_back: bool) {
        if self.mode != Mode::Startup || held_back {
            return;
        }
        let rate = self.rate().unwrap_or(0);
        if rate as f64 >= self.plateau.0 as f64 * GROWTH {
            self.plateau = (rate, 0);
        } else {
            self.plateau.1 += 1;
        }
        if self.plateau.1 >= PLATEAU_ROUNDS {
            self.mode = Mode::Drain;
        }
    }

    fn advance(&mut self, now: Duration, in_flight: u64) {
        let path = self.path_bytes;
        match self.mode {
            Mode::Drain if in_flight <= path => self.mode = Mode::Cruise(CRUISE_FIRST, now),
            Mode::Cruise(step, since) => {
                let long_enough = now.saturating_sub(since) >= self.round_trip_least.max(ROUND_TRIP_LEAST);
                // What the probe queued drains as soon as it is gone, not later.
                let drained = CYCLE[step] < 1.0 && in_flight <= path;
                if long_enough || drained {
                    self.mode = Mode::Cruise((step + 1) % CYCLE.len(), now);
                }
            }
            _ => {}
        }
    }
}

impl Controller for RateBased {
    fn handle_delivery(&mut self, delivery: &Delivery) {
        self.silent = false;
        self.round_trip_least = delivery.round_trip_least;
        let (before, before_at) = delivery.delivered_before;
        let ended = before >= self.round_ends;
        if ended {
            self.round += 1;
            self.round_ends = delivery.delivered;
        }
        // The slower of how fast they left and how fast they were acknowledged: acknowledgements that
        // were held up somewhere come all at once, and say nothing about the path.
        let arrived = delivery.now.saturating_sub(before_at);
        let left = delivery.sent_at.saturating_sub(delivery.flight_began);
        let interval = arrived.max(left);
        if interval >= INTERVAL_LEAST {
            self.note_arrival(delivery.delivered - before, interval, delivery.held_back);
        }
        if ended {
            self.at_end_of_round(delivery.held_back);
        }
        self.settle();
        if self.mode != Mode::Startup {
            self.advance(delivery.now, delivery.in_flight);
            self.settle();
        }
    }

    fn handle_loss(&mut self, _now: Duration, _bytes: u64) {
        // The rate of arrival says it all [W-46].
    }

    fn handle_silence(&mut self, _now: Duration) {
        self.silent = true;
    }

    fn window(&self) -> u64 {
        if self.silent { self.window_least() } else { self.window }
    }

    fn pace(&self) -> Option<u64> {
        self.pace
    }

    fn set_packet_bytes(&mut self, bytes: usize) {
        self.packet = bytes as u64;
        self.reckon(self.settled.0);
    }
}

/// What counts as a packet where a number of them stands for an amount of data. Larger ones are as many packets
/// of an Ethernet: what is handed to a kernel at once, and what its buffers take, is the same number of bytes.
pub(crate) fn unit(packet_bytes: u64) -> u64 {
    packet_bytes.min(UNIT_BYTES_MOST)
}

/// What has become of a session's packets so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fate {
    pub sent: u64,
    /// Given up for lost.
    pub lost: u64,
}

/// How much the peer's receive buffer takes at once. It says how large the buffer is and how many datagrams
/// were dropped for want of room in it. Others may be filling it too, so drops count more than its size; and they
/// may be others' datagrams, so they count only as far as packets of this session were lost meanwhile [W-62].
///
/// ```text
///            drops, and own packets lost: 3/4
///   bytes ◀─────────────────────────────────── wall = bytes before
///     │ below the wall: 1/16 more every 50 ms
///     └ at the wall: 1/16 more after a pause, which each hit doubles and each success halves
/// ```
#[derive(Debug)]
pub(crate) struct Room {
    packet: u64,
    /// Most bytes on the way.
    bytes: u64,
    /// What `bytes` grows back to.
    bytes_most: u64,
    /// What was on the way, at most, when packets were lost last.
    wall: u64,
    overruns: Option<u32>,
    /// The peer reported further drops since `fate`.
    overrun: bool,
    /// The session's own packets, sent and lost, when their loss was last compared with `SUFFERING_PARTS`.
    fate: Fate,
    /// When it was changed last.
    changed: Duration,
    /// How long after that it grows beyond the wall.
    grows_after: Duration,
}

impl Room {
    /// Room for as many packets of so many bytes as anybody likes to send.
    pub(crate) fn new(packet_bytes: usize) -> Room {
        Room {
            packet: packet_bytes as u64,
            bytes: u64::MAX,
            bytes_most: u64::MAX,
            wall: u64::MAX,
            overruns: None,
            overrun: false,
            fate: Fate::default(),
            changed: Duration::ZERO,
            grows_after: ROOM_GROWS_AFTER,
        }
    }

    /// Most bytes on the way.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Packets have so many bytes from now on.
    pub(crate) fn set_packet_bytes(&mut self, bytes: usize) {
        self.packet = bytes as u64;
        self.bytes = self.bytes.max(self.least());
    }

    fn least(&self) -> u64 {
        (ROOM_PACKETS_LEAST * unit(self.packet)).max(LARGE_PACKETS_LEAST * self.packet)
    }

    /// The peer tells of its buffer: its bytes, or 0, and the datagrams dropped so far. `fate` is that of all packets of
    /// the session until now.
    pub(crate) fn handle_report(&mut self, now: Duration, buffer: u32, overruns: u32, fate: Fate) {
        if buffer == 0 {
            return;
        }
        let before = self.overruns.replace(overruns);
        let most = (u64::from(buffer) * ROOM_EIGHTHS / 8).max(self.least());
        if before.is_none() || most != self.bytes_most {
            (self.bytes, self.bytes_most, self.wall, self.changed) = (most, most, most, now);
            (self.overrun, self.fate) = (false, fate);
            return;
        }
        self.overrun |= before != Some(overruns);
        if self.overrun && self.has_suffered(fate) {
            // What was on the way when it was noticed may be dropped as well: that is no further news.
            if now.saturating_sub(self.changed) >= ROOM_SHRINKS_AFTER || self.bytes == most {
                self.wall = self.bytes;
                self.bytes = (self.bytes * 3 / 4).max(self.least());
                self.changed = now;
                self.grows_after = (self.grows_after * 2).min(ROOM_GROWS_AFTER_MOST);
            }
        } else if self.bytes < most {
            let step = most / 16;
            let at_wall = self.bytes + step > self.wall;
            let after = if at_wall { self.grows_after } else { ROOM_GROWS_AFTER };
            if now.saturating_sub(self.changed) >= after {
                self.bytes = (self.bytes + step).min(most);
                self.changed = now;
                if at_wall {
                    self.wall = most;
                    self.grows_after = (self.grows_after / 2).max(ROOM_GROWS_AFTER);
                }
            }
        }
    }

    /// Whether so many of the session's own packets were lost since they were looked at last that a full buffer may be
    /// the cause. Of few packets nothing can be said.
    fn has_suffered(&mut self, fate: Fate) -> bool {
        let (sent, lost) = (fate.sent - self.fate.sent, fate.lost - self.fate.lost);
        if sent < SUFFERING_OF_PACKETS && lost * SUFFERING_PARTS < SUFFERING_OF_PACKETS {
            return false;
        }
        (self.fate, self.overrun) = (fate, false);
        lost * SUFFERING_PARTS >= sent
    }
}

/// 2 / ln 2: doubles the rate each round trip.
const STARTUP_GAIN: f64 = 2.89;
/// The rate must grow by so much in a round, or it has stopped growing.
const GROWTH: f64 = 1.25;
const PLATEAU_ROUNDS: u32 = 3;
/// How long the best rate is remembered.
const RATE_ROUNDS: u64 = 10;
/// Probe up for a round trip, drain what that queued, cruise.
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
const CRUISE_FIRST: usize = 2;
const WINDOW_PACKETS_LEAST: u64 = 4;
const WINDOW_PACKETS_FIRST: u64 = 64;
/// A batch of segments on each side, and an acknowledgement for each.
const WINDOW_PACKETS_SPARE: u64 = 192;
/// One that arrives, and one that is on its way meanwhile.
const LARGE_PACKETS_LEAST: u64 = 2;
const UNIT_BYTES_MOST: u64 = 1472;
const PACE_LEAST: u64 = 64 << 10;
/// Between two threads of one machine a round trip is measured shorter than a batch takes.
const ROUND_TRIP_LEAST: Duration = Duration::from_micros(50);
const INTERVAL_LEAST: Duration = Duration::from_micros(5);
/// Of the peer's buffer as its kernel counts: the bookkeeping of packets that are not put together takes
/// some, and a quarter is given back only after it was read.
const ROOM_EIGHTHS: u64 = 5;
const ROOM_PACKETS_LEAST: u64 = 16;
const ROOM_SHRINKS_AFTER: Duration = Duration::from_millis(1);
const ROOM_GROWS_AFTER: Duration = Duration::from_millis(50);
const ROOM_GROWS_AFTER_MOST: Duration = Duration::from_secs(2);
/// A pulse that is too large for the buffer loses more than this part of it; a path that loses less than that is not
/// slower for it.
const SUFFERING_PARTS: u64 = 16;
/// So many packets are looked at together.
const SUFFERING_OF_PACKETS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// A path of so many bytes a second and such a delay, driven packet by packet; tells the rate that
    /// arrives and the longest queue, in its second half.
    fn drive(bytes_per_second: u64, delay: Duration, loss_every: Option<u64>, seconds: f64) -> (f64, u64) {
        const PACKET: u64 = 1408;
        let mut controller = RateBased::new(PACKET as usize);
        let mut on_the_way: VecDeque<(Duration, Duration, (u64, Duration), bool)> = VecDeque::new();
        let (mut now, mut delivered, mut delivered_at) = (Duration::ZERO, 0u64, Duration::ZERO);
        let (mut free_at, mut next_send, mut sent, mut queue_max) = (Duration::ZERO, Duration::ZERO, 0u64, 0);
        let (mut arrived_late, end) = (0u64, Duration::from_secs_f64(seconds));
        while now < end {
            let in_flight = on_the_way.len() as u64 * PACKET;
            if in_flight + PACKET <= controller.window() && next_send <= now {
                sent += 1;
                let lost = loss_every.is_some_and(|every| sent.is_multiple_of(every));
                let start = free_at.max(now);
                free_at = start + Duration::from_secs_f64(PACKET as f64 / bytes_per_second as f64);
                queue_max = queue_max.max((start - now).as_micros() as u64);
                on_the_way.push_back((now, free_at + delay, (delivered, delivered_at), lost));
                if let Some(pace) = controller.pace() {
                    next_send = next_send.max(now) + Duration::from_secs_f64(PACKET as f64 / pace as f64);
                }
                continue;
            }
            let acknowledged = on_the_way.front().map(|packet| packet.1);
            let step = match (acknowledged, in_flight + PACKET <= controller.window()) {
                (Some(at), true) => at.min(next_send),
                (Some(at), false) => at,
                (None, _) => next_send,
            };
            now = now.max(step);
            if acknowledged.is_some_and(|at| at <= now)
                && let Some((sent_at, _, before, lost)) = on_the_way.pop_front()
            {
                if lost {
                    controller.handle_loss(now, PACKET);
                    continue;
                }
                (delivered, delivered_at) = (delivered + PACKET, now);
                if now > end / 2 {
                    arrived_late += PACKET;
                }
                controller.handle_delivery(&Delivery {
                    now,
                    bytes: PACKET,
                    delivered,
                    delivered_before: before,
                    sent_at,
                    flight_began: before.1,
                    round_trip: now - sent_at,
                    round_trip_least: delay + Duration::from_secs_f64(PACKET as f64 / bytes_per_second as f64),
                    in_flight: on_the_way.len() as u64 * PACKET,
                    held_back: false,
                });
            }
        }
        (arrived_late as f64 / (seconds / 2.0), queue_max)
    }

    #[test]
    fn it_finds_the_rate_of_the_path() {
        for (rate, delay_ms) in [(1_000_000u64, 20), (12_500_000, 10), (125_000_000, 1)] {
            let (arrived, _) = drive(rate, Duration::from_millis(delay_ms), None, 3.0);
            assert!(arrived > 0.85 * rate as f64, "{arrived} of {rate} bytes a second");
        }
    }

    #[test]
    fn one_per_cent_of_loss_costs_little() {
        let rate = 12_500_000;
        let (arrived, _) = drive(rate, Duration::from_millis(10), Some(100), 3.0);
        assert!(arrived > 0.8 * rate as f64, "{arrived} of {rate} bytes a second");
    }

    const MS: Duration = Duration::from_millis(1);

    /// A room that was told of a buffer, and reports about it: so many more drops, of so many more packets so many lost.
    struct Told {
        room: Room,
        now: Duration,
        overruns: u32,
        fate: Fate,
    }

    impl Told {
        fn new() -> Told {
            let mut told = Told { room: Room::new(1472), now: MS, overruns: 7, fate: Fate::default() };
            told.room.handle_report(MS, 0, 7, told.fate);
            assert_eq!(told.room.bytes(), u64::MAX, "nothing is known of the buffer");
            assert_eq!(told.report(0, 0, 0), 250_000, "what was dropped before is nobody's news");
            told
        }

        fn report(&mut self, drops: u32, sent: u64, lost: u64) -> u64 {
            self.now += 2 * MS;
            self.overruns += drops;
            self.fate = Fate { sent: self.fate.sent + sent, lost: self.fate.lost + lost };
            self.room.handle_report(self.now, 400_000, self.overruns, self.fate);
            self.room.bytes()
        }
    }

    #[test]
    fn a_full_buffer_takes_less_at_once_and_more_again_later() {
        let mut told = Told::new();
        assert_eq!(told.report(2, 100, 10), 187_500);
        told.now -= 2 * MS - MS / 2;
        assert_eq!(told.report(1, 100, 10), 187_500, "dropped by the same pulse");
        assert_eq!(told.report(1, 100, 10), 140_625);
        for _ in 0..99 {
            told.report(1, 100, 10);
        }
        assert_eq!(told.room.bytes(), ROOM_PACKETS_LEAST * 1472);
        let since = told.now;
        while told.room.bytes() < 250_000 {
            told.report(0, 100, 0);
        }
        assert!(told.now - since < Duration::from_secs(4), "it took {:?}", told.now - since);
    }

    #[test]
    fn what_others_lose_takes_nothing() {
        let mut told = Told::new();
        // Junk without end, and a path that loses one of fifty by itself.
        for _ in 0..10_000 {
            told.report(100, 50, 1);
        }
        assert_eq!(told.room.bytes(), 250_000);
        assert_eq!(told.report(100, 50, 25), 187_500, "but this side's own packets count");
    }

    #[test]
    fn a_wall_is_met_less_and_less_often() {
        // A buffer that takes 150,000 bytes and loses a quarter of what is more.
        let mut told = Told::new();
        let mut hits = Vec::new();
        for _ in 0..20_000 {
            let lost = if told.room.bytes() > 150_000 { 25 } else { 0 };
            let before = told.room.bytes();
            if told.report(lost as u32, 100, lost) < before {
                hits.push(told.now);
            }
        }
        assert!(hits.len() < 60, "{} times in 40 s", hits.len());
        let used = hits.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert!(used.is_some_and(|longest| longest < Duration::from_secs(6)), "and tried again: {used:?}");
    }

    #[test]
    fn after_silence_only_little_is_let_go() {
        let mut controller = RateBased::new(1408);
        assert_eq!(controller.window(), WINDOW_PACKETS_FIRST * 1408);
        controller.handle_silence(Duration::from_secs(1));
        assert_eq!(controller.window(), WINDOW_PACKETS_LEAST * 1408);
    }
}
