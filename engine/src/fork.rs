//! Telling a forked child from the process that opened the cache.
//!
//! A child inherits the caller's memory but neither the shards' threads nor the arenas (they are marked
//! `MADV_DONTFORK`, so that a page under DMA never moves by copy-on-write). Every entry point asks its
//! [`ForkGuard`] first, which costs one load.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn in_child() {
    // Relaxed: the child has one thread at this moment.
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Remembers the process in which it was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForkGuard(u32);

impl ForkGuard {
    pub(crate) fn new() -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: registers a handler that touches one atomic, which is async-signal-safe. It can fail
            // only for want of memory; forks then go unnoticed, which is where we were without it.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// True in a process that was forked from the one that made this guard.
    #[inline]
    pub(crate) fn forked(self) -> bool {
        GENERATION.load(Ordering::Relaxed) != self.0
    }
}
