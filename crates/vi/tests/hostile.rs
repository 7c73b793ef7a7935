//! A hostile peer at full speed, in a process or thread of its own: it floods, scribbles and
//! changes what was checked. The victim neither panics nor hangs, and its honest connection is
//! served and woken all the while.

use crate::support::liar::{FIRST, LAST, Liar, Slot, TOKEN, region_letter};
use crate::support::seeded::Seeded;
use crate::support::{A_WHILE, Actor, Line, PATIENCE, Stage, buffer, is_root};
use highwire_mem::{News, OwnRegion, RegionKind, SLOT_BYTES};
use highwire_vi::{
    Allow, CompletionQueue, Config, Failure, InPlace, Message, Nic, Operation, Path, PayloadToken, Receive, ViListener,
    ViOptions, WaitError,
};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const NOBODY: u32 = 65534;

/// An honest process that answers each message with the same.
fn echo(stage: &Stage, address: &str) {
    let nic = stage.nic();
    let mut line = Line::connect(&nic, address);
    loop {
        line.vi.post_recv(Receive::new(0)).unwrap();
        let done = line.next(Operation::Receive);
        if done.status.is_err() {
            return;
        }
        line.vi.post_send(Message::new(0).immediate(done.immediate)).unwrap();
        line.sent();
    }
}

/// The victim's honest connection, and how long its slowest answer took.
struct Honest {
    line: Line,
    count: u32,
}

impl Honest {
    fn new(line: Line) -> Honest {
        Honest { line, count: 0 }
    }

    /// Asks and waits for the answer on the queue, asleep if it takes long.
    fn is_served(&mut self, queue: &mut CompletionQueue, others: &mut dyn FnMut()) {
        self.count += 1;
        self.line.vi.post_recv(Receive::new(0)).unwrap();
        self.line.vi.post_send(Message::new(1).immediate(self.count)).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let named = queue.wait(PATIENCE).expect("a wake-up for the honest connection");
            if named == self.line.vi.id() {
                while let Some(done) = self.line.vi.poll() {
                    assert_eq!(done.status, Ok(()));
                    if done.operation == Operation::Receive {
                        assert_eq!(done.immediate, self.count);
                        return;
                    }
                }
            } else {
                others();
            }
            assert!(Instant::now() < deadline, "the honest connection is not served");
        }
    }
}

/// A victim with an honest peer in another process, and a door for the hostile.
struct Victim {
    nic: Nic,
    queue: CompletionQueue,
    honest: Honest,
    listener: ViListener,
    _echo: Actor,
}

impl Victim {
    fn new(stage: &Stage, change: impl FnOnce(&mut Config)) -> Victim {
        let nic = stage.nic_with(change);
        let honest = nic.listen("shm:honest").unwrap();
        let echo = stage.start("echo");
        let queue = nic.completion_queue().unwrap();
        let line = Line::accept_with(&honest, &ViOptions::new().queue(&queue));
        let listener = nic.listen("shm:victim").unwrap();
        Victim { nic, queue, honest: Honest::new(line), listener, _echo: echo }
    }

    /// Meets a hostile peer that lives in this process.
    fn meet(&self, stage: &Stage) -> (Liar, Line) {
        let path = stage.runtime_dir().join("victim.sock");
        let (liar, vi) = Liar::meet(&self.listener, &path, &ViOptions::new().queue(&self.queue));
        (liar, Line::new(vi))
    }
}

/// Runs `attack` over and over on a thread of its own while `defend` runs.
fn under_attack(mut attack: impl FnMut() + Send, defend: impl FnOnce()) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                attack();
            }
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(defend));
        over.store(true, Ordering::SeqCst);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Slots without end, each of which the victim can only step over.
fn flooded_with(slot: &Slot) {
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    let mut victim = Victim::new(&stage, |_| ());
    let (mut liar, mut line) = victim.meet(&stage);
    line.vi.post_recv(Receive::new(1).into(buffer(&victim.nic, 100))).unwrap();
    if slot.flags & FIRST == 0 {
        liar.put(&Slot::first_of(1000, b"begun"));
        line.vi.post_recv(Receive::new(2).into(buffer(&victim.nic, 1000))).unwrap();
    }
    for index in 0..64 {
        liar.write(liar.next + index, slot);
    }
    // Always a full ring ahead: only the sequence word has to change.
    let attack = || {
        while liar.next < liar.consumed_by_them() + 64 {
            liar.publish();
        }
    };
    under_attack(attack, || {
        for _ in 0..5 {
            let start = Instant::now();
            let polled = line.vi.poll();
            assert!(start.elapsed() < Duration::from_secs(2), "one poll took {:?}", start.elapsed());
            assert!(polled.is_none_or(|done| done.operation == Operation::Receive));
            let start = Instant::now();
            let _ = line.vi.wait(A_WHILE);
            assert!(start.elapsed() < Duration::from_secs(2), "a wait of {A_WHILE:?} took {:?}", start.elapsed());
            victim.honest.is_served(&mut victim.queue, &mut || drop(line.vi.poll()));
        }
    });
}

#[test]
fn a_flood_of_orphans_does_not_keep_a_poll_from_returning() {
    flooded_with(&Slot { flags: FIRST | LAST | TOKEN, ..Slot::inline(b"") });
}

#[test]
fn a_flood_of_empty_parts_does_not_keep_a_poll_from_returning() {
    flooded_with(&Slot { flags: 0, ..Slot::inline(b"") });
}

#[test]
fn a_flood_of_regions_does_not_keep_the_victim_from_its_other_peers() {
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    stage.role("mortal", |stage| {
        let mut line = Line::connect(&stage.nic(), "shm:victim");
        let _ = line.vi.wait(Duration::from_secs(1000));
    });
    let mut victim = Victim::new(&stage, |_| ());
    let (liar, mut line) = victim.meet(&stage);
    let mut mortal = stage.start("mortal");
    let mut doomed = Line::accept(&victim.listener);
    let region = OwnRegion::create(1 << 20).unwrap();
    let letter = region_letter(9, RegionKind::Registered.number(), 0, 1 << 20);
    let given = [region.as_fd()];
    // The same region again and again, by several threads, so that the socket is never empty.
    let attack = || {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let _ = liar.courier.send(&letter, &given, Duration::from_millis(10));
                    }
                });
            }
        });
    };
    under_attack(attack, || {
        std::thread::sleep(A_WHILE);
        let start = Instant::now();
        mortal.kill();
        assert_eq!(doomed.end().0, Failure::PeerDied);
        eprintln!("the death of another was noticed after {:?} (promised: 100 ms)", start.elapsed());
        assert!(start.elapsed() < Duration::from_secs(1), "a death was noticed after {:?}", start.elapsed());
        victim.honest.is_served(&mut victim.queue, &mut || drop(line.vi.poll()));
        let start = Instant::now();
        line.vi.post_recv(Receive::new(1).into(buffer(&victim.nic, 100))).ok();
        liar.write(0, &Slot::spans(&[(77, 0, 10)]));
        liar.memory().store32(liar.slot_at(0), 1);
        let _ = line.vi.wait(A_WHILE);
        assert!(start.elapsed() < Duration::from_secs(2), "looking up a region took {:?}", start.elapsed());
    });
}

#[test]
fn a_peer_that_reads_no_mail_does_not_hold_up_a_post() {
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    let mut victim = Victim::new(&stage, |_| ());
    let (_liar, mut line) = victim.meet(&stage);
    let mut slowest = Duration::ZERO;
    for token in 0..600 {
        let message = Message::new(token).payload(buffer(&victim.nic, 300)).by(Path::Referenced);
        let start = Instant::now();
        let posted = line.vi.post_send(message);
        slowest = slowest.max(start.elapsed());
        if posted.is_err() || slowest > Duration::from_secs(1) {
            break;
        }
    }
    assert!(slowest < Duration::from_secs(1), "posting waited {slowest:?} for a peer that does nothing");
    victim.honest.is_served(&mut victim.queue, &mut || drop(line.vi.poll()));
}

/// Writes something into the liar's memory where it may matter, or rings.
fn mischief(liar: &mut Liar, seeded: &mut Seeded) {
    let block = liar.block.offset();
    let any_number = |seeded: &mut Seeded| match seeded.below(4) {
        0 => seeded.below(200) as u64,
        1 => u64::MAX - seeded.below(200) as u64,
        2 => 1 << seeded.below(64),
        _ => seeded.next(),
    };
    match seeded.below(14) {
        // A slot that is almost right.
        0..6 => {
            let mut slot = match seeded.below(4) {
                0 => Slot::inline(&[7; 200][..seeded.below(200)]),
                1 => Slot::spans(&[(0, seeded.below(Liar::REGION_BYTES) as u64, seeded.below(100_000) as u32)]),
                2 => Slot::spans(&[(seeded.below(3) as u32, any_number(seeded), seeded.next() as u32), (0, 4096, 10)]),
                _ => Slot::first_of(any_number(seeded), &[3; 100]),
            };
            match seeded.below(12) {
                0 => slot.kind = seeded.next() as u8,
                1 => slot.flags = seeded.next() as u8,
                2 => slot.length = any_number(seeded) as u32,
                3 => slot.spans = seeded.below(20) as u8,
                4 => slot.control = seeded.next() as u8,
                5 => slot.flags &= seeded.below(16) as u8,
                _ => {}
            }
            liar.put(&slot);
        }
        6 => liar.claim_consumed(any_number(seeded)),
        7 => liar.claim_consumed(liar.consumed_by_them() + seeded.below(3) as u64),
        8 => liar.claim_held(seeded.below(64) as u64),
        9 => liar.claim_released(seeded.below(128), any_number(seeded) >> 2),
        // Any word of the slots, the tables, or the header of the block.
        10 => {
            let at = block + seeded.below(liar.block.shape().bytes() / 8) * 8;
            liar.memory().store64(at, any_number(seeded));
        }
        11 => liar.set_attention_word(seeded.next() as u32),
        12 if seeded.once_in(20) => liar.set_state_word(seeded.next() as u32),
        12 => liar.memory().store32(0x40, seeded.below(4) as u32),
        _ => liar.rope.ring(News::Slots),
    }
    // What was published changes while it is read.
    if seeded.once_in(3) {
        let at = liar.slot_at(liar.next.saturating_sub(1)) + 4 + 4 * seeded.below(SLOT_BYTES / 4 - 1);
        liar.memory().store32(at, any_number(seeded) as u32);
    }
}

/// Connects, does mischief for a while, and begins again.
fn hostile_for_ever(path: &std::path::Path, mut also: impl FnMut(&mut Liar, &mut Seeded)) {
    let mut seeded = Seeded::fresh();
    loop {
        let mut liar = Liar::connect(path);
        // So many that the victim's ring is busy, so few that lies of every depth are reached.
        for _ in 0..20 + seeded.below(2000) {
            mischief(&mut liar, &mut seeded);
            also(&mut liar, &mut seeded);
        }
        liar.rope.ring(News::Slots);
    }
}

/// What a victim may be doing with the hostile connection.
fn carry_on(nic: &Nic, line: &mut Line, held: &mut Vec<InPlace>, seeded: &mut Seeded) -> Option<Failure> {
    let token = seeded.next();
    let size = *seeded.pick(&[0, 10, 300, 20_000, 200_000]);
    let path = *seeded.pick(&[Path::Choose, Path::Buffered, Path::Referenced]);
    let _ = match seeded.below(6) {
        0 => line.vi.post_send(Message::new(token).payload(buffer(nic, size)).by(path)).is_ok(),
        1 => line.vi.send_bytes(token, &[5; 500]).is_ok(),
        2 => line.vi.post_recv(Receive::new(token).in_place()).is_ok(),
        3 => line.vi.post_recv(Receive::new(token).into(buffer(nic, size))).is_ok(),
        4 => line.vi.expect(PayloadToken(token % 4), Receive::new(token).into(buffer(nic, size))).is_ok(),
        _ => line.vi.post_recv(Receive::new(token).into(buffer(nic, 7)).into(buffer(nic, size))).is_ok(),
    };
    for _ in 0..1 + seeded.below(4) {
        match line.vi.poll() {
            Some(done) => held.extend(done.into_in_place()),
            None => break,
        }
    }
    while held.len() > 5 {
        let payload = held.swap_remove(seeded.below(held.len()));
        let mut some = [0; 16];
        payload.copy_to(0, &mut some[..payload.len().min(16)]);
        if seeded.once_in(2) { line.vi.receiver().release(payload) } else { drop(payload) }
    }
    match line.vi.wait(Duration::ZERO) {
        Err(WaitError::NotConnected(failure)) => Some(failure),
        _ => None,
    }
}

/// Lives with one hostile connection after another, and serves the honest one meanwhile.
fn survives(victim: &mut Victim, seconds: u64) {
    let mut seeded = Seeded::fresh();
    let start = Instant::now();
    let (mut met, mut lies) = (0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        let mut line = Line::accept_with(&victim.listener, &ViOptions::new().queue(&victim.queue));
        met += 1;
        let mut held = Vec::new();
        for _ in 0..seeded.below(400) {
            if let Some(failure) = carry_on(&victim.nic, &mut line, &mut held, &mut seeded) {
                lies += u32::from(matches!(failure, Failure::PeerLied(_)));
                break;
            }
        }
        victim.honest.is_served(&mut victim.queue, &mut || while line.vi.poll().is_some() {});
        let posted = Instant::now();
        let _ = line.vi.wait(Duration::from_millis(2));
        assert!(posted.elapsed() < PATIENCE / 4, "a short wait took {:?}", posted.elapsed());
        if seeded.once_in(4) {
            let _ = line.vi.disconnect(Duration::from_millis(1));
        }
    }
    eprintln!("{met} hostile connections, {lies} of them caught lying; the honest one was served each time");
    assert!(met > 5 && lies > 0, "{met} met, {lies} caught");
}

#[test]
fn arbitrary_memory_never_harms_the_victim() {
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    stage.role("hostile", |stage| hostile_for_ever(&stage.runtime_dir().join("victim.sock"), |_, _| ()));
    let mut victim = Victim::new(&stage, |config| config.connect_timeout = PATIENCE);
    let _hostile = stage.start("hostile");
    survives(&mut victim, 5);
}

/// Bells that were not rung, and the page itself: bits, counts, sleepers, whatever.
fn scribble(liar: &mut Liar, seeded: &mut Seeded) {
    if seeded.once_in(2) {
        liar.page.store32(4 * seeded.below(1024), seeded.next() as u32);
    }
}

#[test]
fn a_scribbled_doorbell_page_of_one_user_takes_no_ring_from_another() {
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    stage.role("hostile", |stage| hostile_for_ever(&stage.open_dir().join("victim"), scribble));
    if !is_root("a hostile process of another user") {
        return;
    }
    let mut victim = Victim::new(&stage, |config| config.connect_timeout = PATIENCE);
    let address = format!("shm:{}", stage.open_dir().join("victim").display());
    victim.listener = victim.nic.listen_with(&address, Allow::Users(vec![NOBODY])).unwrap();
    let _hostile = stage.start_as("hostile", NOBODY);
    survives(&mut victim, 4);
}

#[test]
fn a_scribbled_doorbell_page_keeps_nobody_from_his_time_limit() {
    // Peers of one user share a page and could stop each other anyway; waits still end in time.
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    let mut victim = Victim::new(&stage, |_| ());
    let (mut liar, mut line) = victim.meet(&stage);
    line.vi.post_recv(Receive::new(1).into(buffer(&victim.nic, 8))).unwrap();
    let mut seeded = Seeded::fresh();
    let attack = || (0..100).for_each(|_| scribble(&mut liar, &mut seeded));
    under_attack(attack, || {
        for _ in 0..20 {
            let start = Instant::now();
            assert!(matches!(line.vi.wait(Duration::from_millis(20)), Err(WaitError::TimedOut(_))));
            assert!(start.elapsed() < PATIENCE / 4, "{:?}", start.elapsed());
            let _ = victim.queue.wait(Duration::from_millis(20));
        }
    });
}

#[test]
fn bells_rung_for_nothing_among_many_vis_take_no_ring_from_the_honest() {
    const MANY: usize = 12;
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    let mut victim = Victim::new(&stage, |_| ());
    let mut met: Vec<(Liar, Line)> = (0..MANY).map(|_| victim.meet(&stage)).collect();
    met.iter_mut().for_each(|(_, line)| line.vi.post_recv(Receive::new(1).into(buffer(&victim.nic, 8))).unwrap());
    let (liars, mut lines): (Vec<Liar>, Vec<Line>) = met.into_iter().unzip();
    let attack = || liars.iter().for_each(|liar| liar.rope.ring(News::Slots));
    under_attack(attack, || {
        for _ in 0..200 {
            victim.honest.is_served(&mut victim.queue, &mut || {
                lines.iter_mut().for_each(|line| assert!(line.vi.poll().is_none()));
            });
        }
    });
}

#[test]
fn a_hostile_peer_that_is_killed_leaves_nothing_behind() {
    let stage = Stage::open();
    stage.role("echo", |stage| echo(stage, "shm:honest"));
    stage.role("hostile", |stage| hostile_for_ever(&stage.runtime_dir().join("victim.sock"), |_, _| ()));
    let mut victim = Victim::new(&stage, |_| ());
    let mut before = 0;
    for round in 0..6 {
        let mut hostile = stage.start("hostile");
        let mut line = Line::accept_with(&victim.listener, &ViOptions::new().queue(&victim.queue));
        line.vi.post_recv(Receive::new(1).into(buffer(&victim.nic, 8))).unwrap();
        hostile.kill();
        hostile.status();
        line.end();
        drop(line);
        while victim.listener.accept(Duration::from_millis(5)).is_ok() {}
        victim.honest.is_served(&mut victim.queue, &mut || ());
        if round == 0 {
            before = crate::support::open_descriptors();
        }
    }
    crate::support::until("nothing is left", || crate::support::open_descriptors() <= before);
}
