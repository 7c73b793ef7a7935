//! `highwire key`: what nodes know each other by.

use anyhow::Context;
use clap::Subcommand;
use highwire::adapter::{SystemEntropy, create_key, read_key};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make a new key in FILE, which must not exist; only you can read it
    ///
    /// Copy it to every node, by a way that nobody listens to. Whoever has the key is a member.
    New {
        /// Where the key goes
        file: PathBuf,
    },
    /// Print the fingerprint of the key in FILE, to compare it with another node's
    Show {
        /// Where the key is
        file: PathBuf,
    },
}

pub(crate) fn run(command: KeyCommand) -> anyhow::Result<()> {
    let key = match &command {
        KeyCommand::New { file } => create_key(file, &mut SystemEntropy).context("no key was made")?,
        KeyCommand::Show { file } => read_key(file)?,
    };
    crate::print(&format!("{}\n", key.fingerprint()))
}
