//! A VI as those who wait for it see it, whichever path it takes.

use crate::bells::QueueShared;
use crate::error::WaitError;
use crate::host::member::HostMember;
use crate::spin::SpinRules;
use crate::vi::ViId;
use crate::wire::WireMember;
use highwire_mem::Process;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) enum Member {
    Host(Arc<HostMember>),
    Wire(Arc<WireMember>),
}

impl Member {
    #[inline]
    pub(crate) fn id(&self) -> ViId {
        match self {
            Member::Host(member) => member.id,
            Member::Wire(member) => member.id,
        }
    }

    pub(crate) fn process(&self) -> Process {
        match self {
            Member::Host(member) => member.process,
            Member::Wire(member) => member.process,
        }
    }

    pub(crate) fn queue(&self) -> &Arc<QueueShared> {
        match self {
            Member::Host(member) => &member.queue,
            Member::Wire(member) => &member.queue,
        }
    }

    /// True if polling the VI would bring something.
    #[inline]
    pub(crate) fn ready(&self) -> bool {
        match self {
            Member::Host(member) => member.ready(),
            Member::Wire(member) => member.ready(),
        }
    }

    /// In its queue's list of those to look at.
    pub(crate) fn active(&self) -> &AtomicBool {
        match self {
            Member::Host(member) => &member.active,
            Member::Wire(member) => &member.active,
        }
    }

    /// A sleeper comes or goes: while there is one, the peer is asked to ring. An adapter always does.
    pub(crate) fn set_attention(&self, asleep: bool) {
        if let Member::Host(member) = self {
            member.set_attention(asleep);
        }
    }

    /// The queue has become one of many VIs, or of few again.
    pub(crate) fn refresh_attention(&self) {
        if let Member::Host(member) = self {
            member.refresh_attention();
        }
    }

    /// The user and the number of the bell that its peer rings. An adapter rings locally.
    pub(crate) fn bell(&self) -> Option<(u32, u32)> {
        match self {
            Member::Host(member) => Some((member.home.uid, member.bell.number())),
            Member::Wire(_) => None,
        }
    }

    /// Carries messages, where that is for whoever looks to do.
    pub(crate) fn attend(&self) {
        if let Member::Wire(member) = self {
            member.attend();
        }
    }

    /// Wakes whoever waits, however it waits.
    pub(crate) fn wake(&self) {
        self.queue().wake();
        if let Member::Wire(member) = self {
            member.carrier().wake();
        }
    }

    /// Waits until `look` finds something, spinning and sleeping by the rules.
    pub(crate) fn wait_for<T>(
        &self,
        spin: &SpinRules,
        timeout: Duration,
        mut look: impl FnMut() -> Option<T>,
    ) -> Result<T, WaitError> {
        match self {
            Member::Host(member) => member.wait_for(spin, timeout, look),
            Member::Wire(member) => member.wait_for(spin, timeout, |_| look()),
        }
    }
}
