//! A record of pulses as they are copied in or out, for those who want to see them.

use highwire_mem::{Ticks, ticks};

/// One copy of a pulse, in or out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PulseRecord {
    /// Which message of the VI, counted from 0.
    pub message: u64,
    /// Bytes moved.
    pub bytes: usize,
    /// When the copy began.
    pub started: Ticks,
    /// When it ended: for a sender, when the pulse was published.
    pub ended: Ticks,
}

/// The first pulses since it was started; nothing, and no clock is read, until then.
#[derive(Debug, Default)]
pub(crate) struct PulseLog {
    records: Option<Vec<PulseRecord>>,
}

impl PulseLog {
    pub(crate) fn start(&mut self, capacity: usize) {
        self.records = Some(Vec::with_capacity(capacity));
    }

    #[inline]
    pub(crate) fn begin(&self) -> Option<Ticks> {
        self.records.is_some().then(ticks)
    }

    #[inline]
    pub(crate) fn end(&mut self, started: Option<Ticks>, message: u64, bytes: usize) {
        if let (Some(started), Some(records)) = (started, &mut self.records)
            && records.len() < records.capacity()
        {
            records.push(PulseRecord { message, bytes, started, ended: ticks() });
        }
    }

    pub(crate) fn take(&mut self) -> Vec<PulseRecord> {
        let records = self.records.as_mut();
        records.map(|records| std::mem::replace(records, Vec::with_capacity(records.capacity()))).unwrap_or_default()
    }
}
