//! Counters. Shards count their own work; callers count lookups on stripes that threads do not share.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// A snapshot of what a cache did and holds, over all shards. Counters only grow; gauges are marked.
///
/// Counters are read one by one while the cache works, so sums that belong together
/// (`lookups = hits + misses`) hold exactly only when no call is under way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Positions looked up by the get calls.
    pub lookups: u64,
    /// Lookups answered on the caller's thread.
    pub hits: u64,
    /// Lookups that went to a shard.
    pub misses: u64,
    /// Bytes of the values that hits found.
    pub hit_bytes: u64,
    /// Misses for which the value was there by the time the shard looked.
    pub late_hits: u64,
    /// Misses that joined a fill already under way.
    pub joined: u64,
    /// Fills started.
    pub fills: u64,
    /// Fills whose value was published.
    pub fills_published: u64,
    /// Fills for which the origin said that it has no such key.
    pub fills_absent: u64,
    /// Misses answered at once, because the origin said a moment ago that it has no such key.
    pub absent_hits: u64,
    /// Questions to peers about all keys of a batch at once.
    pub locates: u64,
    /// Fills that ended with the origin's word that the value in the cache is the present one: nothing was transferred.
    pub fills_confirmed: u64,
    /// Fills that failed.
    pub fills_failed: u64,
    /// Fills whose value was thrown away because the key was invalidated or put meanwhile, or nobody waited.
    pub fills_discarded: u64,
    /// Gauge: fills under way.
    pub fills_in_flight: u64,
    /// Parts of large values that another shard than the value's own received.
    pub parts_assisted: u64,
    /// Value bytes that the kernel wrote straight into the extents where they stay.
    pub received_direct_bytes: u64,
    /// Value bytes that were copied once more after they were received.
    pub received_copied_bytes: u64,
    /// Value bytes that were received and thrown away.
    pub received_discarded_bytes: u64,
    /// Values put locally.
    pub puts: u64,
    /// Bytes of values put locally.
    pub put_bytes: u64,
    /// Values evicted to make room.
    pub evictions: u64,
    /// Bytes of values evicted to make room.
    pub evicted_bytes: u64,
    /// Values dropped by invalidation or replacement.
    pub invalidated: u64,
    /// Fills whose bytes did not have the checksum that the origin announced.
    pub checksum_failures: u64,
    /// Times that a fill or put had to wait because everything evictable was pinned.
    pub starvations: u64,
    /// System calls that shards made to move bytes and to sleep.
    pub transport_calls: u64,
    /// Gauge: shards that work with epoll, since io_uring is forbidden to them or epoll was asked for. The same bytes
    /// cost them more calls.
    pub epoll_shards: u64,
    /// Connections made.
    pub lanes_opened: u64,
    /// Connections lost, refused or given up.
    pub lanes_failed: u64,
    /// Gauge: connections open.
    pub lanes: u64,
    /// Gauge: values that lookups can find.
    pub entries: u64,
    /// Gauge: bytes of those values.
    pub value_bytes: u64,
    /// Gauge: bytes of arena in use, by values found or not and by fills, in whole granules.
    pub used_bytes: u64,
    /// Gauge: bytes of all arenas, `retiring_bytes` included.
    pub arena_bytes: u64,
    /// Gauge: bytes of blocks that a resize takes out and that are still in use or mapped.
    pub retiring_bytes: u64,
    /// Gauge: leases and other pins that have not been released.
    pub pins: u64,
    /// Gauge: values no longer found that pins keep in memory.
    pub condemned: u64,
    /// Gauge: room reserved by puts that are not finished.
    pub reservations: u64,
}

/// What one namespace has in a cache at a moment, over all shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NamespaceStats {
    /// Values that lookups can find, whatever their age.
    pub entries: u64,
    /// Bytes of arena in use, by values found or not, by fills and by puts that are being written, in whole granules:
    /// what `quota_bytes` bounds.
    pub used_bytes: u64,
}

macro_rules! shard_counters {
    ($($name:ident),* $(,)?) => {
        /// What a shard counts. Written by the shard alone.
        ///
        /// On cache lines of its own: what callers read beside it must not move whenever the shard counts.
        #[derive(Default)]
        #[repr(align(128))]
        pub(crate) struct ShardCounters { $(pub(crate) $name: Counter),* }

        impl ShardCounters {
            fn add_to(&self, stats: &mut Stats) { $(stats.$name += self.$name.get();)* }
        }
    };
}

shard_counters!(
    late_hits,
    joined,
    fills,
    fills_published,
    fills_absent,
    fills_confirmed,
    absent_hits,
    locates,
    fills_failed,
    fills_discarded,
    fills_in_flight,
    parts_assisted,
    received_direct_bytes,
    received_discarded_bytes,
    puts,
    put_bytes,
    evictions,
    evicted_bytes,
    invalidated,
    checksum_failures,
    starvations,
    transport_calls,
    epoll_shards,
    lanes_opened,
    lanes_failed,
    lanes,
    entries,
    value_bytes,
    used_bytes,
    arena_bytes,
    retiring_bytes,
    condemned,
    reservations,
);

/// A number with one writer and any number of readers, who need no order: all accesses are relaxed.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.store(self.get() + n, Ordering::Relaxed);
    }
    pub(crate) fn sub(&self, n: u64) {
        self.0.store(self.get() - n, Ordering::Relaxed);
    }
    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

const STRIPES: usize = 32;

/// What callers count on one stripe. A cache line pair of its own, against adjacent-line prefetch.
#[derive(Default)]
#[repr(align(128))]
struct Stripe {
    hits: AtomicU64,
    misses: AtomicU64,
    hit_bytes: AtomicU64,
    /// Leases that shards gave out; hits are leases too.
    granted: AtomicU64,
    unpinned: AtomicU64,
}

/// What callers count. Relaxed throughout: numbers, not signals.
pub(crate) struct CallerCounters(Box<[Stripe]>);

impl CallerCounters {
    pub(crate) fn new() -> Self {
        Self((0..STRIPES).map(|_| Stripe::default()).collect())
    }

    #[inline]
    fn mine(&self) -> &Stripe {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static MINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES);
        // A thread that is being torn down may no longer have its local: any stripe will do.
        &self.0[MINE.try_with(|mine| *mine).unwrap_or(0)]
    }

    #[inline]
    pub(crate) fn hit(&self, bytes: u64) {
        let mine = self.mine();
        mine.hits.fetch_add(1, Ordering::Relaxed);
        mine.hit_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn missed(&self, n: u64) {
        self.mine().misses.fetch_add(n, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn granted(&self) {
        self.mine().granted.fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn unpinned(&self) {
        self.mine().unpinned.fetch_add(1, Ordering::Relaxed);
    }

    fn add_to(&self, stats: &mut Stats) {
        // Unpinned first: a pin that begins and ends in between must not make the difference negative.
        let unpinned: u64 = self.0.iter().map(|s| s.unpinned.load(Ordering::Acquire)).sum();
        for stripe in &self.0 {
            stats.hits += stripe.hits.load(Ordering::Relaxed);
            stats.misses += stripe.misses.load(Ordering::Relaxed);
            stats.hit_bytes += stripe.hit_bytes.load(Ordering::Relaxed);
            stats.pins += stripe.granted.load(Ordering::Relaxed);
        }
        stats.pins += stats.hits;
        stats.lookups = stats.hits + stats.misses;
        stats.pins = stats.pins.saturating_sub(unpinned);
    }
}

/// Adds up one shard's counters.
pub(crate) fn collect(stats: &mut Stats, shard: &ShardCounters, callers: &CallerCounters) {
    shard.add_to(stats);
    let mut own = Stats::default();
    callers.add_to(&mut own);
    stats.lookups += own.lookups;
    stats.hits += own.hits;
    stats.misses += own.misses;
    stats.hit_bytes += own.hit_bytes;
    stats.pins += own.pins;
}
