//! What the machine has of host memory, within what control groups leave this process, as in a container. Reads the
//! system's files under a given root; knows no device.

use std::fs::read_to_string;
use std::path::Path;

use super::HostMemory;

const UNLIMITED: HostMemory = HostMemory { total: u64::MAX, available: u64::MAX };

/// What is left where both apply.
fn tighter(a: HostMemory, b: HostMemory) -> HostMemory {
    HostMemory { total: a.total.min(b.total), available: a.available.min(b.available) }
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

/// The tightest limits: of the machine, of the process's groups, and of all groups around them.
pub fn memory(root: &Path) -> HostMemory {
    let mut tightest = machine(root);
    let text = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    for (version, path) in text.lines().filter_map(group) {
        for mount in version.mounts {
            let mount = root.join("sys/fs/cgroup").join(mount);
            // A container may see its own group as the mount itself, whatever its path; folders that are not there
            // set no limit.
            let path = Path::new(path.trim_start_matches('/'));
            let groups = path.ancestors().map(|group| limit(&mount.join(group), version));
            tightest = groups.fold(tightest, tighter);
        }
    }
    tightest
}

fn machine(root: &Path) -> HostMemory {
    let text = read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    };
    let [total, available] = ["MemTotal", "MemAvailable"].map(|name| field(name).unwrap_or(u64::MAX));
    HostMemory { total, available }
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

fn limit(group: &Path, version: &Version) -> HostMemory {
    let number = |file: &str| read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number, and no limit.
    let Some(total) = version.limits.iter().filter_map(|file| number(file)).min() else { return UNLIMITED };
    let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(version.cache)?.trim().parse::<u64>().ok());
    let used = number(version.usage).unwrap_or(0).saturating_sub(cache.unwrap_or(0));
    HostMemory { total, available: total.saturating_sub(used) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, remove_dir_all, write};

    /// What a system of these files has.
    #[track_caller]
    fn assert_memory(what: &str, files: &[(&str, &str)], total: u64, available: u64) {
        let root = std::env::temp_dir().join(format!("vvae-memory-{}-{}", std::process::id(), what.replace(' ', "-")));
        for (path, text) in files {
            let path = root.join(path);
            create_dir_all(path.parent().unwrap()).unwrap();
            write(path, text).unwrap();
        }
        let found = memory(&root);
        let _ = remove_dir_all(&root);
        assert_eq!(found, HostMemory { total, available }, "{what}");
    }

    const STAT: &str = "anon 500\nfile 300\ninactive_file 200\nactive_file 100\n";

    #[test]
    fn the_tightest_limit_counts() {
        let container = [
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
        assert_memory("the pod has 2500 left and the container 4200", &container, 5000, 2500);
        let high = [
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "9000\n"),
            ("sys/fs/cgroup/memory.high", "4000\n"),
            ("sys/fs/cgroup/memory.current", "1000\n"),
            ("sys/fs/cgroup/memory.stat", STAT),
        ];
        assert_memory("a high mark is a limit and inactive cache is free", &high, 4000, 3200);
        let machine = [
            ("proc/meminfo", "MemTotal:       4 kB\nMemFree:  1 kB\nMemAvailable:    3 kB\n"),
            ("proc/self/cgroup", "0::/box\n"),
            ("sys/fs/cgroup/box/memory.max", "4000\n"),
            ("sys/fs/cgroup/box/memory.current", "100\n"),
        ];
        assert_memory("a container on a machine", &machine, 4000, 3072);
        assert_memory("a machine alone", &machine[..2], 4096, 3072);
    }

    #[test]
    fn both_versions_of_groups_are_read() {
        let first = [
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/abc\n0::/\n"),
            // Inside a container its own group is the mount.
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "3000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n"),
        ];
        assert_memory("version one", &first, 7000, 4500);
        let both = [
            ("proc/self/cgroup", "4:memory:/a\n0::/a\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/unified/a/memory.max", "800\n"),
            ("sys/fs/cgroup/unified/a/memory.current", "1000\n"),
        ];
        assert_memory("more is in use than a limit that was lowered", &both, 800, 0);
    }

    #[test]
    fn without_groups_or_limits_there_is_no_limit() {
        assert_memory("no files", &[], u64::MAX, u64::MAX);
        let files = [("proc/self/cgroup", "nonsense\n0::/a/../../b\n"), ("sys/fs/cgroup/a/memory.max", "max\n")];
        assert_memory("odd lines", &files, u64::MAX, u64::MAX);
    }
}
