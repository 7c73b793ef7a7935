//! `bench rpc`: remote procedure calls, beside the servers and libraries that are used for the same, and beside the
//! virtual interfaces that carry ours.
//!
//! Everybody takes part in the same heats: the driver calls, and somebody on the other CPU answers. Ours are answered by
//! the second process. The servers of others are programs, which the driver starts on the second process's CPU; that
//! process sleeps meanwhile.

mod ours;
mod peers;
mod stores;

use crate::apps::servers::App;
use crate::contest::Contest;
use crate::folder::Folder;
use crate::outsiders::{PEERS_HINT, find_peers};
use crate::pair::{Asleep, Link, PATIENCE, Thread, Workers, waited_by};
use crate::report::{Report, figure, line, short, titled};
use crate::stats::beside;
use crate::transports::{Contestant, Exercise, Timing, Transport};
use crate::{Bench, BenchError};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// The side of a contestant that calls.
pub(crate) trait Caller {
    /// Makes `count` calls that carry nothing there and nothing back, up to `outstanding` of them at a time over one
    /// connection; returns when all are answered.
    fn call(&mut self, count: usize, outstanding: usize) -> Result<(), BenchError>;

    /// The same with calls that are answered by a value of `size` bytes, which is then where the application wants it.
    fn fetch(&mut self, size: usize, count: usize, outstanding: usize) -> Result<(), BenchError>;

    /// Looks at the value that arrived last, outside of what is timed.
    fn check(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    /// Does what is left to do for the other side; whether it has nothing left to do of its own.
    fn tend(&mut self) -> Result<bool, BenchError> {
        Ok(true)
    }

    /// Whether to sleep from now on while there is nothing, or to look without pause, for those who can do both.
    fn wait_asleep(&mut self, _asleep: bool) {}

    /// Programs that do its work: what they wait for their CPUs counts as if this process had waited.
    fn programs(&self) -> Vec<u32> {
        Vec::new()
    }

    /// What the last calls took, where a program takes the time.
    fn took_ns(&self) -> Option<f64> {
        None
    }
}

/// What this process does for a contestant.
pub(crate) enum Side {
    /// It calls, and says by this socket when it has done so.
    Calls(Box<dyn Caller>, UnixStream),
    /// It leaves its CPU until then to those who answer: to threads of its own, or to a program.
    Answers(Option<Box<dyn Workers>>, UnixStream),
}

/// One end of a contestant that makes calls.
pub(crate) struct Calls {
    side: Side,
    asleep: Asleep,
    timing: Option<Timing>,
}

impl Calls {
    fn of(side: Side) -> Box<dyn Transport> {
        Box::new(Calls { side, asleep: Asleep::default(), timing: None })
    }

    fn caller(&mut self) -> Option<&mut dyn Caller> {
        match &mut self.side {
            Side::Calls(caller, _) => Some(caller.as_mut()),
            Side::Answers(..) => None,
        }
    }

    /// Calls, and notes what the programs say about it.
    fn burst(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        let Some(caller) = self.caller() else { unreachable!("it does not call") };
        let programs = caller.programs();
        let waited = || Thread::this().waited_ns() + programs.iter().map(|program| waited_by(*program)).sum::<u64>();
        let before = waited();
        let clock = Instant::now();
        match exercise {
            Exercise::Call => caller.call(count, 1)?,
            Exercise::Calls => caller.call(count, size)?,
            Exercise::FetchMany => caller.fetch(size, count, FETCHES_AT_A_TIME)?,
            _ => caller.fetch(size, count, 1)?,
        }
        let nanoseconds = clock.elapsed().as_nanos() as f64;
        let nanoseconds = caller.took_ns().unwrap_or(nanoseconds);
        self.timing = Some(Timing { nanoseconds, waited_ns: waited().saturating_sub(before) });
        Ok(())
    }
}

impl Transport for Calls {
    fn lead_warm(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        self.burst(exercise, size, count)
    }

    fn lead(&mut self, exercise: Exercise, size: usize, count: usize) -> Result<(), BenchError> {
        self.burst(exercise, size, count)?;
        if let Side::Calls(_, awake) = &mut self.side {
            awake.write_all(&[0])?;
        }
        Ok(())
    }

    /// It sleeps once for this and what follows.
    fn follow_warm(&mut self, _exercise: Exercise, _size: usize, _count: usize) -> Result<(), BenchError> {
        if let Side::Answers(Some(workers), _) = &mut self.side {
            self.asleep.begin(workers.as_mut());
        }
        Ok(())
    }

    fn follow(&mut self, _exercise: Exercise, _size: usize, _count: usize) -> Result<(), BenchError> {
        let Side::Answers(workers, awake) = &mut self.side else { unreachable!("it does not answer") };
        match workers {
            Some(workers) => self.timing = Some(self.asleep.sleep(workers.as_mut(), awake)?),
            None => awake.read_exact(&mut [0])?,
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), BenchError> {
        self.caller().map_or(Ok(()), |caller| caller.check())
    }

    fn tend(&mut self) -> Result<bool, BenchError> {
        match &mut self.side {
            Side::Calls(caller, _) => caller.tend(),
            Side::Answers(..) => Ok(true),
        }
    }

    fn wait_asleep(&mut self, asleep: bool) {
        match &mut self.side {
            Side::Calls(caller, _) => caller.wait_asleep(asleep),
            Side::Answers(Some(workers), _) => workers.wait_asleep(asleep),
            Side::Answers(None, _) => {}
        }
    }

    fn take_timing(&mut self) -> Option<Timing> {
        self.timing.take()
    }
}

/// This process's end of one of our own, for values up to `size_max`. Both sides call this.
pub(crate) fn meet(contestant: Contestant, link: &mut Link, size_max: usize) -> Result<Box<dyn Transport>, BenchError> {
    let side = ours::meet(contestant, link, size_max)?;
    if let Side::Answers(_, awake) = &side {
        // Whose caller waits for an answer that never comes is not to wait for it in turn.
        awake.set_read_timeout(Some(PATIENCE))?;
    }
    Ok(Calls::of(side))
}

/// What the second process does for a contestant whose server is a program.
pub(crate) fn sleep_beside(awake: UnixStream) -> Box<dyn Transport> {
    Calls::of(Side::Answers(None, awake))
}

/// Starts the server of a contestant, with a value of each size, and what calls it.
pub(crate) fn admit(
    contest: &mut Contest,
    contestant: Contestant,
    sizes: &[usize],
    folder: &mut Folder,
) -> Result<(), BenchError> {
    let cpus = contest.pair.cpus;
    let caller: Box<dyn Caller> = match contestant {
        Contestant::Redis => Box::new(stores::Store::start(App::Redis, cpus.1, sizes, folder)?),
        Contestant::Memcached => Box::new(stores::Store::start(App::Memcached, cpus.1, sizes, folder)?),
        _ => Box::new(peers::Peer::start(contestant, cpus)?),
    };
    let (mine, theirs) = UnixStream::pair()?;
    contest.admit_asleep(contestant, theirs.as_fd(), Calls::of(Side::Calls(caller, mine)))
}

/// Why a contestant cannot be measured here.
pub(crate) fn missing(contestant: Contestant) -> Option<String> {
    match contestant {
        Contestant::Shm | Contestant::Udp | Contestant::UdpSealed => ours::missing(),
        Contestant::Redis => App::Redis.server_missing(),
        Contestant::Memcached => App::Memcached.server_missing(),
        Contestant::Tonic | Contestant::Tarpc if find_peers().is_none() => Some(PEERS_HINT.to_owned()),
        _ => None,
    }
}

/// Our own beside the virtual interfaces that carry them, as far as there are rows.
pub(crate) fn tables(report: &Report) -> String {
    let mut lines = vec![line(["", "", "size", "median", "beside it", "median", "ratio"])];
    for row in report.rows.iter().filter(|row| row.of_vi.is_some()) {
        let Some(vi) = beside(Bench::Rpc.name(), row.measure, &row.contestant, row.size) else { continue };
        let Some(theirs) = report.row(vi.contestant, vi.measure, vi.size) else { continue };
        let what =
            if vi.times == 1.0 { vi.contestant.to_owned() } else { format!("two messages of {}", vi.contestant) };
        let label = report.size_label(row.measure, row.size);
        let [ours, theirs] = [row.median, theirs.median * vi.times].map(|value| figure(row.measure, value));
        let ratio = row.of_vi.map_or(String::new(), |ratio| format!("×{}", short(ratio)));
        lines.push(line([&row.contestant, row.measure.name(), &label, &ours, &what, &theirs, &ratio]));
    }
    let mut text = String::new();
    titled(&lines, "Calls beside the messages that carry them", &mut text);
    text
}

/// What a reader must know to judge the rows.
pub(crate) const NOTES: [&str; 3] = [
    "a call is there and back; each side has one CPU, the caller the first, and whoever answers the second",
    "redis, memcached, tonic and tarpc are over loopback TCP with TCP_NODELAY, one connection, calls that block; a call of \
     redis is PING, of memcached `version`, of the others a method that takes and gives nothing",
    "fetch_gb_s has 8 fetches under way at a time; whole values are compared after each trial of redis, memcached, tonic \
     and tarpc",
];

/// Bytes of the messages beside which calls are measured.
pub(crate) const REFERENCE_BYTES: usize = 4;
/// Fetches under way where bytes per second are measured.
const FETCHES_AT_A_TIME: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::{assert_lines, row_of, sample};
    use crate::stats::{Measure, Row};

    #[test]
    fn our_calls_stand_beside_the_messages_that_carry_them() {
        let row = |contestant, measure, size, median, of_floor, of_vi| Row {
            of_vi,
            ..row_of(contestant, measure, size, median, of_floor)
        };
        let rows = vec![
            row(Contestant::Vi, Measure::LatencyNs, 4, 100.0, None, None),
            row(Contestant::ViUdp, Measure::BandwidthGbS, 1 << 20, 3.0, None, None),
            row(Contestant::Shm, Measure::CallNs, 0, 250.0, Some(1.0), Some(1.25)),
            row(Contestant::Redis, Measure::CallNs, 0, 50e3, Some(200.0), None),
            row(Contestant::Udp, Measure::FetchGbS, 1 << 20, 2.7, None, Some(0.9)),
            row(Contestant::Shm, Measure::CallsPerS, 256, 20e6, Some(1.0), None),
            row(Contestant::Tonic, Measure::CallsPerS, 256, 80e3, Some(0.004), None),
        ];
        let report = Report { bench: Bench::Rpc.name().to_owned(), rows, ..sample() };
        assert_lines(
            &report.to_text(),
            &[
                &["shm", "call_ns", "0 B", "250 ns", "two messages of vi", "200 ns", "×1.25"],
                &["udp", "fetch_gb_s", "1 MiB", "2.70 GB/s", "vi-udp", "3.00 GB/s", "×0.90"],
                &["A call there and back", "× shm"],
                &["redis", "50.0 µs", "×200"],
                &["256 at once"],
                &["tonic", "80.0 k/s", "×0.00"],
            ],
        );
        let plots = crate::plot::all(&report, std::path::Path::new("somewhere")).unwrap();
        let calls = plots.iter().find(|plot| plot.0 == "rpc-calls_per_s-of-floor.svg").unwrap();
        assert!(calls.1.contains("a multiple of shm") && calls.1.contains("256 at once"));
    }

    /// Calls over a socket: eight bytes say how long the answer is to be.
    struct OverSocket {
        socket: UnixStream,
        bytes: Vec<u8>,
    }

    impl Caller for OverSocket {
        fn call(&mut self, count: usize, outstanding: usize) -> Result<(), BenchError> {
            self.fetch(1, count, outstanding)
        }

        fn fetch(&mut self, size: usize, count: usize, outstanding: usize) -> Result<(), BenchError> {
            let mut sent = 0;
            for answered in 0..count {
                while sent < count.min(answered + outstanding) {
                    self.socket.write_all(&size.to_le_bytes())?;
                    sent += 1;
                }
                self.socket.read_exact(&mut self.bytes[..size])?;
            }
            Ok(())
        }
    }

    /// Answers as many of them.
    fn answer(mut socket: UnixStream, count: usize) {
        let bytes = vec![7; 1 << 20];
        for _ in 0..count {
            let mut size = [0; 8];
            socket.read_exact(&mut size).unwrap();
            socket.write_all(&bytes[..usize::from_le_bytes(size)]).unwrap();
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
    fn those_who_answer_are_told_when_calls_come_and_when_no_more_do() {
        let (calls, answers) = UnixStream::pair().unwrap();
        let (mine, theirs) = UnixStream::pair().unwrap();
        let exercises =
            [(Exercise::Call, 0), (Exercise::Fetch, 8192), (Exercise::FetchMany, 1 << 20), (Exercise::Calls, 64)];
        let serving = std::thread::spawn(move || answer(answers, exercises.len() * 103));
        let (told, hears) = std::sync::mpsc::channel();
        let answering = std::thread::spawn(move || {
            let mut end = Calls::of(Side::Answers(Some(Box::new(Noting(told))), theirs));
            for (exercise, size) in exercises {
                end.follow_warm(exercise, size, 3).unwrap();
                end.follow(exercise, size, 100).unwrap();
                assert!(end.tend().unwrap());
            }
        });
        let mut end = Calls::of(Side::Calls(Box::new(OverSocket { socket: calls, bytes: vec![0; 1 << 20] }), mine));
        for (exercise, size) in exercises {
            assert!(hears.recv().unwrap());
            end.lead_warm(exercise, size, 3).unwrap();
            assert_eq!(hears.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty), "it ended before its time");
            end.lead(exercise, size, 100).unwrap();
            end.check().unwrap();
            assert!(end.take_timing().is_some_and(|timing| timing.nanoseconds > 0.0));
            assert!(!hears.recv().unwrap());
        }
        answering.join().unwrap();
        serving.join().unwrap();
    }

    #[test]
    fn whoever_leaves_its_cpu_to_a_program_wakes_when_that_is_done() {
        let (calls, answers) = UnixStream::pair().unwrap();
        let (mine, theirs) = UnixStream::pair().unwrap();
        let program = std::thread::spawn(move || answer(answers, 13));
        let sleeper = std::thread::spawn(move || {
            let mut end = sleep_beside(theirs);
            end.follow_warm(Exercise::Call, 0, 3).unwrap();
            end.follow(Exercise::Call, 0, 10).unwrap();
        });
        let caller = Box::new(OverSocket { socket: calls, bytes: vec![0; 100] });
        let mut end = Calls::of(Side::Calls(caller, mine));
        end.lead_warm(Exercise::Call, 0, 3).unwrap();
        assert!(!sleeper.is_finished(), "it wakes before its time");
        end.lead(Exercise::Call, 0, 10).unwrap();
        sleeper.join().unwrap();
        program.join().unwrap();
        // Where the other side is gone, it does not sleep for ever.
        drop(end);
        let (mine, theirs) = UnixStream::pair().unwrap();
        drop(mine);
        assert!(sleep_beside(theirs).follow(Exercise::Call, 0, 1).is_err());
    }

    #[test]
    fn virtual_interfaces_send_messages_while_others_call() {
        let part = |contestant: Contestant, exercise| contestant.part(exercise, 256);
        assert_eq!(part(Contestant::Vi, Exercise::Call), Some((Exercise::PingPong, REFERENCE_BYTES)));
        assert_eq!(part(Contestant::ViUdpSealed, Exercise::FetchMany), Some((Exercise::Stream, 256)));
        assert_eq!(part(Contestant::ViUdp, Exercise::Calls), None);
        assert_eq!(part(Contestant::Vi, Exercise::Fetch), None);
        for exercise in Bench::Rpc.exercises() {
            assert_eq!(part(Contestant::Redis, *exercise), Some((*exercise, 256)));
        }
    }
}
