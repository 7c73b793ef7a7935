//! Other libraries for remote procedure calls, by the program of the workspace in `peers`: tonic and tarpc.

use super::Caller;
use crate::BenchError;
use crate::launch::{self, Way};
use crate::outsiders::{PEERS_HINT, find_peers};
use crate::transports::Contestant;
use crate::transports::programs::Talking;

/// Both programs. They are there for the whole run, as connections are that programs keep.
pub(super) struct Peer {
    server: Talking,
    client: Talking,
    took_ns: Option<f64>,
}

impl Peer {
    /// Starts both, the server on the second of these CPUs.
    pub(super) fn start(contestant: Contestant, cpus: (usize, usize)) -> Result<Peer, BenchError> {
        let name = contestant.name();
        let program = find_peers().ok_or_else(|| BenchError::Missing(PEERS_HINT.to_owned()))?;
        let start = |cpu, arguments: &[&str]| {
            let mut command = launch::command(Way::Plain, cpu, &program)?;
            command.args(arguments);
            let mut talking = Talking::start(name, command)?;
            let said = talking.hear()?;
            Ok::<_, BenchError>((talking, said))
        };
        let (server, port) = start(cpus.1, &["serve", name])?;
        let (client, _) = start(cpus.0, &["call", name, &port])?;
        Ok(Peer { server, client, took_ns: None })
    }
}

impl Caller for Peer {
    fn call(&mut self, count: usize, outstanding: usize) -> Result<(), BenchError> {
        self.fetch(0, count, outstanding)
    }

    fn fetch(&mut self, size: usize, count: usize, outstanding: usize) -> Result<(), BenchError> {
        let said = self.client.ask(&format!("{size} {outstanding} {count}"))?;
        let took = said.parse().map_err(|_| self.client.misunderstood(&said))?;
        self.took_ns = Some(took);
        Ok(())
    }

    fn programs(&self) -> Vec<u32> {
        [&self.server, &self.client].into_iter().filter_map(Talking::id).collect()
    }

    fn took_ns(&self) -> Option<f64> {
        self.took_ns
    }
}
