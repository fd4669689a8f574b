//! A table of the simplest kind.

use super::{HITS_MAX, Slots};

#[derive(Clone)]
pub(super) struct Fake {
    hits: Vec<u8>,
    pinned: Vec<bool>,
    /// Calls of `take_hits`.
    pub(super) looks: usize,
    /// Calls of `try_evict`.
    pub(super) tries: usize,
}

impl Fake {
    pub(super) fn new(slots: u32) -> Self {
        Self { hits: vec![0; slots as usize], pinned: vec![false; slots as usize], looks: 0, tries: 0 }
    }

    /// A new value: the table starts its count anew.
    pub(super) fn published(&mut self, slot: u32) {
        self.hits[slot as usize] = 0;
    }

    pub(super) fn hit(&mut self, slot: u32) {
        let hits = &mut self.hits[slot as usize];
        *hits = (*hits + 1).min(HITS_MAX);
    }

    pub(super) fn pin(&mut self, slot: u32) {
        self.pinned[slot as usize] = true;
    }

    pub(super) fn unpin(&mut self, slot: u32) {
        self.pinned[slot as usize] = false;
    }

    pub(super) fn is_pinned(&self, slot: u32) -> bool {
        self.pinned[slot as usize]
    }
}

impl Slots for Fake {
    fn take_hits(&mut self, slot: u32) -> u8 {
        self.looks += 1;
        std::mem::take(&mut self.hits[slot as usize])
    }

    fn try_evict(&mut self, slot: u32) -> bool {
        self.tries += 1;
        !self.pinned[slot as usize]
    }
}
