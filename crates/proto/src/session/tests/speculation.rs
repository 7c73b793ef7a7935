//! A kernel that puts batches where payloads are expected, rightly or not, in a network that does its worst.

use super::*;

/// The VI of the last packet that each side was handed.
#[derive(Debug, Default)]
pub(super) struct Kernel {
    last_vi: [u32; 2],
}

impl World {
    /// Packets that have come for one side at once are received in batches of one size.
    pub(super) fn receive_in_batches(&mut self, to: usize, packets: &[Vec<u8>]) {
        let mut rest = packets;
        while let Some(first) = rest.first() {
            let most = 1 + self.random.below(20) as usize;
            let same = rest.iter().take(most).take_while(|packet| packet.len() == first.len()).count();
            let shorter = rest.get(same).is_some_and(|packet| same < most && packet.len() < first.len());
            let (batch, later) = rest.split_at(same + usize::from(shorter));
            self.receive_batch(to, batch);
            rest = later;
        }
    }

    fn receive_batch(&mut self, to: usize, batch: &[Vec<u8>]) {
        let (now, bytes, side) = (self.now, batch.concat(), &mut self.sides[to]);
        let last_vi = self.kernel.as_ref().map_or(0, |kernel| kernel.last_vi[to]);
        let header = Header::parse(&batch[0]);
        let (guess, looked) = match self.random.below(10) {
            0 => (None, false),
            1 | 2 => match &header {
                Ok(header) => (side.guess_after_look(header, &batch[0][..batch[0].len().min(80)]).0, true),
                Err(_) => (None, true),
            },
            3 => (side.guess(last_vi, 1 + self.random.below(3) as usize), false),
            _ => (side.guess(last_vi, 0), false),
        };
        let mut taken = 0;
        if let Some(mut guess) = guess {
            let (packet, heads) = (guess.packet, guess.receive(&bytes));
            let cut_right = if batch.len() == 1 { bytes.len() <= packet } else { batch[0].len() == packet };
            if cut_right {
                taken = side.take_landed(now, &heads, bytes.len(), looked);
                side.finish_landed();
            }
            if taken < batch.len() {
                side.note_missed(batch.len() - taken, bytes.len());
            }
        }
        check_landed(side, last_vi);
        for packet in &batch[taken..] {
            let _ = side.handle_packet(now, packet);
        }
        check_landed(side, last_vi);
        if let (Ok(header), Some(kernel)) = (header, &mut self.kernel) {
            kernel.last_vi[to] = header.vi;
        }
    }
}

/// What counts as received is what was sent, whatever landed where since.
fn check_landed(side: &Side, vi: u32) {
    let Some(state) = side.vis.get(&vi) else { return };
    for (number, message) in &state.arriving {
        let Some(target) = message.place.as_ref().and_then(|place| place.target.as_ref()) else { continue };
        let sent = content(vi, u64::from(*number), target.len());
        for range in message.landed.iter().filter(|_| !message.too_long) {
            let range = range.start as usize..range.end as usize;
            assert!(target[range.clone()] == sent[range.clone()], "VI {vi}, message {number}, {range:?}");
        }
    }
}

fn with_kernel(seed: u64, weather: Weather) -> World {
    let config = fixed(600);
    let mut world = World::new(seed, weather, [plain(1, 2, &config), plain(2, 1, &config)]);
    world.kernel = Some(Kernel::default());
    world
}

#[test]
fn whatever_lands_where_all_arrives_once_and_in_order() {
    let mut all = LandingStats::default();
    for seed in 0..20 {
        let world = exchange_in(with_kernel(seed, stormy(seed)), seed, 6, 20_000);
        world.sides.iter().for_each(|side| all += side.landing(None));
    }
    for (count, what) in [(all.hits, "hits"), (all.seen, "seen"), (all.misses, "misses"), (all.copied, "copied")] {
        assert!(count > 100, "{count} {what}: {all:?}");
    }
}

#[test]
fn on_a_quiet_path_everything_lands_but_how_it_begins() {
    let mut world = with_kernel(3, Weather { delay_us: 50, ..Weather::default() });
    (0..20).for_each(|token| world.sides[1].post_receive(1, place(token, 60_000)).unwrap());
    (0..20).for_each(|token| world.sides[0].post_send(1, send(token, content(1, token, 60_000))).unwrap());
    let receive = |world: &mut World| {
        while world.step(Duration::from_secs(1)) {}
        world.sides[1].landing(Some(1))
    };
    let landed = receive(&mut world);
    assert_eq!(received(&world.events[1]), 20);
    assert!(landed.hits + landed.seen > 5 * landed.copied, "{landed:?}");
}

/// One message of two packets is half there; a guess is made for the second.
fn half_there(second: impl Fn(&mut Vec<u8>)) -> (World, Vec<u8>, usize) {
    let mut world = with_kernel(1, Weather::default());
    let [from, to] = &mut world.sides;
    to.post_receive(1, place(7, 1000)).unwrap();
    let mut out = Vec::new();
    while to.poll_transmit(Duration::ZERO, 1, &mut out).is_some() {}
    // The credit.
    for packet in out.chunks(out.len().max(1)) {
        let _ = from.handle_packet(Duration::ZERO, packet);
    }
    from.post_send(1, send(3, content(1, 0, 1000))).unwrap();
    let mut packets = Vec::new();
    let segment = from.poll_transmit(Duration::ZERO, 16, &mut packets).unwrap();
    let (first, last) = packets.split_at(segment);
    to.handle_packet(Duration::ZERO, first).unwrap();
    let mut last = last.to_vec();
    second(&mut last);
    let mut guess = to.guess(1, 0).expect("a message goes on");
    let there = (guess.first_head, guess.packet, guess.place.len());
    assert_eq!(there, (Header::BYTES, segment, 1000 - (segment - Header::BYTES - 8)));
    let heads = guess.receive(&last);
    let taken = to.take_landed(Duration::ZERO, &heads, last.len(), false);
    to.finish_landed();
    (world, last, taken)
}

#[test]
fn a_packet_in_its_place_is_taken_there_and_one_that_is_damaged_is_not() {
    let (mut world, last, taken) = half_there(|_| {});
    assert_eq!(taken, 1);
    world.pump();
    assert_eq!(received(&world.events[1]), 1);
    // It came before.
    assert!(matches!(world.sides[1].handle_packet(Duration::ZERO, &last), Err(Dropped::Replayed(_))));
    for byte in [1, 3, 20, 25, 40, 50, 64, 200] {
        let (mut world, damaged, taken) = half_there(|packet| packet[byte] ^= 4);
        assert_eq!(taken, 0, "byte {byte}");
        assert!(world.sides[1].handle_packet(Duration::ZERO, &damaged).is_err(), "byte {byte}");
        // The true one comes later, and overwrites what lies there.
        let mut last = damaged;
        last[byte] ^= 4;
        world.sides[1].handle_packet(Duration::ZERO, &last).unwrap();
        world.pump();
        let Some(Event::Received { target: Some(target), .. }) = world.events[1].pop() else { panic!("byte {byte}") };
        assert_eq!(target, content(1, 0, 1000), "byte {byte}");
    }
}

#[test]
fn where_nothing_is_missing_nothing_is_guessed() {
    let mut world = with_kernel(1, Weather::default());
    let side = &mut world.sides[1];
    assert!(side.guess(1, 0).is_none(), "nothing has come");
    assert!(side.guess(99, 0).is_none(), "no such VI");
    let (mut world, ..) = half_there(|_| {});
    let side = &mut world.sides[1];
    assert!(side.guess(1, 0).is_none(), "no further receive is posted");
    side.post_receive(1, place(8, 5000)).unwrap();
    assert_eq!(side.guess(1, 0).map(|guess| guess.first_head), Some(Header::BYTES + 8), "the next message");
    side.close_vi(1);
    assert!(side.guess(1, 0).is_none() && side.guessed_place().is_none(), "closed");
    assert_eq!(side.landing(None).hits, 1, "what was counted stays");
    let [mut ours, _] = sealed(1, &fixed(600));
    ours.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
    ours.post_receive(1, place(1, 5000)).unwrap();
    assert!(ours.guess(1, 0).is_none(), "what is encrypted cannot land");
}
