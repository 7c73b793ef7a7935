//! Payloads of VIs as the protocol sees them.

use highwire_mem::work::{Parcel, Segment};
use highwire_proto::{Sink, Source};
use std::ops::Range;

/// A payload on its way out or in.
#[derive(Debug)]
pub(crate) struct Load {
    pub parcel: Parcel,
    /// Most bytes of a place that takes what it needs.
    limit: usize,
}

impl Load {
    /// A payload, or a place for one of up to `limit` bytes.
    pub(crate) fn new(parcel: Parcel, limit: usize) -> Load {
        Load { parcel, limit }
    }
}

impl Source for Load {
    fn total(&self) -> usize {
        self.parcel.len()
    }

    fn piece(&self, range: Range<usize>) -> Option<&[u8]> {
        match &self.parcel {
            Parcel::Empty | Parcel::Written(_) => None,
            Parcel::Buffer(buffer) => buffer.get(range),
            Parcel::Segments(segments) => {
                let (index, at) = find(segments, range.start)?;
                segments[index].bytes().get(at..at + range.len())
            }
            Parcel::Bytes(bytes) => bytes.get(range),
            Parcel::Window(window) => window.slice(range),
        }
    }

    fn append(&self, range: Range<usize>, to: &mut Vec<u8>) {
        if let Some(piece) = self.piece(range.clone()) {
            return to.extend_from_slice(piece);
        }
        if let Parcel::Window(window) = &self.parcel {
            return window.append(range, to);
        }
        let Parcel::Segments(segments) = &self.parcel else { return };
        let Some((index, mut at)) = find(segments, range.start) else { return };
        let mut left = range.len();
        for segment in &segments[index..] {
            let bytes = &segment.bytes()[at..];
            let some = &bytes[..left.min(bytes.len())];
            to.extend_from_slice(some);
            (left, at) = (left - some.len(), 0);
        }
    }
}

impl Load {
    /// The longest message that it takes, if it takes what it needs.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }
}

impl Sink for Load {
    fn capacity(&mut self) -> usize {
        match &self.parcel {
            Parcel::Bytes(_) => self.limit,
            _ => self.total(),
        }
    }

    fn prepare(&mut self, bytes: usize) {
        if let Parcel::Bytes(place) = &mut self.parcel {
            if place.len() > bytes {
                // More was taken while the length was not known.
                place.truncate(bytes);
                place.shrink_to_fit();
            }
            grow(place, bytes);
        }
    }

    fn reach(&mut self, at: usize) -> usize {
        match &self.parcel {
            Parcel::Segments(segments) => {
                find(segments, at).map_or(0, |(index, inside)| segments[index].bytes().len() - inside)
            }
            // A place that takes what it needs has no more than it took.
            _ => self.total().saturating_sub(at),
        }
    }

    fn expect(&mut self, at: usize, bytes: usize) {
        match &self.parcel {
            Parcel::Buffer(buffer) => buffer.prefetch_range(at..at + bytes),
            Parcel::Segments(segments) => {
                if let Some((index, at)) = find(segments, at)
                    && let Segment::Buffer(buffer) = &segments[index]
                {
                    buffer.prefetch_range(at..at + bytes);
                }
            }
            Parcel::Empty | Parcel::Bytes(_) | Parcel::Window(_) | Parcel::Written(_) => {}
        }
    }

    fn piece(&mut self, range: Range<usize>) -> Option<&mut [u8]> {
        match &mut self.parcel {
            // In granted memory nothing lands before it is known to be authentic; and no slice is made of it.
            Parcel::Empty | Parcel::Window(_) | Parcel::Written(_) => None,
            Parcel::Buffer(buffer) => buffer.get_mut(range),
            Parcel::Segments(segments) => {
                let (index, at) = find(segments, range.start)?;
                let Segment::Buffer(buffer) = &mut segments[index] else { return None };
                buffer.get_mut(at..at + range.len())
            }
            Parcel::Bytes(bytes) => bytes.get_mut(range),
        }
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        if let Parcel::Buffer(buffer) = &mut self.parcel {
            // Mostly.
            if let Some(piece) = buffer.get_mut(at..at + bytes.len()) {
                piece.copy_from_slice(bytes);
            }
            return;
        }
        if let Parcel::Bytes(place) = &mut self.parcel
            && place.len() < at + bytes.len()
        {
            // The beginning of the message is still missing, and with it the length.
            grow(place, self.limit.max(at + bytes.len()));
        }
        if let Parcel::Window(window) = &self.parcel {
            return window.write(at, bytes);
        }
        let (mut at, mut bytes) = (at, bytes);
        while !bytes.is_empty() {
            // As much as lies in one piece.
            let room = match &self.parcel {
                Parcel::Segments(segments) => {
                    let Some((index, inside)) = find(segments, at) else { return };
                    segments[index].bytes().len() - inside
                }
                _ => bytes.len(),
            };
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            let Some(piece) = Sink::piece(self, at..at + now.len()) else { return };
            piece.copy_from_slice(now);
            (at, bytes) = (at + now.len(), later);
        }
    }
}

/// Makes a place that takes what it needs so long. Zeros that the kernel gives take no memory before
/// something lands there: a peer must not take it all by announcing long messages. A place that has some bytes
/// already would have to be moved, or its new bytes written: it is taken once.
fn grow(place: &mut Vec<u8>, bytes: usize) {
    if place.is_empty() {
        *place = vec![0; bytes];
    } else {
        place.resize(bytes, 0);
    }
}

/// The segment that byte `at` is in, and where in it.
fn find(segments: &[Segment], mut at: usize) -> Option<(usize, usize)> {
    for (index, segment) in segments.iter().enumerate() {
        let bytes = segment.bytes().len();
        if at < bytes {
            return Some((index, at));
        }
        at -= bytes;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwire_mem::{Region, Tag};

    /// A load of buffers of these lengths, filled with rising bytes.
    fn segments(lengths: &[usize]) -> Load {
        let region = Region::create(1 << 16, Tag(0)).unwrap();
        let (mut at, mut next, mut made) = (0, 0u8, Vec::new());
        for &length in lengths {
            let mut buffer = region.slice(at..at + length).unwrap();
            at += 4096;
            buffer.iter_mut().for_each(|byte| (*byte, next) = (next, next.wrapping_add(1)));
            made.push(Segment::Buffer(buffer));
        }
        Load::new(Parcel::Segments(made.into()), 0)
    }

    #[test]
    fn pieces_are_gathered_and_scattered_wherever_they_lie() {
        let mut load = segments(&[3, 5, 1, 7]);
        assert_eq!((load.total(), load.capacity()), (16, 16));
        for start in 0..16 {
            for end in start..=16 {
                let mut bytes = Vec::new();
                load.append(start..end, &mut bytes);
                assert_eq!(bytes, (start as u8..end as u8).collect::<Vec<_>>(), "{start}..{end}");
                let other: Vec<u8> = bytes.iter().map(|byte| byte ^ 0x80).collect();
                load.write(start, &other);
                let mut all = Vec::new();
                load.append(0..16, &mut all);
                let expected = |at: usize| at as u8 ^ if (start..end).contains(&at) { 0x80 } else { 0 };
                assert_eq!(all, (0..16).map(expected).collect::<Vec<_>>(), "{start}..{end}");
                load.write(start, &bytes);
            }
        }
        assert!(Source::piece(&load, 2..4).is_none() && Source::piece(&load, 3..8).is_some());
    }

    #[test]
    fn a_place_that_takes_what_it_needs_takes_it_when_the_sender_is_known() {
        let mut load = Load::new(Parcel::Bytes(Vec::new()), 1000);
        assert_eq!(load.capacity(), 1000);
        assert!(Sink::piece(&mut load, 0..10).is_none(), "not before");
        load.write(5, b"later");
        load.prepare(12);
        load.write(0, b"first");
        let Parcel::Bytes(bytes) = &load.parcel else { panic!("{load:?}") };
        assert_eq!(bytes, b"firstlater\0\0");
    }

    #[test]
    fn a_long_message_that_is_only_announced_takes_no_memory() {
        // Pages that are there, from the second number of statm.
        let resident = || -> usize {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse().unwrap()
        };
        let before = resident();
        let mut loads: Vec<Load> = (0..8).map(|_| Load::new(Parcel::Bytes(Vec::new()), 64 << 20)).collect();
        loads.iter_mut().for_each(|load| load.prepare(64 << 20));
        let taken = resident().saturating_sub(before) * 4096;
        assert!(taken < 64 << 20, "{taken} bytes");
    }
}
