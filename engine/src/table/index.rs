//! The hash index: from a key's hash to candidate slots, read without locks, written by the shard alone.
//!
//! A bucket is one cache line: seven entries and a count of the keys that passed it by. An entry is one
//! word, `tag << 32 | slot + 1`; zero is empty. A key lives in the first bucket from its home on that
//! had room, and never moves; a reader goes on to the next bucket only while the count says that some
//! key went further. So a reader cannot miss a key that stays in the table: no rehash, no tombstones.
//!
//! The buckets are sized for a load of at most 4/7, where chains are one bucket long for all but a few
//! per thousand keys.

use super::lines::Lines;
use crate::sync::{AtomicU64, Ordering, prefetch_line};

const ENTRIES_PER_BUCKET: usize = 7;

#[repr(align(64))]
struct Bucket {
    entries: [AtomicU64; ENTRIES_PER_BUCKET],
    /// Keys whose home is this bucket or one before it and that stand in a bucket after it.
    passed: AtomicU64,
}

impl Bucket {
    fn new() -> Self {
        Self { entries: std::array::from_fn(|_| AtomicU64::new(0)), passed: AtomicU64::new(0) }
    }
}

pub(crate) struct Index {
    buckets: Lines<Bucket>,
    mask: usize,
}

const fn word(hash: u64, slot: u32) -> u64 {
    // Slots are numbered below u32::MAX (see `Table::new`), so `slot + 1` neither overflows nor is 0.
    (hash & 0xffff_ffff_0000_0000) | (slot as u64 + 1)
}

impl Index {
    /// An index for up to `slots` keys. Memory: 64 bytes per bucket, at least one bucket per 4 slots.
    pub(crate) fn new(slots: u32) -> Self {
        let buckets = Self::buckets_for(slots);
        Self { buckets: Lines::new(buckets, Bucket::new), mask: buckets - 1 }
    }

    /// Bytes that an index for `slots` keys takes.
    pub(crate) fn bytes_for(slots: u32) -> usize {
        Lines::<Bucket>::bytes_for(Self::buckets_for(slots))
    }

    fn buckets_for(slots: u32) -> usize {
        (slots as usize).div_ceil(4).next_power_of_two()
    }

    fn home(&self, hash: u64) -> usize {
        // The low half chooses the bucket, the high half is the tag.
        hash as u32 as usize & self.mask
    }

    /// Asks for the line in which a lookup of this hash begins.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch_line(&raw const self.buckets[self.home(hash)]);
    }

    /// Calls `visit` with every slot that may hold a key of this hash until it returns `Some`.
    ///
    /// Readers: any thread. A candidate may be stale by the time it is looked at, so `visit` must pin it
    /// and compare the whole key.
    #[inline]
    pub(crate) fn find<R>(&self, hash: u64, mut visit: impl FnMut(u32) -> Option<R>) -> Option<R> {
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            for entry in &bucket.entries {
                // Relaxed is enough: the entry only names a slot; what the slot holds is published by the
                // slot's own state word, which the visitor acquires.
                let found = entry.load(Ordering::Relaxed);
                if found & 0xffff_ffff_0000_0000 == hash & 0xffff_ffff_0000_0000
                    && found as u32 != 0
                    && let Some(result) = visit(found as u32 - 1)
                {
                    return Some(result);
                }
            }
            // Relaxed: a reader that misses a concurrent insertion is ordered before it. An insertion
            // that happened before this call is visible through whatever ordered the two.
            if bucket.passed.load(Ordering::Relaxed) == 0 {
                return None;
            }
            at = (at + 1) & self.mask;
        }
        None
    }

    /// Writer only: links `slot` under `hash`.
    pub(crate) fn insert(&self, hash: u64, slot: u32) {
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            for entry in &bucket.entries {
                if entry.load(Ordering::Relaxed) == 0 {
                    // Relaxed like the reader's load: the slot's state word publishes what the slot holds.
                    entry.store(word(hash, slot), Ordering::Relaxed);
                    return;
                }
            }
            bucket.passed.store(bucket.passed.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            at = (at + 1) & self.mask;
        }
        unreachable!("the index has 7 entries for every 4 slots");
    }

    /// Writer only: makes the entry of `old` name `new`, so that readers see one or the other.
    pub(crate) fn replace(&self, hash: u64, old: u32, new: u32) {
        let (bucket, entry) = self.position(hash, old);
        self.buckets[bucket].entries[entry].store(word(hash, new), Ordering::Relaxed);
    }

    /// Writer only: unlinks `slot`.
    pub(crate) fn remove(&self, hash: u64, slot: u32) {
        let (bucket, entry) = self.position(hash, slot);
        self.buckets[bucket].entries[entry].store(0, Ordering::Relaxed);
        let mut at = self.home(hash);
        while at != bucket {
            let passed = &self.buckets[at].passed;
            passed.store(passed.load(Ordering::Relaxed) - 1, Ordering::Relaxed);
            at = (at + 1) & self.mask;
        }
    }

    fn position(&self, hash: u64, slot: u32) -> (usize, usize) {
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            for (i, entry) in self.buckets[at].entries.iter().enumerate() {
                if entry.load(Ordering::Relaxed) == word(hash, slot) {
                    return (at, i);
                }
            }
            at = (at + 1) & self.mask;
        }
        unreachable!("slot {slot} is linked under this hash");
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn slots_of(index: &Index, hash: u64) -> Vec<u32> {
        let mut found = Vec::new();
        index.find(hash, |slot| -> Option<()> {
            found.push(slot);
            None
        });
        found.sort_unstable();
        found
    }

    proptest! {
        /// Few distinct hashes on a small index: chains, wrap-around and shared tags all happen.
        #[test]
        fn finds_exactly_what_is_linked(operations in proptest::collection::vec((0u64..6, 0u32..28, any::<bool>()), 0..200)) {
            let index = Index::new(28);
            let mut model: HashMap<u32, u64> = HashMap::new();
            for (kind, slot, insert) in operations {
                let hash = [0, 1, 7, 7 | 1 << 40, 3 | 9 << 50, u64::MAX][kind as usize];
                if insert {
                    model.entry(slot).or_insert_with(|| { index.insert(hash, slot); hash });
                } else if let Some(hash) = model.remove(&slot) {
                    index.remove(hash, slot);
                }
                for (&slot, &hash) in &model {
                    prop_assert!(slots_of(&index, hash).contains(&slot));
                }
            }
            let left: Vec<_> = model.drain().collect();
            for (slot, hash) in left {
                index.remove(hash, slot);
            }
            for bucket in &*index.buckets {
                prop_assert_eq!(bucket.passed.load(Ordering::Relaxed), 0);
            }
        }
    }

    #[test]
    fn replace_keeps_the_place() {
        let index = Index::new(8);
        index.insert(5, 1);
        index.replace(5, 1, 2);
        assert_eq!(slots_of(&index, 5), [2]);
        index.remove(5, 2);
        assert!(slots_of(&index, 5).is_empty());
    }
}
