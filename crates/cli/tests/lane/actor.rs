//! A process of a test: what it says, how it ends, and that it does end.

use crate::ground::PATIENCE;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A running program. Dropping it ends it, and whatever it started in its process group.
pub struct Actor {
    name: String,
    child: Child,
    group: rustix::process::Pid,
    input: Option<ChildStdin>,
    output: Receiver<String>,
    heard: Vec<String>,
    errors: Option<JoinHandle<String>>,
}

/// What a program said, and how it ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub output: Vec<String>,
    pub errors: String,
}

impl Ended {
    /// What it said, if it ended well.
    pub fn well(self, name: &str) -> Vec<String> {
        assert!(
            self.status.success(),
            "{name} ended with {}:\n{}\n{}",
            self.status,
            self.output.join("\n"),
            self.errors
        );
        self.output
    }
}

impl Actor {
    /// Starts it in a process group of its own.
    pub fn start(name: &str, command: &mut Command) -> Actor {
        let mut child = command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {command:?}: {error}"));
        let group = rustix::process::Pid::from_child(&child);
        let (said, output) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.split(b'\n').map_while(Result::ok) {
                if said.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let input = child.stdin.take();
        Actor { name: name.to_owned(), child, group, input, output, heard: Vec::new(), errors: Some(errors) }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The next line, or `None` after this time, or when there is none to come.
    pub fn line(&mut self, within: Duration) -> Option<String> {
        match self.output.recv_timeout(within) {
            Ok(line) => {
                self.heard.push(line.clone());
                Some(line)
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
        }
    }

    /// What follows this word in the next line that begins with it.
    pub fn told(&mut self, word: &str) -> String {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            match self.line(PATIENCE.saturating_sub(began.elapsed())) {
                Some(line) if line.split(' ').next() == Some(word) => return line[word.len()..].trim().to_owned(),
                Some(_) => {}
                None => break,
            }
        }
        self.kill();
        let errors = self.stderr();
        panic!("{} said no {word:?}: {:?}\n{errors}", self.name, self.heard);
    }

    /// The port that it told of, if it did.
    pub fn port(&self) -> String {
        let told = self.heard.iter().rev().find_map(|line| line.strip_prefix("port "));
        told.unwrap_or_else(|| panic!("{} told of no port: {:?}", self.name, self.heard)).to_owned()
    }

    /// Its standard input ends.
    pub fn end_input(&mut self) {
        self.input = None;
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// A signal for the process itself.
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.group, signal).unwrap();
    }

    /// `kill -9`, for all of its group.
    pub fn kill(&mut self) {
        let _ = rustix::process::kill_process_group(self.group, rustix::process::Signal::KILL);
        let _ = self.child.wait();
    }

    /// How it ended, which it has to within the time that everything has.
    pub fn ended(mut self) -> Ended {
        self.end_input();
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if began.elapsed() > PATIENCE {
                let stacks = self.stacks();
                self.kill();
                self.heard.extend(self.output.try_iter());
                let errors = self.stderr();
                panic!("{} did not end: {:?}\n{errors}\n{stacks}", self.name, self.heard);
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        // Lines that were said before the end may still be on their way; who was left behind may say nothing more.
        let _ = rustix::process::kill_process_group(self.group, rustix::process::Signal::KILL);
        while let Ok(line) = self.output.recv_timeout(Duration::from_secs(2)) {
            self.heard.push(line);
        }
        let errors = self.stderr();
        Ended { status, output: std::mem::take(&mut self.heard), errors }
    }

    /// Everything it said, if it ends well.
    pub fn ended_well(self) -> Vec<String> {
        let name = self.name.clone();
        self.ended().well(&name)
    }

    fn stderr(&mut self) -> String {
        self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default()
    }

    /// In which system call each of its threads is: the first question about whoever does not end.
    fn stacks(&self) -> String {
        let mut text = String::new();
        for task in std::fs::read_dir(format!("/proc/{}/task", self.id())).into_iter().flatten().flatten() {
            let call = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
            text.push_str(&format!("thread {}: system call {call}", task.file_name().to_string_lossy()));
        }
        text
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs a command to its end.
pub fn run(name: &str, command: &mut Command) -> Ended {
    Actor::start(name, command).ended()
}

/// By which signal it was ended, if by one.
pub fn ended_by(ended: &Ended) -> Option<i32> {
    ended.status.signal()
}
