//! Where names live: a directory that only this user can change.

use crate::config::Config;
use crate::error::RuntimeDirError;
use highwire_mem::mapped_user;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The directory for `shm:name` sockets, checked. Named ones must exist; the default is made.
pub(crate) fn runtime_dir(config: &Config) -> Result<PathBuf, RuntimeDirError> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = config.runtime_dir.clone().or_else(|| variable("HIGHWIRE_RUNTIME_DIR")) {
        check(&path)?;
        return Ok(path);
    }
    let user = rustix::process::geteuid().as_raw();
    let path = match variable("XDG_RUNTIME_DIR") {
        Some(base) => {
            check(&base)?;
            base.join("highwire")
        }
        None => std::env::temp_dir().join(format!("highwire-{user}")),
    };
    match std::fs::DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(source) => return Err(RuntimeDirError::Io { path, source }),
    }
    check(&path)?;
    Ok(path)
}

fn check(path: &Path) -> Result<(), RuntimeDirError> {
    // Not following a link: it could be turned elsewhere by whoever made it.
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(RuntimeDirError::Missing(path.into())),
        Err(source) => return Err(RuntimeDirError::Io { path: path.into(), source }),
    };
    let user = rustix::process::geteuid().as_raw();
    if !found.is_dir() {
        return Err(RuntimeDirError::NotDirectory(path.into()));
    }
    match mapped_user(found.uid()) {
        Some(owner) if owner == user => {}
        Some(owner) => return Err(RuntimeDirError::NotOurs { path: path.into(), owner, user }),
        None => return Err(RuntimeDirError::OwnerNotMapped { path: path.into() }),
    }
    if found.mode() & 0o022 != 0 {
        return Err(RuntimeDirError::WritableByOthers { path: path.into(), mode: found.mode() & 0o777 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn with_dir(path: &Path) -> Result<PathBuf, RuntimeDirError> {
        runtime_dir(&Config { runtime_dir: Some(path.into()), ..Config::default() })
    }

    #[test]
    fn a_directory_that_is_missing_not_ours_or_open_is_refused_with_what_to_do() {
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("run");
        let missing = with_dir(&dir).unwrap_err();
        assert!(matches!(missing, RuntimeDirError::Missing(_)) && missing.to_string().contains("mkdir -m 700"));
        std::fs::write(&dir, "").unwrap();
        assert!(matches!(with_dir(&dir), Err(RuntimeDirError::NotDirectory(_))));
        std::fs::remove_file(&dir).unwrap();
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o770)).unwrap();
        let open = with_dir(&dir).unwrap_err();
        assert!(matches!(open, RuntimeDirError::WritableByOthers { mode: 0o770, .. }));
        assert!(open.to_string().contains("chmod 700"));
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(with_dir(&dir).unwrap(), dir);
        let link = base.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert!(matches!(with_dir(&link), Err(RuntimeDirError::NotDirectory(_))));
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&dir, Some(4711), None).unwrap();
            assert!(matches!(with_dir(&dir), Err(RuntimeDirError::NotOurs { owner: 4711, .. })));
        }
    }
}
