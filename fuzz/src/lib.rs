//! What the fuzz targets share: the hand-made peer of the tests of `vi`, and descriptors to hand over.

#[path = "../../crates/vi/tests/support/liar.rs"]
pub mod liar;

use arbitrary::{Arbitrary, Unstructured};
use highwire_mem::{Courier, OwnRegion};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long anything may take that is to happen.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Waits until `look` is true.
pub fn until(what: &str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !look() {
        assert!(Instant::now() < deadline, "{what} did not come about within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// Steps until the input is used up. A derived `Vec` ends at the first even byte, so most inputs would be
/// of two steps.
pub fn steps<'a, S: Arbitrary<'a>>(input: &mut Unstructured<'a>) -> arbitrary::Result<Vec<S>> {
    let mut steps = Vec::new();
    while !input.is_empty() {
        steps.push(input.arbitrary()?);
    }
    Ok(steps)
}

/// A private directory for names, removed when the process ends in good order.
pub fn stage() -> &'static std::path::Path {
    static STAGE: OnceLock<tempfile::TempDir> = OnceLock::new();
    STAGE.get_or_init(|| tempfile::Builder::new().prefix("hwf").tempdir().expect("a temporary directory")).path()
}

/// Descriptors that a peer might hand over.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Thing {
    Region,
    SmallRegion,
    Page,
    Wire,
    Unsealed,
    Headless,
    Device,
    Pipe,
}

impl Thing {
    /// One of it.
    pub fn make(self) -> OwnedFd {
        let clone = |fd: &dyn AsFd| fd.as_fd().try_clone_to_owned().expect("a descriptor");
        let memfd = |bytes: u64, seals: SealFlags| {
            let fd = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
            rustix::fs::ftruncate(&fd, bytes).expect("its size");
            rustix::fs::fcntl_add_seals(&fd, seals).expect("its seals");
            fd
        };
        let fixed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        match self {
            Thing::Region => clone(&OwnRegion::create(liar::Liar::REGION_BYTES).expect("a region")),
            Thing::SmallRegion => clone(&OwnRegion::create(4096).expect("a region")),
            Thing::Page => memfd(4096, fixed),
            Thing::Wire => clone(&Courier::pair().expect("a pair").0),
            Thing::Unsealed => memfd(liar::Liar::REGION_BYTES as u64, SealFlags::empty()),
            Thing::Headless => memfd(liar::Liar::REGION_BYTES as u64, fixed | SealFlags::FUTURE_WRITE),
            Thing::Device => std::fs::File::open("/dev/zero").expect("a device").into(),
            Thing::Pipe => rustix::pipe::pipe().expect("a pipe").0,
        }
    }
}

/// A rendezvous message: honest but for some fields, or any bytes at all.
#[derive(Arbitrary, Clone, Debug)]
pub enum Mail {
    Bytes(Vec<u8>),
    Changed { changes: Vec<(u8, u8)>, things: Vec<Thing> },
    Region { region: u32, kind: u8, tag: u32, bytes: u64, things: Vec<Thing> },
}

impl Mail {
    /// Its bytes and descriptors, where an honest one would be `letter` with `given`.
    pub fn make(&self, letter: &liar::Letter, given: Vec<OwnedFd>) -> (Vec<u8>, Vec<OwnedFd>) {
        let things = |things: &[Thing]| things.iter().take(4).map(|thing| thing.make()).collect();
        match self {
            Mail::Bytes(bytes) => (bytes.iter().copied().take(300).collect(), given),
            Mail::Changed { changes, things: others } => {
                let mut bytes = letter.encode();
                for (at, value) in changes {
                    bytes[usize::from(*at) % 128] = *value;
                }
                (bytes.to_vec(), if others.is_empty() { given } else { things(others) })
            }
            Mail::Region { region, kind, tag, bytes, things: others } => {
                let bytes = bytes % (2 * liar::Liar::REGION_BYTES as u64);
                (liar::region_letter(*region, u32::from(*kind), *tag, bytes).to_vec(), things(others))
            }
        }
    }
}
