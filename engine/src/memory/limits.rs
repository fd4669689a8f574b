//! What the machine allows: hugepage pool, THP mode, RLIMIT_MEMLOCK.

use serde::Serialize;

/// The pool of explicit hugepages of the default size, as /proc/meminfo has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HugepagePool {
    /// Bytes of one page; 0 where the kernel has no hugepages.
    pub page_bytes: usize,
    /// Pages in the pool.
    pub total: usize,
    /// Pages not in use. Some of them may be reserved.
    pub free: usize,
    /// Free pages that a mapping has reserved and not yet touched.
    pub reserved: usize,
}

impl HugepagePool {
    /// Pages that a new mapping can have.
    pub fn available(&self) -> usize {
        self.free.saturating_sub(self.reserved)
    }
}

/// Reads the pool. All zero if /proc cannot be read.
pub fn hugepage_pool() -> HugepagePool {
    parse_pool(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn parse_pool(meminfo: &str) -> HugepagePool {
    let number = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<usize>().ok()
    };
    HugepagePool {
        page_bytes: number("Hugepagesize:").unwrap_or(0) * 1024,
        total: number("HugePages_Total:").unwrap_or(0),
        free: number("HugePages_Free:").unwrap_or(0),
        reserved: number("HugePages_Rsvd:").unwrap_or(0),
    }
}

/// The mode of transparent hugepages: `always`, `madvise` or `never`; `None` where the kernel has none.
pub fn thp_mode() -> Option<String> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    text.split_once('[')?.1.split_once(']').map(|(mode, _)| mode.to_owned())
}

/// RLIMIT_MEMLOCK in bytes; `None` is "unlimited".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemlockLimit {
    /// What applies.
    pub soft_bytes: Option<u64>,
    /// What it can be raised to without privilege.
    pub hard_bytes: Option<u64>,
}

/// Reads RLIMIT_MEMLOCK. A process with CAP_IPC_LOCK is not bound by it.
pub fn memlock_limit() -> MemlockLimit {
    let limit = read_limit();
    let bytes = |n: libc::rlim_t| (n != libc::RLIM_INFINITY).then_some(n);
    MemlockLimit { soft_bytes: bytes(limit.rlim_cur), hard_bytes: bytes(limit.rlim_max) }
}

/// Raises the soft limit to the hard one, which needs no privilege.
pub(super) fn raise_memlock() {
    let limit = read_limit();
    if limit.rlim_cur != limit.rlim_max {
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, rlim_max: limit.rlim_max };
        // SAFETY: passes the address of a local.
        unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raised) };
    }
}

fn read_limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes a local. It fails for no valid resource; the zeros then say "nothing may be locked".
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_pool() {
        let text = "HugePages_Total:      12\nHugePages_Free:        7\nHugePages_Rsvd:        3\n\
                    HugePages_Surp:        0\nHugepagesize:       2048 kB\n";
        let pool = parse_pool(text);
        assert_eq!((pool.page_bytes, pool.total, pool.free, pool.available()), (2 << 20, 12, 7, 4));
        assert_eq!(parse_pool("Hugepagesize: junk"), HugepagePool::default());
    }
}
