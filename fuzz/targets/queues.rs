//! A whole VI against a peer whose memory, mail and rings are the input: no panic, no hang, and
//! every descriptor completes exactly once, whatever the peer did.
#![no_main]

use arbitrary::Arbitrary;
use highwire_fuzz::liar::{ABORTED, CONNECT, Letter, Liar, Props, Slot, knock};
use highwire_fuzz::{Mail, stage};
use highwire_vi::{
    CompletionQueue, Config, InPlace, Message, Nic, Path, PayloadToken, Pool, RdmaRead, RdmaWrite, Receive, RemoteKey,
    Vi, ViListener, ViOptions, WaitError,
};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

#[derive(Arbitrary, Debug)]
struct Input {
    depth: u8,
    loans: u8,
    first_index: u64,
    steps: Vec<Step>,
}

#[derive(Arbitrary, Debug)]
enum Step {
    // The peer.
    Store { at: u16, value: u64 },
    Slot { kind: u8, flags: u8, control: u8, spans: u8, length: u16, content: Vec<u8> },
    Spans { spans: Vec<(u8, u32, u16)>, flags: u8 },
    Part { total: u32, bytes: u8, last: bool },
    Consumed { behind: u8 },
    ConsumedAnything(u64),
    Held(u8),
    Released { number: u8, index: u8 },
    State(u8),
    Attention(u8),
    Ring,
    Page { at: u16, value: u32 },
    Mail(Mail),
    // The victim.
    Send { size: u8, path: u8, control: u8, token: Option<u8> },
    SendBytes { size: u16 },
    Receive { size: u16, kind: u8 },
    Expect { token: u8, size: u16, kind: u8 },
    Revoke { token: u8 },
    Poll { count: u8 },
    Release { which: u8 },
    Remote { region: u8, offset: u32, size: u8, write: bool },
    Wait,
}

/// What lives longer than an input.
struct Victim {
    nic: Nic,
    queue: CompletionQueue,
    listener: ViListener,
    path: PathBuf,
    /// Frames for everything, so that no input has to make regions.
    frames: Pool,
}

fn victim() -> &'static Mutex<Victim> {
    static VICTIM: OnceLock<Mutex<Victim>> = OnceLock::new();
    VICTIM.get_or_init(|| {
        let config = Config {
            runtime_dir: Some(stage().to_owned()),
            region_bytes: 4 << 20,
            payload_bytes_start: 16 << 10,
            payload_bytes_max: 64 << 10,
            message_bytes_max: 1 << 20,
            descriptors_max: 32,
            peer_regions_max: 8,
            ..Config::default()
        };
        let nic = Nic::with(config).expect("a Nic");
        let queue = nic.completion_queue().expect("a queue");
        let listener = nic.listen("shm:victim").expect("a listener");
        let frames = nic.pool(FRAME, 128).expect("frames");
        Mutex::new(Victim { nic, queue, listener, path: stage().join("victim.sock"), frames })
    })
}

const FRAME: usize = 64 << 10;

fuzz_target!(|input: Input| {
    let mut victim = victim().lock().unwrap_or_else(PoisonError::into_inner);
    let victim = &mut *victim;
    let letter = Letter {
        depth: 2 << (input.depth % 7),
        loans: 2 << (input.loans % 7),
        first_index: input.first_index >> 3,
        ..Letter::honest(CONNECT)
    };
    let options = ViOptions::new().queue(&victim.queue);
    let (Ok(liar), Some(vi)) = knock(&victim.listener, &victim.path, &options, letter, Props::honest()) else {
        panic!("an honest letter is accepted");
    };
    let mut scene = Scene {
        liar,
        vi,
        frames: victim.frames.clone(),
        held: Vec::new(),
        posted: BTreeSet::new(),
        next: 0,
        begun: Instant::now(),
    };
    for step in &input.steps {
        scene.step(step);
        let _ = victim.queue.poll();
    }
    scene.end();
    assert_eq!(victim.frames.free(), victim.frames.frames(), "every frame comes back");
    let _ = victim.nic.config();
});

struct Scene {
    liar: Liar,
    vi: Vi,
    frames: Pool,
    held: Vec<InPlace>,
    posted: BTreeSet<u64>,
    next: u64,
    begun: Instant,
}

impl Scene {
    fn frame(&self, size: usize) -> Option<highwire_vi::Buffer> {
        let mut frame = self.frames.frame().ok()?;
        frame.set_len(size.min(FRAME));
        Some(frame)
    }

    fn token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Store { .. }
            | Step::Slot { .. }
            | Step::Spans { .. }
            | Step::Part { .. }
            | Step::Consumed { .. }
            | Step::ConsumedAnything(_)
            | Step::Held(_)
            | Step::Released { .. }
            | Step::State(_)
            | Step::Attention(_)
            | Step::Ring
            | Step::Page { .. }
            | Step::Mail(_) => self.lie(step),
            _ => {
                let _ = self.act(step);
            }
        }
    }

    fn lie(&mut self, step: &Step) {
        let liar = &mut self.liar;
        match step {
            Step::Store { at, value } => {
                let at = liar.block.offset() + usize::from(*at) * 8 % liar.block.shape().bytes();
                liar.memory().store64(at, *value);
            }
            Step::Slot { kind, flags, control, spans, length, content } => {
                let (kind, length, content) = (kind % 5, u32::from(*length), content.clone());
                liar.put(&Slot {
                    kind,
                    flags: *flags,
                    control: *control,
                    spans: *spans,
                    length,
                    immediate: 1,
                    content,
                });
            }
            Step::Spans { spans, flags } => {
                let spans: Vec<_> = spans
                    .iter()
                    .take(15)
                    .map(|(r, offset, length)| (u32::from(r % 4), u64::from(*offset), u32::from(*length)))
                    .collect();
                liar.put(&Slot { flags: 3 | flags & 12, ..Slot::spans(&spans) });
            }
            Step::Part { total, bytes, last } => {
                let bytes = vec![3; usize::from(*bytes) % 232];
                match total % 2 {
                    0 => liar.put(&Slot::first_of(u64::from(*total), &bytes)),
                    _ => liar.put(&Slot { flags: if *last { 2 } else { 0 }, ..Slot::inline(&bytes) }),
                }
            }
            Step::Consumed { behind } => {
                let sent = (0..).take_while(|index| liar.has_sent(*index)).count() as u64;
                liar.claim_consumed(sent.saturating_sub(u64::from(*behind)));
            }
            Step::ConsumedAnything(value) => liar.claim_consumed(*value),
            Step::Held(index) => liar.claim_held(u64::from(*index)),
            Step::Released { number, index } => liar.claim_released(usize::from(*number) % 4, u64::from(*index)),
            Step::State(state) if *state < 16 => liar.set_state_word(u32::from(*state)),
            Step::State(_) => liar.set_state(1),
            Step::Attention(word) => liar.set_attention_word(u32::from(*word)),
            Step::Ring => liar.rope.ring(highwire_mem::News::Slots),
            Step::Page { at, value } => liar.page.store32(usize::from(*at) % 1024 * 4, *value),
            Step::Mail(mail) => {
                let (bytes, given) = mail.make(&Letter::honest(CONNECT), Vec::new());
                let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
                let _ = liar.courier.send(&bytes, &given, Duration::from_millis(1));
            }
            _ => {}
        }
    }

    fn receive(&mut self, size: u16, kind: u8) -> Option<Receive> {
        let token = self.token();
        let receive = Receive::new(token);
        Some(match kind % 4 {
            0 => receive,
            1 => receive.in_place(),
            2 => receive.into(self.frame(usize::from(size))?),
            _ => receive.into(self.frame(usize::from(size % 7))?).into(self.frame(usize::from(size))?),
        })
    }

    fn act(&mut self, step: &Step) -> Option<()> {
        match step {
            Step::Send { size, path, control, token: name } => {
                let token = self.token();
                let size = [0, 1, 100, 300, 5000, 20_000, FRAME][usize::from(*size) % 7];
                let path = [Path::Choose, Path::Buffered, Path::Referenced][usize::from(*path) % 3];
                let mut message = Message::new(token).payload(self.frame(size)?).by(path);
                message = message.control(&[1; 200][..usize::from(*control) % 140]);
                if let Some(name) = name {
                    message = message.lands_at(PayloadToken(u64::from(*name)));
                }
                if self.vi.post_send(message).is_ok() {
                    self.posted.insert(token);
                }
            }
            Step::SendBytes { size } => {
                let token = self.token();
                if self.vi.send_bytes(token, &vec![2; usize::from(*size)]).is_ok() {
                    self.posted.insert(token);
                }
            }
            Step::Receive { size, kind } => {
                let receive = self.receive(*size, *kind)?;
                if self.vi.post_recv(receive).is_ok() {
                    self.posted.insert(self.next);
                }
            }
            Step::Expect { token, size, kind } => {
                let receive = self.receive(*size, *kind)?;
                if self.vi.expect(PayloadToken(u64::from(token % 4)), receive).is_ok() {
                    self.posted.insert(self.next);
                }
            }
            Step::Revoke { token } => {
                // Its own token is not to be seen; it does not complete any more.
                if let Some(receive) = self.vi.revoke(PayloadToken(u64::from(token % 4))) {
                    let shown = format!("{receive:?}");
                    let token = shown.split("token: ").nth(1)?.split(',').next()?.parse().ok()?;
                    assert!(self.posted.remove(&token), "a place comes back that was not posted: {shown}");
                }
            }
            Step::Poll { count } => {
                for _ in 0..count % 16 {
                    let done = self.vi.poll()?;
                    self.completed(done);
                }
            }
            Step::Release { which } => {
                let which = usize::from(*which).checked_rem(self.held.len())?;
                let payload = self.held.swap_remove(which);
                let mut some = vec![0; payload.len()];
                payload.copy_to(0, &mut some);
                if which % 2 == 0 { self.vi.receiver().release(payload) } else { drop(payload) }
            }
            Step::Remote { region, offset, size, write } => {
                let token = self.token();
                let mut key = [0; RemoteKey::BYTES];
                key[0] = region % 4;
                key[8..12].copy_from_slice(&offset.to_le_bytes());
                let key = RemoteKey::from_bytes(&key)?;
                let frame = self.frame(usize::from(*size))?;
                let offset = u64::from(*offset);
                let taken = match write {
                    true => self.vi.rdma_write(RdmaWrite::new(token, key, offset).payload(frame).immediate(1)).is_ok(),
                    false => self.vi.rdma_read(RdmaRead::new(token, key, offset, frame)).is_ok(),
                };
                if taken {
                    self.posted.insert(token);
                }
            }
            Step::Wait => {
                if let Ok(done) = self.vi.wait(Duration::from_micros(10)) {
                    self.completed(done);
                }
            }
            _ => {}
        }
        Some(())
    }

    fn completed(&mut self, done: highwire_vi::Completion) {
        assert!(self.posted.remove(&done.token), "{} completes twice, or was never posted", done.token);
        self.held.extend(done.into_in_place());
    }

    /// The peer aborts and goes: everything that was posted comes back.
    fn end(mut self) {
        self.liar.set_state(ABORTED);
        drop(self.liar);
        loop {
            match self.vi.wait(Duration::from_secs(5)) {
                Ok(done) => {
                    assert!(self.posted.remove(&done.token), "{} completes twice, or was never posted", done.token);
                    self.held.extend(done.into_in_place());
                }
                Err(WaitError::NotConnected(_)) => break,
                Err(error) => panic!("the end is not noticed: {error}"),
            }
        }
        assert!(self.posted.is_empty(), "never completed: {:?}", self.posted);
        assert!(self.begun.elapsed() < Duration::from_secs(20));
    }
}
