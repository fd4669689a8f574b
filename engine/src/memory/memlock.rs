//! `mlock` and RLIMIT_MEMLOCK.
//!
//! Explicit hugepages need no lock: the kernel neither swaps nor splits them, ignores `mlock` on them, and
//! yet would check the limit; so they are not passed in here.

use std::fs;
use std::ptr::NonNull;

use serde::Serialize;

use super::error::last_errno;

/// CAP_IPC_LOCK in the capability sets of `/proc/self/status`.
const CAP_IPC_LOCK: u32 = 14;

/// How many bytes this process may lock.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize)]
pub struct MemlockLimit {
    /// Limit in force in bytes; `None` means no limit.
    pub soft_bytes: Option<u64>,
    /// What the process may raise it to by itself, in bytes; `None` means no limit.
    pub hard_bytes: Option<u64>,
    /// The calling thread has CAP_IPC_LOCK, so the limit does not bind it.
    pub exempt: bool,
}

impl MemlockLimit {
    /// `bytes` as text, or "unlimited".
    pub(super) fn text(bytes: Option<u64>) -> String {
        bytes.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
    }
}

/// The limit on locked memory (RLIMIT_MEMLOCK) and whether it binds the calling thread.
pub fn memlock_limit() -> MemlockLimit {
    let limit = raw_limit();
    let bytes = |value: libc::rlim_t| (value != libc::RLIM_INFINITY).then_some(value);
    MemlockLimit { soft_bytes: bytes(limit.rlim_cur), hard_bytes: bytes(limit.rlim_max), exempt: exempt() }
}

fn raw_limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit that the call fills. It cannot fail for a known resource and a valid
    // pointer; if it did, the zeroes read as "nothing may be locked".
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    limit
}

fn exempt() -> bool {
    // The thread's own file: capabilities belong to threads, not to the process.
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|capabilities| capabilities >> CAP_IPC_LOCK & 1 == 1)
}

/// Locks `bytes` bytes from `base`. If the limit refuses, raises the soft limit to the hard one and tries
/// once more; the limit belongs to the process and stays raised. Returns the errno of the refusal.
pub(super) fn lock(base: NonNull<u8>, bytes: usize) -> Result<(), i32> {
    match mlock(base, bytes) {
        Err(errno) if is_limit(errno) => {
            raise_soft_limit();
            mlock(base, bytes)
        }
        other => other,
    }
}

fn mlock(base: NonNull<u8>, bytes: usize) -> Result<(), i32> {
    // SAFETY: mlock changes no bytes; for a range that is not mapped it returns an error.
    match unsafe { libc::mlock(base.as_ptr().cast(), bytes) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

/// The errors of mlock that a higher limit can mend: ENOMEM above the limit, EPERM at a limit of 0, EAGAIN
/// if some pages could not be locked.
fn is_limit(errno: i32) -> bool {
    matches!(errno, libc::ENOMEM | libc::EPERM | libc::EAGAIN)
}

/// Raises the soft limit to the hard limit. Shards may do this at the same time: all of them set the same
/// value, and each tries its lock again whoever raised it.
fn raise_soft_limit() {
    let mut limit = raw_limit();
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is a valid rlimit. Every process may raise its soft limit up to its hard one; if the
    // call fails all the same, the limit stays and the lock that follows says so.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
}
