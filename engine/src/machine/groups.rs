//! Limits of the control groups that this process is in, and of those above them; of both versions.
//!
//! The mount points are the usual ones: version 2 at `/sys/fs/cgroup` or `/sys/fs/cgroup/unified`, version 1 at
//! `/sys/fs/cgroup/<controllers>`. Where a container shows only its own part of the tree, that part counts.

use super::Machine;
use serde::Serialize;
use std::path::{Path, PathBuf};

const MOUNT: &str = "sys/fs/cgroup";

/// Version 1 writes "no limit" as the largest multiple of a page below 2^63. Nothing real is near it.
const UNLIMITED_BYTES: u64 = 1 << 62;

/// A limit on CPU time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CpuQuota {
    /// Cores' worth of time.
    pub cores: f64,
    /// The file that says so.
    pub file: String,
}

/// A limit on memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupLimit {
    /// The limit in bytes.
    pub limit_bytes: u64,
    /// Bytes left below it, what can be reclaimed included.
    pub available_bytes: u64,
    /// The file that says so, and whose it is.
    pub file: String,
}

/// Paths of this process's groups, out of `/proc/self/cgroup`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Groups {
    /// In the hierarchy of version 2.
    unified: Option<String>,
    /// Controllers, separated by commas as the mount point is named, and the path.
    version1: Vec<(String, String)>,
}

impl Groups {
    fn parse(text: &str) -> Self {
        let mut groups = Groups::default();
        for line in text.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
                continue;
            };
            let path = path.trim_start_matches('/').to_owned();
            match controllers {
                "" => groups.unified = Some(path),
                named => groups.version1.push((named.to_owned(), path)),
            }
        }
        groups
    }
}

/// One group's directory, and the version of its files.
struct Directory {
    path: PathBuf,
    version1: bool,
}

impl Machine {
    /// The directories of the groups that a controller's limits may stand in, from this process's upwards.
    fn group_directories(&self, controller: &str) -> Vec<Directory> {
        let groups = Groups::parse(&self.read("proc/self/cgroup").unwrap_or_default());
        let mount = Path::new(MOUNT);
        let mut directories = Vec::new();
        let mut add = |mount: PathBuf, path: &str, version1| {
            let own = mount.join(path);
            let inside = own.ancestors().take_while(|directory| directory.starts_with(&mount));
            directories.extend(inside.map(|path| Directory { path: path.to_owned(), version1 }));
        };
        if let Some(path) = &groups.unified {
            add(mount.to_owned(), path, false);
            add(mount.join("unified"), path, false);
        }
        for (controllers, path) in &groups.version1 {
            if controllers.split(',').any(|named| named == controller) {
                add(mount.join(controllers), path, true);
                if controllers != controller {
                    add(mount.join(controller), path, true);
                }
            }
        }
        directories
    }

    fn group_number(&self, directory: &Directory, file: &str) -> Option<u64> {
        self.read(directory.path.join(file))?.parse().ok()
    }

    /// The tightest limit on CPU time.
    pub fn cpu_quota(&self) -> Option<CpuQuota> {
        let quota = |directory: &Directory| match directory.version1 {
            false => {
                let cores = parse_cpu_max(&self.read(directory.path.join("cpu.max"))?)?;
                Some(CpuQuota { cores, file: "cpu.max".to_owned() })
            }
            true => {
                let quota = self.read(directory.path.join("cpu.cfs_quota_us"))?;
                let period = self.read(directory.path.join("cpu.cfs_period_us"))?;
                let cores = parse_cpu_max(&format!("{quota} {period}"))?;
                Some(CpuQuota { cores, file: "cpu.cfs_quota_us".to_owned() })
            }
        };
        let quotas = self.group_directories("cpu");
        quotas.iter().filter_map(quota).min_by(|left, right| left.cores.total_cmp(&right.cores))
    }

    /// The limit on memory that leaves the least.
    pub fn group_memory(&self) -> Option<GroupLimit> {
        let limit = |directory: &Directory| {
            let (limit, usage, cache) = match directory.version1 {
                false => ("memory.max", "memory.current", "inactive_file "),
                true => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
            };
            let limit_bytes = bytes_limit(self.group_number(directory, limit)?)?;
            let used_bytes = self.group_number(directory, usage).unwrap_or(0);
            // The kernel gives up the cache of files before it refuses.
            let statistics = self.read(directory.path.join("memory.stat")).unwrap_or_default();
            let cached = statistics.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse().ok());
            let held_bytes = used_bytes.saturating_sub(cached.unwrap_or(0));
            Some(group_limit(limit_bytes, held_bytes, limit))
        };
        let directories = self.group_directories("memory");
        directories.iter().filter_map(limit).min_by_key(|limit| limit.available_bytes)
    }

    /// The limit on explicit hugepages of this size that leaves the least.
    pub fn group_hugetlb(&self, page_bytes: usize) -> Option<GroupLimit> {
        let size = page_size_name(page_bytes)?;
        let limit = |directory: &Directory| {
            // What is in use, and what mappings have reserved, which may be limited by itself.
            let limit = |kind: &str| {
                let (limit, usage) = match directory.version1 {
                    false => (format!("hugetlb.{size}.{kind}max"), format!("hugetlb.{size}.{kind}current")),
                    true => (
                        format!("hugetlb.{size}.{kind}limit_in_bytes"),
                        format!("hugetlb.{size}.{kind}usage_in_bytes"),
                    ),
                };
                let limit_bytes = bytes_limit(self.group_number(directory, &limit)?)?;
                let used_bytes = self.group_number(directory, &usage).unwrap_or(0);
                Some(group_limit(limit_bytes, used_bytes, &limit))
            };
            [limit(""), limit("rsvd.")].into_iter().flatten().min_by_key(|limit| limit.available_bytes)
        };
        let directories = self.group_directories("hugetlb");
        directories.iter().filter_map(limit).min_by_key(|limit| limit.available_bytes)
    }

    /// The cores of this process's cpuset, as the kernel writes them.
    pub fn cpuset(&self) -> Option<String> {
        let cores = |directory: &Directory| {
            let file = if directory.version1 { "cpuset.effective_cpus" } else { "cpuset.cpus.effective" };
            self.read(directory.path.join(file)).filter(|text| !text.is_empty())
        };
        self.group_directories("cpuset").iter().find_map(cores)
    }
}

fn group_limit(limit_bytes: u64, used_bytes: u64, file: &str) -> GroupLimit {
    let available_bytes = limit_bytes.saturating_sub(used_bytes);
    GroupLimit { limit_bytes, available_bytes, file: format!("{file} of the control group") }
}

fn bytes_limit(bytes: u64) -> Option<u64> {
    (bytes < UNLIMITED_BYTES).then_some(bytes)
}

/// Cores' worth of time out of `quota period`, in microseconds. `None` for no limit: `max`, or -1 in version 1.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period): (u64, u64) = (quota.parse().ok()?, period.trim().parse().ok()?);
    (period > 0).then(|| quota as f64 / period as f64)
}

/// A page size as the files of the hugetlb controller are named.
fn page_size_name(page_bytes: usize) -> Option<String> {
    match page_bytes {
        0 => None,
        bytes if bytes >= 1 << 30 => Some(format!("{}GB", bytes >> 30)),
        bytes if bytes >= 1 << 20 => Some(format!("{}MB", bytes >> 20)),
        bytes => Some(format!("{}KB", bytes >> 10)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Fixture;
    use super::*;

    /// A container of version 2 that sees its own tree from the root.
    #[test]
    fn version_2_limits_are_read_up_the_tree() {
        let group = "sys/fs/cgroup/kubepods/pod1";
        let at = |file: &str| format!("{group}/{file}");
        let (cpu, memory, current, stat) =
            (at("cpu.max"), at("memory.max"), at("memory.current"), at("memory.stat"));
        let (huge, huge_current, reserved) =
            (at("hugetlb.2MB.max"), at("hugetlb.2MB.current"), at("hugetlb.2MB.rsvd.max"));
        let set = at("cpuset.cpus.effective");
        let files = [
            ("proc/self/cgroup", "0::/kubepods/pod1\n"),
            (cpu.as_str(), "max 100000\n"),
            ("sys/fs/cgroup/kubepods/cpu.max", "250000 100000\n"),
            (&memory, "1073741824\n"),
            (&current, "536870912\n"),
            (&stat, "anon 1\ninactive_file 268435456\nactive_file 7\n"),
            ("sys/fs/cgroup/kubepods/memory.max", "max\n"),
            (&huge, "4194304\n"),
            (&huge_current, "2097152\n"),
            (&reserved, "max\n"),
            (&set, "2-3\n"),
        ];
        let machine = &Fixture::new("v2", &files);
        assert_eq!(machine.0.cpu_quota(), Some(CpuQuota { cores: 2.5, file: "cpu.max".to_owned() }));
        let limit = |limit_bytes, available_bytes, file: &str| {
            Some(GroupLimit { limit_bytes, available_bytes, file: format!("{file} of the control group") })
        };
        assert_eq!(machine.0.group_memory(), limit(1 << 30, (1 << 30) - (256 << 20), "memory.max"));
        assert_eq!(machine.0.group_hugetlb(2 << 20), limit(4 << 20, 2 << 20, "hugetlb.2MB.max"));
        assert_eq!(machine.0.group_hugetlb(1 << 30), None);
        assert_eq!(machine.0.cpuset().as_deref(), Some("2-3"));
    }

    /// Docker on version 1 without a namespace: the path is the host's, the mounted tree the container's own.
    #[test]
    fn version_1_limits_are_read_where_only_the_container_is_mounted() {
        let files = [
            (
                "proc/self/cgroup",
                "12:hugetlb:/docker/abc\n5:cpuset:/docker/abc\n4:cpu,cpuacct:/docker/abc\n\
                 3:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n",
            ),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "150000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n"),
            ("sys/fs/cgroup/hugetlb/hugetlb.2MB.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/hugetlb/hugetlb.2MB.rsvd.limit_in_bytes", "2097152\n"),
            ("sys/fs/cgroup/cpuset/cpuset.effective_cpus", "0-1\n"),
        ];
        let machine = &Fixture::new("v1", &files);
        assert_eq!(machine.0.cpu_quota(), Some(CpuQuota { cores: 1.5, file: "cpu.cfs_quota_us".to_owned() }));
        let memory = machine.0.group_memory().unwrap();
        assert_eq!((memory.limit_bytes, memory.available_bytes), (2 << 30, 1 << 30));
        assert!(memory.file.starts_with("memory.limit_in_bytes"));
        let huge = machine.0.group_hugetlb(2 << 20).unwrap();
        assert_eq!((huge.limit_bytes, huge.file.starts_with("hugetlb.2MB.rsvd.limit")), (2 << 20, true));
        assert_eq!(machine.0.cpuset().as_deref(), Some("0-1"));
    }

    #[test]
    fn no_limits_and_nonsense_are_none() {
        let files = [
            ("proc/self/cgroup", "0::/\nnonsense\n3:memory:/\n"),
            ("sys/fs/cgroup/cpu.max", "max 100000"),
            ("sys/fs/cgroup/memory.max", "max"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
        ];
        let machine = &Fixture::new("unlimited", &files);
        assert_eq!((machine.0.cpu_quota(), machine.0.group_memory()), (None, None));
        let bare = &Fixture::new("bare", &[]);
        assert_eq!((bare.0.cpu_quota(), bare.0.group_memory(), bare.0.cpuset()), (None, None, None));
        for odd in ["", "100000", "max 100000", "-1 100000", "1 0", "x y"] {
            assert_eq!(parse_cpu_max(odd), None, "{odd}");
        }
        assert_eq!(
            [0, 64 << 10, 2 << 20, 1 << 30].map(page_size_name),
            [None, Some("64KB".to_owned()), Some("2MB".to_owned()), Some("1GB".to_owned())]
        );
    }
}
