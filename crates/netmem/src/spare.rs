//! How much memory may still be taken: what the machine has left, and what the limits of this process's control groups leave.
//!
//! The kernel fails an allocation of donated memory when the machine has none. A control group at its limit has a process of
//! it killed instead, and with it all that a node keeps; so nodes stop before.

use std::fs;
use std::path::{Path, PathBuf};

/// Whom to ask.
#[derive(Debug)]
pub(crate) struct Spare {
    machine: PathBuf,
    groups: Vec<Group>,
}

/// A control group that has a limit, and the names of what it tells.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    folder: PathBuf,
    names: &'static Names,
}

/// What the files of a version of control groups are called, and the lines of `memory.stat` that count what the kernel can
/// take back.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    limit: &'static str,
    used: &'static str,
    cached: [&'static str; 2],
}

const FIRST_VERSION: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file", "total_active_file"],
};
const SECOND_VERSION: Names =
    Names { limit: "memory.max", used: "memory.current", cached: ["inactive_file", "active_file"] };

impl Spare {
    /// Finds the groups that this process is in.
    pub(crate) fn find() -> Spare {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Spare { machine: "/proc/meminfo".into(), groups: groups(&own, Path::new("/sys/fs/cgroup")) }
    }

    /// Bytes that may still be taken, less a reserve for everybody else.
    pub(crate) fn bytes(&self) -> u64 {
        let of_groups = self.groups.iter().filter_map(Group::spare);
        of_groups.chain(self.of_machine()).min().unwrap_or(u64::MAX)
    }

    fn of_machine(&self) -> Option<u64> {
        let told = fs::read_to_string(&self.machine).ok()?;
        let kibibytes = |name| number(&told, name).map(|kibibytes| kibibytes * 1024);
        Some(kibibytes("MemAvailable:")?.saturating_sub(reserve(kibibytes("MemTotal:")?)))
    }
}

impl Group {
    /// `None` if it has no limit, or is gone.
    fn spare(&self) -> Option<u64> {
        let read = |name| fs::read_to_string(self.folder.join(name)).ok();
        // The second version says `max` where there is none, the first a number that no machine has.
        let limit: u64 = read(self.names.limit)?.trim().parse().ok().filter(|limit| *limit < 1 << 60)?;
        let used: u64 = read(self.names.used)?.trim().parse().ok()?;
        let told = read("memory.stat").unwrap_or_default();
        let cached: u64 = self.names.cached.iter().filter_map(|name| number(&told, name)).sum();
        Some(limit.saturating_sub(used.saturating_sub(cached)).saturating_sub(reserve(limit)))
    }
}

/// What is left alone of so many bytes.
fn reserve(bytes: u64) -> u64 {
    (bytes / 32).max(RESERVE_BYTES_MIN)
}

/// The number behind a name at the beginning of a line.
fn number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split_whitespace().next() == Some(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// The groups named in `/proc/self/cgroup` and those around them, as far as they can be seen below `root`.
fn groups(own: &str, root: &Path) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (top, names) = match controllers {
            "" if root.join("unified").is_dir() => (root.join("unified"), &SECOND_VERSION),
            "" => (root.to_owned(), &SECOND_VERSION),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), &FIRST_VERSION),
            _ => continue,
        };
        // In a container the path may be that of the host, of which only the end can be seen: as the top.
        let path = Path::new(path.trim_start_matches('/'));
        for folder in path.ancestors().map(|path| top.join(path)).filter(|folder| folder.join(names.limit).exists()) {
            groups.push(Group { folder, names });
        }
    }
    groups
}

/// Room for what is not donated: buffers of calls, and the tables of the node.
const RESERVE_BYTES_MIN: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(folder).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }

    const MIB: u64 = 1 << 20;

    fn spare(root: &Path, own: &str) -> u64 {
        let machine = root.join("meminfo");
        fs::write(&machine, format!("MemTotal: {} kB\nMemAvailable:   {} kB\n", 8192 * 1024, 4096 * 1024)).unwrap();
        Spare { machine, groups: groups(own, root) }.bytes()
    }

    #[test]
    fn without_groups_the_machine_counts() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(spare(root.path(), "0::/\n"), (4096 - 8192 / 32) * MIB);
    }

    #[test]
    fn the_tightest_group_around_the_process_counts() {
        let root = tempfile::tempdir().unwrap();
        let (outer, inner) = (root.path().join("a"), root.path().join("a/b"));
        let stat = format!("anon 5\ninactive_file {}\nactive_file {}\n", 20 * MIB, 10 * MIB);
        let of = |limit: &str, used: u64| vec![limit.to_owned(), (used * MIB).to_string(), stat.clone()];
        let put = |folder: &Path, texts: &[String]| {
            write(folder, &[("memory.max", &texts[0]), ("memory.current", &texts[1]), ("memory.stat", &texts[2])]);
        };
        put(&inner, &of("max\n", 200));
        put(&outer, &of(&format!("{}\n", 1024 * MIB), 300));
        assert_eq!(
            spare(root.path(), "0::/a/b\n"),
            (1024 - 32 - 270) * MIB,
            "what the kernel can take back is not used"
        );
        put(&inner, &of(&(256 * MIB).to_string(), 200));
        assert_eq!(spare(root.path(), "0::/a/b\n"), (256 - 16 - 170) * MIB);
        put(&inner, &of(&(256 * MIB).to_string(), 285));
        assert_eq!(spare(root.path(), "0::/a/b\n"), 0, "the reserve is not for us");
        // A process that sees the end of its path only.
        assert_eq!(spare(&outer, "0::/docker/b\n"), (1024 - 32 - 270) * MIB);
    }

    #[test]
    fn the_first_version_is_understood_too() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("memory/x");
        let stat = format!("inactive_file 1\ntotal_inactive_file {}\ntotal_active_file 0\n", 4 * MIB);
        let used = (64 * MIB).to_string();
        let put = |limit: u64| {
            let limit = limit.to_string();
            let files = [("memory.limit_in_bytes", &*limit), ("memory.usage_in_bytes", &used), ("memory.stat", &stat)];
            write(&group, &files);
        };
        let own = "9:name=systemd:/\n4:cpu,memory:/x\n0::/\n";
        put(9_223_372_036_854_771_712);
        assert_eq!(spare(root.path(), own), (4096 - 8192 / 32) * MIB, "no limit is none");
        put(100 * MIB);
        assert_eq!(spare(root.path(), own), (100 - 16 - 60) * MIB);
    }

    #[test]
    fn this_machine_tells() {
        let spare = Spare::find();
        assert!(spare.of_machine().is_some());
        assert!(spare.bytes() < u64::MAX);
    }
}
