//! Messages of calls: any bytes are refused, or read as what is written as the same bytes; and whatever calls come to a
//! session, in whatever order, none is begun twice that may not be.
#![no_main]

use arbitrary::Arbitrary;
use highwire_rpc::head::{HEAD_BYTES, Head};
use highwire_rpc::session::{Admission, Session};
use libfuzzer_sys::fuzz_target;
use std::collections::HashMap;

#[derive(Arbitrary, Debug)]
struct Input {
    message: Vec<u8>,
    /// Of good form, so that more than the form is looked at.
    kind: u8,
    changes: Vec<(u8, u8)>,
    window: u8,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    Call { sequence: u8, unanswered: u8, may_repeat: bool },
    Finish { sequence: u8, length: Option<u8> },
    Cancel { sequence: u8 },
    Shrink,
}

fn decode(message: &[u8]) {
    if let Ok((head, body)) = Head::decode(message) {
        assert_eq!(head.encode().as_slice(), &message[..HEAD_BYTES]);
        assert_eq!(body, &message[HEAD_BYTES..]);
    }
}

fuzz_target!(|input: Input| {
    decode(&input.message);
    let mut formed = vec![0; HEAD_BYTES + input.message.len() % 64];
    formed[0] = input.kind % 10;
    for (at, value) in &input.changes {
        let at = usize::from(*at) % formed.len();
        formed[at] = *value;
    }
    decode(&formed);

    let mut session = Session::new(1, 1 << (input.window % 6));
    // For each call: whether it was begun, whether it may run again, and the answer that was kept.
    let mut begun: HashMap<u64, (bool, Option<Vec<u8>>)> = HashMap::new();
    for step in input.steps {
        match step {
            Step::Call { sequence, unanswered, may_repeat } => {
                let sequence = u64::from(sequence);
                match session.admit(sequence, unanswered.into(), may_repeat) {
                    Ok(Admission::Begin) => {
                        let before = begun.insert(sequence, (true, None));
                        assert!(before.is_none() || may_repeat, "call {sequence} began twice");
                        let kept = before.is_some_and(|(_, kept)| kept.is_some());
                        assert!(!kept, "call {sequence} has an answer that was kept");
                    }
                    Ok(Admission::Answered(answer)) => {
                        let kept = begun.get(&sequence).and_then(|(_, kept)| kept.as_deref());
                        assert_eq!(Some(answer), kept);
                    }
                    Ok(_) | Err(_) => {}
                }
            }
            Step::Finish { sequence, length } => {
                let answer = length.map(|length| vec![sequence; length.into()]);
                let sequence = u64::from(sequence);
                let wanted = session.finish(sequence, answer.as_deref());
                if let Some((running, kept)) = begun.get_mut(&sequence)
                    && std::mem::take(running)
                {
                    *kept = answer;
                } else {
                    assert!(!wanted, "an answer to call {sequence}, which does not run");
                }
            }
            Step::Cancel { sequence } => drop(session.cancel(sequence.into())),
            Step::Shrink => session.shrink(),
        }
    }
});
