//! What signal handlers ask of the threads that may block: a queue made beforehand, and a bell.

use super::sys::{self, Run};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Pages that were claimed by whoever asks, and are to be brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) run: Run,
    /// The first page is for a write.
    pub(super) write: bool,
    /// All of them are.
    pub(super) all_written: bool,
    /// Somebody waits for the first page; otherwise it is all ahead of need.
    pub(super) awaited: bool,
}

/// A bounded queue for any number of threads on both sides. A place's turn says whose it is: that of the ticket, to be
/// filled, or one more, to be emptied.
#[derive(Debug)]
pub(super) struct Requests {
    places: Box<[Place]>,
    head: AtomicU64,
    tail: AtomicU64,
    /// Counts pushes, for sleepers.
    bell: AtomicU32,
    sleepers: AtomicU32,
    closed: AtomicBool,
}

#[derive(Debug)]
struct Place {
    turn: AtomicU64,
    first: AtomicU64,
    rest: AtomicU64,
}

impl Requests {
    pub(super) fn new() -> Requests {
        let place = |turn| Place { turn: AtomicU64::new(turn), first: AtomicU64::new(0), rest: AtomicU64::new(0) };
        Requests {
            places: (0..PLACES).map(place).collect(),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            bell: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        }
    }

    fn place(&self, ticket: u64) -> &Place {
        &self.places[(ticket % PLACES) as usize]
    }

    /// False if the queue is full.
    pub(super) fn push(&self, request: Request) -> bool {
        let mut ticket = self.tail.load(Ordering::Relaxed);
        loop {
            // Acquire pairs with the Release in `pop`: the place is empty.
            let turn = self.place(ticket).turn.load(Ordering::Acquire);
            if turn < ticket {
                return false;
            }
            if turn > ticket {
                ticket = self.tail.load(Ordering::Relaxed);
                continue;
            }
            match self.tail.compare_exchange_weak(ticket, ticket + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => ticket = now,
            }
        }
        let place = self.place(ticket);
        place.first.store(request.run.first, Ordering::Relaxed);
        let flags = u64::from(request.write) | u64::from(request.all_written) << 1 | u64::from(request.awaited) << 2;
        place.rest.store(u64::from(request.run.pages) << 8 | flags, Ordering::Relaxed);
        place.turn.store(ticket + 1, Ordering::Release);
        // SeqCst, with the same in `wait`: either the sleeper sees the new count, or this sees the sleeper.
        self.bell.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            sys::wake(&self.bell, 1);
        }
        true
    }

    pub(super) fn pop(&self) -> Option<Request> {
        let mut ticket = self.head.load(Ordering::Relaxed);
        loop {
            // Acquire pairs with the Release in `push`: the place is filled.
            let turn = self.place(ticket).turn.load(Ordering::Acquire);
            if turn < ticket + 1 {
                return None;
            }
            if turn > ticket + 1 {
                ticket = self.head.load(Ordering::Relaxed);
                continue;
            }
            match self.head.compare_exchange_weak(ticket, ticket + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => ticket = now,
            }
        }
        let place = self.place(ticket);
        let (first, rest) = (place.first.load(Ordering::Relaxed), place.rest.load(Ordering::Relaxed));
        place.turn.store(ticket + PLACES, Ordering::Release);
        Some(Request {
            run: Run { first, pages: (rest >> 8) as u32 },
            write: rest & 1 != 0,
            all_written: rest & 2 != 0,
            awaited: rest & 4 != 0,
        })
    }

    /// The next request; none when the queue is closed and empty.
    pub(super) fn wait(&self) -> Option<Request> {
        loop {
            let count = self.bell.load(Ordering::SeqCst);
            if let Some(request) = self.pop() {
                return Some(request);
            }
            if self.closed.load(Ordering::SeqCst) {
                return None;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            sys::wait(&self.bell, count, None);
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.bell.fetch_add(1, Ordering::SeqCst);
        sys::wake(&self.bell, i32::MAX as u32);
    }
}

/// More than threads are likely to fault at once.
const PLACES: u64 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(first: u64) -> Request {
        let flag = |bit: u32| first >> bit & 1 == 1;
        Request {
            run: Run { first, pages: first as u32 % 256 + 1 },
            write: flag(0),
            all_written: flag(1),
            awaited: flag(2),
        }
    }

    #[test]
    fn requests_come_out_in_order_and_a_full_queue_says_so() {
        let queue = Requests::new();
        for round in 0..3 {
            for first in 0..PLACES {
                assert!(queue.push(request(first + round)));
            }
            assert!(!queue.push(request(0)));
            for first in 0..PLACES {
                assert_eq!(queue.pop(), Some(request(first + round)));
            }
            assert_eq!(queue.pop(), None);
        }
    }

    #[test]
    fn threads_lose_no_request_and_a_closed_queue_ends_them() {
        const EACH: u64 = 20_000;
        let queue = Requests::new();
        let sum = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let takers: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        while let Some(taken) = queue.wait() {
                            assert_eq!(taken, request(taken.run.first));
                            sum.fetch_add(taken.run.first, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            let givers: Vec<_> = (0..2)
                .map(|half| {
                    let queue = &queue;
                    scope.spawn(move || {
                        for first in half * EACH..(half + 1) * EACH {
                            while !queue.push(request(first)) {
                                std::thread::yield_now();
                            }
                        }
                    })
                })
                .collect();
            givers.into_iter().for_each(|giver| giver.join().unwrap());
            queue.close();
            takers.into_iter().for_each(|taker| taker.join().unwrap());
        });
        assert_eq!(sum.into_inner(), 2 * EACH * (2 * EACH - 1) / 2);
    }
}
