//! What must come back to rest: pins, extents, fills, descriptors, mappings.

use crate::sync::{HANG, eventually};
use hotslice::{Cache, Invalidate, Namespace};
use std::sync::{Mutex, PoisonError};

/// What a process holds that a cache or a server can leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Open file descriptors.
    pub descriptors: usize,
    /// Bytes of mappings that are kept out of core dumps, as arenas are (and next to nothing else).
    pub arena_bytes: u64,
}

impl Resources {
    /// Counts. Only the count of a process in which nothing else happens means anything.
    pub fn now() -> Self {
        // One of the descriptors is that of the directory itself, each time.
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("/proc/self/fd").count();
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("/proc/self/smaps");
        let (mut arena_bytes, mut size) = (0, 0);
        for line in smaps.lines() {
            if let Some(rest) = line.strip_prefix("Size:") {
                size = rest.trim().trim_end_matches(" kB").parse::<u64>().expect("a size") << 10;
            } else if let Some(flags) = line.strip_prefix("VmFlags:")
                && flags.split_whitespace().any(|flag| flag == "dd")
            {
                arena_bytes += size;
            }
        }
        Self { descriptors, arena_bytes }
    }
}

/// Runs a test alone in its process, whatever the number of test threads, and asserts that it leaves no
/// descriptor and no arena behind.
#[track_caller]
pub fn alone(test: impl FnOnce()) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // A test that failed does not spoil the others.
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let before = Resources::now();
    test();
    eventually(|| format!("back to {before:?}, still {:?}", Resources::now()), || Resources::now() == before);
}

/// Asserts that a cache is at rest: no lease, no fill, no reservation, nothing condemned, and every granule in
/// use belongs to a value that can be found. Call it when all leases are dropped.
#[track_caller]
pub fn assert_quiet(cache: &Cache) {
    let at_rest = || {
        // The shard takes in what was returned to it when it has something to do.
        nudge(cache);
        let s = cache.stats();
        let granule = hotslice::memory::GRANULE_BYTES as u64;
        // Each value rounds up by less than a granule; how far, only the sum of its rests tells.
        let rounding = s.used_bytes.wrapping_sub(s.value_bytes);
        s.pins == 0
            && s.condemned == 0
            && s.reservations == 0
            && s.fills_in_flight == 0
            && s.lookups == s.hits + s.misses
            && s.received_copied_bytes == 0
            && s.used_bytes.is_multiple_of(granule)
            && rounding <= s.entries * (granule - 1)
    };
    eventually(|| format!("a cache at rest: {:#?}", cache.stats()), at_rest);
}

/// [`assert_quiet`], and the values resident are exactly those of these lengths.
#[track_caller]
pub fn assert_holds(cache: &Cache, lens: impl IntoIterator<Item = usize>) {
    assert_quiet(cache);
    let granule = hotslice::memory::GRANULE_BYTES;
    let (mut entries, mut value_bytes, mut used_bytes) = (0, 0, 0);
    for len in lens {
        entries += 1;
        value_bytes += len as u64;
        used_bytes += (len.div_ceil(granule) * granule) as u64;
    }
    let s = cache.stats();
    assert_eq!((s.entries, s.value_bytes, s.used_bytes), (entries, value_bytes, used_bytes));
}

/// Ends a test's cache: at rest, empty after everything was forgotten (so no extent is lost), every fill
/// accounted for, shut down, dropped.
#[track_caller]
pub fn finish(cache: Cache) {
    assert_quiet(&cache);
    cache.invalidate(Invalidate::All, HANG).expect("invalidate all");
    assert_holds(&cache, []);
    assert_conserved(&cache);
    cache.shutdown();
}

/// Asserts that every fill came to exactly one end.
#[track_caller]
pub fn assert_conserved(cache: &Cache) {
    let s = cache.stats();
    assert_eq!(s.lookups, s.hits + s.misses, "{s:#?}");
    assert_eq!(
        s.fills,
        s.fills_published
            + s.fills_absent
            + s.fills_confirmed
            + s.fills_failed
            + s.fills_discarded
            + s.fills_in_flight,
        "{s:#?}"
    );
}

/// Gives every shard something to do that changes nothing.
fn nudge(cache: &Cache) {
    let nothing = Invalidate::Prefix(Namespace::DEFAULT, b"\0no test has such a key");
    let _ = cache.invalidate(nothing, HANG);
}
