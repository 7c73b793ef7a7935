//! `highwire mem`: objects in the memory that nodes donate.

use crate::wire::KeyArgs;
use crate::{figures, up};
use anyhow::Context;
use clap::{Args, Subcommand};
use highwire::netmem::client::Failed;
use highwire::netmem::map::{Map, bucket_of};
use highwire::netmem::request::{Expect, Figures, Refusal, Stat};
use highwire::netmem::{
    Keep, Memory, MemoryError, MemoryOptions, Name, NodeStat, OBJECT_BYTES_MAX, PAGE_BYTES, Version,
};
use highwire::rpc::Rpc;
use highwire::{Buffer, Driver, Nic};
use highwire_transfer::WriterWatch;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::fmt::{self, Write as _};
use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Subcommand)]
pub(crate) enum MemCommand {
    /// Store a file, or what comes by standard input, under a name, in place of what is there
    Put(PutArgs),
    /// Write an object to standard output or to a file
    Get(GetArgs),
    /// List objects: their names, bytes, how long their lease still runs, and whether they are pinned
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Tell about an object, or about the nodes: their memory, how full it is, and what has aged out or expired
    Stat(StatArgs),
    /// Remove an object; ends with 4 if there is none
    Rm(RmArgs),
    /// Keep an object for so long from now on
    Renew(RenewArgs),
}

#[derive(Debug, Args)]
struct AtArgs {
    /// Where the coordinator listens; otherwise what HIGHWIRE_MEM says, otherwise shm:highwire
    #[arg(long, value_name = "COORDINATOR")]
    at: Option<String>,
    #[command(flatten)]
    key: KeyArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PutArgs {
    /// Name of the object: 1 to 255 bytes
    name: String,
    /// The file, of at most 64 MiB; `-` or nothing: standard input
    file: Option<PathBuf>,
    /// How long it is kept unless it is renewed, as 500ms, 90s, 15m, 1h or 2d
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_lease)]
    lease: Duration,
    /// Do not let it give way when memory is short
    #[arg(long)]
    pin: bool,
    /// Only if nothing has the name; ends with 1 otherwise
    #[arg(long)]
    if_absent: bool,
    #[command(flatten)]
    at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// Name of the object
    name: String,
    /// Write it here, whole or not at all; `-`: to standard output, a terminal too
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Only names that begin with this
    #[arg(default_value = "")]
    prefix: String,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct StatArgs {
    /// Name of the object; without it the nodes are told about
    name: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Name of the object
    name: String,
    #[command(flatten)]
    at: AtArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RenewArgs {
    /// Name of the object
    name: String,
    /// For how long, as 500ms, 90s, 15m, 1h or 2d
    #[arg(long, value_name = "TIME", value_parser = parse_lease)]
    lease: Duration,
    #[command(flatten)]
    at: AtArgs,
}

/// An object that is not there, whose lease has ended, or that is lost: for scripts an outcome of its own.
#[derive(Debug)]
pub(crate) struct NotThere(String);

impl fmt::Display for NotThere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotThere {}

pub(crate) fn run(command: &MemCommand) -> anyhow::Result<()> {
    match command {
        MemCommand::Put(args) => put(args),
        MemCommand::Get(args) => get(args),
        MemCommand::List(args) => list(args),
        MemCommand::Stat(args) => stat(args),
        MemCommand::Rm(args) => remove(args),
        MemCommand::Renew(args) => renew(args),
    }
}

fn parse_lease(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let unit = units.iter().find(|(name, _)| *name == unit).map(|(_, milliseconds)| milliseconds);
    let milliseconds = digits.parse::<u64>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(*unit));
    match milliseconds {
        Some(time @ 1..=LEASE_MS_MAX) => Ok(Duration::from_millis(time)),
        _ => Err("write a time from 1ms to 30d, as 500ms, 90s, 15m, 1h or 2d".to_owned()),
    }
}

impl AtArgs {
    fn connect(&self, bytes: u64) -> anyhow::Result<(Nic, Memory)> {
        let (nic, _) = self.key.nic(CONNECT, Driver::Thread, None)?;
        let rpc = Rpc::new(&nic)?;
        // Where a large object goes by a slow network it takes its time.
        let timeout = PATIENCE + Duration::from_secs(bytes / SLOW_BYTES_A_SECOND);
        let memory = Memory::connect(&rpc, &self.address(), MemoryOptions { timeout, ..MemoryOptions::default() })?;
        Ok((nic, memory))
    }

    fn address(&self) -> String {
        let variable = || std::env::var("HIGHWIRE_MEM").ok().filter(|address| !address.is_empty());
        self.at.clone().or_else(variable).unwrap_or_else(|| up::ADDRESS.to_owned())
    }
}

fn put(args: &PutArgs) -> anyhow::Result<()> {
    // A name that cannot be is told before a file is read.
    Name::new(&args.name)?;
    let keep = Keep { lease: args.lease, pinned: args.pin, only_if: args.if_absent.then_some(Expect::Absent) };
    let stored = match args.file.as_deref().filter(|file| *file != Path::new("-")) {
        Some(path) => put_file(args, path, keep)?,
        None => {
            let mut bytes = Vec::new();
            let bar = Bar::of_bytes("reading", None);
            read_pieces(&mut io::stdin().lock(), &bar, |piece| {
                bytes.extend_from_slice(piece);
                bytes.len() as u64 <= OBJECT_BYTES_MAX
            })
            .context("standard input cannot be read")?;
            bar.clear();
            if bytes.len() as u64 > OBJECT_BYTES_MAX {
                anyhow::bail!("{}", too_large("standard input"));
            }
            let (_nic, memory) = args.at.connect(bytes.len() as u64)?;
            let _working = Bar::working("storing");
            memory.put(&args.name, &bytes, keep)
        }
    };
    stored.map(drop).map_err(|error| explain(&args.name, error))
}

fn put_file(args: &PutArgs, path: &Path, keep: Keep) -> anyhow::Result<Result<Version, MemoryError>> {
    let file = File::open(path).with_context(|| format!("{path:?} cannot be read"))?;
    let found = file.metadata()?;
    if found.is_dir() {
        anyhow::bail!("{path:?} is a directory; make a file of it first (tar -cf)");
    }
    if found.len() > OBJECT_BYTES_MAX {
        anyhow::bail!("{}", too_large(&format!("{path:?}")));
    }
    let (nic, memory) = args.at.connect(found.len())?;
    // A pipe or a device does not say how much will come.
    let sized = found.is_file() && found.len() > 0;
    let bar = Bar::of_bytes("reading", sized.then_some(found.len()));
    let cannot = || format!("{path:?} cannot be read");
    if !sized {
        let mut bytes = Vec::new();
        read_pieces(&mut &file, &bar, |piece| {
            bytes.extend_from_slice(piece);
            bytes.len() as u64 <= OBJECT_BYTES_MAX
        })
        .with_context(cannot)?;
        bar.clear();
        if bytes.len() as u64 > OBJECT_BYTES_MAX {
            anyhow::bail!("{}", too_large(&format!("{path:?}")));
        }
        let _working = Bar::working("storing");
        return Ok(memory.put(&args.name, &bytes, keep));
    }
    let length = found.len() as usize;
    let watch = WriterWatch::begin(&file);
    let mut buffer: Buffer = nic.register(length)?.slice(0..length)?;
    let mut filled = 0;
    read_pieces(&mut &file, &bar, |piece| {
        let fits = piece.len().min(length - filled);
        buffer[filled..filled + fits].copy_from_slice(&piece[..fits]);
        filled += piece.len();
        filled <= length
    })
    .with_context(cannot)?;
    bar.clear();
    // A process that has the file mapped may have written it meanwhile: then the same bytes must be there once more.
    let unchanged = filled == length && (watch.saw_no_writer() || holds(&file, &buffer).with_context(cannot)?);
    if !unchanged {
        anyhow::bail!("{path:?} changed while it was read; try again when no process writes it");
    }
    let _working = Bar::working("storing");
    Ok(memory.put_buffer(&args.name, buffer, keep).map(|(version, _)| version))
}

/// Whether the file holds these bytes, and no more.
fn holds(file: &File, bytes: &[u8]) -> io::Result<bool> {
    let mut piece = vec![0; PIECE];
    for (number, expected) in bytes.chunks(PIECE).enumerate() {
        let piece = &mut piece[..expected.len()];
        match file.read_exact_at(piece, (number * PIECE) as u64) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            read => read?,
        }
        if piece != expected {
            return Ok(false);
        }
    }
    Ok(file.metadata()?.len() == bytes.len() as u64)
}

fn too_large(what: &str) -> String {
    format!(
        "{what} is larger than 64 MiB, the most that an object may have: divide it (split -b 64M), or use `highwire send`"
    )
}

/// Reads until the end, or until `take` has enough.
fn read_pieces(from: &mut impl Read, bar: &Bar, mut take: impl FnMut(&[u8]) -> bool) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        match from.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(bytes) => {
                bar.0.inc(bytes as u64);
                if !take(&piece[..bytes]) {
                    return Ok(());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn get(args: &GetArgs) -> anyhow::Result<()> {
    let path = args.output.as_deref().filter(|path| *path != Path::new("-"));
    if let Some(path) = path.filter(|path| path.is_dir()) {
        anyhow::bail!("{path:?} is a directory; give the name of a file");
    }
    let told = |error| explain(&args.name, error);
    let (_nic, memory) = args.at.connect(0)?;
    let bytes = memory.stat(&args.name).map_err(told)?.length;
    let (_nic, memory) = if bytes > LARGE { args.at.connect(bytes)? } else { (_nic, memory) };
    let working = Bar::working("fetching");
    let content = memory.get(&args.name);
    drop(working);
    let content = content.map_err(told)?;
    match path {
        Some(path) => write_file(path, &content),
        None => {
            let terminal = args.output.is_none() && io::stdout().is_terminal();
            if terminal && !is_text(&content) {
                let (name, bytes) = (&args.name, figures::bytes(content.len() as u64));
                anyhow::bail!(
                    "{name:?} is {bytes} that are no text, and would garble the terminal: write them to a file with \
                     -o FILE, or here with -o -"
                );
            }
            write_pieces(&mut io::stdout().lock(), &content)?;
            Ok(())
        }
    }
}

/// Whether a terminal shows it as it is.
fn is_text(content: &[u8]) -> bool {
    let plain = |c: char| !c.is_control() || matches!(c, '\n' | '\t' | '\r');
    std::str::from_utf8(content).is_ok_and(|text| text.chars().all(plain))
}

/// Writes a file that has its name only when it is whole. What is no file (a pipe, a device) is written as it is.
fn write_file(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let cannot = || format!("{path:?} cannot be written");
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        let mut file = OpenOptions::new().write(true).open(path).with_context(cannot)?;
        return write_pieces(&mut file, content).with_context(cannot);
    }
    let mut part = path.as_os_str().to_owned();
    part.push(format!(".{}.part", std::process::id()));
    let part = PathBuf::from(part);
    // One that is there already is another program's.
    let mut file = File::create_new(&part).with_context(|| format!("{path:?} cannot be written by way of {part:?}"))?;
    let written = write_pieces(&mut file, content).and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written.with_context(cannot)
}

fn write_pieces(to: &mut impl Write, content: &[u8]) -> io::Result<()> {
    let bar = Bar::of_bytes("writing", Some(content.len() as u64));
    for piece in content.chunks(PIECE) {
        to.write_all(piece)?;
        bar.0.inc(piece.len() as u64);
    }
    to.flush()
}

fn list(args: &ListArgs) -> anyhow::Result<()> {
    let (_nic, memory) = args.at.connect(0)?;
    let bar = Bar::of_parts("looking");
    let objects = memory.list(&args.prefix, |done, of| {
        bar.0.set_length(of.into());
        bar.0.set_position(done.into());
    })?;
    bar.clear();
    let mut text = String::new();
    if args.json {
        for (name, stat) in &objects {
            let _ = writeln!(text, "{}", object_json(name.as_str(), stat));
        }
        return crate::print(&text);
    }
    let shown = |name: &Name| printable(name.as_str());
    let width = objects.iter().map(|(name, _)| shown(name).chars().count()).max().unwrap_or(0).clamp(4, 60);
    let _ = writeln!(text, "{:<width$} {:>12} {:>12}  pinned", "name", "bytes", "lease left");
    for (name, stat) in &objects {
        let (pinned, left) = (if stat.pinned { "yes" } else { "no" }, time_left(stat.lease_left_ns));
        let _ = writeln!(text, "{:<width$} {:>12} {left:>12}  {pinned}", shown(name), stat.length);
    }
    crate::print(&text)
}

fn stat(args: &StatArgs) -> anyhow::Result<()> {
    let (_nic, memory) = args.at.connect(0)?;
    let text = match &args.name {
        Some(name) => {
            let stat = memory.stat(name).map_err(|error| explain(name, error))?;
            let map = memory.map();
            let leader = map.as_ref().and_then(|map| map.leader(bucket_of(&Name::new(name).ok()?)));
            let node = leader.map_or(String::new(), |member| ways(&member.address));
            if args.json {
                let mut object = object_json(name, &stat);
                object["node"] = node.into();
                format!("{object}\n")
            } else {
                let (bytes, left) = (stat.length, time_left(stat.lease_left_ns));
                let pinned = if stat.pinned { "yes" } else { "no" };
                format!(
                    "name        {}\nbytes       {bytes}\nlease left  {left}\npinned      {pinned}\nnode        {node}\n",
                    printable(name)
                )
            }
        }
        None => {
            let nodes = memory.nodes()?;
            let map = memory.map().context("the coordinator gave no map")?;
            if args.json { format!("{}\n", nodes_json(&nodes, &map)) } else { nodes_text(&nodes, &map) }
        }
    };
    crate::print(&text)
}

fn object_json(name: &str, stat: &Stat) -> Value {
    json!({
        "name": name, "bytes": stat.length, "lease_left_s": stat.lease_left_ns as f64 / 1e9, "pinned": stat.pinned,
        "version": format!("{}.{}", stat.version.led_since.0, stat.version.count),
    })
}

fn nodes_text(nodes: &[NodeStat], map: &Map) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{}, copies of each object: {}\n", map.epoch, map.copies);
    let width = nodes.iter().map(|node| ways(&node.address).chars().count()).max().unwrap_or(0).clamp(4, 60);
    let _ = writeln!(
        text,
        "{:<width$} {:>9} {:>7} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "node", "memory", "full", "objects", "pinned", "paged", "aged", "expired"
    );
    for node in nodes {
        let _ = write!(text, "{:<width$} ", ways(&node.address));
        match &node.figures {
            Ok(figures) => {
                let Figures { pages, free_pages, pinned_pages, paged_pages, objects, aged, expired, .. } = *figures;
                let _ = write!(
                    text,
                    "{:>9} {:>7} {objects:>9} {:>9} {:>9} {aged:>8} {expired:>8}",
                    pages_text(pages),
                    figures::percent((pages - free_pages).into(), pages.into()),
                    pages_text(pinned_pages),
                    pages_text(paged_pages),
                );
            }
            Err(reason) => text += &format!("does not answer: {reason}"),
        }
        text += if node.leaving { "  leaving\n" } else { "\n" };
    }
    text
}

fn nodes_json(nodes: &[NodeStat], map: &Map) -> Value {
    let bytes = |pages: u32| u64::from(pages) * PAGE_BYTES as u64;
    let node = |node: &NodeStat| {
        let mut object = json!({
            "node": format!("{:x}", node.node.0), "life": format!("{:x}", node.incarnation),
            "address": ways(&node.address), "leaving": node.leaving,
        });
        match &node.figures {
            Ok(figures) => {
                object["memory_bytes"] = bytes(figures.pages).into();
                object["free_bytes"] = bytes(figures.free_pages).into();
                object["object_bytes"] = bytes(figures.object_pages).into();
                object["pinned_bytes"] = bytes(figures.pinned_pages).into();
                object["paged_bytes"] = bytes(figures.paged_pages).into();
                object["objects"] = figures.objects.into();
                object["aged"] = figures.aged.into();
                object["expired"] = figures.expired.into();
                object["dropped"] = figures.dropped.into();
            }
            Err(reason) => object["error"] = reason.as_str().into(),
        }
        object
    };
    json!({ "epoch": map.epoch.0, "copies": map.copies, "nodes": nodes.iter().map(node).collect::<Vec<_>>() })
}

fn remove(args: &RmArgs) -> anyhow::Result<()> {
    let (_nic, memory) = args.at.connect(0)?;
    match memory.remove(&args.name, None).map_err(|error| explain(&args.name, error))? {
        true => Ok(()),
        false => Err(NotThere(format!("{:?} is not there", args.name)).into()),
    }
}

fn renew(args: &RenewArgs) -> anyhow::Result<()> {
    let (_nic, memory) = args.at.connect(0)?;
    memory.renew(&args.name, args.lease).map_err(|error| explain(&args.name, error))
}

/// What a failure is to whoever typed the name.
fn explain(name: &str, error: MemoryError) -> anyhow::Error {
    let gone = matches!(
        error,
        MemoryError::Failed(
            Failed::Gone { .. }
                | Failed::Refused(Refusal::NotFound { .. } | Refusal::Expired { .. } | Refusal::Gone { .. })
        )
    );
    match error.refusal() {
        Some(Refusal::Unexpected { found: Some(_) }) => anyhow::anyhow!("{name:?} is there already"),
        Some(Refusal::NotFound { lost: None }) => NotThere(format!("{name:?} is not there")).into(),
        Some(Refusal::NotFound { lost: Some(loss) }) => {
            NotThere(format!("{name:?} is not there; if it was, it was {loss}")).into()
        }
        _ if gone => NotThere(format!("{name:?} is not there: {error}")).into(),
        _ => anyhow::Error::from(error).context(format!("{name:?}")),
    }
}

/// Where a node is reached, without what tells one host from another.
fn ways(address: &str) -> String {
    address.split_whitespace().map(|way| way.split('@').next().unwrap_or(way)).collect::<Vec<_>>().join(" ")
}

/// A name as a line of a table can have it.
fn printable(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

fn pages_text(pages: u32) -> String {
    figures::bytes(u64::from(pages) * PAGE_BYTES as u64)
}

fn time_left(nanoseconds: u64) -> String {
    let seconds = nanoseconds / 1_000_000_000;
    match seconds {
        0 => format!("{}ms", nanoseconds / 1_000_000),
        1..60 => format!("{seconds}s"),
        60..3600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h {:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d {:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// How far it is, on standard error, where that is a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn with(template: &str, doing: &'static str, of: Option<u64>) -> Bar {
        let style = ProgressStyle::with_template(template).expect("a correct template");
        let bar = of.map_or_else(ProgressBar::no_length, ProgressBar::new);
        Bar(bar.with_style(style).with_prefix(doing))
    }

    fn of_bytes(doing: &'static str, of: Option<u64>) -> Bar {
        let known = "{prefix} {wide_bar} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
        Bar::with(if of.is_some() { known } else { "{prefix} {spinner} {decimal_bytes}" }, doing, of)
    }

    fn of_parts(doing: &'static str) -> Bar {
        Bar::with("{prefix} {wide_bar} {percent} %, {eta} left", doing, Some(0))
    }

    /// Of what does not tell how far it is.
    fn working(doing: &'static str) -> Bar {
        let bar = Bar::with("{prefix} {spinner} {elapsed}", doing, None);
        bar.0.enable_steady_tick(Duration::from_millis(200));
        bar
    }

    fn clear(&self) {
        self.0.finish_and_clear();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}

const CONNECT: Duration = Duration::from_secs(5);
/// For an operation, with the time that nodes need to notice that one of them is gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// Slower than any network that somebody puts objects over.
const SLOW_BYTES_A_SECOND: u64 = 4_000_000;
/// From here on an object is given more time.
const LARGE: u64 = 16 << 20;
const PIECE: usize = 1 << 20;
const LEASE_MS_MAX: u64 = 30 * 86_400_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_or_refused_and_told() {
        let read = ["500ms", "90s", "15m", "1h", "30d"].map(|text| parse_lease(text).unwrap().as_millis());
        assert_eq!(read, [500, 90_000, 900_000, 3_600_000, 2_592_000_000]);
        for nonsense in ["", "1", "h", "0s", "1.5h", "-1s", "31d", "1 h", "99999999999999999999d", "1w"] {
            assert!(parse_lease(nonsense).unwrap_err().contains("as 500ms"), "{nonsense}");
        }
        let told = [5, 59_000, 60_000, 3_599_000, 3_600_000, 90_000_000].map(|ms: u64| time_left(ms * 1_000_000));
        assert_eq!(told, ["5ms", "59s", "1m 00s", "59m 59s", "1h 00m", "1d 01h"]);
    }

    #[test]
    fn what_garbles_a_terminal_is_known() {
        assert!(is_text("plain\ttext, ünïcode\r\n".as_bytes()) && is_text(b""));
        assert!(!is_text(b"\x1b[2J") && !is_text(b"\0") && !is_text(&[0xff, 0xfe]));
        assert_eq!(printable("a\nb\x1b"), "a\\nb\\u{1b}");
    }

    #[test]
    fn a_part_of_another_program_is_neither_written_nor_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("letter");
        let part = folder.path().join(format!("letter.{}.part", std::process::id()));
        std::fs::write(&part, "precious").unwrap();
        let refused = write_file(&path, b"content").unwrap_err();
        assert!(refused.to_string().contains(".part"), "{refused}");
        assert_eq!(std::fs::read(&part).unwrap(), b"precious");
        std::fs::remove_file(&part).unwrap();
        write_file(&path, b"content").unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), part.exists()), (b"content".to_vec(), false));
    }
}
