//! A VI as those who wait for it see it, whichever path it takes.

use crate::bells::QueueShared;
use crate::error::WaitError;
use crate::host::member::HostMember;
use crate::spin::SpinRules;
use crate::vi::ViId;
use crate::wire::WireMember;
use highwire_mem::Process;
use highwire_mem::work::Side;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

#[derive(Clone, Debug)]
pub(crate) enum Member {
    Host(Arc<HostMember>),
    Wire(Arc<WireMember>),
}

/// A member that is not kept.
#[derive(Clone, Debug)]
pub(crate) enum WeakMember {
    Host(Weak<HostMember>),
    Wire(Weak<WireMember>),
}

impl WeakMember {
    pub(crate) fn upgrade(&self) -> Option<Member> {
        match self {
            WeakMember::Host(member) => member.upgrade().map(Member::Host),
            WeakMember::Wire(member) => member.upgrade().map(Member::Wire),
        }
    }
}

impl Member {
    pub(crate) fn downgrade(&self) -> WeakMember {
        match self {
            Member::Host(member) => WeakMember::Host(Arc::downgrade(member)),
            Member::Wire(member) => WeakMember::Wire(Arc::downgrade(member)),
        }
    }

    /// True if something came that was not taken, or it is over.
    pub(crate) fn may_read(&self) -> bool {
        match self {
            Member::Host(member) => member.slots.ready() || member.over(),
            Member::Wire(member) => member.line.has_done(Side::Received) || member.line.ended().is_some(),
        }
    }

    /// True if something that was sent is done, or it is over.
    pub(crate) fn may_write(&self) -> bool {
        match self {
            Member::Host(member) => member.credit.moved() || member.over(),
            Member::Wire(member) => member.line.has_done(Side::Sent) || member.line.ended().is_some(),
        }
    }

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
            Member::Host(member) if member.muted.load(SeqCst) => member.has_write_news(),
            Member::Host(member) => member.ready(),
            Member::Wire(member) if member.muted.load(SeqCst) => member.line.has_done(Side::Sent),
            Member::Wire(member) => member.ready(),
        }
    }

    /// Its queue is not to tell of what came.
    pub(crate) fn muted(&self) -> &AtomicBool {
        match self {
            Member::Host(member) => &member.muted,
            Member::Wire(member) => &member.muted,
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

    /// The page and the number of the bell that its peer rings. An adapter rings locally.
    pub(crate) fn bell(&self) -> Option<(u32, u32)> {
        match self {
            Member::Host(member) => Some((member.home.number, member.bell.number())),
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
