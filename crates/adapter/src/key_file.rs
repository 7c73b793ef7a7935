//! Cluster keys on disk: one line of text in a file that only its owner can read.

use highwire_proto::{ClusterKey, Entropy, KeyError};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It is there already, and keys are never overwritten.
    #[error("{path} exists, and a key is never overwritten: choose another name, or remove it yourself")]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// Others can read or write it.
    #[error("{path} can be read or written by others (mode {mode:o}): chmod 600 it, and change the key if they did")]
    NotPrivate {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// It is another user's, so that one chose the key.
    #[error(
        "{path} belongs to user {owner}, and a key file has to be your own or root's: copy it, and chmod 600 the copy"
    )]
    NotOwn {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// It does not hold a key.
    #[error("{path} holds no key: {error}")]
    NoKey {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: KeyError,
    },
    /// It cannot be read or written.
    #[error("{path}: {error}")]
    System {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// Makes a new key and writes it to `path`, which must not exist.
pub fn create_key(path: &Path, entropy: &mut dyn Entropy) -> Result<ClusterKey, KeyFileError> {
    let key = ClusterKey::generate(entropy);
    let system = |error| KeyFileError::System { path: path.into(), error };
    let mut file = match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            return Err(KeyFileError::Exists { path: path.into() });
        }
        opened => opened.map_err(system)?,
    };
    let written = write_key(&mut file, &key);
    if written.is_err() {
        // Half a key is worse than none. Only what was made here goes: the name may be another file's by now.
        let made = file.metadata().map(|made| (made.dev(), made.ino())).ok();
        let there = std::fs::symlink_metadata(path).map(|there| (there.dev(), there.ino())).ok();
        if made.is_some() && made == there {
            let _ = std::fs::remove_file(path);
        }
    }
    written.map(|()| key).map_err(system)
}

fn write_key(file: &mut File, key: &ClusterKey) -> io::Result<()> {
    let text = format!("# A Highwire cluster key, {}. Whoever has it is a member.\n", key.fingerprint());
    file.write_all(text.as_bytes())?;
    file.write_all(key.to_text().as_bytes())?;
    file.sync_all()
}

/// Reads the key in `path`, a file of this process's user or of root that nobody else can read or write.
pub fn read_key(path: &Path) -> Result<ClusterKey, KeyFileError> {
    let system = |error| KeyFileError::System { path: path.into(), error };
    let file = File::open(path).map_err(system)?;
    let metadata = file.metadata().map_err(system)?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o777);
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(KeyFileError::NotOwn { path: path.into(), owner });
    }
    if mode & 0o077 != 0 {
        return Err(KeyFileError::NotPrivate { path: path.into(), mode });
    }
    // Room for all of it, so that growing leaves no copy of the key behind.
    let mut text = Zeroizing::new(String::with_capacity(KEY_FILE_BYTES_MAX as usize + READ_AHEAD));
    file.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text).map_err(system)?;
    ClusterKey::parse(&text).map_err(|error| KeyFileError::NoKey { path: path.into(), error })
}

/// A key is a line; comments are short.
const KEY_FILE_BYTES_MAX: u64 = 64 << 10;
/// The standard library asks for so much room before it finds out that the file ends.
const READ_AHEAD: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use highwire_proto::SeededEntropy;
    use rustix::process::{Resource, Rlimit};
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_that_was_written_is_read_again_and_never_overwritten() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cluster.key");
        let made = create_key(&path, &mut SeededEntropy::new(1)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read_key(&path).unwrap().fingerprint(), made.fingerprint());
        let before = fs::read(&path).unwrap();
        let again = create_key(&path, &mut SeededEntropy::new(2));
        assert!(matches!(again, Err(KeyFileError::Exists { .. })), "{again:?}");
        assert_eq!(fs::read(&path).unwrap(), before);
    }

    #[test]
    fn a_key_that_others_can_read_is_refused_and_says_what_to_do() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cluster.key");
        create_key(&path, &mut SeededEntropy::new(1)).unwrap();
        for mode in [0o640, 0o604, 0o660] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let refused = read_key(&path).unwrap_err().to_string();
            assert!(refused.contains("chmod 600") && refused.contains(&format!("{mode:o}")), "{refused}");
        }
    }

    #[test]
    fn a_key_that_cannot_be_made_leaves_one_that_is_there() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cluster.key");
        let made = create_key(&path, &mut SeededEntropy::new(1)).unwrap();
        // Out of descriptors, opening fails before the kernel looks whether the file is there.
        let limit = rustix::process::getrlimit(Resource::Nofile);
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).unwrap();
        let failed = create_key(&path, &mut SeededEntropy::new(2));
        rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
        assert!(matches!(failed, Err(KeyFileError::System { .. })), "{failed:?}");
        assert_eq!(read_key(&path).unwrap().fingerprint(), made.fingerprint());
    }

    #[test]
    fn a_key_of_another_user_is_refused_and_that_of_root_is_not() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cluster.key");
        create_key(&path, &mut SeededEntropy::new(1)).unwrap();
        if !rustix::process::geteuid().is_root() {
            eprintln!("NOT TESTED, needs root: a key file of another user");
            return;
        }
        std::os::unix::fs::chown(&path, Some(4711), Some(0)).unwrap();
        let refused = read_key(&path).unwrap_err().to_string();
        assert!(refused.contains("belongs to user 4711") && refused.contains("copy it"), "{refused}");
        std::os::unix::fs::chown(&path, Some(0), Some(0)).unwrap();
        assert!(read_key(&path).is_ok());
    }

    #[test]
    fn what_is_no_key_is_named() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cluster.key");
        assert!(read_key(&path).unwrap_err().to_string().contains("cluster.key"));
        fs::write(&path, "# nothing else\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(read_key(&path), Err(KeyFileError::NoKey { .. })));
        let missing = create_key(&place.path().join("no/such/place"), &mut SeededEntropy::new(1));
        assert!(matches!(missing, Err(KeyFileError::System { .. })));
    }
}
