//! Processes that are nodes, and what happens to them.

use super::{CLIENTS, COORDINATOR, ClientInput, Event, MS, NodeInput, Process, SECOND, Simulation};
use crate::coordinator::Coordinator;
use crate::donation::{Donation, View};
use crate::node::{self, Node, Output};
use crate::request::{Answer, Refusal};
use highwire_mem::PeerMemory;
use std::os::fd::AsFd;

impl Simulation {
    pub(super) fn start(&mut self, at: usize) {
        if self.processes[at].node.is_some() {
            return;
        }
        let pages = self.scenario.small.filter(|_| at == 0).unwrap_or(self.scenario.pages);
        let donation = Donation::create(pages).expect("there is memory for a few pages");
        let config = node::Config { sweep_ns: 500 * MS, keep_blocks: 0, copying_max: 1, ..node::Config::default() };
        let random = self.random.next();
        let process = &mut self.processes[at];
        process.life += 1;
        process.node = Some(Node::new(process.id, String::new(), donation, config, random));
        (process.stopped, process.leaving, process.timer) = (None, false, u64::MAX);
        let life = process.life;
        self.after(0, Event::Node { at, life, input: NodeInput::Timer });
    }

    pub(super) fn node(&mut self, at: usize, input: NodeInput) -> Result<(), String> {
        let process = &mut self.processes[at];
        if let Some(stopped) = &mut process.stopped {
            stopped.push(input);
            return Ok(());
        }
        let (now, life) = (process.clock.at(self.now), process.life);
        let Some(node) = &mut process.node else { return Ok(()) };
        match input {
            NodeInput::Request { token, request, body } => {
                let old = node.map().is_some_and(|map| request.epoch < map.epoch);
                node.handle_request(now, token, request, &body);
                self.outputs(at, old.then_some(token))?;
            }
            NodeInput::Peer { from, from_life, ticket, request, body } => {
                let answer = node.handle_peer(now, request, &body);
                let input = NodeInput::PeerAnswer { ticket, answer };
                self.send(at, from, Event::Node { at: from, life: from_life, input });
            }
            NodeInput::PeerAnswer { ticket, answer } => node.handle_peer_answer(now, ticket, answer),
            NodeInput::Coordinator { ticket, answer } => node.handle_coordinator(now, ticket, answer),
            NodeInput::Timer => {
                process.timer = u64::MAX;
                node.handle_timeout(now);
            }
        }
        self.outputs(at, None)?;
        let process = &mut self.processes[at];
        let Some(node) = &process.node else { return Ok(()) };
        if node.has_left() {
            (process.node, process.life) = (None, life + 1);
            let down = self.random.below(8 * SECOND);
            self.after(down, Event::Start { at });
            return Ok(());
        }
        let figures = node.figures();
        self.reasons.short_of_memory |= figures.aged + figures.dropped > 0;
        if let Some(incarnation) = node.incarnation() {
            self.views.entry(incarnation).or_insert_with(|| {
                let (fd, bytes) = node.donation().to_read().expect("there is /proc");
                let memory = PeerMemory::borrow(fd.as_fd(), bytes, u64::MAX).expect("it can be mapped");
                (View::new(memory).expect("it is a donation"), at)
            });
        }
        let next = process.clock.when(node.next_timeout()).max(self.now + MS);
        if next < process.timer {
            process.timer = next;
            self.after(next - self.now, Event::Node { at, life, input: NodeInput::Timer });
        }
        Ok(())
    }

    pub(super) fn outputs(&mut self, at: usize, old: Option<u64>) -> Result<(), String> {
        let life = self.processes[at].life;
        while let Some(output) = self.processes[at].node.as_mut().and_then(Node::poll_output) {
            match output {
                Output::Answer { token, answer, body } => {
                    let refused = matches!(
                        answer,
                        Answer::Refused(Refusal::OldEpoch { .. } | Refusal::Gone { .. } | Refusal::NoLease)
                    );
                    if old == Some(token) && !refused {
                        return Err(format!("a request of an old epoch was answered: {answer:?}"));
                    }
                    let (client, serial) = ((token >> 32) as usize, token & 0xffff_ffff);
                    let input = ClientInput::Answer(answer, body);
                    self.send(at, CLIENTS + client, Event::Client { at: client, serial, input });
                }
                Output::Coordinator { ticket, request } => {
                    let (node, life) = (Some((at, life, ticket)), self.coordinator_life);
                    self.send(at, COORDINATOR, Event::Coordinator { life, node, client: None, request });
                }
                Output::Peer { ticket, request, body } => {
                    let lives = |process: &Process| {
                        process.node.as_ref().is_some_and(|node| node.incarnation() == Some(request.to))
                    };
                    let Some(to) = self.processes.iter().position(lives) else { continue };
                    // Now and then it arrives twice.
                    let times = if self.random.chance(2) { 2 } else { 1 };
                    for _ in 0..times {
                        let (request, body) = (request.clone(), body.clone());
                        let input = NodeInput::Peer { from: at, from_life: life, ticket, request, body };
                        self.send(at, to, Event::Node { at: to, life: self.processes[to].life, input });
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn resume(&mut self, at: usize) {
        let Some(inputs) = self.processes[at].stopped.take() else { return };
        let life = self.processes[at].life;
        for input in inputs {
            self.after(0, Event::Node { at, life, input });
        }
    }

    pub(super) fn chaos(&mut self) {
        let up: Vec<_> = (0..self.processes.len())
            .filter(|at| self.processes[*at].node.as_ref().is_some_and(|node| node.incarnation().is_some()))
            .collect();
        if self.scenario.gentle {
            let settled = self.coordinator.as_ref().is_some_and(Coordinator::is_quiet);
            let runs = |process: &Process, member| {
                let life = process.node.as_ref().and_then(Node::incarnation);
                process.stopped.is_none() && life == Some(member)
            };
            let all = self.members.keys().all(|member| self.processes.iter().any(|process| runs(process, *member)));
            let leaving = self.processes.iter().any(|process| process.leaving);
            // One at a time: with two copies and nothing else missing.
            if leaving || !settled || self.members.len() < 2 || !all {
                return;
            }
        }
        let Some(at) = up.get(self.random.below(up.len() as u64) as usize).copied() else { return };
        match self.random.below(if self.scenario.gentle { 5 } else { 12 }) {
            0 | 1 => {
                self.processes[at].node = None;
                self.processes[at].life += 1;
                self.processes[at].stopped = None;
                self.report.crashes += 1;
                let down = self.random.below(6 * SECOND);
                self.after(down, Event::Start { at });
            }
            2 | 3 => {
                self.processes[at].stopped.get_or_insert_with(Vec::new);
                let down = self.random.below(6 * SECOND);
                self.after(down, Event::Resume { at });
            }
            // Where all leave there is nobody to hand over to.
            4 if self.scenario.gentle && self.members.len() < 3 => {}
            4 => {
                let now = self.processes[at].clock.at(self.now);
                let process = &mut self.processes[at];
                if let (Some(node), None) = (&mut process.node, &process.stopped) {
                    node.leave(now);
                    process.leaving = true;
                    let life = self.processes[at].life;
                    self.after(0, Event::Node { at, life, input: NodeInput::Timer });
                }
            }
            5..=7 => {
                let ends = [COORDINATOR, self.random.below(self.scenario.nodes as u64) as usize, CLIENTS];
                let other = ends[self.random.below(3) as usize];
                let link = (at.min(other), at.max(other));
                self.cuts.insert(link);
                let down = self.random.below(6 * SECOND);
                self.after(down, Event::Heal { link });
            }
            8 if self.scenario.restarts => {
                self.coordinator = None;
                self.coordinator_life += 1;
                let down = self.random.below(3 * SECOND);
                self.after(down, Event::StartCoordinator);
            }
            _ => {}
        }
    }
}
