//! `highwire top`: the traffic of programs that are run with Highwire, as it is now.

use crate::explain::NO_PROCESS;
use crate::figures::{bytes_rate, rate};
use crate::processes::{self, Counters, Process, Socket};
use clap::Args;
use highwire_lane::counters::Counter;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Signal;
use rustix::termios::{LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use std::collections::HashMap;
use std::fmt::Write;
use std::io::{stdin, stdout};
use std::time::{Duration, Instant};

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Seconds from one look to the next
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_interval)]
    interval: f64,
    /// Print one block, of one interval, and end
    #[arg(long)]
    once: bool,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("write seconds from 0.1 to 3600".to_owned()),
    }
}

pub(crate) fn run(args: &TopArgs) -> anyhow::Result<()> {
    let interval = Duration::from_secs_f64(args.interval);
    if args.once || !isatty(stdin()) || !isatty(stdout()) { print_blocks(interval, args.once) } else { watch(interval) }
}

/// One block after the other, for files and pipes.
fn print_blocks(interval: Duration, once: bool) -> anyhow::Result<()> {
    let mut before = Look::now()?;
    loop {
        std::thread::sleep(interval);
        let now = Look::now()?;
        let lines = block(&now.traffic_since(&before), COLUMNS);
        crate::print(&(lines.join("\n") + if once { "\n" } else { "\n\n" }))?;
        if once {
            return Ok(());
        }
        before = now;
    }
}

/// The same place of a terminal again and again, until somebody has seen enough.
fn watch(interval: Duration) -> anyhow::Result<()> {
    let mut before = Look::now()?;
    let mut screen = Screen::enter()?;
    screen.show(vec!["highwire top: looking for the first time …".to_owned()])?;
    loop {
        match screen.wait(interval)? {
            Key::None => {}
            Key::Quit => return Ok(()),
            Key::Suspend => {
                drop(screen);
                // Stops here until the shell's `fg`.
                rustix::process::kill_process(rustix::process::getpid(), Signal::TSTP)?;
                screen = Screen::enter()?;
            }
        }
        let now = Look::now()?;
        screen.show(block(&now.traffic_since(&before), screen.size().0))?;
        before = now;
    }
}

/// What all processes told at one moment.
struct Look {
    at: Instant,
    processes: Vec<Process>,
}

/// In a second, received and sent together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Traffic {
    lane_messages: f64,
    tcp_messages: f64,
    lane_bytes: f64,
    tcp_bytes: f64,
    calls_avoided: f64,
}

/// The traffic of a process and of its connections, the busiest first.
#[derive(Debug)]
struct ProcessTraffic {
    number: u32,
    name: String,
    total: Traffic,
    connections: Vec<(u32, String, Traffic)>,
}

impl Look {
    fn now() -> anyhow::Result<Look> {
        Ok(Look { processes: processes::all()?, at: Instant::now() })
    }

    fn traffic_since(&self, before: &Look) -> Vec<ProcessTraffic> {
        let seconds = self.at.duration_since(before.at).as_secs_f64().max(1e-3);
        let key = |process: &Process, socket: &Socket| (process.number, socket.place, socket.descriptor);
        let earlier: HashMap<_, &Counters> = before
            .processes
            .iter()
            .flat_map(|process| process.sockets.iter().map(move |socket| (key(process, socket), socket)))
            .filter_map(|(key, socket)| Some((key, socket.counters.as_ref()?)))
            .collect();
        let mut all: Vec<ProcessTraffic> = self
            .processes
            .iter()
            .map(|process| {
                let mut connections: Vec<(u32, String, Traffic)> = process
                    .sockets
                    .iter()
                    .filter(|socket| socket.is_used())
                    .filter_map(|socket| {
                        let traffic = Traffic::of(
                            socket.counters.as_ref()?,
                            earlier.get(&key(process, socket)).copied(),
                            seconds,
                        );
                        Some((socket.descriptor, addresses(socket), traffic))
                    })
                    .collect();
                connections.sort_by(|(_, _, one), (_, _, other)| other.order(one));
                let total = connections.iter().fold(Traffic::default(), |sum, (_, _, each)| sum.plus(each));
                let state = if process.switched_off { " (switched off)" } else { "" };
                let name = format!("{}{state}", process.program);
                ProcessTraffic { number: process.number, name, total, connections }
            })
            .collect();
        all.sort_by(|one, other| other.total.order(&one.total));
        all
    }
}

impl Traffic {
    /// From what was counted before, if the connection was there before.
    fn of(now: &Counters, before: Option<&Counters>, seconds: f64) -> Traffic {
        // Counters never shrink; if they do it is another connection, in the place of one that ended.
        let before = before.filter(|before| COUNTED.iter().all(|counter| before.of(*counter) <= now.of(*counter)));
        let since = |counters: &[Counter]| {
            let sum: u64 = counters
                .iter()
                .map(|counter| now.of(*counter) - before.map_or(0, |before| before.of(*counter)))
                .fold(0, u64::saturating_add);
            sum as f64 / seconds
        };
        Traffic {
            lane_messages: since(&[Counter::LaneCallsIn, Counter::LaneCallsOut]),
            tcp_messages: since(&[Counter::TcpCallsIn, Counter::TcpCallsOut]),
            lane_bytes: since(&[Counter::LaneBytesIn, Counter::LaneBytesOut]),
            tcp_bytes: since(&[Counter::TcpBytesIn, Counter::TcpBytesOut]),
            calls_avoided: since(&[Counter::CallsAvoided]),
        }
    }

    fn plus(self, other: &Traffic) -> Traffic {
        Traffic {
            lane_messages: self.lane_messages + other.lane_messages,
            tcp_messages: self.tcp_messages + other.tcp_messages,
            lane_bytes: self.lane_bytes + other.lane_bytes,
            tcp_bytes: self.tcp_bytes + other.tcp_bytes,
            calls_avoided: self.calls_avoided + other.calls_avoided,
        }
    }

    /// Less traffic is less.
    fn order(&self, other: &Traffic) -> std::cmp::Ordering {
        let bytes = |traffic: &Traffic| traffic.lane_bytes + traffic.tcp_bytes;
        let messages = |traffic: &Traffic| traffic.lane_messages + traffic.tcp_messages;
        bytes(self).total_cmp(&bytes(other)).then(messages(self).total_cmp(&messages(other)))
    }

    fn cells(&self) -> [String; 5] {
        [
            rate(self.lane_messages),
            rate(self.tcp_messages),
            bytes_rate(self.lane_bytes),
            bytes_rate(self.tcp_bytes),
            rate(self.calls_avoided),
        ]
    }
}

const COUNTED: [Counter; 9] = [
    Counter::LaneBytesIn,
    Counter::LaneCallsIn,
    Counter::TcpBytesIn,
    Counter::TcpCallsIn,
    Counter::LaneBytesOut,
    Counter::LaneCallsOut,
    Counter::TcpBytesOut,
    Counter::TcpCallsOut,
    Counter::CallsAvoided,
];

fn addresses(socket: &Socket) -> String {
    match &socket.kernel {
        Some(kernel) => format!("{} — {}", kernel.local, kernel.remote),
        None => "not told by the kernel".to_owned(),
    }
}

/// The lines of a block, none wider than that.
fn block(all: &[ProcessTraffic], columns: usize) -> Vec<String> {
    if all.is_empty() {
        return vec![fit("highwire top", columns), fit(NO_PROCESS, columns)];
    }
    let connections: usize = all.iter().map(|process| process.connections.len()).sum();
    let width = columns.saturating_sub(row("", "", "", 0, &Default::default()).chars().count()).clamp(12, 100);
    let mut lines = vec![
        format!("highwire top: {}, {}", plural(all.len(), "process", "es"), plural(connections, "connection", "s")),
        format!("{:>indent$}{:>22}{:>10}", "messages/s", "bytes", "calls", indent = 15 + width + 18),
        row("pid", "fd", "connection", width, &["lane", "TCP", "lane", "TCP", "avoided/s"].map(str::to_owned)),
    ];
    for process in all {
        lines.push(row(&process.number.to_string(), "", &process.name, width, &process.total.cells()));
        for (descriptor, name, traffic) in &process.connections {
            lines.push(row("", &descriptor.to_string(), name, width, &traffic.cells()));
        }
    }
    lines.iter().map(|line| fit(line.trim_end(), columns)).collect()
}

fn row(process: &str, descriptor: &str, name: &str, width: usize, cells: &[String; 5]) -> String {
    let mut row = format!("{process:>7} {descriptor:>5}  {:<width$}", fit(name, width));
    for (cell, width) in cells.iter().zip([9, 9, 11, 11, 10]) {
        let _ = write!(row, "{cell:>width$}");
    }
    row
}

/// As much of a text as so many columns take.
fn fit(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(columns.saturating_sub(1)).collect();
    cut.push('…');
    cut
}

fn plural(count: usize, name: &str, ending: &str) -> String {
    format!("{count} {name}{}", if count == 1 { "" } else { ending })
}

/// A terminal that shows one page and tells of keys at once. Dropping it leaves everything as it was.
struct Screen {
    before: Termios,
}

enum Key {
    None,
    Quit,
    Suspend,
}

impl Screen {
    fn enter() -> anyhow::Result<Screen> {
        let before = tcgetattr(stdin())?;
        let mut now = before.clone();
        // Ctrl-C is a key like others: whoever ends by a signal leaves the terminal as it is.
        now.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN;
        tcsetattr(stdin(), OptionalActions::Now, &now)?;
        let screen = Screen { before };
        crate::print("\x1b[?1049h\x1b[?25l")?;
        Ok(screen)
    }

    /// Columns and lines.
    fn size(&self) -> (usize, usize) {
        match tcgetwinsize(stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
            _ => (COLUMNS, 24),
        }
    }

    fn show(&self, mut lines: Vec<String>) -> anyhow::Result<()> {
        let (columns, rows) = self.size();
        let room = rows.saturating_sub(2).max(1);
        if lines.len() > room {
            let hidden = lines.len() - (room - 1);
            lines.truncate(room - 1);
            lines.push(fit(&format!("… and {}", plural(hidden, "line", "s")), columns));
        }
        let mut page = String::from("\x1b[H");
        for line in &lines {
            let _ = write!(page, "{line}\x1b[K\r\n");
        }
        let _ = write!(page, "\x1b[J\x1b[{rows};1H{}\x1b[K", fit("q ends", columns));
        crate::print(&page)
    }

    /// Until the time has passed, or a key says something.
    fn wait(&self, time: Duration) -> anyhow::Result<Key> {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Key::None);
            }
            let input = stdin();
            let mut polled = [PollFd::new(&input, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&Timespec::try_from(left)?)) {
                Ok(0) => return Ok(Key::None),
                Ok(_) => {}
                // A signal, such as that of a window that changes its size.
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let mut keys = [0; 64];
            let length = rustix::io::read(&input, &mut keys)?;
            match keys[..length].iter().find(|key| b"qQ\x03\x1a".contains(key)) {
                Some(b'\x1a') => return Ok(Key::Suspend),
                Some(_) => return Ok(Key::Quit),
                // The terminal is gone.
                None if length == 0 => return Ok(Key::Quit),
                None => {}
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing.
        let _ = crate::print("\x1b[?25h\x1b[?1049l");
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.before);
    }
}

const COLUMNS: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    fn look(at: Instant, processes: Vec<(u32, Vec<(u32, Counters)>)>) -> Look {
        let socket = |(descriptor, counters): (u32, Counters)| Socket {
            place: Some(descriptor as usize),
            descriptor,
            kernel: None,
            counters: Some(counters),
        };
        let process = |(number, sockets): (u32, Vec<(u32, Counters)>)| Process {
            number,
            user: 0,
            program: format!("program-{number}"),
            switched_off: number == 2,
            plain: None,
            sockets: sockets.into_iter().map(socket).collect(),
        };
        Look { at, processes: processes.into_iter().map(process).collect() }
    }

    fn counted(lane_in: u64, tcp_out: u64) -> Counters {
        Counters::sample(&[
            (Counter::LaneBytesIn, 100 * lane_in),
            (Counter::LaneCallsIn, lane_in),
            (Counter::CallsAvoided, lane_in),
            (Counter::TcpBytesOut, 100 * tcp_out),
            (Counter::TcpCallsOut, tcp_out),
        ])
    }

    #[test]
    fn traffic_is_what_came_since_the_last_look_by_the_second() {
        let began = Instant::now();
        let before = look(began, vec![(1, vec![(3, counted(1000, 10)), (4, counted(5, 5))])]);
        let now = look(
            began + Duration::from_secs(2),
            vec![(1, vec![(3, counted(1200, 10)), (4, counted(5, 5))]), (2, vec![(3, counted(4_000_000, 0))])],
        );
        let all = now.traffic_since(&before);
        assert_eq!(all.iter().map(|process| process.number).collect::<Vec<_>>(), [2, 1], "the busiest first");
        assert!(all[0].name.contains("switched off") && !all[1].name.contains("switched off"));
        let first = &all[1].connections[0];
        assert_eq!(first.0, 3);
        let expected =
            Traffic { lane_messages: 100.0, lane_bytes: 10_000.0, calls_avoided: 100.0, ..Traffic::default() };
        assert_eq!(first.2, expected);
        assert_eq!(all[1].connections[1].2, Traffic::default(), "quiet since");
        assert_eq!(all[1].total, first.2);
        // A connection that was not there before has carried everything since.
        assert_eq!(all[0].total.lane_messages, 2_000_000.0);
    }

    #[test]
    fn a_connection_in_the_place_of_an_earlier_one_begins_at_zero() {
        let now = counted(50, 7);
        assert_eq!(Traffic::of(&now, Some(&counted(1000, 0)), 1.0), Traffic::of(&now, None, 1.0));
        assert_eq!(Traffic::of(&now, Some(&counted(50, 7)), 1.0), Traffic::default());
    }

    #[test]
    fn a_block_fits_its_terminal() {
        let began = Instant::now();
        let before = look(began, Vec::new());
        let sockets = vec![(3, counted(u64::MAX / 100, 3)), (70_000, counted(1, u64::MAX / 100))];
        let all = look(began + Duration::from_millis(100), vec![(4_194_304, sockets)]).traffic_since(&before);
        for columns in [1, 10, 40, 80, 100, 300] {
            for lines in [block(&all, columns), block(&[], columns)] {
                assert_eq!(lines.iter().find(|line| line.chars().count() > columns), None);
            }
        }
        let wide = block(&all, 100);
        assert_eq!(wide[0], "highwire top: 1 process, 2 connections");
        assert_eq!(wide.len(), 3 + 3);
    }
}
