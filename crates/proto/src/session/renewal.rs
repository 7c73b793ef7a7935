//! Fresh keys in a session that goes on: [`crate::renewal`] has the handshake, the endpoint has the cluster keys.

use super::{Cargo, Session};
use crate::entropy::Entropy;
use crate::header::{Header, Kind};
use crate::key::{ClusterKey, Fingerprint, Keys};
use crate::message::{Sink, Source};
use crate::renewal::Heard;
use std::time::Duration;

impl<S: Source, T: Sink> Session<S, T> {
    /// True if [`Session::renew`] has to be called.
    pub(crate) fn wants_renewal(&self) -> bool {
        self.ended().is_none() && self.renewal.wants_key()
    }

    /// Begins a fresh handshake with this key.
    pub(crate) fn renew(&mut self, key: &ClusterKey, entropy: &mut dyn Entropy) {
        self.renewal.begin(key, entropy);
    }

    /// The cluster key that this side calls with was changed.
    pub(crate) fn renew_with(&mut self, fingerprint: Option<Fingerprint>) {
        self.renewal.call_with(fingerprint);
    }

    /// Answers the peer's question, or ends the session if the question was made with none of these keys.
    pub(crate) fn answer_renewal(&mut self, now: Duration, keys: &Keys, entropy: &mut dyn Entropy) {
        if !std::mem::take(&mut self.renewal_asked) || self.ended().is_some() {
            return;
        }
        match self.renewal.answer(keys, entropy) {
            Some(renewed) => self.sealing.renew(renewed, false),
            None => self.end_for_key(now),
        }
    }

    /// Handshakes since the first whose keys seal what is sent, and what is received.
    #[cfg(test)]
    pub(crate) fn epochs(&self) -> (u8, u8) {
        self.sealing.epochs()
    }

    /// A message of a fresh handshake has come; it is in `scratch`.
    pub(super) fn take_renewal(&mut self, header: &Header) {
        if !self.sealing.is_sealed() {
            return;
        }
        match self.renewal.handle(header.offset, &self.scratch) {
            Heard::Nothing => {}
            Heard::Question => self.renewal_asked = true,
            Heard::Keys(renewed) => {
                self.sealing.renew(renewed, true);
                // The peer waits for a packet under the fresh keys.
                self.probe_wanted = true;
            }
        }
    }

    /// A packet has verified, which may be the first under the fresh keys.
    #[inline]
    pub(super) fn notice_fresh_keys(&mut self) {
        if self.renewal.is_turning() && !self.sealing.is_renewing() {
            self.fingerprint = self.renewal.finish();
        }
    }

    /// The message that is due, in a packet.
    pub(super) fn write_renewal(&mut self, now: Duration, out: &mut Vec<u8>) -> Option<()> {
        let (word, message) = self.renewal.take_due()?;
        let begin = out.len();
        out.resize(begin + Header::BYTES, 0);
        out.extend_from_slice(&message);
        let header = Header { offset: word as u32, length: message.len() as u16, ..self.bare_header(Kind::Renew) };
        self.seal(&header, begin, out).then_some(())?;
        self.note_sent(now, Cargo::Probe, out.len() - begin);
        Some(())
    }
}
