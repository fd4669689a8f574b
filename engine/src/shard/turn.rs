//! The order in which the shards of one batch take what it must hold: one after the other.
//!
//! A batch of leases holds memory on several shards at once. If two of them took what they need in different orders, each
//! could end up holding what the other waits for. So a batch takes from its shards in the order of their numbers: the
//! group of one shard waits, holding nothing, until those of all shards before it have what they need (or have ended).

use super::shared::Shared;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

struct Order {
    /// The shards of the batch, in the order of their numbers.
    shards: Vec<Arc<Shared>>,
    /// Which of them are through.
    through: Vec<AtomicBool>,
}

/// One shard's place in the order. Dropped, it is through.
pub(crate) struct Turn {
    order: Arc<Order>,
    place: usize,
}

impl Turn {
    /// One for each of these shards, which are in the order of their numbers.
    pub(crate) fn each(shards: Vec<Arc<Shared>>) -> Vec<Turn> {
        let through = shards.iter().map(|_| AtomicBool::new(false)).collect();
        let order = Arc::new(Order { shards, through });
        (0..order.shards.len()).map(|place| Turn { order: order.clone(), place }).collect()
    }

    /// True if all before it are through.
    pub(crate) fn has_come(&self) -> bool {
        // Acquire: what the shards before took is taken.
        self.order.through[..self.place].iter().all(|through| through.load(Ordering::Acquire))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.order.through[self.place].store(true, Ordering::Release);
        if let Some(next) = self.order.shards.get(self.place + 1) {
            // The next shard looks whenever it is nudged. If it is not its turn yet, the one that makes it so nudges.
            for shared in std::iter::once(next).chain(&self.order.shards[self.place + 2..]) {
                shared.bell.nudge();
            }
        }
    }
}
