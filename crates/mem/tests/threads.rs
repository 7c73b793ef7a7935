//! The ring and the doorbells between real threads, with the kernel's own sleeping and waking.
#![cfg(not(loom))]

mod pair;

use highwire_mem::{
    Attention, Bell, BellIndex, BellPage, BellRope, News, Sleep, SleepOutcome, heavy_barrier_available,
};
use pair::{Random, Side, inline};
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

const LOST: Duration = Duration::from_secs(20);

fn bell() -> (Bell, BellRope) {
    let (bell, fd) = Bell::create().unwrap();
    let page = BellPage::adopt(fd, UnixDatagram::pair().unwrap().0.into()).unwrap();
    (bell, page.rope(BellIndex::new(0).unwrap()))
}

/// One side's way to sleep, by the numbered steps of `docs/protocol/shared-memory.md`.
struct Sleeper<'a> {
    side: &'a Side,
    bell: Bell,
    word: Sleep,
    wanted: Attention,
}

impl Sleeper<'_> {
    fn sleep_unless(&self, look: impl FnOnce() -> bool) {
        self.wanted.announce(&self.side.own, self.side.block);
        self.bell.enter();
        Bell::settle();
        let (own, count) = (self.word.count(), self.bell.count());
        if !look() {
            let outcome = self.word.sleep(own, &[(&self.bell, count)], Some(LOST));
            assert_eq!(outcome, SleepOutcome::LookAgain, "a wake-up was lost");
        }
        self.bell.leave();
        Attention::NONE.announce(&self.side.own, self.side.block);
    }
}

fn pause(random: &mut Random) {
    match random.below(200) {
        0 => std::thread::sleep(Duration::from_micros(random.below(300))),
        1..20 => std::thread::yield_now(),
        _ => {}
    }
}

/// A stream of numbers through a shallow ring, each side sleeping whenever it finds nothing to do.
fn stream(messages: u64, depth: u32, full_fence: bool, seed: u64) {
    let (near, far) = Side::pair(depth, 2, u64::from(u32::MAX) - 3);
    let (near_bell, near_rope) = bell();
    let (far_bell, far_rope) = bell();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut writer, mut random) = (near.writer(full_fence), Random::new(seed));
            let wanted = Attention { slots: false, credit: true };
            let sleeper = Sleeper { side: &near, bell: near_bell, word: Sleep::new(), wanted };
            let credit = writer.watch();
            for number in 0..messages {
                while writer.credit() == 0 && !writer.refresh().unwrap() {
                    sleeper.sleep_unless(|| credit.moved());
                }
                writer.publish(inline(8, number as u32), &[], &[], &number.to_le_bytes());
                if writer.bell_wanted() {
                    far_rope.ring(News::Slots);
                }
                pause(&mut random);
            }
        });
        let (mut reader, mut random) = (far.reader(full_fence), Random::new(!seed));
        let wanted = Attention { slots: true, credit: false };
        let sleeper = Sleeper { side: &far, bell: far_bell, word: Sleep::new(), wanted };
        for number in 0..messages {
            let head = loop {
                if let Some(head) = reader.head().unwrap() {
                    break head;
                }
                if reader.unpublished() && reader.publish() {
                    near_rope.ring(News::Slots);
                }
                sleeper.sleep_unless(|| reader.ready());
            };
            let mut content = [0; 8];
            reader.content(0, &mut content);
            assert_eq!((u64::from_le_bytes(content), head.immediate), (number, number as u32), "seed {seed}");
            reader.consume(false, false);
            if reader.publish_due() && reader.publish() {
                near_rope.ring(News::Slots);
            }
            pause(&mut random);
        }
    });
}

#[test]
fn no_message_and_no_wake_up_is_lost_with_fences() {
    stream(60_000, 4, true, 1);
    stream(20_000, 2, true, 2);
}

#[test]
fn no_message_and_no_wake_up_is_lost_without_fences_of_the_writer() {
    assert!(heavy_barrier_available(), "this kernel or sandbox has no membarrier: the cheap handshake is not tested");
    stream(60_000, 4, false, 3);
    stream(20_000, 2, false, 4);
}
