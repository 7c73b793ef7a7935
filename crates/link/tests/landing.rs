//! Payloads land where they are expected, and nothing is lost where they do not.

use highwire_link::{Advice, Burst, Cut, Guide, Inbox, Landing, Link, Network, NetworkConfig, UdpLink, UdpOptions};
use std::time::{Duration, Instant};

/// Expects payloads in the middle of some memory.
struct Expecting {
    cut: Cut,
    memory: Vec<u8>,
    place: std::ops::Range<usize>,
    /// Wants to look first, and what it saw.
    looks: bool,
    seen: Vec<u8>,
}

const GUARD: u8 = 0xa5;
const FREE: u8 = 0x5a;

impl Expecting {
    fn new(cut: Cut, bytes: usize) -> Expecting {
        let mut memory = vec![GUARD; 1000 + bytes + 1000];
        memory[1000..1000 + bytes].fill(FREE);
        Expecting { cut, memory, place: 1000..1000 + bytes, looks: false, seen: Vec::new() }
    }

    fn place(&self) -> &[u8] {
        &self.memory[self.place.clone()]
    }

    fn check_guards(&self) {
        let (before, rest) = self.memory.split_at(self.place.start);
        let after = &rest[self.place.len()..];
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD), "bytes outside of the place have changed");
    }
}

impl Guide for Expecting {
    fn advise(&mut self, _way: usize, head: Option<&[u8]>) -> Advice<'_> {
        match head {
            None if self.looks => return Advice::Look,
            None => {}
            Some(head) => self.seen = head.to_vec(),
        }
        Advice::Land(Landing { cut: self.cut, place: &mut self.memory[self.place.clone()] })
    }
}

/// Two ends, and what lets time pass.
type Ends = (Box<dyn Link>, Box<dyn Link>, Box<dyn Fn()>);

fn grounds() -> Vec<(&'static str, Ends)> {
    let udp = |favourite| -> Ends {
        let link = || {
            let options = UdpOptions { favourite, ..UdpOptions::default() };
            Box::new(UdpLink::bind("127.0.0.1:0".parse().unwrap(), options).unwrap())
        };
        (link(), link(), Box::new(|| {}))
    };
    let network = Network::new(NetworkConfig::default());
    let link = || Box::new(network.link("192.0.2.1:0".parse().unwrap()));
    let (left, right) = (link(), link());
    let time = network.clone();
    let simulated: Ends = (left, right, Box::new(move || time.advance_to(time.now() + Duration::from_millis(1))));
    vec![("udp", udp(true)), ("udp without a favourite", udp(false)), ("simulated", simulated)]
}

/// Packets of these lengths with recognisable bytes.
fn packets(lengths: &[usize]) -> Vec<Vec<u8>> {
    let byte = |packet: usize, at: usize| (packet * 97 + at * 31 + at / 256) as u8;
    lengths.iter().enumerate().map(|(packet, length)| (0..*length).map(|at| byte(packet, at)).collect()).collect()
}

/// Sends packets as one burst, and receives them with a guide.
fn exchange(ends: &mut Ends, packets: &[Vec<u8>], guide: &mut Expecting) -> Inbox {
    let (left, right, pass_time) = ends;
    let (to, mut inbox) = (right.local_address(), Inbox::new());
    let mut await_some = |receive: &mut dyn FnMut(&mut Inbox) -> usize| {
        let begin = Instant::now();
        loop {
            pass_time();
            match receive(&mut inbox) {
                0 => assert!(begin.elapsed() < Duration::from_secs(5), "nothing came"),
                count => return count,
            }
        }
    };
    // A link expects no batch before one came.
    left.send(&[Burst { to, bytes: &[1; 3000], segment: 1000 }]).unwrap();
    await_some(&mut |inbox| right.receive(inbox).unwrap());
    assert_eq!(left.send(&[Burst { to, bytes: &packets.concat(), segment: packets[0].len() }]).unwrap(), 1);
    let count = await_some(&mut |inbox| right.receive_guided(inbox, guide).unwrap());
    assert_eq!(count, packets.len());
    guide.check_guards();
    inbox
}

const CUT: Cut = Cut::new(30, 20, 220);

#[test]
fn payloads_lie_one_behind_the_other_and_heads_apart() {
    for (name, mut ends) in grounds() {
        // The last packet is shorter than the others.
        let sent = packets(&[220, 220, 220, 220, 100]);
        let mut guide = Expecting::new(CUT, 190 + 3 * 200 + 80);
        let inbox = exchange(&mut ends, &sent, &mut guide);
        let (landed, heads) = inbox.landed().unwrap_or_else(|| panic!("{name}: nothing landed"));
        assert_eq!((landed.from, landed.packets()), (ends.0.local_address(), 5), "{name}");
        assert!(landed.is_cut_right() && !landed.looked, "{name}: {landed:?}");
        let mut parts = (Vec::new(), Vec::new());
        for (at, packet) in sent.iter().enumerate() {
            let (head, payload) = packet.split_at(if at == 0 { 30 } else { 20 });
            parts.0.extend_from_slice(head);
            parts.1.extend_from_slice(payload);
        }
        assert!((heads, guide.place()) == (&parts.0[..], &parts.1[..]), "{name}");
        assert_eq!(inbox.packets().count(), 0, "{name}: they are in their place");
    }
}

#[test]
fn whatever_comes_is_put_together_again() {
    let cuts = [CUT, Cut::new(20, 20, 220), Cut::new(30, 20, 219), Cut::new(30, 20, 500)];
    let batches: [&[usize]; 7] = [&[220; 5], &[220, 220, 1], &[100], &[219; 9], &[221; 4], &[1400; 10], &[7, 7, 7, 5]];
    for (name, mut ends) in grounds() {
        for cut in cuts {
            for bytes in [1, 190, 191, 390, 1000, 5000] {
                for batch in batches {
                    let sent = packets(batch);
                    let mut guide = Expecting::new(cut, bytes);
                    let inbox = exchange(&mut ends, &sent, &mut guide);
                    let (landed, _) = inbox.landed().unwrap_or_else(|| panic!("{name}: nothing landed"));
                    let right = batch[0] == cut.packet() || batch.len() == 1 && batch[0] <= cut.packet();
                    assert_eq!(landed.is_cut_right(), right, "{name}: {cut:?}, {batch:?}");
                    for first in 0..=batch.len() {
                        let mut together = Vec::new();
                        inbox.put_together(first, guide.place(), &mut together);
                        assert!(together == sent[first..].concat(), "{name}: {cut:?}, {bytes}, {batch:?} from {first}");
                    }
                    // Without the place there is only what spilled.
                    let mut spilled = Vec::new();
                    inbox.put_together(batch.len(), &[], &mut spilled);
                    assert!(spilled.is_empty());
                }
            }
        }
    }
}

#[test]
fn a_look_shows_how_the_first_packet_begins() {
    for (name, mut ends) in grounds() {
        let sent = packets(&[220; 4]);
        let mut guide = Expecting { looks: true, ..Expecting::new(CUT, 790) };
        let inbox = exchange(&mut ends, &sent, &mut guide);
        assert_eq!(guide.seen, sent[0][..80], "{name}");
        assert!(inbox.landed().is_some_and(|(landed, _)| landed.looked && landed.is_cut_right()), "{name}");
        assert_eq!(ends.1.counters().looks_ahead, 1, "{name}");
        assert!(guide.place()[..190] == sent[0][30..], "{name}");
    }
}

/// Expects packets whose heads are longer than they are.
struct Impossible(Expecting);

impl Guide for Impossible {
    fn advise(&mut self, _way: usize, _head: Option<&[u8]>) -> Advice<'_> {
        let Expecting { memory, place, .. } = &mut self.0;
        Advice::Land(Landing { cut: Cut::new(0, 10, 5), place: &mut memory[place.clone()] })
    }
}

#[test]
fn a_geometry_that_cannot_be_writes_nothing_outside_of_the_place() {
    for (name, (mut left, mut right, pass_time)) in grounds() {
        let (to, mut inbox) = (right.local_address(), Inbox::new());
        left.send(&[Burst { to, bytes: &[1; 3000], segment: 1000 }]).unwrap();
        let begin = Instant::now();
        while {
            pass_time();
            right.receive(&mut inbox).unwrap() == 0
        } {
            assert!(begin.elapsed() < Duration::from_secs(5), "nothing came");
        }
        left.send(&[Burst { to, bytes: &[0x41; 500], segment: 250 }]).unwrap();
        let mut guide = Impossible(Expecting::new(CUT, 100));
        let begin = Instant::now();
        let refused = loop {
            pass_time();
            let receive = std::panic::AssertUnwindSafe(|| right.receive_guided(&mut inbox, &mut guide).unwrap());
            match std::panic::catch_unwind(receive) {
                Ok(0) => assert!(begin.elapsed() < Duration::from_secs(5), "nothing came"),
                Ok(_) => break false,
                Err(_) => break true,
            }
        };
        guide.0.check_guards();
        assert!(refused, "{name}: the geometry is refused");
    }
}
