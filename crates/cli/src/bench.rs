//! `highwire bench`: from the command line to a report.

use clap::{Args, Subcommand, ValueEnum};
use highwire_bench::{Bench, Contestant, Measure, Options, State};
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// One-way latency of messages of 4 B to 1 MiB
    Latency(TransportArgs),
    /// Bandwidth and messages per second with messages of 4 B to 1 MiB
    Bandwidth(TransportArgs),
    /// Three ways to cut large messages into pulses: fixed, whole, adaptive
    ///
    /// Repeats table 1 of the Trapeze paper, with its adaptive pipelining between two processes. With
    /// --report it also draws the paper's figure 3 from a real trace.
    Pipelining(CommonArgs),
    /// Memory and latency of 1, 100 and 1,000 virtual interfaces between two processes
    Connections(CommonArgs),
    /// Latency, bandwidth and CPU time over a network: UDP, TCP, and virtual interfaces over UDP
    ///
    /// Makes two network namespaces, which are like two hosts, joins them by virtual Ethernet (veth),
    /// puts a process into each, and removes everything at the end, however that comes. This needs
    /// root, and the program `ip` (Debian: iproute2). Without root both processes stay where they are
    /// and talk over loopback; the report says so.
    ///
    /// Veth passes on what a sender hands over at once in one piece, as a network card with offloads
    /// does. A second pair of devices has that switched off (with `ethtool`, Debian: ethtool): there
    /// every packet of 1500 bytes is sent and received by itself.
    ///
    /// Measured are one-way latency (4 B to 64 KiB), bandwidth (1 KiB to 1 MiB), and at 1 MiB the CPU
    /// time that each side needs for a gigabyte. Ratios are to `udp-spin` for latency, and to
    /// `tcp-block` for the rest.
    Wire(WireArgs),
    /// What receiving payloads straight into their buffers gains, and what guessing wrong costs
    ///
    /// A receiver guesses where the payloads of the next packets belong, and has the kernel put them there: they
    /// land. A guess that was wrong costs a copy, as if nothing had been guessed, and some more. This repeats the
    /// measurements of the paper on speculative defragmentation, with messages of 1 MiB in packets for an Ethernet of
    /// 1,500 bytes, between two network namespaces as `bench wire` makes them (as root; otherwise over loopback).
    ///
    /// Measured are bandwidth (the paper's figures 5 and 6), and the CPU time that each side needs for a gigabyte, with
    /// receives that go through 4, 2 and 64 MiB of memory in turn (sizes 1M, 2M and 64M); how many packets of a hundred
    /// land with one sender and with four at a time; and how many of 100,000 do not while 0, 100 and 10,000 small
    /// messages of somebody else come among them (the paper's table 1). Ratios are to `copying`. The first word, the
    /// last one and another of each message are checked: one that is wrong ends the run.
    Landing(LandingArgs),
    /// Stream sockets over virtual interfaces, beside TCP and Unix sockets, and what each step to them gains
    ///
    /// Repeats the measurements of the paper on sockets over virtual interfaces between two processes: one-way latency
    /// (4 B to 32 KiB; the paper's figure 5 and table 3), bandwidth (4 B to 32 KiB, and 1 MiB; figures 7 and 8, and the
    /// steps of table 4), messages per second of writes of 64 B whose reader has a buffer of 64 KiB, and transfers of
    /// files from memory to memory (table 5, and 1 GiB; they take their sizes in /dev/shm twice, and are removed
    /// whatever happens). With --report it draws the three figures.
    ///
    /// Ratios are to `vi` for latency, to `vi-buffered` for bandwidth, to `tcp-nagle` for messages, and to `copy` for
    /// files. What streams carry before the clock starts is checked byte by byte, and every file afterwards: one byte
    /// that is wrong ends the run. As root, `vi-udp-sealed` and `sock-udp-sealed` are measured between two network
    /// namespaces, as `bench wire` makes them; otherwise over loopback. All others stay on one host.
    ///
    /// Other than in `bench latency` and `bench bandwidth`, whoever makes calls that block may run on both CPUs, as most
    /// programs may: a process with a single CPU never spins before it sleeps.
    Sockets(SocketArgs),
    /// A plain C program under `highwire run`, beside the same program over TCP and Unix sockets
    ///
    /// Measured are one-way latency (4 B to 32 KiB) and bandwidth (64 B to 1 MiB) between two processes of an ordinary
    /// program, which is compiled with this command and has nothing of Highwire in it. Each end is on a CPU of its own;
    /// those of `run-block-one-core` and `tcp-block-one-core` share one, and have their latency measured only.
    ///
    /// Ratios are to the same program over TCP that waits in the same way: `run-spin` and `unix-spin` to `tcp-spin`,
    /// `run-block` and `run-one-end` to `tcp-block`, `run-block-one-core` to `tcp-block-one-core`. What is sent before
    /// the clock starts is checked byte by byte: one that is wrong ends the run.
    Lane(LaneArgs),
    /// redis, nginx, vsftpd, iperf3 and memcached under `highwire run`, beside the same programs as they are
    ///
    /// Requests per second, or bytes, of servers and clients as they come with the system; beside each figure the 99th
    /// percentile of the latency, where there is one, and the CPU time of server and client for a request, or for a
    /// gigabyte. Servers run for the whole time, one plain and one under `highwire run`, on ports of loopback that are
    /// free, and are ended whatever happens; a file for vsftpd is in /dev/shm meanwhile. A program that is not installed
    /// is named with its Debian package, and what needs it is left out, unless --measures asks for it.
    ///
    /// Ratios are to `plain`, in the same round. A trial takes about a second, so that a round of everything takes 25.
    #[command(mut_arg("seconds", |seconds| seconds.default_value("120")))]
    Apps(AppsArgs),
    /// Remote procedure calls, beside redis, memcached, tonic and tarpc
    ///
    /// One process calls, another on a CPU of its own answers. Measured are the time of a call that carries nothing, there
    /// and back (call_ns); of one that is answered by a value of 8 KiB or 1 MiB (fetch_ns); the bytes per second of values
    /// of 1 MiB, 8 of them under way at a time (fetch_gb_s); and the calls per second over one connection with 1, 2, 4 and
    /// so on up to 256 calls under way (calls_per_s). Beside them are the messages that carry our calls: their one-way
    /// latency at 4 B (latency_ns) and their bandwidth (bandwidth_gb_s).
    ///
    /// Ratios are to `shm`, in the same round. A table of its own compares each of our contestants to the virtual interface
    /// that takes the same way: a call to two of its messages, and values to its bandwidth.
    ///
    /// Servers of others are programs on loopback, on ports that are free, and are ended whatever happens; one that is not
    /// installed is named with its Debian package, and its rows are left out, unless --contestants asks for them. As root,
    /// what goes between hosts is measured between two network namespaces, as `bench wire` makes them; otherwise over
    /// loopback.
    Rpc(RpcArgs),
    /// Memory of other nodes, read page by page, beside a mapped file on the disk
    ///
    /// A region is read that has four times the memory that its reader may keep for it. Measured are the time of a page of
    /// 4 KiB where pages are read in random order (random_page_ns), and the bytes per second where it is read in pieces of
    /// 1 MiB from one end to the other (sequential_gb_s). Beside them are the messages that carry pages: their one-way
    /// latency at 4 KiB (latency_ns) and their bandwidth at 1 MiB (bandwidth_gb_s).
    ///
    /// Ratios are to `mapped-file`, in the same round: a file without a name, in the current directory or in that of --dir,
    /// of which nothing is in memory before each trial; that is looked after, and a directory whose files are in memory is
    /// refused. As root, what goes between hosts is measured between two network namespaces, as `bench wire` makes them;
    /// otherwise over loopback.
    Netmem(NetmemArgs),
}

#[derive(Debug, Args)]
pub(crate) struct NetmemArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas [default: all]
    ///
    /// Ours: paged (memory of another process), paged-udp (of another host). The messages that carry pages: vi, vi-udp.
    /// And mapped-file.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
    /// What to measure, separated by commas: random_page_ns, sequential_gb_s [default: both]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_netmem_measure)]
    measures: Vec<Measure>,
    /// Bytes of the region that is read, a multiple of 1M
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_region)]
    region: usize,
    /// Bytes of it that its reader may keep in memory of its own [default: a quarter of the region]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    budget: Option<usize>,
    /// Make the file in this directory [default: the current one]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Measure over loopback, as is done without root
    #[arg(long)]
    loopback: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RpcArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas [default: all but those of --peers]
    ///
    /// Ours: shm (two processes of one host), udp (between hosts, packets with a checksum), udp-sealed (the same,
    /// encrypted). The messages that carry them: vi, vi-udp, vi-udp-sealed. Others, over loopback: redis and memcached
    /// (asked by a client of our own that does as little as it can; a call is PING or `version`, a fetch is GET), and
    /// those of --peers, tonic and tarpc.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
    /// What to measure, separated by commas: call_ns, fetch_ns, fetch_gb_s, calls_per_s [default: everything]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_rpc_measure)]
    measures: Vec<Measure>,
    /// How many calls to have under way at a time for calls_per_s, separated by commas: 1 to 1024
    /// [default: 1,2,4,8,16,32,64,128,256]
    #[arg(long, value_name = "NUMBERS", value_delimiter = ',', value_parser = parse_outstanding)]
    outstanding: Vec<usize>,
    /// Measure other libraries too, where the program in `peers` has been built: tonic and tarpc
    #[arg(long)]
    peers: bool,
    /// Measure over loopback, as is done without root
    #[arg(long)]
    loopback: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LaneArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas [default: all]
    ///
    /// Under `highwire run`: run-spin (both ends looking without pause), run-block (calls that block), run-one-end (the
    /// same, only the server under `highwire run`), run-block-one-core (both ends on one CPU). Without: tcp-spin,
    /// tcp-block, unix-spin, tcp-block-one-core.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
}

#[derive(Debug, Args)]
pub(crate) struct AppsArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas: plain, highwire [default: both]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
    /// What to measure, separated by commas [default: everything]
    ///
    /// redis_get_c1_rps, redis_set_c1_rps, redis_get_c50_rps and redis_get_c50_p16_rps (redis-benchmark, 1 or 50
    /// connections, 16 requests at a time; values of 3 and 8,192 bytes); nginx_c1_rps, nginx_c32_rps and nginx_close_rps
    /// (wrk, connections that are kept, or one for each request; pages of 612 bytes); ftp_curl_mb_s (a file of 1 GiB from
    /// vsftpd); iperf3_gb_s; memcached_get_c1_rps (values of 100 bytes); pgbench_tpcb_c10_tps and pgbench_select_c1_tps
    /// (PostgreSQL); threads_2000_rps (2,000 connections, each with a thread of the server); echo_64m_mb_s (64 MiB through
    /// socat and cat, and back); haproxy_c16_rps (wrk, 16 connections to haproxy before nginx).
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = parse_measure)]
    measures: Vec<Measure>,
}

#[derive(Debug, Args)]
pub(crate) struct SocketArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas [default: all]
    ///
    /// Latency and bandwidth: vi and vi-buffered (virtual interfaces without sockets), sock (both ends looking without
    /// pause), sock-block (calls that block, as most programs use them), sock-handler (one thread handles the messages
    /// of all streams), sock-notify (one for each stream), sock-udp-sealed and vi-udp-sealed (between hosts,
    /// encrypted); the kernel's tcp-spin and unix-spin (looking without pause), and tcp-block.
    ///
    /// Bandwidth, the steps from one message at a time to all that `sock` does: window-1, window-32, delayed-acks,
    /// combining; and tcp-nagle (tcp-block with the kernel's combining of small writes).
    ///
    /// Files: sock, tcp, and copy (one process copies; the limit of the file system).
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
    /// Measure over loopback, as is done without root
    #[arg(long)]
    loopback: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LandingArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas [default: all]
    ///
    /// Bandwidth and CPU time: copying (payloads are received aside and copied, nothing is guessed), peek (received in
    /// their place after a look at how each batch of packets begins), landing (received where they are expected, as
    /// is usual), always-wrong (received where they do not belong, each time).
    ///
    /// Packets that land: one-sender, four-senders, four-senders-no-lists (without receive lists, the sockets of their
    /// own that large transfers get), interference (small messages of another sender
    /// among the packets) and interference-within (of another virtual interface of the same sender, by the same
    /// socket).
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
    /// Measure over loopback, as is done without root
    #[arg(long)]
    loopback: bool,
}

#[derive(Debug, Args)]
pub(crate) struct WireArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas [default: all]
    ///
    /// The kernel's own: udp-spin (latency: ping-pong, both sides looking without pause), udp-gso
    /// (bandwidth: packets without end, some lost; what arrives is the limit of the network),
    /// udp-segmented (the same, packets one by one), tcp-spin (looking without pause), tcp-block (asleep
    /// while there is nothing), tcp-no-offload (bandwidth, packets one by one).
    ///
    /// Highwire: vi-udp (packets with a checksum), vi-udp-sealed (encrypted), vi-udp-segmented
    /// (bandwidth, packets one by one), vi-udp-impaired-0 and vi-udp-impaired-1 (bandwidth with 0 % and
    /// 1 % of the packets lost and as many overtaken).
    ///
    /// Remote memory, packets with a checksum: rdma-write (bandwidth, four writes at a time), rdma-read
    /// (latency of a whole read), send-and-message (latency of a short message there and the payload back).
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
    /// Measure over loopback, as is done without root
    #[arg(long)]
    loopback: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TransportArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Contestants to measure, separated by commas [default: all]
    ///
    /// raw-ring, vi, vi-buffered, vi-referenced, tcp-spin, tcp-block, unix-spin, unix-block; and
    /// those of `pipelining`: fixed-1408, store-and-forward, adaptive.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    contestants: Vec<Contestant>,
    /// Measure other libraries too, where they are installed: UCX and iceoryx2, at 4 B, 8 and 32 KiB
    #[arg(long)]
    peers: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// Seconds for the whole run, from start to end
    #[arg(long, value_name = "N", default_value_t = 20.0, value_parser = parse_seconds)]
    seconds: f64,
    /// Sizes to measure, separated by commas: bytes of a message (of `landing`: of the memory that
    /// is received into; of `sockets`: of one of its files too; of `apps`: of a value, page or file; of `rpc`: of a value
    /// that is fetched; of `netmem`: of a piece), or numbers of connections
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_size)]
    sizes: Vec<usize>,
    /// Measure only while the CPUs are near or far, and wait for it
    #[arg(long, value_enum)]
    state: Option<StateArg>,
    /// Put both processes on one CPU; contestants that only spin are left out
    #[arg(long, conflicts_with = "state")]
    one_core: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Also write JSON, the table and SVG plots to this directory
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StateArg {
    /// A cache line crosses in less than 110 ns
    Near,
    /// It takes 110 to 400 ns
    Far,
}

pub(crate) fn run(command: BenchCommand) -> anyhow::Result<()> {
    let (mut loopback, mut measures, mut outstanding) = (false, Vec::new(), Vec::new());
    let Options { mut region_bytes, mut budget_bytes, mut directory, .. } = Options::new(Bench::Netmem);
    let (bench, common, contestants, peers) = match command {
        BenchCommand::Latency(TransportArgs { common, contestants, peers }) => {
            (Bench::Latency, common, contestants, peers)
        }
        BenchCommand::Bandwidth(TransportArgs { common, contestants, peers }) => {
            (Bench::Bandwidth, common, contestants, peers)
        }
        BenchCommand::Pipelining(common) => (Bench::Pipelining, common, Vec::new(), false),
        BenchCommand::Connections(common) => (Bench::Connections, common, Vec::new(), false),
        BenchCommand::Wire(args) => {
            loopback = args.loopback;
            (Bench::Wire, args.common, args.contestants, false)
        }
        BenchCommand::Landing(args) => {
            loopback = args.loopback;
            (Bench::Landing, args.common, args.contestants, false)
        }
        BenchCommand::Sockets(args) => {
            loopback = args.loopback;
            (Bench::Sockets, args.common, args.contestants, false)
        }
        BenchCommand::Lane(LaneArgs { common, contestants }) => (Bench::Lane, common, contestants, false),
        BenchCommand::Apps(args) => {
            measures = args.measures;
            (Bench::Apps, args.common, args.contestants, false)
        }
        BenchCommand::Netmem(args) => {
            (loopback, measures) = (args.loopback, args.measures);
            (region_bytes, directory) = (args.region, args.dir);
            budget_bytes = args.budget.unwrap_or(region_bytes / 4);
            (Bench::Netmem, args.common, args.contestants, false)
        }
        BenchCommand::Rpc(args) => {
            (loopback, measures, outstanding) = (args.loopback, args.measures, args.outstanding);
            (Bench::Rpc, args.common, args.contestants, args.peers)
        }
    };
    let too_large = |size: &&usize| **size > bench.size_max() && !bench.file_sizes().contains(size);
    if let Some(size) = common.sizes.iter().find(too_large) {
        let what = format!("{size} is more than the {} that `bench {}` can do", bench.size_max(), bench.name());
        clap::Error::raw(clap::error::ErrorKind::ValueValidation, what + "\n").exit();
    }
    if let Some(size) = common.sizes.iter().find(|size| !size.is_multiple_of(bench.size_step())) {
        let what = format!("{size} is no multiple of the {} that `bench {}` needs", bench.size_step(), bench.name());
        clap::Error::raw(clap::error::ErrorKind::ValueValidation, what + "\n").exit();
    }
    if let Some(stranger) = contestants.iter().find(|contestant| !bench.candidates().contains(contestant)) {
        let names: Vec<&str> = bench.candidates().iter().map(|contestant| contestant.name()).collect();
        let what = format!("{stranger} has no part in `bench {}`; there are {}", bench.name(), names.join(", "));
        clap::Error::raw(clap::error::ErrorKind::ValueValidation, what + "\n").exit();
    }
    let options = Options {
        seconds: common.seconds,
        sizes: common.sizes,
        contestants,
        measures,
        outstanding,
        region_bytes,
        budget_bytes,
        directory,
        state: common.state.map(|state| match state {
            StateArg::Near => State::Near,
            StateArg::Far => State::Far,
        }),
        one_core: common.one_core,
        peers,
        loopback,
        progress: true,
        command: command_line(std::env::args()),
        ..Options::new(bench)
    };
    let report = highwire_bench::run(&options)?;
    // The files first: whoever closes the pipe early still wants them.
    if let Some(directory) = &common.report {
        for path in report.write(directory)? {
            let _ = writeln!(std::io::stderr(), "wrote {}", path.display());
        }
    }
    crate::print(&if common.json { report.to_json() + "\n" } else { report.to_text() })
}

/// The command line as it would be typed.
fn command_line(arguments: impl Iterator<Item = String>) -> String {
    let rest: Vec<String> = arguments.skip(1).collect();
    ["highwire".to_owned()].into_iter().chain(rest).collect::<Vec<_>>().join(" ")
}

pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.5..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0.5 to 86400 is needed".to_owned()),
    }
}

/// One of those that `bench apps` measures.
fn parse_measure(text: &str) -> Result<Measure, String> {
    measure_among(&Measure::APPS, text)
}

/// One of those of `bench rpc`.
fn parse_rpc_measure(text: &str) -> Result<Measure, String> {
    measure_among(&Measure::RPC, text)
}

/// One of those of `bench netmem`.
fn parse_netmem_measure(text: &str) -> Result<Measure, String> {
    measure_among(&Measure::NETMEM, text)
}

/// A region, which is read in pieces.
fn parse_region(text: &str) -> Result<usize, String> {
    match parse_size(text) {
        Ok(size) if size.is_multiple_of(1 << 20) && size <= 64 << 30 => Ok(size),
        _ => Err("a size from 1M to 65536M is needed, in whole M".to_owned()),
    }
}

fn measure_among(measures: &[Measure], text: &str) -> Result<Measure, String> {
    let names: Vec<&str> = measures.iter().map(|measure| measure.name()).collect();
    let found = measures.iter().copied().find(|measure| measure.name() == text);
    found.ok_or_else(|| format!("that is not measured; there are {}", names.join(", ")))
}

/// Calls under way at a time.
fn parse_outstanding(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (1..=1024).contains(&number) => Ok(number),
        _ => Err("a number from 1 to 1024 is needed".to_owned()),
    }
}

/// Bytes, or with a unit: `64`, `8K`, `1M`.
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix(['M', 'm']).map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    match digits.parse::<usize>().ok().and_then(|number| number.checked_mul(unit)) {
        Some(size) if size > 0 => Ok(size),
        _ => Err("a size is a number of bytes above 0, as 64, 8K or 1M".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_seconds_are_read_or_refused() {
        assert_eq!(parse_size("64"), Ok(64));
        assert_eq!(parse_size("8K"), Ok(8192));
        assert_eq!(parse_size("1M"), Ok(1 << 20));
        for bad in ["0", "", "K", "-4", "4G", "99999999999999999999M"] {
            assert!(parse_size(bad).is_err(), "{bad:?}");
        }
        assert_eq!(parse_seconds("2.5"), Ok(2.5));
        for bad in ["0", "-1", "NaN", "inf", "soon"] {
            assert!(parse_seconds(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_report_names_the_command_not_the_path_of_the_binary() {
        let arguments = ["/tmp/target/release/highwire", "bench", "latency", "--seconds", "5"].map(str::to_owned);
        assert_eq!(command_line(arguments.into_iter()), "highwire bench latency --seconds 5");
    }
}
