//! Steps of both ends in an order that a seed decides.

use super::*;
use crate::layout::{AREA_BYTES, AREAS_AT, CONTROL_BYTES, CONTROLS_AT, KNOWN_AT, TCP_WRITTEN_AT};
use crate::{EndState, Lane, LaneRegion, RECORD_MAX, REGION_BYTES};
use std::collections::VecDeque;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 32)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

fn region() -> SharedMemory {
    SharedMemory::create(REGION_BYTES).unwrap().0
}

fn lane(memory: &SharedMemory, spare: u64) -> Lane<'_> {
    LaneRegion::prepare(memory, spare).lane(3).unwrap()
}

/// The stream, its TCP connection and how much of what went which way.
#[derive(Default)]
struct Stream {
    tcp: VecDeque<u8>,
    written: u64,
    read: u64,
    by_lane: u64,
    by_tcp: u64,
    full: u64,
}

impl Stream {
    /// What a writing program's call does: as much by the lane as goes, the rest by TCP.
    fn write(&mut self, out: Outgoing<'_>, len: usize, corked: bool) {
        let end = self.written + len as u64;
        while !corked && self.written < end {
            let piece = (end - self.written).min(RECORD_MAX as u64) as usize;
            match publish(out, self.written, piece) {
                Published::Done(_) => {
                    self.written += piece as u64;
                    self.by_lane += piece as u64;
                }
                Published::Full => {
                    self.full += 1;
                    break;
                }
                Published::NotLooked => break,
                Published::Lie => panic!("nobody lied"),
            }
        }
        let rest = end - self.written;
        self.tcp.extend((self.written..end).map(byte));
        self.written = end;
        self.by_tcp += rest;
        if rest > 0 {
            out.sent_by_tcp(rest);
        }
    }

    fn read_tcp(&mut self, from: Incoming<'_>, most: u64) -> u64 {
        let bytes = most.min(self.tcp.len() as u64);
        for found in self.tcp.drain(..bytes as usize) {
            assert_eq!(found, byte(self.read), "byte {} of the stream", self.read);
            self.read += 1;
        }
        from.read_by_tcp(bytes);
        bytes
    }

    /// What a reading program's call does; returns the bytes that it got.
    fn read(&mut self, from: Incoming<'_>, most: u64) -> u64 {
        let begin = self.read;
        while self.read - begin < most {
            let left = most - (self.read - begin);
            match from.next() {
                Next::Record(record) => self.read += take(from, record, self.read, left as usize),
                Next::Tcp(bound) => {
                    assert!(self.read_tcp(from, left.min(bound)) > 0, "announced bytes are there");
                }
                Next::Nothing => break,
                Next::Lie => panic!("nobody lied"),
            }
        }
        self.read - begin
    }
}

fn run(seed: u64) -> Stream {
    let memory = region();
    let spare = [0, 64 << 10, 16 << 20][seed as usize % 3];
    let lane = lane(&memory, spare);
    let (out, from) = (lane.outgoing(Side::First), lane.incoming(Side::Second));
    // As for a connection that was used before.
    let before = seed.wrapping_mul(977) % 100_000;
    assert!(out.adopt_tcp(0, before) && from.adopt_tcp(0, before));
    let mut random = Random(seed);
    let mut stream = Stream::default();
    let largest = [100, 5_000, 200_000][random.below(3) as usize];
    for _ in 0..600 {
        match random.below(10) {
            0..4 => {
                let len = 1 + random.below(largest) as usize;
                let corked = random.below(8) == 0;
                stream.write(out, len, corked);
            }
            4..8 => {
                let most = 1 + random.below(2 * largest);
                stream.read(from, most);
            }
            8 => drop(from.look()),
            // About to sleep: only with everything seen.
            _ => match random.below(3) {
                0 => out.turn_away(),
                1 => from.turn_away(),
                _ => {
                    let seen = from.published();
                    if random.below(2) == 0 {
                        stream.write(out, 10, false);
                    }
                    let asleep = from.stop_looking(seen);
                    assert_eq!(asleep, from.published() == seen);
                    assert!(!asleep || !from.is_looking());
                }
            },
        }
        assert!(stream.written - stream.read == waiting(from, &stream), "unread bytes are counted");
    }
    while stream.read(from, 1 << 20) > 0 {}
    assert_eq!(stream.read, stream.written, "nothing is lost");
    assert!(stream.tcp.is_empty());
    stream
}

fn waiting(from: Incoming<'_>, stream: &Stream) -> u64 {
    from.waiting().map(|(_, record)| record.left() as u64).sum::<u64>() + stream.tcp.len() as u64
}

#[test]
fn every_byte_arrives_once_and_in_order_for_any_order_of_steps() {
    let (mut by_lane, mut by_tcp, mut full) = (0, 0, 0);
    // Slow where nothing is optimized.
    let seeds = if cfg!(debug_assertions) { 60 } else { 1_500 };
    for seed in 0..seeds {
        let stream = std::panic::catch_unwind(|| run(seed)).unwrap_or_else(|_| panic!("failed with seed {seed}"));
        by_lane += stream.by_lane;
        by_tcp += stream.by_tcp;
        full += stream.full;
    }
    assert!(
        by_lane > 1 << 20 && by_tcp > 1 << 20 && full > seeds / 2,
        "{by_lane} {by_tcp} {full}: all ways were taken"
    );
}

#[test]
fn a_lane_grows_while_it_is_found_full_and_no_further_than_allowed() {
    for (spare, expected) in [(0, 64 << 10), (64 << 10, 128 << 10), (1 << 20, 1 << 20)] {
        let memory = region();
        let lane = lane(&memory, spare);
        let (out, from) = (lane.outgoing(Side::First), lane.incoming(Side::Second));
        from.look();
        let mut stream = Stream::default();
        for _ in 0..200 {
            stream.write(out, RECORD_MAX, false);
            stream.write(out, RECORD_MAX, false);
            stream.read(from, RECORD_MAX as u64);
        }
        assert_eq!(lane.bytes(), expected + crate::CAPACITY_LEAST);
        while stream.read(from, 1 << 20) > 0 {}
        assert_eq!(stream.read, stream.written);
    }
}

#[test]
fn another_holder_goes_on_where_the_first_stopped() {
    let memory = region();
    let first = lane(&memory, 0);
    first.incoming(Side::Second).look();
    let mut stream = Stream::default();
    for _ in 0..100 {
        stream.write(first.outgoing(Side::First), 3_000, false);
        // A view of its own, as a forked child has.
        let child = LaneRegion::adopt(&memory).unwrap().lane(3).unwrap();
        stream.read(child.incoming(Side::Second), 1_000);
        stream.write(child.outgoing(Side::First), 10, false);
        stream.read(first.incoming(Side::Second), 3_000);
    }
    while stream.read(first.incoming(Side::Second), 1 << 20) > 0 {}
    assert_eq!(stream.read, stream.written);
}

#[test]
fn words_that_cannot_be_true_are_lies_and_nothing_worse() {
    let mut random = Random(7);
    let mut lies = 0;
    for _ in 0..300 {
        let memory = region();
        let lane = lane(&memory, 1 << 20);
        let (out, from) = (lane.outgoing(Side::First), lane.incoming(Side::Second));
        from.look();
        let mut stream = Stream::default();
        stream.write(out, 40_000, false);
        // The whole control page and the beginnings of records.
        for _ in 0..40 {
            let at = match random.below(3) {
                0 => (CONTROLS_AT + 3 * CONTROL_BYTES) as u64 + random.below(CONTROL_BYTES as u64 / 8) * 8,
                1 => (AREAS_AT + 6 * AREA_BYTES) as u64 + random.below(700) * 64,
                _ => 64,
            } as usize;
            let value = if random.below(2) == 0 { random.next() } else { random.below(70_000) };
            memory.store64(at, value);
        }
        for _ in 0..50 {
            lies += u32::from(publish(out, 0, 1 + random.below(RECORD_MAX as u64) as usize) == Published::Lie);
            match from.next() {
                Next::Record(record) => {
                    let mut bytes = vec![0; record.left()];
                    from.take(record, 1 << 20, true, |memory, at, _| memory.copy_out(at, &mut bytes));
                }
                Next::Lie => lies += 1,
                Next::Tcp(_) | Next::Nothing => {}
            }
            from.waiting().for_each(drop);
            let _ = (lane.bytes(), out.unread(), from.has_news());
        }
    }
    assert!(lies > 100, "{lies}");
}

#[test]
fn counts_at_their_highest_go_on_counting() {
    let memory = region();
    let lane = lane(&memory, 0);
    let (out, from) = (lane.outgoing(Side::First), lane.incoming(Side::Second));
    let control = CONTROLS_AT + 3 * CONTROL_BYTES;
    // Looking, all the sleepers, sends and records that can be told, and as many bytes by TCP.
    memory.store64(control, u64::MAX);
    memory.store64(control + TCP_WRITTEN_AT, u64::MAX);
    memory.store64(control + KNOWN_AT, (u64::MAX >> 32) << 32);
    assert_eq!(publish(out, 0, 4), Published::Done(4));
    assert_eq!(memory.load64(control), u64::MAX << 32);
    out.sent_by_tcp(2);
    assert_eq!(out.tcp_written(), 1);
    assert!(from.sleep(from.published()) && !from.is_looking(), "one sleeper more is not *looking*");
    from.wake();
    assert!(!from.is_looking());
}

#[test]
fn what_a_lane_grew_by_is_not_lost_with_a_record_that_is_not_published() {
    let memory = region();
    let lane = lane(&memory, 1 << 20);
    let (out, from) = (lane.outgoing(Side::First), lane.incoming(Side::Second));
    from.look();
    while publish(out, 0, RECORD_MAX) == Published::Done(RECORD_MAX) && from.published() < 3 {}
    assert_eq!(lane.bytes(), 2 * crate::CAPACITY_LEAST, "the next one does not fit");
    for _ in 0..20 {
        from.look();
        let refused = out.publish(RECORD_MAX, |_, _| {
            from.turn_away();
            RECORD_MAX
        });
        assert_eq!(refused, Published::NotLooked);
        let grown = lane.bytes() - 2 * crate::CAPACITY_LEAST;
        assert_eq!(LaneRegion::adopt(&memory).unwrap().spare() + grown as u64, 1 << 20);
    }
}

#[test]
fn holders_come_and_go() {
    let memory = region();
    let holders = lane(&memory, 0).holders(Side::First);
    assert!(holders.add(10) && holders.add(10) && holders.add(11));
    assert_eq!(holders.others(10).collect::<Vec<_>>(), [11]);
    assert!(holders.replace(11, 12));
    holders.remove(10);
    assert_eq!(holders.others(0).collect::<Vec<_>>(), [12]);
    assert!((20..27).all(|process| holders.add(process)));
    assert!(!holders.add(30), "no room");
    assert_eq!(lane(&memory, 0).state(Side::First), EndState::Empty);
}
