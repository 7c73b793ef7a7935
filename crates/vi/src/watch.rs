//! Waiting for a VI that another thread may be using.

use crate::error::WaitError;
use crate::member::Member;
use crate::nic::NicInner;
use crate::spin::FREE_LOOKS;
use crate::vi::ViId;
use std::sync::Arc;
use std::time::Duration;

/// Tells whether a VI has something, and waits for that. Several threads share one VI with it: the VI is behind a lock
/// that nobody holds while it sleeps.
#[derive(Clone, Debug)]
pub struct Watch {
    member: Member,
    nic: Arc<NicInner>,
}

impl Watch {
    pub(crate) fn new(member: Member, nic: Arc<NicInner>) -> Watch {
        Watch { member, nic }
    }

    /// The VI.
    pub fn id(&self) -> ViId {
        self.member.id()
    }

    /// True if polling the VI would bring something. From another host only what somebody has carried here counts.
    #[inline]
    pub fn is_ready(&self) -> bool {
        self.member.ready()
    }

    /// How often it is worth looking, one look upon the other, before one waits: most answers come within that. Not at
    /// all while a peer on this host cannot run, nor from another host, where each look is a system call.
    #[inline]
    pub fn free_looks(&self) -> u32 {
        match &self.member {
            Member::Host(member) if member.worth_a_glance() => FREE_LOOKS,
            _ => 0,
        }
    }

    /// Waits until `look` finds something, spinning and sleeping by the rules.
    pub fn wait_for<T>(&self, timeout: Duration, look: impl FnMut() -> Option<T>) -> Result<T, WaitError> {
        self.member.wait_for(&self.nic.spin, timeout, look)
    }

    /// Has everybody who waits look again.
    pub fn wake(&self) {
        self.member.wake();
    }
}
