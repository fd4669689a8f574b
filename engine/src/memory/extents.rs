//! The extent allocator: exact best fit over 4 KiB granules, coalescing, without allocating.
//!
//! Free runs are kept in one doubly linked list per length (1 to a block's granules), so the best fit is
//! the first list at or above the wanted length that is not empty; a bitmap with a summary finds it by a
//! few word operations. The neighbours of a freed run are found by boundary tags (Knuth, TAOCP 1, 2.5):
//! the first and last granule of a free run hold its length. Runs never cross the border of a block.
//!
//! Memory: 12 bytes per granule (0.3 % of what is managed) and 4 bytes per possible run length, taken by
//! [`ExtentAllocator::new`] and never again.

use super::{Extent, ExtentList};

const NONE: u32 = u32::MAX;

/// Allocates extents of an arena. Single-threaded; knows numbers of granules and no addresses.
#[derive(Debug)]
pub struct ExtentAllocator {
    granules_per_block: u32,
    total: u32,
    free: u32,
    /// Length of a free run at its first and at its last granule; 0 at every other granule and in use.
    tags: Box<[u32]>,
    /// Neighbours of a free run in the list of its length, at its first granule.
    links: Box<[Link]>,
    /// First run of each length.
    heads: Box<[u32]>,
    /// Which lists are not empty.
    lengths: BitSet,
    fragments: usize,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

impl ExtentAllocator {
    /// An allocator with all granules free.
    ///
    /// # Panics
    ///
    /// If there are no blocks or no granules in one, or 2^32 - 1 granules or more.
    pub fn new(block_count: u32, granules_per_block: u32) -> Self {
        assert!(block_count > 0 && granules_per_block > 0, "an arena has at least one granule");
        let total = block_count.checked_mul(granules_per_block).filter(|&total| total < NONE);
        let Some(total) = total else { panic!("an arena has fewer than 2^32 - 1 granules") };
        let mut this = Self {
            granules_per_block,
            total,
            free: 0,
            tags: vec![0; total as usize].into(),
            links: vec![Link { before: NONE, after: NONE }; total as usize].into(),
            heads: vec![NONE; granules_per_block as usize + 1].into(),
            lengths: BitSet::new(granules_per_block as usize + 1),
            fragments: 0,
        };
        for block in (0..block_count).rev() {
            this.link(Extent { start: block * granules_per_block, len: granules_per_block });
        }
        this
    }

    /// Granules managed.
    pub fn total_granules(&self) -> u32 {
        self.total
    }

    /// Granules free.
    pub fn free_granules(&self) -> u32 {
        self.free
    }

    /// Length of the longest free run in granules.
    pub fn largest_free(&self) -> u32 {
        self.lengths.last().unwrap_or(0) as u32
    }

    /// Number of free runs.
    pub fn fragments(&self) -> usize {
        self.fragments
    }

    /// Takes `granules` granules in as few extents as there can be: the shortest run that holds what is left
    /// to place, or else the longest run there is, and again. All or nothing: `None`, and nothing taken, if
    /// fewer are free.
    pub fn allocate(&mut self, granules: u32) -> Option<ExtentList> {
        if granules > self.free {
            return None;
        }
        let mut list = ExtentList::default();
        let mut left = granules;
        while left > 0 {
            let fit = self.lengths.first_from(left as usize).or_else(|| self.lengths.last());
            // Enough granules are free, so some run is.
            let Some(len) = fit else { unreachable!("{left} granules are free in no run") };
            let run = Extent { start: self.heads[len], len: len as u32 };
            self.unlink(run);
            let taken = Extent { start: run.start, len: run.len.min(left) };
            if taken.len < run.len {
                self.link(Extent { start: run.start + taken.len, len: run.len - taken.len });
            }
            left -= taken.len;
            list.push(taken);
        }
        Some(list)
    }

    /// Gives extents back.
    ///
    /// # Panics
    ///
    /// If an extent does not lie in one block, or its first or last granule or a free neighbour shows that it
    /// is free already: then somebody freed twice, and going on would hand memory to two owners.
    pub fn free(&mut self, extents: &[Extent]) {
        for &extent in extents {
            self.free_one(extent);
        }
    }

    fn free_one(&mut self, extent: Extent) {
        let Extent { start, len } = extent;
        let end = start.checked_add(len).filter(|&end| end <= self.total);
        let Some(end) = end.filter(|_| len > 0) else { panic!("{extent:?} is outside the arena") };
        let block = start / self.granules_per_block;
        assert_eq!(block, (end - 1) / self.granules_per_block, "{extent:?} crosses a block's border");
        let tagged = |at: u32| self.tags[at as usize] != 0;
        assert!(!tagged(start) && !tagged(end - 1), "{extent:?} is freed twice");
        let mut run = extent;
        if start > block * self.granules_per_block && tagged(start - 1) {
            let before = self.tags[start as usize - 1];
            run = Extent { start: start - before, len: len + before };
        }
        if end < (block + 1) * self.granules_per_block && tagged(end) {
            run.len += self.tags[end as usize];
        }
        if run.start < start {
            self.unlink(Extent { start: run.start, len: start - run.start });
        }
        if run.start + run.len > end {
            self.unlink(Extent { start: end, len: run.start + run.len - end });
        }
        self.link(run);
    }

    fn link(&mut self, run: Extent) {
        let len = run.len as usize;
        let first = self.heads[len];
        self.links[run.start as usize] = Link { before: NONE, after: first };
        if first != NONE {
            self.links[first as usize].before = run.start;
        }
        self.heads[len] = run.start;
        self.lengths.insert(len);
        self.tags[run.start as usize] = run.len;
        self.tags[(run.start + run.len - 1) as usize] = run.len;
        self.free += run.len;
        self.fragments += 1;
    }

    fn unlink(&mut self, run: Extent) {
        let len = run.len as usize;
        let Link { before, after } = self.links[run.start as usize];
        match before {
            NONE => self.heads[len] = after,
            before => self.links[before as usize].after = after,
        }
        if after != NONE {
            self.links[after as usize].before = before;
        }
        if self.heads[len] == NONE {
            self.lengths.remove(len);
        }
        self.tags[run.start as usize] = 0;
        self.tags[(run.start + run.len - 1) as usize] = 0;
        self.free -= run.len;
        self.fragments -= 1;
    }

    /// Checks every invariant; for tests and fuzzing. Looks at every granule.
    ///
    /// # Panics
    ///
    /// If one does not hold.
    pub fn validate(&self) {
        let (mut free, mut runs) = (0, 0);
        for (len, &head) in self.heads.iter().enumerate() {
            assert_eq!(self.lengths.contains(len), head != NONE, "bitmap of length {len}");
            let (mut before, mut at) = (NONE, head);
            while at != NONE {
                let run = Extent { start: at, len: len as u32 };
                assert_eq!(self.links[at as usize].before, before, "list of length {len}");
                assert_eq!(self.tags[at as usize], run.len, "first tag of {run:?}");
                assert_eq!(self.tags[(at + run.len - 1) as usize], run.len, "last tag of {run:?}");
                let block = at / self.granules_per_block;
                assert_eq!(block, (at + run.len - 1) / self.granules_per_block, "{run:?} crosses a border");
                let end = at + run.len;
                if !end.is_multiple_of(self.granules_per_block) {
                    assert_eq!(self.tags[end as usize], 0, "{run:?} has a free neighbour");
                }
                for inner in at + 1..end.saturating_sub(1) {
                    assert_eq!(self.tags[inner as usize], 0, "a tag inside {run:?}");
                }
                free += run.len;
                runs += 1;
                (before, at) = (at, self.links[at as usize].after);
            }
        }
        assert_eq!((free, runs), (self.free, self.fragments));
    }
}

/// A set of small numbers with a summary: bit `i` of the summary says whether word `i` has a bit.
#[derive(Debug)]
struct BitSet {
    words: Box<[u64]>,
    summary: Box<[u64]>,
}

impl BitSet {
    fn new(len: usize) -> Self {
        let words = len.div_ceil(64);
        Self { words: vec![0; words].into(), summary: vec![0; words.div_ceil(64)].into() }
    }

    fn contains(&self, bit: usize) -> bool {
        self.words[bit / 64] & (1 << (bit % 64)) != 0
    }

    fn insert(&mut self, bit: usize) {
        self.words[bit / 64] |= 1 << (bit % 64);
        self.summary[bit / 4096] |= 1 << (bit / 64 % 64);
    }

    fn remove(&mut self, bit: usize) {
        self.words[bit / 64] &= !(1 << (bit % 64));
        if self.words[bit / 64] == 0 {
            self.summary[bit / 4096] &= !(1 << (bit / 64 % 64));
        }
    }

    /// The smallest member that is at least `bit`.
    fn first_from(&self, bit: usize) -> Option<usize> {
        let word = bit / 64;
        let here = self.words.get(word)? & (!0 << (bit % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let next = word + 1;
        let mut at = next / 64;
        let mut bits = self.summary.get(at)? & (!0 << (next % 64));
        while bits == 0 {
            at += 1;
            bits = *self.summary.get(at)?;
        }
        let word = at * 64 + bits.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }

    /// The largest member.
    fn last(&self) -> Option<usize> {
        let at = self.summary.iter().rposition(|&bits| bits != 0)?;
        let word = at * 64 + 63 - self.summary[at].leading_zeros() as usize;
        Some(word * 64 + 63 - self.words[word].leading_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// A map of granules, and what best fit means on it.
    struct Model {
        used: Vec<bool>,
        per_block: usize,
    }

    impl Model {
        fn runs(&self) -> Vec<(usize, usize)> {
            let mut runs = Vec::new();
            for block in 0..self.used.len() / self.per_block {
                let mut at = block * self.per_block;
                let end = at + self.per_block;
                while at < end {
                    let len = self.used[at..end].iter().take_while(|&&used| !used).count();
                    if len > 0 {
                        runs.push((at, len));
                    }
                    at += len.max(1);
                }
            }
            runs
        }

        fn allocate(&mut self, granules: u32, got: &[Extent]) {
            let mut left = granules as usize;
            for extent in got {
                let runs = self.runs();
                let fit = runs.iter().map(|r| r.1).filter(|&len| len >= left).min();
                let want = fit.or_else(|| runs.iter().map(|r| r.1).max()).unwrap();
                let start = extent.start as usize;
                assert!(runs.contains(&(start, want)), "{extent:?} is not at the start of a run of {want}");
                assert_eq!(extent.len as usize, want.min(left));
                for granule in start..start + extent.len as usize {
                    assert!(!std::mem::replace(&mut self.used[granule], true));
                }
                left -= extent.len as usize;
            }
            assert_eq!(left, 0);
        }
    }

    proptest! {
        #[test]
        fn agrees_with_a_map_of_granules(
            blocks in 1u32..5,
            per_block in 1u32..130,
            steps in proptest::collection::vec((any::<bool>(), 1u32..200, any::<usize>()), 0..120),
        ) {
            let mut allocator = ExtentAllocator::new(blocks, per_block);
            let mut model = Model { used: vec![false; (blocks * per_block) as usize], per_block: per_block as usize };
            let mut held: Vec<ExtentList> = Vec::new();
            for (take, granules, which) in steps {
                if take {
                    let free = model.used.iter().filter(|used| !**used).count() as u32;
                    match allocator.allocate(granules) {
                        None => prop_assert!(granules > free),
                        Some(list) => { model.allocate(granules, &list); held.push(list); }
                    }
                } else if !held.is_empty() {
                    let list = held.swap_remove(which % held.len());
                    for extent in list.iter() {
                        model.used[extent.start as usize..(extent.start + extent.len) as usize].fill(false);
                    }
                    allocator.free(&list);
                }
                allocator.validate();
                prop_assert_eq!(allocator.fragments(), model.runs().len());
                let longest = model.runs().iter().map(|run| run.1).max().unwrap_or(0);
                prop_assert_eq!(allocator.largest_free() as usize, longest);
            }
            for list in held {
                allocator.free(&list);
            }
            prop_assert_eq!(allocator.free_granules(), blocks * per_block);
            prop_assert_eq!(allocator.fragments(), blocks as usize);
        }

        #[test]
        fn bit_set_agrees_with_a_tree(members in proptest::collection::btree_set(0usize..300_000, 0..60), from in 0usize..300_001) {
            let mut set = BitSet::new(300_001);
            for &member in &members {
                set.insert(member);
            }
            prop_assert_eq!(set.first_from(from), members.range(from..).next().copied());
            prop_assert_eq!(set.last(), members.last().copied());
            let mut left: BTreeSet<usize> = members.clone();
            for &member in &members {
                set.remove(member);
                left.remove(&member);
                prop_assert_eq!(set.last(), left.last().copied());
            }
        }
    }

    #[test]
    fn a_million_operations_leave_no_trace() {
        let mut allocator = ExtentAllocator::new(24, 4096);
        let mut held: Vec<ExtentList> = Vec::new();
        let mut random = 1u64;
        for _ in 0..1_000_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (size, which) = ((random >> 33) as u32 % 6000 + 1, (random >> 17) as usize);
            match allocator.allocate(size) {
                Some(list) => held.push(list),
                None => allocator.free(&held.swap_remove(which % held.len())),
            }
        }
        allocator.validate();
        for list in held {
            allocator.free(&list);
        }
        assert_eq!((allocator.free_granules(), allocator.fragments()), (24 * 4096, 24));
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_twice_is_noticed() {
        let mut allocator = ExtentAllocator::new(1, 16);
        let list = allocator.allocate(4).unwrap();
        allocator.free(&list);
        let _ = allocator.allocate(1);
        allocator.free(&list[..]);
        allocator.free(&list[..]);
    }

    #[test]
    #[should_panic(expected = "crosses a block's border")]
    fn foreign_extents_are_refused() {
        ExtentAllocator::new(2, 16).free(&[Extent { start: 15, len: 2 }]);
    }
}
