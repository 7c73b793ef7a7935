//! Programs that everybody has: what they answer and transfer under Highwire is what they do plainly.

use crate::actor::{Actor, run};
use crate::compiled::compiled;
use crate::ground::{Ground, Way, free_port, installed, until, until_listening};
use rustix::process::Signal;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const WAYS: [Way; 2] = [Way::Plain, Way::Highwire];

/// A Python program of these tests, under Highwire or not.
fn python(ground: &Ground, way: Way, script: &str) -> Command {
    let mut command = ground.command(way, installed("python3", "python3"));
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lane/python").join(script));
    command
}

/// Some of a lane, where one is expected and somebody can say.
fn assert_lane(ground: &Ground, way: Way, process: u32, who: &str) {
    let moved = ground.lane_bytes(process);
    match way {
        Way::Plain => assert!(moved.is_none_or(|bytes| bytes == 0), "{who} runs plainly, and moved {moved:?} by lanes"),
        Way::Highwire => assert!(moved > Some(0), "{who}: no byte went by a lane: {moved:?}"),
    }
}

#[test]
fn redis_answers_the_same_to_thousands_of_commands() {
    let outcomes = WAYS.map(|way| {
        let ground = Ground::new();
        let port = free_port().to_string();
        let mut command = ground.command(way, installed("redis-server", "redis-server"));
        command.args(["--port", &port, "--bind", "127.0.0.1", "--save", "", "--dir", ground.path().to_str().unwrap()]);
        command.args(["--enable-debug-command", "yes", "--io-threads", "1"]);
        let server = Actor::start("redis", &mut command);
        until_listening(port.parse().unwrap());

        let start = |arguments: &[&str]| {
            let mut command = python(&ground, way, "redis_client.py");
            Actor::start(arguments[0], command.arg(&port).args(arguments))
        };
        // Several at once, each with keys of its own, and a snapshot, which forks, in between.
        let clients: Vec<Actor> = ["a", "b", "c", "d"].map(|name| start(&["mixed", name, "1500"])).into();
        let saver = start(&["save"]);
        let mut heard: Vec<Actor> = (0..2).map(|_| start(&["subscribe", "news", "600"])).collect();
        heard.iter_mut().for_each(|actor| drop(actor.told("subscribed")));
        let publisher = start(&["publish", "news", "600"]);
        let mut said: Vec<Vec<String>> = clients.into_iter().map(Actor::ended_well).collect();
        said.push(saver.ended_well());
        said.push(publisher.ended_well());
        said.extend(heard.into_iter().map(Actor::ended_well));

        // And its own client, as people use it.
        let script = ground.file("script", redis_script());
        let mut command = ground.command(way, installed("redis-cli", "redis-tools"));
        command.args(["-p", &port]).stdin(std::fs::File::open(script).unwrap());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        said.push(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect());
        said.push(start(&["digest"]).ended_well());
        assert_lane(&ground, way, server.id(), "redis");
        server.signal(Signal::TERM);
        server.ended_well();
        said
    });
    assert!(outcomes[0][4].contains(&"b'ok'".to_owned()), "the snapshot was made: {:?}", outcomes[0][4]);
    assert_eq!(outcomes[0], outcomes[1]);
}

/// A few hundred lines for `redis-cli`.
fn redis_script() -> String {
    let mut script = String::new();
    for number in 0..300 {
        script.push_str(&match number % 6 {
            0 => format!("set cli:{} value-{number}\n", number % 40),
            1 => format!("get cli:{}\n", number % 40),
            2 => format!("rpush cli:list {number} {}\n", "x".repeat(number * 10)),
            3 => "lrange cli:list -3 -1\n".to_owned(),
            4 => format!("incr cli:count:{}\n", number % 5),
            _ => format!("eval \"return {{{number}, redis.call('llen', 'cli:list')}}\" 0\n"),
        });
    }
    script
}

/// A running nginx; ended with this value, also one that has put itself into the background.
struct Nginx {
    master: u32,
    _actor: Actor,
}

impl Nginx {
    fn start(ground: &Ground, way: Way, port: u16, settings: &str, http: &str) -> Nginx {
        let root = ground.path();
        let configuration = ground.file(
            "nginx.conf",
            format!(
                "{settings}\npid {root}/nginx.pid;\nerror_log {root}/nginx.log;\nevents {{ worker_connections 512; }}\n\
                 http {{\naccess_log off;\n{http}\nclient_body_temp_path {root}/body;\nproxy_temp_path {root}/proxy;\n\
                 fastcgi_temp_path {root}/fastcgi;\nuwsgi_temp_path {root}/uwsgi;\nscgi_temp_path {root}/scgi;\n\
                 server {{ listen 127.0.0.1:{port}; root {root}/files; }}\n}}\n",
                root = root.display()
            ),
        );
        let mut command = ground.command(way, installed("nginx", "nginx-light"));
        command.args(["-p", root.to_str().unwrap(), "-c", configuration.to_str().unwrap()]);
        let actor = Actor::start("nginx", &mut command);
        until_listening(port);
        let file = root.join("nginx.pid");
        let process = || std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        until("nginx has written its process id", || process().is_some());
        Nginx { master: process().unwrap(), _actor: actor }
    }

    fn signal(&self, signal: Signal) {
        let process = rustix::process::Pid::from_raw(self.master as i32).unwrap();
        rustix::process::kill_process(process, signal).unwrap();
    }

    fn workers(&self) -> Vec<u32> {
        let list = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.master)).unwrap_or_default();
        list.split_whitespace().map(|process| process.parse().unwrap()).collect()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let kill = |process: u32, signal: Signal| {
            let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(process as i32).unwrap(), signal);
        };
        // It starts a worker for each that dies, until it is stopped itself.
        kill(self.master, Signal::STOP);
        until("nginx has stopped", || {
            let state = std::fs::read_to_string(format!("/proc/{}/stat", self.master)).unwrap_or_default();
            state.rsplit(") ").next().is_none_or(|rest| !rest.starts_with(['R', 'S', 'D']))
        });
        let workers = self.workers();
        kill(self.master, Signal::KILL);
        workers.into_iter().for_each(|worker| kill(worker, Signal::KILL));
    }
}

/// Where ten thousand files are, made once for a test.
fn ten_thousand_files(ground: &Ground) -> PathBuf {
    let files = ground.directory("files");
    run("web make", Command::new(compiled("web")).arg("make").arg(&files).arg("10000")).well("web make");
    files
}

#[test]
fn nginx_serves_ten_thousand_files() {
    for way in WAYS {
        let ground = Ground::new();
        ten_thousand_files(&ground);
        let port = free_port();
        let nginx = Nginx::start(
            &ground,
            way,
            port,
            "daemon off; worker_processes 1; user root;",
            "sendfile on; keepalive_requests 1000000;",
        );
        let fetch = |connections: &str| {
            let mut command = ground.command(way, compiled("web"));
            let mut client = Actor::start("web", command.args(["fetch", &port.to_string(), "10000", connections]));
            let process = client.told("hold").parse().unwrap();
            let lanes = [ground.lane_bytes(process), ground.lane_bytes(nginx.workers()[0])];
            client.end_input();
            assert_eq!(client.ended_well().last().map(String::as_str), Some("10000 files"));
            lanes
        };
        fetch("8");
        // Whether anybody looks when an answer comes depends on what else the machine does.
        let mut lanes = fetch("1");
        for _attempt in 0..2 {
            if way == Way::Highwire && lanes.contains(&Some(0)) {
                lanes = fetch("1");
            }
        }
        match way {
            Way::Plain => assert_eq!(lanes, [None; 2]),
            Way::Highwire => assert!(lanes.iter().all(|bytes| *bytes > Some(0)), "no byte went by a lane: {lanes:?}"),
        }
    }
}

#[test]
fn nginx_in_the_background_with_several_workers_reloads_while_it_serves() {
    for way in WAYS {
        let ground = Ground::new();
        ten_thousand_files(&ground);
        let port = free_port();
        let settings = "daemon on; worker_processes 4;";
        let nginx = Nginx::start(&ground, way, port, settings, "keepalive_requests 700; open_file_cache max=100;");
        let fetch = |connections: &str| {
            let mut command = ground.command(way, compiled("web"));
            Actor::start("web", command.args(["fetch", &port.to_string(), "10000", connections]))
        };
        let mut clients = [fetch("16"), fetch("3")];
        let before = nginx.workers();
        for _reload in 0..3 {
            std::thread::sleep(Duration::from_millis(60));
            nginx.signal(Signal::HUP);
        }
        for client in &mut clients {
            client.told("hold");
            client.end_input();
        }
        for client in clients {
            assert_eq!(client.ended_well().last().map(String::as_str), Some("10000 files"));
        }
        until("nginx has other workers after a reload", || {
            let now = nginx.workers();
            !now.is_empty() && now.iter().all(|worker| !before.contains(worker))
        });
        let log = std::fs::read_to_string(ground.path().join("nginx.log")).unwrap();
        for word in ["[alert]", "[crit]", "[emerg]", "[error]"] {
            assert!(!log.contains(word), "{way:?}: {log}");
        }
    }
}

#[test]
fn vsftpd_sends_and_takes_files_with_its_isolation_and_in_one_process() {
    if !crate::ground::is_root("vsftpd: it has to change its user") {
        return;
    }
    for (isolation, setting) in [("default", ""), ("one process", "one_process_model=YES\n")] {
        for way in WAYS {
            let ground = Ground::new();
            let files = ground.directory("ftp");
            let incoming = ground.directory("ftp/incoming");
            let empty = ground.directory("empty");
            // Only the user for anonymous guests may write there, and nowhere else.
            std::fs::set_permissions(&incoming, Permissions::from_mode(0o777)).unwrap();
            std::fs::set_permissions(&empty, Permissions::from_mode(0o555)).unwrap();
            let contents = bytes(20 << 20);
            std::fs::write(files.join("large"), &contents).unwrap();
            let port = free_port();
            let configuration = ground.file(
                "vsftpd.conf",
                format!(
                    "listen=YES\nlisten_address=127.0.0.1\nlisten_port={port}\nbackground=NO\nanonymous_enable=YES\n\
                     local_enable=NO\nwrite_enable=YES\nanon_upload_enable=YES\nanon_umask=022\nanon_root={}\n\
                     secure_chroot_dir={}\nconnect_from_port_20=NO\nxferlog_enable=NO\nsetproctitle_enable=NO\n{setting}",
                    files.display(),
                    empty.display()
                ),
            );
            let mut command = ground.command(way, installed("vsftpd", "vsftpd"));
            let server = Actor::start("vsftpd", command.arg(&configuration));
            until_listening(port);
            let curl = |arguments: &[&str]| {
                let mut command = ground.command(way, installed("curl", "curl"));
                command.args(["--silent", "--show-error", "--max-time", "20"]).args(arguments);
                run("curl", &mut command).well(&format!("curl {arguments:?} from vsftpd ({isolation}, {way:?})"))
            };
            let here = ground.path().join("fetched");
            let address = format!("ftp://127.0.0.1:{port}");
            curl(&["-o", here.to_str().unwrap(), &format!("{address}/large")]);
            assert!(
                std::fs::read(&here).unwrap() == contents,
                "{isolation}, {way:?}: what was fetched is not what is there"
            );
            curl(&["-T", here.to_str().unwrap(), &format!("{address}/incoming/sent")]);
            assert!(std::fs::read(incoming.join("sent")).unwrap() == contents, "{isolation}, {way:?}: what was sent");
            let listing = curl(&["--list-only", &format!("{address}/incoming/")]);
            assert_eq!(listing, ["sent"], "{isolation}, {way:?}");
            let tail = ground.path().join("tail");
            curl(&["-r", "19000000-", "-o", tail.to_str().unwrap(), &format!("{address}/large")]);
            assert!(
                std::fs::read(&tail).unwrap() == contents[19_000_000..],
                "{isolation}, {way:?}: from the middle on"
            );
            drop(server);
        }
    }
}

#[test]
fn pythons_web_server_serves_curl_and_urllib() {
    let outcomes = WAYS.map(|way| {
        let ground = Ground::new();
        let files = ground.directory("files");
        std::fs::write(files.join("small"), "small\n").unwrap();
        std::fs::write(files.join("middle"), bytes(30_000)).unwrap();
        std::fs::write(files.join("large"), bytes(3 << 20)).unwrap();
        let port = free_port().to_string();
        let mut command = ground.command(way, installed("python3", "python3"));
        command.args(["-m", "http.server", "--bind", "127.0.0.1", "--protocol", "HTTP/1.1", "--directory"]);
        let _server = Actor::start("http.server", command.arg(&files).arg(&port));
        until_listening(port.parse().unwrap());
        let mut command = python(&ground, way, "fetch.py");
        let mut said = run("fetch.py", command.arg(&port).args(["small", "middle", "large"])).well("fetch.py");
        // One process of curl, which keeps its connection for all of them.
        let mut command = ground.command(way, installed("curl", "curl"));
        command.args([
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            "20",
            "--write-out",
            "%{url} %{size_download}\n",
        ]);
        for turn in 0..6 {
            for name in ["small", "middle", "large"] {
                let file = ground.path().join(format!("curl-{turn}-{name}"));
                command.args(["-o", file.to_str().unwrap(), &format!("http://127.0.0.1:{port}/{name}")]);
            }
        }
        let sizes = run("curl", &mut command).well("curl");
        said.extend(sizes.into_iter().map(|line| line.rsplit('/').next().unwrap().to_owned()));
        for turn in 0..6 {
            for name in ["small", "middle", "large"] {
                let fetched = std::fs::read(ground.path().join(format!("curl-{turn}-{name}"))).unwrap();
                assert!(fetched == std::fs::read(files.join(name)).unwrap(), "{way:?}: {name} is not what is there");
            }
        }
        said
    });
    assert_eq!(outcomes[0], outcomes[1]);
}

#[test]
fn memcached_keeps_what_it_is_given() {
    let outcomes = WAYS.map(|way| {
        let ground = Ground::new();
        let port = free_port().to_string();
        let mut command = ground.command(way, installed("memcached", "memcached"));
        let server =
            Actor::start("memcached", command.args(["-p", &port, "-U", "0", "-l", "127.0.0.1", "-u", "nobody"]));
        until_listening(port.parse().unwrap());
        let clients = ["a", "b", "c"].map(|name| {
            Actor::start("memcached client", python(&ground, way, "memcached_client.py").arg(&port).arg(name))
        });
        let said = clients.map(Actor::ended_well);
        server.signal(Signal::TERM);
        server.ended_well();
        said
    });
    assert_eq!(outcomes[0], outcomes[1]);
}

#[test]
fn iperf3_counts_what_it_sent() {
    let ground = Ground::new();
    for (way, seconds) in [(Way::Plain, "1"), (Way::Highwire, "2")] {
        let port = free_port().to_string();
        let mut command = ground.command(way, installed("iperf3", "iperf3"));
        let server = Actor::start("iperf3 server", command.args(["-s", "-1", "-B", "127.0.0.1", "-p", &port]));
        until_listening(port.parse().unwrap());
        let mut command = ground.command(way, installed("iperf3", "iperf3"));
        let client = Actor::start("iperf3", command.args(["-c", "127.0.0.1", "-p", &port, "-t", seconds, "-J"]));
        let report = client.ended_well().join("\n");
        let report: serde_json::Value =
            serde_json::from_str(&report).unwrap_or_else(|error| panic!("{error}: {report}"));
        let bytes = |what: &str| report["end"][what]["bytes"].as_u64().unwrap_or_else(|| panic!("{what}: {report}"));
        let (sent, received) = (bytes("sum_sent"), bytes("sum_received"));
        assert!(received > 10 << 20 && sent >= received, "{way:?}: {sent} bytes sent, {received} received");
        server.ended_well();
    }
}

/// Bytes that no compression and no repetition makes right by chance.
fn bytes(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
