//! Programs that cannot have lanes, known by their files before they are started.
//!
//! Nothing here allocates: the preloaded library asks too, when its program starts another one.

use crate::counters::digits;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::ffi::CStr;

/// Why a program runs plain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// Set-user-ID or set-group-ID.
    SetUser,
    /// File capabilities.
    Capabilities,
    /// A 32-bit program.
    Bits32,
    /// No interpreter is named.
    Static,
    /// Another C library than glibc.
    OtherLibc,
    /// Go makes its system calls itself.
    Go,
    /// The runtime of a sanitizer is loaded behind the library.
    Sanitizer,
    /// A seccomp filter was there before the program.
    Filter,
    /// Its environment does not name the library.
    Environment,
}

impl Unfit {
    /// Every reason.
    pub const ALL: [Unfit; 9] = [
        Unfit::SetUser,
        Unfit::Capabilities,
        Unfit::Bits32,
        Unfit::Static,
        Unfit::OtherLibc,
        Unfit::Go,
        Unfit::Sanitizer,
        Unfit::Filter,
        Unfit::Environment,
    ];

    /// The reason for programs that read it.
    pub fn name(self) -> &'static str {
        match self {
            Unfit::SetUser => "set-uid",
            Unfit::Capabilities => "capabilities",
            Unfit::Bits32 => "32-bit",
            Unfit::Static => "static",
            Unfit::OtherLibc => "musl",
            Unfit::Go => "go",
            Unfit::Sanitizer => "sanitizer",
            Unfit::Filter => "filter",
            Unfit::Environment => "environment",
        }
    }

    /// The reason in words.
    pub fn words(self) -> &'static str {
        match self {
            Unfit::SetUser => {
                "it changes its user when it starts (set-uid), and the loader then takes no libraries from outside"
            }
            Unfit::Capabilities => {
                "it gains capabilities when it starts (file capabilities), and the loader then takes no libraries from \
                 outside"
            }
            Unfit::Bits32 => "it is a 32-bit program, and the library is a 64-bit one",
            Unfit::Static => "it is linked statically, so nothing can be loaded into it",
            Unfit::OtherLibc => "it uses the C library musl; the library is for glibc",
            Unfit::Go => "it is a Go program, which makes its system calls itself",
            Unfit::Sanitizer => "it has the runtime of a sanitizer, which has to see every call",
            Unfit::Filter => "a seccomp filter limits its system calls since before it started",
            Unfit::Environment => {
                "it was started with an environment without Highwire's library (LD_PRELOAD), as `env -i` and `sudo` do"
            }
        }
    }
}

/// Whether a variable of an environment has the library loaded.
pub fn preloads(variable: &[u8]) -> bool {
    let names = |path: &[u8]| path.windows(LIBRARY.len()).any(|part| part == LIBRARY.as_bytes());
    variable.strip_prefix(b"LD_PRELOAD=").is_some_and(names)
}

/// In the path of the library.
pub const LIBRARY: &str = "/libhighwire-";

/// Whether the program at a path, or the interpreter of a script there, would not load the library or would not use it.
/// Nothing is said of a file that cannot be read, or that is no program.
pub fn unfit(path: &CStr) -> Option<Unfit> {
    let mut file = open(path)?;
    for _ in 0..SCRIPTS_MAX {
        let mut line = [0; 256];
        let read = read_at(file.as_fd(), 0, &mut line)?;
        let Some(rest) = line[..read].strip_prefix(b"#!") else { break };
        let rest = rest.trim_ascii_start();
        let end = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len());
        let mut name = [0; 257];
        name[..end].copy_from_slice(&rest[..end]);
        file = open(CStr::from_bytes_until_nul(&name).ok()?)?;
    }
    unfit_file(file.as_fd())
}

/// Whether a program that is open would not load the library or would not use it.
pub fn unfit_file(file: BorrowedFd<'_>) -> Option<Unfit> {
    gains_privileges(file).or_else(|| unfit_image(file))
}

/// Whether the image that a process executes cannot use the library.
pub fn unfit_process(process: u32) -> Option<Unfit> {
    let (mut name, mut used) = ([0u8; 32], 0);
    for part in [b"/proc/".as_slice(), digits(process, &mut [0; 10]), b"/exe"] {
        name[used..used + part.len()].copy_from_slice(part);
        used += part.len();
    }
    unfit_image(open(CStr::from_bytes_until_nul(&name).ok()?)?.as_fd())
}

/// Whether the kernel would have the loader ignore what is preloaded.
fn gains_privileges(file: BorrowedFd<'_>) -> Option<Unfit> {
    use rustix::process::{getegid, geteuid, getgid, getuid};
    let ignored = rustix::thread::no_new_privs().unwrap_or(false)
        || rustix::fs::fstatvfs(file).is_ok_and(|place| place.f_flag.contains(rustix::fs::StatVfsMountFlags::NOSUID));
    if ignored {
        return None;
    }
    let status = rustix::fs::fstat(file).ok()?;
    let user = if status.st_mode & SET_USER != 0 { status.st_uid } else { geteuid().as_raw() };
    let sets_group = status.st_mode & (SET_GROUP | GROUP_MAY_EXECUTE) == SET_GROUP | GROUP_MAY_EXECUTE;
    let group = if sets_group { status.st_gid } else { getegid().as_raw() };
    if user != getuid().as_raw() || group != getgid().as_raw() {
        return Some(Unfit::SetUser);
    }
    let mut value = [0; 64];
    let bytes = rustix::fs::fgetxattr(file, c"security.capability", &mut value).unwrap_or(0);
    let word = |index: usize| {
        let bytes = value[..bytes].get(4 * index..4 * index + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    // Whether they are effective at once, and the two words of those that are permitted.
    let gained = word(0).is_some_and(|head| head & 1 != 0) || [1, 3].into_iter().filter_map(word).any(|part| part != 0);
    (gained && !getuid().is_root()).then_some(Unfit::Capabilities)
}

/// Whether an ELF image cannot load the library, or would not call it.
fn unfit_image(file: BorrowedFd<'_>) -> Option<Unfit> {
    let elf = Elf::open(file)?;
    if !elf.is_64_bit() {
        return Some(Unfit::Bits32);
    }
    let mut name = [0; 256];
    let Some(segment) = elf.segments().find(|segment| segment.kind == PT_INTERP) else { return Some(Unfit::Static) };
    let read = read_at(file, segment.offset, &mut name[..256.min(segment.bytes as usize)])?;
    if contains(&name[..read], b"musl") {
        return Some(Unfit::OtherLibc);
    }
    if elf.is_go() {
        return Some(Unfit::Go);
    }
    elf.needs_sanitizer().then_some(Unfit::Sanitizer)
}

struct Elf<'f> {
    file: BorrowedFd<'f>,
    header: [u8; 64],
}

/// An entry of the program header table.
struct Segment {
    kind: u32,
    writable: bool,
    offset: u64,
    address: u64,
    bytes: u64,
}

impl<'f> Elf<'f> {
    fn open(file: BorrowedFd<'f>) -> Option<Elf<'f>> {
        let mut header = [0; 64];
        let read = read_at(file, 0, &mut header)?;
        (read > 5 && header.starts_with(b"\x7fELF")).then_some(Elf { file, header })
    }

    fn is_64_bit(&self) -> bool {
        self.header[4] == 2
    }

    fn segments(&self) -> impl Iterator<Item = Segment> {
        let (table, size, count) = (long(&self.header, 32), half(&self.header, 54), half(&self.header, 56));
        (0..count.min(TABLE_MAX)).filter_map(move |index| {
            let entry = self.exactly::<56>(table.checked_add(index * size)?)?;
            Some(Segment {
                kind: word(&entry, 0),
                writable: word(&entry, 4) & 2 != 0,
                offset: long(&entry, 8),
                address: long(&entry, 16),
                bytes: long(&entry, 32),
            })
        })
    }

    /// Offsets of the names of all sections.
    fn sections(&self) -> impl Iterator<Item = u64> {
        let (table, size, count) = (long(&self.header, 40), half(&self.header, 58), half(&self.header, 60));
        let names = table.checked_add(half(&self.header, 62) * size).and_then(|at| self.exactly::<64>(at));
        let names = names.map(|entry| long(&entry, 24));
        (0..if table == 0 { 0 } else { count.min(TABLE_MAX) }).filter_map(move |index| {
            let entry = self.exactly::<64>(table.checked_add(index * size)?)?;
            names?.checked_add(word(&entry, 0).into())
        })
    }

    /// Go's linker gives each program sections of its own, and places build information at the beginning of the data of
    /// one whose sections were removed.
    fn is_go(&self) -> bool {
        let mut any = false;
        for name in self.sections() {
            any = true;
            let mut text = [0; 24];
            let read = read_at(self.file, name, &mut text).unwrap_or(0);
            if GO_SECTIONS.iter().any(|section| text[..read].starts_with(section)) {
                return true;
            }
        }
        !any && self.segments().filter(|segment| segment.kind == PT_LOAD && segment.writable).any(|segment| {
            let mut chunk = [0; 1024];
            let end = segment.offset.saturating_add(segment.bytes);
            (segment.offset & !15..end).step_by(chunk.len()).any(|at| {
                let read = read_at(self.file, at, &mut chunk).unwrap_or(0);
                chunk[..read].chunks(16).any(|place| place.starts_with(b"\xff Go buildinf:"))
            })
        })
    }

    /// Whether a sanitizer's runtime is among the libraries that the program names.
    fn needs_sanitizer(&self) -> bool {
        let Some(dynamic) = self.segments().find(|segment| segment.kind == PT_DYNAMIC) else { return false };
        let entries = || {
            (0..(dynamic.bytes / 16).min(TABLE_MAX)).map_while(|index| {
                let entry = self.exactly::<16>(dynamic.offset.checked_add(16 * index)?)?;
                Some((long(&entry, 0), long(&entry, 8)))
            })
        };
        let Some((_, names)) = entries().find(|(tag, _)| *tag == DT_STRTAB) else { return false };
        let holds = |segment: &Segment| segment.kind == PT_LOAD && names.wrapping_sub(segment.address) < segment.bytes;
        let Some(segment) = self.segments().find(holds) else { return false };
        let names = names - segment.address + segment.offset;
        entries().filter(|(tag, _)| *tag == DT_NEEDED).any(|(_, name)| {
            let mut text = [0; 64];
            let read = names.checked_add(name).and_then(|at| read_at(self.file, at, &mut text)).unwrap_or(0);
            let end = text[..read].iter().position(|byte| *byte == 0).unwrap_or(read);
            is_sanitizer(&text[..end])
        })
    }

    fn exactly<const BYTES: usize>(&self, at: u64) -> Option<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        (read_at(self.file, at, &mut bytes)? == BYTES).then_some(bytes)
    }
}

/// Whether a library of this name is the runtime of a sanitizer that watches what calls do with memory.
pub fn is_sanitizer(library: &[u8]) -> bool {
    SANITIZERS.iter().any(|name| contains(library, name))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

fn open(path: &CStr) -> Option<OwnedFd> {
    // Whatever lies there is not waited for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

fn read_at(file: BorrowedFd<'_>, at: u64, into: &mut [u8]) -> Option<usize> {
    rustix::io::pread(file, into, at).ok()
}

fn half(bytes: &[u8], at: usize) -> u64 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]]).into()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

const SET_USER: u32 = 0o4000;
const SET_GROUP: u32 = 0o2000;
const GROUP_MAY_EXECUTE: u32 = 0o10;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const GO_SECTIONS: [&[u8]; 3] = [b".go.buildinfo\0", b".note.go.buildid\0", b".gopclntab\0"];
const SANITIZERS: [&[u8]; 6] =
    [b"libasan.so", b"libtsan.so", b"libhwasan.so", b"libclang_rt.asan", b"libclang_rt.tsan", b"libclang_rt.hwasan"];
/// Entries of a table that are looked at; linkers write fewer.
const TABLE_MAX: u64 = 4096;
/// Scripts whose interpreter is a script, as often as the kernel follows them.
const SCRIPTS_MAX: usize = 5;
