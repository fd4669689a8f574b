//! Best fit over the granules of an arena: which runs are free, and which of them to give.
//!
//! Pure arithmetic: it never sees an address, a key or another thread. One shard owns it.
//!
//! # How it works
//!
//! A free run is maximal and lies inside one block. Its length stands at its first and at its last granule
//! (boundary tags), so a freed extent finds both neighbours without a search. Runs of the same length form a
//! doubly linked list through their first granules; a bitmap says which lengths exist. Allocation takes the
//! shortest run that is long enough; if none is, it takes the longest and goes on with the rest, which
//! needs as few extents as there can be. Every step is O(1) in the arena's size, apart from the bitmap of
//! granules in use, which is flipped 64 granules at a time and catches what is freed twice.
//!
//! # Blocks that come and go
//!
//! Blocks are numbered once and for all; how many there are at a time changes (`blocks.rs`). A retiring block
//! takes no part in allocation: its free runs are in no list and have no tags. What is in use in it is freed
//! as ever, and with the last granule the block is retired.
//!
//! # Memory
//!
//! 12 bytes and one bit per granule (0.3 % of the arena), touched as far as runs begin and end, and 4 bytes
//! per granule of one block, 8 per block. All of it is allocated by [`ExtentAllocator::new`]; after that only
//! an [`ExtentList`] of more than three extents allocates.

#[path = "allocator_blocks.rs"]
mod blocks;

pub use blocks::BlockState;

use super::bins::BinMap;
use super::{Extent, ExtentList};
use blocks::BlockUse;

/// End of a list. No granule has this number.
const NONE: u32 = u32::MAX;

/// Deals out granules of blocks. For one thread at a time; nothing blocks.
pub struct ExtentAllocator {
    granules_per_block: u32,
    /// By number, as many as there can be.
    blocks: Box<[BlockUse]>,
    /// Number of blocks in each state but absent.
    present: u32,
    retiring: u32,
    /// Blocks that were retired and not yet taken away.
    retired: Vec<u32>,
    /// Granules that can be allocated: those of retiring blocks cannot.
    free_granules: u32,
    /// Granules in use, in present and in retiring blocks.
    used_granules: u32,
    fragments: usize,
    /// Length of the free run at its first and last granule, 0 at every other granule.
    tags: Vec<u32>,
    /// At the first granule of a free run: the next run of the same length. Elsewhere meaningless.
    next: Vec<u32>,
    /// At the first granule of a free run: the run before it in the list. Elsewhere meaningless.
    previous: Vec<u32>,
    /// First run of each length; the index is the length.
    heads: Vec<u32>,
    /// Lengths of which there is a free run.
    lengths: BinMap,
    /// A bit per granule in use.
    used: Vec<u64>,
}

impl ExtentAllocator {
    /// An allocator over `block_count` blocks of `granules_per_block` granules each, all free, for good.
    ///
    /// # Panics
    ///
    /// If either is 0 or there are more than `u32::MAX - 1` granules; [`Arena::map`](super::Arena::map)
    /// refuses such arenas.
    pub fn new(block_count: u32, granules_per_block: u32) -> Self {
        Self::with_room(block_count, block_count, granules_per_block)
    }

    /// An allocator over the first `block_count` of at most `block_count_max` blocks; the others are absent.
    ///
    /// # Panics
    ///
    /// As [`ExtentAllocator::new`], and if `block_count` is more than `block_count_max`.
    pub fn with_room(block_count: u32, block_count_max: u32, granules_per_block: u32) -> Self {
        let most = u64::from(block_count_max) * u64::from(granules_per_block);
        assert!(
            block_count > 0 && block_count <= block_count_max && most > 0 && most < u64::from(NONE),
            "{block_count} of {block_count_max} blocks of {granules_per_block} granules"
        );
        let granules = most as usize;
        let mut allocator = ExtentAllocator {
            granules_per_block,
            blocks: vec![BlockUse::ABSENT; block_count_max as usize].into(),
            present: 0,
            retiring: 0,
            // Full size: taking a block out never allocates.
            retired: Vec::with_capacity(block_count_max as usize),
            free_granules: 0,
            used_granules: 0,
            fragments: 0,
            // Zeroed vectors cost no memory until they are written.
            tags: vec![0; granules],
            next: vec![0; granules],
            previous: vec![0; granules],
            heads: vec![NONE; granules_per_block as usize + 1],
            lengths: BinMap::new(granules_per_block as usize + 1),
            used: vec![0; granules.div_ceil(64)],
        };
        // Backwards, so that the lowest block is taken first.
        for block in (0..block_count).rev() {
            allocator.add(block);
        }
        allocator
    }

    /// Takes `granules` granules: the best fitting run, or as few runs as there can be. `None`, with nothing
    /// taken, if fewer are free. An empty list for 0.
    pub fn allocate(&mut self, granules: u32) -> Option<ExtentList> {
        if granules > self.free_granules {
            return None;
        }
        let mut extents = ExtentList::new();
        let mut rest = granules;
        while rest > 0 {
            // Something is free as long as something is missing, so one of the two finds a run.
            let length = self.lengths.first_from(rest as usize).or_else(|| self.lengths.last())? as u32;
            let extent = Extent { start: self.heads[length as usize], len: length.min(rest) };
            self.take(extent, length);
            rest -= extent.len;
            extents.push(extent);
        }
        Some(extents)
    }

    /// Gives back extents, whole or in parts, and joins them with free neighbours in the same block.
    ///
    /// # Panics
    ///
    /// If an extent is empty, crosses a block's border, lies outside the blocks there are, or holds a granule
    /// that is free already: each is a defect of the program that would let two values share memory.
    pub fn free(&mut self, extents: &[Extent]) {
        for &extent in extents {
            self.free_one(extent);
        }
    }

    /// Granules that are free and can be allocated.
    pub fn free_granules(&self) -> u32 {
        self.free_granules
    }

    /// Length of the longest free run in granules; what fits into it gets one extent.
    pub fn largest_free(&self) -> u32 {
        self.lengths.last().unwrap_or(0) as u32
    }

    /// Number of free runs.
    pub fn fragments(&self) -> usize {
        self.fragments
    }

    /// Granules in use, those in retiring blocks included.
    pub fn used_granules(&self) -> u32 {
        self.used_granules
    }

    /// Granules of all present blocks: the most that can be in use when no block is retiring.
    pub fn total_granules(&self) -> u32 {
        self.present * self.granules_per_block
    }

    /// Takes the front part of the free run of `length` granules that starts where `extent` does.
    fn take(&mut self, extent: Extent, length: u32) {
        self.unlink(extent.start, length);
        if length > extent.len {
            self.link(extent.end(), length - extent.len);
        }
        self.free_granules -= extent.len;
        self.used_granules += extent.len;
        self.blocks[self.block_of(extent)].used += extent.len;
        self.mark(extent, true);
    }

    fn free_one(&mut self, extent: Extent) {
        let in_block = extent.start % self.granules_per_block;
        let block = self.block_of(extent);
        let state = self.blocks.get(block).map_or(BlockState::Absent, |block| block.state);
        assert!(
            matches!(state, BlockState::Present | BlockState::Retiring)
                && extent.len > 0
                && extent.len <= self.granules_per_block - in_block,
            "{extent:?} is no extent of an arena of {} blocks of {} granules (block {block} is {state:?})",
            self.blocks.len(),
            self.granules_per_block
        );
        self.mark(extent, false);
        self.used_granules -= extent.len;
        self.blocks[block].used -= extent.len;
        if state == BlockState::Retiring {
            if self.blocks[block].used == 0 {
                self.retired_now(block as u32);
            }
            return;
        }
        self.free_granules += extent.len;

        let (mut start, mut len) = (extent.start, extent.len);
        if in_block > 0 {
            let before = self.tags[start as usize - 1];
            if before > 0 {
                self.unlink(start - before, before);
                start -= before;
                len += before;
            }
        }
        if !extent.end().is_multiple_of(self.granules_per_block) {
            let after = self.tags[extent.end() as usize];
            if after > 0 {
                self.unlink(extent.end(), after);
                len += after;
            }
        }
        self.link(start, len);
    }

    /// Makes `len` granules from `start` a free run: tags it and puts it in front of its list.
    fn link(&mut self, start: u32, len: u32) {
        self.tags[start as usize] = len;
        self.tags[(start + len - 1) as usize] = len;
        let head = self.heads[len as usize];
        self.next[start as usize] = head;
        self.previous[start as usize] = NONE;
        match head {
            NONE => self.lengths.insert(len as usize),
            head => self.previous[head as usize] = start,
        }
        self.heads[len as usize] = start;
        self.fragments += 1;
    }

    /// Makes a free run none: takes its tags away and takes it out of its list.
    fn unlink(&mut self, start: u32, len: u32) {
        self.tags[start as usize] = 0;
        self.tags[(start + len - 1) as usize] = 0;
        let (previous, next) = (self.previous[start as usize], self.next[start as usize]);
        if next != NONE {
            self.previous[next as usize] = previous;
        }
        match previous {
            NONE => {
                self.heads[len as usize] = next;
                if next == NONE {
                    self.lengths.remove(len as usize);
                }
            }
            previous => self.next[previous as usize] = next,
        }
        self.fragments -= 1;
    }

    /// Granules per block.
    pub fn granules_per_block(&self) -> u32 {
        self.granules_per_block
    }

    /// Number of the block an extent lies in.
    pub fn block_of(&self, extent: Extent) -> usize {
        (extent.start / self.granules_per_block) as usize
    }

    fn is_used(&self, granule: u32) -> bool {
        self.used[granule as usize / 64] >> (granule % 64) & 1 == 1
    }

    /// Turns the bits of an extent's granules over, and insists that all of them were the other way.
    fn mark(&mut self, extent: Extent, used: bool) {
        let (mut granule, end) = (extent.start, extent.end());
        while granule < end {
            let offset = granule % 64;
            let count = (64 - offset).min(end - granule);
            let mask = (u64::MAX >> (64 - count)) << offset;
            let word = &mut self.used[granule as usize / 64];
            let expected = if used { 0 } else { mask };
            assert!(
                *word & mask == expected,
                "{extent:?} is {} already",
                if used { "in use" } else { "free (wholly or in part)" }
            );
            *word ^= mask;
            granule += count;
        }
    }

    /// Checks every invariant; for tests and fuzzing, in O(granules).
    ///
    /// # Panics
    ///
    /// If one does not hold.
    pub fn validate(&self) {
        let runs = self.validate_runs();
        assert_eq!(runs.len(), self.fragments, "number of free runs");
        let free: u64 = runs.iter().map(|run| u64::from(run.len)).sum();
        assert_eq!(free, u64::from(self.free_granules), "free granules");
        self.validate_blocks();

        let mut listed = Vec::with_capacity(runs.len());
        for length in 0..self.heads.len() {
            let mut previous = NONE;
            let mut start = self.heads[length];
            assert_eq!(start != NONE, self.lengths.contains(length), "bit of length {length}");
            while start != NONE {
                assert_eq!(self.previous[start as usize], previous, "link back from the run at {start}");
                listed.push(Extent { start, len: length as u32 });
                assert!(listed.len() <= runs.len(), "a list has a circle or a run that is not free");
                previous = start;
                start = self.next[start as usize];
            }
        }
        listed.sort_unstable_by_key(|run| run.start);
        assert_eq!(listed, runs, "the lists hold exactly the free runs");
        assert_eq!(self.lengths.first_from(0), runs.iter().map(|run| run.len as usize).min(), "shortest run");
        assert_eq!(self.lengths.last(), runs.iter().map(|run| run.len as usize).max(), "longest run");
    }

    /// The free runs of present blocks in order of their addresses, out of the bitmap; checks the tags against
    /// it.
    fn validate_runs(&self) -> Vec<Extent> {
        let mut runs = Vec::new();
        for block in 0..self.blocks.len() as u32 {
            let (start, end) = (block * self.granules_per_block, (block + 1) * self.granules_per_block);
            if self.blocks[block as usize].state != BlockState::Present {
                assert!(
                    (start..end).all(|granule| self.tags[granule as usize] == 0),
                    "tags in block {block}"
                );
                continue;
            }
            for run in self.free_runs(block) {
                for inside in run.start..run.end() {
                    let tag = if inside == run.start || inside == run.end() - 1 { run.len } else { 0 };
                    assert_eq!(self.tags[inside as usize], tag, "tag of granule {inside} in {run:?}");
                }
                runs.push(run);
            }
            for granule in (start..end).filter(|&granule| self.is_used(granule)) {
                assert_eq!(self.tags[granule as usize], 0, "tag of granule {granule}, which is in use");
            }
        }
        runs
    }
}

#[cfg(test)]
#[path = "allocator_tests.rs"]
mod tests;

impl std::fmt::Debug for ExtentAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExtentAllocator")
            .field("free_granules", &self.free_granules())
            .field("total_granules", &self.total_granules())
            .finish_non_exhaustive()
    }
}
