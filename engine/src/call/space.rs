//! Waiting for a place in a full queue.

use super::futex::Futex;
use crate::sync::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::Instant;

/// Where producers of a full queue sleep until its consumer took something out.
pub(crate) struct Space {
    /// Somebody sleeps, or is about to.
    wanted: AtomicBool,
    /// Goes up with every wake; the word to sleep on.
    epoch: AtomicU32,
    futex: Futex,
}

impl Space {
    pub(crate) fn new() -> Self {
        Self { wanted: AtomicBool::new(false), epoch: AtomicU32::new(0), futex: Futex::new() }
    }

    /// Producer: tries `push` until it succeeds (true) or the deadline passes (false).
    pub(crate) fn wait(&self, deadline: Instant, mut push: impl FnMut() -> bool) -> bool {
        loop {
            // Acquire keeps the second try below after this load.
            let epoch = self.epoch.load(Ordering::Acquire);
            self.wanted.store(true, Ordering::Relaxed);
            // Pairs with the fence in `freed`: either this try sees the free place, or the consumer sees
            // `wanted` and raises the epoch.
            fence(Ordering::SeqCst);
            if push() {
                return true;
            }
            if !self.futex.wait(&self.epoch, epoch, deadline) {
                return false;
            }
        }
    }

    /// Consumer, after it took something out.
    pub(crate) fn freed(&self) {
        fence(Ordering::SeqCst);
        if self.wanted.load(Ordering::Relaxed) && self.wanted.swap(false, Ordering::Relaxed) {
            self.epoch.fetch_add(1, Ordering::Release);
            self.futex.wake(&self.epoch);
        }
    }
}
