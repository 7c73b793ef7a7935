//! An address picks the path: `shm:name` on this host, `udp:host:port` to others.

use crate::error::AddressError;
use std::path::PathBuf;

const NAME_BYTES_MAX: usize = 64;
const PATH_BYTES_MAX: usize = 100;

/// Where a listener is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `shm:name`, in the user's private runtime directory.
    Name(String),
    /// `shm:/path`, for sharing with other users.
    Path(PathBuf),
    /// `udp:host:port`, on another host or this one.
    Host(String),
}

impl Address {
    /// Reads an address.
    pub fn parse(text: &str) -> Result<Address, AddressError> {
        if let Some(host) = text.strip_prefix("udp:") {
            return Ok(Address::Host(host.to_owned()));
        }
        let rest = text.strip_prefix("shm:").ok_or_else(|| AddressError::Scheme(text.to_owned()))?;
        if rest.starts_with('/') {
            let path = PathBuf::from(rest);
            if rest.len() > PATH_BYTES_MAX {
                return Err(AddressError::TooLong { path, bytes: rest.len() });
            }
            return Ok(Address::Path(path));
        }
        let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let named =
            !rest.is_empty() && rest.len() <= NAME_BYTES_MAX && rest.chars().all(good) && !rest.starts_with('.');
        if named { Ok(Address::Name(rest.to_owned())) } else { Err(AddressError::Name(rest.to_owned())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused_with_what_to_write() {
        assert_eq!(Address::parse("shm:echo-1.a_b"), Ok(Address::Name("echo-1.a_b".into())));
        assert_eq!(Address::parse("shm:/run/x"), Ok(Address::Path("/run/x".into())));
        assert_eq!(Address::parse("udp:[::1]:7"), Ok(Address::Host("[::1]:7".into())));
        for bad in ["echo", "tcp:x", "", "shm"] {
            let error = Address::parse(bad).unwrap_err();
            assert!(matches!(error, AddressError::Scheme(_)) && error.to_string().contains("shm:NAME"), "{bad}");
        }
        for bad in ["shm:", "shm:a b", "shm:..", "shm:.hidden", "shm:a/b", "shm:é"] {
            assert!(matches!(Address::parse(bad), Err(AddressError::Name(_))), "{bad}");
        }
        assert!(matches!(Address::parse(&format!("shm:{}", "x".repeat(65))), Err(AddressError::Name(_))));
        let long = format!("shm:/{}", "x".repeat(100));
        assert!(matches!(Address::parse(&long), Err(AddressError::TooLong { bytes: 101, .. })));
    }
}
