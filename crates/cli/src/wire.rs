//! How commands reach other hosts: the key, or the word that there shall be none.

use crate::pcap::PcapArgs;
use clap::Args;
use highwire::{Config, Driver, Keys, Nic, Recording, WireConfig, read_key};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Args)]
pub(crate) struct WireArgs {
    #[command(flatten)]
    key: KeyArgs,
    #[command(flatten)]
    pub(crate) pcap: PcapArgs,
}

#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// The cluster's key; twice while it is being changed, the newer one first
    ///
    /// Make one with `highwire key new FILE`, and copy it to the other host by a way that nobody listens to.
    /// Everything between hosts is then authenticated and encrypted.
    #[arg(long, value_name = "FILE")]
    key: Vec<PathBuf>,
    /// Reach other hosts, and be reached, without a key: anybody can read and forge everything
    #[arg(long, conflicts_with = "key")]
    insecure: bool,
}

impl WireArgs {
    /// An interface that reaches other hosts as the command line says, and what it is known by there.
    pub(crate) fn nic(&self, timeout: Duration, record: Option<Recording>) -> anyhow::Result<(Nic, String)> {
        self.key.nic(timeout, Driver::Caller, record)
    }
}

impl KeyArgs {
    /// The keys that were given.
    fn keys(&self) -> anyhow::Result<Keys> {
        Ok(match &self.key[..] {
            [] => Keys::insecure(),
            [only] => Keys::new(read_key(only)?),
            [newer, older] => Keys::new(read_key(newer)?).also_accepting(read_key(older)?),
            more => anyhow::bail!("{} keys were given; two are accepted while a key is being changed", more.len()),
        })
    }

    /// An interface that reaches other hosts as the command line says, and what it is known by there.
    pub(crate) fn nic(
        &self,
        timeout: Duration,
        driver: Driver,
        record: Option<Recording>,
    ) -> anyhow::Result<(Nic, String)> {
        let keys = self.keys()?;
        let known_by = match keys.to_call_with() {
            Some(key) => format!("key {}", key.fingerprint()),
            None => "no key".to_owned(),
        };
        let insecure = self.insecure;
        let wire = WireConfig { keys, insecure, driver, record, ..WireConfig::default() };
        let config = Config { connect_timeout: timeout, ..Config::default() };
        Ok((Nic::with_wire(config, wire)?, known_by))
    }
}
