//! How commands reach other hosts: the key, or the word that there shall be none.

use crate::pcap::PcapArgs;
use clap::Args;
use highwire::{Allow, Config, Driver, Keys, Nic, Recording, WireConfig, read_key};
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
    /// The cluster's key, to call with and to be called with
    ///
    /// Make one with `highwire key new FILE`, and copy it to the other host by a way that nobody listens to.
    /// Everything between hosts is then authenticated and encrypted.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Another key that callers may use, while the cluster's key is being changed
    ///
    /// Three steps, each on all nodes before the next begins: accept the new key as well, call with the new one and
    /// accept the old one as well, drop the old one.
    #[arg(long, value_name = "FILE", requires = "key")]
    also_accept: Option<PathBuf>,
    /// Reach other hosts, and be reached, without a key: anybody can read and forge everything
    #[arg(long, conflicts_with = "key")]
    insecure: bool,
    /// On this host, where there is no key: let processes of this user in too, by name or number, or everyone
    ///
    /// Otherwise only your own processes are let in, and only their listeners are called. Several times for several
    /// users.
    #[arg(long, value_name = "USER", value_parser = parse_user)]
    allow: Vec<User>,
}

/// What a process with these keys is known by.
pub(crate) fn known_by(keys: &Keys) -> String {
    let mut fingerprints = keys.accepted().map(|key| key.fingerprint());
    match (fingerprints.next(), fingerprints.next()) {
        (None, _) => "no key".to_owned(),
        (Some(key), None) => format!("key {key}"),
        (Some(key), Some(other)) if key == other => format!("key {key}"),
        (Some(key), Some(other)) => format!("key {key}, accepting {other} as well"),
    }
}

/// Whom `--allow` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum User {
    Numbered(u32),
    Everyone,
}

fn parse_user(text: &str) -> Result<User, String> {
    if text == "everyone" {
        return Ok(User::Everyone);
    }
    if let Ok(number) = text.parse() {
        return Ok(User::Numbered(number));
    }
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let number = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(text)).then(|| fields.nth(1)?.parse().ok()).flatten()
    });
    number.map(User::Numbered).ok_or_else(|| {
        "there is no such user in /etc/passwd: write a name that is there, a number (id -u NAME), or everyone"
            .to_owned()
    })
}

/// Whose processes may be at the other end.
fn allow(users: &[User]) -> Allow {
    let numbers = users.iter().map(|user| match user {
        User::Numbered(number) => Some(*number),
        User::Everyone => None,
    });
    match numbers.collect::<Option<Vec<_>>>() {
        None => Allow::Everyone,
        Some(numbers) if numbers.is_empty() => Allow::SameUser,
        Some(numbers) => Allow::Users(numbers),
    }
}

impl WireArgs {
    /// An interface that reaches other hosts as the command line says, and what it is known by there.
    pub(crate) fn nic(&self, timeout: Duration, record: Option<Recording>) -> anyhow::Result<(Nic, String)> {
        self.key.nic(timeout, Driver::Caller, record)
    }
}

impl KeyArgs {
    /// The keys that were given.
    pub(crate) fn keys(&self) -> anyhow::Result<Keys> {
        let Some(key) = &self.key else { return Ok(Keys::insecure()) };
        let keys = Keys::new(read_key(key)?);
        Ok(match &self.also_accept {
            Some(other) => keys.also_accepting(read_key(other)?),
            None => keys,
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
        let known_by = known_by(&keys);
        let insecure = self.insecure;
        let wire = WireConfig { keys, insecure, driver, record, ..WireConfig::default() };
        let config = Config { connect_timeout: timeout, allow: allow(&self.allow), ..Config::default() };
        Ok((Nic::with_wire(config, wire)?, known_by))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_named_or_numbered() {
        assert_eq!(
            ["root", "0", "7", "everyone"].map(parse_user),
            [Ok(User::Numbered(0)), Ok(User::Numbered(0)), Ok(User::Numbered(7)), Ok(User::Everyone)]
        );
        for unknown in ["", "-1", "nobody-of-this-name", "root:", "x"] {
            assert!(parse_user(unknown).unwrap_err().contains("id -u"), "{unknown:?}");
        }
    }

    #[test]
    fn everyone_is_more_than_some() {
        assert_eq!(allow(&[]), Allow::SameUser);
        assert_eq!(allow(&[User::Numbered(7), User::Numbered(8)]), Allow::Users(vec![7, 8]));
        assert_eq!(allow(&[User::Numbered(7), User::Everyone]), Allow::Everyone);
    }
}
