//! The table: slots that many threads look up and pin while one thread, the shard, writes.
//!
//! It maps a key's hash to an entry of any type `E` and keeps the entry in place while it is pinned. It
//! does not know what an entry is, where its bytes lie, or who waits for it: that is what lets loom run
//! this very code (`loom_tests.rs`).
//!
//! * Readers ([`Table`], any thread): [`Table::acquire`] pins a ready entry, [`Table::release`] unpins it.
//!   No lock, no system call, no allocation; a failed compare-and-swap is retried only when another
//!   thread pinned or unpinned the same slot in between.
//! * The writer ([`Writer`], one per table): reserves, publishes, evicts and condemns.
//!
//! What was promised about leases follows from two facts of the state word (`state.rs`): a pin can only
//! be taken while the slot is `Ready`, and the writer can only take a slot out of circulation with a
//! compare-and-swap that saw no pins, or condemn it, after which the pins can but fall.

mod free;
mod index;
mod lines;
#[cfg(loom)]
mod loom_tests;
mod state;
#[cfg(all(test, not(loom)))]
mod tests;
mod writer;

pub(crate) use writer::{Evict, Writer};

use crate::sync::{
    Arc, ArrayQueue, AtomicU8, AtomicU64, Ordering, UnsafeCell, fence, fence_after_read_modify_write,
    prefetch_line,
};
use index::Index;
use lines::Lines;
use state::{ONE_PIN, PINS_MAX, Phase, State};

/// Hits that a slot counts for its policy; more are not told apart.
pub(crate) const HITS_MAX: u8 = 3;

/// Size of a cache line, to which slots are aligned.
const LINE_BYTES: usize = 64;

/// One slot. Aligned to a cache line so that pinning one value does not slow readers of another.
#[repr(align(64))]
struct Slot<E> {
    state: AtomicU64,
    /// Hits since the policy last asked, saturating at [`HITS_MAX`]. A hint: lost updates are harmless.
    hits: AtomicU8,
    entry: UnsafeCell<Option<E>>,
}

/// A pinned slot. Whoever holds one must give it back with [`Table::release`], once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pin that is not released keeps its slot for ever"]
pub(crate) struct Pin {
    slot: u32,
}

/// The readers' side. See the module's documentation.
pub(crate) struct Table<E> {
    slots: Lines<Slot<E>>,
    index: Index,
    /// Condemned slots whose last pin went, on their way back to the shard. Each slot is in it at most
    /// once, and its capacity is the number of slots: a push never fails.
    returned: ArrayQueue<u32>,
    /// Which releases the shard waits for: a [`WakeOn`].
    wake_on: AtomicU8,
    /// Wakes the shard; called by the release that it may wait for.
    wake: Wake,
}

/// Which releases of pins wake the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeOn {
    /// None: it will look by itself.
    Nothing = 0,
    /// The last release of a condemned slot: it waits for memory that cannot be found any more.
    Condemned = 1,
    /// Every last release: it found nothing to evict and waits for anything.
    Anything = 2,
}

/// How a release wakes the shard.
pub(crate) type Wake = Box<dyn Fn() + Send + Sync>;

// SAFETY: `entry` is the only part that is not `Sync` by itself. It is written only by the `Writer` while
// the slot is `Free` or `Filling` (no pins exist, readers do not look), and read by others only under a
// pin, which they take with an acquiring compare-and-swap that saw `Ready`. So `E` is shared by reference
// between threads (`Sync`) and moved from the writer's thread to whoever drops the table (`Send`).
unsafe impl<E: Send + Sync> Sync for Table<E> {}
// SAFETY: as above; owning a table is owning its entries.
unsafe impl<E: Send + Sync> Send for Table<E> {}

impl<E> Table<E> {
    /// A table of `slots` slots and the one handle that may write it. `wake` is called on readers' threads,
    /// only while the writer asks for it ([`Writer::set_wake_on`]); it must not block.
    pub(crate) fn new(slots: u32, wake: Wake) -> (Arc<Self>, Writer<E>) {
        assert!(slots > 0 && slots < u32::MAX, "a table has 1 to 2^32 - 2 slots");
        let table = Arc::new(Self {
            slots: Lines::new(slots as usize, || Slot {
                state: AtomicU64::new(State::new(0, Phase::Free, 0).0),
                hits: AtomicU8::new(0),
                entry: UnsafeCell::new(None),
            }),
            index: Index::new(slots),
            returned: ArrayQueue::new(slots as usize),
            wake_on: AtomicU8::new(WakeOn::Nothing as u8),
            wake,
        });
        let writer = Writer::new(table.clone());
        (table, writer)
    }

    /// Bytes that a table of `slots` slots takes, entries' own heap memory aside.
    pub(crate) fn bytes_for(slots: u32) -> usize {
        Lines::<Slot<E>>::bytes_for(slots as usize)
            + slots as usize * (2 * size_of::<usize>() + size_of::<u64>() + 3 * size_of::<u32>())
            + Index::bytes_for(slots)
    }

    /// Number of slots.
    pub(crate) fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Pins the ready entry of this hash that `matches`, and counts a hit for the policy.
    ///
    /// Any thread; never blocks. `matches` is called on pinned entries only and must compare the whole key.
    #[inline]
    pub(crate) fn acquire(&self, hash: u64, matches: impl Fn(&E) -> bool) -> Option<Pin> {
        let pin = self.find(hash, matches)?;
        let hits = &self.slots[pin.slot as usize].hits;
        // Relaxed load and store instead of an add: saturating, and no locked instruction. Two threads may
        // count one hit; see `hits`.
        let seen = hits.load(Ordering::Relaxed);
        if seen < HITS_MAX {
            hits.store(seen + 1, Ordering::Relaxed);
        }
        Some(pin)
    }

    /// Asks for the lines that a lookup of this hash will read; for those who have other work meanwhile.
    #[inline]
    pub(crate) fn prefetch_lookup(&self, hash: u64) {
        self.index.prefetch(hash);
        self.prefetch(self.home(hash));
    }

    /// [`Table::acquire`] without counting a hit.
    #[inline]
    pub(crate) fn find(&self, hash: u64, matches: impl Fn(&E) -> bool) -> Option<Pin> {
        // Most entries are in the home slot of their hash: it comes while the index is read, not after.
        self.prefetch(self.home(hash));
        self.index.find(hash, |slot| {
            let pin = self.try_pin(slot)?;
            if matches(self.entry(&pin)) {
                return Some(pin);
            }
            // A stale candidate, or another key of the same tag.
            self.release(pin);
            None
        })
    }

    /// The entry under a pin.
    #[inline]
    pub(crate) fn entry<'p>(&'p self, pin: &'p Pin) -> &'p E {
        self.slots[pin.slot as usize].entry.with(|entry| {
            // SAFETY: the pin was taken on a `Ready` slot with acquire ordering, so the writer's store of
            // `Some` is visible, and until the pin is released the writer neither writes nor drops it.
            match unsafe { &*entry } {
                Some(entry) => entry,
                None => unreachable!("a ready slot has an entry"),
            }
        })
    }

    /// Identity of the pinned slot: its number and generation. A slot that is reused has another one.
    pub(crate) fn identity(&self, pin: &Pin) -> (u32, u32) {
        // Relaxed: the generation cannot change while the pin is held.
        (pin.slot, State(self.slots[pin.slot as usize].state.load(Ordering::Relaxed)).generation())
    }

    /// Gives a pin back. Any thread; never blocks.
    #[inline]
    pub(crate) fn release(&self, pin: Pin) {
        let slot = &self.slots[pin.slot as usize];
        // Release: everything this reader did with the bytes happens before the writer, which acquires the
        // word when it takes the slot, reuses them. Pins of other readers in between are read-modify-writes
        // and so continue the release sequence.
        let before = State(slot.state.fetch_sub(ONE_PIN, Ordering::Release));
        debug_assert!(before.pins() > 0, "released a pin that was not held");
        if before.pins() > 1 {
            return;
        }
        // The shard stores `wake_on` and then looks for slots without pins (and for returned ones); this thread
        // gave up the pin (and pushed), and then looks at `wake_on`. With a full fence between the two steps
        // on both sides at least one sees the other.
        let enough = if before.phase() == Phase::Condemned {
            // Acquire: the pins that were released before this one must happen before the shard, which gets
            // the slot from this thread through the queue, reuses the bytes.
            fence(Ordering::Acquire);
            if self.returned.push(pin.slot).is_err() {
                unreachable!("a condemned slot has one last pin, and the queue holds every slot");
            }
            fence(Ordering::SeqCst);
            WakeOn::Condemned
        } else {
            fence_after_read_modify_write();
            WakeOn::Anything
        };
        // Relaxed: the fences order it.
        if self.wake_on.load(Ordering::Relaxed) >= enough as u8 {
            (self.wake)();
        }
    }

    /// The slot in which an entry of this hash should stand, so that readers can ask for it before they know.
    /// A preference, nothing more: where an entry does stand, the index says.
    #[inline]
    fn home(&self, hash: u64) -> u32 {
        // The low half as a fraction of 2^32, times the number of slots. (Buckets go by its lowest bits.)
        ((u64::from(hash as u32) * u64::from(self.slot_count())) >> 32) as u32
    }

    /// Asks for all lines of a slot at once: no load passes the compare-and-swap on the first.
    #[inline]
    fn prefetch(&self, slot: u32) {
        let slot = &raw const self.slots[slot as usize];
        for line in 0..size_of::<Slot<E>>() / LINE_BYTES {
            prefetch_line(slot.cast::<u8>().wrapping_add(line * LINE_BYTES));
        }
    }

    #[inline]
    fn try_pin(&self, slot: u32) -> Option<Pin> {
        self.prefetch(slot);
        let state = &self.slots[slot as usize].state;
        // Relaxed: only a guess for the compare-and-swap below.
        let mut seen = State(state.load(Ordering::Relaxed));
        loop {
            if seen.phase() != Phase::Ready || seen.pins() == PINS_MAX {
                return None;
            }
            // Acquire on success: pairs with the release of `publish`, so the entry and the bytes it
            // describes are visible. Weak: a spurious failure only goes round once more.
            match state.compare_exchange_weak(seen.0, seen.0 + ONE_PIN, Ordering::Acquire, Ordering::Relaxed)
            {
                Ok(_) => return Some(Pin { slot }),
                Err(now) => seen = State(now),
            }
        }
    }
}
