//! S3-FIFO: a small queue for newcomers, a main queue for those that were used again.

use super::ghosts::{Ghosts, fingerprint};
use super::list::{Links, NOWHERE, Queue};
use super::{HITS_MAX, Policy, Slots};

const SMALL: u8 = 0;
const MAIN: u8 = 1;

/// Shares and thresholds of [`S3Fifo`]. The default is the paper's but for the ghosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct S3FifoShape {
    /// Share of the resident granules, in percent, from which `small` gives the next victim. 0 to 100;
    /// default 10.
    pub small_percent: u8,
    /// Hits after which a newcomer moves to `main` when its turn comes. 1 to [`HITS_MAX`]; default 2.
    pub promote_hits: u8,
    /// Granules that the remembered keys' values had together, in percent of the capacity. Default 200. The
    /// paper remembers as much as `main` holds, about 90; on the KV-cache traces that `tests/ratios.rs` can
    /// replay, reuse comes later than that: of 16 pairs of trace and capacity 200 hits more in 13, by up to 8
    /// points, and less in 3, by less than half a point. On a Zipf stream, where popularity never changes,
    /// it costs about one point.
    pub ghost_percent: u32,
}

impl Default for S3FifoShape {
    fn default() -> Self {
        Self { small_percent: 10, promote_hits: 2, ghost_percent: 200 }
    }
}

/// S3-FIFO (Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023),
/// weighted by size.
///
/// A newcomer enters `small`. When memory is needed and `small` holds its share or more, its oldest slots
/// are looked at: one that was hit often enough moves to `main`, the first that was not is evicted, and its
/// key's fingerprint is kept as a ghost. Otherwise the oldest of `main` are looked at: one that was hit goes
/// back to the new end with its count lowered by one, the first that was not is evicted. A newcomer whose
/// ghost is still there enters `main`.
///
/// Where this differs from the paper:
///
/// * Sizes count. Queues' shares and the ghosts' bound are in granules; the ghosts are also at most as many
///   as there are slots.
/// * `small`'s share is that of what is resident, not of the capacity: if slots run out before memory does,
///   or fills in flight hold much of it, the share still means the same.
/// * A hit count is kept in the slot until the policy looks, so what `main`'s lowering by one leaves over is
///   kept here, as the slot's credit.
/// * A pinned slot is passed over, to the new end of its queue, and keeps what it was hit. If the queue that
///   is due gives nothing, the other is asked.
///
/// An eviction looks at each slot at most six times: once in `small`, [`HITS_MAX`] + 1 times in `main`, and
/// once more regardless of hits. Memory beside the links: 20 to 28 bytes per slot for fingerprints and
/// ghosts.
#[derive(Debug)]
pub struct S3Fifo {
    links: Links,
    small: Queue,
    main: Queue,
    shape: S3FifoShape,
    /// By slot.
    fingerprints: Box<[u32]>,
    ghosts: Ghosts,
}

impl S3Fifo {
    /// A policy for up to `slots` slots over `capacity_granules` of memory.
    ///
    /// # Panics
    ///
    /// If `shape` is not within the limits of its fields.
    pub fn new(slots: u32, capacity_granules: u64, shape: S3FifoShape) -> Self {
        assert!(shape.small_percent <= 100, "{shape:?}");
        assert!((1..=HITS_MAX).contains(&shape.promote_hits), "{shape:?}");
        Self {
            links: Links::new(slots),
            small: Queue::new(SMALL),
            main: Queue::new(MAIN),
            shape,
            fingerprints: vec![0; slots as usize].into(),
            ghosts: Ghosts::new(slots, ghost_granules(capacity_granules, shape)),
        }
    }

    fn small_is_due(&self) -> bool {
        // In 128 bits: 2^32 slots of 2^32 granules are 2^64.
        let share = u128::from(self.granules()) * u128::from(self.shape.small_percent);
        self.small.len() > 0 && u128::from(self.small.granules()) * 100 >= share
    }

    /// Looks at each slot of `small` at most once. Those that are still there when it finds nothing were
    /// pinned.
    fn sweep_small(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        for _ in 0..self.small.len() {
            let slot = self.small.oldest()?;
            let hits = self.hits(slot, slots);
            if hits >= self.shape.promote_hits {
                let granules = self.small.remove(&mut self.links, slot);
                self.main.push(&mut self.links, slot, granules);
            } else if slots.try_evict(slot) {
                let granules = self.small.remove(&mut self.links, slot);
                self.ghosts.insert(self.fingerprints[slot as usize], granules);
                return Some(slot);
            } else {
                self.links.set_credit(slot, hits);
                self.small.renew(&mut self.links, slot);
            }
        }
        None
    }

    /// Looks at each slot of `main` once per hit it may have and once more at most: unless hits come in
    /// meanwhile, one that is not pinned is found.
    fn sweep_main(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let mut pinned_in_a_row = 0;
        for _ in 0..self.main.len() * (usize::from(HITS_MAX) + 1) {
            let slot = self.main.oldest()?;
            let hits = self.hits(slot, slots);
            if hits == 0 && slots.try_evict(slot) {
                self.main.remove(&mut self.links, slot);
                return Some(slot);
            }
            pinned_in_a_row = if hits == 0 { pinned_in_a_row + 1 } else { 0 };
            self.links.set_credit(slot, hits.saturating_sub(1));
            self.main.renew(&mut self.links, slot);
            if pinned_in_a_row == self.main.len() {
                return None;
            }
        }
        None
    }

    /// Hits that a slot has to its credit, old and new.
    fn hits(&self, slot: u32, slots: &mut dyn Slots) -> u8 {
        self.links.credit(slot).saturating_add(slots.take_hits(slot)).min(HITS_MAX)
    }
}

fn ghost_granules(capacity_granules: u64, shape: S3FifoShape) -> u64 {
    let granules = u128::from(capacity_granules) * u128::from(shape.ghost_percent) / 100;
    u64::try_from(granules).unwrap_or(u64::MAX)
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn inserted(&mut self, slot: u32, granules: u32, key_hash: u64) {
        let fingerprint = fingerprint(key_hash);
        self.fingerprints[slot as usize] = fingerprint;
        let known = self.ghosts.take(fingerprint);
        let queue = if known { &mut self.main } else { &mut self.small };
        queue.push(&mut self.links, slot, granules);
    }

    fn removed(&mut self, slot: u32) {
        let queue = match self.links.queue_of(slot) {
            NOWHERE => return,
            SMALL => &mut self.small,
            _ => &mut self.main,
        };
        queue.remove(&mut self.links, slot);
    }

    fn evict(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let victim = if self.small_is_due() {
            self.sweep_small(slots).or_else(|| self.sweep_main(slots))
        } else {
            self.sweep_main(slots).or_else(|| self.sweep_small(slots))
        };
        // What is left in `small` was pinned. In `main` there may be newcomers that moved after it was swept,
        // or slots hit faster than the sweep counted down: a busy cache is not a pinned one.
        victim.or_else(|| self.main.evict_oldest(&mut self.links, slots))
    }

    /// `small`'s share is of what is resident and follows by itself; what the ghosts stand for follows here.
    fn resized(&mut self, capacity_granules: u64) {
        self.ghosts.set_budget(ghost_granules(capacity_granules, self.shape));
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn granules(&self) -> u64 {
        self.small.granules() + self.main.granules()
    }

    fn validate(&self) {
        self.small.validate(&self.links);
        self.main.validate(&self.links);
        assert_eq!(self.links.queued(), self.len());
        self.ghosts.validate();
    }
}
