//! The `highwire` command.
#![forbid(unsafe_code)]

mod bench;
mod demo;
mod explain;
mod figures;
mod kernel_sockets;
mod key;
mod lanes;
mod mem;
mod pcap;
mod ping;
mod processes;
mod run;
mod simulate;
mod top;
mod transfer;
mod up;
mod wire;

use clap::{Args, CommandFactory, Parser, Subcommand};
use highwire_bench::BenchError;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Network I/O at wire speed, in user space.
#[derive(Debug, Parser)]
#[command(name = "highwire", version, about, long_about = LONG_ABOUT, after_help = EXIT_CODES, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show what it does: two processes, a ping-pong and a bulk transfer, beside loopback TCP
    ///
    /// Starts a second process and exchanges messages with it through a virtual interface in shared
    /// memory and through loopback TCP, in turn. Takes a few seconds.
    Demo(demo::DemoArgs),
    /// Measure latency, bandwidth, pipelining, many connections or a network, beside other ways
    ///
    /// All contestants run in one go, interleaved round by round, each trial between two probes of
    /// the time that a cache line takes from one CPU to the other. On virtual machines that time
    /// changes by itself (`near`: about 50 ns, `far`: about 250 ns) and decides all other figures;
    /// so every row of a report is from the same state, and the figure to judge by is the ratio to
    /// `raw-ring`, the floor, taken round by round; on a network, to the kernel's own UDP and TCP.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Answer every message with itself, for `highwire ping` on this host or another
    ///
    /// Beyond this host it listens only with --key, or with --insecure.
    Echo(ping::EchoArgs),
    /// Ask whether `highwire echo` answers somewhere, and how long a message takes there and back
    ///
    /// Ends with 1 and says why if nobody answers.
    Ping(ping::PingArgs),
    /// Send a file to `highwire receive` on this host or another
    ///
    /// Ends with 0 only when the receiver has the whole file, verified, under its name. What an interrupted
    /// attempt brought there is not sent again.
    Send(transfer::SendArgs),
    /// Receive one file from `highwire send`, then end
    ///
    /// The file has its name only when it is whole; until then it is NAME.part, from which the next attempt goes
    /// on. Beyond this host it listens only with --key, or with --insecure.
    Receive(transfer::ReceiveArgs),
    /// Donate memory of this host, for `highwire mem` and paged regions, until it is ended
    ///
    /// Whatever is put there is volatile: it is gone with the node that has it, and is then said to be. Ctrl-C or SIGTERM
    /// hands objects over to the other nodes, if there are any, and says what is lost; a second Ctrl-C ends at once. The node
    /// that is started without --join is the coordinator: the others live as long as it does. Beyond this host it listens
    /// only with --key, or with --insecure.
    ///
    /// Each client on this host takes five descriptors of the node; their limit is raised as far as it may be (ulimit -Hn).
    Up(up::UpArgs),
    /// Put, get and list objects in the memory that nodes donate with `highwire up`
    ///
    /// Objects are volatile: what was on a node that is lost is gone, and is said to be lost. Each has a lease, and is gone
    /// when that ends; those that are not pinned give way, the longest unused first, when memory is short.
    #[command(subcommand, after_help = EXIT_CODES)]
    Mem(mem::MemCommand),
    /// Run a program whose TCP connections on this host go through shared memory
    ///
    /// The program knows nothing of it and behaves as always. Its connections stay TCP connections; where the program at
    /// the other end is run this way too, bytes that it is waiting for take a lane in shared memory. Such bytes are not
    /// seen by tcpdump, ss, nftables, tc or the accounting of cgroups. Programs that are static, 32-bit, set-uid, written in
    /// Go or linked with musl run plain, and it is said so.
    Run(run::RunArgs),
    /// Turn the lanes of running processes off and on
    #[command(subcommand)]
    Lanes(lanes::LanesCommand),
    /// Tell what goes by the lane and what by TCP in programs that were started with `run`, and why
    ///
    /// For every socket of this user's programs, for root of every user's: bytes and messages (calls) by the lane and by
    /// TCP each way, how often a reader slept and spun, system calls that were not made, and why not more went by the
    /// lane. Numbers are those since the socket was made.
    Explain(explain::ExplainArgs),
    /// Watch the traffic of programs that were started with `run`
    ///
    /// For each program and each of its connections, received and sent together: messages and bytes a second by the
    /// lane and by TCP, and system calls that were not made. The busiest come first. `q` or Ctrl-C ends it; where
    /// input or output is no terminal it prints one block after the other. Connections that begin and end between two
    /// looks are not seen.
    Top(top::TopArgs),
    /// The registry, which `run` starts
    #[command(name = lanes::SERVE_COMMAND, hide = true)]
    LanesRegistry {
        /// Start it and end
        #[arg(long)]
        detach: bool,
    },
    /// Make the key that the nodes of a cluster know each other by
    #[command(subcommand)]
    Key(key::KeyCommand),
    /// Replay a run of the protocol between hosts in virtual time, from a seed
    ///
    /// Two ends exchange messages over a simulated network that loses, repeats, reorders, damages and
    /// delays packets and falls apart for a while; the seed decides everything. Every byte is checked.
    Simulate(simulate::SimulateArgs),
    /// The second process of a measurement
    #[command(name = highwire_bench::PEER_COMMAND, hide = true)]
    BenchPeer {
        /// Process number of the one that measures
        parent: u32,
    },
    /// Makes the network of a measurement, and removes it again
    #[command(name = highwire_bench::NETWORK_COMMAND, hide = true)]
    BenchNetwork {
        /// Process number of the one that measures
        owner: u32,
        /// Whether there is to be a device with its offloads off
        #[arg(action = clap::ArgAction::Set)]
        segmented: bool,
    },
    /// Another library's program, on a CPU of its own
    #[command(name = highwire_bench::OUTSIDER_COMMAND, hide = true)]
    BenchOutsider(OutsiderArgs),
}

#[derive(Debug, Args)]
struct OutsiderArgs {
    /// Process number of the one that measures
    parent: u32,
    /// Where to run
    cpu: usize,
    /// What to run
    program: String,
    /// With what
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

fn main() -> ExitCode {
    let Cli { command } = match Cli::try_parse() {
        Ok(cli) => cli,
        // A wrong command line ends here, with code 2.
        Err(refused) if refused.use_stderr() => refused.exit(),
        Err(asked) => return exit(asked.print().and_then(|()| io::stdout().flush()).map_err(Into::into)),
    };
    let Some(command) = command else {
        return exit(print(&Cli::command().render_help().to_string()));
    };
    if let Err(refused) = highwire_bench::kernel_check() {
        return exit(Err(refused.into()));
    }
    exit(match command {
        Command::Demo(args) => demo::run(&args),
        Command::Bench(bench) => bench::run(bench),
        Command::Echo(args) => ping::echo(&args),
        Command::Ping(args) => ping::ping(&args),
        Command::Send(args) => transfer::send(&args),
        Command::Receive(args) => transfer::receive(&args),
        Command::Up(args) => up::run(&args),
        Command::Mem(command) => mem::run(&command),
        Command::Run(args) => return run::run(&args),
        Command::Lanes(command) => lanes::run(&command),
        Command::Explain(args) => explain::run(&args),
        Command::Top(args) => top::run(&args),
        Command::LanesRegistry { detach } => run::serve(detach),
        Command::Key(command) => key::run(command),
        Command::Simulate(args) => simulate::run(&args),
        Command::BenchPeer { parent } => {
            // What went wrong was told to the process that measures, and is its to report.
            return highwire_bench::serve_peer(parent).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        Command::BenchNetwork { owner, segmented } => {
            highwire_bench::keep_network(owner, segmented).map_err(Into::into)
        }
        Command::BenchOutsider(OutsiderArgs { parent, cpu, program, arguments }) => {
            Err(highwire_bench::become_outsider(parent, cpu, &program, &arguments).into())
        }
    })
}

/// Prints to standard output.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Writes a warning to standard error, if anybody reads it.
pub(crate) fn warn(text: &str) {
    let _ = writeln!(io::stderr(), "highwire: {text}");
}

fn exit(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe) {
        // Whoever reads has read enough, as with `highwire bench … | head`.
        return ExitCode::SUCCESS;
    }
    // Nothing more can be done if this cannot be written either.
    let _ = writeln!(io::stderr(), "highwire: {}", chain(&error));
    if error.is::<mem::NotThere>() {
        return ExitCode::from(EXIT_NOT_THERE);
    }
    match error.downcast_ref::<BenchError>() {
        Some(BenchError::StateNeverSeen { .. }) => ExitCode::from(EXIT_NO_STATE),
        _ => ExitCode::FAILURE,
    }
}

/// The error and its causes, each once: errors of the library say their cause, and have it as their source for programs.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let causes: Vec<_> = error.chain().map(ToString::to_string).collect();
    let new = causes.windows(2).filter(|pair| !pair[0].contains(&pair[1])).map(|pair| pair[1].as_str());
    causes.iter().take(1).map(String::as_str).chain(new).collect::<Vec<_>>().join(": ")
}

const EXIT_NO_STATE: u8 = 3;
const EXIT_NOT_THERE: u8 = 4;

const LONG_ABOUT: &str = "\
Network I/O at wire speed, in user space.

A program gets its own virtual interface to the network; two programs on one host exchange messages
through memory that both see, without the kernel in between. Begin with `highwire demo`.";

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 failed; 2 wrong command line; 3 the state asked for with --state never occurred;
4 no such object: it is not there, its lease has ended, or it was lost with its node.
A reader that closes the pipe early is not a failure.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_cause_that_an_error_says_itself_is_not_said_again() {
        let full = || io::Error::from_raw_os_error(24);
        let listen = highwire::ListenError::Io { path: "/run/x".into(), source: full() };
        let said = chain(&anyhow::Error::from(listen).context("the node"));
        assert_eq!(said, "the node: cannot listen at \"/run/x\": Too many open files (os error 24)");
        let said = chain(&anyhow::Error::from(full()).context("one").context("two"));
        assert_eq!(said, "two: one: Too many open files (os error 24)");
    }
}
