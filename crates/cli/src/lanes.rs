//! `highwire lanes`: turns lanes off and on in running processes.

use anyhow::{Context, bail};
use clap::Subcommand;
use highwire_lane::counters::{MAGIC, SWITCH_WORD, directory};
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// The registry's own command.
pub(crate) const SERVE_COMMAND: &str = "lanes-registry";

#[derive(Debug, Subcommand)]
pub(crate) enum LanesCommand {
    /// From now on all bytes of these processes go by TCP; nothing is lost
    Off {
        /// Process numbers
        #[arg(required = true, value_name = "PID")]
        processes: Vec<u32>,
    },
    /// Lanes may be used again
    On {
        /// Process numbers
        #[arg(required = true, value_name = "PID")]
        processes: Vec<u32>,
    },
}

/// Switches them.
pub(crate) fn run(command: &LanesCommand) -> anyhow::Result<()> {
    let (processes, switch) = match command {
        LanesCommand::Off { processes } => (processes, 1u64),
        LanesCommand::On { processes } => (processes, 0),
    };
    for process in processes {
        set(*process, switch).with_context(|| format!("process {process}"))?;
    }
    Ok(())
}

/// The file in which a process tells of its connections.
pub(crate) fn file_of(process: u32) -> anyhow::Result<PathBuf> {
    let status = std::fs::metadata(format!("/proc/{process}")).context("there is no such process")?;
    let user = std::os::unix::fs::MetadataExt::uid(&status);
    let mut name = [0; 64];
    Ok(PathBuf::from(OsStr::from_bytes(directory(user, Some(process), &mut name).to_bytes())))
}

fn set(process: u32, switch: u64) -> anyhow::Result<()> {
    let path = file_of(process)?;
    let file = match OpenOptions::new().read(true).write(true).open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("it was not started with `highwire run`, or has no TCP socket yet")
        }
        other => other.with_context(|| format!("{}", path.display()))?,
    };
    let mut magic = [0; 8];
    file.read_exact_at(&mut magic, 0)?;
    if u64::from_le_bytes(magic) != MAGIC {
        bail!("{} is not of this version", path.display());
    }
    file.write_all_at(&switch.to_le_bytes(), 8 * SWITCH_WORD as u64)?;
    Ok(())
}
