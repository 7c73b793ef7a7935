//! TCP with a fault: whoever compares must see it.

use crate::support::socket::{Socket, Tcp};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    LosesAByte,
    RepeatsAByte,
    EndIsAnError,
    ResetIsAnEnd,
    ResetIsToldTwice,
    PeekTakes,
    ShowsNothing,
    ShowsEverything,
    ClosesWithAClone,
    TimesOutEarly,
    ForgetsNodelay,
    ForgetsToShut,
}

pub const FAULTS: [Fault; 12] = [
    Fault::LosesAByte,
    Fault::RepeatsAByte,
    Fault::EndIsAnError,
    Fault::ResetIsAnEnd,
    Fault::ResetIsToldTwice,
    Fault::PeekTakes,
    Fault::ShowsNothing,
    Fault::ShowsEverything,
    Fault::ClosesWithAClone,
    Fault::TimesOutEarly,
    Fault::ForgetsNodelay,
    Fault::ForgetsToShut,
];

/// A socket with that fault.
pub struct Wrong {
    tcp: Tcp,
    fault: Fault,
    writes: Arc<AtomicUsize>,
    resets: Arc<AtomicUsize>,
    peeks: Arc<AtomicUsize>,
    /// What is polled instead, where that is the fault.
    shown: Option<Arc<OwnedFd>>,
}

impl Wrong {
    pub fn new(tcp: Tcp, fault: Fault) -> Wrong {
        let counts = || Arc::new(AtomicUsize::new(0));
        // The reading end of a pipe whose writing end stays open is never ready; a regular file always is.
        let shown = match fault {
            Fault::ShowsNothing => {
                let (reads, writes) = rustix::pipe::pipe().expect("a pipe");
                std::mem::forget(writes);
                Some(reads)
            }
            Fault::ShowsEverything => Some(tempfile::tempfile().expect("a file").into()),
            _ => None,
        };
        Wrong { tcp, fault, writes: counts(), resets: counts(), peeks: counts(), shown: shown.map(Arc::new) }
    }

    fn wrongly_read(&self, result: io::Result<usize>) -> io::Result<usize> {
        match (result, self.fault) {
            (Ok(0), Fault::EndIsAnError) => Err(ErrorKind::UnexpectedEof.into()),
            (Ok(0), Fault::ResetIsToldTwice) if self.resets.swap(0, Ordering::Relaxed) > 0 => {
                Err(ErrorKind::ConnectionReset.into())
            }
            (Err(error), fault) if error.kind() == ErrorKind::ConnectionReset => {
                self.resets.store(1, Ordering::Relaxed);
                if fault == Fault::ResetIsAnEnd { Ok(0) } else { Err(error) }
            }
            (result, _) => result,
        }
    }
}

impl Socket for Wrong {
    fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        if self.fault == Fault::TimesOutEarly && self.tcp.read_timeout()?.is_some() {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.wrongly_read(self.tcp.read(into))
    }
    fn read_vectored(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.wrongly_read(self.tcp.read_vectored(into))
    }
    fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        let peeked = self.wrongly_read(self.tcp.peek(into));
        let first = peeked.as_ref().is_ok_and(|count| *count > 0) && self.peeks.fetch_add(1, Ordering::Relaxed) == 0;
        if self.fault == Fault::PeekTakes && first {
            self.tcp.read(&mut [0])?;
        }
        peeked
    }
    fn write(&self, from: &[u8]) -> io::Result<usize> {
        let seventh = self.writes.fetch_add(1, Ordering::Relaxed) % 7 == 6 && from.len() > 1;
        match self.fault {
            Fault::LosesAByte if seventh => Ok(self.tcp.write(&from[1..])? + 1),
            Fault::RepeatsAByte if seventh => {
                self.tcp.write(&from[..1])?;
                self.tcp.write(from)
            }
            _ => self.tcp.write(from),
        }
    }
    fn write_vectored(&self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.tcp.write_vectored(from)
    }
    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if self.fault == Fault::ForgetsToShut { Ok(()) } else { self.tcp.shutdown(how) }
    }
    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.tcp.set_nonblocking(nonblocking)
    }
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.tcp.set_read_timeout(timeout)
    }
    fn read_timeout(&self) -> io::Result<Option<Duration>> {
        self.tcp.read_timeout()
    }
    fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        if self.fault == Fault::ForgetsNodelay { Ok(()) } else { self.tcp.set_nodelay(nodelay) }
    }
    fn nodelay(&self) -> io::Result<bool> {
        self.tcp.nodelay()
    }
    fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        self.tcp.set_linger(linger)
    }
    fn linger(&self) -> io::Result<Option<Duration>> {
        self.tcp.linger()
    }
    fn take_error(&self) -> io::Result<Option<io::Error>> {
        self.tcp.take_error()
    }
    fn try_clone(&self) -> io::Result<Box<dyn Socket>> {
        let (writes, resets, peeks) = (self.writes.clone(), self.resets.clone(), self.peeks.clone());
        let tcp = Tcp(self.tcp.0.try_clone()?);
        Ok(Box::new(Wrong { tcp, fault: self.fault, writes, resets, peeks, shown: self.shown.clone() }))
    }
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.shown.as_ref().map_or_else(|| self.tcp.descriptor(), |shown| shown.as_fd())
    }
}

impl Drop for Wrong {
    fn drop(&mut self) {
        if self.fault == Fault::ClosesWithAClone {
            let _ = self.tcp.shutdown(Shutdown::Both);
        }
    }
}
