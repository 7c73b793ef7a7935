//! `bench netmem`: pages of memory that other nodes donate, beside a mapped file on the disk.
//!
//! A region is read a page here and a page there, and from one end to the other, by the driver. What of it is on another
//! node is there in the second process; of the mapped file all is on the disk, and the second process sleeps.

mod files;
mod ours;

use crate::contest::Contest;
use crate::pair::{Asleep, Link, Role, Workers};
use crate::rounds::Shuffle;
use crate::transports::{Contestant, Exercise, Ordinary, Timing, Transport};
use crate::{BenchError, Options};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// What is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Region {
    pub(crate) bytes: usize,
    /// Bytes of it that the reader may keep in memory of its own.
    pub(crate) budget: usize,
}

impl Region {
    fn of(options: &Options) -> Region {
        Region { bytes: options.region_bytes, budget: options.budget_bytes }
    }
}

/// The side of a contestant that reads the region.
pub(crate) trait Reader {
    /// Makes ready to read as this exercise does, outside of what is timed.
    fn prepare(&mut self, exercise: Exercise) -> Result<(), BenchError>;

    /// Reads bytes of the region from place `at` on to where the application wants them.
    fn read(&mut self, at: usize, into: &mut [u8]) -> Result<(), BenchError>;

    /// Looks, outside of what is timed, whether these bytes, which were read since [`Reader::prepare`], came from where
    /// they were to come from.
    fn check(&mut self, _bytes: usize) -> Result<(), BenchError> {
        Ok(())
    }

    /// Does what is left to do for the other side; whether it has nothing left to do of its own.
    fn tend(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }
}

/// What this process does for a contestant.
pub(crate) enum Side {
    Reads(Box<dyn Reader>),
    /// Threads of its own serve.
    Donates(Box<dyn Workers>),
}

/// One end of a contestant that reads a region.
struct Paging {
    side: Side,
    /// Over this the reader says that it is done.
    done: UnixStream,
    /// Every page once, in an order of which the beginning is drawn anew.
    pages: Vec<u32>,
    order: Shuffle,
    region: Region,
    /// Where the next piece begins.
    next: usize,
    /// Where that was read from which the buffer has last.
    last: usize,
    read_bytes: usize,
    buffer: Ordinary,
    asleep: Asleep,
    timing: Option<Timing>,
}

impl Paging {
    fn of(side: Side, done: UnixStream, region: Region) -> Box<dyn Transport> {
        Box::new(Paging {
            side,
            done,
            pages: (0..(region.bytes / PAGE_BYTES) as u32).collect(),
            order: Shuffle::new(),
            region,
            next: 0,
            last: 0,
            read_bytes: 0,
            buffer: Ordinary::new(),
            asleep: Asleep::default(),
            timing: None,
        })
    }

    fn reader(&mut self) -> Result<&mut dyn Reader, BenchError> {
        match &mut self.side {
            Side::Reads(reader) => Ok(reader.as_mut()),
            Side::Donates(_) => Err(BenchError::NobodyLeft),
        }
    }
}

impl Transport for Paging {
    fn prepare_for(&mut self, _role: Role, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        if let Side::Donates(_) = &self.side {
            return Ok(());
        }
        self.read_bytes = 0;
        if exercise == Exercise::RandomPages {
            draw(&mut self.pages, count, &mut self.order);
        }
        // Page faults of the buffer are not those of the region.
        self.buffer.of(size).fill(0);
        self.reader()?.prepare(exercise)
    }

    /// What was read before would be there already.
    fn lead_warm(&mut self, _exercise: Exercise, _size: usize, _count: usize) -> Result<(), BenchError> {
        Ok(())
    }

    fn follow_warm(&mut self, _exercise: Exercise, _size: usize, _count: usize) -> Result<(), BenchError> {
        if let Side::Donates(workers) = &mut self.side {
            self.asleep.begin(workers.as_mut());
        }
        Ok(())
    }

    fn lead(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        let Side::Reads(reader) = &mut self.side else { return Err(BenchError::NobodyLeft) };
        let pieces = self.region.bytes / size;
        for number in 0..count {
            let at = match exercise {
                Exercise::RandomPages => self.pages[number % self.pages.len()] as usize * PAGE_BYTES,
                _ => (self.next + number) % pieces * size,
            };
            reader.read(at, self.buffer.of(size))?;
            self.last = at;
        }
        if exercise == Exercise::Sequential {
            self.next = (self.next + count) % pieces;
        }
        self.read_bytes = size * count;
        Ok(self.done.write_all(&[0])?)
    }

    fn follow(&mut self, _exercise: Exercise, _size: usize, _count: usize) -> Result<(), BenchError> {
        let Side::Donates(workers) = &mut self.side else { return Err(BenchError::NobodyLeft) };
        self.timing = Some(self.asleep.sleep(workers.as_mut(), &mut self.done)?);
        Ok(())
    }

    fn check(&mut self) -> Result<(), BenchError> {
        let (at, bytes) = (self.last, self.read_bytes);
        let Side::Reads(reader) = &mut self.side else { return Ok(()) };
        if bytes == 0 {
            return Ok(());
        }
        let first = self.buffer.of(PAGE_BYTES);
        let mut expected = vec![0; PAGE_BYTES];
        fill(at, &mut expected);
        if let Some(place) = first.iter().zip(&expected).position(|(found, expected)| found != expected) {
            return Err(BenchError::Bytes { contestant: "the region", place: (at + place) as u64 });
        }
        reader.check(bytes)
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        match &mut self.side {
            Side::Reads(reader) => reader.tend(),
            Side::Donates(_) => Ok(true),
        }
    }

    fn take_timing(&mut self) -> Option<Timing> {
        self.timing.take()
    }
}

/// Draws the first `count` of some numbers anew among all of them.
fn draw(numbers: &mut [u32], count: usize, order: &mut Shuffle) {
    for place in 0..count.min(numbers.len()) {
        let among = (numbers.len() - place) as u64;
        numbers.swap(place, place + (order.next() % among) as usize);
    }
}

/// What the region has from place `at` on, a multiple of eight: each word its own place, times a large number, so that
/// no two pages are alike.
pub(crate) fn fill(at: usize, into: &mut [u8]) {
    for (number, word) in into.chunks_mut(8).enumerate() {
        let value = ((at + 8 * number) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
}

/// Lets a contestant who reads a region meet its other end.
pub(crate) fn admit(contest: &mut Contest, contestant: Contestant, options: &Options) -> Result<(), BenchError> {
    let region = Region::of(options);
    let (mine, theirs) = UnixStream::pair()?;
    if contestant == Contestant::MappedFile {
        let file = files::ColdFile::make(options.directory.as_deref(), region.bytes)?;
        let end = Paging::of(Side::Reads(Box::new(file)), mine, region);
        return contest.admit_asleep(contestant, theirs.as_fd(), end);
    }
    contest.admit_paged(contestant, region, theirs.as_fd(), |link| meet(contestant, link, region, mine))
}

/// This process's end of one of our own.
pub(crate) fn meet(
    contestant: Contestant,
    link: &mut Link,
    region: Region,
    done: UnixStream,
) -> Result<Box<dyn Transport>, BenchError> {
    Ok(Paging::of(ours::meet(contestant, link, region)?, done, region))
}

/// Why a contestant cannot be measured here.
pub(crate) fn missing(contestant: Contestant) -> Option<String> {
    let ours = matches!(contestant, Contestant::Paged | Contestant::PagedUdp | Contestant::PagedMapped);
    ours.then(ours::missing).flatten()
}

/// What a reader must know to judge the rows.
pub(crate) fn notes(options: &Options) -> Vec<String> {
    let Region { bytes, budget } = Region::of(options);
    vec![
        format!(
            "the region has {}, of which a reader may keep {} in memory of its own",
            crate::report::bytes_label(bytes as u64),
            crate::report::bytes_label(budget as u64)
        ),
        "mapped-file has none of it in memory before each trial, neither in the process nor in the kernel's cache, and as \
         many bytes as it reads come from the device; whoever is below the device, as the host of a virtual machine, may \
         have them in memory"
            .to_owned(),
        "paged and paged-udp are read from one end to the other by read_at, which copies pages that are away without keeping \
         them; paged-mapped as memory, fault by fault; single pages are always read as memory"
            .to_owned(),
        "latency_ns is that of a message of a page, one way; bandwidth_gb_s that of messages of a piece".to_owned(),
    ]
}

/// A page.
pub(crate) const PAGE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn pages_are_drawn_from_all_and_none_twice() {
        let mut numbers: Vec<u32> = (0..1000).collect();
        let mut order = Shuffle(7);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..100 {
            draw(&mut numbers, 50, &mut order);
            let drawn: std::collections::BTreeSet<u32> = numbers[..50].iter().copied().collect();
            assert_eq!(drawn.len(), 50);
            seen.extend(drawn);
        }
        assert!(seen.len() > 950, "only {} of 1000 came", seen.len());
        draw(&mut numbers, 5000, &mut order);
        numbers.sort_unstable();
        assert!(numbers.iter().copied().eq(0..1000));
    }

    /// Asks for each page by its place, eight bytes.
    struct OverSocket(UnixStream);

    impl Reader for OverSocket {
        fn prepare(&mut self, _exercise: Exercise) -> Result<(), BenchError> {
            Ok(())
        }

        fn read(&mut self, at: usize, into: &mut [u8]) -> Result<(), BenchError> {
            for (number, page) in into.chunks_mut(PAGE_BYTES).enumerate() {
                self.0.write_all(&(at + number * PAGE_BYTES).to_le_bytes())?;
                self.0.read_exact(page)?;
            }
            Ok(())
        }

        fn check(&mut self, bytes: usize) -> Result<(), BenchError> {
            assert_eq!(bytes % PAGE_BYTES, 0);
            Ok(())
        }
    }

    /// Sends them, until nobody asks any more.
    fn serve(mut socket: UnixStream) {
        let (mut place, mut page) = ([0; 8], [0; PAGE_BYTES]);
        while socket.read_exact(&mut place).is_ok() {
            fill(usize::from_le_bytes(place), &mut page);
            socket.write_all(&page).unwrap();
        }
    }

    /// Notes what it was told.
    struct Noting(std::sync::mpsc::Sender<bool>);

    impl Workers for Noting {
        fn expect_work(&mut self, some: bool) {
            self.0.send(some).unwrap();
        }
    }

    #[test]
    fn a_donor_is_told_when_its_reader_reads_and_when_it_is_done() {
        let region = Region { bytes: 4 << 20, budget: 1 << 20 };
        let (reads, donates) = UnixStream::pair().unwrap();
        let (mine, theirs) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || serve(donates));
        let (told, hears) = std::sync::mpsc::channel();
        let exercises = [(Exercise::RandomPages, PAGE_BYTES, 100), (Exercise::Sequential, 1 << 20, 6)];
        let donor = std::thread::spawn(move || {
            let mut end = Paging::of(Side::Donates(Box::new(Noting(told))), theirs, region);
            for (exercise, size, count) in exercises {
                end.prepare_for(Role::Peer, exercise, size, count).unwrap();
                end.follow_warm(exercise, size, 0).unwrap();
                end.follow(exercise, size, count).unwrap();
                end.check().unwrap();
                assert!(end.tend().unwrap());
            }
            end.follow(Exercise::Sequential, 1 << 20, 1)
        });
        let mut end = Paging::of(Side::Reads(Box::new(OverSocket(reads))), mine, region);
        for (exercise, size, count) in exercises {
            end.prepare_for(Role::Driver, exercise, size, count).unwrap();
            assert!(hears.recv().unwrap());
            end.lead_warm(exercise, size, 0).unwrap();
            assert!(hears.try_recv().is_err(), "it ended before its time");
            end.lead(exercise, size, count).unwrap();
            end.check().unwrap();
            assert!(!hears.recv().unwrap());
        }
        // Whose reader is gone waits for nobody for ever.
        drop(end);
        assert!(donor.join().unwrap().is_err());
        serving.join().unwrap();
    }

    #[test]
    fn no_two_pages_are_alike_and_pieces_are_made_of_them() {
        let (mut piece, mut page) = (vec![0; 4 * PAGE_BYTES], vec![0; PAGE_BYTES]);
        fill(8 * PAGE_BYTES, &mut piece);
        fill(10 * PAGE_BYTES, &mut page);
        assert_eq!(piece[2 * PAGE_BYTES..3 * PAGE_BYTES], page);
        assert_ne!(piece[..PAGE_BYTES], page);
    }
}
