//! Everybody who takes part, on both sides, and how one trial follows another.
//!
//! A *heat* is a series of trials, one directly after the other, each between two probes:
//! `probe · trial · probe · trial · probe …`. What the driver tells the peer to do is a [`Command`].

use crate::connections;
use crate::netmem::{self, Region};
use crate::pair::{Link, Pair, Role, cpu_ns};
use crate::rpc;
use crate::transports::programs::Program;
use crate::transports::{Contestant, Delivery, Exercise, Transport, landing};
use crate::{BenchError, State};
use highwire::Landings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What the driver asks of the second process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Meet for this contestant, whose messages have up to so many bytes.
    Admit(Contestant, usize),
    /// Start this contestant's end of a program, which is here.
    AdmitProgram(Contestant, PathBuf),
    /// Leave the CPU to a program while this contestant runs, until the socket that comes along says so.
    AdmitAsleep(Contestant),
    /// Donate memory for this region, until the socket that comes along says that its reader is done.
    AdmitPaged(Contestant, Region),
    /// Run these trials, one after the other.
    Heat(Vec<Start>),
    /// Take part in one probe.
    Probe,
    /// Record the pulses of this burst and tell them.
    Trace(Start),
    /// Open this many virtual interfaces on one completion queue.
    Connections(usize),
    /// Exchange messages on random ones of them.
    Roam {
        /// Which of the crowds opened so far.
        crowd: usize,
        rounds: usize,
        seed: u64,
    },
}

/// One trial.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) contestant: Contestant,
    pub(crate) exercise: Exercise,
    pub(crate) size: usize,
    pub(crate) count: usize,
}

impl Start {
    /// Messages before the clock starts: those who ran before have left nothing of ours in the
    /// caches. A stream goes once through a payload area; frames that were just filled are warm.
    fn warm(&self) -> usize {
        match self.exercise {
            // What was read before is no longer where it is to be read from.
            Exercise::File | Exercise::RandomPages | Exercise::Sequential => 0,
            // As many as are to be under way.
            Exercise::Calls => (self.count / 8).max(self.size),
            _ if self.contestant.lands() => landing::buffers(self.size).max(landing::buffers(0)),
            Exercise::Stream | Exercise::StreamAsleep if self.contestant != Contestant::Vi => {
                (WARM_AREA_BYTES / self.size).clamp(1, self.count)
            }
            _ => (self.count / 8).clamp(1, 32),
        }
    }

    /// Bytes of all messages.
    pub(crate) fn bytes(&self) -> usize {
        self.contestant.message_bytes(self.size) * self.count
    }
}

/// How a trial went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Burst {
    pub(crate) nanoseconds: f64,
    /// What arrived, where that may be less than was sent.
    pub(crate) delivery: Option<Delivery>,
    /// CPU time of the driver and of the peer.
    pub(crate) cpu_ns: [u64; 2],
    /// Where the payloads of it were received, where that is counted.
    pub(crate) landed: Landed,
    /// Messages that were sent to get in its way.
    pub(crate) interfering: u64,
    pub(crate) before_ns: f64,
    pub(crate) after_ns: f64,
    pub(crate) state: State,
    /// One of the processes lost its CPU for a while.
    pub(crate) preempted: bool,
}

/// How many payloads of a trial were received where they were expected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Landed {
    pub(crate) hits: u64,
    /// Payloads that were received elsewhere, and copied.
    pub(crate) copied: u64,
    /// All of them.
    pub(crate) packets: u64,
}

impl Landed {
    fn between(before: &Landings, after: &Landings) -> Landed {
        let packets = |landings: &Landings| landings.hits + landings.seen + landings.copied;
        Landed {
            hits: after.hits - before.hits,
            copied: after.copied - before.copied,
            packets: packets(after) - packets(before),
        }
    }

    /// The part of `packets` for which nothing was guessed, or wrongly; and the part that was copied.
    pub(crate) fn failed_and_copied(self) -> (f64, f64) {
        let part = |packets| packets as f64 / self.packets.max(1) as f64;
        (part(self.packets - self.hits), part(self.copied))
    }
}

/// The driver's side of everybody who takes part.
pub(crate) struct Contest {
    pub(crate) pair: Pair,
    pub(crate) transports: BTreeMap<Contestant, Box<dyn Transport>>,
}

impl Contest {
    pub(crate) fn open(pair: Pair) -> Contest {
        Contest { pair, transports: BTreeMap::new() }
    }

    pub(crate) fn admit(&mut self, contestant: Contestant, size_max: usize) -> Result<(), BenchError> {
        let link = &mut self.pair.link;
        link.tell(&Command::Admit(contestant, size_max), &[])?;
        let met = link.let_roam(contestant, MEETING, |link| contestant.meet(link, size_max));
        self.welcome(contestant, met)
    }

    /// The same of one whose two ends are programs.
    pub(crate) fn admit_program(&mut self, contestant: Contestant, program: &Path) -> Result<(), BenchError> {
        self.pair.link.tell(&Command::AdmitProgram(contestant, program.to_owned()), &[])?;
        let met = Program::meet(contestant, &mut self.pair.link, program);
        self.welcome(contestant, met)
    }

    /// The same of one whose server is a program that this process has started, and its end.
    pub(crate) fn admit_asleep(
        &mut self,
        contestant: Contestant,
        awake: BorrowedFd<'_>,
        end: Box<dyn Transport>,
    ) -> Result<(), BenchError> {
        self.pair.link.tell(&Command::AdmitAsleep(contestant), &[awake])?;
        self.welcome(contestant, Ok(end))
    }

    /// The same of one who reads a region of which the second process donates memory.
    pub(crate) fn admit_paged(
        &mut self,
        contestant: Contestant,
        region: Region,
        done: BorrowedFd<'_>,
        meet: impl FnOnce(&mut Link) -> Result<Box<dyn Transport>, BenchError>,
    ) -> Result<(), BenchError> {
        self.pair.link.tell(&Command::AdmitPaged(contestant, region), &[done])?;
        let met = meet(&mut self.pair.link);
        self.welcome(contestant, met)
    }

    fn welcome(
        &mut self,
        contestant: Contestant,
        met: Result<Box<dyn Transport>, BenchError>,
    ) -> Result<(), BenchError> {
        self.transports.insert(contestant, met.map_err(|error| self.pair.explain(error))?);
        Ok(())
    }

    pub(crate) fn probe(&mut self) -> Result<f64, BenchError> {
        self.pair.link.tell(&Command::Probe, &[])?;
        self.pair.link.probe()
    }

    /// Runs trials one after the other, each between two probes.
    pub(crate) fn heat(&mut self, starts: &[Start]) -> Result<Vec<Burst>, BenchError> {
        let link = &mut self.pair.link;
        link.tell(&Command::Heat(starts.to_vec()), &[])?;
        let mut run = || {
            let mut bursts = Vec::with_capacity(starts.len());
            let mut waited = link.note_wait();
            let mut before_ns = link.probe()?;
            let mut peer_waited = link.peer_wait();
            for start in starts {
                let transport = self.transports.get_mut(&start.contestant).ok_or(BenchError::NobodyLeft)?;
                let Start { exercise, size, count, .. } = *start;
                transport.wait_asleep(!link.spinning || exercise == Exercise::StreamAsleep);
                transport.prepare_for(Role::Driver, exercise, size, start.warm() + count)?;
                link.meet()?;
                let (nanoseconds, used) = link.let_roam(start.contestant, exercise, |_| {
                    transport.lead_warm(exercise, size, start.warm())?;
                    let used = cpu_ns();
                    let clock = Instant::now();
                    transport.lead(exercise, size, count)?;
                    Ok((clock.elapsed().as_nanos() as f64, cpu_ns() - used))
                })?;
                let (delivery, interfering) = (transport.take_delivery(), transport.interfering());
                let timing = transport.take_timing();
                let nanoseconds = timing.map_or(nanoseconds, |timing| timing.nanoseconds);
                transport.check()?;
                if start.contestant.needs_tending() {
                    link.meet_tending(|| transport.tend())?;
                }
                let now_waited = link.note_wait();
                let after_ns = link.probe()?;
                let peer_now = link.peer_wait();
                let own = timing.map_or(now_waited - waited, |timing| timing.waited_ns);
                let lost = own.max(peer_now.saturating_sub(peer_waited));
                let spinning = link.spinning;
                let state = if spinning { State::of_trial(before_ns, after_ns) } else { State::OneCore };
                // On one CPU the two processes wait for each other all the time.
                let preempted = spinning && lost as f64 > start.contestant.lost_ns_max(exercise, nanoseconds);
                let cpu_ns = [used, link.peer_cpu()];
                let landed = link.peer_landed();
                bursts.push(Burst {
                    nanoseconds,
                    delivery,
                    cpu_ns,
                    landed,
                    interfering,
                    before_ns,
                    after_ns,
                    state,
                    preempted,
                });
                (before_ns, waited, peer_waited) = (after_ns, now_waited, peer_now);
            }
            Ok(bursts)
        };
        run().map_err(|error| self.pair.explain(error))
    }
}

/// The peer's side of [`Contest`]: does as it is told until the driver is gone.
pub(crate) fn serve(link: &mut Link) -> Result<(), BenchError> {
    let mut transports: BTreeMap<Contestant, Box<dyn Transport>> = BTreeMap::new();
    let mut crowds = Vec::new();
    while let Some((command, descriptors)) = link.hear_command::<Command>()? {
        match command {
            Command::Admit(contestant, size_max) => {
                let met = link.let_roam(contestant, MEETING, |link| contestant.meet(link, size_max))?;
                transports.insert(contestant, met);
            }
            Command::AdmitProgram(contestant, program) => {
                transports.insert(contestant, Program::meet(contestant, link, &program)?);
            }
            Command::AdmitAsleep(contestant) => {
                let awake = descriptors.into_iter().next().ok_or(BenchError::NobodyLeft)?;
                transports.insert(contestant, rpc::sleep_beside(awake.into()));
            }
            Command::AdmitPaged(contestant, region) => {
                let done = descriptors.into_iter().next().ok_or(BenchError::NobodyLeft)?;
                transports.insert(contestant, netmem::meet(contestant, link, region, done.into())?);
            }
            Command::Heat(starts) => {
                link.note_wait();
                link.probe()?;
                for start in starts {
                    let Start { contestant, exercise, size, count } = start;
                    let transport = transports.get_mut(&contestant).ok_or(BenchError::NobodyLeft)?;
                    transport.wait_asleep(!link.spinning || exercise == Exercise::StreamAsleep);
                    transport.prepare_for(Role::Peer, exercise, size, start.warm() + count)?;
                    link.meet()?;
                    let own_wait = link.own_wait();
                    let (landings, used) = link.let_roam(contestant, exercise, |_| {
                        transport.follow_warm(exercise, size, start.warm())?;
                        let (landings, used) = (transport.landings(), cpu_ns());
                        transport.follow(exercise, size, count)?;
                        Ok((landings, cpu_ns() - used))
                    })?;
                    if let Some(timing) = transport.take_timing() {
                        link.count_instead(own_wait, timing.waited_ns);
                    }
                    link.note_cpu(used);
                    link.note_landed(Landed::between(&landings, &transport.landings()));
                    transport.check()?;
                    if contestant.needs_tending() {
                        link.meet_tending(|| transport.tend())?;
                    }
                    link.note_wait();
                    link.probe()?;
                }
            }
            Command::Probe => {
                link.probe()?;
            }
            Command::Trace(start) => crate::pipelining::follow(link, &mut transports, start)?,
            Command::Connections(count) => crowds.push(connections::Crowd::meet(link, count)?),
            Command::Roam { crowd, rounds, seed } => {
                let crowd = crowds.get_mut(crowd).ok_or(BenchError::NobodyLeft)?;
                connections::follow(link, crowd, rounds, seed)?;
            }
        }
    }
    debug_assert_eq!(link.role, Role::Peer);
    Ok(())
}

/// Bytes of a stream that go before the clock starts.
pub(crate) const WARM_AREA_BYTES: usize = 4 << 20;

/// As for which contestants meet: an interface counts its CPUs when it is opened, and those who send files may have all.
const MEETING: Exercise = Exercise::File;
