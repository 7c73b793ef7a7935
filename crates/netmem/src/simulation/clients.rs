//! Clients, what they do, and what they see.

use super::oracle::{Deed, Record, Seen};
use super::{CLIENTS, COORDINATOR, ClientInput, Event, MS, NodeInput, Process, SECOND, Simulation};
use crate::client::{Failed, Failure, Step};
use crate::coordinator::CoordinatorRequest;
use crate::donation::{PAGE_BYTES, Read};
use crate::map::mix;
use crate::request::{Answer, Ask, Refusal};
use crate::types::{Epoch, Name};

impl Simulation {
    pub(super) fn operate(&mut self, at: usize) -> Result<(), String> {
        let name = self.random.below(self.scenario.names as u64) as usize;
        let key = name_of(name);
        let (ask, deed) = match self.random.below(10) {
            0..=3 if !self.ending || self.scenario.small.is_some() => {
                let value = self.next_value;
                self.next_value += 1;
                self.report.puts += 1;
                let lease_ns = if self.random.chance(15) { 2 * SECOND } else { 1000 * SECOND };
                let pinned = self.random.chance(if self.scenario.small.is_some() { 60 } else { 10 });
                (Ask::Put { name: key, lease_ns, pinned, only_if: None }, Deed::Put { value, lease_ns })
            }
            4 if !self.ending => (Ask::Remove { name: key, only_if: None }, Deed::Remove),
            _ => {
                let places = self.random.chance(50);
                (Ask::Get { name: key, bytes: true, places }, Deed::Get { seen: None })
            }
        };
        let record = Record { client: at, start: self.now, end: None, epoch: Epoch(0), deed, refused: false };
        self.histories[name].push(record);
        let index = self.histories[name].len() - 1;
        let customer = &mut self.customers[at];
        let now = customer.clock.at(self.now);
        let mut operation = customer.client.begin(now, ask, None, now + 8 * SECOND);
        let step = customer.client.next(now, &mut operation);
        customer.doing = Some((operation, name, index));
        self.advance(at, step, Vec::new())
    }

    pub(super) fn client(&mut self, at: usize, input: ClientInput) -> Result<(), String> {
        let customer = &mut self.customers[at];
        let Some((operation, _, _)) = &mut customer.doing else { return Ok(()) };
        let now = customer.clock.at(self.now);
        let (step, body) = match input {
            ClientInput::Answer(answer, body) => {
                self.report.old_epochs += u64::from(matches!(answer, Answer::Refused(Refusal::OldEpoch { .. })));
                self.report.arriving += u64::from(matches!(answer, Answer::Refused(Refusal::Arriving { .. })));
                (customer.client.handle_answer(now, operation, answer), body)
            }
            ClientInput::Failure(failure) => (customer.client.handle_failure(now, operation, failure), Vec::new()),
            ClientInput::Map(map) => {
                customer.client.handle_map(map);
                (customer.client.next(now, operation), Vec::new())
            }
            ClientInput::Wake => (customer.client.next(now, operation), Vec::new()),
        };
        self.advance(at, step, body)
    }

    /// Does what the client says.
    pub(super) fn advance(&mut self, at: usize, step: Step, body: Vec<u8>) -> Result<(), String> {
        let customer = &mut self.customers[at];
        customer.serial += 1;
        let (serial, clock) = (customer.serial, customer.clock);
        let Some((_, name, index)) = customer.doing.as_ref().map(|doing| (doing.0.clone(), doing.1, doing.2)) else {
            return Ok(());
        };
        match step {
            Step::Send { request, .. } => {
                self.histories[name][index].epoch = request.epoch;
                self.customers[at].asked = clock.at(self.now);
                let lives = |process: &Process| {
                    process.node.as_ref().is_some_and(|node| node.incarnation() == Some(request.to))
                };
                let Some(to) = self.processes.iter().position(lives) else {
                    let input = ClientInput::Failure(Failure::NotSent);
                    self.after(MS, Event::Client { at, serial, input });
                    return Ok(());
                };
                let body = match self.histories[name][index].deed {
                    Deed::Put { value, .. } => body_of(value),
                    _ => Vec::new(),
                };
                let input = NodeInput::Request { token: (at as u64) << 32 | serial, request, body };
                self.send(CLIENTS + at, to, Event::Node { at: to, life: self.processes[to].life, input });
                let input = ClientInput::Failure(Failure::NoAnswer);
                self.after(1500 * MS, Event::Client { at, serial, input });
            }
            Step::Fetch { have } => {
                let (client, request) = (Some((at, serial)), CoordinatorRequest::Map { have });
                let life = self.coordinator_life;
                self.send(CLIENTS + at, COORDINATOR, Event::Coordinator { life, node: None, client, request });
                self.after(300 * MS, Event::Client { at, serial, input: ClientInput::Wake });
            }
            Step::Wait { until } => {
                let delay = clock.when(until).saturating_sub(self.now).max(1);
                self.after(delay, Event::Client { at, serial, input: ClientInput::Wake });
            }
            Step::Done(outcome) => {
                self.done(at, name, index, outcome, &body)?;
                self.customers[at].doing = None;
                let pause = self.random.below(if self.scenario.hectic { 20 * MS } else { 200 * MS });
                self.after(pause, Event::Operate { at });
            }
        }
        Ok(())
    }

    pub(super) fn done(
        &mut self,
        at: usize,
        name: usize,
        index: usize,
        outcome: Result<Answer, Failed>,
        body: &[u8],
    ) -> Result<(), String> {
        let asked = self.customers[at].asked;
        let peace = self.scenario.small.is_some() && self.is_at_peace(self.histories[name][index].start);
        let record = &mut self.histories[name][index];
        let seen = match (&mut record.deed, outcome) {
            (Deed::Put { .. }, Ok(Answer::Stored { .. })) | (Deed::Remove, Ok(Answer::Removed { .. })) => {
                record.end = Some(self.now);
                None
            }
            (Deed::Put { .. } | Deed::Remove, Err(Failed::InDoubt)) => {
                self.report.doubts += 1;
                None
            }
            (Deed::Put { .. }, Err(error @ (Failed::Refused(_) | Failed::TimedOut { .. }))) if peace => {
                return Err(format!("a put was not made though other nodes have room: {error}"));
            }
            (Deed::Put { .. } | Deed::Remove, Err(Failed::Refused(_) | Failed::TimedOut { .. })) => {
                record.refused = true;
                self.report.failures += 1;
                None
            }
            (Deed::Get { .. }, Ok(Answer::Object { stat, pages })) => {
                let value = value_of(body)?;
                if !pages.is_empty() {
                    self.customers[at].client.remember(asked, name_of(name), stat, pages);
                }
                self.report.values += 1;
                Some(Seen::Value(value))
            }
            (Deed::Get { .. }, Err(Failed::Refused(Refusal::NotFound { lost }))) => {
                self.report.absences += 1;
                Some(Seen::Absent { lost, expired: false })
            }
            (Deed::Get { .. }, Err(Failed::Refused(Refusal::Expired { .. }))) => {
                Some(Seen::Absent { lost: None, expired: true })
            }
            (Deed::Get { .. }, Err(Failed::TimedOut { .. })) => {
                self.report.failures += 1;
                None
            }
            (deed, outcome) => return Err(format!("{deed:?} came to {outcome:?}")),
        };
        let record = &mut self.histories[name][index];
        if seen.is_some() {
            record.deed = Deed::Get { seen };
            record.end = Some(self.now);
        }
        Ok(())
    }

    /// Reads an object without a call, as a process on the node's host can.
    pub(super) fn glance(&mut self, at: usize) -> Result<(), String> {
        let name = self.random.below(self.scenario.names as u64) as usize;
        let customer = &mut self.customers[at];
        let now = customer.clock.at(self.now);
        let Some(places) = customer.client.places(now, &name_of(name)).cloned() else { return Ok(()) };
        let Some(first) = places.pages.first() else { return Ok(()) };
        let (view, host) = &self.views[&first.incarnation];
        let clock = self.processes[*host].clock.at(self.now);
        let mut bytes = vec![0; places.stat.length as usize];
        for (page, chunk) in places.pages.iter().zip(bytes.chunks_mut(PAGE_BYTES)) {
            let read = view.read(*page, 0, chunk, || clock);
            customer.client.after_read(&name_of(name), read, 1);
            self.report.lapsed += u64::from(read == Read::Lapsed);
            if read != Read::Done {
                return Ok(());
            }
        }
        self.report.glances += 1;
        let seen = Some(Seen::Value(value_of(&bytes)?));
        let deed = Deed::Get { seen };
        let record = Record { client: at, start: self.now, end: Some(self.now), epoch: Epoch(0), deed, refused: false };
        self.histories[name].push(record);
        Ok(())
    }
}

fn name_of(number: usize) -> Name {
    Name::new(&format!("name {number}")).expect("it is short")
}

/// Bytes that can be told from all others, few of them or up to three pages.
fn body_of(value: u64) -> Vec<u8> {
    let most = if value.is_multiple_of(8) { 3 * PAGE_BYTES as u64 / 8 } else { 64 };
    let words = 1 + mix(value) % most;
    let mut body = Vec::with_capacity(words as usize * 8);
    (0..words).for_each(|word| body.extend_from_slice(&(value + (word << 32)).to_le_bytes()));
    body
}

fn value_of(body: &[u8]) -> Result<u64, String> {
    let value = body.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    let value = value.ok_or_else(|| format!("an object of {} bytes was never put", body.len()))?;
    if body == body_of(value) { Ok(value) } else { Err(format!("value {value} has other bytes than were put")) }
}
