//! The free slots: any of them, or a particular one, in constant time.

/// A set of slot numbers. Memory: eight bytes per slot of the table.
pub(super) struct FreeSlots {
    /// The free slots in no order.
    slots: Vec<u32>,
    /// Where each free slot stands in `slots`; [`NOWHERE`] for the others.
    places: Box<[u32]>,
}

/// No place in `slots`: a table has fewer slots than this.
const NOWHERE: u32 = u32::MAX;

impl FreeSlots {
    /// Slots `0..count`, all free.
    pub(super) fn all(count: u32) -> Self {
        Self { slots: (0..count).collect(), places: (0..count).collect() }
    }

    /// Number of free slots.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Takes `wanted` if it is free, else any.
    pub(super) fn take(&mut self, wanted: u32) -> Option<u32> {
        let last = *self.slots.last()?;
        let place = match self.places[wanted as usize] {
            NOWHERE => self.slots.len() - 1,
            place => place as usize,
        };
        let taken = self.slots.swap_remove(place);
        // The last one moved to where the taken one stood; they may be the same, hence the order.
        self.places[last as usize] = place as u32;
        self.places[taken as usize] = NOWHERE;
        Some(taken)
    }

    /// Puts back a slot that was taken.
    pub(super) fn put_back(&mut self, slot: u32) {
        debug_assert_eq!(self.places[slot as usize], NOWHERE, "slot {slot} is free already");
        self.places[slot as usize] = self.slots.len() as u32;
        self.slots.push(slot);
    }

    /// The free slots, in no order; for tests.
    #[cfg(any(test, loom))]
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        for (place, &slot) in self.slots.iter().enumerate() {
            assert_eq!(self.places[slot as usize] as usize, place, "slot {slot} does not know its place");
        }
        self.slots.iter().copied()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn gives_the_wanted_slot_or_any_free_one(operations in proptest::collection::vec((any::<bool>(), 0u32..9), 0..200)) {
            let mut free = FreeSlots::all(9);
            let mut model: BTreeSet<u32> = (0..9).collect();
            for (take, slot) in operations {
                if take {
                    let taken = free.take(slot);
                    prop_assert_eq!(taken.is_none(), model.is_empty());
                    if let Some(taken) = taken {
                        prop_assert!(taken == slot || !model.contains(&slot));
                        prop_assert!(model.remove(&taken));
                    }
                } else if model.insert(slot) {
                    free.put_back(slot);
                }
                prop_assert_eq!(free.len(), model.len());
                prop_assert_eq!(free.iter().collect::<BTreeSet<_>>(), model.clone());
            }
        }
    }
}
