//! `highwire run`: starts a program with the library that gives its connections lanes.

use anyhow::{Context, bail};
use clap::Args;
use highwire_lane::claim::registry_answers;
use highwire_lane::counters::directory;
use highwire_lane::registry::{Limits, Registry, RegistryError};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
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
        }
        // Without lanes the program is as right as without Highwire.
        Err(why) => say(&format!("{} runs plain: {why:#}", program.to_string_lossy())),
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

/// Everything that the program needs: a check of what it is, the library as a file, a registry.
fn prepare(program: &OsStr) -> anyhow::Result<PathBuf> {
    if let Some(path) = find(program) {
        can_be_preloaded(&path)?;
    }
    let user = rustix::process::geteuid().as_raw();
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

/// Programs that would not load the library, or would not use what it offers.
fn can_be_preloaded(path: &Path) -> anyhow::Result<()> {
    let Ok(file) = fs::File::open(path) else { return Ok(()) };
    let metadata = file.metadata()?;
    if metadata.mode() & 0o6000 != 0 && !rustix::process::geteuid().is_root() {
        bail!("it changes its user when it starts (set-uid), and the loader then takes no libraries from outside");
    }
    let mut bytes = Vec::new();
    file.take(1 << 20).read_to_end(&mut bytes)?;
    if !bytes.starts_with(b"\x7fELF") {
        // A script: its interpreter is what loads the library.
        return Ok(());
    }
    if bytes.get(4) != Some(&2) {
        bail!("it is a 32-bit program, and the library is a 64-bit one");
    }
    let interpreter = interpreter(&bytes);
    match interpreter {
        None => bail!("it is linked statically, so nothing can be loaded into it"),
        Some(name) if name.windows(4).any(|part| part == b"musl") => {
            bail!("it uses the C library musl; the library is for glibc")
        }
        Some(_) => {}
    }
    if bytes.windows(14).any(|part| part == b"\xff Go buildinf:") {
        bail!("it is a Go program, which makes its system calls itself");
    }
    Ok(())
}

/// The loader that a 64-bit ELF program names.
fn interpreter(elf: &[u8]) -> Option<&[u8]> {
    const PT_INTERP: u32 = 3;
    let word = |at: usize, bytes: usize| {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(elf.get(at..at + bytes)?);
        usize::try_from(u64::from_le_bytes(value)).ok()
    };
    let (table, size, count) = (word(32, 8)?, word(54, 2)?, word(56, 2)?);
    (0..count).map(|index| table + index * size).find_map(|at| {
        (word(at, 4)? == PT_INTERP as usize).then(|| elf.get(word(at + 8, 8)?..word(at + 8, 8)? + word(at + 32, 8)?))?
    })
}

/// Where processes of this user tell of their connections; those that are dead are removed.
fn make_directory(user: u32) -> anyhow::Result<()> {
    let mut name = [0; 64];
    let path = PathBuf::from(OsStr::from_bytes(directory(user, None, &mut name).to_bytes()));
    own_folder(&path, 0o700)?;
    for entry in fs::read_dir(&path)?.flatten() {
        let dead = entry.file_name().to_str().is_none_or(|pid| !Path::new("/proc").join(pid).exists());
        if dead {
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

/// Makes a folder that nobody else could have put there.
fn own_folder(path: &Path, mode: u32) -> anyhow::Result<()> {
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

/// The library as a file, where files may be executed.
fn place_library(user: u32) -> anyhow::Result<PathBuf> {
    let mut folders = vec![PathBuf::from(format!("/tmp/highwire-{user}"))];
    if let Some(home) = std::env::var_os("HOME") {
        folders.push(PathBuf::from(home).join(".cache").join("highwire"));
    }
    let mut failed = None;
    for folder in folders {
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
        let mut registry = Command::new(own);
        registry.arg(crate::lanes::SERVE_COMMAND).current_dir("/").process_group(0);
        registry.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        registry.spawn().context("the registry could not be started")?;
        return Ok(());
    }
    let _ = rustix::process::setsid();
    match Registry::listen(Limits::default()) {
        Ok(mut registry) => registry.serve(),
        Err(RegistryError::Running) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
