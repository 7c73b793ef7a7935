//! `bench lane`: a plain C program at each end of a stream socket, started as it is or under `highwire run`.
//!
//! Both processes of the measurement start one end each, on a CPU of its own, and tell it what to do over a pipe. It
//! takes the time itself, and both sleep meanwhile. Ends stay connected for the whole run.

use super::{Contestant, Exercise, Timing, Transport};
use crate::BenchError;
use crate::folder::Folder;
use crate::launch::{self, Way, finish};
use crate::pair::{Link, PATIENCE, Role};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Writes the program to where both processes start it from.
pub(crate) fn unpack(folder: &Folder, name: &str, program: &[u8]) -> Result<PathBuf, BenchError> {
    use std::os::unix::fs::PermissionsExt;
    if program.is_empty() {
        return Err(BenchError::NotCompiled);
    }
    let path = folder.write(name, program)?;
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))?;
    Ok(path)
}

/// How a contestant's two ends are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ends {
    server: Way,
    client: Way,
    family: &'static str,
    wait: &'static str,
    one_core: bool,
}

impl Ends {
    fn of(contestant: Contestant) -> Ends {
        let tcp = |way, wait| Ends { server: way, client: way, family: "tcp", wait, one_core: false };
        match contestant {
            Contestant::RunSpin => tcp(Way::Highwire, "spin"),
            Contestant::RunBlock => tcp(Way::Highwire, "block"),
            Contestant::RunOneEnd => Ends { client: Way::Plain, ..tcp(Way::Highwire, "block") },
            Contestant::RunBlockOneCore => Ends { one_core: true, ..tcp(Way::Highwire, "block") },
            Contestant::TcpBlockOneCore => Ends { one_core: true, ..tcp(Way::Plain, "block") },
            Contestant::TcpSpin => tcp(Way::Plain, "spin"),
            Contestant::TcpBlock => tcp(Way::Plain, "block"),
            Contestant::UnixSpin => Ends { family: "unix", ..tcp(Way::Plain, "spin") },
            _ => unreachable!("{contestant} has no part in `bench lane`"),
        }
    }
}

/// A program that is told line by line what to do, and answers with a line each.
pub(crate) struct Talking {
    name: &'static str,
    /// None once it has failed, and was waited for.
    child: Option<Child>,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Talking {
    /// Starts it; what it says first is still to be heard.
    pub(crate) fn start(name: &'static str, mut command: Command) -> Result<Talking, BenchError> {
        let mut child = command.stdin(Stdio::piped()).spawn().map_err(BenchError::Start)?;
        let (Some(commands), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both were asked for")
        };
        Ok(Talking { name, child: Some(child), commands, answers: BufReader::new(answers) })
    }

    /// Its number; none once it has failed.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Tells it a line, and waits for what it says to it.
    pub(crate) fn ask(&mut self, line: &str) -> Result<String, BenchError> {
        if self.commands.write_all(format!("{line}\n").as_bytes()).is_err() {
            return Err(self.failed());
        }
        self.hear()
    }

    /// The next line that it prints. It ends by itself if it waits in vain.
    pub(crate) fn hear(&mut self) -> Result<String, BenchError> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(length) if length > 0 => Ok(line.trim_end().to_owned()),
            _ => Err(self.failed()),
        }
    }

    pub(crate) fn misunderstood(&self, said: &str) -> BenchError {
        BenchError::Program { name: self.name, why: format!("not understood: {said:?}") }
    }

    fn failed(&mut self) -> BenchError {
        let why = self.child.take().map(|child| match finish(child, PATIENCE) {
            Ok(_) => "it has ended".to_owned(),
            Err(why) => why,
        });
        BenchError::Program { name: self.name, why: why.unwrap_or_default() }
    }
}

impl Drop for Talking {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One end of it.
pub(crate) struct Program {
    talking: Talking,
    timing: Option<Timing>,
}

impl Program {
    /// Starts both ends, the peer's first; both sides call this.
    pub(crate) fn meet(
        contestant: Contestant,
        link: &mut Link,
        program: &Path,
    ) -> Result<Box<dyn Transport>, BenchError> {
        let ends = Ends::of(contestant);
        let (first, second) = link.cpus();
        let started = match link.role {
            Role::Peer => {
                let cpu = if ends.one_core { first } else { second };
                let place = match ends.family {
                    "unix" => program.with_file_name(contestant.name()).display().to_string(),
                    _ => "0".to_owned(),
                };
                let (server, place) = Program::start(contestant, ends.server, "listen", &place, cpu, program)?;
                link.tell(&place, &[])?;
                server
            }
            Role::Driver => {
                let (place, _) = link.hear::<String>()?;
                Program::start(contestant, ends.client, "connect", &place, first, program)?.0
            }
        };
        Ok(Box::new(started))
    }

    /// One end, and what it says first.
    fn start(
        contestant: Contestant,
        way: Way,
        role: &str,
        place: &str,
        cpu: usize,
        program: &Path,
    ) -> Result<(Program, String), BenchError> {
        let Ends { family, wait, .. } = Ends::of(contestant);
        let mut command = launch::command(way, cpu, program)?;
        command.args([role, family, place, wait, &cpu.to_string()]);
        let mut talking = Talking::start(contestant.name(), command)?;
        let said = talking.hear()?;
        Ok((Program { talking, timing: None }, said))
    }

    fn burst(&mut self, kind: &str, size: usize, warm: usize, count: usize) -> Result<(), BenchError> {
        let said = self.talking.ask(&format!("{kind} {size} {warm} {count}"))?;
        let numbers: Vec<u64> = said.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [nanoseconds, waited_ns] = numbers[..] else {
            return Err(self.talking.misunderstood(&said));
        };
        self.timing = Some(Timing { nanoseconds: nanoseconds as f64, waited_ns });
        Ok(())
    }
}

impl Transport for Program {
    fn ping(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.burst("ping", size, warm(Exercise::PingPong, size, count), count)
    }

    fn pong(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.ping(size, count)
    }

    fn pour(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.burst("blast", size, warm(Exercise::Stream, size, count), count)
    }

    fn drain(&mut self, size: usize, count: usize) -> Result<(), BenchError> {
        self.pour(size, count)
    }

    fn warms_itself(&self) -> bool {
        true
    }

    fn take_timing(&mut self) -> Option<Timing> {
        self.timing.take()
    }
}

/// Messages before the clock starts. A lane needs some exchanges before it is there, and a window some bytes before it
/// is open.
fn warm(exercise: Exercise, size: usize, count: usize) -> usize {
    match exercise {
        Exercise::PingPong => (count / 8).max(WARM_EXCHANGES),
        _ => (WARM_BYTES / size).clamp(WARM_MESSAGES_LEAST, WARM_MESSAGES_MAX),
    }
}

/// The program, as the build made it.
pub(crate) const PINGPONG: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pingpong"));

const WARM_EXCHANGES: usize = 40;
const WARM_BYTES: usize = 1 << 20;
const WARM_MESSAGES_LEAST: usize = 4;
const WARM_MESSAGES_MAX: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bench;

    #[test]
    fn everybody_has_two_ends_and_only_highwires_own_are_started_by_it() {
        for contestant in Bench::Lane.contestants() {
            let ends = Ends::of(*contestant);
            let highwire = [ends.server, ends.client].into_iter().filter(|way| *way == Way::Highwire).count();
            let expected = match contestant.name() {
                "run-one-end" => 1,
                name if name.starts_with("run-") => 2,
                _ => 0,
            };
            assert_eq!(highwire, expected, "{contestant}");
            assert_eq!(ends.one_core, contestant.name().ends_with("one-core"), "{contestant}");
            assert_eq!(ends.wait == "spin", contestant.name().ends_with("spin"), "{contestant}");
        }
    }

    #[test]
    fn lanes_have_their_exchanges_before_the_clock_starts() {
        assert_eq!(warm(Exercise::PingPong, 4, 10), 40);
        assert_eq!(warm(Exercise::PingPong, 4, 8000), 1000);
        assert_eq!(warm(Exercise::Stream, 1 << 20, 10), 4);
        assert_eq!(warm(Exercise::Stream, 64, 10), 2000);
    }

    #[test]
    fn the_program_refuses_what_it_does_not_understand() {
        let path = std::env::temp_dir().join(format!("highwire-pingpong-{}", std::process::id()));
        let folder = Folder::make(&path).unwrap();
        let program = unpack(&folder, "pingpong", PINGPONG).unwrap();
        let refused = Command::new(&program).arg("listen").output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("usage: pingpong"));
        assert!(matches!(unpack(&folder, "nothing", &[]), Err(BenchError::NotCompiled)));
    }
}
