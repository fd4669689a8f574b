//! Second chance: close to least recently used.

use super::list::{Links, NOWHERE, Queue};
use super::{Policy, Slots};

/// CLOCK (Corbató 1968): slots stand in the order in which they came or were last found in use; one that was
/// hit since it was last looked at goes to the new end, the first that was not is evicted.
///
/// How close to LRU: a hit counts from the moment the hand passes, not from the hit itself, so two slots hit
/// since the last pass keep the order in which they stood. Recency is never inverted: the hand takes them
/// from the old end one by one and appends them in that order.
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
        // The first round clears the counters, the second finds every slot unused that nobody hits meanwhile.
        for _ in 0..2 * self.queue.len() {
            let slot = self.queue.oldest()?;
            if slots.take_hits(slot) == 0 && slots.try_evict(slot) {
                self.queue.remove(&mut self.links, slot);
                return Some(slot);
            }
            self.queue.renew(&mut self.links, slot);
        }
        None
    }

    fn len(&self) -> usize {
        self.queue.len()
    }

    fn validate(&self) {
        self.queue.validate(&self.links);
    }
}
