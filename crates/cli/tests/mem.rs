//! `highwire up` and `highwire mem` as processes: what they print, with which code they end, and what becomes of objects
//! when a node ends or is killed.

mod place;

use assert_cmd::assert::{Assert, OutputAssertExt};
use highwire::netmem::{BUDGET_BYTES_MIN, Memory, MemoryOptions, PAGE_BYTES, PageError, PagingOptions};
use place::{BINARY, Echo, Place};
use rustix::pty::OpenptFlags;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_file_that_is_written_while_it_is_put_is_not_stored_torn() {
    const BYTES: usize = 16 << 20;
    let place = Place::new();
    let node = Node::start(&place, &["--listen", "shm:highwire"]);
    let file = place.path().join("file");
    fs::write(&file, vec![0; BYTES]).unwrap();
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As a mapping does: the file has one length all the while.
            let file = fs::OpenOptions::new().write(true).open(&file).unwrap();
            for turn in (1..=255u8).cycle() {
                if end.load(Ordering::SeqCst) {
                    break;
                }
                file.write_all_at(&vec![turn; BYTES], 0).unwrap();
            }
        });
        let put = place.highwire(&["mem", "put", "file", file.to_str().unwrap()]).output().unwrap();
        end.store(true, Ordering::SeqCst);
        let put = put.assert().code(1);
        assert!(stderr(&put).contains("changed while it was read"), "{}", stderr(&put));
    });
    place.highwire(&["mem", "get", "file"]).assert().code(4);
    place.highwire(&["mem", "put", "file", file.to_str().unwrap()]).assert().code(0);
    // A writer that does not write costs a second look.
    let _writer = fs::OpenOptions::new().write(true).open(&file).unwrap();
    place.highwire(&["mem", "put", "file", file.to_str().unwrap()]).assert().code(0);
    node.end("INT");
}

#[test]
fn objects_are_put_got_listed_told_about_renewed_and_removed_over_each_path() {
    let place = Place::new();
    let key = place.path().join("cluster.key").to_str().unwrap().to_owned();
    place.highwire(&["key", "new", &key]).assert().code(0);
    let listen = ["--listen", "shm:highwire", "--listen", "udp:127.0.0.1:0", "--key", &key];
    let node = Node::start(&place, &listen);
    assert_eq!(node.addresses.len(), 2);
    let (letter, back) = (place.path().join("letter"), place.path().join("back"));
    let content: Vec<u8> = (0..3_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(&letter, &content).unwrap();
    for (address, with) in [(None, vec![]), (Some(node.addresses[1].as_str()), vec!["--key", key.as_str()])] {
        let at: Vec<&str> = address.map_or(vec![], |address| vec!["--at", address]).into_iter().chain(with).collect();
        let mem = |arguments: &[&str]| place.highwire(&["mem"]).args(arguments).args(&at).output().unwrap().assert();
        let put = mem(&["put", "letter", letter.to_str().unwrap(), "--lease", "15m", "--pin"]).code(0);
        assert_eq!(
            (stdout(&put), stderr(&put)),
            (String::new(), String::new()),
            "there is no terminal to show progress on"
        );
        mem(&["get", "letter", "-o", back.to_str().unwrap()]).code(0);
        assert!(fs::read(&back).unwrap() == content, "over {at:?}");
        let parts = fs::read_dir(place.path()).unwrap().filter(|entry| is_part(entry.as_ref().unwrap())).count();
        assert_eq!(parts, 0);
        let got = mem(&["get", "letter"]).code(0);
        assert!(got.get_output().stdout == content);
        put_text(&place, "note", "from a pipe", &at).code(0);
        assert_eq!(stdout(&mem(&["get", "note"]).code(0)), "from a pipe");
        let listed = stdout(&mem(&["list"]).code(0));
        assert!(listed.contains("lease left") && listed.contains("letter") && listed.contains("3000000"), "{listed}");
        let listed = stdout(&mem(&["list", "--json", "le"]).code(0));
        let object = json(&listed);
        assert_eq!((&object["name"], &object["bytes"]), (&"letter".into(), &3_000_000.into()), "{listed}");
        assert_eq!(object["pinned"], true);
        assert!((800.0..=900.0).contains(&object["lease_left_s"].as_f64().unwrap()), "{listed}");
        mem(&["renew", "letter", "--lease", "2d"]).code(0);
        let told = json(&stdout(&mem(&["stat", "letter", "--json"]).code(0)));
        assert!(told["lease_left_s"].as_f64().unwrap() > 86_400.0, "{told}");
        assert!(stdout(&mem(&["stat", "letter"]).code(0)).contains("lease left  1d 23h"));
        let absent = put_text(&place, "note", "other", &[&at[..], &["--if-absent"]].concat()).code(1);
        assert!(stderr(&absent).contains("\"note\" is there already"), "{}", stderr(&absent));
        assert_eq!(stdout(&mem(&["get", "note"]).code(0)), "from a pipe");
        mem(&["rm", "letter"]).code(0);
        for gone in [["get", "letter"], ["rm", "letter"], ["stat", "letter"]] {
            let told = mem(&gone).code(4);
            assert_eq!(stderr(&told), "highwire: \"letter\" is not there\n", "{gone:?}");
        }
        mem(&["renew", "letter", "--lease", "1h"]).code(4);
    }
    // The variable stands in for --at.
    let mut other = place.highwire(&["mem", "stat", "--json"]);
    let told = json(&stdout(&other.env("HIGHWIRE_MEM", "shm:highwire").assert().code(0)));
    let nodes = told["nodes"].as_array().unwrap();
    assert_eq!((nodes.len(), &nodes[0]["objects"], &told["copies"]), (1, &1.into(), &1.into()), "{told}");
    assert_eq!(nodes[0]["memory_bytes"], 16 << 20);
    let nobody = other.env("HIGHWIRE_MEM", "shm:nobody").assert().code(1);
    assert!(stderr(&nobody).contains("highwire up --memory SIZE"), "{}", stderr(&nobody));
    let ended = node.end("INT");
    assert_eq!(ended.status.code(), Some(0));
    let said = String::from_utf8(ended.stdout).unwrap();
    assert!(said.ends_with("ended; lost: 1 object\n"), "{said}");
}

#[test]
fn a_wrong_command_line_ends_with_2_and_says_what_is_right() {
    let place = Place::new();
    let cases: &[(&[&str], &str)] = &[
        (&["up"], "--memory"),
        (&["up", "--memory", "much"], "as 512M or 8G"),
        (&["up", "--memory", "12Q"], "as 512M or 8G"),
        (&["up", "--memory", "1000K"], "at least 1M"),
        (&["up", "--memory", "900T"], "of this machine"),
        (&["up", "--memory", "1M", "--copies", "3"], "1..=2"),
        (&["up", "--memory", "1M", "--join", "shm:x"], "--listen"),
        (&["up", "--memory", "1M", "--name", ""], "at least one character"),
        (&["mem"], "Commands:"),
        (&["mem", "put"], "<NAME>"),
        (&["mem", "put", "x", "--lease", "soon"], "as 500ms"),
        (&["mem", "renew", "x"], "--lease"),
        (&["mem", "list", "--insecure", "--key", "k"], "cannot be used with"),
    ];
    for (arguments, expected) in cases {
        let wrong = place.highwire(arguments).assert().code(2);
        assert!(stderr(&wrong).contains(expected), "{arguments:?}: {expected:?} is missing in:\n{}", stderr(&wrong));
    }
    let help = stdout(&place.highwire(&["mem", "--help"]).assert().code(0));
    assert!(help.contains("4 no such object"), "{help}");
    assert!(stdout(&place.highwire(&["up", "--help"]).assert().code(0)).contains("shm:highwire"));
}

#[test]
fn what_cannot_be_done_is_told_with_1() {
    let place = Place::new();
    let _node = Node::start(&place, &[]);
    let huge = place.path().join("huge");
    fs::File::create(&huge).unwrap().set_len((1 << 30) + 1).unwrap();
    let (huge, here) = (huge.to_str().unwrap(), place.path().to_str().unwrap());
    let long = "n".repeat(256);
    let cases: &[(&[&str], &str)] = &[
        (&["mem", "put", "x", huge], "larger than 64 MiB"),
        (&["mem", "put", "x", here], "is a directory"),
        (&["mem", "put", "x", "/nowhere/at/all"], "cannot be read"),
        (&["mem", "put", &long, "/dev/null"], "255 bytes"),
        (&["mem", "put", "x", "/dev/null", "--at", "nonsense"], "nonsense"),
        (&["up", "--memory", "1M"], "in use"),
        (&["up", "--memory", "1M", "--listen", "udp:0.0.0.0:0"], "the address of this host"),
        (&["up", "--memory", "1M", "--listen", "shm:b", "--join", "nonsense"], "nonsense"),
    ];
    for (arguments, expected) in cases {
        let failed = place.highwire(arguments).assert().code(1);
        assert!(stderr(&failed).contains(expected), "{arguments:?}: {expected:?} is missing in:\n{}", stderr(&failed));
    }
    // Somebody is there, but no node.
    let echo = Echo::start(&mut place.echo("shm:echo", &[]));
    let failed = place.highwire(&["mem", "get", "x", "--at", &echo.address]).assert().code(1);
    assert!(stderr(&failed).contains("no coordinator of network memory answers"), "{}", stderr(&failed));
    // More than there is: the object is not there, and the others are.
    let large = place.path().join("large");
    fs::write(&large, vec![1; 17 << 20]).unwrap();
    put_text(&place, "kept", "yes", &[]).code(0);
    let full = place.highwire(&["mem", "put", "large", large.to_str().unwrap()]).assert().code(1);
    assert!(stderr(&full).contains("donate more memory"), "{}", stderr(&full));
    assert_eq!(stdout(&place.highwire(&["mem", "get", "kept"]).assert().code(0)), "yes");
    let output = place.path().join("missing/file");
    let failed = place.highwire(&["mem", "get", "kept", "-o", output.to_str().unwrap()]).assert().code(1);
    assert!(stderr(&failed).contains("cannot be written"), "{}", stderr(&failed));
    // A reader who has read enough is no failure.
    let pipe = format!("{BINARY} mem get kept | true; exit ${{PIPESTATUS[0]}}");
    let mut shell = Command::new("bash");
    shell.args(["-c", &pipe]).env("HIGHWIRE_RUNTIME_DIR", place.path().join("run")).assert().code(0);
}

/// The kernel would kill it, and everything would be gone.
#[test]
fn a_node_whose_group_may_have_little_memory_refuses_what_does_not_fit_and_keeps_the_rest() {
    let Some(group) = Group::make(96 << 20) else {
        // Not by `eprintln`: the test runner would swallow what is said there.
        return writeln!(std::io::stderr(), "SKIPPED, needs to make control groups: a limit of memory").unwrap();
    };
    let place = Place::new();
    let mut up = Command::new("bash");
    up.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"", group.0.to_str().unwrap(), BINARY]);
    up.args(["up", "--memory", "1G"]).env("HIGHWIRE_RUNTIME_DIR", place.path().join("run"));
    let _node = Node::of(up);
    let file = place.path().join("file");
    fs::write(&file, vec![7; 8 << 20]).unwrap();
    let mut kept = 0;
    loop {
        let name = format!("object-{kept}");
        let put = place.highwire(&["mem", "put", &name, file.to_str().unwrap(), "--pin"]).assert();
        if put.get_output().status.success() {
            kept += 1;
            assert!(kept < 12, "it has more memory than there is");
            continue;
        }
        let refused = put.code(1);
        break assert!(stderr(&refused).contains("raise the limit"), "{}", stderr(&refused));
    }
    assert!(kept >= 4, "only {kept} objects of 8 MiB in 96 MiB");
    for number in 0..kept {
        let got = place.highwire(&["mem", "get", &format!("object-{number}")]).output().unwrap();
        assert!(got.status.success() && got.stdout == vec![7; 8 << 20], "object {number}");
    }
}

/// A control group with a limit of memory, which is gone when nobody is in it any more.
struct Group(std::path::PathBuf);

impl Group {
    /// `None` where none can be made.
    fn make(bytes: u64) -> Option<Group> {
        let versions = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        versions.into_iter().find_map(|(top, limit)| {
            let folder = std::path::Path::new(top).join(format!("highwire-test-{}", std::process::id()));
            fs::create_dir(&folder).ok()?;
            let group = Group(folder);
            fs::write(group.0.join(limit), bytes.to_string()).ok()?;
            Some(group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while fs::remove_dir(&self.0).is_err() && self.0.exists() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn an_object_whose_lease_has_ended_is_told_with_4() {
    let place = Place::new();
    let _node = Node::start(&place, &[]);
    put_text(&place, "short", "lived", &["--lease", "300ms"]).code(0);
    std::thread::sleep(Duration::from_millis(400));
    for arguments in [&["mem", "get", "short"][..], &["mem", "renew", "short", "--lease", "1h"]] {
        let gone = place.highwire(arguments).assert().code(4);
        assert!(stderr(&gone).contains("\"short\" is not there"), "{}", stderr(&gone));
    }
}

#[test]
fn what_is_no_text_goes_to_a_terminal_only_if_that_is_said() {
    let place = Place::new();
    let _node = Node::start(&place, &[]);
    put_text(&place, "binary", "\u{1b}[2Jgone", &[]).code(0);
    put_text(&place, "text", "grüße\n", &[]).code(0);
    let at_terminal = |arguments: &[&str]| {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let terminal = rustix::pty::openpt(flags).unwrap();
        rustix::pty::grantpt(&terminal).unwrap();
        rustix::pty::unlockpt(&terminal).unwrap();
        let far = rustix::pty::ioctl_tiocgptpeer(&terminal, flags).unwrap();
        let ended = place.highwire(arguments).stdout(far).stderr(Stdio::piped()).output().unwrap();
        // What is shown is there when the process has ended; without anything there is nobody at the far end to wait for.
        let mut shown = [0; 4096];
        let length = rustix::io::read(&terminal, &mut shown).unwrap_or(0);
        (ended, String::from_utf8_lossy(&shown[..length]).into_owned())
    };
    let (ended, shown) = at_terminal(&["mem", "get", "binary"]);
    assert_eq!((ended.status.code(), shown.as_str()), (Some(1), ""));
    assert!(String::from_utf8(ended.stderr).unwrap().contains("-o FILE, or here with -o -"));
    let (ended, shown) = at_terminal(&["mem", "get", "binary", "-o", "-"]);
    assert_eq!((ended.status.code(), shown.as_str()), (Some(0), "\u{1b}[2Jgone"));
    let (ended, shown) = at_terminal(&["mem", "get", "text"]);
    assert_eq!((ended.status.code(), shown.as_str()), (Some(0), "grüße\r\n"));
}

#[test]
fn a_second_signal_ends_a_node_that_is_still_handing_over() {
    let place = Place::new();
    let first = Node::start(&place, &[]);
    let mut second = Node::start(&place, &["--listen", "shm:second", "--join", "shm:highwire"]);
    put_many(&place);
    // While the other node is stopped nothing can be handed over, and nobody says that the lease has ended.
    signal("STOP", &first.child);
    signal("INT", &second.child);
    let mut line = String::new();
    while !line.starts_with("handing ") {
        line.clear();
        assert_ne!(second.out.read_line(&mut line).unwrap(), 0);
    }
    let ended = second.end("INT");
    signal("CONT", &first.child);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(String::from_utf8(ended.stderr).unwrap().contains("ended at once"));
}

#[test]
fn what_was_on_a_node_that_is_killed_is_lost_and_the_rest_is_there() {
    let place = Place::new();
    let _first = Node::start(&place, &[]);
    let second = Node::start(&place, &["--listen", "shm:second", "--join", "shm:highwire"]);
    let before = put_many(&place);
    assert!(before.iter().all(|objects| *objects > 0), "they are spread: {before:?}");
    second.end("KILL");
    let (kept, lost) = look_for_all(&place);
    assert_eq!((kept, lost.len() as u64), (before[0], before[1]));
    assert!(lost.iter().all(|said| said.contains("lost with node")), "{lost:?}");
}

#[test]
fn a_paged_region_whose_node_is_killed_says_which_pages_are_lost_and_has_the_rest() {
    let place = Place::new();
    let _first = Node::of(place.highwire(&["up", "--memory", "2M"]));
    let second = Node::start(&place, &["--listen", "shm:second", "--join", "shm:highwire"]);
    let config = highwire::Config { runtime_dir: Some(place.path().join("run")), ..highwire::Config::default() };
    let rpc = highwire::rpc::Rpc::new(&highwire::Nic::with(config).unwrap()).unwrap();
    let memory = Memory::connect(&rpc, "shm:highwire", MemoryOptions::default()).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while memory.nodes().unwrap().len() < 2 {
        assert!(Instant::now() < deadline, "the second node is not there");
        std::thread::sleep(Duration::from_millis(10));
    }
    let region = memory.paged_region(PAGES * PAGE_BYTES as u64, PagingOptions::new(BUDGET_BYTES_MIN)).unwrap();
    let content = |page: u64| [(page % 251) as u8; PAGE_BYTES];
    for page in 0..PAGES {
        region.write_at(page * PAGE_BYTES as u64, &content(page)).unwrap();
    }
    region.flush().unwrap();
    second.end("KILL");
    // On the same host what the node donated can be read until its lease is over.
    let deadline = Instant::now() + PATIENCE;
    while memory.nodes().unwrap().len() > 1 {
        assert!(Instant::now() < deadline, "the second node is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (mut kept, mut lost, began) = (0, 0, Instant::now());
    for page in 0..PAGES {
        let mut bytes = [0; PAGE_BYTES];
        loop {
            match region.read_at(page * PAGE_BYTES as u64, &mut bytes) {
                Ok(()) => {
                    assert!(bytes == content(page), "page {page} has other bytes");
                    kept += 1;
                }
                Err(PageError::Lost { page: of }) => {
                    assert_eq!(of, page);
                    lost += 1;
                }
                Err(error) => {
                    assert!(began.elapsed() < PATIENCE, "page {page}: {error}");
                    continue;
                }
            }
            break;
        }
    }
    assert!(kept > 0 && lost > 0 && kept + lost == PAGES, "{kept} kept, {lost} lost");
    // Whole pages replace what is lost, as far as there is room.
    let bigger = Node::start(&place, &["--listen", "shm:third", "--join", "shm:highwire"]);
    while memory.nodes().unwrap().len() < 2 {
        assert!(Instant::now() < deadline, "the third node is not there");
        std::thread::sleep(Duration::from_millis(10));
    }
    for page in 0..PAGES {
        region.write_at(page * PAGE_BYTES as u64, &content(page + 1)).unwrap();
    }
    let mut bytes = [0; PAGE_BYTES];
    for page in 0..PAGES {
        region.read_at(page * PAGE_BYTES as u64, &mut bytes).unwrap();
        assert!(bytes == content(page + 1), "page {page} has other bytes");
    }
    drop(bigger);
    let began = Instant::now();
    drop(region);
    assert!(began.elapsed() < PATIENCE);
}

#[test]
fn with_two_copies_nothing_is_lost_with_a_node_that_is_killed() {
    let place = Place::new();
    let _first = Node::start(&place, &["--copies", "2"]);
    let second = Node::start(&place, &["--listen", "shm:second", "--join", "shm:highwire"]);
    put_many(&place);
    second.end("KILL");
    assert_eq!(look_for_all(&place), (OBJECTS, vec![]));
}

#[test]
fn a_node_that_is_ended_hands_its_objects_over() {
    let place = Place::new();
    let first = Node::start(&place, &[]);
    let second = Node::start(&place, &["--listen", "shm:second", "--join", "shm:highwire"]);
    let before = put_many(&place);
    assert!(before[1] > 0, "they are spread: {before:?}");
    let ended = second.end("TERM");
    let said = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.status.code(), Some(0), "{said}");
    assert!(
        said.contains("over to 1 other node") && said.ends_with("handed its objects over; nothing is lost here\n"),
        "{said}"
    );
    assert_eq!(look_for_all(&place), (OBJECTS, vec![]));
    let third = Node::start(&place, &["--listen", "shm:third", "--join", "shm:highwire", "--json"]);
    wait_for_nodes(&place, 2);
    // Without the coordinator nobody has anything.
    let said = String::from_utf8(first.end("INT").stdout).unwrap();
    assert!(said.contains("1 other node lost it, and empty"), "{said}");
    let said = third.end("INT");
    let left = json(String::from_utf8(said.stdout).unwrap().lines().last().unwrap());
    assert_eq!((&left["event"], &left["handed_over"]), (&"left".into(), &false.into()), "{left}");
}

#[test]
fn a_coordinator_that_was_killed_waits_when_it_starts_again_and_one_that_ended_does_not() {
    let place = Place::new();
    Node::start(&place, &[]).end("KILL");
    let began = Instant::now();
    let again = Node::start(&place, &[]);
    // It is waited for, as by every client.
    put_text(&place, "late", "but stored", &[]).code(0);
    assert!(began.elapsed() > Duration::from_secs(3), "after {:?}", began.elapsed());
    let ended = again.end("INT");
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("nobody is let in for 3.") && said.contains("nodes are let in now"), "{said}");
    let third = Node::start(&place, &[]);
    put_text(&place, "soon", "stored", &[]).code(0);
    assert_eq!(String::from_utf8(third.end("TERM").stderr).unwrap(), "");
}

#[test]
fn a_node_that_is_not_let_in_says_why() {
    let place = Place::new();
    let up = ["up", "--memory", "1M", "--listen", "shm:second", "--join", "shm:highwire"];
    let alone = Node::of(place.highwire(&up));
    std::thread::sleep(Duration::from_secs(4));
    let said = String::from_utf8(alone.end("INT").stderr).unwrap();
    assert!(said.contains("no coordinator of network memory answers at shm:highwire"), "{said}");
    let _first = Node::start(&place, &["--name", "one"]);
    let second = Node::start(&place, &["--listen", "shm:second", "--join", "shm:highwire"]);
    let wrong = place.highwire(&["up", "--memory", "1M", "--listen", "shm:third", "--join", "shm:second"]).assert();
    assert!(stderr(&wrong.code(1)).contains("not the coordinator"));
    let same = Node::of(
        place.highwire(&[&up[..3], &["--listen", "shm:x", "--join", "shm:highwire", "--name", "one"]].concat()),
    );
    std::thread::sleep(Duration::from_secs(4));
    let said = String::from_utf8(same.end("INT").stderr).unwrap();
    assert!(said.contains("there is a node \"one\" already"), "{said}");
    drop(second);
}

#[test]
fn a_user_without_privileges_has_nodes_and_objects_of_its_own() {
    let place = Place::new();
    let mut up = place.highwire(&["up", "--memory", "16M"]);
    let mut get = place.highwire(&["mem", "get", "mine"]);
    let mut put = place.highwire(&["mem", "put", "mine"]);
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        chown(place.path().join("run"), Some(NOBODY), Some(NOBODY)).unwrap();
        fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for command in [&mut up, &mut get, &mut put] {
            command.uid(NOBODY).gid(NOBODY);
        }
    } else {
        eprintln!("NOT TESTED, needs root: a user other than the one who runs the tests");
    }
    let _node = Node::of(up);
    fed(&mut put, "nobody's").code(0);
    assert_eq!(stdout(&get.assert().code(0)), "nobody's");
}

/// How many objects each node has.
fn objects_on_nodes(place: &Place) -> Vec<u64> {
    let told = json(&stdout(&place.highwire(&["mem", "stat", "--json"]).assert().code(0)));
    let objects = |node: &Value| node["objects"].as_u64().unwrap_or(0);
    told["nodes"].as_array().unwrap().iter().map(objects).collect()
}

fn wait_for_nodes(place: &Place, count: usize) {
    let deadline = Instant::now() + PATIENCE;
    while objects_on_nodes(place).len() != count {
        assert!(Instant::now() < deadline, "there are not {count} nodes");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Puts as many objects as tell something about all of them, and says how many each node has.
fn put_many(place: &Place) -> Vec<u64> {
    let nodes = || objects_on_nodes(place);
    let deadline = Instant::now() + PATIENCE;
    wait_for_nodes(place, 2);
    for number in 0..OBJECTS {
        loop {
            // A change of a bucket that goes to the other node right now may not be confirmed, which is said.
            let put = put_text(place, &format!("object {number}"), &format!("content {number}"), &[]);
            if put.get_output().status.success() {
                break;
            }
            assert!(stderr(&put).contains("was not confirmed") && Instant::now() < deadline, "{}", stderr(&put));
        }
    }
    // Buckets have moved once the second has something.
    while nodes()[1] == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    // Until nothing moves any more.
    let mut before = nodes();
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let after = nodes();
        if before == after {
            return after;
        }
        assert!(Instant::now() < deadline, "they do not settle: {after:?}");
        before = after;
    }
}

/// How many objects are there, and what is said of the others.
fn look_for_all(place: &Place) -> (u64, Vec<String>) {
    let (mut kept, mut lost) = (0, Vec::new());
    for number in 0..OBJECTS {
        let got = place.highwire(&["mem", "get", &format!("object {number}")]).output().unwrap();
        match got.status.code() {
            Some(0) => {
                assert_eq!(got.stdout, format!("content {number}").as_bytes());
                kept += 1;
            }
            Some(4) => lost.push(String::from_utf8(got.stderr).unwrap()),
            _ => panic!("{got:?}"),
        }
    }
    (kept, lost)
}

fn put_text(place: &Place, name: &str, text: &str, with: &[&str]) -> Assert {
    fed(place.highwire(&["mem", "put", name]).args(with), text)
}

/// Runs a command that reads this.
fn fed(command: &mut Command, text: &str) -> Assert {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // One that ends without reading is judged by how it ends.
    let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
    child.wait_with_output().unwrap().assert()
}

fn is_part(entry: &fs::DirEntry) -> bool {
    entry.file_name().to_string_lossy().ends_with(".part")
}

/// A node that has said where it listens; ended with this value, if not before.
struct Node {
    child: Child,
    addresses: Vec<String>,
    out: BufReader<ChildStdout>,
}

#[test]
fn nodes_change_their_key_when_they_are_told_and_go_on() {
    let place = Place::new();
    let file = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    let (old, new, present, next) = (file("old.key"), file("new.key"), file("present.key"), file("next.key"));
    let fingerprint = |key: &str| stdout(&place.highwire(&["key", "new", key]).assert().code(0)).trim().to_owned();
    let (olds, news) = (fingerprint(&old), fingerprint(&new));
    fs::copy(&old, &present).unwrap();
    fs::copy(&old, &next).unwrap();
    let keys = ["--key", &present, "--also-accept", &next, "--end-old"];
    let mut first = Node::start(&place, &[&["--listen", "udp:127.0.0.1:0"], &keys[..]].concat());
    let at = first.addresses[0].clone();
    let join = ["--listen", "udp:127.0.0.1:0", "--join", &at, "--name", "second"];
    let mut second = Node::start(&place, &[&join[..], &keys].concat());
    second.await_line("joined the nodes");
    let letter = file("letter");
    fs::write(&letter, "dear nodes").unwrap();
    let mem = |key: &str, arguments: &[&str]| {
        place.highwire(&["mem"]).args(arguments).args(["--at", &at, "--key", key]).output().unwrap().assert()
    };
    mem(&old, &["put", "letter", &letter]).code(0);
    let mut told = |expected: &str| {
        for node in [&mut first, &mut second] {
            signal("USR1", &node.child);
            let line = node.await_line("read the key files again");
            assert!(line.contains(expected), "{expected:?} is missing in {line:?}");
        }
    };
    // Accept the new key as well; call with it; drop the old one.
    fs::copy(&new, &next).unwrap();
    told(&format!("key {olds}, accepting {news} as well"));
    mem(&old, &["get", "letter"]).code(0);
    mem(&new, &["get", "letter"]).code(0);
    fs::copy(&new, &present).unwrap();
    fs::copy(&old, &next).unwrap();
    told(&format!("key {news}, accepting {olds} as well"));
    mem(&old, &["get", "letter"]).code(0);
    fs::copy(&new, &next).unwrap();
    told(&format!("key {news}"));
    assert_eq!(stdout(&mem(&new, &["get", "letter"]).code(0)), "dear nodes");
    assert!(stderr(&mem(&old, &["get", "letter"]).code(1)).contains("no answer"));
    // A file that cannot be read changes nothing.
    fs::set_permissions(&present, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    signal("USR1", &first.child);
    mem(&new, &["get", "letter"]).code(0);
    second.end("INT");
    let ended = first.end("INT");
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("chmod 600") && said.contains("the keys are what they were"), "{said}");
}

#[test]
fn a_node_may_open_as_many_descriptors_as_the_hard_limit_allows() {
    let place = Place::new();
    let mut up = Command::new("sh");
    up.args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh", BINARY, "up", "--memory", "16M"]);
    let node = Node::of({
        up.env("HIGHWIRE_RUNTIME_DIR", place.path().join("run")).stdin(Stdio::null());
        up
    });
    let limits = fs::read_to_string(format!("/proc/{}/limits", node.child.id())).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<&str> = files.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1], "{files}");
}

impl Node {
    fn start(place: &Place, with: &[&str]) -> Node {
        let mut up = place.highwire(&["up", "--memory", "16M"]);
        up.args(with);
        Node::of(up)
    }

    fn of(mut up: Command) -> Node {
        let mut child = up.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut node = Node { child, addresses: Vec::new(), out };
        loop {
            let mut line = String::new();
            if node.out.read_line(&mut line).unwrap() == 0 {
                let mut said = String::new();
                node.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                panic!("it has ended: {said}");
            }
            if line.starts_with("use it: ") || line.starts_with('{') {
                return node;
            }
            if line.starts_with("listening at ") {
                node.addresses.push(line.split(' ').nth(2).unwrap().to_owned());
            }
        }
    }

    /// The next line that begins so.
    fn await_line(&mut self, beginning: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "it has ended and not said {beginning:?}");
            if line.starts_with(beginning) {
                return line;
            }
        }
    }

    /// Sends it a signal and waits for its end; one that hangs is killed, and has no code.
    fn end(mut self, signal: &str) -> Output {
        self::signal(signal, &self.child);
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().unwrap().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.kill();
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        self.out.read_to_end(&mut stdout).unwrap();
        self.child.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
        Output { status: self.child.wait().unwrap(), stdout, stderr }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(signal: &str, whom: &Child) {
    Command::new("bash").args(["-c", "kill -s \"$0\" \"$1\"", signal, &whom.id().to_string()]).assert().success();
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

/// Far more than stays here, and than the smaller of two nodes has room for.
const PAGES: u64 = 2048;
/// Enough that two nodes have some of them each.
const OBJECTS: u64 = 24;
const NOBODY: u32 = 65534;
/// What takes so long does not come to its end.
const PATIENCE: Duration = Duration::from_secs(60);
