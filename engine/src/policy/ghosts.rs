//! Keys that were evicted not long ago, by fingerprint.
//!
//! It knows nothing of slots. A fingerprint has 32 bits: of a million ghosts, one in four thousand newcomers
//! is mistaken for one of them, and then merely enters another queue.
//!
//! A ring of ghosts in the order of their eviction, and a hash index over it (open addressing, linear
//! probing, at most half full, deletion by shifting back). All memory is taken at start: 16 to 24 bytes per
//! ghost.

/// No ghost at this place of the index.
const EMPTY: u32 = u32::MAX;

/// The last keys evicted, oldest forgotten first.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// Places from `oldest` on hold a ghost or what is left of one that was taken.
    ring: Box<[Ghost]>,
    oldest: usize,
    places_used: usize,
    /// Places in the ring, by fingerprint. A ghost is alive if the index leads to it.
    index: Box<[u32]>,
    /// Sum over those alive.
    granules: u64,
    budget_granules: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Ghost {
    fingerprint: u32,
    granules: u32,
}

/// The part of a key's hash that is remembered.
pub(super) fn fingerprint(key_hash: u64) -> u32 {
    (key_hash ^ (key_hash >> 32)) as u32
}

impl Ghosts {
    /// Remembers the last `places` keys at most, and of these the newest whose values come to at most
    /// `budget_granules` together, but the very newest in any case.
    pub(super) fn new(places: u32, budget_granules: u64) -> Self {
        let places = places.max(1) as usize;
        Self {
            ring: vec![Ghost::default(); places].into(),
            oldest: 0,
            places_used: 0,
            index: vec![EMPTY; (2 * places).next_power_of_two()].into(),
            granules: 0,
            budget_granules,
        }
    }

    /// Changes the budget; the oldest that no longer fit are forgotten.
    pub(super) fn set_budget(&mut self, budget_granules: u64) {
        self.budget_granules = budget_granules;
        while self.granules > self.budget_granules && self.places_used > 1 {
            self.forget_oldest();
        }
    }

    /// Remembers a key. One that is remembered already becomes the newest.
    pub(super) fn insert(&mut self, fingerprint: u32, granules: u32) {
        self.take(fingerprint);
        if self.places_used == self.ring.len() {
            self.forget_oldest();
        }
        let place = (self.oldest + self.places_used) % self.ring.len();
        self.ring[place] = Ghost { fingerprint, granules };
        self.places_used += 1;
        self.granules += u64::from(granules);
        let mut at = self.home(fingerprint);
        while self.index[at] != EMPTY {
            at = self.next(at);
        }
        // Fits: there are at most as many places as `u32` slots.
        self.index[at] = place as u32;
        while self.granules > self.budget_granules && self.places_used > 1 {
            self.forget_oldest();
        }
    }

    /// Forgets a key; true if it was remembered.
    pub(super) fn take(&mut self, fingerprint: u32) -> bool {
        let Some(at) = self.find(fingerprint) else { return false };
        self.granules -= u64::from(self.ring[self.index[at] as usize].granules);
        self.unlink(at);
        true
    }

    fn forget_oldest(&mut self) {
        let ghost = self.ring[self.oldest];
        // Its place may be left over: then the key is not remembered, or at a newer place.
        if let Some(at) = self.find(ghost.fingerprint)
            && self.index[at] as usize == self.oldest
        {
            self.granules -= u64::from(ghost.granules);
            self.unlink(at);
        }
        self.oldest = (self.oldest + 1) % self.ring.len();
        self.places_used -= 1;
    }

    /// Where the index leads to this fingerprint.
    fn find(&self, fingerprint: u32) -> Option<usize> {
        let mut at = self.home(fingerprint);
        // Ends: the index is at most half full.
        while self.index[at] != EMPTY {
            if self.ring[self.index[at] as usize].fingerprint == fingerprint {
                return Some(at);
            }
            at = self.next(at);
        }
        None
    }

    /// Empties a place of the index and closes the gap, so that every other ghost is still reached from its
    /// home without meeting an empty place.
    fn unlink(&mut self, at: usize) {
        let mask = self.index.len() - 1;
        let (mut gap, mut at) = (at, self.next(at));
        while self.index[at] != EMPTY {
            let home = self.home(self.ring[self.index[at] as usize].fingerprint);
            // It may move back to the gap unless its home lies behind the gap.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.index[gap] = self.index[at];
                gap = at;
            }
            at = self.next(at);
        }
        self.index[gap] = EMPTY;
    }

    /// The place of the index where the search for a fingerprint begins: the upper bits of a product with
    /// 2^64 / φ, which scatters also hashes that are poor in their lower bits.
    fn home(&self, fingerprint: u32) -> usize {
        let product = u64::from(fingerprint).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (product >> (64 - self.index.len().trailing_zeros())) as usize
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.index.len() - 1)
    }

    pub(super) fn validate(&self) {
        assert!(self.places_used <= self.ring.len());
        let (mut alive, mut granules) = (0, 0);
        for offset in 0..self.places_used {
            let place = (self.oldest + offset) % self.ring.len();
            let ghost = self.ring[place];
            if self.find(ghost.fingerprint).is_some_and(|at| self.index[at] as usize == place) {
                alive += 1;
                granules += u64::from(ghost.granules);
            }
        }
        assert_eq!(granules, self.granules);
        assert_eq!(self.index.iter().filter(|&&place| place != EMPTY).count(), alive, "a ghost is unreachable");
        assert!(granules <= self.budget_granules || self.places_used <= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a list: few places, so that the ring wraps, and few fingerprints, so that they collide in
        /// the index and come again.
        #[test]
        fn remembers_what_a_list_remembers(
            places in 1u32..9,
            budget in 0u64..40,
            steps in proptest::collection::vec((any::<bool>(), 0u32..14, 0u32..12), 0..300),
        ) {
            let mut ghosts = Ghosts::new(places, budget);
            // What was taken leaves its place behind, with no key.
            let mut list: Vec<(Option<u32>, u32)> = Vec::new();
            for (insert, fingerprint, granules) in steps {
                let at = list.iter().position(|ghost| ghost.0 == Some(fingerprint));
                if let Some(at) = at {
                    list[at] = (None, 0);
                }
                if insert {
                    ghosts.insert(fingerprint, granules);
                    if list.len() == places as usize {
                        list.remove(0);
                    }
                    list.push((Some(fingerprint), granules));
                    while list.len() > 1 && list.iter().map(|ghost| u64::from(ghost.1)).sum::<u64>() > budget {
                        list.remove(0);
                    }
                } else {
                    prop_assert_eq!(ghosts.take(fingerprint), at.is_some());
                }
                ghosts.validate();
            }
            for fingerprint in 0..14 {
                let remembered = list.iter().any(|ghost| ghost.0 == Some(fingerprint));
                prop_assert_eq!(ghosts.take(fingerprint), remembered);
            }
            prop_assert_eq!(ghosts.granules, 0);
        }
    }

    #[test]
    fn a_smaller_budget_forgets_the_oldest() {
        let mut ghosts = Ghosts::new(8, 100);
        (0..5).for_each(|fingerprint| ghosts.insert(fingerprint, 20));
        ghosts.set_budget(45);
        ghosts.validate();
        assert_eq!([2, 3, 4].map(|fingerprint| ghosts.take(fingerprint)), [false, true, true]);
        ghosts.set_budget(100);
        (0..5).for_each(|fingerprint| ghosts.insert(fingerprint, 20));
        assert!(ghosts.take(0), "a larger one remembers more again");
    }

    #[test]
    fn a_key_evicted_again_is_remembered_anew() {
        let mut ghosts = Ghosts::new(4, u64::MAX);
        ghosts.insert(7, 1);
        assert!(ghosts.take(7));
        ghosts.insert(7, 1);
        for other in 0..3 {
            ghosts.insert(other, 1);
        }
        // The place that its first eviction left behind has been used again by now.
        assert!(ghosts.take(7));
    }

    #[test]
    fn a_fingerprint_has_bits_of_both_halves() {
        assert_ne!(fingerprint(1), fingerprint(2));
        assert_ne!(fingerprint(1 << 40), fingerprint(2 << 40));
    }
}
