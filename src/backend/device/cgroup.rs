//! Memory limits that control groups set on this process, as containers do. Reads the system's files under a given
//! root; knows no device.

use std::fs::read_to_string;
use std::path::Path;

/// Total and available bytes of some memory. `u64::MAX` where nothing limits it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ram {
    pub total: u64,
    pub available: u64,
}

impl Ram {
    pub const UNLIMITED: Ram = Ram { total: u64::MAX, available: u64::MAX };

    /// What is left where both apply.
    pub fn min(self, other: Ram) -> Ram {
        Ram { total: self.total.min(other.total), available: self.available.min(other.available) }
    }
}

/// Where a version of control groups has its files. With both in use, v2 is mounted one folder down.
struct Version {
    mounts: &'static [&'static str],
    limits: &'static [&'static str],
    usage: &'static str,
    /// The line of memory.stat for file cache that the kernel drops first.
    cache: &'static str,
}

const V1: Version = Version {
    mounts: &["memory"],
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cache: "total_inactive_file",
};
/// Above memory.high the kernel slows a process down to a crawl, so it counts as a limit.
const V2: Version = Version {
    mounts: &["", "unified"],
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    cache: "inactive_file",
};

/// The tightest limits of the process's groups and of all groups around them.
pub fn memory(root: &Path) -> Ram {
    let text = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut tightest = Ram::UNLIMITED;
    for (version, path) in text.lines().filter_map(group) {
        for mount in version.mounts {
            let mount = root.join("sys/fs/cgroup").join(mount);
            // A container may see its own group as the mount itself, whatever its path; folders that are not there
            // set no limit.
            let path = Path::new(path.trim_start_matches('/'));
            let groups = path.ancestors().map(|group| limit(&mount.join(group), version));
            tightest = groups.fold(tightest, Ram::min);
        }
    }
    tightest
}

/// A line of /proc/self/cgroup, if it is about memory: "0::/path" for v2, "4:memory:/path" for v1.
fn group(line: &str) -> Option<(&'static Version, &str)> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    match controllers {
        "" if number == "0" => Some((&V2, path)),
        _ => controllers.split(',').any(|name| name == "memory").then_some((&V1, path)),
    }
}

fn limit(group: &Path, version: &Version) -> Ram {
    let number = |file: &str| read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number, and no limit.
    let Some(total) = version.limits.iter().filter_map(|file| number(file)).min() else { return Ram::UNLIMITED };
    let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(version.cache)?.trim().parse::<u64>().ok());
    let used = number(version.usage).unwrap_or(0).saturating_sub(cache.unwrap_or(0));
    Ram { total, available: total.saturating_sub(used) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, remove_dir_all, write};
    use std::path::PathBuf;

    /// A system of these files, gone at the end.
    struct Root(PathBuf);

    impl Root {
        fn new(name: &str, files: &[(&str, &str)]) -> Root {
            let root = std::env::temp_dir().join(format!("vvae-cgroup-{}-{name}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                create_dir_all(path.parent().unwrap()).unwrap();
                write(path, text).unwrap();
            }
            Root(root)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = remove_dir_all(&self.0);
        }
    }

    fn found(name: &str, files: &[(&str, &str)]) -> (u64, u64) {
        let Ram { total, available } = memory(&Root::new(name, files).0);
        (total, available)
    }

    const STAT: &str = "anon 500\nfile 300\ninactive_file 200\nactive_file 100\n";

    #[test]
    fn the_tightest_group_counts() {
        let files = [
            ("proc/self/cgroup", "0::/kubepods/pod1/main\n"),
            ("sys/fs/cgroup/kubepods/pod1/main/memory.max", "5000\n"),
            ("sys/fs/cgroup/kubepods/pod1/main/memory.high", "max\n"),
            ("sys/fs/cgroup/kubepods/pod1/main/memory.current", "1000\n"),
            ("sys/fs/cgroup/kubepods/pod1/main/memory.stat", STAT),
            ("sys/fs/cgroup/kubepods/pod1/memory.max", "6000\n"),
            ("sys/fs/cgroup/kubepods/pod1/memory.current", "3500\n"),
            ("sys/fs/cgroup/kubepods/memory.max", "max\n"),
            ("sys/fs/cgroup/kubepods/memory.current", "999999\n"),
        ];
        assert_eq!(found("nested", &files), (5000, 2500), "the pod has 2500 left, the container 4200");
    }

    #[test]
    fn a_high_mark_is_a_limit_and_inactive_cache_is_free() {
        let files = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "9000\n"),
            ("sys/fs/cgroup/memory.high", "4000\n"),
            ("sys/fs/cgroup/memory.current", "1000\n"),
            ("sys/fs/cgroup/memory.stat", STAT),
        ];
        assert_eq!(found("high", &files), (4000, 3200));
    }

    #[test]
    fn version_one_is_read_too() {
        let files = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/abc\n0::/\n"),
            // Inside a container its own group is the mount.
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n"),
        ];
        assert_eq!(found("v1", &files), (7000, 4500));
    }

    #[test]
    fn both_versions_at_once_are_read() {
        let files = [
            ("proc/self/cgroup", "4:memory:/a\n0::/a\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/unified/a/memory.max", "800\n"),
            ("sys/fs/cgroup/unified/a/memory.current", "1000\n"),
        ];
        assert_eq!(found("both", &files), (800, 0), "more is in use than a limit that was lowered");
    }

    #[test]
    fn without_groups_or_limits_there_is_no_limit() {
        assert_eq!(found("none", &[]), (u64::MAX, u64::MAX));
        let files = [("proc/self/cgroup", "nonsense\n0::/a/../../b\n"), ("sys/fs/cgroup/a/memory.max", "max\n")];
        assert_eq!(found("odd", &files), (u64::MAX, u64::MAX));
    }
}
