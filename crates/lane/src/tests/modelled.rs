//! Every interleaving of publish, look, sleep, close and death, for a writer and a reader that sleeps in a modelled
//! kernel.

use super::*;
use crate::layout::{
    AREAS_AT, CLOSING_AT, CONTROLS_AT, KNOWN_AT, LaneRegion, PLACES_AT, PROGRESS_AT, READER_CPU_AT, READER_LOCK_AT,
    SENDING_AT, TCP_HINT_AT, TCP_READ_AT, TCP_WRITTEN_AT, WORD_AT, WRITER_CPU_AT, WRITER_LOCK_AT,
};
use loom::sync::{Arc, Condvar, Mutex};
use std::collections::VecDeque;

/// The kernel's half: a queue of bytes, and whether the writer's end is closed.
struct Kernel {
    queue: Mutex<(VecDeque<u8>, bool)>,
    changed: Condvar,
}

impl Kernel {
    fn send(&self, bytes: impl Iterator<Item = u8>) {
        self.queue.lock().unwrap().0.extend(bytes);
        self.changed.notify_all();
    }

    fn close(&self) {
        self.queue.lock().unwrap().1 = true;
        self.changed.notify_all();
    }

    /// A blocking receive; `None` at the end. One that nobody wakes is a deadlock, which loom reports.
    fn receive(&self, most: usize) -> Option<Vec<u8>> {
        let mut queue = self.queue.lock().unwrap();
        while queue.0.is_empty() && !queue.1 {
            queue = self.changed.wait(queue).unwrap();
        }
        let bytes = most.min(queue.0.len());
        (bytes > 0).then(|| queue.0.drain(..bytes).collect())
    }
}

fn memory() -> SharedMemory {
    let (control, area) = (CONTROLS_AT, AREAS_AT);
    let narrow: Vec<usize> = [CLOSING_AT, WRITER_CPU_AT, SENDING_AT, READER_CPU_AT, READER_LOCK_AT, WRITER_LOCK_AT]
        .iter()
        .map(|at| control + at)
        .chain((0..4).map(|record| area + record * 64 + 8))
        .collect();
    let wide: Vec<usize> =
        [WORD_AT, TCP_HINT_AT, PROGRESS_AT, TCP_READ_AT, TCP_WRITTEN_AT, PLACES_AT, PLACES_AT + 8, KNOWN_AT]
            .iter()
            .map(|at| control + at)
            .chain([0, 64])
            .chain((0..4).map(|record| area + record * 64))
            .collect();
    let copied: Vec<usize> = (0..4).map(|record| area + record * 64 + 16).collect();
    SharedMemory::modelled(crate::REGION_BYTES, &narrow, &wide, &copied)
}

/// The writer writes so many records of four bytes and closes, or dies without a word; the reader reads to the end.
fn model(records: u64, announces: bool, looks_first: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let memory = Arc::new(memory());
        LaneRegion::prepare(&memory, 0);
        let kernel = Arc::new(Kernel { queue: Mutex::default(), changed: Condvar::new() });
        let writer = {
            let (memory, kernel) = (memory.clone(), kernel.clone());
            loom::thread::spawn(move || {
                let out = LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().outgoing(Side::First);
                for record in 0..records {
                    if publish(out, record * 4, 4) != Published::Done(4) {
                        kernel.send((record * 4..record * 4 + 4).map(byte));
                        out.sent_by_tcp(4);
                    }
                }
                if announces {
                    out.announce_closing();
                }
                // As the kernel does for a process that is dead.
                kernel.close();
            })
        };
        let from = LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().incoming(Side::Second);
        let mut read = 0;
        if looks_first {
            from.look();
        }
        loop {
            let mut asleep = false;
            let seen = from.published();
            let bound = match from.next() {
                Next::Record(record) => {
                    read += take(from, record, read, 4);
                    continue;
                }
                Next::Tcp(bound) => bound as usize,
                Next::Nothing => {
                    // About to sleep.
                    if !from.sleep(seen) {
                        continue;
                    }
                    asleep = true;
                    usize::MAX
                }
                Next::Lie => panic!("nobody lied"),
            };
            let Some(bytes) = kernel.receive(bound) else {
                assert!(!from.has_records(), "what went by the lane comes before the end");
                break;
            };
            for found in &bytes {
                assert_eq!(*found, byte(read));
                read += 1;
            }
            from.read_by_tcp(bytes.len() as u64);
            if asleep {
                from.wake();
            }
            from.look();
        }
        assert_eq!(read, records * 4, "everything written before the end arrives");
        writer.join().unwrap();
    });
}

#[test]
fn a_sleeper_is_always_woken_and_the_stream_is_in_order() {
    model(2, true, true);
    model(2, true, false);
}

#[test]
fn a_writer_that_dies_leaves_what_it_wrote_and_then_the_end() {
    model(2, false, true);
}

/// A handler of a signal writes while the thread that it interrupted is publishing: it turns the reader away, so that the
/// interrupted publication fails and follows by TCP.
#[test]
fn one_that_is_turned_away_publishes_nothing() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let memory = Arc::new(memory());
        LaneRegion::prepare(&memory, 0);
        let handler = {
            let memory = memory.clone();
            loom::thread::spawn(move || {
                LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().outgoing(Side::First).turn_away();
            })
        };
        let lane = LaneRegion::adopt(&memory).unwrap().lane(0).unwrap();
        let (out, from) = (lane.outgoing(Side::First), lane.incoming(Side::Second));
        from.look();
        let published = publish(out, 0, 4) == Published::Done(4);
        handler.join().unwrap();
        assert_eq!(from.has_records(), published);
    });
}

/// Two threads of the writer, one by TCP and one by the lane: no record says that it comes before bytes that the
/// reader has read already.
#[test]
fn a_record_never_comes_before_bytes_that_were_read() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let memory = Arc::new(memory());
        LaneRegion::prepare(&memory, 0);
        let kernel = Arc::new(Kernel { queue: Mutex::default(), changed: Condvar::new() });
        let by_tcp = {
            let (memory, kernel) = (memory.clone(), kernel.clone());
            loom::thread::spawn(move || {
                let out = LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().outgoing(Side::First);
                out.begin_tcp();
                kernel.send([1; 4].into_iter());
                out.sent_by_tcp(4);
                out.end_tcp();
            })
        };
        let by_lane = {
            let memory = memory.clone();
            loom::thread::spawn(move || {
                publish(LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().outgoing(Side::First), 0, 4)
            })
        };
        let from = LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().incoming(Side::Second);
        // Reads all of TCP, blind, and looks then.
        let bytes = kernel.receive(8).unwrap();
        from.read_by_tcp(bytes.len() as u64);
        from.look();
        let published = by_lane.join().unwrap() == Published::Done(4);
        by_tcp.join().unwrap();
        match from.next() {
            Next::Record(_) => assert!(published),
            Next::Nothing => assert!(!published),
            other => panic!("{other:?}"),
        }
    });
}

/// A second thread of the reader takes what it finds and looks again, whenever it can, while the first one sleeps: what
/// is published then is never behind the sleeper's back.
#[test]
fn nobody_looks_behind_the_back_of_a_sleeper() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let memory = Arc::new(memory());
        LaneRegion::prepare(&memory, 0);
        let other = {
            let memory = memory.clone();
            loom::thread::spawn(move || {
                LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().incoming(Side::Second).look()
            })
        };
        let writer = {
            let memory = memory.clone();
            loom::thread::spawn(move || {
                publish(LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().outgoing(Side::First), 0, 4)
            })
        };
        let from = LaneRegion::adopt(&memory).unwrap().lane(0).unwrap().incoming(Side::Second);
        let seen = from.published();
        if from.sleep(seen) {
            assert!(!from.is_looking() && from.published() == seen);
            let looked = other.join().unwrap();
            assert!(!(looked && from.is_looking()), "nobody begins to look while one sleeps");
            writer.join().unwrap();
            assert_eq!(from.published(), seen, "nothing is published while one sleeps");
            from.wake();
        } else {
            other.join().unwrap();
            assert_eq!(writer.join().unwrap(), Published::Done(4));
        }
    });
}
