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
//! # Memory
//!
//! 12 bytes and one bit per granule (0.3 % of the arena), touched as far as runs begin and end, and 4 bytes
//! per granule of one block. All of it is allocated by [`ExtentAllocator::new`]; after that only an
//! [`ExtentList`] of more than three extents allocates.

use super::bins::BinMap;
use super::{Extent, ExtentList};

/// End of a list. No granule has this number.
const NONE: u32 = u32::MAX;

/// Deals out granules of `block_count` blocks. For one thread at a time; nothing blocks.
pub struct ExtentAllocator {
    granules_per_block: u32,
    total_granules: u32,
    free_granules: u32,
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
    /// An allocator over `block_count` blocks of `granules_per_block` granules each, all free.
    ///
    /// # Panics
    ///
    /// If either is 0 or there are more than `u32::MAX - 1` granules; [`Arena::map`](super::Arena::map)
    /// refuses such arenas.
    pub fn new(block_count: u32, granules_per_block: u32) -> Self {
        let total = u64::from(block_count) * u64::from(granules_per_block);
        assert!(
            total > 0 && total < u64::from(NONE),
            "{block_count} blocks of {granules_per_block} granules"
        );
        let granules = total as usize;
        let mut allocator = ExtentAllocator {
            granules_per_block,
            total_granules: total as u32,
            free_granules: total as u32,
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
            allocator.link(block * granules_per_block, granules_per_block);
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
    /// If an extent is empty, crosses a block's border, lies outside the arena, or holds a granule that is
    /// free already: each is a defect of the program that would let two values share memory.
    pub fn free(&mut self, extents: &[Extent]) {
        for &extent in extents {
            self.free_one(extent);
        }
    }

    /// Granules that are free.
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

    /// Granules in all.
    pub fn total_granules(&self) -> u32 {
        self.total_granules
    }

    /// Takes the front part of the free run of `length` granules that starts where `extent` does.
    fn take(&mut self, extent: Extent, length: u32) {
        self.unlink(extent.start, length);
        if length > extent.len {
            self.link(extent.end(), length - extent.len);
        }
        self.free_granules -= extent.len;
        self.mark(extent, true);
    }

    fn free_one(&mut self, extent: Extent) {
        let in_block = extent.start % self.granules_per_block;
        assert!(
            extent.start < self.total_granules
                && extent.len > 0
                && extent.len <= self.granules_per_block - in_block,
            "{extent:?} is no extent of an arena of {} granules in blocks of {}",
            self.total_granules,
            self.granules_per_block
        );
        self.mark(extent, false);
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

    /// The free runs in order of their addresses, out of the bitmap; checks the tags against it.
    fn validate_runs(&self) -> Vec<Extent> {
        let is_used = |granule: u32| self.used[granule as usize / 64] >> (granule % 64) & 1 == 1;
        let mut runs = Vec::new();
        let mut granule = 0;
        while granule < self.total_granules {
            if is_used(granule) {
                assert_eq!(self.tags[granule as usize], 0, "tag of granule {granule}, which is in use");
                granule += 1;
                continue;
            }
            let block_end = (granule / self.granules_per_block + 1) * self.granules_per_block;
            let end = (granule..block_end).find(|&granule| is_used(granule)).unwrap_or(block_end);
            let run = Extent { start: granule, len: end - granule };
            for inside in granule..end {
                let tag = if inside == granule || inside == end - 1 { run.len } else { 0 };
                assert_eq!(self.tags[inside as usize], tag, "tag of granule {inside} in {run:?}");
            }
            runs.push(run);
            granule = end;
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
