//! `highwire send` and `highwire receive` as processes: what they print, with which code they end, and what is left
//! of a file when one of them is killed.

mod place;

use assert_cmd::assert::{Assert, OutputAssertExt};
use place::{Echo, Place};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

#[test]
fn a_file_goes_over_each_path_and_both_sides_tell_the_same() {
    let transfer = Transfer::new(300_000);
    let key = transfer.place.path().join("cluster.key").to_str().unwrap().to_owned();
    transfer.place.highwire(&["key", "new", &key]).assert().code(0);
    for (address, with) in
        [("shm:file", vec![]), ("udp:127.0.0.1:0", vec![]), ("udp:127.0.0.1:0", vec!["--key", &key, "--sync"])]
    {
        let receiver = transfer.receive(address, &with);
        let with_key = with.strip_suffix(&["--sync"]).unwrap_or(&with);
        let sent = transfer.send(&receiver.address, with_key).assert().code(0);
        let text = stdout(&sent);
        assert!(text.starts_with("sent ") && text.contains(": 300000 bytes, in "), "{text}");
        assert_eq!(stderr(&sent), "", "there is no terminal to show progress on");
        let text = stdout(&receiver.end().assert().code(0));
        assert!(text.starts_with("received ") && text.trim_end().ends_with(" MB/s"), "{text}");
        transfer.assert_arrived();
        fs::remove_file(transfer.whole()).unwrap();
    }
    let receiver = Process::start(&mut transfer.receive_command("shm:file", &["--json"]));
    let sent = json(&stdout(&transfer.send("shm:file", &["--json", "--wait", "5"]).assert().code(0)));
    let received = json(&stdout(&receiver.end().assert().code(0)));
    for report in [&sent, &received] {
        assert_eq!((&report["bytes"], &report["resumed_from"]), (&Value::from(300_000), &Value::from(0)));
        assert!(report["seconds"].as_f64().unwrap() > 0.0 && report["mb_s"].as_f64().unwrap() > 0.0, "{report}");
    }
    assert_eq!(sent["checksum"], received["checksum"]);
    assert!(sent["checksum"].as_str().unwrap().starts_with("crc64nvme:"), "{sent}");
    assert_eq!(received["file"], transfer.whole().to_str().unwrap());
}

#[test]
fn a_transfer_whose_sender_or_receiver_is_killed_goes_on_where_it_stopped() {
    for victim in ["sender", "receiver"] {
        let transfer = Transfer::new(LARGE);
        let receiver = transfer.receive("shm:killed", &[]);
        let sender = Process::start(&mut transfer.send_command("shm:killed", &[]));
        until("a part of it has arrived", || fs::metadata(transfer.part()).is_ok_and(|part| part.len() > 1 << 20));
        let (mut killed, survivor) = match victim {
            "sender" => (sender, receiver.process),
            _ => (receiver.process, sender),
        };
        killed.0.kill().unwrap();
        assert!(!killed.end().status.success(), "the {victim} was done before it could be killed");
        let said = survivor.end().assert().code(1);
        assert!(stderr(&said).contains("run both commands again"), "{}", stderr(&said));
        let there = fs::metadata(transfer.part()).unwrap().len();
        let receiver = transfer.receive("shm:killed", &[]);
        let sent = json(&stdout(&transfer.send("shm:killed", &["--json"]).assert().code(0)));
        assert_eq!(sent["resumed_from"].as_u64(), Some(there), "after the {victim} was killed");
        receiver.end().assert().code(0);
        transfer.assert_arrived();
    }
}

#[test]
fn a_wrong_command_line_ends_with_2_and_says_what_is_right() {
    let place = Place::new();
    let cases: &[(&[&str], &str)] = &[
        (&["send"], "<FILE>"),
        (&["send", "letter"], "<ADDRESS>"),
        (&["send", "letter", "shm:x", "--wait", "long"], "from 0.5 to 86400"),
        (&["receive"], "<ADDRESS>"),
        (&["receive", "shm:x", "--into", ".", "--output", "letter"], "cannot be used with"),
        (&["receive", "shm:x", "--insecure", "--key", "k"], "cannot be used with"),
    ];
    for (arguments, expected) in cases {
        let wrong = place.highwire(arguments).assert().code(2);
        assert!(stderr(&wrong).contains(expected), "{arguments:?}: {expected:?} is missing in:\n{}", stderr(&wrong));
    }
}

#[test]
fn what_cannot_be_sent_or_put_anywhere_is_told_before_anybody_is_called() {
    let transfer = Transfer::new(10);
    let directory = transfer.place.path().to_str().unwrap();
    let missing = transfer.place.path().join("missing").to_str().unwrap().to_owned();
    let inside = format!("{missing}/letter");
    let cases: &[(&[&str], &str)] = &[
        (&["send", directory, "shm:nobody"], "tar -cf"),
        (&["send", &missing, "shm:nobody"], "look at its name"),
        (&["send", "/dev/zero", "shm:nobody"], "is a device"),
        (&["receive", "shm:x", "--into", &missing], "make it first"),
        (&["receive", "shm:x", "--output", directory], "is a directory"),
        (&["receive", "shm:x", "--output", &inside], "make it first"),
        (&["receive", "nonsense"], "shm:"),
        (&["receive", "udp:0.0.0.0:0"], "--insecure"),
    ];
    for (arguments, expected) in cases {
        let failed = transfer.place.highwire(arguments).current_dir(directory).assert().code(1);
        assert!(stderr(&failed).contains(expected), "{arguments:?}: {expected:?} is missing in:\n{}", stderr(&failed));
    }
}

#[test]
fn a_sender_waits_for_a_receiver_only_if_it_is_told_to() {
    let transfer = Transfer::new(10);
    let alone = transfer.send("shm:nobody", &[]).assert().code(1);
    assert!(stderr(&alone).contains("shm:nobody"), "{}", stderr(&alone));
    let began = Instant::now();
    transfer.send("shm:nobody", &["--wait", "0.5"]).assert().code(1);
    assert!(began.elapsed() >= Duration::from_millis(500));
    let sender = Process::start(&mut transfer.send_command("shm:late", &["--wait", "20"]));
    std::thread::sleep(Duration::from_millis(300));
    let receiver = transfer.receive("shm:late", &[]);
    sender.end().assert().code(0);
    receiver.end().assert().code(0);
    transfer.assert_arrived();
}

#[test]
fn a_file_that_is_there_is_refused_on_both_sides_and_replaced_by_force() {
    let transfer = Transfer::new(1000);
    fs::write(transfer.whole(), "precious").unwrap();
    let receiver = transfer.receive("shm:there", &[]);
    let refused = transfer.send("shm:there", &[]).assert().code(1);
    assert!(stderr(&refused).contains("--force") && stderr(&refused).contains("receiver"), "{}", stderr(&refused));
    let said = stderr(&receiver.end().assert().code(1));
    assert!(said.contains("replace it with --force") && said.contains("here/letter"), "{said}");
    assert_eq!(fs::read(transfer.whole()).unwrap(), b"precious");
    let receiver = transfer.receive("shm:there", &["--force"]);
    transfer.send("shm:there", &[]).assert().code(0);
    receiver.end().assert().code(0);
    transfer.assert_arrived();
    let other = transfer.place.path().join("other");
    let mut command = transfer.place.highwire(&["receive", "shm:there", "--output", other.to_str().unwrap()]);
    let receiver = Receiver::start(&mut command);
    transfer.send("shm:there", &[]).assert().code(0);
    receiver.end().assert().code(0);
    assert_eq!(fs::read(other).unwrap(), fs::read(transfer.source()).unwrap());
}

#[test]
fn an_address_has_one_receiver_and_a_receiver_one_sender() {
    let transfer = Transfer::new(8 << 20);
    let receiver = transfer.receive("shm:one", &[]);
    let second = Process::start(&mut transfer.receive_command("shm:one", &[])).end().assert().code(1);
    assert!(stderr(&second).contains("one"), "{}", stderr(&second));
    let senders = [(); 2].map(|()| Process::start(&mut transfer.send_command("shm:one", &[])));
    let codes = senders.map(|sender| sender.end().status.code());
    assert!(codes == [Some(0), Some(1)] || codes == [Some(1), Some(0)], "{codes:?}");
    receiver.end().assert().code(0);
    transfer.assert_arrived();
}

#[test]
fn whoever_is_no_transfer_is_an_error_and_loses_nothing() {
    let transfer = Transfer::new(1000);
    let place = &transfer.place;
    let echo = Echo::start(&mut place.echo("shm:echo", &[]));
    let refused = transfer.send(&echo.address, &[]).assert().code(1);
    assert!(!stderr(&refused).is_empty());
    fs::write(transfer.part(), "what came before").unwrap();
    let receiver = transfer.receive("shm:file", &[]);
    let ping = ["ping", "shm:file", "--count", "1", "--timeout", "1", "--size", "4096"];
    place.highwire(&ping).assert().code(1);
    receiver.end().assert().code(1);
    assert_eq!(fs::read(transfer.part()).unwrap(), b"what came before");
}

#[test]
fn without_a_key_a_port_of_this_host_serves_the_users_that_it_was_told() {
    let transfer = Transfer::new(1000);
    let Some(stranger) = transfer.stranger() else { return };
    let fails = |mut command: Command, expected: &str| {
        let failed = Process::start(&mut command).end().assert().code(1);
        assert!(stderr(&failed).contains(expected), "{expected:?} is missing in: {}", stderr(&failed));
    };
    for address in ["udp:127.0.0.1:0", "udp:[::1]:0"] {
        let receiver = transfer.receive(address, &[]);
        // Neither side trusts the other, whatever the other says.
        fails(stranger(&receiver.address, &[]), "served by user 0");
        fails(stranger(&receiver.address, &["--allow", "root"]), "no answer");
        fails(stranger(&receiver.address, &["--allow", "everyone"]), "no answer");
        transfer.send(&receiver.address, &[]).assert().code(0);
        receiver.end().assert().code(0);
        for allowed in ["4711", "everyone"] {
            fs::remove_file(transfer.whole()).unwrap();
            let receiver = transfer.receive(address, &["--allow", allowed]);
            fails(stranger(&receiver.address, &[]), "--allow");
            let sent = Process::start(&mut stranger(&receiver.address, &["--allow", "root"])).end();
            assert_eq!(sent.status.code(), Some(0), "{sent:?}");
            receiver.end().assert().code(0);
            transfer.assert_arrived();
        }
        fs::remove_file(transfer.whole()).unwrap();
    }
}

#[test]
fn a_sender_can_hide_nothing_and_make_nothing_run_unless_it_is_forced() {
    let transfer = Transfer::new(1000);
    fs::set_permissions(transfer.source(), Permissions::from_mode(0o755)).unwrap();
    let hidden = transfer.place.path().join(".bash_login");
    fs::copy(transfer.source(), &hidden).unwrap();
    let send_hidden = || transfer.place.highwire(&["send", hidden.to_str().unwrap(), "shm:dot"]);
    let there = transfer.here().join(".bash_login");
    let mode = |path: &PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;

    let receiver = transfer.receive("shm:dot", &[]);
    let refused = Process::start(&mut send_hidden()).end().assert().code(1);
    assert!(stderr(&refused).contains("begins with a dot"), "{}", stderr(&refused));
    let said = stderr(&receiver.end().assert().code(1));
    assert!(said.contains("begins with a dot") && said.contains("--force"), "{said}");
    assert!(!there.exists() && !transfer.here().join(".bash_login.part").exists());

    let receiver = transfer.receive("shm:dot", &[]);
    transfer.send("shm:dot", &[]).assert().code(0);
    let said = stderr(&receiver.end().assert().code(0));
    assert!(said.contains("--force") && said.contains("chmod +x"), "{said}");
    assert_eq!(mode(&transfer.whole()) & 0o111, 0);

    let receiver = transfer.receive("shm:dot", &["--force"]);
    Process::start(&mut send_hidden()).end().assert().code(0);
    assert_eq!(stderr(&receiver.end().assert().code(0)), "");
    assert_eq!(mode(&there), 0o755);
}

#[test]
fn a_caller_that_offers_nothing_loses_its_place() {
    let transfer = Transfer::new(1000);
    let receiver = transfer.receive("shm:silent", &[]);
    let nic = highwire::Nic::with(highwire::Config {
        runtime_dir: Some(transfer.place.path().join("run")),
        ..highwire::Config::default()
    });
    let silent = highwire::Sockets::new(&nic.unwrap()).connect("shm:silent").unwrap();
    let began = Instant::now();
    transfer.send("shm:silent", &["--wait", "20"]).assert().code(0);
    assert!(began.elapsed() > Duration::from_secs(5), "the other one had the place");
    let said = stderr(&receiver.end().assert().code(0));
    assert!(said.contains("offered nothing within 10s"), "{said}");
    drop(silent);
    transfer.assert_arrived();
}

/// A file called `letter`, and a directory called `here` to receive it in.
struct Transfer {
    place: Place,
}

impl Transfer {
    fn new(bytes: u64) -> Transfer {
        let transfer = Transfer { place: Place::new() };
        fs::create_dir(transfer.here()).unwrap();
        let file = File::create(transfer.source()).unwrap();
        file.set_len(bytes).unwrap();
        // Something in each megabyte, without having to make all of it.
        for at in (0..bytes.saturating_sub(8)).step_by(1 << 20) {
            file.write_all_at(&(at | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes(), at).unwrap();
        }
        transfer
    }

    fn source(&self) -> PathBuf {
        self.place.path().join("letter")
    }

    fn here(&self) -> PathBuf {
        self.place.path().join("here")
    }

    fn whole(&self) -> PathBuf {
        self.here().join("letter")
    }

    fn part(&self) -> PathBuf {
        self.here().join("letter.part")
    }

    fn send_command(&self, address: &str, with: &[&str]) -> Command {
        let mut command = self.place.highwire(&["send"]);
        command.arg(self.source()).arg(address).args(with);
        command
    }

    fn send(&self, address: &str, with: &[&str]) -> Output {
        Process::start(&mut self.send_command(address, with)).end()
    }

    /// Another user that sends the same file; `None` where there are no other users.
    fn stranger(&self) -> Option<impl Fn(&str, &[&str]) -> Command + use<>> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("NOT TESTED, needs root: another user");
            return None;
        }
        let own = self.place.path().join("stranger");
        let (binary, letter) = (own.join("highwire"), own.join("letter"));
        fs::create_dir(&own).unwrap();
        fs::copy(place::BINARY, &binary).unwrap();
        fs::copy(self.source(), &letter).unwrap();
        for path in [&own, &binary, &letter] {
            std::os::unix::fs::chown(path, Some(STRANGER), Some(STRANGER)).unwrap();
        }
        fs::set_permissions(self.place.path(), Permissions::from_mode(0o711)).unwrap();
        fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        Some(move |address: &str, with: &[&str]| {
            let mut command = Command::new("setpriv");
            let user = STRANGER;
            command.args([&format!("--reuid={user}"), &format!("--regid={user}"), "--clear-groups", "--"]);
            command.arg(&binary).arg("send").arg(&letter).arg(address).args(with);
            command.env("HIGHWIRE_RUNTIME_DIR", &own).env("HOME", &own).current_dir("/").stdin(Stdio::null());
            command
        })
    }

    fn receive_command(&self, address: &str, with: &[&str]) -> Command {
        let mut command = self.place.highwire(&["receive", address, "--into"]);
        command.arg(self.here()).args(with);
        command
    }

    /// A receiver that listens.
    fn receive(&self, address: &str, with: &[&str]) -> Receiver {
        Receiver::start(&mut self.receive_command(address, with))
    }

    fn assert_arrived(&self) {
        assert!(fs::read(self.whole()).unwrap() == fs::read(self.source()).unwrap(), "other bytes arrived");
        assert!(!self.part().exists());
    }
}

/// A process that ends with this value, if not before.
struct Process(Child);

impl Process {
    fn start(command: &mut Command) -> Process {
        Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Waits for its end; one that hangs is killed, and has no code.
    fn end(mut self) -> Output {
        let deadline = Instant::now() + PATIENCE;
        while self.0.try_wait().unwrap().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.0.kill();
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        // A receiver's was taken before.
        self.0.stdout.take().map(|mut pipe| pipe.read_to_end(&mut stdout).unwrap());
        self.0.stderr.take().map(|mut pipe| pipe.read_to_end(&mut stderr).unwrap());
        Output { status: self.0.wait().unwrap(), stdout, stderr }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that said where it listens.
struct Receiver {
    process: Process,
    address: String,
    rest: BufReader<ChildStdout>,
}

impl Receiver {
    fn start(command: &mut Command) -> Receiver {
        let mut process = Process::start(command);
        let mut rest = BufReader::new(process.0.stdout.take().unwrap());
        let mut line = String::new();
        rest.read_line(&mut line).unwrap();
        let address = line.split(' ').nth(2).unwrap_or_else(|| panic!("{line:?}")).to_owned();
        Receiver { process, address, rest }
    }

    /// Waits for its end; what it said first is not among its output any more.
    fn end(self) -> Output {
        let Receiver { process, mut rest, .. } = self;
        let mut ended = process.end();
        rest.read_to_end(&mut ended.stdout).unwrap();
        ended
    }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error} in:\n{text}"))
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).unwrap()
}

fn until(what: &str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !look() {
        assert!(Instant::now() < deadline, "after {PATIENCE:?} it is still not true that {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// No user of the system.
const STRANGER: u32 = 4711;
/// What takes so long does not come to its end.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes that take so long that somebody can be killed meanwhile.
const LARGE: u64 = 64 << 20;
