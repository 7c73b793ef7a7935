//! `highwire send` and `highwire receive`: one file, verified, and resumed where it stopped.

use crate::wire::WireArgs;
use crate::{pcap, warn};
use clap::Args;
use highwire::{Listener, Recording, Sockets, Stream};
use highwire_transfer::{
    Destination, Offer, Outcome, PeerError, Progress, ReceiveError, Source, await_close, read_offer,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// The file to send: a regular one
    file: PathBuf,
    /// Where `highwire receive` listens: udp:HOST:PORT, shm:NAME or shm:/PATH
    address: String,
    #[command(flatten)]
    wire: WireArgs,
    /// Try again for so long while nobody listens there yet
    #[arg(long, value_name = "SECONDS", value_parser = crate::bench::parse_seconds)]
    wait: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReceiveArgs {
    /// Where to listen: udp:HOST:PORT, shm:NAME or shm:/PATH
    address: String,
    #[command(flatten)]
    wire: WireArgs,
    /// Put the file into this directory, by the name that it has at the sender
    #[arg(long, value_name = "DIRECTORY", default_value = ".", conflicts_with = "output")]
    into: PathBuf,
    /// Put the file here, whatever its name is at the sender
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace a file that is there, take a name that begins with a dot, and keep permissions to execute
    #[arg(long)]
    force: bool,
    /// Have the file on the disk, and not only in the kernel's memory, before the sender is told that it is there
    #[arg(long)]
    sync: bool,
    /// Print one JSON object; where it listens goes to standard error
    #[arg(long)]
    json: bool,
}

/// Sends a file to whoever receives at the address.
pub(crate) fn send(args: &SendArgs) -> anyhow::Result<()> {
    // What is wrong with the file is told before anybody is bothered.
    let source = Source::open(&args.file)?;
    let recording = args.wire.pcap.recording_for(&args.address)?;
    let sent = connect_and_send(args, &source, recording.clone());
    // Packets are wanted all the more where it failed.
    let recorded = pcap::finish(recording.as_ref());
    sent.and(recorded)
}

fn connect_and_send(args: &SendArgs, source: &Source, recording: Option<Recording>) -> anyhow::Result<()> {
    let (nic, _) = args.wire.nic(CONNECT, recording)?;
    let mut stream = connect(&Sockets::new(&nic), &args.address, args.wait)?;
    let began = Instant::now();
    let bar = Bar::new();
    let sent = highwire_transfer::send(&mut stream, source, |progress| bar.show(progress));
    bar.clear();
    if sent.is_err() {
        part(&mut stream);
    }
    let summary = Summary { done: "sent", file: &args.file, outcome: sent?, seconds: began.elapsed().as_secs_f64() };
    tell(&summary.text(args.json));
    Ok(())
}

/// Calls, and calls again for `wait` seconds if nobody is there.
fn connect(sockets: &Sockets, address: &str, wait: Option<f64>) -> io::Result<Stream> {
    let Some(wait) = wait else { return sockets.connect(address) };
    let until = Instant::now() + Duration::from_secs_f64(wait);
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(CALL_AGAIN);
        match sockets.connect_timeout(address, left.min(CONNECT)) {
            Err(error) if is_nobody(&error) && Instant::now() < until => std::thread::sleep(CALL_AGAIN),
            connected => return connected,
        }
    }
}

fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::TimedOut)
}

/// Receives one file.
pub(crate) fn receive(args: &ReceiveArgs) -> anyhow::Result<()> {
    let destination = match &args.output {
        Some(file) => Destination::file(file),
        None => Destination::directory(&args.into),
    };
    let destination = destination.force(args.force).sync(args.sync);
    // What is wrong with the place is told before anybody sends.
    destination.check()?;
    let recording = args.wire.pcap.recording_for(&args.address)?;
    let received = accept_and_receive(args, &destination, recording.clone());
    let recorded = pcap::finish(recording.as_ref());
    received.and(recorded)
}

fn accept_and_receive(
    args: &ReceiveArgs,
    destination: &Destination,
    recording: Option<Recording>,
) -> anyhow::Result<()> {
    let (nic, known_by) = args.wire.nic(CONNECT, recording)?;
    let listener = Sockets::new(&nic).bind(&args.address)?;
    let listening = format!("listening at {} with {known_by}; stop with Ctrl-C\n", listener.local_addr()?);
    if args.json {
        let _ = io::stderr().write_all(listening.as_bytes());
    } else {
        tell(&listening);
    }
    let (mut stream, offer) = accept_offer(&listener)?;
    // A second sender would wait for nothing.
    drop(listener);
    let began = Instant::now();
    let bar = Bar::new();
    let received = highwire_transfer::receive_offered(&mut stream, offer, destination, |progress| bar.show(progress));
    let seconds = began.elapsed().as_secs_f64();
    bar.clear();
    part(&mut stream);
    let received = received?;
    if received.not_executable {
        warn("the file cannot be executed here, as it can at the sender: --force keeps that, or chmod +x gives it");
    }
    let summary = Summary { done: "received", file: &received.path, outcome: received.outcome, seconds };
    tell(&summary.text(args.json));
    Ok(())
}

/// The first sender that says what it sends. A caller that says nothing does not keep others out.
fn accept_offer(listener: &Listener) -> anyhow::Result<(Stream, Offer)> {
    loop {
        let (mut stream, from) = listener.accept()?;
        let mut patience = Patience { stream: &stream, until: Instant::now() + OFFER_WITHIN };
        match read_offer(&mut patience) {
            Ok(offer) => {
                stream.set_read_timeout(None)?;
                return Ok((stream, offer));
            }
            Err(ReceiveError::Peer(PeerError::Lost { error })) if is_late(&error) => {
                warn(&format!("{from} offered nothing within {OFFER_WITHIN:?}, and lost its place to the next"));
            }
            Err(error) => {
                part(&mut stream);
                return Err(error.into());
            }
        }
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// A stream that is read up to a moment, however little comes at a time.
struct Patience<'a> {
    stream: &'a Stream,
    until: Instant,
}

impl Read for Patience<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(into)
    }
}

impl Write for Patience<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut stream = self.stream;
        stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut stream = self.stream;
        stream.flush()
    }
}

/// Prints, if anybody reads: who does not is still to get the file.
fn tell(text: &str) {
    let _ = crate::print(text);
}

/// Says that nothing more comes, and stays until the other side has heard it.
fn part(stream: &mut Stream) {
    // Without a time-out the other side could keep us here.
    let parting = stream.shutdown(Shutdown::Write).and_then(|()| stream.set_read_timeout(Some(PARTING)));
    if parting.is_ok() {
        await_close(stream, PARTING);
    }
}

/// What is told of a transfer that went well.
struct Summary<'a> {
    done: &'static str,
    file: &'a Path,
    outcome: Outcome,
    seconds: f64,
}

impl Summary<'_> {
    fn text(&self, json: bool) -> String {
        let Summary { done, file, outcome: Outcome { bytes, resumed_from, checksum }, seconds } = self;
        let mb_s = (bytes - resumed_from) as f64 / seconds / 1e6;
        if json {
            let object = json!({
                "file": file.to_string_lossy(), "bytes": bytes, "resumed_from": resumed_from, "seconds": seconds,
                "mb_s": mb_s, "checksum": format!("crc64nvme:{checksum}"),
            });
            return format!("{object}\n");
        }
        let resumed = match resumed_from {
            0 => String::new(),
            resumed_from => format!(", {resumed_from} of them before"),
        };
        format!("{done} {file:?}: {bytes} bytes{resumed}, in {seconds:.3} s, {mb_s:.0} MB/s\n")
    }
}

/// How far it is, on standard error, where that is a terminal.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Bar {
        let template =
            "{prefix} {wide_bar} {decimal_bytes} of {decimal_total_bytes}, {decimal_bytes_per_sec}, {eta} left";
        let style = ProgressStyle::with_template(template).expect("a correct template");
        Bar(ProgressBar::new(0).with_style(style))
    }

    fn show(&self, progress: Progress) {
        let (bytes, of, doing) = match progress {
            Progress::Compared { bytes, of } => (bytes, of, "comparing"),
            Progress::Moved { bytes, of } => (bytes, of, "moving"),
            Progress::Verified { bytes, of } => (bytes, of, "verifying"),
        };
        if self.0.prefix() != doing {
            // What was there before is not part of the rate.
            self.0.set_length(of);
            self.0.set_position(bytes);
            self.0.reset_eta();
            self.0.reset_elapsed();
            self.0.set_prefix(doing);
        }
        self.0.set_position(bytes);
    }

    fn clear(&self) {
        self.0.finish_and_clear();
    }
}

/// How long somebody who is there takes to answer, at most.
const CONNECT: Duration = Duration::from_secs(5);
/// From one call to the next, while nobody is there.
const CALL_AGAIN: Duration = Duration::from_millis(50);
/// How long a caller may take to say what it sends.
const OFFER_WITHIN: Duration = Duration::from_secs(10);
/// How long the other side is waited for when all is said.
const PARTING: Duration = Duration::from_secs(2);
