//! Many threads, many VIs, one pair of regions: what comes and goes disturbs nobody.

use crate::support::seeded::{Seeded, bytes, verify};
use crate::support::{Line, PATIENCE, Stage, buffer, open_descriptors, until};
use highwire_vi::{Failure, Message, Nic, Operation, Path, Receive, ViListener, ViOptions};
use std::sync::atomic::{AtomicUsize, Ordering};

const THREADS: u64 = 4;
const LARGEST: usize = 120_000;

/// Connects again and again; each time some messages go out, and must come back the same.
fn call_again_and_again(nic: &Nic, seed: u64, rounds: u64) {
    let mut seeded = Seeded::from(seed);
    for round in 0..rounds {
        let queue = nic.completion_queue().unwrap();
        // On the Nic's own queue, or on a new one whose page has to be handed over first.
        let options = if seeded.once_in(3) { ViOptions::new().queue(&queue) } else { ViOptions::new() };
        let mut line = Line::connect_with(nic, "shm:churn", &options);
        let region = nic.register(LARGEST).unwrap();
        for number in 0..seeded.below(6) as u64 {
            let seed = seed ^ round << 20 ^ number;
            let most = *seeded.pick(&[200, 3000, 30_000, LARGEST]);
            let size = seeded.below(most);
            let mut payload = region.slice(0..size).unwrap();
            payload.copy_from_slice(&bytes(seed, size));
            let path = *seeded.pick(&[Path::Choose, Path::Buffered, Path::Referenced]);
            line.vi.post_recv(Receive::new(number).into(buffer(nic, size))).unwrap();
            line.vi.post_send(Message::new(number).payload(payload).by(path)).unwrap();
            verify(seed, &line.received().into_buffer().unwrap());
            line.sent();
        }
        match seeded.below(3) {
            0 => drop(line),
            1 => line.vi.disconnect(PATIENCE).unwrap(),
            _ => {
                // In the middle of something.
                let _ = line.vi.post_send(Message::new(0).payload(buffer(nic, 300)).by(Path::Referenced));
            }
        }
    }
}

/// Answers whoever comes with what they sent, until `left` have come and gone.
fn answer_all(nic: &Nic, listener: &ViListener, left: &AtomicUsize) {
    while left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
        let mut line = Line::accept(listener);
        let mut place = Some(buffer(nic, LARGEST));
        loop {
            if let Some(mut place) = place.take() {
                place.set_len(LARGEST);
                if line.vi.post_recv(Receive::new(0).into(place)).is_err() {
                    break;
                }
            }
            let done = line.vi.wait(PATIENCE);
            match done {
                Ok(done) if done.operation == Operation::Send => place = done.into_buffer(),
                Ok(done) if done.status.is_ok() => {
                    let length = done.length;
                    let mut payload = done.into_buffer().unwrap();
                    payload.set_len(length);
                    if line.vi.post_send(Message::new(1).payload(payload)).is_err() {
                        break;
                    }
                }
                Ok(done) => {
                    let expected = matches!(done.status, Err(Failure::PeerClosed | Failure::PeerAborted));
                    assert!(expected, "{:?}", done.status);
                    break;
                }
                Err(_) => break,
            }
        }
    }
}

#[test]
fn vis_that_come_and_go_on_many_threads_disturb_nobody() {
    const ROUNDS: u64 = 60;
    let stage = Stage::open();
    stage.role("callers", |stage| {
        let seed: u64 = stage.argument().parse().unwrap();
        let nic = stage.nic();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let nic = &nic;
                scope.spawn(move || call_again_and_again(nic, seed ^ thread << 56, ROUNDS));
            }
        });
    });
    let seeded = Seeded::fresh();
    let nic = stage.nic();
    let listener = nic.listen("shm:churn").unwrap();
    let before = open_descriptors();
    let callers = stage.start_with("callers", &seeded.seed().to_string());
    let left = AtomicUsize::new((THREADS * ROUNDS) as usize);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| answer_all(&nic, &listener, &left));
        }
    });
    callers.finish();
    // The Nic keeps the doorbell page of its own queue, with its wire and its ears.
    until("the descriptors are closed", || open_descriptors() <= before + 3);
}

#[test]
fn a_region_handed_over_for_one_vi_serves_all_others_at_once() {
    // Threads refer to the same new regions at the same moment: whoever comes second must not be
    // faster than the descriptor.
    const REGIONS: usize = 60;
    let stage = Stage::open();
    stage.role("readers", |stage| {
        let nic = stage.nic();
        let lines: Vec<Line> = (0..THREADS).map(|_| Line::connect(&nic, "shm:regions")).collect();
        std::thread::scope(|scope| {
            for mut line in lines {
                let nic = &nic;
                scope.spawn(move || {
                    for number in 0..REGIONS as u64 {
                        line.vi.post_recv(Receive::new(number).into(buffer(nic, 5000))).unwrap();
                        verify(number, &line.received().into_buffer().unwrap());
                    }
                    assert_eq!(line.end().0, Failure::PeerClosed);
                });
            }
        });
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:regions").unwrap();
    let readers = stage.start("readers");
    let lines: Vec<Line> = (0..THREADS).map(|_| Line::accept(&listener)).collect();
    let shared: Vec<_> = (0..REGIONS as u64)
        .map(|number| {
            let mut whole = buffer(&nic, 5000);
            whole.copy_from_slice(&bytes(number, 5000));
            whole.share()
        })
        .collect();
    std::thread::scope(|scope| {
        for mut line in lines {
            let shared = &shared;
            scope.spawn(move || {
                for (number, buffer) in shared.iter().enumerate() {
                    let message = Message::new(number as u64).shared(buffer.clone()).by(Path::Referenced);
                    line.vi.post_send(message).unwrap();
                }
                (0..REGIONS).for_each(|_| drop(line.sent()));
                line.vi.disconnect(PATIENCE).unwrap();
            });
        }
    });
    readers.finish();
}

#[test]
fn one_thread_closes_while_others_of_the_same_pair_go_on() {
    let stage = Stage::open();
    stage.role("other", |stage| {
        let nic = stage.nic();
        let mut steady = Line::connect(&nic, "shm:steady");
        let closing = std::thread::spawn(move || {
            for _ in 0..100 {
                drop(Line::connect(&nic, "shm:closing"));
            }
            nic
        });
        for round in 0..3000u64 {
            steady.vi.post_recv(Receive::new(round)).unwrap();
            steady.vi.post_send(Message::new(round).immediate(round as u32)).unwrap();
            assert_eq!(steady.received().immediate, round as u32);
            steady.sent();
        }
        drop(closing.join().unwrap());
    });
    let nic = stage.nic();
    let (steady, closing) = (nic.listen("shm:steady").unwrap(), nic.listen("shm:closing").unwrap());
    let other = stage.start("other");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut line = Line::accept(&steady);
            for round in 0..3000u64 {
                line.vi.post_recv(Receive::new(round)).unwrap();
                let immediate = line.received().immediate;
                line.vi.post_send(Message::new(round).immediate(immediate)).unwrap();
                line.sent();
            }
            line.end();
        });
        scope.spawn(|| {
            for _ in 0..100 {
                assert_eq!(Line::accept(&closing).end().0, Failure::PeerClosed);
            }
        });
    });
    other.finish();
}
