//! Why memory could not be set up.

/// Why memory could not be set up. Each says what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A size is not allowed.
    #[error("`{setting}` is {bytes} bytes: {allowed}")]
    Size {
        /// Name of the setting.
        setting: &'static str,
        /// What was given, in bytes.
        bytes: usize,
        /// What is allowed.
        allowed: String,
    },
    /// `pages = required`, and the pool of explicit hugepages is too small.
    #[error(
        "pages = required needs {needed_pages} hugepages of {page_bytes} bytes, {free_pages} are free: raise \
         /proc/sys/vm/nr_hugepages (as root: sysctl -w vm.nr_hugepages=N), or set pages = preferred"
    )]
    Hugepages {
        /// Hugepages that the arena needs.
        needed_pages: usize,
        /// Hugepages that were free when it was tried.
        free_pages: usize,
        /// Size of one, in bytes; 0 where the kernel has none.
        page_bytes: usize,
    },
    /// The kernel refused address space or memory.
    #[error("cannot {what} {bytes} bytes: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// For how many bytes.
        bytes: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// `lock = required`, and the memory cannot be locked.
    #[error("lock = required: {reason}")]
    Lock {
        /// What was refused and how to allow it.
        reason: String,
    },
}
