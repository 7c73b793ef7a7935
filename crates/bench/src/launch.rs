//! Programs that a measurement starts: each on a CPU of its own, plain or under `highwire run`, and gone with the
//! process that started it.

use crate::BenchError;
use crate::pair::{die_with, own_executable, pin};
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The hidden subcommand that becomes another program on a given CPU.
pub const OUTSIDER_COMMAND: &str = "bench-outsider";

/// What a process does whose first argument is [`OUTSIDER_COMMAND`]: it goes to `cpu`, makes sure to
/// end with `parent`, and becomes `program`. Returns only if that fails.
pub fn become_outsider(parent: u32, cpu: usize, program: &str, arguments: &[String]) -> BenchError {
    if let Err(error) = die_with(parent).and_then(|()| pin(&[cpu])) {
        return error;
    }
    BenchError::Start(Command::new(program).args(arguments).exec())
}

/// How a program is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// As it is.
    Plain,
    /// Under `highwire run`.
    Highwire,
}

/// A program that is to be started on this CPU; arguments are still to be given. What it prints can be read.
pub(crate) fn command(way: Way, cpu: usize, program: &Path) -> Result<Command, BenchError> {
    command_as(None, way, cpu, program)
}

/// The same as another user, which only root can do.
pub(crate) fn command_as(user: Option<&str>, way: Way, cpu: usize, program: &Path) -> Result<Command, BenchError> {
    let mut command = own_executable()?;
    // What follows is for the program, also where it looks like an option of ours.
    command.args([OUTSIDER_COMMAND, &std::process::id().to_string(), &cpu.to_string(), "--"]);
    if let Some(user) = user {
        command.args(become_user(user));
    }
    if way == Way::Highwire {
        command.arg(own_executable()?.get_program()).args(["run", "--"]);
    }
    command.arg(program).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// What a command begins with that is run as another user. With the user, the kernel forgets that a process is to end with
/// its parent.
pub(crate) fn become_user(user: &str) -> [String; 5] {
    let [reuid, regid] = ["reuid", "regid"].map(|name| format!("--{name}={user}"));
    ["setpriv".to_owned(), reuid, regid, "--clear-groups".to_owned(), "--pdeathsig=KILL".to_owned()]
}

/// Why programs are run without lanes here although `highwire run` starts them: figures of them would be those of plain
/// ones.
pub(crate) fn runs_plain() -> Result<Option<String>, BenchError> {
    let said = own_executable()?.args(["run", "--", "true"]).stdin(Stdio::null()).output();
    let said = said.map_err(BenchError::Start)?;
    Ok(plainly(&String::from_utf8_lossy(&said.stderr)))
}

fn plainly(said: &str) -> Option<String> {
    let line = said.lines().find(|line| line.contains(" runs plain: "))?;
    Some(format!("`highwire run` GIVES PROGRAMS NO LANES HERE, and its rows say nothing: {line}"))
}

/// What a program that has ended leaves.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) output: String,
    /// CPU seconds of it and of its children, in themselves and in the kernel.
    pub(crate) cpu_seconds: f64,
}

/// Waits for a child that prints little; an error is what it said last.
pub(crate) fn finish(child: Child, patience: Duration) -> Result<Ended, String> {
    let mut child = child;
    let deadline = Instant::now() + patience;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let ended = loop {
        match pid.map(|pid| waitid(WaitId::Pid(pid), options)) {
            Some(Ok(Some(_))) => break true,
            Some(Ok(None)) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(4)),
            _ => break false,
        }
    };
    // For as long as nobody has waited for it in earnest, the kernel keeps what it used.
    let cpu_seconds = if ended { Usage::of_process(child.id()).seconds() } else { 0.0 };
    if !ended {
        let _ = child.kill();
    }
    let output = child.wait_with_output().map_err(|error| error.to_string())?;
    if ended && output.status.success() {
        return Ok(Ended { output: String::from_utf8_lossy(&output.stdout).into_owned(), cpu_seconds });
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
    let status = if ended { output.status.to_string() } else { format!("ended after {patience:?}") };
    Err(format!("{status}: {said}"))
}

/// CPU time as the kernel tells it, in ticks of which it leaves out what is not whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    ticks: u64,
    /// How many counters that is the sum of.
    counters: u64,
}

impl Usage {
    /// Of a process, which may have ended if nobody has waited for it, and of its children that were waited for.
    pub(crate) fn of_process(process: u32) -> Usage {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        Stat::parse(&stat).map_or(Usage::default(), |stat| stat.usage)
    }

    /// Of all processes of a group, and of their children that were waited for.
    pub(crate) fn of_group(group: u32) -> Usage {
        let Ok(processes) = std::fs::read_dir("/proc") else { return Usage::default() };
        let stats = processes.filter_map(|process| std::fs::read_to_string(process.ok()?.path().join("stat")).ok());
        let of_group = stats.filter_map(|stat| Stat::parse(&stat)).filter(|stat| stat.group == group);
        of_group.fold(Usage::default(), |sum, Stat { usage, .. }| Usage {
            ticks: sum.ticks + usage.ticks,
            counters: sum.counters + usage.counters,
        })
    }

    /// Of everybody on this machine, and what was taken from it as a whole.
    pub(crate) fn of_machine() -> Usage {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        Usage::parse_machine(&stat).unwrap_or_default()
    }

    fn parse_machine(stat: &str) -> Option<Usage> {
        let fields: Vec<u64> = stat.lines().next()?.split_whitespace().filter_map(|field| field.parse().ok()).collect();
        // Interrupts are left out: what they do for a process is counted there.
        let [user, nice, system, _idle, _waiting, _interrupts, _softer, stolen, ..] = fields[..] else { return None };
        Some(Usage { ticks: user + nice + system + stolen, counters: 4 })
    }

    /// Of both.
    pub(crate) fn and(self, other: Usage) -> Usage {
        Usage { ticks: self.ticks + other.ticks, counters: self.counters + other.counters }
    }

    /// Seconds of all of it, half a tick for what each counter leaves out.
    pub(crate) fn seconds(self) -> f64 {
        (self.ticks as f64 + self.counters as f64 / 2.0) / rustix::param::clock_ticks_per_second() as f64
    }

    /// Seconds since an earlier time.
    pub(crate) fn seconds_since(self, earlier: Usage) -> f64 {
        self.ticks.saturating_sub(earlier.ticks) as f64 / rustix::param::clock_ticks_per_second() as f64
    }
}

/// What is needed of `/proc/PID/stat`.
struct Stat {
    group: u32,
    usage: Usage,
}

impl Stat {
    fn parse(text: &str) -> Option<Stat> {
        // The name of the program may have anything in it, and ends with the last bracket.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |place: usize| fields.get(place)?.parse::<u64>().ok();
        let ticks = [11, 12, 13, 14].into_iter().map(number).sum::<Option<u64>>()?;
        let counters = [11, 12].into_iter().filter(|place| number(*place).is_some()).count() as u64;
        Some(Stat { group: u32::try_from(number(2)?).ok()?, usage: Usage { ticks, counters } })
    }
}

/// A port that nobody has right now.
pub(crate) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Where a program is. Administrators' programs are often not on the path of other users.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    places.map(|place| place.join(program)).find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn a_program_that_fails_is_quoted() {
        let child = shell("echo first >&2; echo no such device >&2; exit 3");
        let why = finish(child, Duration::from_secs(5)).unwrap_err();
        assert!(why.contains("no such device") && why.contains('3'), "{why}");
    }

    #[test]
    fn figures_of_programs_that_run_plain_are_told_to_be_so() {
        let said = plainly("highwire: true runs plain: there is no room for its library\n").unwrap();
        assert!(said.contains("NO LANES HERE") && said.ends_with("there is no room for its library"), "{said}");
        assert_eq!(plainly("highwire: 1 connection got a lane\n"), None);
    }

    #[test]
    fn a_program_that_does_not_end_is_ended() {
        let why = finish(shell("echo never >&2; exec sleep 60"), Duration::from_millis(100)).unwrap_err();
        assert!(why.contains("never") && why.contains("100ms"), "{why}");
    }

    #[test]
    fn what_a_program_and_its_children_used_is_counted() {
        let busy = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let ended = finish(shell(&format!("({busy}); {busy}; echo done")), Duration::from_secs(60)).unwrap();
        assert_eq!(ended.output, "done\n");
        assert!(ended.cpu_seconds > 0.02, "{} seconds for 400,000 steps of a shell", ended.cpu_seconds);
        let idle = finish(shell("sleep 0.3"), Duration::from_secs(60)).unwrap();
        assert!(idle.cpu_seconds < 0.1, "{} seconds asleep", idle.cpu_seconds);
    }

    #[test]
    fn the_kernels_line_on_a_process_is_read_whatever_its_name() {
        let stat = Stat::parse("71 (a) name (1 2) S 1 4711 70 0 -1 4194304 1 2 3 4 50 60 7 8 20 0 1 0").unwrap();
        assert_eq!((stat.group, stat.usage), (4711, Usage { ticks: 125, counters: 2 }));
        assert!(Stat::parse("71 (short) S 1 2").is_none() && Stat::parse("").is_none());
        let machine = "cpu  1000 20 300 99999 50 60 70 4 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(Usage::parse_machine(machine), Some(Usage { ticks: 1324, counters: 4 }));
        assert_eq!(Usage::parse_machine("cpu 1 2 3"), None);
        let earlier = Usage { ticks: 100, counters: 2 };
        assert!(
            (stat.usage.seconds_since(earlier) - 25.0 / rustix::param::clock_ticks_per_second() as f64).abs() < 1e-9
        );
    }
}
