//! Megabytes both ways at once, in pieces of every size: each byte is where it belongs.

use crate::support::Stage;
use crate::support::pattern::Pattern;
use crate::support::seeded::Seeded;
use crate::support::socket::{Socket, Wire};
use crate::support::wire::{Reach, STRATEGIES, bad_wire, sealed};
use highwire_proto::Keys;
use highwire_sock::{SockConfig, Stream};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

/// How both ends go about it.
#[derive(Clone, Copy, Debug, Default)]
struct Manner {
    bytes: u64,
    slow_reader: bool,
    slow_writer: bool,
    nodelay: bool,
    /// One thread for each end, which polls; otherwise two, which block.
    polls: bool,
}

/// Sends one pattern and receives another, at both ends.
fn exchange([one, other]: [Stream; 2], manner: Manner) {
    let seeded = Seeded::fresh();
    let seed = seeded.seed();
    for stream in [&one, &other] {
        stream.set_nodelay(manner.nodelay).unwrap();
    }
    std::thread::scope(|scope| {
        for (number, stream) in [(0, &one), (1, &other)] {
            let (out, back) = (Pattern::new(seed ^ number), Pattern::new(seed ^ (1 - number)));
            if manner.polls {
                scope.spawn(move || poll_both_ways(stream, out, back, manner, Seeded::from(seed + number)));
            } else {
                let writes = stream.try_clone().unwrap();
                scope.spawn(move || write_all(&writes, out, manner, Seeded::from(seed + number)));
                scope.spawn(move || read_all(stream, back, manner, Seeded::from(seed - 1 - number)));
            }
        }
    });
}

fn write_all(stream: &Stream, pattern: Pattern, manner: Manner, mut seeded: Seeded) {
    let mut position = 0;
    while position < manner.bytes {
        position += write_some(stream, pattern, position, manner, &mut seeded).expect("a write") as u64;
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

fn write_some(
    mut stream: &Stream,
    pattern: Pattern,
    position: u64,
    manner: Manner,
    seeded: &mut Seeded,
) -> std::io::Result<usize> {
    if manner.slow_writer && seeded.once_in(20) {
        std::thread::sleep(Duration::from_micros(200));
    }
    let most = *seeded.pick(&[1, 100, 2000, 40_000]);
    let bytes = pattern.at(position, (1 + seeded.below(most)).min((manner.bytes - position) as usize));
    if seeded.once_in(4) {
        let (one, other) = bytes.split_at(seeded.below(bytes.len()));
        return stream.write_vectored(&[IoSlice::new(one), IoSlice::new(other)]);
    }
    stream.write(bytes)
}

fn read_all(stream: &Stream, pattern: Pattern, manner: Manner, mut seeded: Seeded) {
    let (mut position, mut bytes) = (0, vec![0; 100_000]);
    loop {
        match read_some(stream, &mut bytes, pattern, position, manner, &mut seeded).expect("a read") {
            0 => break,
            count => position += count as u64,
        }
    }
    assert_eq!(position, manner.bytes, "all of it, and then the end");
}

fn read_some(
    mut stream: &Stream,
    bytes: &mut [u8],
    pattern: Pattern,
    position: u64,
    manner: Manner,
    seeded: &mut Seeded,
) -> std::io::Result<usize> {
    if manner.slow_reader && seeded.once_in(20) {
        std::thread::sleep(Duration::from_micros(200));
    }
    let most = *seeded.pick(&[1, 300, 5000, 100_000]);
    let room = 1 + seeded.below(most);
    if seeded.once_in(10) {
        let count = stream.peek(&mut bytes[..room])?;
        assert_eq!(pattern.first_wrong(position, &bytes[..count]), None, "what is peeked at {position}");
    }
    let count = if seeded.once_in(4) {
        let (one, other) = bytes[..room].split_at_mut(room / 3);
        stream.read_vectored(&mut [IoSliceMut::new(one), IoSliceMut::new(other)])?
    } else {
        stream.read(&mut bytes[..room])?
    };
    assert_eq!(pattern.first_wrong(position, &bytes[..count]), None, "what is read at {position}");
    Ok(count)
}

/// Whatever `poll(2)` says can be done, until both ways are at their end.
fn poll_both_ways(stream: &Stream, out: Pattern, back: Pattern, manner: Manner, mut seeded: Seeded) {
    stream.set_nonblocking(true).unwrap();
    let socket = Wire(stream.try_clone().unwrap());
    let (mut written, mut read, mut ended) = (0, 0, false);
    let mut bytes = vec![0; 100_000];
    while written < manner.bytes || !ended {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::OUT, written < manner.bytes);
        wanted.set(PollFlags::IN, !ended);
        let mut fds = [PollFd::from_borrowed_fd(socket.descriptor(), wanted)];
        poll(&mut fds, None).unwrap();
        let shown = fds[0].revents();
        if shown.contains(PollFlags::OUT) && written < manner.bytes {
            match write_some(stream, out, written, manner, &mut seeded) {
                Ok(count) => written += count as u64,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
            if written == manner.bytes {
                stream.shutdown(Shutdown::Write).unwrap();
            }
        }
        if shown.contains(PollFlags::IN) && !ended {
            match read_some(stream, &mut bytes, back, read, manner, &mut seeded) {
                Ok(0) => ended = true,
                Ok(count) => read += count as u64,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
            }
        }
    }
    assert_eq!(read, manner.bytes, "all of it, and then the end");
}

/// Windows and habits in which something could be different.
fn configs() -> Vec<SockConfig> {
    let usual = SockConfig::default();
    vec![
        usual,
        SockConfig { combine: false, ..usual },
        SockConfig { window: 1, acknowledge: 1, ..usual },
        SockConfig { window: 1, acknowledge: 1, combine: false, chunk_bytes: 512, ..usual },
        SockConfig { acknowledge: 1, ..usual },
        SockConfig { acknowledge: 32, chunk_bytes: 700, ..usual },
    ]
}

/// Every configuration and strategy, a manner for each in turn.
fn every_way(bytes: u64, mut reach: impl FnMut(SockConfig) -> Reach) {
    let mut number = 0;
    for config in configs() {
        for strategy in STRATEGIES {
            number += 1;
            let config = SockConfig { strategy, ..config };
            // Small messages one by one take their time.
            let bytes = if config.window == 1 || config.chunk_bytes < 1000 { bytes / 4 } else { bytes };
            let manner = Manner {
                bytes,
                slow_reader: number % 3 == 1,
                slow_writer: number % 3 == 2,
                nodelay: number % 2 == 0,
                polls: number % 4 < 2,
            };
            eprintln!("{config:?}, {manner:?}");
            exchange(reach(config).pair(), manner);
        }
    }
}

#[test]
fn megabytes_on_one_host_are_right() {
    let stage = Stage::open();
    every_way(4 << 20, |config| Reach::on_one_host(&stage, config));
}

#[test]
fn megabytes_over_a_bad_wire_are_right() {
    let stage = Stage::open();
    every_way(1 << 20, |config| Reach::by_wire(&stage, &bad_wire(Keys::insecure()), config));
}

#[test]
fn megabytes_over_a_bad_wire_that_is_sealed_are_right() {
    let stage = Stage::open();
    every_way(1 << 20, |config| Reach::by_wire(&stage, &bad_wire(sealed()), config));
}
