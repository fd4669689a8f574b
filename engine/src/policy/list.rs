//! Doubly linked queues of slots over arrays: no allocation after start, every change in constant time.
//!
//! It knows nothing of what the order means; a policy gives the queues their names and the credit its use.

use super::Slots;

const NONE: u32 = u32::MAX;
/// The queue of a slot that is in none.
pub(super) const NOWHERE: u8 = u8::MAX;

/// Links of all slots; each slot is in at most one queue.
#[derive(Debug)]
pub(super) struct Links {
    nodes: Box<[Node]>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    older: u32,
    newer: u32,
    granules: u32,
    queue: u8,
    credit: u8,
}

// The module's documentation promises it.
const _: () = assert!(size_of::<Node>() == 16);

/// A queue: slots enter at the new end and are looked at from the old end.
#[derive(Debug)]
pub(super) struct Queue {
    name: u8,
    oldest: u32,
    newest: u32,
    len: usize,
    granules: u64,
}

impl Links {
    pub(super) fn new(slots: u32) -> Self {
        let free = Node { older: NONE, newer: NONE, granules: 0, queue: NOWHERE, credit: 0 };
        Self { nodes: vec![free; slots as usize].into() }
    }

    /// The queue that a slot is in.
    pub(super) fn queue_of(&self, slot: u32) -> u8 {
        self.nodes[slot as usize].queue
    }

    /// Hits that a slot has been seen with and has not used up.
    pub(super) fn credit(&self, slot: u32) -> u8 {
        self.nodes[slot as usize].credit
    }

    pub(super) fn set_credit(&mut self, slot: u32, credit: u8) {
        self.nodes[slot as usize].credit = credit;
    }

    /// Slots that are in a queue, counted; for `validate`.
    pub(super) fn queued(&self) -> usize {
        self.nodes.iter().filter(|node| node.queue != NOWHERE).count()
    }
}

impl Queue {
    pub(super) fn new(name: u8) -> Self {
        assert_ne!(name, NOWHERE);
        Self { name, oldest: NONE, newest: NONE, len: 0, granules: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn granules(&self) -> u64 {
        self.granules
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Appends a slot that is in no queue, with no credit.
    pub(super) fn push(&mut self, links: &mut Links, slot: u32, granules: u32) {
        let node = &mut links.nodes[slot as usize];
        assert_eq!(node.queue, NOWHERE, "slot {slot} is in a queue already");
        *node = Node { older: self.newest, newer: NONE, granules, queue: self.name, credit: 0 };
        match self.newest {
            NONE => self.oldest = slot,
            newest => links.nodes[newest as usize].newer = slot,
        }
        self.newest = slot;
        self.len += 1;
        self.granules += u64::from(granules);
    }

    /// Takes a slot out and returns its granules.
    pub(super) fn remove(&mut self, links: &mut Links, slot: u32) -> u32 {
        let node = links.nodes[slot as usize];
        assert_eq!(node.queue, self.name, "slot {slot} is not in this queue");
        match node.older {
            NONE => self.oldest = node.newer,
            older => links.nodes[older as usize].newer = node.newer,
        }
        match node.newer {
            NONE => self.newest = node.older,
            newer => links.nodes[newer as usize].older = node.older,
        }
        links.nodes[slot as usize].queue = NOWHERE;
        self.len -= 1;
        self.granules -= u64::from(node.granules);
        node.granules
    }

    /// Moves a slot to the new end. It keeps its credit.
    pub(super) fn renew(&mut self, links: &mut Links, slot: u32) {
        let credit = links.credit(slot);
        let granules = self.remove(links, slot);
        self.push(links, slot, granules);
        links.set_credit(slot, credit);
    }

    /// Evicts the oldest slot that is not pinned, however much it was used. Looks at each once; those that it
    /// passes over move to the new end.
    pub(super) fn evict_oldest(&mut self, links: &mut Links, slots: &mut dyn Slots) -> Option<u32> {
        for _ in 0..self.len {
            let slot = self.oldest()?;
            if slots.try_evict(slot) {
                self.remove(links, slot);
                return Some(slot);
            }
            self.renew(links, slot);
        }
        None
    }

    pub(super) fn validate(&self, links: &Links) {
        let (mut before, mut at, mut len, mut granules) = (NONE, self.oldest, 0, 0);
        while at != NONE {
            let node = links.nodes[at as usize];
            assert_eq!((node.older, node.queue), (before, self.name), "slot {at}");
            assert!(node.credit <= super::HITS_MAX, "slot {at}");
            len += 1;
            assert!(len <= self.len, "the queue has more slots than it counted, or is a ring");
            granules += u64::from(node.granules);
            (before, at) = (at, node.newer);
        }
        assert_eq!((before, len, granules), (self.newest, self.len, self.granules));
    }
}
