//! Where a transfer is tried: a directory with a file, a pair of sockets, and what may go wrong between.

use highwire_transfer::{Destination, Outcome, Progress, ReceiveError, Received, SendError, Source, receive, send};
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// A directory with `there/letter` and an empty `here`.
pub struct Place {
    directory: tempfile::TempDir,
    pub bytes: Vec<u8>,
}

impl Place {
    pub fn new(bytes: usize) -> Place {
        Place::in_directory(tempfile::tempdir().unwrap(), bytes)
    }

    /// On the file system of this directory.
    pub fn within(parent: &Path, bytes: usize) -> Place {
        Place::in_directory(tempfile::tempdir_in(parent).unwrap(), bytes)
    }

    fn in_directory(directory: tempfile::TempDir, bytes: usize) -> Place {
        let bytes = content(bytes);
        for name in ["there", "here"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        let place = Place { directory, bytes };
        fs::write(place.source(), &place.bytes).unwrap();
        place
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn source(&self) -> PathBuf {
        self.path().join("there/letter")
    }

    pub fn here(&self) -> PathBuf {
        self.path().join("here")
    }

    pub fn whole(&self) -> PathBuf {
        self.here().join("letter")
    }

    pub fn part(&self) -> PathBuf {
        self.here().join("letter.part")
    }

    /// Leaves these bytes as an earlier attempt would have left them.
    pub fn leave_part(&self, bytes: &[u8]) {
        fs::write(self.part(), bytes).unwrap();
        rustix::fs::setxattr(self.part(), "user.highwire.part", b"1", rustix::fs::XattrFlags::empty()).unwrap();
    }

    pub fn destination(&self) -> Destination {
        Destination::directory(self.here())
    }

    /// Sends and receives the file, with nothing in between.
    pub fn exchange(&self) -> Ends {
        self.exchange_with(&self.destination(), Fault::None, Fault::None)
    }

    /// Sends and receives it, with faults in what the sender and in what the receiver writes.
    pub fn exchange_with(&self, destination: &Destination, forth: Fault, back: Fault) -> Ends {
        let source = Source::open(&self.source()).unwrap();
        let (near, far) = pair();
        let sender = thread::spawn(move || send(&mut Faulty::new(near, forth), &source, |_| ()));
        let received = receive(&mut Faulty::new(far, back), destination, |_| ());
        Ends { sent: sender.join().unwrap(), received }
    }

    /// The same, with something that happens when the sender is so far.
    pub fn exchange_while(&self, happens: impl FnMut(Progress) + Send + 'static) -> Ends {
        let source = Source::open(&self.source()).unwrap();
        let (mut near, mut far) = pair();
        let sender = thread::spawn(move || send(&mut near, &source, happens));
        let received = receive(&mut far, &self.destination(), |_| ());
        drop(far);
        Ends { sent: sender.join().unwrap(), received }
    }

    /// That all is well, and where it was resumed.
    pub fn assert_whole(&self, ends: &Ends) -> u64 {
        let (sent, received) = (ends.sent.as_ref().unwrap(), ends.received.as_ref().unwrap());
        assert_eq!(sent, &received.outcome);
        assert_eq!(sent.bytes, self.bytes.len() as u64);
        assert!(fs::read(&received.path).unwrap() == self.bytes, "{:?} has other bytes", received.path);
        assert!(!self.part().exists());
        sent.resumed_from
    }

    /// That nothing was put in place, and that what is there is a beginning of the file.
    pub fn assert_resumable(&self) {
        assert!(!self.whole().exists());
        if let Ok(part) = fs::read(self.part()) {
            assert!(self.bytes.starts_with(&part), "{} bytes that are no beginning", part.len());
        }
    }
}

/// How both ended.
#[derive(Debug)]
pub struct Ends {
    pub sent: Result<Outcome, SendError>,
    pub received: Result<Received, ReceiveError>,
}

/// What happens to the bytes that a side writes.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    None,
    /// One bit of this byte is another.
    Flip(u64),
    /// After so many bytes the connection is gone.
    Cut(u64),
}

/// A stream with a fault in what is written to it.
pub struct Faulty {
    stream: UnixStream,
    fault: Fault,
    written: u64,
}

impl Faulty {
    fn new(stream: UnixStream, fault: Fault) -> Faulty {
        Faulty { stream, fault, written: 0 }
    }
}

impl Read for Faulty {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read(into)
    }
}

impl Write for Faulty {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut bytes = bytes.to_vec();
        match self.fault {
            Fault::Cut(at) if self.written + bytes.len() as u64 > at => bytes.truncate((at - self.written) as usize),
            Fault::Flip(at) => {
                if let Some(byte) = at.checked_sub(self.written).and_then(|at| bytes.get_mut(at as usize)) {
                    *byte ^= 16;
                }
            }
            _ => {}
        }
        if bytes.is_empty() {
            self.stream.shutdown(Shutdown::Both)?;
            return Err(ErrorKind::ConnectionReset.into());
        }
        let written = self.stream.write(&bytes)?;
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Two ends; whoever waits for the other in vain fails.
pub fn pair() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    for end in [&near, &far] {
        end.set_read_timeout(Some(PATIENCE)).unwrap();
        end.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    (near, far)
}

/// Bytes of which no two pages are alike.
fn content(bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    for (number, page) in content.chunks_exact_mut(4096).enumerate() {
        page[..8].copy_from_slice(&(number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    // The last ones too, where they make no page.
    content.iter_mut().rev().zip(1..=255).for_each(|(byte, number)| *byte ^= number);
    content
}

const PATIENCE: Duration = Duration::from_secs(10);
