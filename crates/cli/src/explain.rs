//! `highwire explain`: what goes by the lane, what by TCP, and why not more by the lane.

use crate::figures::{bytes, count, percent};
use crate::kernel_sockets::State;
use crate::processes::{self, Counters, Process, Socket};
use clap::Args;
use highwire_lane::counters::{Counter, Reason};
use serde_json::{Value, json};
use std::fmt::Write;

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Only this process
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    process: Option<u32>,
    /// Also sockets that never carried a byte, such as those that listen
    #[arg(long)]
    all: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ExplainArgs) -> anyhow::Result<()> {
    let processes = match args.process {
        Some(number) => vec![processes::one(number)?],
        None => {
            let mut processes = processes::all()?;
            processes.extend(processes::plain());
            // One that had sockets before it was confined tells of itself, and comes first.
            processes.sort_by_key(|process| process.number);
            processes.dedup_by_key(|process| process.number);
            processes
        }
    };
    let text = if args.json { object(&processes, args.all).to_string() + "\n" } else { text(&processes, args.all) };
    crate::print(&text)
}

/// What is said where there is nothing to tell of.
pub(crate) const NO_PROCESS: &str = "\
no process runs under Highwire, or none that has a TCP socket: start one with `highwire run -- PROGRAM`";

fn text(processes: &[Process], all: bool) -> String {
    if processes.is_empty() {
        return format!("{NO_PROCESS}\n");
    }
    let texts: Vec<String> = processes.iter().map(|process| process_text(process, all)).collect();
    texts.join("\n")
}

fn process_text(process: &Process, all: bool) -> String {
    let mut text = format!("process {} of user {}: {}", process.number, process.user, process.program);
    if process.switched_off {
        let _ = write!(text, "; switched off, `highwire lanes on {}` allows lanes again", process.number);
    }
    text.push('\n');
    if let Some(reason) = &process.plain {
        wrap(&format!("runs plain: {}", reason.words), &mut text);
        return text;
    }
    let shown: Vec<&Socket> = shown(process, all).collect();
    if shown.is_empty() {
        let (count, plural) = (process.sockets.len(), if process.sockets.len() == 1 { "" } else { "s" });
        let _ = writeln!(text, "{INDENT}nothing was carried yet; --all shows {count} socket{plural}");
        return text;
    }
    let head = ["received", "messages", "sent", "messages", "share"];
    let _ = writeln!(text, "{:>6}  {}", "fd", row("by", head.map(str::to_owned)));
    for socket in shown {
        socket_text(socket, &mut text);
    }
    text
}

fn socket_text(socket: &Socket, text: &mut String) {
    let mut head = String::new();
    wrap(&address(socket), &mut head);
    let _ = write!(text, "{:>6}  {}", socket.descriptor, &head[INDENT.len()..]);
    let Some(counters) = &socket.counters else {
        return wrap(UNKNOWN_WORDS, text);
    };
    let of = |counter| counters.of(counter);
    if counters.bytes() > 0 {
        for (name, whole, [bytes_in, calls_in, bytes_out, calls_out]) in
            [("lane", counters.lane_bytes(), LANE), ("TCP", counters.tcp_bytes(), TCP)]
        {
            let share = percent(whole, counters.bytes());
            let cells = [bytes(of(bytes_in)), count(of(calls_in)), bytes(of(bytes_out)), count(of(calls_out)), share];
            let _ = writeln!(text, "{INDENT}{}", row(name, cells));
        }
        let found = match of(Counter::Spins) {
            0 => String::new(),
            spins => format!(" ({} found something)", percent(of(Counter::SpinsGood), spins)),
        };
        let details = format!(
            "{} sleeps, {} spins{found}, {} system calls avoided, {} found the lane full",
            count(of(Counter::Sleeps)),
            count(of(Counter::Spins)),
            count(of(Counter::CallsAvoided)),
            bytes(of(Counter::FullBytes)),
        );
        wrap(&details, text);
    }
    match counters.reason() {
        _ if listens(socket) => {}
        Some(reason) => wrap(reason.words(), text),
        None => wrap(&format!("reason {}, of another version", of(Counter::Reason)), text),
    }
}

const LANE: [Counter; 4] = [Counter::LaneBytesIn, Counter::LaneCallsIn, Counter::LaneBytesOut, Counter::LaneCallsOut];
const TCP: [Counter; 4] = [Counter::TcpBytesIn, Counter::TcpCallsIn, Counter::TcpBytesOut, Counter::TcpCallsOut];

fn row(name: &str, cells: [String; 5]) -> String {
    let mut row = format!("{name:<6}");
    cells.iter().for_each(|cell| row += &format!("{cell:>12}"));
    row
}

/// Both addresses and the state, as far as the kernel tells.
fn address(socket: &Socket) -> String {
    match &socket.kernel {
        Some(kernel) if kernel.state == State::LISTEN => format!("{} listening", kernel.local),
        Some(kernel) => format!("{} — {} {}", kernel.local, kernel.remote, kernel.state.name()),
        None => "not connected, or not told by the kernel".to_owned(),
    }
}

fn listens(socket: &Socket) -> bool {
    socket.kernel.is_some_and(|kernel| kernel.state == State::LISTEN)
}

/// Sockets that there is something to tell of.
fn shown(process: &Process, all: bool) -> impl Iterator<Item = &Socket> {
    process.sockets.iter().filter(move |socket| all || socket.is_used())
}

/// Words below a socket, none beyond the last column.
fn wrap(words: &str, text: &mut String) {
    let mut width = 0;
    for word in words.split(' ') {
        let length = word.chars().count();
        if width == 0 || width + 1 + length > COLUMNS {
            let separator = if width == 0 { "" } else { "\n" };
            let _ = write!(text, "{separator}{INDENT}{word}");
            width = INDENT.len() + length;
        } else {
            let _ = write!(text, " {word}");
            width += 1 + length;
        }
    }
    text.push('\n');
}

fn object(processes: &[Process], all: bool) -> Value {
    let processes: Vec<Value> = processes
        .iter()
        .map(|process| {
            json!({
                "pid": process.number,
                "user": process.user,
                "program": process.program,
                "switched_off": process.switched_off,
                "plain": process.plain.as_ref().map(|reason| reason.name.as_str()),
                "plain_words": process.plain.as_ref().map(|reason| reason.words.as_str()),
                "sockets": shown(process, all).map(socket_object).collect::<Vec<Value>>(),
            })
        })
        .collect();
    json!({ "version": JSON_VERSION, "processes": processes })
}

fn socket_object(socket: &Socket) -> Value {
    let kernel = socket.kernel.as_ref();
    let counters = socket.counters.as_ref();
    let (reason, words) = match counters.map(|counters| (counters, counters.reason())) {
        None => ("unknown-socket".to_owned(), UNKNOWN_WORDS.to_owned()),
        Some((_, Some(reason))) => (name(reason), reason.words().to_owned()),
        Some((counters, None)) => {
            (format!("reason-{}", counters.of(Counter::Reason)), "a reason of another version".to_owned())
        }
    };
    json!({
        "descriptor": socket.descriptor,
        "local": kernel.map(|kernel| kernel.local.to_string()),
        "remote": kernel.filter(|_| !listens(socket)).map(|kernel| kernel.remote.to_string()),
        "state": kernel.map(|kernel| kernel.state.name()),
        "lane": counters.map(|counters| way(counters, LANE)),
        "tcp": counters.map(|counters| way(counters, TCP)),
        "lane_share": counters.filter(|counters| counters.bytes() > 0)
            .map(|counters| counters.lane_bytes() as f64 / counters.bytes() as f64),
        "sleeps": counters.map(|counters| counters.of(Counter::Sleeps)),
        "spins": counters.map(|counters| counters.of(Counter::Spins)),
        "spins_good": counters.map(|counters| counters.of(Counter::SpinsGood)),
        "calls_avoided": counters.map(|counters| counters.of(Counter::CallsAvoided)),
        "full_bytes": counters.map(|counters| counters.of(Counter::FullBytes)),
        "reason": reason,
        "reason_words": words,
    })
}

fn way(counters: &Counters, [bytes_in, calls_in, bytes_out, calls_out]: [Counter; 4]) -> Value {
    json!({
        "bytes_in": counters.of(bytes_in), "messages_in": counters.of(calls_in),
        "bytes_out": counters.of(bytes_out), "messages_out": counters.of(calls_out),
    })
}

/// A reason's name for programs: `OtherEnd` is `other-end`.
fn name(reason: Reason) -> String {
    let mut name = String::new();
    for letter in format!("{reason:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

/// Of the JSON object; docs/protocol/explain.md describes it.
const JSON_VERSION: u32 = 1;
const COLUMNS: usize = 100;
const INDENT: &str = "        ";
const UNKNOWN_WORDS: &str = "not known to the library: it came from outside, or was made by a system call of its own";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_sockets::KernelSocket;

    fn socket(descriptor: u32, counters: Option<Counters>) -> Socket {
        Socket { place: Some(0), descriptor, kernel: None, counters }
    }

    fn process(sockets: Vec<Socket>) -> Process {
        Process {
            number: 77,
            user: 1000,
            program: "redis-server".to_owned(),
            switched_off: false,
            plain: None,
            sockets,
        }
    }

    fn paired() -> Counters {
        Counters::sample(&[
            (Counter::LaneBytesIn, 1_200_000_000),
            (Counter::LaneCallsIn, 1_000_000),
            (Counter::LaneBytesOut, 999),
            (Counter::TcpBytesIn, 800),
            (Counter::TcpCallsIn, 8),
            (Counter::Sleeps, 42),
            (Counter::Spins, 200),
            (Counter::SpinsGood, 150),
            (Counter::CallsAvoided, 1_999_999),
            (Counter::Reason, Reason::Paired as u64),
        ])
    }

    #[test]
    fn the_text_is_aligned_and_tells_everything() {
        let told = text(&[process(vec![socket(8, Some(paired()))])], false);
        let expected = "\
process 77 of user 1000: redis-server
    fd  by        received    messages        sent    messages       share
     8  not connected, or not told by the kernel
        lane       1.20 GB      1.00 M       999 B           0      99.9 %
        TCP          800 B           8         0 B           0       0.1 %
        42 sleeps, 200 spins (75.0 % found something), 2.00 M system calls avoided, 0 B found the
        lane full
        paired; by TCP went what nobody was looking for, or what found the lane full
";
        assert_eq!(told, expected, "\n{told}");
    }

    #[test]
    fn no_line_is_wider_than_a_terminal() {
        for number in 0..=99 {
            let widest = [
                Counter::LaneBytesIn,
                Counter::TcpBytesIn,
                Counter::LaneCallsIn,
                Counter::Spins,
                Counter::SpinsGood,
                Counter::FullBytes,
            ]
            .map(|counter| (counter, u64::MAX / 4));
            let mut values = widest.to_vec();
            values.push((Counter::Reason, number));
            let told = text(&[process(vec![socket(u32::MAX, Some(Counters::sample(&values))), socket(1, None)])], true);
            let too_wide = told.lines().find(|line| line.chars().count() > COLUMNS || line.ends_with(' '));
            assert_eq!(too_wide, None, "{told}");
        }
    }

    #[test]
    fn the_longest_addresses_are_told_whole() {
        let address: std::net::SocketAddr = "[2001:db8:1111:2222:3333:4444:5555:6666]:65535".parse().unwrap();
        let mut longest = socket(65_535, Some(paired()));
        longest.kernel = Some(KernelSocket { local: address, remote: address, state: State::ESTABLISHED });
        let told = text(&[process(vec![longest])], false);
        assert_eq!(told.matches(&address.to_string()).count(), 2, "{told}");
        assert_eq!(told.lines().find(|line| line.chars().count() > COLUMNS), None, "{told}");
    }

    /// A line that is exactly full ends there, and the next word begins the next line.
    #[test]
    fn no_two_words_are_glued_where_a_line_is_exactly_full() {
        for length in 1..=COLUMNS {
            let words = format!("{} after it", "x".repeat(length));
            let mut told = String::new();
            wrap(&words, &mut told);
            assert_eq!(told.split_whitespace().collect::<Vec<_>>().join(" "), words, "{told:?}");
        }
    }

    #[test]
    fn a_process_that_runs_plain_is_listed_with_its_reason() {
        let mut plain = process(Vec::new());
        plain.plain = Some(highwire_lane::program::Unfit::Static.into());
        let told = text(std::slice::from_ref(&plain), false);
        assert!(told.starts_with("process 77 of user 1000: redis-server\n        runs plain: it is linked"), "{told}");
        let told = object(&[plain], false);
        assert_eq!((&told["processes"][0]["plain"], &told["processes"][0]["sockets"]), (&json!("static"), &json!([])));
        assert_eq!(object(&[process(Vec::new())], false)["processes"][0]["plain"], Value::Null);
    }

    #[test]
    fn idle_sockets_are_left_out_unless_all_are_asked_for() {
        let idle = || process(vec![socket(3, Some(Counters::sample(&[(Counter::Sleeps, 1)])))]);
        assert!(text(&[idle()], false).contains("--all shows 1 socket\n"));
        assert_eq!(object(&[idle()], false)["processes"][0]["sockets"], json!([]));
        assert!(text(&[idle()], true).contains("not used enough yet"));
        assert_eq!(object(&[idle()], true)["processes"][0]["sockets"][0]["reason"], "young");
    }

    #[test]
    fn what_the_library_does_not_know_is_null_and_not_zero() {
        let told = socket_object(&socket(4, None));
        assert_eq!((&told["lane"], &told["tcp"], &told["sleeps"]), (&Value::Null, &Value::Null, &Value::Null));
        assert_eq!(told["reason"], "unknown-socket");
    }

    #[test]
    fn the_document_has_every_name_and_every_reason() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/protocol/explain.md");
        let document = std::fs::read_to_string(path).unwrap();
        let reasons: Vec<Reason> = (0..).map_while(Reason::from_number).collect();
        assert!(reasons.len() > 10);
        let object = object(&[process(vec![socket(8, Some(paired()))])], false);
        let mut names: Vec<String> = reasons.into_iter().map(name).collect();
        for part in ["", "/processes/0", "/processes/0/sockets/0", "/processes/0/sockets/0/lane"] {
            names.extend(object.pointer(part).unwrap().as_object().unwrap().keys().cloned());
        }
        names.extend(highwire_lane::program::Unfit::ALL.map(|unfit| unfit.name().to_owned()));
        names.push(crate::run::UNPREPARED.to_owned());
        for name in names {
            assert!(document.contains(&format!("`{name}`")), "`{name}` is missing in {path}");
        }
    }
}
