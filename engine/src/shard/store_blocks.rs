//! Blocks added to the store and taken out of it, with the values in them. No I/O: nothing is mapped here.

use super::Store;
use crate::memory::{BlockState, Extent, GRANULE_BYTES};
use crate::stats::ShardCounters;
use std::cmp::Reverse;

impl Store {
    /// Blocks that values can be placed in.
    pub(crate) fn blocks(&self) -> u32 {
        self.extents.present_blocks()
    }

    /// Most blocks there can be.
    pub(crate) fn blocks_max(&self) -> u32 {
        self.extents.block_count_max()
    }

    /// Blocks on their way out that are in use somewhere.
    pub(crate) fn retiring_blocks(&self) -> u32 {
        self.extents.retiring_blocks()
    }

    /// Number of the block to map next, if there can be one more.
    pub(crate) fn block_to_add(&self) -> Option<u32> {
        self.extents.first_absent()
    }

    /// Takes in a block that was mapped.
    pub(crate) fn add_block(&mut self, block: u32, counters: &ShardCounters) {
        self.extents.add(block);
        self.capacity_changed(counters);
    }

    /// Keeps a block that was on its way out. False if there is none.
    pub(crate) fn keep_block(&mut self, counters: &ShardCounters) -> bool {
        let kept = self.extents.keep_one();
        if kept {
            self.capacity_changed(counters);
        }
        kept
    }

    /// A block that nothing uses any more, to be unmapped. Its number may be added again.
    pub(crate) fn take_retired(&mut self, counters: &ShardCounters) -> Option<u32> {
        let block = self.extents.take_retired()?;
        self.capacity_changed(counters);
        Some(block)
    }

    /// Takes blocks out until no more than `blocks` are left: first those in which the least is pinned, of
    /// these those in which the least is in use. Their values are evicted; what is pinned is condemned, so that
    /// nobody can pin it anew, and its block follows when the last pin goes. In linear time.
    pub(crate) fn shrink_to(&mut self, blocks: u32, counters: &ShardCounters) {
        let evictable = self.evictable_granules();
        let mut present: Vec<u32> = (0..self.extents.block_count_max())
            .filter(|&block| self.extents.block_state(block) == BlockState::Present)
            .collect();
        present.sort_by_key(|&block| {
            let used = self.extents.used_in_block(block);
            (used - evictable[block as usize].min(used), used, Reverse(block))
        });
        let excess = present.len().saturating_sub(blocks as usize);
        for &block in &present[..excess] {
            self.extents.retire(block);
        }
        let doomed: Vec<u32> = (0..self.slots())
            .filter(|&slot| self.writer.is_ready(slot))
            .filter(|&slot| self.writer.peek(slot).is_some_and(|value| self.is_retiring(&value.extents)))
            .collect();
        for slot in doomed {
            counters.evictions.add(1);
            counters.evicted_bytes.add(self.writer.peek(slot).map_or(0, |value| value.len));
            self.condemn(slot, true, counters);
        }
        self.capacity_changed(counters);
        // As after every call for wakes: what was released before it is seen here.
        self.reclaim(counters);
    }

    /// By block, granules of values that nobody pins at this moment.
    fn evictable_granules(&self) -> Vec<u32> {
        let mut granules = vec![0; self.extents.block_count_max() as usize];
        for slot in
            (0..self.slots()).filter(|&slot| self.writer.is_ready(slot) && self.writer.pins(slot) == 0)
        {
            for extent in self.writer.peek(slot).iter().flat_map(|value| value.extents.iter()) {
                granules[self.extents.block_of(*extent)] += extent.len;
            }
        }
        granules
    }

    /// True if some of it lies in a block that is on its way out.
    pub(super) fn is_retiring(&self, extents: &[Extent]) -> bool {
        let retiring = |extent: &Extent| {
            self.extents.block_state(self.extents.block_of(*extent) as u32) == BlockState::Retiring
        };
        self.extents.retiring_blocks() > 0 && extents.iter().any(retiring)
    }

    /// Granules that can be had without evicting; for tests.
    #[cfg(test)]
    pub(crate) fn free_granules(&self) -> u32 {
        self.extents.free_granules()
    }

    /// True if a block waits to be unmapped; for tests.
    #[cfg(test)]
    pub(crate) fn has_retired(&self) -> bool {
        self.extents.retired_blocks() > 0
    }

    fn capacity_changed(&mut self, counters: &ShardCounters) {
        self.policy.resized(u64::from(self.extents.total_granules()));
        self.ask_to_be_woken();
        self.gauge(counters);
    }

    pub(super) fn gauge_blocks(&self, counters: &ShardCounters) {
        let blocks_bytes = |blocks: u32| {
            u64::from(blocks) * u64::from(self.extents.granules_per_block()) * GRANULE_BYTES as u64
        };
        let out = self.extents.retiring_blocks() + self.extents.retired_blocks();
        counters.arena_bytes.set(blocks_bytes(self.extents.present_blocks() + out));
        counters.retiring_bytes.set(blocks_bytes(out));
    }
}
