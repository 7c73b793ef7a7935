//! `--pcap`: the packets of a command in a file that Wireshark reads.

use clap::Args;
use highwire::{Recording, RecordingOptions};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct PcapArgs {
    /// Write every packet that is sent or received to this file, for Wireshark; one that is there is replaced
    ///
    /// `wireshark -X lua_script:tools/highwire.lua FILE` shows what is in it.
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Keep so many bytes of each packet, as 64 or 1K: 64 are the header and no payload
    #[arg(long, value_name = "BYTES", requires = "pcap", value_parser = crate::bench::parse_size)]
    snap: Option<usize>,
}

impl PcapArgs {
    /// The file that was asked for, created.
    pub(crate) fn recording(&self) -> anyhow::Result<Option<Recording>> {
        let Some(path) = &self.pcap else { return Ok(None) };
        let all = RecordingOptions::default();
        let options = RecordingOptions { packet_bytes_max: self.snap.unwrap_or(all.packet_bytes_max) };
        Ok(Some(Recording::with(path, options)?))
    }

    /// The same, for a command that speaks to `address`.
    pub(crate) fn recording_for(&self, address: &str) -> anyhow::Result<Option<Recording>> {
        if let (Some(path), Some(name)) = (&self.pcap, address.strip_prefix("shm:")) {
            anyhow::bail!("there are no packets to record in {path:?}: shm:{name} goes through memory");
        }
        self.recording()
    }
}

/// Writes what is left, and tells whether all of it is in the file.
pub(crate) fn finish(recording: Option<&Recording>) -> anyhow::Result<()> {
    let Some(recording) = recording else { return Ok(()) };
    recording.flush();
    recording.error().map_or(Ok(()), |error| Err(error.into()))
}
