//! `bench wire`, `bench landing`, `bench sockets`, `bench rpc` and `bench netmem`: contestants between two network
//! namespaces, in rounds like all others.

use crate::network::{Keeper, Network, Wire, is_allowed};
use crate::rounds::{self, Record};
use crate::transports::{Contestant, Exercise};
use crate::{Bench, BenchError, Options, Report};
use std::time::Instant;

/// Makes the network, measures, and removes the network.
pub(crate) fn run(options: &Options, began: Instant) -> Result<Report, BenchError> {
    let mut record = Record::new(options, began);
    // Most of what is measured there stays on one host.
    let hardly = matches!(options.bench, Bench::Sockets | Bench::Rpc | Bench::Netmem);
    let needed = match options.bench {
        _ if hardly => options.contestants_or_default().iter().any(|contestant| contestant.needs_tending()),
        _ => true,
    };
    let keeper = if options.loopback || !needed {
        None
    } else if is_allowed() {
        match keeper(options, &mut record.notes) {
            Err(BenchError::Network(why)) if hardly => {
                record.notes.push(format!("OVER LOOPBACK, NOT BETWEEN NAMESPACES: {why}"));
                None
            }
            keeper => Some(keeper?),
        }
    } else {
        let note = "OVER LOOPBACK, NOT BETWEEN NAMESPACES: this process may not make any; run it as root";
        record.notes.push(note.to_owned());
        None
    };
    if needed {
        record.network = Some(if keeper.is_some() { "veth" } else { "loopback" });
    }
    if options.programme().iter().any(|(exercise, _)| *exercise == Exercise::StreamAsleep) {
        let note = "CPU time of a sender has some of the receiver's work in it: the kernel carries a packet up to the \
                    receiver's socket on the sender's CPU, in the sender's name";
        record.notes.push(note.to_owned());
    }
    if options.contestants_or_default().iter().any(|contestant| contestant.is_exchange()) {
        let note = "LATENCY OF rdma-read AND send-and-message is that of a whole exchange, there and back";
        record.notes.push(note.to_owned());
    }
    let network = keeper.as_ref().map_or_else(Network::loopback, |keeper| keeper.network.clone());
    match options.bench {
        Bench::Sockets => {
            record.notes.extend(crate::sockets::NOTES.map(str::to_owned));
            rounds::measure(record, &network.of_one_host())
        }
        Bench::Rpc => {
            record.notes.extend(crate::rpc::NOTES.map(str::to_owned));
            rounds::measure(record, &network)
        }
        Bench::Netmem => {
            record.notes.extend(crate::netmem::notes(options));
            rounds::measure(record, &network)
        }
        _ => rounds::measure(record, &network),
    }
}

fn keeper(options: &Options, notes: &mut Vec<String>) -> Result<Keeper, BenchError> {
    let segmented = |contestants: &[Contestant]| contestants.iter().any(|who| who.wire() == Wire::Segmented);
    let keeper = Keeper::start(segmented(&options.contestants_or_default()))?;
    if let Some(why) = &keeper.not_segmented {
        if segmented(&options.contestants) {
            return Err(BenchError::Network(why.clone()));
        }
        notes.push(format!("OFFLOADS CANNOT BE SWITCHED OFF: {why}"));
    }
    Ok(keeper)
}
