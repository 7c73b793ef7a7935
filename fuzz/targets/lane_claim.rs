//! Messages between programs and the registry of lanes: any bytes are refused, or read as what is written as the same bytes.
#![no_main]

use arbitrary::Arbitrary;
use highwire_lane::claim::{MESSAGE_BYTES, Reply, Request};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Input {
    Raw(Vec<u8>),
    /// Of good form, so that more than the form is looked at.
    Formed {
        words: [u32; 6],
        kind: u8,
        changes: Vec<(u8, u8)>,
        length: Option<u8>,
    },
}

impl Input {
    fn bytes(self) -> Vec<u8> {
        match self {
            Input::Raw(bytes) => bytes,
            Input::Formed { words, kind, changes, length } => {
                let mut bytes = Request { process: words[0] }.encode().to_vec();
                bytes[8] = kind % 6;
                for (word, place) in words.iter().zip(bytes[12..].chunks_exact_mut(4)) {
                    // Most words are small or nothing at all.
                    let word = if word % 2 == 0 { word >> 1 } else { word >> 1 & 0x81 };
                    place.copy_from_slice(&word.to_le_bytes());
                }
                for (at, value) in changes {
                    bytes[usize::from(at) % MESSAGE_BYTES] = value;
                }
                if let Some(length) = length {
                    bytes.resize(usize::from(length) % (2 * MESSAGE_BYTES), 0);
                }
                bytes
            }
        }
    }
}

fuzz_target!(|input: Input| {
    let bytes = input.bytes();
    let (request, reply) = (Request::decode(&bytes), Reply::decode(&bytes));
    assert!(request.is_none() || reply.is_none(), "it is both a question and an answer");
    if let Some(request) = request {
        assert_eq!(request.encode().as_slice(), bytes);
    }
    if let Some(reply) = reply {
        assert_eq!(reply.encode().as_slice(), bytes);
    }
});
