//! `highwire ping` and `highwire echo`: is the other side there, and how far away?

use crate::pcap;
use crate::wire::WireArgs;
use anyhow::Context;
use clap::Args;
use highwire::{Completion, Message, Nic, Operation, PeerId, Receive, Recording, Vi, WaitError};
use serde_json::json;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(crate) struct EchoArgs {
    /// Where to listen: udp:HOST:PORT, shm:NAME or shm:/PATH
    address: String,
    #[command(flatten)]
    wire: WireArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PingArgs {
    /// Who is to answer: udp:HOST:PORT, shm:NAME or shm:/PATH
    address: String,
    #[command(flatten)]
    wire: WireArgs,
    /// Messages to send
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// Bytes of each message, as 64, 8K or 1M; at most 4M
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = parse_size)]
    size: usize,
    /// Seconds from one message to the next
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_interval)]
    interval: f64,
    /// Seconds to wait for the other side, and for each answer
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = crate::bench::parse_seconds)]
    timeout: f64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn parse_size(text: &str) -> Result<usize, String> {
    match crate::bench::parse_size(text)? {
        bytes if bytes <= BYTES_MAX => Ok(bytes),
        _ => Err("a message that is answered has at most 4M".to_owned()),
    }
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("write seconds from 0 to 3600".to_owned()),
    }
}

/// Answers every message with itself, until it is stopped.
pub(crate) fn echo(args: &EchoArgs) -> anyhow::Result<()> {
    let recording = args.wire.pcap.recording_for(&args.address)?;
    let (nic, known_by) = args.wire.nic(CONNECT, recording.clone())?;
    let listener = nic.listen(&args.address)?;
    crate::print(&format!("listening at {} with {known_by}; stop with Ctrl-C\n", listener.address()))?;
    tell_of_the_end(recording.as_ref());
    loop {
        match listener.accept(A_DAY) {
            Ok(vi) => {
                let recording = recording.clone();
                std::thread::Builder::new().name("echo".into()).spawn(move || {
                    let from = name(vi.peer());
                    let _ = crate::print(&format!("{from} connected\n"));
                    let end = serve(vi);
                    let _ = crate::print(&format!("{from} left: {}\n", crate::chain(&end)));
                    tell_of_the_end(recording.as_ref());
                })?;
            }
            Err(highwire::AcceptError::TimedOut(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Says that nothing is recorded any more, if that is so and was not said before.
fn tell_of_the_end(recording: Option<&Recording>) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if let Some(error) = recording.and_then(Recording::error)
        && !TOLD.swap(true, Relaxed)
    {
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("highwire: {error}\n"));
    }
}

/// Answers on one VI until it is over, and says why it is.
fn serve(mut vi: Vi) -> anyhow::Error {
    let mut turn = || -> anyhow::Result<()> {
        for token in 0..RECEIVES {
            vi.post_recv(Receive::new(token).in_place())?;
        }
        loop {
            let done = vi.wait(A_DAY)?;
            done.status?;
            if done.operation == Operation::Receive {
                let (token, length) = (done.token, done.length);
                let mut bytes = vec![0; length];
                if let Some(payload) = done.into_in_place() {
                    payload.copy_to(0, &mut bytes);
                    vi.receiver().release(payload);
                }
                vi.post_recv(Receive::new(token).in_place())?;
                vi.send_bytes(token, &bytes)?;
            }
        }
    };
    match turn() {
        Ok(()) => anyhow::anyhow!("nothing more to do"),
        Err(error) => error,
    }
}

/// Sends messages to whoever answers, and tells how long that took.
pub(crate) fn ping(args: &PingArgs) -> anyhow::Result<()> {
    let recording = args.wire.pcap.recording_for(&args.address)?;
    let pinged = exchange(args, recording.clone());
    // Packets are wanted all the more where nobody answered.
    let recorded = pcap::finish(recording.as_ref());
    pinged.and(recorded)
}

fn exchange(args: &PingArgs, recording: Option<Recording>) -> anyhow::Result<()> {
    let timeout = Duration::from_secs_f64(args.timeout);
    let (nic, known_by) = args.wire.nic(timeout, recording)?;
    let mut vi = nic.connect(&args.address)?;
    let mut times = Vec::new();
    for number in 0..args.count {
        if number > 0 {
            std::thread::sleep(Duration::from_secs_f64(args.interval));
        }
        let time = round_trip(&nic, &mut vi, u64::from(number), args.size, timeout)
            .with_context(|| format!("message {} of {} was not answered", number + 1, args.count))?;
        times.push(time.as_secs_f64() * 1e6);
        if !args.json {
            let (from, time) = (&args.address, microseconds(time.as_secs_f64() * 1e6));
            crate::print(&format!("{} bytes from {from}: message {}, {time}\n", args.size, number + 1))?;
        }
    }
    // Everything has been answered: there is nothing to wait for.
    drop(vi);
    let mut sorted = times.clone();
    sorted.sort_by(f64::total_cmp);
    let (least, median, most) = (sorted[0], sorted[sorted.len() / 2], sorted[sorted.len() - 1]);
    let mut text = String::new();
    if args.json {
        let object = json!({
            "address": args.address, "known_by": known_by, "bytes": args.size, "round_trip_us": times,
            "least_us": least, "median_us": median, "most_us": most,
        });
        let _ = writeln!(text, "{object}");
    } else {
        let (count, least, median, most) = (args.count, microseconds(least), microseconds(median), microseconds(most));
        let _ = writeln!(text, "{count} sent and answered, with {known_by}");
        let _ = writeln!(text, "round trip: least {least}, median {median}, most {most}");
    }
    crate::print(&text)
}

fn round_trip(nic: &Nic, vi: &mut Vi, number: u64, bytes: usize, timeout: Duration) -> anyhow::Result<Duration> {
    let memory = nic.register(2 * bytes)?;
    let (mut out, place) = (memory.slice(0..bytes)?, memory.slice(bytes..2 * bytes)?);
    out.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 * 7 + number) as u8);
    vi.post_recv(Receive::new(number).into(place))?;
    let began = Instant::now();
    vi.post_send(Message::new(number).payload(out))?;
    let mut parts: [Option<Completion>; 2] = [None, None];
    let mut answered = began.elapsed();
    while parts.iter().any(Option::is_none) {
        let left = timeout.saturating_sub(began.elapsed());
        let done = vi.wait(left).map_err(|error| match error {
            WaitError::TimedOut(_) => {
                anyhow::anyhow!("nothing came within {timeout:?}: it died, or the network is down")
            }
            error => error.into(),
        })?;
        done.status?;
        if done.operation == Operation::Receive {
            answered = began.elapsed();
        }
        let part = usize::from(done.operation == Operation::Receive);
        parts[part] = Some(done);
    }
    let [Some(sent), Some(back)] = parts else { anyhow::bail!("not answered") };
    if sent.into_buffer().as_deref() != back.into_buffer().as_deref() {
        anyhow::bail!("the answer differs from what was sent");
    }
    Ok(answered)
}

fn name(peer: PeerId) -> String {
    match peer {
        PeerId::Process(process) => process.to_string(),
        PeerId::Host(address) => address.to_string(),
    }
}

fn microseconds(time: f64) -> String {
    if time < 1000.0 { format!("{time:.2} µs") } else { format!("{:.2} ms", time / 1000.0) }
}

/// What an echo copies at once.
const BYTES_MAX: usize = 4 << 20;
const CONNECT: Duration = Duration::from_secs(5);
const A_DAY: Duration = Duration::from_secs(24 * 3600);
/// Messages that may be under way to an echo at once.
const RECEIVES: u64 = 64;
