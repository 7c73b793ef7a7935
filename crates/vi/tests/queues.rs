//! Waiting for many: completion queues, descriptors to poll, callbacks, threads.

use crate::support::seeded::{Seeded, bytes, verify};
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, buffer, buffer_of, cpu_time, open_descriptors, until};
use highwire_vi::{
    Armed, Background, CompletionQueue, Failure, Message, Nic, Operation, Path, Pool, Receive, Vi, ViId, ViOptions,
    WaitError,
};
use rustix::event::{PollFd, PollFlags};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Connects `count` VIs and then, on request, sends a message on the one that it is asked for.
fn many_callers(stage: &Stage, count: usize) {
    let nic = stage.nic();
    let queue = nic.completion_queue().unwrap();
    let mut vis: Vec<Line> =
        (0..count).map(|_| Line::connect_with(&nic, "shm:many", &ViOptions::new().queue(&queue))).collect();
    let control = &mut Line::connect(&nic, "shm:control");
    loop {
        control.vi.post_recv(Receive::new(0)).unwrap();
        let asked = control.next(Operation::Receive);
        if asked.status.is_err() {
            return;
        }
        let line = &mut vis[asked.immediate as usize];
        line.vi.send_bytes(0, &asked.immediate.to_le_bytes()).unwrap();
        line.sent();
    }
}

/// The accepting side of `many_callers`.
struct Switchboard {
    queue: CompletionQueue,
    memory: Pool,
    vis: HashMap<ViId, (u32, Vi)>,
    control: Line,
}

impl Switchboard {
    fn open(nic: &Nic, stage: &Stage, count: usize) -> (Switchboard, crate::support::Actor) {
        let listener = nic.listen("shm:many").unwrap();
        let controller = nic.listen("shm:control").unwrap();
        let callers = stage.start("callers");
        let queue = nic.completion_queue().unwrap();
        let memory = nic.pool(4, count + 1).unwrap();
        let mut vis = HashMap::new();
        for number in 0..count as u32 {
            let mut vi = listener.accept_with(PATIENCE, &ViOptions::new().queue(&queue)).unwrap();
            vi.post_recv(Receive::new(0).into(memory.frame().unwrap())).unwrap();
            vis.insert(vi.id(), (number, vi));
        }
        assert_eq!(queue.len(), count);
        (Switchboard { queue, memory, vis, control: Line::accept(&controller) }, callers)
    }

    /// Asks the other side to send on VI `number`.
    fn ask(&mut self, number: u32) {
        self.control.vi.post_send(Message::new(0).immediate(number)).unwrap();
        self.control.sent();
    }

    /// Takes one message from the VI `id`, which the queue has named.
    fn take(&mut self, id: ViId) -> Option<u32> {
        let (number, vi) = self.vis.get_mut(&id).expect("the queue names one of its own");
        let done = vi.poll()?;
        assert_eq!((done.status, done.length), (Ok(()), 4));
        assert_eq!(done.into_buffer().unwrap()[..4], number.to_le_bytes(), "it came on the VI that was asked for");
        vi.post_recv(Receive::new(0).into(self.memory.frame().unwrap())).unwrap();
        Some(*number)
    }
}

fn a_queue_of(count: usize, rounds: usize) {
    let stage = Stage::open();
    stage.role("callers", |stage| many_callers(stage, count));
    let nic = stage.nic();
    let (mut board, callers) = Switchboard::open(&nic, &stage, count);
    let mut seeded = Seeded::fresh();
    for _ in 0..rounds {
        // Several at once, on any of them, some twice.
        let asked: Vec<u32> = (0..1 + seeded.below(5)).map(|_| seeded.below(count) as u32).collect();
        asked.iter().for_each(|number| board.ask(*number));
        let mut heard = Vec::new();
        while heard.len() < asked.len() {
            let id = board.queue.wait(PATIENCE).expect("a message that was asked for");
            while let Some(number) = board.take(id) {
                heard.push(number);
            }
        }
        let sorted = |mut numbers: Vec<u32>| {
            numbers.sort_unstable();
            numbers
        };
        assert_eq!(sorted(heard), sorted(asked));
    }
    // Idle, it sleeps.
    let start = cpu_time();
    assert!(matches!(board.queue.wait(3 * A_WHILE), Err(WaitError::TimedOut(_))));
    assert!(cpu_time() - start < A_WHILE, "waiting on {count} VIs used {:?} of CPU", cpu_time() - start);
    drop(board);
    callers.finish();
}

#[test]
fn a_queue_of_one_names_it() {
    a_queue_of(1, 200);
}

#[test]
fn a_queue_of_nine_names_whoever_has_something() {
    a_queue_of(9, 200);
}

#[test]
fn a_queue_of_three_hundred_names_whoever_has_something() {
    a_queue_of(300, 100);
}

#[test]
fn a_queue_that_shrinks_and_grows_across_the_few_misses_nothing() {
    let stage = Stage::open();
    stage.role("callers", |stage| many_callers(stage, 12));
    let nic = stage.nic();
    let (mut board, callers) = Switchboard::open(&nic, &stage, 12);
    let mut seeded = Seeded::fresh();
    while board.vis.len() > 2 {
        let numbers: Vec<u32> = board.vis.values().map(|(number, _)| *number).collect();
        for _ in 0..10 {
            let number = *seeded.pick(&numbers);
            board.ask(number);
            let id = board.queue.wait(PATIENCE).expect("the message that was asked for");
            assert_eq!(board.take(id), Some(number));
            assert_eq!(board.queue.poll().and_then(|id| board.take(id)), None);
        }
        let gone = *seeded.pick(&board.vis.keys().copied().collect::<Vec<_>>());
        board.vis.remove(&gone);
        assert_eq!(board.queue.len(), board.vis.len());
    }
    drop(board);
    callers.finish();
}

fn readable(queue: &mut CompletionQueue, timeout: Duration) -> bool {
    let descriptor = queue.descriptor().unwrap();
    let mut polled = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
    let timeout = rustix::time::Timespec::try_from(timeout).unwrap();
    rustix::event::poll(&mut polled, Some(&timeout)).unwrap() == 1
}

fn a_descriptor_for(count: usize) {
    let stage = Stage::open();
    stage.role("callers", |stage| many_callers(stage, count));
    let nic = stage.nic();
    let (mut board, mut callers) = Switchboard::open(&nic, &stage, count);
    board.queue.descriptor().unwrap();
    let mut seeded = Seeded::fresh();
    for _ in 0..50 {
        assert_eq!(board.queue.arm(), Armed::Waiting);
        assert!(!readable(&mut board.queue, Duration::ZERO));
        let number = seeded.below(count) as u32;
        board.ask(number);
        assert!(readable(&mut board.queue, PATIENCE), "an armed queue's descriptor tells of a message");
        board.queue.disarm();
        let id = board.queue.poll().expect("whoever made it readable");
        assert_eq!(board.take(id), Some(number));
        assert!(!readable(&mut board.queue, Duration::ZERO), "disarming takes the readiness");
    }
    // What is there already is told at once, and nothing is armed.
    board.ask(0);
    let id = loop {
        match board.queue.arm() {
            Armed::Ready(id) => break id,
            Armed::Waiting => board.queue.disarm(),
        }
    };
    assert_eq!(board.take(id), Some(0));
    // So is a death. Its peer may have been found before it had rung for the last message, and ring once more before.
    assert_eq!(board.queue.arm(), Armed::Waiting);
    callers.kill();
    let id = loop {
        assert!(readable(&mut board.queue, PATIENCE), "an armed queue's descriptor tells of a death");
        board.queue.disarm();
        if let Some(id) = board.queue.poll() {
            break id;
        }
        if let Armed::Ready(id) = board.queue.arm() {
            break id;
        }
    };
    let (_, vi) = board.vis.get_mut(&id).unwrap();
    assert_eq!(vi.poll().unwrap().status, Err(Failure::PeerDied));
}

#[test]
fn a_descriptor_tells_of_a_message_and_of_a_death() {
    a_descriptor_for(1);
}

#[test]
fn a_descriptor_of_many_tells_of_a_message_and_of_a_death() {
    a_descriptor_for(20);
}

#[test]
fn a_callback_is_called_for_each_message_and_no_more_after_its_end() {
    const COUNT: u64 = 200;
    let stage = Stage::open();
    stage.role("sender", |stage| {
        let mut line = Line::connect(&stage.nic(), "shm:notify");
        for number in 0..COUNT {
            while line.vi.send_bytes(number, &number.to_le_bytes()).is_err() {
                let _ = line.vi.wait(Duration::from_millis(1));
            }
            if number % 20 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        stage.await_mark("over");
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:notify").unwrap();
    let sender = stage.start("sender");
    let queue = nic.completion_queue().unwrap();
    let mut vi = listener.accept_with(PATIENCE, &ViOptions::new().queue(&queue)).unwrap();
    for _ in 0..10 {
        vi.post_recv(Receive::new(0).into(buffer(&nic, 8))).unwrap();
    }
    let received = Arc::new(Mutex::new(Vec::new()));
    let calls = Arc::new(AtomicU64::new(0));
    let (inside, called) = (received.clone(), calls.clone());
    let notify = queue.notify(move |id| {
        called.fetch_add(1, Ordering::SeqCst);
        assert_eq!(id, vi.id());
        while let Some(done) = vi.poll() {
            if done.status.is_ok() {
                let buffer = done.into_buffer().unwrap();
                inside.lock().unwrap().push(u64::from_le_bytes(buffer[..].try_into().unwrap()));
                vi.post_recv(Receive::new(0).into(buffer)).unwrap();
            }
        }
    });
    let notify = notify.unwrap();
    until("all messages are heard", || received.lock().unwrap().len() == COUNT as usize);
    assert_eq!(*received.lock().unwrap(), (0..COUNT).collect::<Vec<_>>());
    drop(notify);
    let at_the_end = calls.load(Ordering::SeqCst);
    stage.mark("over");
    sender.finish();
    assert_eq!(calls.load(Ordering::SeqCst), at_the_end);
}

#[test]
fn a_callback_can_be_ended_while_nothing_happens() {
    let stage = Stage::open();
    let nic = stage.nic();
    let notify = nic.completion_queue().unwrap().notify(|_| panic!("nobody has anything")).unwrap();
    std::thread::sleep(A_WHILE);
    let start = Instant::now();
    drop(notify);
    assert!(start.elapsed() < PATIENCE / 2);
}

#[test]
fn messages_move_in_the_background_while_the_application_computes() {
    let stage = Stage::open();
    stage.role("echo", |stage| {
        let nic = stage.nic();
        let mut line = Line::connect(&nic, "shm:background");
        for number in 0..40 {
            line.vi.post_recv(Receive::new(0).into(buffer(&nic, 1 << 20))).unwrap();
            let length = line.received().length;
            assert_eq!(length, 1 << 20);
            line.vi.send_bytes(number, &number.to_le_bytes()).unwrap();
            line.sent();
        }
        line.vi.disconnect(PATIENCE).unwrap();
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:background").unwrap();
    let echo = stage.start("echo");
    let background = Background::spawn(listener.accept(PATIENCE).unwrap()).unwrap();
    // 40 MiB through a payload area of at most 8: only a thread of its own moves them now.
    for number in 0..40 {
        background.post_recv(Receive::new(number).into(buffer(&nic, 8))).unwrap();
        let payload = buffer(&nic, 1 << 20);
        background.post_send(Message::new(number).payload(payload).by(Path::Buffered)).unwrap();
    }
    std::thread::sleep(A_WHILE);
    let mut done = [0, 0];
    std::thread::scope(|scope| {
        // Several threads may wait.
        let waiters: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut counts = [0, 0];
                    loop {
                        match background.wait(PATIENCE) {
                            Ok(done) if done.status.is_ok() => {
                                counts[usize::from(done.operation == Operation::Receive)] += 1;
                            }
                            Ok(done) => panic!("{done:?}"),
                            Err(WaitError::NotConnected(failure)) => break (failure, counts),
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        for waiter in waiters {
            let (failure, counts) = waiter.join().unwrap();
            assert_eq!(failure, Failure::PeerClosed);
            done = [done[0] + counts[0], done[1] + counts[1]];
        }
    });
    assert_eq!(done, [40, 40]);
    echo.finish();
}

#[test]
fn a_background_vi_at_rest_costs_nothing_and_ends_at_once() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let background = Background::spawn(near.vi).unwrap();
    background.post_recv(Receive::new(1).into(buffer(&one, 8))).unwrap();
    std::thread::sleep(A_WHILE);
    let start = cpu_time();
    std::thread::sleep(3 * A_WHILE);
    assert!(cpu_time() - start < A_WHILE, "{:?}", cpu_time() - start);
    far.vi.send_bytes(1, b"hi").unwrap();
    assert_eq!(background.wait(PATIENCE).unwrap().length, 2);
    assert!(matches!(background.wait(Duration::ZERO), Err(WaitError::TimedOut(_))));
    assert!(background.poll().is_none());
    drop(background);
    assert_eq!(far.end().0, Failure::PeerClosed);
}

#[test]
fn halves_on_two_threads_send_and_receive_at_once() {
    const COUNT: u64 = 2000;
    let stage = Stage::open();
    let size = |number: u64| [20, 500, 9000][number as usize % 3];
    let both_ways = move |nic: &Nic, line: Line| {
        let (mut tx, mut rx) = line.vi.split();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for number in 0..COUNT {
                    let payload = buffer_of(nic, &bytes(number, size(number)));
                    tx.post_send(Message::new(number).payload(payload)).unwrap();
                    let done = tx.wait(PATIENCE).unwrap();
                    assert_eq!((done.token, done.status), (number, Ok(())));
                }
                tx.flush(PATIENCE).unwrap();
            });
            scope.spawn(move || {
                for number in 0..COUNT {
                    rx.post_recv(Receive::new(number).into(buffer(nic, 9000))).unwrap();
                    let done = rx.wait(PATIENCE).unwrap();
                    assert_eq!((done.token, done.status, done.length), (number, Ok(()), size(number)));
                    verify(number, &done.into_buffer().unwrap()[..size(number)]);
                }
            });
        });
    };
    stage.role("other", |stage| {
        let nic = stage.nic();
        both_ways(&nic, Line::connect(&nic, "shm:halves"));
    });
    let nic = stage.nic();
    let listener = nic.listen("shm:halves").unwrap();
    let other = stage.start("other");
    both_ways(&nic, Line::accept(&listener));
    other.finish();
}

#[test]
fn a_connection_lasts_until_both_halves_are_gone() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let (near, mut far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
    let (tx, mut rx) = near.vi.split();
    drop(tx);
    far.vi.send_bytes(1, b"still").unwrap();
    rx.post_recv(Receive::new(1).into(buffer(&one, 8))).unwrap();
    assert_eq!(rx.wait(PATIENCE).unwrap().length, 5);
    drop(rx);
    far.sent();
    assert_eq!(far.end().0, Failure::PeerClosed);
}

#[test]
fn fifty_vis_between_two_processes_share_one_pair_of_regions() {
    let stage = Stage::open();
    stage.role("callers", |stage| many_callers(stage, 50));
    let nic = stage.nic();
    let before = open_descriptors();
    let (board, callers) = Switchboard::open(&nic, &stage, 50);
    let used = open_descriptors() - before;
    // The frames, the pair's region, socket and pidfd, and for two queues page, wire and ears; the
    // listeners are closed again.
    assert!(used < 16, "{used} descriptors for 51 VIs");
    drop(board);
    callers.finish();
    // The Nic keeps the doorbell page of its own queue, with its wire and its ears.
    until("the descriptors are closed", || open_descriptors() <= before + 3);
}

#[test]
fn a_peer_that_closed_with_a_message_unread_is_named_once_and_costs_nothing_after() {
    let stage = Stage::open();
    let (one, other) = (stage.nic(), stage.nic());
    let mut queue = one.completion_queue().unwrap();
    let (mut near, mut far) = both_ends(&one, &other, &ViOptions::new().queue(&queue), &ViOptions::new());
    far.vi.send_bytes(1, b"unread").unwrap();
    far.vi.disconnect(PATIENCE).unwrap();
    // The end may be told, but not over and over.
    let mut told = 0;
    let start = cpu_time();
    while let Ok(id) = queue.wait(3 * A_WHILE) {
        assert_eq!(id, near.vi.id());
        while near.vi.poll().is_some() {}
        told += 1;
        assert!(told < 10, "the queue names a VI again and again that has nothing");
    }
    assert!(cpu_time() - start < A_WHILE, "{:?}", cpu_time() - start);
    // The message is not lost.
    near.vi.post_recv(Receive::new(1).into(buffer(&one, 6))).unwrap();
    assert_eq!(queue.wait(PATIENCE), Ok(near.vi.id()));
    assert_eq!(near.received().length, 6);
    assert_eq!(near.end().0, Failure::PeerClosed);
}
