//! Paths that take packets of some size and no larger, refuse them or lose them, and change.

use super::*;

/// The sizes that are tried, and the one that always passes.
const SIZES: [usize; 11] = [1200, 1452, 1472, 4044, 8848, 8952, 8972, 16_336, 32_720, 65_472, 65_507];

fn largest(mtu: usize) -> usize {
    SIZES[..10].iter().copied().filter(|size| *size <= mtu).max().expect("1,200 bytes pass everywhere")
}

/// Often one of those that are common, sometimes any.
fn any_path(random: &mut SeededEntropy) -> Path {
    let mtu = match random.chance(0.7) {
        true => SIZES[random.below(SIZES.len() as u64) as usize],
        false => 1200 + random.below(65_000) as usize,
    };
    Path { mtu, refuses: random.chance(0.5) }
}

fn world_on(seed: u64, weather: Weather, paths: [Path; 2]) -> World {
    let config = SessionConfig::default();
    let sides = if seed % 4 == 3 { sealed(seed, &config) } else { [plain(1, 2, &config), plain(2, 1, &config)] };
    World { paths, ..World::new(seed, weather, sides) }
}

fn quiet(delay_us: u64) -> Weather {
    Weather { delay_us, ..Weather::default() }
}

fn are_found(world: &World) -> bool {
    world.sides.iter().all(Session::is_size_found)
}

fn sizes(world: &World) -> [usize; 2] {
    world.sides.each_ref().map(Session::packet_bytes)
}

/// Sends a message of so many bytes and runs until it has arrived; how long that took.
fn carry(world: &mut World, from: usize, bytes: usize) -> Duration {
    let (began, before) = (world.now, received(&world.events[1 - from]));
    world.sides[1 - from].post_receive(1, place(0, bytes)).unwrap();
    world.sides[from].post_send(1, send(0, content(1, before as u64, bytes))).unwrap();
    let arrived = world.run(Duration::from_secs(120), |world| received(&world.events[1 - from]) > before);
    assert!(arrived, "{bytes} bytes of side {from} by {:?}: {:?}", world.paths[from], world.sides[from].stats());
    let mut events = world.events[1 - from].iter().rev();
    let Some(target) = events.find_map(|event| match event {
        Event::Received { target, .. } => target.as_ref(),
        _ => None,
    }) else {
        panic!("nothing came")
    };
    assert!(*target == content(1, before as u64, bytes));
    world.now - began
}

#[test]
fn the_largest_size_of_the_ladder_that_passes_is_found_each_way() {
    for seed in 0..300 {
        let mut random = SeededEntropy::new(seed);
        let paths = [any_path(&mut random), any_path(&mut random)];
        let mut world = world_on(seed, quiet(random.below(10_000)), paths);
        if random.chance(0.5) {
            // Whether or not there is something to do meanwhile.
            world = exchange_in(world, seed, 4, 50_000);
        }
        assert!(world.run(Duration::from_secs(2), are_found), "seed {seed}: {paths:?}");
        assert_eq!(sizes(&world), paths.map(|path| largest(path.mtu)), "seed {seed}: {paths:?}");
        let oversized = world.oversized;
        assert_eq!(oversized.map(|(_, others)| others), [0, 0], "seed {seed}: data does not try anything out");
        assert!(oversized.iter().all(|(probes, _)| *probes <= 9), "seed {seed}: {oversized:?}");
        assert!(world.sides.iter().all(|side| side.stats().size_probes <= 11), "seed {seed}");
        let falls = world.sides.each_ref().map(|side| side.stats().size_falls);
        assert_eq!(falls, [0, 0], "seed {seed}");
        // And what is sent then has that size.
        let before = world.sides[0].stats().packets_sent;
        carry(&mut world, 0, 1_000_000);
        let sent = (world.sides[0].stats().packets_sent - before) as usize;
        let least = 1_000_000 / (largest(paths[0].mtu) - Header::BYTES);
        assert!((least..least + least / 10 + 9).contains(&sent), "seed {seed}: {sent} packets, {paths:?}");
    }
}

#[test]
fn an_ethernet_is_found_after_one_round_trip() {
    for (mtu, refuses, round_trips) in [(1472, false, 1), (1472, true, 1), (1452, true, 1)] {
        let mut world = world_on(1, quiet(10_000), [Path { mtu, refuses }; 2]);
        world.run(Duration::from_millis(20 * round_trips + 1), |_| false);
        assert_eq!(sizes(&world), [mtu; 2]);
        world.run(Duration::from_secs(1), |_| false);
        let waited = world.sides.each_ref().map(|side| side.stats().probes);
        assert!(!refuses || waited == [0, 0], "nobody waits for an answer to what was refused: {waited:?}");
    }
    // Three are lost before the next smaller one is tried: timers tell, not round trips.
    let mut world = world_on(1, quiet(10_000), [Path { mtu: 1452, refuses: false }; 2]);
    assert!(world.run(Duration::from_secs(2), |world| sizes(world) == [1452; 2]));
}

#[test]
fn any_change_of_the_path_delivers_exactly_once_and_in_order() {
    let chosen = std::env::var("HIGHWIRE_SEED").ok().and_then(|seed| seed.parse().ok());
    let (mut falls, mut grown) = (0, 0);
    for seed in chosen.map_or(0..300, |seed: u64| seed..seed + 1) {
        let mut random = SeededEntropy::new(seed ^ 0x517e);
        let weather = if random.chance(0.5) { stormy(seed) } else { quiet(random.below(2_000)) };
        let paths = [any_path(&mut random), any_path(&mut random)];
        let mut world = world_on(seed, weather, paths);
        let mut changes = Vec::new();
        for _ in 0..random.below(8) {
            let within = [100, 300, 1_000][random.below(3) as usize];
            changes.push((random.below(within), random.below(2) as usize, any_path(&mut random)));
        }
        changes.sort_by_key(|change| change.0);
        world.changes = changes.into();
        let bytes_max = [6_000, 100_000, 400_000][random.below(3) as usize];
        let world = exchange_in(world, seed, 5, bytes_max);
        falls += world.sides.iter().map(|side| side.stats().size_falls).sum::<u64>();
        grown += sizes(&world).iter().filter(|size| **size > 1200).count();
    }
    assert!(chosen.is_some() || falls > 60 && grown > 400, "{falls} falls, {grown} grew");
}

#[test]
fn a_path_that_takes_less_than_before_carries_what_is_under_way() {
    for refuses in [false, true] {
        for (before, after) in [(65_472, 1200), (8972, 1472), (1472, 1452), (1472, 1300), (8972, 4500)] {
            let mut world = world_on(2, quiet(200), [Path { mtu: before, refuses }; 2]);
            assert!(world.run(Duration::from_secs(2), are_found));
            world.changes.push_back((world.packets + 30, 0, Path { mtu: after, refuses }));
            let took = carry(&mut world, 0, 5_000_000);
            let (stats, oversized) = (world.sides[0].stats(), world.oversized[0].1);
            assert_eq!(stats.size_falls, 1, "{before} to {after}: {stats:?}");
            // A refusal is noticed at once, a silent loss by timers.
            let limit = if refuses { 1 } else { 3_000 };
            assert!(oversized > 0 && (!refuses || oversized <= 16 * limit), "{oversized} packets went too large");
            assert!(took < Duration::from_secs(3), "{before} to {after} took {took:?}");
            assert!(world.run(Duration::from_secs(2), are_found));
            assert_eq!(sizes(&world)[0], largest(after), "{before} to {after}, refuses: {refuses}");
            assert_eq!(sizes(&world)[1], before, "the other way is another one");
            let before = world.oversized[0].1;
            carry(&mut world, 0, 1_000_000);
            assert_eq!(world.oversized[0].1, before);
        }
    }
}

#[test]
fn small_messages_that_pass_do_not_hide_that_large_ones_do_not() {
    let mut world = world_on(3, quiet(200), [Path { mtu: 8972, refuses: false }; 2]);
    assert!(world.run(Duration::from_secs(2), are_found));
    world.paths[0].mtu = 1472;
    world.sides[1].post_receive(1, place(0, 100_000)).unwrap();
    world.sides[0].post_send(1, send(0, content(1, 0, 100_000))).unwrap();
    for number in 0..900 {
        world.sides[1].post_receive(2, place(number, 100)).unwrap();
        world.sides[0].post_send(2, send(number, vec![1; 100])).unwrap();
        world.run(Duration::from_micros(100), |_| false);
    }
    assert!(
        world.run(Duration::from_millis(50), |world| received(&world.events[1]) == 901),
        "{:?}",
        world.sides[0].stats()
    );
    assert_eq!((world.sides[0].stats().size_falls, world.sides[0].packet_bytes()), (1, 1472));
}

#[test]
fn losses_that_have_nothing_to_do_with_size_change_it_seldom() {
    let weather = Weather { loss: 0.05, delay_us: 500, ..Weather::default() };
    let mut world = world_on(4, weather, [Path { mtu: 8972, refuses: true }; 2]);
    world.run(Duration::from_secs(5), are_found);
    for _ in 0..20 {
        carry(&mut world, 0, 1_000_000);
    }
    assert_eq!(world.sides[0].stats().size_falls, 0);
    assert_eq!(world.sides[0].packet_bytes(), 8972);
}

#[test]
fn a_path_that_takes_more_is_noticed_after_minutes_and_only_with_traffic() {
    let mut world = world_on(5, quiet(200), [Path { mtu: 1472, refuses: false }; 2]);
    assert!(world.run(Duration::from_secs(2), are_found));
    let probes = world.sides[0].stats().size_probes;
    world.paths[0].mtu = 8972;
    world.run(Duration::from_secs(1200), |_| false);
    assert_eq!(world.sides[0].stats().size_probes, probes, "nobody asks for it");
    carry(&mut world, 0, 100);
    assert!(world.run(Duration::from_secs(1), are_found));
    assert_eq!(sizes(&world), [8972, 1472]);
}

#[test]
fn nothing_waits_for_a_question_of_size() {
    // From the first moment on, while sizes are tried and lost, as long as it takes without.
    for mtu in [1200, 1472, 65_507] {
        for refuses in [false, true] {
            let mut world = world_on(6, quiet(50), [Path { mtu, refuses }; 2]);
            world.sides.iter_mut().for_each(|side| (0..9).for_each(|n| side.post_receive(1, place(n, 64)).unwrap()));
            for round in 0..400 {
                for from in 0..2 {
                    let (began, events) = (world.now, world.events[1 - from].len());
                    world.sides[from].post_send(1, send(round, vec![1; 4])).unwrap();
                    let came = |world: &World| received(&world.events[1 - from][events..]) == 1;
                    assert!(world.run(Duration::from_millis(1), came), "message {round} of side {from}");
                    // Before the first, word of the receives has to go over.
                    let limit = Duration::from_micros(if round + from as u64 == 0 { 100 } else { 50 });
                    assert!(world.now - began <= limit, "message {round} of side {from}: {:?}", world.now - began);
                    world.sides[1 - from].post_receive(1, place(round, 64)).unwrap();
                }
            }
            assert!(are_found(&world));
        }
    }
}

#[test]
fn question_and_answer_are_one_packet_each_whatever_size_was_found() {
    for mtu in [1200, 1452, 1472, 8972, 65_507] {
        for refuses in [false, true] {
            let mut world = world_on(7, quiet(50), [Path { mtu, refuses }; 2]);
            world.sides.iter_mut().for_each(|side| (0..9).for_each(|n| side.post_receive(1, place(n, 64)).unwrap()));
            world.run(Duration::from_millis(100), |_| false);
            assert!(are_found(&world));
            let before = world.packets;
            for round in 0..500 {
                for from in 0..2 {
                    let events = world.events[1 - from].len();
                    let message = send(round, vec![1; 4]);
                    assert!(send_ahead(&mut world, from, message), "nothing is in its way");
                    let came = |world: &World| received(&world.events[1 - from][events..]) == 1;
                    assert!(world.run(Duration::from_millis(1), came), "message {round} of side {from}");
                    world.sides[1 - from].post_receive(1, place(round, 64)).unwrap();
                }
            }
            assert_eq!(world.packets - before, 1000, "a path of {mtu} bytes, refuses: {refuses}");
        }
    }
}

#[test]
fn a_size_is_tried_with_a_packet_of_zeros_that_is_acknowledged() {
    for secret in [false, true] {
        let config = SessionConfig::default();
        let [mut near, mut far] =
            if secret { sealed(8, &config) } else { [plain(1, 2, &config), plain(2, 1, &config)] };
        let mut out = Vec::new();
        assert_eq!(near.poll_transmit(Duration::ZERO, 16, &mut out), Some(1472));
        assert_eq!((out.len(), near.poll_transmit(Duration::ZERO, 16, &mut Vec::new())), (1472, None), "one at a time");
        let header = Header::parse(&out).unwrap();
        assert_eq!((header.kind, header.vi, header.number, usize::from(header.length)), (Kind::Probe, 0, 0, 1408));
        assert!(secret || out[Header::BYTES..].iter().all(|byte| *byte == 0));
        assert_eq!(near.packet_bytes(), 1200);
        far.handle_packet(Duration::ZERO, &out).unwrap();
        out.clear();
        far.poll_transmit(Duration::ZERO, 16, &mut out).unwrap();
        near.handle_packet(Duration::from_millis(1), &out).unwrap();
        assert_eq!(near.packet_bytes(), 1472);
    }
}

#[test]
fn a_message_cut_small_and_one_cut_large_leave_in_pulses_of_one_length_each() {
    let mut world = world_on(9, quiet(1_000), [Path { mtu: 8972, refuses: true }; 2]);
    for number in 0..3 {
        world.sides[1].post_receive(1, place(number, 300_000)).unwrap();
        world.sides[0].post_send(1, send(number, content(1, number, 300_000))).unwrap();
    }
    assert!(world.run(Duration::from_secs(5), |world| received(&world.events[1]) == 3));
    for (number, event) in (0..).zip(&world.events[1]) {
        let Event::Received { target: Some(target), .. } = event else { panic!() };
        assert!(*target == content(1, number, 300_000), "message {number}");
    }
    let sent = world.sides[0].stats().packets_sent;
    assert!((100..600).contains(&sent), "{sent} packets");
}

#[test]
fn an_unreliable_vi_goes_on_when_the_path_takes_less() {
    let mut world = world_on(10, quiet(100), [Path { mtu: 8972, refuses: false }; 2]);
    for side in &mut world.sides {
        side.open_vi(50, 50, Assurance::Unreliable, Assurance::Unreliable).unwrap();
    }
    assert!(world.run(Duration::from_secs(2), are_found));
    world.paths[0].mtu = 1472;
    for number in 0..500 {
        world.sides[1].post_receive(50, place(number, 20_000)).unwrap();
        world.sides[0].post_send(50, send(number, content(50, number, 20_000))).unwrap();
        world.run(Duration::from_micros(300), |_| false);
    }
    world.run(Duration::from_secs(1), |_| false);
    let got = received(&world.events[1]);
    assert!(got > 200 && got < 500, "{got} of 500 arrived");
    for event in &world.events[1] {
        let Event::Received { immediate, target: Some(target), status: Ok(()), .. } = event else { panic!() };
        assert!(*target == content(50, u64::from(*immediate), 20_000), "message {immediate}");
    }
    assert_eq!(world.sides[0].packet_bytes(), 1472);
}

#[test]
fn packets_of_two_cuts_never_share_a_pulse() {
    let mut side = plain(1, 2, &fixed(1200));
    for vi in 1..=2 {
        side.open_vi(vi, vi, Assurance::Reliable, Assurance::Reliable).unwrap();
    }
    let named = |token, bytes| Outgoing { payload_token: Some(token), ..send(token, vec![1; bytes]) };
    side.post_send(2, named(1, 30_000)).unwrap();
    assert_eq!(side.poll_transmit(Duration::ZERO, 1, &mut Vec::new()), Some(1200));
    side.search = SizeSearch::new(PacketSize::Fixed(1472));
    side.set_size();
    // With its preface of 16 bytes exactly one full packet: the pulse goes on behind it.
    side.post_send(1, named(2, 1472 - Header::BYTES - 16)).unwrap();
    let mut lengths = Vec::new();
    let mut out = Vec::new();
    while let Some(segment) = side.poll_transmit(Duration::ZERO, 16, &mut out) {
        for packet in std::mem::take(&mut out).chunks(segment) {
            assert!(Header::parse(packet).is_ok(), "a packet of {} bytes is cut at {segment}", packet.len());
            lengths.push(packet.len());
        }
    }
    assert_eq!(lengths.iter().filter(|length| **length == 1472).count(), 1);
    assert!(lengths.iter().filter(|length| **length == 1200).count() > 20, "{lengths:?}");
}

#[test]
fn what_a_size_says_of_packets_that_came_is_said_again_without_it() {
    let config = SessionConfig::default();
    let [mut near, mut far] = [plain(1, 2, &fixed(1472)), plain(2, 1, &config)];
    for side in [&mut near, &mut far] {
        side.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
    }
    far.expect(1, 7, place(0, 10)).unwrap();
    near.post_send(1, Outgoing { payload_token: Some(7), ..send(0, vec![1; 10]) }).unwrap();
    let mut out = Vec::new();
    near.poll_transmit(Duration::ZERO, 1, &mut out).unwrap();
    far.handle_packet(Duration::ZERO, &out).unwrap();
    assert_eq!(far.poll_transmit(Duration::ZERO, 1, &mut Vec::new()), Some(1472), "a size, which is lost");
    let later = config.acknowledge_delay;
    far.handle_timeout(later);
    out.clear();
    far.poll_transmit(later, 1, &mut out).expect("an acknowledgement");
    assert_eq!(Header::parse(&out).unwrap().kind, Kind::Ack);
    near.handle_packet(later, &out).unwrap();
    assert!(matches!(near.poll_event(), Some(Event::Sent { status: Ok(()), .. })));
}

#[test]
fn short_messages_ask_for_no_more_acknowledgements_where_large_packets_pass() {
    let asked = [1472, 8972, PacketSize::MOST].map(|bytes| {
        let mut side = plain(1, 2, &fixed(bytes));
        side.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
        for token in 0..300 {
            side.post_send(1, Outgoing { payload_token: Some(token), ..send(token, vec![1; 4]) }).unwrap();
        }
        let (mut asked, mut sent, mut out) = (0, 0, Vec::new());
        while side.poll_transmit(Duration::ZERO, 1, &mut out).is_some() {
            asked += u32::from(Header::parse(&out).unwrap().flags.has(HeaderFlags::ACKNOWLEDGE));
            sent += 1;
            out.clear();
        }
        assert_eq!(sent, 300, "packets of {bytes} bytes");
        asked
    });
    assert!(asked[0] > 0 && asked[1..].iter().all(|count| *count <= asked[0]), "{asked:?}");
}

#[test]
fn short_messages_are_copied_however_large_packets_may_be() {
    for (bytes, woven) in [(4, false), (4096, false), (40_000, true)] {
        let mut side = plain(1, 2, &fixed(PacketSize::MOST));
        side.open_vi(1, 1, Assurance::Reliable, Assurance::Reliable).unwrap();
        side.post_send(1, Outgoing { payload_token: Some(1), ..send(1, vec![1; bytes]) }).unwrap();
        let transmit = side.poll_transmit_with(Duration::ZERO, 1, &mut Vec::new(), &mut |_| true);
        assert_eq!(matches!(transmit, Some(Transmit::Sent)), woven, "a message of {bytes} bytes");
    }
}
