//! The policies once more, as naively as they can be written: plain vectors, oldest first, everything
//! searched for. Where the real ones go round in a queue, these work out what comes of it.

use super::{HITS_MAX, Policy, S3FifoShape, Slots};

#[derive(Clone, Debug)]
struct Entry {
    slot: u32,
    granules: u32,
    key: u64,
    credit: u8,
}

fn granules_of(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| u64::from(entry.granules)).sum()
}

/// The first that is not pinned goes; those before it go to the new end.
fn evict_oldest(entries: &mut Vec<Entry>, slots: &mut dyn Slots) -> Option<Entry> {
    let at = entries.iter().position(|entry| slots.try_evict(entry.slot))?;
    entries.rotate_left(at);
    Some(entries.remove(0))
}

#[derive(Default)]
pub(super) struct ReferenceClock {
    entries: Vec<Entry>,
}

impl Policy for ReferenceClock {
    fn name(&self) -> &'static str {
        "reference clock"
    }

    fn inserted(&mut self, slot: u32, granules: u32, key: u64) {
        self.entries.push(Entry { slot, granules, key, credit: 0 });
    }

    fn removed(&mut self, slot: u32) {
        self.entries.retain(|entry| entry.slot != slot);
    }

    fn evict(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let unused = self.entries.iter().position(|e| slots.take_hits(e.slot) == 0 && slots.try_evict(e.slot));
        match unused {
            Some(at) => {
                self.entries.rotate_left(at);
                Some(self.entries.remove(0).slot)
            }
            // All hits are cleared by now.
            None => evict_oldest(&mut self.entries, slots).map(|entry| entry.slot),
        }
    }

    fn len(&self) -> usize {
        self.entries.len()
    }

    fn granules(&self) -> u64 {
        granules_of(&self.entries)
    }

    fn validate(&self) {}
}

pub(super) struct ReferenceS3Fifo {
    small: Vec<Entry>,
    main: Vec<Entry>,
    /// Keys and granules, oldest first; of a key that came back only the place is left.
    ghosts: Vec<(Option<u64>, u64)>,
    places: usize,
    ghost_granules: u64,
    shape: S3FifoShape,
}

impl ReferenceS3Fifo {
    pub(super) fn new(slots: u32, capacity_granules: u64, shape: S3FifoShape) -> Self {
        let ghost_granules = capacity_granules * u64::from(shape.ghost_percent) / 100;
        let (small, main, ghosts, places) = (Vec::new(), Vec::new(), Vec::new(), slots as usize);
        Self { small, main, ghosts, places, ghost_granules, shape }
    }

    fn sweep_small(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let mut pinned = Vec::new();
        let mut victim = None;
        while victim.is_none() && !self.small.is_empty() {
            let mut entry = self.small.remove(0);
            let hits = (entry.credit + slots.take_hits(entry.slot)).min(HITS_MAX);
            if hits >= self.shape.promote_hits {
                self.main.push(Entry { credit: 0, ..entry });
            } else if slots.try_evict(entry.slot) {
                victim = Some(entry);
            } else {
                entry.credit = hits;
                pinned.push(entry);
            }
        }
        self.small.append(&mut pinned);
        let victim = victim?;
        self.remember(victim.key, victim.granules.into());
        Some(victim.slot)
    }

    fn remember(&mut self, key: u64, granules: u64) {
        self.forget(key);
        if self.ghosts.len() == self.places {
            self.ghosts.remove(0);
        }
        self.ghosts.push((Some(key), granules));
        while self.ghosts.len() > 1 && self.ghosts.iter().map(|g| g.1).sum::<u64>() > self.ghost_granules {
            self.ghosts.remove(0);
        }
    }

    fn forget(&mut self, key: u64) -> bool {
        let at = self.ghosts.iter().position(|ghost| ghost.0 == Some(key));
        at.map(|at| self.ghosts[at] = (None, 0)).is_some()
    }

    /// The victim is the first of those with the least credit that are not pinned; it is found in the round
    /// with the number of its credit, and every other has lost one for each time it was passed before.
    fn sweep_main(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let mut seen: Vec<u8> = Vec::new();
        for entry in &self.main {
            seen.push((entry.credit + slots.take_hits(entry.slot)).min(HITS_MAX));
        }
        let free: Vec<bool> = self.main.iter().map(|entry| slots.try_evict(entry.slot)).collect();
        let victim = (0..seen.len()).filter(|&at| free[at]).min_by_key(|&at| seen[at]);
        let (round, last) = match victim {
            Some(at) => (seen[at], at),
            // All pinned: it ends a whole round after the last one that had credit left was passed.
            None => {
                let most = *seen.iter().max()?;
                let last = seen.iter().rposition(|&credit| credit == most)?;
                (most, if most == 0 { seen.len() - 1 } else { last })
            }
        };
        for (at, entry) in self.main.iter_mut().enumerate() {
            // Looked at once more than the rounds' number if it stands before the end, hits included, but not
            // if the end came before it was reached at all: then its hits are still the table's.
            let looks = round + u8::from(at < last || (at == last && victim.is_none()));
            entry.credit = if looks > 0 { seen[at].saturating_sub(looks) } else { seen[at] };
        }
        match victim {
            Some(at) => {
                self.main.rotate_left(at);
                Some(self.main.remove(0).slot)
            }
            None => {
                let len = self.main.len();
                self.main.rotate_left((last + 1) % len);
                None
            }
        }
    }
}

impl Policy for ReferenceS3Fifo {
    fn name(&self) -> &'static str {
        "reference s3fifo"
    }

    fn inserted(&mut self, slot: u32, granules: u32, key: u64) {
        let known = self.forget(key);
        let queue = if known { &mut self.main } else { &mut self.small };
        queue.push(Entry { slot, granules, key, credit: 0 });
    }

    fn removed(&mut self, slot: u32) {
        self.small.retain(|entry| entry.slot != slot);
        self.main.retain(|entry| entry.slot != slot);
    }

    fn evict(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let share = self.granules() * u64::from(self.shape.small_percent);
        let small_first = !self.small.is_empty() && granules_of(&self.small) * 100 >= share;
        let victim = match small_first {
            true => self.sweep_small(slots).or_else(|| self.sweep_main(slots)),
            false => self.sweep_main(slots).or_else(|| self.sweep_small(slots)),
        };
        // Newcomers may have moved to `main` after it was asked.
        victim.or_else(|| evict_oldest(&mut self.main, slots).map(|entry| entry.slot))
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn granules(&self) -> u64 {
        granules_of(&self.small) + granules_of(&self.main)
    }

    fn validate(&self) {}
}
