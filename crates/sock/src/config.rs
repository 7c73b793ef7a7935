//! How sockets behave. Every limit is a number here, with the memory it costs.

use highwire_vi::{Combining, StreamRules};
use std::io;

/// How the sockets of a [`crate::Sockets`] behave. The default is right for most programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SockConfig {
    /// Messages that the other side has not read, at most: from 1 to two less than the interface's depth. With
    /// `chunk_bytes` it limits what a stream holds, in memory that is taken only while it is used.
    pub window: u32,
    /// Acknowledgements are delayed to so many messages, at most `window`. A reader that has read everything
    /// acknowledges at once.
    pub acknowledge: u32,
    /// Bytes of a message, at most; from 256 to 1 MiB.
    pub chunk_bytes: usize,
    /// Whether small writes are combined while the reader is behind. Streams can switch it off with
    /// [`crate::Stream::set_nodelay`], which still combines when the window is full; here nothing ever is.
    pub combine: bool,
    /// Who handles messages that come.
    pub strategy: Strategy,
}

/// Who handles messages that come: the strategies of the paper on SOVIA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Strategy {
    /// The thread that reads: nobody else is woken.
    #[default]
    Single,
    /// One thread for all streams, which wakes the one that reads.
    Handler,
    /// A thread for each stream, which wakes the one that reads.
    Notify,
}

impl Default for SockConfig {
    fn default() -> SockConfig {
        SockConfig { window: 32, acknowledge: 16, chunk_bytes: 32 << 10, combine: true, strategy: Strategy::Single }
    }
}

impl SockConfig {
    pub(crate) fn check(&self, depth: u32) -> io::Result<()> {
        let bad = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        let most = depth.saturating_sub(2).max(1);
        if self.window == 0 || self.window > most {
            return bad(format!(
                "window = {}, but it is from 1 to {most}, two less than the interface's depth; raise Config::depth",
                self.window
            ));
        }
        if self.acknowledge == 0 || self.acknowledge > self.window {
            return bad(format!("acknowledge = {}, but it is from 1 to the window, {}", self.acknowledge, self.window));
        }
        if !(256..=1 << 20).contains(&self.chunk_bytes) {
            return bad(format!("chunk_bytes = {}, but it is from 256 to 1048576", self.chunk_bytes));
        }
        Ok(())
    }

    pub(crate) fn rules(&self) -> StreamRules {
        let &SockConfig { window, acknowledge, chunk_bytes, .. } = self;
        StreamRules { window, acknowledge, chunk_bytes, combining: self.combining(false) }
    }

    pub(crate) fn combining(&self, nodelay: bool) -> Combining {
        match (self.combine, nodelay) {
            (false, _) => Combining::Never,
            (true, true) => Combining::WhenFull,
            (true, false) => Combining::WhileBusy,
        }
    }
}
