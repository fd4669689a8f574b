//! A set of small numbers that answers "the first at or above n" in a few word operations.
//!
//! The allocator keeps in it the lengths of which there are free runs. A word of each level says which words
//! of the level below are not zero, so a look-up climbs at most as many levels as 64 divides the size: two
//! for 16 MiB blocks, three for the largest.

/// A set of numbers below a fixed bound, as a hierarchy of bitmaps. Does not allocate after `new`.
pub(super) struct BinMap {
    /// Level 0 has a bit per number; the last level is one word.
    levels: Vec<Vec<u64>>,
}

impl BinMap {
    /// An empty set of numbers below `bound`.
    pub(super) fn new(bound: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = bound.max(1);
        while words > 1 || levels.is_empty() {
            words = words.div_ceil(64);
            levels.push(vec![0; words]);
        }
        BinMap { levels }
    }

    /// Adds `number`.
    pub(super) fn insert(&mut self, number: usize) {
        let mut index = number;
        for level in &mut self.levels {
            let word = &mut level[index / 64];
            let was_empty = *word == 0;
            *word |= 1 << (index % 64);
            if !was_empty {
                return;
            }
            index /= 64;
        }
    }

    /// Removes `number`.
    pub(super) fn remove(&mut self, number: usize) {
        let mut index = number;
        for level in &mut self.levels {
            let word = &mut level[index / 64];
            *word &= !(1 << (index % 64));
            if *word != 0 {
                return;
            }
            index /= 64;
        }
    }

    /// Whether `number` is in the set.
    pub(super) fn contains(&self, number: usize) -> bool {
        self.levels[0].get(number / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    /// The smallest number in the set that is at least `number`.
    pub(super) fn first_from(&self, number: usize) -> Option<usize> {
        let mut index = number;
        for (depth, level) in self.levels.iter().enumerate() {
            let rest = level.get(index / 64)? & (u64::MAX << (index % 64));
            if rest != 0 {
                let found = index / 64 * 64 + rest.trailing_zeros() as usize;
                return Some(self.descend(depth, found, |word| word.trailing_zeros()));
            }
            // Nothing in this word: look for a later word that is not zero.
            index = index / 64 + 1;
        }
        None
    }

    /// The largest number in the set.
    pub(super) fn last(&self) -> Option<usize> {
        let top = self.levels.len() - 1;
        match self.levels[top][0] {
            0 => None,
            word => Some(self.descend(top, word.ilog2() as usize, |word| word.ilog2())),
        }
    }

    /// Follows bit `index` of level `depth` down to a number, choosing a bit of each word on the way.
    fn descend(&self, depth: usize, index: usize, choose: fn(u64) -> u32) -> usize {
        self.levels[..depth]
            .iter()
            .rev()
            .fold(index, |index, level| index * 64 + choose(level[index]) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn check(bound: usize, steps: &[(usize, bool)]) {
        let mut map = BinMap::new(bound);
        let mut model = BTreeSet::new();
        for &(number, insert) in steps {
            let number = number % bound;
            if insert {
                map.insert(number);
                model.insert(number);
            } else {
                map.remove(number);
                model.remove(&number);
            }
            assert_eq!(map.last(), model.last().copied());
            for from in [0, number, (number + 1).min(bound - 1), number / 2, bound - 1] {
                assert_eq!(map.first_from(from), model.range(from..).next().copied(), "from {from}");
                assert_eq!(map.contains(from), model.contains(&from));
            }
        }
    }

    proptest! {
        #[test]
        fn equals_an_ordered_set(
            bound in prop_oneof![1usize..70, 4000usize..4200, Just(262_145usize)],
            steps in prop::collection::vec((any::<usize>(), any::<bool>()), 1..200),
        ) {
            check(bound, &steps);
            // The same with numbers that meet often.
            let close: Vec<_> = steps.iter().map(|&(number, insert)| (number % 67, insert)).collect();
            check(bound, &close);
        }
    }

    #[test]
    fn asking_beyond_the_bound_finds_nothing() {
        let mut map = BinMap::new(65);
        map.insert(64);
        assert_eq!(map.first_from(64), Some(64));
        assert_eq!(map.first_from(65), None);
        assert_eq!(map.first_from(100_000), None);
        assert!(!map.contains(100_000));
    }
}
