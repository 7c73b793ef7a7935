//! A line for each packet, to see what two sides really say.
//!
//! ```text
//! 0.000123456 > 192.0.2.7:4000 1408 0100000000000007000000000000002a
//! 0.000187002 < 192.0.2.7:4000 24 0200000000000007000000000000002a
//! time (s)    direction, other side, bytes, the first bytes in hex
//! ```

use crate::link::ask_beneath;
use crate::{Burst, Clock, Inbox, Link, ReceiveError, SendError};
use std::io::{self, Write};
use std::net::SocketAddr;

/// A link that writes a line for each packet that goes or comes.
///
/// Traffic goes on where writing fails: the trace ends there, and [`Traced::trace_error`] says why.
#[derive(Debug)]
pub struct Traced<L, W: Write> {
    link: L,
    trace: Trace<W>,
}

#[derive(Debug)]
struct Trace<W> {
    writer: W,
    clock: Clock,
    error: Option<io::Error>,
}

/// Bytes of each packet that are shown: enough for a header.
const SHOWN_BYTES: usize = 32;

impl<L: Link, W: Write> Traced<L, W> {
    /// Traces what goes through `link`, with the times of `clock`.
    pub fn new(link: L, writer: W, clock: Clock) -> Traced<L, W> {
        Traced { link, trace: Trace { writer, clock, error: None } }
    }

    /// Why the trace ended early, if it did.
    pub fn trace_error(&self) -> Option<&io::Error> {
        self.trace.error.as_ref()
    }

    /// The link and the writer, no longer together.
    pub fn into_parts(self) -> (L, W) {
        (self.link, self.trace.writer)
    }
}

impl<W: Write> Trace<W> {
    fn note(&mut self, direction: char, packets: impl Iterator<Item = (SocketAddr, impl AsRef<[u8]>)>) {
        let seconds = self.clock.now().as_secs_f64();
        for (address, packet) in packets {
            if self.error.is_some() {
                return;
            }
            self.error = self.line(seconds, direction, address, packet.as_ref()).err();
        }
    }

    fn line(&mut self, seconds: f64, direction: char, address: SocketAddr, packet: &[u8]) -> io::Result<()> {
        write!(self.writer, "{seconds:.9} {direction} {address} {} ", packet.len())?;
        for byte in packet.iter().take(SHOWN_BYTES) {
            write!(self.writer, "{byte:02x}")?;
        }
        writeln!(self.writer)
    }
}

impl<L: Link, W: Write> Link for Traced<L, W> {
    fn send(&mut self, bursts: &[Burst<'_>]) -> Result<usize, SendError> {
        let sent = self.link.send(bursts)?;
        let packets = bursts[..sent].iter().flat_map(|burst| burst.packets().map(|packet| (burst.to, packet)));
        self.trace.note('>', packets);
        Ok(sent)
    }

    fn receive(&mut self, inbox: &mut Inbox) -> Result<usize, ReceiveError> {
        let received = self.link.receive(inbox)?;
        self.trace.note('<', inbox.packets());
        Ok(received)
    }

    ask_beneath!(self, self.link);
}
