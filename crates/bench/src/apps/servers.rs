//! The servers of `bench apps`: where they are, how they are set up, and how they are ended.

use super::clients::ECHO_SENT;
use super::postgres;
use crate::BenchError;
use crate::folder::Folder;
use crate::launch::{self, Usage, Way, free_port};
use crate::pair::PATIENCE;
use crate::stats::Measure;
use crate::transports::files::Ramdisk;
use rustix::process::{Pid, Signal, geteuid, kill_process, kill_process_group};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// A server that is measured, with the client that is used for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum App {
    Redis,
    Nginx,
    Vsftpd,
    Iperf3,
    Memcached,
    Postgres,
    /// A program of our own: a thread for each connection.
    Threads,
    Socat,
    /// With nginx behind it.
    Haproxy,
}

impl App {
    /// Whose figure this is.
    pub(crate) fn of(measure: Measure) -> App {
        match measure.name().split('_').next() {
            Some("redis") => App::Redis,
            Some("nginx") => App::Nginx,
            Some("ftp") => App::Vsftpd,
            Some("iperf3") => App::Iperf3,
            Some("pgbench") => App::Postgres,
            Some("threads") => App::Threads,
            Some("echo") => App::Socat,
            Some("haproxy") => App::Haproxy,
            _ => App::Memcached,
        }
    }

    /// Its name, which is that of its server.
    pub(crate) fn name(self) -> &'static str {
        match self {
            App::Redis => "redis-server",
            App::Nginx => "nginx",
            App::Vsftpd => "vsftpd",
            App::Iperf3 => "iperf3",
            App::Memcached => "memcached",
            App::Postgres => "postgres",
            App::Threads => "threads",
            App::Socat => "socat",
            App::Haproxy => "haproxy",
        }
    }

    /// The user that it has to be, where this process is root.
    pub(crate) fn user(self) -> Option<&'static str> {
        (self == App::Postgres && geteuid().is_root()).then_some(postgres::USER)
    }

    fn program(self, folder: &Folder) -> Option<PathBuf> {
        match self {
            App::Postgres => postgres::program(self.name()),
            App::Threads => Some(folder.path().join(self.name())),
            _ => launch::find(self.name()),
        }
    }

    /// What is missing here for it.
    pub(crate) fn missing(self) -> Option<String> {
        let client = match self {
            App::Redis => Some(("redis-benchmark", "redis-tools")),
            App::Nginx => Some(("wrk", "wrk")),
            App::Vsftpd => Some(("curl", "curl")),
            App::Haproxy => return self.server_missing().or_else(|| App::Nginx.missing()),
            App::Iperf3 | App::Memcached | App::Postgres | App::Threads | App::Socat => None,
        };
        self.server_missing().or_else(|| missing(client.into_iter()))
    }

    /// The same of its server alone.
    pub(crate) fn server_missing(self) -> Option<String> {
        match self {
            App::Threads => None,
            App::Postgres => postgres::missing(),
            App::Nginx => missing([("nginx", "nginx-light")].into_iter()),
            _ => missing([(self.name(), self.name())].into_iter()),
        }
    }

    /// Its server's arguments, all files of it in `folder`.
    fn arguments(self, port: u16, sizes: &[usize], folder: &Path, ramdisk: &Path) -> Vec<String> {
        let folder = folder.display().to_string();
        let port = port.to_string();
        let line = match self {
            App::Redis => format!(
                "--port {port} --bind 127.0.0.1 --appendonly no --daemonize no --loglevel warning --dir {folder} --save"
            ),
            App::Nginx => format!("-e stderr -p {folder} -c {folder}/nginx.conf"),
            App::Vsftpd => format!("{folder}/vsftpd.conf"),
            App::Iperf3 => format!("--server --bind 127.0.0.1 --port {port}"),
            App::Memcached => {
                // It refuses to be root unless it is told to.
                let user = if geteuid().is_root() { " -u root" } else { "" };
                // A value is stored with its key, and larger ones than usual have to be allowed.
                let large = sizes.iter().any(|size| *size > MEMCACHED_BYTES_USUAL);
                let large = if large { " -I 2m" } else { "" };
                format!("-l 127.0.0.1 -p {port} -U 0 -t 1 -m 64{large}{user}")
            }
            App::Postgres => postgres::arguments(&port, &folder),
            App::Threads => format!("serve {port}"),
            App::Socat => format!("TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr,fork EXEC:cat"),
            App::Haproxy => format!("-db -f {folder}/haproxy.cfg"),
        };
        let mut arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        match self {
            // Never to a disk.
            App::Redis => arguments.push(String::new()),
            App::Vsftpd => arguments.push(format!("-oanon_root={}", ramdisk.display())),
            _ => {}
        }
        arguments
    }

    /// The file of its settings, if it has one.
    fn settings(self, port: u16, folder: &Path) -> Option<(&'static str, String)> {
        match self {
            App::Nginx => Some(("nginx.conf", nginx_settings(port, folder))),
            App::Vsftpd => Some(("vsftpd.conf", VSFTPD_SETTINGS.replace("PORT", &port.to_string()))),
            // Haproxy's name nginx's port.
            _ => None,
        }
    }
}

/// The first of these programs, each with its package, that is not here.
fn missing<'a>(mut programs: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    let (program, package) = programs.find(|(program, _)| launch::find(program).is_none())?;
    Some(format!("`{program}` is not installed (Debian: apt install {package})"))
}

/// A server that runs.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    pub(crate) app: App,
    pub(crate) way: Way,
    pub(crate) port: u16,
    /// The server that it asks itself.
    behind: Option<Box<Server>>,
}

impl Server {
    /// Starts one, with something of each size to ask for, and waits until it can be asked.
    pub(crate) fn start(
        app: App,
        way: Way,
        cpu: usize,
        sizes: &[usize],
        folder: &mut Folder,
        ramdisk: Option<&Ramdisk>,
    ) -> Result<Server, BenchError> {
        Server::start_in(&format!("{}-{way:?}", app.name()), app, way, cpu, sizes, folder, ramdisk)
    }

    /// The same, in a folder of this name.
    fn start_in(
        name: &str,
        app: App,
        way: Way,
        cpu: usize,
        sizes: &[usize],
        folder: &mut Folder,
        ramdisk: Option<&Ramdisk>,
    ) -> Result<Server, BenchError> {
        let missing = || BenchError::Missing(app.missing().unwrap_or_default());
        let program = app.program(folder).ok_or_else(missing)?;
        let port = free_port()?;
        std::fs::create_dir(folder.path().join(name))?;
        let place = folder.path().join(name);
        if let Some((file, settings)) = app.settings(port, &place) {
            folder.write(&format!("{name}/{file}"), settings.as_bytes())?;
        }
        let mut behind = None;
        match app {
            App::Haproxy => {
                let nginx = Server::start_in(&format!("{name}-nginx"), App::Nginx, way, cpu, sizes, folder, None)?;
                let settings = HAPROXY_SETTINGS.replace("BEHIND", &nginx.port.to_string());
                let settings = settings.replace("PORT", &port.to_string());
                folder.write(&format!("{name}/haproxy.cfg"), settings.as_bytes())?;
                behind = Some(Box::new(nginx));
            }
            App::Postgres => postgres::prepare(&place, app.user())?,
            App::Socat => _ = folder.write(ECHO_SENT, &page(ECHO_BYTES))?,
            _ => {}
        }
        if app == App::Nginx {
            for size in sizes {
                folder.write(&format!("{name}/{size}"), &page(*size))?;
            }
        }
        let mut served = folder.path().to_owned();
        if let (App::Vsftpd, Some(ramdisk)) = (app, ramdisk) {
            for size in sizes {
                served = ramdisk.source(*size)?.parent().map_or(served, Path::to_owned);
            }
        }
        let log = place.join("log");
        let mut command = launch::command_as(app.user(), way, cpu, &program)?;
        command.args(app.arguments(port, sizes, &place, &served));
        let child = in_own_group(&mut command, File::create(&log)?).spawn().map_err(BenchError::Start)?;
        let mut server = Server { child, app, way, port, behind };
        folder.watch(server.child.id())?;
        server.wait_until_it_listens(&log)?;
        if matches!(app, App::Redis | App::Memcached) {
            for size in sizes {
                server.store(*size)?;
            }
        }
        if app == App::Postgres {
            postgres::fill(port)?;
        }
        Ok(server)
    }

    /// Looks at the kernel's table, since a connection that says nothing would count as a client.
    fn wait_until_it_listens(&mut self, log: &Path) -> Result<(), BenchError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
            if listens(&table, self.port) {
                return Ok(());
            }
            let ended = self.child.try_wait()?;
            if ended.is_some() || Instant::now() > deadline {
                let said = std::fs::read_to_string(log).unwrap_or_default();
                let said = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
                let status = ended.map_or("it does not listen".to_owned(), |status| status.to_string());
                return Err(BenchError::Program { name: self.app.name(), why: format!("{status}: {said}") });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stores a value in redis or memcached, and looks whether it is there.
    fn store(&self, size: usize) -> Result<(), BenchError> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let value = page(size);
        let key = value_key(size);
        let (set, get, stores, gives) = match self.app {
            App::Redis => (
                format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${size}\r\n", key.len()),
                format!("\r\nGET {key}\r\n"),
                "+OK\r\n",
                format!("${size}\r\n"),
            ),
            _ => (
                format!("set {key} 0 0 {size}\r\n"),
                format!("\r\nget {key}\r\n"),
                "STORED\r\n",
                format!("VALUE {key} 0 {size}\r\n"),
            ),
        };
        let command = [set.as_bytes(), &value, get.as_bytes()].concat();
        (&stream).write_all(&command)?;
        let mut answers = BufReader::new(&stream);
        let mut lines = [String::new(), String::new()];
        for line in &mut lines {
            answers.read_line(line)?;
        }
        let mut stored = vec![0; size];
        if lines == [stores.to_owned(), gives] {
            answers.read_exact(&mut stored)?;
        }
        if stored == value {
            return Ok(());
        }
        let why = format!("it was to store {size} bytes, and said {:?}", lines.concat());
        Err(BenchError::Program { name: self.app.name(), why })
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// CPU time of all its processes so far.
    pub(crate) fn usage(&self) -> Usage {
        let own = Usage::of_group(self.child.id());
        self.behind.as_ref().map_or(own, |behind| own.and(behind.usage()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Asked first, it ends its workers itself, and waits for them.
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(group, Signal::TERM);
            let deadline = Instant::now() + Duration::from_secs(1);
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// With its workers in a group of its own, and what it says in a file: nobody reads a pipe meanwhile.
fn in_own_group(command: &mut Command, log: File) -> &mut Command {
    use std::os::unix::process::CommandExt;
    match log.try_clone() {
        Ok(second) => command.process_group(0).stdout(second).stderr(log),
        Err(_) => command.process_group(0).stderr(log),
    }
}

/// Whether somebody listens at this port of loopback, by the kernel's table of IPv4 sockets.
fn listens(table: &str, port: u16) -> bool {
    let place = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next().unwrap_or_default(), fields.nth(1).unwrap_or_default());
        local.ends_with(&place) && state == LISTENING
    })
}

/// Something of this size to ask for.
pub(crate) fn page(size: usize) -> Vec<u8> {
    (0..size).map(|place| b'a' + (place % 26) as u8).collect()
}

/// The key of a value of this size.
pub(crate) fn value_key(size: usize) -> String {
    format!("value:{size}")
}

/// The name of the file of this size on the server.
pub(crate) fn ftp_name(size: usize) -> String {
    format!("{size}-bytes")
}

fn nginx_settings(port: u16, folder: &Path) -> String {
    // Started by root, its worker would become somebody who may not read the folder.
    let user = if geteuid().is_root() { "user root;" } else { "" };
    let folder: PathBuf = folder.to_owned();
    let folder = folder.display();
    let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("    {name}_temp_path {folder}/{name};\n"))
        .concat();
    format!(
        "daemon off;\n{user}\nworker_processes 1;\npid {folder}/pid;\nerror_log stderr;\n\
         events {{ worker_connections 1024; }}\nhttp {{\n{paths}    access_log off;\n    sendfile on;\n    \
         keepalive_requests 1000000000;\n    keepalive_timeout 600s;\n    server {{\n        \
         listen 127.0.0.1:{port};\n        root {folder};\n    }}\n}}\n"
    )
}

const VSFTPD_SETTINGS: &str = "\
listen=YES
listen_address=127.0.0.1
listen_port=PORT
background=NO
one_process_model=YES
run_as_launching_user=YES
anonymous_enable=YES
local_enable=NO
no_anon_password=YES
seccomp_sandbox=NO
xferlog_enable=NO
";

const HAPROXY_SETTINGS: &str = "\
global
    maxconn 1024
    nbthread 1
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
frontend asked
    bind 127.0.0.1:PORT
    default_backend behind
backend behind
    http-reuse always
    server nginx 127.0.0.1:BEHIND
";

/// What goes through socat and cat, and back.
const ECHO_BYTES: usize = 64 << 20;
/// The largest value that memcached takes by itself, less its key and what else is stored with it.
const MEMCACHED_BYTES_USUAL: usize = 1_000_000;
/// The state of a listening socket in the kernel's table.
const LISTENING: &str = "0A";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measure_has_a_server() {
        for measure in Measure::APPS {
            let app = App::of(measure);
            let short = match app {
                App::Postgres => "pgbench",
                App::Socat => "echo",
                _ => app.name().trim_start_matches("vs").trim_end_matches("-server").trim_end_matches('d'),
            };
            assert!(measure.name().starts_with(short), "{} is measured by {}", app.name(), measure.name());
        }
    }

    #[test]
    fn what_is_missing_is_told_with_its_package() {
        let said = missing([("sh", "dash"), ("no-such-program", "some-package")].into_iter()).unwrap();
        assert!(said.contains("`no-such-program`") && said.contains("apt install some-package"), "{said}");
        assert_eq!(missing([("sh", "dash")].into_iter()), None);
    }

    #[test]
    fn the_kernels_table_tells_who_listens() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n\
             0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000\n\
             1: 0100007F:1F91 0100007F:C000 01 00000000:00000000 00:00000000 00000000\n";
        assert!(listens(table, 8080));
        assert!(!listens(table, 8081) && !listens(table, 49152) && !listens("", 8080));
    }

    #[test]
    fn nothing_of_a_server_is_outside_its_folder() {
        let settings = nginx_settings(8080, Path::new("/tmp/place"));
        assert_eq!(settings.matches("/tmp/place").count(), 7, "{settings}");
        assert!(settings.contains("listen 127.0.0.1:8080;"));
        let ftp = App::Vsftpd.settings(2121, Path::new("/tmp/place")).unwrap().1;
        assert!(ftp.contains("listen_port=2121\n") && ftp.contains("listen_address=127.0.0.1\n"), "{ftp}");
        let redis = App::Redis.arguments(6379, &[3], Path::new("/tmp/place"), Path::new("/dev/shm"));
        assert_eq!(redis[redis.len() - 2..], ["--save", ""]);
        let memcached = |size| App::Memcached.arguments(1, &[size], Path::new(""), Path::new("")).join(" ");
        assert!(memcached(1 << 20).contains("-I 2m") && !memcached(100).contains("-I"));
    }
}
