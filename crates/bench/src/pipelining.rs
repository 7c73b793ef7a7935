//! A trace of adaptive pulses on both sides of a burst, as the first paper's figure 3 shows it.

use crate::BenchError;
use crate::contest::{Command, Contest, Start};
use crate::pair::{Link, Role};
use crate::trace::{Pulse, Trace};
use crate::transports::{Contestant, Exercise, Transport};
use std::collections::BTreeMap;

/// Records a burst of 8 KiB messages after a moment of silence, as the paper does. `None` if nobody
/// who pulses takes part.
pub(crate) fn trace(contest: &mut Contest, contestants: &[Contestant]) -> Result<Option<Trace>, BenchError> {
    if !contestants.contains(&Contestant::Adaptive) {
        return Ok(None);
    }
    let start = Start {
        contestant: Contestant::Adaptive,
        exercise: Exercise::Stream,
        size: TRACE_BYTES,
        count: TRACE_MESSAGES,
    };
    let link = &mut contest.pair.link;
    link.tell(&Command::Trace(start), &[])?;
    let mut run = || {
        let ours = record(link, &mut contest.transports, start)?;
        let mut theirs = Vec::new();
        loop {
            let (part, _) = link.hear::<Vec<Pulse>>()?;
            if part.is_empty() {
                break;
            }
            theirs.extend(part);
        }
        Ok(Trace::of(TRACE_BYTES as u64, &ours, &theirs, highwire::ticks_per_second()))
    };
    match run() {
        Ok(trace) => Ok(Some(trace)),
        Err(error) => Err(contest.pair.explain(error)),
    }
}

/// The peer's part of [`trace`].
pub(crate) fn follow(
    link: &mut Link,
    transports: &mut BTreeMap<Contestant, Box<dyn Transport>>,
    start: Start,
) -> Result<(), BenchError> {
    let pulses = record(link, transports, start)?;
    for part in pulses.chunks(PULSES_IN_A_MESSAGE) {
        link.tell(&part, &[])?;
    }
    link.tell(&[(); 0], &[])
}

fn record(
    link: &mut Link,
    transports: &mut BTreeMap<Contestant, Box<dyn Transport>>,
    start: Start,
) -> Result<Vec<Pulse>, BenchError> {
    let Start { contestant, exercise, size, count } = start;
    let transport = transports.get_mut(&contestant).ok_or(BenchError::NobodyLeft)?;
    transport.record_pulses(PULSES_MAX);
    link.meet()?;
    match link.role {
        Role::Driver => transport.lead(exercise, size, count)?,
        Role::Peer => transport.follow(exercise, size, count)?,
    }
    link.meet()?;
    Ok(transport.take_pulses(link.role))
}

/// The paper's payload.
const TRACE_BYTES: usize = 8192;
const TRACE_MESSAGES: usize = 24;
const PULSES_MAX: usize = 4096;
/// A message between the two processes has a limit.
const PULSES_IN_A_MESSAGE: usize = 256;
