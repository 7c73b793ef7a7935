use super::*;
use crate::entropy::SeededEntropy;
use crate::header::Kind;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Two ends with the secrets of a handshake.
fn pair() -> (Sealing, Sealing) {
    let secret = |byte| Secret::new([byte; SECRET_BYTES]);
    (Sealing::sealed(secret(1), secret(2)), Sealing::sealed(secret(2), secret(1)))
}

fn both_forms() -> [(Sealing, Sealing); 2] {
    [pair(), (Sealing::checksummed(), Sealing::checksummed())]
}

fn plain(number: u64, payload: &[u8]) -> Vec<u8> {
    let mut header = Header::new(Kind::Data);
    header.session = 77;
    header.number = number;
    header.length = payload.len() as u16;
    let mut packet = vec![0; Header::BYTES + payload.len()];
    header.write(&mut packet);
    packet[Header::BYTES..].copy_from_slice(payload);
    packet
}

fn sealed(sealing: &mut Sealing, number: u64, payload: &[u8]) -> Vec<u8> {
    let mut packet = plain(number, payload);
    sealing.seal(&mut packet).unwrap();
    packet
}

fn open(sealing: &mut Sealing, packet: &[u8]) -> Result<Vec<u8>, OpenError> {
    let header = Header::parse(packet).unwrap();
    let mut apart = vec![0xee; usize::from(header.length)];
    sealing.open(&header, packet, &mut apart).map(|()| apart)
}

fn open_in_place(sealing: &mut Sealing, packet: &[u8]) -> Result<Vec<u8>, OpenError> {
    let mut packet = packet.to_vec();
    let header = Header::parse(&packet).unwrap();
    sealing.open_in_place(&header, &mut packet).map(|()| packet.split_off(Header::BYTES))
}

proptest! {
    #[test]
    fn what_is_sealed_is_opened(payload in prop::collection::vec(any::<u8>(), 0..3_000), number: u64, bits in 0u8..128) {
        for (mut near, mut far) in both_forms() {
            let mut packet = plain(number, &payload);
            packet[FLAGS_AT] = bits;
            near.seal(&mut packet).unwrap();
            let flags = Header::parse(&packet).unwrap().flags;
            let ours = HeaderFlags::PHASE.with(HeaderFlags::SEALED);
            prop_assert_eq!(flags.without(ours).bits(), bits & !ours.bits(), "other flags stay");
            prop_assert_eq!(flags.has(HeaderFlags::SEALED), near.is_sealed());
            prop_assert_eq!(open(&mut far, &packet), Ok(payload.clone()));
            prop_assert_eq!(open_in_place(&mut far, &packet), Ok(payload.clone()));
        }
    }

    #[test]
    fn sealing_from_elsewhere_gives_the_same_bytes(payload in prop::collection::vec(any::<u8>(), 0..3_000), number: u64) {
        for ((mut one, _), (mut other, _)) in both_forms().into_iter().zip(both_forms()) {
            let in_place = sealed(&mut one, number, &payload);
            let mut apart = plain(number, &vec![0x55; payload.len()]);
            other.seal_from(&mut apart, &payload).unwrap();
            prop_assert_eq!(apart, in_place);
        }
    }

    #[test]
    fn random_packets_do_not_open(packet in prop::collection::vec(any::<u8>(), 0..300), kind in 1u8..=6, flags in 0u8..128) {
        let mut packet = packet;
        if packet.len() >= Header::BYTES {
            packet[0] = 1;
            packet[1] = kind;
            packet[2] = flags;
            let length = (packet.len() - Header::BYTES) as u16;
            packet[28..30].copy_from_slice(&length.to_le_bytes());
            packet[30..32].fill(0);
        }
        if let Ok(header) = Header::parse(&packet) {
            for (mut near, _) in both_forms() {
                prop_assert!(near.open(&header, &packet, &mut vec![0; usize::from(header.length)]).is_err());
                prop_assert!(near.open_in_place(&header, &mut packet.clone()).is_err());
            }
        }
    }

    #[test]
    fn a_header_that_is_not_the_packets_own_is_an_error(bytes in 0usize..200, length in 0u16..200, space in 0usize..200) {
        let mut header = Header::new(Kind::Data);
        header.length = length;
        header.flags = HeaderFlags::SEALED;
        for (mut near, _) in both_forms() {
            prop_assert!(near.open(&header, &vec![1; bytes], &mut vec![0; space]).is_err());
            prop_assert!(near.open_in_place(&header, &mut vec![1; bytes]).is_err());
        }
    }
}

#[test]
fn every_single_bit_of_a_packet_counts() {
    for (mut near, mut far) in both_forms() {
        let mut packet = sealed(&mut near, 1 << 40, b"eight or so bytes");
        for bit in 0..8 * packet.len() {
            packet[bit / 8] ^= 1 << (bit % 8);
            // Many flips make no packet at all; those that do must not verify.
            if Header::parse(&packet).is_ok() {
                assert!(open(&mut far, &packet).is_err(), "bit {bit}");
                assert!(open_in_place(&mut far, &packet).is_err(), "bit {bit} in place");
            }
            packet[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(far.stats().forged > 8 * 17);
        assert_eq!(open(&mut far, &packet).unwrap(), b"eight or so bytes", "no harm was done");
    }
}

#[test]
fn a_number_is_never_used_twice() {
    for (mut near, _) in both_forms() {
        sealed(&mut near, 10, b"first");
        for number in [10, 9, 0] {
            let mut packet = plain(number, b"again");
            assert_eq!(near.seal(&mut packet), Err(SealError::NumberUsed { number, last: 10 }));
            assert_eq!(near.seal_from(&mut packet, b"again"), Err(SealError::NumberUsed { number, last: 10 }));
            assert_eq!(packet, plain(number, b"again"), "the packet is as it was");
        }
        sealed(&mut near, 12, b"a gap is allowed");
        sealed(&mut near, u64::MAX, b"the last of all");
        assert!(near.seal(&mut plain(u64::MAX, b"")).is_err());
    }
}

#[test]
fn what_is_no_packet_is_not_sealed() {
    for (mut near, _) in both_forms() {
        assert_eq!(near.seal(&mut [0; 63]), Err(SealError::Malformed(Malformed::TooShort { bytes: 63 })));
        let mut packet = plain(1, b"four");
        packet.push(0);
        let wrong = SealError::Malformed(Malformed::WrongLength { length: 4, bytes: 69 });
        assert_eq!(near.seal(&mut packet), Err(wrong));
        assert!(near.seal_from(&mut plain(1, b"four"), b"five5").is_err());
    }
}

#[test]
fn the_wrong_space_is_refused_before_anything_is_written() {
    for (mut near, mut far) in both_forms() {
        let packet = sealed(&mut near, 1, b"four");
        let header = Header::parse(&packet).unwrap();
        let mut space = [9; 5];
        let expected = Err(OpenError::WrongSpace { length: 4, space: 5 });
        assert_eq!(far.open(&header, &packet, &mut space), expected);
        assert_eq!(space, [9; 5]);
    }
}

#[test]
fn plain_and_sealed_packets_are_refused_by_the_other_form() {
    let (mut near, mut far) = pair();
    let (mut plain_near, mut plain_far) = (Sealing::checksummed(), Sealing::checksummed());
    let packet = sealed(&mut plain_near, 3, b"x");
    assert_eq!(open(&mut far, &packet), Err(OpenError::Plain { number: 3 }));
    let packet = sealed(&mut near, 3, b"x");
    assert_eq!(open(&mut plain_far, &packet), Err(OpenError::Sealed { number: 3 }));
}

#[test]
fn a_packet_sent_back_to_its_sender_does_not_open() {
    let (mut near, _) = pair();
    let packet = sealed(&mut near, 0, b"mirror");
    assert_eq!(open(&mut near, &packet), Err(OpenError::Forged { number: 0 }));
}

#[test]
fn a_wrong_checksum_leaves_the_space_as_it_was() {
    let (mut near, mut far) = (Sealing::checksummed(), Sealing::checksummed());
    let mut packet = sealed(&mut near, 0, b"four");
    assert_eq!(packet[TAG_AT + 4..Header::BYTES], [0; 12]);
    let header = Header::parse(&packet).unwrap();
    packet[Header::BYTES] ^= 1;
    let mut space = *b"keep";
    assert!(far.open(&header, &packet, &mut space).is_err());
    assert_eq!(&space, b"keep");
    assert_eq!(far.stats().forged, 1);
}

#[test]
fn the_checksum_is_crc32c() {
    // The check value of the Castagnoli polynomial for "123456789".
    assert_eq!(checksum(b"1234", b"56789")[..4], 0xe306_9283u32.to_le_bytes());
}

/// Seals numbers in a row and tells the phase of each.
fn phases(near: &mut Sealing, numbers: std::ops::Range<u64>) -> Vec<bool> {
    numbers.map(|number| Header::parse(&sealed(near, number, b"x")).unwrap().flags.has(HeaderFlags::PHASE)).collect()
}

#[test]
fn the_second_change_waits_for_the_acknowledgement_of_the_first() {
    let (mut near, _) = pair();
    near.set_limits(KeyLimits { change_after: 10, end: 25 });
    assert_eq!(near.packets_until_key_change(), Some(10));
    assert_eq!(phases(&mut near, 0..10), [false; 10]);
    assert_eq!(near.packets_until_key_change(), Some(0));
    assert_eq!(phases(&mut near, 10..30), [true; 20], "both ends hold the first two keys from the start");

    near.handle_acknowledged(10);
    assert_eq!(phases(&mut near, 30..31), [true], "packets 0 to 9 show nothing about the second key");
    near.handle_acknowledged(1_000_000);
    assert_eq!(phases(&mut near, 31..35), [true; 4], "nor does a number that was never sent");
    assert_eq!(near.seal(&mut plain(35, b"")), Err(SealError::KeyExhausted { sealed: 25 }));

    near.handle_acknowledged(11);
    assert_eq!(phases(&mut near, 35..36), [false], "packet 10 was opened, so the third key is known");
    assert_eq!(near.stats().sending_keys_changed, 2);
}

#[test]
fn a_flipped_phase_bit_alone_moves_no_receiver() {
    let (mut near, mut far) = pair();
    let mut packet = sealed(&mut near, 5, b"x");
    packet[FLAGS_AT] ^= HeaderFlags::PHASE.bits();
    assert_eq!(open(&mut far, &packet), Err(OpenError::Forged { number: 5 }));
    packet[FLAGS_AT] ^= HeaderFlags::PHASE.bits();
    assert!(open(&mut far, &packet).is_ok());
    assert_eq!(far.stats(), SealingStats { forged: 1, ..SealingStats::default() });
}

#[test]
fn late_packets_open_with_the_previous_key_until_it_is_dropped() {
    let (mut near, mut far) = pair();
    near.set_limits(KeyLimits { change_after: 4, end: 10_000 });
    let old: Vec<_> = (0..4).map(|number| sealed(&mut near, number, b"old")).collect();
    let new = sealed(&mut near, 4, b"new");
    assert!(open(&mut far, &old[0]).is_ok());
    assert!(open(&mut far, &new).is_ok());
    assert_eq!(far.stats().receiving_keys_changed, 1);
    assert!(open(&mut far, &old[2]).is_ok(), "late, but its key is still there");
    assert_eq!(far.stats().receiving_keys_changed, 1, "and it moves nothing");

    let near_the_end = sealed(&mut near, 4 + ReplayWindow::WIDTH - 1, b"new");
    assert!(open(&mut far, &near_the_end).is_ok() && open(&mut far, &old[1]).is_ok());
    let beyond = sealed(&mut near, 4 + ReplayWindow::WIDTH, b"new");
    assert!(open(&mut far, &beyond).is_ok());
    assert_eq!(open(&mut far, &old[3]), Err(OpenError::TooLate { number: 3 }));
    assert_eq!(far.stats().forged, 0);
}

#[test]
fn a_key_that_is_used_is_changed_by_time_too() {
    let (mut near, mut far) = pair();
    (0..100).for_each(|_| near.tick());
    assert_eq!(phases(&mut near, 0..2), [false; 2], "nothing was sealed with it");
    (0..KEY_TICKS).for_each(|_| near.tick());
    assert_eq!(phases(&mut near, 2..4), [true; 2]);
    (0..100).for_each(|_| near.tick());
    assert_eq!(phases(&mut near, 4..6), [true; 2], "the peer has not acknowledged the first change");
    near.handle_acknowledged(3);
    let packet = sealed(&mut near, 6, b"x");
    assert_eq!(near.stats().sending_keys_changed, 2);
    assert_eq!(open(&mut far, &packet), Err(OpenError::Forged { number: 6 }), "this receiver saw no change");
}

#[test]
fn the_previous_key_is_dropped_by_time_too() {
    let (mut near, mut far) = pair();
    near.set_limits(KeyLimits { change_after: 3, end: 10_000 });
    let old: Vec<_> = (0..3).map(|number| sealed(&mut near, number, b"old")).collect();
    far.tick();
    assert!(open(&mut far, &old[0]).is_ok() && open(&mut far, &sealed(&mut near, 3, b"new")).is_ok());
    (1..PREVIOUS_TICKS).for_each(|_| far.tick());
    assert!(open(&mut far, &old[1]).is_ok());
    far.tick();
    assert_eq!(open(&mut far, &old[2]), Err(OpenError::TooLate { number: 2 }));
}

#[test]
fn keys_of_one_direction_change_without_the_other() {
    let (mut near, mut far) = pair();
    near.set_limits(KeyLimits { change_after: 1, end: 2 });
    for number in 0..50 {
        let packet = sealed(&mut near, number, b"x");
        assert!(open(&mut far, &packet).is_ok());
        near.handle_acknowledged(number + 1);
    }
    assert_eq!(near.stats(), SealingStats { sending_keys_changed: 49, ..SealingStats::default() });
    assert_eq!(far.stats(), SealingStats { receiving_keys_changed: 49, ..SealingStats::default() });
}

#[test]
#[should_panic(expected = "not between 0 and its end")]
fn limits_leave_room_for_the_acknowledgement() {
    pair().0.set_limits(KeyLimits { change_after: 5, end: 5 });
}

#[test]
fn debug_shows_no_secret() {
    assert_eq!(
        format!("{:?}", pair().0),
        "Sealing { is_sealed: true, last_number: None, stats: \
         SealingStats { sending_keys_changed: 0, receiving_keys_changed: 0, forged: 0 }, .. }"
    );
}

/// One end of the simulated session.
struct End {
    sealing: Sealing,
    window: ReplayWindow,
    next_number: u64,
    received: u64,
    replays: u64,
    refused: Vec<(u64, OpenError)>,
}

impl End {
    fn new(mut sealing: Sealing, limits: KeyLimits) -> End {
        sealing.set_limits(limits);
        let window = ReplayWindow::new();
        End { sealing, window, next_number: 0, received: 0, replays: 0, refused: Vec::new() }
    }

    fn send(&mut self) -> Result<Vec<u8>, SealError> {
        let number = self.next_number;
        let mut packet = plain(number, &number.to_le_bytes());
        let mut header = Header::parse(&packet).unwrap();
        // The highest number received stands for the upper end of an acknowledged range.
        header.ack = self.window.highest().map_or(0, |highest| highest + 1);
        header.write(&mut packet);
        self.sealing.seal(&mut packet)?;
        self.next_number += 1;
        Ok(packet)
    }

    fn receive(&mut self, packet: &[u8]) {
        let header = Header::parse(packet).unwrap();
        if !self.window.would_accept(header.number) {
            self.replays += 1;
            return;
        }
        match open(&mut self.sealing, packet) {
            Ok(payload) => {
                assert_eq!(payload, header.number.to_le_bytes());
                assert!(self.window.accept(header.number));
                self.sealing.handle_acknowledged(header.ack);
                self.received += 1;
            }
            Err(error) => self.refused.push((header.number, error)),
        }
    }
}

/// Two ends and a network that loses, repeats and delays. Time is counted in packets sent.
struct Simulation {
    ends: [End; 2],
    entropy: SeededEntropy,
    on_the_way: BTreeMap<(u64, u64), (usize, Vec<u8>)>,
    sent: u64,
}

impl Simulation {
    fn new(seed: u64, limits: KeyLimits) -> Simulation {
        let (near, far) = pair();
        let ends = [End::new(near, limits), End::new(far, limits)];
        Simulation { ends, entropy: SeededEntropy::new(seed), on_the_way: BTreeMap::new(), sent: 0 }
    }

    /// Both ends send `rounds` packets each; in the rounds of `partition` nothing gets through.
    fn run(&mut self, rounds: u64, loss_percent: u64, delay_max: u64, partition: std::ops::Range<u64>) {
        for _ in 0..rounds {
            let now = self.ends[0].next_number;
            for from in 0..2 {
                let packet = self.ends[from].send().expect("the acknowledgements come in time");
                let copies = 1 + u64::from(self.entropy.next_word().is_multiple_of(50));
                for _ in 0..copies {
                    self.sent += 1;
                    if self.entropy.next_word() % 100 >= loss_percent && !partition.contains(&now) {
                        let arrival = now + self.entropy.next_word() % (delay_max + 1);
                        self.on_the_way.insert((arrival, self.sent), (1 - from, packet.clone()));
                    }
                }
            }
            while let Some(entry) = self.on_the_way.first_entry().filter(|entry| entry.key().0 <= now) {
                let (to, packet) = entry.remove();
                self.ends[to].receive(&packet);
            }
            let [near, far] = self.ends.each_ref().map(|end| end.sealing.stats());
            for (sender, receiver) in [(near, far), (far, near)] {
                let ahead = sender.sending_keys_changed - receiver.receiving_keys_changed;
                assert!(ahead <= 1, "the receiver only knows one key ahead");
            }
        }
    }
}

#[test]
fn ten_thousand_packets_each_way_over_ten_keys_with_loss_and_reordering() {
    let mut simulation = Simulation::new(0x5eed, KeyLimits { change_after: 1_000, end: 2_000 });
    simulation.run(10_000, 10, 100, 0..0);
    for end in &simulation.ends {
        assert_eq!(end.refused, [], "every packet that arrived was opened");
        assert!(end.received > 8_500, "{}", end.received);
        assert!(end.replays > 50, "{}", end.replays);
        let stats = end.sealing.stats();
        assert_eq!((stats.sending_keys_changed, stats.receiving_keys_changed, stats.forged), (9, 9, 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn no_key_is_missing_whatever_is_lost(seed: u64, loss_percent in 0u64..70, change_after in 101u64..300, silence in 0u64..1_000) {
        let mut simulation = Simulation::new(seed, KeyLimits { change_after, end: 100_000 });
        simulation.run(2_500, loss_percent, 100, 700..700 + silence);
        for end in &simulation.ends {
            prop_assert_eq!(&end.refused, &[], "every packet that arrived was opened");
            prop_assert!(end.sealing.stats().sending_keys_changed >= 2);
        }
    }
}
