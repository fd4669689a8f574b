//! The shard's memory: slots, extents and eviction order kept in step. No I/O.

use super::ledger::Ledger;
use super::request::Scope;
use super::value::Value;
use crate::key::{Key, Namespace, OwnedKey};
use crate::memory::{ExtentAllocator, ExtentList, GRANULE_BYTES, granules_for};
use crate::policy::{Policy, Slots};
use crate::stats::ShardCounters;
use crate::table::{Evict, Pin, WakeOn, Writer};
use std::collections::HashMap;
use std::time::Instant;

#[path = "store_blocks.rs"]
mod blocks;
#[path = "store_quota.rs"]
mod quota;

/// Room for one value: a reserved slot and its extents. Must go back through [`Store`].
#[must_use = "room that is not published or cancelled is lost"]
pub(crate) struct Room {
    pub(crate) slot: u32,
    pub(crate) extents: ExtentList,
    pub(crate) namespace: Namespace,
}

/// Why there is no room.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// The value is larger than the arena.
    Never,
    /// What could be evicted was not enough: wait for a pin to go.
    Pinned,
    /// The value is larger than what its namespace may have.
    NeverInQuota,
    /// The namespace's quota is full, and what could be evicted of it was not enough: wait for one of its pins to go.
    PinnedInQuota,
}

pub(crate) struct Store {
    writer: Writer<Value>,
    extents: ExtentAllocator,
    policy: Box<dyn Policy>,
    ledger: Ledger,
    /// Room that callers are writing, by slot, with the hash and key it will be published under.
    reserved: HashMap<u32, (u64, OwnedKey, Room, u64)>,
    starved: bool,
}

impl Store {
    pub(crate) fn new(writer: Writer<Value>, extents: ExtentAllocator, policy: Box<dyn Policy>, ledger: Ledger) -> Self {
        Self { writer, extents, policy, ledger, reserved: HashMap::new(), starved: false }
    }

    /// Bytes that values can have together: without what a resize is taking out.
    pub(crate) fn arena_bytes(&self) -> u64 {
        u64::from(self.extents.total_granules()) * GRANULE_BYTES as u64
    }

    fn used_bytes(&self) -> u64 {
        u64::from(self.extents.used_granules()) * GRANULE_BYTES as u64
    }

    /// Bytes that neither are free nor can be evicted now: pinned values, fills and reservations.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let evictable: u64 = (0..self.slots())
            .filter(|&slot| self.writer.is_ready(slot) && self.writer.pins(slot) == 0)
            .filter_map(|slot| self.writer.peek(slot))
            .map(|value| granules_for(value.len) * GRANULE_BYTES as u64)
            .sum();
        self.used_bytes().saturating_sub(evictable)
    }

    fn slots(&self) -> u32 {
        self.writer.table().slot_count()
    }

    /// Room for a value of `len` bytes whose key has this hash: where the namespace's quota wants it, by evicting of the
    /// same namespace; then as the policy says.
    pub(crate) fn reserve(
        &mut self,
        hash: u64,
        namespace: Namespace,
        len: u64,
        counters: &ShardCounters,
    ) -> Result<Room, NoRoom> {
        if len > self.arena_bytes() {
            return Err(NoRoom::Never);
        }
        // Fits: at most as many granules as the arena has, which are counted in 32 bits.
        let granules = granules_for(len) as u32;
        self.reclaim(counters);
        match self.try_reserve(hash, namespace, granules, counters) {
            Err(NoRoom::Pinned | NoRoom::PinnedInQuota) if !self.starved => {
                // Announce the need, then look once more: see `Writer::set_wake_on`.
                self.starved = true;
                self.ask_to_be_woken();
                counters.starvations.add(1);
                self.reclaim(counters);
                self.try_reserve(hash, namespace, granules, counters)
            }
            result => result,
        }
    }

    fn try_reserve(
        &mut self,
        hash: u64,
        namespace: Namespace,
        granules: u32,
        counters: &ShardCounters,
    ) -> Result<Room, NoRoom> {
        self.make_way(namespace, u64::from(granules), counters)?;
        while self.writer.free_slots() == 0 || self.extents.free_granules() < granules {
            self.evict_one(counters).ok_or(NoRoom::Pinned)?;
        }
        let extents = match granules {
            // The empty value needs a slot and nothing else.
            0 => ExtentList::default(),
            _ => self.extents.allocate(granules).ok_or(NoRoom::Pinned)?,
        };
        let Some(slot) = self.writer.reserve(hash) else {
            self.extents.free(&extents);
            return Err(NoRoom::Pinned);
        };
        self.ledger.took(namespace, u64::from(granules));
        self.ledger.date(slot, Instant::now());
        self.gauge(counters);
        Ok(Room { slot, extents, namespace })
    }

    /// Nobody waits for room any longer.
    pub(crate) fn sated(&mut self) {
        if self.starved {
            self.starved = false;
            self.ask_to_be_woken();
        }
    }

    fn ask_to_be_woken(&self) {
        self.writer.set_wake_on(match () {
            () if self.starved => WakeOn::Anything,
            // What is in use in retiring blocks is condemned, or comes back with a bell of its own.
            () if self.extents.retiring_blocks() > 0 => WakeOn::Condemned,
            () => WakeOn::Nothing,
        });
    }

    fn evict_one(&mut self, counters: &ShardCounters) -> Option<()> {
        let mut eviction = Eviction { writer: &mut self.writer, freed: None };
        let slot = self.policy.evict(&mut eviction)?;
        // The policy names a slot only if `try_evict` freed it.
        let value = eviction.freed?;
        self.evicted(slot, value, counters);
        Some(())
    }

    fn evicted(&mut self, slot: u32, value: Value, counters: &ShardCounters) {
        counters.evictions.add(1);
        counters.evicted_bytes.add(value.len);
        self.ledger.left(slot, value.key.namespace);
        self.forget(value, counters);
    }

    fn forget(&mut self, value: Value, counters: &ShardCounters) {
        counters.entries.sub(1);
        counters.value_bytes.sub(value.len);
        self.free(&value);
        self.gauge(counters);
    }

    fn free(&mut self, value: &Value) {
        self.extents.free(&value.extents);
        self.ledger.gave_back(value.key.namespace, granules_for(value.len));
    }

    fn gauge(&self, counters: &ShardCounters) {
        counters.used_bytes.set(self.used_bytes());
        self.gauge_blocks(counters);
        counters.condemned.set(u64::from(self.writer.condemned_slots()));
        counters.reservations.set(self.reserved.len() as u64);
    }

    /// Gives room back unused.
    pub(crate) fn cancel(&mut self, room: Room, counters: &ShardCounters) {
        self.writer.cancel(room.slot);
        self.extents.free(&room.extents);
        let granules = room.extents.iter().map(|extent| u64::from(extent.len)).sum();
        self.ledger.gave_back(room.namespace, granules);
        self.gauge(counters);
    }

    /// Takes in the slots whose last lease ended after they were condemned.
    pub(crate) fn reclaim(&mut self, counters: &ShardCounters) {
        let mut some = false;
        while let Some((_, value)) = self.writer.reclaim() {
            self.free(&value);
            some = true;
        }
        if some {
            self.gauge(counters);
        }
    }

    pub(crate) fn lookup(&self, hash: u64, key: Key<'_>) -> Option<u32> {
        self.writer.lookup(hash, |value| value.is(key))
    }

    pub(crate) fn pin(&self, slot: u32) -> Option<Pin> {
        self.writer.pin(slot)
    }

    /// Publishes a value in place of what its key held, with `pins` pins for those who wait. With `keep`
    /// false it is condemned at once: the pins see it, later lookups do not.
    pub(crate) fn publish(
        &mut self,
        slot: u32,
        hash: u64,
        value: Value,
        pins: u32,
        keep: bool,
        counters: &ShardCounters,
    ) -> Vec<Pin> {
        let old = self.lookup(hash, value.key.borrow());
        let granules = granules_for(value.len).max(1) as u32;
        let len = value.len;
        // What was under way while its block was taken out goes with it.
        let keep = keep && !self.is_retiring(&value.extents);
        value.set_dated(self.ledger.publishing(slot, value.key.namespace));
        let pins = self.writer.publish(slot, hash, value, pins, old);
        self.policy.inserted(slot, granules, hash);
        counters.entries.add(1);
        counters.value_bytes.add(len);
        if let Some(old) = old {
            counters.invalidated.add(1);
            self.condemn(old, false, counters);
        }
        if !keep {
            self.condemn(slot, true, counters);
        }
        self.gauge(counters);
        pins
    }

    fn condemn(&mut self, slot: u32, unlink: bool, counters: &ShardCounters) {
        self.policy.removed(slot);
        let (len, namespace) =
            self.writer.peek(slot).map_or((0, Namespace::DEFAULT), |value| (value.len, value.key.namespace));
        self.ledger.left(slot, namespace);
        match self.writer.condemn(slot, unlink) {
            Evict::Freed(value) => self.forget(value, counters),
            Evict::Pinned => {
                counters.entries.sub(1);
                counters.value_bytes.sub(len);
                self.gauge(counters);
            }
        }
    }

    /// Forgets what `scope` covers. No lookup that starts after this finds it; leases keep it.
    pub(crate) fn invalidate(&mut self, scope: &Scope, counters: &ShardCounters) -> u64 {
        let found: Vec<u32> = match scope {
            Scope::Key(hash, key) => self.lookup(*hash, key.borrow()).into_iter().collect(),
            Scope::Namespace(namespace) => self.ledger.oldest_first(*namespace).collect(),
            _ => (0..self.slots())
                .filter(|&slot| self.writer.is_ready(slot))
                .filter(|&slot| self.writer.peek(slot).is_some_and(|v| scope.covers(v.key.borrow())))
                .collect(),
        };
        for &slot in &found {
            self.condemn(slot, true, counters);
        }
        counters.invalidated.add(found.len() as u64);
        found.len() as u64
    }

    /// Hands room to a caller to write.
    pub(crate) fn lend(&mut self, hash: u64, key: OwnedKey, room: Room, len: u64, counters: &ShardCounters) {
        self.reserved.insert(room.slot, (hash, key, room, len));
        self.gauge(counters);
    }

    /// Takes back room that a caller wrote or gave up.
    pub(crate) fn take_back(&mut self, slot: u32) -> Option<(u64, OwnedKey, Room, u64)> {
        self.reserved.remove(&slot)
    }

    /// Checks that slots, extents and policy agree; for tests.
    #[cfg(test)]
    pub(crate) fn validate(&self) {
        self.writer.validate();
        self.extents.validate();
        self.policy.validate();
        let ready = (0..self.slots()).filter(|&slot| self.writer.is_ready(slot)).count();
        assert_eq!(self.policy.len(), ready);
        self.validate_namespaces();
    }
}

/// The policy's view of the table during one eviction.
struct Eviction<'a> {
    writer: &'a mut Writer<Value>,
    freed: Option<Value>,
}

impl Slots for Eviction<'_> {
    fn take_hits(&mut self, slot: u32) -> u8 {
        self.writer.take_hits(slot)
    }

    fn try_evict(&mut self, slot: u32) -> bool {
        match self.writer.evict(slot) {
            Evict::Freed(value) => {
                self.freed = Some(value);
                true
            }
            Evict::Pinned => false,
        }
    }
}
