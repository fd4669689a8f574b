//! What `doctor` says about control groups, cpusets and NUMA nodes.

use super::Finding;
use hotslice::machine::{GroupLimit, Machine};
use hotslice::size::format_bytes;

fn found(limit: &GroupLimit) -> String {
    format!(
        "{} is {}, {} left",
        limit.file,
        format_bytes(limit.limit_bytes),
        format_bytes(limit.available_bytes)
    )
}

/// The machine, and the capacity that is planned on it.
pub(super) struct Groups {
    pub(super) machine: Machine,
    pub(super) capacity: u64,
}

impl Groups {
    pub(super) fn memory(&self) -> Finding {
        const WHAT: &str = "control group, memory";
        let Some(limit) = self.machine.group_memory() else {
            return Finding::ok(WHAT, "no limit", "what the machine has available is the limit");
        };
        let found = found(&limit);
        if limit.available_bytes >= self.capacity {
            let meaning = format!("enough for {} without explicit hugepages", format_bytes(self.capacity));
            return Finding::ok(WHAT, found, meaning);
        }
        Finding::warn(
            WHAT,
            found,
            format!(
                "{} fit only on explicit hugepages, which it does not count",
                format_bytes(self.capacity)
            ),
            "raise it: docker --memory, Kubernetes resources.limits.memory, systemd MemoryMax=",
        )
    }

    pub(super) fn hugetlb(&self, page_bytes: usize) -> Finding {
        const WHAT: &str = "control group, hugepages";
        let Some(limit) = self.machine.group_hugetlb(page_bytes) else {
            return Finding::ok(WHAT, "no limit", "what the kernel's pool has is the limit");
        };
        let found = found(&limit);
        if limit.available_bytes >= self.capacity {
            return Finding::ok(WHAT, found, format!("enough for {}", format_bytes(self.capacity)));
        }
        Finding::warn(
            WHAT,
            found,
            format!("less than {}: the rest comes from other pages", format_bytes(self.capacity)),
            "raise it: Kubernetes resources.limits.hugepages-2Mi, or the file itself",
        )
    }

    pub(super) fn cpu_quota(&self) -> Finding {
        const WHAT: &str = "control group, CPU time";
        let Some(quota) = self.machine.cpu_quota() else {
            return Finding::ok(WHAT, "no quota", "shards run whenever their cores are free");
        };
        let found = format!("{}: {} cores' worth", quota.file, quota.cores);
        if quota.cores >= 2.0 {
            let shards = quota.cores.floor();
            return Finding::ok(
                WHAT,
                found,
                format!("at most {shards} shards; callers need their share of it too"),
            );
        }
        Finding::warn(
            WHAT,
            found,
            "the shard and its callers share less than two cores' time and are stopped when it is used up",
            "raise it: docker --cpus, Kubernetes resources.limits.cpu, systemd CPUQuota=",
        )
    }

    pub(super) fn cpuset(&self) -> Finding {
        let status = self.machine.read("proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let mask = mask.map_or("unknown", str::trim);
        let set = self.machine.cpuset().unwrap_or_else(|| "none".to_owned());
        Finding::ok(
            "cpuset",
            format!("cores {set}; affinity mask {mask}"),
            "shards are placed on cores of the mask, from each node in turn",
        )
    }

    pub(super) fn nodes(&self) -> Finding {
        let topology = self.machine.topology();
        let of =
            |node: &hotslice::machine::Node| format!("node {} with {} cores", node.number, node.cores.len());
        let nodes: Vec<String> = topology.nodes().iter().map(of).collect();
        let meaning = match nodes.len() {
            0 => return Finding::ok("NUMA nodes", "unknown", "all memory is taken for equally far"),
            1 => "all memory is equally far",
            _ => "each shard asks for memory on its core's node; its report says where it is",
        };
        Finding::ok("NUMA nodes", nodes.join(", "), meaning)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn groups(name: &str, files: &[(&str, &str)]) -> (Groups, std::path::PathBuf) {
        let root = std::env::temp_dir().join(format!("hotslice-doctor-groups-{}-{name}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (Groups { machine: Machine::under(&root), capacity: 1 << 30 }, root)
    }

    #[test]
    fn limits_of_a_container_are_told() {
        let (tight, root) = groups(
            "tight",
            &[
                ("proc/self/cgroup", "0::/\n"),
                ("proc/self/status", "Name:\tx\nCpus_allowed_list:\t2-3\n"),
                ("sys/fs/cgroup/memory.max", "536870912\n"),
                ("sys/fs/cgroup/hugetlb.2MB.max", "2097152\n"),
                ("sys/fs/cgroup/cpu.max", "150000 100000\n"),
                ("sys/fs/cgroup/cpuset.cpus.effective", "2-3\n"),
                ("sys/devices/system/node/online", "0-1\n"),
                ("sys/devices/system/node/node0/cpulist", "0-1\n"),
                ("sys/devices/system/node/node1/cpulist", "2-3\n"),
            ],
        );
        for (finding, words) in [
            (tight.memory(), ["memory.max", "512MiB"]),
            (tight.hugetlb(2 << 20), ["hugetlb.2MB.max", "2MiB"]),
            (tight.cpu_quota(), ["cpu.max", "1.5 cores"]),
        ] {
            assert!(finding.verdict == Verdict::Warn && finding.mend.is_some(), "{finding:?}");
            assert!(words.iter().all(|word| finding.found.contains(word)), "{finding:?}");
        }
        assert_eq!(tight.cpuset().found, "cores 2-3; affinity mask 2-3");
        assert_eq!(tight.nodes().found, "node 0 with 2 cores, node 1 with 2 cores");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn no_limits_are_no_trouble() {
        let (bare, _) = groups("bare", &[]);
        for finding in [bare.memory(), bare.hugetlb(2 << 20), bare.cpu_quota(), bare.cpuset(), bare.nodes()] {
            assert!(finding.verdict == Verdict::Ok && finding.mend.is_none(), "{finding:?}");
        }
    }
}
