//! Second chance: close to least recently used.

use super::list::{Links, NOWHERE, Queue};
use super::{Policy, Slots};

/// CLOCK (Corbató 1968): slots stand in the order in which they came or were last found in use; one that was
/// hit since it was last looked at goes to the new end, the first that was not is evicted.
///
/// How close to LRU: a hit counts from the moment the hand passes, not from the hit itself, so two slots hit
/// since the last pass keep the order in which they stood. Recency is never inverted: the hand takes them
/// from the old end one by one and appends them in that order, and a slot that was not hit goes before all
/// that were. How often a slot was hit does not matter. Like LRU it is not scan-resistant: a scan as long as
/// the cache drives out what is not hit meanwhile.
///
/// An eviction looks at each slot at most twice. Memory: nothing beside the links.
#[derive(Debug)]
pub struct Clock {
    links: Links,
    queue: Queue,
}

impl Clock {
    /// A policy for up to `slots` slots.
    pub fn new(slots: u32) -> Self {
        Self { links: Links::new(slots), queue: Queue::new(0) }
    }
}

impl Policy for Clock {
    fn name(&self) -> &'static str {
        "lru"
    }

    fn inserted(&mut self, slot: u32, granules: u32, _key_hash: u64) {
        self.queue.push(&mut self.links, slot, granules);
    }

    fn removed(&mut self, slot: u32) {
        if self.links.queue_of(slot) != NOWHERE {
            self.queue.remove(&mut self.links, slot);
        }
    }

    fn evict(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let mut passed = false;
        for _ in 0..self.queue.len() {
            let slot = self.queue.oldest()?;
            let hit = slots.take_hits(slot) > 0;
            if !hit && slots.try_evict(slot) {
                self.queue.remove(&mut self.links, slot);
                return Some(slot);
            }
            passed |= hit;
            self.queue.renew(&mut self.links, slot);
        }
        // The hand came round: every slot was hit, and has lost its hits, or is pinned. Hits are not asked for
        // again: those that came in meanwhile would only make a busy cache seem a pinned one.
        if passed { self.queue.evict_oldest(&mut self.links, slots) } else { None }
    }

    fn len(&self) -> usize {
        self.queue.len()
    }

    fn granules(&self) -> u64 {
        self.queue.granules()
    }

    fn validate(&self) {
        self.queue.validate(&self.links);
        assert_eq!(self.links.queued(), self.len());
    }
}
