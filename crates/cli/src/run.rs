//! `highwire run`: starts a program with the library that gives its connections lanes.

use crate::processes;
use anyhow::{Context, bail};
use clap::Args;
use highwire_lane::claim::{own_user_is_mapped, registry_answers};
use highwire_lane::counters::directory;
use highwire_lane::program::{self, Unfit};
use highwire_lane::registry::{Limits, Registry, RegistryError};
use rustix::process::{Resource, Rlimit};
use std::ffi::{CString, OsStr, OsString};
use std::fs;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// The library itself.
static LIBRARY: &[u8] = include_bytes!(env!("HIGHWIRE_PRELOAD"));

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Only connections with one of these ports at either end: 6379,8000-8100
    #[arg(long, value_name = "PORTS", value_parser = ports)]
    only: Option<String>,
    /// No connections with one of these ports at either end
    #[arg(long, value_name = "PORTS", value_parser = ports)]
    never: Option<String>,
    /// Tell on standard error which connections get a lane, and why others do not
    #[arg(long)]
    log: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Checks a list of ports and ranges of them.
fn ports(text: &str) -> Result<String, String> {
    let mut count = 0;
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let port = |text: &str| {
            text.trim()
                .parse::<u16>()
                .ok()
                .filter(|port| *port > 0 && !text.trim().starts_with('+'))
                .ok_or_else(|| format!("`{text}` is not a port (1 to 65535)"))
        };
        let (first, last) = (port(first)?, port(last)?);
        if first > last {
            return Err(format!("the range {first}-{last} is empty"));
        }
        count += 1;
    }
    if count > RANGES_MAX { Err(format!("at most {RANGES_MAX} ports and ranges")) } else { Ok(text.to_owned()) }
}

/// As many as the library keeps.
const RANGES_MAX: usize = 32;

/// Becomes the program; returns only if that is not possible.
pub(crate) fn run(args: &RunArgs) -> ExitCode {
    let (program, arguments) = args.command.split_first().unwrap_or_else(|| unreachable!("clap requires one"));
    let mut command = Command::new(program);
    command.args(arguments);
    match prepare(program) {
        Ok(library) => {
            command.env("LD_PRELOAD", preload(&library));
            for (name, value) in [("HIGHWIRE_LANES_ONLY", &args.only), ("HIGHWIRE_LANES_NEVER", &args.never)] {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
            if args.log {
                command.env("HIGHWIRE_LANES_LOG", "1");
            }
            command.env(ASAN_OPTIONS, without_link_order(std::env::var_os(ASAN_OPTIONS)));
        }
        // Without lanes the program is as right as without Highwire.
        Err(why) => {
            say(&format!("{} runs plain: {}", program.to_string_lossy(), why.words));
            processes::note_plain(&why);
        }
    }
    let error = command.exec();
    say(&format!("{}: {error}", program.to_string_lossy()));
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}

fn say(text: &str) {
    // Nothing more can be done if this cannot be written.
    let _ = writeln!(std::io::stderr(), "highwire: {text}");
}

fn preload(library: &Path) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        all.push(":");
        all.push(others);
    }
    all
}

/// Programs with AddressSanitizer may be started by the program. Their runtime ends them when any library is loaded before
/// it, unless it is told not to; the library then leaves every call to it.
fn without_link_order(options: Option<OsString>) -> OsString {
    let mut options = options.unwrap_or_default();
    if !options.as_bytes().windows(LINK_ORDER.len()).any(|part| part == LINK_ORDER.as_bytes()) {
        if !options.is_empty() {
            options.push(":");
        }
        options.push(LINK_ORDER);
        options.push("=0");
    }
    options
}

const ASAN_OPTIONS: &str = "ASAN_OPTIONS";
const LINK_ORDER: &str = "verify_asan_link_order";

/// Everything that the program needs: a check of what it is, the library as a file, a registry.
fn prepare(program: &OsStr) -> Result<PathBuf, PlainReason> {
    if is_filtered() {
        return Err(Unfit::Filter.into());
    }
    let path = find(program).and_then(|path| CString::new(path.into_os_string().into_vec()).ok());
    if let Some(unfit) = path.and_then(|path| program::unfit(&path)) {
        return Err(unfit.into());
    }
    let user = rustix::process::geteuid().as_raw();
    // Before anything is made or trusted by that number.
    if !own_user_is_mapped() {
        return Err(anyhow::anyhow!(
            "its user is not mapped by this user namespace (see /proc/self/uid_map), so that files of others would be \
             taken for its own"
        )
        .into());
    }
    make_directory(user)?;
    let library = place_library(user)?;
    start_registry(user)?;
    Ok(library)
}

/// The file that will be executed.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(program));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// Why a program runs plain.
#[derive(Debug)]
pub(crate) struct PlainReason {
    /// One word, for programs.
    pub(crate) name: String,
    pub(crate) words: String,
}

impl From<Unfit> for PlainReason {
    fn from(unfit: Unfit) -> PlainReason {
        PlainReason { name: unfit.name().to_owned(), words: unfit.words().to_owned() }
    }
}

impl From<anyhow::Error> for PlainReason {
    fn from(error: anyhow::Error) -> PlainReason {
        PlainReason { name: UNPREPARED.to_owned(), words: crate::chain(&error) }
    }
}

/// The name of reasons that are not the program's.
pub(crate) const UNPREPARED: &str = "unprepared";

/// Whether the system calls of this process, and so those of the program, are filtered already.
fn is_filtered() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| processes::has_filter(&status))
}

/// Where processes of this user tell of their connections; those that are dead are removed.
fn make_directory(user: u32) -> anyhow::Result<()> {
    let mut name = [0; 64];
    let path = PathBuf::from(OsStr::from_bytes(directory(user, None, &mut name).to_bytes()));
    own_folder(&path, 0o700)?;
    if rustix::fs::statvfs(&path)?.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        bail!(
            "{} is on a read-only file system, so its lanes could be neither explained nor switched off",
            path.display()
        );
    }
    remove_dead(&path);
    Ok(())
}

/// Removes the files of processes that are dead. Files with other names are left alone.
pub(crate) fn remove_dead(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().map(|name| name.strip_prefix(processes::PLAIN_PREFIX).unwrap_or(name));
        let is_number = |name: &&str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        if process.filter(is_number).is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Makes a folder that nobody else could have put there.
pub(crate) fn own_folder(path: &Path, mode: u32) -> anyhow::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("{} could not be made", path.display()));
        }
        _ => {}
    }
    let metadata = fs::symlink_metadata(path)?;
    let own =
        metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o022 == 0;
    if !own {
        bail!("{} is not a folder that only this user can write; remove it", path.display());
    }
    Ok(())
}

/// Where a user has the library.
pub(crate) fn folders(user: u32) -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from(format!("/tmp/highwire-{user}"))];
    if let Some(home) = std::env::var_os("HOME") {
        folders.push(PathBuf::from(home).join(".cache").join("highwire"));
    }
    folders
}

/// The library as a file, where files may be executed.
fn place_library(user: u32) -> anyhow::Result<PathBuf> {
    let mut failed = None;
    for folder in folders(user) {
        match place_library_in(&folder) {
            Ok(path) => return Ok(path),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    Err(failed.unwrap_or_else(|| anyhow::anyhow!("no folder for the library")))
}

fn place_library_in(folder: &Path) -> anyhow::Result<PathBuf> {
    own_folder(folder, 0o755)?;
    let flags = rustix::fs::statvfs(folder)?.f_flag;
    if flags.contains(rustix::fs::StatVfsMountFlags::NOEXEC) {
        bail!("programs may not be executed in {}", folder.display());
    }
    let path = folder.join(format!("libhighwire-{:016x}.so", fingerprint(LIBRARY)));
    if fs::metadata(&path).is_ok_and(|metadata| metadata.len() == LIBRARY.len() as u64) {
        return Ok(path);
    }
    // A file beyond this limit would end this process by a signal.
    let limit = rustix::process::getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| limit < LIBRARY.len() as u64) {
        bail!("files are limited to {} bytes (ulimit -f), and the library has {}", limit.unwrap_or(0), LIBRARY.len());
    }
    let unfinished = folder.join(format!(".unfinished-{}", std::process::id()));
    fs::write(&unfinished, LIBRARY).with_context(|| format!("{} could not be written", unfinished.display()))?;
    fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o755))?;
    fs::rename(&unfinished, &path)?;
    Ok(path)
}

/// FNV-1a: another library has another name.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Sees to it that a registry is there, of root or of this user.
fn start_registry(user: u32) -> anyhow::Result<()> {
    if registry_answers(0) || registry_answers(user) {
        return Ok(());
    }
    let own = std::env::current_exe().context("this command does not know its own file")?;
    // A process of its own, whose end is nobody's child's: the program that we become knows nothing of it.
    let mut starter = Command::new(own);
    starter.args([crate::lanes::SERVE_COMMAND, "--detach"]);
    starter.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    starter.status().context("the registry could not be started")?;
    let deadline = Instant::now() + Duration::from_secs(2);
    while !registry_answers(user) {
        if Instant::now() > deadline {
            bail!("the registry did not start");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Is the registry, until nobody needs it.
pub(crate) fn serve(detach: bool) -> anyhow::Result<()> {
    if detach {
        let own = std::env::current_exe()?;
        begin_clean();
        let mut registry = Command::new(own);
        registry.arg(crate::lanes::SERVE_COMMAND).current_dir("/").env_clear();
        registry.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        registry.spawn().context("the registry could not be started")?;
        return Ok(());
    }
    // Not the leader of its process group, which could not leave the session.
    let _ = rustix::process::setsid();
    match Registry::listen(Limits::default()) {
        Ok(mut registry) => registry.serve(),
        Err(RegistryError::Running) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// The registry serves programs of other terminals, and outlives the one that happened to start it: it inherits neither
/// descriptors, which may be locks or pipes that others wait for, nor limits nor priority, as far as its user may change
/// them. The scheduling class and the CPUs are the registry's own business.
fn begin_clean() {
    highwire_lane::registry::keep_descriptors_from_programs();
    let _ = rustix::process::setpriority_process(None, 0);
    for resource in [
        Resource::Cpu,
        Resource::Fsize,
        Resource::Data,
        Resource::Rss,
        Resource::As,
        Resource::Locks,
        Resource::Memlock,
        Resource::Nproc,
    ] {
        raise(resource, Rlimit { current: None, maximum: None });
    }
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum.map(|maximum| maximum.max(DESCRIPTORS));
    raise(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Only root raises what a user may have; others have all of it.
fn raise(resource: Resource, wanted: Rlimit) {
    if rustix::process::setrlimit(resource, wanted).is_err() {
        let maximum = rustix::process::getrlimit(resource).maximum;
        let _ = rustix::process::setrlimit(resource, Rlimit { current: maximum, maximum });
    }
}

/// Descriptors that a registry may need at most: a region for every lane, and callers.
const DESCRIPTORS: u64 = 4096;
