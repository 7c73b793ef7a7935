//! The processes that are run with Highwire, and what they tell of their sockets.
//!
//! Each has a file in a folder of its user, which it maps and writes. What is in a file is its process's word alone:
//! numbers may be anything, and root, who reads the files of all users, follows none of their links.

use crate::kernel_sockets::{KernelSocket, KernelTables, socket_descriptors};
use crate::run::PlainReason;
use anyhow::{Context, bail};
use highwire_lane::counters::{
    COUNTERS, Counter, HEADER_WORDS, MAGIC, PROCESS_WORD, Reason, SLOT_WORDS, SWITCH_WORD, directory,
};
use highwire_lane::program::{self, LIBRARY, Unfit};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A process that is run with Highwire and has had a TCP socket, or that runs plain.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) number: u32,
    pub(crate) user: u32,
    /// The kernel's name for it, fit to be printed.
    pub(crate) program: String,
    /// Its lanes are off, by `highwire lanes off`.
    pub(crate) switched_off: bool,
    /// Why it has no lanes, where it cannot have any.
    pub(crate) plain: Option<PlainReason>,
    pub(crate) sockets: Vec<Socket>,
}

/// A TCP socket of such a process.
#[derive(Clone, Debug)]
pub(crate) struct Socket {
    /// Where the process keeps its counters; the next connection may have the same place.
    pub(crate) place: Option<usize>,
    pub(crate) descriptor: u32,
    /// Nothing where the kernel does not tell, or where it has no address.
    pub(crate) kernel: Option<KernelSocket>,
    /// Nothing for one that the library in the process does not know.
    pub(crate) counters: Option<Counters>,
}

/// The counters of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counters([u64; COUNTERS]);

impl Counters {
    pub(crate) fn of(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }

    /// Bytes by the lane, both ways.
    pub(crate) fn lane_bytes(&self) -> u64 {
        self.of(Counter::LaneBytesIn).saturating_add(self.of(Counter::LaneBytesOut))
    }

    /// Bytes by TCP, both ways.
    pub(crate) fn tcp_bytes(&self) -> u64 {
        self.of(Counter::TcpBytesIn).saturating_add(self.of(Counter::TcpBytesOut))
    }

    /// Bytes both ways, by either.
    pub(crate) fn bytes(&self) -> u64 {
        self.lane_bytes().saturating_add(self.tcp_bytes())
    }

    /// Why not more went by the lane, unless it is a reason of another version.
    pub(crate) fn reason(&self) -> Option<Reason> {
        Reason::from_number(self.of(Counter::Reason))
    }

    #[cfg(test)]
    pub(crate) fn sample(values: &[(Counter, u64)]) -> Counters {
        let mut counters = Counters([0; COUNTERS]);
        values.iter().for_each(|(counter, value)| counters.0[*counter as usize] = *value);
        counters
    }
}

impl Socket {
    /// Whether it ever carried a byte, or may have without the library's knowledge.
    pub(crate) fn is_used(&self) -> bool {
        match &self.counters {
            Some(counters) => counters.bytes() > 0,
            None => self.kernel.is_some_and(|socket| socket.state.is_connection()),
        }
    }
}

/// All of this user; for root, of every user. Files that dead processes left are removed.
pub(crate) fn all() -> anyhow::Result<Vec<Process>> {
    let mut tables = KernelTables::default();
    let mut processes = Vec::new();
    for user in users()? {
        let Some(folder) = open_folder(user)? else { continue };
        for number in numbers_in(&folder)? {
            if let Look::Told(told) = look(folder.as_fd(), number)? {
                processes.push(told.process(number, user, &mut tables));
            }
        }
    }
    processes.sort_by_key(|process| process.number);
    Ok(processes)
}

/// The process of this number, or why nothing can be said of it.
pub(crate) fn one(number: u32) -> anyhow::Result<Process> {
    find(number).with_context(|| format!("process {number}"))
}

fn find(number: u32) -> anyhow::Result<Process> {
    let owner = fs::metadata(format!("/proc/{number}")).map(|metadata| metadata.uid());
    // Also in folders of others: it may have changed its user since it made its file.
    for user in users()? {
        let Some(folder) = open_folder(user)? else { continue };
        match look(folder.as_fd(), number)? {
            Look::Told(told) => return Ok(told.process(number, user, &mut KernelTables::default())),
            Look::OtherVersion => bail!("it is run with another version of Highwire, whose `highwire` can explain it"),
            Look::Nothing => {}
        }
    }
    let Ok(owner) = owner else { bail!("there is no such process") };
    if let Some(process) = plain_one(number, owner) {
        return Ok(process);
    }
    let own = rustix::process::geteuid();
    if !own.is_root() && own.as_raw() != owner && folder_of(owner).exists() {
        bail!(
            "permission denied: it belongs to user {owner}, and only that user and root see what it tells; \
             try `sudo highwire explain {number}`"
        );
    }
    match fs::read_to_string(format!("/proc/{number}/maps")) {
        Ok(maps) if maps.contains(LIBRARY) => bail!(
            "it is run with Highwire, but has no TCP socket yet, or gave up its rights (user, root, system calls) \
             before it had one"
        ),
        Ok(maps) if maps.is_empty() => bail!("it has ended, and its parent has not taken note of it yet"),
        Ok(_) => bail!("it was not started with `highwire run`"),
        Err(_) => bail!("it was not started with `highwire run`, or has no TCP socket yet"),
    }
}

/// Processes of this user that were started with Highwire and run plain; for root, of every user.
pub(crate) fn plain() -> Vec<Process> {
    let own = rustix::process::geteuid();
    let mut processes = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(number) = entry.file_name().to_str().and_then(number) else { continue };
        let Ok(user) = entry.metadata().map(|metadata| metadata.uid()) else { continue };
        processes.extend(plain_one(number, user).filter(|_| own.is_root() || own.as_raw() == user));
    }
    processes.sort_by_key(|process| process.number);
    processes
}

fn plain_one(number: u32, user: u32) -> Option<Process> {
    let reason = noted_plain(number, user).or_else(|| inherited_plain(number))?;
    Some(Process {
        number,
        user,
        program: program_of(number),
        switched_off: false,
        plain: Some(reason),
        sockets: Vec::new(),
    })
}

/// Writes down why this process, which is about to become a program, has no lanes. Where nothing can be written, nothing is.
pub(crate) fn note_plain(reason: &PlainReason) {
    // Folders of a user that is not mapped may be another user's.
    if !highwire_lane::claim::own_user_is_mapped() {
        return;
    }
    let user = rustix::process::geteuid().as_raw();
    let process = std::process::id();
    let Some(started) = started(process) else { return };
    let text = format!("{started}\n{}\n{}\n", reason.name, reason.words.replace('\n', " "));
    // A file beyond this limit would end this process by a signal.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < text.len() as u64) {
        return;
    }
    let _ = plain_folders(user).iter().any(|folder| {
        // The first of them also has the library, which other users may read.
        if crate::run::own_folder(folder, 0o755).is_err() {
            return false;
        }
        crate::run::remove_dead(folder);
        let path = folder.join(format!("{PLAIN_PREFIX}{process}"));
        // Of an earlier process of this number.
        let _ = fs::remove_file(&path);
        let created = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        created.is_ok_and(|mut file| {
            let written = file.write_all(text.as_bytes());
            if written.is_err() {
                let _ = fs::remove_file(&path);
            }
            written.is_ok()
        })
    });
}

/// What `highwire run` wrote down of a process before it became the program; what it wrote of another one is removed.
fn noted_plain(process: u32, owner: u32) -> Option<PlainReason> {
    // A program may have changed its user: then root sees it in the folder of the user before.
    let own = rustix::process::geteuid();
    let users = if own.is_root() { users().unwrap_or_default() } else { vec![own.as_raw()] };
    users.into_iter().chain([owner]).flat_map(plain_folders).find_map(|folder| {
        let path = folder.join(format!("{PLAIN_PREFIX}{process}"));
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, Mode::empty()).ok()?;
        let mut text = String::new();
        File::from(file).take(PLAIN_BYTES_MAX).read_to_string(&mut text).ok()?;
        let mut lines = text.lines();
        let (Some(began), Some(name), Some(words)) = (lines.next(), lines.next(), lines.next()) else { return None };
        if started(process).is_none_or(|started| started.to_string() != began) {
            let _ = fs::remove_file(&path);
            return None;
        }
        Some(PlainReason { name: printable(name), words: printable(words) })
    })
}

/// Why a process has no lanes that was to have them, since a program under Highwire started it. What the kernel tells of it
/// is enough.
fn inherited_plain(process: u32) -> Option<PlainReason> {
    let environment = of_process(process, "environ")?;
    let maps = of_process(process, "maps").filter(|maps| !maps.is_empty())?;
    let is_loaded = contains(&maps, LIBRARY);
    if !environment.split(|byte| *byte == 0).any(program::preloads) {
        let starter = || of_process(parent(process)?, "maps").filter(|maps| contains(maps, LIBRARY));
        return (!is_loaded && starter().is_some()).then(|| Unfit::Environment.into());
    }
    if !is_loaded {
        // One that is just being started has not loaded it yet.
        return program::unfit_process(process).map(PlainReason::from);
    }
    let mut names = maps.split(|byte| *byte == b'\n').filter_map(|line| line.rsplit(|byte| *byte == b'/').next());
    if names.any(program::is_sanitizer) {
        return Some(Unfit::Sanitizer.into());
    }
    has_filter(&String::from_utf8_lossy(&of_process(process, "status")?)).then(|| Unfit::Filter.into())
}

fn of_process(process: u32, what: &str) -> Option<Vec<u8>> {
    fs::read(format!("/proc/{process}/{what}")).ok()
}

fn contains(text: &[u8], part: &str) -> bool {
    text.windows(part.len()).any(|window| window == part.as_bytes())
}

/// Whether a process of this status has a seccomp filter.
pub(crate) fn has_filter(status: &str) -> bool {
    status.lines().any(|line| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() != "0"))
}

/// When a process was started, in the kernel's ticks: a later process of the same number has another time.
fn started(process: u32) -> Option<u64> {
    status_number(process, 19)
}

fn parent(process: u32) -> Option<u32> {
    status_number(process, 1)?.try_into().ok()
}

/// A field of `/proc/PID/stat`, counted from the state.
fn status_number(process: u32, field: usize) -> Option<u64> {
    let text = of_process(process, "stat")?;
    let text = String::from_utf8_lossy(&text);
    // The name before them is in parentheses and may contain any.
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(field)?.parse().ok()
}

/// Where it is written down that a process of this user runs plain: the first that can be written.
fn plain_folders(user: u32) -> Vec<PathBuf> {
    // The library's folders first: where they cannot be written there is no library either.
    let mut folders = crate::run::folders(user);
    folders.push(folder_of(user));
    folders
}

/// The kernel's name for a process.
fn program_of(process: u32) -> String {
    printable(&String::from_utf8_lossy(&fs::read(format!("/proc/{process}/comm")).unwrap_or_default()))
}

/// Before the number of a process that runs plain, in the name of a file.
pub(crate) const PLAIN_PREFIX: &str = "plain-";
const PLAIN_BYTES_MAX: u64 = 4096;

/// Whose processes are to be seen.
fn users() -> anyhow::Result<Vec<u32>> {
    let own = rustix::process::geteuid();
    if !own.is_root() {
        return Ok(vec![own.as_raw()]);
    }
    let parent = folder_of(0);
    let parent = parent.parent().unwrap_or(Path::new("/"));
    let entries = fs::read_dir(parent).with_context(|| format!("{}", parent.display()))?;
    let mut users: Vec<u32> =
        entries.flatten().filter_map(|entry| number(entry.file_name().to_str()?.strip_prefix("highwire-")?)).collect();
    users.sort_unstable();
    Ok(users)
}

fn folder_of(user: u32) -> PathBuf {
    let mut name = [0; 64];
    PathBuf::from(OsStr::from_bytes(directory(user, None, &mut name).to_bytes()))
}

/// A number as it is usually written: without a sign, without zeroes before it.
fn number(text: &str) -> Option<u32> {
    text.parse().ok().filter(|number: &u32| number.to_string() == text)
}

/// A user's folder, unless there is none or another has put it there.
fn open_folder(user: u32) -> anyhow::Result<Option<OwnedFd>> {
    let path = folder_of(user);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(folder) => folder,
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
    };
    Ok((rustix::fs::fstat(&folder)?.st_uid == user).then_some(folder))
}

fn numbers_in(folder: &OwnedFd) -> anyhow::Result<Vec<u32>> {
    let entries = Dir::read_from(folder)?;
    Ok(entries.flatten().filter_map(|entry| number(entry.file_name().to_str().ok()?)).collect())
}

/// What a look at a file brings.
enum Look {
    Told(Told),
    OtherVersion,
    /// No file, one that is not ready, or one of a process that is gone; the latter is removed.
    Nothing,
}

/// The words of a file.
struct Told(Vec<u64>);

fn look(folder: BorrowedFd<'_>, process: u32) -> anyhow::Result<Look> {
    let name = process.to_string();
    // Whatever else lies there under such a name is not waited for.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(folder, &name, flags, Mode::empty()) else { return Ok(Look::Nothing) };
    let status = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return Ok(Look::Nothing);
    }
    let mut bytes = Vec::new();
    File::from(file).take(BYTES_MAX).read_to_end(&mut bytes)?;
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_else(|_| unreachable!("chunks of eight"))))
        .collect();
    let magic = words.first().copied().unwrap_or(0);
    let alive = Path::new("/proc").join(&name).exists();
    // Its process writes the magic word when it has mapped the file; a later one of the same number has not.
    let abandoned = magic == MAGIC && maps(process, status.st_dev, status.st_ino) == Some(false);
    if !alive || abandoned {
        // Somebody else may have been quicker.
        let _ = rustix::fs::unlinkat(folder, &name, AtFlags::empty());
        return Ok(Look::Nothing);
    }
    Ok(match magic {
        MAGIC if words.len() >= HEADER_WORDS && words[PROCESS_WORD] == u64::from(process) => Look::Told(Told(words)),
        MAGIC | 0 => Look::Nothing,
        _ => Look::OtherVersion,
    })
}

/// Whether a process maps this file, if that may be known.
fn maps(process: u32, device: u64, inode: u64) -> Option<bool> {
    let all = fs::read(format!("/proc/{process}/maps")).ok()?;
    let device = format!("{:02x}:{:02x}", rustix::fs::major(device), rustix::fs::minor(device));
    let inode = inode.to_string();
    Some(all.split(|byte| *byte == b'\n').any(|line| {
        let mut fields = line.split(|byte| *byte == b' ').skip(3);
        fields.next() == Some(device.as_bytes()) && fields.next() == Some(inode.as_bytes())
    }))
}

impl Told {
    fn process(&self, number: u32, user: u32, tables: &mut KernelTables) -> Process {
        Process {
            number,
            user,
            program: program_of(number),
            switched_off: self.0[SWITCH_WORD] != 0,
            plain: None,
            sockets: self.sockets(number, tables),
        }
    }

    fn sockets(&self, process: u32, tables: &mut KernelTables) -> Vec<Socket> {
        let kernel = tables.of(process);
        let descriptors = socket_descriptors(process).unwrap_or_default();
        let inode_of = |descriptor: u32| {
            let index = descriptors.binary_search_by_key(&descriptor, |(descriptor, _)| *descriptor).ok()?;
            Some(descriptors[index].1)
        };
        let mut known = HashSet::new();
        let mut sockets = Vec::new();
        for (place, words) in self.0[HEADER_WORDS..].chunks_exact(SLOT_WORDS).enumerate() {
            let mut counters = [0; COUNTERS];
            counters.copy_from_slice(&words[..COUNTERS]);
            let counters = Counters(counters);
            let descriptor = counters.of(Counter::Descriptor).checked_sub(1).and_then(|word| u32::try_from(word).ok());
            let Some(descriptor) = descriptor else { continue };
            let inode = inode_of(descriptor);
            known.extend(inode);
            let kernel = inode.and_then(|inode| kernel.get(&inode)).copied();
            sockets.push(Socket { place: Some(place), descriptor, kernel, counters: Some(counters) });
        }
        for (descriptor, inode) in descriptors {
            if let Some(socket) = kernel.get(&inode).copied().filter(|_| known.insert(inode)) {
                sockets.push(Socket { place: None, descriptor, kernel: Some(socket), counters: None });
            }
        }
        sockets.sort_by_key(|socket| socket.descriptor);
        sockets
    }
}

/// A program chooses its own name: nothing in it may move a cursor.
fn printable(name: &str) -> String {
    name.trim_end_matches('\n').chars().map(|each| if each.is_control() { '?' } else { each }).collect()
}

/// More than the file of any process has.
const BYTES_MAX: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn folder() -> (tempfile::TempDir, OwnedFd) {
        let folder = tempfile::tempdir().unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(folder.path(), flags, Mode::empty()).unwrap();
        (folder, opened)
    }

    fn words(process: u32, sockets: &[Counters]) -> Vec<u8> {
        let mut words = vec![0; HEADER_WORDS];
        (words[0], words[PROCESS_WORD]) = (MAGIC, u64::from(process));
        for socket in sockets {
            words.extend(socket.0);
            words.extend([0; SLOT_WORDS - COUNTERS]);
        }
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    /// A number that no process can have.
    const NOBODY: u32 = u32::MAX - 1;

    #[test]
    fn files_of_dead_processes_and_of_earlier_ones_of_the_same_number_are_removed() {
        let (folder, opened) = folder();
        let own = std::process::id();
        for number in [NOBODY, own] {
            let path = folder.path().join(number.to_string());
            fs::write(&path, words(number, &[])).unwrap();
            assert!(matches!(look(opened.as_fd(), number).unwrap(), Look::Nothing));
            assert!(!path.exists(), "{number}: nobody maps it");
        }
    }

    #[test]
    fn a_file_that_is_not_ready_or_of_another_version_is_left_alone() {
        let (folder, opened) = folder();
        let own = std::process::id();
        let path = folder.path().join(own.to_string());
        fs::write(&path, []).unwrap();
        assert!(matches!(look(opened.as_fd(), own).unwrap(), Look::Nothing));
        fs::write(&path, vec![0; 8 * HEADER_WORDS]).unwrap();
        assert!(matches!(look(opened.as_fd(), own).unwrap(), Look::Nothing));
        fs::write(&path, b"HWCOUNT2 and more").unwrap();
        assert!(matches!(look(opened.as_fd(), own).unwrap(), Look::OtherVersion));
        assert!(path.exists());
    }

    #[test]
    fn links_and_pipes_are_not_read() {
        let (folder, opened) = folder();
        fs::write(folder.path().join("real"), words(std::process::id(), &[])).unwrap();
        symlink("real", folder.path().join("1")).unwrap();
        rustix::fs::mkfifoat(&opened, "2", Mode::RUSR | Mode::WUSR).unwrap();
        for number in [1, 2] {
            assert!(matches!(look(opened.as_fd(), number).unwrap(), Look::Nothing));
        }
        assert_eq!(numbers_in(&opened).unwrap().len(), 2, "and nothing is removed that is not a file of ours");
    }

    #[test]
    fn places_without_a_descriptor_and_descriptors_that_cannot_be_are_no_sockets() {
        let used = Counters::sample(&[(Counter::Descriptor, 9), (Counter::TcpBytesIn, 5)]);
        let gone = Counters::sample(&[(Counter::Descriptor, 0), (Counter::TcpBytesIn, 5)]);
        let absurd = Counters::sample(&[(Counter::Descriptor, u64::MAX)]);
        let bytes = words(NOBODY, &[gone, absurd, used.clone()]);
        let told = Told(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect());
        let sockets = told.sockets(NOBODY, &mut KernelTables::default());
        assert_eq!(sockets.len(), 1, "{sockets:?}");
        assert_eq!((sockets[0].place, sockets[0].descriptor), (Some(2), 8));
        assert_eq!(sockets[0].counters, Some(used));
        assert!(sockets[0].is_used());
    }

    #[test]
    fn only_plain_numbers_are_numbers() {
        assert_eq!(["0", "17", "4294967295"].map(number), [Some(0), Some(17), Some(u32::MAX)]);
        assert_eq!(["", "+1", "01", "-1", "4294967296", "1.tmp"].map(number), [None; 6]);
    }

    #[test]
    fn a_name_moves_no_cursor() {
        assert_eq!(printable("redis-server\n"), "redis-server");
        assert_eq!(printable("a\x1b[2Jb\r\n"), "a?[2Jb?");
    }

    #[test]
    fn sums_of_absurd_counters_do_not_overflow() {
        let absurd = Counters::sample(&[(Counter::LaneBytesIn, u64::MAX), (Counter::TcpBytesOut, u64::MAX)]);
        assert_eq!(absurd.bytes(), u64::MAX);
        let absurd = Counters::sample(&[(Counter::Reason, 1 << 40)]);
        assert_eq!(absurd.reason(), None);
    }
}
