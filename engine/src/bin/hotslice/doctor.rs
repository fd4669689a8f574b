//! `hotslice doctor`: what the cache can use on this machine, what that means, and what mends the rest.

#[path = "doctor_groups.rs"]
mod groups;

use hotslice::machine::Machine;
use hotslice::memory::{ThpMode, hugepage_pool, memlock_limit, thp_mode};
use hotslice::size::{format_bytes, parse_bytes};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `hotslice doctor`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 the cache can run here, 1 something keeps it from running, 2 bad arguments."
)]
pub struct DoctorArgs {
    /// Capacity of the cache that is planned
    #[arg(long, default_value = "1GiB", value_name = "SIZE", value_parser = |text: &str| parse_bytes("capacity", text))]
    capacity: u64,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As good as it gets.
    Ok,
    /// Works, but something costs.
    Warn,
    /// The cache cannot run.
    Bad,
}

/// One thing looked at.
#[derive(Debug, Serialize)]
struct Finding {
    what: &'static str,
    verdict: Verdict,
    found: String,
    meaning: String,
    /// The command that mends it.
    mend: Option<String>,
}

impl Finding {
    fn ok(what: &'static str, found: impl Into<String>, meaning: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Ok, found: found.into(), meaning: meaning.into(), mend: None }
    }

    fn warn(
        what: &'static str,
        found: impl Into<String>,
        meaning: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self { verdict: Verdict::Warn, mend: Some(mend.into()), ..Self::ok(what, found, meaning) }
    }

    fn bad(
        what: &'static str,
        found: impl Into<String>,
        meaning: impl Into<String>,
        mend: impl Into<String>,
    ) -> Self {
        Self { verdict: Verdict::Bad, ..Self::warn(what, found, meaning, mend) }
    }
}

/// Runs the command.
pub fn run(args: DoctorArgs) -> ExitCode {
    let root = System(PathBuf::from("/"));
    let groups = groups::Groups { machine: Machine::here(), capacity: args.capacity };
    let findings = [
        root.kernel(),
        ring(),
        hugepages(args.capacity),
        transparent(),
        memlock(args.capacity),
        groups.memory(),
        groups.hugetlb(hugepage_pool().page_bytes),
        files(),
        groups.nodes(),
        cores(),
        groups.cpuset(),
        groups.cpu_quota(),
        root.congestion(),
        root.zero_copy(),
    ];
    if args.json {
        match serde_json::to_string_pretty(&findings) {
            Ok(text) => println!("{text}"),
            Err(error) => eprintln!("error: {error}"),
        }
    } else {
        for finding in &findings {
            let verdict = match finding.verdict {
                Verdict::Ok => "ok  ",
                Verdict::Warn => "warn",
                Verdict::Bad => "BAD ",
            };
            println!("{verdict} {}: {}\n       {}", finding.what, finding.found, finding.meaning);
            if let Some(mend) = &finding.mend {
                println!("       mend: {mend}");
            }
        }
    }
    ExitCode::from(u8::from(findings.iter().any(|finding| finding.verdict == Verdict::Bad)))
}

fn ring() -> Finding {
    match hotslice::shard::probe_ring() {
        Err(error) => Finding::warn(
            "transport",
            format!("epoll; {error}"),
            "with `transport = auto` caches use epoll here: the same speed within a few percent, for several system \
             calls where io_uring makes one (see transport_calls in the stats); the slice server needs io_uring",
            "sysctl -w kernel.io_uring_disabled=0; in a container allow io_uring_* in the seccomp profile",
        ),
        Ok(report) if report.setup.contains(&"DEFER_TASKRUN") => Finding::ok(
            "transport",
            format!("io_uring, {}", report.setup.join(" | ")),
            "completions run on the shard's own core, when it asks for them",
        ),
        Ok(report) => Finding::warn(
            "transport",
            format!("io_uring, with [{}]", report.setup.join(" | ")),
            "without DEFER_TASKRUN completions interrupt the shard: somewhat more CPU time per byte",
            "run Linux 6.1 or newer",
        ),
    }
}

fn hugepages(capacity: u64) -> Finding {
    let pool = hugepage_pool();
    if pool.page_bytes == 0 {
        return Finding::warn(
            "hugepages",
            "this kernel has none",
            "blocks come from transparent hugepages or 4 KiB pages",
            "run a kernel with CONFIG_HUGETLBFS",
        );
    }
    let needed = capacity.div_ceil(pool.page_bytes as u64);
    let found = format!(
        "{} of {} pages of {} are free",
        pool.available(),
        pool.total,
        format_bytes(pool.page_bytes as u64)
    );
    if pool.available() >= needed {
        return Finding::ok("hugepages", found, format!("enough for {}", format_bytes(capacity)));
    }
    Finding::warn(
        "hugepages",
        found,
        format!("{} would take {needed}; the rest comes from transparent hugepages", format_bytes(capacity)),
        format!("sysctl -w vm.nr_hugepages={}", pool.total + needed - pool.available()),
    )
}

fn transparent() -> Finding {
    match thp_mode() {
        mode @ (ThpMode::Always | ThpMode::Madvise) => Finding::ok(
            "transparent hugepages",
            mode.to_string(),
            "blocks that find no explicit hugepage get these",
        ),
        mode => Finding::warn(
            "transparent hugepages",
            mode.to_string(),
            "blocks that find no explicit hugepage get 4 KiB pages: more TLB misses, slower registration",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    }
}

fn memlock(capacity: u64) -> Finding {
    let limit = memlock_limit();
    let hard = limit.hard_bytes.map_or("unlimited".to_owned(), format_bytes);
    let capable = if limit.exempt { "CAP_IPC_LOCK" } else { "no CAP_IPC_LOCK" };
    let found = format!("hard limit {hard}, {capable}");
    if limit.exempt || limit.hard_bytes.is_none_or(|bytes| bytes >= capacity) {
        let meaning = match limit.exempt {
            true => "with CAP_IPC_LOCK it does not bind: blocks can be locked and registered",
            false => "enough to lock and register the blocks",
        };
        return Finding::ok("RLIMIT_MEMLOCK", found, meaning);
    }
    Finding::warn(
        "RLIMIT_MEMLOCK",
        found,
        format!("less than {}: blocks can be neither locked nor registered", format_bytes(capacity)),
        "ulimit -l unlimited, systemd LimitMEMLOCK=infinity, docker --ulimit memlock=-1:-1 or --cap-add IPC_LOCK",
    )
}

fn files() -> Finding {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes a local.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    let found = format!("{} file descriptors", limit.rlim_cur);
    if limit.rlim_cur >= 1024 {
        return Finding::ok("RLIMIT_NOFILE", found, "a shard takes two, and one per connection");
    }
    Finding::warn(
        "RLIMIT_NOFILE",
        found,
        "few, if there are many peers",
        "ulimit -n 4096, systemd LimitNOFILE=4096",
    )
}

fn cores() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let found = format!("this process may use {cores}");
    if cores > 1 {
        return Finding::ok("cores", found, "a shard is pinned to a core of its own");
    }
    Finding::warn(
        "cores",
        found,
        "the shard shares it with its callers and is not pinned",
        "taskset -c 0-3 …, or a larger cpuset",
    )
}

/// A file system to look at; `/`, or a made-up one in tests.
struct System(PathBuf);

impl System {
    fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.0.join(path)).ok().map(|text| text.trim().to_owned())
    }

    fn kernel(&self) -> Finding {
        let release = self.read("proc/sys/kernel/osrelease").unwrap_or_default();
        match version(&release) {
            Some(version) if version >= (6, 1) => {
                Finding::ok("kernel", format!("Linux {release}"), "has all that the engine uses")
            }
            Some(version) if version >= (5, 10) => Finding::warn(
                "kernel",
                format!("Linux {release}"),
                "works; rings lack the newer task-run modes",
                "run Linux 6.1 or newer",
            ),
            _ => Finding::bad(
                "kernel",
                format!("Linux {release}"),
                "io_uring needs 5.10 for what the engine does",
                "run Linux 5.10 or newer",
            ),
        }
    }

    fn congestion(&self) -> Finding {
        let name = self.read("proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
        if name != "bbr" {
            return Finding::ok(
                "TCP congestion control",
                name,
                "does not pace: loopback and fast links run freely",
            );
        }
        Finding::warn(
            "TCP congestion control",
            name,
            "paces what is sent, which can halve the throughput of loopback and of fast, short links; what counts \
             is the sender's setting",
            "sysctl -w net.ipv4.tcp_congestion_control=cubic   (or reno)",
        )
    }

    /// Zero-copy receive is a matter of kernel, driver and NIC set-up. This names what can be seen from here.
    fn zero_copy(&self) -> Finding {
        let release = self.read("proc/sys/kernel/osrelease").unwrap_or_default();
        let nics = self.nics();
        let able = ["bnxt_en", "mlx5_core", "fbnic", "gve"];
        let capable: Vec<&str> = nics
            .iter()
            .filter(|(_, driver)| able.contains(&driver.as_str()))
            .map(|(n, _)| n.as_str())
            .collect();
        let list: Vec<String> = nics.iter().map(|(name, driver)| format!("{name} ({driver})")).collect();
        let found = if list.is_empty() { "no NIC".to_owned() } else { list.join(", ") };
        if version(&release).is_some_and(|v| v >= (6, 15)) && !capable.is_empty() {
            return Finding::ok(
                "NIC zero-copy receive",
                found,
                format!(
                    "the driver of {} can, once header split and a queue are set up; this version of the engine \
                     receives with one kernel copy into the final place all the same",
                    capable.join(", ")
                ),
            );
        }
        Finding::ok(
            "NIC zero-copy receive",
            found,
            "not available here (it takes Linux 6.15 and a NIC of bnxt_en, mlx5_core, fbnic or gve); the kernel \
             copies once, into the final place",
        )
    }

    /// Interfaces with a device behind them, and their drivers.
    fn nics(&self) -> Vec<(String, String)> {
        let entries = std::fs::read_dir(self.0.join("sys/class/net")).into_iter().flatten().flatten();
        let mut nics: Vec<(String, String)> = entries
            .filter_map(|entry| {
                let driver = std::fs::read_link(entry.path().join("device/driver")).ok()?;
                let driver = Path::new(&driver).file_name()?.to_string_lossy().into_owned();
                Some((entry.file_name().to_string_lossy().into_owned(), driver))
            })
            .collect();
        nics.sort();
        nics
    }
}

/// Major and minor version of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, files: &[(&str, &str)]) -> System {
        let root = std::env::temp_dir().join(format!("hotslice-doctor-{}-{name}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        System(root)
    }

    #[test]
    fn kernels_are_told_apart() {
        for (release, verdict) in [
            ("6.18.44-cloud", Verdict::Ok),
            ("6.1.0", Verdict::Ok),
            ("5.10.0-136.oe2203", Verdict::Warn),
            ("5.4.0", Verdict::Bad),
            ("nonsense", Verdict::Bad),
        ] {
            let system = machine(release, &[("proc/sys/kernel/osrelease", release)]);
            assert_eq!(system.kernel().verdict, verdict, "{release}");
            std::fs::remove_dir_all(system.0).unwrap();
        }
    }

    #[test]
    fn bbr_is_pointed_out_with_the_command_that_changes_it() {
        let system = machine("bbr", &[("proc/sys/net/ipv4/tcp_congestion_control", "bbr\n")]);
        let finding = system.congestion();
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.mend.unwrap().starts_with("sysctl -w net.ipv4.tcp_congestion_control="));
        std::fs::remove_dir_all(system.0).unwrap();
    }

    #[test]
    fn a_capable_nic_is_recognised_by_its_driver() {
        let system = machine("nic", &[("proc/sys/kernel/osrelease", "6.16.0")]);
        let device = system.0.join("sys/class/net/eth0/device");
        std::fs::create_dir_all(&device).unwrap();
        std::os::unix::fs::symlink("../../bus/pci/drivers/mlx5_core", device.join("driver")).unwrap();
        assert_eq!(system.nics(), [("eth0".to_owned(), "mlx5_core".to_owned())]);
        assert!(system.zero_copy().meaning.contains("eth0"));
        std::fs::remove_dir_all(system.0).unwrap();
    }

    #[test]
    fn every_finding_that_is_not_ok_says_what_mends_it() {
        let findings = [ring(), hugepages(u64::MAX >> 20), transparent(), memlock(1 << 40), files(), cores()];
        for finding in findings {
            assert_eq!(finding.verdict != Verdict::Ok, finding.mend.is_some(), "{finding:?}");
        }
    }
}
