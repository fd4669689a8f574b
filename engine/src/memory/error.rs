//! Why memory could not be set up: what was asked, what the kernel said, and what to change.

use std::io;

use super::{HugepagePool, MemlockLimit};

/// Why memory could not be set up. Nothing stays mapped after an error.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A setting is out of range.
    #[error("setting `{setting}` is {value}: {allowed}")]
    Config {
        /// Name of the setting.
        setting: &'static str,
        /// The value that was given.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// Explicit hugepages are required and cannot be had.
    #[error(
        "setting `pages` is required, but block {block} of {block_count} got no hugepages ({}); the arena needs \
         {needed_pages} pages, the kernel's pool of {} KiB pages has {} in all, {} free, {} reserved: raise it \
         (`sysctl -w vm.nr_hugepages={}`, early after boot) or set `pages` to preferred",
        errno_text(*errno), pool.page_bytes / 1024, pool.total, pool.free, pool.reserved,
        pool.total + needed_pages.saturating_sub(pool.free.saturating_sub(pool.reserved))
    )]
    Hugepages {
        /// Number of the block that failed, from 0.
        block: usize,
        /// Blocks that were asked for.
        block_count: usize,
        /// Hugepages that the arena needs in all.
        needed_pages: u64,
        /// The kernel's pool after the failed arena was given back.
        pool: HugepagePool,
        /// What the kernel said.
        errno: i32,
    },
    /// The machine, or the control group of this process, does not have that much memory.
    #[error(
        "{needed_bytes} bytes of memory are needed, {limit} is {available_bytes} bytes: lower the capacity or \
         raise the limit"
    )]
    NotEnoughMemory {
        /// Bytes still to be mapped when the check failed.
        needed_bytes: u64,
        /// Bytes there are.
        available_bytes: u64,
        /// Name of the limit, for instance `MemAvailable`.
        limit: String,
    },
    /// Address space could not be had.
    #[error(
        "{call} of {bytes} bytes failed: {}; limits that can cause it: vm.max_map_count (two mappings per block: \
         larger blocks need fewer), vm.overcommit_memory, RLIMIT_AS (`ulimit -v`)",
        errno_text(*errno)
    )]
    Map {
        /// The system call.
        call: &'static str,
        /// Bytes asked for.
        bytes: usize,
        /// What the kernel said.
        errno: i32,
    },
    /// Address space was had, but no pages to put behind it.
    #[error(
        "no pages behind {bytes} mapped bytes: {}; limits that can cause it: a memory or hugetlb control group \
         (`memory.max`, `hugetlb.*.max`), or memory that the hardware reported as broken",
        errno_text(*errno)
    )]
    Populate {
        /// Bytes of the block.
        bytes: usize,
        /// What the kernel said.
        errno: i32,
    },
    /// A mapping could not be kept out of forked children, so a child could share pages under DMA.
    #[error("madvise({advice}) failed: {}", errno_text(*errno))]
    Advise {
        /// Name of the advice.
        advice: &'static str,
        /// What the kernel said.
        errno: i32,
    },
    /// Locking is required and refused.
    #[error("setting `lock` is required, but mlock failed: {}", lock_advice(*needed_bytes, limit, *errno))]
    Lock {
        /// Bytes that had to be locked.
        needed_bytes: u64,
        /// The limit in force.
        limit: MemlockLimit,
        /// What the kernel said.
        errno: i32,
    },
}

/// The system's words for `errno`.
pub(super) fn errno_text(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

/// `errno` of the system call that has just failed on this thread.
pub(super) fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// What is wrong with the lock limit and the ways to raise it; for the error and for the warning.
pub(super) fn lock_advice(needed_bytes: u64, limit: &MemlockLimit, errno: i32) -> String {
    format!(
        "{}; {needed_bytes} bytes are to be locked, RLIMIT_MEMLOCK is {} (hard limit {}): raise it with \
         `ulimit -l unlimited`, `LimitMEMLOCK=infinity` in the systemd unit, or `docker run --ulimit memlock=-1:-1`",
        errno_text(errno),
        MemlockLimit::text(limit.soft_bytes),
        MemlockLimit::text(limit.hard_bytes),
    )
}
