//! How much address space the memory of other processes takes here, user by user: one user's processes cannot take what
//! others' need.

use crate::region::RegionError;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a peer may have mapped in this process.
#[derive(Clone, Copy, Debug)]
pub struct Allotment {
    /// Bytes of one region.
    pub region: u64,
    /// The peer's user, and bytes of all regions of that user's processes. `Some(None)` are the users that this user
    /// namespace does not map, all together.
    pub user: Option<(Option<u32>, u64)>,
}

impl From<u64> for Allotment {
    /// One region, of whatever user, by itself.
    fn from(region: u64) -> Allotment {
        Allotment { region, user: None }
    }
}

impl Allotment {
    /// True for the memory of another user's process, or of one whose user is not known.
    pub(crate) fn is_of_another_user(&self) -> bool {
        self.user.is_some_and(|(user, _)| user != Some(rustix::process::geteuid().as_raw()))
    }

    /// Counts so many bytes; an error if they are more than the user may have.
    pub(crate) fn take(&self, bytes: u64) -> Result<Option<Share>, RegionError> {
        let Some((user, limit)) = self.user else { return Ok(None) };
        let mut mapped = mapped();
        let present = mapped.get(&user).copied().unwrap_or(0);
        if bytes > limit.saturating_sub(present) {
            return Err(RegionError::Allotment { user, present, bytes, limit });
        }
        mapped.insert(user, present + bytes);
        Ok(Some(Share { user, bytes }))
    }
}

/// Bytes that count until this is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    user: Option<u32>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut mapped = mapped();
        if let Some(present) = mapped.get_mut(&self.user) {
            *present -= self.bytes;
            if *present == 0 {
                mapped.remove(&self.user);
            }
        }
    }
}

/// Of all interfaces of this process: they share its address space.
static MAPPED: Mutex<BTreeMap<Option<u32>, u64>> = Mutex::new(BTreeMap::new());

fn mapped() -> MutexGuard<'static, BTreeMap<Option<u32>, u64>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_does_not_take_what_another_may_have() {
        let of = |user| Allotment { region: 100, user: Some((user, 250)) };
        let shares: Vec<_> = (0..2).map(|_| of(Some(7)).take(100).unwrap()).collect();
        let refused = of(Some(7)).take(100).unwrap_err().to_string();
        for part in ["user 7", "200", "100", "250", "peer_bytes_total_max"] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(of(Some(8)).take(100).is_ok() && of(None).take(250).is_ok());
        assert!(of(None).take(251).unwrap_err().to_string().contains("does not map"));
        drop(shares);
        assert!(of(Some(7)).take(250).is_ok(), "what was given back is there again");
        assert!(Allotment::from(5).take(u64::MAX).unwrap().is_none(), "what is nobody's counts for nobody");
    }
}
