//! The writer's side of the table: the shard thread, alone, moves slots between phases.

use super::free::FreeSlots;
use super::{Phase, Pin, State, Table, WakeOn};
use crate::sync::{Arc, Ordering, fence};

/// What [`Writer::evict`] and [`Writer::condemn`] did.
#[derive(Debug)]
pub(crate) enum Evict<E> {
    /// The slot is free again and this was its entry.
    Freed(E),
    /// Pins keep it. After `evict` it is as ready as before; after `condemn` it comes back through
    /// [`Writer::reclaim`] when the last pin goes.
    Pinned,
}

/// The one handle that writes a [`Table`]. Not `Clone`; moves to the shard's thread and stays there.
pub(crate) struct Writer<E> {
    table: Arc<Table<E>>,
    free: FreeSlots,
    /// Hash under which each slot is linked; meaningless for slots that are not.
    hashes: Box<[u64]>,
    condemned: u32,
}

impl<E> Writer<E> {
    pub(super) fn new(table: Arc<Table<E>>) -> Self {
        let slots = table.slots.len() as u32;
        Self { table, free: FreeSlots::all(slots), hashes: vec![0; slots as usize].into(), condemned: 0 }
    }

    /// The readers' side.
    pub(crate) fn table(&self) -> &Arc<Table<E>> {
        &self.table
    }

    /// Slots that are neither reserved, ready nor condemned.
    pub(crate) fn free_slots(&self) -> u32 {
        self.free.len() as u32
    }

    /// Slots that left the index while pinned and have not come back.
    pub(crate) fn condemned_slots(&self) -> u32 {
        self.condemned
    }

    /// Takes a free slot, `Free` → `Filling`, for an entry of this hash: its home if that is free, for readers
    /// look there first. `None` if there is none; evict one.
    pub(crate) fn reserve(&mut self, hash: u64) -> Option<u32> {
        let slot = self.free.take(self.table.home(hash))?;
        let state = self.state(slot);
        debug_assert_eq!((state.phase(), state.pins()), (Phase::Free, 0));
        // Relaxed: readers cannot act on a slot that is not `Ready`.
        self.store(slot, state.with_phase(Phase::Filling), Ordering::Relaxed);
        Some(slot)
    }

    /// Gives a reserved slot back unused: `Filling` → `Free`.
    pub(crate) fn cancel(&mut self, slot: u32) {
        let state = self.state(slot);
        assert_eq!(state.phase(), Phase::Filling);
        self.store(slot, state.freed(), Ordering::Relaxed);
        self.free.put_back(slot);
    }

    /// Publishes a reserved slot, `Filling` → `Ready`, with `pins` pins taken for those who wait for it.
    ///
    /// With `replacing`, the index entry of that slot is turned over to this one in a single store: readers
    /// find the old or the new value, never neither. The caller condemns the old slot next.
    pub(crate) fn publish(
        &mut self,
        slot: u32,
        hash: u64,
        entry: E,
        pins: u32,
        replacing: Option<u32>,
    ) -> Vec<Pin> {
        let state = self.state(slot);
        assert_eq!(state.phase(), Phase::Filling);
        let cell = &self.table.slots[slot as usize];
        cell.entry.with_mut(|place| {
            // SAFETY: the slot is `Filling`: no pin exists and none can be taken, and this is the only writer.
            unsafe { *place = Some(entry) }
        });
        cell.hits.store(0, Ordering::Relaxed);
        self.hashes[slot as usize] = hash;
        // Release: the entry, and the value's bytes that the shard received or the putter copied (and
        // handed to the shard through a queue), are visible to whoever acquires a pin.
        self.store(slot, State::new(state.generation(), Phase::Ready, pins), Ordering::Release);
        match replacing {
            Some(old) => self.table.index.replace(hash, old, slot),
            None => self.table.index.insert(hash, slot),
        }
        (0..pins).map(|_| Pin { slot }).collect()
    }

    /// Takes a ready slot without pins out of circulation: `Ready` → `Free`.
    pub(crate) fn evict(&mut self, slot: u32) -> Evict<E> {
        let state = self.state(slot);
        if state.phase() != Phase::Ready || state.pins() != 0 {
            return Evict::Pinned;
        }
        // Acquire on success: pairs with the readers' releases, so their last reads of the bytes happen
        // before anything this thread writes there. Failure: somebody pinned it meanwhile.
        let taken = self.table.slots[slot as usize]
            .state
            .compare_exchange(state.0, state.freed().0, Ordering::Acquire, Ordering::Relaxed)
            .is_ok();
        if !taken {
            return Evict::Pinned;
        }
        self.table.index.remove(self.hashes[slot as usize], slot);
        Evict::Freed(self.take(slot))
    }

    /// Refuses new pins from now on and unlinks the slot. Freed at once if it has none.
    ///
    /// When this returns no reader can newly pin the slot. `unlink` is false when `publish` already turned
    /// its index entry over to a successor.
    pub(crate) fn condemn(&mut self, slot: u32, unlink: bool) -> Evict<E> {
        if unlink {
            self.table.index.remove(self.hashes[slot as usize], slot);
        }
        let word = &self.table.slots[slot as usize].state;
        let mut seen = self.state(slot);
        loop {
            assert_eq!(seen.phase(), Phase::Ready);
            let next = if seen.pins() == 0 { seen.freed() } else { seen.with_phase(Phase::Condemned) };
            // Acquire: as in `evict`, when there are no pins. With pins, the queue does it.
            match word.compare_exchange_weak(seen.0, next.0, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) if seen.pins() == 0 => return Evict::Freed(self.take(slot)),
                Ok(_) => {
                    self.condemned += 1;
                    return Evict::Pinned;
                }
                Err(now) => seen = State(now),
            }
        }
    }

    /// Takes back one condemned slot whose last pin went.
    pub(crate) fn reclaim(&mut self) -> Option<(u32, E)> {
        let slot = self.table.returned.pop()?;
        let state = self.state(slot);
        assert_eq!((state.phase(), state.pins()), (Phase::Condemned, 0));
        // Relaxed: the queue ordered the last reader before this; nobody else looks at the word.
        self.store(slot, state.freed(), Ordering::Relaxed);
        self.condemned -= 1;
        Some((slot, self.take(slot)))
    }

    /// Says which pins the shard waits for. After asking for more than it did before, the shard must look once
    /// more for something to evict or reclaim before it sleeps: from then on every such release wakes it.
    pub(crate) fn set_wake_on(&self, wake_on: WakeOn) {
        self.table.wake_on.store(wake_on as u8, Ordering::Relaxed);
        if wake_on != WakeOn::Nothing {
            // Pairs with the fence in `Table::release`.
            fence(Ordering::SeqCst);
        }
    }

    /// Pins a slot on behalf of somebody: as a reader would, on the writer's thread.
    pub(crate) fn pin(&self, slot: u32) -> Option<Pin> {
        self.table.try_pin(slot)
    }

    /// The ready slot of this hash whose entry `matches`. The writer needs no pin to look.
    pub(crate) fn lookup(&self, hash: u64, matches: impl Fn(&E) -> bool) -> Option<u32> {
        self.table.index.find(hash, |slot| self.peek(slot).is_some_and(&matches).then_some(slot))
    }

    /// The entry of a slot, if it is ready or condemned.
    pub(crate) fn peek(&self, slot: u32) -> Option<&E> {
        self.table.slots[slot as usize].entry.with(|entry| {
            // SAFETY: only this handle writes entries, and `&self` keeps it from doing so meanwhile.
            unsafe { (*entry).as_ref() }
        })
    }

    /// Pins of a slot at this moment.
    pub(crate) fn pins(&self, slot: u32) -> u32 {
        self.state(slot).pins()
    }

    /// True if readers can find and pin the slot.
    pub(crate) fn is_ready(&self, slot: u32) -> bool {
        self.state(slot).phase() == Phase::Ready
    }

    /// Hits since the last call, saturating; clears the count.
    pub(crate) fn take_hits(&self, slot: u32) -> u8 {
        let hits = &self.table.slots[slot as usize].hits;
        let seen = hits.load(Ordering::Relaxed);
        if seen != 0 {
            hits.store(0, Ordering::Relaxed);
        }
        seen
    }

    fn take(&mut self, slot: u32) -> E {
        let entry = self.table.slots[slot as usize].entry.with_mut(|place| {
            // SAFETY: the slot has just become `Free` by a transition that saw no pins and ordered every
            // former reader before it; no new pin can be taken; this is the only writer.
            unsafe { (*place).take() }
        });
        self.free.put_back(slot);
        match entry {
            Some(entry) => entry,
            None => unreachable!("a slot that was ready has an entry"),
        }
    }

    fn state(&self, slot: u32) -> State {
        // Relaxed: phases are this thread's own stores; pins are a hint that a compare-and-swap confirms.
        State(self.table.slots[slot as usize].state.load(Ordering::Relaxed))
    }

    fn store(&self, slot: u32, state: State, ordering: Ordering) {
        self.table.slots[slot as usize].state.store(state.0, ordering);
    }

    /// Checks what must hold between operations; for tests.
    #[cfg(any(test, loom))]
    pub(crate) fn validate(&self) {
        let mut free = vec![false; self.table.slots.len()];
        for slot in self.free.iter() {
            assert!(!std::mem::replace(&mut free[slot as usize], true), "slot {slot} is free twice");
        }
        for (slot, &free) in free.iter().enumerate() {
            let slot = slot as u32;
            let state = self.state(slot);
            assert_eq!(free, state.phase() == Phase::Free, "slot {slot}");
            let has_entry = self.peek(slot).is_some();
            assert_eq!(has_entry, matches!(state.phase(), Phase::Ready | Phase::Condemned), "slot {slot}");
            if state.phase() == Phase::Ready {
                let hash = self.hashes[slot as usize];
                let linked = self.table.index.find(hash, |found| (found == slot).then_some(()));
                assert!(linked.is_some(), "ready slot {slot} is not linked");
            }
        }
    }
}
