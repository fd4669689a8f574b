//! S3-FIFO: a small queue for newcomers, a main queue for those that were used again.

use super::list::{Links, NOWHERE, Queue};
use super::{Policy, Slots};
use std::collections::{HashSet, VecDeque};

const SMALL: u8 = 0;
const MAIN: u8 = 1;

/// S3-FIFO (Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction", SOSP 2023),
/// weighted by size.
///
/// A newcomer enters `small`. When memory is needed and `small` holds more than its share (10 % of the
/// memory, as in the paper), its oldest slot goes: to `main` if it was hit more than once, else it is evicted
/// and its key's fingerprint kept as a ghost. Otherwise the oldest of `main` goes: back to the new end, with
/// its count lowered by one, if it was hit, else it is evicted. A newcomer whose ghost is still there enters
/// `main`.
///
/// Where this differs from the paper: a hit count is kept in the slot until the policy looks, so `main`'s
/// lowering by one needs a count of its own (`credit`); and a pinned slot is passed over, to the new end of
/// its queue.
///
/// Memory beside the links: one byte per slot, and up to `slots` ghosts of about 24 bytes.
#[derive(Debug)]
pub struct S3Fifo {
    links: Links,
    small: Queue,
    main: Queue,
    small_share_granules: u64,
    /// Hits that a slot of `main` has not used up.
    credit: Box<[u8]>,
    hashes: Box<[u64]>,
    ghosts: Ghosts,
}

/// `small`'s share of the memory, in percent.
const SMALL_PERCENT: u64 = 10;
/// Hits after which a newcomer moves to `main`: more than one, as in the paper.
const PROMOTE_HITS: u8 = 2;
/// Most hits that count.
const HITS_MAX: u8 = 3;

impl S3Fifo {
    /// A policy for up to `slots` slots over `capacity_granules` of memory.
    pub fn new(slots: u32, capacity_granules: u64) -> Self {
        Self {
            links: Links::new(slots),
            small: Queue::new(SMALL),
            main: Queue::new(MAIN),
            small_share_granules: capacity_granules * SMALL_PERCENT / 100,
            credit: vec![0; slots as usize].into(),
            hashes: vec![0; slots as usize].into(),
            ghosts: Ghosts::new(slots as usize),
        }
    }

    fn promote(&mut self, slot: u32) {
        let granules = self.small.remove(&mut self.links, slot);
        self.main.push(&mut self.links, slot, granules);
        self.credit[slot as usize] = 0;
    }

    /// Looks at each slot of `small` at most once, and at each of `main` once per hit it may have and once
    /// more, in the order that the shares call for, until one is evicted.
    fn walk(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let mut small_looks = self.small.len();
        let mut main_looks = self.main.len() * (usize::from(HITS_MAX) + 1);
        loop {
            let small_is_due = self.small.granules() > self.small_share_granules || main_looks == 0;
            let evicted = if small_is_due && small_looks > 0 {
                small_looks -= 1;
                let promoted = self.main.len();
                let evicted = self.step_small(slots);
                main_looks += self.main.len() - promoted;
                evicted
            } else if main_looks > 0 {
                main_looks -= 1;
                self.step_main(slots)
            } else {
                return None;
            };
            if evicted.is_some() {
                return evicted;
            }
        }
    }

    /// Looks at the oldest of `small` once. `Some(slot)` if it was evicted.
    fn step_small(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let slot = self.small.oldest()?;
        let hits = (self.credit[slot as usize] + slots.take_hits(slot)).min(HITS_MAX);
        if hits >= PROMOTE_HITS {
            self.promote(slot);
        } else if slots.try_evict(slot) {
            self.small.remove(&mut self.links, slot);
            self.ghosts.insert(self.hashes[slot as usize]);
            return Some(slot);
        } else {
            // Pinned: the hits seen so far still count when it is looked at again.
            self.credit[slot as usize] = hits;
            self.small.renew(&mut self.links, slot);
        }
        None
    }

    /// Looks at the oldest of `main` once. `Some(slot)` if it was evicted.
    fn step_main(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        let slot = self.main.oldest()?;
        let credit = (self.credit[slot as usize] + slots.take_hits(slot)).min(HITS_MAX);
        if credit == 0 && slots.try_evict(slot) {
            self.main.remove(&mut self.links, slot);
            return Some(slot);
        }
        self.credit[slot as usize] = credit.saturating_sub(1);
        self.main.renew(&mut self.links, slot);
        None
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    fn inserted(&mut self, slot: u32, granules: u32, key_hash: u64) {
        self.hashes[slot as usize] = key_hash;
        self.credit[slot as usize] = 0;
        let known = self.ghosts.remove(key_hash);
        let queue = if known { &mut self.main } else { &mut self.small };
        queue.push(&mut self.links, slot, granules);
    }

    fn removed(&mut self, slot: u32) {
        match self.links.queue_of(slot) {
            NOWHERE => {}
            SMALL => drop(self.small.remove(&mut self.links, slot)),
            _ => drop(self.main.remove(&mut self.links, slot)),
        }
    }

    fn evict(&mut self, slots: &mut dyn Slots) -> Option<u32> {
        // Nothing found, but newcomers moved to the far end of `main`: it is worth one more walk.
        let before = self.main.len();
        self.walk(slots).or_else(|| (self.main.len() > before).then(|| self.walk(slots)).flatten())
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn validate(&self) {
        self.small.validate(&self.links);
        self.main.validate(&self.links);
        self.ghosts.validate();
    }
}

/// The last keys evicted from `small`, by hash, oldest forgotten first.
#[derive(Debug)]
struct Ghosts {
    order: VecDeque<u64>,
    set: HashSet<u64>,
    most: usize,
}

impl Ghosts {
    fn new(most: usize) -> Self {
        Self { order: VecDeque::new(), set: HashSet::new(), most }
    }

    fn insert(&mut self, hash: u64) {
        if self.set.insert(hash) {
            self.order.push_back(hash);
        }
        // `order` still has those that were removed from the set; they fall out here in their turn.
        while self.order.len() > self.most {
            if let Some(oldest) = self.order.pop_front() {
                self.set.remove(&oldest);
            }
        }
    }

    fn remove(&mut self, hash: u64) -> bool {
        self.set.remove(&hash)
    }

    fn validate(&self) {
        assert!(self.order.len() <= self.most && self.set.len() <= self.order.len());
    }
}
