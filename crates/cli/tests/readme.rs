//! What the documents say is true: every command of the README works, its program is the one that
//! runs, every link leads somewhere, and every promise names tests that exist.

use assert_cmd::assert::OutputAssertExt;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn every_command_of_the_readme_works() {
    let commands = commands(&document("README.md"));
    assert!(commands.iter().any(|command| command == "cargo run --release -- demo"), "{commands:#?}");
    assert!(commands.iter().any(|command| command == "./test"), "{commands:#?}");
    let with_another =
        ["--example hello", "--example stream", "cluster.key", "shm:inbox", " -- up ", " -- mem ", REDIS_PORT];
    let alone = |command: &&String| !with_another.iter().any(|word| command.contains(word));
    let folder = tempfile::tempdir().unwrap();
    let recorded = folder.path().join("run.pcap");
    for command in commands.iter().filter(alone) {
        eprintln!("$ {command}");
        if command.starts_with("tshark ") && Command::new("tshark").arg("--version").output().is_err() {
            // Not by `eprintln`: the test runner would swallow what is said there.
            let mut loudly = std::io::stderr();
            writeln!(loudly, "SKIPPED, needs tshark: {command}").unwrap();
            continue;
        }
        let command = &command.replace("run.pcap", recorded.to_str().unwrap());
        if command == "./test" {
            // It is what runs this test.
            assert_ne!(root().join("test").metadata().unwrap().permissions().mode() & 0o111, 0);
            Command::new("bash").args(["-n", "test"]).current_dir(root()).assert().success();
            continue;
        }
        let unbounded = command.contains(" bench ") && !command.contains("--seconds");
        let command = if unbounded { format!("{command} --seconds {SECONDS}") } else { command.clone() };
        let first = shell(&command).output().unwrap();
        if String::from_utf8_lossy(&first.stderr).contains("give more --seconds") {
            // Others keep the CPUs busy: do as it says, and give it ten more.
            eprintln!("{}", String::from_utf8_lossy(&first.stderr));
            shell(&command.replace("--seconds ", "--seconds 1")).assert().success();
        } else {
            first.assert().success();
        }
    }
}

#[test]
fn two_terminals_exchange_a_message() {
    let (one, _) = two_terminals("--example hello -- listen", "--example hello -- connect", "hello.sock");
    assert_eq!(one, "receive 1: \"hello, wire\"\n");
}

#[test]
fn two_terminals_share_a_stream() {
    let (_, another) = two_terminals("--example stream -- listen", "--example stream -- connect", "stream.sock");
    assert_eq!(another, "HELLO, STREAM\n");
}

#[test]
fn two_terminals_bring_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let there = folder.path().to_str().unwrap();
    two_terminals_in(" receive shm:inbox", " send README.md shm:inbox", "inbox.sock", |command| {
        command.replace("/tmp", there)
    });
    assert_eq!(std::fs::read_to_string(folder.path().join("README.md")).unwrap(), document("README.md"));
}

#[test]
fn two_terminals_keep_an_object() {
    let commands = commands(&document("README.md"));
    let names = tempfile::Builder::new().prefix("hw").tempdir().unwrap();
    let in_terminal = |command: &String| {
        let mut terminal = shell(command);
        terminal.env("HIGHWIRE_RUNTIME_DIR", names.path()).env_remove("HIGHWIRE_MEM").stdout(Stdio::piped());
        terminal
    };
    let up = commands.iter().find(|command| command.contains(" -- up ")).unwrap();
    let mut node = Ended(in_terminal(up).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(node.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("listening at shm:highwire"), "{line:?}");
    let mut told = String::new();
    for command in commands.iter().filter(|command| command.contains(" -- mem ")) {
        let said = in_terminal(command).output().unwrap().assert().success();
        told += &String::from_utf8_lossy(&said.get_output().stdout);
    }
    assert!(told.contains(&document("README.md")) && told.contains("lease left"), "{told}");
}

/// Runs two commands of the README that have these words: `one` until its socket is there, and then `another`. What
/// they print.
fn two_terminals(one: &str, another: &str, socket: &str) -> (String, String) {
    two_terminals_in(one, another, socket, str::to_owned)
}

/// The same, with something changed in the commands.
fn two_terminals_in(one: &str, another: &str, socket: &str, change: impl Fn(&str) -> String) -> (String, String) {
    let commands = commands(&document("README.md"));
    let find = |words: &str| commands.iter().find(|command| command.contains(words)).unwrap();
    let names = tempfile::Builder::new().prefix("hw").tempdir().unwrap();
    let in_terminal = |command: &str| {
        let mut terminal = shell(&change(command));
        terminal.env("HIGHWIRE_RUNTIME_DIR", names.path()).stdout(Stdio::piped());
        terminal
    };
    let mut one = in_terminal(find(one)).spawn().unwrap();
    let deadline = Instant::now() + BUILD_PATIENCE;
    while !names.path().join(socket).exists() {
        assert!(one.try_wait().unwrap().is_none(), "it has ended before somebody came");
        assert!(Instant::now() < deadline, "nobody listens after {BUILD_PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    let printed = |output: std::process::Output| {
        let output = output.assert().success();
        String::from_utf8_lossy(&output.get_output().stdout).into_owned()
    };
    let another = printed(in_terminal(find(another)).output().unwrap());
    (printed(one.wait_with_output().unwrap()), another)
}

#[test]
fn two_terminals_ping_each_other_with_a_key() {
    let commands = commands(&document("README.md"));
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("cluster.key");
    let port = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let find = |word: &str| {
        let command = commands.iter().find(|command| command.contains(word) && command.contains("cluster.key"));
        let command = command.unwrap_or_else(|| panic!("no command with {word}"));
        shell(&command.replace("cluster.key", key.to_str().unwrap()).replace(":7000", &format!(":{port}")))
    };
    find(" key new ").assert().success();
    let mut echo = find(" echo ").stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(echo.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("listening at"), "{line:?}");
    let told = find(" ping ").output().unwrap();
    echo.kill().unwrap();
    echo.wait().unwrap();
    let told = told.assert().success();
    assert!(String::from_utf8_lossy(&told.get_output().stdout).contains("5 sent and answered"));
}

#[test]
fn two_terminals_run_programs_that_do_not_know() {
    let commands = commands(&document("README.md"));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let find = |words: &str| {
        let command = commands.iter().find(|command| command.contains(words) && command.contains(REDIS_PORT));
        let command = command.unwrap_or_else(|| panic!("no command with {words}"));
        let program = words.trim_start_matches("run -- ");
        let installed = Command::new(program).arg("--version").output().is_ok();
        assert!(installed, "{program} is not installed (Debian: apt-get install redis-server redis-tools)");
        let mut terminal = shell(&command.replace(REDIS_PORT, &port.to_string()));
        terminal.stdout(Stdio::piped());
        terminal
    };
    // Cargo becomes the command, and the command the program: what was started is what is to be ended.
    let mut server = Ended(find("run -- redis-server").spawn().unwrap());
    let deadline = Instant::now() + BUILD_PATIENCE;
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(server.0.try_wait().unwrap().is_none(), "it has ended before somebody came");
        assert!(Instant::now() < deadline, "nobody listens after {BUILD_PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    let told = find("run -- redis-benchmark").output().unwrap().assert().success();
    let said = String::from_utf8_lossy(&told.get_output().stdout).into_owned();
    assert!(said.contains("requests per second"), "{said:?}");
    let explained = shell(&format!("cargo run --release -- explain {} --all", server.0.id())).output().unwrap();
    let explained = String::from_utf8_lossy(&explained.assert().success().get_output().stdout).into_owned();
    assert!(explained.contains("redis-server") && explained.contains(&format!(":{port}")), "{explained}");
}

/// A process that is ended with the test.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Where it has ended by itself there is nothing to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_programs_in_the_readme_are_those_that_run() {
    let blocks = blocks(&document("README.md"), "rust");
    for name in ["crates/cli/examples/hello.rs", "crates/cli/examples/stream.rs", "crates/cli/examples/counter.rs"] {
        let program = document(name);
        // All but the comment at its top, which the text around it says in the README.
        let program = program.split_once("\n\n").unwrap().1;
        assert!(blocks.iter().any(|block| block == program), "{name} is not in README.md as it is");
    }
}

#[test]
fn every_link_leads_somewhere() {
    for name in DOCUMENTS {
        let path = root().join(name);
        for link in links(&document(name)) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let file = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(file.exists(), "{name} links to {link}, which is not there");
            if !anchor.is_empty() {
                let headings = headings(&std::fs::read_to_string(&file).unwrap());
                assert!(
                    headings.iter().any(|heading| heading == anchor),
                    "{name} links to {link}, but has {headings:?}"
                );
            }
        }
    }
}

#[test]
fn every_promise_names_tests_that_exist() {
    let promises = document("docs/promises.md");
    let numbered: Vec<&str> = promises.split("\n## ").skip(1).filter(|part| starts_with_number(part)).collect();
    assert!(numbered.len() >= 10, "only {} promises are numbered", numbered.len());
    for (at, promise) in numbered.iter().enumerate() {
        let heading = promise.lines().next().unwrap();
        assert!(heading.starts_with(&format!("{}. ", at + 1)), "{heading:?} is out of order");
        assert!(promise.contains("Kept by"), "{heading:?} does not say what keeps it");
    }
    assert!(tests_named_by("docs/promises.md") >= numbered.len());
    assert!(tests_named_by("docs/threat-model.md") >= 20);
}

/// How many tests a document names; each must exist.
fn tests_named_by(path: &str) -> usize {
    let tests: Vec<String> = code_spans(&document(path)).into_iter().filter(|span| span.contains(".rs::")).collect();
    for test in &tests {
        let (file, name) = test.split_once("::").unwrap();
        let source = std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(source.contains(&format!("fn {name}(")), "{path} names {test}, which does not exist");
    }
    tests.len()
}

#[test]
fn unsafe_code_is_forbidden_everywhere_but_where_it_is_said_to_be() {
    // Files with unsafe code, and those that say that these may have it.
    let places: [(&str, &[&str], &[&str]); 2] =
        [("link", &["udp/sys.rs"], &["udp.rs"]), ("netmem", &["paging/sys.rs", "paging/fault.rs"], &["paging.rs"])];
    for (name, unsafe_files, allowing_files) in places {
        let folder = root().join("crates").join(name).join("src");
        let main = std::fs::read_to_string(folder.join("lib.rs")).unwrap();
        assert!(main.lines().any(|line| line == "#![deny(unsafe_code)]"), "{name} does not deny unsafe code");
        for path in sources(&folder) {
            let allowed = |files: &[&str]| files.iter().any(|file| path == folder.join(file));
            for mark in unsafe_marks(&std::fs::read_to_string(&path).unwrap()) {
                // Tests beside the code may have some of their own.
                let for_tests = path.ends_with("tests.rs") || path.ends_with("tests/mod.rs");
                let is_allowance = mark.starts_with("unsafe_code");
                let good = for_tests || allowed(if is_allowance { allowing_files } else { unsafe_files });
                assert!(good, "{path:?} has unsafe code: {mark}");
            }
        }
    }
    let crates = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let allowed = |path: &PathBuf| ["mem", "link", "preload", "netmem"].iter().any(|name| path.ends_with(name));
    for path in crates.filter(|path| !allowed(path)) {
        let roots = ["src/lib.rs", "src/main.rs"].map(|name| path.join(name));
        let mains: Vec<String> = roots.iter().filter_map(|root| std::fs::read_to_string(root).ok()).collect();
        assert!(!mains.is_empty(), "{path:?} has neither lib.rs nor main.rs");
        let forbidden = mains.iter().all(|main| main.lines().any(|line| line == "#![forbid(unsafe_code)]"));
        assert!(forbidden, "{path:?} does not forbid unsafe code");
        for source in sources(&path.join("src")) {
            let marks = unsafe_marks(&std::fs::read_to_string(&source).unwrap());
            assert!(marks.is_empty(), "{source:?} has unsafe code: {marks:?}");
        }
    }
}

#[test]
fn unsafe_code_is_found_however_it_is_written() {
    let found = [
        "unsafe { f() }",
        "unsafe{f()}",
        "let x = unsafe\n{ f() };",
        "unsafe fn f() {}",
        "pub unsafe extern \"C\" fn f() {}",
        "unsafe impl Send for T {}",
        "unsafe trait T {}",
        "unsafe extern \"C\" { fn f(); }",
        "#[unsafe(no_mangle)] fn f() {}",
        "#[allow(unsafe_code)]",
        "#![allow(unsafe_code)]",
        "#[expect(unsafe_code, reason = \"why\")]",
        "#[allow(dead_code, unsafe_code)]",
        "#[warn(unsafe_code)]",
        "#[cfg_attr(test, allow(unsafe_code))]",
        "/* of old */ unsafe fn f() {}",
        "let text = \"//\"; unsafe { f() }",
        "let quote = '\"'; unsafe { f() }",
    ];
    for source in found {
        assert!(!unsafe_marks(source).is_empty(), "nothing found in {source}");
    }
    let harmless = [
        "#![forbid(unsafe_code)]",
        "#![deny(unsafe_code)]",
        "#![deny(missing_docs, unsafe_op_in_unsafe_fn)]",
        "// unsafe { f() }",
        "/// unsafe fn f() {}",
        "/* unsafe impl */",
        "let text = \"unsafe { f() }\";",
        "let not_unsafe = unsafe_marks(source);",
    ];
    for source in harmless {
        assert_eq!(unsafe_marks(source), Vec::<String>::new(), "found in {source}");
    }
}

/// Where unsafe code is written in a source, or a lint against it is relaxed: each place with what follows it.
fn unsafe_marks(source: &str) -> Vec<String> {
    let code = without_comments_and_text(source);
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut marks = Vec::new();
    for (at, _) in code.match_indices("unsafe") {
        let rest = &code[at..];
        let word = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        if code[..at].chars().next_back().is_some_and(is_word) {
            continue;
        }
        let strict = || {
            let before = &code[..at];
            let attribute = &before[before.rfind("#").unwrap_or(0)..];
            let list = attribute.rfind(['(', ')']).map_or("", |end| attribute[..end].trim_end());
            list.ends_with("forbid") || list.ends_with("deny")
        };
        if word == "unsafe" || word == "unsafe_code" && !strict() {
            marks.push(rest.split_whitespace().take(4).collect::<Vec<_>>().join(" "));
        }
    }
    marks
}

/// A source of Rust without what is in comments and between quotes.
fn without_comments_and_text(source: &str) -> String {
    let (mut code, mut rest) = (String::new(), source);
    while let Some(first) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if first == '"' {
            let mut escaped = false;
            let end = rest[1..].find(|c| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(rest.len(), |end| end + 2)
        } else if rest.starts_with("'\"'") {
            3
        } else if rest.starts_with("'\\\"'") {
            4
        } else {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        code.push(' ');
        rest = &rest[skipped..];
    }
    code
}

/// All sources of Rust in a folder and those in it.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let here = files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    here.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn document(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn shell(command: &str) -> Command {
    let mut shell = Command::new("bash");
    shell.args(["-c", command]).current_dir(root()).stdin(Stdio::null());
    shell
}

/// What a reader would type: lines of shell blocks, and commands in the text and in tables.
fn commands(text: &str) -> Vec<String> {
    let blocks = blocks(text, "sh");
    let lines = blocks.iter().flat_map(|block| block.lines()).map(str::trim).filter(|line| !line.is_empty());
    let mut commands: Vec<String> = lines.filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
    let is_command = |span: &String| span.starts_with("cargo ") || span.starts_with("./");
    for span in code_spans(text).into_iter().filter(is_command) {
        if !commands.contains(&span) {
            commands.push(span);
        }
    }
    commands
}

/// Contents of the fenced blocks in this language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(found) = line.strip_prefix("```") else { continue };
        let block: String = lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
        if found == language {
            blocks.push(block);
        }
    }
    blocks
}

/// The text without its fenced blocks.
fn prose(text: &str) -> String {
    let outside = |(at, part): (usize, &str)| at.is_multiple_of(2).then(|| part.to_owned());
    text.split("```").enumerate().filter_map(outside).collect()
}

fn code_spans(text: &str) -> Vec<String> {
    prose(text).split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Targets of links within the project.
fn links(text: &str) -> Vec<String> {
    let text = prose(text);
    let targets = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()));
    targets.filter(|target| !target.contains("://")).collect()
}

/// Headings as links name them.
fn headings(text: &str) -> Vec<String> {
    let kept = |c: char| c.is_alphanumeric() || c == ' ' || c == '-';
    let name =
        |line: &str| line.trim_start_matches('#').trim().to_lowercase().replace(|c| !kept(c), "").replace(' ', "-");
    prose(text).lines().filter(|line| line.starts_with('#')).map(name).collect()
}

fn starts_with_number(part: &str) -> bool {
    part.starts_with(|c: char| c.is_ascii_digit())
}

const DOCUMENTS: &[&str] = &[
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/architecture.md",
    "docs/promises.md",
    "docs/protocol/shared-memory.md",
    "docs/protocol/wire.md",
    "docs/protocol/sockets.md",
    "docs/protocol/file-transfer.md",
    "docs/protocol/explain.md",
    "docs/protocol/lane.md",
    "docs/protocol/rpc.md",
    "docs/protocol/netmem.md",
];
/// Port of the server that the README starts.
const REDIS_PORT: &str = "7379";
/// For measurements that the README does not bound: enough to see that they work.
const SECONDS: u32 = 3;
/// The first command builds the release.
const BUILD_PATIENCE: Duration = Duration::from_secs(180);
