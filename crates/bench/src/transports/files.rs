//! Files from memory to memory, as the paper's ramdisks are: over a stream, as `highwire send` does it, or copied by
//! one process.
//!
//! A file is sent from one that is kept for the whole run to one that is made anew each time. What arrived is compared
//! when the clock has stopped.

use super::{Contestant, Exercise, Transport, pattern, sockets};
use crate::BenchError;
use crate::folder::Folder;
use crate::machine::kilobytes;
use crate::pair::{Link, Role};
use crate::report::bytes_label;
use highwire_transfer::{self as transfer, Destination, Source};
use std::cell::OnceCell;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Why a file of this size cannot be sent here.
pub(crate) fn too_large(size: usize) -> Option<String> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = kilobytes(&meminfo, "MemAvailable:").unwrap_or(0) * 1024;
    let disk = rustix::fs::statvfs(MEMORY).map_or(0, |disk| disk.f_bavail * disk.f_frsize);
    let (free, needed) = (memory.min(disk), 2 * size as u64 + BYTES_LEFT_FREE);
    (free < needed).then(|| {
        let label = bytes_label(size as u64);
        format!("left out, since {MEMORY} has {free} bytes free and {needed} are needed: transfer of a file of {label}")
    })
}

/// A directory in memory, which the driver makes when the first file is to be sent, and which is removed however that
/// process ends.
#[derive(Debug)]
pub(crate) struct Ramdisk {
    path: PathBuf,
    folder: OnceCell<Folder>,
}

impl Ramdisk {
    /// That of process `driver`, which all contestants share, on both sides.
    pub(crate) fn of(driver: u32) -> Ramdisk {
        let path = Path::new(MEMORY).join(format!("highwire-bench-{driver}"));
        Ramdisk { path, folder: OnceCell::new() }
    }

    /// The file of this size, made where there is none yet.
    pub(crate) fn source(&self, size: usize) -> Result<PathBuf, BenchError> {
        if self.folder.get().is_none() {
            let _ = self.folder.set(Folder::make(&self.path)?);
        }
        let path = self.path.join(format!("{size}-bytes"));
        if path.exists() {
            return Ok(path);
        }
        let mut file = File::create(&path)?;
        let mut piece = vec![0; PIECE_BYTES];
        for place in (0..size).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(size - place)];
            pattern::fill(piece, place as u64);
            file.write_all(piece)?;
        }
        Ok(path)
    }

    /// Where a file arrives.
    fn destination(&self) -> PathBuf {
        self.path.join("arrived")
    }

    /// Compares what arrived with what was sent, and removes it.
    fn compare(&self, name: &'static str, size: usize) -> Result<(), BenchError> {
        let mut file = File::open(self.destination())?;
        std::fs::remove_file(self.destination())?;
        let mut piece = vec![0; PIECE_BYTES];
        let mut place = 0;
        loop {
            match file.read(&mut piece)? {
                0 => break,
                read => {
                    pattern::check(name, &piece[..read], place)?;
                    place += read as u64;
                }
            }
        }
        if place == size as u64 { Ok(()) } else { Err(BenchError::Bytes { contestant: name, place }) }
    }
}

/// Files over a stream whose calls block.
pub(super) struct Carrier<S> {
    name: &'static str,
    /// None where the driver copies by itself.
    stream: Option<S>,
    disk: Rc<Ramdisk>,
    /// The file that goes next.
    source: PathBuf,
    /// Bytes that the file must have that came last.
    arrived: Option<usize>,
}

impl Carrier<TcpStream> {
    pub(super) fn over_tcp(link: &mut Link) -> Result<Box<dyn Transport>, BenchError> {
        let stream = sockets::tcp_stream(Contestant::Tcp, link)?;
        Ok(Box::new(Carrier::new(Contestant::Tcp, Some(stream), link)))
    }

    /// The driver copies by itself.
    pub(super) fn alone(link: &Link) -> Box<dyn Transport> {
        Box::new(Carrier::<TcpStream>::new(Contestant::Copy, None, link))
    }
}

impl<S: Read + Write> Carrier<S> {
    pub(super) fn new(contestant: Contestant, stream: Option<S>, link: &Link) -> Carrier<S> {
        let disk = link.ramdisk.clone();
        Carrier { name: contestant.name(), stream, disk, source: PathBuf::new(), arrived: None }
    }
}

impl<S: Read + Write> Transport for Carrier<S> {
    fn prepare_for(&mut self, role: Role, _exercise: Exercise, size: usize, _count: usize) -> Result<(), BenchError> {
        if role == Role::Driver {
            self.source = self.disk.source(size)?;
        }
        Ok(())
    }

    fn send_file(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        for _ in 0..count {
            match &mut self.stream {
                Some(stream) => {
                    let sent = Source::open(&self.source).and_then(|source| transfer::send(stream, &source, |_| ()));
                    sent.map_err(BenchError::library(self.name, "sending a file"))?;
                }
                None => {
                    copy(&self.source, &self.disk.destination())?;
                    self.arrived = Some(size);
                }
            }
        }
        Ok(())
    }

    fn receive_file(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        for _ in 0..count {
            let received = transfer::receive(stream, &Destination::file(self.disk.destination()), |_| ());
            received.map_err(BenchError::library(self.name, "receiving a file"))?;
            self.arrived = Some(size);
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), BenchError> {
        self.arrived.take().map_or(Ok(()), |size| self.disk.compare(self.name, size))
    }
}

fn copy(from: &Path, to: &Path) -> Result<(), BenchError> {
    let (mut from, mut to) = (File::open(from)?, File::create(to)?);
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match from.read(&mut piece)? {
            0 => return Ok(()),
            read => to.write_all(&piece[..read])?,
        }
    }
}

/// A file system in memory, on every Linux.
const MEMORY: &str = "/dev/shm";
/// As much as a transfer reads at once.
const PIECE_BYTES: usize = 512 << 10;
/// What is to be free when both files are there.
const BYTES_LEFT_FREE: u64 = 256 << 20;
