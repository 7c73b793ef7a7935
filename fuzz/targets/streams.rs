//! A VI used as a stream against a peer whose memory and rings are the input: no panic, no hang, nothing read that is not
//! in the peer's memory, and once it is over it stays over.
#![no_main]

use arbitrary::Arbitrary;
use highwire_fuzz::liar::{CONNECT, Letter, Liar, Props, Slot, knock};
use highwire_fuzz::stage;
use highwire_mem::News;
use highwire_vi::{Combining, Config, Nic, StreamRules, Taken, ViListener, ViOptions};
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};

#[derive(Arbitrary, Debug)]
struct Input {
    window: u8,
    chunk: u16,
    combining: u8,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    // The peer.
    Store { at: u16, value: u64 },
    Slot { kind: u8, flags: u8, control: u8, spans: u8, length: u16, mark: u8, content: Vec<u8> },
    Open { bytes: u8 },
    Span { region: u8, offset: u32, capacity: u16, length: u16, open: bool },
    Length { back: u8, length: u32 },
    Consumed(u64),
    State(u8),
    Attention(u8),
    Ring,
    // The victim.
    Read { size: u16 },
    Write { size: u16 },
    Mark(u8),
    Combine(u8),
    Look,
}

struct Victim {
    listener: ViListener,
    path: PathBuf,
}

fn victim() -> &'static Mutex<Victim> {
    static VICTIM: OnceLock<Mutex<Victim>> = OnceLock::new();
    VICTIM.get_or_init(|| {
        let config = Config {
            runtime_dir: Some(stage().to_owned()),
            region_bytes: 4 << 20,
            payload_bytes_start: 16 << 10,
            payload_bytes_max: 64 << 10,
            ..Config::default()
        };
        let nic = Nic::with(config).expect("a Nic");
        let listener = nic.listen("shm:streamed").expect("a listener");
        Mutex::new(Victim { listener, path: stage().join("streamed.sock") })
    })
}

fn combining(number: u8) -> Combining {
    match number % 3 {
        0 => Combining::Never,
        1 => Combining::WhenFull,
        _ => Combining::WhileBusy,
    }
}

fuzz_target!(|input: Input| {
    let victim = victim().lock().unwrap_or_else(PoisonError::into_inner);
    let (letter, options) = (Letter::honest(CONNECT), ViOptions::new());
    let (Ok(mut liar), Some(vi)) = knock(&victim.listener, &victim.path, &options, letter, Props::honest()) else {
        panic!("an honest letter is accepted");
    };
    let rules = StreamRules {
        window: u32::from(input.window),
        acknowledge: u32::from(input.window / 2),
        chunk_bytes: usize::from(input.chunk),
        combining: combining(input.combining),
    };
    let (mut tx, mut rx, _watch) = vi.into_stream(&rules);
    let mut into = vec![0; 1 << 16];
    for step in &input.steps {
        match step {
            Step::Read { size } => match rx.read(&mut into[..usize::from(*size).max(1)]) {
                Taken::Bytes(count) => assert!((1..=usize::from(*size).max(1)).contains(&count)),
                Taken::Mark(mark) => assert_ne!(mark, 0),
                Taken::Nothing => {}
                Taken::Ended(why) => assert_eq!(rx.ended(), Some(why)),
            },
            Step::Write { size } => {
                let bytes = &into[..usize::from(*size).max(1)];
                if let Ok(count) = tx.write(bytes) {
                    assert!((1..=bytes.len()).contains(&count));
                }
            }
            Step::Mark(mark) => drop(tx.mark(u32::from(*mark).max(1))),
            Step::Combine(number) => tx.set_combining(combining(*number)),
            Step::Look => {
                let _ = (tx.has_room(), rx.has_more(), tx.is_delivered(), tx.ended());
            }
            lie => tell(&mut liar, lie),
        }
    }
    if let Some(why) = rx.ended() {
        assert_eq!(rx.read(&mut into), Taken::Ended(why), "what is over stays over");
    }
});

fn tell(liar: &mut Liar, lie: &Step) {
    match lie {
        Step::Store { at, value } => {
            let at = liar.block.offset() + usize::from(*at) * 8 % liar.block.shape().bytes();
            liar.memory().store64(at, *value);
        }
        Step::Slot { kind, flags, control, spans, length, mark, content } => {
            let (kind, length, immediate) = (kind % 5, u32::from(*length), u32::from(*mark));
            let (flags, control, spans, content) = (*flags, *control, *spans, content.clone());
            liar.put(&Slot { kind, flags, control, spans, length, immediate, content });
        }
        Step::Open { bytes } => liar.put(&Slot { flags: WHOLE | OPEN, ..Slot::inline(&vec![7; usize::from(*bytes)]) }),
        Step::Span { region, offset, capacity, length, open } => {
            let span = (u32::from(region % 2), u64::from(*offset), u32::from(*capacity));
            let flags = if *open { WHOLE | OPEN } else { WHOLE };
            liar.put(&Slot { flags, length: u32::from(*length), ..Slot::spans(&[span]) });
        }
        Step::Length { back, length } => {
            let at = liar.slot_at(liar.next.saturating_sub(u64::from(*back)));
            liar.memory().store64(at + LENGTH_AT, u64::from(*length));
        }
        Step::Consumed(count) => liar.claim_consumed(*count),
        Step::State(state) => liar.set_state(u32::from(state % 4)),
        Step::Attention(word) => liar.set_attention_word(u32::from(*word)),
        Step::Ring => liar.rope.ring(News::Slots),
        _ => unreachable!("what the victim does"),
    }
}

const WHOLE: u8 = 3;
const OPEN: u8 = 32;
const LENGTH_AT: usize = 8;
