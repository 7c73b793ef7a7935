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

    /// Waits until `look` finds something, spinning and sleeping by the rules.
    #[inline]
    pub fn wait_for<T>(&self, timeout: Duration, mut look: impl FnMut() -> Option<T>) -> Result<T, WaitError> {
        if let Member::Host(member) = &self.member
            && member.worth_a_glance()
        {
            for _ in 0..FREE_LOOKS {
                if let Some(found) = look() {
                    return Ok(found);
                }
            }
        }
        self.member.wait_for(&self.nic.spin, timeout, look)
    }

    /// Has everybody who waits look again.
    pub fn wake(&self) {
        self.member.wake();
    }
}
