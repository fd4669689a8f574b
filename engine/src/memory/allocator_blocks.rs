//! Blocks of the allocator that are added and taken out while it works.
//!
//! ```text
//!  Absent ──add──► Present ──retire──► Retiring ──last granule freed──► Retired ──take_retired──► Absent
//!                     ▲────────────────── keep ────┴──────────────────────┘
//! ```
//!
//! Counts and numbers only, as the allocator itself: who maps and unmaps what is behind a block is told by
//! these states when it may.

use super::{Extent, ExtentAllocator};

/// What a block is to the allocator.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum BlockState {
    /// There is no memory behind it.
    Absent,
    /// Its granules are allocated and freed.
    Present,
    /// Nothing new is allocated from it; something in it is still in use.
    Retiring,
    /// Nothing of it is in use, and nothing will be until it is added again, or kept after all.
    Retired,
}

/// State and granules in use of one block.
#[derive(Copy, Clone, Debug)]
pub(super) struct BlockUse {
    pub(super) state: BlockState,
    pub(super) used: u32,
}

impl BlockUse {
    pub(super) const ABSENT: BlockUse = BlockUse { state: BlockState::Absent, used: 0 };
}

impl ExtentAllocator {
    /// Number of blocks there can be.
    pub fn block_count_max(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that allocations are made from.
    pub fn present_blocks(&self) -> u32 {
        self.present
    }

    /// Blocks on their way out that are in use somewhere.
    pub fn retiring_blocks(&self) -> u32 {
        self.retiring
    }

    /// Blocks that wait to be taken away ([`ExtentAllocator::take_retired`]).
    pub fn retired_blocks(&self) -> u32 {
        self.retired.len() as u32
    }

    /// State of a block.
    ///
    /// # Panics
    ///
    /// If there can be no such block; so do all that take a block's number.
    pub fn block_state(&self, block: u32) -> BlockState {
        self.blocks[block as usize].state
    }

    /// Granules of a block that are in use.
    pub fn used_in_block(&self, block: u32) -> u32 {
        self.blocks[block as usize].used
    }

    /// The lowest block that is absent: the one to add next.
    pub fn first_absent(&self) -> Option<u32> {
        let absent = self.blocks.iter().position(|block| block.state == BlockState::Absent);
        absent.map(|block| block as u32)
    }

    /// Takes in a block that is absent, all of it free.
    pub fn add(&mut self, block: u32) {
        assert_eq!(self.block_state(block), BlockState::Absent, "block {block}");
        self.make_present(block);
    }

    /// Allocates nothing more from a present block. It is retired when the last granule in use is freed, or at
    /// once if none is.
    pub fn retire(&mut self, block: u32) {
        assert_eq!(self.block_state(block), BlockState::Present, "block {block}");
        for run in self.free_runs(block) {
            self.unlink(run.start, run.len);
            self.free_granules -= run.len;
        }
        self.present -= 1;
        self.retiring += 1;
        self.blocks[block as usize].state = BlockState::Retiring;
        if self.used_in_block(block) == 0 {
            self.retired_now(block);
        }
    }

    /// Allocates again from a block that was on its way out. False if there is none.
    pub fn keep_one(&mut self) -> bool {
        // What is retired is wholly free, which is worth more.
        let retired = self.retired.pop();
        let retiring = || self.blocks.iter().position(|block| block.state == BlockState::Retiring);
        let Some(block) = retired.or_else(|| retiring().map(|block| block as u32)) else { return false };
        if self.block_state(block) == BlockState::Retiring {
            self.retiring -= 1;
        }
        self.make_present(block);
        true
    }

    /// A block that was retired, and is absent from now on.
    pub fn take_retired(&mut self) -> Option<u32> {
        let block = self.retired.pop()?;
        self.blocks[block as usize].state = BlockState::Absent;
        Some(block)
    }

    fn make_present(&mut self, block: u32) {
        self.blocks[block as usize].state = BlockState::Present;
        self.present += 1;
        for run in self.free_runs(block) {
            self.link(run.start, run.len);
            self.free_granules += run.len;
        }
    }

    pub(super) fn retired_now(&mut self, block: u32) {
        self.blocks[block as usize].state = BlockState::Retired;
        self.retiring -= 1;
        self.retired.push(block);
    }

    /// The runs of a block that are not in use, out of the bitmap: O(granules of a block).
    pub(super) fn free_runs(&self, block: u32) -> Vec<Extent> {
        let mut granule = block * self.granules_per_block;
        let end = granule + self.granules_per_block;
        if self.blocks[block as usize].used == 0 {
            return vec![Extent { start: granule, len: self.granules_per_block }];
        }
        let mut runs = Vec::new();
        while granule < end {
            if self.is_used(granule) {
                granule += 1;
                continue;
            }
            let run_end = (granule..end).find(|&granule| self.is_used(granule)).unwrap_or(end);
            runs.push(Extent { start: granule, len: run_end - granule });
            granule = run_end;
        }
        runs
    }

    /// Checks the counts of blocks and of granules in them.
    pub(super) fn validate_blocks(&self) {
        let mut used = 0;
        for (number, block) in self.blocks.iter().enumerate() {
            let start = number as u32 * self.granules_per_block;
            let granules = start..start + self.granules_per_block;
            let counted = granules.filter(|&granule| self.is_used(granule)).count() as u32;
            assert_eq!(block.used, counted, "granules in use in block {number}");
            match block.state {
                BlockState::Absent | BlockState::Retired => assert_eq!(counted, 0, "block {number}"),
                BlockState::Retiring => assert!(counted > 0, "block {number} is retired"),
                BlockState::Present => {}
            }
            used += counted;
        }
        assert_eq!(used, self.used_granules, "granules in use");
        let count = |state| self.blocks.iter().filter(|block| block.state == state).count();
        assert_eq!(count(BlockState::Present), self.present as usize, "present blocks");
        assert_eq!(count(BlockState::Retiring), self.retiring as usize, "retiring blocks");
        assert_eq!(count(BlockState::Retired), self.retired.len(), "retired blocks");
        for &block in &self.retired {
            assert_eq!(self.block_state(block), BlockState::Retired, "block {block}");
        }
    }
}
