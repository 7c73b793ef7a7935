//! What a history of operations must be like.
//!
//! Every put has a value of its own, so that each value is written at most once. Then a history of one name can be
//! linearised if and only if the *zones* of its values fit: all operations of a value (its put and the gets that saw
//! it) end no earlier than `first_end` and begin no later than `last_start`. Where `first_end < last_start` the name
//! had the value all the time between; two values cannot at once, and no other value can come and go meanwhile
//! (Gibbons and Korach, "Testing shared memories"). A remove is a value that nobody sees.
//!
//! A get that finds nothing needs a reason: a remove, or that nothing was ever put, or one of those for which a value
//! may vanish.

use crate::types::{Epoch, Loss, NodeId};

#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) client: usize,
    pub(super) start: u64,
    /// When it was confirmed; none while it is not, or never was.
    pub(super) end: Option<u64>,
    /// The epoch of the last request.
    pub(super) epoch: Epoch,
    pub(super) deed: Deed,
    /// The node said that it was not done.
    pub(super) refused: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Deed {
    Put { value: u64, lease_ns: u64 },
    Remove,
    Get { seen: Option<Seen> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Value(u64),
    Absent { lost: Option<Loss>, expired: bool },
}

/// What may make a value vanish in a run.
#[derive(Debug, Default)]
pub(super) struct Reasons {
    /// Objects aged or were dropped.
    pub(super) short_of_memory: bool,
    /// Nodes that were taken out of the map, after which epoch, and in which at the latest.
    pub(super) lost: Vec<(NodeId, Epoch, Epoch)>,
    /// When each coordinator after the first had its first map.
    pub(super) restarts: Vec<u64>,
    /// That the loss of a node is no reason, with two copies.
    pub(super) loss_is_none: bool,
}

struct Zone {
    what: String,
    first_end: u64,
    last_start: u64,
}

impl Zone {
    fn is_forward(&self) -> bool {
        self.first_end < self.last_start
    }
}

/// Checks the history of one name.
pub(super) fn check(history: &[Record], reasons: &Reasons) -> Result<(), String> {
    let zones = zones(history)?;
    for (at, a) in zones.iter().enumerate().filter(|(_, zone)| zone.is_forward()) {
        for (other, b) in zones.iter().enumerate() {
            let clash = if b.is_forward() {
                at != other && a.first_end < b.last_start && b.first_end < a.last_start
            } else {
                a.first_end < b.last_start && b.first_end < a.last_start
            };
            if clash {
                return Err(format!(
                    "{} was there from {} to {}, and {} within {} to {}",
                    a.what, a.first_end, a.last_start, b.what, b.last_start, b.first_end
                ));
            }
        }
    }
    for get in history {
        if let Deed::Get { seen: Some(Seen::Absent { lost, expired }) } = &get.deed {
            check_absence(history, get, *lost, *expired, reasons)?;
        }
    }
    Ok(())
}

fn zones(history: &[Record]) -> Result<Vec<Zone>, String> {
    let mut zones = Vec::new();
    for record in history {
        let acknowledged = record.end.unwrap_or(u64::MAX);
        match record.deed {
            Deed::Put { value, lease_ns } => {
                let seen =
                    |get: &&Record| matches!(get.deed, Deed::Get { seen: Some(Seen::Value(seen)) } if seen == value);
                let mut zone =
                    Zone { what: format!("value {value}"), first_end: acknowledged, last_start: record.start };
                let mut read = false;
                for get in history.iter().filter(seen) {
                    let end = get.end.expect("a get that saw something has ended");
                    if end < record.start {
                        return Err(format!("value {value} was seen before it was put"));
                    }
                    if record.refused {
                        return Err(format!("value {value} was seen at {end} although its put was refused"));
                    }
                    let last = record.end.map(|put| put + lease_ns + lease_ns / 16 + SLACK_NS);
                    if last.is_some_and(|last| get.start > last) {
                        return Err(format!("value {value} was seen at {} after its lease had ended", get.start));
                    }
                    zone.first_end = zone.first_end.min(end);
                    zone.last_start = zone.last_start.max(get.start);
                    read = true;
                }
                if read || record.end.is_some() {
                    zones.push(zone);
                }
            }
            Deed::Remove if record.end.is_some() => {
                let what = format!("a remove of client {}", record.client);
                zones.push(Zone { what, first_end: acknowledged, last_start: record.start });
            }
            Deed::Get { seen: Some(Seen::Value(value)) } => {
                let put =
                    history.iter().any(|put| matches!(put.deed, Deed::Put { value: other, .. } if other == value));
                if !put {
                    return Err(format!("value {value} was seen and never put"));
                }
            }
            _ => {}
        }
    }
    Ok(zones)
}

/// Looks for something after which the name may have been without content when `get` looked.
fn check_absence(
    history: &[Record],
    get: &Record,
    lost: Option<Loss>,
    expired: bool,
    reasons: &Reasons,
) -> Result<(), String> {
    if let Some(loss) = lost {
        let real = reasons
            .lost
            .iter()
            .any(|(node, after, last)| *node == loss.node && (*after < loss.epoch && loss.epoch <= *last));
        if !real {
            return Err(format!("{loss} was said at {}, and never was", get.start));
        }
    }
    let changes: Vec<_> = history
        .iter()
        .filter(|record| !record.refused && !matches!(record.deed, Deed::Get { .. }))
        .filter(|record| record.start <= get.end.unwrap_or(u64::MAX))
        .collect();
    let confirmed = |record: &&&Record| record.end.is_some_and(|end| end < get.start);
    // Those that some confirmed change certainly came after are no reason any more.
    let overtaken =
        |record: &Record| changes.iter().filter(confirmed).any(|later| record.end.is_some_and(|end| end < later.start));
    let never = !changes.iter().any(|record| record.end.is_some_and(|end| end < get.start));
    if never && !expired {
        return Ok(());
    }
    let explains = |record: &&&Record| match record.deed {
        Deed::Remove => !expired,
        Deed::Put { lease_ns, .. } => {
            let ended = get.end.is_some_and(|end| record.start + lease_ns - lease_ns / 16 <= end);
            let gone = lost.is_some_and(|loss| record.epoch < loss.epoch) && !reasons.loss_is_none;
            let restarted = reasons.restarts.iter().any(|first| record.start < *first && Some(*first) <= get.end);
            ended || (!expired && (gone || restarted || reasons.short_of_memory))
        }
        Deed::Get { .. } => false,
    };
    if changes.iter().filter(|record| !overtaken(record)).any(|record| explains(&record)) {
        return Ok(());
    }
    Err(format!("nothing was found at {} (lost: {lost:?}, expired: {expired}), without a reason", get.start))
}

/// What a lease can last longer for content that moved between nodes.
const SLACK_NS: u64 = 10_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn record(start: u64, end: u64, deed: Deed) -> Record {
        let end = (end > 0).then_some(end);
        Record { client: 0, start, end, epoch: Epoch(5), deed, refused: false }
    }

    fn put(start: u64, end: u64, value: u64) -> Record {
        record(start, end, Deed::Put { value, lease_ns: 1 << 60 })
    }

    fn get(start: u64, end: u64, value: u64) -> Record {
        record(start, end, Deed::Get { seen: Some(Seen::Value(value)) })
    }

    fn none(start: u64, end: u64) -> Record {
        record(start, end, Deed::Get { seen: Some(Seen::Absent { lost: None, expired: false }) })
    }

    #[test]
    fn good_histories_pass_and_bad_ones_do_not() {
        let remove = |start, end| record(start, end, Deed::Remove);
        let good: &[&[Record]] = &[
            &[put(1, 2, 1), get(3, 4, 1), put(5, 6, 2), get(7, 8, 2)],
            &[put(1, 2, 1), put(3, 10, 2), get(4, 5, 1), get(6, 7, 2)],
            &[put(1, 2, 1), put(3, 0, 2), get(4, 5, 1), get(60, 70, 2)],
            &[put(1, 2, 1), remove(3, 4), none(5, 6), put(7, 8, 2), get(9, 10, 2)],
            &[none(1, 2), put(3, 4, 1)],
            &[put(3, 8, 1), none(4, 7)],
            &[put(1, 2, 1), remove(3, 0), get(4, 5, 1), none(6, 7)],
        ];
        let bad: &[&[Record]] = &[
            &[put(1, 2, 1), put(3, 4, 2), get(5, 6, 1)],
            &[put(1, 2, 1), put(3, 0, 2), get(4, 5, 2), get(6, 7, 1)],
            &[put(1, 2, 1), remove(3, 4), get(5, 6, 1)],
            &[put(1, 2, 1), none(3, 4)],
            &[put(1, 2, 1), remove(3, 4), put(5, 6, 2), none(7, 8)],
            &[get(1, 2, 1), put(3, 4, 1)],
            &[get(1, 2, 1)],
        ];
        for history in good {
            assert_eq!(check(history, &Reasons::default()), Ok(()), "{history:?}");
        }
        for history in bad {
            assert!(check(history, &Reasons::default()).is_err(), "{history:?}");
        }
    }

    #[test]
    fn a_loss_explains_only_what_was_put_before_it() {
        let loss = Loss { node: NodeId(1), epoch: Epoch(6) };
        let absent = |lost| record(3, 4, Deed::Get { seen: Some(Seen::Absent { lost, expired: false }) });
        let mut reasons = Reasons {
            lost: vec![(NodeId(1), Epoch(5), Epoch(6)), (NodeId(1), Epoch(3), Epoch(4))],
            ..Reasons::default()
        };
        assert!(check(&[put(1, 2, 1), absent(Some(loss))], &reasons).is_ok());
        assert!(check(&[put(1, 2, 1), absent(None)], &reasons).is_err());
        let earlier = Loss { epoch: Epoch(4), ..loss };
        assert!(check(&[put(1, 2, 1), absent(Some(earlier))], &reasons).is_err());
        let untrue = Loss { node: NodeId(2), ..loss };
        assert!(check(&[put(1, 2, 1), absent(Some(untrue))], &reasons).is_err());
        reasons.loss_is_none = true;
        assert!(check(&[put(1, 2, 1), absent(Some(loss))], &reasons).is_err());
    }
}
