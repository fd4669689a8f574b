//! Until when values may be served without asking, by slot: written by the shard, read by callers whose hit is dated.
//!
//! Beside the table and not in its entries: an entry fills its two cache lines, and a value that is not dated (the
//! default) is served without a look in here.

use crate::namespace::usage::Usages;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Until which moment: always.
pub(crate) const ALWAYS: u64 = u64::MAX;

/// What callers and the shard share about namespaces. Moments are nanoseconds since the shard's start.
pub(crate) struct Freshness {
    start: Instant,
    until_ns: Box<[AtomicU64]>,
    pub(crate) usages: Usages,
}

impl Freshness {
    pub(crate) fn new(slots: u32) -> Self {
        let until_ns = (0..slots).map(|_| AtomicU64::new(ALWAYS)).collect();
        Self { start: Instant::now(), until_ns, usages: Usages::new() }
    }

    /// A moment as a number; one before the start is 0.
    pub(crate) fn ns(&self, at: Instant) -> u64 {
        // Centuries fit.
        at.saturating_duration_since(self.start).as_nanos() as u64
    }

    /// Caller: whether the value that it has pinned in `slot` may be served without asking.
    pub(crate) fn is_fresh(&self, slot: u32) -> bool {
        // Before the clock is read, so that waiting in between cannot make the value look younger.
        let until = self.until(slot);
        until == ALWAYS || self.ns(Instant::now()) < until
    }

    /// The end of the time of the value in a slot.
    pub(crate) fn until(&self, slot: u32) -> u64 {
        // Relaxed: the pin's acquire shows what was stored before the value was published. What the shard stores later
        // may be seen late, by callers that started before the answer to whoever wanted the change; that answer orders
        // it before everything that starts afterwards.
        self.until_ns[slot as usize].load(Ordering::Relaxed)
    }

    /// Shard: sets it.
    pub(crate) fn set_until(&self, slot: u32, until_ns: u64) {
        // Relaxed: see `until`.
        self.until_ns[slot as usize].store(until_ns, Ordering::Relaxed);
    }
}
