//! A peer that does the rendezvous by hand, byte by byte as `docs/protocol/shared-memory.md` says,
//! and then writes into its own memory whatever it likes.

use highwire_mem::{
    Bell, BellIndex, BellPage, BellRope, Block, BlockShape, Courier, CourierListener, LAYOUT_VERSION, News, OwnMemory,
    OwnRegion, PeerRegion, REGION_HEADER_BYTES, RegionKind, RemoteRegion, SLOT_BYTES, SharedMemory, Tag,
};
use highwire_vi::{AcceptError, Vi, ViListener, ViOptions};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use super::PATIENCE;

pub const GREETING: u32 = 1;
pub const CONNECT: u32 = 2;
pub const ACCEPT: u32 = 3;
pub const REFUSE: u32 = 4;
pub const REGION: u32 = 5;

/// No refusal has this number: the other side said nothing at all.
pub const HUNG_UP: u32 = 0;

pub const NEW_PAIR: u32 = 1;
pub const NEW_PAGE: u32 = 2;

/// Slot flags and kinds, as they are in memory.
pub const INLINE: u8 = 1;
pub const SPANS: u8 = 2;
pub const WRITTEN: u8 = 3;
pub const FIRST: u8 = 1;
pub const LAST: u8 = 2;
pub const TOKEN: u8 = 4;

pub const OPEN: u32 = 1;
pub const CLOSED: u32 = 2;
pub const ABORTED: u32 = 3;

const CONSUMED_AT: usize = 0x00;
const ATTENTION_AT: usize = 0x40;
const HELD_AT: usize = 0x100;
const MEMORY_MAX: u64 = 64 << 30;

/// A rendezvous message, every field of which can be made to lie.
#[derive(Clone, Debug)]
pub struct Letter {
    pub magic: [u8; 4],
    pub kind: u32,
    pub version: u32,
    pub flags: u32,
    pub nic: [u8; 16],
    pub pair: [u8; 16],
    pub region_bytes: u64,
    pub block_offset: u64,
    pub first_index: u64,
    pub depth: u32,
    pub loans: u32,
    pub serial: u32,
    pub bell: u32,
    pub queue: u64,
}

impl Letter {
    /// An honest request to connect.
    pub fn honest(kind: u32) -> Letter {
        let mut names = [0; 32];
        rustix::rand::getrandom(&mut names, rustix::rand::GetRandomFlags::empty()).expect("random numbers");
        Letter {
            magic: *b"HWRV",
            kind,
            version: LAYOUT_VERSION,
            flags: NEW_PAIR | NEW_PAGE,
            nic: std::array::from_fn(|i| names[i]),
            pair: std::array::from_fn(|i| names[16 + i]),
            region_bytes: Liar::REGION_BYTES as u64,
            block_offset: REGION_HEADER_BYTES as u64,
            first_index: 0,
            depth: 64,
            loans: 64,
            serial: 77,
            bell: 0,
            queue: 5,
        }
    }

    /// Its bytes.
    pub fn encode(&self) -> [u8; 128] {
        let mut out = [0; 128];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.magic);
        put(4, &self.kind.to_le_bytes());
        put(8, &self.version.to_le_bytes());
        put(12, &self.flags.to_le_bytes());
        put(16, &self.nic);
        if self.kind == GREETING {
            return out;
        }
        put(32, &self.pair);
        put(48, &self.region_bytes.to_le_bytes());
        put(56, &self.block_offset.to_le_bytes());
        put(64, &self.first_index.to_le_bytes());
        put(72, &self.depth.to_le_bytes());
        put(76, &self.loans.to_le_bytes());
        put(80, &self.serial.to_le_bytes());
        put(84, &self.bell.to_le_bytes());
        put(88, &self.queue.to_le_bytes());
        out
    }

    /// What somebody sent.
    pub fn decode(bytes: &[u8]) -> Letter {
        assert_eq!(bytes.len(), 128, "a rendezvous message has 128 bytes");
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Letter {
            magic: std::array::from_fn(|i| bytes[i]),
            kind: u32_at(4),
            version: u32_at(8),
            flags: u32_at(12),
            nic: std::array::from_fn(|i| bytes[16 + i]),
            pair: std::array::from_fn(|i| bytes[32 + i]),
            region_bytes: u64_at(48),
            block_offset: u64_at(56),
            first_index: u64_at(64),
            depth: u32_at(72),
            loans: u32_at(76),
            serial: u32_at(80),
            bell: u32_at(84),
            queue: u64_at(88),
        }
    }
}

/// The bytes that announce a region on the pair's socket.
pub fn region_letter(region: u32, kind: u32, tag: u32, bytes: u64) -> [u8; 128] {
    let mut out = Letter { kind: GREETING, nic: [0; 16], flags: 0, ..Letter::honest(GREETING) }.encode();
    out[4..8].copy_from_slice(&REGION.to_le_bytes());
    out[16..20].copy_from_slice(&region.to_le_bytes());
    out[20..24].copy_from_slice(&kind.to_le_bytes());
    out[24..28].copy_from_slice(&tag.to_le_bytes());
    out[32..40].copy_from_slice(&bytes.to_le_bytes());
    out
}

/// What a liar hands over with its letter. `descriptors` may be exchanged for others.
pub struct Props {
    pub own: OwnRegion,
    pub descriptors: Vec<OwnedFd>,
    bell: Bell,
    ears: OwnedFd,
}

impl Props {
    /// A region, a doorbell page and its wire, all as they should be.
    pub fn honest() -> Props {
        let own = OwnRegion::create(Liar::REGION_BYTES).expect("a region");
        let (bell, page) = Bell::create().expect("a doorbell page");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ears, wire) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None).expect("a wire");
        let region = own.as_fd().try_clone_to_owned().expect("a descriptor");
        Props { own, descriptors: vec![region, page, wire], bell, ears }
    }

    /// Prepares the block that a letter names, where there is one.
    fn prepare(&self, letter: &Letter) {
        let shape = BlockShape::new(letter.depth, letter.loans);
        let block = shape.and_then(|shape| Block::new(letter.block_offset, shape, self.own.memory().len()));
        if let Some(block) = block
            && letter.first_index < 1 << 62
        {
            block.prepare(self.own.memory(), letter.first_index, true);
            block.set_state(self.own.memory(), letter.serial << 2 | OPEN);
        }
    }
}

/// Somebody before a listener's door.
pub struct Caller {
    pub courier: Courier,
}

impl Caller {
    /// Connects to the socket at `path`.
    pub fn at(path: &Path) -> Caller {
        Caller { courier: Courier::connect(path, PATIENCE).expect("a socket that somebody listens on") }
    }

    /// The next message.
    pub fn hear(&self) -> (Letter, Vec<OwnedFd>) {
        let mut bytes = [0; 128];
        let (length, descriptors) = self.courier.receive(&mut bytes, PATIENCE).expect("a message");
        (Letter::decode(&bytes[..length]), descriptors)
    }

    /// Sends a letter with descriptors.
    pub fn say(&self, letter: &Letter, descriptors: &[OwnedFd]) {
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        self.courier.send(&letter.encode(), &borrowed, PATIENCE).expect("a message that goes");
    }

    /// Asks to be connected, after the greeting.
    pub fn ask(&self, letter: &Letter, props: &Props) {
        let (greeting, _) = self.hear();
        assert_eq!(greeting.kind, GREETING);
        props.prepare(letter);
        self.say(letter, &props.descriptors);
    }

    /// Reads the answer: the liar that came of it, or the number of the refusal.
    pub fn answered(self, letter: &Letter, props: Props) -> Result<Liar, u32> {
        let mut bytes = [0; 128];
        let Ok((length, descriptors)) = self.courier.receive(&mut bytes, PATIENCE) else {
            return Err(HUNG_UP);
        };
        let answer = Letter::decode(&bytes[..length]);
        match answer.kind {
            REFUSE => Err(answer.flags),
            ACCEPT => Ok(Liar::new(self.courier, letter, props, &answer, descriptors)),
            other => panic!("an answer of kind {other}"),
        }
    }
}

/// A connected peer that need not tell the truth. Its memory is `own`; what it does with it, the
/// other side must survive.
pub struct Liar {
    pub own: OwnRegion,
    pub block: Block,
    pub courier: Courier,
    /// The other side's memory, and its block.
    pub theirs: PeerRegion,
    pub their_block: Block,
    /// The other side's doorbell page, to ring or to scribble over.
    pub page: SharedMemory,
    pub rope: BellRope,
    /// Index of the next slot.
    pub next: u64,
    serial: u32,
    bell: Bell,
    _ears: OwnedFd,
}

/// What a slot says.
#[derive(Clone, Debug)]
pub struct Slot {
    pub kind: u8,
    pub flags: u8,
    pub control: u8,
    pub spans: u8,
    pub length: u32,
    pub immediate: u32,
    pub content: Vec<u8>,
}

impl Slot {
    /// A whole message in the slot.
    pub fn inline(bytes: &[u8]) -> Slot {
        let length = bytes.len() as u32;
        Slot { kind: INLINE, flags: FIRST | LAST, control: 0, spans: 0, length, immediate: 0, content: bytes.to_vec() }
    }

    /// A whole message in spans of region, offset and length.
    pub fn spans(spans: &[(u32, u64, u32)]) -> Slot {
        let mut content = Vec::new();
        for (region, offset, length) in spans {
            content.extend_from_slice(&region.to_le_bytes());
            content.extend_from_slice(&length.to_le_bytes());
            content.extend_from_slice(&offset.to_le_bytes());
        }
        let length = spans.iter().fold(0u32, |sum, (_, _, length)| sum.wrapping_add(*length));
        Slot { kind: SPANS, flags: FIRST | LAST, control: 0, spans: spans.len() as u8, length, immediate: 0, content }
    }

    /// The first slot of a message of `total` bytes, with some of them.
    pub fn first_of(total: u64, bytes: &[u8]) -> Slot {
        let content = [&total.to_le_bytes()[..], bytes].concat();
        Slot { flags: FIRST, content, ..Slot::inline(bytes) }
    }
}

impl Liar {
    pub const REGION_BYTES: usize = 4 << 20;

    fn new(courier: Courier, ours: &Letter, props: Props, answer: &Letter, descriptors: Vec<OwnedFd>) -> Liar {
        let shape = BlockShape::new(ours.depth, ours.loans).expect("an accepted shape");
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().expect("three descriptors");
        let theirs = PeerRegion::adopt(next(), answer.region_bytes, MEMORY_MAX).expect("their region");
        let page = next();
        let scribbled = page.try_clone().expect("a descriptor");
        // A page is sealed as an exported region is, and may be written as one.
        let scribbled = RemoteRegion::adopt(scribbled, RegionKind::Exported, Tag(0), 4096, 4096).expect("their page");
        let rope = BellPage::adopt(page, next()).expect("their page");
        let rope = rope.rope(BellIndex::new(answer.bell).expect("a bell"));
        Liar {
            block: Block::new(ours.block_offset, shape, props.own.memory().len()).expect("our block"),
            their_block: Block::new(answer.block_offset, shape, theirs.memory().len()).expect("their block"),
            page: scribbled.writable().expect("an exported region").clone(),
            rope,
            next: ours.first_index,
            serial: ours.serial,
            own: props.own,
            courier,
            theirs,
            bell: props.bell,
            _ears: props.ears,
        }
    }

    /// Meets a listener of this very process, honestly so far.
    pub fn meet(listener: &ViListener, path: &Path, options: &ViOptions<'_>) -> (Liar, Vi) {
        Liar::meet_with(listener, path, options, |_| ())
    }

    /// The same, with something changed in the letter.
    pub fn meet_with(
        listener: &ViListener,
        path: &Path,
        options: &ViOptions<'_>,
        change: impl FnOnce(&mut Letter),
    ) -> (Liar, Vi) {
        let mut letter = Letter::honest(CONNECT);
        change(&mut letter);
        let (outcome, vi) = knock(listener, path, options, letter, Props::honest());
        (outcome.expect("an honest letter is accepted"), vi.expect("a VI"))
    }

    /// Connects to a listener in another process.
    pub fn connect(path: &Path) -> Liar {
        let (caller, letter, props) = (Caller::at(path), Letter::honest(CONNECT), Props::honest());
        caller.ask(&letter, &props);
        caller.answered(&letter, props).expect("an honest letter is accepted")
    }

    /// Answers whoever connects to `listener` by hand, with something changed in the answer or in
    /// what goes with it; the connection is to be kept for as long as the other side looks at it.
    pub fn answer_wrongly(listener: &CourierListener, change: impl FnOnce(&mut Letter, &mut Props)) -> (Caller, Props) {
        let caller = next_caller(listener);
        let greeting = Letter::honest(GREETING);
        caller.say(&greeting, &[]);
        let (asked, _) = caller.hear();
        let mut props = Props::honest();
        let mut letter = Letter { kind: ACCEPT, nic: greeting.nic, queue: 5, bell: 0, ..asked };
        letter.block_offset = REGION_HEADER_BYTES as u64;
        letter.region_bytes = Liar::REGION_BYTES as u64;
        letter.flags = NEW_PAIR | NEW_PAGE;
        change(&mut letter, &mut props);
        props.prepare(&letter);
        caller.say(&letter, &props.descriptors);
        (caller, props)
    }

    pub fn memory(&self) -> &OwnMemory {
        self.own.memory()
    }

    fn slots_at(block: Block) -> usize {
        block.offset() + block.shape().bytes() - block.shape().depth() as usize * SLOT_BYTES
    }

    /// Where slot `index` is in our memory.
    pub fn slot_at(&self, index: u64) -> usize {
        Liar::slots_at(self.block) + (index % u64::from(self.block.shape().depth())) as usize * SLOT_BYTES
    }

    /// Writes a slot and publishes it, credit or not. Does not ring.
    pub fn put(&mut self, slot: &Slot) {
        self.write(self.next, slot);
        self.publish();
    }

    /// Publishes whatever the next slot holds.
    pub fn publish(&mut self) {
        self.memory().store32(self.slot_at(self.next), (self.next as u32).wrapping_add(1));
        self.next += 1;
    }

    /// Writes slot `index` without publishing it.
    pub fn write(&self, index: u64, slot: &Slot) {
        let at = self.slot_at(index);
        self.memory().copy_in(at + 16, &slot.content[..slot.content.len().min(240)]);
        let meta = u32::from_le_bytes([slot.kind, slot.flags, slot.control, slot.spans]);
        self.memory().store32(at + 4, meta);
        self.memory().store32(at + 8, slot.length);
        self.memory().store32(at + 12, slot.immediate);
    }

    /// Writes a slot, publishes it and rings.
    pub fn send(&mut self, slot: &Slot) {
        self.put(slot);
        self.rope.ring(News::Slots);
    }

    /// Claims to have consumed so many slots.
    pub fn claim_consumed(&self, count: u64) {
        self.memory().store64(self.block.offset() + CONSUMED_AT, count);
    }

    /// Claims to hold the payload of slot `index`.
    pub fn claim_held(&self, index: u64) {
        let entry = (index % u64::from(self.block.shape().depth())) as usize;
        self.memory().store64(self.block.offset() + HELD_AT + entry * 8, index + 1);
    }

    /// Writes entry number `number` of the release log, first lap.
    pub fn claim_released(&self, number: usize, index: u64) {
        let log = self.block.offset() + HELD_AT + self.block.shape().depth() as usize * 8;
        self.memory().store64(log + number * 8, 1 << 63 | index);
    }

    /// Says how this side stands to the connection.
    pub fn set_state(&self, state: u32) {
        self.block.set_state(self.memory(), self.serial << 2 | state);
    }

    /// Writes any word into the state.
    pub fn set_state_word(&self, word: u32) {
        self.block.set_state(self.memory(), word);
    }

    /// How often it was rung so far.
    pub fn rings(&self) -> u32 {
        self.bell.count()
    }

    /// Writes any word into the attention.
    pub fn set_attention_word(&self, word: u32) {
        self.memory().store32(self.block.offset() + ATTENTION_AT, word);
    }

    /// What the other side says it has consumed.
    pub fn consumed_by_them(&self) -> u64 {
        self.theirs.memory().load64(self.their_block.offset() + CONSUMED_AT)
    }

    /// How the other side says it stands to the connection.
    pub fn their_state(&self) -> u32 {
        self.their_block.state(self.theirs.memory()) & 3
    }

    /// True if the other side has published its slot `index`, or a later one in its place.
    pub fn has_sent(&self, index: u64) -> bool {
        let depth = u64::from(self.their_block.shape().depth());
        let at = Liar::slots_at(self.their_block) + (index % depth) as usize * SLOT_BYTES;
        self.theirs.memory().load32(at) == (index as u32).wrapping_add(1)
    }

    /// Sends bytes and descriptors on the pair's socket.
    pub fn mail(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.courier.send(bytes, descriptors, PATIENCE).expect("a message that goes");
    }
}

fn next_caller(listener: &CourierListener) -> Caller {
    let mut found = None;
    super::until("somebody connects", || {
        found = listener.accept().expect("a listening socket");
        found.is_some()
    });
    Caller { courier: found.expect("just seen") }
}

/// Knocks at a listener of this process with a letter and what goes with it: the answer to the
/// liar, and the VI if one came of it. Everything happens on this thread.
pub fn knock(
    listener: &ViListener,
    path: &Path,
    options: &ViOptions<'_>,
    letter: Letter,
    props: Props,
) -> (Result<Liar, u32>, Option<Vi>) {
    let caller = Caller::at(path);
    let greeted = listener.accept_with(Duration::ZERO, options);
    assert!(matches!(greeted, Err(AcceptError::TimedOut(_))), "greeted, and nothing asked yet: {greeted:?}");
    caller.ask(&letter, &props);
    let vi = listener.accept_with(Duration::ZERO, options).ok();
    (caller.answered(&letter, props), vi)
}
