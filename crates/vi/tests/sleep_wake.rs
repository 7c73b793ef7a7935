//! Nobody sleeps through a message, a release or a death, however the two sides fall asleep and
//! wake. The quick runs are part of the suite; `HIGHWIRE_SOAK=1` makes them a million rounds.

use crate::support::seeded::Seeded;
use crate::support::{Line, PATIENCE, Stage, buffer, cpu_time};
use highwire_vi::{CompletionQueue, Message, Nic, Operation, Path, PayloadToken, Receive, Reliability, ViOptions};
use std::time::{Duration, Instant};

/// Rounds of a quick run, unless a long one is asked for.
fn rounds(quick: u64) -> u64 {
    if std::env::var_os("HIGHWIRE_SOAK").is_some() { quick.max(1_000_000) } else { quick }
}

fn limit() -> Duration {
    if std::env::var_os("HIGHWIRE_SOAK").is_some() { Duration::from_secs(3600) } else { Duration::from_secs(100) }
}

/// Pauses of every length that matters: none, less than a wake-up takes, about as long as one
/// spins, and long enough to sleep.
fn pause(seeded: &mut Seeded) {
    let nanoseconds = match seeded.below(40) {
        0..20 => return,
        20..30 => seeded.below(2_000),
        30..38 => seeded.below(30_000),
        38 => 30_000 + seeded.below(60_000),
        _ => {
            std::thread::sleep(Duration::from_nanos(seeded.below(80_000) as u64));
            return;
        }
    };
    let start = Instant::now();
    while start.elapsed() < Duration::from_nanos(nanoseconds as u64) {
        std::hint::spin_loop();
    }
}

/// How a side waits for its next message.
#[derive(Clone, Copy)]
enum Waiting {
    Vi,
    Queue,
    Descriptor,
}

fn wait_by(way: Waiting, queue: &mut CompletionQueue, line: &mut Line) {
    match way {
        Waiting::Vi => {}
        Waiting::Queue => {
            queue.wait(PATIENCE).expect("a lost wake-up");
        }
        Waiting::Descriptor => {
            while let highwire_vi::Armed::Waiting = queue.arm() {
                let descriptor = queue.descriptor().unwrap();
                let mut polled = [rustix::event::PollFd::from_borrowed_fd(descriptor, rustix::event::PollFlags::IN)];
                let timeout = rustix::time::Timespec::try_from(PATIENCE).unwrap();
                assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(1), "a lost wake-up");
                queue.disarm();
            }
            queue.disarm();
        }
    }
    let done = line.vi.wait(PATIENCE).expect("a lost wake-up");
    assert_eq!(done.status, Ok(()));
    line.keep(done);
}

/// A ball goes to and fro, held for a random time by each side; `first` serves.
fn rally(nic: &Nic, line: &mut Line, queue: &mut CompletionQueue, way: Waiting, first: bool, count: u64) {
    let mut seeded = Seeded::fresh();
    if let Waiting::Descriptor = way {
        queue.descriptor().unwrap();
    }
    let mut place = Some(buffer(nic, 8));
    for round in 0..count {
        line.vi.post_recv(Receive::new(round).into(place.take().unwrap())).unwrap();
        for turn in [first, !first] {
            pause(&mut seeded);
            if turn {
                line.vi.send_bytes(round, &round.to_le_bytes()).unwrap();
                line.sent();
                continue;
            }
            wait_by(way, queue, line);
            place = line.received().into_buffer();
            assert_eq!(place.as_deref(), Some(&round.to_le_bytes()[..]));
        }
    }
}

fn rallies(ours: Waiting, theirs: Waiting, spin: Option<Duration>, quick: u64) {
    let stage = Stage::open_for(limit());
    stage.role("partner", |stage| {
        let nic = stage.nic_with(|config| config.spin = spin);
        let mut queue = nic.completion_queue().unwrap();
        let mut line = Line::connect_with(&nic, "shm:rally", &ViOptions::new().queue(&queue));
        rally(&nic, &mut line, &mut queue, theirs, false, rounds(quick));
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic_with(|config| config.spin = spin);
    let listener = nic.listen("shm:rally").unwrap();
    let partner = stage.start("partner");
    let mut queue = nic.completion_queue().unwrap();
    let mut line = Line::accept_with(&listener, &ViOptions::new().queue(&queue));
    rally(&nic, &mut line, &mut queue, ours, true, rounds(quick));
    partner.finish();
}

#[test]
fn no_wake_up_is_lost_between_two_who_wait_on_their_vi() {
    rallies(Waiting::Vi, Waiting::Vi, None, 20_000);
}

#[test]
fn no_wake_up_is_lost_between_two_who_wait_on_a_queue() {
    rallies(Waiting::Queue, Waiting::Queue, None, 20_000);
}

#[test]
fn no_wake_up_is_lost_between_a_descriptor_and_a_queue() {
    rallies(Waiting::Descriptor, Waiting::Queue, None, 5_000);
}

#[test]
fn no_wake_up_is_lost_between_two_who_never_spin() {
    rallies(Waiting::Vi, Waiting::Queue, Some(Duration::ZERO), 20_000);
}

#[test]
fn no_wake_up_is_lost_by_who_waits_for_room_or_for_a_payload_to_come_back() {
    let stage = Stage::open_for(limit());
    let count = rounds(10_000);
    let nic = |stage: &Stage| stage.nic_with(|config| (config.depth, config.loans) = (4, 4));
    stage.role("reader", |stage| {
        let nic = nic(stage);
        let mut line = Line::connect(&nic, "shm:room");
        let mut seeded = Seeded::fresh();
        let mut held = Vec::new();
        for round in 0..count {
            line.vi.post_recv(Receive::new(round).in_place()).unwrap();
            // A full house must be let go before the next message can come.
            if held.len() == 4 || seeded.once_in(3) {
                pause(&mut seeded);
                held.drain(..).for_each(|payload| line.vi.receiver().release(payload));
            }
            pause(&mut seeded);
            held.extend(line.received().into_in_place());
        }
        drop(held);
        line.end();
    });
    let nic = nic(&stage);
    let listener = nic.listen("shm:room").unwrap();
    let reader = stage.start("reader");
    let mut line = Line::accept_with(&listener, &ViOptions::new().reliability(Reliability::Reception));
    let mut seeded = Seeded::fresh();
    let pool = nic.pool(4096, 8).unwrap();
    for round in 0..count {
        pause(&mut seeded);
        // With every frame out, only a completion brings one back.
        let frame = match pool.frame() {
            Ok(frame) => frame,
            Err(_) => line.sent().into_buffer().expect("a frame"),
        };
        let path = *seeded.pick(&[Path::Buffered, Path::Referenced]);
        line.vi.post_send(Message::new(round).payload(frame).by(path)).unwrap();
    }
    line.vi.disconnect(PATIENCE).expect("everything is taken in the end");
    reader.finish();
}

#[test]
fn no_wake_up_is_lost_behind_a_burst_of_orphans() {
    // A poll steps over only so many slots that complete nothing; what comes behind them is there
    // before the reader falls asleep.
    let stage = Stage::open_for(limit());
    let count = rounds(1_000);
    stage.role("sender", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:orphans");
        let mut seeded = Seeded::fresh();
        for round in 0..count {
            let orphans = *seeded.pick(&[0, 1, 63, 64, 65, 300]);
            for _ in 0..orphans {
                line.vi.post_send(Message::new(0).lands_at(PayloadToken(9))).unwrap();
                line.sent();
            }
            line.vi.post_recv(Receive::new(round)).unwrap();
            line.vi.post_send(Message::new(round).immediate(round as u32)).unwrap();
            line.sent();
            assert_eq!(line.received().immediate, round as u32);
            pause(&mut seeded);
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:orphans").unwrap();
    let sender = stage.start("sender");
    let mut queue = nic.completion_queue().unwrap();
    let mut line = Line::accept_with(&listener, &ViOptions::new().queue(&queue));
    let mut seeded = Seeded::fresh();
    for round in 0..count {
        line.vi.post_recv(Receive::new(round)).unwrap();
        pause(&mut seeded);
        let done = loop {
            // By turns on the VI and on the queue.
            if round % 2 == 0 {
                break line.vi.wait(PATIENCE).expect("a lost wake-up");
            }
            queue.wait(PATIENCE).expect("a lost wake-up");
            if let Some(done) = line.vi.poll() {
                break done;
            }
        };
        assert_eq!((done.operation, done.immediate), (Operation::Receive, round as u32));
        line.vi.post_send(Message::new(round).immediate(round as u32)).unwrap();
        line.sent();
    }
    line.end();
    sender.finish();
}

#[test]
fn no_wake_up_is_lost_among_twenty_vis_on_one_queue() {
    const VIS: usize = 20;
    let stage = Stage::open_for(limit());
    let count = rounds(5_000);
    stage.role("callers", |stage| {
        let nic = stage.nic();
        let mut lines: Vec<Line> = (0..VIS).map(|_| Line::connect(&nic, "shm:twenty")).collect();
        let mut seeded = Seeded::fresh();
        for _ in 0..count {
            let line = &mut lines[seeded.below(VIS)];
            pause(&mut seeded);
            line.vi.post_recv(Receive::new(0)).unwrap();
            line.vi.post_send(Message::new(0)).unwrap();
            line.sent();
            line.received();
        }
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:twenty").unwrap();
    let callers = stage.start("callers");
    let mut queue = nic.completion_queue().unwrap();
    let mut lines: Vec<Line> =
        (0..VIS).map(|_| Line::accept_with(&listener, &ViOptions::new().queue(&queue))).collect();
    lines.iter_mut().for_each(|line| line.vi.post_recv(Receive::new(0)).unwrap());
    let mut seeded = Seeded::fresh();
    let mut answered = 0;
    while answered < count {
        let id = queue.wait(PATIENCE).expect("a lost wake-up");
        let line = lines.iter_mut().find(|line| line.vi.id() == id).unwrap();
        while let Some(done) = line.vi.poll() {
            if done.operation == Operation::Receive && done.status.is_ok() {
                pause(&mut seeded);
                line.vi.post_recv(Receive::new(0)).unwrap();
                line.vi.post_send(Message::new(0)).unwrap();
                answered += 1;
            }
        }
    }
    callers.finish();
}

#[test]
fn an_idle_pair_uses_no_cpu() {
    const IDLE: Duration = Duration::from_millis(500);
    let stage = Stage::open();
    let idle = |line: &mut Line| {
        let before = cpu_time();
        assert!(line.vi.wait(IDLE).is_err());
        let used = cpu_time() - before;
        // A spin, a sleep and a wake-up; the watcher of the Nic sleeps all the time.
        assert!(used < Duration::from_millis(20), "{used:?} of CPU in {IDLE:?} of waiting");
    };
    stage.role("other", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:idle");
        line.vi.post_recv(Receive::new(0).into(buffer(&nic, 8))).unwrap();
        stage.mark("ready");
        idle(&mut line);
        stage.await_mark("done");
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:idle").unwrap();
    let other = stage.start("other");
    let mut line = Line::accept(&listener);
    line.vi.post_recv(Receive::new(0).into(buffer(&nic, 8))).unwrap();
    stage.await_mark("ready");
    idle(&mut line);
    stage.mark("done");
    other.finish();
}

#[test]
fn a_thread_that_waits_is_woken_by_another_that_sends_on_the_same_vi() {
    // Both halves sleep at once on one VI: each must be woken for its own reason.
    let stage = Stage::open();
    stage.role("slow", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:slow");
        let mut seeded = Seeded::fresh();
        for _ in 0..300 {
            pause(&mut seeded);
            line.vi.post_recv(Receive::new(0).into(buffer(&nic, 20_000))).unwrap();
            line.received();
            pause(&mut seeded);
            line.vi.post_send(Message::new(0)).unwrap();
            line.sent();
        }
        line.end();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:slow").unwrap();
    let slow = stage.start("slow");
    let (mut tx, mut rx) = Line::accept(&listener).vi.split();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for token in 0..300 {
                tx.post_send(Message::new(token).payload(buffer(&nic, 20_000)).by(Path::Referenced)).unwrap();
                assert_eq!(tx.wait(PATIENCE).expect("the buffer comes back").token, token);
            }
        });
        scope.spawn(|| {
            for token in 0..300 {
                rx.post_recv(Receive::new(token)).unwrap();
                assert_eq!(rx.wait(PATIENCE).expect("an answer").token, token);
            }
        });
    });
    drop((tx, rx));
    slow.finish();
}
