//! The simulated network does what its configuration says, and the same for the same seed.

use highwire_link::{Burst, Inbox, Link, Network, NetworkConfig, NetworkCounters, Oversize, SendError, SimulatedLink};
use std::net::SocketAddr;
use std::time::Duration;

const MICROSECOND: Duration = Duration::from_micros(1);

fn address(host: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, host], 4000))
}

/// Moves time from arrival to arrival; each packet's time of arrival, and its bytes.
fn run(network: &Network, link: &mut SimulatedLink) -> Vec<(Duration, Vec<u8>)> {
    let mut inbox = Inbox::with_capacity(4, 2048);
    let mut arrivals = Vec::new();
    loop {
        while link.receive(&mut inbox).unwrap() > 0 {
            arrivals.extend(inbox.packets().map(|(_, packet)| (network.now(), packet.to_vec())));
        }
        match network.next_arrival() {
            Some(time) => network.advance_to(time),
            None => return arrivals,
        }
    }
}

fn numbered(count: usize, bytes_each: usize) -> Vec<u8> {
    (0..count).flat_map(|i| std::iter::repeat_n(i as u8, bytes_each)).collect()
}

#[test]
fn a_packet_takes_the_latency_and_not_a_moment_less() {
    let network = Network::new(NetworkConfig { latency: 70 * MICROSECOND, ..Default::default() });
    let (mut left, mut right) = (network.link(address(1)), network.link(address(2)));
    let mut inbox = Inbox::new();
    network.advance_to(Duration::from_secs(3));
    left.send(&[Burst::single(address(2), b"hello")]).unwrap();
    let arrival = Duration::from_secs(3) + 70 * MICROSECOND;
    assert_eq!(network.next_arrival(), Some(arrival));
    network.advance_to(arrival - Duration::from_nanos(1));
    assert_eq!(right.receive(&mut inbox), Ok(0));
    network.advance_to(arrival);
    assert_eq!(right.receive(&mut inbox), Ok(1));
    assert_eq!(network.next_arrival(), None);
    // Time does not go back.
    network.advance_to(Duration::ZERO);
    assert_eq!(network.now(), arrival);
}

#[test]
fn a_host_that_does_not_look_does_not_stop_the_time() {
    let network = Network::new(NetworkConfig { latency: 10 * MICROSECOND, ..Default::default() });
    let (mut left, _deaf) = (network.link(address(1)), network.link(address(2)));
    let mut right = network.link(address(3));
    left.send(&[Burst::single(address(2), b"unread")]).unwrap();
    network.advance_to(5 * MICROSECOND);
    left.send(&[Burst::single(address(3), b"read")]).unwrap();
    assert_eq!(network.next_arrival(), Some(10 * MICROSECOND));
    assert_eq!(run(&network, &mut right), [(15 * MICROSECOND, b"read".to_vec())]);
}

#[test]
fn jitter_spreads_arrivals_and_keeps_their_order() {
    let (latency, jitter) = (100 * MICROSECOND, 50 * MICROSECOND);
    let network = Network::new(NetworkConfig { seed: 5, latency, jitter, ..Default::default() });
    let (mut left, mut right) = (network.link(address(1)), network.link(address(2)));
    let mut times = Vec::new();
    for i in 0..200u8 {
        let sent = network.now() + Duration::from_millis(1);
        network.advance_to(sent);
        left.send(&[Burst::single(address(2), &[i])]).unwrap();
        times.extend(run(&network, &mut right).into_iter().map(|(time, packet)| (time - sent, packet[0])));
    }
    assert!(times.iter().map(|&(_, number)| number).eq(0..200));
    assert!(times.iter().all(|&(time, _)| (latency..latency + jitter).contains(&time)));
    let mean = times.iter().map(|(time, _)| *time).sum::<Duration>() / 200;
    assert!((115 * MICROSECOND..135 * MICROSECOND).contains(&mean), "{mean:?}");
    // Sent all at once, they come in order all the same.
    let bytes = numbered(200, 10);
    left.send(&[Burst { to: address(2), bytes: &bytes, segment: 10 }]).unwrap();
    assert!(run(&network, &mut right).iter().map(|(_, packet)| packet[0]).eq(0..200));
}

#[test]
fn packets_leave_at_the_rate_of_the_bottleneck() {
    let rate = Some(10_000_000);
    let network = Network::new(NetworkConfig { latency: Duration::ZERO, bytes_per_second: rate, ..Default::default() });
    let (mut left, mut right) = (network.link(address(1)), network.link(address(2)));
    let bytes = numbered(100, 1000);
    left.send(&[Burst { to: address(2), bytes: &bytes, segment: 1000 }]).unwrap();
    let arrivals = run(&network, &mut right);
    // 1,000 bytes at 10 MB/s: one packet every 100 microseconds, the first after as long.
    for (i, (time, _)) in arrivals.iter().enumerate() {
        assert_eq!(*time, (i as u32 + 1) * 100 * MICROSECOND);
    }
    assert_eq!(arrivals.len(), 100);
}

#[test]
fn senders_share_the_port_of_their_destination_and_directions_do_not() {
    let rate = Some(10_000_000);
    let network = Network::new(NetworkConfig { latency: Duration::ZERO, bytes_per_second: rate, ..Default::default() });
    let mut links: Vec<_> = (1..=3).map(|host| network.link(address(host))).collect();
    links[0].send(&[Burst::single(address(3), &[0; 1000])]).unwrap();
    links[1].send(&[Burst::single(address(3), &[1; 1000])]).unwrap();
    links[2].send(&[Burst::single(address(1), &[2; 1000])]).unwrap();
    network.advance_to(100 * MICROSECOND);
    let mut inbox = Inbox::new();
    assert_eq!(links[0].receive(&mut inbox), Ok(1));
    assert_eq!(links[2].receive(&mut inbox), Ok(1));
    network.advance_to(200 * MICROSECOND);
    assert_eq!(links[2].receive(&mut inbox), Ok(1));
    assert_eq!(inbox.packets().next().unwrap(), (address(2), &[1; 1000][..]));
}

#[test]
fn a_full_queue_drops_at_its_tail_and_drains_with_time() {
    let config = NetworkConfig {
        latency: Duration::ZERO,
        bytes_per_second: Some(10_000_000),
        queue_bytes: 5_000,
        ..Default::default()
    };
    let network = Network::new(config);
    let (mut left, mut right) = (network.link(address(1)), network.link(address(2)));
    let bytes = numbered(8, 1000);
    // Dropped on the way: to the sender it looks as sent as the others.
    assert_eq!(left.send(&[Burst { to: address(2), bytes: &bytes, segment: 1000 }]), Ok(1));
    assert_eq!(left.counters().packets_sent, 8);
    assert_eq!(network.counters(), NetworkCounters { carried: 5, dropped: 3, unreachable: 0, oversized: 0 });
    // After two packets have left there is room for two.
    network.advance_to(200 * MICROSECOND);
    left.send(&[Burst { to: address(2), bytes: &bytes[..3000], segment: 1000 }]).unwrap();
    assert_eq!(network.counters(), NetworkCounters { carried: 7, dropped: 4, unreachable: 0, oversized: 0 });
    let numbers: Vec<u8> = run(&network, &mut right).iter().map(|(_, packet)| packet[0]).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 0, 1]);
}

#[test]
fn each_sender_has_a_path_of_its_own_that_refuses_or_loses_what_is_too_large() {
    let network = Network::new(NetworkConfig::default());
    let (mut left, mut right) = (network.link(address(1)), network.link(address(2)));
    let too_large = Err(SendError::TooLarge { bytes: 1500 });
    assert_eq!(left.send(&[Burst::single(address(2), &[1; 1500])]), too_large);
    network.set_mtu(address(1), 1600, Oversize::Dropped);
    assert_eq!(left.send(&[Burst::single(address(2), &[1; 1500])]), Ok(1));
    assert_eq!(right.send(&[Burst::single(address(1), &[1; 1500])]), too_large, "the other way is another path");
    // It shrinks: what is on its way arrives, what comes later is lost without a word, the rest of a burst is not.
    network.set_mtu(address(1), 1000, Oversize::Dropped);
    assert_eq!(left.send(&[Burst { to: address(2), bytes: &[2; 3300], segment: 1500 }]), Ok(1));
    let lengths: Vec<usize> = run(&network, &mut right).iter().map(|(_, packet)| packet.len()).collect();
    assert_eq!((lengths, network.counters().oversized), (vec![1500, 300], 2));
    network.set_mtu(address(1), 1000, Oversize::Refused);
    assert_eq!(left.send(&[Burst::single(address(2), &[1; 1500])]), too_large);
}

#[test]
fn the_same_seed_gives_the_same_arrivals_and_another_others() {
    let history = |seed| {
        let jitter = 300 * MICROSECOND;
        let config = NetworkConfig { seed, jitter, bytes_per_second: Some(50_000_000), ..Default::default() };
        let network = Network::new(config);
        let (mut left, mut right) = (network.link(address(1)), network.link(address(2)));
        let mut arrivals = Vec::new();
        for i in 0..50 {
            let bytes = numbered(1 + i % 7, 100 + i);
            left.send(&[Burst { to: address(2), bytes: &bytes, segment: 100 + i }]).unwrap();
            arrivals.extend(run(&network, &mut right));
        }
        arrivals
    };
    assert_eq!(history(42), history(42));
    assert_ne!(history(42), history(43));
}

#[test]
fn an_address_is_free_again_when_its_link_is_gone() {
    let network = Network::new(NetworkConfig::default());
    let (mut left, right) = (network.link(address(1)), network.link(address(2)));
    left.send(&[Burst::single(address(2), b"never read")]).unwrap();
    drop(right);
    assert_eq!(network.next_arrival(), None);
    left.send(&[Burst::single(address(2), b"nobody")]).unwrap();
    assert_eq!(network.counters().unreachable, 1);
    let mut right = network.link(address(2));
    left.send(&[Burst::single(address(2), b"somebody")]).unwrap();
    assert_eq!(run(&network, &mut right)[0].1, b"somebody");
}

#[test]
#[should_panic(expected = "192.0.2.1:4000 is taken")]
fn two_links_cannot_have_one_address() {
    let network = Network::new(NetworkConfig::default());
    let _first = network.link(address(1));
    let _second = network.link(address(1));
}
